"""Tensor formats: safetensors, a capture chunk's table, and row dtypes.

A safetensors file has three parts: the header's length, 8 bytes, little-endian; the header, JSON that may end in
spaces; and the tensors' bytes. The safetensors package handles whole files. This module handles files that are written
or read in pieces, and bfloat16, which NumPy lacks: an array holds its 16 bits as uint16.

Torch is imported only when needed, because planners import this module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch

ARRAYS = {name: np.dtype(kind) for name, kind in (
    ("int64", "<i8"), ("float64", "<f8"), ("float32", "<f4"), ("float16", "<f2"), ("bfloat16", "<u2"))}  # fmt: skip
CODES = {"int64": "I64", "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = {code: name for name, code in CODES.items()}


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's entry in a header. data_offsets: begin and end of its bytes, from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """A parsed header. size: its length in bytes, including the 8 bytes for the length."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    size: int


def bytes_in(dtype: str, shape: Sequence[int]) -> int:
    """Return a tensor's size in bytes."""
    return ARRAYS[dtype].itemsize * math.prod(shape)


def write_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None, size: int = 0
) -> bytes:
    """Return a header for tensors (dtype and shape by name), in the order of their bytes, padded to `size` bytes (0: a
    multiple of 8). Raises `ValueError` if it is longer than `size`."""
    sizes = [bytes_in(dtype, shape) for dtype, shape in tensors.values()]
    offsets = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for (name, (dtype, shape)), data_offsets in zip(tensors.items(), offsets, strict=True):
        entries[name] = TensorEntry(CODES[dtype], tuple(shape), data_offsets)
    text = msgspec.json.encode(entries)
    length = size - 8 if size else -(-len(text) // 8) * 8
    if len(text) > length:
        raise ValueError(f"expected a header of at most {length} bytes, got {len(text)}")
    return length.to_bytes(8, "little") + text.ljust(length)


def parse_header(data: bytes | bytearray) -> Header:
    """Parse the beginning of a safetensors file. Raises `ValueError` for other data."""
    end = header_size(data)
    if len(data) < max(end, 8):
        raise ValueError("the file ends within its header")
    try:
        entries = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return Header(tensors, metadata, end)


def header_size(data: bytes | bytearray) -> int:
    """Return the header's size, including the 8 bytes that hold its length."""
    return 8 + int.from_bytes(data[:8], "little")


def read_header(path: Path) -> Header:
    """Read a file's header. Raises `ValueError` if it is invalid, `OSError` if the file is unreadable."""
    with path.open("rb") as file:
        first = file.read(8)
        return parse_header(first + file.read(min(header_size(first) - 8, path.stat().st_size)))


def with_sorted_header(data: bytes) -> bytes:
    """Return the same file with a sorted header, so that equal content has equal bytes. The safetensors package orders
    metadata differently in each process."""
    end = header_size(data)
    header = msgspec.json.encode(msgspec.json.decode(data[8:end]), order="sorted").ljust(end - 8)
    assert len(header) == end - 8
    return data[:8] + header + data[end:]


def to_dtype(rows: Any, dtype: str) -> np.ndarray:
    """Convert rows, a floating-point tensor or array, to an array of `dtype`, with rounding."""
    if not isinstance(rows, np.ndarray):
        name = str(rows.dtype).removeprefix("torch.")
        if name == "bfloat16":
            import torch

            bits = rows.view(torch.int16).numpy().view(np.uint16)
            return bits if dtype == name else to_dtype(to_float32(bits, name), dtype)
        rows = rows.numpy()
    if dtype == "bfloat16":
        return to_bfloat16(rows.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):  # `overflowed` detects it
        return rows.astype(ARRAYS[dtype], copy=False)


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, as uint16 bits; NaN stays NaN."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(rows), np.uint16(0x7FC0), rounded)


def to_float32(rows: np.ndarray, dtype: str, out: np.ndarray | None = None) -> np.ndarray:
    """Convert rows of `dtype` to float32, into `out` if given."""
    out = np.empty(rows.shape, np.float32) if out is None else out
    if dtype == "bfloat16":
        np.left_shift(rows, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = rows
    return out


def merged(parts: list[tuple[np.ndarray, torch.Tensor | np.ndarray]]) -> tuple[np.ndarray, torch.Tensor]:
    """Merge the positions and rows of several ops. For equal positions, the later op wins."""
    import torch

    last: dict[int, tuple[int, int]] = {}
    for part, (positions, _) in enumerate(parts):
        last |= {int(position): (part, row) for row, position in enumerate(positions)}
    dtypes = {str(rows.dtype) for _, rows in parts}
    tensors = [torch.as_tensor(rows) if len(dtypes) == 1 else torch.as_tensor(rows).float() for _, rows in parts]
    rows = [tensors[part][row] for _, (part, row) in sorted(last.items())]
    return np.array(sorted(last), np.int64), torch.stack(rows) if rows else tensors[0][:0]


def cast(rows: torch.Tensor | np.ndarray, dtype: str) -> torch.Tensor:
    """Convert rows to a dtype given by name, such as "float16"."""
    import torch

    return torch.as_tensor(rows).to(getattr(torch, dtype))


def overflowed(rows: torch.Tensor | np.ndarray) -> int | None:
    """Return the index of the first row with an infinity, or None. Checks only float16 rows, on the host."""
    if str(rows.dtype).removeprefix("torch.") != "float16":
        return None
    bits = np.ascontiguousarray(rows).view(np.uint16)
    infinite = np.flatnonzero((bits & 0x7FFF) == 0x7C00)
    return int(infinite[0]) // (bits.size // len(bits)) if len(infinite) else None


# -- the table of a capture chunk


SELF_CHECK = -1  # the ordinal of rows that a worker keeps to check a run's labels
PROBE = 1 << 20  # added to a probe's ordinal, to separate its products from the site's rows
CAPTURED = np.dtype(
    [
        ("run", "<i8"),        # the run's number
        ("point", "<i4"),
        ("op", "<i4"),         # the op's ordinal in its program
        ("position", "<i4"),   # the first position in the first step; it grows by one per step
        ("count", "<i4"),      # consecutive positions, the same in every step
        ("offset", "<i8"),     # the rows' offset in a step's bytes
        ("row_bytes", "<i4"),
        ("dtype", "<i4"),      # index into `language.values.DTYPES`
        ("pool", "<i4"),       # the row's reduction, as in `Keep.pool`; 0: none
        ("pooled", "<i4"),     # the number of rows pooled into this one
        ("span", "<i4"),       # the number of positions from the first of these rows to the last
    ]
)  # fmt: skip


class CapturedEntry(NamedTuple):
    """An entry of the table, as Python integers."""

    run: int
    point: int
    op: int
    position: int
    count: int
    offset: int
    row_bytes: int
    dtype: int
    pool: int
    pooled: int
    span: int


class CaptureSource(Protocol):
    """Builds a chunk's table lazily, because building it within a step is too slow for a wide batch."""

    def bytes_of_runs(self) -> dict[int, int]:
        """Return each run's bytes per step, by run number."""
        ...

    def table(self) -> np.ndarray:
        """Return the captures of a step as `CAPTURED` records, ascending by run number."""
        ...
