"""The reference kernel, written for readability: one row and one record at a time. The fast kernels must equal it.

R rows · W point width · B elements in the bank · K elements in the step's capture buffer
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from patchclamp.kernels.noise import normals
from patchclamp.plan import (
    ADD_NORMED,
    ALL,
    APPLY,
    BLEND,
    CAPTURE,
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
    bits_R: np.ndarray | None = None,
) -> np.ndarray:
    """Apply a point's records to fp32 rows in place, and write captured rows to `kept_K`, stored rows to `bank_B`.
    Returns a mask of the edited rows, bool [R].

    token_R: the rows' token ids, if any record needs them
    code: `code(number, rows [n, W], point, positions [n])` returns the rows of an `Apply` function; None if it failed
    bits_R: the rows' bits, int64, zero when a step begins, if any record needs them
    """
    width = h_RW.shape[1]
    ranges = {int(number): i for i, number in enumerate(plan.layout.range_number)}
    regions = {int(number): i for i, number in enumerate(plan.layout.region_number)}
    edited_R = np.zeros(len(h_RW), bool)
    bits_R = np.zeros(len(h_RW), np.int64) if bits_R is None else bits_R
    for r in range(len(h_RW)):
        slot, position, matched = int(rows.slot[r]), int(rows.position[r]), True
        for number in range(table.first[slot, point], table.first[slot, point + 1]):
            kind = int(table.records["kind"][number])
            record, applies, matched = named(table.records[number : number + 1], kind)[0], matched, True
            if kind == WHEN:  # after an unmatched MATCH, the edit is skipped too
                latch, latched = int(record["latch"]), table.latches[slot]
                held = bool(bits_R[r] >> record["bit"] & 1) if latch < 0 else position >= latched[latch]
                matched = applies and held
                continue
            if not applies or not record["start"] <= position < record["stop"]:
                continue
            if kind == MATCH:
                assert token_R is not None
                ids = bank_B[record["ids"] : record["ids"] + record["count"]]
                matched = (token_R[r] in ids) == (record["expected"] == 1)
            elif kind == TEST:
                _set(bits_R, r, record, _product(h_RW[r], record, bank_B) > record["threshold"])
            elif kind == ALL:
                _set(bits_R, r, record, (bits_R[r] & record["mask"] == record["wanted"]) != bool(record["negated"]))
            elif kind == SPAN:
                assert token_R is not None
                inside, after = between(rows, r, token_R, record, table.latches[slot])
                if position == record["start"]:
                    table.latches[slot, record["latch"]] = 0
                bits_R[r] = bits_R[r] & ~(3 << int(record["bit"])) | (inside | after << 1) << int(record["bit"])
            elif kind == LATCH and record["last"]:
                kept = 2 * position + int(bits_R[r] >> record["bit"] & 1)
                table.latches[slot, record["latch"]] = max(table.latches[slot, record["latch"]], kept)
            elif kind == LATCH:
                if bits_R[r] >> record["bit"] & 1:
                    table.latches[slot, record["latch"]] = min(table.latches[slot, record["latch"]], position)
            elif kind == CAPTURE:
                i, region = ranges[int(record["range"])], regions[int(record["region"])]
                kept_W = products(h_RW[r], record, bank_B) if record["products"] else h_RW[r]
                begin = plan.base[region] + (plan.offset[i] + position - plan.begin[i]) * len(kept_W)
                kept_K[begin : begin + len(kept_W)] = kept_W
            elif kind == STORE:
                begin = record["vector"] + (position - record["start"]) * record["row_step"] * width
                bank_B[begin : begin + width] = h_RW[r]
            elif kind == APPLY:
                assert code is not None
                columns, edited_R[r] = columns_of(record), True
                result = code(int(record["code"]), h_RW[r, None, columns].copy(), point, np.array([position]))
                h_RW[r, columns] = h_RW[r, columns] if result is None else result[0]
            else:
                h_RW[r, columns_of(record)], edited_R[r] = _edited(h_RW[r], record, position, bank_B), True
    return edited_R


def between(rows: RowLabels, r: int, token_R: np.ndarray, record: np.void, latches: np.ndarray) -> tuple[bool, bool]:
    """Return two flags: the row's token is strictly between delimiters; the next token is, unless it is a delimiter."""
    opening, closing = int(record["opening"]), int(record["closing"])
    for row in range(r, r - rows.rank[r] - 1, -1):  # backwards through this request's rows of the step
        if rows.position[row] < record["start"]:
            return bool(record["inside"]), bool(record["inside"])
        if token_R[row] in (opening, closing):
            return row < r and token_R[row] == opening, token_R[row] == opening
    first = rows.position[r] - rows.rank[r]
    inside = bool(record["inside"] if first == record["start"] else latches[record["latch"]] & 1)
    return inside, inside


def _set(bits_R: np.ndarray, r: int, record: np.void, held: bool) -> None:
    """Set or clear a record's bit in a row's bits."""
    bits_R[r] = bits_R[r] & ~(1 << int(record["bit"])) | int(held) << int(record["bit"])


def _product(h_W: np.ndarray, record: np.void, bank_B: np.ndarray) -> np.float32:
    """Return the product of a row's columns with a test's vector, summed in fp64."""
    begin, columns = int(record["vector"]), columns_of(record)
    v_W = bank_B[begin : begin + len(h_W)][columns]
    return np.float32(v_W.astype(np.float64) @ h_W[columns].astype(np.float64))


def _edited(h_W: np.ndarray, record: np.void, position: int, bank_B: np.ndarray) -> np.ndarray:
    """Return a row's columns after one record's edit."""
    kind, columns, width = record["kind"], columns_of(record), len(h_W)
    if kind == NOISE:
        first = int(record["first_column"])
        e_W = normals(int(record["seed"]), position, int(record["stream"]), first + width)[first:]
        return noise(h_W[columns], e_W[columns], record["std"], bool(record["relative"]))
    begin = record["vector"] + (position - record["start"]) * record["row_step"] * width
    if kind == LOW_RANK:
        rank = int(record["rank"])
        e_KW, d_KW = bank_B[record["factors"] :][: 2 * rank * width].reshape(2, rank, width)[:, :, columns]
        if record["toward"]:
            v_W = bank_B[begin : begin + width][columns]
            return added(h_W[columns], record["toward"] * along(e_KW, v_W - h_W[columns]), d_KW)
        numbers_K5 = bank_B[begin : begin + 5 * rank].reshape(rank, 5)
        return added(h_W[columns], gated(along(e_KW, h_W[columns]), numbers_K5), d_KW)
    v_W = bank_B[begin : begin + width][columns]
    if kind == LINEAR:
        return linear(h_W[columns], v_W, record["h_scale"], record["v_scale"])
    if kind == PROJECT:
        return project(h_W[columns], v_W, record["low"], record["high"])
    if kind == ADD_NORMED:
        return add_normed(h_W[columns], v_W, record["scale"])
    if kind == ROTATE:
        other_W = bank_B[begin + width : begin + 2 * width][columns]
        return rotate(h_W[columns], v_W, other_W, record["cos"], record["sin"], bool(record["relative"]))
    assert kind == BLEND
    mask_W = bank_B[record["mask"] : record["mask"] + width][columns]
    return blend(h_W[columns], v_W, record["alpha"] * mask_W)


def linear(h_W: np.ndarray, v_W: np.ndarray, h_scale: np.float32, v_scale: np.float32) -> np.ndarray:
    """Return h_scale·h + v_scale·v in fp32, each product and the sum rounded; a scale of 0 omits its term, even NaN."""
    scaled = ((h_scale, h_W), (v_scale, v_W))
    terms = [scale * term if scale != 1 else term for scale, term in scaled if scale != 0]
    return sum(terms[1:], terms[0]) if terms else np.zeros_like(h_W)


def blend(h_W: np.ndarray, v_W: np.ndarray, a_W: np.ndarray) -> np.ndarray:
    """Return (1 − a)·h + a·v in fp32, each operation rounded; exactly h where a is 0 and v where a is 1, even NaN."""
    mixed_W = (np.float32(1) - a_W) * h_W + a_W * v_W
    return np.where(a_W == 0, h_W, np.where(a_W == 1, v_W, mixed_W))


def along(e_KW: np.ndarray, h_W: np.ndarray) -> np.ndarray:
    """Return the products of h with each row of `e_KW`, [K], summed in fp64."""
    return (e_KW.astype(np.float64) @ h_W.astype(np.float64)).astype(np.float32)


def gated(p_K: np.ndarray, numbers_K5: np.ndarray) -> np.ndarray:
    """Return g of `plan.bound.Factored`: offset + slope · q where q = p + bias > threshold, `otherwise` elsewhere."""
    bias, threshold, offset, slope, otherwise = numbers_K5.T
    q_K = p_K + bias
    return np.where(q_K > threshold, offset + slope * q_K, otherwise)


def added(h_W: np.ndarray, g_K: np.ndarray, d_KW: np.ndarray) -> np.ndarray:
    """Return h + Σ g · d, with the sum computed in fp64; exactly h where the sum is 0."""
    sum_W = (g_K.astype(np.float64) @ d_KW.astype(np.float64)).astype(np.float32)
    return np.where(sum_W == 0, h_W, h_W + sum_W)


def products(h_W: np.ndarray, record: np.void, bank_B: np.ndarray) -> np.ndarray:
    """Return a row's products with each row of a capture's matrix, over the record's columns, summed in fp64."""
    count, width, columns = int(record["products"]), len(h_W), columns_of(record)
    matrix_KW = bank_B[record["matrix"] : record["matrix"] + count * width].reshape(count, width)[:, columns]
    return (matrix_KW.astype(np.float64) @ h_W[columns].astype(np.float64)).astype(np.float32)


def project(h_W: np.ndarray, v_W: np.ndarray, low: np.float32, high: np.float32) -> np.ndarray:
    """Clamp h's projection on the unit vector v to low … high; h is unchanged if it is already within."""
    along = np.float32(h_W.astype(np.float64) @ v_W.astype(np.float64))
    move = np.minimum(np.maximum(along, low), high) - along
    return h_W + move * v_W if move != 0 else h_W


def add_normed(h_W: np.ndarray, v_W: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return h + scale·(|h| / |v|)·v, with norms from sums in fp64; h is unchanged if v is 0."""
    squares = [np.sum(row_W.astype(np.float64) ** 2) for row_W in (h_W, v_W)]
    factor = scale * np.float32(np.sqrt(squares[0] / squares[1])) if squares[1] else 0
    return h_W + factor * v_W if factor != 0 else h_W


def rotate(
    h_W: np.ndarray, a_W: np.ndarray, b_W: np.ndarray, cos: np.float32, sin: np.float32, relative: bool
) -> np.ndarray:
    """Rotate h in the plane of orthonormal vectors a and b, to an angle or, if `relative`, by it:
    h + (a′ − a)·a + (b′ − b)·b, with coordinates in fp64."""
    a, b = (float(h_W.astype(np.float64) @ unit_W.astype(np.float64)) for unit_W in (a_W, b_W))
    length, cos64, sin64 = np.sqrt(a * a + b * b), float(cos), float(sin)
    to_a, to_b = (a * cos64 - b * sin64, a * sin64 + b * cos64) if relative else (length * cos64, length * sin64)
    return h_W + np.float32(to_a - a) * a_W + np.float32(to_b - b) * b_W


def noise(h_W: np.ndarray, e_W: np.ndarray, std: np.float32, relative: bool) -> np.ndarray:
    """Return h + std·ε; if `relative`, std is multiplied by h's root mean square."""
    if relative:
        std = std * np.float32(np.sqrt(np.mean(h_W.astype(np.float64) ** 2)))
    return h_W + std * e_W if std != 0 else h_W
