"""What every study is made of: runs in batches, its result, and the journal from which it is resumed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from patchclamp.engines import base
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import as_file, as_plain
from patchclamp.lm import LM
from patchclamp.plots import Picture, save_page, save_picture
from patchclamp.run import Run
from patchclamp.store.journal import Journal


@contextmanager
def progress(what: str, total: int, show: bool | None, unit: str = "cells") -> Iterator[Callable[[int], None]]:
    """Yields a function that advances the bar; `show` None shows it where standard error is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)


WEIGHTS = (".safetensors", ".bin", ".gguf", ".json")
SAMPLED_BYTES = 1 << 16  # at both ends of a file of weights


def model_identity(lm: LM) -> tuple[str, str]:
    """The model's name and, of a folder, the hash of its files: their names, sizes and ends, and config.json. It is the
    same on every machine. Other weights of the same shapes have other ends."""
    folder = Path(lm.model.name)
    if not folder.is_dir():
        return lm.model.name, ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS and path.name != "config.json":
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(_ends(path))
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return folder.name, digest.hexdigest()


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(SAMPLED_BYTES)
        file.seek(max(path.stat().st_size - SAMPLED_BYTES, 0))
        return first + file.read()


FORMAT = "1"


class Provenance(msgspec.Struct, frozen=True):
    """What a result was made with.

    model: hub id or folder · engine: its name and version · dtype: of the weights · patchclamp: its version ·
    settings: of the engine, as far as results depend on them · seeds: those of everything that was drawn
    """

    model: str
    engine: str
    dtype: str
    patchclamp: str
    settings: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Model, engine and dtype for a picture; of a local folder its name, for pictures travel."""
        path = PurePath(self.model)
        return f"{path.name if path.is_absolute() else self.model} · {self.engine} · {self.dtype}"


def provenance(lm: LM, seeds: tuple[int, ...] = ()) -> Provenance:
    """The provenance of what is run on `lm` now."""
    from patchclamp.version import __version__

    model = lm.model
    engine = f"{model.engine} {model.version}"
    return Provenance(model.name, engine, model.dtype, __version__, model.settings, seeds)


class StudyResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The base of studies' results. Their arrays are NumPy's, and all their other fields go through JSON."""

    provenance: Provenance

    def picture(self, *of: Any) -> Picture:
        """The numbers and texts of its picture; some studies let `of` choose what to show."""
        raise NotImplementedError

    def figure(self, *of: Any) -> Any:
        """The picture as an interactive plotly figure."""
        return self.picture(*of).figure()

    def plot(self, path: str | Path, *of: Any) -> Path:
        """Draw the picture into a file with matplotlib: PNG, SVG, PDF, by the extension."""
        return save_picture(self.picture(*of), path)

    def to_html(self, path: str | Path, *of: Any, include_plotlyjs: bool | str = "directory") -> Path:
        """Write an interactive page with the picture and its numbers.

        include_plotlyjs: "directory" writes plotly.min.js beside the page, once for all pages of the folder; True puts
            it into the page, which grows by 5 MB; "cdn" loads it from the web
        """
        return save_page(self.picture(*of), path, include_plotlyjs)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.figure()._repr_html_()

    def save(self, path: str | Path) -> Path:
        """Writes the result into one file, and makes its folder.

        Raises: `ProgramError` if the file cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        tensors: dict[str, np.ndarray] = {}

        def store(value: Any) -> dict[str, str]:
            if not isinstance(value, np.ndarray):
                raise NotImplementedError(f"{type(value).__name__} is no array, and JSON has no such thing")
            name = str(len(tensors))
            tensors[name] = np.ascontiguousarray(value)
            return {"tensor": name}

        fields = msgspec.json.encode(msgspec.to_builtins(self, enc_hook=store)).decode()
        target = Path(as_file(path, "path"))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, target, {"study": type(self).__name__, "format": FORMAT, "result": fields})
            _sort_header(target)
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{path} cannot be written: {error}", "path") from None
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a result that `save` wrote.

        Raises: `ProgramError` if the file is no result of this study, or is broken.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(as_file(path, "path"), "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ProgramError(f"{path} cannot be read as a saved {cls.__name__}: {error}", "path") from None
        if (metadata.get("study"), metadata.get("format")) != (cls.__name__, FORMAT):
            saved = metadata.get("study") or "no study of ours"
            raise ProgramError(f"{path} has {saved} in format {metadata.get('format')}, and no {cls.__name__} in "
                               f"format {FORMAT}", "path")  # fmt: skip

        def restore(kind: type, value: Any) -> Any:
            return tensors[value["tensor"]] if kind is np.ndarray else value

        try:
            return msgspec.convert(msgspec.json.decode(metadata["result"]), cls, dec_hook=restore, str_keys=True)
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ProgramError(f"{path} is no {cls.__name__} that this version can read: {error}", "path") from None


def _sort_header(file: Path) -> None:
    """Sorts what stands in a safetensors file's header, which stays as long: one result is one file, to the byte. The
    library writes metadata in an order that differs from process to process."""
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.encode(msgspec.json.decode(opened.read(length)), order="sorted")
        assert len(header) <= length
        opened.seek(8)
        opened.write(header.ljust(length))


Record = TypeVar("Record")


def hash_of(question: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what decides the values of a study: plain data."""
    return hashlib.sha256(json_of(question).encode()).hexdigest()


def json_of(question: Mapping[str, Any]) -> str:
    """Plain data as JSON, the same text for the same data. Numbers of NumPy are as good as Python's."""
    return msgspec.json.encode(question, enc_hook=_plain, order="deterministic").decode()


def _plain(value: Any) -> Any:
    if (plain := as_plain(value)) is value:
        raise NotImplementedError(f"{type(value).__name__} is not plain data")
    return plain


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """An array as a record has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Stored:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


Resumable = str | Path | Journal
"""Where the values of a study are kept: a file, or a journal of a server."""


UNDER_WAY = 2
LOOK_EVERY_S = 0.2
BATCH_S = 2.0  # time a batch should take: a process that is killed loses the batches under way
FIRST, GROWTH = 4, 4  # items of the first batch; how many times as large the next may be

Item = TypeVar("Item")


class Pace:
    """Cuts items into batches that take about `BATCH_S`, by the measured speed of the batches before them. The first
    ones are small. Order does not depend on speed.

    most, first: units in a batch at most, and in the first batch; an item is one unit, unless `parts` has `units`
    """

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._most, self._size = most, min(first, most)
        self._under_way: collections.deque[int] = collections.deque()
        self._done: collections.deque[tuple[float, int]] = collections.deque(maxlen=UNDER_WAY + 1)  # times, total units

    def parts(self, items: Iterable[Item], units: Callable[[Item], int] = lambda item: 1) -> Iterator[list[Item]]:
        """Yields consecutive items, as many as a batch has when it is asked for, and at least one."""
        part: list[Item] = []
        size = 0
        for item in items:
            more = units(item)
            if part and size + more > self._size:
                yield self._begin(part, size)
                part, size = [], 0
            part.append(item)
            size += more
        if part:
            yield self._begin(part, size)

    def _begin(self, part: list[Item], size: int) -> list[Item]:
        if not self._done:
            self._done.append((time.monotonic(), 0))
        self._under_way.append(size)
        return part

    def done(self) -> None:
        """Notes that the oldest batch under way is finished."""
        now, units = time.monotonic(), self._done[-1][1] + self._under_way.popleft()
        self._done.append((now, units))
        began, before = self._done[0]
        in_time = int((units - before) / max(now - began, 1e-6) * BATCH_S)
        self._size = max(1, min(in_time, GROWTH * self._size, self._most))


def run_batches(
    lm: LM,
    calls: Iterable[Mapping[str, Any]],
    read: Callable[[list[Run]], None],
    under_way: int = UNDER_WAY,
    pace: Pace | None = None,
) -> None:
    """Makes every call, the arguments of an `lm.arun` of a list, and has `read` take its runs, in the calls' order.
    Up to `under_way` calls are in flight. `pace` is notified of each batch that has been read.

    `read` is called on another thread. The first error of a call or of `read`, and an interrupt, stop what is under way
    and are raised.
    """
    stopped: Future[None] = Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        stopped.add_done_callback(cancel)
        await _run_batches(lm, calls, read, under_way, pace)

    # a thread, for a notebook has an event loop on this one already
    with base.rarely(), ThreadPoolExecutor(1, thread_name_prefix="patchclamp batches") as thread:
        # the thread starts before anything is under way: an interrupt would not wait for it
        thread.submit(int).result()
        ended = thread.submit(lambda: asyncio.run(main()))
        try:
            # Python misses a signal that comes just before it blocks, until it looks again
            while not wait([ended], timeout=LOOK_EVERY_S).done:
                pass
        except BaseException:
            stopped.set_result(None)
            raise
        ended.result()


async def _run_batches(
    lm: LM, calls: Iterable[Mapping[str, Any]], read: Callable[[list[Run]], None], most: int, pace: Pace | None
) -> None:
    under_way: collections.deque[asyncio.Task[list[Run]]] = collections.deque()

    async def read_one() -> None:
        read(await under_way.popleft())
        if pace is not None:
            pace.done()

    try:
        for call in calls:
            under_way.append(asyncio.create_task(lm.arun(**call)))
            await asyncio.sleep(0)  # the task submits its runs
            if len(under_way) == most:
                await read_one()
        while under_way:
            await read_one()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


@contextmanager
def keeping(lm: LM, question: Mapping[str, Any], resume: Resumable | None) -> Iterator[Journal | None]:
    """The journal of a study that is to be resumed; None of one that is not.

    question: all that decides the values, as plain data
    Raises: `ProgramError` if the journal is of another study, model, engine or version, `NameTaken` if a study is
    writing it.
    """
    if resume is None:
        yield None
        return
    made = {"made": msgspec.to_builtins(provenance(lm)), "weights": model_identity(lm)[1]}
    journal = resume if isinstance(resume, Journal) else Journal(resume)
    try:
        journal.open(hash_of({**question, **made}))
    except PatchclampError as error:
        raise error.under("resume") from None
    try:
        yield journal
    finally:
        journal.close()


def recorded_runs(
    lm: LM,
    journal: Journal | None,
    items: Sequence[Item],
    calls: Callable[[Iterable[Sequence[Item]]], Iterable[Mapping[str, Any]]],
    record: Callable[[Sequence[Run], Sequence[Item]], Sequence[Record]],
    kind: type[Record],
    advance: Callable[[int], None],
    batch: int,
) -> list[Record]:
    """A record of the run of every item, in order. Those that the journal has are not run again.

    calls: the calls that run batches of items, a run each, as `run_batches` takes them
    record: what is kept of some runs, which are closed then
    advance: hears how many items are done
    batch: runs in a batch at most
    """
    records = journal.take(kind, len(items)) if journal is not None else []
    advance(len(records))

    def read(runs: list[Run]) -> None:
        first = len(records)
        new = record(runs, items[first : first + len(runs)])
        for run in runs:
            run.close()
        if journal is not None:
            journal.append(new)
        records.extend(new)
        advance(len(new))

    if len(records) < len(items):
        pace = Pace(batch)
        run_batches(lm, calls(pace.parts(items[len(records) :])), read, UNDER_WAY, pace)
    return records


def recorded(
    journal: Journal | None, count: int, kind: type[Record], compute: Callable[[], Sequence[Record]]
) -> list[Record]:
    """`count` records that are computed together, unless the journal has them."""
    records = journal.take(kind, count) if journal is not None else []
    if len(records) < count:
        records = list(compute())
        assert len(records) == count
        if journal is not None:
            journal.append(records)
    return records
