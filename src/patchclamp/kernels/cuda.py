"""The Triton kernel: one launch a point and step, however many ops and requests.

Every program takes one row: it finds the row's slot, walks the slot's records at the point in order, and
writes the row back once, unless it is not finite.  Rows without records leave after three loads.  A new op is a branch
in `_walk`; a new view is other strides.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

WIDEST = 8192  # columns that a program takes at once; wider rows (logits) go in several passes
RECORD_WORDS = 8  # a record as 32-bit words: start, stop, kind, step, value (two), x, y


@triton.jit
def _look(address):
    """A word of the tables; they stay in L2 while the model's weights stream through it."""
    return tl.load(address, eviction_policy="evict_last")


@triton.jit
def _walk(
    h, columns, inside, width, begin, end, position, row, rank_of_row, records, base, offset, bank, kept,
    SAMPLED: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Columns of a row after its records, and whether any of them is an edit."""
    edited = 0
    record = records + begin.to(tl.int64) * 8
    for _ in range(begin, end):  # all of a record at once: loads that wait for each other cost most
        start, stop, kind, step = _look(record), _look(record + 1), _look(record + 2), _look(record + 3)
        value = _look((record + 4).to(tl.pointer_type(tl.int64)))
        x = _look((record + 6).to(tl.pointer_type(tl.float32)))
        y = _look((record + 7).to(tl.pointer_type(tl.float32)))
        if (position >= start) & (position < stop):
            if kind == 0:  # CAPTURE; x is the dtype, step the span, value the area
                if KEEP:
                    lowest = tl.maximum(start, position - _look(rank_of_row + row))
                    if SAMPLED:
                        lowest = position
                    to = kept + _look(base + value)
                    if ALIGNED:
                        to = tl.multiple_of(to, 16)
                    at = (_look(offset + step) + position - lowest).to(tl.int64) * width + columns
                    if x == 0.0:
                        tl.store(to.to(tl.pointer_type(tl.float32)) + at, h, mask=inside)
                    elif x == 1.0:
                        tl.store(to.to(tl.pointer_type(tl.bfloat16)) + at, h.to(tl.bfloat16), mask=inside)
                    else:
                        tl.store(to.to(tl.pointer_type(tl.float16)) + at, h.to(tl.float16), mask=inside)
            else:  # LINEAR; a factor of 0 leaves its term out, NaN or not
                edited = 1
                h = tl.where(x == 0.0, 0.0, h * x)
                if y != 0.0:
                    begins = value + (position - start).to(tl.int64) * step * width
                    if ALIGNED:
                        begins = tl.multiple_of(begins, 16)
                    added = tl.load(bank + begins + columns, mask=inside, other=0.0) * y
                    h = tl.where(x == 0.0, added, h + added)
        record += 8
    return h, edited


@triton.jit
def _read(hidden, residual, columns, inside, PAIR: tl.constexpr):
    """Columns of a row of the stream, in fp32."""
    h = tl.load(hidden + columns, mask=inside, other=0.0).to(tl.float32)
    if PAIR:
        h += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
    return h


@triton.jit
def _write(hidden, residual, columns, inside, h, PAIR: tl.constexpr):
    """Writes them back, as one tensor or as the pair that loses least."""
    if PAIR:
        rounded = h.to(residual.dtype.element_ty)
        tl.store(residual + columns, rounded, mask=inside)
        h = h - rounded.to(tl.float32)
    tl.store(hidden + columns, h.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _finite(h, inside):
    """1 if all columns are finite."""
    return tl.min(tl.where(inside, (tl.abs(h.to(tl.float32)) < float("inf")).to(tl.int32), 1), axis=0)


@triton.jit(do_not_specialize=["kept", "bad", "point", "points"])
def _site(
    hidden, residual, hidden_stride, residual_stride, width,
    slot_of_row, rank_of_row, position_of_row, row_of_sample, generation,
    first, records, base, offset, bank, kept, bad, point, points,
    PAIR: tl.constexpr, SAMPLED: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr, ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if SAMPLED:
        row = _look(row_of_sample + out_row).to(tl.int64)
    slot = _look(slot_of_row + row)
    position = _look(position_of_row + row).to(tl.int32)
    begin = _look(first + slot * (points + 1) + point)  # nobody, slot 0, has no records
    end = _look(first + slot * (points + 1) + point + 1)
    if EARLY:  # launched while the kernel before ends: the tables were there before it began, but nothing of the stream
        tl.extra.cuda.gdc_wait()  # is read, and nobody leaves, before it is done
    if begin == end:
        return
    hidden += out_row * hidden_stride
    residual += out_row * residual_stride
    edited, finite = 0, 1
    for block in range(PASSES):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        h = _read(hidden, residual, columns, inside, PAIR)
        h, edited = _walk(h, columns, inside, width, begin, end, position, row, rank_of_row, records, base, offset,
                          bank, kept, SAMPLED, True, ALIGNED)  # fmt: skip
        if edited != 0:
            finite = finite & _finite(h.to(hidden.dtype.element_ty), inside)
        if (PASSES == 1) & (edited != 0) & (finite != 0):
            _write(hidden, residual, columns, inside, h, PAIR)
    if finite == 0:
        failed = (_look(generation + slot).to(tl.int64) << 32) | point
        tl.store((bad + slot.to(tl.int64) * 8).to(tl.pointer_type(tl.int64)), failed)
    if (PASSES > 1) & (edited != 0) & (finite != 0):  # now that every column is known to be finite
        for block in range(PASSES):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < width
            h = _read(hidden, residual, columns, inside, PAIR)
            h, edited = _walk(h, columns, inside, width, begin, end, position, row, rank_of_row, records, base,
                              offset, bank, kept, SAMPLED, False, ALIGNED)  # fmt: skip
            _write(hidden, residual, columns, inside, h, PAIR)


def site(
    tables: Any,
    point: int,
    hidden_RW: torch.Tensor,
    residual_RW: torch.Tensor | None,
    kept: torch.Tensor,
    kept_begin: int,
    sampled: bool,
) -> None:
    """Launches the kernel for a point over `tables` (`runtime.device.CudaTables`).

    `kept` [bytes] takes the captured rows; its first byte is byte `kept_begin`, a multiple of 16, of the step's.
    """
    rows, width = hidden_RW.shape
    other = hidden_RW if residual_RW is None else residual_RW
    block = min(triton.next_power_of_2(width), WIDEST)
    _site[(rows,)](
        hidden_RW, other, hidden_RW.stride(0), other.stride(0), width,
        tables.slot_of_row, tables.rank_of_row, tables.position_of_row, tables.row_of_sample, tables.generation,
        tables.first, tables.records, tables.base, tables.offset, tables.bank, kept.data_ptr() - kept_begin,
        tables.bad_address, point, tables.points, PAIR=residual_RW is not None, SAMPLED=sampled, BLOCK=block,
        PASSES=triton.cdiv(width, block), ALIGNED=width % 16 == 0, num_warps=4 if block <= 2048 else 8,
        enable_fp_fusion=False, **_early(),
    )  # fmt: skip


@functools.cache
def _early() -> dict[str, bool]:
    """Whether kernels may be launched before the ones before them end (programmatic dependent launch: Hopper on)."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    early = able and hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
