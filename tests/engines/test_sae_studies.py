"""Studies of SAEs on real models equal plain computations with hooks on Transformers."""

from __future__ import annotations

import contextlib
import importlib

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
    asked = {"prompt": PROMPTS[0], "answer": 5, "at": pc.resid_post[LAYER]}
    if not lm.engine.has_gradients:
        with pytest.raises(pc.UnsupportedStudy, match="gradients") as caught:
            pc.studies.feature_attribution(lm, sae=SAES["topk"], **asked)
        assert caught.value.path == "estimate"
    wide = pc.SAE(np.zeros((1025, D)), np.ones(1025), np.zeros((1025, D)), np.zeros(D))
    with pytest.raises(pc.TokensError, match="at most 1024 active features, got 1025"):
        pc.studies.feature_attribution(lm, sae=wide, estimate=False, **asked)


@contextlib.contextmanager
def without(plain, sae, cells: list[tuple[int, list[int]]]):
    """Features are 0 at some positions, all together; what the SAE misses stays."""

    def change(rows):
        features = sae.encode(rows)
        scale = 1.0 if sae.normalize == "none" else rows.std(1, ddof=1, keepdims=True)
        ablated = np.zeros_like(features)
        for feature, positions in cells:
            ablated[positions, feature] = features[positions, feature]
        return rows - (ablated @ sae.decoder * scale).astype(np.float32)

    with rows_changed(plain, change):
        yield


@pytest.mark.parametrize(("name", "by_token"), [("standard", False), ("topk", True), ("normed", True)])
def test_attributions_equal_hooks(lm, plain, shallow, name, by_token):
    """Gradients, ablations and the curve; the estimates of the other engine are those of Transformers."""
    sae, ids, verify = SAES[name], lm.tokens(PROMPTS[0]), 8
    answer, foil = (lm.tokens(word)[0] for word in (" Paris", " Rome"))
    chosen = list(range(1, len(ids)))
    asked = {"sae": sae, "prompt": PROMPTS[0], "answer": " Paris", "foil": " Rome", "by_token": by_token,
             "tokens": "every[1:]"}  # fmt: skip
    found = pc.studies.feature_attribution(shallow.get("transformers", "float32"), **asked, verify=verify, on=lm)

    rows = plain.read(ids, "resid_post", LAYER)
    active = sae.encode(rows.numpy())[1:]
    pairs = [(feature, [chosen[t]]) for t, feature in np.argwhere(active).tolist()]
    cells = pairs if by_token else [(f, chosen) for f in np.flatnonzero(active.any(0)).tolist()]
    assert found.features.tolist() == [feature for feature, _ in cells]
    assert found.positions.tolist() == [at[0] if by_token else -1 for _, at in cells]
    assert np.allclose(found.values, [active[np.array(at) - 1, f].max() for f, at in cells], atol=1e-4)

    hidden = rows.clone().requires_grad_()
    handle = plain.net.model.layers[LAYER + 1].register_forward_pre_hook(lambda module, args: (hidden[None], *args[1:]))
    logits = plain.net(torch.tensor([ids])).logits[0, -1]
    handle.remove()
    (slopes,) = torch.autograd.grad(logits[answer] - logits[foil], hidden)
    scale = 1.0 if sae.normalize == "none" else rows.numpy().std(1, ddof=1, keepdims=True)
    shares = sae.encode(rows.numpy()) * (slopes.numpy() * scale @ sae.decoder.T)
    expected = np.array([shares[at, feature].sum() for feature, at in cells])
    assert np.abs(found.estimates - expected).max() < 1e-3 * np.abs(expected).max()

    def metric(ablated) -> float:
        with without(plain, sae, ablated):
            logits = plain.logits(ids)
        return float(logits[answer] - logits[foil])

    best = np.argsort(-np.abs(expected), kind="stable")
    clean, exact = metric([]), found.exact
    assert set(np.flatnonzero(np.isfinite(exact))) == set(np.argsort(-np.abs(found.estimates), kind="stable")[:verify])
    for n in np.flatnonzero(np.isfinite(exact)):
        assert abs(exact[n] - (clean - metric([cells[n]]))) < 2e-3
    assert np.nanmax(np.abs(exact)) > 0.01
    kept = [metric([cells[n] for n in best[size:]]) for size in found.sizes]
    assert np.abs(found.kept - kept).max() < 5e-3
    assert (found.faithfulness[0], abs(found.faithfulness[-1] - 1) < 1e-2) == (0, True)
    assert found.picture().table[1][0] == str(found.to_frame()["feature"][0])


@pytest.mark.parametrize("kind", ["transcoder", "head"])
def test_small_effects_are_what_gradients_say(lm, shallow, kind):
    """Of a transcoder, whose features are read at one site and written at another, and of a part of a site."""
    width, site = (D, {"site": "mlp_in[4]", "site_out": "mlp_out[4]", "k": 7}) if kind == "transcoder" else (
        64, {"site": "z[4, 3]"})  # fmt: skip
    encoder, decoder = numbers(F, width), 1e-3 * numbers(F, width)
    sae = pc.SAE(encoder, np.zeros(F), decoder, np.zeros(width), **site)
    gradients = shallow.get("transformers", "float32")
    found = pc.studies.feature_attribution(gradients, on=lm, sae=sae, prompt=PROMPTS[0], answer=5, foil=6, verify=6)
    best = np.isfinite(found.exact)
    assert best.sum() == 6
    assert np.abs(found.exact - found.estimates)[best].max() < 0.05 * np.abs(found.estimates).max()


@pytest.mark.parametrize("name", ["standard", "topk"])
def test_an_ablation_sweep_needs_no_gradients(lm, plain, name):
    sae, ids = SAES[name], lm.tokens(PROMPTS[1])
    found = pc.studies.feature_attribution(lm, sae=sae, prompt=PROMPTS[1], answer=5, tokens="every[2:]", estimate=False)
    assert np.isnan(found.estimates).all()
    active = sae.encode(plain.read(ids, "resid_post", LAYER).numpy())[2:]
    assert found.features.tolist() == np.flatnonzero(active.any(0)).tolist()
    clean = float(plain.logits(ids).log_softmax(-1)[5])
    exact = []
    for feature in found.features.tolist():
        with without(plain, sae, [(feature, list(range(2, len(ids))))]):
            exact.append(clean - float(plain.logits(ids).log_softmax(-1)[5]))
    assert np.abs(found.exact - exact).max() < 2e-3
    assert np.abs(exact).max() > 0.05


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


def test_features_of_a_data_set_and_top_contexts(lm, tmp_path, monkeypatch):
    """The files have the active features of every token, and a feature's contexts are where it is largest."""
    sae, kept = SAES["standard"], 8
    documents = [*PROMPTS, " ".join(PROMPTS), [5], ""]
    asked = {"sae": sae, "documents": documents, "folder": tmp_path, "kept": kept, "context": 12, "window": 3}
    monkeypatch.setattr(importlib.import_module("patchclamp.studies.top_contexts"), "SHARD_PROMPTS", 2)
    whole = pc.studies.top_contexts(lm, **asked)
    files = sorted(path.name for path in tmp_path.glob("*/*.parquet"))
    assert files == [f"features-{i:05d}.parquet" for i in range(5)]  # of nine prompts

    ids = [lm.tokens(each) if isinstance(each, str) else each for each in documents]
    expected, features = [], []
    for number, each in enumerate(ids):
        for begin in range(0, len(each), 12):
            run = lm.run(each[begin : begin + 12], max_tokens=1, capture=[pc.Capture(f"resid_post[{LAYER}]")])
            features.append(sae.encode(run[f"resid_post[{LAYER}]"]))
            for t, row in enumerate(features[-1]):
                best = [i for i in np.argsort(-row)[:kept] if row[i] > 0]
                expected += [(number, begin + t, each[begin + t], i, row[i]) for i in best]
    table = whole.table().to_pydict()
    assert list(table) == ["document", "position", "token_id", "feature", "value"]
    assert list(zip(*list(table.values())[:4], strict=True)) == [each[:4] for each in expected]
    assert np.allclose(table["value"], [each[4] for each in expected], atol=1e-4)

    file = next(tmp_path.glob("*/features-00001.parquet"))
    before, lost = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.parquet")}, file.read_bytes()
    file.unlink()  # as after a stop
    feature = max(table["feature"], key=table["feature"].count)
    found = pc.studies.top_contexts(lm, **asked, features=[feature, 95])
    assert file.read_bytes() == lost
    assert {path for path, time in before.items() if path.stat().st_mtime_ns != time} == {file}

    of_feature = sorted((each for each in expected if each[3] == feature), key=lambda each: -each[4])
    best = [one for one in found.contexts if one.feature == feature]
    assert (best[0].document, best[0].position) == of_feature[0][:2]
    assert [one.values[one.at] for one in best] == sorted((one.values[one.at] for one in best), reverse=True)
    value_of = {each[:2]: each[4] for each in of_feature}
    for one in best:
        first = one.position - one.at
        assert len(one.tokens) == min(one.position + 4, len(ids[one.document])) - max(one.position - 3, 0)
        assert list(one.tokens) == lm.tokenizer.token_strings(ids[one.document][first : first + len(one.tokens)])
        around = [value_of.get((one.document, first + i), 0.0) for i in range(len(one.values))]
        assert np.allclose(one.values, around, atol=1e-4)
    assert len({(one.document, one.position) for one in best}) == len(best) > 3
    assert abs(found.density[0] - len(of_feature) / sum(map(len, ids))) < 1e-9
    page = found.to_html(tmp_path / "contexts.html").read_text()
    assert f"feature {feature}" in page
    assert pc.studies.load(found.save(tmp_path / "saved")).contexts == found.contexts
    with pytest.raises(pc.ProgramError, match="features below"):
        pc.studies.top_contexts(lm, **asked, features=[F])
