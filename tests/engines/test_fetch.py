"""Captures in bulk: what a run captured comes together where it is little, and of many runs in one call."""

from __future__ import annotations

import itertools
import os
import statistics

import pytest
import torch

import patchclamp as pc
from patchclamp.store import host_memory

from .conftest import PROMPTS

BOTH = pytest.mark.parametrize("engine", ["vllm", "transformers"])
ROUNDS = 8
KEPT = [pc.resid_post, pc.z[3, 1], pc.logits, pc.mlp_out[2] @ pc.prompt[-3:]]


@pytest.fixture
def calls(narrow, monkeypatch, request):
    """An LM, and how many captures each call to its engine asked for."""
    lm, asked = narrow.get(request.getfixturevalue("engine"), "float32"), []
    fetch_many = lm.engine.fetch_many
    monkeypatch.setattr(lm.engine, "fetch_many", lambda wanted: asked.append(len(wanted)) or fetch_many(wanted))
    return lm, asked


@BOTH
def test_the_first_read_brings_what_else_is_little(calls, engine, monkeypatch):
    lm, asked = calls
    one, other = lm.run([PROMPTS[0]] * 2, max_tokens=3, capture=KEPT)
    viewed, several = (
        lm.run([PROMPTS[0]] * 2, max_tokens=1, capture=KEPT),
        lm.run(PROMPTS[0], max_tokens=3, capture=KEPT),
    )
    monkeypatch.setattr("patchclamp.run.MAX_PREFETCH_BYTES", 0)
    monkeypatch.setattr("patchclamp.run.VIEWED_BYTES", 1 << 40)
    apart = {site: other[site] for site in other.sites}
    points = lm.model.layers + 3  # resid_pre[l + 1] is resid_post[l]
    assert asked == [1] * points
    asked.clear()
    monkeypatch.setattr("patchclamp.run.MAX_PREFETCH_BYTES", 1 << 30)
    together = {site: one[site] for site in one.sites}
    assert asked == [points]
    for site in apart:
        assert torch.allclose(apart[site], together[site], atol=1e-3, rtol=1e-4)
        assert one.positions(site) == other.positions(site)
        assert one.read(site, copy=False).data_ptr() != together[site].data_ptr()
    assert torch.equal(one["capture[3]"], one[pc.mlp_out[2]])  # one op's rows are asked for by themselves
    assert asked == [points, 1]
    asked.clear()
    monkeypatch.setattr("patchclamp.run.MAX_PREFETCH_BYTES", 0)
    monkeypatch.setattr("patchclamp.run.VIEWED_BYTES", 1)
    first = viewed[0][pc.resid_post[1]]
    assert torch.allclose(first, one[pc.resid_post[1]][: len(first)], atol=1e-3, rtol=1e-4)
    assert asked == ([points] if lm.engine.has_views else [1])
    assert lm.engine.has_views == (engine == "vllm")
    asked.clear()
    several[pc.resid_post[1]]  # rows of several steps would be copied
    monkeypatch.setattr("patchclamp.run.MAX_VIEWED_BYTES", 1)
    viewed[1][pc.resid_post[1]]  # more than may come together
    assert asked == [1, 1]


@BOTH
def test_runs_that_are_read_in_order_come_more_at_a_time(calls, engine, monkeypatch):
    """Those of other calls, closed ones and those that are too large together come when they are read themselves."""
    lm, asked = calls
    site, most = pc.resid_post[1:3], "patchclamp.run.MAX_PREFETCH_BYTES"
    made = [lm.run([PROMPTS[0]] * 9, max_tokens=1, capture=site) for _ in range(4)]
    expected = lm.fetch(made[0], site)
    asked.clear()

    def read(runs: list[pc.Run]) -> list[int]:
        asked.clear()
        for run, of_run in zip(runs, expected, strict=False):
            assert torch.allclose(run[site], of_run[site], atol=1e-3, rtol=1e-4)
        return [count // 2 for count in asked]

    assert read(made[1]) == [1, 2, 4, 2]
    assert read(made[2][4::-1]) == [1] * 5
    made[2][8].close()
    assert read(made[2][5:8]) == [2, 1]
    lm.engine.release([made[3][2].key])  # as if another thread closed it meanwhile
    assert read(made[3][:2]) == [1, 2, 1]
    with pytest.raises(pc.MissingSource):
        made[3][2][site]
    monkeypatch.setattr(most, 2 * made[3][3].captured_bytes)
    assert read(made[3][3:]) == [2, 2, 2]


@BOTH
def test_many_runs_come_in_one_call(calls, engine, monkeypatch):
    lm, asked = calls
    runs = lm.run(PROMPTS, max_tokens=3, capture=KEPT)
    alone = lm.run(PROMPTS, max_tokens=3, capture=KEPT)
    everything = lm.fetch(runs)
    assert asked == [(lm.model.layers + 3) * len(runs)]
    assert [list(rows) for rows in everything] == [run.sites for run in runs]
    for rows, run in zip(everything, alone, strict=True):
        for site, tensor in rows.items():
            assert tensor.shape == run[site].shape
            assert torch.allclose(tensor, run[site], atol=1e-3, rtol=1e-4)
    asked.clear()
    assert lm.fetch(runs, pc.resid_post[1:3])[0].keys() == {"resid_post[1]", "resid_post[2]"}
    assert torch.equal(lm.fetch(runs)[1]["logits"], everything[1]["logits"])
    assert asked == []  # they are here
    monkeypatch.setattr("patchclamp.lm.MAX_FETCH_BYTES", 1)
    monkeypatch.setattr("patchclamp.lm.MAX_VIEWED_BYTES", 1)
    lm.fetch(lm.run(PROMPTS, max_tokens=1, capture=KEPT), [pc.resid_post[0], "logits"])
    assert asked == [2, 2, 2]
    assert lm.fetch([]) == []


@BOTH
def test_what_cannot_be_fetched_says_why(calls, engine):
    lm, _ = calls
    runs = lm.run(PROMPTS, max_tokens=1, capture=[pc.resid_post[1]])
    with pytest.raises(pc.MissingSource, match=r"resid_post\[2\] .*resid_pre\[2\], resid_post\[1\]"):
        lm.fetch(runs, pc.resid_post[2])
    runs[1].close()
    with pytest.raises(pc.MissingSource, match="was closed before"):
        lm.fetch(runs)
    hot = [pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[3], scale=1e30)]
    failed = lm.run(PROMPTS[:2], max_tokens=1, edits=[hot, []], capture=[pc.resid_post[1]])
    with pytest.raises(pc.RunError, match="not finite"):
        lm.fetch(failed)


@BOTH
def test_a_run_that_is_closed_keeps_what_was_read_alone(calls, engine):
    lm, _ = calls
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post])
    first = run[pc.resid_post[0]]
    run.close()
    assert torch.equal(torch.as_tensor(run[pc.resid_post[0]]), torch.as_tensor(first))
    with pytest.raises(pc.MissingSource, match="was closed before"):
        run[pc.resid_post[1]]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_rounds_of_the_same_captures_take_the_memory_of_one(shallow, monkeypatch, apart):
    """In the core's process rows are views of what was captured; from another process all pass through one file."""
    options = {"enable_prefix_caching": False, "multiprocess_mode": True} if apart else {"enable_prefix_caching": False}
    lm, mapped, copied = shallow.get("vllm", "float32", **options), [], []
    map_shared, copy_bytes = host_memory.map_shared, host_memory.copy_bytes
    monkeypatch.setattr(host_memory, "map_shared", lambda *args: mapped.append(args) or map_shared(*args))
    for module in ("store.captures", "store.host_memory"):  # where it is called from
        monkeypatch.setattr(
            f"patchclamp.{module}.copy_bytes",
            lambda copies: copied.append(sum(new.nbytes for new, _ in copies)) or copy_bytes(copies),
        )
    prompts = [[*range(100 + i, 300 + i)] for i in range(5)]  # in one step
    resident, first = [], None
    for _ in range(ROUNDS):
        runs = lm.run(prompts, max_tokens=1, capture=[pc.resid_post])
        copied.clear()
        fetched = lm.fetch(runs)
        rows = torch.stack([tensors[f"resid_post[{lm.model.layers - 1}]"] for tensors in fetched])
        first = rows if first is None else first
        assert rows.shape == (5, 200, lm.model.d_model)
        assert torch.allclose(rows, first, atol=1e-3, rtol=1e-4)
        size = sum(
            rows.nbytes for tensors in fetched for rows in {id(rows): rows for rows in tensors.values()}.values()
        )
        assert (sum(copied) > 0) == apart
        assert sum(copied) <= size
        del runs, fetched, rows
        resident.append(resident_bytes())
    assert len({*mapped}) <= apart
    grown = [after - before for before, after in itertools.pairwise(resident)]
    assert statistics.median(grown) < size / 2  # the first rounds warm up; a leak takes one round's size in each
    assert lm.engine.status()["captured_bytes"] <= size  # the last release goes with the next step
