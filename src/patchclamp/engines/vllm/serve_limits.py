"""A server's limits per caller: `--additional-config '{"patchclamp": {"serve": {...}}}'`.

They do not change the engine, so they are removed from `additional_config` before vLLM hashes it for its compile cache.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from patchclamp.errors import CapacityError, TooLarge

Count = Annotated[int, msgspec.Meta(ge=0)]


class ServeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An owner is an API key; all callers of a server without keys are one owner.

    Per request:
    body_bytes: the body on a patchclamp route
    json_bytes: a JSON body on a patchclamp route; parsed numbers take eight times the memory
    json_values: commas in a JSON body on a patchclamp route, or in a program; for more, use base64 or safetensors
    program_bytes: the body of an OpenAI request with a program
    program_body_values: commas in such a body, including its prompt
    openai_body_bytes: any body on the two OpenAI routes; None: unlimited, as in stock vLLM
    program_ops: ops of a program, including its variant
    program_captures: captures among them
    program_records: records of a bound program, one per op, point and range of positions, for every step; the total of
        all prompts and choices (n) of a request, and of the active runs of a batch
    inline_bytes: captures returned in a response; larger ones are fetched

    sweep_prompts: prompts of a sweep: both of each pair, and those of its source
    sweep_grid: cells of a sweep's grid over all pairs; a zoom patches few of them
    sweep_cells: patched cells of a sweep, counted for every pair, draw, and answer token
    sweeps: concurrent sweeps of one owner

    Stored per owner:
    bank_names, named_bytes: vectors and programs, and their bytes
    kept_runs: runs
    run_bytes: captures of runs; for a sweep, the bytes it reads at a time
    kept_sweeps, kept_sweep_bytes: sweeps that can be resumed, and the bytes of their values
    run_ttl_s: seconds without access after which a run or a kept sweep is dropped
    """

    body_bytes: Count = 1 << 26
    json_bytes: Count = 1 << 23
    json_values: Count = 1 << 16
    program_bytes: Count = 1 << 24
    program_body_values: Count = 1 << 20
    openai_body_bytes: Count | None = None
    program_ops: Count = 1024
    program_captures: Count = 1024
    program_records: Count = 2048
    inline_bytes: Count = 1 << 20
    sweep_prompts: Count = 512
    sweep_grid: Count = 1_000_000
    sweep_cells: Count = 20_000
    sweeps: Count = 4
    bank_names: Count = 1024
    named_bytes: Count = 1 << 28
    kept_runs: Count = 4096
    run_bytes: Count = 1 << 32
    kept_sweeps: Count = 16
    kept_sweep_bytes: Count = 1 << 26
    run_ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def check(self, limit: str, asked: int, what: str, path: str | None = None) -> None:
        """Raise `TooLarge` if a request exceeds a limit. `what`: the start of the message, before the number."""
        most = getattr(self, limit)
        if most is not None and asked > most:
            raise TooLarge(f"{what}: {asked}, and this server takes at most {most} ({_larger(limit)})", path)

    def check_room(self, limit: str, used: int, more: int, what: str, path: str | None = None) -> None:
        """Raise `CapacityError` if an owner's usage leaves no room for `more`."""
        most = getattr(self, limit)
        if used + more > most:
            raise CapacityError(
                f"{what}: {more} more, and {used} of {most} are taken: delete what is no longer needed "
                f"({_larger(limit)})",
                path,
            )


def _larger(limit: str) -> str:
    return f'limit {limit}; --additional-config \'{{"patchclamp": {{"serve": {{"{limit}": N}}}}}}\' sets it'
