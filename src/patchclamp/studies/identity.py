"""Which model a study ran on, by its files and not by its name alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

from patchclamp.lm import LM

WEIGHTS = (".safetensors", ".bin", ".gguf", ".json")
SAMPLED_BYTES = 1 << 16  # at both ends of a file of weights


def model_identity(lm: LM) -> tuple[str, str]:
    """The model's name and, of a folder, the hash of its files: their names, sizes and ends, and config.json. It is the
    same on every machine. Other weights of the same shapes have other ends."""
    folder = Path(lm.model.name)
    if not folder.is_dir():
        return lm.model.name, ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS and path.name != "config.json":
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(_ends(path))
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return folder.name, digest.hexdigest()


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(SAMPLED_BYTES)
        file.seek(max(path.stat().st_size - SAMPLED_BYTES, 0))
        return first + file.read()
