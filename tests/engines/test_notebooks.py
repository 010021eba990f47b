"""The notebooks in examples/ run: their cells in order, on the real model; the quickstart in a Jupyter kernel, too."""

import json
from pathlib import Path

import pytest

import patchclamp as pc

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def code_of(name: str) -> list[str]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.slow), "vllm"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "quickstart" else pytest.mark.slow) for name in NOTEBOOKS]
)
def test_every_cell_runs(name, engine, engines, monkeypatch, tmp_path):
    lm, opened = engines.get(engine, "float32"), pc.LM

    def open_shared(model: str, engine: str | None = None, **options) -> pc.LM:
        shared = lm if engine is None else engines.get(engine, "float32")
        return opened("", shared.engine, prove=False, **options)

    monkeypatch.setattr(pc, "LM", open_shared)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    *codes, last = code_of(name)
    assert last == "lm.close()"  # not here: other tests share the engine
    for number, code in enumerate(codes):
        exec(compile(code, f"{name}.ipynb, code cell {number}", "exec"), names)
    lm.bank.clear()


@pytest.mark.slow
def test_the_quickstart_runs_in_a_jupyter_kernel(tmp_path):
    """With a vLLM engine inside the kernel, whose event loop is running; results show as HTML and pictures."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)
    first = notebook.cells[1]
    first.source = first.source.replace('pc.LM("smollm2")', 'pc.LM("smollm2", engine="vllm", enforce_eager=True)')
    assert "enforce_eager" in first.source
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert not [output for output in outputs if output.output_type == "error"]
    assert "vllm" in shown[0]["text/plain"]
    assert sum("text/html" in data for data in shown) >= 2  # the run, and the sweep
