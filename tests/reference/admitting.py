"""Tables and runtimes that find room for what they admit, as admission in an engine does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

import patchclamp as pc
from patchclamp.plan import BoundProgram, ProgramTable
from patchclamp.plan.room import Placement, Room, bank_sizes
from patchclamp.plan.table import record_count
from patchclamp.runtime import Runtime


def placed(room: Room, records: int, sizes: Mapping[str, tuple[int, int]]) -> Placement:
    placement = room.place(records, sizes)
    if placement is None:
        raise pc.CapacityError("no room now")
    return placement


class Table(ProgramTable):
    def __init__(self, slots: int, points: int, records: int, sampled: np.ndarray | None = None) -> None:
        super().__init__(slots, points, records, sampled)
        self._room, self._placements = Room(slots, records, 0), {}

    def admit(self, records: np.ndarray, counts: np.ndarray) -> int:
        placement = placed(self._room, len(records), {})
        self.install(records, counts, placement.slot, placement.record)
        self._placements[placement.slot] = placement
        return placement.slot

    def drop(self, slot: int) -> None:
        super().drop(slot)
        self._room.free(self._placements.pop(slot))

    @property
    def free_records(self) -> int:
        return len(self.records) - self._room.counts()["records"]


class Admitter:
    """Admits programs to a runtime, each by its request's name."""

    def __init__(self, runtime: Runtime) -> None:
        limits = runtime.limits
        self.runtime = runtime
        self.room = Room(limits.max_programs, limits.max_records, limits.bank_bytes // 4)
        self._placements: dict[str, Placement] = {}

    def admit(self, request: str, bound: BoundProgram, vectors: Mapping[str, torch.Tensor] | None = None) -> None:
        vectors = dict(vectors or {})
        sizes = bank_sizes(
            bound, {key: rows.numpy() for key, rows in vectors.items()}, self.runtime.sites, lambda *_: 1
        )
        placement = placed(self.room, record_count(bound.ops), sizes)
        self.runtime.install(request, bound, placement, vectors, "receipt")
        self._placements[request] = placement

    def free(self, requests: Iterable[str]) -> None:
        requests = list(requests)
        self.runtime.free(requests)
        for request in requests:
            if request in self._placements:
                self.room.free(self._placements.pop(request))
