"""Monitors: probes that score every token of every request, without a program and without recomputing cached prefixes.

At the tap of a monitor's site, the worker computes W h for each row of a step (`MonitorTap`), also in CUDA graphs, and
sends the scores with the step's output. The engine core keeps them by KV-cache slot (`SlotScores`): a token's scores
share the slot of its keys and values, so a request that reuses a cached block also gets its scores. With each output of
a request the core sends the new scores, and the front end collects them (`MonitorLog`).
"""

from __future__ import annotations

import math
import operator
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.engines.base import Monitor
from patchclamp.errors import PatchclampError, ProgramError, ShapeError, UnsupportedSite
from patchclamp.language import every
from patchclamp.language.ops import Probe
from patchclamp.language.site import parse_site
from patchclamp.language.values import Vector
from patchclamp.sites import SiteMap

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from patchclamp.sites import View

MAX_COLUMNS = 1024  # numbers per token that all monitors may compute, which the core keeps for each slot of the cache
WORDS = re.compile(r"(?P<name>[^=]+)=(?P<file>.+)@(?P<site>[^@>]+)(?:>(?P<threshold>[^>]+))?")


def parse_monitor(words: str) -> tuple[Probe, float | None]:
    """Parse `NAME=FILE@SITE` or `NAME=FILE@SITE>THRESHOLD`. Raises `ProgramError` for other text, and the errors of
    `Probe.load`."""
    parts = WORDS.fullmatch(words)
    if parts is None:
        raise ProgramError(f"expected NAME=FILE@SITE, such as lies=probe.safetensors@resid_post[20], got {words!r}")
    name, file, site, threshold = parts.groups()
    try:
        limit = None if threshold is None else float(threshold)
    except ValueError:
        limit = math.nan
    if limit is not None and not math.isfinite(limit):
        raise ProgramError(f"expected a finite number after >, got {threshold!r}")
    return Probe.load(file, parse_site(site.strip()), name=name.strip()), limit


def monitors_of(given: Sequence[Any], sites: SiteMap) -> tuple[Monitor, ...]:
    """Read the engine option `probes`: a list of `Probe`s and strings (`parse_monitor`).

    Raises `ProgramError`, `ShapeError` or `UnsupportedSite` for a probe that cannot score every token.
    """
    monitors: list[Monitor] = []
    for i, each in enumerate(given):
        try:
            monitor = _monitor_of(each, sites)
            if monitor.probe.name in [other.probe.name for other in monitors]:
                raise ProgramError(f"duplicate probe name {monitor.probe.name!r}")
        except PatchclampError as error:
            raise error.under(f"probes[{i}]") from None
        monitors.append(monitor)
    # the columns of a point are adjacent, so that it takes one product
    places = sorted((point, i, number) for i, monitor in enumerate(monitors) for point in monitor.points
                    for number in range(monitor.outputs))  # fmt: skip
    if len(places) > MAX_COLUMNS:
        raise ShapeError(
            f"expected at most {MAX_COLUMNS} scores per token over all probes, got {len(places)}", "probes"
        )
    column = {place: number for number, place in enumerate(places)}
    return tuple(
        msgspec.structs.replace(monitor, columns=tuple(
            column[point, i, number] for point in monitor.points for number in range(monitor.outputs)
        )) for i, monitor in enumerate(monitors)
    )  # fmt: skip


def _monitor_of(given: Any, sites: SiteMap) -> Monitor:
    probe, threshold = parse_monitor(given) if isinstance(given, str) else (given, None)
    if not isinstance(probe, Probe):
        raise ProgramError(f"expected a Probe, got {type(probe).__name__}")
    if probe.pool is not None or probe.tokens != every:
        raise ProgramError(f"probe {probe.name!r} scores every token of every request: omit tokens and pool")
    refs = sites.resolve(probe.at)
    width = sites.points[refs[0].point].width
    if not isinstance(probe.weight, Vector) or probe.weight.shape[-1] != width:
        given_shape = list(probe.weight.shape) if isinstance(probe.weight, Vector) else probe.weight.name
        raise ShapeError(f"expected a weight [k, {width}] at {probe.at}, got {given_shape}", "weight")
    points = tuple(ref.point for ref in refs)
    for point in points:
        if sites.points[point].rows == "sampled" or sites.shard_count(point) > 1:
            raise UnsupportedSite(
                f"an always-on probe requires a per-token site that is not sharded across workers, got {probe.at}",
                "at",
            )
    return Monitor(probe, threshold, points, ())


def monitors_of_config(vllm_config: VllmConfig) -> tuple[Monitor, ...]:
    """Return the monitors in an engine's configuration."""
    return getattr(vllm_config.additional_config, "monitors", ())


def columns_of(monitors: Sequence[Monitor]) -> int:
    """Return the number of scores per token over all monitors."""
    return sum(len(monitor.columns) for monitor in monitors)


# -- the worker


class MonitorTap:
    """Computes the products W h of a step's rows into `products`, [R, K].

    Taps call `apply`. It allocates nothing that outlives the step, so it can be recorded in a CUDA graph.
    """

    def __init__(
        self, monitors: Sequence[Monitor], views: Mapping[int, View | None], rows: int, device: torch.device
    ) -> None:
        import torch

        self.products: torch.Tensor = torch.zeros(rows, columns_of(monitors), device=device)
        self._at: dict[int, tuple[torch.Tensor, int, int]] = {}  # by point: Wᵀ [D, k] of all its probes, their columns
        for point in sorted({point for monitor in monitors for point in monitor.points}):
            if views.get(point) is not None:
                at = next(monitor.probe.at for monitor in monitors if point in monitor.points)
                raise UnsupportedSite(
                    f"an always-on probe cannot read {at}, which is only part of a tensor: use the stream "
                    "(resid_pre, resid_mid or resid_post)"
                )
            places = sorted((monitor.columns[monitor.points.index(point) * monitor.outputs + number], row)
                            for monitor in monitors if point in monitor.points
                            for number, row in enumerate(monitor.weight))  # fmt: skip
            weight_kD = np.stack([row for _, row in places])
            weight_Dk = torch.tensor(weight_kD.T.copy(), dtype=torch.float32, device=device)
            self._at[point] = weight_Dk, places[0][0], places[-1][0] + 1

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Compute the products at a point. Rows are `hidden`, plus `residual` if given."""
        if (found := self._at.get(point)) is None:
            return
        weight_Dk, first, end = found
        h_RD = hidden.view(-1, len(weight_Dk)).float()
        if residual is not None:
            h_RD = h_RD + residual.view(-1, len(weight_Dk)).float()
        self.products[: len(h_RD), first:end] = h_RD @ weight_Dk

    def taken(self, rows: int) -> Callable[[], np.ndarray]:
        """Start a copy of a step's products [rows, K] to the host; return a function that waits for the copy."""
        import torch

        copied = self.products[:rows].to("cpu", non_blocking=True, copy=True)
        if self.products.device.type != "cuda":
            return copied.numpy
        event = torch.cuda.Event()
        event.record()

        def wait() -> np.ndarray:
            event.synchronize()
            return copied.numpy()

        return wait


# -- the engine core


class _Step(NamedTuple):
    """A scheduled step of N requests: their lanes (rows in `SlotScores`), lane versions, first positions and token
    counts, [N] each, and the cache slots of all tokens, [T]."""

    names: list[str]
    lanes: np.ndarray
    versions: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    slots: np.ndarray


class _Taken(NamedTuple):
    """Scores of N outputs: their first positions and token counts [N], and the products of all tokens [T, K]."""

    outputs: list[Any]
    firsts: np.ndarray
    counts: np.ndarray
    products: np.ndarray


class SlotScores:
    """Every cached token's products by KV-cache slot, and the number of tokens of each request whose scores were sent.

    columns: K, the products per token · blocks: the number of cache blocks · block: the tokens per block
    length: the maximum number of tokens of a request
    """

    def __init__(self, columns: int, blocks: int, block: int, length: int) -> None:
        self._block = block
        self.by_slot: np.ndarray = np.full((blocks * block, columns), np.nan, np.float32)
        self._unsent: dict[int, tuple[int, np.ndarray]] = {}  # first position and products, by the id of an output
        self._steps: dict[int, _Step] = {}  # in flight, by step number
        # by lane (a request's row): its blocks, their count, its tokens with scores, its tokens sent, and a version
        # that changes with the request, and when the request restarts after preemption
        self._tables = np.zeros((64, -(-length // block)), np.int64)
        self._filled, self._known, self._sent, self._version = (np.zeros(64, np.int64) for _ in range(4))
        self._lanes: dict[str, int] = {}
        self._ended: list[str] = []  # requests whose last scores are not taken yet
        self._free = list(range(64))
        self._known_lanes: tuple[list[str], np.ndarray] = [], np.zeros(0, np.int64)  # of the last names looked up
        self._known_order: tuple[list[str], list[str], np.ndarray] = [], [], np.zeros(0, np.int64)

    def scheduled(
        self, step: int, names: list[str], starts: list[int], counts: Mapping[str, int], total: int,
        blocks: Sequence[tuple[str, Sequence[int], bool]],
    ) -> None:  # fmt: skip
        """Record step number `step`: its requests with their first positions and token counts, `total` tokens, and each
        request's new block ids, which replace (True) or extend (False) its earlier ones."""
        self._steps.pop(step, None)  # of a step that failed
        for name, ids, is_whole in blocks:
            if is_whole:
                self._begin(name, ids)
            else:
                lane = self._lanes[name]
                self._place(lane, int(self._filled[lane]), ids)
        if not names:
            return
        lanes, start_N = self._lanes_of(names), np.array(starts)
        count_N = np.ones_like(lanes) if total == len(names) else np.array([counts[name] for name in names])
        slots = self._slots(lanes, start_N, count_N)
        self._steps[step] = _Step(names, lanes, self._version[lanes], start_N, count_N, slots)

    def computed(self, step: int, products: np.ndarray | None, in_rows: list[str], accepted: Mapping[str, int]) -> None:
        """Store a step's products [T, K]. `in_rows`: its requests in row order; `accepted`: the number of accepted
        tokens of each request with drafts."""
        planned = self._steps.pop(step, None)
        if planned is None:
            return
        names, lanes, versions, starts, counts, slots = planned
        if products is None:
            self.by_slot[slots] = np.nan
        else:
            if self._known_order[0] != names or self._known_order[1] != in_rows:
                rows_of = {name: row for row, name in enumerate(in_rows)}
                self._known_order = names, in_rows, np.array([rows_of[name] for name in names])
            order = self._known_order[2]
            by_row = np.empty_like(counts)
            by_row[order] = counts
            first_row = np.cumsum(by_row) - by_row
            self.by_slot[slots] = products[_ranges(first_row[order], counts)]
        if accepted:
            counts = np.array([accepted.get(name, count) for name, count in zip(names, counts.tolist(), strict=True)])
        same = self._version[lanes] == versions
        self._known[lanes[same]] = (starts + counts)[same]

    def take_all(self, outputs: Sequence[Any]) -> _Taken:
        """Take the new scores of these outputs' requests. Call this before the blocks of ended requests are reused;
        the outputs may be sent later."""
        return _Taken(list(outputs), *self._take([output.request_id for output in outputs]))

    def message(self, outputs: Sequence[Any], taken: _Taken | None) -> list[bytes]:
        """Return the scores to send with these outputs: first positions and token counts (int64), and products (fp32).
        `taken`: this step's scores, stored here for outputs that are sent later. Returns [] without outputs."""
        now = [] if taken is None else taken.outputs
        if taken is not None and now and len(outputs) == len(now) and all(map(operator.is_, outputs, now)):
            return [taken.firsts.tobytes(), taken.counts.tobytes(), taken.products.tobytes()]
        if taken is not None and now:
            parts = np.split(taken.products, np.cumsum(taken.counts)[:-1])
            self._unsent |= zip(map(id, now), zip(taken.firsts.tolist(), parts, strict=True), strict=True)
        if not outputs:
            return []
        sent = [self._unsent.pop(id(output), (0, self.by_slot[:0])) for output in outputs]
        firsts, counts = np.array([first for first, _ in sent]), np.array([len(products) for _, products in sent])
        return [firsts.tobytes(), counts.tobytes(), b"".join(products.tobytes() for _, products in sent)]

    def _lanes_of(self, names: list[str]) -> np.ndarray:
        """Return requests' lanes; −1 for ended requests."""
        if self._known_lanes[0] != names:
            self._known_lanes = names, np.array([self._lanes.get(name, -1) for name in names], np.int64)
        return self._known_lanes[1]

    def _take(self, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lanes = self._lanes_of(names)
        firsts = np.where(lanes < 0, 0, self._sent[lanes])
        counts = np.where(lanes < 0, 0, np.maximum(self._known[lanes] - firsts, 0))
        there = lanes >= 0
        self._sent[lanes[there]] = (firsts + counts)[there]
        products = self.by_slot[self._slots(lanes, firsts, counts)]
        return firsts, counts, products

    def end(self, name: str, tokens: int) -> None:
        """Truncate a request's scores to its input tokens: drafts beyond the last token may have scores. The next
        `forget_ended` drops the request."""
        if (lane := self._lanes.get(name)) is not None:
            self._known[lane] = min(self._known[lane], tokens)
            self._ended.append(name)

    def forget_ended(self) -> None:
        """Drop ended requests whose last scores were taken."""
        while self._ended:
            self.leave(self._ended.pop())

    def leave(self, name: str) -> None:
        """Drop an ended or aborted request."""
        lane = self._lanes.pop(name, None)
        if lane is not None:
            self._known_lanes = [], self._known_lanes[1]
            self._version[lane] += 1
            self._free.append(lane)

    def _begin(self, name: str, blocks: Sequence[int]) -> None:
        """Assign a lane to a request that starts, or restarts after preemption."""
        lane = self._lanes.get(name)
        if lane is None:
            if not self._free:
                self._grow()
            lane = self._lanes[name] = self._free.pop()
            self._known_lanes = [], self._known_lanes[1]
            self._sent[lane] = 0
        self._version[lane] += 1
        self._known[lane] = 0
        self._place(lane, 0, blocks)

    def _place(self, lane: int, filled: int, blocks: Sequence[int]) -> None:
        end = filled + len(blocks)
        if end > self._tables.shape[1]:  # blocks for drafts beyond the longest request
            blocks, end = blocks[: self._tables.shape[1] - filled], self._tables.shape[1]
        self._tables[lane, filled:end], self._filled[lane] = blocks, end

    def _grow(self) -> None:
        count = len(self._tables)
        self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
        self._filled, self._known, self._sent, self._version = (
            np.concatenate([each, np.zeros_like(each)])
            for each in (self._filled, self._known, self._sent, self._version)
        )
        self._free = list(range(count, 2 * count))

    def _slots(self, lanes: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the slots of `counts` tokens of each request, starting at positions `starts`."""
        positions = _ranges(starts, counts)
        lane = lanes if len(positions) == len(lanes) and positions is starts else np.repeat(lanes, counts)
        return self._tables[lane, positions // self._block] * self._block + positions % self._block


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges start … start + count − 1."""
    if len(counts) and counts.min() == 1 == counts.max():
        return starts
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


# -- the front end


_KINDS = (np.int64, np.int64, np.float32)  # of the parts of a message


class _Stretch:
    """Scores of N requests over consecutive steps: any number of tokens in the first, then one per request.

    first: products of the first step's tokens; request i has rows bounds[i] to bounds[i + 1]
    later: products of each later step, [N, K]
    """

    def __init__(self, names: list[str], counts: np.ndarray, products: np.ndarray) -> None:
        self.names, self.first, self.later = names, products, list[np.ndarray]()
        self.bounds: list[int] = [0, *np.cumsum(counts).tolist()]
        self._stacked = np.zeros((0, *products.shape))

    def rows(self, i: int, begin: int) -> np.ndarray:
        """Return request i's products starting at step `begin`."""
        parts = [self.first[self.bounds[i] : self.bounds[i + 1]]] if begin == 0 else []
        later = self.later[max(begin - 1, 0) :]
        if begin == 0 and later:
            if len(self._stacked) != len(later):  # once for all requests, which often end together
                self._stacked = np.stack(later)
            parts.append(self._stacked[:, i])
        elif later:
            parts.append(np.stack([products[i] for products in later]))
        return np.concatenate(parts) if parts else self.first[:0]


class MonitoredRun:
    """The products of a request's tokens, as they arrive. `news` returns them up to position `end`."""

    def __init__(self) -> None:
        self.parts: list[tuple[_Stretch, int]] = []
        self.end, self._held = 1 << 62, list[np.ndarray]()  # products at or after `end`
        self._read = self._steps = self._tokens = 0  # parts read, steps of the next one, tokens that `news` returned

    def products(self) -> np.ndarray:
        """Return all products so far, [T, K]."""
        return np.concatenate([stretch.rows(i, 0) for stretch, i in self.parts])

    def news(self) -> tuple[int, np.ndarray]:
        """Return the first position and the products of the tokens that arrived since the last call."""
        unread = enumerate(self.parts[self._read :])
        found = self._held + [stretch.rows(i, 0 if number else self._steps) for number, (stretch, i) in unread]
        if self.parts:
            self._read, self._steps = len(self.parts) - 1, 1 + len(self.parts[-1][0].later)
        new = np.concatenate(found) if found else np.zeros((0, MAX_COLUMNS), np.float32)
        room = max(0, self.end - self._tokens)
        new, self._held = new[:room], [new[room:]] if len(new) > room else []
        self._tokens += len(new)
        return self._tokens - len(new), new


class Choices(dict[int, MonitoredRun]):
    """The products of a request's choices, by index."""


class MonitorLog:
    """Scores of one front end's requests.

    runs: the products that have arrived for requests registered before their first output, by submitted name (weak
        references)
    watch: called when scores arrive, with the core's request names, their first positions and token counts, and the
        products of all these tokens
    """

    watch: Callable[[list[str], np.ndarray, np.ndarray, np.ndarray], None] | None = None

    def __init__(self, monitors: tuple[Monitor, ...]) -> None:
        self.monitors = monitors
        self.runs: weakref.WeakValueDictionary[str, Choices] = weakref.WeakValueDictionary()
        self._columns = columns_of(monitors)
        self._message: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._taken, self._part = 0, 0  # the message's outputs that have arrived, and the calls of `file` for them
        self._stretches: dict[int, _Stretch] = {}  # the latest one, by part

    def arrived(self, message: Sequence[bytes]) -> None:
        """Receive a message with the scores of the outputs that arrive with it or later."""
        firsts, counts, products = (np.frombuffer(part, kind) for part, kind in zip(message, _KINDS, strict=True))
        self._message, self._taken, self._part = (firsts, counts, products.reshape(-1, self._columns)), 0, 0

    def file(self, names: list[str], owner: Callable[[str], tuple[str, int] | None]) -> None:
        """Assign the message's next scores to these requests, given by the core's names. `owner` returns a request's
        submitted name and choice index, or None if it has ended."""
        if self._message is None:
            return
        firsts, counts, products = self._message
        here = slice(self._taken, self._taken + len(names))
        if here.stop > len(counts):  # the core aborted or refused requests outside a step: they have no new scores
            return
        if len(names) < len(counts):
            begin = int(counts[: here.start].sum())
            products = products[begin : begin + int(counts[here].sum())]
        firsts, counts = firsts[here], counts[here]
        stretch = self._stretches.get(self._part)
        if stretch is not None and len(products) == len(names) == (counts == 1).sum() and stretch.names == names:
            stretch.later.append(products)
        else:
            stretch = self._stretches[self._part] = _Stretch(names, counts, products)
            for i, name in enumerate(names):
                if (found := owner(name)) is not None and (choices := self.runs.get(found[0])) is not None:
                    choices.setdefault(found[1], MonitoredRun()).parts.append((stretch, i))
        self._taken, self._part = here.stop, self._part + 1
        if self.watch is not None and len(products):
            self.watch(names, firsts, counts, products)
