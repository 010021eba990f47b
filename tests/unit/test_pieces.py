"""Pieces of compiled code are not used after any error in the comparison with the whole, even one without a message."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pieces = pytest.importorskip("patchclamp.engines.vllm.compat.pieces")


@pytest.mark.parametrize("error", [AssertionError(), KeyError("x"), RuntimeError("no room")])
def test_pieces_that_fail_are_not_used(monkeypatch, error):
    monkeypatch.setattr(pieces, "_agreed", bool)
    made = SimpleNamespace(usable=None, layers=2)

    def compute(observe=None, **begin):
        if observe is not None:
            raise error
        return torch.zeros(3, 4)

    streams = pieces.Streams(made, 3, torch.device("cpu"))
    streams.record(compute, np.arange(3))
    assert made.usable is False
    assert streams.begin(2) == 0
