"""Property tests that failed in `make soak`, with the seeds they failed with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .failures import Failure, kept


def searched(test: str, seed: int) -> subprocess.CompletedProcess:
    """One property test, or all (""), on examples drawn from a seed, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}",
               *([test] if test else ["tests/unit", "-m", "hypothesis"])]  # fmt: skip
    environment = {**os.environ, "PATCHCLAMP_HYPOTHESIS": "soak"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("failure", kept("hypothesis"), ids=str)
def test_what_failed_once_holds(failure: Failure):
    done = searched(failure.what, failure.seed)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_failure_is_kept_once_and_read_back(tmp_path, monkeypatch):
    from . import failures

    monkeypatch.setattr(failures, "FILE", tmp_path / "failures.json")
    failures.FILE.write_text("[]")
    for failure in (Failure("storm", "crowded", 7, 3), Failure("hypothesis", "tests/x.py::test_y", 8)) * 2:
        failures.keep(failure)
    assert kept("storm") == [Failure("storm", "crowded", 7, 3)]
    assert kept("hypothesis") == [Failure("hypothesis", "tests/x.py::test_y", 8)]
