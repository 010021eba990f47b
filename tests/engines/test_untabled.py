"""Decoders without a site table, which vLLM runs through its Transformers backend: what can be made of their modules is
proved and equal to Transformers, and the rest is refused by name."""

from __future__ import annotations

import pytest
import torch

import patchclamp as pc
from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.studies.recipes import gap

from ..models import of_family
from . import test_families
from .test_families import EAGER, IDS, PROMPTS, every_edit_is_equal, rows_are_equal

pytestmark = pytest.mark.usefixtures("inspected_here")
WHOLE = ["embed", "resid_pre", "z", "attn_out", "neurons", "mlp_out", "resid_post", "final_norm", "logits"]
CERTAIN = [name for name in WHOLE if name not in ("attn_out", "neurons", "mlp_out")]
# what each has, and what its own name is for what it does not have
HAS = {"starcoder2": WHOLE, "phi": WHOLE, "nemotron": WHOLE, "flex_olmo": CERTAIN,
       "llama": WHOLE}  # fmt: skip
THROUGH = {"model_impl": "transformers"}
OPTIONS = {"nemotron": THROUGH, "llama": THROUGH}


@pytest.fixture(scope="module", params=HAS)
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
    if pair.name != "llama":  # of which Transformers has the table
        assert pair.lm.model.family == pair.hub.model.family == f"{pair.lm.model.family.split()[0]} (no table)"
        assert pair.hub.sites.names == HAS[pair.name]
        assert pair.lm.sites.withdrawn == pair.hub.sites.withdrawn
    rows_are_equal(pair, HAS[pair.name])
    every_edit_is_equal(pair)


def test_what_is_not_says_why(pair):
    with pytest.raises(UnsupportedSite, match=r"q is not available on \w+ \(no table\) models: .* not known where"):
        pair.lm.run(PROMPTS[0], capture=["q"])
    if pair.name == "flex_olmo":  # which norms what it adds
        for lm in pair.lm, pair.hub:
            with pytest.raises(
                UnsupportedSite, match=r"attn_out was not proved .* \+ mlp_out\[0\] is not resid_post\[0"
            ):
                lm.run(PROMPTS[0], capture=["attn_out"])
            with pytest.raises(
                UnsupportedSite, match=r"neurons is not available .*of down_proj, .*\(0: gate, experts\)"
            ):
                lm.run(PROMPTS[0], capture=["neurons"])


def test_transformers_runs_models_of_the_class_that_vllm_decorated(pair):
    with pc.LM(pair.hub.model.name, engine="transformers", **IDS) as other:
        made = [lm.run(PROMPTS[0], max_tokens=1, capture=["logits"])["logits"] for lm in (other, pair.hub)]
    assert torch.equal(*made)


def test_a_class_of_vllms_own_needs_a_table(tmp_path):
    with pytest.raises(ModelError, match=r"no site table for \['Nemotron.*tables for .*model_impl=\"transformers\""):
        pc.LM(of_family(tmp_path, "nemotron"), engine="vllm", **IDS, **EAGER)


@pytest.mark.parametrize(
    ("name", "place", "withdrawn"),
    [("bloom", "word_embeddings", ["embed", "attn_out", "mlp_out"]), ("glm4", "embed_tokens", ["attn_out", "mlp_out"])],
)
def test_what_does_not_add_up_is_withdrawn(tmp_path, name, place, withdrawn):
    """BLOOM norms its embedding, and its modules add the stream to what they make; GLM-4 norms what it adds."""
    with pc.LM(of_family(tmp_path, name), engine="transformers", **IDS) as lm:
        assert list(lm.sites.withdrawn) == withdrawn
        assert lm.sites.names == [word for word in WHOLE if word not in withdrawn]
        assert "resid_pre[0] + attn_out[0] + mlp_out[0] is not resid_post[0]" in lm.sites.withdrawn["mlp_out"]
        taps = {point.kind: tap.module for point, tap in lm.sites.taps("vllm")}
        assert taps["embed"] == f"model.{place}"


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
        assert lm.sites.names == CERTAIN[1:]
        rows_are_equal(test_families.Pair("opt", lm, hub), lm.sites.names)
    with pytest.raises(ModelError, match=r"not one norm is called after decoder\.layers, among: nothing"):
        pc.LM(of_family(tmp_path / "bart", "bart"), engine="transformers", **IDS)


def test_results_that_are_normed_before_they_are_projected_are_not_offered(tmp_path):
    with pc.LM(of_family(tmp_path / "bitnet", "bitnet"), engine="transformers", **IDS) as lm:
        assert lm.sites.names == [word for word in WHOLE if word not in ("z", "neurons")]
        for word, norm in (("z", "self_attn.attn_sub_norm"), ("neurons", "mlp.ffn_sub_norm")):
            with pytest.raises(UnsupportedSite, match=rf"takes was normed by layers\.0\.{norm}"):
                lm.run(PROMPTS[0], capture=[word])
    with pc.LM(of_family(tmp_path / "diffllama", "diffllama"), engine="transformers", **IDS) as lm:
        assert "z" not in lm.sites.names
        with pytest.raises(UnsupportedSite, match="half as many heads, twice as wide"):
            lm.run(PROMPTS[0], capture=["z"])


def test_parity_compares_what_both_tables_have(tmp_path):
    folder = of_family(tmp_path, "gemma2", num_hidden_layers=2)
    found = pc.studies.parity(folder, prompts=PROMPTS, max_tokens=2, skip_tokenizer_init=True, **EAGER, **THROUGH)
    assert found.holds, found.problems
    assert {"attn_in", "resid_mid", "attn_out"} <= set(found.left_out)
    assert {site.name for site in found.sites} >= {"resid_pre", "resid_post", "z", "final_norm", "logits"}


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
