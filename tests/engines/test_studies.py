"""Every sweep equals a plain loop of Transformers hooks, cell by cell, on a small random Llama with grouped queries."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.studies import Banked, MeanOf, Resampled, ablation_sweep, causal_trace, patch_sweep, path_patch

from ..models import of_family
from ..reference.hooked import (
    Edit,
    Hooked,
    answer_logprob,
    head,
    logit_diff,
    noise,
    path_patched,
    write,
)

CLEAN, CORRUPT = [5, 9, 30, 41, 7, 100], [5, 9, 77, 12, 7, 100]
OTHERS = [[5, 200, 31, 8, 44, 6], [17, 3, 250, 99, 7, 100], [60, 61, 62, 63, 64, 65]]
ANSWER, FOIL = 300, 17
PAIR = dict(clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL)
LAYERS, HEADS = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return of_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def lm(folder):
    with pc.LM(folder, "transformers", dtype="float32", prove=False, skip_tokenizer_init=True) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain(folder) -> Hooked:
    return Hooked(folder)


@pytest.fixture(scope="module")
def rows(plain):
    """What a prompt has at a site, read by hooks."""
    return functools.cache(lambda ids, site, layer: plain.run(ids, reads=[(site, layer)])[1][site, layer])


def same(found: np.ndarray, expected: np.ndarray, baseline: float) -> None:
    """Two-sided: the grids agree, and cells differ from the baseline and from each other."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-3
    assert np.abs(expected - baseline).max() > 20e-3
    assert expected.std() > 2e-3


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_heads_both_ways(lm, plain, rows, direction):
    sweep = patch_sweep(lm, **PAIR, sites=["z"], group=1, direction=direction, positions=[-1, [2, 3]])
    read, base = (CLEAN, CORRUPT) if direction == "denoising" else (CORRUPT, CLEAN)
    expected = np.zeros((LAYERS * HEADS, 2))
    for r, row in enumerate(sweep.rows):
        for p, positions in enumerate(([5], [2, 3])):
            edit = write(
                "z", row.layer, rows(tuple(read), "z", row.layer), positions, positions, head(plain, int(row.index))
            )
            expected[r, p] = logit_diff(plain, base, [ANSWER], [FOIL], [edit])
    same(sweep.values, expected, sweep.baseline)
    assert sweep.baseline == pytest.approx(logit_diff(plain, base, [ANSWER], [FOIL]), abs=1e-3)
    assert sweep.goal == pytest.approx(logit_diff(plain, read, [ANSWER], [FOIL]), abs=1e-3)
    assert {row.index for row in sweep.rows} == set("0123")


def test_neuron_groups_windows_alpha_and_mask(lm, plain, rows):
    mask = np.zeros(128, np.float32)
    mask[3:90] = 0.5
    groups = patch_sweep(lm, **PAIR, sites=["neurons"], group=100, positions=[2])
    assert {row.index for row in groups.rows} == {"0:100", "100:200", "200:256"}
    expected = np.zeros((len(groups.rows), 1))
    for r, row in enumerate(groups.rows):
        columns = slice(*map(int, row.index.split(":")))
        edit = write("neurons", row.layer, rows(tuple(CLEAN), "neurons", row.layer), [2], [2], columns)
        expected[r, 0] = logit_diff(plain, CORRUPT, [ANSWER], [FOIL], [edit])
    same(groups.values, expected, groups.baseline)

    windows = patch_sweep(lm, **PAIR, sites=["mlp_out"], window=2, alpha=0.7, mask=mask, positions=[2, 3])
    expected = np.zeros((LAYERS, 2))
    clean = [rows(tuple(CLEAN), "mlp_out", layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        for p, position in enumerate((2, 3)):
            edits = []
            for at in range(max(layer - 1, 0), layer + 1):

                def mix(hidden, clean=clean[at], position=position):
                    a = 0.7 * torch.from_numpy(mask)
                    hidden[position] = (1 - a) * hidden[position] + a * clean[position]

                edits.append(Edit("mlp_out", at, mix))
            expected[layer, p] = logit_diff(plain, CORRUPT, [ANSWER], [FOIL], edits)
    same(windows.values, expected, windows.baseline)


def test_answers_of_several_tokens(lm, plain, rows):
    answer, foil = [300, 11, 42], [300, 17]
    sweep = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=answer, foil=foil, sites=["resid_pre"])
    expected = np.zeros((LAYERS, 6))
    for layer in range(LAYERS):
        for p in range(6):
            edit = write("resid_pre", layer, rows(tuple(CLEAN), "resid_pre", layer), [p], [p])
            expected[layer, p] = logit_diff(plain, CORRUPT, answer, foil, [edit])
    same(sweep.values, expected, sweep.baseline)
    alone = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=answer, metric="prob", sites=["resid_pre[1]"])
    edit = write("resid_pre", 1, rows(tuple(CLEAN), "resid_pre", 1), [3], [3])
    assert alone.values[0, 3] == pytest.approx(np.exp(answer_logprob(plain, CORRUPT, answer, [edit])), rel=1e-3)


def test_sources(lm, plain, rows):
    """Zeros, means over all positions and by position, drawn prompts, and a vector and a run of the bank."""
    lm.bank["here"] = np.linspace(-1, 1, 128, dtype=np.float32)
    lm.bank["other"] = other = lm.run(OTHERS[0], max_tokens=1, capture=["mlp_out"])
    stacked = {layer: torch.stack([rows(tuple(ids), "mlp_out", layer) for ids in OTHERS]) for layer in range(LAYERS)}
    drawn = {
        (layer, p): np.random.default_rng((4, 0, layer, p)).integers(3, size=2)
        for layer in range(LAYERS)
        for p in (0, 1)
    }
    cases = [
        ("zeros", lambda layer, p, at: [torch.zeros(128)]),
        (MeanOf(OTHERS), lambda layer, p, at: [stacked[layer].mean((0, 1))]),
        (MeanOf(OTHERS, tokens="prompt[1:]"), lambda layer, p, at: [stacked[layer][:, 1:].mean((0, 1))]),
        (MeanOf(OTHERS, by_position=True), lambda layer, p, at: [stacked[layer].mean(0)[at]]),
        (Resampled(OTHERS, seed=4, draws=2), lambda layer, p, at: [stacked[layer][i, at] for i in drawn[layer, p]]),
        (Banked("here"), lambda layer, p, at: [torch.linspace(-1, 1, 128)]),
        ("bank:other", lambda layer, p, at: [stacked[layer][0, at]]),
    ]
    for source, values in cases:
        sweep = patch_sweep(lm, **PAIR, sites=["mlp_out"], positions=[1, 4], source=source)
        expected = np.zeros((LAYERS, 2))
        for layer in range(LAYERS):
            for p, at in enumerate((1, 4)):
                edits = [write("mlp_out", layer, value[None], [0], [at]) for value in values(layer, p, at)]
                expected[layer, p] = np.mean([logit_diff(plain, CORRUPT, [ANSWER], [FOIL], [edit]) for edit in edits])
        same(sweep.values, expected, sweep.baseline)
    other.close()
    del lm.bank["here"], lm.bank["other"]


def test_pairs_have_their_mean_and_every_value(lm, plain, rows):
    cleans, corrupts = [CLEAN, OTHERS[0], OTHERS[1]], [CORRUPT, OTHERS[2], CLEAN]
    sweep = patch_sweep(lm, clean=cleans, corrupt=corrupts, answer=[ANSWER, 1, 2], foil=FOIL, sites=["attn_out"],
                        positions={"end": -1, "odd": [[1], [2], [3]]})  # fmt: skip
    expected = np.zeros((3, LAYERS, 2))
    for n, (clean, corrupt, answer) in enumerate(zip(cleans, corrupts, (ANSWER, 1, 2), strict=True)):
        for layer in range(LAYERS):
            for p, at in enumerate((5, n + 1)):
                edit = write("attn_out", layer, rows(tuple(clean), "attn_out", layer), [at], [at])
                expected[n, layer, p] = logit_diff(plain, corrupt, [answer], [FOIL], [edit])
    same(sweep.each.reshape(9, 2), expected.reshape(9, 2), sweep.baseline)
    assert np.allclose(sweep.values, sweep.each.mean(0))
    assert (sweep.low <= sweep.values + 1e-9).all()
    assert (sweep.values <= sweep.high + 1e-9).all()
    assert [column.label for column in sweep.columns] == ["end", "odd"]
    assert [pair.columns[1].corrupt for pair in sweep.pairs] == [(1,), (2,), (3,)]


def test_ablations(lm, plain):
    sweep = ablation_sweep(lm, prompt=CLEAN, answer=ANSWER, foil=FOIL, sites=["z"], group=1)
    expected = np.zeros((LAYERS * HEADS, 1))
    for r, row in enumerate(sweep.rows):
        zeros = torch.zeros(6, HEADS * plain.head)
        edit = write("z", row.layer, zeros, range(6), range(6), head(plain, int(row.index)))
        expected[r, 0] = logit_diff(plain, CLEAN, [ANSWER], [FOIL], [edit])
    same(sweep.values, expected, sweep.baseline)
    each = ablation_sweep(lm, prompt=CLEAN, answer=[ANSWER, 4], metric="logprob", sites=["mlp_out"], positions="each")
    edit = write("mlp_out", 1, torch.zeros(6, 128), [3], [3])
    assert each.values[1, 3] == pytest.approx(answer_logprob(plain, CLEAN, [ANSWER, 4], [edit]), abs=1e-3)


def test_the_causal_trace(lm, plain, rows):
    subject, seeds = [1, 2, 3], (0, 7)
    trace = causal_trace(lm, prompt=CLEAN, subject=pc.prompt[1:4], answer=ANSWER, metric="logprob",
                         sites=["resid_post", "mlp_out"], window=2, seeds=seeds)  # fmt: skip
    embeddings = rows(tuple(CLEAN), "embed", 0)[subject]
    assert trace.std == pytest.approx(3 * float(embeddings.double().std(correction=0)), rel=1e-5)
    noises = [noise(subject, trace.std, seed) for seed in seeds]
    for s, edit in enumerate(noises):
        for r, row in enumerate(trace.rows):
            window = [at for at in range(LAYERS) if row.layer - 1 <= at <= row.layer]
            for p in range(6):
                restore = [write(row.site, at, rows(tuple(CLEAN), row.site, at), [p], [p]) for at in window]
                expected = answer_logprob(plain, CLEAN, [ANSWER], [edit, *restore])
                assert trace.each[s, r, p] == pytest.approx(expected, abs=1e-3)
    noised = [answer_logprob(plain, CLEAN, [ANSWER], [edit]) for edit in noises]
    assert trace.corrupt == pytest.approx(np.mean(noised), abs=1e-3)
    assert trace.clean == pytest.approx(answer_logprob(plain, CLEAN, [ANSWER]), abs=1e-3)
    assert np.abs(trace.values - trace.corrupt).max() > 20e-3
    assert trace.provenance.seeds == seeds


@pytest.mark.parametrize("freeze", [("z", "mlp_out"), ("z",)])
def test_path_patching(lm, plain, freeze):
    receivers = ["logits", "q[2, 3]", "k[1, 1]", "v[2, 0]"]
    paths = path_patch(lm, **PAIR, receivers=receivers, freeze=freeze)
    expected = np.full((LAYERS * HEADS, 4), np.nan)
    for r, row in enumerate(paths.rows):
        for p, receiver in enumerate((None, ("q", 2, 3), ("k", 1, 1), ("v", 2, 0))):
            if receiver is None or receiver[1] > row.layer:
                sender = row.layer, int(row.index)
                expected[r, p] = path_patched(plain, CORRUPT, CLEAN, sender, receiver, freeze, ANSWER, FOIL)
    run = ~np.isnan(expected)
    assert np.array_equal(run, ~np.isnan(paths.values))
    same(paths.values[run], expected[run], paths.baseline)


def test_path_patching_over_several_pairs(lm, plain):
    """Every pair alone equals the loop of hooks; the grid has their mean, its interval and the test of its effect."""
    pairs = [(CLEAN, CORRUPT, ANSWER, FOIL), ([5, 9, 30, 8, 44, 6, 21], [5, 9, 77, 8, 44, 6, 21], FOIL, 40),
             ([17, 3, 250, 99, 7], [60, 3, 62, 99, 7], 40, ANSWER)]  # fmt: skip
    clean, corrupt, answer, foil = (list(of) for of in zip(*pairs, strict=True))
    asked = dict(senders=["z[0]", "z[1, 2]"], receivers=["logits", "v[2, 0]"])
    paths = path_patch(lm, clean=clean, corrupt=corrupt, answer=answer, foil=foil, **asked, seed=4)
    expected = np.array([
        [[path_patched(plain, base, source, (row.layer, int(row.index)), receiver, ("z", "mlp_out"), right, wrong)
          for receiver in (None, ("v", 2, 0))] for row in paths.rows]
        for source, base, right, wrong in pairs
    ])  # fmt: skip
    bases = np.array([pair.corrupt for pair in paths.pairs])
    same(paths.each - bases[:, None, None], expected - bases[:, None, None], 0.0)
    for n, base in enumerate(corrupt):
        assert bases[n] == pytest.approx(logit_diff(plain, base, [answer[n]], [foil[n]]), abs=1e-3)
    assert np.allclose(paths.values, paths.each.mean(0))
    assert paths.corrupt == pytest.approx(bases.mean())
    assert len({len(pair.clean_tokens) for pair in paths.pairs}) == 3
    from patchclamp.studies.metric import spread

    of = spread(paths.each.reshape(3, -1), bases, 4)
    for name, values in of._asdict().items():
        assert np.array_equal(getattr(paths, name).ravel(), values)
    assert paths.p.min() == 2 / 2**3, "three pairs have eight signs"
    last = path_patch(lm, clean=clean, corrupt=corrupt, answer=answer, foil=foil, **asked, positions=[2, 2, -1])
    assert [pair.columns[0].corrupt for pair in last.pairs] == [(2,), (2,), (4,)]
    assert not np.allclose(last.each, paths.each)


@pytest.mark.parametrize("align", ["last", "first"])
def test_paths_between_prompts_of_different_lengths(lm, plain, align):
    """The sender's tokens are matched; what is frozen, and received, is of the patched prompt alone."""
    clean, corrupt = [5, 9, 30, 8, 44, 6, 21], [5, 77, 8, 6, 21]
    match = pc.studies.Match(clean=pc.prompt[1:4], corrupt=pc.prompt[1:3], align=align)
    asked = dict(senders=["z[0, 1]", "z[1, 2]"], receivers=["logits", "v[2, 0]"], answer=ANSWER, foil=FOIL)
    paths = path_patch(lm, clean=clean, corrupt=corrupt, positions=match, **asked)
    pairs = [(2, 1), (3, 2)] if align == "last" else [(1, 1), (2, 2)]
    expected = [[path_patched(plain, corrupt, clean, (row.layer, int(row.index)), receiver, ("z", "mlp_out"), ANSWER,
                              FOIL, pairs) for receiver in (None, ("v", 2, 0))] for row in paths.rows]  # fmt: skip
    same(paths.values, np.array(expected), paths.baseline)
    listed = path_patch(lm, clean=[clean, clean], corrupt=[corrupt, corrupt], positions=[match, {"clean": 3, "corrupt": 1}],
                        **asked)  # fmt: skip
    assert np.allclose(listed.each[0], paths.values, atol=1e-4)
    assert listed.pairs[1].columns[0].clean == (3,)
    with pytest.raises(pc.TokensError, match="no partner"):
        path_patch(lm, clean=clean, corrupt=corrupt, **asked)


def test_paths_of_a_list_with_one_pair_are_those_of_the_pair(lm):
    asked = dict(senders=["z[0]"], receivers=["q[2, 3]"], answer=ANSWER, foil=FOIL)
    one = path_patch(lm, clean=CLEAN, corrupt=CORRUPT, **asked)
    same_one = path_patch(lm, clean=[CLEAN], corrupt=[CORRUPT], **asked)
    assert np.array_equal(one.each, same_one.each)
    assert (one.low, one.p) == (same_one.low, same_one.p) == (None, None)
    assert one.question == same_one.question
