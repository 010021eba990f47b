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
Batch = Annotated[int, typer.Option("--batch", min=1, help="Runs submitted at a time; two batches are under way.")]
Pairs = Annotated[
    Path | None,
    typer.Option(
        "--pairs",
        help="In place of the prompts, a file: a JSON object of clean, corrupt, answer, foil, positions a line.",
    ),
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


def read_prompt_pairs(
    clean: str | None, corrupt: str | None, answer: str | None, foil: str | None, pairs: Path | None, command: str
) -> dict[str, Any]:
    """The prompts and what is graded, from the options or from a file; `positions` where the file has them."""
    given = {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}
    if pairs is not None:
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ProgramError(f"--{twice[0]} stands in the file", "--pairs")
        return read_pairs(pairs)
    missing = [name for name in ("clean", "corrupt", "answer") if given[name] is None]
    if missing:
        raise ProgramError(f"missing option --{missing[0]}; or give a file with --pairs", command)
    return given


def read_pairs(file: Path) -> dict[str, Any]:
    """Prompt pairs of `--pairs`: a JSON object a line, with clean, corrupt, answer, and perhaps foil and positions."""
    pairs: dict[str, Any] = {name: [] for name in ("clean", "corrupt", "answer", "foil", "positions")}
    for number, line in enumerate(lines_of(file, "--pairs"), 1):
        if not line.strip():
            continue
        pair = _value(line)
        missing = {"clean", "corrupt", "answer"} - pair.keys() if isinstance(pair, dict) else {"an object"}
        unknown = pair.keys() - pairs.keys() if isinstance(pair, dict) else set()
        if missing or unknown:
            wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(unknown))}"
            raise ProgramError(
                f"line {number} of {file} {wrong}; a line is an object of clean, corrupt, answer, foil, positions",
                "--pairs",
            )
        for name, values in pairs.items():
            values.append(pair.get(name))
    if not pairs["clean"]:
        raise ProgramError(f"{file} has no pairs", "--pairs")
    without = [of is None for of in pairs["positions"]]
    if any(without) and not all(without):
        raise ProgramError(f"{file} has positions in some pairs and not in others", "--pairs")
    if all(without):
        del pairs["positions"]
    return pairs


def positions_by_label(positions: list[Any]) -> dict[str, list[Any]]:
    """What every line of a file of pairs says of the columns, as `patch_sweep` takes it: a list a label."""
    labels = list(positions[0]) if isinstance(positions[0], dict) else []
    for number, of in enumerate(positions):
        if not labels or not isinstance(of, dict) or list(of) != labels:
            raise ProgramError(
                f"pair {number} has positions {of!r}; they are an object of the same labels in every pair, each with "
                'a selection, such as {"subject": "span(\'Rome\')", "last": -1}', "--pairs"
            )  # fmt: skip
    return {label: [of[label] for of in positions] for label in labels}


def any_missing(foil: Any) -> bool:
    """Whether a prompt has no foil."""
    return foil is None or (isinstance(foil, list) and any(one is None for one in foil))


def lines_of(file: Path, path: str) -> list[str]:
    """The lines of a text file. `path`: the option that names it, for errors."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"{file} cannot be read: {error}", path) from None
