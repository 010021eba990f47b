"""A harvest that is killed (−9), again and again, ends with the bytes of one that is left alone."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import numpy as np
import pytest

from patchclamp.studies.harvest import Harvested
from patchclamp.testing import FakeEngine
from tests.reference.harvest import bytes_of
from tests.reference.killed import documents, main, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return Path(run(tmp_path_factory.mktemp("whole"), FakeEngine()).folder)


@pytest.fixture(scope="module")
def processes():
    """Starts processes quickly: they are forked from one that has imported all they need, and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.reference.killed"])
    return context


def start(processes, folder: Path, what: str, count: int) -> int:
    process = processes.Process(target=main, args=(str(folder), what, str(count)))
    process.start()
    process.join()
    return process.exitcode


# of 40 documents, and of about 300 syncs and statements of ledgers; the last 30 syncs of each part seal it
@pytest.mark.parametrize(
    ("what", "least", "most", "seed"),
    [("documents", 6, 20, 0), ("syncs", 30, 120, 1)],
)
@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_bytes(processes, tmp_path, whole, what, least, most, seed):
    draw = np.random.default_rng(seed)
    kills = 0
    while (status := start(processes, tmp_path, what, int(draw.integers(least, most)))) != 0:
        assert status == -signal.SIGKILL
        kills += 1
        assert kills < 30
    assert kills > 2
    assert bytes_of(tmp_path / whole.name) == bytes_of(whole)
    data = Harvested(tmp_path / whole.name)
    assert data.complete
    assert len(data) < sum(map(len, documents()))  # the cap left some out, in files that are written anew
