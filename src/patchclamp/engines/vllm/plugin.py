"""The plugin that vLLM loads in every process (`vllm.general_plugins`). It leaves engines without patchclamp alone."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from patchclamp.errors import SeamMoved, describe_error

CAUSES = "PATCHCLAMP_START_CAUSES"  # a file for the errors of a server's processes

problem: SeamMoved | None = None  # a missing seam; only engines with patchclamp raise it, at their start


class _Causes(logging.Handler):
    """Appends each logged exception as a line to a file, since a server does not get the cause of a failed core."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            with contextlib.suppress(OSError), open(os.environ[CAUSES], "a") as file:
                file.write(" ".join(describe_error(record.exc_info[1]).split()) + "\n")


def register() -> None:
    """Wrap vLLM's configuration, model loading, compilation, prefix cache, engine core and output processor. Each
    wrapper first checks if the engine uses patchclamp."""
    global problem
    if os.environ.get(CAUSES):
        logging.getLogger("vllm").addHandler(_Causes(logging.ERROR))
    from patchclamp.engines.vllm import cache, worker
    from patchclamp.engines.vllm.compat import core, front, graphs, runner

    try:
        front.on_config(_complete)
        runner.on_load(worker.attach, worker.answer)
        graphs.on_compile()
        cache.install()
        core.on_core(worker.admission_of)
        core.on_outputs()
    except SeamMoved as moved:
        problem = moved


def _complete(vllm_config: Any) -> None:
    from patchclamp.engines.vllm import setup

    if problem is not None:
        raise problem
    setup.complete(vllm_config)
