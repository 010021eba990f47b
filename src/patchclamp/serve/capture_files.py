"""A run's captures as a safetensors file, generated while it is sent, with one tensor per captured site.

tensors     `run[site]` in the dtype of the capture, named by site, such as "resid_post[3]"; for a capture among the
            edits also by path, such as "edits[0] resid_post[3]"; `run.probes[name]` as "probe NAME"
metadata    `positions`: JSON, the position of each row by tensor; `prompt_token_ids` and `token_ids`: JSON

The header can be sent first, because the captured positions are known in advance. The tensors follow, read from the
engine a few MiB at a time to bound the server's memory use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from patchclamp.engines import base
from patchclamp.engines.base import Captured, Wanted
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.errors import PatchclampError
from patchclamp.language import Capture
from patchclamp.run import Layout, Run
from patchclamp.store.tensors import ARRAYS, bytes_in, write_header

if TYPE_CHECKING:
    import torch

PART_BYTES = 1 << 21  # of the rows read at once, but always at least one row
PROBE_OF = "probe "  # prefix of the name of a probe's tensor
MAX_LINE = 1 << 18  # characters per line of an event stream, because readers limit them
SENT_BYTES = 1 << 18  # passed to the connection per call, because it copies them
Fetch = Callable[[list[base.Window]], Awaitable[list[Captured]]]


class FileWindow(NamedTuple):
    """Consecutive rows of a tensor: the engine windows to fetch, their size in bytes, and a function that converts them
    to rows."""

    wanted: list[base.Window]
    size: int
    rows: Callable[[list[Captured]], Any]


class FileTensor(NamedTuple):
    """A tensor of the file, with its rows in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    windows: Iterable[FileWindow]

    @property
    def nbytes(self) -> int:
        return bytes_in(self.dtype, self.shape)


class File(NamedTuple):
    """A file's header, its total size in bytes, and its tensors in file order."""

    header: bytes
    size: int
    tensors: list[FileTensor]

    @classmethod
    def of(cls, tensors: Iterable[FileTensor], metadata: dict[str, str] | None = None) -> File:
        ordered = sorted(tensors, key=lambda tensor: -ARRAYS[tensor.dtype].itemsize)  # aligns each to its item size
        header = write_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in ordered}, metadata)
        return cls(header, len(header) + sum(tensor.nbytes for tensor in ordered), ordered)

    async def parts(self, fetch: Fetch) -> AsyncIterator[bytes | memoryview]:
        """Yield the file's bytes. The first rows are fetched before the header is yielded, so errors are raised before
        anything is sent."""
        before = self.header
        for batch in _batches(window for tensor in self.tensors for window in tensor.windows):
            wanted = [each for window in batch for each in window.wanted]
            captured = iter(await fetch(wanted) if wanted else [])
            for window in batch:
                some = list(itertools.islice(captured, len(window.wanted)))
                rows = (await asyncio.to_thread(_rows, window, some)).data
                if before:
                    yield before
                    before = b""
                for begin in range(0, len(rows), SENT_BYTES):
                    yield rows[begin : begin + SENT_BYTES]
        if before:
            yield before


def _rows(window: FileWindow, captured: list[Captured]) -> np.ndarray:
    """Return a window's bytes. Runs off the event loop's thread, because many windows take a long time."""
    return bytes_of(window.rows(captured))


def _batches(windows: Iterable[FileWindow]) -> Iterator[list[FileWindow]]:
    """Group small windows into batches of at most `PART_BYTES`, each read in one call."""
    batch: list[FileWindow] = []
    for window in windows:
        if batch and sum(each.size for each in batch) + window.size > PART_BYTES:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def cut(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Split `count` rows into half-open ranges of at most `PART_BYTES`, with at least one row each."""
    step = max(1, PART_BYTES // max(1, row_bytes))
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))


def constant(array: torch.Tensor | np.ndarray) -> list[FileWindow]:
    """Return a single window with an array that is already in memory."""
    return [FileWindow([], array.nbytes, lambda captured: array)]


def bytes_of(rows: Any) -> np.ndarray:
    """Return the bytes of an array or a tensor."""
    import torch

    return torch.as_tensor(rows).contiguous().reshape(-1).view(torch.uint8).numpy()


def finite(numbers: Any) -> Any:
    """Replace the non-finite numbers in nested lists by None, for JSON."""
    if isinstance(numbers, list):
        return [finite(each) for each in numbers]
    return numbers if math.isfinite(numbers) else None


def data_event(data: Any) -> str:
    """Encode a server-sent event's data, split into lines of bounded length, which readers join."""
    text = json.dumps(data)
    if len(text) >= MAX_LINE - 16:
        text = json.dumps(data, indent=0).replace("\n", "\ndata: ")
    return f"data: {text}\n\n"


class FileResponse(StreamingResponse):
    """Sends a file. If its remaining rows are no longer available, the connection closes before Content-Length is
    reached."""

    def __init__(self, file: File, parts: AsyncIterator[Any], failed: Callable[[PatchclampError], None]) -> None:
        headers = {"Content-Length": str(file.size)}
        super().__init__(parts, headers=headers, media_type="application/octet-stream")
        self._failed = failed

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        except PatchclampError as error:
            self._failed(error)


class StoppedResponse(StreamingResponse):
    """Streams a task's results and stops the task at the end, even if the client disconnected before the first result.

    The stream is closed explicitly, because the garbage collector may take minutes to free its captures.
    """

    def __init__(self, stop: Callable[[], None], parts: AsyncGenerator[Any, None], media_type: str) -> None:
        super().__init__(parts, media_type=media_type)
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: Any = self.body_iterator
        async with contextlib.AsyncExitStack() as ended:
            ended.callback(self._stop)
            ended.push_async_callback(parts.aclose)
            await super().__call__(scope, receive, send)


async def answer(file: File, fetch: Fetch, failed: Callable[[PatchclampError], None]) -> FileResponse:
    """Return the response that sends a file. Raises the error if its first rows cannot be read."""
    parts = file.parts(fetch)
    first = await anext(parts)

    async def body() -> AsyncIterator[Any]:
        yield first
        async for part in parts:
            yield part

    return FileResponse(file, body(), failed)


def captured_names(run: Run) -> list[str]:
    """Return the names of the tensors in a run's file."""
    return [*dict(_names(run)), *(PROBE_OF + name for name in run.probes)]


def captured_file(run: Run) -> bytes:
    """Return a run's complete file, for small captures. Blocks until the engine has sent them."""
    keys, file = dict(_names(run)), file_of(run)
    rows = (
        run.read(keys[name], copy=False) if (name := tensor.name) in keys else run.probes[name.removeprefix(PROBE_OF)]
        for tensor in file.tensors
        if tensor.nbytes
    )
    return b"".join([file.header, *(bytes_of(each).tobytes() for each in rows)])


def file_of(run: Run) -> File:
    """Return a run's file. Its rows are fetched while it is sent."""
    layouts = {name: run.layout(key) for name, key in _names(run)}
    tensors = [FileTensor(name, each.dtype, each.shape, _windows(run, each)) for name, each in layouts.items()]
    at = {name: each.positions.tolist() for name, each in layouts.items()}
    for name in run.probes:
        keys, read, shape = run.probe_layout(name)
        at[PROBE_OF + name] = read.tolist()
        windows = [] if 0 in shape else [_probe_window(run, name, keys, shape)]
        tensors.append(FileTensor(PROBE_OF + name, "float32", shape, windows))
    positions = json.dumps(at)
    ids = {"prompt_token_ids": json.dumps(run.prompt_token_ids), "token_ids": json.dumps(run.token_ids)}
    return File.of(tensors, {"positions": positions, **ids})


def _windows(run: Run, layout: Layout) -> Iterator[FileWindow]:
    """Yield windows of consecutive positions. Each window reads its positions from every op that captured the site."""
    positions = np.unique(np.concatenate([stored.positions for stored in layout.stored])).tolist()
    row_bytes = 4 * run.width_at(layout.ref.point) * len(layout.stored)
    for begin, end in [(0, len(positions))] if layout.pool and positions else cut(len(positions), row_bytes):
        first, stop = positions[begin], positions[end - 1] + 1
        wanted = [(run.key, layout.ref.point, each.op, 0, *each.between(first, stop)) for each in layout.stored]
        yield FileWindow(
            wanted, row_bytes * (end - begin),
            lambda captured, first=first, stop=stop: run.rows_between(layout, first, stop, captured),
        )  # fmt: skip


def _probe_window(run: Run, name: str, keys: list[tuple[int, int]], shape: tuple[int, ...]) -> FileWindow:
    """Return a single window for all results of a probe, because they are small."""

    def rows(captured: list[Captured]) -> torch.Tensor:
        run.take_fetched(dict(zip(keys, captured, strict=True)))
        return run.probed(name)

    return FileWindow([(run.key, *key, 0, 0, run.positions_computed) for key in keys], bytes_in("float32", shape), rows)


async def numbered_file(engine: AsyncEngine, wanted: list[Wanted]) -> File:
    """Return a file of captured positions and rows, named by their index in `wanted` (`engines.wire`). Small captures
    are read together with their sizes."""
    rows = PART_BYTES // max(1, sum(4 * engine.sites.points[point].width for _, point, *_ in wanted))
    measured, first = await asyncio.gather(
        engine.measure(wanted), engine.fetch_windows([each.window(0, rows) for each in wanted] if rows else [])
    )
    tensors: list[FileTensor] = []
    for i, stored in enumerate(measured):
        count, dtype = len(stored.positions), str(stored.dtype).removeprefix("torch.")
        windows = constant(first[i][1]) if count <= rows else _numbered(wanted[i], count, 4 * stored.width)
        tensors.append(FileTensor(f"{i} positions", "int64", (count,), constant(stored.positions)))
        tensors.append(FileTensor(f"{i} rows", dtype, (count, stored.width), windows))
    return File.of(tensors)


def _numbered(wanted: Wanted, count: int, row_bytes: int) -> Iterator[FileWindow]:
    for begin, end in cut(count, row_bytes):
        yield FileWindow([wanted.window(begin, end)], row_bytes * (end - begin), lambda captured: captured[0][1])


def _names(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor, and its key in `run[...]`."""
    for path, op in run.program.ops:
        if isinstance(op, Capture):
            among_edits = path.startswith("edits")
            refs = run.refs(op.at)
            for ref in refs:
                yield (f"{path} {ref}", path if len(refs) == 1 else ref) if among_edits else (ref, ref)
