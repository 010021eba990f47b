"""The runtime: one model's admitted programs, the plan of the step at hand, and everything captured.

Its owner admits a program before its request is scheduled; then, for each engine step, it calls `drop` and
`assign_slot` as requests go and come, `begin_step` (or `begin`) once the batch is known, lets the model run `at_work`,
and calls `end`.  All on the thread that steps the engine.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource, ModelError, RunError, ShapeError, not_finite, pack
from patchclamp.kernels.code import call
from patchclamp.plan import APPLY, CAPTURE, Batch, BoundProgram, ProgramTable, StepPlan, make_plan
from patchclamp.plan.bind import Code
from patchclamp.plan.bound import BoundOp, Keep, source_of
from patchclamp.plan.records import records_of
from patchclamp.plan.step import NUMBERS
from patchclamp.runtime.continuity import Continuity, Sameness
from patchclamp.runtime.shards import columns_in, shard_op
from patchclamp.runtime.step import HostStep, Step
from patchclamp.sites import SiteMap, View
from patchclamp.store.bank import Bank
from patchclamp.store.captures import ALIGNED, ITEM_BYTES, CaptureStore

Packed = tuple[str, str, str | None]


class Limits(msgspec.Struct, frozen=True):
    """Sizes: programs at once, their records (one a point and piece) and bytes of vectors at hand.

    On a GPU also: bytes that a step with a CUDA graph may capture, at most half of what follows (one that would capture
    more runs without a graph); bytes of captures on their way off the device; bytes of captures in pinned host memory
    (the oldest move to ordinary memory); and the sizes, in tokens of a step, for which graphs with taps are recorded
    (None: all that vLLM records; steps of programs of other sizes run without a graph).
    """

    max_programs: int = 256
    max_records: int = 1 << 18
    bank_bytes: int = 1 << 28
    kept_bytes: int = 1 << 27
    ring_bytes: int = 1 << 28
    pinned_bytes: int = 1 << 32
    active_sizes: tuple[int, ...] | None = None


class _Admitted(msgspec.Struct):
    """An admitted program: its slot, the keys it pins, the bytes it captures a token at most, and the first
    position from which on it does nothing any more, and the one from which on it runs no code."""

    slot: int
    keys: list[str]
    token_bytes: int
    stop: int
    code_stop: int


class Runtime:
    """Programs of one model of `sites` on `device`."""

    def __init__(self, sites: SiteMap, limits: Limits, device: torch.device | str = "cpu", rank: int = 0) -> None:
        self.sites, self.limits, self.device = sites, limits, torch.device(device)
        self.shards = [sites.shard(point.number, rank) for point in sites.points]  # of each point's row that is here
        self._cut = np.array([sites.shard_count(point.number) > 1 for point in sites.points])  # where a row has pieces
        self._mine = np.array([shard.keeps for shard in self.shards])  # where that of this worker is kept here
        self.widths = np.array([shard.end - shard.first for shard in self.shards])
        self.sampled = np.array([point.rows == "sampled" for point in sites.points])
        if limits.bank_bytes < 4 * int(self.widths.max()):
            raise ShapeError(f"a row of this model is up to {4 * self.widths.max()} bytes; raise bank_bytes")
        self.table = ProgramTable(limits.max_programs, len(sites.points), limits.max_records, self.sampled)
        self.bank = Bank(limits.bank_bytes // 4, device)
        self.store = CaptureStore(self.widths, lambda: self.step.flush())
        self.plan: StepPlan | None = None
        self.steps_planned = 0
        self._banked: dict[str, set[str]] = {}  # by run: keys of its rows that have been in the bank
        self._vectors: dict[str, tuple[torch.Tensor, int]] = {}  # host copies of inline vectors, and their holders
        self._admitted: dict[str, _Admitted] = {}  # by run
        self._run_of: dict[str, str] = {}  # by the engine's name of a request
        self._request_of: dict[str, str] = {}
        self._slot_of: dict[str, int] = {}  # by the engine's name of a request, while its run is admitted
        self._stop_of: dict[str, int] = {}
        self.views: dict[int, View | None] = {}  # where a point's columns lie in the tensor of its tap
        self.here = np.ones(len(sites.points), bool)  # points of which this worker has the tap
        self.keeps = True  # whether what is captured is kept here; of workers that see the same rows one keeps it
        self._remote_rows: dict[str, dict[str, torch.Tensor]] = {}  # by run: rows that another worker captured, by key
        self.failures = 0  # runs whose edits were not finite
        self._errors: dict[str, Packed] = {}
        self._run_of_slot = np.full(limits.max_programs + 1, -1, np.int64)
        self.continuity = Continuity(self.table)
        self._acts = b""  # of the plan at hand: whether it does anything at a point, a byte each
        self._token_bytes: collections.Counter[int] = (
            collections.Counter()
        )  # admitted programs by what a token of theirs captures
        self._code: dict[int, tuple[str, Code]] = {}  # by number: its run, and what it runs
        self._code_of: dict[str, list[int]] = {}
        self._code_stop: dict[str, int] = {}  # by the engine's name of a request: where its code has done its work
        self.step: Step = HostStep(self.table, self.bank)
        self.step.code = self.run_code

    # -- vectors and results, between steps

    def hold_vectors(self, vectors: dict[str, torch.Tensor], holders: Iterable[str]) -> None:
        """Keeps inline vectors [n, W], each for one more holder every time `holders` names it."""
        for key in holders:
            held, count = self._vectors.get(key) or (vectors[key], 0)
            self._vectors[key] = (held, count + 1)

    def hold_code(self, run: str, code: Mapping[int, Code]) -> None:
        """Keeps what a run's `Apply`s run, until it is finished."""
        self._code |= {number: (run, each) for number, each in code.items()}
        if code:
            self._code_of[run] = list(code)

    def run_code(self, number: int, rows: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor | None:
        """Code on rows [n, W] at a point and at positions [n]; what it raises is its run's error, and None is given
        from then on.

        Such a run does not count among the `failures`: nobody shares the cached blocks of code.
        """
        run, code = self._code[number]
        if run in self._errors:
            return None
        try:
            return call(code, rows, point, position)
        except RunError as error:
            self._errors[run] = pack(error)
            return None

    def release_vectors(self, keys: Iterable[str]) -> None:
        """One holder less; a vector without holders stays only as long as the bank has room."""
        for key in keys:
            held, holders = self._vectors.pop(key)
            if holders > 1:
                self._vectors[key] = (held, holders - 1)

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions and rows of a run, as `CaptureStore.fetch`."""
        return self.store.fetch(run, point, op)

    def release(self, runs: Iterable[str]) -> None:
        """Lets runs' captures go."""
        for run in runs:
            self._errors.pop(run, None)
            self._remote_rows.pop(run, None)
            if run in self.store:
                self.store.release(run)
                for key in self._banked.pop(run, ()):
                    self.bank.forget(key)

    def is_missing(self, key: str) -> bool:
        """Whether a run's rows, by their key, are neither at hand nor captured here."""
        return key not in self.bank and not self.has(key)

    def has(self, key: str) -> bool:
        """Whether a run's rows, by their key, were captured here or sent from another worker."""
        run, point = _source(key)
        return key in self._remote_rows.get(run, ()) or self._captured(run, point)

    def rows(self, key: str) -> torch.Tensor:
        """A run's rows [n, W], captured here or sent from another worker."""
        run, point = _source(key)
        remote = self._remote_rows.get(run, {}).get(key)
        return self.fetch(run, point)[1] if remote is None else remote

    def add_remote_rows(self, rows: dict[str, torch.Tensor]) -> None:
        """Keeps rows [n, W] of runs that another worker captured, until their runs are released."""
        for key, remote in rows.items():
            if not self.has(key):
                self._remote_rows.setdefault(_source(key)[0], {})[key] = remote

    def _captured(self, run: str, point: int) -> bool:
        return self.keeps_at(point) and bool(self.here[point]) and run in self.store

    def keeps_at(self, point: int) -> bool:
        """Whether what is captured at a point is kept here, rather than by another worker that has the same."""
        return bool(self._mine[point]) if self._cut[point] else self.keeps

    def status(self) -> dict[str, int]:
        """Counts of what is held: all but the free records fall back to 0 when everything is done and released."""
        return {
            "programs": len(self),
            "failures": self.failures,
            "runs": len(self.store),
            "captured_bytes": self.store.bytes,
            "remote_rows": sum(map(len, self._remote_rows.values())),
            "pinned": self.bank.pinned,
            "vectors": len(self._vectors),
            "code": len(self._code),
            "free_records": self.table.free_records,
            "steps_planned": self.steps_planned,
        }

    def steps_left(self, positions: Iterable[tuple[str, int]]) -> int:
        """For how many steps at least, of a token a request, a program of any of the requests, given with their next
        positions, has something left to do; 0 if none has."""
        stops = self._stop_of
        return next((stops[name] - position for name, position in positions if position < stops.get(name, 0)), 0)

    @property
    def has_code(self) -> bool:
        """Whether any request here has code."""
        return bool(self._code_stop)

    def runs_code(self, positions: Iterable[tuple[str, int]]) -> bool:
        """Whether a program of any of the requests has code that may still run: such steps have no graph."""
        stops = self._code_stop
        return bool(stops) and any(position < stops.get(request, 0) for request, position in positions)

    def captures_at_most(self, tokens: Mapping[str, int], total: int, limit: int) -> bool:
        """Whether a step of so many tokens of each request, `total` in all, captures at most `limit` bytes."""
        if max(self._token_bytes, default=0) * total <= limit:
            return True
        admitted = ((self._admitted.get(self._run_of.get(request, "")), count) for request, count in tokens.items())
        return sum(program.token_bytes * count for program, count in admitted if program is not None) <= limit

    def fail(self, slots: Iterable[int], point: int) -> None:
        """Fails the runs of some slots, whose edits at a point are not finite; the first error counts."""
        error = pack(not_finite(self.sites.label(point)))
        runs = {program.slot: run for run, program in self._admitted.items()}
        for slot in slots:
            if slot in runs and runs[slot] not in self._errors:
                self._errors[runs[slot]] = error
                self.failures += 1

    def collect_failures(self) -> None:
        """Takes note of failures on the device, of whichever run."""
        for slot, point in self.step.failed():
            self.fail([slot], point)

    def take_error(self, run: str) -> Packed | None:
        """What went wrong with a run in here, once."""
        return self._errors.pop(run, None)

    # -- a step

    def admit(self, bound: BoundProgram) -> None:
        """Admits a program before its request is scheduled, so that no request ever runs without its program.

        Raises `CapacityError` when it does not fit (now, or ever) and `MissingSource` when what it reads is gone.
        """
        keys: list[str] = []
        addresses: dict[str, tuple[int, int]] = {}
        here = [shard_op(op.at(self.here), self.shards, self.sites) for op in bound.ops]
        kept = np.where(self._cut, self._mine, self.keeps)
        ops = here if kept.all() else [op.at(kept) if op.kind == CAPTURE else op for op in here]
        try:
            for key in dict.fromkeys(key for op in ops for key in op.keys):
                self._load(key)
                addresses[key] = self.bank.pin(key)
                keys.append(key)
            slot = self.table.admit(*records_of(ops, addresses, len(self.sites.points)))
        except Exception:
            for key in keys:
                self.bank.unpin(key)
            raise
        # of all that happens here, whoever keeps it: workers of one stage must choose the same graphs
        size = sum(self._token_size(op) for op in here if op.kind == CAPTURE)
        # of all that happens anywhere: code with taps may differ from stock's in the last bits, and what a request's
        # batchmates get must not depend on which stage a program acts on
        stop = max((each.stop for op in bound.ops if op.points for each in op.ranges), default=0)
        code = max((each.stop for op in bound.ops if op.kind == APPLY for each in op.ranges), default=0)
        self._admitted[bound.run] = _Admitted(slot, keys, size, stop, code)
        if size:
            self._token_bytes[size] += 1
            self.step.prepare()
        self._run_of_slot[slot] = self.store.open(bound.run)

    def _token_size(self, op: BoundOp) -> int:
        """Bytes that an op captures of a token, aligned; sampled rows never pass through what a graph keeps."""
        assert isinstance(op.action, Keep)
        item = 4 if self.step.unit is NUMBERS else int(ITEM_BYTES[op.action.dtype])
        points = np.array(op.points, np.int64)
        rows = item * self.widths[points[~self.sampled[points]]]
        return int((-(-rows // ALIGNED) * ALIGNED).sum())

    def assign_slot(self, request: str, run: str) -> None:
        """The engine's own name of a run's request; a run that was never admitted gets an error instead."""
        if run in self._admitted:
            self._run_of[request], self._request_of[run] = run, request
            self._slot_of[request], self._stop_of[request] = self._admitted[run].slot, self._admitted[run].stop
            if self._admitted[run].code_stop:
                self._code_stop[request] = self._admitted[run].code_stop
        else:
            self._errors[run] = pack(MissingSource(f"run {run} was not reserved before its request"))

    def finish(self, run: str) -> None:
        """Frees a run's slot; its captures stay until released."""
        for number in self._code_of.pop(run, ()):
            del self._code[number]
        if run not in self._admitted:
            return
        self.collect_failures()
        self.continuity.forget()  # it holds captures that may soon be released
        admitted, request = self._admitted.pop(run), self._request_of.pop(run, "")
        self._slot_of.pop(request, None)
        self._stop_of.pop(request, None)
        self._code_stop.pop(request, None)
        if admitted.token_bytes:
            self._token_bytes[admitted.token_bytes] -= 1
            if not self._token_bytes[admitted.token_bytes]:
                del self._token_bytes[admitted.token_bytes]
        self.table.drop(admitted.slot)
        self.store.close(run)
        self._run_of_slot[admitted.slot] = -1
        for key in admitted.keys:
            self.bank.unpin(key)

    def drop(self, requests: Iterable[str]) -> None:
        """Frees what finished or aborted requests held."""
        for request in requests:
            if request in self._run_of:
                self.finish(self._run_of.pop(request))

    def slots(self, requests: list[str]) -> np.ndarray:
        """The slots of a step's requests, [N]; 0 for one without a program."""
        return np.fromiter(map(self._slot_of.get, requests, repeat(0)), np.int64, len(requests))

    def __len__(self) -> int:
        """Admitted programs."""
        return len(self._admitted)

    def begin(self, batch: Batch, requests: Sequence[str] = ()) -> None:
        """Plans a step of a batch, whose `requests` later steps may go on with; without programs it stays idle."""
        self.continuity.forget()
        self.plan = None
        if not batch.slot.any():
            return
        self.steps_planned += 1
        self.plan = make_plan(batch, self.table, self.widths, self.step.unit)
        self._acts = self.plan.active.tobytes()
        self.continuity.start(list(requests), batch, self.plan, self.step.unit is not NUMBERS)
        self.step.begin(self.plan, batch, 0)

    def begin_step(
        self, requests: list[str], row: np.ndarray, position: np.ndarray, count: np.ndarray, total: int
    ) -> Sameness:  # fmt: skip
        """Begins a step of requests with their first rows, first positions and numbers of tokens, `total` in all:
        goes on with the last plan, or plans anew. The arrays may change after it."""
        sameness = self.continuity.judge(requests, position, total)
        if sameness == "changed":
            row, position, count = row.astype(np.int64), position.astype(np.int64), count.astype(np.int64)
            self.begin(Batch(self.slots(requests), row, position, count, total), requests)
            return sameness
        self.plan = self.continuity.plan
        if sameness == "advanced":
            assert self.plan is not None
            assert self.continuity.batch is not None
            self.step.begin(self.plan, self.continuity.batch, self.continuity.steps)
        return sameness

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Carries out the step's plan at a point: what every tap ends in."""
        if (self.plan is None or not self._acts[point]) and not self.step.recording:
            return
        width, view, shape = int(self.widths[point]), self.views.get(point), hidden.shape
        if view is None and shape[1:] == (width,) and (residual is None or residual.shape == shape):  # as most are
            self._carry_out(point, hidden, residual)
            return
        if view is not None and view.by_head:
            shape = hidden.shape[1], hidden.shape[3]
        if not fits(shape, view.whole if view is not None and view.whole else width):
            raise ModelError(
                f"{self.sites.describe_point(point)} should be {width} wide; its tensor is {list(hidden.shape)}"
            )
        if residual is not None and residual.shape != hidden.shape:
            raise ModelError(
                f"{self.sites.describe_point(point)}: the two halves of the stream do not match, {list(hidden.shape)} "
                f"and {list(residual.shape)}"
            )
        if view is not None and (view.heads or view.by_head or view.factor != 1.0):
            self._apply_apart(point, hidden, view, width)
            return
        pair = None if residual is None else residual.view(-1, width)
        rows = hidden.view(-1, width) if view is None else columns(hidden, view, width)
        self._carry_out(point, rows, pair)

    def _carry_out(self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None) -> None:
        bad = self.step.apply(point, hidden_RW, residual_RW, bool(self.sampled[point]))
        if bad is not None and len(bad):
            self.fail(bad, point)

    def _apply_apart(self, point: int, hidden: torch.Tensor, view: View, width: int) -> None:
        """A point that is no part of its tensor as it lies: it is made of it, and what was changed goes back."""
        theirs = hidden
        if view.heads:
            theirs = hidden.view(-1, view.heads, view.whole // view.heads)[..., view.first : view.first + view.size]
        elif view.by_head:
            theirs = hidden.transpose(1, 2)
        made_RW = (theirs.float() * view.factor if view.factor != 1.0 else theirs).reshape(-1, width).contiguous()
        before_RW = made_RW.clone()
        self._carry_out(point, made_RW, None)
        after = torch.where(made_RW == before_RW, theirs.reshape(-1, width).to(made_RW.dtype), made_RW / view.factor)
        theirs.copy_(after.view(theirs.shape))

    def end(self) -> None:
        """Hands the step's captures to the store."""
        plan, self.plan = self.plan, None
        place = None if plan is None else self.step.end(plan)
        if plan is None or place is None:
            return
        chunk = self.continuity.captured(place, self._run_of_slot)
        if chunk is not None:
            self.store.add(chunk)

    def _load(self, key: str) -> None:
        """Brings a key into the bank: an inline vector from its host copy, a run's rows from the store."""
        if key in self.bank:
            return
        if key.startswith("v:"):
            name, first, end = columns_in(key)
            if name not in self._vectors:
                raise MissingSource(f"vector {key[2:14]} is not here")
            self.bank.put(key, self._vectors[name][0][:, first:end])
            return
        run, point = _source(key)
        rows = self.rows(key)
        if len(rows) == 0:
            raise MissingSource(f"run {run} captured nothing at {self.sites.label(point)}")
        self.bank.put(key, rows)
        self._banked.setdefault(run, set()).add(key)


def fits(shape: Sequence[int], width: int) -> bool:
    """Whether a tensor's last dimensions are a row of so many columns."""
    size = 1
    for many in reversed(shape):
        size *= many
        if size >= width:
            break
    return size == width


def columns(hidden: torch.Tensor, view: View, width: int) -> torch.Tensor:
    """A point's columns of a tensor that has others beside them, [R, W], as a view."""
    return hidden.view(-1, view.whole)[:, view.first : view.first + width]


def _source(key: str) -> tuple[str, int]:
    found = source_of(key)
    assert found is not None, key
    return found
