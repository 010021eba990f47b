"""A record of one run of a model on tensors without data: which values were computed of which, and what every module
was called with and returned.

    T tokens of the run · D model width
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchclamp.sites.dataflow import Call, Record, Value
from patchclamp.sites.families import Sizes

# ops whose result has the numbers of their first argument, if it is as large
SAME = {"_reshape_alias", "_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "expand", "lift_fresh",
        "permute", "reshape", "select", "slice", "squeeze", "transpose", "unsqueeze", "view"}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Writes a `Record` of what runs under it. Tensors are the same value if they lie at the same place in memory that
    nothing was written to in between, or if they are copies."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.record = Record({path: kinds_of(module) for path, module in modules.items()})
        self._at: dict[tuple[int, int, int], int] = {}  # value by place
        self._alive: list[torch.Tensor] = []  # so that no place is used twice
        self._under: list[Call] = []

    def value(self, tensor: torch.Tensor) -> int:
        """The value that a tensor has now; a new one, if no op was seen to make it."""
        place = _place(tensor)
        if place not in self._at:
            self._make(tensor, "given", ())
        return self._at[place]

    def _make(self, tensor: torch.Tensor, op: str, of: tuple[int, ...], factor: float = 1.0) -> int:
        path = self._under[-1].path if self._under else ""
        number = self.record.add(Value(op, of, tuple(tensor.shape), path, factor))
        self._at[_place(tensor)] = number
        self._alive.append(tensor)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        of = tuple(self.value(tensor) for tensor in tensors)
        result = _result(func, args, kwargs)
        name = func._schema.name.rpartition("::")[2]
        made = _tensors(result)
        if "fused_add" in name and len(tensors) >= 2 and len(made) == 2:
            total = self._make(made[1], "add", of[:2])
            self._make(made[0], name, (total, *of[2:]))
        elif name in SAME and made and tensors and made[0].numel() == tensors[0].numel():
            self._alive.append(made[0])
            self._at[_place(made[0])] = of[0]
        else:
            op, of, factor = _arithmetic(name, args, kwargs, of, tensors)
            written = [tensors_of for tensors_of, spec in _written(func, args, kwargs) if spec]
            for tensor in made or written:
                self._make(tensor, op, of, factor)
            for tensor in written if made else ():
                if all(tensor is not other for other in made):
                    self._make(tensor, op, of, factor)
        return result

    # -- modules

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {key: value for key, value in (*enumerate(args), *kwargs.items()) if torch.is_tensor(value)}
        values = {key: self.value(tensor) for key, tensor in given.items()}
        call = Call(path, len(self.record.values), values, {key: tuple(t.shape) for key, t in given.items()})
        self.record.calls.append(call)
        self._under.append(call)

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._under.pop()
        items = output if isinstance(output, (tuple, list)) else (output,)
        tensors = {i: item for i, item in enumerate(items) if torch.is_tensor(item)}
        call.result = {i: self.value(item) for i, item in tensors.items()}
        call.result_shapes = {i: tuple(item.shape) for i, item in tensors.items()}
        call.end = len(self.record.values)

    def guessed(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a module returns. Of one that does not run without data: a tensor like its first, made of all."""
        depth, calls = len(self._under), len(self.record.calls)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            given = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()]
            if not given:
                raise
            del self._under[depth:], self.record.calls[calls:]
            self.record.guessed[path] = f"{type(error).__name__}: {error}"
            result = torch.empty_like(given[0])
            self._make(result, "guess", tuple(self.value(tensor) for tensor in given))
            return result


@contextmanager
def recorded(net: nn.Module, may_guess: Callable[[str], bool] = lambda path: False) -> Iterator[Recorder]:
    """Records what runs in the context. A module that `may_guess`, by its path, need not run without data."""
    modules = dict(net.named_modules())
    recorder = Recorder(modules)
    handles = []
    for path, module in modules.items():
        enter = functools.partial(recorder.enter, path)
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(functools.partial(recorder.leave, path), with_kwargs=True))
        if may_guess(path):
            module.forward = functools.partial(recorder.guessed, path, module.forward)
    try:
        with recorder:
            yield recorder
    finally:
        for handle in handles:
            handle.remove()
        for path, module in modules.items():
            if may_guess(path):
                del module.forward


def record_of(net: nn.Module, sizes: Sizes, ids: torch.Tensor, run: Callable[[], Any]) -> Record:
    """The record of a run of a model on token ids. Modules within its layers need not run without data."""
    with recorded(net, in_layers(net, sizes)) as recorder:
        recorder.record.ids = recorder.value(ids)
        run()
    return recorder.record


def in_layers(net: nn.Module, sizes: Sizes) -> Callable[[str], bool]:
    """Whether a path is of a module within a decoder layer."""
    lists = [
        path
        for path, module in net.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == sizes.layers
    ]
    within = re.compile("|".join(rf"{re.escape(path)}\.\d+\..+" for path in lists) or "$^")
    return lambda path: within.fullmatch(path) is not None


def kinds_of(module: nn.Module) -> str:
    """The names of a module's class and of those it is made of, in small letters."""
    return " ".join(kind.__name__ for kind in type(module).__mro__).lower()


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives. One that only writes to its arguments need not know of tensors without data."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if func._schema.returns:
            raise
        return None


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[torch.Tensor, bool]]:
    """Every tensor argument, and whether the op writes to it."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, writes


def _arithmetic(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], of: tuple[int, ...], tensors: list[torch.Tensor]
) -> tuple[str, tuple[int, ...], float]:
    """An op as `add` of two values, `scale` of one by a factor, or itself."""
    name = name.rstrip("_")
    numbers = [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if name == "add" and len(tensors) == 2 and tensors[0].numel() == tensors[1].numel():
        return ("add" if kwargs.get("alpha", 1) == 1 else "weighted add"), of, 1.0
    if name == "mul" and len(tensors) == 1 and len(numbers) == 1:
        return "scale", of, float(numbers[0])
    if name == "div" and len(tensors) == 1 and len(numbers) == 1 and torch.is_tensor(args[0]):
        return "scale", of, 1 / float(numbers[0])
    return name, of, 1.0
