"""The fast kernel equals the readable one, and the stream's two bf16 tensors lose nothing that they could hold."""

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchclamp.kernels import fused, noise, reference
from patchclamp.plan import (
    ADD_NORMED,
    BLEND,
    CAPTURE,
    LINEAR,
    LOW_RANK,
    MATCH,
    NOISE,
    PROJECT,
    ROTATE,
    STORE,
    TEST,
    Batch,
    ProgramTable,
    StepPlan,
    make_plan,
)
from patchclamp.plan.bound import pack_columns
from tests.reference.admitting import Table
from tests.reference.records import decisions, record_array

WIDTHS, SAMPLED = np.array([4, 4, 7]), np.array([False, False, True])
POINTS, BANK = len(WIDTHS), 28 * 20
STORED, MAX_STORES = BANK + 28, 100  # stored rows come after the vectors and the token ids, 7 · 28 numbers a record
FACTORS = np.array([0.0, 1.0, -1.0, 0.5, 3.3333333, 1e-3, -0.0], np.float32)


class Step(msgspec.Struct):
    """A planned step, its vectors, and the values at each point."""

    table: ProgramTable
    plan: StepPlan
    bank: np.ndarray
    values: list[np.ndarray]
    kept: np.ndarray
    tokens: np.ndarray
    last: np.ndarray
    bits: np.ndarray


def numbers(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers over many magnitudes, some of them zero."""
    made = draw.standard_normal(shape) * 10.0 ** draw.integers(-4, 5, shape) * (draw.random(shape) > 0.1)
    return made.astype(np.float32)


def records(draw: np.random.Generator, kinds: list[int], stores: Iterator[int]) -> tuple[np.ndarray, np.ndarray]:
    """Up to six records at each point; captures of a point and op do not overlap, as `bind` makes them, and every record
    stores elsewhere."""
    counts, made = draw.integers(0, 7, POINTS), []
    for point, count in enumerate(counts):
        for ordinal in range(count):
            start, length, step = int(draw.integers(0, 12)), int(draw.integers(1, 7)), int(draw.integers(0, 2))
            kind, (x, y) = int(draw.choice([kind for kind in kinds if kind != TEST])), draw.choice(FACTORS, 2)
            value, other = draw.integers(0, BANK // WIDTHS[point] - 7, 2) * WIDTHS[point]
            if kind == CAPTURE:
                value, x, y = ordinal, float(draw.integers(0, 3)), float(draw.integers(0, 4) * (PROJECT in kinds))
            elif kind == STORE:
                value, step = STORED + 7 * 28 * next(stores), 1
            elif kind == NOISE:
                value, other, step = draw.integers(1 << 31), draw.integers(1 << 62), step * (PROJECT in kinds)
                x = 4.0 * draw.integers(0, 5)
            elif kind == ROTATE:
                other, step = int(draw.integers(0, 2)), 0
            elif kind == PROJECT:
                x, y, step = min(x, y), max(x, y), 0
            elif kind == LOW_RANK:
                x, y = float(draw.choice([0.0, 0.5, 1.0])), float(draw.integers(1, 4))
                step *= int(x != 0)
            if kind not in (CAPTURE, STORE) and draw.random() < 0.3:
                made.append((start, start + length, MATCH, int(draw.integers(1, 8)), BANK, float(draw.integers(0, 2))))
                counts[point] += 1
            if TEST in kinds and kind not in (CAPTURE, STORE) and not SAMPLED[point]:
                deciding = decisions(draw, point, start, start + length, int(WIDTHS[point]), BANK)
                made, counts[point] = made + deciding, counts[point] + len(deciding)
            first, end = sorted(draw.choice(WIDTHS[point] + 1, 2, replace=False).tolist())
            of_part = kind not in (CAPTURE, STORE) or (kind == CAPTURE and y)
            columns = pack_columns((first, end)) if of_part and draw.random() < 0.3 else 0
            made.append((start, start + length, kind, step, value, x, y, other, 0, columns))
    return record_array(made), counts


EXACT = [CAPTURE, CAPTURE, LINEAR, LINEAR, BLEND, NOISE, STORE]
SUMS = [PROJECT, ADD_NORMED, ROTATE, LOW_RANK]  # over the row
DECIDING = [*EXACT, TEST]  # with records that decide whether others act


@st.composite
def steps(draw, kinds: list[int] = EXACT) -> Step:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table, stores = Table(4, POINTS, 200, SAMPLED), itertools.count()
    for _ in range(draw(st.integers(1, 4))):
        table.admit(*records(rng, kinds, stores))
    slots = np.array(draw(st.permutations([*range(1, len(table) + 1), 0, 0])))
    count = rng.integers(1, 6, len(slots))
    row = np.cumsum(count) - count + np.cumsum(rng.integers(0, 2, len(slots)))
    batch = Batch(slots, row, rng.integers(0, 12, len(slots)), count, int(row[-1] + count[-1]))
    plan = make_plan(batch, table, WIDTHS)
    rows = [len(slots) if sampled else batch.rows for sampled in SAMPLED]
    values = [numbers(rng, r, w) for r, w in zip(rows, WIDTHS, strict=True)]
    ids, stored = np.sort(rng.integers(0, 12, 8)).astype(np.float32), np.zeros(7 * 28 * MAX_STORES, np.float32)
    bank = np.concatenate([numbers(rng, BANK), ids, np.zeros(STORED - BANK - 8, np.float32), stored])
    tokens = rng.integers(0, 12, batch.rows)
    return Step(table, plan, bank, values, numbers(rng, plan.size), tokens, batch.row + batch.count - 1,
                np.zeros(batch.rows, np.int64))  # fmt: skip


def rows_of(step: Step, point: int):
    return step.plan.sampled if SAMPLED[point] else step.plan.tokens


def by_reference(step: Step, point: int, h: np.ndarray, kept: np.ndarray) -> np.ndarray:
    given = (rows_of(step, point), point, step.table, step.plan, step.bank, kept, tokens_of(step, point), None)
    return reference.apply(h, *given, step.bits)


def tokens_of(step: Step, point: int) -> np.ndarray:
    return step.tokens[step.last] if SAMPLED[point] else step.tokens


def by_fused(
    step: Step, point: int, hidden: torch.Tensor, residual: torch.Tensor | None, kept: torch.Tensor,
    bank: torch.Tensor | None = None, bits: np.ndarray | None = None,
) -> None:  # fmt: skip
    bank = torch.from_numpy(step.bank) if bank is None else bank
    tokens = torch.from_numpy(tokens_of(step, point))
    fused.apply(hidden, residual, rows_of(step, point), point, step.table, step.plan, bank, kept, tokens,
                None, None, step.bits if bits is None else bits)  # fmt: skip


def bits(array) -> list:
    return np.asarray(array).view(np.int32).tolist()


# -- fused against reference


@given(steps(DECIDING))
def test_fused_equals_reference_bit_for_bit(step):
    kept, kept_fused = step.kept.copy(), torch.from_numpy(step.kept.copy())
    bank, bits_fused = torch.from_numpy(step.bank.copy()), step.bits.copy()
    for point, value in enumerate(step.values):
        h, hidden = value.copy(), torch.from_numpy(value.copy())
        latches = step.table.latches.copy()
        edited = by_reference(step, point, h, kept)
        mine, step.table.latches[:] = step.table.latches.copy(), latches
        by_fused(step, point, hidden, None, kept_fused, bank, bits_fused)
        assert np.array_equal(bits_fused, step.bits)
        assert np.array_equal(mine, step.table.latches)
        assert bits(hidden) == bits(h)
        assert bits(bank) == bits(step.bank)
        assert bits(kept_fused) == bits(kept)
        assert np.array_equal(h[~edited], value[~edited])
        assert edited.any() or not (h != value).any()


def carried(largest: float, into: np.ndarray, out: np.ndarray) -> float:
    """Propagate a row's rounding errors through h + out · (into · h). They are proportional to the largest number so far:
    a row in which large numbers cancelled is small, but its errors are not."""
    return largest * (np.abs(out).T @ np.abs(into)).sum(1).max()


def by_definition(
    record: np.void, s: np.ndarray, position: int, bank: np.ndarray, largest: float, within: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """What `plan.table` says of a record; and the largest number that came up, against which errors are small."""
    if word := int(record["columns"]):
        within = (word & 0xFFFF <= np.arange(len(s))) & (np.arange(len(s)) < word >> 16)
        record = record.copy()
        record["columns"] = 0
        made, largest = by_definition(record, np.where(within, s, 0), position, bank, largest, within)
        return np.where(within, made, s), largest
    width, x, y = len(s), float(record["x"]), float(record["y"])
    if record["kind"] == NOISE:
        first = int(record["x"])
        drawn = noise.normals(int(record["other"]), position, int(record["value"]), first + width)[first:]
        e = y * drawn.astype(np.float64)
        many = width if within is None else within.sum()
        return s + e * (np.sqrt((s * s).sum() / many) if record["step"] else 1.0), max(largest, np.abs(e).max())
    begin, other = record["value"] + (position - record["start"]) * record["step"] * width, record["other"]
    v, m = bank[begin : begin + width], bank[other : other + width]
    if record["kind"] == LOW_RANK:
        rank = int(y)
        e, d = bank[other : other + 2 * rank * width].reshape(2, rank, width) * (1 if within is None else within)
        if x:
            g = x * (e @ (v - s))
        else:
            bias, threshold, offset, slope, otherwise = bank[begin : begin + 5 * rank].reshape(rank, 5).T
            q = e @ s + bias
            g = np.where(q > threshold, offset + slope * q, otherwise)
        most = max(np.abs(e * s).max(), np.abs(e * v).max() if x else 0, 1) * np.abs(d).max() * max(1, np.abs(g).max())
        steepest = np.full(rank, abs(x)) if x else np.abs(slope)
        return s + g @ d, max(largest, most, carried(largest, e, d * steepest[:, None]))
    if record["kind"] == LINEAR:
        terms = x * s, y * v
    elif record["kind"] == ROTATE:
        ways = [v, bank[begin + width : begin + 2 * width]]
        a, b = (float(s @ way) for way in ways)
        to = x * np.hypot(a, b), y * np.hypot(a, b)
        to = (a * x - b * y, a * y + b * x) if other else to
        terms = (s, *((new - old) * way for new, old, way in zip(to, (a, b), ways, strict=True)))
        largest = max(largest, *(abs(old) * np.abs(way).max() for old, way in zip((a, b), ways, strict=True)),
                      *(np.abs(s * way).max() for way in ways), carried(largest, np.array(ways), np.array(ways)))  # fmt: skip
    elif record["kind"] == ADD_NORMED:
        v = v if within is None else np.where(within, v, 0)
        terms = s, y * np.linalg.norm(s) * v / (np.linalg.norm(v) or 1)
    elif record["kind"] == BLEND:
        terms = (1 - y * m) * s, y * m * v
    else:
        p = float(s @ v)
        largest = max(largest, np.abs(p * v).max(), np.abs(s * v).max(), carried(largest, v[None], v[None]))
        terms = s, (min(max(p, x), y) - p) * v
    return sum(terms), max(largest, *(np.abs(term).max() for term in terms))


def kept_of(record: np.void, s: np.ndarray, bank: np.ndarray, largest: float) -> tuple[np.ndarray, float]:
    """What a capture keeps of a row: the row, or its product with each row of a matrix, on some columns; and the largest
    number that came up, with the errors so far."""
    width, count, word = len(s), int(record["y"]), int(record["columns"])
    first, end = (word & 0xFFFF, word >> 16) if word else (0, width)
    rows = [bank[record["other"] + i * width :][first:end].astype(np.float64) for i in range(count)]
    if not count:
        return s, largest
    most = max(largest * np.abs(row).sum() for row in rows)
    return np.array([sum(row * s[first:end]) for row in rows]), max(
        most, *(np.abs(row * s[first:end]).max() for row in rows)
    )


@given(steps([*EXACT, *SUMS, *SUMS]))
def test_fused_sums_over_rows_as_the_reference_does(step):
    """To the last bits but a few: the sums are in another order.  Directions are short, or rows would grow and grow."""
    vectors = step.bank[:BANK]
    step.bank[:BANK] = np.float32(0.3) * np.sign(vectors) * np.abs(vectors) ** np.float32(0.1)
    kept, kept_fused = step.kept.copy(), torch.from_numpy(step.kept.copy())
    for point, value in enumerate(step.values):
        value = np.sign(value) * np.abs(value) ** np.float32(0.1)
        h, hidden = value.copy(), torch.from_numpy(value.copy())
        by_reference(step, point, h, kept)
        by_fused(step, point, hidden, None, kept_fused)
        for ours, theirs in ((hidden, h), (kept_fused, kept)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max(initial=1))


@given(steps([*EXACT, *SUMS]))
def test_reference_is_what_the_records_say(step):
    """Each row again, from the definitions of the ops, in double precision."""
    kept = step.kept.copy()
    for point, value in enumerate(step.values):
        h, rows = value.copy(), rows_of(step, point)
        by_reference(step, point, h, kept)
        for r in range(len(h)):
            s, position = value[r].astype(np.float64), rows.position[r]
            largest, matched = np.abs(s).max(), True
            first, last = step.table.first[rows.slot[r], point : point + 2]
            for number in range(first, last):
                record, asked, matched = step.table.records[number], matched, True
                if not asked or not record["start"] <= position < record["stop"]:
                    continue
                if record["kind"] == MATCH:
                    ids = set(step.bank[BANK : BANK + record["step"]].tolist())
                    matched = bool(record["x"]) is (int(tokens_of(step, point)[r]) in ids)
                    continue
                if record["kind"] == CAPTURE:
                    c = step.plan.layout.range_number.tolist().index(record["step"])
                    at = step.plan.target(record["step"], record["value"])
                    kept_W, most = kept_of(record, s, step.bank, largest)
                    at += (position - step.plan.begin[c]) * len(kept_W)
                    np.testing.assert_allclose(kept[at : at + len(kept_W)], kept_W, rtol=1e-5, atol=1e-6 * most)
                    continue
                if record["kind"] == STORE:
                    at = record["value"] + (position - record["start"]) * WIDTHS[point]
                    np.testing.assert_allclose(step.bank[at : at + WIDTHS[point]], s, rtol=1e-5, atol=1e-6 * largest)
                    continue
                s, largest = by_definition(record, s, int(position), step.bank.astype(np.float64), largest)
            np.testing.assert_allclose(h[r], s, rtol=1e-5, atol=1e-6 * largest)


def program(*made: tuple, position: int = 0, rows: int = 2, width: int = 4) -> tuple[ProgramTable, StepPlan]:
    """One request of `rows` rows from `position` on, with records (start, stop, kind, step, value, x, y) at point 0."""
    table = Table(1, 1, 8)
    slot = table.admit(record_array(made), np.array([len(made)]))
    batch = Batch(np.array([slot]), np.array([0]), np.array([position]), np.array([rows]), rows)
    return table, make_plan(batch, table, np.array([width]))


def apply(
    table: ProgramTable, plan: StepPlan, h: np.ndarray, bank: np.ndarray, kernel: str
) -> tuple[np.ndarray, np.ndarray]:
    h, kept = h.astype(np.float32), np.full(plan.size, -7.0, np.float32)
    if kernel == "reference":
        reference.apply(h, plan.tokens, 0, table, plan, bank, kept)
        return h, kept
    hidden, kept_K = torch.from_numpy(h), torch.from_numpy(kept)
    fused.apply(hidden, None, plan.tokens, 0, table, plan, torch.from_numpy(bank), kept_K)
    return hidden.numpy(), kept_K.numpy()


both = pytest.mark.parametrize("kernel", ["reference", "fused"])


@both
def test_ops_act_in_order_and_captures_see_their_place(kernel):
    bank = np.array([1, 2, 3, 4, 10, 20, 30, 40], np.float32)
    made = [
        (0, 9, CAPTURE, 0, 0, 0, 0),      # before
        (0, 9, LINEAR, 0, 4, 1.0, 0.5),   # h + 0.5·[10 …]
        (3, 4, CAPTURE, 0, 2, 0, 0),      # in the middle, position 3 alone
        (3, 5, LINEAR, 1, 0, 0.0, 1.0),   # a row each: [1 …], [10 …]
        (4, 5, LINEAR, 0, 0, 0.0, 0.0),   # zero
        (0, 9, CAPTURE, 0, 5, 0, 0),      # after
    ]  # fmt: skip
    table, plan = program(*made, position=2, rows=3)
    h, kept = apply(table, plan, np.ones((3, 4)), bank, kernel)
    assert h.tolist() == [[6, 11, 16, 21], [1, 2, 3, 4], [0, 0, 0, 0]]
    rows = kept.reshape(-1, 4)
    assert plan.count.tolist() == [3, 1, 3]
    captures = table.records[[0, 2, 5]]
    target = plan.target(captures["step"], captures["value"])
    first, middle, last = (rows[t // 4 : t // 4 + n].tolist() for t, n in zip(target, plan.count, strict=True))
    assert first == [[1] * 4] * 3
    assert middle == [[6, 11, 16, 21]]
    assert last == h.tolist()


@both
def test_a_factor_of_zero_leaves_nan_out(kernel):
    bank = np.array([1, 2, 3, 4] + [np.nan] * 4, np.float32)
    nan = np.full((1, 4), np.nan)
    cases = [
        (nan, (0.0, 1.0), 0, [1, 2, 3, 4]),
        (nan, (0.0, 0.0), 0, [0, 0, 0, 0]),
        (np.ones((1, 4)), (1.0, 0.0), 4, [1, 1, 1, 1]),
        (np.ones((1, 4)), (2.0, -0.0), 4, [2, 2, 2, 2]),
        (np.ones((1, 4)), (0.0, 0.0), 4, [0, 0, 0, 0]),
    ]
    for h, factors, value, expected in cases:
        table, plan = program((0, 1, LINEAR, 0, value, *factors), rows=1)
        assert apply(table, plan, h, bank, kernel)[0].tolist() == [expected]
    table, plan = program((0, 1, LINEAR, 0, 0, 1.0, 1.0), rows=1)
    assert np.isnan(apply(table, plan, nan, bank, kernel)[0]).all()


@both
def test_an_added_vector_gets_the_length_of_the_row(kernel):
    bank = np.array([0] * 4 + [3, 0, 0, 4], np.float32)
    table, plan = program((0, 9, ADD_NORMED, 1, 0, 0.0, 2.0), rows=2)
    rows = np.array([[1, 2, 2, 4], [1, 2, 2, 4]])
    assert apply(table, plan, rows, bank, kernel)[0].tolist() == [
        [1, 2, 2, 4],
        [7, 2, 2, 12],
    ]  # a v of zeros is not added
    table, plan = program((0, 9, ADD_NORMED, 0, 4, 0.0, 1.0, 0, 0, pack_columns((2, 4))), rows=1)
    assert apply(table, plan, np.array([[9, 9, 3, 4]]), bank, kernel)[0].tolist() == [[9, 9, 3, 9]]


@both
def test_a_rotation_keeps_the_length_and_what_is_outside_the_plane(kernel):
    bank, row = np.array([1, 0, 0, 0, 0, 0, 1, 0], np.float32), np.array([[3, 5, 4, 6]])
    cases = [((1, 0, 0), [5, 5, 0, 6]), ((0, 1, 0), [0, 5, 5, 6]), ((-1, 0, 0), [-5, 5, 0, 6]),
             ((0, 1, 1), [-4, 5, 3, 6]), ((1, 0, 1), [3, 5, 4, 6])]  # fmt: skip
    for (cos, sin, relative), expected in cases:
        table, plan = program((0, 1, ROTATE, 0, 0, float(cos), float(sin), relative), rows=1)
        assert apply(table, plan, row, bank, kernel)[0].tolist() == [expected]
        assert apply(table, plan, row * [[0, 1, 0, 1]], bank, kernel)[0].tolist() == [[0, 5, 0, 6]]


@both
def test_products_are_of_their_columns_alone(kernel):
    bank = np.array([0] * 4 + [1, 2, 3, 4, 10, 20, 30, 40], np.float32)
    table, plan = program((0, 2, CAPTURE, 0, 0, 0, 2, 4, 0, pack_columns((1, 3))), (1, 2, LINEAR, 0, 0, 2.0, 0.0))
    rows = np.array([[np.nan, 1, 1, np.inf], [5, 6, 7, 8]])
    h, kept = apply(table, plan, rows, bank, kernel)
    assert kept.tolist() == [5, 50, 33, 330]
    assert h[1].tolist() == [10, 12, 14, 16]


@both
def test_nothing_to_do_touches_nothing(kernel):
    bank = np.ones(4, np.float32)
    table, plan = program((5, 9, LINEAR, 0, 0, 1.0, 1.0), (7, 8, CAPTURE, 0, 0, 0, 0), position=0, rows=5)
    h, kept = apply(table, plan, np.full((5, 4), 3.25), bank, kernel)
    assert (h == 3.25).all()
    assert len(kept) == plan.size == 0
    table, plan = program((5, 9, LINEAR, 0, 0, 1.0, 1.0), position=1, rows=5)
    assert apply(table, plan, np.full((5, 4), 3.25), bank, kernel)[0].tolist() == [[3.25] * 4] * 4 + [[4.25] * 4]


# -- the stream as a pair of bf16 tensors


def pair(step: Step, point: int) -> tuple[torch.Tensor, torch.Tensor]:
    residual = torch.from_numpy(step.values[point]).bfloat16()
    return torch.from_numpy(numbers(np.random.default_rng(1), *step.values[point].shape)).bfloat16(), residual


@given(steps())
def test_the_pair_is_its_sum(step):
    for point in (0, 1):
        hidden, residual = pair(step, point)
        s = (hidden.float() + residual.float()).numpy()
        kept, kept_fused = step.kept.copy(), torch.from_numpy(step.kept.copy())
        h, old_hidden, old_residual = s.copy(), hidden.clone(), residual.clone()
        edited = torch.from_numpy(by_reference(step, point, h, kept))
        by_fused(step, point, hidden, residual, kept_fused)
        assert bits(kept_fused) == bits(kept)
        assert torch.equal(hidden[~edited].view(torch.int16), old_hidden[~edited].view(torch.int16))
        assert torch.equal(residual[~edited].view(torch.int16), old_residual[~edited].view(torch.int16))
        expected = torch.from_numpy(h)[edited]
        assert torch.equal(residual[edited], expected.bfloat16())
        assert torch.equal(hidden[edited], (expected - expected.bfloat16().float()).bfloat16())
        error = (hidden[edited].float() + residual[edited].float() - expected).abs()
        assert (error <= expected.abs() * 2.0**-16).all()


@given(steps())
def test_one_bf16_tensor_rounds_once(step):
    for point in (0, 1, 2):
        hidden = torch.from_numpy(step.values[point]).bfloat16()
        h, before, kept = hidden.float().numpy(), hidden.clone(), step.kept.copy()
        edited = torch.from_numpy(by_reference(step, point, h, kept))
        by_fused(step, point, hidden, None, torch.from_numpy(step.kept.copy()))
        assert torch.equal(hidden[edited], torch.from_numpy(h)[edited].bfloat16())
        assert torch.equal(hidden[~edited].view(torch.int16), before[~edited].view(torch.int16))


@st.composite
def bf16_pairs(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of pairs, their exponents equal or further apart than fp32 is long, with zeros; none near overflow."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponent = rng.integers(1, 250, (6, 16))
    gap = draw(st.sampled_from([0, 3, 8, 9, 15, 16, 17, 24, 40]))
    other = np.clip(exponent - rng.integers(0, gap + 1, (6, 16)), 0, 250)

    def made(exponents):
        pattern = rng.integers(0, 2, (6, 16)) << 15 | exponents << 7 | rng.integers(0, 128, (6, 16))
        pattern[rng.random((6, 16)) < 0.1] &= 0x8000
        return torch.from_numpy(pattern.astype(np.uint16).view(np.int16)).view(torch.bfloat16)

    return (made(exponent), made(other)) if draw(st.booleans()) else (made(other), made(exponent))


@given(bf16_pairs())
def test_writing_back_what_was_read_keeps_the_sum(made):
    """TwoSum: split(join(h, r)) has the sum of h and r, to the last bit, whatever the gap between them."""
    hidden, residual = made
    every = torch.arange(len(hidden))
    s = fused.join(hidden, residual, every)
    assert torch.equal(s, hidden.float() + residual.float())
    fused.split(hidden, residual, every, s)
    assert torch.equal(fused.join(hidden, residual, every), s)
    assert torch.equal(residual, s.bfloat16())
    again = hidden.clone(), residual.clone()
    fused.split(hidden, residual, every, s)
    assert torch.equal(hidden, again[0])
    assert torch.equal(residual, again[1])


@given(bf16_pairs())
def test_a_captured_row_patched_onto_itself_keeps_the_sum(made):
    hidden, residual = made
    table, plan = program((1, 5, CAPTURE, 0, 0, 0, 0), rows=6, width=16)
    kept = torch.zeros(plan.size)
    before = hidden.clone(), residual.clone()
    fused.apply(hidden, residual, plan.tokens, 0, table, plan, torch.zeros(0), kept)
    assert torch.equal(hidden.view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(residual.view(torch.int16), before[1].view(torch.int16))
    table, plan = program((1, 5, LINEAR, 1, 0, 0.0, 1.0), rows=6, width=16)
    fused.apply(hidden, residual, plan.tokens, 0, table, plan, kept, torch.zeros(0))
    assert torch.equal(hidden.float() + residual.float(), before[0].float() + before[1].float())
    for row in (0, 5):
        assert torch.equal(hidden[row].view(torch.int16), before[0][row].view(torch.int16))
        assert torch.equal(residual[row].view(torch.int16), before[1][row].view(torch.int16))


def test_half_a_stream_would_not_do():
    """What the pair is for: the sum rounded into one bf16 tensor, beside zero, is another number."""
    hidden, residual = torch.tensor([[0.0101]]).bfloat16(), torch.tensor([[3.0]]).bfloat16()
    s = fused.join(hidden, residual, torch.arange(1))
    assert s.bfloat16().float() != s
    fused.split(hidden, residual, torch.arange(1), s)
    assert fused.join(hidden, residual, torch.arange(1)) == s
