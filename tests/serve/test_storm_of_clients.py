"""Sixteen clients at once: every answer is what it is alone, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import KEYS, Server
from .storm import KINDS, storm


@pytest.mark.slow
def test_many_clients_at_once(server: Server):
    made, left, _ = asyncio.run(storm(server.url, server.model, KEYS[0], clients=16, actions=8, seed=1))
    assert made.wrong == []
    assert left == {}
    assert made.health_s
    assert set(made.done) == set(KINDS)
    assert made.done.total() == 128


def test_a_program_of_too_many_records_is_refused(server: Server):
    """Alternating positions are a range each: few ops, but much to do at every step."""
    edit = {"type": "scale", "factor": 1.0, "at": "resid_post[0]", "tokens": "prompt[::2]"}
    with server.http() as http:
        for edits, status in ((60, 413), (2, 200)):
            body = {
                "model": server.model,
                "prompt": [100] * 100,
                "max_tokens": 1,
                "patchclamp": {"edits": [edit] * edits},
            }
            response = http.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
