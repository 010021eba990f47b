"""The fuzz sweep equals plain loops on layers of the real model: noise in a hook, every answer anew, every measure term by
term."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import fuzz_sweep

from ..reference.hooks import PlainModel
from ..reference.studies import divergences, forced, greedy, noise_at_embed

PROMPTS = ("The capital of France is", "Water boils at a temperature of")
STRENGTHS, SEED, TOKENS = (0.0, 0.05, 0.6), 7, 4


@pytest.fixture(scope="module")
def sweeps(narrow):
    asked = dict(seeds=(SEED,), max_tokens=TOKENS)
    return functools.cache(lambda engine: fuzz_sweep(narrow.get(engine, "float32"), PROMPTS, STRENGTHS, **asked))


@pytest.fixture(scope="module")
def plain(narrowed):
    return PlainModel(narrowed)


@pytest.fixture(scope="module")
def answers(plain, narrow):
    """By prompt and strength: tokens, the first one's log-probabilities, and the perplexity without noise."""
    tokenizer = narrow.get("transformers", "float32").tokenizer

    def answer(prompt: str, strength: float):
        ids = tokenizer.encode(prompt)
        with noise_at_embed(plain, strength, SEED):
            tokens, first = greedy(plain, ids, TOKENS)
        return tokens, first, float(np.exp(-forced(plain, ids, tokens).mean()))

    return {(prompt, strength): answer(prompt, strength) for prompt in PROMPTS for strength in STRENGTHS}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_every_cell_equals_a_plain_loop(sweeps, answers, engine):
    sweep = sweeps(engine)
    changed = 0
    for p, prompt in enumerate(PROMPTS):
        unfuzzed, before, _ = answers[prompt, 0.0]
        assert list(sweep.unfuzzed[p][0].token_ids) == unfuzzed
        for l, strength in enumerate(STRENGTHS):  # noqa: E741
            tokens, first, perplexity = answers[prompt, strength]
            assert list(sweep.answers[p][l][0].token_ids) == tokens
            kl, js = divergences(before, first)
            assert abs(sweep.kl[p, l, 0] - kl) <= 1e-4 * (1 + kl)
            assert abs(sweep.js[p, l, 0] - js) <= 1e-4
            assert abs(np.log(sweep.perplexity[p, l, 0] / perplexity)) <= 1e-4
            assert sweep.exact[p, l, 0] == (tokens == unfuzzed)
            changed += tokens != unfuzzed
    assert changed, "the strongest noise changes an answer"
    assert sweep.kl[:, 2].min() > 0.05 > 1e-6 > sweep.noise_floor


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_strength_0_is_the_unedited_run_to_the_bit(narrow, engine):
    """In a batch of one, on both sides: its shape alone may move the last bit."""
    lm = narrow.get(engine, "float32")
    sweep = fuzz_sweep(lm, PROMPTS[:1], (0.0, 0.3), max_tokens=4, batch=1, perplexity=False)
    unedited = lm.run(PROMPTS[0], max_tokens=4, capture=[pc.Capture("logits", pc.prompt[-1])], logprobs=True)
    zero = lm.run(PROMPTS[0], max_tokens=4, capture=[pc.Capture("logits", pc.prompt[-1])], logprobs=True,
                  sampling={"extra_args": {"fuzz_strength": 0.0}})  # fmt: skip
    assert zero.logprobs == unedited.logprobs
    assert (np.asarray(zero["logits"]) == np.asarray(unedited["logits"])).all()
    assert list(sweep.answers[0][0][0].token_ids) == unedited.token_ids == zero.token_ids
    assert (sweep.kl[0, 0, 0], sweep.js[0, 0, 0], sweep.noise_floor) == (0.0, 0.0, 0.0)
    assert sweep.kl[0, 1, 0] > 0


def test_sampled_answers_differ_by_seed_and_agree_with_their_own(narrow):
    lm = narrow.get("transformers", "float32")
    sweep = fuzz_sweep(lm, PROMPTS[:1], (0.0, 0.01), seeds=(1, 2), max_tokens=6, chat=True,
                       sampling={"temperature": 1.0}, divergence=20, perplexity=False, refusal="(?i)paris")  # fmt: skip
    first, second = (answer.token_ids for answer in sweep.unfuzzed[0])
    assert first != second
    assert sweep.exact[0, 0].tolist() == [1.0, 1.0]
    assert sweep.divergence == "top 20 and the rest"
    assert 0 <= sweep.noise_floor < 1e-6 < sweep.kl[0, 1].min()
    assert sweep.refused[0, 0].tolist() == [float("paris" in answer.text.lower()) for answer in sweep.unfuzzed[0]]
    assert np.isnan(sweep.perplexity).all()
