"""Alignment of two prompts of perhaps different lengths: which position of one is which of the other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from patchclamp.errors import TokensError


class Alignment(msgspec.Struct, frozen=True):
    """`pairs` of (clean, corrupt) positions, ascending; positions of either prompt that have no partner."""

    pairs: tuple[tuple[int, int], ...]
    clean_only: tuple[int, ...]
    corrupt_only: tuple[int, ...]


def align(clean: Sequence[int], corrupt: Sequence[int]) -> Alignment:
    """Prompts of equal length position by position; else the common prefix by identity, the common suffix by offset.

    Between them the prompts differ: those positions are paired one by one only if there are equally many.
    Raises `TokensError` if nothing can be paired.
    """
    shorter = min(len(clean), len(corrupt))
    if len(clean) == len(corrupt):
        return Alignment(tuple((p, p) for p in range(shorter)), (), ())
    prefix = next((p for p in range(shorter) if clean[p] != corrupt[p]), shorter)
    rest = shorter - prefix
    suffix = next((s for s in range(rest) if clean[-1 - s] != corrupt[-1 - s]), rest)
    pairs = [(p, p) for p in range(prefix)]
    pairs += [(len(clean) - s, len(corrupt) - s) for s in range(suffix, 0, -1)]
    if not pairs:
        raise TokensError(
            f"the clean and the corrupt prompt ({len(clean)} and {len(corrupt)} tokens) share no first or last token, "
            "so no position of one is a position of the other; give prompts that differ in the middle, or positions= "
            "in pairs"
        )
    return Alignment(
        tuple(pairs),
        tuple(range(prefix, len(clean) - suffix)),
        tuple(range(prefix, len(corrupt) - suffix)),
    )
