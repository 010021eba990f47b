"""Attention scores of a few queries over keys in a paged cache, in Triton: `kernels.attention.scores` without copying
the keys.

B requests · N queries per request · T key positions · H query heads · K key/value heads · E head size · R blocks per
request · L rows of a tile: the queries of all heads that share a key/value head
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from patchclamp.kernels.attention import AttentionFacts

TILE_L, TILE_T = 16, 64


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
    found = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    if CAPPED:
        found = cap * (1 - 2 / (tl.exp(2 * found / cap) + 1))
    distance = at[None, :] - where[:, None]
    if SLOPED:
        found += tl.load(slopes + head, mask=is_row, other=0.0)[:, None] * distance
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
    kernel: Any = _score  # pyright would take numbers for constants of the kernel as errors
    kernel[grid](
        query_BNHE.to(key_RKNE.dtype).contiguous(), key_RKNE, block_BR.contiguous(), position_BN.contiguous(),
        found if slopes is None else slopes, found, queries, count, block_BR.shape[1], first, heads, facts.scale,
        facts.cap, facts.window, *key_RKNE.stride()[:3], H=all_heads, SIZE=size, E=width, PAGE=page,
        EXACT=key_RKNE.dtype == torch.float32, CAPPED=bool(facts.cap), SLOPED=slopes is not None,
        TILE_L=TILE_L, TILE_T=TILE_T, TILE_E=max(triton.next_power_of_2(width), 16),
    )  # fmt: skip
    return found
