"""What vLLM loads in every process (`vllm.general_plugins`). Inert for engines that are not ours."""

from __future__ import annotations


def register() -> None:
    """Enters vLLM at its seams; each entry looks for our configuration, or a program, before it does anything."""
    from patchclamp.engines.vllm import cache, compat, worker

    compat.on_load(worker.attach, worker.answer)
    cache.install()
