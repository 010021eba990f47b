"""Queries and keys for attention patterns, captured from the arguments of Transformers' attention functions.

B requests of the batch · T tokens of a pass · S key columns, with padding · H query heads · K key/value heads
E head size
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from patchclamp.engines.generation import Passes
from patchclamp.kernels.attention import AttentionFacts, scores
from patchclamp.kernels.transfer import to_device
from patchclamp.runtime import Runtime
from patchclamp.runtime.taps import find
from patchclamp.sites import SiteMap
from patchclamp.sites.tables import ROTATED

WATCH = "_patchclamp_watch"  # of a module: called with query, key and options of its attention function


class DenseKeys:
    """Keys and values of layers whose attention programs read, kept until the pass ends (`runtime.attention.Keys`)."""

    def __init__(self, net: Any, sites: SiteMap, runtime: Runtime) -> None:
        self._runtime, self._points = runtime, dict[torch.nn.Module, int]()
        self.passes: Passes | None = None
        # by point: keys and values [B, K, S, E]
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor, AttentionFacts]] = {}
        for point, tap in sites.taps("transformers"):
            if point.kind == ROTATED:
                self._points[find(net, tap.module)] = point.number
        _wrap_attention_functions()

    def around(
        self, module: torch.nn.Module, name: Literal["query", "output"], tap: Callable[[torch.Tensor], None]
    ) -> None:
        """Hook an attention module: in passes where a program acts, call `tap` on its queries, [B, T, H · E]."""
        number, acts = self._points[module], self._runtime.acts_at

        def watch(
            query_BHTE: torch.Tensor, key_BKSE: torch.Tensor, value_BKSE: torch.Tensor, options: dict[str, Any]
        ) -> None:
            if acts(number):
                self._held[number] = key_BKSE, value_BKSE, _facts(query_BHTE, options)
                tap(query_BHTE.transpose(1, 2).flatten(2))

        vars(module)[WATCH] = watch  # freed with the module, which `watch` references through `self`

    def begin(self, passes: Passes) -> None:
        """Begin a pass."""
        self.passes = passes
        self._held.clear()

    def end(self) -> None:
        """End the pass, and release the keys and the cache."""
        self.passes = None
        self._held.clear()

    def facts(self, point: int) -> AttentionFacts:
        return self._held[point][2]

    def width(self, point: int) -> int:
        key_BKSE, *_ = self._held[point]
        return key_BKSE.shape[1] * key_BKSE.shape[3]

    def scores(
        self, point: int, slots: list[int], query_BNHE: torch.Tensor, position_BN: torch.Tensor, first: int,
        heads: int, count: int,
    ) -> torch.Tensor:  # fmt: skip
        key_BKSE, _, facts = self._held[point]
        return scores(query_BNHE, self._read(key_BKSE, slots, count), position_BN, facts, first, heads)

    def values(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        return self._read(self._held[point][1], slots, count)

    def _read(self, key_BKSE: torch.Tensor, slots: list[int], count: int) -> torch.Tensor:
        """Return the requests' keys or values at their first `count` positions, [requests, count, K, E]."""
        batch = self._runtime.continuity.batch
        assert batch is not None
        assert self.passes is not None
        slot, mask_BS = batch.slot.tolist(), self.passes.mask_BT
        index = to_device(np.array([slot.index(each) for each in slots]), key_BKSE.device)
        # padding columns have no position; a sliding-window cache has only the last columns
        column_BS = (~mask_BS[index].bool()).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
        column_BS = (column_BS - (mask_BS.shape[1] - key_BKSE.shape[2])).clamp(min=0)
        keys = key_BKSE[index].transpose(1, 2)
        return keys.take_along_dim(column_BS[:, :, None, None], 1)


def unread_attention(net: Any, sites: SiteMap) -> str:
    """Return the reason why attention cannot be read on this model; "" if it can."""
    if getattr(net.config.get_text_config(), "attention_chunk_size", None):
        return "its layers use chunked attention"
    module = next((find(net, tap.module) for point, tap in sites.taps("transformers") if point.kind == ROTATED), None)
    if module is not None and "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__code__.co_names:
        return f"{type(module).__name__} does not use Transformers' attention functions"
    return ""


def _facts(query_BHTE: torch.Tensor, options: dict[str, Any]) -> AttentionFacts:
    scale = options.get("scaling")
    return AttentionFacts(
        query_BHTE.shape[-1] ** -0.5 if scale is None else float(scale), float(options.get("softcap") or 0.0),
        int(options.get("sliding_window") or 0), None, options.get("s_aux"),
    )  # fmt: skip


@functools.cache
def _wrap_attention_functions() -> None:
    """Wrap Transformers' attention functions so that they first call a module's `WATCH` function, if it has one."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    choose = functions.get_interface

    def get_interface(*args: Any, **named: Any) -> Any:
        chosen = choose(*args, **named)

        @functools.wraps(chosen)
        def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **named: Any) -> Any:
            watch = vars(module).get(WATCH)
            if watch is not None:
                watch(query, key, value, named)
            return chosen(module, query, key, value, *args, **named)

        return attention

    functions.get_interface = get_interface
