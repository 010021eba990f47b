"""LoRA adapters, read from the folders that PEFT writes, before anything runs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from patchclamp.errors import MissingSource, PatchclampError, ProgramError
from patchclamp.language.values import as_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """An adapter in a folder.

    name: of its folder and its files' sizes and times
    rank: the largest of its modules' ranks
    """

    folder: str
    name: str
    rank: int


def adapters_of(folders: Any, prompts: int) -> list[Adapter | None]:
    """The adapter of each prompt, from None, a folder for all prompts, or a list of such, one a prompt.

    Raises: what `read` raises.
    """
    if not isinstance(folders, (list, tuple)):
        return [None if folders is None else _read_at(folders, "lora")] * prompts
    if len(folders) != prompts:
        raise ProgramError(f"{len(folders)} adapters for {prompts} prompts: give one for all, or one a prompt", "lora")
    adapters: dict[Any, Adapter | None] = {None: None}  # by folder
    for i, folder in enumerate(folders):
        if not isinstance(folder, (str, os.PathLike, type(None))) or folder not in adapters:
            adapters[folder] = _read_at(folder, f"lora[{i}]")
    return [adapters[folder] for folder in folders]


def _read_at(path: Any, argument: str) -> Adapter:
    try:
        return read(path)
    except PatchclampError as error:
        raise error.under(argument) from None


def read(path: Any) -> Adapter:
    """The adapter in a folder. Raises `MissingSource` where there is none, `ProgramError` for what is no LoRA."""
    folder = Path(as_file(path)).expanduser().resolve()
    if not folder.is_dir():
        raise MissingSource(f"there is no folder {str(path)!r}; give that of an adapter which PEFT has written")
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        files = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise MissingSource(
            f"{folder} has no {' and no '.join(missing)} (there is: {files}); peft_model.save_pretrained(folder) "
            "writes what is needed"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        rank, kind = max(int(rank) for rank in ranks), config.get("peft_type", "LORA")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProgramError(f"{folder / CONFIG} is not an adapter's: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise ProgramError(f"{folder} is an adapter of type {kind}; only LORA runs beside programs")
    marks = [(mark.st_size, mark.st_mtime_ns) for mark in ((folder / name).stat() for name in (CONFIG, WEIGHTS))]
    return Adapter(
        str(folder), f"{folder.name}-{hashlib.sha256(repr((folder, marks)).encode()).hexdigest()[:16]}", rank
    )
