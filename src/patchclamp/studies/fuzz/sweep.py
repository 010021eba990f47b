"""The fuzz sweep: how strong may noise in a model's activations be before its answers change, and how do they change?

Every prompt is run with noise of several strengths and seeds, and each answer is measured against the run without
noise. Agreement says whether it changed, divergence how much the first token's distribution did, perplexity under the
unedited model whether it is still fluent, and a pattern whether the model refused.

Source: Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets"); noise that brings out hidden
behaviour, Tice et al. 2024 (arXiv:2412.01784).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language import Program
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.fuzz.asked import FirstToken, Fuzz, Sampling, pattern_of, seeds_of, strengths_of
from patchclamp.studies.fuzz.prompts import PROMPTS, QUICK_PROMPTS, QUICK_STRENGTHS, REFUSAL, STRENGTHS
from patchclamp.studies.fuzz.result import FuzzAnswer, FuzzSweep
from patchclamp.studies.inputs import Asked, ask, check_batch, checked
from patchclamp.studies.metric import js, kl
from patchclamp.studies.study import Journal, Resumable, Stored, keeping, progress, provenance, recorded_runs
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs

Cell = tuple[int, int, int]  # numbers of prompt, strength and seed
Place = tuple[int, tuple[int, ...]]  # a prompt's number, and an answer's token ids
NAN = float("nan")


@checked
def fuzz_sweep(
    lm: LM,
    prompts: Sequence[Any] | None = None,
    strengths: Sequence[float] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    at: Any = None,
    mode: str = "noise",
    relative: bool = True,
    chat: bool = False,
    max_tokens: int = 32,
    sampling: Mapping[str, Any] | None = None,
    divergence: str | int = "full",
    perplexity: bool = True,
    refusal: str | None = REFUSAL,
    quick: bool = False,
    batch: int = 64,
    show_progress: bool | None = None,
    resume: Resumable | None = None,
) -> FuzzSweep:
    """Runs every prompt with noise of every strength and seed, and measures each answer against the run without noise.

    prompts: texts or token ids, or with `chat` texts or lists of messages; 23 instructions if not given
    strengths: of the noise; 0 is the unedited run once more; 0 and ten from 0.01 to 1.8 if not given
    seeds: of the noise, and of the sampler if `sampling` has a temperature; with neither, one
    at: sites that get `Noise(strength, relative=relative)`, each with its tokens if you like, such as
        `[pc.resid_post[8] @ pc.prompt]`; the embedding, as `fuzz_strength` does it, if not given
    mode: "noise", or "scale": embeddings times 1 − strength
    relative: whether the noise at `at` is times the row's root mean square
    chat: whether prompts are the user's turn of a chat
    divergence: "full", by all logits of the first token; a number k, by the k tokens that are likeliest without noise
        and all others together, which is never more; "none"
    perplexity: whether answers are graded by the unedited model (`studies.teacher_forcing`)
    refusal: a regular expression that finds a refusal in an answer; None for no such measure
    quick: 5 prompts and 7 strengths, where none are given
    batch: runs submitted at a time, at most; two batches are under way
    resume: a file to which answers are appended as they come, and from which an interrupted sweep of the same arguments
        goes on; with divergence="full" it has the first token's distribution of every prompt

    Raises: `ProgramError` and its kind for arguments that cannot be, and the error of any run.
    """
    if quick and prompts is not None and strengths is not None:
        raise ProgramError("it chooses prompts and strengths, and both are given", "quick")
    plan = _Plan(
        asked=ask(lm, (QUICK_PROMPTS if quick else PROMPTS) if prompts is None else prompts, chat),
        strengths=strengths_of(strengths, QUICK_STRENGTHS if quick else STRENGTHS), seeds=seeds_of(seeds),
        fuzz=Fuzz.of(mode, at, relative), sampling=Sampling.of(sampling), first=FirstToken(divergence),
        max_tokens=max_tokens, batch=check_batch(batch),
    )  # fmt: skip
    if mode == "scale" and len(plan.seeds) > 1 and not plan.sampling.drawn:
        raise ProgramError(
            f"scaling has no noise and greedy decoding draws nothing, so all {len(plan.seeds)} seeds would give the "
            "same answers: give one, or a temperature in sampling=", "seeds"
        )  # fmt: skip
    pattern = pattern_of(refusal)
    with keeping(lm, plan.question, resume) as journal:
        runs = _run(lm, plan, journal, show_progress)
        perplexities = _perplexities(lm, plan, runs, journal, show_progress) if perplexity else {}
    return FuzzSweep(
        provenance=provenance(lm, plan.seeds), prompts=tuple(one.shown for one in plan.asked),
        strengths=plan.strengths, noise=plan.fuzz.words, chat=chat, max_tokens=max_tokens,
        sampling=plan.sampling.parameters, divergence=plan.first.words, refusal=refusal,
        **_answers(plan, runs), **_measures(plan, runs, perplexities, pattern),
    )  # fmt: skip


def _answers(plan: _Plan, runs: _Runs) -> dict[str, Any]:
    """The answers by prompt, strength and seed, and the unfuzzed ones."""
    prompts, strengths, seeds = map(range, plan.shape)
    return {
        "answers": tuple(tuple(tuple(runs.answers[p, l, s] for s in seeds) for l in strengths) for p in prompts),  # noqa: E741
        "unfuzzed": tuple(tuple(runs.unfuzzed[p, s] for s in plan.unfuzzed_seeds) for p in prompts),
    }


def _measures(
    plan: _Plan, runs: _Runs, perplexities: dict[Place, float], pattern: re.Pattern[str] | None
) -> dict[str, Any]:
    """The measures of all cells, [P, L, S] each."""

    def grid(value: Callable[[Cell, FuzzAnswer, FuzzAnswer], float]) -> np.ndarray:
        values = [value(cell, runs.answers[cell], runs.own(cell)) for cell in plan.cells]
        return np.array(values, np.float64).reshape(plan.shape)

    graded = [[perplexities.get((p, answer.token_ids), NAN) for answer in row]
              for p, row in enumerate(_answers(plan, runs)["unfuzzed"])]  # fmt: skip
    return {
        "exact": grid(lambda cell, answer, own: answer.token_ids == own.token_ids),
        "prefix": grid(lambda cell, answer, own: prefix_share(answer.token_ids, own.token_ids)),
        "kl": grid(lambda cell, answer, own: runs.divergences[cell][0]),
        "js": grid(lambda cell, answer, own: runs.divergences[cell][1]),
        "perplexity": grid(lambda cell, answer, own: perplexities.get((cell[0], answer.token_ids), NAN)),
        "refused": grid(lambda cell, answer, own: NAN if pattern is None else bool(pattern.search(answer.text))),
        "unfuzzed_perplexity": np.array(graded),
    }


def prefix_share(answer: Sequence[int], other: Sequence[int]) -> float:
    """The tokens before the first that differs, as a share of the longer of two answers: 1 only if they are equal."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, other, strict=False))
    return sum(1 for _ in same) / max(len(answer), len(other), 1)


class _Plan(msgspec.Struct, frozen=True):
    """What is run."""

    asked: list[Asked]
    strengths: tuple[float, ...]
    seeds: tuple[int, ...]
    fuzz: Fuzz
    sampling: Sampling
    first: FirstToken
    max_tokens: int
    batch: int

    @property
    def cells(self) -> list[Cell]:
        prompts, strengths, seeds = map(range, self.shape)
        return list(itertools.product(prompts, strengths, seeds))

    @property
    def question(self) -> dict[str, Any]:
        """All that decides the answers, as plain data."""
        edits = [[Program.of(self.fuzz.edits(strength, seed)).fingerprint for seed in self.seeds]
                 for strength in self.strengths]  # fmt: skip
        return {
            "study": "fuzz_sweep", "prompts": [one.ids for one in self.asked], "edits": edits, "seeds": self.seeds,
            "sampling": self.sampling.parameters, "divergence": self.first.words, "max_tokens": self.max_tokens,
        }  # fmt: skip

    @property
    def shape(self) -> Cell:
        return len(self.asked), len(self.strengths), len(self.seeds)

    @property
    def unfuzzed_seeds(self) -> range:
        """Numbers of the seeds that the unedited run of a prompt has: where nothing is drawn, one is as good as all."""
        return range(len(self.seeds) if self.sampling.drawn else 1)

    def calls(self, batches: Iterable[Sequence[tuple[int, int | None, int]]]) -> Iterator[dict[str, Any]]:
        """The calls that run batches of cells; strength None is no edit."""
        edits = {
            (l, s): self.fuzz.edits(strength, seed)
            for l, strength in enumerate(self.strengths)  # noqa: E741
            for s, seed in enumerate(self.seeds)
        }
        none: list[Any] = []
        for part in batches:
            yield {
                "prompt": [self.asked[p].prompt for p, _, _ in part], "max_tokens": self.max_tokens,
                "edits": [none if l is None else edits[l, s] for _, l, s in part],  # noqa: E741
                "capture": self.first.capture, "score": [self.first.score(p) for p, _, _ in part],
                "sampling": [self.sampling.seeded(self.seeds[s]) for _, _, s in part],
            }  # fmt: skip


class _Own(msgspec.Struct, frozen=True):
    """A run without noise: its answer, and the distribution of its first token."""

    answer: FuzzAnswer
    first: Stored


class _Fuzzed(msgspec.Struct, frozen=True):
    """A run with noise: its answer, and how far the distribution of its first token is from that without."""

    answer: FuzzAnswer
    kl: float
    js: float


class _Runs(msgspec.Struct, frozen=True):
    """What came of the runs, by cell; the unfuzzed ones by prompt and seed."""

    answers: dict[Cell, FuzzAnswer]
    divergences: dict[Cell, tuple[float, float]]
    unfuzzed: dict[tuple[int, int], FuzzAnswer]
    drawn: bool

    def own(self, cell: Cell) -> FuzzAnswer:
        """The unfuzzed answer that a cell is compared with: of its prompt, and where tokens are drawn of its seed."""
        return self.unfuzzed[cell[0], cell[2] if self.drawn else 0]


def _run(lm: LM, plan: _Plan, journal: Journal | None, show: bool | None) -> _Runs:
    """Runs every prompt without noise, and then every cell, as far as the journal does not have them."""
    drawn, cells = plan.sampling.drawn, plan.cells
    own = [(p, None, s) for p in range(len(plan.asked)) for s in plan.unfuzzed_seeds]
    if plan.first.likeliest:
        plan.first.scores = recorded_runs(
            lm, journal, plan.asked, plan.first.likeliest_calls, lambda runs, _: plan.first.likeliest_of(runs),
            list[int], lambda done: None, plan.batch,
        )  # fmt: skip
    with progress("fuzzing", len(own) + len(cells), show) as advance:

        def read_own(runs: Sequence[Run], _: Any) -> list[_Own]:
            return [_Own(_answer(run), Stored.of(plan.first.read(run))) for run in runs]

        def read(runs: Sequence[Run], of: Sequence[Cell]) -> list[_Fuzzed]:
            return [_fuzzed(plan, run, first[p, s if drawn else 0]) for run, (p, _, s) in zip(runs, of, strict=True)]

        owns = recorded_runs(lm, journal, own, plan.calls, read_own, _Own, advance, plan.batch)
        first = {(p, s): of.first.array() for (p, _, s), of in zip(own, owns, strict=True)}
        fuzzed = recorded_runs(lm, journal, cells, plan.calls, read, _Fuzzed, advance, plan.batch)
    return _Runs(
        {cell: of.answer for cell, of in zip(cells, fuzzed, strict=True)},
        {cell: (of.kl, of.js) for cell, of in zip(cells, fuzzed, strict=True)},
        {(p, s): of.answer for (p, _, s), of in zip(own, owns, strict=True)}, drawn,
    )  # fmt: skip


def _fuzzed(plan: _Plan, run: Run, before: np.ndarray) -> _Fuzzed:
    """What is kept of a run with noise; `before`: the distribution of the first token without."""
    after = plan.first.read(run)
    return _Fuzzed(_answer(run), *((kl(before, after), js(before, after)) if len(before) else (NAN, NAN)))


def _answer(run: Run) -> FuzzAnswer:
    return FuzzAnswer(run.text, tuple(run.token_ids))


def _perplexities(lm: LM, plan: _Plan, runs: _Runs, journal: Journal | None, show: bool | None) -> dict[Place, float]:
    """The perplexity under the unedited model of every different answer, by prompt and token ids."""
    answers = [(cell[0], answer) for cell, answer in runs.answers.items()]
    answers += [(place[0], answer) for place, answer in runs.unfuzzed.items()]
    different = list(dict.fromkeys((p, answer.token_ids) for p, answer in answers))
    items = [Forced(plan.asked[p].ids, ids) for p, ids in different]
    with progress("grading", len(items), show) as advance:
        logprobs = forced_logprobs(lm, items, max(plan.batch, 256), advance, journal)
    return {place: float(np.exp(-row.mean())) for place, row in zip(different, logprobs, strict=True)}
