"""In vLLM's worker: the runtime beside a model runner, and the answers to the front end's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch

from patchclamp.engines.vllm import shared
from patchclamp.engines.vllm.architecture import site_map
from patchclamp.engines.vllm.compat import backend, configuration, lora
from patchclamp.engines.vllm.compat import runner as compat
from patchclamp.engines.vllm.compat.addresses import Watch
from patchclamp.engines.vllm.compat.attention import after as after_attention
from patchclamp.engines.vllm.compat.graphs import Graphs, compiled_ahead, fusions_of, lacks_idle_variant
from patchclamp.errors import EngineError, pack
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import Code
from patchclamp.plan.step import FOREVER
from patchclamp.runtime import Limits, Runtime, addresses
from patchclamp.runtime.op import at_work
from patchclamp.runtime.step import HostStep
from patchclamp.runtime.taps import attach as attach_taps


def attach(worker: Any) -> None:
    """Taps a worker's model and hooks its runner; kept as `worker.patchclamp`."""
    config = configuration.enabled(worker.vllm_config)
    assert config is not None
    configuration.check(worker.vllm_config)
    runner, kind = compat.runner_of(worker)
    backend.share(runner.get_model(), worker.vllm_config)
    with torch.inference_mode(False):  # what is made here is written in steps and in calls alike
        worker.patchclamp = Attached(worker, runner, kind, msgspec.convert(config["limits"], Limits))
    compat.on_sleep(worker, too_deep)


def too_deep(level: int) -> EngineError | None:
    """Why an engine may not sleep at a level; its weights stay only at the first."""
    if level <= 1:
        return None
    return EngineError(f"patchclamp does not run with sleep level {level}, which throws the weights away; use level 1")


def answer(worker: Any, verb: str, *args: Any) -> tuple[Any, tuple[str, str, str | None] | None]:
    """Carries out a call of the front end; returns (result, None) or (None, packed error): data, in any process."""
    attached: Attached | None = getattr(worker, "patchclamp", None)
    if attached is None:
        return None, pack(
            EngineError("patchclamp is not attached to this worker: was its plugin loaded (VLLM_PLUGINS)?")
        )
    try:
        return getattr(attached, f"do_{verb}")(*args), None
    except Exception as error:
        return None, pack(error)


class _Head(msgspec.Struct, array_like=True):
    """The beginning of an encoded `BoundProgram`."""

    run: str


class Attached:
    """The runtime of one worker, fed from its runner's steps."""

    def __init__(self, worker: Any, runner: Any, kind: str, limits: Limits) -> None:
        sites = site_map(worker.vllm_config)
        self.kind = kind
        rank, first, last = compat.worker_rank()
        self.runtime = Runtime(sites, limits, worker.device, rank)
        self._decode = msgspec.msgpack.Decoder(BoundProgram).decode
        self._run_of = msgspec.msgpack.Decoder(_Head).decode
        self._logits = next(point.number for point in sites.points if point.rows == "sampled")
        self._active = self._awaits_logits = False
        self._warm = self.runtime.device.type != "cuda"
        self._preemptions = self._total = 0
        self._most_kept = limits.kept_bytes
        self._graphs: Graphs | None = None
        self._runner = runner
        self._config, self._compiled = worker.vllm_config, compiled_ahead(worker.vllm_config)
        self._fusions = fusions_of(self._config)
        self._sender = shared.Sender()
        if self.runtime.device.type == "cuda":
            self._on_cuda(runner, limits)
        elif isinstance(self.runtime.step, HostStep):
            self.runtime.step.token_of_row = compat.token_ids(runner, self.kind)
        if self._config.lora_config is not None:
            lora.prepare(runner)
        hooked = attach_taps(runner.get_model(), sites.taps("vllm"), sites.local().view, after_attention)
        self.runtime.views |= hooked
        self.runtime.keeps = first
        self.runtime.here[:] = False
        self.runtime.here[list(hooked)] = True
        self.runtime.here[self._logits] = last
        self.hooks = compat.Hooks(self.before, self.planned, self.logits, self.after, self.at_work)
        compat.hook_runner(runner, kind, self.hooks, self._graphs)

    def _on_cuda(self, runner: Any, limits: Limits) -> None:
        from patchclamp.runtime.cuda import CudaStep

        rows, samples, positions = compat.device_facts(runner, self.kind)
        runtime = self.runtime
        runtime.step = step = CudaStep(
            runtime.table, runtime.bank, rows, samples, positions, compat.token_ids(runner, self.kind),
            limits.kept_bytes, limits.ring_bytes, limits.pinned_bytes,
        )  # fmt: skip
        step.code = runtime.run_code
        self._most_kept = step.max_graph_bytes
        compat.count_memory(runner, runtime.bank.data.nbytes + step.bytes)
        watch = Watch(step.buffers) if addresses.wanted() else None
        self._graphs = Graphs(limits.active_sizes, self.recording, step.recorded.tapped, step.recorded.forget, watch)

    def at_work(self) -> Any:
        return at_work(self.runtime, self._compiled)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Taps launch whatever they are given: a graph is being recorded."""
        self.runtime.step.recording = True
        try:
            with at_work(self.runtime):
                yield
        finally:
            self.runtime.step.recording = False

    # -- around a step

    def before(self, scheduler_output: Any) -> tuple[bool, bool]:
        """Takes note of who came and went; returns (active, whether what is captured fits beside a graph)."""
        self.runtime.plan = None
        self._awaits_logits = False
        if not len(self.runtime) and compat.same_requests(scheduler_output):
            self._active = False
            return False, True
        requests = compat.going_on(scheduler_output) if len(self.runtime) else None
        answer = self.runtime.continuity.answer(requests)
        if answer is None:
            version = self.runtime.table.version
            answer, steps = self._look(scheduler_output)
            same_programs = self.runtime.table.version == version and not self.runtime.has_code
            self.runtime.continuity.keep_answer(requests if same_programs else None, answer, steps)
        return answer

    def _look(self, scheduler_output: Any) -> tuple[tuple[bool, bool], int]:
        """The same for any step, and for how many further ones it stays so if they go on like it."""
        self._preemptions += compat.preempted(scheduler_output)
        self.runtime.drop(compat.finished(scheduler_output))
        for request, program in compat.new_programs(scheduler_output):
            with suppress(msgspec.DecodeError):  # bytes of somebody else's: nothing is edited
                self.runtime.assign_slot(request, self._run_of(program).run)
        tokens, total = compat.scheduled(scheduler_output)
        self._total = total
        left = self.runtime.steps_left(compat.positions(scheduler_output)) if len(self.runtime) else 0
        self._active = left > 0
        fits = not self._active or self.runtime.captures_at_most(tokens, total, self._most_kept)
        answer = self._active, fits and not self.runtime.runs_code(compat.positions(scheduler_output))
        return answer, left - 1 if left else FOREVER

    def planned(self, requests: list[str], row: np.ndarray, position: np.ndarray, count: np.ndarray) -> None:
        """Plans a step with programs; the arrays are the runner's own and change with the next one."""
        self.runtime.begin_step(requests, row, position, count, self._total)
        self._awaits_logits = self.runtime.plan is not None

    def logits(self, logits: torch.Tensor | None) -> None:
        """The first logits computed after a step are those that are sampled from; later ones grade prompts."""
        if not self._warm and logits is not None:  # while the engine starts
            self._warm = True
            with self.recording():
                self.runtime.apply(self._logits, logits, None)
        if self._awaits_logits and logits is not None:
            self._awaits_logits = False
            self.runtime.apply(self._logits, logits, None)

    def after(self) -> None:
        self.runtime.end()

    # -- calls

    def do_examine(self) -> dict[str, Any]:
        """The status, and what only an examination asks for."""
        memory = {"vectors (bank)": self.runtime.bank.data.nbytes, **self.runtime.step.memory}
        if self._graphs is not None:
            memory |= {f"CUDA graphs {kind} taps": size for kind, size in self._graphs.bytes.items()}
        return {**self.do_status(), "fusions": self._fusions, "memory": memory}

    def do_started(self) -> None:
        """Raises `EngineError` if guarantee 1 would not hold."""
        if lacks_idle_variant(self._config):
            raise EngineError(
                "vLLM compiled the model where patchclamp does not see it, so steps without programs would run code "
                "with taps in it; set VLLM_USE_AOT_COMPILE=0, or enforce_eager=True"
            )

    def do_status(self) -> dict[str, Any]:
        found = {"runner": self.kind, "preemptions": self._preemptions, **self.runtime.status()}
        if not self.runtime.keeps:  # counted by the one that does
            found["failures"] = 0
        if self._graphs is not None:
            watched = {} if self._graphs.watch is None else {"replays_checked": self._graphs.watch.compared}
            found |= watched | {"active_graphs": self._graphs.active, "active_graphs_problem": self._graphs.problem,
                      "idle_graphs": self._graphs.idle}  # fmt: skip
        return found

    def do_hold_vectors(self, vectors: bytes, holders: list[str]) -> None:
        """Takes inline vectors, as safetensors, each once for every time it is named among `holders`."""
        self.runtime.hold_vectors(safetensors.torch.load(vectors), holders)

    def do_hold_code(self, run: str, code: dict[int, Code]) -> None:
        """Takes what a run's program runs; only where the front end is in this process."""
        self.runtime.hold_code(run, code)

    def do_unfit(self, adapter: int) -> list[str]:
        """What of a loaded adapter, by its number, does not fit the model."""
        return lora.unfit(self._runner, adapter)

    def do_missing_rows(self, read: list[tuple[str, int]]) -> list[str]:
        """Of keys of runs' rows, each with a point where it is read, those that are needed here and not at hand."""
        return [key for key, point in read if self.runtime.here[point] and self.runtime.is_missing(key)]

    def do_rows(self, key: str) -> bytes | None:
        """A run's rows, as safetensors, if they were captured here."""
        if not self.runtime.has(key):
            return None
        return safetensors.torch.save({key: self.runtime.rows(key)})

    def do_add_remote_rows(self, rows: bytes, points: list[int]) -> None:
        """Takes rows that another worker captured, if they are read here, at any of some points."""
        if self.runtime.here[points].any():
            self.runtime.add_remote_rows(safetensors.torch.load(rows))

    def do_evict(self, runs: list[str]) -> None:
        """Takes back seats that other workers had none for."""
        for run in runs:
            self.runtime.finish(run)
        self.runtime.release(runs)

    def do_admit(self, programs: list[bytes]) -> tuple[int, tuple[str, str, str | None] | None]:
        """Seats programs in order until one does not fit; returns how many sit, and what stands against the next."""
        try:
            for i, program in enumerate(programs):
                try:
                    self.runtime.admit(self._decode(program))
                except Exception as error:
                    return i, pack(error)
            return len(programs), None
        finally:
            self.runtime.table.captures.layout()  # gathered between steps rather than in one

    def do_finish(
        self, runs: list[str], vectors: list[str], aborted: bool = False
    ) -> tuple[dict[str, tuple[str, str, str | None]], int]:
        """Frees seats and vectors; returns the errors of runs that failed in here, and how many runs ever have (some
        of them may still be running). `aborted`: steps of these runs may still be under way."""
        if aborted and self.runtime.device.type == "cuda":
            torch.cuda.synchronize()
        self.runtime.collect_failures()
        for run in runs:
            self.runtime.finish(run)
        self.runtime.release_vectors(vectors)
        found = {run: self.runtime.take_error(run) for run in runs}
        return {run: error for run, error in found.items() if error is not None}, self.runtime.failures

    def do_fetch(
        self, run: str, point: int, op: int | None, piece: int, to: str, mapped: list[int], at: int, files: bool
    ) -> Any:
        """(positions, rows), of a piece of the rows; for a receiver in another process, what `shared` hands it."""
        runtime = self.runtime
        if not (runtime.keeps_at(point) and runtime.here[point] and runtime.shards[point].number == piece):
            return None
        if not to:
            return self.runtime.fetch(run, point, op)
        return self._sender.hand(*self.runtime.store.parts(run, point, op), to, mapped, at, files)

    def do_release(self, runs: list[str]) -> None:
        self.runtime.release(runs)

    def do_close(self) -> None:
        """Stops the threads that captures leave the device on; what was captured stays for those who hold it."""
        self.runtime.step.close()
