"""Where the messages of a chat stand in its prompt.

A chat template is a program of the model's, and may do anything with a message.  So nothing is guessed: the chat is
rendered once more with a mark in place of each message's content, and what stands between the marks, put together with
the contents, must be the prompt to the character.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from patchclamp.errors import TokensError
from patchclamp.plan import Prompt

TOLD = ("add_generation_prompt", "continue_final_message", "tools", "documents")  # to templates, beside their own words
Turn = tuple[str, list[int]]  # of a message the role, and the positions of the tokens that share a character with it


class Chat(msgspec.Struct):
    """A prompt's messages, and what the template was told besides (`add_generation_prompt` and the like)."""

    messages: list[dict[str, Any]]
    options: dict[str, Any] = {}


def chat_of(messages: Sequence[Any], options: dict[str, Any] | None = None) -> Chat:
    """A chat as it is remembered: of a part that is not text, an image say, only that it was there."""
    plain = [dict(message) for message in messages]
    return Chat([{**message, "content": _remembered(message.get("content"))} for message in plain], options or {})


def _remembered(content: Any) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    return [part if not _is_image(part) else {"type": part.get("type")} for part in content]


def prompt_of(
    tokenizer: Any, ids: Sequence[int], text: str | None, chat: Chat | None, images: Sequence[Sequence[int]] = ()
) -> Prompt:
    """The prompt that programs are bound to; `text` is what it was made of, where it is known; `images` as in
    `Prompt`."""
    turns = None if chat is None else functools.cache(lambda: tokenizer.turns(ids, chat.messages, chat.options))
    return Prompt(ids, functools.cache(lambda: tokenizer.spell(ids, text)), turns, images)


def find_turns(
    render: Callable[[list[dict[str, Any]]], str], spell: Callable[[str], tuple[str, list[tuple[int, int]]]],
    messages: list[dict[str, Any]],
) -> list[Turn]:  # fmt: skip
    """Of each message its role and its tokens.

    render: the text of a chat
    spell: as `Tokenizer.spell`, of this prompt
    Raises `TokensError` where the prompt is not what the template makes of these messages, one after the other.
    """
    if has_images(messages):
        raise TokensError(
            "role(): this chat has images in it, whose tokens are not what the chat template writes, so its messages "
            'cannot be told apart in the prompt; select by text, as in span("..."), or image[0]'
        )
    plain = [{**message, "content": _text(message.get("content"))} for message in messages]
    text = render(plain)
    spans = _spans(text, *_marked(render, plain), plain)
    spelled, offsets = spell(text)
    if spelled != text:
        raise TokensError("role(): the prompt is not spelled as its chat, so its messages cannot be told apart in it")
    return [
        (str(message.get("role")), [i for i, (a, b) in enumerate(offsets) if a < end and b > begin and b > a])
        for message, (begin, end) in zip(plain, spans, strict=True)
    ]


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a message has a part that is not text."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(map(_is_image, parts))


def _is_image(part: Any) -> bool:
    """Whether a part of a message is an image, or sound: anything but text."""
    return isinstance(part, Mapping) and not isinstance(part.get("text"), str)


def _text(content: Any) -> Any:
    """A message's content as text, where it comes in parts of text."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return content


def _is_said(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _marked(render: Callable[..., str], messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The chat with marks in place of contents, and the mark of each message that says something."""
    said = "".join(message["content"] for message in messages if _is_said(message))
    stem = next(f"mark{i}q" for i in range(len(said) + 1) if f"mark{i}q" not in said)
    marks = [f"{stem}{i}q" for i, message in enumerate(messages) if _is_said(message)]
    rest = iter(marks)
    return render([{**m, "content": next(rest)} if _is_said(m) else m for m in messages]), marks


def _spans(text: str, marked: str, marks: list[str], messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The (first, last + 1) character of each message in the chat's text; (0, 0) of one that says nothing."""
    between, rest = [], marked
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise _changed()
        between.append(before)
    between.append(rest)
    spans, at, number = [], len(between[0]), 0
    if not text.startswith(between[0]):
        raise _changed()
    for message in messages:
        if not _is_said(message):
            spans.append((0, 0))
            continue
        number += 1
        content = message["content"]
        forms = (form for form in (content, content.strip()) if text.startswith(form + between[number], at))
        end = at + len(next(forms, "")) or None
        if end is None or end == at:
            raise _changed()
        spans.append((at, end))
        at = end + len(between[number])
    if at != len(text):
        raise _changed()
    return spans


def _changed() -> TokensError:
    return TokensError(
        "role(): this model's chat template changes messages when it puts them together, so they cannot be told apart "
        'in the prompt; select by text, as in span("...")'
    )
