"""Traces on real engines: every recipe, as a trace and as a program, gives on vLLM what it gives on Transformers; and the
traps that others fell into there."""

# ruff: noqa: PT012, RUF043  a trace is a block, and its error comes at the block's end
from __future__ import annotations

import asyncio

import pytest
import torch

import patchclamp as pc
from tests.recipes import RECIPES, gap

from .conftest import CHUNKED, PROMPTS

LONG = " ".join(PROMPTS)  # more than a block of the prefix cache
BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_the_same_on_both_engines_and_both_ways(narrow, name):
    ours, theirs = narrow.get("vllm", "float32"), narrow.get("transformers", "float32")
    values = RECIPES[name].traced(ours)
    for other in (RECIPES[name].explicit(ours), RECIPES[name].traced(theirs), RECIPES[name].explicit(theirs)):
        assert other.keys() == values.keys()
        for key, value in values.items():
            assert gap(value, other[key]) <= 1e-4, key
    assert all(value.any() for value in values.values() if isinstance(value, torch.Tensor))


@BOTH
def test_32_prompts_are_one_batch_whose_values_are_each_ones_own(narrow, engine, monkeypatch):
    lm, sizes = narrow.get(engine, "float32"), []
    submit = lm.engine.submit
    monkeypatch.setattr(lm.engine, "submit", lambda requests: sizes.append(len(requests)) or submit(requests))
    prompts, saved = [PROMPTS[i % 3][: 20 + i] for i in range(32)], []

    def record(t):
        for prompt in prompts:
            with t.invoke(prompt) as a:
                saved.append(a.layers[5].output.save())

    async def traced():
        async with lm.trace() as t:
            record(t)

    with lm.trace() as t:
        record(t)
    asyncio.run(traced())
    assert sizes == [32, 32]
    monkeypatch.undo()
    for prompt, value, again in zip(prompts[::8], saved[:32:8], saved[32::8], strict=True):
        alone = lm.run(prompt, max_tokens=1, capture=[pc.resid_post[5]])[pc.resid_post[5]]
        assert gap(value, alone) <= 1e-5
        assert gap(again, alone) <= 1e-5


@BOTH
def test_a_cache_of_tokens_that_a_run_ended_before_has_no_rows(narrow, engine):
    lm, words = narrow.get(engine, "float32"), {"max_tokens": 5}
    [stop, *_] = lm.run(PROMPTS[0], **words).token_ids
    with lm.trace(PROMPTS[0], **words, sampling={"stop_token_ids": [stop]}) as t:
        late, early = (t.cache(pc.resid_post[2], tokens=pc.generated[3] | at) for at in (pc.generated, pc.prompt[-1]))
    assert len(t.run.token_ids) == 1
    assert len(late[pc.resid_post[2]]) == 0
    alone = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[2]])
    assert gap(early[pc.resid_post[2]], alone[pc.resid_post[2]][-1:]) <= 1e-5


def test_cached_tokens_are_saved_too(narrow):
    """The prompt ran before, so its first blocks lie in the prefix cache."""
    lm = narrow.get("vllm", "float32")
    count = len(lm.run(LONG, max_tokens=1).prompt_token_ids)
    assert lm.run(LONG, max_tokens=1).cached_tokens >= 32
    with lm.trace(LONG) as t:
        early, late = t.layers[0].output.save(), t.layers_output[7].save()
        some = t.layers[2].mlp.output[3:5].save()
    assert early.shape[0] == late.shape[1] == count
    with narrow.get("transformers", "float32").trace(LONG) as t:
        expected = [t.layers[0].output.save(), t.layers_output[7].save(), t.layers[2].mlp.output[3:5].save()]
    for value, other in zip((early, late, some), expected, strict=True):
        assert gap(value, other) <= 1e-4


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "in chunks"])
def test_an_earlier_layer_is_written_into_a_later_one(narrow, options):
    values = []
    for lm in (narrow.get("vllm", "float32", **options), narrow.get("transformers", "float32")):
        with lm.trace(LONG, max_tokens=3) as t:
            t.layers[1].attn.output[2] *= 3
            t.layers[6].output[-3:] = 2 * t.layers[3].output[0:3] - 0.5 * t.layers[5].output[-3:]
            t.layers[6].attn.z[-1, 2] = t.layers[4].attn.z[-1, 2]
            rows = [t.layers[6].output[-3:].save(), t.layers[3].output[0:3].save(), t.layers[5].output[-3:].save()]
            z, logits = t.layers[6].attn.z[-1, 2].save(), t.all().logits.save()
        torch.testing.assert_close(rows[0], 2 * rows[1] - 0.5 * rows[2])
        values.append((z, logits))
    for value, other in zip(*values, strict=True):
        assert gap(value, other) <= 1e-4


def test_the_second_run_finds_the_firsts_blocks(narrow):
    """Nobody ran this prompt before the trace."""
    with narrow.get("vllm", "float32").trace("Once more: " + LONG) as t:
        t.layers[6].output[-2] = t.layers[3].output[-1]  # a later token's: it takes two runs
        logits = t.logits.save()
    assert t.run.cached_tokens >= 32
    assert logits.any()


@BOTH
def test_what_was_saved_stays_as_it_is_while_the_engine_runs_on(narrow, engine):
    """Kernels write over their inputs, and views of the captured memory would show it."""
    lm = narrow.get(engine, "float32")
    with lm.trace(LONG) as t:
        saved = [layer.output.save() for layer in t.layers]
        cache = t.cache(pc.resid_post)
    kept = [value.clone() for value in saved]
    saved[0].zero_()  # nor does a change here reach anything else
    for _ in range(3):
        lm.run([LONG[::-1], LONG[5:]], max_tokens=4, capture=[pc.resid_post, pc.mlp_out])
    for layer, (value, was) in enumerate(zip(saved, kept, strict=True)):
        assert type(value) is torch.Tensor
        assert torch.equal(cache[pc.resid_post[layer]], was)
        assert torch.equal(value, was) or layer == 0
    assert kept[0].any()


@BOTH
def test_torchs_default_dtype_is_not_that_of_values(narrow, engine):
    lm, values = narrow.get(engine, "float32"), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with lm.trace(PROMPTS[0]) as t:
                t.layers[2].output[-1] += 0.5 * t.layers[1].output[-1] + torch.ones(lm.model.d_model)
                values.append((t.layers[1].output + 1.0).save())
                values.append(t.layers[5].output.save())
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(value.dtype == torch.float32 for value in values)
    assert torch.equal(values[0], values[2])
    assert torch.equal(values[1], values[3])
    assert values[1].any()


@BOTH
def test_an_error_is_its_prompts_and_the_next_trace_runs(narrow, engine):
    lm = narrow.get(engine, "float32")
    with pytest.raises(pc.RunError, match="(?s)not finite.*# too large") as raised, lm.trace(max_tokens=2) as t:
        a, b = t.invoke(PROMPTS[0]), t.invoke(PROMPTS[1])
        b.layers[2].output[-1] = 3e38
        b.layers[2].output[-1] *= 1e30  # too large
        fine, lost = a.layers[5].output.save(), b.layers[5].output.save()
    alone = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[5]])[pc.resid_post[5]]
    assert gap(fine, alone) <= 1e-5
    assert a.error is None
    assert b.error is raised.value
    with pytest.raises(pc.RunError, match="not finite"):
        lost.sum()
    with lm.trace(PROMPTS[0]) as t:
        again = t.layers[5].output.save()
    assert gap(again, alone) <= 1e-5


@BOTH
def test_a_stream_gives_tokens_then_values(narrow, engine):
    lm, text = narrow.get(engine, "float32"), ""
    with lm.trace(PROMPTS[0], max_tokens=5, stream=True) as t:
        t.generated.layers[3].output *= 1.5
        h = t.all().layers[3].output.save()
    for part in t:
        text += part.text
    run = lm.run(PROMPTS[0], max_tokens=5, edits=[pc.Scale(1.5, pc.resid_post[3], tokens=pc.generated)],
                 capture=[pc.resid_post[3]])  # fmt: skip
    assert text == t.text == run.text
    assert gap(h, run[pc.resid_post[3]]) <= 1e-5
