"""The shared half of the two front ends, `VllmEngine` (`sync_engine`) and a server's `AsyncEngine` (`async_engine`).

A front end sends a request's vectors to the core, then the request with its program in `SamplingParams.extra_args`. It
collects vLLM's outputs into an `Answer`, which is valid only with the program's receipt. Captures stay in the workers
until they are fetched.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import tempfile
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import safetensors.numpy
import torch

from patchclamp.engines.base import (
    Answer,
    Captured,
    Drafts,
    Engine,
    Model,
    Monitor,
    PackedTokens,
    Part,
    PartScores,
    Request,
    Tokenizer,
    TopTokens,
    Wanted,
    carry,
    receipt_of,
)
from patchclamp.engines.grading import GradeJob, GradeTable, JobPart
from patchclamp.engines.tokenizer import HubTokenizer, NoTokenizer
from patchclamp.engines.vllm import shared
from patchclamp.engines.vllm.admission import Lease, Verdict
from patchclamp.engines.vllm.bulk import LATER, BatchResult, Job, JobPrompt
from patchclamp.engines.vllm.compat import configuration, lora
from patchclamp.engines.vllm.compat.architecture import site_map
from patchclamp.engines.vllm.compat.clients import Table, decoded, draft_counts, log_monitors, tables_of
from patchclamp.engines.vllm.compat.core import joined_verdict
from patchclamp.engines.vllm.compat.runner import refusal_of
from patchclamp.engines.vllm.compat.seams import version
from patchclamp.engines.vllm.monitors import Choices, MonitorLog, monitors_of_config
from patchclamp.engines.vllm.server import loaded_saes
from patchclamp.errors import CapacityError, EngineError, ProgramError, unknown, unpack
from patchclamp.language.dictionaries import to_file
from patchclamp.language.sae import SAE
from patchclamp.plan.bound import MATCH, is_vector, source_of
from patchclamp.plan.cells import CellRecords, joined
from patchclamp.plan.room import resident_name

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.output_processor import OutputProcessor

Shard = TypeVar("Shard")  # one worker's part of some rows
Grading = Generator[tuple[str, tuple[Any, ...]], Any, None]
SORTED = 1 << 14  # on a GPU: cells per window that is sorted by start
LATER_S = 0.001  # seconds before a call is repeated
FIRST_ROWS, BATCH_S = 1 << 9, 2.0  # on a CPU: rows of the very first batch; maximum batch duration


class BatchFacts(NamedTuple):
    """A worker's support for batches, and the limits of a batch.

    refusal: the reason why batches are not supported; "" if they are
    block, blocks: the number of tokens per cache block, and the number of blocks
    groups: the number of layer groups with separate block tables
    rows, sequences: the maximum per batch
    removes_keys: True if keys can be removed from attention in batches
    """

    refusal: str
    block: int
    blocks: int
    groups: int
    rows: int
    sequences: int
    removes_keys: bool

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks for this many tokens, in all groups."""
        return -(-tokens // self.block) * self.groups


class VllmFrontEnd(Engine):
    """Base class of `VllmEngine` and `AsyncEngine`."""

    config: VllmConfig
    keeps_scores = True  # of the always-on probes, in answers to this engine's requests

    def __init__(self) -> None:
        self._receiver = shared.CaptureReceiver(self.release)
        self._batch_rows = FIRST_ROWS  # on a CPU, of the next batch
        self._readers: collections.Counter[str] = collections.Counter()  # the number of requests that read each vector

    def _describe(
        self, name: str, config: VllmConfig, hub_tokenizer: Callable[[], Any], processor: OutputProcessor
    ) -> None:
        """Set the engine's attributes, once vLLM has loaded the model. `processor`: vLLM's output processor."""
        facts = configuration.model_facts(config)
        self.config, self.sites, self._processor = config, site_map(config), processor
        self.sites.dictionaries |= {each.card.name: each for _, each, _ in loaded_saes(config, self.sites)}
        self.monitors = monitors_of_config(config)
        self.monitor_log: MonitorLog = MonitorLog(self.monitors)
        if self.monitors:
            log_monitors(processor, self.monitor_log)
        self._has_text = not config.model_config.skip_tokenizer_init
        self.tokenizer: Tokenizer = HubTokenizer(hub_tokenizer()) if self._has_text else NoTokenizer()
        self.model = Model(
            name, "vllm", version(), self.sites.family.name, facts["layers"], facts["d_model"], facts["d_vocab"],
            facts["dtype"], facts["max_model_len"], configuration.settings(config),
        )  # fmt: skip

    @property
    def has_views(self) -> bool:
        return self._receiver.has_views or not self.remote

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> Captured:
        return self.fetch_many([Wanted(run, point, op, first)])[0]

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        check_sampling(sampling)

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of every core's admission without waiting. The call precedes requests submitted later."""
        raise NotImplementedError

    def _hold(self, requests: Iterable[Request]) -> None:
        """Send vectors that the requests read and the core lacks, ahead of the requests."""
        vectors: dict[str, np.ndarray] = {}
        for request in requests:
            for key, rows in request.vectors.items():
                if not self._readers[key]:
                    vectors[key] = np.ascontiguousarray(rows)
                self._readers[key] += 1
        if vectors:
            self._tell("hold", safetensors.numpy.save(vectors), list(vectors), [])

    def _drop(self, requests: Iterable[Request]) -> None:
        """Make the core drop the ended requests' vectors that no other request reads."""
        keys = [key for request in requests for key in request.vectors]
        self._readers.subtract(keys)
        unused = [key for key in dict.fromkeys(keys) if self._readers[key] == 0]
        for key in unused:
            del self._readers[key]
        if unused:
            self._tell("hold", b"", [], unused)

    # -- cells in batches

    @functools.cached_property
    def _batch_facts(self) -> BatchFacts:
        return BatchFacts(*self._ask_now("bulk", "facts", "")[0])

    @property
    def batch_refusal(self) -> str:
        return refusal_of(self.config) or self._batch_facts.refusal

    @property
    def removes_keys(self) -> bool:
        return not self.batch_refusal and self._batch_facts.removes_keys

    def job_refusal(self, job: GradeJob) -> str:
        facts, lengths = self._batch_facts, [len(job.prompt) + len(suffix) for suffix in job.suffixes]
        samples = sum(len(suffix) + 1 for suffix in job.suffixes)
        if sum(lengths) > facts.rows or max(len(lengths), samples) > facts.sequences:
            return f"one program exceeds a batch of {facts.rows} tokens"
        fits = 2 * sum(map(facts.blocks_of, [len(job.prompt), *lengths])) <= facts.blocks
        return "" if fits else "the cache has too few blocks"

    def attach(self, name: str, sae: SAE, precision: str) -> None:
        with tempfile.TemporaryDirectory() as folder:  # workers may be other processes
            path = os.path.join(folder, "sae.safetensors")
            to_file(sae, path)
            self._ask_now("attach", name, path, precision)

    def detach(self, name: str) -> None:
        self._ask_now("detach", name)

    def _ask_now(self, verb: str, *args: Any) -> list[Any]:
        """Call every worker and return the results. Must not run on the engine's thread."""
        raise NotImplementedError

    def _grading(
        self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable], tell: Callable[[int, np.ndarray], None]
    ) -> Grading:
        """Run jobs: yield calls, and receive their results by `send`. The calls are "lease", "open", "run", "wait" (a
        number of seconds while the engine has requests), and "end" (of the lease). `tell` is called with a job's index
        and the indices of its newly graded programs."""
        for parts in self._together(jobs):
            yield from self._grade_together(parts, tables, tell)
            yield "end", ()

    def _together(self, jobs: Sequence[GradeJob]) -> Iterator[list[JobPart]]:
        """Split jobs into parts, and yield groups of parts to run together. A group's prompts fit into a batch and a
        quarter of the cache, and its rows fit into half of the bank."""
        facts, limits = self._batch_facts, configuration.enabled(self.config)
        assert limits is not None
        most = np.array([facts.rows, facts.blocks // 4, limits["limits"]["bank_bytes"] // 8])
        group: list[JobPart] = []
        used = np.zeros(3, np.int64)
        for i, job in enumerate(jobs):
            cells = job.cells()
            sizes = self._sizes_of(cells, [job], job.vectors)
            numbers = np.array(
                [sum(math.prod(sizes.get(name, (0, 0))) for name in (key, f"{key}#")) for key in cells.keys]
            )
            for begin, end in cells.splits(numbers, int(most[2])) if cells.count else [(0, 0)]:
                some = cells if end - begin == cells.count else cells.take(range(begin, end))
                of_some = sizes if some is cells else self._sizes_of(some, [job], job.vectors)
                read = sum(map(math.prod, of_some.values()))
                takes = np.array([len(job.prompt), facts.blocks_of(len(job.prompt)), read])
                if group and (used + takes > most).any():
                    yield group
                    group, used = [], np.zeros(3, np.int64)
                group.append(JobPart(job, i, begin, some))
                used += takes
        yield group

    def _grade_together(
        self, parts: Sequence[JobPart], tables: Sequence[GradeTable], tell: Callable[[int, np.ndarray], None]
    ) -> Grading:
        """Run parts in shared batches."""
        facts, cells = self._batch_facts, joined([part.cells for part in parts])
        jobs = [part.job for part in parts]
        vectors = {key: rows for job in jobs for key, rows in job.vectors.items()}
        records = max((group.records.shape[1] for group in cells.groups), default=1)
        blocks = sum(facts.blocks_of(len(job.prompt)) for job in jobs)
        of_cell = max(sum(facts.blocks_of(len(job.prompt) + len(suffix)) for suffix in job.suffixes) for job in jobs)
        most = min(facts.sequences, cells.count + len(jobs))  # of a batch
        slots = 2 * most  # for two batches
        own = min(of_cell * most, facts.groups * (facts.rows // facts.block + 2 * facts.sequences))
        needs = (blocks + of_cell, blocks + max(own, of_cell))
        sizes = self._sizes_of(cells, jobs, vectors)
        leased = yield "lease", (needs, (2, slots), (2 * records, slots * records), sizes)
        lease = msgspec.msgpack.decode(leased, type=Lease)
        loaded = {key: np.ascontiguousarray(vectors[key]) for name in lease.placement.load
                  if is_vector(key := name.removesuffix("#"))}  # fmt: skip
        prompts = [JobPrompt(job.prompt, [list(suffix) for suffix in job.suffixes], job.terms, part.cells.count)
                   for job, part in zip(jobs, parts, strict=True)]  # fmt: skip
        window = SORTED if self.config.device_config.device_type == "cuda" else 0
        job = Job(prompts, jobs[0].kl, jobs[0].top, window, cells.to_bytes(), safetensors.numpy.save(loaded), lease)
        while LATER in (yield "open", (msgspec.msgpack.encode(job),)):
            yield "wait", (LATER_S,)
        left, rows = cells.count + len(jobs), facts.rows if window else self._batch_rows
        share: float = self.config.additional_config[configuration.KEY]["limits"]["batch_share"]  # pyright: ignore
        while left:
            results = yield "run", (rows,)
            if LATER in results:
                yield "wait", (LATER_S,)
                continue
            found = [msgspec.msgpack.decode(one, type=BatchResult) for one in results if one]
            if not found:
                continue
            result = next((one for one in found if one.logprobs), found[0])  # one worker may have the logits
            for one in found:
                result.errors.update(one.errors)
            for number, programs in result.read(parts, tables):
                tell(number, programs)
            left = result.left
            growth = min(max(BATCH_S / max(result.seconds, 1e-3), 0.25), 8 if result.rows > rows // 2 else 1)
            rows = self._batch_rows = min(int(rows * growth) + 1, facts.rows)
            if result.stepped and left:
                yield "wait", (result.seconds / share,)

    def _sizes_of(
        self, cells: CellRecords, jobs: Sequence[GradeJob], vectors: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[int, int]]:
        """Return the (rows, width) of each bank entry that cells read, by its key in the bank."""
        sources, sizes = {source.key: source for job in jobs for source in job.sources}, {}
        sharded = np.array([self.sites.shard_count(point.number) > 1 for point in self.sites.points])
        read = np.zeros((len(cells.keys) + 1, 2), bool)  # the last row: records without a key, −1
        for group in cells.groups:
            apart = (sharded[group.point] & (group.records["kind"] != MATCH)).astype(np.int8)
            for index in (group.key, group.beside):
                read[index, apart] = True
        for key, apart in np.argwhere(read[:-1]).tolist():
            name = cells.keys[key]
            source = source_of(name)
            if source is None:
                size = vectors[name].shape
            else:
                size = len(sources[source[0]].positions_of(source[1])), self.sites.points[source[1]].width
            sizes[resident_name(name, bool(apart))] = size
        return sizes

    def _underway(self, request: Request) -> Underway:
        """Create the state of a request before it is submitted. Raises `ProgramError` for scores with speculative
        decoding (vLLM confuses the rows of scored and draft tokens, and the engine would stop), and the errors of
        `lora.check_prompt_logprobs`."""
        if request.score and self.config.speculative_config is not None:
            raise ProgramError("score is not supported with speculative decoding: use logprobs instead", "score")
        lora.check_prompt_logprobs(self.config, request.prompt_logprobs)
        underway = Underway(request, self._decoder(request) if self._has_text else None, self.monitors)
        if self.keeps_scores:
            self.monitor_log.runs[request.run] = underway.monitored
        if request.logprobs is not None or request.score or request.prompt_logprobs is not None:
            tables_of(self._processor)[request.run] = underway.tables
        return underway

    def _forget_tables(self, run: str) -> None:
        tables_of(self._processor).pop(run, None)

    def text_of(self, prompt: list[int], sampling: dict[str, Any], token_ids: list[int]) -> str:
        from vllm import SamplingParams

        return self.decoded(prompt, SamplingParams(**sampling), token_ids)

    def decoded(self, prompt: list[int], params: SamplingParams, token_ids: list[int]) -> str:
        """Decode the output of a request that ended after these tokens, with vLLM's detokenizer."""
        return decoded(self._processor, prompt, params, token_ids, False) if self._has_text else ""

    def _decoder(self, request: Request) -> Callable[[list[int], bool], str] | None:
        """Return a function that decodes a request's ids when its text is read; None if vLLM decodes them."""
        from vllm.sampling_params import SamplingParams  # faster than from vllm itself, whose names are lazy

        processor, prompt, sampling = self._processor, request.prompt_token_ids, request.sampling
        if request.listener is not None or sampling.get("stop"):
            return None
        return lambda ids, stopped: decoded(processor, prompt, SamplingParams(**sampling), ids, stopped)

    def _carried(self, request: Request) -> bytes | None:
        """Encode a request's program."""
        return None if request.bound is None else carry(request, self.sites)


def next_call(calls: Grading, result: Any) -> tuple[str, tuple[Any, ...]]:
    """Send a call's result to a `Grading`. Return the next call as (name, arguments); ("", ()) after the last one."""
    try:
        return calls.send(result)
    except StopIteration:
        return "", ()


def no_room(lease: tuple[Any, ...]) -> CapacityError:
    """Return the error for a lease that does not fit even an idle engine. `lease`: its arguments."""
    blocks, slots, records, sizes = lease
    size = 4 * sum(map(math.prod, sizes.values()))
    return CapacityError(
        f"a batch of cells does not fit: it needs {blocks[0]} free cache blocks, {slots[0]} program slots, "
        f"{records[0]} records and {size} bytes of the bank; increase the cache's memory, or raise max_records or "
        "bank_bytes"
    )


def verdict_of(answers: Iterable[tuple[str, Any] | None]) -> Verdict | None:
    """Combine the workers' verdicts on an unfinished run (`do_verdict`); None if the run has ended."""
    verdicts = [answer for answer in answers if answer is not None]
    return joined_verdict(verdicts) if verdicts else None


def confirm(run: str, verdict: Verdict | None, carried: bytes) -> None:
    """Raise the error that invalidates an answer: its program failed, or vLLM did not confirm that it ran."""
    if verdict is not None and verdict.error is not None:
        raise unpack(verdict.error)
    if verdict is None or verdict.receipt != receipt_of(carried):
        raise EngineError(f"run {run}: vLLM did not confirm that the program ran; the output was discarded")


# -- answers


class Underway:
    """A request in vLLM, and its answer so far. Each of vLLM's outputs contains only new tokens; without a listener
    there is a single output. The text is vLLM's own, which holds back possible stop strings.

    tables: log-probabilities that have arrived but not been read
    monitored: scores of the always-on probes that have arrived, under key 0
    decode: decodes (ids, True if the last id stopped the run) when the text is read; None if vLLM decodes them
    """

    def __init__(
        self, request: Request, decode: Callable[[list[int], bool], str] | None, monitors: tuple[Monitor, ...] = ()
    ) -> None:
        self.request, self._decode, self._monitors = request, decode, monitors
        self.monitored: Choices = Choices()
        self.tables: list[Table] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._scores: dict[int, float] = {}
        self._prompt: Table | None = None
        self._cached_tokens = 0

    def take(self, output: RequestOutput) -> None:
        """Add an output and the log-probabilities since the last one, and pass it to the listener."""
        request, new = self.request, output.outputs[0]
        ids, tables = list(new.token_ids), self.tables.copy()
        self.tables.clear()
        if tables and request.prompt_logprobs is not None and self._prompt is None:
            self._prompt = tables.pop(0)
        has_logprobs = request.logprobs is not None
        logprobs = [float(number) for _, numbers in tables for number in numbers[:, 0]] if has_logprobs else []
        if tables and request.score and not self._ids:
            first = dict(zip(tables[0][0][0].tolist(), tables[0][1][0].tolist(), strict=True))
            self._scores = {token: first[token] for token in request.score}
        if request.logprobs:
            last = 1 + request.logprobs
            for tokens, numbers in tables:
                likeliest = zip(tokens[:, 1:last].tolist(), numbers[:, 1:last].tolist(), strict=True)
                self._top_logprobs += [dict(zip(*row, strict=True)) for row in likeliest]
        self._cached_tokens = output.num_cached_tokens or 0
        self._texts.append(new.text)
        self._ids += ids
        self._logprobs += logprobs[: len(ids)]
        if request.listener is not None and (new.text or ids):
            request.listener(Part(new.text, ids, logprobs[: len(ids)], self._news()))

    def _news(self) -> dict[str, PartScores]:
        """Return the always-on probes' new scores, by probe name."""
        if (run := self.monitored.get(0)) is None:
            return {}
        first, products = run.news()
        positions = list(range(first, first + len(products)))
        return {each.probe.name: PartScores(positions, each.scores(products)) for each in self._monitors}

    def answer(self, output: RequestOutput | None = None) -> Answer:
        """Return the answer after the last output; `output` is None for a request that we ended early."""
        ids, decode, last = self._ids, self._decode, None if output is None else output.outputs[0]
        tokens, numbers = ([], []) if self._prompt is None else (each.tolist() for each in self._prompt)
        likeliest = zip(tokens, numbers, strict=True) if self.request.prompt_logprobs else ()
        reason = "stop" if last is None else last.finish_reason
        return Answer(
            ids, "".join(self._texts) if decode is None else functools.partial(decode, ids, reason == "stop"),
            None if self.request.logprobs is None else self._logprobs, self._scores, reason, self._cached_tokens,
            self._top_logprobs[: len(ids)], drafts=None if last is None else drafts_of(last),
            monitored=None if (run := self.monitored.get(0)) is None else run.products(),
            prompt_logprobs=None if self._prompt is None else [row[0] for row in numbers],
            prompt_top_logprobs=[dict(zip(ids[1:], row[1:], strict=True)) for ids, row in likeliest],
        )  # fmt: skip


def drafts_of(completion: CompletionOutput) -> Drafts | None:
    """Return vLLM's counts of a completion's draft tokens; None if it did not count."""
    counts = draft_counts(completion)
    return None if counts is None else Drafts(*counts)


# -- workers


def results_of(answers: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return the results of a call to every worker; raise the first error."""
    answers = list(answers)
    for _, error in answers:
        if error is not None:
            raise unpack(tuple(error))
    return [result for result, _ in answers]


def merged(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the workers' statuses: some counts are summed, others are the first worker's."""
    summed: dict[str, Any] = {name: sum(status[name] for status in statuses) for name in ("captured_bytes", "failures")}
    if "active_graphs" in statuses[0]:
        summed["active_graphs"] = min(status["active_graphs"] for status in statuses)
        problems = [status["active_graphs_problem"] for status in statuses if status["active_graphs_problem"]]
        summed["active_graphs_problem"] = problems[0] if problems else ""
    return {**statuses[0], **summed, "workers": len(statuses)}


def join_captured(answers: list[dict[int, Captured]], count: int) -> list[Captured]:
    """Concatenate the workers' shards of each of `count` captures, in rank order."""
    shards: list[list[Captured]] = [[] for _ in range(count)]
    for answer in answers:
        for i, captured in answer.items():
            shards[i].append(captured)
    kept = [with_rows(some, [len(positions) for positions, _ in some]) for some in shards]
    return [
        some[0] if len(some) == 1 else (some[0][0], torch.cat([torch.as_tensor(rows) for _, rows in some], 1))
        for some in kept
    ]


def top_tokens_of(answers: Iterable[tuple[list[bytes], bytes, bytes] | None], top: int) -> list[TopTokens]:
    """Return a lens's results, from the first worker that has them."""
    return PackedTokens(*next(answer for answer in answers if answer is not None)).read(top)


def first_values(answers: Iterable[bytes | None]) -> dict[str, np.ndarray]:
    """Return `lens_values` from the first worker that has them."""
    return safetensors.numpy.load(next(answer for answer in answers if answer is not None))


def with_rows(shards: list[Shard], counts: list[int]) -> list[Shard]:
    """Return the shards with rows, or else the first shard. Only the worker with all columns has projected rows."""
    return [shard for shard, count in zip(shards, counts, strict=True) if count] or shards[:1]


# -- sampling parameters


NOT_RETURNED = ("prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs", "routed_experts_prompt_start")
SET_BY_US = (
    "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "extra_args", "output_kind", "n", "detokenize",
    "skip_clone",
)  # fmt: skip


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise `UnknownName` for an unknown parameter, `ProgramError` for a reserved, unsupported or invalid parameter."""
    from vllm import SamplingParams

    types = _types()
    for name, value in sampling.items():
        if name in SET_BY_US:
            raise ProgramError(f"{name} is set by patchclamp: omit it", f"sampling.{name}")
        if name in NOT_RETURNED:
            raise ProgramError(f"{name} is not supported: a Run does not return it yet", f"sampling.{name}")
        if name not in types:
            names = [name for name in types if name not in SET_BY_US]
            raise unknown("sampling parameter", name, names, f"sampling.{name}")
        _check_type(name, value, types[name])
    try:
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling})
    except Exception as error:  # including vLLM's own validation error, which is not a ValueError
        raise ProgramError(str(error) or f"vLLM rejected {sampling}", "sampling") from None


@functools.cache
def _types() -> dict[str, Any]:
    from vllm import SamplingParams

    return {name: kind for name, kind in typing.get_type_hints(SamplingParams).items() if not name.startswith("_")}


def _check_type(name: str, value: Any, kind: Any) -> None:
    classes = tuple(part for part in typing.get_args(kind) if getattr(part, "__module__", "").startswith("vllm"))
    if classes:
        if value is not None and not isinstance(value, classes):
            raise ProgramError(f"expected vLLM's {classes[0].__name__}, got {value!r}", f"sampling.{name}")
        return
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProgramError(f"{str(error).replace('`', '')}: {value!r}", f"sampling.{name}") from None
    is_table = isinstance(converted, dict)
    numbers = {f"[{key}]": number for key, number in converted.items()} if is_table else {"": converted}
    for entry, number in numbers.items():
        if isinstance(number, float) and math.isnan(number):
            raise ProgramError("expected a number, got nan", f"sampling.{name}{entry}")
