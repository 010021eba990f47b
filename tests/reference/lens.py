"""SmolLM2's sites beside TransformerLens on the same weights, in fp32: its own implementation (`HookedTransformer`) and
its hooks on Transformers' (`TransformerBridge`).

    python -m tests.reference.lens [vllm | transformers]

For development: TransformerLens 3 must be installed (4 has no implementation of its own any more), which patchclamp does
not ask for. Every name of its that is read as a site of ours is asked for by that name; prints, by name, the worst row's
‖a − b‖₂ / ‖b‖₂ over all layers and prompts, as JSON, and fails above 10⁻⁴ or if a name is in neither.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.pretrained.weight_conversions import convert_llama_weights
from transformers import AutoModelForCausalLM

import patchclamp as pc
from patchclamp.engines.preflight import prepare
from patchclamp.language.site import TRANSFORMER_LENS

PROMPTS = ("The capital of France is", "When John and Mary went to the store, John gave a drink to")
BOUND = 1e-4


def lens(folder: str) -> HookedTransformer:
    """TransformerLens' implementation of a Llama, with the folder's weights as they are."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = net.config
    cfg = HookedTransformerConfig(
        n_layers=said.num_hidden_layers, d_model=said.hidden_size, d_head=said.hidden_size // said.num_attention_heads,
        n_heads=said.num_attention_heads, n_key_value_heads=said.num_key_value_heads, d_mlp=said.intermediate_size,
        d_vocab=said.vocab_size, n_ctx=512, eps=said.rms_norm_eps, act_fn="silu", normalization_type="RMS",
        positional_embedding_type="rotary", rotary_base=said.rope_parameters["rope_theta"], final_rms=True,
        rotary_dim=said.hidden_size // said.num_attention_heads, rotary_adjacent_pairs=False, gated_mlp=True,
        original_architecture="LlamaForCausalLM", dtype=torch.float32, device="cpu", ungroup_grouped_query_attention=False,
    )  # fmt: skip
    made = HookedTransformer(cfg)
    made.load_state_dict(convert_llama_weights(net, cfg), strict=False)
    return made.eval()


def main(engine: str) -> None:
    folder = str(prepare())
    both = {
        "HookedTransformer": lens(folder),
        "TransformerBridge": TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32),
    }
    options = {"enforce_eager": True} if engine == "vllm" else {}
    worst: dict[str, dict[str, float]] = {name: {} for name in both}
    with pc.LM(folder, engine=engine, dtype="float32", **options) as lm:
        for prompt in PROMPTS:
            ids = lm.tokens(prompt)
            run = lm.run(ids, max_tokens=1, capture=[pc.Site(name) for name in lm.sites.names])
            for which, theirs in both.items():
                with torch.no_grad():
                    logits, cache = theirs.run_with_cache(torch.tensor([ids]))
                found = {"logits": apart(run["logits"], logits[:, -1])}
                for name in TRANSFORMER_LENS:
                    places = [name.replace("{l}", str(layer)) for layer in range(lm.model.layers)]
                    there = [place for place in dict.fromkeys(places) if place in cache]
                    if there:
                        found[name] = max(apart(run[place], cache[place][0]) for place in there)
                for name, gap in found.items():
                    worst[which][name] = max(worst[which].get(name, 0.0), gap)
        about = f"{lm.model.engine} {lm.model.version}"
    nowhere = [name for name in TRANSFORMER_LENS if not any(name in found for found in worst.values())]
    told = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "engine": about, "prompts": len(PROMPTS),
            "transformer_lens": version("transformer_lens"), "bound": BOUND, "worst_row": worst, "in neither": nowhere}  # fmt: skip
    print(json.dumps(told, indent=1))
    far = [gap for found in worst.values() for gap in found.values() if not gap <= BOUND]
    sys.exit(1 if far or nowhere else 0)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The worst row, heads one after the other."""
    a, b = ours.flatten(1), theirs.flatten(1).float()
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).max())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "vllm")
