"""Cuts: the part of a prompt that a program must recompute, and groups of requests that share a forward pass.

Below the first layer and before the first position that a program touches, every run of a prompt equals the unedited
run, its *trunk*. A pass leaves the trunk at a *cut*: it computes only layers and positions at or after the cut.
Requests of one prompt are grouped to minimize the remaining work.

    N requests of one prompt · L layers · T positions of the prompt
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patchclamp.plan.bound import BoundProgram
from patchclamp.plan.cells import CellRecords, cells_of
from patchclamp.sites import SiteMap

MIN_SHARED = 8  # minimum number of requests per prompt; fewer are computed in full
MAX_COST = 0.8  # maximum work relative to full passes; above it, cuts save too little


class Cut(NamedTuple):
    """The start of a pass: its first layer (L: no layer) and first position."""

    layer: int
    position: int


class PassGroup(NamedTuple):
    """The indices of requests that share a pass, and its cut. Without a cut, the pass computes everything."""

    index: list[int]
    cut: Cut | None = None


class CutRequest(NamedTuple):
    """A request's prompt and program. `may_cut`: True if its passes may start at a cut."""

    prompt: Sequence[int]
    bound: BoundProgram | None
    may_cut: bool = True


def first_layers(sites: SiteMap) -> list[int]:
    """Return, by point, the first layer to recompute for an op there: the point's own, 0 for the embedding, L (no
    layer) after the layers."""
    outside = {"embed": 0}
    return [outside.get(p.kind, sites.layers) if p.layer is None else p.layer for p in sites.points]


def cuts_of(cells: CellRecords, prompt: np.ndarray, first_layer: Sequence[int], layers: int) -> np.ndarray:
    """Return the cells' cuts, [N, 2]. `prompt` [N]: each cell's prompt length; the last position is always computed,
    for sampling. A cell without a program gets the preceding (initially, the following) cell's cut, so that compared
    runs are computed the same way."""
    cuts = np.stack([np.full(cells.count, layers), prompt - 1], 1)
    layer_of, has_program = np.array(first_layer), np.zeros(cells.count, bool)
    for group in cells.groups:
        start, last = group.records["start"], prompt[group.number, None]
        acts = start < np.minimum(group.records["stop"], last)
        cuts[group.number, 0] = np.where(acts, layer_of[group.point], layers).min(1)
        cuts[group.number, 1] = np.where(acts, start, last - 1).min(1)
        has_program[group.number] = True
    if not has_program.any():
        return cuts
    before = np.maximum.accumulate(np.where(has_program, np.arange(cells.count), int(has_program.argmax())))
    return np.where((prompt == prompt[before])[:, None], cuts[before], cuts)


class Work(NamedTuple):
    """The cost of passes over a prompt, in rows times layers.

    layers, length: L and T
    pass_rows: a pass's fixed cost per layer, in rows
    """

    layers: int
    length: int
    pass_rows: int

    def of(self, count: np.ndarray | int, cut: np.ndarray | Cut) -> np.ndarray:
        """Return the cost of a pass of `count` requests starting at a cut, or of several passes with cuts [N, 2]."""
        layer, position = np.asarray(cut).T
        return (self.layers - layer) * (count * (self.length - position) + self.pass_rows)

    def whole(self, count: int, size: int) -> int:
        """Return the cost of computing `count` requests in full, `size` at a time."""
        return self.layers * (count * self.length + self.pass_rows * -(-count // size))

    def of_parts(self, parts: Sequence[tuple[list[int], Cut]]) -> float:
        """Return the cost of passes starting at their cuts, including the trunk."""
        return self.whole(1, 1) + sum(float(self.of(len(index), cut)) for index, cut in parts)


def group(
    requests: Sequence[CutRequest], first_layer: Sequence[int], layers: int, size: int, pass_rows: int
) -> list[PassGroup]:
    """Group requests, at most `size` per group. Requests that share their prompt with too few others, or for which cuts
    save too little, are computed in full, in order."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    whole = [i for i, request in enumerate(requests) if not request.may_cut]
    for i, request in enumerate(requests):
        if request.may_cut:
            by_prompt.setdefault(tuple(request.prompt), []).append(i)
    groups: list[PassGroup] = []
    for prompt, index in by_prompt.items():
        cells = cells_of([requests[i].bound for i in index] if len(index) >= MIN_SHARED else [])
        cuts = cuts_of(cells, np.full(cells.count, len(prompt)), first_layer, layers)
        work = Work(layers, len(prompt), pass_rows)
        parts = split(cuts, work, size) if cells.groups else []
        if parts and work.of_parts(parts) <= MAX_COST * work.whole(len(index), size):
            groups += [PassGroup([index[i] for i in part], cut) for part, cut in parts]
        else:
            whole += index
    return in_order(sorted(whole), size) + groups


def in_order(index: Sequence[int], size: int) -> list[PassGroup]:
    """Group requests in order, `size` per group, to be computed in full."""
    return [PassGroup(list(index[i : i + size])) for i in range(0, len(index), size)]


def split(cuts: np.ndarray, work: Work, size: int) -> list[tuple[list[int], Cut]]:
    """Split requests into parts, each with its requests' lowest cut. Requests that fit into one pass are not split, so
    they are computed at one batch shape."""
    everyone = np.arange(len(cuts))
    parts = [everyone] if len(cuts) <= size else _split(everyone, cuts, work, size)
    return [(np.sort(part).tolist(), Cut(*cuts[part].min(0).tolist())) for part in parts]


def _split(index: np.ndarray, cuts: np.ndarray, work: Work, size: int) -> list[np.ndarray]:
    """Split a part in two by layers or by positions, at the lowest cost, and continue recursively."""
    orders = [index[np.argsort(cuts[index, axis], kind="stable")] for axis in (0, 1)]
    cost, first, rest = min((_best_split(order, cuts, work) for order in orders), key=lambda choice: choice[0])
    if len(rest) == 0 or (len(index) <= size and cost >= work.of(len(index), cuts[index].min(0))):
        return [index]
    return _split(first, cuts, work, size) + _split(rest, cuts, work, size)


def _best_split(order: np.ndarray, cuts: np.ndarray, work: Work) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the cheapest split of an ordered part in two: the cost, and both halves."""
    if len(order) < 2:
        return np.inf, order, order[:0]
    before = np.minimum.accumulate(cuts[order])[:-1]
    after = np.minimum.accumulate(cuts[order][::-1])[::-1][1:]
    count = np.arange(1, len(order))
    cost = work.of(count, before) + work.of(len(order) - count, after)
    best = int(np.argmin(cost))
    return float(cost[best]), order[: best + 1], order[best + 1 :]
