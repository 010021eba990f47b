"""vLLM's Transformers backend: which engines use it, and how others can still use the classes that it decorates.

The backend makes a model of Transformers' own class, and decorates that class for `torch.compile` for the rest of the
process.  Without `share`, models of that class that were made before do not run any more, and none can be made outside
an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patchclamp.engines.vllm.compat.seams import forwards, require


def used(vllm_config: Any) -> bool:
    """Whether an engine's model is run by the Transformers backend."""
    _, name = require("backend")
    return bool(getattr(vllm_config.model_config, name)())


def nested(vllm_config: Any) -> bool:
    """Whether the decoder is a part of an engine's model, beside a tower for images or sound."""
    return vllm_config.model_config.hf_config is not vllm_config.model_config.hf_text_config


@contextmanager
def outside(vllm_config: Any) -> Iterator[None]:
    """A context in which models of decorated classes are made as if there were no compiler."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(_uncompiled(vllm_config)):
        yield


def share(model: Any, vllm_config: Any) -> None:
    """Lets others in this process use the classes of an engine's model as if they were not decorated."""
    decorator = getattr(*require("decorated"))
    for decorated in {type(module) for module in model.modules()}:
        transformers_own = decorator in decorated.__bases__ and not decorated.__module__.startswith("vllm.")
        if transformers_own and "do_not_compile" not in vars(decorated):
            decorated.do_not_compile = True  # an engine's own model has this attribute, False, on the instance
            decorated.__init__ = _made_anywhere(decorated.__init__, _uncompiled(vllm_config))


def _made_anywhere(init: Any, uncompiled: Any) -> Any:
    """A decorated class's `__init__` that outside an engine takes the configuration `uncompiled`."""
    from vllm.config import get_current_vllm_config_or_none

    @forwards(init)
    def __init__(self: Any, *args: Any, vllm_config: Any = None, **kwargs: Any) -> None:
        init(self, *args, vllm_config=vllm_config or get_current_vllm_config_or_none() or uncompiled, **kwargs)

    return __init__


def _uncompiled(vllm_config: Any) -> Any:
    """The same configuration, but without a compiler and the engine's layers."""
    from vllm.config import CompilationMode

    uncompiled = copy.copy(vllm_config)
    uncompiled.compilation_config = copy.copy(vllm_config.compilation_config)
    uncompiled.compilation_config.mode = CompilationMode.NONE
    uncompiled.compilation_config.static_forward_context = {}
    return uncompiled
