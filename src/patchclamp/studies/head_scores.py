"""Head scores: which heads attend to the previous token, an earlier copy of the token, or the token after that copy?

A repeated block of random tokens has no structure except the repetition. An induction head attends from a token's
second copy to the token after the first copy: it predicts that the sequence repeats.

Source: Olsson et al. 2022 (arXiv:2209.11895), and TransformerLens, whose scores are these means over a diagonal of the
pattern; duplicate-token heads: Wang et al. 2022 (arXiv:2211.00593).

L layers · H heads · n tokens of a block · T tokens of a prompt
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import prompt
from patchclamp.language.structs import PublicStruct
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.studies import inputs
from patchclamp.studies.attention_flow import by_layer
from patchclamp.studies.study import Arg, Study, StudyResult, progress, provenance

if TYPE_CHECKING:
    import pandas

Kind = Literal["induction", "previous_token", "duplicate_token"]
KINDS: tuple[Kind, ...] = ("induction", "previous_token", "duplicate_token")
BEST = 5  # heads of each kind in a page's table


class HeadScore(PublicStruct, frozen=True):
    """A head, as its site `z[layer, head]`, and its score."""

    head: str
    value: float


class HeadScoresResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """Each head's mean attention [L, H] from a position t in the second copy of n random tokens: `induction` to
    position t − (n − 1), `previous_token` to t − 1, `duplicate_token` to t − n. `uniform` is the score of a head that
    attends to all tokens equally. `prompts` are the token ids."""

    layers: tuple[int, ...]
    induction: np.ndarray
    previous_token: np.ndarray
    duplicate_token: np.ndarray
    uniform: float
    length: int
    prompts: tuple[tuple[int, ...], ...]

    def best(self, kind: Kind = "induction", count: int = 10) -> list[HeadScore]:
        """Return the heads with the largest scores of a kind, largest first."""
        scores = getattr(self, kind)
        order = np.argsort(-scores, axis=None, kind="stable")[:count]
        return [HeadScore(f"z[{self.layers[n // scores.shape[1]]}, {n % scores.shape[1]}]", float(scores.flat[n]))
                for n in order.tolist()]  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per head: layer, head, and its three scores."""
        import pandas

        return pandas.DataFrame([
            {"layer": layer, "head": head, **{kind: float(getattr(self, kind)[i, head]) for kind in KINDS}}
            for i, layer in enumerate(self.layers) for head in range(self.induction.shape[1])
        ])  # fmt: skip

    def picture(self) -> TokenGrid:
        """Return plot data: a layers × heads panel for each score, and a table of the largest scores."""
        best = [(kind.replace("_", " "), one.head, style.number(one.value))
                for kind in KINDS for one in self.best(kind, BEST)]  # fmt: skip
        return TokenGrid(
            title=f"Attention of heads over {self.length} random tokens, repeated", provenance=self.provenance.where,
            explained=("Mean attention from a token's second copy: to the token after its first copy (induction), to "
                       "the token before it (previous token), and to its first copy (duplicate token). Equal attention "
                       f"to all tokens would be {style.number(self.uniform)}."),
            panels=tuple(map(self._panel, KINDS)), table=(("score", "head", "value"), *best),
        )  # fmt: skip

    def _panel(self, kind: Kind) -> GridPanel:
        values = getattr(self, kind)
        return GridPanel(
            name=kind.replace("_", " "), row_name="layer", column_name="head", values=values, reaches=(0.0, 1.0),
            rows=tuple(map(str, self.layers)), columns=tuple(map(str, range(values.shape[1]))),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = ", ".join(f"{one.head} {one.value:.2f}" for one in self.best(count=3))
        return f"<HeadScoresResult of {self.induction.size} heads; induction: {best}>"


class HeadScores(Study):
    """Score each head by its attention over repeated random tokens: as an induction, a previous-token and a
    duplicate-token head.

    Raises: `ProgramError` for a length above the number of tokens with text, `UnsupportedSite` where patterns are not
    available, and the error of any run.
    """

    command = "head-scores"

    length: Annotated[int, Arg(functools.partial(inputs.check_whole, least=2))] = 50
    """Number of tokens in a block, all different. The prompt has the block twice."""
    sequences: Annotated[int, Arg(functools.partial(inputs.check_whole, least=1, most=1000))] = 8
    """Number of prompts to average over, at most 1000."""
    layers: inputs.Layers = None
    """Layers to include; by default all layers with attention."""
    prefix: inputs.Prompt = None
    """Prompt before the blocks, as text or token ids. By default the tokenizer's own prefix, such as <s>; GPT-2's
    tokenizer has none, and TransformerLens uses <|endoftext|>."""
    seed: inputs.Whole = 0
    """Seed of the random tokens."""

    def _run(self, lm: LM, *, show_progress: inputs.Progress = None) -> HeadScoresResult:
        layers = inputs.layers_of(lm, "pattern", self.layers)
        with progress("scoring heads", len(layers) * self.sequences, show_progress, "patterns") as advance:
            prefix, n = self._prefix(lm), self.length
            draw = np.random.default_rng(self.seed)
            blocks = [self._block(lm, draw) for _ in range(self.sequences)]
            prompts = [[*prefix, *block, *block] for block in blocks]
            queries = np.arange(len(prefix) + n, len(prompts[0]))
            keys = {"induction": queries - (n - 1), "previous_token": queries - 1, "duplicate_token": queries - n}
            scores: dict[str, list[np.ndarray]] = {kind: [] for kind in keys}
            for layer, runs in by_layer(lm, prompts, layers, prompt[-n:]):
                patterns = [run.attention[f"pattern[{layer}]"].values for run in runs]  # [n, H, T] each
                for kind, of_kind in keys.items():
                    scores[kind].append(np.mean([one[np.arange(n), :, of_kind].mean(0) for one in patterns], 0))
                advance(len(runs))
        return HeadScoresResult(
            provenance=provenance(lm, (self.seed,)), layers=tuple(layers), uniform=float(np.mean(1 / (queries + 1))),
            length=n, prompts=tuple(map(tuple, prompts)), induction=np.stack(scores["induction"]),
            previous_token=np.stack(scores["previous_token"]), duplicate_token=np.stack(scores["duplicate_token"]),
        )  # fmt: skip

    def _prefix(self, lm: LM) -> list[int]:
        if self.prefix is not None:
            return list(inputs.words_of(lm, self.prefix, "prefix").ids)
        try:
            return lm.tokenizer.encode("")
        except PatchclampError:  # an engine without a tokenizer
            return []

    def _block(self, lm: LM, draw: np.random.Generator) -> list[int]:
        """Return distinct random tokens with text; tokens without text are special, or pad the vocabulary."""
        ids = draw.permutation(lm.model.d_vocab)[: 2 * self.length].tolist()
        chosen = [token for token in ids if lm.tokenizer.decode([token])] or ids  # without a tokenizer, none has text
        if len(chosen) < self.length:
            raise ProgramError(f"expected at most {len(chosen)} (tokens with text), got {self.length}", "length")
        return chosen[: self.length]


head_scores: Callable[..., HeadScoresResult] = HeadScores.short_form("head_scores")
