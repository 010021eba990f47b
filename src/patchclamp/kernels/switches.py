"""Off switches for optimizations: each has a plain fallback, used if it is switched off or fails.

PATCHCLAMP_DISABLE=op_class,cut_graphs patchclamp sweep ...
"""

from __future__ import annotations

import logging
import os

from patchclamp.errors import EngineError

VARIABLE = "PATCHCLAMP_DISABLE"
SWITCHES = {
    "launcher": "Triton's launcher is called directly; plainly, a kernel is launched through Triton",
    "op_class": "compiled code finds a plain function under the op's name; plainly, PyTorch's dispatcher is asked",
    "cut_graphs": "graphs are cut down to the taps that a step needs; plainly, the whole graph is replayed",
    "equal_layers": "equal layers are compiled once; plainly, each with its own taps",
    "alike_requests": "vLLM processes requests with the same settings once; plainly, each",
    "pinned_upload": "a kernel reads changed words from pinned memory; plainly, each run of them is copied",
}

logger: logging.Logger = logging.getLogger("patchclamp")


def read(value: str) -> set[str]:
    """Parse the switches in an environment variable. Raises `EngineError` for an unknown name."""
    names = {name.strip() for name in value.split(",")} - {""}
    if not names <= SWITCHES.keys():
        unknown = ", ".join(sorted(names - SWITCHES.keys()))
        raise EngineError(f"{VARIABLE} names {unknown}; there are: {', '.join(SWITCHES)}")
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
