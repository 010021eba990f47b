"""Snippets of nnsight and nnterp beside ours, on one model, on Transformers, fp32: do they give the same values?

    python -m tools.nnsight_snippets [FOLDER]

The folder is a model's; without one it is that of the demo extra's SmolLM2, and no network is needed. It runs where
`nnsight` (0.6) and `nnterp` (1.3) are installed beside patchclamp: an environment of its own. The page
`docs/coming_from.md` prints the snippets from here. Left out of them: `model = StandardizedTransformer(name)` and
`lm = pc.LM(name)`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch

import patchclamp as pc

REPEAT = "cat -> cat; 1135 -> 1135; hello -> hello; ?"
EIFFEL, ROME = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
V = torch.linspace(-1, 1, 576)


def read_theirs(model):
    with model.trace(EIFFEL):
        embeddings = model.token_embeddings.save()
        attention = model.attentions_output[5].save()  # in the order in which the model computes
        mlp = model.mlps_output[5].save()
        hidden = model.layers_output[5].save()
    return hidden, attention, mlp, embeddings


def read_ours(lm):
    with lm.trace(EIFFEL) as t:
        hidden = t.layers_output[5].save()  # in any order
        embeddings = t.token_embeddings.save()
        attention = t.attentions_output[5].save()
        mlp = t.mlps_output[5].save()
    return hidden, attention, mlp, embeddings


def steer_theirs(model):
    with model.trace(EIFFEL):
        model.layers_output[5][:, -1] += 4 * V
        logits = model.logits[0, -1].save()
    return (logits,)


def steer_ours(lm):
    with lm.trace(EIFFEL) as t:
        t.layers_output[5][:, -1] += 4 * V
        logits = t.logits[-1].save()
    return (logits,)


def ablate_theirs(model):
    with model.trace(EIFFEL):
        model.layers[5].self_attn.output[0][:] = 0
        model.layers[7].mlp.output[:] = 0
        logits = model.logits[0, -1].save()
    return (logits,)


def ablate_ours(lm):
    with lm.trace(EIFFEL) as t:
        t.layers[5].attn.output = 0
        t.layers[7].mlp.output = 0
        logits = t.logits[-1].save()
    return (logits,)


def clone_theirs(model):
    with model.trace(EIFFEL):
        hidden = model.layers_output[5].clone()
        hidden[:, 2] = 0
        hidden[:, 4] *= 3
        model.layers_output[5] = hidden
        after = model.layers_output[9].save()
    return (after,)


def clone_ours(lm):
    with lm.trace(EIFFEL) as t:
        hidden = t.layers_output[5].clone()
        hidden[:, 2] = 0
        hidden[:, 4] *= 3
        t.layers_output[5] = hidden
        after = t.layers_output[9].save()
    return (after,)


def later_layer_theirs(model):
    with model.trace(EIFFEL):
        early = model.layers_output[3][:, -1]
        model.layers_output[8][:, -1] = 2 * early
        logits = model.logits[0, -1].save()
    return (logits,)


def later_layer_ours(lm):
    with lm.trace(EIFFEL) as t:
        early = t.layers_output[3][:, -1]
        t.layers_output[8][:, -1] = 2 * early
        logits = t.logits[-1].save()
    return (logits,)


def patch_theirs(model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(EIFFEL):
            clean = model.layers_output[8][:, -1]
            barrier()
        with tracer.invoke(ROME):
            barrier()
            model.layers_output[8][:, -1] = clean
            logits = model.lm_head.output[0, -1].save()  # model.logits has all prompts here: [0] is the first's
    return (logits,)


def patch_ours(lm):
    with lm.trace() as t:
        with t.invoke(EIFFEL) as a:
            clean = a.layers_output[8][:, -1]
        with t.invoke(ROME) as b:
            b.layers_output[8][:, -1] = clean
            logits = b.logits[-1].save()
    return (logits,)


def two_traces_theirs(model):
    with model.trace(EIFFEL):
        clean = model.layers_output[8][:, -1].save()
    with model.trace(ROME):
        model.layers_output[8][:, -1] = clean
        logits = model.logits[0, -1].save()
    return clean, logits


def two_traces_ours(lm):
    with lm.trace(EIFFEL) as t:
        clean = t.layers_output[8][:, -1].save()
    with lm.trace(ROME) as t:
        t.layers_output[8][:, -1] = clean
        logits = t.logits[-1].save()
    return clean, logits


def lens_theirs(model):
    with model.trace(EIFFEL):
        lens = model.project_on_vocab(model.layers_output[20])[0, -1].save()
    return (lens,)


def lens_ours(lm):
    with lm.trace(EIFFEL) as t:
        t.layers[-1].output[-1] = t.layers[20].output[-1]
        lens = t.logits[-1].save()
    return (lens,)


def skip_theirs(model):
    with model.trace(EIFFEL):
        model.skip_layer(5)
        logits = model.logits[0, -1].save()
    return (logits,)


def skip_ours(lm):
    with lm.trace(EIFFEL) as t:
        t.layers[5].output = t.layers[5].input
        logits = t.logits[-1].save()
    return (logits,)


def heads_theirs(model):
    with model.trace(EIFFEL):
        model.layers[5].self_attn.o_proj.input[:, :, 3 * 64 : 4 * 64] = 0  # head 3, 64 wide
        out = model.layers[5].self_attn.output[0].save()
    return (out[0] if out.ndim == 3 else out,)


def heads_ours(lm):
    with lm.trace(EIFFEL) as t:
        t.layers[5].attn.z[3] = 0
        out = t.layers[5].attn.output.save()
    return (out,)


def neurons_theirs(model):
    with model.trace(EIFFEL):
        neurons = model.layers[5].mlp.down_proj.input.clone().save()
        model.layers[5].mlp.down_proj.input[:, :, 0:8] = 0
        model.layers[5].mlp.down_proj.input[:, -1, 8:16] *= 5
        out = model.mlps_output[5].save()
    return neurons[0], out


def neurons_ours(lm):
    with lm.trace(EIFFEL) as t:
        neurons = t.layers[5].mlp.neurons.save()
        t.layers[5].mlp.neurons[0:8] = 0
        t.layers[5].mlp.neurons[-1, 8:16] *= 5
        out = t.mlps_output[5].save()
    return neurons, out


def cache_theirs(model):
    with model.trace(EIFFEL) as tracer:
        cache = tracer.cache(modules=[model.layers[3], model.layers[5].mlp])
    hidden, mlp = cache["model.layers.3"].output, cache["model.layers.5.mlp"].output
    return hidden, mlp


def cache_ours(lm):
    with lm.trace(EIFFEL) as t:
        cache = t.cache("resid_post[3]", "mlp_out[5]")
    hidden, mlp = cache["resid_post[3]"][None], cache["mlp_out[5]"][None]
    return hidden, mlp


def patchscope_theirs(model):
    with model.trace("The Colosseum"):
        hidden = model.layers_output[10][:, -1].save()
    with model.generate(REPEAT, max_new_tokens=4, do_sample=False) as tracer:
        model.layers_output[5][:, -1] = hidden
        logits = model.logits[0, -1].save()
        tokens = tracer.result.save()
    return logits, tokens[:, -4:]


def patchscope_ours(lm):
    with lm.trace(max_tokens=4) as t:
        with t.invoke("The Colosseum") as a:
            hidden = a.layers[10].output[-1]
        with t.invoke(REPEAT) as b:
            b.layers[5].output[-1] = hidden
            logits = b.logits[-1].save()
    tokens = b.token_ids
    return logits, torch.tensor([tokens])


def edit_theirs(model):
    with model.edit() as calm:
        model.layers[5].mlp.output[:] *= 0.5
    with calm.trace(EIFFEL):
        logits = calm.logits[0, -1].save()
    return (logits,)


def edit_ours(lm):
    with lm.edit("calm") as e:
        e.layers[5].mlp.output *= 0.5
    with lm.trace(EIFFEL, edits=[pc.Use("calm")]) as t:
        logits = t.logits[-1].save()
    return (logits,)


def generate_theirs(model):
    with model.generate(EIFFEL, max_new_tokens=4, do_sample=False) as tracer:
        steps = list().save()  # noqa: C408  nnsight gives `list()` a `save`
        with tracer.iter[0:4]:
            model.layers_output[5] += 0.5 * V
            steps.append(model.layers_output[9][:, -1])
    return (torch.cat(steps),)


def generate_ours(lm):
    with lm.trace(EIFFEL, max_tokens=4) as t:
        t.all().layers_output[5] += 0.5 * V
        steps = t.all().layers[9].output.save()
    return (steps[-4:],)


def stream_theirs(model):
    with model.generate(EIFFEL, max_new_tokens=4, do_sample=False) as tracer:
        tokens, steps = list().save(), list().save()  # noqa: C408
        with tracer.iter[0:4]:
            steps.append(model.layers_output[9][0, -1])
            tokens.append(model.logits[0, -1].argmax(-1))
    return torch.stack(steps), torch.stack(tokens)[None]


def stream_ours(lm):
    with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
        stream = t.all().layers[9].output.save()
    tokens, steps = [], []
    for part in t:  # as they come
        steps.append(t.so_far(stream)[-1])
        tokens += part.token_ids
    return torch.stack(steps), torch.tensor([tokens])


SNIPPETS = {
    "Read": (read_theirs, read_ours), "Steer": (steer_theirs, steer_ours), "Ablate": (ablate_theirs, ablate_ours),
    "Clone, change and replace": (clone_theirs, clone_ours),
    "Write an earlier layer into a later one": (later_layer_theirs, later_layer_ours),
    "Patch across prompts": (patch_theirs, patch_ours), "Patch with two traces": (two_traces_theirs, two_traces_ours),
    "Logit lens": (lens_theirs, lens_ours), "Skip a layer": (skip_theirs, skip_ours),
    "Silence a head": (heads_theirs, heads_ours), "Silence neurons": (neurons_theirs, neurons_ours),
    "Save many places": (cache_theirs, cache_ours), "Patchscope": (patchscope_theirs, patchscope_ours),
    "Edit every later trace": (edit_theirs, edit_ours), "Every step of a generation": (generate_theirs, generate_ours),
    "Read tokens as they come": (stream_theirs, stream_ours),
}  # fmt: skip


def body(function: Callable[..., Any]) -> str:
    """The code of a snippet, without its `def` and `return`."""
    lines = inspect.getsource(function).splitlines()[1:]
    return textwrap.dedent("\n".join(line for line in lines if not re.match(r"    return ", line)))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The worst row, ‖a − b‖ / ‖b‖."""
    a, b = (x.detach().float().reshape(-1, x.shape[-1]) for x in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-9)).max())


def compare(folder: str) -> dict[str, list[float]]:
    """The gap of each value of each snippet, theirs against ours."""
    from nnterp import StandardizedTransformer

    model = StandardizedTransformer(folder, dtype=torch.float32, device_map="cpu")
    gaps = {}
    with pc.LM(folder, engine="transformers", dtype="float32") as lm, torch.no_grad():
        for name, (theirs, ours) in SNIPPETS.items():
            gaps[name] = [gap(a, b) for a, b in zip(ours(lm), theirs(model), strict=True)]
    return gaps


def main(folder: str) -> None:
    gaps = compare(folder)
    for name, each in gaps.items():
        print(f"{name:42}", *(f"{one:.1e}" for one in each))
    worst = max(max(each) for each in gaps.values())
    print("all within 1e-4" if worst <= 1e-4 else f"out of tolerance: {worst:.1e}")
    raise SystemExit(worst > 1e-4)


if __name__ == "__main__":
    from patchclamp.engines.preflight import prepare

    main(sys.argv[1] if len(sys.argv) > 1 else str(prepare()))
