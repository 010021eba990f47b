"""The rows that programs read, in the bank: where they lie, and how they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from patchclamp.errors import MissingSource
from patchclamp.plan.bound import BoundOp, own_point, source_of
from patchclamp.plan.room import Placement, resident_name
from patchclamp.runtime.shards import columns_in
from patchclamp.sites import SiteMap
from patchclamp.store.bank import Bank


class ResidentRows:
    """Rows of inline vectors and of runs, in a bank. `captured` gives the rows [T, W] that runs captured here, of each
    (run, point)."""

    def __init__(
        self, bank: Bank, sites: SiteMap, captured: Callable[[list[tuple[str, int]]], list[torch.Tensor]]
    ) -> None:
        self._bank, self._sites, self._captured = bank, sites, captured
        self._found: dict[tuple[str, int], torch.Tensor] = {}  # rows of runs that are about to be asked for
        self._places: dict[str, tuple[int, int]] = {}  # by name: where rows begin in the bank, and how wide they are
        self._unwritten: dict[str, tuple[int, torch.Tensor]] = {}  # by name: where rows begin, and the rows

    def __len__(self) -> int:
        return len(self._places)

    def find(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Finds what runs captured here, all of it at once, until the next `write`."""
        self._found = dict(zip(wanted, self._captured(list(wanted)), strict=True)) if wanted else {}

    def addresses(
        self, ops: Sequence[BoundOp], placement: Placement, vectors: Mapping[str, torch.Tensor],
        remote: Mapping[str, torch.Tensor],
    ) -> dict[str, tuple[int, int]]:  # fmt: skip
        """Where the rows of every key begin that the ops read, and how wide they are. Those that are not in the bank
        come there with the next `write`, from `vectors`, from what is `remote`, or from a run. Raises the first error
        once all other rows have their place."""
        addresses: dict[str, tuple[int, int]] = {}
        missing: MissingSource | None = None
        for key in dict.fromkeys([key for op in ops for key in op.keys]):
            try:
                addresses[key] = self._address(key, placement, vectors, remote)
            except MissingSource as error:
                missing = missing or error
        if missing is not None:
            raise missing
        return addresses

    def _address(
        self, key: str, placement: Placement, vectors: Mapping[str, torch.Tensor], remote: Mapping[str, torch.Tensor]
    ) -> tuple[int, int]:
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
                rows = remote[name] if name in remote else self._rows_of_run(source)
                if len(rows) < count:
                    raise MissingSource(
                        f"run {source[0]} captured {len(rows)} positions at {self._sites.label(source[1])}, not {count}"
                    )
                self._check_whole(source, rows)
            self._unwritten[resident] = begin, rows[:count]
            self._places[resident] = begin, rows.shape[-1]
        if self._places.get(resident, (-1, 0))[0] != begin:
            raise MissingSource(f"the rows of {name[:40]} could not be brought into the bank when they were first read")
        return self._places[resident]

    def _check_whole(self, source: tuple[str, int], rows: torch.Tensor) -> None:
        width = self._sites.points[source[1]].width // self._sites.shard_count(source[1])
        if rows.shape[-1] != width:
            raise MissingSource(
                f"run {source[0]} captured {self._sites.label(source[1])} projected, {rows.shape[-1]} numbers and not "
                f"{width}"
            )

    def _rows_of_run(self, source: tuple[str, int]) -> torch.Tensor:
        found = self._found.get(source)
        return self._captured([source])[0] if found is None else found

    def write(self) -> None:
        """Writes the rows that have a place and are not in the bank yet; neighbours together, all in their order. Where
        that fails, none of them counts as being there."""
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
        """Rows that are in the bank no more."""
        for name in names:
            self._places.pop(name, None)
