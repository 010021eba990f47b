"""The `Tokenizer` protocol for Transformers tokenizers, and the positions of a chat's messages in its prompt.

A chat template may transform messages arbitrarily, so positions are never guessed. The chat is rendered again with
marks in place of message contents. The text between the marks, joined with the contents, must reproduce the prompt
exactly.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import msgspec

from patchclamp.errors import ProgramError, TokensError
from patchclamp.plan import Prompt

TOLD = ("add_generation_prompt", "continue_final_message", "tools", "documents")  # standard arguments of templates
Turn = tuple[str, list[int]]  # a message's role, and the positions of the tokens that overlap it


class Chat(msgspec.Struct):
    """A prompt's messages, and further chat template arguments, such as `add_generation_prompt`."""

    messages: list[dict[str, Any]]
    options: dict[str, Any] = {}


def template_options(messages: Sequence[Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the given chat template arguments. If the last message is the assistant's, add the two arguments that
    leave it open for the model to continue."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ProgramError(f"expected a mapping of options, got {given!r:.100}", "chat_template_kwargs")
    last = messages[-1] if messages else None
    is_open = isinstance(last, Mapping) and last.get("role") == "assistant"
    return ({"add_generation_prompt": False, "continue_final_message": True} if is_open else {}) | dict(given or {})


def chat_of(messages: Sequence[Any], options: dict[str, Any] | None = None) -> Chat:
    """Create a `Chat` from messages. Parts that are not text, such as images, are reduced to their type."""
    plain = [dict(message) for message in messages]
    return Chat([{**message, "content": _remembered(message.get("content"))} for message in plain], options or {})


def _remembered(content: Any) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    return [part if not _is_image(part) else {"type": part.get("type")} for part in content]


def prompt_of(
    tokenizer: Any, ids: Sequence[int], text: str | None, chat: Chat | None, images: Sequence[Sequence[int]] = ()
) -> Prompt:
    """Return the `Prompt` that programs are bound to. `text`: its original text, if known; `images` as in `Prompt`."""
    turns = None if chat is None else functools.cache(lambda: tokenizer.turns(ids, chat.messages, chat.options))
    return Prompt(ids, functools.cache(lambda: tokenizer.spell(ids, text)), turns, images, tokenizer.bare)


def find_turns(
    render: Callable[[list[dict[str, Any]]], str], spell: Callable[[str], tuple[str, list[tuple[int, int]]]],
    messages: list[dict[str, Any]],
) -> list[Turn]:  # fmt: skip
    """Return each message's role and token positions.

    render: renders a chat as text
    spell: `Tokenizer.spell`, for this prompt
    Raises `TokensError` unless the prompt consists of these messages, in order, and the template's own text.
    """
    if has_images(messages):
        raise TokensError(
            "role() is not supported in a chat with images, whose tokens differ from the chat template's text; "
            'select by text, such as span("..."), or image[0]'
        )
    plain = [{**message, "content": _text(message.get("content"))} for message in messages]
    text = render(plain)
    spans = _spans(text, *_marked(render, plain), plain)
    spelled, offsets = spell(text)
    if spelled != text:
        raise TokensError("role(): the prompt's text differs from its chat, so its messages cannot be located")
    return [
        (str(message.get("role")), [i for i, (a, b) in enumerate(offsets) if a < end and b > begin and b > a])
        for message, (begin, end) in zip(plain, spans, strict=True)
    ]


def has_images(messages: Sequence[Any]) -> bool:
    """True if a message has a part other than text."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(map(_is_image, parts))


def _is_image(part: Any) -> bool:
    """True if a message part is not text, such as an image or audio."""
    return isinstance(part, Mapping) and not isinstance(part.get("text"), str)


def _text(content: Any) -> Any:
    """Join content that is a list of text parts; return other content unchanged."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return content


def _is_said(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _marked(render: Callable[..., str], messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Render the chat with each non-blank message replaced by a unique mark; return the text and the marks."""
    said = "".join(message["content"] for message in messages if _is_said(message))
    stem = next(f"mark{i}q" for i in range(len(said) + 1) if f"mark{i}q" not in said)
    marks = [f"{stem}{i}q" for i, message in enumerate(messages) if _is_said(message)]
    rest = iter(marks)
    return render([{**m, "content": next(rest)} if _is_said(m) else m for m in messages]), marks


def _spans(text: str, marked: str, marks: list[str], messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return each message's (begin, end) character offsets in the chat's text; (0, 0) for a blank message."""
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
        "role(): this model's chat template modifies messages, so they cannot be located in the prompt; "
        'select by text, such as span("...")'
    )


BYTE = re.compile("<0x[0-9A-F]{2}>")  # a single-byte token of a vocabulary with byte fallback
PARTIAL = "\ufffd"  # the text of a character with missing bytes
WINDOW = 16  # minimum number of tokens to decode together: more than a character or a tidied space takes
MOST_UNKNOWN = 1024  # consecutive tokens without a whole character


def complete_text(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    """Return the text up to the last token that completes a character. As in vLLM, later tokens are dropped."""
    end = len(ids)
    while end and decode(ids[:end]).endswith(PARTIAL):
        end -= 1
    return decode(ids[:end])


class HubTokenizer:
    """A tokenizer from `AutoTokenizer.from_pretrained`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"<tokenizer {Path(self.inner.name_or_path).name}, {len(self.inner)} tokens>"

    @classmethod
    def load(cls, path: str, **options: Any) -> HubTokenizer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path, **options))

    def encode(self, text: str, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise TokensError(f"expected text, got {type(text).__name__} {text!r:.100}")
        return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def bare(self, text: str) -> list[int]:
        return self.encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return self.inner.decode(list(ids), skip_special_tokens=True)
        except (TypeError, OverflowError):
            raise TokensError(f"expected token ids, got {ids!r:.100}") from None

    def settled(self, ids: Sequence[int]) -> str:
        """Return the text that no later token can change. It omits a character with missing bytes and, if the tokenizer
        cleans up spaces, the last word."""
        end = len(ids)
        while end and self._may_be_unfinished(ids[end - 1]):  # bytes in a row are decoded together
            end -= 1
        text = complete_text(self.decode, ids[:end])
        return text.rpartition(" ")[0] if getattr(self.inner, "clean_up_tokenization_spaces", False) else text

    def _may_be_unfinished(self, token: int) -> bool:
        """True if a token is a single byte, or a special token, which may occur between bytes."""
        text = self.inner.convert_ids_to_tokens(token) or ""  # a vocabulary may be padded with ids without a token
        return BYTE.fullmatch(text) is not None or token in self.inner.all_special_ids

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.inner.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in ids]

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        ids = list(ids)
        for candidate, special in ((text, True), (text, False), (self._full_text(ids), False)):
            if candidate is None or not self.inner.is_fast:
                continue
            encoding = self.inner(candidate, return_offsets_mapping=True, add_special_tokens=special)
            if list(encoding["input_ids"]) == ids:
                return candidate, [tuple(pair) for pair in encoding["offset_mapping"]]
        return self._spelt(ids)

    def _spelt(self, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of ids that do not round-trip, and each token's offsets.

        An anchor is a token after which the text so far consists of whole characters. Each prefix is decoded starting
        at the second-to-last anchor, so decoding takes linear time."""
        full, offsets, complete = self._full_text(ids), [], 0
        context = anchor = known = 0  # tokens before both; and the length of the anchor's text
        overlap = ""  # the text from the context to the anchor
        for i in range(1, len(ids) + 1):
            if i - anchor > MOST_UNKNOWN:  # decoding is quadratic in these
                raise TokensError(
                    f"tokens {anchor} to {i} do not decode to complete characters; select tokens by position"
                )
            begin, decoded = complete, self._full_text(ids[context:i])
            if not decoded.startswith(overlap):
                if self._may_be_unfinished(ids[anchor - 1]):  # a partial character spoils the byte run it is in
                    decoded = overlap + PARTIAL
                else:  # this tokenizer decodes the part differently from the whole
                    decoded, overlap, context = self._full_text(ids[:i]), full[:known], 0
            tail = decoded[len(overlap) :]
            same = known + len(commonprefix([tail, full[known : known + len(tail)]]))  # noqa: RUF071 - not paths
            whole = same == known + len(tail)
            # A partial character decodes to U+FFFD, or to nothing.
            if whole and (same <= begin or tail.endswith(PARTIAL)):
                whole = self._continues(ids, i, full, same, context, decoded)
            if not whole:
                same = min(same, known + len(tail.rstrip(PARTIAL)))
            complete = max(complete, same)  # a character may become incomplete again when more bytes are decoded
            offsets.append((begin, complete if whole else min(complete + 1, len(full))))
            within = WINDOW * (8 if self._may_be_unfinished(ids[i - 1]) else 1)
            if whole and i - anchor >= within and same == complete and not tail.endswith(PARTIAL):
                context, anchor, known = anchor, i, same
                overlap = self._full_text(ids[context:anchor])
        return full, offsets

    def _continues(self, ids: list[int], i: int, full: str, begin: int, context: int, decoded: str) -> bool:
        """True if the tokens starting at `i` decode to `full` from `begin`, apart from leading spaces. In long texts,
        only the next tokens are compared. `decoded`: the text of the tokens from `context` to `i`."""
        end, text = i, ""
        while end < len(ids) and end - i < 8 * WINDOW and not text.strip(PARTIAL):
            end = min(end + WINDOW, len(ids))
            while end < len(ids) and end - i < 8 * WINDOW and self._may_be_unfinished(ids[end - 1]):
                end += 1
            text = self._full_text(ids[i:end]).lstrip()
        while begin < len(full) and full[begin].isspace():
            begin += 1
        if end == len(ids):
            return full[begin:] == text
        text, both = text.removesuffix(PARTIAL), self._full_text(ids[context:end]).removesuffix(PARTIAL)
        # where a character repeats, text that lacks the first one looks the same
        is_shifted = both.startswith(decoded) and both[len(decoded) :].lstrip() != text
        return full.startswith(text, begin) and not is_shifted

    def _full_text(self, ids: list[int]) -> str:
        """Decode token ids to text, including special tokens."""
        return self.inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        if not getattr(self.inner, "chat_template", None):
            raise ProgramError("this model's tokenizer has no chat template: pass a prompt instead of messages")
        if has_images(messages):
            raise ProgramError(
                "a chat with images cannot be encoded as tokens: pass it to lm.run(messages=...), on vLLM", "messages"
            )
        chat = self._template(messages, options, tokenize=True)
        return list(chat["input_ids"] if hasattr(chat, "keys") else chat)

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        def render(plain: list[dict[str, Any]]) -> str:
            return self._template(plain, options, tokenize=False)

        return find_turns(render, lambda text: self.spell(ids, text), messages)

    def _template(self, messages: list[dict[str, Any]], options: dict[str, Any], tokenize: bool) -> Any:
        """Apply the model's chat template to messages."""
        from jinja2 import TemplateError

        for name in inspect.signature(self.inner.apply_chat_template).parameters.keys() & options.keys() - set(TOLD):
            raise ProgramError(f"{name!r} is not a chat template argument", "chat_template_kwargs")
        options = {"add_generation_prompt": True, **options}
        try:
            return self.inner.apply_chat_template(messages, tokenize=tokenize, **options)
        except (TemplateError, ValueError) as error:
            raise ProgramError(f"the model's chat template rejected these messages: {error}", "messages") from None


class NoTokenizer:
    """The tokenizer of an engine started without one: prompts are token ids, and outputs have no text."""

    def _refuse(self, *_: object) -> Any:
        raise ProgramError("this engine was started without a tokenizer: pass token ids")

    encode: Any = _refuse
    bare: Any = _refuse
    spell: Any = _refuse
    chat: Any = _refuse
    turns: Any = _refuse

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    settled = decode

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [str(token) for token in ids]
