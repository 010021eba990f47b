"""Quantised weights, and keys and values in fp8, on vLLM's CPU build: sites are proved there, and what is read and written
is the activations between the quantised products, as they flow."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import patchclamp as pc

from ..models import of_family
from .conftest import without_amx
from .quantised import CONFIGS, nvfp4, quantised
from .test_families import EAGER, PROMPTS, flat
from .test_parity import worst_row

pytestmark = [
    pytest.mark.usefixtures("inspected_here"),
    # without it, stock vLLM 0.32.0 has no AWQ kernel and no fp8 cache, and its int8 products saturate
    pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="needs AVX-512"),
]
IDS = {"skip_tokenizer_init": True}
# how far the worst row may be from Transformers with the weights that were packed, and how far it is, at least, with
# those from before; bf16's is of its rounding, and a number that lies between two steps may go to either
NEAR, APART = {"awq": 0.1, "compressed-tensors": 0.04}, {"awq": 0.3, "compressed-tensors": 0.06}


@pytest.fixture(scope="module", params=["awq", "compressed-tensors"])
def engines(request, tmp_path_factory, inspected_here):
    """The kind of quantisation; vLLM with the packed weights; Transformers with what they stand for, and as they were."""
    root = tmp_path_factory.mktemp(request.param)
    model = of_family(root / "model", "llama")
    quantised(model, request.param, root / "packed", root / "plain")
    dtype = "float32" if request.param == "compressed-tensors" else "bfloat16"
    hubs = [
        pc.LM(str(folder), engine="transformers", dtype="float32", prove=False, **IDS)
        for folder in (root / "plain", model)
    ]
    if request.param == "compressed-tensors":
        _round_inputs(hubs[0])
    amx = without_amx() if dtype == "float32" else contextlib.nullcontext()
    with amx, pc.LM(str(root / "packed"), engine="vllm", dtype=dtype, **IDS, **EAGER) as lm, hubs[0], hubs[1]:
        yield request.param, lm, *hubs


def _round_inputs(hub: pc.LM) -> None:
    """What goes into a linear layer becomes one of 255 steps of its token's largest number, as in the quantised product."""

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        step = inputs[0].abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127  # rows of padding are 0
        return ((inputs[0] / step).round() * step,)

    engine: Any = hub.engine
    for name, module in engine._net.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


def test_every_site_is_proved_read_and_edited_as_the_weights_that_were_packed(engines):
    kind, lm, plain, before = engines
    assert lm.sites.withdrawn == {}
    every = [pc.Site(name) for name in lm.sites.names]
    edits = [pc.Add([0.5] * lm.model.d_model, pc.resid_post[0], pc.prompt[3:9]), pc.Scale(0.5, pc.mlp_out[1])]
    answers = {}
    for program in ([], edits):
        runs, same, other = (
            each.run(PROMPTS, max_tokens=1, capture=every, edits=program) for each in (lm, plain, before)
        )
        for run, expected in zip(runs, same, strict=True):
            for place in map(str, lm.sites.refs()):
                assert run.positions(place) == expected.positions(place)
                assert worst_row(flat(run[place]), flat(expected[place])) <= NEAR[kind], place
        assert worst_row(flat(runs[0]["resid_post[2]"]), flat(other[0]["resid_post[2]"])) > APART[kind]
        answers[len(program)] = runs[0]["logits"]
    assert worst_row(answers[2], answers[0]) > 2 * NEAR[kind]  # the edits matter
    patched = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.logits], edits=[pc.Replace(pc.From(runs[0]), pc.resid_mid)])
    again = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.logits], edits=edits)
    assert torch.equal(patched[pc.logits], again[pc.logits])


def test_keys_and_values_in_fp8(tmp_path_factory):
    """Sites are proved; k and v are read before they are rounded; blocks are reused as any."""
    model = of_family(tmp_path_factory.mktemp("fp8") / "model", "llama")
    ids = list(range(5, 70))
    with (
        pc.LM(model, engine="transformers", dtype="float32", prove=False, **IDS) as hub,
        pc.LM(model, engine="vllm", dtype="float32", kv_cache_dtype="fp8", **IDS, **EAGER) as lm,
    ):
        assert lm.sites.withdrawn == {}
        sites = ["k[0]", "v[0]", "attn_in[0]", "attn_out[0]", "resid_post[0]"]
        asked = {"max_tokens": 1, "capture": [pc.Site("k"), pc.Site("v"), pc.attn_in, pc.attn_out, pc.resid_post]}
        ours, theirs = (each.run(ids, **asked) for each in (lm, hub))
        gaps = [worst_row(flat(ours[place]), flat(theirs[place])) for place in sites]
        assert max(gaps[:3]) <= 1e-4  # the layer's own
        assert 1e-3 < gaps[3] < 0.2  # what was made of rounded keys and values
        assert gaps[4] < 0.2
        edited = [pc.Add([1.0] * lm.model.d_model, pc.resid_post[0], pc.prompt[40:])]
        first, *_ = runs = [lm.run(ids, max_tokens=2, edits=program, logprobs=True) for program in (edited, [], edited)]
        assert [run.cached_tokens for run in runs] == [32, 64, 64]
        assert runs[2].token_ids == first.token_ids
        assert runs[2].logprobs == pytest.approx(first.logprobs, abs=1e-5) != pytest.approx(runs[1].logprobs, abs=1e-3)


def test_nvfp4_is_unpacked_by_compressed_tensors_to_the_weights_that_it_stands_for():
    base = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = 0.03 * torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    parts, meant = nvfp4(weight)
    weights = QuantizationArgs(**CONFIGS["nvfp4"]["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    unpacked = base.NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    assert torch.equal(unpacked.float(), meant)
    assert 0.05 < (meant - weight).norm() / weight.norm() < 0.15  # a float of four bits has steps of a quarter or more


ONE_TOKEN = """
import sys

import patchclamp as pc

if __name__ == "__main__":
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128,
               "kv_cache_memory_bytes": 1 << 26, "prove": False}
    with pc.LM(sys.argv[1], engine="vllm", **options) as lm:
        print(len(lm.run([5], max_tokens=2, capture=pc.resid_post).token_ids), "tokens")
"""


@pytest.mark.slow
def test_the_first_step_of_a_process_may_have_one_token_in_bfloat16(tmp_path):
    """With AMX, stock vLLM's attention ends such a process."""
    script = tmp_path / "script.py"
    script.write_text(ONE_TOKEN)
    model = of_family(tmp_path / "model", "llama")
    ended = subprocess.run([sys.executable, script, model], capture_output=True, text=True, timeout=300)
    assert "2 tokens" in ended.stdout, ended.stderr[-2000:]
    assert ended.returncode == 0
