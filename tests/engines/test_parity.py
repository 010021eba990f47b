"""Guarantee 4: every site, layer and position of vLLM equals Transformers, and both equal plain hooks."""

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..reference.hooks import PlainModel
from .conftest import CHUNKED, PROMPTS, SHALLOW


def worst_row(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest ‖a − b‖₂ / ‖b‖₂ over rows, heads one after the other."""
    ours, theirs = ours.flatten(1), theirs.flatten(1)
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_site_equals_transformers(narrow, compiled):
    lm, hub = narrow.get("vllm", "float32", compiled), narrow.get("transformers", "float32")
    ours, theirs = (m.run(list(PROMPTS), max_tokens=4, capture=lm.sites.names, logprobs=True) for m in (lm, hub))
    checked = 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        for place in lm.sites.refs():
            assert a.positions(str(place)) == b.positions(str(place))
            assert len(a.positions(str(place))) == (4 if place.name == "logits" else len(a.prompt_token_ids) + 3)
            assert worst_row(a[str(place)], b[str(place)]) <= 1e-4, place
            checked += 1
    assert checked == len(PROMPTS) * (12 * SHALLOW + 3)


def test_a_lens_reads_the_same_in_compiled_code(narrow):
    eager, compiled = (narrow.get("vllm", "float32", compiled) for compiled in (False, True))
    lens = pc.Lens(pc.resid_post[1::3], top=5)
    reads = [lm.run(PROMPTS[2], max_tokens=3, capture=lens).lens[pc.resid_post] for lm in (eager, compiled)]
    assert np.abs(reads[0].logprobs - reads[1].logprobs).max() < 1e-3


@pytest.mark.parametrize("padding", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_transformers_engine_equals_plain_hooks(narrow, narrowed, padding):
    lm, plain = narrow.get("transformers", "float32", padding_side=padding), PlainModel(str(narrowed))
    runs = lm.run(list(PROMPTS), max_tokens=1, capture=lm.sites.names, logprobs=True)
    for run in runs:
        ids = run.prompt_token_ids
        for site in ("resid_pre", "resid_mid", "attn_out", "mlp_out", "resid_post"):
            for layer in (0, 3, 7):
                assert worst_row(run[f"{site}[{layer}]"], plain.read(ids, site, layer)) <= 1e-5, (site, layer)
        assert worst_row(run["final_norm"], plain.read(ids, "final_norm")) <= 1e-5
        assert worst_row(run["logits"], plain.logits(ids)[None]) <= 1e-5


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_edit_does_what_a_plain_hook_does(narrow, narrowed, engine):
    lm, plain = narrow.get(engine, "float32"), PlainModel(str(narrowed))
    ids = lm.tokens(PROMPTS[1])
    generator = torch.Generator().manual_seed(int(np.random.default_rng(0).integers(1 << 30)))
    for site, layer, position in (
        ("resid_pre", 0, 3),
        ("resid_mid", 2, 0),
        ("attn_out", 4, 9),
        ("mlp_out", 7, 13),
        ("resid_post", 7, 13),
        ("resid_post", 3, 5),
    ):
        row = torch.randn(lm.model.d_model, generator=generator)
        at = pc.Site(site, layer)
        run = lm.run(
            ids, max_tokens=1, edits=[pc.Replace(row, at=at, tokens=position)], capture=[pc.logits, at], logprobs=True
        )
        expected = plain.patched_logits(ids, site, layer, position, row)
        assert (run[pc.logits][0] - expected).abs().max() <= 2e-3, (site, layer)
        assert (expected - plain.logits(ids)).abs().max() > 1e-2
        assert torch.equal(run[at][position], row)


def test_chunked_prefill_changes_nothing(narrow):
    """Chunks of 16: prompts of several chunks, with captures and an edit that lies in a middle chunk."""
    whole = narrow.get("vllm", "float32")
    chunked = narrow.get("vllm", "float32", **CHUNKED)
    ids = whole.tokens(" ".join(PROMPTS) + " " + PROMPTS[1])
    assert len(ids) > 3 * 16
    edit = pc.Add(torch.randn(whole.model.d_model), at=pc.resid_post[5], tokens=pc.prompt[14:35], scale=2.0)
    late = pc.Add(torch.randn(whole.model.d_model), at=pc.mlp_out[4], tokens=pc.generated, scale=2.0)
    for edits in ([], [edit, late]):
        a, b = (
            lm.run([ids, ids[:20], ids[5:]], max_tokens=4, edits=edits, capture=lm.sites.names, logprobs=True)
            for lm in (whole, chunked)
        )
        for x, y in zip(a, b, strict=True):
            assert x.token_ids == y.token_ids
            assert np.allclose(x.logprobs, y.logprobs, atol=1e-4)
            for place in whole.sites.refs():
                assert x.positions(str(place)) == y.positions(str(place))
                assert worst_row(y[str(place)], x[str(place)]) <= 1e-4, place
    plain, edited = (whole.run(ids, max_tokens=4, edits=e, logprobs=True).logprobs for e in ([], [edit, late]))
    assert not np.allclose(plain, edited, atol=1e-2)


def test_one_token_prompts_and_many_lengths_at_once(narrow):
    lm, hub = narrow.get("vllm", "float32"), narrow.get("transformers", "float32")
    ids = lm.tokens(" ".join(PROMPTS))
    prompts = [ids[:1], ids[:2], ids[3:4], ids[:33], ids]
    edits = [[pc.Add([0.5] * lm.model.d_model, at=pc.resid_mid[3], tokens=pc.prompt[-1])] for _ in prompts]
    a, b = (
        m.run(prompts, max_tokens=3, edits=edits, capture=[pc.resid_post[3], pc.logits], logprobs=True)
        for m in (lm, hub)
    )
    for x, y in zip(a, b, strict=True):
        assert x.token_ids == y.token_ids
        assert x.positions(pc.resid_post[3]) == list(range(len(x.prompt_token_ids) + 2))
        assert worst_row(x[pc.resid_post[3]], y[pc.resid_post[3]]) <= 1e-4
        assert worst_row(x[pc.logits], y[pc.logits]) <= 1e-4


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_drawn_from_what_vllm_draws_from(seed):
    """By vLLM's own functions on the logits, in the order of its sampler."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    from patchclamp.engines.generation import Sampler

    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, 200).astype(np.float32))
    for _ in range(40):
        temperature, k = float(rng.uniform(0.3, 2)), int(rng.choice([1, 3, 20, 200]))
        p, least = float(rng.uniform(0.05, 1)), float(rng.choice([0.0, 0.01, 0.3]))
        theirs = logits / temperature
        probs = theirs.softmax(-1)
        theirs = theirs.masked_fill(probs < least * probs.max(), -torch.inf)[None]
        theirs = apply_top_k_top_p_pytorch(theirs, torch.tensor([k]), torch.tensor([p]))[0].softmax(-1)
        ours = Sampler({"temperature": temperature, "top_k": k, "top_p": p, "min_p": least}, set()).probabilities(
            logits
        )
        assert torch.allclose(ours / ours.sum(), theirs, atol=1e-6)
