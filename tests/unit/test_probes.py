"""Probes and pooled captures on the fake engine: equal to arithmetic on captured rows, in every form and order."""

import importlib
import itertools
import weakref

import numpy as np
import pytest
from safetensors.numpy import load

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.plan.bound import stored_op
from patchclamp.serve.capture_files import captured_file

PROMPT = [1, 2, 3, 7, 5, 7, 8]
D = 16
ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softmax": lambda x: (
        np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
}
POOLS = {None: lambda x: x, "mean": lambda x: x.mean(0), "max": lambda x: x.max(0), "last": lambda x: x[-1]}


@pytest.fixture(scope="module")
def lm():
    with pc.LM("fake", engine="fake") as lm:
        yield lm


def matrix(rng: np.random.Generator, k: int) -> np.ndarray:
    return (rng.standard_normal((k, D)) / D**0.5).astype(np.float32)


@pytest.mark.parametrize(("activation", "pool"), itertools.product(ACTIVATIONS, POOLS))
def test_a_probe_equals_its_formula_on_captured_rows(lm, activation, pool):
    rng = np.random.default_rng([len(str(activation)), len(str(pool))])
    for k, tokens in ((1, pc.every), (3, pc.prompt[1:4]), (D, pc.generated), (2, pc.token(7))):
        weight, bias = matrix(rng, k), rng.standard_normal(k).astype(np.float32)
        probe = pc.Probe(
            weight, at=pc.resid_post[1], tokens=tokens, bias=bias, activation=activation, pool=pool, name="p"
        )
        run = lm.run(PROMPT, max_tokens=4, capture=[probe, pc.resid_post[1] @ tokens])
        products = np.asarray(run[pc.resid_post[1]]).astype(np.float64) @ weight.T.astype(np.float64) + bias
        expected = ACTIVATIONS[activation](POOLS[pool](products))
        assert run.probes["p"].shape == expected.shape
        assert np.asarray(run.probes["p"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert run.probe_positions("p") == run.positions(pc.resid_post[1])[-1 if pool == "last" else 0 :]


def test_reading_probes_does_not_keep_a_run(lm):
    probe, lens = pc.Probe(np.ones(D), at=pc.resid_post[0], name="p"), pc.Lens(pc.resid_post[1], top=2)
    run = lm.run(PROMPT, max_tokens=1, capture=[probe, lens])
    key, *_ = run.key, run.probes["p"], run.lens[pc.resid_post[1]]
    gone = weakref.ref(run)
    del run
    assert gone() is None, "it is freed without the garbage collector"
    with pytest.raises(pc.MissingSource):
        lm.engine.fetch(key, 0)


def test_several_probes_and_a_capture_share_a_site(lm):
    rng = np.random.default_rng(1)
    weights = {f"p{k}": matrix(rng, k) for k in range(1, 6)}
    probes = [pc.Probe(weight, at=pc.resid_mid[0], name=name) for name, weight in weights.items()]
    run = lm.run(PROMPT, capture=[*probes[:3], pc.resid_mid[0], *probes[3:]], max_tokens=3)
    rows = run[pc.resid_mid[0]]
    assert list(run.probes) == list(weights)
    assert rows.shape == (len(PROMPT) + 2, D)
    for name, weight in weights.items():
        assert run.probes[name] == pytest.approx(rows @ weight.T, rel=1e-5, abs=1e-5)
    assert "probe 'p3'" in repr(run)
    assert run.sites == ["resid_mid[0]"]


def test_a_probe_of_several_layers_has_an_axis_of_layers(lm):
    weight = matrix(np.random.default_rng(2), 2)
    probes = [
        pc.Probe(weight, at=pc.resid_post, name="all"),
        pc.Probe(weight, at=pc.resid_post[[0, 2]], pool="max", name="two"),
    ]
    run = lm.run(PROMPT, capture=[*probes, pc.resid_post], max_tokens=1)
    products = run[pc.resid_post] @ weight.T
    assert run.probes["all"] == pytest.approx(products, rel=1e-5, abs=1e-5)
    assert run.probes["two"] == pytest.approx(products[[0, 2]].max(1), rel=1e-5, abs=1e-5)


def test_a_probe_reads_edited_rows_in_program_order(lm):
    weight = matrix(np.random.default_rng(3), 1)
    probe = pc.Probe(weight, at=pc.resid_post[1], name="before")
    edits = [probe, pc.Scale(3.0, at=pc.resid_post[1]), pc.Capture(pc.resid_post[1])]
    run = lm.run(PROMPT, edits=edits, capture=pc.Probe(weight, at=pc.resid_post[1], name="after"), max_tokens=1)
    assert run.probes["after"] == pytest.approx(3 * run.probes["before"], rel=1e-5)
    assert run.probes["after"] == pytest.approx(run[pc.resid_post[1]] @ weight.T, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool])
def test_a_pooled_capture_has_one_row(lm, pool):
    sites = [pc.resid_post, pc.z[1]]
    whole = lm.run(PROMPT, capture=sites, max_tokens=4)
    run = lm.run(PROMPT, capture=[pc.Capture(site, pool=pool) for site in sites], max_tokens=4)
    for site in (pc.resid_post[1], pc.z[1], pc.z[1, 0]):
        assert run[site] == pytest.approx(POOLS[pool](whole[site]), rel=1e-5, abs=1e-6)
        assert run.positions(site) == whole.positions(site)[-1 if pool == "last" else 0 :]
    assert run[pc.resid_post] == pytest.approx(np.stack([POOLS[pool](rows) for rows in whole[pc.resid_post]]), rel=1e-5)
    projected = lm.run(PROMPT, capture=pc.Capture(pc.resid_post[0], project=np.eye(D)[:2], pool=pool), max_tokens=4)
    assert projected[pc.resid_post[0]] == pytest.approx(run[pc.resid_post[0]][:2], rel=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_of_a_prompt_the_last_token_alone_is_captured_for_the_last(lm, max_tokens):
    """So that a cached prefix is read; where a generated token may be the last, it is captured too."""
    selections = [(pc.every, [6], True), (pc.prompt, [6], False), (pc.prompt[1:4], [3], False),
                  (pc.prompt[0] | pc.generated, [0], True), (pc.generated, [], True)]  # fmt: skip
    for tokens, read, with_generated in selections:
        read = [*read, *(range(7, 6 + max_tokens) if with_generated else ())]
        capture = [pc.Capture(pc.resid_post[1], tokens, pool="last"),
                   pc.Probe(W, at=pc.resid_post[0], tokens=tokens, pool="last", name="p")]  # fmt: skip
        whole = lm.run(PROMPT, max_tokens=max_tokens, capture=pc.resid_post[:2] @ tokens)
        run = lm.run(PROMPT, max_tokens=max_tokens, capture=capture)
        for number, op in enumerate(run._bound.ops):
            assert lm.engine.fetch(run.key, op.points[0], stored_op(op, number))[0].tolist() == read
        if not read:
            continue
        assert run.positions(pc.resid_post[1]) == run.probe_positions("p") == read[-1:]
        assert np.array_equal(run[pc.resid_post[1]], whole[pc.resid_post[1]][-1])
        assert np.asarray(run.probes["p"]) == pytest.approx(np.asarray(whole[pc.resid_post[0]][-1]) @ W.T, rel=1e-5)
    conditional = lm.run(PROMPT, max_tokens=3, capture=pc.Capture(pc.resid_post[1], pc.token(7), pool="last"))
    tokens = [*PROMPT, *conditional.token_ids[:-1]]
    assert conditional.positions(pc.resid_post[1]) == [len(tokens) - 1 - tokens[::-1].index(7)]


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool])
def test_rows_are_pooled_in_fp32_wherever_that_happens(lm, pool):
    """Of the prompt in each step, else by the caller: runs of both kinds are one array, and in a server's files."""
    capture, site = pc.Capture(pc.resid_post[1], pool=pool, dtype="float16"), pc.resid_post[1]
    runs = [lm.run(PROMPT, capture=capture, max_tokens=count) for count in (1, 4)]
    rows = lm.rows(runs)["resid_post[1]"].values
    for run, row in zip(runs, rows, strict=True):
        whole = lm.run(PROMPT, capture=site, max_tokens=len(run.token_ids))[site]
        assert run[site].dtype == np.float32
        assert run[site] == pytest.approx(POOLS[pool](whole), rel=1e-5, abs=1e-6)
        assert row.tolist() == load(captured_file(run))["resid_post[1]"].tolist() == run[site].tolist()


def test_layers_that_pool_other_tokens_are_not_stacked(lm):
    """Though the last of them is the same."""
    captures = [pc.Capture(pc.resid_post[layer], pc.prompt[layer:], pool="mean") for layer in range(2)]
    run = lm.run(PROMPT, capture=captures, max_tokens=1)
    for read in (run.positions, run.read):
        with pytest.raises(pc.ProgramError, match="one layer at a time"):
            read(pc.resid_post[:2])
    assert [len(run.positions(pc.resid_post[layer])) for layer in range(2)] == [len(PROMPT), len(PROMPT) - 1]


def test_layers_that_are_pooled_in_different_ways_are_not_stacked(lm):
    captures = [pc.Capture(pc.resid_post[layer], pool=pool) for layer, pool in enumerate(("mean", "max"))]
    run = lm.run(PROMPT, capture=captures, max_tokens=1)
    [fetched] = lm.fetch([run])
    for read in (run.positions, run.read, fetched.__getitem__):
        with pytest.raises(pc.ProgramError, match="one layer at a time"):
            read(pc.resid_post[:2])
        read(pc.resid_post[0])
    assert all(np.array_equal(fetched[pc.resid_post[layer]], run[pc.resid_post[layer]]) for layer in range(2))
    assert {name: rows.values.shape for name, rows in lm.rows([run], pc.resid_post).items()} == {
        "resid_post[0]": (1, D), "resid_post[1]": (1, D)
    }  # fmt: skip


def test_a_pooled_capture_is_no_source(lm):
    run = lm.run(PROMPT, capture=pc.Capture(pc.resid_post[1], pool="mean"), max_tokens=1)
    with pytest.raises(pc.MissingSource, match="pooled"):
        lm.run(PROMPT, edits=pc.Replace(pc.From(run, pc.resid_post[1]), at=pc.resid_post[1]))


def test_an_empty_selection_cannot_be_pooled(lm):
    probes = [
        pc.Probe(np.ones(D), at=pc.resid_post[0], tokens=pc.generated, pool=pool, name=str(pool))
        for pool in (None, "mean")
    ]
    run = lm.run(PROMPT, capture=probes, max_tokens=1)
    assert run.probes["None"].shape == (0, 1)
    with pytest.raises(pc.TokensError, match="pool"):
        run.probes["mean"]


W = np.ones((2, D), np.float32)
INVALID = {
    "no name": (lambda: pc.Probe(W, at=pc.resid_post[0]), pc.ProgramError, "name"),
    "a name with a slash": (lambda: pc.Probe(W, at=pc.resid_post[0], name="a/b"), pc.ProgramError, "name"),
    "bias of another size": (lambda: pc.Probe(W, at=pc.resid_post[0], bias=[1.0], name="p"), pc.ShapeError, "bias"),
    "bias of two axes": (lambda: pc.Probe(W, at=pc.resid_post[0], bias=W, name="p"), pc.ShapeError, "bias"),
    "bias by name": (lambda: pc.Probe(W, at=pc.resid_post[0], bias="b", name="p"), pc.ProgramError, "bias"),
    "unknown activation": (lambda: pc.Probe(W, at=pc.resid_post[0], activation="tanh", name="p"), pc.UnknownName, "activation"),
    "unknown pool": (lambda: pc.Probe(W, at=pc.resid_post[0], pool="sum", name="p"), pc.UnknownName, "pool"),
    "NaN": (lambda: pc.Probe([[float("nan")] * D], at=pc.resid_post[0], name="p"), pc.ShapeError, "weight"),
    "capture with unknown pool": (lambda: pc.Capture(pc.resid_post[0], pool="sum"), pc.UnknownName, "pool"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_probe_is_refused_with_its_field(case):
    make, error, path = INVALID[case]
    with pytest.raises(error) as raised:
        make()
    assert raised.value.path == path


@pytest.mark.parametrize(
    ("capture", "path"),
    [
        ([pc.Probe(W, at=pc.resid_post[0], name="p")] * 2, "capture[1].name"),
        ([pc.Probe(np.ones((2, D + 1)), at=pc.resid_post[0], name="p")], "capture[0].weight"),
        ([pc.Probe(W, at=pc.logits, name="p")], "capture[0].at"),
        ([pc.Probe(np.ones((D + 1, D)), at=pc.resid_post[0], name="p")], "capture[0].weight"),
        ([pc.Capture(pc.resid_post[0], pool="mean"), pc.resid_post[0]], "capture[1]"),
        ([pc.Capture(pc.resid_post[0], pool="mean"), pc.Capture(pc.resid_post[0], pc.prompt[0], pool="mean")], "capture[1]"),
        ([pc.Probe("nothing", at=pc.resid_post[0], name="p")], "capture[0].weight"),
    ],
)  # fmt: skip
def test_a_probe_that_does_not_fit_is_refused_with_its_path(lm, capture, path):
    with pytest.raises(pc.PatchclampError) as raised:
        lm.run(PROMPT, capture=capture)
    assert raised.value.path == path


def test_an_unknown_probe_names_those_that_there_are(lm):
    run = lm.run(PROMPT, capture=pc.Probe(W, at=pc.resid_post[0], name="deception"), max_tokens=1)
    assert "deceptio" not in run.probes
    with pytest.raises(pc.UnknownName, match="deception"):
        run.probes["deceptio"]
    run.close()
    with pytest.raises(pc.MissingSource, match="closed"):
        run.probes["deception"]


def test_programs_with_probes_have_a_text_form():
    probe = pc.Probe(
        W, at=pc.resid_post[0:2], tokens=pc.prompt[-1], bias=[1.0, 2.0], activation="softmax", pool="last", name="p"
    )
    program = pc.Program.of([], [probe, pc.Capture(pc.z[0], pool="mean")])
    assert pc.Program.from_json(program.to_json()) == program
    assert program.fingerprint == pc.Program.from_json(program.to_json()).fingerprint


# -- files and fitted models


def test_files_of_all_kinds_load(tmp_path):
    weight, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    probe = pc.Probe(weight, at=pc.resid_post[3], bias=bias, activation="sigmoid", name="x")
    probe.save(tmp_path / "deception.safetensors")
    np.savez(tmp_path / "deception.npz", coef_=weight, intercept_=bias)
    np.save(tmp_path / "deception.npy", weight)
    for suffix, has_bias, activation in (
        (".safetensors", True, "sigmoid"),
        (".npz", True, None),
        (".npy", False, None),
    ):
        loaded = pc.Probe.load(tmp_path / f"deception{suffix}", at=pc.resid_post[3] @ pc.prompt[-1])
        assert loaded.name == "deception"
        assert (loaded.weight, loaded.activation) == (probe.weight, activation)
        assert loaded.bias == (probe.bias if has_bias else None)
        assert str(loaded.tokens) == "prompt[-1]"


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy", ".pkl", ".pt"])
@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"{}", b"\xff" * 64, (1 << 62).to_bytes(8, "little") + b"{}"])
def test_hostile_files_are_refused(tmp_path, suffix, data):
    file = tmp_path / f"probe{suffix}"
    file.write_bytes(data)
    with pytest.raises(pc.ProgramError) as raised:
        pc.Probe.load(file, at=pc.resid_post[0])
    assert raised.value.path == "path"


def test_pickles_in_arrays_are_refused(tmp_path):
    for name, save in (("p.npy", np.save), ("p.npz", lambda file, array: np.savez(file, weight=array))):
        save(tmp_path / name, np.array([{"a": 1}], dtype=object))
        with pytest.raises(pc.ProgramError):
            pc.Probe.load(tmp_path / name, at=pc.resid_post[0])


def test_files_with_other_tensors_are_refused(tmp_path):
    np.savez(tmp_path / "p.npz", weight=np.ones((1, 4)), scaler=np.ones(4))
    np.savez(tmp_path / "q.npz", bias=np.ones(1))
    np.savez(tmp_path / "n.npz", weight=np.array([[np.nan, 1.0]]))
    np.savez(tmp_path / "w.npz", weight=np.ones((2, 3, 4)))
    np.savez(tmp_path / "two.npz", weight=np.ones((1, 4)), coef_=np.zeros((1, 4)))  # each part under one name
    np.savez(tmp_path / "biases.npz", weight=np.ones((1, 4)), bias=np.ones(1), intercept_=np.zeros(1))
    np.savez(tmp_path / "short.npz", W=np.ones((1, 4)))
    for name in ("p", "q", "n", "w", "missing", "two", "biases", "short"):
        with pytest.raises(pc.PatchclampError):
            pc.Probe.load(tmp_path / f"{name}.npz", at=pc.resid_post[0])


def test_a_torch_linear_becomes_a_probe():
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(5, 2)
    probe = pc.Probe.of(layer, at=pc.resid_post[0], name="linear")
    rows = torch.randn(4, 5)
    assert isinstance(probe.weight, pc.Vector)
    assert probe.bias is not None
    np.testing.assert_allclose(
        rows.numpy() @ probe.weight.array().T + probe.bias.array(), layer(rows).detach(), atol=1e-6
    )
    assert pc.Probe.of(torch.nn.Linear(5, 2, bias=False), at=pc.resid_post[0], name="linear").bias is None


def test_fitted_models_of_scikit_learn_become_probes():
    linear, pipeline = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("sklearn.pipeline")
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(5)
    rows = rng.standard_normal((200, 6)) * np.arange(1, 7) + 3
    for classes in (2, 3):
        labels = (rows @ rng.standard_normal((6, classes))).argmax(1)
        for steps in ((linear.LogisticRegression(),), (StandardScaler(), linear.LogisticRegression())):
            model = pipeline.make_pipeline(*steps).fit(rows, labels)
            probe = pc.Probe.of(model, at=pc.resid_post[0], name="fitted")
            assert isinstance(probe.weight, pc.Vector)
            assert probe.bias is not None
            products = rows @ probe.weight.rows().T + probe.bias.array()
            scores = ACTIVATIONS[probe.activation](products)
            expected = model.predict_proba(rows)
            np.testing.assert_allclose(scores, expected if classes > 2 else expected[:, 1:], atol=1e-4)
    ridge = linear.Ridge().fit(rows, rows[:, 0])
    assert pc.Probe.of(ridge, at=pc.resid_post[0], name="ridge").activation is None
    for wrong in (linear.LogisticRegression(), object(), pipeline.make_pipeline(StandardScaler(), linear.Ridge())):
        with pytest.raises(pc.ProgramError):
            pc.Probe.of(wrong, at=pc.resid_post[0], name="wrong")


SGD = {"random_state": 0, "max_iter": 50, "tol": None}
MODELS = {  # of scikit-learn, and the method whose scores a probe has, for 2 and for 3 classes; None: it cannot
    "linear_model.SGDClassifier log_loss": (SGD | {"loss": "log_loss"}, "predict_proba", None),
    "linear_model.SGDClassifier modified_huber": (SGD | {"loss": "modified_huber"}, None, None),
    "linear_model.SGDClassifier hinge": (SGD, "decision_function", "decision_function"),
    "svm.SVC": ({"kernel": "linear"}, "decision_function", None),
    "svm.SVC proba": ({"kernel": "linear", "probability": True, "random_state": 0}, None, None),
    "svm.LinearSVC": ({}, "decision_function", "decision_function"),
    "linear_model.RidgeClassifier": ({}, "decision_function", "decision_function"),
    "discriminant_analysis.LinearDiscriminantAnalysis": ({}, "predict_proba", "predict_proba"),
    "cross_decomposition.PLSRegression": ({"n_components": 1}, None, None),
    "linear_model.PoissonRegressor": ({}, None, None),
    "linear_model.LinearRegression": ({"fit_intercept": False}, "predict", "predict"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "classes"), itertools.product(MODELS, (2, 3)))
def test_a_probe_has_the_scores_of_its_model_or_is_refused(name, classes):
    pytest.importorskip("sklearn")
    module, _, kind = name.partition(" ")[0].partition(".")
    options, *methods = MODELS[name]
    model, method = getattr(importlib.import_module(f"sklearn.{module}"), kind)(**options), methods[classes - 2]
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((120, 6)) + 1
    model.fit(rows, ((rows - 1) @ rng.standard_normal((6, classes))).argmax(1))
    if method is None:
        with pytest.raises(pc.ProgramError, match="differs") as raised:
            pc.Probe.of(model, at=pc.resid_post[0], name="p")
        assert raised.value.path == "model"
        return
    probe = pc.Probe.of(model, at=pc.resid_post[0], name="p")
    products = rows @ probe.weight.rows().T + (0 if probe.bias is None else probe.bias.array())
    expected = getattr(model, method)(rows).reshape(len(rows), -1)
    np.testing.assert_allclose(ACTIVATIONS[probe.activation](products), expected[:, -products.shape[1] :], atol=1e-4)


def test_models_in_other_forms():
    linear, torch = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("torch")
    rng, at = np.random.default_rng(7), pc.resid_post[0]
    rows = rng.standard_normal((120, 6))
    labels = (rows @ rng.standard_normal((6, 3))).argmax(1)
    dense = pc.Probe.of(linear.LogisticRegression().fit(rows, labels), at, name="p")
    assert pc.Probe.of(linear.LogisticRegression().fit(rows, labels).sparsify(), at, name="p") == dense
    one_versus_rest = linear.SGDClassifier(loss="log_loss", **SGD).fit(rows, labels)
    scores = pc.Probe.of(one_versus_rest, at, activation="sigmoid", name="p")  # of each class alone
    products = rows @ scores.weight.rows().T + scores.bias.array()
    np.testing.assert_allclose(products, one_versus_rest.decision_function(rows), atol=1e-4)
    half = torch.nn.Linear(6, 2).bfloat16()
    assert pc.Probe.of(half, at, name="p").weight == pc.Vector.of(half.weight)

    class Adapted(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows) + rows[:, :1]

    for other in (torch.nn.LazyLinear(2), Adapted(6, 2)):
        with pytest.raises(pc.ProgramError) as raised:
            pc.Probe.of(other, at, name="p")
        assert raised.value.path == "model"


# -- many runs at once


@pytest.mark.parametrize("chunk", [None, 2])
def test_rows_and_probes_of_many_runs_equal_those_of_each(chunk):
    lm, rng = pc.LM("fake", engine="fake", chunk=chunk), np.random.default_rng(6)
    probes = [pc.Probe(matrix(rng, 3), at=pc.resid_post[1], bias=[1, 2, 3], activation="softmax", name="each")]
    probes += [
        pc.Probe(matrix(rng, 2), at=pc.z[1], pool=pool, activation="sigmoid", name=pool) for pool in POOLS if pool
    ]
    capture = [pc.resid_post, pc.z[1, 1] @ pc.prompt, pc.Capture(pc.mlp_out[0], pool="mean"), *probes]
    prompts = [PROMPT[: 1 + n % len(PROMPT)] for n in (3, 0, 6, 2, 5)]
    runs = lm.run(prompts, max_tokens=4, capture=capture)
    for found, read in (
        (lm.probes(runs), lambda run, name: run.probes[name]),
        (lm.rows(runs), lambda run, name: run[name]),
    ):
        assert len(found) >= 4
        for name, rows in found.items():
            for i, run in enumerate(runs):
                mine = rows.run == i
                np.testing.assert_allclose(rows.values[mine] if mine.sum() > 1 or read(run, name).ndim == rows.values.ndim
                                           else rows.values[mine][0], read(run, name), rtol=1e-6, atol=1e-7)  # fmt: skip
                if name in run.sites and name != "mlp_out[0]":
                    assert rows.position[mine].tolist() == run.positions(name)
    assert list(lm.rows(runs, [pc.resid_post[2], "mlp_out[0]"])) == ["resid_post[2]", "mlp_out[0]"]
    frame = lm.probes(runs)["each"].to_frame()
    assert list(frame.columns) == ["run", "position", 0, 1, 2]
    assert len(frame) == sum(len(run.probes["each"]) for run in runs)


@pytest.mark.parametrize("chunk", [None, 1])
def test_of_two_captures_of_a_position_the_later_counts_for_many_runs_too(chunk):
    lm = pc.LM("fake", engine="fake", chunk=chunk)
    edits = [
        pc.Capture(pc.resid_post[0]),
        pc.Scale(3.0, at=pc.resid_post[0]),
        pc.Capture(pc.resid_post[0], pc.prompt[1:]),
    ]
    runs = lm.run([PROMPT, PROMPT[:3]], max_tokens=2, edits=edits)
    [rows] = lm.rows(runs).values()
    for i, run in enumerate(runs):
        assert np.array_equal(rows.values[rows.run == i], run[pc.resid_post[0]])
        assert rows.position[rows.run == i].tolist() == run.positions(pc.resid_post[0])


def test_runs_without_rows_are_read_with_others_or_alone(lm):
    capture = [
        pc.Probe(np.ones((2, D)), at=pc.resid_post[0], tokens=pc.generated, bias=[1, 2], name="p"),
        pc.resid_post[1] @ pc.generated,
        pc.Capture(pc.resid_post[2], pc.generated, project=W),
    ]
    short, long = (lm.run(PROMPT, max_tokens=count, capture=capture) for count in (1, 4))
    for runs in ([short, long], [long, short, lm.run(PROMPT, max_tokens=1, capture=capture)], [short]):
        found = lm.rows(runs) | lm.probes(runs)
        widths = {"resid_post[1]": D, "resid_post[2]": 2, "p": 2}
        assert {name: rows.values.shape for name, rows in found.items()} == {
            name: (3 * runs.count(long), width) for name, width in widths.items()
        }
        for name, rows in found.items():
            if long in runs:
                assert np.array_equal(rows.values, long.probes[name] if name == "p" else long[name])


def test_runs_that_were_read_otherwise_are_not_joined(lm):
    """Also where the rows have the same width."""

    def run(**options):
        return lm.run(PROMPT, max_tokens=1, **options)

    site, part = pc.resid_post[0], np.ones((2, 8), np.float32)
    probes = [pc.Probe(W, at=site, name="p", **options) for options in ({}, {"bias": [1, 2]}, {"activation": "relu"},
                                                                        {"pool": "max"}, {"pool": "mean"})]  # fmt: skip
    probes += [pc.Probe(-W, at=site, name="p"), pc.Probe(W, at=pc.resid_post[1], name="p")]
    for other in probes[1:]:
        with pytest.raises(pc.MissingSource):
            lm.probes([run(capture=probes[0]), run(capture=other)])
    alike = [pc.Probe(W, at=site, name="p"), pc.Probe(W, at=site, tokens=pc.prompt[2:4], name="p")]
    assert lm.probes([run(capture=each) for each in alike])["p"].run.tolist() == [0] * len(PROMPT) + [1, 1]
    captures = [pc.Capture(pc.z[0, 0], project=part), pc.Capture(pc.z[0, 1], project=part),
                pc.Capture(pc.z[0, 0], project=-part), pc.Capture(pc.z[0, 0], project=part, pool="max")]  # fmt: skip
    for other in captures[1:]:
        with pytest.raises(pc.MissingSource):
            lm.rows([run(capture=captures[0]), run(capture=other)])
    one = run(capture=captures[0])
    with pytest.raises(pc.MissingSource):
        lm.rows([one], pc.z[0, 1])
    assert lm.rows([one], pc.z[0, 0])["z[0, 0]"].values.shape == (len(PROMPT), 2)
    for read in (lm.rows, lm.probes):
        with pytest.raises(pc.ProgramError) as raised:
            read([one, one])
        assert raised.value.path == "runs"


def test_what_is_not_there_has_a_default(lm):
    run = lm.run(
        PROMPT, max_tokens=1, capture=[pc.Probe(np.ones(D), at=pc.resid_post[0], name="p"), pc.Lens(pc.mlp_out[0])]
    )
    assert (run.probes.get("q"), run.probes.get("q", 3), run.lens.get(pc.embed), run.lens.get("attn_out[0]", 3)) == (
        None, 3, None, 3,
    )  # fmt: skip
    assert run.probes.get("p") is not None
    assert (run.lens.get("nope"), run.lens.get("resid_post[99]"), run.probes.get([1])) == (None, None, None)
    assert "nope" not in run.lens


def test_hundreds_of_probes_are_looked_through_once(lm, monkeypatch):
    probes = [pc.Probe(np.ones(D), at=pc.resid_post[i % 3], name=f"p{i}") for i in range(300)]
    run, looked = lm.run(PROMPT, max_tokens=1, capture=probes), []
    found = Program.probes.fget
    monkeypatch.setattr(Program, "probes", property(lambda self: looked.append(1) or found(self)))
    assert all(len(run.probes[f"p{i}"]) == len(PROMPT) for i in range(300))
    assert len(lm.probes([run])) == 300
    assert len(looked) <= 2


def test_many_runs_that_cannot_be_read_at_once_are_refused(lm):
    runs = [lm.run(PROMPT, capture=capture, max_tokens=2) for capture in (
        pc.resid_post[0], pc.Capture(pc.resid_post[0], project=W), pc.resid_post[0] @ pc.token(7), pc.embed)]  # fmt: skip
    for pair in ((0, 1), (2, 2), (0, 3)):
        with pytest.raises(pc.PatchclampError):
            lm.rows([runs[i] for i in pair], pc.resid_post[0])
    assert lm.rows([]) == lm.probes([]) == {}
    with pytest.raises(pc.ProgramError):
        lm.rows(runs[0])
