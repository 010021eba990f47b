"""Conditional edits on real models: the same tokens and numbers as static edits at the tokens that were decided."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import WIDTH
from .conftest import CHUNKED, PROMPTS
from .test_modes import SMALL

D = WIDTH
SCOPES = ("token", "prompt", "onwards")
MODES = {"eager": ("vllm", {}), "chunks of 16": ("vllm", CHUNKED), "transformers": ("transformers", {})}
RNG = np.random.default_rng(3)
WEIGHT, PUSH = RNG.standard_normal((2, D)).astype(np.float32), 8 * RNG.standard_normal(D).astype(np.float32)
TEXTS = [*PROMPTS, "x", "The", "One two three four five six seven eight nine ten eleven twelve thirteen fourteen"]


@pytest.fixture(scope="module")
def thresholds(narrow):
    return thresholds_of(narrow.get("transformers", "float32"), WEIGHT)


def thresholds_of(lm: pc.LM, weight: np.ndarray) -> list[float]:
    runs = lm.run(TEXTS, max_tokens=6, capture=pc.Probe(weight, at=pc.resid_post[3], name="p"))
    scores = torch.cat([run.probes["p"] for run in runs])
    return [float(scores[:, i].quantile(0.6)) for i in range(2)]


@pytest.mark.parametrize("mode", MODES)
def test_it_equals_the_same_edits_at_the_tokens_that_were_decided(narrow, thresholds, mode):
    """In a batch of mixed requests, twice where the second time the prefix cache is warm. What a hook would do is
    computed from the scores, which test_projected.py compares with Transformers."""
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    p = pc.Probe(WEIGHT, at=pc.resid_post[3], name="p")
    conditions = [p > thresholds[0], ~(p[1] > thresholds[1]), (p > thresholds[0]) & (p[1] < thresholds[1])]
    asked = [(text, scope, c) for i, (scope, c) in enumerate(itertools.product(SCOPES, range(len(conditions))))
             for text in TEXTS[i % 2 :: 2]]  # fmt: skip
    edits = [[pc.When(conditions[c], [pc.Add(PUSH, at=pc.resid_post[4]), pc.Scale(0.5, at=pc.mlp_out[5])], scope=scope)]
             for _, scope, c in asked]  # fmt: skip
    prompts, plain = [*(text for text, _, _ in asked), *TEXTS], [[]] * len(TEXTS)
    site, acted = pc.resid_post[6], {scope: set() for scope in SCOPES}
    wanted = {"max_tokens": 6, "capture": site, "logprobs": True, "sampling": {"ignore_eos": True}}
    for _ in range(1 + (engine == "vllm")):
        runs = lm.run(prompts, edits=[*edits, *plain], **wanted)
        static = []
        for run, (_, scope, c) in zip(runs, asked, strict=False):
            held = decided(run.probes["p"].numpy(), thresholds)[c]
            last = len(run.prompt_token_ids) - 1
            if scope == "prompt":
                held = (np.arange(len(held)) >= last) & held[last]
            elif scope == "onwards":
                held = np.arange(len(held)) >= np.flatnonzero(held).min(initial=len(held))
            where = np.flatnonzero(held).tolist()
            assert run.acted == {"edits[0].edits[0]": where, "edits[0].edits[1]": where}
            acted[scope].add(len(where))
            at = where or pc.token(8_000)
            static.append([pc.Add(PUSH, at=pc.resid_post[4], tokens=at), pc.Scale(0.5, pc.mlp_out[5], at)])
        expected = lm.run(prompts, edits=[*static, *plain], **wanted)
        for run, other in zip(runs, expected, strict=True):
            assert run.token_ids == other.token_ids
            assert np.allclose(run.logprobs, other.logprobs, atol=1e-3)
            assert torch.allclose(run[site], other[site], rtol=1e-3, atol=2e-3 * float(other[site].abs().max()))
    assert all(len(counts) > 1 for counts in acted.values())


def decided(scores: np.ndarray, thresholds: list[float]) -> list[np.ndarray]:
    """Where each of the three conditions holds."""
    above = [scores[:, i] > np.float32(thresholds[i]) for i in range(2)]
    return [above[0], ~above[1], above[0] & ~(scores[:, 1] >= np.float32(thresholds[1]))]


def test_two_requests_with_one_prefix_share_no_block_that_differs(narrow, thresholds):
    """The same long prompt unedited, with a condition that holds and with one that does not, in every order: each has its
    own numbers, whatever is cached."""
    lm = narrow.get("vllm", "float32")
    ids = lm.tokens(" ".join(TEXTS) + " again, as before, and so on for a while until this is long enough for blocks")
    p = pc.Probe(WEIGHT, at=pc.resid_post[3], tokens=pc.prompt[:20], name="p")
    edit = pc.Add(PUSH, at=pc.resid_post[4], tokens=pc.prompt[:40])
    programs = {"none": [], "holds": [pc.When(p > -1e6, edit)], "never": [pc.When(p > 1e6, edit)]}
    alone = {}
    for name, program in programs.items():
        lm.run(ids[:1], max_tokens=1)
        alone[name] = lm.run(ids, max_tokens=4, edits=program, logprobs=True)
    assert alone["holds"].acted["edits[0].edits[0]"] == list(range(20))
    assert alone["never"].acted["edits[0].edits[0]"] == []
    assert np.allclose(alone["none"].logprobs, alone["never"].logprobs, atol=1e-4)
    assert not np.allclose(alone["none"].logprobs, alone["holds"].logprobs, atol=1e-2)
    for order in (("holds", "none", "never"), ("never", "holds", "none"), ("none", "never", "holds")):
        for name in order:
            again = lm.run(ids, max_tokens=4, edits=programs[name], logprobs=True)
            assert again.token_ids == alone[name].token_ids
            assert np.allclose(again.logprobs, alone[name].logprobs, atol=1e-4)


def pair_of(lm: pc.LM, prompts: list[list[int]]) -> tuple[int, int]:
    """Two tokens that are generated early."""
    runs = lm.run(prompts, max_tokens=12, sampling={"ignore_eos": True})
    first, *others = dict.fromkeys(token for run in runs for token in run.token_ids)
    return first, others[-1]


@pytest.mark.slow
def test_preempted_requests_decide_the_same(shallow):
    """Requests are thrown out and recomputed, their prompt and what they generated in one step: with the probe in an
    earlier layer and, of generated tokens, at the edit's own site."""
    rng, lm = np.random.default_rng(3), shallow.get("transformers", "float32")
    weight, push = rng.standard_normal((2, 576)).astype(np.float32), 8 * rng.standard_normal(576).astype(np.float32)
    thresholds = thresholds_of(lm, weight)
    small, roomy = shallow.get("vllm", "float32", **SMALL), shallow.get("vllm", "float32")
    ids, site = roomy.tokens(" ".join(PROMPTS)), pc.resid_post[3]
    prompts = [ids[i : i + 28] for i in range(4)]
    p, later = (pc.Probe(weight, at=site, tokens=tokens, name="p") for tokens in (pc.every, pc.generated))
    programs = [pc.When(p > thresholds[0] + 2, pc.Add(push, at=pc.resid_post[4]), scope="onwards"),
                pc.When(later > thresholds[0] + 2, pc.Add(push / 4, at=site), scope="onwards"),
                pc.When(p[1] > thresholds[1], pc.Add(push / 4, at=pc.resid_post[5]), scope="token")]  # fmt: skip
    programs.append(pc.Add(push, at=pc.resid_post[4], tokens=pc.generated & pc.between(*pair_of(roomy, prompts))))
    wanted = {"max_tokens": 40, "sampling": {"ignore_eos": True}, "capture": pc.resid_post[6]}
    for program in programs:
        before = small.engine.status()["preemptions"]
        crowded = small.run(prompts, edits=program, **wanted)
        assert small.engine.status()["preemptions"] > before
        alone = [roomy.run(prompt, edits=program, **wanted) for prompt in prompts]
        assert any(positions for run in alone for positions in run.acted.values())
        for run, other in zip(crowded, alone, strict=True):
            assert (run.token_ids, run.acted) == (other.token_ids, other.acted)
            for name, scores in run.probes.items():
                assert torch.allclose(scores, other.probes[name], rtol=1e-3, atol=1e-2)
            assert torch.allclose(run[pc.resid_post[6]], other[pc.resid_post[6]], rtol=1e-3, atol=0.05)
