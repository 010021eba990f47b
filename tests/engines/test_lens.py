"""Lens, direct attribution, patchscope and attribution patching equal plain loops of ours over Transformers, on either
engine; their matrices are of the checkpoint, and a checkpoint that is another model's is found out."""

import contextlib
import functools
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp import proving
from patchclamp.cli.study_commands import app
from patchclamp.engines import transformers
from patchclamp.proving import prove_lens
from patchclamp.studies import (
    AttributionPatching,
    attribution_patching,
    direct_attribution,
    edge_attribution,
    fit_lens,
    logit_lens,
    patch_sweep,
    patchscope,
)
from patchclamp.studies.study import Reporter

from ..conftest import WIDTH
from ..models import of_family, with_words
from ..reference import readouts
from ..reference.hooks import PlainModel
from .conftest import CHUNKED, PROMPTS, VLLM

PROMPT = "The Museum of Paris is located in the city of"
CLEAN, CORRUPT = "The Museum of Paris is in", "The Church of Rome is in"
both_engines = pytest.mark.parametrize("engine", ["transformers", "vllm"])
PATCHED = dict(clean=CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Rome")
IDS = list(range(5, 17))


@pytest.fixture(scope="module")
def plain(narrowed) -> PlainModel:
    return PlainModel(narrowed)


@pytest.fixture(scope="module")
def ids(narrow):
    tokenizer = narrow.get("transformers", "float32").tokenizer
    return lambda text: tokenizer.bare(text)[0] if text.startswith(" ") else tokenizer.encode(text)


@pytest.fixture(scope="module")
def seen(plain, ids):
    return readouts.lens(plain, ids(PROMPT), list(range(8)))


@pytest.fixture(scope="module")
def lenses(narrow):
    """The lens of the prompt on each engine, made once."""
    return functools.cache(lambda engine: logit_lens(narrow.get(engine, "float32"), PROMPT, tokens=[" Paris", " the"]))


class TestLens:
    def test_ranks_tokens_and_kl_equal_a_plain_loop(self, lenses, seen, ids):
        lens, chosen = lenses("transformers"), (ids(" Paris"), ids(" the"))
        assert lens.readout == "device"
        assert lens.ranks.shape == (8, 10, 2)
        for (layer, position), there in seen.items():
            ranks = lens.ranks[layer, position].tolist()
            assert all(rank in there.ranks(token) for rank, token in zip(ranks, chosen, strict=True)), (layer, position)
            assert lens.top(layer, position)[0].token_id == int(there.logits_V.argmax())
            expected = there.logprobs_V[list(chosen)].numpy()
            assert np.abs(lens.logprobs[layer, position] - expected).max() < 1e-3
            assert abs(lens.kl[layer, position] - there.kl) < 1e-3
        surely = [len(there.ranks(token)) == 1 for there in seen.values() for token in chosen]
        assert np.mean(surely) > 0.8
        assert lens.kl[-1].max() < 1e-6 < lens.kl[0].min()

    def test_vllm_sees_the_same(self, lenses):
        ours, theirs = lenses("transformers"), lenses("vllm")
        assert np.abs(ours.logprobs - theirs.logprobs).max() < 2e-3
        assert (ours.top_ids[:, :, 0] == theirs.top_ids[:, :, 0]).mean() > 0.99
        assert ours.readout == theirs.readout == "device"

    @both_engines
    @pytest.mark.parametrize("readout", ["weights", "engine"])
    def test_every_readout_sees_what_the_device_does(self, narrow, lenses, engine, readout):
        few = dict(tokens=[" Paris", " the"], layers=[0, 5, 7], positions=[3, -1])
        lens = logit_lens(narrow.get(engine, "float32"), PROMPT, readout=readout, **few)
        whole = lenses(engine)
        assert (lens.readout, whole.readout) == (readout, "device")
        cells = np.ix_([0, 5, 7], [3, 9])
        for name in ("logprobs", "kl", "entropy", "top_probs"):
            assert np.abs(getattr(lens, name) - getattr(whole, name)[cells]).max() < 1e-4, name
        np.testing.assert_allclose(lens.ranks, whole.ranks[cells], rtol=1e-3)  # far down, tokens tie within rounding

    @both_engines
    def test_parts_resume_and_equal_the_whole(self, narrow, lenses, engine, tmp_path, monkeypatch):
        lm, whole = narrow.get(engine, "float32"), lenses(engine)
        monkeypatch.setattr(
            importlib.import_module("patchclamp.studies.logit_lens"), "DEVICE_ROWS", 3 * 9
        )  # three positions at a time
        read, calls = lm.engine.read_streams, list[int]()

        def stop(*asked: Any) -> Any:
            calls.append(len(asked[1]))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return read(*asked)

        monkeypatch.setattr(lm.engine, "read_streams", stop)
        asked = dict(tokens=[" Paris", " the"], resume=tmp_path / "lens.journal")
        with pytest.raises(KeyboardInterrupt):
            logit_lens(lm, PROMPT, **asked)
        parts = logit_lens(lm, PROMPT, **asked)
        assert calls == [3, 3, 3, 3, 1]
        for name in ("logprobs", "kl", "entropy", "top_probs"):
            assert np.abs(getattr(parts, name) - getattr(whole, name)).max() < 1e-5
        assert (parts.ranks == whole.ranks).mean() > 0.99

    def test_what_the_device_cannot_read_is_refused_if_asked(self, narrow):
        lm = narrow.get("transformers", "float32")
        for asked in ({"unembedding": torch.eye(WIDTH)}, {"translators": {4: torch.eye(WIDTH)}}):
            with pytest.raises(pc.ProgramError, match="readout"):
                logit_lens(lm, PROMPT, readout="device", **asked)
            assert logit_lens(lm, PROMPT, layers=[4], **asked).readout == "weights"

    def test_a_tuned_lens_moves_rows_before_they_are_read(self, narrow, plain, ids):
        matrix, bias = torch.eye(WIDTH) + 0.05 * torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
        lm = narrow.get("transformers", "float32")
        lens = logit_lens(
            lm, PROMPT, tokens=[" Paris"], layers=[4, 5], translators={4: (matrix, bias), 5: torch.eye(WIDTH)}
        )
        seen = readouts.lens(plain, ids(PROMPT), [4, 5], lambda layer, row: matrix @ row + bias if layer == 4 else row)
        for i, layer in enumerate((4, 5)):
            expected = [float(seen[layer, p].logprobs_V[ids(" Paris")]) for p in range(10)]
            assert np.abs(lens.logprobs[i, :, 0] - expected).max() < 1e-3
            assert np.abs(lens.kl[i] - [seen[layer, p].kl for p in range(10)]).max() < 1e-3
        assert lens.lens == "translated lens"

    @pytest.mark.parametrize("readout", ["weights", "engine"])
    def test_a_matrix_in_the_unembeddings_place(self, narrow, plain, ids, readout):
        probe = torch.randn(3, WIDTH) / 12
        lens = logit_lens(narrow.get("transformers", "float32"), PROMPT, unembedding=probe, labels=["a", "b", "c"],
                          tokens=["b"], layers=3, readout=readout)  # fmt: skip
        with torch.no_grad():
            normed = plain.net.model.norm(plain.read(ids(PROMPT), "resid_post", 3))
        expected = (normed @ probe.T).log_softmax(-1)
        assert np.abs(lens.probability("b")[0] - expected[:, 1].exp().numpy()).max() < 1e-4
        assert lens.top(3, -1)[0].token == "abc"[int(expected[-1].argmax())]


class TestDirectAttribution:
    @pytest.fixture(scope="class")
    def expected(self, plain, ids):
        return readouts.direct(plain, ids(PROMPT), ids(" Paris"), ids(" Rome"))

    @both_engines
    def test_parts_equal_a_plain_loop_and_add_up(self, narrow, expected, engine, plain, ids):
        result = direct_attribution(narrow.get(engine, "float32"), PROMPT, answer=" Paris", foil=" Rome")
        shares = {share.part: share.value for share in result.ranked()}
        assert expected.keys() <= shares.keys()
        assert max(abs(shares[part] - value) for part, value in expected.items()) < 1e-3
        logits_V = plain.logits(ids(PROMPT))
        difference = float(logits_V[ids(" Paris")] - logits_V[ids(" Rome")])
        assert abs(result.shares.sum() - difference) < 1e-3
        assert abs(result.logit_diffs[0] - difference) < 1e-3
        for layer in range(8):
            assert abs(result.heads[0, layer].sum() - shares[f"attn_out[{layer}]"]) < 1e-3
            assert abs(result.neurons[0, layer].sum() - shares[f"mlp_out[{layer}]"]) < 1e-3

    def test_several_prompts_have_each_their_answer(self, narrow):
        lm = narrow.get("transformers", "float32")
        prompts, answers = [PROMPT, "The Church of Rome is located in the city of"], [" Paris", " Rome"]
        asked = dict(by=["layer"])
        both = direct_attribution(lm, prompts, answer=answers, foil=answers[::-1], **asked)
        alone = [direct_attribution(lm, prompts[i], answer=answers[i], foil=answers[1 - i], **asked) for i in (0, 1)]
        assert np.abs(both.shares - np.concatenate([one.shares for one in alone])).max() < 1e-4
        assert both.share("mlp_out[6]") == pytest.approx(np.mean([one.share("mlp_out[6]") for one in alone]), abs=1e-4)
        assert both.heads.shape == both.neurons.shape == (2, 8, 0)


class TestPatchscope:
    @both_engines
    def test_what_is_said_equals_a_plain_loop(self, narrow, plain, ids, engine):
        lm = narrow.get(engine, "float32")
        target = "cat -> cat\n1135 -> 1135\nhello -> hello\n?"
        result = patchscope(lm, source=f"{PROMPT} Paris", layers=[1, 6], target_layers=[1, 6], max_tokens=3)
        into = ids(target)
        for s, layer in enumerate((1, 6)):
            row = plain.read(lm.tokens(f"{PROMPT} Paris"), "resid_post", layer)[-1]
            for g, to in enumerate((1, 6)):
                said = readouts.placed(plain, into, to, len(into) - 1, row, 3)
                assert result.texts[s][g] == lm.tokenizer.decode(said)
                assert result.top_ids[s, g, 0] == said[0]
        assert len({result.plain_text, *result.texts[0], *result.texts[1]}) > 2
        assert result.moved.min() > 0.003

    def test_norms_are_matched_if_asked(self, narrow, plain, ids):
        lm = narrow.get("transformers", "float32")
        asked = dict(source=PROMPT, source_position=3, target="It is x, you know", target_position=pc.span("x"),
                     layers=5, target_layers=2, max_tokens=1, tokens=[" and"])  # fmt: skip
        result, free = patchscope(lm, normed=True, **asked), patchscope(lm, **asked)
        source = plain.read(ids(PROMPT), "resid_post", 5)[3]
        into = lm.tokens("It is x, you know")
        at = result.target_positions[0]
        replaced = plain.read(into, "resid_post", 2)[at]
        scale = float(replaced.norm() / source.norm())
        assert result.scales[0, 0] == pytest.approx(scale, rel=1e-4)
        for made, factor in ((result, scale), (free, 1.0)):
            logits_V = plain.patched_logits(into, "resid_post", 2, at, source * factor)
            expected = float(logits_V.log_softmax(-1)[lm.tokenizer.bare(" and")[0]])
            assert abs(made.logprobs[0, 0, 0] - expected) < 1e-3
        assert abs(result.logprobs[0, 0, 0] - free.logprobs[0, 0, 0]) > 1e-2


class TestAttributionPatching:
    def test_estimates_equal_a_plain_gradient(self, narrow, plain, ids):
        lm = narrow.get("transformers", "float32")
        result = attribution_patching(lm, sites=["resid_pre", "mlp_out", "z"], verify=0, sample=0, **PATCHED)
        clean, corrupt = (readouts.slopes(plain, ids(text), ids(" Paris"), ids(" Rome")) for text in (CLEAN, CORRUPT))
        for r, row in enumerate(result.rows):
            (rows, _), (base, slope) = clean[row.site, row.layer], corrupt[row.site, row.layer]
            part = slice(None) if row.head is None else slice(64 * row.head, 64 * (row.head + 1))
            expected = ((rows - base) * slope)[:, part].sum(-1).numpy()
            assert np.abs(result.estimates[r] - expected).max() < 1e-3, row
        assert np.isnan(result.exact).all()
        assert np.abs(result.estimates).max() > 0.5

    def test_integrated_gradients_equal_a_plain_loop(self, narrow, plain, ids):
        lm, steps = narrow.get("transformers", "float32"), 4
        asked = PATCHED | dict(sites=["resid_pre"], verify=0, sample=0)
        result = attribution_patching(lm, steps=steps, **asked)
        embed = plain.net.model.embed_tokens.weight.detach()
        begin, end = embed[ids(CORRUPT)], embed[ids(CLEAN)]
        both = [readouts.slopes(plain, ids(text), ids(" Paris"), ids(" Rome")) for text in (CLEAN, CORRUPT)]
        way = [
            readouts.slopes(plain, ids(CORRUPT), ids(" Paris"), ids(" Rome"), begin + (k + 0.5) / steps * (end - begin))
            for k in range(steps)
        ]
        for r, row in enumerate(result.rows):
            place = row.site, row.layer
            slope = sum(one[place][1] for one in way) / steps
            expected = ((both[0][place][0] - both[1][place][0]) * slope).sum(-1).numpy()
            assert np.abs(result.estimates[r] - expected).max() < 1e-3, row
        # completeness: what is attributed to the embedding is what tells the two runs apart
        finer = attribution_patching(lm, steps=24, layers=0, **asked)
        assert finer.estimates.sum() == pytest.approx(result.clean - result.corrupt, abs=0.25)

    @both_engines
    def test_matched_tokens_are_estimated_and_patched_together(self, narrow, plain, ids, engine):
        lm, on = narrow.get("transformers", "float32"), narrow.get(engine, "float32")
        clean, corrupt = "The Museum of London is in the city of", "New York is in the city of"
        match = pc.studies.Match(clean="span('Museum of London')", corrupt="span('New York')")
        asked = dict(clean=clean, corrupt=corrupt, answer=" Paris", foil=" Rome")
        result = attribution_patching(
            lm, on=on, sites=["resid_pre"], layers=[1, 4], verify=14, sample=0, match=match, **asked
        )
        assert [(of.clean, of.corrupt) for of in result.columns[:2]] == [((2,), (0,)), ((3,), (1,))]
        both = [readouts.slopes(plain, ids(text), ids(" Paris"), ids(" Rome")) for text in (clean, corrupt)]
        with contextlib.closing(on.run(clean, max_tokens=1, capture=["resid_pre"])) as run:
            for r, row in enumerate(result.rows):
                (rows, _), (base, slope) = both[0][row.site, row.layer], both[1][row.site, row.layer]
                for p, column in enumerate(result.columns):
                    (a,), (b,), at = column.clean, column.corrupt, pc.resid_pre[row.layer]
                    assert result.estimates[r, p] == pytest.approx(
                        float(((rows[a] - base[b]) * slope[b]).sum()), abs=1e-3
                    )
                    op = pc.Replace(pc.From(run, at, pc.prompt[a]), at=at, tokens=pc.prompt[b])
                    one, other = on.run(corrupt, max_tokens=1, score=[" Paris", " Rome"], edits=[op]).scores.values()
                    assert result.exact[r, p] == pytest.approx(one - other - result.corrupt, abs=1e-3)
        assert np.abs(result.exact[:, :2]).max() > 0.01

    def test_a_match_takes_the_place_of_the_alignment(self, narrow):
        lm = narrow.get("transformers", "float32")
        result = attribution_patching(lm, clean=[5, 6, 7, 8], corrupt=[5, 9, 10, 8], answer=11, foil=12, verify=0, sample=0,
                                      sites=["resid_pre"], layers=0, match={"clean": 1, "corrupt": 2})  # fmt: skip
        assert [(of.clean, of.corrupt) for of in result.columns] == [((0,), (0,)), ((1,), (2,)), ((3,), (3,))]

    @pytest.mark.parametrize("metric", ["logprob", "prob", "recovered", "own"])
    def test_other_metrics(self, narrow, metric):
        """Estimates are the derivative of the metric: a patch that is mixed in a little moves it by as much."""
        lm, mix = narrow.get("transformers", "float32"), 0.005
        if metric == "own":
            metric = pc.studies.Metric(
                lambda p: p.answer**2 - 3 * p[" London"] + p.foil, tokens=(" London",), name="own"
            )
        asked = PATCHED | dict(sites=["mlp_out", "attn_out"], layers=[2, 5], metric=metric)
        if metric in ("logprob", "prob"):  # of the answer alone
            del asked["foil"]
        result = attribution_patching(lm, verify=6, sample=3, **asked)
        sweep, mixed = patch_sweep(lm, **asked), patch_sweep(lm, alpha=mix, **asked)
        assert result.metric == sweep.metric
        assert (result.clean, result.corrupt) == pytest.approx((sweep.clean, sweep.corrupt), abs=1e-4)
        moved = (mixed.values - mixed.corrupt).reshape(result.estimates.shape) / mix
        largest = np.abs(result.estimates).max()
        assert np.abs(result.estimates - moved).max() < 0.05 * largest
        verified = np.isfinite(result.exact)
        exact = (sweep.values - sweep.corrupt).reshape(result.exact.shape)
        assert np.abs(result.exact - exact)[verified].max() < 1e-3 * max(1.0, np.abs(exact).max())
        assert repr(result)
        assert result.figure()

    def test_a_metric_is_asked_for_no_probability_above_1(self, narrow):
        """Its derivative is measured by differences, also where the answer is certain."""
        lm, seen = narrow.get("transformers", "float32"), []

        def log_odds(logprobs):
            seen.append(logprobs.answer)
            return logprobs.answer - np.log(-np.expm1(min(logprobs.answer, -1e-12)))

        asked = dict(clean="a b c d e f g", corrupt="a b c d e f x", answer=" h", verify=0, sample=0, layers=[1])
        assert np.isfinite(attribution_patching(lm, **asked, metric=log_odds).estimates).all()
        assert len(seen) > 4
        assert max(seen) <= 0

    @pytest.mark.parametrize("logprob", [-5.0, -0.1, -1e-3, -1e-4, -1e-6])
    def test_the_derivative_is_exact_near_certainty(self, narrow, logprob):
        """Of a metric that bends there: the log-odds of p have the derivative 1 / (1 − p)."""
        metric = pc.studies.Metric(lambda p: p.answer - np.log(-np.expm1(p.answer)), name="log_odds")
        study = AttributionPatching(**PATCHED | dict(foil=None, metric=metric, layers=[1]))
        cells = AttributionPatching.candidates(narrow.get("transformers", "float32"), study)
        [slope] = cells._slopes(np.array([logprob])).values()
        assert slope == pytest.approx(-1 / np.expm1(logprob), rel=2e-3)

    def test_a_metric_of_steps_is_refused(self, narrow):
        """Its derivative is 0 everywhere, which would rank cells at random."""
        lm, favoured = narrow.get("transformers", "float32"), lambda p: p.answer > p.foil
        for study in (attribution_patching, edge_attribution):
            with pytest.raises(pc.ProgramError, match="every estimate is 0") as caught:
                study(lm, **PATCHED, metric=favoured)
            assert caught.value.path == "metric"

    def test_progress_counts_verified_cells_without_reruns(self, narrow):
        told = []

        class Counted(Reporter):
            def begin(self, what, total):
                told.append(-total)

            def advance(self, done):
                told.append(done)

        attribution_patching(narrow.get("transformers", "float32"), **PATCHED, layers=[1], verify=3, sample=2,
                             show_progress=Counted())  # fmt: skip
        assert told[0] == -5
        assert sum(told) == 0

    def test_the_likeliest_tokens_have_no_gradient(self, narrow):
        with pytest.raises(pc.ProgramError, match="top=0") as caught:
            attribution_patching(
                narrow.get("transformers", "float32"), **PATCHED, metric=pc.studies.Metric(lambda p: 0.0, top=5)
            )
        assert caught.value.path == "metric.top"

    @both_engines
    def test_exact_patches_are_those_of_the_sweep(self, narrow, engine):
        lm, on = narrow.get("transformers", "float32"), narrow.get(engine, "float32")
        asked = PATCHED | dict(sites=["resid_pre", "mlp_out"], layers=[0, 3, 6])
        result = attribution_patching(lm, on=on, steps=4, verify=10, sample=6, seed=3, **asked)
        sweep = patch_sweep(on, **asked)
        exact = sweep.grid.reshape(result.exact.shape) - sweep.corrupt
        verified = np.isfinite(result.exact)
        assert verified.sum() == 16
        assert np.abs(result.exact - exact)[verified].max() < 1e-3
        assert result.sampled.sum() == 6
        assert (result.sampled <= verified).all()
        least = np.abs(result.estimates[verified & ~result.sampled]).min()
        assert (np.abs(result.estimates[~verified]) <= least).all()
        assert result.verified_on.engine.startswith(engine)
        assert result.pearson() == pytest.approx(
            np.corrcoef(result.estimates[verified], exact[verified])[0, 1], abs=1e-3
        )
        assert abs(result.pearson()) > 0.3

    def test_other_engines_say_who_has_gradients(self, narrow):
        with pytest.raises(pc.EngineError, match="gradients"):
            attribution_patching(narrow.get("vllm", "float32"), **PATCHED)


class TestEdges:
    """What one part tells another, against a model in which only the other's norm reads something else."""

    @pytest.fixture(scope="class")
    def expected(self, plain, ids):
        """The effect of `share` of an edge, by sender and receiver."""
        into, tokens = ids(CORRUPT), (ids(" Paris"), ids(" Rome"))

        def effect(sender: str, receiver: str, share: float = 1.0) -> float:
            (name, layer), (reads, at) = ((word.partition("[")[0], int(word[:-1].partition("[")[2]))
                                          for word in (sender, receiver))  # fmt: skip
            change = plain.read(ids(CLEAN), name, layer) - plain.read(into, name, layer)
            block = plain.net.model.layers[at]
            norm = {"attn_in": block.input_layernorm, "mlp_in": block.post_attention_layernorm,
                    "resid_post": plain.net.model.norm}[reads]  # fmt: skip
            logits_V = readouts.over_edge(plain, into, norm, share * change)
            return float(logits_V[tokens[0]] - logits_V[tokens[1]])

        return effect

    @both_engines
    def test_exact_patches_equal_a_plain_loop(self, narrow, expected, engine):
        hub, on = narrow.get("transformers", "float32"), narrow.get(engine, "float32")
        result = edge_attribution(hub, on=on, steps=3, verify=5, sample=5, **PATCHED)
        frame = result.to_frame().dropna()
        assert len(frame) == 10
        for edge in frame.itertuples():
            effect = expected(edge.sender, edge.receiver) - expected(edge.sender, edge.receiver, 0.0)
            assert edge.exact == pytest.approx(effect, abs=1e-3), edge
        assert frame.exact.abs().max() > 0.1

    def test_estimates_are_the_slope_of_a_small_part_of_an_edge(self, narrow, expected):
        result = edge_attribution(narrow.get("transformers", "float32"), verify=0, sample=0, **PATCHED)
        edges = {(edge.sender, edge.receiver): edge.estimate for edge in result.proposals(1000)}
        assert len(edges) == 17 * 18 // 2
        assert ("mlp_out[3]", "attn_in[3]") not in edges
        for ends in [("resid_pre[0]", "attn_in[0]"), ("attn_out[2]", "mlp_in[2]"), ("mlp_out[1]", "attn_in[5]"),
                     ("attn_out[6]", "resid_post[7]")]:  # fmt: skip
            slope = (expected(*ends, 1e-2) - expected(*ends, -1e-2)) / 2e-2
            assert edges[ends] == pytest.approx(slope, rel=0.03, abs=5e-3), ends

    def test_edges_of_another_metric(self, narrow):
        """A share of the logit difference, and the odds of the answer against the foil, which are a function of it."""
        lm, asked = narrow.get("transformers", "float32"), PATCHED | dict(verify=4, sample=2)
        plain, share = (edge_attribution(lm, **asked, metric=metric) for metric in (None, "recovered"))
        odds = edge_attribution(lm, **asked, metric=lambda logprobs: np.exp(logprobs.answer - logprobs.foil))
        whole = plain.clean - plain.corrupt
        assert (share.clean, share.corrupt) == pytest.approx((1, 0), abs=1e-6)
        for values, one in ((plain.estimates, share.estimates), (plain.exact, share.exact)):
            np.testing.assert_allclose(one * whole, values, atol=1e-4)
        np.testing.assert_allclose(odds.estimates, np.exp(plain.corrupt) * plain.estimates, rtol=1e-3, atol=1e-5)


# Gemma 2: a cap, norms after attention and MLP, weights around 1 · GPT-2: LayerNorm with a bias, positions, matrices the
# other way round · Granite: factors in the stream and of the logits · GPT-NeoX: mixed heads, biases, `embed_out`
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "granite", "gpt_neox"])
def test_other_families_read_out_add_up_and_have_gradients(family, tmp_path):
    folder = of_family(tmp_path, family)
    with pc.LM(folder, engine="transformers", dtype="float32", skip_tokenizer_init=True, prove=False) as lm:
        ours, *others = (logit_lens(lm, IDS, tokens=[77], readout=way) for way in ("weights", "engine", "device"))
        for other in others:
            assert np.abs(ours.logprobs - other.logprobs).max() < 1e-5
            assert (ours.ranks == other.ranks).all()
        result = direct_attribution(lm, IDS, answer=77, foil=200)
        run = lm.run(IDS, max_tokens=1, score=[77, 200])
        if family != "gemma2":  # whose logits are capped after the sum
            assert result.logit_diffs[0] == pytest.approx(run.scores[77] - run.scores[200], abs=1e-4)
        assert result.shares.sum() == pytest.approx(result.logit_diffs[0], abs=1e-4)
        for layer in range(lm.model.layers):
            heads = result.heads[0, layer].sum() + result.head_biases[0, layer]
            neurons = result.neurons[0, layer].sum() + result.neuron_biases[0, layer]
            assert heads == pytest.approx(result.share(f"attn_out[{layer}]"), abs=1e-4)
            assert neurons == pytest.approx(result.share(f"mlp_out[{layer}]"), abs=1e-4)
        for site in ("resid_pre[1]", "attn_out[0]", "q[1]", "k[1]", "v[1]", "z[1]", "neurons[2]", "mlp_out[1]"):
            assert_slope(lm, site, position=11)


def assert_slope(lm: pc.LM, site: str, position: int) -> None:
    """A site's gradient along a direction is what a small step along it changes."""
    point = lm.sites.resolve(pc.site(site))[0].point
    gradients = lm.engine.gradients(IDS, [point], {77: 1.0, 200: -1.0})
    row, slope = gradients.rows[point][position], gradients.gradients[point][position]
    run = lm.run(IDS, max_tokens=1, capture=[site])
    assert np.abs(np.asarray(run[site]).reshape(len(IDS), -1)[position] - row).max() < 1e-5
    direction = (slope / np.linalg.norm(slope)).astype(np.float32)
    step = 5e-3 * float(np.linalg.norm(row))
    high, low = lm.run([IDS] * 2, max_tokens=1, score=[77, 200], edits=[
        [pc.Add(direction, at=site, tokens=pc.prompt[position], scale=sign * step)] for sign in (1, -1)
    ])  # fmt: skip
    change = (high.scores[77] - high.scores[200] - low.scores[77] + low.scores[200]) / (2 * step)
    assert change == pytest.approx(float(np.linalg.norm(slope)), rel=2e-2), site


def test_weights_that_are_not_the_live_models_are_found_out(tmp_path, monkeypatch):
    folder = of_family(tmp_path, "llama")
    with pc.LM(folder, engine="transformers", dtype="float32", skip_tokenizer_init=True, prove=False) as lm:
        own = lm.engine.weight

        def change(**factors: float) -> None:
            monkeypatch.setattr(lm.engine, "weight", lambda name, layer: own(name, layer) * factors.get(name, 1.0)
                                if own(name, layer) is not None else None)  # fmt: skip

        change(W_U=1.1)
        with pytest.raises(pc.ModelError, match=r"logits .* readout='engine'"):
            logit_lens(lm, IDS, readout="weights")
        assert logit_lens(lm, IDS).readout == "device"
        unembed = lm.engine._unembed
        with monkeypatch.context() as patch:
            patch.setattr(lm.engine, "_unembed", lambda rows_ND: 1.1 * unembed(rows_ND))
            lm.engine.lens_difference = None  # the weights changed behind its back
            with pytest.raises(pc.ProgramError, match=r"differ by .* readout='weights'"):
                logit_lens(lm, IDS, readout="device")
            lens = logit_lens(lm, IDS)
        assert lens.readout == "engine"
        assert "do not reproduce" in lens.about
        change(W_O=1.02)
        with pytest.raises(pc.ModelError, match=r"W_O .*z\[0\].* attn_out\[0\] .*0\.02"):
            direct_attribution(lm, IDS, answer=7)
        assert logit_lens(lm, IDS, readout="weights").readout == "weights"  # these matrices are its own


@pytest.fixture(scope="module")
def worded(tmp_path_factory) -> str:
    """A tiny model whose tokens are the words w3, w4, …"""
    folder = of_family(tmp_path_factory.mktemp("worded"), "llama")
    with_words(folder, 512)
    return folder


def test_every_command_shows_its_study_and_writes_its_pictures(worded, tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHCLAMP_CACHE", str(tmp_path / "cache"))
    here = ["--engine", "transformers", "--dtype", "float32"]
    two = ["--clean", "w5 w6 w7", "--corrupt", "w5 w9 w7", "--answer", "w10", "--foil", "w11"]
    commands = {
        "lens": ["--prompt", "w5 w6 w7", "--token", "w9", *here],
        "attribute": ["--prompt", "w5 w6 w7", "--prompt", "w8 w9", "--answer", "w10", "--foil", "w11", *here],
        "patchscope": ["--source", "w5 w6 w7", "--target", "w8 w9", "--layers", "0:2", "--max-tokens", "2", *here],
        "propose": [*two, "--verify", "4", "--sample", "3", "--dtype", "float32"],
        "edges": [*two, "--verify", "2", "--sample", "1", "--dtype", "float32"],
    }
    shown = {
        "lens": "rank of 'w9'", "attribute": "all parts together", "patchscope": "continuation",
        "propose": "7 outlined cells were patched exactly", "edges": "3 outlined cells were patched exactly",
    }  # fmt: skip
    for name, arguments in commands.items():
        files = [tmp_path / f"{name}.{ending}" for ending in ("png", "html", "safetensors")]
        pictures = [
            word for file, flag in zip(files, ("--png", "--html", "--save"), strict=True) for word in (flag, str(file))
        ]
        done = CliRunner().invoke(app, [*name.split(), worded, *arguments, *pictures])
        assert done.exit_code == 0, done.output
        assert shown[name] in done.output
        assert all(file.stat().st_size > 1000 for file in files)
        assert done.output.count("\nwrote ") == 3
    failed = CliRunner().invoke(app, ["lens", worded, "--prompt", "w5", "--png", "a.pgn"])
    assert failed.exit_code == 2
    assert "'pgn'" in failed.output


SMALL = dict(hidden_size=24, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
             vocab_size=40)  # fmt: skip
NUMBERS = [[5 + (7 * i * j + j) % 30 for j in range(4, 10)] for i in range(1, 6)]


class TestFitLens:
    @pytest.fixture(scope="class")
    def small(self, tmp_path_factory) -> str:
        return of_family(tmp_path_factory.mktemp("small"), "llama", **SMALL)

    @pytest.fixture(scope="class")
    def lm(self, small):
        with pc.LM(small, engine="transformers", dtype="float32", skip_tokenizer_init=True, prove=False) as lm:
            yield lm

    def test_a_jacobian_lens_equals_brute_force(self, lm, small, monkeypatch):
        """Of two prompts of different lengths, at some tokens of each, in batches that do not divide D."""
        monkeypatch.setattr(transformers, "JACOBIAN_TOKENS", 50)
        prompts, plain = [NUMBERS[0], [*NUMBERS[1], 7, 9], NUMBERS[2]], PlainModel(small)
        fit = fit_lens(lm, dataset=prompts, kind="jacobian", tokens=pc.prompt[1:-1], held_out=0.3, seed=2)
        kept = [prompts[i] for i in np.random.default_rng(2).permutation(3)[1:]]
        for layer, (matrix, bias) in fit.translators.items():
            expected = [readouts.jacobian(plain, ids, layer, list(range(1, len(ids) - 1))) for ids in kept]
            assert np.abs(matrix - torch.stack(expected).mean(0).numpy()).max() < 1e-5
            assert not bias.any()
        assert np.array_equal(fit.matrix[-1], np.eye(24))
        assert np.abs(fit.matrix[0] - np.eye(24)).max() > 0.1

    @pytest.mark.parametrize("family", ["gemma2", "gpt2", "granite", "gpt_neox"])
    def test_jacobians_are_slopes_in_other_families(self, family, tmp_path):
        """A small step along a direction, at all tokens together, moves the last stream as the Jacobian says."""
        folder = of_family(tmp_path, family)
        with pc.LM(folder, engine="transformers", dtype="float32", skip_tokenizer_init=True, prove=False) as lm:
            for site in ("resid_post[0]", "resid_mid[1]", "mlp_out[1]", "resid_pre[2]"):
                if site.partition("[")[0] not in lm.sites.names:
                    continue
                point = lm.sites.resolve(pc.site(site))[0].point
                slope = lm.engine.jacobians(IDS, [point], list(range(len(IDS))))[point]
                v = np.random.default_rng(1).standard_normal(128).astype(np.float32)
                high, low = (np.asarray(run[pc.resid_post[-1]]).sum(0) for run in lm.run([IDS] * 2, max_tokens=1,
                             capture=pc.resid_post[-1], edits=[[pc.Add(v, at=site, scale=s * 1e-2)] for s in (1, -1)]))  # fmt: skip
                expected = (high - low) / (2e-2 * len(IDS))
                assert np.abs(slope @ v - expected).max() < 1e-2 * np.abs(expected).max(), site

    @both_engines
    def test_a_tuned_lens_equals_plain_training(self, lm, small, engine):
        """On all prompts in every step, where their order has no say. vLLM's rows train the same lens."""
        options = dict(skip_tokenizer_init=True, prove=False, dtype="float32")
        options |= dict(enforce_eager=True, **VLLM) if engine == "vllm" else {}
        asked = dict(dataset=NUMBERS, steps=60, learning_rate=0.01, held_out=0.2, seed=1, layers=[0, 2])
        with pc.LM(small, engine=engine, **options) if engine == "vllm" else contextlib.nullcontext(lm) as on:
            fit = fit_lens(on, **asked)
        order, plain = np.random.default_rng(1).permutation(5), PlainModel(small)
        test, kept = ([NUMBERS[i] for i in part] for part in (order[:1], order[1:]))

        def rows(prompts, layer):
            return torch.cat([plain.read(ids, "resid_post", layer) for ids in prompts])

        def readout(rows_ND):
            return plain.net.lm_head(plain.net.model.norm(rows_ND))

        plain.net.requires_grad_(False)
        A, b = readouts.tuned(rows(kept, 0), rows(kept, 2), readout, 60, 0.01)
        assert np.abs(fit.matrix[0] - A.numpy()).max() < 1e-3
        assert np.abs(fit.bias[0] - b.numpy()).max() < 1e-3
        assert np.array_equal(fit.matrix[1], np.eye(24))  # the last layer is the model's own
        model = readout(rows(test, 2)).log_softmax(-1)
        for found, agreement, change in ((fit.kl, fit.agreement, lambda h: h @ A.T + b),
                                         (fit.plain_kl, fit.plain_agreement, lambda h: h)):  # fmt: skip
            lens = readout(change(rows(test, 0))).log_softmax(-1)
            assert found[0] == pytest.approx(float((model.exp() * (model - lens)).sum(-1).mean()), abs=1e-3)
            assert agreement[0] == pytest.approx(float((model.argmax(-1) == lens.argmax(-1)).float().mean()))
            assert (found[1], agreement[1]) == (pytest.approx(0.0, abs=1e-6), 1.0)
        assert fit.rows == len(test[0])

    def test_training_brings_predictions_nearer_to_the_models(self, lm):
        """On held-out prompts too, and the lens and the study read its result and its file alike."""
        prompts = np.random.default_rng(0).integers(3, 40, (120, 8)).tolist()
        fit = fit_lens(lm, dataset=prompts, steps=150, learning_rate=3e-3)
        assert (fit.kl[:2] < 0.8 * fit.plain_kl[:2]).all()
        assert (fit.agreement[:2] > fit.plain_agreement[:2]).all()
        short, again, other = (fit_lens(lm, dataset=prompts, steps=5, seed=seed).matrix.tobytes() for seed in (0, 0, 1))
        assert short == again != other
        study = logit_lens(lm, prompts[0], translators=fit, top=4)
        read = lm.run(prompts[0], max_tokens=1, capture=pc.Lens(pc.resid_post, top=4, translators=fit)).lens[
            "resid_post"
        ]
        assert np.abs(read.logprobs - np.log(study.top_probs)).max() < 1e-4

    def test_only_transformers_has_jacobians(self, narrow):
        with pytest.raises(pc.EngineError, match="gradients"):
            fit_lens(narrow.get("vllm", "float32"), dataset=["a b", "c d"], kind="jacobian", layers=1)


LENSES = [pc.Lens(pc.resid_post[1::3], top=5), pc.Lens(pc.mlp_out[4], pc.generated, top=1),
          pc.Lens(pc.resid_mid[6], pc.prompt[-1] | pc.token(198), top=128)]  # fmt: skip
MODES = [
    pytest.param(("vllm", {}), id="eager"),
    pytest.param(("vllm", CHUNKED), id="chunks of 16"),
    pytest.param(("transformers", {}), id="transformers"),
    # test_monitors.py reads a lens from there too
    pytest.param(("vllm", {"multiprocess_mode": True}), id="a process of its own", marks=pytest.mark.slow),
]


class TestLensReadout:
    @pytest.mark.parametrize("mode", MODES)
    def test_it_equals_logit_lens(self, narrow, mode):
        """At the prompt's tokens and at generated ones, alone and in a batch, with a cold and with a warm cache."""
        engine, options = mode
        lm = narrow.get(engine, "float32", **options)
        prompts = [*PROMPTS, [5]]
        for _ in range(2):
            runs = lm.run(prompts, max_tokens=4, capture=LENSES)
            lm.lens(runs)
            for run in runs:
                whole = [*run.prompt_token_ids, *run.token_ids[:-1]]
                for at, op in (("resid_post", 0), ("mlp_out", 1), ("resid_mid", 2)):
                    read = run.lens[f"capture[{op}]"]
                    expected = logit_lens(lm, whole, site=at, layers=LENSES[op].at.layers, top=LENSES[op].top,
                                          positions=read.positions)  # fmt: skip
                    ids, logprobs = (each.reshape(expected.top_ids.shape) for each in (read.ids, read.logprobs))
                    assert np.abs(logprobs - np.log(expected.top_probs)).max() < 1e-4
                    differing = ids != expected.top_ids
                    assert differing.mean() < 0.01  # two that tie within rounding
                assert run.lens["resid_post[4]"].positions == list(range(len(whole)))
                assert run.lens["mlp_out[4]"].positions == list(range(len(run.prompt_token_ids), len(whole)))

    @pytest.mark.parametrize("mode", MODES)
    def test_translators_equal_logit_lens_and_a_plain_loop(self, narrow, plain, mode):
        """Also behind a cached prefix, and where a lens without translators reads the same rows."""
        engine, options = mode
        lm, at = narrow.get(engine, "float32", **options), pc.resid_post[[1, 6]]
        maps = {6: (torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH) / 60, torch.randn(WIDTH)),
                1: torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH) / 60}  # fmt: skip
        lenses = [pc.Lens(at, translators=maps), pc.Lens(at), pc.Lens(pc.mlp_out[6] @ pc.generated, translators=maps)]
        for _ in range(2):
            runs = lm.run([PROMPTS[0], PROMPTS[2]], max_tokens=3, capture=lenses)
            for run, lens in zip(runs, lm.lens(runs), strict=True):
                whole = [*run.prompt_token_ids, *run.token_ids[:-1]]
                for op, site, layers in ((0, "resid_post", [1, 6]), (2, "mlp_out", [6])):
                    read = lens[f"capture[{op}]"]
                    theirs = logit_lens(lm, whole, site=site, layers=layers, positions=read.positions, translators=maps)
                    gap = np.abs(read.logprobs.reshape(theirs.top_probs.shape) - np.log(theirs.top_probs)).max()
                    assert gap < 1e-4, (op, gap)
                assert np.abs(lens["capture[0]"].logprobs - lens["capture[1]"].logprobs).max() > 0.1
                for layer, (matrix, bias) in {1: (maps[1], 0), 6: maps[6]}.items():
                    with torch.no_grad():
                        rows = plain.read(whole, "resid_post", layer) @ matrix.T + bias
                        logits = plain.net.lm_head(plain.net.model.norm(rows))
                    best = logits.log_softmax(-1).topk(5).values.numpy()
                    read = lens["capture[0]"].logprobs[[1, 6].index(layer)]
                    assert np.abs(read - best).max() < 1e-3

    def test_what_leaves_the_worker_is_read_in_one_call(self, narrow, monkeypatch):
        lm = narrow.get("vllm", "float32")
        calls, stock = [], lm.engine._ask
        monkeypatch.setattr(lm.engine, "_ask", lambda verb, *args: calls.append(verb) or stock(verb, *args))
        runs = lm.run(
            [list(range(5, 5 + n)) for n in range(1, 25)], max_tokens=1, capture=pc.Lens(pc.resid_post @ pc.prompt[-1])
        )
        lenses = lm.lens(runs)
        assert [each[pc.resid_post].ids.shape for each in lenses] == [(8, 1, 5)] * 24
        assert (calls.count("lens"), calls.count("fetch")) == (1, 0)

    @both_engines
    def test_samples_of_a_prompt_have_lenses_of_their_own(self, narrow, engine):
        lm = narrow.get(engine, "float32")
        lens = pc.Lens(pc.resid_post[7], top=3)
        runs = lm.run(PROMPTS[0], n=3, temperature=1.5, sampling={"seed": 3}, max_tokens=5, capture=lens)
        assert len({tuple(run.token_ids) for run in runs}) > 1
        for run in runs:
            whole = lm.run([*run.prompt_token_ids, *run.token_ids[:-1]], max_tokens=1, capture=lens)
            assert np.abs(run.lens["resid_post[7]"].logprobs - whole.lens["resid_post[7]"].logprobs).max() < 1e-3

    @both_engines
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_last_layer_gives_the_distribution_that_is_sampled_from(self, narrow, engine, dtype):
        lm = narrow.get(engine, dtype)
        run = lm.run(PROMPTS[1], max_tokens=6, logprobs=4, edits=pc.Scale(1.1, at=pc.resid_post[3]),
                     capture=pc.Lens(pc.resid_post[-1], pc.prompt[-1] | pc.generated, top=4))  # fmt: skip
        read, gap = run.lens[pc.resid_post[-1]], 1e-4 if dtype == "float32" else 0.05
        assert len(read.positions) == len(run.top_logprobs) == 6
        for logprobs, tops in zip(read.logprobs, run.top_logprobs, strict=True):
            assert np.abs(logprobs - sorted(tops.values(), reverse=True)[:4]).max() < gap

    def test_runs_that_share_a_trunk_have_the_rows_before_it(self, narrow):
        """On Transformers, runs of one prompt are computed from where their programs differ."""
        lm, prompt = narrow.get("transformers", "float32"), list(range(5, 45))
        lens = [pc.Lens(pc.resid_post[[1, 6]] @ pc.prompt[-2:], top=4), pc.Lens(pc.resid_post[7])]
        edits = [[pc.Scale(0.5 + i, at=pc.mlp_out[5], tokens=pc.prompt[-1])] for i in range(12)]
        runs = lm.run([prompt] * 12, max_tokens=1, edits=edits, capture=lens)
        with lm.engine.computing_whole():
            whole = lm.run([prompt] * 12, max_tokens=1, edits=edits, capture=lens)
        for one, other in zip(lm.lens(runs), lm.lens(whole), strict=True):
            for path in ("capture[0]", "capture[1]"):
                assert np.abs(one[path].logprobs - other[path].logprobs).max() < 1e-4


def test_the_study_proves_the_lens_once_until_weights_are_updated(tmp_path, monkeypatch):
    proved = list[pc.LM]()
    monkeypatch.setattr(proving, "prove_lens", lambda lm: proved.append(lm) or prove_lens(lm))
    with pc.LM(of_family(tmp_path, "llama"), engine="transformers", skip_tokenizer_init=True, prove=False) as lm:
        for positions in (None, [-1], None):
            assert logit_lens(lm, IDS, positions=positions).readout == "device"
        assert len(proved) == 1
        monkeypatch.setattr(type(lm.engine), "weights", 1)
        assert logit_lens(lm, IDS).readout == "device"
        assert len(proved) == 2
    with pc.LM(of_family(tmp_path, "llama"), engine="transformers", skip_tokenizer_init=True) as lm:
        del proved[:]
        logit_lens(lm, IDS)
        assert not proved  # with the sites
