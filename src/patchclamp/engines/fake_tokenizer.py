"""The fake engine's tokenizer: a few words, single characters, and nothing to load."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

from patchclamp.engines.chat import Turn, find_turns
from patchclamp.errors import ProgramError

BOS, EOS = 0, 1
SPECIAL = ("<s>", "</s>")
LETTERS = tuple(" abcdefghijklmnopqrstuvwxyz.,?!':\n")
WORDS = (
    "The", "the", "hello", "user", "assistant", " Paris", " Rome", " Berlin", " France", " Italy", " Germany",
    " Eiffel", " Tower", " Colosseum", " capital", " city", " of", " is", " in", " on", " the", " a", " and", " world",
    " cat", " dog", " sat", " not",
)  # fmt: skip


class FakeTokenizer:
    """Words with their leading space and single characters, the longest that fits first. Any text can be encoded.

    A character outside the vocabulary becomes one of the letter tokens, by its hash; `spell` still says where it was.
    A smaller vocabulary has fewer words, a larger one has tokens that no text is encoded as.
    """

    def __init__(self, d_vocab: int) -> None:
        texts = [*SPECIAL, *LETTERS, *WORDS][:d_vocab]
        self._texts = texts + [f"<{i}>" for i in range(len(texts), d_vocab)]
        self._letters = min(len(LETTERS), d_vocab - len(SPECIAL))
        self._ids = {text: i for i, text in enumerate(texts) if i >= len(SPECIAL)}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._next = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [BOS, *self.bare(text)]

    def bare(self, text: str) -> list[int]:
        return [self._id(word) for word in self._next.findall(text)]

    def _id(self, word: str) -> int:
        hashed = len(SPECIAL) + zlib.crc32(word.encode("utf-8", "surrogatepass")) % self._letters
        return self._ids.get(word, hashed)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return "".join(self._texts[i] for i in ids if i >= len(SPECIAL))

    settled = decode

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self._texts[i] for i in ids]

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        """The text, if it is encoded as these ids, or else their decoded text; a special token has no characters."""
        ids = list(ids)
        bare = [i for i in ids if i >= len(SPECIAL)]
        matches = text is not None and ids in (self.encode(text), self.bare(text))
        words = self._next.findall(text) if text is not None and matches else [self._texts[i] for i in bare]
        widths, begin, offsets = iter(words), 0, []
        for i in ids:
            end = begin + (len(next(widths)) if i >= len(SPECIAL) else 0)
            offsets.append((begin, end))
            begin = end
        return "".join(words), offsets

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ProgramError("a message is an object with the texts 'role' and 'content'", f"messages[{i}]")
        return self.encode(_rendered(messages))

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        return find_turns(_rendered, lambda text: self.spell(ids, text), messages)


def _rendered(messages: list[dict[str, Any]]) -> str:
    """The chat's text."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
