"""LoRA over two workers: requests with adapters and without in one batch, as with one worker's merged weights."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from vllm.envs import disable_envs_cache

import patchclamp as pc
from tests.models import with_weights

from .lora import adapter, merged
from .test_lora import EVERYTHING, IDS, OPTIONS, SAMPLING, worst_row

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 512}
WAYS = {
    "tensor": {"tensor_parallel_size": 2, "enforce_eager": True},
    "tensor, one head of keys": {"tensor_parallel_size": 2, "enforce_eager": True},
}


@pytest.fixture(scope="module")
def bound():
    """Every core takes its turn as a worker's."""
    cores, before = sorted(os.sched_getaffinity(0)), os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    disable_envs_cache()
    yield
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
    if before is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = before
    disable_envs_cache()


@pytest.fixture(params=WAYS, scope="module")
def way(request, bound, tmp_path_factory):
    """An engine, its adapters by name, and engines of the weights with each adapter merged."""
    root = tmp_path_factory.mktemp("lora")
    heads = 1 if "one head" in request.param else 2
    model = with_weights(root / "model", "8b", 4, num_key_value_heads=heads, **SHAPE)
    adapters = {
        "linear": adapter(model, root / "linear", 1),
        "borders": adapter(model, root / "borders", 2, ("embed_tokens", "lm_head", "q_proj", "down_proj")),
        "third": adapter(model, root / "third", 3, ("v_proj", "up_proj"), rank=8, use_rslora=False),
    }
    folders = {None: model} | {name: merged(model, a, root / f"merged-{name}") for name, a in adapters.items()}
    hubs = {name: pc.LM(folder, engine="transformers", dtype="float32", prove=False, skip_tokenizer_init=True)
            for name, folder in folders.items()}  # fmt: skip
    options = {**OPTIONS, **WAYS[request.param]}
    with pc.LM(model, engine="vllm", enable_lora=True, max_loras=2, max_lora_rank=8, prove=False, **options) as lm:
        assert lm.engine.status()["workers"] == 2
        yield lm, adapters, hubs
    for hub in hubs.values():
        hub.close()


def test_a_mixed_batch_equals_merged_weights_and_shares_no_blocks(way):
    lm, adapters, hubs = way
    v = np.random.default_rng(3).standard_normal(128).astype(np.float32)
    names = [None, "linear", "borders", "third", "linear", None, "borders", "third"]
    edits = [[]] * 4 + [[pc.Add(v, pc.resid_post[0], pc.every[3:], scale=0.5), pc.Scale(0.5, pc.mlp_out[3])]] * 4
    prompts = [IDS[:length] for length in (5, 40, 33, 9, 64, 7, 40, 1)]
    asked = {"max_tokens": 6, "sampling": SAMPLING, "capture": EVERYTHING, "logprobs": True}
    runs = lm.run(prompts, edits=edits, lora=[name and adapters[name] for name in names], **asked)
    for prompt, program, name, run in zip(prompts, edits, names, runs, strict=True):
        expected = hubs[name].run(prompt, edits=program, **asked)
        assert run.token_ids == expected.token_ids, name
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)
        for place in lm.sites.refs():
            assert run.positions(str(place)) == expected.positions(str(place))
            assert worst_row(run[str(place)].flatten(1), expected[str(place)].flatten(1)) <= 1e-4, (name, place)
    texts = lm.run([IDS] * 4, lora=[None, *adapters.values()], sampling=SAMPLING, logprobs=True)
    assert len({tuple(run.token_ids) for run in texts}) == 4  # adapters matter

    ids, edit = np.random.default_rng(5).integers(3, 500, 100).tolist(), [pc.Add(v, pc.resid_post[0], pc.prompt[40])]
    for name, program, cached in (
        ("linear", [], 0), (None, [], 0), ("borders", [], 0), ("linear", [], 96), (None, [], 96),
        ("linear", edit, 32), (None, edit, 32), ("linear", edit, 96), ("borders", edit, 32), ("linear", [], 96),
    ):  # fmt: skip
        run = lm.run(ids, max_tokens=3, edits=program, lora=name and adapters[name], sampling=SAMPLING, logprobs=True)
        expected = hubs[name].run(ids, max_tokens=3, edits=program, sampling=SAMPLING, logprobs=True)
        assert (run.cached_tokens, run.token_ids) == (cached, expected.token_ids), (name, bool(program))
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)


def test_what_is_no_adapter_of_the_model_is_told(way, tmp_path):
    """A matrix of another width than all workers have together is an error, and a layer that is not there."""
    lm, adapters, hubs = way
    deep = with_weights(tmp_path / "deep", "8b", 5, num_key_value_heads=2, **SHAPE)
    narrow = with_weights(tmp_path / "narrow", "8b", 4, num_key_value_heads=4, **{**SHAPE, "intermediate_size": 128})
    wrong = {
        "the model has no model.layers.4": adapter(deep, tmp_path / "a", 1, ("q_proj",)),
        "down_proj: expected width 256, got 128": adapter(narrow, tmp_path / "b", 1, ("down_proj",)),
        "up_proj: expected width 256, got 128": adapter(narrow, tmp_path / "c", 1, ("up_proj", "gate_proj")),
        "got 128": adapter(narrow, tmp_path / "d", 1, ("k_proj",)),  # its keys have four heads
    }
    runs = lm.run([IDS] * 6, max_tokens=2, lora=[*wrong.values(), adapters["linear"], None], sampling=SAMPLING)
    for text, run in zip(wrong, runs, strict=False):
        assert isinstance(run.error, pc.ModelError), text
        assert text in str(run.error)
    for name, run in zip(("linear", None), runs[4:], strict=True):
        assert run.token_ids == hubs[name].run(IDS, max_tokens=2, sampling=SAMPLING).token_ids
    del runs, run
    gc.collect()
    lm.run(IDS[:3], max_tokens=1)
    assert {lm.engine.status()[name] for name in ("programs", "vectors", "pinned")} == {0}


@pytest.mark.parametrize(("options", "text"), [
    ({"tensor_parallel_size": 2, "fully_sharded_loras": True}, r"LoRA with sharded first matrices \(fully_sharded_loras\)"),
    ({"pipeline_parallel_size": 2}, r"LoRA \(enable_lora\) over pipeline stages: not supported yet"),
])  # fmt: skip
def test_what_was_not_tried_is_refused(bound, tmp_path: Path, options, text):
    model = with_weights(tmp_path, "8b", 2, num_key_value_heads=2, **SHAPE)
    with pytest.raises(pc.EngineError, match=text):
        pc.LM(model, engine="vllm", enable_lora=True, **OPTIONS, **options)
