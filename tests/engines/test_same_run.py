"""Rows of an earlier layer of the same run: the same however the request is run."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc

from ..reference import same_run
from .conftest import CHUNKED
from .test_modes import SMALL

MODES = {"transformers": {}, "cold": {}, "warm": {}, "chunks of 16": CHUNKED, "preempted": SMALL}
BLOCK = 32


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.slow] if mode == "preempted" else []) for mode in MODES]
)
def test_what_is_written_is_what_the_run_itself_had(narrow, mode):
    lm = narrow.get("transformers" if mode == "transformers" else "vllm", "float32", **MODES[mode])
    before = lm.engine.status().get("preemptions", 0)
    start = BLOCK if mode in ("cold", "warm") else 0  # what is captured is computed, not taken from the cache
    wrong, runs = same_run.run_all(lm, start, rounds=1 + (mode == "warm"))
    assert wrong == {}
    if mode == "warm":
        assert {run.cached_tokens for run in runs} == {BLOCK}
    if mode == "preempted":
        assert lm.engine.status()["preemptions"] > before


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_it_is_what_two_runs_give(narrow, engine):
    """The rows of a run, written into another one of the same prompt at the same place."""
    lm, prompt = narrow.get(engine, "float32"), [100 + 3 * i for i in range(50)]
    early, late = pc.mlp_out[1], pc.resid_mid[6]
    first = lm.run(prompt, max_tokens=1, capture=[early])
    options = {"max_tokens": 4, "logprobs": True, "capture": [pc.final_norm]}
    two = lm.run(prompt, edits=[pc.Replace(pc.From(first, early), late, pc.prompt, alpha=0.3)], **options)
    one = lm.run(prompt, edits=[pc.Replace(pc.SameRun(early), late, pc.prompt, alpha=0.3)], **options)
    assert one.token_ids == two.token_ids
    np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one[pc.final_norm], two[pc.final_norm], rtol=1e-4, atol=1e-4)


def test_what_is_stored_is_gone_with_the_request(narrow):
    lm = narrow.get("vllm", "float32")
    edits = [[pc.Add(pc.SameRun(pc.resid_post[i % 3]), pc.resid_post[5 + i % 3], scale=0.1)] for i in range(40)]
    for _ in range(2):
        lm.run([[5 + i, 6, 7] for i in range(40)], max_tokens=3, edits=edits)
    status = lm.engine.status()
    assert (status["programs"], status["records"]) == (0, 0)
    assert status.get("pinned", 0) == 0
