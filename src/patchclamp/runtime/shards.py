"""Programs under tensor parallel: what one worker does of an op is the op on the columns that it has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from patchclamp.errors import UnsupportedSite
from patchclamp.plan import APPLY, BoundOp
from patchclamp.plan.bound import Action, Blend, Keep, Noisy, pack_columns
from patchclamp.sites import Shard, SiteMap


def shard_op(op: BoundOp, shards: Sequence[Shard], sites: SiteMap) -> BoundOp:
    """The part of an op that acts on this worker's shard of each row; `shards` [P] are the worker's, and all points of
    an op are sharded alike.

    Keys of vectors name the columns of them that are here; noise knows the number of its first column. Raises
    `UnsupportedSite` for noise on a shard that begins within a group of four columns, which are drawn together.
    """
    keeps_row = isinstance(op.action, Keep) and not op.action.matrix
    if not op.points or sites.shard_count(op.points[0]) == 1 or keeps_row:
        return op
    assert op.kind != APPLY, "code runs where there is one worker"
    shard = shards[op.points[0]]
    first, end = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else (shard.first, shard.end)
    first, end = max(first, shard.first) - shard.first, min(end, shard.end) - shard.first
    if first >= end:
        return op.at(np.zeros(len(shards), bool))
    return msgspec.structs.replace(
        op, columns=0 if (first, end) == (0, shard.end - shard.first) else pack_columns((first, end)),
        values=tuple(_sharded_key(key, shard) for key in op.values), action=_shard_action(op.action, shard),
    )  # fmt: skip


def _shard_action(action: Action, shard: Shard) -> Action:
    if isinstance(action, Blend):
        return msgspec.structs.replace(action, mask=_sharded_key(action.mask, shard))
    if isinstance(action, Keep):
        return msgspec.structs.replace(action, matrix=_sharded_key(action.matrix, shard))
    if isinstance(action, Noisy):
        if shard.first % 4:
            raise UnsupportedSite(
                f"noise is drawn four columns at a time, and this worker's begin at column {shard.first}: use another "
                "tensor_parallel_size"
            )
        return msgspec.structs.replace(action, first_column=shard.first)
    return action


def _sharded_key(key: str, shard: Shard) -> str:
    """Rows of runs were captured sharded as they are; vectors are whole."""
    return f"{key}#{shard.first}:{shard.end}" if key.startswith("v:") else key


def columns_in(key: str) -> tuple[str, int | None, int | None]:
    """The vector that a key names, and the columns of it."""
    name, _, columns = key.partition("#")
    first, _, end = columns.partition(":")
    return (name, int(first), int(end)) if columns else (name, None, None)
