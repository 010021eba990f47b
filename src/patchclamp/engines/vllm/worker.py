"""Code in vLLM's worker: a model runner's runtime (`Attached`), and handlers of the front end's calls (`do_…`).

`Exchange` moves rows from the worker that captured them to one that reads them, just before the reading program is
installed. All workers install the same programs in the same order, so each worker can derive senders and receivers from
the program.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import safetensors.numpy
import torch

from patchclamp.engines.base import Captured, Wanted, Window, decode, receipt_of
from patchclamp.engines.lenses import LastNorm, read_streams, top_tokens
from patchclamp.engines.vllm import shared
from patchclamp.engines.vllm.admission import Admission, Orders, SelfCheck
from patchclamp.engines.vllm.bulk import LATER, Bulk, Job
from patchclamp.engines.vllm.compat import configuration, lora
from patchclamp.engines.vllm.compat import runner as compat
from patchclamp.engines.vllm.compat.architecture import share, site_map
from patchclamp.engines.vllm.compat.keys import PagedKeys
from patchclamp.engines.vllm.compat.runner import BatchModel, around, refusal_of
from patchclamp.engines.vllm.compat.variants import Graphs, Watch, compiled_ahead, fusions_of, lacks_idle_variant
from patchclamp.engines.vllm.monitors import MonitorTap, monitors_of_config
from patchclamp.engines.vllm.server import check_rate_of, loaded_saes
from patchclamp.engines.weights import Shard, read_weight, shard_of, token_embedding
from patchclamp.errors import EngineError, MissingSource, Packed, UnsupportedSite, describe_error, pack, unpack
from patchclamp.language import Site
from patchclamp.language.dictionaries import of_file
from patchclamp.language.ops import Translator
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import Code
from patchclamp.plan.bound import source_of
from patchclamp.plan.cells import CellRecords
from patchclamp.plan.room import Room
from patchclamp.plan.step import FOREVER
from patchclamp.runtime import Arrival, Limits, Runtime, cuda_graphs
from patchclamp.runtime.dictionaries import dtype_of_precision
from patchclamp.runtime.host_step import HostStep
from patchclamp.runtime.op import at_work
from patchclamp.runtime.self_check import mislabelled
from patchclamp.runtime.taps import attach as attach_taps
from patchclamp.store.captures import StoredRows, tensors_of
from patchclamp.store.host_memory import default_pinned_bytes
from patchclamp.store.tensors import SELF_CHECK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker


logger: logging.Logger = logging.getLogger("vllm.patchclamp")


class Exchange:
    """Moves rows between an engine's workers. `group`: vLLM's group of all workers.

    _has_tap, _keeps, _shard: by worker and point: True if tapped, True if captures are kept, and the shard's index
    """

    def __init__(self, runtime: Runtime, group: GroupCoordinator) -> None:
        self._runtime, self._group = runtime, group
        points = range(len(runtime.sites.points))
        own = np.stack([
            runtime.has_tap, [runtime.keeps_at(point) for point in points], [shard.number for shard in runtime.shards],
        ])  # fmt: skip
        every: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(every, own, group=group.cpu_group)
        self._has_tap, self._keeps, self._shard = (np.array([worker[i] for worker in every]) for i in range(3))
        self._moved: dict[str, dict[str, torch.Tensor] | MissingSource] = {}  # by request, until it is installed

    def move(self, request: str, bound: BoundProgram) -> None:
        """Move the rows that a request's program reads. Runs on every worker before any worker blocks on a peer."""
        try:
            reads = [read for op in bound.ops for read in op.reads()]
            self._moved[request] = self._move(reads)
        except Exception as error:
            self._moved[request] = MissingSource(f"the rows that the program reads could not be transferred: {error!r}")

    def rows(self, request: str) -> dict[str, torch.Tensor]:
        """Return other workers' rows [n, W] that a request's program reads on this worker, by bank key. Raises
        `MissingSource` if the sender did not have them."""
        moved = self._moved.pop(request)
        if isinstance(moved, MissingSource):
            raise moved
        return moved

    def of_cells(self, job: Job) -> dict[str, torch.Tensor]:
        """Move other workers' rows that a job's cells read on this worker, and return them. Runs on every worker."""
        cells = CellRecords.of_bytes(job.cells)
        reads = {(cells.keys[key], point) for group in cells.groups for index in (group.key, group.beside)
                 for key, point in np.unique(np.stack([index, group.point], -1).reshape(-1, 2), axis=0).tolist()
                 if key >= 0}  # fmt: skip
        rows = self._move(sorted(reads))
        if isinstance(rows, MissingSource):
            raise rows
        return rows

    def everywhere(self, wanted: list[Wanted], fetch: Callable[[list[Wanted]], list[Captured]]) -> list[Captured]:
        """Broadcast captures from the worker that keeps full rows. Runs on all workers, and raises the sender's
        error."""
        kept = self._has_tap.astype(bool) & self._keeps.astype(bool)
        owners = [int(kept[:, point].argmax()) for _, point, *_ in wanted]
        found: dict[int, Captured] = {}
        for owner in sorted(set(owners)):
            places = [i for i, of in enumerate(owners) if of == owner]
            sent: list[Any] = [None]
            if self._group.rank_in_group == owner:
                try:
                    sent = [fetch([wanted[i] for i in places])]
                except Exception as error:
                    sent = [pack(error)]
            torch.distributed.broadcast_object_list(sent, self._group.ranks[owner], self._group.cpu_group)
            if isinstance(sent[0], tuple):
                raise unpack(sent[0])
            found |= zip(places, sent[0], strict=True)
        return [found[i] for i in range(len(wanted))]

    def _move(self, reads: list[tuple[str, int]]) -> dict[str, torch.Tensor] | MissingSource:
        received: dict[str, torch.Tensor] = {}
        lacking: list[str] = []
        for key, reader in self._crossings(reads):
            run, point = source_of(key) or ("", 0)
            owner = self._owner(point, reader)
            if owner == reader or owner is None:
                continue
            if self._group.rank_in_group == owner:
                self._group.send_object(self._rows_here(run, point), reader)
            elif self._group.rank_in_group == reader:
                rows = self._group.recv_object(owner)
                if rows is None:
                    lacking.append(run)
                else:
                    received[key] = rows
        if lacking:
            return MissingSource(f"run {lacking[0]} is not available: it was released, or captured nothing")
        return received

    def _rows_here(self, run: str, point: int) -> torch.Tensor | None:
        """Return this worker's captures of a run. None if missing or on any error, so the reader never hangs."""
        try:
            return self._runtime.fetch(run, point)[1].cpu() if self._runtime.captured_here(run, point) else None
        except Exception:
            return None

    def _crossings(self, reads: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return (bank key, worker) for every worker that reads a run's rows, in the same order on every worker."""
        pairs: dict[tuple[str, int], None] = {}
        for key, point in reads:
            if source_of(key) is not None:
                pairs |= dict.fromkeys((key, int(worker)) for worker in np.flatnonzero(self._has_tap[:, point]))
        return list(pairs)

    def _owner(self, point: int, reader: int) -> int | None:
        """Find a worker, preferably the reader, with the reader's shard of a point's rows; None if no worker has it."""
        sharded = self._runtime.sites.shard_count(point) > 1
        has = self._has_tap[:, point].astype(bool) & self._keeps[:, point].astype(bool)
        if sharded:
            has &= self._shard[:, point] == self._shard[reader, point]
        if has[reader]:
            return reader
        owners = np.flatnonzero(has)
        return int(owners[0]) if len(owners) else None


def attach(worker: Worker) -> None:
    """Tap a worker's model and hook its runner. The result is `worker.patchclamp`."""
    config = configuration.enabled(worker.vllm_config)
    assert config is not None
    configuration.check(worker.vllm_config)
    runner, kind = compat.runner_of(worker)
    share(runner.get_model(), worker.vllm_config)
    with torch.inference_mode(False):  # tensors created here are written both in steps and in calls
        vars(worker)["patchclamp"] = Attached(worker, runner, kind, msgspec.convert(config["limits"], Limits))
    compat.on_sleep(worker, too_deep)


def admission_of(vllm_config: VllmConfig) -> Admission:
    """Create an engine core's `Admission` from its workers' limits."""
    config = configuration.enabled(vllm_config)
    assert config is not None
    limits = msgspec.convert(config["limits"], Limits)
    room = Room(limits.max_programs, limits.max_records, limits.bank_bytes // 4, limits.cells)
    ahead = configuration.images_see_ahead(vllm_config)
    world_size, rate = vllm_config.parallel_config.world_size, check_rate_of(vllm_config)
    return Admission(site_map(vllm_config), room, world_size, ahead, rate)


def too_deep(level: int) -> EngineError | None:
    """Return an error for sleep levels above 1, which discard the weights; otherwise None."""
    if level <= 1:
        return None
    return EngineError(f"sleep level {level} is not supported, because it discards the weights; use level 1", "level")


def answer(worker: Worker, verb: str, *args: Any) -> tuple[Any, Packed | None]:
    """Execute a front end's call. Return (result, None) or (None, packed error); both can be sent between processes."""
    attached: Attached | None = getattr(worker, "patchclamp", None)
    if attached is None:
        return None, pack(
            EngineError("patchclamp is not attached to this worker: was its plugin loaded (VLLM_PLUGINS)?")
        )
    try:
        return getattr(attached, f"do_{verb}")(*args), None
    except Exception as error:
        return None, pack(error)


class Attached:
    """A worker's runtime, driven by its runner's steps."""

    def __init__(self, worker: Worker, runner: Any, kind: str, limits: Limits) -> None:
        sites = site_map(worker.vllm_config)
        self.kind = kind
        rank, first, last = compat.worker_rank()
        assert worker.device is not None
        self.loads = 0  # loads of weights into the model since it was tapped
        self.runtime: Runtime = Runtime(sites, limits, worker.device, rank)
        self._embedding = token_embedding(runner.get_model())
        self._checks = [0, 0]  # label checks, and failed ones
        self._settled: set[str] = set()  # ended requests whose outcome was already returned
        self._logits = next(point.number for point in sites.points if point.rows == "sampled")
        self._active = self._awaits_logits = False
        self._uniform = configuration.is_uniform(worker.vllm_config)
        self._steps = [0, 0]  # steps with tokens: run without taps, and with taps
        self._warm = self.runtime.device.type != "cuda"
        self._preemptions = self._total = 0
        self._requests: list[str] = []  # of the last planned step
        self._most_ahead = compat.most_ahead(runner)
        self._begins: dict[str, int] = {}  # with `_most_ahead`: first positions, checked on the device
        self._most_kept = limits.kept_bytes
        self._graphs: Graphs | None = None
        self._runner = runner
        self._config, self._compiled = worker.vllm_config, compiled_ahead(worker.vllm_config)
        self._fusions = fusions_of(self._config)
        self._sender = shared.CaptureSender()
        self._bulk: Bulk | None = None
        self._steps_at_batch = 0  # steps with tokens at the last batch of cells
        self._exchange: Exchange | None = None
        self.runtime.keys = self._keys = PagedKeys(runner, kind, self.runtime, sites)
        if self.runtime.device.type == "cuda":
            self._on_cuda(runner, limits)
        elif isinstance(self.runtime.step, HostStep):
            self.runtime.step.token_of_row = compat.token_ids(runner, self.kind)
            compat.request_amx()
        if self._config.lora_config is not None:
            lora.prepare(runner)
        hooked = attach_taps(runner.get_model(), sites.taps("vllm"), sites.local().view, around)
        self.runtime.views |= hooked
        self.runtime.keeps = first
        self.runtime.has_tap[:] = False
        self.runtime.has_tap[list(hooked)] = True
        self.runtime.has_tap[self._logits] = last
        self.runtime.store.keeps_last = self._config.speculative_config is not None
        if worker.vllm_config.parallel_config.world_size > 1:
            from vllm.distributed.parallel_state import get_world_group

            self._exchange = Exchange(self.runtime, get_world_group())
            self.runtime.remote_rows = self._exchange.rows
            compat.on_execute(worker, self.ahead)
        for sae, dictionary, precision in loaded_saes(worker.vllm_config, sites):
            dtype = dtype_of_precision(precision, self._config.model_config.dtype)
            size = self.runtime.dictionaries.attach(dictionary.card.name, sae, dtype)
            if self.runtime.device.type == "cuda":
                compat.count_memory(runner, size)
        monitor: MonitorTap | None = None
        if monitors := monitors_of_config(worker.vllm_config):
            monitor = MonitorTap(monitors, self.runtime.views, runner.max_num_tokens, self.runtime.device)
        self.runtime.monitor = monitor
        compat.on_new_weights(runner.get_model(), self.loaded)
        self.hooks: compat.Hooks = compat.Hooks(
            self.before, self.planned, self.logits, self.after, self.at_work, self.at_rest
        )
        compat.hook_runner(runner, kind, self.hooks, self._graphs)
        if monitor is not None and first:
            compat.on_results(runner, monitor.taken)

    def _on_cuda(self, runner: Any, limits: Limits) -> None:
        from patchclamp.runtime.cuda_step import CudaStep

        rows, samples, positions = compat.device_facts(runner, self.kind)
        parallel = self._config.parallel_config
        pinned = limits.pinned_bytes
        if pinned is None:
            pinned = default_pinned_bytes(parallel.world_size * parallel.data_parallel_size_local)
        runtime = self.runtime
        step = CudaStep(
            runtime.table, runtime.bank, rows, samples, positions, compat.token_ids(runner, self.kind),
            limits.kept_bytes, limits.ring_bytes, pinned,
        )  # fmt: skip
        step.use_cache(self._keys.cache, runtime.is_query, self._keys.is_output)
        runtime.use(step)
        self._most_kept = step.max_graph_bytes
        compat.count_memory(runner, runtime.bank.data.nbytes + limits.sae_bytes + step.bytes)
        watch = Watch(step.buffers) if cuda_graphs.checked() else None
        self._graphs = Graphs(
            limits.active_sizes, self.recording, self.resting, step.recorded.tapped, step.recorded.forget, watch
        )  # fmt: skip

    def loaded(self) -> None:
        """Increment the count of weight loads."""
        self.loads += 1

    def at_work(self) -> Any:
        return at_work(self.runtime, self._compiled)

    def at_rest(self) -> Any:
        """Return an idle step's context. Taps do nothing inside it; taps in compiled code return early."""
        return at_work(self.runtime.monitor, self._compiled) if self._uniform else nullcontext()

    def resting(self) -> Any:
        """Return the context in which idle steps' graphs are recorded."""
        return at_work(self.runtime.monitor)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make every tap launch its kernel while a graph is recorded."""
        self.runtime.step.recording = True
        try:
            with at_work(self.runtime):
                yield
        finally:
            self.runtime.step.recording = False

    # -- around a step

    def ahead(self, scheduler_output: SchedulerOutput) -> None:
        """Move the rows that new programs read to the workers that lack them. This must happen before a pipeline stage
        blocks on the previous stage."""
        orders = compat.orders(scheduler_output)
        assert self._exchange is not None
        for admitted in () if orders is None else orders.admit:
            self._exchange.move(admitted.request, decode(admitted.program).bound)

    def before(self, scheduler_output: SchedulerOutput) -> tuple[bool, bool]:
        """Process arrived and ended requests; return (True if a program acts, True if a graph may be used)."""
        active, fits = self._take_in(scheduler_output)
        _, tokens = compat.scheduled(scheduler_output)
        self._steps[active or self._uniform] += tokens > 0
        return active, fits

    def _take_in(self, scheduler_output: SchedulerOutput) -> tuple[bool, bool]:
        """Compute the result of `before`, or reuse the previous step's if it still holds."""
        self.runtime.plan = None
        self._awaits_logits = False
        ordered = compat.orders(scheduler_output) is not None
        if not len(self.runtime) and not ordered and compat.same_requests(scheduler_output):
            self._active = False
            return False, True
        known = len(self.runtime) and not ordered and not self._most_ahead
        requests = compat.going_on(scheduler_output) if known else None
        answer = self.runtime.continuity.answer(requests)
        if answer is None:
            version = self.runtime.table.version
            try:
                answer, steps = self._look(scheduler_output)
            except Exception as error:
                answer, steps = self._give_up(scheduler_output, error)
            same_programs = self.runtime.table.version == version and not self.runtime.has_code
            self.runtime.continuity.keep_answer(requests if same_programs else None, answer, steps)
        return answer

    def _give_up(self, scheduler_output: SchedulerOutput, error: Exception) -> tuple[tuple[bool, bool], int]:
        """Run the step without its programs, and fail their runs with the error."""
        self._active = False
        self.runtime.fail_step([request for request, _ in compat.positions(scheduler_output)], error)
        return (False, True), 0

    def _look(self, scheduler_output: SchedulerOutput) -> tuple[tuple[bool, bool], int]:
        """Compute the result of `before`, and the number of further steps for which it holds with the same requests."""
        self._preemptions += compat.preempted(scheduler_output)
        finished, orders = compat.finished(scheduler_output), compat.orders(scheduler_output)
        self._free(finished)
        if orders is not None:
            self._carry_out(orders, finished)
        tokens, total = compat.scheduled(scheduler_output)
        self._total = total
        positions = self._positions(scheduler_output) if len(self.runtime) else []
        steps_left = self.runtime.steps_left(positions)
        self._active = steps_left > 0
        fits = not self._active or self.runtime.captures_at_most(tokens, total, self._most_kept)
        answer = self._active, fits and not self.runtime.runs_code(positions)
        return answer, steps_left - 1 if steps_left else FOREVER

    def _positions(self, scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
        """Return each request of a step and its first position. With steps scheduled ahead, these may be too high;
        exact positions are read from the device if a program may act at or after the lowest possible position."""
        positions = list(compat.positions(scheduler_output))
        earliest = ((request, max(begin - self._most_ahead, 0)) for request, begin in positions)
        if not self._most_ahead or not self.runtime.steps_left(earliest):
            return positions
        self._begins = compat.checked_positions(self._runner, scheduler_output)
        return list(self._begins.items())

    def _free(self, requests: Collection[str]) -> None:
        """Free ended requests. An aborted request may have a step in flight, whose failure must be counted."""
        aborted = [request for request in requests if request not in self._settled and self.runtime.has(request)]
        if aborted:
            if self.runtime.device.type == "cuda":
                torch.cuda.synchronize()
            self.runtime.collect_failures()
        self.runtime.free(requests)
        self._settled.difference_update(requests)

    def _carry_out(self, orders: Orders, finished: Collection[str]) -> None:
        """Release runs and install programs. A program that cannot be installed fails its run.

        A program whose request was aborted before its first step is still installed, then freed at once: it may load
        bank rows that later programs read.
        """
        self._sender.take_back(orders.release)
        self.runtime.release(orders.release)
        vectors = {key: torch.tensor(rows) for key, rows in orders.vectors.items()}
        arrivals: list[Arrival] = []
        for admitted in orders.admit:
            bound, receipt = decode(admitted.program).bound, receipt_of(admitted.program)
            arrivals.append(Arrival(admitted.request, bound, admitted.placement, receipt, admitted.checked))
            if admitted.request in finished:  # later arrivals may reuse its placement
                self._install(arrivals, vectors)
                self._free([admitted.request])
                if bound.run in orders.release:  # the run was released above, before it was installed
                    self.runtime.release([bound.run])
                arrivals = []
        self._install(arrivals, vectors)
        self.runtime.table.captures.layout()  # computed here rather than while rows are planned

    def _install(self, arrivals: list[Arrival], vectors: dict[str, torch.Tensor]) -> None:
        try:
            errors = self.runtime.install_all(arrivals, vectors)
        except Exception as error:  # no program may run unedited
            errors = {arrival.request: error for arrival in arrivals}
        for arrival in arrivals if errors else ():
            if arrival.request in errors:
                self.runtime.refuse(arrival.request, arrival.bound.run, errors[arrival.request])

    def planned(
        self, requests: list[str], row: np.ndarray, position: np.ndarray, count: np.ndarray, samples: np.ndarray | None
    ) -> None:
        """Plan a step with programs. The arrays are the runner's own, and change in its next step."""
        self._requests = requests
        if self._most_ahead:
            position = np.array([self._begins[request] for request in requests])
        try:
            self.runtime.begin_step(requests, row, position, count, self._total, samples)
        except Exception as error:
            if self._graphs is not None:  # a graph with taps may run next, with the last step's plan
                raise
            self.runtime.fail_step(requests, error)
        self._awaits_logits = self.runtime.plan is not None

    def logits(self, logits: torch.Tensor | None) -> None:
        """Apply the logits tap to a step's first logits, which are sampled from. Later logits score prompt tokens."""
        if not self._warm and logits is not None:  # during engine start
            self._warm = True
            with self.recording():
                self.runtime.apply(self._logits, logits, None)
        if self._awaits_logits and logits is not None:
            self._awaits_logits = False
            self.runtime.apply(self._logits, logits, None)

    def after(self) -> None:
        try:
            self.runtime.end()
        except Exception as error:
            self.runtime.fail_step(self._requests, error)

    # -- calls

    def do_examine(self) -> dict[str, Any]:
        """Return the status, including fusions and memory."""
        memory = {"vectors (bank)": self.runtime.bank.data.nbytes, **self.runtime.step.memory}
        if self._graphs is not None:
            memory |= {f"CUDA graphs {kind} taps": size for kind, size in self._graphs.bytes.items()}
        return {**self.do_status(), "fusions": self._fusions, "memory": memory}

    def do_started(self, remote: bool) -> None:
        """Let a `remote` front end map captures. Raises `EngineError` if idle steps would run taps despite stock
        numerics."""
        if remote:
            self.runtime.step.open_captures()
        if lacks_idle_variant(self._config):
            raise EngineError(
                "vLLM compiled the model without patchclamp's hook, so steps without programs would run code with "
                'taps; set VLLM_USE_AOT_COMPILE=0, enforce_eager=True, or numerics="uniform"'
            )

    def do_status(self) -> dict[str, Any]:
        without_taps, with_taps = self._steps
        steps = {"steps_with_taps": with_taps, "steps_without_taps": without_taps}
        own = {"runner": self.kind, "loans": self._sender.loans, "preemptions": self._preemptions}
        own |= dict(zip(("self_checks", "self_checks_failed"), self._checks, strict=True))
        status = {**own, **steps, **self.runtime.status()}
        if not self.runtime.keeps:  # failures are counted only on workers that keep captures
            status["failures"] = 0
        if self._graphs is not None:
            watched = {} if self._graphs.watch is None else {"replays_checked": self._graphs.watch.compared}
            status |= watched | {"active_graphs": self._graphs.active, "active_graphs_problem": self._graphs.problem,
                      "idle_graphs": self._graphs.idle}  # fmt: skip
        return status

    def do_hold_code(self, run: str, code: dict[int, Code]) -> None:
        """Store the functions of a run's `Apply` ops. Requires the front end in this process."""
        self.runtime.hold_code(run, code)

    def do_unfit(self, adapter: int) -> list[str]:
        """Return the parts of a loaded adapter, given by number, that do not fit the model."""
        return lora.unfit(self._runner, adapter)

    def do_settle(
        self, requests: list[str], ended: list[str], checks: Sequence[SelfCheck] = ()
    ) -> dict[str, tuple[str, Packed | None]]:
        """Return the receipt and error of each request's program. `ended`: requests that will have no further steps.
        `checks`: the label checks to run first."""
        self.runtime.collect_failures()
        for check in checks:
            self._check(check)
        self._settled.update(ended)
        return {request: self.runtime.outcome(request) for request in requests}

    def _check(self, check: SelfCheck) -> None:
        """Fail a request whose captured rows do not match its tokens."""
        runtime = self.runtime
        [embed] = runtime.sites.resolve(Site("embed"))
        if not runtime.has_tap[embed.point]:
            return
        try:
            # before any branch that may differ between workers: they sum over their parts of the vocabulary
            with torch.inference_mode():
                ids = torch.from_numpy(check.ids).to(runtime.device)
                expected_TD = self._embedding.forward(ids).cpu()
            run = runtime.run_of(check.request)
            if not runtime.keeps_at(embed.point) or run is None:
                return
            self._checks[0] += check.is_first
            if not len(check.positions):
                return
            wanted = Wanted(run, embed.point, SELF_CHECK, int(check.positions[0]))
            [(captured, rows)] = tensors_of(runtime.store.find([wanted]))
            count = int(np.searchsorted(captured, check.positions[-1], "right"))  # without rejected drafts
            error = mislabelled(captured[:count], rows[:count], check.positions, expected_TD)
        except Exception as failure:
            error = failure
        if error is not None:
            self._checks[1] += 1
            logger.error("%s", describe_error(error))
            runtime.fail(runtime.slots([check.request]).tolist(), error)

    def do_verdict(self, run: str) -> tuple[str, Packed | None] | None:
        """Return the receipt and error of an unfinished run's program; None if the run has ended."""
        self.runtime.collect_failures()
        request = self.runtime.request_of(run)
        return None if request is None else self.runtime.outcome(request)

    def do_fetch(self, wanted: list[Wanted], *receiver: Any) -> dict[Any, Any]:
        """Return (positions, rows) of the captures that this worker keeps, by index in `wanted`; given `receiver`
        arguments, return the answer of `CaptureSender.hand`."""
        stored = self._stored(wanted)
        if receiver:
            return self._sender.hand(stored, *receiver)
        return dict(zip(stored, tensors_of(list(stored.values())), strict=True))

    def do_gather(self, runs: list[str], point: int, op: int | None) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """Return a point's rows in many runs as one tensor. Requires the front end in this process."""
        return self.runtime.store.gather(runs, point, op)

    def do_lens(self, wanted: list[Wanted], top: int, translator: bytes) -> tuple[list[bytes], bytes, bytes] | None:
        """Return captures' positions, and the likeliest tokens and log-probabilities of all their rows (`top_tokens`);
        None if another worker returns them. `translator`: as msgpack."""
        translate = msgspec.msgpack.decode(translator, type=Translator | None)
        with self._captures_to_unembed(wanted) as captured:
            rows = [rows for _, rows in captured]
            found = top_tokens(rows, self._unembed, top, self.runtime.sites, self.runtime.device, translate)
        if found is None:
            return None
        return [positions.tobytes() for positions, _ in captured], found[0].tobytes(), found[1].tobytes()

    def do_read_streams(self, streams: list[Wanted], rows: list[int], top: int, chosen: list[int]) -> bytes | None:
        """Return the `lens_values` of captured streams, as safetensors; None if another worker returns them."""
        with self._captures_to_unembed(streams) as captured:
            of_streams, d_vocab = [stream for _, stream in captured], self.runtime.sites.d_vocab
            found = read_streams(of_streams, rows, self._unembed, top, chosen, d_vocab, self.runtime.device)
        return None if found is None else safetensors.numpy.save(found)

    @contextmanager
    def _captures_to_unembed(self, wanted: list[Wanted]) -> Iterator[list[tuple[np.ndarray, torch.Tensor]]]:
        """Yield captures, including other workers'. Logits computed inside the context do not belong to a step."""
        if self._config.lora_config is not None:
            raise UnsupportedSite("lenses are not supported with adapters: start the engine without enable_lora")

        def fetch(some: list[Wanted]) -> list[Captured]:
            return [*tensors_of(self.runtime.store.find(some))]

        captured = fetch(wanted) if self._exchange is None else self._exchange.everywhere(wanted, fetch)
        awaits, self._awaits_logits = self._awaits_logits, False
        try:
            yield [(positions, torch.as_tensor(rows)) for positions, rows in captured]
        finally:
            self._awaits_logits = awaits

    def do_attach(self, name: str, path: str, precision: str) -> None:
        """Copy an SAE from a file to the device."""
        dtype = dtype_of_precision(precision, self._config.model_config.dtype)
        self.runtime.dictionaries.attach(name, of_file(path), dtype)

    def do_detach(self, name: str) -> None:
        self.runtime.dictionaries.detach(name)

    def _unembed(self, rows_ND: torch.Tensor) -> torch.Tensor | None:
        if not self.runtime.has_tap[self._logits]:  # of another pipeline stage
            return None
        net = self._runner.get_model()
        norm = LastNorm.of(net, self.runtime.sites, "vllm")
        return net.compute_logits(norm(rows_ND, self._config.model_config.dtype))

    def do_measure(self, wanted: list[Wanted]) -> dict[str, Any]:
        """Describe captures as `do_fetch` would send them, without the rows' bytes (`shared.described`)."""
        return shared.described(self._stored(wanted))

    def do_fetch_windows(self, windows: list[Window], *receiver: Any) -> dict[str, Any]:
        """Fetch a window of rows for a receiver, as `do_fetch` does."""
        stored = self._stored([Wanted(*window[:4]) for window in windows])
        return self._sender.hand({i: rows.window(*windows[i][4:]) for i, rows in stored.items()}, *receiver)

    def do_bulk(self, verb: str, name: str, *args: Any) -> Any:
        """Run cells in batches: return `BatchFacts`' values, or a `Bulk` method's result. While vLLM defers a step's
        sampling until a grammar mask arrives, return `LATER` on all workers: in a batch, they wait for each other."""
        if self._bulk is None:
            batches = BatchModel(self._runner, self.kind, self.runtime.sites.layers, self._keys)
            self._bulk = Bulk(self.runtime, batches, self._in_batch, self._await_logits)
        model = self._bulk.model
        if verb == "facts":
            refusal = refusal_of(self._config) or model.refusal
            removes_keys = not refusal and self.runtime.step.removes_keys and self._keys.are_readable
            sequences = min(model.sequences, model.samples)
            return refusal, model.block, model.blocks, model.groups, model.rows, sequences, removes_keys
        if verb in ("open", "run") and model.is_busy:
            return LATER
        if verb == "open":
            job = msgspec.msgpack.decode(args[0], type=Job)
            # a request in the placement's slot has ended, but no step has reported it yet
            self._free(self.runtime.requests_at(job.lease.placement.slot))
            return self._bulk.open(name, job, {} if self._exchange is None else self._exchange.of_cells(job))
        if verb == "run":
            began, before = time.monotonic(), self._steps_at_batch
            result, self._steps_at_batch = self._bulk.run(name, *args), sum(self._steps)
            if result is None:
                return None
            result.seconds, result.stepped = time.monotonic() - began, self._steps_at_batch > before
            return msgspec.msgpack.encode(result)
        return self._bulk.close(name)

    @contextmanager
    def _in_batch(self) -> Iterator[None]:
        with self.at_work(), compat.without_graph():
            yield

    def _await_logits(self) -> None:
        self._awaits_logits = self.runtime.plan is not None

    def do_weight(self, name: str, layer: int | None) -> Shard | None:
        """Return this worker's shard of a weight; None if another worker returns it."""
        if name in ("W_K", "W_V", "b_K", "b_V"):  # several workers may have the same heads
            points = self.runtime.sites.points
            values = next(point.number for point in points if (point.kind, point.layer) == ("v", layer))
            if not self.runtime.shards[values].keeps:
                return None
        return shard_of(read_weight(self._runner.get_model(), self.runtime.sites.local(), "vllm", name, layer))

    def _stored(self, wanted: list[Wanted]) -> dict[int, StoredRows]:
        """Return the captures kept by this worker, by index in `wanted`."""
        runtime = self.runtime
        here = [i for i, (_, point, *_) in enumerate(wanted) if runtime.keeps_at(point) and runtime.has_tap[point]]
        return dict(zip(here, runtime.store.find([wanted[i] for i in here]), strict=True))

    def do_close(self) -> None:
        """Stop the threads that copy captures to the host. Existing captures stay readable."""
        self.runtime.step.close()
