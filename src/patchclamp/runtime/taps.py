"""Taps: hooks on a model's modules that pass tensors to the custom op. They are attached before anything is compiled.

vLLM splits a traced graph at attention and compiles equal pieces once. A tap's point number would make every piece
different, so the number is replaced by an index into its layer's list of points, and the list becomes a graph input: a
dummy tensor with the list as an attribute. Dynamo's code lacks these inputs; the compiled graph's caller adds them.
Thus equal layers are compiled once, as in stock vLLM.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from patchclamp.errors import ModelError
from patchclamp.runtime.op import acting, carrying, site
from patchclamp.sites import Point, Tap, View

_INPUT = "patchclamp_points"  # prefix of such an input's name; the points follow, so that a saved graph has them


def apart_from_layers(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any], list[torch.Tensor]]:
    """Make the taps of a traced graph independent of their layer. Returns the graph, its example inputs, and tensors to
    add to each call's inputs. A graph that was converted before (saved by vLLM) is returned unchanged."""
    inputs = graph.graph.find_nodes(op="placeholder")
    ours = [node for node in inputs if _is_ours(node)]
    if not ours:
        graph = copy.deepcopy(graph)
        ours, example_inputs = _with_inputs(graph, list(example_inputs))
    return graph, list(example_inputs), [carrying(_points(node), node.meta["example_value"].device) for node in ours]


def without_taps(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any]] | None:
    """Copy a traced graph without its taps and their inputs. Returns it and its example inputs; None without taps."""
    graph = copy.deepcopy(graph)
    taps = _taps(graph)
    for node in taps:
        graph.graph.erase_node(node)
    inputs = graph.graph.find_nodes(op="placeholder")
    kept = [value for node, value in zip(inputs, example_inputs, strict=True) if not _is_ours(node)]
    for node in inputs:
        if _is_ours(node):
            graph.graph.erase_node(node)
    graph.recompile()
    return (graph, kept) if taps else None


def _taps(graph: torch.fx.GraphModule) -> list[Any]:
    return [node for node in graph.graph.nodes
            if node.op == "call_function" and str(node.target).startswith("patchclamp.site")]  # fmt: skip


def points_in(graph: torch.fx.GraphModule) -> list[int]:
    """Return the points whose taps are in a graph, or in a piece of a graph."""
    return [_points(node.args[4])[node.args[2]] if len(node.args) > 4 else node.args[2] for node in _taps(graph)]


def _is_ours(node: Any) -> bool:
    return str(node.target).startswith(_INPUT)


def _points(node: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in str(node.target).removeprefix(_INPUT).split("_")[1:])


def _with_inputs(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Add an input to a graph for each layer with taps. Returns these inputs and the extended example inputs."""
    taps_of: dict[int, list[Any]] = defaultdict(list)
    for node in _taps(graph):
        if len(node.args) == 4 and node.args[3] >= 0:  # layer −1: a point of the model, such as its last norm
            taps_of[node.args[3]].append(node)
    inputs = graph.graph.find_nodes(op="placeholder")
    traced = len(inputs)
    for taps in taps_of.values():
        points = sorted({node.args[2] for node in taps})
        value = taps[0].args[0].meta["example_value"]
        with value.fake_mode:
            example = torch.empty(1, device=value.device)
        with graph.graph.inserting_after(inputs[-1]):
            inputs.append(graph.graph.placeholder("_".join([_INPUT, *map(str, points)])))
        inputs[-1].meta["example_value"] = example
        for node in taps:
            node.args = (*node.args[:2], points.index(node.args[2]), -1, inputs[-1])
        example_inputs.append(example)
    graph.recompile()
    return inputs[traced:], example_inputs


def attach(
    model: torch.nn.Module, taps: list[tuple[Point, Tap]], view: Callable[[Tap], View | None],
    around: Callable[[torch.nn.Module, Literal["query", "output"], Callable[[torch.Tensor], None]], None] | None = None,
) -> dict[int, View | None]:  # fmt: skip
    """Hook every tap whose module is in this process, except taps of sampled rows. Returns each hooked point's view in
    its tap's tensor, by point number. Raises `ModelError` for a missing module.

    Layers of other pipeline stages, for which vLLM has a `PPMissingLayer`, are not hooked.
    """
    hooked = {}
    for point, tap in taps:
        if point.rows != "tokens":
            continue
        module = find(model, tap.module)
        if type(module).__name__ == "PPMissingLayer":
            continue
        if tap.moment in ("attention", "query"):
            assert around is not None
            around(module, "query" if tap.moment == "query" else "output", _attention_hook(point))
        elif tap.moment == "in":
            module.register_forward_pre_hook(_input_hook(point, tap), with_kwargs=True)
        elif tap.rerun:
            module.register_forward_hook(_router_hook(point))
        else:
            module.register_forward_hook(_output_hook(point, tap))
        hooked[point.number] = view(tap)
    return hooked


def find(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return the submodule at a path, or the `PPMissingLayer` in its place. Raises `ModelError` for an invalid path."""
    module, walked = model, []
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            if type(module).__name__ == "PPMissingLayer":
                return module
            parent = ".".join(walked) or type(model).__name__
            raise ModelError(f"{parent} has no {name!r} (for {path}); available: {', '.join(children) or 'none'}")
        module = children[name]
        walked.append(name)
    return module


def _numbers(point: Point) -> tuple[int, int]:
    """Return a point's number, and its layer or −1."""
    return point.number, -1 if point.layer is None else point.layer


def _input_hook(point: Point, tap: Tap) -> Callable[..., Any]:
    hidden, residual, copied = tap.hidden, tap.residual, tap.copied
    number, layer = _numbers(point)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        residual_in = None if residual is None else _argument(residual, args, kwargs)
        rows = kwargs[hidden] if isinstance(hidden, str) else args[hidden]
        rows = rows.clone() if copied else rows
        site(rows, residual_in, number, layer)
        return handed(args, kwargs, hidden, rows) if copied else None

    return hook


def _argument(at: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call's argument, by index or name; None if the call does not have it."""
    if isinstance(at, str):
        return kwargs.get(at)
    return args[at] if len(args) > at else None


def handed(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: int | str, rows: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, with the argument at an index or name replaced by `rows`."""
    if isinstance(name, str):
        return args, kwargs | {name: rows}
    return (*args[:name], rows, *args[name + 1 :]), kwargs


def _attention_hook(point: Point) -> Callable[[torch.Tensor], None]:
    number = point.number

    def hook(result: torch.Tensor) -> None:
        acting(result, None, number)

    return hook


def _router_hook(point: Point) -> Callable[..., Any]:
    """Create a hook for a router that returns its logits and choice of experts. If the logits are edited, the router is
    rerun on them with identity weights, so it chooses experts from the edited logits."""
    number, layer = _numbers(point)

    def hook(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        logits_RX = output[0].clone()
        site(logits_RX, None, number, layer)
        if torch.equal(logits_RX, output[0]):
            return None
        own_parameters = {}
        identity = torch.eye(logits_RX.shape[-1], dtype=logits_RX.dtype, device=logits_RX.device)
        for name, neutral in {"weight": identity, "bias": torch.zeros_like(identity[0])}.items():
            if name in module._parameters and module._parameters[name] is not None:
                own_parameters[name] = module._parameters[name]
                module._parameters[name] = torch.nn.Parameter(neutral, requires_grad=False)
        has_width, width = hasattr(module, "hidden_dim"), getattr(module, "hidden_dim", None)
        module.hidden_dim = logits_RX.shape[-1]
        try:
            rerun = type(module).forward(module, logits_RX, *args[1:])
        finally:
            module._parameters |= own_parameters
            if has_width:
                module.hidden_dim = width
            else:
                del module.hidden_dim
        return (logits_RX, *rerun[1:])

    return hook


def _output_hook(point: Point, tap: Tap) -> Callable[..., None]:
    index = tap.hidden
    number, layer = _numbers(point)
    assert isinstance(index, int)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        site(output[index] if isinstance(output, tuple) else output, None, number, layer)

    return hook
