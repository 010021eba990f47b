"""The runtime: one model's admitted programs, the plan of the step at hand, and everything captured.

Its owner calls, for each engine step: `drop` and `admit` as requests go and come, `begin` once the batch is known,
then lets the model run `at_work`, and `end`.  It belongs to the thread that steps the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource, pack
from patchclamp.kernels import fused
from patchclamp.plan import Batch, Bound, ProgramTable, StepPlan, make_plan
from patchclamp.plan.bind import run_key
from patchclamp.plan.table import records_of
from patchclamp.sites import SiteMap
from patchclamp.store import Bank, CaptureStore
from patchclamp.store.captures import CapturedStep

Packed = tuple[str, str, str | None]


class Limits(msgspec.Struct, frozen=True):
    """Sizes of the tables: programs at once, their records (one a point and piece), and bytes of vectors at hand."""

    max_programs: int = 256
    max_records: int = 1 << 18
    bank_bytes: int = 1 << 28


class _Admitted(msgspec.Struct):
    slot: int
    run: str
    number: int
    keys: list[str]


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
        self._kept = torch.empty(0)

    # -- vectors and results, between steps

    def hold(self, vectors: dict[str, torch.Tensor]) -> None:
        """Keeps inline vectors [n, W] for one more holder each."""
        for key, rows in vectors.items():
            held, holders = self._vectors.get(key, (rows, 0))
            self._vectors[key] = (held, holders + 1)

    def let_go(self, keys: Iterable[str]) -> None:
        """One holder less; a vector without holders stays only as long as the bank has room."""
        for key in keys:
            held, holders = self._vectors.pop(key)
            if holders > 1:
                self._vectors[key] = (held, holders - 1)

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions and fp32 rows of a run, as `CaptureStore.fetch`."""
        return self.store.fetch(run, point, op)

    def release(self, runs: Iterable[str]) -> None:
        """Lets runs' captures go."""
        for run in runs:
            self._errors.pop(run, None)
            if run in self.store:
                self.store.release(run)
                for point in range(len(self.sites.points)):
                    self.bank.forget(run_key(run, point))

    def take_error(self, run: str) -> Packed | None:
        """What went wrong with a run in here, once."""
        return self._errors.pop(run, None)

    # -- a step

    def admit(self, request: str, bound: Bound) -> None:
        """Takes a request's program; an error is kept for its run, and the request then runs without."""
        if request in self._admitted:
            return
        keys: list[str] = []
        try:
            addresses = {}
            for key in dict.fromkeys(key for op in bound.ops for key in op.values):
                self._load(key)
                addresses[key] = self.bank.pin(key)
                keys.append(key)
            records, counts = records_of(bound.ops, addresses, len(self.sites.points))
            slot = self.table.admit(records, counts)
        except Exception as error:
            for key in keys:
                self.bank.unpin(key)
            self._errors[bound.run] = pack(error)
            return
        number = self.store.open(bound.run)
        self._admitted[request] = _Admitted(slot, bound.run, number, keys)
        self._run_of_slot[slot] = number

    def drop(self, requests: Iterable[str]) -> None:
        """Frees what finished requests held; their captures stay until released."""
        for request in requests:
            admitted = self._admitted.pop(request, None)
            if admitted is None:
                continue
            self.table.drop(admitted.slot)
            self._run_of_slot[admitted.slot] = -1
            for key in admitted.keys:
                self.bank.unpin(key)

    def slot_of(self, request: str) -> int:
        """A request's slot, 0 if it has no program."""
        admitted = self._admitted.get(request)
        return 0 if admitted is None else admitted.slot

    def __len__(self) -> int:
        """Programs admitted."""
        return len(self._admitted)

    def begin(self, batch: Batch) -> None:
        """Plans a step; without programs in it the step stays idle."""
        if not batch.slot.any():
            self.plan = None
            return
        self.steps_planned += 1
        self.plan = make_plan(batch, self.table, self.widths, self.sampled)
        self._kept = torch.empty(self.plan.size)

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Carries out the step's plan at a point: what every tap ends in."""
        plan = self.plan
        if plan is None or not plan.active[point]:
            return
        width = self.widths[point]
        hidden = hidden.view(-1, width)
        residual = None if residual is None else residual.view(-1, width)
        rows = plan.sampled if self.sampled[point] else plan.tokens
        fused.apply(hidden, residual, rows, point, self.table, plan, self.bank.data, self._kept)

    def end(self) -> None:
        """Hands the step's captures to the store."""
        plan, captures = self.plan, self.table.captures
        self.plan = None
        if plan is None or plan.size == 0:
            return
        run = self._run_of_slot[captures.slot]
        self.store.add(
            CapturedStep(self._kept, run, captures.point, captures.op, plan.begin, plan.count, plan.target)
        )

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
        positions, rows = self.store.fetch(run, int(point))
        if len(positions) == 0:
            raise MissingSource(f"run {run} captured nothing at {self.sites.label(int(point))}")
        self.bank.put(key, rows)
