"""A model that cannot be loaded is refused before anything is loaded; small models run in fp32 on a CPU."""

from __future__ import annotations

import json
import time

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.engines.preflight import check_checkpoint, default_dtype
from patchclamp.testing import FakeEngine

CONFIG = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 8, "dtype": "bfloat16"}


def folder(tmp_path, config=CONFIG, weights: bool = True, tokenizer: bool = True, **more):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps({**config, **more}))
    if weights:
        save_file({"w": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize(
    "model",
    ["smolm2", "transformers", "x" * 5000, "a\0b", "localhost:8123", "/no/such/folder", "./nothing", "two words", "", None, 5,
     FakeEngine(), torch.nn.Linear(2, 2)],
    ids=lambda wrong: repr(wrong) if wrong is None or isinstance(wrong, (str, int)) else type(wrong).__name__,
)  # fmt: skip
def test_no_such_model(model, engine, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits before it asks again"))
    with pytest.raises(pc.ModelError) as raised:
        pc.LM(model, engine)
    assert raised.value.path == "model"


def test_a_name_that_no_hub_answers_for(monkeypatch):
    import httpx
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", lambda *_, **__: (_ for _ in ()).throw(httpx.ConnectError("away")))
    with pytest.raises(pc.ModelError, match="hub"):
        pc.LM("nobody/nothing-at-all", "transformers")
    monkeypatch.setattr(httpx, "head", lambda *_, **__: httpx.Response(404))
    with pytest.raises(pc.ModelError, match="hub has no"):
        pc.LM("nobody/nothing-at-all", "transformers")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://", "http://h:99999"])
def test_a_server_that_is_not_there(url):
    with pytest.raises(pc.ModelError) as raised:
        pc.LM(url)
    assert raised.value.path == "model"


def test_no_such_device(tmp_path):
    for device in ("cuda:99", "gpu", "meta", "xpu", "mps"):
        with pytest.raises(pc.ModelError) as raised:
            pc.LM(folder(tmp_path), "transformers", device=device)
        assert raised.value.path == "device"


@pytest.mark.parametrize(
    ("parts", "keyword"),
    [({"config": "{nope"}, "config.json"), ({"weights": False}, "weights"), ({"tokenizer": False}, "tokenizer")],
)
def test_a_folder_with_a_part_missing(tmp_path, parts, keyword):
    with pytest.raises(pc.ModelError, match=keyword):
        check_checkpoint(folder(tmp_path, **parts), {})


def test_a_folder_that_is_empty_cut_short_or_misspelt(tmp_path):
    with pytest.raises(pc.ModelError, match="empty"):
        check_checkpoint(str(tmp_path), {})
    path = tmp_path / "model"
    path.mkdir()
    whole = folder(path)
    check_checkpoint(whole, {})
    with pytest.raises(pc.ModelError, match="model"):
        check_checkpoint(str(tmp_path / "modle"), {})
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(pc.ModelError, match="damaged"):
        check_checkpoint(whole, {})


def test_options_that_make_a_part_unnecessary(tmp_path):
    path = folder(tmp_path, weights=False, tokenizer=False)
    check_checkpoint(path, {"load_format": "dummy", "skip_tokenizer_init": True})


def test_the_cache_is_read_where_the_options_say(tmp_path, monkeypatch):
    """A model of another revision, and one in another folder, in the layout of the hub's cache."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--org--m"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "v1").write_text("abc")
    where = {"download_dir": str(tmp_path)}
    check_checkpoint("org/m", {**where, "revision": "v1"})
    for options in ({}, where, {"revision": "v1"}):
        with pytest.raises(pc.ModelError, match="cache"):
            check_checkpoint("org/m", options)


def test_serve_reads_the_options_that_say_where_a_model_is(monkeypatch):
    pytest.importorskip("patchclamp.engines.vllm.server")
    resolved = {}
    monkeypatch.setattr("patchclamp.engines.resolve", lambda model, options: resolved.update(options) or model)
    monkeypatch.setattr("patchclamp.engines.vllm.server.run_server", lambda model, args: None)
    words = ["serve", "org/m", "--revision", "v1", "--download-dir=/models", "--skip-tokenizer-init"]
    assert CliRunner().invoke(app, words).exit_code == 0
    expected = {"revision": "v1", "download_dir": "/models", "skip_tokenizer_init": "--skip-tokenizer-init"}
    assert resolved == expected


@pytest.mark.parametrize(("words", "added"), [
    (["smollm2"], ["--served-model-name", "smollm2"]),
    (["smollm2", "--served-model-name", "mine"], []),
    (["smollm2", "--served_model_name=mine"], []),
    (["org/m"], []),
])  # fmt: skip
def test_the_demos_model_is_served_under_its_name(monkeypatch, words, added):
    pytest.importorskip("patchclamp.engines.vllm.server")
    given: list[str] = []
    monkeypatch.setattr("patchclamp.engines.resolve", lambda model, options: model)
    monkeypatch.setattr("patchclamp.engines.preflight.model_name", lambda model: model)
    monkeypatch.setattr("patchclamp.engines.vllm.server.run_server", lambda model, options: given.extend(options))
    assert CliRunner().invoke(app, ["serve", *words]).exit_code == 0
    assert given == [*words[1:], *added]


def test_small_models_run_in_fp32_on_a_cpu(tmp_path, caplog):
    path = folder(tmp_path)
    assert default_dtype(path) == "float32" == default_dtype(path)
    assert len([record for record in caplog.records if path in record.message]) == 1
    assert default_dtype(folder(tmp_path, quantization_config={})) is None
    assert default_dtype(folder(tmp_path, layer_types=["linear_attention"])) is None
    (tmp_path / "model.safetensors").unlink()
    assert default_dtype(folder(tmp_path, weights=False)) == "float32"
    assert default_dtype(folder(tmp_path, weights=False, hidden_size=4096, num_hidden_layers=32)) is None


@pytest.mark.parametrize("given", [[], ["--kv-cache-memory-bytes", "5"], ["--gpu_memory_utilization=0.5"]], ids=str)
def test_a_server_on_a_cpu_has_a_cache_that_fits(given, monkeypatch):
    launch = pytest.importorskip("patchclamp.engines.vllm.server")
    monkeypatch.setattr(launch.configuration, "available_bytes", lambda: 1 << 32)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    expected = [] if given or torch.cuda.is_available() else ["--kv-cache-memory-bytes", str(1 << 30)]
    assert launch._cache_size(given) == expected
