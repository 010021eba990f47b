"""Verify untrusted bound programs: only what `plan.bind` can produce may reach an engine.

A bound program refers to points, columns, and rows of a bank that all requests share. A forged one could read another
request's vectors, write out of bounds, or edit under the cache keys of unedited blocks.

    P points · Q position ranges of an op · n rows of a value
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import Vector
from patchclamp.language.ops import MAX_FEATURES, MAX_TOP, as_probe_name
from patchclamp.language.site import DERIVED
from patchclamp.language.values import DTYPES, MAX_FP32, POOLS
from patchclamp.plan.bind import reaches_cache, vector_key
from patchclamp.plan.bound import (
    ADD_NORMED,
    APPLY,
    BITS,
    BLEND,
    DECIDE,
    KEYS,
    LATCHES,
    LINEAR,
    LOW_RANK,
    MATCH,
    MAX_RANK,
    NOISE,
    PROJECT,
    ROTATE,
    TEST,
    Action,
    All,
    Attended,
    AttentionReader,
    Blend,
    BoundOp,
    BoundProgram,
    Compare,
    Encoded,
    Factored,
    Keep,
    Latch,
    Linear,
    Noisy,
    NormedAdd,
    PositionRange,
    Projection,
    Rotation,
    Span,
    Store,
    check_attention,
    check_one_way,
    is_vector,
    own_point,
    pack_columns,
    position_array,
    run_key,
    source_of,
)
from patchclamp.plan.cells import CellGroup, CellRecords
from patchclamp.sites import SiteMap, SiteRef
from patchclamp.sites.tables import ROTATED

VECTOR_KEY, OWN_KEY = re.compile(r"v:[0-9a-f]{64}"), re.compile(r"o:[0-9]{1,9}:[0-9]{1,9}")
MAX_PATH = 500


class Decided(msgspec.Struct):
    """Decisions made so far.

    bits: the depth and point where each bit is set
    latches: the same for each latch, and the lowest position that sets it
    spans: the bit kept by each span's latch, and the depth where it is read
    probes: the names of the probes kept
    reading: the op that keeps a probe, as long as only its tests follow
    """

    bits: dict[int, tuple[int, int]] = {}
    latches: dict[int, tuple[int, int, int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    probes: set[str] = set()
    reading: BoundOp | None = None


class Frame(msgspec.Struct, frozen=True):
    """The context of a check: sizes (rows, width) by bank key, the prompt's length, the position `limit`, the model's
    sites, and the positions of rows stored so far, by own key."""

    sizes: Mapping[str, tuple[int, int]]
    prompt: int
    limit: int
    sites: SiteMap
    stored: dict[str, np.ndarray]
    decided: Decided


def verify(
    bound: BoundProgram, sizes: Mapping[str, tuple[int, int]], prompt: int, limit: int, sites: SiteMap
) -> None:  # fmt: skip
    """Check a program against a prompt of `prompt` tokens with positions below `limit`, and against its declared sizes
    of vectors and rows. `admission` checks the vectors' sizes once it has them.

    Raises `ProgramError` with the op's path for anything `bind` cannot produce.
    """
    if bound.prompt != prompt:
        raise ProgramError(f"it was bound to a prompt of {bound.prompt} tokens, and this one has {prompt}")
    frame = Frame(sizes, prompt, limit, sites, {}, Decided())
    _check_sizes(sizes, sites)
    for op in bound.ops:
        try:
            _check_op(op, frame)
        except PatchclampError as error:
            raise error.under(op.path[:MAX_PATH]) from None
    _need(not frame.decided.spans, "a span whose latch is not kept")
    check_one_way(bound.ops, sites.label)
    check_attention(bound.ops)


def _check_sizes(sizes: Mapping[str, tuple[int, int]], sites: SiteMap) -> None:
    for key, (rows, width) in sizes.items():
        source = source_of(key) if key[:2] == "r:" else None
        known = VECTOR_KEY.fullmatch(key) or OWN_KEY.fullmatch(key) or (source and key == run_key(*source))
        _need(bool(known), f"no bank key: {key[:100]}")
        _need(rows >= 0 and width >= 1, f"rows of an impossible size: {rows} of {width} numbers")
        if source is not None:
            _need(0 <= source[1] < len(sites.points), f"rows of a point that this model does not have: {source[1]}")
            _need(width == sites.points[source[1]].width, f"rows of {width} numbers at {sites.label(source[1])}")


def verify_cells(cells: CellRecords, sizes: Mapping[str, tuple[int, int]], limit: int, sites: SiteMap) -> None:
    """`verify` for cells: edits at positions below `limit`, and the sizes (rows, width) of all keys. Raises
    `ProgramError`."""
    _check_sizes(sizes, sites)
    _need(len({*cells.keys}) == len(cells.keys) and all(key in sizes for key in cells.keys), "keys without a size")
    number = np.concatenate([np.zeros(0, np.int64), *(group.number.ravel() for group in cells.groups)])
    _need(cells.count >= 0 and bool(((number >= 0) & (number < cells.count)).all()), "numbers of cells out of range")
    _need(len(np.unique(number)) == len(number), "a cell twice")
    each_R = {group.records.shape[1:] for group in cells.groups}
    _need(len(each_R) == len(cells.groups), "several groups with one number of records")
    for group in cells.groups:
        _check_group(group, cells.keys, sizes, limit, sites)
    read = [index.ravel() for group in cells.groups for index in (group.key, group.beside)]
    used = np.unique(np.concatenate([np.full(1, -1), *read]))
    _need(len(used) == len(cells.keys) + 1, "keys that no cell reads")


def _check_group(
    group: CellGroup, keys: Sequence[str], sizes: Mapping[str, tuple[int, int]], limit: int, sites: SiteMap
) -> None:  # fmt: skip
    records, point, key, beside = group.records, group.point, group.key, group.beside
    _need(records.ndim == 2 and records.size > 0 and group.number.shape == records.shape[:1], "cells of another shape")
    _need(all(each.shape == records.shape for each in (point, key, beside)), "arrays of several shapes")
    ranges = (point, 0, len(sites.points)), (key, -1, len(keys)), (beside, -1, len(keys))
    _need(all(bool(((of >= low) & (of < end)).all()) for of, low, end in ranges), "points or keys out of range")
    rows, size = np.array([*(sizes[each] for each in keys), (0, 0)], np.int64).reshape(-1, 2).T
    width, shards = np.array([(of.width, sites.shard_count(of.number)) for of in sites.points]).T
    sampled = np.array([of.rows == "sampled" for of in sites.points])
    # by key: the shards of the run's row that it reads; 0: it is a vector
    shards_read = np.array([*(0 if (of := source_of(each)) is None else shards[of[1]] for each in keys), 0])
    start, stop, kind, step = (records[name].astype(np.int64) for name in ("start", "stop", "kind", "step"))
    value, x, y, other = (records[name] for name in ("value", "x", "y", "other"))
    columns = records["columns"].astype(np.int64) & 0xFFFFFFFF
    first, end = columns & 0xFFFF, np.where(columns, columns >> 16, width[point])
    match, noise, blend, project, linear = (kind == each for each in (MATCH, NOISE, BLEND, PROJECT, LINEAR))
    normed, rotate, low_rank = kind == ADD_NORMED, kind == ROTATE, kind == LOW_RANK
    gated = low_rank & (x == 0)
    reads = linear | blend | project | normed | rotate | (low_rank & ~gated)
    named = reads & (key >= 0)
    last = value + (stop - start - 1) * step
    sums = project | normed | rotate | low_rank | (noise & (step == 1))  # over the row
    after = np.roll(match, 1, axis=1)  # a condition precedes it
    same = [each == np.roll(each, 1, axis=1) for each in (start, stop, point)]
    faults = {
        "records of another kind": ~(reads | match | noise | gated),
        "points that do not ascend": np.diff(point, axis=1, prepend=0) < 0,
        f"positions beyond {limit}": (start < 0) | (start >= stop) | (stop > limit),
        "columns beyond the row": (first >= end) | (end > width[point]),
        "a step other than 0 or 1": ~match & (step != 0) & (step != 1),
        "rows beyond those of the value": named & ((value < 0) | (value >= 1 << 31) | (last >= rows[key])),
        "a value of another width": named & (size[key] != width[point]),
        "rows that are cut differently among workers": named & (shards_read[key] != 0)
        & (shards_read[key] != shards[point]),
        "no value": reads & ~named & ~(linear & (y == 0) & (value == 0)),
        "a mask that is not one row": blend
        & ((beside < 0) | (rows[beside] != 1) | (size[beside] != width[point]) | (shards_read[beside] != 0)),
        "a mask of no blend": ~(blend | low_rank) & (beside >= 0),
        "factors of another form": low_rank
        & ((beside < 0) | (y < 1) | (y > MAX_RANK) | (y != np.floor(y)) | (rows[beside] / 2 != y) |
           (size[beside] != width[point]) | (shards_read[beside] != 0)),
        "gates of another form": gated
        & ((key < 0) | (rows[key] != y) | (size[key] != 5) | (shards_read[key] != 0) | (value != 0) | (step != 0)),
        "logits in a sum of their own": low_rank & sampled[point],
        "an address": (other != 0) & ~noise & ~(rotate & (other == 1)),
        "a rotation of another form": rotate
        & ((rows[key] != 2) | (value != 0) | (step != 0) | (shards_read[key] != 0) | sampled[point]),
        "noise of another form": noise & ((key >= 0) | (value < 0) | (value >= 1 << 31) | (x != 0) | (other < 0)),
        "a sum over a row that is cut": sums
        & (first * shards[point] // width[point] != (end - 1) * shards[point] // width[point]),
        "numbers that are not finite": ~(np.isfinite(x) & np.isfinite(y)),
        "a factor": records["factor"] != 0,
        "token ids that are nowhere": match & ((key < 0) | (rows[key] < 1) | (shards_read[key] != 0) | (value != 0)),
        "a condition of another form": match & (x != 0) & (x != 1),
        "a condition of nothing": after & (match | ~(same[0] & same[1] & same[2])),
    }  # fmt: skip
    for what, fault in faults.items():
        _need(not fault.any(), what)
    _need(not match[:, -1].any(), "a condition of nothing")


def is_content(key: str, rows: np.ndarray) -> bool:
    """True if a bank key is the content hash of the rows, as a vector [n, W], or [W] if n is 1."""
    count, width = rows.shape
    data = np.ascontiguousarray(rows, "<f4").tobytes()
    shapes = [(count, width), (width,)] if count == 1 else [(count, width)]
    return key in [vector_key(Vector(shape, data)) for shape in shapes]


def _check_op(op: BoundOp, frame: Frame) -> None:
    points = frame.sites.points
    _need(all(0 <= point < len(points) for point in op.points), f"points that this model does not have: {op.points}")
    widths = {points[point].width for point in op.points}
    _need(len(widths) <= 1, "points of several widths")
    width = next(iter(widths), 0)
    _need(len(op.values) in (0, 1, len(op.points)), f"{len(op.values)} values for {len(op.points)} points")
    reaches = op.is_edit and any(reaches_cache(points[point]) for point in op.points)
    _need(op.reaches_cache == reaches, "what it says of the cache is not so")
    _check_columns(op, width)
    _check_ranges(op, frame)
    _check_shards(op, frame.sites)
    frame.decided.reading = frame.decided.reading if op.kind == TEST else None
    _check_action(op.action, op, frame, width)
    _check_own(op, frame)
    _check_guard(op, frame)
    if op.kind in DECIDE:
        _need(op.condition is None and bool(op.values) == (op.kind == TEST), "a decision that reads something else")
    if op.condition is not None:
        _need(frame.sizes.get(op.condition.ids, (0, 0))[0] >= 1, "token ids that are nowhere")


def _check_columns(op: BoundOp, width: int) -> None:
    first, end = op.columns & 0xFFFF, op.columns >> 16
    _need(op.columns == 0 or (0 <= first < end <= width), f"columns {first} to {end} of {width}")


def _check_ranges(op: BoundOp, frame: Frame) -> None:
    for start, stop, row, step in op.ranges:
        _need(0 <= start < stop <= frame.limit, f"positions {start} to {stop} of {frame.limit}")
        _need(row >= 0 and step in (0, 1), f"row {row} and step {step}")
    starts = [each.start for each in op.ranges]
    _need(not starts or starts[0] == min(starts), "positions that do not ascend")
    last = max((row + (stop - start - 1) * step for start, stop, row, step in op.ranges), default=-1)
    for key in op.values:
        rows, _ = frame.sizes.get(key, (0, 0))
        _need(last < rows, f"row {last} of {rows}")


def _check_shards(op: BoundOp, sites: SiteMap) -> None:
    """Check ops at rows sharded across workers."""
    for key, point in op.reads() if op.is_edit else ():
        read = source_of(key)
        cut = read is not None and sites.shard_count(read[1]) != sites.shard_count(point)
        _need(not cut, "rows that are cut differently among workers")
    if isinstance(op.action, (Projection, Factored, NormedAdd, Rotation)) or (
        isinstance(op.action, Noisy) and op.action.relative
    ):
        columns = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else None
        whole = all(sites.whole(SiteRef("", None, point, columns=columns)) for point in op.points)
        _need(whole, "a sum over a row that is cut")


def _check_own(op: BoundOp, frame: Frame) -> None:
    """Check that a run's own rows are stored before they are read."""
    _need(all(map(is_vector, op.keys[len(op.values) :])), "a mask, a matrix, or token ids that are no vector")
    for key, point in op.reads() if op.is_edit else ():
        own = own_point(key)
        if own is None:
            continue
        _need(key in frame.stored, f"{key} is read and was not stored")
        sites = frame.sites
        before = sites.stages == 1 and sites.depth(own) < sites.depth(point)
        _need(before and sites.shard_count(own) == sites.shard_count(point), f"{key} is not there at point {point}")
        for start, stop, row, step in op.ranges:
            read = np.arange(start, stop)
            _need(bool((frame.stored[key][row + (read - start) * step] <= read).all()), f"{key} is read too early")


@functools.singledispatch
def _check_action(action: Action, op: BoundOp, frame: Frame, width: int) -> None:
    """Check an action's numbers, and that its values have the points' width."""
    raise ProgramError(f"{type(action).__name__} does not come from elsewhere")


@_check_action.register
def _keep(action: Keep, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 <= action.dtype < len(DTYPES), f"dtype {action.dtype}")
    _need(0 <= action.pool <= len(POOLS), f"pool {action.pool}")
    if action.probe:
        _need(as_probe_name(action.probe) not in frame.decided.probes, f"two probes named {action.probe!r}")
        _need(bool(action.matrix), "a probe with no matrix")
        frame.decided.probes.add(action.probe)
        frame.decided.reading = op
    if action.lens:
        _need(not (action.matrix or action.pool or action.probe or action.reader), "a lens of other rows")
        _need(not op.columns, "a lens of a part")
        _need(not action.dtype, "a lens of rounded rows")
        _need(all(map(frame.sites.lens_reads, op.points)), "a lens of a point that none reads")
    _check_reader(action, op, frame)
    if action.in_step:
        _need(0 < action.pool <= POOLS.index("max") + 1 and not action.dtype, "a step does not pool these rows so")
        rows = {frame.sites.points[point].rows for point in op.points}
        _need(not action.conditional and rows <= {"tokens"}, "rows that a step does not pool")
        _need(bool(op.ranges) and op.ranges[-1].stop <= frame.prompt, "pooled rows of generated tokens")
    _need(not op.values and op.condition is None, "a capture reads a matrix alone")
    _check_matrix(action, op, frame, width)
    ends = [(a.stop, b.start) for a, b in zip(op.ranges, op.ranges[1:], strict=False)]
    _need(all(stop <= start for stop, start in ends), "positions twice")


def _check_reader(action: Keep, op: BoundOp, frame: Frame) -> None:
    reader = action.reader
    if reader is None:
        _need(not action.top, "features with no SAE")
        return
    _need(not (action.matrix or action.pool or action.probe), "an SAE of other rows")
    if isinstance(reader, AttentionReader):
        sizes = frame.sites.sizes
        _need(reader.site in DERIVED, f"no attention site {reader.site[:64]!r}")
        _need(not frame.sites.no_attention, f"{reader.site} of an engine that does not read it")
        _need(
            {frame.sites.points[point].kind for point in op.points} <= {ROTATED},
            "attention of a point that has no queries",
        )
        _need(0 <= reader.first < reader.first + reader.heads <= sizes.heads, "heads that the model does not have")
        _need(
            (reader.keys == 0) != (action.top == 0) and 0 <= action.top <= MAX_TOP, "neither whole rows nor the largest"
        )
        _need(reader.keys in (0, -(-frame.limit // KEYS) * KEYS), f"rows of {reader.keys} keys")
        return
    found = frame.sites.dictionaries.get(reader.name)
    _need(found is not None and found.card.content == reader.content, f"no SAE {reader.name[:64]!r} of this content")
    assert found is not None
    columns, ids = found.at.columns, reader.ids
    _need(set(op.points) <= {found.at.point}, "an SAE of a point that it does not read")
    _need(op.columns == (pack_columns(columns) if columns else 0), "an SAE of other columns")
    _need(reader.first == (columns[0] if columns else 0), "an SAE of other columns")
    most = min(MAX_TOP if ids is None else MAX_FEATURES, found.card.features)
    _need(1 <= action.top <= most, f"{action.top} features")
    _need(ids is None or len(ids) == action.top, f"ids, not {action.top}")
    _need(ids is None or all(0 <= each < found.card.features for each in ids), "features that it does not have")


def _check_matrix(action: Keep, op: BoundOp, frame: Frame, width: int) -> None:
    if not action.matrix:
        _need(action.products == 0 and not op.columns, "a capture of a part, or products with no matrix")
        return
    _need(1 <= action.products <= width, f"{action.products} products")
    _need(is_vector(action.matrix), "a matrix that is no vector")
    _need(frame.sizes.get(action.matrix) == (action.products, width), f"a matrix not of {action.products} rows")
    columns = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else None
    for point in op.points:
        _need(frame.sites.points[point].rows == "tokens", "a projection of logits")
        _need(frame.sites.whole(SiteRef("", None, point, columns=columns)), "a projection of a row that is cut")


@_check_action.register
def _test(action: Compare, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.threshold)
    kept = frame.decided.reading
    if kept is None or not isinstance(kept.action, Keep) or kept.action.probe != action.probe:
        raise ProgramError(f"no binder makes this: a test of {action.probe[:64]!r}, which is not read right before it")
    rows = {each.row for each in op.ranges}
    _need(op.values == (kept.action.matrix,) and op.columns == kept.columns, "a test of another matrix")
    _need(len(rows) == 1 and max(rows) < kept.action.products and op.points == kept.points, "a test of another product")
    _need([each[:2] for each in op.ranges] == [each[:2] for each in kept.ranges], "a test at other positions")
    _set_bit(action.bit, op, frame)


@_check_action.register
def _all(action: All, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 < action.mask < 1 << BITS and action.wanted & ~action.mask == 0, "bits that rows do not have")
    _need(action.wanted >= 0, "bits that rows do not have")
    for bit in range(BITS):
        if action.mask >> bit & 1:
            _read_bit(bit, op, frame)
    _set_bit(action.bit, op, frame)


@_check_action.register
def _latch(action: Latch, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 <= action.latch < LATCHES and action.latch not in frame.decided.latches, f"latch {action.latch}")
    _read_bit(action.bit, op, frame)
    [point] = op.points
    _need(bool(op.ranges), "a latch at no position")
    if action.last:
        bit, depth = frame.decided.spans.pop(action.latch, (-1, 0))
        kept = bit == action.bit and frame.sites.depth(point) > depth and frame.sites.points[point].rows == "tokens"
        _need(kept and op.ranges == (PositionRange(frame.prompt, frame.limit),), "a latch of another span")
    _need(action.last or action.latch not in frame.decided.spans, f"latch {action.latch}")
    frame.decided.latches[action.latch] = frame.sites.depth(point), point, op.ranges[0].start


@_check_action.register
def _span(action: Span, op: BoundOp, frame: Frame, width: int) -> None:
    _need(op.ranges == (PositionRange(frame.prompt, frame.limit),), "a span at other positions")
    _need(0 <= min(action.opening, action.closing) != max(action.opening, action.closing) < frame.sites.d_vocab,
          "delimiters that are no tokens")  # fmt: skip
    latch, decided = action.latch, frame.decided
    _need(0 <= latch < LATCHES and latch not in decided.latches and latch not in decided.spans, f"latch {latch}")
    for bit in (action.bit, action.bit + 1):
        _set_bit(bit, op, frame)
    decided.spans[latch] = action.bit + 1, frame.sites.depth(op.points[0])


def _set_bit(bit: int, op: BoundOp, frame: Frame) -> None:
    """Check an op that sets a bit: at one point, with an unsharded row for every token."""
    _need(0 <= bit < BITS and bit not in frame.decided.bits and len(op.points) == 1, f"bit {bit}")
    [point] = op.points
    sites = frame.sites
    _need(sites.points[point].rows == "tokens" and sites.shard_count(point) == 1 and sites.stages == 1,
          "a decision where no worker has whole rows")  # fmt: skip
    frame.decided.bits[bit] = sites.depth(point), point


def _read_bit(bit: int, op: BoundOp, frame: Frame) -> None:
    _need(bit in frame.decided.bits and len(op.points) == 1, f"bit {bit}, which is not set")
    depth, point = frame.decided.bits[bit]
    mine = frame.sites.depth(op.points[0])
    _need(mine > depth or op.points[0] == point, f"bit {bit}, which is set in a later layer")


def _check_guard(op: BoundOp, frame: Frame) -> None:
    """Check that an edit comes after the decision it depends on."""
    if (guard := op.guard) is None:
        return
    decided, is_latched = frame.decided, guard.latch != -1
    known = guard.latch in decided.latches if is_latched else guard.bit in decided.bits
    _need(op.is_edit and op.kind != APPLY and known and 0 <= guard.bit < BITS, f"a guard of {guard}")
    depth, point, *first = decided.latches[guard.latch] if is_latched else decided.bits[guard.bit]
    at_once = not first or first[0] >= frame.prompt - 1  # else a later row of the same step might set the latch
    for each in op.points:
        later = frame.sites.depth(each) > depth or (each == point and at_once)
        _need(later and frame.sites.points[each].rows == "tokens", "an edit before its condition is decided")


@_check_action.register
def _store(action: Store, op: BoundOp, frame: Frame, width: int) -> None:
    positions = position_array(op.ranges)
    count = sum(stop - start for start, stop, *_ in op.ranges)
    _need(len(positions) == count > 0 and not op.columns and op.condition is None, "positions twice, or none")
    ends = list(itertools.accumulate(stop - start for start, stop, *_ in op.ranges))
    in_order = all(stop - start == 1 or step == 1 for start, stop, _, step in op.ranges)
    _need(in_order and [row for _, _, row, _ in op.ranges] == [0, *ends[:-1]], "rows that are stored out of order")
    _need([own_point(key) for key in op.values] == list(op.points), "own keys of other points")
    for key, point in zip(op.values, op.points, strict=True):
        _need(frame.sizes.get(key) == (count, width), f"{count} rows stored in {frame.sizes.get(key)}")
        _need(frame.sites.points[point].rows == "tokens" and key not in frame.stored, f"{key} cannot be stored")
        frame.stored[key] = positions


@_check_action.register
def _linear(action: Linear, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.h_scale, action.v_scale)
    _check_values(op, frame, width, needed=action.v_scale != 0)


@_check_action.register
def _blend(action: Blend, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.alpha)
    _check_values(op, frame, width, needed=True)
    _need(frame.sizes.get(action.mask) == (1, width), f"a mask that is not one row of {width}")


@_check_action.register
def _project(action: Projection, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.low, action.high)
    _check_values(op, frame, width, needed=True)


@_check_action.register
def _low_rank(action: Factored, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.toward)
    _need(1 <= action.rank <= MAX_RANK, f"rank {action.rank}")
    _need(frame.sizes.get(action.factors) == (2 * action.rank, width), f"factors that are not of rank {action.rank}")
    _need(all(frame.sites.points[point].rows == "tokens" for point in op.points), "logits in a sum of their own")
    if action.toward:
        _check_values(op, frame, width, needed=True)
        return
    _need(len(op.values) == 1 and is_vector(op.values[0]), "gates that are no vector")
    _need(frame.sizes.get(op.values[0]) == (action.rank, 5), "gates of another form")
    _need(all(each.row == each.step == 0 for each in op.ranges), "a gate for some positions")


@_check_action.register
def _encoded(action: Encoded, op: BoundOp, frame: Frame, width: int) -> None:
    found = frame.sites.dictionaries.get(action.name)
    if found is None or found.card.content != action.content:
        raise ProgramError(f"no binder makes this: an SAE {action.name[:64]!r} that is not attached")
    _need(op.points == ((found.at if action.reads else found.to).point,), "an SAE at another site")
    _need(action.reads <= (found.at != found.to), "an SAE that reads where it writes")
    _need(not op.values and op.guard is None, "an SAE's edit with a value or a guard")
    _need(all(0 <= each < found.card.features for each in action.ids), "features that there are not")
    _need(len(action.gates) == len(action.ids) <= MAX_FEATURES, "features without numbers")
    _check_numbers(*(number for gate in action.gates for number in gate))


@_check_action.register
def _attended(action: Attended, op: BoundOp, frame: Frame, width: int) -> None:
    _need(not frame.sites.no_attention, "an edit of attention in an engine that does not read it")
    _need({frame.sites.points[point].kind for point in op.points} <= {ROTATED}, "attention of a point without queries")
    _need(not op.values and op.condition is None and op.guard is None, "an edit of attention with a condition")
    size = frame.sites.sizes.d_head
    _need((op.columns & 0xFFFF) % size == (op.columns >> 16) % size == 0, "a part of a head")
    _need(all(0 <= first < end <= frame.limit for first, end in action.keys), "keys that there are not")
    _need(bool(op.ranges), "an edit of attention at no position")
    for ranges in (action.keys, [each[:2] for each in op.ranges]):
        _need(all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "queries or keys twice")
    _need(bool(action.keys) or action.factor is not None, "no keys that are removed")
    if action.factor is not None:
        _check_numbers(action.factor)
    if action.rows:
        rows, columns = frame.sizes.get(action.rows, (0, 0))
        last = max((row + (stop - start - 1) * step for start, stop, row, step in op.ranges), default=-1)
        _need(action.factor is not None and last < rows and columns <= frame.limit, f"row {last} of {rows}")


@_check_action.register
def _add_normed(action: NormedAdd, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.scale)
    _check_values(op, frame, width, needed=True)


@_check_action.register
def _rotate(action: Rotation, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.cos, action.sin)
    _check_values(op, frame, width, needed=True)
    _need(all(is_vector(key) and frame.sizes.get(key, (0, 0))[0] == 2 for key in op.values), "a plane of other rows")
    _need(all(each.row == each.step == 0 for each in op.ranges), "a plane for each position")
    _need(all(frame.sites.points[point].rows == "tokens" for point in op.points), "a rotation of logits")


@_check_action.register
def _noise(action: Noisy, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.std)
    _need(0 <= action.seed < 1 << 63 and action.first_column == 0, "a seed, or a first column, that noise has not")
    streams = action.streams
    _need(len(streams) == len(op.points) and all(0 <= each < 1 << 31 for each in streams), "streams that noise has not")
    _need(not op.values, "noise reads nothing")


def _check_values(op: BoundOp, frame: Frame, width: int, needed: bool) -> None:
    _need(bool(op.values) or not needed or not op.points, "no value")
    for key in op.values:
        _, columns = frame.sizes.get(key, (0, 0))
        _need(columns == width, f"a value of {columns} columns at points of {width}")


def _check_numbers(*numbers: float) -> None:
    _need(
        all(math.isfinite(each) and abs(each) <= MAX_FP32 for each in numbers), f"numbers that are not fp32: {numbers}"
    )


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProgramError(f"no binder makes this: {what}"[:400])
