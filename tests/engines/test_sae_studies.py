"""Studies of SAEs on real models equal plain computations with hooks on Transformers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..reference.hooks import PlainModel
from .conftest import PROMPTS
from .test_sae import D, F, numbers, sae_of

LAYER = 3
SAES = {"standard": sae_of(), "topk": sae_of(k=5), "normed": sae_of(normalize="layer_norm", encoder=numbers(F, D) / 20)}


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def lm(shallow, request):
    return shallow.get(request.param, "float32")


@pytest.fixture(scope="module")
def plain(shortened):
    return PlainModel(shortened)


@contextlib.contextmanager
def rows_changed(plain, change):
    """The rows of `resid_post[LAYER]`, [T, D], are what `change` makes of them."""

    def pre(module, args):
        args[0][0] = torch.as_tensor(change(args[0][0].numpy().copy()))

    handle = plain.net.model.layers[LAYER + 1].register_forward_pre_hook(pre)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def loss(plain, ids: list[int]) -> float:
    logprobs = plain.net(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return -float(logprobs[range(len(ids) - 1), ids[1:]].mean())


@pytest.mark.parametrize(
    ("name", "ablation", "first"), [("standard", "zeros", 0), ("topk", "mean", 1), ("normed", "zeros", 1)]
)
def test_an_evaluation_equals_hooks(lm, plain, name, ablation, first):
    """By the SAE itself, and by the name of an attached one."""
    sae, prompts = SAES[name], PROMPTS[:2]
    found = pc.studies.evaluate_sae(lm, sae, prompts, ablation=ablation, tokens=f"every[{first}:]")
    assert f"study-{sae.content[:16]}" not in lm.sites.dictionaries
    ids = [lm.tokens(prompt) for prompt in prompts]
    rows = [plain.read(each, "resid_post", LAYER).numpy()[first:] for each in ids]
    every = np.concatenate(rows)
    mean = every.mean(0) if ablation == "mean" else np.zeros(D)
    features = [sae.encode(each) for each in rows]

    def only(change):
        return lambda all_rows: np.concatenate([all_rows[:first], change(all_rows[first:])])

    expected = []
    for each in ids:
        expected.append([loss(plain, each)])
        for change in (sae.reconstruct, lambda r: np.tile(mean, (len(r), 1)).astype(np.float32)):
            with rows_changed(plain, only(change)):
                expected[-1].append(loss(plain, each))
    assert np.abs(found.losses - expected).max() < 1e-3
    assert np.abs(np.diff(expected)).min() > 0.05
    assert np.allclose(found.l0, [(each > 0).sum(1).mean() for each in features], atol=1e-6)
    assert np.allclose(found.density, (np.concatenate(features) > 0).mean(0), atol=1e-6)
    error = sum(np.square(each - sae.reconstruct(each)).sum() for each in rows)
    totals, variance = found.totals, np.square(every - every.mean(0)).sum()
    assert abs(totals["explained"] - (1 - error / variance)) < 1e-3 * abs(error / variance)
    assert abs(totals["dead"] - (np.concatenate(features) == 0).all(0).mean()) < 1e-9
    model, with_sae, ablated = np.average(expected, 0, weights=[len(each) - 1 for each in ids])
    assert abs(totals["loss_recovered"] - (ablated - with_sae) / (ablated - model)) < 1e-3 * max(1, abs(with_sae))
    lm.attach(sae, name="named")
    try:
        again = pc.studies.evaluate_sae(lm, "named", prompts, ablation=ablation, tokens=f"every[{first}:]")
    finally:
        lm.detach("named")
    assert np.abs(again.losses - found.losses).max() < 1e-4
    assert (again.rows == [len(each) for each in rows]).all()


def test_what_cannot_be_evaluated_is_refused(lm):
    for sae, prompts, error, path in (
        ("none", PROMPTS, pc.UnknownName, "sae"), (3, PROMPTS, pc.ProgramError, "sae"),
        (SAES["topk"], [[5]], pc.TokensError, "prompts[0]"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            pc.studies.evaluate_sae(lm, sae, prompts)
        assert caught.value.path == path


def test_an_identity_recovers_all(lm):
    eye = np.eye(D, dtype=np.float32)
    both = np.concatenate([eye, -eye])
    sae = pc.SAE(both, np.zeros(2 * D), both, np.zeros(D))
    found = pc.studies.evaluate_sae(lm, sae, PROMPTS[:1], at=pc.resid_post[LAYER]).totals
    assert abs(found["loss_recovered"] - 1) < 1e-4
    assert abs(found["explained"] - 1) < 1e-6
    assert found["l0"] > 0.99 * D


def test_an_evaluation_resumes_and_is_saved(lm, tmp_path, monkeypatch):
    first = pc.studies.evaluate_sae(lm, SAES["topk"], PROMPTS[:2], resume=tmp_path / "journal")
    with monkeypatch.context() as patch:
        patch.setattr("patchclamp.studies.teacher_forcing._group_logprobs", None)  # nothing is graded again
        again = pc.studies.evaluate_sae(lm, SAES["topk"], PROMPTS[:2], resume=tmp_path / "journal")
    assert (again.losses == first.losses).all()
    loaded = pc.studies.load(first.save(tmp_path / "result"))
    assert loaded.totals == first.totals
    assert list(loaded.to_frame()["loss_recovered"]) == list(first.to_frame()["loss_recovered"])
    assert f"loss recovered {first.totals['loss_recovered']:.2f}"[:16] in loaded.picture().explained
