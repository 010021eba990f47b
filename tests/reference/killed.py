"""A harvest on the fake engine, in a process that kills itself: python -m tests.reference.killed FOLDER WHAT COUNT.

WHAT is `documents` (it dies as that many have been submitted) or `syncs` (as that many files would have been brought to
the disk, which rows, indices and folders are, or SQL statements of ledgers run).
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401  so that what is forked from this has it
import safetensors.numpy  # noqa: F401

from patchclamp.lm import LM
from patchclamp.store import journal
from patchclamp.studies.harvest import Filters, Harvest, harvest
from patchclamp.testing import FakeEngine


def documents() -> list[list[int]]:
    draw = np.random.default_rng(11)
    return [[0, *draw.integers(2, 60, draw.integers(0, 24)).tolist()] for _ in range(40)]


def run(folder: Path, engine: FakeEngine) -> Harvest:
    with LM("", engine) as lm:
        return harvest(lm, documents(), folder, sites=["resid_post[0:2]"], filters=Filters(norm_cap=6.0), parts=2,
                       shard_rows=100, batch_tokens=40, checkpoint_bytes=1, seed=3)  # fmt: skip


class Countdown:
    """Kills this process, as `kill -9` does, when it has counted so far."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, what: str, count: str) -> None:
    countdown = Countdown(int(count))

    class Dying(FakeEngine):
        def submit(self, requests):
            for _ in requests:
                if what == "documents":
                    countdown()
            return super().submit(requests)

    # a killed process loses nothing that it gave to the system: so no disk is waited for
    os.fsync = lambda descriptor: countdown() if what == "syncs" else None
    journal.SYNCHRONOUS, connect = "OFF", sqlite3.connect

    def watched(*args: Any, **named: Any) -> sqlite3.Connection:
        database = connect(*args, **named)
        if what == "syncs":
            database.set_trace_callback(lambda statement: countdown())
        return database

    sqlite3.connect = watched
    run(Path(folder), Dying())


if __name__ == "__main__":
    main(*sys.argv[1:])
