"""Under tensor parallel: what workers do of a program, each on its shard of a row, is together what one does of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.plan import Batch, Prompt
from patchclamp.plan.bind import bind
from patchclamp.plan.room import Room, resident_sizes
from patchclamp.plan.table import record_count
from patchclamp.runtime import Limits, Runtime
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from tests.reference.admitting import placed

T, WORKERS, HEADS = 5, 2, 4
LIMITS = Limits(max_programs=2, max_records=64, bank_bytes=1 << 12)
V = np.random.default_rng(3).standard_normal(HEADS * 4)
EDITS = {
    "a vector": pc.Add(V, at=pc.z[1]), "a vector at one head": pc.Replace(V[:4], at=pc.z[1, 2], tokens=pc.prompt[1:3]),
    "a mask": pc.Replace(V, at=pc.z[1], alpha=0.5, mask=np.abs(V)), "a factor": pc.Scale(0.3, at=pc.z[1, 1:3]),
    "noise": pc.Noise(std=0.5, seed=7, at=pc.z[1]), "noise at one head": pc.Noise(std=0.5, seed=7, at=pc.z[1, 3]),
}  # fmt: skip


def site_map(workers: int, head: int = 4) -> SiteMap:
    return SiteMap(LLAMA, Sizes(2, HEADS * head, 32, HEADS, HEADS, head, 16), workers)


def source(key: str) -> Any:
    raise pc.MissingSource(f"run {key} is not here")


def ran(sites: SiteMap, rank: int, program: Program, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a worker makes of its columns of `rows` [T, heads · E], and what it captures after the edits, in layer 1."""
    runtime = Runtime(sites, LIMITS, rank=rank)
    vectors: dict[str, np.ndarray] = {}
    bound = bind(program, "run", Prompt(range(T), lambda: ("", [])), 1, sites, source, vectors=vectors)
    point = sites.resolve(pc.z[1])[0].point
    sizes = resident_sizes(bound, {key: array.shape for key, array in vectors.items()}, sites)
    placement = placed(Room(1, LIMITS.max_records, LIMITS.bank_bytes // 4), record_count(bound.ops), sizes)
    runtime.install(
        "request", bound, placement, {key: torch.tensor(array) for key, array in vectors.items()}, "receipt"
    )
    runtime.begin(Batch(np.array([1]), np.array([0]), np.array([0]), np.array([T]), T))
    shard = runtime.shards[point]
    hidden = rows[:, shard.first : shard.end].clone()
    runtime.apply(point, hidden, None)
    runtime.end()
    assert runtime.outcome("request") == ("receipt", None)
    return hidden, runtime.fetch("run", point)[1]


@pytest.mark.parametrize("name", EDITS)
def test_workers_together_do_what_one_does(name):
    program, rows = Program.of([EDITS[name]], [pc.z[1]]), torch.randn(T, HEADS * 4)
    whole, captured = ran(site_map(1), 0, program, rows)
    parts = [ran(site_map(WORKERS), rank, program, rows) for rank in range(WORKERS)]
    assert torch.equal(torch.cat([hidden for hidden, _ in parts], 1), whole)
    assert torch.equal(torch.cat([kept for _, kept in parts], 1), captured)
    assert torch.equal(captured, whole)
    head = {"a vector at one head": 2, "noise at one head": 3}.get(name)
    changed = (whole != rows).view(T, HEADS, 4).any(2).any(0).tolist()
    assert changed == [head in (None, number) and (name != "a factor" or number in (1, 2)) for number in range(HEADS)]


@pytest.mark.parametrize("head", range(HEADS))
def test_a_head_is_projected_by_the_worker_that_has_it(head):
    W, rows = np.random.default_rng(head).standard_normal((3, 4)).astype(np.float32), torch.randn(T, HEADS * 4)
    program = Program.of((), [pc.Capture(f"z[1, {head}]", project=W)])
    kept = [ran(site_map(WORKERS), rank, program, rows)[1] for rank in range(WORKERS)]
    expected = rows.view(T, HEADS, 4)[:, head] @ torch.from_numpy(W).T
    assert [len(each) for each in kept] == ([T, 0] if head < HEADS // WORKERS else [0, T])
    for products in (kept[head // (HEADS // WORKERS)], ran(site_map(1), 0, program, rows)[1]):
        torch.testing.assert_close(products, expected, rtol=1e-5, atol=1e-5)


def test_noise_on_a_shard_within_a_group_of_four_columns_is_refused():
    """It is drawn four columns at a time: drawn from column 6 on, it would be another noise than one worker's."""
    rows, narrow = torch.randn(T, HEADS * 3), Program.of([pc.Noise(std=0.5, seed=7, at=pc.z[1])], [pc.z[1]])
    assert not torch.equal(ran(site_map(1, head=3), 0, narrow, rows)[0], rows)
    first, _ = ran(site_map(WORKERS, head=3), 0, narrow, rows)
    assert first.shape == (T, 6)
    with pytest.raises(pc.UnsupportedSite, match=r"at 6: .*tensor_parallel_size"):
        ran(site_map(WORKERS, head=3), 1, narrow, rows)
