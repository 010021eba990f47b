"""What vLLM loads in every process (`vllm.general_plugins`). Inert for engines that are not ours."""

from __future__ import annotations

from patchclamp.errors import SeamMoved

problem: SeamMoved | None = None  # a seam that was not found: told by an engine of ours when it starts, and by no other


def register() -> None:
    """Enters vLLM at its seams; each entry looks for our configuration, or a program, before it does anything."""
    global problem
    from patchclamp.engines.vllm import cache, worker
    from patchclamp.engines.vllm.compat import graphs, runner

    try:
        runner.on_load(worker.attach, worker.answer)
        graphs.on_compile()
        cache.install()
    except SeamMoved as moved:
        problem = moved
