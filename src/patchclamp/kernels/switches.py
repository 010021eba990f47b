"""Off switches for optimizations: each has a plain fallback, used if it is switched off or fails.

PATCHCLAMP_DISABLE=op_class,cut_graphs patchclamp sweep ...
"""

from __future__ import annotations

import logging
import os

from patchclamp.errors import EngineError

VARIABLE = "PATCHCLAMP_DISABLE"
SWITCHES = {
    "launcher": "call Triton's launcher directly; off: launch kernels through Triton",
    "op_class": "compiled code calls a plain function under the op's name; off: it goes through PyTorch's dispatcher",
    "cut_graphs": "reduce graphs to the taps that a step needs; off: replay the whole graph",
    "equal_layers": "compile equal layers once; off: compile each with its own taps",
    "alike_requests": "process the settings of requests that share them once in vLLM; off: once per request",
    "pinned_upload": "a kernel reads changed words from pinned memory; off: copy each run of changed words",
}

logger: logging.Logger = logging.getLogger("patchclamp")


def read(value: str) -> set[str]:
    """Parse the switches in an environment variable. Raises `EngineError` for an unknown name."""
    names = {name.strip() for name in value.split(",")} - {""}
    if not names <= SWITCHES.keys():
        unknown = ", ".join(sorted(names - SWITCHES.keys()))
        raise EngineError(f"{VARIABLE}: unknown switches {unknown}; available: {', '.join(SWITCHES)}")
    return names


disabled = read(os.environ.get(VARIABLE, ""))


def enabled(name: str) -> bool:
    """True if the optimization is on."""
    return name not in disabled


def give_up(name: str, error: BaseException) -> None:
    """Switch a failed optimization off for the rest of the process, with one warning."""
    if name not in disabled:
        disabled.add(name)
        logger.warning(
            "patchclamp: %s failed (%s); falling back to the slower path, results are unchanged", name, error
        )
