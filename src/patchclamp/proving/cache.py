"""The cache of proofs: a model is proved once for each engine, dtype and version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from patchclamp import __version__
from patchclamp.engines.smollm2 import cache_folder
from patchclamp.lm import LM
from patchclamp.proving.prove import Proof, prove
from patchclamp.store.whole_file import write_whole


def ensure_proved(lm: LM) -> list[Proof]:
    """The proofs of an `LM`, from the cache or made now. Withdraws the sites that fail from its map."""
    path = cache_folder() / "proofs" / f"{_key(lm)}.json"
    try:
        proofs = msgspec.json.decode(path.read_bytes(), type=list[Proof])
    except (OSError, msgspec.DecodeError):
        proofs = prove(lm)
        # a table made of modules may be unsure of a site, and proving again would not help
        if all(proof.holds for proof in proofs) or not lm.sites.family.tabled:
            write_whole(path, msgspec.json.encode(proofs))
    lm.sites.withdrawn = {proof.name: proof.note for proof in proofs if not proof.holds}
    return proofs


def _key(lm: LM) -> str:
    """What a proof depends on. A folder's weights count by their names, sizes and times."""
    folder = Path(lm.model.name)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    facts = (msgspec.structs.astuple(lm.model), lm.batching, marks, __version__, _code())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _code() -> str:
    """A hash of the code that reads and writes sites. A change of it voids old proofs."""
    root = Path(__file__).parent.parent
    rooms = ("sites", "language", "kernels", "runtime", "engines", "plan", "store", "proving")
    files = [file for room in rooms for file in sorted((root / room).rglob("*.py"))]
    files += [root / name for name in ("lm.py", "run.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
