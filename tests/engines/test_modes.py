"""Guarantee 3: one set of programs, and it does not matter how requests are run; all against one plain forward pass."""

from __future__ import annotations

import functools

import msgspec
import pytest

import patchclamp as pc

from ..conftest import WIDTH
from ..reference import parity
from ..reference.forward import Forward
from ..reference.hooks import PlainModel
from ..reference.parity import BLOCK, NEW
from .conftest import CHUNKED, PROMPTS, SHALLOW

SMALL = {"kv_cache_memory_bytes": SHALLOW * 2 * 3 * 64 * 4 * BLOCK * 6, "max_model_len": 128, "max_num_seqs": 4}
MODES = {
    "transformers": ("transformers", {}), "eager": ("vllm", {"enable_prefix_caching": False}),
    "chunks of 16": ("vllm", CHUNKED), "preempted": ("vllm", SMALL), "cold": ("vllm", {}), "warm": ("vllm", {}),
}  # fmt: skip
FROM_THE_CACHE = ("cold", "warm")
USUAL_MODES = [pytest.param(mode, marks=[pytest.mark.slow] if mode == "preempted" else []) for mode in MODES]
TEXT = " ".join([*PROMPTS, PROMPTS[1], PROMPTS[2]])
SPAN, BEGIN = " France is", 3
PROGRAMS = parity.programs(WIDTH, SHALLOW, SPAN, BEGIN)


class Modes:
    """Runs of every program in every mode, and what the plain pass makes of them; each made once."""

    def __init__(self, narrow, folder: str) -> None:
        self.narrow, self.plain = narrow, PlainModel(folder)
        lm = narrow.get("vllm", "float32")
        assert lm.tokenizer.token_strings(lm.tokens(TEXT)[BEGIN : BEGIN + 2]) == [" France", " is"]
        self.texts = parity.prompts(lm, TEXT, len(PROGRAMS))
        self.made: dict[str, list[pc.Run]] = {}

    def run(self, mode: str) -> list[pc.Run]:
        """One batch of all programs. Where it is to come from the cache, only what is in a block's rest is captured."""
        if mode not in self.made:
            engine, options = MODES[mode]
            lm, before = self.narrow.get(engine, "float32", **options), 0
            if mode == "preempted":
                before = lm.engine.status()["preemptions"]
            programs = [parity.ops(acts, BLOCK if mode in FROM_THE_CACHE else 0) for acts in PROGRAMS.values()]
            if mode == "warm":
                self.run("cold")
            self.made[mode] = lm.run(
                self.texts, edits=programs, max_tokens=NEW, sampling={"ignore_eos": True}, logprobs=True
            )
            if mode == "preempted":
                assert lm.engine.status()["preemptions"] > before
        return self.made[mode]

    @functools.cache  # noqa: B019
    def expected(self, name: str, tokens: tuple[int, ...]) -> Forward:
        """The plain pass over a program's prompt and these tokens after it."""
        prompt = self.run("transformers")[list(PROGRAMS).index(name)].prompt_token_ids
        return parity.expected(self.plain, PROGRAMS[name], prompt, list(tokens))


@pytest.fixture(scope="module")
def modes(narrow, narrowed) -> Modes:
    return Modes(narrow, str(narrowed))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", USUAL_MODES)
def test_it_does_not_matter_how_a_request_is_run(modes, mode, name):
    """The rows before and after every edit, the rows it touched, and the log-probabilities, as in the plain pass."""
    run = modes.run(mode)[list(PROGRAMS).index(name)]
    expected = modes.expected(name, tuple(run.token_ids))
    start = BLOCK if mode in FROM_THE_CACHE else 0
    found = parity.compared(run, PROGRAMS[name], expected, SHALLOW, parity.TOLERANCES["float32"], start)
    assert not found.wrong, found.far
    if mode == "warm":
        assert run.cached_tokens == BLOCK


def test_the_comparison_sees_what_is_wrong(modes):
    """A run beside what another row, another strength or other captures would have made; and beside its own."""
    name = "a row each of a list"
    run, (keep, (op, positions), again) = modes.run("transformers")[list(PROGRAMS).index(name)], PROGRAMS[name]
    weaker = msgspec.structs.replace(op, scale=0.999)

    def compared(*acts, start: int = 0) -> parity.Compared:
        plain = parity.expected(modes.plain, list(acts), run.prompt_token_ids, run.token_ids)
        return parity.compared(run, list(acts), plain, SHALLOW, bound, start)

    bound, site = parity.TOLERANCES["float32"], f"at {op.at}"
    assert compared(keep, (op, positions), again).wrong == []
    last = len(run.prompt_token_ids)
    elsewhere = compared(keep, (op, lambda p, n: [p - 3, 4, 40]), again)
    assert elsewhere.wrong[0] == f"{site}: touched [3, 40, {last - 2}]"
    assert {"row", "edit"} <= {what.split()[0] for what in elsewhere.wrong}
    assert min(elsewhere.far["row"], elsewhere.far["edit"]) > 100 * bound.row
    strong = compared(keep, (weaker, positions), again)
    assert "row" in {what.split()[0] for what in strong.wrong}
    assert bound.row < strong.far["row"] < 0.1
    assert compared(keep, (op, positions), again, start=1).wrong[0] == f"{site}: captured positions"
    plain = modes.expected(name, tuple(run.token_ids))
    plain.kept[0][7, 0] = float("nan")
    try:
        found = parity.compared(run, PROGRAMS[name], plain, SHALLOW, parity.TOLERANCES["float32"])
    finally:
        modes.expected.cache_clear()
    assert found.wrong == ["row nan"]


def test_the_programs_say_every_op_and_every_selection():
    used = {type(op) for acts in PROGRAMS.values() for op, _ in acts}
    assert used == {pc.Capture, pc.Add, pc.Replace, pc.Zero, pc.Scale, pc.Ablate, pc.Clamp, pc.Rotate, pc.Noise}
    assert {op.at.name for acts in PROGRAMS.values() for op, _ in acts} == {
        "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm", "logits"
    }  # fmt: skip
