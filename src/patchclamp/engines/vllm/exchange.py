"""Rows of runs that one worker captured and another reads: moved just before the program that reads them is installed.

Every worker installs the same programs in the same order, so each knows from the program alone who sends what to whom.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from patchclamp.errors import MissingSource
from patchclamp.plan import BoundProgram
from patchclamp.plan.bound import source_of
from patchclamp.runtime import Runtime


class Exchange:
    """The rows that cross between the workers of one engine. `group`: vLLM's, of all of them.

    has_tap, keeps, shard [workers, P]: whether a worker has the tap of a point, whether it keeps captures there, and
    which shard it has
    """

    def __init__(self, runtime: Runtime, group: Any) -> None:
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
        """Moves the rows that a request's program reads; called on every worker, before any waits for another."""
        try:
            self._moved[request] = self._move(bound)
        except Exception as error:
            self._moved[request] = MissingSource(f"the rows that it reads could not be moved to it: {error!r}")

    def rows(self, request: str) -> dict[str, torch.Tensor]:
        """The rows [n, W] of other workers that a request's program reads here, by bank key.

        Raises `MissingSource` if their sender did not have them.
        """
        moved = self._moved.pop(request)
        if isinstance(moved, MissingSource):
            raise moved
        return moved

    def _move(self, bound: BoundProgram) -> dict[str, torch.Tensor] | MissingSource:
        received: dict[str, torch.Tensor] = {}
        lacking: list[str] = []
        for key, reader in self._crossings(bound):
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
            return MissingSource(f"run {lacking[0]} is not here: it was released, or captured nothing")
        return received

    def _rows_here(self, run: str, point: int) -> torch.Tensor | None:
        """What a run captured here; None where that cannot be had: its reader waits for an answer all the same."""
        try:
            return self._runtime.fetch(run, point)[1].cpu() if self._runtime.captured_here(run, point) else None
        except Exception:
            return None

    def _crossings(self, bound: BoundProgram) -> list[tuple[str, int]]:
        """Each key of a run's rows with each worker that reads it, in an order that is the same everywhere."""
        pairs: dict[tuple[str, int], None] = {}
        for op in bound.ops:
            for key, point in op.reads():
                if source_of(key) is not None:
                    pairs |= dict.fromkeys((key, int(worker)) for worker in np.flatnonzero(self._has_tap[:, point]))
        return list(pairs)

    def _owner(self, point: int, reader: int) -> int | None:
        """The worker that keeps the shard of a point's rows which `reader` has, or would have; itself if it does."""
        sharded = self._runtime.sites.shard_count(point) > 1
        has = self._has_tap[:, point].astype(bool) & self._keeps[:, point].astype(bool)
        if sharded:
            has &= self._shard[:, point] == self._shard[reader, point]
        if has[reader]:
            return reader
        owners = np.flatnonzero(has)
        return int(owners[0]) if len(owners) else None
