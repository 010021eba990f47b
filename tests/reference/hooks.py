"""Plain Transformers hooks, one prompt at a time: the slow and obvious way to read and patch a Llama-shaped model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


class PlainModel:
    """A Llama-shaped checkpoint in fp32 with reads and patches of one place at a time."""

    def __init__(self, folder: str) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = len(self.net.model.layers)

    def _module(self, site: str, layer: int):
        """The module at whose border a site lies, and whether it is its input."""
        block = self.net.model.layers[layer] if layer < self.layers else None
        return {
            "resid_pre": lambda: (block, True),
            "resid_mid": lambda: (block.post_attention_layernorm, True),
            "attn_out": lambda: (block.self_attn, False),
            "mlp_out": lambda: (block.mlp, False),
            "resid_post": lambda: (
                self.net.model.layers[layer + 1] if layer + 1 < self.layers else self.net.model.norm, True
            ),
            "final_norm": lambda: (self.net.model.norm, False),
        }[site]()  # fmt: skip

    @torch.no_grad()
    def read(self, ids: list[int], site: str, layer: int = 0) -> torch.Tensor:
        """[T, D]"""
        kept = []
        module, before = self._module(site, layer)
        if before:
            handle = module.register_forward_pre_hook(lambda m, args: kept.append(args[0].clone()))
        else:
            handle = module.register_forward_hook(
                lambda m, args, out: kept.append((out[0] if isinstance(out, tuple) else out).clone())
            )
        self.net(torch.tensor([ids]))
        handle.remove()
        return kept[0][0]

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Next-token logits [V]."""
        return self.net(torch.tensor([ids])).logits[0, -1]

    @torch.no_grad()
    def patched_logits(self, ids: list[int], site: str, layer: int, position: int, row: torch.Tensor) -> torch.Tensor:
        """Next-token logits [V] with one row of a site replaced.

        A block keeps the tensor a norm reads as its residual too, so the stream is written in place: both see it.
        """
        module, before = self._module(site, layer)

        def pre(m, args):
            args[0][0, position] = row

        def post(m, args, out):
            hidden = (out[0] if isinstance(out, tuple) else out).clone()
            hidden[0, position] = row
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = module.register_forward_pre_hook(pre) if before else module.register_forward_hook(post)
        try:
            return self.logits(ids)
        finally:
            handle.remove()
