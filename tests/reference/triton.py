"""The Triton kernel against the vectorised torch one (itself equal to the reference), on random tables, rows and dtypes.

    TRITON_INTERPRET=1 python -m tests.reference.triton --device cpu --rounds 20

On a CUDA device without TRITON_INTERPRET the compiled kernel is checked; the interpreter is not asked about bfloat16,
to which it converts by cutting off.  Prints one JSON line of what was compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from patchclamp.kernels import cuda, fused, moves, noise
from patchclamp.kernels.attention import MAX_ERROR, AttentionFacts, PatternEdit, edges_of, edited, pattern, scores
from patchclamp.kernels.paged_attention import BLIND, WRONG, PagedCache, paged_scores, remove_keys
from patchclamp.plan import (
    ADD_NORMED,
    APPLY,
    BLEND,
    CAPTURE,
    LINEAR,
    LOW_RANK,
    MATCH,
    NOISE,
    PROJECT,
    ROTATE,
    STORE,
    Batch,
    ProgramTable,
    StepPlan,
    make_plan,
)
from patchclamp.plan.bound import BITS, MAX_RANK, NEVER, BoundOp, PositionRange, RemoveKeys, pack_columns
from patchclamp.plan.step import BYTES
from patchclamp.plan.table import records_of_alike
from patchclamp.runtime.cuda_step import CudaStep
from tests.reference.admitting import Table
from tests.reference.records import decisions, record_array

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ASKED = {"cpu": [0, 2], "cuda": [0, 1, 2]}
SLOTS, POINTS, BANK = 6, 3, 40_000
IDS, VOCABULARY = BANK, 60  # token ids come after the vectors
STORED, MAX_STORES = 256 * (BANK // 256 + 3), 80  # then what is stored, 8 rows of 256 numbers a record


def tables_of(
    table: ProgramTable, plan: StepPlan, position: np.ndarray, batch: Batch, bank: torch.Tensor, token: np.ndarray,
    device: str, stride: int, behind: int,
) -> SimpleNamespace:  # fmt: skip
    """What the kernel reads, plainly laid out, `behind` steps after one was planned."""
    base, offset = np.zeros(len(table.records), np.int64), np.zeros(len(table.records), np.int32)
    base[plan.layout.region_number], offset[plan.layout.range_number] = plan.base, plan.offset
    bad = torch.zeros(SLOTS + 1, dtype=torch.int64, pin_memory=device == "cuda")
    arrays = {
        "slot_of_row": plan.tokens.slot, "rank_of_row": plan.tokens.rank,
        "position_of_row": position.astype(np.int64), "token_of_row": token, "base": base, "offset": offset,
        "row_of_sample": batch.sampled_rows.astype(np.int32), "rank_of_sample": batch.sampled_ranks.astype(np.int32),
        "generation": table.generation,
        "origin_of_row": position.astype(np.int32) - behind, "first": table.first.reshape(-1), "records": table.records.view(np.int32),
    }  # fmt: skip
    made = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    made["bits_of_row"] = torch.zeros(batch.rows, dtype=torch.int32, device=device)
    made["gates_of_row"] = torch.full((batch.rows * MAX_RANK,), float("nan"), device=device)
    made["latches"] = torch.from_numpy(table.latches.copy()).reshape(-1).to(device)
    made["stride"] = torch.tensor([stride]).to(device)
    made["quantiles"] = torch.from_numpy(noise.quantiles()).reshape(-1).to(device)
    return SimpleNamespace(
        **made, table=table, bank=bank.clone().to(device), bad=bad, bad_address=bad.data_ptr(), points=POINTS, ready={},
        turns=batch.most_samples,
    )  # fmt: skip


def records(
    rng: np.random.Generator, width: np.ndarray, device: str, sums: bool = False, coded: bool = False,
    stores: Iterator[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Up to four records at each point; `sums`: of ops, too, that need a sum over a row; `coded`: of code, too; `stores`:
    of those, too, that store rows, each at a place of its own."""
    counts, made = rng.integers(0, 5, POINTS), []
    # a decision is a sum, in fp32 on a device and fp64 in the reference: only one of them may overflow
    decides = sums or coded or rng.random() < 0.5
    for point, count in enumerate(counts):
        for ordinal in range(count):
            start, length = int(rng.integers(0, 9)), int(rng.integers(1, 9))
            kind = int(
                rng.choice(
                    [
                        CAPTURE,
                        LINEAR,
                        BLEND,
                        NOISE,
                        *[APPLY] * coded,
                        *[PROJECT, ADD_NORMED, *[ROTATE] * (point < POINTS - 1)] * sums,
                        *[STORE] * bool(stores),
                        *[LOW_RANK] * (sums and point < POINTS - 1),
                    ]
                )
            )
            value, other = (int(rng.integers(0, BANK // width[point] - 10)) * width[point] for _ in range(2))
            step = int(rng.integers(0, 2))
            if kind == CAPTURE:
                step, value, x, y = 0, ordinal, float(rng.choice(ASKED[device])), 0.0
                if sums and point < POINTS - 1 and rng.random() < 0.6:  # sampled rows are not projected
                    y = float(rng.integers(4, 10))
            elif kind == STORE:
                assert stores is not None
                step, value, x, y, other = (
                    1,
                    -(-(STORED + 8 * 256 * next(stores)) // width[point]) * width[point],
                    0,
                    0,
                    0,
                )
            elif kind == APPLY:
                step, value, x, y = 0, int(rng.integers(0, 4)), 0.0, 0.0
            elif kind == PROJECT:
                step, (x, y) = 0, sorted(rng.choice([-10.0, -0.5, 0.0, 0.5, 10.0], 2))
            elif kind == LOW_RANK:
                x, y = float(rng.choice([0.0, 0.0, 0.05])), float(rng.integers(1, 4))
                step *= int(x != 0)
            elif kind == ROTATE:  # by vectors that are not orthonormal; rows must not grow too much
                step, (x, y), other = 0, rng.choice([-0.1, 0.0, 0.1], 2), int(rng.integers(0, 2))
            elif kind == NOISE:
                step, value, other = (
                    int(sums and rng.random() < 0.5),
                    int(rng.integers(1 << 31)),
                    int(rng.integers(1 << 62)),
                )
                x, y = 4.0 * rng.integers(0, 5), rng.choice([0.0, 0.1, 3.0])
            else:
                large = [0.25, 0.35, 0.22, 0.18, 0.0] if sums else [0.25, 0.35, 0.2, 0.18, 0.02]
                x, y = rng.choice([0.0, 1.0, 0.5, -2.0, 0.25 if decides else 3e38], 2, p=large)
            if kind not in (CAPTURE, STORE) and rng.random() < 0.3:
                ids = IDS + int(rng.integers(0, 200)), int(rng.integers(1, 300))
                made.append((start, start + length, MATCH, ids[1], ids[0], float(rng.integers(0, 2))))
                counts[point] += 1
            if decides and kind not in (CAPTURE, STORE, APPLY) and point < POINTS - 1:
                deciding = decisions(rng, point, start, start + length, int(width[point]), BANK)
                made, counts[point] = made + deciding, counts[point] + len(deciding)
            columns = 0
            if (
                (kind not in (CAPTURE, STORE) or (kind == CAPTURE and y)) and point < POINTS - 1 and rng.random() < 0.3
            ):  # sampled rows have no parts
                columns = pack_columns(tuple(sorted(rng.choice(width[point] + 1, 2, replace=False).tolist())))
            made.append((start, start + length, kind, step, value, x, y, other, 0, columns))
    return record_array(made), counts


def rows(rng: np.random.Generator, count: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of a tensor that may be wider than they are."""
    made = torch.from_numpy(rng.standard_normal((count, width)).astype(np.float32)).to(dtype)
    wide = torch.zeros(count, width + int(rng.choice([0, 16, 24])), dtype=dtype)[:, :width]
    wide.copy_(made)
    return wide.to(device) if device == "cpu" else _as_strided(wide, device)


def _as_strided(rows: torch.Tensor, device: str) -> torch.Tensor:
    made = torch.empty(rows.shape[0] * rows.stride(0), dtype=rows.dtype, device=device)
    made = made.as_strided(rows.shape, rows.stride())
    return made.copy_(rows)


def one_round(rng: np.random.Generator, device: str, found: dict[str, int], sums: bool, coded: bool = False) -> None:
    """One random step; with `sums`, which are added up in another order, close is good enough; `coded`, with code among
    the records, in fp32, for rows are rounded where code begins."""
    width = np.array(rng.choice([16, 40, 100, 256], POINTS))
    sampled = np.array([False, False, True])
    table, stores = Table(SLOTS, POINTS, 200, sampled), itertools.count()
    for _ in range(int(rng.integers(1, SLOTS))):
        table.admit(*records(rng, width, device, sums, coded, stores))
    slots = rng.permutation(SLOTS)
    slots[slots > len(table)] = 0
    count = rng.integers(1, 7, SLOTS)
    samples = None if coded or rng.random() < 0.5 else rng.integers(1, count + 1)
    batch = Batch(slots, np.cumsum(count) - count, rng.integers(0, 9, SLOTS), count, int(count.sum()), samples)
    found["sampled rows of drafts"] = found.get("sampled rows of drafts", 0) + len(batch.sampled_rows) - SLOTS
    in_bytes, in_numbers = (make_plan(batch, table, width, *unit) for unit in ((BYTES,), ()))
    bank = torch.from_numpy(rng.standard_normal(BANK).astype(np.float32))
    if not sums and not coded:
        bank[torch.from_numpy(rng.integers(0, BANK, 400))] = float("nan")
    bank = torch.cat([bank, torch.from_numpy(np.sort(rng.integers(0, 3 * VOCABULARY, 500))).float()])
    bank = torch.cat([bank, torch.zeros(STORED + 8 * 256 * MAX_STORES - len(bank))])
    token = rng.integers(0, VOCABULARY, batch.rows).astype(np.int32)
    token[rng.random(batch.rows) < 0.3] %= 4  # delimiters
    stride, behind = 16 * int(rng.integers(0, 9)), int(rng.integers(0, 4))
    tables = tables_of(table, in_bytes, in_numbers.tokens.position, batch, bank, token, device, stride, behind)
    kept = torch.zeros(in_bytes.size + behind * stride + 16, dtype=torch.uint8, device=device)
    expected, bits_R = torch.zeros(in_numbers.size), np.zeros(batch.rows, np.int64)
    failed, calls = set(), []
    step: Any = CudaStep.__new__(CudaStep)
    step.tables, step._plan, step._batch, step._steps, step.code = tables, in_bytes, batch, 0, RUNNER
    for point in range(POINTS):
        dtype = DTYPES[0 if coded else int(rng.choice(ASKED[device]))]
        labels = in_numbers.sampled if sampled[point] else in_numbers.tokens
        hidden = rows(rng, len(labels.slot), int(width[point]), dtype, device)
        residual = rows(rng, *hidden.shape, dtype, device) if rng.random() < 0.5 else None
        mine = hidden.cpu().clone(), None if residual is None else residual.cpu().clone()
        mine_R = torch.from_numpy(token[batch.sampled_rows] if sampled[point] else token)
        bad = fused.apply(*mine, labels, point, table, in_numbers, bank, expected, mine_R, RUNNER, None, bits_R)
        failed |= set() if bad is None else set(bad.tolist())
        given = hidden.clone(), None if residual is None else residual.clone()
        decided = tables.bits_of_row.clone()
        for again in range(2 if device == "cuda" else 1):  # what was launched before is launched in another way
            tables.bits_of_row.copy_(decided)
            for theirs, before in zip((hidden, residual), given, strict=True):
                if again and theirs is not None:
                    theirs.copy_(before)
            begin = -behind * stride if sampled[point] else 0
            bad = step._carry_out(point, hidden, residual, kept, begin, bool(sampled[point]))
            assert bad is None or len(bad) == 0
        assert device == "cpu" or tables.ready
        calls.append(len(step._calls(point)))
        for name, got, want in zip(("hidden", "residual"), (hidden, residual), mine, strict=True):
            if want is not None and not (sums and name == "residual"):
                told = "sums" if sums else name
                whole = (got.cpu(), want) if residual is None or not sums else (got.cpu() + residual.cpu(), sum(mine))
                assert close(*whole) if sums else torch.equal(bits(got.cpu()), bits(want)), (told, dtype, point)
                found[f"{told} {str(dtype)[6:]}"] = found.get(f"{told} {str(dtype)[6:]}", 0) + 1
    assert np.array_equal(tables.bits_of_row.cpu().numpy() & (1 << BITS) - 1, bits_R), "bits of rows"
    assert np.array_equal(tables.latches.cpu().numpy(), table.latches.reshape(-1)), "latches"
    found["bits of rows"] = found.get("bits of rows", 0) + int(np.count_nonzero(bits_R))
    found["latches"] = found.get("latches", 0) + int((table.latches < NEVER).sum())
    stored = tables.bank.cpu()[STORED:], bank[STORED:]
    assert (close if sums else torch.equal)(*([part.view(-1, 1) for part in stored] if sums else map(bits, stored))), (
        "stored"
    )
    found["stored"] = found.get("stored", 0) + int((bank[STORED:] != 0).sum())
    found["calls of code"] = found.get("calls of code", 0) + sum(calls)
    tables.failed = {s for s in range(1, SLOTS + 1) if int(tables.bad[s]) >> 32 == table.generation[s] > 0}
    assert tables.failed == failed, (tables.failed, failed)
    found["rows not finite"] = found.get("rows not finite", 0) + len(failed)
    host = kept.cpu()
    layout = in_bytes.layout
    for c, a in np.argwhere((in_bytes.count > 0)[:, None] & (layout.group[:, None] == layout.region_group)):
        dtype, of_row = DTYPES[int(layout.dtype[a])], int(in_numbers.row[a])
        size, products = int(in_bytes.count[c]) * of_row, int(layout.products[a])
        at, to = (int(plan.target(layout.range_number[c], layout.region_number[a])) for plan in (in_bytes, in_numbers))
        at += behind * stride
        got = host[at : at + size * dtype.itemsize].view(dtype)
        want = expected[to : to + size].to(dtype)
        if sums:
            rows_of_region = 1 if products else -1, size if products else of_row  # products may nearly cancel
            assert close(got.view(*rows_of_region), want.view(*rows_of_region)), ("capture", dtype, products)
            found["products"] = found.get("products", 0) + size * (products > 0)
            continue
        assert torch.equal(bits(got), bits(want)), ("capture", dtype)
        found[f"captures {str(dtype)[6:]}"] = found.get(f"captures {str(dtype)[6:]}", 0) + 1


def code(number: int, rows: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor:
    """What code of a number does at a point, and at positions."""
    return rows * 0.5 + number + point + torch.tensor(position, device=rows.device)[:, None]


RUNNER = SimpleNamespace(run_code=code)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits, NaNs all alike."""
    return torch.where(tensor.isnan(), float("nan"), tensor).contiguous().view(torch.uint8)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Rows [n, W] alike to within the rounding of their dtype, or to one part in 10⁴ where that is finer."""
    step = max(1e-4, 4 * torch.finfo(got.dtype).eps)
    gap, largest = (got.float() - want.float()).abs().amax(1), want.float().abs().amax(1)
    return bool((gap <= step * largest + 1e-5).all())


def moved(rng: np.random.Generator, device: str, found: dict[str, int]) -> None:
    """Words put in place from pinned memory: those asked for, and no others."""
    tables = torch.from_numpy(rng.integers(0, 1 << 30, 20_000).astype(np.int32))
    sizes = [int(size) for size in rng.choice([1, 7, 300, moves.CHUNK - 1, moves.CHUNK], int(rng.integers(1, 9)))]
    chunks, at = len(sizes), 3 * len(sizes)
    staging = torch.from_numpy(rng.integers(0, 1 << 30, at + sum(sizes)).astype(np.int32))
    want, there = tables.clone(), tables.to(device)
    for i, size in enumerate(sizes):
        to = i * 2000 + int(rng.integers(0, 900))
        staging[3 * i : 3 * i + 3] = torch.tensor([to, at, size])
        want[to : to + size] = staging[at : at + size]
        at += size
    staging = staging.pin_memory() if device == "cuda" else staging
    moves.upload(staging, there, chunks)
    assert torch.equal(there.cpu(), want), "words put in place"
    found["words put in place"] = found.get("words put in place", 0) + sum(sizes)


def attended(rng: np.random.Generator, device: str, found: dict[str, int]) -> None:
    """Attention scores from a paged cache, of groups of heads, with caps, windows and slopes."""
    dtype = (torch.float32, torch.bfloat16)[int(rng.integers(2))] if device == "cuda" else torch.float32
    keys, size, width, page = (int(rng.choice(each)) for each in ([1, 2, 4], [1, 3, 4], [16, 40, 64], [16, 32]))
    requests, queries, count = (int(rng.integers(1, most)) for most in (4, 25, 200))
    blocks, draw = -(-count // page), torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    cache = torch.randn(60, keys, page, 2 * width, generator=draw).to(device, dtype)
    table = torch.from_numpy(rng.integers(0, 60, (requests, blocks)).astype(np.int32)).to(device)
    query = torch.randn(requests, queries, keys * size, width, generator=draw).to(device, dtype)
    position = torch.from_numpy(rng.integers(0, count, (requests, queries))).to(device)
    first = int(rng.integers(keys * size))
    heads = int(rng.integers(1, keys * size - first + 1))
    slopes = torch.rand(keys * size, generator=draw).to(device) if rng.random() < 0.3 else None
    facts = AttentionFacts(width**-0.5, float(rng.choice([0, 2])), int(rng.choice([0, 30])), slopes)
    key = cache[..., :width]
    got = paged_scores(query, key, table, position, facts, first, heads, count)
    gathered = key[table.long()].transpose(2, 3).reshape(requests, blocks * page, keys, width)[:, :count]
    want = scores(query, gathered, position, facts, first, heads)
    assert torch.allclose(got, want, atol=1e-4, rtol=1e-4), (facts, got.shape)
    name = f"attention scores {str(dtype)[6:]}"
    found[name] = found.get(name, 0) + got.numel()


def removed(rng: np.random.Generator, device: str, found: dict[str, int]) -> None:
    """Attention outputs without some keys, of a batch of programs, beside the torch version."""
    dtype = (torch.float32, torch.bfloat16)[int(rng.integers(2))] if device == "cuda" else torch.float32
    keys, size, width, page = (int(rng.choice(each)) for each in ([1, 2, 4], [1, 3, 4], [16, 40, 64], [16, 32]))
    ratio, many, length = int(rng.integers(1, 3)), int(rng.integers(2, 5)), int(rng.integers(1, 200))
    draw, heads = torch.Generator().manual_seed(int(rng.integers(1 << 30))), keys * size
    cache = torch.randn(80, keys, page, 2 * width, generator=draw).to(device, dtype)
    block = torch.from_numpy(rng.integers(0, 80 // ratio, (many, -(-length // (page * ratio)))).astype(np.int32))
    slopes = torch.rand(heads, generator=draw).to(device) if rng.random() < 0.3 else None
    sinks = torch.randn(heads, generator=draw).to(device) if rng.random() < 0.3 else None
    facts = AttentionFacts(width**-0.5, float(rng.choice([0, 2])), int(rng.choice([0, 30])), slopes, sinks)
    table, edits = ProgramTable(many, POINTS, 300), [list[PatternEdit]() for _ in range(many)]
    for request in range(1, many):  # the first has no program
        ops = []
        for _ in range(int(rng.integers(1, 4))):
            (start, stop), (begin, end) = (np.sort(rng.choice(length + 1, 2, replace=False)).tolist() for _ in range(2))
            low, high = np.sort(rng.choice(heads + 1, 2, replace=False)).tolist()
            columns = pack_columns((low * width, high * width)) if (low, high) != (0, heads) else 0
            ranges = (PositionRange(start, stop),)
            ops.append(BoundOp("edits[0]", RemoveKeys(begin, end), (1,), (), ranges, columns=columns))
            edits[request].append(PatternEdit(low, high, np.array(ranges), np.array([[begin, end]]), None))
        records, counts = records_of_alike([ops], [{}], POINTS)
        table.install(records[0], counts[0], request, 50 * request)
    count = rng.integers(1, min(length, 5) + 1, many)
    position = [int(rng.integers(0, length - each + 1)) + np.arange(each) for each in count]
    rows = np.repeat(np.arange(many), count)
    query = torch.randn(len(rows), heads, width, generator=draw).to(device, dtype)
    bad, place = torch.zeros((2, many), dtype=torch.int64, pin_memory=device == "cuda")
    slot_of = rng.permutation(np.arange(many))  # of each request; slot 0 has no program
    tables: Any = SimpleNamespace(
        **{name: torch.from_numpy(np.ascontiguousarray(each)).to(device) for name, each in {
            "slot_of_row": slot_of[rows].astype(np.int32), "request_of_row": rows.astype(np.int32),
            "position_of_row": np.concatenate(position), "generation": table.generation,
            "first": table.first.reshape(-1), "records": table.records.view(np.int32)}.items()},
        bad_address=bad.data_ptr(), place_address=place.data_ptr(), points=POINTS,
    )  # fmt: skip
    blocks = (block.long()[..., None] * ratio + torch.arange(ratio)).flatten(1).to(device)
    key, value = cache.split(width, -1)
    key_BTKE, value_BTKE = (each[blocks].transpose(2, 3).flatten(1, 2)[:, :length] for each in (key, value))
    given, want, written, reasons = [], [], [], dict[int, set[int]]()
    for b, slot in enumerate(slot_of.tolist()):
        at, last = torch.from_numpy(position[b])[None].to(device), int(position[b][-1]) + 1
        plain = scores(query[rows == b][None], key_BTKE[b : b + 1, :last], at, facts, 0, heads)
        changed, touched = edited(plain, edges_of(position[b][None], [edits[slot]], 0, heads, plain.device), facts, 0)
        values = value_BTKE[b, :last].float().repeat_interleave(size, 1)
        of_all, of_kept = (
            torch.einsum("nht,the->nhe", each[0], values) for each in (pattern(plain, facts, 0), changed)
        )
        given.append(of_all.to(dtype))
        if rng.random() < 0.2:  # not what this attention gives
            given[-1] = given[-1] + 1
            reasons[slot] = {WRONG} if touched.any() else set()
        blind = of_kept.isnan().unflatten(1, (keys, size)).any(-1).any(-1).repeat_interleave(size, 1)
        if blind.any() and slot not in reasons:
            reasons[slot] = {BLIND}
        written.append((touched[0] & ~blind & (slot not in reasons or reasons[slot] == {BLIND}))[..., None])
        want.append(torch.where(written[-1], of_kept.to(dtype), given[-1]))
    used = [blocks[b][: -(-(int(each[-1]) + 1) // page)] for b, each in enumerate(position)]
    if facts.window:
        used = [each[max(int(at[0]) - facts.window + 1, 0) // page :] for each, at in zip(used, position, strict=True)]
    cache[~torch.isin(torch.arange(len(cache), device=device), torch.cat(used))] = torch.nan  # of other requests
    hidden, expected = torch.cat(given).flatten(1), torch.cat(want).flatten(1)
    before = hidden.clone()
    remove_keys(tables, 1, query, PagedCache(key, value, block.to(device), ratio, facts), hidden)
    assert torch.allclose(hidden, expected, atol=MAX_ERROR[dtype] / 10, rtol=MAX_ERROR[dtype] / 10), (
        facts,
        hidden.shape,
    )
    kept = ~torch.cat(written).expand(-1, -1, width).flatten(1)
    assert torch.equal(hidden[kept], before[kept]), "a row or head without removed keys, or one that fails, is changed"
    failures = {b: {int(bad[b]) >> 28 & 15} for b in range(many) if bad[b]}
    assert failures == {b: each for b, each in reasons.items() if each}, (failures, reasons)
    places = {b: (int(place[b]), position[slot_of.tolist().index(b)]) for b in failures}
    assert all(found_at in asked for found_at, asked in places.values()), places
    assert all(int(bad[b]) & (1 << 28) - 1 == 1 and int(bad[b]) >> 32 == table.generation[b] for b in failures)
    name = f"removed keys {str(dtype)[6:]}"
    found[name] = found.get(name, 0) + hidden.numel()


def check(device: str, rounds: int, seed: int | None = None) -> dict[str, int]:
    """Compares on so many random steps, some with rows wider than a program takes at once; counts what was compared."""
    seed = secrets.randbits(32) if seed is None else seed
    rng, beside, found, widest = np.random.default_rng(seed), np.random.default_rng(seed), {}, cuda.MAX_BLOCK
    i = 0
    try:
        for i in range(rounds):
            cuda.MAX_BLOCK = 64 if i % 2 else widest
            one_round(rng, device, found, i % 4 > 1)
            if i % 3 == 0:
                one_round(rng, device, found, sums=False, coded=True)
                removed(beside, device, found)  # compiled for each kind of attention
            moved(rng, device, found)
            attended(beside, device, found)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, round {i}: {error}") from error
    finally:
        cuda.MAX_BLOCK = widest
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    print(json.dumps(check(asked.device, asked.rounds, asked.seed)))
