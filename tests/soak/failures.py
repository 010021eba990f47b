"""What random search found wrong, kept in `failures.json` so that `make test` runs it each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("failures.json")


class Failure(NamedTuple):
    """`kind`: "storm" or "hypothesis"; `what`: the storm's setting, or the test; `rounds`: of a storm."""

    kind: str
    what: str
    seed: int
    rounds: int = 1

    def __str__(self) -> str:
        return f"{self.what}, seed {self.seed}"


def kept(kind: str) -> list[Failure]:
    """The failures of a kind, in the order they were found."""
    return [failure for failure in (Failure(*row) for row in json.loads(FILE.read_text())) if failure.kind == kind]


def keep(failure: Failure) -> None:
    """Adds a failure to the file, once."""
    rows = json.loads(FILE.read_text())
    if list(failure) not in rows:
        FILE.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in [*rows, list(failure)]) + "\n]\n")
