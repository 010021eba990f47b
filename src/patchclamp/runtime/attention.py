"""The attention that programs read, computed at the end of a step from its queries and the engine's cached keys.

B requests · N queries of each · T key positions · H query heads · K key/value heads · E head size
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from patchclamp.kernels.attention import AttentionFacts, pattern, scores
from patchclamp.kernels.transfer import to_device
from patchclamp.plan.bound import AttentionReader

MAX_SCORES, MAX_KEYS = 1 << 26, 1 << 28  # scores, and numbers of keys, computed at a time


class Keys(Protocol):
    """An engine's cached keys. A slot is that of a request in the step."""

    def facts(self, point: int) -> AttentionFacts:
        """Return the way in which the layer of a point computes scores. Raises `UnsupportedSite` where they cannot be
        computed again."""
        ...

    def width(self, point: int) -> int:
        """The numbers of the keys of one position."""
        ...

    def read(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        """The keys of the first `count` positions of some requests, [B, T, K, E]; any numbers where a request has
        fewer."""
        ...


class Queries(NamedTuple):
    """The rows of a region: the point, and of each consecutive range its request's slot, its first position, and its
    number of rows."""

    point: int
    slot: np.ndarray
    begin: np.ndarray
    count: np.ndarray


class AttentionReading:
    """Reads whole rows of attention, or the `top` largest of each head.

    number: of this reading among those that programs use now
    """

    def __init__(self, number: int, reader: AttentionReader, top: int) -> None:
        self.number, self._reader, self.top = number, reader, top
        self.numbers: int = reader.heads * (2 * top or reader.keys)

    def read(self, rows_NW: torch.Tensor, of: Queries, keys: Keys, heads: int) -> torch.Tensor:
        """The attention of some rows of queries, [N, numbers]: each head's row; or each head's largest numbers and then
        their key positions, as the bits of int32."""
        query_NHE, facts = rows_NW.view(len(rows_NW), heads, -1), keys.facts(of.point)
        found = rows_NW.new_zeros((len(rows_NW), self.numbers), dtype=torch.float32)
        first = np.cumsum(of.count) - of.count
        for some, rows in self._batches(of, keys.width(of.point)):
            index = first[some, None] + rows
            position = of.begin[some, None] + rows
            key_BTKE = keys.read(of.point, of.slot[some].tolist(), int(position.max()) + 1)
            index_BN = to_device(index, rows_NW.device)
            found_BNHT = scores(query_NHE[index_BN], key_BTKE, to_device(position, rows_NW.device), facts,
                                self._reader.first, self._reader.heads)  # fmt: skip
            if self._reader.site == "pattern":
                found_BNHT = pattern(found_BNHT, facts, self._reader.first)
            found[index_BN] = self._kept(found_BNHT)
        return found

    def _batches(self, of: Queries, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ranges that are read together, and their rows: many requests with one row each, or rows of one."""
        batches = list[tuple[np.ndarray, np.ndarray]]()
        single = np.flatnonzero(of.count == 1)
        if len(single):
            longest = int(of.begin[single].max()) + 1
            most = max(min(MAX_SCORES // (longest * self._reader.heads), MAX_KEYS // (longest * width)), 1)
            parts = np.split(single[np.argsort(of.begin[single])], range(most, len(single), most))
            batches += [(part, np.zeros(1, np.int64)) for part in parts]
        for each in np.flatnonzero(of.count > 1).tolist():
            count = int(of.count[each])
            most = max(MAX_SCORES // (self._reader.heads * (int(of.begin[each]) + count)), 1)
            parts = np.split(np.arange(count), range(most, count, most))
            batches += [(np.array([each]), part) for part in parts]
        return batches

    def _kept(self, found_BNHT: torch.Tensor) -> torch.Tensor:
        """Return the numbers that are kept of each row, [B, N, numbers]."""
        shape, unseen = found_BNHT.shape[:2], 0.0 if self._reader.site == "pattern" else -torch.inf
        if not self.top:
            padded = torch.nn.functional.pad(found_BNHT, (0, self._reader.keys - found_BNHT.shape[-1]), value=unseen)
            return padded.reshape(*shape, -1)
        best = found_BNHT.topk(min(self.top, found_BNHT.shape[-1]))
        missing = (0, self.top - best.values.shape[-1])
        values = torch.nn.functional.pad(best.values, missing, value=unseen)
        ids = torch.nn.functional.pad(best.indices.int(), missing, value=-1)
        ids = torch.where(values > unseen, ids, -1)
        return torch.cat([values, ids.view(torch.float32)], -1).reshape(*shape, -1)
