"""The ablation sweep: which parts of the model does an answer need?

A prompt is run many times. Each run ablates one cell: with zeros, with the mean over some prompts, or with the row of a
randomly drawn prompt. If the answer suffers, the cell contributed to it. Zeros and means take the model off
distribution; a resampled row does not, but adds the noise of the draw, which `draws` averages out.

Source: mean ablation, Wang et al. 2022 (arXiv:2211.00593), section 2.2; resample ablation, Chan et al. 2022, "Causal
scrubbing" (Alignment Forum); which to take when, Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError, UnsupportedSite
from patchclamp.lm import LM
from patchclamp.studies.grid import (
    Finished,
    Listener,
    Place,
    Trial,
    Unit,
    announce,
    carrying,
    check_seed,
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
    Sites,
    SourceField,
    Text,
)
from patchclamp.studies.metric import Graded, text_of
from patchclamp.studies.sources import Mixing, Resampled, Writer, as_source, in_words, opened, question_of
from patchclamp.studies.study import Study, json_of, provenance
from patchclamp.studies.sweep_result import (
    AblationSweepResult,
    Column,
    Pair,
    Row,
    Words,
    columns_of,
    listed,
    rows_of,
    same_columns,
    words_of,
)

ALL = "all tokens"


class AblationSweep(Study):
    """Ablate every site, layer and head in the run of a prompt, and show where the answer suffers.

    Effects are measured against the run without an ablation. Tokens of the answer are never ablated.

    Raises: `ProgramError` for a wrong argument, `TokensError` for an empty selection, and the error of any run.
    """

    command = "ablate"

    prompt: Prompts
    """Prompt, as text or token ids; or a list of prompts, whose mean is the grid."""
    answer: Answers
    """Expected answer, with its leading space: text, a token id, or a list of ids, graded exactly. One for all prompts,
    or a list with one per prompt."""
    foil: Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    sites: Sites = ("attn_out", "mlp_out")
    """Sites with or without layers, heads, neurons or experts: attn_out, mlp_out, z."""
    layers: Layers = None
    """Layers of sites without an index: all by default, a number, a list, or a range such as "0:12"."""
    positions: Positions = None
    """Columns of the grid: selections of the prompt, each ablated together, a mapping of labels to selections, or
    "each" for one column per token. One column of the whole prompt by default."""
    metric: Text = "logit_diff"
    """logit_diff, logprob or prob."""
    source: SourceField = "zeros"
    """Values to write: zeros, bank:NAME, `studies.MeanOf(prompts)` or `studies.Resampled(prompts)`."""
    group: int | None = None
    """Heads, neurons or experts per row: 1 for each head; the whole site by default."""
    window: int = 1
    """Adjacent layers ablated together, around the layer of a cell; 1 is that layer alone."""
    seed: int = 0
    """Seed of the confidence interval and of the test over prompts."""

    def _run(
        self,
        lm: LM,
        *,
        batch: int = 512,
        show_progress: Progress = None,
        listener: Listener | None = None,
        resume: ResumeFile = None,
    ) -> AblationSweepResult:
        source = self.source
        prompts = list(self.prompt) if listed(self.prompt) else [self.prompt]
        if self.metric == "recovered":
            raise ProgramError("an ablation has no other prompt to recover; take logit_diff, logprob or prob", "metric")
        if not prompts:
            raise ProgramError("at least one prompt is needed", "prompt")
        graded = graded_of(
            lm, one_each(self.answer, len(prompts), "answer"), one_each(self.foil, len(prompts), "foil"), self.metric
        )
        words = [words_of(lm, one, f"prompt[{i}]" if len(prompts) > 1 else "prompt") for i, one in enumerate(prompts)]
        columns = [_columns(lm, of, self.positions, i, len(words)) for i, of in enumerate(words)]
        rows = rows_of(lm, self.sites, self.layers, self.group, self.window)
        if any(row.site == "logits" for row in rows):
            raise UnsupportedSite("without logits there is no answer to grade", "sites")
        source = as_source(source)
        seeds = (check_seed(self.seed), source.seed) if isinstance(source, Resampled) else (check_seed(self.seed),)
        draws = source.draws if isinstance(source, Resampled) else 1
        across = same_columns(columns)
        announce(show_progress, rows, across, len(words))
        places = [
            Place(row, [of[p] for of in columns], (r, p)) for r, row in enumerate(rows) for p in range(len(across))
        ]
        question = {
            "study": "ablation_sweep", "prompts": [of.ids for of in words], "graded": msgspec.to_builtins(graded),
            "columns": msgspec.to_builtins(columns), "rows": msgspec.to_builtins(rows), "source": question_of(lm,
            source),
        }  # fmt: skip
        total = planned([len(places) * draws] * len(words), reruns_for(len(words)))
        length, *others = {len(of.ids) for of in words}
        shared: list[Writer] = []

        def writer() -> Writer:
            if not shared:
                shared.append(opened(lm, source, rows, None if others else length, Mixing()))
            return shared[0]

        with _closing(shared), carrying(lm, "ablating", total, question, batch, show_progress, resume) as cells:
            bases = cells.graded([Trial(of.ids, (), g) for of, g in zip(words, graded, strict=True)])
            pairs = [_pair(lm, *of) for of in zip(words, graded, bases, columns, strict=True)]
            begun = _begun(lm, self.metric, pairs, rows, across, seeds, in_words(source), json_of(question))
            units = [Unit(of.ids, (), g, "clean", base, 0.0, 1.0, writer, n)
                     for n, (of, g, base) in enumerate(zip(words, graded, bases, strict=True))]  # fmt: skip
            if listener is not None:
                listener.start(begun, len(places))
            finished = Finished(
                len(places), len(units) * draws, None if listener is None else teller(listener, rows, across)
            )
            filled = fill(cells, units, places, draws, finished)
        return with_values(begun, filled, bases, cells.computed, seeds[0])


ablation_sweep = AblationSweep.short_form("ablation_sweep")


@contextmanager
def _closing(shared: list[Writer]) -> Iterator[None]:
    """Close the sources of the values; an error's frames may keep them alive for long."""
    try:
        yield
    finally:
        for writer in shared:
            writer.close()


def _columns(lm: LM, words: Words, positions: Any, number: int, count: int) -> tuple[Column, ...]:
    whole = tuple(range(len(words.ids)))
    if positions is None:
        return (Column(ALL, whole, ()),)
    if isinstance(positions, str) and positions == "each":
        positions = None

    def make(label: str, chosen: tuple[int, ...], path: str) -> Column:
        return Column(label, chosen, ())

    return tuple(columns_of(lm, words, whole, positions, number, count, make))


def _pair(lm: LM, words: Words, graded: Graded, base: float, columns: tuple[Column, ...]) -> Pair:
    return Pair(
        clean_prompt=words.text, corrupt_prompt="", clean_tokens=words.tokens, corrupt_tokens=(),
        answer=text_of(lm, graded.answer) or "", foil=text_of(lm, graded.foil), clean=base, corrupt=None,
        columns=columns, answer_ids=graded.answer, foil_ids=graded.foil,
    )  # fmt: skip


def _begun(
    lm: LM, metric: str, pairs: Sequence[Pair], rows: Sequence[Row], columns: tuple[Column, ...],
    seeds: tuple[int, ...], source: str, question: str,
) -> AblationSweepResult:  # fmt: skip
    """The result before any cell is ablated."""
    empty = np.full((len(pairs), len(rows), len(columns)), np.nan)
    return AblationSweepResult(
        provenance=provenance(lm, seeds), metric=metric, pairs=tuple(pairs), rows=tuple(rows), columns=columns,
        values=empty[0], each=empty, clean=float(np.mean([pair.clean for pair in pairs])), corrupt=None,
        noise_floor=np.nan, direction="noising", source=source, question=question,
    )  # fmt: skip
