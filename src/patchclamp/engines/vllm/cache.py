"""The prefix cache, in the engine core: which blocks a request with a program may reuse.

A block is reused only where the edits up to its end are the same, and never at positions that are captured.
"""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.engines.vllm.compat import runner
from patchclamp.plan import BoundProgram
from patchclamp.plan.reuse import block_key, lowest_capture

_decoder = msgspec.msgpack.Decoder(BoundProgram)


def install() -> None:
    """Wraps vLLM's block keys and cache search; requests without a program are left to stock."""
    runner.on_block_key(lambda request, program, start, end: block_key(_bound(request, program), start, end))
    runner.on_cache_search(lambda request, program: lowest_capture(_bound(request, program)))


def _bound(request: Any, program: bytes) -> BoundProgram:
    """A request's program, decoded once; an empty one for bytes that are no program of ours."""
    bound = getattr(request, "patchclamp_bound", None)
    if bound is None:
        try:
            bound = _decoder.decode(program)
        except msgspec.DecodeError:
            bound = BoundProgram("", 0, ())
        request.patchclamp_bound = bound
    return bound
