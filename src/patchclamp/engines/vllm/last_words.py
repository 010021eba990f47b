"""What front ends of one engine core leave for each other: the last word on each key, in the order it was said."""

from __future__ import annotations

from collections import OrderedDict

MAX_WORDS = 1 << 16  # those said longest ago go first


class LastWords:
    """Bytes by key, each with the number of when it was said."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[int, bytes]] = OrderedDict()  # ascending by number
        self._number = 0

    def say(self, key: str, word: bytes) -> None:
        """The last word on a key."""
        self._number += 1
        self._said[key] = self._number, word
        self._said.move_to_end(key)
        if len(self._said) > MAX_WORDS:
            self._said.popitem(last=False)

    def since(self, number: int) -> tuple[int, list[bytes]]:
        """What was said after a number, in order, and the number to ask with next."""
        news: list[bytes] = []
        for said, word in reversed(self._said.values()):
            if said <= number:
                break
            news.append(word)
        return self._number, news[::-1]
