"""The line of the caller that recorded something, so that an error at the end of the trace can name it."""

from __future__ import annotations

import linecache
import os.path
import sys
from typing import NamedTuple

from patchclamp.errors import PatchclampError

_HERE = os.path.dirname(__file__)


class Line(NamedTuple):
    """A line of the caller's code."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f'File "{self.file}", line {self.number}' + (f": {code}" if code else "")


def callers_line() -> Line:
    """The innermost line on the stack that is not of this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def at_line(error: PatchclampError, line: Line) -> PatchclampError:
    """The same error, with the line that caused it."""
    told = type(error)(f"{error.message}\n  {line}", error.path)
    told.__cause__ = error.__cause__
    return told
