"""The Transformers engine: runs programs through hooks on a Hugging Face model, in batches with a key/value cache.

Gradients take one forward pass with autograd and one backward pass.

B prompts · T tokens of the (longest) prompt · V vocabulary · D model width · W width of a point
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError

from patchclamp.engines.base import (
    ABORTED,
    Answer,
    Engine,
    Finding,
    Gradients,
    Model,
    Request,
    Tokenizer,
    TopTokens,
    Wanted,
    by_capture,
    only_uniform,
    settle,
    settle_if_failed,
)
from patchclamp.engines.dense_keys import DenseKeys, unread_attention
from patchclamp.engines.generation import Generation, Passes, Sampler, StepReadout, cache_name
from patchclamp.engines.lenses import LastNorm, Unembed, read_streams, top_tokens
from patchclamp.engines.preflight import default_dtype
from patchclamp.engines.recompute import FEW, WAYS, Recompute
from patchclamp.engines.tokenizer import HubTokenizer, NoTokenizer
from patchclamp.engines.weights import read_weight
from patchclamp.errors import (
    CapacityError,
    EngineError,
    ModelError,
    ProgramError,
    UnsupportedSite,
    as_patchclamp_error,
    describe_error,
    unknown,
    unpack,
)
from patchclamp.kernels.code import check_outside
from patchclamp.language.ops import Translator
from patchclamp.language.sae import SAE
from patchclamp.language.values import as_flag
from patchclamp.plan.bound import BoundProgram, run_key
from patchclamp.plan.cuts import Cut
from patchclamp.plan.room import Placement, Room, bank_sizes
from patchclamp.plan.table import record_count
from patchclamp.runtime import Arrival, Limits, Runtime
from patchclamp.runtime.dictionaries import dtype_of_precision
from patchclamp.runtime.host_step import HostStep
from patchclamp.runtime.op import at_work
from patchclamp.runtime.taps import attach, find, handed
from patchclamp.sites import SiteMap, Tap, View, family_of, has_table, layer_kinds, sizes_of
from patchclamp.sites.map import architectures_of
from patchclamp.sites.tables import DECODERS
from patchclamp.sites.untabled import no_text_model, untabled

JACOBIAN_TOKENS = 1 << 11  # tokens per batch of prompt copies


def gradients(
    net: Any, sites: SiteMap, prompt_token_ids: list[int], points: list[int], weights: dict[int, float],
    stream: np.ndarray | None = None,
) -> Gradients:  # fmt: skip
    """Implement `Engine.gradients`. The caller must have exclusive use of the model. Raises as `_watching`."""
    taps = {point.number: tap for point, tap in sites.taps("transformers")}
    with _watching(net, sites, points, stream) as (tensors, run):
        logprobs_V = run([prompt_token_ids]).logits[0, -1].float().log_softmax(-1)
        value = sum(weight * logprobs_V[token] for token, weight in weights.items())
        assert isinstance(value, torch.Tensor)
        found = torch.autograd.grad(value, list(tensors.values()), allow_unused=True)
    scores = {token: float(logprobs_V.detach()[token]) for token in weights}
    rows, slopes = {}, {}
    for (number, tensor), gradient in zip(tensors.items(), found, strict=True):
        view, width = sites.view(taps[number]), sites.points[number].width
        slope = torch.zeros_like(tensor) if gradient is None else gradient
        factor = 1.0 if view is None else view.factor
        rows[number] = _columns(tensor, view, width) * factor
        slopes[number] = _columns(slope, view, width) / factor
    return Gradients(scores, rows, slopes)


def jacobians(
    net: Any, sites: SiteMap, prompt_token_ids: list[int], points: list[int], positions: list[int]
) -> dict[int, np.ndarray]:
    """Implement `Engine.jacobians`. The caller must have exclusive use of the model. Raises as `_watching`.

    The forward pass runs B copies of the prompt; in each backward pass, copy b yields one row of every Jacobian.
    """
    factors = {point.number: 1.0 if (view := sites.view(tap)) is None else view.factor
               for point, tap in sites.taps("transformers")}  # fmt: skip
    end = next(point.number for point in sites.points if point.kind == "stream_end")
    width, batch = sites.d_model, max(min(sites.d_model, JACOBIAN_TOKENS // len(prompt_token_ids)), 1)
    found = {point: np.empty((width, width), np.float32) for point in points}
    with _watching(net, sites, [*points, end]) as (tensors, run):
        run([prompt_token_ids] * batch)
        sources = [tensors[point] for point in points]
        for first in range(0, width, batch):
            b = torch.arange(min(batch, width - first))
            cotangent_BTD = torch.zeros_like(tensors[end])
            cotangent_BTD[b[:, None], positions, first + b[:, None]] = factors[end]
            slopes = torch.autograd.grad(
                tensors[end], sources, cotangent_BTD, retain_graph=first + batch < width, allow_unused=True
            )
            for point, source, slope in zip(points, sources, slopes, strict=True):
                slope_BTD = (torch.zeros_like(source) if slope is None else slope).reshape(batch, -1, width)
                rows_BD = slope_BTD[: len(b), positions].float().mean(1) / factors[point]
                found[point][first : first + batch] = rows_BD.cpu().numpy()
    return found


@contextlib.contextmanager
def _watching(
    net: Any, sites: SiteMap, points: list[int], stream: np.ndarray | None = None
) -> Iterator[tuple[dict[int, torch.Tensor], Callable[[list[list[int]]], Any]]]:
    """Yield a dict and a function. The function runs the model on equal-length prompts, and fills the dict with the
    tensors at `points`, attached to the autograd graph. `stream` replaces the stream before the first layer.

    Raises `UnsupportedSite` for logits, and for a router, whose choice of experts has no gradient.
    """
    taps = {point.number: tap for point, tap in sites.taps("transformers")}
    for number in points:
        if taps[number].rerun or sites.points[number].rows == "sampled":
            raise UnsupportedSite(f"gradients are not available at {sites.label(number)}")
    tensors: dict[int, torch.Tensor] = {}
    net.requires_grad_(False)  # only activations need gradients
    device = next(net.parameters()).device

    def run(prompts: list[list[int]]) -> Any:
        ids_BT = torch.tensor(prompts, device=device)
        return net(
            input_ids=ids_BT, position_ids=torch.arange(ids_BT.shape[1], device=device).expand(ids_BT.shape),
            use_cache=False, logits_to_keep=1,
        )  # fmt: skip

    with contextlib.ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
        # the embedding is the leaf at which gradients end
        leaf = net.get_input_embeddings().register_forward_hook(lambda _, __, output: output.detach().requires_grad_())
        hooks.callback(leaf.remove)
        if stream is not None:
            first = next(point.number for point in sites.points if point.kind == "stream")
            rows_1TD = torch.tensor(stream, device=device, dtype=net.dtype)[None]
            hooks.callback(_replace(net, taps[first], rows_1TD).remove)
        for number in dict.fromkeys(points):
            copied = sites.points[number].kind != "mid"  # the layer adds the original to the MLP's output, too
            hooks.callback(_read(net, taps[number], functools.partial(tensors.__setitem__, number), copied).remove)
        yield tensors, run


def _read(net: Any, tap: Tap, read: Callable[[torch.Tensor], None], copied: bool) -> Any:
    """Hook a tap: call `read` with its tensor.

    copied: True to pass the module a copy of its input, because other modules may read the original. Outputs are always
        copied, because the model may add to them in place.
    """

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = kwargs[tap.hidden] if isinstance(tap.hidden, str) else args[tap.hidden]
        rows = rows.clone() if copied else rows
        read(rows)
        return handed(args, kwargs, tap.hidden, rows) if copied else None

    def after(module: Any, args: Any, output: Any) -> Any:
        assert isinstance(tap.hidden, int)
        if not isinstance(output, tuple):
            read(output)
            return output.clone()
        read(output[tap.hidden])
        return (*output[: tap.hidden], output[tap.hidden].clone(), *output[tap.hidden + 1 :])

    module = find(net, tap.module)
    if tap.moment == "in":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _replace(net: Any, tap: Tap, rows_1TD: torch.Tensor) -> Any:
    """Hook an input: replace its values with the rows, and propagate gradients to the original tensor."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = kwargs[tap.hidden] if isinstance(tap.hidden, str) else args[tap.hidden]
        return handed(args, kwargs, tap.hidden, own + (rows_1TD - own).detach())

    return find(net, tap.module).register_forward_pre_hook(before, with_kwargs=True)


def _columns(tensor: torch.Tensor, view: View | None, width: int) -> np.ndarray:
    """Return a point's rows [T, W] from its tap's tensor."""
    tensor = tensor.detach().float().cpu()
    if view is not None and view.by_head:  # [1, H, T, E]
        return tensor[0].transpose(0, 1).reshape(-1, width).numpy()
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() == 3 else tensor.reshape(-1, width)
    return (rows if view is None else view.columns(rows, width)).reshape(-1, width).numpy()


class TransformersEngine(Engine):
    """A causal language model from a hub id or a folder.

    dtype: a torch dtype's name, or "auto" for the checkpoint's dtype; default: float32 for models below 2 B parameters
        on a CPU, else the checkpoint's dtype
    max_num_seqs: the maximum number of prompts in a batch
    padding_side: the side on which shorter prompts are padded. With "right", padding precedes the generated tokens, so
        a model needs a site table, and must have neither a sliding window nor recurrent layers
    skip_tokenizer_init: True to load no tokenizer; prompts are token ids
    numerics: only "uniform": every step runs the same code
    recompute: for a prompt shared by many requests in a call, "changed" computes only the layers and positions that
        programs can change; "all" computes everything

    Raises: `ModelError` if there is no site table and none can be derived, if the checkpoint lacks weights, or if the
    model cannot be padded on the right.
    """

    has_gradients = True

    def __init__(
        self, name: str, *, dtype: str | None = None, device: str | None = None, max_model_len: int | None = None,
        max_num_seqs: int = 64, padding_side: Literal["left", "right"] = "left", trust_remote_code: bool = False,
        skip_tokenizer_init: bool = False, max_records: int = Limits().max_records,
        bank_bytes: int = Limits().bank_bytes, sae_bytes: int = 0, numerics: str = "uniform",
        recompute: Literal["changed", "all"] = "changed",
    ) -> None:  # fmt: skip
        import transformers

        only_uniform(numerics, "Transformers")
        if recompute not in WAYS:
            raise unknown("recompute mode", str(recompute), WAYS, "recompute")
        if padding_side not in ("left", "right"):
            raise unknown("padding side", str(padding_side), ("left", "right"), "padding_side")
        for option, size in {"max_num_seqs": max_num_seqs, "max_records": max_records, "bank_bytes": bank_bytes,
                             "max_model_len": 1 if max_model_len is None else max_model_len}.items():  # fmt: skip
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ProgramError(f"expected a positive integer, got {size!r}", option)
        as_flag(trust_remote_code, "trust_remote_code")
        as_flag(skip_tokenizer_init, "skip_tokenizer_init")
        self.device: str = _checked_device(device)
        if dtype is None:
            dtype = (default_dtype(name) if torch.device(self.device).type == "cpu" else None) or "auto"
        wanted = _dtype(dtype)
        try:
            self._net = load_net(name, wanted, trust_remote_code).to(self.device).eval()
            self.tokenizer: Tokenizer = (
                NoTokenizer() if skip_tokenizer_init else HubTokenizer.load(name, trust_remote_code=trust_remote_code)
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be loaded: {describe_error(error)}", "model") from error
        whole = self._net.config
        config = whole.get_text_config()
        architectures = whole.architectures or [type(self._net).__name__]
        tabled = has_table(architectures, config)
        if not tabled and config is not whole:
            raise no_text_model(architectures)
        _check_cache(self._net)
        sizes = sizes_of(config)
        max_model_len = max_model_len or _max_positions(config)
        if padding_side == "right":
            _check_padding_right(config, tabled, max_model_len)
        family = family_of(architectures, config) if tabled else untabled(config, trust_remote_code)
        self.sites = SiteMap(family, sizes)
        self.model = Model(
            name, "transformers", transformers.__version__, family.name, config.num_hidden_layers, config.hidden_size,
            config.vocab_size, str(self._net.dtype).removeprefix("torch."), max_model_len,
            f"{self.device} {getattr(whole, '_commit_hash', None)}",
        )  # fmt: skip
        self._batch_size, self._pads_left = max_num_seqs, padding_side == "left"
        limits = Limits(2 * max_num_seqs, max_records=max_records, bank_bytes=bank_bytes, sae_bytes=sae_bytes)
        self.runtime: Runtime = Runtime(self.sites, limits, self.device)
        self._room = Room(2 * max_num_seqs, max_records, bank_bytes // 4)  # for a batch and the previous one
        self._placements: dict[str, Placement] = {}  # by run
        assert isinstance(self.runtime.step, HostStep)
        self._host = self.runtime.step
        self._logits = next(point.number for point in self.sites.points if point.rows == "sampled")
        self.sites.no_attention = unread_attention(self._net, self.sites)
        self._keys = self.runtime.keys = DenseKeys(self._net, self.sites, self.runtime)
        self.runtime.views |= attach(self._net, self.sites.taps("transformers"), self.sites.view, self._keys.around)
        self._recompute = Recompute(self._net, self.sites, self.device, recompute, max_model_len)
        self._released: collections.deque[str] = collections.deque()
        self._reads: collections.deque[tuple[Future[Any], Callable[[], Any]]] = collections.deque()
        self._queued: set[int] = set()  # numbers of the jobs that wait for the engine's thread
        self._numbers = itertools.count()
        self._unfinished: Generation | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="patchclamp")

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in requests]
        for index, cut in self._recompute.groups(requests, self._batch_size):
            batch = [futures[i] for i in index]
            served = self._call(self._serve, [requests[i] for i in index], batch, cut)
            served.add_done_callback(functools.partial(settle_if_failed, batch))
        self._call(self._recompute.trim)
        return futures

    @contextlib.contextmanager
    def computing_whole(self) -> Iterator[None]:
        with self._recompute.off():
            yield

    @property
    def whole_because(self) -> str:
        return self._recompute.whole_because or FEW

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> tuple[np.ndarray, torch.Tensor]:
        positions, rows = self._read(lambda: self.runtime.fetch(run, point, op, first))
        return positions, rows.cpu()

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        return self._read(lambda: self._lens(wanted, top, translator))

    unembeds = True

    def read_streams(
        self, streams: list[Wanted], rows: list[int], top: int, chosen: list[int]
    ) -> dict[str, np.ndarray]:  # fmt: skip
        def read() -> dict[str, np.ndarray] | None:
            captured = [self.runtime.fetch(*each)[1] for each in streams]
            return read_streams(captured, rows, self._readout(), top, chosen, self.sites.d_vocab, self.device)

        found = self._read(read)
        assert found is not None
        return found

    def attach(self, name: str, sae: SAE, precision: str) -> None:
        self._call(self.runtime.dictionaries.attach, name, sae, dtype_of_precision(precision, self._net.dtype)).result()

    def detach(self, name: str) -> None:
        self._call(self.runtime.dictionaries.detach, name).result()

    def release(self, runs: list[str]) -> None:
        # the garbage collector may call this on any thread, so it must not take a lock
        self._released.extend(runs)

    def abort(self, runs: list[str]) -> None:
        """Free runs' captures. Submitted batches run to completion, except for runs whose listener is closed."""
        with contextlib.suppress(EngineError):  # the engine is closed and holds nothing
            self._call(self._release, runs)

    def status(self) -> dict[str, int]:
        """Return counts: programs, runs, vectors, free records, planned steps, batches run in full or from a cut."""
        batches = {f"batches_{way}": count for way, count in self._recompute.passes.items()}
        return self._call(lambda: {**self.runtime.status(), **self._room.counts(), **batches}).result()

    def report(self) -> list[Finding]:
        why = self._call(self._recompute.why_whole).result()
        if why:
            return [Finding("configuration", "recompute", "note", f"every run is computed in full: {why}")]
        words = "runs that share a prompt are computed from the first layer and position that their programs change"
        return [Finding("configuration", "recompute", "ok", words)]

    def _call(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a job on the engine's thread, after freeing released runs. If no job is queued, finish the last batch."""

        def run() -> Any:
            try:
                self._queued.discard(job_number)
                self._release([self._released.popleft() for _ in range(len(self._released))])
                return job(*args)
            finally:
                if not self._queued:
                    self._finish_last()

        check_outside()
        job_number = next(self._numbers)
        try:
            self._queued.add(job_number)
            return self._thread.submit(run)
        except RuntimeError:
            self._queued.discard(job_number)
            raise EngineError("the engine is closed") from None
        except BaseException:  # an interrupt
            self._queued.discard(job_number)
            raise

    def _read(self, job: Callable[[], Any]) -> Any:
        """On the engine's thread, run a job that reads captures; if a batch is running, between two of its steps."""
        read: Future[Any] = Future()
        self._reads.append((read, job))
        self._call(self._read_pending).add_done_callback(functools.partial(settle_if_failed, [read]))
        return read.result()

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        Sampler.check(sampling)

    def gradients(
        self, prompt_token_ids: list[int], points: list[int], weights: dict[int, float],
        stream: np.ndarray | None = None,
    ) -> Gradients:  # fmt: skip
        return self._call(gradients, self._net, self.sites, prompt_token_ids, points, weights, stream).result()

    def jacobians(self, prompt_token_ids: list[int], points: list[int], positions: list[int]) -> dict[int, np.ndarray]:
        return self._call(jacobians, self._net, self.sites, prompt_token_ids, points, positions).result()

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        weight = self._call(read_weight, self._net, self.sites, "transformers", name, layer).result()
        return None if weight is None else weight.float().numpy()

    def close(self) -> None:
        self._thread.shutdown()
        self._finish_last()

    # -- on the engine's thread

    def _read_pending(self) -> None:
        """Run pending reads. Also called between steps, for callers that read during generation."""
        while self._reads:
            read, job = self._reads.popleft()
            try:
                with torch.inference_mode(False):  # callers may train on the rows, and change them
                    read.set_result(job())
            except Exception as error:
                read.set_exception(error)

    def _lens(self, wanted: list[Wanted], top: int, translator: Translator | None) -> list[TopTokens]:
        captured = [self.runtime.fetch(*each) for each in wanted]
        rows = [rows for _, rows in captured]
        found = top_tokens(rows, self._readout(), top, self.sites, self.device, translator)
        assert found is not None
        return by_capture([positions for positions, _ in captured], *found)

    def _readout(self) -> Unembed:
        """Return the function from rows of the stream to logits."""
        norm = LastNorm.of(self._net, self.sites, "transformers")
        return lambda rows_ND: self._unembed(norm(rows_ND, self._net.dtype))

    def _unembed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Compute the logits of rows that passed the final norm."""
        logits_NV = self._net.get_output_embeddings()(rows_ND) * self.sites.sizes.logit_factor
        cap = self.sites.sizes.logit_cap
        return logits_NV if cap is None else cap * (logits_NV / cap).tanh()

    def _serve(self, requests: list[Request], futures: list[Future[Answer]], cut: Cut | None) -> None:
        """Serve a batch. A program that does not fit waits for the next batch if this one has a cut; otherwise it
        fails.

        A single-step batch is finished after the next has started: the device computes it while the next is admitted.
        """
        errors = self._admit(requests)
        if self._unfinished is not None and any(isinstance(error, CapacityError) for error in errors):
            self._finish_last()  # frees room; then place all again, because small programs may block a large one
            self._free([request.run for request in requests])
            errors = self._admit(requests)
        may_wait = cut is not None and None in errors
        waiting = [i for i, error in enumerate(errors) if may_wait and isinstance(error, CapacityError)]
        here = [i for i in range(len(requests)) if i not in waiting]
        generation = Generation([requests[i] for i in here], [futures[i] for i in here], [errors[i] for i in here])
        try:
            self._begin(generation, cut)
        finally:
            self._finish_last()
        self._unfinished = generation
        if not waiting and generation.may_wait:
            assert generation.passes is not None
            generation.passes.cache = None  # free the keys and values for the next batch
            return
        self._finish_last()
        self._free([requests[i].run for i in waiting])
        if waiting:
            self._serve([requests[i] for i in waiting], [futures[i] for i in waiting], cut)

    def _finish_last(self) -> None:
        """Finish the last batch, if it is unfinished."""
        generation, self._unfinished = self._unfinished, None
        if generation is None:
            return
        try:
            if generation.readout is not None:
                self._generate(generation)
        except Exception as error:
            generation.fail(as_patchclamp_error(error))
        if generation.has_failed:  # its pending failures must not be attributed to the next programs in its slots
            with contextlib.suppress(Exception):
                self._host.arrive()
                self.runtime.collect_failures()
        for request, future, answer in zip(generation.requests, generation.futures, generation.answers(), strict=True):
            try:
                self._free([request.run])
            except Exception as error:
                answer = answer if isinstance(answer, Exception) else as_patchclamp_error(error)
            settle(future, answer)

    def _admit(self, requests: list[Request]) -> list[Exception | None]:
        """Allocate space for programs, and install them together. Return each request's error."""
        errors: dict[str, Exception] = {}
        arrivals: list[Arrival] = []
        vectors: dict[str, torch.Tensor] = {}
        for request in requests:
            try:
                self.runtime.hold_code(request.run, request.code)
                if request.abandoned:
                    raise EngineError(ABORTED)
                if request.bound is not None:
                    arrivals.append(Arrival(request.run, request.bound, self._placed(request, request.bound)))
                    vectors |= {key: torch.tensor(rows) for key, rows in request.vectors.items() if key not in vectors}
            except Exception as error:
                errors[request.run] = as_patchclamp_error(error)
        try:
            failed = self.runtime.install_all(arrivals, vectors)
        except Exception as error:
            failed = dict.fromkeys([arrival.request for arrival in arrivals], error)
            self._free(failed)
            self._room.forget([key for arrival in arrivals for key in arrival.placement.load])
        errors |= {run: as_patchclamp_error(error) for run, error in failed.items()}
        return [errors.get(request.run) for request in requests]

    def _placed(self, request: Request, bound: BoundProgram) -> Placement:
        """Allocate space for a program. Raises `CapacityError` if the batch has no room for it."""
        sources = {source.key: source for source in request.sources}
        sizes = bank_sizes(bound, request.vectors, self.sites, lambda run, point: len(sources[run].positions_of(point)))
        placement = self._room.place(record_count(bound.ops), sizes)
        if placement is None:
            raise CapacityError(
                "this program's records or vectors do not fit in the batch; raise max_records or bank_bytes, or "
                "run fewer programs at once"
            )
        self._placements[request.run] = placement
        return placement

    def _free(self, runs: Iterable[str]) -> None:
        """Free the resources of runs' programs."""
        for run in runs:
            self.runtime.free([run])
            self.runtime.drop_code(run)
            placement = self._placements.pop(run, None)
            if placement is not None:
                self._room.free(placement)

    def _release(self, runs: list[str]) -> None:
        self.runtime.release(runs)
        self._room.forget(run_key(run, point.number) for run in runs for point in self.sites.points)

    @torch.inference_mode()
    def _begin(self, generation: Generation, cut: Cut | None) -> None:
        """Launch a batch's first step. A batch with a cut has a single prompt."""
        try:
            requests = generation.start(self.tokenizer, self._eos())
            if not requests:
                return
            prompts = [request.prompt_token_ids for request in requests]
            passes = self._recompute.passes_from(cut, prompts[0], len(prompts))
            generation.computed_from = None if passes is None else cut
            reads_prompts = any(request.prompt_logprobs is not None for request in requests)
            generation.passes = passes or Passes(prompts, self._pads_left, self.device, reads_prompts)
            self._step(generation)
            for b, writer in enumerate(generation.writers):
                if writer.request.prompt_logprobs is not None:
                    own = generation.passes
                    writer.take_prompt(own.hidden_BTD[b, own.start[b] :], own.logits_BV[b].float(), self._unembed)
        except Exception as error:
            generation.fail(as_patchclamp_error(error))

    @torch.inference_mode()
    def _generate(self, generation: Generation) -> None:
        """Finish a batch whose first step was launched."""
        writers, passes = generation.writers, generation.passes
        assert passes is not None
        while True:
            assert generation.readout is not None
            generation.readout.wait()
            self.runtime.collect_failures()
            for writer in writers:
                error = None if writer.done else self.runtime.outcome(writer.request.run)[1]
                if error is not None:
                    writer.error = unpack(error)
                elif not writer.done and writer.request.abandoned:
                    writer.error = EngineError(ABORTED)
                elif not writer.done and writer.request.ended:
                    writer.reason = "stop"
            generation.readout.take()
            self._free(writer.request.run for writer in writers if writer.done)
            if all(writer.done for writer in writers):
                return
            passes.advance([writer.ids[-1] if writer.ids else 0 for writer in writers])
            self._read_pending()
            self._step(generation)

    def _step(self, generation: Generation) -> None:
        """Launch a step and the readout of its logits."""
        writers, passes = generation.writers, generation.passes
        assert passes is not None
        slots = self.runtime.slots(["" if writer.done else writer.request.run for writer in writers])
        generation.readout = StepReadout(writers, self._forward(passes, slots).float())

    def _forward(self, passes: Passes, slots: np.ndarray) -> torch.Tensor:
        """Run the model on the current inputs; return the logits to sample from, [B, V]."""
        self.runtime.begin(passes.batch(slots))
        self._host.token_of_row = passes.ids_BT.reshape(-1)
        self._keys.begin(passes)
        with at_work(self.runtime):
            logits_BV = passes.run(self._net)
            self.runtime.apply(self._logits, logits_BV, None)
        self.runtime.end()
        self._keys.end()
        return logits_BV

    def _eos(self) -> set[int]:
        ids = self._net.generation_config.eos_token_id
        return set(ids if isinstance(ids, Iterable) else [] if ids is None else [ids])


def _checked_device(device: str | None) -> str:
    """Return the device's name; default: "cuda" if there is a GPU, else "cpu". Raises `ModelError` if unavailable."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if gpus else "cpu"
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"expected a device such as 'cpu' or 'cuda:0', got {device!r}: {error}", "device") from None
    fix = f"PyTorch finds {gpus} GPUs" if gpus else "PyTorch finds no GPU; omit device= to use the CPU"
    if asked.type == "cuda" and (asked.index or 0) >= gpus:
        raise ModelError(f"{device} is not available: {fix}", "device")
    try:
        torch.zeros(1, device=asked).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ModelError(f"{device} cannot be used ({describe_error(error)}): {fix}", "device") from None
    return str(device)


def load_net(name: str, dtype: torch.dtype | str, trust_remote_code: bool = False) -> Any:
    """Load a checkpoint's model. Raises `ModelError` if Transformers initialized missing weights at random."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    # fused attention omits the softcap of attention scores
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    exact = {"attn_implementation": "eager"} if capped else {}
    reads_images = not DECODERS.keys().isdisjoint(config.architectures or ())
    kind = transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM
    if not reads_images and config.get_text_config() is not config and type(config) not in kind._model_mapping:
        raise no_text_model(architectures_of(config))
    try:
        loaded: Any = kind.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **exact
        )
    except ImportError as error:  # a library for quantised weights is missing
        raise ModelError(f"Transformers cannot load this checkpoint: {error}") from error
    net, loading = loaded
    missing = sorted(loading["missing_keys"])
    if missing:
        others = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(
            f"the checkpoint lacks {', '.join(missing[:5])}{others}, required by {type(net).__name__}; Transformers "
            "would initialize them at random. Is this a causal language model?"
        )
    return net


def _check_cache(net: Any) -> None:
    """Raise `ModelError` if the model does not accept the cache argument: its state would be lost between steps."""
    if cache_name(type(net)) not in inspect.signature(net.forward).parameters:
        raise ModelError(
            f"{type(net).__name__} does not accept past_key_values, so its state would be lost between tokens; "
            'engine="vllm" may support it'
        )


def _check_padding_right(config: Any, tabled: bool, max_model_len: int) -> None:
    """Raise `ModelError` for a model whose layers may count cache slots instead of positions: without a site table,
    with a sliding window shorter than its longest text, or with recurrent layers, whose state would include the
    padding."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    windowed = set(kinds) != {"full_attention"} if kinds else getattr(config, "use_sliding_window", True)
    recurrent = "recurrent" in layer_kinds(config, len(kinds or ()))
    if not tabled or recurrent or (windowed and window is not None and window < max_model_len):
        why = "recurrent layers" if recurrent else "a sliding window"
        why = why if tabled else "no site table"
        raise ModelError(
            f'padding_side="right" is not supported for {config.model_type} models with {why}: padding would precede '
            'generated tokens; use padding_side="left"'
        )


def _max_positions(config: Any) -> int:
    """Return the model's context length, under any of the names that configs use."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    for name in names:
        if isinstance(length := getattr(config, name, None), int):
            return length
    raise ModelError(f"the config of {config.architectures} has no context length: set max_model_len")


def _dtype(name: str | torch.dtype) -> torch.dtype | str:
    word = str(name).removeprefix("torch.")
    if word == "auto":
        return word
    dtype = getattr(torch, {"half": "float16", "float": "float32"}.get(word, word), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ProgramError(f"unknown dtype {name!r}; available: auto, float32, bfloat16, float16", "dtype")
    return dtype
