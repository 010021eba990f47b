"""Attention patterns on a GPU: equal to Transformers' eager attention, and what they cost a decode step.

python -m tests.gpu.attention [--v1] [--cost] [FAMILY ...]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import patchclamp as pc
from tests.models import of_family, shape_only
from tests.reference.attention import edited

FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "gpt2")
NOISY = ("gpt_oss",)  # rounding in bf16 changes the choice of experts, and so all later layers: layer 0 is compared
NEW = {"max_tokens": 8, "sampling": {"ignore_eos": True}}


def differences(name: str) -> dict[str, float]:
    """The largest difference of whole patterns, in bf16, of prompts in chunks, behind cached prefixes, and generated."""
    folder = of_family(Path(tempfile.mkdtemp()) / name, name)
    draw, found = np.random.default_rng(0), dict[str, float]()
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    net = net.cuda().eval()
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28, "prove": False}
    with pc.LM(
        folder, engine="vllm", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256,
        gpu_memory_utilization=0.3, **options,
    ) as lm:  # fmt: skip
        shared = draw.integers(3, lm.model.d_vocab, 100).tolist()
        prompts = [shared + draw.integers(3, lm.model.d_vocab, more).tolist() for more in (1, 20, 60)] + [shared[:1]]
        for way, capture in (("whole", pc.pattern), ("cached", pc.Capture(pc.pattern, pc.prompt[-1] | pc.generated))):
            runs = lm.run(prompts, capture=capture, **NEW)
            worst = 0.0
            for run in runs:
                ids = torch.tensor([[*run.prompt_token_ids, *run.token_ids[:-1]]]).cuda()
                with torch.no_grad():
                    given = net(ids, output_attentions=True).attentions
                where = run.positions(pc.pattern)
                for layer, each in enumerate(given):
                    rows = each[0].transpose(0, 1)[where].float().cpu()
                    worst = max(worst, float((rows - run[pc.pattern[layer]]).abs().max()))
                    if name in NOISY:
                        break
                if name != "gpt_oss":
                    assert torch.allclose(run[pc.pattern].sum(-1), torch.ones(()), atol=1e-5)
            assert way == "whole" or all(run.cached_tokens for run in runs[:3])
            found[way] = worst
            assert worst < 0.06, (name, found)  # rounding of the model in bf16
        found |= {
            "graphs": lm.engine.status().get("active_graphs", 0),
            "knockout": name not in NOISY and _knocked(lm, net, prompts[1]),
            "graded": name not in NOISY and _graded(lm, prompts[1]),
        }
    return found


def _knocked(lm: pc.LM, net: Any, prompt: list[int]) -> float:
    """The error of `final_norm` with knocked out edges, in prompt and decode, relative to what they change."""
    edit = pc.Knockout(pc.prompt[66:69], pc.pattern, pc.prompt[70:] | pc.generated)  # within windows, too
    plain, run = lm.run([prompt] * 2, edits=[[], [edit]], capture=pc.final_norm, **NEW)
    rows = run[pc.final_norm]
    ids, late = [*run.prompt_token_ids, *run.token_ids[:-1]], range(70, len(rows))
    heads = range(lm.sites.sizes.heads)
    removed = {layer: [(head, late, range(66, 69)) for head in heads] for layer in range(lm.model.layers)}
    norms = list[torch.Tensor]()
    hook = net.get_output_embeddings().register_forward_pre_hook(lambda _, args: norms.append(args[0][0].float().cpu()))
    for edges in (removed, None):
        edited(net, ids, edges)
    hook.remove()
    changed = float((norms[0] - norms[1])[70:].norm())
    error = float((norms[0] - rows)[70:].norm()) / changed
    assert error < 0.1, (error, changed)
    lm.run([prompt], edits=edit, **NEW)
    again = lm.run([prompt], **NEW)[0]
    assert again.token_ids == plain.token_ids
    return error


def _graded(lm: pc.LM, prompt: list[int]) -> float:
    """The error of graded knockouts in batches, against requests, relative to what they change."""
    prompt = prompt[:56]  # a batch has 64 tokens
    programs = [pc.Knockout(pc.prompt[key : key + 12], pc.pattern, pc.prompt[-2:]) for key in range(26, 42, 2)]
    grades = lm.grade(prompt, programs, score=[7, 9])
    assert grades.route == "bulk", grades.route_reason
    runs = lm.run([prompt] * len(programs), edits=[[each] for each in programs], score=[7, 9], max_tokens=1)
    expected = np.array([[run.scores[7], run.scores[9]] for run in runs])
    error = float(np.abs(grades.logprobs - expected).max() / np.abs(expected - grades.baseline).max())
    assert error < 0.25, error
    return error


def cost(rounds: int) -> None:
    """The last token's pattern for all heads of 4 layers, and knockouts, at batch 64 and 2,000 cached tokens, 8B shape."""
    folder = shape_only(Path(tempfile.mkdtemp()), "8b", None)
    draw = np.random.default_rng(0)
    options = {
        "kv_cache_memory_bytes": 1 << 35,
        "max_num_seqs": 64,
        "max_model_len": 2304,
        "gpu_memory_utilization": 0.3,
    }
    with pc.LM(
        folder, engine="vllm", dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, prove=False, **options
    ) as lm:
        prompts = [draw.integers(10, 500, 2000).tolist() for _ in range(64)]
        layers = [pc.pattern[i] for i in (4, 12, 20, 28)]
        new = {"max_tokens": 33, "sampling": {"ignore_eos": True}}
        cases: dict[str, Any] = {
            "no program": None, "z of 4 layers": [pc.Capture(pc.z[i], pc.generated) for i in (4, 12, 20, 28)],
            "whole": [pc.Capture(each, pc.generated) for each in layers],
            "top 8": [pc.Capture(each, pc.generated, top=8) for each in layers],
        }  # fmt: skip
        knocks = {"knockouts in 4 layers": layers, "knockouts in all layers": [pc.pattern]}
        times: dict[str, list[float]] = {name: [] for name in (*cases, *knocks)}
        for number in range(rounds + 1):
            for name in times:
                edits = [pc.Knockout("prompt[1:9]", each, pc.generated) for each in knocks.get(name, ())]
                lm.run(prompts, max_tokens=1)
                begin = time.perf_counter()
                runs = lm.run(prompts, capture=cases.get(name), edits=edits, **new)
                times[name] += [time.perf_counter() - begin] if number else []
                del runs
        _tell(times, "no program")
        prompts = [draw.integers(10, 500, 1000).tolist() for _ in range(rounds + 1)]
        ours: list[float] = []
        for prompt in prompts:
            begin = time.perf_counter()
            run = lm.run(prompt, capture=layers, max_tokens=1)
            found = [run[each] for each in layers]
            ours.append(time.perf_counter() - begin)
            del run, found
    with torch.device("cuda"):
        config = transformers.AutoConfig.from_pretrained(folder)
        net: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
    theirs: list[float] = []
    for prompt in prompts:
        begin = time.perf_counter()
        with torch.no_grad():
            attentions = net(torch.tensor([prompt]).cuda(), output_attentions=True, logits_to_keep=1).attentions
        found = [attentions[i].float().cpu() for i in (4, 12, 20, 28)]
        theirs.append(time.perf_counter() - begin)
        del attentions, found
    _tell(
        {"whole prompts, eager Transformers": theirs[1:], "whole prompts": ours[1:]},
        "whole prompts, eager Transformers",
    )


def _tell(times: dict[str, list[float]], base: str) -> None:
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, times[base], strict=True))
        print("cost", name, json.dumps({"s": round(statistics.median(taken), 4), "ratio": round(ratio, 3)}), flush=True)


def main() -> None:
    if "--v1" in sys.argv:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if "--cost" in sys.argv:
        cost(5)
        return
    given = [name for name in sys.argv[1:] if not name.startswith("--")]
    for name in given or (FAMILIES[:2] if "--v1" in sys.argv else FAMILIES):
        print(name, json.dumps(differences(name)), flush=True)


if __name__ == "__main__":
    main()
