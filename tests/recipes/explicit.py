"""The recipes as programs written by hand."""

from __future__ import annotations

import torch

import patchclamp as pc
from tests.recipes.traced import CLEAN, CORRUPT, ORACLE

LAST = pc.prompt[-1]
LOGITS = pc.logits @ LAST


def clone_and_replace(lm: pc.LM):
    site = pc.resid_post[lm.model.layers // 2]
    edits = [pc.Zero(site, tokens=LAST), pc.Scale(2.0, site, tokens=pc.prompt[1:3])]
    run = lm.run(CLEAN, max_tokens=1, edits=edits, capture=[site, LOGITS])
    return {"changed": run[site], "logits": run[pc.logits][0]}


def ablation(lm: pc.LM):
    layer, direction = lm.model.layers // 2, torch.linspace(-1, 1, lm.model.d_model)
    site = pc.resid_post[layer + 1]
    edits = [pc.Zero(pc.attn_out[layer]), pc.Ablate(direction, site)]
    run = lm.run(CLEAN, max_tokens=1, edits=edits, capture=[site, LOGITS])
    return {"stream": run[site], "logits": run[pc.logits][0]}


def steering(lm: pc.LM):
    site = pc.resid_post[lm.model.layers // 3]
    love, hate = lm.run(["I love this", "I hate this"], max_tokens=1, capture=[site @ LAST])
    direction = torch.as_tensor(love[site][0] - hate[site][0])
    edits = [pc.Add(direction, site, scale=2.0)]
    run = lm.run("I think that the film", max_tokens=8, edits=edits, capture=[pc.logits])
    return {"direction": direction, "logits": run[pc.logits], "tokens": run.token_ids}


def logit_lens(lm: pc.LM):
    last = pc.resid_post[lm.model.layers - 1]
    clean = lm.run(CLEAN, max_tokens=1, capture=[pc.resid_post @ LAST])
    edits = [
        [pc.Replace(pc.From(clean, pc.resid_post[layer], LAST), last, tokens=LAST)] for layer in range(lm.model.layers)
    ]
    runs = lm.run([CLEAN] * len(edits), max_tokens=1, edits=edits, capture=[LOGITS])
    logits = torch.stack([torch.as_tensor(run[pc.logits][0]) for run in runs])
    return {"logits": logits, "tokens": logits.argmax(-1).tolist()}


def activation_patching(lm: pc.LM):
    sites = [pc.resid_post[layer] for layer in range(0, lm.model.layers, 3)]
    clean = lm.run(CLEAN, max_tokens=1, capture=[site @ LAST for site in sites])
    edits = [[pc.Replace(pc.From(clean, site, LAST), site, tokens=LAST)] for site in sites]
    runs = lm.run([CORRUPT] * len(edits), max_tokens=1, edits=edits, capture=[LOGITS])
    return {"logits": torch.stack([torch.as_tensor(run[pc.logits][0]) for run in runs])}


def two_traces(lm: pc.LM):
    site = pc.resid_post[lm.model.layers // 2]
    clean = lm.run(CLEAN, max_tokens=1, capture=[site @ LAST])[site][0]
    run = lm.run(CORRUPT, max_tokens=1, edits=[pc.Replace(clean, site, tokens=LAST)], capture=[LOGITS])
    return {"clean": clean, "logits": run[pc.logits][0]}


def caching(lm: pc.LM):
    layers = lm.model.layers
    run = lm.run(CLEAN, max_tokens=1, capture=[pc.embed, pc.attn_out, pc.mlp_out, pc.resid_post])
    added = sum(run[site[layer]] for site in (pc.attn_out, pc.mlp_out) for layer in range(layers))
    return {"stream": run[pc.resid_post[layers - 1]], "sum": run[pc.embed] + added}


def attention_heads(lm: pc.LM):
    layer, heads = lm.model.layers // 2, lm.sites.sizes.heads
    edits = [[pc.Zero(pc.z[layer, head])] for head in range(heads)]
    runs = lm.run([CLEAN] * heads, max_tokens=1, edits=edits, capture=[LOGITS, pc.z[layer] @ LAST])
    logits = torch.stack([torch.as_tensor(run[pc.logits][0]) for run in runs])
    return {"logits": logits, "z": runs[-1][pc.z[layer]][0]}


def neurons(lm: pc.LM):
    layer = lm.model.layers // 2
    site = pc.neurons[layer, 0:16]
    edits = [pc.Capture(site), pc.Zero(pc.neurons[layer, 0:8]), pc.Scale(5.0, pc.neurons[layer, 8:16])]
    run = lm.run(CLEAN, max_tokens=1, edits=edits, capture=[site, LOGITS])
    return {"before": run["edits[0]"], "after": run["capture[0]"], "logits": run[pc.logits][0]}


def patchscope(lm: pc.LM):
    source, target = pc.resid_post[lm.model.layers // 3], pc.resid_post[lm.model.layers // 6]
    clean = lm.run("The Colosseum", max_tokens=1, capture=[source @ LAST])
    edits = [pc.Replace(pc.From(clean, source, LAST), target, tokens=LAST)]
    prompt = "cat -> cat; 1135 -> 1135; hello -> hello; ?"
    run = lm.run(prompt, max_tokens=6, edits=edits, capture=[target @ LAST, LOGITS])
    return {"written": run[target][0], "logits": run[pc.logits][0], "tokens": run.token_ids}


def activation_oracle(lm: pc.LM):
    begin, end = (len(lm.tokens(ORACLE[:length])) for length in (len("Layer:"), len("Layer: ? ? ?")))
    read, placeholders, at = pc.prompt[begin - end :], pc.prompt[begin:end], pc.resid_post[1]
    sites = [pc.resid_post[lm.model.layers * percent // 100] for percent in (25, 50, 75)]
    target = lm.run(CLEAN, max_tokens=1, capture=[site @ read for site in dict.fromkeys(sites)])
    edits = [[pc.Add(pc.From(target, site, read), at, placeholders, norm="match")] for site in sites]
    runs = lm.run([ORACLE] * 3, max_tokens=6, edits=edits, capture=[at @ placeholders, LOGITS])
    written, logits = (torch.cat([torch.as_tensor(run[site]) for run in runs]) for site in (at, pc.logits))
    return {"written": written, "logits": logits, "tokens": [token for run in runs for token in run.token_ids]}


def fuzzing(lm: pc.LM):
    site = pc.resid_post[lm.model.layers // 2]
    edits = [pc.Capture(site, tokens=pc.prompt), pc.Noise(0.1, site, seed=1, relative=True)]
    run = lm.run(CLEAN, max_tokens=4, edits=edits, capture=[site])
    return {"plain": run["edits[0]"], "noisy": run["capture[0]"], "tokens": run.token_ids}


def streaming(lm: pc.LM):
    layer = lm.model.layers // 2
    site, edits = pc.resid_post[layer], [pc.Zero(pc.mlp_out[layer], tokens=pc.generated[0])]
    stream = lm.stream(CLEAN, max_tokens=6, edits=edits, capture=[site @ pc.generated])
    tokens = [token for part in stream for token in part.token_ids]
    return {"first": stream.run[site][0], "steps": stream.run[site], "tokens": tokens}


def within_one_run(lm: pc.LM):
    early, late = lm.model.layers // 4, lm.model.layers // 2
    stream, mlp = pc.resid_post[late], pc.mlp_out[late + 1]
    edits = [
        pc.Add(pc.SameRun(pc.resid_post[early]), stream, scale=0.5),
        pc.Replace(pc.SameRun(pc.mlp_out[early], pc.prompt[1]), mlp, tokens=LAST),
    ]
    run = lm.run(CLEAN, max_tokens=4, edits=edits, capture=[stream, mlp @ LAST])
    return {"stream": run[stream], "mlp": run[mlp][0], "tokens": run.token_ids}
