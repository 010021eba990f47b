"""The indirect-object prompts of TransformerLens' exploratory analysis demo, and what our studies measure on them.

Eight prompts, "When John and Mary went to the shops, John gave the bag to" and the like, each beginning with the
end-of-text token; the corrupt one of a prompt is the one in which the other person gives. Effects are of means over the
prompts: 0 is the corrupt run's logit difference, 1 the clean one's.

Source: Wang et al. 2022 (arXiv:2211.00593), and Nanda, "Exploratory Analysis Demo" of TransformerLens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import patchclamp as pc
from patchclamp.studies import direct_attribution, patch_sweep

SENTENCES = {
    "When John and Mary went to the shops,{} gave the bag to": (" Mary", " John"),
    "When Tom and James went to the park,{} gave the ball to": (" Tom", " James"),
    "When Dan and Sid went to the shops,{} gave an apple to": (" Dan", " Sid"),
    "After Martin and Amy went to the park,{} gave a drink to": (" Martin", " Amy"),
}
ASKED = [
    (sentence.format(giver), receiver, giver)
    for sentence, (one, other) in SENTENCES.items()
    for receiver, giver in ((one, other), (other, one))
]


def folded(source: Path, folder: Path) -> Path:
    """GPT-2 with the biases of its values moved into the biases of its output projections, as TransformerLens folds
    them: the same function, whose heads write what they attend to and nothing besides."""
    import torch
    from transformers import AutoTokenizer, GPT2LMHeadModel

    net = GPT2LMHeadModel.from_pretrained(source, dtype=torch.float32)
    width = net.config.n_embd
    with torch.no_grad():
        for block in net.transformer.h:
            values = block.attn.c_attn.bias[2 * width :]
            block.attn.c_proj.bias += values @ block.attn.c_proj.weight
            values.zero_()
    net.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def measured(lm: pc.LM, begin: int) -> dict[str, Any]:
    """What is published, measured on `lm`. `begin`: the token that every prompt begins with.

    clean: the mean logit difference
    resid_pre, attn_out: the effects of patching (layer, position); z: of patching (layer, head) at every position
    direct: what (layer, head) adds to the logit difference, a mean
    """
    clean = [[begin, *lm.tokenizer.bare(prompt)] for prompt, _, _ in ASKED]
    swapped = [clean[i ^ 1] for i in range(len(clean))]
    answers, foils = ([asked[side] for asked in ASKED] for side in (1, 2))
    pairs: dict[str, Any] = {"clean": clean, "corrupt": swapped, "answer": answers, "foil": foils}
    streams = patch_sweep(lm, **pairs, sites=["resid_pre", "attn_out"], show_progress=False)
    everywhere = {"everywhere": pc.prompt}
    heads = patch_sweep(lm, **pairs, sites=["z"], group=1, positions=everywhere, show_progress=False)
    attributed = direct_attribution(lm, clean, answer=answers, foil=foils, by=("layer", "head"))

    def effect(sweep: Any, value: float) -> float:
        return (value - sweep.corrupt) / (sweep.clean - sweep.corrupt)

    found: dict[str, Any] = {"clean": streams.clean, "resid_pre": {}, "attn_out": {}, "z": {}, "direct": {}}
    for cell in streams.cells():
        found[cell.site][cell.layer, cell.column.corrupt[0]] = effect(streams, cell.value)
    for cell in heads.cells():
        found["z"][cell.layer, int(cell.index)] = effect(heads, cell.value)
    means = attributed.heads.mean(0)
    found["direct"] = {(layer, head): float(x) for layer, row in enumerate(means) for head, x in enumerate(row)}
    return found
