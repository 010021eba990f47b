"""Arguments that several commands take, and how those that are a small language are read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
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

# -- of sweeps

Answer = Annotated[str, typer.Option("--answer", help="What the prompt calls for, with its leading space.")]
Foil = Annotated[str | None, typer.Option("--foil", help="What it is compared with; logprob and prob need none.")]
Sites = Annotated[list[str] | None, typer.Option("--site", help="resid_pre, attn_out, z, 'z[:, 3]', …; repeatable.")]
Layers = Annotated[str | None, typer.Option("--layers", help="A layer or a range such as 0:12; all if not given.")]
Selections = Annotated[
    list[str] | None,
    typer.Option("--positions", help="Tokens of the prompt to patch together: -1, span('Rome'); repeatable."),
]
Group = Annotated[
    int | None, typer.Option("--group", min=1, help="So many heads, neurons or experts a row: 1 for each head.")
]
Window = Annotated[int, typer.Option("--window", min=1, help="So many layers around a cell's are patched with it.")]
Source = Annotated[
    str | None,
    typer.Option("--source", metavar="SOURCE", help="zeros; or mean:FILE, resample:FILE, a file with a prompt a line."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Write values into this file as they come, and go on from what it has.")
]
Save = Annotated[Path | None, typer.Option("--save", help="Save the result into this file.")]
Png = Annotated[
    Path | None, typer.Option("--png", help="Draw the grid into this file; its ending says the format: png, pdf, svg.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write the grid as a page with hover into this file.")]
Top = Annotated[int, typer.Option("--top", min=1, help="How many of the best cells to show.")]

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


def read_prompts(path: Path, argument: str) -> list[str]:
    """The prompts of a file, one a line; empty lines are none, and \\n stands for a line break."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"{path} cannot be read: {error}", argument) from None
    prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not prompts:
        raise ProgramError(f"{path} has no prompt", argument)
    return prompts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_source(text: str | None, seed: int) -> Any:
    """A source of `--source`: `zeros`, or the mean or draws of the prompts in a file."""
    from patchclamp.studies import MeanOf, Resampled

    if text is None:
        return None
    kind, sign, file = text.partition(":")
    if not sign and kind == "zeros":
        return "zeros"
    if not sign or kind not in ("mean", "resample"):
        raise ProgramError(f"{text!r} is none of zeros, mean:FILE and resample:FILE", "--source")
    prompts = [line for line in _lines(Path(file), "--source") if line.strip()]
    return MeanOf(prompts) if kind == "mean" else Resampled(prompts, seed)


def read_pairs(file: Path) -> dict[str, list[Any]]:
    """Prompt pairs of `--pairs`: a JSON object a line, with clean, corrupt, answer and perhaps foil."""
    pairs: dict[str, list[Any]] = {name: [] for name in ("clean", "corrupt", "answer", "foil")}
    for number, line in enumerate(_lines(file, "--pairs"), 1):
        if not line.strip():
            continue
        pair = _value(line)
        missing = {"clean", "corrupt", "answer"} - pair.keys() if isinstance(pair, dict) else {"an object"}
        unknown = pair.keys() - pairs.keys() if isinstance(pair, dict) else set()
        if missing or unknown:
            wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(unknown))}"
            raise ProgramError(
                f"line {number} of {file} {wrong}; a line is an object of clean, corrupt, answer, foil", "--pairs"
            )
        for name, values in pairs.items():
            values.append(pair.get(name))
    if not pairs["clean"]:
        raise ProgramError(f"{file} has no pairs", "--pairs")
    return pairs


def _lines(file: Path, path: str) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"{file} cannot be read: {error}", path) from None
