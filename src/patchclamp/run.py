"""`pc.Run`: the result of one request, with its captures."""

from __future__ import annotations

import functools
import html
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from patchclamp.attention import AttentionRead, attention_rows
from patchclamp.engines.base import Answer, Captured, Drafts, Engine, Monitor, PartScores, Request, TopTokens, Wanted
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import MissingSource, NotFinite, PatchclampError, ProgramError, TokensError, unknown
from patchclamp.language import Probe, Program, Site, SiteOp, Vector
from patchclamp.language.conditions import Above, ProbeCondition, comparisons, deciding, holding
from patchclamp.language.dictionaries import FeatureReader
from patchclamp.language.ops import Features, Lens, Translator
from patchclamp.language.probes import activated
from patchclamp.language.site import DERIVED, is_stacked, parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import Tokens, read_tokens
from patchclamp.language.values import DTYPES, POOLS, as_flag
from patchclamp.plan import CAPTURE, BoundOp, BoundProgram
from patchclamp.plan.bound import (
    AttentionReader,
    Compare,
    Keep,
    acted,
    captures_site,
    pack_columns,
    position_array,
    stored_op,
    way_of,
)
from patchclamp.sites import SiteMap, SiteRef
from patchclamp.store.tensors import PROBE, cast, merged, overflowed

if TYPE_CHECKING:
    import pandas
    import torch

    from patchclamp.engines.base import Model

MAX_PREFETCH_BYTES = 1 << 20  # fetch all of a run's captures on first read, up to this size
VIEWED_BYTES = 1 << 17  # minimum bytes of a point's rows that are always a view, on engines with views
MAX_VIEWED_BYTES = 1 << 29  # the same limit for captures that are views
LENS_ROWS = 1 << 13  # rows to unembed per engine call, so that engine steps run between calls
NO_POSITIONS = np.zeros(0, np.int64)
_Result = TypeVar("_Result")
_OfTokens = TypeVar("_OfTokens", "LensResult", "FeaturesResult")


class Stored(NamedTuple):
    """The rows that one op (None: all ops) captured, at ascending positions [T]. `selected` is the mask [T] of the rows
    to use (None: all)."""

    op: int | None
    positions: np.ndarray
    selected: np.ndarray | None = None

    def between(self, first: int, end: int) -> tuple[int, int]:
        """Return the half-open range of the rows at positions first … end−1."""
        begin, stop = np.searchsorted(self.positions, [first, end])
        return int(begin), int(stop)


class Layout(NamedTuple):
    """The layout of `run[site]`, without its rows.

    at, ref: the site
    stored: the sources of the rows; at a position captured twice, the later source wins
    positions [T], shape, dtype: as in `run[site]`
    pool: the pooling of the rows, or None; without positions there is no pooled row, and shape is [0, ...]
    """

    at: Site
    ref: SiteRef
    stored: list[Stored]
    positions: np.ndarray
    shape: tuple[int, ...]
    dtype: str
    pool: str | None = None


class CaptureWay(NamedTuple):
    """Properties of captured rows: the op's number (None: all ops), the pooling, the width and dtype, the projection's
    matrix and columns, and a probe's bias and activation."""

    number: int | None
    pool: str
    width: int
    dtype: str
    matrix: str
    columns: int
    bias: Vector | None = None
    activation: str | None = None


class UnreadLens(NamedTuple):
    """A lens, or the features of an SAE, at one point, and the number of rows that it reads."""

    top: int
    by: Translator | FeatureReader | None
    rows: int


class Owner(Protocol):
    """The `LM` that executed the run. It stays open while any of its runs is referenced."""

    engine: Engine


class Run:
    """One executed request.

    key: the run's name, which programs use to refer to it: `From(run.key, site)`
    prompt_token_ids: the token ids of the prompt
    program: the program that it ran
    error: its error if it failed, else None
    closed: True once its captures were freed
    lora: the folder of its adapter, or None
    images: for each image in the prompt, the positions of its placeholder tokens

    Captures stay with the worker until the run is garbage-collected or `close`d. `run[site]` fetches them once.
    """

    key: str
    prompt_token_ids: list[int]
    program: Program
    images: list[list[int]]

    def __init__(
        self, owner: Owner, request: Request, program: Program, answer: Answer | PatchclampError,
        is_kept_elsewhere: bool = False, first: int = 0,
    ) -> None:  # fmt: skip
        """`first`: the first position whose rows are read."""
        self.key, self.prompt_token_ids, self.program = request.run, request.prompt_token_ids, program
        self.error: PatchclampError | None = None if isinstance(answer, Answer) else answer
        self.closed, self.images = False, request.images
        self.lora: str | None = None if request.adapter is None else request.adapter.folder
        self._owner, self._answer, self._text, self._chat = owner, answer, request.text, request.chat
        self._bound: BoundProgram | None = request.bound
        self._first = first
        self._limit = len(request.prompt_token_ids) + request.max_tokens - 1  # positions if max_tokens are generated
        conditions = {op.condition.ids for op in self._ops if op.condition}
        self._ids_of = {key: request.vectors[key].reshape(-1).astype(np.int64) for key in conditions}
        self._prefetched: dict[tuple[int, int | None], Captured] = {}
        self._fetched: dict[tuple[int, int | None], tuple[np.ndarray, torch.Tensor | np.ndarray]] = {}
        self._lenses: dict[tuple[int, int], TopTokens] = {}
        self._equal = NO_POSITIONS, NO_POSITIONS  # the last (expected, received) positions that were equal
        self._release: weakref.finalize[..., Run] | None = None
        self.next_of_call: Callable[[], Run | None] = lambda: None  # the next run, if it is still referenced
        self._ahead = 0  # number of next runs to read together with this one
        captures = any(op.kind == CAPTURE for op in self._ops)
        if not is_kept_elsewhere and (captures or request.code):  # otherwise this object has nothing to release
            self._release = weakref.finalize(self, owner.engine.release, [self.key])
            self._release.atexit = False

    @property
    def _ops(self) -> tuple[BoundOp, ...]:
        return self._bound.ops if self._bound is not None else ()

    def _stored_op(self, number: int) -> BoundOp:
        """Return the op whose rows are stored under this op number (`stored_op`)."""
        return self._ops[number % PROBE]

    @property
    def answer(self) -> Answer:
        if isinstance(self._answer, PatchclampError):
            raise self._answer
        return self._answer

    @property
    def text(self) -> str:
        """The generated text, decoded on first read."""
        answer = self.answer
        if not isinstance(answer.text, str):
            answer.text = answer.text()
        return answer.text

    @property
    def token_strings(self) -> list[str]:
        """The text of each token: the prompt, then the generated tokens."""
        return self._owner.engine.tokenizer.token_strings([*self.prompt_token_ids, *self.token_ids])

    @property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each generated token. Raises `ProgramError` if the run did not request them."""
        if self.answer.logprobs is None:
            raise ProgramError("log-probabilities were not requested: use lm.run(..., logprobs=True)")
        return self.answer.logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]]:
        """The log-probabilities of the top tokens at each generated token. Raises `ProgramError` if not requested."""
        if len(self.answer.top_logprobs) != len(self.token_ids):
            raise ProgramError("top log-probabilities were not requested: use a number, as in lm.run(..., logprobs=5)")
        return self.answer.top_logprobs

    @property
    def prompt_logprobs(self) -> list[float]:
        """The log-probability of each token of the prompt, given the tokens before it; NaN for the first. Raises
        `ProgramError` if the run did not request them."""
        if self.answer.prompt_logprobs is None:
            raise ProgramError("prompt log-probabilities were not requested: use lm.run(..., prompt_logprobs=True)")
        return [float("nan"), *self.answer.prompt_logprobs]

    @property
    def prompt_top_logprobs(self) -> list[dict[int, float]]:
        """The log-probabilities of the top tokens at each token of the prompt; empty for the first. Raises
        `ProgramError` if not requested."""
        if len(self.answer.prompt_top_logprobs) != len(self.prompt_logprobs) - 1:
            raise ProgramError("top prompt log-probabilities were not requested: use lm.run(..., prompt_logprobs=5)")
        return [{}, *self.answer.prompt_top_logprobs]

    @property
    def scores(self) -> dict[int, float]:
        return self.answer.scores

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens read from the engine's prefix cache instead of computed."""
        return self.answer.cached_tokens

    @property
    def computed_from(self) -> tuple[int, int] | None:
        """The (layer, prompt position) from which the run was computed, if the engine reused an unedited run of the
        same prompt for the rest; else None."""
        return self.answer.computed_from

    @property
    def drafts(self) -> Drafts | None:
        """Token counts (proposed, accepted) of speculative decoding; None if they are not counted."""
        return self.answer.drafts

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    @property
    def stop_reason(self) -> str | None:
        """The reason "probe:NAME" if `stop_when` ended the run, else None. NAME is the first probe that decided the
        condition. The condition held at the run's last token, so that token has scores."""
        return self.answer.stop_reason

    def __getitem__(self, site: Site | str) -> torch.Tensor:
        """Return a site's captured rows, on the CPU, in the capture's dtype: [T, W] for one layer, [L, T, W] for
        several; the axes follow `run.positions(site)` and `run.layers(site)`. `run[pc.resid_post]` has all captured
        layers; every layer of a list or range must have been captured. Sites with heads have [T, H, E]; an integer
        index drops its axis, so `run[pc.z[5, 3]]` is [T, E]. A capture projected by W [k, D] has [T, k].

        A capture with `pool` drops the axis of positions: [W], or [L, W].

        A site captured twice returns the union of positions, with the later op's row at positions that both captured. A
        path such as "edits[0]" returns the rows of that `Capture` alone, as they were at its place in the program. Each
        read returns a copy, which `From` and the bank do not share; `run.read(site, copy=False)` avoids the copy. The
        fake engine, which works without PyTorch, returns NumPy arrays.

        Raises `MissingSource` if the site was not captured, `ProgramError` if its layers have different positions or
        are pooled in different ways, and the run's own error if it failed.
        """
        return self.read(site)

    def read(self, site: Site | str, *, copy: bool = True) -> torch.Tensor:
        """Return `run[site]`. With `copy=False`, one layer's rows are the captured memory itself, which later reads and
        `From` share: do not change it in place."""
        as_flag(copy, "copy")
        if (found := self.of_attention(site)) is not None:
            return attention_rows(self.attention, *found)  # pyright: ignore[reportReturnType]
        at, refs, ordinal = self._locate(site)
        if not is_stacked(at):
            return self.rows_of(str(site), at, refs[0], ordinal, copy=copy)
        if ordinal is None and (unread := self.unread({ref.point for ref in refs})):
            self._prefetch(unread)
        self._shared_positions(site, refs, ordinal)
        return stacked([self.rows_of(str(site), at, ref, ordinal, copy=False) for ref in refs])

    def layers(self, site: Site | str) -> list[int]:
        """Return the captured layers of a site, in the order of the first axis of `run[site]`."""
        if (found := self.of_attention(site)) is not None:
            return self.attention.layers(*found)
        return [ref.layer for ref in self._locate(site)[1] if ref.layer is not None and ref.point in self._captured]

    def rows_of(
        self, name: str, at: Site, ref: SiteRef, ordinal: int | None = None, *, copy: bool = True
    ) -> torch.Tensor:
        """Return the rows of `run[name]` for a resolved site, captured by one op or by all (None)."""
        rows = self.shaped(at, ref, self._fetch(ref, ordinal, name)[1])
        if ref.point in self.pools:
            return pooled(rows, self.pools[ref.point], name)
        if not copy:
            return rows  # pyright: ignore[reportReturnType]  arrays are the fake engine's
        return rows.copy() if isinstance(rows, np.ndarray) else rows.clone()  # pyright: ignore[reportReturnType]

    def shaped(self, at: Site, ref: SiteRef, rows: torch.Tensor | np.ndarray) -> torch.Tensor | np.ndarray:
        """Select a site's columns from a point's rows, and split them into heads."""
        parts = self.site_map.parts(at.name)
        if parts is None or ref.point in self._projected:
            return rows
        first, end = ref.columns or (0, rows.shape[1])
        rows = rows[:, first:end].reshape((len(rows), (end - first) // parts[1], parts[1]))
        rows = rows[:, 0] if isinstance(at.index, int) else rows
        return rows[..., 0] if parts[1] == 1 else rows

    def positions(self, site: Site | str) -> list[int]:
        """Return the position of each row of `run[site]`; for a pooled row, the positions that it pools."""
        if (found := self.of_attention(site)) is not None:
            return self.attention.of_layers(*found)[0].positions
        _, refs, ordinal = self._locate(site)
        positions = self._shared_positions(site, refs, ordinal).tolist()
        return positions[-1:] if self.pools.get(refs[0].point) == "last" else positions

    def _shared_positions(self, site: Site | str, refs: list[SiteRef], ordinal: int | None) -> np.ndarray:
        """Return the positions of a site's layers. Raises `ProgramError` if they differ in positions or pooling."""
        check_pools(refs, self.pools)
        first, *others = [self._read_positions(ref, ordinal, str(site)) for ref in refs]
        for ref, positions in zip(refs[1:], others, strict=True):
            if not np.array_equal(first, positions):
                raise ProgramError(
                    f"{site}: positions differ between {refs[0]} ({len(first)}) and {ref} ({len(positions)}); read one "
                    f"layer at a time, as in run[pc.{ref}]"
                )
        return first

    def _read_positions(self, ref: SiteRef, ordinal: int | None, name: str) -> np.ndarray:
        """Return the positions captured at one layer, including all positions that were pooled into one row."""
        for op in (self._ops[i] for i in self._captures_at.get(ref.point, ())):
            if _in_step(op):
                return self._computed(position_array(op.ranges))
        return self._fetch(ref, ordinal, name)[0]

    @property
    def sites(self) -> list[str]:
        """Every captured site, as text."""
        return [str(ref) for ref in self.captured_of(self.site_map.refs())] if self.has_captures else []

    @property
    def has_captures(self) -> bool:
        """True if its program captures or probes anything."""
        return bool(self._captured or self._probe_ops)

    def captured_of(self, refs: Iterable[SiteRef]) -> list[SiteRef]:
        """Return the captured sites among `refs`; if only a part of the row was projected, return that part's site."""
        part, projected = self.site_map.part, self._projected
        return [part(ref, projected.get(ref.point, 0)) for ref in refs if ref.point in self._captured]

    @property
    def acted(self) -> dict[str, list[int]]:
        """The ascending positions that each edit acted on, by path ("edits[0]", or "edits[0].edits[1]" in a `When`).
        They depend on the token ids, and on the scores of probes in conditions, which are read at the first access."""
        tokens = np.array([*self.prompt_token_ids, *self.token_ids][: self.positions_computed], np.int64)
        if self._bound is None:
            return {}
        positions = acted(self._bound, tokens, self._ids_of, self._tested)
        return {path: of_edit.tolist() for path, of_edit in positions.items()}

    def _tested(self, test: BoundOp) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions at which a condition was tested, and the probe products that it compared."""
        assert isinstance(test.action, Compare)
        positions, [products] = self._products(test.action.probe)
        return positions, np.asarray(products)[:, test.ranges[0].row]

    @property
    def idle_edits(self) -> list[str]:
        """The paths of edits that acted on no row, in order: the run ended before any of their tokens."""
        return [path for path, positions in self.acted.items() if not positions]

    @property
    def probes(self) -> Mapping[str, torch.Tensor]:
        """The results of the run's probes and of the engine's own, by name: fp32 [T, k], one row per selected token
        (`probe_positions`), or [k] if pooled; with a leading axis of layers if the probe's site has several."""
        return _Probes(self)

    @functools.cached_property
    def _named_probes(self) -> dict[str, Probe]:
        return self.program.probes

    @functools.cached_property
    def _probe_ops(self) -> dict[str, int]:
        """The op number of each probe's stored products, by probe name."""
        return {op.action.probe: stored_op(op, i) for i, op in enumerate(self._ops)
                if isinstance(op.action, Keep) and op.action.probe}  # fmt: skip

    def _monitor(self, name: str) -> Monitor | None:
        """Return the engine's probe with this name, or None if it did not score this run."""
        if name in self._probe_ops or self.answer.monitored is None:
            return None
        return next((each for each in self._owner.engine.monitors if each.probe.name == name), None)

    @property
    def probe_names(self) -> list[str]:
        """The names of the run's probes: those of its program and those of the engine."""
        monitors = () if self.answer.monitored is None else self._owner.engine.monitors
        own = (name for name in self._probe_ops if name in self._named_probes)  # the rest are features in conditions
        return list(dict.fromkeys([*own, *(each.probe.name for each in monitors)]))

    def probe_positions(self, name: str) -> list[int]:
        """Return the positions that a probe read."""
        if self._monitor(name) is not None:
            assert self.answer.monitored is not None
            return list(range(len(self.answer.monitored)))
        return self.probe_layout(name)[1].tolist()

    def _probe_number(self, name: str) -> int:
        """Return the op number of a probe's stored products."""
        self.answer  # noqa: B018  raises the run's own error
        if name not in self._probe_ops:
            raise unknown("probe", name, self._probe_ops)
        return self._probe_ops[name]

    def _products(self, name: str) -> tuple[np.ndarray, list[torch.Tensor | np.ndarray]]:
        """Return a probe's positions, and its products W h, [T, k], at each of its points."""
        number = self._probe_number(name)
        points, op = self._stored_op(number).points, f"probe {name!r}"
        keys = [(point, number) for point in points]
        if self.closed and not self._fetched.keys() >= set(keys):
            raise MissingSource(f"run {self.key} was closed before {op} was read")
        if unread := [key for key in keys if key not in self._fetched and key not in self._prefetched]:
            captured = self._owner.engine.fetch_many([Wanted(self.key, *key, self._first) for key in unread])
            self.take_fetched(dict(zip(unread, captured, strict=True)))
        for key in keys:
            if key not in self._fetched:
                self._fetched[key] = self._read(*key, op)
        return self._fetched[keys[0]][0], [self._fetched[key][1] for key in keys]

    @property
    def kind(self) -> tuple[int, ...]:
        """A key that is equal for runs whose captures are read in the same way at the same positions."""
        return id(self._ops), id(self.program), self.positions_computed, self._first, self.closed

    def capture_way(self, ref: SiteRef, probe: str = "") -> CaptureWay:
        """Return the properties of a site's captured rows, or of a probe's. Raises `MissingSource` if the runs cannot
        be read together."""
        self.answer  # noqa: B018  raises the run's own error
        point, name = ref.point, f"probe {probe!r}" if probe else str(ref)
        number = self._probe_ops.get(probe) if probe else None
        ordinals = [number] if number is not None else [] if probe else self._captures_at.get(point, [])
        if number is not None and point not in self._stored_op(number).points:
            raise MissingSource(f"{name} reads a different site in run {self.key}: read the runs one at a time")
        if not probe:
            self._check_part(ref, name)
        if not ordinals or self.closed:
            raise MissingSource(f"run {self.key} {'was closed' if self.closed else f'did not capture {name}'}")
        if any(_conditional(self._stored_op(i)) for i in ordinals):
            raise MissingSource(f"{name} was captured by token id: read the runs one at a time")
        dtypes, made_by = self._dtypes(ordinals), self._named_probes[probe] if probe else None
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        matrix, columns, _ = way_of(self._stored_op(ordinals[0]))
        width = self.width_at(point, number)
        if made_by is None:
            return CaptureWay(number, self.pools.get(point, ""), width, dtype, matrix, columns)
        return CaptureWay(number, made_by.pool or "", width, dtype, matrix, columns, made_by.bias, made_by.activation)

    def expected_rows(self, point: int, number: int | None) -> int:
        """Return the number of positions captured at a point by one op or by all (None)."""
        return len(self._expected(point, number))

    def probe_layout(self, name: str) -> tuple[list[tuple[int, int]], np.ndarray, tuple[int, ...]]:
        """Return the engine captures (point, op number) behind `run.probes[name]`, its positions, and its shape,
        without reading it."""
        number = self._probe_number(name)
        bound, op = self._stored_op(number), self._named_probes[name]
        assert isinstance(bound.action, Keep)
        positions, selected = self._selected(number, self._computed(position_array(bound.ranges)))
        positions = positions if selected is None else positions[selected]
        positions = positions[-1:] if op.pool == "last" else positions
        count = [] if op.pool and len(positions) else [len(positions)]
        shape = (*([len(bound.points)] if is_stacked(op.at) else []), *count)
        return [(point, number) for point in bound.points], positions, (*shape, bound.action.products)

    def probed(self, name: str) -> torch.Tensor:
        """Return `run.probes[name]`."""
        if (monitor := self._monitor(name)) is not None:
            import torch

            assert self.answer.monitored is not None
            return torch.as_tensor(monitor.scores(self.answer.monitored))
        _, products = self._products(name)
        op = self._named_probes[name]
        scores: list[Any] = [probe_scores(op, rows, name) for rows in products]
        return stacked(scores) if is_stacked(op.at) else scores[0]

    def probe_keys(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return the engine captures (point, op number) behind the named probes."""
        numbers = [self._probe_ops[name] for name in names]
        return [(point, number) for number in numbers for point in self._stored_op(number).points]

    def scores_between(self, names: Iterable[str], first: int, end: int) -> dict[str, PartScores]:
        """Return the named probes' scores at positions first … end−1."""
        found: dict[str, PartScores] = {}
        for name in names:
            positions, scores = self._products(name)[0], self.probed(name)
            begin, stop = np.searchsorted(positions, [first, end]).tolist()
            found[name] = PartScores(positions[begin:stop].tolist(), scores[..., begin:stop, :])
        return found

    def stopped_at(self, condition: ProbeCondition) -> tuple[int, str] | None:
        """Return the number of generated tokens up to and including the first where a condition on probes holds, and
        the stop reason; None if it never holds. Only tokens that all its probes read are tested."""
        positions = functools.reduce(
            np.intersect1d, (self._products(each.probe.name)[0] for each in comparisons(condition))
        )
        positions = positions[positions >= len(self.prompt_token_ids)]

        def above(each: Above) -> np.ndarray:
            name = each.probe.name
            rows = np.searchsorted(self._products(name)[0], positions)
            scores = np.asarray(self.probed(name))[rows, each.output]
            return (np.greater_equal if each.inclusive else np.greater)(scores, np.float32(each.threshold))

        held = np.flatnonzero(holding(condition, above))
        if not len(held):
            return None
        name = deciding(condition, lambda each: above(each)[held[0]]).probe.name
        return int(positions[held[0]]) - len(self.prompt_token_ids) + 1, f"probe:{name}"

    @property
    def lens(self) -> Mapping[Site | str, LensResult]:
        """The likeliest tokens that the program's lenses read, by site: `run.lens[pc.resid_post[8]]`, or several layers
        at once, `run.lens[pc.resid_post]`. If two lenses read a site, the last wins; a path such as "edits[0]" selects
        the lens. Results are computed on first read; `lm.lens(runs)` batches many runs."""
        return _Lenses(self)

    @functools.cached_property
    def _lens_ops(self) -> dict[str, int]:
        """The op number of each lens's stored rows, by path."""
        return {path: number for path, number in self._kept_for_reading.items() if isinstance(self.op_at(path), Lens)}

    @functools.cached_property
    def _feature_ops(self) -> dict[str, tuple[int, int]]:
        """The (point, op number) of each `Features` op's stored rows, by path."""
        points, numbers = {op.path: op.points[0] for op in self._ops if op.points}, self._kept_for_reading
        return {path: (points[path], numbers[path]) for path, op in self.program.ops if isinstance(op, Features)}

    @functools.cached_property
    def _kept_for_reading(self) -> dict[str, int]:
        """The op numbers of the rows stored for lenses, features and attention ops, by path."""
        return {op.path: stored_op(op, i) for i, op in enumerate(self._ops)
                if isinstance(op.action, Keep) and (op.action.lens or op.action.reader)}  # fmt: skip

    @property
    def features(self) -> Mapping[str, FeaturesResult]:
        """The features that the program reads, by SAE name. If two ops read an SAE, the last wins; a path such as
        "edits[0]" selects the op. Features are fetched on first read; `lm.lens(runs)` batches many runs."""
        return _FeaturesRead(self)

    @property
    def attention(self) -> AttentionRead:
        """The attention that the program captured, by site and layer, such as `run.attention["pattern[3]"]`: an
        `AttentionResult`, which for captures with `top` includes the key positions."""
        self.answer  # noqa: B018  raises the run's own error
        return AttentionRead(self, self.attention_ops)

    @functools.cached_property
    def attention_ops(self) -> list[tuple[int, BoundOp]]:
        """The run's attention captures, each with the op number of its stored rows."""
        return [(stored_op(op, i), op) for i, op in enumerate(self._ops)
                if isinstance(op.action, Keep) and isinstance(op.action.reader, AttentionReader)]  # fmt: skip

    @property
    def model(self) -> Model:
        """Properties of the model that ran."""
        return self._owner.engine.model

    @property
    def site_map(self) -> SiteMap:
        """The model's sites and points."""
        return self._owner.engine.sites

    def private_rows(self, point: int, number: int, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Return the positions that a lens, features or attention op selects, and the rows that it stored there."""
        key = point, number
        if key not in self._fetched:
            if self.closed:
                raise MissingSource(f"run {self.key} was closed before {name} was read")
            self._fetched[key] = self._matching(point, number, name)
        return self._fetched[key]

    def lens_between(self, first: int, end: int) -> ReadLenses:
        """Return the lens results at positions first … end−1, by site. Call `read_lenses` first."""
        found: dict[str, LensResult] = {}
        for site, key in _Lenses(self).keys_of_sites.items():
            found[site] = self._lens_result(site, *self._read_between(key, first, end))
        return ReadLenses(found, self.site_map)

    def features_between(self, first: int, end: int) -> dict[str, FeaturesResult]:
        """Return the features at positions first … end−1, by SAE. Call `read_lenses` first."""
        found: dict[str, FeaturesResult] = {}
        for name, path in _FeaturesRead(self).paths.items():
            positions, ids, values = self._read_between(self._feature_ops[path], first, end)
            found[name] = FeaturesResult(name, positions.tolist(), ids, values)
        return found

    def _read_between(self, key: tuple[int, int], first: int, end: int) -> TopTokens:
        """Return the results of a lens or `Features` op at positions first … end−1."""
        positions, ids, values = self.read_lens(key)
        rows = slice(*np.searchsorted(positions, [first, end]))
        return positions[rows], ids[rows], values[rows]

    def _lens_result(self, site: str, positions: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> LensResult:
        return LensResult(site, (), positions.tolist(), ids, logprobs, self._owner.engine.tokenizer.token_strings)

    def unread_lenses(self) -> dict[tuple[int, int], UnreadLens]:
        """Return the lenses and features that have not been computed yet, by (point, op number)."""
        lenses: dict[tuple[int, int], UnreadLens] = {}
        for path, number in self._lens_ops.items() if self.error is None else ():
            op, rows = self.op_at(path), len(self._expected_of(number))
            assert isinstance(op, Lens)
            for ref in self.site_map.resolve(op.at):
                if (key := (ref.point, number)) not in self._lenses:
                    lenses[key] = UnreadLens(op.top, op.translator(ref.layer), rows)
        for key in self._feature_ops.values() if self.error is None else ():
            if key not in self._lenses:
                keep = self._stored_op(key[1]).action
                assert isinstance(keep, Keep)
                assert isinstance(keep.reader, FeatureReader)
                lenses[key] = UnreadLens(keep.top, keep.reader, len(self._expected_of(key[1])))
        return lenses

    def take_lenses(self, read: dict[tuple[int, int], TopTokens]) -> None:
        """Store results of lenses and features, given by (point, op number), at the positions that each op selects."""
        of_op = {number: self._selected(number, self._expected_of(number)) for number in {op for _, op in read}}
        for (point, number), (positions, ids, logprobs) in read.items():
            count, (expected, selected) = len(self._computed(positions)), of_op[number]
            if not np.array_equal(positions[:count], expected):
                raise PatchclampError(f"expected {len(expected)} captured positions, got {count}")
            kept = slice(count) if selected is None else np.flatnonzero(selected)
            self._lenses[point, number] = expected[kept], ids[kept], logprobs[kept]

    def read_lens(self, key: tuple[int, int]) -> TopTokens:
        """Return the stored results of a lens or `Features` op. Raises `NotFinite` if they contain NaN."""
        read = self._lenses[key]
        if np.isnan(read[2]).any():
            at = self.site_map.label(key[0])
            if key in self._feature_ops.values():
                raise NotFinite(f"the features at {at} are not finite, because the captured row is not finite")
            raise NotFinite(
                f"the lens at {at} has non-finite logits: rows, possibly scaled up by its translator, overflow the "
                "model's dtype; use bfloat16 or float32", "capture"
            )  # fmt: skip
        return read

    def check_lenses(self) -> None:
        """Raise `NotFinite` if the stored results of any lens or `Features` op contain NaN."""
        for key in self._lenses:
            self.read_lens(key)

    def close(self) -> None:
        """Free the captures now."""
        self.closed: bool = True
        self._prefetched.clear()
        if self._release is not None:
            self._release()

    def is_projected(self, site: Site | str) -> bool:
        """True if the site was captured as products with a matrix rather than as rows."""
        return self._locate(site)[1][0].point in self._projected

    def refs(self, site: Site | str) -> list[str]:
        """Return the name of the site in each layer, for `run[...]`."""
        return [str(ref) for ref in self.site_map.resolve(parse_site(site))]

    # -- as a source for `From`

    def positions_of(self, point: int) -> np.ndarray:
        """Return the ascending positions captured at a point; empty if it was not captured. Raises `MissingSource` if
        its rows were projected, or are ambiguous: captured several times, at least once by token id."""
        if point in self._projected or point in self.pools:
            way = "projected" if point in self._projected else "pooled"
            raise MissingSource(
                f"run {self.key} captured {self.site_map.label(point)} {way}: capture it whole to read it with From"
            )
        ordinals = self._captures_at.get(point, [])
        if len(ordinals) > 1 and any(_conditional(self._stored_op(i)) for i in ordinals):
            raise MissingSource(
                f"run {self.key} captured {self.site_map.label(point)} {len(ordinals)} times, one of them by token id: "
                "capture it once to read it with From, or pass the rows of run[site]"
            )
        return self._captured_computed.get(point, NO_POSITIONS)

    def select(self, tokens: Tokens | str) -> np.ndarray:
        """Return the positions of the run that a selection matches, in the selection's order."""
        return self._select(read_tokens(tokens, "tokens"), self.positions_computed)

    def reached(self, tokens: Tokens) -> np.ndarray:
        """Return `select` without the positions that the run could have reached, but ended before."""
        chosen = self._select(tokens, max(self._limit, self.positions_computed))
        return chosen[chosen < self.positions_computed]

    def _select(self, tokens: Tokens, limit: int) -> np.ndarray:
        tokenizer = self._owner.engine.tokenizer
        prompt = prompt_of(tokenizer, self.prompt_token_ids, self._text, self._chat, self.images)
        return prompt.select(tokens, limit, [*self.prompt_token_ids, *self.token_ids])

    # -- captures

    def layout(self, site: Site | str) -> Layout:
        """Return the layout of `run[site]` without reading rows. Raises the same errors as `run[site]`."""
        at, refs, ordinal = self._locate(site)
        if len(refs) > 1:
            raise ProgramError(f"expected one layer, such as {refs[0]}, got {at} with {len(refs)}")
        ref = refs[0]
        self._check_part(ref, str(site))
        ordinals = self._ordinals(ref.point, ordinal, str(site))
        if any(_conditional(self._stored_op(i)) for i in ordinals):
            stored = [Stored(i, *self._selected(i, self._expected(ref.point, i))) for i in ordinals]
        else:
            stored = [Stored(ordinal, self._expected(ref.point, ordinal))]
        wanted = [each.positions if each.selected is None else each.positions[each.selected] for each in stored]
        positions = wanted[0] if len(stored) == 1 else np.unique(np.concatenate(wanted))
        if _in_step(self._ops[ordinals[0]]):
            positions = self._computed(position_array(self._ops[ordinals[0]].ranges))
        empty = self.shaped(at, ref, np.empty((0, self.width_at(ref.point)), np.float32))
        dtypes = self._dtypes(ordinals)
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        pool = self.pools.get(ref.point)
        shape = tuple(empty.shape[1:]) if pool and len(positions) else (len(positions), *empty.shape[1:])
        return Layout(at, ref, stored, positions, shape, "float32" if pool else dtype, pool)

    def rows_between(self, layout: Layout, first: int, end: int, captured: list[Captured]) -> torch.Tensor:
        """Return the rows of `run[site]` at positions first … end−1. `captured`: the rows of `layout.stored`."""
        import torch

        parts = []
        for stored, (positions, rows) in zip(layout.stored, captured, strict=True):
            begin, stop = stored.between(first, end)
            if not np.array_equal(positions, stored.positions[begin:stop]):
                raise PatchclampError(f"{layout.ref}: captured positions differ from the requested ones")
            kept = None if stored.selected is None else np.flatnonzero(stored.selected[begin:stop])
            parts.append((positions, rows) if kept is None else (positions[kept], rows[kept]))
        positions, rows = parts[0] if len(parts) == 1 else merged(parts)
        rows = rows if layout.pool else cast(rows, layout.dtype)
        check_range(rows, positions, str(layout.ref))
        rows = self.shaped(layout.at, layout.ref, rows)
        return torch.as_tensor(pooled(rows, layout.pool, str(layout.ref)) if layout.pool else rows)

    @functools.cached_property
    def positions_computed(self) -> int:
        """The number of positions with activations: the last sampled token was never an input, unless `stop_when` ended
        the run there."""
        return len(self.prompt_token_ids) + len(self.token_ids) - (self.stop_reason is None)

    @property
    def _captured(self) -> dict[int, np.ndarray]:
        """The positions captured at each point, assuming that the run generates `max_tokens`."""
        return self._bound.captured if self._bound is not None else {}

    @functools.cached_property
    def _captured_computed(self) -> dict[int, np.ndarray]:
        """The computed positions captured at each point. Points with equal positions share an array."""
        arrays = {id(positions): positions for positions in self._captured.values()}
        shared = {key: self._computed(positions) for key, positions in arrays.items()}
        return {point: shared[id(positions)] for point, positions in self._captured.items()}

    @functools.cached_property
    def _captures_at(self) -> dict[int, list[int]]:
        """The ops that capture each point, as indices into the bound program."""
        captures: dict[int, list[int]] = {}
        for ordinal, op in enumerate(self._ops):
            for point in op.points if captures_site(op) else ():
                captures.setdefault(point, []).append(ordinal)
        return captures

    @functools.cached_property
    def _capture_of_path(self) -> dict[str, int]:
        """The index in the bound program of the `Capture` at each path."""
        return {op.path: ordinal for ordinal, op in enumerate(self._ops) if captures_site(op)}

    def _computed(self, positions: np.ndarray) -> np.ndarray:
        """Return the ascending `positions` that were computed, starting at the first position to read."""
        begin, end = np.searchsorted(positions, [self._first, self.positions_computed])
        return positions[begin:end]

    def _locate(self, site: Site | str) -> tuple[Site, list[SiteRef], int | None]:
        """Return the site of a name or `Capture` path, its refs, and the `Capture`'s index (None for a name). A
        site without a layer means all captured layers."""
        self.answer  # noqa: B018  raises the run's own error
        ordinal = self._capture_of_path.get(site) if isinstance(site, str) else None
        at = self._site(site)
        return at, self.captured_layers(at), ordinal

    def captured_layers(self, at: Site) -> list[SiteRef]:
        """Return a site's refs. Without a layer, only captured layers count, or all layers if none was captured."""
        refs = self.site_map.resolve(at)
        captured = [ref for ref in refs if ref.point in self._captured] if at.layers is None else []
        return captured or refs

    def _fetch(self, ref: SiteRef, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Return the positions and rows of a site's point, captured by one op or by all (None)."""
        self._check_part(ref, name)
        key = ref.point, ordinal
        if key not in self._fetched:
            self._fetched[key] = self._read(*key, name if "[" in name else str(ref))
        return self._fetched[key]

    def _check_part(self, ref: SiteRef, name: str) -> None:
        """Raise `MissingSource` if only a different part of the row was projected."""
        columns = self._projected.get(ref.point)
        if columns is not None and columns != (pack_columns(ref.columns) if ref.columns else 0):
            raise MissingSource(f"{name} was not captured; available: {', '.join(self.sites)}")

    @functools.cached_property
    def _projected(self) -> dict[int, int]:
        """The packed columns that each projected point's matrix applies to; 0 for the whole row."""
        ops = [op for op in self._ops if captures_site(op) and isinstance(op.action, Keep) and op.action.products]
        return {point: op.columns for op in ops for point in op.points}

    @functools.cached_property
    def pools(self) -> dict[int, str]:
        """The pooling by point, for points with pooled rows."""
        keeps = [(op.action, op.points) for op in self._ops if captures_site(op)]
        return {point: POOLS[keep.pool - 1] for keep, points in keeps if isinstance(keep, Keep) and keep.pool
                for point in points}  # fmt: skip

    def _site(self, site: Site | str) -> Site:
        """Return the site of a name, or of the `Capture` at a path."""
        return self.op_at(site).at if isinstance(site, str) and site in self._capture_of_path else parse_site(site)

    def of_attention(self, site: Site | str) -> tuple[Site, str] | None:
        """Return the attention site that a name or capture path denotes, and the path or ""; None for other sites."""
        path = site if isinstance(site, str) and any(op.path == site for _, op in self.attention_ops) else ""
        at = self.op_at(path).at if path else self._site(site)
        return (at, path) if at.name in DERIVED else None

    def op_at(self, path: str) -> SiteOp:
        """Return the op of the program at a path."""
        op = dict(self.program.ops)[path]
        assert isinstance(op, SiteOp)
        return op

    def _read(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        ordinals = self._ordinals(point, ordinal, name)
        dtypes = self._dtypes(ordinals)
        if any(_conditional(self._stored_op(i)) for i in ordinals):
            positions, rows = merged([self._matching(point, i, name) for i in ordinals])
        else:
            positions, rows = self._stored(point, ordinal, name)
        rows = rows if dtypes == {"float32"} or len(dtypes) > 1 else cast(rows, dtypes.pop())
        check_range(rows, positions, name)
        return positions, rows

    def _ordinals(self, point: int, ordinal: int | None, name: str) -> list[int]:
        """Return the indices of ops that captured a point, or only `ordinal`. Raises `MissingSource` if none did."""
        ordinals = [i for i in self._captures_at.get(point, []) if ordinal in (None, i)]
        if ordinal is not None and ordinal >= PROBE:
            ordinals = [ordinal]
        if not ordinals:
            raise MissingSource(f"{name} was not captured; available: {', '.join(self.sites) or 'none'}")
        if self.closed:
            raise MissingSource(f"run {self.key} was closed before {name} was read")
        return ordinals

    def _dtypes(self, ordinals: list[int]) -> set[str]:
        """Return the dtypes of the given ops' rows. Pooled rows are fp32, on the device and on the host."""
        actions = [self._stored_op(i).action for i in ordinals]
        return {DTYPES[0 if action.pool else action.dtype] for action in actions if isinstance(action, Keep)}

    def _expected(self, point: int, ordinal: int | None) -> np.ndarray:
        """Return the positions captured at a point by one op or by all (None)."""
        if ordinal is None:
            return self._captured_computed[point]
        return self._expected_of(ordinal)

    def _expected_of(self, ordinal: int) -> np.ndarray:
        """Return the positions captured by one op, at each of its points."""
        return self._computed(position_array(self._stored_op(ordinal).kept))

    def _selected(self, ordinal: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the positions and a mask of the selected positions, which depend on generated tokens (None: all)."""
        op = self._stored_op(ordinal)
        if not _conditional(op):
            return positions, None
        return positions, np.isin(positions, self._select(self.op_at(op.path).tokens, self._limit))

    def _matching(self, point: int, ordinal: int, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Return the positions and rows that an op captured and selects, given the generated tokens."""
        positions, rows = self._stored(point, ordinal, name)
        _, selected = self._selected(ordinal, positions)
        if selected is None:
            return positions, rows
        places = np.flatnonzero(selected)
        return positions[places], rows[places]

    def _stored(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Return the positions and rows that one op or all (None) captured at a point, up to the last computed one."""
        expected = self._expected(point, ordinal)
        if (point, ordinal) not in self._prefetched:
            self._prefetch([(point, ordinal)])
        positions, rows = self._prefetched.pop((point, ordinal))
        width = self.width_at(point, ordinal)
        rows = rows if len(rows) else rows.reshape(0, width)
        if rows.shape[1] != width:
            raise PatchclampError(f"{name}: expected rows of {width} numbers, got {rows.shape[1]}")
        if self._equal[0] is expected and self._equal[1] is positions:  # most points share an array
            return positions, rows
        count = len(self._computed(positions))
        if not np.array_equal(positions[:count], expected):
            raise PatchclampError(f"{name}: expected {len(expected)} captured positions, got {count}")
        if count == len(positions):
            self._equal = expected, positions
        return positions[:count], rows[:count]

    def _prefetch(self, keys: Sequence[tuple[int, int | None]]) -> None:
        """Fetch the rows at `keys`, and rows likely to be read next: the run's other captures if small or views, and
        small captures of the call's next runs. While runs are read in order, the number of next runs doubles.
        """
        points = list(self._captured)
        if self.captured_bytes > MAX_PREFETCH_BYTES:
            # rows of one step are contiguous and can be views; rows of several steps are copied
            may_be_views = self._owner.engine.has_views and len(self.token_ids) <= 1
            may_be_views = may_be_views and self.captured_bytes <= MAX_VIEWED_BYTES
            points = [point for point in points if may_be_views and self.bytes_at(point) >= VIEWED_BYTES]
        keys = [*keys, *(key for key in self.unread(points) if key not in keys)]
        size, coming = self.captured_bytes, self.next_of_call()
        runs: list[Run] = [self]
        while coming is not None and len(runs) <= self._ahead and coming.error is None and not coming.closed:
            size += coming.captured_bytes
            if size > MAX_PREFETCH_BYTES:
                break
            runs.append(coming)
            coming = coming.next_of_call()
        if coming is not None:
            coming._ahead = 2 * self._ahead + 1
        try:
            self._take_rows(
                [(run, key) for run in runs for key in (keys if run is self else run.unread(run._captured))]
            )
        except MissingSource:  # another thread has closed one of the next runs
            self._take_rows([(self, key) for key in keys])

    def _take_rows(self, unread: list[tuple[Run, tuple[int, int | None]]]) -> None:
        """Fetch the rows of (run, (point, op)) pairs, and store them in their runs."""
        captured = self._owner.engine.fetch_many([Wanted(run.key, *key, run._first) for run, key in unread])
        for (run, key), rows in zip(unread, captured, strict=True):
            run.take_fetched({key: rows})

    def unread(self, points: Iterable[int]) -> list[tuple[int, None]]:
        """Return the captured points among `points` whose rows were not fetched yet. Raises the run's own error, and
        `MissingSource` if the run was closed before a fetch."""
        self.answer  # noqa: B018  raises
        keys = [(point, None) for point in points if point in self._captured]
        unread = [key for key in keys if key not in self._fetched and key not in self._prefetched]
        if self.closed and unread:
            raise MissingSource(f"run {self.key} was closed before its captures were read")
        return unread

    def take_fetched(self, rows: dict[tuple[int, int | None], Captured]) -> None:
        """Store fetched positions and rows by (point, op); op is None for all ops."""
        if not self.closed:
            self._prefetched.update(rows)

    @functools.cached_property
    def captured_bytes(self) -> int:
        """The approximate size of all captured rows as fp32, in bytes."""
        if self._bound is None:
            return 0
        private = self._bound.private_bytes(self.site_map, self.positions_computed)
        return sum(map(self.bytes_at, self._captured)) + private

    def bytes_at(self, point: int) -> int:
        """Return the approximate size of one point's captured rows as fp32, in bytes."""
        return 4 * len(self._captured_computed[point]) * self.width_at(point)

    def stored_bytes_at(self, point: int) -> int:
        """Return the approximate size of one point's captured rows in the capture's dtype, in bytes."""
        item = self._bound.captured_item_bytes.get(point, 4) if self._bound is not None else 4
        return self.bytes_at(point) * item // 4

    def width_at(self, point: int, ordinal: int | None = None) -> int:
        """Return the number of values per captured row at a point, for one op or (None) all ops except probes."""
        if ordinal is not None and isinstance(keep := self._stored_op(ordinal).action, Keep) and keep.is_private:
            return keep.numbers or self.site_map.points[point].width
        width = self._bound.captured_width.get(point, 0) if self._bound is not None else 0
        return width or self.site_map.points[point].width

    def __reduce__(self) -> NoReturn:
        raise ProgramError("a Run belongs to its engine and cannot be copied or pickled; take its tensors instead")

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Run {self.key}: {type(self.error).__name__}: {self.error}>"
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        captured = f", captured {self._summary()}" if self.has_captures else ""
        captured += f", a lens of {len(self.lens)} site{'s' if len(self.lens) > 1 else ''}" if self._lens_ops else ""
        if self.attention_ops:
            captured += f", attention of {len(self.attention)} site{'s' if len(self.attention) > 1 else ''}"
        return f"<Run {self.key}: {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, {text!r}{captured}>"

    def _summary(self) -> str:
        """Return a summary of the captured sites: `resid_post[0, 1, … 29], z[5]`."""
        by_name: dict[str, list[str]] = {}
        for point in sorted(self._captured):
            name, _, layer = self.site_map.label(point).rstrip("]").partition("[")
            by_name.setdefault(name, []).extend([layer] if layer else [])
        short = {name: [*of[:2], "…", of[-1]] if len(of) > 4 else of for name, of in by_name.items()}
        probes = [f"probe {name!r}" for name in self._probe_ops]
        return ", ".join([*(name + (f"[{', '.join(of)}]" if of else "") for name, of in short.items()), *probes])

    def _repr_html_(self) -> str:
        """Return the text of prompt and generation, and the captured sites, for notebooks."""
        if self.error is not None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        strings = [html.escape(token) for token in self.token_strings]
        prompt, rest = strings[: len(self.prompt_token_ids)], strings[len(self.prompt_token_ids) :]
        logprobs = self.answer.logprobs or [None] * len(rest)
        generated = [
            f"<b>{token}</b>" if value is None else f'<b title="log-probability {value:.3f}">{token}</b>'
            for token, value in zip(rest, logprobs, strict=False)
        ]
        captured = f"<p>captured: <code>{html.escape(self._summary())}</code></p>" if self.has_captures else ""
        text = f'<span style="opacity: 0.6">{"".join(prompt)}</span>{"".join(generated)}'
        return f'<div style="white-space: pre-wrap">{text}</div>{captured}'


class Rows(PublicStruct, frozen=True, eq=False):
    """Rows of many runs as one array, from `lm.rows` and `lm.probes`, ascending by run and position.

    values: [R, ...], a row of a site, or the scores of a probe, [k], or [L, k] at several layers
    run: the index of each row's run in `runs`, [R]
    position: the position of each row's token, [R]; for pooled rows, the last position read
    """

    values: np.ndarray
    run: np.ndarray
    position: np.ndarray

    def to_frame(self) -> Any:
        """Return the rows as a table: run, position, and one column per value."""
        import pandas

        columns = self.values.reshape(len(self.values), -1).T
        return pandas.DataFrame({"run": self.run, "position": self.position} | dict(enumerate(columns)))


class _Readings(Mapping[Any, Any]):
    """A mapping that raises this package's errors for missing keys."""

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  it would call itself


class _Probes(_Readings):
    """The mapping `run.probes`. Results are read on access."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._run.probed(name)

    def __contains__(self, name: object) -> bool:
        return name in self._run.probe_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._run.probe_names)

    def __len__(self) -> int:
        return len(self._run.probe_names)

    def __repr__(self) -> str:
        return f"<probes: {', '.join(self) or 'none'}>"


class LensResult(NamedTuple):
    """The likeliest tokens at a site, best first.

    layers: the layers of the first axis if the site has several, else ()
    positions: the positions of the rows read
    ids, logprobs: token ids, int32, and log-probabilities, fp32: [T, top], or [L, T, top] for several layers
    token_strings: function that returns the texts of ids
    """

    site: str
    layers: tuple[int, ...]
    positions: list[int]
    ids: np.ndarray
    logprobs: np.ndarray
    token_strings: Callable[[list[int]], list[str]]

    @property
    def tokens(self) -> list[Any]:
        """The texts of the ids, in nested lists of the same shape."""
        known, which = np.unique(self.ids, return_inverse=True)
        return np.array(self.token_strings(known.tolist()), object)[which.reshape(self.ids.shape)].tolist()

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per layer, position and rank: the token, its id, and its log-probability."""
        import pandas

        number, which, rank = np.indices((len(self.layers) or 1, *self.ids.shape[-2:])).reshape(3, -1)
        texts = np.array(self.tokens, object).ravel()
        layers = {"layer": np.array(self.layers)[number]} if self.layers else {}
        return pandas.DataFrame({
            **layers, "position": np.array(self.positions, np.int64)[which], "rank": rank, "token": texts,
            "token_id": self.ids.ravel(), "logprob": self.logprobs.ravel(),
        })  # fmt: skip

    def __repr__(self) -> str:
        return f"<LensResult {self.site} {list(self.ids.shape)}>"


class FeaturesResult(NamedTuple):
    """An attached SAE's features at each token: the largest in descending order, or the requested features.

    positions: the tokens' positions, [T]
    ids, values: int32 and fp32, [T, k]. A feature whose value is 0 is not active
    """

    name: str
    positions: list[int]
    ids: np.ndarray
    values: np.ndarray

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per token and active feature: position, feature, value."""
        import pandas

        row, rank = np.nonzero(self.values)
        positions, ids = np.array(self.positions, np.int64)[row], self.ids[row, rank]
        return pandas.DataFrame({"position": positions, "feature": ids, "value": self.values[row, rank]})

    def __repr__(self) -> str:
        return f"<FeaturesResult {self.name} {list(self.ids.shape)}>"


class _FeaturesRead(_Readings):
    """The mapping `run.features`. Results are computed on access."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.paths = {op.name: path for path, op in run.program.ops if isinstance(op, Features)}  # of the last ops

    def __getitem__(self, name: str) -> FeaturesResult:
        run = self._run
        run.answer  # noqa: B018  raises the run's own error
        path = self.paths.get(name, name)
        if path not in run._feature_ops:
            raise MissingSource(f"features of {name!r} were not read; available: {', '.join(self) or 'none'}")
        key, op = run._feature_ops[path], run.op_at(path)
        assert isinstance(op, Features)
        read_lenses(run._owner.engine, [run], [key])
        positions, ids, values = run.read_lens(key)
        return FeaturesResult(op.name, positions.tolist(), ids, values)

    def __contains__(self, name: object) -> bool:
        return name in self.paths or name in self._run._feature_ops

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return f"<features: {', '.join(self) or 'none'}>"


class _Lenses(_Readings):
    """The mapping `run.lens`. Results are computed on access."""

    def __init__(self, run: Run) -> None:
        self._run, sites = run, run.site_map
        self.keys_of_sites = {str(ref): (ref.point, number) for path, number in run._lens_ops.items()
                              for ref in sites.resolve(run.op_at(path).at)}  # fmt: skip
        self._number = dict(self.keys_of_sites.values())  # op of the last lens, by point

    def _find(self, site: Site | str) -> tuple[Site, list[SiteRef], list[tuple[int, int]]]:
        """Return a site, its refs that a lens read, and the (point, op) of each; no refs if a requested layer was not
        read."""
        run = self._run
        if isinstance(site, str) and site in run._lens_ops:
            at = run.op_at(site).at
            refs = run.site_map.resolve(at)
            return at, refs, [(ref.point, run._lens_ops[site]) for ref in refs]
        at = parse_site(site)
        every = run.site_map.resolve(at)
        refs = [ref for ref in every if ref.point in self._number]
        refs = refs if at.layers is None or len(refs) == len(every) else []
        return at, refs, [(ref.point, self._number[ref.point]) for ref in refs]

    def __getitem__(self, site: Site | str) -> LensResult:
        run = self._run
        run.answer  # noqa: B018  raises the run's own error
        at, refs, keys = self._find(site)
        if not refs:
            raise MissingSource(f"{site} was not read by a lens; available: {', '.join(self) or 'none'}")
        read_lenses(run._owner.engine, [run], keys)
        return _of_layers(at, refs, [run._lens_result(str(at), *run.read_lens(key)) for key in keys])

    def __contains__(self, site: object) -> bool:
        try:
            return isinstance(site, (str, Site)) and bool(self._find(site)[1])
        except PatchclampError:  # not a site of this model
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of_sites)

    def __len__(self) -> int:
        return len(self.keys_of_sites)

    def __repr__(self) -> str:
        return f"<lens: {', '.join(self) or 'none'}>"


def _of_layers(at: Site, refs: Sequence[SiteRef], read: Sequence[LensResult]) -> LensResult:
    """Stack the results of a site's layers. The result of a single-layer site is returned unchanged."""
    if not is_stacked(at):
        return read[0]
    first = read[0]
    if any(each.positions != first.positions or each.ids.shape != first.ids.shape for each in read[1:]):
        raise ProgramError(f"{at}: its layers differ in positions or top; read one layer at a time")
    ids, logprobs = np.stack([each.ids for each in read]), np.stack([each.logprobs for each in read])
    layers = tuple(ref.layer for ref in refs if ref.layer is not None)
    return first._replace(site=str(at), layers=layers, ids=ids, logprobs=logprobs)


def joined(read: Sequence[_OfTokens]) -> _OfTokens:
    """Concatenate the results of a lens at one layer, or of features, over consecutive tokens."""
    arrays = [name for name, value in read[0]._asdict().items() if isinstance(value, np.ndarray)]
    whole = {name: np.concatenate([getattr(each, name) for each in read]) for name in arrays}
    return read[0]._replace(positions=[at for each in read for at in each.positions], **whole)


def read_lenses(engine: Engine, runs: Iterable[Run], wanted: Sequence[tuple[int, int]] | None = None) -> None:
    """Compute the runs' unread lenses and features in few engine calls. `wanted`: the (point, op) pairs of the features
    and translated lenses to compute (plain lenses always are); None: all. Raises `MissingSource` for a closed run.
    """
    by_lens: dict[tuple[int, Translator | FeatureReader | None], list[tuple[Run, tuple[int, int], int]]] = {}
    for run in runs:
        for key, (top, by, rows) in run.unread_lenses().items():
            if by is not None and wanted is not None and key not in wanted:
                continue
            if run.closed:
                raise MissingSource(f"run {run.key} was closed before its lenses were read")
            if rows == 0:  # most parts of a stream, for a lens on the prompt
                run.take_lenses({key: (NO_POSITIONS, np.zeros((0, top), np.int32), np.zeros((0, top), np.float32))})
                continue
            by_lens.setdefault((top, by), []).append((run, key, rows))
    for (top, by), lenses in by_lens.items():
        ends = np.cumsum([rows for _, _, rows in lenses]) // LENS_ROWS
        for part in np.split(np.arange(len(lenses)), np.flatnonzero(np.diff(ends)) + 1):
            some = [lenses[i] for i in part]
            rows = [Wanted(run.key, point, op, run._first) for run, (point, op), _ in some]
            if isinstance(by, FeatureReader):  # already computed within the step
                found = [_features_in(*captured, top) for captured in engine.fetch_many(rows)]
            else:
                found = engine.lens_many(rows, top, by)
            for run, of_run in itertools.groupby(zip(some, found, strict=True), lambda pair: pair[0][0]):
                run.take_lenses({key: tokens for (_, key, _), tokens in of_run})


def _features_in(positions: np.ndarray, rows: torch.Tensor | np.ndarray, top: int) -> TopTokens:
    """Split captured rows, [T, 2 · top], into feature ids and values. Positions are passed through."""
    both = np.asarray(rows).reshape(len(positions), 2 * top)
    return positions, np.ascontiguousarray(both[:, top:]).view(np.int32), both[:, :top]


def fetch_probes(engine: Engine, runs: Iterable[tuple[Run, Iterable[str]]]) -> None:
    """Fetch the named probes of each run, in one engine call."""
    wanted = [(run, key) for run, names in runs for key in run.probe_keys(names)]
    captured = engine.fetch_many([Wanted(run.key, *key, run._first) for run, key in wanted]) if wanted else []
    for (run, key), rows in zip(wanted, captured, strict=True):
        run.take_fetched({key: rows})


def probe_scores(probe: Probe, products: torch.Tensor | np.ndarray, name: str) -> torch.Tensor | np.ndarray:
    """Compute a probe's scores, [T, k], or [k] if pooled, from its products W h, [T, k]."""
    if probe.bias is not None:
        bias = probe.bias.array()
        products = products + (bias if isinstance(products, np.ndarray) else products.new_tensor(bias))
    return activated(products if probe.pool is None else pooled(products, probe.pool, name), probe.activation)


def check_range(rows: torch.Tensor | np.ndarray, positions: np.ndarray, name: str) -> None:
    """Raise `NotFinite` for float16 rows that overflowed."""
    row = overflowed(rows)
    if row is not None:
        raise NotFinite(
            f"{name} at position {int(positions[row])} exceeds the float16 maximum of 65,504: capture it in bfloat16 "
            "or float32", "capture"
        )  # fmt: skip


def kinds_of(runs: Sequence[Run]) -> tuple[list[int], np.ndarray]:
    """Group runs by `Run.kind`: return the indices of each kind's first run and of each run's kind, [R]. Raises a
    failed run's error."""
    numbers, firsts = dict[tuple[int, ...], int](), list[int]()
    kind = np.empty(len(runs), np.int64)
    for i, run in enumerate(runs):
        kind[i] = numbers.setdefault(run.kind, len(firsts))
        if kind[i] == len(firsts):
            firsts.append(i)
    return firsts, kind


def pooled_by_run(rows: Rows, pool: str, runs: int, name: str) -> Rows:
    """Pool each run's rows into one row. `runs`: the number of runs. Raises `TokensError` if a run has no rows."""
    count = np.bincount(rows.run, minlength=runs)
    if not count.all():
        raise TokensError(f"{name}: the selection is empty, so there is nothing to pool", "pool")
    first, last = np.cumsum(count) - count, np.cumsum(count) - 1
    values = np.empty((runs, *rows.values.shape[1:]), np.float32)
    for length in np.unique(count):  # runs with equal row counts are pooled together
        some = np.flatnonzero(count == length)
        each = rows.values[first[some, None] + np.arange(length)] if pool != "last" else rows.values[last[some], None]
        values[some] = each.mean(1, dtype=np.float64) if pool == "mean" else each.max(1)
    return Rows(values, np.arange(runs), rows.position[last])


def pooled(rows: torch.Tensor | np.ndarray, pool: str, name: str) -> torch.Tensor:
    """Pool rows [T, ...] into one, [...], in fp32. Raises `TokensError` if T is 0."""
    if len(rows) == 0:
        raise TokensError(f"{name}: the selection is empty, so there is nothing to pool", "pool")
    if pool == "last":
        rows = rows[-1:]  # the maximum of one row is that row
    if isinstance(rows, np.ndarray):
        row = rows.mean(0, dtype=np.float64) if pool == "mean" else rows.max(0)
        return row.astype(np.float32)  # pyright: ignore[reportReturnType]
    return rows.double().mean(0).float() if pool == "mean" else rows.float().amax(0)


class _BySite(dict[str, _Result]):
    """Results by site name, such as "resid_post[3]". Indexing accepts any name of a site, and joins its layers."""

    def __init__(self, results: dict[str, _Result], sites: SiteMap) -> None:
        super().__init__(results)
        self.site_map = sites

    def _joined(self, at: Site, refs: list[SiteRef], results: list[_Result]) -> _Result:
        """Join the results of several layers of a site."""
        raise NotImplementedError

    def __missing__(self, site: Site | str) -> _Result:
        at = parse_site(site)
        refs = self._present(at)
        if not refs:
            raise MissingSource(f"{site} was not read; available: {', '.join(self) or 'none'}")
        results = [self[str(ref)] for ref in refs]
        return self._joined(at, refs, results) if is_stacked(at) else results[0]

    def __contains__(self, site: object) -> bool:
        return super().__contains__(site) or (isinstance(site, (str, Site)) and bool(self._present(parse_site(site))))

    def _present(self, at: Site) -> list[SiteRef]:
        refs = self.site_map.resolve(at)
        present = [ref for ref in refs if dict.__contains__(self, str(ref))]
        return present if at.layers is None or len(present) == len(refs) else []


class Captures(_BySite["torch.Tensor"]):
    """The captures of one run, from `lm.fetch`: tensors by site name, such as "resid_post[3]".

    `captures[pc.resid_post[3]]` takes a site by any of its names, and `captures[pc.resid_post]` stacks the layers that
    were fetched: [L, T, W], in the order of `captures.keys()`.
    """

    def __init__(self, results: dict[str, torch.Tensor], sites: SiteMap, pools: Mapping[int, str]) -> None:
        super().__init__(results, sites)
        self._pools = pools

    def _joined(self, at: Site, refs: list[SiteRef], results: list[torch.Tensor]) -> torch.Tensor:
        check_pools(refs, self._pools)
        return stacked(results)

    def __repr__(self) -> str:
        return f"<Captures: {', '.join(f'{name} {list(rows.shape)}' for name, rows in self.items())}>"


class ReadLenses(_BySite[LensResult]):
    """The lens results for the tokens of one part of a stream."""

    def _joined(self, at: Site, refs: list[SiteRef], results: list[LensResult]) -> LensResult:
        return _of_layers(at, refs, results)


def check_pools(refs: Sequence[SiteRef], pools: Mapping[int, str]) -> None:
    """Raise `ProgramError` if the layers differ in pooling. `pools`: the pooling by point."""
    first = refs[0]
    for ref in refs[1:]:
        if pools.get(ref.point) != pools.get(first.point):
            raise ProgramError(
                f"expected the same pooling in all layers, got pool={pools.get(first.point)!r} at {first} and "
                f"pool={pools.get(ref.point)!r} at {ref}; read one layer at a time, as in run[pc.{ref}]"
            )


def stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    """Stack the rows of layers, which are tensors or the fake engine's arrays."""
    shapes = list(dict.fromkeys(str(list(row.shape)) for row in rows))
    if len(shapes) > 1:
        raise ProgramError(f"expected layers of the same shape, got {' and '.join(shapes)}; read one layer at a time")
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]
    import torch

    return torch.stack(rows)


def _in_step(op: BoundOp) -> bool:
    """True if an op's rows were pooled on the device within each step."""
    return isinstance(op.action, Keep) and op.action.in_step


def _conditional(op: BoundOp) -> bool:
    """True if the generated tokens decide which of an op's captured positions are used."""
    return isinstance(op.action, Keep) and op.action.conditional
