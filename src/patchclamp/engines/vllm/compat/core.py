"""The engine core: admits requests with programs, obtains verdicts on them, and isolates edited blocks in the prefix
cache.

All wrappers are on one core's own objects, and do not affect requests without programs. A cached block is reused only
if all edits up to its end are the same, and never at captured positions.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from patchclamp.engines.vllm.admission import Admission, RequestProgram, SelfCheck, Verdict
from patchclamp.engines.vllm.compat import connectors, images, lora
from patchclamp.engines.vllm.compat.configuration import KEY, enabled
from patchclamp.engines.vllm.compat.seams import forwards, seam
from patchclamp.engines.vllm.monitors import SlotScores, columns_of, monitors_of_config
from patchclamp.errors import EngineError, PatchclampError, ProgramError, RunError, UnsupportedSite, pack
from patchclamp.plan.bound import APPLY, Attended, BoundProgram, Encoded, Latch, block_key

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

SCORES = "patchclamp_scores"  # in the `kv_transfer_params` of an output
WEIGHTS = f"{KEY}_weights"  # in a request's `extra_args`: the count of weight updates for which its sites were proved
NEW_WEIGHTS = "the model's weights were updated in place before this run ended: run it again"
# worker calls that do not change the model's weights; after any other call, sites are proved again
KEEPS_WEIGHTS = frozenset({
    "patchclamp_rpc", "update_max_model_len", "compute_weight_checksums", "get_model_inspection", "check_health",
    "profile", "add_lora", "remove_lora", "pin_lora", "list_loras", "reset_mm_cache", "reset_encoder_cache",
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_draft_weight_update",
    "save_sharded_state", "synchronize_device", "get_supported_tasks",
    "sleep", "wake_up",  # the level that discards weights is refused
})  # fmt: skip
PROVED_AT_ONCE = 128  # minimum number of generated tokens between two proof requests to the workers

_CORE, _SCHEDULER = "vllm.v1.core.", "vllm.v1.core.sched.scheduler:Scheduler."
REQUEST = seam("vllm.v1.engine.core:EngineCore.preprocess_add_request", "read programs", "self, request")
RPC = seam("vllm.v1.engine.core:EngineCore.collective_rpc", "detect new weights",
           "self, method, timeout=None, args=(), kwargs=None")  # fmt: skip
seam(_SCHEDULER + "add_request", "admit programs", "self, request")
seam(_SCHEDULER + "schedule", "send programs to the workers", "self, throttle_prefills=False")
seam(_SCHEDULER + "update_from_output", "attach verdicts", "self, scheduler_output, model_runner_output")
seam(_SCHEDULER + "_free_request", "free a program's resources", "self, request, delay_free_blocks=False")
seam(_SCHEDULER + "get_num_unfinished_requests", "count waiting requests", "self")
seam(_CORE + "sched.interface:SchedulerInterface.has_finished_requests", "request another step", "self")
seam(_CORE + "kv_cache_manager:KVCacheManager.free", "hold blocks until they are proved", "self, request")
seam(_CORE + "kv_cache_manager:KVCacheManager.reset_prefix_cache", "free held blocks", "self")
seam(_CORE + "kv_cache_coordinator:KVCacheCoordinator.cache_blocks", "cache proved blocks",
     "self, request, num_computed_tokens")  # fmt: skip
BLOCK_KEYS = seam(
    _CORE + "kv_cache_utils:generate_block_hash_extra_keys", "key edited blocks",
    "request, start_token_idx, end_token_idx, start_mm_idx",
)  # fmt: skip
seam(
    _CORE + "kv_cache_manager:KVCacheManager.get_computed_blocks", "compute captured positions",
    "self, request", "self, request, max_cache_hit_length=None",
)  # fmt: skip
for _kind in ("", "Unitary", "Hybrid"):
    seam(f"{_CORE}kv_cache_coordinator:{_kind}KVCacheCoordinator.find_longest_cache_hit", "compute captured positions",
         "self, block_hashes, max_cache_hit_length")  # fmt: skip


class _Making(threading.local):
    """The admission of the core that is creating a request on this thread."""

    admission: Admission | None = None


_making = _Making()
_attaching = threading.Lock()


def on_core(make: Callable[[VllmConfig], Admission]) -> None:
    """Give every engine core with patchclamp an `Admission`, `make(vllm_config)`.

    A core loads plugins during its own construction, so the admission is attached at the first request or call.
    """

    def preprocess_add_request(stock: Any, core: EngineCore, request: EngineCoreRequest) -> Any:
        if enabled(core.vllm_config) is None:
            return stock(core, request)
        _making.admission = admitting_of(core).admission
        try:
            return stock(core, request)
        finally:
            _making.admission = None

    def admitting_of(core: EngineCore) -> _Admitting:
        with _attaching:
            admitting = getattr(core, "patchclamp", None)
            if admitting is None:
                admitting = _Admitting(core, make(core.vllm_config))
                vars(core)["patchclamp"] = admitting
            return admitting

    def patchclamp_call(core: EngineCore, method: str, args: Sequence[Any]) -> Any:
        return getattr(admitting_of(core).admission, method)(*args)

    def collective_rpc(stock: Any, core: EngineCore, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(core, method, *args, **kwargs)
        finally:
            if enabled(core.vllm_config) is not None and method not in KEEPS_WEIGHTS:
                vars(core)[WEIGHTS] = vars(core).get(WEIGHTS, 0) + 1

    REQUEST.wrap(preprocess_add_request)
    RPC.wrap(collective_rpc)
    REQUEST.found()[0].patchclamp_call = patchclamp_call  # with which front ends call methods of `Admission`


def is_pending(core: EngineCore) -> bool:
    """True if a core in this process must be stepped even without an active request."""
    admitting: _Admitting | None = getattr(core, "patchclamp", None)
    return admitting is not None and admitting.pending()


def carried(params: SamplingParams | None) -> bytes | None:
    """Return the encoded program in a request's sampling parameters, or None."""
    program = _given(params)
    return program if isinstance(program, bytes) else None


def _given(params: SamplingParams | None) -> Any:
    extra = getattr(params, "extra_args", None)
    return extra.get(KEY) if extra else None


# -- the prefix cache


def on_prefix_cache() -> None:
    """Wrap the function that computes a block's extra keys."""
    BLOCK_KEYS.wrap(_block_keys)
    from vllm.v1.core import block_pool

    setattr(block_pool, BLOCK_KEYS.name, getattr(*BLOCK_KEYS.found()))  # imported there by name


def _block_keys(stock: Any, request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
    """Add a program's edits up to a block's end, and the count of weight updates, to the block's key."""
    keys, following = stock(request, start_token_idx, end_token_idx, start_mm_idx)
    program = _program_of(request)
    edits = None if program is None else block_key(program.bound, start_token_idx, end_token_idx, program.seen_whole)
    if weights := _weights_of(request):
        keys = (*(keys or ()), (WEIGHTS, weights))
    return (keys if edits is None else (*(keys or ()), (KEY, edits))), following


def _weights_of(request: Request) -> int:
    """Return the number of weight updates when a request was created or last recomputed from the start. It is part of
    block keys, so blocks computed with other weights are not reused. 0 in engines without patchclamp."""
    known = vars(request).get(WEIGHTS)
    if known is None and _making.admission is not None:
        known = vars(request)[WEIGHTS] = _making.admission.updates()
    return known or 0


def _program_of(request: Request) -> RequestProgram | None:
    """Return a request's program, decoded once, when the request is created and its blocks get their keys.

    None without a program, in engines without patchclamp, or if decoding fails, which makes admission fail the request.
    """
    data = carried(request.sampling_params)
    program: RequestProgram | None = getattr(request, "patchclamp", None)
    if data is None or program is not None or _making.admission is None:
        return None if data is None else program
    try:
        program = RequestProgram(_making.admission, data, images.spans_of(request))
    except msgspec.DecodeError:
        return None
    vars(request)["patchclamp"] = program
    return program


# -- admission


class _PendingProof(NamedTuple):
    """A request whose edited tokens may enter the prefix cache after a verdict.

    tokens: the number of tokens computed when the workers were asked
    held: True if the request has ended; its blocks are freed after the verdict
    """

    request: Any
    tokens: int
    held: bool


class _Withheld(msgspec.Struct):
    """Outputs (client, output, program) and proofs that wait for workers' verdicts on programs."""

    verdicts: Any
    entries: list[tuple[int, Any, RequestProgram]]
    proofs: list[_PendingProof]


class _Blocks:
    """The free blocks of a core's cache (`admission.BlockPool`)."""

    def __init__(self, cache_manager: KVCacheManager) -> None:
        self._pool = cache_manager.block_pool

    @property
    def free(self) -> int:
        return self._pool.get_num_free_blocks()

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def give(self, blocks: list[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])


class _Admitting:
    """Wraps one engine core's scheduler and cache manager to call its `Admission`."""

    def __init__(self, core: EngineCore, admission: Admission) -> None:
        self._core, self.admission = core, admission
        self._ended: dict[str, RequestProgram] = {}  # ended since the last step's outputs
        self._withheld: collections.deque[_Withheld] = collections.deque()
        self._checks: dict[str, SelfCheck] = {}  # of requests that ended in this step
        self._follows = self.updates()  # the count of weight updates that requests were last checked for
        self._early: dict[int, EngineCoreOutputs] = {}  # of requests that ended outside of a step, for its outputs
        admission.updates = self.updates
        self._held: dict[str, Request] = {}  # requests that ended in this step, whose blocks wait for a verdict
        self._is_updating = False
        scheduler: Scheduler = core.scheduler  # type: ignore[assignment]
        self._scheduler = scheduler
        self._add, self._schedule = scheduler.add_request, scheduler.schedule
        self._update, self._free = scheduler.update_from_output, scheduler._free_request
        self._unfinished, self._finished = scheduler.get_num_unfinished_requests, scheduler.has_finished_requests
        scheduler.add_request = forwards(self._add)(self.add)
        scheduler.schedule = forwards(self._schedule)(self.plan)
        scheduler.update_from_output = forwards(self._update)(self.end_step)
        scheduler._free_request = forwards(self._free)(self.leave)
        scheduler.get_num_unfinished_requests = forwards(self._unfinished)(self.unfinished)
        scheduler.has_finished_requests = forwards(self._finished)(self.finished)
        connectors.bypass(scheduler, lambda params: _given(params) is not None)
        cache_manager = scheduler.kv_cache_manager
        coordinator = cache_manager.coordinator
        admission.pool = _Blocks(cache_manager)
        self._free_blocks, self._cache_blocks = cache_manager.free, coordinator.cache_blocks
        self._reset_cache = cache_manager.reset_prefix_cache
        self._search, self._find_hit = cache_manager.get_computed_blocks, coordinator.find_longest_cache_hit
        self._most_cached: int | None = None  # tokens that a request may have from the cache, while it is searched
        cache_manager.free = forwards(self._free_blocks)(self.free_blocks)
        cache_manager.reset_prefix_cache = forwards(self._reset_cache)(self.reset_cache)
        cache_manager.get_computed_blocks = forwards(self._search)(self.search)
        coordinator.find_longest_cache_hit = forwards(self._find_hit)(self.find_hit)
        coordinator.cache_blocks = forwards(self._cache_blocks)(self.cache_proved)
        # a Mamba layer's blocks hold a state that later tokens overwrite, so they cannot be cached after the fact
        has_states = core.vllm_config.cache_config.mamba_cache_mode != "none"
        self._may_cache = cache_manager.enable_caching and not has_states
        self._scores, self._followed = _slot_scores(core)

    # -- new weights

    def updates(self) -> int:
        """Return the number of calls that may have changed the model's weights: worker calls, and `load_weights` of a
        model in this process."""
        worker = getattr(getattr(self._core.model_executor, "driver_worker", None), "worker", None)
        attached = getattr(worker, "patchclamp", None)
        return vars(self._core).get(WEIGHTS, 0) + (0 if attached is None else attached.loads)

    def _follow(self) -> int:
        """Return the count of updates. After an update, fail all programs that arrived before: their rows would mix two
        models. Requests without programs continue, as in stock vLLM; requests not computed yet reuse no blocks of the
        old weights."""
        updates = self.updates()
        if updates == self._follows:
            return updates
        self._follows = updates
        self.admission.errors |= dict.fromkeys(self.admission.programs, pack(RunError(NEW_WEIGHTS)))
        self._end_refused(self._early)
        for request in self._scheduler.requests.values():
            if not request.num_computed_tokens:
                _key_again(request, updates)
        return updates

    # -- a request arrives

    def add(self, request: Request) -> None:
        """Add a request to the scheduler if its program fits. Never raises: an error would end the core."""
        given, updates = _given(request.sampling_params), self._follow()
        if updates and (request.mm_features or _weights_of(request) != updates):
            _key_again(request, updates)
        if given is None:
            self._add(request)
            return
        if request.request_id in self._scheduler.requests:  # the next part of a streamed input
            self.admission.errors[request.request_id] = pack(_streamed())
            self._add(request)
            return
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        try:
            if not isinstance(given, bytes):
                raise ProgramError(f"expected an encoded program under {KEY!r} in extra_args")
            if program is None:
                program = RequestProgram(self.admission, given, images.spans_of(request))
                vars(request)["patchclamp"] = program
                request.block_hashes.clear()
                request.update_block_hashes()
            if request.mm_features:
                images.check_request(request, program.bound.prompt, self._core.vllm_config)
            _check_beside_drafts(self._core.vllm_config, request, program)
            connectors.check_transfer(self._scheduler, request)
            connectors.check_weights(self._scheduler, updates)
            assert request.sampling_params is not None
            lora.check_prompt_logprobs(self._core.vllm_config, request.sampling_params.prompt_logprobs)
            if (request.sampling_params.extra_args or {}).get(WEIGHTS, 0) != updates:
                raise RunError(NEW_WEIGHTS)
            if request.resumable:
                request.streaming_queue = collections.deque()  # more input may arrive before its error is returned
                raise _streamed()
        except PatchclampError as error:
            self.admission.refuse(request, program, error)
        except Exception as error:
            self.admission.refuse(request, None, ProgramError(f"the program cannot be read: {error}"))
        else:
            by_priority = self._scheduler.policy.value == "priority"
            if self.admission.arrive(request, program, (request.priority, request.arrival_time) if by_priority else ()):
                self._add(request)
                return
        self._scheduler.requests[request.request_id] = request  # so that it can be aborted or end with its error

    def search(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Find a request's cached blocks, ending before its first capture."""
        program = _program_of(request)
        self._most_cached = None if program is None else program.uncaptured
        try:
            return self._search(request, *args, **kwargs)
        finally:
            self._most_cached = None

    def find_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        if self._most_cached is not None:
            max_cache_hit_length = min(max_cache_hit_length, self._most_cached)
        return self._find_hit(block_hashes, max_cache_hit_length, *args, **kwargs)

    def cache_proved(self, request: Request, num_computed_tokens: int) -> None:
        """Add a request's full blocks to the prefix cache, but edited blocks only up to the proved position.

        This prevents other runs from reading edited blocks of a run that has failed or may still fail.
        """
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        if program is not None:
            num_computed_tokens = min(num_computed_tokens, program.proved)
        self._cache_blocks(request, num_computed_tokens)

    def free_blocks(self, request: Request) -> None:
        """Free the blocks of an ended or preempted request. If an ended request has tokens to prove, free them after
        its verdict."""
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        if program is not None and not request.is_finished():
            program.forget_proof()
        if program is None or not (self._is_updating and request.is_finished() and self._can_prove(request, program)):
            self._free_blocks(request)
        else:
            self._held[request.request_id] = request

    def _can_prove(self, request: Request, program: RequestProgram) -> bool:
        """True if the request's computed tokens may enter the prefix cache after a verdict."""
        tokens = request.num_tokens - 1  # the last token was sampled, not computed
        return self._may_cache and program.proved < tokens <= request.num_computed_tokens

    def reset_cache(self) -> bool:
        """Empty the prefix cache. vLLM refuses while a request has blocks, so blocks held for a verdict are freed
        first, and never enter the cache."""
        for withheld in self._withheld:
            for proof in withheld.proofs:
                if proof.held:
                    self._free_blocks(proof.request)
            withheld.proofs = [proof for proof in withheld.proofs if not proof.held]
        return self._reset_cache()

    # -- a step

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next step, with admission's orders attached."""
        self._follow()
        if self.admission.unscheduled:
            for request in self.admission.admit_waiting():
                del self._scheduler.requests[request.request_id]
                self._add(request)
        output = self._schedule(*args, **kwargs)
        for name in output.preempted_req_ids or ():  # with offloading, `free_blocks` is not called for them
            if (program := getattr(self._scheduler.requests.get(name), "patchclamp", None)) is not None:
                program.forget_proof()
        if self._scores is not None:
            self._scores.scheduled(id(output), *_blocks_of(output, self._followed))
        orders = self.admission.take_orders()
        if orders is not None:
            vars(output)["patchclamp"] = orders
        return output

    def leave(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Free a finished or aborted request."""
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        if program is not None:
            if program.placement is not None:
                self._ended[request.request_id] = program
                if program.checked and self._is_updating:
                    self._checks[request.request_id] = program.self_check(request)
            self.admission.end(request.request_id)
        if self._scores is not None and self._is_updating:  # its last output carries its last scores
            self._scores.end(request.request_id, request.num_tokens - 1)
        elif self._scores is not None:
            self._scores.leave(request.request_id)
        return self._free(request, *args, **kwargs)

    def unfinished(self) -> int:
        """Count unfinished requests and, unless the scheduler is paused, requests waiting for admission."""
        waiting = self.admission.unscheduled if self._scheduler._pause_state.name == "UNPAUSED" else 0
        return self._unfinished() + waiting

    def finished(self) -> bool:
        """True if the core must step, even if no request is active."""
        return self._finished() or self.pending()

    def pending(self) -> bool:
        """True if worker orders or verdicts are pending."""
        return self.admission.has_orders or bool(self._withheld or self._early)

    def end_step(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return a step's outputs, with verdicts on their programs."""
        if self._scores is not None:
            _take_scores(self._scores, scheduler_output, model_runner_output)
        self._is_updating = True
        try:
            outputs = self._update(scheduler_output, model_runner_output)
        finally:
            self._is_updating = False
        scores = self._scores
        new = {} if scores is None else {client: scores.take_all(part.outputs) for client, part in outputs.items()}
        if scores is not None:
            scores.forget_ended()
        if self.admission.errors:
            self._end_refused(outputs)
        for client, part in self._early.items():
            self._outputs(outputs, client).extend(part.outputs)
        self._early.clear()
        if self._ended or self.admission.programs:
            self._ask_verdicts(outputs)
        for request in self._held.values():  # they had no output, so no verdict will come
            self._free_blocks(request)
        self._held.clear()
        late: list[tuple[int, Any]] = []  # withheld outputs, in order; inserted before this step's
        while self._withheld and self._withheld[0].verdicts.done():
            withheld = self._withheld.popleft()
            self._attach(withheld.verdicts.result(), withheld.entries, withheld.proofs)
            late += [(client, output) for client, output, _ in withheld.entries]
        for client, output in reversed(late):
            self._outputs(outputs, client).insert(0, output)
        for client, part in outputs.items():
            if scores is not None and (message := scores.message(part.outputs, new.get(client))):
                first = part.outputs[0]
                first.kv_transfer_params = {**(first.kv_transfer_params or {}), SCORES: message}
        return outputs

    def _end_refused(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.request import RequestStatus

        errors = dict(self.admission.errors)
        for request in self._scheduler.finish_requests(list(errors), RequestStatus.FINISHED_ERROR):
            output = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason(),
                events=request.take_events(), trace_headers=request.trace_headers,
                kv_transfer_params={KEY: ["", errors[request.request_id], None]},
            )  # fmt: skip
            self._outputs(outputs, request.client_index).append(output)
        self.admission.errors.clear()

    def _outputs(self, outputs: dict[int, EngineCoreOutputs], client: int) -> list[EngineCoreOutput]:
        """Return a client's list of outputs; create it if needed."""
        from vllm.v1.engine import EngineCoreOutputs

        if client not in outputs:
            outputs[client] = EngineCoreOutputs(outputs=[])
        return outputs[client].outputs

    def _ask_verdicts(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Request the workers' verdicts on programs whose requests have ended, may be ended by the front end (at a stop
        string), or have edited tokens to prove (after the prompt, then every `PROVED_AT_ONCE` tokens)."""
        judged: list[tuple[int, Any, RequestProgram]] = []
        proofs: dict[str, _PendingProof] = {}
        for client, part in outputs.items():
            for output in part.outputs:
                program = self._ended.get(output.request_id) or self.admission.programs.get(output.request_id)
                if program is None or output.kv_transfer_params is not None:
                    continue
                name = output.request_id
                held = self._held.pop(name, None)
                request = held or self._scheduler.requests.get(name)
                params = None if request is None else request.sampling_params
                is_judged = output.finish_reason is not None or (params is not None and bool(params.stop))
                if request is not None and output.new_token_ids and self._can_prove(request, program):
                    tokens = request.num_tokens - 1
                    if is_judged or not program.asked or tokens >= program.asked + PROVED_AT_ONCE:
                        proofs[name], program.asked = _PendingProof(request, tokens, held is not None), tokens
                elif held is not None:
                    self._free_blocks(held)
                if not is_judged:
                    continue
                if output.finish_reason is None and request is not None:  # it may be the request's last output
                    output.spec_decode_metrics = request.spec_decode_metrics
                if program.checked and output.finish_reason is None and request is not None:
                    self._checks[name] = program.self_check(request)
                judged.append((client, output, program))
        self._ended.clear()
        checks = list(self._checks.values())
        self._checks.clear()
        ids = list(dict.fromkeys([*(output.request_id for _, output, _ in judged), *proofs]))
        if not ids:
            return
        ended = [output.request_id for _, output, _ in judged if output.finish_reason is not None]
        call = ("settle", ids, ended, checks)
        verdicts = self._core.model_executor.collective_rpc("patchclamp_rpc", args=call, non_block=True)
        if verdicts.done():
            self._attach(verdicts.result(), judged, list(proofs.values()))
            return
        late = {id(output) for _, output, _ in judged}
        for part in outputs.values():
            part.outputs = [output for output in part.outputs if id(output) not in late]
        self._withheld.append(_Withheld(verdicts, judged, list(proofs.values())))

    def _attach(
        self, answers: Sequence[Any], judged: list[tuple[int, Any, RequestProgram]], proofs: list[_PendingProof]
    ) -> None:
        """Attach verdicts to outputs, and add proved blocks to the prefix cache."""
        errors = [error for _, error in answers if error is not None]
        by_worker: list[dict[str, Any]] = [] if errors else [verdicts for verdicts, _ in answers]

        def verdict_on(name: str) -> Verdict:
            return Verdict("", errors[0]) if errors else joined_verdict([verdicts[name] for verdicts in by_worker])

        for _, output, program in judged:
            verdict = verdict_on(output.request_id)
            output.kv_transfer_params = {KEY: [verdict.receipt, verdict.error, program.waited_s, bool(program.checked)]}
        for request, tokens, held in proofs:
            program = request.patchclamp
            verdict = verdict_on(request.request_id)
            if verdict.error is None and verdict.receipt and program.asked >= tokens:  # else preempted since
                program.proved = max(program.proved, tokens)
            # now, because a layer with a sliding window frees its first blocks in the next step
            if program.proved >= tokens and (held or self._scheduler.requests.get(request.request_id) is request):
                self._scheduler.kv_cache_manager.cache_blocks(request, tokens)
            if held:
                self._free_blocks(request)


def _key_again(request: Request, updates: int) -> None:
    """Recompute a request's block keys for new weights, and rename its images: vLLM caches their features by name."""
    vars(request)[WEIGHTS] = updates
    request.mm_features = [
        dataclasses.replace(each, identifier=f"{each.identifier} {updates}") for each in request.mm_features
    ]
    request.block_hashes.clear()
    request.update_block_hashes()


def _slot_scores(core: EngineCore) -> tuple[SlotScores | None, int]:
    """Return storage for the monitors' scores (None without monitors), and the index of the layer group whose blocks
    address it. That group keeps all tokens of a request.

    Raises `EngineError` if a reused prefix could lack cached scores: layers with a sliding window or a state keep only
    the end of a prefix.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    monitors, config = monitors_of_config(core.vllm_config), core.scheduler.kv_cache_config  # type: ignore[attr-defined]
    if not monitors:
        return None, 0
    groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    whole = next((i for i, spec in enumerate(groups) if isinstance(spec, FullAttentionSpec)), None)
    if whole is None:
        if core.vllm_config.cache_config.enable_prefix_caching:
            raise EngineError(
                "no layer of this model has full attention, so cached prefixes have no scores: set "
                "enable_prefix_caching=False", "probes",
            )  # fmt: skip
        whole = 0
    length = core.vllm_config.model_config.max_model_len
    return SlotScores(columns_of(monitors), config.num_blocks, groups[whole].block_size, length), whole


def _blocks_of(step: SchedulerOutput, group: int) -> tuple[Any, ...]:
    """Return the arguments of `SlotScores.scheduled` for a step, with one group's blocks."""
    running, new = step.scheduled_cached_reqs, step.scheduled_new_reqs
    blocks = [(request.req_id, request.block_ids[group], True) for request in new]
    if running.new_block_ids.count(None) < len(running.new_block_ids):
        added = zip(running.req_ids, running.new_block_ids, strict=True)
        blocks += [(name, ids[group], name in running.resumed_req_ids) for name, ids in added if ids is not None]
    names = [*running.req_ids, *(request.req_id for request in new)]
    starts = [*running.num_computed_tokens, *(request.num_computed_tokens for request in new)]
    return names, starts, step.num_scheduled_tokens, step.total_num_scheduled_tokens, blocks


def _take_scores(scores: SlotScores, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Store the scores in a step's output. Only accepted draft tokens count."""
    products = vars(output).pop("patchclamp", None)
    accepted: dict[str, int] = {}
    for name, drafts in step.scheduled_spec_decode_tokens.items():
        generated = len(output.sampled_token_ids[output.req_id_to_index[name]])
        accepted[name] = step.num_scheduled_tokens[name] - len(drafts) + max(generated - 1, 0)
    scores.computed(id(step), products, output.req_ids, accepted)


def _check_beside_drafts(vllm_config: VllmConfig, request: Request, program: RequestProgram) -> None:
    """Raise `ProgramError` or `UnsupportedSite` for a program that cannot run with speculative decoding.

    vLLM 0.32's CPU build loses draft rows' temperatures (`expand_kernel` writes to a copy), so tokens sampled in these
    rows, also by stock vLLM, do not follow the model's distribution.
    """
    speculative_config = vllm_config.speculative_config
    if speculative_config is None:
        return
    code = next((op.action for op in program.bound.ops if op.kind == APPLY), None)
    if code is not None:
        what = {Encoded: "an edit that runs the full encoder of an SAE", Attended: "an edit of attention"}.get(
            type(code), "Apply"
        )
        raise ProgramError(f"{what} is not supported with speculative decoding: it would run on rejected draft tokens")
    _check_latches(program.bound)
    if request.mm_features and speculative_config.method != "ngram":
        raise ProgramError("with images, programs support speculative decoding only with method 'ngram'")
    params = request.sampling_params
    if params is not None and params.temperature and vllm_config.device_config.device_type == "cpu":
        raise ProgramError(
            "programs are not supported with sampling and speculative decoding on a CPU, where vLLM ignores the "
            "temperature of draft tokens: set temperature to 0, or start the engine without speculative_config"
        )


def _check_latches(bound: BoundProgram) -> None:
    """Raise `UnsupportedSite` for a latch that depends on the order of a step's generated tokens: a point's rows have
    no defined order, and a delimiter latch cannot be rolled back to the last accepted token."""
    points: dict[int, int] = {}  # where generated tokens set a latch
    for op in bound.ops:
        if isinstance(op.action, Latch) and op.action.last:
            raise UnsupportedSite(
                "with speculative decoding, pc.between can only select prompt tokens (rejected drafts would count): "
                "use pc.prompt & pc.between(...)", op.path[:200]
            )  # fmt: skip
        if isinstance(op.action, Latch) and op.ranges[-1].stop > bound.prompt:
            points[op.action.latch] = op.points[0]
        if op.guard is not None and points.get(op.guard.latch) in op.points:
            raise UnsupportedSite(
                "with speculative decoding, scope 'onwards' requires edits after the probe's site: edit a later layer, "
                "or use scope 'token' or 'prompt'", f"{op.path[:200]}.at"
            )  # fmt: skip


def _streamed() -> ProgramError:
    return ProgramError("programs are not supported on requests with streamed input")


def joined_verdict(verdicts: list[tuple[str, Any]]) -> Verdict:
    """Combine the workers' verdicts on a program: the first error, and the receipt if all agree."""
    receipts = {receipt for receipt, _ in verdicts}
    return Verdict(receipts.pop() if len(receipts) == 1 else "", next((e for _, e in verdicts if e is not None), None))
