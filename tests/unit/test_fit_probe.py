"""Fits of linear probes: equal to scikit-learn's, measured without leakage, and the same scores online as offline."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import FitProbe, FitProbeResult, Harvested, fit_probe, harvest
from patchclamp.studies.linear_fit import auroc, fit_logistic, fit_mean_difference, fit_rows, sigmoid, split_folds

draw = np.random.default_rng(0)
PROMPTS = [draw.integers(2, 40, size=int(draw.integers(3, 9))).tolist() for _ in range(60)]
LABELS = [int(np.mean(prompt) > 21) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def lm():
    with pc.LM("fake") as lm:
        yield lm


@pytest.fixture(scope="module")
def result(lm) -> FitProbeResult:
    return fit_probe(lm, prompts=PROMPTS, labels=LABELS)


@pytest.fixture(scope="module")
def data(lm, tmp_path_factory) -> Harvested:
    """The same prompts on disk, with their labels as a column."""
    folder = tmp_path_factory.mktemp("harvest")
    lines = [pc.studies.study.json_of({"text": prompt, "label": LABELS[i], "name": "ab"[LABELS[i]]})
             for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    (folder / "documents.jsonl").write_text("\n".join(lines))
    made = harvest(lm, folder / "documents.jsonl", folder, sites=[pc.resid_post], keep=["label", "name"],
                   dtype="float32", parts=2, shard_rows=64)  # fmt: skip
    return made.open()


def rows_of(lm: pc.LM, layer: int, pool: str | None = "mean") -> list[np.ndarray]:
    runs = lm.run(PROMPTS, max_tokens=1, capture=[pc.resid_post[layer]])
    rows = [np.asarray(run[pc.resid_post[layer]], np.float64) for run in runs]
    return [{"mean": each.mean(0, keepdims=True), "last": each[-1:], None: each}[pool] for each in rows]


# -- fits


def classes(n: int, d: int, seed: int = 0, apart: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Correlated rows [n, d] of different scales, and their classes [n]."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) * np.geomspace(0.01, 100, d) + 7
    positive = rng.random(n) < sigmoid(apart * (rows - 7) @ (rng.standard_normal(d) / np.geomspace(0.01, 100, d)))
    return rows, positive


@pytest.mark.parametrize(("n", "d"), [(200, 5), (60, 59), (40, 120), (3, 50)])
@pytest.mark.parametrize("l2", [1e-2, 1.0, 50.0])
def test_a_logistic_fit_equals_scikit_learns(n, d, l2):
    linear, pipeline = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("sklearn.pipeline")
    from sklearn.preprocessing import StandardScaler

    rows, positive = classes(n, d)
    positive[:2] = (False, True)
    rows[:, 1] = 3.25  # a constant column
    model = pipeline.make_pipeline(
        StandardScaler(), linear.LogisticRegression(C=1 / l2, solver="newton-cholesky", tol=1e-12)
    ).fit(rows, positive)
    weight, bias = fit_rows("logistic", rows, positive, l2)
    fresh = np.concatenate([rows, classes(50, d, 1)[0]])
    np.testing.assert_allclose(sigmoid(fresh @ weight + bias), model.predict_proba(fresh)[:, 1], atol=1e-7)
    scale = model[0].scale_
    np.testing.assert_allclose(weight * scale, model[1].coef_[0], atol=1e-7 + 1e-6 * np.abs(model[1].coef_).max())


def test_a_logistic_fit_has_a_zero_gradient_and_no_penalty_on_the_bias():
    rows, positive = classes(80, 6)
    rows = rows / rows.std(0)
    weight, bias = fit_logistic(rows, positive, 2.0)
    wrong = sigmoid(rows @ weight + bias) - positive
    np.testing.assert_allclose(rows.T @ wrong + 2.0 * weight, 0, atol=1e-8)
    assert abs(wrong.sum()) < 1e-8


@pytest.mark.parametrize(("n", "d"), [(40, 3), (40, 100)])
@pytest.mark.parametrize("l2", [1e-6, 1.0])
def test_separable_classes_converge(n, d, l2):
    rows, positive = classes(n, d)
    rows[:, 0] += np.where(positive, 1e3, -1e3)
    weight, bias = fit_rows("logistic", rows, positive, l2)
    assert np.isfinite(weight).all()
    assert ((rows @ weight + bias > 0) == positive).all()


def test_the_difference_of_means_has_its_threshold_at_the_midpoint():
    rows, positive = classes(300, 8)
    weight, bias = fit_mean_difference(rows, positive)
    first, second = rows[positive].mean(0), rows[~positive].mean(0)
    assert weight / np.linalg.norm(weight) == pytest.approx((first - second) / np.linalg.norm(first - second))
    assert (first + second) @ weight / 2 + bias == pytest.approx(0, abs=1e-9)
    products = rows @ weight
    within = (products[positive].var() * positive.sum() + products[~positive].var() * (~positive).sum()) / len(rows)
    assert (first - second) @ weight == pytest.approx(within)  # log-odds of two normals of this variance
    with pytest.raises(pc.ProgramError):
        fit_mean_difference(np.ones((4, 3)), np.array([True, False, True, False]))
    weight, bias = fit_mean_difference(np.eye(2), np.array([True, False]))  # no variance within
    assert np.isfinite([*weight, bias]).all()


def test_auroc_equals_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for digits in (0, 1, 8):  # with many ties, with some, with none
        scores, positive = rng.standard_normal(200).round(digits), rng.random(200) < 0.3
        assert auroc(scores, positive) == pytest.approx(metrics.roc_auc_score(positive, scores), abs=1e-12)


def test_folds_are_stratified_and_keep_documents_whole():
    rng = np.random.default_rng(0)
    documents = rng.permutation(np.repeat(np.arange(50) * 7, 4))  # several rows each, mixed
    positive = documents % 2 == 0
    folds = split_folds(documents, positive, 5, 0)
    for document in np.unique(documents):
        assert len(set(folds[documents == document])) == 1
    shares = [positive[folds == k].mean() for k in range(5)]
    assert shares == pytest.approx([0.5] * 5)
    assert (split_folds(documents, positive, 5, 0) == folds).all()
    assert (split_folds(documents, positive, 5, 1) != folds).any()
    mixed = rng.random(200) < 0.3  # labels of rows
    assert all(len(set(split_folds(documents, mixed, 5, 0)[documents == one])) == 1 for one in documents)
    with pytest.raises(pc.ProgramError) as raised:
        split_folds(np.arange(10), np.arange(10) < 3, 4, 0)
    assert raised.value.path == "folds"


# -- the study


@pytest.mark.parametrize("pool", ["mean", "last", None])
@pytest.mark.parametrize("method", ["logistic", "mean_difference"])
def test_every_row_is_scored_by_a_fit_without_its_document(lm, method, pool):
    metrics = pytest.importorskip("sklearn.metrics")
    result = fit_probe(lm, prompts=PROMPTS, labels=LABELS, method=method, pool=pool, folds=3, l2=0.5, layers=[0, 2])
    for at, layer in enumerate((0, 2)):
        each = rows_of(lm, layer, pool)
        rows, document = np.concatenate(each), np.repeat(np.arange(len(each)), [len(of) for of in each])
        positive = np.array(LABELS)[document] == 1
        assert (result.document == document).all()
        assert (result.positive == positive).all()
        for k in range(3):
            test = result.fold == k
            assert not set(document[test]) & set(document[~test])
            weight, bias = fit_rows(method, rows[~test], positive[~test], 0.5)
            np.testing.assert_allclose(result.log_odds[at, test], rows[test] @ weight + bias, atol=1e-3)
            expected = metrics.roc_auc_score(positive[test], result.log_odds[at, test])
            assert result.fold_auroc[at, k] == pytest.approx(expected)
        weight, bias = fit_rows(method, rows, positive, 0.5)
        np.testing.assert_allclose(result.weight[at], weight, atol=1e-3 * np.abs(weight).max())
    scores = result.scores
    assert result.log_loss == pytest.approx([metrics.log_loss(result.positive, of) for of in scores])
    assert result.accuracy == pytest.approx([metrics.accuracy_score(result.positive, of > 0.5) for of in scores])
    assert result.auroc == pytest.approx(result.fold_auroc.mean(1))
    assert result.auroc[result.layers.index(result.best)] == result.auroc.max()


def test_random_labels_of_documents_are_not_learnt(lm):
    """Rows of a document resemble each other: with a document on both sides, AUROC would be far above chance."""
    rng = np.random.default_rng(3)
    prompts = [[token] * 12 for token in rng.permutation(np.arange(2, 38)).tolist()]
    labels = rng.permutation([0, 1] * 18).tolist()
    result = fit_probe(lm, prompts=prompts, labels=labels, pool=None, layers=0, l2=1e-3, site="resid_pre")
    assert result.auroc[0] < 0.65
    shuffled = split_folds(np.arange(len(result.document)), result.positive, 5, 0)  # rows as documents
    rows = np.concatenate([run[pc.resid_pre[0]] for run in lm.run(prompts, max_tokens=1, capture=[pc.resid_pre[0]])])
    rows, test = np.asarray(rows, np.float64), shuffled == 0
    weight, bias = fit_rows("logistic", rows[~test], result.positive[~test], 1e-3)
    assert auroc(rows[test] @ weight + bias, result.positive[test]) > 0.75


def test_identical_prompts_are_one_document(lm):
    result = fit_probe(lm, prompts=[*PROMPTS, *PROMPTS[:20]], labels=[*LABELS, *LABELS[:20]], layers=1)
    assert (result.document[60:] == np.arange(20)).all()
    assert (result.fold[60:] == result.fold[:20]).all()


@pytest.mark.parametrize("pool", ["mean", "last", None])
def test_the_probe_online_equals_the_fit_offline(lm, pool):
    result = fit_probe(lm, prompts=PROMPTS, labels=LABELS, pool=pool, tokens="prompt[1:]")
    prompts = [[5, 9, 30, 31], [3, 2, 17], PROMPTS[0]]  # two of them are fresh
    capture = [result.probe(), result.probe(0, name="first"), pc.Capture(pc.resid_post, "prompt[1:]")]
    for run in lm.run(prompts, max_tokens=4, capture=capture):
        for name, layer in (("probe", result.best), ("first", 0)):
            rows = np.asarray(run[pc.resid_post[layer]], np.float64)
            pooled = {"mean": rows.mean(0), "last": rows[-1], None: rows}[pool]
            np.testing.assert_allclose(np.asarray(run.probes[name])[..., 0], result.score(pooled, layer), atol=1e-5)
    probe = result.probe(name="all", tokens=pc.every, pool="max")
    assert (str(probe.at), str(probe.tokens), probe.pool) == (f"resid_post[{result.best}]", "every", "max")


def test_a_probe_of_heads_reads_their_row(lm):
    result = fit_probe(lm, prompts=PROMPTS, labels=LABELS, site="z", layers=1)
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[result.probe(), pc.Capture(pc.z[1], pc.prompt, pool="mean")])
    rows = np.asarray(run[pc.z[1]]).reshape(-1)
    assert float(run.probes["probe"][0]) == pytest.approx(float(result.score(rows)), abs=1e-5)


def test_thresholds_hold_their_rate_of_false_positives(result):
    for layer in result.layers:
        at = result.layers.index(layer)
        negative, positive = result.scores[at][~result.positive], result.scores[at][result.positive]
        for rate in (0.0, 0.01, 0.1, 0.5, 0.99):
            threshold = result.threshold(rate, layer)
            assert (negative > threshold).mean() <= rate
            assert (negative >= threshold).mean() > rate  # no lower one holds it
            assert result.recall(rate, layer) == (positive > threshold).mean()
    assert result.threshold() == result.threshold(0.01, result.best)
    scores, share, counts = result.calibration(1, bins=4)
    edges = [result.scores[1] // 0.25 == k for k in range(4)]
    edges = [of for of in edges if of.any()]
    assert counts.tolist() == [int(of.sum()) for of in edges]
    assert scores == pytest.approx([result.scores[1][of].mean() for of in edges])
    assert share == pytest.approx([result.positive[of].mean() for of in edges])


def test_a_result_is_the_same_for_a_seed_and_loads_as_saved(lm, result, tmp_path):
    again = fit_probe(lm, prompts=PROMPTS, labels=LABELS)
    assert again.to_bytes() == result.to_bytes()
    assert (fit_probe(lm, prompts=PROMPTS, labels=LABELS, seed=1).fold != result.fold).any()
    loaded = pc.studies.load(result.save(tmp_path / "probe"))
    assert loaded.to_bytes() == result.to_bytes()
    assert loaded.probe() == result.probe()
    assert result.config == {"study": "FitProbe", "prompts": PROMPTS, "labels": LABELS}
    frame = result.to_frame()
    assert frame["auroc"].to_numpy() == pytest.approx(result.auroc)
    assert f"resid_post[{result.best}]: AUROC" in repr(result)
    result.probe(0).save(tmp_path / "probe.safetensors")
    read = pc.Probe.load(tmp_path / "probe.safetensors", at=pc.resid_post[0])
    assert (read.weight, read.bias, read.activation) == (result.probe(0).weight, result.probe(0).bias, "sigmoid")


def test_a_run_is_resumed_for_another_method(lm, result, tmp_path, monkeypatch):
    fit_probe(lm, prompts=PROMPTS, labels=LABELS, resume=tmp_path / "journal", method="mean_difference")
    monkeypatch.setattr(type(lm), "arun", None)  # nothing is run again
    again = fit_probe(lm, prompts=PROMPTS, labels=LABELS, resume=tmp_path / "journal")
    assert again.to_bytes() == result.to_bytes()


def test_labels_may_be_texts_booleans_and_mixed_numbers(lm, result):
    texts = ["no" if label else "yes" for label in LABELS]
    named = fit_probe(lm, prompts=PROMPTS, labels=texts, positive_label="no")
    assert (named.classes, named.positive.tolist()) == (("yes", "no"), result.positive.tolist())
    assert fit_probe(lm, prompts=PROMPTS, labels=texts).classes == ("no", "yes")
    for labels in (
        np.array(LABELS) == 1,
        np.array(LABELS, np.float32),
        [bool(x) if i % 2 else x for i, x in enumerate(LABELS)],
    ):
        assert (fit_probe(lm, prompts=PROMPTS, labels=labels).log_odds == result.log_odds).all()


def test_the_picture_has_layers_calibration_and_roc(result, tmp_path):
    picture = result.picture(0)
    assert [chart.title for chart in picture.charts] == [
        "AUROC",
        "Log loss",
        "Calibration at layer 0",
        "ROC at layer 0",
    ]
    assert picture.numbers == [0, 1, 2]
    roc = picture.charts[3].lines[0]
    assert (np.diff(roc.y) >= 0).all()
    assert roc.y[1] == result.recall(0.01, 0)
    assert result.plot(tmp_path / "probe.png", 0).stat().st_size > 10_000
    assert len([trace for trace in result.figure().data if trace.mode == "lines+markers"]) == 6
    assert "false positive rate" in result.to_html(tmp_path / "probe.html").read_text()


# -- harvests


@pytest.mark.parametrize("pool", ["mean", "last", None])
def test_a_harvest_gives_the_same_fit_without_a_model(lm, data, pool):
    live = fit_probe(lm, prompts=PROMPTS, labels=LABELS, pool=pool)
    for given, labels in (
        (data, "label"),
        (str(data.folder), "name"),
        (Harvested(data.folder, interleave=False), LABELS),
    ):
        made = fit_probe(None, harvest=given, labels=labels, pool=pool)
        order = np.argsort(made.document, kind="stable")
        assert (made.document[order] == live.document).all()
        assert (made.positive[order] == live.positive).all()
        assert (made.fold[order] == live.fold).all()
        np.testing.assert_allclose(made.weight, live.weight, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.sort(made.log_odds), np.sort(live.log_odds), atol=1e-3)
        assert (made.tokens, made.provenance.model) == ("prompt", "fake")
    one = fit_probe(lm, harvest=data, labels="label", pool=pool, layers=[1])
    np.testing.assert_allclose(one.weight, made.weight[1:2], rtol=1e-9)


def test_labels_may_be_those_of_rows(data):
    tokens = data.index()["token"].to_numpy()
    result = fit_probe(None, harvest=data, labels=tokens > 21, pool=None, layers=0)
    assert (result.positive == (tokens > 21)).all()
    assert result.auroc[0] > 0.8


@pytest.mark.parametrize(("filters", "tokens"), [
    ({"positions": ((1, None),)}, "prompt[1:]"), ({"not_tokens": (9,)}, ""),
])  # fmt: skip
def test_a_probe_reads_the_tokens_that_a_harvest_kept(lm, tmp_path, filters, tokens):
    made = harvest(lm, PROMPTS, tmp_path, sites=[pc.resid_post[1]], filters=pc.studies.Filters(**filters))
    result = fit_probe(None, harvest=made, labels=LABELS)
    assert result.tokens == tokens
    if tokens:
        assert str(result.probe().tokens) == tokens
    else:
        with pytest.raises(pc.ProgramError) as raised:
            result.probe()
        assert raised.value.path == "tokens"
        assert str(result.probe(pool=None).tokens) == "prompt"
        assert str(result.probe(tokens=pc.prompt[1:]).tokens) == "prompt[1:]"


@pytest.mark.parametrize(("changed", "path"), [
    ({"labels": "lable"}, "labels"),
    ({"labels": LABELS[:-1]}, "labels"),
    ({"labels": "token"}, "labels"),
    ({"layers": 5}, "layers"),
    ({"site": "mlp_out"}, "site"),
    ({"site": "resid_post[1]"}, "site"),
    ({"tokens": "prompt"}, "tokens"),
    ({"chat": True}, "chat"),
    ({"prompts": PROMPTS}, "prompts"),
    ({"harvest": "nowhere"}, "harvest"),
    ({"harvest": None}, "lm"),
])  # fmt: skip
def test_a_harvest_that_does_not_fit_is_refused_with_its_path(data, changed, path):
    with pytest.raises(pc.PatchclampError) as raised:
        fit_probe(None, **({"harvest": data, "labels": "label"} | changed))
    assert raised.value.path == path


def test_harvests_of_other_rows_are_refused(lm, data, tmp_path):
    def refused(path: str = "harvest", **changed) -> None:
        with pytest.raises(pc.PatchclampError) as raised:
            fit_probe(**({"lm": None, "labels": LABELS} | changed))
        assert raised.value.path == path

    made = {"lm": lm, "documents": PROMPTS, "sites": [pc.resid_post[1]]}
    refused(harvest=harvest(**made, folder=tmp_path / "a", sums=True))
    refused(harvest=harvest(**made, folder=tmp_path / "b", project=np.eye(16)[:2]))
    refused("resume", harvest=data, resume=tmp_path / "journal")
    one = harvest(**made, folder=tmp_path / "c", filters=pc.studies.Filters(positions=((-1, None),)))
    refused("labels", harvest=one, pool=None)  # of 60 documents or of 60 rows
    assert fit_probe(None, harvest=one, labels=LABELS, pool="last").document.tolist() == list(range(60))
    part = harvest(**made, folder=tmp_path / "d", parts=2, shard=(0, 2)).open()
    refused(harvest=part)
    manifest = part.folder / "harvest.json"
    manifest.write_text(manifest.read_text().replace('"fake"', '"other"'))
    refused(lm=lm, harvest=part.folder)  # of another model


# -- what is refused


@pytest.mark.parametrize(("changed", "path"), [
    ({"labels": [1] * 60}, "labels"),
    ({"labels": list(range(60))}, "labels"),
    ({"labels": LABELS[:-1]}, "labels"),
    ({"labels": "label"}, "labels"),
    ({"labels": [None, *LABELS[1:]]}, "labels[0]"),
    ({"labels": [*LABELS[:-1], float("nan")]}, "labels[59]"),
    ({"labels": [[1], *LABELS[1:]]}, "labels[0]"),
    ({"positive_label": "yes"}, "positive_label"),
    ({"prompts": None}, "prompts"),
    ({"prompts": []}, "prompts"),
    ({"method": "svm"}, "method"),
    ({"pool": "max"}, "pool"),
    ({"pool": "sum"}, "pool"),
    ({"l2": 0.0}, "l2"),
    ({"l2": -1}, "l2"),
    ({"folds": 1}, "folds"),
    ({"folds": 40}, "folds"),
    ({"site": "resid_post[1]"}, "site"),
    ({"site": "resid_pots"}, "site"),
    ({"site": "embed"}, "layers"),
    ({"layers": 3}, "layers"),
    ({"tokens": "generated", "pool": None}, "prompts[0]"),
])  # fmt: skip
def test_a_wrong_argument_is_refused_with_its_path(lm, changed, path):
    with pytest.raises(pc.PatchclampError) as raised:
        fit_probe(lm, **({"prompts": PROMPTS, "labels": LABELS} | changed))
    assert raised.value.path == path


def test_rows_that_are_not_finite_are_refused_with_their_prompt(lm, monkeypatch):
    fetch = lm.fetch

    def broken(runs, sites):
        fetched = fetch(runs, sites)
        for run, tensors in zip(runs, fetched, strict=True):
            if list(run.prompt_token_ids) == PROMPTS[7]:
                tensors[sites[1]] = np.full_like(tensors[sites[1]], np.nan)
        return fetched

    monkeypatch.setattr(lm, "fetch", broken)
    with pytest.raises(pc.ProgramError, match="layer 1") as raised:
        fit_probe(lm, prompts=PROMPTS, labels=LABELS)
    assert raised.value.path == "prompts[7]"


@pytest.mark.parametrize(("call", "path"), [
    (lambda result: result.threshold(1.0), "false_positive_rate"),
    (lambda result: result.threshold("0.1"), "false_positive_rate"),
    (lambda result: result.threshold(0.1, layer=9), "layer"),
    (lambda result: result.probe("best"), "layer"),
    (lambda result: result.calibration(bins=0), "bins"),
    (lambda result: result.score(np.ones(3)), "rows"),
    (lambda result: result.picture(9), "layer"),
])  # fmt: skip
def test_a_wrong_question_to_a_result_is_refused(result, call, path):
    with pytest.raises(pc.PatchclampError) as raised:
        call(result)
    assert raised.value.path == path


def test_the_configuration_is_equal_for_equal_fields(data):
    assert FitProbe(harvest=data, labels="label") == FitProbe(harvest=str(data.folder), labels="label")
    assert FitProbe(harvest=data, labels="label", pool="none").pool is None
