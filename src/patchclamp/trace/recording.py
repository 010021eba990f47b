"""Recordings: one prompt's reads and writes as ops, in the order of the caller's lines, and the runs they require.

A `Spot` is a model tensor at selected tokens, and each proxy refers to a spot. A spot has the module's shape without
the batch axis, [T, W], or [T, H, E] for heads. The names of nnterp (`layers_output[5]`) keep the batch axis, [1, T, W],
when indexed and when saved. `logits` never has this axis.

An `Entry` is a read or write of a spot. It keeps the caller's line, for errors that are raised at the end of the trace.

A write of another run's rows must wait until that run has captured them. So every write has a level: 0 if it writes
numbers or rows of an earlier layer of its own run, else one more than its source's level. A read's level is the highest
level of the writes in its prompt that can change it: those at an earlier depth, or on an earlier line at the same
point, or all writes if it reads generated tokens. A run with only these writes gives the read the same value as the
last run. Runs with equal level and `max_tokens` form a batch (`Schedule`). If a level depends on itself, no order
exists and the trace is rejected.
"""

from __future__ import annotations

import functools
import graphlib
import linecache
import os.path
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import (
    MissingSource,
    PatchclampError,
    ProgramError,
    ShapeError,
    TokensError,
    UnsupportedSite,
    describe_error,
)
from patchclamp.language import Capture, Program, Readout, SameRun, SiteOp, Zero
from patchclamp.language.site import SITES, SPECS, Site, parse_site
from patchclamp.language.tokens import Positions, Range, Selection, Tokens, every, parse_tokens, prompt
from patchclamp.language.values import Vector, as_array, as_number, check_dense
from patchclamp.plan import Prompt
from patchclamp.plan.bind import bind
from patchclamp.plan.prompt import Case
from patchclamp.sites import SiteRef

if TYPE_CHECKING:
    from patchclamp.lm import LM
    from patchclamp.run import Run

WHOLE = slice(None)


class Spot(msgspec.Struct, frozen=True):
    """A site at a selection of tokens.

    whole: True if the selection is a whole group; indices in brackets then count within it
    named: True if the caller named the group (`t.generated`); a selection in brackets is then restricted to it
    parted: True if heads, neurons or experts were already chosen, or the site has none; brackets then select tokens
    batched: True if there is a leading batch axis
    single: True if one token was chosen by index, which drops the token axis
    numbered: True if that index was in this tensor's brackets; no further brackets are allowed
    """

    site: Site
    tokens: Tokens
    whole: bool = True
    named: bool = False
    parted: bool = True
    batched: bool = False
    single: bool = False
    numbered: bool = False

    @classmethod
    def of(cls, site: Site, group: Tokens, named: bool, single: bool = False, batched: bool = False) -> Spot:
        """Create the spot of a site at a group: `prompt` (for logits only its last token), `generated` or `every`."""
        has_parts = bool(SPECS[site.name].index)
        whole = isinstance(group, Positions) and group.index is None
        tokens = group
        if site.name == "logits" and group == prompt:
            tokens = prompt[-1:]
        return cls(site, tokens, whole, named, not has_parts or site.index is not None, batched, single and not batched)

    def __getitem__(self, key: Any) -> Spot:
        keys = list(key) if isinstance(key, tuple) else [WHOLE if key is Ellipsis else key]
        if self.numbered:
            raise ProgramError(
                f"{self} is already the row of one token. Tensors here are [T, D], one row per token, not tuples as "
                "module.output in nnsight, so [0] is the first token: use output[:] for every token or output[-1] for "
                "the last, without further brackets"
            )
        if any(one is None or one is Ellipsis for one in keys):
            raise ProgramError(f"{self}: expected numbers, slices, lists or selections as index, got {key!r}")
        spot = self._without_batch(keys) if self.batched else self
        if not spot.parted:
            spot = spot._part(keys.pop(1 if len(keys) > 1 else 0)) if _is_part(keys) else spot
        if keys:
            spot = spot._select(keys.pop(0))
        if any(not _is_whole(one) for one in keys):
            raise ProgramError(
                f"{spot}: brackets index tokens and heads, neurons or experts; single elements of a row cannot be read "
                "or written: use .save() and index it after the trace, or write a vector with zeros"
            )
        return spot

    def _without_batch(self, keys: list[Any]) -> Spot:
        """Apply the batch index, the first in the brackets."""
        first = keys.pop(0)
        if _is_whole(first):
            return self
        if isinstance(first, Selection) or first not in (0, -1):
            raise ProgramError(
                f"{self} has a leading batch axis of 1, as in nnterp: use [:, {written(first)}] or "
                f"[0, {written(first)}]"
            )
        return msgspec.structs.replace(self, batched=False)

    def _part(self, key: Any) -> Spot:
        """Select heads, neurons or experts."""
        if isinstance(key, (Sequence, range)) or getattr(key, "ndim", 0):
            part, name = SPECS[self.site.name].index, self.site.name
            raise ProgramError(
                f"{self.site}: expected one {part} or a contiguous slice ({name}[3], {name}[2:5]), got a list or mask; "
                f"write one line per {part}"
            )
        site = self.site if _is_whole(key) else Site(self.site.name, self.site.layers, key)
        return msgspec.structs.replace(self, site=site, parted=True)

    def _select(self, key: Any) -> Spot:
        """Select tokens of the group."""
        if _is_whole(key):
            return self
        if isinstance(key, (Selection, str)):
            chosen = parse_tokens(key)
            tokens = self.tokens & chosen if self.named and self.tokens != every else chosen
            return msgspec.structs.replace(self, tokens=tokens, whole=False)
        if not self.whole:
            raise ProgramError(f"{self}: tokens are already selected")
        if self.site.name == "logits" and self.tokens == prompt[-1:]:
            return self._sampled(key)
        group = self.tokens
        assert isinstance(group, Positions)
        if isinstance(key, slice):
            return msgspec.structs.replace(self, tokens=group[key], whole=False)
        if isinstance(key, (Sequence, range)) or hasattr(key, "tolist"):
            key = self._numbers(key)
        if isinstance(key, list):
            return msgspec.structs.replace(self, tokens=group[key], whole=False)
        return msgspec.structs.replace(self, tokens=group[key], whole=False, single=True, numbered=True)

    def _numbers(self, key: Any) -> Any:
        """Convert a list, tensor or array in brackets to a position or a list of positions."""
        key = key.tolist() if hasattr(key, "tolist") else list(key)
        if isinstance(key, list) and any(isinstance(one, (list, tuple)) for one in key):
            raise ProgramError(f"{self}: expected one list of token positions, got an index with several axes")
        if any(isinstance(one, bool) for one in (key if isinstance(key, list) else [key])):
            raise ProgramError(f"{self}: expected token positions, got a mask: use mask.nonzero().flatten()")
        return key

    def _sampled(self, key: Any) -> Spot:
        """Select from the logits of a prompt. They have a single row, for the last token."""
        if key not in (0, -1):
            raise ProgramError(
                f"logits[{written(key)}]: a prompt has logits only at its last token: use logits[-1], or "
                "t.generated.logits for generated tokens"
            )
        return msgspec.structs.replace(self, tokens=prompt[-1], whole=False, single=True, numbered=True)

    def __str__(self) -> str:
        return f"{self.site} @ {self.tokens}"


def _is_part(keys: list[Any]) -> bool:
    """True if brackets on a site with heads, neurons or experts index these parts, alone or after the tokens."""
    return len(keys) > 1 or (len(keys) == 1 and not isinstance(keys[0], (Selection, str)))


def _is_whole(key: Any) -> bool:
    return isinstance(key, slice) and key == WHOLE


def written(key: Any) -> str:
    """Return a subscript key's source text."""
    return str(Range.of(key)) if isinstance(key, slice) else str(key)


def positive(site: Site, layers: int) -> Site:
    """Return the site with a negative layer replaced by its index from the front."""
    if isinstance(site.layers, int) and -layers <= site.layers < 0:
        return Site(site.name, site.layers + layers, site.index)
    return site


def numbers(value: Any) -> float | np.ndarray | None:
    """Convert a value to a number, or an array to an fp32 copy [..., W], as the caller may change the array later.
    Returns None for other types. Raises `ProgramError` for values that `as_array` and `as_number` refuse."""
    if isinstance(value, Vector):
        return np.array(value.array())
    if isinstance(value, str):
        return None
    if hasattr(value, "detach"):
        check_dense(value)
    if isinstance(value, Sequence) or getattr(value, "shape", ()) != ():
        return np.array(as_array(value))
    if not hasattr(value, "__float__"):
        return None
    return as_number(value)


_HERE = os.path.dirname(__file__)


class Line(NamedTuple):
    """A line of the caller's code."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f'File "{self.file}", line {self.number}' + (f": {code}" if code else "")


def callers_line() -> Line:
    """Return the innermost line on the stack outside this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def at_line(error: PatchclampError, line: Line) -> PatchclampError:
    """Return the same error with the caller's line in its message."""
    told = type(error)(f"{error.message}\n  {line}", error.path)
    told.__cause__ = error.__cause__
    return told


MAX_STORED = 4096  # rows that a write can take from its own run; more rows need a second run

CLOSED = {  # why nothing can be read or written, by the state of a recording
    "new": "a trace is a `with` block: `with lm.trace(prompt) as t:`, with reads and writes inside it",
    "left": "an error ended this block, so it does not run and cannot be read or written",
    "ended": "the trace has ended: reads and writes belong inside its `with`",
}
CLOSED |= dict.fromkeys(("waiting", "streaming"), CLOSED["ended"])

Depth = tuple[int, int]  # layer, and index of the site name in order of computation


class Entry:
    """One op of a recording, with its index and the line that recorded it.

    op: the op of the program; if it writes the rows of a read, the value is filled in once the read's run is known
    spot: the tensor and tokens it acts on
    source: the read whose rows it writes, or None
    within: True if one run can do both the source read and this write, by storing the rows that it reads
    """

    recording: Recording
    op: SiteOp
    spot: Spot
    source: Entry | None
    line: Line

    def __init__(self, recording: Recording, op: SiteOp, spot: Spot, source: Entry | None, line: Line) -> None:
        self.recording, self.op, self.spot, self.source, self.line = recording, op, spot, source, line
        self.number: int = len(recording.entries)
        self.refs: list[SiteRef] = recording.lm.sites.resolve(op.at)
        self.points: set[int] = {ref.point for ref in self.refs}
        self.within: bool = source is not None and may_be_within(self, source)
        self.wanted: bool = False  # for reads: True once its rows are needed

    @property
    def is_read(self) -> bool:
        return isinstance(self.op, Readout)

    @functools.cached_property
    def depths(self) -> list[Depth]:
        return [depth(self.recording.lm, point) for point in self.points]

    def want(self, recording: Recording, captured: bool = True) -> None:
        """Request a read's rows for a recording of the same trace. `captured`: the rows must be kept after the run."""
        self.recording.check_open()
        self.recording.check_prompt()
        if self.recording.trace is not recording.trace:
            raise ProgramError(f"{self.spot} belongs to another trace: save it there, and write the saved tensor here")
        self.wanted |= captured

    def before(self) -> list[Entry]:
        """Return the entries that must run first: a read's upstream writes, or a write's source if in another run."""
        if self.is_read:
            return [entry for entry in self.recording.entries if entry.is_upstream_of(self)]
        return [] if self.source is None or self.within else [self.source]

    def is_upstream_of(self, read: Entry) -> bool:
        """True if this write can change the value of a read of the same recording."""
        if self.is_read or self.recording is not read.recording:
            return False
        if read.recording.has_generated(read):
            return True  # earlier sampled tokens depend on every write
        if self.points & read.points:
            return self.number < read.number
        return min(self.depths) < max(read.depths)


def may_be_within(write: Entry, read: Entry) -> bool:
    """True if a write can take the rows of a read in the same run: the read is at an earlier layer and at no later
    position, it has at most `MAX_STORED` rows, and its tensor was not written since."""
    recording = read.recording
    if write.recording is not recording or recording.prompt is None:
        return False
    if recording.is_written_since(read):
        return False
    try:
        recording.check(msgspec.structs.replace(write.op, value=same_run(write, read)))
    except PatchclampError:
        return False
    return len(recording.positions(read)) <= MAX_STORED


def same_run(write: Entry, read: Entry) -> SameRun:
    """Return the `SameRun` value of a write that takes the rows of a read in its own run."""
    return SameRun(read.op.at, None if read.op.tokens == write.op.tokens else read.op.tokens)


def depth(lm: LM, point: int) -> Depth:
    """Return a point's rank in the order of computation, by its first site name."""
    site = parse_site(lm.sites.label(point))
    word = list(SITES).index(site.name)
    if isinstance(site.layers, int):
        return site.layers, word
    return (-1, word) if site.name == "embed" else (lm.model.layers, word)


class Recording:
    """The reads and writes of one prompt, and their results.

    prompt: (token ids, text), or None for a program without a prompt (`lm.edit`)
    trace: the trace that owns it, used only for identity comparison
    state: "new" before its `with`, "open" while lines are recorded, then "ended", or "left" if an error ended the
        block; a stream is "waiting" and "streaming" before "ended"
    failure: the error of its run or block, or None
    """

    lm: LM
    prompt: tuple[list[int], str | None] | None
    max_tokens: int
    trace: object
    line: Line

    def __init__(self, lm: LM, prompt: tuple[list[int], str | None] | None, max_tokens: int, trace: object) -> None:
        self.lm, self.prompt, self.max_tokens, self.trace, self.line = lm, prompt, max_tokens, trace, callers_line()
        self.entries: list[Entry] = []
        self.saved: list[Any] = []  # `proxies.Saved`
        self.caches: list[Any] = []  # `proxies.Cache`
        self.sampling: dict[str, Any] | None = None
        self.score: list[int] = []
        self.state: str = "open"
        self.failure: PatchclampError | None = None
        self.run: Run | None = None

    def drop(self, error: BaseException) -> None:
        """Mark the block as exited with an error, so that its recording does not run."""
        self.state = "left"
        if isinstance(error, PatchclampError):
            self.failure = error
        else:
            self.failure = MissingSource(f"an error ended the block before it ran: {describe_error(error)}")

    def check_open(self) -> None:
        if self.state != "open":
            raise ProgramError(CLOSED[self.state])

    def check_prompt(self) -> None:
        if self.prompt is None:
            raise ProgramError("a named program cannot read: write numbers in it, and read in a trace")

    def write(self, op: SiteOp, spot: Spot, source: Entry | None = None) -> None:
        """Check and record a write, so that errors raise at the caller's line."""
        self.check_open()
        self.check(op if source is None else Zero(op.at, op.tokens))
        entry = Entry(self, op, spot, source, callers_line())
        if source is not None:
            source.want(self, captured=not entry.within)
            self.check_width(spot, source)
            if not entry.within:
                self._check_source(entry, source)
        self.entries.append(entry)

    def read(self, spot: Spot) -> Entry:
        """Record a read, which sees the writes of earlier lines but not of later ones."""
        self.check_open()
        op = Capture(spot.site, spot.tokens)
        self.check(op)
        entry = Entry(self, op, spot, None, callers_line())
        if self.prompt is not None and not self.positions(entry).size:
            raise TokensError(f"{spot} selects no token, so nothing would be read")
        if len(entry.refs) > 1:
            raise ProgramError(
                f"{spot.site} is read one layer at a time, as in {entry.refs[0]}; t.cache({str(spot.site)!r}) saves "
                "many at once"
            )
        same = [other for other in self.entries if other.is_read and other.spot == spot]
        if same and not self.is_written_since(same[-1]):
            return same[-1]
        self.entries.append(entry)
        return entry

    def is_written_since(self, read: Entry) -> bool:
        """True if a later write acts at one of the read's points."""
        return any(not e.is_read and e.points & read.points for e in self.entries[read.number :])

    def check(self, op: SiteOp) -> None:
        """Check an op by binding it to the prompt. Errors name the op's site, because it has no path yet."""
        if self.prompt is None:
            self.lm.sites.resolve(op.at)
            return
        try:
            bind(
                Program((op,)), "", self.bound_prompt, self.max_tokens, self.lm.sites, _no_source, self.lm.bank, {},
                {} if self.lm.allows_code else None,
            )  # fmt: skip
        except PatchclampError as error:
            message = error.message if str(op.at) in error.message else f"{op.at}: {error.message}"
            raise type(error)(message) from error.__cause__

    def width(self, spot: Spot) -> int:
        """Return the row width of a spot."""
        ref = self.lm.sites.resolve(spot.site)[0]
        first, end = ref.columns or (0, self.lm.sites.points[ref.point].width)
        return end - first

    def rehearsal(self) -> Recording:
        """Create a temporary recording of the same prompt, to check lines without keeping their entries."""
        other = Recording(self.lm, self.prompt, self.max_tokens, self.trace)
        if self.prompt is not None:
            vars(other)["bound_prompt"] = self.bound_prompt
        return other

    def check_width(self, spot: Spot, read: Entry) -> None:
        """Raise `ShapeError` unless the rows of a read are as wide as the spot that they are written to."""
        written, width = self.width(spot), read.recording.width(read.spot)
        if written != width:
            raise ShapeError(
                f"widths differ: {spot} has {written}, {read.spot} has {width}; select a part of the larger, such as "
                "z[3] or neurons[0:8]"
            )

    def _check_source(self, write: Entry, read: Entry) -> None:
        """Raise `ProgramError` if the source of a write is computed after the write, or depends on it."""
        if read.recording is not self:
            return
        if self.has_generated(read):
            raise ProgramError(
                f"{read.spot} depends on generated tokens, which {write.spot} may change: read it in one trace and "
                "write it in another, or use pc.Apply on a local engine (.apply(fn))"
            )
        latest = max(read.depths)
        if any(depth(self.lm, point) <= latest for point in write.points - read.points):
            raise ProgramError(
                f"{write.spot.site} is computed before {read.spot.site}, so a write to it cannot use this read in one "
                "run: read in one trace (or t.invoke) and write in another"
            )

    @functools.cached_property
    def bound_prompt(self) -> Prompt:
        assert self.prompt is not None
        ids, text = self.prompt
        return prompt_of(self.lm.tokenizer, ids, text, None)

    @property
    def limit(self) -> int:
        """The number of input positions, assuming that the run generates `max_tokens`."""
        return self.length + self.max_tokens - 1

    @property
    def length(self) -> int:
        return 0 if self.prompt is None else len(self.prompt[0])

    def positions(self, entry: Entry) -> np.ndarray:
        """Return all positions that an entry may act on."""
        return np.concatenate([case.positions for case in self._cases(entry.spot.site.name, entry.op.tokens)])

    def known_positions(self, spot: Spot, tokens: Tokens | None = None) -> np.ndarray:
        """Return the positions of `tokens` (default: the spot's tokens). Raises `ShapeError` while they are unknown."""
        self.check_prompt()
        cases = self._cases(spot.site.name, spot.tokens if tokens is None else tokens)
        if len(cases) != 1 or not cases[0].alone:
            raise ShapeError(f"the tokens of {spot} are unknown until they are generated: use fixed positions")
        return cases[0].positions

    def _cases(self, site: str, tokens: Tokens) -> list[Case]:
        return self.bound_prompt.cases(tokens, self.limit, self.length - 1 if site == "logits" else 0)

    def has_generated(self, entry: Entry) -> bool:
        """True if an entry may act on generated tokens."""
        positions = self.positions(entry)
        return bool(positions.size) and int(positions.max()) >= self.length


def _no_source(key: str) -> Any:
    raise UnsupportedSite(f"the program reads run {key}")


class Planned(NamedTuple):
    """One run of a recording.

    entries: the writes and reads that the run executes, in order
    max_tokens: 1 for an early run that needs only the prompt
    is_last: True for the recording's own run, with all its writes
    """

    recording: Recording
    level: int
    entries: tuple[Entry, ...]
    max_tokens: int
    is_last: bool


class Schedule:
    """The levels of the recordings' entries, and the resulting runs. `has_edits`: True if other edits, which may need
    generated tokens, act before the trace's own writes. Raises `ProgramError` for a write that depends on itself."""

    def __init__(self, recordings: Iterable[Recording], has_edits: bool = False) -> None:
        self.recordings, self._has_edits = list(recordings), has_edits
        before = {entry: entry.before() for recording in self.recordings for entry in recording.entries}
        self._levels: dict[Entry, int] = {}
        try:
            for entry in graphlib.TopologicalSorter(before).static_order():
                level = max((self._levels[other] for other in before[entry]), default=0)
                self._levels[entry] = level + (not entry.is_read and bool(before[entry]))
        except graphlib.CycleError as error:
            entry = min(error.args[1], key=lambda entry: entry.number)
            raise at_line(
                ProgramError(f"{entry.spot} depends on itself through other writes: no order of runs can resolve it"),
                entry.line,
            ) from None
        self._last = {rec: max((self._levels[e] for e in rec.entries if not e.is_read), default=0)
                      for rec in self.recordings}  # fmt: skip

    def batches(self) -> list[list[Planned]]:
        """Return the runs in batches, by ascending level and `max_tokens`."""
        runs = list(self._early_runs())
        for of in self.recordings:
            entries = tuple(entry for entry in of.entries if not entry.is_read or entry.wanted)
            runs.append(Planned(of, self._last[of], entries, of.max_tokens, True))
        keys = sorted({(run.level, run.max_tokens) for run in runs})
        return [[run for run in runs if (run.level, run.max_tokens) == key] for key in keys]

    def gives(self, run: Planned, read: Entry, write: Entry) -> bool:
        """True if this run captures the rows of `read` for `write`."""
        level = self._levels[read]
        from_last = self._levels[write] > self._last[read.recording]
        return run.recording is read.recording and (run.is_last if from_last else run.level == level)

    def _early_runs(self) -> Iterator[Planned]:
        """Yield an early run for each source that its recording's own run would capture too late for the write."""
        early: dict[tuple[Recording, int], list[Entry]] = {}
        for write in (e for recording in self.recordings for e in recording.entries if e.source and not e.within):
            read = write.source
            assert read is not None
            if self._levels[write] <= self._last[read.recording]:
                early.setdefault((read.recording, self._levels[read]), []).append(read)
        for (recording, level), reads in early.items():
            writes = {write for read in reads for write in read.before()}
            in_prompt = {write for write in writes if (recording.positions(write) < recording.length).any()}
            alone = not self._has_edits and all(map(_fits_the_prompt, in_prompt))
            max_tokens = 1 if alone else recording.max_tokens
            chosen = (in_prompt if max_tokens == 1 else writes) | set(reads)
            yield Planned(recording, level, tuple(e for e in recording.entries if e in chosen), max_tokens, False)


def _fits_the_prompt(write: Entry) -> bool:
    """True if a write has the same effect on the prompt in a run without generated tokens."""
    recording, op = write.recording, write.op
    rows = getattr(op, "value", None)
    if isinstance(rows, Vector) and len(rows.shape) == 2 and (recording.positions(write) >= recording.length).any():
        return False
    if write.source is not None and len(recording.positions(write)) > 1 and recording.has_generated(write):
        return False
    try:
        cases = recording.bound_prompt.cases(op.tokens, recording.length)
    except (TokensError, ShapeError):
        return False
    return all(np.all(case.positions < recording.length) for case in cases)
