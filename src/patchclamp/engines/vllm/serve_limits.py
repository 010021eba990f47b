"""What a server lets one caller do: `--additional-config '{"patchclamp": {"serve": {...}}}'`.

These numbers do not change the engine, so they are taken out of `additional_config` before vLLM makes the key of its
compile cache of it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from patchclamp.errors import CapacityError, TooLarge

Count = Annotated[int, msgspec.Meta(ge=0)]


class ServeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An owner is an API key; all callers of a server without keys are one.

    Of one request:
    body_bytes: a body of a route of ours
    json_bytes: a body of JSON on routes of ours; numbers take eight times the room when they are read
    json_values: commas of a body of JSON on routes of ours, or of a program; more numbers travel in base64 or as
        safetensors
    program_bytes: a body of an OpenAI request with a program
    program_body_values: commas of such a body, those of its prompt among them
    openai_body_bytes: any body on the two OpenAI routes; None: as stock vLLM, which reads it whole
    program_ops: ops of a program, those of its variant too
    program_captures: captures among them
    program_records: records of a bound program, one for each op, point and range of positions, on every step; those of
        all prompts and choices (n) of a request together, and of the runs of a batch that are under way
    inline_bytes: captures that travel in a response; larger ones are fetched

    sweep_prompts: prompts of a sweep: both of each pair, and those of its source
    sweep_grid: cells of a sweep's grid in all pairs; a zoom patches few of them
    sweep_cells: cells of a sweep that are patched, each counted for every pair, draw, and token of an answer
    sweeps: of one owner at once

    Of what stays:
    bank_names: vectors and programs of one owner
    named_bytes: their bytes
    kept_runs: runs of one owner
    run_bytes: captures of one owner's runs; of a sweep, what it reads at a time
    kept_sweeps: sweeps of one owner that can go on where they stopped
    run_ttl_s: seconds after which a run, or what is kept of a sweep, is dropped if nobody asks for it
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
    run_ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    def check(self, limit: str, asked: int, what: str, path: str | None = None) -> None:
        """Raises `TooLarge` for a request that asks for more than a limit; `what` it asks for stands before the
        number."""
        most = getattr(self, limit)
        if most is not None and asked > most:
            raise TooLarge(f"{what}: {asked}, and this server takes at most {most} ({_larger(limit)})", path)

    def check_room(self, limit: str, used: int, more: int, what: str, path: str | None = None) -> None:
        """Raises `CapacityError` where what an owner has leaves no room for more."""
        most = getattr(self, limit)
        if used + more > most:
            raise CapacityError(
                f"{what}: {more} more, and {used} of {most} are taken: delete what is no longer needed "
                f"({_larger(limit)})",
                path,
            )


def _larger(limit: str) -> str:
    return f'limit {limit}; --additional-config \'{{"patchclamp": {{"serve": {{"{limit}": N}}}}}}\' sets it'
