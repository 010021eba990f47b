"""vLLM's Transformers backend: which engines use it, and what it does to the classes of a process.

It makes the model of Transformers' own class, and decorates that class for `torch.compile`, for good: a model of it
that others made does not run any more, and none can be made outside an engine.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patchclamp.engines.vllm.compat.seams import require


def used(vllm_config: Any) -> bool:
    """Whether an engine's model is run by the Transformers backend."""
    _, name = require("backend")
    return bool(getattr(vllm_config.model_config, name)())


def nested(vllm_config: Any) -> bool:
    """Whether the decoder is a part of an engine's model, beside a tower for images or sound."""
    return vllm_config.model_config.hf_config is not vllm_config.model_config.hf_text_config


@contextmanager
def outside(vllm_config: Any) -> Iterator[None]:
    """Within, models of decorated classes are made as if there were no compiler."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(_uncompiled(vllm_config)):
        yield


def share(model: Any, vllm_config: Any) -> None:
    """Lets others in this process use the classes of an engine's model as if they were not decorated."""
    decorator = getattr(*require("decorated"))
    for kind in {type(module) for module in model.modules()}:
        decorated = decorator in kind.__bases__ and not kind.__module__.startswith("vllm.")
        if decorated and "do_not_compile" not in vars(kind):
            kind.do_not_compile = True  # an engine's own model says otherwise of itself
            kind.__init__ = _made_anywhere(kind.__init__, _uncompiled(vllm_config))


def _made_anywhere(init: Any, uncompiled: Any) -> Any:
    """A decorated class's `__init__`, which outside an engine takes that configuration for the current one."""
    from vllm.config import get_current_vllm_config_or_none

    @functools.wraps(init)
    def made(self: Any, *args: Any, vllm_config: Any = None, **kwargs: Any) -> None:
        init(self, *args, vllm_config=vllm_config or get_current_vllm_config_or_none() or uncompiled, **kwargs)

    return made


def _uncompiled(vllm_config: Any) -> Any:
    """The same configuration, but without a compiler and the engine's layers."""
    from vllm.config import CompilationMode

    made = copy.copy(vllm_config)
    made.compilation_config = copy.copy(vllm_config.compilation_config)
    made.compilation_config.mode = CompilationMode.NONE
    made.compilation_config.static_forward_context = {}
    return made
