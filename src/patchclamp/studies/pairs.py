"""Pairs of prompts as a sweep reads them: what is graded, which position of one is which of the other, the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.lm import LM
from patchclamp.studies.align import Alignment, align
from patchclamp.studies.columns import Column, Words, columns_of, listed, words_of
from patchclamp.studies.metric import Graded, answer_tokens, grade, text_of
from patchclamp.studies.sweep_result import Pair, Side


class Asked(NamedTuple):
    """A pair that is asked about."""

    clean: Words
    corrupt: Words
    graded: Graded
    alignment: Alignment
    columns: tuple[Column, ...]

    def side(self, name: Side) -> Words:
        return self.clean if name == "clean" else self.corrupt


def graded_of(lm: LM, answers: Sequence[Any], foils: Sequence[Any], metric: str) -> list[Graded]:
    """What is graded of every prompt."""
    graded = []
    for i, (answer, foil) in enumerate(zip(answers, foils, strict=True)):
        where = f"[{i}]" if len(answers) > 1 else ""
        tokens = answer_tokens(lm, answer, f"answer{where}")
        graded.append(grade(metric, tokens, None if foil is None else answer_tokens(lm, foil, f"foil{where}")))
    return graded


def one_each(values: Any, count: int, name: str) -> list[Any]:
    """A value for each of `count` prompts, from a list of them or from one for all."""
    if count > 1 and isinstance(values, (list, tuple)):
        if len(values) != count:
            raise ProgramError(f"{len(values)} for {count} prompts; give one, or one a prompt", name)
        return list(values)
    if count == 1 and isinstance(values, (list, tuple)) and len(values) == 1:
        return list(values)
    return [values] * count


def pairs_of(
    lm: LM, clean: Any, corrupt: Any, answer: Any, foil: Any, metric: str, positions: Any, written: Side
) -> list[Asked]:
    """Every pair. Raises what is wrong with one, with its number where there are several."""
    cleans, corrupts = (list(of) if listed(of) else [of] for of in (clean, corrupt))
    if len(cleans) != len(corrupts) or not cleans:
        raise ProgramError(
            f"{len(cleans)} clean prompts and {len(corrupts)} corrupt ones: they come in pairs", "corrupt"
        )
    graded = graded_of(lm, one_each(answer, len(cleans), "answer"), one_each(foil, len(cleans), "foil"), metric)
    asked = []
    for i, (one, other) in enumerate(zip(cleans, corrupts, strict=True)):
        where = f"[{i}]" if len(cleans) > 1 else ""
        words = words_of(lm, one, f"clean{where}"), words_of(lm, other, f"corrupt{where}")
        try:
            asked.append(_asked(lm, *words, graded[i], positions, i, len(cleans), written))
        except PatchclampError as error:
            raise error.under(f"pair {i}") if where else error from None
    return asked


def _asked(
    lm: LM, clean: Words, corrupt: Words, graded: Graded, positions: Any, number: int, count: int, written: Side
) -> Asked:
    alignment = align(clean.ids, corrupt.ids)
    own = 1 if written == "corrupt" else 0
    partner = {pair[own]: pair[1 - own] for pair in alignment.pairs}
    words = corrupt if written == "corrupt" else clean
    other = "clean" if written == "corrupt" else "corrupt"

    def make(label: str, chosen: tuple[int, ...], path: str) -> Column:
        alone = [p for p in chosen if p not in partner]
        if alone:
            raise TokensError(
                f"{list(chosen)}: position {alone[0]} ({words.tokens[alone[0]]!r}) has no partner in the {other} "
                f"prompt; aligned are {sorted(partner)}",
                path,
            )
        partners = tuple(partner[p] for p in chosen)
        return Column(label, *((partners, chosen) if written == "corrupt" else (chosen, partners)))

    columns = columns_of(lm, words, sorted(partner), positions, number, count, make)
    return Asked(clean, corrupt, graded, alignment, tuple(columns))


def pair_of(lm: LM, asked: Asked, clean: float, corrupt: float | None) -> Pair:
    """A pair of a result, with the metric of both prompts."""
    alone: dict[Side, tuple[int, ...]] = {"clean": asked.alignment.clean_only, "corrupt": asked.alignment.corrupt_only}
    skipped: list[tuple[Side, int, str]] = [
        (side, p, asked.side(side).tokens[p]) for side, positions in alone.items() for p in positions
    ]
    return Pair(
        clean_prompt=asked.clean.text, corrupt_prompt=asked.corrupt.text, clean_tokens=asked.clean.tokens,
        corrupt_tokens=asked.corrupt.tokens, answer=text_of(lm, asked.graded.answer) or "",
        foil=text_of(lm, asked.graded.foil), clean=clean, corrupt=corrupt, columns=asked.columns,
        alignment=asked.alignment.pairs, skipped=tuple(skipped), answer_ids=asked.graded.answer,
        foil_ids=asked.graded.foil,
    )  # fmt: skip


def question_of(asked: Sequence[Asked]) -> list[Any]:
    """What of the pairs decides the values of a study, as plain data."""
    return [
        [pair.clean.ids, pair.corrupt.ids, msgspec.to_builtins(pair.graded), msgspec.to_builtins(pair.columns)]
        for pair in asked
    ]
