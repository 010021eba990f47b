"""Tests say the same each time: none draws without a seed, and none looks at the clock (`tests/soak` does both)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in ("gpu", "soak")]
CLOCKS = {"time.monotonic", "time.perf_counter", "time.time", "time.process_time", "datetime.now"}
DRAWS = {"os.urandom", "torch.seed"}
UNSEEDED = {"default_rng", "Random", "SeedSequence", "seed"}  # when nothing is given


def unsteady(code: str) -> list[str]:
    """The calls in a file whose result is another one each time, with their lines."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    found = []
    for call in calls:
        name, empty = ast.unparse(call.func), not call.args and not call.keywords
        if name in CLOCKS | DRAWS or (empty and name.rpartition(".")[2] in UNSEEDED):
            found.append(f"{call.lineno}: {name}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_drawn_without_a_seed_or_bounded_by_the_clock(file):
    assert unsteady(file.read_text()) == []


def test_what_is_unsteady_is_found():
    code = "import time\na = time.monotonic()\nb = np.random.default_rng()\nc = random.Random(3)\nd = random.seed()\n"
    assert unsteady(code) == ["2: time.monotonic", "3: np.random.default_rng", "5: random.seed"]
    assert unsteady("default_rng(0).random()") == []
