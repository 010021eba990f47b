"""What lies beside the guarantees: the kernel, the drain, little memory, sleep, addresses, uniform numerics."""

from __future__ import annotations

import json

from tests.gpu.board import note
from tests.gpu.engines import BASE, PROMPTS, TOKENS, apart, attached, attached_runner, bits, setting, surroundings

INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}  # the mode may turn these graphs on


def kernel(mode: str) -> None:
    """Triton against the torch kernel on random tables, rows, strides and dtypes; the device's tables against the host's."""
    import torch

    from tests.reference import tables, triton

    try:
        found = triton.check("cuda", 60)
        note(mode, "Triton equals the reference, bit for bit", min(found.values()) > 0, json.dumps(found))
    except AssertionError as error:
        note(mode, "Triton equals the reference, bit for bit", False, str(error)[:200])
    copies, different = tables.check("cuda", 200, torch.cuda.synchronize)
    same = copies == 200 and not different
    note(mode, "device tables equal the host's after 200 changes, one copy each", same, str(different))
    busy = lambda: torch.cuda._sleep(20_000_000)  # noqa: E731  some 10 ms: what comes next is prepared before it is read
    _, different = tables.check("cuda", 200, torch.cuda.synchronize, every=20, before=busy)
    note(mode, "and where the device is late", not different, str(different))


def drain(mode: str) -> None:
    """Rows of random sizes through a small ring and little pinned memory: nothing lost, reordered or overwritten."""
    import torch

    from patchclamp.runtime.cuda_step import Drain

    drain, allocated, taken = Drain(torch.device("cuda"), 1 << 24, 1 << 27), [], 0
    random, generator = __import__("random").Random(), torch.Generator("cuda")
    for _ in range(600):
        size = random.choice([16, 1000, 1 << 16, 1 << 20, 5 << 20, 20 << 20])
        memory, begin, block, offset = drain.allocate(size)
        data = memory[begin : begin + size]
        data.copy_(torch.randint(0, 256, (len(data),), dtype=torch.uint8, device="cuda", generator=generator))
        allocated.append((block, offset, data.sum(dtype=torch.int64), data[-16:].clone(), len(data)))
        taken += len(data)
        if random.random() < 0.3:
            allocated.pop(random.randrange(len(allocated)))
        if random.random() < 0.02:
            drain.flush()
    drain.flush()
    wrong = 0
    for block, offset, total, tail, size in allocated:
        host = block.data[offset : offset + size]
        wrong += int(host.sum(dtype=torch.int64)) != int(total) or host[-16:].tolist() != tail.tolist()
    note(mode, "rows through a ring of 16 MiB and 128 of pinned memory", wrong == 0 and drain.spilled > 0,
         f"{taken >> 20} MiB, {wrong} of {len(allocated)} wrong, {drain.spilled} slabs moved on")  # fmt: skip
    drain.close()


def lent(mode: str, model: str) -> None:
    """Captures of an engine core in a process of its own are views of its pinned memory: the same bytes as copies, and
    nobody writes there while one is held, though more is captured than pinned memory holds."""
    import gc

    import torch

    import patchclamp as pc

    options = {**BASE, "dtype": "bfloat16", "enforce_eager": True, "multiprocess_mode": True, "pinned_bytes": 1 << 27}
    draw, held, wrong = torch.Generator().manual_seed(5), [], 0
    with pc.LM(model, engine="vllm", prove=False, **options) as lm:
        for turn in range(6):
            prompts = torch.randint(100, 30_000, (6, 500), generator=draw).tolist()
            runs = lm.run(prompts, max_tokens=1, capture=[pc.Capture(pc.resid_post, dtype="bfloat16")])
            views = [tensor for tensors in lm.fetch(runs, copy=False) for tensor in tensors.values()]
            for run in runs:
                run._fetched.clear()
            lm.engine._receiver._unseen = 9  # as where this process cannot map what the core has
            copies = [tensor for tensors in lm.fetch(runs) for tensor in tensors.values()]
            lm.engine._receiver._unseen = 0
            wrong += sum(not torch.equal(view, copy) for view, copy in zip(views, copies, strict=True))
            held.append((views[turn::2], copies[turn::2]))
            note(
                mode, f"turn {turn} comes as views", lm.engine.has_views, f"{len(views)} tensors"
            ) if turn < 1 else None
            del runs, views, copies
        wrong += sum(not torch.equal(*pair) for turn in held for pair in zip(*turn, strict=True))
        note(mode, "what was lent equals copies, and stays so", wrong == 0, f"{wrong} tensors differ")
        loans = lm.engine.status()["loans"]
        held.clear()
        gc.collect()
        lm.run([5, 6, 7], max_tokens=1, capture=[pc.resid_post]).close()
        left = lm.engine.status()
        note(
            mode, "loans are returned", loans > 0 and left["loans"] == 0, f"{loans} while views were held, then {left}"
        )


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
        runs = lm.run(prompts, edits=edits, capture=every, max_tokens=60, sampling=ignore, logprobs=True)
        thrown = lm.engine.status()["preemptions"] - before
        note(mode, "requests were preempted", thrown > 0, str(thrown))
        complete = all(run.positions(at[i]) == list(range(len(p) + 59)) and run[at[i]].isfinite().all()
                       for run, p in zip(runs, prompts, strict=True) for i in range(lm.model.layers))  # fmt: skip
        note(mode, "captures are complete over chunks and preemption", complete, "")
        gaps = []
        for i, (run, p) in enumerate(zip(runs, prompts, strict=True)):
            tokens = pc.every[len(p) :] if i % 2 else pc.every
            again = [pc.Add(edit.value, at=edit.at, tokens=tokens) for edit in edits[i]]
            fed = lm.run(p + run.token_ids[:-1], edits=again, capture=every[:1], max_tokens=1, logprobs=True)
            gaps += [apart(run[at[layer]], fed[at[layer]]) for layer in range(lm.model.layers)]
        note(mode, "and agree with one prefill of the same tokens", all(gap < 0.05 for gap in gaps), f"{max(gaps):.2g}")
        long, noop = prompts[0], [pc.Add([0.0] * width, at=at[0])]
        plain = lm.run(long, max_tokens=2, sampling=ignore, logprobs=True)
        hard = [pc.Add(torch.randn(width), at=at[0], scale=50.0)]
        hit = lm.run(long, max_tokens=2, sampling=ignore, logprobs=True)
        first = lm.run(long, edits=hard, max_tokens=2, sampling=ignore, logprobs=True)
        second = lm.run(long, edits=hard, max_tokens=2, sampling=ignore, logprobs=True)
        back = lm.run(long, max_tokens=2, sampling=ignore, logprobs=True)
        caught = [
            lm.run(long, edits=e, capture=[at[2]], max_tokens=2, sampling=ignore, logprobs=True)
            for e in (hard, noop, [])
        ]
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


def like_transformers(mode: str, model: str) -> None:
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
    note(mode, "4 captures are Hugging Face's hidden states", all(gap < 0.05 for gap in gaps), told)


def bounded(mode: str, model: str) -> None:
    """Fewer active graphs, and none for want of memory: steps without one run eagerly, padded alike."""
    import torch

    import patchclamp as pc
    from patchclamp.runtime.cuda_graphs import Recorded

    options = {**BASE, "dtype": "bfloat16", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    del options["kv_cache_memory_bytes"]
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
                runs = lm.run(PROMPTS, edits=edit, max_tokens=TOKENS, sampling={"ignore_eos": True}, logprobs=True)
                alone = lm.run(PROMPTS[1], edits=edit, max_tokens=TOKENS, sampling={"ignore_eos": True}, logprobs=True)
                answers[name] = [bits(run) for run in runs], bits(alone)
                status = lm.engine.status()
            told = f"{status['active_graphs']} active sizes; {status['active_graphs_problem']}"
            right = {"all": status["active_graphs"] > 1, "one size": status["active_graphs"] == 1,
                     "no room": status["active_graphs"] == 0 and "GPU memory" in status["active_graphs_problem"]}  # fmt: skip
            note(mode, f"active graphs: {name}", right[name], told)
        except Exception as error:
            note(mode, f"active graphs: {name}", False, f"{type(error).__name__}: {error}"[:300])
        finally:
            Recorded.tapped = stock_tapped
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()  # what this process still holds is not to be had
    full = int(free / total * 1000 - 3) / 1000
    try:
        with pc.LM(model, engine="vllm", prove=False, **{**options, "gpu_memory_utilization": full}) as lm:
            run, status = lm.run(PROMPTS[1], capture=[pc.resid_post], max_tokens=64, logprobs=True), lm.engine.status()
            free = torch.cuda.mem_get_info()[0] >> 20
        told = f"{free} MiB free, {status['active_graphs']} active sizes {status['active_graphs_problem']}"
        note(mode, "a GPU filled to its last 0.4 % starts and serves", run.error is None, told)
    except Exception as error:
        note(
            mode,
            "a GPU filled to its last 0.4 % starts and serves",
            False,
            f"{type(error).__name__}: {error}"[:300],
        )
    for name in ("one size", "no room"):
        same = name in answers and answers[name] == answers.get("all")
        note(mode, f"  {name}: the same answers as with all, bit for bit", same, "")


def sleeping(mode: str, model: str) -> None:
    """Sleep at level 1: the memory of weights and cache is given back, and after waking every bit is as before."""
    import torch

    import patchclamp as pc

    options = {**BASE, "dtype": "bfloat16", "enable_sleep_mode": True}
    with pc.LM(model, engine="vllm", prove=False, **options) as lm:
        torch.manual_seed(0)
        program = {"edits": [pc.Add(torch.randn(lm.model.d_model), at=pc.resid_post[1])], "capture": [pc.resid_post]}
        before = lm.run(PROMPTS[1], max_tokens=TOKENS, **program, logprobs=True)
        rows = before[pc.resid_post[0]].clone()
        free = torch.cuda.mem_get_info()[0]
        lm.sleep()
        given = (torch.cuda.mem_get_info()[0] - free) >> 20
        note(mode, "level 1 gives memory back", given > 1000, f"{given} MiB")
        try:
            lm.run(PROMPTS[1], max_tokens=1, logprobs=True)
            told = "it ran"
        except pc.EngineError as error:
            told = str(error)
        note(mode, "a sleeping engine says so", "lm.wake()" in told, told)
        kept = before[pc.resid_post[3]].isfinite().all()  # fetched while it sleeps
        lm.wake()
        after = lm.run(PROMPTS[1], max_tokens=TOKENS, **program, logprobs=True)
        same = bits(after) == bits(before) and torch.equal(after[pc.resid_post[0]], rows) and bool(kept)
        note(mode, "after waking, edits and captures are as before, bit for bit", same, "")
        patched = lm.run(
            PROMPTS[1], max_tokens=TOKENS, edits=[pc.Replace(pc.From(before), at=pc.resid_post[3])], logprobs=True
        )
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
        watch, runner, drain = ours._graphs.watch, attached_runner(lm), ours.runtime.step.drain
        compare = watch._compare

        def gently(*args):
            try:
                compare(*args)
            except pc.AddressMoved as error:
                found.append(str(error))

        watch._compare = gently
        if lm.engine.status()["runner"] == "v2":
            buffers, table = runner.input_buffers, (runner.block_tables.input_block_tables, 0, "block_tables[0]")
        else:
            buffers, table = runner, (runner.input_batch.block_table[0].block_table, "gpu", ".block_table")
        for kind, owner, name, path in (
            ("an argument by place", buffers, "positions", "args["),
            ("an argument by name", buffers, "positions", "kwargs['positions']"),
            ("attention metadata", buffers, "seq_lens", "attn_metadata["),
            ("a block table", *table),
            ("a buffer of ours", drain, "ring", "patchclamp['ring']"),
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
        watch._compare, drain.ring = compare, drain.ring.clone()
        torch.cuda.synchronize()
        try:
            told = str(lm.run(PROMPTS[1], max_tokens=4, sampling=ignore, edits=edits).error)
        except pc.PatchclampError as error:
            told = str(error)
        note(mode, "unprevented, it is the run's error", "changed: patchclamp['ring']" in told, told[:200])


def one_after_the_other(mode: str, model: str) -> None:
    """An engine with a V2 runner after one with a V1 runner, which leaves vLLM unwilling to record graphs."""
    import patchclamp as pc

    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    options = {**BASE, "dtype": "bfloat16", "compilation_config": compilation}
    for runner, environ in (("v1", {"VLLM_USE_V2_MODEL_RUNNER": "0"}), ("v2", {})):
        with surroundings(environ), pc.LM(model, engine="vllm", prove=False, **options) as lm:
            run = lm.run(PROMPTS[1], max_tokens=TOKENS, capture=[pc.resid_post], sampling={"ignore_eos": True})
            status = lm.engine.status()
        held = run.error is None and status["runner"] == runner and status["active_graphs"] == 3
        note(mode, f"{runner}, in a process with the other", held, f"{status['active_graphs']} active sizes")


def uniform(mode: str, model: str) -> None:
    """Uniform numerics, compiled in bf16, with graphs: neither a capture nor a self-patch changes a bit.

    Runs of a prompt alone, and of all prompts together, have steps of the same shapes whatever their programs are. They
    are long enough for graphs to be cut down.
    """
    import patchclamp as pc

    asked = {"max_tokens": 40, "sampling": {"ignore_eos": True}, "logprobs": True}
    with pc.LM(model, engine="vllm", prove=False, numerics="uniform", **BASE, dtype="bfloat16") as lm:
        status = lm.engine.status()
        right = status["runner"] == ("v1" if mode.startswith("v1") else "v2") and status["active_graphs"] > 0
        note(mode, "starts", right, f"runner {status['runner']}, {status['active_graphs']} active sizes")
        sites = [pc.Site(name) for name in lm.sites.names if name not in ("embed", "logits")]
        for prompts, kind in ((PROMPTS[:1], "a short prompt"), (PROMPTS[2:3], "a longer one"), (PROMPTS, "a batch")):
            plain = [bits(run) for run in lm.run(prompts, **asked)]
            read = lm.run(prompts, capture=[*sites, pc.logits], **asked)
            note(mode, f"{kind}: a capture of everything changes no bit", [bits(run) for run in read] == plain, "")
            changed = []
            for site in sites:
                patches = [[pc.Replace(pc.From(run, site), at=site)] for run in read]
                if [bits(run) for run in lm.run(prompts, edits=patches, **asked)] != plain:
                    changed.append(site.name)
            note(mode, f"{kind}: self-patches, site by site, change no bit", not changed, ", ".join(changed))
            steered = lm.run(prompts, edits=[pc.Add([0.5] * lm.model.d_model, at=pc.resid_post[1])], **asked)
            differ = all(bits(run) != before for run, before in zip(steered, plain, strict=True))
            note(mode, f"{kind}: and an edit does", differ, "")
            after = [bits(run) for run in lm.run(prompts, **asked)]
            note(mode, f"{kind}: without a program again, bit for bit", after == plain, "")
        status = lm.engine.status()
        counts = f"{status['steps_with_taps']} steps with taps, {status['steps_without_taps']} without"
        held = status["steps_with_taps"] > 0 == status["steps_without_taps"]
        note(mode, "every step ran code with taps", held, counts)


def batches(mode: str, model: str) -> None:
    """Batch-invariant mode in bf16: prompts alone and in a batch of 32, with and without programs, have the same bits.
    What a call costs in this mode, beside an engine without it, which starts first: the mode changes PyTorch's kernels."""
    import statistics
    import time

    import numpy as np
    from vllm.model_executor.determinism import batch_invariant

    import patchclamp as pc

    asked, draw = {"max_tokens": 16, "sampling": {"ignore_eos": True}, "logprobs": True}, np.random.default_rng(11)
    prompts = [draw.integers(100, 30_000, int(length)).tolist() for length in draw.integers(5, 120, 32)]
    sites, some = [pc.attn_in[1], pc.z[2], pc.resid_post], range(0, 32, 4)
    seconds = dict[str, float]()

    def timed(lm: pc.LM) -> float:
        found = []
        for _ in range(6):
            begin = time.perf_counter()
            lm.run(prompts, **asked)
            found.append(time.perf_counter() - begin)
        return statistics.median(found[1:])

    options, _ = setting(mode)
    with pc.LM(model, engine="vllm", **options) as lm:
        seconds["ordinary"] = timed(lm)
    with surroundings(INVARIANT), pc.LM(model, engine="vllm", **options) as lm:
        seconds["invariant"] = timed(lm)
        cost = seconds["invariant"] / seconds["ordinary"]
        is_on = batch_invariant._batch_invariant_MODE
        note(mode, "is the mode that was asked for", is_on, f"{cost:.2f} of an ordinary call, of 32 prompts")
        alone = [bits(lm.run(prompts[i], **asked)) for i in some]
        together = lm.run(prompts, **asked)
        note(mode, "2 prompts alone and in a batch, bit for bit", [bits(together[i]) for i in some] == alone, "")
        edits = [[] if i in some else [pc.Add([0.5] * lm.model.d_model, pc.resid_post[1])] for i in range(32)]
        beside = lm.run(prompts, edits=edits, **asked)
        note(mode, "2 and beside edited requests", [bits(beside[i]) for i in some] == alone, "")
        moved = all(bits(a) != bits(b) for i, (a, b) in enumerate(zip(beside, together, strict=True)) if i not in some)
        note(mode, "2 which the edits change", moved, "")
        read = [lm.run(prompts[i], capture=sites, **asked) for i in some]
        in_batch = lm.run(prompts, capture=sites, **asked)
        note(mode, "4 captures change nothing, alone", [bits(run) for run in read] == alone, "")
        note(mode, "4 captures change nothing, in a batch", [bits(in_batch[i]) for i in some] == alone, "")
        differ = sum(int((run[site] != in_batch[i][site]).sum()) for i, run in zip(some, read, strict=True)
                     for site in (pc.attn_in[1], pc.z[2], *(pc.resid_post[n] for n in range(lm.model.layers))))  # fmt: skip
        note(
            mode,
            "4 captured rows are the same alone and in a batch, bit for bit",
            differ == 0,
            f"{differ} numbers differ",
        )
        patches = [
            [pc.Replace(pc.From(run, site), at=site) for site in (pc.attn_in[1], pc.resid_post[2])] for run in read
        ]
        patched = [bits(run) for run in lm.run([prompts[i] for i in some], edits=patches, **asked)]
        note(mode, "5 self-patches in a batch, of rows captured alone, change no bit", patched == alone, "")


def graded(mode: str, model: str) -> None:
    """Graded programs, in batches that begin at layers of compiled code, against the same programs as requests; of one
    prompt and of several. In batch-invariant mode, in bf16, bit for bit."""
    import numpy as np

    import patchclamp as pc

    options, _ = setting(mode)
    invariant = mode.endswith("invariant")
    names, draw = ("resid_pre", "q", "z", "attn_out", "neurons", "mlp_out", "resid_post"), np.random.default_rng(5)
    with pc.LM(model, engine="vllm", **options | {"dtype": "bfloat16" if invariant else "float32"}) as lm:
        prompts = [draw.integers(100, 30_000, 60).tolist() for _ in range(3)]
        seen = lm.run(prompts, max_tokens=1, capture=[pc.Site(name) for name in names])
        places = [(pc.Site(name)[layer], position) for layer in range(lm.model.layers) for name in names
                  for position in range(0, 60, 7)]  # fmt: skip
        lists = [[[pc.Replace(pc.From(source, at), at=at, tokens=[position]), pc.Noise(0.1, at=at, tokens=[position], seed=i)]
                  for i, (at, position) in enumerate(places)] for source in reversed(seen)]  # fmt: skip
        for programs in lists:  # a kernel removes their keys in batches, too
            programs += [[pc.Knockout(pc.prompt[layer : layer + 5], pc.pattern[layer], pc.prompt[position])]
                         for layer in range(lm.model.layers) for position in (40, 59)]  # fmt: skip
        found = lm.grade(prompts, lists, score=[7, 9], kl=True, top=3)
        note(mode, "graded in batches", {each.route for each in found} == {"bulk"}, found[0].route_reason)
        if "tp2" not in mode and not invariant:
            pieces = attached(lm)._bulk.model.pieces
            begin = pieces is not None and pieces.usable
            note(mode, "which begin at layers", begin, "" if pieces is None else f"{pieces.layers} cuts")
        far = moved = 0.0
        differ = 0
        for prompt, programs, grades in zip(prompts, lists, found, strict=True):
            runs = lm.run([prompt] * len(programs), edits=programs, score=[7, 9], max_tokens=1)
            expected = np.array([[run.scores[7], run.scores[9]] for run in runs])
            far = max(far, float(np.abs(grades.logprobs - expected).max()))
            differ += int((grades.logprobs != expected.astype(np.float32)).any(1).sum())
            moved = max(moved, float(np.abs(grades.logprobs - grades.baseline).max()))
        most = 0.0 if invariant else 1e-4
        note(mode, "each equals the same program as a request", far <= most < moved,
             f"{far:.1e}, {differ} of {3 * len(places)} cells differ in a bit, moved by {moved:.2f}")  # fmt: skip
