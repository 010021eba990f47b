"""The engine protocol: `Engine` takes `Request`s and returns `Answer`s. `patchclamp.testing` implements it in one file.

Also here: the doctor's findings, LoRA adapters in PEFT's folder format, the `numerics` of compiled engines, a context
manager that runs fewer full garbage collections, and the encoding and digest of programs sent to an engine core.

On an engine that compiles, `numerics` selects the code for steps without programs:

uniform: the same code, with taps, as steps with programs. Capturing activations, or writing a capture back unchanged,
    leaves a run bit-identical. The default of `pc.LM`.
stock: code compiled without taps, bit-identical to the engine's own. The default of a server.

Their results differ in the last bits wherever the compiler fuses ops across a tap.
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

from patchclamp.engines.grading import GradeJob, GradeTable
from patchclamp.engines.tokenizer import Chat, Turn, complete_text
from patchclamp.errors import (
    EngineError,
    MissingSource,
    PatchclampError,
    ProgramError,
    UnknownName,
    as_patchclamp_error,
    unknown,
)
from patchclamp.language.ops import Probe, Translator
from patchclamp.language.probes import activated
from patchclamp.language.sae import SAE
from patchclamp.language.site import is_stacked
from patchclamp.language.values import Vector, as_file
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import Code
from patchclamp.plan.room import bank_sizes
from patchclamp.sites import SiteMap
from patchclamp.store.named import NamedBank, SourceRun

if TYPE_CHECKING:
    import torch


class Finding(msgspec.Struct, frozen=True):
    """A finding of the doctor.

    part: versions, seams, configuration, sites, fusions, graphs or memory
    name: the item checked
    status: "ok"; "note" for information; "problem" if patchclamp does not work
    detail: the result
    advice: the fix
    """

    part: str
    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    advice: str = ""


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter in a folder.

    name: the folder's name and a hash of its path, file sizes and modification times
    rank: the largest rank of its modules
    """

    folder: str
    name: str
    rank: int


def adapters_of(folders: Any, prompts: int) -> list[Adapter | None]:
    """Return each prompt's adapter. `folders`: None, one folder for all prompts, or a list with one per prompt. Raises
    `ProgramError` for a list of the wrong length, or the errors of `read_adapter`."""
    if not isinstance(folders, (list, tuple)):
        return [None if folders is None else _read_at(folders, "lora")] * prompts
    if len(folders) != prompts:
        raise ProgramError(f"expected one adapter, or one for each of {prompts} prompts, got {len(folders)}", "lora")
    adapters: dict[Any, Adapter | None] = {None: None}  # by folder
    for i, folder in enumerate(folders):
        if not isinstance(folder, (str, os.PathLike, type(None))) or folder not in adapters:
            adapters[folder] = _read_at(folder, f"lora[{i}]")
    return [adapters[folder] for folder in folders]


def _read_at(path: Any, argument: str) -> Adapter:
    try:
        return read_adapter(path)
    except PatchclampError as error:
        raise error.under(argument) from None


def read_adapter(path: Any) -> Adapter:
    """Read the adapter in a folder. Raises `MissingSource` if files are missing, `ProgramError` if it is not a LoRA."""
    folder = Path(os.path.expanduser(as_file(path))).resolve()
    if not folder.is_dir():
        raise MissingSource(f"expected a PEFT adapter folder; {str(path)!r} does not exist")
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        files = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise MissingSource(
            f"{folder} lacks {' and '.join(missing)} (found: {files}); save an adapter with peft_model.save_pretrained"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        rank, kind = max(int(rank) for rank in ranks), config.get("peft_type", "LORA")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProgramError(f"{folder / CONFIG} is not an adapter config: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise ProgramError(f"{folder} is a {kind} adapter; only LORA is supported")
    marks = [(mark.st_size, mark.st_mtime_ns) for mark in ((folder / name).stat() for name in (CONFIG, WEIGHTS))]
    digest = hashlib.sha256(repr((folder, marks)).encode()).hexdigest()
    return Adapter(str(folder), f"{folder.name}-{digest[:16]}", rank)


NUMERICS = ("uniform", "stock")


def check_numerics(numerics: object) -> None:
    """Raise `UnknownName` unless `numerics` is one of `NUMERICS`."""
    if numerics not in NUMERICS:
        raise unknown("numerics", str(numerics), NUMERICS, "numerics")


def only_uniform(numerics: str, engine: str) -> None:
    """Raise `EngineError` for numerics other than "uniform" on an engine that runs the same code in every step."""
    check_numerics(numerics)
    if numerics != "uniform":
        raise EngineError(f'expected "uniform" on the {engine} engine, got {numerics!r}: omit numerics', "numerics")


YOUNG = 200  # younger collections between two full ones, instead of 10: about a million new objects

_lock = threading.RLock()  # reentrant: a collection may close an abandoned `rarely()`
_inside = 0  # active calls
_usual = 0  # the threshold to restore after the last call


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """Run full garbage collections less often inside the context; young objects are collected as usual.

    Python starts a full collection once the number of objects has grown by a quarter, which happens often in a sweep.
    With PyTorch and vLLM loaded, a collection takes 0.2 s and blocks everything else.
    """
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
            if not _inside and third == max(_usual, YOUNG):  # otherwise the caller has changed it
                gc.set_threshold(first, second, _usual)


class Model(msgspec.Struct, frozen=True):
    """Facts about a loaded model.

    name: the hub id or folder
    engine, version: the engine's name and version
    family: the name of the site table
    layers, d_model, d_vocab, max_model_len: sizes
    dtype: the dtype of the weights, without "torch."
    settings: engine settings that affect results
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


class PartScores(NamedTuple):
    """A probe's scores for a `Part`: token positions [T], and scores [T, k], or [L, T, k] at a site with L layers."""

    positions: list[int]
    scores: Any


class Part(msgspec.Struct, frozen=True):
    """A run's output since the last part. The concatenated parts give the run's text, token ids and log-probabilities.

    text: new text that no later token can change; incomplete characters and possible stop strings are held back
    token_ids: the new tokens
    logprobs: one float per new token, if requested
    scores: scores of the new tokens by unpooled probe name; the first part also has the prompt's scores. A run's last
        token has no score because it was never an input
    lens: each lens's `LensResult` at the same tokens, by site, as in `run.lens`
    features: each attached SAE's `FeaturesResult` at the same tokens, by name, as in `run.features`
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    scores: Mapping[str, PartScores] = {}
    lens: Mapping[Any, Any] = {}
    features: Mapping[str, Any] = {}


class PartListener(Protocol):
    """A callback that receives a run's parts in order, before its answer. It is called on the engine's thread, in this
    process, so it must not block or raise.

    closed: True once the client has disconnected; the engine then stops the run if it can
    """

    closed: bool

    def __call__(self, part: Part) -> None: ...


class Request(msgspec.Struct):
    """A generation or grading request.

    run: the key of the run
    prompt_token_ids, text: the prompt; `text` is None if only the ids are known
    max_tokens: the maximum number of tokens to generate
    bound: the bound program, if any
    vectors: the program's inline vectors, rows [n, W] by bank key
    sampling: sampling parameters, by vLLM's names
    score: token ids to score as the next token; the answer has their log-probabilities
    logprobs: the number of top tokens to report for each generated token; 0: only the generated token; None: no
        log-probabilities
    code: the functions of the program's `Apply` ops, by op index
    sources: the runs that the program reads, kept until the request ends
    listener: a callback for the output as it is generated
    adapter: the LoRA adapter to apply
    chat: the chat messages that the prompt was rendered from, if any
    images: the positions of each image's placeholder tokens in the prompt
    inputs: for a prompt with images, the engine's own representation (`Expanded.inputs`)
    ended: True once `Engine.end` was called
    prompt_logprobs: as `logprobs`, for each prompt token
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
    sources: tuple[SourceRun, ...] = ()
    listener: PartListener | None = None
    adapter: Adapter | None = None
    chat: Chat | None = None
    images: list[list[int]] = []
    inputs: Any = None
    ended: bool = False
    prompt_logprobs: int | None = None

    @property
    def abandoned(self) -> bool:
        """True if the request's listener is closed."""
        return self.listener is not None and self.listener.closed


class Expanded(msgspec.Struct):
    """A prompt with images, each expanded to its placeholder tokens.

    ids: the token ids
    images: the positions of each image's placeholder tokens, ascending
    inputs: the engine's own representation of the prompt
    """

    ids: list[int]
    images: list[list[int]]
    inputs: Any


class Drafts(NamedTuple):
    """A request's counts in speculative decoding: draft tokens proposed, and draft tokens accepted."""

    proposed: int
    accepted: int


class Monitor(msgspec.Struct, frozen=True):
    """A probe that scores every token of every request of an engine.

    probe: the probe, without token selection or pooling
    threshold: count the tokens that score above this value; None: do not count
    points: the points of the probe's site, in layer order
    columns: indices of the probe's columns in the products of all monitors, [T, K]; k columns for each point
    """

    probe: Probe
    threshold: float | None
    points: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def weight(self) -> np.ndarray:
        """The probe's weight W, [k, D]."""
        assert isinstance(self.probe.weight, Vector)
        return self.probe.weight.rows()

    @property
    def outputs(self) -> int:
        """The number of scores per token and point, k."""
        return len(self.weight)

    def scores(self, products_TK: np.ndarray) -> np.ndarray:
        """Return scores [T, k], or [L, T, k] at a site with L layers. `products_TK`: the products of all monitors."""
        own = products_TK[:, list(self.columns)].reshape(len(products_TK), len(self.points), self.outputs)
        bias = 0 if self.probe.bias is None else self.probe.bias.array()
        scores = activated((own + bias).astype(np.float32, copy=False), self.probe.activation).swapaxes(0, 1)
        return scores if is_stacked(self.probe.at) else scores[0]


class Answer(msgspec.Struct):
    """The result of a request.

    token_ids: the generated tokens
    text: the generated text, or a function that decodes it on first use
    logprobs: one float per generated token; None if not requested
    scores: the log-probability of each graded token as the next token, by token id
    finish_reason: "stop" or "length"
    cached_tokens: the number of prompt tokens read from the prefix cache
    top_logprobs: log-probabilities of the top tokens by token id, for each generated token
    computed_from: the first layer and prompt position that were computed, if the rest came from the prompt's run
        without a program; None if the prompt was computed in full or read from a prefix cache
    drafts: draft token counts; None if the engine does not count drafts, or makes none
    monitored: the products W h of the always-on probes (`Engine.monitors`) for every input token, [T, K]
    stop_reason: "probe:NAME" if a condition on probe NAME ended the run, at its last token
    prompt_logprobs, prompt_top_logprobs: as `logprobs` and `top_logprobs`, for each prompt token after the first
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
    stop_reason: str | None = None
    monitored: np.ndarray | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[dict[int, float]] = []


class Gradients(msgspec.Struct, frozen=True):
    """A prompt's activations, and the gradients of its next token's log-probabilities.

    scores: the log-probability of each weighted token as the next token, by token id
    rows: the activations at each point, fp32 [T, W]
    gradients: the gradient of the weighted sum of log-probabilities with respect to these rows, [T, W]
    """

    scores: dict[int, float]
    rows: dict[int, np.ndarray]
    gradients: dict[int, np.ndarray]


class Tokenizer(Protocol):
    """Conversion between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the tokenizer's special tokens."""
        ...

    def bare(self, text: str) -> list[int]:
        """Encode a text without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, without special tokens."""
        ...

    def settled(self, ids: Sequence[int]) -> str:
        """Return the longest prefix of the decoded text that further ids cannot change."""
        ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Decode each token separately."""
        ...

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the prompt's text, and the (begin, end) character offsets of each token."""
        ...

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Return the token ids of a chat. `options`: further arguments of the chat template."""
        ...

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        """Return the role and token positions of each message in the chat encoded as `ids`.

        `options`: further arguments of the chat template. Raises `TokensError` if the positions are ambiguous.
        """
        ...


def settle(future: Future[Answer], answer: Answer | Exception) -> None:
    """Set a future's answer or error, unless it is already done or cancelled."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def settle_if_failed(futures: Iterable[Future[Any]], job: Future[Any]) -> None:
    """If the job failed, set its error on the unfinished futures of its requests."""
    error = job.exception()
    if error is not None:
        for future in futures:
            settle(future, as_patchclamp_error(error))


VLLM_SAMPLING = (  # parameters of vLLM that other engines may not support
    "allowed_token_ids", "bad_words", "detokenize", "frequency_penalty", "include_stop_str_in_output", "logit_bias",
    "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "structured_outputs", "top_k", "top_p",
)  # fmt: skip
MAX_SCORES = 128  # graded token ids per run, and top tokens per position: the limit of vLLM's sampler
Window = tuple[str, int, int | None, int, int, int]  # the fields of a `Wanted`, then a row range: begin, end
Captured = tuple[np.ndarray, "torch.Tensor | np.ndarray"]  # positions [T] ascending, and rows [T, W]
TopTokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # positions [T], ids [T, top] int32, log-probabilities fp32


def by_capture(positions: Sequence[np.ndarray], ids: np.ndarray, logprobs: np.ndarray) -> list[TopTokens]:
    """Split the concatenated ids and log-probabilities of top tokens into one `TopTokens` per capture."""
    ends = np.cumsum([len(each) for each in positions], dtype=np.int64)[:-1]
    return list(zip(positions, np.split(ids, ends), np.split(logprobs, ends), strict=True)) if positions else []


class VllmLLM(Protocol):
    """The part of a `vllm.LLM` that `open_engine` uses."""

    llm_engine: Any


class Wanted(NamedTuple):
    """A request for a run's captured rows from position `first` on. `op`: index of a capturing op; None: all ops."""

    run: str
    point: int
    op: int | None = None
    first: int = 0

    def window(self, begin: int, end: int) -> Window:
        return self.run, self.point, self.op, self.first, begin, end


class PackedTokens(msgspec.Struct, array_like=True):
    """`TopTokens` as bytes: int64 positions of each capture; int32 ids and fp32 log-probabilities of all rows."""

    positions: list[bytes]
    ids: bytes
    logprobs: bytes

    def read(self, top: int) -> list[TopTokens]:
        ids, logprobs = np.frombuffer(self.ids, np.int32), np.frombuffer(self.logprobs, np.float32)
        positions = [np.frombuffer(each, np.int64) for each in self.positions]
        return by_capture(positions, ids.reshape(-1, top), logprobs.reshape(-1, top))


class Engine(Protocol):
    """Runs requests. All methods are thread-safe.

    The default methods of optional features raise an error; engines that support a feature override them.

    model: facts about the model
    sites: its site map
    tokenizer: its tokenizer
    remote: True if programs run in other processes, so `Apply` is not supported
    has_gradients: True if it supports `gradients` and `jacobians`
    proved: True if the engine has proved its sites itself, as a server does
    weights: the number of in-place updates of the model's weights
    proved_weights: the value of `weights` when the sites were last proved
    run_prefix: the prefix of all its run names
    batch_difference: a description of how batched and per-request grades differ; "" if equal, None before the proof
    lens_difference: how a lens on the final stream differs from the model; "" if equal, None before the proof
    keeps_captures_here: True if unfetched captures occupy this machine's memory
    monitors: its always-on probes
    bank: the bank that all its `LM`s share; None if each has its own
    whole_because: the reason why every run is computed in full, on an engine that can skip computation; else ""
    """

    model: Model
    sites: SiteMap
    tokenizer: Tokenizer
    remote: bool = False
    has_gradients: bool = False
    proved_weights: int = 0
    run_prefix: str = ""
    keeps_captures_here: bool = True
    batch_difference: str | None = None
    lens_difference: str | None = None
    monitors: tuple[Monitor, ...] = ()
    bank: NamedBank | None = None

    @property
    def proved(self) -> bool:
        return False

    @property
    def weights(self) -> int:
        return 0

    @property
    def whole_because(self) -> str:
        return ""

    @property
    def has_views(self) -> bool:
        """True if large captures are returned without a copy, so a whole run can be fetched at once."""
        return False

    @contextlib.contextmanager
    def computing_whole(self) -> Iterator[None]:
        """Compute requests submitted inside the context in full, without regrouping them into other batches."""
        yield

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        """Start requests, as one batch if the engine batches. Each future receives its request's answer or error."""
        ...

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> Captured:
        """Return the ascending positions [T] and rows [T, W] that a run captured at `point`; `op`, `first`: as in
        `Wanted`. If two ops captured a position, the later one wins."""
        ...

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        """Call `fetch` for each item in one round trip. Meant for many small captures."""
        return [self.fetch(*each) for each in wanted]

    def gather(self, runs: list[str], point: int, op: int | None = None) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return the rows that runs captured at `point` (by op `op`, or by all ops), sorted by run and position: run
        indices [R], positions [R], and rows [R, W], which may be a view of captured memory."""
        captured = self.fetch_many([Wanted(run, point, op) for run in runs])
        run = np.repeat(np.arange(len(runs)), [len(positions) for positions, _ in captured])
        parts = [np.asarray(rows if isinstance(rows, np.ndarray) else rows.float()) for _, rows in captured]
        rows = np.concatenate([part for part in parts if len(part)] or parts[:1])
        return run, np.concatenate([positions for positions, _ in captured]), rows

    unembeds = False  # True if `read_streams` is supported

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        """Return the `top` likeliest tokens of each captured row, best first, with fp32 log-probabilities over the
        vocabulary. Rows [D] pass through the translator, then the model's own final norm and unembedding."""
        raise EngineError(f"the {self.model.engine} engine does not support lenses")

    def read_streams(
        self, streams: list[Wanted], rows: list[int], top: int, chosen: list[int]
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return the `lens_values` of captured streams of one run at the row indices `rows`, computed on the device by
        the model's own final norm and unembedding. The first stream is the final one."""
        raise EngineError(f"the {self.model.engine} engine does not unembed streams on its device")

    def attach(self, name: str, sae: SAE, precision: str) -> None:
        """Copy an SAE to the device under a unique name. Raises `CapacityError` if it does not fit."""
        raise EngineError(f"the {self.model.engine} engine cannot attach SAEs: use patchclamp serve --sae")

    def detach(self, name: str) -> None:
        """Free an attached SAE's memory."""
        raise EngineError(f"the {self.model.engine} engine cannot detach SAEs")

    def release(self, runs: list[str]) -> None:
        """Free the runs' captures, and stop unfinished runs whose listener is closed. The garbage collector may call
        this at any moment, so it must not wait for a lock."""
        ...

    def abort(self, runs: list[str]) -> None:
        """Stop unfinished runs, if the engine can, and free their captures."""
        ...

    def end(self, requests: list[Request]) -> None:
        """End unfinished requests early, if the engine can. Each keeps its captures and is answered with its output so
        far. The caller drops tokens generated after this call."""
        for request in requests:
            request.ended = True

    def text_of(self, prompt: list[int], sampling: dict[str, Any], token_ids: list[int]) -> str:
        """Return the text of a request that ended after `token_ids`."""
        return complete_text(self.tokenizer.decode, token_ids)

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        """Raise `UnknownName` or `ProgramError` for sampling parameters that this engine does not support."""
        ...

    def status(self) -> dict[str, Any]:
        """Return counts of the engine's resources, such as stored runs, for tests and the doctor."""
        ...

    def close(self) -> None:
        """Stop the engine and free its resources."""
        ...

    def check_adapter(self, adapter: Adapter) -> None:
        """Raise `EngineError` or `CapacityError` for an adapter that this engine cannot run."""
        raise EngineError(
            f"the {self.model.engine} engine does not support LoRA adapters: merge the adapter into its model "
            "(peft_model.merge_and_unload()) and load the merged model, or use vLLM with enable_lora=True", "lora"
        )  # fmt: skip

    def expand(self, prompt: Mapping[str, Any] | None, messages: list[Any] | None, options: dict[str, Any]) -> Expanded:
        """Prepare a prompt with images in vLLM's format (`{"prompt": ..., "multi_modal_data": {"image": ...}}`, or
        token ids under "prompt_token_ids"), or a chat with images in `messages`. `options`: chat template arguments.

        Raises `EngineError` if the engine does not support images, `ProgramError` for an invalid prompt.
        """
        raise EngineError(f"the {self.model.engine} engine supports only text prompts; engine='vllm' supports images")

    def gradients(
        self, prompt_token_ids: list[int], points: list[int], weights: dict[int, float],
        stream: np.ndarray | None = None,
    ) -> Gradients:  # fmt: skip
        """Compute the gradient of Σ weight · log p(next token) with respect to each point. `weights`: by token id.

        stream: rows [T, D] that replace the stream before the first layer

        Raises: `EngineError` if the engine does not support gradients, `UnsupportedSite` for a point without gradients.
        """
        raise EngineError(f"the {self.model.engine} engine does not compute gradients; engine='transformers' does")

    def jacobians(self, prompt_token_ids: list[int], points: list[int], positions: list[int]) -> dict[int, np.ndarray]:
        """Compute the Jacobian [D, D] of the final stream, before the final norm, with respect to each point (of width
        D): the derivative of the stream's sum over `positions`, averaged over the point's rows at `positions`.

        Raises: as `gradients`.
        """
        raise EngineError(f"the {self.model.engine} engine does not compute gradients; engine='transformers' does")

    @property
    def batch_refusal(self) -> str:
        """The reason why every program is graded as a separate request; "" if `grade` runs programs in batches."""
        return f"the {self.model.engine} engine does not grade in batches"

    @property
    def removes_keys(self) -> bool:
        """True if `grade` runs programs that remove keys from attention, as `RemoveKeys` ops."""
        return False

    def job_refusal(self, job: GradeJob) -> str:
        """Return the reason why an engine that grades in batches runs this job as requests; "" if it uses batches."""
        return ""

    def grade(self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        """Grade jobs with equal `kl` and `top` in the engine's own batches. Fill the tables, and yield (job index,
        indices of the job's newly graded programs)."""
        raise EngineError(self.batch_refusal)

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        """Return a weight by its name in `engines.weights`, fp32; None if the model or layer lacks it."""
        raise EngineError(f"the {self.model.engine} engine does not return weights")

    def report(self) -> list[Finding]:
        """Return the doctor's findings about this engine."""
        return []

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and cache until `wake`. Raises `EngineError` if unsupported."""
        raise EngineError(f"the {self.model.engine} engine does not support sleep; vLLM on a GPU does")

    def wake(self) -> None:
        """Reallocate the memory and restore the weights. Raises `EngineError` if unsupported."""
        raise EngineError(f"the {self.model.engine} engine does not support sleep; vLLM on a GPU does")


def check_sampling(sampling: Mapping[str, Any], known: Iterable[str], engine: str) -> None:
    """Raise `UnknownName` for an unsupported sampling parameter, `ProgramError` for an invalid value."""
    for name in (name for name in sampling if name not in known):
        if name in VLLM_SAMPLING:
            supported = f"{name!r} is supported by vLLM but not by the {engine} engine; available: {', '.join(known)}"
            raise UnknownName(supported, f"sampling.{name}")
        raise unknown("sampling parameter", name, known, f"sampling.{name}")
    for name, low, high in (("temperature", 0, 2), ("top_p", 1e-6, 1), ("min_p", 0, 1)):
        number = sampling.get(name, high)
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not low <= number <= high:
            raise ProgramError(f"expected a number from {low} to {high}, got {number!r}", f"sampling.{name}")
    top_k = sampling.get("top_k", 0)
    if top_k is not None and (not _is_integer(top_k) or top_k < -1):
        raise ProgramError(f"expected a positive integer, or 0 or -1 for all tokens, got {top_k!r}", "sampling.top_k")
    stop = [] if sampling.get("stop") is None else sampling["stop"]
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise ProgramError(f"expected a non-empty string or a list of them, got {stop!r}", "sampling.stop")
    ids = [] if sampling.get("stop_token_ids") is None else sampling["stop_token_ids"]
    if not isinstance(ids, (list, tuple)) or not all(_is_integer(token) and token >= 0 for token in ids):
        raise ProgramError(f"expected a list of token ids, got {ids!r}", "sampling.stop_token_ids")
    if not isinstance(sampling.get("ignore_eos", False), bool):
        raise ProgramError(f"expected True or False, got {sampling['ignore_eos']!r}", "sampling.ignore_eos")


def _is_integer(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


ABORTED = "the run was aborted"


class Carried(msgspec.Struct, array_like=True):
    """A bound program, in the form that is encoded into a request's sampling parameters.

    bound: the program, bound to the prompt
    sizes: (rows, width) of each bank key that the program reads
    """

    bound: BoundProgram
    sizes: dict[str, tuple[int, int]]


decode = msgspec.msgpack.Decoder(Carried).decode


def carry(request: Request, sites: SiteMap) -> bytes:
    """Encode a request's program. The request must have one."""
    assert request.bound is not None
    sources = {source.key: source for source in request.sources}

    def rows_of(run: str, point: int) -> int:
        return len(sources[run].positions_of(point))

    return msgspec.msgpack.encode(Carried(request.bound, bank_sizes(request.bound, request.vectors, sites, rows_of)))


def receipt_of(carried: bytes) -> str:
    """Return the digest of an encoded program. Each worker computes the digest of the program that it installed."""
    return hashlib.blake2b(carried, digest_size=16).hexdigest()
