"""Searches, on the fake engine: objectives equal single runs, samplers, fronts, resumption, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import optuna
import pytest

import patchclamp as pc
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.studies import (
    AnswerScore,
    KLDivergence,
    Objective,
    RefusalRate,
    SearchResult,
    Space,
    TextScore,
    Uniform,
)

LM = pc.LM("fake", prove=False)
PROMPTS = ["the x is", "a b c d", " y z w q e"]
ROW = np.arange(16.0)


def edits(layer: int, strength: float) -> list[pc.Op]:
    return [pc.Add(ROW, at=pc.resid_post[layer], scale=strength), pc.Ablate(ROW, at=pc.mlp_out[1], strength=strength)]


def letters(prompt: str, text: str) -> int:
    return len(prompt + text)


SPACE = Space(edits, {"layer": range(2), "strength": Uniform(-1, 1)})
CHOICES = Space(edits, {"layer": range(2), "strength": [0.5, 1.0]})
OBJECTIVES = [
    AnswerScore(prompts=PROMPTS, answer=[" a", " b c", " d"], foil=" e f"), KLDivergence(prompts=PROMPTS),
    TextScore(prompts=PROMPTS, judge=letters, max_tokens=5), RefusalRate(prompts=PROMPTS, patterns=["[aeiou]"]),
]  # fmt: skip


def measured(program: list[pc.Op]) -> list[float]:
    """The objectives of a program, each prompt and answer in a run of its own."""
    texts = [LM.run(prompt, max_tokens=5, edits=program).text for prompt in PROMPTS]
    refusing = [LM.run(prompt, max_tokens=32, edits=program).text for prompt in PROMPTS]
    score = [LM.loglikelihood(prompt, answer, edits=program) - LM.loglikelihood(prompt, " e f", edits=program)
             for prompt, answer in zip(PROMPTS, (" a", " b c", " d"), strict=True)]  # fmt: skip
    return [
        float(np.mean(score)), float(np.mean([LM.grade(prompt, [program], kl=True).kl for prompt in PROMPTS])),
        float(np.mean([letters(*each) for each in zip(PROMPTS, texts, strict=True)])),
        float(np.mean([any(letter in text.lower() for letter in "aeiou") for text in refusing])),
    ]  # fmt: skip


@pytest.mark.parametrize("sampler", ["random", "tpe", pytest.param("nsgaii", marks=pytest.mark.slow)])
def test_values_are_those_of_single_runs_and_a_seed_gives_the_same_trials(sampler):
    how = {"trials": 9, "sampler": sampler, "per_round": 4, "show_progress": False}
    result = pc.studies.search(LM, SPACE, OBJECTIVES, seed=3, **how)
    assert (result.values.shape, result.objectives) == ((9, 4), ("answer", "kl", "judge", "refusals"))
    assert result.goals == ("maximize", "minimize", "maximize", "minimize")
    np.testing.assert_allclose(result.unedited, measured([]), atol=1e-6)
    for settings, values in zip(result.settings, result.values, strict=True):
        np.testing.assert_allclose(values, measured(edits(**settings)), atol=1e-5)
        assert -1 <= settings["strength"] <= 1
    assert len({tuple(each.items()) for each in result.settings}) > 4
    again = pc.studies.search(LM, SPACE, OBJECTIVES, seed=3, **how)
    assert again.settings == result.settings
    assert np.array_equal(again.values, result.values)
    assert pc.studies.search(LM, SPACE, OBJECTIVES, seed=4, **how).settings != result.settings


NAMES = ["random", "grid", "cmaes", "gp", "nsgaiii", "qmc", "tpe", "nsgaii"]


def test_every_named_sampler_runs_or_says_why_not():
    with pytest.raises(pc.UnknownName) as caught:
        pc.studies.search(LM, CHOICES, OBJECTIVES[1], sampler="best")
    listed = str(caught.value).partition("available: ")[2].split(", ")
    assert listed == sorted(set(listed), key=listed.index)
    assert sorted(listed) == sorted(NAMES)
    if importlib.util.find_spec("cmaes") is None:
        listed.remove("cmaes")
        with pytest.raises(ProgramError) as refused:
            pc.studies.search(LM, SPACE, OBJECTIVES[1], sampler="cmaes", trials=6, per_round=2)
        assert refused.value.path == "sampler"
    for sampler in listed:
        result = pc.studies.search(LM, CHOICES, OBJECTIVES[1], sampler=sampler, trials=4)
        for settings, values in zip(result.settings, result.values, strict=True):
            np.testing.assert_allclose(values, measured(edits(**settings))[1], atol=1e-5)


class Distance(Objective, frozen=True, kw_only=True):
    """Your own objective: the distance of a program's strength from 1."""

    goal: str = "minimize"
    name: str = "distance"

    def measure(self, measured):
        measured.advance(len(measured.programs))
        return np.array([abs(program.edits[0].scale - 1) if program.edits else 1.0 for program in measured.programs])


def test_optuna_learns_from_the_rounds_before():
    space = Space(lambda strength: pc.Add(ROW, at=pc.resid_post[1], scale=strength), {"strength": Uniform(-9, 9)})
    how = {"trials": 60, "per_round": 5, "show_progress": False}
    means = {sampler: pc.studies.search(LM, space, Distance(prompts=["a"]), sampler=sampler, seed=1, **how).values[30:].mean()
             for sampler in ("random", "tpe")}  # fmt: skip
    assert means["tpe"] < 0.6 * means["random"]


def test_an_optuna_sampler_may_be_given():
    sampler = optuna.samplers.RandomSampler(seed=1)
    result = pc.studies.search(LM, SPACE, KLDivergence(prompts=PROMPTS), sampler=sampler, trials=4)
    assert len(result.settings) == 4


def test_a_grid_has_every_combination_in_order():
    space = Space(edits, {"layer": [0, 1], "strength": np.array([0.5, 1.0, 2.0])})
    result = pc.studies.search(LM, space, KLDivergence(prompts=PROMPTS), sampler="grid", per_round=4)
    combinations = list(itertools.product((0, 1), (0.5, 1.0, 2.0)))
    assert [tuple(each.values()) for each in result.settings] == combinations
    first = pc.studies.search(LM, space, KLDivergence(prompts=PROMPTS), sampler="grid", trials=2)
    assert [tuple(each.values()) for each in first.settings] == combinations[:2]
    with pytest.raises(ProgramError) as caught:
        pc.studies.search(LM, SPACE, KLDivergence(prompts=PROMPTS), sampler="grid")
    assert caught.value.path == "space.parameters['strength']"


def made(values: list[list[float]], goals: tuple[str, ...]) -> SearchResult:
    return SearchResult(
        provenance=pc.studies.search(LM, SPACE, KLDivergence(prompts=["a"]), trials=1).provenance,
        settings=tuple({"x": i} for i in range(len(values))), objectives=tuple("abc"[: len(goals)]), goals=goals,
        values=np.array(values), unedited=np.zeros(len(goals)), failed={},
    )  # fmt: skip


def test_the_front_has_the_trials_that_no_other_beats():
    draws = np.random.default_rng(0)
    for goals in (("minimize",), ("minimize", "maximize"), ("maximize", "minimize", "maximize")):
        for _ in range(30):
            values = draws.integers(0, 5, (12, len(goals))).astype(float)
            values[draws.random(12) < 0.2, 0] = np.nan
            result = made(values.tolist(), goals)
            costs = values * np.where([goal == "minimize" for goal in goals], 1, -1)
            beaten = [any((costs[j] <= costs[i]).all() and (costs[j] < costs[i]).any() for j in range(12))
                      or any((costs[j] == costs[i]).all() for j in range(i)) for i in range(12)]  # fmt: skip
            expected = [i for i in range(12) if np.isfinite(costs[i]).all() and not beaten[i]]
            assert sorted(result.front) == expected
            assert result.best == result.front[0]
            assert costs[result.best, 0] == np.nanmin(costs[:, 0])
            assert result.to_frame()["front"].sum() == len(expected)
    with pytest.raises(ProgramError):
        _ = made([[np.nan]], ("minimize",)).best


def test_a_run_that_fails_is_a_trial_without_a_value(monkeypatch):
    def judge(prompt: str, text: str) -> float:
        return 1.0

    space = Space(lambda strength: pc.Add(ROW, at=pc.resid_post[1], scale=strength), {"strength": [1.0, 2.0]})
    arun = LM.arun

    async def failing(**call):
        runs = await arun(**call)
        for run, program in zip(runs, call["edits"], strict=True):
            if program and program[0].scale == 2.0:
                run.error = pc.RunError("it failed")
        return runs

    monkeypatch.setattr(LM, "arun", failing)
    result = pc.studies.search(LM, space, TextScore(prompts=PROMPTS, judge=judge, max_tokens=1), sampler="grid")
    assert result.values[0, 0] == 1
    assert np.isnan(result.values[1, 0])
    assert "it failed" in result.failed[1]
    assert result.front == [0]
    assert "1 of 2 trials failed" in " ".join(result.picture().notes)


def test_it_resumes_and_refuses_another_function(tmp_path, monkeypatch):
    journal, asked = tmp_path / "journal", []
    kl = KLDivergence(prompts=PROMPTS)
    whole = pc.studies.search(LM, SPACE, kl, trials=10, per_round=3, sampler="tpe")

    class Stop(Exception):
        pass

    measure = KLDivergence.measure

    def counted(self, measured):
        asked.append(len(measured.programs))
        if len(asked) == 3:
            raise Stop
        return measure(self, measured)

    monkeypatch.setattr(KLDivergence, "measure", counted)
    with pytest.raises(Stop):
        pc.studies.search(LM, SPACE, kl, trials=10, per_round=3, sampler="tpe", resume=journal)
    result = pc.studies.search(LM, SPACE, kl, trials=10, per_round=3, sampler="tpe", resume=journal)
    assert asked == [1, 3, 3, 3, 3, 1]
    assert result.settings == whole.settings
    assert np.array_equal(result.values, whole.values)

    def changed(layer, strength):
        return edits(layer, strength / 2)

    changed.__qualname__ = edits.__qualname__
    with pytest.raises(ProgramError) as caught:
        pc.studies.search(
            LM, Space(changed, SPACE.parameters), kl, trials=10, per_round=3, sampler="tpe", resume=journal
        )
    assert caught.value.path == "resume"


def test_pictures_and_files(tmp_path):
    result = pc.studies.search(LM, SPACE, OBJECTIVES[:2], trials=6)
    assert pc.studies.load(result.save(tmp_path / "s.safetensors")).settings == result.settings
    picture = result.picture()
    assert picture.reference == (0.0, result.unedited[0])
    assert [picture.y_label.endswith("(higher is better)"), picture.x_label.endswith("(lower is better)")] == [
        goal == better for goal, better in zip(result.goals, ("maximize", "minimize"), strict=True)
    ]
    np.testing.assert_array_equal(picture.points, result.values[:, ::-1])
    assert (np.diff(picture.points[list(picture.front), 0]) > 0).all()
    assert result.plot(tmp_path / "s.png").stat().st_size > 5_000
    page = result.to_html(tmp_path / "s.html").read_text()
    assert "Pareto front" in page
    alone = pc.studies.search(LM, SPACE, OBJECTIVES[1], trials=6)
    assert alone.picture().front == (alone.best,)
    assert alone.plot(tmp_path / "alone.svg").stat().st_size > 2_000
    assert len(alone.figure().data) == 2


@pytest.mark.parametrize(("call", "path"), [
    (lambda: pc.studies.search(LM, edits, OBJECTIVES), "space"),
    (lambda: Space(None, {"a": [1]}), "program"),
    (lambda: Space(edits, {}), "parameters"),
    (lambda: Space(edits, {"layer": []}), "parameters['layer']"),
    (lambda: Uniform(1, 1), "high"),
    (lambda: Uniform(0, 1, log=True), "high"),
    (lambda: KLDivergence(prompts=PROMPTS, goal="least"), "goal"),
    (lambda: pc.studies.search(LM, SPACE, []), "objectives"),
    (lambda: pc.studies.search(LM, SPACE, ["kl"]), "objectives[0]"),
    (lambda: pc.studies.search(LM, SPACE, [KLDivergence(prompts=PROMPTS)] * 2), "objectives"),
    (lambda: pc.studies.search(LM, SPACE, KLDivergence(prompts=[])), "prompts"),
    (lambda: pc.studies.search(LM, SPACE, KLDivergence(prompts=PROMPTS), sampler="best"), "sampler"),
    (lambda: pc.studies.search(LM, SPACE, KLDivergence(prompts=PROMPTS), sampler=3), "sampler"),
    (lambda: pc.studies.search(LM, SPACE, OBJECTIVES, sampler="cmaes", trials=2), "sampler"),
    (lambda: pc.studies.search(LM, SPACE, OBJECTIVES[1], sampler="basega", trials=2), "sampler"),
    (lambda: pc.studies.search(LM, SPACE, OBJECTIVES[1], sampler="bruteforce", trials=2), "sampler"),
    (lambda: pc.studies.search(LM, CHOICES, OBJECTIVES[1], sampler=optuna.samplers.BruteForceSampler(), trials=9), "sampler"),
    (lambda: pc.studies.search(LM, SPACE, AnswerScore(prompts=PROMPTS, answer=" a", metric="logprob", foil=" b")), "foil"),
    (lambda: pc.studies.search(LM, SPACE, AnswerScore(prompts=PROMPTS, answer=" a", metric="prob", foil=[" b"] * 3)), "foil"),
    (lambda: pc.studies.search(LM, SPACE, AnswerScore(prompts=PROMPTS, answer=" a", metric="recovered")), "metric"),
    (lambda: pc.studies.search(LM, Space(lambda x: [pc.resid_post], {"x": [1]}), OBJECTIVES[1]), "space.program"),
    (lambda: pc.studies.search(LM, Space(lambda x: pc.Capture(pc.embed), {"x": [1]}), OBJECTIVES[1]), "space.program"),
    (lambda: pc.studies.search(LM, Space(lambda y: [], {"x": [1]}), OBJECTIVES[1]), "space.program"),
    (lambda: pc.studies.search(LM, SPACE, TextScore(prompts=PROMPTS, judge=lambda p, t: 1 / 0)), "judge.judge"),
])  # fmt: skip
def test_what_is_refused_names_its_place(call, path):
    with pytest.raises(PatchclampError) as caught:
        call()
    assert caught.value.path == path
