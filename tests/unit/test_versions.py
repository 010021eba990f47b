"""The doctor about a vLLM that is not run: seams that are there, moved or gone, in folders and wheels."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchclamp.cli.study_commands import app
from patchclamp.engines.vllm import versions
from patchclamp.engines.vllm.compat.seams import SEAMS, Seam
from patchclamp.engines.vllm.versions import Source, read_source
from patchclamp.errors import EngineError

RUNNER, OTHER = "vllm/worker/runner.py", "vllm/engine/runner.py"
CODE = {
    "vllm/__init__.py": "from ._version import __version__\n",
    "vllm/_version.py": "__version__ = version = '9.9.9'\n",
    "vllm/worker/__init__.py": "from .runner import Runner as Renamed\nfrom vllm.worker.base import *\n",
    "vllm/worker/base.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from x import Typed\nclass Base:\n"
    " def __init__(self):\n  self.device = 1\n",
    RUNNER: "from vllm.worker import base\nclass Runner(base.Base):\n sizes: int\n"
    " def step(self, scheduler_output, *, dry=False): ...\n def end(self): ...\n"
    "def decorate(cls):\n cls.marked = True\n"
    "def __getattr__(name):\n if name == 'lazy':\n  return 1\n",
}  # fmt: skip
SEAMS_HERE = (
    Seam("version", "vllm", "know it", has="__version__"),
    Seam("runner", "vllm.worker.runner:Runner", "run", has="device sizes end later?"),
    Seam("step", "vllm.worker.runner:Runner.step", "run", ("scheduler_output", "dry")),
    Seam("by its other name", "vllm.worker:Renamed", "run", has="device step"),
    Seam("through a star", "vllm.worker:Base", "run", has="device"),
    Seam("decorator", "vllm.worker.runner:decorate", "mark", ("cls",), has="marked"),
    Seam("lazy", "vllm.worker.runner", "wait", has="lazy"),
)
everything = pytest.mark.parametrize("seam", SEAMS_HERE, ids=lambda seam: seam.name)


def found(seam: Seam, **changed: tuple[str, str]) -> tuple[str, str]:
    """A seam's status and detail, once texts of files, by their last names, are replaced."""
    code = dict(CODE)
    for file, (old, new) in changed.items():
        path = next(path for path in code if path.endswith(f"{file}.py") and old in code[path])
        code[path] = code[path].replace(old, new)
    status = versions.look_up(seam, Source(code))
    return status.status, status.detail


@everything
def test_what_is_there_is_found(seam):
    assert found(seam) == ("there", "")


def test_a_renamed_method_is_gone_with_what_is_near():
    status, detail = found(SEAMS_HERE[2], runner=("def step", "def steps"))
    assert (status, detail) == ("gone", "vllm.worker.runner:Runner has no step; near it: steps")


def test_a_parameter_that_is_not_taken():
    status, detail = found(SEAMS_HERE[2], runner=("scheduler_output", "output"))
    assert status == "moved"
    assert detail == "it takes no parameter scheduler_output; it takes self, output, dry"


def test_attributes_that_are_not_there():
    assert found(SEAMS_HERE[1], runner=("def end", "def finish")) == ("moved", "it has no end")
    assert found(SEAMS_HERE[1], base=("self.device", "device")) == ("moved", "it has no device")
    assert found(SEAMS_HERE[5], runner=("cls.marked", "marked")) == ("moved", "it has no marked")
    assert found(SEAMS_HERE[6], runner=("'lazy'", "'eager'")) == ("moved", "it has no lazy")
    inherited = ("class Runner(base.Base):", "class Stub:\n @abstractmethod\n def halt(self): ...\nclass Runner(Stub):")
    assert found(Seam("halt", "vllm.worker.runner:Runner.halt", "stop"), runner=inherited)[0] == "gone"
    assert found(Seam("halt", "vllm.worker.runner:Stub.halt", "stop"), runner=inherited)[0] == "there"
    assert found(SEAMS_HERE[0], _version=("__version__", "v")) == ("moved", "it has no __version__")


def test_a_class_or_a_module_that_is_elsewhere():
    status, detail = found(SEAMS_HERE[2], runner=("class Runner", "class Walker"))
    assert (status, detail) == ("gone", "vllm.worker.runner has no Runner")
    moved = {OTHER if path == RUNNER else path: text for path, text in CODE.items()}
    for seam, at in ((SEAMS_HERE[2], "vllm.engine.runner:Runner.step"), (SEAMS_HERE[6], "vllm.engine.runner")):
        status = versions.look_up(seam, Source(moved))
        assert (status.status, status.detail) == (
            "moved",
            f"there is no module vllm.worker.runner; it is at {at}",
        )


def test_what_is_there_for_type_checkers_alone_is_not_there():
    assert found(Seam("typed", "vllm.worker.base:Typed", "check types"))[0] == "gone"


@pytest.fixture(scope="module")
def installed() -> Path:
    pytest.importorskip("vllm", reason="its source is read")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def told(path: Path) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["doctor", "--vllm-source", str(path), "--json"])
    return done.exit_code, json.loads(done.output)


def test_the_installed_vllm_has_every_seam(installed):
    status, report = told(installed)
    assert {seam["name"]: seam["detail"] for seam in report["seams"] if seam["status"] != "there"} == {}
    assert (status, report["ok"], len(report["seams"])) == (0, True, len(SEAMS))
    assert report["version"].split("+")[0] in SEAMS["vllm"].checked


def test_a_wheel_with_three_changes(installed, tmp_path):
    """One seam renamed, one moved, one with another signature: these three and what hangs on them, and no other."""
    changes = {
        "v1/core/sched/scheduler.py": ("def schedule(self", "def plan_schedule(self"),
        "v1/core/kv_cache_manager.py": ("def get_computed_blocks(self, request:", "def get_computed_blocks(self, asked:"),
        "v1/worker/gpu_input_batch.py": ("", ""),
    }  # fmt: skip
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in installed.rglob("*.py"):
            name, text = file.relative_to(installed).as_posix(), file.read_text("utf-8")
            old, new = changes.get(name, ("", ""))
            assert old in text
            name = name.replace("v1/worker/gpu_input_batch.py", "v1/worker/batches.py")
            packed.writestr(f"vllm/{name}", text.replace(old, new))
    status, report = told(wheel)
    changed = {seam["name"]: (seam["status"], seam["detail"]) for seam in report["seams"] if seam["status"] != "there"}
    assert status == 1
    assert changed.keys() == {"schedule", "core scheduler", "cache search", "v1 batch", "v1 request"}
    assert changed["schedule"][0] == "gone"
    assert changed["core scheduler"] == ("moved", "it has no schedule")
    assert changed["cache search"] == ("moved", "it has a new parameter asked; has no parameter request")
    for name, word in (("v1 batch", "InputBatch"), ("v1 request", "CachedRequestState")):
        assert changed[name][0] == "moved"
        assert f"it is at vllm.v1.worker.batches:{word}" in changed[name][1]


def test_the_table_and_what_cannot_be_read(tmp_path, monkeypatch):
    for path, text in CODE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(versions, "SEAMS", {seam.name: seam for seam in (*SEAMS_HERE[:2], Seam("no", "vllm:no", "x"))})
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(app, ["doctor", "--vllm-source", str(tmp_path)])
    assert done.exit_code == 1
    assert "✓  runner   there" in done.output
    assert "vllm has no no (needed to x; checked on 0.32.0 and 0.33.0)" in done.output
    assert done.output.splitlines()[-1] == "vLLM 9.9.9: 2 seams there, 0 moved, 1 gone"
    with pytest.raises(EngineError, match=r"no source of vLLM at .*: nothing is there; give a wheel"):
        read_source(tmp_path / "nothing")
    (tmp_path / RUNNER).write_text("def f(:")
    with pytest.raises(EngineError, match=r"vllm/worker/runner\.py is not Python as this version reads it"):
        read_source(tmp_path).module("vllm.worker.runner")
    done = CliRunner().invoke(app, ["doctor", "smollm2", "--vllm-source", str(tmp_path)])
    assert done.exit_code == 2
    assert "--vllm-source: the source is read, not run: leave out the model and its options" in done.output


def test_nothing_of_vllm_is_imported(tmp_path):
    for path, text in CODE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "raise RuntimeError\n")
    code = (
        "import sys; from pathlib import Path; from patchclamp.engines.vllm.versions import examine_source as f\n"
        f"f(Path({str(tmp_path)!r})); print({{'vllm', 'torch'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
