"""The prefix cache, in the engine core: the blocks that a request with a program may reuse.

A block is reused only if all edits up to its end are the same, and never at captured positions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.engines.vllm.admission import RequestProgram
from patchclamp.engines.vllm.compat import core, runner
from patchclamp.plan.bound import block_key, lowest_capture


def install() -> None:
    """Wrap vLLM's block keys and cache search; requests without a program are unaffected."""
    runner.on_block_key(_block_key)
    runner.on_cache_search(_lowest_capture)


def _block_key(request: Any, carried: bytes, start: int, end: int) -> str | None:
    program = _program(request, carried)
    return None if program is None else block_key(program.bound, start, end, program.seen_whole)


def _lowest_capture(request: Any, carried: bytes) -> int | None:
    program = _program(request, carried)
    return None if program is None else lowest_capture(program.bound, program.seen_whole)


def _program(request: Any, carried: bytes) -> RequestProgram | None:
    """Return a request's program; None if it cannot be decoded, in which case admission fails the request."""
    try:
        return core.program_of(request, carried)
    except msgspec.DecodeError:
        return None
