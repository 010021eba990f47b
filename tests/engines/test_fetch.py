"""Captures in bulk: what a run captured comes together where it is little, and of many runs in one call."""

from __future__ import annotations

import pytest
import torch

import patchclamp as pc

from .conftest import PROMPTS

BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])
KEPT = [pc.resid_post, pc.z[3, 1], pc.logits, pc.mlp_out[2] @ pc.prompt[-3:]]


@pytest.fixture
def calls(shallow, monkeypatch, request):
    """An LM, and how many captures each call to its engine asked for."""
    lm, asked = shallow.get(request.getfixturevalue("engine"), "float32"), []
    fetch_many = lm.engine.fetch_many
    monkeypatch.setattr(lm.engine, "fetch_many", lambda wanted: asked.append(len(wanted)) or fetch_many(wanted))
    return lm, asked


@BOTH
def test_the_first_read_brings_what_else_is_little(calls, engine, monkeypatch):
    lm, asked = calls
    one, other = lm.run([PROMPTS[0]] * 2, max_tokens=3, capture=KEPT)
    monkeypatch.setattr("patchclamp.run.MAX_PREFETCH_BYTES", 0)
    apart = {site: other[site] for site in other.sites}
    points = lm.model.layers + 3  # resid_pre[l + 1] is resid_post[l]
    assert asked == [1] * points
    asked.clear()
    monkeypatch.setattr("patchclamp.run.MAX_PREFETCH_BYTES", 1 << 30)
    together = {site: one[site] for site in one.sites}
    assert asked == [points]
    for site in apart:
        assert torch.allclose(apart[site], together[site], atol=1e-3, rtol=1e-4)
        assert one.positions(site) == other.positions(site)
        assert one[site].data_ptr() == together[site].data_ptr()
    assert torch.equal(one["capture[3]"], one[pc.mlp_out[2]])  # one op's rows are asked for by themselves
    assert asked == [points, 1]


@BOTH
def test_many_runs_come_in_one_call(calls, engine, monkeypatch):
    lm, asked = calls
    runs = lm.run(PROMPTS, max_tokens=3, capture=KEPT)
    alone = lm.run(PROMPTS, max_tokens=3, capture=KEPT)
    everything = lm.fetch(runs)
    assert asked == [(lm.model.layers + 3) * len(runs)]
    assert [list(rows) for rows in everything] == [run.sites for run in runs]
    for rows, run in zip(everything, alone, strict=True):
        for site, tensor in rows.items():
            assert tensor.shape == run[site].shape
            assert torch.allclose(tensor, run[site], atol=1e-3, rtol=1e-4)
    asked.clear()
    assert lm.fetch(runs, pc.resid_post[1:3])[0].keys() == {"resid_post[1]", "resid_post[2]"}
    assert lm.fetch(runs)[1]["logits"].data_ptr() == everything[1]["logits"].data_ptr()
    assert asked == []  # they are here
    monkeypatch.setattr("patchclamp.lm.MAX_FETCH_BYTES", 1)
    lm.fetch(lm.run(PROMPTS, max_tokens=1, capture=KEPT), [pc.resid_post[0], "logits"])
    assert asked == [2, 2, 2]
    assert lm.fetch([]) == []


@BOTH
def test_what_cannot_be_fetched_says_why(calls, engine):
    lm, _ = calls
    runs = lm.run(PROMPTS, max_tokens=1, capture=[pc.resid_post[1]])
    with pytest.raises(
        pc.MissingSource, match=r"resid_post\[2\] was not captured; this run has: resid_pre\[2\], resid_post\[1\]"
    ):
        lm.fetch(runs, pc.resid_post[2])
    runs[1].close()
    with pytest.raises(pc.MissingSource, match="was closed before"):
        lm.fetch(runs)
    hot = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[3], scale=1e30)]
    failed = lm.run(PROMPTS[:2], max_tokens=1, edits=[hot, []], capture=[pc.resid_post[1]])
    with pytest.raises(pc.RunError, match="not finite"):
        lm.fetch(failed)


@BOTH
def test_a_run_that_is_closed_keeps_what_was_read_alone(calls, engine):
    lm, _ = calls
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post])
    first = run[pc.resid_post[0]]
    run.close()
    assert run[pc.resid_post[0]] is first
    with pytest.raises(pc.MissingSource, match="was closed before"):
        run[pc.resid_post[1]]
