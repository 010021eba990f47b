"""Guarantee 3: one set of programs, and it does not matter how requests are run; all against one plain forward pass."""

from __future__ import annotations

import functools

import msgspec
import pytest

import patchclamp as pc

from ..reference import parity
from ..reference.forward import Forward
from ..reference.hooks import PlainModel
from ..reference.parity import BLOCK, NEW
from .conftest import PROMPTS

CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
SMALL = {"kv_cache_memory_bytes": 30 * 2 * 3 * 64 * 4 * BLOCK * 6, "max_model_len": 128, "max_num_seqs": 4}
MODES = {
    "transformers": ("transformers", {}), "eager": ("vllm", {"enable_prefix_caching": False}),
    "chunks of 16": ("vllm", CHUNKED), "preempted": ("vllm", SMALL), "cold": ("vllm", {}), "warm": ("vllm", {}),
}  # fmt: skip
FROM_THE_CACHE = ("cold", "warm")
TEXT = " ".join([*PROMPTS, PROMPTS[1], PROMPTS[2]])
SPAN, BEGIN = " France is", 3
PROGRAMS = parity.programs(576, 30, SPAN, BEGIN)


class Modes:
    """Runs of every program in every mode, and what the plain pass makes of them; each made once."""

    def __init__(self, engines, folder: str) -> None:
        self.engines, self.plain = engines, PlainModel(folder)
        lm = engines.get("vllm", "float32")
        assert lm.tokenizer.token_strings(lm.tokens(TEXT)[BEGIN : BEGIN + 2]) == [" France", " is"]
        self.texts = parity.prompts(lm, TEXT, len(PROGRAMS))
        self.made: dict[str, list[pc.Run]] = {}

    def run(self, mode: str) -> list[pc.Run]:
        """One batch of all programs. Where it is to come from the cache, only what is in a block's rest is captured."""
        if mode not in self.made:
            engine, options = MODES[mode]
            lm, before = self.engines.get(engine, "float32", **options), 0
            if mode == "preempted":
                before = lm.engine.status()["preemptions"]
            programs = [parity.ops(acts, BLOCK if mode in FROM_THE_CACHE else 0) for acts in PROGRAMS.values()]
            if mode == "warm":
                self.run("cold")
            self.made[mode] = lm.run(self.texts, edits=programs, max_tokens=NEW, sampling={"ignore_eos": True})
            if mode == "preempted":
                assert lm.engine.status()["preemptions"] > before
        return self.made[mode]

    @functools.cache  # noqa: B019
    def expected(self, name: str, tokens: tuple[int, ...]) -> Forward:
        """The plain pass over a program's prompt and these tokens after it."""
        prompt = self.run("transformers")[list(PROGRAMS).index(name)].prompt_token_ids
        return parity.expected(self.plain, PROGRAMS[name], prompt, list(tokens))


@pytest.fixture(scope="module")
def modes(engines, smollm2) -> Modes:
    return Modes(engines, str(smollm2))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_it_does_not_matter_how_a_request_is_run(modes, mode, name):
    """The rows before and after every edit, the rows it touched, and the log-probabilities, as in the plain pass."""
    run = modes.run(mode)[list(PROGRAMS).index(name)]
    expected = modes.expected(name, tuple(run.token_ids))
    start = BLOCK if mode in FROM_THE_CACHE else 0
    found = parity.compared(run, PROGRAMS[name], expected, 30, parity.TOLERANCES["float32"], start)
    assert not found.wrong, found.far
    if mode == "warm":
        assert run.cached_tokens == BLOCK


def test_the_comparison_sees_what_is_wrong(modes):
    """A run beside what another row, another strength or other captures would have made; and beside its own."""
    name = "a row each of a list"
    run, (keep, (op, positions), again) = modes.run("transformers")[list(PROGRAMS).index(name)], PROGRAMS[name]
    weaker = msgspec.structs.replace(op, scale=0.999)

    def wrong(*acts, start: int = 0) -> str:
        plain = parity.expected(modes.plain, list(acts), run.prompt_token_ids, run.token_ids)
        return " ".join(parity.compared(run, list(acts), plain, 30, parity.TOLERANCES["float32"], start).wrong)

    assert wrong(keep, (op, positions), again) == ""
    elsewhere = wrong(keep, (op, lambda p, n: [p - 2, 4, 40]), again)
    assert all(part in elsewhere for part in ("at resid_mid[12]: touched [3, 40, ", "row 0.", "edit 0."))
    assert wrong(keep, (weaker, positions), again).startswith("row 0.00")
    assert "captured positions" in wrong(keep, (op, positions), again, start=1)
    plain = modes.expected(name, tuple(run.token_ids))
    plain.kept[0][7, 0] = float("nan")
    try:
        found = parity.compared(run, PROGRAMS[name], plain, 30, parity.TOLERANCES["float32"])
    finally:
        modes.expected.cache_clear()
    assert found.wrong == ["row nan"]


def test_the_programs_say_every_op_and_every_selection():
    used = {type(op) for acts in PROGRAMS.values() for op, _ in acts}
    assert used == {pc.Capture, pc.Add, pc.Replace, pc.Zero, pc.Scale, pc.Ablate, pc.Clamp, pc.Noise}
    assert {op.at.name for acts in PROGRAMS.values() for op, _ in acts} == {
        "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm", "logits"
    }  # fmt: skip
