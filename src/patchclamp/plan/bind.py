"""Binding: a program and one prompt become plain numbers; every name and selection is checked here, before it runs.

A *piece* is (start, stop, row, step): positions start … stop−1, of which position p reads row `row + (p − start)·step`
of the op's value; step is 1 for a row each, 0 for one row for all.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from patchclamp.errors import (
    MissingSource,
    PatchclampError,
    ProgramError,
    ShapeError,
    TokensError,
    UnsupportedSite,
)
from patchclamp.language import (
    Ablate,
    Add,
    Apply,
    Capture,
    Clamp,
    From,
    Mean,
    Named,
    Noise,
    Program,
    Replace,
    Scale,
    Use,
    Vector,
)
from patchclamp.language.ops import DTYPES, MAX_FP32, Op
from patchclamp.language.tokens import Tokens, ids_in
from patchclamp.language.values import orthonormal
from patchclamp.plan.prompt import Case, Prompt
from patchclamp.plan.table import APPLY, BLEND, CAPTURE, LINEAR, NOISE, PROJECT, packed
from patchclamp.sites import SiteMap, SiteRef
from patchclamp.store.named import NamedBank, is_run

PositionRange = tuple[int, int, int, int]
NO_BANK = NamedBank()
MAX_USE_DEPTH, MAX_USED_EDITS = 16, 10_000  # programs that use programs, and the edits of all that are used


class BoundOp(msgspec.Struct, frozen=True, array_like=True):
    """One op in numbers. `values` has a bank key for each point, one for all, or none; `x`, `y` are the op's scalars
    (`plan.table`), `mask` the bank key of a factor a column. Of noise: its `seed`, the number of each point's site, and
    whether it is `relative`; of code, its number (`seed`). `columns`: those of a row that the op changes and works
    with, as a record holds them. `only`: the bank key of token ids, where the op acts only on
    those, or on all but those (`others`). `depends`: what a capture keeps of its ranges depends on what is generated.

    `reaches_cache`: whether the op can change keys and values that later tokens read.
    """

    path: str
    kind: int
    points: tuple[int, ...]
    values: tuple[str, ...]
    ranges: tuple[PositionRange, ...]
    x: float = 0.0
    y: float = 0.0
    reaches_cache: bool = False
    mask: str = ""
    seed: int = 0
    sites: tuple[int, ...] = ()
    relative: bool = False
    only: str = ""
    others: bool = False
    depends: bool = False
    columns: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Every bank key that is read."""
        return (*self.values, *(key for key in (self.mask, self.only) if key))

    def reads(self) -> list[tuple[str, int]]:
        """Bank keys, each with a point where it is read."""
        if len(self.values) == len(self.points):
            found = list(zip(self.values, self.points, strict=True))
        else:
            found = [(key, point) for key in self.values for point in self.points]
        return found + [(key, point) for key in (self.mask, self.only) if key for point in self.points]

    def at(self, here: np.ndarray) -> BoundOp:
        """The part of the op at the points that are `here` [P]; it keeps its place in the program though nothing be
        left."""
        if here.all():
            return self
        mine = [i for i, point in enumerate(self.points) if here[point]]
        points = tuple(self.points[i] for i in mine)
        values = self.values if len(self.values) != len(self.points) else tuple(self.values[i] for i in mine)
        changed = {"points": points, "values": values, "sites": tuple(self.sites[i] for i in mine if self.sites)}
        return msgspec.structs.replace(
            self, **(changed if points else changed | {"values": (), "mask": "", "only": ""})
        )


class BoundProgram(msgspec.Struct, frozen=True, array_like=True):
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
                ranges = [np.arange(start, stop) for start, stop, _, _ in op.ranges]
                for point in op.points:
                    found.setdefault(point, []).extend(ranges)
        return {point: np.unique(np.concatenate(r)) if r else np.arange(0) for point, r in found.items()}


class Source(Protocol):
    """An earlier run, as a place to read rows from."""

    def positions_of(self, point: int) -> np.ndarray:
        """Positions it captured at a point, ascending; empty if none."""
        ...

    def select(self, tokens: Tokens) -> np.ndarray: ...


class Code(NamedTuple):
    """What `Apply` runs, the op's place in its program, what `fn` is `told` beside the rows, and what the op calls the
    site of each point."""

    path: str
    fn: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    sites: Mapping[int, str] = {}


_numbers = itertools.count(1)


class _Binder:
    """`vectors` takes the rows [n, W] of every vector that is bound, by its key, `code` all code by its number."""

    def __init__(
        self, prompt: Prompt, limit: int, sites: SiteMap, source: Callable[[str], Source], bank: Mapping[str, Any],
        vectors: dict[str, np.ndarray], code: dict[int, Code] | None,
    ) -> None:  # fmt: skip
        self.prompt, self.limit, self.sites, self.source = prompt, limit, sites, source
        self.bank, self.vectors, self.code, self.used = bank, vectors, code, 0

    def bind(self, path: str, op: Op, within: tuple[str, ...] = ()) -> list[BoundOp]:
        """An op, or those of the program in the bank that it uses; `within`: the programs that use it."""
        try:
            if not isinstance(op, Use):
                return self._bind(path, op)
            if len(within) == MAX_USE_DEPTH:
                raise ProgramError(f"programs use programs more than {MAX_USE_DEPTH} deep", "name")
            if op.name in within:
                raise ProgramError(f"{' uses '.join((*within, op.name))}: a program cannot use itself", "name")
            program = self._entry(op.name, "name")
            if not isinstance(program, Program):
                raise ProgramError(
                    f"{op.name!r} is {type(program).__name__}, not a program: name it as a value", "name"
                )
            scaled = [op.scaled(each) for each in program.edits]
            self.used += len(scaled)
            if self.used > MAX_USED_EDITS:
                raise ProgramError(f"the programs that are used have more than {MAX_USED_EDITS} edits", "name")
        except PatchclampError as error:
            raise error.under(path) from None
        made = [self.bind(f"{path}.{op.name}[{i}]", each, (*within, op.name)) for i, each in enumerate(scaled)]
        return [bound for many in made for bound in many]

    def _entry(self, name: str, field: str = "") -> Any:
        try:
            return self.bank[name]
        except PatchclampError as error:
            raise error.under(field) if field else error from None

    def _bind(self, path: str, op: Op) -> list[BoundOp]:
        """An op; one of its own for each condition under which it acts."""
        places = self._places(op)
        cases, points = self._cases(op, places), _points(places)
        if isinstance(op, Capture):
            positions = np.concatenate([case.positions for case in cases]) if len(cases) > 1 else cases[0].positions
            ranges, dtype = position_ranges(np.unique(positions), None), float(DTYPES.index(op.dtype))
            return [BoundOp(path, CAPTURE, points, (), ranges, dtype, depends=len(cases) > 1)]
        cases = [case for case in cases if len(case.positions)]
        if not cases:
            raise TokensError(f"{op.tokens} selects no position of this request, so nothing would be edited", "tokens")  # type: ignore[attr-defined]
        cached = any(self.sites.points[point].kind not in ("final_norm", "logits") for point in points)
        return [self._edit(path, op, places, case, cached) for case in cases]

    def _edit(self, path: str, op: Op, places: list[SiteRef], case: Case, cached: bool) -> BoundOp:
        self._summed(op, places[0])
        values, rows, count = self._value(op, places, case)
        ranges = position_ranges(case.positions, rows)
        numbers = {"kind": LINEAR, "ranges": ranges} | self._numbers(op, places, ranges, count)
        if isinstance(op, Apply):
            numbers |= {"kind": APPLY, "seed": self._code(path, op, places)}
        if places[0].columns is not None:
            numbers |= {"columns": packed(places[0].columns)}
        if case.ids:
            numbers |= {"only": self._put(Vector.of(case.ids)), "others": case.others}
        return BoundOp(path, points=_points(places), values=values, reaches_cache=cached, **numbers)

    def _summed(self, op: Op, place: SiteRef) -> None:
        """Raises `UnsupportedSite` for an op that needs a sum over columns that several workers have."""
        summed = isinstance(op, (Ablate, Clamp)) or (isinstance(op, Noise) and op.relative)
        if summed and not self.sites.whole(place):
            kind, many = type(op).__name__, self.sites.shard_count(place.point)
            raise UnsupportedSite(
                f"{kind} needs a sum over the row, and {place} is cut among {many} GPUs: name one head, as in "
                f"{place.name}[{place.layer}, 0], or run with tensor_parallel_size=1",
                "at",
            )

    def _numbers(self, op: Op, places: list[SiteRef], ranges: tuple[PositionRange, ...], count: int) -> dict[str, Any]:
        """What else there is to an op: kind, scalars, and ranges where they are not those of its value, of which there
        are `count` rows."""
        if isinstance(op, Add):
            return {"x": 1.0, "y": op.scale}
        if isinstance(op, Mean):
            return {"x": 0.0, "y": 1.0}
        if isinstance(op, Replace) and op.mask is None:
            return {"x": 1.0 - op.alpha, "y": op.alpha}
        if isinstance(op, Replace):
            (mask,) = self._rows(op.mask, places, "mask", alike=True)
            if len(mask.shape) != 1:
                raise ShapeError(f"one row [D] is needed; this is {list(mask.shape)}", "mask")
            return {"kind": BLEND, "y": op.alpha, "mask": self._put(mask)}
        if isinstance(op, Scale):
            return {"x": op.factor}
        if isinstance(op, (Ablate, Clamp)):
            low, high = (0.0, 0.0) if isinstance(op, Ablate) else (op.low, op.high)
            bounds = {"x": -MAX_FP32 if low is None else low, "y": MAX_FP32 if high is None else high}
            rows = range(count)  # one after the other, at every position
            return {"kind": PROJECT, "ranges": tuple((a, b, row, 0) for row in rows for a, b, *_ in ranges), **bounds}
        if isinstance(op, Noise):
            points = [self.sites.points[place.point] for place in places]
            sites = tuple(site_number(point.kind, point.layer) for point in points)
            return {"kind": NOISE, "y": op.std, "seed": op.seed, "sites": sites, "relative": op.relative,
                    "ranges": ranges if op.std else ()}  # fmt: skip
        return {}

    def _code(self, path: str, op: Apply, places: list[SiteRef]) -> int:
        """The number that code goes by, another one each time it is bound: nobody shares its cached blocks."""
        if self.code is None:
            raise ProgramError(
                "Apply runs Python of yours in the engine: allow it with pc.LM(..., allow_code=True)", "fn"
            )
        number = next(_numbers)
        self.code[number] = Code(path, op.fn, op.wanted_arguments(), {place.point: str(place) for place in places})
        return number

    def _places(self, op: Op) -> list[SiteRef]:
        try:
            return self.sites.resolve(op.at)  # type: ignore[attr-defined]
        except PatchclampError as error:
            raise error.under("at") from None

    def _cases(self, op: Op, places: list[SiteRef]) -> list[Case]:
        """What the op's selection names: positions for certain, then those that it names on condition."""
        tokens: Tokens = op.tokens  # type: ignore[attr-defined]
        self._check_ids(tokens)
        sampled = self.sites.points[places[0].point].rows == "sampled"
        try:
            cases = self.prompt.cases(tokens, self.limit, len(self.prompt.ids) - 1 if sampled else 0)
        except PatchclampError as error:
            raise error.under("tokens") from None
        for case in cases:
            if case.positions.size and case.positions.max() >= self.limit:
                raise TokensError(f"{tokens}: there is no position {case.positions.max()}", "tokens")
            if sampled:
                self._check_sampled(case.positions)
        return cases

    def _check_ids(self, tokens: Tokens, field: str = "tokens") -> None:
        beyond = [leaf for leaf in ids_in(tokens) if leaf.ids[-1] >= self.sites.d_vocab]
        if beyond:
            raise TokensError(
                f"token id {beyond[0].ids[-1]} is outside the vocabulary of {self.sites.d_vocab}: it would never come",
                field,
            )

    def _check_sampled(self, chosen: np.ndarray) -> None:
        """Logits exist only where a token is sampled; `every` means all of those."""
        first = len(self.prompt.ids) - 1
        if chosen.size and chosen.min() < first:
            raise UnsupportedSite(
                f"logits exist only where a token is sampled (position {first} on), not at {chosen.min()}; "
                "use prompt[-1] or generated, or every & ... for those of a selection that are, or capture "
                "final_norm and apply the unembedding",
                "tokens",
            )

    def _value(self, op: Op, places: list[SiteRef], case: Case) -> tuple[tuple[str, ...], np.ndarray | None, int]:
        """Bank keys; for each position its row of the value (None: row 0 for all); and how many rows a key has."""
        positions = case.positions
        if isinstance(op, (Ablate, Clamp)):
            field = "directions" if isinstance(op, Ablate) else "direction"
            (given,) = self._rows(getattr(op, field), places, field, alike=True)
            if not given.array().any(axis=-1).all():
                raise ShapeError("a direction is all zeros", field)
            if isinstance(op, Clamp) and len(given.shape) != 1:
                raise ShapeError(f"one row [D] is needed; this is {list(given.shape)}", field)
            basis = orthonormal(given)
            return (self._put(basis),), None, basis.shape[0]
        if not hasattr(op, "value"):
            return (), None, 0
        if isinstance(op.value, From):  # type: ignore[attr-defined]
            try:
                return (*self._from(op.value, places, case), 0)  # type: ignore[attr-defined]
            except PatchclampError as error:
                raise error.under("value") from None
        vectors = self._rows(op.value, places, "value")  # type: ignore[attr-defined]
        shape = vectors[0].shape
        if len(shape) == 2 and not case.alone:
            told = f"how many tokens {op.tokens} selects is known when they are there: give one row [D]"  # type: ignore[attr-defined]
            raise ShapeError(told, "value")
        if len(shape) == 2 and shape[0] != len(positions):
            told = f"the selection has {len(positions)} positions; the vector has {shape[0]} rows"
            raise ShapeError(told, "value")
        return tuple(map(self._put, vectors)), np.arange(len(positions)) if len(shape) == 2 else None, 0

    def _rows(self, given: Vector | Named, places: list[SiteRef], field: str, alike: bool = False) -> list[Vector]:
        """One vector for all places, or one for each, and only one if they are to be `alike`.

        Raises `MissingSource` for what the bank lacks and `ShapeError` if they are not as wide as the site.
        """
        found = [given] if isinstance(given, Vector) else self._named(given, places, field)
        found = [self._whole(vector, places[0], isinstance(given, Named), field) for vector in found]
        if alike and len({vector.content for vector in found}) > 1:
            raise ShapeError(f"{given.name!r} has a row a place, and here one is needed for all", field)  # type: ignore[union-attr]
        return found[:1] if alike else found

    def _whole(self, vector: Vector, place: SiteRef, named: bool, field: str) -> Vector:
        """A vector as wide as its point, with 0 outside the columns that the place names; a row of heads may be
        [H, E]. What is named may be as wide as the point already."""
        width, parts = self.sites.points[place.point].width, self.sites.parts(place.name)
        first, end = place.columns or (0, width)
        if parts is not None and vector.shape == ((end - first) // parts[1], parts[1]):
            vector = Vector.of(vector.array().reshape(-1))
        wide = vector.shape[len(vector.shape) - 1]
        if wide == width and (named or place.columns in (None, (0, width))):
            return vector
        if wide == end - first:
            return Vector.of(np.pad(vector.array(), [(0, 0)] * (len(vector.shape) - 1) + [(first, width - end)]))
        raise ShapeError(f"{place} is {end - first} wide; the vector is {list(vector.shape)}", field)

    def _named(self, given: Named, places: list[SiteRef], field: str) -> list[Vector]:
        entry = self._entry(given.name, field)
        if isinstance(entry, Program):
            raise ProgramError(f"{given.name!r} is a program: pc.Use({given.name!r}) uses it", field)
        if is_run(entry):
            raise ProgramError(f"{given.name!r} is a run: pc.From({given.name!r}, site) reads it", field)
        if isinstance(entry, Vector):
            return [entry]
        labels = [self.sites.label(place.point) for place in places]
        lacking = [place for place, label in zip(places, labels, strict=True) if label not in entry.rows]
        if lacking:
            raise MissingSource(f"{given.name!r} has no mean of {lacking[0]}; it has {', '.join(entry.rows)}", field)
        return [entry.rows[label] for label in labels]

    def _put(self, vector: Vector) -> str:
        key = vector_key(vector)
        self.vectors[key] = vector.rows()
        return key

    def _run(self, name: str) -> tuple[str, Source]:
        """A run by its key or its name in the bank: its key, and what it captured."""
        kept = self.bank[name] if name in self.bank else None  # noqa: SIM401  a bank's `get` raises
        if kept is not None and not is_run(kept):
            raise ProgramError(f"{name!r} in the bank is {type(kept).__name__}, not a run")
        key = name if kept is None else kept.key
        try:
            return key, self.source(key)
        except MissingSource as error:
            raise error if key == name else MissingSource(f"{name!r} in the bank: {error.message}") from None

    def _from(self, given: From, places: list[SiteRef], case: Case) -> tuple[tuple[str, ...], np.ndarray | None]:
        (run, source), positions = self._run(given.run), case.positions
        read = places if given.site is None else self.sites.resolve(given.site)
        if len(read) not in (1, len(places)):
            raise ShapeError(f"{given.site} names {len(read)} layers; {len(places)} are written: give one, or as many")
        if self.sites.points[read[0].point].width != self.sites.points[places[0].point].width:
            raise ShapeError(f"{read[0]} and {places[0]} differ in width")
        if self.sites.shard_count(read[0].point) != self.sites.shard_count(places[0].point):
            raise UnsupportedSite(
                f"{read[0]} and {places[0]} are cut differently among GPUs: give the rows of run[...]"
            )
        if read[0].columns not in (None, places[0].columns):
            raise ShapeError(f"{read[0]} and {places[0]} are not the same part of a row: give the rows of run[...]")
        wanted = positions if given.position is None else source.select(given.position)
        if given.position is not None:
            self._check_ids(given.position, "position")
        if given.position is not None and len(wanted) != 1 and not case.alone:
            raise ShapeError(f"{given.position} names {len(wanted)} positions; for tokens yet to come it must be one")
        if len(wanted) not in (1, len(positions)):
            raise ShapeError(f"{given.position} names {len(wanted)} positions; {len(positions)} are written")
        rows = {_rows(source.positions_of(place.point), wanted, run, place).tobytes() for place in read}
        if len(rows) > 1:
            raise MissingSource(f"run {given.run} captured other positions at some of the layers of {read[0].name}")
        found = np.frombuffer(rows.pop(), np.int64)
        keys = tuple(run_key(run, place.point) for place in read)
        return keys, np.repeat(found, len(positions)) if len(found) == 1 else found


def bind(
    program: Program, run: str, prompt: Prompt, max_tokens: int, sites: SiteMap, source: Callable[[str], Source],
    bank: Mapping[str, Any] | None = None, vectors: dict[str, np.ndarray] | None = None,
    code: dict[int, Code] | None = None,
) -> BoundProgram:  # fmt: skip
    """Checks a program against a prompt, a model, and the runs and names (`bank`) it reads, and puts it into numbers.

    Positions are those that are inputs: below len(prompt) + max_tokens − 1. `vectors` takes the rows of every vector,
    by its key, `code` all code by its number (None: no code is allowed).
    """
    limit = len(prompt.ids) + max_tokens - 1
    binder = _Binder(
        prompt, limit, sites, source, NO_BANK if bank is None else bank, {} if vectors is None else vectors, code
    )
    return BoundProgram(run, len(prompt.ids), tuple(made for path, op in program.ops for made in binder.bind(path, op)))


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


def position_ranges(positions: np.ndarray, rows: np.ndarray | None) -> tuple[PositionRange, ...]:
    """Different positions, and the row each reads (None: row 0), as ranges by ascending position."""
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


def _points(places: list[SiteRef]) -> tuple[int, ...]:
    return tuple(place.point for place in places)


def _rows(have: np.ndarray, wanted: np.ndarray, run: str, place: SiteRef) -> np.ndarray:
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
