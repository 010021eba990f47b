"""The program table: the records of every admitted request, by slot and point.

A slot is a request's number while it is admitted; slot 0 belongs to nobody.  The records of slot s at point p are
`records[first[s, p] : first[s, p + 1]]`, in program order; a record holds for positions start … stop−1.  The tables
have a fixed size and are written only when a request comes or goes, so a device copy stays valid in between.
"""

from __future__ import annotations

import numpy as np

from patchclamp.plan.bound import APPLY, CAPTURE
from patchclamp.plan.capture_layout import CaptureRanges
from patchclamp.plan.records import RECORD, named


class ProgramTable:
    """Records of up to `slots` requests at `points` points, `records` in all.

    first [slots + 1, points + 1]: int32, the first record of each slot at each point
    generation [slots + 1]: int32, how many programs each slot has had
    records [records]: of `RECORD`
    version: how often the table has changed
    captures: the capture ranges
    changed: the slots, and the (begin, end) of records, written since a device's copy was last brought up to date
    sampled [points]: whether the rows of a point are the sampled ones; nowhere if not given
    coded: slots with code among their records
    """

    def __init__(self, slots: int, points: int, records: int, sampled: np.ndarray | None = None) -> None:
        self.first = np.zeros((slots + 1, points + 1), np.int32)
        self.generation = np.zeros(slots + 1, np.int32)
        self._acts = np.zeros((slots + 1, points), bool)  # whether a slot has records at a point
        self._acting = np.zeros(points, np.int64)  # how many slots have records there
        self.records = np.zeros(records, RECORD)
        self.version = 0
        self.changed: tuple[set[int], list[tuple[int, int]]] = (set(), [])
        self.sampled = np.zeros(points, bool) if sampled is None else sampled
        self.captures = CaptureRanges(self.sampled)
        self.coded: set[int] = set()
        self._installed: set[int] = set()

    def install(self, records: np.ndarray, counts: np.ndarray, slot: int, begin: int) -> None:
        """Writes a request's records, sorted by point, with `counts` [points] of them at each. Their place is the one
        that `plan.room` gave: a free `slot`, and the records from `begin` on."""
        self.install_alike(records[None], counts[None], np.array([slot]), np.array([begin]))

    def install_alike(self, records: np.ndarray, counts: np.ndarray, slots: np.ndarray, begins: np.ndarray) -> None:
        """The same for requests with as many records each: [N, R], with counts [N, points], slots [N], begins [N]."""
        places = begins[:, None] + np.arange(records.shape[1])
        self.generation[slots] = self.generation[slots] % (1 << 30) + 1
        self.records[places] = records
        self.first[slots, 0] = begins
        self.first[slots, 1:] = begins[:, None] + np.cumsum(counts, axis=1)
        self._acts[slots] = counts > 0
        self._acting += np.count_nonzero(counts, axis=0)
        self._add_captures(slots, places, records, counts)
        self.coded.update(slots[(records["kind"] == APPLY).any(axis=1)].tolist())
        for slot, begin in zip(slots.tolist(), begins.tolist(), strict=True):
            self._mark_changed(slot, begin, begin + records.shape[1])
            self._installed.add(slot)

    def drop(self, slot: int) -> None:
        """Frees a slot and its records."""
        self._installed.remove(slot)
        self._acting -= self._acts[slot]
        self.first[slot] = self._acts[slot] = 0
        self.captures.drop(slot)
        self.coded.discard(slot)
        self._mark_changed(slot, 0, 0)

    def active(self, slots: np.ndarray) -> np.ndarray:
        """Whether any of the slots has records at a point, bool [points]. No slot but 0 may stand there twice."""
        if np.count_nonzero(slots) == len(self):
            return self._acting > 0
        return np.logical_or.reduce(self._acts[slots], axis=0)

    def acting_at(self, point: int, slots: np.ndarray) -> list[int]:
        """The slots, among these, that have records at a point."""
        return slots[self._acts[slots, point]].tolist()

    def __len__(self) -> int:
        """Admitted requests."""
        return len(self._installed)

    def _mark_changed(self, slot: int, begin: int, end: int) -> None:
        self.version += 1
        slots, records = self.changed
        slots.add(slot)
        if end > begin:
            records.append((begin, end))

    def take_changed(self) -> tuple[set[int], list[tuple[int, int]]]:
        """`changed`, which begins anew."""
        changed, self.changed = self.changed, (set(), [])
        return changed

    def _add_captures(self, slots: np.ndarray, places: np.ndarray, records: np.ndarray, counts: np.ndarray) -> None:
        """Takes the captures among records [N, R] that were written at their places; those of all requests together
        where they are alike but for their positions."""
        captures = records["kind"] == CAPTURE
        if not captures.any():
            return
        kept = np.flatnonzero(captures[0])
        fields = named(records[:, kept], CAPTURE)
        same = captures, counts, *(fields[name] for name in ("region", "dtype", "products"))
        if len(slots) > 1 and not all((each == each[0]).all() for each in same):
            for i in range(len(slots)):
                self._add_captures(slots[i : i + 1], places[i : i + 1], records[i : i + 1], counts[i : i + 1])
            return
        names = ("region", "dtype", "products", "start", "stop")
        op, dtype, products, start, stop = (fields[name].astype(np.int64) for name in names)
        point = np.repeat(np.arange(counts.shape[1]), counts[0])[kept]
        in_table, index = named(self.records, CAPTURE), places[:, kept]
        numbers = self.captures.add(slots, op[0], start, stop, dtype[0], point, products[0])
        in_table["range"][index], in_table["region"][index] = numbers
