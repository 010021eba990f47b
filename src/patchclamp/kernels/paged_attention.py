"""Attention over a paged cache, in Triton, without copying the keys: scores of a few queries
(`kernels.attention.scores`), and attention outputs with some keys removed (`kernels.attention.edited`).

B requests · N queries per request · T key positions · H query heads · K key/value heads · E head size · R blocks per
request · L rows of a tile: the queries of all heads that share a key/value head
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from patchclamp import plan
from patchclamp.kernels.attention import MAX_ERROR, AttentionFacts
from patchclamp.kernels.cuda import COLUMNS, WORDS

TILE_L, TILE_T = 16, 64
REMOVE = tl.constexpr(plan.REMOVE)
WRONG, BLIND = 1, 2  # reasons for a failure besides a non-finite result, in bits 28 and 29 of its low word


@triton.jit
def _score_tile(q, k, distance, slopes, head, is_row, scale, cap, EXACT: tl.constexpr, CAPPED: tl.constexpr,
                SLOPED: tl.constexpr):  # fmt: skip
    """Return the unmasked scores of a tile of queries and keys."""
    found = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    if CAPPED:
        found = cap * (1 - 2 / (tl.exp(2 * found / cap) + 1))
    if SLOPED:
        found += tl.load(slopes + head, mask=is_row, other=0.0)[:, None] * distance
    return found


@triton.jit
def _score(
    query, key, block, position, slopes, out, N, T, R, first, heads, scale, cap, window, key_R, key_K, key_N,
    H: tl.constexpr, SIZE: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, EXACT: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, TILE_L: tl.constexpr, TILE_T: tl.constexpr, TILE_E: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N * SIZE, TILE_L)
    request, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group = first // SIZE + tl.program_id(1)
    row = tile * TILE_L + tl.arange(0, TILE_L)
    n, head = row // SIZE, group * SIZE + row % SIZE
    at = tl.program_id(2) * TILE_T + tl.arange(0, TILE_T)
    e = tl.arange(0, TILE_E)
    is_row = (n < N) & (head >= first) & (head < first + heads)
    where = tl.load(position + request * N + n, mask=n < N, other=-1)
    begin = tl.program_id(2) * TILE_T
    place = ((request * N + n).to(tl.int64) * heads + head - first) * T
    target, is_target = out + place[:, None] + at[None, :], is_row[:, None] & (at < T)[None, :]
    if begin > tl.max(where, 0):
        tl.store(target, tl.full([TILE_L, TILE_T], float("-inf"), tl.float32), mask=is_target)
        return
    rows = (request * N + n).to(tl.int64) * H + head
    q = tl.load(query + rows[:, None] * E + e[None, :], mask=is_row[:, None] & (e < E)[None, :], other=0.0)
    is_key = at <= tl.max(where, 0)
    page = tl.load(block + request * R + at // PAGE, mask=is_key, other=0).to(tl.int64)
    source = key + page * key_R + group * key_K + (at % PAGE) * key_N
    k = tl.load(source[:, None] + e[None, :], mask=is_key[:, None] & (e < E)[None, :], other=0.0)
    distance = at[None, :] - where[:, None]
    found = _score_tile(q, k, distance, slopes, head, is_row, scale, cap, EXACT, CAPPED, SLOPED)
    sees = (distance <= 0) & ((window == 0) | (distance > -window))
    tl.store(target, tl.where(sees, found, float("-inf")), mask=is_target)


def paged_scores(
    query_BNHE: torch.Tensor, key_RKNE: torch.Tensor, block_BR: torch.Tensor, position_BN: torch.Tensor,
    facts: AttentionFacts, first: int, heads: int, count: int,
) -> torch.Tensor:  # fmt: skip
    """Return the scores of heads first … first + heads − 1 over the keys at positions 0 … count − 1, [B, N, H, T].

    key_RKNE: the cache's keys, in blocks of N positions; any strides, but the last dimension must be contiguous
    block_BR: each request's block table
    """
    requests, queries, all_heads, width = query_BNHE.shape
    size, page = all_heads // key_RKNE.shape[1], key_RKNE.shape[2]
    groups = (first + heads - 1) // size + 1 - first // size
    found = torch.empty((requests, queries, heads, count), dtype=torch.float32, device=query_BNHE.device)
    slopes = facts.slopes if facts.slopes is None else facts.slopes.float().contiguous()
    grid = (requests * triton.cdiv(queries * size, TILE_L), groups, triton.cdiv(count, TILE_T))
    kernel: Any = _score  # pyright would reject numbers passed as the kernel's constexpr parameters
    kernel[grid](
        query_BNHE.to(key_RKNE.dtype).contiguous(), key_RKNE, block_BR.contiguous(), position_BN.contiguous(),
        found if slopes is None else slopes, found, queries, count, block_BR.shape[1], first, heads, facts.scale,
        facts.cap, facts.window, *key_RKNE.stride()[:3], H=all_heads, SIZE=size, E=width, PAGE=page,
        EXACT=key_RKNE.dtype == torch.float32, CAPPED=bool(facts.cap), SLOPED=slopes is not None,
        TILE_L=TILE_L, TILE_T=TILE_T, TILE_E=max(triton.next_power_of_2(width), 16),
    )  # fmt: skip
    return found


@triton.jit
def _softmax_step(scores, v, highest, total, sum, EXACT: tl.constexpr):
    """Add a tile to an online softmax: each row's highest score, the sum of its exponentials, and their products with
    the values."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    decay, p = tl.exp(highest - base), tl.exp(scores - base[:, None])
    high = p.to(v.dtype)
    if EXACT:
        product = tl.dot(p, v, input_precision="tf32x3")
    else:  # tensor cores multiply 16-bit numbers; splitting probabilities into two parts keeps more of their bits
        product = tl.dot(high, v) + tl.dot((p - high.to(tl.float32)).to(v.dtype), v)
    return higher, total * decay + tl.sum(p, 1), sum * decay[:, None] + product


@triton.jit
def _removes(record, position):
    """True if a record removes keys of the query at a position."""
    return (tl.load(record + 2) == REMOVE) & (position >= tl.load(record)) & (position < tl.load(record + 1))


@triton.jit(do_not_specialize=["point", "points", "bad", "place"])
def _remove_keys(
    slot_of_row, request_of_row, position_of_row, generation, first, records, bad, place, points, point,
    query, key, value, block, slopes, sinks, hidden, query_row, hidden_row, block_row, ratio, scale, cap, window,
    max_error, key_R, key_K, key_N, value_R, value_K, value_N,
    SIZE: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, EXACT: tl.constexpr, CAPPED: tl.constexpr,
    SLOPED: tl.constexpr, SINKS: tl.constexpr, TILE_L: tl.constexpr, TILE_T: tl.constexpr, TILE_E: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_of_row + row)
    begin = tl.load(first + slot * (points + 1) + point)  # slot 0 has no records
    end = tl.load(first + slot * (points + 1) + point + 1)
    position, acts = tl.load(position_of_row + row).to(tl.int32), 0
    for number in range(begin, end):
        acts += _removes(records + number * WORDS, position).to(tl.int32)
    if acts == 0:
        return
    e, n = tl.arange(0, TILE_E), tl.arange(0, TILE_L)
    head, is_head, is_column = group * SIZE + n, n < SIZE, e < E
    element = head[:, None] * E + e[None, :]
    q = tl.load(query + row * query_row + element, mask=is_head[:, None] & is_column[None, :], other=0.0)
    highest, total = tl.full([TILE_L], float("-inf"), tl.float32), tl.zeros([TILE_L], tl.float32)
    if SINKS:
        highest = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        total += 1.0
    kept_highest, kept_total = highest, total
    sum, kept_sum = tl.zeros([TILE_L, TILE_E], tl.float32), tl.zeros([TILE_L, TILE_E], tl.float32)
    removes, keeps = tl.zeros([TILE_L], tl.int32), tl.zeros([TILE_L], tl.int32)
    table = block + tl.load(request_of_row + row).to(tl.int64) * block_row
    earliest = tl.where(window == 0, 0, tl.maximum(position - window + 1, 0))  # earlier blocks may be freed
    for tile in range(earliest // TILE_T, position // TILE_T + 1):
        at = tile * TILE_T + tl.arange(0, TILE_T)
        sees = (at >= earliest) & (at <= position)
        page = tl.load(table + at // (PAGE * ratio), mask=sees, other=0).to(tl.int64)
        page, offset = page * ratio + at // PAGE % ratio, at % PAGE
        loads = sees[:, None] & is_column[None, :]
        k = tl.load((key + page * key_R + group * key_K + offset * key_N)[:, None] + e[None, :], mask=loads, other=0.0)
        v = tl.load((value + page * value_R + group * value_K + offset * value_N)[:, None] + e[None, :], mask=loads,
                    other=0.0)  # fmt: skip
        found = _score_tile(q, k, (at - position)[None, :], slopes, head, is_head, scale, cap, EXACT, CAPPED, SLOPED)
        found = tl.where(sees[None, :], found, float("-inf"))
        removed = tl.zeros([TILE_L, TILE_T], tl.int32)
        for number in range(begin, end):
            record = records + number * WORDS
            if _removes(record, position):
                word = tl.load(record + COLUMNS)
                low, high = word & 0xFFFF, tl.where(word == 0, 0x7FFFFFFF, (word >> 16) & 0xFFFF)
                is_edited = (head * E >= low) & (head * E < high) & is_head
                is_removed = (at >= tl.load(record + 3)) & (at < tl.load(record + 4)) & sees
                removed |= (is_edited[:, None] & is_removed[None, :]).to(tl.int32)
        kept = tl.where(removed != 0, float("-inf"), found)
        removes, keeps = removes | tl.max(removed, 1), keeps | tl.max((kept > float("-inf")).to(tl.int32), 1)
        highest, total, sum = _softmax_step(found, v, highest, total, sum, EXACT)
        kept_highest, kept_total, kept_sum = _softmax_step(kept, v, kept_highest, kept_total, kept_sum, EXACT)
    is_edited = removes != 0
    target, is_target = hidden + row * hidden_row + element, is_edited[:, None] & is_column[None, :]
    old = tl.load(target, mask=is_target, other=0.0).to(tl.float32)
    error = tl.where(is_target, sum / total[:, None] - old, 0.0)
    size, error = tl.sqrt(tl.sum(tl.sum(old * old, 1), 0)), tl.sqrt(tl.sum(tl.sum(error * error, 1), 0))
    new = (kept_sum / kept_total[:, None]).to(hidden.dtype.element_ty)
    is_finite = tl.abs(new.to(tl.float32)) < float("inf")
    finite = tl.min(tl.min(tl.where(is_target, is_finite.to(tl.int32), 1), 1), 0)
    wrong = (size < float("inf")) & ((error <= max_error * size) == 0)  # also if the error is NaN
    blind = tl.max(removes & (1 - keeps), 0) != 0
    if (finite == 0) | wrong | blind:
        reason = tl.where(wrong, 1, tl.where(blind, 2, 0))
        tl.store((place + slot.to(tl.int64) * 8).to(tl.pointer_type(tl.int64)), position.to(tl.int64))
        failed = (tl.load(generation + slot).to(tl.int64) << 32) | (reason.to(tl.int64) << 28) | point
        tl.store((bad + slot.to(tl.int64) * 8).to(tl.pointer_type(tl.int64)), failed)
    else:
        tl.store(target, new, mask=is_target)


class PagedCache(NamedTuple):
    """One layer's cache.

    key_RKNE, value_RKNE: in blocks of N positions; any strides, but the last dimension must be contiguous
    block_BR: each request's block table; each of its blocks is `ratio` blocks of the cache
    """

    key_RKNE: torch.Tensor
    value_RKNE: torch.Tensor
    block_BR: torch.Tensor
    ratio: int
    facts: AttentionFacts


def remove_keys(tables: Any, point: int, query_RHE: torch.Tensor, cache: PagedCache, hidden_RW: torch.Tensor) -> None:
    """Launch the kernel that applies the `REMOVE` records at a point over `tables` (`runtime.cuda_step.CudaTables`):
    recomputes the rows' attention outputs without the removed keys.

    Heads that share keys are left unchanged, and reported as a failure, if their recomputed outputs with all keys
    differ from the engine's, if no key is left, or if a result is not finite.
    """
    key, value, facts = cache.key_RKNE, cache.value_RKNE, cache.facts
    heads, width = query_RHE.shape[1:]
    size = heads // key.shape[1]
    slopes, sinks = (query_RHE if each is None else each for each in (facts.slopes, facts.sinks))
    kernel: Any = _remove_keys  # pyright would reject numbers passed as the kernel's constexpr parameters
    kernel[len(hidden_RW), key.shape[1]](
        tables.slot_of_row, tables.request_of_row, tables.position_of_row, tables.generation, tables.first,
        tables.records, tables.bad_address, tables.place_address, tables.points, point, query_RHE, key, value,
        cache.block_BR, slopes, sinks, hidden_RW, query_RHE.stride(0), hidden_RW.stride(0), cache.block_BR.stride(0),
        cache.ratio, facts.scale, facts.cap, facts.window, MAX_ERROR[key.dtype], *key.stride()[:3],
        *value.stride()[:3], SIZE=size, E=width, PAGE=key.shape[2], EXACT=key.dtype == torch.float32,
        CAPPED=bool(facts.cap), SLOPED=facts.slopes is not None, SINKS=facts.sinks is not None,
        TILE_L=max(triton.next_power_of_2(size), TILE_L),
        TILE_T=TILE_T if key.element_size() == 2 else TILE_T // 2, TILE_E=max(triton.next_power_of_2(width), 16),
        num_warps=8, num_stages=2 if width <= 128 else 1,
    )  # fmt: skip
