"""Guarantee 1: with the plugin on and no program, tokens and logprobs are stock vLLM's, bit for bit."""

import pytest

import patchclamp as pc

from .conftest import PROMPTS

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def generated(lm: pc.LM, **options) -> list:
    runs = lm.run(list(PROMPTS), max_tokens=8, logprobs=True, **options)
    return [[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs]


@DTYPES
def test_without_a_program_every_bit_is_stocks(narrow, stock, dtype):
    ours = generated(narrow.get("vllm", dtype, prove=False, numerics="stock"))
    assert len(ours) == len(PROMPTS)
    assert ours == stock(dtype)


@pytest.mark.slow
@DTYPES
def test_compiled_too(compiled, dtype):
    """In a process of its own, as stock vLLM; in bf16 with its casts emulated."""
    stock, ours = compiled(dtype)
    assert len(stock) == len(PROMPTS)
    assert ours == stock


@DTYPES
def test_an_engine_that_has_run_programs_is_stock_again(narrow, stock, dtype):
    """The same after edits and captures; and the comparison sees an edit too small to change a token."""
    lm, expected = narrow.get("vllm", dtype), stock(dtype)
    hard = [pc.Add([3.0] * lm.model.d_model, at=pc.resid_post[4]), pc.Zero(pc.attn_out)]
    lm.run(list(PROMPTS), max_tokens=4, edits=hard, capture=[pc.resid_post], logprobs=True)
    assert generated(lm) == expected
    nudged = generated(lm, edits=[pc.Add([1e-3] * lm.model.d_model, at=pc.resid_post[5])])
    assert dtype != "float32" or [tokens for tokens, _ in nudged] == [tokens for tokens, _ in expected]
    assert [logprobs for _, logprobs in nudged] != [logprobs for _, logprobs in expected]
