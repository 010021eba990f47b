"""Patchscopes: an activation of one prompt is patched into another prompt, whose continuation shows what it encodes.

Source: Ghandeharioun et al. 2024 (arXiv:2401.06102), section 3 (the mapping f is the identity, or a scale that matches
norms) and section 4.1 (the prompt that asks for the token itself).

S source layers · G target layers · n positions · D model width · K likeliest tokens · C chosen tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from patchclamp.errors import TokensError
from patchclamp.language import Replace, Site, Vector, every
from patchclamp.language import prompt as whole_prompt
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.logit_lens import checked_site
from patchclamp.studies.metric import single_token
from patchclamp.studies.readout import LOGITS
from patchclamp.studies.study import Study, StudyResult, progress, provenance, recorded_runs

if TYPE_CHECKING:
    import pandas
    import torch


class PatchscopeResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`texts` [S][G]: the target prompt's continuations. `top_ids`, `top_probs` [S, G, K]: their likeliest first
    tokens, best first; `logprobs` [S, G, C]: the chosen tokens' log-probabilities as the first token. `moved` [S, G]:
    KL divergence, in nats, of the first token's distribution from the unpatched target prompt's, whose continuation is
    `plain_text`. `scales` [S, G]: factors on the activation, 1 unless it was norm-matched.

    target_layers: the G layers; empty, with G = 1, if each activation was patched into the layer it came from
    texts_of: every token in the result, by id
    """

    site: str
    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    source_positions: tuple[int, ...]
    target_positions: tuple[int, ...]
    layers: tuple[int, ...]
    target_layers: tuple[int, ...]
    normed: bool
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    texts_of: dict[int, str]
    texts: tuple[tuple[str, ...], ...]
    plain_text: str
    top_ids: np.ndarray
    top_probs: np.ndarray
    logprobs: np.ndarray
    moved: np.ndarray
    scales: np.ndarray

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per cell: layers, text, likeliest first token, KL, and each chosen token's probability."""
        import pandas

        return pandas.DataFrame([
            {
                "source_layer": layer, "target_layer": self._target(s, g), "text": self.texts[s][g],
                "top_token": self.texts_of[int(self.top_ids[s, g, 0])],
                "top_probability": float(self.top_probs[s, g, 0]), "moved": float(self.moved[s, g]),
                "scale": float(self.scales[s, g]),
                **{f"probability of {name!r}": float(np.exp(self.logprobs[s, g, c]))
                   for c, name in enumerate(self.tokens)},
            }
            for s, layer in enumerate(self.layers) for g in range(self.moved.shape[1])
        ])  # fmt: skip

    def _target(self, s: int, g: int) -> int:
        return self.target_layers[g] if self.target_layers else self.layers[s]

    def picture(self) -> TokenGrid:
        """Return plot data: the beginning of each text in its cell, coloured by its first token's probability."""
        source = "".join(self.source_tokens[p] for p in self.source_positions)
        target = "".join(self.target_tokens[p] for p in self.target_positions)
        matched = ", scaled to the length of what it replaces" if self.normed else ""
        columns = tuple(map(str, self.target_layers)) or ("the same layer",)
        return TokenGrid(
            title=f"Patchscope: {style.quoted(source)} read by another prompt",
            explained=(f"The {self.site} of {style.quoted(source)} takes the place of {style.quoted(target)} in the "
                       f"target prompt{matched}; each cell is the continuation. The unpatched continuation is "
                       f"{style.quoted(style.shorten(self.plain_text, 60))}."),
            provenance=self.provenance.where, prompt=self.target_tokens,
            panels=(GridPanel(
                name="probability of the first token", row_name="taken from layer",
                column_name="placed in layer", rows=tuple(map(str, self.layers)), columns=columns,
                values=np.array(self.top_probs[:, :, 0], np.float64), reaches=(0.0, None), texts=self._cells(),
                notes=tuple(tuple(self._note(s, g) for g in range(len(columns))) for s in range(len(self.layers))),
            ),),
            table=(("from layer", "in layer", "text"), *(
                (str(layer), str(self._target(s, g)), style.plain(self.texts[s][g]))
                for s, layer in enumerate(self.layers) for g in range(len(columns))
            )) if len(columns) == 1 else (),
        )  # fmt: skip

    def _cells(self) -> tuple[tuple[str, ...], ...]:
        """Return the text in each cell: the continuation for a single column, otherwise its first token."""
        if not self.target_layers:
            return tuple((style.shorten(style.plain(row[0]), 60),) for row in self.texts)
        return tuple(tuple(style.visible(self.texts_of[int(token)]) for token in row) for row in self.top_ids[:, :, 0])

    def _note(self, s: int, g: int) -> str:
        tops = ", ".join(
            f"{style.visible(self.texts_of[int(token)])} {100 * probability:.1f} %"
            for token, probability in zip(self.top_ids[s, g], self.top_probs[s, g], strict=True)
        )
        return f"{self.texts[s][g]}\n{tops}\nKL from unpatched {self.moved[s, g]:.2f} nats"

    def __repr__(self) -> str:
        s, g = np.unravel_index(int(self.moved.argmax()), self.moved.shape)
        what = f"layer {self.layers[s]} says {self.texts[s][g]!r}"
        return f"<PatchscopeResult {self.site} of {len(self.layers)} layers: {what}>"


IDENTITY = "cat -> cat\n1135 -> 1135\nhello -> hello\n?"


class Patchscope(Study):
    """Patch one prompt's activation, from every layer, into another prompt, and show how the model continues it.

    Raises: `TokensError` for positions that are missing or differ in number, `UnsupportedSite` for a site of another
    width, and the error of any run.
    """

    command = "patchscope"

    source: inputs.Prompt
    """Prompt whose activation is read."""
    target: inputs.Prompt = IDENTITY
    """Prompt to patch the activation into; by default one that asks the model to repeat a token."""
    source_position: inputs.Position = -1
    """Position, or selection, to read; it must have as many positions as `target_position`."""
    target_position: inputs.Position = -1
    """Position, or selection, to overwrite."""
    site: inputs.SiteField = "resid_post"
    """Site as wide as the stream, without layers."""
    layers: inputs.Layers = None
    """Layers to read: a number, a list, or a range such as "0:12"; all by default."""
    target_layers: inputs.Layers = None
    """Layers to write to, combined with every layer that is read; by default only the same layer."""
    normed: inputs.Flag = False
    """Scale the activation to the norm of the row that it replaces."""
    max_tokens: int = 12
    """Maximum number of tokens to generate."""
    tokens: inputs.ChosenTokens = ()
    """Tokens whose probability as the first token is reported."""
    top: inputs.Positive = 5
    """Number of likeliest first tokens to keep."""

    def _run(self, lm: LM, *, batch: inputs.Positive = 64, show_progress: inputs.Progress = None) -> PatchscopeResult:
        at = checked_site(lm, self.site)
        taken = inputs.layers_of(lm, at.name, self.layers)
        placed = (
            [] if self.target_layers is None else inputs.layers_of(lm, at.name, self.target_layers, "target_layers")
        )
        chosen = [single_token(lm, token, f"tokens[{i}]") for i, token in enumerate(self.tokens)]
        read = [Site(at.name, layer) @ whole_prompt for layer in sorted({*taken, *placed})]
        from_run = lm.run(self.source, max_tokens=1, capture=read)
        into_run = lm.run(self.target, max_tokens=self.max_tokens, capture=[*read, LOGITS @ whole_prompt[-1]])
        out = inputs.positions_of(from_run, self.source_position, "source_position")
        into = inputs.positions_of(into_run, self.target_position, "target_position")
        if len(out) != len(into):
            raise TokensError(
                f"expected {len(out)} positions, as many as source_position selects, got {len(into)}",
                "target_position",
            )
        cells = [(layer, to) for layer in taken for to in (placed or [layer])]
        vectors = [_vector(from_run, into_run, at.name, cell, out, into, self.normed) for cell in cells]
        plain_V, ids = _logprobs(into_run), into_run.prompt_token_ids

        def call(part: Sequence[int]) -> dict[str, Any]:
            edits = [[Replace(Vector.of(vectors[i][0]), at=Site(at.name, cells[i][1]), tokens=every[tuple(into)])]
                     for i in part]  # fmt: skip
            return {"prompt": [ids] * len(part), "max_tokens": self.max_tokens, "edits": edits,
                    "capture": [LOGITS @ whole_prompt[-1]]}  # fmt: skip

        def read_all(runs: Sequence[Run], part: Sequence[int]) -> list[_Continued]:
            lm.fetch(list(runs), copy=False)
            return [_Continued.of(run, plain_V, self.top, chosen) for run in runs]

        with progress("placing", len(cells), show_progress) as advance:
            found = recorded_runs(lm, None, range(len(cells)), call, read_all, _Continued, advance, batch)
        shape = (len(taken), len(placed) or 1)
        top_ids = np.array([one.top_ids for one in found], np.int32)
        known = sorted({*chosen, *np.unique(top_ids).tolist()})
        result = PatchscopeResult(
            provenance=provenance(lm), site=at.name, source_tokens=_tokens(lm, from_run),
            target_tokens=_tokens(lm, into_run), source_positions=tuple(out), target_positions=tuple(into),
            layers=tuple(taken), target_layers=tuple(placed), normed=self.normed, token_ids=tuple(chosen),
            tokens=tuple(lm.tokenizer.token_strings(chosen)),
            texts_of=dict(zip(known, lm.tokenizer.token_strings(known), strict=True)),
            texts=tuple(tuple(one.text for one in found[i : i + shape[1]]) for i in range(0, len(cells), shape[1])),
            plain_text=into_run.text, top_ids=top_ids.reshape(*shape, -1),
            top_probs=np.array([one.top_probs for one in found], np.float32).reshape(*shape, -1),
            logprobs=np.array([one.logprobs for one in found], np.float32).reshape(*shape, len(chosen)),
            moved=np.array([one.moved for one in found], np.float32).reshape(shape),
            scales=np.array([scale for _, scale in vectors], np.float32).reshape(shape),
        )  # fmt: skip
        from_run.close()
        into_run.close()
        return result


patchscope: Callable[..., PatchscopeResult] = Patchscope.short_form("patchscope")


class _Continued(NamedTuple):
    """A patched run of the target prompt: its text and, for the first token, the likeliest candidates, the chosen
    tokens' log-probabilities, and the KL divergence from the unpatched run."""

    text: str
    top_ids: list[int]
    top_probs: list[float]
    logprobs: list[float]
    moved: float

    @classmethod
    def of(cls, run: Run, plain_V: torch.Tensor, top: int, chosen: list[int]) -> _Continued:
        logprobs_V = _logprobs(run)
        best = logprobs_V.topk(min(top, len(logprobs_V)))
        moved = float((plain_V.exp() * (plain_V - logprobs_V)).sum())
        return cls(run.text, best.indices.tolist(), best.values.exp().tolist(), logprobs_V[chosen].tolist(), moved)


def _logprobs(run: Run) -> torch.Tensor:
    """Return the first generated token's log-probabilities, [V]."""
    import torch

    return torch.as_tensor(run[LOGITS]).float()[0].log_softmax(-1)


def _vector(
    from_run: Run, into_run: Run, site: str, cell: tuple[int, int], out: list[int], into: list[int], normed: bool
) -> tuple[np.ndarray, float]:
    """Return the rows [n, D] that a cell writes, and the mean factor by which they were scaled."""
    rows_nD = np.asarray(from_run[Site(site, cell[0])], np.float32)[out]
    if not normed:
        return rows_nD, 1.0
    replaced_nD = np.asarray(into_run[Site(site, cell[1])], np.float32)[into]
    scale_n1 = np.linalg.norm(replaced_nD, axis=1, keepdims=True) / np.linalg.norm(rows_nD, axis=1, keepdims=True)
    return rows_nD * scale_n1, float(scale_n1.mean())


def _tokens(lm: LM, run: Run) -> tuple[str, ...]:
    return tuple(lm.tokenizer.token_strings(run.prompt_token_ids))
