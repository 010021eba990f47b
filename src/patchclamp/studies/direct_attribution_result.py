"""What a direct logit attribution found: how much each part of the model adds to a difference of two logits.

N prompts · C parts · L layers · H heads · M neurons
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.errors import unknown
from patchclamp.plots import GridPanel, TokenGrid, token_grid_html, token_grid_png, words
from patchclamp.studies.result import StudyResult

if TYPE_CHECKING:
    import pandas

BEST = 10


class Share(msgspec.Struct, frozen=True):
    """A part of the model, as a site, and what it adds to the logit difference, on average over the prompts."""

    part: str
    value: float


class DirectAttribution(StudyResult, frozen=True, eq=False, kw_only=True):
    """`shares` [N, C] of the `parts` ("embed", "attn_out[0]", …, "bias") add up to `totals` [N], the difference
    logit(answer) − logit(foil) as our readout makes it of the last stream, before a cap of the logits; `unexplained`
    [N] is what is missing, of rounding. `logit_diffs` [N] is the model's own, before the cap. Without a foil it is
    logit(answer).

    `heads` [N, L, H] and `head_biases` [N, L] add up to their layer's `attn_out`, `neurons` [N, L, M] and
    `neuron_biases` to its `mlp_out`; NaN in layers that have none, and [N, L, 0] where they were not asked for.
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
        """What a part adds, averaged over the prompts: "embed", "mlp_out[3]", "z[9, 6]", "neurons[3, 17]"."""
        found = next((share for share in self.ranked() if share.part == part), None)
        if found is None:
            raise unknown("part", part, [share.part for share in self.ranked()][:2000], "part")
        return found.value

    def ranked(self, kind: str = "") -> list[Share]:
        """Parts by how much they add, the largest size first: all, or those of one `kind`: "attn_out", "z",
        "neurons"."""
        shares = list(zip(self.parts, self.shares.mean(0).tolist(), strict=True))
        for name, grid in (("z", self.heads), ("neurons", self.neurons)):
            mean = grid.mean(0)
            present = np.argwhere(np.isfinite(mean)).tolist()
            shares += [(f"{name}[{layer}, {i}]", float(mean[layer, i])) for layer, i in present]
        chosen = [Share(part, value) for part, value in shares if part.partition("[")[0] == kind or not kind]
        return sorted(chosen, key=lambda share: -abs(share.value))

    def to_frame(self) -> pandas.DataFrame:
        """One row a part: its kind, layer, index and what it adds, with the standard deviation over the prompts."""
        import pandas

        rows = [_row(part, self.shares[:, c]) for c, part in enumerate(self.parts)]
        for name, grid in (("z", self.heads), ("neurons", self.neurons)):
            present = np.argwhere(np.isfinite(grid.mean(0))).tolist()
            rows += [_row(f"{name}[{layer}, {i}]", grid[:, layer, i]) for layer, i in present]
        return pandas.DataFrame(rows)

    def grid(self) -> TokenGrid:
        """The picture's numbers and texts: a panel of heads, one of layers, and a table of the largest parts."""
        what = self._quantity()
        panels = [self._heads()] if self.heads.shape[2] else []
        mean = float(self.logit_diffs.mean())
        best = [share for share in self.ranked() if share.part.partition("[")[0] not in ("attn_out", "mlp_out")]
        return TokenGrid(
            title=f"What adds to the {what}: {words.number(mean)}",
            explained=("Each cell is what one part of the model adds to it by itself, through the final norm as it "
                       f"scaled that run{self._averaged()}. " + self._others()),
            provenance=self.provenance.where, panels=(*panels, self._layers()),
            table=(("part", f"adds to the {what}"), *((s.part, words.signed(s.value)) for s in best[:BEST])),
        )  # fmt: skip

    def _quantity(self) -> str:
        answers, foils = set(self.answers), set(self.foils)
        if len(answers) > 1:
            return "logit difference of answer and foil" if foils else "logit of the answer"
        if not foils:
            return f"logit of {words.quoted(self.answers[0])}"
        foil = words.quoted(self.foils[0]) if len(foils) == 1 else "the foil"
        return f"logit difference {words.quoted(self.answers[0])} − {foil}"

    def _averaged(self) -> str:
        return "" if len(self.prompts) == 1 else f", averaged over {len(self.prompts)} prompts"

    def _others(self) -> str:
        """The parts that are in no layer, in a sentence."""
        single = [
            (part, value)
            for part, value in zip(self.parts, self.shares.mean(0), strict=True)
            if "[" not in part and value
        ]
        return "In no layer: " + ", ".join(f"{part} {words.signed(float(value))}" for part, value in single) + "."

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
            texts=tuple(tuple(words.signed(float(value)) for value in row) for row in values),
        )  # fmt: skip

    def plot(self, path: str | Path) -> Path:
        """Draws heads and layers as grids, white where nothing is added, into a PNG (or any format of matplotlib)."""
        return token_grid_png(self.grid(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: heads, layers, and the parts that add most."""
        return token_grid_html(self.grid(), path)

    def __repr__(self) -> str:
        best = ", ".join(f"{share.part} {share.value:+.3f}" for share in self.ranked()[:3])
        return f"<DirectAttribution {self.logit_diffs.mean():.3f} over {len(self.prompts)} prompts: {best}>"


def _row(part: str, values: np.ndarray) -> dict[str, object]:
    kind, _, inner = part.rstrip("]").partition("[")
    layer, _, index = inner.partition(", ")
    return {
        "part": part, "kind": kind, "layer": int(layer) if layer else None, "index": int(index) if index else None,
        "value": float(values.mean()), "spread": float(values.std(ddof=1)) if len(values) > 1 else None,
    }  # fmt: skip
