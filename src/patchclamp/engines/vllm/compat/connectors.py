"""KV connectors, which store prompts' keys and values outside the engine and load them for other requests and engines.

Stored keys and values do not record edits, and loaded positions are not computed, so they are not captured. Requests
with programs therefore bypass the connector: it is not queried for them, nor notified of their blocks. A connector in
`KEYED` stores by block hash, which includes edits, and must see every allocation, because it copies blocks after they
were freed. It is only prevented from loading blocks for requests with programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patchclamp.engines.vllm.compat.seams import forwards, seam
from patchclamp.errors import EngineError, ProgramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1."
_WHY = "keep programs from connectors"
KEYED = ("OffloadingConnector",)
seam(_BASE + "get_num_new_matched_tokens", _WHY, "self, request, num_computed_tokens")
seam(_BASE + "update_state_after_alloc", _WHY, "self, request, blocks, num_external_tokens")
seam(_BASE + "build_connector_meta", _WHY, "self, scheduler_output")
seam(_BASE + "on_new_request", _WHY, "self, request")
seam(_BASE + "request_finished", _WHY, "self, request, block_ids")


def bypass(scheduler: Scheduler, has_program: Callable[[SamplingParams | None], bool]) -> None:
    """Hide requests with programs from a scheduler's connector, or only prevent a connector in `KEYED` from loading."""
    connector: Any = scheduler.connector
    if connector is None:
        return
    if type(connector).__name__ in KEYED:
        _load_nothing(connector, has_program)
        return
    match, loaded, make = (
        connector.get_num_new_matched_tokens, connector.update_state_after_alloc, connector.build_connector_meta
    )  # fmt: skip
    arrived, finished = connector.on_new_request, connector.request_finished

    @forwards(match)
    def get_num_new_matched_tokens(request: Request, num_computed_tokens: int) -> Any:
        return (0, False) if has_program(request.sampling_params) else match(request, num_computed_tokens)

    @forwards(loaded)
    def update_state_after_alloc(request: Request, blocks: Any, num_external_tokens: int) -> None:
        if not has_program(request.sampling_params):
            loaded(request, blocks, num_external_tokens)

    @forwards(make)
    def build_connector_meta(scheduler_output: SchedulerOutput) -> Any:
        names = {name for name in scheduler_output.num_scheduled_tokens
                 if has_program(scheduler.requests[name].sampling_params)}  # fmt: skip
        return make(_without(scheduler_output, names) if names else scheduler_output)

    @forwards(arrived)
    def on_new_request(request: Request) -> None:
        if not has_program(request.sampling_params):
            arrived(request)

    @forwards(finished)
    def request_finished(request: Request, block_ids: Any) -> Any:
        return (False, None) if has_program(request.sampling_params) else finished(request, block_ids)

    for wrapper in (get_num_new_matched_tokens, update_state_after_alloc, build_connector_meta, on_new_request,
                    request_finished):  # fmt: skip
        setattr(connector, wrapper.__name__, wrapper)


def _load_nothing(connector: Any, has_program: Callable[[SamplingParams | None], bool]) -> None:
    match = connector.get_num_new_matched_tokens

    @forwards(match)
    def get_num_new_matched_tokens(request: Request, num_computed_tokens: int) -> Any:
        asked, request.skip_reading_prefix_cache = (
            request.skip_reading_prefix_cache, request.skip_reading_prefix_cache or has_program(request.sampling_params)
        )  # fmt: skip
        try:
            return match(request, num_computed_tokens)
        finally:
            request.skip_reading_prefix_cache = asked

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens


def check_alone(vllm_config: VllmConfig, others: bool) -> None:
    """Raise `EngineError` if an engine with a connector shares this process with another engine: vLLM's connector is
    global. `others`: True if there are other engines."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if has_kv_transfer_group() or (others and vllm_config.kv_transfer_config is not None):
        raise EngineError(
            "an engine with a KV connector requires its own process: close the others, or use multiprocess_mode=True",
            "kv_transfer_config",
        )


def check_weights(scheduler: Scheduler, updates: int) -> None:
    """Raise `EngineError` for a program if the engine has a connector and its weights were updated. Connectors' keys do
    not include the weights, so a plain request may load old keys and values into blocks that programs then reuse."""
    if scheduler.connector is not None and updates:
        raise EngineError(
            "programs are not supported beside a KV connector after the weights may have been updated, because the "
            "connector's keys and values may be stale: restart the engine with an empty store, or serve without a "
            "connector", "kv_transfer_config",
        )  # fmt: skip


def check_transfer(scheduler: Scheduler, request: Request) -> None:
    """Raise `ProgramError` for a program on a request that sends or receives keys and values."""
    if scheduler.connector is not None and request.kv_transfer_params:
        raise ProgramError(
            "kv_transfer_params is not supported with a program, whose keys and values stay in this engine: omit it"
        )


def _without(step: SchedulerOutput, names: set[str]) -> SchedulerOutput:
    """Return a copy of a step's `SchedulerOutput` without the named requests."""
    counts = {name: count for name, count in step.num_scheduled_tokens.items() if name not in names}
    return dataclasses.replace(
        step, scheduled_new_reqs=[new for new in step.scheduled_new_reqs if new.req_id not in names],
        scheduled_cached_reqs=_running_without(step.scheduled_cached_reqs, names), num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )  # fmt: skip


def _running_without(running: CachedRequestData, names: set[str]) -> CachedRequestData:
    kept = [i for i, name in enumerate(running.req_ids) if name not in names]
    lists = ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
    columns: dict[str, Any] = {each: [column[i] for i in kept] for each in lists if (column := getattr(running, each))}
    return dataclasses.replace(
        running, **columns, resumed_req_ids=running.resumed_req_ids - names,
        all_token_ids={name: ids for name, ids in running.all_token_ids.items() if name not in names},
    )  # fmt: skip
