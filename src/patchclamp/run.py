"""`pc.Run`: what came of one request."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from patchclamp.engines.base import Answer, Captured, Drafts, Engine, Request
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import MissingSource, NotFinite, PatchclampError, ProgramError
from patchclamp.language import Program, Site, SiteOp
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Tokens, read_tokens
from patchclamp.language.values import DTYPES, as_flag
from patchclamp.plan import CAPTURE, BoundOp, BoundProgram
from patchclamp.plan.bound import Keep, acted, pack_columns, position_array
from patchclamp.sites import SiteMap, SiteRef
from patchclamp.store.captured import cast, merged, overflowed

if TYPE_CHECKING:
    import torch

MAX_PREFETCH_BYTES = 1 << 20  # of captures that come together when the first of them is read
VIEWED_BYTES = 1 << 17  # of a point that surely comes as a view, where views are to be had
MAX_VIEWED_BYTES = 1 << 29  # of captures that come together though they are not little
NO_POSITIONS = np.zeros(0, np.int64)


class Stored(NamedTuple):
    """Rows that one op captured, or all (None), at these positions [T], ascending; `selected` [T]: which of them count,
    or None: all."""

    op: int | None
    positions: np.ndarray
    selected: np.ndarray | None = None

    def between(self, first: int, end: int) -> tuple[int, int]:
        """Which of its rows are at positions first … end−1, as a half-open range."""
        begin, stop = np.searchsorted(self.positions, [first, end])
        return int(begin), int(stop)


class Layout(NamedTuple):
    """What `run[site]` is, without its rows.

    at, ref: the site
    stored: where the rows lie; of two that have a position the later counts
    positions [T], shape, dtype: of `run[site]`
    """

    at: Site
    ref: SiteRef
    stored: list[Stored]
    positions: np.ndarray
    shape: tuple[int, ...]
    dtype: str


class Owner(Protocol):
    """The `LM` that ran it, which stays open as long as its runs are held."""

    engine: Engine


class Run:
    """One executed request.

    key: its name, also in programs: `From(run.key, site)`
    prompt_token_ids: of the prompt
    program: what it ran
    error: the error it met, or None
    closed: whether its captures were let go
    lora: the folder of its adapter, or None
    images: of each image in the prompt, the positions of the tokens in whose place it was read

    Captures stay with the worker until the run is dropped or `close`d; `run[site]` fetches them, once.
    """

    def __init__(
        self, owner: Owner, request: Request, program: Program, answer: Answer | PatchclampError,
        is_kept_elsewhere: bool = False,
    ) -> None:  # fmt: skip
        self.key, self.prompt_token_ids, self.program = request.run, request.prompt_token_ids, program
        self.error: PatchclampError | None = None if isinstance(answer, Answer) else answer
        self.closed, self.images = False, request.images
        self.lora = None if request.adapter is None else request.adapter.folder
        self._owner, self._answer, self._text, self._chat = owner, answer, request.text, request.chat
        self._bound: BoundProgram | None = request.bound
        self._limit = len(request.prompt_token_ids) + request.max_tokens - 1  # positions, had it gone on to the end
        conditions = {op.condition.ids for op in self._ops if op.condition}
        self._ids_of = {key: request.vectors[key].reshape(-1).astype(np.int64) for key in conditions}
        self._prefetched: dict[tuple[int, int | None], Captured] = {}
        self._fetched: dict[tuple[int, int | None], tuple[np.ndarray, torch.Tensor | np.ndarray]] = {}
        self._equal = NO_POSITIONS, NO_POSITIONS  # what was to come and what came, found equal last
        self._release: weakref.finalize[..., Run] | None = None
        captures = any(op.kind == CAPTURE for op in self._ops)
        if not is_kept_elsewhere and (captures or request.code):  # else the engine keeps nothing for it, or for another
            self._release = weakref.finalize(self, owner.engine.release, [self.key])
            self._release.atexit = False

    @property
    def _ops(self) -> tuple[BoundOp, ...]:
        return self._bound.ops if self._bound is not None else ()

    @property
    def answer(self) -> Answer:
        if isinstance(self._answer, PatchclampError):
            raise self._answer
        return self._answer

    @property
    def text(self) -> str:
        """The generated text; decoded when it is first read."""
        answer = self.answer
        if not isinstance(answer.text, str):
            answer.text = answer.text()
        return answer.text

    @property
    def token_strings(self) -> list[str]:
        """Each token's text, of the prompt and then of what was generated."""
        return self._owner.engine.tokenizer.token_strings([*self.prompt_token_ids, *self.token_ids])

    @property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each generated token. Raises `ProgramError` of a run that did not ask for them."""
        if self.answer.logprobs is None:
            raise ProgramError("this run has no log-probabilities: ask for them, lm.run(..., logprobs=True)")
        return self.answer.logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]]:
        """The log-probabilities of the likeliest tokens at each generated one, by token id.

        Raises `ProgramError` of a run that did not ask for them.
        """
        if len(self.answer.top_logprobs) != len(self.token_ids):
            raise ProgramError("this run has no likeliest tokens: ask for some, as in lm.run(..., logprobs=5)")
        return self.answer.top_logprobs

    @property
    def scores(self) -> dict[int, float]:
        return self.answer.scores

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were read from the engine's prefix cache instead of computed."""
        return self.answer.cached_tokens

    @property
    def computed_from(self) -> tuple[int, int] | None:
        """The layer and the position of the prompt from which on it was computed, where the engine took the rest from a
        run of the prompt without a program; None if it did not."""
        return self.answer.computed_from

    @property
    def drafts(self) -> Drafts | None:
        """Tokens (proposed, accepted) of speculative decoding; None where none are counted."""
        return self.answer.drafts

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    def __getitem__(self, site: Site | str) -> torch.Tensor | np.ndarray:
        """What was captured at one site: a CPU tensor [T, W] of the captured positions, in the capture's dtype (a NumPy
        array from the fake engine). Of heads it is [T, H, E]; an integer index drops its axis: `run[pc.z[5, 3]]` is
        [T, E]. Projected by W [k, D] it is [T, k].

        A site captured twice gives the union of positions; where both have one, the later in the program's order. A
        path such as "edits[0]" gives what that `Capture` kept, at its own place in the order. Each read returns a copy:
        changing it changes nothing that `From` or the bank reads. `run.read(site, copy=False)` saves the copy.

        Raises `MissingSource` if it was not captured, and the run's own error if it failed.
        """
        return self.read(site)

    def read(self, site: Site | str, *, copy: bool = True) -> torch.Tensor | np.ndarray:
        """`run[site]`. With `copy=False` the captured memory itself, which later reads and `From` use too: do not
        change it in place."""
        as_flag(copy, "copy")
        at, ref, ordinal = self._locate(site)
        return self.rows_of(str(site), at, ref, ordinal, copy=copy)

    def rows_of(
        self, name: str, at: Site, ref: SiteRef, ordinal: int | None = None, *, copy: bool = True
    ) -> torch.Tensor | np.ndarray:
        """`run[name]` of a site whose ref is known, captured by one op or by all."""
        rows = self._shaped(at, ref, self._fetch(ref, ordinal, name)[1])
        if not copy:
            return rows
        return rows.copy() if isinstance(rows, np.ndarray) else rows.clone()

    def _shaped(self, at: Site, ref: SiteRef, rows: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
        """The rows of a site, of the rows of its point."""
        parts = self._sites.parts(at.name)
        if parts is None or ref.point in self._projected:
            return rows
        first, end = ref.columns or (0, rows.shape[1])
        rows = rows[:, first:end].reshape((len(rows), (end - first) // parts[1], parts[1]))
        rows = rows[:, 0] if isinstance(at.index, int) else rows
        return rows[..., 0] if parts[1] == 1 else rows

    def positions(self, site: Site | str) -> list[int]:
        """The positions that label the rows of `run[site]`."""
        _, ref, ordinal = self._locate(site)
        return self._fetch(ref, ordinal, str(site))[0].tolist()

    @property
    def sites(self) -> list[str]:
        """Every captured site, as text."""
        return [str(ref) for ref in self.captured_of(self._sites.refs())] if self.has_captures else []

    @property
    def has_captures(self) -> bool:
        """Whether its program captures anything."""
        return bool(self._captured)

    def captured_of(self, refs: Iterable[SiteRef]) -> list[SiteRef]:
        """Those of some sites that were captured; where a part of the row was projected, that part."""
        part, projected = self._sites.part, self._projected
        return [part(ref, projected.get(ref.point, 0)) for ref in refs if ref.point in self._captured]

    @property
    def acted(self) -> dict[str, list[int]]:
        """By path, such as "edits[0]", the positions that each edit acted on, ascending. The run's token ids tell it
        exactly."""
        tokens = np.array([*self.prompt_token_ids, *self.token_ids][: self._positions], np.int64)
        if self._bound is None:
            return {}
        return {path: positions.tolist() for path, positions in acted(self._bound, tokens, self._ids_of).items()}

    @property
    def idle_edits(self) -> list[str]:
        """Paths of the edits that acted on no row, in order: none of their tokens came before the run ended."""
        return [path for path, positions in self.acted.items() if not positions]

    def close(self) -> None:
        """Frees the captures now."""
        self.closed = True
        self._prefetched.clear()
        if self._release is not None:
            self._release()

    def is_projected(self, site: Site | str) -> bool:
        """True if the capture of a site kept the products of a matrix in place of its rows."""
        return self._locate(site)[1].point in self._projected

    def refs(self, site: Site | str) -> list[str]:
        """The site refs that a site names, layer by layer, as `run[...]` takes them."""
        return [str(ref) for ref in self._sites.resolve(parse_site(site))]

    # -- as a source for `From`

    def positions_of(self, point: int) -> np.ndarray:
        """The positions captured at a point, ascending; none if it was not captured. Raises `MissingSource` where its
        rows are not whole, or not told apart."""
        if point in self._projected:
            raise MissingSource(
                f"run {self.key} captured {self._sites.label(point)} projected: capture it whole to read it with From"
            )
        ordinals = self._captures_at.get(point, [])
        if len(ordinals) > 1 and any(_conditional(self._ops[i]) for i in ordinals):
            raise MissingSource(
                f"run {self.key} captured {self._sites.label(point)} {len(ordinals)} times, one of them by token id: "
                "capture it once to read it with From, or give the rows of run[site]"
            )
        return self._captured_computed.get(point, NO_POSITIONS)

    def select(self, tokens: Tokens | str) -> np.ndarray:
        """The positions of this run that a selection names, in its order."""
        return self._select(read_tokens(tokens, "tokens"), self._positions)

    def _select(self, tokens: Tokens, limit: int) -> np.ndarray:
        tokenizer = self._owner.engine.tokenizer
        prompt = prompt_of(tokenizer, self.prompt_token_ids, self._text, self._chat, self.images)
        return prompt.select(tokens, limit, [*self.prompt_token_ids, *self.token_ids])

    # -- what it captured

    def layout(self, site: Site | str) -> Layout:
        """What `run[site]` is and where its rows lie, without reading them. Raises as `run[site]` does."""
        at, ref, ordinal = self._locate(site)
        self._check_part(ref, str(site))
        ordinals = self._ordinals(ref.point, ordinal, str(site))
        if any(_conditional(self._ops[i]) for i in ordinals):
            stored = [Stored(i, *self._selected(i, self._expected(ref.point, i))) for i in ordinals]
        else:
            stored = [Stored(ordinal, self._expected(ref.point, ordinal))]
        wanted = [each.positions if each.selected is None else each.positions[each.selected] for each in stored]
        positions = wanted[0] if len(stored) == 1 else np.unique(np.concatenate(wanted))
        empty = self._shaped(at, ref, np.empty((0, self.width_at(ref.point)), np.float32))
        dtypes = self._dtypes(ordinals)
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        return Layout(at, ref, stored, positions, (len(positions), *empty.shape[1:]), dtype)

    def rows_between(self, layout: Layout, first: int, end: int, captured: list[Captured]) -> torch.Tensor:
        """The rows of `run[site]` at positions first … end−1; `captured`: what the engine has of each `stored`."""
        import torch

        parts = []
        for stored, (positions, rows) in zip(layout.stored, captured, strict=True):
            begin, stop = stored.between(first, end)
            if not np.array_equal(positions, stored.positions[begin:stop]):
                raise PatchclampError(f"{layout.ref}: other positions were captured than were asked for")
            kept = None if stored.selected is None else np.flatnonzero(stored.selected[begin:stop])
            parts.append((positions, rows) if kept is None else (positions[kept], rows[kept]))
        positions, rows = parts[0] if len(parts) == 1 else merged(parts)
        rows = cast(rows, layout.dtype)
        self._check_range(rows, positions, str(layout.ref))
        return torch.as_tensor(self._shaped(layout.at, layout.ref, rows))

    @property
    def _sites(self) -> SiteMap:
        return self._owner.engine.sites

    @functools.cached_property
    def _positions(self) -> int:
        """How many positions have activations: the last sampled token was never an input."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def _captured(self) -> dict[int, np.ndarray]:
        """The positions that are captured at each point if the run generates `max_tokens`."""
        return self._bound.captured if self._bound is not None else {}

    @functools.cached_property
    def _captured_computed(self) -> dict[int, np.ndarray]:
        """Positions captured at each point; points with the same ones share an array."""
        shared = {id(positions): self._computed(positions) for positions in self._captured.values()}
        return {point: shared[id(positions)] for point, positions in self._captured.items()}

    @functools.cached_property
    def _captures_at(self) -> dict[int, list[int]]:
        """The ops that capture each point, by their numbers in the bound program."""
        captures: dict[int, list[int]] = {}
        for ordinal, op in enumerate(self._ops):
            for point in op.points if op.kind == CAPTURE else ():
                captures.setdefault(point, []).append(ordinal)
        return captures

    @functools.cached_property
    def _capture_of_path(self) -> dict[str, int]:
        """The number, in the bound program, of the `Capture` at each path."""
        return {op.path: ordinal for ordinal, op in enumerate(self._ops) if op.kind == CAPTURE}

    def _computed(self, positions: np.ndarray) -> np.ndarray:
        """Those of ascending positions that were computed."""
        return positions[: np.searchsorted(positions, self._positions)]

    def _locate(self, site: Site | str) -> tuple[Site, SiteRef, int | None]:
        """The site that is named, or that of the `Capture` at a path and the op; and where it is."""
        self.answer  # noqa: B018  raises the run's own error
        ordinal = self._capture_of_path.get(site) if isinstance(site, str) else None
        at = self._site(site)
        refs = self._sites.resolve(at)
        if len(refs) > 1:
            raise ProgramError(f"run[...] takes one layer: {at} names {len(refs)}, as in run[pc.{refs[0]}]")
        return at, refs[0], ordinal

    def _fetch(self, ref: SiteRef, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Positions and rows of a site's point, by one op or by all."""
        self._check_part(ref, name)
        key = ref.point, ordinal
        if key not in self._fetched:
            self._fetched[key] = self._read(*key, name)
        return self._fetched[key]

    def _check_part(self, ref: SiteRef, name: str) -> None:
        """Raises `MissingSource` if another part of its row was projected, and this one not kept."""
        columns = self._projected.get(ref.point)
        if columns is not None and columns != (pack_columns(ref.columns) if ref.columns else 0):
            raise MissingSource(f"{name} was not captured; this run has: {', '.join(self.sites)}")

    @functools.cached_property
    def _projected(self) -> dict[int, int]:
        """By point, of the rows that were projected: the columns that the matrix is for, packed; 0: all."""
        ops = [op for op in self._ops if isinstance(op.action, Keep) and op.action.products]
        return {point: op.columns for op in ops for point in op.points}

    def _site(self, site: Site | str) -> Site:
        """The site that is named, or that of the `Capture` at a path."""
        return self._op(site).at if isinstance(site, str) and site in self._capture_of_path else parse_site(site)

    def _op(self, path: str) -> SiteOp:
        """The op of the program at a path."""
        op = dict(self.program.ops)[path]
        assert isinstance(op, SiteOp)
        return op

    def _read(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        ordinals = self._ordinals(point, ordinal, name)
        dtypes = self._dtypes(ordinals)
        if any(_conditional(self._ops[i]) for i in ordinals):
            positions, rows = merged([self._matching(point, i, name) for i in ordinals])
        else:
            positions, rows = self._stored(point, ordinal, name)
        rows = rows if dtypes == {"float32"} or len(dtypes) > 1 else cast(rows, dtypes.pop())
        self._check_range(rows, positions, name)
        return positions, rows

    def _check_range(self, rows: torch.Tensor | np.ndarray, positions: np.ndarray, name: str) -> None:
        """Raises `NotFinite` for float16 rows with numbers beyond that dtype's range."""
        row = overflowed(rows)
        if row is not None:
            raise NotFinite(
                f"{name} at position {int(positions[row])} has numbers above 65,504, the largest of float16: capture "
                "it in bfloat16 or float32", "capture"
            )  # fmt: skip

    def _ordinals(self, point: int, ordinal: int | None, name: str) -> list[int]:
        """The ops that captured a point, or one of them. Raises `MissingSource` where there is none."""
        ordinals = [i for i in self._captures_at.get(point, []) if ordinal in (None, i)]
        if not ordinals:
            raise MissingSource(f"{name} was not captured; this run has: {', '.join(self.sites) or 'no captures'}")
        if self.closed:
            raise MissingSource(f"run {self.key} was closed before {name} was read")
        return ordinals

    def _dtypes(self, ordinals: list[int]) -> set[str]:
        """The dtypes in which ops capture."""
        actions = [self._ops[i].action for i in ordinals]
        return {DTYPES[action.dtype] for action in actions if isinstance(action, Keep)}

    def _expected(self, point: int, ordinal: int | None) -> np.ndarray:
        """The positions that were captured at a point, by one op or by all."""
        if ordinal is None:
            return self._captured_computed[point]
        return self._computed(position_array(self._ops[ordinal].ranges))

    def _selected(self, ordinal: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Positions that an op captured, and which of them its tokens, now known, select; None: all."""
        op = self._ops[ordinal]
        if not _conditional(op):
            return positions, None
        return positions, np.isin(positions, self._select(self._op(op.path).tokens, self._limit))

    def _matching(self, point: int, ordinal: int, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """The rows that one op captured, without those whose tokens, now known, it does not select."""
        positions, rows = self._stored(point, ordinal, name)
        _, selected = self._selected(ordinal, positions)
        if selected is None:
            return positions, rows
        places = np.flatnonzero(selected)
        return positions[places], rows[places]

    def _stored(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """What the engine has of an op, or of all, at a point, at the positions that were computed."""
        expected = self._expected(point, ordinal)
        if (point, ordinal) not in self._prefetched:
            self._prefetch(point, ordinal)
        positions, rows = self._prefetched.pop((point, ordinal))
        width = self.width_at(point)
        rows = rows if len(rows) else rows.reshape(0, width)
        if rows.shape[1] != width:
            raise PatchclampError(f"{name}: {width} numbers of each row were asked for, {rows.shape[1]} were captured")
        if self._equal[0] is expected and self._equal[1] is positions:  # as at most points of a run
            return positions, rows
        count = len(self._computed(positions))
        if not np.array_equal(positions[:count], expected):
            raise PatchclampError(f"{name}: {len(expected)} positions were asked for and {count} were captured")
        if count == len(positions):
            self._equal = expected, positions
        return positions[:count], rows[:count]

    def _prefetch(self, point: int, ordinal: int | None) -> None:
        """Fetches what is read now, and all else that the run captured, if that is little or comes without a copy."""
        points = list(self._captured)
        if self.captured_bytes > MAX_PREFETCH_BYTES:
            # rows of one step are contiguous; those of several are copied, so that little is lost if these were several
            may_be_views = self._owner.engine.has_views and len(self.token_ids) <= 1
            may_be_views = may_be_views and self.captured_bytes <= MAX_VIEWED_BYTES
            points = [point for point in points if may_be_views and self.bytes_at(point) >= VIEWED_BYTES]
        keys = [(point, ordinal), *(key for key in self.unread(points) if key != (point, ordinal))]
        captured = self._owner.engine.fetch_many([(self.key, *key) for key in keys])
        self.take_fetched(dict(zip(keys, captured, strict=True)))

    def unread(self, points: Iterable[int]) -> list[tuple[int, None]]:
        """Of these points those that it captured and whose rows have not come from the engine yet. Raises the run's own
        error, and `MissingSource` where they can come no more."""
        self.answer  # noqa: B018  raises
        keys = [(point, None) for point in points if point in self._captured]
        unread = [key for key in keys if key not in self._fetched and key not in self._prefetched]
        if self.closed and unread:
            raise MissingSource(f"run {self.key} was closed before its captures were read")
        return unread

    def take_fetched(self, rows: dict[tuple[int, int | None], Captured]) -> None:
        """Takes positions and rows of points, or of one op there, as the engine has given them."""
        if not self.closed:
            self._prefetched.update(rows)

    @functools.cached_property
    def captured_bytes(self) -> int:
        """About how many bytes of rows it captured, as fp32."""
        return sum(map(self.bytes_at, self._captured))

    def bytes_at(self, point: int) -> int:
        """About how many of these bytes are of a point that it captured."""
        return 4 * len(self._captured_computed[point]) * self.width_at(point)

    def stored_bytes_at(self, point: int) -> int:
        """The same in the capture's own dtype."""
        item = self._bound.captured_item_bytes.get(point, 4) if self._bound is not None else 4
        return self.bytes_at(point) * item // 4

    def width_at(self, point: int) -> int:
        """How many numbers are captured of a row at a point."""
        width = self._bound.captured_width.get(point, 0) if self._bound is not None else 0
        return width or self._sites.points[point].width

    def __reduce__(self):
        raise ProgramError("a Run belongs to its engine and cannot be copied or pickled; take its tensors instead")

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Run {self.key}: {type(self.error).__name__}: {self.error}>"
        return f"<Run {self.key}: {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, {self.text!r}>"


def _conditional(op: BoundOp) -> bool:
    """Whether which of an op's captured positions count depends on what was generated."""
    return isinstance(op.action, Keep) and op.action.conditional
