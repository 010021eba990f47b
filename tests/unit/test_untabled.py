"""A table made of a module tree: what is taken for what, and which trees are refused, with the names that are in them."""

from __future__ import annotations

import pytest

from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.language import Site
from patchclamp.sites import SiteMap, sizes_of
from patchclamp.sites.tables import PARALLEL
from patchclamp.sites.untabled import Flow, ModuleCall, NotFound, Record, Value, untabled

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
        "mid": (32, "model.h.1.ln_2"), "mlp_out": (32, "model.h.1.mlp"), "z": (32, "model.h.1.attn.c_proj"), "neurons": (48, "model.h.1.mlp.c_proj"),
    }  # fmt: skip
    theirs = {tap.module for point, tap in sites.taps("transformers") if point.kind != "logits"}
    assert {module.partition(".")[0] for module in theirs} == {"transformer"}
    assert (sites.family.name, sites.family.tabled) == ("gpt_bigcode (no table)", False)


def test_a_width_that_the_config_does_not_tell_is_not_offered():
    family = untabled(config("gpt_bigcode", n_inner=None, intermediate_size=48))  # which it does not read
    assert "neurons" not in family.sites
    assert family.lacks["neurons"].endswith("h.0.mlp.c_proj, got [1, 5, 128]")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (
            dict(kind="bert", is_decoder=True),
            "encoder.layer.1 ",
        ),
        (dict(kind="gptj", rotary_dim=64), "failed"),
        (dict(kind="t5"), "Unrecognized configuration class"),
        (dict(kind="albert"), "Unrecognized configuration class"),
    ],
)
def test_others_are_refused(made, why):
    with pytest.raises(ModelError, match=f"^no site table for .*{why}"):
        untabled(config(**made))


def taps(kind: str, **changed) -> dict[str, str]:
    """Where the points of a class are, on Transformers, by names of kinds."""
    family = untabled(config(kind, **changed))
    return {name: point.transformers.module for name, point in family.points.items()} | family.lacks


def test_what_is_added_is_what_reaches_the_stream():
    """BLOOM adds the stream within its modules; GLM-4 norms what it adds; Cohere's layers do both parts at once."""
    added = {"bloom": ("self_attention.dense", "mlp.dense_4h_to_h"), "starcoder2": ("self_attn", "mlp"),
             "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm")}  # fmt: skip
    for kind, ends in added.items():
        found = taps(kind, num_key_value_heads=2, pad_token_id=0)
        assert tuple(found[name].partition("{l}.")[2] for name in ("attn_out", "mlp_out")) == ends
        assert found["mid"].endswith(".post_attention_layernorm")
    found = taps("cohere", pad_token_id=0)
    assert found["attn_out"].endswith(".self_attn")
    assert found["resid_mid"].endswith(PARALLEL)


def test_a_factor_is_read_where_it_is_multiplied():
    point = untabled(config("granite", residual_multiplier=0.5)).points["attn_out"]
    assert (point.transformers.module, point.transformers.scale) == ("model.layers.{l}.self_attn", 0.5)
    sites = SiteMap(untabled(config("granite", residual_multiplier=0.5)), sizes_of(config("granite")))
    view = sites.view(point.transformers)
    assert view is not None
    assert view.factor == 0.5


def test_an_embedding_is_a_point_of_its_own_where_something_is_added_to_it():
    assert taps("gpt_bigcode", n_inner=48)["embed"] == "transformer.wte"
    assert "embed" not in taps("bloom")  # whose first stream is made of it alone
    assert SiteMap(untabled(config("bloom")), sizes_of(config("bloom"))).names[:2] == ["embed", "resid_pre"]


def test_layers_without_attention_have_a_stream():
    made = config("jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
                  num_key_value_heads=2, intermediate_size=48, pad_token_id=0)  # fmt: skip
    sites = SiteMap(untabled(made), sizes_of(made))
    assert [ref.layer for ref in sites.resolve(Site("attn_out"))] == [1, 3]
    assert [ref.layer for ref in sites.resolve(Site("mlp_out"))] == [0, 1, 2, 3]
    with pytest.raises(UnsupportedSite, match=r"attn_out\[0\]: .*\[1, 3\]"):
        sites.resolve(Site("attn_out", 0))
    made = config("mamba", state_size=8)
    sites = SiteMap(untabled(made), sizes_of(made))
    assert sites.names == ["embed", "resid_pre", "resid_post", "final_norm", "logits"]
    with pytest.raises(UnsupportedSite, match="attention"):
        sites.resolve(Site("attn_out"))


def record() -> Record:
    """Two layers that hand on a pair of tensors, whose sum a norm takes in the end."""
    made = Record({"": "net", "l": "modulelist", "l.0": "layer", "l.1": "layer", "n": "norm"})
    wide = (2, 3)
    ids, embedded, gain, normed, more, total, end = range(7)
    made.values = [
        Value("given", (), (2,), ""), Value("embedding", (ids,), wide, "e"), Value("mm", (embedded,), wide, "l.0"),
        Value("add", (embedded, gain), wide, "l.1"), Value("mm", (normed,), wide, "l.1"),
        Value("add", (normed, more), wide, "n"), Value("norm", (total,), wide, "n"),
    ]  # fmt: skip
    calls = [("l.0", 2, [embedded], 3), ("l.1", 3, [gain, embedded], 5), ("n", 5, [more, normed], 7)]
    made.calls = [
        ModuleCall(path, begin, dict(enumerate(given)), dict.fromkeys(range(len(given)), wide), end=last)
        for path, begin, given, last in calls
    ]
    made.calls[-1].result, made.calls[-1].result_shapes = {0: end}, {0: wide}
    return made


def test_two_tensors_are_the_stream_if_their_sum_is_kept():
    flow = Flow(record(), 2, 3, 2)
    assert (flow.layers, flow.keys, flow.end_keys, flow.adds) == ("l", (0, 1), (0, 1), True)
    assert flow.gains == [{2: 1.0}, {4: 1.0}]


def test_layers_that_are_not_called_are_not_found():
    with pytest.raises(NotFound, match=r"3 layers.*l \(2\)"):
        Flow(record(), 3, 3, 2)
    with pytest.raises(NotFound, match=r"l\.1 .*\[2, 4\].*\{0: \[2, 3\]"):
        Flow(record(), 2, 4, 2)


def test_which_layers_have_experts_may_be_said_of_each_layer():
    mixtral = config("mixtral")  # as MiMo V2 says it
    mixtral.moe_layer_freq = [0, 1] * (mixtral.num_hidden_layers // 2)
    assert sizes_of(mixtral).sparse == tuple(range(1, mixtral.num_hidden_layers, 2))
