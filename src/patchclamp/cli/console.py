"""Where commands write: results to standard output, everything about their making to standard error."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from patchclamp.errors import PatchclampError

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def complain(error: PatchclampError) -> None:
    """An error as one red line, whatever is in its text."""
    line = " ".join(str(error).split())
    ERR.print(Text(f"error: {line}", style="red"), soft_wrap=True)
