"""A traced graph in whose taps nothing tells one layer from another still calls every tap with its own point."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from patchclamp.runtime.op import acting, at_work, carrying, site
from patchclamp.runtime.taps import apart_from_layers, without_taps
from tests.unit.test_op import Noted

LAYERS = 3


def model(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Points by kind: the stream 0 to 3, of which the last has no layer; another kind 4 and 5, not in layer 1."""
    for layer in range(LAYERS):
        site(rows, None, layer, layer)
        rows = rows @ weight
        if layer != 1:
            site(rows, None, 4 + layer // 2, layer)
    site(rows, None, LAYERS, -1)
    return rows


@pytest.fixture
def traced() -> tuple[Any, list[Any], list[Any]]:
    """Its graph as Dynamo has it, example inputs, and inputs."""
    seen: list[Any] = []

    def keep(graph: Any, example_inputs: Any) -> Any:
        seen.extend((graph, list(example_inputs)))
        return graph.forward

    torch._dynamo.reset()
    inputs = [torch.ones(2, 3), torch.eye(3)]
    torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    return *seen, inputs


def points_of(graph: Any, inputs: list[Any]) -> list[int]:
    noted = Noted()
    with at_work(noted):
        graph(*inputs)
    return noted.points


def test_points_come_with_their_layer(traced: Any) -> None:
    graph, examples, inputs = traced
    before = str(graph.graph)
    apart, more, points = apart_from_layers(graph, examples)
    assert points_of(apart, [*inputs, *points]) == points_of(graph, inputs) == [0, 4, 1, 2, 5, 3]
    assert [tensor.patchclamp_points for tensor in points] == [(0, 4), (1,), (2, 5)]
    assert len(more) == len(inputs) + len(points) == len(apart.graph.find_nodes(op="placeholder"))
    assert str(graph.graph) == before, "the traced graph was changed"
    taps = [node.args[2:4] for node in apart.graph.nodes if "site" in str(node.target)]
    assert taps == [(0, -1), (1, -1), (0, -1), (0, -1), (1, -1), (3, -1)]


def test_a_graph_that_was_saved_so_is_found_again(traced: Any) -> None:
    apart, more, points = apart_from_layers(*traced[:2])
    saved = torch.fx.GraphModule({}, pickle.loads(pickle.dumps(Plain(apart))).graph)
    for node, before in zip(saved.graph.nodes, apart.graph.nodes, strict=True):
        node.meta = before.meta
    again, inputs, found = apart_from_layers(saved, more)
    assert (again, inputs) == (saved, more)
    assert [tensor.patchclamp_points for tensor in found] == [tensor.patchclamp_points for tensor in points]


@pytest.mark.parametrize("saved", [False, True])
def test_without_taps_a_graph_is_as_if_there_were_none(traced: Any, saved: bool) -> None:
    graph, examples, inputs = traced
    given = apart_from_layers(graph, examples)[:2] if saved else (graph, examples)
    bare = without_taps(*given)
    assert bare is not None
    assert bare[1] == examples
    assert points_of(bare[0], inputs) == []
    assert torch.equal(bare[0](*inputs)[0], inputs[0])
    assert without_taps(*bare) is None


def test_a_tensor_that_carries_nothing_is_an_error() -> None:
    """As if compiled code had put another in its place: never another point in silence."""
    with pytest.raises(AttributeError, match="patchclamp_points"):
        acting(torch.zeros(1, 2), None, 0, -1, torch.zeros(1))
    with pytest.raises(IndexError):
        acting(torch.zeros(1, 2), None, 2, -1, carrying((7, 8), torch.device("cpu")))


class Plain:
    """A graph as it is pickled, without what its nodes know of values."""

    def __init__(self, module: Any) -> None:
        self.graph = torch.fx.Graph()
        self.graph.graph_copy(module.graph, {})
        for node in self.graph.nodes:
            node.meta = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"module": torch.fx.GraphModule({}, self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.graph = state["module"].graph
