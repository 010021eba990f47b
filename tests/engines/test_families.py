"""Every family of the tables, on a tiny random model made on the spot: every site there, proved, equal on both engines,
and edited alike.

Families one after another in this process, both engines of each closed before the next: a tiny model starts in seconds,
and what is slow to import is imported once.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import patchclamp as pc
from patchclamp.engines.weights import WEIGHTS
from patchclamp.errors import UnsupportedSite
from patchclamp.language.site import SITES
from patchclamp.runtime.taps import find
from patchclamp.sites import FAMILIES as TABLES
from patchclamp.sites import SiteMap, family_of, sizes_of
from patchclamp.studies import edge_attribution

from ..models import FAMILIES, MORE, of_config, of_family
from ..reference.weights import from_checkpoint
from .conftest import without_amx
from .plain_scan import plain_scan
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here")
EAGER = {"enforce_eager": True, "max_model_len": 128, "block_size": 32, "kv_cache_memory_bytes": 1 << 26}
IDS = {"dtype": "float32", "skip_tokenizer_init": True}
PROMPTS = [list(range(5, 25)), list(range(100, 112))]
SAMPLED = {"max_tokens": 3, "sampling": {"ignore_eos": True}}
# what a family lacks, and why
MIXER, FUSED = {"mixer_out": "have attention"}, {"neurons": "fused kernel", "mixer_out": "have attention"}
ROUTER, EXPERTS = MIXER | {"router": "no experts"}, {"router": "no experts"}
LATENT = MIXER | dict.fromkeys("qkv", "latent")
ITSELF = ROUTER | dict.fromkeys(("attn_in", "mlp_in"), "directly")
PARALLEL = ROUTER | {"resid_mid": "in parallel"}
UNLIKE = dict.fromkeys("qkvz", "head size")
NO_ATTENTION = dict.fromkeys(("attn_in", "q", "k", "v", "z", "attn_out"), "no layer has attention")
NO_MLP = dict.fromkeys(("resid_mid", "mlp_in", "router", "neurons", "mlp_out"), "no MLP")
LACKS = dict.fromkeys(FAMILIES | MORE, ROUTER) | {
    "gpt_neox": PARALLEL, "cohere2": PARALLEL, "cohere": PARALLEL, "gptj": PARALLEL, "falcon": PARALLEL, "falcon_new": PARALLEL,
    "olmo2": ITSELF, "olmo3": ITSELF, "exaone4": ITSELF,
    "mixtral": FUSED, "gpt_oss": FUSED, "olmoe": FUSED, "qwen3_moe": MIXER, "deepseek_v2": LATENT, "deepseek_v3": LATENT,
    "glm4_moe": MIXER, "glm4_moe_plain": MIXER, "ernie4_5_moe": MIXER, "qwen2_moe": MIXER,
    "granite_hybrid": EXPERTS, "nemotron_h": {"resid_mid": "mixer", "router": "no layer has experts"},
    "gemma4": ROUTER | UNLIKE, "gemma4_wide": ROUTER | UNLIKE | {"neurons": "twice as wide"},
    "gemma4_moe": MIXER | UNLIKE | {"mlp_in": "own norm"},
    "falcon_h1": {"router": "no experts"}, "jamba": {},
    "mamba2": NO_ATTENTION | NO_MLP, "qwen3_next": dict.fromkeys("qk", "in one kernel"),
    "qwen3_5": dict.fromkeys("qk", "in one kernel") | {"router": "no layer has experts"},
    "qwen3_5_moe": dict.fromkeys("qk", "in one kernel") | {"neurons": "all layers have experts"},
    "nemotron_h_experts": {"resid_mid": "mixer"},
    "granite_hybrid_experts": {"mlp_out": "outside any module", "neurons": "fused kernel", "router": "inside"},
    "hunyuan_v1_moe": FUSED, "minimax_m2": FUSED | dict.fromkeys("qk", "inside attention"),
    "llama4": MIXER | dict.fromkeys("qk", "orders the columns") | {"router": "on Transformers"},
}  # fmt: skip
# its rotary kernel for CPUs takes the queries of latent attention for a dense tensor, which they are not; its plain code
# does not
PLAIN_CODE = {"compilation_config": {"custom_ops": ["none"]}}
OPTIONS = {"deepseek_v2": PLAIN_CODE, "deepseek_v3": PLAIN_CODE}
# vLLM's CPU build does not run them, and why
TRANSFORMERS_ALONE = {
    "qwen3_next": "its kernels of linear attention for CPUs take bfloat16 alone",
    "qwen3_5": "it imports torchvision, which a CPU build of PyTorch has not",
    "qwen3_5_moe": "as qwen3_5",
    "nemotron_h_experts": "it has no kernel for CPUs of experts without a gate",
    "jamba": "it has no kernel for CPUs of the first Mamba's state space",
    "minimax_m2": "its router for CPUs takes a sigmoid of groups alone",
}
# what the others' tables have that those of FAMILIES do not: a copied input, groups of columns, kinds of layers
FEW = ["cohere2", "falcon_new", "granite_hybrid", "nemotron_h", "mamba2"]
# proved in make test; the others in make slow
QUICK = {"llama", "gemma2", "gpt2", "gpt_neox", "mixtral", "falcon_new", "granite_hybrid"}
ALL = "PATCHCLAMP_FAMILIES" in os.environ
LATER = [name for name in MORE if name not in TRANSFORMERS_ALONE] if ALL else FEW
# layers with a state, or that share keys and values
WHOLE = {"granite_hybrid", "granite_hybrid_experts", "nemotron_h", "nemotron_h_experts", "falcon_h1", "jamba", "mamba2",
         "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma4_wide"}  # fmt: skip
EPS = float(np.finfo(np.float32).eps)


SPELLED = {"llama", "gemma2", "gpt2", "gpt_neox", "falcon_new"}


def weight_or_none(lm: pc.LM, name: str, layer: int | None) -> torch.Tensor | None:
    try:
        return lm.weights(name, layer)
    except UnsupportedSite:
        return None


class Pair(NamedTuple):
    name: str
    lm: pc.LM
    hub: pc.LM


def opened(name: str, folder: str, **options) -> Pair:
    """A family's model on both engines. All captures on vLLM are self-checked; BLOOM's cannot be."""
    hub = pc.LM(folder, engine="transformers", max_model_len=128, **IDS)
    chosen: dict[str, Any] = EAGER | OPTIONS.get(name, {}) | ({} if name == "bloom" else {"check_rate": 1}) | options
    with without_amx():
        return Pair(name, pc.LM(folder, engine="vllm", **IDS, **chosen), hub)


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *LATER)],
)
def pair(request, tmp_path_factory, inspected_here):
    # vLLM's BLOOM has the exact GELU, Transformers' the approximation that it was trained with
    approximate = mock.patch("vllm.model_executor.models.bloom.get_act_fn", return_value=torch.nn.GELU("tanh"))
    with approximate if request.param == "bloom" else contextlib.nullcontext():
        made = opened(request.param, of_family(tmp_path_factory.mktemp(request.param), request.param))
    yield made
    made.lm.close()
    made.hub.close()


def test_every_site_is_proved_and_equal(pair):
    everything_is_equal(pair)
    status = pair.lm.engine.status()
    assert (status["self_checks"] > 0, status["self_checks_failed"]) == (pair.name != "bloom", 0)


def test_every_edit_moves_the_logits_as_on_transformers(pair):
    every_edit_is_equal(pair)


def test_weights_are_the_checkpoints(pair):
    """Bit for bit, whatever an engine fused, packed or regrouped."""
    tensors = {name: tensor for path in Path(pair.hub.model.name).glob("*.safetensors")
               for name, tensor in load_file(path).items()}  # fmt: skip
    found = 0
    for name, kind in WEIGHTS.items():
        for layer in pair.hub.sites.layers_with(kind.point) if kind.point else (None,):
            if pair.name == "llama4" and name in ("W_Q", "W_K"):
                with pytest.raises(UnsupportedSite, match="orders the columns"):
                    pair.lm.weights(name, layer)
                continue
            ours, theirs = (weight_or_none(lm, name, layer) for lm in (pair.lm, pair.hub))
            assert (ours is None) == (theirs is None), (name, layer)
            assert ours is None or torch.equal(ours, theirs), (name, layer)
            found += ours is not None
            if pair.name in SPELLED:
                expected = from_checkpoint(pair.name, tensors, layer or 0).get(name)
                assert expected is None or torch.equal(theirs, expected), (name, layer)
    assert found >= 3


def test_values_are_their_input_times_their_weights(pair):
    if {"attn_in", "v"} <= {*pair.lm.sites.names}:
        run = pair.lm.run(PROMPTS[0], max_tokens=1, capture=["attn_in", "v"])
        for layer in pair.lm.sites.layers_with("v"):
            made = torch.einsum("td,hde->the", run[f"attn_in[{layer}]"], pair.lm.weights("W_V", layer))
            bias = weight_or_none(pair.lm, "b_V", layer)
            made = made if bias is None else made + bias
            assert worst_row(made.flatten(1), run[f"v[{layer}]"].reshape(len(made), -1)) <= 1e-4


def test_log_probabilities_of_the_prompt_are_equal(pair):
    """Of models that scale or cap their logits too."""
    edits = [pc.Scale(0.5, pc.resid_pre[1])]
    ours, theirs = (lm.run(PROMPTS, max_tokens=1, edits=edits, prompt_logprobs=2) for lm in (pair.lm, pair.hub))
    for run, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(run.prompt_logprobs, other.prompt_logprobs, atol=1e-4)
        for row, expected in zip(run.prompt_top_logprobs, other.prompt_top_logprobs, strict=True):
            np.testing.assert_allclose(sorted(row.values()), sorted(expected.values()), atol=1e-4)


@pytest.mark.parametrize("engine", ["lm", "hub"])
def test_an_edit_of_a_part_leaves_the_others(pair, engine):
    lm = getattr(pair, engine)
    for at in parts(lm):
        whole = pc.Site(at.name, at.layers)
        first, end = lm.sites.resolve(at)[0].columns
        push = np.linspace(1.0, 2.0, end - first, dtype=np.float32)
        plain, edited = (
            flat(lm.run(PROMPTS[0], max_tokens=1, capture=[whole], edits=[op])[whole])
            for op in (pc.Scale(1.0, at=at), pc.Add(push, at=at, tokens=pc.prompt[3]))
        )
        changed = torch.zeros_like(plain, dtype=torch.bool)
        changed[3, first:end] = True
        assert torch.equal(edited[~changed], plain[~changed]), at
        assert torch.equal(edited[changed], plain[changed] + torch.from_numpy(push)), at


@pytest.mark.parametrize("engine", ["lm", "hub"])
def test_writing_back_what_was_read_changes_nothing(pair, engine):
    lm = getattr(pair, engine)
    base = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.Site(name) for name in lm.sites.names])
    for name in lm.sites.names:
        at = pc.Site(name)
        same = pc.Replace(pc.From(base, at), at=at, tokens=pc.prompt[-1] if name == "logits" else pc.prompt)
        made = [lm.run(PROMPTS[0], max_tokens=1, capture=["logits"], edits=[op]) for op in (same, pc.Scale(1.0, at=at))]
        assert torch.equal(*(run["logits"] for run in made)), name
        assert torch.equal(made[0]["logits"], base["logits"]), name


@pytest.mark.parametrize("engine", ["lm", "hub"])
def test_what_a_family_lacks_says_why(pair, engine):
    lm = getattr(pair, engine)
    for name, why in LACKS[pair.name].items():
        with pytest.raises(UnsupportedSite, match=f"{name} .*{why}.*embed"):
            lm.run(PROMPTS[0], capture=[name])
    for name in lm.sites.names:
        having = {ref.layer for ref in lm.sites.resolve(pc.Site(name))} - {None}
        missing = set(range(lm.sites.layers)) - having
        if having and missing:
            with pytest.raises(UnsupportedSite, match=rf"layer {min(missing)} has no {name}"):
                lm.run(PROMPTS[0], capture=[pc.Site(name, min(missing))])


@pytest.mark.parametrize("engine", ["lm", "hub"])
def test_the_stream_adds_up(pair, engine):
    lm = getattr(pair, engine)
    run = lm.run(PROMPTS[0], max_tokens=2, capture=[pc.Site(name) for name in lm.sites.names if name != "logits"])
    mixer = "mixer_out" if "mixer_out" in lm.sites.names else "attn_out"
    for layer in range(lm.sites.layers):
        before, after = run[f"resid_pre[{layer}]"], run[f"resid_post[{layer}]"]
        added = [run[at] for name in (mixer, "mlp_out") if (at := f"{name}[{layer}]") in map(str, lm.sites.refs())]
        assert added
        if lm.sites.family.both:
            added[0] = added[0] + run[f"attn_out[{layer}]"]
        if "resid_mid" in lm.sites.names:
            middle = run[f"resid_mid[{layer}]"]
            assert worst_row(before + added[0], middle) <= 4 * EPS, layer
            alone = pair.name != "granite_hybrid_experts" and not lm.sites.family.afterwards
            assert not alone or worst_row(middle + added[1], after) <= 4 * EPS, layer
        else:
            assert worst_row(before + sum(added), after) <= 4 * EPS, layer
        if layer + 1 < lm.sites.layers:
            assert torch.equal(after, run[f"resid_pre[{layer + 1}]"])
    assert torch.equal(run["embed"], run["resid_pre[0]"]) == (pair.name not in ("gpt2", "opt"))  # they add positions


@pytest.mark.parametrize("name", TRANSFORMERS_ALONE if ALL else ["qwen3_next"])
def test_what_vllm_runs_elsewhere_is_proved_on_transformers(name, tmp_path):
    with pc.LM(of_family(tmp_path, name), engine="transformers", **IDS) as hub:
        assert hub.sites.names == [word for word in SITES if word not in LACKS[name]]
        assert hub.sites.withdrawn == {}
        pair = Pair(name, hub, hub)
        test_what_a_family_lacks_says_why(pair, "hub")
        test_writing_back_what_was_read_changes_nothing(pair, "hub")
        test_the_stream_adds_up(pair, "hub")


def test_the_modules_of_every_table_are_there_on_transformers():
    """Of every model class that has a table, in the module tree of a model without weights."""
    classes = set()
    for kind, config in (FAMILIES | MORE).values():
        with torch.device("meta"):
            net = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config))
        classes.add(type(net).__name__)
        sites = SiteMap(family_of([type(net).__name__], net.config), sizes_of(net.config))
        assert [find(net, tap.module) for point, tap in sites.taps("transformers") if point.rows == "tokens"]
    assert classes == {name for family in TABLES for name in family.architectures}


@pytest.mark.parametrize(
    "name",
    [name if name in {*QUICK, *FEW} else pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *MORE)],
)
def test_gradients_are_slopes_and_cuts_are_proved(name, tmp_path):
    """At every place: the rows are the captured ones, and a step along the gradient changes logits by its length."""
    with pc.LM(of_family(tmp_path, name), engine="transformers", prove=False, max_model_len=128, **IDS) as hub:
        taps = {point.number: tap for point, tap in hub.sites.taps("transformers")}
        refs = [ref for ref in hub.sites.refs() if ref.name != "logits" and not taps[ref.point].rerun]
        found = hub.engine.gradients(PROMPTS[1], sorted({ref.point for ref in refs}), {7: 1.0, 9: -1.0})
        run = hub.run(PROMPTS[1], max_tokens=1, capture=[pc.Site(name) for name in {ref.name for ref in refs}])
        edits, expected = [], []
        for ref in refs:
            rows, slope = flat(run[str(ref)]).numpy(), found.gradients[ref.point]
            assert np.array_equal(rows, found.rows[ref.point]), ref
            length, step = np.linalg.norm(slope), 0.002 * float(np.sqrt(np.mean(rows**2)))
            push = (slope * (step / max(length, 1e-12))).astype(np.float32)
            at = pc.Site(ref.name, ref.layer)
            edits += [[pc.Add(sign * push, at=at, tokens=pc.prompt)] for sign in (1.0, -1.0)]
            expected.append((ref, float(length), 2 * step))
        runs = hub.run([PROMPTS[1]] * len(edits), edits=edits, max_tokens=1, capture=["logits"])
        values = [float(run["logits"][-1, 7].double() - run["logits"][-1, 9].double()) for run in runs]
        for (ref, length, width), up, down in zip(expected, values[::2], values[1::2], strict=True):
            slack = 64 * EPS * float(runs[0]["logits"].abs().max()) / width
            assert abs((up - down) / width - length) <= 0.02 * length + slack, ref
        known = hub.engine._recompute.whole_because
        assert bool(known) == (name in WHOLE)
        assert hub.engine._recompute.why_whole() == known  # and no warning


@pytest.mark.parametrize("name", ["cohere", "cohere2", "gptj", "falcon", "falcon_new", "gpt_neox"])
def test_edges_and_paths_where_attention_and_mlp_are_parallel(name, tmp_path):
    asked = {"clean": PROMPTS[1], "corrupt": PROMPTS[0][:12], "answer": 7, "foil": 9, "show_progress": False}
    with pc.LM(of_family(tmp_path, name), engine="transformers", prove=False, **IDS) as hub:
        edges = edge_attribution(hub, verify=0, sample=0, **asked)
        same = [edges.receivers.index(f"mlp_in[{layer}]") for layer in (0, 1)]
        assert np.isnan(edges.estimates[same[0], edges.senders.index("attn_out[0]")])
        assert np.isfinite(edges.estimates[same[1], edges.senders.index("attn_out[0]")])
        receivers = ["mlp_in[0]", "neurons[0]", "q[0]", "mlp_in[1]", "resid_post[0]", "logits"]
        paths = pc.studies.path_patch(
            hub, senders=["z", "attn_out", "neurons", "mlp_out"], layers=[0], group=None, receivers=receivers, **asked
        )
        assert np.isnan(paths.values).tolist() == [[True, True, True, False, False, False]] * 4


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
@pytest.mark.parametrize("recompute", ["changed", "all"])
def test_an_edit_moves_batchmates_of_experts_by_rounding_alone(name, recompute, tmp_path):
    """Transformers multiplies the rows of an expert together, and their number changes with the edit."""
    push = pc.Add(np.full(128, 3.0, np.float32), at=pc.resid_post[0], tokens=pc.prompt)
    with pc.LM(of_family(tmp_path, name), engine="transformers", prove=False, recompute=recompute, **IDS) as hub:
        plain, edited = (
            hub.run([PROMPTS[1]] * 4, edits=[[], [], edits, edits], max_tokens=1, capture=["logits"])
            for edits in ([pc.Scale(1.0, at=pc.resid_post[0])], [push])
        )
        assert not torch.allclose(plain[2]["logits"], edited[2]["logits"], atol=1e-2)
        for before, after in zip(plain[:2], edited[:2], strict=True):
            assert worst_row(before["logits"], after["logits"]) <= 1e-5


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_jamba_is_equal_where_its_state_space_runs_in_plain_code(tmp_path):
    with plain_scan():
        made = opened("jamba", of_family(tmp_path, "jamba"))
        with made.lm, made.hub:
            everything_is_equal(made)
            every_edit_is_equal(made)
            test_what_a_family_lacks_says_why(made, "lm")
            test_writing_back_what_was_read_changes_nothing(made, "lm")
            test_the_stream_adds_up(made, "lm")
            push, mixed = pc.Add([1.0] * made.lm.model.d_model, pc.Site("mixer_out", 0)), pc.Site("resid_mid", 0)
            before, after = (
                made.lm.run(PROMPTS[0], max_tokens=1, capture=[mixed], edits=e)[mixed] for e in ([], [push])
            )
            assert torch.allclose(after - before, torch.ones(()), atol=1e-5)  # both are read at one module


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_gemma_3n_is_refused_by_name(tmp_path):
    config = {**MORE["gemma4"][1], "intermediate_size": [256] * 3, "laurel_rank": 8, "num_kv_shared_layers": 1,
              "activation_sparsity_pattern": [0.0] * 3}  # fmt: skip
    folder = of_config(tmp_path, "gemma3n_text", config)
    for engine in ("transformers", "vllm"):
        with pytest.raises(pc.ModelError, match=r"Gemma3nForCausalLM has no sites: .*AltUp"):
            pc.LM(folder, engine=engine, **IDS)


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_edges_are_refused_where_a_layer_ends_with_a_factor(tmp_path):
    with (
        pc.LM(of_family(tmp_path, "gemma4"), engine="transformers", prove=False, **IDS) as hub,
        pytest.raises(UnsupportedSite, match=r"gemma4 models: .* an embedding of the layer, and a factor"),
    ):
        edge_attribution(hub, clean=PROMPTS[1], corrupt=PROMPTS[0][:12], answer=5)


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_qwen3_next_is_proved_on_vllm_in_the_dtype_that_it_runs_in(tmp_path):
    is_proved_in_bfloat16(of_family(tmp_path, "qwen3_next"))


def is_proved_in_bfloat16(folder: str, worst: float = 0.25, **options) -> None:
    dtype: dict[str, Any] = {**IDS, "dtype": "bfloat16"}
    with (
        pc.LM(folder, engine="transformers", prove=False, **dtype) as hub,
        pc.LM(folder, engine="vllm", **dtype, **EAGER, **options) as lm,
    ):
        assert lm.sites.names == hub.sites.names
        assert lm.sites.withdrawn == {}
        ours, theirs = (m.run(PROMPTS[0], max_tokens=1, capture=lm.sites.names) for m in (lm, hub))
        for place in map(str, lm.sites.refs()):
            a, b = flat(ours[place]), flat(theirs[place])
            assert worst_row(a, b) <= worst, place  # one row may be a small sum of large numbers
            assert (a - b).norm() <= 0.12 * b.norm(), place  # another site's tensors are at least 0.14 away


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_compiled_too(name, tmp_path):
    made = opened(name, of_family(tmp_path, name), enforce_eager=False)
    try:
        everything_is_equal(made)
        every_edit_is_equal(made)
    finally:
        made.lm.close()
        made.hub.close()


def everything_is_equal(pair: Pair) -> None:
    """Every site that the family promises, in every layer: prompts of a batch, and what they generate."""
    promised = [name for name in SITES if name not in LACKS[pair.name]]
    assert pair.lm.sites.names == pair.hub.sites.names == promised
    assert pair.lm.sites.withdrawn == pair.hub.sites.withdrawn == {}
    rows_are_equal(pair, promised)


def rows_are_equal(pair: Pair, names: list[str]) -> None:
    ours, theirs = (m.run(PROMPTS, capture=[pc.Site(n) for n in names], **SAMPLED) for m in (pair.lm, pair.hub))
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        for place in map(str, pair.lm.sites.refs()):
            assert a.positions(place) == b.positions(place)
            assert len(a.positions(place)) == (3 if place == "logits" else len(a.prompt_token_ids) + 2)
            assert worst_row(flat(a[place]), flat(b[place])) <= 1e-4, place


def every_edit_is_equal(pair: Pair) -> None:
    """A vector added at the last prompt token, at every place and at a part of some: the logits move, and as on
    Transformers.

    A difference of logits is made of rounded logits: what they differ by without edits, some 5 ulp of their length on
    either engine, is no part of what an edit does.
    """
    base = pair.hub.run(PROMPTS[0], max_tokens=1, capture=[pc.Site(name) for name in pair.lm.sites.names])
    edits = pushes(pair.lm, base)
    asked = [[], *([op] for op in edits)]
    ours, theirs = (
        torch.cat([run["logits"] for run in m.run([PROMPTS[0]] * len(asked), edits=asked, max_tokens=1,
                                                  capture=["logits"])]) for m in (pair.lm, pair.hub)
    )  # fmt: skip
    slack = 16 * EPS * float(theirs[0].norm())
    for op, a, b in zip(edits, ours[1:] - ours[0], theirs[1:] - theirs[0], strict=True):
        assert b.norm() > 10 * slack, op.at
        assert (a - b).norm() <= 1e-3 * b.norm() + slack, op.at


def pushes(lm: pc.LM, base: pc.Run) -> list[pc.Add]:
    """An edit for every place and for `parts`, twice as long as what is there."""
    places = [pc.Site(place.name, place.layer) for place in lm.sites.refs()]
    rng, made = np.random.default_rng(0), []
    for at in [*places, *parts(lm)]:
        row = flat(base[pc.Site(at.name, at.layers)])[-1]
        first, end = lm.sites.resolve(at)[0].columns or (0, len(row))
        length = float(row.square().mean().sqrt()) * (40.0 if end - first == 1 else 2.0)
        if at.name == "router" and end - first == 1:  # an expert that is not chosen is not to be pushed further down
            made.append(pc.Add([length * (1.0 if row[first] < row.mean() else -1.0)], at, pc.prompt[-1]))
            continue
        made.append(pc.Add((length * rng.standard_normal(end - first)).astype(np.float32), at, pc.prompt[-1]))
    return made


def parts(lm: pc.LM) -> list[pc.Site]:
    """One head, neuron or expert of every site that has such, in two layers of it."""
    return [
        pc.Site(name, place.layer, min(5 if name == "neurons" else 1, count[0] - 1))
        for name in lm.sites.names
        if (count := lm.sites.parts(name))
        for place in lm.sites.resolve(pc.Site(name))[-2:]
    ]


def flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, W], heads one after the other."""
    return rows.flatten(1).float()
