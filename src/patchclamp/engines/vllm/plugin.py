"""The plugin that vLLM loads in every process (`vllm.general_plugins`). It does nothing for engines of others."""

from __future__ import annotations

from typing import Any

from patchclamp.errors import SeamMoved

problem: SeamMoved | None = None  # a seam that is not there; an engine of ours raises it when it starts, no other does


def register() -> None:
    """Wraps vLLM where engines are configured, where steps and compilation begin, and the prefix cache; each wrapper
    first looks whether it is needed."""
    global problem
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
