"""Whether another vLLM, of which only the source is there, has the seams that patchclamp enters."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import msgspec

from patchclamp.engines.vllm.compat.seams import SEAMS, Seam, changed_parameters, parameters_of
from patchclamp.engines.vllm.source import FUNCTIONS, Definition, Source, read_source


class SeamStatus(msgspec.Struct, frozen=True):
    """What became of a seam.

    place: where it is expected, `module:Class.attribute`
    status: "there"; "moved": its name is elsewhere, or it lacks a parameter or an attribute that is used; "gone"
    detail: where it is now, or what it lacks
    """

    name: str
    place: str
    why: str
    checked: tuple[str, ...]
    status: Literal["there", "moved", "gone"]
    detail: str = ""


class SourceReport(msgspec.Struct, frozen=True):
    """The seams of a vLLM at a path, in the order of their declarations."""

    path: str
    version: str
    seams: tuple[SeamStatus, ...]

    @property
    def all_there(self) -> bool:
        return all(seam.status == "there" for seam in self.seams)


def examine_source(path: Path) -> SourceReport:
    """Looks every seam up in the source of a vLLM: a wheel, a checkout, or an installed folder.

    Raises: `EngineError` if no vLLM is there.
    """
    source = read_source(path)
    return SourceReport(str(path), source.version, tuple(look_up(seam, source) for seam in SEAMS.values()))


def look_up(seam: Seam, source: Source) -> SeamStatus:
    """What became of one seam."""
    module_name, _, path = seam.place.partition(":")
    owner = source.module(module_name)
    if owner is None:
        return _elsewhere(seam, source, f"there is no module {module_name}")
    for word in path.split(".") if path else ():
        if (inner := source.member(owner, word)) is None:
            near = difflib.get_close_matches(word, source.names(owner), 2)
            like = f"; near it: {', '.join(near)}" if near else ""
            return _elsewhere(seam, source, f"{_called(owner)} has no {word}{like}")
        owner = inner
    lack = _lack(seam, source, owner)
    return _status(seam, "moved" if lack else "there", lack)


def _lack(seam: Seam, source: Source, found: Definition) -> str:
    """What is used of a seam and not there, in words."""
    if seam.signature:
        if not isinstance(found.node, FUNCTIONS):
            return "it is no function"
        if difference := changed_parameters(seam, parameters_of(found.node.args)):
            return difference
    parameters = source.takes(found)
    untaken = [word for word in seam.takes if word not in (parameters or ())]
    if untaken:
        taken = "it is no function" if parameters is None else f"it takes {', '.join(parameters) or 'nothing'}"
        return f"it takes no parameter {', '.join(untaken)}; {taken}"
    required = [word.rstrip("~") for word in seam.has.split() if not word.endswith("?")]
    absent = [word for word in required if source.member(found, word) is None and not source.sets(found, word)]
    return f"it has no {', '.join(absent)}" if absent else ""


def _elsewhere(seam: Seam, source: Source, why: str) -> SeamStatus:
    """The status of a seam that is not at its place: moved if its module or name is in other modules, else gone."""
    module_name, _, path = seam.place.partition(":")
    outer, _, last = path.partition(".")
    if not path:
        places = source.called(module_name.rpartition(".")[2])
    else:
        places = [f"{name}:{path}" for name in source.defining(outer) if _has(source, name, outer, last)]
    others = sorted(set(places) - {seam.place})
    return _status(seam, "moved", f"{why}; it is at {', '.join(others)}") if others else _status(seam, "gone", why)


def _has(source: Source, module_name: str, outer: str, last: str) -> bool:
    """Whether a module's class `outer` has an attribute `last`; any has ""."""
    module = source.module(module_name)
    owner = source.member(module, outer) if module else None
    return owner is not None and (not last or source.member(owner, last) is not None)


def _called(owner: Definition) -> str:
    name = getattr(owner.node, "name", "")
    return f"{owner.module}:{name}" if name else owner.module


def _status(seam: Seam, status: Literal["there", "moved", "gone"], detail: str = "") -> SeamStatus:
    return SeamStatus(seam.name, seam.place, seam.why, seam.checked, status, detail)
