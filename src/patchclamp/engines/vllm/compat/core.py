"""The engine core, which admits requests, and the output processor, which receives the verdicts on their programs.

Everything here wraps one core's own objects, and does not affect requests without programs.
"""

from __future__ import annotations

import collections
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from patchclamp.engines.vllm.admission import Admission, LastWords, RequestProgram, Verdict
from patchclamp.engines.vllm.compat import images
from patchclamp.engines.vllm.compat.configuration import KEY, enabled
from patchclamp.engines.vllm.compat.runner import carried, has_foreign
from patchclamp.engines.vllm.compat.seams import forwards, require
from patchclamp.errors import EngineError, PatchclampError, ProgramError, pack

PROVED_AT_ONCE = 128  # minimum number of generated tokens between two proof requests to the workers
Table = tuple[np.ndarray, np.ndarray]  # token ids and log-probabilities [n, 1 + k] of n tokens, their own first


class _Making(threading.local):
    """The admission of the core that is creating a request on this thread."""

    admission: Admission | None = None


_making = _Making()


def on_core(make: Callable[[Any], Admission]) -> None:
    """Give every engine core with patchclamp an admission, `make(vllm_config)`.

    A core loads plugins during its own construction, so the admission is attached at the first request or call.
    """
    owner, name = require("core requests")
    for seam in ("schedule", "update", "arrival", "end", "unfinished", "finished", "cached", "freed", "reset"):
        require(seam)
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def preprocess_add_request(core: Any, request: Any) -> Any:
        if getattr(core, "patchclamp", None) is None and enabled(core.vllm_config) is None:
            return stock(core, request)
        _making.admission = _core_of(core, make).admission
        try:
            return stock(core, request)
        finally:
            _making.admission = None

    preprocess_add_request.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, preprocess_add_request)
    owner.patchclamp_hold = lambda core, vectors, keys, drop: _core_of(core, make).hold(vectors, keys, drop)
    owner.patchclamp_release = lambda core, runs: _core_of(core, make).admission.release(runs)
    owner.patchclamp_say = lambda core, key, note: _core_of(core, make).say(key, note)
    owner.patchclamp_said_since = lambda core, number: _core_of(core, make).since(number)
    owner.patchclamp_abort = lambda core, runs: _core_of(core, make).admission.abort(runs)
    owner.patchclamp_renew = lambda core, session, ago_s: _core_of(core, make).admission.renew(session, ago_s)
    owner.patchclamp_free_dead = lambda core, lease_s: _core_of(core, make).admission.free_dead(lease_s)
    owner.patchclamp_counts = lambda core: _core_of(core, make).admission.counts()
    owner.patchclamp_pending = lambda core: _core_of(core, make).pending()


_meeting = threading.Lock()


def _core_of(core: Any, make: Callable[[Any], Admission]) -> _Admitting:
    """Return the admission wrapper of an engine core; the first call, on any thread, attaches it."""
    admitting = getattr(core, "patchclamp", None)
    if admitting is not None:
        return admitting
    with _meeting:
        admitting = getattr(core, "patchclamp", None)
        if admitting is None:
            admitting = core.patchclamp = _Admitting(core, make(core.vllm_config))
        return admitting


def program_of(request: Any, carried: bytes) -> RequestProgram | None:
    """Return a request's program, decoded once, when the request is created and its blocks get their keys; None in
    engines without patchclamp. Raises `msgspec.DecodeError` for bytes that are not a program."""
    program = getattr(request, "patchclamp", None)
    if program is None and _making.admission is not None:
        program = request.patchclamp = RequestProgram(_making.admission, carried, images.spans_of(request))
    return program


def draft_counts(completion: Any) -> tuple[int, int] | None:
    """Return a completion's drafted and accepted token counts; None if vLLM does not count them."""
    counts = getattr(completion, "spec_decode_metrics", None)
    if counts is None:
        return None
    return counts.num_draft_tokens, sum(accepted * steps for accepted, steps in enumerate(counts.histogram))


class _Proof(NamedTuple):
    """A request whose edited tokens may enter the prefix cache after a verdict.

    tokens: the number of tokens computed when the workers were asked
    held: True if the request has ended, and its blocks are freed after the verdict
    """

    request: Any
    tokens: int
    held: bool


class _Withheld:
    """Outputs (client, output, program) and proofs that wait for the workers' verdicts on programs."""

    def __init__(
        self, verdicts: Future[Any], entries: list[tuple[int, Any, RequestProgram]], proofs: list[_Proof]
    ) -> None:
        self.verdicts, self.entries, self.proofs = verdicts, entries, proofs


class _Admitting:
    """Admission around one engine core."""

    def __init__(self, core: Any, admission: Admission) -> None:
        self._core, self.admission, self._scheduler = core, admission, core.scheduler
        self._words = LastWords()
        self._ended: dict[str, RequestProgram] = {}  # ended since the last step's outputs
        self._withheld: collections.deque[_Withheld] = collections.deque()
        scheduler = self._scheduler
        self._add, self._schedule = scheduler.add_request, scheduler.schedule
        self._update, self._free = scheduler.update_from_output, scheduler._free_request
        self._unfinished, self._finished = scheduler.get_num_unfinished_requests, scheduler.has_finished_requests
        scheduler.add_request = forwards(self._add)(self.add)
        scheduler.schedule = forwards(self._schedule)(self.plan)
        scheduler.update_from_output = forwards(self._update)(self.end_step)
        scheduler._free_request = forwards(self._free)(self.leave)
        scheduler.get_num_unfinished_requests = forwards(self._unfinished)(self.unfinished)
        scheduler.has_finished_requests = forwards(self._finished)(self.finished)
        cache_manager = scheduler.kv_cache_manager
        coordinator = cache_manager.coordinator
        self._free_blocks, self._cache_blocks = cache_manager.free, coordinator.cache_blocks
        self._reset_cache = cache_manager.reset_prefix_cache
        cache_manager.free = forwards(self._free_blocks)(self.free_blocks)
        cache_manager.reset_prefix_cache = forwards(self._reset_cache)(self.reset_cache)
        coordinator.cache_blocks = forwards(self._cache_blocks)(self.cache_proved)
        self._held: dict[str, Any] = {}  # requests that ended in this step, whose blocks wait for a verdict
        self._is_updating = False
        # a Mamba layer's blocks hold a state that later tokens overwrite, so they cannot be cached after the fact
        has_states = core.vllm_config.cache_config.mamba_cache_mode != "none"
        self._may_cache = cache_manager.enable_caching and not has_states

    def hold(self, vectors: bytes, keys: list[str], drop: list[str]) -> None:
        import safetensors.numpy

        self.admission.hold_vectors(safetensors.numpy.load(vectors) if vectors else {}, keys, drop)

    def say(self, key: str, note: bytes) -> None:
        self._words.say(key, note)

    def since(self, number: int) -> tuple[int, list[bytes]]:
        return self._words.since(number)

    # -- a request arrives

    def add(self, request: Any) -> None:
        """Add a request to the scheduler if its program has room. It never raises: that would end the core."""
        data = carried(request.sampling_params)
        if request.request_id in self._scheduler.requests:  # the next part of a streamed input
            if data is not None:
                self.admission.errors[request.request_id] = pack(_streamed())
            self._add(request)
            return
        if data is None and not has_foreign(request.sampling_params):
            self._add(request)
            return
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        try:
            if data is None:
                raise ProgramError(f"what stands under {KEY!r} in extra_args is no program")
            if program is None:
                program = request.patchclamp = RequestProgram(self.admission, data, images.spans_of(request))
                self._key_blocks(request)
            if request.mm_features:
                images.check_request(request, program.prompt_tokens, self._core.vllm_config)
            _check_beside_drafts(self._core.vllm_config, request, program)
            if request.resumable:
                request.streaming_queue = collections.deque()  # more input may arrive before its error is returned
                raise _streamed()
        except PatchclampError as error:
            self.admission.refuse(request, program, error)
        except Exception as error:
            self.admission.refuse(request, None, ProgramError(f"the program cannot be read: {error}"))
        else:
            if self.admission.arrive(request, program, self._priority(request)):
                self._add(request)
                return
        self._scheduler.requests[request.request_id] = request  # so that it can be aborted or end with its error

    def _priority(self, request: Any) -> tuple[float, ...]:
        by_priority = self._scheduler.policy.value == "priority"
        return (request.priority, request.arrival_time) if by_priority else ()

    def cache_proved(self, request: Any, num_computed_tokens: int) -> None:
        """Add a request's full blocks to the prefix cache, but edited ones only up to the proved position.

        So no other run can read an edited block of a run that has failed, or may still turn out to have failed.
        """
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        if program is not None:
            num_computed_tokens = min(num_computed_tokens, program.proved)
        self._cache_blocks(request, num_computed_tokens)

    def free_blocks(self, request: Any) -> None:
        """Free the blocks of an ended or preempted request; if an ended one has tokens to prove, after its verdict."""
        program: RequestProgram | None = getattr(request, "patchclamp", None)
        if program is not None and not request.is_finished():
            program.forget_proof()
        if program is None or not (self._is_updating and request.is_finished() and self._can_prove(request, program)):
            self._free_blocks(request)
        else:
            self._held[request.request_id] = request

    def _can_prove(self, request: Any, program: RequestProgram) -> bool:
        """True if the request has computed tokens that may enter the prefix cache after a verdict."""
        tokens = request.num_tokens - 1  # the last token was sampled, not computed
        return self._may_cache and program.proved < tokens <= request.num_computed_tokens

    def reset_cache(self) -> bool:
        """Empty the prefix cache. vLLM refuses that while a request has blocks, so those held for a verdict are freed
        first, and never enter the cache."""
        for withheld in self._withheld:
            for proof in withheld.proofs:
                if proof.held:
                    self._free_blocks(proof.request)
            withheld.proofs = [proof for proof in withheld.proofs if not proof.held]
        return self._reset_cache()

    @staticmethod
    def _key_blocks(request: Any) -> None:
        """Recompute the keys of a request's blocks."""
        request.block_hashes.clear()
        request.update_block_hashes()

    # -- a step

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next step, with admission's orders attached."""
        if self.admission.unscheduled:
            for request in self.admission.admit_waiting():
                del self._scheduler.requests[request.request_id]
                self._add(request)
        output = self._schedule(*args, **kwargs)
        orders = self.admission.take_orders()
        if orders is not None:
            output.patchclamp = orders
        return output

    def leave(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Free a finished or aborted request."""
        program = getattr(request, "patchclamp", None)
        if program is not None:
            if program.placement is not None:
                self._ended[request.request_id] = program
            self.admission.end(request.request_id)
        return self._free(request, *args, **kwargs)

    def unfinished(self) -> int:
        """Count unfinished requests, including those waiting for admission unless the scheduler is paused."""
        paused = getattr(self._scheduler, "_pause_state", None)
        waiting = 0 if paused is not None and paused.name != "UNPAUSED" else self.admission.unscheduled
        return self._unfinished() + waiting

    def finished(self) -> bool:
        """True if a step is needed, even if no request is active."""
        return self._finished() or self.pending()

    def pending(self) -> bool:
        """True if workers have orders or verdicts pending."""
        return self.admission.has_orders or bool(self._withheld)

    def end_step(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return the outputs of a step, with the verdicts on their programs."""
        self._is_updating = True
        try:
            outputs = self._update(scheduler_output, model_runner_output)
        finally:
            self._is_updating = False
        if self.admission.errors:
            self._end_refused(outputs)
        if self._ended or self.admission.programs:
            self._tell(outputs)
        for request in self._held.values():  # they had no output, so no verdict will come
            self._free_blocks(request)
        self._held.clear()
        late: list[tuple[int, Any]] = []  # withheld until now, in order; inserted before this step's outputs
        while self._withheld and self._withheld[0].verdicts.done():
            withheld = self._withheld.popleft()
            self._attach(withheld.verdicts.result(), withheld.entries, withheld.proofs)
            late += [(client, output) for client, output, _ in withheld.entries]
        for client, output in reversed(late):
            self._outputs(outputs, client).insert(0, output)
        return outputs

    def _end_refused(self, outputs: dict[int, Any]) -> None:
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

    def _outputs(self, outputs: dict[int, Any], client: int) -> list[Any]:
        """Return the list of a client's outputs, to which more can be added."""
        from vllm.v1.engine import EngineCoreOutputs

        if client not in outputs:
            outputs[client] = EngineCoreOutputs(outputs=[])
        return outputs[client].outputs

    def _tell(self, outputs: dict[int, Any]) -> None:
        """Request verdicts from the workers on programs of requests that have ended, that the front end may end at a
        stop text, or that have edited tokens to prove: after the prompt, and then every `PROVED_AT_ONCE` tokens."""
        judged: list[tuple[int, Any, RequestProgram]] = []
        proofs: dict[str, _Proof] = {}
        for client, part in outputs.items():
            for output in part.outputs:
                program = self._ended.get(output.request_id) or self.admission.programs.get(output.request_id)
                if program is None or output.kv_transfer_params is not None:
                    continue
                name = output.request_id
                is_judged = output.finish_reason is not None or self._stops_at_text(name)
                held = self._held.pop(name, None)
                request = held or self._scheduler.requests.get(name)
                if request is not None and output.new_token_ids and self._can_prove(request, program):
                    tokens = request.num_tokens - 1
                    if is_judged or not program.asked or tokens >= program.asked + PROVED_AT_ONCE:
                        proofs[name], program.asked = _Proof(request, tokens, held is not None), tokens
                elif held is not None:
                    self._free_blocks(held)
                if not is_judged:
                    continue
                if output.finish_reason is None:
                    self._say_drafts(output)
                judged.append((client, output, program))
        self._ended.clear()
        ids = list(dict.fromkeys([*(output.request_id for _, output, _ in judged), *proofs]))
        if not ids:
            return
        ended = [output.request_id for _, output, _ in judged if output.finish_reason is not None]
        call = ("settle", ids, ended)
        verdicts = self._core.model_executor.collective_rpc("patchclamp_rpc", args=call, non_block=True)
        if verdicts.done():
            self._attach(verdicts.result(), judged, list(proofs.values()))
            return
        late = {id(output) for _, output, _ in judged}
        for part in outputs.values():
            part.outputs = [output for output in part.outputs if id(output) not in late]
        self._withheld.append(_Withheld(verdicts, judged, list(proofs.values())))

    def _say_drafts(self, output: Any) -> None:
        """Attach the counts of drafted tokens to an output that may be a request's last."""
        request = self._scheduler.requests[output.request_id]
        counts = getattr(request, "spec_decode_metrics", None)
        if counts is not None:
            output.spec_decode_metrics = counts

    def _stops_at_text(self, request_id: str) -> bool:
        request = self._scheduler.requests.get(request_id)
        return request is not None and bool(request.sampling_params.stop)

    def _attach(
        self, answers: Sequence[Any], judged: list[tuple[int, Any, RequestProgram]], proofs: list[_Proof]
    ) -> None:
        """Attach verdicts to outputs, and add proved blocks to the prefix cache."""
        errors = [error for _, error in answers if error is not None]
        by_worker: list[dict[str, Any]] = [] if errors else [verdicts for verdicts, _ in answers]

        def verdict_on(name: str) -> Verdict:
            return Verdict("", errors[0]) if errors else _joined([verdicts[name] for verdicts in by_worker])

        for _, output, program in judged:
            verdict = self.admission.judge(program, verdict_on(output.request_id))
            output.kv_transfer_params = {KEY: [verdict.receipt, verdict.error, verdict.waited_s]}
        for request, tokens, held in proofs:
            program: RequestProgram = request.patchclamp
            verdict = verdict_on(request.request_id)
            if verdict.error is None and verdict.receipt and program.asked >= tokens:  # else it was preempted since
                program.proved = max(program.proved, tokens)
            # now, because a layer with a sliding window frees its first blocks in the next step
            if program.proved >= tokens and (held or self._scheduler.requests.get(request.request_id) is request):
                self._scheduler.kv_cache_manager.cache_blocks(request, tokens)
            if held:
                self._free_blocks(request)


def _check_beside_drafts(vllm_config: Any, request: Any, program: RequestProgram) -> None:
    """Raise `ProgramError` for a request that does not work with speculative decoding.

    vLLM 0.32's CPU build loses the temperatures of drafted rows (`expand_kernel` writes into a copy), so tokens sampled
    there, also by stock vLLM, do not have the model's distribution.
    """
    speculative_config = vllm_config.speculative_config
    if speculative_config is None:
        return
    if program.has_code:
        raise ProgramError(
            "code (Apply) does not run with speculative decoding: it would be given drafted tokens that are thrown away"
        )
    if request.mm_features and speculative_config.method != "ngram":
        raise ProgramError("images do not go with a program beside a model that drafts: it was not tried")
    sampling_params = request.sampling_params
    if sampling_params.temperature and vllm_config.device_config.device_type == "cpu":
        raise ProgramError(
            "sampling does not go with a program and speculative decoding on a CPU, where vLLM loses the temperatures "
            "of drafted tokens: ask for temperature 0, or start the engine without speculative_config"
        )


def _streamed() -> ProgramError:
    return ProgramError("programs are not run on requests whose input is streamed")


def _joined(verdicts: list[tuple[str, Any]]) -> Verdict:
    """Combine the workers' verdicts on a program: the first error, and the receipt if all agree."""
    receipts = {receipt for receipt, _ in verdicts}
    return Verdict(receipts.pop() if len(receipts) == 1 else "", next((e for _, e in verdicts if e is not None), None))


# -- in front ends


def on_outputs() -> None:
    """Remove verdicts and requested log-probabilities from the outputs in a front end, before vLLM processes them."""
    owner, name = require("processed")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def process_outputs(processor: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        verdicts: dict[str, Verdict] = {}
        tables = tables_of(processor)
        for output in engine_core_outputs:
            if output.kv_transfer_params is None and (not tables or output.new_logprobs is None):
                continue  # the usual case: a token of a request without a program
            state = processor.request_states.get(output.request_id)  # None: aborted
            name = output.request_id
            if state is not None and state.queue is not None:  # an `AsyncLLM`'s: `front` takes the verdict
                name = state.external_req_id
            elif output.kv_transfer_params is not None and KEY in output.kv_transfer_params:
                if state is not None:
                    verdicts[output.request_id] = read_verdict(output.kv_transfer_params[KEY])
                output.kv_transfer_params = None
            if output.new_logprobs is not None and name in tables:
                lists, output.new_logprobs = output.new_logprobs, None  # vLLM would build dictionaries from them
                tables[name].append((np.asarray(lists.logprob_token_ids), np.asarray(lists.logprobs)))
        processed = stock(processor, engine_core_outputs, *args, **kwargs)
        for request, verdict in verdicts.items():
            if request not in processor.request_states:  # it has ended, here or in the core
                verdicts_of(processor)[request] = verdict
        return processed

    process_outputs.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, process_outputs)


def read_verdict(told: Sequence[Any]) -> Verdict:
    """Decode a verdict from an output."""
    receipt, error, waited_s = told
    return Verdict(receipt, tuple(error) if error is not None else None, waited_s)


def verdicts_of(processor: Any) -> dict[str, Verdict]:
    """The verdicts on a front end's ended requests, by vLLM's names of them; each is removed when it is used."""
    return processor.__dict__.setdefault("patchclamp_verdicts", {})


def tables_of(processor: Any) -> dict[str, list[Table]]:
    """Return the log-probabilities of requests that were registered here before their first output; vLLM does not
    process these. The keys are the engine's own names, or for an `AsyncLLM` the names given by the caller."""
    return processor.__dict__.setdefault("patchclamp_tables", {})


def decoded(processor: Any, prompt: list[int], params: Any, ids: list[int], stopped: bool) -> str:
    """Decode generated ids with vLLM's detokenizer. `stopped`: True if the last id stopped the request."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(request_id="", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None)
    detokenizer = IncrementalDetokenizer.from_new_request(processor.tokenizer, request)  # type: ignore[arg-type]
    detokenizer.update(ids, stopped)
    return detokenizer.get_next_output_text(finished=True, delta=False)


def tell_core(engine: Any, method: str, *args: Any) -> None:
    """Call a method of an `LLMEngine`'s core without waiting. The call arrives before requests added afterwards. Raises
    `EngineError` if an earlier call failed."""
    client = engine.engine_core
    core = getattr(client, "engine_core", None)
    if hasattr(core, "scheduler"):
        getattr(core, method)(*args)
        return
    from vllm.v1.engine import EngineCoreRequestType

    answers: collections.deque[Future[Any]] = client.__dict__.setdefault("patchclamp_calls", collections.deque())
    while answers and answers[0].done():
        failure = answers.popleft().exception()
        if failure is not None:
            raise EngineError(f"the engine core refused a call: {failure}")
    number, future = uuid.uuid1().int >> 64, Future()
    client.utility_results[number] = future
    client._send_input(EngineCoreRequestType.UTILITY, (0, number, method, args))
    answers.append(future)


def notice_death(engine: Any) -> None:
    """Fail pending calls when a core's process is killed: vLLM then only ends its output thread, without an error."""
    client = engine.engine_core
    if not hasattr(client, "output_queue_thread"):
        return
    thread, arrived, results = client.output_queue_thread, client.outputs_queue, client.utility_results

    def wait() -> None:
        thread.join()
        error = EngineError("the engine core's process has ended")
        arrived.put(error)
        for future in list(results.values()):
            if not future.done():
                future.set_exception(error)

    threading.Thread(target=wait, name="patchclamp core", daemon=True).start()


def is_pending(engine: Any) -> bool:
    """True if a core in this process must be stepped although no request is active; others step by themselves."""
    core: Any = getattr(engine.engine_core, "engine_core", None)
    return hasattr(core, "scheduler") and core.patchclamp_pending()


def ask_core(engine: Any, method: str) -> Any:
    """Call a method of an `LLMEngine`'s core and return its result."""
    client = engine.engine_core
    core = getattr(client, "engine_core", None)
    return getattr(core, method)() if hasattr(core, "scheduler") else client.call_utility(method)
