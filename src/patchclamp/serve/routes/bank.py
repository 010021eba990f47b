"""Vectors and programs that an API key keeps on the server by name: `lm.bank` of a served model."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response

from patchclamp.language import Program, Vector
from patchclamp.language.program import to_dict
from patchclamp.serve import examples
from patchclamp.serve.answers import Deleted, ProgramCard, ProgramList, VectorCard, VectorList
from patchclamp.serve.bodies import is_json, read_body
from patchclamp.serve.front import Front
from patchclamp.serve.kept import Owned, bytes_of, check_name, check_program
from patchclamp.serve.routes.runs import caller, hear
from patchclamp.serve.schema import ERRORS, FILE, REFS, ProgramBody
from patchclamp.store.named import Means, as_entry, from_bytes, numbers_of_json, to_bytes

router = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], dependencies=[Depends(hear)], responses=ERRORS)
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
                "examples": {"vector": {"summary": "A vector of four numbers", "value": examples.VECTOR}},
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
                "examples": {"program": {"summary": "Two edits", "value": examples.PROGRAM}},
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
