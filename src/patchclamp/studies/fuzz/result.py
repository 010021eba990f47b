"""What a fuzz sweep found: the answer of every cell, and six measures of how far it is from the unfuzzed one.

P prompts · L strengths · S seeds
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.studies.study import StudyResult

if TYPE_CHECKING:
    import pandas

    from patchclamp.plots import Curves

MEASURES = ("exact", "prefix", "kl", "js", "perplexity", "refused")


class FuzzAnswer(msgspec.Struct, frozen=True):
    """What a run generated."""

    text: str
    token_ids: tuple[int, ...]


class FuzzSweep(StudyResult, frozen=True, eq=False, kw_only=True):
    """`answers[p][l][s]` is the answer to prompt p under noise of strength l with seed s; `unfuzzed[p]` has that of the
    unedited run, or one a seed if runs were sampled.

    Each measure is an array [P, L, S], NaN where it was not asked for:
    exact: 1 where the answer equals the unfuzzed one, token by token, else 0
    prefix: tokens up to the first that differs from the unfuzzed answer, as a share of the longer of the two
    kl, js: divergence of the first token's distribution from the unedited run's, in nats (`studies.metric`)
    perplexity: of the answer under the unedited model: exp of the mean negative log-probability of its tokens
    refused: 1 where the answer matches the pattern `refusal`, else 0

    noise: what was done, in words · divergence: "full", "top 20 and the rest", or "none" · sampling: by vLLM's names
    unfuzzed_perplexity [P, 1 or S]: of the unfuzzed answers
    """

    prompts: tuple[str, ...]
    strengths: tuple[float, ...]
    noise: str
    chat: bool
    max_tokens: int
    sampling: dict[str, Any]
    divergence: str
    refusal: str | None
    answers: tuple[tuple[tuple[FuzzAnswer, ...], ...], ...]
    unfuzzed: tuple[tuple[FuzzAnswer, ...], ...]
    exact: np.ndarray
    prefix: np.ndarray
    kl: np.ndarray
    js: np.ndarray
    perplexity: np.ndarray
    refused: np.ndarray
    unfuzzed_perplexity: np.ndarray

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each column S: of the noise, and of the sampler if runs were sampled."""
        return self.provenance.seeds

    @property
    def noise_floor(self) -> float:
        """The largest KL at strength 0, which is the unedited run once more, in another batch: smaller values mean
        nothing. NaN if strength 0 was not run."""
        at_zero = self.kl[:, [strength == 0 for strength in self.strengths]]
        return float(np.max(at_zero)) if at_zero.size else float("nan")

    def to_frame(self) -> pandas.DataFrame:
        """One row a cell: prompt, strength, seed, the text, and the measures."""
        import pandas

        return pandas.DataFrame([
            {
                "prompt": prompt, "strength": strength, "seed": seed, "text": self.answers[p][l][s].text,
                **{name: float(getattr(self, name)[p, l, s]) for name in MEASURES},
            }
            for p, prompt in enumerate(self.prompts)
            for l, strength in enumerate(self.strengths)  # noqa: E741
            for s, seed in enumerate(self.seeds)
        ])  # fmt: skip

    def curves(self) -> Curves:
        """The measures against the strength, with the texts of their picture."""
        from patchclamp.studies.fuzz.curves import curves

        return curves(self)

    def plot(self, path: str | Path) -> Path:
        """Draws the measures against the strength into a PNG (or any format of matplotlib)."""
        from patchclamp.plots import curves_png

        return curves_png(self.curves(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the curves with hover, and their numbers."""
        from patchclamp.plots import curves_html

        return curves_html(self.curves(), path)

    def __repr__(self) -> str:
        size = " × ".join(map(str, self.exact.shape))
        return f"<FuzzSweep {size} (prompts × strengths × seeds): {self.noise}>"
