"""Where the tensors lie that a CUDA graph reads: recorded by path when it is, compared whenever it is replayed.

A graph reads the addresses it was recorded with.  A step that builds one of its inputs anew, instead of filling it in
place, replays on old numbers without an error; with PATCHCLAMP_CHECK_ADDRESSES=1 that is an error which names them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from patchclamp.errors import AddressMoved

VARIABLE = "PATCHCLAMP_CHECK_ADDRESSES"
MAX_DEPTH = 8


def wanted() -> bool:
    """Whether addresses are to be checked, from the environment."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def addresses(value: Any, path: str, device: str = "cuda") -> dict[str, int]:
    """The address of every tensor on a kind of device within a value, by its path: `args[0]`,
    `attn_metadata['model.layers.0'].block_table`. Empty tensors, which have none, are left out."""
    return dict(_walk(value, path, device, 0))


def _walk(value: Any, path: str, device: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == device and value.numel():
            yield path, value.data_ptr()
    elif depth < MAX_DEPTH:
        for name, inner in _inside(value):
            yield from _walk(inner, path + name, device, depth + 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", inner) for i, inner in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)


def compare(then: Mapping[str, int], now: Mapping[str, int], what: str) -> None:
    """Raises `AddressMoved`, with the paths, if a graph recorded with `then` would not read what a step built `now`."""
    if then == now:
        return
    kinds = {
        "missing": [path for path in then if path not in now],
        "added": [path for path in now if path not in then],
        "changed": [path for path, address in now.items() if then.get(path, address) != address],
    }
    changes = "; ".join(f"{kind}: {', '.join(sorted(paths))}" for kind, paths in kinds.items() if paths)
    raise AddressMoved(f"the CUDA graph of {what} reads other memory than this step filled. {changes}")
