"""Models that are near a family and not of it: refused with what to do, or given a table of their own modules."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MptConfig,
    MptForCausalLM,
)

import patchclamp as pc
from patchclamp.engines.transformers import _check_padding_right
from patchclamp.errors import ModelError
from patchclamp.proving import prove

from ..models import no_table, of_family, randomise
from .test_families import EAGER, IDS, PROMPTS
from .test_parity import worst_row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inspected_here")]


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
        ours, theirs = (m.run(PROMPTS[0], max_tokens=1, capture=sites, logprobs=True) for m in (lm, hub))
        for name in sites:
            for place in map(str, lm.sites.resolve(pc.site(name))):
                assert worst_row(ours[place], theirs[place]) <= 1e-4, place


def test_a_native_variant_is_refused_with_what_to_do(tmp_path):
    folder = of_family(tmp_path, "opt", do_layer_norm_before=False)
    refused = r"do_layer_norm_before=True.*False\. With Transformers' own class: no site table"
    with pytest.raises(ModelError, match=refused):
        pc.LM(folder, engine="vllm", **IDS, **EAGER)
    with pytest.raises(ModelError, match="no site table for OPTForCausalLM"):
        pc.LM(folder, engine="vllm", model_impl="transformers", **IDS, **EAGER)


def test_a_stream_that_vllm_divides_in_float16_is_refused(tmp_path):
    folder = of_family(tmp_path, "deepseek_v2", routed_scaling_factor=16.0)
    with pytest.raises(ModelError, match=r"float16 .*deepseek models.*dtype=\"bfloat16\""):
        pc.LM(folder, engine="vllm", **{**IDS, "dtype": "float16"}, **EAGER)


def test_how_many_tokens_fit_is_told_by_other_names_or_asked_for(tmp_path):
    torch.manual_seed(0)
    MptForCausalLM(MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=96)).save_pretrained(
        tmp_path / "mpt"
    )
    with pc.LM(str(tmp_path / "mpt"), engine="transformers", **IDS) as lm:
        assert lm.model.max_model_len == 96
        assert not lm.sites.withdrawn
    bloom = tmp_path / "bloom"
    BloomForCausalLM(BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=128)).save_pretrained(bloom)
    with pytest.raises(ModelError, match=r"\['BloomForCausalLM'\].*max_model_len"):
        pc.LM(str(bloom), engine="transformers", **IDS)
    with pc.LM(str(bloom), engine="transformers", max_model_len=32, **IDS) as lm:
        assert lm.run([3, 4, 5], max_tokens=1, capture=[pc.resid_post], logprobs=True)[pc.resid_post[1]].shape == (
            3,
            64,
        )


def test_a_model_whose_runs_depend_on_each_other_is_refused(tmp_path):
    """Pegasus' decoder counts places, padding among them."""
    folder = of_family(tmp_path, "pegasus")
    for width in (2, 3, 8, 64):
        with pytest.raises(ModelError, match=r"batch.*max_num_seqs=1"):
            pc.LM(folder, engine="transformers", max_num_seqs=width, **IDS)
    with pc.LM(folder, engine="transformers", max_num_seqs=1, **IDS) as lm:
        together = lm.run([list(range(5, 25)), list(range(100, 112))], max_tokens=2, logprobs=True)
        assert together[1].logprobs == lm.run(list(range(100, 112)), max_tokens=2, logprobs=True).logprobs
    with pytest.raises(ModelError, match="max_num_seqs=1"):  # what was proved of one is not of others
        pc.LM(folder, engine="transformers", **IDS)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma3", "starcoder2", "granite_hybrid"])
def test_padding_on_the_right_is_refused_where_it_would_count(tmp_path, name):
    folder = of_family(tmp_path, name)
    why = {"starcoder2": "no site table", "granite_hybrid": "recurrent layers"}.get(name, "a sliding window")
    hidden = ["Starcoder2ForCausalLM"] if name == "starcoder2" else []
    with (
        no_table(*hidden),
        pytest.raises(ModelError, match=rf'models with {why}.*padding_side="left"'),
    ):
        pc.LM(folder, engine="transformers", padding_side="right", **IDS)


@pytest.mark.parametrize(("name", "side"), [(n, "left") for n in ("mistral", "gpt_oss", "gemma3", "starcoder2", "gpt2")]
                         + [(n, "right") for n in ("llama", "gpt2", "opt", "gpt_neox")])  # fmt: skip
def test_padding_changes_nothing_that_is_generated(tmp_path, name, side):
    long, short = list(range(5, 40)), list(range(100, 103))
    with pc.LM(of_family(tmp_path, name), engine="transformers", padding_side=side, prove=False, **IDS) as lm:
        asked = {"max_tokens": 12, "sampling": {"ignore_eos": True}, "capture": [pc.resid_post]}
        alone, (_, beside) = lm.run(short, **asked, logprobs=True), lm.run([long, short], **asked, logprobs=True)
        assert beside.token_ids == alone.token_ids
        for layer in range(lm.sites.layers):
            assert torch.allclose(beside[pc.resid_post[layer]], alone[pc.resid_post[layer]], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_without_some_weights_is_refused(tmp_path):
    from transformers import AutoModel

    whole, bare = of_family(tmp_path / "whole", "llama", tie_word_embeddings=False), str(tmp_path / "bare")
    AutoModel.from_pretrained(whole, dtype=torch.float32).save_pretrained(bare)
    with pytest.raises(ModelError, match=r"the checkpoint lacks lm_head.weight"):
        pc.LM(bare, engine="transformers", **IDS)


def test_a_config_that_names_no_class_has_that_of_its_model(tmp_path):
    import json

    folder = of_family(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pc.LM(folder, engine="transformers", prove=False, **IDS) as lm:
        assert lm.model.family == "llama"


def test_numbers_that_are_not_finite_are_told_of(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = of_family(tmp_path, "llama")
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        net.model.layers[1].mlp.down_proj.weight *= 1e5
    net.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"resid_pre\[2\] .*float16"):
        pc.LM(folder, engine="transformers", **{**IDS, "dtype": "float16"})


@pytest.mark.parametrize(
    ("kind", "engine", "why"),
    [
        ("mamba", "transformers", r"\['MambaForCausalLM'\].*max_model_len"),
    ],
)  # fmt: skip
def test_what_has_no_sites_says_so_in_our_words(tmp_path, kind, engine, why):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = dict(vocab_size=512, hidden_size=128, num_hidden_layers=2)
    config = CONFIG_MAPPING[kind](**sizes, state_size=16)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=why):
        pc.LM(str(tmp_path), engine=engine, **IDS, **(EAGER if engine == "vllm" else {}))


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_states_without_keys_go_on_as_they_began(tmp_path, kind):
    """On Transformers, prompts of two lengths in one batch: each token is what the whole text before it gives."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind](vocab_size=512, hidden_size=64, num_hidden_layers=2, state_size=8)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(net)
    net.save_pretrained(tmp_path)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42]]
    with pc.LM(str(tmp_path), engine="transformers", max_model_len=64, **IDS) as lm:
        runs = lm.run(prompts, max_tokens=6, logprobs=True, sampling={"ignore_eos": True})
    for prompt, run in zip(prompts, runs, strict=True):
        for i, token in enumerate(run.token_ids):
            with torch.no_grad():
                logits = net(torch.tensor([[*prompt, *run.token_ids[:i]]]), use_cache=False).logits[0, -1]
            assert run.logprobs[i] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)


@pytest.mark.parametrize("changed", [{"word_embed_proj_dim": 64}, {"_remove_final_layer_norm": True}])
def test_an_opt_that_the_table_is_not_about_says_why(tmp_path, changed):
    folder = of_family(tmp_path, "opt", **changed)
    with pytest.raises(ModelError, match=f"opt .*{next(iter(changed))}="):
        pc.LM(folder, engine="vllm", **IDS, **EAGER)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"sliding_window": 4096}, True), ({"sliding_window": None}, False), ({}, False),
        ({"sliding_window": 262_144}, False), ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}, True),
    ],
)  # fmt: skip
def test_windows_that_never_bite_may_be_padded_on_the_right(config, refused):
    with pytest.raises(ModelError, match="a sliding window") if refused else nullcontext():
        _check_padding_right(SimpleNamespace(model_type="phi3", **config), True, 131_072)
