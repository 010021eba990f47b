"""The numbers of TransformerLens' demo on GPT-2 small, by our studies."""

import os
from pathlib import Path
from typing import Any

import pytest

import patchclamp as pc

from .ioi import folded, measured

PUBLISHED = {
    "resid_pre": {(0, 10): 1.00, (9, 14): 0.94},
    "attn_out": {(8, 14): 0.570},
    "z": {(10, 7): -0.480, (5, 5): 0.344, (8, 6): 0.319, (9, 9): 0.264},
    "direct": {(9, 9): 2.985, (10, 7): -1.899},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = folded(Path(os.environ["PATCHCLAMP_GPT2"]), tmp_path_factory.mktemp("gpt2"))
    with pc.LM(str(folder), engine="transformers", dtype="float32") as lm:
        return measured(lm, begin=50256)


def test_the_mean_logit_difference(found):
    assert found["clean"] == pytest.approx(3.552, abs=2e-3)


@pytest.mark.parametrize(("what", "where"), [(what, where) for what in PUBLISHED for where in PUBLISHED[what]])
def test_a_published_number(found, what, where):
    digits = 0.006 if what == "resid_pre" else 0.002
    assert found[what][where] == pytest.approx(PUBLISHED[what][where], abs=digits)
