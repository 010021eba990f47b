"""Patch sweeps on the server: one request, and events as cells finish."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from patchclamp.errors import PatchclampError, RunError, as_patchclamp_error, pack, unpack
from patchclamp.lm import LM
from patchclamp.serve.bodies import BoundedRoute
from patchclamp.serve.flow import data_event
from patchclamp.serve.front import Front
from patchclamp.serve.log import log
from patchclamp.serve.routes.runs import caller, hear
from patchclamp.serve.schema import ERRORS
from patchclamp.serve.sweep_request import SweepRequest, check_sweep, owners_lm
from patchclamp.studies import patch_sweep
from patchclamp.studies.metric import Spread
from patchclamp.studies.study import MemoryJournal
from patchclamp.studies.sweep_result import Cell, Column, PatchSweep

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
                    yield _event("error", _error(event))
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

    def __init__(self, front: Front, lm: LM, asked: SweepRequest, journal: MemoryJournal | None) -> None:
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


def _error(error: PatchclampError) -> dict[str, Any]:
    from patchclamp.serve.app import error_object

    return error_object(error)


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\n{data_event(_finite(data))}"


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
