"""What the model said of a capture that was placed into another prompt, for every layer that it was taken from.

S source layers · G layers that it was placed in · K likeliest tokens · C chosen tokens
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchclamp.plots import GridPanel, TokenGrid, token_grid_html, token_grid_png, words
from patchclamp.studies.result import StudyResult

if TYPE_CHECKING:
    import pandas


class Patchscope(StudyResult, frozen=True, eq=False, kw_only=True):
    """`texts` [S][G]: what the target prompt went on with. `top_ids`, `top_probs` [S, G, K]: the likeliest first
    tokens of that, best first; `logprobs` [S, G, C]: of the chosen tokens there. `moved` [S, G]: KL divergence, in
    nats, of that distribution from the one of the target prompt as it is, whose text is `plain_text`. `scales` [S, G]:
    what the capture was multiplied by, 1 unless it was norm-matched.

    target_layers: G of them; empty if each capture was placed in the layer that it came from, and G is 1
    texts_of: every token here by its id
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
        """One row a cell: layers, text, likeliest first token, how far it moved, and each chosen token's
        probability."""
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

    def grid(self) -> TokenGrid:
        """The picture's numbers and texts: the beginning of each text in its cell, coloured by its first token's
        probability."""
        source = "".join(self.source_tokens[p] for p in self.source_positions)
        target = "".join(self.target_tokens[p] for p in self.target_positions)
        matched = ", scaled to the length of what it replaces" if self.normed else ""
        columns = tuple(map(str, self.target_layers)) or ("the same layer",)
        return TokenGrid(
            title=f"Patchscope: {words.quoted(source)} read by another prompt",
            explained=(f"The {self.site} of {words.quoted(source)} takes the place of {words.quoted(target)} in the "
                       f"target prompt{matched}; each cell is what that prompt then goes on with. Unpatched it goes on "
                       f"with {words.quoted(words.shorten(self.plain_text, 60))}."),
            provenance=self.provenance.where, prompt=self.target_tokens,
            panels=(GridPanel(
                name="probability of the first token", row_name="taken from layer",
                column_name="placed in layer", rows=tuple(map(str, self.layers)), columns=columns,
                values=np.array(self.top_probs[:, :, 0], np.float64), reaches=(0.0, None), texts=self._cells(),
                notes=tuple(tuple(self._note(s, g) for g in range(len(columns))) for s in range(len(self.layers))),
            ),),
            table=(("from layer", "in layer", "text"), *(
                (str(layer), str(self._target(s, g)), self.texts[s][g])
                for s, layer in enumerate(self.layers) for g in range(len(columns))
            )) if len(columns) == 1 else (),
        )  # fmt: skip

    def _cells(self) -> tuple[tuple[str, ...], ...]:
        """What stands in the cells: of one column the text, of several its first token."""
        if not self.target_layers:
            return tuple((words.shorten(words.plain(row[0]), 60),) for row in self.texts)
        return tuple(tuple(words.visible(self.texts_of[int(token)]) for token in row) for row in self.top_ids[:, :, 0])

    def _note(self, s: int, g: int) -> str:
        tops = ", ".join(
            f"{words.visible(self.texts_of[int(token)])} {100 * probability:.1f} %"
            for token, probability in zip(self.top_ids[s, g], self.top_probs[s, g], strict=True)
        )
        return f"{self.texts[s][g]}\n{tops}\nKL from unpatched {self.moved[s, g]:.2f} nats"

    def plot(self, path: str | Path) -> Path:
        """Draws source layers up and target layers across, each cell with what was said, into a PNG (or any format of
        matplotlib)."""
        return token_grid_png(self.grid(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the grid, and the whole texts."""
        return token_grid_html(self.grid(), path)

    def __repr__(self) -> str:
        s, g = np.unravel_index(int(self.moved.argmax()), self.moved.shape)
        return (
            f"<Patchscope {self.site} of {len(self.layers)} layers: layer {self.layers[s]} says {self.texts[s][g]!r}>"
        )
