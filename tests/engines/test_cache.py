"""Guarantee 6: a cached block is reused only under the same edits, and never under a capture. Blocks of 32 on the CPU."""

import pytest
import torch

import patchclamp as pc

from ..conftest import TOKENS
from .conftest import PROMPTS, SHALLOW

BLOCK = 32


@pytest.fixture(scope="module")
def lm(narrow):
    return narrow.get("vllm", "float32")


@pytest.fixture
def prompt(lm):
    """A prompt that no other test has cached: three full blocks and a rest."""
    fresh = torch.randint(100, TOKENS, (20,)).tolist()
    return fresh + (lm.tokens(" ".join(PROMPTS)) * 4)[: 3 * BLOCK - 10]


def edit(lm, tokens, scale=8.0):
    return pc.Add([1.0, -1.0] * (lm.model.d_model // 2), at=pc.resid_post[4], tokens=tokens, scale=scale)


def logits(lm, prompt, edits=()):
    return lm.run(prompt, max_tokens=1, edits=list(edits), capture=[pc.logits])[pc.logits]


def test_unedited_after_edited_and_edited_after_unedited(lm, narrow, prompt):
    cold = narrow.get("vllm", "float32", enable_prefix_caching=False)
    change = edit(lm, pc.prompt[2])
    expected_plain, expected_edited = logits(cold, prompt), logits(cold, prompt, [change])
    assert (expected_plain - expected_edited).abs().max() > 0.1
    for edits, expected in (
        ([change], expected_edited),
        ([], expected_plain),
        ([change], expected_edited),
        ([], expected_plain),
    ):
        assert (logits(lm, prompt, edits) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("word", ["z", "q", "k", "v", "neurons"])
def test_each_head_and_neuron_has_blocks_of_its_own(lm, narrow, prompt, word):
    """One prompt, edited alike in one part of a row after the other, and in all of it."""
    cold, site = narrow.get("vllm", "float32", enable_prefix_caching=False), getattr(pc, word)
    source = {each: each.run(prompt[::-1], max_tokens=1, capture=[site[2]]) for each in (lm, cold)}
    parts = [site[2, 0:200], site[2, 200:]] if word == "neurons" else [site[2, 0], site[2, 2]]
    tokens = pc.prompt[3:50]
    for make in (
        lambda engine, at: pc.Zero(at, tokens), lambda engine, at: pc.Scale(3.0, at, tokens),
        lambda engine, at: pc.Noise(2.0, at, tokens), lambda engine, at: pc.Replace(pc.From(source[engine], at), at, tokens),
    ):  # fmt: skip
        found = []
        for at in [*parts, site[2]]:
            expected = logits(cold, prompt, [make(cold, at)])
            assert (logits(lm, prompt, [make(lm, at)]) - expected).abs().max() <= 1e-3, at
            found.append(expected)
        assert (
            min(float((a - b).abs().max()) for i, a in enumerate(found) for b in found[:i]) > 5e-3
        )  # or it tells nothing


def test_the_last_prompt_token_is_resolved_against_each_prompt(lm, narrow, prompt):
    """`prompt[-1]` of a prompt of two blocks lies inside the second block of a longer one."""
    cold = narrow.get("vllm", "float32", enable_prefix_caching=False)
    change = edit(lm, pc.prompt[-1])
    for length in (2 * BLOCK, len(prompt), 2 * BLOCK):
        part = prompt[:length]
        for edits in ([change], []):
            assert (logits(lm, part, edits) - logits(cold, part, edits)).abs().max() <= 1e-3


def test_blocks_are_shared_below_the_first_edit_and_among_equal_programs(lm, prompt):
    def cached(edits=(), capture=()):
        return lm.run(prompt, max_tokens=1, edits=list(edits), capture=list(capture)).cached_tokens

    late, other = edit(lm, pc.prompt[40]), edit(lm, pc.prompt[40], scale=3.0)
    assert cached() == 0
    assert cached() == 3 * BLOCK
    assert cached([late]) == BLOCK
    assert cached([late]) == 3 * BLOCK
    assert cached([other]) == BLOCK
    assert cached() == 3 * BLOCK
    assert cached([], [pc.resid_post[3] @ pc.prompt[70]]) == 2 * BLOCK
    assert cached([], [pc.Capture("resid_post[3]", pc.prompt[70], project=[1.0] * lm.model.d_model)]) == 2 * BLOCK
    assert cached([], [pc.resid_post[3]]) == 0


def test_captures_are_complete_on_a_warm_cache(lm, prompt):
    run = lm.run(prompt, max_tokens=2, capture=[pc.resid_post])
    again = lm.run(prompt, max_tokens=2, capture=[pc.resid_post[3], pc.mlp_out[5] @ pc.prompt[50]])
    assert again.positions(pc.resid_post[3]) == list(range(len(prompt) + 1))
    assert torch.allclose(again[pc.resid_post[3]], run[pc.resid_post[3]], atol=1e-4)
    assert again.positions("mlp_out[5]") == [50]
    W = torch.randn(3, lm.model.d_model, generator=torch.Generator().manual_seed(0))
    projected = lm.run(prompt, max_tokens=2, capture=[pc.Capture("resid_post[3]", project=W)])
    assert projected.positions("resid_post[3]") == list(range(len(prompt) + 1))
    assert torch.allclose(projected["resid_post[3]"], run["resid_post[3]"] @ W.T, rtol=1e-4, atol=1e-2)


@pytest.mark.slow
def test_preempted_requests_come_back_with_the_same_rows(narrow):
    """A cache of a few blocks: requests are thrown out, recomputed and still edited and captured as if alone."""
    small = narrow.get(
        "vllm", "float32", kv_cache_memory_bytes=SHALLOW * 2 * 3 * 64 * 4 * BLOCK * 6, max_model_len=128, max_num_seqs=4
    )
    roomy = narrow.get("vllm", "float32")
    ids = roomy.tokens(" ".join(PROMPTS))
    prompts = [ids[i : i + 28] for i in range(4)]
    edits = [[pc.Add(torch.randn(roomy.model.d_model), at=pc.resid_post[6], tokens=pc.generated)] for _ in prompts]
    wanted = {"capture": [pc.resid_post[7]], "max_tokens": 40, "sampling": {"ignore_eos": True}}
    crowded = small.run(prompts, edits=edits, **wanted)
    assert small.engine.status()["preemptions"] > 0
    for prompt, change, run in zip(prompts, edits, crowded, strict=True):
        alone = roomy.run(prompt, edits=change, **wanted)
        assert run.token_ids == alone.token_ids
        assert run.positions(pc.resid_post[7]) == list(range(len(prompt) + 39))
        assert torch.allclose(run[pc.resid_post[7]], alone[pc.resid_post[7]], rtol=1e-3, atol=1e-3)
