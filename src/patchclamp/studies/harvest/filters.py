"""Filters say which rows of a data set are kept. All but the caps on norms depend on the tokens alone, so the places of
rows are known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Tokenizer
from patchclamp.engines.tokenizer import NoTokenizer
from patchclamp.errors import ProgramError
from patchclamp.language.tokens import as_integer
from patchclamp.language.values import Converted, as_flag, as_items, as_number


class Filters(Converted, frozen=True, forbid_unknown_fields=True):
    """Which rows are kept: those that pass all of these.

    no_bos: not the first token of a document where that is a special one
    no_special: no special tokens
    positions: positions of the document in any of these half-open windows, as Python slices have them: (4, None),
        (-8, None); all if there are none
    only_tokens, not_tokens: these token ids alone, if any; none of these
    norm_cap: norms (L2) up to this at every site, of whole rows: before they are projected or added up
    norm_times_median: norms up to so many times the median of the row's shard, at every site; with sums, up to so many
        times the median of the document's kept rows
    """

    no_bos: bool = False
    no_special: bool = False
    positions: tuple[tuple[int | None, int | None], ...] = ()
    only_tokens: tuple[int, ...] = ()
    not_tokens: tuple[int, ...] = ()
    norm_cap: float | None = None
    norm_times_median: float | None = None

    def __post_init__(self) -> None:
        for name in ("no_bos", "no_special"):
            as_flag(getattr(self, name), f"filters.{name}")
        for name, read in (("positions", _windows), ("only_tokens", _numbers), ("not_tokens", _numbers), ("norm_cap", _norm),
                           ("norm_times_median", _norm)):  # fmt: skip
            try:
                value = read(getattr(self, name))
            except (TypeError, ValueError, ProgramError) as error:
                raise ProgramError(f"{error}", f"filters.{name}") from None
            msgspec.structs.force_setattr(self, name, value)

    @property
    def caps_norms(self) -> bool:
        return self.norm_cap is not None or self.norm_times_median is not None

    def kept(self, tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Whether the row of each token is kept, as far as tokens say: bool [N]. Document i has the tokens from
        `starts[i]` to `starts[i + 1]`."""
        kept = np.ones(len(tokens), bool)
        if self.no_bos or self.no_special:
            special = np.isin(tokens, special_ids(tokenizer, np.unique(tokens)))
            begins = np.zeros(len(tokens), bool)
            begins[starts[:-1][np.diff(starts) > 0]] = True
            kept &= ~special if self.no_special else ~(special & begins)
        if self.positions:
            kept &= self._in_windows(starts)
        if self.only_tokens:
            kept &= np.isin(tokens, self.only_tokens)
        if self.not_tokens:
            kept &= ~np.isin(tokens, self.not_tokens)
        return kept

    def _in_windows(self, starts: np.ndarray) -> np.ndarray:
        """Whether each token's position lies in a window."""
        lengths = np.diff(starts)
        length = np.repeat(lengths, lengths)
        position = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        inside = np.zeros(len(position), bool)
        for first, end in self.positions:
            first = 0 if first is None else first
            low = first if first >= 0 else np.maximum(length + first, 0)
            high = length if end is None else (end if end >= 0 else length + end)
            inside |= (position >= low) & (position < high)
        return inside

    def passing(self, norms: np.ndarray) -> np.ndarray:
        """Whether each of a shard's rows is within the caps, bool [n], by its norms at one site [n]."""
        passing = np.ones(len(norms), bool)
        if self.norm_cap is not None:
            passing &= norms <= self.norm_cap
        if self.norm_times_median is not None and len(norms):
            passing &= norms <= self.norm_times_median * np.median(norms)
        return passing


def _windows(windows: Iterable[Any]) -> tuple[tuple[int | None, int | None], ...]:
    windows = as_items(windows, "")
    if not all(isinstance(window, (tuple, list)) and len(window) == 2 for window in windows):
        raise ValueError(f"windows are pairs of first and end, such as ((4, None),), not {windows!r}")
    return tuple((_end(first), _end(end)) for first, end in windows)


def _end(value: Any) -> int | None:
    return None if value is None else as_integer(value)


def _numbers(ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(as_integer, as_items(ids, "")))


def _norm(value: Any) -> float | None:
    if value is not None and not as_number(value) > 0:
        raise ValueError(f"a norm above 0 is needed, not {value!r}")
    return None if value is None else float(value)


def special_ids(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """Those of some token ids that are special: they have a text of their own, and none when special ones are left
    out."""
    if isinstance(tokenizer, NoTokenizer):
        raise ProgramError("an engine without a tokenizer does not know special tokens: give not_tokens=", "filters")
    texts = tokenizer.token_strings(ids.tolist())
    return [token for token, text in zip(ids.tolist(), texts, strict=True) if text and not tokenizer.decode([token])]
