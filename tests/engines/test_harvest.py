"""A harvest on every engine is what the engine captures, row by row."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import Filters, Project, harvest
from tests.reference.harvest import rows_of

from ..conftest import WIDTH

TEXTS = ["The Eiffel Tower is in Paris.", "One day, in the end, it was not", "It", "I think that the weather is fine"]
SITES = ["resid_post[6]", "z[5, 3]", "neurons[2]"]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_harvest_is_what_the_engine_captures(engine, narrow, tmp_path):
    lm = narrow.get(engine, "float32")
    made = harvest(lm, TEXTS, tmp_path, sites=SITES, dtype="float32", batch_tokens=16, shard_rows=10,
                   filters=Filters(positions=((1, None),)))  # fmt: skip
    data = made.open()
    documents = [lm.tokens(text) for text in TEXTS]
    assert data.complete
    assert len(data) == made.rows == sum(len(ids) - 1 for ids in documents)
    index = data.index().to_pydict()
    places = list(zip(index["document"], index["position"], strict=True))
    reference = rows_of(lm, documents, SITES, lambda ids, position: position > 0)
    assert sorted(places) == sorted(reference[SITES[0]])
    assert index["token"] == [documents[document][position] for document, position in places]
    for site in SITES:
        expected = np.array([reference[site][place] for place in places])
        stored = np.concatenate(list(data.blocks(site=site)))
        np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        assert len(np.unique(stored, axis=0)) == len(stored)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_projection_on_the_device_is_that_on_the_host(engine, narrow, tmp_path, monkeypatch):
    """The same rows at the same places, alike to within fp32's rounding; of each row k numbers come from the engine."""
    lm, draw = narrow.get(engine, "float32"), np.random.default_rng(0)
    matrices = {"resid_post[6]": draw.standard_normal((4, WIDTH)), "z[5, 3]": draw.standard_normal((3, 64))}
    came, fetch_many = [], lm.engine.fetch_many

    def fetched(wanted):
        captured = fetch_many(wanted)
        came.append({rows.shape[1] for _, rows in captured})
        return captured

    monkeypatch.setattr(lm.engine, "fetch_many", fetched)
    on_device, on_host = (
        harvest(lm, TEXTS, tmp_path, sites=list(matrices), dtype="float32", batch_tokens=16, shard_rows=10,
                project=Project(matrices, on_device=where)).open() for where in (True, False)
    )  # fmt: skip
    assert came == [{4, 3}] * (len(came) // 2) + [{WIDTH, 576}] * (len(came) // 2) != []
    assert on_device.index() == on_host.index()
    for site in matrices:
        ours, theirs = (np.concatenate(list(data.blocks(site=site))) for data in (on_device, on_host))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5 * np.abs(theirs).max())
        assert len(np.unique(ours, axis=0)) == len(ours)


def test_special_tokens_are_known_by_their_texts(narrow, tmp_path):
    lm = narrow.get("transformers", "float32")
    special = lm.tokenizer.inner.all_special_ids[0]
    ids = [[special, *lm.tokens("The weather is"), special]]
    for filters, positions in [(Filters(no_bos=True), [1, 2, 3, 4]), (Filters(no_special=True), [1, 2, 3])]:
        data = harvest(lm, ids, tmp_path, sites=[pc.resid_post[1]], filters=filters).open()
        assert sorted(data.index()["position"].to_pylist()) == positions
        assert data.dtype == "bfloat16"
