"""Every family of the tables, on a tiny random model made on the spot: every site there, proved, equal on both engines,
and edited alike.

Families one after another in this process, both engines of each closed before the next: a tiny model starts in seconds,
and what is slow to import is imported once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.errors import UnsupportedSite
from patchclamp.language.registry import SITES

from ..models import FAMILIES, of_family
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here")
EAGER = {"enforce_eager": True, "max_model_len": 128, "block_size": 32, "kv_cache_memory_bytes": 1 << 26}
IDS = {"dtype": "float32", "skip_tokenizer_init": True}
PROMPTS = [list(range(5, 25)), list(range(100, 112))]
SAMPLED = {"max_tokens": 3, "sampling": {"ignore_eos": True}}
# what a family lacks, and why
ROUTER, FUSED, LATENT = {"router": "no experts"}, {"neurons": "fused kernel"}, dict.fromkeys("qkv", "latent")
LACKS = dict.fromkeys(FAMILIES, ROUTER) | {
    "gpt_neox": ROUTER | {"resid_mid": "none is between"},
    "olmo2": ROUTER | dict.fromkeys(("attn_in", "mlp_in"), "itself"),
    "mixtral": FUSED, "gpt_oss": FUSED, "qwen3_moe": {}, "deepseek_v2": LATENT, "deepseek_v3": LATENT,
}  # fmt: skip
# its rotary kernel for CPUs takes the queries of latent attention for a dense tensor, which they are not; its plain code
# does not
PLAIN_CODE = {"compilation_config": {"custom_ops": ["none"]}}
OPTIONS = {"deepseek_v2": PLAIN_CODE, "deepseek_v3": PLAIN_CODE}
EPS = float(np.finfo(np.float32).eps)


class Pair(NamedTuple):
    name: str
    lm: pc.LM
    hub: pc.LM


def opened(name: str, folder: str, **options) -> Pair:
    """A family's model on both engines."""
    hub = pc.LM(folder, engine="transformers", **IDS)
    return Pair(name, pc.LM(folder, engine="vllm", **IDS, **EAGER | OPTIONS.get(name, {}) | options), hub)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory, inspected_here):
    made = opened(request.param, of_family(tmp_path_factory.mktemp(request.param), request.param))
    yield made
    made.lm.close()
    made.hub.close()


def test_every_site_is_proved_and_equal(pair):
    everything_is_equal(pair)


def test_every_edit_moves_the_logits_as_on_transformers(pair):
    every_edit_is_equal(pair)


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
        with pytest.raises(UnsupportedSite, match=f"{name} is not available on .* models: .*{why}.*; there are: embed"):
            lm.run(PROMPTS[0], capture=[name])
    sparse = set(lm.sites.sizes.sparse)
    for name, layers in {"router": set(range(3)) - sparse, "neurons": sparse}.items():
        if name not in LACKS[pair.name] and layers:
            with pytest.raises(UnsupportedSite, match=rf"layer {min(layers)} has no {name}; there it is at"):
                lm.run(PROMPTS[0], capture=[pc.Site(name, min(layers))])


@pytest.mark.parametrize("engine", ["lm", "hub"])
def test_the_stream_adds_up(pair, engine):
    lm = getattr(pair, engine)
    run = lm.run(PROMPTS[0], max_tokens=2, capture=[pc.Site(name) for name in lm.sites.names if name != "logits"])
    for layer in range(3):
        before, attention, mlp, after = (
            run[f"{name}[{layer}]"] for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        )
        if "resid_mid" in lm.sites.names:
            middle = run[f"resid_mid[{layer}]"]
            assert worst_row(before + attention, middle) <= 4 * EPS, layer
            assert worst_row(middle + mlp, after) <= 4 * EPS, layer
        else:
            assert worst_row(before + attention + mlp, after) <= 4 * EPS, layer
        if layer < 2:
            assert torch.equal(after, run[f"resid_pre[{layer + 1}]"])
    assert torch.equal(run["embed"], run["resid_pre[0]"]) == (pair.name not in ("gpt2", "opt"))  # they add positions


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
        made.append(pc.Add((length * rng.standard_normal(end - first)).astype(np.float32), at, pc.prompt[-1]))
    return made


def parts(lm: pc.LM) -> list[pc.Site]:
    """One head, neuron or expert of every site that has such, in two layers of it."""
    words = [name for name in lm.sites.names if lm.sites.parts(name)]
    return [
        pc.Site(name, place.layer, 5 if name == "neurons" else 1)
        for name in words
        for place in lm.sites.resolve(pc.Site(name))[-2:]
    ]


def flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, W], heads one after the other."""
    return rows.flatten(1).float()
