"""The recipes as traces."""

from __future__ import annotations

import torch

import patchclamp as pc

__all__ = [
    "ablation", "activation_oracle", "activation_patching", "attention_heads", "caching", "clone_and_replace", "fuzzing", "logit_lens",
    "neurons", "patchscope", "steering", "streaming", "two_traces", "within_one_run",
]  # fmt: skip
CLEAN, CORRUPT = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"
ORACLE = "Layer: ? ? ?\nWhich city is this about? It is about"


def clone_and_replace(lm: pc.LM):
    """Take a copy of the stream, change some tokens, and write it back."""
    layer = lm.model.layers // 2
    with lm.trace(CLEAN) as t:
        h = t.layers[layer].output.clone()
        h[-1] = 0
        h[1:3] *= 2
        t.layers[layer].output = h
        changed, logits = t.layers[layer].output.save(), t.logits[-1].save()
    return {"changed": changed, "logits": logits}


def ablation(lm: pc.LM):
    """Zero what attention adds in one layer, and take a direction out of the stream after another."""
    layer, direction = lm.model.layers // 2, torch.linspace(-1, 1, lm.model.d_model)
    with lm.trace(CLEAN) as t:
        t.layers[layer].attn.output = 0
        t.layers[layer + 1].output.ablate(direction)
        stream, logits = t.layers[layer + 1].output.save(), t.logits[-1].save()
    return {"stream": stream, "logits": logits}


def steering(lm: pc.LM):
    """Add the difference of two prompts to the stream, at every token, while the model writes on.

    Source: Turner et al. 2023 (arXiv:2308.10248).
    """
    layer = lm.model.layers // 3
    with lm.trace() as t:
        a, b = t.invoke("I love this"), t.invoke("I hate this")
        direction = (a.layers[layer].output[-1] - b.layers[layer].output[-1]).save()
    with lm.trace("I think that the film", max_tokens=8) as t:
        t.all().layers[layer].output += 2 * direction
        logits = t.all().logits.save()
    return {"direction": direction, "logits": logits, "tokens": t.token_ids}


def logit_lens(lm: pc.LM):
    """What each layer would say: its stream at the last token in place of the last layer's, then the model's own norm
    and unembedding.

    Source: nostalgebraist 2020 (LessWrong, "Interpreting GPT: the logit lens").
    """
    lens = []
    with lm.trace() as t:
        a = t.invoke(CLEAN)
        for layer in range(lm.model.layers):
            with t.invoke(CLEAN) as b:
                b.layers[-1].output[-1] = a.layers[layer].output[-1]
                lens.append(b.logits[-1].save())
    return {"logits": torch.stack(lens), "tokens": torch.stack(lens).argmax(-1).tolist()}


def activation_patching(lm: pc.LM):
    """Put one prompt's value into another, in one trace: the first prompt runs first, all patches are one batch.

    Source: Vig et al. 2020 (arXiv:2004.12265), Meng et al. 2022 (arXiv:2202.05262).
    """
    patched = []
    with lm.trace() as t:
        clean = t.invoke(CLEAN)
        for layer in range(0, lm.model.layers, 3):
            with t.invoke(CORRUPT) as corrupt:
                corrupt.layers[layer].output[-1] = clean.layers[layer].output[-1]
                patched.append(corrupt.logits[-1].save())
    return {"logits": torch.stack(patched)}


def two_traces(lm: pc.LM):
    """The same with two traces: a saved value is a tensor, which another trace writes, changed if you like."""
    layer = lm.model.layers // 2
    with lm.trace(CLEAN) as t:
        clean = t.layers[layer].output[-1].save()
    with lm.trace(CORRUPT) as t:
        t.layers[layer].output[-1] = clean
        logits = t.logits[-1].save()
    return {"clean": clean, "logits": logits}


def caching(lm: pc.LM):
    """Save many sites at once. The stream is the embedding plus what every layer adds to it."""
    with lm.trace(CLEAN) as t:
        cache = t.cache(pc.embed, pc.attn_out, pc.mlp_out, pc.resid_post)
    last = cache[pc.resid_post[lm.model.layers - 1]]
    added = sum(cache[site[layer]] for site in (pc.attn_out, pc.mlp_out) for layer in range(lm.model.layers))
    return {"stream": last, "sum": cache[pc.embed] + added}


def attention_heads(lm: pc.LM):
    """Zero each head of one layer, one in each prompt of a batch, and see what that does to the next token."""
    layer, logits = lm.model.layers // 2, []
    with lm.trace() as t:
        for head in range(lm.sites.sizes.heads):
            with t.invoke(CLEAN) as a:
                a.layers[layer].attn.z[head] = 0
                logits.append(a.logits[-1].save())
                last = a.layers[layer].attn.z[:][-1].save()  # [H, E], with the last head silent
    return {"logits": torch.stack(logits), "z": last}


def neurons(lm: pc.LM):
    """Read some neurons of a layer, silence some and make others stronger."""
    layer = lm.model.layers // 2
    with lm.trace(CLEAN) as t:
        before = t.layers[layer].mlp.neurons[0:16].save()
        t.layers[layer].mlp.neurons[0:8] = 0
        t.layers[layer].mlp.neurons[8:16] *= 5
        after, logits = t.layers[layer].mlp.neurons[0:16].save(), t.logits[-1].save()
    return {"before": before, "after": after, "logits": logits}


def patchscope(lm: pc.LM):
    """Ask the model what a hidden state means: put it into the last token of a prompt that makes it repeat that token.

    Source: Ghandeharioun et al. 2024 (arXiv:2401.06102).
    """
    source, target = lm.model.layers // 3, lm.model.layers // 6
    with lm.trace(max_tokens=6) as t:
        a = t.invoke("The Colosseum")
        with t.invoke("cat -> cat; 1135 -> 1135; hello -> hello; ?") as b:
            b.layers[target].output[-1] = a.layers[source].output[-1]
            written, logits = b.layers[target].output[-1].save(), b.logits[-1].save()
    return {"written": written, "logits": logits, "tokens": b.token_ids}


def activation_oracle(lm: pc.LM):
    """Ask an oracle what rows of three depths mean: add them, as long as the rows there, to placeholders of a question
    after its second layer. A trained oracle is the model under a LoRA adapter: on vLLM, a second run with `lora=`.

    Source: Karvonen et al. 2025 (arXiv:2512.15674).
    """
    begin, end = (len(lm.tokens(ORACLE[:length])) for length in (len("Layer:"), len("Layer: ? ? ?")))
    written, logits, oracles = [], [], []
    with lm.trace(max_tokens=6) as t:
        target = t.invoke(CLEAN)
        for percent in (25, 50, 75):
            rows = target.layers[lm.model.layers * percent // 100].output[begin - end :]
            with t.invoke(ORACLE) as oracle:
                oracle.layers[1].output[begin:end].add(rows, norm="match")
                written.append(oracle.layers[1].output[begin:end].save())
                logits.append(oracle.logits[-1].save())
                oracles.append(oracle)
    return {
        "written": torch.cat(written),
        "logits": torch.stack(logits),
        "tokens": [token for oracle in oracles for token in oracle.token_ids],
    }


def fuzzing(lm: pc.LM):
    """Add seeded noise to the stream, as strong as a tenth of it. It is the same on every engine.

    Source: Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """
    layer = lm.model.layers // 2
    with lm.trace(CLEAN, max_tokens=4) as t:
        plain = t.all().layers[layer].output.save()
        t.all().layers[layer].output.noise(0.1, seed=1, relative=True)
        noisy = t.all().layers[layer].output.save()
    return {"plain": plain[: len(t.run.prompt_token_ids)], "noisy": noisy, "tokens": t.token_ids}


def streaming(lm: pc.LM):
    """Read tokens as they come, then what was saved; the first token that is generated is edited alone."""
    layer, tokens = lm.model.layers // 2, []
    with lm.trace(CLEAN, max_tokens=6, stream=True) as t:
        t.generated[0].layers[layer].mlp.output = 0
        first, steps = t.generated[0].layers[layer].output.save(), t.generated.layers[layer].output.save()
    for part in t:
        tokens += part.token_ids
    return {"first": first, "steps": steps, "tokens": tokens}


def within_one_run(lm: pc.LM):
    """Write an earlier layer's value into a later one, at every token while the model writes on. It takes one run: the
    rows stay on the device. Over pipeline stages there is no such write."""
    early, late = lm.model.layers // 4, lm.model.layers // 2
    with lm.trace(CLEAN, max_tokens=4) as t:
        t.all().layers[late].output += 0.5 * t.all().layers[early].output
        t.layers[late + 1].mlp.output[-1] = t.layers[early].mlp.output[1]
        stream, mlp = t.all().layers[late].output.save(), t.layers[late + 1].mlp.output[-1].save()
    return {"stream": stream, "mlp": mlp, "tokens": t.token_ids}
