"""What the README and the guide show runs: the Python blocks of each, in order, on the real model."""

import re
from pathlib import Path

import pytest
import torch

import patchclamp as pc
from patchclamp import errors

from ..conftest import beginnings_of
from .conftest import open_engines

ROOT = Path(__file__).resolve().parents[2]
README, GUIDE, TRACING = ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs" / "tracing.md"


def run_blocks(page: Path, lm: pc.LM, monkeypatch, folder: Path) -> dict:
    """Runs a page's Python blocks with the engine at hand wherever they load a model; returns the names they leave."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 3
    opened = pc.LM
    monkeypatch.setattr(
        pc, "LM", lambda model, allow_code=False, **options: opened("", lm.engine, prove=False, allow_code=allow_code)
    )
    monkeypatch.chdir(folder)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


one_engine = pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.slow), "vllm"])


@one_engine
def test_every_example_of_the_readme_runs(engine, engines, tmp_path, monkeypatch):
    lm = engines.get(engine, "float32")
    names = run_blocks(README, lm, monkeypatch, tmp_path)
    assert names["run"].text == " Paris.\n\nThe answer is:"
    assert names["run"][pc.resid_post[10]].shape == (len(names["run"].prompt_token_ids) + 7, lm.model.d_model)
    assert len(names["runs"]) == 2
    assert len(names["patched"].scores) == 1
    assert names["sweep"].best(1)[0].value > 0 > names["sweep"].corrupt
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert "<html" in (tmp_path / "sweep.html").read_text()[:2000].lower()


@pytest.fixture(scope="session")
def thin(smollm2, tmp_path_factory):
    """Engines of all layers of SmolLM2, narrowed: what they say is no sense, in half the time."""
    yield from open_engines(beginnings_of(smollm2, tmp_path_factory.mktemp("thin")))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_guide_means_what_it_says(engine, engines, tmp_path, monkeypatch):
    names = run_guide(engines.get(engine, "float32"), monkeypatch, tmp_path)
    assert names["run"].text.startswith(" Paris")
    assert names["fuzzing"].exact[:, 0].min() == 1 > names["fuzzing"].exact[:, 2].mean()
    assert names["moods"].auroc.min() > 0.9
    assert names["lovely"].probes["glad"] > names["moods"].threshold(0.1)
    assert names["vectors"].effect.max() > 2
    assert names["curve"].slope > 1


def test_every_example_of_the_guide_runs(thin, tmp_path, monkeypatch):
    run_guide(thin.get("vllm", "float32"), monkeypatch, tmp_path)


def test_the_probe_of_the_harvest_page_is_trained(thin):
    page = (ROOT / "docs" / "harvest.md").read_text(encoding="utf-8")
    names = {"pc": pc, "lm": thin.get("vllm", "float32")}
    exec(page.partition("## Straight into a trainer")[2].partition("```python\n")[2].partition("```")[0], names)
    assert names["stream"].rows == sum(len(names["lm"].tokens(text)) for text in (
        "The capital of France is Paris.", "What a lovely evening it was!"))  # fmt: skip
    assert names["weight"].abs().max() > 0


def run_guide(lm: pc.LM, monkeypatch, tmp_path: Path) -> dict:
    names = run_blocks(GUIDE, lm, monkeypatch, tmp_path)
    assert names["rows"].shape == (len(names["run"].prompt_token_ids) + 7, lm.model.d_model)
    assert names["text"] == names["stream"].run.text == names["run"].text
    assert len(names["mixed"]) == 3
    assert (tmp_path / "bank.safetensors").exists()
    assert names["coded"].error is None
    assert names["place"] == "edits[1].value"
    before, after = names["steps"]["edits[0]"], names["steps"]["capture[0]"]
    assert (after == 2 * before).all()
    assert before.any()
    return names


@one_engine
def test_every_example_of_tracing_runs(engine, engines, tmp_path, monkeypatch):
    lm = engines.get(engine, "float32")
    names = run_blocks(TRACING, lm, monkeypatch, tmp_path)
    lm.bank.clear()
    assert torch.equal(names["before"] + names["v"], names["after"])
    assert names["steps"].shape == (7, lm.model.d_model)
    assert names["t"].text == names["run"].text
    assert len(names["values"]) == 2


def test_the_first_example_names_no_option_of_one_engine():
    """The blocks are run on both engines, with the options that they load a model with left out."""
    for page in (README, GUIDE):
        blocks = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
        for options in re.findall(r"pc\.LM\(\"smollm2\"(.*?)\)", blocks):
            assert options in ("", ", allow_code=True")


def test_the_guide_draws_every_error():
    drawn = GUIDE.read_text(encoding="utf-8").partition("\n## Errors\n")[2].partition("\n## ")[0]
    assert set(errors.TREE) <= set(re.findall(r"\w+", drawn))


def test_shell_examples_name_real_options():
    from typer.testing import CliRunner

    from patchclamp.cli.study_commands import app

    pages = README.read_text(encoding="utf-8") + GUIDE.read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", pages, re.S))
    assert "patchclamp sweep" in shell
    for command, options in re.findall(r"^patchclamp ([\w-]+)([^#\n]*)", shell, re.M):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"(--\w+)", options):
            assert option in shown, (command, option)
