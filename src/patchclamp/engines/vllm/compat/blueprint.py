"""Traces vLLM's own class of a model: one run on tensors without data, in a separate process.

    python -m patchclamp.engines.vllm.compat.blueprint < pickled VllmConfig > JSON of `Answer`

The class needs process groups, a configuration and the sizes of a step, which are global in vLLM; hence the separate
process. Weights are not read: large tensors are on the meta device from the start, small ones move there once the model
is created.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import sys
import tempfile
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from patchclamp.engines.vllm.compat.seams import require
from patchclamp.errors import Packed, pack
from patchclamp.sites import Sizes, sizes_of
from patchclamp.sites.untabled import NotFound, Places, Record, T, places, record_of, refuse

LARGE = 1 << 12  # numbers in a tensor; larger ones are created without data
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


class Answer(msgspec.Struct):
    """The places found, or the error."""

    places: Places | None = None
    error: Packed | None = None


def main() -> None:
    """Write the answer to the original standard output; redirect vLLM's own output to standard error."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        from transformers.dynamic_module_utils import init_hf_modules
        from vllm.plugins import load_general_plugins

        init_hf_modules()  # the config's class may come from the checkpoint
        load_general_plugins()  # they may register model classes
        answer = Answer(found(pickle.load(sys.stdin.buffer)))
    except Exception as error:
        answer = Answer(error=pack(error))
    os.write(answers, msgspec.json.encode(answer))


def found(vllm_config: Any) -> Places:
    """Find the places in a run of vLLM's class. Raises `ModelError` if it cannot be run, or has no stream."""
    model_config = vllm_config.model_config
    sizes = sizes_of(model_config.hf_text_config, model_config.get_vocab_size())
    model: Any = None
    try:
        with _alone(_plain(vllm_config)) as plain:
            model = _without_data(plain)
            record = _run(model, plain, sizes)
        return places(type(model).__name__, record, sizes, T)
    except NotFound as why:
        raise refuse(f"vLLM's {type(model).__name__}", str(why)) from None
    except Exception as error:
        name = type(model).__name__ if model is not None else ", ".join(model_config.architectures)
        raise refuse(f"vLLM's {name}", f"a run of it without data fails, {type(error).__name__}: {error}") from error


def _plain(vllm_config: Any) -> Any:
    """Return the configuration of the same model on one worker, unquantized, with every op in plain PyTorch."""
    from vllm.config import CompilationMode

    plain = copy.copy(vllm_config)
    plain.quant_config = None
    parallel_config = plain.parallel_config = copy.copy(vllm_config.parallel_config)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size"):
        setattr(parallel_config, name, 1)
    parallel_config.enable_expert_parallel = False
    compilation_config = plain.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation_config.mode, compilation_config.custom_ops = CompilationMode.NONE, ["none"]
    compilation_config.static_forward_context = {}
    return plain


@contextlib.contextmanager
def _alone(plain: Any) -> Any:
    """Set up a process group of one, and make the configuration vLLM's current one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(plain):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        torch.set_default_dtype(plain.model_config.dtype)
        yield plain


class _Large(TorchFunctionMode):
    """Creates large tensors on the meta device. Small ones may be read while a model is created."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if math.prod(int(number) for number in size if isinstance(number, int)) > LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _without_data(plain: Any) -> Any:
    """Create a model of vLLM's own class on the meta device."""
    owner, name = require("make a model")
    with _Large():
        model = getattr(owner, name)(plain)
    model = model.to("meta").eval()
    for linear in model.modules():
        for key, value in list(vars(linear).items()):
            if torch.is_tensor(value):  # neither a parameter nor a buffer
                setattr(linear, key, value.to("meta"))
        if hasattr(linear, "quant_method") and hasattr(linear, "weight"):
            linear.cpu_linear = torch.nn.functional.linear  # on a CPU, vLLM sets it after loading weights
    return model


def _run(model: Any, plain: Any, sizes: Sizes) -> Record:
    """Record a step of T tokens without attention metadata, as in vLLM's memory profiling."""
    from vllm.forward_context import set_forward_context

    torch.is_autocast_enabled = lambda *arguments: False  # the meta device has no autocast
    torch.amp.autocast = lambda *arguments, **options: contextlib.nullcontext()  # type: ignore[misc,assignment]
    with set_forward_context(None, plain, num_tokens=T), torch.no_grad(), torch.device("meta"):
        ids, positions = (torch.zeros(T, dtype=torch.long) for _ in range(2))
        given = {"input_ids": ids, "positions": positions, "intermediate_tensors": None, "inputs_embeds": None}
        return record_of(model, sizes, ids, lambda: model(**given))


if __name__ == "__main__":
    main()
