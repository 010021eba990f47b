"""`LM.grade`: many programs on one prompt, each with the log-probabilities of the same next tokens.

`bound_job` makes a `GradeJob` from a prompt and its programs. `by_requests` runs it as requests, on any engine.
"""

from __future__ import annotations

import collections
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.base import MAX_SCORES, Answer, Engine, Request
from patchclamp.engines.grading import LOOK_EVERY_S, GradeJob, GradeTable, kl, log_softmax, refused_of, sequences_of
from patchclamp.errors import PatchclampError, ProgramError, TokensError, as_patchclamp_error
from patchclamp.language import Program
from patchclamp.language.values import as_items
from patchclamp.plan.bind import Bindings, Code, code_numbers
from patchclamp.plan.bound import Attended, BoundOp, BoundProgram, Keep, PositionRange, RunCode, with_removed_keys
from patchclamp.plan.cuts import MIN_SHARED
from patchclamp.plan.prompt import Prompt
from patchclamp.sites.map import LENS
from patchclamp.store.named import SourceRun

AT_ONCE = 512  # requests per batch
FULL_BYTES = 1 << 28  # of full distributions that are captured at a time
LONG = 4  # tokens of an answer before its last: a request for each takes longer than an unedited run saves
UNDER_WAY = 2  # batches in flight
BATCH_S = 2.0  # target time of a batch; short, because a killed process loses the batches in flight
FIRST, GROWTH = 4, 4  # items of the first batch; largest growth factor from one batch to the next
Item = TypeVar("Item")


def read_scores(score: Any, bare: Any, d_vocab: int) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each score (a text, an id, or a list of ids). `bare` encodes without special tokens."""
    if isinstance(score, (set, frozenset)):
        raise TokensError(f"expected a list of answers, got a set {score!r:.100}", "score")
    items = [score] if isinstance(score, str) or is_token_id(score) else as_items(score, "score")
    found: list[tuple[int, ...]] = []
    for i, item in enumerate(items):
        if isinstance(item, (set, frozenset)):
            raise TokensError(f"expected a list of token ids, got a set {item!r:.100}", f"score[{i}]")
        ids = bare(item) if isinstance(item, str) else [item] if is_token_id(item) else as_items(item, f"score[{i}]")
        if not ids:
            raise TokensError(f"{item!r} has no tokens", f"score[{i}]")
        for token in ids:
            if not is_token_id(token) or not 0 <= token < d_vocab:
                raise TokensError(f"expected a token id from 0 to {d_vocab - 1}, got {token!r}", f"score[{i}]")
        found.append(tuple(int(token) for token in ids))
    return tuple(found)


def read_program(program: Any, path: str) -> Program:
    """Convert an item of `programs=` (an op, a list of ops, a `Program`, or None) to a `Program`."""
    try:
        if program is None:
            return Program.of(())
        return program if isinstance(program, Program) else Program.of(program)
    except PatchclampError as error:
        raise error.under(path) from None


def read_top(top: Any) -> int:
    if not is_token_id(top) or not 0 <= top <= MAX_SCORES:
        raise ProgramError(f"expected a number from 0 to {MAX_SCORES}, got {top!r}", "top")
    return int(top)


def bound_job(
    engine: Engine, name: str, prompt: Prompt, programs: Iterable[Any],
    scores: Sequence[Sequence[tuple[tuple[int, ...], int]]], max_tokens: int, kl: bool, top: int, bindings: Bindings,
) -> GradeJob:  # fmt: skip
    """Bind programs to a prompt and return a grading job for the engine. Error paths begin with the program's path.
    `scores`: as in `sequences_of`."""
    vectors: dict[str, np.ndarray] = {}
    code: dict[int, Code] = {}
    sources: dict[str, SourceRun] = {}
    bound: list[BoundProgram | None] = []
    read = [read_program(each, f"programs[{i}]") for i, each in enumerate(programs)]
    for i, program in enumerate(read):
        if program.readout_path:
            message = "graded programs cannot contain captures: pass the sites to lm.grade as capture="
            raise ProgramError(message, f"programs[{i}].{program.readout_path}")
        try:
            binding = bindings.of(program, name, prompt, max_tokens)
        except PatchclampError as error:
            raise error.under(f"programs[{i}]") from None
        bound.append(binding.bound)
        vectors |= binding.vectors
        code |= binding.code
        sources |= {source.key: source for source in binding.sources}
    suffixes, terms = sequences_of(scores)
    batched = list(bound)
    for i, each in enumerate(bound):
        if each is not None and any(isinstance(op.action, Attended) for op in each.ops) and engine.removes_keys:
            batched[i] = with_removed_keys(each, engine.sites)
    refused = refused_of(batched)
    batched = [None if i in refused else each for i, each in enumerate(batched)]
    return GradeJob(name, list(prompt.ids), len(bound), suffixes, terms, bindings.cells_of(read, batched, max_tokens),
                    bound.__getitem__, kl, top, refused, vectors, code, tuple(sources.values()))  # fmt: skip


class _ByRequests:
    """A job whose programs run as requests: one per program and distinct suffix of the prompt. With few programs or
    long answers, a single request scores all tokens of an answer by prompt log-probabilities. Otherwise programs may
    reuse an unedited run.

    questions: one per request: (suffix, tokens to score, number of top tokens, True if prompt log-probabilities are
        read)
    """

    def __init__(self, engine: Engine, job: GradeJob, table: GradeTable) -> None:
        self._engine, self.job, self.table = engine, job, table
        is_long = max(map(len, job.suffixes)) >= LONG
        reads_prompts = (job.count < MIN_SHARED or is_long) and LENS not in engine.sites.withdrawn
        reads_prompts = reads_prompts and not _edits_logits(engine, job)
        self._scored: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # (score, token) pairs, by suffix before them
        if job.kl:  # the first question is the prompt's own next token
            self._scored[()] = []
        self._read: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # (score, position) pairs, by whole suffix
        for i, terms in enumerate(job.terms):
            for number, offset, token in terms:
                suffix = job.suffixes[number]
                if reads_prompts and suffix[offset : offset + 1] == (token,):
                    self._scored.setdefault(suffix, [])
                    self._read.setdefault(suffix, []).append((i, len(job.prompt) + offset))
                else:
                    self._scored.setdefault(suffix[:offset], []).append((i, token))
        self.questions: list[tuple[tuple[int, ...], tuple[int, ...], int, bool]] = [
            (suffix, tuple(dict.fromkeys(token for _, token in of)), 0, suffix in self._read)
            for suffix, of in self._scored.items()
        ]
        if job.top or not self.questions:
            self.questions.append(((), (), max(job.top, 1), False))  # engines report no top tokens beside scores
        self._base: np.ndarray | None = None
        if job.kl:  # needs the distribution of row 0
            table.done[0] = False
        self.left: np.ndarray = np.flatnonzero(~table.done[0 if job.has_baseline else 1 :]) - job.has_baseline
        table.logprobs[self.left + 1] = 0

    def requests(self, number: int) -> list[Request]:
        """Return the requests of a program, or of the unedited prompt if `number` is −1."""
        return [_request(self._engine, self.job, number, *question, self.job.kl and i == 0)
                for i, question in enumerate(self.questions)]  # fmt: skip

    def read(self, number: int, requests: Sequence[Request], answers: Iterable[Answer | PatchclampError]) -> None:
        """Add a program's answers to the table."""
        job, table, row = self.job, self.table, number + 1
        found = zip(self.questions, requests, answers, strict=True)
        for i, ((suffix, _, top, reads), request, answer) in enumerate(found):
            if isinstance(answer, PatchclampError):
                table.errors.setdefault(number, answer)
                continue
            table.from_cut += answer.computed_from is not None
            for score, token in self._scored.get(suffix, ()) if not top else ():
                table.logprobs[row, score] += answer.scores[token]
            for score, position in self._read[suffix] if reads else ():
                assert answer.prompt_logprobs is not None
                table.logprobs[row, score] += answer.prompt_logprobs[position - 1]  # these lack the first token
            if top and job.top:
                of_token = answer.top_logprobs[0]
                ids = sorted(of_token, key=lambda token: -of_token[token])[: job.top]
                table.top_ids[row], table.top_logprobs[row] = ids, [of_token[token] for token in ids]
            if job.kl and i == 0 and table.kl is not None:
                _, rows = self._engine.fetch(request.run, _logits(self._engine))  # logits of all next tokens
                logprobs = log_softmax(np.asarray(rows)[-1])
                self._base = logprobs if self._base is None else self._base
                table.kl[row] = kl(self._base, logprobs)


def by_requests(
    engine: Engine, jobs: Sequence[GradeJob], tables: Sequence[GradeTable], tell: Callable[[int, np.ndarray], None],
    batch: int = AT_ONCE,
) -> None:  # fmt: skip
    """Grade the programs missing from the jobs' tables as individual requests, in batches of up to `batch` requests
    (`Pace`) with two batches in flight.

    `tell` is called with a job's index and the indices of the programs just graded. An error that it raises, or an
    interrupt, aborts the requests in flight.
    """
    running = [_ByRequests(engine, job, table) for job, table in zip(jobs, tables, strict=True)]
    if any(job.kl for job in jobs):
        batch = max(1, min(batch, FULL_BYTES // (4 * engine.model.d_vocab)))
    programs = ((i, number) for i, each in enumerate(running) for number in each.left.tolist())
    under_way: collections.deque[tuple[list[tuple[int, int]], list[Request], list[Future[Answer]]]]
    under_way, pace = collections.deque(), Pace(batch)

    def read_one() -> None:
        part, requests, futures = under_way[0]
        # Python handles a signal that arrives just before it blocks only after the wait, so wait in short steps
        while wait(futures, timeout=LOOK_EVERY_S).not_done:
            pass
        pairs = zip(requests, map(_answer, futures), strict=True)
        for i, number in part:
            own = list(itertools.islice(pairs, len(running[i].questions)))
            running[i].read(number, [request for request, _ in own], [answer for _, answer in own])
        under_way.popleft()
        engine.release([request.run for request in requests])
        pace.done()
        for i, of in itertools.groupby(part, lambda program: program[0]):
            tell(i, np.array([number for _, number in of if number >= 0], np.int64))

    try:
        for part in pace.parts(programs, lambda program: len(running[program[0]].questions)):
            requests = [request for i, number in part for request in running[i].requests(number)]
            under_way.append((part, requests, engine.submit(requests)))
            if len(under_way) == UNDER_WAY:
                read_one()
        while under_way:
            read_one()
    finally:
        engine.abort([request.run for _, requests, _ in under_way for request in requests])


def _logits(engine: Engine) -> int:
    return next(point.number for point in engine.sites.points if point.rows == "sampled")


def _edits_logits(engine: Engine, job: GradeJob) -> bool:
    """True if any program of a job edits logits. Such edits change only the logits of sampled tokens."""
    bound, point = (job.bound(number) for number in range(job.count)), _logits(engine)
    return any(point in op.points for each in bound if each is not None for op in each.ops)


def _request(
    engine: Engine, job: GradeJob, number: int, suffix: tuple[int, ...], score: tuple[int, ...], top: int, reads: bool,
    asks_kl: bool,
) -> Request:  # fmt: skip
    """Return one program's request, with `suffix` appended to the prompt."""
    run, prompt = engine.run_prefix + secrets.token_hex(8), [*job.prompt, *suffix]
    bound, code = job.bound(number) if number >= 0 else None, dict[int, Code]()
    if bound is not None:
        ops = tuple(_with_code(op, job.code, code) for op in bound.ops)
        bound = BoundProgram(run, len(prompt), ops)
    if asks_kl:
        ranges = (PositionRange(len(prompt) - 1, len(prompt)),)
        keep = BoundOp("kl", Keep(0), (_logits(engine),), (), ranges)
        bound = BoundProgram(run, len(prompt), (*(() if bound is None else bound.ops), keep))
    keys = set() if bound is None else {key for op in bound.ops for key in op.keys}
    vectors = {key: rows for key, rows in job.vectors.items() if key in keys}
    return Request(run, prompt, 1, bound, vectors, score=score, logprobs=top or None, code=code, sources=job.sources,
                   prompt_logprobs=0 if reads else None)  # fmt: skip


def _with_code(op: BoundOp, known: Mapping[int, Code], code: dict[int, Code]) -> BoundOp:
    """Renumber an op's code, if it has any, and add the code to `code`: engines drop code when its request ends, so
    requests cannot share a number."""
    if not isinstance(op.action, RunCode):
        return op
    number = next(code_numbers)
    code[number] = known[op.action.code]
    return msgspec.structs.replace(op, action=RunCode(number))


def _answer(future: Future[Answer]) -> Answer | PatchclampError:
    try:
        return future.result()
    except Exception as error:
        return as_patchclamp_error(error)


class Pace:
    """Splits items, in order, into batches that take about `BATCH_S` at the measured speed of earlier batches. The
    first batch is small.

    most, first: the maximum size of any batch, and of the first batch, in units. Items have size 1 unless `parts` is
        given `units`
    """

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._most, self._size = most, min(first, most)
        self._under_way: collections.deque[int] = collections.deque()
        self._done: collections.deque[tuple[float, int]] = collections.deque(maxlen=UNDER_WAY + 1)  # time, total units

    def parts(self, items: Iterable[Item], units: Callable[[Item], int] = lambda item: 1) -> Iterator[list[Item]]:
        """Yield non-empty batches of consecutive items. A batch's size is decided when it is requested."""
        part: list[Item] = []
        size = 0
        for item in items:
            more = units(item)
            if part and size + more > self._size:
                yield self._begin(part, size)
                part, size = [], 0
            part.append(item)
            size += more
        if part:
            yield self._begin(part, size)

    def _begin(self, part: list[Item], size: int) -> list[Item]:
        if not self._done:
            self._done.append((time.monotonic(), 0))
        self._under_way.append(size)
        return part

    def done(self) -> None:
        """Record that the oldest batch in flight has finished."""
        now, units = time.monotonic(), self._done[-1][1] + self._under_way.popleft()
        self._done.append((now, units))
        began, before = self._done[0]
        in_time = int((units - before) / max(now - began, 1e-6) * BATCH_S)
        self._size = max(1, min(in_time, GROWTH * self._size, self._most))
