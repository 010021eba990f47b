"""What was not asked for is not made: log-probabilities are asked for, and text is decoded when it is read."""

from __future__ import annotations

import pytest
import torch

import patchclamp as pc

from .conftest import PROMPTS

BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])
TEXTS = [*PROMPTS, "日本語の文章です。今日は🎉"]


@BOTH
def test_a_run_that_did_not_ask_says_so(narrow, engine):
    run = narrow.get(engine, "float32").run(PROMPTS[0], max_tokens=2)
    with pytest.raises(pc.ProgramError, match="logprobs=True"):
        run.logprobs  # noqa: B018
    with pytest.raises(pc.ProgramError, match="logprobs=5"):
        run.top_logprobs  # noqa: B018


@BOTH
def test_log_probabilities_are_those_of_the_logits(narrow, engine):
    lm = narrow.get(engine, "float32")
    for call in ({"logprobs": True}, {"logprobs": 4}, {"logprobs": True, "score": [7, 9]}):
        run = lm.run(PROMPTS[0], max_tokens=5, sampling={"temperature": 1.0, "seed": 3}, capture=[pc.logits], **call)
        table_nV = run[pc.logits].log_softmax(-1)
        expected = table_nV[torch.arange(len(run.token_ids)), run.token_ids]
        assert run.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        for token, logprob in run.scores.items():
            assert logprob == pytest.approx(float(table_nV[0, token]), abs=1e-4)
        assert list(run.scores) == list(call.get("score", []))
    run = lm.run(PROMPTS[0], max_tokens=5, sampling={"temperature": 1.0, "seed": 3}, capture=[pc.logits], logprobs=4)
    top = run[pc.logits].log_softmax(-1).topk(4)
    assert [list(row) for row in run.top_logprobs] == top.indices.tolist()
    assert [list(row.values()) for row in run.top_logprobs] == [
        pytest.approx(row, abs=1e-4) for row in top.values.tolist()
    ]


@BOTH
def test_each_prompt_of_a_batch_has_its_own(narrow, engine):
    """Scores of some prompts, and the likeliest tokens of others: stock's V1 sampler gives a batch only one of them."""
    lm, call = narrow.get(engine, "float32"), {"max_tokens": 4, "sampling": {"ignore_eos": True}}
    asked: list[dict] = [
        {"logprobs": 8},
        {"score": [7, 9, 11]},
        {"logprobs": True},
        {"logprobs": 2},
        {"score": [7]},
        {},
    ]
    runs = lm.run(
        [PROMPTS[i % 3] for i in range(len(asked))], score=[one.get("score", []) for one in asked],
        logprobs=[one.get("logprobs", False) for one in asked], **call,
    )  # fmt: skip
    for i, (run, one) in enumerate(zip(runs, asked, strict=True)):
        alone = lm.run(PROMPTS[i % 3], **call, **one)
        assert run.scores == pytest.approx(alone.scores, abs=1e-4)
        if one.get("logprobs"):
            assert run.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        if isinstance(one.get("logprobs"), int) and one["logprobs"] is not True:
            assert [list(of) for of in run.top_logprobs] == [list(of) for of in alone.top_logprobs]
            for ours, theirs in zip(run.top_logprobs, alone.top_logprobs, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
    with pytest.raises(pc.ProgramError, match=r"logprobs: .* got 2"):
        lm.run(PROMPTS[0], logprobs=[True, 2])


@BOTH
def test_a_stream_has_them_if_it_asked(narrow, engine):
    lm = narrow.get(engine, "float32")
    asked = lm.stream(PROMPTS[0], max_tokens=4, logprobs=2)
    parts = list(asked)
    assert [number for part in parts for number in part.logprobs] == asked.run.logprobs
    assert len(asked.run.top_logprobs) == len(asked.run.token_ids) == 4
    plain = lm.stream(PROMPTS[0], max_tokens=4)
    assert [part.logprobs for part in plain] == [[]] * 4


@pytest.mark.parametrize("wrong", [0, -1, 129, 2.5, "five", None])
def test_what_cannot_be_asked_for_is_refused(narrow, wrong):
    lm = narrow.get("transformers", "float32")
    with pytest.raises(pc.ProgramError, match=r"logprobs: .* 128"):
        lm.run(PROMPTS[0], max_tokens=1, logprobs=wrong)
    with pytest.raises(pc.ProgramError, match=r"logprobs: .*score="):
        lm.run(PROMPTS[0], max_tokens=1, logprobs=3, score=[1])


@pytest.mark.slow
@BOTH
def test_text_that_is_decoded_when_read_is_what_a_stream_gives(narrow, engine):
    """Characters of several tokens, special tokens, a token that ends the run: as when it is decoded token by token."""
    lm, ended = narrow.get(engine, "float32"), 0
    cases = [{"temperature": 1.0, "seed": seed, "ignore_eos": True} for seed in range(2)]
    if engine == "vllm":
        first = lm.run(TEXTS[0], max_tokens=12, sampling=cases[0]).token_ids
        for more in ({}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}):
            cases.append({**cases[0], "stop_token_ids": [first[7]], **more})
    for sampling in cases:
        for text in TEXTS:
            call = {"max_tokens": 12, "sampling": sampling}
            run, stream = lm.run(text, **call), lm.stream(text, **call)
            assert run.text == "".join(part.text for part in stream) == stream.run.text
            ended += run.finish_reason == "stop"
    assert ended or engine == "transformers"


def test_nothing_is_decoded_before_it_is_read(narrow, monkeypatch):
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    lm, decoded = narrow.get("vllm", "float32"), []
    decode = FastIncrementalDetokenizer.decode_next
    monkeypatch.setattr(
        FastIncrementalDetokenizer, "decode_next", lambda self, token: decoded.append(token) or decode(self, token)
    )
    runs = lm.run(PROMPTS, max_tokens=4, sampling={"ignore_eos": True})
    assert decoded == []
    assert runs[1].text == runs[1].text != ""
    assert decoded == runs[1].token_ids
    lm.run(PROMPTS[0], max_tokens=4, sampling={"ignore_eos": True, "stop": ["never there"]})
    assert len(decoded) == 8
