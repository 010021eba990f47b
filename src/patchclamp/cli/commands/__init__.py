"""The commands: a file of this folder is one, and a function that has the file's name runs it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

COMMANDS: dict[str, Callable[..., None]] = {
    name: getattr(importlib.import_module(f"{__name__}.{name}"), name) for _, name, _ in pkgutil.iter_modules(__path__)
}
