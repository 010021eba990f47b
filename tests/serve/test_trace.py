"""Traces of a server's model: every recipe gives what it gives on the same engine in this process."""

from __future__ import annotations

import pytest
import torch

from tests.recipes import RECIPES, gap


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_same_over_http(lm, local, name):
    there, by_hand, here = RECIPES[name].traced(lm), RECIPES[name].explicit(lm), RECIPES[name].traced(local)
    assert there.keys() == by_hand.keys() == here.keys()
    for key, value in there.items():
        assert gap(value, here[key]) <= 1e-5, key
        assert gap(by_hand[key], here[key]) <= 1e-5, key
    assert all(type(value) is torch.Tensor or isinstance(value, list) for value in there.values())
