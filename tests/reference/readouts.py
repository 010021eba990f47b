"""Lenses, attributions and gradients as plain loops over a Llama-shaped model of Transformers, one row at a time.

D model width · V vocabulary · H heads · E head size
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .hooks import PlainModel


class Seen:
    """What one layer says at one position: logits [V] through the model's own norm and unembedding."""

    def __init__(self, logits_V: torch.Tensor, final_V: torch.Tensor) -> None:
        self.logits_V, self.logprobs_V = logits_V, logits_V.log_softmax(-1)
        self.kl = float((final_V.softmax(-1) * (final_V.log_softmax(-1) - self.logprobs_V)).sum())

    def ranks(self, token: int, near: float = 2e-5) -> range:
        """The ranks that a token may have: more than one where logits are so near to its own that the order of a sum
        decides."""
        own = self.logits_V[token]
        others = torch.cat([self.logits_V[:token], self.logits_V[token + 1 :]])
        return range(int((others > own + near).sum()), int((others > own - near).sum()) + 1)


@torch.no_grad()
def lens(
    plain: PlainModel, ids: list[int], layers: list[int],
    change: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> dict[tuple[int, int], Seen]:  # fmt: skip
    """`Seen` by (layer, position); `change` makes another row of a layer's row before it is read."""
    rows = {layer: plain.read(ids, "resid_post", layer) for layer in [*layers, plain.layers - 1]}
    seen = {}
    for position in range(len(ids)):
        final_V = plain.net.lm_head(plain.net.model.norm(rows[plain.layers - 1][position]))
        for layer in layers:
            row = rows[layer][position] if change is None else change(layer, rows[layer][position])
            seen[layer, position] = Seen(plain.net.lm_head(plain.net.model.norm(row)), final_V)
    return seen


@torch.no_grad()
def direct(plain: PlainModel, ids: list[int], answer: int, foil: int) -> dict[str, float]:
    """What each part of the model adds to logit(answer) − logit(foil) at the end of a prompt: the last norm divides by
    the scale that it had, whatever part is put through it."""
    net, values = plain.net, {}
    end = plain.read(ids, "resid_post", plain.layers - 1)[-1]
    scale = (end.square().mean() + net.model.norm.variance_epsilon).sqrt()
    unembedding = net.lm_head.weight[answer] - net.lm_head.weight[foil]

    def through(part_D: torch.Tensor) -> float:
        return float((part_D / scale * net.model.norm.weight) @ unembedding)

    values["embed"] = through(plain.read(ids, "resid_pre", 0)[-1])
    for layer, block in enumerate(net.model.layers):
        inside: dict[str, torch.Tensor] = {}
        for name, module in (("z", block.self_attn.o_proj), ("neurons", block.mlp.down_proj)):
            inside[name] = _input(plain, ids, module)[-1]
        values[f"attn_out[{layer}]"] = through(plain.read(ids, "attn_out", layer)[-1])
        values[f"mlp_out[{layer}]"] = through(plain.read(ids, "mlp_out", layer)[-1])
        size = net.config.head_dim
        for head in range(net.config.num_attention_heads):
            only = torch.zeros_like(inside["z"])
            only[head * size : (head + 1) * size] = inside["z"][head * size : (head + 1) * size]
            values[f"z[{layer}, {head}]"] = through(block.self_attn.o_proj(only))
        for neuron in range(0, net.config.intermediate_size, 97):
            written = inside["neurons"][neuron] * block.mlp.down_proj.weight[:, neuron]
            values[f"neurons[{layer}, {neuron}]"] = through(written)
    return values


def _input(plain: PlainModel, ids: list[int], module: torch.nn.Module) -> torch.Tensor:
    kept = []
    handle = module.register_forward_pre_hook(lambda m, args: kept.append(args[0].clone()))
    plain.net(torch.tensor([ids]))
    handle.remove()
    return kept[0][0]


def slopes(plain: PlainModel, ids: list[int], answer: int, foil: int, embeds_TD: torch.Tensor | None = None):
    """Rows and gradients of logit(answer) − logit(foil) by (site, layer), [T, W] each: `resid_pre`, `mlp_out` and `z`,
    from embeddings of the caller's if they are given."""
    net, kept, handles = plain.net, {}, []
    embeds_TD = net.model.embed_tokens(torch.tensor(ids)).detach() if embeds_TD is None else embeds_TD

    def keep(name):
        def hook(module, args, output=None):
            tensor = args[0] if output is None else output
            tensor.retain_grad()
            kept[name] = tensor

        return hook

    for layer, block in enumerate(net.model.layers):
        handles += [
            block.register_forward_pre_hook(keep(("resid_pre", layer))),
            block.mlp.register_forward_hook(keep(("mlp_out", layer))),
            block.self_attn.o_proj.register_forward_pre_hook(keep(("z", layer))),
        ]
    logits_V = net(inputs_embeds=embeds_TD[None].clone().requires_grad_() * 1.0, use_cache=False).logits[0, -1]
    (logits_V[answer] - logits_V[foil]).backward()
    for handle in handles:
        handle.remove()
    return {name: (tensor.detach()[0], tensor.grad[0]) for name, tensor in kept.items()}


@torch.no_grad()
def placed(plain: PlainModel, ids: list[int], layer: int, position: int, row_D: torch.Tensor, count: int) -> list[int]:
    """The `count` likeliest tokens after a prompt, each step computed anew, with a layer's output replaced at one
    position of the prompt."""

    def hook(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[0, position] = row_D
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = plain.net.model.layers[layer].register_forward_hook(hook)
    said = list(ids)
    for _ in range(count):
        said.append(int(plain.net(torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
    handle.remove()
    return said[len(ids) :]


def over_edge(plain: PlainModel, ids: list[int], module: torch.nn.Module, change_TD: torch.Tensor) -> torch.Tensor:
    """Next-token logits [V] when what a norm reads, and only that, is changed by some rows."""

    def hook(norm, args, output):
        return norm.forward(args[0] + change_TD)

    handle = module.register_forward_hook(hook)
    try:
        return plain.logits(ids)
    finally:
        handle.remove()


def jacobian(plain: PlainModel, ids: list[int], layer: int, positions: list[int]) -> torch.Tensor:
    """The Jacobian [D, D] of a lens: of the sum of the last stream over some positions, with respect to a layer's output
    at each of them, averaged. One number of the layer's output at a time, by `torch.autograd.functional`."""
    net, kept = plain.net.requires_grad_(False), []
    rows_TD = plain.read(ids, "resid_post", layer)

    def ending(changed_TD: torch.Tensor) -> torch.Tensor:
        """The last stream [T, D] if the layer's output were this."""
        hooks = [
            net.model.layers[layer].register_forward_hook(lambda m, args, out: changed_TD[None]),
            net.model.norm.register_forward_pre_hook(lambda m, args: kept.append(args[0][0])),
        ]
        net.model(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return kept.pop()

    whole_TDTD = torch.autograd.functional.jacobian(ending, rows_TD)
    return torch.stack([whole_TDTD[positions, :, p].sum(0) for p in positions]).mean(0)


def tuned(
    rows_ND: torch.Tensor,
    last_ND: torch.Tensor,
    readout: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and b of a tuned lens, by Adam on all rows at once, with a rate that falls to 0; Kingma and Ba 2015 (algorithm 1)
    by hand."""
    width = rows_ND.shape[1]
    values = [torch.eye(width), torch.zeros(width)]
    means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    model_NV = readout(last_ND).log_softmax(-1)
    for step in range(steps):
        A, b = (value.clone().requires_grad_() for value in values)
        lens_NV = readout(rows_ND @ A.T + b).log_softmax(-1)
        loss = (model_NV.exp() * (model_NV - lens_NV)).sum(-1).mean()
        for i, slope in enumerate(torch.autograd.grad(loss, [A, b])):
            means[i] = 0.9 * means[i] + 0.1 * slope
            squares[i] = 0.999 * squares[i] + 0.001 * slope**2
            mean, square = means[i] / (1 - 0.9 ** (step + 1)), squares[i] / (1 - 0.999 ** (step + 1))
            values[i] = values[i] - rate * (1 - step / steps) * mean / (square.sqrt() + 1e-8)
    return values[0], values[1]
