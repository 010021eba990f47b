"""Evaluate variants of a model (programs) on questions in one batch, and compare their scores with the first variant's.

A choice's score is its log-probability after the prompt (teacher forcing), and a variant's answer is the choice with
the highest score. Prompt and choice are tokenised together, as in lm-evaluation-harness. Differences are paired by
question, with bootstrap intervals over questions (Efron and Tibshirani 1993, chapter 13).

M metrics · V variants · N samples
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.grade import read_program
from patchclamp.language import Program
from patchclamp.language.values import as_items
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.studies import inputs
from patchclamp.studies.study import Arg, Study, StudyResult, content_of, keeping, progress, provenance
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs

if TYPE_CHECKING:
    import pandas

METRICS = ("acc", "acc_norm", "logprob")
RESAMPLES = 2000
LEVEL = 95  # percent
FEWSHOT_SEED = 1234  # the default of lm-evaluation-harness


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question. answer: index or text of the correct choice; without choices, the only scored text."""

    prompt: str
    answer: int | str
    choices: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return self.choices or (str(self.answer),)

    @property
    def right(self) -> int:
        """The index of the correct text in `texts`."""
        return self.answer if isinstance(self.answer, int) else self.texts.index(self.answer)


def samples_in(file: str) -> list[Any]:
    """Return the samples in a JSON-lines file, as JSON objects, or the questions of an lm-evaluation-harness task."""
    if not Path(file).suffix and not Path(file).is_file():
        return _task_samples(file)
    found = []
    for number, line in enumerate(inputs.lines_of(Path(file)), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ProgramError(f"invalid JSON in line {number} of {file}: {error}") from None
    return found


def _task_samples(name: str) -> list[dict[str, Any]]:
    """Return a multiple-choice task's questions, with the few-shot examples that `lm_eval` draws. The delimiter before
    a choice is part of the prompt, because lm-evaluation-harness leaves it out of the choice's length."""
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ProgramError(
            f"no file {name!r}, and tasks require lm-eval, which is not installed: pass a JSON-lines file or a "
            "list of samples, install lm-eval, or run lm_eval against `patchclamp serve`"
        ) from None
    try:
        task = TaskManager().load([name])["tasks"][name]
        if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
            raise ValueError("expected multiple choices after one prompt: run lm_eval against `patchclamp serve`")
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests()
        asked = {one.doc_id: one for one in task.instances}  # one request per question
        return [{"prompt": one.args[0] + task.config.target_delimiter, "answer": task.doc_to_target(one.doc),
                 "choices": task.doc_to_choice(one.doc)} for one in asked.values()]  # fmt: skip
    except Exception as error:
        raise ProgramError(f"no file {name!r}; as a task it raised {type(error).__name__}: {error}") from error


def _samples(value: Any, path: str) -> tuple[Sample, ...]:
    try:
        given = samples_in(str(value)) if isinstance(value, (str, Path)) else as_items(value, "")
    except PatchclampError as error:
        raise error.under(path) from None
    found = []
    for i, one in enumerate(given):
        try:
            sample = one if isinstance(one, Sample) else msgspec.convert(one, Sample)
        except msgspec.ValidationError as error:
            raise ProgramError(str(error), f"{path}[{i}]") from None
        if isinstance(sample.answer, str) and sample.answer not in sample.texts:
            raise ProgramError(f"expected one of the choices, got {sample.answer!r}", f"{path}[{i}].answer")
        if isinstance(sample.answer, int) and not 0 <= sample.answer < len(sample.choices):
            raise ProgramError(f"answer {sample.answer} is out of range for {len(sample.choices)} choices",
                               f"{path}[{i}].answer")  # fmt: skip
        if found and bool(sample.choices) != bool(found[0].choices):
            raise ProgramError("expected choices in all samples or none", f"{path}[{i}].choices")
        found.append(sample)
    if not found:
        raise ProgramError("expected at least one sample, got none", path)
    return tuple(found)


def _variants(value: Any, path: str) -> dict[str, Program]:
    programs: Any = value.values() if isinstance(value, Mapping) else as_items(value, path)
    names = list(map(str, value)) if isinstance(value, Mapping) else []
    read: dict[str, Program] = {}
    for i, one in enumerate(programs):
        program = read_program(None if one == () else one, f"{path}[{i}]")
        if program.readout_path:
            raise ProgramError(
                "expected a program with edits only, got captures", f"{path}[{i}].{program.readout_path}"
            )
        name = names[i] if names else f"{i}" if program or "unedited" in read else "unedited"
        if name in read:
            raise ProgramError(f"duplicate name {name!r}", path)
        read[name] = program
    if not read:
        raise ProgramError("expected at least one variant, got none", path)
    return read


class EvaluateResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`values` [M, V, N]: each sample's score by metric: `acc` (1 if the likeliest choice is correct), `acc_norm` (the
    same, with log-probabilities divided by the choices' lengths in characters), `logprob` (the correct choice's, in
    nats). `intervals` [M, V, 2]: 95 % intervals of the mean difference from the first variant."""

    metrics: tuple[str, ...]
    variants: tuple[str, ...]
    samples: tuple[str, ...]
    values: np.ndarray
    intervals: np.ndarray

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per variant and metric: mean, difference from the first variant, and interval bounds."""
        import pandas

        means = self.values.mean(-1)
        return pandas.DataFrame([
            {"variant": variant, "metric": metric, "mean": means[m, v], "difference": means[m, v] - means[m, 0],
             "low": self.intervals[m, v, 0], "high": self.intervals[m, v, 1]}
            for v, variant in enumerate(self.variants) for m, metric in enumerate(self.metrics)
        ])  # fmt: skip

    def picture(self) -> TokenGrid:
        """Return plot data: mean differences from the first variant as colours, and means with intervals as text."""
        means_MV = self.values.mean(-1)
        texts = [[
            style.number(means_MV[m, v]) + (f" ({style.signed(low)} … {style.signed(high)})" if v else "")
            for m, (low, high) in enumerate(self.intervals[:, v])] for v in range(len(self.variants))]  # fmt: skip
        names = [f"{metric}, nats" if metric == "logprob" else metric for metric in self.metrics]
        return TokenGrid(
            title=f"Evaluation of {len(self.variants)} variants on {len(self.samples)} samples",
            provenance=self.provenance.where,
            explained=f"Mean scores. Colour: the difference from {self.variants[0]}; in brackets its {LEVEL} % "
                      "interval over resampled samples.",
            panels=tuple(GridPanel(
                name=name, row_name="variant", column_name="", centre=0.0, rows=self.variants[::-1], columns=("",),
                values=(means_MV[m, ::-1] - means_MV[m, 0])[:, None], texts=tuple((row[m],) for row in texts[::-1]),
            ) for m, name in enumerate(names)),
            table=(("variant", *names), *((name, *row) for name, row in zip(self.variants, texts, strict=True))),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<EvaluateResult of {len(self.samples)} samples>\n{self.to_frame().to_string(index=False)}"


class Evaluate(Study):
    """Score variants of a model on multiple-choice questions or texts, and compare them with the first.

    Raises: `TokensError` for a choice without tokens, and the error of any run.
    """

    command = "evaluate"
    positional = 2
    not_served = "its programs come from the client; run it in the client with pc.LM(url)"

    samples: Annotated[Any, Arg(_samples, samples_in)]
    """A list, or a JSON-lines file, of objects with a prompt, choices, and an answer (the correct choice's index or
    text). Without choices, only the answer's log-probability is measured. If lm-evaluation-harness is installed, also
    the name of one of its multiple-choice tasks."""
    variants: Annotated[Any, Arg(_variants, inputs.edits_in, many=True, option="variant")] = ((),)
    """Programs: a list, or a mapping by name; None is the unedited model. Each is compared with the first. On the
    command line: JSON, a .json file, or [] for the unedited model."""
    chat: inputs.Flag = False
    """Send each prompt as the user turn of a chat; a choice is then the start of the reply, tokenised alone."""
    seed: inputs.Whole = 0
    """Seed of the bootstrap over samples."""

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> EvaluateResult:  # fmt: skip
        samples: tuple[Sample, ...] = self.samples
        items: list[Forced] = []
        for i, sample in enumerate(samples):
            try:
                texts = [_tokens(lm, sample.prompt, text, self.chat) for text in sample.texts]
            except PatchclampError as error:
                raise error.under(f"samples[{i}]") from None
            items += [Forced(*both, program.edits, path=f"variants[{v}]")
                      for v, program in enumerate(self.variants.values()) for both in texts]  # fmt: skip
        contents = [
            content_of(lm, program, f"variants[{v}]") for v, program in enumerate(self.variants.values()) if resume
        ]
        with (
            keeping(lm, {**self.to_dict(), "contents": contents}, resume) as journal,
            progress("evaluating", len(items), show_progress, "choices") as advance,
        ):
            found = iter(forced_logprobs(lm, items, batch, advance, journal))
        metrics = METRICS if samples[0].choices else METRICS[-1:]
        values = np.array([
            [_scores(sample, [float(next(found).sum()) for _ in sample.texts])[-len(metrics) :] for _ in self.variants]
            for sample in samples
        ]).transpose(2, 1, 0)  # fmt: skip
        draw = np.random.default_rng(self.seed).integers(len(samples), size=(RESAMPLES, len(samples)))
        means = (values - values[:, :1])[:, :, draw].mean(-1)  # [M, V, resamples]
        ends = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2], axis=-1)
        return EvaluateResult(
            provenance=provenance(lm, (self.seed,)), metrics=metrics, variants=tuple(self.variants),
            samples=tuple(sample.prompt for sample in samples), values=values, intervals=np.moveaxis(ends, 0, -1),
        )  # fmt: skip


def _tokens(lm: LM, prompt: str, text: str, chat: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokenise a prompt and its continuation jointly; spaces between them belong to the continuation. With `chat`,
    tokenise a user turn and, separately, the start of the reply."""
    known = lm.tokens(messages=[{"role": "user", "content": prompt}]) if chat else lm.tokenizer.encode(prompt.rstrip())
    count, ids = len(known), known + lm.tokenizer.bare(text) if chat else lm.tokenizer.encode(prompt + text)
    if not 0 < count < len(ids):
        raise TokensError(f"expected at least one token before {text!r} and one in it, got {count}, {len(ids) - count}")
    return tuple(ids[:count]), tuple(ids[count:])


def _scores(sample: Sample, logprobs: Sequence[float]) -> tuple[float, float, float]:
    """Return the sample's score in each metric, given its texts' log-probabilities."""
    by_length = [logprob / max(len(text), 1) for logprob, text in zip(logprobs, sample.texts, strict=True)]
    right = [float(np.argmax(each) == sample.right) for each in (logprobs, by_length)]
    return right[0], right[1], logprobs[sample.right if sample.choices else 0]


evaluate: Callable[..., EvaluateResult] = Evaluate.short_form("evaluate")
