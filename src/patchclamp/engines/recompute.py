"""Partial passes of the Transformers engine, which compute only the activations that programs can change.

The rest comes from the trunk, the prompt's run without a program. A pass branches off the trunk at a cut (`plan.cuts`).
It computes tokens starting at the cut's position, and uses the trunk's keys and values before it. Layers below the cut
are skipped, and the cut's layer receives the trunk's stream. `Recompute` selects the requests to cut, after a proof on
the live model. If the proof fails, every run is computed in full, and `whole_because` is the reason.

B requests · T tokens of the prompt · D width of the stream · H key/value heads · E head size
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Request
from patchclamp.engines.generation import Passes
from patchclamp.errors import ModelError
from patchclamp.kernels.transfer import to_device
from patchclamp.plan.cuts import Cut, CutRequest, PassGroup, first_layers, group, in_order
from patchclamp.runtime.taps import find
from patchclamp.sites import SiteMap


class SkippableLayers:
    """A model's layers, which can be skipped, and the module that follows them."""

    layers: list[torch.nn.Module]
    end: torch.nn.Module

    def __init__(self, net: Any, sites: SiteMap) -> None:
        taps = {(point.kind, point.layer): tap for point, tap in sites.taps("transformers")}
        places = [*(taps["stream", layer] for layer in range(sites.layers)), taps["stream_end", None]]
        if any((tap.moment, tap.hidden, tap.scale) != ("in", 0, "") for tap in places):
            raise ModelError("the stream is not the layers' first argument")
        *self.layers, self.end = [find(net, tap.module) for tap in places]
        if any("forward" in vars(module) for module in self.layers):
            raise ModelError("a layer's forward method was replaced")
        self._results = 0  # the length of the tuple that a layer returns; 0 for a tensor

    @contextlib.contextmanager
    def read(self, stream: list[torch.Tensor]) -> Iterator[None]:
        """Inside the context, append the input of each layer and of the module after them, [B, T, D], to `stream`."""

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
        """Skip the first `count` layers inside the context; the next module receives `stream_BTD`."""
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
        """Create a `forward` method for a layer. It returns `result`, or the layer's input if `result` is None."""

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows = hidden if result is None else result
            return (rows, *[None] * (self._results - 1)) if self._results else rows

        return forward


class Trunk:
    """A prompt's run without a program.

    stream: the stream before each layer and after the last, [1, T, D] each
    keys, values: one tensor per layer, [1, H, T, E]
    """

    keys: list[Any]
    values: list[Any]

    def __init__(self, net: Any, layers: SkippableLayers, prompt: Sequence[int], device: str) -> None:
        from transformers import DynamicCache

        self.prompt: list[int] = list(prompt)
        self.stream: list[torch.Tensor] = []
        passes = Passes([self.prompt], True, device)
        passes.cache = DynamicCache()  # without a config it keeps all positions, even those outside a sliding window
        with layers.read(self.stream):
            passes.run(net)
        kept = passes.cache.layers
        self.keys, self.values = [layer.keys for layer in kept], [layer.values for layer in kept]
        if len(self.stream) != len(layers.layers) + 1 or len(kept) != len(layers.layers):
            raise ModelError(f"expected {len(layers.layers)} layers, got {len(self.stream) - 1} called and {len(kept)} "
                             f"with keys and values")  # fmt: skip
        if any(keys.shape[-2] != len(self.prompt) for keys in (*self.keys, *self.values)):
            raise ModelError("the layers do not cache keys and values at every position")

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.stream, *self.keys, *self.values))

    def cache(self, count: int, position: int) -> Any:
        """Return a cache of the positions before `position` for `count` requests, sharing the trunk's memory."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for number, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys[:, :, :0], values[:, :, :0], number)  # creates the layer without copying
            self._fill(cache.layers[number], number, count, position)
        return cache

    def complete(self, cache: Any, layers: int, count: int) -> None:
        """Fill the cache of the first `layers` layers, which the pass skipped, with the trunk's keys and values."""
        for number, layer in enumerate(cache.layers[:layers]):
            self._fill(layer, number, count, len(self.prompt))

    def _fill(self, layer: Any, number: int, count: int, position: int) -> None:
        layer.keys = self.keys[number][:, :, :position].expand(count, -1, -1, -1)
        layer.values = self.values[number][:, :, :position].expand(count, -1, -1, -1)


class PassesFromCut(Passes):
    """Passes of requests that share a prompt; the first pass starts at the cut."""

    def __init__(self, trunk: Trunk, layers: SkippableLayers, cut: Cut, count: int) -> None:
        first = trunk.stream[cut.layer][:, cut.position :]
        device, length = first.device, first.shape[1]
        self.start: np.ndarray = np.zeros(count, np.int64)
        self.ids_BT: torch.Tensor = to_device(np.array(trunk.prompt[cut.position :]), device).expand(count, -1)
        self.positions_BT = torch.arange(cut.position, cut.position + length, device=device).expand(count, -1)
        self.mask_BT: torch.Tensor = torch.ones(count, len(trunk.prompt), dtype=torch.long, device=device)
        self.cache = trunk.cache(count, cut.position)
        self.keep, self.last_row = 1, torch.zeros(count, dtype=torch.long, device=device)
        self.reads_prompts = False
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


logger: logging.Logger = logging.getLogger(__name__)
WAYS = ("changed", "all")
MAX_TRUNK_BYTES = 1 << 28  # of kept trunks; a larger trunk is dropped after its requests
PROOF_TOKENS, LONG_PROOF_TOKENS = 12, 96  # length of the proof's prompt: usual, and maximum
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to the largest logit
PASS_ROWS = {"cpu": 64, "other": 2048}  # `plan.cuts.Work`; measured on a CPU, estimated for GPUs
FEW = "too few runs share a prompt, or their programs change nearly all of it"


class Recompute:
    """Caches the trunks of recent prompts, and decides which requests start from a trunk.

    whole_because: the reason why every run is computed in full; "" if cuts are allowed
    passes: the number of prefill passes computed in full, and the number computed from a cut
    """

    def __init__(self, net: Any, sites: SiteMap, device: str, way: str, max_tokens: int) -> None:
        self._net, self._sites, self._device = net, sites, device
        self._first_layers = first_layers(sites)
        self._pass_rows = PASS_ROWS["cpu" if device.startswith("cpu") else "other"]
        self.whole_because: str = _reason(sites, way, net.config)
        self._is_proved, self._off = False, 0
        self._lock = threading.Lock()  # guards `_off`, which callers' threads change
        self._layers: SkippableLayers | None = None
        self._trunks: OrderedDict[tuple[int, ...], Trunk] = OrderedDict()
        self.passes: dict[str, int] = {"whole": 0, "from_cut": 0}
        config = net.config.get_text_config()
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        window = min((window for window in windows if isinstance(window, int)), default=None)  # the shortest
        fits = PROOF_TOKENS if window is None else window + 4
        self._proof_tokens = min(fits if fits <= LONG_PROOF_TOKENS else PROOF_TOKENS, max_tokens - 1)
        # the proof does not cover windows longer than its prompt
        self._longest = max_tokens if window is None or self._proof_tokens > window else window

    def groups(self, requests: Sequence[Request], size: int) -> list[PassGroup]:
        """Group requests into batches of at most `size`; return each with its cut."""
        if self.whole_because or self._off:
            return in_order(range(len(requests)), size)
        wanted = []
        for each in requests:  # requests that the proof covers may be cut
            is_covered = len(each.prompt_token_ids) + each.max_tokens - 1 <= self._longest
            is_covered &= each.prompt_logprobs is None  # prompt log-probabilities need every row
            wanted.append(CutRequest(each.prompt_token_ids, each.bound, is_covered))
        return group(wanted, self._first_layers, self._sites.layers, size, self._pass_rows)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Form groups without cuts inside the context."""
        with self._lock:
            self._off += 1
        try:
            yield
        finally:
            with self._lock:
                self._off -= 1

    def passes_from(self, cut: Cut | None, prompt: Sequence[int], count: int) -> Passes | None:
        """Return the passes starting at `cut`, for `count` requests with one prompt; None to compute everything."""
        if cut is None or self.why_whole():
            self.passes["whole"] += 1
            return None
        assert self._layers is not None
        self.passes["from_cut"] += 1
        return PassesFromCut(self._trunk(prompt), self._layers, cut, count)

    def _trunk(self, prompt: Sequence[int]) -> Trunk:
        """Return a prompt's trunk. Recent trunks are kept for later requests of a sweep."""
        assert self._layers is not None
        key = tuple(prompt)
        trunk = self._trunks.pop(key, None) or Trunk(self._net, self._layers, prompt, self._device)
        self.trim(trunk.bytes)
        self._trunks[key] = trunk
        return trunk

    def trim(self, more: int = 0) -> None:
        """Drop the oldest trunks until there is room for `more` bytes, or no trunk is left."""
        while self._trunks and sum(trunk.bytes for trunk in self._trunks.values()) + more > MAX_TRUNK_BYTES:
            self._trunks.popitem(last=False)

    def why_whole(self) -> str:
        """Return `whole_because`. The first call runs the proof."""
        if not self.whole_because and not self._is_proved:
            self._prove()
        return self.whole_because

    @torch.inference_mode()
    def _prove(self) -> None:
        """Compare passes from several cuts with full passes on this model."""
        try:
            self._layers = SkippableLayers(self._net, self._sites)
            self.whole_because = self._difference() or ""
        except Exception as error:  # the model has another structure
            self.whole_because = f"a pass from a cut failed: {type(error).__name__}: {error}"
        self._is_proved = not self.whole_because
        if not self._is_proved:
            logger.warning("patchclamp: every run is computed in full: %s. Results are unchanged.", self.whole_because)

    def _difference(self) -> str | None:
        """Describe the first mismatch between passes from cuts and full passes; None if all agree."""
        assert self._layers is not None
        layers, length = self._sites.layers, self._proof_tokens
        if length < 2:
            raise ModelError("a prompt of one token has no prefix to share")
        prompt = np.random.default_rng(0).integers(self._sites.d_vocab, size=length).tolist()
        trunk = Trunk(self._net, self._layers, prompt, self._device)
        tolerance = TOLERANCE[self._net.dtype]
        corners = (min(1, layers - 1), 1), (0, length - 2), (layers - 1, length - 2), (layers, length - 1)
        for cut in [Cut(*at) for at in ((layers // 2, length // 2), *corners)]:
            whole = self._two_steps(Passes([prompt] * 2, True, self._device), cut, trunk)
            parted = self._two_steps(PassesFromCut(trunk, self._layers, cut, 2), cut, trunk)
            for expected_BV, logits_BV in zip(whole, parted, strict=True):
                off = float((expected_BV - logits_BV).abs().max() / expected_BV.abs().max())
                if not off <= tolerance:
                    return f"logits of a pass from layer {cut.layer}, position {cut.position} differ by {off:.1e}"
            if cut.position >= length - 2 and torch.equal(*whole[0]):  # earlier positions may be outside a window
                return f"an edit at layer {cut.layer}, position {cut.position} did not change the logits"
        return None

    def _two_steps(self, passes: Passes, cut: Cut, trunk: Trunk) -> list[torch.Tensor]:
        """Return logits [2, V] of a prefill pass and a decode step; the second request is edited at the cut."""
        assert self._layers is not None
        module = [*self._layers.layers, self._layers.end][cut.layer]
        noise = torch.randn(self._sites.d_model, generator=torch.Generator().manual_seed(0))
        push = (noise * trunk.stream[cut.layer].float().std().cpu()).to(self._device, self._net.dtype)
        row = cut.position - len(trunk.prompt)

        def edit(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            args[0][1, row] += push

        hook = module.register_forward_pre_hook(edit)
        try:
            first_BV = passes.run(self._net).float()
        finally:
            hook.remove()
        passes.advance(trunk.prompt[:2])
        return [first_BV, passes.run(self._net).float()]


def _reason(sites: SiteMap, way: str, config: Any) -> str:
    """Return the reason to compute every run in full if it is known without a proof; otherwise ""."""
    if way == "all":
        return 'recompute="all"'
    if not sites.family.tabled:
        return "the model has no site table"
    if sites.sizes.recurrent or sites.family.both:
        return "recurrent layers keep only their state at the end of a prompt"
    if getattr(config.get_text_config(), "num_kv_shared_layers", 0):
        return "some of its layers share keys and values"
    return ""
