"""One engine in a process of its own, stepped by hand: one of the two sides of a comparison.

The engine core is stepped as its own process's busy loop does, without the front end that would run beside it.  (In one
process, starting a second engine would clear the first one's graphs.)
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROMPT = 64
IN_STEP, BESIDE = ("before", "planned", "after"), ("_carry_out", "_free")  # the latter within "before"
AGAIN = "make_plan at once again"
WITHIN = ("make_plan", "load", AGAIN)  # of "planned", but for the last
QUIET = 4  # cores that measurements take turns on
OPTIONS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2304,
    "max_num_seqs": 256, "gpu_memory_utilization": 0.1, "enable_prefix_caching": False, "disable_log_stats": True,
}  # fmt: skip


def cases(layers: int, width: int) -> dict[str, list[Any]]:
    """What the requests of a case carry, in turn; None is no program."""
    import torch

    import patchclamp as pc
    from patchclamp.language import Program

    def steer(at: Any) -> Program:
        return Program.of([pc.Add(0.01 * torch.randn(width), at=at)])

    four = (pc.resid_mid, pc.resid_post, pc.attn_out, pc.mlp_out)
    every, one = steer(pc.resid_post), steer(pc.resid_post[layers // 2])
    made = Program.of((), [pc.Capture(pc.resid_post, pc.generated, dtype="bfloat16")])
    whole = Program.of((), [pc.Capture(pc.resid_post, dtype="bfloat16")])
    return {
        "idle": [None],
        "steer every layer": [every],
        "steer every layer, all distinct": [steer(pc.resid_post) for _ in range(256)],
        "steer one layer": [one],
        "capture every layer": [made],
        "capture every layer, sustained": [made],
        "one in eight steered": [every] + [None] * 7,
        "one in eight captured": [made] + [None] * 7,
        "capture prompt, every layer": [whole],
        "steer every layer, requests change": [every],
        "capture every layer, requests change": [made],
        **{f"steer {n} layers": [steer(pc.resid_post[:n])] for n in (2, 8, 16) if n < layers},
        **{f"{n} of 64 steered": [every] * n + [None] * (64 - n) for n in (1, 16, 32)},
        "an op each, every layer": [Program.of([op]) for op in ops(pc.resid_post, width)],
        "an op each, one layer": [Program.of([op]) for op in ops(pc.resid_post[layers // 2], width)],
        "six ops each, every layer": [Program.of(ops(pc.resid_post, width)[:6])],
        "six ops each, one layer": [Program.of(ops(pc.resid_post[layers // 2], width)[:6])],
        "steer four sites a layer": [Program.of([pc.Add(0.01 * torch.randn(width), at=s) for s in four])],
    }  # fmt: skip


def ops(at: Any, width: int) -> list[Any]:
    """One of every op; the last two put the same numbers in every row: GEMMs of a random model get faster by that."""
    import torch

    import patchclamp as pc

    v = torch.randn(width)
    return [
        pc.Add(0.01 * v, at=at), pc.Scale(0.999, at=at), pc.Ablate(v, at=at), pc.Clamp(v, at=at, low=-1.0, high=1.0),
        pc.Replace(v, at=at, alpha=0.01, mask=torch.rand(width)), pc.Noise(0.01, at=at, relative=True, seed=1),
        pc.Zero(at=at), pc.Replace(0.1 * v, at=at),
    ]  # fmt: skip


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread runs on one core: on a shared machine they differ much, and a process that happens to sit on a slow
    one would be called slow."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def quiet_cores() -> list[int]:
    """The cores that others disturb least, by how long the same work takes on each but for the worst of ten times."""
    spent = {}
    for core in sorted(os.sched_getaffinity(0)):
        with on_core(core):
            times = []
            for _ in range(60):
                began = time.perf_counter()
                sum(range(20_000))
                times.append(time.perf_counter() - began)
            spent[core] = float(np.quantile(times, 0.9))
    return sorted(spent, key=lambda core: spent[core])[:QUIET]


class Side:
    """An engine of one kind: "stock", "stock, eager" or "patchclamp"."""

    def __init__(self, model: str, kind: str, kv_bytes: int, **options: Any) -> None:
        import msgspec
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        from patchclamp.engines.vllm.compat import configuration
        from patchclamp.engines.vllm.worker import site_map
        from patchclamp.runtime import Limits

        self.ours = kind == "patchclamp"
        settings = {"limits": msgspec.to_builtins(Limits(max_programs=512)), "numerics": "stock"}
        extra = {"patchclamp": settings} if self.ours else {}
        free = torch.cuda.mem_get_info()[0]
        began = time.perf_counter()
        arguments = {**OPTIONS, "kv_cache_memory_bytes": kv_bytes, "enforce_eager": "eager" in kind, **options}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with configuration.surroundings(separate=False) if self.ours else contextlib.nullcontext():
            config = EngineArgs(model=model, additional_config=extra, **arguments).create_engine_config(
                UsageContext.OPENAI_API_SERVER  # as servers have it: 8,192 tokens a step at most, on an H200
            )
            self.engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        if self.ours:
            self.rpc("started", False)
        self.start_s = round(time.perf_counter() - began, 1)
        self.memory_mib = (free - torch.cuda.mem_get_info()[0]) >> 20
        self.core = self.engine.engine_core.engine_core
        self.alone = config.parallel_config.world_size == 1  # the worker is in this process and can be looked into
        self.sites = site_map(config)
        self.cases = cases(self.sites.layers, self.sites.d_model)
        self._start_threads()
        self.running: list[str] = []
        self.vectors: list[str] = []
        self.count = 0

    def _start_threads(self) -> None:
        """Threads that begin within `on_core` would stay on that core for good."""
        from patchclamp.store import host_memory

        drain = getattr(self._runtime.step, "drain", None) if self.ours and self.alone else None
        pools = [host_memory._copiers]
        if drain is not None:
            pools += drain._workers, drain._pinned._makers, drain._pinned._touchers
        for pool in pools:
            list(pool.map(lambda _: time.sleep(0.02), range(pool._max_workers)))

    def facts(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        return {
            "start_s": self.start_s, "memory_mib": self.memory_mib, "layers": self.sites.layers,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }  # fmt: skip

    def rpc(self, verb: str, *args: Any) -> Any:
        result, error = self.engine.collective_rpc("patchclamp_rpc", args=(verb, *args))[0]
        assert error is None, error
        return result

    def add(self, case: str, number: int, prompt: int, most: int) -> None:
        """One request of a case."""
        import msgspec
        import safetensors.numpy
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from patchclamp.engines.base import Carried
        from patchclamp.engines.vllm.compat.clients import tell_core
        from patchclamp.plan import Prompt, bind
        from patchclamp.plan.room import bank_sizes

        self.count += 1
        run, ids = f"run{self.count}", np.random.default_rng(self.count).integers(100, 30000, prompt).tolist()
        program, given = self.cases[case][number % len(self.cases[case])], {}
        if program is not None and self.ours:
            values: dict[str, np.ndarray] = {}
            bound = bind(program, run, Prompt(ids, lambda: ("", [])), most, self.sites, None, None, values)
            if values:
                tell_core(self.engine, "hold", safetensors.numpy.save(values), list(values), [])
                self.vectors += values
            carried = Carried(bound, bank_sizes(bound, values, self.sites, lambda *_: 0))
            given["extra_args"] = {"patchclamp": msgspec.msgpack.encode(carried)}
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.FINAL_ONLY, **given)  # fmt: skip
        self.engine.add_request(run, {"prompt_token_ids": ids}, params)
        self.running.append(run)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            _, executed = self.core.step_fn()
            self.core.post_step(executed)

    def fill(self, batch: int, case: str, settle: int = 16) -> None:
        """Starts `batch` requests of 64 prompt tokens and steps until all of them decode, and some steps more."""
        for i in range(batch):
            self.add(case, i, PROMPT, 2000)
        self.step(batch * PROMPT // self.facts()["max_num_batched_tokens"] + 2 + settle)
        assert len(self.core.scheduler.running) == batch, f"{len(self.core.scheduler.running)} of {batch} run"

    def empty(self) -> None:
        self._forget(self.running, self.vectors)
        self.running, self.vectors = [], []
        self.step(3)

    def _forget(self, runs: list[str], vectors: list[str]) -> None:
        """Requests end, their captures and vectors go."""
        from patchclamp.engines.vllm.compat.clients import tell_core

        self.engine.abort_request(runs)
        if self.ours:
            tell_core(self.engine, "release", runs)
            tell_core(self.engine, "hold", b"", [], vectors)

    def block(self, steps: int, core: int, case: str = "") -> float:
        """Milliseconds a step, every request decoding; the engine's thread stays on one core of the machine's.

        With a `case`, every fourth step a request of it leaves and another comes, with a prompt to be computed.
        """
        assert not case or steps % 4 == 0, "blocks of changing requests are multiples of four steps"
        with on_core(core):
            self.step(3)
            self._wait()
            began = time.perf_counter()
            for _ in range(steps // 4 if case else 0):
                self.change(case)
                self.step(4)
            self.step(0 if case else steps)
            self._wait()
            found = 1e3 * (time.perf_counter() - began) / steps
        assert len(self.core.scheduler.running) == len(self.running), "a request stopped"
        return found

    def change(self, case: str) -> None:
        """The request that is here longest leaves and is forgotten; another of the case comes."""
        gone = self.running.pop(0)
        self._forget([gone], [])
        self.add(case, self.count, PROMPT, 2000)

    def context(self) -> int:
        """Tokens that the running requests have behind them."""
        return sum(request.num_computed_tokens for request in self.core.scheduler.running)

    def prefill(self, case: str, prompts: int, length: int, core: int) -> float:
        """Prompt tokens a second; captures are in the worker's host memory when it ends."""
        for i in range(prompts):
            self.add(case, i, length, 1)
        self._wait()
        with on_core(core):
            began = time.perf_counter()
            while self.core.scheduler.has_unfinished_requests():
                self.step()
            self._wait()
            found = prompts * length / (time.perf_counter() - began)
        self.empty()
        return found

    def _wait(self) -> None:
        """Returns when the GPU has done all it was given, and what was captured is in host memory."""
        import torch

        if not self.alone:  # workers answer calls in order, each after the steps before it
            self.engine.collective_rpc("synchronize_device")
            return
        torch.cuda.synchronize()
        if self.ours:
            self._runtime.step.flush()

    @property
    def _worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def _runtime(self) -> Any:
        return self._worker.patchclamp.runtime

    def kernels(self, steps: int = 10) -> dict[str, tuple[float, float]]:
        """Kernels of a step by name: how many, and microseconds in them. Rare ones (block tables) are left out; {} of
        workers elsewhere."""
        import torch

        if not self.alone:
            return {}
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step(steps)
            torch.cuda.synchronize()
        count, spent = collections.Counter(), collections.Counter()
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                count[event.name] += 1
                spent[event.name] += event.device_time
        assert sum(count.values()) > steps, "the profiler saw no kernels"
        return {name: (n / steps, round(spent[name] / steps, 1)) for name, n in count.items() if n >= steps}

    def replays(self, rounds: int = 30) -> dict[str, float]:
        """Microseconds that the GPU takes for the graph of a step like the last one, replayed back to back so that no
        host is waited for: as recorded idle, and as it runs with the programs at hand. {} where it had no graph."""
        import torch

        from patchclamp.runtime.cuda_graphs import PATIENCE

        if not self.alone:
            return {}
        torch.cuda.synchronize()
        recorded, tokens = self._worker.patchclamp._graphs, len(self.running)
        stores = {} if recorded is None else recorded._stores
        graphs = [
            [graph for desc, graph in stores[active][0].items() if desc.num_tokens == tokens]
            for active in (False, True) if active in stores
        ]  # fmt: skip
        if [len(found) for found in graphs] != [1, 1]:
            return {}
        (idle,), (active,) = graphs
        for _ in range(2 * PATIENCE):  # the taps that nobody needs are cut out of it
            active.replay()
        spent: tuple[list[float], list[float]] = [], []
        for i in range(rounds):
            for side in (0, 1) if i % 2 else (1, 0):
                replay = (idle, active)[side].replay
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                replay()
                begin.record()
                for _ in range(4):
                    replay()
                end.record()
                end.synchronize()
                spent[side].append(begin.elapsed_time(end) * 250)
        return {"idle_us": round(float(np.median(spent[0])), 1), "active_us": round(float(np.median(spent[1])), 1)}

    def copies(self, steps: int = 100) -> dict[str, int]:
        """Of steady steps: plans made and copies to the device."""
        if not self.alone:
            return {}
        before = self._runtime.steps_planned, self._runtime.step.tables.copies
        self.step(steps)
        after = self._runtime.steps_planned, self._runtime.step.tables.copies
        return {"steps": steps, "plans": after[0] - before[0], "copies": after[1] - before[1]}

    def planning(self, batch: int, case: str, changes: int = 40) -> dict[str, Any]:
        """Microseconds of our host work in a step in which one request left and another came, and in a steady one; of
        the former what each part took, and what of that it took to install one program and to free another."""
        import torch

        from patchclamp.runtime import runtime

        attached, spent, restored = self._worker.patchclamp, collections.Counter(), contextlib.ExitStack()

        def timed(owner: Any, name: str) -> None:
            inner = getattr(owner, name)

            def outer(*args: Any) -> Any:
                began = time.perf_counter()
                try:
                    return inner(*args)
                finally:
                    spent[name] += 1e6 * (time.perf_counter() - began)
                    if name == "make_plan":  # what it takes when code and tables are in the caches
                        began = time.perf_counter()
                        inner(*args)
                        spent[AGAIN] += (again := 1e6 * (time.perf_counter() - began))
                        spent["planned"] -= again

            setattr(owner, name, outer)
            restored.callback(setattr, owner, name, inner)

        for name in IN_STEP:
            timed(attached.hooks, name)
        for name in BESIDE:
            timed(attached, name)
        timed(runtime, "make_plan")
        timed(attached.runtime.step.tables, "load")
        changed, steady = [], []
        for i in range(changes):
            if i % 8 == 0:  # begins anew: what is captured must not pile up until the engine waits for memory
                self.empty()
                self.fill(batch, case)
            spent.clear()
            torch.cuda.synchronize()
            self.change(case)
            for found in (changed, None, None, steady):
                self.step()
                if found is not None:
                    found.append(dict(spent))
                spent.clear()
        self.empty()
        restored.close()

        def median(many: list[dict[str, float]], names: tuple[str, ...]) -> float:
            return round(float(np.median([sum(parts.get(name, 0.0) for name in names) for parts in many])), 1)

        return {
            "changed": median(changed, IN_STEP), "steady": median(steady, IN_STEP),
            "parts": {name: median(changed, (name,)) for name in (*IN_STEP, *WITHIN)},
            "beside": {name: median(changed, (name,)) for name in BESIDE},
            "steady_parts": {name: median(steady, (name,)) for name in IN_STEP},
        }  # fmt: skip


class Remote:
    """A `Side` in another process, which begins to start; calls wait for their result."""

    def __init__(self, model: str, kind: str, kv_bytes: int, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, kind, kv_bytes, options))
        self._process.start()  # not a daemon: it may have workers of its own
        atexit.register(self.close)
        theirs.close()  # so that a process that dies is noticed

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pipe.send((name, args, kwargs))
            result, error = self._pipe.recv()
            if error is not None:
                raise RuntimeError(error)
            return result

        return call

    def close(self) -> None:
        atexit.unregister(self.close)
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any, model: str, kind: str, kv_bytes: int, options: dict[str, Any]) -> None:
    if kind != "patchclamp":
        os.environ["VLLM_PLUGINS"] = ""
    side = Side(model, kind, kv_bytes, **options)
    assert kind == "patchclamp" or not side.alone or not hasattr(side._worker, "patchclamp")
    while True:
        name, args, kwargs = pipe.recv()
        try:
            pipe.send((getattr(side, name)(*args, **kwargs), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"[:300]))
