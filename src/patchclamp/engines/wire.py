"""The protocol between patchclamp's client and server: msgpack of these structs, under `/v1/patchclamp/engine`.

    GET  info        `Info`
    POST run         `WireBatch`; returns frames: 4 bytes of length, little-endian, then msgpack of a list of events.
                     Every request ends with one `Answered` or `Failed`. Closing the connection stops unfinished ones
    GET  batches     the reason why the server does not accept grading jobs, as msgpack; "" if it does
    POST grade       `WireJobs`; returns frames of `GradedPart`, until each program and prompt is graded. Closing the
                     connection stops it
    POST fetch       `Fetch`; streams safetensors (`CapturedFile`): "I positions" and "I rows" for the item at index I
    POST lens        `LensWanted`; returns `base.PackedTokens`
    POST dictionary  `DictionaryWanted`; returns safetensors, the fields of `FeatureRows`
    POST free        `Free`
    GET  live/...    by session: heartbeat bytes while the client holds the connection. When it closes, the client is
                     considered dead unless it reconnects at once
    POST tokenizer   `Tokenize`; returns the result of the named `Tokenizer` method
    POST weight      `Weight`; returns safetensors, or no bytes if the model has no such weight
    POST sampling    sampling parameters; an error if the engine does not accept them
    GET  status      counts, as `Engine.status`

An error is an HTTP status of 400 or above with OpenAI's error object in JSON. A run's name is `owner-session-…`: it
determines who may read the run, and identifies a dead client's captures.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Answer, Captured, Drafts, Model, Wanted
from patchclamp.engines.grading import Grades, GradeTable
from patchclamp.errors import EngineError, Packed, pack, unpack
from patchclamp.language.dictionaries import DictionaryCard, FeatureRows
from patchclamp.language.ops import Translator
from patchclamp.sites import Family, SiteMap, Sizes
from patchclamp.store.tensors import DTYPES, TensorEntry, header_size, parse_header

WIRE = 11  # the protocol version; client and server must have the same
PREFIX = "/v1/patchclamp/engine"
LEASE_S = 60.0  # without a heartbeat, until a client is considered dead and its captures are freed
BEAT_S = 15.0  # between two bytes of `live`
MAX_REQUESTS = 512  # per batch
MAX_PROGRAMS = 8192  # that a client sends per grading request; the last job may exceed it
MAX_BODY_BYTES = 1 << 27


class Info(msgspec.Struct):
    """Facts about the server's engine. Starting with `family`, the fields describe its site map.

    owner: the name prefix of runs that this API key may use
    withdrawn: the sites that failed the proof
    dictionaries: the attached SAEs
    no_attention: the reason why the engine cannot read attention patterns; "" if it can
    """

    wire: int
    version: str
    owner: str
    model: Model
    family: Family
    sizes: Sizes
    tensor_parallel: int
    withdrawn: dict[str, str]
    stages: int = 1
    dictionaries: list[DictionaryCard] = []
    no_attention: str = ""

    def site_map(self, rows: Callable[[str, Sequence[int]], FeatureRows]) -> SiteMap:
        """Return the site map. `rows(name, ids)` returns the rows of features."""
        sites = SiteMap(self.family, self.sizes, self.tensor_parallel, self.stages)
        sites.withdrawn, sites.no_attention = dict(self.withdrawn), self.no_attention
        for card in self.dictionaries:
            sites.dictionaries[card.name] = sites.dictionary(card, functools.partial(rows, card.name))
        return sites


class WireRequest(msgspec.Struct):
    """A request to run. carried: its program (`base.Carried`); vectors: the bank keys that the program reads from
    `WireBatch.vectors`; listens: True to stream parts."""

    run: str
    prompt_token_ids: list[int]
    max_tokens: int
    carried: bytes | None = None
    vectors: list[str] = []
    sampling: dict[str, Any] = {}
    score: list[int] = []
    logprobs: int | None = None
    listens: bool = False
    prompt_logprobs: int | None = None


class WireBatch(msgspec.Struct):
    """A batch of requests. vectors: safetensors, rows [n, W] by bank key."""

    requests: list[WireRequest]
    vectors: bytes = b""


class WireJob(msgspec.Struct):
    """A `GradeJob`. cells: its programs, as `CellRecords.to_bytes`."""

    name: str
    prompt: list[int]
    suffixes: list[list[int]]
    terms: list[list[tuple[int, int, int]]]
    cells: bytes
    kl: bool = False
    top: int = 0


class WireJobs(msgspec.Struct):
    """Grading jobs. vectors: as in a `WireBatch`; rows: row counts by bank key, for the runs that the jobs read."""

    jobs: list[WireJob]
    vectors: bytes = b""
    rows: dict[str, int] = {}


class Fetch(msgspec.Struct):
    wanted: list[Wanted]


class LensWanted(msgspec.Struct):
    wanted: list[Wanted]
    top: int
    translator: Translator | None = None


class DictionaryWanted(msgspec.Struct):
    name: str
    ids: list[int]


class Free(msgspec.Struct):
    """Runs to release, abort or end early, and the session to close."""

    release: list[str] = []
    abort: list[str] = []
    end: list[str] = []
    session: str = ""


class Weight(msgspec.Struct):
    name: str
    layer: int | None


class Tokenize(msgspec.Struct):
    method: str
    args: list[Any]


class Generated(msgspec.Struct, tag="part"):
    """A part of request `i`'s output."""

    i: int
    text: str
    token_ids: list[int]
    logprobs: list[float]


class Answered(msgspec.Struct, tag="answer"):
    """Request `i`'s answer, and its program's receipt."""

    i: int
    receipt: str
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    scores: dict[int, float]
    finish_reason: str | None
    cached_tokens: int
    top_logprobs: list[dict[int, float]]
    drafts: Drafts | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] = []

    @classmethod
    def of(cls, i: int, receipt: str, answer: Answer) -> Answered:
        text = answer.text if isinstance(answer.text, str) else answer.text()
        return cls(i, receipt, answer.token_ids, text, answer.logprobs, answer.scores, answer.finish_reason,
                   answer.cached_tokens, answer.top_logprobs, answer.drafts, answer.prompt_logprobs,
                   answer.prompt_top_logprobs)  # fmt: skip

    def answer(self) -> Answer:
        return Answer(self.token_ids, self.text, self.logprobs, self.scores, self.finish_reason, self.cached_tokens,
                      self.top_logprobs, drafts=self.drafts, prompt_logprobs=self.prompt_logprobs,
                      prompt_top_logprobs=self.prompt_top_logprobs)  # fmt: skip


class Failed(msgspec.Struct, tag="error"):
    """Request `i`'s error, as plain data (`errors.Packed`)."""

    i: int
    error: Packed


class GradedPart(msgspec.Struct, tag="grades"):
    """Results of job `i`. number: program indices, int64 (−1: the prompt without a program); columns: the arrays that
    `GradeTable.take` receives as `found`."""

    i: int
    number: bytes
    columns: list[bytes]
    errors: dict[int, Packed] = {}

    @classmethod
    def of(cls, i: int, number: np.ndarray, grades: Grades) -> GradedPart:
        columns = (grades.logprobs, grades.kl, grades.top_ids, grades.top_logprobs)
        errors = {n: pack(grades.errors[n]) for n in number.tolist() if n in grades.errors}
        return cls(i, number.tobytes(), [b"" if of is None else of[number].tobytes() for of in columns], errors)

    def read(self, table: GradeTable, first: int) -> np.ndarray:
        """Add the results to a table; return their program indices. `first`: the index of the part's first program."""
        number = np.frombuffer(self.number, np.int64)
        number = np.where(number < 0, -1, number + first)
        dtypes = np.float32, np.float32, np.int64, np.float32
        columns = [np.frombuffer(data, dtype) for data, dtype in zip(self.columns, dtypes, strict=True)]
        table.take(number, columns, {first + n: unpack(error) for n, error in self.errors.items()})
        return number


Event = Generated | Answered | GradedPart | Failed
decode_events = msgspec.msgpack.Decoder(list[Event]).decode


def frame(events: list[Event]) -> bytes:
    data = msgspec.msgpack.encode(events)
    return len(data).to_bytes(4, "little") + data


class Frames:
    """Decodes bytes as they arrive, and yields the events of every complete frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        self._rest += data
        while len(self._rest) >= 4 and len(self._rest) >= (end := 4 + int.from_bytes(self._rest[:4], "little")):
            events = decode_events(bytes(self._rest[4:end]))
            del self._rest[:end]
            yield from events


class CapturedFile:
    """Writes the bytes of a `fetch` response directly to the final arrays as they arrive, so memory holds one copy."""

    def __init__(self, count: int) -> None:
        try:
            import torch  # noqa: F401  captures are returned as tensors
        except ImportError:
            raise EngineError("captures are returned as PyTorch tensors: pip install torch") from None
        self._count, self._head = count, bytearray()
        self._tensors: dict[str, TensorEntry] | None = None
        self._memory: dict[str, np.ndarray] = {}
        self._places: deque[memoryview] = deque()  # memory still to be filled, in order

    def feed(self, data: bytes) -> None:
        """Store the next bytes. Raises `EngineError` for an invalid response."""
        rest = memoryview(data)
        if self._tensors is None:
            before = len(self._head)
            self._head += rest
            if len(self._head) < 8 or len(self._head) < (end := header_size(self._head)):
                return
            self._describe(bytes(self._head[:end]))
            rest, self._head = rest[end - before :], bytearray()
        while len(rest):
            if not self._places:
                raise EngineError("the captures have more bytes than their header declares")
            place = self._places.popleft()
            size = min(len(place), len(rest))
            place[:size] = rest[:size]
            rest = rest[size:]
            if size < len(place):
                self._places.appendleft(place[size:])

    def captured(self) -> list[Captured]:
        """Return positions and rows once all bytes have arrived. Raises `EngineError` if any are missing."""
        import torch

        if self._tensors is None or self._places:
            raise EngineError("the captures are truncated")
        read: dict[str, torch.Tensor] = {}
        for name, each in self._tensors.items():
            memory, dtype = torch.from_numpy(self._memory[name]), getattr(torch, DTYPES[each.dtype])
            read[name] = memory.view(dtype).reshape(each.shape) if len(memory) else torch.empty(each.shape, dtype=dtype)
        return [(read[f"{i} positions"].numpy(), read[f"{i} rows"]) for i in range(self._count)]

    def _describe(self, header: bytes) -> None:
        """Allocate memory for each tensor in the header."""
        try:
            tensors = parse_header(header).tensors
            names = {f"{i} {what}" for i in range(self._count) for what in ("positions", "rows")}
            if tensors.keys() != names or not all(each.dtype in DTYPES for each in tensors.values()):
                raise ValueError(f"unexpected tensors {', '.join(list(tensors)[:4])} …")
        except ValueError as error:
            raise EngineError(f"the captures do not match the request: {error}") from None
        for name, each in sorted(tensors.items(), key=lambda pair: pair[1].data_offsets):
            self._memory[name] = np.empty(each.data_offsets[1] - each.data_offsets[0], np.uint8)
            if self._memory[name].size:
                self._places.append(self._memory[name].data)
        self._tensors = tensors
