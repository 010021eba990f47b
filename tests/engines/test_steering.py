"""Steering vectors and their strength curves equal plain loops on the real model."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.studies import steering_vectors, strength_curve
from patchclamp.studies.steering import chosen_layer

from ..reference.studies import added, forced

THINGS = ("film", "book", "meal", "trip")
POSITIVE, NEGATIVE = ([f"I {verb} the {thing}. It was" for thing in THINGS] for verb in ("loved", "hated"))
LAYERS = [2, 20, 21]
PROMPTS, ANSWER, FOIL = ("My day has been", "That idea is"), " really great", " awful"
SCALES = (-1.0, 1.0)


@pytest.fixture(scope="module")
def vectors(engines):
    lm = engines.get("transformers", "float32")
    return steering_vectors(lm, POSITIVE, NEGATIVE, layers=LAYERS, answer=" great", foil=FOIL)


@torch.no_grad()
def rows(plain, lm, prompts: list[str]) -> np.ndarray:
    """The stream after each layer but the last, at each prompt's last token [P, L, D]."""
    streams = [plain.net(torch.tensor([lm.tokens(text)]), output_hidden_states=True).hidden_states for text in prompts]
    return np.stack([[stream[0, -1].numpy() for stream in each[1:-1]] for each in streams]).astype(float)


def test_vectors_and_their_check_equal_a_plain_loop(engines, plain, vectors):
    lm = engines.get("transformers", "float32")
    held = np.sort(np.random.default_rng(0).permutation(len(THINGS))[:1]).tolist()
    kept = [i for i in range(len(THINGS)) if i not in held]
    answer, foil = (lm.tokenizer.bare(word) for word in (" great", FOIL))
    differences = rows(plain, lm, POSITIVE)[kept].mean(0) - rows(plain, lm, NEGATIVE)[kept].mean(0)
    for i, layer in enumerate(LAYERS):
        expected = differences[layer]
        assert np.linalg.norm(vectors.vectors[i] - expected) <= 1e-4 * np.linalg.norm(expected)
        ids, scores = lm.tokens(NEGATIVE[held[0]]), []
        for scale in (0.0, 1.0):
            with added(plain, {layer: scale * expected}):
                scores.append(forced(plain, ids, answer).sum() - forced(plain, ids, foil).sum())
        assert abs(vectors.effect[i] - (scores[1] - scores[0])) <= 1e-3
    assert vectors.best == LAYERS[chosen_layer(LAYERS, vectors.effect, vectors.fluency, 30)] in (20, 21)
    assert vectors.fluency.min() > -2
    assert vectors.effect.max() > 2
    assert (vectors.positive.count, vectors.positive.held_out) == (4, 1)
    assert vectors.positive.content != vectors.negative.content


@pytest.fixture(scope="module")
def expected(engines, plain, vectors):
    """By the selection of tokens, the log-probabilities [P, S] of answer and foil; made once for both engines."""
    lm = engines.get("transformers", "float32")

    @functools.cache
    def grids(tokens: str) -> np.ndarray:
        grid = np.zeros((2, len(PROMPTS), len(SCALES)))
        for p, prompt in enumerate(PROMPTS):
            ids = lm.tokens(prompt)
            ends = {"every": (0, None), "prompt[-1]": (len(ids) - 1, len(ids)), "generated": (len(ids), None)}[tokens]
            for s, scale in enumerate(SCALES):
                for side, text in enumerate((ANSWER, FOIL)):
                    with added(plain, {vectors.best: scale * vectors.vector()}, *ends):
                        grid[side, p, s] = forced(plain, ids, lm.tokenizer.bare(text)).sum()
        return grid

    return grids


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    "tokens", ["prompt[-1]", *(pytest.param(each, marks=pytest.mark.slow) for each in ("every", "generated"))]
)
def test_the_strength_curve_equals_a_plain_loop(engines, vectors, expected, engine, tokens):
    lm = engines.get(engine, "float32")
    curve = strength_curve(lm, vectors, PROMPTS, ANSWER, FOIL, scales=SCALES, tokens=tokens)
    assert np.abs(np.stack([curve.logprobs, curve.foil_logprobs]) - expected(tokens)).max() <= 1e-3
    assert np.allclose(curve.scores, curve.logprobs - curve.foil_logprobs)
    if tokens == "every":
        assert curve.slope > 1
        assert (np.diff(curve.scores, axis=1) > 0).all()


def test_edits_act_as_vectors_on_a_run_and_by_name(engines, vectors):
    lm = engines.get("transformers", "float32")
    lm.bank["mood"] = vectors
    at = pc.resid_post[vectors.best]
    plain, edited, named = lm.run([PROMPTS[0]] * 3, max_tokens=1, capture=[at], edits=[
        [], list(vectors.edits(2.0)), [pc.Use("mood", scale=2.0)]])  # fmt: skip
    moved = np.asarray(edited[at]) - np.asarray(plain[at])
    assert np.abs(moved - 2 * vectors.vector()).max() <= 1e-3 * np.abs(moved).max()
    assert (np.asarray(named[at]) == np.asarray(edited[at])).all()
    del lm.bank["mood"]
