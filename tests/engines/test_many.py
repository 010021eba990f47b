"""Requests as they come: several runs of one prompt, and calls that are awaited together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import patchclamp as pc

from .conftest import CHUNKED, PROMPTS

BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])


@BOTH
def test_n_runs_of_a_prompt_are_runs_of_their_own(narrow, engine):
    lm, at = narrow.get(engine, "float32"), pc.resid_post[6]
    v = torch.randn(lm.model.d_model)
    sampling = {"n": 3, "temperature": 1.0, "seed": np.int64(11), "ignore_eos": True}
    program = {"edits": [pc.Add(v, at=pc.resid_post[5], tokens=pc.generated)], "capture": [at]}
    runs = lm.run(PROMPTS[0], max_tokens=6, sampling=sampling, **program, logprobs=True)
    assert len(runs) == 3
    assert len({tuple(run.token_ids) for run in runs}) == 3
    for i, run in enumerate(runs):
        assert run.positions(at) == list(range(len(run.prompt_token_ids) + 5))
        fed = lm.run(run.prompt_token_ids + run.token_ids[:-1], max_tokens=1, capture=[at],
                     edits=[pc.Add(v, at=pc.resid_post[5], tokens=pc.every[len(run.prompt_token_ids) :])], logprobs=True)  # fmt: skip
        far = (run[at] - fed[at][: len(run[at])]).norm(dim=1) / run[at].norm(dim=1)
        assert float(far.max()) <= 1e-4
        alone = lm.run(
            PROMPTS[0], max_tokens=6, sampling={**sampling, "n": 1, "seed": 11 + i}, **program, logprobs=True
        )
        assert alone.token_ids == run.token_ids
    mixed = lm.run([PROMPTS[0], PROMPTS[1]], max_tokens=2, sampling=[sampling, {"n": 1}], logprobs=True)
    assert [len(mixed[0]), type(mixed[1])] == [3, pc.Run]
    for wrong, text in (
        ({"n": 0}, "sampling.n: expected an integer from 1 to 16384"),
        ({"n": 2}, "sampling.n: 2"),
        ({"n": 10**9, "temperature": 1.0}, "sampling.n: expected an integer from 1 to 16384"),
    ):
        with pytest.raises(pc.ProgramError, match=text):
            lm.run(PROMPTS[0], sampling=wrong, logprobs=True)


@BOTH
def test_calls_awaited_together_are_each_as_if_alone(narrow, engine):
    lm, at = narrow.get(engine, "float32"), pc.resid_post[7]
    vectors = torch.randn(12, lm.model.d_model)
    edits = [[pc.Add(v, at=pc.resid_post[i % 8], scale=0.5)] for i, v in enumerate(vectors)]

    async def all_at_once() -> list[pc.Run]:
        calls = [
            lm.arun(PROMPTS[i % 3], max_tokens=4, edits=edit, capture=[at], logprobs=True)
            for i, edit in enumerate(edits)
        ]
        return await asyncio.gather(
            *calls, lm.arun(PROMPTS, max_tokens=2, logprobs=True), lm.arun(PROMPTS[0], max_tokens=3, logprobs=True)
        )

    *runs, many, plain = asyncio.run(all_at_once())
    assert [len(run.token_ids) for run in many] == [2, 2, 2]
    assert plain.token_ids == lm.run(PROMPTS[0], max_tokens=3, logprobs=True).token_ids
    for i, (run, edit) in enumerate(zip(runs, edits, strict=True)):
        alone = lm.run(PROMPTS[i % 3], max_tokens=4, edits=edit, capture=[at], logprobs=True)
        prompt = slice(0, len(run.prompt_token_ids))
        far = (run[at][prompt] - alone[at][prompt]).norm(dim=1) / alone[at][prompt].norm(dim=1)
        assert float(far.max()) <= 1e-4


@pytest.mark.slow
@BOTH
def test_errors_and_cancelled_calls_leave_nothing_behind(narrow, engine):
    lm = narrow.get(engine, "float32")
    before = lm.engine.status()

    async def go() -> list:
        at_once = asyncio.create_task(lm.arun(PROMPTS[2], max_tokens=200, capture=[pc.resid_post[1]],
                                              sampling={"ignore_eos": True}, logprobs=True))  # fmt: skip
        await asyncio.sleep(0)  # it is asked for, and no more
        at_once.cancel()
        hot = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[3], scale=1e30)]
        long = asyncio.create_task(lm.arun(PROMPTS[1], max_tokens=200, capture=[pc.resid_post[1]],
                                           sampling={"ignore_eos": True}, logprobs=True))  # fmt: skip
        short = asyncio.create_task(lm.arun(PROMPTS[0], max_tokens=3, logprobs=True))
        while not (lm.engine._waiting if engine == "vllm" else len(lm.engine.runtime)):
            await asyncio.sleep(0)  # until it is under way
        long.cancel()
        bad = lm.arun(PROMPTS[0], max_tokens=2, edits=hot, logprobs=True)
        return await asyncio.gather(long, short, bad, return_exceptions=True)

    cancelled, run, error = asyncio.run(go())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert len(run.token_ids) == 3
    assert isinstance(error, pc.RunError)
    with pytest.raises(pc.ProgramError, match="messages"):
        asyncio.run(lm.arun(logprobs=True))
    del run  # the error lives on, and its run is closed all the same
    lm.run(PROMPTS[0], max_tokens=1, logprobs=True)  # after the aborted one, on the engine's thread
    after = lm.engine.status()
    counts = [name for name in ("programs", "runs", "pinned", "vectors") if name in before]
    assert len(counts) >= 3
    assert {name: after[name] for name in counts} == {name: before[name] for name in counts}


@BOTH
def test_a_run_by_its_name_in_the_bank(narrow, engine):
    """It stays as long as the name does, whoever drops it."""
    lm, at = narrow.get(engine, "float32"), pc.resid_pre[5]
    clean = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_pre], logprobs=True)
    spelled = [pc.Replace(pc.From(clean, at, pc.prompt[-1]), at, pc.prompt[-1])]
    expected = lm.run(PROMPTS[1], max_tokens=3, edits=spelled, logprobs=True)
    lm.bank["clean run"], other = clean, lm.run(PROMPTS[2], max_tokens=1, capture=[at], logprobs=True)
    del clean, spelled
    named = [pc.Replace(pc.From("clean run", at, pc.prompt[-1]), at, pc.prompt[-1])]
    found = lm.run(PROMPTS[1], max_tokens=3, edits=named, logprobs=True)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    lm.bank["clean run"] = other  # what counts is what was captured, not what it is called
    moved = lm.run(PROMPTS[1], max_tokens=3, edits=named, logprobs=True)
    assert moved.logprobs != found.logprobs
    other.close()
    with pytest.raises(pc.MissingSource, match=r"edits\[0\].value: .*'clean run': .*closed"):
        lm.run(PROMPTS[1], max_tokens=3, edits=named, logprobs=True)
    with pytest.raises(pc.ProgramError, match="'clean run' is a run"):
        lm.run(PROMPTS[1], edits=[pc.Add("clean run", at)], logprobs=True)
    with pytest.raises(pc.ProgramError, match="names: 'clean run' is a run"):
        lm.bank.save("nowhere.safetensors")
    del lm.bank["clean run"]


def test_seeded_prompts_that_come_in_chunks_draw_as_whole_ones(narrow):
    """Stock vLLM's CPU build ends over them."""
    whole, chunked = narrow.get("vllm", "float32"), narrow.get("vllm", "float32", **CHUNKED)
    prompts = [whole.tokens(" ".join(PROMPTS))[: 17 + 11 * i] for i in range(4)]
    sampling = [{"temperature": 1.0, "seed": 5 + i, "ignore_eos": True} for i in range(4)]
    edits = [[pc.Scale(0.9, pc.resid_post[2])], [], [], []]
    ours, theirs = (
        lm.run(prompts, max_tokens=6, sampling=sampling, edits=edits, logprobs=True) for lm in (chunked, whole)
    )
    assert [run.token_ids for run in ours] == [run.token_ids for run in theirs]
    again = chunked.run(prompts[3], max_tokens=6, sampling=sampling[3], logprobs=True)
    assert again.token_ids == ours[3].token_ids
    other = chunked.run(prompts[3], max_tokens=6, sampling={**sampling[3], "seed": 99}, logprobs=True)
    assert other.token_ids != ours[3].token_ids


def test_what_the_engines_thread_raises_reaches_the_caller(narrow, monkeypatch):
    """Wherever it is raised on that thread: nobody waits for ever, and the engine goes on."""
    lm = narrow.get("transformers", "float32")
    runtime = lm.engine.runtime
    edits = [pc.Add([1.0] * lm.model.d_model, at=pc.resid_post[0])]
    for name in ("hold_code", "install_all", "free", "release", "drop_code"):
        with monkeypatch.context() as broken:
            broken.setattr(runtime, name, lambda *_: 1 / 0)
            with pytest.raises(pc.RunError, match="ZeroDivisionError"):
                lm.run([3, 4, 5], max_tokens=1, edits=edits, logprobs=True)
        assert lm.run([3, 4, 5], max_tokens=1, edits=edits, logprobs=True).token_ids


def test_rows_that_could_not_be_written_are_not_read_later(narrow, monkeypatch):
    """The programs of a batch fail together; asked again, their vectors are brought again."""
    lm = narrow.get("transformers", "float32")
    draw, bank = np.random.default_rng(0), lm.engine.runtime.bank
    edits = [[pc.Add(draw.standard_normal(lm.model.d_model).astype(np.float32), pc.resid_post[0])] for _ in range(3)]
    asked, held = {"max_tokens": 1, "edits": edits, "logprobs": True}, lm.engine.status()["programs"]
    expected = lm.run([[3, 4, 5]] * 3, **asked)
    lm.engine._call(lambda: lm.engine._room._drop(list(lm.engine._room._resident))).result()
    with monkeypatch.context() as broken:
        broken.setattr(bank, "write", lambda *_: 1 / 0)
        with pytest.raises(pc.RunError, match="ZeroDivisionError"):
            lm.run([3, 4, 5], max_tokens=1, edits=edits[0])
        runs = lm.run([[3, 4, 5]] * 3, **asked)
        assert [type(run.error) for run in runs] == [pc.RunError] * 3
    again = lm.run([[3, 4, 5]] * 3, **asked)
    assert [run.logprobs for run in again] == [run.logprobs for run in expected]
    assert len({run.logprobs[0] for run in again}) == 3
    assert lm.engine.status()["programs"] == held  # by engines that could not free, above
