"""Guarantee 3: one set of programs, and it does not matter how requests are run; all against one plain forward pass.

Every op, every kind of selection, and several ops on one row, with captures at their places in the order.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..reference.forward import Act, Forward, forward
from ..reference.hooks import PlainModel
from .conftest import PROMPTS

D, LAYERS, BLOCK, NEW = 576, 30, 32, 6
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
SMALL = {"kv_cache_memory_bytes": 30 * 2 * 3 * 64 * 4 * BLOCK * 6, "max_model_len": 128, "max_num_seqs": 4}
MODES = {
    "transformers": ("transformers", {}), "eager": ("vllm", {"enable_prefix_caching": False}),
    "chunks of 16": ("vllm", CHUNKED), "preempted": ("vllm", SMALL), "cold": ("vllm", {}), "warm": ("vllm", {}),
}  # fmt: skip
RNG = np.random.default_rng()
V1, V2, V3 = RNG.standard_normal((3, D)).astype(np.float32)
MASK = np.where(RNG.random(D) < 0.5, 1.0, RNG.random(D))
TEXT = " ".join([*PROMPTS, PROMPTS[1], PROMPTS[2]])
PARIS = 5  # the first token of " France is"


def at(site: pc.Site, tokens, make, positions):
    """Ops at one place: the rows before, the ops, the rows after; and what `positions` says is selected, by hand, from
    the prompt's length p and the number n of positions that are inputs."""
    sampled = site.name == "logits"
    everything = (lambda p, n: list(range(p - 1, n))) if sampled else (lambda p, n: list(range(n)))
    ops = make if isinstance(make, list) else [make]
    keep = pc.Capture(site)
    return [(keep, everything), *[(op(site, tokens), positions) for op in ops], (keep, everything)]


def last(p: int, n: int) -> list[int]:
    return [p - 1]


def generated(p: int, n: int) -> list[int]:
    return list(range(p, n))


def add(scale: float, value=V1):
    return lambda site, tokens: pc.Add(value, site, tokens, scale=scale)


MIX = [
    lambda s, t: pc.Scale(0.5, s, t), add(0.3), lambda s, t: pc.Ablate(np.stack([V1, V2]), s, t),
    lambda s, t: pc.Clamp(V3, s, t, low=0.5, high=0.5), lambda s, t: pc.Replace(V2, s, t, alpha=0.4, mask=MASK),
    lambda s, t: pc.Noise(0.1, s, t, seed=8, relative=True), lambda s, t: pc.Noise(0.05, s, t, seed=(1 << 33) + 1),
]  # fmt: skip
PROGRAMS = {
    "the whole prompt": at(pc.resid_post[3], pc.prompt, add(0.5), lambda p, n: list(range(p))),
    "its last token, and the generated": at(pc.mlp_out[7], pc.prompt[-1], lambda s, t: pc.Replace(V1, s, t, alpha=0.5), last)
        + at(pc.resid_mid[20], pc.generated, lambda s, t: pc.Ablate(V2, s, t), generated),
    "ends that count back": at(pc.attn_out[5], pc.prompt[-9:-1], lambda s, t: pc.Zero(s, t), lambda p, n: list(range(p - 9, p - 1)))
        + at(pc.resid_pre[6], pc.prompt[:-40], lambda s, t: pc.Scale(0.8, s, t), lambda p, n: list(range(p - 40))),
    "a row each of a list": at(pc.resid_mid[12], pc.prompt[-2, 3, 40], lambda s, t: pc.Add(np.stack([V1, V2, V3]), s, t),
                               lambda p, n: [p - 2, 3, 40]),
    "every": at(pc.resid_post[1], pc.every, lambda s, t: pc.Noise(0.02, s, t, seed=3), lambda p, n: list(range(n))),
    "every seventh": at(pc.embed, pc.every[::7], lambda s, t: pc.Noise(0.3, s, t, relative=True),
                        lambda p, n: list(range(0, n, 7))),
    "a span": at(pc.resid_post[9], pc.span(" France is"), add(0.7), lambda p, n: [PARIS - 2, PARIS - 1]),
    "a span or generated": at(pc.resid_pre[29], pc.span(" France is") | pc.generated[0:3],
                              lambda s, t: pc.Clamp(V1, s, t, low=9.0, high=9.0), lambda p, n: [PARIS - 2, PARIS - 1, p, p + 1, p + 2]),
    "one without another": at(pc.mlp_out[2], pc.prompt - pc.prompt[0, 5], lambda s, t: pc.Replace(V3, s, t, alpha=0.3, mask=MASK),
                              lambda p, n: [i for i in range(p) if i not in (0, 5)]),
    "joined twice": at(pc.resid_mid[15], (pc.prompt[5:30] | pc.generated[1]) - pc.every[::3],
                       lambda s, t: pc.Ablate(np.stack([V1, V3]), s, t),
                       lambda p, n: [i for i in [*range(5, 30), p + 1] if i % 3]),
    "all on one row": at(pc.resid_post[8], pc.prompt[33], MIX, lambda p, n: [33])
        + at(pc.resid_post[28], pc.generated[2], MIX, lambda p, n: [p + 2]),
    "the last stream, norm and logits": at(pc.resid_post[29], pc.every[40:], add(0.5), lambda p, n: list(range(40, n)))
        + at(pc.final_norm, pc.prompt[-1], lambda s, t: pc.Scale(1.5, s, t), last)
        + at(pc.logits, pc.generated[0, 3], lambda s, t: pc.Noise(0.5, s, t, seed=11, relative=True), lambda p, n: [p, p + 3]),
}  # fmt: skip


class Modes:
    """Runs of every program in every mode, and what the plain pass makes of them; each made once."""

    def __init__(self, engines, folder: str) -> None:
        self.engines, self.plain = engines, PlainModel(folder)
        lm = engines.get("vllm", "float32")
        ids = lm.tokens(TEXT)
        assert len(ids) >= 64
        assert lm.tokenizer.pieces(ids[PARIS - 2 : PARIS]) == [" France", " is"]
        self.texts = [lm.tokenizer.decode(ids[: 58 + i % 6]) for i in range(len(PROGRAMS))]
        self.made: dict[str, list[pc.Run]] = {}

    def run(self, mode: str) -> list[pc.Run]:
        """One batch of all programs. Where it is to come from the cache, only what is in a block's rest is captured."""
        if mode not in self.made:
            engine, options = MODES[mode]
            lm, before = self.engines.get(engine, "float32", **options), 0
            if mode == "preempted":
                before = lm.engine.status()["preemptions"]
            programs = [[_late(op) if mode in ("cold", "warm") else op for op, _ in acts] for acts in PROGRAMS.values()]
            if mode == "warm":
                self.run("cold")
            self.made[mode] = lm.run(self.texts, edits=programs, max_tokens=NEW, sampling={"ignore_eos": True})
            if mode == "preempted":
                assert lm.engine.status()["preemptions"] > before
        return self.made[mode]

    @functools.cache  # noqa: B019
    def expected(self, number: int, tokens: tuple[int, ...]) -> Forward:
        """The plain pass over a program's prompt and these tokens after it."""
        acts, prompt = list(PROGRAMS.values())[number], self.run("transformers")[number].prompt_token_ids
        n = len(prompt) + NEW - 1
        placed = [Act(op, positions(len(prompt), n)) for op, positions in acts]
        return forward(self.plain, [*prompt, *tokens[:-1]], len(prompt) - 1, placed)


def _late(op):
    if not isinstance(op, pc.Capture) or op.at.name == "logits":
        return op
    return pc.Capture(op.at, pc.every[BLOCK:])


@pytest.fixture(scope="module")
def modes(engines, smollm2) -> Modes:
    return Modes(engines, str(smollm2))


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest ‖a − b‖₂ / ‖b‖₂ over rows, where b is not nearly 0."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-2)).max())


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_it_does_not_matter_how_a_request_is_run(modes, mode, name):
    """The rows before and after every edit, the rows it touched, and the log-probabilities, as in the plain pass."""
    number, acts = list(PROGRAMS).index(name), PROGRAMS[name]
    run = modes.run(mode)[number]
    p, n = len(run.prompt_token_ids), len(run.prompt_token_ids) + NEW - 1
    assert len(run.token_ids) == NEW
    expected = modes.expected(number, tuple(run.token_ids))
    cut = BLOCK if mode in ("cold", "warm") else 0
    kept = [i for i, (op, _) in enumerate(acts) if isinstance(op, pc.Capture)]
    for first, second in zip(kept[::2], kept[1::2], strict=True):
        where = acts[first][1](p, n)
        rows = [i for i, position in enumerate(where) if position >= cut]
        assert run.positions(f"edits[{first}]") == run.positions(f"edits[{second}]") == [where[i] for i in rows]
        before, after = run[f"edits[{first}]"], run[f"edits[{second}]"]
        assert far(before, expected.kept[first][rows]) <= 1e-4
        assert far(after, expected.kept[second][rows]) <= 1e-4
        touched = [where[rows[i]] for i in (before != after).any(dim=1).nonzero()[:, 0].tolist()]
        assert touched == [position for position in sorted(acts[first + 1][1](p, n)) if position >= cut]
    logprobs = expected.logits_nV.double().log_softmax(-1)[range(NEW), run.token_ids]
    np.testing.assert_allclose(run.logprobs, logprobs, rtol=1e-4, atol=2e-4)
    chosen, best = expected.logits_nV[range(NEW), run.token_ids], expected.logits_nV.max(dim=1).values
    assert float((best - chosen).max()) <= 1e-2
    if mode == "warm":
        assert run.cached_tokens == BLOCK


def test_the_programs_say_every_op_and_every_selection():
    used = {type(op) for acts in PROGRAMS.values() for op, _ in acts}
    assert used == {pc.Capture, pc.Add, pc.Replace, pc.Zero, pc.Scale, pc.Ablate, pc.Clamp, pc.Noise}
    assert {op.at.name for acts in PROGRAMS.values() for op, _ in acts} == {
        "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm", "logits"
    }  # fmt: skip
