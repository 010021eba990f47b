"""Sixteen clients at once: every answer is what it is alone, and nothing is left."""

from __future__ import annotations

import asyncio

from .conftest import KEYS, Server
from .storm import KINDS, storm


def test_many_clients_at_once(server: Server):
    made, left, _ = asyncio.run(storm(server.url, server.model, KEYS[0], clients=16, actions=8, seed=1))
    assert made.wrong == []
    assert left == {}
    assert set(made.done) == set(KINDS)
    assert made.done.total() == 128
