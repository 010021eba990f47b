"""Attention that programs read and edit, computed from a step's queries and the engine's cached keys and values.

Reads are computed at the end of a step. Edits act in a layer right after its attention, for all requests at once: they
recompute the outputs of the affected queries from the edited pattern.

B requests · N queries each · T key positions · H query heads · K key/value heads · G query heads per key/value head
E head size · M rows of all requests
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from patchclamp.errors import PatchclampError, TokensError, UnsupportedSite, as_patchclamp_error
from patchclamp.kernels.attention import MAX_ERROR, AttentionFacts, Edges, PatternEdit, edges_of, edited, pattern
from patchclamp.kernels.transfer import to_device
from patchclamp.plan.bound import AttentionReader

MAX_SCORES, MAX_KEYS = 1 << 26, 1 << 28  # scores, and elements of keys, computed at a time


class Keys(Protocol):
    """An engine's cached keys and values. Slots identify the step's requests."""

    def facts(self, point: int) -> AttentionFacts:
        """Return the parameters of a layer's scores, by query point. Raises `UnsupportedSite` if the scores cannot be
        recomputed."""
        ...

    def width(self, point: int) -> int:
        """Return the number of elements in one position's keys, K × E."""
        ...

    def scores(
        self, point: int, slots: list[int], query_BNHE: torch.Tensor, position_BN: torch.Tensor, first: int,
        heads: int, count: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return the scores of queries against their requests' first `count` keys (`kernels.attention.scores`)."""
        ...

    def values(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        """Return the values of the requests' first `count` positions, [B, T, K, E]; positions that no query of the step
        attends to have arbitrary values."""
        ...


class Queries(NamedTuple):
    """Query rows of one capture region. slot, begin, count: each range's request slot, first position and length."""

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
        """Return the attention rows of queries, [N, numbers]. Each head has its full row, or its largest values
        followed by their key positions (int32 bits). Patterns include the program's own edits."""
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
                own = [edits.get((slot, of.point), ()) for slot in of.slot[some].tolist()] if edits else []
                if any(own):
                    edges = edges_of(position, own, self._reader.first, self._reader.heads, rows_NW.device)
                    found_BNHT, _ = edited(found_BNHT, edges, facts, self._reader.first)
                else:
                    found_BNHT = pattern(found_BNHT, facts, self._reader.first)
            found[index_BN] = self._kept(found_BNHT)
        return found

    def _batches(self, of: Queries, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return batches as (ranges, row offsets within each): many one-row ranges, or rows of one longer range."""
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


class EditedAttention(NamedTuple):
    """One request's attention edits in one layer. `point`: the layer's query point."""

    run: str
    point: int
    slot: int
    edits: Sequence[PatternEdit]

    @property
    def path(self) -> str:
        """The path of the first edit."""
        return self.edits[0].path


class _Batch(NamedTuple):
    """Requests with the same number of edited queries. `which`: the requests' indices in a layer's call.

    rows_BN, position_BN: the queries' row indices and positions, on the host
    index_BN, end_BN: the same on the device
    begin_B: each request's first position in this step
    first, heads: the heads to compute
    """

    which: list[int]
    rows_BN: np.ndarray
    position_BN: np.ndarray
    index_BN: torch.Tensor
    end_BN: torch.Tensor
    begin_B: torch.Tensor
    first: int
    heads: int
    edges: Edges


class _Checked(NamedTuple):
    """Checks of a batch. finite_BN, blind_BN: masks of queries with finite results, and of queries that see too few
    keys. size_B, error_B: the norms of the engine's output and of its recomputation error, at each last query."""

    edited: list[EditedAttention]
    position_BN: np.ndarray
    finite_BN: torch.Tensor
    blind_BN: torch.Tensor
    size_B: torch.Tensor
    error_B: torch.Tensor
    max_error: float


class AttentionEdits:
    """Edits the attention of a step, one layer at a time: stores a layer's queries, and edits its attention outputs
    once they are computed. Only `failures` waits for the device."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._queries: dict[int, torch.Tensor] = {}  # [M, H, E], by point
        self._batches: dict[Any, list[_Batch]] = {}  # shared by layers with the same edits
        self._checked: list[_Checked] = []
        self._failed: list[tuple[EditedAttention, PatchclampError]] = []

    def store_queries(self, point: int, query_MHE: torch.Tensor) -> None:
        """Store the queries of the requests with edits in a layer."""
        self._queries[point] = query_MHE

    def change(
        self, edited: Sequence[EditedAttention], rows_MZ: torch.Tensor, position_M: np.ndarray, count_B: np.ndarray,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Return a layer's attention outputs, with edited rows recomputed from the edited pattern. Rows that fail a
        check keep the engine's output.

        position_M, count_B: the positions of all rows, and the number of rows per request
        dtype: the type in which outputs must be finite
        """
        try:
            query_MHE = self._queries.pop(edited[0].point)
            new_MHE, width = rows_MZ.clone().view(*query_MHE.shape[:2], -1), self._keys.width(edited[0].point)
            call = _Call([each.edits for each in edited], position_M, count_B, query_MHE[0].numel() // width)
            key = position_M.tobytes(), count_B.tobytes(), call.group, *map(id, itertools.chain(*call.edits_B))
            key = *key, *map(len, call.edits_B)
            if key not in self._batches:
                self._batches[key] = [*_batches(call, query_MHE.shape[1], width, rows_MZ.device)]
        except Exception as error:
            self._failed += [(each, as_patchclamp_error(error).under(each.path)) for each in edited]
            return rows_MZ
        for batch in self._batches[key]:
            if self._error(edited, batch, query_MHE, new_MHE, dtype) is None:
                continue
            for b, rows_N in zip(batch.which, batch.rows_BN, strict=True):  # find the requests at fault
                alone = _batch(call, [b], rows_N[None], rows_MZ.device)
                if (error := self._error(edited, alone, query_MHE, new_MHE, dtype)) is not None:
                    self._failed.append((edited[b], as_patchclamp_error(error).under(edited[b].path)))
        return new_MHE.flatten(1)

    def _error(self, *arguments: Any) -> Exception | None:
        """Change a batch; return the error if it fails, without its traceback, which would keep tensors alive."""
        try:
            self._change(*arguments)
        except Exception as error:
            return error.with_traceback(None)
        return None

    def _change(
        self, edited_by: Sequence[EditedAttention], batch: _Batch, query_MHE: torch.Tensor, new_MHE: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Change a batch's rows of `new_MHE`."""
        edited_B = [edited_by[b] for b in batch.which]
        point, slots = edited_B[0].point, [each.slot for each in edited_B]
        facts, count = self._keys.facts(point), int(batch.position_BN.max()) + 1
        first, heads, group = batch.first, batch.heads, query_MHE[0].numel() // self._keys.width(point)
        cached_BTKE = self._keys.values(point, slots, count)
        at_T = torch.arange(count, device=new_MHE.device)
        seen_BT = at_T <= batch.end_BN[:, -1:]
        if facts.window:
            seen_BT &= at_T > batch.begin_B[:, None] - facts.window  # earlier blocks may be freed
        part_BTKE = cached_BTKE[:, :, first // group : (first + heads) // group]
        value_BTKE = part_BTKE.float().masked_fill(~seen_BT[..., None, None], 0)
        query_BNHE = query_MHE[batch.index_BN]
        found_BNHT = self._keys.scores(point, slots, query_BNHE, batch.end_BN, first, heads, count)
        pattern_BNHT, touched_BNH = edited(found_BNHT, batch.edges, facts, first)
        old_BNHE = new_MHE[batch.index_BN][:, :, first : first + heads]
        result_BNHE = _results(pattern_BNHT, value_BTKE)
        exact_BHE = _results(pattern(found_BNHT[:, -1:], facts, first), value_BTKE)[:, 0]
        edited_BHE = old_BNHE[:, -1].masked_fill(~batch.edges.heads_BH[..., None], 0)
        exact_BHE = exact_BHE.masked_fill(~batch.edges.heads_BH[..., None], 0)
        size_B, error_B = edited_BHE.flatten(1).norm(dim=1), (exact_BHE - edited_BHE).flatten(1).norm(dim=1)
        max_error = MAX_ERROR[cached_BTKE.dtype]
        blind_BN = (pattern_BNHT.isnan().any(-1) & ~found_BNHT.isnan().any(-1)).any(-1)
        finite_BN = torch.where(touched_BNH[..., None], result_BNHE, 0).to(dtype).isfinite().flatten(2).all(-1)
        good_BN = finite_BN & (~size_B.isfinite() | (error_B <= max_error * size_B))[:, None]
        changed_BNHE = torch.where(touched_BNH[..., None] & good_BN[..., None, None], result_BNHE, old_BNHE)
        new_MHE[:, first : first + heads].index_copy_(0, batch.index_BN.flatten(), changed_BNHE.flatten(0, 1))
        self._checked.append(_Checked(edited_B, batch.position_BN, finite_BN, blind_BN, size_B, error_B, max_error))

    def failures(self) -> Iterator[tuple[EditedAttention, PatchclampError | None]]:
        """End the step: wait for its checks, and yield each edit that failed, with its error. `TokensError`: a query
        sees no key, or not all keys of its replacement row. `UnsupportedSite`: pattern × values differs from the
        engine's output. None: an output is not finite."""
        yield from self._failed
        checked, self._checked, self._failed = self._checked, [], []
        self._queries.clear()
        self._batches.clear()
        found = [torch.cat([each.finite_BN, each.blind_BN, each.size_B[:, None], each.error_B[:, None]], 1).flatten()
                 for each in checked]  # fmt: skip
        numbers = torch.cat(found).cpu().numpy() if found else np.zeros(0)
        for each in checked:
            count = each.position_BN.shape[1]
            rows = numbers[: len(each.edited) * (2 * count + 2)].reshape(len(each.edited), -1)
            numbers = numbers[rows.size :]
            for one, position_N, row in zip(each.edited, each.position_BN, rows, strict=True):
                finite_N, blind_N, (size, error) = row[:count] > 0, row[count : 2 * count] > 0, row[-2:]
                if math.isfinite(size) and not error <= each.max_error * size:  # both are 0 if v is zeroed
                    gap = f"error {error:.1g}, norm {size:.1g}"
                    yield (
                        one,
                        UnsupportedSite(f"attention output does not equal pattern × values ({gap}): edit z", one.path),
                    )
                elif blind_N.any():
                    blind = f"the token at position {position_N[blind_N][0]} sees no key, or not all keys of a new row"
                    yield one, TokensError(blind, one.path)
                elif not finite_N.all():
                    yield one, None


class _Call(NamedTuple):
    """One layer's edits of B requests. position_M: the positions of all rows; count_B: the number of rows per request;
    group: the number of query heads per key/value head."""

    edits_B: Sequence[Sequence[PatternEdit]]
    position_M: np.ndarray
    count_B: np.ndarray
    group: int


def _batches(call: _Call, heads: int, width: int, device: torch.device) -> Iterator[_Batch]:
    """Yield the batches of a call. `width`: the number of elements in one position's keys."""
    ends = np.cumsum(call.count_B)
    begins, position_M = (ends - call.count_B).tolist(), call.position_M
    by_count: dict[int, list[tuple[int, int, np.ndarray]]] = {}  # of edited queries; (last position, request, rows)
    for b, (edits, begin, end) in enumerate(zip(call.edits_B, begins, ends.tolist(), strict=True)):
        rows = begin + np.flatnonzero(np.any([edit.is_query(position_M[begin:end]) for edit in edits], 0))
        if len(rows):
            by_count.setdefault(len(rows), []).append((int(position_M[rows[-1]]), b, rows))
    for count, queries in by_count.items():
        queries.sort(key=lambda each: each[0])
        while queries:
            length = queries[-1][0] + 1
            most = max(min(MAX_SCORES // (heads * length * count), MAX_KEYS // (length * width)), 1)
            which, of_scores = [b for _, b, _ in queries[-most:]], max(MAX_SCORES // (heads * length), 1)
            rows_BN = np.stack([rows for *_, rows in queries[-most:]])
            del queries[-most:]
            for part_BN in np.split(rows_BN, range(of_scores, count, of_scores), 1):
                yield _batch(call, which, part_BN, device)


def _batch(call: _Call, which: list[int], rows_BN: np.ndarray, device: torch.device) -> _Batch:
    """Build the batch of the requests `which` of a call, from the given rows of each request."""
    own, position_BN = [call.edits_B[b] for b in which], call.position_M[rows_BN]
    first = min(edit.first for edits in own for edit in edits) // call.group * call.group
    end = max(edit.end for edits in own for edit in edits)
    heads = -(-(end - first) // call.group) * call.group
    begin_B = call.position_M[(np.cumsum(call.count_B) - call.count_B)[which]]
    index_BN, end_BN, begin_B = (to_device(each, device) for each in (rows_BN, position_BN, begin_B))
    edges = edges_of(position_BN, own, first, heads, device)
    return _Batch(which, rows_BN, position_BN, index_BN, end_BN, begin_B, first, heads, edges)


def _results(pattern_BNHT: torch.Tensor, value_BTKE: torch.Tensor) -> torch.Tensor:
    """Return attention outputs, pattern × values, [B, N, H, E]."""
    groups_BNKGT = pattern_BNHT.unflatten(2, (value_BTKE.shape[2], -1))
    return torch.einsum("bnkgt,btke->bnkge", groups_BNKGT, value_BTKE).flatten(2, 3)
