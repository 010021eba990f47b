"""An `LM` whose sites are proved when it is loaded.

A proof is made of runs of an `LM`, so this stands above `lm`.
"""

from __future__ import annotations

from typing import Any

from patchclamp.engines.base import Engine
from patchclamp.language.values import as_flag
from patchclamp.lm import LM
from patchclamp.proving.cache import ensure_proved


class ProvedLM(LM):
    """A language model. `model` is a hub id, a folder, or "smollm2", the small real model of the demo extra.

    engine: "vllm" (the default where it is installed), "transformers", "fake", or an engine object.
    prove: offer a site only once it is proved on this live model. It takes a few seconds on a CPU, and is remembered
        for the model and the versions.
    allow_code: programs may have `Apply`, Python that runs in the engine; the engine must be in this process.
    capture_bytes: what the captures of one call may take; by default 80 % of the memory that is left when it is made.
    options: the engine's own, by its own names (vLLM's engine arguments; for Transformers see `TransformersEngine`).

    Raises: `ModelError` for a model without a site table, `EngineError` if the engine does not start,
    `UnknownName` for an option it does not have.
    """

    def __init__(
        self,
        model: str,
        engine: str | Engine | None = None,
        *,
        prove: bool = True,
        allow_code: bool = False,
        **options: Any,
    ) -> None:
        as_flag(prove, "prove")
        super().__init__(model, engine, allow_code=allow_code, **options)
        if prove and not self.engine.proved:
            try:
                ensure_proved(self)
            except BaseException:
                self.close()
                raise
