"""Off switches for optimizations: each has a plain fallback, for when the optimization is off or fails.

PATCHCLAMP_DISABLE=op_class,cut_graphs patchclamp sweep ...
"""

from __future__ import annotations

import logging
import os

from patchclamp.errors import EngineError

VARIABLE = "PATCHCLAMP_DISABLE"
SWITCHES = {
    "launcher": "call the compiled launcher directly; off: launch kernels through Triton",
    "op_class": "call a plain function under the op's name in compiled code; off: go through PyTorch's dispatcher",
    "cut_graphs": "cut graphs down to the taps that a step needs; off: replay the whole graph",
    "equal_layers": "compile equal layers once; off: each with its own taps",
    "alike_requests": "process equal request settings in vLLM once; off: for each request",
    "pinned_upload": "read changed words from pinned memory in a kernel; off: copy each run of them",
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
