"""The engine over HTTP, for `pc.LM("http://…")`. `patchclamp.engines.wire` defines the protocol."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import safetensors.numpy
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response
from safetensors import SafetensorError

from patchclamp.engines import wire
from patchclamp.engines.base import ABORTED, MAX_SCORES, Answer, Carried, PackedTokens, Part, decode, receipt_of
from patchclamp.engines.base import Request as EngineRequest
from patchclamp.engines.grading import GradeJob, Grades
from patchclamp.engines.weights import checked_layers
from patchclamp.errors import (
    CapacityError,
    EngineError,
    MissingSource,
    NameTaken,
    PatchclampError,
    ProgramError,
    ShapeError,
    as_patchclamp_error,
    pack,
    unknown,
)
from patchclamp.language.ops import MAX_FEATURES, MAX_TOP
from patchclamp.language.tokens import Tokens
from patchclamp.plan.bound import BoundProgram, run_key, source_of
from patchclamp.plan.cells import CellRecords
from patchclamp.plan.table import record_work
from patchclamp.plan.verify import is_content, verify, verify_cells
from patchclamp.run import LENS_ROWS
from patchclamp.serve.capture_files import StoppedResponse, answer, numbered_file
from patchclamp.serve.program_call import RECORDS
from patchclamp.serve.routes import caller
from patchclamp.serve.server_state import ClientWork, Front, log
from patchclamp.sites import Dictionary
from patchclamp.store.named import SourceRun
from patchclamp.version import __version__

router: APIRouter = APIRouter(prefix=wire.PREFIX, tags=["patchclamp"])
Messages = list[dict[str, Any]]
ARGUMENTS: dict[str, Any] = {  # argument types of the tokenizer methods
    "encode": tuple[str],
    "bare": tuple[str],
    "decode": tuple[list[int]],
    "settled": tuple[list[int]],
    "token_strings": tuple[list[int]],
    "spell": tuple[list[int], str | None],
    "chat": tuple[Messages, dict[str, Any]],
    "turns": tuple[list[int], Messages, dict[str, Any]],
    "text_of": tuple[list[int], dict[str, Any], list[int]],  # the engine's method
}
Body = TypeVar("Body")
MAX_NUMBERS = 1 << 24  # scored and top tokens of a grading request
WEIGHTS = asyncio.Semaphore(1)
Session = Annotated[str, Path(description="id of a client session", pattern="^[0-9a-z]{1,32}$")]


@router.get("/info")
async def info(request: Request) -> Response:
    """Return the properties of the engine that a client needs, as msgpack."""
    front, owner = caller(request)
    sites = front.engine.sites
    told = wire.Info(
        wire.WIRE, __version__, owner, front.engine.model, sites.family, sites.sizes, sites.tensor_parallel,
        sites.withdrawn, sites.stages, [each.card for each in sites.dictionaries.values()],
        sites.no_attention,
    )  # fmt: skip
    return Response(msgspec.msgpack.encode(told), media_type="application/msgpack")


@router.post("/run")
async def run(request: Request) -> Response:
    """Run a batch, and stream each request's result as it arrives."""
    front, owner = caller(request)
    await front.ready()
    batch = await _read(request, wire.WireBatch)
    if len(batch.requests) > wire.MAX_REQUESTS:
        raise CapacityError(
            f"expected at most {wire.MAX_REQUESTS} requests in a batch, got {len(batch.requests)}", "requests"
        )
    if len({each.run for each in batch.requests}) < len(batch.requests):
        raise NameTaken("expected distinct run names, got a duplicate", "requests")
    vectors = await asyncio.to_thread(_vectors, batch.vectors)
    requests = await asyncio.to_thread(lambda: [_request(front, owner, each, vectors) for each in batch.requests])
    for session in {each.run.rpartition("-")[0] for each in batch.requests}:
        front.leases.extend(session)
    running = _Running(front, owner, batch, requests)
    return StoppedResponse(running.stop, running.frames(), "application/octet-stream")


@router.get("/batches")
async def batches(request: Request) -> Response:
    """Return, as msgpack, the reason why the server accepts no grading jobs; "" if it accepts them."""
    front, _ = caller(request)
    return Response(msgspec.msgpack.encode(await asyncio.to_thread(lambda: front.lm.batch_refusal)))


@router.post("/grade")
async def grade(request: Request) -> Response:
    """Grade the programs of jobs and stream the results as they arrive."""
    front, owner = caller(request)
    await front.ready()
    asked = await _read(request, wire.WireJobs)
    if len({(job.kl, job.top) for job in asked.jobs}) != 1:
        raise ProgramError("expected at least one job, and the same kl and top in all jobs", "jobs")
    vectors = await asyncio.to_thread(_vectors, asked.vectors)
    jobs = await asyncio.to_thread(_jobs, front, owner, asked, vectors)
    programs = sum(job.count + 1 for job in jobs)
    front.limits.check("sweep_cells", programs, "programs to grade, including each prompt", "programs")
    numbers = sum((job.count + 1) * (sum(map(len, job.terms)) + 2 * job.top) for job in jobs)
    if numbers > MAX_NUMBERS:
        raise CapacityError(f"expected at most {MAX_NUMBERS} scored tokens in all programs, got {numbers}", "jobs")
    if reason := await asyncio.to_thread(front.lm.jobs_refusal, jobs):
        raise CapacityError(reason)
    front.check_under_way(owner)  # no `await` before the work is counted
    grading = _Grading(front, owner, jobs)
    return StoppedResponse(grading.stop, grading.frames(), "application/octet-stream")


@router.post("/fetch")
async def fetch(request: Request) -> Response:
    """Return captured rows as safetensors."""
    front, owner = caller(request)
    wanted = (await _read(request, wire.Fetch)).wanted
    for name, point, *_ in wanted:
        _check_owned(owner, name)
        if not 0 <= point < len(front.engine.sites.points):
            raise ProgramError(f"expected a point below {len(front.engine.sites.points)}, got {point}", "wanted")
    file = await numbered_file(front.engine, wanted)
    return await answer(file, front.engine.fetch_windows, lambda error: front.failed(error, owner))


@router.post("/lens")
async def lens(request: Request) -> Response:
    """Return the likeliest tokens of captured rows, as msgpack."""
    front, owner = caller(request)
    asked = await _read(request, wire.LensWanted)
    sites = front.engine.sites
    most = min(MAX_TOP, sites.d_vocab)
    if not 1 <= asked.top <= most:
        raise ProgramError(f"expected a number of tokens from 1 to {most}, got {asked.top}", "top")
    for _, point, *_ in asked.wanted:
        if not 0 <= point < len(sites.points) or not sites.lens_reads(point):
            raise ProgramError(f"a lens cannot read point {point}", "wanted")
    if asked.translator is not None and asked.translator.matrix.shape[0] != sites.d_model:
        raise ShapeError(
            f"expected a matrix [{sites.d_model}, {sites.d_model}], got {list(asked.translator.matrix.shape)}",
            "translator"
        )  # fmt: skip
    for name, *_ in asked.wanted:
        _check_owned(owner, name)
    # the call delays an engine step, and with it every request
    engine = front.engine
    rows, most = sum(len(each.positions) for each in await engine.measure(asked.wanted)), engine.model.max_model_len
    if not asked.wanted:
        raise ProgramError("expected at least one capture, got none", "wanted")
    if rows > LENS_ROWS + most:
        raise CapacityError(f"expected captures of at most {LENS_ROWS + most} rows, got {rows}", "wanted")
    tokens = await engine.lens_async(asked.wanted, asked.top, asked.translator)
    positions, ids, values = zip(*tokens, strict=True)
    parts = (np.concatenate(arrays).tobytes() for arrays in (ids, values))
    found = PackedTokens([each.tobytes() for each in positions], *parts)
    return Response(msgspec.msgpack.encode(found), media_type="application/msgpack")


@router.post("/dictionary")
async def dictionary(request: Request) -> Response:
    """Return the requested features of an attached SAE, as safetensors."""
    front, _ = caller(request)
    asked = await _read(request, wire.DictionaryWanted)
    rows = _dictionary(front, asked.name, asked.ids).rows(asked.ids)
    data = await asyncio.to_thread(safetensors.numpy.save, rows._asdict())
    return Response(data, media_type="application/octet-stream")


def _dictionary(front: Front, name: str, ids: Sequence[int]) -> Dictionary:
    """Return an attached SAE. Raises for an unknown name or out-of-range ids."""
    known = front.engine.sites.dictionaries
    if name not in known:
        raise unknown("attached SAE", name[:64], known, "name")
    if len(ids) > MAX_FEATURES:
        raise ProgramError(f"expected at most {MAX_FEATURES} ids, got {len(ids)}", "ids")
    if (outside := next((each for each in ids if not 0 <= each < known[name].card.features), None)) is not None:
        raise ProgramError(f"expected ids in 0..{known[name].card.features - 1}, got {outside}", "ids")
    return known[name]


@router.post("/free")
async def free(request: Request) -> dict[str, bool]:
    """Free the captures of runs, abort or end runs, and end a closing client's lease."""
    front, owner = caller(request)
    told = await _read(request, wire.Free)
    for name in (*told.release, *told.abort, *told.end):
        _check_owned(owner, name)
    for name in told.abort:
        if name in front.waiting:
            front.waiting[name](name)
    front.engine.release(told.release)
    front.engine.abort(told.abort)
    front.engine.end_runs(told.end)
    if told.session:
        await front.leases.end(f"{owner}-{told.session}")
    return {"ok": True}


@router.get("/live/{session}")
async def live(session: Session, request: Request) -> Response:
    """Stream a heartbeat for as long as the client is connected. When the connection closes and the client does not
    reconnect, the captures of its runs are freed."""
    front, owner = caller(request)
    name = f"{owner}-{session}"

    async def beats() -> AsyncGenerator[bytes, None]:
        beat_s = 0.0
        while not request.app.state.server.should_exit:  # the server's shutdown waits for its connections
            if beat_s <= time.monotonic():
                front.leases.renew(name)
                beat_s = time.monotonic() + wire.BEAT_S
                yield b"."
            await asyncio.sleep(0.5)

    front.leases.opened(name)
    return StoppedResponse(lambda: front.leases.lost(name), beats(), "application/octet-stream")


@router.post("/tokenizer")
async def tokenizer(request: Request) -> Response:
    """Call a method of the tokenizer and return its result as msgpack."""
    front, _ = caller(request)
    asked = await _read(request, wire.Tokenize)
    if asked.method not in ARGUMENTS:
        raise ProgramError(f"unknown method {asked.method!r}; available: {', '.join(ARGUMENTS)}", "method")
    owner = front.engine if asked.method == "text_of" else front.engine.tokenizer
    method: Callable[..., Any] = getattr(owner, asked.method)
    try:
        args = msgspec.convert(asked.args, ARGUMENTS[asked.method])
        if owner is front.engine:
            front.engine.check_sampling(args[1])
        result = await asyncio.to_thread(method, *args)
    except (msgspec.ValidationError, TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        raise ProgramError(f"invalid arguments of {asked.method}: {error}", "args") from None
    return Response(msgspec.msgpack.encode(result), media_type="application/msgpack")


@router.post("/weight")
async def weight(request: Request) -> Response:
    """Return one of the model's weights as safetensors."""
    front, _ = caller(request)
    asked = await _read(request, wire.Weight)
    layers = checked_layers(front.engine.sites, asked.name, asked.layer)
    if len(layers) > 1:
        raise ProgramError("expected a layer, got none", "layer")

    def read() -> bytes:
        found = front.engine.weight(asked.name, layers[0] if layers else None)
        return b"" if found is None else safetensors.numpy.save({asked.name: found})

    async with WEIGHTS:  # a matrix may take gigabytes: one at a time
        return Response(await asyncio.to_thread(read), media_type="application/octet-stream")


@router.post("/sampling")
async def sampling(request: Request) -> dict[str, bool]:
    """Check sampling parameters; the response is an error if the engine does not support them."""
    front, _ = caller(request)
    front.engine.check_sampling(await _read(request, dict))
    return {"ok": True}


@router.get("/status")
async def status(request: Request) -> Response:
    """Return counts of the objects that the engine holds."""
    front, _ = caller(request)
    return JSONResponse(await front.engine.status_async())


class _Running:
    """The running requests of one HTTP call. Unfinished requests are aborted when the connection closes.

    Requests start in order. The limit on the records of one request also bounds the total of all running requests,
    because every engine step executes all of their records.
    """

    def __init__(self, front: Front, owner: str, batch: wire.WireBatch, requests: list[EngineRequest]) -> None:
        self._front, self._owner, self._batch, self._requests = front, owner, batch, requests
        self._began_s = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[wire.Event] = asyncio.Queue()
        self._left = {request.run for request in requests}
        self._carried = {each.run: each.carried for each in batch.requests if each.carried is not None}
        self._waiting = {i: 0 if each.bound is None else record_work(each.bound.ops)
                         for i, each in enumerate(requests)}  # fmt: skip
        self._records: dict[int, int] = {}  # records of each running request, by its index

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames of events until every request has ended."""
        for i, (request, asked) in enumerate(zip(self._requests, self._batch.requests, strict=True)):
            if asked.listens:
                request.listener = _PartQueue(i, self._events)
        self._front.waiting.update((request.run, self._abort) for request in self._requests)
        self._start()
        while self._left:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            for event in events:
                if not isinstance(event, wire.Generated):
                    self._left.discard(self._requests[event.i].run)
            yield wire.frame(events)

    def stop(self) -> None:
        """Abort the requests that have not ended."""
        programs = sum(request.bound is not None for request in self._requests)
        log("batch", self._owner, requests=len(self._requests), programs=programs, stopped=len(self._left),
            took_s=round(time.perf_counter() - self._began_s, 6))  # fmt: skip
        for i in self._waiting:
            self._front.waiting.pop(self._requests[i].run, None)
        self._waiting.clear()
        if self._left:
            self._front.engine.abort(list(self._left))

    def _start(self) -> None:
        """Start as many waiting requests as the limit on records allows."""
        most, used, numbers = self._front.limits.program_records, sum(self._records.values()), []
        for i, records in self._waiting.items():
            if used and used + records > most:
                break
            numbers.append(i)
            used += records
        for i in numbers:
            self._records[i] = self._waiting.pop(i)
            self._front.waiting.pop(self._requests[i].run, None)
        futures = self._front.engine.start([self._requests[i] for i in numbers], self._carried)
        for i, future in zip(numbers, futures, strict=True):
            future.add_done_callback(lambda done, i=i: self._end(i, done))

    def _abort(self, run: str) -> None:
        """Abort a request that has not started."""
        for i in [i for i in self._waiting if self._requests[i].run == run]:
            del self._waiting[i]
            self._events.put_nowait(wire.Failed(i, pack(EngineError(ABORTED))))
        self._front.waiting.pop(run, None)

    def _end(self, i: int, future: Future[Answer]) -> None:
        """Post a finished request's answer or error; called on the event loop's thread."""
        del self._records[i]
        if self._waiting:
            self._start()
        carried = self._batch.requests[i].carried
        failure = future.exception()
        if failure is not None:
            error = as_patchclamp_error(failure)
            if self._requests[i].run in self._left:
                self._front.failed(error, self._owner)
            self._events.put_nowait(wire.Failed(i, pack(error)))
            return
        receipt = "" if carried is None else receipt_of(carried)  # already verified by the engine
        self._events.put_nowait(wire.Answered.of(i, receipt, future.result()))


class _Grading(ClientWork):
    """The jobs of one HTTP call, graded on a thread."""

    event = "grade"

    def __init__(self, front: Front, owner: str, jobs: list[GradeJob]) -> None:
        self._jobs = jobs
        super().__init__(front, owner)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield event frames until every program is graded; an error ends them with a `Failed` frame."""
        while (event := await self.events.get()) is not None:
            if isinstance(event, PatchclampError):
                self.front.failed(event, self.owner)
                event = wire.Failed(0, pack(event))
            yield wire.frame([event])

    def work(self) -> None:
        for i, grades in enumerate(self.front.lm.graded(self._jobs, self._tell, route="bulk")):
            columns = [grades.baseline.tobytes(), b"", b"", b""]
            self.put(wire.GradedPart(i, np.array([-1]).tobytes(), columns))

    def facts(self) -> dict[str, Any]:
        return {"programs": sum(job.count for job in self._jobs)}

    def _tell(self, i: int, grades: Grades, programs: np.ndarray) -> None:
        self.raise_if_stopped()
        if len(programs):
            self.put(wire.GradedPart.of(i, programs, grades))


class _PartQueue:
    """Posts each part of a request's output; called on the event loop's thread."""

    closed = False

    def __init__(self, i: int, events: asyncio.Queue[wire.Event]) -> None:
        self._i, self._events = i, events

    def __call__(self, part: Part) -> None:
        self._events.put_nowait(wire.Generated(self._i, part.text, part.token_ids, part.logprobs))


async def _read(request: Request, kind: type[Body]) -> Body:
    """Read and decode a body. Raises `ProgramError` if it is invalid, and `CapacityError` if it is too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > wire.MAX_BODY_BYTES:
            raise CapacityError(f"expected a body of at most {wire.MAX_BODY_BYTES} bytes: split the request")
    try:
        return await asyncio.to_thread(msgspec.msgpack.decode, data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProgramError(f"invalid message (see patchclamp.engines.wire): {error}") from None


def _vectors(data: bytes) -> dict[str, np.ndarray]:
    if not data:
        return {}
    try:
        vectors = safetensors.numpy.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProgramError(f"expected safetensors: {error}", "vectors") from None
    for key, rows in vectors.items():
        if rows.dtype != np.float32 or rows.ndim != 2:
            got = f"{list(rows.shape)} of {rows.dtype}"
            raise ProgramError(f"expected rows [n, W] of fp32, got {got}", f"vectors.{key}")
        if not is_content(key, rows):  # keys are shared between clients by content
            raise ProgramError("the key is not the hash of its content", f"vectors.{key}"[:200])
    return vectors


def _request(front: Front, owner: str, asked: wire.WireRequest, vectors: dict[str, np.ndarray]) -> EngineRequest:
    """Validate a request and convert it for the engine. Only patchclamp's own client validates what it sends."""
    model = front.engine.model
    _check_owned(owner, asked.run)
    ids = asked.prompt_token_ids
    if not ids or not all(0 <= token < model.d_vocab for token in (*ids, *asked.score)):
        raise ProgramError(f"expected a prompt of token ids from 0 to {model.d_vocab - 1}", asked.run)
    if asked.max_tokens < 1 or len(ids) + asked.max_tokens > model.max_model_len:
        raise ProgramError(
            f"prompt and max_tokens exceed {model.max_model_len} tokens: {len(ids)} + {asked.max_tokens}", asked.run
        )
    front.engine.check_sampling(asked.sampling)
    bound = None if asked.carried is None else _carried(front, owner, asked).bound
    used = {} if bound is None else _used(asked, vectors)
    return EngineRequest(asked.run, ids, asked.max_tokens, bound, used, asked.sampling, tuple(asked.score),
                         asked.logprobs, prompt_logprobs=asked.prompt_logprobs)  # fmt: skip


def _job(
    front: Front, owner: str, asked: wire.WireJob, vectors: dict[str, np.ndarray], sizes: Mapping[str, tuple[int, int]],
    sources: tuple[SourceRun, ...],
) -> GradeJob:  # fmt: skip
    """Validate a grading job and its programs, and convert it for the engine."""
    suffixes = [tuple(suffix) for suffix in asked.suffixes]
    longest = max(map(len, suffixes), default=0) + 1
    tokens = [*itertools.chain(*suffixes), *(token for terms in asked.terms for _, _, token in terms)]
    _request(front, owner, wire.WireRequest(asked.name, asked.prompt, longest, score=tokens), {})
    for number, offset, _ in itertools.chain(*asked.terms):
        if not (0 <= number < len(suffixes) and 0 <= offset <= len(suffixes[number])):
            raise ProgramError("a score's sequence or offset is out of range", asked.name)
    if not suffixes or not all(asked.terms) or not 0 <= asked.top <= MAX_SCORES:
        raise ProgramError(f"expected at least one sequence, no empty score, and top in 0..{MAX_SCORES}", asked.name)
    try:
        cells = CellRecords.of_bytes(asked.cells)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"cannot decode the programs: {error}", asked.name) from None
    front.limits.check("sweep_cells", cells.count, "programs to grade", asked.name)
    for key in cells.keys:
        if key not in sizes:
            raise MissingSource(f"the request lacks the rows {key[:80]}", asked.name)
    own = {key: sizes[key] for key in cells.keys}
    try:
        verify_cells(cells, own, len(asked.prompt) + longest - 1, front.engine.sites)
        most = max((group.records.shape[1] for group in cells.groups), default=0)
        front.limits.check("program_records", most, RECORDS)
    except PatchclampError as error:
        raise error.under(asked.name) from None
    used = {key: vectors[key] for key in own if key in vectors}
    return GradeJob(asked.name, asked.prompt, cells.count, suffixes, asked.terms, lambda: cells, _never, asked.kl,
                    asked.top, vectors=used, sources=sources)  # fmt: skip


def _jobs(front: Front, owner: str, asked: wire.WireJobs, vectors: dict[str, np.ndarray]) -> list[GradeJob]:
    """Validate and convert a request's jobs. The request declares how many rows of each run they read."""
    points, sizes, runs = front.engine.sites.points, dict[str, tuple[int, int]](), set[str]()
    for key, rows in asked.rows.items():
        try:
            read = source_of(key)
        except ValueError:
            read = None
        if read is None or not 0 <= read[1] < len(points):
            raise ProgramError(f"expected the key of a run's rows, got {key[:80]}", "rows")
        _check_owned(owner, read[0])
        runs.add(read[0])
        sizes[key] = rows, points[read[1]].width
    if any(rows > front.engine.model.max_model_len for rows, _ in sizes.values()):
        raise ProgramError(f"expected at most {front.engine.model.max_model_len} rows of a run", "rows")
    sources = tuple(_DeclaredRun(run, dict(sizes)) for run in runs)
    sizes |= {key: (rows.shape[0], rows.shape[1]) for key, rows in vectors.items()}
    return [_job(front, owner, job, vectors, sizes, sources) for job in asked.jobs]


def _never(number: int) -> BoundProgram | None:
    raise AssertionError("a client's grading programs run only in batches")


class _DeclaredRun:
    """A client's run, with the row counts that its request declares. The workers check that the rows exist."""

    def __init__(self, key: str, sizes: Mapping[str, tuple[int, int]]) -> None:
        self.key, self._sizes = key, sizes

    def positions_of(self, point: int) -> np.ndarray:
        return np.arange(self._sizes[run_key(self.key, point)][0])

    def select(self, tokens: Tokens | str) -> np.ndarray:
        raise NotImplementedError


def _used(asked: wire.WireRequest, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the vectors that a request reads. Raises `MissingSource` if the batch lacks any."""
    missing = [key for key in asked.vectors if key not in vectors]
    if missing:
        raise MissingSource(f"vector {missing[0]} is missing from the batch", asked.run)
    return {key: vectors[key] for key in asked.vectors}


def _carried(front: Front, owner: str, asked: wire.WireRequest) -> Carried:
    """Decode and verify a request's program. It may read only the owner's runs."""
    assert asked.carried is not None
    try:
        carried = decode(asked.carried)
        keys = {*carried.sizes, *(key for op in carried.bound.ops for key in op.keys)}
        sources = [source for source in map(source_of, keys) if source is not None]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"cannot decode the program: {error}", asked.run) from None
    if carried.bound.run != asked.run:
        raise ProgramError(f"expected the program of {asked.run}, got that of {carried.bound.run}", asked.run)
    for run, _ in sources:
        _check_owned(owner, run)
    if any(rows > front.engine.model.max_model_len for rows, _ in carried.sizes.values()):
        raise ProgramError("the program reads more rows than a run can have", asked.run)
    prompt = len(asked.prompt_token_ids)
    try:
        verify(carried.bound, carried.sizes, prompt, prompt + asked.max_tokens - 1, front.engine.sites)
        # a step executes its records one by one, and every request of the batch waits for it
        front.limits.check("program_records", record_work(carried.bound.ops), RECORDS)
    except PatchclampError as error:
        raise error.under(asked.run) from None
    return carried


def _check_owned(owner: str, name: str) -> None:
    """Raise `MissingSource` for another owner's run, without revealing whether it exists."""
    if name.count("-") != 2 or not name.startswith(f"{owner}-") or len(name) > 128 or not name.isascii():
        raise MissingSource(f"unknown run {name[:128]!r} for this client")
