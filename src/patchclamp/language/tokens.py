"""Tokens: selections of a request's positions, and the hashable indices and ranges shared with sites.

`prompt[-1]`, `generated[0:8]`, `every[3]`, `span("Eiffel Tower")`, `role("user")[-1]`, `token(464)`, `image[0]`,
`between("<think>", "</think>")`.
Positions are absolute and 0-based, starting with the prompt; `generated[0]` is the first sampled token *as an input*.
A selection is a predicate on positions and tokens, independent of the engine step that computes a position.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, TokensError, unknown
from patchclamp.language.structs import PublicStruct


class Range(msgspec.Struct, frozen=True):
    """A half-open range with optional ends, like a slice but hashable; prints as `8:12` or `::2`."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ProgramError(f"expected a step of at least 1, got {self.step}")

    @classmethod
    def of(cls, key: slice) -> Range:
        return cls(*(as_integer(end) if end is not None else None for end in (key.start, key.stop, key.step)))

    @property
    def ends(self) -> tuple[int | None, int | None]:
        return self.start, self.stop

    def indices(self, length: int) -> range:
        """Return the indices in 0 … length−1, with slice semantics."""
        return range(*slice(self.start, self.stop, self.step).indices(length))

    def __str__(self) -> str:
        ends = ("" if end is None else str(end) for end in self.ends)
        return ":".join(ends) + ("" if self.step is None else f":{self.step}")


Index = int | Range
Indices = Index | tuple[int, ...]
IndexLike = SupportsIndex | slice | Range | None
IndicesLike = IndexLike | Sequence[SupportsIndex]


def as_integer(value: SupportsIndex) -> int:
    """Convert a Python, NumPy or torch integer. Raises `ProgramError` for anything else, including 1.0 and True."""
    try:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # a mask is not an index
            raise AttributeError
        return int(value.__index__())
    except (AttributeError, TypeError, RuntimeError):  # tensors with several elements have __index__ too
        raise ProgramError(f"expected an integer, got {value!r:.200}") from None


def as_index(key: IndexLike) -> Index | None:
    """Make an index from a subscript; None selects all, like `[:]`."""
    if isinstance(key, slice):
        key = Range.of(key)
    if key is None or isinstance(key, Range):
        return None if key == Range() else key
    return as_integer(key)


def as_indices(key: IndicesLike) -> Indices | None:
    """Make an index, or a tuple of indices in order, from a subscript."""
    key = list(key) if type(key).__name__ == "ndarray" and key.ndim == 1 else key  # pyright: ignore
    if not isinstance(key, (list, tuple, range)):
        return as_index(key)  # pyright: ignore[reportArgumentType]
    listed = tuple(map(as_integer, key))
    if not listed or len(set(listed)) < len(listed):
        raise ProgramError(f"expected distinct numbers, got {list(key)}")
    return listed


_NUMBER = r"\s*(-?\d{1,9})\s*"
_SLICE = re.compile(r"\s*(-?\d{1,9})?\s*:\s*(-?\d{1,9})?\s*(?::\s*(-?\d{1,9})?\s*)?")


def parse_index(text: str) -> Index | None:
    """Parse an index: `12` → 12, `8:12` → Range(8, 12), `:` → None."""
    if number := re.fullmatch(_NUMBER, text):
        return int(number[1])
    if ends := _SLICE.fullmatch(text):
        index = Range(*(None if end is None else int(end) for end in ends.groups()))
        return None if index == Range() else index
    raise ProgramError(f"expected a number or a range such as 8:12, got {text.strip()!r}")


GROUPS = ("prompt", "generated", "every")


class Selection(PublicStruct, frozen=True):
    """Base class of all selections. `|`, `&` and `-` are union, intersection and difference; results are ascending."""

    def __or__(self, other: TokensLike) -> Joined:
        return Joined("|", self, parse_tokens(other))

    def __and__(self, other: TokensLike) -> Joined:
        return Joined("&", self, parse_tokens(other))

    def __sub__(self, other: TokensLike) -> Joined:
        return Joined("-", self, parse_tokens(other))

    def __ror__(self, other: TokensLike) -> Joined:
        return Joined("|", parse_tokens(other), self)

    def __rand__(self, other: TokensLike) -> Joined:
        return Joined("&", parse_tokens(other), self)

    def __rsub__(self, other: TokensLike) -> Joined:
        return Joined("-", parse_tokens(other), self)

    def __repr__(self) -> str:
        return f"pc.{self}"


class Positions(Selection, frozen=True, tag="positions"):
    """Positions within a group (`prompt`, `generated` or `every`): an index, a list or a range (None: all)."""

    of: str
    index: Indices | None = None

    def __post_init__(self) -> None:
        if self.of not in GROUPS:
            raise unknown("token group", self.of, GROUPS)
        if self.index == ():
            raise TokensError(f"{self.of}[()] selects nothing: pass at least one position")
        if self.of != "prompt":
            self._check_open_end()

    def _check_open_end(self) -> None:
        """Reject negative indices outside `prompt`: only the prompt's length is known before the request runs."""
        ends = self.index if isinstance(self.index, tuple) else (self.index,)
        if isinstance(self.index, Range):
            ends = self.index.ends
        if any(isinstance(end, int) and end < 0 for end in ends):
            raise TokensError(
                f"{self}: only prompt supports negative indices, since the number of generated tokens is not known "
                "in advance"
            )

    def __getitem__(self, key: Key) -> Positions:
        return Positions(self.of, _index_of(self, key))

    def select(self, prompt: int, limit: int) -> list[int] | range:
        """Return the selected positions below `limit`, for a prompt of `prompt` tokens. A list keeps its order.

        Raises `TokensError` for a position that is out of range or listed twice.
        """
        groups = {"prompt": (0, prompt), "generated": (prompt, max(limit - prompt, 0)), "every": (0, limit)}
        first, length = groups[self.of]
        if self.index is None:
            return range(first, first + length)
        if isinstance(self.index, Range):
            chosen = self.index.indices(length)
            return range(first + chosen.start, first + max(chosen.start, chosen.stop), chosen.step)
        return _numbered(self, range(first, first + length), lambda: self._extent(prompt, length))

    def _extent(self, prompt: int, length: int) -> str:
        if self.of == "prompt":
            return f"the prompt has {prompt} tokens (0 to {prompt - 1})"
        return f"{self.of} has {length} positions here; the last sampled token is never an input (raise max_tokens)"

    def __str__(self) -> str:
        return f"{self.of}{_brackets(self.index)}"


class Role(Selection, frozen=True, tag="role"):
    """The prompt tokens of a chat's messages from one role, excluding the chat template's own tokens.

    message: the 0-based index among this role's messages, from the end if negative; None: all messages
    index: the tokens to select among these messages' tokens; None: all
    """

    role: str
    message: int | None = None
    index: Indices | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not self.role or re.search("[\ud800-\udfff]", self.role):
            raise ProgramError(f"expected a role such as 'user', got {self.role!r}")
        if self.message is not None:
            msgspec.structs.force_setattr(self, "message", as_integer(self.message))
        if self.index == ():
            raise TokensError(f"role({json.dumps(self.role)})[()] selects nothing: pass at least one position")

    def __getitem__(self, key: Key) -> Role:
        return Role(self.role, self.message, _index_of(self, key))

    def find(self, turns: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
        """Return the selected positions. Raises `TokensError` if the message or the token does not exist.

        turns: each message's role and token positions
        """
        said = [positions for role, positions in turns if role == self.role]
        if not said:
            roles = ", ".join(dict.fromkeys(role for role, _ in turns))
            raise TokensError(f"{self}: the chat has no messages with this role; available: {roles}")
        if self.message is not None:
            if not -len(said) <= self.message < len(said):
                raise TokensError(f"{self}: out of range: the chat has {len(said)} messages with this role (0-based)")
            said = [said[self.message]]
        positions = sorted({position for each in said for position in each})
        return _some(self, positions, lambda: f"these messages have {len(positions)} tokens")

    def __str__(self) -> str:
        message = "" if self.message is None else f", {self.message}"
        return f"role({json.dumps(self.role, ensure_ascii=False)}{message}){_brackets(self.index)}"


class ImageTokens(Selection, frozen=True, tag="image"):
    """The prompt tokens whose embeddings are replaced by image features. The markers around them count as text.

    number: the image's 0-based index in the prompt, from the end if negative; None: all images
    index: the tokens to select among the image's tokens; None: all
    """

    number: int | None = None
    index: Indices | None = None

    def __post_init__(self) -> None:
        if self.number is not None:
            msgspec.structs.force_setattr(self, "number", as_integer(self.number))
        elif self.index is not None:
            raise ProgramError("expected the index of an image before its tokens, as in image[0][3:5]")
        if self.index == ():
            raise TokensError(f"image[{self.number}][()] selects nothing: pass at least one position")

    def __getitem__(self, key: Key) -> ImageTokens:
        if self.number is not None:
            return ImageTokens(self.number, _index_of(self, key))
        if isinstance(key, (slice, tuple, list)):
            raise ProgramError("expected the index of one image, as in image[0] | image[1]; image selects all")
        return ImageTokens(as_integer(key))

    def find(self, images: Sequence[Sequence[int]]) -> list[int]:
        """Return the selected positions. Raises `TokensError` if the image or the token does not exist.

        images: the positions of each image's tokens, ascending
        """
        if not images:
            raise TokensError(
                f"{self}: the prompt has no image; pass one as "
                '{"prompt": ..., "multi_modal_data": {"image": ...}}, or in the messages of a chat'
            )
        if self.number is None:
            return sorted(position for image in images for position in image)
        if not -len(images) <= self.number < len(images):
            raise TokensError(f"{self}: out of range: the prompt has {len(images)} images (0-based)")
        positions = images[self.number]
        return _some(self, positions, lambda: f"this image has {len(positions)} tokens")

    def __str__(self) -> str:
        return f"image{_brackets(self.number)}{_brackets(self.index)}"


Key = SupportsIndex | slice | tuple[SupportsIndex, ...] | list[int]
_Indexed = Positions | Role | ImageTokens


def _index_of(indexed: _Indexed, key: Any) -> Indices | None:
    """Convert the subscript of a selection to an index."""
    if indexed.index is not None:
        raise ProgramError(f"{indexed} is already indexed")
    if isinstance(key, slice):
        index = Range.of(key)
        return None if index == Range() else index
    return tuple(map(as_integer, key)) if isinstance(key, (tuple, list)) else as_integer(key)


def _some(indexed: _Indexed, positions: Sequence[int], extent: Callable[[], str]) -> list[int]:
    """Return the positions that an index selects; `extent()` describes the valid range in error messages."""
    if indexed.index is None:
        return list(positions)
    if isinstance(indexed.index, Range):
        return [positions[i] for i in indexed.index.indices(len(positions))]
    return _numbered(indexed, positions, extent)


def _numbered(indexed: _Indexed, positions: Sequence[int], extent: Callable[[], str]) -> list[int]:
    """Return the positions that an index lists; `extent()` describes the valid range in error messages."""
    numbers = (indexed.index,) if isinstance(indexed.index, int) else indexed.index
    assert isinstance(numbers, tuple)
    for number in numbers:
        if not -len(positions) <= number < len(positions):
            raise TokensError(f"{indexed}: position {number} is out of range; {extent()}")
    chosen = [positions[number] for number in numbers]
    if len(set(chosen)) < len(chosen):
        raise TokensError(f"{indexed}: duplicate positions: {chosen}")
    return chosen


def _brackets(index: Indices | None) -> str:
    """Return the text form of a selection's index."""
    if index is None:
        return ""
    numbers = ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)
    return f"[{numbers},]" if isinstance(index, tuple) and len(index) < 2 else f"[{numbers}]"


class TextSpan(Selection, frozen=True, tag="span"):
    """The prompt tokens that overlap a match of `text`: number `occurrence`, 0-based, or the only match (None)."""

    text: str
    occurrence: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ProgramError(f"expected text, got {type(self.text).__name__} {self.text!r:.200}", "text")
        try:
            if self.occurrence is not None:
                msgspec.structs.force_setattr(self, "occurrence", as_integer(self.occurrence))
        except ProgramError as error:
            raise error.under("occurrence") from None
        if re.search("[\ud800-\udfff]", self.text):
            raise TokensError(f"{self.text!r} is not valid text: it has a lone surrogate")
        if not self.text:
            raise TokensError("span('') selects nothing: pass the text of the tokens to select")

    def starts(self, prompt_text: str) -> list[int]:
        """Return the first character of each match. Matches may overlap."""
        return [match.start() for match in re.finditer(f"(?={re.escape(self.text)})", prompt_text)]

    def find(self, offsets: list[tuple[int, int]], prompt_text: str) -> list[int]:
        """Return the positions of the tokens that overlap the match. Raises `TokensError` if there is no such
        match, or several matches and no `occurrence`.

        offsets: each token's character offsets (begin, end) in the prompt
        """
        starts = self.starts(prompt_text)
        if not starts:
            raise TokensError(f"{self}: not in the prompt {prompt_text!r}")
        count, chosen = len(starts), self.occurrence
        if chosen is None and count > 1:
            text = json.dumps(self.text, ensure_ascii=False)
            raise TokensError(
                f"{self}: {count} matches in {prompt_text!r}; choose one, from span({text}, 0) to "
                f"span({text}, {count - 1}), or join several with |"
            )
        chosen = chosen or 0
        if not -count <= chosen < count:
            raise TokensError(f"{self}: occurrence out of range: {count} matches in {prompt_text!r} (0-based)")
        begin = starts[chosen]
        end = begin + len(self.text)
        return [position for position, (a, b) in enumerate(offsets) if a < end and b > begin and b > a]

    def __str__(self) -> str:
        text = json.dumps(self.text, ensure_ascii=False)
        return f"span({text})" if self.occurrence is None else f"span({text}, {self.occurrence})"


class Between(Selection, frozen=True, tag="between"):
    """The tokens strictly between each `opening` delimiter and the next `closing` one, or the request's end.

    A delimiter is a token id or text. Text that the model's tokenizer encodes as a single token is matched
    by its id. Longer text is searched for in the prompt; every token that overlaps a match belongs to the delimiter.
    """

    opening: str | int
    closing: str | int

    def __post_init__(self) -> None:
        for name in ("opening", "closing"):
            value = getattr(self, name)
            try:
                if isinstance(value, str):
                    TextSpan(value)
                else:
                    msgspec.structs.force_setattr(self, name, TokenIds((value,)).ids[0])
            except PatchclampError as error:
                raise error.under(name) from None
        if self.opening == self.closing:
            raise TokensError(f"{self}: expected two different delimiters", "closing")

    def __str__(self) -> str:
        return f"between({', '.join(json.dumps(each, ensure_ascii=False) for each in (self.opening, self.closing))})"


class TokenIds(Selection, frozen=True, tag="token"):
    """Every prompt or generated token whose id is in `ids`."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            ids = tuple(sorted(set(map(as_integer, self.ids))))
        except ProgramError:
            raise ProgramError(f"expected integer token ids, got {self.ids!r}; use lm.tokenizer.bare(text)") from None
        if not ids:
            raise TokensError("token() selects nothing: pass at least one token id")
        if ids[0] < 0 or ids[-1] > MAX_TOKEN_ID:
            raise TokensError(f"token id {ids[0] if ids[0] < 0 else ids[-1]} is out of range (0..{MAX_TOKEN_ID})")
        if len(ids) > MAX_IDS:
            raise TokensError(f"expected at most {MAX_IDS} token ids, got {len(ids)}")
        msgspec.structs.force_setattr(self, "ids", ids)

    def __str__(self) -> str:
        return f"token({', '.join(map(str, self.ids))})"


MAX_TOKEN_ID = (1 << 24) - 1  # the bank stores token ids in fp32, which is exact up to this id
MAX_IDS = 1 << 12  # per selection


class Joined(Selection, frozen=True, tag="joined"):
    """Two selections joined by "|", "&" or "-" (see `Selection`)."""

    op: str
    left: Selection
    right: Selection

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise unknown("operator", str(self.op), OPS)
        for side in ("left", "right"):
            msgspec.structs.force_setattr(self, side, parse_tokens(getattr(self, side)))
        depth, leaves, id_leaves = _size(self)
        if depth > MAX_DEPTH or leaves > MAX_JOINED or id_leaves > MAX_ID_SELECTIONS:
            raise TokensError(
                f"a combined selection may have at most {MAX_JOINED} parts, {MAX_DEPTH} levels and "
                f"{MAX_ID_SELECTIONS} selections by token id; token(...) accepts several ids"
            )

    def __str__(self) -> str:
        left = f"({self.left})" if isinstance(self.left, Joined) and self.left.op != self.op else str(self.left)
        right = f"({self.right})" if isinstance(self.right, Joined) else str(self.right)
        return f"{left} {self.op} {right}"

    def __repr__(self) -> str:
        return f"pc.tokens({str(self)!r})"


OPS = "|&-"  # lowest precedence first, as in Python
MAX_DEPTH, MAX_JOINED, MAX_ID_SELECTIONS = 64, 128, 8


@functools.lru_cache(1 << 12)
def _size(selection: Selection) -> tuple[int, int, int]:
    """Return a selection's depth, its number of leaves, and the number of leaves that select by token id."""
    if not isinstance(selection, Joined):
        return 0, 1, int(isinstance(selection, TokenIds))
    left, right = _size(selection.left), _size(selection.right)
    return 1 + max(left[0], right[0]), left[1] + right[1], left[2] + right[2]


Tokens = Positions | TextSpan | Role | TokenIds | Between | ImageTokens | Joined
TokensLike = Selection | str | int | slice | range | Sequence[int]

prompt: Positions = Positions("prompt")
generated: Positions = Positions("generated")
every: Positions = Positions("every")
image: ImageTokens = ImageTokens()


def span(text: str, occurrence: int | None = None) -> TextSpan:
    """Select the prompt tokens that overlap a match of `text`. `occurrence` is the match's 0-based index, from the end
    if negative; without it, `text` must occur exactly once."""
    return TextSpan(text, occurrence)


def role(name: str, message: int | None = None) -> Role:
    """Select the prompt tokens of a role's chat messages: `pc.role("user")[-1]` is the last such token. `message` is
    the 0-based index of one message, from the end if negative."""
    return Role(name, message)


def token(*ids: int) -> TokenIds:
    """Select the prompt and generated tokens with one of these ids: `pc.generated & pc.token(13)`."""
    return TokenIds(ids)


def between(opening: str | int, closing: str | int) -> Between:
    """Select the tokens strictly between two delimiters, each a token id or text: `pc.between("<think>", "</think>")`,
    for reasoning models. An unclosed span runs to the end."""
    return Between(opening, closing)


def ids_in(selection: Selection) -> list[TokenIds]:
    """Return the leaves of a selection that select by token id."""
    return [leaf for leaf in leaves(selection) if isinstance(leaf, TokenIds)]


def leaves(selection: Selection) -> list[Selection]:
    """Return the leaves of a combined selection, from left to right."""
    if isinstance(selection, Joined):
        return leaves(selection.left) + leaves(selection.right)
    return [selection]


_OPEN, _CLOSE = re.compile(r"\s*\(\s*"), re.compile(r"\s*\)\s*")
_GROUP = re.compile(r"\s*(?P<of>[A-Za-z_]\w*)\s*(?:\[(?P<keys>[^\]]*)\])?\s*")
_TOKEN = re.compile(r"\s*token\(\s*(?P<ids>\d{1,9}(?:\s*,\s*\d{1,9})*)\s*\)\s*")
_QUOTED = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
_CALL = rf"\(\s*(?P<text>{_QUOTED})\s*(?:,\s*(?P<n>-?\d{{1,9}})\s*)?\)\s*"
_SPAN = re.compile(r"\s*span" + _CALL)
_ROLE = re.compile(r"\s*role" + _CALL + r"(?:\[(?P<keys>[^\]]*)\])?\s*")
_BETWEEN = re.compile(rf"\s*between\(\s*({_QUOTED}|\d{{1,9}})\s*,\s*({_QUOTED}|\d{{1,9}})\s*\)\s*")
_IMAGE = re.compile(r"\s*image\b\s*(?:\[(?P<n>[^\]]*)\]\s*(?:\[(?P<keys>[^\]]*)\]\s*)?)?")


MAX_TEXT = 1 << 15  # characters of a selection's text form


def parse_tokens(text: TokensLike) -> Tokens:
    """Parse a selection from its text form or from positions in `every`; return a selection unchanged."""
    if isinstance(text, (Positions, TextSpan, Role, TokenIds, Between, ImageTokens, Joined)):
        return text
    if isinstance(text, (int, slice, range, list, tuple)) and not isinstance(text, bool):
        return every[slice(text.start, text.stop, text.step) if isinstance(text, range) else text]
    if not isinstance(text, str):
        raise ProgramError(f"expected tokens such as 'prompt[-1]', got {type(text).__name__} {text!r}")
    if len(text) > MAX_TEXT:
        raise ProgramError(f"expected a selection of at most {MAX_TEXT} characters, got {len(text)}")
    selection, end = _joined(text, 0, 0)
    if end < len(text):
        raise _malformed(text)
    return selection


def _malformed(text: str) -> ProgramError:
    return ProgramError(
        f"invalid selection {text!r}; expected 'prompt[-1]', 'generated[0:8]', 'token(464)' or 'span(\"text\")', "
        "or several joined by |, & and -"
    )


def _joined(text: str, at: int, depth: int, ops: str = OPS) -> tuple[Tokens, int]:
    """Parse selections joined by `ops`, lowest precedence first, from character `at`; return the result and its end."""
    if not ops:
        return _one(text, at, depth)
    left, at = _joined(text, at, depth, ops[1:])
    while text[at : at + 1] == ops[0]:
        right, at = _joined(text, at + 1, depth, ops[1:])
        left = Joined(ops[0], left, right)
    return left, at


def _one(text: str, at: int, depth: int) -> tuple[Tokens, int]:
    """Parse a single or parenthesized selection."""
    if opened := _OPEN.match(text, at):
        if depth == MAX_DEPTH:
            raise _malformed(text)
        selection, at = _joined(text, opened.end(), depth + 1)
        closed = _CLOSE.match(text, at)
        if closed is None:
            raise _malformed(text)
        return selection, closed.end()
    if match := _SPAN.match(text, at):
        number = None if match["n"] is None else int(match["n"])
        return TextSpan(_unquote(match["text"]), number), match.end()
    if match := _ROLE.match(text, at):
        number = None if match["n"] is None else int(match["n"])
        return Role(_unquote(match["text"]), number, _keys(match["keys"], text)), match.end()
    if match := _TOKEN.match(text, at):
        return TokenIds(tuple(map(int, match["ids"].split(",")))), match.end()
    if match := _BETWEEN.match(text, at):
        return Between(*(int(each) if each.isdigit() else _unquote(each) for each in match.groups())), match.end()
    if match := _IMAGE.match(text, at):
        return _image(match, text), match.end()
    if match := _GROUP.match(text, at):
        return _group(match, text), match.end()
    raise _malformed(text)


def _image(match: re.Match[str], text: str) -> ImageTokens:
    if match["n"] is None:
        return image
    number = parse_index(match["n"])
    if not isinstance(number, int):
        raise ProgramError(f"{text!r}: expected the index of one image, as in image[0] | image[1]; image selects all")
    return ImageTokens(number, _keys(match["keys"], text))


def _group(match: re.Match[str], text: str) -> Positions:
    if match["of"] not in GROUPS:
        raise unknown("token group", match["of"], (*GROUPS, "image"))
    return Positions(match["of"], _keys(match["keys"], text))


def _keys(keys: str | None, text: str) -> Indices | None:
    """Parse the text of a selection's subscript."""
    if keys is None:
        return None
    if "," not in keys:
        return parse_index(keys)
    listed = keys.removesuffix(",") if keys.count(",") == 1 else keys
    indices = [parse_index(key) for key in listed.split(",")]
    numbers = tuple(index for index in indices if isinstance(index, int))
    if len(numbers) < len(indices):
        raise ProgramError(f"{text!r}: expected only numbers in a list of positions")
    return numbers


def _unquote(literal: str) -> str:
    double = {"\\'": "'", '"': '\\"'}  # JSON's escapes, except for quotes
    quoted = re.sub(r'\\.|"', lambda match: double.get(match[0], match[0]), literal[1:-1], flags=re.DOTALL)
    try:
        return json.loads(f'"{quoted}"', strict=False)
    except ValueError as error:
        raise ProgramError(f"span({literal}): {error}") from None


def read_tokens(text: TokensLike, path: str) -> Tokens:
    """Parse a selection, prefixing errors with the path."""
    try:
        return parse_tokens(text)
    except PatchclampError as error:
        raise error.under(path) from None
