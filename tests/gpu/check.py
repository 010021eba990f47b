"""The guarantees on a GPU (V2 runner): kernel, graphs and eager, with asynchronous scheduling. Prints a table.

    python -m tests.gpu.check --out DIR

Stock vLLM runs in processes of their own, without the plugin.  Weights are random, prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

PROMPTS = [[(7 * i * i + 13 * i + n) % 30000 + 100 for i in range(n)] for n in (5, 33, 90, 17)]
TOKENS = 12
BASE = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
}  # a cached prefix was computed in another batch: equal, but not to the last bit
RESULTS: list[dict] = []


def note(mode: str, what: str, held: bool, found: str) -> None:
    RESULTS.append({"mode": mode, "check": what, "holds": bool(held), "found": found})
    print(f"{'ok  ' if held else 'FAIL'} {mode:14} {what:58} {found}", flush=True)


def stock(model: str, options: dict, **environ: str) -> list:
    code = (
        "import json, sys\nfrom vllm import LLM, SamplingParams\na = json.loads(sys.argv[1])\n"
        "llm = LLM(a['model'], **a['options'])\n"
        "s = SamplingParams(temperature=0, max_tokens=a['n'], logprobs=0, ignore_eos=True, detokenize=False)\n"
        "o = llm.generate([{'prompt_token_ids': p} for p in a['prompts']], s, use_tqdm=False)\n"
        "assert 'patchclamp' not in sys.modules\n"
        "print('RESULT ' + json.dumps([[list(x.token_ids), [t[i].logprob.hex() for t, i in zip(x.logprobs, x.token_ids)]]"
        " for x in (y.outputs[0] for y in o)]))"
    )
    asked = json.dumps({"model": model, "options": options, "prompts": PROMPTS, "n": TOKENS})
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environ}
    made = subprocess.run([sys.executable, "-c", code, asked], env=environment, capture_output=True, text=True)
    lines = [line for line in made.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, made.stderr[-3000:]
    return json.loads(lines[-1][7:])


def kernel() -> None:
    """Triton against the reference on random tables, rows and dtypes."""
    import numpy as np
    import torch

    from patchclamp.kernels import cuda, reference
    from patchclamp.plan import CAPTURE, LINEAR, RECORD, Batch, ProgramTable, make_plan
    from patchclamp.plan.step import BYTES
    from patchclamp.runtime.device import CudaTables

    rng = np.random.default_rng()
    widths, sampled = np.array([1024, 1536, 4096]), np.zeros(3, bool)
    worst, rounds = 0.0, 0
    for _ in range(12):
        table = ProgramTable(8, 3, 400)
        bank = torch.from_numpy(rng.standard_normal(200_000).astype(np.float32)).cuda()
        positions = torch.zeros(64, dtype=torch.int64, device="cuda")
        tables = CudaTables(table, 64, 16, bank, positions)
        for _ in range(6):
            counts, made = rng.integers(0, 6, 3), []
            for point, count in enumerate(counts):
                for o in range(count):
                    start, length = int(rng.integers(0, 9)), int(rng.integers(1, 9))
                    kind = LINEAR if rng.random() < 0.6 else CAPTURE
                    value = int(rng.integers(0, 20)) * widths[point] if kind == LINEAR else o
                    x, y = rng.choice([0.0, 1.0, 0.5, -2.0], 2) if kind == LINEAR else (0.0, 0.0)
                    made.append((start, start + length, kind, int(rng.integers(0, 2)), value, x, y))
            table.admit(np.array(made, RECORD), counts)
        slots, count = rng.permutation(7), rng.integers(1, 8, 7)
        batch = Batch(slots, np.cumsum(count) - count, rng.integers(0, 9, 7), count, int(count.sum()))
        plan = make_plan(batch, table, widths, sampled, BYTES)
        tables.load(plan, batch.row + batch.count - 1)
        positions[: batch.rows] = torch.from_numpy(plan.tokens.position.astype(np.int64)).cuda()
        kept = torch.zeros(max(plan.size, 1), dtype=torch.uint8, device="cuda")
        expected_kept = np.zeros(plan.size // 4, np.float32)
        numbers = make_plan(batch, table, widths, sampled)
        for point, width in enumerate(widths):
            h = rng.standard_normal((batch.rows, width)).astype(np.float32)
            out = torch.from_numpy(h.copy()).cuda()
            cuda.site(tables, point, out, None, kept, 0, False)
            reference.apply(h, plan.tokens, point, table, numbers, bank.cpu().numpy(), expected_kept)
            worst = max(worst, float(np.abs(out.cpu().numpy() - h).max()))
            rounds += 1
        same = np.array_equal(kept.cpu().numpy()[: plan.size].view(np.float32), expected_kept)
        worst = max(worst, 0.0 if same else 9.0)
    note("kernel", f"Triton equals the reference, {rounds} random points", worst == 0.0, f"worst {worst:g}")


def bits(run) -> tuple:
    return run.token_ids, [x.hex() for x in run.logprobs]


def checks(mode: str, lm, expected: list | None) -> None:
    import torch

    import patchclamp as pc

    greedy = {
        "max_tokens": TOKENS,
        "sampling": {"ignore_eos": True},
    }
    plain = lm.run(PROMPTS, **greedy)
    if expected is not None:
        same = [[r.token_ids, [x.hex() for x in r.logprobs]] for r in plain] == expected
        gap = max(
            abs(float.fromhex(a) - b)
            for (_, old), r in zip(expected, plain, strict=True)
            for a, b in zip(old, r.logprobs, strict=True)
        )
        tokens = sum(a == r.token_ids for (a, _), r in zip(expected, plain, strict=True))
        note(
            mode,
            "1 off is stock, bit for bit",
            same,
            f"logprobs up to {gap:g} apart, {tokens}/{len(PROMPTS)} texts equal",
        )
    stream = [pc.resid_pre, pc.resid_mid, pc.resid_post, pc.attn_out, pc.mlp_out, pc.final_norm]
    run = lm.run(PROMPTS[1], capture=[*stream, pc.logits], **greedy)
    base = lm.run(PROMPTS[1], edits=[pc.Add([0.0] * lm.model.d_model, at=pc.resid_pre[0])], **greedy)
    note(mode, "4 captures change nothing; a no-op edit neither", bits(run) == bits(base), run.text[:0])
    for site in stream:
        again = lm.run(PROMPTS[1], edits=[pc.Replace(pc.From(run, site), at=site)], **greedy)
        note(mode, f"5 self-patch at every layer of {site}", bits(again) == bits(run), "")
    at = pc.resid_post[1]
    steered = lm.run(
        PROMPTS[1],
        edits=[pc.Add(torch.randn(lm.model.d_model), at=at, tokens=pc.generated, scale=3.0)],
        capture=[at, pc.resid_post[0]],
        **greedy,
    )
    differ = steered.logprobs[2:] != run.logprobs[2:] and steered.logprobs[0] == run.logprobs[0]
    delta = (steered[at][: len(PROMPTS[1])] - run[at][: len(PROMPTS[1])]).abs().max().item()
    note(
        mode,
        "an edit of generated tokens acts there and not before",
        differ and delta == 0.0,
        f"prompt rows differ by {delta:g}",
    )
    whole = lm.run([PROMPTS[1]] * 3, capture=[[at], [], [at @ pc.generated[2:4]]], **greedy)
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
    a = lm.run(PROMPTS, edits=[noop, [], noop, []], **greedy)
    b = lm.run(PROMPTS, edits=[hard, [], hard, []], **greedy)
    note(mode, "2 batchmates of edited requests are unchanged", all(bits(a[i]) == bits(b[i]) for i in (1, 3)), "")
    note(mode, "  and the edited ones are not", all(bits(a[i]) != bits(b[i]) for i in (0, 2)), "")
    clean = lm.run(PROMPTS[1], max_tokens=1, capture=[pc.resid_post, pc.logits])
    corrupt = lm.run(PROMPTS[1][::-1], max_tokens=1, edits=[pc.Replace(pc.From(clean, at), at=at)], capture=[pc.logits])
    gap = (corrupt[pc.logits] - clean[pc.logits]).abs().max().item()
    note(mode, "5 all positions of one layer give the clean logits", gap == 0.0, f"{gap:g}")
    after = lm.run(PROMPTS, **greedy)
    note(mode, "idle again after all that, bit for bit", [bits(r) for r in after] == [bits(r) for r in plain], "")
    many = lm.run(
        [PROMPTS[3]] * 64,
        edits=[[pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[i % 3])] for i in range(64)],
        max_tokens=4,
        sampling={"ignore_eos": True},
    )
    note(
        mode,
        "64 distinct programs, more than run at once",
        len({tuple(r.logprobs) for r in many}) == 64,
        str(lm.engine.status()),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", default="eager,graphs")
    args = parser.parse_args()
    from tests.gpu.models import with_weights

    kernel()
    began = time.time()
    model = with_weights(Path("/tmp/model-8b-4"), "8b", 4)
    print(f"model made in {time.time() - began:.0f} s", flush=True)
    import patchclamp as pc

    for mode in args.modes.split(","):
        options = {**BASE, "dtype": "bfloat16", "enforce_eager": mode == "eager"}
        try:
            expected = stock(model, options)
            if mode == "graphs":
                again = stock(model, options, VLLM_USE_AOT_COMPILE="0", VLLM_DISABLE_COMPILE_CACHE="1")
                note("stock", "compiled anew, without the cached artifact: equals itself", again == expected, "")
                expected = again
            began = time.time()
            with pc.LM(model, engine="vllm", prove=False, **options) as lm:
                note(mode, "starts", True, f"{time.time() - began:.0f} s, runner {lm.engine.status()['runner']}")
                checks(mode, lm, expected)
        except Exception as error:
            traceback.print_exc()
            note(mode, "ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu-check.json").write_text(json.dumps(RESULTS, indent=1))
    sys.exit(0 if all(result["holds"] for result in RESULTS) else 1)


if __name__ == "__main__":
    main()
