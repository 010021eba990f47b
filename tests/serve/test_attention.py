"""Attention patterns of a server's runs."""

from __future__ import annotations

import numpy as np
import openai
import pytest
import torch

import patchclamp as pc

from .conftest import KEYS
from .test_openai import complete, program


def test_a_client_of_ours_reads_them(server, local):
    captures = [pc.pattern[2], pc.Capture(pc.attn_scores[1, 3], pc.prompt[-2:], top=4)]
    prompts = [[5, 6, 7, 8, 9, 10], [11]]
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        for there, here in zip(
            *(each.run(prompts, max_tokens=3, capture=captures) for each in (lm, local)), strict=True
        ):
            assert there.token_ids == here.token_ids
            torch.testing.assert_close(torch.as_tensor(there[pc.pattern[2]]), here[pc.pattern[2]], atol=1e-5, rtol=0)
            found, expected = (run.attention["capture[1]"] for run in (there, here))
            assert found.positions == expected.positions
            assert np.array_equal(found.keys, expected.keys)


def test_studies_run_in_a_client_too(server, local):
    prompt = [5, 6, 7, 8, 9, 10]
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        there, here = (pc.studies.attention_edges(each, prompt, answer=77, layers="1:3") for each in (lm, local))
        np.testing.assert_allclose(there.shares, here.shares, atol=1e-4)
        there, here = (pc.studies.head_scores(each, length=5, sequences=1, layers=2) for each in (lm, local))
        assert there.prompts == here.prompts
        np.testing.assert_allclose(there.previous_token, here.previous_token, atol=1e-5)
        [run] = lm.run([prompt], capture=pc.pattern[2], max_tokens=2)
        assert "what attends to it" in run.attention._repr_html_()


def test_attention_is_edited(server, local):
    prompt, edits = list(range(5, 25)), [
        pc.Knockout("prompt[2:6]", "pattern[:4]", "prompt[8:] | generated"),
        pc.Scale(0.5, "pattern[5, 1]", "prompt[-1]", keys="prompt[:9]"),
    ]  # fmt: skip
    expected = local.run(prompt, edits=edits, max_tokens=4, capture=pc.pattern[1])
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        found = lm.run(prompt, edits=edits, max_tokens=4, capture=pc.pattern[1])
        assert found.token_ids == expected.token_ids
        torch.testing.assert_close(torch.as_tensor(found[pc.pattern[1]]), expected[pc.pattern[1]], atol=1e-5, rtol=0)
        assert not torch.as_tensor(found[pc.pattern[1]])[8:, :, 2:6].any()
    answer = complete(server, program(edits) | {"return_token_ids": True}, prompt, max_tokens=4)
    assert answer.choices[0].token_ids == expected.token_ids
    with pytest.raises(openai.BadRequestError, match="position 3"):
        complete(server, program([pc.Knockout("prompt[:4]", "pattern[1]", "prompt[3]")]), prompt, max_tokens=1)


def test_a_program_of_another_client_is_told_where_to_read_them(server):
    with pytest.raises(openai.UnprocessableEntityError, match=r"pc.LM\(url\)"):
        complete(server, program(capture=[pc.pattern[2]]), [5, 6, 7], max_tokens=1)
