"""In the engine core: a block is reused only where the edits up to its end are the same, and never under a capture."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.engines.vllm.compat import runner
from patchclamp.plan import BoundProgram
from patchclamp.plan.reuse import block_key, lowest_capture

_decoder = msgspec.msgpack.Decoder(BoundProgram)


def install() -> None:
    """Wraps vLLM's block keys and cache search; requests without a program pass straight through."""
    runner.on_block_key(lambda request, program, start, end: block_key(_bound(request, program), start, end))
    runner.on_cache_search(lambda request, program: lowest_capture(_bound(request, program)))


def _bound(request: Any, program: bytes) -> BoundProgram:
    """A request's program, decoded once; bytes that are no program of ours mean none, and then nothing is edited."""
    found = getattr(request, "patchclamp_bound", None)
    if found is None:
        try:
            found = _decoder.decode(program)
        except msgspec.DecodeError:
            found = BoundProgram("", 0, ())
        request.patchclamp_bound = found
    return found
