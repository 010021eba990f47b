"""Direct logit attribution: how much does each layer, head and neuron contribute directly to the answer's logit?

The final stream is the sum of the embedding and the outputs of all attention and MLP layers. With the final norm's
scale frozen, the logits are a sum over the same parts. A part's indirect effect through later layers is not included.

Source: Elhage et al. 2021, "A mathematical framework for transformer circuits"; Wang et al. 2022 (arXiv:2211.00593),
section 3.1, with the norm's scale frozen as in its appendix A.

N prompts · D model width · W width of a site · C parts · L layers · H heads · M neurons
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.errors import ModelError, unknown
from patchclamp.language import Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.structs import PublicStruct
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.studies.inputs import Answers, Parts, Progress, Prompts, as_prompt, each_prompt, one_each
from patchclamp.studies.metric import single_token
from patchclamp.studies.readout import LAST, LOGITS, WRITES, Word, proved_projection, proved_unembedding, tolerance
from patchclamp.studies.study import Study, StudyResult, progress, provenance

if TYPE_CHECKING:
    import pandas
    import torch

BEST = 10


class Share(PublicStruct, frozen=True):
    """A part of the model, as a site, and its contribution to the logit difference, averaged over the prompts."""

    part: str
    value: float


class DirectAttributionResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`shares` [N, C]: contributions of the `parts` ("embed", "attn_out[0]", …, "bias") to logit(answer) − logit(foil)
    or, without a foil, to logit(answer). Their sum differs from `totals` [N], computed from the final stream before any
    cap on the logits, by the rounding error `unexplained` [N]. `logit_diffs` [N]: the same difference, but from the
    model's own logits.

    `heads` [N, L, H] and `head_biases` [N, L] add up to the contribution of the layer's `attn_out`; `neurons` [N, L, M]
    and `neuron_biases` [N, L] to that of its `mlp_out`. NaN in layers without heads or neurons; [N, L, 0] if not
    requested.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    foils: tuple[str, ...]
    parts: tuple[str, ...]
    shares: np.ndarray
    totals: np.ndarray
    logit_diffs: np.ndarray
    unexplained: np.ndarray
    heads: np.ndarray
    head_biases: np.ndarray
    neurons: np.ndarray
    neuron_biases: np.ndarray

    def share(self, part: str) -> float:
        """Return the mean contribution over prompts of a part, such as "embed", "z[9, 6]" or "neurons[3, 17]"."""
        found = next((share for share in self.ranked() if share.part == part), None)
        if found is None:
            raise unknown("part", part, [share.part for share in self.ranked()][:2000], "part")
        return found.value

    def ranked(self, kind: str = "") -> list[Share]:
        """Return parts, largest absolute contribution first: all, or one `kind` ("attn_out", "z" or "neurons")."""
        shares = list(zip(self.parts, self.shares.mean(0).tolist(), strict=True))
        for name, grid in (("z", self.heads), ("neurons", self.neurons)):
            mean = grid.mean(0)
            present = np.argwhere(np.isfinite(mean)).tolist()
            shares += [(f"{name}[{layer}, {i}]", float(mean[layer, i])) for layer, i in present]
        chosen = [Share(part, value) for part, value in shares if part.partition("[")[0] == kind or not kind]
        return sorted(chosen, key=lambda share: -abs(share.value))

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per part: kind, layer, index and contribution, with its standard deviation over prompts."""
        import pandas

        rows = [_row(part, self.shares[:, c]) for c, part in enumerate(self.parts)]
        for name, grid in (("z", self.heads), ("neurons", self.neurons)):
            present = np.argwhere(np.isfinite(grid.mean(0))).tolist()
            rows += [_row(f"{name}[{layer}, {i}]", grid[:, layer, i]) for layer, i in present]
        return pandas.DataFrame(rows)

    def picture(self) -> TokenGrid:
        """Return plot data: panels of heads and layers, and a table of the largest contributions."""
        what = self._quantity()
        panels = [self._heads()] if self.heads.shape[2] else []
        mean = float(self.logit_diffs.mean())
        best = [share for share in self.ranked() if share.part.partition("[")[0] not in ("attn_out", "mlp_out")]
        count = len(self.prompts)
        averaged = "" if count == 1 else f", averaged over {count} prompts"
        others = [f"{part} {style.signed(float(value))}"
                  for part, value in zip(self.parts, self.shares.mean(0), strict=True)
                  if "[" not in part and value]  # fmt: skip
        return TokenGrid(
            title=f"Direct attribution of the {what}: {style.number(mean)}",
            explained=("Each cell is the direct contribution of one part of the model, with the final norm's scale "
                       f"frozen{averaged}. Outside the layers: {', '.join(others)}."),
            provenance=self.provenance.where, panels=(*panels, self._layers()),
            table=(("part", f"contribution to the {what}"), *((s.part, style.signed(s.value)) for s in best[:BEST])),
        )  # fmt: skip

    def _quantity(self) -> str:
        answers, foils = set(self.answers), set(self.foils)
        if len(answers) > 1:
            return "logit difference of answer and foil" if foils else "logit of the answer"
        if not foils:
            return f"logit of {style.quoted(self.answers[0])}"
        foil = style.quoted(self.foils[0]) if len(foils) == 1 else "the foil"
        return f"logit difference {style.quoted(self.answers[0])} − {foil}"

    def _heads(self) -> GridPanel:
        return GridPanel(
            name="heads", row_name="layer", column_name="head", centre=0.0, values=self.heads.mean(0),
            rows=tuple(map(str, range(self.heads.shape[1]))), columns=tuple(map(str, range(self.heads.shape[2]))),
        )  # fmt: skip

    def _layers(self) -> GridPanel:
        place = {part: c for c, part in enumerate(self.parts)}
        mean, layers = self.shares.mean(0), self.heads.shape[1]
        both = ("attn_out", "mlp_out")
        values = np.array([[mean[place[f"{word}[{layer}]"]] for word in both] for layer in range(layers)])
        return GridPanel(
            name="attention and MLPs", row_name="layer", column_name="part", centre=0.0, values=values,
            rows=tuple(map(str, range(layers))), columns=("attention", "MLP"),
            texts=tuple(tuple(style.signed(float(value)) for value in row) for row in values),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = ", ".join(f"{share.part} {share.value:+.3f}" for share in self.ranked()[:3])
        return f"<DirectAttributionResult {self.logit_diffs.mean():.3f} over {len(self.prompts)} prompts: {best}>"


def _row(part: str, values: np.ndarray) -> dict[str, object]:
    kind, _, inner = part.rstrip("]").partition("[")
    layer, _, index = inner.partition(", ")
    return {
        "part": part, "kind": kind, "layer": int(layer) if layer else None, "index": int(index) if index else None,
        "value": float(values.mean()), "spread": float(values.std(ddof=1)) if len(values) > 1 else None,
    }  # fmt: skip


BY = ("layer", "head", "neuron")
WITHIN: dict[str, Word] = {"head": "z", "neuron": "neurons"}


class DirectAttribution(Study):
    """Show each part's direct contribution to an answer's logit, with the final norm's scale frozen.

    Raises: `ModelError` if a part of the model cannot be reproduced from its weights, `TokensError` for an answer of
    several tokens, and the error of any run.
    """

    command = "attribute"
    positional = 1

    prompt: Prompts
    """Prompt, as text or token ids, or a list of prompts to average over."""
    answer: Answers
    """Expected answer: one token, as text or id, or one per prompt."""
    foil: Answers = None
    """Token to compare the answer with, or one per prompt; without a foil the answer's logit is attributed."""
    by: Parts = BY
    """Kinds of parts to report: layer, head, neuron."""

    def _run(self, lm: LM, *, show_progress: Progress = None) -> DirectAttributionResult:
        import torch

        for i, one in enumerate(self.by):
            if one not in BY:
                raise unknown("part", str(one), BY, f"by[{i}]")
        prompts: list[str | list[int]] = [as_prompt(*one) for one in each_prompt(self.prompt, "prompt")]
        answers = _each(lm, self.answer, len(prompts), "answer")
        foils = [] if self.foil is None else _each(lm, self.foil, len(prompts), "foil")
        inner: list[Word] = [word for one, word in WITHIN.items() if one in self.by and word in lm.sites.names]
        read = [Site("embed"), Site("resid_pre", 0), *map(Site, ("attn_out", "mlp_out", *inner)), LAST]
        with progress("attributing", len(prompts), show_progress, "prompts") as advance:
            runs = lm.run(prompts, max_tokens=1, capture=[*(site @ whole_prompt[-1] for site in read), LOGITS])
            advance(len(prompts))
        captured = lm.fetch(runs, copy=False)

        def rows(site: Site) -> torch.Tensor:
            name = str(lm.sites.resolve(site)[0])
            return torch.cat([torch.as_tensor(of_run[name]).float().flatten(1) for of_run in captured])

        def difference(of: torch.Tensor) -> torch.Tensor:
            return of[answers] - (of[foils] if foils else 0.0)

        unembedding = proved_unembedding(lm, runs[0].prompt_token_ids)
        last_ND, parts = rows(LAST), _parts(lm, rows)
        directions_ND, biases_N = difference(unembedding.matrix_VD), torch.zeros(len(answers))
        if unembedding.norm.bias is not None:
            biases_N = directions_ND @ unembedding.norm.bias
        if unembedding.bias_V is not None:
            biases_N = biases_N + difference(unembedding.bias_V)
        biases_N = biases_N * unembedding.scale
        towards_ND = unembedding.norm.pulled(directions_ND * unembedding.scale, last_ND)  # directions in the stream
        shares = {part: (rows_ND * towards_ND).sum(-1) for part, rows_ND in parts.items()} | {"bias": biases_N}
        totals_N, shares_NC = (last_ND * towards_ND).sum(-1) + biases_N, torch.stack(list(shares.values()), 1)
        heads, head_biases = _within(lm, "z", inner, rows, towards_ND)
        neurons, neuron_biases = _within(lm, "neurons", inner, rows, towards_ND)
        result = DirectAttributionResult(
            provenance=provenance(lm),
            prompts=tuple("".join(lm.tokenizer.token_strings(run.prompt_token_ids)) for run in runs),
            answers=tuple(lm.tokenizer.token_strings(answers)), foils=tuple(lm.tokenizer.token_strings(foils)),
            parts=tuple(shares), shares=shares_NC.numpy(), totals=totals_N.numpy(),
            logit_diffs=difference(unembedding.uncapped(rows(LOGITS)).T).diagonal().numpy(),
            unexplained=(totals_N - shares_NC.sum(1)).numpy(),
            heads=heads, head_biases=head_biases, neurons=neurons, neuron_biases=neuron_biases,
        )  # fmt: skip
        for run in runs:
            run.close()
        return result


direct_attribution: Callable[..., DirectAttributionResult] = DirectAttribution.short_form("direct_attribution")


LastRows = Callable[[Site], "torch.Tensor"]
"""Returns a site's rows at the last position of each prompt, fp32 [N, W]."""


def _parts(lm: LM, rows: LastRows) -> dict[str, torch.Tensor]:
    """Return the contributions of the embedding, positions, attentions and MLPs to the final stream, [N, D] each.

    Raises: `ModelError` if they do not add up to the stream.
    """
    parts = {"embed": rows(Site("embed"))}
    positions_ND = rows(Site("resid_pre", 0)) - parts["embed"]
    if positions_ND.any():
        parts["positions"] = positions_ND
    for layer in range(lm.model.layers):
        parts |= {f"{word}[{layer}]": rows(Site(word, layer)) for word in ("attn_out", "mlp_out")}
    last_ND = rows(LAST)
    gap = float((sum(parts.values()) - last_ND).norm() / last_ND.norm())
    if not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"embedding, attention and MLPs do not add up to the final stream (relative error {gap:.2g}): this model "
            "has other parts, so its logits cannot be attributed"
        )
    return parts


def _within(
    lm: LM, word: Word, asked: list[Word], rows: LastRows, towards_ND: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the contributions of each layer's heads or neurons, [N, L, H or M], and of its biases, [N, L]; NaN in
    layers without heads or neurons."""
    shape = len(towards_ND), lm.model.layers
    count, size = (lm.sites.parts(word) or (0, 1)) if word in asked else (0, 1)
    shares, rest = np.full((*shape, count), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for ref in lm.sites.resolve(Site(word)) if count else ():
        assert ref.layer is not None
        read_NW, written_ND = rows(Site(word, ref.layer)), rows(Site(WRITES[word], ref.layer))
        writer = proved_projection(lm, word, ref.layer, read_NW, written_ND)
        of_numbers = writer.shares(read_NW, towards_ND)
        shares[:, ref.layer] = of_numbers.reshape(-1, count, size).sum(-1).numpy()
        rest[:, ref.layer] = writer.rest(read_NW, towards_ND).numpy()
    return shares, rest


def _each(lm: LM, tokens: Any, count: int, path: str) -> list[int]:
    """Return one token id per prompt, given a shared token or a list."""
    paths = [f"{path}[{i}]" if isinstance(tokens, (list, tuple)) else path for i in range(count)]
    return [single_token(lm, *one) for one in zip(one_each(tokens, count, path), paths, strict=True)]
