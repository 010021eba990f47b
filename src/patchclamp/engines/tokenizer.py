"""A Transformers tokenizer as the `Tokenizer` protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from patchclamp.errors import ProgramError

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is one byte, where a vocabulary falls back on bytes


class HubTokenizer:
    """Wraps what `AutoTokenizer.from_pretrained` gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def load(cls, path: str, **options: Any) -> HubTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path, **options))

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    def bare(self, text: str) -> list[int]:
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def settled(self, ids: Sequence[int]) -> str:
        """Without a character that is not whole yet; bytes in a row are taken together, and one bad end spoils all of
        them; and where the tokenizer tidies spaces, without the last word."""
        end = len(ids)
        while end and self._open(ids[end - 1]):
            end -= 1
        text = self.decode(ids[:end]).rstrip("\ufffd")
        return text.rpartition(" ")[0] if getattr(self.inner, "clean_up_tokenization_spaces", False) else text

    def _open(self, token: int) -> bool:
        """Whether a token is one byte, or passed over between such."""
        piece = self.inner.convert_ids_to_tokens(token) or ""  # a vocabulary may be padded
        return BYTE.fullmatch(piece) is not None or token in self.inner.all_special_ids

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.inner.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in ids]

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        ids = list(ids)
        for given, special in ((text, True), (self._whole(ids), False)):
            if given is None or not self.inner.is_fast:
                continue
            made = self.inner(given, return_offsets_mapping=True, add_special_tokens=special)
            if list(made["input_ids"]) == ids:
                return given, [tuple(pair) for pair in made["offset_mapping"]]
        ends = [len(self._whole(ids[: i + 1])) for i in range(len(ids))]
        return self._whole(ids), list(zip([0, *ends[:-1]], ends, strict=True))

    def _whole(self, ids: list[int]) -> str:
        return self.inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if not getattr(self.inner, "chat_template", None):
            raise ProgramError("this model's tokenizer has no chat template: give a prompt instead of messages")
        made = self.inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return list(made["input_ids"] if hasattr(made, "keys") else made)


class NoTokenizer:
    """For an engine started without one: prompts are token ids, and nothing has a text."""

    def _none(self, *_: Any) -> Any:
        raise ProgramError("this engine was started without a tokenizer: give token ids")

    encode: Any = _none
    bare: Any = _none
    spell: Any = _none
    chat: Any = _none

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    settled = decode

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [str(token) for token in ids]
