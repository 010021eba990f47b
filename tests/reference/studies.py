"""Fuzzed answers, forced continuations and steering directions in plain loops: whole prompts again for every token, one at
a time, with Transformers' own forward.

D width · V vocabulary
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from patchclamp.kernels.noise import normals
from patchclamp.plan.bound import noise_stream

from .hooks import PlainModel


@contextlib.contextmanager
def noise_at_embed(plain: PlainModel, strength: float, seed: int) -> Iterator[None]:
    """Every embedding plus `strength` times its root mean square times ε."""

    def add(module, args, out):
        for position in range(out.shape[1]):
            h = out[0, position].double()
            e = torch.from_numpy(normals(seed, position, noise_stream("stream", 0), len(h))).double()
            out[0, position] = (h + strength * h.square().mean().sqrt() * e).float()
        return out

    handle = plain.net.model.embed_tokens.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def added(plain: PlainModel, vectors: dict[int, np.ndarray], first: int = 0, end: int | None = None) -> Iterator[None]:
    """The output of each layer plus its vector, at positions first … end − 1."""

    def hook(vector: np.ndarray):
        def add(module, args, out):
            hidden = (out[0] if isinstance(out, tuple) else out).clone()
            hidden[0, first:end] += torch.from_numpy(np.asarray(vector, np.float32))
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        return add

    handles = [plain.net.model.layers[layer].register_forward_hook(hook(vector)) for layer, vector in vectors.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def greedy(plain: PlainModel, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Up to `count` tokens, and the first one's log-probabilities [V]."""
    answer: list[int] = []
    first = plain.logits(ids).double().log_softmax(-1).numpy()
    while len(answer) < count:
        answer.append(int(plain.logits([*ids, *answer]).argmax()))
        if answer[-1] == plain.net.generation_config.eos_token_id:
            break
    return answer, first


def forced(plain: PlainModel, ids: list[int], continuation: list[int]) -> np.ndarray:
    """The log-probability of each token of a continuation."""
    return np.array([
        float(plain.logits([*ids, *continuation[:i]]).double().log_softmax(-1)[token])
        for i, token in enumerate(continuation)
    ])  # fmt: skip


def divergences(p_V: np.ndarray, q_V: np.ndarray) -> tuple[float, float]:
    """KL(p ‖ q) and JS(p, q) of log-probabilities, term by term."""
    m_V = [np.log((np.exp(a) + np.exp(b)) / 2) for a, b in zip(p_V, q_V, strict=True)]

    def kl(a_V, b_V) -> float:
        return sum(float(np.exp(a) * (a - b)) for a, b in zip(a_V, b_V, strict=True))

    return kl(p_V, q_V), (kl(p_V, m_V) + kl(q_V, m_V)) / 2


def first_component(differences_nD: np.ndarray, steps: int = 5000) -> np.ndarray:
    """The unit vector that |differences · u|² is largest for, by power iteration."""
    u_D = np.ones(differences_nD.shape[1])
    for _ in range(steps):
        u_D = differences_nD.T @ (differences_nD @ u_D)
        u_D = u_D / np.linalg.norm(u_D)
    return u_D


def logistic_weights(positive_nD: np.ndarray, negative_mD: np.ndarray, ridge: float, steps: int = 20_000) -> np.ndarray:
    """The weights of ridge logistic regression by gradient descent, of rows without their mean, scaled to a root mean
    square of 1."""
    x = np.concatenate([positive_nD, negative_mD])
    x = x - x.mean(0)
    x = x / np.sqrt(np.mean(x**2))
    y = np.array([1.0] * len(positive_nD) + [-1.0] * len(negative_mD))
    w, b = np.zeros(x.shape[1]), 0.0
    rate = 1 / (0.25 * np.linalg.norm(x, 2) ** 2 + 0.25 * len(x) + ridge)
    for _ in range(steps):
        wrong = -y / (1 + np.exp(y * (x @ w + b)))
        w, b = w - rate * (x.T @ wrong + ridge * w), b - rate * wrong.sum()
    return w
