"""The causal trace: through which states does a fact about a subject reach the answer?

Noise on the embeddings of the subject's tokens destroys the answer. Then one state at a time (a site, a layer, a
position, or a window of layers) is restored to its value without the noise. If the answer returns, the fact passes
through that state.

Source: Meng et al. 2022 (arXiv:2202.05262), section 2.1 and appendix B.1: noise of three times the standard deviation
of the subjects' embeddings, 10 noise seeds, windows of 10 layers for attention and MLP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import Noise, Op, Site
from patchclamp.language.tokens import TextSpan, every, parse_tokens
from patchclamp.language.values import as_items
from patchclamp.lm import LM
from patchclamp.studies.grid import (
    Filled,
    Finished,
    Listener,
    Place,
    Trial,
    Unit,
    announce,
    carrying,
    fill,
    graded_of,
    one_each,
    planned,
    reruns_for,
    teller,
    with_values,
)
from patchclamp.studies.inputs import (
    Answers,
    Layers,
    Positions,
    Progress,
    Prompts,
    ResumeFile,
    Seeds,
    Sites,
    Std,
    Subject,
    Text,
    check_whole,
)
from patchclamp.studies.metric import Graded, text_of
from patchclamp.studies.sources import FromRun, Mixing, captured_runs
from patchclamp.studies.study import Study, json_of, provenance
from patchclamp.studies.sweep_result import (
    CausalTraceResult,
    Column,
    Pair,
    Row,
    Words,
    chosen_positions,
    columns_of,
    listed,
    rows_of,
    same_columns,
    words_of,
)

MAX_SEEDS = 10_000
TIMES = 3.0  # standard deviations of the subjects' embeddings


class _Traced(NamedTuple):
    """A prompt with the positions of its subject, the graded tokens and the columns."""

    words: Words
    subject: tuple[int, ...]
    graded: Graded
    columns: tuple[Column, ...]


class CausalTrace(Study):
    """Noise the subject, restore every site, layer and token, and show where the answer comes back: a causal trace.

    Values are means over the noise seeds; `each` of the result has the single values, prompts first, then seeds. The
    interval and the p-values are over prompts; for a single prompt the interval is over its seeds.

    Raises: `TokensError` for a subject that is not in its prompt, `ProgramError` for a wrong argument, and the error of
    any run.
    """

    command = "causal-trace"

    prompt: Prompts
    """Prompt, as text or token ids, or a list of prompts."""
    subject: Subject
    """Text in the prompt whose embeddings are noised, or a selection; one per prompt."""
    answer: Answers
    """Expected answer, with its leading space: text, a token id, or a list of ids, graded exactly. One for all prompts,
    or a list with one per prompt."""
    foil: Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    sites: Sites = ("resid_post",)
    """Sites to restore: resid_post, attn_out, mlp_out."""
    layers: Layers = None
    """Layers of sites without an index: all by default, a number, a list, or a range such as "0:12"."""
    positions: Positions = None
    """Columns of the grid; one per token by default."""
    metric: Text = "prob"
    """prob, logprob, logit_diff or recovered (0 is the noised run, 1 the clean one)."""
    window: int = 1
    """Adjacent layers restored together; 10 in the paper for attn_out and mlp_out."""
    group: int | None = None
    """Heads, neurons or experts per row: 1 for each head; the whole site by default."""
    std: Std = None
    """Standard deviation of the noise; by default 3 times that of the embeddings of all subject tokens."""
    seeds: Seeds = 10
    """Seeds of the noise: a count (0, 1, …), or a list."""

    def _run(
        self,
        lm: LM,
        *,
        batch: int = 512,
        show_progress: Progress = None,
        listener: Listener | None = None,
        resume: ResumeFile = None,
    ) -> CausalTraceResult:
        traced = _read(lm, self.prompt, self.subject, self.answer, self.foil, self.metric, self.positions)
        rows = rows_of(lm, self.sites, self.layers, self.group, self.window)
        if any(row.site == "logits" for row in rows):
            raise ProgramError("the clean logits are the clean answer: there is nothing to trace", "sites")
        numbers = _seeds(self.seeds)
        columns = same_columns([of.columns for of in traced])
        announce(show_progress, rows, columns, len(traced) * len(numbers))
        counts = [len(rows) * len(columns)] * (len(traced) * len(numbers))
        question = {
            "study": "causal_trace", "prompts": [[of.words.ids, of.subject] for of in traced],
            "graded": msgspec.to_builtins([of.graded for of in traced]), "rows": msgspec.to_builtins(rows),
            "columns": msgspec.to_builtins([of.columns for of in traced]), "std": self.std, "seeds": numbers,
        }  # fmt: skip
        with carrying(
            lm, "tracing", planned(counts, reruns_for(len(counts))), question, batch, show_progress, resume
        ) as cells:
            noise = cells.once(1, lambda: [embedding_std(lm, traced) * TIMES if self.std is None else self.std])[0]
            values = cells.graded(_unpatched(traced, noise, numbers))
            both = np.array(values).reshape(len(traced), 1 + len(numbers))  # clean, then noised by seed
            begun, bases, scales = _begun(lm, self.metric, traced, rows, columns, both, noise, numbers)
            begun = msgspec.structs.replace(begun, source="clean activations", question=json_of(question))
            if listener is not None:
                listener.start(begun, counts[0])
            finished = Finished(counts[0], len(counts), None if listener is None else teller(listener, rows, columns))
            filled = _restored(lm, cells, traced, rows, both, scales, noise, numbers, finished)
        each = filled.values.reshape(len(counts), len(rows), len(columns))
        return with_values(begun, Filled(each, filled.floor), bases, cells.computed, numbers[0], len(numbers))


causal_trace = CausalTrace.short_form("causal_trace")


def embedding_std(lm: LM, traced: Sequence[_Traced]) -> float:
    """The standard deviation of all numbers in the embeddings of the subjects' tokens."""
    runs = captured_runs(lm, [of.words.ids for of in traced], [Site("embed")])
    rows = [np.asarray(run["embed"], np.float64)[list(of.subject)] for run, of in zip(runs, traced, strict=True)]
    for run in runs:
        run.close()
    return float(np.concatenate(rows).std())


def _read(lm: LM, prompt: Any, subject: Any, answer: Any, foil: Any, metric: str, positions: Any) -> list[_Traced]:
    prompts = list(prompt) if listed(prompt) else [prompt]
    if not prompts:
        raise ProgramError("at least one prompt is needed", "prompt")
    graded = graded_of(lm, one_each(answer, len(prompts), "answer"), one_each(foil, len(prompts), "foil"), metric)
    subjects = one_each(subject, len(prompts), "subject")
    traced = []
    for i, one in enumerate(prompts):
        where = f"[{i}]" if len(prompts) > 1 else ""
        words = words_of(lm, one, f"prompt{where}")
        chosen = chosen_positions(lm, words, _selection(subjects[i], f"subject{where}"), f"subject{where}")
        columns = columns_of(
            lm, words, range(len(words.ids)), positions, i, len(prompts), lambda label, at, path: Column(label, at, at)
        )
        traced.append(_Traced(words, chosen, graded[i], tuple(columns)))
    return traced


def _selection(subject: Any, path: str) -> Any:
    """A selection; text that does not parse as one is a span."""
    if not isinstance(subject, str):
        return subject
    with contextlib.suppress(PatchclampError):
        return parse_tokens(subject)
    try:
        return TextSpan(subject)
    except PatchclampError as error:
        raise error.under(path) from None


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if is_token_id(seeds):
        return tuple(range(check_whole(seeds, "seeds", 1, MAX_SEEDS)))
    numbers = tuple(check_whole(seed, "seeds") for seed in as_items(seeds, "seeds"))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ProgramError(f"at least one seed is needed, and none twice, not {seeds!r}", "seeds")
    return numbers


def _noise(of: _Traced, std: float, seed: int) -> tuple[Op, ...]:
    return (Noise(std, at="embed", tokens=every[of.subject], seed=seed),)


def _unpatched(traced: Sequence[_Traced], std: float, seeds: tuple[int, ...]) -> list[Trial]:
    """Every prompt, clean and then noised by each seed."""
    noises = [(of, edits) for of in traced for edits in ((), *(_noise(of, std, seed) for seed in seeds))]
    return [Trial(of.words.ids, edits, of.graded) for of, edits in noises]


def _begun(
    lm: LM, metric: str, traced: Sequence[_Traced], rows: Sequence[Row], columns: tuple[Column, ...], both: np.ndarray,
    std: float, seeds: tuple[int, ...],
) -> tuple[CausalTraceResult, list[float], list[tuple[float, float]]]:  # fmt: skip
    """The result before any cell is restored, the noised metric of every unit, and each prompt's (offset, factor)."""
    pairs, bases, scales = [], [], []
    for of, values in zip(traced, both.tolist(), strict=True):
        offset, factor = of.graded.scale(values[0], float(np.mean(values[1:])))
        clean, *noised = [(value - offset) * factor for value in values]
        text, tokens = of.words.text, of.words.tokens
        pairs.append(Pair(
            clean_prompt=text, corrupt_prompt=text, clean_tokens=tokens, corrupt_tokens=tokens,
            answer=text_of(lm, of.graded.answer) or "", foil=text_of(lm, of.graded.foil), clean=clean,
            corrupt=float(np.mean(noised)), columns=of.columns, alignment=tuple((p, p) for p in range(len(tokens))),
            answer_ids=of.graded.answer, foil_ids=of.graded.foil,
        ))  # fmt: skip
        bases += noised
        scales.append((offset, factor))
    empty = np.full((len(bases), len(rows), len(columns)), np.nan)
    begun = CausalTraceResult(
        provenance=provenance(lm, seeds), metric=metric, pairs=tuple(pairs), rows=tuple(rows), columns=columns,
        values=empty[0], each=empty, clean=float(np.mean([pair.clean for pair in pairs])),
        corrupt=float(np.mean(bases)),
        noise_floor=np.nan, subjects=tuple(of.subject for of in traced), std=std,
    )  # fmt: skip
    return begun, bases, scales


def _restored(
    lm: LM, cells: Any, traced: Sequence[_Traced], rows: Sequence[Row], both: np.ndarray,
    scales: Sequence[tuple[float, float]], std: float, seeds: tuple[int, ...], finished: Finished,
) -> Filled:  # fmt: skip
    """Every cell with all seeds, prompt by prompt, so that only one prompt's captures are held at a time."""
    sites = list(dict.fromkeys(site for row in rows for site in row.sites))
    values, floors = [], []
    for i, of in enumerate(traced):
        opened: list[Any] = []

        def writer(of: _Traced = of, opened: list[Any] = opened) -> FromRun:
            if not opened:
                opened.extend(captured_runs(lm, [of.words.ids], sites))
            return FromRun(opened[0], Mixing())

        units = [
            Unit(of.words.ids, _noise(of, std, seed), of.graded, "corrupt", base, *scales[i], writer, i)
            for seed, base in zip(seeds, both[i, 1:].tolist(), strict=True)
        ]
        places = [
            Place(row, [column] * len(units), (r, p))
            for r, row in enumerate(rows)
            for p, column in enumerate(of.columns)
        ]
        try:
            filled = fill(cells, units, places, 1, finished)
        finally:
            for run in opened:
                run.close()
        values.append(filled.values)
        floors.append(filled.floor)
    return Filled(np.concatenate(values), max(floors))
