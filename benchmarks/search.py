"""How fast a search is: refusals against KL divergence under directional ablation, beside the same trials as batched
hooks on Transformers, on one device.

    python benchmarks/search.py                          (a CUDA machine: the shape of Qwen3-0.6B, random weights, bf16)
    python benchmarks/search.py --shape tiny             (a CPU is enough, to see that it works)

A trial ablates a direction from the outputs of attention and MLP, from a layer on and with a strength. It is scored by
the KL divergence of the next token on 100 prompts, and by texts of 32 tokens that follow them. The peer's batches have
the prompts of one trial, or of 8 with a strength for each row. It writes the texts of fewer trials, and its time is
scaled to their number. The divergences of both sides are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import patchclamp as pc
from tests.models import with_weights

SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "0.6b": ("0.6b", 28, {"vocab_size": 151936}),
    "tiny": ("0.6b", 4, {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
                         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2000}),
}  # fmt: skip
SIZES = {"0.6b": (200, 100, 32, 24), "tiny": (8, 10, 8, 8)}  # trials, prompts, tokens of a text, trials of the peer


class Hooks:
    """Plain hooks on Transformers. `trials`: those of a batch, each a first layer and a strength."""

    def __init__(self, model: str, direction: np.ndarray, prompts: list[list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device).eval()
        unit = torch.tensor(direction / np.linalg.norm(direction), dtype=torch.float32, device=self.device)
        self.strengths: Any = None  # [layers, rows of the batch]
        for number, layer in enumerate(self.net.model.layers):
            for module in (layer.self_attn, layer.mlp):
                module.register_forward_hook(self.hook(number, unit))
        longest = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=self.device)
        self.mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=self.device)

    def hook(self, number: int, unit: Any) -> Any:
        def ablate(module: Any, inputs: Any, output: Any) -> Any:
            if self.strengths is None:
                return output
            rows = output[0] if isinstance(output, tuple) else output
            h = rows.float()
            strength = self.strengths[number][:, None, None]
            h = (h - strength * (h @ unit)[..., None] * unit).to(rows.dtype)
            return (h, *output[1:]) if isinstance(output, tuple) else h

        return ablate

    def batches(self, trials: list[tuple[int, float]], at_once: int) -> Any:
        """Yield the ids and masks of batches of several trials, with their strengths set."""
        layers = np.arange(len(self.net.model.layers))[:, None]
        for begin in range(0, len(trials), at_once):
            part = trials[begin : begin + at_once]
            first, strength = (np.repeat(np.array(of), len(self.ids)) for of in zip(*part, strict=True))
            on = np.where(layers >= first, strength, 0.0).astype(np.float32)
            self.strengths = self.torch.tensor(on, device=self.device)
            yield self.ids.repeat(len(part), 1), self.mask.repeat(len(part), 1)
        self.strengths = None

    def next_logprobs(self, ids: Any, mask: Any) -> Any:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self.net(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, -1]
        return logits.float().log_softmax(-1)

    def kl(self, trials: list[tuple[int, float]], at_once: int) -> np.ndarray:
        with self.torch.inference_mode():
            base = self.next_logprobs(self.ids, self.mask)
            found = []
            for ids, mask in self.batches(trials, at_once):
                logprobs = self.next_logprobs(ids, mask).view(-1, *base.shape)
                found.append((base.exp() * (base - logprobs)).sum(-1).mean(-1).cpu().numpy())
        return np.concatenate(found)

    def texts(self, trials: list[tuple[int, float]], tokens: int, at_once: int) -> list[list[int]]:
        found: list[list[int]] = []
        with self.torch.inference_mode():
            for ids, mask in self.batches(trials, at_once):
                out = self.net.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens,
                                        min_new_tokens=tokens, do_sample=False, pad_token_id=0)  # fmt: skip
                found += out[:, ids.shape[1] :].tolist()
        return found


def timed(call: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    args = parser.parse_args()
    name, layers, changed = SHAPES[args.shape]
    count, many, tokens, fewer = SIZES[args.shape]
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        model = with_weights(Path(folder), name, layers, **changed)
        vocab = changed["vocab_size"]
        prompts = [draw.integers(10, vocab, int(n)).tolist() for n in draw.integers(12, 33, many)]
        direction = draw.standard_normal(changed.get("hidden_size", 1024))
        options = ({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27} if args.shape == "tiny" else
                   {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.05,
                    "compilation_config": {"cudagraph_capture_sizes": [1, 64, 256, 512]}})  # fmt: skip
        space = pc.studies.Space(
            lambda first, strength: [pc.Ablate(direction, at=site[layer], strength=strength)
                                     for layer in range(first, layers) for site in (pc.attn_out, pc.mlp_out)],
            {"first": range(layers // 2), "strength": pc.studies.Uniform(0, 2)},
        )  # fmt: skip
        objectives = {
            "kl": [pc.studies.KLDivergence(prompts=prompts)],
            "texts": [pc.studies.TextScore(prompts=prompts, max_tokens=tokens, judge=lambda prompt, text: 0.0)],
        }
        with pc.LM(model, engine="vllm", max_model_len=256, skip_tokenizer_init=True, **options) as lm:
            ours: dict[str, float] = {}
            values: Any = None
            for case, of in objectives.items():
                search = pc.studies.Search(space=space, objectives=of, trials=count)
                pc.studies.search(lm, space, of, trials=2, show_progress=False)  # warm
                ours[case], result = timed(lambda search=search: search.run(lm, show_progress=False))
                values = result if case == "kl" else values
                print(case, "ours", round(ours[case], 2), "s", flush=True)
        hooks = Hooks(model, direction, prompts)
        trials = [(each["first"], each["strength"]) for each in values.settings]
        hooks.kl(trials[:16], 8)
        hooks.texts(trials[:1], 2, 1)
        theirs: dict[int, dict[str, float]] = {}
        for at_once, few in ((1, fewer // 4), (8, fewer)):
            of_kl, kl = timed(lambda n=at_once: hooks.kl(trials, n))
            of_texts, _ = timed(lambda n=at_once, few=few: hooks.texts(trials[:few], tokens, n))
            of_texts *= count / few
            theirs[at_once] = {"kl": of_kl, "texts": of_texts}
            print("hooks", at_once, {name: round(each, 2) for name, each in theirs[at_once].items()}, "s", flush=True)
    difference = np.abs(values.values[:, 0] - kl) / np.maximum(kl, 1e-3)
    print("median relative difference of KL divergences", float(np.median(difference)))
    ours["both"] = sum(ours.values())
    for case, seconds in ours.items():
        figures = {"ours_s": round(seconds, 2)}
        for at_once, of_side in theirs.items():
            figures[f"hooks_s, {at_once} at once"] = round(of_side.get(case, sum(of_side.values())), 2)
            figures[f"ratio, {at_once} at once"] = round(of_side.get(case, sum(of_side.values())) / seconds, 2)
        print("search", case, json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
