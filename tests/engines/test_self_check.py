"""Self-checks: the rows of `embed` that are captured beside a run's captures are those of its tokens. All requests are
checked here; that is seen to change no bit of what they give, and a row with another's label is found."""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

import patchclamp as pc
from patchclamp.engines.vllm import server as server_module
from patchclamp.engines.vllm import setup
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.worker import Attached, logger
from patchclamp.errors import Mislabelled, pack
from patchclamp.language import Program
from patchclamp.plan import Prompt, bind
from patchclamp.plan.bound import CHECKED, checked_ranges
from patchclamp.runtime import runtime as runtime_module
from patchclamp.runtime.self_check import mislabelled
from patchclamp.sites import FAMILIES, SiteMap, Sizes

from ..models import of_family, with_words
from .conftest import TINY
from .test_families import EAGER, IDS
from .test_speculative import LONG, ROW_D, both
from .test_speculative import PROMPTS as REPEATING

BLOCKS = {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 16, "max_num_seqs": 4}
SITES = [pc.resid_post[1], pc.z[0] @ pc.prompt[3:5], pc.logits]
PROMPTS = [np.random.default_rng(i % 3).integers(3, TINY["vocab_size"], 26 + i).tolist() for i in range(6)]
WANTED = {"max_tokens": 24, "sampling": {"ignore_eos": True}, "logprobs": True}


@pytest.fixture(scope="module")
def opened(tiny, inspected_here):
    """`opened(0)` is an engine of few blocks with that rate of checks."""
    made: dict[int, pc.LM] = {}

    def get(rate: int) -> pc.LM:
        if rate not in made:
            made[rate] = pc.LM(tiny, engine="vllm", check_rate=rate, prove=False, **IDS, **EAGER | BLOCKS)
        return made[rate]

    yield get
    for lm in made.values():
        lm.close()


def checks(lm: pc.LM) -> np.ndarray:
    status = lm.engine.status()
    return np.array([status["self_checks"], status["self_checks_failed"], status["failures"]])


def bits(run: pc.Run) -> list:
    rows = [run[site].numpy().tobytes() for site in ("resid_post[1]", "z[0]", "logits")]
    return [run.token_ids, [each.hex() for each in run.logprobs], *rows]


def test_chunks_cached_prefixes_and_preempted_requests_pass_and_keep_every_bit(opened):
    """With a rate of 1 every request with captures is checked, one without is not, and none fails. Rows at `embed` that
    a program captures and edits itself are its own."""
    ours, plain = opened(1), opened(0)
    edits = [pc.Zero(pc.embed, tokens=pc.prompt[2]), pc.Add([0.1] * ours.model.d_model, at=pc.resid_post[0])]
    found = []
    for lm in (ours, plain):
        before, preempted = checks(lm), lm.engine.status()["preemptions"]
        runs = lm.run(PROMPTS, capture=SITES, edits=edits, **WANTED)
        assert lm.engine.status()["preemptions"] > preempted
        [late] = lm.run(
            [PROMPTS[5]], capture=[pc.resid_post[1] @ pc.prompt[-1:], pc.embed @ pc.prompt[-3:]], max_tokens=2
        )
        lm.run(PROMPTS[0], edits=edits, max_tokens=2)
        assert (checks(lm) - before).tolist() == [7 if lm is ours else 0, 0, 0]
        assert late[pc.embed].shape == (3, TINY["hidden_size"])
        found.append([*map(bits, runs), late[pc.embed].numpy().tobytes(), late[pc.resid_post[1]].numpy().tobytes()])
    assert found[0] == found[1]


def test_every_nth_request_with_captures_is_checked(tiny, inspected_here):
    with pc.LM(tiny, engine="vllm", check_rate=3, prove=False, **IDS, **EAGER) as lm:
        for count in (0, 0, 1, 1, 1, 2):
            lm.run(PROMPTS[0], max_tokens=2)
            lm.run(PROMPTS[0], capture=[pc.resid_post[1]], max_tokens=2)
            assert checks(lm).tolist() == [count, 0, 0]


@pytest.mark.parametrize("kind", ["within a run", "between two runs"])
def test_a_row_with_another_rows_label_is_found(opened, monkeypatch, caplog, kind):
    """Two rows of a step's plan swap their labels: the run that they are of fails, with an error of its own and a line in
    the log, and the others keep every bit."""
    lm, stock = opened(1), runtime_module.make_plan
    healthy = [bits(lm.run(prompt, capture=SITES, **WANTED)) for prompt in PROMPTS[:3]]
    slots: list[int] = []  # of those that fail

    def swapped(*args, **kwargs):
        plan = stock(*args, **kwargs)
        slot, position = plan.tokens.slot.copy(), plan.tokens.position.copy()
        there = [slot == each for each in sorted({*slot.tolist()} - {0})]
        if not slots and len(there) == 3 and all(rows.sum() == 1 for rows in there) and kind == "between two runs":
            rows = [int(np.flatnonzero(each)[0]) for each in there[:2]]
            slots.extend(slot[rows].tolist())
            slot[rows], position[rows] = slot[rows[::-1]], position[rows[::-1]]
        elif not slots and there and there[0].sum() > 1 and kind == "within a run":
            rows = np.flatnonzero(there[0])[:2]
            slots.append(int(slot[rows[0]]))
            position[rows] = position[rows[::-1]]
        tokens = msgspec.structs.replace(plan.tokens, slot=slot, position=position)
        return msgspec.structs.replace(plan, tokens=tokens)

    before = checks(lm)
    monkeypatch.setattr(runtime_module, "make_plan", swapped)
    logger.addHandler(caplog.handler)
    try:
        runs = lm.run(PROMPTS[:3], capture=SITES, **WANTED)
    finally:
        logger.removeHandler(caplog.handler)
    failed = [run for run in runs if run.error is not None]
    assert len(failed) == len(slots) == (1 if kind == "within a run" else 2)
    assert {type(run.error) for run in failed} == {pc.Mislabelled}
    assert [run.error.status for run in failed] == [500] * len(failed)
    assert (checks(lm) - before).tolist() == [3, len(failed), len(failed)]
    told = {id(record): record for record in caplog.records if record.name == logger.name}.values()
    assert [record.levelno for record in told] == [logging.ERROR] * len(failed)
    assert all("self-check" in record.getMessage() for record in told)
    for run, expected in zip(runs, healthy, strict=True):
        if run.error is None:
            assert bits(run) == expected
    monkeypatch.setattr(runtime_module, "make_plan", stock)
    assert bits(lm.run(PROMPTS[0], capture=SITES, **WANTED)) == healthy[0]


def test_choices_and_stop_texts(tiny, inspected_here):
    with_words(tiny, TINY["vocab_size"])
    with pc.LM(tiny, engine="vllm", dtype="float32", check_rate=1, prove=False, **EAGER) as lm:
        free = lm.run("w5 w6 w7", max_tokens=12, capture=[pc.resid_post[1]], sampling={"ignore_eos": True})
        word = f"w{free.token_ids[-4]}"
        stopped = lm.run("w5 w6 w7", max_tokens=12, capture=[pc.resid_post[1]],
                         sampling={"stop": [word], "ignore_eos": True})  # fmt: skip
        assert len(stopped.token_ids) < len(free.token_ids)
        samples = lm.run("w5 w6 w7", max_tokens=4, capture=[pc.resid_post[1]],
                         sampling={"n": 3, "temperature": 1.0, "seed": 5})  # fmt: skip
        assert len(samples) == 3
        assert checks(lm).tolist() == [5, 0, 0]


def test_the_family_whose_embeddings_are_normed_is_refused(tmp_path, inspected_here):
    """BLOOM. Without a rate of the caller's it starts, and checks nothing."""
    folder = of_family(tmp_path, "bloom")
    with pytest.raises(pc.EngineError, match="multiple") as caught:
        pc.LM(folder, engine="vllm", check_rate=10, **IDS, **EAGER)
    assert caught.value.path == "check_rate"
    assert [family.name for family in FAMILIES if family.unchecked] == ["bloom"]


@pytest.mark.parametrize("rate", [-1, True, "5", 0.5])
def test_a_rate_that_is_no_number_of_requests(rate):
    with pytest.raises(pc.ProgramError, match="integer") as caught:
        server_module.checked_rate(rate, "")
    assert caught.value.path == "check_rate"
    assert server_module.checked_rate(None, "") == server_module.CHECK_RATE == 1000
    assert server_module.checked_rate(None, "why") == server_module.checked_rate(0, "why") == 0
    assert "check_rate" in setup.ASKED


def test_the_option_of_a_server():
    with_config = server_module.with_config
    for words in (["--patchclamp-check-rate", "5"], ["--patchclamp-check-rate=5"]):
        assert with_config(words)[-1] == '{"patchclamp": {"check_rate": 5}}'
    with pytest.raises(pc.ProgramError, match="integer") as caught:
        with_config(["--patchclamp-check-rate", "often"])
    assert caught.value.path == "--patchclamp-check-rate"


def test_rows_are_compared_up_to_one_factor_for_all():
    draw, positions = torch.Generator().manual_seed(0), np.arange(4, 10)
    matrix = torch.randn(6, 64, generator=draw)
    for factor in (1.0, 128.0, 1e-3):
        rows = (factor * matrix).to(torch.bfloat16).float()
        assert mislabelled(positions, rows, positions, matrix) is None
        assert isinstance(mislabelled(positions, rows[[1, 0, 2, 3, 4, 5]], positions, matrix), Mislabelled)
        assert isinstance(mislabelled(positions[1:], rows[1:], positions, matrix), Mislabelled)
        for wrong in (0 * rows, -rows, rows.roll(1, 0), rows.roll(1, 1), 1e-9 * rows, 1e9 * rows):
            assert isinstance(mislabelled(positions, wrong, positions, matrix), Mislabelled)
        rows[3, 5] = torch.nan
        assert isinstance(mislabelled(positions, rows, positions, matrix), Mislabelled)
    assert mislabelled(positions[:0], matrix[:0], positions[:0], matrix[:0]) is None
    padding = torch.zeros(2, 64)
    assert mislabelled(positions[:2], padding, positions[:2], padding) is None


def test_a_check_that_failed_is_counted():
    from prometheus_client import REGISTRY

    metrics = server_module.Metrics("self-checked")

    def counts() -> list[float | None]:
        labels = [{"model_name": "self-checked", "result": result} for result in ("passed", "failed")]
        return [REGISTRY.get_sample_value("patchclamp:self_checks_total", each) for each in labels]

    for verdict, expected in (
        (Verdict("r", None, 0.1), [0, 0]),
        (Verdict("r", None, 0.1, True), [1, 0]),
        (Verdict("r", pack(pc.NotFinite("another error")), 0.1, True), [2, 0]),
        (Verdict("r", pack(Mislabelled("rows")), None, True), [2, 1]),
    ):
        metrics.settled(verdict)
        assert counts() == expected


def test_drafts_that_are_rejected_are_not_compared(tmp_path, inspected_here):
    edit = pc.Add(ROW_D, pc.resid_post[1], pc.generated, scale=0.5)
    with both("ngram", tmp_path, check_rate=1, prove=False) as (_, lm):
        runs = lm.run(REPEATING, edits=[edit], capture=[pc.resid_post[1]], **LONG)
        assert sum(run.drafts.accepted for run in runs) < sum(run.drafts.proposed for run in runs)
        assert checks(lm).tolist() == [len(REPEATING), 0, 0]


def test_a_check_that_cannot_be_made_fails_its_own_run_alone(opened, monkeypatch):
    """As without memory for it, of requests that end in one step."""
    lm, forward = opened(1), VocabParallelEmbedding.forward
    prompts = [PROMPTS[0][:4], PROMPTS[1][:5], PROMPTS[2][:5]]
    ids = len(prompts[0]) + 1

    def full(layer, tokens):
        if len(tokens) == ids and is_checking:
            raise RuntimeError("no memory")
        return forward(layer, tokens)

    stock, is_checking = Attached._check, []

    def check(*args):
        is_checking.append(True)
        stock(*args)
        is_checking.clear()

    wanted = {"max_tokens": 2, "sampling": {"ignore_eos": True}}
    monkeypatch.setattr(Attached, "_check", check)
    monkeypatch.setattr(VocabParallelEmbedding, "forward", full)
    captures = [[pc.resid_post[1]], [pc.resid_post[1]], []]
    runs = lm.run(prompts, capture=captures, edits=pc.Zero(pc.mlp_out[0]), **wanted)
    assert [run.error is not None for run in runs] == [True, False, False]
    assert "no memory" in str(runs[0].error)
    monkeypatch.undo()
    assert lm.run(prompts[0], capture=captures[0], **wanted).error is None


def test_few_positions_of_a_long_prompt_are_checked():
    """The engine waits while rows are compared, and keeps them as long as the captures."""
    site, prompt = pc.resid_post[0] @ pc.every[10:], Prompt([1] * 3000, lambda: ("", []))
    bound = bind(Program.of([], [site]), "run", prompt, 2000, SiteMap(FAMILIES[0], Sizes(2, 8, 61)), None)
    spans = [(each.start, each.stop) for each in checked_ranges(bound, [(20, 30)])]
    assert spans == [(10, 20), (30, CHECKED), (3001 - CHECKED, 3000 + CHECKED)]
