"""A prompt, and the positions of its request that a selection of tokens resolves to.

Generated tokens are not known in advance, so a selection by token id resolves to conditional positions; the kernel
checks the condition once the token is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from patchclamp.errors import TokensError
from patchclamp.language.tokens import (
    ImageTokens,
    Joined,
    Positions,
    Role,
    Selection,
    TextSpan,
    TokenIds,
    Tokens,
    ids_in,
)  # fmt: skip


class Case(msgspec.Struct):
    """Positions of a selection that have the same condition.

    ids: ascending; the token's id must be one of them; empty: no condition
    others: the token's id must not be in `ids` instead
    alone: True if the selection has no other positions, whichever tokens are generated
    """

    positions: np.ndarray
    ids: tuple[int, ...] = ()
    others: bool = False
    alone: bool = False


class Prompt(msgspec.Struct):
    """A prompt's token ids, and the data that selections need.

    spell: returns the text, and each token's (first, last + 1) character, for spans
    turns: returns each chat message's role and the positions of its tokens, for roles; None if the prompt is not a chat
    images: the positions of each image's placeholder tokens
    """

    ids: Sequence[int]
    spell: Callable[[], tuple[str, list[tuple[int, int]]]]
    turns: Callable[[], list[tuple[str, list[int]]]] | None = None
    images: Sequence[Sequence[int]] = ()

    def select(self, tokens: Tokens, limit: int, ids: Sequence[int] | None = None, lowest: int = 0) -> np.ndarray:
        """The selected positions below `limit`, ascending unless the selection is an unsorted list.

        ids: the token ids that selections by id are matched against; None: the prompt's
        lowest: as in `cases`
        """
        token = np.asarray((self.ids if ids is None else ids)[:limit], np.int64)
        return self._select(tokens, limit, lambda leaf: np.flatnonzero(np.isin(token, leaf.ids)), lowest)

    def cases(self, tokens: Tokens, limit: int, lowest: int = 0) -> list[Case]:
        """The distinct positions of a selection below `limit`: first the unconditional ones, then those with a
        condition. `lowest`: the first position that has rows; `every`, or a range of it, starts there.
        """
        leaves, first = ids_in(tokens), len(self.ids)
        certain = self.select(tokens, limit, lowest=lowest)
        if not leaves or first >= limit:
            return [Case(certain, alone=True)]
        later, none = np.arange(first, limit), np.zeros(0, np.int64)
        # token ids by signature (the leaves that contain them): ids with one signature select the same positions
        ids_of: dict[tuple[bool, ...], list[int]] = {(False,) * len(leaves): []}
        named = np.unique(np.concatenate([leaf.ids for leaf in leaves]))
        for token, among in zip(named.tolist(), np.stack([np.isin(named, leaf.ids) for leaf in leaves]).T, strict=True):
            ids_of.setdefault(tuple(among.tolist()), []).append(token)
        # by selected positions: these, the ids that select them, and True if all ids outside the leaves do, too
        outcomes: dict[bytes, tuple[np.ndarray, list[int], bool]] = {}
        for signature, ids in ids_of.items():
            hits = iter(signature)
            chosen = self._select(tokens, limit, lambda leaf, hits=hits: later if next(hits) else none)
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
        self, tokens: Selection, limit: int, match: Callable[[TokenIds], np.ndarray], lowest: int = 0
    ) -> np.ndarray:
        """The positions of a selection. `match` returns those of each selection by token id in it, called in order."""
        if isinstance(tokens, Joined):
            left, right = (self._select(side, limit, match, lowest) for side in (tokens.left, tokens.right))
            joined = {"|": np.union1d, "&": np.intersect1d, "-": np.setdiff1d}[tokens.op]
            return joined(left, right)
        if isinstance(tokens, TextSpan):
            text, offsets = self.spell()
            return np.asarray(tokens.find(offsets, text), np.int64)
        if isinstance(tokens, Role):
            if self.turns is None:
                raise TokensError(f"{tokens}: the prompt is not a chat, so it has no messages; give messages=")
            return np.asarray(tokens.find(self.turns()), np.int64)
        if isinstance(tokens, ImageTokens):
            return np.asarray(tokens.find(self.images), np.int64)
        if isinstance(tokens, TokenIds):
            return match(tokens)
        assert isinstance(tokens, Positions)
        chosen = np.asarray(tokens.select(len(self.ids), limit), np.int64)
        numbered = tokens.of != "every" or isinstance(tokens.index, (int, tuple))
        return chosen if numbered else chosen[chosen >= lowest]
