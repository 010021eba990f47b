"""Leases of clients elsewhere: a heartbeat holds one, and no other message of a client does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from patchclamp.engines.vllm import admission
from patchclamp.engines.vllm.admission import Admission
from patchclamp.engines.wire import BEAT_S, LEASE_S
from patchclamp.plan.room import Room
from patchclamp.serve import server_state
from patchclamp.serve.server_state import GRACE_S, Leases

from .test_grade_cells import SITES

NOW = 1e6


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch):
    for module in (server_state, admission):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: NOW))


def left_s(act: Any) -> float:
    """How long the lease of client "a" lasts after `act(leases)`."""

    async def run() -> float:
        core = Admission(SITES, Room(4, 100, 100), 1)
        leases = Leases(core, LEASE_S, lambda: asyncio.sleep(0))  # type: ignore[arg-type]
        act(leases)
        leases._looking.cancel()
        return LEASE_S - (NOW - core._sessions["a"])

    return asyncio.run(run())


def is_killed(leases: Leases) -> None:
    leases.opened("a")
    leases.lost("a")


def test_a_batch_of_a_killed_client_that_is_read_late_renews_no_lease():
    def act(leases: Leases) -> None:
        is_killed(leases)
        leases.extend("a")

    assert left_s(is_killed) == pytest.approx(GRACE_S)
    assert left_s(act) == pytest.approx(BEAT_S)
    assert GRACE_S + 2 < BEAT_S < LEASE_S - 2


def test_a_batch_shortens_no_lease_and_may_come_before_the_heartbeat():
    def before(leases: Leases) -> None:
        leases.extend("a")
        leases.opened("a")

    def between(leases: Leases) -> None:
        leases.opened("a")
        leases.extend("a")

    assert left_s(lambda leases: leases.extend("a")) == pytest.approx(BEAT_S)
    assert left_s(before) == pytest.approx(LEASE_S)
    assert left_s(between) == pytest.approx(LEASE_S)


def test_who_connects_again_is_alive():
    def again(leases: Leases) -> None:
        is_killed(leases)
        leases.opened("a")

    def beside(leases: Leases) -> None:
        leases.opened("a")
        is_killed(leases)

    assert left_s(again) == pytest.approx(LEASE_S)
    assert left_s(beside) == pytest.approx(LEASE_S)
