"""Routes, a file a subject.

The page at `/patchclamp`: one file, which asks the routes that are there for everybody.

Runs that requests left on the server.

What is served: the model, its sites, the versions and the limits.

Vectors and programs that an API key keeps on the server by name: `lm.bank` of a served model.

What a request for a sweep is, and how much of one a server takes.

Patch sweeps on the server: one request, and events as cells finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from patchclamp.engines.base import Captured, Window
from patchclamp.engines.vllm.serve_limits import ServeLimits
from patchclamp.errors import Gone, PatchclampError, RunError, Unlisted, as_patchclamp_error, pack, unpack
from patchclamp.language import Program, Site, Vector
from patchclamp.language.program import to_dict
from patchclamp.language.site import SITES
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.serve import schema
from patchclamp.serve.bodies import BoundedRoute, is_json, read_body
from patchclamp.serve.captures import answer, captured_names, data_event, file_of
from patchclamp.serve.front import Front, log, owner_of
from patchclamp.serve.kept import Owned, bytes_of, check_name, check_program
from patchclamp.serve.schema import (
    ERRORS,
    FILE,
    REFS,
    SWEEPS,
    Closed,
    Deleted,
    ProgramBody,
    ProgramCard,
    ProgramList,
    RunCard,
    RunList,
    ServedModel,
    SiteCard,
    SiteList,
    VectorCard,
    VectorList,
    error_object,
)
from patchclamp.store.journal import Journal
from patchclamp.store.named import Means, as_entry, from_bytes, numbers_of_json, to_bytes
from patchclamp.studies import MeanOf, Resampled, patch_sweep
from patchclamp.studies.metric import Spread
from patchclamp.studies.patch_sweep import SweepPlan
from patchclamp.studies.sweep_result import Cell, Column, PatchSweep
from patchclamp.version import __version__

page_router = APIRouter()
PAGE = importlib.resources.files("patchclamp.serve").joinpath("page.html").read_text(encoding="utf-8")


@page_router.get("/patchclamp", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page. It has nothing of anybody's, and needs no API key; what it asks for does."""
    return HTMLResponse(PAGE)


Name = Annotated[str, Path(description="of a run", examples=["italy"])]


async def hear(request: Request) -> None:
    """Has the front know what other API processes keep."""
    await request.app.state.patchclamp.hear()


router = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], dependencies=[Depends(hear)], responses=ERRORS)


def caller(request: Request) -> tuple[Front, str]:
    """The front, and whose the request is."""
    front: Front = request.app.state.patchclamp
    return front, owner_of(request.headers.get("Authorization"), front.has_keys)


@router.get("/runs")
async def list_runs(request: Request) -> RunList:
    """The runs that this API key has here. A server without keys lists none: a run is for those who know its name."""
    front, owner = caller(request)
    if not front.has_keys:
        raise Unlisted("this server has no API keys, so that a run is found by its name alone")
    return RunList(runs=[_describe(name, run) for name, run in front.kept.runs(owner).items()])


@router.get("/runs/{run}")
async def read_run(run: Name, request: Request) -> RunCard:
    """What a run is, and what it captured."""
    front, owner = caller(request)
    return _describe(run, front.kept.run(owner, run))


@router.get("/runs/{run}/captures", response_class=Response, responses=FILE)
async def read_captures(run: Name, request: Request) -> Response:
    """A run's captures as safetensors (`patchclamp.serve.captures`)."""
    front, owner = caller(request)
    kept = front.kept.run(owner, run)

    async def fetch(windows: list[Window]) -> list[Captured]:
        if front.kept.run(owner, run) is not kept:  # each time: it is in use
            raise Gone(f"run {run} is no more: another run took its name")
        return await front.engine.fetch_windows(windows)

    file = await asyncio.to_thread(file_of, kept)
    return await answer(file, fetch, lambda error: front.failed(error, owner))


@router.delete("/runs/{run}")
async def delete_run(run: Name, request: Request) -> Deleted:
    """Frees a run's captures."""
    front, owner = caller(request)
    front.kept.drop(owner, run)
    return Deleted(deleted=run)


def _describe(name: str, run: Run) -> RunCard:
    return RunCard(
        run=name, prompt_token_ids=run.prompt_token_ids, token_ids=run.token_ids, text=run.text,
        captures=captured_names(run), captured_bytes=run.captured_bytes, fingerprint=run.program.fingerprint,
    )  # fmt: skip


model_router = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS)


@model_router.get("")
async def read_model(request: Request) -> ServedModel:
    """The model, the versions, and what one caller may ask for and leave here."""
    front, _ = caller(request)
    model, limits = front.engine.model, front.limits
    return ServedModel(
        patchclamp=__version__, vllm=model.version, model=model.name, family=model.family, layers=model.layers,
        d_model=model.d_model, d_vocab=model.d_vocab, dtype=model.dtype, max_model_len=model.max_model_len,
        limits={name: getattr(limits, name) for name in limits.__struct_fields__},
    )  # fmt: skip


@model_router.get("/sites")
async def list_sites(request: Request) -> SiteList:
    """Every site: what it is, and where this model has it, or why it does not."""
    front, _ = caller(request)
    cards = []
    for name, spec in SITES.items():
        layers, why_not = None, None
        try:
            layers = [ref.layer for ref in front.engine.sites.resolve(Site(name)) if ref.layer is not None]
        except PatchclampError as error:
            why_not = error.message
        cards.append(SiteCard(name=name, shape=spec.shape, meaning=spec.meaning, layers=layers, why_not=why_not))
    return SiteList(sites=cards)


NUMBERS = {"type": "array", "minItems": 1, "items": {"type": "number"}}
NAMES = "up to 64 letters, digits, '_', '-' and '.'"
VectorName = Annotated[str, Path(description=NAMES, examples=["calm"])]
ProgramName = Annotated[str, Path(description=NAMES, examples=["quiet"])]

VECTOR_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {
                "schema": {"anyOf": [NUMBERS, {"type": "array", "minItems": 1, "items": NUMBERS}]},
                "examples": {"vector": {"summary": "A vector of four numbers", "value": schema.VECTOR}},
            },
        },
    }
}
PROGRAM_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": REFS.format(model=ProgramBody.__name__)},
                "examples": {"program": {"summary": "Two edits", "value": schema.PROGRAM}},
            }
        },
    }
}


@router.put("/vectors/{name}", openapi_extra=VECTOR_BODY)
async def put_vector(name: VectorName, request: Request) -> VectorCard:
    """Keeps a vector [D] or [n, D], or means, under a name that ops of this API key may use.

    The body is a safetensors file with one tensor, or, as application/json, a list of numbers or of such lists. For
    means the file's metadata has under `means` the site of each row: `{"NAME": ["resid_post[0]", ...]}`, as
    `lm.bank.save` writes them.
    """
    front, owner = caller(request)
    check_name(name, "name")
    if is_json(request):
        vector = await asyncio.to_thread(numbers_of_json, await read_body(request, front.limits, "json_bytes"))
    else:
        vector = await asyncio.to_thread(from_bytes, await read_body(request, front.limits))
    front.kept.put(owner, "vector", name, vector)
    return _vector_card(name, vector)


@router.get("/vectors")
async def list_vectors(request: Request) -> VectorList:
    """The vectors that this API key has here, with their shapes and sizes."""
    front, owner = caller(request)
    cards = [_vector_card(name, entry) for name, entry in front.kept.entries(owner, "vector").items()]
    return VectorList(vectors=cards, named_bytes=front.kept.named_bytes(owner), limit_bytes=front.limits.named_bytes)


@router.get("/vectors/{name}", response_class=Response, responses=FILE)
async def read_vector(name: VectorName, request: Request) -> Response:
    """A vector, or means, as the safetensors file that can be put back."""
    front, owner = caller(request)
    data = to_bytes(name, front.kept.entry(owner, "vector", name))
    return Response(data, media_type="application/octet-stream")


@router.delete("/vectors/{name}")
async def delete_vector(name: VectorName, request: Request) -> Deleted:
    """Drops a vector. Requests that are under way keep it."""
    front, owner = caller(request)
    front.kept.delete(owner, "vector", name)
    return Deleted(deleted=name)


@router.put("/programs/{name}", openapi_extra=PROGRAM_BODY)
async def put_program(name: ProgramName, request: Request) -> ProgramCard:
    """Keeps the edits of a program under a name: the model `MODEL:NAME` runs them, and so does the op `use`."""
    front, owner = caller(request)
    check_name(name, "name")
    body = await read_body(request, front.limits, "json_bytes")
    owned = front.kept.owned(owner)
    program = await asyncio.to_thread(_read_program, front, body, name, owned)
    front.kept.put(owner, "program", name, program)
    return _program_card(front, name, program)


@router.get("/programs")
async def list_programs(request: Request) -> ProgramList:
    """The programs that this API key has here."""
    front, owner = caller(request)
    programs = front.kept.entries(owner, "program")
    return ProgramList(programs=[_program_card(front, name, program) for name, program in programs.items()])


@router.get("/programs/{name}")
async def read_program(name: ProgramName, request: Request) -> dict[str, list[dict[str, Any]]]:
    """A program, as it can be put back."""
    front, owner = caller(request)
    return {"edits": to_dict(front.kept.entry(owner, "program", name))["edits"]}


@router.delete("/programs/{name}")
async def delete_program(name: ProgramName, request: Request) -> Deleted:
    """Drops a program, and the model that it is served as."""
    front, owner = caller(request)
    front.kept.delete(owner, "program", name)
    return Deleted(deleted=name)


def _read_program(front: Front, body: bytes, name: str, owned: Owned) -> Program:
    """The program of a body. Raises what is wrong with it whatever the prompt: a program that could never run is not
    kept."""
    program = as_entry(Program.from_json(body))
    assert isinstance(program, Program)
    front.limits.check("program_ops", len(program.edits), "ops of the program", "edits")
    check_program(program, name, front.lm.sites, owned)
    return program


def _vector_card(name: str, entry: Vector | Means) -> VectorCard:
    if isinstance(entry, Vector):
        return VectorCard(name=name, shape=list(entry.shape), bytes=bytes_of(entry), sites=None)
    width = next(iter(entry.rows.values())).shape[-1]
    return VectorCard(name=name, shape=[len(entry.rows), width], bytes=bytes_of(entry), sites=list(entry.rows))


def _program_card(front: Front, name: str, program: Program) -> ProgramCard:
    return ProgramCard(
        name=name, edits=len(program.edits), bytes=bytes_of(program), fingerprint=program.fingerprint,
        model=f"{front.model_name}:{name}",
    )  # fmt: skip


MAX_SITES = 64
Prompt = Annotated[str | list[int], Field(description="text or token ids")]
Answer = Annotated[str | int | list[int], Field(description="text, a token id, or several")]
Selection = Annotated[str | int, Field(description="a selection of a prompt, or one position", examples=["prompt[-1]"])]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class MeanSource(Closed):
    """The mean over the positions of some prompts, or over those of a selection."""

    type: Literal["mean"]
    prompts: list[Prompt] = Field(min_length=1)
    tokens: Selection | None = None
    by_position: bool = Field(False, description="a mean for each position by itself")


class ResampledSource(Closed):
    """The row of a prompt drawn for each cell."""

    type: Literal["resampled"]
    prompts: list[Prompt] = Field(min_length=1)
    seed: int = Field(0, ge=0)
    draws: int = Field(1, ge=1, description="how many prompts are drawn for a cell, whose value is their mean")


class SweepRequest(BaseModel):
    """The arguments of `pc.studies.patch_sweep`."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": SWEEPS})
    clean: Prompt | list[Prompt] = Field(description="a prompt, or several, pair by pair")
    corrupt: Prompt | list[Prompt]
    answer: Answer | list[Answer] = Field(description="of several pairs one for all, or a list of them")
    foil: Answer | list[Answer | None] | None = None
    sites: list[str] = Field(["resid_pre"], min_length=1, max_length=MAX_SITES)
    layers: str | int | list[int] | None = Field(None, description='all; or some, such as "0:12"')
    positions: list[Selection] | dict[str, Selection | list[Selection]] | None = Field(
        None,
        description="selections of the corrupt prompt, or labels with a selection each, and of several pairs perhaps a "
        "list of them, one a pair; all aligned ones",
    )
    metric: str = Field("logit_diff", description="logit_diff, recovered, logprob or prob")
    direction: str = Field(
        "denoising", description="denoising, or noising: cells of the corrupt run into the clean one"
    )
    group: int | None = Field(None, description="so many heads, neurons or experts are one row: 1 for each head")
    window: int = Field(1, description="so many layers around a cell's are patched with it")
    source: Annotated[MeanSource | ResampledSource, Field(discriminator="type")] | str | None = Field(
        None, description="in place of the other prompt's values: zeros, bank:NAME, a mean, or prompts drawn at random"
    )
    alpha: Finite = Field(1.0, description="how much of the new value is mixed in")
    mask: list[Finite] | str | None = Field(
        None, description="in which columns of a row: a weight each, or the name of a vector that this API key has here"
    )
    zoom: int | None = Field(None, ge=1, description="start with blocks, and look into the best so many of each size")
    seed: int = Field(0, ge=0, description="of the confidence interval and the test over pairs")
    resume: str | None = Field(
        None, description="a name under which values are kept, from which the same request goes on", examples=["eiffel"]
    )

    def arguments(self) -> dict[str, Any]:
        """As `patch_sweep` takes them, but for `resume`."""
        given = self.model_dump(exclude={"source", "resume"})
        return given | {"source": self._source()}

    @property
    def prompts(self) -> int:
        """How many prompts are run without a patch."""
        of_source = 0 if isinstance(self.source, str | None) else len(self.source.prompts)
        return _count(self.clean) + _count(self.corrupt) + of_source

    def _source(self) -> Any:
        if isinstance(self.source, MeanSource):
            return MeanOf(self.source.prompts, self.source.tokens, self.source.by_position)
        if isinstance(self.source, ResampledSource):
            return Resampled(self.source.prompts, self.source.seed, self.source.draws)
        return self.source


def check_sweep(limits: ServeLimits, plan: SweepPlan) -> None:
    """Raises `TooLarge` for a sweep that is more than a server takes. The grid comes first: what else the plan knows
    takes as long as the grid is large."""
    limits.check("sweep_grid", plan.grid, "cells of the grid, in all pairs", "sites")
    limits.check("sweep_cells", plan.runs, "cells of the sweep, in all pairs, draws and tokens of answers", "sites")
    limits.check("run_bytes", plan.captured_bytes, "bytes that the prompts which are read may capture", "sites")


def owners_lm(front: Front, owner: str) -> LM:
    """An `LM` on the server's engine whose bank has what an owner has here, now."""
    lm = LM(front.lm.model.name, engine=front.engine)
    for name, entry in front.kept.owned(owner).items():
        lm.bank[name] = entry
    return lm


def _count(prompts: Any) -> int:
    """How many prompts these are: a list of numbers is one."""
    return 1 if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else len(prompts)


BATCH = 64  # cells that are read together: a sweep whose client is gone ends within two batches

sweep_router = APIRouter(
    prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS, route_class=BoundedRoute,
    dependencies=[Depends(hear)],
)  # fmt: skip
_under_way: Counter[tuple[int, str]] = Counter()  # sweeps by front and owner


@sweep_router.post("/sweeps", response_class=StreamingResponse)
async def sweep(asked: SweepRequest, request: Request) -> StreamingResponse:
    """Patches every cell of a sweep, and tells of them as they finish, in server-sent events:

    `start`: the grid's axes, the pairs of prompts, and the metric of both sides; `cells`: cells that have finished in
    all pairs, each with its place in the grid (site, layer, column) and its value; `spread`, of several pairs: each
    cell's place, the ends of its interval, its p-value alone and as one of all, and its values pair by pair; `summary`:
    the best cells, the noise floor, and the blocks of a zoom; `error`: in place of the summary.

    A sweep whose client goes away ends. With `resume` its values stay for as long as runs do, and the same request goes
    on from there; what was computed before is told first.
    """
    front, owner = caller(request)
    front.limits.check("sweep_prompts", asked.prompts, "prompts of the sweep, with those of its source", "clean")
    key = (id(front), owner)
    front.limits.check_room("sweeps", _under_way[key], 1, "sweeps at once")
    journal = None if asked.resume is None else front.kept_sweeps.journal(owner, asked.resume)
    _under_way[key] += 1
    running, began_s = _Running(front, owners_lm(front, owner), asked, journal), time.perf_counter()
    try:
        first = await running.events.get()
        if isinstance(first, PatchclampError):
            raise first
    except BaseException:
        running.stop()
        _under_way[key] -= 1
        front.kept_sweeps.ended(owner, asked.resume or "")
        raise

    async def events() -> AsyncIterator[str]:
        try:
            event = first
            while event is not None:
                if isinstance(event, PatchclampError):
                    front.failed(event, owner)
                    yield _event("error", error_object(event))
                else:
                    yield _event(*event)
                event = await running.events.get()
        finally:
            running.stop()
            _under_way[key] -= 1
            front.kept_sweeps.ended(owner, asked.resume or "")
            log("sweep", owner, cells=running.told, took_s=round(time.perf_counter() - began_s, 6))

    return StreamingResponse(events(), media_type="text/event-stream")


class _Running:
    """A sweep on a thread of its own, and its events: (name, data), an error, and None at the end."""

    def __init__(self, front: Front, lm: LM, asked: SweepRequest, journal: Journal | None) -> None:
        self._limits, self._lm, self._asked, self._journal = front.limits, lm, asked, journal
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[str, dict[str, Any]] | PatchclampError | None] = asyncio.Queue()
        self._stopped = threading.Event()
        self._places: dict[str, dict[Any, int]] = {}
        self.told = 0  # cells
        threading.Thread(target=self._run, name="patchclamp sweep", daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more."""
        self._stopped.set()

    def begin(self, sweep: PatchSweep, cells: int) -> None:
        self._places = {"sites": _numbered(sweep.sites), "layers": _numbered(sweep.layers),
                        "columns": _numbered(sweep.columns)}  # fmt: skip
        self._put(("start", _start(sweep, cells)))

    def cells(self, cells: list[Cell]) -> None:
        if self._stopped.is_set():
            raise RunError("the client of this sweep is gone")
        told = [[*self._place(cell), cell.value] for cell in cells]
        self.told += len(told)
        self._put(("cells", {"cells": told}))

    def _place(self, cell: Cell) -> list[int]:
        """The numbers of a cell's site, layer and column in the grid."""
        places = self._places
        return [places["sites"][cell.panel], places["layers"].get(cell.layer, 0), places["columns"][cell.column]]

    def _run(self) -> None:
        try:
            sweep = patch_sweep(
                self._lm, **self._asked.arguments(), batch=BATCH, show_progress=False, listener=self,
                resume=self._journal, check=lambda plan: check_sweep(self._limits, plan),
            )  # fmt: skip
            if sweep.low is not None:
                self._put(("spread", self._spread(sweep)))
            self._put(("summary", _summary(sweep)))
        except Exception as error:
            self._put(unpack(pack(as_patchclamp_error(error))))  # without the frames that hold the sweep's runs
        self._put(None)

    def _spread(self, sweep: PatchSweep) -> dict[str, Any]:
        """Of every cell: its place, the fields of `Spread`; and its value in each pair of prompts."""
        run = ~np.isnan(sweep.values)
        numbers = [getattr(sweep, name)[run].tolist() for name in Spread._fields]
        cells = [
            self._place(Cell(row.site, row.layer, sweep.columns[p], 0.0, row.index))
            for r, row in enumerate(sweep.rows) for p in np.flatnonzero(run[r]).tolist()
        ]  # fmt: skip
        each = sweep.each[:, run].T.tolist()
        return {"cells": [[*place, *of] for place, *of in zip(cells, *numbers, strict=True)], "each": each}

    def _put(self, event: tuple[str, dict[str, Any]] | PatchclampError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


def _numbered(values: tuple[Any, ...]) -> dict[Any, int]:
    return {value: i for i, value in enumerate(values)}


def _start(sweep: PatchSweep, cells: int) -> dict[str, Any]:
    return {
        "cells": cells, "sites": sweep.sites, "layers": sweep.layers, "columns": _columns(sweep.columns),
        "metric": sweep.metric, "clean": sweep.clean, "corrupt": sweep.corrupt, "answer": sweep.answer,
        "foil": sweep.foil, "clean_tokens": sweep.clean_tokens, "corrupt_tokens": sweep.corrupt_tokens,
        "skipped": sweep.skipped, "direction": sweep.direction, "source": sweep.source,
        "pairs": [
            {"clean": pair.clean, "corrupt": pair.corrupt, "answer": pair.answer, "foil": pair.foil,
             "clean_tokens": pair.clean_tokens, "corrupt_tokens": pair.corrupt_tokens, "skipped": pair.skipped,
             "columns": _columns(pair.columns)}
            for pair in sweep.pairs
        ],
    }  # fmt: skip


def _columns(columns: Sequence[Column]) -> list[dict[str, Any]]:
    return [{"label": each.label, "clean": each.clean, "corrupt": each.corrupt} for each in columns]


def _summary(sweep: PatchSweep) -> dict[str, Any]:
    best = [{"site": cell.panel, "layer": cell.layer, "label": cell.column.label, "positions": cell.column.corrupt,
             "value": cell.value} for cell in sweep.best(5)]  # fmt: skip
    blocks = [{"site": sweep.rows[block.rows[0]].panel, "layers": [sweep.rows[r].layer for r in block.rows],
               "columns": block.columns, "value": block.value} for block in sweep.blocks]  # fmt: skip
    return {"noise_floor": sweep.noise_floor, "best": best, "blocks": blocks}


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\n{data_event(_finite(data))}"


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
