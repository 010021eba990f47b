"""What of a prompt must be computed anew for a program, and which requests are computed together.

Programs change nothing below the first layer and before the first position that they touch. There every run of a
prompt is the run without a program, its *trunk*. A *cut* says where a pass leaves the trunk: it computes the layers
from one on, at the positions from one on. Requests of one prompt are grouped so that each group's cut leaves little to
compute.

    N requests of one prompt · L layers · T positions of the prompt
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from patchclamp.plan.bound import BoundProgram
from patchclamp.sites import SiteMap

MIN_SHARED = 8  # requests of one prompt; fewer are computed whole, side by side, as one shape
MAX_COST = 0.8  # of computing everything: a smaller gain is left


class Cut(NamedTuple):
    """A pass computes the layers from `layer` on, L for none, at the prompt's positions from `position` on."""

    layer: int
    position: int


class Group(NamedTuple):
    """Requests of one pass, by number. Without a cut the pass computes everything."""

    index: list[int]
    cut: Cut | None = None


class Asked(NamedTuple):
    """Of a request: its prompt, its program, and whether its passes may begin at a cut."""

    prompt: Sequence[int]
    bound: BoundProgram | None
    may_cut: bool = True


def first_layers(sites: SiteMap) -> list[int]:
    """By point, the first layer that is computed if something is done there: its own. What is before the layers needs
    all of them, and what is after them needs none."""
    outside = {"embed": 0}
    return [outside.get(p.kind, sites.layers) if p.layer is None else p.layer for p in sites.points]


def cut_of(bound: BoundProgram, first_layer: Sequence[int], layers: int) -> Cut:
    """The cut for one program. The prompt's last position is always computed, to be sampled from."""
    layer, position = layers, bound.prompt - 1
    for op in bound.ops:
        starts = [start for start, stop, *_ in op.ranges if start < min(stop, bound.prompt)]
        if starts and op.points:
            position = min(position, *starts)
            layer = min(layer, *(first_layer[point] for point in op.points))
    return Cut(layer, position)


class Work(NamedTuple):
    """What passes over a prompt cost, in rows times layers.

    layers, length: L and T
    pass_rows: a layer of a pass costs about as much beside its rows as so many rows do
    """

    layers: int
    length: int
    pass_rows: int

    def of(self, count: np.ndarray | int, cut: np.ndarray | Cut) -> np.ndarray:
        """Of a pass of `count` requests from a cut on; or of several passes, their cuts [N, 2]."""
        layer, position = np.asarray(cut).T
        return (self.layers - layer) * (count * (self.length - position) + self.pass_rows)

    def whole(self, count: int, size: int) -> int:
        """Of computing everything of `count` requests, `size` at a time."""
        return self.layers * (count * self.length + self.pass_rows * -(-count // size))

    def of_parts(self, parts: Sequence[tuple[list[int], Cut]]) -> float:
        """Of some requests' passes from their cuts on, and of the trunk that they leave."""
        return self.whole(1, 1) + sum(float(self.of(len(index), cut)) for index, cut in parts)


def group(asked: Sequence[Asked], first_layer: Sequence[int], layers: int, size: int, pass_rows: int) -> list[Group]:
    """Groups of `size` requests at most. Those that share no prompt with enough others, or would gain little, are
    computed whole, in their order."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    whole = [i for i, request in enumerate(asked) if not request.may_cut]
    for i, request in enumerate(asked):
        if request.may_cut:
            by_prompt.setdefault(tuple(request.prompt), []).append(i)
    groups: list[Group] = []
    for prompt, index in by_prompt.items():
        cuts = cuts_of([asked[i].bound for i in index], first_layer, layers) if len(index) >= MIN_SHARED else None
        work = Work(layers, len(prompt), pass_rows)
        parts = [] if cuts is None else split(cuts, work, size)
        if parts and work.of_parts(parts) <= MAX_COST * work.whole(len(index), size):
            groups += [Group([index[i] for i in part], cut) for part, cut in parts]
        else:
            whole += index
    return in_order(sorted(whole), size) + groups


def in_order(index: Sequence[int], size: int) -> list[Group]:
    """Groups of `size` requests, which are computed whole."""
    return [Group(list(index[i : i + size])) for i in range(0, len(index), size)]


def cuts_of(programs: Iterable[BoundProgram | None], first_layer: Sequence[int], layers: int) -> np.ndarray | None:
    """The cuts of some requests, [N, 2]; None if no request has a program. One without goes the way of the one before
    it: what is compared with it is computed alike."""
    cuts = [None if bound is None or not bound.ops else cut_of(bound, first_layer, layers) for bound in programs]
    last = next((cut for cut in cuts if cut is not None), None)
    if last is None:
        return None
    for i, cut in enumerate(cuts):
        last = cuts[i] = cut or last
    return np.array(cuts)


def split(cuts: np.ndarray, work: Work, size: int) -> list[tuple[list[int], Cut]]:
    """Parts of requests with these cuts, each with the cut that serves all of it. As many as fit into one pass stay
    together: of one call, they are computed in one shape."""
    everyone = np.arange(len(cuts))
    parts = [everyone] if len(cuts) <= size else _split(everyone, cuts, work, size)
    return [(np.sort(part).tolist(), Cut(*cuts[part].min(0).tolist())) for part in parts]


def _split(index: np.ndarray, cuts: np.ndarray, work: Work, size: int) -> list[np.ndarray]:
    """Cuts a part in two, by layers or by positions, where that leaves the least to compute, and goes on with both."""
    orders = [index[np.argsort(cuts[index, axis], kind="stable")] for axis in (0, 1)]
    cost, first, rest = min((_best_split(order, cuts, work) for order in orders), key=lambda choice: choice[0])
    if len(rest) == 0 or (len(index) <= size and cost >= work.of(len(index), cuts[index].min(0))):
        return [index]
    return _split(first, cuts, work, size) + _split(rest, cuts, work, size)


def _best_split(order: np.ndarray, cuts: np.ndarray, work: Work) -> tuple[float, np.ndarray, np.ndarray]:
    """The cheapest way to cut a part in two that keeps its order: its cost, and the two."""
    if len(order) < 2:
        return np.inf, order, order[:0]
    before = np.minimum.accumulate(cuts[order])[:-1]
    after = np.minimum.accumulate(cuts[order][::-1])[::-1][1:]
    count = np.arange(1, len(order))
    cost = work.of(count, before) + work.of(len(order) - count, after)
    best = int(np.argmin(cost))
    return float(cost[best]), order[: best + 1], order[best + 1 :]
