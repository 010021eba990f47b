"""Keys and values in vLLM's paged cache, for reading and editing attention patterns.

B requests · T key positions · K key/value heads · E head size · N positions per block · R blocks per table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patchclamp.errors import UnsupportedSite
from patchclamp.kernels.attention import AttentionFacts, scores
from patchclamp.kernels.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchclamp.kernels.paged_attention import PagedCache
    from patchclamp.runtime import Runtime
    from patchclamp.sites import SiteMap

LAYOUTS = ("vec", "vec16", "amx")  # of blocks on a CPU, read by `of_block`


class PagedKeys:
    """Keys and values of the requests in a runner's batch (`runtime.attention.Keys`)."""

    def __init__(self, runner: Any, kind: str, runtime: Runtime, sites: SiteMap) -> None:
        self._runner, self._kind, self._runtime = runner, kind, runtime
        self._modules = {
            point.number: tap.module for point, tap in sites.taps("vllm") if tap.moment in ("attention", "query")
        }
        self.is_output: np.ndarray = np.zeros(len(sites.points), bool)  # the points of attention outputs
        self.is_output[[point.number for point, tap in sites.taps("vllm") if tap.moment == "attention"]] = True
        self._layers: dict[int, tuple[Any, int]] = {}  # by point: the attention layer, and its cache group
        # by cache group: the block tables of a batch of cells while one is computed, [C, R]
        self.tables: Sequence[torch.Tensor] | None = None

    @property
    def are_readable(self) -> bool:
        """True if the keys of every attention layer can be read."""
        try:
            return all(self._layer(int(point)) for point in np.flatnonzero(self.is_output))
        except UnsupportedSite:
            return False

    def facts(self, point: int) -> AttentionFacts:
        layer, _ = self._layer(point)
        impl = layer.impl
        window = layer.sliding_window or 0
        return AttentionFacts(
            float(impl.scale), float(getattr(impl, "logits_soft_cap", None) or 0.0), window if window > 0 else 0,
            getattr(impl, "alibi_slopes", None), getattr(impl, "sinks", None),
        )  # fmt: skip

    def width(self, point: int) -> int:
        layer, _ = self._layer(point)
        return int(layer.num_kv_heads * layer.head_size)

    def scores(
        self, point: int, slots: list[int], query_BNHE: torch.Tensor, position_BN: torch.Tensor, first: int,
        heads: int, count: int,
    ) -> torch.Tensor:  # fmt: skip
        facts, cache_RKNE = self.facts(point), self._layer(point)[0].kv_cache
        if not cache_RKNE.is_cuda:
            return scores(query_BNHE, self._read(point, slots, count, 0), position_BN, facts, first, heads)
        from patchclamp.kernels.paged_attention import paged_scores

        keys = cache_RKNE[..., : query_BNHE.shape[-1]]
        return paged_scores(
            query_BNHE, keys, self._blocks(point, slots, count), position_BN, facts, first, heads, count
        )

    def values(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        return self._read(point, slots, count, 1)

    def cache(self, point: int) -> PagedCache:
        """Return the cache of the layer whose attention output is at a point. Raises `UnsupportedSite` if its scores
        cannot be recomputed, and before the cache is allocated."""
        from patchclamp.kernels.paged_attention import PagedCache

        layer, group = self._layer(point)
        block_BR, of_manager = self._table(group, self._runner.max_num_reqs if self._kind == "v1" else 0)
        key_RKNE, value_RKNE = layer.kv_cache.split(layer.head_size, -1)
        return PagedCache(key_RKNE, value_RKNE, block_BR, of_manager // key_RKNE.shape[2], self.facts(point))

    def _blocks(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        """Return the requests' block tables for their first `count` positions, [B, R]."""
        layer, group = self._layer(point)
        size, batch = layer.kv_cache.shape[2], self._runtime.continuity.batch
        assert batch is not None
        rows = {slot: n for n, slot in enumerate(batch.slot.tolist())}
        table, of_manager = self._table(group, len(batch.slot) if self._kind == "v1" else 0)
        index = to_device(np.array([rows[slot] for slot in slots]), table.device)  # does not wait for kernels
        ratio = of_manager // size  # kernel blocks per block of the table
        block_BR = table[index, : -(-count // of_manager)]
        if ratio > 1:
            block_BR = (block_BR[..., None] * ratio + torch.arange(ratio, device=table.device)).flatten(1)
        return block_BR[:, : -(-count // size)]

    def _read(self, point: int, slots: list[int], count: int, part: int) -> torch.Tensor:
        """Return keys (part 0) or values (part 1) of the requests' first `count` positions, [B, T, K, E]."""
        layer, _ = self._layer(point)
        cache_RKNE, blocks = layer.kv_cache, self._blocks(point, slots, count).long()
        if not cache_RKNE.is_cuda:
            halves = cache_RKNE.view(*cache_RKNE.shape[:2], 2 * cache_RKNE.shape[2], -1)
            found = halves[:, :, part * cache_RKNE.shape[2] :][:, :, : cache_RKNE.shape[2]][blocks]
            found = of_block(found, layer.isa, part)
        else:
            found = cache_RKNE[..., part * layer.head_size :][..., : layer.head_size][blocks]
        return found.transpose(2, 3).flatten(1, 2)[:, :count]

    def _layer(self, point: int) -> tuple[Any, int]:
        if point not in self._layers:
            from patchclamp.runtime.taps import find

            layer: Any = find(self._runner.get_model(), self._modules[point])
            name = layer.layer_name
            if why := _unread(layer):
                raise UnsupportedSite(f"keys of {name} cannot be read: {why}")
            name = layer.kv_sharing_target_layer_name or name
            groups = self._runner.kv_cache_config.kv_cache_groups
            group = next(i for i, each in enumerate(groups) if name in each.layer_names)
            self._layers[point] = layer, group
        return self._layers[point]

    def _table(self, group: int, requests: int) -> tuple[torch.Tensor, int]:
        """Return a cache group's block table, and the number of positions in a block."""
        spec = self._runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        if self.tables is not None:
            return self.tables[group], spec.block_size
        if self._kind == "v2":
            return self._runner.block_tables.input_block_tables[group], spec.block_size
        return self._runner.input_batch.block_table[group].get_device_tensor(requests), spec.block_size


def of_block(found_BRKNE: torch.Tensor, layout: str, part: int) -> torch.Tensor:
    """Return keys (part 0) or values of blocks that vLLM's CPU attention keeps in its own layout as [B, R, K, N, E]."""
    *outer, positions, width = found_BRKNE.shape
    if layout == "amx":  # tiles of 16 rows and 2 columns, column by column; values are transposed
        rows, columns = (positions, width) if part == 0 else (width, positions)
        tiles = found_BRKNE.reshape(*outer, rows // 16, columns // 2, 16, 2).transpose(-3, -2)
        return tiles.reshape(*outer, rows, columns).transpose(-1, -2 if part else -1)
    return found_BRKNE if part else found_BRKNE.reshape(*outer, width, positions).transpose(-1, -2)


def _unread(layer: Any) -> str:
    """Return the reason why an attention layer's keys cannot be read or its scores recomputed; "" if they can."""
    impl = layer.impl
    if type(layer).__name__ != "Attention":
        return f"it is a {type(layer).__name__}"
    if str(layer.kv_cache_dtype) not in ("auto", "float32", "float16", "bfloat16"):
        return f"they are stored as {layer.kv_cache_dtype}"
    if layer.kv_cache.dim() != 4:
        return f"its cache has {layer.kv_cache.dim()} axes, not 4"
    if layer.kv_cache.device.type == "cpu" and layer.isa not in LAYOUTS:
        return f"their layout on this CPU is {layer.isa}"
    known = ("use_alibi_sqrt", "chunk_lookback", "use_mm_prefix")
    return next((f"it has {name}" for name in known if getattr(impl, name, None) not in (None, False, 0, -1)), "")
