"""One vector, or the means under one name, as the bytes of a safetensors file: what a server's bank takes and gives.

The file is that of `store.named`, with one tensor in it, whatever its name: [D] or [n, D], of floating point. Bytes
come from anybody: what they say of themselves is checked before anything is made of it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError
from patchclamp.language import Vector
from patchclamp.store.named import Means, entry_of_tensor

MAX_HEADER_BYTES = 1 << 20  # a name, a shape, and a ref for each row of means
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def to_bytes(name: str, entry: Vector | Means) -> bytes:
    """A vector or means as a file with one tensor of that name."""
    from safetensors.numpy import save

    if isinstance(entry, Vector):
        return save({name: entry.array()})
    rows = np.stack([row.array() for row in entry.rows.values()])
    return save({name: rows}, {"means": json.dumps({name: list(entry.rows)})})


def from_bytes(data: bytes) -> Vector | Means:
    """The vector, or the means, of a file. Raises `ProgramError`, and `ShapeError` for a tensor that is neither."""
    name, tensor, metadata = _header(data)
    if len(tensor.shape) not in (1, 2) or min(tensor.shape) < 1:
        raise ShapeError(f"a vector is [D] or [n, D] and not empty; this one is {tensor.shape}"[:400])
    if tensor.dtype not in DTYPES:
        raise ShapeError(f"a vector is of {', '.join(DTYPES)}, not {tensor.dtype}"[:400])
    try:
        means = msgspec.json.decode(metadata.get("means", "{}"), type=dict[str, list[str]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProgramError(f"its metadata: {error}") from None
    if means.keys() - {name} or "programs" in metadata:
        raise ProgramError("its metadata speaks of more than the one tensor: a body has one vector, or means")
    return entry_of_tensor(_numbers(data, tensor), means.get(name))


def _header(data: bytes) -> tuple[str, _Tensor, dict[str, str]]:
    """The name of the one tensor, what the file says of it, and the file's metadata."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ProgramError("this is no safetensors file: it ends before its header does")
    if size > MAX_HEADER_BYTES:
        raise ProgramError(f"a header of {size} bytes, and one of at most {MAX_HEADER_BYTES} is read")
    try:
        header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        if len(header) != 1:
            raise ProgramError(f"a body has one vector, or means: one tensor, not {len(header)}")
        [(name, described)] = header.items()
        return name, msgspec.json.decode(described, type=_Tensor), metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProgramError(f"this is no safetensors file: {error}"[:400]) from None


def _numbers(data: bytes, tensor: _Tensor) -> np.ndarray:
    """The numbers of the one tensor. Their shape and their bytes agree, or safetensors says why not."""
    from safetensors import SafetensorError, deserialize

    try:
        [(_, checked)] = deserialize(data)
    except (SafetensorError, ValueError) as error:
        raise ProgramError(f"this is no safetensors file: {error}"[:400]) from None
    numbers: Any = np.frombuffer(checked["data"], DTYPES[tensor.dtype])
    if tensor.dtype == "BF16":
        numbers = (numbers.astype("<u4") << 16).view("<f4")
    return numbers.reshape(tensor.shape)


def numbers_of_json(data: bytes) -> Vector:
    """A vector from the JSON of a list of numbers, or of a list of such lists. Raises as `from_bytes`."""
    nested = data.lstrip()[1:].lstrip().startswith(b"[")
    try:
        return Vector.of(msgspec.json.decode(data, type=list[list[float]] if nested else list[float]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProgramError(f"a list of numbers, or of such lists, is needed: {error}"[:400]) from None
    except PatchclampError as error:
        raise type(error)(error.message[:400]) from None
