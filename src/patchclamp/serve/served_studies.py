"""Studies on the server: a request's body has the study's fields, and the response streams its events.

Grids (sweeps, ablations, traces, paths) send their cells as they finish. A study ends when its client disconnects. With
`resume` its values are kept for as long as runs are, and repeating the request resumes from them.
"""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import StreamingResponse

from patchclamp import studies
from patchclamp.errors import MissingSource, PatchclampError, ProgramError, UnsupportedStudy, near
from patchclamp.language.program import parse_json
from patchclamp.lm import LM
from patchclamp.serve.bodies import read_body
from patchclamp.serve.capture_files import StoppedResponse, data_event
from patchclamp.serve.routes import caller, hear
from patchclamp.serve.schema import ERRORS, STUDIES, StudyCard, StudyList, error_object
from patchclamp.serve.server_state import ClientWork, Front
from patchclamp.studies.grid import GridPlan
from patchclamp.studies.inputs import Column, labelled
from patchclamp.studies.metric import Spread
from patchclamp.studies.study import REQUIRED, Reporter, Study, StudyField, json_of
from patchclamp.studies.sweep_result import Cell, Pair, Sweep

BATCH = 64  # runs that are read together: a study ends within two batches after its client disconnects
MAX_ITEMS = 64  # sites, senders or receivers
PROMPTS = {"prompt", "prompts", "clean", "corrupt", "positive", "negative", "source", "target"}
MAX_TOP = 100  # tokens per cell
PART_BYTES = 96 << 10  # of a result per event, which keeps its line below 256 KiB
EVERY_S = 0.2  # between progress events
KINDS = {kind.short: kind for kind in studies.STUDIES.values()}

router: APIRouter = APIRouter(
    prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS, dependencies=[Depends(hear)]
)


# -- requests


def served(name: str) -> type[Study]:
    """Look up a study by path. Raises `MissingSource` if it is unknown, `UnsupportedStudy` if servers do not run it."""
    if name not in KINDS:
        raise MissingSource(f"unknown study {name!r:.100}{near(name, KINDS)}; available: {', '.join(KINDS)}", "study")
    if KINDS[name].not_served:
        raise UnsupportedStudy(f"{name} is not supported on a server: {KINDS[name].not_served}", "study")
    return KINDS[name]


def fields_of(kind: type[Study]) -> dict[str, StudyField]:
    """Return the fields of a study that a request may set."""
    return {name: field for name, field in kind.fields().items() if field.arg.served}


def schema_of(kind: type[Study]) -> dict[str, Any]:
    """Return the JSON schema of a study's body."""
    properties: dict[str, Any] = {}
    for name, field in fields_of(kind).items():
        properties[name] = {"description": field.doc}
        if isinstance(field.default, (str, int, float, bool)):
            properties[name]["default"] = field.default
    if "resume" in kind.options():
        properties["resume"] = {"type": "string", "description": "A name for resuming the same request."}
    required = [name for name, field in fields_of(kind).items() if field.default is REQUIRED]
    return {"title": kind.__name__, "type": "object", "properties": properties, "required": required,
            "additionalProperties": False}  # fmt: skip


def read_study(front: Front, kind: type[Study], body: bytes) -> tuple[Study, str | None]:
    """Read a body's study, and its `resume` name or None. Raises `ProgramError` or a subclass if it is invalid."""
    try:
        parse_json(body)  # refuses duplicate keys
        asked = msgspec.json.decode(body)  # refuses numbers that are not finite
    except (ProgramError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProgramError(f"expected JSON: {error}", "body") from None
    if not isinstance(asked, dict):
        raise ProgramError(f"expected an object, got {type(asked).__name__}", "body")
    resume = asked.pop("resume", None) if "resume" in kind.options() else None
    if resume is not None and not isinstance(resume, str):
        raise ProgramError(f"expected a name, got {resume!r:.100}", "resume")
    known = fields_of(kind)
    for name, value in asked.items():
        if name in kind.fields() and name not in known:
            raise ProgramError("the server cannot read a client's file or object: use pc.LM(url)", name)
        if name in ("sites", "senders", "receivers", "freeze", "at") and (count := _leaves(value)) > MAX_ITEMS:
            raise ProgramError(f"expected at most {MAX_ITEMS} items, got {count}", name)
        if name == "top" and isinstance(value, (int, float)) and value > MAX_TOP:
            raise ProgramError(f"expected at most {MAX_TOP} tokens per cell, got {value}", name)
    prompts = sum(_count(asked.get(name)) for name in known if name in PROMPTS)
    source = asked.get("source")
    prompts += _count(source.get("prompts")) if isinstance(source, dict) else 0
    front.limits.check("sweep_prompts", prompts, "prompts of the study, including its source", "prompt")
    return kind(**asked), resume


def _leaves(value: Any) -> int:
    """Count the leaves of nested lists."""
    return sum(map(_leaves, value)) if isinstance(value, list) else 1


def _count(prompts: Any) -> int:
    """Count prompts; a list of token ids is one prompt."""
    if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
        return int(isinstance(prompts, (str, list)))
    return len(prompts)


def owners_lm(front: Front, owner: str) -> LM:
    """Return an `LM` on the server's engine, with the owner's stored vectors and programs in its bank."""
    lm = LM(front.lm.model.name, engine=front.engine)
    for name, entry in front.kept.owned(owner).items():
        lm.bank[name] = entry
    return lm


# -- routes


@router.get("/studies")
async def list_studies(request: Request) -> StudyList:
    """List the studies, each with its body's schema or the reason why the server does not run it."""
    caller(request)
    return StudyList(studies=[
        StudyCard(name=name, summary=(kind.__doc__ or "").split("\n", 1)[0], not_served=kind.not_served or None,
                  body=None if kind.not_served else schema_of(kind))
        for name, kind in KINDS.items()
    ])  # fmt: skip


BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"oneOf": [schema_of(kind) for kind in KINDS.values() if not kind.not_served]},
                "examples": {str(i): {"value": example} for i, (_, example) in enumerate(STUDIES)},
            }
        },
    }
}


@router.post("/studies/{name}", response_class=StreamingResponse, openapi_extra=BODY)
async def study(
    name: Annotated[str, Path(description="a study", examples=["patch_sweep"])], request: Request
) -> StreamingResponse:
    """Run a study and stream server-sent events.

    A grid sends `start` (its axes, the pairs of prompts, and the metric of both sides), `cells` (the cells finished in
    all pairs: site, layer and column indices, and the value), `spread` for several pairs (each cell's indices, the
    intervals of its mean and effect, its p-value before and after correction, and its value for each pair), and
    `summary` (the best cells, the noise floor, and the blocks of a zoom). Other studies send `progress` (the number of
    finished runs, and the total). The last events are `result`, the chunks of a safetensors file in base64 for
    `pc.studies.load`, or `error`.

    A study ends when its client disconnects. With `resume` its values are kept for as long as runs are. The same
    request then sends them again and resumes from them.
    """
    front, owner = caller(request)
    await front.ready()
    kind = served(name)
    asked, resume = read_study(front, kind, await read_body(request, front.limits, "json_bytes"))
    front.check_under_way(owner)
    running = RunningStudy(front, owner, asked, resume)
    try:
        first = await running.events.get()
        if isinstance(first, PatchclampError):
            raise first
    except BaseException:
        running.stop()
        raise

    async def events() -> AsyncGenerator[str, None]:
        event = first
        while event is not None:
            if isinstance(event, PatchclampError):
                front.failed(event, owner)
                yield _event("error", error_object(event))
            else:
                yield _event(*event)
            event = await running.events.get()

    return StoppedResponse(running.stop, events(), "text/event-stream")


class RunningStudy(ClientWork, Reporter):
    """Runs a study on a thread. Its events are (name, data) pairs."""

    event = "sweep"

    def __init__(self, front: Front, owner: str, asked: Study, resume: str | None) -> None:
        self._lm, self._asked, self._resume = owners_lm(front, owner), asked, resume
        self._journal = None if resume is None else front.journals.start(owner, resume)
        self._places: dict[str | int | Column, int] = {}  # indices of sites, layers and columns on a grid's axes
        self._total, self._done, self._sent_s = 0, 0, 0.0
        self.told: int = 0  # cells sent
        super().__init__(front, owner)

    def work(self) -> None:
        options: dict[str, Any] = {"batch": BATCH, "show_progress": self, "listener": self, "resume": self._journal,
                                   "check": functools.partial(check_sweep, self.front.limits)}  # fmt: skip
        how = {name: value for name, value in options.items() if name in self._asked.options()}
        result = self._asked.run(self._lm, **how)
        if isinstance(result, Sweep):
            if result.low is not None:
                self.put(("spread", self._spread(result)))
            self.put(("summary", _summary(result)))
        data = result.to_bytes()
        parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
        for i, part in enumerate(parts):
            self.put(("result", {"type": type(result).__name__, "part": i, "parts": len(parts),
                                 "safetensors": base64.b64encode(part).decode()}))  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {"cells": self.told}

    def ended(self) -> None:
        super().ended()
        if self._resume is not None:
            self.front.journals.end(self.owner, self._resume)

    # -- reports of the study

    def begin(self, what: str, total: int) -> None:
        self.front.limits.check("sweep_cells", total, "runs of the study", "sites")
        self._total, self._done = total, 0

    def advance(self, done: int) -> None:
        self.raise_if_stopped()
        self._done += done
        if "listener" not in self._asked.options() and time.monotonic() - self._sent_s > EVERY_S:
            self._sent_s = time.monotonic()
            self.put(("progress", {"done": self._done, "of": self._total}))

    def start(self, sweep: Sweep, cells: int) -> None:
        """Send the axes of a grid, before its cells."""
        self._places = {of: i for axis in (sweep.sites, sweep.layers, sweep.columns) for i, of in enumerate(axis)}
        axes = {"sites": sweep.sites, "layers": sweep.layers, "metric": sweep.metric, "direction": sweep.direction,
                "source": sweep.source, "pairs": [_side_by_side(pair) for pair in sweep.pairs]}  # fmt: skip
        self.put(("start", {"cells": cells, **axes, **_side_by_side(sweep)}))

    def cells(self, cells: list[Cell]) -> None:
        self.raise_if_stopped()
        self.told += len(cells)
        self.put(("cells", {"cells": [[*self._place(cell), cell.value] for cell in cells]}))

    def _place(self, cell: Cell) -> list[int]:
        """Return the indices of a cell's site, layer and column in the grid."""
        layer = 0 if cell.layer is None else self._places[cell.layer]
        return [self._places[cell.panel], layer, self._places[cell.column]]

    def _spread(self, sweep: Sweep) -> dict[str, Any]:
        """Return for each cell its indices, its fields of `Spread`, and its value in each prompt pair."""
        run = ~np.isnan(sweep.values)
        fields = [name for name in Spread._fields if getattr(sweep, name) is not None]
        numbers = [getattr(sweep, name)[run].tolist() for name in fields]
        cells = [
            self._place(Cell(row.site, row.layer, sweep.columns[p], 0.0, row.index))
            for r, row in enumerate(sweep.rows) for p in np.flatnonzero(run[r]).tolist()
        ]  # fmt: skip
        each = sweep.each[:, run].T.tolist()
        return {"cells": [[*place, *of] for place, *of in zip(cells, *numbers, strict=True)], "each": each}


def check_sweep(limits: Any, plan: GridPlan) -> None:
    """Raise `TooLarge` for a sweep above the server's limits. The grid is checked first, because computing the rest of
    the plan takes time in proportion to it."""
    limits.check("sweep_grid", plan.grid, "cells of the grid, over all pairs", "sites")
    limits.check("sweep_cells", plan.runs, "cells of the sweep, over all pairs, draws and answer tokens", "sites")
    limits.check("run_bytes", plan.captured_bytes, "bytes that the source prompts may capture", "sites")


# -- events


def _side_by_side(of: Sweep | Pair) -> dict[str, Any]:
    """Return the metric, graded tokens and columns of both sides of a pair, or of a sweep's first pair."""
    names = ("clean", "corrupt", "answer", "foil", "clean_tokens", "corrupt_tokens", "skipped", "columns")
    return {name: getattr(of, name) for name in names}


def _summary(sweep: Sweep) -> dict[str, Any]:
    best = [{"site": cell.panel, "layer": cell.layer, "label": cell.column.label,
             "positions": labelled(cell.column, sweep.patched, bool(sweep.corrupt_tokens)), "value": cell.value}
            for cell in sweep.best(5)]  # fmt: skip
    blocks = [{"site": sweep.rows[block.rows[0]].panel, "layers": [sweep.rows[r].layer for r in block.rows],
               "columns": block.columns, "value": block.value} for block in getattr(sweep, "blocks", ())]  # fmt: skip
    return {"noise_floor": sweep.noise_floor, "best": best, "blocks": blocks}


def _event(name: str, data: dict[str, Any]) -> str:
    plain = msgspec.json.decode(json_of(data))  # numbers that are not finite become null
    return f"event: {name}\n{data_event(plain)}"
