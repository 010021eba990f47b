"""A sweep in a terminal: what was asked, its baselines, the best cells, where the pictures are."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.cli.console import OUT
from patchclamp.plots import Heatmap, Strip, save_page, save_picture, style
from patchclamp.studies.sweep_result import Sweep

_COLOURS = {"clean": "blue", "corrupt": "dark_orange3"}


def show_question(console: Console, heatmap: Heatmap) -> None:
    """What was done, on what, and the prompts with the tokens in which they differ."""
    console.print()
    console.print(Text(heatmap.title, style="bold"), soft_wrap=True)
    console.print(Text(heatmap.provenance, style="dim"), soft_wrap=True)
    console.print()
    for strip in heatmap.strips:
        console.print(_prompt(strip), soft_wrap=True)


def show_best(console: Console, heatmap: Heatmap, top: int) -> None:
    """The baselines, the noise floor, and a table of the `top` best cells."""
    console.print()
    anchors = [anchor for anchor in (heatmap.baseline, heatmap.goal) if anchor is not None]
    for anchor in sorted(anchors, key=lambda anchor: anchor.side):
        value = style.number(anchor.value)
        console.print(Text.assemble(f"{anchor.name + ' run':12}", (value, f"bold {_COLOURS[anchor.side]}")))
    console.print(Text(heatmap.noise))
    if heatmap.note:
        console.print(Text(heatmap.note), soft_wrap=True)
    if heatmap.skipped:
        tokens = ", ".join(f"{style.quoted(token)} ({side} {position})" for side, position, token in heatmap.skipped)
        console.print(Text(f"no partner in the other prompt, so not patched: {tokens}"), soft_wrap=True)
    console.print()
    console.print(_best(heatmap, top))


def show_sweep(sweep: Sweep, top: int, save: Path | None, png: Path | None, html: Path | None) -> None:
    """All of a sweep, on standard output."""
    heatmap = sweep.picture()
    show_question(OUT, heatmap)
    show_best(OUT, heatmap, top)
    if save is not None:
        OUT.print(Text.assemble("wrote ", (str(sweep.save(save)), "bold")), soft_wrap=True)
    show_pictures(OUT, heatmap, png, html)


def show_pictures(console: Console, heatmap: Heatmap, png: Path | None, html: Path | None) -> None:
    """Draws what was asked for and says where it is."""
    for draw, path in ((save_picture, png), (save_page, html)):
        if path is not None:
            console.print(Text.assemble("wrote ", (str(draw(heatmap, path)), "bold")), soft_wrap=True)


def _prompt(strip: Strip) -> Text:
    line = Text(f"{strip.title:8}", style=f"bold {_COLOURS[strip.side]}")
    for token, mark in zip(strip.tokens, strip.marks, strict=True):
        line.append(style.plain(token), style="not bold default" if mark == "same" else "underline")
    return line


def _best(heatmap: Heatmap, top: int) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("best cells", no_wrap=True)
    table.add_column("token", overflow="fold")
    table.add_column("positions", no_wrap=True)
    over, goal = f"over {heatmap.baseline.name}", heatmap.goal
    spread = [name for name, _ in heatmap.panels[0].details if name in ("effect from", "effect to", "p")]
    for name in (heatmap.metric, over, *spread, *([] if goal is None else [f"way to {goal.name}"])):
        table.add_column(name, justify="right", no_wrap=True)
    for spot in heatmap.ranked(top):
        column = heatmap.columns[spot.column]
        place, label = heatmap.panels[spot.panel].cell_name(spot.row, column)
        details = dict(heatmap.panels[spot.panel].details)
        of_cell = [style.number(details[name][spot.row, spot.column]) for name in spread]
        share = [] if goal is None else [style.percent(heatmap.share(spot.value))]
        table.add_row(
            Text(place), Text(style.visible(label)), column.positions, style.number(spot.value),
            style.signed(heatmap.effect(spot.value)), *of_cell, *share,
        )  # fmt: skip
    return table
