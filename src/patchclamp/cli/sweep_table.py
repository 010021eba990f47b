"""A patch sweep in a terminal: what was asked, both baselines, the best cells, where the pictures are."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.plots import sweep_html, sweep_png, words
from patchclamp.plots.reading import effect, panels, ranked, share
from patchclamp.studies.sweep_result import PatchSweep

_COLOURS = {"clean": "blue", "corrupt": "dark_orange3"}


def show_question(console: Console, sweep: PatchSweep) -> None:
    """What was done, on what, and both prompts with the tokens in which they differ."""
    console.print()
    console.print(Text(words.title(sweep), style="bold"), soft_wrap=True)
    console.print(Text(words.ran_on(sweep), style="dim"), soft_wrap=True)
    console.print()
    for side in ("clean", "corrupt"):
        console.print(_prompt(sweep, side), soft_wrap=True)


def show_best(console: Console, sweep: PatchSweep, top: int) -> None:
    """Both baselines, the noise floor, and a table of the `top` best cells."""
    console.print()
    baselines = [(f"{side} run ", getattr(sweep, side), f"bold {_COLOURS[side]}") for side in ("clean", "corrupt")]
    for name, value, style in baselines:
        console.print(Text.assemble(f"{name:12}", (words.number(value), style)))
    console.print(Text(words.noise(sweep)))
    if sweep.skipped:
        tokens = ", ".join(f"{words.quoted(token)} ({side} {position})" for side, position, token in sweep.skipped)
        console.print(Text(f"no partner in the other prompt, so not patched: {tokens}"), soft_wrap=True)
    console.print()
    console.print(_best(sweep, top))


def show_pictures(console: Console, sweep: PatchSweep, png: Path | None, html: Path | None) -> None:
    """Draws what was asked for and says where it is."""
    for draw, path in ((sweep_png, png), (sweep_html, html)):
        if path is not None:
            console.print(Text.assemble("wrote ", (str(draw(sweep, path)), "bold")), soft_wrap=True)


def _prompt(sweep: PatchSweep, side: words.Side) -> Text:
    tokens = sweep.clean_tokens if side == "clean" else sweep.corrupt_tokens
    line = Text(f"{side:8}", style=f"bold {_COLOURS[side]}")
    for token, mark in zip(tokens, words.marks(sweep, side), strict=True):
        line.append(words.plain(token), style="not bold default" if mark == "same" else "underline")
    return line


def _best(sweep: PatchSweep, top: int) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("best cells", no_wrap=True)
    table.add_column("token", overflow="fold")
    table.add_column("positions", no_wrap=True)
    for name in (sweep.metric, "over corrupt", "way to clean"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = panels(sweep)
    for spot in ranked(sweep, top):
        column = sweep.columns[spot.column]
        table.add_row(
            Text(shown[spot.panel].name(spot.row)), Text(words.visible(column.label)),
            f"{words.positions(column.clean)} → {words.positions(column.corrupt)}", words.number(spot.value),
            words.signed(effect(sweep, spot.value)), words.percent(share(sweep, spot.value)),
        )  # fmt: skip
    return table
