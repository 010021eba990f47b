"""Guarantee 1: with the plugin on and no program, tokens and logprobs are stock vLLM's, bit for bit."""

import pytest

import patchclamp as pc

from .conftest import PROMPTS


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        pytest.param("float32", False, id="fp32 eager"),
        pytest.param("bfloat16", False, id="bf16 eager"),
        pytest.param("bfloat16", True, id="bf16 compiled, casts emulated", marks=pytest.mark.slow),
        pytest.param("float32", True, id="fp32 compiled", marks=pytest.mark.slow),
    ],
)
def test_without_a_program_every_bit_is_stocks(alone, dtype, compiled):
    stock, ours = alone(dtype, compiled)
    assert len(stock) == len(PROMPTS)
    assert ours == stock


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_has_run_programs_is_stock_again(shallow, alone, dtype):
    """The same after edits and captures; and the comparison sees an edit too small to change a token."""
    stock, _ = alone(dtype, False)
    lm = shallow.get("vllm", dtype)
    hard = [pc.Add([3.0] * lm.model.d_model, at=pc.resid_post[4]), pc.Zero(pc.attn_out)]
    lm.run(list(PROMPTS), max_tokens=4, edits=hard, capture=[pc.resid_post], logprobs=True)
    runs = lm.run(list(PROMPTS), max_tokens=8, logprobs=True)
    assert [[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs] == stock
    nudged = lm.run(
        list(PROMPTS), max_tokens=8, edits=[pc.Add([1e-3] * lm.model.d_model, at=pc.resid_post[5])], logprobs=True
    )
    assert dtype != "float32" or [run.token_ids for run in nudged] == [tokens for tokens, _ in stock]
    assert [[x.hex() for x in run.logprobs] for run in nudged] != [logprobs for _, logprobs in stock]
