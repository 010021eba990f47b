"""Every public callable with one wrong argument at a time, on the fake engine: it works, or raises a `PatchclampError`
that names the argument. The arguments come from the signatures: a new one is tried without an entry here."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies.study import REQUIRED
from tests import wrong

torch = pytest.importorskip("torch")
LM = pc.LM("fake", prove=False)
IDS, OTHER = [5, 6, 7], [5, 8, 7]
AT = pc.resid_post[1]
VECTOR = np.ones(LM.model.d_model, np.float32)
LM.bank["banked"] = VECTOR
RUN = LM.run(IDS, max_tokens=1, capture=[AT])
MADE = pc.studies.SteeringVectors.from_directions({1: VECTOR})
PAIRED = pc.studies.SteeringVectors.from_directions({1: VECTOR, 2: VECTOR})
LENS = pc.studies.logit_lens(LM, IDS, layers=1, tokens=[5])
PROBED = pc.studies.fit_probe(LM, prompts=[[1, 2], [3, 4], [5, 6], [7, 8]], labels=[0, 1, 0, 1], layers=1, folds=2)
DICTIONARY = pc.SAE(np.ones((4, 16)), np.zeros(4), np.ones((4, 16)), np.zeros(16))
PAIR = {"clean": IDS, "corrupt": OTHER, "answer": 5}
SWEEP = {"metric": "logprob", "layers": 1, "positions": -1}
SWEPT = pc.studies.patch_sweep(LM, **PAIR, **SWEEP)
HARVESTED = pc.studies.harvest(LM, [IDS], tempfile.mkdtemp(), sites="embed", show_progress=False).open()
PARITY = {"model": "fake", "engines": ("fake", "fake")}


def STEER(**options: Any) -> Any:
    return pc.studies.steering_vectors(
        LM, [[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]], **{"held_out": 0} | options
    )


def _bank_set(name: Any, value: Any) -> None:
    LM.bank[name] = value


def _bank_get(name: Any) -> None:
    LM.bank[name]


def _attach(**arguments: Any) -> None:
    LM.attach(**arguments)
    LM.detach(arguments["name"])


def _arun(**arguments: Any) -> None:
    asyncio.run(LM.arun(**arguments))


def _stream(**arguments: Any) -> None:
    list(LM.stream(**arguments))


def _trace(**arguments: Any) -> None:
    with LM.trace(**arguments) as trace:
        trace.layers[1].output.save()


def _read(site: Any) -> None:
    RUN[site]


def _mean_of(**arguments: Any) -> Any:
    """What is only stored when it is made is read where it is used."""
    return pc.studies.ablation_sweep(
        LM, prompt=IDS, answer=5, sites="mlp_out", source=pc.studies.MeanOf(**arguments), **SWEEP
    )


def _resampled(**arguments: Any) -> Any:
    return pc.studies.patch_sweep(LM, **PAIR, source=pc.studies.Resampled(**arguments), **SWEEP)


def _banked(**arguments: Any) -> Any:
    return pc.studies.patch_sweep(LM, **PAIR, source=pc.studies.Banked(**arguments), **SWEEP)


def _project(**arguments: Any) -> Any:
    return pc.studies.harvest(LM, [IDS], "harvest", sites="embed", project=pc.studies.Project(**arguments))


# by name: the callable, and arguments that work
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "LM": (pc.LM, {"model": "fake", "engine": "fake", "prove": False}),
    "site": (pc.site, {"text": "resid_post[1]"}),
    "span": (pc.span, {"text": "a"}),
    "role": (pc.role, {"name": "user"}),
    "tokens": (pc.tokens, {"text": "prompt[0]"}),
    "Site": (pc.Site, {"name": "resid_post"}),
    "Vector.of": (pc.Vector.of, {"numbers": VECTOR}),
    "Named": (pc.Named, {"name": "a"}),
    "From": (pc.From, {"run": RUN}),
    "Program.of": (pc.Program.of, {"edits": (), "captures": ()}),
    "Program.from_json": (pc.Program.from_json, {"text": "{}"}),
    "Add": (pc.Add, {"value": VECTOR, "at": AT}),
    "Replace": (pc.Replace, {"value": VECTOR, "at": AT}),
    "Mean": (pc.Mean, {"value": VECTOR, "at": AT}),
    "Ablate": (pc.Ablate, {"directions": VECTOR, "at": AT}),
    "Apply": (pc.Apply, {"fn": lambda x: x, "at": AT}),
    "Capture": (pc.Capture, {"at": AT}),
    "Lens": (pc.Lens, {"at": AT, "translators": {1: np.eye(16)}}),
    "Rotate": (pc.Rotate, {"plane": np.eye(2, 16), "degrees": 30.0, "at": AT}),
    "Clamp": (pc.Clamp, {"direction": VECTOR, "at": AT, "low": 0.0}),
    "Noise": (pc.Noise, {"std": 1.0, "at": AT}),
    "Scale": (pc.Scale, {"factor": 1.0, "at": AT}),
    "Knockout": (pc.Knockout, {"keys": "prompt[0]", "at": pc.pattern[1]}),
    "Use": (pc.Use, {"name": "a"}),
    "Zero": (pc.Zero, {"at": AT}),
    "lm.run": (LM.run, {"prompt": IDS, "max_tokens": 1}),
    "lm.arun": (_arun, {"prompt": IDS, "max_tokens": 1}),
    "lm.stream": (_stream, {"prompt": IDS, "max_tokens": 1}),
    "lm.trace": (_trace, {"prompt": IDS}),
    "lm.fetch": (LM.fetch, {"runs": [RUN], "sites": [AT]}),
    "lm.tokens": (LM.tokens, {"text": "a"}),
    "lm.edit": (LM.edit, {"name": "a"}),
    "lm.grade": (LM.grade, {"prompt": IDS, "programs": [[]], "score": [5]}),
    "lm.loglikelihood": (LM.loglikelihood, {"prompt": IDS, "continuation": [5]}),
    "PatchSweepResult.best": (SWEPT.best, {"count": 1}),
    "Harvested.array": (HARVESTED.array, {"site": "embed"}),
    "Harvested.batches": (HARVESTED.batches, {"size": 4}),
    "Harvested.torch": (HARVESTED.torch, {}),
    "Harvested.datasets": (HARVESTED.datasets, {"size": 4}),
    "lm.sleep": (LM.sleep, {"level": 1}),
    "lm.rows": (LM.rows, {"runs": [RUN], "sites": [AT]}),
    "lm.probes": (LM.probes, {"runs": [RUN]}),
    "lm.lens": (LM.lens, {"runs": [RUN]}),
    "lm.weights": (LM.weights, {"name": "W_Q", "layer": 1, "head": 0}),
    "lm.attach": (_attach, {"sae": DICTIONARY, "at": AT, "name": "a"}),
    "lm.detach": (LM.detach, {"name": "attached"}),
    "lm.bank[]=": (_bank_set, {"name": "a", "value": VECTOR}),
    "lm.bank[]": (_bank_get, {"name": "a"}),
    "lm.bank.mean": (LM.bank.mean, {"name": "m", "runs": [RUN], "site": AT}),
    "run[]": (_read, {"site": AT}),
    "run.read": (RUN.read, {"site": AT}),
    "run.positions": (RUN.positions, {"site": AT}),
    "run.refs": (RUN.refs, {"site": AT}),
    "run.is_projected": (RUN.is_projected, {"site": AT}),
    "run.layout": (RUN.layout, {"site": AT}),
    "run.select": (RUN.select, {"tokens": "prompt"}),
    "ablation_sweep": (pc.studies.ablation_sweep, {"lm": LM, "prompt": IDS, "answer": 5, "sites": "mlp_out", **SWEEP}),
    "attribution_patching": (
        pc.studies.attribution_patching,
        {"lm": LM, **PAIR, "layers": 1, "verify": 1, "sample": 0, "sites": ["mlp_out"]},
    ),
    "causal_trace": (
        pc.studies.causal_trace,
        {"lm": LM, "prompt": IDS, "subject": 1, "answer": 5, "seeds": 1, **SWEEP},
    ),
    "direct_attribution": (pc.studies.direct_attribution, {"lm": LM, "prompt": IDS, "answer": 5, "by": ["layer"]}),
    "edge_attribution": (pc.studies.edge_attribution, {"lm": LM, **PAIR, "verify": 1, "sample": 0}),
    "fit_lens": (pc.studies.fit_lens, {"lm": LM, "dataset": [IDS, OTHER], "layers": 1, "steps": 1}),
    "read_lens": (pc.studies.read_lens, {"path": "none.pt", "site": "resid_pre"}),
    "fit_probe": (
        pc.studies.fit_probe,
        {"lm": LM, "prompts": [[1, 2], [3, 4], [5, 6], [7, 8]], "labels": [0, 1, 0, 1], "layers": 1, "folds": 2},
    ),
    "FitProbeResult.threshold": (PROBED.threshold, {"false_positive_rate": 0.1}),
    "FitProbeResult.calibration": (PROBED.calibration, {"layer": 1, "bins": 4}),
    "FitProbeResult.probe": (PROBED.probe, {"layer": 1}),
    "FitProbeResult.score": (PROBED.score, {"rows": np.zeros(LM.model.d_model)}),
    "fuzz_sweep": (pc.studies.fuzz_sweep, {"lm": LM, "prompts": [IDS], "strengths": [0.5], "max_tokens": 1}),
    "harvest": (pc.studies.harvest, {"lm": LM, "documents": [[5]], "folder": "harvest", "sites": "embed"}),
    "logit_lens": (pc.studies.logit_lens, {"lm": LM, "prompt": IDS, "layers": 1}),
    "parity": (pc.studies.parity, {**PARITY, "prompts": [IDS], "max_tokens": 1}),
    "patch_sweep": (pc.studies.patch_sweep, {"lm": LM, **PAIR, **SWEEP}),
    "patchscope": (
        pc.studies.patchscope,
        {"lm": LM, "source": IDS, "target": IDS, "layers": 1, "target_layers": 1, "max_tokens": 1},
    ),
    "path_patch": (pc.studies.path_patch, {"lm": LM, **PAIR, **SWEEP, "senders": ["z[:, 0]"]}),
    "steering_vectors": (
        pc.studies.steering_vectors,
        {
            "lm": LM,
            "positive": [[1, 2, 3], [4, 5, 6]],
            "negative": [[7, 8, 9], [10, 11, 12]],
            "layers": 1,
            "held_out": 0,
        },
    ),
    "strength_curve": (
        pc.studies.strength_curve,
        {"lm": LM, "vectors": MADE, "prompts": [IDS], "answer": 5, "scales": [1.0]},
    ),
    "search": (
        pc.studies.search,
        {
            "lm": LM,
            "space": pc.studies.Space(lambda x: None, {"x": [1]}),
            "trials": 1,
            "objectives": pc.studies.KLDivergence(prompts=[IDS]),
        },
    ),
    "MeanOf": (_mean_of, {"prompts": [IDS]}),
    "Resampled": (_resampled, {"prompts": [IDS]}),
    "Banked": (_banked, {"name": "banked"}),
    "Filters": (pc.studies.Filters, {}),
    "Project": (_project, {"matrix": np.eye(LM.model.d_model, dtype=np.float32)}),
    "SteeringVectors.edits": (MADE.edits, {}),
    "SteeringVectors.vector": (MADE.vector, {"layer": 1}),
    "SteeringVectors.directions": (MADE.directions, {}),
    "SteeringVectors.from_directions": (pc.studies.SteeringVectors.from_directions, {"directions": {1: VECTOR}}),
    "SteeringVectors.from_gguf": (pc.studies.SteeringVectors.from_gguf, {"path": "none.gguf"}),
    "SteeringVectors.to_gguf": (MADE.to_gguf, {"path": "made.gguf"}),
    "LogitLensResult.save": (LENS.save, {"path": "lens.safetensors"}),
    "LogitLensResult.load": (pc.studies.LogitLensResult.load, {"path": "none.safetensors"}),
    "LogitLensResult.to_html": (LENS.to_html, {"path": "lens.html"}),
    "studies.load": (pc.studies.load, {"path": "none.safetensors"}),
    "Study.run": (pc.studies.LogitLens(prompt=IDS, layers=1).run, {"lm": LM}),
    "Harvested": (pc.studies.Harvested, {"folder": "none"}),
    "lm.bank.save": (LM.bank.save, {"file": "bank.safetensors"}),
    "lm.bank.load": (LM.bank.load, {"file": "none.safetensors"}),
    "LogitLensResult.top": (LENS.top, {"layer": 1, "position": -1}),
    "LogitLensResult.rank": (LENS.rank, {"token": 5}),
    "LogitLensResult.probability": (LENS.probability, {"token": 5}),
}
SIGNATURES = {"lm.attach": LM.attach, "lm.arun": LM.arun, "lm.stream": LM.stream, "lm.trace": LM.trace} | {
    name: getattr(pc.studies, name) for name in ("MeanOf", "Resampled", "Banked", "Project")
}
UNNAMED = {  # of one argument, or named by the argument that it is read for
    "LM", "site", "span", "role", "tokens", "Site", "Vector.of", "Program.of", "Program.from_json", "lm.bank[]=",
    "lm.bank[]", "Banked", "Project", "LogitLensResult.to_html",
}  # fmt: skip
SKIPPED = {"tell", "listener", "check", "weights"}  # callbacks, called later; weights are read by engines


WRONG = wrong.WRONG | {"run": RUN}


def arguments_of(name: str) -> list[str]:
    signature = inspect.signature(SIGNATURES.get(name, CALLS[name][0]))
    return [one.name for one in signature.parameters.values()
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name not in SKIPPED]  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "parity" else []) for name in CALLS]
)
def test_a_wrong_argument_works_or_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, right = CALLS[name]
    always = wrong.error_of(function, right)  # what this engine cannot do at all
    for argument in arguments_of(name):
        for label, given in WRONG.items():
            error, case = wrong.error_of(function, right | {argument: given}), f"{argument}={label}"
            assert error is None or isinstance(error, pc.PatchclampError), f"{case}: {type(error).__name__}: {error}"
            named = error is None or str(error) == str(always) or argument in str(error)
            assert named or name in UNNAMED, f"{case}: {error}"


@pytest.mark.parametrize("name", [name for name in CALLS if hasattr(pc.studies, name) and name.islower()])
def test_a_missing_argument_is_named(name):
    function, right = CALLS[name]
    for argument in right:
        if inspect.signature(function).parameters[argument].default is inspect.Parameter.empty:
            error = wrong.error_of(function, {other: value for other, value in right.items() if other != argument})
            assert isinstance(error, pc.ProgramError)
            assert error.path == argument


@pytest.mark.parametrize(("op", "given", "path"), [
    (pc.Add, {"value": VECTOR}, "at"), (pc.Add, {"at": AT}, "value"), (pc.Zero, {}, "at"), (pc.Capture, {}, "at"),
    (pc.Noise, {"at": AT}, "std"), (pc.Use, {}, "name"), (pc.From, {}, "run"),
])  # fmt: skip
def test_a_missing_field_of_an_op_is_named(op, given, path):
    with pytest.raises(pc.ProgramError) as caught:
        op(**given)
    assert caught.value.path == path


@pytest.mark.parametrize(("call", "path"), [
    (lambda: pc.studies.logit_lens(LM, [IDS, OTHER]), "prompt"),
    (lambda: pc.studies.patchscope(LM, source=[IDS], target=IDS), "source"),
    (lambda: pc.studies.patchscope(LM, source=IDS, target=[]), "target"),
    (lambda: pc.studies.attribution_patching(LM, clean=[IDS], corrupt=OTHER, answer=5), "clean"),
    (lambda: LM.run(IDS, sampling={1: 2}), "sampling"),
    (lambda: LM.run(IDS, sampling={"repetition_penalty": 1.1}), "sampling.repetition_penalty"),
    (lambda: LENS.top(99, -1), "layer"),
    (lambda: LENS.top(1, 99), "position"),
    (lambda: pc.studies.strength_curve(LM, "x", [IDS], 5), "vectors"),
    (lambda: pc.studies.Filters(norm_cap=True), "filters.norm_cap"),
    (lambda: pc.studies.logit_lens(LM, IDS, unembedding=np.eye(16), labels="a" * 16), "labels"),
    (lambda: pc.studies.direct_attribution(LM, IDS, answer=5, by="head"), "by"),
    (lambda: pc.studies.fuzz_sweep(LM, [IDS], [0.5], seeds="12"), "seeds"),
    (lambda: pc.studies.patch_sweep(LM, **PAIR, metric="logprob", positions={"a": "12"}), "positions['a']"),
    (lambda: LM.run(IDS, score="12"), "score"),
    (lambda: pc.studies.causal_trace(LM, prompt=IDS, subject=1, answer=5, seeds=10**12), "seeds"),
    *[(lambda seeds=seeds: pc.studies.fuzz_sweep(LM, [IDS], [0.5], seeds=seeds), path)
      for seeds, path in (({1: 2}, "seeds"), (b"12", "seeds"), (torch.tensor(1), "seeds"), ([0, True], "seeds[1]"))],
    *[(lambda strengths=strengths: pc.studies.fuzz_sweep(LM, [IDS], strengths), "strengths[0]")
      for strengths in (["1", "2"], [True], [b"1"], np.array(["1"]))],
    *[(lambda scales=scales: pc.studies.strength_curve(LM, MADE, [IDS], 5, scales=scales), "scales[1]")
      for scales in ([0, "1"], [0, True], [0, b"1"])],
    *[(lambda layers=layers: STEER(layers=layers), "layers")
      for layers in ("0:99", slice(0, 99), slice(True, 2), slice(0, 1.5), "3:3", b"12", {1: 2}, {True}, [slice(0, 99)])],
    *[(lambda tokens=tokens: STEER(tokens=tokens), "tokens") for tokens in (slice(25, 99), "prompt[25:99]", "generated")],
    *[(lambda share=share: STEER(held_out=share), "held_out") for share in ("0", True, float("nan"), 1)],
    *[(lambda score=score: LM.run(IDS, score=score), "score") for score in ({1: 2}, b"12", {"a"}, [True])],
    *[(lambda layers=layers: MADE.edits(layers=layers), "layers") for layers in ({1: 2}, b"1", [True], "1", [2])],
    (lambda: MADE.directions({1: 2}), "layers"), (lambda: MADE.vector({1: 2}), "layer"),
    (lambda: PAIRED.vector([1, 2]), "layer"),
    *[(lambda documents=documents: pc.studies.harvest(LM, documents, "harvest", sites="embed"), "documents")
      for documents in ({"a": "b"}, b"ab", {"a"}, [b"ab"], [bytearray(b"ab")], [[True, 5]], [["a"]])],
    *[(lambda positions=positions: pc.studies.logit_lens(LM, IDS, layers=1, positions=positions), path)
      for positions, path in ((True, "positions"), ([0, True], "positions[1]"), (np.array([True, False]), "positions[0]"))],
    *[(lambda positions=positions: pc.studies.patch_sweep(LM, **PAIR, metric="logprob", positions=positions), "positions[0]")
      for positions in ([[True, 1]], [[[1]]], [True], ["12"])],
    (lambda: pc.studies.patch_sweep(LM, **PAIR, metric="logprob", positions={"a": np.array([-2, -1])}), "positions['a']"),
    *[(lambda end=end: pc.studies.patchscope(LM, source=IDS, target=IDS, **{end: True}), end)
      for end in ("source_position", "target_position")],
    *[(lambda occurrence=occurrence: pc.span("a", occurrence=occurrence), "occurrence") for occurrence in (True, "1", 1.5)],
    *[(lambda given=given: _mean_of(prompts=[IDS], by_position=given), "source.by_position") for given in ("no", 1, None)],
    *[(lambda given=given: _resampled(prompts=[IDS], **given), f"source.{next(iter(given))}")
      for given in ({"seed": "1"}, {"seed": True}, {"seed": 1.5}, {"seed": None}, {"seed": -1}, {"draws": True}, {"draws": "2"},
                    {"draws": 1.5}, {"draws": 0})],
    (lambda: pc.studies.Project(np.eye(16), on_device="no"), "on_device"),
    *[(lambda given=given, field=field: LM.attach(DICTIONARY, **{"at": AT, "name": "a", field: given}), field)
      for field in ("at", "to") for given in (0, False, [], np.ones(2), ("resid_post", 1))],
    *[(lambda precision=precision: LM.attach(DICTIONARY, AT, name="a", precision=precision), "precision")
      for precision in ("half", None, np.ones(2))],
    *[(lambda level=level: LM.sleep(level), "level") for level in ("2", -1, 1.5, True, None)],
    *[(lambda at=at: pc.studies.fuzz_sweep(LM, [IDS], [0.5], at=at), path) for at, path in (
        ("blocks.1.hook_resid_mid", "at[0]"), (["embed", "blocks.1.ln1.hook_out @ prompt"], "at[1]"))],
    *[(lambda sampling=sampling: LM.run(IDS, sampling=sampling), f"sampling.{next(iter(sampling))}")
      for sampling in ({"ignore_eos": "no"}, {"ignore_eos": 1}, {"temperature": False}, {"temperature": "0"})],
    *[(lambda std=std: pc.studies.causal_trace(LM, prompt=IDS, subject=1, answer=5, std=std), "std")
      for std in ("1", True, 0, float("nan"))],
])  # fmt: skip
def test_known_mistakes_have_their_path(call, path):
    with pytest.raises(pc.PatchclampError) as caught:
        call()
    assert caught.value.path == path


def test_a_zoom_into_more_blocks_than_there_are_is_a_zoom_into_all():
    grids = [pc.studies.patch_sweep(LM, **PAIR, metric="logprob", zoom=keep) for keep in (100, 10**30)]
    np.testing.assert_array_equal(*(grid.values for grid in grids))


def test_what_vllm_samples_by_is_said_to_be_vllms():
    from patchclamp.engines.generation import Sampler

    for check in (Sampler.check, LM.engine.check_sampling):
        with pytest.raises(pc.UnknownName, match="vLLM") as caught:
            check({"logit_bias": {1: 2.0}})
        assert caught.value.path == "sampling.logit_bias"


@pytest.mark.parametrize(
    "layers", [[0, 1], {1, 0}, "0:2", slice(0, 2), range(2), np.array([1, 0]), [slice(0, 2)], pc.resid_post[:2].layers]
)
def test_layers_are_read_alike_everywhere(layers):
    assert STEER(layers=layers).layers == pc.studies.logit_lens(LM, IDS, layers=layers).layers == (0, 1)
    sweep = pc.studies.patch_sweep(LM, **PAIR, metric="logprob", layers=layers, positions=-1)
    assert [row.layer for row in sweep.rows] == [0, 1]


def test_numbers_of_numpy_and_torch_are_read_as_pythons():
    trace = [pc.studies.causal_trace(LM, prompt=IDS, subject=1, answer=5, seeds=1, std=std, **SWEEP)
             for std in (0.5, np.float64(0.5), torch.tensor(0.5))]  # fmt: skip
    assert {(of.std, of.question, float(of.values[0, 0])) for of in trace} == {
        (0.5, trace[0].question, trace[0].values[0, 0])
    }
    for values in ([0.0, 0.5], np.array([0.0, 0.5]), torch.tensor([0.0, 0.5]), [0, np.float32(0.5)], {0.5, 0}):
        assert pc.studies.strength_curve(LM, MADE, [IDS], 5, scales=values).scales == (0.0, 0.5)
        assert pc.studies.fuzz_sweep(LM, [IDS], values, seeds=np.array([1, 0]), max_tokens=1).strengths == (0.0, 0.5)
    assert STEER(held_out=np.float32(0)).best is None
    assert (
        LM.run(IDS, score={7, 6}).scores
        == LM.run(IDS, score=np.array([6, 7])).scores
        == LM.run(IDS, score=[6, 7]).scores
    )


def test_vectors_that_are_handed_out_are_copies():
    made = pc.studies.SteeringVectors.from_directions({1: VECTOR, 2: VECTOR})
    before = made.edits(layers=[1, 2])
    row, rows = made.vector(1), made.directions()
    row += 100
    rows[2] += 100
    assert made.edits(layers=[1, 2]) == before
    np.testing.assert_array_equal(made.vectors, np.stack([VECTOR, VECTOR]))


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2), np.array(2)])
def test_whole_numbers_of_numpy_and_torch_are_the_same_question(number, tmp_path):
    options = [dict.fromkeys(("seed", "window", "group", "zoom", "batch", "alpha"), n) for n in (2, number)]
    sweeps = [pc.studies.patch_sweep(LM, **PAIR, metric="logprob", sites="z", **of) for of in options]
    assert sweeps[0].question == sweeps[1].question
    np.testing.assert_array_equal(sweeps[0].values, sweeps[1].values)
    folders = [pc.studies.harvest(LM, [IDS], tmp_path, sites="embed", seed=n, parts=n).folder for n in (2, number)]
    assert folders[0] == folders[1]
    for n in (2, number):  # the second resumes the first
        pc.studies.fuzz_sweep(LM, [IDS], [0.5], max_tokens=n, resume=tmp_path / "fuzz")
        pc.studies.logit_lens(LM, IDS, layers=1, top=n, resume=tmp_path / "lens")


def test_a_list_of_positions_is_one_column():
    for positions in ([[-2, -1]], np.array([[-2, -1]]), [pc.prompt[-2, -1]]):
        sweep = pc.studies.patch_sweep(LM, **PAIR, metric="logprob", layers=1, positions=positions)
        assert [column.corrupt for column in sweep.columns] == [(1, 2)]


def test_positions_may_be_arrays():
    for positions in (np.array([-2, -1]), torch.tensor([-2, -1]), [np.int64(-2), -1], (1, pc.prompt[-1])):
        sweep = pc.studies.patch_sweep(LM, **PAIR, metric="logprob", layers=1, positions=positions)
        assert [column.corrupt for column in sweep.columns] == [(1,), (2,)]
        assert pc.studies.logit_lens(LM, IDS, layers=1, positions=positions).positions == (1, 2)
        ablated = pc.studies.ablation_sweep(LM, prompt=IDS, answer=5, metric="logprob", layers=1, positions=positions)
        assert [column.clean for column in ablated.columns] == [(1,), (2,)]
    sweep = pc.studies.patch_sweep(LM, **PAIR, metric="logprob", layers=1, positions=slice(-2, None))
    assert [column.corrupt for column in sweep.columns] == [(1, 2)]


@pytest.mark.parametrize(("call", "path", "meant"), [
    (lambda: pc.studies.patch_sweep(LM, claen=IDS, corrupt=OTHER, answer=5), "claen", "did you mean 'clean'"),
    (lambda: pc.studies.fuzz_sweep(LM, [IDS], [0.5], max_new_tokens=1), "max_new_tokens", "use max_tokens="),
    (lambda: pc.studies.fuzz_sweep(LM, [IDS], [0.5], temperature=1), "temperature", "sampling="),
    (lambda: pc.studies.fuzz_sweep(LM, [IDS], [0.5], prompts=[IDS]), "prompts", "by name"),
    (lambda: pc.studies.patch_sweep(LM, IDS, OTHER), None, r"patch_sweep\(\) takes lm by position"),
    (lambda: LM.run(IDS, max_new_tokens=1), "max_new_tokens", "use max_tokens="),
    (lambda: asyncio.run(LM.arun(IDS, max_new_tokens=1)), "max_new_tokens", "use max_tokens="),
    (lambda: LM.stream(IDS, max_new_tokens=1), "max_new_tokens", "use max_tokens="),
    (lambda: LM.run(IDS, captures="embed"), "captures", "did you mean 'capture'"),
    (lambda: pc.Add(VECTOR, att="embed"), "att", "did you mean 'at'"),
    (lambda: pc.Add(VECTOR, "embed", value=VECTOR), "value", "by position and by name"),
    (lambda: pc.Use("a", 1.0, None, 2), None, "takes name, scale, tokens"),
    (lambda: pc.studies.MeanOf(prompt=[IDS]), "prompt", "did you mean 'prompts'"),
    (lambda: pc.studies.Filters(norm_kap=1.0), "norm_kap", "did you mean 'norm_cap'"),
])  # fmt: skip
def test_an_argument_that_does_not_exist_is_refused_with_the_one_that_is_meant(call, path, meant):
    with pytest.raises(pc.ProgramError, match=meant) as caught:
        call()
    assert caught.value.path == path


def test_calls_that_check_their_arguments_keep_their_signature():
    from patchclamp.lm import LM as Plain

    for name in ("run", "arun", "stream"):
        assert inspect.signature(getattr(pc.LM, name)) == inspect.signature(getattr(Plain, name))
        assert getattr(pc.LM, name).__doc__ == getattr(Plain, name).__doc__
    assert inspect.iscoroutinefunction(LM.arun)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "", 5, b"a"])
def test_what_no_file_is_called_is_no_path(path):
    for argument, call in {
        "resume": lambda: pc.studies.fuzz_sweep(LM, [IDS], [0.5], resume=path),
        "folder": lambda: pc.studies.harvest(LM, [IDS], path, sites="embed"),
        "documents": lambda: pc.studies.harvest(LM, path, "harvest", sites="embed"),
        "lora": lambda: LM.run(IDS, lora=path), "lora[1]": lambda: LM.run([IDS, IDS], lora=[None, path]),
        "path": lambda: LENS.save(path), "file": lambda: LM.bank.load(path),
    }.items():  # fmt: skip
        with pytest.raises(pc.ProgramError) as caught:
            call()
        assert caught.value.path == argument


@pytest.mark.parametrize("kind", pc.studies.STUDIES.values())
def test_a_wrong_field_of_a_study_is_named(kind):
    name = f"{kind.__name__}()"
    with pytest.raises(pc.UnknownName, match="colour") as caught:
        kind(colour=1)
    assert caught.value.path == "colour"
    required = [field for field in kind.fields().values() if field.default is REQUIRED]
    if required:
        with pytest.raises(pc.ProgramError) as caught:
            kind()
        assert (caught.value.path, name in str(caught.value)) == (required[0].name, True)
    sample = {"prompt": "a", "choices": ["b", "c"], "answer": 0}
    given = {"folder": "path", "lora": "path", "sae": "attached", "samples": [sample],
                 "space": pc.studies.Space(lambda x: None, {"x": [1]}),
                 "objectives": pc.studies.KLDivergence(prompts=[IDS])}  # fmt: skip
    right = {field.name: given.get(field.name, IDS) for field in required}
    for field in kind.fields().values():
        for label, given in WRONG.items():
            error = wrong.error_of(kind, right | {field.name: given})
            assert error is None or isinstance(error, pc.PatchclampError), f"{field.name}={label}: {error!r}"
            assert error is None or field.name in str(error), f"{field.name}={label}: {error}"


def test_a_study_is_frozen_and_says_what_it_is_of():
    study = pc.studies.LogitLens(prompt=IDS, layers=1)
    with pytest.raises(AttributeError, match="frozen"):
        study.layers = 2
    assert study.to_dict() == {"study": "LogitLens", "prompt": IDS, "layers": 1}
    assert repr(study).startswith("LogitLens(prompt=[")
    with pytest.raises(pc.UnknownName, match="colour"):
        study.run(LM, colour=1)


@pytest.mark.parametrize("prompts", [[[5, -1, 7]], [[5, 2**63]], [[5, 10**30]]])
def test_token_ids_beyond_the_vocabulary_are_refused_before_they_are_decoded(prompts, tmp_path):
    calls = [
        lambda: pc.studies.fuzz_sweep(LM, prompts, [0.5], max_tokens=1, show_progress=False),
        lambda: pc.studies.harvest(LM, prompts, tmp_path, sites="embed", show_progress=False),
        lambda: pc.studies.patch_sweep(LM, clean=prompts[0], corrupt=[5, 6, 7], answer=5, foil=6, show_progress=False),
        lambda: LM.run(prompts, max_tokens=1),
    ]
    for call in calls:
        with pytest.raises(pc.TokensError):
            call()


def test_one_text_is_not_a_list_with_one_per_prompt():
    for call, path in (
        (lambda: LM.loglikelihood([[5], [6]], "cd"), "continuation"),
        (lambda: LM.loglikelihood([[5]], {"c": 1}), "continuation"),
        (lambda: LM.grade([[5]], pc.Zero(pc.mlp_out[0]), score=[5]), "programs"),
    ):
        with pytest.raises(pc.ProgramError) as caught:
            call()
        assert caught.value.path == path
    assert LM.loglikelihood([[5], [6]], ["c", "d"]) == [LM.loglikelihood([5], "c"), LM.loglikelihood([6], "d")]


@pytest.mark.parametrize("path", [5, None, "a\0b", "x" * 300, "~nobody-of-this-name/x"])
def test_what_is_no_path_is_refused(path):
    probe = pc.Probe(np.ones(LM.model.d_model, np.float32), pc.resid_post[0], name="p")
    for call in (lambda: pc.Probe.load(path, at=pc.resid_post[0]), lambda: probe.save(path), lambda: pc.SAE.load(path),
                 lambda: pc.studies.Harvested(path), lambda: LM.run([5], lora=[path or 5])):  # fmt: skip
        with pytest.raises(pc.PatchclampError):
            call()


def test_an_engine_object_comes_with_its_own_model_and_options():
    assert pc.LM("fake", LM.engine, prove=False).engine is LM.engine
    with pytest.raises(pc.ModelError):
        pc.LM("smollm2", LM.engine, prove=False)
    with pytest.raises(pc.EngineError):
        pc.LM("fake", LM.engine, prove=False, dtype="float32")


def test_scores_of_a_trace_are_those_of_a_run():
    for score in ({5, 6}, np.array([5, 6]), [5, 6]):
        with LM.trace([5, 6, 7], score=score) as trace:
            trace.layers[0].output *= 1.5
        assert sorted(trace.run.scores) == [5, 6]
    with pytest.raises(pc.ProgramError, match="requires a prompt"):
        LM.trace(score=np.array([5, 6]))
    with pytest.raises(pc.TokensError):
        LM.trace([5, 6, 7], score=[-1])
    with pytest.raises(pc.TokensError, match="got a set"):
        LM.loglikelihood([5, 6], {8, 5})


@pytest.mark.parametrize("wrong", [{"url": "\ud800"}, {"url": 5}, {"url": "http://127.0.0.1:9", "api_key": np.ones(3)}])
def test_a_place_to_push_to_is_checked(wrong):
    with pytest.raises(pc.PatchclampError):
        LM.bank.push(**wrong, names=["banked"])
    with pytest.raises(pc.ProgramError):
        LENS.picture(["kl"])
