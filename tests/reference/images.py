"""A Transformers model that reads images, with plain hooks: one prompt at a time, computed whole, without a cache.

T tokens · D width of the stream · V vocabulary · L layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

Change = Callable[[torch.Tensor], torch.Tensor]  # of the stream [T, D] before a layer


class Pass(NamedTuple):
    """By site and layer the rows [T, D], and log-probabilities of the next token [T, V]."""

    rows_TD: dict[tuple[str, int], torch.Tensor]
    logprobs_TV: torch.Tensor


class PlainReader:
    """A checkpoint in fp32. `pictures` makes numbers of images; `token` stands for one in a prompt; `sees_ahead`: Gemma 3
    is told which tokens are an image's, so that they attend to all of it."""

    def __init__(self, folder: Path, kind: str, pictures: Any, token: int = 509, sees_ahead: bool = False) -> None:
        import transformers

        self.net = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
        self._pictures, self._token, self.sees_ahead = pictures, token, sees_ahead
        self._decoder = self.net.model.language_model

    @torch.no_grad()
    def forward(self, ids: list[int], images: list[Any], changes: Mapping[int, Change] | None = None) -> Pass:
        """`changes`: what is done to the stream before a layer."""
        rows: dict[tuple[str, int], torch.Tensor] = {}

        def before(layer: int) -> Callable[..., Any]:
            def hook(module: Any, args: Any, kwargs: Any) -> Any:
                h_1TD = args[0] if args else kwargs["hidden_states"]
                if changes and layer in changes:
                    h_1TD = changes[layer](h_1TD[0].clone())[None]
                rows["resid_pre", layer] = h_1TD[0].clone()
                return ((h_1TD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h_1TD})

            return hook

        def after(site: str, layer: int) -> Callable[..., None]:
            def hook(module: Any, args: Any, out: Any) -> None:
                rows[site, layer] = (out[0] if isinstance(out, tuple) else out)[0].clone()

            return hook

        handles = []
        for i, layer in enumerate(self._decoder.layers):
            handles.append(layer.register_forward_pre_hook(before(i), with_kwargs=True))
            handles.append(layer.mlp.register_forward_hook(after("mlp_out", i)))
            handles.append(layer.self_attn.register_forward_hook(after("attn_out", i)))
        handles.append(self._decoder.norm.register_forward_hook(after("final_norm", 0)))
        try:
            logits_TV = self.net(input_ids=torch.tensor([ids]), **self._seen(ids, images)).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return Pass(rows, torch.log_softmax(logits_TV.float(), -1))

    def _seen(self, ids: list[int], images: list[Any]) -> dict[str, Any]:
        """What the model takes beside token ids. Where Gemma 3 is not told which tokens are an image's, they attend to
        what comes before them alone, as vLLM's CPU build has it."""
        if not images:
            return {}
        pixels = dict(self._pictures(images=images, return_tensors="pt"))
        is_image = torch.tensor([ids]) == self._token
        if "image_grid_thw" in pixels:
            return pixels | {"mm_token_type_ids": is_image.int()}
        told = {"token_type_ids": is_image.long()} if self.sees_ahead else {}
        return {"pixel_values": pixels["pixel_values"], **told}
