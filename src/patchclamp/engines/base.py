"""The engine protocol: what an engine takes (`Request`) and gives (`Answer`). The fake (`engines.fake`) carries
requests by it in one file.

What the doctor reports, one thing at a time.

LoRA adapters, read from the folders that PEFT writes, before anything runs.

Which code steps without programs run, on an engine that compiles.

uniform: the code of steps with programs, which has taps. Reading changes no bit of a run, and a capture that is written
    back where it came from changes none either.
stock: code compiled without taps, which is the engine's own to the last bit.

The two codes round differently in the last bits, where a compiler fuses what lies on both sides of a tap. `pc.LM` is
uniform by default, and a server stock.

How often Python's garbage collector goes through everything.

It does so when a quarter more objects have come than it last found, which a sweep's cells soon are. With PyTorch and
vLLM loaded that takes 0.2 s, in which nothing else runs.

What a request carries to its engine core: its bound program as bytes, and the receipt that answers for it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from patchclamp.engines.tokenizer import Chat, Turn
from patchclamp.errors import (
    EngineError,
    MissingSource,
    PatchclampError,
    ProgramError,
    UnknownName,
    as_patchclamp_error,
    unknown,
)
from patchclamp.language.values import as_file
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import Code
from patchclamp.plan.room import bank_sizes
from patchclamp.sites import SiteMap
from patchclamp.store.named import Source

if TYPE_CHECKING:
    import torch


class Finding(msgspec.Struct, frozen=True):
    """One finding of the doctor.

    part: the area it belongs to: versions, seams, configuration, sites, fusions, graphs, memory
    name: what was looked at
    status: "ok"; "note" for what is worth knowing; "problem": patchclamp does not work
    detail: what was found
    advice: what to do about it
    """

    part: str
    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    advice: str = ""


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """An adapter in a folder.

    name: of its folder and its files' sizes and times
    rank: the largest of its modules' ranks
    """

    folder: str
    name: str
    rank: int


def adapters_of(folders: Any, prompts: int) -> list[Adapter | None]:
    """The adapter of each prompt, from None, a folder for all prompts, or a list of such, one a prompt.

    Raises: what `read` raises.
    """
    if not isinstance(folders, (list, tuple)):
        return [None if folders is None else _read_at(folders, "lora")] * prompts
    if len(folders) != prompts:
        raise ProgramError(f"{len(folders)} adapters for {prompts} prompts: give one for all, or one a prompt", "lora")
    adapters: dict[Any, Adapter | None] = {None: None}  # by folder
    for i, folder in enumerate(folders):
        if not isinstance(folder, (str, os.PathLike, type(None))) or folder not in adapters:
            adapters[folder] = _read_at(folder, f"lora[{i}]")
    return [adapters[folder] for folder in folders]


def _read_at(path: Any, argument: str) -> Adapter:
    try:
        return read(path)
    except PatchclampError as error:
        raise error.under(argument) from None


def read(path: Any) -> Adapter:
    """The adapter in a folder. Raises `MissingSource` where there is none, `ProgramError` for what is no LoRA."""
    folder = Path(as_file(path)).expanduser().resolve()
    if not folder.is_dir():
        raise MissingSource(f"there is no folder {str(path)!r}; give that of an adapter which PEFT has written")
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        files = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise MissingSource(
            f"{folder} has no {' and no '.join(missing)} (there is: {files}); peft_model.save_pretrained(folder) "
            "writes what is needed"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        rank, kind = max(int(rank) for rank in ranks), config.get("peft_type", "LORA")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProgramError(f"{folder / CONFIG} is not an adapter's: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise ProgramError(f"{folder} is an adapter of type {kind}; only LORA runs beside programs")
    marks = [(mark.st_size, mark.st_mtime_ns) for mark in ((folder / name).stat() for name in (CONFIG, WEIGHTS))]
    return Adapter(
        str(folder), f"{folder.name}-{hashlib.sha256(repr((folder, marks)).encode()).hexdigest()[:16]}", rank
    )


NUMERICS = ("uniform", "stock")


def check(numerics: object) -> None:
    """Raises `UnknownName` for what is none of the two."""
    if numerics not in NUMERICS:
        raise unknown("numerics", str(numerics), NUMERICS, "numerics")


def only_uniform(numerics: str, engine: str) -> None:
    """Raises `EngineError` if an engine that runs the same code in every step is asked for anything else."""
    check(numerics)
    if numerics != "uniform":
        raise EngineError(
            f"{numerics!r} was asked for, and the {engine} engine runs the same code in every step: leave numerics out",
            "numerics",
        )


YOUNG = 200  # collections of younger objects between two of all, instead of 10: some million new objects

_lock = threading.RLock()  # the collector itself may end a call that nobody holds
_inside = 0  # calls under way
_usual = 0  # what the threshold was before them


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """While it lasts, all objects are gone through less often; young ones as always."""
    global _inside, _usual
    with _lock:
        _inside += 1
        first, second, third = gc.get_threshold()
        if _inside == 1:
            _usual = third
            gc.set_threshold(first, second, max(third, YOUNG))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            first, second, third = gc.get_threshold()
            if not _inside and third == max(_usual, YOUNG):  # else somebody has set it meanwhile
                gc.set_threshold(first, second, _usual)


class Model(msgspec.Struct, frozen=True):
    """Facts of a loaded model.

    name: the hub id or folder
    engine, version: what runs it
    family: the site table's name
    layers, d_model, d_vocab, max_model_len: its sizes
    dtype: of its weights, without "torch."
    settings: of the engine, as far as results depend on them
    """

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
    """The newest of what a run has generated. Joined, the parts are the run's text, token ids and log-probabilities.

    text: new text that no later token changes; half a character, and the beginning of a stop text, come later
    token_ids: the new tokens
    logprobs: a float for each of them, if they were asked for
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]


class Listener(Protocol):
    """Takes every part of a run, in order, before the run's answer comes. The engine's thread calls it, so it must not
    wait or raise. It stays in this process.

    closed: nobody reads the parts any more; the engine stops the run as far as it can
    """

    closed: bool

    def __call__(self, part: Part) -> None: ...


class Request(msgspec.Struct):
    """One request.

    run: its key
    prompt_token_ids, text: the prompt; its text is None if only the ids are known
    max_tokens: how many tokens are generated at most
    bound: the program; None for a request without one
    vectors: the inline vectors that the program reads, rows [n, W] by bank key
    sampling: parameters by vLLM's names
    score: token ids whose log-probability as the next token is wanted
    logprobs: how many of the likeliest tokens to report at each generated token; 0: only the generated token; None: no
        log-probabilities
    code: what its `Apply`s run, by number
    sources: the runs it reads, held so that they stay until it ends
    listener: takes what is generated as it is made
    adapter: runs on top of the model's weights
    chat: what the prompt was made of, if it was a chat
    images: of each image in the prompt, the positions of the tokens in whose place it is read
    inputs: what the engine made of a prompt with images (`Expanded`)
    """

    run: str
    prompt_token_ids: list[int]
    max_tokens: int
    bound: BoundProgram | None = None
    vectors: dict[str, np.ndarray] = {}
    sampling: dict[str, Any] = {}
    score: tuple[int, ...] = ()
    logprobs: int | None = None
    code: dict[int, Code] = {}
    text: str | None = None
    sources: tuple[Source, ...] = ()
    listener: Listener | None = None
    adapter: Adapter | None = None
    chat: Chat | None = None
    images: list[list[int]] = []
    inputs: Any = None

    @property
    def abandoned(self) -> bool:
        """Whether it had a listener who is gone."""
        return self.listener is not None and self.listener.closed


class Expanded(msgspec.Struct):
    """A prompt with images, in which as many tokens stand for each image as it takes.

    ids: its token ids
    images: of each image the positions of the tokens in whose place it is read, ascending
    inputs: what the engine runs, in its own form
    """

    ids: list[int]
    images: list[list[int]]
    inputs: Any


class Drafts(NamedTuple):
    """Speculative decoding of a request: how many tokens were drafted, and how many of them the model accepted."""

    proposed: int
    accepted: int


class Answer(msgspec.Struct):
    """What came of a request.

    token_ids: what was generated
    text: the same as text, or what decodes it when it is read
    logprobs: a float for each of `token_ids`; None where they were not asked for
    scores: log-probability as the next token, by token id
    finish_reason: "stop" or "length"
    cached_tokens: prompt tokens that were read from the prefix cache instead of computed
    top_logprobs: for each of `token_ids` the log-probabilities of the likeliest tokens there, by token id
    computed_from: the layer and the prompt's position from which on it was computed, where what is before came from a
        run of the prompt without a program; None if all of it was computed, or came from a prefix cache
    drafts: None where the engine does not count them, or drafts none
    """

    token_ids: list[int]
    text: str | Callable[[], str]
    logprobs: list[float] | None
    scores: dict[int, float]
    finish_reason: str | None
    cached_tokens: int = 0
    top_logprobs: list[dict[int, float]] = []
    computed_from: tuple[int, int] | None = None
    drafts: Drafts | None = None


class Gradients(msgspec.Struct, frozen=True):
    """A prompt's activations, and how the log-probabilities of its next token depend on them.

    scores: log-probability as the next token, by token id
    rows: what there is at each point, fp32 [T, W]
    gradients: of the weighted sum of log-probabilities by these rows, [T, W]
    """

    scores: dict[int, float]
    rows: dict[int, np.ndarray]
    gradients: dict[int, np.ndarray]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids with the tokenizer's special tokens."""
        ...

    def bare(self, text: str) -> list[int]:
        """Ids of the text alone, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        ...

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

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        """Of each message of a chat, whose ids these are, its role and the positions of its tokens; `options`: what the
        chat template was told besides. Raises `TokensError` where that cannot be said for sure."""
        ...


def settle(future: Future[Answer], answer: Answer | Exception) -> None:
    """Gives a future its answer or error, unless someone has settled or cancelled it."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def settle_if_failed(futures: Iterable[Future[Any]], job: Future[Any]) -> None:
    """Gives the error of a job that serves some requests to each of them that has no answer yet."""
    error = job.exception()
    if error is not None:
        for future in futures:
            settle(future, as_patchclamp_error(error))


VLLM_SAMPLING = (  # parameters of vLLM that the other engines may lack
    "allowed_token_ids", "bad_words", "detokenize", "frequency_penalty", "include_stop_str_in_output", "logit_bias",
    "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "structured_outputs", "top_k", "top_p",
)  # fmt: skip
MAX_SCORES = 128  # token ids graded in one run, and likeliest tokens of one position: what vLLM's sampler takes
Wanted = tuple[str, int, int | None]  # a run, a point, and one op by its place in the bound program, or all (None)
Window = tuple[str, int, int | None, int, int]  # what is wanted, and of its rows begin … end−1
Captured = tuple[np.ndarray, "torch.Tensor | np.ndarray"]  # positions [T] ascending, and rows [T, W]


class Engine(Protocol):
    """Carries requests. Calls are safe from any thread.

    Where an engine cannot do something, it inherits the refusal from here.

    model: facts of the model
    sites: its site map
    tokenizer: of the model
    remote: whether programs run in other processes, which code (`Apply`) cannot enter
    proved: whether its sites were proved already, where it runs
    run_prefix: what the names of its runs begin with
    keeps_captures_here: whether captures take this machine's memory before they are fetched
    whole_because: why it computes all of a run, if it is an engine that need not
    """

    model: Model
    sites: SiteMap
    tokenizer: Tokenizer
    remote: bool = False
    proved: bool = False
    run_prefix: str = ""
    keeps_captures_here: bool = True

    @property
    def whole_because(self) -> str:
        return ""

    @property
    def has_views(self) -> bool:
        """Whether large captures come without a copy, so that all of a run may come together."""
        return False

    @contextlib.contextmanager
    def computing_whole(self) -> Iterator[None]:
        """Requests that are submitted within it are computed from their first layer and position on, in the batches
        that they are submitted in."""
        yield

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        """Starts requests, as one batch where the engine has batches. Each gets its own answer or error."""
        ...

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor | np.ndarray]:
        """Positions [T] ascending and rows [T, W] that a finished run captured at a point: by one op, by its number in
        the bound program, or by all; of two ops that captured a position the later one counts."""
        ...

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        """What `fetch` gives for each of (run, point, op), in one call. For many captures that are small."""
        return [self.fetch(run, point, op) for run, point, op in wanted]

    def release(self, runs: list[str]) -> None:
        """Frees what runs captured, and stops those under way whose listener is gone. The garbage collector may call
        it at any moment, so it must not wait for a lock."""
        ...

    def abort(self, runs: list[str]) -> None:
        """Stops runs that are under way, as far as the engine can, and frees what they captured."""
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

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises `EngineError` or `CapacityError` for an adapter that this engine cannot run."""
        raise EngineError(
            f"the {self.model.engine} engine runs no LoRA adapters: merge it into the model first "
            "(peft_model.merge_and_unload()) and load that, or use vLLM with enable_lora=True", "lora"
        )  # fmt: skip

    def expand(self, prompt: Mapping[str, Any] | None, messages: list[Any] | None) -> Expanded:
        """A prompt with images, as vLLM takes it (`{"prompt": ..., "multi_modal_data": {"image": ...}}`, or token ids
        under "prompt_token_ids"), or a chat with images in its messages, ready to run.

        Raises `EngineError` where the engine takes no images, `ProgramError` for a prompt that cannot be read.
        """
        raise EngineError(
            f"the {self.model.engine} engine takes prompts of text alone: load the model with engine='vllm' for images"
        )

    def gradients(
        self,
        prompt_token_ids: list[int],
        points: list[int],
        weights: dict[int, float],
        stream: np.ndarray | None = None,
    ) -> Gradients:
        """Gradients of Σ weight · log p(token) of the next token, weights by token id, at some points.

        stream: rows [T, D] in the place of the stream before the first layer

        Raises: `EngineError` where the model cannot be differentiated, `UnsupportedSite` for a point that cannot.
        """
        raise EngineError(
            f"the {self.model.engine} engine computes no gradients: load the model with engine='transformers' for them"
        )

    def report(self) -> list[Finding]:
        """What a doctor should know about this engine."""
        return []

    def sleep(self, level: int = 1) -> None:
        """Gives the device memory of weights and cache back until `wake`. Raises `EngineError` where it cannot."""
        raise _sleepless(self)

    def wake(self) -> None:
        """Takes the memory again and brings the weights back. Raises `EngineError` where it cannot."""
        raise _sleepless(self)


def _sleepless(engine: Engine) -> EngineError:
    return EngineError(f"the {engine.model.engine} engine does not sleep; vLLM on a GPU does")


def unknown_parameter(name: str, known: Iterable[str], engine: str) -> UnknownName:
    """The error for a sampling parameter that an engine does not support; it says so if vLLM does."""
    path = f"sampling.{name}"
    if name in VLLM_SAMPLING:
        names = ", ".join(known)
        return UnknownName(f"vLLM supports {name!r}, and the {engine} engine does not; there are: {names}", path)
    return unknown("sampling parameter", name, known, path)


def check_sampling(sampling: Mapping[str, Any], known: Iterable[str], engine: str) -> None:
    """Raise `UnknownName` for a parameter that an engine does not support, `ProgramError` for an invalid value."""
    for name in sampling:
        if name not in known:
            raise unknown_parameter(name, known, engine)
    for name, low, high in (("temperature", 0, 2), ("top_p", 1e-6, 1), ("min_p", 0, 1)):
        _check_number(name, sampling.get(name, high), low, high)
    top_k = sampling.get("top_k", 0)
    if top_k is not None and (not _is_integer(top_k) or top_k < -1):
        raise ProgramError(f"expected a whole number, or 0 or -1 for all tokens, got {top_k!r}", "sampling.top_k")
    stop = [] if sampling.get("stop") is None else sampling["stop"]
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise ProgramError(f"expected text or a list of texts, none of them empty, got {stop!r}", "sampling.stop")
    ids = [] if sampling.get("stop_token_ids") is None else sampling["stop_token_ids"]
    if not isinstance(ids, (list, tuple)) or not all(_is_integer(token) and token >= 0 for token in ids):
        raise ProgramError(f"expected a list of token ids, got {ids!r}", "sampling.stop_token_ids")
    if not isinstance(sampling.get("ignore_eos", False), bool):
        raise ProgramError(f"expected True or False, got {sampling['ignore_eos']!r}", "sampling.ignore_eos")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ProgramError(f"expected a number from {low} to {high}, got {value!r}", f"sampling.{name}")


def _is_integer(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


ABORTED = "the run was aborted"


class Carried(msgspec.Struct, array_like=True):
    """What a request carries in its sampling parameters.

    bound: its program, for its prompt
    sizes: of every bank key that it reads, (rows, width)
    """

    bound: BoundProgram
    sizes: dict[str, tuple[int, int]]


decode = msgspec.msgpack.Decoder(Carried).decode


def carry(request: Request, sites: SiteMap) -> bytes:
    """The program of a request that has one, as it travels."""
    assert request.bound is not None
    sources = {source.key: source for source in request.sources}

    def rows_of(run: str, point: int) -> int:
        return len(sources[run].positions_of(point))

    return msgspec.msgpack.encode(Carried(request.bound, bank_sizes(request.bound, request.vectors, sites, rows_of)))


def receipt_of(carried: bytes) -> str:
    """What answers for a program: the digest of what was carried, made by each worker of what it installed."""
    return hashlib.blake2b(carried, digest_size=16).hexdigest()
