"""The columns of a sweep's grid: positions of the prompt that is patched, and those of the prompt that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.language.values import as_plain
from patchclamp.lm import LM
from patchclamp.plan import Prompt
from patchclamp.studies.selected import selection as as_selection


class Column(msgspec.Struct, frozen=True):
    """Aligned positions patched together: those of the clean prompt are those of the corrupt one."""

    label: str
    clean: tuple[int, ...]
    corrupt: tuple[int, ...]


class Words(msgspec.Struct, frozen=True):
    """A prompt: its token ids, its tokens for people, and its text."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str

    @property
    def last(self) -> int:
        return len(self.ids) - 1


def words_of(lm: LM, prompt: Any, path: str) -> Words:
    """A prompt of text or token ids, read."""
    prompt = as_plain(prompt, path)
    if isinstance(prompt, str):
        try:
            ids, text = lm.tokens(prompt), prompt
        except ProgramError as error:
            raise ProgramError(error.message, path) from None
    elif isinstance(prompt, (list, tuple)) and all(is_token_id(token) for token in prompt):
        ids = [int(token) for token in prompt]
        if any(not 0 <= token < lm.model.d_vocab for token in ids):
            raise TokensError(f"a token id is outside the vocabulary of {lm.model.d_vocab}", path)
        text = lm.tokenizer.decode(ids)
    else:
        raise ProgramError("a prompt is text or a list of token ids", path)
    if not ids:
        raise TokensError("an empty prompt has no position to run", path)
    return Words(tuple(ids), tuple(lm.tokenizer.token_strings(ids)), text)


def listed(prompts: Any) -> bool:
    """Whether these are several prompts: a list of texts, or of lists of token ids."""
    return isinstance(prompts, (list, tuple)) and not (len(prompts) > 0 and is_token_id(prompts[0]))


def chosen_positions(lm: LM, words: Words, selection: Any, path: str) -> tuple[int, ...]:
    """The positions of a prompt that a selection names. Raises `TokensError` if there are none."""
    try:
        prompt = Prompt(words.ids, lambda: lm.tokenizer.spell(words.ids, words.text))
        selected = prompt.select(as_selection(selection), len(words.ids)).tolist()
    except PatchclampError as error:
        raise error.under(path) from None
    if not selected:
        raise TokensError(f"{selection}: nothing selected of a prompt of {len(words.ids)} tokens", path)
    return tuple(selected)


Make = Callable[[str, tuple[int, ...], str], Column]
"""A column of a label and positions of the patched prompt; the text is the path of the selection."""


def columns_of(
    lm: LM, words: Words, all_positions: Sequence[int], positions: Any, number: int, count: int, make: Make
) -> list[Column]:
    """The columns of prompt pair `number` of `count`: one for each selection of `positions`, or for each
    position there is.

    positions: selections of the patched prompt; a mapping says their labels, and of several pairs a selection in it may
        be a list of selections, one a pair
    """
    if positions is None:
        return [make(words.tokens[p], (p,), "positions") for p in all_positions]
    columns: list[Column] = []
    for label, selection, path in _selections(positions, number, count):
        chosen = chosen_positions(lm, words, selection, path)
        column = make("".join(words.tokens[p] for p in chosen) if label is None else label, chosen, path)
        if any((other.clean, other.corrupt) == (column.clean, column.corrupt) for other in columns):
            raise TokensError(f"{selection} selects {list(chosen)}, which another column has already", path)
        columns.append(column)
    return columns


def _selections(positions: Any, number: int, count: int) -> list[tuple[str | None, Any, str]]:
    """(label, selection, path) of every column of a pair."""
    positions = as_plain(positions, "positions")
    if isinstance(positions, Mapping):
        chosen = []
        for label, selection in positions.items():
            path = f"positions[{label!r}]"
            selection = as_plain(selection, path)
            if isinstance(selection, (list, tuple)):
                if len(selection) != count:
                    raise ProgramError(
                        f"expected one selection for each of {count} prompts, got {len(selection)}; several positions "
                        "of one column are one selection, such as pc.prompt[-2, -1]",
                        path,
                    )
                selection = selection[number]
            chosen.append((str(label), selection, path))
        return chosen
    several: Sequence[Any] = list(positions) if isinstance(positions, (list, tuple)) else [positions]
    return [(None, selection, f"positions[{i}]") for i, selection in enumerate(several)]


def same_columns(columns: Sequence[Sequence[Column]]) -> tuple[Column, ...]:
    """The columns of several pairs as those of the grid: labels that differ give way to the position in the prompt.

    Raises: `TokensError` if pairs have different numbers of columns.
    """
    first = columns[0]
    for i, other in enumerate(columns):
        if len(other) != len(first):
            raise TokensError(
                f"pair {i} has {len(other)} positions that can be patched, and pair 0 has {len(first)}: prompts of one "
                "length have all their positions as columns; of others say which, positions=['prompt[-1]', …]",
                "positions",
            )
    return tuple(
        column if all(other[p].label == column.label for other in columns) else _numbered(column)
        for p, column in enumerate(first)
    )


def _numbered(column: Column) -> Column:
    return Column(f"token {', '.join(map(str, column.corrupt))}", column.clean, column.corrupt)
