"""Graphs cut down to some taps: how a copy is launched. That it is the same graph is for a GPU to say (tests.gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchclamp.runtime import graphs


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
    monkeypatch.setattr(graphs, "_bindings", [bindings])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: told.stream, raising=False)
    return told


def test_a_copy_runs_on_the_stream_that_is_current(cuda: SimpleNamespace) -> None:
    copy = graphs._Copy(SimpleNamespace(), frozenset({1}), "graph", 3)  # type: ignore[arg-type]
    for cuda.stream in (5, 5, 7, 5):
        copy.launch()
    assert cuda.launched == [("graph", f"stream {number}") for number in (5, 5, 7, 5)]
    assert cuda.made == [5, 7, 5], "a stream is made anew only when another one is current"
    del copy
    assert cuda.destroyed == ["graph"]


def test_a_copy_that_cannot_be_launched_says_so(cuda: SimpleNamespace) -> None:
    copy, cuda.error = graphs._Copy(SimpleNamespace(), frozenset({1}), "graph", 3), 700  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a CUDA graph could not be launched: 700"):
        copy.launch()
