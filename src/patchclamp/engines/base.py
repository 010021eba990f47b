"""The seam: what every engine takes and gives. The fake that ships (`engines.fake`) speaks it in full."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from patchclamp.engines.adapters import Adapter
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import Code
from patchclamp.sites import SiteMap

if TYPE_CHECKING:
    import torch


class Model(msgspec.Struct, frozen=True):
    """Facts of a loaded model: what it is called, who runs it and with which `settings`, and its sizes."""

    name: str
    engine: str
    version: str
    family: str
    layers: int
    d_model: int
    d_vocab: int
    dtype: str
    max_model_len: int
    settings: str = ""


class Part(msgspec.Struct, frozen=True):
    """What a run has newly generated: `logprobs` has a float for each of `token_ids`.

    `text` is what is certain by now: a character that is not whole yet, or what may become a stop text, comes with a
    later part. Put together, the parts are the run's text, token ids and log-probabilities.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]


class Listener(Protocol):
    """Hears every part of a run, in order and before the run's answer, on the engine's thread: it waits for nothing and
    raises nothing. It belongs to this process and goes nowhere with the request.

    `gone`: nobody listens any more; the run is stopped as far as the engine can.
    """

    gone: bool

    def __call__(self, part: Part) -> None: ...


class Request(msgspec.Struct):
    """One request, of a prompt whose `text` may be known. `bound` is None for a request without a program; `vectors`
    are the inline ones it reads, [n, W], `code` is what its `Apply`s run, by number, and `sources` are the runs it
    reads, which stay as long as it does.

    `score` are token ids whose log-probability as the next token is wanted; `sampling` has vLLM's own names.
    `listener` hears what is generated as it is made; `adapter` is what runs on top of the model's weights.
    """

    run: str
    prompt_token_ids: list[int]
    max_tokens: int
    bound: BoundProgram | None = None
    vectors: dict[str, np.ndarray] = {}
    sampling: dict[str, Any] = {}
    score: tuple[int, ...] = ()
    code: dict[int, Code] = {}
    text: str | None = None
    sources: tuple[Any, ...] = ()
    listener: Listener | None = None
    adapter: Adapter | None = None

    @property
    def unheard(self) -> bool:
        """Whether someone listened, and does no more."""
        return self.listener is not None and self.listener.gone


class Answer(msgspec.Struct):
    """What came of a request: `logprobs` a float for each of `token_ids`; `scores` by token id, of the next token.

    `cached_tokens`: prompt tokens that were read from the prefix cache instead of computed.
    """

    token_ids: list[int]
    text: str
    logprobs: list[float]
    scores: dict[int, float]
    finish_reason: str | None
    cached_tokens: int = 0


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids with the tokenizer's special tokens."""
        ...

    def bare(self, text: str) -> list[int]:
        """Ids of the text alone, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def settled(self, ids: Sequence[int]) -> str:
        """The beginning of these ids' text that no further ids change."""
        ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token's text on its own."""
        ...

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        """The prompt's text and each token's (first, last + 1) character in it."""
        ...

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a chat, ready for the assistant's turn."""
        ...


def settle(future: Future[Answer], answer: Answer | Exception) -> None:
    """Gives a future its answer or error, unless someone has settled or cancelled it."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Engine(Protocol):
    """Carries requests. Calls are safe from any thread."""

    model: Model
    sites: SiteMap
    tokenizer: Tokenizer

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        """Starts requests, as one batch where that means something; each has its own answer or error."""
        ...

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Positions [T] ascending and rows [T, W] that a finished run captured at a point.

        Of one op, by its place in the bound program, or of all; then, where two captured a position, the later's.
        """
        ...

    def release(self, runs: list[str]) -> None:
        """Lets runs' captures go, and stops one under way whose listener is gone.

        The garbage collector calls this, wherever it happens to run: it may wait for no lock.
        """
        ...

    def abort(self, runs: list[str]) -> None:
        """Stops runs that are under way, as far as the engine can, and lets their captures go."""
        ...

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        """Raises `UnknownName` or `ProgramError` for sampling parameters that this engine does not have."""
        ...

    def status(self) -> dict[str, Any]:
        """Counts of what the engine holds, for tests and doctors."""
        ...

    def close(self) -> None:
        """Stops the engine and frees what it held."""
        ...
