"""What the API processes of one server tell each other of what they keep.

The first engine core has the last word on every name. A process asks it for what is new before it reads a name that a
request says, and every few seconds; the one process of a small server never asks.
"""

from __future__ import annotations

import uuid

import msgspec
import numpy as np

from patchclamp.engines.base import Answer, Request
from patchclamp.engines.tokenizer import Chat
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.language import Program, Vector
from patchclamp.lm import LM
from patchclamp.plan import BoundProgram
from patchclamp.run import Run
from patchclamp.store.named import Means, from_bytes, to_bytes


class Note(msgspec.Struct):
    """The last word on a name of an owner.

    kind: "vector", "program", "run", "gone", or "touched" (a run was asked for)
    by: the process that says so
    data: the entry as bytes; of a name that is gone, why
    """

    owner: str
    name: str
    kind: str
    by: str
    data: bytes = b""


class RunNote(msgspec.Struct):
    """A run as another process may read it: its captures stay with the process that ran it.

    ids: by bank key the token ids of its conditions
    """

    key: str
    prompt_token_ids: list[int]
    max_tokens: int
    text: str | None
    bound: BoundProgram
    ids: dict[str, list[float]]
    program: str
    token_ids: list[int]
    answer: str
    finish_reason: str | None
    cached_tokens: int
    chat: Chat | None
    images: list[list[int]]


class Journal:
    """One process's way to the others."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._seen = engine, 0
        self.by, self.is_shared = uuid.uuid4().hex, engine.api_processes > 1

    def say(self, owner: str, name: str, kind: str, data: bytes = b"") -> None:
        """Tells the others."""
        note = msgspec.msgpack.encode(Note(owner, name, kind, self.by, data))
        self._engine.say(f"{owner} {name}{' touched' if kind == 'touched' else ''}", note)

    async def news(self) -> list[Note]:
        """What others have said since the last time."""
        if not self.is_shared:
            return []
        self._seen, notes = await self._engine.said_since(self._seen)
        decoded = [msgspec.msgpack.decode(note, type=Note) for note in notes]
        return [note for note in decoded if note.by != self.by]


def pack_entry(name: str, entry: Vector | Means | Program) -> bytes:
    """A vector, means or a program as bytes."""
    return entry.to_json().encode() if isinstance(entry, Program) else to_bytes(name, entry)


def unpack_entry(kind: str, data: bytes) -> Vector | Means | Program:
    """What `pack_entry` packed."""
    return Program.from_json(data) if kind == "program" else from_bytes(data)


def pack_run(run: Run, request: Request) -> bytes:
    """A finished run as bytes, with the request that it is of."""
    assert request.bound is not None
    keys = {op.condition.ids for op in request.bound.ops if op.condition is not None}
    note = RunNote(
        run.key, run.prompt_token_ids, request.max_tokens, request.text, request.bound,
        {key: request.vectors[key].reshape(-1).tolist() for key in keys}, run.program.to_json(), run.token_ids,
        run.text, run.finish_reason, run.cached_tokens, request.chat, request.images,
    )  # fmt: skip
    return msgspec.msgpack.encode(note)


def unpack_run(data: bytes, lm: LM) -> Run:
    """The run, on this process's `lm`; dropping it frees nothing."""
    note = msgspec.msgpack.decode(data, type=RunNote)
    vectors = {key: np.array(ids, np.float32).reshape(1, -1) for key, ids in note.ids.items()}
    request = Request(
        note.key,
        note.prompt_token_ids,
        note.max_tokens,
        note.bound,
        vectors,
        text=note.text,
        chat=note.chat,
        images=note.images,
    )
    answer = Answer(note.token_ids, note.answer, None, {}, note.finish_reason, note.cached_tokens)
    return Run(lm, request, Program.from_json(note.program), answer, is_kept_elsewhere=True)
