"""The doctor about vLLM: what it says of a running engine, and that it sees what is wrong."""

import copy
import importlib.metadata

import pytest

from patchclamp.doctor import Report
from patchclamp.engines.vllm import report
from patchclamp.engines.vllm.compat import seams


def test_a_running_engine_is_described(narrow):
    lm = narrow.get("vllm", "float32")
    found = {(finding.part, finding.name): finding for finding in lm.engine.report()}
    assert found["configuration", "runner"].detail == "V1"
    assert found["configuration", "numerics"].detail == "uniform"
    assert found["configuration", "dtype"].detail == "float32"
    assert found["configuration", "max_model_len"].detail == "512"
    assert found["configuration", "compilation"].detail == "eager"
    assert found["memory", "vectors (bank)"].detail == "256.0 MiB"
    assert found["graphs", "variants"].status == "note"
    assert "problem" not in {finding.status for finding in found.values()}


def test_every_seam_is_looked_at_and_one_that_moved_is_named(monkeypatch):
    assert {finding.status for finding in report.seams()} == {"ok"}
    moved = seams.Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.no_such_method", "begin a step", ("self",))
    changed = seams.Seam("vllm.v1.core.kv_cache_manager:KVCacheManager.free", "hold blocks", ("self, no_such_word",))
    monkeypatch.setattr(report, "SEAMS", [*seams.SEAMS, moved, changed])
    problems = {finding.name: finding for finding in report.seams() if finding.status == "problem"}
    assert problems.keys() == {"GPUModelRunner.no_such_method", "KVCacheManager.free"}
    assert "no_such_word" in problems["KVCacheManager.free"].detail
    assert problems["KVCacheManager.free"].advice == "install vLLM 0.32.0 or 0.33.0"


@pytest.mark.parametrize(("only", "status", "told"), [
    (None, "ok", "registered with vLLM"), ("patchclamp,other", "ok", "registered with vLLM"),
    ("other", "problem", "VLLM_PLUGINS='other'"),
])  # fmt: skip
def test_a_plugin_that_vllm_will_not_load_is_a_problem(monkeypatch, only, status, told):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if only is not None:
        monkeypatch.setenv("VLLM_PLUGINS", only)
    (found,) = [finding for finding in report.machine() if finding.name == "plugin"]
    assert found.status == status
    assert told in found.detail


def test_a_plugin_that_is_not_installed_is_a_problem(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    (found,) = [finding for finding in report.machine() if finding.name == "plugin"]
    assert found.status == "problem"
    assert found.advice.startswith("install patchclamp with pip")


def test_fusions_graphs_and_memory_of_a_gpu(narrow):
    config = copy.deepcopy(narrow.get("vllm", "float32").engine.config)
    config.additional_config["patchclamp"]["numerics"] = "stock"
    status = {
        "runner": "v2", "workers": 2, "fusions": {"AllReduceFusionPass": [8, 0], "RMSNormQuantFusionPass": [16, 16]},
        "active_graphs": 35, "idle_graphs": 35, "active_graphs_problem": "", "memory": {"tables": 3 << 20},
    }  # fmt: skip
    found = {finding.name: finding for finding in report.running(config, status)}
    assert (found["AllReduceFusionPass"].status, found["RMSNormQuantFusionPass"].status) == ("note", "ok")
    assert found["AllReduceFusionPass"].detail.startswith("0 matches with taps, 8 ")
    assert found["variants"].detail.startswith("35 ")
    assert found["tables"].detail == "3.0 MiB"
    config.additional_config["patchclamp"]["numerics"] = "uniform"
    uniform = {finding.name: finding for finding in report.running(config, status)}
    assert (found["numerics"].detail, uniform["numerics"].detail) == ("stock", "uniform")
    assert uniform["AllReduceFusionPass"].detail == "0 matches, with taps"
    full = report.running(config, {**status, "active_graphs": 0, "active_graphs_problem": "the GPU had no room"})
    (variants,) = [finding for finding in full if finding.name == "variants"]
    assert (variants.status, variants.detail) == ("note", "the GPU had no room")
    assert Report(tuple(full)).problems == ()
