"""Scores of all requests from the server's own probes (`--probe`): in responses, in metrics and in a log on disk.

`MonitoredCall` adds scores to the response of one HTTP request. `ScoreWatch` counts all scores for Prometheus, and
passes the scores of a sample of requests to a `ScoreLog`, which writes them on its own thread.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import logging
import queue
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.responses import JSONResponse, Response, StreamingResponse

from patchclamp.engines.base import Monitor
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.engines.vllm.monitors import Choices, MonitoredRun, MonitorLog, columns_of
from patchclamp.engines.vllm.server import ProbeLog
from patchclamp.errors import ProgramError
from patchclamp.serve.capture_files import data_event, finite

BUCKETS = (-100.0, -30.0, -10.0, -3.0, -1.0, -0.3, -0.1, 0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9,
           0.97, 0.99, 1.0, 3.0, 10.0, 30.0, 100.0)  # fmt: skip
MAX_QUEUED = 1 << 22  # scores queued for writing; tokens beyond this limit are dropped and counted
FLUSH_ROWS = 1 << 14  # rows per Parquet row group
FLUSH_NUMBERS = 1 << 20  # scores per row group, for probes with many outputs
DIGITS = 6  # of a log file's number
COLUMNS = ("time", "request", "choice", "position", "token")  # of the log, before one column per probe
logger: logging.Logger = logging.getLogger("vllm.patchclamp")


class MonitoredCall:
    """The scores of one HTTP request's choices."""

    def __init__(self, log: MonitorLog) -> None:
        self._log, self._next = log, 0
        self._runs: dict[int, tuple[Choices, int]] = {}  # by choice: its request's choices, its index

    def enter(self, request: str, choices: int, first: int | None = None) -> str:
        """Collect an engine request's scores. Return a unique request name, because clients may reuse `X-Request-Id`.
        `first`: the first choice's index in the response; None: the index after earlier requests' choices."""
        first = self._next if first is None else first
        self._next = first + choices
        name = f"{request}-{secrets.token_hex(8)}"
        runs = self._log.runs[name] = Choices()
        self._runs |= {first + index: (runs, index) for index in range(choices)}
        return name

    def limit(self, choice: int, end: int) -> None:
        """Withhold a choice's scores from position `end` on."""
        runs, index = self._runs[choice]
        runs.setdefault(index, MonitoredRun()).end = end

    def _add_to(self, choice: dict[str, Any]) -> None:
        """Add the scores since the last call to a choice of the response. Scores of the program's own probes take
        precedence."""
        runs, index = self._runs.get(choice["index"], (Choices(), 0))
        begin, products = runs.setdefault(index, MonitoredRun()).news()
        if len(products):
            own = choice.setdefault("patchclamp", {})
            own["probes"] = as_json(self._log.monitors, begin, products) | own.get("probes", {})

    async def told(self, response: Response) -> Response:
        """Return the response with each choice's scores added."""
        if isinstance(response, StreamingResponse):
            chunks: Any = response.body_iterator
            response.body_iterator = self._told(chunks)
            return response
        if response.status_code != 200 or not isinstance(response, JSONResponse):
            return response
        body = json.loads(bytes(response.body))
        for choice in body.get("choices", ()):
            self._add_to(choice)
        headers = {name: value for name, value in response.headers.items() if name.startswith("endpoint-load")}
        return JSONResponse(body, headers=headers)

    async def _told(self, chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                text = chunk if isinstance(chunk, str) else bytes(chunk).decode()
                if text.startswith("data: {"):
                    said = json.loads(text[6:])
                    for choice in said.get("choices", ()):
                        if (choice.get("delta") or {}).get("role") is None or choice.get("finish_reason"):
                            self._add_to(choice)
                    text = data_event(said)
                yield text


current: ContextVar[MonitoredCall | None] = ContextVar("patchclamp monitored call", default=None)


def as_json(monitors: Sequence[Monitor], first: int, products: np.ndarray) -> dict[str, Any]:
    """Return the scores of consecutive tokens as JSON, by probe name; null for non-finite values."""
    positions = list(range(first, first + len(products)))
    return {
        each.probe.name: {"positions": positions, "scores": finite(each.scores(products).tolist())}
        for each in monitors
    }  # fmt: skip


# -- all requests


class ScoreWatch:
    """Counts the scores of all of a model's requests, and logs the scores of a sample."""

    def __init__(
        self, monitors: Sequence[Monitor], model: str, log: ProbeLog, process: int,
        tokens_of: Callable[[str, int, int], tuple[str, int, list[int | None]]],
    ) -> None:  # fmt: skip
        from prometheus_client import Counter, Histogram

        self._tokens_of = tokens_of
        labels = ("model_name", "probe", "output")
        scores = Histogram("patchclamp:probe_score", "Scores of tokens.", labels, buckets=BUCKETS)
        above = Counter("patchclamp:probe_above", "Scores above the threshold of the probe.", labels)
        self._dropped: Any = Counter("patchclamp:probe_log_dropped", "Tokens that were not logged in time.", labels[:1])
        self._dropped = self._dropped.labels(model)
        self._outputs: list[tuple[Monitor, list[tuple[Any, Any]]]] = []
        for each in monitors:
            of_output = [(model, each.probe.name, str(i)) for i in range(each.outputs)]
            self._outputs.append((each, [(scores.labels(*own), above.labels(*own)) for own in of_output]))
        self._sample = log.sample
        self._log = None if log.path is None else ScoreLog(log, monitors, self._dropped.inc, process)

    def __call__(self, names: list[str], firsts: np.ndarray, counts: np.ndarray, products: np.ndarray) -> None:
        """Count and log the scores of one message; called as `MonitorLog.watch`."""
        for monitor, outputs in self._outputs:
            scores = monitor.scores(products).reshape(-1, len(outputs))
            for i, (histogram, above) in enumerate(outputs):
                column = scores[:, i][np.isfinite(scores[:, i])]
                observe(histogram, column)
                if monitor.threshold is not None:
                    above.inc(int((column > monitor.threshold).sum()))
        if self._log is None:
            return
        end = 0
        for name, first, count in zip(names, firsts.tolist(), counts.tolist(), strict=True):
            begin, end = end, end + count
            if count and zlib.crc32(name.encode()) < self._sample * (1 << 32):
                self._log.put(*self._tokens_of(name, first, count), first, products[begin:end])


def watch_of(engine: AsyncEngine, model: str, log: ProbeLog) -> None:
    """Start counting and logging the scores of all of an engine's requests."""
    process = engine.process_index + 1 if engine.api_processes > 1 else 0
    engine.monitor_log.watch = ScoreWatch(engine.monitors, model, log, process, engine.tokens_of)


def observe(histogram: Any, values: np.ndarray) -> None:
    """Add many values to a histogram at once: `Histogram.observe` takes a microsecond per value."""
    if not len(values):
        return
    bounds = np.array(histogram._upper_bounds)
    counts = np.bincount(np.searchsorted(bounds, values), minlength=len(bounds))
    histogram._sum.inc(float(values.sum(dtype=np.float64)))
    for bucket, count in zip(histogram._buckets, counts.tolist(), strict=True):
        if count:
            bucket.inc(count)


Row = tuple[str, int, list[int | None], int, np.ndarray]  # request, choice, token ids, first position, products


class ScoreLog:
    """Writes scores to numbered files of limited size (JSON lines or Parquet), and keeps the newest files."""

    def __init__(
        self, asked: ProbeLog, monitors: Sequence[Monitor], dropped: Callable[[int], None], process: int
    ) -> None:
        assert asked.path is not None
        path = Path(asked.path)
        if path.suffix not in (".jsonl", ".parquet"):
            raise ProgramError(f"expected a name ending in .jsonl or .parquet, got {path.name!r}", "probe_log")
        for each in monitors:
            if each.probe.name in COLUMNS:
                raise ProgramError(f"{each.probe.name!r} is a column of the log: rename the probe", "probes")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path.with_stem(f"{path.stem}-{process}") if process else path
        self._asked, self._monitors, self._dropped = asked, monitors, dropped
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._put, self._got = 0, 0  # scores put into the queue, and taken from it
        self._unwritten = 0  # tokens taken from the queue but not yet on disk
        own = f"{glob.escape(self._path.stem)}-{'[0-9]' * DIGITS}{path.suffix}"  # other files are kept
        self._files: deque[Path] = deque(sorted(path.parent.glob(own)))
        self._thread = threading.Thread(target=self._write, name="patchclamp scores", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, *row: Any) -> None:
        """Queue scores; if the queue is full, drop and count them."""
        products = row[-1]
        if self._put - self._got and self._put - self._got + products.size > MAX_QUEUED:
            self._dropped(len(products))
            return
        self._put += products.size
        self._rows.put((*row[:-1], products.copy()))  # a view would keep the scores of all requests of its message

    def _next_row(self) -> Row | None:
        if (row := self._rows.get()) is not None:
            self._got += row[-1].size
            self._unwritten += len(row[-1])
        return row

    def close(self) -> None:
        """Flush the queue."""
        if self._thread.is_alive():
            self._rows.put(None)
            self._thread.join()

    def _write(self) -> None:
        write, is_closed = self._write_lines if self._path.suffix == ".jsonl" else self._write_parquet, False
        try:
            while not is_closed:
                is_closed = write(self._next_file())
                self._unwritten = 0
        except Exception:
            logger.exception("logging of scores stopped")
            self._dropped(self._unwritten)
            while (row := self._next_row()) is not None:
                self._dropped(len(row[-1]))

    def _next_file(self) -> Path:
        number = 1 + (int(self._files[-1].stem.rpartition("-")[2]) if self._files else 0)
        self._files.append(self._path.with_stem(f"{self._path.stem}-{number:0{DIGITS}}"))
        while len(self._files) > self._asked.files:
            self._files.popleft().unlink(missing_ok=True)
        return self._files[-1]

    def _write_lines(self, file: Path) -> bool:
        """Write JSON lines until the file is full (False) or the log is closed (True)."""
        with file.open("w") as out:
            while (row := self._next_row()) is not None:
                out.writelines(json.dumps(line) + "\n" for line in self._lines(row))
                if self._rows.empty():
                    out.flush()
                    self._unwritten = 0
                if out.tell() >= self._asked.file_bytes:
                    return False
        return True

    def _write_parquet(self, file: Path) -> bool:
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = pa.list_(pa.float32())
        kinds = dict(zip(COLUMNS, (pa.float64(), pa.string(), *[pa.int64()] * 3), strict=True))
        schema = pa.schema({**kinds, **{each.probe.name: numbers for each in self._monitors}})
        most = max(1, min(FLUSH_ROWS, FLUSH_NUMBERS // columns_of(self._monitors)))
        lines: list[dict[str, Any]] = []
        is_closed = False
        with pq.ParquetWriter(file, schema) as out, file.open("rb") as written:
            while not is_closed:
                is_closed = (row := self._next_row()) is None
                lines += self._lines(row) if row is not None else ()
                if lines and (is_closed or len(lines) >= most):
                    out.write_table(pa.Table.from_pylist(lines, schema))
                    lines = []
                    if written.seek(0, 2) >= self._asked.file_bytes:
                        break
        return is_closed

    def _lines(self, row: Row) -> Iterator[dict[str, Any]]:
        """Yield one line per token: its scores from all probes, layers concatenated."""
        name, choice, tokens, first, products = row
        now = round(time.time(), 3)
        scores = {each.probe.name: finite(np.moveaxis(each.scores(products), -2, 0).reshape(len(products), -1).tolist())
                  for each in self._monitors}  # fmt: skip
        for i, token in enumerate(tokens):
            yield {"time": now, "request": name, "choice": choice, "position": first + i, "token": token,
                   **{probe: of_token[i] for probe, of_token in scores.items()}}  # fmt: skip
