"""Knockouts graded in batches, where a kernel removes the keys: with a stand-in for it, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines.vllm.compat.keys import of_block
from patchclamp.plan.bound import REMOVE
from patchclamp.runtime.host_step import HostStep

from ..conftest import TOKENS
from ..gpu.engines import attached
from .conftest import room_of


@pytest.fixture
def lm(narrow) -> Iterator[pc.LM]:
    """An engine that has as much to lease after a test as before."""
    engine = narrow.get("vllm", "float32")
    engine.grade([5, 6, 7], [], score=[5])  # proves it
    before = room_of(engine)
    yield engine
    assert room_of(engine) == before


class _Removing(HostStep):
    """Removes keys in PyTorch, a row at a time, from the blocks in the batch's tables, as the kernel does on a GPU."""

    removes_keys = True

    def __init__(self, runtime: Any) -> None:
        self.__dict__.update(vars(runtime.step))
        self._runtime, self.removed = runtime, 0

    def begin(self, plan: Any, batch: Any, steps: int) -> None:
        self._batch = batch
        super().begin(plan, batch, steps)

    def apply(self, point: int, hidden_RW: torch.Tensor, residual_RW: Any, sampled: bool) -> Any:
        runtime = self._runtime
        if runtime.is_query[point]:
            self._query = hidden_RW.clone()
        elif runtime.keys.is_output[point] and self._table.removing:
            for n in range(len(self._batch.slot)):
                self._remove(point, n, hidden_RW)
            return None
        return super().apply(point, hidden_RW, residual_RW, sampled) if self._plan.active[point] else None

    def _remove(self, point: int, n: int, hidden_RW: torch.Tensor) -> None:
        batch, table, keys = self._batch, self._runtime.table, self._runtime.keys
        slot, first, begin = int(batch.slot[n]), int(batch.row[n]), int(batch.position[n])
        layer, group = keys._layer(point)
        tables, size = keys._table(group, len(batch.slot))
        size_E, length = layer.head_size, begin + int(batch.count[n])
        blocks = layer.kv_cache[tables[n, : -(-length // size)].long()]
        halves = blocks.view(*blocks.shape[:2], 2 * size, size_E)
        key_TKE, value_TKE = (of_block(halves[None, :, :, part * size :][:, :, :, :size], layer.isa, part)
                              .transpose(2, 3).flatten(0, 2)[:length] for part in (0, 1))  # fmt: skip
        records = table.records[table.first[slot, point] : table.first[slot, point + 1]] if slot else ()
        for position in range(begin, length):
            acting = [each for each in records if each["start"] <= position < each["stop"]]
            assert all(each["kind"] == REMOVE for each in records), "other edits of z are not carried out here"
            if not acting:
                continue
            self.removed += 1
            row = first + position - begin
            query_HE, result_HE = (of[row].view(-1, size_E) for of in (self._query, hidden_RW))
            for head, query_E in enumerate(query_HE):
                owner = head * key_TKE.shape[1] // len(query_HE)
                scores_T = key_TKE[: position + 1, owner] @ query_E * layer.impl.scale
                stock_E = scores_T.softmax(0) @ value_TKE[: position + 1, owner]
                torch.testing.assert_close(result_HE[head], stock_E, atol=1e-4, rtol=1e-4)  # the blocks are its own
                for each in acting:
                    word = int(each["columns"]) & 0xFFFFFFFF
                    if word == 0 or word & 0xFFFF <= head * size_E < word >> 16:
                        scores_T[int(each["step"]) : int(each["value"])] = -torch.inf
                result_HE[head] = scores_T.softmax(0) @ value_TKE[: position + 1, owner]


def test_knockouts_in_batches_equal_requests(lm, monkeypatch):
    """With a stand-in for the kernel of a GPU: cells that share blocks of their prompt, with answers of several tokens, and
    of prompts of several lengths; where patterns are scaled, too, programs are requests."""
    draw = np.random.default_rng(6)
    prompts = [draw.integers(100, TOKENS, length).tolist() for length in (40, 75)]
    lists = []
    for ids in prompts:
        last, cuts = len(ids) - 1, [pc.Knockout(pc.prompt[k : k + 3], pc.pattern[k % 5, k % 3], pc.prompt[k + 4 :])
                                    for k in range(0, len(ids) - 5, 9)]  # fmt: skip
        everywhere = pc.Knockout(pc.prompt[1, 3], pc.pattern, pc.prompt[5, last])
        lists.append([*cuts, everywhere, [everywhere, *cuts[:2], pc.Zero(at=pc.mlp_out[2], tokens=pc.prompt[last])], None,
                      [cuts[0], pc.Scale(0.5, pc.pattern[3], pc.prompt[last], keys=pc.prompt[2])]])  # fmt: skip
    asked: Any = {"score": [" Mary", [5, 7, 11]], "kl": True, "top": 3}
    expected = lm.grade(prompts, lists, **asked)
    assert {grades.route_reason for grades in expected} == {"Apply, a whole SAE, or edits of attention"}
    runtime = attached(lm)._bulk.runtime
    step = _Removing(runtime)
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "step", step)
        patched.setitem(vars(lm.engine), "_batch_facts", lm.engine._batch_facts._replace(removes_keys=True))
        patched.setattr(lm.engine, "batch_difference", None)
        found = lm.grade(prompts, lists, **asked)
    assert step.removed > 200
    for grades, wanted, programs in zip(found, expected, lists, strict=True):
        assert grades.route == "bulk"
        assert not grades.errors
        for name in ("logprobs", "kl", "top_logprobs"):
            np.testing.assert_allclose(getattr(grades, name), getattr(wanted, name), atol=1e-4)
        moved = np.abs(wanted.logprobs - wanted.baseline).max(1)
        assert (moved > 1e-4).sum() >= len(programs) - 2
