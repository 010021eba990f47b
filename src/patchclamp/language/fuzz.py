"""Fuzzing as scalars of a request, in `extra_args` (`vllm_xargs` over HTTP): shorthand for an op at the embedding.

fuzz_strength   noise, times the row's root mean square; 0 is no program at all
fuzz_seed       of the noise, 0 if not given
fuzz_mode       "noise", or "scale": embeddings times 1 − strength, with strength brought to 0 … 1
"""

from __future__ import annotations

from typing import Any

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.ops import Noise, Op, Scale
from patchclamp.language.site import Site

NAMES, MODES = ("fuzz_strength", "fuzz_seed", "fuzz_mode"), ("noise", "scale")


def fuzz(extra: dict[str, Any]) -> tuple[Op, ...]:
    """The op that these arguments stand for, or none.

    Raises: `UnknownName` and `ProgramError`, with the argument's name.
    Source: Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """
    for name in extra:
        if name not in NAMES:
            raise unknown("extra argument", str(name), NAMES, str(name))
    strength, seed, mode = (extra.get(name) for name in NAMES)
    if strength is None:
        if extra:
            raise ProgramError("a fuzz_strength is needed", next(iter(extra)))
        return ()
    if mode is not None and (not isinstance(mode, str) or mode not in MODES):
        raise unknown("way to fuzz", str(mode), MODES, "fuzz_mode")
    if mode == "scale" and seed is not None:
        raise ProgramError("scaling has no noise, and so no seed", "fuzz_seed")
    try:
        if mode == "scale":
            factor = 1.0 - min(max(Scale(strength, Site("embed")).factor, 0.0), 1.0)
            return () if factor == 1.0 else (Scale(factor, Site("embed")),)
        noise = Noise(strength, Site("embed"), seed=0 if seed is None else seed, relative=True)
        return (noise,) if noise.std else ()
    except PatchclampError as error:
        raise ProgramError(error.message, "fuzz_seed" if error.path == "seed" else "fuzz_strength") from None
