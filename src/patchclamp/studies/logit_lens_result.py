"""What a logit lens saw: of every layer and position the likeliest tokens, and how far from the model's own answer.

L layers · P positions · K likeliest tokens · C chosen tokens
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import unknown
from patchclamp.plots import GridPanel, TokenGrid, token_grid_html, token_grid_png, words
from patchclamp.studies.result import StudyResult

if TYPE_CHECKING:
    import pandas

Colour = Literal["probability", "kl", "entropy"]
COLOURS: dict[str, str] = {
    "probability": "probability of the likeliest token",
    "kl": "KL divergence of the layer from the final layer, nats",
    "entropy": "entropy, nats",
}


class Guess(msgspec.Struct, frozen=True):
    """A token that a layer says, and its probability there."""

    token_id: int
    token: str
    probability: float


class LogitLens(StudyResult, frozen=True, eq=False, kw_only=True):
    """`top_ids`, `top_probs` [L, P, K]: the likeliest tokens, best first. `ranks`, `logprobs` [L, P, C]: of the chosen
    tokens; rank 0 is the likeliest. `kl` [L, P]: Σ p · log(p / q) in nats, p of the final layer through the model's own
    readout, q of the layer through the lens. `entropy` [L, P]: of q, in nats.

    lens: what was put before or in the place of the model's readout · readout, about: where its numbers come from
    positions: of the prompt, one a column · texts: every token here by its id
    """

    prompt: str
    prompt_tokens: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    site: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    texts: dict[int, str]
    lens: str
    readout: str
    about: str
    top_ids: np.ndarray
    top_probs: np.ndarray
    ranks: np.ndarray
    logprobs: np.ndarray
    kl: np.ndarray
    entropy: np.ndarray

    def top(self, layer: int, position: int) -> list[Guess]:
        """The likeliest tokens of a layer at a position of the prompt, either counted from the end too."""
        at = self._row(layer), self._column(position)
        pairs = zip(self.top_ids[at].tolist(), self.top_probs[at].tolist(), strict=True)
        return [Guess(token, self.texts[token], probability) for token, probability in pairs]

    def rank(self, token: str | int) -> np.ndarray:
        """The rank of a chosen token, by its text or id, at every layer and position [L, P]; 0 is the likeliest."""
        return self.ranks[:, :, self._chosen(token)]

    def probability(self, token: str | int) -> np.ndarray:
        """The probability of a chosen token at every layer and position [L, P]."""
        return np.exp(self.logprobs[:, :, self._chosen(token)])

    def _chosen(self, token: str | int) -> int:
        names = self.tokens if isinstance(token, str) else self.token_ids
        if (not isinstance(token, str) and not is_token_id(token)) or token not in names:
            raise unknown("chosen token", token, [str(name) for name in names], "token")
        return names.index(token)  # pyright: ignore[reportArgumentType]

    def _row(self, layer: int) -> int:
        return _index_of(self.layers, layer, self.layers[-1] + 1, "layer")

    def _column(self, position: int) -> int:
        return _index_of(self.positions, position, len(self.prompt_tokens), "position")

    def to_frame(self) -> pandas.DataFrame:
        """One row a layer and position: its token, the likeliest next token, KL and entropy, and of each chosen token
        rank and probability."""
        import pandas

        rows = [
            {
                "layer": layer, "position": position, "token": self.prompt_tokens[position],
                "top_token": self.texts[int(self.top_ids[l, p, 0])], "top_probability": float(self.top_probs[l, p, 0]),
                "kl": float(self.kl[l, p]), "entropy": float(self.entropy[l, p]),
                **{f"rank of {name!r}": int(self.ranks[l, p, c]) for c, name in enumerate(self.tokens)},
                **{f"probability of {name!r}": float(np.exp(self.logprobs[l, p, c]))
                   for c, name in enumerate(self.tokens)},
            }
            for l, layer in enumerate(self.layers) for p, position in enumerate(self.positions)  # noqa: E741
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def grid(self, *colours: Colour) -> TokenGrid:
        """The picture's numbers and texts: a panel for each colour, the likeliest token in each cell."""
        return TokenGrid(
            title=f"{self.lens[0].upper()}{self.lens[1:]} at {self.site}: what each layer would say next",
            explained="Each cell is the likeliest next token of one layer at one position, read off its stream.",
            provenance=f"{self.provenance.where} · {self.about}", prompt=self.prompt_tokens,
            panels=tuple(self._panel(colour) for colour in colours or ("probability",)),
        )  # fmt: skip

    def _panel(self, colour: Colour) -> GridPanel:
        if colour not in COLOURS:
            raise unknown("colour", colour, list(COLOURS), "colour")
        values = {"probability": self.top_probs[:, :, 0], "kl": self.kl, "entropy": self.entropy}[colour]
        up, across = range(len(self.layers)), range(len(self.positions))
        visible = {token: words.visible(text) for token, text in self.texts.items()}
        return GridPanel(
            name=COLOURS[colour], row_name="layer", column_name="token of the prompt", reaches=(0.0, None),
            rows=tuple(map(str, self.layers)),
            columns=tuple(words.visible(self.prompt_tokens[position]) for position in self.positions),
            values=np.array(values, np.float64), strong="high" if colour == "probability" else "low",
            texts=tuple(tuple(visible[token] for token in row) for row in self.top_ids[:, :, 0].tolist()),
            notes=tuple(tuple(self._note(layer, p) for p in across) for layer in up),
        )  # fmt: skip

    def _note(self, l: int, p: int) -> str:  # noqa: E741
        """What the page says of a cell."""
        tops = ", ".join(
            f"{words.visible(self.texts[int(token)])} {100 * probability:.1f} %"
            for token, probability in zip(self.top_ids[l, p], self.top_probs[l, p], strict=True)
        )
        chosen = "".join(
            f"\n{words.visible(name)}: rank {self.ranks[l, p, c]}, {100 * np.exp(self.logprobs[l, p, c]):.2g} %"
            for c, name in enumerate(self.tokens)
        )
        return f"{tops}\nKL {self.kl[l, p]:.2f}, entropy {self.entropy[l, p]:.2f} nats{chosen}"

    def plot(self, path: str | Path, colour: Colour = "probability") -> Path:
        """Draws layers up and tokens across, each cell with its likeliest token, into a PNG (or any format of
        matplotlib)."""
        return token_grid_png(self.grid(colour), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the grid coloured by probability and by KL, and each cell's tokens."""
        return token_grid_html(self.grid("probability", "kl"), path)

    def __repr__(self) -> str:
        best = self.top(self.layers[-1], self.positions[-1])[0]
        return (
            f"<LogitLens {self.site} × {len(self.positions)} positions: ends on {best.token!r} {best.probability:.2f}>"
        )


def _index_of(known: tuple[int, ...], number: int, count: int, path: str) -> int:
    """The index of a layer or position, which may be counted from the end of all `count`."""
    wanted = number + count if is_token_id(number) and number < 0 else number
    if not is_token_id(number) or wanted not in known:
        raise unknown(path, number, map(str, known), path)
    return known.index(wanted)
