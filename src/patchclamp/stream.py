"""`pc.Stream`: the output of a run, part by part as it is generated."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import queue
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from patchclamp.engines.base import Answer, Engine, Part, Request
from patchclamp.errors import EngineError, PatchclampError, ProgramError, as_patchclamp_error
from patchclamp.run import Run


class Stream:
    """The output of one run as it is generated: `for part in stream`, or `async for`, yields each `Part`.

    Joined, the parts equal the output of `lm.run`. After the last one, `stream.run` is the `Run` with its captures.
    Before that, `stream.so_far` is the run up to the parts read, with its captures by then.
    An error of the run is raised in place of the next part. One detected only at the end, such as non-finite edits on
    vLLM, is raised after parts that were already read.

    The run stops and its memory is freed if the stream is closed, left by its `with` or `async with`, or
    garbage-collected, or if its reader is cancelled. After the end, the run is kept until it is dropped or closed.
    """

    def __init__(
        self, engine: Engine, request: Request, make_run: Callable[[Answer | PatchclampError], Run],
        look_at: Callable[[Answer], Run],
    ) -> None:  # fmt: skip
        self._engine, self._key = engine, request.run
        self._look_at: Callable[[Answer], Run] | None = look_at
        self._has_logprobs, self._parts = request.logprobs is not None, list[Part]()
        self._make_run: Callable[[Answer | PatchclampError], Run] | None = make_run
        self._mailbox = request.listener = mailbox = _Mailbox()
        self._run: Run | None = None
        self._error: PatchclampError | None = None
        self._unread = weakref.finalize(self, _drop, mailbox, engine, request.run)  # alive until the end is read
        self._unread.atexit = False
        [future] = engine.submit([request])
        future.add_done_callback(mailbox.end)

    @property
    def run(self) -> Run:
        """The run, once the last part was read. Raises its error if it failed, and `ProgramError` before the end."""
        if self._error is not None:
            raise self._error
        if self._run is None:
            raise ProgramError(
                "the stream has not ended: read its parts to the last one, then take its run"
                if self._unread.alive
                else "the stream was closed before its end, so there is no run"
            )
        return self._run

    @property
    def so_far(self) -> Run:
        """The run up to the parts read, with its captures by then; after the last part, `run`. Each access returns a
        new object, whose captures can be read until the stream ends. Programs cannot use it in `From`. Raises
        `ProgramError` before the first part and after `close`."""
        if not self._unread.alive:
            return self.run
        if not self._parts:
            raise ProgramError("no part of the stream was read yet: what it captured comes with the first one")
        token_ids = [token for part in self._parts for token in part.token_ids]
        logprobs = [each for part in self._parts for each in part.logprobs] if self._has_logprobs else None
        assert self._look_at is not None
        return self._look_at(Answer(token_ids, "".join(part.text for part in self._parts), logprobs, {}, None))

    def close(self) -> None:
        """Stops the run and frees its memory. No effect after the end of the stream."""
        if self._unread.detach() is None:
            return
        self._mailbox.closed = True
        self._mailbox.post(EngineError("the stream was closed"))  # wakes a reader in another thread
        with contextlib.suppress(EngineError):  # the engine is closed and holds no memory
            self._engine.abort([self._key])

    async def aclose(self) -> None:
        """Same as `close`, which does not block."""
        self.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Part:
        try:
            part = self._read(self._mailbox.take())
        except BaseException:  # for example KeyboardInterrupt
            self.close()
            raise
        if part is None:
            raise StopIteration
        return part

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Part:
        try:
            part = self._read(await self._mailbox.awaited())
        except BaseException:  # for example a cancelled task
            self.close()
            raise
        if part is None:
            raise StopAsyncIteration
        return part

    def _read(self, item: Part | Answer | PatchclampError) -> Part | None:
        """A part, or None at the end; raises the run's error, once."""
        if isinstance(item, Part):
            if self._unread.alive:
                self._parts.append(item)
                return item
            return None
        self._mailbox.post(item)  # keep the end for further reads
        if self._unread.detach() is None:
            return None
        make_run, self._make_run, self._look_at = self._make_run, None, None  # they hold vectors
        self._parts.clear()
        assert make_run is not None
        try:
            self._run = make_run(item)
        except PatchclampError as error:
            self._error = error
            raise
        return None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ProgramError("a Stream belongs to its engine and cannot be copied or pickled; take its parts instead")

    def __repr__(self) -> str:
        ended = self._error or self._run
        state = "under way" if self._unread.alive else "closed" if ended is None else repr(ended)
        return f"<Stream {self._key}: {state}>"


class _Mailbox:
    """An unbounded queue from the engine's thread to the reader: parts, then the answer or the run's error."""

    def __init__(self) -> None:
        self.closed = False
        self._items: queue.SimpleQueue[Part | Answer | PatchclampError] = queue.SimpleQueue()
        self._wakers: collections.deque[Callable[[], None]] = collections.deque()

    def __call__(self, part: Part) -> None:
        if not self.closed:
            self.post(part)

    def end(self, future: Future[Answer]) -> None:
        """Posts the answer or the run's error."""
        try:
            self.post(future.result())
        except Exception as error:
            self.post(as_patchclamp_error(error))

    def post(self, item: Part | Answer | PatchclampError) -> None:
        self._items.put(item)
        for _ in range(len(self._wakers)):
            with contextlib.suppress(IndexError):  # another thread took it
                self._wakers.popleft()()

    def take(self) -> Part | Answer | PatchclampError:
        """Blocks until there is an item."""
        return self._items.get()

    async def awaited(self) -> Part | Answer | PatchclampError:
        """The asyncio version of `take`."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._items.get_nowait()
            posted = loop.create_future()
            self._wakers.append(functools.partial(wake, loop, posted))
            if self._items.empty():  # an item posted before the waker would not wake it
                await posted


def wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Completes an asyncio future from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no reader
        loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))


def _drop(mailbox: _Mailbox, engine: Engine, run: str) -> None:
    """Frees a stream that was dropped. The garbage collector calls it, so it must not wait for a lock."""
    mailbox.closed = True
    engine.release([run])
