"""A matplotlib figure in inches from its top left corner, and a ruler to lay one out before it exists.

matplotlib places in fractions of a figure whose size must be known first; a picture of labels needs it the other way
round. No pyplot: nothing global is read or changed, so pictures can be made from any thread and under any style.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from patchclamp.plots.palette import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

# Looked up in this order, glyph by glyph; only those installed.
_FONTS = (
    "DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS",
    "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Symbols2", "Noto Emoji", "Segoe UI Symbol", "Segoe UI Emoji",
)  # fmt: skip
DOTS_PER_INCH = 160


@functools.cache
def fonts() -> tuple[str, ...]:
    """The families to draw with, widest cover first."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in _FONTS if name in installed) or ("sans-serif",)


def lettering(size: float = 9, **style: Any) -> dict[str, Any]:
    """Properties of a matplotlib text. `$` and `\\` are drawn as they are, never read as mathematics.

    size: in points
    style: more properties
    """
    return {"fontsize": size, "family": list(fonts()), "color": INK, "parse_math": False, "usetex": False} | style


class Ruler:
    """Measures text in inches."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(dpi=DOTS_PER_INCH)
        self._renderer: Any = FigureCanvasAgg(self._figure).get_renderer()
        self._bars: dict[tuple[Any, ...], float] = {}

    def width(self, text: str, size: float = 9, **style: Any) -> float:
        """The advance of a text, spaces at its ends included: how far behind its start the next text begins."""
        key = (size, *sorted(style.items()))
        if key not in self._bars:
            self._bars[key] = self._inked("||", size, style)
        return self._inked(f"|{text}|", size, style) - self._bars[key]

    def widest(self, texts: list[str], size: float = 9) -> float:
        return max((self.width(text, size) for text in texts), default=0.0)

    def wrap(self, text: str, width: float, size: float = 9, **style: Any) -> list[str]:
        """Lines no wider than `width`, broken at spaces, and within a word only where it is wider by itself."""
        lines: list[str] = []
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self.width(longer, size, **style) <= width:
                lines[-1] = longer
            else:
                lines += self._cut(word, width, size, style)
        return lines

    def _cut(self, word: str, width: float, size: float, style: dict[str, Any]) -> list[str]:
        word_width = self.width(word, size, **style)
        if word_width <= width or len(word) < 2:
            return [word]
        length = math.ceil(len(word) / math.ceil(1.1 * word_width / width))
        return [word[i : i + length] for i in range(0, len(word), length)]

    def _inked(self, text: str, size: float, style: dict[str, Any]) -> float:
        drawn = self._figure.text(0, 0, text, **lettering(size, **style))
        extent = drawn.get_window_extent(self._renderer).width
        drawn.remove()
        return extent / DOTS_PER_INCH


class Sheet:
    """A figure of `width` × `height` inches; x counts from the left, y from the top."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, facecolor="white")

    def text(self, x: float, y: float, text: str, size: float = 9, **style: Any) -> Text:
        """Text whose first line's base is at `y`."""
        return self.figure.text(x / self.width, 1 - y / self.height, text, **lettering(size, va="baseline") | style)

    def rule(self, x: float, y: float, width: float, color: str, **style: Any) -> None:
        """A horizontal line."""
        from matplotlib.lines import Line2D

        across = [x / self.width, (x + width) / self.width]
        self.figure.add_artist(Line2D(across, [1 - y / self.height] * 2, color=color, **style))

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes whose top left corner is at (`x`, `y`)."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)
