"""The kernel in vectorized torch, for the CPU: pass i applies every row's record i, to all rows at once.

    R rows · A rows with records · W point width · K elements in the step's capture buffer

With fused norms, the stream is the fp32 sum of two tensors, hidden and residual. Writing s back as r' = round(s),
h' = round(s − r') is as exact as a pair can be (TwoSum; Knuth, TAOCP 2, 4.2.2, theorem B).
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np
import torch

from patchclamp.kernels.noise import FRACTION, MASK, MULTIPLIERS, OCTAVES, PARTS, STEPS, quantiles
from patchclamp.kernels.transfer import to_device
from patchclamp.plan import (
    ADD_NORMED,
    APPLY,
    BLEND,
    CAPTURE,
    DECIDE,
    LATCH,
    LINEAR,
    LOW_RANK,
    MATCH,
    NOISE,
    PROJECT,
    ROTATE,
    SPAN,
    STORE,
    TEST,
    WHEN,
    ProgramTable,
    StepPlan,
)
from patchclamp.plan.step import RowLabels
from patchclamp.plan.table import columns_of, named


class CodeRunner(Protocol):
    """Runs `Apply` functions and attention edits on a point's rows."""

    def run_code(self, number: int, rows_NW: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor | None:
        """Run a request's code, by number, on rows at positions [N]. Returns the new rows; None if it failed."""
        ...

    def edit_attention(
        self, numbers: list[int], rows_MW: torch.Tensor, point: int, position_M: np.ndarray, count_B: np.ndarray,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Run several requests' attention edits (their code numbers are negative) on the requests' rows. Returns the
        new rows, finite in `dtype`."""
        ...


Late = list[tuple[np.ndarray, torch.Tensor]]
"""Slots [n], and a mask of the slots whose edits were finite, bool [n] on the device."""


def apply(
    hidden_RW: torch.Tensor,
    residual_RW: torch.Tensor | None,
    rows: RowLabels,
    point: int,
    table: ProgramTable,
    plan: StepPlan,
    bank_B: torch.Tensor,
    kept_K: torch.Tensor,
    token_R: torch.Tensor | None = None,
    code: CodeRunner | None = None,
    late: Late | None = None,
    bits_R: np.ndarray | None = None,
) -> np.ndarray | None:
    """Apply a point's records to the rows in place, and write captured rows to `kept_K`, stored rows to `bank_B`.

    token_R: the rows' token ids, if any record needs them
    code: runs `Apply` functions and attention edits
    bits_R: the rows' bits, int64, zero when a step begins, if any record needs them

    A row whose edits are not finite in the tensor's dtype is left unchanged, since cached keys and values would spread
    NaN to other requests. Returns the slots of such rows. With `late` and no residual, appends to `late` instead,
    without synchronizing, and returns None.
    """
    first, last = table.first[rows.slot, point], table.first[rows.slot, point + 1]
    at = np.flatnonzero(last > first)
    if len(at) == 0:
        return None
    first, last, position = first[at], last[at], rows.position[at]
    at_A = _on(hidden_RW, at)
    h_AW = join(hidden_RW, residual_RW, at_A)
    edited, broken, matched = np.zeros(len(at), bool), np.zeros(len(at), bool), np.ones(len(at), bool)
    for i in range(int((last - first).max())):
        index = np.flatnonzero(first + i < last)  # the rows with an i-th record
        records = table.records[first[index] + i]
        when = records["kind"] == WHEN
        acts = (records["start"] <= position[index]) & (position[index] < records["stop"]) & matched[index] & ~when
        if when.any():  # after an unmatched MATCH, the edit is skipped too
            held = _held(
                records[when], at[index[when]], rows.slot[at[index[when]]], position[index[when]], table, bits_R
            )
            held &= matched[index[when]]
            matched[index] = True
            matched[index[when]] = held
        else:
            matched[index] = True
        index, records = index[acts], records[acts]
        edited[index[~np.isin(records["kind"], (CAPTURE, MATCH, STORE, *DECIDE))]] = True
        for kind in np.unique(records["kind"]):
            some, alike = index[records["kind"] == kind], records[records["kind"] == kind]
            if kind == CAPTURE:
                _keep(h_AW, some, alike, position, plan, kept_K, bank_B)
            elif kind == STORE:
                _rows(bank_B, h_AW.shape[1]).index_copy_(
                    0, _on(h_AW, _value_rows(alike, position[some], h_AW.shape[1])), h_AW[_on(h_AW, some)]
                )
            elif kind == SPAN:
                assert bits_R is not None, "a record needs row bits, but the engine passed none"
                assert token_R is not None, "a record needs token ids, but the engine passed none"
                _span(named(alike, SPAN), at[some], token_R, bits_R, rows, table)
            elif kind in DECIDE:
                assert bits_R is not None, "a record needs row bits, but the engine passed none"
                _decide(int(kind), h_AW, some, named(alike, int(kind)), at, bits_R, rows, table, bank_B)
            elif kind == MATCH:
                assert token_R is not None, "a record needs token ids, but the engine passed none"
                matched[some] = _match(token_R[_on(token_R, at[some])], alike, bank_B)
            elif kind == APPLY:
                assert code is not None, "a record runs code, but the engine passed none"
                broken[some] |= ~_run(h_AW, some, alike, point, position[some], code, hidden_RW.dtype)
            else:
                _edit(int(kind), h_AW, some, alike, position[some], bank_B)
    write = np.flatnonzero(edited & ~broken)
    if late is not None and residual_RW is None:
        _write_finite(hidden_RW, at_A[_on(hidden_RW, write)], h_AW[_on(h_AW, write)], rows.slot[at[write]], late)
        return None
    finite = h_AW[_on(h_AW, write)].to(hidden_RW.dtype).isfinite().all(dim=1).cpu().numpy()
    good = _on(hidden_RW, write[finite])
    split(hidden_RW, residual_RW, at_A[good], h_AW[good])
    return np.unique(rows.slot[at[write[~finite]]])


def _write_finite(
    hidden_RW: torch.Tensor, at_A: torch.Tensor, h_AW: torch.Tensor, slot: np.ndarray, late: Late
) -> None:
    """Write the finite rows back without synchronizing, and append the result to `late`."""
    if len(slot) == 0:
        return
    new_AW = h_AW.to(hidden_RW.dtype)
    finite_A = new_AW.isfinite().all(dim=1)
    hidden_RW.index_copy_(0, at_A, torch.where(finite_A[:, None], new_AW, hidden_RW.index_select(0, at_A)))
    late.append((slot, finite_A))


def join(hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, at_A: torch.Tensor) -> torch.Tensor:
    """Return rows of the stream in fp32, [A, W]."""
    h_AW = hidden_RW.index_select(0, at_A).float()
    return h_AW if residual_RW is None else h_AW.add_(residual_RW.index_select(0, at_A).float())


def split(hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, at_A: torch.Tensor, h_AW: torch.Tensor) -> None:
    """Write fp32 rows back, as one tensor or as the pair with the smallest rounding error."""
    if len(at_A) == 0:
        return
    if residual_RW is not None:
        rounded_AW = h_AW.to(residual_RW.dtype)
        residual_RW.index_copy_(0, at_A, rounded_AW)
        h_AW = h_AW - rounded_AW.float()
    hidden_RW.index_copy_(0, at_A, h_AW.to(hidden_RW.dtype))


def _keep(
    h_AW: torch.Tensor,
    index: np.ndarray,
    records: np.ndarray,
    position: np.ndarray,
    plan: StepPlan,
    kept_K: torch.Tensor,
    bank_B: torch.Tensor,
) -> None:
    """Write captured rows, or their products with a matrix, at the plan's offsets."""
    begin = plan.begin[plan.layout.range_of_number[records["step"]]]
    target, nth = plan.target(records["step"], records["value"]), position[index] - begin
    ways, way_A = records[:1], np.zeros(len(records), np.int64)
    if records["y"].any():
        ways, way_A = np.unique(records[["y", "other", "columns"]], return_inverse=True)
    for i, products in enumerate(ways["y"].astype(np.int64).tolist()):
        some, width = way_A == i, products or h_AW.shape[1]
        kept_AW = h_AW[_on(h_AW, index[some])]
        if products:
            kept_AW = _products(kept_AW, records[some][0], bank_B)
        _rows(kept_K, width).index_copy_(0, _on(h_AW, target[some] // width + nth[some]), kept_AW)


def _products(h_AW: torch.Tensor, record: np.void, bank_B: torch.Tensor) -> torch.Tensor:
    """Return rows' products with a capture's matrix, [A, K], summed in fp64 for `MAX_PRODUCT_ROWS` rows at a time."""
    first, count, columns = int(record["other"]), int(record["y"]), columns_of(record)
    matrix_KW = bank_B[first : first + count * h_AW.shape[1]].view(count, -1)[:, columns].double()
    parts = (part_AW[:, columns].double() @ matrix_KW.T for part_AW in h_AW.split(MAX_PRODUCT_ROWS))
    return torch.cat([part_AK.float() for part_AK in parts])


def _held(
    records: np.ndarray, row: np.ndarray, slot: np.ndarray, position: np.ndarray, table: ProgramTable,
    bits_R: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    """Return a mask of the rows whose `WHEN` record holds."""
    assert bits_R is not None, "a record needs row bits, but the engine passed none"
    fields = named(records, WHEN)
    is_set = bits_R[row] >> fields["bit"] & 1 == 1
    return np.where(fields["latch"] < 0, is_set, position >= table.latches[slot, fields["latch"]])


def _decide(
    kind: int, h_AW: torch.Tensor, index: np.ndarray, fields: np.ndarray, at: np.ndarray, bits_R: np.ndarray,
    rows: RowLabels, table: ProgramTable, bank_B: torch.Tensor,
) -> None:  # fmt: skip
    """Set or clear bits of rows, or latch positions."""
    row, bit = at[index], fields["bit"].astype(np.int64)
    if kind == LATCH:
        is_set = bits_R[row] >> bit & 1 == 1
        last, first = fields["last"] == 1, is_set & (fields["last"] == 0)
        np.maximum.at(table.latches, (rows.slot[row[last]], fields["latch"][last]),
                      2 * rows.position[row[last]] + is_set[last])  # fmt: skip
        np.minimum.at(table.latches, (rows.slot[row[first]], fields["latch"][first]), rows.position[row[first]])
        return
    if kind == TEST:
        held = _tested(h_AW, index, fields, bank_B) > fields["threshold"]
    else:
        held = ((bits_R[row] & fields["mask"]) == fields["wanted"]) != (fields["negated"] != 0)
    bits_R[row] = bits_R[row] & ~(1 << bit) | held << bit


def _span(
    fields: np.ndarray, row: np.ndarray, token_R: torch.Tensor, bits_R: np.ndarray, rows: RowLabels, table: ProgramTable
) -> None:
    """Set or clear both bits of each row (`plan.bound.Span`). A request's rows are consecutive."""
    ids, every, bit = token_R.cpu().numpy(), np.arange(len(token_R)), fields["bit"].astype(np.int64)
    far = np.minimum(rows.rank[row], rows.position[row] - fields["start"])
    before = np.where(rows.position[row] - far == fields["start"], fields["inside"] != 0,
                      table.latches[rows.slot[row], fields["latch"]] & 1 == 1)  # fmt: skip
    pairs, pair_A = np.unique(fields[["opening", "closing"]], return_inverse=True)
    for i, (opening, closing) in enumerate(pairs.tolist()):
        of = pair_A == i
        delimiter_R = np.isin(ids, (opening, closing))
        last = np.maximum.accumulate(np.where(delimiter_R, every, -1))[row[of]]
        after = np.where(last >= row[of] - far[of], ids[last] == opening, before[of])
        both = (after & ~delimiter_R[row[of]]) | after.astype(np.int64) << 1
        bits_R[row[of]] = bits_R[row[of]] & ~(3 << bit[of]) | both << bit[of]
    begins = rows.position[row] == fields["start"]
    table.latches[rows.slot[row[begins]], fields["latch"][begins]] = 0


def _tested(h_AW: torch.Tensor, index: np.ndarray, fields: np.ndarray, bank_B: torch.Tensor) -> np.ndarray:
    """Return each row's product with its test's vector, fp32 [A], summed in fp64."""
    product = np.zeros(len(index), np.float32)
    tests, which = np.unique(fields[["vector", "columns"]], return_inverse=True)
    for i in range(len(tests)):
        some, columns, first = which == i, columns_of(tests[i]), int(tests["vector"][i])
        v_W = bank_B[first : first + h_AW.shape[1]][columns].double()
        product[some] = (h_AW[_on(h_AW, index[some])][:, columns].double() @ v_W).float().cpu().numpy()
    return product


def _run(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, point: int, position: np.ndarray, code: CodeRunner,
    dtype: torch.dtype,
) -> np.ndarray:  # fmt: skip
    """Run each record's code on the record's rows; returns a mask of the rows where the code succeeded. `dtype`: the
    dtype of the hidden tensor."""
    done = records["value"] < 0
    if done.any():
        values, at_A = records["value"][done], _on(h_AW, index[done])
        first = np.flatnonzero(np.diff(values, prepend=0))  # rows of a request are adjacent
        count, numbers = np.diff(first, append=len(values)), values[first].tolist()
        h_AW[at_A] = code.edit_attention(numbers, h_AW[at_A], point, position[done], count, dtype)
    for number, columns in np.unique(records[~done][["value", "columns"]]).tolist():
        some = (records["value"] == number) & (records["columns"] == columns)
        at_A = _on(h_AW, index[some])
        within = torch.arange(h_AW.shape[1], device=h_AW.device)[columns_of(records[some][0])]
        result = code.run_code(number, h_AW[at_A[:, None], within], point, position[some])
        if result is not None:
            h_AW[at_A[:, None], within], done[some] = result, True
    return done


def _edit(
    kind: int, h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    """Apply edits of one kind, each on its record's columns; other columns read as 0 and do not change."""
    if not records["columns"].any():
        _EDITS[kind](h_AW, index, records, position, bank_B)
        return
    index_A = _on(h_AW, index)
    within_AW = _within(h_AW, records)
    part_AW = torch.where(within_AW, h_AW[index_A], 0.0)
    _EDITS[kind](part_AW, np.arange(len(index)), records, position, bank_B)
    h_AW[index_A] = torch.where(within_AW, part_AW, h_AW[index_A])


def _within(h_AW: torch.Tensor, records: np.ndarray) -> torch.Tensor:
    """Return a mask of each record's columns, bool [A, W]."""
    first = records["columns"].astype(np.int64) & 0xFFFF
    end = records["columns"].astype(np.int64) >> 16 & 0xFFFF
    end = np.where(records["columns"] == 0, h_AW.shape[1], end)
    column_W = torch.arange(h_AW.shape[1], device=h_AW.device)
    return (_on(h_AW, first)[:, None] <= column_W) & (column_W < _on(h_AW, end)[:, None])


def _match(token_A: torch.Tensor, records: np.ndarray, bank_B: torch.Tensor) -> np.ndarray:
    """Return a mask of the tokens that meet their record's condition."""
    matches = np.zeros(len(records), bool)
    conditions, condition_A = np.unique(records[["value", "step", "x"]], return_inverse=True)
    for i, (ids, count, expected) in enumerate(conditions.tolist()):
        under = condition_A == i
        is_one = torch.isin(token_A[_on(token_A, under)].long(), bank_B[ids : ids + count].long())
        matches[under] = is_one.cpu().numpy() == (expected == 1)
    return matches


def _linear(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    x_A1, y_A1 = _scalars(h_AW, records)
    index_A = _on(h_AW, index)
    v_AW = _values(h_AW, records, position, bank_B, records["y"] != 0)
    kept_AW = torch.where(x_A1 == 0, 0.0, h_AW[index_A] * x_A1)
    added_AW = torch.where(y_A1 == 0, 0.0, v_AW * y_A1)
    h_AW[index_A] = torch.where(x_A1 == 0, added_AW, torch.where(y_A1 == 0, kept_AW, kept_AW + added_AW))


def _blend(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    _, y_A1 = _scalars(h_AW, records)
    index_A, width = _on(h_AW, index), h_AW.shape[1]
    v_AW = _values(h_AW, records, position, bank_B)
    a_AW = y_A1 * _rows(bank_B, width).index_select(0, _on(h_AW, records["other"] // width))
    before_AW = h_AW[index_A]
    mixed_AW = (1 - a_AW) * before_AW + a_AW * v_AW
    h_AW[index_A] = torch.where(a_AW == 0, before_AW, torch.where(a_AW == 1, v_AW, mixed_AW))


def _project(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    low_A1, high_A1 = _scalars(h_AW, records)
    index_A = _on(h_AW, index)
    v_AW, before_AW = _values(h_AW, records, position, bank_B), h_AW[index_A]
    along_A1 = (before_AW.double() * v_AW.double()).sum(1, keepdim=True).float()
    move_A1 = torch.minimum(torch.maximum(along_A1, low_A1), high_A1) - along_A1
    h_AW[index_A] = torch.where(move_A1 == 0, before_AW, before_AW + move_A1 * v_AW)


def _low_rank(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    width = h_AW.shape[1]
    ways, way_A = np.unique(records[["value", "x", "y", "other", "columns"]], return_inverse=True)
    for i, way in enumerate(ways):
        some, rank, value = way_A == i, int(way["y"]), int(way["value"])
        index_A, toward = _on(h_AW, index[some]), float(way["x"])
        first, columns = int(way["other"]), columns_of(way)
        e_KW, d_KW = bank_B[first : first + 2 * rank * width].view(2, rank, width).double()
        before_AW = h_AW[index_A]
        if toward:
            v_AW = _values(h_AW, records[some], position[some], bank_B)
            g_AK = toward * ((v_AW - before_AW)[:, columns].double() @ e_KW[:, columns].T).float()
        else:
            bias, threshold, offset, slope, otherwise = bank_B[value : value + 5 * rank].view(rank, 5).T
            q_AK = (before_AW[:, columns].double() @ e_KW[:, columns].T).float() + bias
            g_AK = torch.where(q_AK > threshold, offset + slope * q_AK, otherwise)
        sum_AW = (g_AK.double() @ d_KW).float()
        h_AW[index_A] = torch.where(sum_AW == 0, before_AW, before_AW + sum_AW)


def _add_normed(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    _, scale_A1 = _scalars(h_AW, records)
    index_A = _on(h_AW, index)
    v_AW, before_AW = _values(h_AW, records, position, bank_B), h_AW[index_A]
    v_AW = torch.where(_within(h_AW, records), v_AW, 0.0)
    h_A1, v_A1 = (row_AW.double().square().sum(1, keepdim=True) for row_AW in (before_AW, v_AW))
    factor_A1 = torch.where(v_A1 == 0, 0.0, scale_A1 * (h_A1 / v_A1).sqrt().float())
    h_AW[index_A] = torch.where(factor_A1 == 0, before_AW, before_AW + factor_A1 * v_AW)


def _rotate(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    cos_A1, sin_A1 = (scalar_A1.double() for scalar_A1 in _scalars(h_AW, records))
    index_A, row, width = _on(h_AW, index), _value_rows(records, position, h_AW.shape[1]), h_AW.shape[1]
    a_AW, b_AW = (_rows(bank_B, width).index_select(0, _on(h_AW, row + i)) for i in range(2))
    before_AW, relative_A1 = h_AW[index_A], _on(h_AW, records["other"] != 0)[:, None]
    a_A1, b_A1 = ((before_AW.double() * unit_AW.double()).sum(1, keepdim=True) for unit_AW in (a_AW, b_AW))
    length_A1 = (a_A1 * a_A1 + b_A1 * b_A1).sqrt()
    to_a_A1 = torch.where(relative_A1, a_A1 * cos_A1 - b_A1 * sin_A1, length_A1 * cos_A1)
    to_b_A1 = torch.where(relative_A1, a_A1 * sin_A1 + b_A1 * cos_A1, length_A1 * sin_A1)
    h_AW[index_A] = before_AW + (to_a_A1 - a_A1).float() * a_AW + (to_b_A1 - b_A1).float() * b_AW


def _noise(
    h_AW: torch.Tensor, index: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    _, std_A1 = _scalars(h_AW, records)
    index_A, relative = _on(h_AW, index), _on(h_AW, records["step"] == 1)[:, None]
    seed, site = (_on(h_AW, records[field].copy()) for field in ("other", "value"))
    position_A, before_AW = _on(h_AW, position.astype(np.int64)), h_AW[index_A]
    first = _on(h_AW, records["x"].astype(np.int64))
    width = h_AW.shape[1]
    parts = zip(*(tensor_A.split(MAX_NOISE_ROWS) for tensor_A in (seed, position_A, site, first)), strict=True)
    e_AW = torch.cat([normals_of(s_A, p_A, site_A, width, first_A) for s_A, p_A, site_A, first_A in parts])
    columns = records["columns"].astype(np.int64)
    count = np.where(columns == 0, h_AW.shape[1], (columns >> 16 & 0xFFFF) - (columns & 0xFFFF))
    size_A1 = (before_AW.double().square().sum(1, keepdim=True) / _on(h_AW, count)[:, None]).sqrt().float()
    std_A1 = torch.where(relative, std_A1 * size_A1, std_A1)
    h_AW[index_A] = torch.where(std_A1 == 0, before_AW, before_AW + std_A1 * e_AW)


MAX_PRODUCT_ROWS = 1024  # rows converted to fp64 at once
MAX_NOISE_ROWS = 256  # rows of noise generated at once, using 30 times their memory
_EDITS = {LINEAR: _linear, BLEND: _blend, PROJECT: _project, LOW_RANK: _low_rank, ADD_NORMED: _add_normed,
          ROTATE: _rotate, NOISE: _noise}  # fmt: skip


def _scalars(h_AW: torch.Tensor, records: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each record's fields x and y, [A, 1]."""
    x, y = (_on(h_AW, records[field].copy())[:, None] for field in ("x", "y"))
    return x, y


def _values(
    h_AW: torch.Tensor, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor, read: np.ndarray | None = None
) -> torch.Tensor:
    """Return the row of each record's value at each position, [A, W]; arbitrary where `read` is False."""
    width = h_AW.shape[1]
    row = _value_rows(records, position, width)
    return _rows(bank_B, width).index_select(0, _on(h_AW, row if read is None else np.where(read, row, 0)))


def _value_rows(records: np.ndarray, position: np.ndarray, width: int) -> np.ndarray:
    """Return the bank row index of each record's value at each position."""
    return records["value"] // width + (position - records["start"]).astype(np.int64) * records["step"]


def _rows(flat: torch.Tensor, width: int) -> torch.Tensor:
    """View a flat tensor as rows of `width`; blocks start at multiples of their width (`plan.step`, `plan.room`)."""
    return flat[: len(flat) // width * width].view(-1, width)


def _on(rows: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Copy an array to the rows' device."""
    return to_device(numbers, rows.device)


def normals_of(
    seed: torch.Tensor, position: torch.Tensor, site: torch.Tensor, width: int, first: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `noise.normals` vectorized: ε for rows, fp32 [A, W], starting at column `first` [A], a multiple of 4.
    Each row has its own seed, position and site, int64 [A]."""
    group = torch.zeros_like(seed) if first is None else first // 4
    words = _philox(seed, position, site, -(-width // 4), group).reshape(len(seed), -1)[:, :width]
    sign, m = words & 1, words >> 1
    # the leading 1 bit; the next bit is cleared, since fp32 could otherwise round up to the next octave
    octave = ((m & ~(m >> 1)).float().view(torch.int32).long() >> 23) - 127
    octave = torch.where(m == 0, OCTAVES, octave)
    rest = torch.where(m == 0, 0, m - (1 << octave.clamp(max=OCTAVES - 1)))
    fine = torch.where(m == 0, 0, octave - PARTS).clamp(min=0)
    part = torch.where(octave >= PARTS, rest >> fine, rest << (PARTS - octave).clamp(min=0))
    table = _table(str(seed.device))
    at = octave * ((1 << PARTS) + 1) + part
    upper, lower = table[at], table[at + 1]
    magnitude = upper - (((upper - lower) * (rest & ((1 << fine) - 1))) >> fine)
    return torch.where(sign == 1, -magnitude, magnitude).float() * 2.0**-FRACTION


def _philox(
    seed: torch.Tensor, position: torch.Tensor, site: torch.Tensor, groups: int, first: torch.Tensor
) -> torch.Tensor:
    """Return Philox words [A, groups, 4] in int64; masks undo wrapped products and sign-extending shifts."""
    c0 = torch.arange(groups, device=seed.device) + first[:, None]
    c1, c2 = (word[:, None].expand(len(seed), groups) for word in (position, site))
    c3, k0, k1 = torch.zeros_like(c0), (seed & MASK)[:, None], ((seed >> 32) & MASK)[:, None]
    for _ in range(10):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (high >> 32 & MASK) ^ c1 ^ k0, (low >> 32 & MASK) ^ c3 ^ k1
        c1, c3 = high & MASK, low & MASK
        k0, k1 = (k0 + STEPS[0]) & MASK, (k1 + STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), 2)


@functools.cache
def _table(device: str) -> torch.Tensor:
    return torch.from_numpy(quantiles().reshape(-1).astype(np.int64)).to(device)
