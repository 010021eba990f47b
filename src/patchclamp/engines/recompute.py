"""Decides which requests of the Transformers engine leave a trunk (`engines.trunk`), and proves that they may.

Where they do not, the reason is kept, and everything is computed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Request
from patchclamp.engines.passes import Passes
from patchclamp.engines.trunk import Layers, PassesFromCut, Trunk
from patchclamp.errors import ModelError
from patchclamp.plan.cuts import Asked, Cut, Group, first_layers, group, in_order
from patchclamp.sites import SiteMap

logger = logging.getLogger(__name__)
WAYS = ("changed", "all")
MAX_TRUNK_BYTES = 1 << 28  # of trunks that are kept; a larger one is made, and let go of after its requests
PROOF_TOKENS, LONG_PROOF_TOKENS = 12, 96  # of the proof's prompt, usually, and at most
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest logit
PASS_ROWS = {"cpu": 64, "other": 2048}  # `plan.cuts.Work`; measured on a CPU, and estimated for GPUs
FEW = "no prompt was shared by enough runs, or their programs change nearly all of it"


class Recompute:
    """Of one model: its trunks, and whether requests may leave them.

    whole_because: why everything is computed; empty if it need not be
    passes: how many first passes computed everything, and how many began at a cut
    """

    def __init__(self, net: Any, sites: SiteMap, device: str, way: str, max_tokens: int) -> None:
        self._net, self._sites, self._device = net, sites, device
        self._first_layers = first_layers(sites)
        self._pass_rows = PASS_ROWS["cpu" if device.startswith("cpu") else "other"]
        self.whole_because = _reason(sites, way, net.config.get_text_config())
        self._is_proved, self._off = False, 0
        self._lock = threading.Lock()  # callers' threads switch it off and on
        self._layers: Layers | None = None
        self._trunks: OrderedDict[tuple[int, ...], Trunk] = OrderedDict()
        self.passes = {"whole": 0, "from_cut": 0}
        window = _window(net.config.get_text_config())
        fits = PROOF_TOKENS if window is None else window + 4
        self._proof_tokens = min(fits if fits <= LONG_PROOF_TOKENS else PROOF_TOKENS, max_tokens - 1)
        # the proof says nothing of windows that it did not fill
        self._longest = max_tokens if window is None or self._proof_tokens > window else window

    def groups(self, requests: Sequence[Request], size: int) -> list[Group]:
        """Which requests are computed together, `size` at most, and from which cut on."""
        if self.whole_because or self._off:
            return in_order(range(len(requests)), size)
        asked = [Asked(request.prompt_token_ids, request.bound, self._sees(request)) for request in requests]
        return group(asked, self._first_layers, self._sites.layers, size, self._pass_rows)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Groups that are made within it are computed whole."""
        with self._lock:
            self._off += 1
        try:
            yield
        finally:
            with self._lock:
                self._off -= 1

    def _sees(self, request: Request) -> bool:
        """Whether a request's text is within what the proof is about."""
        return len(request.prompt_token_ids) + request.max_tokens - 1 <= self._longest

    def passes_from(self, cut: Cut | None, prompt: Sequence[int], count: int) -> Passes | None:
        """The passes of some requests of one prompt from their cut on; None if all of it must be computed."""
        if cut is None or self.why_whole():
            self.passes["whole"] += 1
            return None
        assert self._layers is not None
        self.passes["from_cut"] += 1
        return PassesFromCut(self._trunk(prompt), self._layers, cut, count)

    def _trunk(self, prompt: Sequence[int]) -> Trunk:
        """A prompt's trunk. The last ones are kept, for the next requests of a sweep."""
        assert self._layers is not None
        key = tuple(prompt)
        trunk = self._trunks.pop(key, None) or Trunk(self._net, self._layers, prompt, self._device)
        self.trim(trunk.bytes)
        self._trunks[key] = trunk
        return trunk

    def trim(self, more: int = 0) -> None:
        """Lets go of the oldest trunks until they leave room for `more` bytes, or are all gone."""
        while self._trunks and sum(trunk.bytes for trunk in self._trunks.values()) + more > MAX_TRUNK_BYTES:
            self._trunks.popitem(last=False)

    def why_whole(self) -> str:
        """`whole_because`, after the proof, which is made once."""
        if not self.whole_because and not self._is_proved:
            self._prove()
        return self.whole_because

    @torch.inference_mode()
    def _prove(self) -> None:
        """Compares passes from several cuts with whole ones, on this model."""
        try:
            self._layers = Layers(self._net, self._sites)
            self.whole_because = self._difference() or ""
        except Exception as error:  # of a model that is made otherwise
            self.whole_because = f"a pass from a cut failed: {type(error).__name__}: {error}"
        self._is_proved = not self.whole_because
        if not self._is_proved:
            logger.warning("patchclamp: everything is computed in every run of a prompt, for %s. It is slower, and as "
                           "right.", self.whole_because)  # fmt: skip

    def _difference(self) -> str | None:
        """What is wrong with passes from cuts, if anything is."""
        assert self._layers is not None
        layers, length = self._sites.layers, self._proof_tokens
        if length < 2:
            raise ModelError("texts of one token have nothing to share")
        prompt = np.random.default_rng(0).integers(self._sites.d_vocab, size=length).tolist()
        trunk = Trunk(self._net, self._layers, prompt, self._device)
        tolerance = TOLERANCE[self._net.dtype]
        for cut in _cuts(layers, length):
            whole = self._two_steps(Passes([prompt] * 2, True, self._device), cut, trunk)
            parted = self._two_steps(PassesFromCut(trunk, self._layers, cut, 2), cut, trunk)
            for expected_BV, logits_BV in zip(whole, parted, strict=True):
                off = float((expected_BV - logits_BV).abs().max() / expected_BV.abs().max())
                if not off <= tolerance:
                    return f"logits of a pass from layer {cut.layer} and position {cut.position} on were {off:.1e} off"
            if cut.position >= length - 2 and torch.equal(*whole[0]):  # earlier ones may be behind a window
                return f"an edit at layer {cut.layer} and position {cut.position} did not move the logits"
        return None

    def _two_steps(self, passes: Passes, cut: Cut, trunk: Trunk) -> list[torch.Tensor]:
        """Logits of two steps, [2, V] each. The second row is edited where the cut is."""
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


def _cuts(layers: int, length: int) -> list[Cut]:
    """Cuts at the corners and in the middle."""
    cuts = [
        (layers // 2, length // 2),
        (min(1, layers - 1), 1),
        (0, length - 2),
        (layers - 1, length - 2),
        (layers, length - 1),
    ]
    return [Cut(*cut) for cut in cuts]


def _reason(sites: SiteMap, way: str, config: Any) -> str:
    """Why everything is computed, as far as that is known before the proof."""
    if way == "all":
        return 'recompute="all" was asked for'
    if not sites.family.tabled:
        return "the model has no site table that would tell what its layers take"
    if sites.sizes.recurrent or sites.family.both:
        return "the state of recurrent layers is kept for the end of a prompt alone"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers read keys and values of others"
    return ""


def _window(config: Any) -> int | None:
    """The length of the shortest window that any layer may look through; None if all see everything."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if isinstance(window, int)), default=None)
