"""Arguments that several commands take, and how those that are a small language are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from patchclamp.errors import ProgramError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub id, a folder, or smollm2, the small model of the demo extra.")
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="vllm, transformers or fake; vllm where it is installed."),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, …; the checkpoint's if not given.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the engine, by its own name; repeatable."),
]

_NOT_OPTIONS = {"model": "the first argument", "engine": "--engine", "prove": "patchclamp sites"}


def read_options(pairs: Sequence[str] | None, dtype: str | None = None) -> dict[str, Any]:
    """Engine options from `key=value` texts and `--dtype`: a value is JSON where it parses, else text."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ProgramError(f"{pair!r} is not KEY=VALUE, as in max_model_len=512", "--option")
        key = key.strip()
        if key in _NOT_OPTIONS:
            raise ProgramError(f"{key} is not an option of the engine: see {_NOT_OPTIONS[key]}", "--option")
        if key in options:
            raise ProgramError(f"{key} is given twice", "--option")
        options[key] = _value(value)
    return options


def read_positions(texts: Sequence[str] | None) -> list[int | str] | None:
    """Selections of the corrupt prompt: a number as a number, else as it is; None for all."""
    return [int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else text for text in texts] if texts else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
