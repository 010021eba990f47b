"""Patch sweeps on the server: one request, and events as cells finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from patchclamp.errors import PatchclampError, RunError, as_patchclamp_error, pack, unpack
from patchclamp.serve.bodies import BoundedRoute
from patchclamp.serve.front import Front
from patchclamp.serve.log import log
from patchclamp.serve.routes.runs import caller
from patchclamp.serve.schema import ERRORS
from patchclamp.studies import patch_sweep
from patchclamp.studies.sweep_result import Cell, PatchSweep

BATCH = 64  # cells that are read together: a sweep whose client is gone ends within two batches

router = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS, route_class=BoundedRoute)
Prompt = Annotated[str | list[int], Field(description="text or token ids")]
Answer = Annotated[str | int | list[int], Field(description="text, a token id, or several")]


class SweepRequest(BaseModel):
    """The arguments of `pc.studies.patch_sweep`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{
            "clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
            "sites": ["resid_pre"], "layers": "0:4",
        }]},
    )  # fmt: skip
    clean: Prompt
    corrupt: Prompt
    answer: Answer
    foil: Answer | None = None
    sites: list[str] = Field(["resid_pre"], min_length=1)
    layers: str | int | list[int] | None = Field(None, description='all; or some, such as "0:12"')
    positions: list[str | int] | None = Field(None, description="selections of the corrupt prompt; all aligned ones")
    metric: str = Field("logit_diff", description="logit_diff, recovered, logprob or prob")
    direction: str = Field(
        "denoising", description="denoising, or noising: cells of the corrupt run into the clean one"
    )
    group: int | None = Field(None, description="so many heads, neurons or experts are one row: 1 for each head")
    window: int = Field(1, description="so many layers around a cell's are patched with it")
    alpha: float = Field(1.0, description="how much of the new value is mixed in")


_under_way: Counter[tuple[int, str]] = Counter()  # sweeps by front and owner


@router.post("/sweeps", response_class=StreamingResponse)
async def sweep(asked: SweepRequest, request: Request) -> StreamingResponse:
    """Patches every cell of a sweep, and tells of them as they finish, in server-sent events:

    `start`: the grid's axes and the metric of both prompts; `cells`: cells that have finished, each with its place in
    the grid; `summary`: the best cells and the noise floor; `error`: in place of the summary. A sweep whose client
    goes away ends.
    """
    front, owner = caller(request)
    key = (id(front), owner)
    front.limits.check_room("sweeps", _under_way[key], 1, "sweeps at once")
    _under_way[key] += 1
    running, began_s = _Running(front, asked), time.perf_counter()
    try:
        first = await running.events.get()
        if isinstance(first, PatchclampError):
            raise first
    except BaseException:
        running.stop()
        _under_way[key] -= 1
        raise

    async def events() -> AsyncIterator[str]:
        try:
            event = first
            while event is not None:
                if isinstance(event, PatchclampError):
                    front.failed(event, owner)
                    yield _event("error", _error(event))
                else:
                    yield _event(*event)
                event = await running.events.get()
        finally:
            running.stop()
            _under_way[key] -= 1
            log("sweep", owner, cells=running.told, took_s=round(time.perf_counter() - began_s, 6))

    return StreamingResponse(events(), media_type="text/event-stream")


class _Running:
    """A sweep on a thread of its own, and its events: (name, data), an error, and None at the end."""

    def __init__(self, front: Front, asked: SweepRequest) -> None:
        self._front, self._asked, self._loop = front, asked, asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[str, dict[str, Any]] | PatchclampError | None] = asyncio.Queue()
        self._stopped = threading.Event()
        self._places: dict[str, dict[Any, int]] = {}
        self.told = 0  # cells
        threading.Thread(target=self._run, name="patchclamp sweep", daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more."""
        self._stopped.set()

    def begin(self, sweep: PatchSweep, cells: int) -> None:
        self._front.limits.check("sweep_cells", cells, "cells of the sweep", "sites")
        self._places = {"sites": _numbered(sweep.sites), "layers": _numbered(sweep.layers),
                        "columns": _numbered(sweep.columns)}  # fmt: skip
        self._put(("start", _start(sweep, cells)))

    def cells(self, cells: list[Cell]) -> None:
        if self._stopped.is_set():
            raise RunError("the client of this sweep is gone")
        places = self._places
        told = [
            [
                places["sites"][cell.panel],
                places["layers"].get(cell.layer, 0),
                places["columns"][cell.column],
                cell.value,
            ]
            for cell in cells
        ]
        self.told += len(told)
        self._put(("cells", {"cells": told}))

    def _run(self) -> None:
        try:
            sweep = patch_sweep(
                self._front.lm, **self._asked.model_dump(), batch=BATCH, show_progress=False, listener=self
            )
            self._put(("summary", _summary(sweep)))
        except Exception as error:
            self._put(unpack(pack(as_patchclamp_error(error))))  # without the frames that hold the sweep's runs
        self._put(None)

    def _put(self, event: tuple[str, dict[str, Any]] | PatchclampError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


def _numbered(values: tuple[Any, ...]) -> dict[Any, int]:
    return {value: i for i, value in enumerate(values)}


def _start(sweep: PatchSweep, cells: int) -> dict[str, Any]:
    columns = [{"label": each.label, "clean": each.clean, "corrupt": each.corrupt} for each in sweep.columns]
    return {
        "cells": cells, "sites": sweep.sites, "layers": sweep.layers, "columns": columns,
        "metric": sweep.metric, "clean": sweep.clean, "corrupt": sweep.corrupt, "answer": sweep.answer,
        "foil": sweep.foil, "clean_tokens": sweep.clean_tokens, "corrupt_tokens": sweep.corrupt_tokens,
        "skipped": sweep.skipped,
    }  # fmt: skip


def _summary(sweep: PatchSweep) -> dict[str, Any]:
    best = [{"site": cell.panel, "layer": cell.layer, "label": cell.column.label, "positions": cell.column.corrupt,
             "value": cell.value} for cell in sweep.best(5)]  # fmt: skip
    return {"noise_floor": sweep.noise_floor, "best": best}


def _error(error: PatchclampError) -> dict[str, Any]:
    from patchclamp.serve.app import error_object

    return error_object(error)


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(_finite(data))}\n\n"


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
