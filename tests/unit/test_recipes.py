"""Recipes on the fake, their comparison, and `patchclamp recipes`."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.app import app
from patchclamp.studies.recipes import gap
from patchclamp.trace.recipes import RECIPES

FAKE = ("--engine", "fake", "--against", "fake")


def test_a_trace_is_the_program_written_by_hand_to_the_bit():
    with pc.LM("fake") as lm:
        for recipe in RECIPES.values():
            traced, explicit = recipe.traced(lm), recipe.explicit(lm)
            assert traced.keys() == explicit.keys()
            for name, value in traced.items():
                other = explicit[name]
                assert value == other if isinstance(value, list) else torch.equal(value, torch.as_tensor(other)), name


def test_a_gap_is_the_worst_rows():
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert gap(a, a) == 0
    assert gap(a, torch.tensor([[3.0, 4.0], [0.0, 1.0]])) == pytest.approx(2**0.5)
    assert gap(a, a[:1]) == float("inf")
    assert gap(a, torch.zeros(2, 2)) == float("inf")
    assert gap([1, 2, 3, 4], [1, 2, 3]) == 0.25
    assert gap([1, 2], [1, 2]) == 0


def test_two_engines_that_are_one_agree():
    done = CliRunner().invoke(app, ["recipes", "fake", *FAKE, "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["holds"], told["problems"]) == (0, True, [])
    assert {value["recipe"] for value in told["values"]} == set(RECIPES)
    assert all(value["gap"] == value["by_hand"] == 0 for value in told["values"])


def test_a_difference_is_shown_with_its_place(monkeypatch):
    """The second engine has other weights."""
    done = CliRunner().invoke(
        app, ["recipes", "fake", *FAKE, "--option", "seed=1", "--recipe", "caching", "--recipe", "neurons"],
        env={"COLUMNS": "120"},
    )  # fmt: skip
    assert done.exit_code == 1
    assert "caching: stream is" in done.stdout
    assert "neurons: logits is" in done.stdout
    assert "all " not in done.stdout
    assert "patchscope" not in done.stdout


def test_a_table_of_all_that_holds():
    done = CliRunner().invoke(app, ["recipes", "fake", *FAKE, "--recipe", "ablation"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    assert "all 1 recipes give the same on both engines, and both ways: within 0.0001" in done.stdout
    assert "9×16" in done.stdout


def test_names_that_are_none():
    for arguments, text in (
        (("--recipe", "steerin"), "no recipe 'steerin' (did you mean 'steering'"),
        (("--dtype", "float64"), "no dtype 'float64'"),
        (("--engine", "vlm"), "no engine 'vlm'"),
    ):
        done = CliRunner().invoke(app, ["recipes", "fake", *FAKE, *arguments], env={"COLUMNS": "300"})
        assert done.exit_code == 2
        assert text in done.stderr
