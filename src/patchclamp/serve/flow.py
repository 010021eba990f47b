"""Captures on their way to a client: a safetensors file that is made as it is sent.

Its header comes first, since the positions that a run captured are known. Then each tensor's bytes, which are read from
the engine a few MiB at a time: what a server holds of a file does not grow with the file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fastapi.responses import StreamingResponse

from patchclamp.engines import base
from patchclamp.engines.base import Captured
from patchclamp.errors import PatchclampError

if TYPE_CHECKING:
    import torch

PART_BYTES = 1 << 21  # of rows that are read at once, or one row
MAX_LINE = 1 << 18  # characters of a line of a stream of events: readers have limits of their own
SENT_BYTES = 1 << 18  # that go to the connection at once, which copies them
CODES = {"int64": "I64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by dtype: safetensors' name
SIZES = {"int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
Fetch = Callable[[list[base.Window]], Awaitable[list[Captured]]]


class Window(NamedTuple):
    """Rows of a tensor that follow one another: what is wanted of the engine for them, how many bytes that is, and what
    makes the rows of it."""

    wanted: list[base.Window]
    size: int
    rows: Callable[[list[Captured]], Any]


class Tensor(NamedTuple):
    """A tensor of the file, and its rows in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    windows: Iterable[Window]

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


class File(NamedTuple):
    """A file's header, how many bytes the file has, and its tensors in order of their bytes."""

    header: bytes
    size: int
    tensors: list[Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], metadata: dict[str, str] | None = None) -> File:
        ordered = sorted(tensors, key=lambda tensor: -SIZES[tensor.dtype])  # each begins at a multiple of its own
        ends = list(itertools.accumulate((tensor.nbytes for tensor in ordered), initial=0))
        described: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        for tensor, begin, end in zip(ordered, ends, ends[1:], strict=False):
            described[tensor.name] = {
                "dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]
            }  # fmt: skip
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, len(header) + ends[-1], ordered)

    async def parts(self, fetch: Fetch) -> AsyncIterator[bytes | memoryview]:
        """The file's bytes. The header comes with the first rows: what is wrong with them is raised before anything is
        sent."""
        before = self.header
        for batch in _batches(window for tensor in self.tensors for window in tensor.windows):
            wanted = [each for window in batch for each in window.wanted]
            captured = iter(await fetch(wanted) if wanted else [])
            for window in batch:
                some = list(itertools.islice(captured, len(window.wanted)))
                rows = await asyncio.to_thread(_rows, window, some)
                if before:
                    yield before
                    before = b""
                for part in sent(rows):
                    yield part
        if before:
            yield before


def _rows(window: Window, captured: list[Captured]) -> np.ndarray:
    """The bytes of a window, joined on another thread than the event loop's: one does not take long, a hundred do."""
    return bytes_of(window.rows(captured))


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Windows that are read together: little ones."""
    batch: list[Window] = []
    for window in windows:
        if batch and sum(each.size for each in batch) + window.size > PART_BYTES:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def cut(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows of so many bytes as half-open ranges, each of `PART_BYTES` or one row."""
    step = max(1, PART_BYTES // max(1, row_bytes))
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def constant(array: torch.Tensor | np.ndarray) -> list[Window]:
    """The rows of an array that is at hand."""
    return [Window([], array.nbytes, lambda captured: array)]


def bytes_of(rows: Any) -> np.ndarray:
    """The bytes of an array or a tensor."""
    import torch

    return torch.as_tensor(rows).contiguous().reshape(-1).view(torch.uint8).numpy()


def sent(rows: Any) -> Iterator[memoryview]:
    """The bytes of an array or a tensor, in pieces that go to the connection."""
    data = bytes_of(rows).data
    return (data[begin : begin + SENT_BYTES] for begin in range(0, len(data), SENT_BYTES))


def data_event(data: Any) -> str:
    """The data of a server-sent event, in several lines where one would be too long: a reader of events joins them."""
    text = json.dumps(data)
    if len(text) >= MAX_LINE - 16:
        text = json.dumps(data, indent=0).replace("\n", "\ndata: ")
    return f"data: {text}\n\n"


class FileResponse(StreamingResponse):
    """Sends a file. If the rest cannot be had any more the connection closes, and the client sees that the file is
    short."""

    def __init__(self, file: File, parts: AsyncIterator[Any], failed: Callable[[PatchclampError], None]) -> None:
        headers = {"Content-Length": str(file.size)}
        super().__init__(parts, headers=headers, media_type="application/octet-stream")
        self._failed = failed

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        except PatchclampError as error:
            self._failed(error)


async def answer(file: File, fetch: Fetch, failed: Callable[[PatchclampError], None]) -> FileResponse:
    """The response that sends a file. Raises what is wrong with its first rows."""
    parts = file.parts(fetch)
    first = await anext(parts)

    async def body() -> AsyncIterator[Any]:
        yield first
        async for part in parts:
            yield part

    return FileResponse(file, body(), failed)
