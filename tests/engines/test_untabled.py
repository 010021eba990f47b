"""Decoders without a site table: of vLLM's own classes, and through its Transformers backend. What is found in their
modules is proved and equal to Transformers, and the rest is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import patchclamp as pc
from patchclamp.engines.vllm.compat import architecture
from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.sites import untabled
from tests.recipes import gap

from ..models import no_table, of_config, of_family
from . import test_families
from .test_families import EAGER, IDS, PROMPTS, every_edit_is_equal, rows_are_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inspected_here")]
WHOLE = ["embed", "resid_pre", "z", "attn_out", "resid_mid", "neurons", "mlp_out", "resid_post", "final_norm", "logits"]
# what each has
HAS = {"starcoder2": WHOLE, "phi": [name for name in WHOLE if name != "resid_mid"], "nemotron": WHOLE,
       "flex_olmo": [name for name in WHOLE if name != "neurons"], "llama": WHOLE}  # fmt: skip
NATIVE = ("nemotron",)  # classes of vLLM's own
THROUGH = {"model_impl": "transformers"}
OPTIONS = {"llama": THROUGH}


@pytest.fixture(scope="module", autouse=True)
def their_tables_are_not_there():
    with no_table("Starcoder2ForCausalLM", "NemotronForCausalLM", "BloomForCausalLM", "Glm4ForCausalLM"):
        yield


@pytest.fixture(
    scope="module",
    params=[name if name in ("starcoder2", "llama") else pytest.param(name, marks=pytest.mark.slow) for name in HAS],
)
def pair(request, tmp_path_factory, inspected_here):
    name = request.param
    folder = of_family(tmp_path_factory.mktemp(name), name)
    hub = pc.LM(folder, engine="transformers", **IDS)
    lm = pc.LM(folder, engine="vllm", **IDS, **EAGER, **OPTIONS.get(name, {}))
    yield test_families.Pair(name, lm, hub)
    lm.close()
    hub.close()


def test_what_is_certain_is_equal(pair):
    assert pair.lm.sites.names == HAS[pair.name]
    assert not pair.lm.sites.withdrawn
    if pair.name != "llama":  # of which Transformers has the table
        own = "vLLM's class" if pair.name in NATIVE else "no table"
        assert pair.lm.model.family == f"{pair.name} ({own})"
        assert pair.hub.model.family == f"{pair.name} (no table)"
        assert pair.hub.sites.names == HAS[pair.name]
    rows_are_equal(pair, HAS[pair.name])
    every_edit_is_equal(pair)


def test_what_is_not_says_why(pair):
    with pytest.raises(UnsupportedSite, match=r"q is not available on \w+ \(.*\) models: .* no site table"):
        pair.lm.run(PROMPTS[0], capture=["q"])
    if pair.name == "flex_olmo":  # which norms what it adds
        for lm in pair.lm, pair.hub:
            with pytest.raises(UnsupportedSite, match=r"neurons is not available .*down_proj, .*gate, experts"):
                lm.run(PROMPTS[0], capture=["neurons"])


def test_transformers_runs_models_of_the_class_that_vllm_decorated(pair):
    with pc.LM(pair.hub.model.name, engine="transformers", **IDS) as other:
        made = [lm.run(PROMPTS[0], max_tokens=1, capture=["logits"])["logits"] for lm in (other, pair.hub)]
    assert torch.equal(*made)


@pytest.mark.slow
def test_parity_of_a_class_of_vllms_own(tmp_path):
    folder = of_family(tmp_path, "bloom", num_hidden_layers=2)
    options: dict[str, Any] = {**EAGER, "skip_tokenizer_init": True, "max_model_len": 64}  # which ALiBi does not tell
    # vLLM computes its GELU exactly, and the model is made for an approximation
    found = pc.studies.parity(folder, prompts=PROMPTS, max_tokens=2, tolerance=1e-3, **options)
    assert found.holds, found.problems
    assert [site.name for site in found.sites] == WHOLE
    assert found.left_out == ()


def test_a_class_that_is_not_understood_says_what_to_do(tmp_path, monkeypatch):
    def not_found(vllm_config):
        raise ModelError("no site table for vLLM's NemotronForCausalLM: no stream")

    monkeypatch.setattr(architecture, "found_family", not_found)
    with pytest.raises(ModelError, match=r"no stream\. .*model_impl=\"transformers\""):
        pc.LM(of_family(tmp_path, "nemotron"), engine="vllm", **IDS, **EAGER)

    def not_there(*_):
        raise ModelError("no site table for NemotronForCausalLM: nor there")

    monkeypatch.setattr(architecture, "transformers_places", not_there)
    with pytest.raises(ModelError, match=r"no stream\. With Transformers' own class: no site table for .*: nor there$"):
        pc.LM(of_family(tmp_path, "nemotron"), engine="vllm", **IDS, **EAGER)


def test_a_model_without_keys_and_values_is_for_vllm(tmp_path):
    folder = of_config(
        tmp_path, "rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "context_length": 128}
    )
    with pytest.raises(ModelError, match=r'RwkvForCausalLM .* past_key_values.* engine="vllm"'):
        pc.LM(folder, engine="transformers", **IDS)


def test_what_does_not_add_up_is_withdrawn(tmp_path, monkeypatch):
    """GLM-4 norms what attention makes before it adds it."""
    returning = untabled._returning

    def before_the_norm(flow, layer, term, factor):
        spot = returning(flow, layer, term, factor)
        return msgspec.structs.replace(spot, path=spot.path.replace("post_self_attn_layernorm", "self_attn"))

    monkeypatch.setattr(untabled, "_returning", before_the_norm)
    with pc.LM(of_family(tmp_path, "glm4"), engine="transformers", **IDS) as lm:
        assert list(lm.sites.withdrawn) == ["attn_out"]
        assert "resid_pre[0] + attn_out[0] does not equal resid_mid[0]" in lm.sites.withdrawn["attn_out"]


@pytest.mark.slow
def test_compiled_too(tmp_path):
    folder = of_family(tmp_path, "starcoder2", num_hidden_layers=2)
    with (
        pc.LM(folder, engine="transformers", **IDS) as hub,
        pc.LM(folder, engine="vllm", **IDS, **{**EAGER, "enforce_eager": False}) as lm,
    ):
        rows_are_equal(test_families.Pair("starcoder2", lm, hub), WHOLE)
        every_edit_is_equal(test_families.Pair("starcoder2", lm, hub))


def test_the_last_norm_is_the_one_called_last(tmp_path):
    """OPT declares it before its layers; BART's, after them, is of its embedding."""
    folder = of_family(tmp_path / "opt", "opt")
    with (
        pc.LM(folder, engine="transformers", **IDS) as hub,
        pc.LM(folder, engine="vllm", **IDS, **EAGER, **THROUGH) as lm,
    ):
        assert lm.sites.names == [name for name in WHOLE if name != "neurons"]
        rows_are_equal(test_families.Pair("opt", lm, hub), lm.sites.names)
    with pytest.raises(ModelError, match=r"expected .*decoder\.layers\.2 "):
        pc.LM(of_family(tmp_path / "bart", "bart"), engine="transformers", **IDS)


def test_results_that_are_normed_before_they_are_projected_are_not_offered(tmp_path):
    with pc.LM(of_family(tmp_path / "bitnet", "bitnet"), engine="transformers", **IDS) as lm:
        assert lm.sites.names == [word for word in WHOLE if word not in ("z", "neurons")]
        for word, norm in (("z", "self_attn.attn_sub_norm"), ("neurons", "mlp.ffn_sub_norm")):
            with pytest.raises(UnsupportedSite, match=rf"normed by model\.layers\.0\.{norm}"):
                lm.run(PROMPTS[0], capture=[word])
    with pc.LM(of_family(tmp_path / "diffllama", "diffllama"), engine="transformers", **IDS) as lm:
        assert "z" not in lm.sites.names
        with pytest.raises(UnsupportedSite, match="half as many heads, twice as wide"):
            lm.run(PROMPTS[0], capture=["z"])


@pytest.mark.slow
def test_a_config_that_comes_with_its_checkpoint(tmp_path):
    """InternLM2 is a Llama under other names, whose config Transformers does not have. vLLM's runner gives its class
    arguments that have no default there."""
    llama = of_family(tmp_path / "llama", "llama", vocab_size=512)
    folder = as_internlm2(llama, tmp_path / "internlm2")
    with (
        pc.LM(llama, engine="transformers", **IDS) as hub,
        pc.LM(folder, engine="vllm", trust_remote_code=True, **IDS, **EAGER) as lm,
    ):
        assert lm.model.family == "internlm2 (vLLM's class)"
        assert lm.sites.names == WHOLE
        rows_are_equal(test_families.Pair("internlm2", lm, hub), WHOLE)


def as_internlm2(llama: str, folder: Path) -> str:
    """A folder with a Llama's weights under InternLM2's names, and a config class of its own."""
    config, weights = (
        json.loads((Path(llama) / "config.json").read_text()),
        load_file(Path(llama) / "model.safetensors"),
    )
    own = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"],
           "auto_map": {"AutoConfig": "configuration_internlm2.OwnConfig"}}  # fmt: skip
    groups, width, made = config["num_key_value_heads"], config["hidden_size"], {}
    names = {"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo",
             "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
             "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    for name, tensor in weights.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        made[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        parts = [made.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        heads = [part.view(groups, -1, config["head_dim"], width) for part in parts]
        made[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(heads, 1).reshape(-1, width)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "configuration_internlm2.py").write_text(
        'from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = "internlm2"\n'
    )
    return str(folder)


def test_parity_compares_what_both_tables_have(tmp_path):
    folder = of_family(tmp_path, "gemma2", num_hidden_layers=2)
    found = pc.studies.parity(folder, prompts=PROMPTS, max_tokens=2, skip_tokenizer_init=True, **EAGER, **THROUGH)
    assert found.holds, found.problems
    assert set(found.left_out) == {"attn_in", "q", "k", "v", "mlp_in"}
    assert [site.name for site in found.sites] == WHOLE


def test_a_trace_reads_and_writes_its_own_rows_alone(pair):
    """The backend has all requests on the second axis of [1, rows, D]: each prompt gets its own, and writes reach them."""
    values = []
    for lm in (pair.lm, pair.hub):
        saved = []
        with lm.trace() as t:
            for prompt in PROMPTS:
                with t.invoke(prompt) as a:
                    a.layers[0].output[-1] *= 2
                    saved += [a.layers[0].output.save(), a.layers_output[1].save(), a.logits.save()]
        values.append(saved)
    for ours, theirs in zip(*values, strict=True):
        assert gap(ours, theirs) <= 1e-4
    plain = pair.lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[0]])[pc.resid_post[0]]
    assert gap(values[0][0][:-1], plain[:-1]) <= 1e-4
    assert gap(values[0][0][-1:], 2 * plain[-1:]) <= 1e-4
