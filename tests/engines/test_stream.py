"""What a run generates, as it is made: the same as without streaming, on real engines, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines.vllm.compat.clients import ask_core

from ..conftest import WIDTH
from .conftest import CHUNKED, PROMPTS

BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])
LONG = {"max_tokens": 400, "sampling": {"ignore_eos": True}}
COUNTS = ("programs", "runs", "pinned", "vectors")


def counts(lm: pc.LM) -> dict[str, int]:
    """What the engine holds, once what was asked of it before is done."""
    gc.collect()
    lm.engine.status()
    status = lm.engine.status()
    return {name: status[name] for name in COUNTS if name in status}


def push(lm: pc.LM, seed: int = 0) -> torch.Tensor:
    return torch.randn(lm.model.d_model, generator=torch.Generator().manual_seed(seed))


def read(stream: pc.Stream, run: pc.Run) -> list[pc.Part]:
    """The parts, put together and compared with a run that was not streamed."""
    parts = list(stream)
    text, ids = "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]
    logprobs = [number for part in parts for number in part.logprobs]
    assert (text, ids) == (run.text, run.token_ids)
    assert (stream.run.text, stream.run.token_ids, stream.run.logprobs) == (text, ids, logprobs)
    assert logprobs == pytest.approx(run.logprobs, abs=2e-4)
    assert stream.run.finish_reason == run.finish_reason
    assert stream.run.scores == pytest.approx(run.scores, abs=2e-4)
    assert all(len(part.token_ids) == len(part.logprobs) for part in parts)
    assert len(parts) == len(ids)
    return parts


@BOTH
def test_the_token_that_ends_a_run_is_not_in_its_text(narrow, engine):
    """As in vLLM, so that one program has one text on both engines."""
    lm = narrow.get(engine, "float32")
    whole = lm.run(PROMPTS[1], max_tokens=6, sampling={"ignore_eos": True})
    for count in (1, 4):
        end = whole.token_ids[count - 1]
        kept = whole.token_ids[: whole.token_ids.index(end)]
        call = {"max_tokens": 6, "sampling": {"stop_token_ids": [end]}, "logprobs": True}
        run = lm.run(PROMPTS[1], **call)
        assert (run.token_ids, run.finish_reason) == ([*kept, end], "stop")
        assert run.text == lm.tokenizer.decode(kept) != lm.tokenizer.decode(run.token_ids)
        read(lm.stream(PROMPTS[1], **call), run)


@BOTH
def test_parts_are_the_run(narrow, engine):
    lm, at = narrow.get(engine, "float32"), pc.resid_post[6]
    steer = [pc.Add(push(lm), at=pc.resid_post[5], tokens=pc.generated, scale=2.0)]
    for call in (
        {},
        {"max_tokens": 1, "score": [7042, 30]},
        {"edits": steer, "capture": [at, pc.logits]},
        {"sampling": {"temperature": 1.0, "seed": 7, "ignore_eos": True}, "max_tokens": 12, "capture": at},
        {"sampling": {"extra_args": {"fuzz_strength": 0.2}}},
    ):
        call = {"max_tokens": 6, **call}
        run, stream = lm.run(PROMPTS[0], **call, logprobs=True), lm.stream(PROMPTS[0], **call, logprobs=True)
        read(stream, run)
        for site in run.sites:
            assert stream.run.positions(site) == run.positions(site)
            far = (stream.run[site] - run[site]).norm(dim=1) / run[site].norm(dim=1)
            assert float(far.max()) <= 1e-4
    plain, steered = (lm.run(PROMPTS[0], edits=edits, max_tokens=6, logprobs=True) for edits in ([], steer))
    assert steered.logprobs[0] == pytest.approx(plain.logprobs[0], abs=2e-4)
    assert steered.logprobs[1:] != pytest.approx(plain.logprobs[1:], abs=0.01)


@BOTH
def test_what_was_captured_is_there_with_every_part(narrow, engine):
    """Long before the run ends; and who reads it and leaves leaves nothing behind."""
    lm, at, before = narrow.get(engine, "float32"), pc.resid_post[6], counts(narrow.get(engine, "float32"))
    ids = lm.tokens(PROMPTS[0])
    run, stream = lm.run(ids, max_tokens=6, capture=at, sampling=LONG["sampling"]), lm.stream(ids, capture=at, **LONG)
    with pytest.raises(pc.ProgramError, match="no part"):
        stream.so_far  # noqa: B018
    looked = []
    for number, _ in enumerate(itertools.islice(stream, 6), 1):
        so_far = stream.so_far
        assert so_far.token_ids == run.token_ids[:number]
        assert so_far.positions(at) == list(range(len(ids) + number - 1))
        looked.append((so_far[at], so_far[at].clone()))
        assert not so_far[at].is_inference()
        torch.testing.assert_close(so_far[at], run[at][: len(ids) + number - 1], rtol=1e-4, atol=1e-4)
    assert stream._mailbox._items.qsize() < LONG["max_tokens"] - 100
    with pytest.raises(pc.MissingSource):
        lm.run(ids, edits=[pc.Replace(pc.From(so_far, at), at=at)])
    stream.close()
    with pytest.raises(pc.ProgramError, match="closed"):
        stream.so_far  # noqa: B018
    assert all(torch.equal(rows, then) for rows, then in looked)
    del so_far, looked, run
    assert counts(lm) == before


@BOTH
def test_stop_texts_are_never_begun(narrow, engine):
    lm = narrow.get(engine, "float32")
    whole = lm.run(PROMPTS[0], max_tokens=16, sampling={"ignore_eos": True}, logprobs=True)
    across = whole.text[9:16]  # of several tokens, and begins within one
    assert len(lm.tokens(across)) > 1
    ends = {
        across: "stop",
        whole.text[5:9] + "\0": "length",  # is begun, and never is
        whole.text[:1]: "stop",
    }
    for stop, reason in ends.items():
        for given in (stop, [stop, "never there"]):
            call = {"max_tokens": 16, "sampling": {"ignore_eos": True, "stop": given}, "logprobs": True}
            run = lm.run(PROMPTS[0], **call)
            assert run.finish_reason == reason
            assert (run.text == whole.text) == (reason == "length")
            read(lm.stream(PROMPTS[0], **call), run)


@pytest.mark.slow
@BOTH
def test_characters_of_several_tokens_come_whole(shallow, engine):
    lm = shallow.get(engine, "float32")
    broken = 0
    for seed in range(3):
        call = {"max_tokens": 32, "sampling": {"temperature": 1.0, "seed": seed, "ignore_eos": True}, "logprobs": True}
        run = lm.run("日本語の文章です。今日は🎉", **call)
        parts = read(lm.stream("日本語の文章です。今日は🎉", **call), run)
        broken += sum(not part.text for part in parts[:-1])
        assert sum(part.text.count("\ufffd") for part in parts) == run.text.count("\ufffd")
    assert broken > 0  # some had to be waited for


@BOTH
def test_parts_come_while_the_run_is_under_way(narrow, engine):
    lm = narrow.get(engine, "float32")
    under_way = (lambda: bool(lm.engine._waiting)) if engine == "vllm" else (lambda: len(lm.engine.runtime) > 0)
    before = counts(lm)
    with lm.stream(PROMPTS[0], capture=[pc.resid_post[3]], **LONG, logprobs=True) as stream:
        first, second = next(stream), next(stream)
        assert under_way()
        with pytest.raises(pc.ProgramError, match="the stream has not ended"):
            stream.run  # noqa: B018
        assert len(first.token_ids) == len(second.token_ids) == 1
    assert counts(lm) == before
    assert not under_way()


@BOTH
def test_nobody_waits_for_a_slow_reader(narrow, engine):
    lm = narrow.get(engine, "float32")
    slow = lm.stream(PROMPTS[0], max_tokens=30, sampling={"ignore_eos": True}, logprobs=True)
    first = next(slow)
    plain = lm.run(PROMPTS[0], max_tokens=30, sampling={"ignore_eos": True}, logprobs=True)
    rest = list(slow)
    assert [token for part in (first, *rest) for token in part.token_ids] == plain.token_ids
    assert slow.run.text == plain.text


@BOTH
def test_streams_that_are_given_up_stop_and_leave_nothing_behind(narrow, engine):
    lm = narrow.get(engine, "float32")
    call = {"edits": [pc.Add(push(lm), at=pc.resid_post[5])], "capture": [pc.resid_post[1]], **LONG}
    lm.run(PROMPTS[0], max_tokens=1, edits=call["edits"], logprobs=True)
    before, planned = counts(lm), lm.engine.status()["steps_planned"]

    def broken_out_of() -> None:
        for _ in lm.stream(PROMPTS[1], **call):
            break

    def left() -> None:
        with lm.stream(PROMPTS[1], **call) as stream:
            next(stream)
            raise ZeroDivisionError

    def closed_at_once() -> None:
        lm.stream(PROMPTS[1], **call).close()

    async def awaited() -> None:
        async for _ in lm.stream(PROMPTS[1], **call):
            break
        stream = lm.stream(PROMPTS[1], **call)
        await anext(stream)
        await stream.aclose()
        assert [part async for part in stream] == []
        async with lm.stream(PROMPTS[1], **call) as stream:
            await anext(stream)

        begun = asyncio.Event()

        async def forever() -> None:
            async for _ in lm.stream(PROMPTS[1], **call):
                begun.set()

        task = asyncio.create_task(forever())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def finished_and_unread() -> None:
        stream = lm.stream(PROMPTS[1], **{**call, "max_tokens": 3})
        counts(lm)  # it has ended there
        next(stream)

    for give_up in (broken_out_of, closed_at_once, lambda: lm.stream(PROMPTS[1], **call), finished_and_unread):
        give_up()
        assert counts(lm) == before
    with pytest.raises(ZeroDivisionError):
        left()
    assert counts(lm) == before
    asyncio.run(awaited())
    assert counts(lm) == before
    assert lm.engine.status()["steps_planned"] - planned < LONG["max_tokens"]  # of eight streams together
    if engine == "vllm":
        assert [len(held) for held in (lm.engine._waiting, lm.engine._held_back)] == [0, 0]


@BOTH
def test_a_dropped_stream_waits_for_no_lock(narrow, engine):
    lm = narrow.get(engine, "float32")
    before = counts(lm)
    stream = lm.stream(PROMPTS[0], capture=[pc.resid_post[1]], **LONG, logprobs=True)
    next(stream)
    lock = lm.engine._wake if engine == "vllm" else lm.engine._thread._shutdown_lock
    held, enough, free = threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock:
            held.set()
            free.append(enough.wait(60))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    del stream
    enough.set()  # the lock was held all the while
    thread.join()
    assert free == [True]
    assert counts(lm) == before


@BOTH
def test_edits_that_are_not_finite_raise_from_the_iteration(narrow, engine):
    lm = narrow.get(engine, "float32")
    before = counts(lm)
    hot = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[3], scale=1e30)]
    stream = lm.stream(PROMPTS[0], max_tokens=3, edits=hot, capture=[pc.resid_post[5]], logprobs=True)
    parts = []
    with pytest.raises(pc.RunError, match=r"resid_p\S+ .*finite"):
        parts.extend(stream)
    assert list(stream) == []
    assert len(parts) < 3  # never a whole run under an edited label
    with pytest.raises(pc.RunError, match="not finite"):
        stream.run  # noqa: B018
    assert counts(lm) == before  # though the stream is still held

    async def go() -> None:
        async for _ in lm.stream(PROMPTS[0], max_tokens=3, edits=hot, logprobs=True):
            pass

    with pytest.raises(pc.RunError, match="not finite"):
        asyncio.run(go())
    assert counts(lm) == before


@BOTH
def test_what_is_wrong_with_a_call_is_raised_by_it(narrow, engine):
    lm = narrow.get(engine, "float32")
    for call, text in (
        ({"prompt": [PROMPTS[0]]}, "prompt: expected one prompt, got a list"),
        ({"prompt": PROMPTS[0], "edits": pc.Zero("resid_post[99]")}, r"edits\[0\]\.at: resid_post\[99\]"),
        ({"prompt": PROMPTS[0], "sampling": {"top_q": 1}}, "sampling.top_q: unknown sampling parameter"),
        ({"prompt": PROMPTS[0], "sampling": {"n": 2, "temperature": 1.0}}, "sampling.n: expected one sample"),
    ):
        with pytest.raises(pc.ProgramError if "Zero" not in str(call) else pc.PatchclampError, match=text):
            lm.stream(**call)


@pytest.mark.slow
@BOTH
def test_many_streams_at_once_are_each_as_if_alone(narrow, engine):
    lm, number = narrow.get(engine, "float32"), 12
    edits = [[pc.Add(push(lm, i), at=pc.resid_post[i % 8], scale=0.5)] for i in range(number)]
    alone = [lm.run(PROMPTS[i % 3], max_tokens=10, edits=edits[i], logprobs=True) for i in range(number)]
    before, order = counts(lm), []

    async def one(i: int) -> pc.Run:
        stream = lm.stream(PROMPTS[i % 3], max_tokens=10, edits=edits[i], capture=[pc.resid_post[7]], logprobs=True)
        text = ""
        async for part in stream:
            order.append(i)
            text += part.text
        assert text == stream.run.text
        return stream.run

    async def all_at_once() -> list[pc.Run]:
        calls = [lm.arun(PROMPTS[0], max_tokens=6, logprobs=True), lm.arun(PROMPTS, max_tokens=2, logprobs=True)]
        return await asyncio.gather(*map(one, range(number)), *calls)

    *runs, plain, many = asyncio.run(all_at_once())
    for run, single in zip(runs, alone, strict=True):
        assert run.token_ids == single.token_ids
        assert run.logprobs == pytest.approx(single.logprobs, abs=2e-4)
        assert len(run[pc.resid_post[7]]) == len(run.prompt_token_ids) + len(run.token_ids) - 1
    assert plain.token_ids == lm.run(PROMPTS[0], max_tokens=6, logprobs=True).token_ids
    assert [len(run.token_ids) for run in many] == [2, 2, 2]
    if engine == "vllm":  # they share its batches; on Transformers they take turns
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes > 2 * number
    del runs, run, plain, many
    assert counts(lm) == before


def test_streams_wait_their_turn_for_a_slot(narrow):
    """More programs than there are slots: the rest wait in the core, and those given up there leave too."""
    lm = narrow.get("vllm", "float32")
    before, same = counts(lm), [pc.Scale(1.0, at=pc.resid_post[3], tokens=pc.prompt[0])]
    gate, slots = threading.Event(), 2 * lm.engine.config.scheduler_config.max_num_seqs
    lm.engine._call(gate.wait)  # the engine's thread: all that follows comes at once
    streams = [lm.stream(PROMPTS[0], max_tokens=6, edits=same, logprobs=True) for _ in range(slots + 6)]
    waiting = lm.engine._call(lambda: lm.engine._call(lambda: ask_core(lm.engine._engine, "counts")))
    gate.set()
    assert waiting.result(60).result(60)["waiting"] == 6  # after the first step
    streams.pop()
    streams.pop().close()
    plain = lm.run(PROMPTS[0], max_tokens=6, logprobs=True)
    for stream in streams:
        read(stream, plain)
    del streams, stream
    assert counts(lm) == before


@BOTH
def test_threads_read_streams_too(narrow, engine):
    lm = narrow.get(engine, "float32")
    plain = [lm.run(prompt, max_tokens=6, logprobs=True) for prompt in PROMPTS]
    found: dict[int, str] = {}

    def work(i: int) -> None:
        found[i] = "".join(part.text for part in lm.stream(PROMPTS[i], max_tokens=6, logprobs=True))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(3)] == [run.text for run in plain]


@pytest.fixture(scope="module")
def elsewhere(narrowed):
    """An engine with its core in another process, proved, without a tokenizer; the last test that uses it closes it."""
    with pc.LM(narrowed, engine="vllm", dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
               kv_cache_memory_bytes=1 << 27, multiprocess_mode=True, skip_tokenizer_init=True,
               block_size=32) as lm:  # fmt: skip
        yield lm


@pytest.mark.slow
def test_a_core_in_its_own_process_serves_the_same(elsewhere, narrow):
    lm, here = elsewhere, narrow.get("vllm", "float32")
    ids = here.tokens(PROMPTS[0])
    run = lm.run(ids, max_tokens=3, capture=[pc.resid_post], logprobs=True)
    again = lm.run(ids, max_tokens=3, edits=[pc.Replace(pc.From(run), at=pc.resid_post)], logprobs=True)
    same = here.run(ids, max_tokens=3, capture=[pc.resid_post[3]], logprobs=True)
    assert run.logprobs == again.logprobs == same.logprobs
    assert (run[pc.resid_post[3]] == same[pc.resid_post[3]]).all()
    steered = lm.run(ids, max_tokens=3, edits=[pc.Add([1.0] * lm.model.d_model, at=pc.resid_post[3])], logprobs=True)
    assert steered.logprobs != run.logprobs


@pytest.mark.slow
def test_with_the_core_in_another_process_and_without_a_tokenizer(elsewhere):
    """What listens stays here: nothing of it goes to the core. And closing the engine tells who reads."""
    lm = elsewhere
    before, ids = counts(lm), list(range(1000, 1010))
    run = lm.run(ids, max_tokens=5, capture=[pc.resid_post[4]], logprobs=True)
    stream = lm.stream(ids, max_tokens=5, capture=[pc.resid_post[4]], logprobs=True)
    read(stream, run)
    assert torch.equal(stream.run[pc.resid_post[4]], run[pc.resid_post[4]])
    del run, stream
    for _ in lm.stream(ids, capture=[pc.resid_post[4]], **LONG, logprobs=True):
        break
    assert counts(lm) == before
    stream = lm.stream(ids, **LONG, logprobs=True)
    next(stream)
    lm.close()
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        list(stream)


def test_a_release_that_cannot_wake_the_engine_is_carried_out_all_the_same(narrow):
    """The garbage collector may release a run while the lock is taken, and then nothing else happens."""
    engine = narrow.get("vllm", "float32").engine
    with engine._wake:
        releasing = threading.Thread(target=engine.release, args=(["a run"],))
        releasing.start()
        releasing.join()
    while engine._released:  # forever, if the engine's thread sleeps on
        time.sleep(0.01)


# -- probes: scores with their tokens, and runs that end at one

MODES = {"eager": ("vllm", {}), "chunks of 16": ("vllm", CHUNKED), "transformers": ("transformers", {})}
WEIGHT = np.random.default_rng(3).standard_normal((2, WIDTH)).astype(np.float32)
TEXTS = [*PROMPTS, "x", "One two three four five six seven eight nine ten eleven twelve thirteen fourteen"]
FREE = {"max_tokens": 24, "sampling": {"ignore_eos": True}, "logprobs": 2}


def probe(**options) -> pc.Probe:
    return pc.Probe(WEIGHT, **{"at": pc.resid_post[3], "bias": [0.5, -1], "name": "p", **options})


def scores_of(parts: list[pc.Part], name: str = "p") -> tuple[list[int], torch.Tensor]:
    """The positions and scores of all parts."""
    scores = [part.scores[name] for part in parts]
    return [at for each in scores for at in each.positions], torch.cat([each.scores for each in scores], -2)


def threshold_of(run: pc.Run, token: int) -> float:
    """A threshold that output 0 exceeds at a generated token by more than rounding, and at none before it."""
    scores = run.probes["p"][len(run.prompt_token_ids) :, 0].tolist()
    return (scores[token] + max(scores[:token], default=scores[token] - 1)) / 2


def records(run: pc.Run) -> list[int]:
    """The generated tokens at which output 0 exceeds all before."""
    scores = run.probes["p"][len(run.prompt_token_ids) :, 0].tolist()
    return [i for i, score in enumerate(scores) if score > max(scores[:i], default=-1e9) + 0.01]


@pytest.mark.parametrize("mode", MODES)
def test_scores_come_with_their_token(narrow, mode):
    """Those of the run read afterwards: of several probes and layers, cold and with a warm prefix cache."""
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    probes = [probe(), probe(at=pc.resid_post[1:3], tokens=pc.generated, activation="softmax", name="layers"),
              probe(pool="mean", name="pooled"), probe(tokens=pc.token(lm.tokens(" the")[0]), name="the")]  # fmt: skip
    for prompt, max_tokens in itertools.chain(itertools.product(TEXTS[2:4], (1, 2)), itertools.product(TEXTS, (12,))):
        call = {**FREE, "max_tokens": max_tokens, "capture": probes}
        run = lm.run(prompt, **call)
        for _ in range(1 + (mode == "eager")):  # the second time with a warm prefix cache
            stream = lm.stream(prompt, **call)
            parts, length = list(stream), len(run.prompt_token_ids)
            assert [token for part in parts for token in part.token_ids] == stream.run.token_ids == run.token_ids
            assert "".join(part.text for part in parts) == run.text
            at = length
            for number, part in enumerate(parts):
                assert part.scores.keys() == {"p", "layers", "the"}
                at += len(part.token_ids)
                first, last = (0 if number == 0 else at - len(part.token_ids)), min(at, length + max_tokens - 1)
                assert part.scores["p"].positions == list(range(first, last))  # with their tokens
            for name in ("p", "layers", "the"):
                positions, scores = scores_of(parts, name)
                assert positions == stream.run.probe_positions(name) == run.probe_positions(name)
                assert torch.equal(scores, stream.run.probes[name])
                assert torch.allclose(scores, run.probes[name], rtol=1e-3, atol=1e-3)
            assert stream.run.stop_reason is None


def lens_of(parts: list[pc.Part], site: pc.Site | str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The positions, ids and log-probabilities that a lens read, of all parts."""
    reads = [part.lens[site] for part in parts]
    ids, logprobs = (np.concatenate([getattr(each, name) for each in reads], -2) for name in ("ids", "logprobs"))
    return [at for each in reads for at in each.positions], ids, logprobs


def assert_same_tokens(read: tuple[list[int], np.ndarray, np.ndarray], of: pc.Run, site: pc.Site | str) -> None:
    """What was streamed is what the run has: the rows are unembedded in other batches, which round differently."""
    positions, ids, logprobs = read
    assert positions == of.lens[site].positions
    assert np.abs(logprobs - of.lens[site].logprobs).max(initial=0) < 1e-4
    assert (ids != of.lens[site].ids).mean() < 0.02 if ids.size else ids.shape == of.lens[site].ids.shape


@pytest.mark.parametrize("mode", MODES)
def test_lenses_come_with_their_token(narrow, mode):
    """Beside probes, with translators, at some tokens only; with a cold and with a warm prefix cache."""
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    eye = {6: torch.eye(WIDTH) + torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 60}
    lenses = [pc.Lens(pc.resid_post[1::3], top=3), pc.Lens(pc.mlp_out[4] @ pc.generated, top=2),
              pc.Lens(pc.attn_out[2] @ pc.prompt[-1]), pc.Lens(pc.resid_mid[5] @ pc.token(lm.tokens(" the")[0])),
              pc.Lens(pc.mlp_out[6], translators=eye)]  # fmt: skip
    sites = [f"resid_post[{layer}]" for layer in (1, 4, 7)]
    sites += ["mlp_out[4]", "attn_out[2]", "resid_mid[5]", "mlp_out[6]"]
    for i, (prompt, max_tokens) in enumerate(itertools.product(TEXTS[2:], (1, 2, 8))):
        others = [probe()] if i % 2 else []
        call = {**FREE, "max_tokens": max_tokens, "capture": [*lenses, *others]}
        run, length = lm.run(prompt, **call), len(lm.tokens(prompt))
        stream = lm.stream(prompt, **call)
        parts, at = list(stream), length
        assert [token for part in parts for token in part.token_ids] == stream.run.token_ids == run.token_ids
        for number, part in enumerate(parts):
            assert (list(part.lens), part.scores.keys()) == (sites, {each.name for each in others})
            at += len(part.token_ids)
            first, last = (0 if number == 0 else at - len(part.token_ids)), min(at, length + max_tokens - 1)
            read = part.lens[pc.resid_post]
            assert (read.layers, read.positions) == ((1, 4, 7), list(range(first, last)))  # with their tokens
            assert read.tokens == [part.lens[pc.resid_post[layer]].tokens for layer in (1, 4, 7)]
            assert pc.resid_post[2] not in part.lens
        for site in (*sites, pc.resid_post):
            for whole in (run, stream.run):
                assert_same_tokens(lens_of(parts, site), whole, site)
        if others:
            assert torch.equal(scores_of(parts)[1], stream.run.probes["p"])


@BOTH
def test_lenses_of_a_stream_end_where_a_score_fires(narrow, engine):
    lm, before = narrow.get(engine, "float32"), counts(narrow.get(engine, "float32"))
    lens, call = pc.Lens(pc.resid_post[5], top=2), {**FREE, "capture": [pc.Lens(pc.resid_post[5], top=2), probe()]}
    plain = lm.run(PROMPTS[0], **call)
    token = records(plain)[-1]
    stream = lm.stream(PROMPTS[0], stop_when=probe() > threshold_of(plain, token), capture=lens, **FREE)
    positions, _, logprobs = lens_of(list(stream), pc.resid_post[5])
    assert stream.run.stop_reason == "probe:p"
    assert positions == list(range(len(plain.prompt_token_ids) + token + 1))
    assert np.abs(logprobs - plain.lens[pc.resid_post[5]].logprobs[: len(positions)]).max() < 1e-3
    del stream, plain
    assert counts(lm) == before


@BOTH
def test_streams_with_lenses_that_are_given_up_leave_nothing_behind(narrow, engine):
    lm, before = narrow.get(engine, "float32"), counts(narrow.get(engine, "float32"))
    lens = pc.Lens(pc.resid_post[6], top=2)

    async def one(text: str) -> None:
        async for part in lm.stream(text, capture=lens, **LONG):
            assert part.lens[pc.resid_post[6]].positions[0] == 0
            break

    async def together() -> None:
        await asyncio.gather(*map(one, TEXTS))

    planned = lm.engine.status()["steps_planned"]
    asyncio.run(together())
    for part in lm.stream(PROMPTS[1], capture=lens, **LONG):
        assert part.lens
        break
    assert counts(lm) == before
    assert lm.engine.status()["steps_planned"] - planned < LONG["max_tokens"]  # of six streams together


@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_at_the_first_token_where_the_score_fires(narrow, mode):
    """Batchmates decide for themselves: each is a plain run cut at its own token. Its last scores are those that fired."""
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    at, before = pc.resid_post[6], counts(lm)
    plain = lm.run(TEXTS, capture=[probe(), at], **FREE)
    last = [records(run)[-1] for run in plain]
    assert len(set(last)) > 1
    for stops in (last, [records(run)[0] for run in plain]):
        conditions = [probe() > threshold_of(run, token) for run, token in zip(plain, stops, strict=True)]
        for _ in range(1 + (mode == "eager")):  # the second time with a warm prefix cache
            runs = lm.run(TEXTS, stop_when=conditions, capture=at, **FREE)
            for run, whole, token, condition, text in zip(runs, plain, stops, conditions, TEXTS, strict=True):
                length = len(run.prompt_token_ids) + token + 1
                assert run.token_ids == whole.token_ids[: token + 1]
                assert (run.finish_reason, run.stop_reason) == ("stop", "probe:p")
                assert run.text == lm.tokenizer.decode(run.token_ids)
                assert run.logprobs == pytest.approx(whole.logprobs[: token + 1], abs=2e-4)
                assert len(run.top_logprobs) == token + 1
                assert run.probe_positions("p") == run.positions(at) == list(range(length))
                assert float(run.probes["p"][-1, 0]) > condition.threshold
                torch.testing.assert_close(run[at], whole[at][:length], rtol=1e-3, atol=1e-2)
                stream = lm.stream(text, stop_when=condition, capture=at, **FREE)
                parts = list(stream)
                ids = [token for part in parts for token in part.token_ids]
                assert ids == stream.run.token_ids == run.token_ids
                assert "".join(part.text for part in parts) == stream.run.text == run.text
                assert [number for part in parts for number in part.logprobs] == stream.run.logprobs
                assert (stream.run.finish_reason, stream.run.stop_reason) == ("stop", "probe:p")
                assert scores_of(parts)[0] == list(range(length))
                assert torch.equal(scores_of(parts)[1], stream.run.probes["p"])
    del runs, run, stream, plain, whole
    assert counts(lm) == before


@BOTH
def test_what_never_fires_is_a_plain_run(narrow, engine):
    """So does a condition that only the prompt fulfils, or only the last token, which is never an input."""
    lm = narrow.get(engine, "float32")
    plain = lm.run(PROMPTS[0], capture=probe(), **FREE)
    scores, length = plain.probes["p"][:, 0], len(plain.prompt_token_ids)
    highest = float(scores[length : length + 11].max()) + 0.1
    assert bool((scores[:length] > highest).any())
    for condition, max_tokens in ((probe() > 1e9, 24), (probe() > highest, 12), (probe() > -1e9, 1)):
        run = lm.run(PROMPTS[0], stop_when=condition, **{**FREE, "max_tokens": max_tokens})
        assert (run.token_ids, run.finish_reason) == (plain.token_ids[:max_tokens], "length")
        assert run.stop_reason is None
        assert len(run.probe_positions("p")) == length + max_tokens - 1
    run = lm.run(PROMPTS[0], stop_when=probe() > -1e9, **FREE)  # fires at once: after one token
    assert run.token_ids == plain.token_ids[:1]


@BOTH
def test_joined_conditions_name_the_probe_that_decided(narrow, engine):
    lm = narrow.get(engine, "float32")
    q = pc.Probe(WEIGHT[::-1] / 50, at=pc.resid_post[5], activation="softmax", name="q")
    plain = lm.run(PROMPTS[0], capture=[probe(), q], **FREE)
    length = len(plain.prompt_token_ids)
    p_scores, q_scores = (plain.probes[name][length:].numpy() for name in "pq")
    high, q_high = (float(np.sort(of)[9:11].mean()) for of in (p_scores[:, 0], q_scores[:, 1]))
    p_holds, q_holds = p_scores[:, 0] > high, q_scores[:, 1] > q_high
    cases = {
        "and": ((probe() > high) & (q[1] > q_high), p_holds & q_holds),
        "or": ((q[1] > q_high) | (probe() > high), p_holds | q_holds),
        "neither": (~(q[1] > q_high) & (probe() <= high), ~p_holds & ~q_holds),
    }
    for name, (condition, holds) in cases.items():
        token = int(np.flatnonzero(holds)[0])
        expected = {"and": "p", "neither": "q", "or": "q" if q_holds[token] else "p"}[name]
        run = lm.run(PROMPTS[0], stop_when=condition, **FREE)
        assert (run.token_ids, run.stop_reason) == (plain.token_ids[: token + 1], f"probe:{expected}")


@BOTH
def test_samples_and_steered_runs_end_where_they_fire(narrow, engine):
    lm = narrow.get(engine, "float32")
    call = {"n": 4, "temperature": 1.0, "max_tokens": 16, "sampling": {"seed": 5, "ignore_eos": True}}
    call["edits"] = [pc.Add(push(lm), at=pc.resid_post[2], tokens=pc.generated)]
    plain = lm.run(PROMPTS[0], capture=probe(), **call)
    scores = [run.probes["p"][len(run.prompt_token_ids) :, 0] for run in plain]
    threshold = float(torch.cat(scores).quantile(0.85))
    expected = [next((i + 1 for i, score in enumerate(of.tolist()) if score > threshold), 16) for of in scores]
    assert len(set(expected)) > 1
    runs = lm.run(PROMPTS[0], stop_when=probe() > threshold, **call)
    assert [run.token_ids for run in runs] == [
        run.token_ids[:count] for run, count in zip(plain, expected, strict=True)
    ]
    again = asyncio.run(lm.arun(PROMPTS[0], stop_when=probe() > threshold, **call))
    assert [run.token_ids for run in again] == [run.token_ids for run in runs]


@BOTH
def test_the_engine_stops_computing(narrow, engine):
    """Long before `max_tokens`, and others go on; a run that ended keeps its captures, which programs read."""
    lm, at, before = narrow.get(engine, "float32"), pc.resid_post[6], counts(narrow.get(engine, "float32"))
    planned = lm.engine.status()["steps_planned"]
    run = lm.run(PROMPTS[0], stop_when=probe() > -1e9, capture=at, **LONG)
    assert lm.engine.status()["steps_planned"] - planned < 100
    assert len(run.token_ids) == 1
    patched = lm.run([*run.prompt_token_ids, *run.token_ids], edits=[pc.Replace(pc.From(run, at), at=at)], max_tokens=1)
    assert patched.error is None
    with lm.stream(PROMPTS[0], stop_when=probe() > 1e9, **LONG) as stream:
        next(stream)
    del run, patched, stream
    assert counts(lm) == before


@BOTH
def test_each_look_reads_the_scores_since_the_last_one(narrow, engine, monkeypatch):
    lm, rows = narrow.get(engine, "float32"), []
    fetch = lm.engine.fetch_many

    def fetch_many(wanted):
        captured = fetch(wanted)
        rows.append(sum(len(positions) for positions, _ in captured))
        return captured

    monkeypatch.setattr(lm.engine, "fetch_many", fetch_many)
    for call in (lm.run, lambda *args, **options: list(lm.stream(*args, **options))):
        rows.clear()
        call(PROMPTS[0], stop_when=probe() > 1e9, **{**FREE, "max_tokens": 32})
        assert sum(rows) <= len(lm.tokens(PROMPTS[0])) + 3 * 32  # a step may compute a token that was not read yet
    rows.clear()
    read = lm.engine.lens_many

    def lens_many(wanted, *lens):
        found = read(wanted, *lens)
        rows.append(sum(len(positions) for positions, *_ in found))
        return found

    monkeypatch.setattr(lm.engine, "lens_many", lens_many)
    lenses = [pc.Lens(pc.resid_post[5]), pc.Lens(pc.resid_post[6] @ pc.prompt[-1], top=2)]
    list(lm.stream(PROMPTS[0], capture=lenses, **{**FREE, "max_tokens": 32}))
    assert sum(rows) <= len(lm.tokens(PROMPTS[0])) + 1 + 3 * 32
    assert len(rows) <= 32 + 1  # the prompt's lens is read once


def test_a_run_that_never_fires_keeps_no_other_one_waiting(narrow):
    """Where asyncio's own pool has one thread."""
    lm = narrow.get("vllm", "float32")

    async def first() -> pc.Run:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        slow = asyncio.ensure_future(lm.arun(PROMPTS[0], stop_when=probe() > 1e9, **LONG))
        await asyncio.sleep(0)
        run = await lm.arun(PROMPTS[1], stop_when=probe() > -1e9, **LONG)
        parts = [part async for part in lm.stream(PROMPTS[0], stop_when=probe() > -1e9, **LONG)]
        assert len(parts) == 1
        assert not slow.done()
        slow.cancel()
        return run

    assert len(asyncio.run(first()).token_ids) == 1


@BOTH
def test_failed_and_cancelled_runs_leave_nothing_behind(narrow, engine):
    lm, before = narrow.get(engine, "float32"), counts(narrow.get(engine, "float32"))
    hot = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[3], tokens=pc.generated, scale=1e30)]
    for call in (lm.run, lambda *args, **options: list(lm.stream(*args, **options))):
        with pytest.raises(pc.RunError, match="not finite"):
            call(PROMPTS[0], edits=hot, stop_when=probe() > 1e9, max_tokens=4)
    runs = lm.run(PROMPTS, edits=[hot, [], []], stop_when=[probe() > 1e9, probe() > -1e9, None], max_tokens=4)
    assert [(run.error is None) and len(run.token_ids) for run in runs] == [False, 1, 4]

    async def cancelled() -> None:
        with contextlib.suppress(TimeoutError):
            # on Transformers it runs to its end
            await asyncio.wait_for(lm.arun(PROMPTS[0], stop_when=probe() > 1e9, **{**LONG, "max_tokens": 100}), 0.1)
        async for part in lm.stream(PROMPTS[0], stop_when=probe() > 1e9, **LONG):
            assert part.scores["p"].positions
            break

    asyncio.run(cancelled())
    del runs
    assert counts(lm) == before


@BOTH
def test_concurrent_streams_have_their_own_scores(narrow, engine):
    lm = narrow.get(engine, "float32")
    thresholds = [threshold_of(run, records(run)[-1]) for run in lm.run(TEXTS, capture=probe(), **FREE)]
    alone = [lm.run(text, stop_when=probe() > t, **FREE) for text, t in zip(TEXTS, thresholds, strict=True)]

    async def one(text: str, threshold: float) -> tuple[list[pc.Part], pc.Run]:
        stream = lm.stream(text, stop_when=probe() > threshold, **FREE)
        return [part async for part in stream], stream.run

    async def together() -> list[tuple[list[pc.Part], pc.Run]]:
        return await asyncio.gather(*map(one, TEXTS, thresholds))

    for (parts, run), single in zip(asyncio.run(together()), alone, strict=True):
        assert run.token_ids == single.token_ids
        assert torch.equal(scores_of(parts)[1], run.probes["p"])


def test_conditions_that_cannot_be_decided_are_refused(narrow):
    lm, p = narrow.get("transformers", "float32"), probe()
    cases = [
        (probe(pool="max") > 1, pc.ProgramError, "stop_when.pool"),
        (probe(at=pc.resid_post[1:3]) > 1, pc.ProgramError, "stop_when.at"),
        (p[2] > 1, pc.ProgramError, "stop_when"),
        (probe(tokens=pc.prompt) > 1, pc.TokensError, "stop_when"),
        (p, pc.ProgramError, "stop_when"),
        ([p > 1, p > 2], pc.ProgramError, "stop_when"),
        ((p > 1) & (probe(at=pc.resid_post[4]) > 1), pc.ProgramError, "stop_when.name"),
    ]
    for condition, kind, path in cases:
        for run in (lm.run, lm.stream):
            with pytest.raises(kind) as raised:
                run(PROMPTS[0], stop_when=condition)
            assert raised.value.path == path
    with pytest.raises(pc.ProgramError) as raised:
        lm.run(PROMPTS[:2], stop_when=[None, probe(pool="max") > 1])
    assert raised.value.path == "stop_when[1].pool"
