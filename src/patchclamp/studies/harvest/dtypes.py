"""The dtypes in which rows are stored, as NumPy has them: bfloat16, which it lacks, as its 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

STORED = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def stored(rows: Any, dtype: str) -> np.ndarray:
    """Rows as they are stored in `dtype`: a tensor or an array of `dtype`, or of float32, which is rounded."""
    if isinstance(rows, np.ndarray):
        return _rounded(rows, dtype)
    name = str(rows.dtype).removeprefix("torch.")
    if name == "bfloat16":
        import torch

        rows = rows.view(torch.int16)
        array = rows.numpy().view(np.uint16)
        return array if dtype == name else _rounded(as_float32(array, name), dtype)
    return _rounded(rows.numpy(), dtype)


def _rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # `store.joined.overflowed` finds it
        return to_bfloat16(rows.astype(np.float32, copy=False)) if dtype == "bfloat16" else rows.astype(
            STORED[dtype], copy=False)  # fmt: skip


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
    """float32 to the 16 bits of the nearest bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(rows), np.uint16(0x7FC0), rounded)


def as_float32(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Stored rows as float32, in memory of their own."""
    wide = np.empty(rows.shape, np.float32)
    put_float32(rows, dtype, wide)
    return wide


def put_float32(rows: np.ndarray, dtype: str, wide: np.ndarray) -> None:
    """Puts stored rows as float32 into `wide`, of their shape."""
    if dtype == "bfloat16":
        np.left_shift(rows, np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32)
    else:
        wide[...] = rows
