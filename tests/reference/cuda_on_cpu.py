"""A `CudaStep` without CUDA: the real tables, drain, pinned slabs and store, with the kernel in plain Python.

What a GPU does by itself is imitated: events that are done sooner or later, copies that happen at once.  Only captures are carried out; edits are the kernel's own business and tested with it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from patchclamp.kernels import moves
from patchclamp.kernels.attention import PatternEdit, edges_of, edited, scores
from patchclamp.kernels.cuda import RECORD_WORDS
from patchclamp.kernels.paged_attention import BLIND, PagedCache
from patchclamp.plan import APPLY, REMOVE, ProgramTable
from patchclamp.runtime import Runtime, cuda_step
from patchclamp.runtime.cuda_step import CudaStep, CudaTables
from patchclamp.store import host_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Event:
    def record(self, *stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return random.random() < 0.5


class _Stream:
    def __init__(self, *device: Any) -> None: ...
    def wait_event(self, event: _Event) -> None: ...
    def synchronize(self) -> None: ...


def stub(monkeypatch: Any) -> None:
    """Takes CUDA's place, with small slabs so that memory turns over."""
    for name, value in (("Event", _Event), ("Stream", _Stream), ("set_stream", lambda stream: None),
                        ("current_stream", lambda *device: _Stream())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 1 << 14)
    monkeypatch.setattr(cuda_step, "SEND_BYTES", 1 << 11)
    monkeypatch.setattr(
        cuda_step, "PinnedSlabs", lambda limit: host_memory.PinnedSlabs(limit, lambda memory: None, lambda memory: None)
    )
    monkeypatch.setattr(cuda_step, "cuda", _Kernel)
    monkeypatch.setattr(cuda_step, "CudaTables", Tables)
    monkeypatch.setattr(cuda_step, "remove_keys", remove_keys)
    monkeypatch.setattr(moves, "warm", lambda device: None)
    monkeypatch.setattr(moves, "upload", place)
    monkeypatch.setattr(cuda_step, "_pinned", lambda words: torch.empty(words, dtype=torch.int32))


def place(staging: torch.Tensor, tables: torch.Tensor, chunks: int) -> None:
    """`moves.upload` on the host."""
    for to, at, many in staging[: 3 * chunks].view(-1, 3).tolist():
        assert 0 < many <= moves.CHUNK
        tables[to : to + many] = staging[at : at + many]


class Tables(CudaTables):
    """The device's tables in host memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in (*self._at.keys() - {"bits_of_row"}, "position_of_row"):  # the same memory, read faster
            setattr(self, name, getattr(self, name).numpy())


class _Kernel:
    RECORD_WORDS = RECORD_WORDS

    @staticmethod
    def site(tables: Tables, point: int, hidden: torch.Tensor, residual: Any, kept: torch.Tensor, base: int,
             sampled: bool, phase: int = 0) -> None:  # fmt: skip
        records = tables.records.reshape(-1, RECORD_WORDS)
        for out in range(len(hidden)):
            row = int(tables.row_of_sample[out]) if sampled else out
            slot, position = int(tables.slot_of_row[row]), int(tables.position_of_row[row])
            at = slot * (tables.points + 1) + point
            codes = 0
            for number in range(tables.first[at], tables.first[at + 1]) if slot else ():
                start, stop, kind = records[number, :3]
                codes += kind == APPLY
                if not start <= position < stop or kind in (APPLY, REMOVE) or codes != phase:
                    continue
                assert kind == 0, "only captures are carried out here"
                dtype = DTYPES[int(records[number, 6:7].view(np.float32)[0])]
                rank = tables.rank_of_sample[out] if sampled else tables.rank_of_row[row]
                first = max(start, position - int(rank))
                data = hidden[out].to(dtype).contiguous().view(torch.uint8)
                span, area = int(records[number, 3]), int(records[number, 4:6].view(np.int64)[0])
                to = int(tables.base[area]) - base + (int(tables.offset[span]) + position - first) * len(data)
                if not sampled:
                    to += (position - int(tables.origin_of_row[row])) * int(tables.stride[0])
                assert 0 <= to <= len(kept) - len(data), "a row is written outside of its memory"
                kept[to : to + len(data)] = data


def remove_keys(
    tables: Tables, point: int, query_RHE: torch.Tensor, cache: PagedCache, hidden_RW: torch.Tensor
) -> None:
    """`paged_attention.remove_keys` row by row, without its check of the engine's result."""
    records = tables.records.reshape(-1, RECORD_WORDS)
    for row, query_HE in enumerate(query_RHE):
        slot, position = int(tables.slot_of_row[row]), int(tables.position_of_row[row])
        at, edits = slot * (tables.points + 1) + point, []
        for number in range(tables.first[at], tables.first[at + 1]) if slot else ():
            start, stop, kind, first, end = records[number, :5]
            word, size = int(records[number, -1]), query_HE.shape[1]
            heads = (0, len(query_HE)) if word == 0 else ((word & 0xFFFF) // size, (word >> 16) // size)
            if kind == REMOVE and start <= position < stop:
                edits.append(PatternEdit(*heads, np.array([[start, stop, 0, 0]]), np.array([[first, end]]), None))
        if not edits:
            continue
        blocks = cache.block_BR[int(tables.request_of_row[row])].long()
        key, value = (each[blocks].transpose(1, 2).flatten(0, 1)[None, : position + 1]
                      for each in (cache.key_RKNE, cache.value_RKNE))  # fmt: skip
        where = np.array([[position]])
        scored = scores(query_HE[None, None], key, torch.from_numpy(where), cache.facts, 0, len(query_HE))
        edges = edges_of(where, [edits], 0, len(query_HE), scored.device)
        pattern_BNHT, touched_BNH = edited(scored, edges, cache.facts, 0)
        if pattern_BNHT.isnan().any():
            tables._places[slot] = position
            tables._failures[slot] = int(tables.generation[slot]) << 32 | BLIND << 28 | point
            continue
        seen = value[0].nan_to_num().repeat_interleave(len(query_HE) // value.shape[2], 1)
        result_HE, rows_HE = torch.einsum("ht,the->he", pattern_BNHT[0, 0], seen), hidden_RW[row].view(query_HE.shape)
        rows_HE[touched_BNH[0, 0]] = result_HE[touched_BNH[0, 0]]


def on_cpu(runtime: Runtime, rows: int, samples: int, kept: int, ring: int, host: int) -> tuple[CudaStep, np.ndarray]:
    """A runtime's step as on a GPU, and the positions of its rows, which the engine would fill."""
    positions = np.zeros(rows, np.int64)
    step = CudaStep(
        runtime.table, runtime.bank, rows, samples, torch.from_numpy(positions), torch.zeros(rows), kept, ring, host
    )
    runtime.use(step)
    return step, positions


def tables(table: ProgramTable, rows: int, samples: int) -> Tables:
    """A device's tables alone."""
    return Tables(table, rows, samples, torch.zeros(1), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows))


def graph(step: Any, point: int, hidden: torch.Tensor) -> None:
    """What a recorded tap does when its graph is replayed: the kernel, into the memory that the graph knows."""
    _Kernel.site(step.tables, point, hidden, None, step.drain.ring, 0, False)
