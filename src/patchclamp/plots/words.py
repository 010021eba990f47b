"""The words of a picture: sentences, numbers and tokens, the same in every form of it.

Tokens come from prompts and are never trusted: what cannot be seen is written out here, what a format would take for
markup is that format's to escape.
"""

from __future__ import annotations

import unicodedata

from patchclamp.plots.heatmap import Column, Heatmap, Spot

_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(token: str) -> str:
    """A token as a label: spaces and line breaks are seen, and no character is invisible or turns the text around."""
    return plain(token).replace(" ", "·") or "∅"


def plain(text: str) -> str:
    """As `visible`, but spaces stay spaces: for running text."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    hidden = unicodedata.category(character)[0] in "CZ" and character != " "
    return f"⟨{ord(character):04X}⟩" if hidden else character


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; what is left out is marked."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(token: str) -> str:
    return f"'{plain(token)}'"


def number(value: float) -> str:
    """Two decimals, two digits where those say nothing, a power of ten for what is tiny; the minus sign is one."""
    size = abs(value)
    if 0 < size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.replace('-', '−')} × 10{str(int(power)).translate(_RAISED)}"
    text = f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "") + number(value)


def percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %".replace("-", "−")


def unbroken(text: str) -> str:
    """A title whose quoted tokens keep the space they begin with on their line."""
    return text.replace("' ", "'\u00a0").replace("− '", "−\u00a0'")


def noise(heatmap: Heatmap) -> str:
    if heatmap.noise_floor == 0:
        return f"noise floor 0: reruns of the {heatmap.baseline.name} prompt agree exactly"
    return f"noise floor {number(heatmap.noise_floor)}: smaller effects mean nothing"


def best(heatmap: Heatmap, spot: Spot, limit: int = 60) -> str:
    """`resid_pre[8] @ ·Tower, 3.12 (97 % of the way to clean)`, the label at most `limit` characters."""
    row, label = heatmap.panels[spot.panel].cell_name(spot.row, heatmap.columns[spot.column])
    part, goal = heatmap.share(spot.value), heatmap.goal
    far = f"{signed(heatmap.effect(spot.value))}" if part is None or goal is None else (
        f"{percent(part)} of the way to {goal.name}")  # fmt: skip
    return f"{row} @ {shorten(visible(label), limit)}, {number(spot.value)} ({far})"


def positions(numbers: tuple[int, ...]) -> str:
    """`3`, `3–5`, `3, 7`."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers))


def both(column: Column) -> str:
    """`3 → 4`, the clean and the corrupt positions; those of the one prompt there is."""
    return " → ".join(positions(numbers) for numbers in (column.clean, column.corrupt) if numbers)
