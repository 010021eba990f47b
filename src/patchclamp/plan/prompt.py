"""A prompt, and the resolution of token selections to positions.

Generated tokens are not known in advance, so a selection by token id resolves to conditional positions; the kernel
checks the condition once the token is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from patchclamp.errors import TokensError
from patchclamp.language.tokens import (
    Between,
    ImageTokens,
    Joined,
    Positions,
    Role,
    Selection,
    TextSpan,
    TokenIds,
    Tokens,
    ids_in,
    leaves,
)  # fmt: skip


class Case(msgspec.Struct):
    """A selection's positions that share a condition.

    ids: the allowed token ids, ascending; empty: no condition
    others: True if `ids` are excluded instead
    alone: True if these are all of the selection's positions, regardless of the generated tokens
    inside: True if the token must be inside the selection's `between`, False if outside; None: no such condition
    """

    positions: np.ndarray
    ids: tuple[int, ...] = ()
    others: bool = False
    alone: bool = False
    inside: bool | None = None


class Prompt(msgspec.Struct):
    """A prompt's token ids, and the data for selections.

    spell: returns the text, and each token's character offsets (begin, end), for spans
    turns: returns each chat message's role and token positions, for roles; None if the prompt is not a chat
    images: the positions of each image's placeholder tokens
    bare: encodes text without special tokens, for delimiters; None: no tokenizer
    """

    ids: Sequence[int]
    spell: Callable[[], tuple[str, list[tuple[int, int]]]]
    turns: Callable[[], list[tuple[str, list[int]]]] | None = None
    images: Sequence[Sequence[int]] = ()
    bare: Callable[[str], Sequence[int]] | None = None

    def select(self, tokens: Tokens, limit: int, ids: Sequence[int] | None = None, lowest: int = 0) -> np.ndarray:
        """Return the selected positions below `limit`, ascending unless the selection is an unsorted list.

        ids: the token ids for selections by id; None: the prompt's
        lowest: as in `cases`
        """
        token = np.asarray((self.ids if ids is None else ids)[:limit], np.int64)
        spelled = [each for leaf in leaves(tokens) if isinstance(leaf, Between)
                   for each in (leaf.opening, leaf.closing) if self._token_of(each) is None]  # fmt: skip
        later = np.arange(len(self.ids), len(token)) if spelled else np.zeros(0, np.int64)

        def matching(beyond: np.ndarray) -> np.ndarray:
            """Return the selection, taking the generated tokens at `beyond` as between multi-token delimiters."""

            def match(leaf: TokenIds | Between) -> np.ndarray:
                if isinstance(leaf, TokenIds):
                    return np.flatnonzero(np.isin(token, leaf.ids))
                if len(later) and not {leaf.opening, leaf.closing}.isdisjoint(spelled):
                    return np.concatenate([self._inside(leaf, token[: len(self.ids)]), beyond])
                return self._inside(leaf, token)

            return self._select(tokens, limit, match, lowest)

        chosen = matching(later[:0])
        if len(later) and not np.array_equal(chosen, matching(later)):
            self.one_token(spelled[0], tokens)
        return chosen

    def _inside(self, between: Between, token: np.ndarray) -> np.ndarray:
        """Return the positions of the tokens between two delimiters, ascending."""
        opening, closing = (self._delimiter(each, token) for each in (between.opening, between.closing))
        at, delimiter = np.arange(len(token)), opening | closing
        last = np.maximum.accumulate(np.where(delimiter, at, 0))  # the latest delimiter up to each position
        return at[opening[last] & ~delimiter]

    def _delimiter(self, delimiter: str | int, token: np.ndarray) -> np.ndarray:
        """Return a mask of a delimiter's tokens, [T]."""
        if (known := self._token_of(delimiter)) is not None:
            return token == known
        text, offsets = self.spell()
        matches = len(TextSpan(str(delimiter)).starts(text))
        spans = [TextSpan(str(delimiter), i).find(offsets, text) for i in range(matches)]
        return np.isin(np.arange(len(token)), [position for span in spans for position in span])

    def one_token(self, delimiter: str | int, selection: object) -> int:
        """Return a delimiter's token id. Raises `TokensError` for a delimiter of several tokens."""
        known = self._token_of(delimiter)
        if known is None:
            raise TokensError(
                f"{selection}: multi-token {delimiter!r} is supported only in the prompt; use prompt & between(...)"
            )
        return known

    def _token_of(self, delimiter: str | int) -> int | None:
        if isinstance(delimiter, int):
            return delimiter
        ids = [] if self.bare is None else self.bare(delimiter)
        return ids[0] if len(ids) == 1 else None

    def cases(self, tokens: Tokens, limit: int, lowest: int = 0) -> list[Case]:
        """Split a selection's positions below `limit` by condition: first the unconditional, then the conditional ones.
        `lowest`: the first position that has rows; `every` and its ranges start there.
        """
        spans = {leaf for leaf in leaves(tokens) if isinstance(leaf, Between)}
        if not spans or len(self.ids) >= limit:
            return self._cases(tokens, limit, lowest, False)
        if len(spans) > 1:
            raise TokensError(f"{tokens}: expected one pair of delimiters for generated tokens, got {len(spans)}")
        of_sides = {inside: self._cases(tokens, limit, lowest, inside) for inside in (True, False)}
        inside, outside = (
            [(case.positions.tolist(), case.ids, case.others) for case in cases] for cases in of_sides.values()
        )
        if inside == outside:  # such as prompt & between(...) | token(...)
            return of_sides[False]
        certain = np.intersect1d(of_sides[True][0].positions, of_sides[False][0].positions)
        conditional = [
            msgspec.structs.replace(case, positions=positions, alone=False, inside=inside)
            for inside, cases in of_sides.items() for case in cases
            if len(positions := np.setdiff1d(case.positions, certain))
        ]  # fmt: skip
        if not conditional:
            return of_sides[False]
        for delimiter in (part for span in spans for part in (span.opening, span.closing)):
            self.one_token(delimiter, tokens)
        return [Case(certain), *conditional]

    def _cases(self, tokens: Tokens, limit: int, lowest: int, inside: bool) -> list[Case]:
        """Return `cases`, assuming that all generated tokens are inside the selection's `between`, or outside it."""
        by_id, first = ids_in(tokens), len(self.ids)
        certain = self.select(tokens, limit, lowest=lowest)
        if first >= limit or not (by_id or inside):
            return [Case(certain, alone=True)]
        later, none = np.arange(first, limit), np.zeros(0, np.int64)
        # token ids by signature (the leaves that contain the id): ids with equal signatures select the same positions
        ids_of: dict[tuple[bool, ...], list[int]] = {(False,) * len(by_id): []}
        named = np.unique(np.concatenate([np.zeros(0, np.int64), *(leaf.ids for leaf in by_id)]))
        among_leaves = np.array([np.isin(named, leaf.ids) for leaf in by_id]).reshape(len(by_id), len(named)).T
        for token, among in zip(named.tolist(), among_leaves, strict=True):
            ids_of.setdefault(tuple(among.tolist()), []).append(token)
        # by selected positions: the positions, the ids that select them, and True if all ids outside the leaves do, too
        outcomes: dict[bytes, tuple[np.ndarray, list[int], bool]] = {}
        for signature, ids in ids_of.items():
            hits = iter(signature)

            def match(leaf: TokenIds | Between, hits: Iterator[bool] = hits) -> np.ndarray:
                return later if (inside if isinstance(leaf, Between) else next(hits)) else none

            chosen = self._select(tokens, limit, match)
            chosen = np.sort(chosen[chosen >= first])
            _, selecting, unnamed = outcomes.setdefault(chosen.tobytes(), (chosen, [], False))
            selecting.extend(ids)
            outcomes[chosen.tobytes()] = chosen, selecting, unnamed or not any(signature)
        always = set.intersection(*(set(chosen.tolist()) for chosen, _, _ in outcomes.values()))
        certain = np.concatenate([certain[certain < first], np.array(sorted(always), np.int64)])
        conditional = [
            Case(positions, tuple(np.setdiff1d(named, ids).tolist() if unnamed else sorted(ids)), unnamed)
            for chosen, ids, unnamed in outcomes.values()
            if len(positions := chosen[~np.isin(chosen, certain)])
        ]
        return [Case(certain, alone=not conditional), *conditional]

    def _select(
        self, tokens: Selection, limit: int, match: Callable[[TokenIds | Between], np.ndarray], lowest: int = 0
    ) -> np.ndarray:
        """Return a selection's positions. `match` is called, in order, for each token-dependent part, and returns the
        part's positions."""
        if isinstance(tokens, Joined):
            left, right = (self._select(side, limit, match, lowest) for side in (tokens.left, tokens.right))
            joined = {"|": np.union1d, "&": np.intersect1d, "-": np.setdiff1d}[tokens.op]
            return joined(left, right)
        if isinstance(tokens, TextSpan):
            text, offsets = self.spell()
            return np.asarray(tokens.find(offsets, text), np.int64)
        if isinstance(tokens, Role):
            if self.turns is None:
                raise TokensError(f"{tokens}: the prompt is not a chat and has no messages; use messages=")
            return np.asarray(tokens.find(self.turns()), np.int64)
        if isinstance(tokens, ImageTokens):
            return np.asarray(tokens.find(self.images), np.int64)
        if isinstance(tokens, (TokenIds, Between)):
            return match(tokens)
        assert isinstance(tokens, Positions)
        chosen = np.asarray(tokens.select(len(self.ids), limit), np.int64)
        numbered = tokens.of != "every" or isinstance(tokens.index, (int, tuple))
        return chosen if numbered else chosen[chosen >= lowest]
