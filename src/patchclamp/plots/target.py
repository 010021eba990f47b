"""The file that a picture is written to. What can be wrong with it is found here, also before an hour of runs.

A folder that does not exist is made.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.values import as_file


def need(module: str) -> Any:
    """A module of the plots extra. Raises `PatchclampError` that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise PatchclampError(f"a picture needs {missing}: pip install 'patchclamp[plots]'") from None


def picture(path: str | Path) -> tuple[Path, str]:
    """The file of a picture and its format, by its ending: png, pdf, svg, whatever matplotlib writes."""
    path = Path(as_file(path, "path"))
    formats = need("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    ending = path.suffix.removeprefix(".").lower()
    if ending not in formats:
        raise unknown("picture format", ending, sorted(formats), str(path))
    return _file(path), ending


def page(path: str | Path) -> Path:
    """The file of a page."""
    path = Path(as_file(path, "path"))
    if path.suffix.lower() not in (".html", ".htm"):
        raise unknown("page format", path.suffix.removeprefix("."), ("html", "htm"), str(path))
    return _file(path)


def check_targets(png: str | Path | None = None, html: str | Path | None = None) -> None:
    """Raises now what `heatmap_png` and `heatmap_html` would raise after the runs."""
    for path, check in ((png, picture), (html, page)):
        if path is not None:
            check(path)


def _file(path: Path) -> Path:
    if path.is_dir():
        raise ProgramError("is a folder; give the name of a file", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProgramError(f"its folder cannot be made: {error.strerror}", str(path)) from None
    return path
