"""A behaviour: a continuation that shows it, and maybe one that does not; its score is the log-probability of the one
less that of the other, of all their tokens (`studies.teacher_forcing`).

P prompts · E edits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language import Op, Program
from patchclamp.lm import LM, is_token_id
from patchclamp.studies.inputs import Asked
from patchclamp.studies.metric import bare_ids
from patchclamp.studies.study import Journal, progress
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs


class Scored(NamedTuple):
    """Log-probabilities [P, E] of the answers, and of the foils if there are any."""

    answer: np.ndarray
    foil: np.ndarray | None

    @property
    def scores(self) -> np.ndarray:
        """log p(answer) − log p(foil), or log p(answer) alone: [P, E]."""
        return self.answer if self.foil is None else self.answer - self.foil


class Behaviour(msgspec.Struct, frozen=True):
    """The token ids of each prompt's answer, and of its foil."""

    answers: list[tuple[int, ...]]
    foils: list[tuple[int, ...]] | None

    @classmethod
    def of(cls, lm: LM, answer: Any, foil: Any, prompts: int) -> Behaviour:
        """From a text, a token id or a list of token ids, for all prompts, or a list of texts, one a prompt."""
        foils = None if foil is None else _continuations(lm, foil, prompts, "foil")
        return cls(_continuations(lm, answer, prompts, "answer"), foils)

    def score(
        self, lm: LM, asked: list[Asked], edits: Sequence[tuple[Op, ...]], batch: int, show: bool | None,
        journal: Journal | None = None,
    ) -> Scored:  # fmt: skip
        """Scores every prompt under every one of some edits. What `journal` has is not computed again."""
        sides = [self.answers] if self.foils is None else [self.answers, self.foils]
        items = [
            Forced(one.ids, side[p], edit, one.text)  # those that share a run stand beside each other
            for p, one in enumerate(asked) for edit in edits for side in sides
        ]  # fmt: skip
        with progress("scoring", len(items), show) as advance:
            totals = [float(row.sum()) for row in forced_logprobs(lm, items, batch, advance, journal)]
        grids = np.array(totals).reshape(len(asked), len(edits), len(sides))
        return Scored(grids[:, :, 0], grids[:, :, 1] if self.foils is not None else None)

    def question(self, edits: Sequence[tuple[Op, ...]]) -> dict[str, Any]:
        """What decides the scores, beside the prompts, as plain data."""
        programs = [Program.of(list(edit)).fingerprint for edit in edits]
        return {"answers": self.answers, "foils": self.foils, "edits": programs}


def check_behaviour(lm: LM, answer: Any, foil: Any, held_out: float) -> None:
    """Raises what is wrong with a behaviour that a best layer is looked for by."""
    if answer is None:
        if foil is not None:
            raise ProgramError("a foil is beside an answer: give answer=", "foil")
        return
    if not held_out:
        raise ProgramError("it is scored on held-out prompts, and none are held out", "answer")
    for given, path in ((answer, "answer"), (foil, "foil")):
        if given is not None:
            _ids(lm, given, path)


def texts_of(lm: LM, ids: list[tuple[int, ...]]) -> tuple[str, ...]:
    """Continuations as text."""
    return tuple("".join(lm.tokenizer.token_strings(list(one))) for one in ids)


def _continuations(lm: LM, given: Any, prompts: int, path: str) -> list[tuple[int, ...]]:
    """The token ids of each prompt's continuation."""
    listed = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, str) for one in given)
    ids = (
        [_ids(lm, one, f"{path}[{i}]") for i, one in enumerate(given)] if listed else [_ids(lm, given, path)] * prompts
    )
    if len(ids) != prompts:
        raise ProgramError(f"{len(ids)} texts for {prompts} prompts", path)
    return ids


def _ids(lm: LM, given: Any, path: str) -> tuple[int, ...]:
    if isinstance(given, str):
        ids = tuple(bare_ids(lm, given, path))
    else:
        ids = (given,) if is_token_id(given) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not ids or not all(is_token_id(token) and 0 <= token < lm.model.d_vocab for token in ids):
        raise ProgramError(f"a continuation is a text or token ids, at least one token: not {given!r}", path)
    return tuple(int(token) for token in ids)
