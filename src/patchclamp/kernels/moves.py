"""Kernels that move bytes as they are: a launch takes the host a fraction of what PyTorch's copies do."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from patchclamp.kernels.launch import again

CHUNK = 1024  # words that a program puts in place at most
TOLD = tl.constexpr(3)  # words that say of a chunk where it belongs, where it lies and how long it is
MOVED = 2048  # numbers of 64 bits that a program moves

_ready: dict[tuple[str, int | None], Callable[..., None]] = {}


@triton.jit(do_not_specialize=["staging", "tables"])
def _place(staging, tables, BLOCK: tl.constexpr):
    staging, tables = staging.to(tl.pointer_type(tl.int32)), tables.to(tl.pointer_type(tl.int32))
    told, word = staging + TOLD * tl.program_id(0), tl.arange(0, BLOCK)
    # the host's memory, read over the bus, and anew whenever it was written
    to, at, many = (
        tl.load(told, cache_modifier=".cv"), tl.load(told + 1, cache_modifier=".cv"),
        tl.load(told + 2, cache_modifier=".cv"),
    )  # fmt: skip
    words = tl.load(staging + at + word, mask=word < many, cache_modifier=".cv")
    tl.store(tables + to + word, words, mask=word < many)


@triton.jit(do_not_specialize=["source", "to", "pairs"])
def _move(source, to, pairs, BLOCK: tl.constexpr):
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)  # said of the number, it would be forgotten
    to = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = number < pairs.to(tl.int64) * 2
    tl.store(to + number, tl.load(source + number, mask=inside), mask=inside)


def place(staging: torch.Tensor, tables: torch.Tensor, chunks: int) -> None:
    """Brings `chunks` runs of 32-bit words from pinned memory into `tables`, on the current stream.

    `staging` int32 begins with three words for each: where in `tables` it belongs, where in `staging` it lies, and how
    many words it has, `CHUNK` at most.  Whoever calls holds it, and leaves it as it is, until the device has read it.
    """
    _launch("place", _place, tables.device.index, chunks, (staging.data_ptr(), tables.data_ptr()), CHUNK)


def move(source: torch.Tensor, begin: int, to: torch.Tensor, at: int, size: int) -> None:
    """Copies `size` bytes, and what is missing to a multiple of 16, from byte `begin` of `source` to byte `at` of `to`,
    on their device's current stream. `begin` and `at` are multiples of 16, as are the addresses of both tensors."""
    pairs = -(-size // 16)
    ends = source.data_ptr() + begin, to.data_ptr() + at
    _launch("move", _move, to.device.index, -(-2 * pairs // MOVED), (*ends, pairs), MOVED)


def warm(device: torch.device) -> None:
    """Has both kernels compiled and at hand, rather than in the first step that needs them."""
    words, staging = torch.zeros(16, dtype=torch.int32, device=device), torch.zeros(16, dtype=torch.int32).pin_memory()
    place(staging, words, 1)
    move(words, 0, words, 32, 32)
    torch.cuda.synchronize(device)


def _launch(
    name: str, kernel: Any, device: int | None, programs: int, args: tuple[int, ...], constant: int
) -> None:  # fmt: skip
    launch = _ready.get((name, device))
    if launch is not None:
        launch(programs, *args)  # of the types that they had the first time: 64 bits for addresses, 32 for numbers
        return
    launched = kernel[programs,](*args, constant)
    if launched is not None:  # Triton's interpreter has none
        _ready[name, device] = again(launched, (), (constant,), device)
