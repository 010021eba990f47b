"""Guarantees 2 and 5: a self-patch and a batchmate's edits change not one bit."""

import pytest
import torch

import patchclamp as pc

from .conftest import PROMPTS

MODES = [
    pytest.param((engine, dtype, compiled), id=f"{engine} {dtype} {'compiled' if compiled else 'eager'}",
                 marks=[pytest.mark.slow] if compiled and dtype == "bfloat16" else [])
    for engine, compiled in (("vllm", False), ("vllm", True), ("transformers", False))
    for dtype in ("float32", "bfloat16")
]  # fmt: skip
STREAMS = [pc.embed, pc.resid_pre, pc.resid_mid, pc.resid_post]


def bits(run) -> tuple[list[int], list[str]]:
    return run.token_ids, [x.hex() for x in run.logprobs]


@pytest.mark.parametrize("mode", MODES)
def test_self_patch_is_bit_identical(narrow, mode):
    """Each stream word at all its layers at once, then single layers, over prompt and generated tokens."""
    lm = narrow.get(*mode)
    run = lm.run(PROMPTS[1], max_tokens=4, capture=[*STREAMS, pc.attn_out, pc.mlp_out, pc.final_norm], logprobs=True)
    places = [[site] for site in (*STREAMS, pc.attn_out, pc.mlp_out, pc.final_norm)]
    places += [[pc.resid_pre[0]], [pc.resid_mid[4]], [pc.resid_post[7]], [pc.resid_post[2], pc.resid_mid[3]], STREAMS]
    for sites in places:
        again = lm.run(
            PROMPTS[1], max_tokens=4, edits=[pc.Replace(pc.From(run, at), at=at) for at in sites], logprobs=True
        )
        assert bits(again) == bits(run), sites
    row = pc.Replace(pc.From(run, pc.resid_post[5], pc.prompt[0]), at=pc.resid_post[5], tokens=pc.prompt[-1])
    assert bits(lm.run(PROMPTS[1], max_tokens=4, edits=[row], logprobs=True)) != bits(run)


@pytest.mark.parametrize("mode", MODES)
def test_every_position_of_one_layer_from_the_clean_run_gives_its_logits(narrow, mode):
    lm = narrow.get(*mode)
    corrupt = lm.tokens(PROMPTS[1])
    clean = [*reversed(corrupt)]
    clean_run = lm.run(clean, max_tokens=1, capture=[pc.resid_post, pc.logits], logprobs=True)
    corrupt_run = lm.run(corrupt, max_tokens=1, capture=[pc.logits], logprobs=True)
    assert not torch.equal(clean_run[pc.logits], corrupt_run[pc.logits])
    for layer in (0, 4, 7):
        at = pc.resid_post[layer]
        run = lm.run(
            corrupt, max_tokens=1, edits=[pc.Replace(pc.From(clean_run, at), at=at)], capture=[pc.logits], logprobs=True
        )
        assert torch.equal(run[pc.logits], clean_run[pc.logits]), layer


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_batchmates_of_edited_requests_are_unchanged(narrow, engine):
    lm = narrow.get(engine, "float32")
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1], PROMPTS[0]]
    hard = [
        pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[3], scale=20.0),
        pc.Zero(pc.attn_out),
        pc.Zero(pc.logits),
    ]
    plain = lm.run(prompts, max_tokens=6, capture=[pc.resid_post[7]], logprobs=True)
    mixed = lm.run(prompts, max_tokens=6, edits=[[], hard, [], hard[:1], []], capture=[pc.resid_post[7]], logprobs=True)
    for i in (0, 2, 4):
        assert bits(mixed[i]) == bits(plain[i])
        assert torch.equal(mixed[i][pc.resid_post[7]], plain[i][pc.resid_post[7]])
    for i in (1, 3):
        assert mixed[i].logprobs != plain[i].logprobs


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_captures_are_not_aliases(narrow, engine):
    """What was captured is still the same after the engine has run other things."""
    lm = narrow.get(engine, "float32")
    run = lm.run(PROMPTS[0], max_tokens=2, capture=[pc.resid_post], logprobs=True)
    before = {layer: run[pc.resid_post[layer]].clone() for layer in (0, 4)}
    lm.run(list(PROMPTS), max_tokens=8, edits=[pc.Zero(pc.resid_post[2])], capture=[pc.resid_post], logprobs=True)
    fresh = lm.run(PROMPTS[0], max_tokens=2, capture=[pc.resid_post], logprobs=True)
    for layer, kept in before.items():
        assert torch.equal(run[pc.resid_post[layer]], kept)
        assert torch.equal(fresh[pc.resid_post[layer]], kept)
    assert torch.equal(run[pc.resid_post[6]], fresh[pc.resid_post[6]])


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_ops_act_in_order_and_captures_see_their_place(narrow, engine):
    lm = narrow.get(engine, "float32")
    v = torch.randn(lm.model.d_model)
    at = pc.resid_post[5]
    base = lm.run(PROMPTS[0], max_tokens=1, capture=[at], logprobs=True)[at]
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[at],
                 edits=[pc.Add(v, at=at, scale=2.0), pc.Replace(3 * v, at=at, tokens=pc.prompt[1], alpha=0.25)], logprobs=True)  # fmt: skip
    expected = base + 2 * v
    expected[1] = 0.75 * expected[1] + 0.25 * (3 * v)
    assert torch.allclose(run[at], expected, atol=1e-5)
    inside = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Capture(at), pc.Zero(at)], logprobs=True)
    assert torch.equal(inside[at], base)
    zeroed = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Zero(at), pc.Capture(at)], logprobs=True)
    assert torch.equal(zeroed[at], torch.zeros_like(base))
