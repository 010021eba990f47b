"""Bind a program to one prompt: check all names and selections before the run, and lower each op to arrays.

To add an op of an existing kind (`plan.bound`), define its struct in `language.ops` and its lowering function here. The
function reads the prompt, the model and the bank through its `Context`.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
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
    unknown,
)
from patchclamp.language import (
    Apply,
    Capture,
    Features,
    From,
    Named,
    Probe,
    Program,
    Readout,
    SameRun,
    Site,
    SiteOp,
    Tokens,
    Use,
    Vector,
    When,
    ops,
)
from patchclamp.language.conditions import Above, Every, Not, ProbeCondition, comparisons
from patchclamp.language.dictionaries import FeatureReader
from patchclamp.language.ops import FeatureOp, Op
from patchclamp.language.probes import activated
from patchclamp.language.site import DERIVED, parse_site
from patchclamp.language.tokens import Between, Joined, Positions, Selection, every, ids_in, leaves
from patchclamp.language.values import DTYPES, MAX_FP32, POOLS, Value, ValueLike, as_value, check_plane, orthonormal
from patchclamp.plan.bound import (
    APPLY,
    BITS,
    KEYS,
    LATCHES,
    MAX_RANK,
    Action,
    All,
    Attended,
    AttentionReader,
    Blend,
    BoundOp,
    BoundProgram,
    Compare,
    Condition,
    Encoded,
    Factored,
    Guard,
    Keep,
    Latch,
    Linear,
    Noisy,
    NormedAdd,
    PositionRange,
    Projection,
    Rotation,
    RunCode,
    Span,
    Store,
    check_attention,
    check_one_way,
    noise_stream,
    own_key,
    pack_columns,
    position_ranges,
    run_key,
)
from patchclamp.plan.cells import CellRecords, cells_of
from patchclamp.plan.prompt import Case, Prompt
from patchclamp.plan.table import record_work
from patchclamp.sites import LENS, Dictionary, Point, SiteMap, SiteRef
from patchclamp.store.named import Means, NamedBank, SourceRun, is_run


class Context(Protocol):
    """Gives a lowering function access to one op's site and selection in a prompt."""

    conditional: bool

    def value(self, value: Value) -> tuple[tuple[str, ...], np.ndarray | None]:
        """Return a value's bank keys (one per point, or one for all), and the row index for each selected position
        (None: row 0 for all). Errors have the path `value`."""
        ...

    def rows(self, count: int) -> np.ndarray:
        """Return the row index for each selected position, for a value with `count` rows. Raises `ShapeError` if the
        counts differ."""
        ...

    def padded(self, vector: Vector, field: str) -> Vector:
        """Pad a vector of the site's width to the point's width."""
        ...

    def vector(self, value: ValueLike, field: str) -> Vector:
        """Return a field's vector, of the site's width. All points must share one vector."""
        ...

    def put(self, vector: Vector) -> str:
        """Add a vector to the request's vectors, and return its bank key."""
        ...

    def needs_whole_rows(self, op: SiteOp) -> None:
        """Raise `UnsupportedSite` if rows are sharded: the op sums over whole rows."""
        ...

    def points(self) -> list[tuple[str, int | None]]:
        """Return the kind and layer of each point."""
        ...

    def check_lens(self, lens: ops.Lens) -> None:
        """Raise `UnsupportedSite` if the model has no lens, `ProgramError` if `top` exceeds the vocabulary,
        `ShapeError` if the translators have a different width."""
        ...

    def heads(self) -> tuple[int, int, int]:
        """Return the index of the op's first head, its number of heads, and the request's number of positions."""
        ...

    def check_keys(self, tokens: Tokens, field: str) -> None:
        """Raise `TokensError` if this request cannot have the selected keys. Keys are selected after the run."""
        ...

    def edges(self, keys: Tokens | Vector, removed: bool = False) -> tuple[tuple[int, int], ...]:
        """Return the key ranges to edit, or () if `keys` is a vector of pattern rows. Drops queries that precede all
        keys. Raises `TokensError` if a selection depends on generated tokens, no query remains, a query loses all its
        keys (with `removed`), or a new row has nonzero probabilities for keys after its query."""
        ...

    def dictionary(self, ids: tuple[int, ...]) -> Dictionary:
        """Return the op's SAE. Raises `ProgramError` for an id out of range."""
        ...

    def read_before(self, action: Action, ref: SiteRef) -> None:
        """Add an op with the given action on the same tokens, at the earlier site `ref`."""
        ...

    def code(self, op: ops.Apply) -> int:
        """Register an op's code and return its number. Raises `ProgramError` if code is not allowed."""
        ...


class Lowered(msgspec.Struct, frozen=True):
    """A lowered op, before points and positions are assigned.

    values: bank keys
    rows: the row index into the value for each selected position; None: row 0 for all
    repeats: the number of times the action runs at each position, with the value's rows 0, 1, …
    """

    action: Action
    values: tuple[str, ...] = ()
    rows: np.ndarray | None = None
    repeats: int = 1


@functools.singledispatch
def lower(op: SiteOp, context: Context) -> Lowered:
    """Lower an op. Errors have the field's name as their path."""
    raise NotImplementedError(f"no lowering for {type(op).__name__}")


@lower.register
def _capture(op: ops.Capture, context: Context) -> Lowered:
    dtype, pool = DTYPES.index(op.dtype), POOLS.index(op.pool) + 1 if op.pool else 0
    if op.at.name in DERIVED:
        first, heads, positions = context.heads()
        spans = [(f"spans[{i}]", span) for i, span in enumerate(op.spans or ())]
        for field, tokens in spans if op.keys is None else [("keys", op.keys)]:
            context.check_keys(tokens, field)
        keys = 0 if op.top else -(-positions // KEYS) * KEYS
        reader = AttentionReader(op.at.name, first, heads, keys)
        return Lowered(Keep(0, context.conditional, reader=reader, top=op.top or 0))
    if op.project is None:
        return Lowered(Keep(dtype, context.conditional, pool=pool))
    matrix = _matrix(op, op.project, "project", context)
    return Lowered(Keep(dtype, context.conditional, context.put(matrix), len(matrix.rows()), pool))


@lower.register
def _probe(op: ops.Probe, context: Context) -> Lowered:
    matrix, pool = _matrix(op, op.weight, "weight", context), POOLS.index(op.pool) + 1 if op.pool else 0
    if op.bias is not None and op.bias.shape != (len(matrix.rows()),):
        raise ShapeError(f"expected shape [{len(matrix.rows())}], got {list(op.bias.shape)}", "bias")
    return Lowered(Keep(0, context.conditional, context.put(matrix), len(matrix.rows()), pool, op.name))


@lower.register
def _lens(op: ops.Lens, context: Context) -> Lowered:
    context.check_lens(op)
    return Lowered(Keep(0, context.conditional, lens=True))


@lower.register
def _features(op: ops.Features, context: Context) -> Lowered:
    dictionary = context.dictionary(op.ids or ())
    card = dictionary.card
    if op.top is not None and op.top > card.features:
        raise ProgramError(f"expected at most {card.features} (the features of {op.name!r}), got {op.top}", "top")
    first, _ = dictionary.at.columns or (0, 0)
    reader = FeatureReader(op.name, op.ids, card.content, first)
    top = len(op.ids) if op.ids else op.top or 0
    return Lowered(Keep(DTYPES.index(card.dtype), context.conditional, reader=reader, top=top))


@lower.register
def _set_feature(op: ops.SetFeature, context: Context) -> Lowered:
    dictionary = context.dictionary(op.id)
    values = np.array(op.value, np.float64)
    if op.mode == "add" and not op.only_if_active and not dictionary.card.normalizes:
        added = values @ dictionary.rows(op.id).decoder
        return Lowered(Linear(1.0, 1.0), (context.put(context.padded(Vector.of(added), "value")),))
    still = np.zeros_like(values)
    offset = still if op.mode == "scale" else values
    slope = {"set": still - 1, "add": still, "scale": values - 1}[op.mode]
    otherwise = still if op.only_if_active else offset
    if not dictionary.card.is_local or dictionary.at != dictionary.to:
        gates = zip(offset.tolist(), slope.tolist(), otherwise.tolist(), strict=True)
        return _encoded(dictionary, context, op.id, tuple(gates))
    rows = dictionary.rows(op.id)
    along, added = (context.padded(Vector.of(each), "id") for each in (rows.encoder, rows.decoder))
    gates = context.put(gates_of(len(op.id), rows.bias, rows.threshold, offset, slope, otherwise))
    return Lowered(_factored(op, context, along, added), (gates,))


@lower.register
def _reconstruct(op: ops.Reconstruct, context: Context) -> Lowered:
    return _encoded(context.dictionary(()), context)


def _encoded(
    dictionary: Dictionary, context: Context, ids: tuple[int, ...] = (),
    gates: tuple[tuple[float, float, float], ...] = (),
) -> Lowered:  # fmt: skip
    """Lower an edit that runs the whole encoder. If the SAE reads and writes different sites, also add the read."""
    action = Encoded(dictionary.card.name, dictionary.card.content, ids, gates)
    if dictionary.at != dictionary.to:
        context.read_before(msgspec.structs.replace(action, reads=True), dictionary.at)
    return Lowered(action)


def _matrix(op: Readout, value: Vector | Named, field: str, context: Context) -> Vector:
    """Return a readout's matrix, [k, D]."""
    if any(kind == "logits" for kind, _ in context.points()):
        raise UnsupportedSite(
            "logits cannot be projected: capture final_norm and project by W times the unembedding", "at"
        )
    context.needs_whole_rows(op)
    matrix = context.vector(value, field)
    if len(matrix.rows()) > matrix.shape[-1]:
        raise ShapeError(f"expected a matrix [k, D] with at most D rows, got {list(matrix.shape)}", field)
    return matrix


@lower.register
def _add(op: ops.Add, context: Context) -> Lowered:
    if op.norm is None:
        return Lowered(Linear(1.0, op.scale), *context.value(as_value(op.value)))
    context.needs_whole_rows(op)
    return Lowered(NormedAdd(op.scale), *context.value(as_value(op.value)))


@lower.register
def _replace(op: ops.Replace, context: Context) -> Lowered:
    if op.at.name in DERIVED:
        assert isinstance(op.value, Vector)
        *several, width = op.value.shape
        _, _, limit = context.heads()
        if width > limit:
            raise ShapeError(f"expected rows of at most {limit} numbers, got {list(op.value.shape)}", "value")
        rows = context.rows(several[0]) if several else None
        return Lowered(Attended(context.edges(op.value), op.alpha, context.put(op.value)), rows=rows)
    values, rows = context.value(as_value(op.value))
    if op.basis is not None:
        context.needs_whole_rows(op)
        basis = orthonormal(_directions(context, op.basis, "basis"))
        if not op.alpha:
            return Lowered(Linear(1.0, 0.0))
        return Lowered(_factored(op, context, basis, basis, toward=op.alpha), values, rows)
    if op.mask is None:
        return Lowered(Linear(1.0 - op.alpha, op.alpha), values, rows)
    return Lowered(Blend(op.alpha, context.put(_one_row(context.vector(op.mask, "mask"), "mask"))), values, rows)


@lower.register
def _zero(op: ops.Zero, context: Context) -> Lowered:
    return Lowered(Linear(0.0, 0.0))


@lower.register
def _mean(op: ops.Mean, context: Context) -> Lowered:
    return Lowered(Linear(0.0, 1.0), *context.value(as_value(op.value)))


@lower.register
def _scale(op: ops.Scale, context: Context) -> Lowered:
    if op.at.name in DERIVED:
        return Lowered(Attended(context.edges(op.keys or every), op.factor))
    return Lowered(Linear(op.factor, 0.0))


@lower.register
def _knockout(op: ops.Knockout, context: Context) -> Lowered:
    return Lowered(Attended(context.edges(op.keys, removed=True)))


@lower.register
def _ablate(op: ops.Ablate, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    basis = orthonormal(_directions(context, op.directions, "directions"))
    if op.strength != 1.0:
        gates = context.put(gates_of(len(basis.rows()), slope=-op.strength))
        return Lowered(_factored(op, context, basis, basis), (gates,))
    return Lowered(Projection(0.0, 0.0), (context.put(basis),), repeats=basis.shape[0])


@lower.register
def _low_rank(op: ops.LowRank, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    weight, rotation = context.vector(op.weight, "weight"), context.vector(op.rotation, "rotation")
    rank = len(weight.rows())
    if len(rotation.rows()) != rank or rank > weight.shape[-1]:
        raise ShapeError(f"expected the weight's shape {list(weight.shape)}, got {list(rotation.shape)}", "rotation")
    if op.bias is not None and op.bias.shape != (rank,):
        raise ShapeError(f"expected shape [{rank}], got {list(op.bias.shape)}", "bias")
    change = Vector.of(weight.rows().astype(np.float64) - rotation.rows())
    gates = context.put(gates_of(rank, 0.0 if op.bias is None else op.bias.array(), slope=1.0))
    return Lowered(_factored(op, context, change, rotation), (gates,))


def _factored(op: SiteOp, context: Context, along: Vector, added: Vector, toward: float = 0.0) -> Factored:
    """Return the `Factored` action that adds Σ g(e · h) · d, over the rows e of `along` and d of `added`."""
    if any(kind == "logits" for kind, _ in context.points()):
        raise UnsupportedSite(f"{type(op).__name__} does not support logits: edit final_norm", "at")
    rows = np.concatenate([along.rows(), added.rows()])
    if len(rows) > 2 * MAX_RANK:
        raise ShapeError(f"{type(op).__name__} supports a rank of at most {MAX_RANK}, got {len(rows) // 2}")
    return Factored(len(rows) // 2, context.put(Vector.of(rows)), toward)


def gates_of(rank: int, bias: Any = 0.0, threshold: Any = -MAX_FP32, offset: Any = 0.0, slope: Any = 0.0,
             otherwise: Any = 0.0) -> Vector:  # fmt: skip
    """Return the coefficients [k, 5] of a `Factored` action; no threshold by default."""
    numbers = np.empty((rank, 5), np.float32)
    for i, each in enumerate((bias, threshold, offset, slope, otherwise)):
        numbers[:, i] = each
    return Vector.of(numbers)


@lower.register
def _clamp(op: ops.Clamp, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    unit = orthonormal(_one_row(_directions(context, op.direction, "direction"), "direction"))
    bounds = -MAX_FP32 if op.low is None else op.low, MAX_FP32 if op.high is None else op.high
    return Lowered(Projection(*bounds), (context.put(unit),))


@lower.register
def _rotate(op: ops.Rotate, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    if any(kind == "logits" for kind, _ in context.points()):
        raise UnsupportedSite("logits cannot be rotated: rotate final_norm, with a plane of width D", "at")
    basis = orthonormal(check_plane(context.vector(op.plane, "plane"), "plane"))
    angle = math.radians(op.degrees)
    return Lowered(Rotation(math.cos(angle), math.sin(angle), op.relative), (context.put(basis),))


@lower.register
def _noise(op: ops.Noise, context: Context) -> Lowered:
    if op.relative:
        context.needs_whole_rows(op)
    streams = tuple(noise_stream(kind, layer) for kind, layer in context.points())
    return Lowered(Noisy(op.std, op.seed, op.relative, streams), repeats=1 if op.std else 0)


@lower.register
def _apply(op: ops.Apply, context: Context) -> Lowered:
    return Lowered(RunCode(context.code(op)))


def _directions(context: Context, value: ValueLike, field: str) -> Vector:
    directions = context.vector(value, field)
    if not directions.array().any(axis=-1).all():
        raise ShapeError("expected nonzero directions, got a row of zeros", field)
    return directions


def _one_row(vector: Vector, field: str) -> Vector:
    if len(vector.shape) != 1:
        raise ShapeError(f"expected one row [D], got {list(vector.shape)}", field)
    return vector


NO_BANK = NamedBank()
MAX_USE_DEPTH, MAX_USED_EDITS = 16, 10_000  # limits on nested `Use`: depth, and total edits


class Code(NamedTuple):
    """A function that edits rows, such as that of an `Apply` op.

    path: the op's path in its program
    arguments: the optional arguments that `fn` takes
    sites: the site's text form, by point
    what: a description of the code, for errors
    """

    path: str
    fn: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    sites: Mapping[int, str] = {}
    what: str = "Apply"


code_numbers = itertools.count(1)


def bind(
    program: Program, run: str, prompt: Prompt, max_tokens: int, sites: SiteMap, source: Callable[[str], SourceRun],
    bank: Mapping[str, Any] | None = None, vectors: dict[str, np.ndarray] | None = None,
    code: dict[int, Code] | None = None, known: Known | None = None,
) -> BoundProgram:  # fmt: skip
    """Check a program against a prompt, a model, and the runs and bank names it reads, and lower it.

    Positions are those of input tokens, below len(prompt) + max_tokens − 1. `vectors` receives every vector's rows
    [n, W] by bank key, and `code` the functions by number (None: code is not allowed). `known` caches work across
    programs that are bound together.

    Raises `ProgramError`, `TokensError`, `ShapeError`, `UnsupportedSite`, `MissingSource` or `CapacityError`, with the
    op's path.
    """
    binder = _Binder(
        prompt, len(prompt.ids) + max_tokens - 1, sites, source, NO_BANK if bank is None else bank,
        {} if vectors is None else vectors, code, Known() if known is None else known,
    )  # fmt: skip
    ops = binder.program(program)
    check_one_way(ops, sites.label)
    check_attention(ops)
    return BoundProgram(run, len(prompt.ids), ops)


class Known:
    """A cache shared by the programs of one call: refs by site, positions by selection, rows by run, and ranges by
    positions. Entries keyed by an array's id also hold the array, so that the id is not reused.

    Binding calls `count(records)` with each op's work (`record_work`), and aborts if it raises.
    """

    def __init__(self, count: Callable[[int], None] | None = None) -> None:
        self.count: Callable[..., Any] = count or (lambda records: None)
        self.refs: dict[Site, list[SiteRef]] = {}
        self.cases: dict[tuple[Any, ...], list[Case]] = {}  # by selection, length, limit and lowest position
        self.merged: dict[tuple[int, ...], tuple[np.ndarray, list[Case]]] = {}  # positions, by ids of the cases' arrays
        self.selected: dict[tuple[Selection, str], np.ndarray] = {}  # positions in a run
        self.rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.ranges: dict[tuple[int, int], tuple[tuple[PositionRange, ...], np.ndarray, np.ndarray | None]] = {}

    def merged_of(self, cases: list[Case]) -> np.ndarray:
        """Return all positions of the given cases, ascending. The same cases give the same array object."""
        key = tuple(id(case.positions) for case in cases)
        if key not in self.merged:
            self.merged[key] = np.unique(np.concatenate([case.positions for case in cases])), cases
        return self.merged[key][0]

    def rows_of(self, captured: np.ndarray, wanted: np.ndarray, run: str, ref: SiteRef) -> np.ndarray:
        """Return the cached result of `_rows`."""
        key = id(captured), id(wanted)
        if key not in self.rows:
            self.rows[key] = _rows(captured, wanted, run, ref), captured, wanted
        return self.rows[key][0]

    def ranges_of(self, positions: np.ndarray, rows: np.ndarray | None) -> tuple[PositionRange, ...]:
        """Return the cached result of `position_ranges`."""
        key = id(positions), id(rows)
        if key not in self.ranges:
            self.ranges[key] = position_ranges(positions, rows), positions, rows
        return self.ranges[key][0]


def is_positional(tokens: Selection | None) -> bool:
    """True if a selection depends only on positions, or is None."""
    if isinstance(tokens, Joined):
        return is_positional(tokens.left) and is_positional(tokens.right)
    return tokens is None or isinstance(tokens, Positions)


class _Binder:
    """Binds the ops of one program to one prompt, at positions below `limit`."""

    def __init__(
        self, prompt: Prompt, limit: int, sites: SiteMap, source: Callable[[str], SourceRun], bank: Mapping[str, Any],
        vectors: dict[str, np.ndarray], code: dict[int, Code] | None, known: Known,
    ) -> None:  # fmt: skip
        self.prompt, self.limit, self.sites, self._source, self.known = prompt, limit, sites, source, known
        self._bank, self._vectors, self._code, self._used_edits = bank, vectors, code, 0
        self.own_keys = itertools.count()
        self._cases_of_prompt: dict[tuple[Any, ...], list[Case]] = {}  # by selection and lowest position
        self._edits_at: collections.Counter[int] = collections.Counter()  # the edits bound so far, by point
        self._read_after: dict[str, list[int]] = {}  # `_edits_at` of a probe's points when the probe was read
        self._probes: dict[str, Probe] = {}  # by name; includes features that conditions compare
        self._tests: dict[str, list[BoundOp]] = {}  # each probe's comparisons
        self._bit_of: dict[Any, int] = {}  # by comparison; also bits and latches of conditions, by their key
        self._bits, self._latches = itertools.count(), itertools.count()
        self._features_compared: dict[tuple[str, int], list[Selection]] = {}  # token selections, by SAE and feature id
        self._spans: dict[tuple[tuple[int, int], bool], Guard] = {}  # by delimiters and side (inside or outside)
        self._span_ops: list[BoundOp] = []

    def program(self, program: Program) -> tuple[BoundOp, ...]:
        """Bind all ops, preceded by the ops that find delimiters. A probe's comparisons directly follow its first read,
        so later edits at its site change no decision."""
        ops = [bound for path, op in program.ops for bound in self.bind(path, op)]
        return tuple(
            each for op in (*self._span_ops, *ops)
            for each in (op, *(self._tests.get(op.action.probe, ()) if isinstance(op.action, Keep) else ()))
        )  # fmt: skip

    def bind(self, path: str, op: Op, users: tuple[str, ...] = ()) -> list[BoundOp]:
        """Bind an op or, for a `Use`, the used program's edits. `users`: the names of the enclosing `Use` ops."""
        try:
            if isinstance(op, When):
                conditional = self._when(path, op)
                self.known.count(record_work(conditional))
                return conditional
            if not isinstance(op, Use):
                assert isinstance(op, SiteOp)
                bound = self._read(path, op) if isinstance(op, Probe) else self._bind(path, op)
                self.known.count(record_work(bound))
                return bound
            edits = self._used(op, users)
        except PatchclampError as error:
            raise error.under(path) from None
        used = (self.bind(f"{path}.{op.name}[{i}]", edit, (*users, op.name)) for i, edit in enumerate(edits))
        return list(itertools.chain.from_iterable(used))

    def _used(self, op: Use, users: tuple[str, ...]) -> list[Op]:
        """Return the scaled edits of the program that a `Use` names."""
        if len(users) == MAX_USE_DEPTH:
            raise ProgramError(f"pc.Use is nested more than {MAX_USE_DEPTH} levels deep", "name")
        if op.name in users:
            raise ProgramError(f"{' uses '.join((*users, op.name))}: a program cannot use itself", "name")
        program = self.entry(op.name, "name")
        if not isinstance(program, Program):
            raise ProgramError(
                f"expected a program, got {type(program).__name__} {op.name!r}: use it as a value", "name"
            )
        self._used_edits += len(program.edits)
        if self._used_edits > MAX_USED_EDITS:
            raise ProgramError(
                f"expected at most {MAX_USED_EDITS} edits in used programs, got {self._used_edits}", "name"
            )
        return [op.scaled(edit) for edit in program.edits]

    def _when(self, path: str, op: When) -> list[BoundOp]:
        """Bind conditional edits: first the probes' reads, then the decision, then the guarded edits."""
        ops: list[BoundOp] = []
        points: dict[int, Point] = {}  # the points that the probes read, by depth
        within = np.ones(self.limit, bool)  # the positions that all probes read
        try:
            asked = self._by_probes(op.condition)
            for each in comparisons(asked):
                ops += self._read(f"{path}.condition", each.probe, is_compared=True)
                point, read = self._comparison(f"{path}.condition", each)
                within &= np.isin(np.arange(self.limit), read)
                if points.setdefault(self.sites.depth(point.number), point) != point:
                    other = points[self.sites.depth(point.number)].number
                    raise UnsupportedSite(
                        "expected one site per layer in a condition's probes, got "
                        f"{self.sites.label(other)} and {self.sites.label(point.number)}", "at"
                    )  # fmt: skip
        except PatchclampError as error:
            raise error.under("condition") from None
        last = points[max(points)]
        where = position_ranges(np.flatnonzero(within), None)
        if not where:
            raise TokensError("the condition can never hold: no token is read by all of its probes", "condition")

        def decide(new: Callable[[str], int], field: str, make: Callable[[int], All | Latch]) -> int:
            key = make(0), last.number, where
            if key not in self._bit_of:  # otherwise an equal earlier condition decided it
                self._bit_of[key] = new(field)
                ops.append(BoundOp(f"{path}.condition", make(self._bit_of[key]), (last.number,), (), where))
            return self._bit_of[key]

        def bit_of(condition: ProbeCondition, negated: bool = False) -> int:
            """Return the bit that holds the value of a condition or, if `negated`, of its negation."""
            if isinstance(condition, Not):
                return bit_of(condition.condition, not negated)
            parts = condition.conditions if isinstance(condition, Every) else (condition,)
            if isinstance(condition, Above) and not negated:
                return self._bit_of[condition]
            bits, wanted = self._bit_of, {self._bit_of[part]: 1 for part in parts if isinstance(part, Above)}
            for part in parts:
                if isinstance(part, Not) and isinstance(part.condition, Above) and bits[part.condition] not in wanted:
                    wanted[bits[part.condition]] = 0
                elif not isinstance(part, Above):
                    wanted[bit_of(part)] = 1
            mask, set_bits = sum(1 << bit for bit in wanted), sum(one << bit for bit, one in wanted.items())
            return decide(self._next_bit, "condition", lambda bit: All(bit, mask, set_bits, negated))

        guard = Guard(bit_of(asked))
        if op.scope != "token":
            if op.scope == "prompt":
                end = len(self.prompt.ids) - 1
                where = tuple(PositionRange(end, end + 1) for each in where if each.start <= end < each.stop)
                if not where:
                    raise TokensError(
                        "the condition is evaluated at the last prompt token, which its probes do not read", "condition"
                    )
            guard = Guard(0, decide(self._next_latch, "scope", lambda latch: Latch(guard.bit, latch)))
        first = where[0].start
        return [*ops, *itertools.chain.from_iterable(
            self._conditional(f"{path}.edits[{i}]", edit, guard, last, first) for i, edit in enumerate(op.edits)
        )]  # fmt: skip

    def _by_probes(self, condition: ProbeCondition) -> ProbeCondition:
        """Replace each feature in a condition by a probe with the feature's encoder row; the SAE must be local."""
        if isinstance(condition, Not):
            return Not(self._by_probes(condition.condition))
        if isinstance(condition, Every):
            return Every(tuple(map(self._by_probes, condition.conditions)))
        assert isinstance(condition, Above)
        features = condition.probe
        if not isinstance(features, Features):
            return condition
        if features.ids is None or not -len(features.ids) <= condition.output < len(features.ids):
            raise ProgramError("expected an index into ids=, as in pc.Features(name, ids=[3, 40])[0] > t", "ids")
        number, dictionary = features.ids[condition.output], self.dictionary(features.name)
        card, limit = dictionary.card, condition.threshold
        if number >= card.features:
            raise ProgramError(f"expected a feature from 0 to {card.features - 1}, got {number}", "ids")
        if not card.is_local:
            raise ProgramError(
                f"features of {card.name!r} depend on each other or on the row's norm: a condition requires an SAE "
                "without k or normalisation", "name"
            )  # fmt: skip
        if limit < 0 or (limit == 0 and condition.inclusive):
            raise ProgramError(f"expected a positive threshold (features are at least 0), got {limit}", "threshold")
        rows = dictionary.rows([number])
        active = float(rows.threshold[0])
        threshold, inclusive = (limit, condition.inclusive) if limit > active else (active, False)
        names = self._features_compared.setdefault((features.name, number), [])
        if features.tokens not in names:
            names.append(features.tokens)
        name = f"{features.name}.{number}" + (f".{i}" if (i := names.index(features.tokens)) else "")
        probe = Probe(Vector.of(rows.encoder), parse_site(card.at), features.tokens, Vector.of(rows.bias), name=name)
        return Above(probe, threshold, 0, inclusive)

    def _next_bit(self, field: str) -> int:
        bit = next(self._bits)
        if bit >= BITS:
            raise ProgramError(
                f"too many conditions and delimiters: the program needs more than {BITS} bits. Each comparison or "
                "joined condition takes 1, each pair of delimiters in generated text 2, or 3 to select tokens outside",
                field
            )  # fmt: skip
        return bit

    def _next_latch(self, field: str) -> int:
        latch = next(self._latches)
        if latch >= LATCHES:
            raise ProgramError(
                f"a program supports at most {LATCHES} pairs of delimiters in generated text and conditions with scope "
                "'prompt' or 'onwards': use fewer, or delimiters in the prompt, prompt & between(...)", field
            )  # fmt: skip
        return latch

    def _read(self, path: str, probe: Probe, is_compared: bool = False) -> list[BoundOp]:
        """Bind a probe's read when the program first uses the probe. Raises `ProgramError` if a later use follows an
        edit at the probe's site, unless that use only compares existing scores."""
        if self._probes.setdefault(probe.name, probe) != probe:
            raise ProgramError(
                f"duplicate name {probe.name!r} (a probe, or a feature in a condition): rename the probe", "name"
            )
        counts = [self._edits_at[ref.point] for ref in self._resolve(probe)]
        if probe.name in self._read_after:
            if self._read_after[probe.name] != counts and not is_compared:
                raise ProgramError(
                    f"{probe.at} is edited between two reads of probe {probe.name!r}: rename the second",
                    "name",
                )
            return []
        self._read_after[probe.name] = counts
        return self._bind(path, probe)

    def _comparison(self, path: str, each: Above) -> tuple[Point, np.ndarray]:
        """Assign a bit to a comparison. Returns the probe's point and positions."""
        probe = each.probe
        if probe.pool is not None:
            raise ProgramError(f"probe {probe.name!r} is pooled, so its score is only available after the run", "pool")
        refs, cases = self._resolve(probe), self.select(probe.tokens, self._resolve(probe)[0])
        point = self.sites.points[refs[0].point]
        if len(refs) > 1 or self.sites.shard_count(point.number) > 1 or self.sites.stages > 1:
            raise UnsupportedSite(f"a condition requires an unsharded site of one layer, got {probe.at}", "at")
        if point.rows == "sampled":
            raise UnsupportedSite(f"{refs[0]} exists only at sampled positions, so a condition cannot read it", "at")
        if len(cases) != 1 or not cases[0].alone:
            raise TokensError(
                f"expected fixed positions for a condition's probe; {probe.tokens} depends on generated tokens",
                "tokens",
            )
        if each in self._bit_of:
            return point, cases[0].positions
        self._bit_of[each] = self._next_bit("")
        matrix = _OpBinder(self, path, probe, refs, cases[0], False).vector(probe.weight, "weight")
        outputs, columns = len(matrix.rows()), refs[0].columns
        if not -outputs <= each.output < outputs:
            raise ProgramError(
                f"output {each.output} is out of range for probe {probe.name!r} with {outputs} outputs", "output"
            )
        ranges = tuple(one._replace(row=each.output % outputs) for one in position_ranges(cases[0].positions, None))
        test = BoundOp(
            path, Compare(product_above(each), self._bit_of[each], probe.name), (point.number,), (self.put(matrix),),
            ranges, columns=0 if columns is None else pack_columns(columns),
        )  # fmt: skip
        self.known.count(record_work([test]))
        self._tests.setdefault(probe.name, []).append(test)
        return point, cases[0].positions

    def _conditional(self, path: str, edit: Op, guard: Guard, last: Point, first: int) -> list[BoundOp]:
        """Bind a conditional edit, starting at position `first`."""
        assert isinstance(edit, SiteOp)
        try:
            bound = self._bind(path, edit)
            if any(op.guard is not None for op in bound):
                raise TokensError(f"{edit.tokens} in generated text is not supported in pc.When", "tokens")
            for op in bound:
                if isinstance(op.action, Encoded):
                    raise ProgramError("pc.When supports feature edits only on an SAE with a local encoder", "name")
                if isinstance(op.action, Attended):
                    raise ProgramError("pc.When does not support attention edits: edit q, k, v or z", "at")
                for point in op.points if op.is_edit else ():
                    depth = self.sites.depth(point) - self.sites.depth(last.number)
                    if depth < 0 or (depth == 0 and point != last.number):
                        raise UnsupportedSite(
                            f"expected a site after {self.sites.label(last.number)}, where the condition is "
                            f"evaluated, got {self.sites.label(point)}", "at"
                        )  # fmt: skip
                    if depth == 0 and guard.latch >= 0 and first < len(self.prompt.ids) - 1:
                        raise UnsupportedSite(
                            "with scope 'onwards', an edit at the probe's own site needs a probe of generated tokens: "
                            "set the probe's tokens=pc.generated, or edit a later layer", "at"
                        )  # fmt: skip
                    if self.sites.points[point].rows == "sampled":
                        raise UnsupportedSite(f"{self.sites.label(point)} does not support conditional edits", "at")
        except PatchclampError as error:
            raise error.under(path.rpartition(".")[2]) from None
        guarded = [
            msgspec.structs.replace(op, guard=guard, ranges=_from(op.ranges, first)) if op.is_edit else op
            for op in bound
        ]
        if not any(op.ranges for op in guarded if op.is_edit):
            raise TokensError(
                "the selection has no token at which the condition could hold", f"{path.rpartition('.')[2]}.tokens"
            )
        return guarded

    def _bind(self, path: str, op: SiteOp) -> list[BoundOp]:
        """Bind an op: an edit once per token condition, a capture once."""
        refs = self._resolve(op)
        cases = self.select(op.tokens, refs[0])
        if isinstance(op, Readout):
            return _OpBinder(self, path, op, refs, Case(self.known.merged_of(cases)), len(cases) > 1).bound()
        cases = [case for case in cases if len(case.positions)]
        if not cases:
            raise TokensError(f"{op.tokens} selects no positions in this request, so nothing would be edited", "tokens")
        self._edits_at.update(ref.point for ref in refs)
        return [bound for case in cases for bound in self._bind_case(path, op, refs, case)]

    def _bind_case(self, path: str, op: SiteOp, refs: list[SiteRef], case: Case) -> list[BoundOp]:
        bound = _OpBinder(self, path, op, refs, case, False).bound()
        if case.inside is None:
            return bound
        if isinstance(op, Apply) or self.sites.points[refs[0].point].rows == "sampled":
            raise TokensError("Apply and logits edits are not supported between delimiters in generated text", "tokens")
        guard = self._span(path, op.tokens, case.inside)
        return [msgspec.structs.replace(each, guard=guard) if each.is_edit else each for each in bound]

    def _span(self, path: str, tokens: Tokens, inside: bool) -> Guard:
        """Return the guard for generated tokens inside (or outside) a selection's `between`. Its first use adds ops
        that set a bit from the step's token ids and a latch set by earlier steps. The latch is read at the embedding
        and written at the end of the stream, since rows at one point are unordered."""
        [between] = {leaf for leaf in leaves(tokens) if isinstance(leaf, Between)}
        pair = self.prompt.one_token(between.opening, tokens), self.prompt.one_token(between.closing, tokens)
        begin, [first] = len(self.prompt.ids), self.sites.resolve(Site("embed"))

        def decide(action: Action, at: SiteRef) -> None:
            where = (PositionRange(begin, self.limit),)
            self._span_ops.append(BoundOp(f"{path}.tokens", action, (at.point,), (), where))

        if (pair, True) not in self._spans:
            if self.sites.stages > 1:
                raise UnsupportedSite(f"{between} in generated text is not supported with pipeline parallelism", "at")
            latch, bit, opened = self._next_latch("tokens"), self._next_bit("tokens"), self._next_bit("tokens")
            is_open = [each for each in self.prompt.ids if each in pair][-1:] == [pair[0]]
            [last] = self.sites.resolve(Site("resid_post", self.sites.layers - 1))
            decide(Span(*pair, is_open, bit, latch), first)
            decide(Latch(opened, latch, True), last)
            self._spans[pair, True] = Guard(bit)
        if (pair, inside) not in self._spans:
            outside = self._next_bit("tokens")
            decide(All(outside, 1 << self._spans[pair, True].bit, 0), first)
            self._spans[pair, False] = Guard(outside)
        return self._spans[pair, inside]

    def dictionary(self, name: str) -> Dictionary:
        """Return the SAE attached as `name`."""
        found = self.sites.dictionaries.get(name)
        if found is None:
            raise unknown("SAE", name, self.sites.dictionaries, "name")
        return found

    def _resolve(self, op: SiteOp) -> list[SiteRef]:
        if isinstance(op, (Features, FeatureOp)):
            dictionary = self.dictionary(op.name)
            return [dictionary.at if isinstance(op, Features) else dictionary.to]
        if op.at not in self.known.refs:
            try:
                self.known.refs[op.at] = self.sites.resolve(op.at)
            except PatchclampError as error:
                raise error.under("at") from None
        return self.known.refs[op.at]

    def select(self, tokens: Tokens, ref: SiteRef, field: str = "tokens") -> list[Case]:
        """Return a selection's cases at a site: first unconditional positions, then those that depend on token ids.
        Errors have the path `field`."""
        lowest = len(self.prompt.ids) - 1 if self.sites.points[ref.point].rows == "sampled" else 0
        known, key = self._cases_of_prompt, (tokens, lowest)
        if is_positional(tokens):
            known, key = self.known.cases, (tokens, len(self.prompt.ids), self.limit, lowest)
        if key not in known:
            known[key] = self._cases(tokens, ref, field)
        return known[key]

    def _cases(self, tokens: Tokens, ref: SiteRef, field: str) -> list[Case]:
        self.check_ids(tokens, field)
        sampled = self.sites.points[ref.point].rows == "sampled"
        try:
            cases = self.prompt.cases(tokens, self.limit, len(self.prompt.ids) - 1 if sampled else 0)
        except PatchclampError as error:
            raise error.under(field) from None
        for case in cases:
            if case.positions.size and case.positions.max() >= self.limit:
                last = case.positions.max()
                raise TokensError(f"{tokens}: position {last} is out of range (0..{self.limit - 1})", field)
            if sampled:
                self._check_sampled(case.positions)
        return cases

    def check_ids(self, tokens: Selection, field: str) -> None:
        delimiters = (leaf for leaf in leaves(tokens) if isinstance(leaf, Between))
        ids = [leaf.ids[-1] for leaf in ids_in(tokens)]
        ids += [each for leaf in delimiters for each in (leaf.opening, leaf.closing) if isinstance(each, int)]
        if beyond := [each for each in ids if each >= self.sites.d_vocab]:
            raise TokensError(f"token id {beyond[0]} is out of range for a vocabulary of {self.sites.d_vocab}", field)

    def _check_sampled(self, positions: np.ndarray) -> None:
        """Raise `UnsupportedSite` for positions without logits: only sampled positions have logits."""
        first = len(self.prompt.ids) - 1
        if positions.size and positions.min() < first:
            raise UnsupportedSite(
                f"logits exist only at sampled positions ({first} on), not at {positions.min()}; select prompt[-1], "
                "generated or every & ..., or capture final_norm and apply the unembedding",
                "tokens",
            )

    def entry(self, name: str, field: str) -> Any:
        """Look up a name in the bank."""
        try:
            return self._bank[name]
        except PatchclampError as error:
            raise error.under(field) from None

    def run(self, name: str) -> tuple[str, SourceRun]:
        """Look up a run by its key or bank name; return its key and captures."""
        named = self._bank[name] if name in self._bank else None  # noqa: SIM401  a bank's `get` raises
        if named is not None and not is_run(named):
            raise ProgramError(f"expected a run, got {type(named).__name__} {name!r} in the bank")
        key = name if named is None else named.key
        try:
            return key, self._source(key)
        except MissingSource as error:
            raise error if key == name else MissingSource(f"bank entry {name!r}: {error.message}") from None

    def put(self, vector: Vector) -> str:
        """Add a vector to the request's vectors; return its bank key."""
        key = vector_key(vector)
        self._vectors[key] = vector.rows()
        return key

    def number_code(self, path: str, op: Apply, sites: dict[int, str]) -> int:
        """Assign a new number to an op's code at each binding, so that requests never share blocks that it edited."""
        if self._code is None:
            raise ProgramError("Apply runs Python code: it needs pc.LM(model, allow_code=True), not a server", "fn")
        number = next(code_numbers)
        self._code[number] = Code(path, op.fn, op.wanted_arguments(), sites)
        return number


LAST = POOLS.index("last") + 1  # in `Keep.pool`


class _OpBinder:
    """The `Context` of one op, at its site refs and one case's positions."""

    def __init__(
        self, binder: _Binder, path: str, op: SiteOp, refs: list[SiteRef], case: Case, conditional: bool
    ) -> None:
        self._binder, self._path, self._op, self._refs, self._case = binder, path, op, refs, case
        self.conditional, self._sites = conditional, binder.sites
        self._stored: list[BoundOp] = []  # `Store` ops for rows that the op reads from its own run

    def bound(self) -> list[BoundOp]:
        """Return the `Store` ops that the op requires, then the bound op."""
        lowered, columns = lower(self._op, self), self._refs[0].columns
        if isinstance(lowered.action, Keep) and lowered.action.pool == LAST and not self.conditional:
            # skip earlier prompt tokens: they cannot be the last selected token, and may be cached
            prompt = np.searchsorted(self._case.positions, len(self._binder.prompt.ids))
            ranges = position_ranges(self._case.positions[max(prompt - 1, 0) :], None)
        else:
            ranges = self._binder.known.ranges_of(self._case.positions, lowered.rows)
        action = self._pooled_in_step(lowered.action)
        if lowered.repeats != 1:
            ranges = tuple(each._replace(row=row) for row in range(lowered.repeats) for each in ranges)
        ids, points = self._case.ids, [self._sites.points[ref.point] for ref in self._refs]
        bound = BoundOp(
            self._path, action, tuple(point.number for point in points), lowered.values, ranges,
            reaches_cache=not isinstance(self._op, Readout) and any(map(reaches_cache, points)),
            columns=0 if columns is None or is_whole(self._op) else pack_columns(columns),
            condition=Condition(self.put(Vector.of(ids)), self._case.others) if ids else None,
        )  # fmt: skip
        return [*self._stored, bound]

    def _pooled_in_step(self, action: Action) -> Action:
        """Return the op's action, pooling a mean or maximum on the device if all its tokens are prompt tokens.
        Generated tokens may be discarded later: rejected draft tokens, and tokens after a stop string."""
        positions = self._case.positions
        if not isinstance(action, Keep) or action.pool in (0, LAST) or self.conditional or not len(positions):
            return action
        in_prompt = positions.max() < len(self._binder.prompt.ids)
        in_step = in_prompt and all(self._sites.points[ref.point].rows == "tokens" for ref in self._refs)
        return msgspec.structs.replace(action, dtype=0, in_step=True) if in_step else action

    def put(self, vector: Vector) -> str:
        return self._binder.put(vector)

    def points(self) -> list[tuple[str, int | None]]:
        return [(point.kind, point.layer) for point in (self._sites.points[ref.point] for ref in self._refs)]

    def check_lens(self, lens: ops.Lens) -> None:
        if why := self._sites.withdrawn.get(LENS):
            raise UnsupportedSite(f"lenses are not available on this model: {why}")
        if lens.top > self._sites.d_vocab:
            raise ProgramError(f"expected at most {self._sites.d_vocab} (the vocabulary size), got {lens.top}", "top")
        lens.check_width(self._sites.d_model)

    def heads(self) -> tuple[int, int, int]:
        sizes, ref = self._sites.sizes, self._refs[0]
        first, end = ref.columns or (0, sizes["Q"])
        return first // sizes.d_head, (end - first) // sizes.d_head, self._binder.limit

    def check_keys(self, tokens: Tokens, field: str) -> None:
        prompt, limit = self._binder.prompt, self._binder.limit
        self._binder.check_ids(tokens, field)
        try:
            prompt.select(tokens, limit, [*prompt.ids, *[-1] * (limit - len(prompt.ids))])
        except PatchclampError as error:
            raise error.under(field) from None

    def edges(self, keys: Tokens | Vector, removed: bool = False) -> tuple[tuple[int, int], ...]:
        cases = [] if isinstance(keys, Vector) else self._binder.select(keys, self._refs[0], "keys")
        for field, case in (("tokens", self._case), *(("keys", case) for case in cases)):
            if case.ids or case.inside is not None or not case.alone:
                raise TokensError(
                    "expected fixed positions for an attention edit, got a selection that depends on generated "
                    "tokens: use prompt & ... to select in the prompt", field
                )  # fmt: skip
        queries = self._case.positions
        if isinstance(keys, Vector):
            last = (np.arange(keys.shape[-1]) * (keys.rows() != 0)).max(1)
            if len(late := queries[last > queries]):
                raise TokensError(f"the row for the query at position {late[0]} has values for later keys", "value")
            return ()
        positions = self._binder.known.merged_of(cases)
        seeing = queries >= positions.min(initial=self._binder.limit)
        if not seeing.any():
            raise TokensError(f"{keys} has no position at or before a query, so nothing would be edited", "keys")
        if not seeing.all():
            self._case = msgspec.structs.replace(self._case, positions=queries[seeing])
        blind = queries[np.searchsorted(positions, queries, "right") == queries + 1]
        if removed and len(blind):
            raise TokensError(f"the token at position {blind[0]} would have no keys left: keep at least one", "tokens")
        return tuple((each.start, each.stop) for each in position_ranges(positions, None))

    def dictionary(self, ids: tuple[int, ...]) -> Dictionary:
        assert isinstance(self._op, (Features, FeatureOp))
        dictionary = self._binder.dictionary(self._op.name)
        if ids and max(ids) >= dictionary.card.features:
            raise ProgramError(
                f"expected a feature from 0 to {dictionary.card.features - 1}, got {max(ids)}",
                "ids" if isinstance(self._op, Features) else "id",
            )
        return dictionary

    def read_before(self, action: Action, ref: SiteRef) -> None:
        ranges = self._binder.known.ranges_of(self._case.positions, None)
        columns = 0 if ref.columns is None else pack_columns(ref.columns)
        ids = self._case.ids
        condition = Condition(self.put(Vector.of(ids)), self._case.others) if ids else None
        self._stored.append(BoundOp(self._path, action, (ref.point,), (), ranges, columns=columns, condition=condition))

    def code(self, op: Apply) -> int:
        return self._binder.number_code(self._path, op, {ref.point: str(ref) for ref in self._refs})

    def needs_whole_rows(self, op: SiteOp) -> None:
        ref = self._refs[0]
        if not self._sites.whole(ref):
            what = "a projection" if isinstance(op, Readout) else type(op).__name__
            raise UnsupportedSite(
                f"{what} needs whole rows, and {ref} is sharded across {self._sites.shard_count(ref.point)} GPUs: "
                f"select one head, as in {ref.name}[{ref.layer}, 0], or use tensor_parallel_size=1",
                "at",
            )

    def vector(self, value: ValueLike, field: str) -> Vector:
        value = as_value(value)
        vectors = self._vectors(value, field)
        if len({vector.content for vector in vectors}) > 1:
            assert isinstance(value, Named)
            raise ShapeError(f"expected one row for all sites, got one per site in {value.name!r}", field)
        return vectors[0]

    def value(self, value: Value) -> tuple[tuple[str, ...], np.ndarray | None]:
        if isinstance(value, (From, SameRun)):
            try:
                return self._rows_of(value) if isinstance(value, From) else self._own_rows(value)
            except PatchclampError as error:
                raise error.under("value") from None
        vectors = self._vectors(value, "value")
        keys, shape = tuple(map(self.put, vectors)), vectors[0].shape
        return keys, None if len(shape) == 1 else self.rows(shape[0])

    def rows(self, count: int) -> np.ndarray:
        if not self._case.alone:
            raise ShapeError(f"expected one row [D], since {self._op.tokens} depends on generated tokens", "value")
        if count != len(self._case.positions):
            raise ShapeError(
                f"expected one row per selected position ({len(self._case.positions)}), got {count} rows", "value"
            )
        return np.arange(count)

    def _vectors(self, value: Value, field: str) -> list[Vector]:
        """Return one vector for all site refs, or one per ref.

        Raises `MissingSource` for a name missing from the bank, `ShapeError` for a vector of the wrong width.
        """
        if isinstance(value, (From, SameRun)):
            raise ProgramError(f"expected numbers, got a reference to a row; use run[site][i] for {value}", field)
        vectors = [value] if isinstance(value, Vector) else self._named(value, field)
        return [self._as_wide(vector, isinstance(value, Named), field) for vector in vectors]

    def padded(self, vector: Vector, field: str) -> Vector:
        return self._as_wide(vector, False, field)

    def _as_wide(self, vector: Vector, named: bool, field: str) -> Vector:
        """Pad a vector with zeros outside the site ref's columns, to the point's width. A row of heads may be [H, E],
        except in a projection; a `named` vector may already have the point's width."""
        ref = self._refs[0]
        width, parts = self._sites.points[ref.point].width, self._sites.parts(ref.name)
        first, end = ref.columns or (0, width)
        if (
            parts is not None
            and vector.shape == ((end - first) // parts[1], parts[1])
            and field not in ("project", "weight")
        ):
            vector = _flat(vector)
        columns = vector.shape[-1]
        if columns == width and (named or ref.columns in (None, (0, width))):
            return vector
        if columns == end - first:
            return _padded(vector, first, width - end)
        raise ShapeError(f"expected a vector of width {end - first} for {ref}, got {list(vector.shape)}", field)

    def _named(self, value: Named, field: str) -> list[Vector]:
        entry = self._binder.entry(value.name, field)
        if isinstance(entry, Program):
            raise ProgramError(f"{value.name!r} is a program: use pc.Use({value.name!r})", field)
        if is_run(entry):
            raise ProgramError(f"{value.name!r} is a run: use pc.From({value.name!r}, site)", field)
        if isinstance(entry, Vector):
            return [entry]
        return [self._mean(value.name, entry, ref, field) for ref in self._refs]

    def _mean(self, name: str, means: Means, ref: SiteRef, field: str) -> Vector:
        """Return a site ref's mean, which may be stored under any name of the ref's point."""
        for label in self._sites.labels(ref.point):
            if label in means.rows:
                return means.rows[label]
        raise MissingSource(f"{name!r} has no mean of {ref}; available: {', '.join(means.rows)}", field)

    def _rows_of(self, value: From) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the bank keys of another run's rows, and the row index for each written position."""
        run, source = self._binder.run(value.run)
        read = self._refs if value.site is None else self._sites.resolve(value.site)
        self._check_alike(value, read)
        written = self._case.positions
        positions = written if value.position is None else self._source_positions(value.position, run, source)
        if len(positions) not in (1, len(written)):
            raise ShapeError(f"expected 1 or {len(written)} source positions, got {len(positions)} ({value.position})")
        row, *others = [self._binder.known.rows_of(source.positions_of(ref.point), positions, run, ref) for ref in read]
        if not all(other is row or np.array_equal(other, row) for other in others):
            raise MissingSource(f"run {value.run} captured different positions in different layers of {read[0].name}")
        keys = tuple(run_key(run, ref.point) for ref in read)
        return keys, np.repeat(row, len(written)) if len(row) == 1 != len(written) else row

    def _own_rows(self, value: SameRun) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the bank keys of rows that this run stores for the op, and the row index for each written position."""
        if value.site.name in DERIVED:
            raise UnsupportedSite(f"{value.site} is computed only after the step, so the same run cannot read it")
        read, written = self._sites.resolve(value.site), self._case.positions
        self._check_alike(value, read)
        for i, ref in enumerate(self._refs):
            check_comes_before(self._sites, read[i if len(read) > 1 else 0], ref)
        positions = written if value.position is None else self._own_positions(value.position, read[0])
        if len(positions) not in (1, len(written)):
            raise ShapeError(f"expected 1 or {len(written)} source positions, got {len(positions)} ({value.position})")
        late = np.flatnonzero(positions > written)
        if len(late):
            first = written[late[0]], (positions if len(positions) > 1 else np.repeat(positions, len(written)))[late[0]]
            raise TokensError(f"expected a source position up to {first[0]}, got {first[1]}", "position")
        stored = np.unique(positions)
        number = next(self._binder.own_keys)
        keys = tuple(own_key(number, ref.point) for ref in read)
        ranges = position_ranges(stored, np.arange(len(stored)))
        self._stored.append(BoundOp(f"{self._path}.value", Store(), tuple(ref.point for ref in read), keys, ranges))
        row = np.searchsorted(stored, positions)
        return keys, np.repeat(row, len(written)) if len(row) == 1 != len(written) else row

    def _own_positions(self, tokens: Tokens, ref: SiteRef) -> np.ndarray:
        """Return a selection's source positions, in order. Raises `ShapeError` if they depend on generated tokens."""
        cases = self._binder.select(tokens, ref, "position")
        if len(cases) != 1 or not cases[0].alone or not (self._case.alone or len(cases[0].positions) == 1):
            raise ShapeError(f"expected fixed positions; {tokens} depends on generated tokens", "position")
        return cases[0].positions

    def _source_positions(self, tokens: Tokens, run: str, source: SourceRun) -> np.ndarray:
        selected = self._binder.known.selected
        if (tokens, run) not in selected:
            self._binder.check_ids(tokens, "position")
            try:
                selected[tokens, run] = source.select(tokens)
            except PatchclampError as error:
                raise error.under("position") from None
        positions = selected[tokens, run]
        if len(positions) != 1 and not self._case.alone:
            raise ShapeError(
                f"expected one source position for tokens not yet generated; {tokens} selects {len(positions)}"
            )
        return positions

    def _check_alike(self, value: From | SameRun, read: list[SiteRef]) -> None:
        """Raise `ShapeError` or `UnsupportedSite` if the source refs `read` do not match the op's site."""
        written, sites = self._refs, self._sites
        if len(read) not in (1, len(written)):
            raise ShapeError(f"expected 1 or {len(written)} source layers, got {len(read)} ({value.site})")
        if sites.points[read[0].point].width != sites.points[written[0].point].width:
            raise ShapeError(f"width mismatch between {read[0]} and {written[0]}")
        if sites.shard_count(read[0].point) != sites.shard_count(written[0].point):
            raise UnsupportedSite(
                f"{read[0]} and {written[0]} are sharded differently across GPUs: pass the rows of run[...]"
            )
        if not is_part_alike(read[0], written[0]):
            raise ShapeError(f"{read[0]} and {written[0]} are different parts of a row: pass the rows of run[...]")


def product_above(each: Above) -> float:
    """Return the threshold for the product W h: the greatest fp32 number whose score, as computed by `run.probes`,
    fails the comparison. Decisions then agree exactly with the rounded scores."""
    probe = each.probe
    if probe.activation == "softmax":
        raise ProgramError("a condition does not support softmax, which depends on all outputs", "activation")
    bias = 0.0 if probe.bias is None else float(probe.bias.array()[each.output])
    return _greatest_below(bias, probe.activation, each.threshold, each.inclusive)


@functools.lru_cache(4096)
def _greatest_below(bias: float, activation: str | None, threshold: float, inclusive: bool) -> float:
    """Compute `product_above` by bisection; scores increase with products."""
    compare = np.greater_equal if inclusive else np.greater

    def product(rank: int) -> np.ndarray:
        """Return the fp32 number with this rank in ascending order; 0 has rank 0."""
        return np.copysign(np.array([abs(rank)], np.int32).view(np.float32), rank)

    def holds(rank: int) -> bool:
        with np.errstate(over="ignore"):
            score = np.asarray(activated(product(rank) + np.float32(bias), activation))
        return bool(compare(score, np.float32(threshold))[0])

    below, above = -(greatest := int(np.array([MAX_FP32], np.float32).view(np.int32)[0])), greatest
    if holds(below) or not holds(above):
        raise ProgramError(
            f"expected a threshold within the range of scores, got {threshold} (activation {activation})", "threshold"
        )
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if holds(middle) else (middle, above)
    return float(product(below)[0])


def _from(ranges: tuple[PositionRange, ...], first: int) -> tuple[PositionRange, ...]:
    """Return the parts of ranges at or after position `first`."""
    return tuple(
        each._replace(start=max(each.start, first), row=each.row + max(first - each.start, 0) * each.step)
        for each in ranges if each.stop > first
    )  # fmt: skip


def is_part_alike(read: SiteRef, written: SiteRef) -> bool:
    """True if both refs have the same columns, or if `read` is a site's whole row and `written` a part of that site."""
    return read.columns == written.columns or (read.columns is None and read.name == written.name)


def check_comes_before(sites: SiteMap, read: SiteRef, written: SiteRef) -> None:
    """Raise `UnsupportedSite` unless a run computes site `read` before site `written`."""
    if sites.points[read.point].rows == "sampled":
        raise UnsupportedSite(f"{read} is computed at the end of a step, so the same run cannot write it elsewhere")
    if sites.stages > 1:
        raise UnsupportedSite(
            f"{read} and {written} may be in different pipeline stages: capture {read} in one run and read it with "
            "pc.From in another"
        )
    if sites.depth(read.point) >= sites.depth(written.point):
        raise UnsupportedSite(
            f"expected a site in a layer before {written}, got {read}: capture it in one run and read it with pc.From "
            "in another"
        )


def is_whole(op: SiteOp) -> bool:
    """True for a capture without `project`, which keeps the whole row even at an indexed site."""
    return isinstance(op, Capture) and op.project is None


def reaches_cache(point: Point) -> bool:
    """True if an edit at a point can change keys and values."""
    return point.kind not in ("final_norm", "logits")


def vector_key(vector: Vector) -> str:
    """Return the bank key of an inline vector: a hash of its content."""
    return f"v:{vector.content}"


@functools.lru_cache(1024)
def _flat(vector: Vector) -> Vector:
    """Flatten a row of heads [H, E] to [H · E]."""
    return Vector((vector.shape[0] * vector.shape[1],), vector.data)


@functools.lru_cache(1024)
def _padded(vector: Vector, before: int, after: int) -> Vector:
    """Pad a vector with zero columns on both sides. Cached, so that the vector is hashed once for all prompts."""
    return Vector.of(np.pad(vector.array(), [(0, 0)] * (len(vector.shape) - 1) + [(before, after)]))


def _rows(captured: np.ndarray, wanted: np.ndarray, run: str, ref: SiteRef) -> np.ndarray:
    """Return the row index of each wanted position. Raises `MissingSource` for a position that was not captured."""
    if len(captured) == 0:
        raise MissingSource(f"run {run} did not capture {ref}")
    rows = np.searchsorted(captured, wanted)
    missing = wanted[(rows == len(captured)) | (captured[np.minimum(rows, len(captured) - 1)] != wanted)]
    if len(missing):
        raise MissingSource(
            f"run {run} did not capture {ref} at position {missing[0]} (only at {len(captured)} positions from "
            f"{captured[0]} to {captured[-1]}); capture it there, or select fewer tokens"
        )
    return rows.astype(np.int64)


class Binding(msgspec.Struct, frozen=True):
    """A program bound to a prompt, with its inputs: vectors by bank key, code by number, runs."""

    bound: BoundProgram | None = None
    vectors: dict[str, np.ndarray] = {}
    code: dict[int, Code] = {}
    sources: tuple[SourceRun, ...] = ()


class Bindings:
    """Binds the programs of one call. A program is bound once per prompt length if only the length matters, and once
    for all lengths if it edits every token. `source` returns a run's captures; `count` is passed to `Known`."""

    def __init__(
        self, sites: SiteMap, source: Callable[[str], SourceRun], bank: Mapping[str, Any], allow_code: bool,
        count: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._sites, self._source, self._bank, self._allow_code = sites, source, bank, allow_code
        self._known = Known(count)
        # by program id (the program is kept, so that its id is not reused), prompt length, and `max_tokens`; 0: any
        self._by_length: dict[tuple[int, int, int], tuple[Program, Binding]] = {}
        self._cells: dict[tuple[int, ...], Callable[[], CellRecords]] = {}

    def of(self, program: Program, run: str, prompt: Prompt, max_tokens: int) -> Binding:
        """Bind a program to a prompt, for the run with key `run`. Raises the errors of `bind`."""
        if not program:
            return Binding()
        length = len(prompt.ids)
        key, any_length = (id(program), length, max_tokens), (id(program), 0, 0)
        whole = PositionRange(0, length + max_tokens - 1)
        _, known = self._by_length.get(key, (None, None))
        if known is None:
            _, known = self._by_length.get(any_length, (None, None))
            if known is not None and known.bound is not None:
                ops = tuple(msgspec.structs.replace(op, ranges=(whole,)) for op in known.bound.ops)
                known = msgspec.structs.replace(known, bound=BoundProgram(run, length, ops))
                self._by_length[key] = program, known
        if known is not None and known.bound is not None:
            return msgspec.structs.replace(known, bound=msgspec.structs.replace(known.bound, run=run))
        vectors: dict[str, np.ndarray] = {}
        sources: dict[str, SourceRun] = {}
        code: dict[int, Code] | None = {} if self._allow_code else None

        def source(key: str) -> SourceRun:
            return sources.setdefault(key, self._source(key))

        bound = bind(program, run, prompt, max_tokens, self._sites, source, self._bank, vectors, code, self._known)
        binding = Binding(bound, vectors, code or {}, tuple(sources.values()))
        if is_of_length_alone(program):
            self._by_length[key] = program, binding
            # excludes one-token prompts: one-row values would broadcast, and the only position has logits
            if (
                length > 1
                and all(op.is_edit and op.kind != APPLY and op.ranges == (whole,) for op in bound.ops)
                and all(isinstance(op, SiteOp) and op.tokens == every for _, op in program.ops)
            ):
                self._by_length[any_length] = program, binding
        return binding

    def cells_of(
        self, programs: Sequence[Program], bound: Sequence[BoundProgram | None], max_tokens: int
    ) -> Callable[[], CellRecords]:
        """Return a function that makes the programs' cells. Prompts of equal length share cells if only the length
        matters, and all prompts share cells if every token is edited."""
        length = next((of.prompt for of in bound if of is not None), 0)
        numbers = tuple(id(program) if program else 0 for program in programs)
        make = functools.cache(functools.partial(cells_of, bound))
        if all((number, 0, 0) in self._by_length for number in numbers if number):
            of_any_length = self._cells.setdefault((0, 0, *numbers), make)
            make = functools.cache(lambda: of_any_length().until(length + max_tokens - 1))
        elif not all((number, length, max_tokens) in self._by_length for number in numbers if number):
            return make
        return self._cells.setdefault((length, max_tokens, *numbers), make)


def is_of_length_alone(program: Program) -> bool:
    """True if a program binds identically to all prompts of one length: it selects by position and runs no code."""
    return all(
        isinstance(op, SiteOp) and not isinstance(op, Apply) and all(map(is_positional, (
            op.tokens, getattr(op, "keys", None), getattr(getattr(op, "value", None), "position", None)
        ))) for _, op in program.ops
    )  # fmt: skip
