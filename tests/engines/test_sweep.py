"""The patch sweep equals a plain loop of Transformers hooks, cell by cell, and the fake engine can carry it too."""

import contextlib
import functools

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import ablation_sweep, causal_trace, patch_sweep, path_patch

from ..reference.hooks import PlainModel

SITES, LAYERS = ["resid_pre", "attn_out", "mlp_out"], [0, 24, 29]
POSITIONS = [1, 2, 3, 9]  # where the prompts differ, and the last
CLEAN, CORRUPT = "The Eiffel Tower is located in the city of", "The Colosseum is located in the city of"


def plain_grid(plain: PlainModel, clean: list[int], corrupt: list[int], sites, layers, pairs, answer: int, foil: int):
    grid = np.zeros((len(sites), len(layers), len(pairs)))
    for s, site in enumerate(sites):
        for l, layer in enumerate(layers):  # noqa: E741
            rows = plain.read(clean, site, layer)
            for p, (a, b) in enumerate(pairs):
                logits = plain.patched_logits(corrupt, site, layer, b, rows[a])
                grid[s, l, p] = float(logits[answer] - logits[foil])
    return grid


@pytest.fixture(scope="module")
def expected(engines, plain):
    tokenizer = engines.get("transformers", "float32").tokenizer
    clean, corrupt = tokenizer.encode(CLEAN), tokenizer.encode(CORRUPT)
    answer, foil = (tokenizer.bare(word)[0] for word in (" Paris", " Rome"))
    return plain_grid(plain, clean, corrupt, SITES, LAYERS, [(p, p) for p in POSITIONS], answer, foil)


@pytest.fixture(scope="module")
def sweeps(engines):
    """The sweep of that on each engine, made once."""
    asked = dict(
        clean=CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Rome", sites=SITES, layers=LAYERS, positions=POSITIONS
    )
    return functools.cache(lambda engine: patch_sweep(engines.get(engine, "float32"), **asked))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_grid_equals_a_plain_hook_loop(sweeps, expected, engine):
    sweep = sweeps(engine)
    assert sweep.grid.shape == (3, 3, 4)
    assert np.abs(sweep.grid - expected).max() <= 1e-3
    top = np.unravel_index(expected.argmax(), expected.shape)
    best = sweep.best(1)[0]
    assert (best.site, best.layer, best.column.corrupt) == (SITES[top[0]], LAYERS[top[1]], (POSITIONS[top[2]],))
    assert sweep.clean > 3 > -3 > sweep.corrupt
    assert sweep.noise_floor < 1e-3


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_at_the_best_place_alpha_leads_from_corrupt_to_clean(engines, sweeps, engine):
    """Denoising: the stronger the clean row is mixed in, the more the answer wins; not at all at 0, all of it at 1."""
    lm, sweep = engines.get(engine, "float32"), sweeps(engine)
    answer, foil = (lm.tokenizer.bare(word)[0] for word in (" Paris", " Rome"))
    best = sweep.best(1)[0]
    at, clean = pc.Site(best.site, best.layer), lm.run(CLEAN, max_tokens=1, capture=[best.site])
    ((read,), (written,)) = best.column.clean, best.column.corrupt

    def difference(alpha: float) -> float:
        row = pc.From(clean, at, pc.prompt[read])
        run = lm.run(CORRUPT, max_tokens=1, score=[answer, foil],
                     edits=[pc.Replace(row, at=at, tokens=pc.prompt[written], alpha=alpha)])  # fmt: skip
        return run.scores[answer] - run.scores[foil]

    none, half, whole = map(difference, (0.0, 0.5, 1.0))
    assert abs(none - sweep.corrupt) <= max(10 * sweep.noise_floor, 1e-4)
    assert abs(whole - best.value) <= 1e-3
    assert sweep.corrupt < -3 < 0 < whole
    assert none + 1 < half < whole - 1


def test_prompts_of_unequal_length_are_aligned_and_the_rest_reported(engines, plain):
    lm = engines.get("vllm", "float32")
    clean, corrupt = "The Louvre is located in the city of", CORRUPT
    sweep = patch_sweep(
        lm, clean=clean, corrupt=corrupt, answer=" Paris", foil=" Rome", sites=["resid_pre"], layers=[20]
    )
    a, b = lm.tokens(clean), lm.tokens(corrupt)
    assert len(a) == len(b) - 1
    assert sweep.alignment == ((0, 0), *((p - 1, p) for p in range(4, 10)))
    assert [(side, position) for side, position, _ in sweep.skipped] == [
        ("clean", 1), ("clean", 2), ("corrupt", 1), ("corrupt", 2), ("corrupt", 3)
    ]  # fmt: skip
    answer, foil = (lm.tokenizer.bare(word)[0] for word in (" Paris", " Rome"))
    expected = plain_grid(plain, a, b, ["resid_pre"], [20], sweep.alignment, answer, foil)
    assert np.abs(sweep.grid - expected).max() <= 1e-3


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_subjects_of_unequal_length_are_matched(engines, engine):
    lm = engines.get(engine, "float32")
    clean, corrupt = "The Statue of Liberty is in the city of", "Big Ben is in the city of"
    match = pc.studies.Match(clean="span('Statue of Liberty')", corrupt="span('Big Ben')")
    sweep = patch_sweep(
        lm, clean=clean, corrupt=corrupt, answer=" New", foil=" London", layers=[0, 12], positions=[match]
    )
    assert (sweep.columns[0].clean, sweep.columns[0].corrupt) == ((2, 3), (0, 1))
    with contextlib.closing(lm.run(clean, max_tokens=1, capture=["resid_pre"])) as run:
        for layer, value in zip((0, 12), sweep.values[:, 0], strict=True):
            at = pc.resid_pre[layer]
            op = pc.Replace(pc.From(run, at, pc.prompt[2:4]), at=at, tokens=pc.prompt[0:2])
            one, other = lm.run(corrupt, max_tokens=1, score=[" New", " London"], edits=[op]).scores.values()
            assert abs(value - (one - other)) <= 1e-4


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_function_of_the_likeliest_tokens_is_a_metric(engines, plain, engine):
    lm = engines.get(engine, "float32")
    entropy = pc.studies.Metric(lambda p: -sum(np.exp(x) * x for x in p.top.values()) + p[" Rome"], (" Rome",), top=20)
    sweep = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=" Paris", sites=["resid_pre"], layers=[24], positions=[-1, 1],
                        metric=entropy)  # fmt: skip
    clean, corrupt = lm.tokens(CLEAN), lm.tokens(CORRUPT)
    for column, p in enumerate((len(clean) - 1, 1)):
        rows = plain.read(clean, "resid_pre", 24)
        logprobs = plain.patched_logits(corrupt, "resid_pre", 24, p, rows[p]).float().log_softmax(-1)
        top = logprobs.topk(20).values
        expected = float(-(top.exp() * top).sum() + logprobs[lm.tokenizer.bare(" Rome")[0]])
        assert sweep.values[0, column] == pytest.approx(expected, abs=1e-3)


def test_metrics_spans_and_unlayered_sites(engines):
    lm = engines.get("vllm", "float32")
    asked = dict(
        clean=CLEAN, corrupt=CORRUPT, answer=" Paris", sites=["resid_pre", "final_norm", "logits"], layers="28:30"
    )
    columns = [pc.span(" Colosseum"), -1]
    diff = patch_sweep(lm, **asked, foil=" Rome", positions=columns)
    share = patch_sweep(lm, **asked, foil=" Rome", positions=columns, metric="recovered")
    alone = patch_sweep(lm, **asked, positions=columns, metric="logprob")
    assert [column.corrupt for column in diff.columns] == [(1, 2, 3), (9,)]
    assert (share.corrupt, share.clean) == (0.0, pytest.approx(1))
    assert np.allclose(share.grid, (diff.grid - diff.corrupt) / (diff.clean - diff.corrupt), equal_nan=True, atol=1e-4)
    assert np.isnan(diff.grid[2]).tolist() == [[True, False], [True, True]], "logits exist at the last position only"
    assert abs(share.grid[1, 0, 1] - 1) < 1e-4, "the clean final norm gives the clean answer"
    assert abs(share.grid[2, 0, 1] - 1) < 1e-4
    assert alone.grid[0].max() < 0
    assert abs(alone.grid[2, 0, 1] - alone.clean) < 1e-4
    frame = diff.to_frame()
    assert len(frame) == 2 * 2 + 2 + 1
    assert set(frame["site"]) == {"resid_pre", "final_norm", "logits"}


@pytest.mark.slow  # each study has its own tests on both engines
def test_the_other_studies_are_the_same_on_both_engines(engines):
    pair = dict(clean=CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Rome")
    found = {}
    for engine in ("vllm", "transformers"):
        lm = engines.get(engine, "float32")
        found[engine] = [
            path_patch(lm, **pair, senders=["z[23, 3:6]"], receivers=["logits", "v[24, 1]", ["q[25, 0]", "mlp_in[23]"]]),
            ablation_sweep(lm, prompt=CLEAN, answer=" Paris", foil=" Rome", sites=["z[23]"], group=3),
            causal_trace(lm, prompt=CLEAN, subject="Eiffel Tower", answer=" Paris and", metric="logprob", seeds=2,
                         layers=[4, 25], positions=["span('Tower')", -1], window=2),
        ]  # fmt: skip
    for one, other in zip(*found.values(), strict=True):
        assert np.abs(one.values - other.values).max() <= 1e-3
        assert np.abs(one.values - one.baseline).max() > 0.1
    trace = found["vllm"][2]
    assert trace.clean > trace.corrupt + 3
    assert trace.best(1)[0].layer == 25
    assert trace.best(1)[0].column.clean == (9,)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (dict(answer="Paris is", foil=""), pc.TokensError, "foil: "),
        (dict(foil=None), pc.ProgramError, "foil="),
        (dict(foil=" Paris"), pc.ProgramError, "identical"),
        (dict(metric="kl"), pc.UnknownName, "available: logit_diff, recovered, logprob, prob"),
        (dict(sites=["resid_prey"]), pc.UnknownName, "sites[0]: unknown site 'resid_prey' (did you mean 'resid_pre'"),
        (dict(layers=[31]), pc.UnsupportedSite, "(0..29)"),
        (dict(positions=[pc.span("Eiffel")]), pc.TokensError, 'positions[0]: span("Eiffel"): not in the prompt'),
        (dict(positions=[40]), pc.TokensError, "position 40"),
        (dict(clean="Paris", corrupt="It was in ancient Rome"), pc.TokensError, "positions: "),
    ],
)
def test_what_cannot_be_swept_is_an_error_first(engines, asked, error, text):
    given = dict(clean=CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Rome", sites=["resid_pre"])
    with pytest.raises(error) as caught:
        patch_sweep(engines.get("transformers", "float32"), **{**given, **asked})
    assert text in str(caught.value)
