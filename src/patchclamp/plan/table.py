"""The program table: the records of every admitted request, by slot and point.

A slot is a request's number while it is admitted; slot 0 belongs to nobody.  The records of slot s at point p are
`records[first[s, p] : first[s, p + 1]]`, in program order; a record holds for positions start … stop−1.  The tables
have a fixed size and are written only when a request comes or goes, so a device copy stays valid in between.
"""

from __future__ import annotations

import msgspec
import numpy as np

from patchclamp.errors import CapacityError
from patchclamp.plan.captures import Captures

CAPTURE = 0
LINEAR = 1  # x·h + y·v, where x or y of 0 leaves h or v out altogether
BLEND = 2  # (1 − a)·h + a·v for a = y·m, m a number a column, at `other` in the bank
PROJECT = 3  # h + (p′ − p)·v, for p = h·v and p′ the nearest to it of x … y
NOISE = 4  # h + y·ε; with step 1 y is of the row's root mean square. `value`: the site's number, `other`: the seed, x:
# the number of the row's first column, a multiple of 4
MATCH = 5  # the next record holds only where the token's id is (x = 1), or is not (x = 0), one of `step` at `value`,
# which ascend
APPLY = 6  # what the code of number `value` makes of it

RECORD = np.dtype(
    [
        ("start", "<i4"), ("stop", "<i4"),   # positions
        ("kind", "<i4"), ("step", "<i4"),    # 1: a row of the value a position, 0: one for all
        ("value", "<i8"),                    # the value's first number in the bank; for CAPTURE the op's ordinal
        ("x", "<f4"), ("y", "<f4"),          # the op's scalars; for CAPTURE x is the dtype's number
        ("other", "<i8"),
        ("found", "<f4"),                    # on a device, for rows wider than a program takes at once: y·r or p′ − p
        ("columns", "<i4"),                  # those that are changed: the first, and the end << 16; 0: all of the row
    ]
)  # fmt: skip
# In a table, step and value of a CAPTURE are the numbers of its span and of its area (`store.spans`).


class ProgramTable:
    """Records of up to `slots` requests at `points` points, `records` in all; `sampled` [points]: where rows are the
    sampled ones (nowhere if not given).

    Attributes: `first` [slots + 1, points + 1] int32, `generation` [slots + 1] int32 (counts a slot's programs),
    `records` [records] of `RECORD`, `version` (counts changes); `captures`; `changed`: the slots and the (begin, end)
    of records written since a device copy last took note.
    """

    def __init__(self, slots: int, points: int, records: int, sampled: np.ndarray | None = None) -> None:
        self.first = np.zeros((slots + 1, points + 1), np.int32)
        self.generation = np.zeros(slots + 1, np.int32)
        self._acts = np.zeros((slots + 1, points), bool)  # where a slot has records
        self._acting = np.zeros(points, np.int64)  # how many slots have
        self.records = np.zeros(records, RECORD)
        self.version = 0
        self.changed: tuple[set[int], list[tuple[int, int]]] = (set(), [])
        self.sampled = np.zeros(points, bool) if sampled is None else sampled
        self.captures = Captures(self.sampled)
        self.coded: set[int] = set()  # slots with code among their records
        self._free_slots = list(range(slots, 0, -1))
        self._free = [(0, records)]  # (begin, end), ascending

    def admit(self, records: np.ndarray, counts: np.ndarray) -> int:
        """Takes a request's records, sorted by point, `counts` [points] of them at each; returns its slot.

        Raises `CapacityError` when slots or records run out.
        """
        if not self._free_slots:
            raise CapacityError(f"{len(self.first) - 1} programs are running; raise max_num_seqs")
        begin = self._take(len(records))
        slot = self._free_slots.pop()
        self.generation[slot] = self.generation[slot] % (1 << 30) + 1
        self.records[begin : begin + len(records)] = records
        self.first[slot, 0] = begin
        self.first[slot, 1:] = begin + np.cumsum(counts)
        self._acts[slot] = counts > 0
        self._acting += self._acts[slot]
        self._add_captures(slot, begin, records, counts)
        if (records["kind"] == APPLY).any():
            self.coded.add(slot)
        self._note(slot, begin, begin + len(records))
        return slot

    def drop(self, slot: int) -> None:
        """Frees a slot and its records."""
        self._give(int(self.first[slot, 0]), int(self.first[slot, -1]))
        self._acting -= self._acts[slot]
        self.first[slot] = self._acts[slot] = 0
        self.captures.drop(slot)
        self.coded.discard(slot)
        self._free_slots.append(slot)
        self._note(slot, 0, 0)

    def active(self, slots: np.ndarray) -> np.ndarray:
        """Points at which any of some slots, each named once at most but for 0, has records; bool [points]."""
        if np.count_nonzero(slots) == len(self):
            return self._acting > 0
        return np.logical_or.reduce(self._acts[slots], axis=0)

    def __len__(self) -> int:
        """Admitted requests."""
        return len(self.first) - 1 - len(self._free_slots)

    @property
    def free_records(self) -> int:
        return sum(end - begin for begin, end in self._free)

    def _note(self, slot: int, begin: int, end: int) -> None:
        self.version += 1
        slots, records = self.changed
        slots.add(slot)
        if end > begin:
            records.append((begin, end))

    def take_changed(self) -> tuple[set[int], list[tuple[int, int]]]:
        """What changed since this was last called."""
        taken, self.changed = self.changed, (set(), [])
        return taken

    def _add_captures(self, slot: int, begin: int, records: np.ndarray, counts: np.ndarray) -> None:
        kept = np.flatnonzero(records["kind"] == CAPTURE)
        if len(kept) == 0:
            return
        point = np.repeat(np.arange(len(counts)), counts)[kept]
        op, start, stop, dtype = (records[field][kept].astype(np.int64) for field in ("value", "start", "stop", "x"))
        span, area = self.captures.add(slot, op, start, stop, dtype, point)
        self.records["step"][begin + kept], self.records["value"][begin + kept] = span, area

    def _take(self, count: int) -> int:
        if count == 0:
            return 0
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= count:
                if end - begin == count:
                    del self._free[i]
                else:
                    self._free[i] = (begin + count, end)
                return begin
        raise CapacityError(
            f"the program needs {count} records and {self.free_records} of {len(self.records)} are free; "
            "raise max_records, or act on fewer sites or runs of tokens"
        )

    def _give(self, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*self._free, (begin, end)]):
            if a == b:
                continue
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self._free = merged


def packed(columns: tuple[int, int]) -> int:
    """Columns first … end − 1 as a record holds them."""
    return columns[0] | columns[1] << 16


def columns_of(record) -> slice:
    """The columns that a record changes."""
    word = int(record["columns"]) & 0xFFFFFFFF
    return slice(word & 0xFFFF, word >> 16) if word else slice(None)


def records_of(ops, addresses: dict[str, tuple[int, int]], points: int) -> tuple[np.ndarray, np.ndarray]:
    """A bound program's records sorted by point (stably: program order within), and how many each point has.

    `addresses` gives for each bank key the number at which its rows begin and their width.
    """
    made = [_records_at(op, ordinal, addresses) for ordinal, op in enumerate(ops)]
    if not made:
        return np.zeros(0, RECORD), np.zeros(points, np.int64)
    records = np.concatenate([records for records, _ in made])
    owner = np.concatenate([at for _, at in made])
    order = np.argsort(owner, kind="stable")
    return records[order], np.bincount(owner, minlength=points)


def _records_at(op, ordinal: int, addresses: dict[str, tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """One op's records, every piece at every point, and the point of each."""
    if op.only:
        return _records_if(op, ordinal, addresses)
    ranges, points = np.array(op.ranges, np.int64).reshape(-1, 4), np.array(op.points, np.int64)
    records = np.zeros((len(points), len(ranges)), RECORD)
    records["start"], records["stop"], records["step"] = ranges[:, 0], ranges[:, 1], ranges[:, 3]
    records["kind"], records["x"], records["y"], records["other"] = op.kind, op.x, op.y, op.seed
    records["columns"] = np.array(op.columns, np.int64).astype(np.int32)
    if op.kind == CAPTURE:
        records["value"] = ordinal
    elif op.kind == APPLY:
        records["value"] = op.seed
    elif op.kind == NOISE:
        records["value"], records["step"] = np.array(op.sites, np.int64).reshape(-1, 1), op.relative
    elif op.values:
        begin, width = np.array([addresses[key] for key in op.values], np.int64).T
        records["value"] = begin[:, None] + ranges[:, 2] * width[:, None]
    if op.mask and op.points:
        records["other"] = addresses[op.mask][0]
    return records.reshape(-1), np.repeat(points, len(ranges))


def _records_if(op, ordinal: int, addresses: dict[str, tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The records of an op that acts on some tokens only: before each, one that asks for the token."""
    then, at = _records_at(msgspec.structs.replace(op, only=""), ordinal, addresses)
    asked = np.zeros_like(then)
    asked["start"], asked["stop"], asked["kind"], asked["x"] = then["start"], then["stop"], MATCH, not op.others
    asked["value"], asked["step"] = addresses[op.only]
    return np.stack([asked, then], 1).reshape(-1), np.repeat(at, 2)
