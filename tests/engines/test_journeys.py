"""The journeys of `examples/`, on the small real model: each step does what it says, and the last one measures it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import patchclamp as pc

from .conftest import TINY
from .test_train_sae import ROOT, loaded

REWARDED = """
import json, sys
import numpy as np
import patchclamp as pc
from train_with_probe_reward import train

weight = np.random.default_rng(0).standard_normal((1, int(sys.argv[2]))).astype("float32") / 11
probe = pc.Probe(weight, pc.resid_post[0], tokens=pc.generated, name="reward")
config = {"output_dir": sys.argv[3], "max_steps": 8, "per_device_train_batch_size": 64, "num_generations": 64, "seed": 0,
          "max_completion_length": 8, "learning_rate": 3e-3, "beta": 0.01, "lr_scheduler_type": "constant",
          "bf16": False, "vllm_max_model_length": 64, "disable_tqdm": True}
lines = train(sys.argv[1], probe, ["w5 w6 w7"] * 8, config)
print(json.dumps(lines))
"""


@pytest.mark.slow
def test_a_feature_that_was_found_steers_what_it_was_found_for(engines, tmp_path):
    lm = engines.get("transformers", "float32")
    made = loaded("journey_features").journey(lm, tmp_path, "resid_post[12]", documents=4, steps=150)
    assert lm.sites.dictionaries == {}
    scored, logprob = made["scored"], made["scored"].metrics.index("logprob")
    change = dict(zip(scored.variants, scored.values[logprob].mean(-1) - scored.values[logprob, 0].mean(), strict=True))
    assert change["pleasant"] > max(change["unedited"], change["unpleasant"], change["control"])
    questions = loaded("journey_features").QUESTIONS
    plain = [lm.loglikelihood(each["prompt"], each["choices"][0]) for each in questions]
    np.testing.assert_allclose(scored.values[logprob, 0], [float(one) for one in plain], atol=1e-3)
    assert made["quality"].totals["loss_recovered"] > 0.9
    assert made["sae"].content == pc.SAE.load(tmp_path / "sae").content


@pytest.mark.slow
def test_an_alert_comes_from_the_requests_that_it_should(smollm2, tmp_path):
    """The counter in the metrics is that of the scores in the log."""
    made = loaded("journey_monitor").journey(
        str(smollm2), tmp_path, "--dtype=float32", "--enforce-eager", "--max-model-len=512",
        f"--kv-cache-memory-bytes={1 << 26}",
    )  # fmt: skip
    assert made["auroc"] > 0.9
    (calm_fired, calm), (angry_fired, angry) = made["found"]["calm"], made["found"]["angry"]
    assert (calm_fired, angry_fired) == (False, True)
    assert sum(line["unpleasant"][0] > 0.9 for line in made["lines"]) == calm + angry


@pytest.mark.slow
def test_an_ablation_that_was_searched_is_exported_and_served(engines, tmp_path):
    """It removes the behaviour and leaves other prompts, and the served checkpoint writes the program's texts."""
    example, lm = loaded("journey_ablation"), engines.get("vllm", "float32")
    prompts, others = example.UNPLEASANT[:8], example.PLEASANT[:8]
    made = example.journey(lm, tmp_path, prompts, others, example.GLOOM, trials=16)
    result, best = made["result"], made["best"]
    assert result.values[best, 0] < result.unedited[0]
    assert 0 < result.values[best, 1] <= 0.2
    runs = lm.run(prompts, max_tokens=24, edits=made["program"].edits)
    gloomy = [any(re.search(each, run.text, re.IGNORECASE) for each in example.GLOOM) for run in runs]
    assert np.mean(gloomy) == result.values[best, 0]
    assert made["exported"].error < 1e-4
    served = example.completions(
        tmp_path / "model", prompts[:4], "--dtype=float32", "--enforce-eager", "--max-model-len=512",
        f"--kv-cache-memory-bytes={1 << 26}",
    )  # fmt: skip
    with pc.LM(str(tmp_path / "model"), engine="transformers", dtype="float32") as exported:
        assert served == [run.text for run in exported.run(prompts[:4], max_tokens=24)]
    assert (tmp_path / "search.png").stat().st_size > 5_000


@pytest.mark.slow
def test_the_reward_of_a_probe_rises(tmp_path):
    """TRL's GRPO in colocate mode. It compares vLLM's log-probabilities with the trainer's in each step: the same weights."""
    from ..models import with_weights, with_words

    folder = with_weights(tmp_path / "model", "8b", 3, **TINY)
    with_words(folder, TINY["vocab_size"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), *sys.path])}
    words = [sys.executable, "-c", REWARDED, folder, str(TINY["hidden_size"]), str(tmp_path / "out")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = json.loads(done.stdout.splitlines()[-1])
    rewards = [line["reward"] for line in lines]
    assert len(rewards) == 8
    assert min(rewards[-2:]) > max(rewards[:2]) + 0.2
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-4
    assert lines[-1]["kl"] > lines[0]["kl"]
