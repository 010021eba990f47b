"""The compiler that vLLM uses on GPUs makes two variants of a model, the idle one stock's, and finds both again; with
uniform numerics it makes one, and neither a capture nor a self-patch changes a bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import patchclamp as pc
from tests.models import that_reads_images, with_weights

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 512}  # fmt: skip
OPTIONS = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True,
           "kv_cache_memory_bytes": 1 << 25, "enable_prefix_caching": False}  # fmt: skip
LAYERS, TOKENS = 4, 6
SITES = ["resid_pre", "attn_in", "q", "z", "attn_out", "mlp_in", "neurons", "mlp_out", "resid_post"]
PROMPTS = [[3, 5, 7, 11, 13], list(range(100, 140)), [42]]


# without what an engine in this process would change, by which vLLM finds compiled code, too
CLEAN = {name: value for name, value in os.environ.items() if "AOT" not in name}


def start(kind: str, asked: str, cache: str) -> subprocess.Popen:
    """An engine in a process of its own, with a folder of compiled code."""
    environ = {**CLEAN, "VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": cache + "/inductor",
               **({"VLLM_PLUGINS": ""} if kind == "stock" else {}),
               **({"PATCHCLAMP_DISABLE": "equal_layers"} if kind == "apart" else {})}  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("forced.py")), kind, asked]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> dict:
    """What it says."""
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, dict]:
    """What stock, patchclamp with stock numerics, with uniform ones, and with each layer compiled by itself, and the
    first of ours started again say. Each has a folder of compiled code of its own."""
    model = with_weights(tmp_path_factory.mktemp("model"), "0.6b", LAYERS, **SHAPE)
    caches = {kind: str(tmp_path_factory.mktemp(kind)) for kind in ("stock", "ours", "uniform", "apart")}
    asked = json.dumps({"model": model, "options": OPTIONS, "prompts": PROMPTS, "tokens": TOKENS, "sites": SITES})
    started = {kind: start(kind, asked, cache) for kind, cache in caches.items()}
    try:
        found = {kind: finish(process) for kind, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    with pc.LM(model, engine="vllm", prove=False, enforce_eager=True, **OPTIONS) as eager:
        runs = eager.run(PROMPTS, max_tokens=1, capture=[pc.resid_post[0]])
        found["eager"] = {"rows": [run[pc.resid_post[0]] for run in runs]}
        every = [pc.Site(name) for name in SITES]
        edits = [pc.Add([0.25 * layer] * eager.model.d_model, at=pc.resid_post[layer]) for layer in (1, 2)]
        edits += [pc.Scale(1.5, at=pc.mlp_out[1]), pc.Scale(0.5, at=pc.attn_in[2])]
        both = [eager.run(PROMPTS[1], capture=every, edits=more, max_tokens=1) for more in ([], edits)]
        found["eager"]["everywhere"] = [{str(ref): run[str(ref)].float() for ref in eager.sites.refs() if ref.name in SITES}
                                        for run in both]  # fmt: skip
    return found | {"ours again": finish(start("ours", asked, caches["ours"]))}


def test_both_variants_are_compiled_and_found_again(said):
    first, again = said["ours"], said["ours again"]
    assert said["stock"]["num_graphs_seen"] == 1
    assert first["num_graphs_seen"] == again["num_graphs_seen"] == 2
    assert (first["num_aot_compiles"], first["num_aot_artifacts_saved"], first["num_aot_artifacts_loaded"]) == (1, 1, 0)
    assert (again["num_aot_compiles"], again["num_aot_artifacts_loaded"]) == (0, 1)


def test_equal_layers_are_compiled_once(said):
    """As stock's are: of a piece before each layer's attention and one at the end, those in the middle are equal."""
    pieces, kinds = LAYERS + 1, 3
    counts = {kind: (said[kind]["num_backend_compilations"], said[kind]["num_cache_entries_updated"])
              for kind in ("uniform", "ours", "ours again")}  # fmt: skip
    assert said["stock"]["num_backend_compilations"] == pieces
    assert counts == {"uniform": (pieces, kinds), "ours": (2 * pieces, 2 * kinds), "ours again": (2 * pieces, 0)}


def test_each_layer_by_itself_gives_the_same_bits(said):
    """The plain way of taps: pieces whose points are constants, of which no two are equal."""
    shared, apart = said["ours"], said["apart"]
    assert apart["num_cache_entries_updated"] == LAYERS + 1 + 3
    names = ("plain", "captured", "patched onto itself", "steered", "rows", "everywhere", "again", "steps")
    assert {name: apart[name] for name in names} == {name: shared[name] for name in names}


@pytest.mark.parametrize("which", ["ours", "ours again"])
def test_without_a_program_every_bit_is_stocks(said, which):
    assert said[which]["plain"] == said["stock"]["plain"]
    assert said[which]["again"] == said["stock"]["plain"]
    # none from compiled code: those of queries and of z alone, from the attention op's own Python, once a layer and step
    assert said[which]["taps, idle"] == said[which]["taps, idle again"] == 2 * LAYERS * TOKENS
    assert said[which]["taps, in the active variant"] > 4 * LAYERS * TOKENS


@pytest.mark.parametrize("which", ["ours", "ours again"])
def test_the_active_variant_has_taps(said, which):
    found = said[which]
    assert found["captured"] == found["nothing added"]
    for steered, plain in zip(found["steered"], found["captured"], strict=True):
        assert steered[1] != plain[1]
    for rows, eager in zip(found["rows"], said["eager"]["rows"], strict=True):
        seen = torch.tensor(rows)[: len(eager)]
        assert float((seen - eager).abs().max()) <= 0.02 * float(eager.abs().max())
    assert {name: found[name] for name in ("captured", "rows")} == {n: said["ours"][n] for n in ("captured", "rows")}


@pytest.mark.parametrize("which", ["ours", "ours again", "uniform"])
def test_each_tap_is_of_its_own_layer(said, which):
    """Equal layers share compiled code, which finds in an input what layer it is in: rows and edits, at every layer and
    site, are those of an engine that compiles nothing, and no two layers' rows are alike."""
    for seen, eager in zip(said[which]["everywhere"], said["eager"]["everywhere"], strict=True):
        assert seen.keys() == eager.keys()
        assert len(seen) == LAYERS * len(SITES)
        for at, expected in eager.items():
            gaps = {other: far(torch.tensor(rows), expected) for other, rows in seen.items()
                    if other.partition("[")[0] == at.partition("[")[0]}  # fmt: skip
            assert gaps.pop(at) < 0.1, at
            assert min(gaps.values()) > 0.15, at
    unedited, edited = said["eager"]["everywhere"]
    assert far(edited["resid_post[2]"], unedited["resid_post[2]"]) > 0.3


def far(rows: torch.Tensor, expected: torch.Tensor) -> float:
    return float((rows - expected).norm() / expected.norm())


def test_with_uniform_numerics_neither_a_capture_nor_a_self_patch_changes_a_bit(said):
    uniform, stock = said["uniform"], said["ours"]
    for name in ("captured", "patched onto itself", "nothing added", "again"):
        assert uniform[name] == uniform["plain"], name
    for steered, plain in zip(uniform["steered"], uniform["plain"], strict=True):
        assert steered[1] != plain[1]
    assert uniform["plain"] == stock["captured"]
    assert stock["captured"] == stock["patched onto itself"]
    assert stock["captured"] != stock["plain"], "the two codes give the same bits: this checked nothing"


def test_with_uniform_numerics_one_code_with_taps_is_compiled_and_runs_in_every_step(said):
    uniform, stock = said["uniform"], said["ours"]
    assert uniform["num_graphs_seen"] == 1
    assert uniform["taps, idle"] == uniform["taps, idle again"] > 4 * LAYERS * TOKENS
    assert uniform["steps"] == {"steps_with_taps": 6 * TOKENS + 2, "steps_without_taps": 0}
    assert stock["steps"] == {"steps_with_taps": 4 * TOKENS + 2, "steps_without_taps": 2 * TOKENS}


def test_the_decoder_within_a_model_that_reads_images_is_compiled_in_both_variants(tmp_path):
    """vLLM makes it with a copy of the engine's configuration."""
    that_reads_images(tmp_path, "mistral3")
    options = {**OPTIONS, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    asked = json.dumps({"model": str(tmp_path), "options": options, "prompts": PROMPTS, "tokens": TOKENS, "sites": []})
    found = finish(start("ours", asked, str(tmp_path / "cache")))
    assert found["num_graphs_seen"] == 2
    assert found["taps, idle"] == found["taps, idle again"] < 8 * TOKENS < found["taps, in the active variant"]
    assert found["plain"] == found["again"]
    for steered, plain in zip(found["steered"], found["plain"], strict=True):
        assert steered[1] != plain[1]


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> dict:
    """What programs at every layer give in batches that begin at layers, at some layers alone, and as requests."""
    model = with_weights(tmp_path_factory.mktemp("model"), "0.6b", LAYERS, **SHAPE)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(5, 500, count).tolist() for count in (41, 41)]
    options = OPTIONS | {"dtype": "float32", "max_num_batched_tokens": 64}  # the prompts in two passes
    some = 3 * 4 * sum(map(len, prompts)) * SHAPE["hidden_size"]  # bytes: too few for each layer
    asked = {"model": model, "options": options, "prompts": prompts, "layers": LAYERS, "sites": SITES, "bytes": some}
    return finish(start("graded", json.dumps(asked), str(tmp_path_factory.mktemp("graded"))))


@pytest.mark.parametrize("kept", ["every layer", "some layers"])
def test_a_graded_batch_begins_at_a_layer_and_equals_requests(graded, kept):
    found = graded[kept]
    assert found["route"] == ["bulk", "bulk"]
    begun = set(found["begun"])
    assert begun == (set(range(LAYERS + 1)) if kept == "every layer" else {0, 2, 4})
    for cells, requests in zip(found["logprobs"], graded["requests"], strict=True):
        assert np.ptp(requests, axis=0).min() > 0.01
        np.testing.assert_allclose(cells, requests, atol=1e-4)
    assert np.array(found["kl"]).max() > 1e-3


def test_pieces_that_do_not_give_the_whole_are_not_used(graded):
    """Every cell is computed from layer 0 on, by the whole model."""
    assert graded["usable"] is False
    assert max(graded["unlike the whole"]["begun"][2:], default=0) == 0
    np.testing.assert_allclose(graded["unlike the whole"]["logprobs"], graded["every layer"]["logprobs"], atol=1e-4)
