"""Recipes on the fake engine, and how they are compared."""

from __future__ import annotations

import pytest
import torch

import patchclamp as pc
from tests.recipes import RECIPES, gap


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
