"""Binding: a program and one prompt become plain numbers; every name and selection is checked here, before it runs.

A *piece* is (start, stop, row, step): positions start … stop−1, of which position p reads row `row + (p − start)·step`
of the op's value; step is 1 for a row each, 0 for one row for all.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from patchclamp.errors import MissingSource, PatchclampError, ShapeError, TokensError, UnsupportedSite
from patchclamp.plan.table import BLEND, CAPTURE, LINEAR, NOISE, PROJECT
from patchclamp.sites import Place, SiteMap
from patchclamp.spec import Ablate, Add, Capture, Clamp, From, Noise, Program, Replace, Scale, Vector
from patchclamp.spec.ops import DTYPES, LARGEST, Op
from patchclamp.spec.tokens import Positions, TextSpan, Tokens

Piece = tuple[int, int, int, int]


class BoundOp(msgspec.Struct, frozen=True, array_like=True):
    """One op in numbers. `values` has a bank key for each point, one for all, or none; `x`, `y` are the op's scalars
    (`plan.table`), `mask` the bank key of a factor a column. Of noise: its `seed`, the number of each point's site, and
    whether it is `relative`.

    `reaches_cache`: whether the op can change keys and values that later tokens read.
    """

    path: str
    kind: int
    points: tuple[int, ...]
    values: tuple[str, ...]
    pieces: tuple[Piece, ...]
    x: float = 0.0
    y: float = 0.0
    reaches_cache: bool = False
    mask: str = ""
    seed: int = 0
    sites: tuple[int, ...] = ()
    relative: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Every bank key that is read."""
        return (*self.values, self.mask) if self.mask else self.values

    def reads(self) -> list[tuple[str, int]]:
        """Bank keys, each with a point where it is read."""
        if len(self.values) == len(self.points):
            found = list(zip(self.values, self.points, strict=True))
        else:
            found = [(key, point) for key in self.values for point in self.points]
        return found + [(self.mask, point) for point in self.points if self.mask]

    def at(self, here: np.ndarray) -> BoundOp:
        """The part of the op at the points that are `here` [P]; it keeps its place in the program though nothing be
        left."""
        if here.all():
            return self
        mine = [i for i, point in enumerate(self.points) if here[point]]
        points = tuple(self.points[i] for i in mine)
        values = self.values if len(self.values) != len(self.points) else tuple(self.values[i] for i in mine)
        changed = {"points": points, "values": values, "sites": tuple(self.sites[i] for i in mine if self.sites)}
        return msgspec.structs.replace(self, **(changed if points else changed | {"values": (), "mask": ""}))


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """A program bound to a prompt of `prompt` tokens, run under the key `run`.

    Edited blocks of the prefix cache are shared among programs of one `salt` only.
    """

    run: str
    prompt: int
    ops: tuple[BoundOp, ...]
    salt: str = ""

    def captured(self) -> dict[int, np.ndarray]:
        """Positions captured at each point, ascending, were every asked token generated."""
        found: dict[int, list[np.ndarray]] = {}
        for op in self.ops:
            if op.kind == CAPTURE:
                ranges = [np.arange(start, stop) for start, stop, _, _ in op.pieces]
                for point in op.points:
                    found.setdefault(point, []).extend(ranges)
        return {point: np.unique(np.concatenate(r)) if r else np.arange(0) for point, r in found.items()}


class Prompt(msgspec.Struct):
    """A prompt's tokens; `spell` gives its text and each token's (first, last+1) character when a span asks."""

    ids: Sequence[int]
    spell: Callable[[], tuple[str, list[tuple[int, int]]]]

    def select(self, tokens: Tokens, limit: int) -> np.ndarray:
        """Selected positions below `limit`, in the selection's order: ascending but for a list that is not."""
        if isinstance(tokens, TextSpan):
            text, offsets = self.spell()
            return np.asarray(tokens.find(offsets, text), np.int64)
        return np.asarray(tokens.select(len(self.ids), limit), np.int64)


class Source(Protocol):
    """An earlier run, as a place to read rows from."""

    def positions_of(self, point: int) -> np.ndarray:
        """Positions it captured at a point, ascending; empty if none."""
        ...

    def select(self, tokens: Tokens) -> np.ndarray: ...


class _Binder:
    def __init__(self, prompt: Prompt, limit: int, sites: SiteMap, source: Callable[[str], Source]) -> None:
        self.prompt, self.limit, self.sites, self.source = prompt, limit, sites, source

    def bind(self, path: str, op: Op) -> BoundOp:
        places = self._places(op)
        positions = self._positions(op, places)
        if isinstance(op, Capture):
            pieces = pieces_of(positions, None)
            return BoundOp(path, CAPTURE, _points(places), (), pieces, float(DTYPES.index(op.dtype)))
        if len(positions) == 0:
            raise TokensError(f"{op.tokens} selects no position of this request, so nothing would be edited", "tokens")  # type: ignore[attr-defined]
        values, rows = self._value(op, places, positions)
        pieces, points = pieces_of(positions, rows), _points(places)
        cached = any(self.sites.points[point].kind not in ("final_norm", "logits") for point in points)
        numbers = {"kind": LINEAR, "pieces": pieces} | self._numbers(op, places, pieces)
        return BoundOp(path, points=points, values=values, reaches_cache=cached, **numbers)

    def _numbers(self, op: Op, places: list[Place], pieces: tuple[Piece, ...]) -> dict[str, Any]:
        """What else there is to an op: kind, scalars, and pieces where they are not those of its value."""
        if isinstance(op, Add):
            return {"x": 1.0, "y": op.scale}
        if isinstance(op, Replace) and op.mask is None:
            return {"x": 1.0 - op.alpha, "y": op.alpha}
        if isinstance(op, Replace):
            self._fits(op.mask, places, "mask")
            return {"kind": BLEND, "y": op.alpha, "mask": vector_key(op.mask)}
        if isinstance(op, Scale):
            return {"x": op.factor}
        if isinstance(op, (Ablate, Clamp)):
            low, high = (0.0, 0.0) if isinstance(op, Ablate) else (op.low, op.high)
            bounds = {"x": -LARGEST if low is None else low, "y": LARGEST if high is None else high}
            rows = range(op.basis.shape[0])  # one after the other, at every position
            return {"kind": PROJECT, "pieces": tuple((a, b, row, 0) for row in rows for a, b, *_ in pieces), **bounds}
        if isinstance(op, Noise):
            points = [self.sites.points[place.point] for place in places]
            sites = tuple(site_number(point.kind, point.layer) for point in points)
            return {"kind": NOISE, "y": op.std, "seed": op.seed, "sites": sites, "relative": op.relative,
                    "pieces": pieces if op.std else ()}  # fmt: skip
        return {}

    def _places(self, op: Op) -> list[Place]:
        try:
            return self.sites.resolve(op.at)  # type: ignore[attr-defined]
        except PatchclampError as error:
            raise error.under("at") from None

    def _positions(self, op: Op, places: list[Place]) -> np.ndarray:
        tokens: Tokens = op.tokens  # type: ignore[attr-defined]
        try:
            chosen = self.prompt.select(tokens, self.limit)
        except PatchclampError as error:
            raise error.under("tokens") from None
        if chosen.size and chosen.max() >= self.limit:
            raise TokensError(f"{tokens}: there is no position {chosen.max()}", "tokens")
        if self.sites.points[places[0].point].rows == "sampled":
            return self._sampled(tokens, chosen)
        return chosen

    def _sampled(self, tokens: Tokens, chosen: np.ndarray) -> np.ndarray:
        """Logits exist only where a token is sampled; asking for all positions means all of those."""
        first = len(self.prompt.ids) - 1
        if isinstance(tokens, Positions) and tokens.of == "every" and not isinstance(tokens.index, (int, tuple)):
            return chosen[chosen >= first]
        if chosen.size and chosen.min() < first:
            raise UnsupportedSite(
                f"logits exist only where a token is sampled (position {first} on), not at {chosen.min()}; "
                "use prompt[-1] or generated, or capture final_norm and apply the unembedding",
                "tokens",
            )
        return chosen

    def _value(self, op: Op, places: list[Place], positions: np.ndarray) -> tuple[tuple[str, ...], np.ndarray | None]:
        """Bank keys and, for each position, its row of the value (None: row 0 for all)."""
        if isinstance(op, (Ablate, Clamp)):
            field = "directions" if isinstance(op, Ablate) else "direction"
            return (self._fits(op.basis, places, field),), None
        if not hasattr(op, "value"):
            return (), None
        try:
            if isinstance(op.value, Vector):  # type: ignore[attr-defined]
                return self._vector(op.value, places, positions)  # type: ignore[attr-defined]
            return self._from(op.value, places, positions)  # type: ignore[attr-defined]
        except PatchclampError as error:
            raise error.under("value") from None

    def _fits(self, vector: Vector, places: list[Place], field: str = "") -> str:
        """The vector's key. Raises `ShapeError` if it is not as wide as the site."""
        width = self.sites.points[places[0].point].width
        if vector.shape[-1] != width:
            raise ShapeError(f"{places[0]} is {width} wide; the vector is {list(vector.shape)}", field)
        return vector_key(vector)

    def _vector(
        self, vector: Vector, places: list[Place], positions: np.ndarray
    ) -> tuple[tuple[str, ...], np.ndarray | None]:
        key = self._fits(vector, places)
        if len(vector.shape) == 1:
            return (key,), None
        if vector.shape[0] != len(positions):
            raise ShapeError(f"the selection has {len(positions)} positions; the vector has {vector.shape[0]} rows")
        return (key,), np.arange(len(positions))

    def _from(
        self, given: From, places: list[Place], positions: np.ndarray
    ) -> tuple[tuple[str, ...], np.ndarray | None]:
        source = self.source(given.run)
        read = places if given.site is None else self.sites.resolve(given.site)
        if len(read) not in (1, len(places)):
            raise ShapeError(f"{given.site} names {len(read)} layers; {len(places)} are written: give one, or as many")
        if self.sites.points[read[0].point].width != self.sites.points[places[0].point].width:
            raise ShapeError(f"{read[0]} and {places[0]} differ in width")
        wanted = positions if given.position is None else source.select(given.position)
        if len(wanted) not in (1, len(positions)):
            raise ShapeError(f"{given.position} names {len(wanted)} positions; {len(positions)} are written")
        rows = {_rows(source.positions_of(place.point), wanted, given.run, place).tobytes() for place in read}
        if len(rows) > 1:
            raise MissingSource(f"run {given.run} captured other positions at some of the layers of {read[0].name}")
        found = np.frombuffer(rows.pop(), np.int64)
        keys = tuple(run_key(given.run, place.point) for place in read)
        return keys, np.repeat(found, len(positions)) if len(found) == 1 else found


def bind(
    program: Program, run: str, prompt: Prompt, max_tokens: int, sites: SiteMap, source: Callable[[str], Source]
) -> Bound:
    """Checks a program against a prompt, a model and the runs it reads, and puts it into numbers.

    Positions are those that are inputs: below len(prompt) + max_tokens − 1.
    """
    binder = _Binder(prompt, len(prompt.ids) + max_tokens - 1, sites, source)
    ops = []
    for path, op in program.ops:
        try:
            ops.append(binder.bind(path, op))
        except PatchclampError as error:
            raise error.under(path) from None
    return Bound(run, len(prompt.ids), tuple(ops))


def vectors_of(op: Op) -> list[Vector]:
    """The vectors that an op brings along, as they go to the bank."""
    if isinstance(op, (Ablate, Clamp)):
        return [op.basis]
    return [given for field in ("value", "mask") if isinstance(given := getattr(op, field, None), Vector)]


def vector_key(vector: Vector) -> str:
    """The bank's key of an inline vector: its content."""
    return f"v:{vector.content}"


def run_key(run: str, point: int) -> str:
    """The bank's key of what a run captured at a point."""
    return f"r:{run}:{point}"


def source_of(key: str) -> tuple[str, int] | None:
    """The run and the point that a bank key names; None for an inline vector's."""
    kind, _, rest = key.partition(":")
    run, _, point = rest.rpartition(":")
    return (run, int(point)) if kind == "r" else None


def pieces_of(positions: np.ndarray, rows: np.ndarray | None) -> tuple[Piece, ...]:
    """Different positions, and the row each reads (None: row 0), as pieces by ascending position."""
    if len(positions) == 0:
        return ()
    order = np.argsort(positions)
    positions, rows = positions[order], np.zeros(len(positions), np.int64) if rows is None else rows[order]
    consecutive = np.diff(positions) == 1
    step = np.diff(rows)
    joined = consecutive & ((step == 0) | (step == 1))
    joined[1:] &= ~joined[:-1] | (step[1:] == step[:-1])
    edges = np.concatenate(([0], np.flatnonzero(~joined) + 1, [len(positions)]))
    return tuple(
        (int(positions[a]), int(positions[b - 1]) + 1, int(rows[a]), int(rows[a + 1] - rows[a]) if b - a > 1 else 0)
        for a, b in itertools.pairwise(edges)
    )


def site_number(kind: str, layer: int | None) -> int:
    """A point's number in the counter that noise is made from (`kernels.noise`): 31 bits of a hash of its name, so that
    it depends on nothing else."""
    digest = hashlib.blake2s(f"{kind}[{layer}]".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def _points(places: list[Place]) -> tuple[int, ...]:
    return tuple(place.point for place in places)


def _rows(have: np.ndarray, wanted: np.ndarray, run: str, place: Place) -> np.ndarray:
    """The row of each wanted position among the positions a run has. Raises `MissingSource` for one it lacks."""
    if len(have) == 0:
        raise MissingSource(f"run {run} did not capture {place}")
    rows = np.searchsorted(have, wanted)
    missing = wanted[(rows == len(have)) | (have[np.minimum(rows, len(have) - 1)] != wanted)]
    if len(missing):
        raise MissingSource(
            f"run {run} did not capture {place} at position {missing[0]} (it has {len(have)}, {have[0]} to {have[-1]})"
            "; capture it there, or select fewer tokens"
        )
    return rows.astype(np.int64)
