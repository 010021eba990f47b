"""Searches of programs with code, what a search resumes, and arguments that it would ignore."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import KLDivergence, RefusalRate, Search, Space, TextScore
from patchclamp.studies.study import Reporter

PROMPTS = [[11, 12, 13], [14, 15, 16, 17]]
SETTINGS = {"factor": [1.0, 2.0, 3.0]}


@pytest.fixture(scope="module")
def lm():
    return pc.LM("fake", allow_code=True)


def scaled(factor: float) -> pc.Scale:
    return pc.Scale(factor, at=pc.resid_post[0])


def test_programs_with_code_are_searched_and_not_resumed(lm, tmp_path):
    coded = Space(lambda factor: pc.Apply(lambda h: h * factor, at=pc.resid_post[0]), SETTINGS)
    wanted = {"objectives": KLDivergence(prompts=PROMPTS), "sampler": "grid"}
    found, plain = (Search(space=space, **wanted).run(lm).values for space in (coded, Space(scaled, SETTINGS)))
    assert np.ptp(plain) > 0
    assert np.allclose(found, plain)
    with pytest.raises(pc.ProgramError) as raised:
        Search(space=coded, **wanted).run(lm, resume=tmp_path / "a.journal")
    assert raised.value.path == "space.program.edits[0]"


def test_values_of_another_judge_are_not_resumed(lm, tmp_path):
    """Two functions of one name."""
    judges = [
        lambda prompt, text: 1.0,
        lambda prompt, text: 2.0,
    ]
    one, other = (
        Search(space=Space(scaled, SETTINGS), objectives=TextScore(prompts=PROMPTS, judge=judge), sampler="grid")
        for judge in judges
    )
    file = tmp_path / "a.journal"
    assert one.run(lm, resume=file).values.tolist() == one.run(lm, resume=file).values.tolist() == [[1.0]] * 3
    with pytest.raises(pc.ProgramError) as raised:
        other.run(lm, resume=file)
    assert raised.value.path == "resume"
    assert other.run(lm).values.tolist() == [[2.0]] * 3


class Weighted(pc.studies.Objective, frozen=True, kw_only=True):
    """Your own objective, with a function and numbers."""

    weigh: object = None
    weights: object = (1.0,)
    name: str = "weighted"

    def measure(self, measured):
        return np.full(len(measured.programs), self.weigh(self.weights[0]))


class Judge:
    def __init__(self, value):
        self.value = value

    def __call__(self, prompt, text):
        return self.value

    def method(self, prompt, text):
        return self.value


def constant(prompt, text, value=0.0):
    return value


def asked(prompt, text, judge):
    return judge(prompt, text)


def closed(value):
    return lambda prompt, text: value


def times(value):
    return lambda number: number * value


def through(judge):
    return lambda prompt, text: judge(prompt, text)


def judged(judge):
    return TextScore(prompts=PROMPTS, judge=judge, max_tokens=1)


def metric(value):
    return pc.studies.AnswerScore(
        prompts=PROMPTS, answer=5, metric=pc.studies.Metric(lambda logprobs: value, name="own")
    )


def own_class(value, form):
    """An objective's class that has the value as an attribute, in a property, or in the closure of a method."""

    class Attribute(pc.studies.Objective, frozen=True, kw_only=True):
        weight = value  # without an annotation: not a field
        name: str = "own"

        def measure(self, measured):
            return np.full(len(measured.programs), self.weight)

    class Attribute2(Attribute, frozen=True, kw_only=True):
        pass

    class Closure(pc.studies.Objective, frozen=True, kw_only=True):
        name: str = "own"

        def measure(self, measured):
            return np.full(len(measured.programs), value)

    class Property(Attribute, frozen=True, kw_only=True):
        weight = property(lambda self: value)

    class Static(Attribute, frozen=True, kw_only=True):
        weight = 1.0
        weigh = staticmethod(lambda: value)

        def measure(self, measured):
            return super().measure(measured) * self.weigh()

    class Later(Attribute, frozen=True, kw_only=True, dict=True):
        weight = 1.0

        def measure(self, measured):
            return super().measure(measured) * vars(self)["later"]

    kinds = Attribute, Attribute2, Closure, Property, Static, Later
    made = {of.__name__: of for of in kinds}[form](prompts=PROMPTS)
    if form == "Later":
        vars(made)["later"] = value
    return made


def marked(value):
    def judge(prompt, text):
        return judge.value

    judge.value = value
    return judge


@pytest.mark.parametrize("objective", [
    *(functools.partial(own_class, form=form) for form in ("Attribute", "Attribute2", "Closure", "Property", "Static", "Later")),
    lambda value: judged(functools.partial(marked(value))),
    lambda value: judged(functools.partial(constant, value=value)),
    lambda value: judged(closed(value)),
    lambda value: judged([lambda prompt, text: 1.0, lambda prompt, text: 2.0][int(value) - 1]),
    lambda value: Weighted(prompts=PROMPTS, weigh=abs, weights=[value]),
    lambda value: Weighted(prompts=PROMPTS, weigh=times(value)),
    metric,
])  # fmt: skip
def test_values_of_functions_with_other_contents_are_not_resumed(lm, tmp_path, objective):
    def run(value, **how):
        return Search(space=Space(scaled, SETTINGS), objectives=objective(value), sampler="grid").run(lm, **how).values

    file = tmp_path / "a.journal"
    assert run(1.0, resume=file).tolist() == run(1.0, resume=file).tolist() == [[1.0]] * 3
    assert run(2.0).tolist() == [[2.0]] * 3
    with pytest.raises(pc.ProgramError) as raised:
        run(2.0, resume=file)
    assert raised.value.path == "resume"


def test_an_objective_that_refers_to_itself_is_not_resumed(lm, tmp_path):
    class Own(KLDivergence, frozen=True, kw_only=True):
        def measure(self, measured):
            assert isinstance(self, Own)
            return super().measure(measured) * 0 + 1

    search = Search(space=Space(scaled, SETTINGS), objectives=Own(prompts=PROMPTS), sampler="grid")
    assert search.run(lm).values.tolist() == [[1.0]] * 3
    with pytest.raises(pc.ProgramError) as raised:
        search.run(lm, resume=tmp_path / "a.journal")
    assert raised.value.path == "objectives"


@pytest.mark.parametrize("judge", [
    Judge(1.0), Judge(1.0).method, through(Judge(1.0)), functools.partial(asked, judge=Judge(1.0)),
])  # fmt: skip
def test_objects_of_unknown_contents_are_not_resumed(lm, tmp_path, judge):
    search = Search(space=Space(scaled, SETTINGS), objectives=judged(judge), sampler="grid")
    assert search.run(lm).values.tolist() == [[1.0]] * 3
    with pytest.raises(pc.ProgramError) as raised:
        search.run(lm, resume=tmp_path / "a.journal")
    assert raised.value.path == "objectives[0]"
    assert not (tmp_path / "a.journal").exists()


@pytest.mark.parametrize(("before", "after", "edit"), [
    ([scaled(2.0)], [scaled(3.0)], lambda factor: pc.Use("entry")),
    (np.ones(16), np.arange(16.0), lambda factor: pc.Add("entry", at=pc.resid_post[0], scale=factor)),
])  # fmt: skip
def test_values_of_other_bank_entries_are_not_resumed(tmp_path, before, after, edit):
    lm, file = pc.LM("fake"), tmp_path / "a.journal"
    search = Search(space=Space(edit, SETTINGS), objectives=KLDivergence(prompts=PROMPTS), sampler="grid")
    lm.bank["entry"] = before
    first = search.run(lm, resume=file).values
    assert np.array_equal(search.run(lm, resume=file).values, first)
    lm.bank["entry"] = after
    assert not np.array_equal(search.run(lm).values, first)
    with pytest.raises(pc.ProgramError) as raised:
        search.run(lm, resume=file)
    assert raised.value.path == "resume"


CHOICES = {
    "direction": [np.arange(16.0), np.linspace(-1, 1, 16)], "site": [pc.resid_post[0], pc.mlp_out[1]],
    "op": [pc.Zero(pc.mlp_out[0]), pc.Scale(0.5, pc.mlp_out[2])], "kind": [pc.Add, pc.Replace],
    "layers": [(0, 1), (1, 2)], "named": ["a", None],
}  # fmt: skip


def test_the_settings_of_a_trial_make_its_program_again(lm, tmp_path):
    made = []

    def program(direction, site, op, kind, layers, named):
        assert isinstance(layers, tuple)
        made.append([kind(direction, at=site), op, *(pc.Scale(2.0, pc.attn_out[layer]) for layer in layers)])
        return made[-1] if named else made[-1][::-1]

    space = Space(program, CHOICES)
    found = Search(space=space, objectives=KLDivergence(prompts=PROMPTS), trials=12, seed=2).run(lm)
    wanted = [pc.Program.of(edits if each["named"] else edits[::-1])
              for edits, each in zip(made, found.settings, strict=True)]  # fmt: skip
    assert len(set(wanted)) > 8
    loaded = pc.studies.load(found.save(tmp_path / "search.safetensors"))
    for result in (found, loaded):
        assert [space.made(each) for each in result.settings] == wanted
    with pytest.raises(pc.ProgramError) as raised:
        Space(lambda f: f(), {"f": [lambda: scaled(1.0), lambda: scaled(2.0)]}).made(
            {"f": "test_the_settings_of_a_trial_make_its_program_again.<locals>.<lambda>"}
        )
    assert raised.value.path == "settings['f']"
    assert Space(scaled, SETTINGS).made({"factor": 9.0}) == pc.Program.of(scaled(9.0))  # any other value, as it is


def test_iterators_are_read_once_and_kept(lm):
    plain = [
        KLDivergence(prompts=PROMPTS), judged(closed(1.0)), RefusalRate(prompts=PROMPTS, patterns=["a", "e"], max_tokens=2),
        pc.studies.AnswerScore(prompts=PROMPTS, answer=[5, 6], foil=[7, 8]),
    ]  # fmt: skip
    once = [
        KLDivergence(prompts=iter(PROMPTS)), TextScore(prompts=iter(PROMPTS), judge=closed(1.0), max_tokens=1),
        RefusalRate(prompts=iter(PROMPTS), patterns=(letter for letter in "ae"), max_tokens=2),
        pc.studies.AnswerScore(prompts=iter(PROMPTS), answer=iter([5, 6]), foil=iter([7, 8])),
    ]  # fmt: skip
    wanted, found, again = (
        Search(space=Space(scaled, SETTINGS), objectives=each, sampler="grid", per_round=2).run(lm).values
        for each in (plain, once, once)
    )
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(again, wanted)
    assert (np.ptp(wanted, 0) > 0).sum() >= 2


def test_names_of_settings_are_distinct():
    with pytest.raises(pc.ProgramError) as raised:
        Space(scaled, {1: [1.0], "1": [2.0]})
    assert raised.value.path == "parameters"


LOG: list[int] = []


class Counted(KLDivergence, frozen=True, kw_only=True):
    """Counts the programs that are measured."""

    def measure(self, measured):
        LOG.append(len(measured.programs))
        return super().measure(measured)


def test_equal_trials_are_measured_once(lm, tmp_path):
    space = Space(lambda factor, sign: scaled(factor), {"factor": [1.0, 2.0, 3.0], "sign": [0, 1, 2, 3]})
    advanced = []
    LOG.clear()

    class Progress(Reporter):
        def begin(self, what, total):
            advanced.append(-total)

        def advance(self, done):
            advanced.append(done)

    search = Search(space=space, objectives=Counted(prompts=PROMPTS), trials=30, per_round=5)
    found = search.run(lm, show_progress=Progress())
    assert sum(LOG) == 4
    assert not sum(advanced)
    each = {factor: lm.grade(PROMPTS, [[scaled(factor)]] * 2, kl=True) for factor in SETTINGS["factor"]}
    expected = [np.mean([grades.kl[0] for grades in each[settings["factor"]]]) for settings in found.settings]
    np.testing.assert_allclose(found.values[:, 0], expected, atol=1e-6)
    assert len({tuple(one.values()) for one in found.settings}) > 6


def test_a_judge_that_fails_on_a_text_fails_its_trial(lm):
    """The rest of the round keeps its values; a metric of yours likewise."""
    calls = []

    def judge(prompt, text):
        calls.append(text)
        return 1 / (len(calls) != 4)

    def own(logprobs):
        calls.append("")
        return 1.0 if len(calls) != 4 else float("nan")

    # the judge is called by trial, and the metric by prompt
    for failed, objective in enumerate((judged(judge), pc.studies.AnswerScore(prompts=PROMPTS, answer=5, metric=own))):
        calls.clear()
        found = Search(space=Space(scaled, SETTINGS), objectives=objective, sampler="grid").run(lm)
        assert len(calls) == 8
        assert [*found.failed] == [failed]
        assert np.isnan(found.values[failed, 0])
        assert (np.delete(found.values, failed) == 1).all()
        assert found.best == 1 - failed


@pytest.mark.parametrize("sampler", ["random", "tpe", "nsgaii"])
def test_a_search_resumes_with_more_trials_or_fewer(lm, tmp_path, sampler):
    space = Space(scaled, {"factor": pc.studies.Uniform(0.5, 2)})

    def run(trials, **how):
        wanted = {"objectives": Counted(prompts=PROMPTS), "per_round": 4, "sampler": sampler}
        return Search(space=space, trials=trials, **wanted).run(lm, **how)

    whole = run(13)
    file = tmp_path / "a.journal"
    LOG.clear()
    assert run(6, resume=file).settings == whole.settings[:6]
    assert sum(LOG) == 7
    more = run(13, resume=file)
    assert sum(LOG) == 14
    assert more.settings == whole.settings
    np.testing.assert_allclose(more.values, whole.values, atol=1e-6)
    assert run(5, resume=file).settings == whole.settings[:5]
    assert sum(LOG) == 14


def test_a_search_that_failed_in_part_resumes_to_the_same(lm, tmp_path):
    """Trials whose edits overflow have no values."""
    wanted = {
        "space": Space(scaled, {"factor": [1.0, 1e38, 2.0]}), "sampler": "grid", "per_round": 2,
        "objectives": [KLDivergence(prompts=PROMPTS), RefusalRate(prompts=PROMPTS, max_tokens=2)],
    }  # fmt: skip
    first, again = (Search(**wanted).run(lm, resume=tmp_path / "a.journal") for _ in range(2))
    assert np.isnan(first.values).any(1).tolist() == [False, True, False]
    assert np.array_equal(first.values, again.values, equal_nan=True)
    assert first.failed == again.failed
    assert [*first.failed] == [1]
    assert 1 not in first.front


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("judge", lambda: RefusalRate(prompts=PROMPTS, judge=lambda prompt, text: 1.0)),
        ("patterns", lambda: RefusalRate(prompts=PROMPTS, patterns="sorry")),
        ("patterns[1]", lambda: RefusalRate(prompts=PROMPTS, patterns=["sorry", "("])),
        ("seed", lambda: Search(space=Space(scaled, SETTINGS), objectives=KLDivergence(prompts=PROMPTS),
                                sampler="grid", seed=1).run(pc.LM("fake"))),
        ("space.parameters", lambda: Search(space=Space(lambda kl: scaled(kl), {"kl": [1.0]}), sampler="grid",
                                            objectives=KLDivergence(prompts=PROMPTS)).run(pc.LM("fake"))),
    ],
)  # fmt: skip
def test_no_argument_is_ignored(path, wrong):
    with pytest.raises(pc.ProgramError) as raised:
        wrong()
    assert raised.value.path == path
