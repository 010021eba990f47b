"""Teacher forcing: the log-probability of every token of a given continuation, exact, on any engine.

Continuations are graded like the answers of `LM.grade`: in vLLM's batches, or as requests, where one request scores a
whole continuation. Edits of logits, which act on sampled tokens, take a request for each token instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.grading import GradeJob
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.errors import PatchclampError, TokensError
from patchclamp.grade import Pace
from patchclamp.language import Op, When
from patchclamp.language.conditions import comparisons
from patchclamp.language.tokens import Tokens, every
from patchclamp.lm import LM
from patchclamp.plan import Prompt
from patchclamp.store.journal import Journal

MAX_TOKENS = 1 << 14  # tokens of the continuations that are graded together


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


def forced_logprobs(
    lm: LM,
    items: Sequence[Forced],
    batch: int = 256,
    advance: Callable[[int], None] = lambda done: None,
    journal: Journal | None = None,
) -> list[np.ndarray]:
    """Return the log-probability of each continuation token, given the tokens before it: fp64 [n] per item.

    `advance` is called with counts of newly finished items. Items in `journal` are not recomputed; others are appended
    in groups that take about `grade.BATCH_S`.
    Raises: the error of any run.
    """
    known = journal.take(list[float], len(items)) if journal is not None else []
    logprobs = [np.array(record) for record in known]
    advance(len(logprobs))
    pace = Pace(MAX_TOKENS)
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


def _group_logprobs(lm: LM, items: list[Forced], batch: int) -> list[np.ndarray]:
    """Return the items' log-probabilities. Items that differ only in their edits share a job."""
    of_pair: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, item in enumerate(items):
        of_pair.setdefault((item.prompt, item.continuation), []).append(i)
    jobs: list[GradeJob] = []
    for (prompt, continuation), which in of_pair.items():
        programs = [[op for _, op in fixed(lm, items[i])] for i in which]
        scores = [[(continuation[:n], token)] for n, token in enumerate(continuation)]
        jobs.append(msgspec.structs.replace(lm.grade_job(prompt, programs, scores), has_baseline=False))
    rows: dict[int, np.ndarray] = {}
    for grades, which in zip(lm.graded(jobs, batch=batch), of_pair.values(), strict=True):
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
