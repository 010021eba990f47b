"""Equal layers are compiled once, as stock vLLM's are, though each has taps of its own.

vLLM cuts a traced graph at attention and compiles equal pieces once. The number of a tap's point is part of its piece,
so no two pieces would be equal. Here the number becomes a place in its layer's list of points, and the list an input of
the graph: a tensor of no meaning, which carries it as an attribute. Dynamo's code knows nothing of these inputs;
whoever calls what was compiled adds them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from patchclamp.runtime.op import carrying

_INPUT = "patchclamp_points"  # the name of such an input, with the numbers after it, so that a saved graph has them


def apart_from_layers(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any], list[torch.Tensor]]:
    """A traced graph in whose taps nothing tells one layer from another, its example inputs, and what is to be added to
    the inputs of each call. A graph that is one already, which vLLM saved, comes back as it is."""
    inputs = graph.graph.find_nodes(op="placeholder")
    ours = [node for node in inputs if _is_ours(node)]
    if not ours:
        graph = copy.deepcopy(graph)
        ours, example_inputs = _with_inputs(graph, list(example_inputs))
    return graph, list(example_inputs), [carrying(_points(node), node.meta["example_value"].device) for node in ours]


def without_taps(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any]] | None:
    """A copy of a traced graph without our op and what we added to its inputs, as stock vLLM's is, and its example
    inputs. None if it has none of our op's nodes."""
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


def _is_ours(node: Any) -> bool:
    return str(node.target).startswith(_INPUT)


def _points(node: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in str(node.target).removeprefix(_INPUT).split("_")[1:])


def _with_inputs(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Gives a graph an input for each layer that has taps. Returns these, and the example inputs with theirs."""
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
