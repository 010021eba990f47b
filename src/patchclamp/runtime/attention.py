"""Attention that programs read and edit, computed from a step's queries and the engine's cached keys and values.

Reads are computed at the end of a step. Edits act in a layer right after its attention: they replace the results of the
queries that they change with results computed from the edited pattern.

B requests · N queries each · T key positions · H query heads · K key/value heads · E head size · M edited queries
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from patchclamp.errors import TokensError, UnsupportedSite
from patchclamp.kernels.attention import AttentionFacts, PatternEdit, edited, pattern
from patchclamp.kernels.transfer import to_device
from patchclamp.plan.bound import AttentionReader

MAX_SCORES, MAX_KEYS = 1 << 26, 1 << 28  # scores, and elements of keys, computed at a time


class Keys(Protocol):
    """An engine's cached keys. Slots identify the step's requests."""

    def facts(self, point: int) -> AttentionFacts:
        """Return the score parameters of a point's layer. Raises `UnsupportedSite` if its scores cannot be
        recomputed."""
        ...

    def width(self, point: int) -> int:
        """Return the number of elements in one position's keys."""
        ...

    def scores(
        self, point: int, slots: list[int], query_BNHE: torch.Tensor, position_BN: torch.Tensor, first: int,
        heads: int, count: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return the scores of queries over their requests' first `count` positions (`kernels.attention.scores`)."""
        ...

    def values(self, point: int, slot: int, count: int) -> torch.Tensor:
        """Return the values of a request's first `count` positions, [T, K, E]; arbitrary where no query of the step
        sees them."""
        ...


class Queries(NamedTuple):
    """A region's rows: the point, and for each consecutive range the request's slot, first position and row count."""

    point: int
    slot: np.ndarray
    begin: np.ndarray
    count: np.ndarray


Edits = Mapping[tuple[int, int], Sequence[PatternEdit]]  # the programs' edits, by slot and point


class AttentionReading:
    """Reads whole attention rows, or each head's `top` largest values.

    number: the reading's index among the readings in use
    """

    def __init__(self, number: int, reader: AttentionReader, top: int) -> None:
        self.number, self._reader, self.top = number, reader, top
        self.numbers: int = reader.heads * (2 * top or reader.keys)

    def read(self, rows_NW: torch.Tensor, of: Queries, keys: Keys, heads: int, edits: Edits) -> torch.Tensor:
        """Return the attention rows of queries, [N, numbers]: each head's row, or its largest values and then their key
        positions, as int32 bits. Patterns include their program's edits."""
        query_NHE, facts = rows_NW.view(len(rows_NW), heads, -1), keys.facts(of.point)
        found = rows_NW.new_zeros((len(rows_NW), self.numbers), dtype=torch.float32)
        first = np.cumsum(of.count) - of.count
        for some, rows in self._batches(of, keys.width(of.point)):
            index = first[some, None] + rows
            position = of.begin[some, None] + rows
            index_BN, position_BN = to_device(index, rows_NW.device), to_device(position, rows_NW.device)
            found_BNHT = keys.scores(
                of.point, of.slot[some].tolist(), query_NHE[index_BN], position_BN, self._reader.first,
                self._reader.heads, int(position.max()) + 1,
            )  # fmt: skip
            if self._reader.site == "pattern":
                scores_BNHT, found_BNHT = found_BNHT, pattern(found_BNHT, facts, self._reader.first)
                for b, slot in enumerate(of.slot[some].tolist() if edits else ()):
                    if own := edits.get((slot, of.point)):
                        found_BNHT[b], _ = edited(scores_BNHT[b], position_BN[b], own, facts, self._reader.first)
            found[index_BN] = self._kept(found_BNHT)
        return found

    def _batches(self, of: Queries, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return batches of ranges and their rows: many requests with one row each, or one request's rows."""
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
        """Return the values to keep for each row, [B, N, numbers]."""
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


MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative, of recomputed results


class EditedAttention:
    """One request's attention edits in one layer, as code at two points: the first stores the queries, the second edits
    the attention result."""

    def __init__(self, point: int, slot: int, heads: int, edits: Sequence[PatternEdit], keys: Keys) -> None:
        self._point, self._slot, self._heads, self._edits, self._keys = point, slot, heads, edits, keys
        self._first, self._end = min(edit.first for edit in edits), max(edit.end for edit in edits)
        self._held: dict[int, torch.Tensor] = {}  # queries, by the first position of a range

    def hold(self, rows_NW: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hold queries until their attention is computed."""
        self._held[int(positions[0])] = rows_NW
        return rows_NW

    def change(self, rows_NZ: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention result, with edited rows recomputed from their pattern. Raises `TokensError` if a query
        sees no keys or not all keys of a new row, `UnsupportedSite` if pattern · values is not the engine's result."""
        first, count, heads = int(positions[0]), int(positions[-1]) + 1, self._end - self._first
        query_NHE = self._held.pop(first).view(len(rows_NZ), self._heads, -1)
        edited_M = torch.stack([edit.is_query(positions) for edit in self._edits]).any(0).nonzero()[:, 0]
        if not len(edited_M):
            return rows_NZ
        keys, new_NHE = self._keys, rows_NZ.clone().view(len(rows_NZ), self._heads, -1)
        facts, cached_TKE = keys.facts(self._point), keys.values(self._point, self._slot, count)
        group = self._heads // cached_TKE.shape[1]  # query heads per value head
        low, high = self._first // group, (self._end - 1) // group + 1
        value_TKE = cached_TKE[:, low:high].float()
        seen_from = max(first - facts.window + 1, 0) if facts.window else 0
        value_TKE[:seen_from] = 0  # in blocks that may have been freed
        value_THE = value_TKE.repeat_interleave(group, 1)[:, self._first - low * group :][:, :heads]
        for part in edited_M.split(max(MAX_SCORES // (heads * count), 1)):
            position, out_NHE = positions[part], new_NHE[part, self._first : self._end]
            [found_NHT] = keys.scores(
                self._point, [self._slot], query_NHE[part][None], position[None], self._first, heads, count
            )
            self._check(found_NHT[-1:], facts, value_THE, out_NHE[-1], cached_TKE.dtype)
            pattern_NHT, touched_NH = edited(found_NHT, position, self._edits, facts, self._first)
            blind_NH = pattern_NHT.isnan().any(2) & ~found_NHT.isnan().any(2)
            if bool((blind_N := blind_NH.any(1)).any()):
                raise TokensError(f"the token at position {int(position[blind_N][0])} sees no key, or not all keys")
            result_NHE = torch.einsum("nht,the->nhe", pattern_NHT, value_THE)
            new_NHE[part, self._first : self._end] = torch.where(touched_NH[..., None], result_NHE, out_NHE)
        return new_NHE.flatten(1)

    def _check(
        self, scores_1HT: torch.Tensor, facts: AttentionFacts, value_THE: torch.Tensor, engines_HE: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Check that a query's unedited pattern reproduces the engine's result."""
        result_HE = torch.einsum("ht,the->he", pattern(scores_1HT[None], facts, self._first)[0, 0], value_THE)
        error, size = float((result_HE - engines_HE).norm()), float(engines_HE.norm())  # 0 if a program zeroes v
        if math.isfinite(size) and not error <= MAX_ERROR[dtype] * size:
            raise UnsupportedSite(
                f"attention output does not equal pattern × values (error {error:.1g}, norm {size:.1g}): edit z instead"
            )
