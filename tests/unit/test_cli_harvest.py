"""`patchclamp harvest`: what it asks of the study, what it prints, and how it fails before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.studies import Filters, Harvested, harvest

TEXTS = ["The cat sat on the world", "Rome is in Italy", "the dog is not in Rome"]


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / "texts.txt"


def run(*arguments: object) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["harvest", *map(str, arguments)], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output.splitlines()


def test_options_are_the_studys(source, tmp_path):
    matrix = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    np.save(tmp_path / "w.npy", matrix)
    status, lines = run(
        "fake", source, tmp_path / "out", "--site", "resid_post[0:2]", "--site", "mlp_out[1]", "--store", "float32",
        "--no-special", "--positions", "1:", "--positions", "-2:", "--not-token", 5, "--only-token", 7, "--only-token", 36,
        "--only-token", 2, "--norm-cap", 100, "--norm-times-median", 4.5, "--project", tmp_path / "w.npy", "--context", 100,
        "--overlong", "cut", "--seed", 3, "--parts", 2, "--shard-rows", 4, "--batch-tokens", 9,
    )  # fmt: skip
    filters = Filters(no_special=True, positions=((1, None), (-2, None)), not_tokens=(5,), only_tokens=(7, 36, 2),
                      norm_cap=100.0, norm_times_median=4.5)  # fmt: skip
    with pc.LM("fake") as lm:
        made = harvest(
            lm, TEXTS, tmp_path / "out", sites=["resid_post[0:2]", "mlp_out[1]"], dtype="float32", filters=filters,
            project=matrix, context=100, overlong="cut", seed=3, parts=2, shard_rows=4,
        )  # fmt: skip
    assert (status, made.ran) == (0, 0)
    assert lines[0] == made.folder
    assert (
        lines[1]
        == f"{len(made.open())} rows of resid_post[0], resid_post[1], mlp_out[1] in {len(made.open().shards)} shards"
    )
    assert made.open().width("mlp_out[1]") == 3


def test_a_share_says_what_others_have(source, tmp_path):
    status, lines = run("fake", source, tmp_path / "out", "--site", "embed", "--sum", "--no-bos", "--shard", "1/2")
    assert status == 0
    data = Harvested(lines[0])
    assert lines[2] == f"{len(data.missing)} shards belong to other machines"
    assert data.manifest.recipe.sums
    assert data.manifest.recipe.parts == 2


@pytest.mark.parametrize(("arguments", "text"), [
    (["--site", "resid_pots"], "--site: unknown site 'resid_pots'"),
    (["--site", "embed", "--store", "int8"], "--store: unknown capture dtype 'int8'"),
    (["--site", "embed", "--positions", "4"], "--positions: expected a window of positions such as 4: or 0:128"),
    (["--site", "embed", "--shard", "3/2"], "--shard: expected I/N"),
    (["--site", "embed", "--project", "none.npy"], "--project: expected an array saved by NumPy, got none.npy"),
    (["--site", "embed", "--norm-cap", "-1"], "filters.norm_cap: "),
    (["--site", "embed", "--engine", "vlm"], "--engine: unknown engine 'vlm'"),
])  # fmt: skip
def test_what_is_wrong_is_told_before_a_model_is_loaded(source, tmp_path, monkeypatch, arguments, text):
    monkeypatch.setattr("patchclamp.cli.commands.loaded", lambda *_: pytest.fail("a model was loaded"))
    status, lines = run("no-such-model", source, tmp_path / "out", *arguments)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: {text}")
