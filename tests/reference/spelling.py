"""Where tokens lie in their text, from the decoded text of every prefix and suffix: quadratic, and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

PARTIAL = "\ufffd"


def spell(decode: Callable[[Sequence[int]], str], ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    full, offsets, complete = decode(ids), [], 0
    for i in range(1, len(ids) + 1):
        begin, prefix = complete, decode(ids[:i])
        same = len(commonprefix([prefix, full]))  # noqa: RUF071 - of texts, not paths
        whole = same == len(prefix)
        if whole and (same <= begin or prefix.endswith(PARTIAL)):
            whole = full[same:].lstrip() == decode(ids[i:]).lstrip()
        if not whole:
            same = min(same, len(prefix.rstrip(PARTIAL)))
        complete = max(complete, same)
        offsets.append((begin, complete if whole else min(complete + 1, len(full))))
    return full, offsets
