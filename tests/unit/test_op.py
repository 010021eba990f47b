"""The op under its name: compiled code at work finds what it does, and whoever else looks finds the op."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from patchclamp.errors import EngineError
from patchclamp.kernels import switches
from patchclamp.runtime.op import acting, at_work, shorten, site


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


class Unchanging:
    """A packet as PyTorch's, whose class may not be set, or that does not find its op afterwards."""

    def __init__(self, refuses: bool) -> None:
        self.default, self.calls = self._op, 0
        vars(self)["refuses"] = refuses

    def _op(self, *args: Any) -> None:
        self.calls += 1

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__" and self.refuses:
            raise TypeError("__class__ assignment is not supported")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", ["refuses", "metaclass", "off"])
def test_where_pytorch_does_not_allow_it_the_op_stays_as_it_is(monkeypatch, caplog, kind) -> None:
    monkeypatch.setattr(switches, "disabled", {"op_class"} if kind == "off" else set())
    packet: Any = Unchanging(refuses=True)
    if kind == "metaclass":

        class Final(Unchanging):
            def __init_subclass__(cls) -> None:
                raise TypeError("not an acceptable base type")

        packet = Final(refuses=False)
    before, stock = packet.default, type(packet)
    assert shorten(packet) is False
    assert (packet.default, type(packet)) == (before, stock)
    assert switches.disabled == {"op_class"}
    assert ("op_class failed" in caplog.text) == (kind != "off")


def test_compiled_code_computes_the_same_with_the_op_itself() -> None:
    for compiled in (True, False):  # `acting`, and the op
        noted = Noted()
        with at_work(noted, compiled=compiled):
            found()(torch.zeros(2, 3), None, 3)
        assert noted.points == [3]


def test_a_switch_that_there_is_not_is_an_error() -> None:
    assert switches.read("op_class, cut_graphs,") == {"op_class", "cut_graphs"}
    assert switches.read("") == set()
    with pytest.raises(EngineError, match=r"PATCHCLAMP_DISABLE: .*op_clas;.* op_class, cut_graphs"):
        switches.read("op_clas,launcher")
