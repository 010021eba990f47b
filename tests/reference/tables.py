"""The device's tables against the host's: random programs come and go, short steps follow long ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from patchclamp.kernels.cuda import RECORD_WORDS
from patchclamp.plan import Batch, make_plan
from patchclamp.plan.step import BYTES
from patchclamp.runtime.cuda_step import CudaTables
from tests.reference.admitting import Table
from tests.reference.triton import records

SLOTS, ROWS = 6, 60_000


def check(
    device: str, turns: int, wait: Callable[[], None], every: int = 1, before: Callable[[], None] = lambda: None
) -> tuple[int, list[str]]:  # fmt: skip
    """How often the tables were brought up to date, and what differed after which of so many turns.

    `wait` returns once the device has done all it was given; after `every` so many turns it is asked, and the tables are
    compared. `before` is called before the first of these turns.
    """
    rng, width, sampled = np.random.default_rng(0), np.array([64, 128, 256]), np.array([False, False, True])
    table, held, different = Table(SLOTS, 3, 200, sampled), [], []
    made = CudaTables(
        table, ROWS, 64, torch.zeros(64, device=device), *torch.zeros(2, ROWS, dtype=torch.int64).to(device)
    )
    for turn in range(turns):
        if turn % every == 0:
            before()
        if held and (len(held) == SLOTS or rng.random() < 0.5):
            table.drop(held.pop(int(rng.integers(len(held)))))
        else:
            held.append(table.admit(*records(rng, width, "cuda")))
        slots = rng.permutation([*held, 0, 0])
        count = rng.integers(1, rng.choice([2, 30, ROWS // len(slots)], p=[0.5, 0.4, 0.1]), len(slots))
        samples = rng.integers(1, np.minimum(count, 8) + 1) if rng.random() < 0.5 else None
        batch = Batch(slots, np.cumsum(count) - count, rng.integers(0, 9, len(slots)), count, int(count.sum()), samples)
        plan = make_plan(batch, table, width, BYTES)
        begin, stride = (16 * int(n) for n in rng.integers(0, 3, 2))
        made.load(plan, batch, begin, stride)
        if plan.size and rng.random() < 0.3:
            begin -= 160
            made.rebase(plan, begin)
        if turn % every != every - 1:
            continue
        wait()
        live = np.concatenate([np.arange(table.first[s, 0], table.first[s, -1]) for s in held] or [np.zeros(0, int)])
        rows = np.zeros(ROWS, np.int32)
        rows[: batch.rows] = plan.tokens.slot
        there = {
            "first": (made.first, table.first.reshape(-1)), "slot_of_row": (made.slot_of_row, rows),
            "rank_of_row": (made.rank_of_row[: batch.rows], plan.tokens.rank),
            "row_of_sample": (made.row_of_sample[: len(batch.sampled_rows)], batch.sampled_rows),
            "rank_of_sample": (made.rank_of_sample[: len(batch.sampled_rows)], batch.sampled_ranks),
            "generation": (made.generation[held], table.generation[held]),
            "records": (made.records.view(-1, RECORD_WORDS)[live], table.records.view(np.int32).reshape(-1, RECORD_WORDS)[live]),
        }  # fmt: skip
        there["stride"] = made.stride, np.array([stride])
        if stride:
            there["origin_of_row"] = made.origin_of_row[batch.row], batch.position
        if plan.size:  # otherwise nothing reads them
            there["base"] = made.base[plan.layout.region_number], plan.base + begin
            there["offset"] = made.offset[plan.layout.range_number], plan.offset
        different += [f"{name} {turn}" for name, (a, b) in there.items() if not np.array_equal(a.cpu().numpy(), b)]
    return made.copies, different
