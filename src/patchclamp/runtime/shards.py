"""Programs where rows are cut among workers: what one of them does of an op is the op on the columns that it has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from patchclamp.plan import APPLY, CAPTURE, NOISE
from patchclamp.plan.bind import BoundOp
from patchclamp.plan.table import packed
from patchclamp.sites import Shard, SiteMap


def cut(op: BoundOp, piece: Sequence[Shard], sites: SiteMap) -> BoundOp:
    """The part of an op that acts on this worker's piece of each row; all points of an op are cut alike.

    Keys of vectors name the columns of them that are here; noise knows the number of its first column.
    """
    if not op.points or sites.shard_count(op.points[0]) == 1 or op.kind == CAPTURE:
        return op
    assert op.kind != APPLY, "code runs where there is one worker"
    mine = piece[op.points[0]]
    first, end = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else (mine.first, mine.end)
    first, end = max(first, mine.first) - mine.first, min(end, mine.end) - mine.first
    if first >= end:
        return op.at(np.zeros(len(piece), bool))
    return msgspec.structs.replace(
        op, columns=0 if (first, end) == (0, mine.end - mine.first) else packed((first, end)),
        values=tuple(_key(key, mine) for key in op.values), mask=_key(op.mask, mine) if op.mask else "",
        x=float(mine.first) if op.kind == NOISE else op.x,
    )  # fmt: skip


def _key(key: str, piece: Shard) -> str:
    """Rows of runs were captured as they are cut; vectors are whole."""
    return f"{key}#{piece.first}:{piece.end}" if key.startswith("v:") else key


def columns_in(key: str) -> tuple[str, int | None, int | None]:
    """The vector that a key names, and the columns of it."""
    name, _, columns = key.partition("#")
    first, _, end = columns.partition(":")
    return (name, int(first), int(end)) if columns else (name, None, None)
