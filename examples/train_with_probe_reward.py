"""Train a model by GRPO on the score of a probe: TRL draws rollouts from vLLM in its own process, each comes back with
the probe's scores, and after each step TRL writes the new weights into vLLM in place.

    pip install trl
    python examples/train_with_probe_reward.py smollm2 --site "resid_post[10]"

The probe is the difference of the means of pleasant and unpleasant texts. The reward of a rollout is the mean score of
its tokens; `beta` takes off a multiple of the KL divergence from the first weights. Optimising against a probe teaches
a model to move the probe, so judge the result with something else, such as its texts.

patchclamp proves the sites again before the first rollouts of each step, and no block of the prefix cache outlives
the weights that computed it.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from moods import PLEASANT, UNPLEASANT

import patchclamp as pc


def mean_difference(lm: pc.LM, texts: list[str], others: list[str], site: str) -> pc.Probe:
    """A probe that scores a text's mean row 1 higher than one of the others', on average. It reads generated tokens."""
    whole = pc.prompt[1:]  # the first token's row is much longer than all others
    means = [
        torch.stack(
            [run[site].float().mean(0) for run in lm.run(each, max_tokens=1, capture=[pc.Capture(site, whole)])]
        )
        for each in (texts, others)
    ]
    direction = means[0].mean(0) - means[1].mean(0)
    weight = direction / direction.square().sum()
    bias = -(weight @ torch.cat(means).mean(0))
    return pc.Probe(weight, at=site, tokens=pc.generated, bias=bias[None], name="reward")


def rollouts(prompts: list[str], trainer: Any, probe: pc.Probe) -> dict[str, list[Any]]:
    """One completion of each prompt, in the form of TRL's `rollout_func`, with the probe's scores beside it."""
    from vllm import SamplingParams

    vllm = trainer.vllm_generation
    params = SamplingParams(
        temperature=vllm.temperature, max_tokens=vllm.max_completion_length, logprobs=0,
        extra_args={"patchclamp": pc.Program.of(captures=[probe])},
    )  # fmt: skip
    inputs = [{"prompt_token_ids": ids} for ids in trainer.processing_class(prompts)["input_ids"]]
    outputs = vllm.llm.generate(inputs, params, use_tqdm=False)
    runs = [output.outputs[0].patchclamp for output in outputs]
    return {
        "prompt_ids": [run.prompt_token_ids for run in runs],
        "completion_ids": [run.token_ids for run in runs],
        "logprobs": [run.logprobs for run in runs],
        "scores": [run.probes[probe.name].mean().item() for run in runs],  # TRL hands it to the reward function
    }


def reward(completions: list[str], scores: list[float], **_: Any) -> list[float]:
    return scores


def train(model: str, probe: pc.Probe, prompts: list[str], config: dict[str, Any], **options: Any) -> list[dict]:
    """Train, and return TRL's log of each step. `options`: those of the `vllm.LLM`."""
    import vllm
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    if not torch.cuda.is_available():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False  # else vLLM's CPU build packs its weights, and TRL cannot write them
        options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, **options}
        config = {**config, "use_cpu": True, "model_init_kwargs": {"dtype": "float32"}}
    # TRL gives its `LLM` no further options, and this one needs patchclamp
    vllm_generation.LLM = functools.partial(vllm.LLM, additional_config={"patchclamp": {}}, **options)
    config |= {"use_vllm": True, "vllm_mode": "colocate", "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    trainer = GRPOTrainer(
        model, reward_funcs=reward, train_dataset=Dataset.from_dict({"prompt": prompts}), args=GRPOConfig(**config),
        rollout_func=functools.partial(rollouts, probe=probe),
    )  # fmt: skip
    trainer.train()
    return [line for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--site", default="resid_post[10]")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    with pc.LM(args.model, engine="transformers", dtype="float32") as lm:
        probe, folder = mean_difference(lm, PLEASANT, UNPLEASANT, args.site), lm.model.name
    openings = [" ".join(text.split()[:3]) for text in PLEASANT + UNPLEASANT]
    config = {
        "output_dir": "out/grpo", "max_steps": args.steps, "per_device_train_batch_size": 8, "num_generations": 8,
        "max_completion_length": 16, "vllm_max_model_length": 256, "learning_rate": 1e-5, "beta": 0.05, "seed": 0,
        "bf16": torch.cuda.is_available(), "lr_scheduler_type": "constant",
    }  # fmt: skip
    for line in train(folder, probe, openings, config):
        print(f"step {line['step']}: reward {line['reward']:+.3f}, KL {line['kl']:.4f}")


if __name__ == "__main__":
    main()
