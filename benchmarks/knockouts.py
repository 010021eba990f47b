"""Time knockouts of 64 edges into a prompt's last token against eager attention of Transformers in one batch, with a
mask for each edge, and compare the log-probabilities. As requests, and graded, in batches on a GPU.

    python benchmarks/knockouts.py [--model MODEL] [--rounds 5]

Whole calls of fresh prompts of 128 tokens (40 on a CPU), in turn; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch
import transformers

import patchclamp as pc
from patchclamp.engines import resolve

CELLS, TOKEN = 64, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype, length = ("cuda", torch.bfloat16, 128) if on_gpu else ("cpu", torch.float32, 40)
    options: dict = {"gpu_memory_utilization": 0.4} if on_gpu else {"enforce_eager": True}
    options |= {"skip_tokenizer_init": True, "max_num_seqs": CELLS, "max_num_batched_tokens": 8192}
    lm = pc.LM(asked.model, engine="vllm", prove=False, **options)
    net = transformers.AutoModelForCausalLM.from_pretrained(
        resolve(asked.model, options), dtype=dtype, attn_implementation="eager", device_map=device
    )
    keys = [i % (length - 1) for i in range(CELLS)]
    edits = [[pc.Knockout(f"prompt[{key}]", pc.pattern, "prompt[-1]")] for key in keys]

    def patchclamp(ids: list[int]) -> list[float]:
        return [run.scores[TOKEN] for run in lm.run([ids] * CELLS, edits=edits, score=[TOKEN], max_tokens=1)]

    def graded(ids: list[int]) -> list[float]:
        return lm.grade(ids, edits, score=[TOKEN]).logprobs[:, 0].tolist()

    def eager(ids: list[int]) -> list[float]:
        masks = torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu(1).repeat(CELLS, 1, 1, 1)
        masks[torch.arange(CELLS), 0, -1, torch.tensor(keys)] = -torch.inf
        with torch.inference_mode():
            batch = torch.tensor([ids] * CELLS, device=device)
            logits = net(batch, attention_mask=masks, logits_to_keep=1).logits
        return logits[:, 0].float().log_softmax(-1)[:, TOKEN].tolist()

    draw, gaps = np.random.default_rng(0), list[float]()
    times: dict[str, list[float]] = {"patchclamp": [], "graded": [], "eager": []}
    for number in range(asked.rounds + 1):
        ids, found = draw.integers(100, lm.model.d_vocab - 100, length).tolist(), list[list[float]]()
        for run in (patchclamp, graded, eager):
            begin = time.perf_counter()
            found.append(run(ids))
            times[run.__name__] += [time.perf_counter() - begin] if number else []
        gaps.append(float(np.abs(np.subtract(found[:2], found[2])).max()))
    told = {name: round(statistics.median(taken), 4) for name, taken in times.items()}
    ratios = {
        f"{name} / eager": round(statistics.median(a / b for a, b in zip(taken, times["eager"], strict=True)), 3)
        for name, taken in times.items()
        if name != "eager"
    }
    print(json.dumps({**told, **ratios, "largest gap": max(gaps), "route": lm.grade([1, 2, 3], edits[:1]).route}))
    lm.close()


if __name__ == "__main__":
    main()
