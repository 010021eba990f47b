"""What the README shows runs: its Python blocks, in order, on the real model."""

import re
from pathlib import Path

import patchclamp as pc

README = Path(__file__).resolve().parents[2] / "README.md"


def test_every_python_example_runs(engines, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 3
    lm = engines.get("vllm", "float32")
    opened = pc.LM  # every time the engine at hand
    monkeypatch.setattr(
        pc, "LM", lambda model, allow_code=False, **options: opened("", lm.engine, prove=False, allow_code=allow_code)
    )
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["run"].text.startswith(" Paris")
    assert names["run"][pc.resid_post[10]].shape == (len(names["run"].prompt_token_ids) + 7, lm.model.d_model)
    assert names["text"] == names["stream"].run.text == names["run"].text
    assert len(names["runs"]) == 2
    assert len(names["patched"].scores) == 1
    assert names["sweep"].best(1)[0].value > 0 > names["sweep"].corrupt
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert "<html" in (tmp_path / "sweep.html").read_text()[:2000].lower()


def test_shell_examples_name_real_options():
    from typer.testing import CliRunner

    from patchclamp.cli.app import app

    shell = "\n".join(re.findall(r"```bash\n(.*?)```", README.read_text(), re.S))
    for command, options in re.findall(r"^patchclamp (\w+)(.*)$", shell, re.M):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"(--\w+)", options):
            assert option in shown, (command, option)
