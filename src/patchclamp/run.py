"""`pc.Run`: what came of one request."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from patchclamp.engines.base import Answer, Request
from patchclamp.errors import MissingSource, PatchclampError, ProgramError
from patchclamp.language import Program, Site
from patchclamp.language.ops import DTYPES
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Tokens, parse_tokens
from patchclamp.plan import CAPTURE, BoundOp, BoundProgram, Prompt
from patchclamp.plan.bound import Keep


class Run:
    """One executed request: its text and tokens, log-probabilities, captures, and the error it met.

    `prompt_token_ids` and `token_ids` (generated) are lists; `logprobs` has a float for each generated token; `scores`
    maps each token id of `score=` to its log-probability as the next token; `lora` is the folder of its adapter.
    Captures stay with the worker until the run is dropped or `close`d; `run[site]` fetches them, once.
    """

    def __init__(self, lm: Any, request: Request, program: Program, answer: Answer | PatchclampError) -> None:
        self.key, self.prompt_token_ids, self.program = request.run, request.prompt_token_ids, program
        self.error: PatchclampError | None = None if isinstance(answer, Answer) else answer
        self.closed = False
        self.lora = None if request.adapter is None else request.adapter.folder
        self._lm, self._answer, self._text = lm, answer, request.text
        self._bound: BoundProgram | None = request.bound
        self._limit = len(request.prompt_token_ids) + request.max_tokens - 1  # positions, had it gone on to the end
        conditions = {op.condition.ids for op in self._ops if op.condition}
        self._ids_of = {key: request.vectors[key].reshape(-1).astype(np.int64) for key in conditions}
        self._fetched: dict[tuple[int, int | None], tuple[np.ndarray, Any]] = {}
        self._release = weakref.finalize(self, lm.engine.release, [self.key])
        self._release.atexit = False
        if not program:
            self._release.detach()

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
        """The generated text."""
        return self.answer.text

    @property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids

    @property
    def logprobs(self) -> list[float]:
        return self.answer.logprobs

    @property
    def scores(self) -> dict[int, float]:
        return self.answer.scores

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were read from the engine's prefix cache instead of computed."""
        return self.answer.cached_tokens

    @property
    def finish_reason(self) -> str | None:
        return self.answer.finish_reason

    def __getitem__(self, site: Site | str) -> Any:
        """What was captured at one site: a CPU tensor [T, W] of the asked positions, in the capture's dtype; of heads
        [T, H, E], where an integer index drops its axis, so that `run[pc.z[5, 3]]` is [T, E].

        A site captured twice gives the union of positions; where both have one, the later in the program's order. A
        path such as "edits[0]" gives what that `Capture` kept, at its own place in the order. It is the same tensor
        each time, and `resid_pre[l + 1]` is that of `resid_post[l]`: clone what is to be changed in place.

        Raises `MissingSource` if it was not captured, and the run's own error if it failed.
        """
        found, at = self._fetch(site)[1], self._at(site)
        parts = self._lm.sites.parts(at.name)
        if parts is None:
            return found
        first, end = self._lm.sites.resolve(at)[0].columns or (0, found.shape[1])
        found = found[:, first:end].reshape((len(found), (end - first) // parts[1], parts[1]))
        found = found[:, 0] if isinstance(at.index, int) else found
        return found[..., 0] if parts[1] == 1 else found

    def positions(self, site: Site | str) -> list[int]:
        """The positions that label the rows of `run[site]`."""
        return [int(position) for position in self._fetch(site)[0]]

    @property
    def sites(self) -> list[str]:
        """Every captured site, as text."""
        bound = self._bound
        points = bound.captured if bound is not None else {}
        return [str(place) for place in self._lm.sites.places() if place.point in points]

    @property
    def idle_edits(self) -> list[str]:
        """Paths of the edits that acted on no row, such as "edits[0]", in order: those whose tokens never came, or that
        were meant for tokens after the end. Worked out here from the run's positions and token ids, and exact."""
        tokens = np.array([*self.prompt_token_ids, *self.token_ids][: self._positions], np.int64)
        acted: dict[str, bool] = {}
        for op in self._ops:
            if op.kind != CAPTURE:
                acted[op.path] = acted.get(op.path, False) or self._acted(op, tokens)
        return [path for path, did in acted.items() if not did]

    def _acted(self, op: BoundOp, tokens: np.ndarray) -> bool:
        """Whether an op had a row among positions of such tokens."""
        for start, stop, _, _ in op.ranges:
            here = tokens[start:stop]
            condition = op.condition
            if len(here) and (not condition or (np.isin(here, self._ids_of[condition.ids]) != condition.others).any()):
                return True
        return False

    def close(self) -> None:
        """Lets the captures go now."""
        self.closed = True
        self._release()

    def refs(self, site: Site | str) -> list[str]:
        """The site refs that a site names, layer by layer, as `run[...]` takes them."""
        return [str(ref) for ref in self._lm.sites.resolve(parse_site(site))]

    # -- as a source for `From`

    def positions_of(self, point: int) -> np.ndarray:
        mine = [op for op in self._ops if op.kind == CAPTURE and point in op.points]
        if len(mine) > 1 and any(map(_conditional, mine)):
            raise MissingSource(
                f"run {self.key} captured {self._lm.sites.label(point)} {len(mine)} times, one of them by token id: "
                "capture it once to read it with From, or give the rows of run[site]"
            )
        captured = self._bound.captured if self._bound is not None else {}
        return captured.get(point, np.zeros(0, np.int64))[: self._length(captured.get(point))]

    def select(self, tokens: Tokens | str) -> np.ndarray:
        return self._select(parse_tokens(tokens), self._positions)

    def _select(self, tokens: Tokens, limit: int) -> np.ndarray:
        prompt = Prompt(self.prompt_token_ids, lambda: self._lm.tokenizer.spell(self.prompt_token_ids, self._text))
        return prompt.select(tokens, limit, [*self.prompt_token_ids, *self.token_ids])

    @property
    def _positions(self) -> int:
        """How many positions have activations: the last sampled token was never an input."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    def _length(self, positions: np.ndarray | None) -> int:
        return 0 if positions is None else int(np.searchsorted(positions, self._positions))

    def _fetch(self, site: Site | str) -> tuple[np.ndarray, Any]:
        self.answer  # noqa: B018  raises the run's own error
        point, op = self._named(site)
        if (point, op) not in self._fetched:
            self._fetched[point, op] = self._read(point, op, str(site))
        return self._fetched[point, op]

    def _named(self, site: Site | str) -> tuple[int, int | None]:
        """The point that a site names or an op's path captured at, and the op."""
        for ordinal, op in enumerate(self._ops):
            if site == op.path and op.kind == CAPTURE:
                return self._one_point(self._at(site)), ordinal
        return self._one_point(parse_site(site)), None

    def _at(self, site: Site | str) -> Site:
        """The site that is named, or that of the `Capture` at a path."""
        paths = {op.path for op in self._ops if op.kind == CAPTURE}
        return next(kept.at for path, kept in self.program.ops if path == site) if site in paths else parse_site(site)  # type: ignore[attr-defined]

    def _one_point(self, site: Site) -> int:
        places = self._lm.sites.resolve(site)
        if len(places) > 1:
            raise ProgramError(f"run[...] takes one layer: {site} names {len(places)}, as in run[pc.{places[0]}]")
        return places[0].point

    def _read(self, point: int, ordinal: int | None, name: str) -> tuple[np.ndarray, Any]:
        captures = ((i, op) for i, op in enumerate(self._ops) if op.kind == CAPTURE and point in op.points)
        mine = {i: op for i, op in captures if ordinal in (None, i)}
        if not mine:
            raise MissingSource(f"{name} was not captured; this run has: {', '.join(self.sites) or 'no captures'}")
        if self.closed:
            raise MissingSource(f"run {self.key} was closed before {name} was read")
        dtypes = {DTYPES[op.action.dtype] for op in mine.values() if isinstance(op.action, Keep)}
        if any(map(_conditional, mine.values())):
            found, rows = _merged([self._matching(point, op, i, name) for i, op in mine.items()])
        else:
            found, rows = self._stored(point, tuple(mine.values()), ordinal, name)
        return found, rows if dtypes == {"float32"} or len(dtypes) > 1 else _cast(rows, dtypes.pop())

    def _matching(self, point: int, op: BoundOp, ordinal: int, name: str) -> tuple[np.ndarray, Any]:
        """What one op captured, of the tokens that it asks for, which are known now."""
        found, rows = self._stored(point, (op,), ordinal, name)
        if not _conditional(op):
            return found, rows
        tokens = next(asked.tokens for path, asked in self.program.ops if path == op.path)  # type: ignore[attr-defined]
        kept = np.isin(found, self._select(tokens, self._limit))
        return found[kept], rows[kept]

    def _stored(self, point: int, ops: tuple[BoundOp, ...], ordinal: int | None, name: str) -> tuple[np.ndarray, Any]:
        """What the engine has of some ops at a point, of the positions that came to be."""
        wanted = BoundProgram(self.key, len(self.prompt_token_ids), ops).captured[point]
        wanted = wanted[: self._length(wanted)]
        found, rows = self._lm.engine.fetch(self.key, point, ordinal)
        kept = np.searchsorted(found, self._positions)
        found, rows = found[:kept], rows[:kept]
        if not np.array_equal(found, wanted):
            raise PatchclampError(f"{name}: {len(wanted)} positions were asked for and {len(found)} were captured")
        return found, rows

    def __reduce__(self):
        raise ProgramError("a Run belongs to its engine and cannot be copied or pickled; take its tensors instead")

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<Run {self.key}: {type(self.error).__name__}: {self.error}>"
        return f"<Run {self.key}: {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, {self.text!r}>"


def _conditional(op: BoundOp) -> bool:
    """Whether which of an op's captured positions count depends on what was generated."""
    return isinstance(op.action, Keep) and op.action.conditional


def _merged(parts: list[tuple[np.ndarray, Any]]) -> tuple[np.ndarray, Any]:
    """Positions and rows of several ops together; of two that have a position the later counts."""
    import torch

    last = {int(position): (part, row) for part, (found, _) in enumerate(parts) for row, position in enumerate(found)}
    kinds = {str(rows.dtype) for _, rows in parts}
    tensors = [torch.as_tensor(rows) if len(kinds) == 1 else torch.as_tensor(rows).float() for _, rows in parts]
    rows = [tensors[part][row] for _, (part, row) in sorted(last.items())]
    return np.array(sorted(last), np.int64), torch.stack(rows) if rows else tensors[0][:0]


def _cast(rows: Any, dtype: str) -> Any:
    import torch

    return torch.as_tensor(rows).to(getattr(torch, dtype))
