"""The guarantees on a GPU: kernel, graphs and eager, with asynchronous scheduling, on both runners. Prints a table.

    python -m tests.gpu.check --out DIR
    python -m tests.gpu.check --out DIR --parts modes --modes "tp2 eager,tp2 graphs,pp2 eager,pp2 graphs"   # two GPUs

Stock vLLM runs in processes of their own, without the plugin.  Weights are random, prompts are token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

PROMPTS = [[(7 * i * i + 13 * i + n) % 30000 + 100 for i in range(n)] for n in (5, 33, 90, 17)]
TOKENS = 12
COMPILED = "/tmp/compiled"
BASE = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.3,
    "enable_prefix_caching": False,
}  # a cached prefix was computed in another batch: equal, but not to the last bit
RESULTS: list[dict] = []
FILE: Path | None = None


def note(mode: str, what: str, held: bool | None, found: str) -> None:
    """Notes whether something holds; None: a fact about stock vLLM, which nothing of ours can break or mend."""
    RESULTS.append({"mode": mode, "check": what, "holds": None if held is None else bool(held), "found": found})
    told = {None: "    ", True: "ok  ", False: "FAIL"}[RESULTS[-1]["holds"]]
    print(f"{told} {mode:14} {what:58} {found}", flush=True)
    if FILE is not None:
        import torch
        import vllm

        facts = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "vllm": vllm.__version__, "command": re.sub(r"--out \S+", "--out DIR", " ".join(["python -m tests.gpu.check", *sys.argv[1:]]))}  # fmt: skip
        FILE.write_text(json.dumps(facts | {"checks": RESULTS}, indent=1) + "\n")


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
    """Triton against the torch kernel on random tables, rows, strides and dtypes; the device's tables against the host's."""
    import torch

    from tests.reference import tables, triton

    try:
        found = triton.check("cuda", 60)
        note("kernel", "Triton equals the reference, bit for bit", min(found.values()) > 0, json.dumps(found))
    except AssertionError as error:
        note("kernel", "Triton equals the reference, bit for bit", False, str(error)[:200])
    copies, different = tables.check("cuda", 200, torch.cuda.synchronize)
    same = copies == 200 and not different
    note("kernel", "device tables equal the host's after 200 changes, one copy each", same, str(different))


def drain() -> None:
    """Rows of random sizes through a small ring and little pinned memory: nothing lost, reordered or overwritten."""
    import torch

    from patchclamp.runtime.drain import Drain

    made, kept, taken = Drain(torch.device("cuda"), 1 << 24, 1 << 27), [], 0
    random, generator = __import__("random").Random(), torch.Generator("cuda")
    for _ in range(600):
        size = random.choice([16, 1000, 1 << 16, 1 << 20, 5 << 20, 20 << 20])
        data, block, offset = made.reserve(size)
        data.copy_(torch.randint(0, 256, (len(data),), dtype=torch.uint8, device="cuda", generator=generator))
        kept.append((block, offset, data.sum(dtype=torch.int64), data[-16:].clone(), len(data)))
        taken += len(data)
        if random.random() < 0.3:
            kept.pop(random.randrange(len(kept)))
        if random.random() < 0.02:
            made.flush()
    made.flush()
    wrong = 0
    for block, offset, total, tail, size in kept:
        host = block.data[offset : offset + size]
        wrong += int(host.sum(dtype=torch.int64)) != int(total) or host[-16:].tolist() != tail.tolist()
    note("drain", f"{taken >> 20} MiB through a ring of 16 and 128 of pinned memory", wrong == 0 and made.spilled > 0,
         f"{wrong} of {len(kept)} wrong, {made.spilled} slabs moved on")  # fmt: skip
    made.close()


def attached(lm) -> object:
    """What is attached to the worker of an engine in this process."""
    return lm.engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.patchclamp


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
    from patchclamp.runtime import graphs

    recorded, patience = attached(lm).runtime.step.recorded, graphs.PATIENCE
    programs = [
        [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[2])],
        [pc.Zero(pc.mlp_out[1]), pc.Add(torch.randn(lm.model.d_model), at=pc.final_norm)],
    ]
    answers, cuts = {}, {}
    for wait in (1 << 40, 1):
        graphs.PATIENCE, before = wait, recorded.cut
        try:
            runs = [lm.run(PROMPTS, edits=edits, capture=[pc.resid_post[3]], max_tokens=40, sampling={"ignore_eos": True})
                    for edits in programs]  # fmt: skip
        finally:
            graphs.PATIENCE = patience
        answers[wait] = [(bits(run), run[pc.resid_post[3]].tolist()) for many in runs for run in many]
        cuts[wait] = recorded.cut - before
    note(mode, "graphs cut down to the taps in use: bit for bit the whole ones", len(set(map(str, answers.values()))) == 1
         and cuts[1 << 40] == 0 and cuts[1] > 0, f"copies made: {list(cuts.values())}")  # fmt: skip


def crowded(mode: str, model: str) -> None:
    """Chunked prefill, preemption and prefix caching together, compiled and with graphs."""
    import torch

    import patchclamp as pc

    options = {**BASE, "dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 64,
               "max_num_seqs": 16, "num_gpu_blocks_override": 40, "max_model_len": 512,
               "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}  # fmt: skip
    prompts = [[(11 * i * i + 5 * i + n) % 30000 + 100 for i in range(n)] for n in (200, 1, 90, 150, 33, 16, 17, 120)]
    with pc.LM(model, engine="vllm", prove=False, **options) as lm:
        width, at, ignore = lm.model.d_model, pc.resid_post, {"ignore_eos": True}
        every = [pc.Capture(at), pc.Capture(pc.mlp_out[1] @ pc.generated, dtype="bfloat16")]
        edits = [[pc.Add(torch.randn(width), at=at[i % 3], tokens=pc.generated if i % 2 else pc.every)] if i % 3
                 else [] for i in range(len(prompts))]  # fmt: skip
        before = lm.engine.status()["preemptions"]
        runs = lm.run(prompts, edits=edits, capture=every, max_tokens=60, sampling=ignore)
        thrown = lm.engine.status()["preemptions"] - before
        note(mode, "requests were preempted", thrown > 0, str(thrown))
        complete = all(run.positions(at[i]) == list(range(len(p) + 59)) and run[at[i]].isfinite().all()
                       for run, p in zip(runs, prompts, strict=True) for i in range(lm.model.layers))  # fmt: skip
        note(mode, "captures are complete over chunks and preemption", complete, "")
        gaps = []
        for i, (run, p) in enumerate(zip(runs, prompts, strict=True)):
            tokens = pc.every[len(p) :] if i % 2 else pc.every
            again = [pc.Add(edit.value, at=edit.at, tokens=tokens) for edit in edits[i]]
            fed = lm.run(p + run.token_ids[:-1], edits=again, capture=every[:1], max_tokens=1)
            gaps += [apart(run[at[layer]], fed[at[layer]]) for layer in range(lm.model.layers)]
        note(mode, "and agree with one prefill of the same tokens", all(gap < 0.05 for gap in gaps), f"{max(gaps):.2g}")
        long, noop = prompts[0], [pc.Add([0.0] * width, at=at[0])]
        plain = lm.run(long, max_tokens=2, sampling=ignore)
        hard = [pc.Add(torch.randn(width), at=at[0], scale=50.0)]
        hit = lm.run(long, max_tokens=2, sampling=ignore)
        first = lm.run(long, edits=hard, max_tokens=2, sampling=ignore)
        second = lm.run(long, edits=hard, max_tokens=2, sampling=ignore)
        back = lm.run(long, max_tokens=2, sampling=ignore)
        caught = [lm.run(long, edits=e, capture=[at[2]], max_tokens=2, sampling=ignore) for e in (hard, noop, [])]
        note(mode, "3 cached blocks: a plain prompt's serve plain runs", hit.cached_tokens > 0 and back.cached_tokens > 0,
             f"{hit.cached_tokens} and, after edited runs, {back.cached_tokens} tokens")  # fmt: skip
        note(mode, "3 an edited prompt's serve its own kind alone", first.cached_tokens == 0 < second.cached_tokens,
             f"{first.cached_tokens}, then {second.cached_tokens}")  # fmt: skip
        plainly = max(abs(a - b) for a, b in zip(back.logprobs, plain.logprobs, strict=True))
        moved = max(abs(a - b) for a, b in zip(second.logprobs, plain.logprobs, strict=True))
        twice = max(abs(a - b) for a, b in zip(second.logprobs, first.logprobs, strict=True))
        note(mode, "3 and nobody reads the other's", 4 * max(plainly, twice, 1e-3) < moved,
             f"plain {plainly:.2g}, edited {twice:.2g} apart; edited from plain {moved:.2g}")  # fmt: skip
        gaps = [apart(run[at[2]][: len(long)], runs[0][at[2]][: len(long)]) for run in caught[1:]]
        rows = all(len(run.positions(at[2])) == len(long) + 1 for run in caught)
        note(mode, "3 captures of a cached prompt are those of an uncached one", rows and max(gaps) < 0.05, str(gaps))


def apart(a, b) -> float:
    """The largest difference, against the largest number; not a number where either has one."""
    return ((a - b).abs().max() / b.abs().max()).item()


def like_transformers(model: str) -> None:
    """Captured residual streams and logits against Hugging Face's own hidden states, bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    import patchclamp as pc

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda")
    with torch.inference_mode():
        theirs = net(torch.tensor([PROMPTS[2]], device="cuda"), output_hidden_states=True)
    del net
    states = [state[0].float().cpu() for state in theirs.hidden_states]
    with pc.LM(model, engine="vllm", prove=False, **BASE, dtype="bfloat16", enforce_eager=True) as lm:
        run = lm.run(PROMPTS[2], capture=[pc.resid_pre, pc.final_norm, pc.logits], max_tokens=1)
        gaps = [apart(run[pc.resid_pre[i]], states[i]) for i in range(lm.model.layers)]
        gaps += [apart(run[pc.final_norm], states[-1]), apart(run[pc.logits][-1], theirs.logits[0, -1].float().cpu())]
    told = ", ".join(f"{gap:.2g}" for gap in gaps)
    note("transformers", "4 captures are Hugging Face's hidden states", all(gap < 0.05 for gap in gaps), told)


def bounded(model: str) -> None:
    """Fewer active graphs, and none for want of memory: steps without one run eagerly, padded alike."""
    import torch

    import patchclamp as pc
    from patchclamp.runtime.graphs import Recorded

    options = {**BASE, "dtype": "bfloat16", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    answers, stock_tapped = {}, Recorded.tapped

    def no_room(self, graph):
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    for name, ours, tapped in (
        ("all", {}, stock_tapped), ("one size", {"active_sizes": [1]}, stock_tapped), ("no room", {}, no_room),
    ):  # fmt: skip
        Recorded.tapped = tapped
        try:
            with pc.LM(model, engine="vllm", prove=False, **options, **ours) as lm:
                torch.manual_seed(0)
                edit = [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[1])]
                runs = lm.run(PROMPTS, edits=edit, max_tokens=TOKENS, sampling={"ignore_eos": True})
                alone = lm.run(PROMPTS[1], edits=edit, max_tokens=TOKENS, sampling={"ignore_eos": True})
                answers[name] = [bits(run) for run in runs], bits(alone)
                status = lm.engine.status()
            told = f"{status['active_graphs']} active sizes; {status['active_graphs_problem']}"
            right = {"all": status["active_graphs"] > 1, "one size": status["active_graphs"] == 1,
                     "no room": status["active_graphs"] == 0 and "no room" in status["active_graphs_problem"]}  # fmt: skip
            note("bounded", f"active graphs: {name}", right[name], told)
        except Exception as error:
            note("bounded", f"active graphs: {name}", False, f"{type(error).__name__}: {error}"[:300])
        finally:
            Recorded.tapped = stock_tapped
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()  # what this process still holds is not to be had
    full = int(free / total * 1000 - 3) / 1000
    try:
        with pc.LM(model, engine="vllm", prove=False, **{**options, "gpu_memory_utilization": full}) as lm:
            run, status = lm.run(PROMPTS[1], capture=[pc.resid_post], max_tokens=64), lm.engine.status()
            free = torch.cuda.mem_get_info()[0] >> 20
        told = f"{free} MiB free, {status['active_graphs']} active sizes {status['active_graphs_problem']}"
        note("bounded", "a GPU filled to its last 0.4 % starts and serves", run.error is None, told)
    except Exception as error:
        note(
            "bounded",
            "a GPU filled to its last 0.4 % starts and serves",
            False,
            f"{type(error).__name__}: {error}"[:300],
        )
    for name in ("one size", "no room"):
        same = name in answers and answers[name] == answers.get("all")
        note("bounded", f"  {name}: the same answers as with all, bit for bit", same, "")


def sleeping(mode: str, model: str) -> None:
    """Sleep at level 1: the memory of weights and cache is given back, and after waking every bit is as before."""
    import torch

    import patchclamp as pc

    options = {**BASE, "dtype": "bfloat16", "enable_sleep_mode": True}
    with pc.LM(model, engine="vllm", prove=False, **options) as lm:
        torch.manual_seed(0)
        program = {"edits": [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[1])], "capture": [pc.resid_post]}
        before = lm.run(PROMPTS[1], max_tokens=TOKENS, **program)
        rows = before[pc.resid_post[0]].clone()
        free = torch.cuda.mem_get_info()[0]
        lm.sleep()
        given = (torch.cuda.mem_get_info()[0] - free) >> 20
        note(mode, "level 1 gives memory back", given > 1000, f"{given} MiB")
        try:
            lm.run(PROMPTS[1], max_tokens=1)
            told = "it ran"
        except pc.EngineError as error:
            told = str(error)
        note(mode, "a sleeping engine says so", "lm.wake()" in told, told)
        kept = before[pc.resid_post[3]].isfinite().all()  # fetched while it sleeps
        lm.wake()
        after = lm.run(PROMPTS[1], max_tokens=TOKENS, **program)
        same = bits(after) == bits(before) and torch.equal(after[pc.resid_post[0]], rows) and bool(kept)
        note(mode, "after waking, edits and captures are as before, bit for bit", same, "")
        patched = lm.run(PROMPTS[1], max_tokens=TOKENS, edits=[pc.Replace(pc.From(before), at=pc.resid_post[3])])
        note(mode, "and a run of before serves as a source", patched.error is None, str(patched.error or ""))


def watched(mode: str, model: str) -> None:
    """Addresses checked at every replay: an engine runs as ever, and each kind of tensor that is made anew is named."""
    import torch

    import patchclamp as pc

    options = {**BASE, "dtype": "bfloat16", "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]}}
    with surroundings({"PATCHCLAMP_CHECK_ADDRESSES": "1"}), pc.LM(model, engine="vllm", prove=False, **options) as lm:
        edits = [pc.Add([0.5] * lm.model.d_model, at=pc.resid_post[1])]
        ignore = {"ignore_eos": True}
        plain, edited = lm.run(PROMPTS[:2], max_tokens=TOKENS, sampling=ignore, edits=[[], edits])
        looked = lm.engine.status()["replays_checked"]
        lm.run(PROMPTS[1], max_tokens=TOKENS, sampling=ignore)
        idle = lm.engine.status()["replays_checked"] - looked
        fine = plain.error is None and edited.error is None and looked > 0 and idle > 0
        note(mode, "all is well where nothing moved, idle and active", fine, f"{looked} and {idle} replays")
        ours, found = attached(lm), []
        watch, runner = ours._graphs.watch, attached_runner(lm)
        compare = watch._compare

        def gently(*args):
            try:
                compare(*args)
            except pc.AddressMoved as error:
                found.append(str(error))

        watch._compare = gently
        buffers, tables = runner.input_buffers, runner.block_tables
        for kind, owner, name, path in (
            ("an argument by place", buffers, "positions", "args["),
            ("an argument by name", buffers, "positions", "kwargs['positions']"),
            ("attention metadata", buffers, "seq_lens", "attn_metadata["),
            ("a block table", tables.input_block_tables, 0, "block_tables[0]"),
            ("a buffer of ours", ours.runtime.step, "kept", "patchclamp['kept']"),
        ):
            take, put = (list.__getitem__, list.__setitem__) if isinstance(owner, list) else (getattr, setattr)
            before = take(owner, name)
            found.clear()
            put(owner, name, before.clone())
            try:
                lm.run(PROMPTS[1], max_tokens=4, sampling=ignore, edits=edits)
            finally:
                put(owner, name, before)
            named = [error for error in found if path in error.split("filled.")[1]]
            note(
                mode,
                f"{kind} that is made anew is named",
                bool(named),
                (named or found or ["nothing was said"])[0][:200],
            )
        found.clear()
        lm.run(PROMPTS[1], max_tokens=4, sampling=ignore, edits=edits)
        note(mode, "and put back, all is well again", not found, str(found[:1]))
        watch._compare, ours.runtime.step.kept = compare, ours.runtime.step.kept.clone()
        torch.cuda.synchronize()
        try:
            told = str(lm.run(PROMPTS[1], max_tokens=4, sampling=ignore, edits=edits).error)
        except pc.PatchclampError as error:
            told = str(error)
        note(mode, "unprevented, it is the run's error", "changed: patchclamp['kept']" in told, told[:200])


def fresh(who: str, mode: str) -> dict[str, str]:
    """An environment in which everything is compiled anew, and in the one way that both sides can be."""
    place = f"{COMPILED}/{who}_{mode}".replace(" ", "_")
    return {
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CACHE_ROOT": f"{place}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor",
    }


def attached_runner(lm) -> object:
    """The model runner of an engine in this process."""
    return lm.engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def setting(mode: str) -> tuple[dict, dict[str, str]]:
    """Engine options and environment of a mode such as "v1 graphs" or "tp2 eager"."""
    options: dict = {**BASE, "dtype": "bfloat16", "enforce_eager": mode.endswith("eager")}
    if "tp2" in mode:
        options["tensor_parallel_size"] = 2
    if "pp2" in mode:
        options["pipeline_parallel_size"] = 2
    return options, {"VLLM_USE_V2_MODEL_RUNNER": "0"} if "v1" in mode else {}


@contextlib.contextmanager
def surroundings(environ: dict[str, str]):
    """Engines started within see these variables too: vLLM remembers its own from the first engine on."""
    from vllm import envs

    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    envs.disable_envs_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        envs.disable_envs_cache()


def bits(run) -> tuple:
    return run.token_ids, [x.hex() for x in run.logprobs]


def checks(mode: str, lm, expected: list | None) -> None:
    """The guarantees on one engine; `expected` is what stock vLLM answers."""
    import torch

    import patchclamp as pc

    greedy = {
        "max_tokens": TOKENS,
        "sampling": {"ignore_eos": True},
    }
    plain = lm.run(PROMPTS, **greedy)
    if expected is not None:
        mine = [[r.token_ids, [x.hex() for x in r.logprobs]] for r in plain]
        apart = [abs(float.fromhex(a) - b) for (_, old), r in zip(expected, plain, strict=True)
                 for a, b in zip(old, r.logprobs, strict=True)]  # fmt: skip
        tokens = sum(a == r.token_ids for (a, _), r in zip(expected, plain, strict=True))
        told = f"logprobs up to {max(apart):g} apart, {tokens}/{len(PROMPTS)} texts equal"
        note(mode, "1 off is stock, bit for bit", mine == expected, told)
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
    big = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[0], scale=s) for s in (3.0, 2.0)]
    hurt = lm.run([PROMPTS[1]] * 3, edits=[[], [big[1]], [big[0]]], **greedy)
    told = all("resid_pre[1] make numbers that are not finite" in str(r.error) for r in hurt[1:])
    note(
        mode,
        "an edit that is not finite fails its run and no other",
        told and hurt[0].error is None,
        str(hurt[1].error),
    )
    again = lm.run([PROMPTS[1]] * 2, edits=[noop, []], **greedy)
    note(mode, "  and the seat's next program is not blamed", all(r.error is None for r in again), "")
    long = lm.run(PROMPTS[1], max_tokens=40, sampling={"ignore_eos": True}, capture=[pc.resid_post])
    rows = [long[pc.resid_post[i]] for i in range(lm.model.layers)]
    fed = lm.run(PROMPTS[1] + long.token_ids[:-1], max_tokens=1, capture=[pc.resid_post])
    apart = max((a - fed[pc.resid_post[i]]).abs().max().item() / a.abs().max().item() for i, a in enumerate(rows))
    note(mode, "captures of 40 steps agree with one prefill of the same tokens", apart < 0.05, f"{apart:.2g}")
    copied = lm.engine.status()["steps_planned"]
    lm.run(PROMPTS[1], max_tokens=100, sampling={"ignore_eos": True}, edits=noop, capture=[at])
    copied = lm.engine.status()["steps_planned"] - copied
    note(mode, "100 tokens of a steady request are planned at most 3 times", copied <= 3, str(copied))
    if lm.engine.status()["workers"] == 1:  # in this process
        if mode.endswith("graphs"):
            cut_down(mode, lm)
        unsynchronised(mode, lm)
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
    parser.add_argument("--modes", default="eager,graphs,v1 eager,v1 graphs",
                        help="each eager or graphs, after v1 (the V1 runner), tp2 or pp2 (two GPUs)")  # fmt: skip
    parser.add_argument("--parts", default="kernel,modes,transformers,crowded,bounded,sleep,addresses")
    parser.add_argument("--without-stock", action="store_true", help="leave out the comparison with stock vLLM")
    args = parser.parse_args()
    from tests.gpu.models import with_weights

    # Inductor times the kernels it could use, so that even stock vLLM compiled twice need not agree with itself.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    shutil.rmtree(COMPILED, ignore_errors=True)
    global FILE
    args.out.mkdir(parents=True, exist_ok=True)
    FILE, parts = args.out / f"gpu_check-{datetime.date.today().isoformat()}.json", args.parts.split(",")
    if "kernel" in parts:
        kernel()
        drain()
    began = time.time()
    model = with_weights(Path("/tmp/model-8b-4"), "8b", 4)
    print(f"model made in {time.time() - began:.0f} s", flush=True)
    import patchclamp as pc

    for mode in args.modes.split(",") if "modes" in parts else ():
        options, environ = setting(mode)
        try:
            expected = None
            if not args.without_stock:
                expected = stock(model, options, **environ, **fresh("stock", mode))
                if mode == "graphs":  # as it comes it is compiled in another way, and need not be alike
                    told = "equal" if stock(model, options, **environ) == expected else "different"
                    note("stock", "with ahead-of-time compilation, and without", None, told)
            began = time.time()
            with (
                surroundings({**environ, **fresh("ours", mode)}),
                pc.LM(model, engine="vllm", prove=False, **options) as lm,
            ):
                runner = lm.engine.status()["runner"]
                right = runner == ("v1" if "v1" in mode else "v2")
                note(mode, "starts", right, f"{time.time() - began:.0f} s, runner {runner}")
                checks(mode, lm, expected)
        except Exception as error:
            traceback.print_exc()
            note(mode, "ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    if "transformers" in parts:
        try:
            like_transformers(model)
        except Exception as error:
            note("transformers", "ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    for name, part in (("crowded", crowded), ("crowded, Qwen3", crowded), ("bounded", lambda _, at: bounded(at)),
                       ("sleep", sleeping), ("addresses", watched)):  # fmt: skip
        if name.split(",")[0] not in parts:
            continue
        try:
            part(name, with_weights(Path("/tmp/model-0.6b-4"), "0.6b", 4) if "Qwen3" in name else model)
        except Exception as error:
            traceback.print_exc()
            note(name, "ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    sys.exit(1 if any(result["holds"] is False for result in RESULTS) else 0)


if __name__ == "__main__":
    main()
