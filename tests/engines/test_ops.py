"""Every op, on selections of every kind, mixed in one batch: what its formula says, and the same however it is run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.kernels.noise import normals
from patchclamp.plan.bound import noise_stream

from ..conftest import TOKENS, WIDTH
from ..reference.formulas import by_formula
from .conftest import CHUNKED, PROMPTS, SHALLOW

D, V = WIDTH, TOKENS

MODES = {
    "eager": ("vllm", "float32"), "compiled": ("vllm", "float32", True), "chunks of 16": ("vllm", "float32", CHUNKED),
}  # fmt: skip
RNG = np.random.default_rng(0)
V1, V2 = (0.5 * RNG.standard_normal(D).astype(np.float32) for _ in range(2))
MASK = np.where(RNG.random(D) < 0.3, 0, np.where(RNG.random(D) < 0.3, 1, RNG.random(D))).astype(np.float32)
WORD = np.zeros(V, np.float32)
WORD[[198, 260]] = 1.0, 0.5  # tokens
EDITS = {
    "add": pc.Add(V1, pc.resid_post[3], pc.prompt[-1], scale=2.0),
    "add a row each": pc.Add(np.stack([V1, V2]), pc.resid_pre[5], pc.prompt[1:3]),
    "add at the row's length": pc.Add(np.stack([V1, V2]), pc.resid_post[4], pc.prompt[1, 2], 0.5, norm="match"),
    "replace": pc.Replace(V1, pc.attn_out[5], pc.every[2], alpha=0.5),
    "replace where masked": pc.Replace(V2, pc.resid_mid[6], pc.prompt[1:], alpha=0.75, mask=MASK),
    "zero": pc.Zero(pc.mlp_out[4], pc.every[1, 3]),
    "scale": pc.Scale(0.5, pc.attn_out[2]),
    "ablate": pc.Ablate(V1, pc.resid_post[5]),
    "ablate several": pc.Ablate(np.stack([V1, V2, V1 + V2]), pc.resid_post[6], pc.prompt),
    "ablate in part": pc.Ablate(np.stack([V1, V2]), pc.resid_mid[3], pc.prompt, strength=0.7),
    "replace in a subspace": pc.Replace(V2, pc.resid_post[4], pc.prompt[1:], alpha=0.75, basis=np.stack([V1, MASK])),
    "low rank": pc.LowRank(0.1 * np.stack([V1, MASK]), [0.5, -1.0], np.stack([V2, V1]), pc.mlp_out[5]),
    "clamp": pc.Clamp(V1, pc.resid_mid[7], low=-0.5, high=0.5),
    "clamp below": pc.Clamp(V2, pc.mlp_out[6], pc.prompt[-1], high=-20.0),
    "rotate": pc.Rotate(np.stack([V1, V1 + V2]), 120, pc.resid_post[5], pc.prompt[1:]),
    "rotate by an angle": pc.Rotate(np.stack([V1, V2]), -40, pc.resid_mid[6], relative=True),
    "noise": pc.Noise(0.05, pc.resid_post[1], pc.prompt, seed=(1 << 40) + 7),
    "relative noise": pc.Noise(0.2, pc.embed, seed=3, relative=True),
    "noise of generated tokens": pc.Noise(0.3, pc.resid_mid[4], pc.generated, relative=True),
    "noise of logits": pc.Noise(0.5, pc.logits, seed=11, relative=True),
    "ablate in logits": pc.Ablate(WORD, pc.logits),
    "scale the last norm": pc.Scale(1.5, pc.final_norm, pc.prompt[-1]),
}  # fmt: skip


def worst_row(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest ‖a − b‖₂ / ‖b‖₂ over rows, where b is not nearly 0."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-3)).max())


@pytest.fixture(scope="module")
def runs(narrow):
    """`runs(mode)`: of each op, one request, all in one batch; and the same prompt without edits."""
    done: dict[str, dict[str, pc.Run]] = {}
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(EDITS))]

    def run(mode: str) -> dict[str, pc.Run]:
        if mode not in done:
            engine, dtype, *rest = MODES.get(mode, (mode, "float32"))
            options = rest[0] if rest and isinstance(rest[0], dict) else {}
            lm = narrow.get(engine, dtype, rest == [True], **options)
            keep = [[op.at, pc.resid_post[7]] for op in EDITS.values()]
            edited = lm.run(prompts, edits=[[op] for op in EDITS.values()], capture=keep, max_tokens=4, logprobs=True)
            plain = lm.run(prompts, capture=keep, max_tokens=4, logprobs=True)
            done[mode] = dict(zip(EDITS, zip(edited, plain, strict=True), strict=True))
        return done[mode]

    return run


@pytest.mark.parametrize("mode", ["transformers", *MODES])
@pytest.mark.parametrize("name", EDITS)
def test_an_op_does_what_its_formula_says(runs, mode, name):
    """On the rows it selects, the others keeping their values; until the first row that differs is fed back."""
    edited, plain = runs(mode)[name]
    op, last = EDITS[name], len(plain.prompt_token_ids)
    positions = plain.positions(op.at)
    selected = {"prompt": range(last), "generated": range(last, last + 3)}.get(str(op.tokens))
    if selected is None:
        selected = np.arange(last + 3)[slice_of(op.tokens, last)]
    rows = [i for i, p in enumerate(positions) if p in set(np.atleast_1d(selected)) and p <= last]
    others = [i for i, p in enumerate(positions) if p < last and i not in rows]
    generated = "generated" in name
    assert rows
    before, after = plain[op.at], edited[op.at]
    rows = rows[:1] if generated or op.at.name == "logits" else [i for i in rows if positions[i] < last]
    expected = by_formula(op, before[rows], [positions[i] for i in rows], layers=SHALLOW)
    assert worst_row(after[rows].double(), expected) <= 1e-4
    assert float((after[rows] - before[rows]).abs().max()) > 1e-3
    if others:
        assert worst_row(after[others], before[others]) <= 1e-4


def slice_of(tokens: pc.language.Positions, last: int):
    """The positions that a selection of `EDITS` names, as an index."""
    text = str(tokens)
    if text == "every":
        return slice(None)
    inside = text[text.index("[") + 1 : -1]
    if ":" in inside:
        start, stop = inside.split(":")
        return slice(int(start), int(stop) if stop else last)
    numbers = [int(number) for number in inside.split(",")]
    return [number % last if number < 0 else number for number in numbers]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EDITS)
def test_every_way_to_run_gives_what_transformers_gives(runs, mode, name):
    """Up to where two tokens are as likely as each other, and either is taken."""
    ours, theirs = runs(mode)[name][0], runs("transformers")[name][0]
    count = next((i + 1 for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if a != b), 4)
    np.testing.assert_allclose(ours.logprobs[:count], theirs.logprobs[:count], rtol=1e-4, atol=2e-4)
    for site in {EDITS[name].at, pc.resid_post[7]}:
        assert ours.positions(site) == theirs.positions(site)
        rows = [i for i, p in enumerate(ours.positions(site)) if p < len(ours.prompt_token_ids) + count - 1]
        assert worst_row(ours[site][rows], theirs[site][rows]) <= 2e-4


def test_noise_of_no_strength_is_stock(narrow):
    for engine in ("vllm", "transformers"):
        lm = narrow.get(engine, "float32")
        plain = lm.run(PROMPTS[0], max_tokens=4, logprobs=True)
        none = lm.run(
            PROMPTS[0],
            max_tokens=4,
            edits=[pc.Noise(0.0, pc.embed, relative=True), pc.Noise(0, pc.logits)],
            logprobs=True,
        )
        assert (none.token_ids, none.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_strengths_stay_with_their_requests(narrow, engine):
    """Fuzzing as a scalar of each request, mixed with none: 0 is stock bit for bit, the others as if alone."""
    lm = narrow.get(engine, "float32")
    strengths = [0.0, 0.05, 0.3, 0.0, 0.3]
    many = [{"ignore_eos": True, "extra_args": {"fuzz_strength": s, "fuzz_seed": 5}} for s in strengths]
    mixed = lm.run([PROMPTS[0]] * 5, max_tokens=4, sampling=many, capture=[pc.resid_pre[0]], logprobs=True)
    plain = lm.run(
        [PROMPTS[0]] * 5, max_tokens=4, sampling={"ignore_eos": True}, capture=[pc.resid_pre[0]], logprobs=True
    )
    for i, strength in enumerate(strengths):
        before, after = plain[i][pc.resid_pre[0]], mixed[i][pc.resid_pre[0]]
        if strength == 0:
            assert (mixed[i].token_ids, mixed[i].logprobs) == (plain[i].token_ids, plain[i].logprobs)
        prompt = len(plain[i].prompt_token_ids)
        size = (after - before)[:prompt].square().mean(1).sqrt() / before[:prompt].square().mean(1).sqrt()
        assert float((size - strength).abs().max()) <= 0.2 * strength  # of few numbers a row
    np.testing.assert_allclose(mixed[2].logprobs, mixed[4].logprobs, atol=1e-4)
    assert mixed[1].logprobs != mixed[2].logprobs


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_steering_module_is_used_by_name(narrow, engine):
    lm = narrow.get(engine, "float32")
    lm.bank["module"] = [pc.Add(V1, pc.resid_post[i], scale=0.1) for i in range(3, 7)]
    used = lm.run(PROMPTS[0], max_tokens=4, edits=[pc.Use("module", scale=3.0)], logprobs=True)
    spelled = lm.run(
        PROMPTS[0],
        max_tokens=4,
        edits=[pc.Add(V1, pc.resid_post[i], scale=3.0 * 0.1) for i in range(3, 7)],
        logprobs=True,
    )
    assert (used.token_ids, used.logprobs) == (spelled.token_ids, spelled.logprobs)
    runs = lm.run(list(PROMPTS), max_tokens=1, capture=[pc.attn_out], logprobs=True)
    lm.bank.mean("attention", runs, pc.attn_out)
    edited = lm.run(
        PROMPTS[0], max_tokens=1, edits=[pc.Mean("attention", pc.attn_out[3:6])], capture=[pc.attn_out], logprobs=True
    )
    for layer in range(3, 6):
        rows = torch.cat([run[pc.attn_out[layer]] for run in runs])
        assert torch.allclose(edited[pc.attn_out[layer]], rows.mean(0).expand_as(edited[pc.attn_out[layer]]), atol=1e-5)
    assert not torch.equal(edited[pc.attn_out[6]], runs[0][pc.attn_out[6]])


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_epsilon_is_the_same_bits_in_every_engine(narrow, engine):
    """Zero the row, add noise: what is captured is ε itself."""
    lm, at = narrow.get(engine, "float32"), pc.resid_mid[3]
    run = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Zero(at), pc.Noise(1.0, at, seed=99)], capture=[at], logprobs=True)
    for position, row in zip(run.positions(at), run[at], strict=True):
        expected = normals(99, position, noise_stream("mid", 3), D)
        assert np.array_equal(row.numpy().view(np.int32), expected.view(np.int32))
