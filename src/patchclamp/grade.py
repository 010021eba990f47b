"""`LM.grade`: many programs on one prompt, each with the log-probabilities of the same next tokens.

`bound_job` makes a `GradeJob` of a prompt and its programs. `by_requests` runs it as requests, on any engine.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.base import MAX_SCORES, Answer, Engine, Request
from patchclamp.engines.grading import GradeJob, GradeTable, kl, log_softmax, refusal_of, sequences_of
from patchclamp.errors import PatchclampError, ProgramError, TokensError, as_patchclamp_error
from patchclamp.language import Program
from patchclamp.language.values import as_items
from patchclamp.plan.bind import Bindings, Code, code_numbers
from patchclamp.plan.bound import BoundOp, BoundProgram, Keep, PositionRange, RunCode
from patchclamp.plan.cells import cells_of
from patchclamp.plan.prompt import Prompt
from patchclamp.store.named import SourceRun

AT_ONCE = 512  # requests submitted at a time
FULL_BYTES = 1 << 28  # of full distributions captured at a time


def read_scores(score: Any, bare: Any, d_vocab: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of each score: a text, an id, or a list of ids. `bare`: encodes a text without special tokens."""
    items = [score] if isinstance(score, str) or is_token_id(score) else as_items(score, "score")
    found: list[tuple[int, ...]] = []
    for i, item in enumerate(items):
        ids = bare(item) if isinstance(item, str) else [item] if is_token_id(item) else as_items(item, f"score[{i}]")
        if not ids:
            raise TokensError(f"{item!r} has no tokens", f"score[{i}]")
        for token in ids:
            if not is_token_id(token) or not 0 <= token < d_vocab:
                raise TokensError(f"{token!r} is not a token id below {d_vocab}", f"score[{i}]")
        found.append(tuple(int(token) for token in ids))
    return tuple(found)


def read_program(program: Any, path: str) -> Program:
    """A program of `programs=`: an op, a list of ops, a `Program`, or None."""
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
    name: str, prompt: Prompt, programs: Iterable[Any], scores: Sequence[Sequence[tuple[tuple[int, ...], int]]],
    max_tokens: int, kl: bool, top: int, bindings: Bindings,
) -> GradeJob:  # fmt: skip
    """The job of a prompt, with every program bound to it. Errors have the program's path. `scores`: as `sequences_of`
    takes them."""
    vectors: dict[str, np.ndarray] = {}
    code: dict[int, Code] = {}
    sources: dict[str, SourceRun] = {}
    bound: list[BoundProgram | None] = []
    # all of them are kept, because `Bindings` knows programs by identity
    parsed = [read_program(each, f"programs[{i}]") for i, each in enumerate(programs)]
    for i, program in enumerate(parsed):
        try:
            binding = bindings.of(program, name, prompt, max_tokens)
        except PatchclampError as error:
            raise error.under(f"programs[{i}]") from None
        bound.append(binding.bound)
        vectors |= binding.vectors
        code |= binding.code
        sources |= {source.key: source for source in binding.sources}
    suffixes, terms = sequences_of(scores)
    return GradeJob(name, list(prompt.ids), len(bound), suffixes, terms, functools.partial(cells_of, bound),
                    bound.__getitem__, kl, top, refusal_of(bound), vectors, code, tuple(sources.values()))  # fmt: skip


def by_requests(engine: Engine, job: GradeJob, table: GradeTable) -> None:
    """Grade programs by requests of an engine, some at a time."""
    by_suffix: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # requests differ in the tokens after the prompt
    for i, terms in enumerate(job.terms):
        for number, offset, token in terms:
            by_suffix.setdefault(job.suffixes[number][:offset], []).append((i, token))
    questions = [(suffix, tuple(dict.fromkeys(token for _, token in of)), 0) for suffix, of in by_suffix.items()]
    if job.top or not questions:
        questions.append(((), (), max(job.top, 1)))  # engines do not report the likeliest tokens beside scores
    table.logprobs[:] = 0
    size = AT_ONCE
    if job.kl:
        size = max(1, min(size, FULL_BYTES // (4 * engine.model.d_vocab)))
    numbers = range(-1, job.count)
    base: np.ndarray | None = None
    for begin in range(0, len(numbers), size):
        part = numbers[begin : begin + size]
        requests = [_request(engine, job, number, *question, job.kl and i == 0)
                    for number in part for i, question in enumerate(questions)]  # fmt: skip
        try:
            answers = zip(_answers(engine, requests), requests, strict=True)
            for number in part:
                for i, (suffix, _, top) in enumerate(questions):
                    answer, request = next(answers)
                    if isinstance(answer, PatchclampError):
                        table.errors.setdefault(number, answer)
                        continue
                    for score, token in by_suffix.get(suffix, ()) if not top else ():
                        table.logprobs[number + 1, score] += answer.scores[token]
                    if top and job.top:
                        found = answer.top_logprobs[0]
                        ids = sorted(found, key=lambda token: -found[token])[: job.top]
                        table.top_ids[number + 1] = ids
                        table.top_logprobs[number + 1] = [found[token] for token in ids]
                    if job.kl and i == 0 and table.kl is not None:
                        row = _next_logprobs(engine, request)
                        base = row if base is None else base
                        table.kl[number + 1] = kl(base, row)
        finally:
            engine.release([request.run for request in requests])


def _next_logprobs(engine: Engine, request: Request) -> np.ndarray:
    """The log-probabilities of all next tokens, [V], from a request's captured logits."""
    point = _logits(engine)
    _, rows = engine.fetch(request.run, point)
    return log_softmax(np.asarray(rows)[-1])


def _logits(engine: Engine) -> int:
    return next(point.number for point in engine.sites.points if point.rows == "sampled")


def _request(
    engine: Engine, job: GradeJob, number: int, suffix: tuple[int, ...], score: tuple[int, ...], top: int, asks_kl: bool
) -> Request:
    """The request of one program. Its positions count the prompt's tokens, so those after it are `suffix`."""
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
    return Request(run, prompt, 1, bound, vectors, score=score, logprobs=top or None, code=code, sources=job.sources)


def _with_code(op: BoundOp, known: Mapping[int, Code], code: dict[int, Code]) -> BoundOp:
    """An op whose code, if it has any, has a number of its own, under which it is added to `code`: an engine drops the
    code of a request that has ended."""
    if not isinstance(op.action, RunCode):
        return op
    number = next(code_numbers)
    code[number] = known[op.action.code]
    return msgspec.structs.replace(op, action=RunCode(number))


def _answers(engine: Engine, requests: list[Request]) -> list[Answer | PatchclampError]:
    futures = engine.submit(requests)
    try:
        return [_answer(future) for future in futures]
    except BaseException:
        engine.abort([request.run for request in requests])
        raise


def _answer(future: Future[Answer]) -> Answer | PatchclampError:
    try:
        return future.result()
    except PatchclampError as error:
        return error
    except Exception as error:
        return as_patchclamp_error(error)
