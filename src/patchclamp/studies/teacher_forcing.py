"""Teacher forcing: the log-probability of every token of a given continuation, exact, on any engine.

On vLLM continuations are graded in batches (`LM.grade`). Elsewhere, one run of prompt + continuation captures
`final_norm` at the positions that predict the continuation's tokens. Each row is then written into a one-token run,
whose next token is scored: the engine's own unembedding reads the row, in the engine's own numerics. A continuation of
n tokens costs this run and n − 1 runs of one token, instead of n runs of growing length. The long run itself scores the
last token.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from patchclamp.engines.grading import GradeJob
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import CapacityError, PatchclampError, TokensError
from patchclamp.grade import Pace
from patchclamp.language import Capture, From, Op, Replace, Site, When
from patchclamp.language.conditions import comparisons
from patchclamp.language.tokens import Tokens, every
from patchclamp.lm import LM, MAX_SCORES
from patchclamp.plan import Prompt
from patchclamp.run import Run
from patchclamp.store.journal import Journal
from patchclamp.studies.study import run_batches

MAX_ROWS = 1 << 14  # rows of `final_norm` kept at a time
FINAL_NORM = Site("final_norm")


class Forced(msgspec.Struct, frozen=True):
    """A prompt and its continuation of at least one token, as token ids; `text` is the prompt's, if known.

    edits: as for a run that generates the continuation: `prompt` selects from the prompt, `generated` from the
        continuation
    path: the edits' path in errors
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    edits: tuple[Op, ...] = ()
    text: str | None = None
    path: str = ""

    @property
    def has_conditions(self) -> bool:
        return any(isinstance(op, When) for op in self.edits)


def forced_logprobs(
    lm: LM,
    items: Sequence[Forced],
    batch: int = 256,
    advance: Callable[[int], None] = lambda done: None,
    journal: Journal | None = None,
) -> list[np.ndarray]:
    """Return the log-probability of each token of each item's continuation, given those before it: fp64 [n] per item.

    `advance` is called with counts of newly finished items. Items in `journal` are not recomputed; others are appended
    in groups that take about `grade.BATCH_S`.
    Raises: the error of any run; `UnsupportedSite` if the model's `final_norm` was not proved and n > 1.
    """
    known = journal.take(list[float], len(items)) if journal is not None else []
    logprobs = [np.array(record) for record in known]
    advance(len(logprobs))
    pace = Pace(MAX_ROWS)
    for group in pace.parts(items[len(logprobs) :], lambda item: len(item.continuation)):
        try:
            new = _group_logprobs(lm, group, batch)
        except PatchclampError:
            for item in group:
                _check(lm, item)
            raise
        if journal is not None:
            journal.append([row.tolist() for row in new])
        pace.done()
        logprobs += new
        advance(len(group))
    return logprobs


class _Long(msgspec.Struct):
    """A run of a prompt and all but the last token of its continuation. `lasts`: the last tokens to score."""

    item: Forced
    lasts: list[int]

    @property
    def count(self) -> int:
        """The number of tokens before the last."""
        return len(self.item.continuation) - 1


def _key(longs: dict[Any, _Long], item: Forced) -> Any:
    """Return the key of the run that scores an item's last token. Continuations that differ only in it share a run."""
    last = item.continuation[-1]
    for number in itertools.count():
        key = item.prompt, item.continuation[:-1], item.edits, number
        lasts = longs.setdefault(key, _Long(item, [])).lasts
        if last in lasts:
            return key
        if len(lasts) < MAX_SCORES:
            lasts.append(last)
            return key


def _group_logprobs(lm: LM, items: list[Forced], batch: int) -> list[np.ndarray]:
    if not lm.batch_refusal:
        with contextlib.suppress(CapacityError):  # as requests, rows are faster
            return _graded(lm, items, batch, "bulk")
    # the end of the prompt, where conditions may be decided, is not that of a long run
    graded = iter(_graded(lm, [item for item in items if item.has_conditions], batch))
    rows = iter(_logprobs_of_rows(lm, [item for item in items if not item.has_conditions], batch))
    return [next(graded if item.has_conditions else rows) for item in items]


def _graded(lm: LM, items: list[Forced], batch: int, route: Literal["any", "bulk"] = "any") -> list[np.ndarray]:
    """Return the items' log-probabilities, graded by `LM.graded`."""
    of_pair: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, item in enumerate(items):
        of_pair.setdefault((item.prompt, item.continuation), []).append(i)
    jobs: list[GradeJob] = []
    for (prompt, continuation), which in of_pair.items():
        programs = [[op for _, op in fixed(lm, items[i])] for i in which]
        scores = [[(continuation[:n], token)] for n, token in enumerate(continuation)]
        jobs.append(lm.grade_job(prompt, programs, scores))
    rows: dict[int, np.ndarray] = {}
    for grades, which in zip(lm.graded(jobs, batch=batch, route=route), of_pair.values(), strict=True):
        for error in grades.errors.values():
            raise error
        rows |= zip(which, grades.logprobs.astype(np.float64), strict=True)
    return [rows[i] for i in range(len(items))]


def _check(lm: LM, item: Forced) -> None:
    """Raise the error of an edit that does not fit the model or the prompt, with its path."""
    for path, op in fixed(lm, item):
        try:
            lm.grade_job(item.prompt, [[op]], [[(item.continuation[:-1], 0)]])
        except PatchclampError as error:
            within = (error.path or "").removeprefix("programs[0].edits[0]").lstrip(".")
            raise type(error)(error.message, within or None).under(path) from None


def _logprobs_of_rows(lm: LM, items: list[Forced], batch: int) -> list[np.ndarray]:
    """Return the log-probabilities, read from rows of long runs."""
    longs: dict[Any, _Long] = {}
    keys = [_key(longs, item) for item in items]
    runs: list[Run] = []
    run_batches(lm, (_whole(lm, part) for part in parts([*longs.values()], batch)), runs.extend)
    try:
        before = dict(zip(longs, _readouts(lm, [*longs.values()], runs, batch), strict=True))
    finally:
        for run in runs:
            run.close()
    last = dict(zip(longs, (run.scores for run in runs), strict=True))
    return [np.append(before[key], last[key][item.continuation[-1]]) for key, item in zip(keys, items, strict=True)]


def _whole(lm: LM, longs: list[_Long]) -> dict[str, Any]:
    """Return the arguments of `lm.arun` for long runs, which capture the rows that predict all tokens but the last."""
    begins = [len(long.item.prompt) - 1 for long in longs]
    return {
        "prompt": [[*long.item.prompt, *long.item.continuation[:-1]] for long in longs],
        "max_tokens": 1,
        "edits": [[op for _, op in fixed(lm, long.item)] for long in longs],
        "capture": [[Capture(FINAL_NORM, every[begin : begin + long.count])] if long.count else []
                    for begin, long in zip(begins, longs, strict=True)],
        "score": [long.lasts for long in longs],
    }  # fmt: skip


def _readouts(lm: LM, longs: list[_Long], runs: list[Run], batch: int) -> list[np.ndarray]:
    """Return the log-probabilities of all tokens but the last, each from a one-token run."""
    logprobs = [np.zeros(long.count) for long in longs]
    places = [(i, n) for i, long in enumerate(longs) for n in range(long.count)]
    unread = iter(places)

    def read(readouts: list[Run]) -> None:
        for run, (i, n) in zip(readouts, unread, strict=False):
            logprobs[i][n] = run.scores[longs[i].item.continuation[n]]
            run.close()

    run_batches(lm, (_readout(longs, runs, part) for part in parts(places, batch)), read)
    return logprobs


def _readout(longs: list[_Long], runs: list[Run], places: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the arguments of `lm.arun` that read rows of long runs through the unembedding."""
    items = [longs[i].item for i, _ in places]
    sources = [From(runs[i], FINAL_NORM, every[len(longs[i].item.prompt) - 1 + n]) for i, n in places]
    return {
        "prompt": [[item.prompt[-1]] for item in items],
        "max_tokens": 1,
        "edits": [[Replace(source, at=FINAL_NORM, tokens=every[0])] for source in sources],
        "score": [[item.continuation[n]] for item, (_, n) in zip(items, places, strict=True)],
    }


def fixed(lm: LM, item: Forced) -> Iterator[tuple[str, Op]]:
    """Yield an item's edits by path, including named programs' edits, with positions resolved to numbers, because the
    continuation is now part of the prompt. Edits and conditions without positions are dropped."""
    ids = [*item.prompt, *item.continuation[:-1]]
    prompt = prompt_of(lm.tokenizer, item.prompt, item.text, None)

    def place(path: str, op: Any) -> Any:
        try:
            positions = _positions(prompt, op.tokens, ids, lm.model.max_model_len)
        except PatchclampError as error:
            raise error.under(f"{path}.tokens") from None
        return msgspec.structs.replace(op, tokens=_numbered(positions, len(ids))) if positions else None

    for i, given in enumerate(item.edits):
        for path, op in lm.bank.expanded(given, f"{item.path}.edits[{i}]".lstrip(".")):
            if isinstance(op, When):
                edits = [place(f"{path}.edits[{n}]", edit) for n, edit in enumerate(op.edits)]
                is_read = all(place(f"{path}.condition", one.probe) for one in comparisons(op.condition))
                op = msgspec.structs.replace(op, edits=tuple(filter(None, edits))) if any(edits) and is_read else None
            else:
                op = place(path, op)
            if op is not None:
                yield path, op


def _positions(prompt: Prompt, tokens: Tokens, ids: list[int], most: int) -> tuple[int, ...]:
    """Return the positions of a selection; generated tokens beyond the continuation are dropped."""
    try:
        chosen = prompt.select(tokens, len(ids), ids)
    except TokensError:
        chosen = prompt.select(tokens, most, ids)
    return tuple(chosen[chosen < len(ids)].tolist())


def _numbered(positions: tuple[int, ...], count: int) -> Any:
    if positions == tuple(range(count)):
        return every
    run = tuple(range(positions[0], positions[-1] + 1))
    return every[positions[0] : positions[-1] + 1] if positions == run else every[positions]


def parts(items: Sequence[Any], size: int) -> Iterable[list[Any]]:
    """Yield lists of at most `size` items, in order."""
    return (list(items[begin : begin + size]) for begin in range(0, len(items), size))
