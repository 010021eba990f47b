"""Arguments of every wrong kind, which the tables of wrong arguments try one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def objects() -> np.ndarray:
    return np.array([object(), None], dtype=object)


WRONG: dict[str, Any] = {
    "None": None, "1.5": 1.5, "-7": -7, "10**30": 10**30, "True": True, "nan": float("nan"), "text": "text", "empty text": "",
    "list": [1.5, "a"], "nested list": [[[1]]], "empty list": [], "dict": {1: 2}, "named dict": {"a": "b"}, "bytes": b"abc",
    "array": np.array([1.5, 2.5]), "objects": objects(), "engine": "transformers", "object": object(),
    "bf16": torch.ones(3, dtype=torch.bfloat16), "sparse": torch.eye(3).to_sparse(), "meta": torch.ones(3, device="meta"),
    "quantised": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "texts": ["1"], "booleans": [True], "bytes in a list": [b"1"], "dicts": [{1: 2}], "a set": {1, 2}, "a set of texts": {"a"},
    "boolean array": np.array([True, False]), "array of texts": np.array(["1"]), "NumPy's 1": np.int64(1), "NumPy's 1.5": np.float64(1.5),
    "NumPy's True": np.True_, "NumPy's text": np.str_("text"), "torch's 1": torch.tensor(1), "torch's True": torch.tensor(True),
    "masked": np.ma.masked, "masked array": np.ma.masked_array([1.0, 2.0], [True, False]), "date": np.datetime64("2020-01-01"),
    "complex": 1j, "slice": slice(0, 99), "slice of a boolean": slice(True, 2), "slice of a float": slice(0, 1.5), "range": range(99),
    "range as text": "0:99", "NUL": "a\0b", "surrogate": "\ud800", "generator function": lambda: None, "Ellipsis": ...,
}  # fmt: skip


def error_of(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None
