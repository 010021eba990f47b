"""Control vectors as llama.cpp and repeng keep them: GGUF of the architecture `controlvector`, tensors `direction.N`.

llama.cpp adds `direction.N` to the stream after its layer N, counted from 0, and so does repeng with `directions[N]`:
it is `resid_post[N]`. (llama.cpp's tools begin with `direction.1`, which is the second layer. It has no place for a
direction of layer 0, and refuses a file that has one.)

Source: llama.cpp, `common_control_vector_load` and `llama_adapter_cvec`; repeng, `ControlVector.export_gguf`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import as_file

ARCHITECTURE = "controlvector"
HINT, COUNT = f"{ARCHITECTURE}.model_hint", f"{ARCHITECTURE}.layer_count"


def write(path: str | Path, directions: Mapping[int, np.ndarray], model_hint: str) -> Path:
    """Writes directions [D] by layer.

    Raises: `ProgramError` for layer 0, `PatchclampError` without the gguf package.
    """
    if 0 in directions:
        raise ProgramError(
            "llama.cpp has no direction after layer 0: leave that layer out, as in layers=[1, 2]", "layers"
        )
    writer = _package().GGUFWriter(str(as_file(path, "path")), ARCHITECTURE)
    try:
        writer.add_string(HINT, model_hint)
        writer.add_uint32(COUNT, len(directions))
        for layer, direction in sorted(directions.items()):
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(direction, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {error.strerror}", "path") from None
    finally:
        writer.close()
    return Path(path)


def read(path: str | Path) -> tuple[dict[int, np.ndarray], str]:
    """Directions [D] by layer, fp32, and the model that the file was made for.

    Raises: `ProgramError` for what is no control vector, `PatchclampError` without the gguf package.
    """
    package = _package()
    try:
        reader = package.GGUFReader(str(as_file(path, "path")))
        architecture, hint = _text(reader, "general.architecture"), _text(reader, HINT)
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise ProgramError(f"{path} cannot be read as GGUF: {error}", "path") from None
    if architecture != ARCHITECTURE:
        raise ProgramError(f"{path} is GGUF of {architecture or 'no architecture'}, not a {ARCHITECTURE}", "path")
    directions = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"direction\.(\d{1,6})", name)
        if layer is None or tensor.ndim != 1 or tensor.dtype not in (np.float32, np.float16):
            raise ProgramError(
                f"{path}: {name} {list(tensor.shape)} {tensor.dtype} is no direction [D] of a layer", "path"
            )
        directions[int(layer[1])] = tensor.astype(np.float32)
    if len({len(direction) for direction in directions.values()}) != 1:
        raise ProgramError(f"{path} has no directions of one width", "path")
    return dict(sorted(directions.items())), hint


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else bytes(field.parts[-1]).decode("utf-8", "replace")


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise PatchclampError("GGUF files need the gguf package: pip install gguf") from None
