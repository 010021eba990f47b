"""A server whose weights are updated in place, through vLLM's own route: the next program is scored with the new ones."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.language.program import to_dict

from ..models import with_weights, with_words
from ..reference.hooks import PlainModel
from .conftest import start, stop

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "vocab_size": 512}  # fmt: skip
PROMPTS = [[7, *np.random.default_rng(i).integers(5, 500, 80).tolist()] for i in range(2)]


@pytest.mark.slow
def test_scores_are_of_the_new_weights(tmp_path):
    weight = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32) / 11
    program = to_dict(pc.Program.of((), pc.Probe(weight, pc.resid_post[1], name="spoken", tokens=pc.generated)))
    folders = [with_weights(tmp_path / name, "8b", 3, seed=seed, **SHAPE) for seed, name in enumerate("ab")]
    for folder in folders:
        with_words(folder, 512)
    server = start(folders[0], tmp_path / "log", environment={"VLLM_SERVER_DEV_MODE": "1"})
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            scored = []
            for folder in folders:
                plain = PlainModel(folder)
                for _ in range(2):  # the second time from the cache
                    body = {"model": server.model, "prompt": PROMPTS, "max_tokens": 6, "temperature": 0, "n": 1,
                            "ignore_eos": True, "return_token_ids": True, "patchclamp": program}  # fmt: skip
                    answer = client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    choices, runs = answer.json()["choices"], answer.json()["patchclamp"]["runs"]
                    for prompt, choice, run in zip(PROMPTS, choices, runs, strict=True):
                        tokens = choice["token_ids"]
                        rows = plain.read([*prompt, *tokens[:-1]], "resid_post", 1)[len(prompt) :]
                        scored.append(run["probes"]["spoken"]["scores"])
                        np.testing.assert_allclose(scored[-1], rows @ torch.tensor(weight).T, atol=1e-4)
                several = {**body, "n": 2, "temperature": 1.0, "seed": 0}  # as TRL asks for rollouts
                answer = client.post("/v1/completions", json=several).json()
                for i, (choice, run) in enumerate(zip(answer["choices"], answer["patchclamp"]["runs"], strict=True)):
                    assert (choice["index"], run["index"]) == (i, i)
                    ids = [*PROMPTS[i // 2], *choice["token_ids"][:-1]]
                    expected = plain.read(ids, "resid_post", 1)[81:] @ torch.tensor(weight).T
                    np.testing.assert_allclose(run["probes"]["spoken"]["scores"], expected, atol=1e-4)
                if folder == folders[0]:
                    update = {"method": "reload_weights", "kwargs": {"weights_path": folders[1]}}
                    assert client.post("/collective_rpc", json=update).status_code == 200
        assert not np.allclose(scored[0], scored[-2], atol=1e-2)
    finally:
        stop(server)
