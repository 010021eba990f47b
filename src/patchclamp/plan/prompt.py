"""A prompt, and what a selection of tokens names in its request: positions, some of them on condition.

Which tokens will be generated is not known beforehand.  Where a selection asks for token ids, a generated position is
selected under some ids and not under others; whoever carries the op out looks at the token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from patchclamp.language.tokens import Joined, Positions, Selection, TextSpan, TokenIds, Tokens, ids_in


class Case(msgspec.Struct):
    """Positions of a selection: all of them where `ids` is empty; else where the token is one of the ids, ascending,
    or, with `others`, none of them. `alone`: the selection has no other positions, whatever is generated."""

    positions: np.ndarray
    ids: tuple[int, ...] = ()
    others: bool = False
    alone: bool = False


class Prompt(msgspec.Struct):
    """A prompt's tokens; `spell` gives its text and each token's (first, last+1) character when a span asks."""

    ids: Sequence[int]
    spell: Callable[[], tuple[str, list[tuple[int, int]]]]

    def select(self, tokens: Tokens, limit: int, known: Sequence[int] | None = None, lowest: int = 0) -> np.ndarray:
        """Selected positions below `limit`, in the selection's order: ascending but for a list that is not.

        Token ids are looked for among the `known` tokens, the prompt's if not given; `lowest` as in `cases`.
        """
        there = np.asarray((self.ids if known is None else known)[:limit], np.int64)
        return self._select(tokens, limit, lambda leaf: np.flatnonzero(np.isin(there, leaf.ids)), lowest)

    def cases(self, tokens: Tokens, limit: int, lowest: int = 0) -> list[Case]:
        """What a selection names below `limit`, whatever tokens are generated: first the positions that it names in any
        case, then those that it names on condition, none of them twice. Where there are rows only from position
        `lowest` on, `every`, or a range of it, means those."""
        leaves, first = ids_in(tokens), len(self.ids)
        certain = self.select(tokens, limit, lowest=lowest)
        if not leaves or first >= limit:
            return [Case(certain, alone=True)]
        later, none = np.arange(first, limit), np.zeros(0, np.int64)
        alike: dict[tuple[bool, ...], list[int]] = {(False,) * len(leaves): []}  # by what they are to the selection
        named = np.unique(np.concatenate([leaf.ids for leaf in leaves]))
        for token, among in zip(named.tolist(), np.stack([np.isin(named, leaf.ids) for leaf in leaves]).T, strict=True):
            alike.setdefault(tuple(among.tolist()), []).append(token)
        found: dict[bytes, tuple[np.ndarray, list[int], bool]] = {}  # by the positions that are selected
        for signature, ids in alike.items():
            hits = iter(signature)
            chosen = self._select(tokens, limit, lambda leaf, hits=hits: later if next(hits) else none)
            chosen = np.sort(chosen[chosen >= first])
            _, others, rest = found.setdefault(chosen.tobytes(), (chosen, [], False))
            others.extend(ids)
            found[chosen.tobytes()] = chosen, others, rest or not any(signature)
        always = set.intersection(*(set(chosen.tolist()) for chosen, _, _ in found.values()))
        known = np.concatenate([certain[certain < first], np.array(sorted(always), np.int64)])
        depends = [
            Case(some, tuple(self._without(alike, ids) if rest else sorted(ids)), rest)
            for chosen, ids, rest in found.values()
            if len(some := chosen[~np.isin(chosen, known)])
        ]
        return [Case(known, alone=not depends), *depends]

    @staticmethod
    def _without(alike: dict[tuple[bool, ...], list[int]], ids: list[int]) -> list[int]:
        """All ids that are named but for some."""
        return sorted({token for many in alike.values() for token in many} - set(ids))

    def _select(
        self, tokens: Selection, limit: int, match: Callable[[TokenIds], np.ndarray], lowest: int = 0
    ) -> np.ndarray:
        """Positions of a selection, `match` giving those of token ids; asked of them in their order in the text."""
        if isinstance(tokens, Joined):
            left, right = (self._select(side, limit, match, lowest) for side in (tokens.left, tokens.right))
            joined = {"|": np.union1d, "&": np.intersect1d, "-": np.setdiff1d}[tokens.op]
            return joined(left, right)
        if isinstance(tokens, TextSpan):
            text, offsets = self.spell()
            return np.asarray(tokens.find(offsets, text), np.int64)
        if isinstance(tokens, TokenIds):
            return match(tokens)
        assert isinstance(tokens, Positions)
        chosen = np.asarray(tokens.select(len(self.ids), limit), np.int64)
        numbered = tokens.of != "every" or isinstance(tokens.index, (int, tuple))
        return chosen if numbered else chosen[chosen >= lowest]
