"""A table made of a module tree: what is taken for what, and which trees are refused, with the names that are in them."""

from __future__ import annotations

import msgspec
import pytest

from patchclamp.errors import ModelError
from patchclamp.sites import SiteMap, sizes_of
from patchclamp.sites.untabled import _layers, tree_of, untabled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)


def config(kind: str, **changed):
    return transformers.CONFIG_MAPPING[kind](**{**SMALL, **changed})


def test_modules_are_found_by_what_a_run_of_them_sees():
    made = config("gpt_bigcode", n_inner=48)
    sites = SiteMap(untabled(made), sizes_of(made))
    points = {point.kind: (point.width, tap.module) for point, tap in sites.taps("vllm") if point.layer in (None, 1)}
    assert points == {
        "stream": (32, "model.h.1"), "stream_end": (32, "model.ln_f"), "final_norm": (32, "model.ln_f"),
        "logits": (64, "compute_logits"), "embed": (32, "model.wte"), "attn_out": (32, "model.h.1.attn"),
        "mlp_out": (32, "model.h.1.mlp"), "z": (32, "model.h.1.attn.c_proj"), "neurons": (48, "model.h.1.mlp.c_proj"),
    }  # fmt: skip
    theirs = {tap.module for point, tap in sites.taps("transformers") if point.kind != "logits"}
    assert {module.partition(".")[0] for module in theirs} == {"transformer"}
    assert (sites.family.name, sites.family.tabled) == ("gpt_bigcode (no table)", False)


def test_a_width_that_the_config_does_not_tell_is_not_offered():
    family = untabled(config("gpt_bigcode", n_inner=None, intermediate_size=48))  # which it does not read
    assert "neurons" not in family.sites
    assert family.lacks["neurons"].endswith("h.0.mlp.c_proj has [1, 5, 128] where [5, 48] would be right")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (dict(kind="bert", is_decoder=True), "not one norm is called after encoder.layer, among: nothing"),
        (dict(kind="gptj", rotary_dim=64), "a run of it without data fails, RuntimeError"),
        (dict(kind="t5"), "Unrecognized configuration class"),
        (dict(kind="albert"), "Unrecognized configuration class"),
    ],
)
def test_others_are_refused(made, why):
    with pytest.raises(ModelError, match=f"^no site table for .*, and none can be made.*{why}"):
        untabled(config(**made))


def test_layers_are_those_that_are_called_with_the_stream():
    made = config("starcoder2")
    sizes, tree = sizes_of(made), tree_of(made, False)
    assert _layers(tree, sizes) == "layers"
    with pytest.raises(ModelError, match=r"not one list of 3 layers was found among: layers \(2\)"):
        _layers(tree, msgspec.structs.replace(sizes, layers=3))
    tree.calls["layers.1"].argument = torch.empty(4, 1, 5, 32, device="meta")  # several streams
    told = r"layers.1 should be called once, with the stream \[5, 32\] .* with \[4, 1, 5, 32\]; it has: self_attn, mlp"
    with pytest.raises(ModelError, match=told):
        _layers(tree, sizes)
