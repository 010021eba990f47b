"""The bank of names: vectors, means, whole programs and runs that ops use by name. `lm.bank`.

A name is resolved when a request is made; what goes to the worker, and into the keys of the prefix cache, is the
content.

File: safetensors. A vector is a tensor of its name; means are one tensor [n, D], whose places stand in the metadata
under `means` (JSON: name to a list of places), and programs there under `programs` (JSON: name to `Program.to_json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from patchclamp.errors import MissingSource, PatchclampError, ProgramError, ShapeError, near
from patchclamp.language import Capture, Op, Program, Vector
from patchclamp.language.values import check_name


class Means(msgspec.Struct, frozen=True):
    """A row for each of some places, by their names: what `Named` writes is the row of the place that is written."""

    rows: dict[str, Vector]

    def __post_init__(self) -> None:
        rows = list(self.rows.values())
        if not rows or not all(isinstance(row, Vector) and row.shape == (rows[0].shape[-1],) for row in rows):
            raise ShapeError("means are vectors [D] of one width, one for each of at least one place")
        if not all(isinstance(place, str) for place in self.rows):
            raise ProgramError("the places of means are named by text")

    def __repr__(self) -> str:
        return f"Means({', '.join(self.rows)})"


class Kept(Protocol):
    """A run, whose captures stay as long as the bank has it; `From` reads them by its name."""

    key: str

    def positions_of(self, point: int) -> np.ndarray: ...
    def select(self, tokens: Any) -> np.ndarray: ...


Entry = Vector | Means | Program | Kept


class NamedBank(MutableMapping[str, Entry]):
    """By name: vectors [D] or [n, D] (tensors, arrays and lists are taken, too), `Means`, edits, and runs."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __setitem__(self, name: str, given: Any) -> None:
        self._entries[check_name(name)] = _entry(given)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            there = ", ".join(self._entries) or "nothing yet"
            raise MissingSource(f"nothing in the bank is named {name!r}{near(name, self._entries)}; there is: {there}")
        return self._entries[name]

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<bank of {len(self)}: {', '.join(self)}>"

    def mean(self, name: str, runs: Iterable[Any], site: Any, tokens: Any = None) -> Means:
        """Names the means of what some runs captured at a site, a row for each layer, over all positions or those of
        `tokens`.

        Source: mean ablation; Wang et al. 2022 (arXiv:2211.00593). Raises `MissingSource` for what a run
        did not capture and `ProgramError` where nothing is selected.
        """
        check_name(name)
        runs = list(runs)
        if not runs:
            raise ProgramError("a mean of no runs", "runs")
        rows_by_ref = {}
        for ref in runs[0].refs(site):
            total, count = np.zeros(1), 0
            for i, run in enumerate(runs):
                try:
                    rows = _selected(run, ref, tokens)
                except PatchclampError as error:
                    raise error.under(f"runs[{i}]") from None
                total, count = total + rows.sum(0), count + len(rows)
            if not count:
                raise ProgramError(f"{tokens} selects no position that was captured at {ref}", "tokens")
            rows_by_ref[ref] = Vector.of(total / count)
        self[name] = means = Means(rows_by_ref)
        return means

    def save(self, file: str | Path, names: Iterable[str] | None = None) -> None:
        """Writes everything, or what is named, to a safetensors file; one that was there stays until it is written."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        chosen = {name: self[name] for name in (self if names is None else names)}
        runs = [name for name, entry in chosen.items() if is_run(entry)]
        if runs:
            told = f"{runs[0]!r} is a run, which stays with its engine: name what is to be written"
            raise ProgramError(told, "names")
        tensors = {name: entry.array() for name, entry in chosen.items() if isinstance(entry, Vector)}
        means = {name: entry.rows for name, entry in chosen.items() if isinstance(entry, Means)}
        tensors |= {name: np.stack([row.array() for row in rows.values()]) for name, rows in means.items()}
        places = {name: list(rows) for name, rows in means.items()}
        programs = {name: _written(name, entry) for name, entry in chosen.items() if isinstance(entry, Program)}
        new = Path(f"{file}.new")
        try:
            save_file(tensors, str(new), {"means": json.dumps(places), "programs": json.dumps(programs)})
            new.replace(file)
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{file} cannot be written: {error}") from None

    def load(self, file: str | Path, prefix: str = "") -> list[str]:
        """Takes what a safetensors file has, our own or anybody's whose tensors are [D] or [n, D]; returns the names.

        Raises `ProgramError` with the file's and the tensor's name for what cannot be taken; then nothing is.
        """
        tensors, metadata = _read(Path(file))
        found: dict[str, Entry] = {}
        name = "its metadata"
        try:
            means = msgspec.json.decode(metadata.get("means", "{}"), type=dict[str, list[str]])
            programs = msgspec.json.decode(metadata.get("programs", "{}"), type=dict[str, str])
            stray = sorted((means.keys() - tensors.keys()) | (programs.keys() & tensors.keys()))
            if stray:
                raise ProgramError(f"{stray[0]!r} is told of in the metadata, and is no such thing")
            for name, tensor in tensors.items():
                found[check_name(prefix + name)] = _tensor(tensor, means.get(name))
            for name, program in programs.items():
                found[check_name(prefix + name)] = _entry(Program.from_json(program))
        except (PatchclampError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProgramError(f"{file}: {name}: {error}") from None
        self._entries |= found
        return list(found)


def _written(name: str, program: Program) -> str:
    try:
        return program.to_json()
    except PatchclampError as error:
        told = f"{name!r} cannot be written: {error}; name what is to be written"
        raise ProgramError(told, "names") from None


def _tensor(tensor: Any, places: list[str] | None) -> Entry:
    """A tensor of a file: a vector, or the means of some places."""
    if places is None:
        return _entry(tensor)
    if len(tensor.shape) != 2 or len(set(places)) != len(places) or len(places) != tensor.shape[0]:
        raise ShapeError(f"means of {len(places)} different places are [{len(places)}, D], not {list(tensor.shape)}")
    return Means({place: Vector.of(row) for place, row in zip(places, tensor, strict=True)})


def _entry(given: Any) -> Entry:
    if isinstance(given, (Vector, Means)) or is_run(given):
        return given
    if isinstance(given, Program) or _is_program(given):
        program = given if isinstance(given, Program) else Program.of(given)
        if program.capture or not program.edits or any(isinstance(op, Capture) for op in program.edits):
            raise ProgramError("a named program has edits and captures nothing")
        return program
    return Vector.of(given)


def is_run(given: Any) -> bool:
    return isinstance(getattr(given, "key", None), str) and hasattr(given, "positions_of")


def _is_program(given: Any) -> bool:
    return isinstance(given, Op) or (
        isinstance(given, (list, tuple)) and bool(given) and all(isinstance(op, Op) for op in given)
    )


def _selected(run: Any, place: Any, tokens: Any) -> np.ndarray:
    rows = run[place]
    rows = rows.reshape((len(rows), int(np.prod(rows.shape[1:]))))
    rows = np.asarray(rows.float() if hasattr(rows, "float") else rows, np.float64)
    if tokens is None:
        return rows
    chosen = set(run.select(tokens).tolist())
    return rows[[i for i, position in enumerate(run.positions(place)) if position in chosen]]


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors, by way of torch where a file has what NumPy does not (bfloat16), and the file's metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        for framework in ("numpy", "pt"):
            try:
                with safe_open(str(file), framework) as opened:
                    return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
            except (TypeError, AttributeError):  # a dtype that NumPy does not know
                if framework == "pt":
                    raise
    except (OSError, SafetensorError, ImportError) as error:
        raise ProgramError(f"{file} cannot be read as safetensors: {error}") from None
    raise AssertionError(file)
