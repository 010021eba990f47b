"""Teacher forcing: the log-probability of every token of a given continuation, exact, on any engine.

One run of prompt + continuation captures `final_norm` where each token of the continuation is predicted. Then each of
those rows is written into a run of a single token, whose next token is scored: the engine's own unembedding reads it,
in the engine's own numerics. So a continuation of n tokens costs one prompt of its length and n − 1 prompts of one
token, in place of n prompts of growing length; the last token is scored by the long run itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language import Capture, From, Op, Program, Replace, Site
from patchclamp.language.ops import SiteOp
from patchclamp.language.tokens import every
from patchclamp.lm import LM
from patchclamp.plan import Prompt
from patchclamp.run import Run
from patchclamp.studies.batches import run_batches

MAX_ROWS = 1 << 14  # of `final_norm` that are kept at a time
FINAL_NORM = Site("final_norm")


class Forced(msgspec.Struct, frozen=True):
    """A continuation of a prompt, in token ids, at least one; `text` is the prompt's, where it is known.

    edits: as of a run that generates the continuation: selections of the prompt mean the prompt, `generated` means the
        continuation
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    edits: tuple[Op, ...] = ()
    text: str | None = None


def forced_logprobs(
    lm: LM, items: Sequence[Forced], batch: int = 256, advance: Callable[[int], None] = lambda done: None
) -> list[np.ndarray]:
    """For each item the log-probability of each token of its continuation, given those before it: fp64 [n].

    `advance` hears of items as they are done.
    Raises: the error of any run; `UnsupportedSite` where a model's `final_norm` was not proved and n > 1.
    """
    logprobs: list[np.ndarray] = []
    for group in _groups(items):
        logprobs += _group_logprobs(lm, group, batch)
        advance(len(group))
    return logprobs


def _groups(items: Sequence[Forced]) -> Iterator[list[Forced]]:
    """Items, as many at a time as keep `MAX_ROWS` rows."""
    group: list[Forced] = []
    rows = 0
    for item in items:
        if group and rows + len(item.continuation) > MAX_ROWS:
            yield group
            group, rows = [], 0
        group.append(item)
        rows += len(item.continuation)
    if group:
        yield group


def _group_logprobs(lm: LM, items: list[Forced], batch: int) -> list[np.ndarray]:
    logprobs = [np.zeros(len(item.continuation)) for item in items]
    runs: list[Run] = []
    run_batches(lm, (_whole(lm, part) for part in parts(items, batch)), runs.extend)
    for item, run, row in zip(items, runs, logprobs, strict=True):
        row[-1] = run.scores[item.continuation[-1]]
    places = [(i, n) for i, item in enumerate(items) for n in range(len(item.continuation) - 1)]
    unread = iter(places)

    def read(readouts: list[Run]) -> None:
        for run, (i, n) in zip(readouts, unread, strict=False):
            logprobs[i][n] = run.scores[items[i].continuation[n]]

    try:
        run_batches(lm, (_readouts(items, runs, part) for part in parts(places, batch)), read)
    finally:
        for run in runs:
            run.close()
    return logprobs


def _whole(lm: LM, items: list[Forced]) -> dict[str, Any]:
    """The call that runs prompts with their continuations, all but the last token of each."""
    return {
        "prompt": [[*item.prompt, *item.continuation[:-1]] for item in items],
        "max_tokens": 1,
        "edits": [list(fixed(lm, item)) for item in items],
        "capture": [_predicting(item) for item in items],
        "score": [[item.continuation[-1]] for item in items],
    }


def _predicting(item: Forced) -> list[Capture]:
    """The capture of the rows that predict all tokens but the last."""
    first, count = len(item.prompt) - 1, len(item.continuation) - 1
    return [Capture(FINAL_NORM, every[first : first + count])] if count else []


def _readouts(items: list[Forced], runs: list[Run], places: list[tuple[int, int]]) -> dict[str, Any]:
    """The call that reads rows through the unembedding, each in a run of one token."""
    sources = [From(runs[i], FINAL_NORM, every[len(items[i].prompt) - 1 + n]) for i, n in places]
    return {
        "prompt": [[items[i].prompt[-1]] for i, _ in places],
        "max_tokens": 1,
        "edits": [[Replace(source, at=FINAL_NORM, tokens=every[0])] for source in sources],
        "score": [[items[i].continuation[n]] for i, n in places],
    }


def fixed(lm: LM, item: Forced) -> Iterator[Op]:
    """An item's edits at the positions that they act on, by number: the continuation is part of the prompt now."""
    ids = [*item.prompt, *item.continuation[:-1]]
    prompt = Prompt(item.prompt, lambda: lm.tokenizer.spell(item.prompt, item.text))
    for path, op in Program.of(list(item.edits)).ops:
        if not isinstance(op, SiteOp):
            raise ProgramError("a program by its name has no place here: give its edits", path)
        positions = tuple(prompt.select(op.tokens, len(ids), ids).tolist())
        if positions:
            yield msgspec.structs.replace(op, tokens=_numbered(positions, len(ids)))


def _numbered(positions: tuple[int, ...], count: int) -> Any:
    if positions == tuple(range(count)):
        return every
    run = tuple(range(positions[0], positions[-1] + 1))
    return every[positions[0] : positions[-1] + 1] if positions == run else every[positions]


def parts(items: Sequence[Any], size: int) -> Iterable[list[Any]]:
    """Lists of at most `size` items, in order."""
    return (list(items[begin : begin + size]) for begin in range(0, len(items), size))
