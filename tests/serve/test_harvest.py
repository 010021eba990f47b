"""A harvest of a server is one of the same engine in this process."""

from __future__ import annotations

import numpy as np

import patchclamp as pc
from patchclamp.studies import harvest

from .conftest import KEYS, Server

TEXTS = ["The capital of France is Paris.", "Water boils at", "x", "One day, in the end, it was not so"]
SITES = [pc.resid_post[3], pc.z[5, 1]]


def test_a_harvest_over_http_is_the_same_as_here(server: Server, local: pc.LM, tmp_path):
    with pc.LM(server.url, api_key=KEYS[0]) as remote:
        there = harvest(remote, TEXTS, tmp_path / "there", sites=SITES, dtype="float32", batch_tokens=12, shard_rows=9)
        assert there.ran == there.rows == sum(len(local.tokens(text)) for text in TEXTS)
    here = harvest(local, TEXTS, tmp_path / "here", sites=SITES, dtype="float32", batch_tokens=12, shard_rows=9)
    one, other = there.open(), here.open()
    assert one.index() == other.index()
    for site in there.sites:
        rows = [np.concatenate(list(data.blocks(site=site))) for data in (one, other)]
        np.testing.assert_allclose(*rows, atol=1e-4 * np.abs(rows[1]).max())
        assert np.unique(rows[0], axis=0).shape == rows[0].shape
