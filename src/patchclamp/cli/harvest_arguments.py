"""How arguments of `patchclamp harvest` that are a small language are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchclamp.errors import ProgramError


def read_windows(texts: Sequence[str] | None) -> tuple[tuple[int | None, int | None], ...]:
    """Windows of positions: 4:, 0:128, -8:."""
    windows = []
    for text in texts or ():
        ends = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", text)
        if ends is None:
            raise ProgramError(f"{text!r} is no window of positions such as 4: or 0:128", "--positions")
        windows.append(tuple(None if end is None else int(end) for end in ends.groups()))
    return tuple(windows)


def read_shard(text: str) -> tuple[int, int]:
    """I/N."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not int(numbers[1]) < int(numbers[2]):
        raise ProgramError(f"{text!r} is not I/N, machine I of N from 0 on, such as 0/4", "--shard")
    return int(numbers[1]), int(numbers[2])


def read_matrix(path: Path | None) -> Any:
    """A matrix that NumPy saved."""
    import numpy as np

    if path is None:
        return None
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ProgramError(f"{path} has no matrix that NumPy saved: {error}", "--project") from None
