"""The prover on live models: what a right table says is proved, and what a wrong one says of a tensor that is something
else is not, whichever proof it is that sees it."""

from __future__ import annotations

import importlib
import re

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import patchclamp as pc
from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.kernels import fused
from patchclamp.proving import LENGTH, prove
from patchclamp.sites import tables
from patchclamp.sites.tables import Tap

from ..gpu.engines import attached
from ..models import of_family
from .test_families import EAGER, IDS

pytestmark = pytest.mark.usefixtures("inspected_here")
LAYERS = 5
OPTIONS = {"transformers": IDS, "vllm": IDS | EAGER}
ENGINES = tuple(OPTIONS)
LAYER = "model.layers.{l}"
ATTENTION, MLP = LAYER + ".self_attn", LAYER + ".mlp"
NORMS = LAYER + ".input_layernorm", LAYER + ".post_attention_layernorm"
# what a wrong table says, by kind of point; words that are to fail, and what is said of one
WRONG = {
    "the mlp for attention": ({"attn_out": Tap(MLP, "out")}, {"attn_out", "resid_mid"},
                              r"resid_pre\[0\] \+ attn_out\[0\] does not equal resid_mid\[0\]"),
    "the projection for the block": ({"mlp_out": Tap(ATTENTION + ".o_proj", "out")},
                                     {"mlp_out", "resid_post", "resid_pre"},
                                     r"resid_mid\[0\] \+ mlp_out\[0\] does not equal resid_post\[0\]"),
    "two norms exchanged": ({"attn_in": Tap(NORMS[1], "out"), "mlp_in": Tap(NORMS[0], "out")}, {"attn_in", "mlp_in"},
                            r"attn_in\[0\] does not change q\[0\]"),
    "keys for values": ({"v": Tap(ATTENTION + ".k_proj", "out")}, {"v", "z"},
                        r"z\[0, 0\] .* multiple of v\[0, 0\]"),
    "keys and values exchanged": ({"v": Tap(ATTENTION + ".k_proj", "out"), "k": Tap(ATTENTION + ".v_proj", "out")},
                                  {"v", "z"}, "multiple"),
    "queries for results": ({"z": Tap(ATTENTION + ".q_proj", "out")}, {"z", "v"}, "multiple"),
    "the mlp's input for its neurons' layer": ({"mlp_in": Tap(NORMS[1], "in")}, {"mlp_in"},
                                               r"mlp_in\[0\] equals resid_mid\[0\]"),
    "the last stream for its norm": ({"final_norm": Tap("model.norm", "in")}, {"final_norm"},
                                     r"final_norm equals resid_post\[4\]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return of_family(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=ENGINES)
def lm(request, folder):
    with pc.LM(folder, engine=request.param, prove=False, **OPTIONS[request.param]) as made:
        yield made


def runtime_of(lm: pc.LM):
    return lm.engine.runtime if lm.model.engine == "transformers" else attached(lm).runtime


@pytest.mark.parametrize("full", [False, True])
def test_a_right_table_is_proved(lm, full):
    proofs = {proof.name: proof for proof in prove(lm, full)}
    assert list(proofs) == lm.sites.names
    assert all(proof.holds for proof in proofs.values()), [proof.note for proof in proofs.values()]
    added = {name for name, proof in proofs.items() if proof.adds}
    stream, heads = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"}, {"v", "z"}
    assert added == stream | heads | {"attn_in", "mlp_in", "final_norm"}
    blocks = {"attn_in", "q", "k", "v", "z", "attn_out", "mlp_in", "neurons", "mlp_out"}
    assert {name for name, proof in proofs.items() if proof.order} == blocks
    for name, proof in proofs.items():
        assert proof.tried == ((LAYERS if full else 3) if proof.layers else 1), name


def says(monkeypatch, what: str) -> None:
    """Has the table be wrong."""
    taps, _, _ = WRONG[what]
    (right,) = (family for family in tables.FAMILIES if family.name == "llama")
    rows = {kind: msgspec.structs.replace(right.points[kind], transformers=tap) for kind, tap in taps.items()}
    wrong = msgspec.structs.replace(right, points=right.points | rows)
    monkeypatch.setattr(tables, "FAMILIES", tuple(wrong if each is right else each for each in tables.FAMILIES))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_table_is_not(folder, monkeypatch, what, full):
    """On Transformers: the table says of one tensor that it is another."""
    _, words, note = WRONG[what]
    says(monkeypatch, what)
    with pc.LM(folder, engine="transformers", prove=False, **IDS) as lm:
        proofs = {proof.name: proof for proof in prove(lm, full)}
    failed = {name for name, proof in proofs.items() if not proof.holds}
    assert words <= failed
    assert any(re.search(note, proofs[name].note) for name in words), proofs


def test_a_write_that_is_lost_is_seen(lm, monkeypatch):
    """A site that is read and never written: writing it back is exact, and an edit does nothing."""
    layer, runtime = LAYERS // 2, runtime_of(lm)
    point = lm.sites.resolve(pc.attn_in[layer])[0].point
    apply = runtime.apply

    def lost(at, hidden, residual=None):
        return apply(at, hidden.clone() if at == point else hidden, residual)

    monkeypatch.setattr(runtime, "apply", lost)
    proofs = {proof.name: proof for proof in prove(lm)}
    assert not proofs["attn_in"].edit
    assert f"an edit at attn_in[{layer}] does not change the logits" in proofs["attn_in"].note
    assert [name for name, proof in proofs.items() if not proof.holds] == ["attn_in"]


@pytest.mark.parametrize(
    ("scale", "times", "unmoved"),
    [(0.1, 16.0, set()), (0.1, 1.0, {"k"}), (0.0, 16.0, {"attn_in", "q", "k", "v", "z"})],
)
def test_what_a_quiet_layer_adds_is_told_from_nothing(tmp_path, monkeypatch, scale, times, unmoved):
    """Where batches round by 0.03, an edit in a layer that adds little does not show, unless it is longer."""
    path = of_family(tmp_path, "llama", vocab_size=512)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= scale
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prover = importlib.import_module("patchclamp.proving")
    monkeypatch.setattr(prover, "LOUDER", times)
    monkeypatch.setattr(prover, "_noise", lambda *args: 0.03)
    with pc.LM(path, engine="transformers", prove=False, **IDS) as lm:
        failed = {proof.name for proof in prove(lm) if not proof.edit}
    assert failed >= unmoved
    assert scale == 0 or failed == unmoved


@pytest.mark.parametrize(
    ("factor", "most", "message"),
    [(1.0, LENGTH, "an edit .*has no effect"), (0.5, LENGTH, "rows differ"), (0.0, LENGTH, "(rows differ|no rows)"),
     (0.0, 1 << 20, "no rows")],
)  # fmt: skip
def test_steps_without_taps_are_seen(lm, monkeypatch, factor, most, message):
    """As where CUDA graphs of steps of at most so many tokens were recorded without taps: what they read is nothing, or
    something else, and what they write is lost."""
    runtime = runtime_of(lm)
    apply, logits = runtime.apply, lm.sites.resolve(pc.Site("logits"))[0].point

    def lost(at, hidden, residual=None):
        if at == logits or hidden.numel() // hidden.shape[-1] > most:
            return apply(at, hidden, residual)
        return apply(at, factor * hidden, None if residual is None else factor * residual)

    monkeypatch.setattr(runtime, "apply", lost)
    with pytest.raises(pc.EngineError, match=f"in a single run {message}.*enforce_eager=True"):
        prove(lm)


@pytest.mark.parametrize("full", [False, True])
def test_a_write_that_is_not_exact_is_seen(lm, monkeypatch, full):
    """Rows that come back a little off: the logits are not the same to the bit."""
    split = fused.split

    def off(hidden_RW, residual_RW, at_A, h_AW):
        split(hidden_RW, residual_RW, at_A, h_AW * (1 + 2.0**-18))

    monkeypatch.setattr(fused, "split", off)
    for proof in prove(lm, full):
        assert not proof.noop, proof.name
        assert "writing back" in proof.note


def test_a_tensor_of_another_width_is_refused_at_load(folder, monkeypatch):
    (right,) = (family for family in tables.FAMILIES if family.name == "llama")
    row = msgspec.structs.replace(right.points["mlp_in"], transformers=Tap(LAYER + ".mlp.down_proj", "in"))
    wrong = msgspec.structs.replace(right, points=right.points | {"mlp_in": row})
    monkeypatch.setattr(tables, "FAMILIES", tuple(wrong if each is right else each for each in tables.FAMILIES))
    with pytest.raises(ModelError, match=r"mlp_in\[0\] \(model.layers.0.*\): expected width 128, got \[1, 4, 256\]"):
        pc.LM(folder, engine="transformers", **IDS)


def test_halves_of_the_stream_that_do_not_match_are_refused(lm, monkeypatch):
    runtime = runtime_of(lm)
    monkeypatch.setattr(runtime.step, "recording", True, raising=False)
    point = lm.sites.resolve(pc.resid_mid[0])[0].point
    where = r"resid_mid\[0\] \(model.layers.0.post_attention_layernorm\)"
    with pytest.raises(ModelError, match=where + r": .*\[4, 128\] and \[8, 64\]"):
        runtime.apply(point, torch.zeros(4, 128), torch.zeros(8, 64))


def test_what_fails_is_not_offered(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, words, _ = WRONG["the mlp for attention"]
    says(monkeypatch, "the mlp for attention")
    with pc.LM(folder, engine="transformers", **IDS) as lm:
        assert words <= set(lm.sites.withdrawn)
        with pytest.raises(UnsupportedSite, match=r"attn_out was not proved .*resid_mid"):
            lm.run([3, 4, 5], capture=[pc.attn_out])
