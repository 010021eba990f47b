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
    with pc.LM(server.url, api_key=KEYS[0]) as remote:
        matrix = np.random.default_rng(0).standard_normal((3, 144)).astype(np.float32)
        few = harvest(remote, TEXTS, tmp_path / "few", sites=SITES[0], dtype="float32", project=matrix, shard_rows=9)
    assert few.open().manifest.recipe.sites[0].captured == 3
    projected, whole = (np.concatenate(list(data.blocks(site="resid_post[3]"))) for data in (few.open(), other))
    np.testing.assert_allclose(projected, whole @ matrix.T, atol=1e-4 * np.abs(whole @ matrix.T).max())
    for site in there.sites:
        rows = [np.concatenate(list(data.blocks(site=site))) for data in (one, other)]
        np.testing.assert_allclose(*rows, atol=1e-4 * np.abs(rows[1]).max())
        assert np.unique(rows[0], axis=0).shape == rows[0].shape
