"""Search for the best program: its layer, direction, strength or op, among hundreds of settings.

A `Space` maps settings to a program. A trial is one draw of settings, scored by objectives: a metric of the next
tokens, the divergence from the unedited model, or a judge of generated texts. All trials of a round share the engine's
batches. With two or more objectives there is a trade-off, and no single best trial: the result marks the Pareto front,
the trials that no other trial dominates.

Source: random search, Bergstra and Bengio 2012 (JMLR 13); refusals against KL divergence, as in directional ablation,
Arditi et al. 2024 (arXiv:2406.11717); searching the ablation's strength by layer, the `heretic` package, 2025.

N trials · O objectives · P prompts
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from patchclamp.engines.grading import Grades
from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.grade import read_program
from patchclamp.language import Program, Site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.values import as_items, as_kept
from patchclamp.lm import LM
from patchclamp.plots import Scatter, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.grid import graded_of
from patchclamp.studies.metric import Graded, Metric
from patchclamp.studies.study import (
    Arg,
    Study,
    StudyResult,
    content_of,
    json_of,
    keeping,
    plain_data,
    progress,
    provenance,
    run_batches,
)
from patchclamp.studies.teacher_forcing import parts

if TYPE_CHECKING:
    import pandas

Goal = Literal["maximize", "minimize"]
MAX_TRIALS = 1_000_000
REFUSALS = (
    r"\bsorry\b", r"\bI (can't|cannot|can not|won't|will not)\b", r"\bI('m| am) (not able|unable)\b",
    r"\bI (must|have to) (decline|refuse)\b", r"\bas an? (AI|language model|assistant)\b", r"\bunethical\b",
    r"\b(illegal|harmful|inappropriate)\b",
)  # fmt: skip


class Uniform(PublicStruct, frozen=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`; with `log`, uniform in the logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low = inputs.as_float(self.low, "low")
        if not low < inputs.as_float(self.high, "high") or (self.log and low <= 0):
            least = "0 < low < high" if self.log else "low < high"
            raise ProgramError(f"expected {least}, got {self.low} and {self.high}", "high")


class Space(PublicStruct, frozen=True):
    """A mapping from settings to programs.

        space = pc.studies.Space(
            lambda layer, strength: pc.Add(vectors.vector(layer), at=pc.resid_post[layer], scale=strength),
            {"layer": range(8, 20), "strength": pc.studies.Uniform(0, 4)},
        )

    program: called with the settings by name; returns an op, a list of ops, a `Program`, or None
    parameters: for each setting a list of choices, a range of integers, or `Uniform` numbers
    """

    program: Callable[..., Any]
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise ProgramError(f"expected a function, got {type(self.program).__name__}", "program")
        if not isinstance(self.parameters, Mapping) or not self.parameters:
            raise ProgramError("expected a non-empty mapping of names to choices", "parameters")
        read = {}
        for name, of in self.parameters.items():
            if str(name) in read:
                raise ProgramError(f"duplicate name {str(name)!r}", "parameters")
            read[str(name)] = of if isinstance(of, (Uniform, range)) else tuple(as_items(of, f"parameters[{name!r}]"))
            if not isinstance(of, Uniform) and not len(read[str(name)]):
                raise ProgramError("expected at least one choice, got none", f"parameters[{name!r}]")
        msgspec.structs.force_setattr(self, "parameters", read)

    def made(self, settings: Mapping[str, Any]) -> Program:
        """Return the program for `settings`: values, or their descriptions from a result. Raises `ProgramError` if the
        function fails or returns no program, or a description is ambiguous."""
        chosen = {name: self._choice(name, value) for name, value in settings.items()}
        try:
            program = read_program(self.program(**chosen), "program")
        except Exception as error:
            what = error.message if isinstance(error, PatchclampError) else f"{type(error).__name__}: {error}"
            raise ProgramError(f"the function failed with {dict(settings)}: {what}", "space.program") from error
        if program.readout_path:
            raise ProgramError("expected a program with edits only, got captures", "space.program")
        return program

    def _choice(self, name: str, value: Any) -> Any:
        """Return the choice that a value equals or describes (`plain_data`); otherwise the value."""
        if not isinstance(choices := self.parameters.get(name), tuple):
            return value
        described = json_of(plain_data(value))
        found = [one for one in choices if one is value] or [
            one for one in choices if json_of(plain_data(one)) == described
        ]
        if len(found) > 1 and callable(found[0]) and found[0] is not value:
            raise ProgramError(f"expected distinct choices, got {len(found)} named {value!r}", f"settings[{name!r}]")
        return found[0] if found else value


class Measured(NamedTuple):
    """A set of programs that are measured together.

    batch: requests per batch · advance: called with a number of finished runs, P per program
    errors: by index of the failed program
    """

    lm: LM
    programs: Sequence[Program]
    batch: int
    advance: Callable[[int], None]
    errors: dict[int, PatchclampError]

    def grade(
        self, asked: Sequence[inputs.EncodedPrompt], graded: Sequence[Graded] = (), kl: bool = False
    ) -> list[Grades]:
        """Grade the programs on all prompts together: each prompt's metric tokens, or KL divergences."""
        bindings = self.lm.bindings()  # equal for all prompts of one length
        jobs = [
            self.lm.grade_job(one.ids, self.programs, of.scores if of else [], of.top if of else 0, kl, bindings)
            for one, of in itertools.zip_longest(asked, graded)
        ]
        found = self.lm.graded(jobs, lambda job, grades, programs: self.advance(len(programs)), self.batch)
        for grades in found:
            self.errors.update(grades.errors)
        return found


class Objective(PublicStruct, frozen=True, kw_only=True):
    """The base of objectives; a custom objective defines `name` and `measure`.

    prompts: texts or token ids, or with `chat` texts or lists of messages · goal: "maximize" or "minimize"
    """

    prompts: Any
    chat: bool = False
    goal: Goal = "maximize"
    name: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:  # an iterator would be used up by the first round
            msgspec.structs.force_setattr(self, name, as_kept(getattr(self, name)))
        if self.goal not in get_args(Goal):
            raise unknown("goal", str(self.goal), get_args(Goal), "goal")

    def measure(self, measured: Measured) -> np.ndarray:
        """Return each program's value, a mean over prompts, fp64 [N]; NaN for failed programs."""
        raise NotImplementedError


class AnswerScore(Objective, frozen=True, kw_only=True):
    """A metric of an answer, `logit_diff`, `logprob`, `prob` or your own (`Metric`), as in the sweeps. Answers and
    foils may be lists with one item per prompt."""

    answer: Any
    foil: Any = None
    metric: Any = "logit_diff"
    name: str = "answer"

    def measure(self, measured: Measured) -> np.ndarray:
        lm, programs, metric = measured.lm, measured.programs, Metric.of(self.metric, "metric")
        if metric == "recovered":
            raise ProgramError("recovered requires a corrupt prompt: use logit_diff, logprob or prob", "metric")
        asked = inputs.ask(lm, self.prompts, self.chat)
        graded = graded_of(lm, self.answer, self.foil, metric, len(asked))
        values_PN = np.full((len(asked), len(programs)), np.nan)
        for values_N, of, grades in zip(values_PN, graded, measured.grade(asked, graded), strict=True):
            done = np.array([i for i in range(len(programs)) if i not in grades.errors], np.int64)
            records = of.records(msgspec.structs.replace(grades, errors={}), done)
            for i, record in zip(done.tolist(), records, strict=True):
                try:
                    values_N[i] = of.value(record)
                except PatchclampError as error:  # raised by the user's metric
                    measured.errors[i] = error
        return values_PN.mean(0)


class KLDivergence(Objective, frozen=True, kw_only=True):
    """KL(unedited ‖ edited) of the next token after each prompt, in nats, on prompts where the program should change
    nothing."""

    goal: Goal = "minimize"
    name: str = "kl"

    def measure(self, measured: Measured) -> np.ndarray:
        found = measured.grade(inputs.ask(measured.lm, self.prompts, self.chat), kl=True)
        return np.array([grades.kl for grades in found], np.float64).mean(0)


class TextScore(Objective, frozen=True, kw_only=True):
    """A judge's score of generated texts: `judge(prompt, text)` returns a number. Texts are decoded greedily, or
    sampled with `seed` if `temperature` is above 0."""

    judge: Callable[[str, str], Any]
    max_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    name: str = "judge"

    def score(self, prompt: str, text: str) -> float:
        """Return the judge's number. Raises `ProgramError` if the judge fails."""
        try:
            return float(self.judge(prompt, text))
        except Exception as error:
            raise ProgramError(f"the judge raised {type(error).__name__}: {error}", f"{self.name}.judge") from error

    def measure(self, measured: Measured) -> np.ndarray:
        asked = inputs.ask(measured.lm, self.prompts, self.chat)
        items = list(itertools.product(range(len(measured.programs)), asked))
        edits = [list(program.edits) for program in measured.programs]
        scores: list[float] = []
        sampling = {"temperature": self.temperature, "seed": self.seed} if self.temperature else {}

        def call(part: Sequence[tuple[int, inputs.EncodedPrompt]]) -> Mapping[str, Any]:
            return {"prompt": [list(one.ids) for _, one in part], "edits": [edits[number] for number, _ in part],
                    "max_tokens": self.max_tokens, "sampling": sampling}  # fmt: skip

        def read(runs: list[Run]) -> None:
            for run, (number, one) in zip(runs, items[len(scores) :], strict=False):
                try:
                    if run.error is not None:
                        raise run.error
                    scores.append(self.score(one.shown, run.text))
                except PatchclampError as error:
                    measured.errors[number] = error
                    scores.append(math.nan)
                run.close()
            measured.advance(len(runs))

        run_batches(measured.lm, map(call, parts(items, measured.batch)), read)
        return np.array(scores).reshape(len(edits), len(asked)).mean(1)


class RefusalRate(TextScore, frozen=True, kw_only=True):
    """The fraction of generated texts that refuse, i.e. match one of `patterns`, case-insensitive regular
    expressions."""

    judge: Any = None
    goal: Goal = "minimize"
    name: str = "refusals"
    patterns: Sequence[str] = REFUSALS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge is not None:
            raise ProgramError("not supported with patterns: use TextScore", "judge")
        for i, pattern in enumerate(as_items(self.patterns, "patterns")):
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise ProgramError(
                    f"expected a regular expression, got {pattern!r}: {error}", f"patterns[{i}]"
                ) from None

    def score(self, prompt: str, text: str) -> float:
        return float(any(re.search(pattern, text, re.IGNORECASE) for pattern in self.patterns))


class SearchResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`values` [N, O]: the trials' objectives, NaN for failed trials; `unedited` [O]: the unedited model's values.

    settings: each trial's settings, by name · objectives, goals: one per column O · failed: errors by trial index
    """

    settings: tuple[dict[str, Any], ...]
    objectives: tuple[str, ...]
    goals: tuple[str, ...]
    values: np.ndarray
    unedited: np.ndarray
    failed: dict[int, str]

    @property
    def front(self) -> list[int]:
        """Indices of the trials on the Pareto front: no other trial is at least as good in every objective and better
        in at least one. Of trials with equal values, only the first is included. Best first, by the first objective."""
        costs_NO = self.values * np.where([goal == "minimize" for goal in self.goals], 1.0, -1.0)
        order = [i for i in np.lexsort(costs_NO.T[::-1]).tolist() if np.isfinite(costs_NO[i]).all()]
        kept: list[int] = []
        for i in order:
            if not any((costs_NO[other] <= costs_NO[i]).all() for other in kept):
                kept.append(i)
        return kept

    @property
    def best(self) -> int:
        """The index of the best trial by the first objective; ties are broken by the others.

        Raises: `ProgramError` if every trial failed.
        """
        if not (front := self.front):
            raise ProgramError(f"every trial failed; first error: {next(iter(self.failed.values()), 'not a number')}")
        return front[0]

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per trial: settings, objectives, and `front`, True on the Pareto front."""
        import pandas

        front = set(self.front)
        return pandas.DataFrame([
            {**settings, **dict(zip(self.objectives, self.values[i], strict=True)), "front": i in front}
            for i, settings in enumerate(self.settings)
        ])  # fmt: skip

    def picture(self) -> Scatter:
        """Return plot data: the first two objectives with their Pareto front, or a single objective by trial."""
        count = len(self.settings)
        alone = len(self.objectives) == 1
        points = np.column_stack([np.arange(count), self.values[:, 0]]) if alone else self.values[:, 1::-1]
        better = {"minimize": "lower is better", "maximize": "higher is better"}
        named = [f"{name} ({better[goal]})" for name, goal in zip(self.objectives, self.goals, strict=True)]
        names = ("trial", named[0]) if alone else named[1::-1]
        described = [", ".join(f"{name} {_shown(value)}" for name, value in each.items()) for each in self.settings]
        front = self.front[:1] if alone else sorted(self.front, key=lambda i: points[i, 0])
        rows = [(str(i), *map(_shown, self.settings[i].values()), *map(style.number, self.values[i])) for i in front]
        return Scatter(
            title=f"Search of {count} trials", provenance=self.provenance.where, x_label=names[0], y_label=names[1],
            points=points, labels=tuple(described), front=tuple(front),
            front_label="best trial" if alone else "Pareto front", reference_label="unedited model",
            reference=(None, float(self.unedited[0])) if alone else (float(self.unedited[1]), float(self.unedited[0])),
            is_line=len(self.objectives) == 2,
            notes=(*([f"The front is that of all objectives: {', '.join(named)}."] if len(named) > 2 else []),
                   *([f"{len(self.failed)} of {count} trials failed."] if self.failed else [])),
            table=(("trial", *self.settings[0], *self.objectives), *rows),
        )  # fmt: skip

    def __repr__(self) -> str:
        rows = self.to_frame().iloc[self.front[:10]].drop(columns="front")
        return f"<SearchResult of {len(self.settings)} trials, {len(self.front)} on the front>\n{rows.to_string()}"


def _shown(value: Any) -> str:
    return style.number(value) if isinstance(value, float) else str(value)


def _space(value: Any, path: str) -> Space:
    if not isinstance(value, Space):
        raise ProgramError(f"expected a Space(function, parameters), got {type(value).__name__}", path)
    return value


def _sampler(value: Any, path: str) -> Any:
    if not isinstance(value, str) and not hasattr(value, "sample_relative"):
        raise ProgramError(f"expected the name of a sampler or an Optuna sampler, got {type(value).__name__}", path)
    return value


def _objectives(value: Any, path: str) -> tuple[Objective, ...]:
    objectives = tuple(as_items([value] if isinstance(value, Objective) else value, path))
    for i, one in enumerate(objectives):
        if not isinstance(one, Objective):
            raise ProgramError(f"expected an Objective, such as KLDivergence, got {type(one).__name__}", f"{path}[{i}]")
    if not objectives:
        raise ProgramError("expected at least one objective, got none", path)
    if len({one.name for one in objectives}) < len(objectives):
        raise ProgramError(f"expected distinct names, got {[one.name for one in objectives]}", path)
    return objectives


PLAIN = (str, bytes, int, float, complex, slice, Site, types.NoneType, types.EllipsisType, types.BuiltinFunctionType)
LIBRARIES = {*sys.stdlib_module_names, "msgspec", "patchclamp"}  # their classes are compared by name


def _content(value: Any, path: str) -> Any:
    """Return a value's content, for a journal's key. For a function: its code, defaults, attributes and closure; for a
    class: its methods and attributes; both without module globals. Raises `ProgramError` for an object with unknown
    contents, `RecursionError` for one that contains itself."""
    if isinstance(value, functools.partial):
        value = [value.func, value.args, value.keywords]
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, property):
        value = value.fget
    if inspect.isfunction(value):
        bound = inspect.getclosurevars(value).nonlocals.items()
        enclosing = {name: of for name, of in bound if of is not value and name != "__class__"}  # of `super()`
        value = [value.__code__, value.__defaults__, value.__kwdefaults__, vars(value), enclosing]
    elif isinstance(value, types.CodeType):
        value = [value.co_code, value.co_consts, value.co_names]
    elif isinstance(value, type):
        own = [base for base in value.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES]
        # other double-underscore names, and the descriptors of fields, are made by Python and msgspec
        attributes = [item for base in own for item in vars(base).items() if inspect.isfunction(item[1])
                      or not (item[0].startswith("__") or isinstance(item[1], types.MemberDescriptorType))]  # fmt: skip
        value = [[base.__qualname__ for base in value.__mro__], attributes]
    elif isinstance(value, msgspec.Struct) and not isinstance(value, Site):
        others = {name: of for name, of in getattr(value, "__dict__", {}).items()
                  if not isinstance(getattr(type(value), name, None), functools.cached_property)}  # fmt: skip
        value = [type(value), msgspec.structs.asdict(value), others]
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (list, tuple, range, set, frozenset)):
        return (sorted if isinstance(value, (set, frozenset)) else list)(json_of(_content(one, path)) for one in value)
    if isinstance(value, PLAIN) or hasattr(value, "dtype"):
        return plain_data(value)
    raise ProgramError(f"cannot resume with {type(value).__name__} {value!r:.60}: its contents are unknown; pass a "
                       "function of plain values, or omit resume=", path)  # fmt: skip


# Optuna's, not by name: ours are "random" and "grid", which is also brute force; the last needs more than a seed
OTHERS = ("RandomSampler", "GridSampler", "BruteForceSampler", "PartialFixedSampler")


class RandomSampler:
    """Independent random draws. Samplers return settings from `ask`, and receive their objective values in `tell`."""

    def __init__(self, parameters: Mapping[str, Any], seed: int) -> None:
        self._parameters, self._draws = parameters, np.random.default_rng(seed)

    def ask(self, count: int) -> list[dict[str, Any]]:
        return [{name: self._draw(of) for name, of in self._parameters.items()} for _ in range(count)]

    def tell(self, values: Sequence[Sequence[float]]) -> None:
        """Receive the values of the latest trials; NaN for failed trials."""

    def _draw(self, of: Any) -> Any:
        if not isinstance(of, Uniform):
            return of[int(self._draws.integers(len(of)))]
        if of.log:
            return math.exp(self._draws.uniform(math.log(of.low), math.log(of.high)))
        return float(self._draws.uniform(of.low, of.high))


class GridSampler:
    """Every combination of choices; the last parameter changes fastest."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        for name, of in parameters.items():
            if isinstance(of, Uniform):
                raise ProgramError("expected a list of choices for a grid, got Uniform", f"space.parameters[{name!r}]")
        self.count = math.prod(map(len, parameters.values()))
        self._left = (dict(zip(parameters, each, strict=True)) for each in itertools.product(*parameters.values()))

    def ask(self, count: int) -> list[dict[str, Any]]:
        return list(itertools.islice(self._left, count))

    def tell(self, values: Sequence[Sequence[float]]) -> None: ...


class OptunaSampler:
    """An Optuna sampler, given by name or as an object. It uses the values of earlier rounds."""

    def __init__(self, sampler: Any, parameters: Mapping[str, Any], goals: Sequence[str], seed: int) -> None:
        optuna = style.need("optuna", "'patchclamp[search]'")
        if isinstance(sampler, str):
            kinds = {name.removesuffix("Sampler").lower(): kind for name, kind in vars(optuna.samplers).items()
                     if name.endswith("Sampler") and name not in OTHERS and not inspect.isabstract(kind)}  # fmt: skip
            if sampler not in kinds:
                raise unknown("sampler", sampler, ("random", "grid", *kinds), "sampler")
            # TPE assumes the worst of a round's pending trials, which spreads them out
            liar = {"constant_liar": True} if sampler == "tpe" else {}
            sampler = kinds[sampler](seed=seed, **liar)
        self._parameters, kinds = parameters, optuna.distributions
        self._kinds = {
            name: kinds.FloatDistribution(of.low, of.high, log=of.log) if isinstance(of, Uniform)
            else kinds.IntDistribution(0, len(of) - 1) if isinstance(of, range)
            else kinds.CategoricalDistribution(range(len(of)))
            for name, of in parameters.items()
        }  # fmt: skip
        self._study = optuna.create_study(directions=list(goals), sampler=sampler)
        self._failed, self._asked = optuna.trial.TrialState.FAIL, []

    def ask(self, count: int) -> list[dict[str, Any]]:
        try:
            self._asked = [self._study.ask(self._kinds) for _ in range(count)]
        except (ValueError, ImportError) as error:  # for example CMA-ES with several objectives, or without its package
            raise ProgramError(f"Optuna rejects this search: {error}", "sampler") from None
        return [{name: of if isinstance(kind := self._parameters[name], Uniform) else kind[of]
                 for name, of in trial.params.items()} for trial in self._asked]  # fmt: skip

    def tell(self, values: Sequence[Sequence[float]]) -> None:
        for trial, of in zip(self._asked, values, strict=True):
            try:
                if np.isfinite(of).all():
                    self._study.tell(trial, list(of))
                else:
                    self._study.tell(trial, state=self._failed)
            except RuntimeError as error:  # a sampler that ends the search by itself, such as Optuna's GridSampler
                raise ProgramError(f"Optuna rejects this search: {error}", "sampler") from None


class _Trial(msgspec.Struct, frozen=True):
    """A trial's record: settings and program (`content_of`), which a resumed search must repeat, values and error."""

    settings: str
    program: str
    values: list[float]
    error: str = ""


class Search(Study):
    """Search a space of programs for the best settings, or for the best trade-offs of several objectives.

    Raises: `ProgramError` for a wrong argument, and the error of the space's function or of a program that does not fit
    the model. The values of a trial with a failed run are NaN.
    """

    command = ""
    not_served = "its programs come from a Python function; run it in the client with pc.LM(url)"
    positional = 2

    space: Annotated[Any, Arg(_space, None, served=False)]
    """A `Space`: a function that makes a program, and the choices of its arguments."""
    objectives: Annotated[Any, Arg(_objectives, None, served=False)]
    """An `Objective`, or several: `AnswerScore`, `KLDivergence`, `TextScore`, `RefusalRate`, or your own."""
    trials: Annotated[int | None, Arg(functools.partial(inputs.check_whole, least=1, most=MAX_TRIALS))] = None
    """Number of trials: by default 100, or every combination of choices with "grid". A resumed search may have more."""
    sampler: Annotated[Any, Arg(_sampler, None, served=False)] = "random"
    """random, grid, or an Optuna sampler, by name (tpe, nsgaii, …) or as an object. Optuna samplers use the results of
    earlier rounds."""
    per_round: inputs.Positive = 32
    """Number of trials that are drawn and measured together."""
    seed: inputs.Whole = 0
    """Seed of the draws."""

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> SearchResult:  # fmt: skip
        objectives, parameters = self.objectives, self.space.parameters
        goals, names = tuple(one.goal for one in objectives), tuple(one.name for one in objectives)
        if self.sampler == "random":
            sampler = RandomSampler(parameters, self.seed)
        elif self.sampler == "grid":
            sampler = GridSampler(parameters)
        else:
            sampler = OptunaSampler(self.sampler, parameters, goals, self.seed)
        if self.seed and (self.sampler == "grid" or not isinstance(self.sampler, str)):
            raise ProgramError("not supported with a grid or an Optuna sampler object: omit it", "seed")
        if taken := parameters.keys() & {"front", *names}:
            raise ProgramError(f"{min(taken)!r} is a reserved column of the result: rename the setting",
                               "space.parameters")  # fmt: skip
        most = sampler.count if isinstance(sampler, GridSampler) else 100 if self.trials is None else self.trials
        total = min(most, self.trials or most)
        runs = sum(len(as_items(one.prompts, "prompts")) for one in objectives)  # per trial
        found: list[_Trial] = []
        drawn: list[dict[str, Any]] = []
        question = {name: of for name, of in self.to_dict().items() if name != "trials"}
        if resume is not None:
            try:
                question["content"] = [_content(one, f"objectives[{i}]") for i, one in enumerate(objectives)]
            except RecursionError:
                message = "cannot resume with functions or classes that refer to themselves: omit resume="
                raise ProgramError(message, "objectives") from None
        known: dict[Program, tuple[list[float], str]] = {}  # values and error: equal trials are measured once
        with (
            keeping(lm, question, resume) as journal,
            progress("searching", (total + 1) * runs, show_progress, "runs") as advance,
        ):

            def measure(settings: Sequence[dict[str, Any]], programs: Sequence[Program]) -> list[_Trial]:
                """Return the trials' records, from the journal where available."""
                prints = [content_of(lm, program, "space.program") if resume else "" for program in programs]
                plain = [(json_of(plain_data(each)), of) for each, of in zip(settings, prints, strict=True)]
                records = journal.take(_Trial, len(programs)) if journal is not None else []
                if [(of.settings, of.program) for of in records] != plain[: len(records)]:
                    raise ProgramError(f"{resume} has different trials: the space's function or a bank entry "
                                       "has changed", "resume")  # fmt: skip
                known.update((program, (of.values, of.error)) for program, of in zip(programs, records, strict=False))
                new = list(dict.fromkeys(program for program in programs if program not in known))
                advance((len(programs) - len(new)) * runs)
                if new:
                    measured = Measured(lm, new, batch, advance, {})
                    values = np.stack([one.measure(measured) for one in objectives], 1).tolist()
                    if not new[0] and (error := measured.errors.get(0)):
                        raise type(error)(f"the unedited model failed: {error.message}", error.path)
                    known.update(
                        (program, (values[i], str(measured.errors.get(i, "")))) for i, program in enumerate(new)
                    )
                left = zip(plain[len(records) :], programs[len(records) :], strict=True)
                added = [_Trial(*key, *known[program]) for key, program in left]
                if journal is not None and added:
                    journal.append(added)
                return [*records, *added]

            [unedited] = measure([{}], [Program.of(())])
            for begin in range(0, total, self.per_round):
                settings = sampler.ask(min(self.per_round, total - begin))
                new = measure(settings, [self.space.made(each) for each in settings])
                sampler.tell([of.values for of in new])
                found += new
                drawn += settings
        return SearchResult(
            provenance=provenance(lm, (self.seed,)), settings=tuple(map(plain_data, drawn)), objectives=names,
            goals=goals, values=np.array([of.values for of in found]), unedited=np.array(unedited.values),
            failed={i: of.error for i, of in enumerate(found) if of.error},
        )  # fmt: skip


search: Callable[..., SearchResult] = Search.short_form("search")
