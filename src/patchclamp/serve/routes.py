"""The routes of the web page, stored runs, the model and its sites, and stored vectors and programs.

The page at `/patchclamp` is one file that uses only public routes. Vectors and programs are stored by name for an API
key, as in `lm.bank`.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from patchclamp.engines.base import Captured, Window
from patchclamp.engines.vllm.server import OF_OPERATOR
from patchclamp.errors import Gone, PatchclampError, Unlisted
from patchclamp.language import Program, Site, Vector
from patchclamp.language.program import to_dict
from patchclamp.language.site import SITES
from patchclamp.run import Run
from patchclamp.serve import schema
from patchclamp.serve.bodies import is_json, read_body
from patchclamp.serve.capture_files import answer, captured_names, file_of
from patchclamp.serve.kept import Owned, bytes_of, check_name, check_program
from patchclamp.serve.schema import ERRORS, FILE, Deleted
from patchclamp.serve.server_state import Front, owner_of
from patchclamp.sites import LENS
from patchclamp.store.named import Means, as_entry, from_bytes, numbers_of_json, to_bytes
from patchclamp.version import __version__

page_router: APIRouter = APIRouter()
PAGE = importlib.resources.files("patchclamp.serve").joinpath("page.html").read_text(encoding="utf-8")


@page_router.get("/patchclamp", include_in_schema=False)
async def page() -> HTMLResponse:
    """Return the page. It contains no user data and needs no API key, unlike the routes that it calls."""
    return HTMLResponse(PAGE)


@page_router.get("/", include_in_schema=False)
async def root() -> RedirectResponse:
    """Redirect a browser to the page."""
    return RedirectResponse("patchclamp")  # relative, for servers behind a proxy's prefix


Name = Annotated[str, Path(description="name of a run", examples=["italy"])]


async def hear(request: Request) -> None:
    """Apply the changes made by other API processes."""
    await request.app.state.patchclamp.hear()


router: APIRouter = APIRouter(
    prefix="/v1/patchclamp", tags=["patchclamp"], dependencies=[Depends(hear)], responses=ERRORS
)


def caller(request: Request) -> tuple[Front, str]:
    """Return the `Front` and the owner of the request."""
    front: Front = request.app.state.patchclamp
    return front, owner_of(request.headers.get("Authorization"), front.has_keys)


@router.get("/runs")
async def list_runs(request: Request) -> schema.RunList:
    """List the runs of this API key. Servers without keys refuse: anyone who knows a run's name can read it."""
    front, owner = caller(request)
    if not front.has_keys:
        raise Unlisted("runs are not listed on a server without API keys: request them by name")
    return schema.RunList(runs=[_describe(name, run) for name, run in front.kept.runs(owner).items()])


@router.get("/runs/{run}")
async def read_run(run: Name, request: Request) -> schema.RunCard:
    """Return a run's tokens and text, and the names of its captures."""
    front, owner = caller(request)
    return _describe(run, front.kept.run(owner, run))


@router.get("/runs/{run}/captures", response_class=Response, responses=FILE)
async def read_captures(run: Name, request: Request) -> Response:
    """Return a run's captures as a safetensors file (`patchclamp.serve.capture_files`)."""
    front, owner = caller(request)
    kept = front.kept.run(owner, run)

    async def fetch(windows: list[Window]) -> list[Captured]:
        if front.kept.run(owner, run) is not kept:  # checked at every read, which also postpones its expiry
            raise Gone(f"run {run} is gone: another run took its name")
        return await front.engine.fetch_windows(windows)

    file = await asyncio.to_thread(file_of, kept)
    return await answer(file, fetch, lambda error: front.failed(error, owner))


@router.delete("/runs/{run}")
async def delete_run(run: Name, request: Request) -> Deleted:
    """Free a run's captures."""
    front, owner = caller(request)
    front.kept.drop(owner, run)
    return Deleted(deleted=run)


def _describe(name: str, run: Run) -> schema.RunCard:
    return schema.RunCard(
        run=name, prompt_token_ids=run.prompt_token_ids, token_ids=run.token_ids, text=run.text,
        captures=captured_names(run), captured_bytes=run.captured_bytes, fingerprint=run.program.fingerprint,
    )  # fmt: skip


model_router: APIRouter = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS)


@model_router.get("")
async def read_model(request: Request) -> schema.ServedModel:
    """Return the model, the versions, and the limits per caller."""
    front, _ = caller(request)
    model, limits = front.engine.model, front.limits
    return schema.ServedModel(
        patchclamp=__version__, vllm=model.version, model=model.name, family=model.family, layers=model.layers,
        d_model=model.d_model, d_vocab=model.d_vocab, dtype=model.dtype, max_model_len=model.max_model_len,
        no_lens=front.engine.sites.withdrawn.get(LENS),
        limits={name: getattr(limits, name) for name in limits.__struct_fields__ if name not in OF_OPERATOR},
    )  # fmt: skip


@model_router.get("/sites")
async def list_sites(request: Request) -> schema.SiteList:
    """List every site: its shape and meaning, and its layers in this model or the reason why it is missing."""
    front, _ = caller(request)
    cards = []
    for name, spec in SITES.items():
        layers, why_not = None, None
        try:
            layers = [ref.layer for ref in front.engine.sites.resolve(Site(name)) if ref.layer is not None]
        except PatchclampError as error:
            why_not = error.message
        cards.append(schema.SiteCard(name=name, shape=spec.shape, meaning=spec.meaning, layers=layers, why_not=why_not))
    return schema.SiteList(sites=cards)


NUMBERS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "number"}}
NAMES = "up to 64 letters, digits, '_', '-' and '.'"
VectorName = Annotated[str, Path(description=NAMES, examples=["calm"])]
ProgramName = Annotated[str, Path(description=NAMES, examples=["quiet"])]

VECTOR_BODY: dict[str, Any] = {
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
PROGRAM_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": schema.REFS.format(model=schema.ProgramBody.__name__)},
                "examples": {"program": {"summary": "Two edits", "value": schema.PROGRAM}},
            }
        },
    }
}


@router.put("/vectors/{name}", openapi_extra=VECTOR_BODY)
async def put_vector(name: VectorName, request: Request) -> schema.VectorCard:
    """Store a vector [D] or [n, D], or means, under a name for the ops of this API key.

    The body is a safetensors file with one tensor or, as application/json, a 1-D or 2-D list of numbers. For
    means, the entry `means` of the file's metadata has the site of each row, `{"NAME": ["resid_post[0]", ...]}`, as
    written by `lm.bank.save`.
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
async def list_vectors(request: Request) -> schema.VectorList:
    """List the vectors of this API key, with their shapes and sizes."""
    front, owner = caller(request)
    cards = [_vector_card(name, entry) for name, entry in front.kept.entries(owner, "vector").items()]
    return schema.VectorList(
        vectors=cards, named_bytes=front.kept.named_bytes(owner), limit_bytes=front.limits.named_bytes
    )


@router.get("/vectors/{name}", response_class=Response, responses=FILE)
async def read_vector(name: VectorName, request: Request) -> Response:
    """Return a vector, or means, as a safetensors file that can be stored again."""
    front, owner = caller(request)
    data = to_bytes(name, front.kept.entry(owner, "vector", name))
    return Response(data, media_type="application/octet-stream")


@router.delete("/vectors/{name}")
async def delete_vector(name: VectorName, request: Request) -> Deleted:
    """Delete a vector. Running requests continue to use it."""
    front, owner = caller(request)
    front.kept.delete(owner, "vector", name)
    return Deleted(deleted=name)


@router.put("/programs/{name}", openapi_extra=PROGRAM_BODY)
async def put_program(name: ProgramName, request: Request) -> schema.ProgramCard:
    """Store the edits of a program under a name. The model `MODEL:NAME` and the op `use` apply them."""
    front, owner = caller(request)
    check_name(name, "name")
    body = await read_body(request, front.limits, "json_bytes")
    owned = front.kept.owned(owner)
    program = await asyncio.to_thread(_read_program, front, body, name, owned)
    front.kept.put(owner, "program", name, program)
    return _program_card(front, name, program)


@router.get("/programs")
async def list_programs(request: Request) -> schema.ProgramList:
    """List the programs of this API key."""
    front, owner = caller(request)
    programs = front.kept.entries(owner, "program")
    return schema.ProgramList(programs=[_program_card(front, name, program) for name, program in programs.items()])


@router.get("/programs/{name}")
async def read_program(name: ProgramName, request: Request) -> dict[str, list[dict[str, Any]]]:
    """Return a program, in the format of the request that stores a program."""
    front, owner = caller(request)
    return {"edits": to_dict(front.kept.entry(owner, "program", name))["edits"]}


@router.delete("/programs/{name}")
async def delete_program(name: ProgramName, request: Request) -> Deleted:
    """Delete a program, and with it the model `MODEL:NAME`."""
    front, owner = caller(request)
    front.kept.delete(owner, "program", name)
    return Deleted(deleted=name)


def _read_program(front: Front, body: bytes, name: str, owned: Owned) -> Program:
    """Parse a body's program, and check everything that does not depend on a prompt."""
    program = as_entry(Program.from_json(body))
    assert isinstance(program, Program)
    front.limits.check("program_ops", len(program.edits), "ops of the program", "edits")
    check_program(program, name, front.lm.sites, owned)
    return program


def _vector_card(name: str, entry: Vector | Means) -> schema.VectorCard:
    if isinstance(entry, Vector):
        return schema.VectorCard(name=name, shape=list(entry.shape), bytes=bytes_of(entry), sites=None)
    width = next(iter(entry.rows.values())).shape[-1]
    return schema.VectorCard(name=name, shape=[len(entry.rows), width], bytes=bytes_of(entry), sites=list(entry.rows))


def _program_card(front: Front, name: str, program: Program) -> schema.ProgramCard:
    return schema.ProgramCard(
        name=name, edits=len(program.edits), bytes=bytes_of(program), fingerprint=program.fingerprint,
        model=f"{front.model_name}:{name}",
    )  # fmt: skip
