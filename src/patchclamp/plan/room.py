"""Allocation for admitted programs: slots, program table records, and vector bank space.

The process that admits programs owns one `Room`. Workers write records and vectors at its placements and do not
allocate, so a placed program fits on every rank. Sizes are for the unsharded model; sharded ranks use less.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from patchclamp.errors import CapacityError, MissingSource
from patchclamp.plan.bound import STORE, Attended, BoundProgram, is_loaded, own_point, source_of
from patchclamp.sites import SiteMap


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """The allocation of an admitted program.

    slot: the program's slot while it is admitted, starting at 1
    record: the program's first record in the program table
    addresses: the offset of each key's rows in the bank, in elements, and the number of rows
    load: the keys in `addresses` whose rows are not in the bank yet
    evicted: keys whose rows were evicted from the bank since the last placement
    """

    slot: int
    record: int
    addresses: dict[str, tuple[int, int]]
    load: tuple[str, ...]
    evicted: tuple[str, ...] = ()


Sizes = Mapping[str, tuple[int, int]]  # by bank key: the number of rows and the row width


def bank_sizes(
    bound: BoundProgram, vectors: Mapping[str, np.ndarray], sites: SiteMap, rows_of: Callable[[str, int], int]
) -> dict[str, tuple[int, int]]:
    """Return (rows, row width) of every bank key a bound program reads. `rows_of(run, point)`: a run's row count."""
    sizes: dict[str, tuple[int, int]] = {}
    for key in dict.fromkeys(key for op in bound.ops for key in op.keys):
        source, own = source_of(key), own_point(key)
        if own is not None:
            sizes[key] = stored_rows(bound, key), sites.points[own].width
        elif source is None:
            sizes[key] = vectors[key].shape
        else:
            sizes[key] = rows_of(*source), sites.points[source[1]].width
    return sizes


def stored_rows(bound: BoundProgram, key: str) -> int:
    """Return the number of rows a program stores under its own key `key`."""
    stores = (op for op in bound.ops if op.kind == STORE and key in op.values)
    return sum(stop - start for op in stores for start, stop, *_ in op.ranges)


def captured_bytes(bound: BoundProgram, sites: SiteMap, computed: int | None = None) -> int:
    """Return the fp32 bytes a program captures in the first `computed` positions; None: all, up to `max_tokens`."""
    rows = {
        id(positions): len(positions) if computed is None else int(np.searchsorted(positions, computed))
        for positions in bound.captured.values()  # points share ranges
    }
    width = bound.captured_width
    of_sites = sum(4 * rows[id(at)] * (width[i] or sites.points[i].width) for i, at in bound.captured.items())
    return of_sites + bound.private_bytes(sites, computed)


def resident_name(key: str, sharded: bool) -> str:
    """Return the name of a key's rows in the bank. A vector read both whole and sharded is stored twice."""
    return f"{key}#" if sharded and key.startswith("v:") else key


def resident_sizes(bound: BoundProgram, sizes: Sizes, sites: SiteMap) -> dict[str, tuple[int, int]]:
    """Return `sizes` keyed by `resident_name` instead of by bank key."""
    names: dict[str, tuple[int, int]] = {}
    for op in bound.ops:
        sharded = bool(op.points) and sites.shard_count(op.points[0]) > 1 and not isinstance(op.action, Attended)
        for key in op.keys:
            is_whole = (op.is_gated and key in op.values) or (op.condition is not None and key == op.condition.ids)
            names[resident_name(key, sharded and not is_whole)] = sizes[key]
    return names


class Extents:
    """First-fit allocator of addresses 0 … size − 1. Adjacent free extents are merged."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)] if size else []  # (begin, end), ascending

    @property
    def free(self) -> int:
        return sum(end - begin for begin, end in self._free)

    @property
    def largest(self) -> int:
        return max((end - begin for begin, end in self._free), default=0)

    def take(self, count: int, multiple: int = 1) -> int | None:
        """Allocate `count` addresses. Returns the first, a multiple of `multiple`; None if no extent is long enough."""
        if count == 0:
            return 0
        for i, (begin, end) in enumerate(self._free):
            first = -(-begin // multiple) * multiple
            if end - first >= count:
                gaps = ((begin, first), (first + count, end))
                self._free[i : i + 1] = [gap for gap in gaps if gap[0] < gap[1]]
                return first
        return None

    def give(self, begin: int, count: int) -> None:
        """Free `count` addresses starting at `begin`."""
        if count == 0:
            return
        end = begin + count
        i = bisect.bisect(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == begin:
            i -= 1
            begin = self._free.pop(i)[0]
        self._free.insert(i, (begin, end))


class _Resident(msgspec.Struct):
    """Rows in the bank: offset and size in elements, and the number of admitted programs that read the rows."""

    begin: int
    count: int
    readers: int = 0


class Room:
    """Allocator of slots 1 … `slots`, `cells` more slots for leases, `records` records and `numbers` bank elements.

    Rows that no admitted program reads stay cached in the bank; the least recently used are evicted first.
    """

    slots: int
    records: int
    numbers: int

    def __init__(self, slots: int, records: int, numbers: int, cells: int = 0) -> None:
        self.slots, self.records, self.numbers = slots, records, numbers
        self._cell_slots = list(range(slots + 1, slots + cells + 1))
        self._free_slots = list(range(slots, 0, -1))
        self._records, self._bank = Extents(records), Extents(numbers)
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._evicted: list[str] = []
        self._admitted: dict[int, tuple[int, list[str]]] = {}  # by slot: the number of records, and the rows' names
        self._stores = itertools.count()  # unique numbers for rows that a program stores for itself

    def __len__(self) -> int:
        """Return the number of admitted programs."""
        return len(self._admitted)

    def place(self, records: int, sizes: Sizes) -> Placement | None:
        """Place a program with `records` records and bank keys of `sizes`; None if it must wait for another to end.

        Raises `CapacityError` for a program that does not fit even in an empty room, `MissingSource` if a key's rows in
        the bank are fewer than its size.
        """
        self._check_fits(records, sizes)
        for name, (rows, width) in sizes.items():
            if name in self._resident and rows * width > self._resident[name].count:
                raise MissingSource(f"the bank has fewer than {rows} rows of {name[:100]}")
        placement = self._take(records, sizes)
        if placement is None and not self._admitted:  # unread rows fragment the bank
            self._drop(list(self._resident))
            placement = self._take(records, sizes)
        return placement

    def _take(self, records: int, sizes: Sizes) -> Placement | None:
        if not self._free_slots:
            return None
        first_record = self._records.take(records)
        if first_record is None:
            return None
        names = [key if is_loaded(key) else f"{key}@{next(self._stores)}" for key in sizes]
        new: list[str] = []
        for i, (name, (rows, width)) in enumerate(zip(names, sizes.values(), strict=True)):
            if name in self._resident:
                self._resident.move_to_end(name)
            elif self._take_bank(name, rows * width, width):
                new.append(name)
            else:
                self._records.give(first_record, records)
                self._stop_reading(names[:i])
                self._drop(new)
                return None
            self._resident[name].readers += 1
        addresses = {
            key: (self._resident[name].begin, rows) for name, (key, (rows, _)) in zip(names, sizes.items(), strict=True)
        }
        load = tuple(filter(is_loaded, new))
        evicted = tuple(name for name in self._evicted if name not in self._resident)
        placement = Placement(self._free_slots.pop(), first_record, addresses, load, evicted)
        self._evicted.clear()
        self._admitted[placement.slot] = records, names
        return placement

    def lease(
        self, slots: tuple[int, int], records: tuple[int, int], sizes: Sizes
    ) -> tuple[Placement, list[int], int] | None:
        """Place cells that read keys of `sizes`, with slots and records between the given minimum and maximum. Returns
        the placement, the slots and the number of records; None without room. Raises `CapacityError` like `place`."""
        count, most = min(slots[1], len(self._cell_slots)), min(records[1], self._records.largest // 2)
        placement = self.place(most, sizes) if count >= slots[0] and most >= records[0] else None
        if placement is None:
            return None
        # workers may receive the lease after later programs, so later placements report evictions
        self._evicted = list(placement.evicted)
        taken, self._cell_slots = self._cell_slots[:count], self._cell_slots[count:]
        return msgspec.structs.replace(placement, evicted=()), taken, most

    def end_lease(self, placement: Placement, slots: Sequence[int]) -> None:
        """Free a lease, and drop its rows from the bank: workers may not have loaded them."""
        self._cell_slots = sorted([*self._cell_slots, *slots])
        self.free(placement)
        self.forget(placement.load)

    def free(self, placement: Placement) -> None:
        """Free a placement. Its rows stay cached in the bank for later programs, except rows it stored itself."""
        records, names = self._admitted.pop(placement.slot)
        self._free_slots.append(placement.slot)
        self._records.give(placement.record, records)
        self._stop_reading(names)
        self._drop([name for name in names if not is_loaded(name)])

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the rows of keys that no later program can read, unless an admitted program is reading them."""
        self._drop([key for key in keys if key in self._resident and not self._resident[key].readers])

    def counts(self) -> dict[str, int]:
        """Return the numbers of programs, records and pinned keys; all 0 once every program is freed."""
        return {
            "programs": len(self),
            "records": self.records - self._records.free,
            "pinned": sum(rows.readers > 0 for rows in self._resident.values()),
        }

    def _check_fits(self, records: int, sizes: Sizes) -> None:
        if records > self.records:
            raise CapacityError(
                f"the program needs {records} records, more than the limit of {self.records}; raise max_records, or "
                "use fewer sites or token ranges"
            )
        if self._packed(sizes) > self.numbers:
            raise CapacityError(
                f"the program's vectors need {4 * self._packed(sizes)} bytes, more than the bank's {4 * self.numbers}; "
                "raise bank_bytes"
            )

    @staticmethod
    def _packed(sizes: Sizes) -> int:
        """Return the keys' total size, allocated consecutively in an empty bank."""
        end = 0
        for rows, width in sizes.values():
            end = -(-end // width) * width + rows * width
        return end

    def _take_bank(self, key: str, count: int, width: int) -> bool:
        while (begin := self._bank.take(count, width)) is None:
            oldest = next((name for name, rows in self._resident.items() if not rows.readers), None)
            if oldest is None:
                return False
            self._drop([oldest])
        self._resident[key] = _Resident(begin, count)
        return True

    def _stop_reading(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._resident[key].readers -= 1

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            rows = self._resident.pop(key)
            self._bank.give(rows.begin, rows.count)
            if is_loaded(key):  # workers do not track rows that programs store
                self._evicted.append(key)
