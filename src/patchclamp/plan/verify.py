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
    REMOVE,
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
    """The decisions made by the ops verified so far.

    bits: the depth and point where each bit is set
    latches: the depth and point where each latch is set, and the lowest position that sets it
    spans: the bit kept by each span's latch, and the depth where the latch is read
    probes: the names of the probes read so far
    reading: the latest op that reads a probe, if only comparisons have followed it
    """

    bits: dict[int, tuple[int, int]] = {}
    latches: dict[int, tuple[int, int, int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    probes: set[str] = set()
    reading: BoundOp | None = None


class Frame(msgspec.Struct, frozen=True):
    """Context of a check: sizes (rows, width) by bank key, the prompt's length, the position `limit`, the model's
    sites, the positions of the rows that the run has stored so far, by `own_key`, and the decisions so far."""

    sizes: Mapping[str, tuple[int, int]]
    prompt: int
    limit: int
    sites: SiteMap
    stored: dict[str, np.ndarray]
    decided: Decided


def verify(bound: BoundProgram, sizes: Mapping[str, tuple[int, int]], prompt: int, limit: int, sites: SiteMap) -> None:
    """Check a program against a prompt of `prompt` tokens with positions below `limit`, and against the declared
    `sizes` of vectors and rows. `admission` checks the vectors' actual sizes later.

    Raises `ProgramError` with the op's path for anything `bind` cannot produce.
    """
    if bound.prompt != prompt:
        raise ProgramError(f"the program is bound to a prompt of {bound.prompt} tokens, got {prompt}")
    frame = Frame(sizes, prompt, limit, sites, {}, Decided())
    _check_sizes(sizes, sites)
    for op in bound.ops:
        try:
            _check_op(op, frame)
        except PatchclampError as error:
            raise error.under(op.path[:MAX_PATH]) from None
    _need(not frame.decided.spans, "span without a latch")
    check_one_way(bound.ops, sites.label)
    check_attention(bound.ops)


def _check_sizes(sizes: Mapping[str, tuple[int, int]], sites: SiteMap) -> None:
    for key, (rows, width) in sizes.items():
        source = source_of(key) if key[:2] == "r:" else None
        known = VECTOR_KEY.fullmatch(key) or OWN_KEY.fullmatch(key) or (source and key == run_key(*source))
        _need(bool(known), f"malformed bank key {key[:100]}")
        _need(rows >= 0 and width >= 1, f"invalid size [{rows}, {width}]")
        if source is not None:
            _need(0 <= source[1] < len(sites.points), f"unknown point {source[1]}")
            _need(width == sites.points[source[1]].width, f"wrong width {width} for {sites.label(source[1])}")


def verify_cells(cells: CellRecords, sizes: Mapping[str, tuple[int, int]], limit: int, sites: SiteMap) -> None:
    """Verify cells with positions below `limit` and keys of `sizes` (rows, width). Raises `ProgramError`."""
    _check_sizes(sizes, sites)
    _need(len({*cells.keys}) == len(cells.keys) and all(key in sizes for key in cells.keys), "keys without a size")
    number = np.concatenate([np.zeros(0, np.int64), *(group.number.ravel() for group in cells.groups)])
    _need(cells.count >= 0 and bool(((number >= 0) & (number < cells.count)).all()), "cell number out of range")
    _need(len(np.unique(number)) == len(number), "duplicate cell")
    each_R = {group.records.shape[1:] for group in cells.groups}
    _need(len(each_R) == len(cells.groups), "duplicate groups")
    for group in cells.groups:
        _check_group(group, cells.keys, sizes, limit, sites)
    read = [index.ravel() for group in cells.groups for index in (group.key, group.beside)]
    used = np.unique(np.concatenate([np.full(1, -1), *read]))
    _need(len(used) == len(cells.keys) + 1, "unused keys")


def _check_group(
    group: CellGroup, keys: Sequence[str], sizes: Mapping[str, tuple[int, int]], limit: int, sites: SiteMap
) -> None:  # fmt: skip
    records, point, key, beside = group.records, group.point, group.key, group.beside
    _need(records.ndim == 2 and records.size > 0 and group.number.shape == records.shape[:1], "shape mismatch of cells")
    _need(all(each.shape == records.shape for each in (point, key, beside)), "shape mismatch of arrays")
    ranges = (point, 0, len(sites.points)), (key, -1, len(keys)), (beside, -1, len(keys))
    _need(all(bool(((of >= low) & (of < end)).all()) for of, low, end in ranges), "point or key out of range")
    rows, size = np.array([*(sizes[each] for each in keys), (0, 0)], np.int64).reshape(-1, 2).T
    width, shards = np.array([(of.width, sites.shard_count(of.number)) for of in sites.points]).T
    sampled = np.array([of.rows == "sampled" for of in sites.points])
    # by key: the number of shards of the run's row; 0: a vector
    shards_read = np.array([*(0 if (of := source_of(each)) is None else shards[of[1]] for each in keys), 0])
    start, stop, kind, step = (records[name].astype(np.int64) for name in ("start", "stop", "kind", "step"))
    value, x, y, other = (records[name] for name in ("value", "x", "y", "other"))
    columns = records["columns"].astype(np.int64) & 0xFFFFFFFF
    first, end = columns & 0xFFFF, np.where(columns, columns >> 16, width[point])
    match, noise, blend, project, linear = (kind == each for each in (MATCH, NOISE, BLEND, PROJECT, LINEAR))
    normed, rotate, low_rank = kind == ADD_NORMED, kind == ROTATE, kind == LOW_RANK
    gated = low_rank & (x == 0)
    removes, is_z = kind == REMOVE, np.array([of.kind == "z" for of in sites.points])
    reads = linear | blend | project | normed | rotate | (low_rank & ~gated)
    named = reads & (key >= 0)
    last = value + (stop - start - 1) * step
    sums = project | normed | rotate | low_rank | (noise & (step == 1))  # a sum over the row
    after = np.roll(match, 1, axis=1)  # preceded by a condition
    same = [each == np.roll(each, 1, axis=1) for each in (start, stop, point)]
    faults = {
        "unsupported record kind": ~(reads | match | noise | gated | removes),
        "points not ascending": np.diff(point, axis=1, prepend=0) < 0,
        f"position out of range (0..{limit - 1})": (start < 0) | (start >= stop) | (stop > limit),
        "columns out of range": (first >= end) | (end > width[point]),
        "step other than 0 or 1": ~match & ~removes & (step != 0) & (step != 1),
        "value row out of range": named & ((value < 0) | (value >= 1 << 31) | (last >= rows[key])),
        "wrong value width": named & (size[key] != width[point]),
        "rows sharded differently": named & (shards_read[key] != 0)
        & (shards_read[key] != shards[point]),
        "missing value": reads & ~named & ~(linear & (y == 0) & (value == 0)),
        "malformed mask": blend
        & ((beside < 0) | (rows[beside] != 1) | (size[beside] != width[point]) | (shards_read[beside] != 0)),
        "unexpected mask": ~(blend | low_rank) & (beside >= 0),
        "malformed factors": low_rank
        & ((beside < 0) | (y < 1) | (y > MAX_RANK) | (y != np.floor(y)) | (rows[beside] / 2 != y) |
           (size[beside] != width[point]) | (shards_read[beside] != 0)),
        "malformed gates": gated
        & ((key < 0) | (rows[key] != y) | (size[key] != 5) | (shards_read[key] != 0) | (value != 0) | (step != 0)),
        "low-rank edit of logits": low_rank & sampled[point],
        "unexpected address": (other != 0) & ~noise & ~(rotate & (other == 1)),
        "malformed rotation": rotate
        & ((rows[key] != 2) | (value != 0) | (step != 0) | (shards_read[key] != 0) | sampled[point]),
        "malformed noise": noise & ((key >= 0) | (value < 0) | (value >= 1 << 31) | (x != 0) | (other < 0)),
        "sum over a sharded row": sums
        & (first * shards[point] // width[point] != (end - 1) * shards[point] // width[point]),
        "non-finite numbers": ~(np.isfinite(x) & np.isfinite(y)),
        "unexpected factor": records["factor"] != 0,
        "malformed keys": removes
        & (~is_z[point] | (step < 0) | (value <= step) | (value > limit) | (x != 0) | (y != 0) | (key >= 0)),
        "malformed token ids": match & ((key < 0) | (rows[key] < 1) | (shards_read[key] != 0) | (value != 0)),
        "malformed condition": match & (x != 0) & (x != 1),
        "condition without an edit": after & (match | ~(same[0] & same[1] & same[2])),
    }  # fmt: skip
    for what, fault in faults.items():
        _need(not fault.any(), what)
    _need(not match[:, -1].any(), "condition without an edit")


def is_content(key: str, rows: np.ndarray) -> bool:
    """True if a bank key is the content hash of the rows, as a vector [n, W] or, if n is 1, [W]."""
    count, width = rows.shape
    data = np.ascontiguousarray(rows, "<f4").tobytes()
    shapes = [(count, width), (width,)] if count == 1 else [(count, width)]
    return key in [vector_key(Vector(shape, data)) for shape in shapes]


def _check_op(op: BoundOp, frame: Frame) -> None:
    points = frame.sites.points
    _need(all(0 <= point < len(points) for point in op.points), f"point out of range: {op.points}")
    widths = {points[point].width for point in op.points}
    _need(len(widths) <= 1, "points of different widths")
    width = next(iter(widths), 0)
    _need(len(op.values) in (0, 1, len(op.points)), f"{len(op.values)} values for {len(op.points)} points")
    reaches = op.is_edit and any(reaches_cache(points[point]) for point in op.points)
    _need(op.reaches_cache == reaches, "inconsistent reaches_cache")
    _check_columns(op, width)
    _check_ranges(op, frame)
    _check_shards(op, frame.sites)
    frame.decided.reading = frame.decided.reading if op.kind == TEST else None
    _check_action(op.action, op, frame, width)
    _check_own(op, frame)
    _check_guard(op, frame)
    if op.kind in DECIDE:
        _need(op.condition is None and bool(op.values) == (op.kind == TEST), "decision with values or a condition")
    if op.condition is not None:
        _need(frame.sizes.get(op.condition.ids, (0, 0))[0] >= 1, "missing token ids")


def _check_columns(op: BoundOp, width: int) -> None:
    first, end = op.columns & 0xFFFF, op.columns >> 16
    _need(op.columns == 0 or (0 <= first < end <= width), f"columns {first}..{end} out of range for width {width}")


def _check_ranges(op: BoundOp, frame: Frame) -> None:
    for start, stop, row, step in op.ranges:
        _need(0 <= start < stop <= frame.limit, f"positions {start}..{stop} out of range for limit {frame.limit}")
        _need(row >= 0 and step in (0, 1), f"invalid row {row} or step {step}")
    starts = [each.start for each in op.ranges]
    _need(not starts or starts[0] == min(starts), "positions not ascending")
    last = max((row + (stop - start - 1) * step for start, stop, row, step in op.ranges), default=-1)
    for key in op.values:
        rows, _ = frame.sizes.get(key, (0, 0))
        _need(last < rows, f"row {last} out of range for {rows} rows")


def _check_shards(op: BoundOp, sites: SiteMap) -> None:
    """Check that an edit reads only rows sharded like its own, and computes no sum over a sharded row."""
    for key, point in op.reads() if op.is_edit else ():
        read = source_of(key)
        cut = read is not None and sites.shard_count(read[1]) != sites.shard_count(point)
        _need(not cut, "rows sharded differently")
    if isinstance(op.action, (Projection, Factored, NormedAdd, Rotation)) or (
        isinstance(op.action, Noisy) and op.action.relative
    ):
        columns = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else None
        whole = all(sites.whole(SiteRef("", None, point, columns=columns)) for point in op.points)
        _need(whole, "sum over a sharded row")


def _check_own(op: BoundOp, frame: Frame) -> None:
    """Check that a run stores its own rows before reading them."""
    _need(all(map(is_vector, op.keys[len(op.values) :])), "expected inline vectors as mask, matrix and token ids")
    for key, point in op.reads() if op.is_edit else ():
        own = own_point(key)
        if own is None:
            continue
        _need(key in frame.stored, f"{key} is read but not stored")
        sites = frame.sites
        before = sites.stages == 1 and sites.depth(own) < sites.depth(point)
        _need(before and sites.shard_count(own) == sites.shard_count(point), f"{key} is not available at point {point}")
        for start, stop, row, step in op.ranges:
            read = np.arange(start, stop)
            _need(bool((frame.stored[key][row + (read - start) * step] <= read).all()), f"{key} is read too early")


@functools.singledispatch
def _check_action(action: Action, op: BoundOp, frame: Frame, width: int) -> None:
    """Check an action's fields, and that its values have the points' width."""
    raise ProgramError(f"{type(action).__name__} is not accepted from other processes")


@_check_action.register
def _keep(action: Keep, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 <= action.dtype < len(DTYPES), f"unknown dtype {action.dtype}")
    _need(0 <= action.pool <= len(POOLS), f"unknown pool {action.pool}")
    if action.probe:
        _need(as_probe_name(action.probe) not in frame.decided.probes, f"duplicate probe {action.probe!r}")
        _need(bool(action.matrix), "probe without a matrix")
        frame.decided.probes.add(action.probe)
        frame.decided.reading = op
    if action.lens:
        _need(not (action.matrix or action.pool or action.probe or action.reader), "unexpected fields of a lens")
        _need(not op.columns, "lens on part of a row")
        _need(not action.dtype, "lens on rounded rows")
        _need(all(map(frame.sites.lens_reads, op.points)), "lens at an unsupported point")
    _check_reader(action, op, frame)
    if action.in_step:
        _need(0 < action.pool <= POOLS.index("max") + 1 and not action.dtype, "unsupported pooling within a step")
        rows = {frame.sites.points[point].rows for point in op.points}
        _need(not action.conditional and rows <= {"tokens"}, "rows that cannot be pooled within a step")
        _need(bool(op.ranges) and op.ranges[-1].stop <= frame.prompt, "pooling of generated tokens within a step")
    _need(not op.values and op.condition is None, "capture with values or a condition")
    _check_matrix(action, op, frame, width)
    ends = [(a.stop, b.start) for a, b in zip(op.ranges, op.ranges[1:], strict=False)]
    _need(all(stop <= start for stop, start in ends), "duplicate positions")


def _check_reader(action: Keep, op: BoundOp, frame: Frame) -> None:
    reader = action.reader
    if reader is None:
        _need(not action.top, "features without an SAE")
        return
    _need(not (action.matrix or action.pool or action.probe), "unexpected fields of a reader")
    if isinstance(reader, AttentionReader):
        sizes = frame.sites.sizes
        _need(reader.site in DERIVED, f"unknown attention site {reader.site[:64]!r}")
        _need(not frame.sites.no_attention, f"{reader.site} is not supported by this engine")
        _need(
            {frame.sites.points[point].kind for point in op.points} <= {ROTATED},
            "attention at a point without queries",
        )
        _need(0 <= reader.first < reader.first + reader.heads <= sizes.heads, "heads out of range")
        _need((reader.keys == 0) != (action.top == 0) and 0 <= action.top <= MAX_TOP, "expected either keys or top")
        _need(reader.keys in (0, -(-frame.limit // KEYS) * KEYS), f"invalid number of keys {reader.keys}")
        return
    found = frame.sites.dictionaries.get(reader.name)
    _need(found is not None and found.card.content == reader.content, f"unknown SAE {reader.name[:64]!r} or content")
    assert found is not None
    columns, ids = found.at.columns, reader.ids
    _need(set(op.points) <= {found.at.point}, "SAE at an unexpected point")
    _need(op.columns == (pack_columns(columns) if columns else 0), "SAE at unexpected columns")
    _need(reader.first == (columns[0] if columns else 0), "SAE at unexpected columns")
    most = min(MAX_TOP if ids is None else MAX_FEATURES, found.card.features)
    _need(1 <= action.top <= most, f"invalid number of features {action.top}")
    _need(ids is None or len(ids) == action.top, f"expected {action.top} ids")
    _need(ids is None or all(0 <= each < found.card.features for each in ids), "feature id out of range")


def _check_matrix(action: Keep, op: BoundOp, frame: Frame, width: int) -> None:
    if not action.matrix:
        _need(action.products == 0 and not op.columns, "columns or products without a matrix")
        return
    _need(1 <= action.products <= width, f"invalid number of products {action.products}")
    _need(is_vector(action.matrix), "expected an inline vector as matrix")
    _need(frame.sizes.get(action.matrix) == (action.products, width), f"matrix without {action.products} rows")
    columns = (op.columns & 0xFFFF, op.columns >> 16) if op.columns else None
    for point in op.points:
        _need(frame.sites.points[point].rows == "tokens", "projection of logits")
        _need(frame.sites.whole(SiteRef("", None, point, columns=columns)), "projection of a sharded row")


@_check_action.register
def _test(action: Compare, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.threshold)
    kept = frame.decided.reading
    if kept is None or not isinstance(kept.action, Keep) or kept.action.probe != action.probe:
        raise ProgramError(f"invalid bound program: comparison of probe {action.probe[:64]!r} without a preceding read")
    rows = {each.row for each in op.ranges}
    _need(op.values == (kept.action.matrix,) and op.columns == kept.columns, "comparison with a different matrix")
    _need(
        len(rows) == 1 and max(rows) < kept.action.products and op.points == kept.points,
        "comparison of another product",
    )
    _need([each[:2] for each in op.ranges] == [each[:2] for each in kept.ranges], "comparison at different positions")
    _set_bit(action.bit, op, frame)


@_check_action.register
def _all(action: All, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 < action.mask < 1 << BITS and action.wanted & ~action.mask == 0, "bits out of range")
    _need(action.wanted >= 0, "bits out of range")
    for bit in range(BITS):
        if action.mask >> bit & 1:
            _read_bit(bit, op, frame)
    _set_bit(action.bit, op, frame)


@_check_action.register
def _latch(action: Latch, op: BoundOp, frame: Frame, width: int) -> None:
    _need(0 <= action.latch < LATCHES and action.latch not in frame.decided.latches, f"invalid latch {action.latch}")
    _read_bit(action.bit, op, frame)
    [point] = op.points
    _need(bool(op.ranges), "latch without positions")
    if action.last:
        bit, depth = frame.decided.spans.pop(action.latch, (-1, 0))
        kept = bit == action.bit and frame.sites.depth(point) > depth and frame.sites.points[point].rows == "tokens"
        _need(kept and op.ranges == (PositionRange(frame.prompt, frame.limit),), "latch without its span")
    _need(action.last or action.latch not in frame.decided.spans, f"invalid latch {action.latch}")
    frame.decided.latches[action.latch] = frame.sites.depth(point), point, op.ranges[0].start


@_check_action.register
def _span(action: Span, op: BoundOp, frame: Frame, width: int) -> None:
    _need(op.ranges == (PositionRange(frame.prompt, frame.limit),), "span at unexpected positions")
    _need(0 <= min(action.opening, action.closing) != max(action.opening, action.closing) < frame.sites.d_vocab,
          "invalid delimiters")  # fmt: skip
    latch, decided = action.latch, frame.decided
    _need(0 <= latch < LATCHES and latch not in decided.latches and latch not in decided.spans, f"bad latch {latch}")
    for bit in (action.bit, action.bit + 1):
        _set_bit(bit, op, frame)
    decided.spans[latch] = action.bit + 1, frame.sites.depth(op.points[0])


def _set_bit(bit: int, op: BoundOp, frame: Frame) -> None:
    """Check an op that sets a bit: it acts at one point with an unsharded row for every token."""
    _need(0 <= bit < BITS and bit not in frame.decided.bits and len(op.points) == 1, f"invalid bit {bit}")
    [point] = op.points
    sites = frame.sites
    _need(sites.points[point].rows == "tokens" and sites.shard_count(point) == 1 and sites.stages == 1,
          "decision at a sharded site")  # fmt: skip
    frame.decided.bits[bit] = sites.depth(point), point


def _read_bit(bit: int, op: BoundOp, frame: Frame) -> None:
    _need(bit in frame.decided.bits and len(op.points) == 1, f"bit {bit} is not set")
    depth, point = frame.decided.bits[bit]
    mine = frame.sites.depth(op.points[0])
    _need(mine > depth or op.points[0] == point, f"bit {bit} is set in a later layer")


def _check_guard(op: BoundOp, frame: Frame) -> None:
    """Check that an edit comes after the decision it depends on."""
    if (guard := op.guard) is None:
        return
    decided, is_latched = frame.decided, guard.latch != -1
    known = guard.latch in decided.latches if is_latched else guard.bit in decided.bits
    _need(op.is_edit and op.kind != APPLY and known and 0 <= guard.bit < BITS, f"invalid guard {guard}")
    depth, point, *first = decided.latches[guard.latch] if is_latched else decided.bits[guard.bit]
    at_once = not first or first[0] >= frame.prompt - 1  # otherwise a later row of the same step might set the latch
    for each in op.points:
        later = frame.sites.depth(each) > depth or (each == point and at_once)
        _need(later and frame.sites.points[each].rows == "tokens", "edit before its condition is decided")


@_check_action.register
def _store(action: Store, op: BoundOp, frame: Frame, width: int) -> None:
    positions = position_array(op.ranges)
    count = sum(stop - start for start, stop, *_ in op.ranges)
    _need(len(positions) == count > 0 and not op.columns and op.condition is None, "duplicate or missing positions")
    ends = list(itertools.accumulate(stop - start for start, stop, *_ in op.ranges))
    in_order = all(stop - start == 1 or step == 1 for start, stop, _, step in op.ranges)
    _need(in_order and [row for _, _, row, _ in op.ranges] == [0, *ends[:-1]], "rows stored out of order")
    _need([own_point(key) for key in op.values] == list(op.points), "keys that do not match the points")
    for key, point in zip(op.values, op.points, strict=True):
        _need(frame.sizes.get(key) == (count, width), f"shape mismatch: {count} rows stored in {frame.sizes.get(key)}")
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
    _need(frame.sizes.get(action.mask) == (1, width), f"expected a mask [1, {width}]")


@_check_action.register
def _project(action: Projection, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.low, action.high)
    _check_values(op, frame, width, needed=True)


@_check_action.register
def _low_rank(action: Factored, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.toward)
    _need(1 <= action.rank <= MAX_RANK, f"invalid rank {action.rank}")
    _need(frame.sizes.get(action.factors) == (2 * action.rank, width), f"wrong factors for rank {action.rank}")
    _need(all(frame.sites.points[point].rows == "tokens" for point in op.points), "low-rank edit of logits")
    if action.toward:
        _check_values(op, frame, width, needed=True)
        return
    _need(len(op.values) == 1 and is_vector(op.values[0]), "expected an inline vector as gates")
    _need(frame.sizes.get(op.values[0]) == (action.rank, 5), "malformed gates")
    _need(all(each.row == each.step == 0 for each in op.ranges), "gates that depend on positions")


@_check_action.register
def _encoded(action: Encoded, op: BoundOp, frame: Frame, width: int) -> None:
    found = frame.sites.dictionaries.get(action.name)
    if found is None or found.card.content != action.content:
        raise ProgramError(f"invalid bound program: SAE {action.name[:64]!r} is not attached")
    _need(op.points == ((found.at if action.reads else found.to).point,), "SAE at an unexpected site")
    _need(action.reads <= (found.at != found.to), "read of an SAE that writes at the same site")
    _need(not op.values and op.guard is None, "SAE edit with a value or a guard")
    _need(all(0 <= each < found.card.features for each in action.ids), "feature id out of range")
    _need(len(action.gates) == len(action.ids) <= MAX_FEATURES, "expected one gate per feature")
    _check_numbers(*(number for gate in action.gates for number in gate))


@_check_action.register
def _attended(action: Attended, op: BoundOp, frame: Frame, width: int) -> None:
    _need(not frame.sites.no_attention, "attention edits are not supported by this engine")
    _need({frame.sites.points[point].kind for point in op.points} <= {ROTATED}, "attention at a point without queries")
    _need(not op.values and op.condition is None and op.guard is None, "attention edit with a value or a condition")
    size = frame.sites.sizes.d_head
    _need((op.columns & 0xFFFF) % size == (op.columns >> 16) % size == 0, "columns that split a head")
    _need(all(0 <= first < end <= frame.limit for first, end in action.keys), "keys out of range")
    _need(bool(op.ranges), "attention edit without positions")
    for ranges in (action.keys, [each[:2] for each in op.ranges]):
        _need(all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "duplicate queries or keys")
    _need(bool(action.keys) or action.factor is not None, "no keys to remove")
    if action.factor is not None:
        _check_numbers(action.factor)
    if action.rows:
        rows, columns = frame.sizes.get(action.rows, (0, 0))
        last = max((row + (stop - start - 1) * step for start, stop, row, step in op.ranges), default=-1)
        _need(action.factor is not None and last < rows and columns <= frame.limit, f"row {last} exceeds {rows} rows")


@_check_action.register
def _add_normed(action: NormedAdd, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.scale)
    _check_values(op, frame, width, needed=True)


@_check_action.register
def _rotate(action: Rotation, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.cos, action.sin)
    _check_values(op, frame, width, needed=True)
    _need(all(is_vector(key) and frame.sizes.get(key, (0, 0))[0] == 2 for key in op.values), "malformed plane")
    _need(all(each.row == each.step == 0 for each in op.ranges), "plane that depends on positions")
    _need(all(frame.sites.points[point].rows == "tokens" for point in op.points), "rotation of logits")


@_check_action.register
def _noise(action: Noisy, op: BoundOp, frame: Frame, width: int) -> None:
    _check_numbers(action.std)
    _need(0 <= action.seed < 1 << 63 and action.first_column == 0, "invalid seed or first column")
    streams = action.streams
    _need(len(streams) == len(op.points) and all(0 <= each < 1 << 31 for each in streams), "invalid noise streams")
    _need(not op.values, "noise with values")


def _check_values(op: BoundOp, frame: Frame, width: int, needed: bool) -> None:
    _need(bool(op.values) or not needed or not op.points, "missing value")
    for key in op.values:
        _, columns = frame.sizes.get(key, (0, 0))
        _need(columns == width, f"wrong value width {columns} for points of width {width}")


def _check_numbers(*numbers: float) -> None:
    _need(
        all(math.isfinite(each) and abs(each) <= MAX_FP32 for each in numbers), f"numbers out of fp32 range: {numbers}"
    )


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ProgramError(f"invalid bound program: {what}"[:400])
