"""The kernel in vectorised torch: a pass for each place in a row's program, all rows of it at once. Made for the CPU.

    R rows · A rows with records · W width of the point · K numbers in the step's capture buffer

The stream of a fused model is two tensors, hidden and residual, whose sum in fp32 it is.  Writing s back as
r' = round(s), h' = round(s − r') loses nothing that the pair could hold (TwoSum; Knuth, TAOCP 2, 4.2.2, theorem B).
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.plan import CAPTURE, ProgramTable, StepPlan
from patchclamp.plan.step import Rows


def apply(
    hidden_RW: torch.Tensor,
    residual_RW: torch.Tensor | None,
    rows: Rows,
    point: int,
    table: ProgramTable,
    plan: StepPlan,
    bank_B: torch.Tensor,
    kept_K: torch.Tensor,
) -> np.ndarray | None:
    """Applies a point's records to the rows in place and writes captured rows into `kept_K`.

    A row whose edits are not finite in the tensor's dtype is left as it was: kept keys and values would carry NaN to
    other requests. Returns the slots of such rows.
    """
    first, last = table.first[rows.slot, point], table.first[rows.slot, point + 1]
    at = np.flatnonzero(last > first)
    if len(at) == 0:
        return None
    first, last, position = first[at], last[at], rows.position[at]
    at_A = _on(hidden_RW, at)
    h_AW = join(hidden_RW, residual_RW, at_A)
    edited = np.zeros(len(at), bool)
    for place in range(int((last - first).max())):
        mine = np.flatnonzero(first + place < last)
        records = table.records[first[mine] + place]
        holds = (records["start"] <= position[mine]) & (position[mine] < records["stop"])
        mine, records = mine[holds], records[holds]
        is_capture = records["kind"] == CAPTURE
        _keep(h_AW, mine[is_capture], records[is_capture], position, plan, kept_K)
        _linear(h_AW, mine[~is_capture], records[~is_capture], position, bank_B)
        edited[mine[~is_capture]] = True
    write = np.flatnonzero(edited)
    finite = h_AW[_on(h_AW, write)].to(hidden_RW.dtype).isfinite().all(dim=1).cpu().numpy()
    good = _on(hidden_RW, write[finite])
    split(hidden_RW, residual_RW, at_A[good], h_AW[good])
    return np.unique(rows.slot[at[write[~finite]]])


def join(hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, at_A: torch.Tensor) -> torch.Tensor:
    """Rows of the stream in fp32, [A, W]."""
    h_AW = hidden_RW.index_select(0, at_A).float()
    return h_AW if residual_RW is None else h_AW.add_(residual_RW.index_select(0, at_A).float())


def split(hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, at_A: torch.Tensor, h_AW: torch.Tensor) -> None:
    """Writes fp32 rows back, as one tensor or as the pair that loses least."""
    if len(at_A) == 0:
        return
    if residual_RW is not None:
        rounded_AW = h_AW.to(residual_RW.dtype)
        residual_RW.index_copy_(0, at_A, rounded_AW)
        h_AW = h_AW - rounded_AW.float()
    hidden_RW.index_copy_(0, at_A, h_AW.to(hidden_RW.dtype))


def _keep(
    h_AW: torch.Tensor,
    mine: np.ndarray,
    records: np.ndarray,
    position: np.ndarray,
    plan: StepPlan,
    kept_K: torch.Tensor,
) -> None:
    if len(mine) == 0:
        return
    width = h_AW.shape[1]
    begin = plan.begin[plan.spans.spans_by_number[records["step"]]]
    row = plan.target(records["step"], records["value"]) // width + (position[mine] - begin)
    _rows(kept_K, width).index_copy_(0, _on(h_AW, row), h_AW[_on(h_AW, mine)])


def _linear(
    h_AW: torch.Tensor, mine: np.ndarray, records: np.ndarray, position: np.ndarray, bank_B: torch.Tensor
) -> None:
    if len(mine) == 0:
        return
    width = h_AW.shape[1]
    x_A1, y_A1 = (_on(h_AW, records[field].copy())[:, None] for field in ("x", "y"))
    mine_A = _on(h_AW, mine)
    row = records["value"] // width + (position[mine] - records["start"]).astype(np.int64) * records["step"]
    row[records["y"] == 0] = 0  # no value is read
    v_AW = _rows(bank_B, width).index_select(0, _on(h_AW, row))
    kept_AW = torch.where(x_A1 == 0, 0.0, h_AW[mine_A] * x_A1)
    added_AW = torch.where(y_A1 == 0, 0.0, v_AW * y_A1)
    h_AW[mine_A] = torch.where(x_A1 == 0, added_AW, torch.where(y_A1 == 0, kept_AW, kept_AW + added_AW))


def _rows(flat: torch.Tensor, width: int) -> torch.Tensor:
    """A flat tensor as rows; blocks of a width lie at multiples of it (`plan.step`, `store.bank`)."""
    return flat[: len(flat) // width * width].view(-1, width)


def _on(rows: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Index or factor arrays where the rows are."""
    return torch.from_numpy(numbers).to(rows.device)
