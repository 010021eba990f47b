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
SAES = {"standard": sae_of(), "topk": sae_of(k=5), "normed": sae_of(normalize="layer_norm", encoder=numbers(F, D) / 10)}


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def lm(narrow, request):
    return narrow.get(request.param, "float32")


@pytest.fixture(scope="module")
def plain(narrowed):
    return PlainModel(narrowed)


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
    assert np.abs(np.diff(expected)).max(0).min() > 0.05
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
    with pytest.raises(pc.TokensError, match=r"tokens: .*1024.*1025"):
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
def test_attributions_equal_hooks(lm, plain, narrow, name, by_token):
    """Gradients, ablations and the curve; the estimates of the other engine are those of Transformers."""
    sae, ids, verify = SAES[name], lm.tokens(PROMPTS[0]), 8
    answer, foil = (lm.tokens(word)[0] for word in (" Paris", " Rome"))
    chosen = list(range(1, len(ids)))
    asked = {"sae": sae, "prompt": PROMPTS[0], "answer": " Paris", "foil": " Rome", "by_token": by_token,
             "tokens": "every[1:]"}  # fmt: skip
    found = pc.studies.feature_attribution(narrow.get("transformers", "float32"), **asked, verify=verify, on=lm)

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
def test_small_effects_are_what_gradients_say(lm, narrow, kind):
    """Of a transcoder, whose features are read at one site and written at another, and of a part of a site."""
    width, site = (D, {"site": "mlp_in[4]", "site_out": "mlp_out[4]", "k": 7}) if kind == "transcoder" else (
        64, {"site": "z[4, 3]"})  # fmt: skip
    encoder, decoder = numbers(F, width), 1e-3 * numbers(F, width)
    sae = pc.SAE(encoder, np.zeros(F), decoder, np.zeros(width), **site)
    gradients = narrow.get("transformers", "float32")
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


@pytest.mark.parametrize("study", [
    "attention_edges", "attention_rollout", "attribution_patching", "edge_attribution", "edge_sweep",
    "evaluate_sae", "feature_attribution", "fit_probe", "head_scores", "top_contexts",
])  # fmt: skip
def test_studies_of_attention_gradients_and_files_run_with_their_required_arguments(narrow, tmp_path, study):
    """As the others do on the fake engine."""
    lm, ids = narrow.get("transformers", "float32"), [5, 6, 7]
    pair, sae = {"clean": ids, "corrupt": [5, 8, 7], "answer": 5, "foil": 9}, SAES["standard"]
    given = {
        "attention_edges": {"prompt": ids}, "attention_rollout": {"prompt": ids}, "attribution_patching": pair,
        "edge_attribution": pair, "edge_sweep": {"prompt": ids, "answer": 5, "foil": 9}, "head_scores": {},
        "evaluate_sae": {"sae": sae, "prompts": [ids]}, "feature_attribution": {"sae": sae, "prompt": ids, "answer": 5, "foil": 9},
        "fit_probe": {"prompts": [[i, i + 1] for i in range(20)], "labels": [0, 1] * 10},
        "top_contexts": {"sae": sae, "documents": [ids, ids], "folder": tmp_path / "harvest"},
    }  # fmt: skip
    result = getattr(pc.studies, study)(lm, **given[study])
    assert result.config.keys() <= {"study", *given[study]}


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


def features_in(table) -> list[tuple[int, ...]]:
    """The rows of a table of features, without the values."""
    return list(zip(*list(table.to_pydict().values())[:4], strict=True))


def expected_features(lm, sae, documents, kept: int, longest: int = 512) -> list[tuple]:
    """The largest features of every token, by NumPy, of captured rows."""
    expected = []
    for number, ids in enumerate(documents):
        for begin in range(0, len(ids), longest):
            run = lm.run(ids[begin : begin + longest], max_tokens=1, capture=[pc.Capture(f"resid_post[{LAYER}]")])
            for t, row in enumerate(sae.encode(run[f"resid_post[{LAYER}]"])):
                best = [i for i in np.argsort(-row)[:kept] if row[i] > 0]
                expected += [(number, begin + t, ids[begin + t], i, row[i]) for i in best]
    return expected


def test_a_harvest_of_features_and_rows(lm, tmp_path):
    """The features of every kept row, and of no other; of the same rows as in the index of their shard."""
    sae, site = SAES["standard"], f"resid_post[{LAYER}]"
    ids = [lm.tokens(each) for each in PROMPTS]
    lm.attach(sae, at=site, name="s")
    lm.attach(SAES["topk"], at=site, name="t")
    asked = {"dtype": "float32", "shard_rows": 9, "parts": 2, "batch_tokens": 16,
             "filters": pc.studies.Filters(positions=((1, None),), not_tokens=ids[1][3:5])}  # fmt: skip
    both = [site, pc.Features("s", top=8), pc.Features("t", ids=[53, 4, 68])]
    try:
        data = pc.studies.harvest(lm, ids, tmp_path, sites=both, **asked).open()
        alone = pc.studies.harvest(lm, ids, tmp_path, sites=pc.Features("s", top=8), **asked).open()
        rows = np.concatenate(list(data.blocks(site)))
        cap = float(np.median(np.linalg.norm(rows, axis=1)))
        asked["filters"] = pc.studies.Filters(norm_cap=cap)
        capped = pc.studies.harvest(lm, ids, tmp_path, sites=both, **asked).open()
    finally:
        lm.detach("s")
        lm.detach("t")
    kept = [(number, position) for number, each in enumerate(ids) for position, token in enumerate(each)
            if position > 0 and token not in ids[1][3:5]]  # fmt: skip
    assert len(data) == len(alone) == len(kept) < sum(map(len, ids)) - len(ids) - 1
    assert len(data.shards) == len(alone.shards) > 3
    assert (data.sites, alone.sites) == ([site], [])
    expected = [each for each in expected_features(lm, sae, ids, 8) if each[:2] in kept]
    for table in (data.features("s"), alone.features()):
        assert [str(field.type) for field in table.schema] == ["int64", "int32", "int32", "int32", "float"]
        assert features_in(table) == [each[:4] for each in expected]
        assert np.allclose(table["value"], [each[4] for each in expected], atol=1e-4)
    for each in (data, capped):
        for shard in each.shards:
            index, rows = each.index(shard).to_pydict(), each.array(site, shard)
            values = SAES["topk"].encode(rows)[:, [53, 4, 68]]
            row, which = np.nonzero(values)
            here = {(index["document"][r], index["position"][r], index["token"][r], [53, 4, 68][i]): values[r, i]
                    for r, i in zip(row, which, strict=True)}  # fmt: skip
            table = each.features("t", shard=shard)
            assert sorted(features_in(table)) == sorted(here)
            assert np.allclose(table["value"], [here[key] for key in features_in(table)], atol=1e-4)
    assert 0 < len(capped) < sum(map(len, ids))
    assert set(data.features("t", ids=[68])["feature"].to_pylist()) == {68}
    assert len(data.features("t")) > len(data.features("t", ids=[68])) > 0


def test_a_stopped_harvest_of_features_is_resumed(lm, tmp_path, monkeypatch):
    ids, asked = [lm.tokens(each) for each in PROMPTS * 2], {"batch_tokens": 1, "shard_rows": 20}
    lm.attach(SAES["standard"], at=f"resid_post[{LAYER}]", name="s")
    read, left = lm.lens, [2]

    def lens(runs):
        if not left[0]:
            raise RuntimeError("stopped")
        left[0] -= 1
        return read(runs)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(lm, "lens", lens)
            with pytest.raises(RuntimeError, match="stopped"):
                pc.studies.harvest(lm, ids, tmp_path / "one", sites=[pc.Features("s", top=5)], **asked)
        assert not list(tmp_path.glob("one/*/shard-*"))
        again, whole = (
            pc.studies.harvest(lm, ids, tmp_path / name, sites=[pc.Features("s", top=5)], **asked)
            for name in ("one", "other")
        )
    finally:
        lm.detach("s")
    assert (again.ran, whole.ran) == (sum(map(len, ids[2:])), sum(map(len, ids)))
    assert not list(tmp_path.glob("one/*/*.open"))
    one, other = again.open().features(), whole.open().features()
    assert features_in(one) == features_in(other)
    assert np.allclose(one["value"], other["value"], atol=1e-4)


def test_what_no_harvest_of_features_is_made_of(lm, tmp_path):
    ids = [lm.tokens(PROMPTS[0])]
    lm.attach(SAES["standard"], at=f"resid_post[{LAYER}]", name="s")
    features = pc.Features("s", top=4)
    capped = pc.studies.Filters(norm_cap=1.0)
    try:
        for sites, asked, path in (
            ([pc.Features("none")], {}, "sites[0].name"), ([features, features], {}, "sites[1].name"),
            ([pc.Features("s", pc.prompt[1:])], {}, "sites[0].tokens"), ([pc.Features("s", top=F + 1)], {}, "sites[0]"),
            ([pc.Features("s", ids=[F])], {}, "sites[0]"), ([features], {"sums": True}, "sums"),
            ([features], {"filters": capped}, "sites"), ([features], {"project": np.ones((1, D))}, "sites"),
        ):  # fmt: skip
            with pytest.raises(pc.PatchclampError) as caught:
                pc.studies.harvest(lm, ids, tmp_path, sites=sites, **asked)
            assert caught.value.path == path
        assert not list(tmp_path.iterdir())
        data = pc.studies.harvest(lm, ids, tmp_path, sites=[pc.Features("s", ids=[2, 5])]).open()
    finally:
        lm.detach("s")
    for wrong, path in (
        ({"features": [3]}, "features"), ({"kept": 4}, "kept"), ({"documents": ids}, "documents"),
        ({"sae": SAES["topk"]}, "sae"), ({"sae": "other"}, "name"),
    ):  # fmt: skip
        with pytest.raises(pc.PatchclampError) as caught:
            pc.studies.top_contexts(lm, **{"sae": "s", "harvest": data, **wrong})
        assert caught.value.path == path
    with pytest.raises(pc.ProgramError, match="documents: "):
        pc.studies.top_contexts(lm, sae=SAES["topk"], documents=ids)


def test_top_contexts(lm, tmp_path, monkeypatch):
    """A feature's contexts are where it is largest, from documents or from a harvest; nothing is run again."""
    sae, kept = SAES["standard"], 8
    documents = [*PROMPTS, " ".join(PROMPTS), [5], ""]
    asked = {"sae": sae, "documents": documents, "folder": tmp_path, "kept": kept, "context": 12, "window": 3,
             "at": f"resid_post[{LAYER}]"}  # fmt: skip
    whole = pc.studies.top_contexts(lm, **asked)
    ids = [lm.tokens(each) if isinstance(each, str) else each for each in documents]
    expected = expected_features(lm, sae, ids, kept, longest=12)
    table = whole.table()
    assert table.column_names == ["document", "position", "token_id", "feature", "value"]
    assert features_in(table) == [each[:4] for each in expected]
    assert np.allclose(table["value"], [each[4] for each in expected], atol=1e-4)

    counts = table["feature"].to_pylist()
    feature = max(counts, key=counts.count)
    monkeypatch.setattr(lm, "arun", None)  # nothing is run again
    found = pc.studies.top_contexts(lm, **asked, features=[feature, 95])
    for given in (sae, whole.name):
        again = pc.studies.top_contexts(lm, sae=given, harvest=whole.folder, window=3, features=[feature, 95])
        assert again.contexts == found.contexts
        assert (again.density == found.density).all()

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
    with pytest.raises(pc.ProgramError, match="features: "):
        pc.studies.top_contexts(lm, **asked, features=[F])
