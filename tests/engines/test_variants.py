"""Models that are near a family and not of it: refused with what to do, or given a table of their own modules."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MptConfig,
    MptForCausalLM,
)

import patchclamp as pc
from patchclamp.errors import ModelError
from patchclamp.sites.prove import prove

from ..models import FAMILIES, of_family
from .test_families import EAGER, IDS, PROMPTS
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_a_router_is_proved_whatever_its_weights(tmp_path, name):
    """What all chosen experts get alike changes nothing: an edit of a router must not be that."""
    many = {"qwen3_moe": {"num_experts": 8}}.get(name, {"num_local_experts": 8})
    for seed in range(4):
        folder = of_family(tmp_path / str(seed), name, seed, **many)
        with pc.LM(folder, engine="transformers", prove=False, **IDS) as lm:
            (proof,) = (proof for proof in prove(lm, True) if proof.name == "router")
        assert proof.holds, (seed, proof.note)


def test_a_variant_that_the_table_is_not_about_gets_one_of_its_modules(tmp_path):
    """GPT-NeoX with attention and MLP one after the other."""
    folder = of_family(tmp_path, "gpt_neox", use_parallel_residual=False)
    hub = pc.LM(folder, engine="transformers", **IDS)
    with hub, pc.LM(folder, engine="vllm", **IDS, **EAGER) as lm:
        assert not lm.sites.family.tabled
        assert lm.sites.names == hub.sites.names
        assert {"resid_pre", "resid_post", "attn_out", "mlp_out"} <= set(lm.sites.names) - set(lm.sites.withdrawn)
        sites = [name for name in lm.sites.names if name not in lm.sites.withdrawn]
        ours, theirs = (m.run(PROMPTS[0], max_tokens=1, capture=sites) for m in (lm, hub))
        for name in sites:
            for place in map(str, lm.sites.resolve(pc.site(name))):
                assert worst_row(ours[place], theirs[place]) <= 1e-4, place


def test_a_native_variant_is_refused_with_what_to_do(tmp_path):
    folder = of_family(tmp_path, "opt", do_layer_norm_before=False)
    with pytest.raises(ModelError, match=r"for do_layer_norm_before=True, and this one has False\. model_impl="):
        pc.LM(folder, engine="vllm", **IDS, **EAGER)


def test_a_stream_that_vllm_divides_in_float16_is_refused(tmp_path):
    folder = of_family(tmp_path, "deepseek_v2", routed_scaling_factor=16.0)
    with pytest.raises(
        ModelError, match=r"in float16 vLLM divides the stream of deepseek models .*use dtype=\"bfloat16\""
    ):
        pc.LM(folder, engine="vllm", **{**IDS, "dtype": "float16"}, **EAGER)


def test_a_decoder_within_another_model_is_refused(tmp_path):
    text = FAMILIES["gemma3"][1]
    seen = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4)
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"no site table for .*Gemma3ForConditionalGeneration.*Only models of text alone"
    ):
        pc.LM(str(tmp_path), engine="transformers", **IDS)


def test_how_many_tokens_fit_is_told_by_other_names_or_asked_for(tmp_path):
    torch.manual_seed(0)
    MptForCausalLM(MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=96)).save_pretrained(
        tmp_path / "mpt"
    )
    with pc.LM(str(tmp_path / "mpt"), engine="transformers", **IDS) as lm:
        assert lm.model.max_model_len == 96
        assert "attn_out" in lm.sites.withdrawn  # its MLP adds the stream itself
    bloom = tmp_path / "bloom"
    BloomForCausalLM(BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=128)).save_pretrained(bloom)
    with pytest.raises(
        ModelError, match=r"\['BloomForCausalLM'\] does not say how many tokens fit: give max_model_len"
    ):
        pc.LM(str(bloom), engine="transformers", **IDS)
    with pc.LM(str(bloom), engine="transformers", max_model_len=32, **IDS) as lm:
        assert lm.run([3, 4, 5], max_tokens=1, capture=[pc.resid_post])[pc.resid_post[1]].shape == (3, 64)
