"""The Triton kernel: one launch per point and step, for any number of ops and requests.

Each Triton program processes one row: it looks up the row's slot, walks the slot's records at the point in order, and
writes the row back once if it is finite. Rows without records exit as soon as their record range is loaded. A new op is
a branch in `_walk`; a new strided view only changes the strides. Logit rows are wide and take several passes; sums over
a whole row are computed beforehand, op by op, and stored in the op's record.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from patchclamp import plan
from patchclamp.kernels import noise
from patchclamp.kernels.relaunch import relauncher
from patchclamp.plan import RECORD, bound

MAX_BLOCK, PASS_BLOCK = 8192, 4096  # columns of a sampled row per Triton program; wider rows take passes of PASS_BLOCK
RECORD_WORDS = RECORD.itemsize // 4  # start, stop, kind, step, value (two), x, y, other (two), factor, columns
WORDS, FACTOR = tl.constexpr(RECORD_WORDS), tl.constexpr(RECORD.fields["factor"][1] // 4)  # type: ignore[index]
COLUMNS = tl.constexpr(RECORD.fields["columns"][1] // 4)  # type: ignore[index]
CAPTURE, LINEAR, BLEND = (tl.constexpr(n) for n in (plan.CAPTURE, plan.LINEAR, plan.BLEND))
PROJECT, NOISE, MATCH = (tl.constexpr(n) for n in (plan.PROJECT, plan.NOISE, plan.MATCH))
APPLY, STORE, LOW_RANK = (tl.constexpr(n) for n in (plan.APPLY, plan.STORE, plan.LOW_RANK))
ADD_NORMED, ROTATE, SPAN = (tl.constexpr(n) for n in (plan.ADD_NORMED, plan.ROTATE, plan.SPAN))
REMOVE = tl.constexpr(plan.REMOVE)
TEST, ALL, LATCH, WHEN = (tl.constexpr(n) for n in (plan.TEST, plan.ALL, plan.LATCH, plan.WHEN))
MAX_LATCHES, BITS, MAX_GATES = (tl.constexpr(n) for n in (bound.LATCHES, bound.BITS, bound.MAX_RANK))
PARTS, OCTAVES, BORDERS = (tl.constexpr(n) for n in (noise.PARTS, noise.OCTAVES, (1 << noise.PARTS) + 1))
UNIT = tl.constexpr(2.0**-noise.FRACTION)


@triton.jit
def _look(address):
    """Load a word of the tables with an eviction policy that keeps it in L2 while weights stream through."""
    return tl.load(address, eviction_policy="evict_last")


@triton.jit
def _normals(seed, position, site, first, quantiles, BLOCK: tl.constexpr):
    """Return `noise.normals`: ε for columns first … first + BLOCK − 1; `first` and BLOCK are multiples of 4."""
    group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, group, position.to(tl.uint32), site.to(tl.uint32), (group * 0).to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])  # interleaves a group's four words
    m = (words >> 1).to(tl.int32)
    # the leading 1 bit; the next bit is cleared, since fp32 could otherwise round up to the next octave
    octave = ((m & ~(m >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    octave = tl.where(m == 0, 0, octave)
    rest, fine = m - (1 << octave), tl.maximum(octave - PARTS, 0)
    part = tl.where(octave >= PARTS, rest >> fine, rest << tl.maximum(PARTS - octave, 0))
    at = quantiles + tl.where(m == 0, OCTAVES, octave) * BORDERS + tl.where(m == 0, 0, part)
    upper, lower = _look(at), _look(at + 1)
    within = (rest & ((1 << fine) - 1)).to(tl.uint32) << 1 << (31 - fine)  # the fraction of the bin, in units of 2^-32
    magnitude = upper - tl.umulhi((upper - lower).to(tl.uint32), tl.where(m == 0, 0, within)).to(tl.int32)
    return tl.where((words & 1) == 1, -magnitude, magnitude).to(tl.float32) * UNIT


@triton.jit
def _dot(a, b, inside):
    """Return the sum of a · b over this block's columns, in fp64."""
    return tl.sum(tl.where(inside, a.to(tl.float64) * b.to(tl.float64), 0.0), axis=0)


@triton.jit
def _factor(total, other, kind, x, y):
    """Return the factor of v or ε, from the sum over the row and a divisor: the number of columns, or the sum of v's
    squares."""
    projection = total.to(tl.float32)
    clamped = tl.minimum(tl.maximum(projection, x), y) - projection
    none = (kind == PROJECT) | (other == 0)
    size = tl.sqrt(tl.where(none, 0.0, total) / tl.where(none, 1, other)).to(tl.float32)
    return tl.where(kind == PROJECT, clamped, y * size)


@triton.jit
def _turned(a, b, cos, sin, is_relative):
    """Return the changes to two coordinates that rotate them to an angle or, if `is_relative`, by that angle."""
    cos, sin, length = cos.to(tl.float64), sin.to(tl.float64), tl.sqrt(a * a + b * b)
    to_a = tl.where(is_relative, a * cos - b * sin, length * cos) - a
    to_b = tl.where(is_relative, a * sin + b * cos, length * sin) - b
    return to_a.to(tl.float32), to_b.to(tl.float32)


@triton.jit
def _needs_a_sum(kind, step):
    return (kind == PROJECT) | (kind == ADD_NORMED) | ((kind == NOISE) & (step != 0))


@triton.jit
def _matches(token, ids, count, x):
    """True if a token's id is among `count` ascending ids or, if x is 0, is not among them."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        below = _look(ids + middle) < token
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return (_look(ids + tl.minimum(low, count - 1)) == token) == (x != 0.0)


@triton.jit
def _record(records, number):
    """Load all words of a record at once, since dependent loads are the main cost."""
    record = records + number.to(tl.int64) * WORDS
    start, stop, kind, step = _look(record), _look(record + 1), _look(record + 2), _look(record + 3)
    value = _look((record + 4).to(tl.pointer_type(tl.int64)))
    x = _look((record + 6).to(tl.pointer_type(tl.float32)))
    y = _look((record + 7).to(tl.pointer_type(tl.float32)))
    return start, stop, kind, step, value, x, y, _look(record + COLUMNS)


@triton.jit
def _vector(bank, columns, width, position, start, stop, kind, step, value, y, ALIGNED: tl.constexpr):
    """Load columns of a record's vector; fully masked if the record has no vector."""
    begins = value + (position - start).to(tl.int64) * step * width
    if ALIGNED:
        begins = tl.multiple_of(begins, 16)
    needs = (kind == BLEND) | (kind == PROJECT) | (kind == TEST) | (kind == ADD_NORMED)
    needs = needs | ((kind == LINEAR) & (y != 0.0))
    needs = needs & (position >= start) & (position < stop)
    return tl.load(bank + begins + columns, mask=columns < tl.where(needs, width, 0), other=0.0)


@triton.jit
def _loaded(v, bank, columns, inside, width, position, start, step, value, ALIGNED: tl.constexpr, AHEAD: tl.constexpr):
    """Return columns of a record's vector: `v` if prefetched, otherwise loaded now."""
    if AHEAD:
        return v
    else:
        begins = value + (position - start).to(tl.int64) * step * width
        if ALIGNED:
            begins = tl.multiple_of(begins, 16)
        return tl.load(bank + begins + columns, mask=inside, other=0.0)


@triton.jit
def _kept_row(
    kept, row, position, start, range_index, region_index, width, rank_of_row, base, offset, origin_of_row, stride,
    SAMPLED: tl.constexpr,
):  # fmt: skip
    """Return the address of a captured row's region, and the row's offset in it, in elements. Each step that reuses the
    plan writes `stride` bytes after the previous step."""
    to, nth = kept + _look(base + region_index), position - tl.maximum(start, position - _look(rank_of_row + row))
    if not SAMPLED:
        to += (position - _look(origin_of_row + row)).to(tl.int64) * _look(stride)
    return to, (_look(offset + range_index) + nth).to(tl.int64) * width


@triton.jit
def _keep(h, to, at, inside, dtype, ALIGNED: tl.constexpr):
    """Store columns of a row in the step's captures."""
    if ALIGNED:
        to = tl.multiple_of(to, 16)
    if dtype == 0.0:
        tl.store(to.to(tl.pointer_type(tl.float32)) + at, h, mask=inside)
    elif dtype == 1.0:
        tl.store(to.to(tl.pointer_type(tl.bfloat16)) + at, h.to(tl.bfloat16), mask=inside)
    else:
        tl.store(to.to(tl.pointer_type(tl.float16)) + at, h.to(tl.float16), mask=inside)


@triton.jit
def _keep_products(h, to, at, record, bank, columns, inside, width, products, dtype):
    """Capture a row's products with a matrix, summed in fp32. Stores are masked: branches would need more registers."""
    h, matrix = tl.where(inside, h, 0.0), bank + _look((record + 8).to(tl.pointer_type(tl.int64)))
    for number in range(products.to(tl.int32)):
        product = tl.sum(h * tl.load(matrix + number * width + columns, mask=inside, other=0.0), axis=0)
        place = to + (at + number) * tl.where(dtype == 0.0, 4, 2)
        tl.store(place.to(tl.pointer_type(tl.float32)), product, mask=dtype == 0.0)
        brain = product.to(tl.bfloat16).to(tl.int16, bitcast=True)
        half = product.to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(place.to(tl.pointer_type(tl.int16)), tl.where(dtype == 1.0, brain, half), mask=dtype != 0.0)


@triton.jit
def _capture(
    h, columns, inside, part, width, position, row, rank_of_row, record, start, range_index, region_index, dtype,
    products, base, offset, origin_of_row, stride, bank, kept, SAMPLED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Capture columns of a row, or their products with a matrix. Sampled rows are captured whole."""
    size = width if SAMPLED else tl.where(products == 0.0, width, products.to(tl.int32))
    to, before = _kept_row(kept, row, position, start, range_index, region_index, size, rank_of_row, base, offset,
                           origin_of_row, stride, SAMPLED)  # fmt: skip
    if (products == 0.0) | SAMPLED:
        _keep(h, to, before + columns, inside, dtype, ALIGNED)
    else:
        _keep_products(h, to, before, record, bank, columns, inside & part, width, products, dtype)


@triton.jit
def _gate(product, numbers, toward):
    """Return a low-rank op's coefficient for one direction. `product`: the row's product for this direction."""
    q = product + _look(numbers)
    gated = tl.where(q > _look(numbers + 1), _look(numbers + 2) + _look(numbers + 3) * q, _look(numbers + 4))
    return tl.where(toward == 0.0, gated, toward * product)


@triton.jit
def _when(latch, bit, position, bits, latches):
    """True if a bit of the row is set or, with `latch` >= 0, if the latched position is not after the row's. A latch
    set by this row itself may not be in memory yet, so `bits` holds it too."""
    number = tl.maximum(latch, 0).to(tl.int32)
    first = tl.load(latches + number)
    from_latch = (position >= first) | (((bits >> (BITS + number)) & 1) != 0)
    return tl.where(latch < 0, ((bits >> bit) & 1) != 0, from_latch)


@triton.jit
def _spanned(token, position, rank, start, opening, closing, is_inside, latch):
    """Return 1 if a row's token is strictly between delimiters, plus 2 if the latest delimiter is an opening one."""
    far, back, found = tl.minimum(rank, position - start), 0, 0
    while (back <= far) & (found == 0):  # backwards through this request's rows of the step
        id = _look(token - back).to(tl.float32)
        found = tl.where(id == opening, 2, tl.where(id == closing, 1, 0))
        back += 1
    before = tl.where(position - far == start, is_inside, tl.load(latch) & 1)
    after = tl.where(found == 0, before, found - 1)
    is_delimiter = (found != 0) & (back == 1)
    return tl.where(is_delimiter, 0, after) + 2 * after


@triton.jit
def _walk(
    h, column, inside, width, begin, end, position, row, rank_of_row, token_of_row, records, base, offset,
    origin_of_row, stride, bank, kept, quantiles, bits_of_row, gates_of_row, latches,
    SAMPLED: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the records to a row's columns starting at `column`. Also returns 1 if an edit was applied. `WHOLE`: the
    columns are the whole row. While a record is applied, the next one and its vector are prefetched."""
    AHEAD: tl.constexpr = BLOCK <= 8192  # two vectors of wider rows do not fit into registers
    edited, matched, columns = 0, 1, column + tl.arange(0, BLOCK)
    bits = _look(bits_of_row + row)  # above the records' bits: the latches that this row has set
    start, stop, kind, step, value, x, y, word = _record(records, begin)
    v, number = 0.0, begin
    if AHEAD:
        v = _vector(bank, columns, width, position, start, stop, kind, step, value, y, ALIGNED)
    while number < end:
        record = records + number.to(tl.int64) * WORDS
        if not AHEAD:
            start, stop, kind, step, value, x, y, word = _record(records, number)
        applies = matched != 0
        holds, matched = (position >= start) & (position < stop) & applies, 1
        if AHEAD:
            coming = tl.minimum(number + 1, end - 1)
            start_2, stop_2, kind_2, step_2, value_2, x_2, y_2, word_2 = _record(records, coming)
            stop_2 = tl.where(coming > number, stop_2, 0)  # no record after the last
            v_2 = _vector(bank, columns, width, position, start_2, stop_2, kind_2, step_2, value_2, y_2, ALIGNED)
        if holds:
            low, high = word & 0xFFFF, tl.where(word == 0, width, (word >> 16) & 0xFFFF)
            changed = (columns >= low) & (columns < high)
            if kind == CAPTURE:  # x is the dtype, step the range, value the region, y the number of products
                if KEEP:
                    _capture(h, columns, inside, changed, width, position, row, rank_of_row, record, start, step, value,
                             x, y, base, offset, origin_of_row, stride, bank, kept, SAMPLED, ALIGNED)  # fmt: skip
            elif kind == LINEAR:  # a factor of 0 omits its term, even if NaN
                edited = 1
                edit = tl.where(x == 0.0, 0.0, h * x)
                if y != 0.0:
                    added = _loaded(v, bank, columns, inside, width, position, start, step, value, ALIGNED, AHEAD) * y
                    edit = tl.where(x == 0.0, added, edit + added)
                h = tl.where(changed, edit, h)
            elif kind == BLEND:
                edited = 1
                mask = _look((record + 8).to(tl.pointer_type(tl.int64)))
                a = tl.load(bank + mask + columns, mask=inside, other=0.0) * y
                put = _loaded(v, bank, columns, inside, width, position, start, step, value, ALIGNED, AHEAD)
                edit = tl.where(a == 1.0, put, (1.0 - a) * h + a * put)
                h = tl.where(changed & (a != 0.0), edit, h)
            elif kind == MATCH:  # without a match, the next record is skipped
                matched = _matches(_look(token_of_row + row).to(tl.float32), bank + value, step, x).to(tl.int32)
            elif kind == TEST:  # other is the bit; the product is computed as for captures
                against = _loaded(v, bank, columns, inside, width, position, start, 0, value, ALIGNED, AHEAD)
                product = tl.sum(tl.where(inside & changed, h * against, 0.0), axis=0)
                above = (product > x).to(tl.int32)
                bit = _look((record + 8).to(tl.pointer_type(tl.int64))).to(tl.int32)
                bits = (bits & ~(1 << bit)) | (above << bit)
            elif kind == ALL:  # value is the mask, other the wanted bits, x 1 if negated, step the bit
                wanted = _look((record + 8).to(tl.pointer_type(tl.int64))).to(tl.int32)
                alike = ((bits & value.to(tl.int32)) == wanted) != (x != 0.0)
                bits = (bits & ~(1 << step)) | (alike.to(tl.int32) << step)
            elif kind == LATCH:
                is_set = (bits >> step) & 1
                tl.atomic_min(latches + value, position, mask=(is_set != 0) & (x == 0.0) & KEEP)
                tl.atomic_max(latches + value, 2 * position + is_set, mask=(x != 0.0) & KEEP)
                bits = bits | (tl.where(x == 0.0, is_set, 0) << (BITS + value.to(tl.int32)))
            elif kind == SPAN:
                is_inside = _look((record + 8).to(tl.pointer_type(tl.int64))).to(tl.int32)
                both = _spanned(token_of_row + row, position, _look(rank_of_row + row), start, x, y, is_inside,
                                latches + value)  # fmt: skip
                bits = (bits & ~(3 << step)) | (both << step)
                tl.store(latches + value, 0, mask=(position == start) & KEEP)
            elif kind == WHEN:
                held = _when(value, step, position, bits, latches)
                matched = held.to(tl.int32)
            elif kind == STORE:
                tl.store(bank + value + (position - start).to(tl.int64) * width + columns, h, mask=inside & KEEP)
            elif kind == PROJECT:
                edited = 1
                along = _loaded(v, bank, columns, inside, width, position, start, step, value, ALIGNED, AHEAD)
                if WHOLE:
                    factor = _factor(_dot(h, along, inside & changed), width, kind, x, y)
                else:
                    factor = tl.load((record + FACTOR).to(tl.pointer_type(tl.float32)))
                if factor != 0.0:
                    h = tl.where(changed, h + factor * along, h)
            elif kind == LOW_RANK:
                edited = 1
                if WHOLE:  # not supported for sampled rows
                    rank, gates = y.to(tl.int32), gates_of_row + row * MAX_GATES
                    factors = bank + _look((record + 8).to(tl.pointer_type(tl.int64)))
                    for turn in range(2 * rank):  # all gates first, through memory, then all changes
                        factor = tl.load(factors + turn * width + columns, mask=inside & changed, other=0.0)
                        if turn < rank:
                            source = bank + value + (position - start).to(tl.int64) * step * width
                            toward = tl.load(source + columns, mask=columns < tl.where(x != 0.0, width, 0), other=0.0)
                            product = _dot(tl.where(x != 0.0, toward - h, h), factor, inside & changed)
                            numbers = tl.where(x == 0.0, value + 5 * turn, 0)
                            tl.store(gates + turn, _gate(product.to(tl.float32), bank + numbers, x))
                        else:
                            g = tl.load(gates + turn - rank)
                            if g != 0.0:
                                h = tl.where(changed, h + g * factor, h)
                        tl.debug_barrier()  # other threads of this program read the gates next
            elif kind == REMOVE:
                pass  # applied by `kernels.paged_attention.remove_keys`
            elif kind == ADD_NORMED:
                edited = 1
                added = _loaded(v, bank, columns, inside, width, position, start, step, value, ALIGNED, AHEAD)
                if WHOLE:
                    part = inside & changed
                    factor = _factor(_dot(h, h, part), _dot(added, added, part), kind, x, y)
                else:
                    factor = tl.load((record + FACTOR).to(tl.pointer_type(tl.float32)))
                if factor != 0.0:
                    h = tl.where(changed, h + factor * added, h)
            elif kind == ROTATE:
                edited = 1
                if WHOLE:  # sampled rows are not rotated
                    is_relative = _look((record + 8).to(tl.pointer_type(tl.int64))) != 0
                    a, b = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
                    for turn in range(4):  # both products, then both changes: holding two vectors takes more registers
                        unit = tl.load(bank + value + (turn & 1) * width + columns, mask=inside, other=0.0)
                        product = _dot(h, unit, inside & changed)
                        a, b = tl.where(turn == 0, product, a), tl.where(turn == 1, product, b)
                        to_a, to_b = _turned(a, b, x, y, is_relative)
                        h = tl.where(changed & (turn > 1), h + tl.where(turn == 2, to_a, to_b) * unit, h)
            else:
                edited, factor = 1, y
                if step != 0:
                    if WHOLE:
                        factor = _factor(_dot(h, h, inside & changed), high - low, kind, x, y)
                    else:
                        factor = tl.load((record + FACTOR).to(tl.pointer_type(tl.float32)))
                if factor != 0.0:
                    seed = _look((record + 8).to(tl.pointer_type(tl.int64)))
                    noise = _normals(seed, position, value, column + x.to(tl.int32), quantiles, BLOCK)
                    h = tl.where(changed, h + factor * noise, h)
        if (kind == WHEN) & (applies == 0):  # the preceding token condition did not hold
            matched = 0
        number += 1
        if AHEAD:
            start, stop, kind, step, value, x, y = start_2, stop_2, kind_2, step_2, value_2, x_2, y_2
            v, word = v_2, word_2
    if KEEP:
        tl.store(bits_of_row + row, bits)
    return h, edited


@triton.jit
def _sums(
    hidden, residual, width, begin, end, position, row, rank_of_row, token_of_row, records, base, offset,
    origin_of_row, stride, bank, kept, quantiles, bits_of_row, gates_of_row, latches,
    PAIR: tl.constexpr, SAMPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Compute and store each record's factor, from the sum over the row as edited by the preceding records."""
    record, matched = records + begin.to(tl.int64) * WORDS, 1
    for number in range(begin, end):
        start, stop, kind, step = _look(record), _look(record + 1), _look(record + 2), _look(record + 3)
        value = _look((record + 4).to(tl.pointer_type(tl.int64)))
        x = _look((record + 6).to(tl.pointer_type(tl.float32)))
        holds, matched = (position >= start) & (position < stop) & (matched != 0), 1
        if holds & (kind == MATCH):
            matched = _matches(_look(token_of_row + row).to(tl.float32), bank + value, step, x).to(tl.int32)
        if holds & _needs_a_sum(kind, step):
            y = _look((record + 7).to(tl.pointer_type(tl.float32)))
            total, other = tl.zeros([], tl.float64), tl.where(kind == ADD_NORMED, 0, width).to(tl.float64)
            for block in range(PASSES):
                columns = block * BLOCK + tl.arange(0, BLOCK)
                inside = columns < width
                h = _read(hidden, residual, columns, inside, PAIR)
                h, _ = _walk(h, block * BLOCK, inside, width, begin, number, position, row, rank_of_row, token_of_row,
                             records, base, offset, origin_of_row, stride, bank, kept, quantiles, bits_of_row,
                             gates_of_row, latches,
                             SAMPLED, False, ALIGNED, False, BLOCK)  # fmt: skip
                if kind == PROJECT:
                    total += _dot(h, tl.load(bank + value + columns, mask=inside, other=0.0), inside)
                else:
                    total += _dot(h, h, inside)
                if kind == ADD_NORMED:
                    begins = value + (position - start).to(tl.int64) * step * width
                    added = tl.load(bank + begins + columns, mask=inside, other=0.0)
                    other += _dot(added, added, inside)
            tl.store((record + FACTOR).to(tl.pointer_type(tl.float32)), _factor(total, other, kind, x, y))
            tl.debug_barrier()  # other threads of this program read it next
        record += WORDS


@triton.jit
def _read(hidden, residual, columns, inside, PAIR: tl.constexpr):
    """Load columns of a stream row, in fp32."""
    h = tl.load(hidden + columns, mask=inside, other=0.0).to(tl.float32)
    if PAIR:
        h += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
    return h


@triton.jit
def _write(hidden, residual, columns, inside, h, PAIR: tl.constexpr):
    """Store columns of a row, as one tensor or as the pair with the smallest rounding error."""
    if PAIR:
        rounded = h.to(residual.dtype.element_ty)
        tl.store(residual + columns, rounded, mask=inside)
        h = h - rounded.to(tl.float32)
    tl.store(hidden + columns, h.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _finite(h, inside):
    """Return 1 if all columns are finite."""
    return tl.min(tl.where(inside, (tl.abs(h.to(tl.float32)) < float("inf")).to(tl.int32), 1), axis=0)


@triton.jit
def _between(records, begin, end, phase):
    """Return the range of records in begin … end − 1 between code records `phase` − 1 and `phase`."""
    low, high, seen = begin, end, 0
    kind = records + begin.to(tl.int64) * WORDS + 2
    for number in range(begin, end):
        if _look(kind) == APPLY:
            seen += 1
            low = tl.where(seen == phase, number + 1, low)
            high = tl.where(seen == phase + 1, number, high)
        kind += WORDS
    return tl.where(seen < phase, high, low), high


@triton.jit(do_not_specialize=["kept", "bad", "point", "points", "phase", "turn"])
def _site(
    slot_of_row, rank_of_row, position_of_row, token_of_row, row_of_sample, rank_of_sample, generation,
    first, records, base, offset, origin_of_row, stride, bank, quantiles, bits_of_row,
    gates_of_row, latches, bad, points,
    hidden, residual, hidden_stride, residual_stride, width, kept, point, phase, turn,
    PAIR: tl.constexpr, SAMPLED: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, ALIGNED: tl.constexpr,
    CODE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if SAMPLED:
        row = _look(row_of_sample + out_row).to(tl.int64)
    slot = _look(slot_of_row + row)
    position = _look(position_of_row + row).to(tl.int32)
    begin = _look(first + slot * (points + 1) + point)  # slot 0 has no records
    end = _look(first + slot * (points + 1) + point + 1)
    if SAMPLED:
        if PASSES > 1:  # a record holds the sums of only one row at a time
            end = tl.where(_look(rank_of_sample + out_row) == turn, end, begin)
        rank_of_row = rank_of_sample + (out_row - row)  # so that index `row` reads the rank among the sampled rows
    if EARLY:  # launched while the previous kernel ends: the tables were written before that one began, but programs
        tl.extra.cuda.gdc_wait()  # must not read the stream, or exit, before it has ended
    if CODE:
        begin, end = _between(records, begin, end, phase)
    if begin == end:
        return
    latches += slot * MAX_LATCHES
    hidden += out_row * hidden_stride
    residual += out_row * residual_stride
    edited, finite = 0, 1
    if PASSES > 1:
        _sums(hidden, residual, width, begin, end, position, row, rank_of_row, token_of_row, records, base, offset,
              origin_of_row, stride, bank, kept, quantiles, bits_of_row, gates_of_row, latches,
              PAIR, SAMPLED, ALIGNED, BLOCK, PASSES)  # fmt: skip
    for block in range(PASSES):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        h = _read(hidden, residual, columns, inside, PAIR)
        h, edited = _walk(h, block * BLOCK, inside, width, begin, end, position, row, rank_of_row, token_of_row,
                          records, base, offset, origin_of_row, stride, bank, kept, quantiles, bits_of_row,
                          gates_of_row, latches,
                          SAMPLED, True, ALIGNED, PASSES == 1, BLOCK)  # fmt: skip
        if edited != 0:
            finite = finite & _finite(h.to(hidden.dtype.element_ty), inside)
        if (PASSES == 1) & (edited != 0) & (finite != 0):
            _write(hidden, residual, columns, inside, h, PAIR)
    if finite == 0:
        failed = (_look(generation + slot).to(tl.int64) << 32) | point
        tl.store((bad + slot.to(tl.int64) * 8).to(tl.pointer_type(tl.int64)), failed)
    if (PASSES > 1) & (edited != 0) & (finite != 0):  # write only once all columns are known to be finite
        for block in range(PASSES):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < width
            h = _read(hidden, residual, columns, inside, PAIR)
            h, edited = _walk(h, block * BLOCK, inside, width, begin, end, position, row, rank_of_row, token_of_row,
                              records, base, offset, origin_of_row, stride, bank, kept, quantiles, bits_of_row,
                              gates_of_row, latches,
                              SAMPLED, False, ALIGNED, False, BLOCK)  # fmt: skip
            _write(hidden, residual, columns, inside, h, PAIR)


def site(
    tables: Any,
    point: int,
    hidden_RW: torch.Tensor,
    residual_RW: torch.Tensor | None,
    kept: torch.Tensor,
    kept_begin: int,
    sampled: bool,
    phase: int | None = None,
) -> None:
    """Launch the kernel for a point over `tables` (`runtime.cuda_step.CudaTables`).

    `kept` [bytes] receives the captured rows. `kept_begin` is the offset that the tables' capture bases assign to its
    first byte, a multiple of 16 and possibly negative. If the records include code, only the records after the first
    `phase` code records, up to the next one, are applied.
    """
    width, coded = hidden_RW.shape[1], phase is not None
    other_row = (hidden_RW if residual_RW is None else residual_RW).stride(0)
    numbers = hidden_RW.stride(0), other_row, width, kept.data_ptr() - kept_begin, point, phase or 0
    for turn in range(tables.turns if sampled and width > MAX_BLOCK else 1):
        _launch(tables, hidden_RW, residual_RW, sampled, coded, (*numbers, turn))


def _launch(
    tables: Any, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool, coded: bool,
    numbers: tuple[int, ...],
) -> None:  # fmt: skip
    """Launch the kernel once with these scalar arguments."""
    rows, width = hidden_RW.shape
    other = hidden_RW if residual_RW is None else residual_RW
    at, beside, row, other_row = hidden_RW.data_ptr(), other.data_ptr(), numbers[0], numbers[1]
    # all that Triton specializes a kernel on; a cached launch takes less than half the host time
    key = (hidden_RW.dtype, other.dtype, row, other_row, width, residual_RW is not None, sampled, coded, at % 16,
           beside % 16)  # fmt: skip
    launch = tables.ready.get(key)
    if launch is not None:
        launch(rows, at, beside, *numbers)
        return
    read, options = [getattr(tables, name) for name in READ], launched(width, residual_RW is not None, sampled)
    same, options = (tables.bad_address, tables.points), options | {"CODE": coded} | _early()
    kernel = _site[rows,](*read, *same, hidden_RW, other, *numbers, **options)
    if kernel is not None:  # None in Triton's interpreter
        same, constants = (*(table.data_ptr() for table in read), *same), tuple(options[name] for name in CONSTANTS)
        tables.ready[key] = relauncher(kernel, same, constants, hidden_RW.device.index)


def launched(width: int, pair: bool, sampled: bool) -> dict[str, Any]:
    """Return the launch options for rows of `width` columns. Rows are processed whole, except wide sampled rows: each
    launch processes one of them per request, so that a record can hold the row's sums."""
    block = max(triton.next_power_of_2(width), 4)
    block = block if block <= MAX_BLOCK or not sampled else min(MAX_BLOCK, PASS_BLOCK)
    return {
        "PAIR": pair, "SAMPLED": sampled, "BLOCK": block, "PASSES": triton.cdiv(width, block),
        "ALIGNED": width % 16 == 0, "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 32,
        "enable_fp_fusion": False,
        # at 128 registers nothing spills, and 264 rows run concurrently
        "maxnreg": 128 if width <= block and block in (2048, 4096) else None,
    }  # fmt: skip


# in the order of the kernel's parameters
READ = ("slot_of_row", "rank_of_row", "position_of_row", "token_of_row", "row_of_sample", "rank_of_sample",
        "generation", "first", "records", "base", "offset", "origin_of_row", "stride", "bank", "quantiles",
        "bits_of_row", "gates_of_row", "latches")  # fmt: skip
CONSTANTS = ("PAIR", "SAMPLED", "BLOCK", "PASSES", "ALIGNED", "CODE", "EARLY")


@functools.cache
def _early() -> dict[str, bool]:
    """Return options for programmatic dependent launch (Hopper and later): start before the previous kernel ends."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    early = able and hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
