"""Python of one's own on the rows: where it acts, what it may not do, and that its errors stay its run's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc

from .conftest import PROMPTS
from .test_ops import CHUNKED, V1

AT = pc.resid_post[3]
SAMPLING = {"ignore_eos": True}


@pytest.fixture(scope="module", params=["eager", "compiled", "chunks of 16", "transformers"])
def lm(engines, request):
    """An engine that allows code: the shared ones, asked another way."""
    engine, options = ("transformers", {}) if request.param == "transformers" else ("vllm", {})
    options = {"compiled": {"compiled": True}, "chunks of 16": CHUNKED}.get(request.param, options)
    shared = engines.get(engine, "float32", **options)
    return pc.LM("", shared.engine, prove=False, allow_code=True)


def test_code_does_what_an_op_does(lm):
    """`Add`, `Scale` and `Ablate`, between other ops, on prompt and generated tokens, by token id too."""
    v, unit = torch.from_numpy(V1), torch.from_numpy(V1 / np.linalg.norm(V1))
    token = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING).token_ids[2]
    pairs = [
        (pc.Apply(lambda h: h + 2.0 * v, AT, pc.prompt[-1]), pc.Add(V1, AT, pc.prompt[-1], scale=2.0)),
        (pc.Apply(lambda h: 0.5 * h, pc.attn_out[7]), pc.Scale(0.5, pc.attn_out[7])),
        (pc.Apply(lambda h: h - (h @ unit)[:, None] * unit, AT, pc.generated), pc.Ablate(V1, AT, pc.generated)),
        (pc.Apply(lambda h: h + v, AT, pc.token(token)), pc.Add(V1, AT, pc.token(token))),
        (pc.Apply(lambda h: 1.5 * h, pc.logits, pc.generated), pc.Scale(1.5, pc.logits, pc.generated)),
    ]  # fmt: skip
    for code, op in pairs:
        ours, theirs = ([pc.Add(V1, AT, scale=0.1), each, pc.Capture(AT), pc.Scale(0.9, pc.mlp_out[4])] for each in (code, op))  # fmt: skip
        a, b = lm.run([PROMPTS[0], PROMPTS[0]], edits=[ours, theirs], max_tokens=8, sampling=SAMPLING)
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        torch.testing.assert_close(a["edits[2]"], b["edits[2]"], rtol=1e-4, atol=1e-4)
    plain = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING)
    assert plain.logprobs != a.logprobs


def test_what_goes_wrong_is_its_runs_error_alone(lm):
    plain = lm.run(PROMPTS[1], max_tokens=6, sampling=SAMPLING)

    def breaks(h):
        raise KeyError("nothing here")

    def ends(h):
        raise SystemExit(3)

    def waits(h):
        return lm.run(PROMPTS[0], max_tokens=1)

    wrong = [waits, breaks, ends, lambda h: h[:, :1], lambda h: None, lambda h: h / 0.0, lambda h: "rows"]
    told = ["from within Apply", "Apply raised KeyError: 'nothing here'", "Apply raised SystemExit: 3", "Apply must give a tensor", "it gave NoneType",
            "not finite", "it gave str"]  # fmt: skip
    programs = [[pc.Zero(AT, pc.prompt[0]), pc.Apply(fn, AT, pc.prompt[-1])] for fn in wrong]
    *failed, mate = lm.run(
        [PROMPTS[0]] * len(wrong) + [PROMPTS[1]], edits=[*programs, []], max_tokens=6, sampling=SAMPLING
    )
    for run, text in zip(failed, told, strict=True):
        assert isinstance(run.error, pc.RunError)
        assert text in str(run.error)
        assert text == "not finite" or str(run.error).startswith("edits[1]: ")
    assert mate.error is None
    np.testing.assert_allclose(mate.logprobs, plain.logprobs, atol=2e-4)
    again = lm.run(PROMPTS[1], max_tokens=6, sampling=SAMPLING)
    np.testing.assert_allclose(again.logprobs, plain.logprobs, atol=2e-4)
    assert lm.engine.status()["code"] == 0


def test_code_needs_leave(engines):
    lm = engines.get("vllm", "float32")
    with pytest.raises(pc.ProgramError, match=r"edits\[0\].fn: Apply runs Python of yours .* allow_code=True"):
        lm.run(PROMPTS[0], edits=[pc.Apply(lambda h: h, AT)])
    with pytest.raises(pc.ProgramError, match="a function of rows is needed"):
        pc.Apply("h * 2", AT)
    with pytest.raises(pc.ProgramError, match="Apply is code, which is neither written down nor sent"):
        pc.Program.of([pc.Apply(lambda h: h, AT)]).to_json()


def test_nobody_reads_cached_blocks_that_code_made(engines):
    """Not even the same code again: what it does may have changed."""
    shared = engines.get("vllm", "float32")
    lm = pc.LM("", shared.engine, prove=False, allow_code=True)
    prompt = lm.tokens(" ".join(["one two three four five six seven eight nine ten"] * 8))
    plain = lm.run(prompt, max_tokens=2)
    program = [pc.Apply(lambda h: 1.1 * h, AT, pc.prompt[40:])]
    first, second = (lm.run(prompt, max_tokens=2, edits=program) for _ in range(2))
    assert second.cached_tokens <= 40
    assert second.logprobs == pytest.approx(first.logprobs, abs=2e-4)
    assert lm.run(prompt, max_tokens=2).logprobs == pytest.approx(plain.logprobs, abs=2e-4)
