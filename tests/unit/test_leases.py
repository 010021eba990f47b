"""Leases of clients elsewhere: who is lost stays so, whatever of its words comes late."""

from __future__ import annotations

import asyncio
from typing import Any

from patchclamp.serve.server_state import GRACE_S, Leases


class Cores:
    """What is told to the engine cores: `(session, how long ago it was heard of)`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def renew(self, session: str, ago_s: float = 0.0) -> None:
        self.told.append((session, ago_s))


def told(act: Any) -> list[tuple[str, float]]:
    """What leases of 60 seconds tell while `act(leases)` runs."""

    async def run() -> list[tuple[str, float]]:
        cores = Cores()
        leases = Leases(cores, 60.0, lambda: asyncio.sleep(0))  # type: ignore[arg-type]
        act(leases)
        leases._looking.cancel()
        return cores.told

    return asyncio.run(run())


def test_a_last_word_after_the_connection_has_closed_renews_nothing():
    """A client that ends frees its runs as its connection closes; what it did not free would stay for another lease."""

    def act(leases: Leases) -> None:
        leases.opened("a")
        leases.renew_unless_lost("a")
        leases.lost("a")
        leases.renew_unless_lost("a")

    assert told(act) == [("a", 0.0), ("a", 0.0), ("a", 60.0 - GRACE_S)]


def test_who_runs_something_or_connects_again_is_alive():
    def act(leases: Leases) -> None:
        leases.opened("a")
        leases.lost("a")
        leases.renew("a")
        leases.renew_unless_lost("a")
        leases.opened("b")
        leases.lost("b")
        leases.opened("b")
        leases.renew_unless_lost("b")

    late = 60.0 - GRACE_S
    assert told(act) == [
        ("a", 0.0),
        ("a", late),
        ("a", 0.0),
        ("a", 0.0),
        ("b", 0.0),
        ("b", late),
        ("b", 0.0),
        ("b", 0.0),
    ]


def test_an_old_connection_that_closes_beside_a_new_one_loses_nobody():
    def act(leases: Leases) -> None:
        leases.opened("a")
        leases.opened("a")
        leases.lost("a")
        leases.renew_unless_lost("a")

    assert told(act) == [("a", 0.0)] * 3
