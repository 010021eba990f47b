"""Passes that compute only what programs can change. The rest comes from the trunk, the prompt's run without a program.

A pass leaves the trunk at a cut (`plan.cuts`). It takes the tokens from the cut's position on, with the trunk's keys
and values before it. The layers below the cut's are passed over, and the next one gets the trunk's stream.

B requests of the batch · T tokens of the prompt · D width of the stream · H key/value heads · E their size
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.engines.passes import Passes
from patchclamp.errors import ModelError
from patchclamp.kernels.transfer import to_device
from patchclamp.plan.cuts import Cut
from patchclamp.runtime.taps import find
from patchclamp.sites import SiteMap


class Layers:
    """A model's layers, some of which can be passed over, and what comes after them."""

    def __init__(self, net: Any, sites: SiteMap) -> None:
        taps = {(point.kind, point.layer): tap for point, tap in sites.taps("transformers")}
        places = [*(taps["stream", layer] for layer in range(sites.layers)), taps["stream_end", None]]
        if any((tap.moment, tap.hidden, tap.scale) != ("in", 0, "") for tap in places):
            raise ModelError("its table has the stream elsewhere than in the layers' first argument")
        *self.layers, self.end = [find(net, tap.module) for tap in places]
        if any("forward" in vars(module) for module in self.layers):
            raise ModelError("something has put a forward of its own into a layer")
        self._results = 0  # the length of the tuple that a layer returns; 0 for a tensor

    @contextlib.contextmanager
    def read(self, stream: list[torch.Tensor]) -> Iterator[None]:
        """What each layer takes, and what comes after the last, [B, T, D] each, is added to `stream`."""

        def take(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            stream.append(args[0].clone())

        def count(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._results = len(output) if isinstance(output, tuple) else 0

        hooks = [module.register_forward_pre_hook(take) for module in (*self.layers, self.end)]
        hooks += [self.layers[0].register_forward_hook(count)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def passed_over(self, count: int, stream_BTD: torch.Tensor) -> Iterator[None]:
        """The first `count` layers compute nothing, and what comes after them gets `stream_BTD`."""
        over = self.layers[:count]
        for module in over:
            module.forward = self._giving(None)
        if over:
            over[-1].forward = self._giving(stream_BTD)
        try:
            yield
        finally:
            for module in over:
                del module.forward

    def _giving(self, result: torch.Tensor | None) -> Callable[..., Any]:
        """A layer's `forward` that returns `result`, or what it is given."""

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows = hidden if result is None else result
            return (rows, *[None] * (self._results - 1)) if self._results else rows

        return forward


class Trunk:
    """The run of one prompt without a program.

    stream: before each layer and after the last, [1, T, D] each
    keys, values: of each layer, [1, H, T, E]
    """

    def __init__(self, net: Any, layers: Layers, prompt: Sequence[int], device: str) -> None:
        from transformers import DynamicCache

        self.prompt = list(prompt)
        self.stream: list[torch.Tensor] = []
        passes = Passes([self.prompt], True, device)
        passes.cache = DynamicCache()  # without a config it keeps all positions, behind a sliding window, too
        with layers.read(self.stream):
            passes.run(net)
        kept = passes.cache.layers
        self.keys, self.values = [layer.keys for layer in kept], [layer.values for layer in kept]
        if len(self.stream) != len(layers.layers) + 1 or len(kept) != len(layers.layers):
            raise ModelError(f"{len(self.stream) - 1} layers were called and {len(kept)} have keys and values, of "
                             f"{len(layers.layers)}")  # fmt: skip
        if any(keys.shape[-2] != len(self.prompt) for keys in (*self.keys, *self.values)):
            raise ModelError("its layers do not keep keys and values of every position")

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.stream, *self.keys, *self.values))

    def cache(self, count: int, position: int) -> Any:
        """A cache of `count` requests that holds the positions before `position`; the rows are shared."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for number, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys[:, :, :0], values[:, :, :0], number)  # makes the layer, and copies nothing
            self._fill(cache.layers[number], number, count, position)
        return cache

    def complete(self, cache: Any, layers: int, count: int) -> None:
        """Gives a cache all positions of the first `layers`, which were passed over."""
        for number, layer in enumerate(cache.layers[:layers]):
            self._fill(layer, number, count, len(self.prompt))

    def _fill(self, layer: Any, number: int, count: int, position: int) -> None:
        layer.keys = self.keys[number][:, :, :position].expand(count, -1, -1, -1)
        layer.values = self.values[number][:, :, :position].expand(count, -1, -1, -1)


class PassesFromCut(Passes):
    """The passes of some requests of one prompt: the first one from their cut on."""

    def __init__(self, trunk: Trunk, layers: Layers, cut: Cut, count: int) -> None:
        first = trunk.stream[cut.layer][:, cut.position :]
        device, length = first.device, first.shape[1]
        self.start = np.zeros(count, np.int64)
        self.ids_BT = to_device(np.array(trunk.prompt[cut.position :]), device).expand(count, -1)
        self.positions_BT = torch.arange(cut.position, cut.position + length, device=device).expand(count, -1)
        self.mask_BT = torch.ones(count, len(trunk.prompt), dtype=torch.long, device=device)
        self.cache = trunk.cache(count, cut.position)
        self.keep, self.last_row = 1, torch.zeros(count, dtype=torch.long, device=device)
        self._first, self._count = np.full(count, cut.position), np.full(count, length)
        self._trunk: Trunk | None = trunk
        self._layers, self._cut = layers, cut

    def run(self, net: Any) -> torch.Tensor:
        if self._trunk is None:
            return super().run(net)
        trunk, self._trunk = self._trunk, None
        count, layer = len(self.ids_BT), self._cut.layer
        stream_BTD = trunk.stream[layer][:, self._cut.position :].repeat(count, 1, 1)  # taps write into it
        with self._layers.passed_over(layer, stream_BTD):
            logits_BV = super().run(net)
        trunk.complete(self.cache, layer, count)
        return logits_BV
