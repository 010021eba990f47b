"""A prompt in a picture: its tokens run on as text, those that matter stand out, long stretches that agree are cut."""

from __future__ import annotations

import msgspec

from patchclamp.plots.palette import CLEAN, CORRUPT, INK, MUTED
from patchclamp.plots.sheet import Ruler, Sheet
from patchclamp.plots.words import Mark, Side, marks, plain, shorten
from patchclamp.studies.sweep_result import PatchSweep

SIZE, LINE = 9.5, 0.2  # points, inches
CHARACTERS, LONGEST_TOKEN = 320, 40
_CONTEXTS = (40, 24, 16, 10, 6, 4, 2, 1, 0)
_GAP = " … "

Piece = tuple[str, Mark]


class Passage(msgspec.Struct, frozen=True):
    """A prompt laid out: lines of (x in inches, text, mark)."""

    side: Side
    lines: tuple[tuple[tuple[float, str, Mark], ...], ...]

    @property
    def height(self) -> float:
        return LINE * len(self.lines)

    def draw(self, sheet: Sheet, x: float, y: float, label: float) -> None:
        """Draws with its label at `x`, its text `label` to the right of that."""
        color = CLEAN if self.side == "clean" else CORRUPT
        sheet.text(x, y, self.side, SIZE, color=color, weight="bold")
        for i, line in enumerate(self.lines):
            for at, text, mark in line:
                _draw_piece(sheet, x + label + at, y + i * LINE, text, mark, color)


def passage(sweep: PatchSweep, side: Side, ruler: Ruler, width: float) -> Passage:
    """Lays a prompt out in lines of `width` inches."""
    tokens = sweep.clean_tokens if side == "clean" else sweep.corrupt_tokens
    pieces = [(shorten(plain(token), LONGEST_TOKEN), mark) for token, mark in zip(tokens, marks(sweep, side), strict=True)]
    lines: list[list[tuple[float, str, Mark]]] = [[]]
    at = 0.0
    for text, mark in abridge(pieces):
        advance = ruler.width(text, SIZE, weight=_weight(mark))
        if at + advance > width and lines[-1]:
            lines.append([])
            at, text = 0.0, text.lstrip(" ")
            advance = ruler.width(text, SIZE, weight=_weight(mark))
        lines[-1].append((at, text, mark))
        at += advance
    return Passage(side, tuple(map(tuple, lines)))


def abridge(pieces: list[Piece], limit: int = CHARACTERS) -> list[Piece]:
    """Pieces of about `limit` characters at most: first what surrounds the marked ones goes, then their middle."""
    for context in _CONTEXTS:
        kept = _near_marks(pieces, context)
        if _length(kept) <= limit:
            return kept
    half = max(limit // (2 * max(_length(kept) // len(kept), 1)), 1)
    return [*kept[:half], (_GAP, "same"), *kept[-half:]]


def _near_marks(pieces: list[Piece], context: int) -> list[Piece]:
    """The pieces within `context` of a marked one or of either end, with a gap for each stretch left out."""
    last = len(pieces) - 1
    marked = [0, last] + [i for i, (_, mark) in enumerate(pieces) if mark != "same"]
    near = sorted({j for i in marked for j in range(max(i - context, 0), min(i + context, last) + 1)})
    kept: list[Piece] = []
    for before, i in zip([-1, *near], near, strict=False):
        if i > before + 1:
            kept.append((_GAP, "same"))
        kept.append(pieces[i])
    return kept


def _length(pieces: list[Piece]) -> int:
    return sum(len(text) for text, _ in pieces)


def _weight(mark: Mark) -> str:
    return "normal" if mark == "same" else "bold"


def _draw_piece(sheet: Sheet, x: float, y: float, text: str, mark: Mark, color: str) -> None:
    if mark == "same":
        color = MUTED if text == _GAP else INK
    drawn = sheet.text(x, y, text, SIZE, color=color, weight=_weight(mark))
    if mark == "skipped":
        _underline(sheet, drawn, x, y, text, color)


def _underline(sheet: Sheet, drawn, x: float, y: float, text: str, color: str) -> None:
    from patchclamp.plots.sheet import DOTS_PER_INCH

    extent = drawn.get_window_extent().width / DOTS_PER_INCH
    sheet.rule(x, y + 0.045, extent, color, linestyle=(0, (1.2, 1.2)), linewidth=1.2)
