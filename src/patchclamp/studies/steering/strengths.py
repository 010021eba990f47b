"""The strength curve of steering vectors: how a behaviour's score moves as the vector is added more and more.

The behaviour is a continuation that shows it, beside one that does not if you like. Its score is its log-probability
after the prompt, of all its tokens, or the difference of the two: for one token each that is their logit difference.

Source: Rimsky et al. 2023 (arXiv:2312.06681), section 4 (behaviour by multiplier); Tan et al. 2024 (arXiv:2407.12404),
section 3, whose propensity is the logit difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language.tokens import TokensLike, every, read_tokens
from patchclamp.lm import LM
from patchclamp.studies.inputs import as_floats, ask, check_batch, checked
from patchclamp.studies.steering.behaviour import Behaviour, texts_of
from patchclamp.studies.steering.result import SteeringVectors
from patchclamp.studies.study import Resumable, StudyResult, keeping, provenance

if TYPE_CHECKING:
    import pandas

    from patchclamp.plots import Curves

SCALES = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)


class StrengthCurve(StudyResult, frozen=True, eq=False, kw_only=True):
    """P prompts · S scales

    logprobs [P, S]: of the continuation `answers[p]`, all its tokens, in nats, with the vector times `scales[s]`
    foil_logprobs [P, S]: of `foils[p]`; NaN where there are none
    vectors: what was added, in words · layers: where · tokens: to which
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    foils: tuple[str, ...] | None
    scales: tuple[float, ...]
    vectors: str
    layers: tuple[int, ...]
    tokens: str
    chat: bool
    logprobs: np.ndarray
    foil_logprobs: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """The behaviour's score [P, S]: log p(answer) − log p(foil), or log p(answer) alone."""
        return self.logprobs if self.foils is None else self.logprobs - self.foil_logprobs

    @property
    def slope(self) -> float:
        """The change of the mean score by a scale of 1, of the straight line that fits best. It is above 0 where the
        vector steers as it should."""
        return float(np.polyfit(self.scales, self.scores.mean(0), 1)[0]) if len(self.scales) > 1 else float("nan")

    def to_frame(self) -> pandas.DataFrame:
        """One row a prompt and scale."""
        import pandas

        return pandas.DataFrame([
            {"prompt": prompt, "scale": scale, "score": self.scores[p, s], "logprob": self.logprobs[p, s],
             "foil_logprob": self.foil_logprobs[p, s]}
            for p, prompt in enumerate(self.prompts)
            for s, scale in enumerate(self.scales)
        ])  # fmt: skip

    def curves(self) -> Curves:
        """The score against the scale, with the texts of its picture."""
        from patchclamp.studies.steering.curves import of_strengths

        return of_strengths(self)

    def plot(self, path: str | Path) -> Path:
        """Draws the score against the scale into a PNG (or any format of matplotlib)."""
        from patchclamp.plots import curves_png

        return curves_png(self.curves(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the score against the scale, with hover."""
        from patchclamp.plots import curves_html

        return curves_html(self.curves(), path)

    def __repr__(self) -> str:
        return f"<StrengthCurve {self.vectors}: {self.slope:+.3f} nats by a scale of 1>"


@checked
def strength_curve(
    lm: LM,
    vectors: SteeringVectors,
    prompts: Sequence[Any],
    answer: Any,
    foil: Any = None,
    *,
    scales: Sequence[float] = SCALES,
    layers: Iterable[int] | int | None = None,
    tokens: TokensLike = every,
    chat: bool = False,
    batch: int = 256,
    show_progress: bool | None = None,
    resume: Resumable | None = None,
) -> StrengthCurve:
    """Scores a behaviour under steering vectors of several strengths.

    prompts: texts or token ids, or with `chat` texts or lists of messages
    answer, foil: the continuation that shows the behaviour, and one that does not: text, a token id or a list of token
        ids, one for all prompts; or a list of texts, one a prompt. Of any number of tokens
    scales: ascending; 0 is the unedited model
    layers, tokens: as in `vectors.edits`; `generated` means the continuation
    resume: a file to which scores are appended as they are computed (batches last a few seconds each), and
        from which an interrupted curve of the same arguments goes on

    Raises: `ProgramError` and its kind for arguments that cannot be, and the error of any run.
    """
    if not isinstance(vectors, SteeringVectors):
        raise ProgramError(f"expected steering vectors, got {type(vectors).__name__} {vectors!r:.100}", "vectors")
    batch = check_batch(batch)
    asked = ask(lm, prompts, chat)
    behaviour = Behaviour.of(lm, answer, foil, len(asked))
    steps = as_floats(scales, "scales")
    if not steps or list(steps) != sorted(set(steps)):
        raise ProgramError(f"ascending numbers are needed, none twice, not {steps}", "scales")
    edits = [vectors.edits(scale, layers=layers, tokens=tokens) if scale else () for scale in steps]
    question = {
        "study": "strength_curve", "prompts": [[one.ids, one.text] for one in asked], **behaviour.question(edits)
    }  # fmt: skip
    with keeping(lm, question, resume) as journal:
        scored = behaviour.score(lm, asked, edits, batch, show_progress, journal)
    return StrengthCurve(
        provenance=provenance(lm, vectors.provenance.seeds), prompts=tuple(one.shown for one in asked),
        answers=texts_of(lm, behaviour.answers), scales=steps,
        foils=None if behaviour.foils is None else texts_of(lm, behaviour.foils),
        vectors=f"{vectors.method} vectors of {vectors.site}", layers=_layers(vectors, layers),
        tokens=str(read_tokens(tokens, "tokens")), chat=chat, logprobs=scored.answer,
        foil_logprobs=np.full(scored.answer.shape, np.nan) if scored.foil is None else scored.foil,
    )  # fmt: skip


def _layers(vectors: SteeringVectors, layers: Iterable[int] | int | None) -> tuple[int, ...]:
    return tuple(int(edit.at.layers) for edit in vectors.edits(1.0, layers=layers) if isinstance(edit.at.layers, int))
