"""Forced log-probabilities are those of the run that generated the continuation, whatever edits it had: to the bit
without conditions."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import teacher_forcing
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs

VECTOR = np.linspace(-1, 1, 16)
PROBE = pc.Probe(VECTOR, at=pc.resid_post[0], name="forced")
EDITS = {
    "none": (),
    "everywhere": (pc.Add(VECTOR, at=pc.resid_post[1]),),
    "last token of the prompt": (pc.Add(VECTOR, at=pc.resid_post[0], tokens=pc.prompt[-1]), pc.Scale(0.5, pc.embed, pc.prompt[0:2])),
    "generated": (pc.Noise(0.5, at=pc.embed, tokens=pc.generated, seed=3),),
    "token and span": (pc.Zero(pc.mlp_out[2], pc.token(2) | pc.span("Eiffel")),),
    "generated that never comes": (pc.Zero(pc.mlp_out[2], pc.generated[40]),),
    "conditional": (pc.When(PROBE > -1e6, [pc.Add(VECTOR, at=pc.resid_post[1])]),),
    "conditional from the prompt on": (pc.When(PROBE < 1e6, [pc.Add(VECTOR, at=pc.resid_post[1], tokens=pc.generated)], scope="prompt"),),
    "conditional by token": (pc.When(PROBE > 0, [pc.Zero(pc.mlp_out[2])]), pc.Scale(0.5, pc.embed, pc.prompt[0:2])),
    "named": (pc.Use("forced", scale=2.0), pc.Scale(0.5, pc.embed, pc.prompt[0:2])),
}  # fmt: skip
TEXT = "The Eiffel Tower is in"


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_a_continuation_is_graded_as_it_was_generated(lm, edits):
    lm.bank["forced"] = [pc.Add(VECTOR, at=pc.resid_post[1], tokens=pc.generated)]
    run = lm.run(TEXT, max_tokens=9 if "generated[40]" not in str(edits) else 50, edits=list(edits), logprobs=True,
                 sampling={"ignore_eos": True})  # fmt: skip
    ids, answer = tuple(run.prompt_token_ids), tuple(run.token_ids)
    items = [Forced(ids, answer[:n], edits, TEXT) for n in (1, 2, len(answer))]
    for row, n in zip(forced_logprobs(lm, items, batch=3), (1, 2, len(answer)), strict=True):
        if items[0].has_conditions:  # read from the prompt's log-probabilities, which are rounded differently
            np.testing.assert_allclose(row, run.logprobs[:n], rtol=0, atol=1e-6)
        else:
            assert row.tolist() == run.logprobs[:n]


@pytest.mark.parametrize("edits", ["everywhere", "conditional", "conditional from the prompt on", "named"])
def test_without_its_edits_it_is_graded_otherwise(lm, edits):
    lm.bank["forced"] = [pc.Add(VECTOR, at=pc.resid_post[1], tokens=pc.generated)]
    run = lm.run(TEXT, max_tokens=6, edits=list(EDITS[edits]), logprobs=True)
    (row,) = forced_logprobs(lm, [Forced(tuple(run.prompt_token_ids), tuple(run.token_ids))])
    assert np.abs(row - run.logprobs)[1:].min() > 1e-6  # the first of them precedes what is generated


def test_any_continuation_of_any_prompt_in_groups(lm, monkeypatch):
    """Each token is scored by the plain way, a prompt for each; groups, batches and shared runs change nothing."""
    draw = np.random.default_rng(5)
    items = [
        Forced(tuple(draw.integers(2, 60, 4).tolist()), tuple(draw.integers(2, 60, n).tolist())) for n in (1, 5, 2)
    ]
    items += [Forced(items[1].prompt, (*items[1].continuation[:-1], token)) for token in (3, 4, 3)]
    expected = [
        [lm.run([*item.prompt, *item.continuation[:i]], max_tokens=1, score=[token]).scores[token]
         for i, token in enumerate(item.continuation)]
        for item in items
    ]  # fmt: skip
    heard: list[int] = []
    assert [row.tolist() for row in forced_logprobs(lm, items)] == expected
    monkeypatch.setattr(teacher_forcing, "MAX_ROWS", 6)
    assert [row.tolist() for row in forced_logprobs(lm, items, 2, heard.append)] == expected
    assert len(heard) > 2
    assert sum(heard) == len(items)


def test_continuations_of_many_last_tokens_share_runs(lm):
    items = [Forced((5, 6, 7), (8, token)) for token in range(64)]
    rows = np.stack(forced_logprobs(lm, items * 3))
    assert np.isclose(np.exp(rows[:64, 1]).sum(), 1)
    assert (rows[:64] == rows[64:128]).all()
    assert len(set(rows[:, 0])) == 1


def test_what_captured_rows_is_closed(lm):
    before = lm.engine.status()["runs"]
    forced_logprobs(lm, [Forced((5, 6), (7, 8, 9))])
    assert lm.engine.status()["runs"] == before
    with pytest.raises(pc.MissingSource) as caught:
        forced_logprobs(lm, [Forced((5, 6), (7, 8, 9), (pc.Use("mood"),))])
    assert caught.value.path == "edits[0].name"
    assert lm.engine.status()["runs"] == before
