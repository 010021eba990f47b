"""What `pc.Stream` does with parts, an end and a reader; and what of a text may be told before its end."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import threading
from concurrent.futures import Future
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines.base import Answer, Request
from patchclamp.engines.generation import OutputWriter
from patchclamp.engines.tokenizer import HubTokenizer, NoTokenizer
from tests.reference import spelling

PROMPT = "The Eiffel Tower is in"


class Scripted:
    """An engine that does what a test says."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.futures: list[Future[Answer]] = []
        self.aborted: list[str] = []
        self.released: list[str] = []

    def submit(self, requests):
        self.submitted += requests
        self.futures += [Future() for _ in requests]
        return self.futures[-len(requests) :]

    def abort(self, runs):
        self.aborted += runs

    def release(self, runs):
        self.released += runs

    def say(self, *texts: str) -> None:
        for text in texts:
            self.submitted[-1].listener(part(text))

    def end(self, answer: Answer | Exception) -> None:
        settle = self.futures[-1].set_exception if isinstance(answer, Exception) else self.futures[-1].set_result
        settle(answer)


def part(text: str) -> pc.Part:
    return pc.Part(text, [1], [-0.5])


ANSWER = Answer([1, 1], "ab", [-0.5, -0.5], {}, "length")


def made(answer):
    if isinstance(answer, pc.PatchclampError):
        raise answer
    return answer


@pytest.fixture
def engine():
    return Scripted()


@pytest.fixture
def stream(engine):
    return pc.Stream(engine, Request("r", [1], 2), made, made)


# -- on the fake engine


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_parts_are_the_run(chunk):
    lm = pc.LM("fake", prove=False, chunk=chunk)
    source = lm.run("The Colosseum is in the", max_tokens=2, capture=pc.resid_mid, logprobs=True)
    for call in (
        {},
        {"max_tokens": 1},
        {"score": [5, 9], "capture": [pc.resid_post, pc.logits]},
        {"edits": [pc.Add([1.0] * 16, at=pc.resid_pre[1], tokens=pc.generated), pc.Zero(pc.attn_out[1])],
         "capture": pc.embed, "max_tokens": 9},
        {"edits": [pc.Replace(pc.From(source, "resid_mid[1]", pc.prompt[-1]), at=pc.resid_mid[2], tokens="prompt[-1]")]},
        {"sampling": [{"ignore_eos": True, "extra_args": {"fuzz_strength": 0.2}}]},
    ):  # fmt: skip
        run, stream = lm.run(PROMPT, **call, logprobs=True), lm.stream(PROMPT, **call, logprobs=True)
        parts = list(stream)
        assert [one.token_ids for one in parts] == [[token] for token in run.token_ids]
        assert [number for one in parts for number in one.logprobs] == run.logprobs == stream.run.logprobs
        assert "".join(one.text for one in parts) == run.text == stream.run.text
        assert stream.run.token_ids == run.token_ids
        assert stream.run.scores == run.scores
        assert stream.run.sites == run.sites
        for site in run.sites:
            assert stream.run.positions(site) == run.positions(site)
            assert stream.run[site].tobytes() == run[site].tobytes()
        assert list(stream) == []


def test_parts_can_be_awaited_and_a_chat_streams_too():
    lm, messages = pc.LM("fake", prove=False), [{"role": "user", "content": "hello"}]

    async def read() -> tuple[str, pc.Run]:
        async with lm.stream(messages=messages, max_tokens=4) as stream:
            text = "".join([one.text async for one in stream])
        return text, stream.run

    text, run = asyncio.run(read())
    assert text == run.text == lm.run(messages=messages, max_tokens=4).text


def test_a_streamed_run_is_a_source():
    lm = pc.LM("fake", prove=False)
    stream = lm.stream(PROMPT, max_tokens=2, capture=pc.resid_post, logprobs=True)
    *_, last = stream
    patched = lm.run(PROMPT, max_tokens=2, edits=pc.Replace(pc.From(stream.run), at=pc.resid_post[1]), logprobs=True)
    assert patched.logprobs == stream.run.logprobs
    assert patched.logprobs[-1:] == last.logprobs


@pytest.mark.parametrize(("call", "text"), [
    ({"prompt": [PROMPT]}, "prompt: expected one prompt, got a list"),
    ({"messages": [[{"role": "user", "content": "a"}]]}, "messages: expected one prompt, got a list"),
    ({"prompt": PROMPT, "sampling": {"n": 0}}, "sampling.n: expected an integer from 1 to"),
    ({"prompt": PROMPT, "edits": pc.Zero("resid_post[9]")}, "edits[0].at: resid_post[9]: layer is out of range"),
    ({"prompt": PROMPT, "sampling": {"top_q": 1}}, "sampling.top_q: unknown sampling parameter"),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens: expected at least 1 token, got 0"),
    ({}, "expected either prompt or messages"),
])  # fmt: skip
def test_what_is_wrong_with_a_call_is_raised_by_it(call, text):
    with pytest.raises(pc.PatchclampError) as caught:
        pc.LM("fake", prove=False).stream(**call)
    assert str(caught.value).startswith(text)


def test_only_one_run_of_a_prompt_is_streamed(monkeypatch):
    lm = pc.LM("fake", prove=False)
    monkeypatch.setattr(lm.engine, "check_sampling", lambda sampling: None)
    with pytest.raises(pc.ProgramError, match=r"^sampling\.n: expected one sample"):
        lm.stream(PROMPT, sampling={"n": 3, "temperature": 1.0})


def test_a_failed_run_raises_where_the_next_part_would_come_and_leaves_nothing(monkeypatch):
    lm = pc.LM("fake", prove=False)
    forward, steps = lm.engine._net.forward, iter(range(3))
    monkeypatch.setattr(lm.engine._net, "forward", lambda *given: forward(*given) if next(steps) < 2 else 1 / 0)
    stream = lm.stream(PROMPT, max_tokens=5, capture=pc.embed)
    seen = []
    with pytest.raises(pc.RunError, match="ZeroDivisionError"):
        seen.extend(stream)  # what was there before the error is kept
    with pytest.raises(pc.RunError, match="ZeroDivisionError"):
        stream.run  # noqa: B018
    assert list(stream) == []
    assert not lm.engine._captured


def test_streams_that_are_given_up_leave_nothing_behind():
    lm = pc.LM("fake", prove=False)
    held = []
    for give_up in (lambda s: s.close(), lambda s: asyncio.run(s.aclose()), lambda s: None):
        stream = lm.stream(PROMPT, max_tokens=4, capture=pc.embed)
        next(stream)
        give_up(stream)
        del stream
        assert lm.engine.status()["runs"] == 0
    with lm.stream(PROMPT, max_tokens=4, capture=pc.embed) as stream:
        held.append(next(stream))
    assert lm.engine.status()["runs"] == 0
    for one in lm.stream(PROMPT, max_tokens=4, capture=pc.embed):
        held.append(one)
        break
    assert lm.engine.status()["runs"] == 0
    with lm.stream(PROMPT, max_tokens=4, capture=pc.embed) as stream:
        held.extend(stream)
    stream.close()
    assert stream.run["embed"].shape == (9, 16)  # it has ended: closing a stream closes no run
    assert lm.engine.status()["runs"] == 1
    del stream
    assert lm.engine.status()["runs"] == 0
    assert len(held) == 6


def test_a_closed_engine_says_so():
    lm = pc.LM("fake", prove=False)
    stream = lm.stream(PROMPT, max_tokens=2)
    lm.close()
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        lm.stream(PROMPT)
    assert len(list(stream)) == 2


# -- on an engine that does what a test says


def test_parts_come_as_they_are_made_and_the_run_after_the_last(engine, stream):
    engine.say("a")
    assert next(stream).text == "a"
    assert repr(stream) == "<Stream r: under way>"
    with pytest.raises(pc.ProgramError, match="not ended"):
        stream.run  # noqa: B018
    engine.say("b")
    engine.end(ANSWER)
    with pytest.raises(pc.ProgramError, match="the stream has not ended"):
        stream.run  # noqa: B018
    assert [one.text for one in stream] == ["b"]
    assert stream.run is ANSWER
    assert (engine.aborted, engine.released) == ([], [])


def test_an_error_comes_after_the_parts(engine, stream):
    engine.say("a")
    engine.end(pc.RunError("it broke"))
    assert next(stream).text == "a"
    with pytest.raises(pc.RunError, match="it broke"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert "it broke" in repr(stream)


def test_an_error_that_is_not_ours_is_told(engine, stream):
    engine.end(ValueError("odd"))
    with pytest.raises(pc.RunError, match="ValueError: odd"):
        next(stream)


def test_a_closed_stream_gives_nothing_more(engine, stream):
    engine.say("a", "b", "c")
    assert next(stream).text == "a"
    stream.close()
    stream.close()
    assert engine.submitted[0].abandoned
    assert engine.aborted == ["r"]
    engine.say("d")
    engine.end(pc.EngineError("the run was aborted"))
    for _ in range(6):
        assert list(stream) == []
    assert asyncio.run(anext(stream, None)) is None
    with pytest.raises(pc.ProgramError, match="closed"):
        stream.run  # noqa: B018
    assert repr(stream) == "<Stream r: closed>"
    assert engine.released == []


def test_a_reader_in_another_thread_is_told_of_the_closing(engine, stream):
    read = []
    thread = threading.Thread(target=lambda: read.extend(stream))
    thread.start()
    engine.say("a")
    stream.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(read) <= 1


def test_a_dropped_stream_waits_for_nothing(engine):
    """The collector may run anywhere: the engine is only told to let go, which takes no lock."""
    alone = pc.Stream(engine, Request("alone", [1], 2), made, made)
    engine.say("a")
    assert next(alone).text == "a"
    del alone
    assert (engine.aborted, engine.released) == ([], ["alone"])
    assert engine.submitted[-1].abandoned
    engine.say("b")
    engine.end(ANSWER)
    circular = [pc.Stream(engine, Request("circular", [1], 2), made, made)]
    circular.append(circular)
    del circular
    gc.collect()
    assert engine.released == ["alone", "circular"]


def test_a_cancelled_reader_stops_the_run(engine, stream):
    async def go() -> None:
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert engine.aborted == ["r"]
    engine.say("late")  # the loop is closed, and nobody listens
    engine.end(ANSWER)
    assert list(stream) == []


def test_an_interrupted_reader_stops_the_run(engine, stream, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(stream._mailbox, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert engine.aborted == ["r"]


def test_an_engine_that_was_closed_meanwhile_is_no_trouble(engine, stream):
    def abort(runs):
        raise pc.EngineError("the engine is closed")

    engine.abort = abort
    stream.close()
    assert list(stream) == []


def test_awaited_parts_come_from_another_thread_in_order(engine, stream):
    texts = [str(i) for i in range(2000)]

    def work() -> None:
        engine.say(*texts)
        engine.end(ANSWER)

    async def read() -> list[str]:
        thread = threading.Thread(target=work)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # it waits
        thread.start()
        found = [(await first).text] + [one.text async for one in stream]
        thread.join()
        return found

    assert asyncio.run(read()) == texts
    assert stream.run is ANSWER


def test_several_readers_share_the_parts_and_all_see_the_end(engine, stream):
    async def all_of() -> list[str]:
        return [one.text async for one in stream]

    async def read() -> list[list[str]]:
        readers = [asyncio.create_task(all_of()) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Thread(target=lambda: (engine.say(*"abcdef"), engine.end(ANSWER))).start()
        return await asyncio.wait_for(asyncio.gather(*readers), 10)

    assert sorted("".join(map("".join, asyncio.run(read())))) == list("abcdef")
    threads = [threading.Thread(target=lambda: list(stream)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_stream_is_not_copied(stream):
    with pytest.raises(pc.ProgramError, match="a Stream belongs to its engine"):
        copy.copy(stream)


# -- what may be told of a text before its end


class Bytes:
    """A byte-level tokenizer: id i is byte i, 256 is special."""

    all_special_ids = (256,)
    clean_up_tokenization_spaces = False

    def convert_ids_to_tokens(self, token):
        return None if token > 256 else f"byte {token}"

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Falling(Bytes):
    """As SentencePiece vocabularies that fall back on bytes: one that is wrong spoils all in its row."""

    def convert_ids_to_tokens(self, token):
        return f"<0x{token:02X}>" if 127 < token < 256 else chr(token)

    def decode(self, ids, skip_special_tokens=True):
        text, row = "", b""
        for i in [*[i for i in ids if i < 256], None]:
            if i is not None and i > 127:
                row += bytes([i])
                continue
            try:
                text += row.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(row)
            text, row = text + ("" if i is None else chr(i)), b""
        return text


class Tidying(Bytes):
    clean_up_tokenization_spaces = True

    def decode(self, ids, skip_special_tokens=True):
        text = super().decode(ids)
        for spaced in (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"):
            text = text.replace(spaced, spaced[1:])
        return text


any_ids = st.one_of(
    st.lists(st.integers(0, 256), max_size=12),
    st.text("aé😀 .,'nst", max_size=8).map(lambda text: list(text.encode())),
    st.text("é😀", max_size=8).flatmap(lambda text: st.integers(0, 9).map(lambda n: [*text.encode()[:n], 256, 97])),
)


@pytest.mark.parametrize("inner", [Bytes(), Falling(), Tidying()])
@given(ids=any_ids)
def test_settled_text_is_never_taken_back(inner, ids):
    tokenizer = HubTokenizer(inner)
    whole, told = tokenizer.decode(ids), ""
    for n in range(len(ids) + 1):
        text = tokenizer.settled(ids[:n])
        told = text if text.startswith(told) else told
        assert whole.startswith(text)
    assert whole.startswith(told)


def test_settled_text_keeps_back_only_what_it_must():
    plain, falling = HubTokenizer(Bytes()), HubTokenizer(Falling())
    ids = list("a😀b".encode())
    assert [plain.settled(ids[:n]) for n in range(7)] == ["", "a", "a", "a", "a", "a😀", "a😀b"]
    assert [falling.settled(ids[:n]) for n in range(7)] == ["", "a", "a", "a", "a", "a", "a😀b"]
    assert HubTokenizer(Tidying()).settled(list(b"it is .")) == "it"
    assert NoTokenizer().settled([1, 2]) == ""
    assert plain.settled([97, 300]) == "a"  # beyond a vocabulary that is padded


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("inner_class", [Bytes, Falling])
@given(text=st.text("aé😀 �", max_size=8))
def test_every_token_of_a_character_overlaps_it(inner_class, replace, text):
    """One token a byte: each has the character of its byte. ByT5 leaves out what it cannot decode."""

    class Slow(inner_class):
        is_fast = False

        def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
            full = super().decode(ids)
            return full if replace else bytes(ids).decode("utf-8", "ignore")

    expected = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    assert HubTokenizer(Slow()).spell(list(text.encode()), text) == (text, expected)


class Spelling:
    """A tokenizer without offsets that counts the tokens it decodes."""

    is_fast, all_special_ids, decoded = False, (256,), 0

    def __init__(self, inner, replace=True):
        self.inner, self.replace, self.convert_ids_to_tokens = inner, replace, inner.convert_ids_to_tokens

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        self.decoded += len(ids)
        return self.inner.decode(ids) if self.replace else bytes(i for i in ids if i < 256).decode("utf-8", "ignore")


@pytest.mark.parametrize("inner", [Spelling(Bytes()), Spelling(Falling()), Spelling(Bytes(), replace=False)])
@given(ids=st.lists(any_ids, max_size=30).map(lambda parts: [*chain.from_iterable(parts)]))
def test_tokens_lie_where_every_prefix_and_suffix_says(inner, ids):
    assert HubTokenizer(inner).spell(ids, None) == spelling.spell(inner.decode, ids)


@pytest.mark.parametrize("inner", [Spelling(Bytes()), Spelling(Falling()), Spelling(Bytes(), replace=False)])
@pytest.mark.parametrize("text", ["😀" * 4 + "é", "é" * 40, "😀" * 12 + "é" + "😀" * 12, " é" * 20, "😀 " * 9])
def test_tokens_of_a_repeated_character_lie_where_they_are(inner, text):
    ids = list(text.encode())
    assert HubTokenizer(inner).spell(ids, None) == spelling.spell(inner.decode, ids)


@pytest.mark.parametrize("inner", [Bytes(), Falling()])
def test_spelling_decodes_a_long_prompt_piece_by_piece(inner):
    draw, counted = random.Random(0), Spelling(inner)
    texts = ["".join(draw.choice(letters) for _ in range(2000)) for letters in ("aé😀 .�界", "é😀界")]
    for text in texts:
        check_spelling(HubTokenizer(counted), text)
    assert counted.decoded < 200 * len("".join(texts).encode())
    with pytest.raises(pc.TokensError, match="decode"):
        HubTokenizer(counted).spell([0xF0] * 3000, None)


def check_spelling(tokenizer, expected):
    text, offsets = tokenizer.spell(list(expected.encode()), None)
    assert text == expected
    assert [begin for begin, _ in offsets] == [i for i, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize("inner", [Bytes(), Falling()])
@pytest.mark.parametrize(
    ("text", "expected"), [("a😀", "a😀"), (b"a\xf0\x9f\x98", "a"), ("a�b", "a�b"), (b"a\xf0b\xf0", "a�b")]
)
def test_text_and_stream_end_with_the_last_whole_character_as_on_vllm(inner, text, expected):
    """The expected texts are vLLM's detokenizer's."""
    ids, parts = list(text.encode() if isinstance(text, str) else text), []
    request = Request("r", [1], max_tokens=len(ids), listener=parts.append)
    writer = OutputWriter(request, HubTokenizer(inner), set())
    for token in ids:
        writer.take(token, [], None)
    answer = writer.answer(None)
    assert answer.text() == "".join(part.text for part in parts) == expected


@given(text=st.text("abc", max_size=12), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_that_may_become_a_stop_text_is_kept_back(text, stop):
    from patchclamp.engines.generation import Sampler

    sampler, told = Sampler({"stop": stop}, set()), ""
    for n in range(len(text) + 1):
        if any(word in text[:n] for word in stop):
            break
        assert sampler.safe(text[:n]).startswith(told)
        told = sampler.safe(text[:n])
        longest = max(map(len, stop), default=1)
        assert n - len(told) < longest
    assert sampler.cut(text).startswith(told)
