"""What vLLM's own class of a model looks like: one run of it on tensors without data, in a process of its own.

    python -m patchclamp.engines.vllm.compat.blueprint < pickled VllmConfig > JSON of `Answer`

The class asks for process groups, for a configuration and for the sizes of a step, which are global in vLLM, so nobody
else's process is used for it. Weights are not read: large tensors are on the meta device from the start, small ones
follow once the model is made.
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
from patchclamp.sites import sizes_of
from patchclamp.sites.dataflow import NotFound, Record
from patchclamp.sites.places import Places, places
from patchclamp.sites.recording import in_layers, recorded
from patchclamp.sites.untabled import T, refuse, widths_of

LARGE = 1 << 12  # numbers of a tensor that is made without data
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)


class Answer(msgspec.Struct):
    """What was found, or the error."""

    places: Places | None = None
    error: Packed | None = None


def main() -> None:
    """Answers on what was standard output; what vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # which may register model classes
        answer = Answer(found(pickle.load(sys.stdin.buffer)))
    except Exception as error:
        answer = Answer(error=pack(error))
    answers.write(msgspec.json.encode(answer))
    answers.flush()


def found(vllm_config: Any) -> Places:
    """What a run of vLLM's class tells. Raises `ModelError` if it cannot be run, or has no stream."""
    facts = vllm_config.model_config
    config = facts.hf_text_config
    sizes = sizes_of(config, facts.get_vocab_size())
    net: Any = None
    try:
        with _alone(_plain(vllm_config)) as plain:
            net = _without_data(plain)
            record = _run(net, plain, sizes.layers)
        return places(type(net).__name__, record, sizes.layers, sizes.d_model, T, widths_of(sizes))
    except NotFound as why:
        raise refuse(f"vLLM's {type(net).__name__}", str(why)) from None
    except Exception as error:
        name = type(net).__name__ if net is not None else ", ".join(facts.architectures)
        raise refuse(f"vLLM's {name}", f"a run of it without data fails, {type(error).__name__}: {error}") from error


def _plain(vllm_config: Any) -> Any:
    """The configuration of the same model on one worker, with every op in plain PyTorch, and weights as they are."""
    from vllm.config import CompilationMode

    plain = copy.copy(vllm_config)
    plain.quant_config = None
    plain.parallel_config = copy.copy(vllm_config.parallel_config)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size"):
        setattr(plain.parallel_config, name, 1)
    plain.parallel_config.enable_expert_parallel = False
    compilation = plain.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation.mode, compilation.custom_ops = CompilationMode.NONE, ["none"]
    compilation.static_forward_context = {}
    return plain


@contextlib.contextmanager
def _alone(plain: Any) -> Any:
    """A process group of one, and the configuration as vLLM's current one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(plain):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        torch.set_default_dtype(plain.model_config.dtype)
        yield plain


class _Large(TorchFunctionMode):
    """Makes large tensors on the meta device. Small ones may be read while a model is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if math.prod(int(number) for number in size if isinstance(number, int)) > LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _without_data(plain: Any) -> Any:
    """vLLM's own class of a model, on the meta device."""
    owner, name = require("make a model")
    with _Large():
        net = getattr(owner, name)(plain)
    net = net.to("meta").eval()
    for module in net.modules():
        for key, value in list(vars(module).items()):
            if torch.is_tensor(value):  # neither a parameter nor a buffer
                setattr(module, key, value.to("meta"))
        if hasattr(module, "quant_method") and hasattr(module, "weight"):
            module.cpu_linear = torch.nn.functional.linear  # which a CPU chooses once weights are loaded
    return net


def _run(net: Any, plain: Any, layers: int) -> Record:
    """The record of a step of T tokens without attention's metadata, as when vLLM measures memory."""
    from vllm.forward_context import set_forward_context

    torch.is_autocast_enabled = lambda *arguments: False  # the meta device has no autocast
    torch.amp.autocast = lambda *arguments, **options: contextlib.nullcontext()  # type: ignore[misc,assignment]
    with (
        set_forward_context(None, plain, num_tokens=T),
        torch.no_grad(),
        torch.device("meta"),
        recorded(net, in_layers(net, layers)) as recorder,
    ):
        ids, positions = (torch.zeros(T, dtype=torch.long) for _ in range(2))
        recorder.record.ids = recorder.value(ids)
        net(input_ids=ids, positions=positions)
    return recorder.record


if __name__ == "__main__":
    main()
