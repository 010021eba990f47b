"""Bound programs: programs lowered for one prompt, as plain data that is sent as msgpack.

Prefix caching: the key of a key/value block includes a hash of the edits at its positions (`block_key`). The engine
chains block keys, so a key covers the edits of earlier blocks too. Blocks before the first edited position get no hash
and stay shared with all requests.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import CapacityError, ProgramError
from patchclamp.language.dictionaries import FeatureReader
from patchclamp.language.site import Site
from patchclamp.sites import SiteMap
from patchclamp.store.tensors import PROBE

CAPTURE = 0  # record the row
LINEAR = 1  # h_scale · h + v_scale · v; a scale of 0 omits its term (0 · inf would be NaN)
BLEND = 2  # (1 − a) · h + a · v for a = alpha · m, with m per column
PROJECT = 3  # h + (p′ − p) · v for p = h · v and p′ = p clamped to low … high
NOISE = 4  # h + std · ε; relative: std times the row's root mean square
MATCH = 5  # a condition: the next record acts only if the token's id is (or is not) in a list
APPLY = 6  # fn(h), arbitrary code
STORE = 7  # write the row to the bank, for a later layer of the same run
TEST = 8  # a bit of the row: a product with the row is above a threshold
ALL = 9  # a bit of the row: selected other bits have given values
LATCH = 10  # the first position at which a bit of the row is set, or the bit of the last row, for later steps
WHEN = 11  # a condition: the next record acts only if a bit of the row is set, or at and after a latched position
LOW_RANK = 12  # h + Σ g(p) · d over k directions d, for k products p
ADD_NORMED = 13  # h + scale · (|h| / |v|) · v; h where v is 0
ROTATE = 14  # h with its projection on the plane of two unit vectors rotated
SPAN = 15  # two bits of the row: its token is between delimiters; the next token is, unless it is a delimiter
REMOVE = 16  # recompute attention outputs without some of the keys (`kernels.paged_attention`)
MAX_RANK = 1024  # rank of a low-rank op
BITS, LATCHES = 23, 8  # per row; per request. A kernel keeps both in a 31-bit word
NEVER = (1 << 31) - 1  # the position of an unset latch
CHECKED = 512  # positions that a self-check compares at a prompt's start, before its end and after its end


class PositionRange(NamedTuple):
    """Positions start … stop − 1. Position p reads row `row + (p − start) · step` of the op's value; step is 0 or 1."""

    start: int
    stop: int
    row: int = 0
    step: int = 0


KEYS = 64  # attention rows' lengths are multiples of this, to limit the number of distinct lengths
MAX_ATTENTION_BYTES = 1 << 30  # attention rows of one program


class AttentionReader(msgspec.Struct, frozen=True, tag="attention"):
    """Computes attention rows from queries read after rotary embedding.

    site: `pattern` or `attn_scores`
    first, heads: the first head, and the number of heads
    keys: the row length; 0: only each row's largest values are kept
    """

    site: str
    first: int
    heads: int
    keys: int = 0


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=CAPTURE):
    """Record the row, or its products with a matrix's rows.

    dtype: an index into `DTYPES`
    conditional: True if any position depends on generated tokens
    matrix: the bank key of the matrix; "" to record the row
    products: the number of rows of the matrix, or 0
    pool: an index into `POOLS` plus 1; 0: one row per position
    in_step: True if the device pools each step's rows to one
    probe: the name of the probe that the products belong to; "": none
    lens: True if the rows are for a lens rather than the site
    reader: computes the values to keep: features of an attached SAE, or a query's attention; None: the row itself
    top: the number of features, or keys per head; a row is their values, then their ids as int32 bits
    """

    kind: ClassVar[int] = CAPTURE
    dtype: int
    conditional: bool = False
    matrix: str = ""
    products: int = 0
    pool: int = 0
    probe: str = ""
    lens: bool = False
    reader: FeatureReader | AttentionReader | None = None
    top: int = 0
    in_step: bool = False

    @property
    def is_private(self) -> bool:
        """True if the rows are stored for a lens, a reader or a probe rather than as the site's capture."""
        return self.lens or self.reader is not None or bool(self.probe)

    @property
    def numbers(self) -> int:
        """The number of values kept per row; 0: all."""
        if isinstance(self.reader, AttentionReader):
            return self.reader.heads * (2 * self.top or self.reader.keys)
        return self.products or 2 * self.top


class Linear(msgspec.Struct, frozen=True, array_like=True, tag=LINEAR):
    kind: ClassVar[int] = LINEAR
    h_scale: float
    v_scale: float


class Blend(msgspec.Struct, frozen=True, array_like=True, tag=BLEND):
    """Replace the row h with (1 − a) · h + a · v. mask: the bank key of m in a = alpha · m."""

    kind: ClassVar[int] = BLEND
    alpha: float
    mask: str


class Projection(msgspec.Struct, frozen=True, array_like=True, tag=PROJECT):
    kind: ClassVar[int] = PROJECT
    low: float
    high: float


class Factored(msgspec.Struct, frozen=True, array_like=True, tag=LOW_RANK):
    """Add Σ g(p_j) · d_j to the row h, where p_j = e_j · h is computed before the op changes h.

    The op's value has five coefficients for each j: bias, threshold, offset, slope and otherwise. With q = p_j + bias,
    g is offset + slope · q where q exceeds the threshold, and `otherwise` elsewhere. If `toward` is not 0, the value is
    instead a row v, p_j = e_j · (v − h), and g is toward · p_j.

    rank: k
    factors: the bank key of rows e_1 … e_k, d_1 … d_k
    """

    kind: ClassVar[int] = LOW_RANK
    rank: int
    factors: str
    toward: float = 0.0


class NormedAdd(msgspec.Struct, frozen=True, array_like=True, tag=ADD_NORMED):
    kind: ClassVar[int] = ADD_NORMED
    scale: float


class Rotation(msgspec.Struct, frozen=True, array_like=True, tag=ROTATE):
    """Rotate h in the plane of the value's two rows, to an angle from the first row or, if `relative`, by an angle."""

    kind: ClassVar[int] = ROTATE
    cos: float
    sin: float
    relative: bool


class Noisy(msgspec.Struct, frozen=True, array_like=True, tag=NOISE):
    """Add noise. `streams`: each point's noise stream (`noise_stream`), so that no two points get the same noise.
    `first_column`: the first column of the worker's shard."""

    kind: ClassVar[int] = NOISE
    std: float
    seed: int
    relative: bool
    streams: tuple[int, ...]
    first_column: int = 0


class RunCode(msgspec.Struct, frozen=True, array_like=True, tag=APPLY):
    """Run a function on the rows. code: the function's number, unique in the process."""

    kind: ClassVar[int] = APPLY
    code: int


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Run an attached SAE's whole encoder (`runtime.dictionaries`): replace the row with its reconstruction, or change
    features.

    name, content: the SAE's name and content hash
    ids: feature ids; () to reconstruct
    gates: each feature's (offset, slope, otherwise), as in `Factored`, for the factor of its decoder row
    reads: True at the point where a transcoder only reads the row
    """

    kind: ClassVar[int] = APPLY
    name: str
    content: str
    ids: tuple[int, ...] = ()
    gates: tuple[tuple[float, float, float], ...] = ()
    reads: bool = False


class Attended(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Edit the attention patterns of queries, which are read after rotary embedding, and recompute the attention
    outputs from them. Acts before other edits of these outputs.

    keys: ranges first … end − 1 of the keys to edit; (): all
    factor: multiplies the keys' probabilities; with `rows`: (1 − factor) · p + factor · row; None: keys are removed
        before the softmax
    rows: the bank key of probability rows, or ""
    """

    kind: ClassVar[int] = APPLY
    keys: tuple[tuple[int, int], ...] = ()
    factor: float | None = None
    rows: str = ""


class RemoveKeys(msgspec.Struct, frozen=True, array_like=True, tag=REMOVE):
    """Remove keys first … end − 1 from the attention whose output is the row: an `Attended` op on a CUDA device."""

    kind: ClassVar[int] = REMOVE
    first: int
    end: int


class Store(msgspec.Struct, frozen=True, array_like=True, tag=STORE):
    """Write each position's row to the bank, under the run's own key (`own_key`)."""

    kind: ClassVar[int] = STORE


class Compare(msgspec.Struct, frozen=True, array_like=True, tag=TEST):
    """Set bit `bit` of the row if the row's product with the value's row exceeds `threshold`. The product is kept for
    the probe named `probe`."""

    kind: ClassVar[int] = TEST
    threshold: float
    bit: int
    probe: str


class All(msgspec.Struct, frozen=True, array_like=True, tag=ALL):
    """Set bit `bit` of the row if the row's bits under `mask` equal `wanted` or, with `negated`, do not."""

    kind: ClassVar[int] = ALL
    bit: int
    mask: int
    wanted: int
    negated: bool = False


class Latch(msgspec.Struct, frozen=True, array_like=True, tag=LATCH):
    """Keep, in the request's latch `latch`, the lowest position whose bit `bit` is set. With `last`, keep 2 · p + b
    instead, for the highest position p and its bit b."""

    kind: ClassVar[int] = LATCH
    bit: int
    latch: int
    last: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True, tag=SPAN):
    """Mark generated tokens between delimiters. Bit `bit`: the token is strictly between `opening` and `closing`. Bit
    `bit` + 1: the latest delimiter up to and including the token is `opening`. Latch `latch` carries the state between
    steps: a step's last row sets the latch at a later point.

    inside: True if the prompt ends between the delimiters
    """

    kind: ClassVar[int] = SPAN
    opening: int
    closing: int
    inside: bool
    bit: int
    latch: int


class Guard(msgspec.Struct, frozen=True, array_like=True):
    """Restricts an op to rows with bit `bit` set or, if `latch` is not −1, to positions from the latched one on."""

    bit: int
    latch: int = -1


Action = (
    Store
    | Keep
    | Linear
    | Blend
    | Projection
    | Factored
    | NormedAdd
    | Rotation
    | Noisy
    | RunCode
    | Encoded
    | Attended
    | RemoveKeys
    | Compare
    | All
    | Latch
    | Span
)
DECIDE = (TEST, ALL, LATCH, SPAN)  # kinds that neither edit nor capture
MAX_REMOVED = 64  # `RemoveKeys` records of a program in a layer; each row reads all of them


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """Restricts an op to tokens whose id is listed under bank key `ids` or, with `others`, is not listed."""

    ids: str
    others: bool


class BoundOp(msgspec.Struct, frozen=True, array_like=True):
    """One bound op.

    path: the op's path in its program, such as `edits[2]`
    points: the points it acts at
    values: one bank key per point, one for all points, or none
    ranges: the positions it acts on, ascending; repeated for each row of the value if the action repeats (`Ablate`)
    reaches_cache: True if it can change keys and values that later tokens read
    columns: the columns of the row it acts on (`pack_columns`); 0: all
    condition: a condition on the token's id, or None
    guard: a condition on probes or delimiters, or None
    """

    path: str
    action: Action
    points: tuple[int, ...]
    values: tuple[str, ...]
    ranges: tuple[PositionRange, ...]
    reaches_cache: bool = False
    columns: int = 0
    condition: Condition | None = None
    guard: Guard | None = None

    @property
    def kind(self) -> int:
        return self.action.kind

    @property
    def is_edit(self) -> bool:
        """True if the op changes rows."""
        return self.kind not in (CAPTURE, STORE, *DECIDE) and not (
            isinstance(self.action, Encoded) and self.action.reads
        )

    @property
    def kept(self) -> tuple[PositionRange, ...]:
        """The positions of a capture's kept rows; only the last position if rows are pooled on the device."""
        if isinstance(self.action, Keep) and self.action.in_step:
            return (PositionRange(self.ranges[-1].stop - 1, self.ranges[-1].stop),)
        return self.ranges

    @property
    def is_gated(self) -> bool:
        """True if the op's value holds `Factored` coefficients, not a row."""
        return isinstance(self.action, Factored) and not self.action.toward

    @property
    def keys(self) -> tuple[str, ...]:
        """All bank keys that the op reads."""
        beside = {Blend: "mask", Keep: "matrix", Factored: "factors", Attended: "rows"}.get(type(self.action))
        key = getattr(self.action, beside) if beside else ""
        return (*self.values, *((key,) if key else ()), *((self.condition.ids,) if self.condition else ()))

    def reads(self) -> list[tuple[str, int]]:
        """Return the (bank key, point) pairs that the op reads."""
        if len(self.values) == len(self.points):
            reads = list(zip(self.values, self.points, strict=True))
        else:
            reads = [(key, point) for key in self.values for point in self.points]
        return reads + [(key, point) for key in self.keys[len(self.values) :] for point in self.points]

    def at(self, chosen: np.ndarray) -> BoundOp:
        """Restrict the op to the `chosen` points, bool [P]. Without points it becomes a no-op; op indices stay."""
        if chosen.all():
            return self
        index = [i for i, point in enumerate(self.points) if chosen[point]]
        if not index:
            return msgspec.structs.replace(self, action=NOTHING, points=(), values=(), condition=None)
        values = self.values if len(self.values) != len(self.points) else tuple(self.values[i] for i in index)
        action = self.action
        if isinstance(action, Noisy):
            action = msgspec.structs.replace(action, streams=tuple(action.streams[i] for i in index))
        return msgspec.structs.replace(self, action=action, points=tuple(self.points[i] for i in index), values=values)


NOTHING = Linear(1.0, 0.0)  # for an op without points


def only_removes_keys(ops: Iterable[BoundOp]) -> bool:
    """True if a program's attention edits can become `RemoveKeys` ops."""
    records = collections.Counter[int]()  # by point
    for op in ops:
        if isinstance(op.action, Attended):
            if op.action.factor is not None:
                return False
            records.update(dict.fromkeys(op.points, len(op.ranges) * len(op.action.keys)))
    return max(records.values(), default=0) <= MAX_REMOVED


def removed_keys(op: BoundOp, sites: SiteMap) -> list[BoundOp]:
    """Return the `RemoveKeys` ops, at `z`, of an op that removes keys from patterns."""
    assert isinstance(op.action, Attended)
    layers = [sites.points[point].layer for point in op.points]
    points = tuple(z.point for layer in layers for z in sites.resolve(Site("z", layer)))
    return [BoundOp(op.path, RemoveKeys(*keys), points, (), op.ranges, columns=op.columns) for keys in op.action.keys]


def with_removed_keys(bound: BoundProgram, sites: SiteMap) -> BoundProgram:
    """Return the program with its attention edits replaced by `RemoveKeys` ops, which precede all others. Unless
    `only_removes_keys` holds, the program is returned unchanged."""
    edits = [op for op in bound.ops if isinstance(op.action, Attended)]
    if not edits or not only_removes_keys(edits):
        return bound
    others = [op for op in bound.ops if not isinstance(op.action, Attended)]
    ops = (*itertools.chain.from_iterable(removed_keys(op, sites) for op in edits), *others)
    return msgspec.structs.replace(bound, ops=ops)


class BoundProgram(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A program bound to a prompt.

    run: the run's key
    prompt: the prompt's length in tokens
    """

    run: str
    prompt: int
    ops: tuple[BoundOp, ...]

    @functools.cached_property
    def contents(self) -> list[bytes]:
        """A hash of each op, excluding its path and ranges."""
        encoded = (msgspec.msgpack.encode(msgspec.structs.replace(op, path="", ranges=())) for op in self.ops)
        return [hashlib.blake2b(of_op, digest_size=32).digest() for of_op in encoded]

    @functools.cached_property
    def captured(self) -> dict[int, np.ndarray]:
        """The positions captured up to `max_tokens`, ascending, by point. Points with equal ranges share one array."""
        ranges: dict[int, tuple[PositionRange, ...]] = collections.defaultdict(tuple)
        for op in self.ops:
            for point in op.points if captures_site(op) else ():
                ranges[point] += op.kept
        positions = {of_point: position_array(of_point) for of_point in set(ranges.values())}
        return {point: positions[of_point] for point, of_point in ranges.items()}

    @functools.cached_property
    def captured_width(self) -> dict[int, int]:
        """The number of values captured per row, by point; 0: all. `check_one_way` ensures one number per point."""
        keeps = [(op.action, op.points) for op in self.ops if captures_site(op)]
        return {point: keep.products for keep, points in keeps if isinstance(keep, Keep) for point in points}

    def private_bytes(self, sites: SiteMap, computed: int | None = None) -> int:
        """Return the bytes of all private rows (`Keep.is_private`) in the first `computed` positions; None: all, up to
        `max_tokens`."""
        return sum(
            4 * (op.action.numbers or sites.points[point].width)
            * max((stop if computed is None else min(stop, computed)) - start, 0)
            for op in self.ops if isinstance(op.action, Keep) and op.action.is_private
            for start, stop, *_ in op.kept for point in op.points
        )  # fmt: skip

    @functools.cached_property
    def captured_item_bytes(self) -> dict[int, int]:
        """The maximum bytes per captured value, by point: 4 for fp32, 2 for bfloat16 and float16."""
        sizes: dict[int, int] = {}
        for op in self.ops:
            if isinstance(op.action, Keep) and captures_site(op):
                size = 2 if op.action.dtype else 4
                sizes |= {point: max(sizes.get(point, 2), size) for point in op.points}
        return sizes


def of_sample(bound: BoundProgram, number: int) -> BoundProgram:
    """Return the program for sample `number` of a prompt. The number is added to the seed of each noise op."""
    actions = [op.action for op in bound.ops]
    if number == 0 or not any(isinstance(action, Noisy) for action in actions):
        return bound
    ops = (
        msgspec.structs.replace(op, action=msgspec.structs.replace(action, seed=(action.seed + number) % (1 << 63)))
        if isinstance(action, Noisy)
        else op
        for op, action in zip(bound.ops, actions, strict=True)
    )
    return msgspec.structs.replace(bound, ops=tuple(ops))


def check_one_way(ops: Iterable[BoundOp], label: Callable[[int], str]) -> None:
    """Raise `ProgramError` if a point is captured in two ways, since all rows of a point in a run have the same width.
    Private captures (`Keep.is_private`) are exempt: their rows are separate.

    label: returns a point's name
    """
    ways: dict[int, BoundOp] = {}
    for op in ops:
        for point in op.points if captures_site(op) else ():
            first = ways.setdefault(point, op)
            if first is not op and way_of(first) != way_of(op):
                raise ProgramError(
                    f"{label(point)} is captured differently by {first.path[:200]}: each run captures a site whole, "
                    "pooled, or by one matrix; combine the matrices, use pc.Probe, or make two runs",
                    op.path[:200]
                )  # fmt: skip


def check_attention(ops: Iterable[BoundOp]) -> None:
    """Raise `CapacityError` if a program captures more than `MAX_ATTENTION_BYTES` of attention."""
    size = 0
    for op in ops:
        if isinstance(op.action, Keep) and isinstance(op.action.reader, AttentionReader):
            tokens = sum(stop - start for start, stop, *_ in op.ranges)
            size += 4 * op.action.numbers * tokens * len(op.points)
            if size > MAX_ATTENTION_BYTES:
                raise CapacityError(
                    f"expected at most {MAX_ATTENTION_BYTES:,} bytes of captured attention, got {size:,} with "
                    f"{op.action.reader.site} of {tokens} tokens in {len(op.points)} layers: select fewer tokens, "
                    "heads or layers, or use top=", f"{op.path[:200]}.tokens"
                )  # fmt: skip


def way_of(op: BoundOp) -> tuple[str, int, str]:
    """Return a capture's matrix key, its columns, and its path if it is pooled; ("", 0, "") for whole rows."""
    assert isinstance(op.action, Keep)
    return op.action.matrix, op.columns, op.path if op.action.pool else ""


def position_array(ranges: tuple[PositionRange, ...]) -> np.ndarray:
    """Return the ranges' positions, ascending."""
    positions = [np.arange(start, stop) for start, stop, *_ in ranges]
    return positions[0] if len(positions) == 1 else np.unique(np.concatenate([np.zeros(0, np.int64), *positions]))


def position_ranges(positions: np.ndarray, rows: np.ndarray | None) -> tuple[PositionRange, ...]:
    """Merge distinct positions, with a row index for each (None: row 0), into few ascending ranges."""
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
        PositionRange(int(positions[a]), int(positions[b - 1]) + 1, int(rows[a]),
                      int(rows[a + 1] - rows[a]) if b - a > 1 else 0)
        for a, b in itertools.pairwise(edges)
    )  # fmt: skip


def pack_columns(columns: tuple[int, int]) -> int:
    """Pack columns first … end − 1 into one record word."""
    return columns[0] | columns[1] << 16


def captures_site(op: BoundOp) -> bool:
    """True if an op captures its site's rows; probes, lenses and readers do not."""
    return isinstance(op.action, Keep) and not op.action.is_private


def stored_op(op: BoundOp, ordinal: int) -> int:
    """Return an op's ordinal in captures, with `PROBE` added if its rows are not the site's."""
    return ordinal + (PROBE if op.kind == CAPTURE and not captures_site(op) else 0)


def run_key(run: str, point: int) -> str:
    """Return the bank key of a run's captured rows at a point."""
    return f"r:{run}:{point}"


def source_of(key: str) -> tuple[str, int] | None:
    """Return the run and point of a run's bank key; None for other keys."""
    kind, _, name = key.partition(":")
    run, _, point = name.rpartition(":")
    return (run, int(point)) if kind == "r" else None


def is_vector(key: str) -> bool:
    """True if a bank key refers to an inline vector."""
    return key.startswith("v:")


def is_loaded(key: str) -> bool:
    """True if a key's rows are loaded before a program starts, rather than stored by the program."""
    return own_point(key) is None


def own_key(number: int, point: int) -> str:
    """Return the bank key for rows that a run stores at a point for itself; `number` is unique within the program."""
    return f"o:{number}:{point}"


def own_point(key: str) -> int | None:
    """Return the point of an `own_key`; None for other keys."""
    kind, _, name = key.partition("@")[0].partition(":")
    return int(name.rpartition(":")[2]) if kind == "o" else None


def noise_stream(kind: str, layer: int | None) -> int:
    """Return a point's stream in the noise generator's counter (`kernels.noise`): 31 bits of a hash of its name."""
    digest = hashlib.blake2s(f"{kind}[{layer}]".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


Products = Callable[[BoundOp], tuple[np.ndarray, np.ndarray]]  # a `Compare` op's positions and products


def decided(bound: BoundProgram, ids: np.ndarray, products: Products) -> Callable[[Guard], np.ndarray]:
    """Replay the kernel's decisions from the compared `products`. Returns a function from a guard to a mask over the
    tokens `ids`, True where the guard held."""
    count = len(ids)
    bits, latches, position = np.zeros(count, np.int64), dict[int, int](), np.arange(count)
    for op in bound.ops:
        action, within = op.action, np.zeros(count, bool)
        for start, stop, *_ in op.ranges if op.kind in DECIDE else ():
            within[start:stop] = True
        if isinstance(action, Compare):
            read, product = products(op)
            above = np.zeros(count, bool)
            above[read] = product > np.float32(action.threshold)
            bits = np.where(within, bits & ~(1 << action.bit) | above << action.bit, bits)
        elif isinstance(action, All):
            held = ((bits & action.mask) == action.wanted) != action.negated
            bits = np.where(within, bits & ~(1 << action.bit) | held << action.bit, bits)
        elif isinstance(action, Span):
            first = min(op.ranges[0].start, count)
            delimiter = np.isin(ids[first:], (action.opening, action.closing))
            last = np.maximum.accumulate(np.where(delimiter, position[first:], -1))
            after = np.where(last < 0, action.inside, ids[last] == action.opening)
            bits[first:] |= (after & ~delimiter) << action.bit | after << action.bit + 1
        elif isinstance(action, Latch):
            latches[action.latch] = int(position[within & (bits >> action.bit & 1 == 1)].min(initial=NEVER))
    return lambda guard: position >= latches[guard.latch] if guard.latch >= 0 else bits >> guard.bit & 1 == 1


def acted_on(
    op: BoundOp, ids: np.ndarray, ids_of: Mapping[str, np.ndarray], held: Callable[[Guard], np.ndarray] | None = None
) -> np.ndarray:
    """Return the positions an op acted on, in the order of its ranges.

    ids: the ids of all tokens with activations
    ids_of: conditions' token ids, by bank key
    held: the result of `decided`; if None, guards are ignored
    """
    positions = [np.arange(start, min(stop, len(ids))) for start, stop, *_ in op.ranges if start < len(ids)]
    joined = np.concatenate(positions) if positions else np.zeros(0, np.int64)
    if op.guard is not None and held is not None:
        joined = joined[held(op.guard)[joined]]
    if op.condition is None:
        return joined
    return joined[np.isin(ids[joined], ids_of[op.condition.ids]) != op.condition.others]


def acted(
    bound: BoundProgram, ids: np.ndarray, ids_of: Mapping[str, np.ndarray], products: Products
) -> dict[str, np.ndarray]:
    """Return the positions each edit acted on, ascending, by path. `products`: as for `decided`."""
    positions: dict[str, np.ndarray] = {}
    held = decided(bound, ids, products) if any(op.guard for op in bound.ops) else None
    for op in bound.ops:
        if op.is_edit:
            mine = acted_on(op, ids, ids_of, held)
            positions[op.path] = np.union1d(positions.get(op.path, np.zeros(0, np.int64)), mine)
    return positions


def block_key(bound: BoundProgram, start: int, end: int, seen_whole: Sequence[tuple[int, int]] = ()) -> str | None:
    """Return a hash of the edits at positions start … end−1; None without edits. The hash includes the program's
    `Store` ops, since edits may read their rows, and the ops that decide where edits act.

    seen_whole: spans first … end−1 with bidirectional attention, such as images: an edit at a span's last position
        changes keys and values starting at its first position
    """
    end = max([end, *(stop for first, stop in seen_whole if first < end)])
    clip = functools.cache(functools.partial(_clip, start=start, end=end))  # most ops have the same ranges
    clipped = {i: there for i, op in enumerate(bound.ops) if op.reaches_cache and (there := clip(op.ranges))}
    if not clipped:
        return None
    kept = (STORE, *(DECIDE if any(bound.ops[i].guard for i in clipped) else ()))
    touched = [(bound.contents[i], clipped.get(i, op.ranges)) for i, op in enumerate(bound.ops)
               if i in clipped or op.kind in kept]  # fmt: skip
    return hashlib.sha256(msgspec.msgpack.encode(touched)).hexdigest()


def lowest_edit(bound: BoundProgram, seen_whole: Sequence[tuple[int, int]] = ()) -> int | None:
    """Return the first position whose keys and values an edit can change; `seen_whole` as in `block_key`."""
    lowest = min((op.ranges[0].start for op in bound.ops if op.reaches_cache and op.ranges), default=None)
    if lowest is None:
        return None
    edited = [(each.start, each.stop) for op in bound.ops if op.reaches_cache for each in op.ranges]
    touched = [first for first, stop in seen_whole if any(a < stop and b > first for a, b in edited)]
    return min([lowest, *touched])


def lowest_capture(bound: BoundProgram, seen_whole: Sequence[tuple[int, int]] = ()) -> int | None:
    """Return the first position that must be computed, not read from a cache, because it is captured, stored, or
    checked for delimiters. Inside a span in `seen_whole` (as in `block_key`), return the span's first position."""
    lowest = min(
        (op.ranges[0].start for op in bound.ops if op.kind in (CAPTURE, STORE, SPAN) and op.ranges), default=None
    )
    return None if lowest is None else min([lowest, *(first for first, stop in seen_whole if first <= lowest < stop)])


def checked_ranges(bound: BoundProgram, images: Sequence[tuple[int, int]]) -> tuple[PositionRange, ...]:
    """Return the captured positions that a self-check compares: only near the prompt's two ends, to keep the check
    short, and not in images, whose rows at `embed` are not token embeddings."""
    positions = position_array(tuple(each for op in bound.ops if op.kind == CAPTURE for each in op.ranges))
    positions = positions[(positions < CHECKED) | (np.abs(positions - bound.prompt) < CHECKED)]
    of_images = np.concatenate([np.zeros(0, np.int64), *(np.arange(*span) for span in images)])
    return position_ranges(np.setdiff1d(positions, of_images), None)


def _clip(ranges: tuple[PositionRange, ...], start: int, end: int) -> tuple[PositionRange, ...]:
    """Clip an op's ranges to positions start … end − 1; empty if the op acts on none of these."""
    return tuple(
        PositionRange(max(first, start), min(stop, end), row + max(start - first, 0) * step, step)
        for first, stop, row, step in ranges
        if first < end and stop > start
    )
