"""Grading: log-probabilities of given next tokens for many programs on one prompt.

`GradeJob` is a prompt with its programs, `Grades` the result. vLLM runs jobs in separate batches
(`engines/vllm/bulk.py`); every engine can run them as requests (`grade.by_requests`).

N programs · k scores · V vocabulary
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError
from patchclamp.language.structs import PublicStruct
from patchclamp.plan.bind import Code
from patchclamp.plan.bound import APPLY, CAPTURE, STORE, TEST, BoundProgram
from patchclamp.plan.cells import CellRecords
from patchclamp.store.named import SourceRun

Term = tuple[int, int, int]
LOOK_EVERY_S = 0.2


class GradeJob(msgspec.Struct):
    """The programs of one prompt to grade.

    name: a unique name; the prefix of the job's run names
    count: the number of programs, N
    suffixes: for each sequence that a program runs on, the tokens after the prompt
    terms: for each score, the tokens whose log-probabilities it sums: (sequence, offset after the prompt, token)
    kl: True to compute KL(unedited ‖ edited) of the next token
    top: the number of likeliest next tokens to return
    cells, bound: `cells()` returns all programs as arrays, those refused as cells without a program; `bound(i)` returns
        program i, or None if it has no ops
    refused: the reasons why programs cannot run in batches, by program index
    vectors, code, sources: as in a `Request`
    has_baseline: False to skip grading the prompt without a program
    """

    name: str
    prompt: list[int]
    count: int
    suffixes: list[tuple[int, ...]]
    terms: list[list[Term]]
    cells: Callable[[], CellRecords]
    bound: Callable[[int], BoundProgram | None]
    kl: bool = False
    top: int = 0
    refused: dict[int, str] = {}
    vectors: dict[str, np.ndarray] = {}
    code: dict[int, Code] = {}
    sources: tuple[SourceRun, ...] = ()
    has_baseline: bool = True


class JobPart(NamedTuple):
    """Consecutive programs of a job.

    number: the job's index · first: the index of the part's first program
    """

    job: GradeJob
    number: int
    first: int
    cells: CellRecords


def sequences_of(scores: Sequence[Sequence[tuple[tuple[int, ...], int]]]) -> tuple[list[tuple[int, ...]], Any]:
    """Return a job's suffixes and terms. A score is a list of (tokens between the prompt and the scored token, scored
    token). A suffix that is a prefix of another suffix shares its sequence."""
    wanted = sorted({suffix for score in scores for suffix, _ in score}, key=len, reverse=True)
    suffixes: list[tuple[int, ...]] = []
    for suffix in wanted:
        if not any(other[: len(suffix)] == suffix for other in suffixes):
            suffixes.append(suffix)
    suffixes = suffixes or [()]

    def term(suffix: tuple[int, ...], token: int) -> Term:
        number = next(i for i, other in enumerate(suffixes) if other[: len(suffix)] == suffix)
        return number, len(suffix), token

    return suffixes, [[term(*each) for each in score] for score in scores]


REASONS = {
    TEST: "conditions",
    APPLY: "Apply, a whole SAE, or edits of attention",
    CAPTURE: "captures",
    STORE: "values of the same run",
}


def refused_of(programs: Iterable[BoundProgram | None]) -> dict[int, str]:
    """Return the reasons why programs cannot run in batches, by program index."""
    kinds = [set() if bound is None else {op.kind for op in bound.ops} & REASONS.keys() for bound in programs]
    return {number: next(REASONS[kind] for kind in REASONS if kind in of) for number, of in enumerate(kinds) if of}


class Grades(PublicStruct, frozen=True, eq=False):
    """The grades of N programs on one prompt.

    logprobs: log-probabilities of the scores, [N, k]
    baseline: log-probabilities of the scores without a program, [k]
    kl: KL(unedited ‖ edited) of the next token in nats, [N]; None if not requested
    top_ids, top_logprobs: the likeliest next tokens with their log-probabilities, [N, top]
    errors: errors by index of the failed program, whose grades are NaN
    route: "bulk" if the engine graded them in batches, "requests" if each was a request
    route_reason: the reason why requests were used for all or part of the programs
    from_cut: the number of requests computed only from their first edit onward (`Run.computed_from`)
    captured: each program's captures, as `LM.fetch` returns them; None for a failed program
    """

    logprobs: np.ndarray
    baseline: np.ndarray
    kl: np.ndarray | None
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    errors: dict[int, PatchclampError]
    route: str
    route_reason: str = ""
    from_cut: int = 0
    captured: list[Any] | None = None

    def __repr__(self) -> str:
        count, scores = self.logprobs.shape
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"<Grades of {count} programs, {scores} scores{failed}, by {self.route}>"


def arrived(found: queue.SimpleQueue[Any]) -> Any:
    """Return a queue's next item. This polls, because a blocking wait could delay signal handling."""
    while True:
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=LOOK_EVERY_S)


class GradeTable:
    """A job's results: row 0 is the prompt without a program, row i + 1 program i. `done` marks graded rows."""

    def __init__(self, job: GradeJob) -> None:
        rows = job.count + 1
        self.logprobs: np.ndarray = np.full((rows, len(job.terms)), np.nan, np.float32)
        self.kl: np.ndarray | None = np.full(rows, np.nan, np.float32) if job.kl else None
        self.top_ids: np.ndarray = np.full((rows, job.top), -1, np.int64)
        self.top_logprobs: np.ndarray = np.full((rows, job.top), np.nan, np.float32)
        self.errors: dict[int, PatchclampError] = {}
        self.from_cut: int = 0
        self.done: np.ndarray = np.zeros(rows, bool)

    def take(self, number: np.ndarray, found: Sequence[np.ndarray], errors: Mapping[int, PatchclampError]) -> None:
        """Add results for program indices `number`. `found`: log-probabilities, KL, top ids and log-probabilities."""
        columns = (self.logprobs, self.kl, self.top_ids, self.top_logprobs)
        for column, values in zip(columns, found, strict=True):
            if column is not None and column.size and values.size:
                column[number + 1] = values.reshape(len(number), *column.shape[1:])
        self.errors.update(errors)
        self.done[number + 1] = True

    def grades(self, route: str, reason: str = "") -> Grades:
        if -1 in self.errors:
            raise self.errors[-1]
        for number in self.errors:
            self.logprobs[number + 1] = self.top_logprobs[number + 1] = np.nan
            if self.kl is not None:
                self.kl[number + 1] = np.nan
        kl = None if self.kl is None else self.kl[1:]
        return Grades(self.logprobs[1:], self.logprobs[0], kl, self.top_ids[1:], self.top_logprobs[1:], self.errors,
                      route, reason, self.from_cut)  # fmt: skip


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return fp64 log-probabilities of logits over the last axis."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Return KL(p ‖ q) from log-probabilities [V] of two distributions; negative rounding errors are clipped to 0."""
    there = np.isfinite(log_p)
    log_p, log_q = log_p[there], log_q[there]
    return max(float((np.exp(log_p) * (log_p - log_q)).sum()), 0.0)
