"""A server with speculative decoding: the same answers and captures as without, to OpenAI's client and to ours."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

import patchclamp as pc

from .conftest import start, stop

pytestmark = pytest.mark.slow
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
TEXT = "one two three one two three one two"
GREEDY = {"max_tokens": 24, "sampling": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def drafting(model, tmp_path_factory):
    """Async scheduling is asked for nowhere, and counts are."""
    options = [f"--speculative-config={json.dumps(DRAFTS)}", "--per-request-spec-decode-metrics=summary"]
    made = start(model, tmp_path_factory.mktemp("log") / "server.log", *options)
    yield made
    stop(made)


def test_runs_over_http_are_those_of_an_engine_that_does_not_draft(drafting, local):
    constant = [pc.Zero(pc.resid_post[2])]  # every position is like the others, and drafts are right
    with pc.LM(drafting.url) as lm:
        for asked in ([], [pc.Scale(1.5, at=pc.resid_post[2], tokens=pc.generated)], constant):
            ours, theirs = (one.run(TEXT, edits=asked, capture=[pc.resid_post[3]], **GREEDY) for one in (lm, local))
            assert ours.token_ids == theirs.token_ids
            assert ours.acted == theirs.acted
            assert ours.positions("resid_post[3]") == theirs.positions("resid_post[3]")
            np.testing.assert_allclose(*(run["resid_post[3]"].numpy() for run in (ours, theirs)), rtol=1e-3, atol=1e-2)
            assert theirs.drafts is None
            assert ours.drafts.accepted <= ours.drafts.proposed
        assert ours.drafts.accepted > 8


def test_drafts_of_a_run_that_ends_at_a_stop_text_are_counted(drafting):
    with pc.LM(drafting.url) as lm:
        only = np.zeros(lm.model.d_vocab, np.float32)
        only[lm.tokens(" one")[0]] = 1e4
        sampling = {"ignore_eos": True, "stop": [" one one one one one one"]}
        run = lm.run(TEXT, edits=[pc.Add(only, pc.logits)], max_tokens=24, sampling=sampling)
    assert run.finish_reason == "stop"
    assert run.drafts.accepted > 0


def test_openai_requests_with_a_program_draft_too(drafting, local):
    edits = [pc.Scale(1.5, at=pc.resid_post[2], tokens=pc.generated)]
    body = {"patchclamp": {"edits": json.loads(pc.Program(edits=edits).to_json())["edits"]}, "ignore_eos": True}
    client = drafting.openai()
    answer = client.completions.create(model=drafting.model, prompt=TEXT, max_tokens=24, temperature=0, extra_body=body)
    assert answer.choices[0].text == local.run(TEXT, edits=edits, **GREEDY).text
    with pytest.raises(openai.BadRequestError, match="speculative decoding on a CPU"):
        client.completions.create(model=drafting.model, prompt=TEXT, max_tokens=4, temperature=1, extra_body=body)
    plain = client.completions.create(model=drafting.model, prompt=TEXT, max_tokens=4, temperature=1)
    assert plain.choices[0].text
