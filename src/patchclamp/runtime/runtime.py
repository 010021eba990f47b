"""A model's runtime on one worker: admitted programs, the current step's plan, and captures.

The runtime's owner installs a program before its request is scheduled, and frees it when the request has ended. For
each engine step the owner calls `begin_step` once the batch is known (or `begin`, which always makes a new plan), runs
the model `at_work`, and calls `end`, all on the thread that steps the engine.

Under tensor parallelism a worker applies each op to its own columns (`shard_op`). `ResidentRows` tracks the rows that
programs read from the bank. `Continuity` relates each step to the previous step:

`quiet`: a decode step that reuses the plan, without any update.
`advanced`: a decode step that reuses the plan, with positions and captures advanced by one step.
`changed`: any other step; it gets a new plan.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from patchclamp.errors import (
    MissingSource,
    ModelError,
    Packed,
    PatchclampError,
    ShapeError,
    TokensError,
    UnsupportedSite,
    not_finite,
    pack,
)
from patchclamp.kernels.attention import PatternEdit
from patchclamp.kernels.code import call
from patchclamp.language import Site
from patchclamp.plan import APPLY, CAPTURE, Batch, BoundOp, BoundProgram, ProgramTable, StepPlan, make_plan
from patchclamp.plan.bind import Code, code_numbers
from patchclamp.plan.bound import (
    Action,
    Attended,
    AttentionReader,
    Blend,
    Factored,
    Keep,
    Noisy,
    PositionRange,
    RunCode,
    only_removes_keys,
    own_point,
    pack_columns,
    removed_keys,
    source_of,
)
from patchclamp.plan.room import Placement, resident_name
from patchclamp.plan.step import NUMBERS, PlannedCaptures
from patchclamp.plan.table import records_of_alike, shape_of
from patchclamp.runtime.attention import AttentionEdits, AttentionReading, EditedAttention, Keys, Queries
from patchclamp.runtime.dictionaries import Dictionaries, Reading
from patchclamp.runtime.host_step import Bank, HostStep, Step
from patchclamp.runtime.op import AtWork
from patchclamp.sites import Shard, SiteMap, View
from patchclamp.sites.tables import ROTATED
from patchclamp.store.captures import (
    ALIGNED,
    ITEM_BYTES,
    BufferSlice,
    CaptureChunk,
    CaptureStore,
    ScatteredSlices,
    tensors_of,
)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's limits on tables, bank, batches and capture buffers. The last four apply on a GPU only.

    max_programs: programs admitted at the same time
    cells: slots for cells graded in batches, in addition to program slots
    max_records: records of programs and cells, one for each point and position range
    bank_bytes: vectors on the device
    sae_bytes: attached SAEs on the device, reserved at start; 0: they use free memory when attached
    batch_share: time of graded batches while requests run, relative to the time of the engine's steps
    kept_bytes: captures of a step with a CUDA graph, at most half of `ring_bytes`; a step that captures more runs
        without a graph
    ring_bytes: captures in transit from the device
    pinned_bytes: captures in pinned host memory; the oldest move to pageable memory. None: a quarter of the free
        memory, within 4 to 32 GiB (`default_pinned_bytes`)
    active_sizes: step sizes, in tokens, for which graphs with taps are recorded; None: all that vLLM records. Steps of
        other sizes run without a graph if they have programs
    """

    max_programs: int = 256
    cells: int = 0
    max_records: int = 1 << 18
    bank_bytes: int = 1 << 28
    sae_bytes: int = 0
    batch_share: Annotated[float, msgspec.Meta(gt=0)] = 0.4
    kept_bytes: int = 1 << 27
    ring_bytes: int = 1 << 28
    pinned_bytes: int | None = None
    active_sizes: tuple[int, ...] | None = None


def shard_op(op: BoundOp, shards: Sequence[Shard], sites: SiteMap) -> BoundOp:
    """Restrict an op to this worker's shard of each row. `shards` [P]: the worker's shard at each point; an op's points
    are sharded identically.

    Vector keys get the worker's columns appended, and noise gets the index of its first column. Raises
    `UnsupportedSite` for noise on a shard that starts within a group of four columns, which are drawn together.
    """
    reader = op.action.reader if isinstance(op.action, Keep) else None
    keeps_row = isinstance(op.action, Keep) and not op.action.matrix and reader is None
    if not op.points or sites.shard_count(op.points[0]) == 1 or keeps_row:
        return op
    assert op.kind != APPLY or isinstance(op.action, Attended), "code requires a single worker"
    shard = shards[op.points[0]]
    if isinstance(reader, AttentionReader):
        size = sites.sizes.d_head
        begin, stop = shard.first // size, shard.end // size
        heads = range(max(reader.first, begin) - begin, min(reader.first + reader.heads, stop) - begin)
        if not heads:
            return op.at(np.zeros(len(shards), bool))
        own = msgspec.structs.replace(reader, first=heads.start, heads=len(heads))
        return msgspec.structs.replace(op, action=msgspec.structs.replace(op.action, reader=own))
    first, end = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else (shard.first, shard.end)
    first, end = max(first, shard.first) - shard.first, min(end, shard.end) - shard.first
    if first >= end:
        return op.at(np.zeros(len(shards), bool))
    return msgspec.structs.replace(
        op, columns=0 if (first, end) == (0, shard.end - shard.first) else pack_columns((first, end)),
        values=op.values if op.is_gated else tuple(_sharded_key(key, shard) for key in op.values),
        action=_shard_action(op.action, shard),
    )  # fmt: skip


def _shard_action(action: Action, shard: Shard) -> Action:
    if isinstance(action, Blend):
        return msgspec.structs.replace(action, mask=_sharded_key(action.mask, shard))
    if isinstance(action, Keep):
        return msgspec.structs.replace(action, matrix=_sharded_key(action.matrix, shard))
    if isinstance(action, Factored):
        return msgspec.structs.replace(action, factors=_sharded_key(action.factors, shard))
    if isinstance(action, Noisy):
        if shard.first % 4:
            raise UnsupportedSite(
                f"noise is drawn four columns at a time, but this worker's columns start at {shard.first}: use another "
                "tensor_parallel_size"
            )
        return msgspec.structs.replace(action, first_column=shard.first)
    return action


def _sharded_key(key: str, shard: Shard) -> str:
    """Append the shard's columns to a vector's key. A run's key is unchanged: its rows were captured sharded."""
    return f"{key}#{shard.first}:{shard.end}" if key.startswith("v:") else key


def columns_in(key: str) -> tuple[str, int | None, int | None]:
    """Split a key into the vector's key and its first and end column; None for all columns."""
    name, _, columns = key.partition("#")
    first, _, end = columns.partition(":")
    return (name, int(first), int(end)) if columns else (name, None, None)


class ResidentRows:
    """Tracks a bank's rows of inline vectors and runs. `captured` returns local captures [T, W] by (run, point)."""

    def __init__(
        self, bank: Bank, sites: SiteMap, captured: Callable[[list[tuple[str, int]]], list[torch.Tensor]]
    ) -> None:
        self._bank, self._sites, self._captured = bank, sites, captured
        self._found: dict[tuple[str, int], torch.Tensor] = {}  # prefetched rows of runs
        self._places: dict[str, tuple[int, int]] = {}  # by name: the rows' offset in the bank, and their width
        self._unwritten: dict[str, tuple[int, torch.Tensor]] = {}  # by name: the rows' offset, and the rows

    def __len__(self) -> int:
        return len(self._places)

    def find(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Fetch runs' local captures in one call, for use until the next `write`."""
        self._found = dict(zip(wanted, self._captured(list(wanted)), strict=True)) if wanted else {}

    def addresses(
        self, ops: Sequence[BoundOp], placement: Placement, vectors: Mapping[str, torch.Tensor],
        remote: Mapping[str, torch.Tensor],
    ) -> dict[str, tuple[int, int]]:  # fmt: skip
        """Return the bank (offset, width) of each key that the ops read. Rows that the bank lacks are taken from
        `vectors`, `remote` or a run, and written by the next `write`. If any are unavailable, raises the first
        `MissingSource` once all other rows have an address."""
        addresses: dict[str, tuple[int, int]] = {}
        missing: MissingSource | None = None
        for key in dict.fromkeys([key for op in ops for key in op.keys]):
            try:
                addresses[key] = self.address(key, placement, vectors, remote)
            except MissingSource as error:
                missing = missing or error
        if missing is not None:
            raise missing
        return addresses

    def address(
        self, key: str, placement: Placement, vectors: Mapping[str, torch.Tensor], remote: Mapping[str, torch.Tensor]
    ) -> tuple[int, int]:
        """Return the (offset, width) of a key's rows, as in `addresses`."""
        own = own_point(key)
        if own is not None:
            return placement.addresses[key][0], self._sites.points[own].width // self._sites.shard_count(own)
        name, first, end = columns_in(key)
        resident = resident_name(name, first is not None)
        begin, count = placement.addresses[resident]
        if resident in placement.load:
            source = source_of(name)
            if source is None:
                rows = vectors[name][:, first:end]
            else:
                found = remote.get(name, self._found.get(source))
                rows = self._captured([source])[0] if found is None else found
                if len(rows) < count:
                    raise MissingSource(
                        f"run {source[0]}: expected {count} rows of {self._sites.label(source[1])}, got {len(rows)}"
                    )
                self._check_whole(source, rows)
            self._unwritten[resident] = begin, rows[:count]
            self._places[resident] = begin, rows.shape[-1]
        if self._places.get(resident, (-1, 0))[0] != begin:
            raise MissingSource(f"the rows of {name[:40]} could not be loaded into the bank on first read")
        return self._places[resident]

    def _check_whole(self, source: tuple[str, int], rows: torch.Tensor) -> None:
        width = self._sites.points[source[1]].width // self._sites.shard_count(source[1])
        if rows.shape[-1] != width:
            raise MissingSource(
                f"run {source[0]} captured {self._sites.label(source[1])} projected: expected width {width}, got "
                f"{rows.shape[-1]}"
            )

    def write(self) -> None:
        """Write the pending rows in order, one copy per contiguous span. On failure, all of them count as missing."""
        unwritten, self._unwritten, self._found = self._unwritten, {}, {}
        try:
            self._write(list(unwritten.values()))
        except BaseException:
            self.forget(unwritten)
            raise

    def _write(self, rows: Sequence[tuple[int, torch.Tensor]]) -> None:
        neighbours: list[torch.Tensor] = []
        first = end = 0
        for begin, each in rows:
            if begin != end and neighbours:
                self._bank.write(first, neighbours)
                neighbours = []
            if not neighbours:
                first = begin
            neighbours.append(each)
            end = begin + each.numel()
        if neighbours:
            self._bank.write(first, neighbours)

    def forget(self, names: Iterable[str]) -> None:
        """Discard the locations of rows that are no longer in the bank."""
        for name in names:
            self._places.pop(name, None)


Sameness = Literal["quiet", "advanced", "changed"]


class Continuity:
    """The last planned step, the later steps that reuse its plan, and the capture chunk that they fill.

    `plan`, `batch`: the planned step's plan and batch; None if no step may reuse them. `steps`: the number of steps
    that advanced the plan. Any change to the programs of `table` invalidates all three.
    """

    def __init__(self, table: ProgramTable) -> None:
        self._table = table
        self._scheduled: list[str] | None = None  # the cached answer's requests, in the scheduler's order
        self._answer, self._answer_steps, self._answer_version = (False, True), 0, 0
        self.forget()

    def forget(self) -> None:
        """Invalidate the plan, so the next step gets a new plan."""
        self.plan: StepPlan | None = None
        self.batch: Batch | None = None
        self.steps: int = 0
        self._requests: list[str] = []
        self._source: PlannedCaptures | None = None
        self._chunk: CaptureChunk | None = None
        self._chunk_end = 0  # the next step, counted from the planned step, that the chunk can take

    def start(self, requests: list[str], batch: Batch, plan: StepPlan, device_labels: bool) -> None:
        """Let later steps reuse this plan. `device_labels`: True if the device already has the rows' positions."""
        self.forget()
        self.plan, self.batch, self._requests, self._version = plan, batch, requests, self._table.version
        self._next_position = batch.position + 1
        self._nothing_to_do = (
            plan.captures_nothing_ever and device_labels and not (self._table.coded or self._table.deciding)
        )

    def judge(self, requests: list[str], position: np.ndarray, total: int) -> Sameness:
        """Classify a step by its requests in the runner's order, their next positions, and the step's token count."""
        plan = self.plan
        if plan is None or self.steps >= plan.steady_steps or self._version != self._table.version:
            return "changed"
        if total != len(requests) or requests != self._requests:
            return "changed"
        if self._next_position.dtype != position.dtype:
            self._next_position = self._next_position.astype(position.dtype)
        if self._next_position.tobytes() != position.tobytes():  # the cheapest comparison
            return "changed"
        self._next_position += 1
        if self._nothing_to_do:
            return "quiet"
        self.steps += 1
        return "advanced"

    # -- answers to the scheduler: (a program acts in the step, a graph may be used)

    def answer(self, requests: list[str] | None) -> tuple[bool, bool] | None:
        """Return the cached answer if it holds for these requests, in scheduler order, one token later; else None."""
        if self._scheduled is None or self._answer_version != self._table.version or self._scheduled != requests:
            return None
        if not self._answer_steps:
            return None
        self._answer_steps -= 1
        return self._answer

    def keep_answer(self, requests: list[str] | None, answer: tuple[bool, bool], steps: int) -> None:
        """Cache an answer for `steps` further steps of the same requests; clear the cache if `requests` is None."""
        self._scheduled = None if requests is None else list(requests)
        self._answer, self._answer_steps, self._answer_version = answer, steps, self._table.version

    # -- captures

    def captured(self, place: BufferSlice | ScatteredSlices, run: np.ndarray) -> CaptureChunk | None:
        """Append the step's captures at `place` to the current chunk, or start a new chunk and return it.

        `run`: the index of each slot's run
        """
        assert self.plan is not None
        chunk = self._chunk
        fits = chunk is not None and self._chunk_end == self.steps and chunk.source is self._source
        self._chunk_end = self.steps + 1
        if chunk is not None and fits:  # a shrunk chunk has another source
            chunk.append(place)
            return None
        plan = self.plan
        self._source = PlannedCaptures(plan, run[plan.layout.slot], self.steps)
        self._chunk = CaptureChunk([place], plan.size * plan.unit_bytes, self._source)
        return self._chunk


class _InstalledProgram(msgspec.Struct):
    """An admitted program.

    slot: 0 if it could not be installed
    token_bytes: the maximum bytes that it captures per token
    readings: the readings that it uses and keeps alive
    attention: its attention edits, by query point
    """

    run: str
    slot: int
    token_bytes: int
    receipt: str
    readings: list[Reading | AttentionReading] = []
    attention: dict[int, list[PatternEdit]] = {}


class Arrival(NamedTuple):
    """A program to install.

    receipt: returned with the result, to confirm the installation
    checked: the positions whose rows at `embed` are also kept, for a self-check
    """

    request: str
    bound: BoundProgram
    placement: Placement
    receipt: str = ""
    checked: tuple[PositionRange, ...] = ()


class _Local(NamedTuple):
    """The part of a program that one worker applies.

    ops: the program's ops at local points
    added: the number of ops that this worker has prepended
    addresses: the bank (offset, width) of each key that the ops read
    token_bytes, readings, attention: as in `_InstalledProgram`
    """

    arrival: Arrival
    ops: Sequence[BoundOp]
    added: int
    addresses: Mapping[str, tuple[int, int]]
    token_bytes: int
    readings: list[Reading | AttentionReading]
    attention: dict[int, list[PatternEdit]]


class Runtime:
    """Applies the programs of one model on one worker's `device`."""

    sites: SiteMap
    limits: Limits
    device: torch.device

    def __init__(self, sites: SiteMap, limits: Limits, device: torch.device | str = "cpu", rank: int = 0) -> None:
        self.sites, self.limits, self.device = sites, limits, torch.device(device)
        # by point, like all arrays here: this worker's shard; True if sharded; True if this worker keeps its captures
        self.shards: list[Shard] = [sites.shard(point.number, rank) for point in sites.points]
        self._sharded = np.array([sites.shard_count(point.number) > 1 for point in sites.points])
        self._is_whole = not self._sharded.any()
        self._keeps_shard = np.array([shard.keeps for shard in self.shards])
        self.widths: np.ndarray = np.array([shard.end - shard.first for shard in self.shards])
        self.sampled: np.ndarray = np.array([point.rows == "sampled" for point in sites.points])
        self.is_query: np.ndarray = np.array([point.kind == ROTATED for point in sites.points])
        if limits.bank_bytes < 4 * int(self.widths.max()):
            raise ShapeError(
                f"expected bank_bytes of at least {4 * self.widths.max()}, a row of this model, got {limits.bank_bytes}"
            )
        self.table: ProgramTable = ProgramTable(
            limits.max_programs + limits.cells, len(sites.points), limits.max_records, self.sampled
        )
        self.bank: Bank = Bank(limits.bank_bytes // 4, device)
        self.store: CaptureStore = CaptureStore(self.widths, lambda: self.step.flush())
        self.plan: StepPlan | None = None
        self.steps_planned: int = 0
        self.dictionaries: Dictionaries = Dictionaries(self.device, limits.sae_bytes)
        self.resident: ResidentRows = ResidentRows(self.bank, sites, self._captured)
        # by the engine's request name; a program has no effect at or after its stop position
        self._admitted: dict[str, _InstalledProgram] = {}
        self._slot_of: dict[str, int] = {}
        self._stop_of: dict[str, int] = {}
        self.views: dict[int, View | None] = {}  # by point: its view in the tensor of its tap
        self.has_tap: np.ndarray = np.ones(len(sites.points), bool)  # True if this worker has the tap of a point
        self.keeps = True  # True if this worker, among those with the same rows, keeps captures
        # returns the rows of other workers that a request's program reads, by bank key; None: no other workers
        self.remote_rows: Callable[[str], Mapping[str, torch.Tensor]] | None = None
        self.failures: int = 0  # runs whose edits were not finite
        self.cell_errors: dict[int, Packed | None] = {}  # by slot, of the cells in the table
        self._errors: dict[str, Packed] = {}  # by the engine's name of a request: children of a request share its run
        self._code_errors: dict[str, Packed] = {}  # by run, since a run with code has only one request
        self._run_of_slot = np.full(limits.max_programs + limits.cells + 1, -1, np.int64)
        self.continuity: Continuity = Continuity(self.table)
        self._acts = b""  # `plan.active` as bytes, one per point
        self._token_bytes: collections.Counter[int] = collections.Counter()  # admitted programs, by their `token_bytes`
        self._code: dict[int, tuple[str, Code]] = {}  # by number: the run and its code
        self._attention: dict[int, EditedAttention] = {}  # by number, negative
        self._edits: AttentionEdits | None = None  # of the current step
        self._code_of: dict[str, list[int]] = {}
        self._code_stop: dict[str, int] = {}  # by the engine's name of a request: the stop of its code
        self.monitor: AtWork | None = None  # reads the rows of every step
        self.keys: Keys | None = None  # of the engine, for programs that read attention
        self.use(HostStep(self.table, self.bank))

    step: Step

    def use(self, step: Step) -> None:
        """Execute steps with this executor from now on."""
        self.step = step
        step.code, step.encode = self, self.encode

    # -- vectors and results, between steps

    def hold_code(self, run: str, code: Mapping[int, Code]) -> None:
        """Keep the code of a run's ops until the run has ended."""
        self._code |= {number: (run, function) for number, function in code.items()}
        if code:
            self._code_of.setdefault(run, []).extend(code)

    def run_code(self, number: int, rows_NW: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor | None:
        """Run the code `number` on rows at a point and at positions [N]. An exception becomes the run's error; that
        call and all later calls return None.

        Such runs are not counted in `failures`, because programs with code share no cached blocks.
        """
        run, code = self._code[number]
        if run in self._code_errors:
            return None
        try:
            return call(code, rows_NW, point, position)
        except PatchclampError as error:
            self._code_errors[run] = pack(error)
            return None

    def edit_attention(
        self, numbers: list[int], rows_MW: torch.Tensor, point: int, position_M: np.ndarray, count_B: np.ndarray,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Store the rows at a layer's query point, or edit the rows of its attention output (`AttentionEdits`).
        `numbers`: the (negative) code number of each request's attention edits."""
        edited = [self._attention[number] for number in numbers]
        if self._edits is None:
            assert self.keys is not None
            self._edits = AttentionEdits(self.keys)
        if point == edited[0].point:
            self._edits.store_queries(point, rows_MW.view(len(rows_MW), self._heads(point), -1))
            return rows_MW
        return self._edits.change(edited, rows_MW, position_M, count_B, dtype)

    def _collect_edits(self, edits: AttentionEdits) -> None:
        """Fail the runs whose attention edits failed a check in this step."""
        for edited, error in edits.failures():
            if error is None:
                [z] = self.sites.resolve(Site("z", self.sites.points[edited.point].layer))
                self.fail([edited.slot], not_finite(self.sites.label(z.point)))
            else:
                self._code_errors.setdefault(edited.run, pack(error))

    @torch.inference_mode()
    def encode(self, number: int, rows_NW: torch.Tensor, queries: Queries) -> torch.Tensor:
        """Compute a reading (features or attention) of rows. On an exception, fail its programs and return NaN."""
        try:
            reading = self.dictionaries.numbered(number)
            if isinstance(reading, AttentionReading):
                assert self.keys is not None
                edits = {
                    (own.slot, point): each for own in self._admitted.values() for point, each in own.attention.items()
                }
                return reading.read(rows_NW, queries, self.keys, self._heads(queries.point), edits)
            return reading.read(rows_NW)
        except Exception as error:
            readers = [each.slot for each in self._admitted.values() if number in (one.number for one in each.readings)]
            self.fail(readers, error)
            return torch.full((len(rows_NW), self.dictionaries.numbers_of(number)), torch.nan, device=rows_NW.device)

    def _heads(self, point: int) -> int:
        """Return the number of this worker's heads at a query point."""
        return int(self.widths[point]) // self.sites.sizes.d_head

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> tuple[np.ndarray, torch.Tensor]:
        """Return the positions and rows that a run captured, as in `CaptureStore.fetch`."""
        return self.store.fetch(run, point, op, first)

    def _captured(self, wanted: list[tuple[str, int]]) -> list[torch.Tensor]:
        """Return this worker's captured rows for each (run, point) pair."""
        return [rows for _, rows in tensors_of(self.store.find((run, point, None, 0) for run, point in wanted))]

    def release(self, runs: Iterable[str]) -> None:
        """Free the runs' captures, code and code errors."""
        for run in runs:
            self._code_errors.pop(run, None)
            self.drop_code(run)  # if the run was never admitted
            if run in self.store:
                self.store.release(run)

    def captured_here(self, run: str, point: int) -> bool:
        """True if this worker keeps a run's captures at a point."""
        return self.keeps_at(point) and bool(self.has_tap[point]) and run in self.store

    def keeps_at(self, point: int) -> bool:
        """True if this worker keeps captures at a point, rather than another worker with the same rows."""
        return bool(self._keeps_shard[point]) if self._sharded[point] else self.keeps

    def status(self) -> dict[str, int]:
        """Return the counts of held resources (all 0 once everything is released), failures, and planned steps."""
        return {
            "programs": len(self),
            "failures": self.failures,
            "runs": len(self.store),
            "captured_bytes": self.store.bytes,
            "code": len(self._code) + len(self._attention),
            "steps_planned": self.steps_planned,
        }

    def steps_left(self, positions: Iterable[tuple[str, int]]) -> int:
        """Return a lower bound on the number of decode steps in which any program still acts; 0 if none. `positions`:
        each request with its next position."""
        stops = self._stop_of
        return next((stops[name] - position for name, position in positions if position < stops.get(name, 0)), 0)

    @property
    def has_code(self) -> bool:
        """True if an admitted program has code."""
        return bool(self._code_stop)

    def runs_code(self, positions: Iterable[tuple[str, int]]) -> bool:
        """True if code may still run, which rules out graphs. `positions`: each request with its next position."""
        stops = self._code_stop
        return bool(stops) and any(position < stops.get(request, 0) for request, position in positions)

    def captures_at_most(self, tokens: Mapping[str, int], total: int, limit: int) -> bool:
        """True if a step with `tokens` per request, `total` in all, captures at most `limit` bytes."""
        if max(self._token_bytes, default=0) * total <= limit:
            return True
        programs = ((self._admitted.get(request), count) for request, count in tokens.items())
        return sum(program.token_bytes * count for program, count in programs if program is not None) <= limit

    def fail(self, slots: Iterable[int], error: Exception) -> None:
        """Fail the requests at the given slots. A request keeps its first error."""
        packed = pack(error)
        requests = {slot: request for request, slot in self._slot_of.items()}
        for slot in slots:
            request = requests.get(slot)
            if slot in self.cell_errors:
                self.cell_errors[slot] = self.cell_errors[slot] or packed
            if request is not None and request not in self._errors:
                self._errors[request] = packed
                self.failures += 1

    def fail_step(self, requests: list[str], error: Exception) -> None:
        """Fail the programs of a step that could not be planned, or whose captures could not be stored."""
        self.plan = None
        self.continuity.forget()
        self.fail(self.slots(requests).tolist(), error)

    def collect_failures(self) -> None:
        """Fail the requests with non-finite edits that the device has reported so far."""
        for slot, word in self.step.failed():
            point, reason, position = word & (1 << 28) - 1, word >> 28 & 3, word >> 32
            if not reason:
                self.fail([slot], not_finite(self.sites.label(point)))
            else:
                self.fail([slot], self._attention_error(slot, point, reason, position))

    def _attention_error(self, slot: int, point: int, reason: int, position: int) -> PatchclampError:
        """Return the error for keys that could not be removed. `reason`: as in `kernels.paged_attention`."""
        layer = self.sites.points[point].layer
        edits = (each for own in self._admitted.values() if own.slot == slot for each in own.attention.items())
        path = next((of[0].path for query, of in edits if self.sites.points[query].layer == layer), "")  # "": a cell
        if reason & 1:
            return UnsupportedSite("attention output does not equal pattern × values: edit z", path)
        return TokensError(f"the token at position {position} sees no key", path)

    # -- a step

    def install(
        self, request: str, bound: BoundProgram, placement: Placement, vectors: Mapping[str, torch.Tensor],
        receipt: str = "",
    ) -> None:  # fmt: skip
        """Install a program, as in `install_all`. Raises its error if it cannot be installed."""
        for error in self.install_all([Arrival(request, bound, placement, receipt)], vectors).values():
            raise error

    def install_all(self, arrivals: Sequence[Arrival], vectors: Mapping[str, torch.Tensor]) -> dict[str, Exception]:
        """Install programs before their requests are scheduled: write their records and the rows that they read at
        their placements. `vectors`: inline vectors that are not in the bank yet.

        Returns the errors, such as `MissingSource`, of programs that could not be installed, by request. Rows that were
        written stay in the bank for later programs.
        """
        errors: dict[str, Exception] = {}
        by_shape: dict[Hashable, list[_Local]] = collections.defaultdict(list)
        with contextlib.suppress(MissingSource):  # raised below for each program that reads the rows
            self.resident.find(self._sources(arrivals))
        has_all = self._has_all
        for arrival in arrivals:
            try:
                local = self._localise(arrival, vectors, has_all)
                by_shape[local.added, shape_of(local.ops)].append(local)
            except Exception as error:
                errors[arrival.request] = error
        self.resident.write()
        for alike in by_shape.values():
            try:
                self._install(alike)
            except Exception:  # retry one by one, since only one of them may be at fault
                for local in alike:
                    try:
                        self._install([local])
                    except Exception as error:
                        errors[local.arrival.request] = error
        return errors

    def _sources(self, arrivals: Sequence[Arrival]) -> list[tuple[str, int]]:
        """Return the (run, point) pairs that must be loaded into the bank and that this worker captured."""
        names = dict.fromkeys(name for arrival in arrivals for name in arrival.placement.load)
        sources = [source for name in names if (source := source_of(name)) is not None]
        return [source for source in sources if self.captured_here(*source)]

    def _localise(self, arrival: Arrival, vectors: Mapping[str, torch.Tensor], has_all: bool) -> _Local:
        """Restrict a program to this worker, and find its rows' bank addresses. `has_all`: the result of `_has_all`."""
        # rows to load may have an old address, which is invalid even if loading fails
        self.resident.forget((*arrival.placement.evicted, *arrival.placement.load))
        remote = self.remote_rows(arrival.request) if self.remote_rows is not None else {}
        ops = arrival.bound.ops if has_all else [op.at(self.has_tap) for op in arrival.bound.ops]
        # count captures regardless of the worker that keeps them: all workers of a stage must choose the same graphs
        check = self._self_check(arrival.checked)
        kept = [(op.points, op.action) for op in (*check, *ops) if isinstance(op.action, Keep)]
        token_bytes = sum([self._token_bytes_at(point, keep) for points, keep in kept for point in points])
        if not has_all:
            keeps = np.where(self._sharded, self._keeps_shard, self.keeps)
            ops = [shard_op(op, self.shards, self.sites) for op in ops]
            ops = [op.at(keeps) if op.kind == CAPTURE else op for op in ops]
            check = [op.at(keeps) for op in check]
        readings = list[Reading | AttentionReading]()
        ops = self._with_encoders(arrival.bound.run, [self._with_reading(op, readings) for op in ops])
        addresses = self.resident.addresses(ops, arrival.placement, vectors, remote)
        attention = self._edits_of_attention(ops, addresses)
        if self._removes_keys(arrival.bound.ops):
            first = [*self._removed_keys(ops), *check]
        else:
            first = [*self._code_of_attention(arrival, ops, attention), *check]
        nowhere = np.zeros(len(self.sites.points), bool)
        ops = [*first, *(op.at(nowhere) if isinstance(op.action, Attended) else op for op in ops)]
        return _Local(arrival, ops, len(first), addresses, token_bytes, readings, attention)

    def _self_check(self, ranges: tuple[PositionRange, ...]) -> list[BoundOp]:
        """Create the capture op of a self-check. It is the last op that this worker prepends, so its index is
        `SELF_CHECK` and it precedes the program's edits."""
        if not ranges:
            return []
        [embed] = self.sites.resolve(Site("embed"))
        return [BoundOp("self-check", Keep(0), (embed.point,), (), ranges).at(self.has_tap)]

    def _edits_of_attention(
        self, ops: Sequence[BoundOp], addresses: Mapping[str, tuple[int, int]]
    ) -> dict[int, list[PatternEdit]]:
        """Return attention edits by query point."""
        edits: dict[int, list[PatternEdit]] = collections.defaultdict(list)
        size = self.sites.sizes.d_head
        for op in ops:
            action, rows = op.action, None
            if not isinstance(action, Attended):
                continue
            if action.rows:
                begin, width = addresses[action.rows]
                count = max(row + (stop - start - 1) * step for start, stop, row, step in op.ranges) + 1
                rows = self.bank.data[begin : begin + count * width].view(count, width)
            queries, keys = np.array(op.ranges), np.array(action.keys) if action.keys else None
            by_heads: dict[tuple[int, int], PatternEdit] = {}  # layers share what is computed from an edit
            for point in op.points:
                first, end = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else (0, int(self.widths[point]))
                heads = first // size, end // size
                edit = by_heads.setdefault(heads, PatternEdit(*heads, queries, keys, action.factor, rows, op.path))
                edits[point].append(edit)
        return edits

    def _removes_keys(self, ops: Sequence[BoundOp]) -> bool:
        """True if a program's attention edits run as `RemoveKeys` ops on the device; otherwise they run as code."""
        return self.step.removes_keys and only_removes_keys(ops)

    def _removed_keys(self, ops: Sequence[BoundOp]) -> Iterator[BoundOp]:
        """Yield the ops that remove keys from attention, at `z`. They precede all other ops. Raises `UnsupportedSite`
        for a layer whose scores cannot be recomputed."""
        for op in ops:
            if not isinstance(op.action, Attended):
                continue
            assert self.keys is not None
            for point in op.points:
                try:
                    self.keys.facts(point)
                except UnsupportedSite as error:
                    raise error.under(op.path) from None
            yield from removed_keys(op, self.sites)

    def _code_of_attention(
        self, arrival: Arrival, ops: Sequence[BoundOp], attention: Mapping[int, list[PatternEdit]]
    ) -> list[BoundOp]:
        """Return ops that run the attention edits as code, at the query point and `z`. They precede all other ops."""
        made = list[BoundOp]()
        for point, edits in attention.items():
            assert self.keys is not None
            mine = [op for op in ops if isinstance(op.action, Attended) and point in op.points]
            # one call per step, over all positions from the first query to the last: each call reads all keys
            ranges = (PositionRange(min(op.ranges[0].start for op in mine), max(op.ranges[-1].stop for op in mine)),)
            [z] = self.sites.resolve(Site("z", self.sites.points[point].layer))
            number, run = -next(code_numbers), arrival.bound.run
            self._attention[number] = EditedAttention(run, point, arrival.placement.slot, edits)
            self._code_of.setdefault(run, []).append(number)
            made += [BoundOp(mine[0].path, RunCode(number), (at,), (), ranges) for at in (point, z.point)]
        return made

    def _with_reading(self, op: BoundOp, readings: list[Reading | AttentionReading]) -> BoundOp:
        """Set the reading's index in a capture of features or attention, and add the reading to `readings`. Other ops
        are returned unchanged."""
        if not isinstance(op.action, Keep) or op.action.reader is None:
            return op
        readings.append(self.dictionaries.reading(op.action))
        return msgspec.structs.replace(
            op, action=msgspec.structs.replace(op.action, pool=readings[-1].number, in_step=True)
        )

    def _with_encoders(self, run: str, ops: Sequence[BoundOp]) -> Sequence[BoundOp]:
        """Return the ops, with each edit that needs a full encoder replaced by a `RunCode`."""
        numbers = {i: (next(code_numbers), function) for i, function in self.dictionaries.code_of(ops).items()}
        self.hold_code(
            run,
            {
                number: Code(ops[i].path, function, ("positions",), what="the feature edit")
                for i, (number, function) in numbers.items()
            },
        )
        return [msgspec.structs.replace(op, action=RunCode(numbers[i][0])) if i in numbers else op
                for i, op in enumerate(ops)] if numbers else ops  # fmt: skip

    @property
    def _has_all(self) -> bool:
        """True if this worker has every tap and all columns, and keeps all captures."""
        return self._is_whole and self.keeps and bool(self.has_tap.all())

    def _install(self, alike: Sequence[_Local]) -> None:
        """Install programs of one shape (`shape_of`) whose rows are in the bank, with their records in one array."""
        addresses, points = [local.addresses for local in alike], len(self.sites.points)
        records, counts = records_of_alike([local.ops for local in alike], addresses, points, -alike[0].added)
        placements = [local.arrival.placement for local in alike]
        slots = np.array([placement.slot for placement in placements])
        self.table.install_alike(records, counts, slots, np.array([placement.record for placement in placements]))
        for (request, bound, placement, receipt, _), *_, token_bytes, readings, attention in alike:
            if request in self._slot_of:  # installed before another program's error
                continue
            if any(op.kind == CAPTURE for op in bound.ops):
                self._run_of_slot[placement.slot] = self.store.open(bound.run)
            if token_bytes:
                self.step.prepare()
                self._token_bytes[token_bytes] += 1
            self._admitted[request] = _InstalledProgram(
                bound.run, placement.slot, token_bytes, receipt, readings, attention
            )
            self._slot_of[request] = placement.slot
            # count ops of all pipeline stages: code with taps may differ from stock's in the last bits, and the results
            # of a request's batchmates must not depend on the stage
            self._stop_of[request] = max([each.stop for op in bound.ops if op.points for each in op.ranges], default=0)
            code = [op for op in bound.ops if op.kind == APPLY]
            if self._removes_keys(code):
                code = [op for op in code if not isinstance(op.action, Attended)]
            code_stop = max([each.stop for op in code for each in op.ranges], default=0)
            if code_stop:
                self._code_stop[request] = code_stop

    def install_cells(self, records: np.ndarray, counts: np.ndarray, slots: np.ndarray, begins: np.ndarray) -> None:
        """Write cells' records [N, R] at leased slots and record offsets. Their rows must be in the bank."""
        self.table.install_alike(records, counts, slots, begins)
        self.cell_errors.update(dict.fromkeys(slots.tolist()))

    def drop_cells(self, slots: Iterable[int]) -> None:
        """Free the cells' slots."""
        there = [slot for slot in slots if slot in self.cell_errors]
        self.table.drop_all(there)
        for slot in there:
            del self.cell_errors[slot]

    @functools.cached_property
    def _bytes_of_token(self) -> list[list[int]]:
        """A capture's aligned bytes per token, by dtype and point; 0 for sampled rows (never written by graphs)."""
        items = [4 if self.step.unit is NUMBERS else int(item) for item in ITEM_BYTES]
        rows = [-(-item * self.widths // ALIGNED) * ALIGNED for item in items]
        return [np.where(self.sampled, 0, of_dtype).tolist() for of_dtype in rows]

    def _token_bytes_at(self, point: int, keep: Keep) -> int:
        """Return a capture's maximum aligned bytes per token at a point, including the results of rows that are pooled
        or encoded in the step."""
        kept = self._bytes_of_token[keep.dtype][point]
        if keep.products:
            item = 4 if self.step.unit is NUMBERS else int(ITEM_BYTES[keep.dtype])
            kept = -(-item * keep.products // ALIGNED) * ALIGNED
        if keep.reader is not None:
            return kept + -(-4 * keep.numbers // ALIGNED) * ALIGNED
        return 2 * kept if keep.in_step else kept

    def refuse(self, request: str, run: str, error: Exception) -> None:
        """Fail the run of a program that could not be installed. This counts as a failure, because its request fills
        prefix-cache blocks whose contents do not match their keys."""
        self._admitted[request] = _InstalledProgram(run, 0, 0, "")
        self._errors[request] = pack(error)
        self.failures += 1

    def has(self, request: str) -> bool:
        """True if a request has an installed program."""
        return request in self._slot_of

    def outcome(self, request: str) -> tuple[str, Packed | None]:
        """Return the receipt of a request's program ("" if none was installed), and its run's error."""
        admitted = self._admitted.get(request)
        if admitted is None:
            return "", None
        return admitted.receipt, self._code_errors.get(admitted.run) or self._errors.get(request)

    def run_of(self, request: str) -> str | None:
        """Return the run of a request's installed program, or None."""
        return self._admitted[request].run if request in self._slot_of else None

    def request_of(self, run: str) -> str | None:
        """Return an unfinished run's request, or None."""
        return next((request for request, admitted in self._admitted.items() if admitted.run == run), None)

    def free(self, requests: Iterable[str]) -> None:
        """Free the programs of ended requests. Their captures stay until they are released."""
        for request in requests:
            admitted = self._admitted.pop(request, None)
            if admitted is not None:
                self._free(request, admitted)

    def drop_code(self, run: str) -> None:
        """Free a run's code and attention edits."""
        for number in self._code_of.pop(run, ()):
            del (self._code if number > 0 else self._attention)[number]

    def _free(self, request: str, admitted: _InstalledProgram) -> None:
        self.drop_code(admitted.run)
        self._errors.pop(request, None)
        self._code_errors.pop(admitted.run, None)
        if not admitted.slot:
            return
        self.continuity.forget()  # the chunk holds captures that may soon be released
        for table in (self._slot_of, self._stop_of, self._code_stop):
            table.pop(request, None)
        if admitted.token_bytes:
            self._token_bytes[admitted.token_bytes] -= 1
            if not self._token_bytes[admitted.token_bytes]:
                del self._token_bytes[admitted.token_bytes]
        self.table.drop(admitted.slot)
        self.store.close(admitted.run)
        self._run_of_slot[admitted.slot] = -1

    def requests_at(self, slot: int) -> list[str]:
        """Return the requests with programs at a slot."""
        return [request for request, own in self._slot_of.items() if own == slot]

    def slots(self, requests: list[str]) -> np.ndarray:
        """Return the slots of a step's requests, [N]; 0 without a program."""
        return np.fromiter(map(self._slot_of.get, requests, repeat(0)), np.int64, len(requests))

    def __len__(self) -> int:
        """Return the number of admitted programs."""
        return len(self._admitted)

    def begin(self, batch: Batch, requests: Sequence[str] = ()) -> None:
        """Plan a step for a batch, if it has programs. Later steps of the same `requests` may reuse the plan."""
        self.continuity.forget()
        self.plan = self._edits = None  # `end` was not called if the last step failed
        if not batch.slot.any():
            return
        self.steps_planned += 1
        self.plan = make_plan(batch, self.table, self.widths, self.step.unit, self.dictionaries.numbers_of)
        active = self.plan.active
        self._acts = (active | self.is_query if self.table.removing else active).tobytes()
        self.continuity.start(list(requests), batch, self.plan, self.step.unit is not NUMBERS)
        self.step.begin(self.plan, batch, 0)

    def begin_step(
        self, requests: list[str], row: np.ndarray, position: np.ndarray, count: np.ndarray, total: int,
        samples: np.ndarray | None = None,
    ) -> Sameness:  # fmt: skip
        """Begin a step with the last plan or a new plan. The caller may overwrite the arrays afterwards.

        row, position, count: each request's first row, first position and number of tokens
        total: the number of tokens
        samples: the number of trailing tokens per request that get logits; None: one each
        """
        self._edits = None
        sameness = self.continuity.judge(requests, position, total)
        if sameness == "changed":
            row, position, count = row.astype(np.int64), position.astype(np.int64), count.astype(np.int64)
            self.begin(Batch(self.slots(requests), row, position, count, total, samples), requests)
            return sameness
        self.plan = self.continuity.plan
        if sameness == "advanced":
            assert self.plan is not None
            assert self.continuity.batch is not None
            self.step.begin(self.plan, self.continuity.batch, self.continuity.steps)
        return sameness

    def acts_at(self, point: int) -> bool:
        """True if a program acts at a point in this step."""
        return self.plan is not None and bool(self._acts[point])

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Apply the step's plan at a point, and then the monitor. Every tap calls this."""
        if self.step.recording or (self.plan is not None and self._acts[point]):
            self._apply(point, hidden, residual)
        if self.monitor is not None:
            self.monitor.apply(point, hidden, residual)

    def _apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Apply the step's plan at a point. An exception fails the programs that act at the point, and the step
        continues."""
        try:
            width, view, shape = int(self.widths[point]), self.views.get(point), hidden.shape
            if view is None and shape[1:] == (width,) and (residual is None or residual.shape == shape):  # common case
                self._carry_out(point, hidden, residual)
            else:
                self._apply_viewed(point, hidden, residual, view, width)
        except Exception as error:
            if self.plan is None or self.continuity.batch is None:  # recording a graph at engine start
                raise
            self.fail(self.table.acting_at(point, self.continuity.batch.slot), error)

    def _apply_viewed(
        self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None, view: View | None, width: int
    ) -> None:
        """Apply the plan at a point whose rows are part of the tap's tensor, or differ from it in shape."""
        shape = hidden.shape
        if view is not None and view.by_head:
            shape = hidden.shape[1], hidden.shape[3]
        if not fits(shape, view.tensor_width if view is not None and view.tensor_width else width):
            raise ModelError(f"{self.sites.describe_point(point)}: expected width {width}, got {list(hidden.shape)}")
        if residual is not None and residual.shape != hidden.shape:
            raise ModelError(
                f"{self.sites.describe_point(point)}: hidden states and residual differ in shape, {list(hidden.shape)} "
                f"and {list(residual.shape)}"
            )
        if view is not None and (view.heads or view.by_head or view.factor != 1.0):
            self._apply_to_copy(point, hidden, view, width)
            return
        pair = None if residual is None else residual.view(-1, width)
        rows = hidden.view(-1, width) if view is None else columns(hidden, view, width)
        self._carry_out(point, rows, pair)

    def _carry_out(self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None) -> None:
        bad = self.step.apply(point, hidden_RW, residual_RW, bool(self.sampled[point]))
        if bad is not None and len(bad):
            self.fail(bad, not_finite(self.sites.label(point)))

    def _apply_to_copy(self, point: int, hidden: torch.Tensor, view: View, width: int) -> None:
        """Apply the plan to a copy of a point's rows that are not a strided view of the tensor; write back changes."""
        part = hidden
        if view.heads:
            by_head = hidden.view(-1, view.heads, view.tensor_width // view.heads)
            part = by_head[..., view.first : view.first + view.size]
        elif view.by_head:
            part = hidden.transpose(1, 2)
        copy_RW = (part.float() * view.factor if view.factor != 1.0 else part).reshape(-1, width).contiguous()
        before_RW = copy_RW.clone()
        self._carry_out(point, copy_RW, None)
        after = torch.where(copy_RW == before_RW, part.reshape(-1, width).to(copy_RW.dtype), copy_RW / view.factor)
        part.copy_(after.view(part.shape))

    def end(self) -> None:
        """End the step: report failed attention edits, and pass the step's captures to the store."""
        plan, self.plan = self.plan, None
        if self._edits is not None:
            self._collect_edits(self._edits)
        captured = None if plan is None else self.step.end(plan)
        if captured is None:
            return
        chunk = self.continuity.captured(captured, self._run_of_slot)
        if chunk is not None:
            self.store.add(chunk)


def fits(shape: Sequence[int], width: int) -> bool:
    """True if the product of some trailing dimensions is `width`."""
    size = 1
    for dimension in reversed(shape):
        size *= dimension
        if size >= width:
            break
    return size == width


def columns(hidden: torch.Tensor, view: View, width: int) -> torch.Tensor:
    """Return a view of a point's columns, [R, W], in a wider tensor."""
    return hidden.view(-1, view.tensor_width)[:, view.first : view.first + width]
