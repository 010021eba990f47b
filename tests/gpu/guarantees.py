"""The guarantees of DESIGN on one engine, in one mode such as "v1 graphs" or "tp2 eager"."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

from tests.gpu.board import note
from tests.gpu.engines import COMPILED, PROMPTS, TOKENS, Stock, attached, bits, fresh, setting, surroundings
from tests.gpu.ops import ops


def unsynchronised(mode: str, lm) -> None:
    """Everything of ours in a step runs with synchronisation forbidden."""
    import torch

    import patchclamp as pc

    ours, calls, waits = attached(lm), [], []

    def strict(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            calls.append(name)
            try:
                return inner(*args, **kwargs)
            finally:
                calls.append("")
                torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, outer)
        undo.append((owner, name, inner))

    def watched(owner: object, name: str) -> None:  # the debug mode does not see these
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            if calls and calls[-1] and threading.current_thread() is thread[0]:
                waits.append(f"{name} in {calls[-1]}")
            return inner(*args, **kwargs)

        setattr(owner, name, outer)
        undo.append((owner, name, inner))

    thread, undo = [None], []
    stock_before = ours.hooks.before

    def remember(*args, **kwargs):
        thread[0] = threading.current_thread()
        return stock_before(*args, **kwargs)

    ours.hooks.before = remember
    for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
        watched(owner, "synchronize")
    for name in ("before", "planned", "logits", "after"):
        strict(ours.hooks, name)
    strict(ours.runtime, "apply")
    try:
        runs = lm.run([PROMPTS[2]] * 3, max_tokens=20, sampling={"ignore_eos": True},
                      edits=[pc.Add([0.0] * lm.model.d_model, at=pc.resid_mid)], capture=[pc.resid_post, pc.logits])  # fmt: skip
        error = next((str(run.error) for run in runs if run.error), "")
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"[:200]
    for owner, name, inner in undo:
        setattr(owner, name, inner)
    held = not error and not waits and {"planned", "apply"} <= set(calls)
    note(mode, "no synchronisation in the hot path", held, f"{error} {waits[:3] or ''}")


def cut_down(mode: str, lm) -> None:
    """Graphs without the taps that nobody needs give what the whole ones give, to the last bit."""
    import torch

    import patchclamp as pc
    from patchclamp.runtime import cuda_graphs

    recorded, patience = attached(lm).runtime.step.recorded, cuda_graphs.PATIENCE
    programs = [
        [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[2])],
        [pc.Zero(pc.mlp_out[1]), pc.Add(torch.randn(lm.model.d_model), at=pc.final_norm)],
    ]
    answers, cuts = {}, {}
    for wait in (1 << 40, 1):
        cuda_graphs.PATIENCE, before = wait, recorded.cut
        try:
            runs = [lm.run(PROMPTS, edits=edits, capture=[pc.resid_post[3]], max_tokens=40, sampling={"ignore_eos": True}, logprobs=True)
                    for edits in programs]  # fmt: skip
        finally:
            cuda_graphs.PATIENCE = patience
        answers[wait] = [(bits(run), run[pc.resid_post[3]].tolist()) for many in runs for run in many]
        cuts[wait] = recorded.cut - before
    note(mode, "graphs cut down to the taps in use: bit for bit the whole ones", len(set(map(str, answers.values()))) == 1
         and cuts[1 << 40] == 0 and cuts[1] > 0, f"copies made: {list(cuts.values())}")  # fmt: skip


def guarantees(mode: str, model: str) -> None:
    """Everything that is promised, on an engine of that mode, beside stock vLLM in the same one."""
    import patchclamp as pc
    from patchclamp.proving import prove

    options, environ = setting(mode)
    with contextlib.ExitStack() as running:
        stock = running.enter_context(Stock(model, options, **environ, **fresh("stock", mode)))
        running.enter_context(surroundings({**environ, **fresh("ours", mode)}))
        began = time.time()
        with pc.LM(model, engine="vllm", prove=False, numerics="stock", check_rate=1, **options) as lm:
            runner = lm.engine.status()["runner"]
            right = runner == ("v1" if "v1" in mode else "v2")
            note(mode, "starts", right, f"{time.time() - began:.0f} s, runner {runner}")
            expected = stock.answer()
            answers(mode).write_text(json.dumps(expected))
            checks(mode, lm, expected)
            ops(mode, lm)
            wrong = {proof.name: proof.note for proof in prove(lm, full=True) if not proof.holds}
            note(mode, "every site is proved, in every layer", not wrong, json.dumps(wrong)[:600])
            status = lm.engine.status()
            checked, failed = status["self_checks"], status["self_checks_failed"]
            note(mode, "labels of all captures are right", checked > 0 and not failed, f"{failed} of {checked} fail")


def answers(mode: str) -> Path:
    """Where the answers of stock vLLM are kept for whoever starts again."""
    return COMPILED / f"{mode.replace(' ', '_')}.json"


def found_again(mode: str, model: str) -> None:
    """Another start, in another process, finds what the first one compiled."""
    from vllm.compilation.counter import compilation_counter

    import patchclamp as pc

    options, environ = setting(mode)
    expected, again = json.loads(answers(mode).read_text()), f"{mode} again"
    with (
        surroundings({**environ, **fresh("ours", mode)}),
        pc.LM(model, engine="vllm", prove=False, numerics="stock", **options) as lm,
    ):
        runs = lm.run(PROMPTS, max_tokens=TOKENS, sampling={"ignore_eos": True}, logprobs=True)
        edited = lm.run(
            PROMPTS, max_tokens=TOKENS, edits=[pc.Zero(pc.attn_out[1])], sampling={"ignore_eos": True}, logprobs=True
        )
        alone = lm.engine.status()["workers"] == 1
    loaded = compilation_counter.num_aot_artifacts_loaded
    if alone:  # the workers are in this process
        note(again, "what was compiled is found again", loaded > 0, f"{loaded} artifacts loaded")
    same = [[r.token_ids, [x.hex() for x in r.logprobs]] for r in runs] == expected
    note(again, "1 off is stock, bit for bit", same, "")
    differ = all(bits(run) != bits(plain) for run, plain in zip(edited, runs, strict=True))
    note(again, "  and edits act there", differ and all(run.error is None for run in edited), "")


def checks(mode: str, lm, expected: list) -> None:
    """The guarantees on one engine; `expected` is what stock vLLM answers."""
    import torch

    import patchclamp as pc

    greedy = {
        "max_tokens": TOKENS,
        "sampling": {"ignore_eos": True},
    }
    plain = lm.run(PROMPTS, **greedy, logprobs=True)
    mine = [[r.token_ids, [x.hex() for x in r.logprobs]] for r in plain]
    apart = [abs(float.fromhex(a) - b) for (_, old), r in zip(expected, plain, strict=True)
             for a, b in zip(old, r.logprobs, strict=True)]  # fmt: skip
    tokens = sum(a == r.token_ids for (a, _), r in zip(expected, plain, strict=True))
    told = f"logprobs up to {max(apart):g} apart, {tokens}/{len(PROMPTS)} texts equal"
    note(mode, "1 off is stock, bit for bit", mine == expected, told)
    stream = [pc.Site(name) for name in lm.sites.names if name not in ("embed", "logits")]
    run = lm.run(PROMPTS[1], capture=[*stream, pc.logits], **greedy, logprobs=True)
    base = lm.run(PROMPTS[1], edits=[pc.Add([0.0] * lm.model.d_model, at=pc.resid_pre[0])], **greedy, logprobs=True)
    note(mode, "4 captures change nothing; a no-op edit neither", bits(run) == bits(base), run.text[:0])
    for site in stream:
        again = lm.run(PROMPTS[1], edits=[pc.Replace(pc.From(run, site), at=site)], **greedy, logprobs=True)
        note(mode, f"5 self-patch at every layer of {site}", bits(again) == bits(run), "")
    at = pc.resid_post[1]
    steered = lm.run(
        PROMPTS[1],
        edits=[pc.Add(torch.randn(lm.model.d_model), at=at, tokens=pc.generated, scale=3.0)],
        capture=[at, pc.resid_post[0]],
        **greedy,
        logprobs=True,
    )
    differ = steered.logprobs[2:] != run.logprobs[2:] and steered.logprobs[0] == run.logprobs[0]
    delta = (steered[at][: len(PROMPTS[1])] - run[at][: len(PROMPTS[1])]).abs().max().item()
    note(
        mode,
        "an edit of generated tokens acts there and not before",
        differ and delta == 0.0,
        f"prompt rows differ by {delta:g}",
    )
    whole = lm.run([PROMPTS[1]] * 3, capture=[[at], [], [at @ pc.generated[2:4]]], **greedy, logprobs=True)
    rows = whole[0].positions(at) == list(range(len(PROMPTS[1]) + TOKENS - 1))
    close = (whole[0][at] - run[at]).abs().max().item() / run[at].abs().max().item()
    part = whole[2].positions(at) == [len(PROMPTS[1]) + 2, len(PROMPTS[1]) + 3]
    twin = whole[0][at][len(PROMPTS[1]) + 2 : len(PROMPTS[1]) + 4]
    part = part and (whole[2][at] - twin).abs().max().item() <= 0.02 * twin.abs().max().item()
    note(
        mode,
        "4 captures in a batch: complete, labelled, not aliased",
        rows and part and close < 0.05,
        f"against alone {close:.2g}",
    )
    hard = [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[0], scale=10.0), pc.Zero(pc.attn_out)]
    noop = [pc.Add([0.0] * lm.model.d_model, at=pc.resid_post[0])]
    a = lm.run(PROMPTS, edits=[noop, [], noop, []], **greedy, logprobs=True)
    b = lm.run(PROMPTS, edits=[hard, [], hard, []], **greedy, logprobs=True)
    note(mode, "2 batchmates of edited requests are unchanged", all(bits(a[i]) == bits(b[i]) for i in (1, 3)), "")
    note(mode, "  and the edited ones are not", all(bits(a[i]) != bits(b[i]) for i in (0, 2)), "")
    clean = lm.run(PROMPTS[1], max_tokens=1, capture=[pc.resid_post, pc.logits], logprobs=True)
    corrupt = lm.run(
        PROMPTS[1][::-1],
        max_tokens=1,
        edits=[pc.Replace(pc.From(clean, at), at=at)],
        capture=[pc.logits],
        logprobs=True,
    )
    gap = (corrupt[pc.logits] - clean[pc.logits]).abs().max().item()
    note(mode, "5 all positions of one layer give the clean logits", gap == 0.0, f"{gap:g}")
    big = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[0], scale=s) for s in (3.0, 2.0)]
    hurt = lm.run([PROMPTS[1]] * 3, edits=[[], [big[1]], [big[0]]], **greedy, logprobs=True)
    told = all("resid_post[0]" in str(r.error) for r in hurt[1:])
    note(
        mode,
        "an edit that is not finite fails its run and no other",
        told and hurt[0].error is None,
        str(hurt[1].error),
    )
    again = lm.run([PROMPTS[1]] * 2, edits=[noop, []], **greedy, logprobs=True)
    note(mode, "  and the slot's next program is not blamed", all(r.error is None for r in again), "")
    long = lm.run(PROMPTS[1], max_tokens=40, sampling={"ignore_eos": True}, capture=[pc.resid_post], logprobs=True)
    rows = [long[pc.resid_post[i]] for i in range(lm.model.layers)]
    fed = lm.run(PROMPTS[1] + long.token_ids[:-1], max_tokens=1, capture=[pc.resid_post], logprobs=True)
    apart = max((a - fed[pc.resid_post[i]]).abs().max().item() / a.abs().max().item() for i, a in enumerate(rows))
    note(mode, "captures of 40 steps agree with one prefill of the same tokens", apart < 0.05, f"{apart:.2g}")
    copied = lm.engine.status()["steps_planned"]
    lm.run(PROMPTS[1], max_tokens=100, sampling={"ignore_eos": True}, edits=noop, capture=[at], logprobs=True)
    copied = lm.engine.status()["steps_planned"] - copied
    note(mode, "100 tokens of a steady request are planned at most 3 times", copied <= 3, str(copied))
    if lm.engine.status()["workers"] == 1:  # in this process
        if mode.endswith("graphs"):
            cut_down(mode, lm)
        unsynchronised(mode, lm)
    after = lm.run(PROMPTS, **greedy, logprobs=True)
    note(mode, "idle again after all that, bit for bit", [bits(r) for r in after] == [bits(r) for r in plain], "")
    many = lm.run(
        [PROMPTS[3]] * 64,
        edits=[[pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[i % 3])] for i in range(64)],
        max_tokens=4,
        sampling={"ignore_eos": True},
        logprobs=True,
    )
    note(
        mode,
        "64 distinct programs, more than run at once",
        len({tuple(r.logprobs) for r in many}) == 64,
        str(lm.engine.status()),
    )
