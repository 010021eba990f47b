"""Runs that requests left on the server."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response

from patchclamp.engines.base import Captured, Window
from patchclamp.errors import Gone, Unlisted
from patchclamp.run import Run
from patchclamp.serve.answers import Deleted, RunCard, RunList
from patchclamp.serve.captures import captured_names, file_of
from patchclamp.serve.flow import answer
from patchclamp.serve.front import Front
from patchclamp.serve.owners import owner_of
from patchclamp.serve.schema import ERRORS, FILE

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
