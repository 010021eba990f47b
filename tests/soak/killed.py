"""A harvest and a sweep of SmolLM2, killed (-9) at random times: python -m tests.soak.killed [KILLS].

At each kill it measures the work that is done again: the time since something was last kept, or since the first batch
began. At the end, rows and their order are those of a study that was left alone.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import patchclamp as pc
from patchclamp.studies import patch_sweep
from patchclamp.studies.harvest import Harvested, harvest

MOST_S = 10.0  # of work that is done again
CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"


def study(what: str, folder: Path) -> None:
    """Runs a study to its end. `began` is written when the model is loaded."""
    with pc.LM("smollm2", engine="transformers") as lm:
        (folder / "began").write_text("")
        if what == "sweep":
            sweep = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=" Mary", foil=" John", sites=["resid_pre", "attn_out", "mlp_out"],
                                resume=folder / "journal")  # fmt: skip
            (folder / "result").write_bytes(pickle.dumps(sweep.grid))
        else:
            draw = np.random.default_rng(0)
            documents = [draw.integers(100, 40_000, draw.integers(20, 200)).tolist() for _ in range(600)]
            made = harvest(lm, documents, folder, sites="resid_post[3]", dtype="float32", parts=2)
            (folder / "result").write_bytes(pickle.dumps(made.folder))


def rows_of(what: str, folder: Path) -> tuple[object, np.ndarray]:
    """What names the rows of a finished study, in order, and the rows."""
    result = pickle.loads((folder / "result").read_bytes())
    if what == "sweep":
        return result.shape, result
    data = Harvested(result)
    return data.index().to_pydict(), np.concatenate(list(data.blocks()))


def kept_at(folder: Path) -> float:
    """When something was last kept: a journal that is open grows in its log."""
    kept = [*folder.glob("journal*"), *folder.rglob("ledger*"), *folder.rglob("index.parquet"), folder / "began"]
    return max(path.stat().st_mtime for path in kept)


def killed(what: str, kills: int, draw: random.Random) -> list[float]:
    """Seconds of work that each kill lost."""
    with tempfile.TemporaryDirectory() as place:
        folders = whole, often = Path(place, "whole"), Path(place, "often")
        for folder in folders:
            folder.mkdir()
        began = time.monotonic()
        study(what, whole)
        longest = 1.5 * (time.monotonic() - began) / kills  # the study goes on between kills, and should outlast them
        command, lost = [sys.executable, "-m", "tests.soak.killed", what, str(often)], []
        for _ in range(kills):
            (often / "began").unlink(missing_ok=True)
            process = subprocess.Popen(command)
            while not (often / "began").exists():
                time.sleep(0.05)
            time.sleep(draw.uniform(1, longest))
            process.kill()
            if process.wait() == 0:
                break
            lost.append(time.time() - kept_at(often))
        subprocess.run(command, check=True)
        (names, rows), (expected_names, expected) = (rows_of(what, folder) for folder in (often, whole))
        assert names == expected_names
        np.testing.assert_allclose(rows, expected, rtol=1e-3, atol=1e-3)  # batches of other sizes round otherwise
    return lost


if __name__ == "__main__":
    if len(sys.argv) == 3:
        study(sys.argv[1], Path(sys.argv[2]))
    else:
        seed = int(os.environ.get("SEED", "0"))
        for what in ("sweep", "harvest"):
            lost = killed(what, int(sys.argv[1]) if sys.argv[1:] else 10, random.Random(seed))
            print(what, "lost", [round(seconds, 1) for seconds in lost], flush=True)
            assert lost
            assert max(lost) <= MOST_S
