"""Recordings: the reads and writes of one prompt as ops, in the order of the caller's lines. Each keeps its line, so
that an error at the end of the trace can name it."""

from __future__ import annotations

import functools
import linecache
import os.path
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import (
    MissingSource,
    PatchclampError,
    ProgramError,
    ShapeError,
    TokensError,
    UnsupportedSite,
    describe_error,
)
from patchclamp.language import Capture, Program, SameRun, SiteOp, Zero
from patchclamp.language.site import SITES, parse_site
from patchclamp.language.tokens import Tokens
from patchclamp.plan import Prompt
from patchclamp.plan.bind import bind
from patchclamp.plan.prompt import Case
from patchclamp.sites import SiteRef
from patchclamp.trace.spots import Spot

if TYPE_CHECKING:
    from patchclamp.lm import LM
    from patchclamp.run import Run

_HERE = os.path.dirname(__file__)


class Line(NamedTuple):
    """A line of the caller's code."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f'File "{self.file}", line {self.number}' + (f": {code}" if code else "")


def callers_line() -> Line:
    """The innermost line on the stack outside this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def at_line(error: PatchclampError, line: Line) -> PatchclampError:
    """The same error with the line that caused it in its message."""
    told = type(error)(f"{error.message}\n  {line}", error.path)
    told.__cause__ = error.__cause__
    return told


MAX_STORED = 4096  # rows that a write can take within one run; more need two runs

CLOSED = {  # why nothing can be read or written, by the state of a recording
    "new": "a trace is a `with` block: `with lm.trace(prompt) as t:`, and reads and writes inside it",
    "left": "an error left this block, so nothing of it is run: nothing can be read or written there",
    "ended": "the trace has ended: reads and writes belong inside its `with`",
}
CLOSED |= dict.fromkeys(("waiting", "streaming"), CLOSED["ended"])

Depth = tuple[int, int]  # a layer, and a site word's index in a layer's order of computation


class Entry:
    """One op of a recording, its index there, and the line that recorded it.

    op: the op of the program; if it writes the rows of a read, its value is filled in once the read's run is known
    spot: the tensor and tokens it acts on
    source: the read whose rows it writes, or None
    within: True if one run can do both, the source read and this write, by storing the rows where they are read
    """

    def __init__(self, recording: Recording, op: SiteOp, spot: Spot, source: Entry | None, line: Line) -> None:
        self.recording, self.op, self.spot, self.source, self.line = recording, op, spot, source, line
        self.number = len(recording.entries)
        self.refs: list[SiteRef] = recording.lm.sites.resolve(op.at)
        self.points = {ref.point for ref in self.refs}
        self.within = source is not None and may_be_within(self, source)
        self.wanted = False  # for reads: True once its rows are needed

    @property
    def is_read(self) -> bool:
        return isinstance(self.op, Capture)

    @functools.cached_property
    def depths(self) -> list[Depth]:
        return [depth(self.recording.lm, point) for point in self.points]

    def want(self, recording: Recording, captured: bool = True) -> None:
        """Requests the rows of a read for a recording of the same trace; `captured`: they must outlive its run."""
        self.recording.check_open()
        self.recording.check_prompt()
        if self.recording.trace is not recording.trace:
            raise ProgramError(f"{self.spot} is of another trace: save it there, and write the saved tensor here")
        self.wanted |= captured

    def is_upstream_of(self, read: Entry) -> bool:
        """True if this write can change the value of a read of the same recording."""
        if self.is_read or self.recording is not read.recording:
            return False
        if read.recording.has_generated(read):
            return True  # what was sampled before it depends on every write
        if self.points & read.points:
            return self.number < read.number
        return min(self.depths) < max(read.depths)


def may_be_within(write: Entry, read: Entry) -> bool:
    """True if a write can take the rows of a read in the same run: the read is at an earlier layer and no later
    position, it has at most `MAX_STORED` rows, and nothing was written at its place since."""
    recording = read.recording
    if write.recording is not recording or recording.prompt is None:
        return False
    if any(not e.is_read and e.points & read.points for e in recording.entries[read.number + 1 :]):
        return False
    try:
        op = msgspec.structs.replace(write.op, value=same_run(write, read))
        recording.check(op)
    except PatchclampError:
        return False
    return len(recording.positions(read)) <= MAX_STORED


def same_run(write: Entry, read: Entry) -> SameRun:
    """The value of a write that takes the rows of a read in the same run."""
    return SameRun(read.op.at, None if read.op.tokens == write.op.tokens else read.op.tokens)


def depth(lm: LM, point: int) -> Depth:
    """A point's rank in the order of computation, by its earliest word."""
    site = parse_site(lm.sites.label(point))
    word = list(SITES).index(site.name)
    if isinstance(site.layers, int):
        return site.layers, word
    return (-1, word) if site.name == "embed" else (lm.model.layers, word)


class Recording:
    """The reads and writes of one prompt, and their results.

    prompt: (token ids, text), or None for a program without a prompt (`lm.edit`)
    trace: the trace that owns it, used only for identity comparison
    state: "new" before its `with`, "open" while lines are recorded, then "ended", or "left" if an error left the block;
        a stream is "waiting" and "streaming" before "ended"
    failure: the error of its run or block, or None
    """

    def __init__(self, lm: LM, prompt: tuple[list[int], str | None] | None, max_tokens: int, trace: object) -> None:
        self.lm, self.prompt, self.max_tokens, self.trace, self.line = lm, prompt, max_tokens, trace, callers_line()
        self.entries: list[Entry] = []
        self.saved: list[Any] = []  # `proxies.Saved`
        self.caches: list[Any] = []  # `proxies.Cache`
        self.sampling: dict[str, Any] | None = None
        self.score: list[int] = []
        self.state = "open"
        self.failure: PatchclampError | None = None
        self.run: Run | None = None

    def drop(self, error: BaseException) -> None:
        """Marks the block as left by an error, so that it does not run."""
        self.state = "left"
        if isinstance(error, PatchclampError):
            self.failure = error
        else:
            self.failure = MissingSource(f"an error left the block before it ran: {describe_error(error)}")

    def check_open(self) -> None:
        if self.state != "open":
            raise ProgramError(CLOSED[self.state])

    def check_prompt(self) -> None:
        if self.prompt is None:
            raise ProgramError("a named program edits and reads nothing: write numbers there, and read in a trace")

    def write(self, op: SiteOp, spot: Spot, source: Entry | None = None) -> None:
        """Checks and records a write, so that errors raise at the caller's line."""
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
        """Records a read, which sees the writes before it and not those after it."""
        self.check_open()
        op = Capture(spot.site, spot.tokens)
        self.check(op)
        entry = Entry(self, op, spot, None, callers_line())
        if self.prompt is not None and not self.positions(entry).size:
            raise TokensError(f"{spot} selects no token, so nothing would be read")
        if len(entry.refs) > 1:
            raise ProgramError(
                f"{spot.site} is read of one layer at a time, as in {entry.refs[0]}; t.cache({str(spot.site)!r}) saves "
                "many at once"
            )
        same = [other for other in self.entries if other.is_read and other.spot == spot]
        if same and not any(not e.is_read and e.points & entry.points for e in self.entries[same[-1].number :]):
            return same[-1]
        self.entries.append(entry)
        return entry

    def check(self, op: SiteOp) -> None:
        """Checks one op by binding it to the prompt. Errors name its site, because it has no path yet."""
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
        """The row width of a spot."""
        ref = self.lm.sites.resolve(spot.site)[0]
        first, end = ref.columns or (0, self.lm.sites.points[ref.point].width)
        return end - first

    def rehearsal(self) -> Recording:
        """A scratch recording of the same prompt, for checking lines that are not kept."""
        other = Recording(self.lm, self.prompt, self.max_tokens, self.trace)
        if self.prompt is not None:
            vars(other)["bound_prompt"] = self.bound_prompt
        return other

    def check_width(self, spot: Spot, read: Entry) -> None:
        """Raises `ShapeError` if the rows of a read and of the spot that takes them differ in width."""
        written, width = self.width(spot), read.recording.width(read.spot)
        if written != width:
            raise ShapeError(
                f"{spot} is {written} wide, and {read.spot} is {width}: name the part of the larger that is meant, as "
                "in z[3] or neurons[0:8]"
            )

    def _check_source(self, write: Entry, read: Entry) -> None:
        """Raises `ProgramError` if the source of a write is computed after it or depends on it."""
        if read.recording is not self:
            return
        if self.has_generated(read):
            raise ProgramError(
                f"{read.spot} depends on what is generated, and {write.spot} may change that: read it in one trace and "
                "write it in another, or use pc.Apply on a local engine (.apply(fn))"
            )
        latest = max(read.depths)
        if any(depth(self.lm, point) <= latest for point in write.points - read.points):
            raise ProgramError(
                f"{write.spot.site} is computed before {read.spot.site}, so it cannot depend on it in one run: read in "
                "one trace (or t.invoke) and write in another"
            )

    @functools.cached_property
    def bound_prompt(self) -> Prompt:
        assert self.prompt is not None
        ids, text = self.prompt
        return Prompt(ids, lambda: self.lm.tokenizer.spell(ids, text))

    @property
    def limit(self) -> int:
        """The number of positions that are inputs if the run generates `max_tokens`."""
        return self.length + self.max_tokens - 1

    @property
    def length(self) -> int:
        return 0 if self.prompt is None else len(self.prompt[0])

    def positions(self, entry: Entry) -> np.ndarray:
        """All positions that an entry may act on."""
        return np.concatenate([case.positions for case in self._cases(entry.spot.site.name, entry.op.tokens)])

    def known_positions(self, spot: Spot, tokens: Tokens | None = None) -> np.ndarray:
        """The positions of a spot, or of tokens there. Raises `ShapeError` if they depend on generated tokens."""
        self.check_prompt()
        cases = self._cases(spot.site.name, spot.tokens if tokens is None else tokens)
        if len(cases) != 1 or not cases[0].alone:
            raise ShapeError(f"which tokens {spot} has is known when they are there: name positions")
        return cases[0].positions

    def _cases(self, site: str, tokens: Tokens) -> list[Case]:
        return self.bound_prompt.cases(tokens, self.limit, self.length - 1 if site == "logits" else 0)

    def has_generated(self, entry: Entry) -> bool:
        """True if an entry may act on generated tokens."""
        positions = self.positions(entry)
        return bool(positions.size) and int(positions.max()) >= self.length


def _no_source(key: str) -> Any:
    raise UnsupportedSite(f"run {key} is read by the program")
