"""A copy kernel whose launch takes a fraction of the host time of a PyTorch copy."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from patchclamp.kernels import switches
from patchclamp.kernels.relaunch import relauncher

CHUNK = 1024  # maximum words per chunk, which one Triton program copies
HEADER_WORDS = tl.constexpr(3)  # per chunk: its offset in the tables, its offset in staging, its length

_ready: dict[tuple[str, int | None], Callable[..., None]] = {}


@triton.jit(do_not_specialize=["staging", "tables"])
def _upload(staging, tables, BLOCK: tl.constexpr):
    staging, tables = staging.to(tl.pointer_type(tl.int32)), tables.to(tl.pointer_type(tl.int32))
    header, word = staging + HEADER_WORDS * tl.program_id(0), tl.arange(0, BLOCK)
    # ".cv" reads host memory past the caches, since the host writes it between launches
    to, at, count = (
        tl.load(header, cache_modifier=".cv"), tl.load(header + 1, cache_modifier=".cv"),
        tl.load(header + 2, cache_modifier=".cv"),
    )  # fmt: skip
    words = tl.load(staging + at + word, mask=word < count, cache_modifier=".cv")
    tl.store(tables + to + word, words, mask=word < count)


def upload(staging: torch.Tensor, tables: torch.Tensor, chunks: int) -> None:
    """Copy `chunks` chunks of 32-bit words from pinned memory into `tables`, on the current stream.

    staging: int32, starts with three words per chunk: its offset in `tables`, its offset in `staging`, and its length
        in words, at most `CHUNK`. Must stay unchanged until the device has read it
    """
    if switches.enabled("pinned_upload"):
        try:
            _launch("upload", _upload, tables.device.index, chunks, (staging.data_ptr(), tables.data_ptr()), CHUNK)
            return
        except Exception as error:  # Triton and the driver may raise anything
            switches.give_up("pinned_upload", error)
    copy_chunks(staging, tables, chunks)


def copy_chunks(staging: torch.Tensor, tables: torch.Tensor, chunks: int) -> None:
    """Do the same as `upload`, with one torch copy per chunk."""
    for to, at, count in staging[: 3 * chunks].view(-1, 3).tolist():
        tables[to : to + count].copy_(staging[at : at + count], non_blocking=True)


def warm(device: torch.device) -> None:
    """Compile the upload kernel ahead of the first step that needs it."""
    words, staging = torch.zeros(16, dtype=torch.int32, device=device), torch.zeros(16, dtype=torch.int32).pin_memory()
    upload(staging, words, 1)
    torch.cuda.synchronize(device)


def _launch(name: str, kernel: Any, device: int | None, programs: int, args: tuple[int, ...], constant: int) -> None:
    launch = _ready.get((name, device))
    if launch is not None:
        launch(programs, *args)  # types as in the first launch: 64 bits for addresses, 32 for numbers
        return
    launched = kernel[programs,](*args, constant)
    if launched is not None:  # None in Triton's interpreter
        _ready[name, device] = relauncher(launched, (), (constant,), device)
