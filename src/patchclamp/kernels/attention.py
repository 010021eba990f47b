"""Attention probabilities of a few queries, from rotated queries and cached keys, in PyTorch and fp32.

Fused kernels never form them. These are the same numbers, for the queries that somebody asks for.

    B requests · N queries of each · T key positions · H query heads · K key/value heads · E head size
    L queries of the heads that read one key/value head
"""

from __future__ import annotations

import msgspec
import torch


class AttentionFacts(msgspec.Struct, frozen=True):
    """The way in which one layer computes scores.

    scale: of the products of queries and keys
    cap: c in c · tanh(score / c); 0: no cap
    window: the number of the last keys that a query sees, with its own; 0: all
    slopes: ALiBi's, of each head
    sinks: a logit of each head beside its keys, which takes a part of the probability
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
    """The scores of heads first … first + heads − 1 over all keys, [B, N, H, T], −∞ where a query sees none.

    The keys are those of positions 0 … T − 1. Source: Vaswani et al. 2017 (arXiv:1706.03762); caps: Gemma 2
    (arXiv:2408.00118); ALiBi: Press et al. 2021 (arXiv:2108.12409).
    """
    size = query_BNHE.shape[2] // key_BTKE.shape[2]  # of the group of heads that read one key
    begin, end = first // size, (first + heads - 1) // size + 1  # of the keys
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
    """The products of queries and keys, in fp32."""
    is_half = key_BET.dtype != torch.float32
    return torch.bmm(query_BLE, key_BET, out_dtype=torch.float32) if is_half else query_BLE @ key_BET


def pattern(scores_BNHT: torch.Tensor, facts: AttentionFacts, first: int) -> torch.Tensor:
    """The probabilities of scores. With sinks, those of a row sum to less than 1.

    Source of sinks: Xiao et al. 2023 (arXiv:2309.17453), as gpt-oss has them.
    """
    if facts.sinks is None:
        return scores_BNHT.softmax(-1)
    sinks = facts.sinks[first : first + scores_BNHT.shape[2]].float()[:, None]
    sinks = sinks.expand(*scores_BNHT.shape[:-1], 1)
    return torch.cat([scores_BNHT, sinks], -1).softmax(-1)[..., :-1]
