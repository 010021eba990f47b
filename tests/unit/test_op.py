"""The op under its name: compiled code at work finds what it does, and whoever else looks finds the op."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from patchclamp.runtime.op import acting, at_work, site


class Noted:
    def __init__(self) -> None:
        self.points: list[int] = []

    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.points.append(point)


def found() -> Any:
    return torch.ops.patchclamp.site.default  # as Inductor writes it


def test_compiled_code_at_work_finds_what_the_op_does_and_nobody_else_does() -> None:
    noted, elsewhere, hidden = Noted(), [], torch.zeros(2, 3)
    op = found()
    assert isinstance(op, torch._ops.OpOverload)
    with at_work(noted, compiled=True):
        assert found() is acting
        found()(hidden, None, 3)
        thread = threading.Thread(target=lambda: elsewhere.append(found()))
        thread.start()
        thread.join()
        with at_work(noted):  # a graph is being recorded, or code compiled
            assert found() is op
        assert found() is acting
        site(hidden, None, 4)  # as the taps themselves call it
    assert found() is op
    assert elsewhere == [op]
    found()(hidden, None, 5)
    assert noted.points == [3, 4]
    with pytest.raises(ValueError, match="broke"), at_work(noted, compiled=True):
        raise ValueError("broke")
    assert found() is op


def test_the_op_is_still_what_compilers_take_it_for() -> None:
    assert torch.ops.patchclamp.site is site
    assert isinstance(site, torch._ops.OpOverloadPacket)
    assert site.overloads() == ["default"]
    assert str(site) == "patchclamp.site"
    graph = torch.fx.Graph()
    hidden = graph.placeholder("hidden")
    graph.call_function(site, (hidden, None, 1))
    graph.call_function(site.default, (hidden, None, 2))
    graph.output(hidden)
    made = pickle.loads(pickle.dumps(torch.fx.GraphModule(torch.nn.Module(), graph)))
    noted = Noted()
    with at_work(noted):
        made(torch.zeros(2, 3))
    assert noted.points == [1, 2]
