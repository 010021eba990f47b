"""A short storm; `python -m tests.engines.storm` is the long one."""

from __future__ import annotations

import os

import pytest

from .storm import Storm, adapters_of, engine

WANTED = {
    "crowded": ("runs", "taken back", "from the cache", "preempted"),
    "with adapters": ("runs", "taken back", "from the cache", "with an adapter"), "few seats and records": ("runs", "taken back")
}  # fmt: skip


@pytest.mark.parametrize("setting", WANTED)
def test_whoever_comes_and_goes_beside_it_a_request_is_as_if_alone(tiny, setting, tmp_path):
    """PATCHCLAMP_STORM_SEED and PATCHCLAMP_STORM_SECONDS make it that one, and longer."""
    seed = int(os.environ.get("PATCHCLAMP_STORM_SEED", int.from_bytes(os.urandom(3))))
    with engine(tiny, setting) as lm:
        storm = Storm(lm, seed, adapters_of(tiny, tmp_path) if setting == "with adapters" else ())
        storm.run(float(os.environ.get("PATCHCLAMP_STORM_SECONDS", "7")), WANTED[setting], requests=25)
    assert all(storm.seen[name] for name in WANTED[setting]), f"{storm.where()}: {storm.seen}"
