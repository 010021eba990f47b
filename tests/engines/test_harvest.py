"""A harvest of the real model on every engine is what the engine captures, row by row."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import Filters, harvest
from tests.reference.harvest import rows_of

TEXTS = ["The Eiffel Tower is in Paris.", "One day, in the end, it was not", "It", "I think that the weather is fine"]
SITES = ["resid_post[10]", "z[5, 3]", "neurons[2]"]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_harvest_is_what_the_engine_captures(engine, engines, tmp_path):
    lm = engines.get(engine, "float32")
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


def test_special_tokens_are_known_by_their_texts(engines, tmp_path):
    lm = engines.get("transformers", "float32")
    special = lm.tokenizer.inner.all_special_ids[0]
    ids = [[special, *lm.tokens("The weather is"), special]]
    for filters, positions in [(Filters(no_bos=True), [1, 2, 3, 4]), (Filters(no_special=True), [1, 2, 3])]:
        data = harvest(lm, ids, tmp_path, sites=[pc.resid_post[1]], filters=filters).open()
        assert sorted(data.index()["position"].to_pylist()) == positions
        assert data.dtype == "bfloat16"
