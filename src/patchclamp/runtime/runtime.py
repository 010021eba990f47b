"""The runtime: one model's admitted programs, the plan of the step at hand, and everything captured.

Its owner calls, for each engine step: `drop` and `admit` as requests go and come, `begin` once the batch is known,
then lets the model run `at_work`, and `end`.  It belongs to the thread that steps the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import torch

from patchclamp.errors import CapacityError, MissingSource, pack
from patchclamp.plan import CAPTURE, Batch, Bound, ProgramTable, StepPlan, make_plan
from patchclamp.plan.bind import run_key
from patchclamp.plan.table import records_of
from patchclamp.runtime.step import HostStep, Step
from patchclamp.sites import SiteMap
from patchclamp.store import Bank, CaptureStore
from patchclamp.store.captures import CapturedStep

Packed = tuple[str, str, str | None]


class Limits(msgspec.Struct, frozen=True):
    """Sizes: programs at once, their records (one a point and piece), bytes of vectors at hand, and (on a GPU) bytes
    that a step with a CUDA graph may capture; a step that would capture more runs without one."""

    max_programs: int = 256
    max_records: int = 1 << 18
    bank_bytes: int = 1 << 28
    kept_bytes: int = 1 << 28


class _Admitted(msgspec.Struct):
    """A request's program, its run's number in the store, and while it is seated its slot and pinned keys."""

    bound: Bound
    number: int
    slot: int = 0
    keys: list[str] = []
    failed: bool = False
    token_bytes: int = 0


class Runtime:
    """Programs of one model of `sites` on `device`."""

    def __init__(self, sites: SiteMap, limits: Limits, device: torch.device | str = "cpu") -> None:
        self.sites, self.limits, self.device = sites, limits, torch.device(device)
        self.widths = np.array([point.width for point in sites.points])
        self.sampled = np.array([point.rows == "sampled" for point in sites.points])
        self.table = ProgramTable(limits.max_programs, len(sites.points), limits.max_records)
        self.bank = Bank(limits.bank_bytes // 4, device)
        self.store = CaptureStore(self.widths)
        self.plan: StepPlan | None = None
        self.steps_planned = 0
        self._vectors: dict[str, tuple[torch.Tensor, int]] = {}  # host copies of inline vectors, and their holders
        self._admitted: dict[str, _Admitted] = {}
        self._errors: dict[str, Packed] = {}
        self._run_of_slot = np.full(limits.max_programs + 1, -1, np.int64)
        self._seated: tuple[list[str], int, np.ndarray] | None = None
        self._last: tuple[Batch, StepPlan, int] | None = None
        self.step: Step = HostStep(self.table, self.bank)

    # -- vectors and results, between steps

    def hold(self, vectors: dict[str, torch.Tensor], holders: Iterable[str]) -> None:
        """Keeps inline vectors [n, W], each for one more holder every time `holders` names it."""
        for key in holders:
            held, count = self._vectors.get(key) or (vectors[key], 0)
            self._vectors[key] = (held, count + 1)

    def let_go(self, keys: Iterable[str]) -> None:
        """One holder less; a vector without holders stays only as long as the bank has room."""
        for key in keys:
            held, holders = self._vectors.pop(key)
            if holders > 1:
                self._vectors[key] = (held, holders - 1)

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions and rows of a run, as `CaptureStore.fetch`."""
        self.step.flush()
        return self.store.fetch(run, point, op)

    def release(self, runs: Iterable[str]) -> None:
        """Lets runs' captures go."""
        for run in runs:
            self._errors.pop(run, None)
            if run in self.store:
                self.store.release(run)
                for point in range(len(self.sites.points)):
                    self.bank.forget(run_key(run, point))

    def status(self) -> dict[str, int]:
        """Counts of what is held: all but the free records fall back to 0 when everything is done and released."""
        return {
            "programs": len(self),
            "runs": len(self.store),
            "pinned": self.bank.pinned,
            "vectors": len(self._vectors),
            "free_records": self.table.free_records,
            "steps_planned": self.steps_planned,
        }

    def concerns(self, requests: Iterable[str]) -> bool:
        """Whether any of the requests has a program."""
        return any(request in self._admitted for request in requests)

    def captures_at_most(self, tokens: Mapping[str, int]) -> int:
        """A bound on the bytes that a step of so many tokens of each request captures."""
        known = ((self._admitted.get(request), count) for request, count in tokens.items())
        return sum(admitted.token_bytes * count for admitted, count in known if admitted is not None)

    def take_error(self, run: str) -> Packed | None:
        """What went wrong with a run in here, once."""
        return self._errors.pop(run, None)

    # -- a step

    def admit(self, request: str, bound: Bound) -> None:
        """Takes note of a request's program; it gets a slot when it is first in a step."""
        if request not in self._admitted:
            sizes = [4 * int(self.widths[list(op.points)].sum()) for op in bound.ops if op.kind == CAPTURE]
            self._admitted[request] = _Admitted(bound, self.store.open(bound.run), token_bytes=sum(sizes))
            self._seated = None

    def drop(self, requests: Iterable[str]) -> None:
        """Frees what finished requests held; their captures stay until released."""
        for request in requests:
            admitted = self._admitted.pop(request, None)
            if admitted is not None:
                self._unseat(admitted)

    def seat(self, requests: list[str]) -> np.ndarray:
        """The slots of a step's requests, [N]; 0 for one without a program.

        Slots go to the requests of the step; a preempted one gives its slot up when it is needed. A program that cannot
        be seated leaves its error with its run, whose values are then never shown.
        """
        if self._seated is not None and self._seated[0] == requests and self._seated[1] == self.table.version:
            return self._seated[2]
        known = [self._admitted.get(request) for request in requests]
        for admitted in known:
            if admitted is not None and admitted.slot == 0 and not admitted.failed:
                self._seat(admitted, {id(other) for other in known})
        slots = np.array([0 if admitted is None else admitted.slot for admitted in known], np.int64)
        self._seated = (requests, self.table.version, slots)
        return slots

    def _seat(self, admitted: _Admitted, staying: set[int]) -> None:
        while True:
            try:
                return self._take_slot(admitted)
            except CapacityError as error:
                idle = [other for other in self._admitted.values() if other.slot and id(other) not in staying]
                if not idle:
                    return self._fail(admitted, error)
                self._unseat(idle[0])
            except Exception as error:
                return self._fail(admitted, error)

    def _take_slot(self, admitted: _Admitted) -> None:
        bound, keys, addresses = admitted.bound, [], {}
        try:
            for key in dict.fromkeys(key for op in bound.ops for key in op.values):
                self._load(key)
                addresses[key] = self.bank.pin(key)
                keys.append(key)
            admitted.slot = self.table.admit(*records_of(bound.ops, addresses, len(self.sites.points)))
        except Exception:
            for key in keys:
                self.bank.unpin(key)
            raise
        admitted.keys = keys
        self._run_of_slot[admitted.slot] = admitted.number

    def _unseat(self, admitted: _Admitted) -> None:
        if admitted.slot:
            self.table.drop(admitted.slot)
            self._run_of_slot[admitted.slot] = -1
            admitted.slot = 0
        for key in admitted.keys:
            self.bank.unpin(key)
        admitted.keys = []

    def _fail(self, admitted: _Admitted, error: Exception) -> None:
        admitted.failed = True
        self._errors[admitted.bound.run] = pack(error)

    def __len__(self) -> int:
        """Programs admitted."""
        return len(self._admitted)

    def begin(self, batch: Batch) -> None:
        """Plans a step; without programs in it the step stays idle."""
        if not batch.slot.any():
            self.plan = self._last = None
            return
        if self._goes_on(batch):
            assert self._last is not None
            self.plan = self._last[1].later()
            self.step.begin(self.plan, batch, fresh=False)
        else:
            self.steps_planned += 1
            self.plan = make_plan(batch, self.table, self.widths, self.sampled, self.step.unit)
            self.step.begin(self.plan, batch, fresh=True)
        self._last = (batch, self.plan, self.table.version)

    def _goes_on(self, batch: Batch) -> bool:
        """Whether this step is the last one with every request one token on, and nothing else to do."""
        if self._last is None or self._last[1].holds == 0 or self._last[2] != self.table.version:
            return False
        last = self._last[0]
        pairs = ((batch.slot, last.slot), (batch.row, last.row), (batch.count, last.count))
        return all(np.array_equal(a, b) for a, b in pairs) and np.array_equal(batch.position, last.position + 1)

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Carries out the step's plan at a point: what every tap ends in."""
        if self.step.recording or (self.plan is not None and self.plan.active[point]):
            width = self.widths[point]
            pair = None if residual is None else residual.view(-1, width)
            self.step.apply(point, hidden.view(-1, width), pair, bool(self.sampled[point]))

    def end(self) -> None:
        """Hands the step's captures to the store."""
        plan, captures = self.plan, self.table.captures
        self.plan = None
        if plan is None:
            return
        run = self._run_of_slot[captures.slot]
        for data, target, mine in self.step.end(plan):
            mine = slice(None) if mine is None else mine
            self.store.add(
                CapturedStep(
                    data, run[mine], captures.point[mine], captures.op[mine], plan.begin[mine], plan.count[mine],
                    target, captures.dtype[mine],
                )
            )  # fmt: skip

    def _load(self, key: str) -> None:
        """Brings a key into the bank: an inline vector from its host copy, a run's rows from the store."""
        if key in self.bank:
            return
        if key.startswith("v:"):
            if key not in self._vectors:
                raise MissingSource(f"vector {key[2:14]} is not here")
            self.bank.put(key, self._vectors[key][0])
            return
        run, point = key[2:].rsplit(":", 1)
        positions, rows = self.fetch(run, int(point))
        if len(positions) == 0:
            raise MissingSource(f"run {run} captured nothing at {self.sites.label(int(point))}")
        self.bank.put(key, rows)
