"""The pictures of a study's result, drawn where a command was asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.text import Text

Png = Annotated[Path | None, typer.Option("--png", help="Draw it into this file; its ending says the format.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write it as a page with hover into this file.")]
Save = Annotated[Path | None, typer.Option("--save", help="Save the result, with its provenance, into this file.")]


class Pictured(Protocol):
    """A result with pictures."""

    def plot(self, path: Path) -> Path: ...
    def to_html(self, path: Path) -> Path: ...
    def save(self, path: Path) -> Path: ...


def check_pictures(png: Path | None, html: Path | None) -> None:
    """Raises now what drawing would raise after the runs."""
    from patchclamp.plots import check_targets

    check_targets(png, html)


def show_pictures(console: Console, result: Pictured, png: Path | None, html: Path | None, save: Path | None) -> None:
    """Writes what was asked for and says where it is."""
    for write, path in ((result.plot, png), (result.to_html, html), (result.save, save)):
        if path is not None:
            console.print(Text.assemble("wrote ", (str(write(path)), "bold")), soft_wrap=True)
