"""A prompt in a picture: its tokens run on as text, those that matter stand out, long stretches that agree are cut."""

from __future__ import annotations

import msgspec

from patchclamp.plots.heatmap import Mark, Side, Strip
from patchclamp.plots.palette import CLEAN, CORRUPT, INK, MUTED
from patchclamp.plots.sheet import Ruler, Sheet
from patchclamp.plots.words import plain, shorten

SIZE, LINE = 9.5, 0.2  # points, inches
CHARACTERS, LONGEST_TOKEN = 320, 40
_CONTEXTS = (40, 24, 16, 10, 6, 4, 2, 1, 0)
_GAP = " … "

Marked = tuple[str, Mark]


class Word(msgspec.Struct, frozen=True):
    """A token on its line, in inches: where it begins, where its ink begins after leading spaces, and its advance."""

    x: float
    ink: float
    advance: float
    text: str
    mark: Mark


class Passage(msgspec.Struct, frozen=True):
    """A prompt laid out in lines."""

    side: Side
    title: str
    lines: tuple[tuple[Word, ...], ...]

    @property
    def height(self) -> float:
        return LINE * len(self.lines)

    def draw(self, sheet: Sheet, x: float, y: float, indent: float) -> None:
        """Draws with its name at `x` and its text `indent` to the right of that, first line's base at `y`."""
        color = CLEAN if self.side == "clean" else CORRUPT
        sheet.text(x, y, self.title, SIZE, color=color, weight="bold")
        for i, line in enumerate(self.lines):
            for word in line:
                _draw_word(sheet, x + indent, y + i * LINE, word, color)


def passage(strip: Strip, ruler: Ruler, width: float) -> Passage:
    """Lays a prompt out in lines of `width` inches."""
    texts = [shorten(plain(token), LONGEST_TOKEN) for token in strip.tokens]
    words = list(zip(texts, strip.marks, strict=True))
    lines: list[list[Word]] = [[]]
    at = 0.0
    for text, mark in abridge(words):
        word = _word(ruler, at, text, mark)
        if at + word.advance > width and lines[-1]:
            lines.append([])
            word = _word(ruler, 0.0, text.lstrip(" "), mark)
        lines[-1].append(word)
        at = word.x + word.advance
    return Passage(strip.side, strip.title, tuple(map(tuple, lines)))


def abridge(words: list[Marked], limit: int = CHARACTERS) -> list[Marked]:
    """Words of about `limit` characters at most: first what is far from the marked ones goes, then the middle."""
    for context in _CONTEXTS:
        kept = _near_marks(words, context)
        if _length(kept) <= limit:
            return kept
    half = max(limit * len(kept) // (2 * _length(kept)), 1)
    return [*kept[:half], (_GAP, "same"), *kept[-half:]]


def _near_marks(words: list[Marked], context: int) -> list[Marked]:
    """The words within `context` of a marked one or of either end, with a gap for each stretch left out."""
    last = len(words) - 1
    marked = [0, last] + [i for i, (_, mark) in enumerate(words) if mark != "same"]
    near = sorted({j for i in marked for j in range(max(i - context, 0), min(i + context, last) + 1)})
    kept: list[Marked] = []
    for before, i in zip([-1, *near], near, strict=False):
        if i > before + 1:
            kept.append((_GAP, "same"))
        kept.append(words[i])
    return kept


def _length(words: list[Marked]) -> int:
    return sum(len(text) for text, _ in words)


def _weight(mark: Mark) -> str:
    return "normal" if mark == "same" else "bold"


def _word(ruler: Ruler, x: float, text: str, mark: Mark) -> Word:
    weight = _weight(mark)
    spaces = text[: len(text) - len(text.lstrip(" "))]
    ink = ruler.width(spaces, SIZE, weight=weight) if spaces and mark == "skipped" else 0.0
    return Word(x, ink, ruler.width(text, SIZE, weight=weight), text, mark)


def _draw_word(sheet: Sheet, x: float, y: float, word: Word, color: str) -> None:
    if word.mark == "same":
        color = MUTED if word.text == _GAP else INK
    sheet.text(x + word.x, y, word.text, SIZE, color=color, weight=_weight(word.mark))
    if word.mark == "skipped":
        sheet.rule(x + word.x + word.ink, y + 0.05, word.advance - word.ink, color, linestyle=":", linewidth=1.3)
