"""Attention probabilities of a few queries (after rotary embedding) over cached keys, in PyTorch and fp32.

Fused kernels never materialize these probabilities; this module computes them for the requested queries.

    B requests · N queries per request · T key positions · H query heads · K key/value heads · E head size
    L queries of all heads that share a key/value head
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from patchclamp.kernels.transfer import to_device

MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative, of recomputed outputs


class AttentionFacts(msgspec.Struct, frozen=True):
    """Parameters of one layer's attention scores.

    scale: multiplies query-key products
    cap: c in the soft cap c · tanh(score / c); 0: no cap
    window: the number of most recent keys visible to a query, including its own; 0: all
    slopes: each head's ALiBi slope
    sinks: an extra logit per head, which absorbs part of the probability
    """

    scale: float
    cap: float = 0.0
    window: int = 0
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def scores(
    query_BNHE: torch.Tensor, key_BTKE: torch.Tensor, position_BN: torch.Tensor, facts: AttentionFacts,
    first: int, heads: int,
) -> torch.Tensor:  # fmt: skip
    """Return the scores of heads first … first + heads − 1 over all keys, [B, N, H, T]; −∞ for masked keys.

    The keys are at positions 0 … T − 1. Source: Vaswani et al. 2017 (arXiv:1706.03762); caps: Gemma 2
    (arXiv:2408.00118); ALiBi: Press et al. 2021 (arXiv:2108.12409).
    """
    size = query_BNHE.shape[2] // key_BTKE.shape[2]  # query heads per key/value head
    begin, end = first // size, (first + heads - 1) // size + 1  # key/value heads
    exact = key_BTKE.dtype if key_BTKE.is_cuda else torch.float32  # a GPU sums products of the cache's dtype in fp32
    groups = query_BNHE[:, :, begin * size : end * size].to(exact).unflatten(2, (end - begin, size))
    query_KBLE, key_KBET = groups.permute(2, 0, 1, 3, 4).flatten(2, 3), key_BTKE[:, :, begin:end].permute(2, 0, 3, 1)
    product = torch.stack([_product(query, key.to(exact)) for query, key in zip(query_KBLE, key_KBET, strict=True)])
    found = product.unflatten(2, (-1, size)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    found = found[:, :, first - begin * size :][:, :, :heads] * facts.scale
    if facts.cap:
        found = facts.cap * (found / facts.cap).tanh()
    distance_BNT = torch.arange(key_BTKE.shape[1], device=found.device) - position_BN[..., None]
    if facts.slopes is not None:
        found = found + facts.slopes[first : first + heads].float()[:, None] * distance_BNT[:, :, None]
    sees_BNT = distance_BNT <= 0
    if facts.window:
        sees_BNT &= distance_BNT > -facts.window
    return found.masked_fill(~sees_BNT[:, :, None], -torch.inf)


def _product(query_BLE: torch.Tensor, key_BET: torch.Tensor) -> torch.Tensor:
    """Return query-key products, in fp32."""
    is_half = key_BET.dtype != torch.float32
    return torch.bmm(query_BLE, key_BET, out_dtype=torch.float32) if is_half else query_BLE @ key_BET


def pattern(scores_BNHT: torch.Tensor, facts: AttentionFacts, first: int) -> torch.Tensor:
    """Return the softmax of scores. With sinks, a row sums to less than 1.

    Source of sinks: Xiao et al. 2023 (arXiv:2309.17453), in the form used by gpt-oss.
    """
    if facts.sinks is None:
        return scores_BNHT.softmax(-1)
    sinks = facts.sinks[first : first + scores_BNHT.shape[2]].float()[:, None]
    sinks = sinks.expand(*scores_BNHT.shape[:-1], 1)
    return torch.cat([scores_BNHT, sinks], -1).softmax(-1)[..., :-1]


class PatternEdit(msgspec.Struct, frozen=True):
    """An edit of the attention patterns in heads first … end − 1.

    queries: ascending position ranges, [R, 4]: begin, end, first index into `rows`, and its step per position
    keys: ascending position ranges, [R, 2]; None: all
    factor: as in `plan.bound.Attended`
    rows: new probabilities [n, K], or None
    path: the op's path in its program
    """

    first: int
    end: int
    queries: np.ndarray
    keys: np.ndarray | None
    factor: float | None
    rows: torch.Tensor | None = None
    path: str = ""

    def of_heads(self, first: int, heads: int) -> tuple[int, int]:
        """Return the bounds of the edited heads among the `heads` heads starting at `first`, relative to `first`."""
        begin = max(self.first - first, 0)
        return begin, max(min(self.end - first, heads), begin)

    def is_query(self, position_N: np.ndarray) -> np.ndarray:
        """Return a mask of the edited queries, [N]."""
        return _within(position_N, self.queries)[0]

    def is_key(self, length: int) -> np.ndarray:
        """Return a mask of the edited keys, [T]."""
        return np.ones(length, bool) if self.keys is None else _within(np.arange(length), self.keys)[0]

    def row_of(self, position_N: np.ndarray) -> np.ndarray:
        """Return each query's index into `rows`, [N]; 0 for queries that are not edited."""
        is_query_N, range_N = _within(position_N, self.queries)
        begin_N, _, row_N, step_N = self.queries[range_N].T
        return np.where(is_query_N, row_N + (position_N - begin_N) * step_N, 0)


def _within(position_N: np.ndarray, ranges_RX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of the positions inside ascending ranges, and the index of each position's range; both [N]."""
    range_N = np.maximum(np.searchsorted(ranges_RX[:, 0], position_N, side="right") - 1, 0)
    begin_N, end_N = ranges_RX[range_N, 0], ranges_RX[range_N, 1]
    return (begin_N <= position_N) & (position_N < end_N), range_N


class Edges(NamedTuple):
    """The queries, heads and keys that B requests' edits act on, as masks on the device.

    removed: entry i masks the i-th knockout of every request: queries [B, N], heads [B, H] and keys [B, T]
    others: for each edit that is not a knockout: request, edit, head bounds, masks of queries [N] and keys [T], and
        each query's index into the edit's `rows` [N]
    heads_BH: a mask of the heads that each request edits
    """

    removed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    others: list[tuple[int, PatternEdit, tuple[int, int], torch.Tensor, torch.Tensor, torch.Tensor]]
    heads_BH: torch.Tensor


def edges_of(
    position_BN: np.ndarray, edits_B: Sequence[Sequence[PatternEdit]], first: int, heads: int, device: torch.device
) -> Edges:
    """Return the edges that edits act on, among the queries at these positions, the `heads` heads starting at `first`,
    and the keys up to the last query."""
    count, length = len(position_BN), int(position_BN.max()) + 1
    knockouts = [[edit for edit in edits if edit.factor is None] for edits in edits_B]
    removed = []
    for x in range(max(map(len, knockouts))):
        masks = np.zeros(position_BN.shape, bool), np.zeros((count, heads), bool), np.zeros((count, length), bool)
        for b, edits in enumerate(knockouts):
            if x < len(edits):
                begin, end = edits[x].of_heads(first, heads)
                masks[0][b], masks[1][b, begin:end], masks[2][b] = (
                    edits[x].is_query(position_BN[b]), True, edits[x].is_key(length)
                )  # fmt: skip
        removed.append(tuple(to_device(mask, device) for mask in masks))
    others, heads_BH = [], np.zeros((count, heads), bool)
    for b, edits in enumerate(edits_B):
        for edit in edits:
            begin, end = edit.of_heads(first, heads)
            heads_BH[b, begin:end] = True
            if edit.factor is not None:
                of = edit.is_query(position_BN[b]), edit.is_key(length), edit.row_of(position_BN[b])
                others.append((b, edit, (begin, end), *(to_device(each, device) for each in of)))
    return Edges(removed, others, to_device(heads_BH, device))


def edited(
    scores_BNHT: torch.Tensor, edges: Edges, facts: AttentionFacts, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply each request's edits to its pattern. Returns the patterns [B, N, H, T] and a mask of the changed rows
    [B, N, H].

    Keys are removed first, before the softmax; other edits follow in order. Rows without remaining keys are NaN, as
    are new nonzero probabilities of masked keys.
    """
    sees_BNHT, removed_BNHT = scores_BNHT > -torch.inf, torch.zeros_like(scores_BNHT, dtype=torch.bool)
    for query_BN, head_BH, key_BT in edges.removed:
        removed_BNHT |= query_BN[:, :, None, None] & head_BH[:, None, :, None] & key_BT[:, None, None]
    removed_BNHT &= sees_BNHT
    touched_BNH = removed_BNHT.any(-1)
    found_BNHT = pattern(scores_BNHT.masked_fill(removed_BNHT, -torch.inf), facts, first)
    blind_BNH = touched_BNH & (removed_BNHT == sees_BNHT).all(-1)
    found_BNHT = found_BNHT.masked_fill(blind_BNH[..., None], torch.nan)
    for b, edit, (begin, end), query_N, key_T, row_N in edges.others:
        assert edit.factor is not None
        sees_NHT, old_NHT = sees_BNHT[b, :, begin:end], found_BNHT[b, :, begin:end]
        where_NHT = (query_N[:, None, None] & key_T).expand_as(old_NHT)
        if edit.rows is None:
            where_NHT, new_NHT = where_NHT & sees_NHT, edit.factor * old_NHT
        else:
            row_N1T = torch.nn.functional.pad(edit.rows[row_N], (0, len(key_T) - edit.rows.shape[1]))[:, None]
            new_NHT = edit.factor * row_N1T.masked_fill(~sees_NHT & (row_N1T != 0), torch.nan)
            if edit.factor != 1.0:
                new_NHT = new_NHT + (1 - edit.factor) * old_NHT
        found_BNHT[b, :, begin:end] = torch.where(where_NHT, new_NHT, old_NHT)
        touched_BNH[b, :, begin:end] |= where_NHT.any(-1)
    return found_BNHT, touched_BNH
