"""Which key/value blocks of the prefix cache a request may share.

The key of a block gets a hash of the edits at its positions.  The engine chains the keys of blocks, so the edits of
earlier blocks are in a key already.  Blocks below the first edited position get nothing, and stay shared with everyone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from patchclamp.plan.bound import CAPTURE, STORE, BoundOp, BoundProgram, PositionRange


def block_key(bound: BoundProgram, start: int, end: int, seen_whole: Sequence[tuple[int, int]] = ()) -> str | None:
    """A hash of the edits at positions start … end−1, or None where nothing is edited there. What the program stores is
    in it, for edits may read it.

    seen_whole: positions first … end−1 that attend to one another in both directions, such as an image's: what is
        edited at the last of them changes the keys and values of the first
    """
    end = max([end, *(stop for first, stop in seen_whole if first < end)])
    clipped = {i: op for i, each in enumerate(bound.ops) if each.reaches_cache and (op := _clip(each, start, end))}
    if not clipped:
        return None
    touched = [clipped.get(i, op) for i, op in enumerate(bound.ops) if i in clipped or op.kind == STORE]
    return hashlib.sha256(msgspec.msgpack.encode(touched)).hexdigest()


def lowest_edit(bound: BoundProgram, seen_whole: Sequence[tuple[int, int]] = ()) -> int | None:
    """The first position whose keys and values an edit can change; `seen_whole` as in `block_key`."""
    lowest = min((op.ranges[0].start for op in bound.ops if op.reaches_cache and op.ranges), default=None)
    if lowest is None:
        return None
    edited = [(each.start, each.stop) for op in bound.ops if op.reaches_cache for each in op.ranges]
    touched = [first for first, stop in seen_whole if any(a < stop and b > first for a, b in edited)]
    return min([lowest, *touched])


def lowest_capture(bound: BoundProgram, seen_whole: Sequence[tuple[int, int]] = ()) -> int | None:
    """The first position that must be computed, not read from a cache, because it is captured or stored; of positions
    that attend to one another (`seen_whole`, as in `block_key`) the first, so that they are computed together."""
    lowest = min((op.ranges[0].start for op in bound.ops if op.kind in (CAPTURE, STORE) and op.ranges), default=None)
    return None if lowest is None else min([lowest, *(first for first, stop in seen_whole if first <= lowest < stop)])


def _clip(op: BoundOp, start: int, end: int) -> BoundOp | None:
    """An op at positions start … end−1, without its path; None where it does not act there."""
    ranges = tuple(
        PositionRange(max(first, start), min(stop, end), row + max(start - first, 0) * step, step)
        for first, stop, row, step in op.ranges
        if first < end and stop > start
    )
    return msgspec.structs.replace(op, path="", ranges=ranges) if ranges else None
