"""vLLM's Transformers backend: detects its use, and keeps the classes that it decorates usable by others.

The backend builds a model of Transformers' own class, and decorates that class for `torch.compile` for the rest of the
process. Without `share`, existing models of that class stop working, and none can be created outside an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patchclamp.engines.vllm.compat.seams import forwards, require


def used(vllm_config: Any) -> bool:
    """True if the Transformers backend runs an engine's model."""
    _, name = require("backend")
    return bool(getattr(vllm_config.model_config, name)())


def nested(vllm_config: Any) -> bool:
    """True if the decoder is one part of an engine's model, beside a tower for images or sound."""
    return vllm_config.model_config.hf_config is not vllm_config.model_config.hf_text_config


@contextmanager
def outside(vllm_config: Any) -> Iterator[None]:
    """Create models of decorated classes without compilation inside the context."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(_uncompiled(vllm_config)):
        yield


def share(model: Any, vllm_config: Any) -> None:
    """Make the classes of an engine's model usable in this process as if they were not decorated."""
    decorator = getattr(*require("decorated"))
    for decorated in {type(module) for module in model.modules()}:
        transformers_own = decorator in decorated.__bases__ and not decorated.__module__.startswith("vllm.")
        if transformers_own and "do_not_compile" not in vars(decorated):
            decorated.do_not_compile = True  # an engine's own model has this attribute, False, on the instance
            decorated.__init__ = _made_anywhere(decorated.__init__, _uncompiled(vllm_config))


def _made_anywhere(init: Any, uncompiled: Any) -> Any:
    """Wrap a decorated class's `__init__` to use the configuration `uncompiled` outside an engine."""
    from vllm.config import get_current_vllm_config_or_none

    @forwards(init)
    def __init__(self: Any, *args: Any, vllm_config: Any = None, **kwargs: Any) -> None:
        init(self, *args, vllm_config=vllm_config or get_current_vllm_config_or_none() or uncompiled, **kwargs)

    return __init__


def _uncompiled(vllm_config: Any) -> Any:
    """Copy a configuration, without compilation and without the engine's layers."""
    from vllm.config import CompilationMode

    uncompiled = copy.copy(vllm_config)
    uncompiled.compilation_config = copy.copy(vllm_config.compilation_config)
    uncompiled.compilation_config.mode = CompilationMode.NONE
    uncompiled.compilation_config.static_forward_context = {}
    return uncompiled
