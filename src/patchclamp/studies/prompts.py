"""The prompts of a study, read once: texts, token ids or chats, to token ids and what is shown of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import as_items, as_plain
from patchclamp.lm import LM


class Asked(msgspec.Struct, frozen=True):
    """A prompt in token ids; `text` is what they were made of, where that is known, and `shown` what a reader sees."""

    ids: tuple[int, ...]
    text: str | None
    shown: str

    @property
    def prompt(self) -> str | list[int]:
        """As `lm.run` takes it."""
        return list(self.ids) if self.text is None else self.text


def ask(lm: LM, prompts: Sequence[Any], chat: bool = False, path: str = "prompts") -> list[Asked]:
    """Prompts in token ids. With `chat` each is the text of a user's turn, or a list of messages.

    Raises: `ProgramError` for what is no list of prompts, and for a prompt that cannot be read, with its place.
    """
    if not (prompts := as_items(prompts, path)):
        raise ProgramError("a list of at least one prompt is needed", path)
    asked = []
    for i, prompt in enumerate(prompts):
        try:
            asked.append(_chat(lm, prompt) if chat else _plain(lm, prompt))
        except PatchclampError as error:
            raise error.under(f"{path}[{i}]") from None
    return asked


def _plain(lm: LM, prompt: Any) -> Asked:
    if isinstance(prompt, str):
        return Asked(tuple(lm.tokens(prompt)), prompt, prompt)
    prompt = as_plain(prompt)
    if not isinstance(prompt, (list, tuple)) or not all(map(is_token_id, prompt)):
        raise ProgramError(f"expected a prompt as text or token ids, got {type(prompt).__name__} {prompt!r:.100}")
    ids = tuple(int(i) for i in prompt)
    return Asked(ids, None, lm.tokenizer.decode(list(ids)))


def _chat(lm: LM, prompt: Any) -> Asked:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, (list, tuple)) or not all(isinstance(one, dict) for one in messages) or not messages:
        raise ProgramError("with chat=True a prompt is text or a list of messages, each with role and content")
    return Asked(tuple(lm.tokenizer.chat(list(messages))), None, str(messages[-1].get("content", "")))


def content_hash(asked: Iterable[Asked]) -> str:
    """SHA-256 of prompts, in hex: equal for the same token ids in the same order."""
    return hashlib.sha256(msgspec.json.encode([one.ids for one in asked])).hexdigest()
