"""Studies as plain loops of Transformers hooks on a Llama-shaped model, one run at a time: what every sweep must equal.

T tokens · W width of a site · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from patchclamp.kernels.noise import normals
from patchclamp.plan.bound import noise_stream

Change = Callable[[torch.Tensor], None]  # changes the rows [T, W] of a site in place


class Edit(NamedTuple):
    site: str
    layer: int
    change: Change


class Hooked:
    """A checkpoint in fp32 whose sites are read and changed by hooks."""

    def __init__(self, folder: str) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = len(self.net.model.layers)
        self.head = self.net.config.head_dim

    def _module(self, site: str, layer: int) -> tuple[torch.nn.Module, bool]:
        """The module at whose border a site lies, and whether it is its input."""
        model, block = self.net.model, self.net.model.layers[layer]
        return {
            "embed": (model.embed_tokens, False),
            "resid_pre": (block, True),
            "q": (block.self_attn.q_proj, False),
            "k": (block.self_attn.k_proj, False),
            "v": (block.self_attn.v_proj, False),
            "z": (block.self_attn.o_proj, True),
            "attn_out": (block.self_attn, False),
            "mlp_in": (block.mlp, True),
            "neurons": (block.mlp.down_proj, True),
            "mlp_out": (block.mlp, False),
            "resid_post": (model.layers[layer + 1], True) if layer + 1 < self.layers else (model.norm, True),
        }[site]

    @torch.no_grad()
    def run(
        self, ids: Sequence[int], edits: Sequence[Edit] = (), reads: Sequence[tuple[str, int]] = ()
    ) -> tuple[torch.Tensor, dict[tuple[str, int], torch.Tensor]]:
        """Log-probabilities [T, V], and what was read, [T, W] by (site, layer), after the edits."""
        kept: dict[tuple[str, int], torch.Tensor] = {}
        places = list(dict.fromkeys([*((edit.site, edit.layer) for edit in edits), *reads]))
        handles = [self._hook(place, [e.change for e in edits if (e.site, e.layer) == place], kept) for place in places]
        try:
            logits = self.net(torch.tensor([list(ids)])).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return logits.double().log_softmax(-1), kept

    def _hook(self, place: tuple[str, int], changes: list[Change], kept: dict) -> torch.utils.hooks.RemovableHandle:
        module, before = self._module(*place)

        def at(hidden: torch.Tensor) -> torch.Tensor:
            for change in changes:
                change(hidden[0])
            kept[place] = hidden[0].clone()
            return hidden

        def pre(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            at((*args, *kwargs.values())[0])  # in place: the block keeps the same tensor as its residual

        if before:
            return module.register_forward_pre_hook(pre, with_kwargs=True)
        return module.register_forward_hook(lambda m, args, out: _out(out, at))


def _out(out: torch.Tensor | tuple, at: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | tuple:
    hidden = (out[0] if isinstance(out, tuple) else out).clone()
    at(hidden)
    return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def write(site: str, layer: int, rows: torch.Tensor, read: Sequence[int], written: Sequence[int],
          columns: slice = slice(None), alpha: float = 1.0) -> Edit:  # fmt: skip
    """Rows `read` of `rows` [T, W] put into the rows `written` of a site, mixed by alpha."""

    def change(hidden: torch.Tensor) -> None:
        for a, b in zip(read, written, strict=True):
            hidden[b, columns] = (1 - alpha) * hidden[b, columns] + alpha * rows[a, columns]

    return Edit(site, layer, change)


def answer_logprob(model: Hooked, ids: Sequence[int], answer: Sequence[int], edits: Sequence[Edit] = ()) -> float:
    """log p(answer | ids), all of it in one run of both."""
    logprobs, _ = model.run([*ids, *answer], edits)
    return float(sum(logprobs[len(ids) - 1 + i, token] for i, token in enumerate(answer)))


def logit_diff(model: Hooked, ids: Sequence[int], answer: Sequence[int], foil: Sequence[int],
               edits: Sequence[Edit] = ()) -> float:  # fmt: skip
    return answer_logprob(model, ids, answer, edits) - answer_logprob(model, ids, foil, edits)


def head(model: Hooked, index: int) -> slice:
    """The columns of a head."""
    return slice(index * model.head, (index + 1) * model.head)


def path_patched(
    model: Hooked, base: Sequence[int], source: Sequence[int], sender: tuple[int, int], receiver: tuple[str, int, int] | None,
    freeze: Sequence[str], answer: int, foil: int, pairs: Sequence[tuple[int, int]] | None = None,
) -> float:  # fmt: skip
    """The logit difference of `base` with the way from a head to an input of another head (or to the logits) patched
    from `source`, as in Wang et al. 2022, appendix B. `pairs`: the (source, base) positions at which the sender is
    patched; by default all."""
    layer, index = sender
    everywhere = [(site, l) for site in freeze for l in range(model.layers)]  # noqa: E741
    _, held = model.run(base, reads=everywhere)
    _, sent = model.run(source, reads=[("z", layer)])
    whole = list(range(len(base)))
    read, written = zip(*(pairs or zip(whole, whole, strict=True)), strict=True)
    edits = [write("z", layer, sent["z", layer], read, written, head(model, index))]
    for site, l in everywhere:  # noqa: E741
        if l > layer or (l == layer and site == "mlp_out"):
            edits.append(write(site, l, held[site, l], whole, whole))
    if receiver is None:
        return _difference(model, base, edits, answer, foil)
    site, at, part = receiver
    _, received = model.run(base, edits, [(site, at)])
    return _difference(
        model, base, [write(site, at, received[site, at], whole, whole, head(model, part))], answer, foil
    )


def _difference(model: Hooked, ids: Sequence[int], edits: Sequence[Edit], answer: int, foil: int) -> float:
    logprobs, _ = model.run(ids, edits)
    return float(logprobs[-1, answer] - logprobs[-1, foil])


def noise(positions: Sequence[int], std: float, seed: int) -> Edit:
    """The embeddings of some positions with noise, as `pc.Noise` draws it."""

    def change(hidden: torch.Tensor) -> None:
        for p in positions:
            hidden[p] += torch.from_numpy(
                np.float32(std) * normals(seed, p, noise_stream("stream", 0), hidden.shape[1])
            )

    return Edit("embed", 0, change)
