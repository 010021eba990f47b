"""Guarantee 1: with the plugin on and no program, tokens and logprobs are stock vLLM's, bit for bit."""

import pytest

from .conftest import PROMPTS


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)],
    ids=["fp32 eager", "bf16 eager", "fp32 compiled", "bf16 compiled, casts emulated"],
)
def test_without_a_program_every_bit_is_stocks(engines, stock, dtype, compiled):
    expected = stock(dtype, compiled, emulate=compiled and dtype == "bfloat16")
    runs = engines.get("vllm", dtype, compiled).run(list(PROMPTS), max_tokens=8)
    assert [[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs] == expected


def test_the_comparison_can_fail(engines, stock):
    """The same check sees an edit too small to change a token."""
    expected = stock("float32")
    lm = engines.get("vllm", "float32")
    import patchclamp as pc

    nudge = pc.Add([1e-3] * lm.model.d_model, at=pc.resid_post[20])
    runs = lm.run(list(PROMPTS), max_tokens=8, edits=[nudge])
    assert [run.token_ids for run in runs] == [tokens for tokens, _ in expected]
    assert [[x.hex() for x in run.logprobs] for run in runs] != [logprobs for _, logprobs in expected]
