"""The plain kernel, to be read: one row at a time, one record at a time. Everything fast must equal it.

R rows · W width of the point · B numbers in the bank · K numbers in the step's capture buffer
"""

from __future__ import annotations

import numpy as np

from patchclamp.plan import CAPTURE, LINEAR, ProgramTable, StepPlan
from patchclamp.plan.step import Rows


def apply(
    h_RW: np.ndarray,
    rows: Rows,
    point: int,
    table: ProgramTable,
    plan: StepPlan,
    bank_B: np.ndarray,
    kept_K: np.ndarray,
) -> np.ndarray:
    """Applies a point's records to fp32 rows in place, writes captured rows to `kept_K`; returns edited [R] bool."""
    width = h_RW.shape[1]
    spans = {int(number): c for c, number in enumerate(plan.spans.number)}
    areas = {int(number): a for a, number in enumerate(plan.spans.area)}
    edited_R = np.zeros(len(h_RW), bool)
    for r in range(len(h_RW)):
        slot, position = int(rows.slot[r]), int(rows.position[r])
        for number in range(table.first[slot, point], table.first[slot, point + 1]):
            record = table.records[number]
            if not record["start"] <= position < record["stop"]:
                continue
            if record["kind"] == CAPTURE:
                c, a = spans[int(record["step"])], areas[int(record["value"])]
                begin = plan.base[a] + (plan.offset[c] + position - plan.begin[c]) * width
                kept_K[begin : begin + width] = h_RW[r]
            elif record["kind"] == LINEAR:
                begin = record["value"] + (position - record["start"]) * record["step"] * width
                h_RW[r] = linear(h_RW[r], bank_B[begin : begin + width], record["x"], record["y"])
                edited_R[r] = True
    return edited_R


def linear(h_W: np.ndarray, v_W: np.ndarray, x: np.float32, y: np.float32) -> np.ndarray:
    """x·h + y·v in fp32, each product and the sum rounded; a factor of 0 leaves its term out, NaN or not."""
    terms = [factor * term if factor != 1 else term for factor, term in ((x, h_W), (y, v_W)) if factor != 0]
    return sum(terms[1:], terms[0]) if terms else np.zeros_like(h_W)
