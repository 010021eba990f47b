"""Forced log-probabilities are those of the run that generated the continuation, whatever edits it had."""

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
    "final norm": (pc.Add(VECTOR, pc.final_norm), pc.Scale(0.5, pc.final_norm, pc.generated)),
    "logits": (pc.Scale(0.1, pc.logits), pc.Add(VECTOR, at=pc.resid_post[1])),
    "logits of generated tokens": (pc.Add(5 * np.eye(64)[9], pc.logits, pc.generated),),
    "logits by name": (pc.Use("logits"),),
    "of the prompt's last token": (pc.Add(pc.SameRun(pc.resid_post[0], pc.prompt[-1]), pc.resid_post[1], pc.generated),),
}  # fmt: skip
TEXT = "The Eiffel Tower is in"


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_a_continuation_is_graded_as_it_was_generated(lm, edits):
    lm.bank["forced"] = [pc.Add(VECTOR, at=pc.resid_post[1], tokens=pc.generated)]
    lm.bank["logits"] = [pc.Scale(0.5, pc.logits)]
    run = lm.run(TEXT, max_tokens=9 if "generated[40]" not in str(edits) else 50, edits=list(edits), logprobs=True,
                 sampling={"ignore_eos": True})  # fmt: skip
    ids, answer = tuple(run.prompt_token_ids), tuple(run.token_ids)
    items = [Forced(ids, answer[:n], edits, TEXT) for n in (1, 2, len(answer))]
    for row, n in zip(forced_logprobs(lm, items, batch=3), (1, 2, len(answer)), strict=True):
        np.testing.assert_allclose(row, run.logprobs[:n], rtol=0, atol=2e-6)


@pytest.mark.parametrize("edits", [
    "everywhere", "conditional", "conditional from the prompt on", "named", "final norm", "logits",
    "logits of generated tokens", "logits by name", "of the prompt's last token",
])  # fmt: skip
def test_without_its_edits_it_is_graded_otherwise(lm, edits):
    lm.bank["forced"] = [pc.Add(VECTOR, at=pc.resid_post[1], tokens=pc.generated)]
    lm.bank["logits"] = [pc.Scale(0.5, pc.logits)]
    run = lm.run(TEXT, max_tokens=6, edits=list(EDITS[edits]), logprobs=True)
    (row,) = forced_logprobs(lm, [Forced(tuple(run.prompt_token_ids), tuple(run.token_ids))])
    assert np.abs(row - run.logprobs)[1:].min() > 1e-4  # the first of them precedes what is generated


@pytest.mark.parametrize(("edit", "requests"), [(pc.Add(VECTOR, pc.final_norm), 1), (pc.Scale(0.5, pc.logits), 30)])
def test_a_continuation_takes_one_request_even_of_many_programs(lm, monkeypatch, edit, requests):
    """Except under edits of logits."""
    submit, asked = lm.engine.submit, []
    monkeypatch.setattr(lm.engine, "submit", lambda several: asked.extend(several) or submit(several))
    items = [Forced((5, 6, 7), tuple(range(8, 38)), (edit, pc.Scale(1 + i, pc.mlp_out[1]))) for i in range(9)]
    rows = forced_logprobs(lm, items)
    assert len(asked) == 9 * requests
    for item, row in zip(items, rows, strict=True):
        expected = [lm.run([*item.prompt, *item.continuation[:n]], max_tokens=1, score=[token],
                           edits=list(item.edits)).scores[token] for n, token in enumerate(item.continuation)]  # fmt: skip
        np.testing.assert_allclose(row, expected, rtol=0, atol=2e-6)
    assert len({row[0] for row in rows}) == 9


def test_any_continuation_of_any_prompt_in_groups(lm, monkeypatch):
    """Each token is scored by the plain way, a prompt for each; groups and batches change nothing."""
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
    found = forced_logprobs(lm, items)
    monkeypatch.setattr(teacher_forcing, "MAX_TOKENS", 6)
    for rows in (found, forced_logprobs(lm, items, 2, heard.append)):
        for row, each in zip(rows, expected, strict=True):
            np.testing.assert_allclose(row, each, rtol=0, atol=2e-6)
    assert len(heard) > 2
    assert sum(heard) == len(items)


def test_the_likelihoods_of_all_last_tokens_add_up(lm):
    items = [Forced((5, 6, 7), (8, token)) for token in range(64)]
    rows = np.stack(forced_logprobs(lm, items))
    assert np.isclose(np.exp(rows[:, 1]).sum(), 1)
    assert len(set(rows[:, 0])) == 1


def test_iterators_are_read_once(lm):
    prompts, answers, edits = (
        ["a b", "c d e"],
        [" a", " b"],
        [pc.Add(VECTOR, at=pc.resid_post[0]), pc.Scale(2.0, pc.mlp_out[1])],
    )
    wanted = lm.loglikelihood(prompts, answers, edits=edits)
    assert lm.loglikelihood(prompts, iter(answers), edits=iter(edits)) == wanted
    assert not np.isclose(wanted, lm.loglikelihood(prompts, answers)).any()
    several = lm.loglikelihood("a b", answers, edits=edits)
    assert lm.loglikelihood("a b", (each for each in answers), edits=edits) == several
    assert lm.loglikelihood(prompts, (iter(answers) for _ in prompts))[0] == lm.loglikelihood("a b", answers)


def test_no_run_is_left(lm):
    before = lm.engine.status()["runs"]
    forced_logprobs(lm, [Forced((5, 6), (7, 8, 9))])
    assert lm.engine.status()["runs"] == before
    with pytest.raises(pc.MissingSource) as caught:
        forced_logprobs(lm, [Forced((5, 6), (7, 8, 9), (pc.Use("mood"),))])
    assert caught.value.path == "edits[0].name"
    assert lm.engine.status()["runs"] == before
