"""Patch results that are known on paper: an induction circuit written by hand, whose every path is there or is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import MeanOf, Resampled, ablation_sweep, patch_sweep, path_patch

from ..reference.circuit import COPIED, induction

X, A, B, C, D = 3, 5, 6, 7, 8  # X begins every prompt: the first token is its own predecessor


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    with pc.LM(induction(tmp_path_factory.mktemp("induction")), "transformers", dtype="float32", prove=False) as lm:
        yield lm


def grid(sweep, site, layer) -> list[float]:
    """A row of a sweep's grid, rounded as far as it is exact."""
    values = sweep.grid[sweep.sites.index(site), sweep.layers.index(layer)]
    return [round(float(value), 3) + 0.0 for value in values]


def test_it_completes_what_came_before(lm):
    run = lm.run([X, A, B, C, A], max_tokens=1, score=range(16))
    assert run.token_ids == [B]
    # next: one of B by the induction head, a part of the current token by the copy head. The heads' values are those of
    # the normed stream, of length 8 over 2 numbers (layer 0) or over the numbers below (layer 1)
    copied = COPIED * 8 / math.sqrt(2)
    before = 8 / math.sqrt(2)
    moved = 8 / math.sqrt(2 + before**2 + copied**2)
    length = math.sqrt(2 + before**2 + copied**2 + moved**2)
    assert run.scores[B] - run.scores[A] == pytest.approx(8 * (moved - copied) / length, abs=1e-3)
    assert run.scores[B] - run.scores[C] == pytest.approx(8 * moved / length, abs=1e-3)


def test_where_the_value_differs_it_passes_from_its_position_to_the_last(lm):
    """A B C A → B and A D C A → D: what differs is what the induction head finds, not where it finds it."""
    asked = dict(clean=[X, A, B, C, A], corrupt=[X, A, D, C, A], answer=B, foil=D, metric="recovered")
    sweep = patch_sweep(lm, **asked, sites=["resid_pre", "z"])
    assert grid(sweep, "resid_pre", 0) == [0, 0, 1, 0, 0]
    # position 3 has D before it, which nobody looks for; position 2 keeps its token
    assert grid(sweep, "resid_pre", 1) == [0, 0, 1, 0, 0]
    assert grid(sweep, "z", 0)[1] == grid(sweep, "z", 0)[4] == 0
    assert grid(sweep, "z", 1) == [0, 0, 0, 0, 1]
    heads = patch_sweep(lm, **asked, sites=["z"], group=1, positions=[-1])
    assert {(cell.layer, cell.index): round(cell.value, 3) + 0.0 for cell in heads.cells()} == {
        (0, "0"): 0, (1, "0"): 1, (0, "1"): 0, (1, "1"): 0,
    }  # fmt: skip


BROKEN = dict(clean=[X, A, B, C, A], corrupt=[X, D, B, C, A], answer=B, foil=C, metric="recovered")


def test_where_the_key_differs_the_previous_token_head_carries_it(lm):
    """D B C A has no A to find. What brings it back is "before" at position 2, written by head 0.0."""
    sweep = patch_sweep(lm, **BROKEN, sites=["resid_pre", "z"], group=None)
    assert grid(sweep, "resid_pre", 0) == [0, 1, 0, 0, 0]
    assert grid(sweep, "resid_pre", 1) == [0, 0, 1, 0, 0]
    assert grid(sweep, "z", 0) == [0, 0, 1, 0, 0]
    assert grid(sweep, "z", 1) == [0, 0, 0, 0, 1]
    noising = patch_sweep(lm, **BROKEN, sites=["resid_pre", "z"], direction="noising")
    assert grid(noising, "resid_pre", 0) == [1, 0, 1, 1, 1]
    assert grid(noising, "z", 1) == [1, 1, 1, 1, 0]


def test_the_head_speaks_to_the_keys_of_the_induction_head_alone(lm):
    receivers = ["q[1, 0]", "k[1, 0]", "v[1, 0]", "k[1, 1]", ["q[1, 0]", "k[1, 0]", "v[1, 0]"], "logits"]
    paths = path_patch(lm, **BROKEN, receivers=receivers)
    by_sender = {str(row): np.round(values, 3) + 0.0 for row, values in zip(paths.rows, paths.values, strict=True)}
    assert by_sender["z[0, 0]"].tolist() == [0, 1, 0, 0, 1, 0]
    assert by_sender["z[0, 1]"].tolist() == [0, 0, 0, 0, 0, 0]
    assert np.isnan(by_sender["z[1, 0]"][:5]).all()
    assert by_sender["z[1, 0]"][5] == 1


def test_the_copy_head_speaks_to_the_logits_alone(lm):
    """The prompts differ in their last token: its copy goes straight to the logits."""
    asked = dict(clean=[X, A, B, C, D], corrupt=[X, A, B, C, 9], answer=D, foil=9)
    paths = path_patch(lm, **asked, receivers=["logits", "q[1, 0]", "v[1, 0]"], senders=["z[0, 1]"])
    whole = patch_sweep(lm, **asked, sites=["z[0, 1]"], positions=[-1])
    assert paths.values[0, 0] == pytest.approx(whole.values[0, 0], abs=1e-4)
    assert paths.values[0, 0] - paths.corrupt > 1
    assert np.allclose(paths.values[0, 1:], paths.corrupt, atol=1e-4)


@pytest.mark.parametrize(
    "source",
    [
        "zeros",
        MeanOf([[X, 9, 10, 11, 12], [X, 12, 11, 10, 9]]),
        Resampled([[X, 9, 10, 11, 12], [X, 12, 11, 10, 9]], draws=2),
    ],
)
def test_without_either_head_of_the_circuit_there_is_no_induction(lm, source):
    found = ablation_sweep(lm, prompt=[X, A, B, C, A], answer=B, foil=C, sites=["z"], group=1, source=source)
    values = {(cell.layer, cell.index): cell.value for cell in found.cells()}
    assert found.clean > 1.5
    assert abs(values[1, "1"] - found.clean) < 1e-4, "a head that does nothing is not missed"
    assert values[0, "0"] == pytest.approx(0, abs=1e-3), "B and C are alike likely without the key"
    assert values[1, "0"] == pytest.approx(0, abs=1e-3)
    if source == "zeros":
        assert values[0, "1"] > found.clean, "what the copy head wrote takes a part of the norm"
