"""Graphs cut down to some taps: how a copy is launched. That it is the same graph is for a GPU to say (tests.gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patchclamp.kernels import switches
from patchclamp.runtime import cuda_graphs


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA's bindings: `launched` notes what runs on which stream, `made` the streams that were made for it."""
    told: Any = SimpleNamespace(launched=[], made=[], destroyed=[], stream=5, error=0)

    def stream(init_value: int) -> str:
        told.made.append(init_value)
        return f"stream {init_value}"

    def launch(executable: str, on: str) -> tuple[int]:
        told.launched.append((executable, on))
        return (told.error,)

    bindings = SimpleNamespace(cudaGraphLaunch=launch, cudaStream_t=stream, cudaGraphExecDestroy=told.destroyed.append)
    monkeypatch.setattr(cuda_graphs, "_bindings", [bindings])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: told.stream, raising=False)
    return told


def test_a_copy_runs_on_the_stream_that_is_current(cuda: SimpleNamespace) -> None:
    copy = cuda_graphs._Copy(SimpleNamespace(), frozenset({1}), "graph", 3)  # type: ignore[arg-type]
    for cuda.stream in (5, 5, 7, 5):
        copy.launch()
    assert cuda.launched == [("graph", f"stream {number}") for number in (5, 5, 7, 5)]
    assert cuda.made == [5, 7, 5], "a stream is made anew only when another one is current"
    del copy
    assert cuda.destroyed == ["graph"]


def test_a_copy_that_cannot_be_launched_says_so(cuda: SimpleNamespace) -> None:
    copy, cuda.error = cuda_graphs._Copy(SimpleNamespace(), frozenset({1}), "graph", 3), 700  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a CUDA graph could not be launched: 700"):
        copy.launch()


class Whole:
    """A recorded graph as PyTorch's."""

    def __init__(self) -> None:
        self.replays = 0

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        self.replays += 1


def tapped(whole: Whole, active: list[bool]) -> cuda_graphs.TappedGraph:
    recorded = cuda_graphs.Recorded()
    recorded.use(np.array(active))
    return cuda_graphs.TappedGraph(whole, [("node 0", 0), ("node 1", 1)], recorded)  # type: ignore[arg-type]


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is switched off, to begin with nothing."""
    disabled: set[str] = set()
    monkeypatch.setattr(switches, "disabled", disabled)
    return disabled


def test_a_cut_graph_that_cannot_be_launched_gives_way_to_the_whole_one(
    cuda: SimpleNamespace, switched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda_graphs, "_cut", lambda owner, graph, taps, wanted: cuda_graphs._Copy(owner, wanted, "cut", 1)
    )
    whole = Whole()
    graph = tapped(whole, [True, False])
    for _ in range(cuda_graphs.PATIENCE + 3):
        graph.replay()
    assert (whole.replays, len(cuda.launched)) == (cuda_graphs.PATIENCE, 3)
    cuda.error = 700
    graph.replay()
    cuda.error = 0
    graph.replay()
    assert whole.replays == cuda_graphs.PATIENCE + 2, "the step that could not be launched ran, and so did the next"
    assert switched == {"cut_graphs"}


def test_graphs_are_whole_where_cutting_is_switched_off_or_fails(
    cuda: SimpleNamespace, switched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_cut", lambda *args: (_ for _ in ()).throw(RuntimeError("not today")))
    for _ in range(2):  # it fails, and is then switched off
        whole = Whole()
        graph = tapped(whole, [True, False])
        for _ in range(2 * cuda_graphs.PATIENCE):
            graph.replay()
        assert (whole.replays, cuda.launched) == (2 * cuda_graphs.PATIENCE, [])
        assert switched == {"cut_graphs"}
