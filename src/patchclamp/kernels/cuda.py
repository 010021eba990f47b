"""The Triton kernels: `site`, one launch a point and step however many ops and requests, and `scatter`, which brings
what changed on the host into the tables.

Every program of `site` takes one row and a block of its columns, finds the row's slot, walks the slot's records at the
point in order, and writes the row back once.  Rows without records leave after three loads.  A new op is a branch in
`_site`; a new view is other strides.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # columns a program takes: small batches then still spread over many multiprocessors
RECORD_WORDS = 8  # a record as 32-bit words: start, stop, kind, step, value (two), x, y


@triton.jit
def _site(
    hidden, residual, hidden_stride, residual_stride, width,
    slot_of_row, rank_of_row, position_of_row, row_of_sample,
    first, records, target, bank, kept, kept_begin, point, points,
    PAIR: tl.constexpr, SAMPLED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if SAMPLED:
        row = tl.load(row_of_sample + out_row).to(tl.int64)
    slot = tl.load(slot_of_row + row)
    if slot == 0:
        return
    begin = tl.load(first + slot * (points + 1) + point)
    end = tl.load(first + slot * (points + 1) + point + 1)
    if begin == end:
        return
    position = tl.load(position_of_row + row).to(tl.int32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    at = hidden + out_row * hidden_stride + columns
    h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    other = residual + out_row * residual_stride + columns
    if PAIR:
        h += tl.load(other, mask=inside, other=0.0).to(tl.float32)
    edited = 0
    for number in range(begin, end):
        record = records + number.to(tl.int64) * 8
        start = tl.load(record)
        if (position >= start) & (position < tl.load(record + 1)):
            x = tl.load((record + 6).to(tl.pointer_type(tl.float32)))
            if tl.load(record + 2) == 0:  # CAPTURE; x is the dtype
                lowest = tl.maximum(start, position - tl.load(rank_of_row + row))
                if SAMPLED:
                    lowest = position
                to = kept + (tl.load(target + number) - kept_begin)
                rank = (position - lowest).to(tl.int64) * width + columns
                if x == 0.0:
                    tl.store(to.to(tl.pointer_type(tl.float32)) + rank, h, mask=inside)
                elif x == 1.0:
                    tl.store(to.to(tl.pointer_type(tl.bfloat16)) + rank, h.to(tl.bfloat16), mask=inside)
                else:
                    tl.store(to.to(tl.pointer_type(tl.float16)) + rank, h.to(tl.float16), mask=inside)
            else:  # LINEAR; a factor of 0 leaves its term out, NaN or not
                edited = 1
                y = tl.load((record + 7).to(tl.pointer_type(tl.float32)))
                h = tl.where(x == 0.0, 0.0, h * x)
                if y != 0.0:
                    value = tl.load((record + 4).to(tl.pointer_type(tl.int64)))
                    step = tl.load(record + 3)
                    begins = value + (position - start).to(tl.int64) * step * width
                    added = tl.load(bank + begins + columns, mask=inside, other=0.0) * y
                    h = tl.where(x == 0.0, added, h + added)
    if edited != 0:
        if PAIR:
            rounded = h.to(residual.dtype.element_ty)
            tl.store(other, rounded, mask=inside)
            h = h - rounded.to(tl.float32)
        tl.store(at, h.to(hidden.dtype.element_ty), mask=inside)


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

    `kept` [bytes] takes the captured rows; its first byte is byte `kept_begin` of the step's.
    """
    rows, width = hidden_RW.shape
    other = hidden_RW if residual_RW is None else residual_RW
    grid = (rows, triton.cdiv(width, COLUMNS))
    _site[grid](
        hidden_RW, other, hidden_RW.stride(0), other.stride(0), width,
        tables.slot_of_row, tables.rank_of_row, tables.position_of_row, tables.row_of_sample,
        tables.first, tables.records, tables.target, tables.bank, kept, kept_begin, point, tables.points,
        PAIR=residual_RW is not None, SAMPLED=sampled, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _scatter(inbox, words, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    to = tl.load(inbox + 3 * block)
    source = tl.load(inbox + 3 * block + 1)
    count = tl.load(inbox + 3 * block + 2)
    at = tl.arange(0, BLOCK)
    tl.store(words + to + at, tl.load(inbox + source + at, mask=at < count), mask=at < count)


SCATTER_BLOCK = 1024


def scatter(inbox: torch.Tensor, words: torch.Tensor, blocks: int) -> None:
    """Copies `blocks` blocks within device memory; the inbox begins with (to, source, count) of each, in words."""
    _scatter[(blocks,)](inbox, words, BLOCK=SCATTER_BLOCK, num_warps=4)
