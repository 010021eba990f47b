"""A run's captures as a file: safetensors with a tensor for each site that was asked for.

tensors     by site, as in "resid_post[3]", what `run[site]` gives, in the dtype of the capture; of a capture among
            the edits by its path, as in "edits[0] resid_post[3]"
metadata    `positions`: JSON, by tensor the position of each row; `prompt_token_ids` and `token_ids`: JSON
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import numpy as np

from patchclamp.engines.base import Wanted
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.language import Capture
from patchclamp.run import Layout, Run
from patchclamp.serve.flow import PART_BYTES, File, Tensor, Window, bytes_of, constant, cut


def captured_names(run: Run) -> list[str]:
    """What a run's file has."""
    return list(dict(_names(run)))


def captured_file(run: Run) -> bytes:
    """The file's bytes, of captures that are small. Waits for the engine."""
    keys, file = dict(_names(run)), file_of(run)
    return b"".join(
        [file.header, *(bytes_of(run.read(keys[tensor.name], copy=False)).tobytes() for tensor in file.tensors)]
    )


def file_of(run: Run) -> File:
    """The file, to be sent as it is read."""
    layouts = {name: run.layout(key) for name, key in _names(run)}
    tensors = [Tensor(name, each.dtype, each.shape, _windows(run, each)) for name, each in layouts.items()]
    positions = json.dumps({name: each.positions.tolist() for name, each in layouts.items()})
    ids = {"prompt_token_ids": json.dumps(run.prompt_token_ids), "token_ids": json.dumps(run.token_ids)}
    return File.of(tensors, {"positions": positions, **ids})


def _windows(run: Run, layout: Layout) -> Iterator[Window]:
    """The rows, cut at positions: of each op that captured them, what it has between two cuts is read."""
    positions = np.unique(np.concatenate([stored.positions for stored in layout.stored])).tolist()
    row_bytes = 4 * run.width_at(layout.ref.point) * len(layout.stored)
    for begin, end in cut(len(positions), row_bytes):
        first, stop = positions[begin], positions[end - 1] + 1
        wanted = [(run.key, layout.ref.point, each.op, *each.between(first, stop)) for each in layout.stored]
        yield Window(
            wanted, row_bytes * (end - begin),
            lambda captured, first=first, stop=stop: run.rows_between(layout, first, stop, captured),
        )  # fmt: skip


async def numbered_file(engine: AsyncEngine, wanted: list[Wanted]) -> File:
    """Positions and rows of what is wanted of an engine, by their numbers there, as `engines.wire` says. What is little
    is read together with its sizes."""
    rows = PART_BYTES // max(1, sum(4 * engine.sites.points[point].width for _, point, _ in wanted))
    measured, first = await asyncio.gather(
        engine.measure(wanted), engine.fetch_windows([(*each, 0, rows) for each in wanted] if rows else [])
    )
    tensors: list[Tensor] = []
    for i, stored in enumerate(measured):
        count, dtype = len(stored.positions), str(stored.dtype).removeprefix("torch.")
        windows = constant(first[i][1]) if count <= rows else _numbered(wanted[i], count, 4 * stored.width)
        tensors.append(Tensor(f"{i} positions", "int64", (count,), constant(stored.positions)))
        tensors.append(Tensor(f"{i} rows", dtype, (count, stored.width), windows))
    return File.of(tensors)


def _numbered(wanted: Wanted, count: int, row_bytes: int) -> Iterator[Window]:
    for begin, end in cut(count, row_bytes):
        yield Window([(*wanted, begin, end)], row_bytes * (end - begin), lambda captured: captured[0][1])


def _names(run: Run) -> Iterator[tuple[str, str]]:
    """The name of each tensor, and what `run[...]` calls it."""
    for path, op in run.program.ops:
        if isinstance(op, Capture):
            among_edits = path.startswith("edits")
            refs = run.refs(op.at)
            for ref in refs:
                yield (f"{path} {ref}", path if len(refs) == 1 else ref) if among_edits else (ref, ref)
