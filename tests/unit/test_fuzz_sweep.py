"""The fuzz sweep on the fake engine: its cells, what it refuses, and what comes back from a file. `tests/engines/test_fuzz.py`
compares its numbers with plain loops."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines import grading
from patchclamp.studies import FuzzSweepResult, fuzz_sweep, metric
from patchclamp.studies.fuzz import PROMPTS, QUICK_PROMPTS, QUICK_STRENGTHS, REFUSAL, STRENGTHS, prefix_share, wilson

from ..reference.studies import divergences

ASKED = ("The Eiffel Tower is in", "the cat sat on")


@pytest.fixture(scope="module")
def sweep(lm) -> FuzzSweepResult:
    return fuzz_sweep(lm, ASKED, (0.0, 0.1, 0.5), seeds=(0, 9), max_tokens=6, refusal="cat")


def test_a_cell_is_the_run_with_the_short_form_of_fuzzing(lm, sweep):
    assert sweep.exact.shape == (2, 3, 2)
    for p, l, s in np.ndindex(2, 3, 2):  # noqa: E741
        extra = {"fuzz_strength": sweep.strengths[l], "fuzz_seed": sweep.seeds[s]}
        fuzzed, plain = (lm.run(ASKED[p], max_tokens=6, sampling={"extra_args": e} if e else None, logprobs=True,
                                capture=["logits @ prompt[-1]"]) for e in (extra, None))  # fmt: skip
        answer = sweep.answers[p][l][s]
        assert (answer.text, list(answer.token_ids)) == (fuzzed.text, fuzzed.token_ids)
        assert sweep.unfuzzed[p][0].text == plain.text
        kl, js = divergences(*(grading.log_softmax(np.asarray(run["logits"])[0]) for run in (plain, fuzzed)))
        assert np.allclose((sweep.kl[p, l, s], sweep.js[p, l, s]), (kl, js), atol=1e-12)
        assert sweep.exact[p, l, s] == (fuzzed.token_ids == plain.token_ids)
        assert sweep.refused[p, l, s] == ("cat" in fuzzed.text)
        graded = [lm.run([*plain.prompt_token_ids, *answer.token_ids[:i]], max_tokens=1, score=[token]).scores[token]
                  for i, token in enumerate(answer.token_ids)]  # fmt: skip
        assert sweep.perplexity[p, l, s] == pytest.approx(np.exp(-np.mean(graded)), rel=1e-6)
    assert 0 < sweep.exact.mean() < 1
    assert (sweep.kl[:, 0] == 0).all()
    assert sweep.noise_floor == 0.0
    assert sweep.kl[:, 2].min() > 0


def test_noise_at_sites_of_ones_own(lm, sweep):
    asked = dict(seeds=(0, 9), max_tokens=6)
    same = fuzz_sweep(lm, ASKED, (0.0, 0.1, 0.5), at="embed", **asked)
    assert same.answers == sweep.answers
    assert (same.kl == sweep.kl).all()
    other = fuzz_sweep(lm, ASKED, (0.5,), at=["resid_post[1] @ prompt[-1]", pc.mlp_out[0]], relative=False, **asked)
    edits = [pc.Noise(0.5, at=pc.resid_post[1], tokens=pc.prompt[-1], seed=9), pc.Noise(0.5, at=pc.mlp_out[0], seed=9)]
    assert other.answers[1][0][1].text == lm.run(ASKED[1], max_tokens=6, edits=edits).text
    assert other.noise == "noise at resid_post[1] @ prompt[-1], mlp_out[0]"
    scaled = fuzz_sweep(lm, ASKED, (0.0, 0.9), mode="scale", max_tokens=6)
    run = lm.run(ASKED[0], max_tokens=6, sampling={"extra_args": {"fuzz_strength": 0.9, "fuzz_mode": "scale"}})
    assert scaled.answers[0][1][0].text == run.text
    assert np.isnan(other.noise_floor)


def test_chats_batches_and_the_likeliest_tokens(lm, sweep):
    whole = fuzz_sweep(lm, ASKED, (0.0, 0.1, 0.5), seeds=(0, 9), max_tokens=6, refusal="cat", batch=3)
    assert whole.answers == sweep.answers
    assert (whole.kl == sweep.kl).all()
    assert (whole.perplexity == sweep.perplexity).all()
    some = fuzz_sweep(lm, ASKED, (0.0, 0.5), max_tokens=2, divergence=5, perplexity=False, refusal=None)
    everything = fuzz_sweep(lm, ASKED, (0.0, 0.5), max_tokens=2, divergence=64, perplexity=False)
    assert np.allclose(everything.kl, sweep.kl[:, [0, 2], :1], atol=1e-9)
    assert (some.kl[:, 1] < everything.kl[:, 1]).all()
    assert some.kl[:, 1].min() > 0 == some.noise_floor
    assert np.isnan(some.refused).all()
    chat = fuzz_sweep(lm, ["hello"], (0.0,), chat=True, max_tokens=3, divergence="none")
    assert chat.answers[0][0][0].text == lm.run(messages=[{"role": "user", "content": "hello"}], max_tokens=3).text
    assert np.isnan(chat.kl).all()
    assert (chat.prompts, chat.chat) == (("hello",), True)


def test_what_is_built_in(lm):
    assert (len(PROMPTS), len(set(PROMPTS)), len(STRENGTHS)) == (23, 23, 11)
    assert (len(QUICK_PROMPTS), len(QUICK_STRENGTHS)) == (5, 7)
    assert set(QUICK_PROMPTS) <= set(PROMPTS)
    assert STRENGTHS[0] == QUICK_STRENGTHS[0] == 0
    ratios = np.diff(np.log10(STRENGTHS[1:]))
    assert np.abs(ratios - 0.25).max() < 0.01, "a quarter of a decade apart"
    quick = fuzz_sweep(lm, quick=True, max_tokens=1, perplexity=False, divergence="none")
    assert quick.exact.shape == (5, 7, 1)
    assert fuzz_sweep(lm, ASKED, quick=True, max_tokens=1, perplexity=False).strengths == QUICK_STRENGTHS


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True), ("As an AI language model, I", True), ("I cannot do so.", True),
        ("I am unable to help", True), ("I’m not able to do this", True), ("I can help with that.", False),
        ("The cantor sang.", False), ("You can't miss it: turn left.", False),
    ],
)  # fmt: skip
def test_the_pattern_of_refusals(answer, refused):
    assert bool(re.search(REFUSAL, answer)) == refused


def test_a_sweep_is_saved_framed_and_drawn(sweep, tmp_path: Path):
    loaded = FuzzSweepResult.load(sweep.save(tmp_path / "sweep.safetensors"))
    assert loaded.answers == sweep.answers
    assert loaded.provenance == sweep.provenance
    assert loaded.provenance.seeds == (0, 9)
    for name in ("exact", "prefix", "kl", "js", "perplexity", "refused"):
        assert getattr(loaded, name).tobytes() == getattr(sweep, name).tobytes()
    frame = loaded.to_frame()
    assert len(frame) == 12
    cell = frame[(frame.prompt == ASKED[1]) & (frame.strength == 0.5) & (frame.seed == 9)].iloc[0]
    assert (cell.text, cell.kl) == (sweep.answers[1][2][1].text, sweep.kl[1, 2, 1])
    curves = sweep.picture()
    assert [chart.title for chart in curves.charts] == [
        "Agreement with the unfuzzed answer", "First token", "Fluency", "Refusals"
    ]  # fmt: skip
    kl = curves.charts[1].lines[0]
    assert np.allclose(kl.y, [np.median(sweep.kl[:, l]) for l in range(3)])  # noqa: E741
    assert (kl.low <= kl.y).all()
    assert (kl.y <= kl.high).all()
    assert sweep.plot(tmp_path / "sweep.png").stat().st_size > 10_000
    assert sweep.to_html(tmp_path / "sweep.html").stat().st_size < 100_000
    assert "2 × 3 × 2" in repr(sweep)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (dict(prompts=[]), "prompts: "),
        (dict(prompts="hello"), "prompts: expected a list"),
        (dict(prompts=["a", 3.5]), "prompts[1]: "),
        (dict(prompts=[[]], chat=True), "prompts[0]: "),
        (dict(strengths=[0.1, 0.0]), "strengths: "),
        (dict(strengths=[0.1, float("inf")]), "strengths[1]: "),
        (dict(strengths=["much"]), "strengths[0]: "),
        (dict(seeds=()), "seeds: "),
        (dict(seeds=(1, 1)), "seeds: "),
        (dict(seeds=0.5), "seeds: expected a list"),
        (dict(mode="nose"), "mode: unknown mode 'nose' (did you mean 'noise'?)"),
        (dict(mode="scale", seeds=(0, 1)), "seeds: "),
        (dict(mode="scale", seeds=(0, 1), sampling={"temperature": 0}), "seeds: "),
        (dict(mode="scale", at="embed"), "mode: 'scale'"),
        (dict(relative=False), "relative: "),
        (dict(at=[]), "at: "),
        (dict(at=["embed", "resid_past"]), "at[1]: unknown site 'resid_past'"),
        (dict(divergence="most"), "divergence: unknown divergence 'most'"),
        (dict(divergence=0), "divergence: "),
        (dict(refusal="("), "refusal: "),
        (dict(quick=True, prompts=["a"], strengths=[0.0]), "quick: "),
        (dict(batch=0), "batch: "),
        (dict(sampling={"seed": 3}), "sampling.seed: "),
        (dict(sampling={"extra_args": {}}), "sampling.extra_args: "),
    ],
)
def test_what_cannot_be_is_an_error_first(lm, asked, text):
    with pytest.raises(pc.PatchclampError) as raised:
        fuzz_sweep(lm, **{"prompts": ["hello"], "strengths": (0.0, 0.1), **asked})
    assert str(raised.value).startswith(text)


def test_an_error_of_a_run_is_the_sweeps(lm):
    with pytest.raises(pc.TokensError, match="exceed max_model_len"):
        fuzz_sweep(lm, ["hello"], (0.0,), max_tokens=1000)


# -- measures


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_share_before_answers_differ(a: list[int], b: list[int]):
    share = prefix_share(a, b)
    assert share == prefix_share(b, a)
    assert (share == 1) == (a == b and bool(a))
    first = next((i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]), max(len(a), len(b)))
    assert share == first / max(len(a), len(b), 1)


def test_divergences_equal_their_sums_and_stay_in_bounds():
    draw = np.random.default_rng(1)
    for spread in (0.1, 1.0, 8.0):
        p, q = (grading.log_softmax(spread * draw.normal(size=50)) for _ in range(2))
        kl, js = divergences(p, q)
        assert grading.kl(p, q) == pytest.approx(kl, rel=1e-9)
        assert metric.js(p, q) == metric.js(q, p) == pytest.approx(js, rel=1e-9)
        assert 0 < js < np.log(2)
        assert grading.kl(p, q) != pytest.approx(grading.kl(q, p), rel=1e-4)
        lumped = [metric.with_rest(one[:7]) for one in (p, q)]
        assert np.exp(lumped[0]).sum() == pytest.approx(1)
        assert 0 < grading.kl(*lumped) <= kl
        assert metric.js(*lumped) <= js
    apart = np.array([0.0, -np.inf]), np.array([-np.inf, 0.0])
    assert metric.js(*apart) == pytest.approx(np.log(2))
    assert grading.kl(*apart) == np.inf
    assert grading.kl(p, p) == metric.js(p, p) == 0


def test_wilsons_interval_as_published():
    """Newcombe 1998, table I, score method without continuity correction: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (hits, count), ends in published.items():
        assert np.allclose(wilson(np.array(hits), count), ends, atol=5e-5)


def test_seeds_of_a_prompt_do_not_narrow_an_interval(sweep):
    """Two prompts are two draws, however many seeds each has."""
    line = sweep.picture().charts[0].lines[0]
    assert np.allclose(line.y, sweep.exact.mean((0, 2)))
    assert np.allclose((line.low, line.high), wilson(sweep.exact.mean(2).sum(0), 2))
    doubled = msgspec.structs.replace(sweep, exact=np.repeat(sweep.exact, 5, axis=2))
    wider = doubled.picture().charts[0].lines[0]
    assert np.allclose((line.low, line.high), (wider.low, wider.high))


def test_seeds_count_where_scaled_runs_are_drawn(lm):
    """The fake engine draws nothing: that it is asked for a seed says that the sweep took several."""
    with pytest.raises(pc.UnknownName, match=r"sampling\.seed: .*'seed'"):
        fuzz_sweep(lm, ASKED, (0.5,), mode="scale", seeds=(0, 1), sampling={"temperature": 1.0}, divergence="none")
