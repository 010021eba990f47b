"""Patchscopes: a capture of one prompt is placed into another prompt, which makes the model say what is in it.

    S source layers · G layers that it is placed in · n positions · D model width

Source: Ghandeharioun et al. 2024 (arXiv:2401.06102), section 3 (the mapping f is the identity, or a scale that matches
norms) and section 4.1 (the prompt that asks for the token itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.errors import TokensError
from patchclamp.language import Replace, Site, Vector, every
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.values import as_items
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.batches import UNDER_WAY, Pace, run_batches
from patchclamp.studies.checks import as_prompt, check_batch, check_whole, checked
from patchclamp.studies.logit_lens import checked_site
from patchclamp.studies.metric import single_token
from patchclamp.studies.patchscope_result import Patchscope
from patchclamp.studies.progress import progress
from patchclamp.studies.readout import LOGITS
from patchclamp.studies.result import provenance
from patchclamp.studies.selected import layers_of, positions_of

if TYPE_CHECKING:
    import torch

IDENTITY = "cat -> cat\n1135 -> 1135\nhello -> hello\n?"


@checked
def patchscope(
    lm: LM,
    *,
    source: Any,
    target: Any = IDENTITY,
    source_position: Any = -1,
    target_position: Any = -1,
    site: Site | str = "resid_post",
    layers: Any = None,
    target_layers: Any = None,
    normed: bool = False,
    max_tokens: int = 12,
    tokens: Sequence[str | int] = (),
    top: int = 5,
    batch: int = 64,
    show_progress: bool | None = None,
) -> Patchscope:
    """Places what `source` has at a position, from every layer, into `target`, and reads what the model then says.

    source, target: prompts, as text or token ids; by default the target asks for the token itself
    source_position, target_position: a number or a selection of either prompt, such as `pc.span("x")`; as many
        positions on both sides
    site: a site as wide as the stream, without layers. layers: those that are taken from (all), as a number, a list, or
        text such as "0:12". target_layers: those that are placed in, each with each; the same layer if not given
    normed: whether a capture is scaled to the length of the row that it replaces
    max_tokens: how many tokens the target goes on for. tokens: chosen tokens whose probability as the first is wanted
    top: how many of the likeliest first tokens to keep. batch: runs submitted at a time

    Raises: `TokensError` for positions that are not there or not as many on both sides, `UnsupportedSite` for a site of
    another width, and the error of any run.
    """
    at, top, batch = checked_site(lm, site), check_whole(top, "top", 1), check_batch(batch)
    source, target = as_prompt(source, "source"), as_prompt(target, "target")
    taken = layers_of(lm, at.name, layers)
    placed = [] if target_layers is None else layers_of(lm, at.name, target_layers, "target_layers")
    chosen = [single_token(lm, token, f"tokens[{i}]") for i, token in enumerate(as_items(tokens, "tokens"))]
    read = [Site(at.name, layer) @ whole_prompt for layer in sorted({*taken, *placed})]
    from_run = lm.run(source, max_tokens=1, capture=read)
    into_run = lm.run(target, max_tokens=max_tokens, capture=[*read, LOGITS @ whole_prompt[-1]])
    out = positions_of(from_run, source_position, "source_position")
    into = positions_of(into_run, target_position, "target_position")
    if len(out) != len(into):
        raise TokensError(
            f"source_position selects {len(out)} positions and target_position {len(into)}: they come in pairs",
            "target_position",
        )
    cells = [(layer, to) for layer in taken for to in (placed or [layer])]
    vectors = [_vector(from_run, into_run, at.name, cell, out, into, normed) for cell in cells]
    edits = [[Replace(Vector.of(rows_nD), at=Site(at.name, to), tokens=every[tuple(into)])]
             for (_, to), (rows_nD, _) in zip(cells, vectors, strict=True)]  # fmt: skip
    said = _Said(lm, into_run, top, chosen)
    said.run(edits, max_tokens, batch, show_progress)
    shape = (len(taken), len(placed) or 1)
    ids = sorted({*chosen, *np.unique(said.top_ids).tolist()})
    result = Patchscope(
        provenance=provenance(lm), site=at.name, source_tokens=_tokens(lm, from_run),
        target_tokens=_tokens(lm, into_run), source_positions=tuple(out), target_positions=tuple(into),
        layers=tuple(taken), target_layers=tuple(placed), normed=normed, token_ids=tuple(chosen),
        tokens=tuple(lm.tokenizer.token_strings(chosen)),
        texts_of=dict(zip(ids, lm.tokenizer.token_strings(ids), strict=True)),
        texts=tuple(tuple(said.texts[i : i + shape[1]]) for i in range(0, len(cells), shape[1])),
        plain_text=into_run.text, top_ids=np.array(said.top_ids, np.int32).reshape(*shape, -1),
        top_probs=np.array(said.top_probs, np.float32).reshape(*shape, -1),
        logprobs=np.array(said.logprobs, np.float32).reshape(*shape, len(chosen)),
        moved=np.array(said.moved, np.float32).reshape(shape),
        scales=np.array([scale for _, scale in vectors], np.float32).reshape(shape),
    )  # fmt: skip
    from_run.close()
    into_run.close()
    return result


class _Said:
    """What patched runs of the target prompt say: their texts, and of their first token the likeliest, the chosen ones'
    log-probabilities, and the KL divergence from the unpatched run's."""

    def __init__(self, lm: LM, plain: Run, top: int, chosen: list[int]) -> None:
        self._lm, self._plain, self._top, self._chosen = lm, plain, top, chosen
        self._plain_V = _logprobs(plain)
        self.texts: list[str] = []
        self.top_ids: list[list[int]] = []
        self.top_probs: list[list[float]] = []
        self.logprobs: list[list[float]] = []
        self.moved: list[float] = []

    def run(self, edits: list[list[Replace]], max_tokens: int, batch: int, show: bool | None) -> None:
        ids, pace = self._plain.prompt_token_ids, Pace(batch)
        calls = (
            {
                "prompt": [ids] * len(part),
                "max_tokens": max_tokens,
                "edits": part,
                "capture": [LOGITS @ whole_prompt[-1]],
            }
            for part in pace.parts(edits)
        )
        with progress("placing", len(edits), show) as advance:

            def read(runs: list[Run]) -> None:
                self._lm.fetch(runs, copy=False)
                for run in runs:
                    self._read(run)
                    run.close()
                advance(len(runs))

            run_batches(self._lm, calls, read, UNDER_WAY, pace)

    def _read(self, run: Run) -> None:
        logprobs_V = _logprobs(run)
        best = logprobs_V.topk(min(self._top, len(logprobs_V)))
        self.texts.append(run.text)
        self.top_ids.append(best.indices.tolist())
        self.top_probs.append(best.values.exp().tolist())
        self.logprobs.append(logprobs_V[self._chosen].tolist())
        self.moved.append(float((self._plain_V.exp() * (self._plain_V - logprobs_V)).sum()))


def _logprobs(run: Run) -> torch.Tensor:
    """Of the first generated token, [V]."""
    import torch

    return torch.as_tensor(run[LOGITS]).float()[0].log_softmax(-1)


def _vector(
    from_run: Run, into_run: Run, site: str, cell: tuple[int, int], out: list[int], into: list[int], normed: bool
) -> tuple[np.ndarray, float]:
    """The rows [n, D] that a cell places, and what they were multiplied by, on average."""
    rows_nD = np.asarray(from_run[Site(site, cell[0])], np.float32)[out]
    if not normed:
        return rows_nD, 1.0
    replaced_nD = np.asarray(into_run[Site(site, cell[1])], np.float32)[into]
    scale_n1 = np.linalg.norm(replaced_nD, axis=1, keepdims=True) / np.linalg.norm(rows_nD, axis=1, keepdims=True)
    return rows_nD * scale_n1, float(scale_n1.mean())


def _tokens(lm: LM, run: Run) -> tuple[str, ...]:
    return tuple(lm.tokenizer.token_strings(run.prompt_token_ids))
