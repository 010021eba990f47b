"""`StudyResult`: what studies return is frozen, says what it was made of, and is saved in one file and loaded again.

The file is safetensors: each array of the result is a tensor ("0", "1", …), and the metadata have the study's name
under `study` and the rest as JSON under `result`, where `{"tensor": "0"}` stands for an array.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any, Self

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language.values import as_file
from patchclamp.lm import LM

FORMAT = "1"


class Provenance(msgspec.Struct, frozen=True):
    """What a result was made with.

    model: hub id or folder · engine: its name and version · dtype: of the weights · patchclamp: its version ·
    settings: of the engine, as far as results depend on them · seeds: those of everything that was drawn
    """

    model: str
    engine: str
    dtype: str
    patchclamp: str
    settings: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Model, engine and dtype for a picture; of a local folder its name, for pictures travel."""
        path = PurePath(self.model)
        return f"{path.name if path.is_absolute() else self.model} · {self.engine} · {self.dtype}"


def provenance(lm: LM, seeds: tuple[int, ...] = ()) -> Provenance:
    """The provenance of what is run on `lm` now."""
    from patchclamp import __version__

    model = lm.model
    engine = f"{model.engine} {model.version}"
    return Provenance(model.name, engine, model.dtype, __version__, model.settings, seeds)


class StudyResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The base of studies' results. Their arrays are NumPy's, and all their other fields go through JSON."""

    provenance: Provenance

    def save(self, path: str | Path) -> Path:
        """Writes the result into one file, and makes its folder.

        Raises: `ProgramError` if the file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {}

        def store(value: Any) -> dict[str, str]:
            if not isinstance(value, np.ndarray):
                raise NotImplementedError(f"{type(value).__name__} is no array, and JSON has no such thing")
            name = str(len(tensors))
            tensors[name] = np.ascontiguousarray(value)
            return {"tensor": name}

        fields = msgspec.json.encode(msgspec.to_builtins(self, enc_hook=store)).decode()
        target = Path(as_file(path, "path"))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target, {"study": type(self).__name__, "format": FORMAT, "result": fields})
            _sort_header(target)
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{path} cannot be written: {error}", "path") from None
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a result that `save` wrote.

        Raises: `ProgramError` if the file is no result of this study, or is broken.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(as_file(path, "path"), "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{path} cannot be read as a saved {cls.__name__}: {error}", "path") from None
        if (metadata.get("study"), metadata.get("format")) != (cls.__name__, FORMAT):
            saved = metadata.get("study") or "no study of ours"
            raise ProgramError(f"{path} has {saved} in format {metadata.get('format')}, and no {cls.__name__} in "
                               f"format {FORMAT}", "path")  # fmt: skip

        def restore(kind: type, value: Any) -> Any:
            return tensors[value["tensor"]] if kind is np.ndarray else value

        try:
            return msgspec.convert(msgspec.json.decode(metadata["result"]), cls, dec_hook=restore, str_keys=True)
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ProgramError(f"{path} is no {cls.__name__} that this version can read: {error}", "path") from None


def _sort_header(file: Path) -> None:
    """Sorts what stands in a safetensors file's header, which stays as long: one result is one file, to the byte. The
    library writes metadata in an order that differs from process to process."""
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.encode(msgspec.json.decode(opened.read(length)), order="sorted")
        assert len(header) <= length
        opened.seek(8)
        opened.write(header.ljust(length))
