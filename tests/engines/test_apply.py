"""Python of one's own on the rows: where it acts, what it may not do, and that its errors stay its run's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import WIDTH
from .conftest import CHUNKED, PROMPTS
from .test_ops import V1

AT = pc.resid_post[3]
SAMPLING = {"ignore_eos": True}


@pytest.fixture(scope="module", params=["eager", "compiled", "chunks of 16", "transformers"])
def lm(narrow, request):
    """An engine that allows code: the shared ones, asked another way."""
    engine, options = ("transformers", {}) if request.param == "transformers" else ("vllm", {})
    options = {"compiled": {"compiled": True}, "chunks of 16": CHUNKED}.get(request.param, options)
    shared = narrow.get(engine, "float32", **options)
    return pc.LM("", shared.engine, prove=False, allow_code=True)


def test_code_does_what_an_op_does(lm):
    """`Add`, `Scale` and `Ablate`, between other ops, on prompt and generated tokens, by token id too."""
    v, unit = torch.from_numpy(V1), torch.from_numpy(V1 / np.linalg.norm(V1))
    token = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, logprobs=True).token_ids[2]
    pairs = [
        (pc.Apply(lambda h: h + 2.0 * v, AT, pc.prompt[-1]), pc.Add(V1, AT, pc.prompt[-1], scale=2.0)),
        (pc.Apply(lambda h: 0.5 * h, pc.attn_out[7]), pc.Scale(0.5, pc.attn_out[7])),
        (pc.Apply(lambda h: h - (h @ unit)[:, None] * unit, AT, pc.generated), pc.Ablate(V1, AT, pc.generated)),
        (pc.Apply(lambda h: h + v, AT, pc.token(token)), pc.Add(V1, AT, pc.token(token))),
        (pc.Apply(lambda h: 1.5 * h, pc.logits, pc.generated), pc.Scale(1.5, pc.logits, pc.generated)),
    ]  # fmt: skip
    for code, op in pairs:
        ours, theirs = ([pc.Add(V1, AT, scale=0.1), each, pc.Capture(AT), pc.Scale(0.9, pc.mlp_out[4])] for each in (code, op))  # fmt: skip
        a, b = lm.run([PROMPTS[0], PROMPTS[0]], edits=[ours, theirs], max_tokens=8, sampling=SAMPLING, logprobs=True)
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        torch.testing.assert_close(a["edits[2]"], b["edits[2]"], rtol=1e-4, atol=1e-4)
    plain = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, logprobs=True)
    assert plain.logprobs != a.logprobs


def test_code_is_told_positions_and_site_by_name(lm):
    """Every row once, at every layer, by the words of the program; in a batch with others and in any chunks."""
    seen: dict[str, list] = {}

    def noted(h, *, site, positions):
        assert (h.shape[0], positions.dtype, positions.device) == (len(positions), torch.int64, h.device)
        seen.setdefault(site, []).append(positions)
        return h + 0.01 * positions[:, None]

    def known(h, positions):
        return h + 0.01 * positions[:, None]

    tokens, sampling = pc.prompt[2:5] | pc.prompt[-1] | pc.generated[1:], {"max_tokens": 6, "sampling": SAMPLING}
    edits = [pc.Apply(noted, pc.resid_pre[3:5], tokens), pc.Apply(known, pc.logits, pc.generated)]
    run, mate = lm.run([PROMPTS[1], PROMPTS[0]], edits=[edits, [pc.Apply(known, pc.resid_post[1])]],
                       capture=[pc.resid_post[2], pc.logits], **sampling, logprobs=True)  # fmt: skip
    plain = lm.run(PROMPTS[1], capture=[pc.resid_post[2]], **sampling, logprobs=True)
    assert mate.error is None
    chosen = run.select(tokens)
    assert {site: torch.cat(many).tolist() for site, many in seen.items()} == {
        "resid_pre[3]": chosen.tolist(), "resid_pre[4]": chosen.tolist()}  # fmt: skip
    prompt = run.prompt_token_ids
    same = slice(0, len(prompt))  # what was generated then may be other tokens
    added = (
        0.01 * torch.arange(len(prompt))[:, None] * torch.from_numpy(np.isin(np.arange(len(prompt)), chosen))[:, None]
    )
    torch.testing.assert_close(run[pc.resid_post[2]][same], plain[pc.resid_post[2]][same] + added, rtol=1e-5, atol=1e-3)
    again = lm.run(PROMPTS[1], capture=[pc.logits], edits=edits[:1], **sampling, logprobs=True)
    gap = run[pc.logits][1] - again[pc.logits][1]
    assert run.token_ids[0] == again.token_ids[0]
    torch.testing.assert_close(gap, torch.full_like(gap, 0.01 * len(prompt)), rtol=1e-2, atol=1e-3)


def test_what_goes_wrong_is_its_runs_error_alone(lm):
    """Its batchmates go on, those with edited blocks in the cache among them, and it is not called again."""
    mates = [[], [pc.Scale(0.9, AT)]]
    plain = lm.run([PROMPTS[1]] * 2, max_tokens=6, sampling=SAMPLING, edits=mates, logprobs=True)
    calls = []

    class Unsaid(Exception):
        def __str__(self):
            raise ValueError("not even that")

    def fails(error):
        def fn(h):
            calls.append(len(h))
            raise error

        return fn

    wrong = {
        "within pc.Apply": lambda h: lm.run(PROMPTS[0], max_tokens=1, logprobs=True), "SystemExit: 3": fails(SystemExit(3)),
        "KeyError: 'nothing here'": fails(KeyError("nothing here")), "Apply raised Unsaid": fails(Unsaid()),
        "got [9, 1]": lambda h: h.new_zeros(9, 1), "got NoneType": lambda h: None, "got str": lambda h: "rows",
        f"got [{WIDTH},": lambda h: h.t_(), f"got [8, {WIDTH}]": lambda h: h.repeat(2, 1), "NotImplementedError": lambda h: h.to("meta"),
        "torch.sparse": lambda h: h.to_sparse(), "got torch.complex64": lambda h: torch.fft.fft(h), "not finite": lambda h: h / 0.0,
    }  # fmt: skip
    programs = [[pc.Zero(AT, pc.prompt[0]), pc.Apply(fn, AT, pc.prompt[1:] | pc.generated)] for fn in wrong.values()]
    prompts = [PROMPTS[0]] * len(wrong) + [PROMPTS[1]] * 2
    *failed, one, other = lm.run(prompts, edits=[*programs, *mates], max_tokens=6, sampling=SAMPLING, logprobs=True)
    for run, text in zip(failed, wrong, strict=True):
        assert isinstance(run.error, pc.RunError)
        assert text in str(run.error)
        assert text == "not finite" or str(run.error).startswith("edits[1]: ")
    for run, before in zip((one, other), plain, strict=True):
        assert run.error is None
        np.testing.assert_allclose(run.logprobs, before.logprobs, atol=2e-4)
    again = lm.run([PROMPTS[1]] * 2, max_tokens=6, sampling=SAMPLING, edits=mates, logprobs=True)
    np.testing.assert_allclose(again[1].logprobs, plain[1].logprobs, atol=2e-4)
    assert len(calls) == 3
    assert lm.engine.status()["code"] == 0


def test_rows_are_the_codes_own(lm):
    """Kept, changed in place, asked for gradients: nothing of the model's changes but by what is given back."""
    kept = []

    def reads(h):
        kept.append(h)
        h.mul_(7.0)
        return (h / 7.0).double().requires_grad_()

    plain = lm.run(PROMPTS[0], max_tokens=3, sampling=SAMPLING, capture=[AT], logprobs=True)
    run = lm.run(
        PROMPTS[0],
        max_tokens=3,
        sampling=SAMPLING,
        capture=[AT],
        edits=[pc.Apply(reads, AT, pc.prompt[0, 2, 3])],
        logprobs=True,
    )
    np.testing.assert_allclose(run.logprobs, plain.logprobs, atol=2e-4)
    rows = torch.cat(kept)
    torch.testing.assert_close(rows / 7.0, plain[AT][[0, 2, 3]], rtol=1e-4, atol=1e-4)
    probe = torch.zeros(rows.shape[1], requires_grad=True)
    (rows @ probe).sum().backward()
    assert probe.grad is not None


def test_code_needs_leave(narrow):
    lm = narrow.get("vllm", "float32")
    with pytest.raises(pc.ProgramError, match=r"edits\[0\].fn: .*allow_code=True"):
        lm.run(PROMPTS[0], edits=[pc.Apply(lambda h: h, AT)], logprobs=True)
    with pytest.raises(pc.ProgramError, match="expected a function of rows, got"):
        pc.Apply("h * 2", AT)
    with pytest.raises(pc.ProgramError, match="Apply"):
        pc.Program.of([pc.Apply(lambda h: h, AT)]).to_json()


def test_nobody_reads_cached_blocks_that_code_made(narrow):
    """Not even the same code again: what it does may have changed."""
    shared = narrow.get("vllm", "float32")
    lm = pc.LM("", shared.engine, prove=False, allow_code=True)
    prompt = lm.tokens(" ".join(["one two three four five six seven eight nine ten"] * 8))
    plain = lm.run(prompt, max_tokens=2, logprobs=True)
    program = [pc.Apply(lambda h: 1.1 * h, AT, pc.prompt[40:])]
    first, second = (lm.run(prompt, max_tokens=2, edits=program, logprobs=True) for _ in range(2))
    assert second.cached_tokens <= 40
    assert second.logprobs == pytest.approx(first.logprobs, abs=2e-4)
    assert lm.run(prompt, max_tokens=2, logprobs=True).logprobs == pytest.approx(plain.logprobs, abs=2e-4)
