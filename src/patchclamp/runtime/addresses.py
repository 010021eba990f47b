"""The addresses of the tensors that a CUDA graph reads: noted when it is recorded, compared whenever it is replayed.

A graph reads the addresses that it was recorded with.  If a step builds an input anew, instead of filling it in place,
the graph reads old numbers, without an error.  With PATCHCLAMP_CHECK_ADDRESSES=1 that is an error, which names them.
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


def checked() -> bool:
    """Whether addresses are to be checked, by the environment."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def addresses(value: Any, path: str, device: str = "cuda") -> dict[str, int]:
    """The addresses of all tensors in a value that are on a kind of device, by their paths: `args[0]`,
    `attn_metadata['model.layers.0'].block_table`. Empty tensors are left out; they have no address."""
    return dict(_walk(value, path, device, 0))


def _walk(value: Any, path: str, device: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == device and value.numel():
            yield path, value.data_ptr()
    elif depth < MAX_DEPTH:
        for name, inner in _inside(value):
            yield from _walk(inner, path + name, device, depth + 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with what its path has in addition."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        yield from ((f".{names[i]}" if names else f"[{i}]", inner) for i, inner in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)


def compare(recorded: Mapping[str, int], filled: Mapping[str, int], graph: str) -> None:
    """Raises `AddressMoved`, with the paths, if a graph reads other addresses than a step has filled."""
    if recorded == filled:
        return
    kinds = {
        "missing": [path for path in recorded if path not in filled],
        "added": [path for path in filled if path not in recorded],
        "changed": [path for path, address in filled.items() if recorded.get(path, address) != address],
    }
    changes = "; ".join(f"{kind}: {', '.join(sorted(paths))}" for kind, paths in kinds.items() if paths)
    raise AddressMoved(f"the CUDA graph of {graph} reads other memory than this step filled. {changes}")
