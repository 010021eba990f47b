"""Captures that are sent as they are read: the same file as made at once, and little of it is held at a time."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import weakref

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines import wire
from patchclamp.errors import Gone
from patchclamp.serve import capture_files
from patchclamp.serve.capture_files import captured_file, file_of
from patchclamp.store.captures import StoredRows

LM = pc.LM("fake", prove=False)
PROMPT = [5, 6, 7, 8] * 12
HALF = "bfloat16"
CAPTURES = {
    "all": [pc.resid_post],
    "some": [pc.resid_post[0] @ pc.prompt[3::5], pc.mlp_out[1] @ pc.generated],
    "heads": [pc.z[0, 1], pc.z[1], pc.neurons[1, 2:5]],
    "dtypes": [pc.Capture(pc.embed, dtype=HALF), pc.attn_out[0], pc.Capture(pc.mlp_out, dtype="float16")],
    "by token": [pc.embed @ pc.token(6), pc.resid_post[1] @ pc.token(7, 8)],
    "twice": [pc.embed @ pc.prompt[:20], pc.Capture(pc.embed, pc.prompt[10:], dtype=HALF)],
    "twice by token": [pc.embed @ pc.prompt[:20], pc.embed @ pc.token(6), pc.embed @ pc.token(8)],
    "none": [pc.embed @ pc.token(63)],
}


class Reading:
    """The engine's part: it gives rows, and counts the bytes of those that somebody still holds."""

    def __init__(self) -> None:
        self.held = self.peak = self.calls = 0

    async def fetch(self, windows):
        self.calls += 1
        captured = LM.engine.fetch_many([each[:3] for each in windows])
        return [
            (positions[begin:end], self._counted(rows[begin:end]))
            for (positions, rows), (*_, begin, end) in zip(captured, windows, strict=True)
        ]

    def _counted(self, rows) -> torch.Tensor:
        array = np.array(torch.as_tensor(rows).float())
        self.held += array.nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(array, self._gone, array.nbytes)
        return torch.from_numpy(array).to(torch.as_tensor(rows).dtype)

    def _gone(self, size: int) -> None:
        self.held -= size


async def joined(parts) -> bytes:
    return b"".join([bytes(part) async for part in parts])


@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 22])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_file_that_is_sent_as_it_is_read_is_the_file(monkeypatch, capture, part_bytes):
    monkeypatch.setattr(capture_files, "PART_BYTES", part_bytes)
    run = LM.run(PROMPT, max_tokens=6, edits=[pc.Capture(pc.embed)], capture=CAPTURES[capture])
    file, reading = file_of(run), Reading()
    data = asyncio.run(joined(file.parts(reading.fetch)))
    assert data == captured_file(run)
    assert len(data) == file.size
    tensors = safetensors.torch.load(data)
    assert len(tensors) > 1
    for name, rows in tensors.items():
        expected = torch.as_tensor(run["edits[0]" if name.startswith("edits") else name])
        assert rows.dtype == expected.dtype
        assert torch.equal(rows, expected)
    assert (reading.calls == 1) == (part_bytes == 1 << 22)


def test_what_is_held_does_not_grow_with_the_file(monkeypatch):
    monkeypatch.setattr(capture_files, "PART_BYTES", 4096)
    peaks = {}
    for times in (5, 25):
        run = LM.run(PROMPT[:4] * times, max_tokens=1, capture=[pc.resid_post, pc.mlp_out])
        reading = Reading()
        size = len(asyncio.run(joined(file_of(run).parts(reading.fetch))))
        peaks[size] = reading.peak
    assert max(peaks) > 4 * min(peaks) > 8 * 4096
    assert max(peaks.values()) <= 3 * 4096  # two parts, and rows of a third that are about to go


def test_what_is_gone_is_said_before_anything_is_sent_and_ends_it_later(monkeypatch):
    monkeypatch.setattr(capture_files, "PART_BYTES", 512)
    run, reading, told, sent = LM.run(PROMPT, max_tokens=1, capture=[pc.resid_post]), Reading(), [], []

    async def fetch(windows):
        if reading.calls == last:
            raise Gone("it was deleted")
        return await reading.fetch(windows)

    async def send(message) -> None:
        sent.append(message)

    async def go() -> None:
        response = await capture_files.answer(file_of(run), fetch, told.append)
        await response.stream_response(send)

    last = 0
    with pytest.raises(Gone):
        asyncio.run(go())
    assert (told, sent) == ([], [])
    last = 3
    asyncio.run(go())
    assert [type(error) for error in told] == [Gone]
    assert sent[0]["headers"][0][1] == str(file_of(run).size).encode()
    assert all(message["more_body"] for message in sent[1:])  # it never says that this was all
    assert 0 < sum(len(message["body"]) for message in sent[1:]) < file_of(run).size


@given(st.data())
def test_a_window_of_stored_rows_is_these_rows(data):
    steps, counts, width = (
        data.draw(st.integers(1, 4)),
        data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        3,
    )
    parts = [np.arange(steps * count * width * 4, dtype=np.uint8).reshape(steps, -1) for count in counts]
    rows = steps * sum(counts)
    stored = StoredRows(np.arange(rows), parts, torch.float32, width)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, rows + 2), st.integers(0, rows + 2))))
    window = stored.window(begin, end)
    flat = np.concatenate([part.reshape(-1) for part in parts]).reshape(rows, -1)
    assert b"".join(part.tobytes() for part in window.parts) == flat[begin:end].tobytes()
    assert window.positions.tolist() == list(range(rows))[begin:end]
    memory = np.zeros(window.nbytes, np.uint8)
    for to, part in window.copies(memory):
        to[...] = part
    assert memory.tobytes() == flat[begin:end].tobytes()


def answer(count: int, rows: int) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """A server's answer in pieces, and what is in it."""
    rng = np.random.default_rng(0)
    tensors = {f"{i} positions": np.arange(rows) for i in range(count)}
    tensors |= {f"{i} rows": rng.standard_normal((rows, 64)).astype(np.float32) for i in range(count)}
    data = safetensors.numpy.save(tensors)
    sizes = rng.choice([1, 7, 1 << 16], 100_000)
    ends = np.minimum(np.cumsum(sizes), len(data))
    return [
        data[begin:end] for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False) if end > begin
    ], tensors


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_the_client_holds_what_arrives_once(rows):
    taken(b"".join(answer(1, 1)[0]))  # what is imported and made once
    pieces, tensors = answer(4, rows)
    file = wire.CapturedFile(4)
    tracemalloc.start()
    try:
        for piece in pieces:
            file.feed(piece)
        captured = file.captured()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for i, (positions, there) in enumerate(captured):
        assert np.array_equal(positions, tensors[f"{i} positions"])
        assert np.array_equal(there.numpy(), tensors[f"{i} rows"])
    assert peak < sum(array.nbytes for array in tensors.values()) + (1 << 18)


def test_an_answer_that_is_none_is_an_error():
    pieces, _ = answer(1, 5)
    data = b"".join(pieces)
    for fed, text in ((data[:-1], "truncated"), (data[:20], "truncated"), (b"", "truncated"), (data + b"x", "more bytes"),
                      (safetensors.numpy.save({"x": np.ones(2)}), "do not match"),
                      (b"\x05\0\0\0\0\0\0\0nojsn", "do not match")):  # fmt: skip
        with pytest.raises(pc.EngineError, match=text):
            taken(fed)


def taken(data: bytes) -> list:
    file = wire.CapturedFile(1)
    file.feed(data)
    return file.captured()


def test_a_line_of_a_stream_is_never_too_long():
    data = {"runs": [{"tokens": ["a\nb"] * 100_000, "captures": "x" * (capture_files.MAX_LINE - 1024)}]}
    for each in (data, {"a": 1}):
        lines = capture_files.data_event(each).removesuffix("\n\n").split("\n")
        assert max(map(len, lines)) < capture_files.MAX_LINE
        assert all(line.startswith("data: ") for line in lines)
        assert json.loads("\n".join(line[6:] for line in lines)) == each
