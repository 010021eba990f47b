"""The plain kernel, to be read: one row at a time, one record at a time. Everything fast must equal it.

R rows · W width of the point · B numbers in the bank · K numbers in the step's capture buffer
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from patchclamp.kernels.noise import normals
from patchclamp.plan import APPLY, BLEND, CAPTURE, LINEAR, MATCH, NOISE, PROJECT, ProgramTable, StepPlan
from patchclamp.plan.records import columns_of
from patchclamp.plan.step import RowLabels


def apply(
    h_RW: np.ndarray,
    rows: RowLabels,
    point: int,
    table: ProgramTable,
    plan: StepPlan,
    bank_B: np.ndarray,
    kept_K: np.ndarray,
    token_R: np.ndarray | None = None,
    code: Callable[[int, np.ndarray, int, np.ndarray], np.ndarray | None] | None = None,
) -> np.ndarray:
    """Applies a point's records to fp32 rows in place, writes captured rows to `kept_K`; returns edited [R] bool.

    token_R: the rows' token ids, if any record needs them
    code: `code(number, rows [n, W], point, positions [n])` runs an `Apply`'s function; None if it failed
    """
    width = h_RW.shape[1]
    ranges = {int(number): i for i, number in enumerate(plan.layout.range_number)}
    regions = {int(number): i for i, number in enumerate(plan.layout.region_number)}
    edited_R = np.zeros(len(h_RW), bool)
    for r in range(len(h_RW)):
        slot, position, matched = int(rows.slot[r]), int(rows.position[r]), True
        for number in range(table.first[slot, point], table.first[slot, point + 1]):
            record, applies, matched = table.records[number], matched, True
            if not applies or not record["start"] <= position < record["stop"]:
                continue
            if record["kind"] == MATCH:
                ids = bank_B[record["value"] : record["value"] + record["step"]]
                assert token_R is not None
                matched = (token_R[r] in ids) == (record["x"] == 1)
                continue
            if record["kind"] == CAPTURE:
                i, region = ranges[int(record["step"])], regions[int(record["value"])]
                begin = plan.base[region] + (plan.offset[i] + position - plan.begin[i]) * width
                kept_K[begin : begin + width] = h_RW[r]
                continue
            h_W, x, y, edited_R[r], columns = h_RW[r], record["x"], record["y"], True, columns_of(record)
            if record["kind"] == APPLY:
                assert code is not None
                result = code(int(record["value"]), h_W[None, columns].copy(), point, np.array([position]))
                h_RW[r, columns] = h_W[columns] if result is None else result[0]
                continue
            if record["kind"] == NOISE:
                row = (int(record["other"]), position, int(record["value"]), int(x) + width)
                h_RW[r, columns] = noise(h_W[columns], normals(*row)[int(x) :][columns], y, bool(record["step"]))
                continue
            begin = record["value"] + (position - record["start"]) * record["step"] * width
            v_W, mask = bank_B[begin : begin + width], record["other"]
            if record["kind"] == LINEAR:
                h_RW[r, columns] = linear(h_W[columns], v_W[columns], x, y)
            elif record["kind"] == BLEND:
                h_RW[r, columns] = blend(h_W[columns], v_W[columns], y * bank_B[mask : mask + width][columns])
            elif record["kind"] == PROJECT:
                h_RW[r, columns] = project(h_W[columns], v_W[columns], x, y)
    return edited_R


def linear(h_W: np.ndarray, v_W: np.ndarray, x: np.float32, y: np.float32) -> np.ndarray:
    """x·h + y·v in fp32, each product and the sum rounded; a factor of 0 leaves its term out, NaN or not."""
    terms = [factor * term if factor != 1 else term for factor, term in ((x, h_W), (y, v_W)) if factor != 0]
    return sum(terms[1:], terms[0]) if terms else np.zeros_like(h_W)


def blend(h_W: np.ndarray, v_W: np.ndarray, a_W: np.ndarray) -> np.ndarray:
    """(1 − a)·h + a·v in fp32, rounded as it goes; where a is 0 h alone, where it is 1 v alone, NaN or not."""
    mixed_W = (np.float32(1) - a_W) * h_W + a_W * v_W
    return np.where(a_W == 0, h_W, np.where(a_W == 1, v_W, mixed_W))


def project(h_W: np.ndarray, v_W: np.ndarray, low: np.float32, high: np.float32) -> np.ndarray:
    """h with its projection on the unit vector v clamped to low … high; h itself where it lies there already."""
    along = np.float32(h_W.astype(np.float64) @ v_W.astype(np.float64))
    move = np.minimum(np.maximum(along, low), high) - along
    return h_W + move * v_W if move != 0 else h_W


def noise(h_W: np.ndarray, e_W: np.ndarray, std: np.float32, relative: bool) -> np.ndarray:
    """h + std·ε; `relative`: of the root mean square of h."""
    if relative:
        std = std * np.float32(np.sqrt(np.mean(h_W.astype(np.float64) ** 2)))
    return h_W + std * e_W if std != 0 else h_W
