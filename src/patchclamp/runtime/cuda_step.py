"""Steps on a CUDA device: graphs replay the kernel, eager steps launch it, and captures are copied in the background.

`CudaTables`: the program table and the step's rows, at fixed addresses in one tensor of 32-bit words. Changed words are
packed with their addresses into pinned staging memory, and one small kernel copies them into place. Staging memory
rotates, because with asynchronous scheduling the next step is prepared while the last one still runs. In steady decode
nothing is copied, except a new base when the capture ring wraps around.

`Drain`: captured rows go from a ring on the device, over a side stream, into pinned memory that the store keeps. The
engine's thread only queues work. Before part of the ring is reused, the compute stream waits until its bytes have
been copied. Beyond `pinned_bytes`, worker threads move the oldest slabs to pageable memory. If they fall behind, the
engine waits for them, so memory stays bounded and nothing is lost.

`CudaStep`: a step's captures are allocated in the ring when it begins, and the tables hold their offset. Steps that
reuse the plan get the memory that follows, so the tables do not change. Rows to be pooled or encoded come last, and
only their results are kept: when the step ends, the rows' memory is reclaimed and never copied. If a step captures too
much, such as a large prefill, every tap allocates memory for its own rows, and chunks of 64 MiB are copied while later
layers compute. If only the sampled rows do not fit, only their tap allocates.

    R maximum rows of a step · N maximum requests of a step · S slots · P points · O records
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.kernels import cuda, fused, moves
from patchclamp.kernels.moves import CHUNK
from patchclamp.kernels.noise import quantiles
from patchclamp.kernels.paged_attention import PagedCache, remove_keys
from patchclamp.kernels.transfer import to_device
from patchclamp.language.values import DTYPES
from patchclamp.plan import APPLY, MATCH, Batch, ProgramTable, StepPlan
from patchclamp.plan.bound import LATCHES, MAX_RANK, NEVER
from patchclamp.plan.step import BYTES
from patchclamp.plan.table import columns_of, named
from patchclamp.runtime.cuda_graphs import Recorded
from patchclamp.runtime.host_step import Bank, Encode, reduced_rows
from patchclamp.store.captures import ALIGNED, BufferSlice, ScatteredSlices
from patchclamp.store.host_memory import HostBlock, PinnedSlabs, Slab

DEPTH = 4  # staging buffers, more than the steps that any scheduler keeps in flight
MIN_STAGING_WORDS = 1 << 14  # initial words of a staging buffer


class _Staging:
    """A pinned staging buffer. `done`: the event recorded after the device has read the buffer."""

    def __init__(self, words: int) -> None:
        self.done, self.pinned = torch.cuda.Event(), _pinned(words)
        self.words = self.pinned.numpy()

    def room(self, words: int) -> None:
        """Grow the buffer to hold `words` words. The device must have finished reading it."""
        if words > len(self.words):
            self.pinned = _pinned(1 << (words - 1).bit_length())
            self.words = self.pinned.numpy()


class CudaTables:
    """Device copies of a `ProgramTable` and of a step's rows, in the kernel's format.

    `position_of_row` and `token_of_row` are the engine's own tensors of positions and token ids [R], which it fills
    before every step.
    """

    table: ProgramTable
    bank: torch.Tensor
    device: torch.device
    position_of_row: torch.Tensor
    token_of_row: torch.Tensor
    base: torch.Tensor
    stride: torch.Tensor
    copies: int
    rebased: int
    bad_address: int

    def __init__(
        self, table: ProgramTable, rows: int, samples: int, bank: torch.Tensor, positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:  # fmt: skip
        self.table, self.bank, self.device = table, bank, bank.device
        self.position_of_row, self.token_of_row = positions, tokens
        self.points: int = table.first.shape[1] - 1
        records = len(table.records)
        sizes = {
            # "base", "stride" and "records" hold 64-bit numbers, so they start at even words
            "base": 2 * records, "stride": 2, "records": cuda.RECORD_WORDS * records, "offset": records,
            "first": table.first.size, "generation": len(table.first), "slot_of_row": rows, "rank_of_row": rows,
            "request_of_row": rows, "origin_of_row": rows, "row_of_sample": samples, "rank_of_sample": samples,
            "bits_of_row": rows, "latches": table.latches.size, "since": len(table.drafted),
        }  # fmt: skip
        ends = np.cumsum(list(sizes.values())).tolist()
        self._at = {name: end - size for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._words = torch.zeros(ends[-1], dtype=torch.int32, device=self.device)
        views = {name: self._words[at : at + sizes[name]] for name, at in self._at.items()}
        self.base, self.stride = (views.pop(name).view(torch.int64) for name in ("base", "stride"))
        self.gates_of_row: torch.Tensor = torch.empty(rows * MAX_RANK, device=self.device)  # written by the kernel
        self.quantiles: torch.Tensor = torch.from_numpy(quantiles()).reshape(-1).to(self.device)
        self._latches, self._since = views["latches"].view(-1, LATCHES), views["since"][:, None]
        for name, view in views.items():
            setattr(self, name, view)
        self._staging = [_Staging(MIN_STAGING_WORDS) for _ in range(DEPTH)]
        self._ranked = False  # True if any sampled row has a nonzero rank
        self.turns: int = 1  # the most sampled rows of a request in the step
        self._turn, self._rows, self.copies, self.rebased = 0, 0, 0, 0
        # cached launches of the kernel, with the addresses of these tables (`kernels.cuda.site`)
        self.ready: dict[Any, Any] = {}
        self._bad = _pinned(4 * len(table.first)).zero_().view(torch.int64).view(2, -1)  # written by the device
        (self._failures, self._places), self.bad_address = self._bad.numpy(), self._bad.data_ptr()
        self.place_address: int = self._bad[1].data_ptr()  # of the positions at which keys could not be removed

    slot_of_row: torch.Tensor
    rank_of_row: torch.Tensor
    request_of_row: torch.Tensor
    origin_of_row: torch.Tensor
    row_of_sample: torch.Tensor
    rank_of_sample: torch.Tensor
    bits_of_row: torch.Tensor
    latches: torch.Tensor
    since: torch.Tensor
    first: torch.Tensor
    generation: torch.Tensor
    records: torch.Tensor
    offset: torch.Tensor

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the kernel's inputs, by name."""
        names = ("position_of_row", "token_of_row", "bank", "base", "quantiles", "gates_of_row", *self._at)
        return {name: getattr(self, name) for name in names}

    @property
    def bytes(self) -> int:
        """Device memory in bytes."""
        return self._words.nbytes + self.quantiles.nbytes + self.gates_of_row.nbytes

    def failed(self) -> list[tuple[int, int]]:
        """Return the (slot, word) pairs of failures that the device has reported so far. `word`: the point and, if keys
        could not be removed, a bit for the reason (`kernels.paged_attention`) and the position from bit 32."""
        slots = np.flatnonzero(self._failures)
        slots = slots[self._failures[slots] >> 32 == self.table.generation[slots]]
        words, places = self._failures[slots] & 0xFFFFFFFF, self._places[slots]
        places[words >> 28 == 0] = 0
        return list(zip(slots.tolist(), (words | places << 32).tolist(), strict=True))

    def load(self, plan: StepPlan, batch: Batch, begin: int | None, stride: int = 0) -> None:
        """Write a step's plan to the tables. `begin`: first byte of the captures; if None, each tap allocates its own.
        `stride`: bytes between the captures of successive decode steps that reuse the plan."""
        slot, origin = plan.tokens.slot, []
        if stride:
            first = np.zeros(batch.rows, np.int32)
            first[batch.row] = batch.position
            origin = [(self._at["origin_of_row"], first)]
        if len(slot) < self._rows:  # clear the rows of an earlier, longer step
            slot = np.concatenate([slot, np.zeros(self._rows - len(slot), np.int32)])
        self._rows = len(plan.tokens.slot)
        self.turns = batch.most_samples
        unsettled = self._unsettled(batch)
        requests = []
        if self.table.removing:
            request_of_row = np.repeat(np.arange(len(batch.slot), dtype=np.int32), batch.count)
            requests = [(self._at["request_of_row"], request_of_row)]
        self._send([
            (self._at["slot_of_row"], slot),
            (self._at["rank_of_row"], plan.tokens.rank),
            (self._at["row_of_sample"], batch.sampled_rows.astype(np.int32)),
            *self._ranks(batch),
            (self._at["stride"], np.array([stride]).view(np.int32)),
            *origin,
            *requests,
            *unsettled,
            *self._changed(),
            *self._targets(plan, begin),
        ])  # fmt: skip
        if unsettled:
            self._latches.masked_fill_(self._latches >= self._since, NEVER)

    def _ranks(self, batch: Batch) -> list[tuple[int, np.ndarray]]:
        """Return a segment of the sampled rows' ranks if they may have changed. Without draft tokens all are 0."""
        if batch.samples is None and not self._ranked:
            return []
        self._ranked, rank = batch.samples is not None, batch.sampled_ranks.astype(np.int32)
        return [(self._at["rank_of_sample"], np.pad(rank, (0, self.rank_of_sample.shape[0] - len(rank))))]

    def _unsettled(self, batch: Batch) -> list[tuple[int, np.ndarray]]:
        """Return a segment of the positions from which to clear latches, if rejected draft tokens may have set any."""
        if not self.table.deciding:
            return []
        since = self.table.unsettled(batch.slot, batch.position, batch.samples)
        return [(self._at["since"], since)] if (since[1:] < NEVER).any() else []

    def rebase(self, plan: StepPlan, begin: int) -> None:
        """Rewrite the capture bases, as if the planned step's captures started at byte `begin`."""
        self._send(self._targets(plan, begin)[1:])
        self.copies, self.rebased = self.copies - 1, self.rebased + 1

    def _changed(self) -> list[tuple[int, np.ndarray]]:
        slots, records = self.table.take_changed()
        stride = self.table.first.shape[1]
        runs = _merged((slot, slot + 1) for slot in slots)
        segments = [(self._at["first"] + a * stride, self.table.first[a:b].reshape(-1)) for a, b in runs]
        segments += [(self._at["generation"] + a, self.table.generation[a:b]) for a, b in runs]
        deciding = _merged((slot, slot + 1) for slot in slots & self.table.deciding)
        segments += [(self._at["latches"] + a * LATCHES, self.table.latches[a:b].reshape(-1)) for a, b in deciding]
        words = self.table.records.view(np.int32)
        size = cuda.RECORD_WORDS
        return segments + [(self._at["records"] + a * size, words[a * size : b * size]) for a, b in _merged(records)]

    def _targets(self, plan: StepPlan, begin: int | None) -> list[tuple[int, np.ndarray]]:
        """Return segments with the capture ranges' offsets and the regions' bases, by number; gaps are 0."""
        if not plan.size:
            return []
        low, offset = _by_number(plan.layout.range_number, plan.offset, np.int32)
        places = plan.by_tap[0] if begin is None else plan.base + begin
        lowest, base = _by_number(plan.layout.region_number, places, np.int64)
        return [(self._at["offset"] + low, offset), (self._at["base"] + 2 * lowest, base.view(np.int32))]

    def _send(self, segments: list[tuple[int, np.ndarray]]) -> None:
        """Copy segments to the device. A segment is the index of its first word in the tables, and its words."""
        chunks = sum(-(-len(words) // CHUNK) for _, words in segments)
        if not chunks:
            return
        self._turn = (self._turn + 1) % DEPTH
        staging = self._staging[self._turn]
        if not staging.done.query():
            staging.done.synchronize()
        count, at, header = sum(len(words) for _, words in segments), 3 * chunks, []
        staging.room(at + count)
        np.concatenate([words for _, words in segments], out=staging.words[at : at + count])
        for to, words in segments:
            for begin in range(0, len(words), CHUNK):
                length = min(len(words) - begin, CHUNK)
                header += to + begin, at, length
                at += length
        staging.words[: len(header)] = header
        moves.upload(staging.pinned, self._words, chunks)
        staging.done.record()
        self.copies += 1


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans begin … end − 1, and merge adjacent and overlapping spans."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _by_number(number: np.ndarray, values: np.ndarray, dtype: type) -> tuple[int, np.ndarray]:
    low = int(number.min())
    table = np.zeros(int(number.max()) + 1 - low, dtype)
    table[number - low] = values
    return low, table


def _pinned(words: int) -> torch.Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=True)


SEND_BYTES = 1 << 26  # bytes of one copy: 1.2 ms of transfer, against at most 0.3 ms of host time
SLABS_CHECKED = 8  # slabs that are checked for reuse whenever one is full
MAX_SPILLS = 4  # concurrent moves of slabs to pageable memory before the engine waits


# a uint8 tensor, and the memory's offset in it (a view would cost as much as the rest of `allocate`); the block that
# will hold the bytes on the host, and their offset in it
Allocation = tuple[torch.Tensor, int, HostBlock, int]


class _FilledSlab:
    """A slab, its blocks, and the event recorded after the last copy into it.

    data: the slab's bytes while it is being filled, then None. Blocks and their views reference this tensor's memory
        object, so the slab has no readers once that object is freed
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        memory = slab.data.numpy()
        with torch.inference_mode(False):
            self.data: torch.Tensor | None = torch.from_numpy(memory)
        self._memory = weakref.ref(memory)
        self.blocks: list[weakref.ref[HostBlock]] = []
        self.last_copied: torch.cuda.Event | None = None

    @property
    def is_read(self) -> bool:
        """True if a block of the slab, or a view of a block, still exists."""
        return self._memory() is not None

    @property
    def in_use(self) -> bool:
        """True if the slab may still be read or written."""
        return self.is_read or (self.last_copied is not None and not self.last_copied.query())


class Drain:
    """Copies captures from the device to host memory in the background."""

    ring: torch.Tensor
    bytes: int
    spilled: int

    def __init__(self, device: torch.device, ring_bytes: int, pinned_bytes: int) -> None:
        self.ring, self._ring_bytes = torch.empty(ring_bytes, dtype=torch.uint8, device=device), ring_bytes
        self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()
        self._head = self._unsent = 0  # bytes unsent … head−1 of the ring are not sent yet
        self._clear = 0  # bytes head … clear−1 may be written: no copy of them is pending
        self._copy_bytes = min(SEND_BYTES, ring_bytes // 4)  # bytes of one copy
        self._block = HostBlock()  # for the unsent bytes
        self._sent: collections.deque[tuple[int, int, torch.cuda.Event]] = collections.deque()  # first, end, copied
        self._beside_ring: list[tuple[torch.Tensor, HostBlock]] = []  # allocated outside the ring, and not sent yet
        self._pinned_bytes = pinned_bytes
        self._pinned = PinnedSlabs(pinned_bytes)
        self._filled: list[_FilledSlab] = []  # the last one is being filled
        self._filled_bytes = 0  # total size of these slabs
        self._next_checked = 0  # index of the next slab to check for reuse
        self._spills: collections.deque[tuple[Future[None], _FilledSlab]] = collections.deque()
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="patchclamp-spill")
        self.bytes = self.spilled = 0  # bytes copied, slabs moved to pageable memory

    @property
    def device_bytes(self) -> int:
        return self.ring.nbytes

    def open(self) -> None:
        """Put later captures in memory that other processes can map."""
        self._pinned.is_open = True

    def prepare(self) -> None:
        """Allocate pinned memory for later captures."""
        self._pinned.prepare()

    def allocate(self, size: int) -> Allocation:
        """Allocate device memory for `size` bytes, to be written on the current stream.

        The caller must queue its writes before it allocates again or sends.
        """
        size = -(-size // ALIGNED) * ALIGNED
        if self._head + size > self._clear:
            if size > self._ring_bytes:
                return self._allocate_beside_ring(size)
            self._clear_ahead(size)
        begin = self._head
        self._head += size
        return self.ring, begin, self._block, begin - self._unsent

    def take_back(self, memory: torch.Tensor, size: int) -> None:
        """Free the last `size` bytes of the last allocation, `memory`, once the current stream has read them."""
        if memory is self.ring:
            self._head = max(self._head - size, self._unsent)
        elif self._beside_ring and self._beside_ring[-1][0] is memory:
            _, block = self._beside_ring.pop()
            if len(memory) > size:
                self._beside_ring.append((memory[: len(memory) - size], block))

    def _clear_ahead(self, size: int) -> None:
        """Make the compute stream wait until the ring's next `size` bytes (at least one copy's size) are writable."""
        self.send()
        if self._head + size > self._ring_bytes:
            self._head = self._unsent = self._clear = 0
        clear = min(self._head + max(self._next_copy_bytes(size), size), self._ring_bytes)
        while self._sent and self._sent[0][2].query():
            self._sent.popleft()
        while self._sent and self._overlaps(self._head, clear):
            torch.cuda.current_stream().wait_event(self._sent.popleft()[2])
        self._clear = clear

    def _next_copy_bytes(self, size: int) -> int:
        """Return the next copy's target size: a full copy, or the rest of the slab if smaller but at least `size`."""
        unused = self._filled[-1].slab.size - self._filled[-1].slab.used if self._filled else 0
        return unused if size <= unused < self._copy_bytes else self._copy_bytes

    def send(self) -> None:
        """Queue copies of everything written so far."""
        if torch.is_inference_mode_enabled():  # as in steps
            self._send()
        else:
            with torch.inference_mode():
                self._send()

    def _send(self) -> None:
        for data, block in self._beside_ring:
            self._copy(data, block)
            data.record_stream(self._stream)
        self._beside_ring = []
        if self._head == self._unsent:
            return
        copied = self._copy(self.ring[self._unsent : self._head], self._block)
        self._sent.append((self._unsent, self._head, copied))
        self._unsent, self._block = self._head, HostBlock()

    def flush(self) -> None:
        """Wait until everything written is in host memory."""
        self.send()
        self._stream.synchronize()

    def close(self) -> None:
        """Stop the threads. Captures that are still referenced stay readable."""
        try:
            self.flush()
        finally:  # also after a device error
            self._workers.shutdown()
            self._pinned.close()

    def _overlaps(self, begin: int, end: int) -> bool:
        """True if a copy of the bytes begin … end − 1 may be pending."""
        return any(sent_begin < end and begin < sent_end for sent_begin, sent_end, _ in self._sent)

    def _allocate_beside_ring(self, size: int) -> Allocation:
        """Allocate device memory outside the ring, for a capture larger than the ring."""
        try:
            data = self.ring.new_empty(size)
        except torch.OutOfMemoryError:
            self.flush()
            torch.cuda.empty_cache()
            data = self.ring.new_empty(size)
        block = HostBlock()
        self.send()
        self._beside_ring.append((data, block))
        return data, 0, block, 0

    def _copy(self, source: torch.Tensor, block: HostBlock) -> torch.cuda.Event:
        """Queue a copy into pinned memory for `block`, after the compute stream's work; return the copy's event."""
        size = source.numel()
        filled = self._slab_for(size)
        slab, data = filled.slab, filled.data
        assert data is not None
        target = data[slab.used : slab.used + size]
        slab.used += size
        compute, copied = torch.cuda.current_stream(), torch.cuda.Event()
        self._ready.record(compute)
        self._stream.wait_event(self._ready)
        torch.cuda.set_stream(self._stream)  # like PyTorch's `with`, in fewer calls
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(compute)
        copied.record(self._stream)
        filled.last_copied = copied
        filled.blocks.append(weakref.ref(block))
        block.data, block.copied = target, copied
        self.bytes += size
        return copied

    def _slab_for(self, size: int) -> _FilledSlab:
        """Return the slab being filled, or a new slab if `size` bytes do not fit. May wait for spills."""
        if self._filled and self._filled[-1].slab.used + size <= self._filled[-1].slab.size:
            return self._filled[-1]
        if self._filled:
            self._filled[-1].data = None
        self._give_back(SLABS_CHECKED)
        while self._spills and (len(self._spills) > MAX_SPILLS or self._spills[0][0].done()):
            future, spilled = self._spills.popleft()
            future.result()
            (self._pinned.give_up if spilled.is_read else self._pinned.give)(spilled.slab)
        if self._filled_bytes > self._pinned_bytes:
            self._give_back(len(self._filled))
        while self._filled_bytes > self._pinned_bytes:
            self._spill_oldest()
        self._filled.append(_FilledSlab(self._pinned.take(size)))
        self._filled_bytes += self._filled[-1].slab.size
        return self._filled[-1]

    def _spill_oldest(self) -> None:
        oldest, self._next_checked = self._filled.pop(0), max(self._next_checked - 1, 0)
        self._filled_bytes -= oldest.slab.size
        self._spills.append((self._workers.submit(_spill, oldest), oldest))
        self.spilled += 1

    def _give_back(self, checked: int) -> None:
        """Check the next `checked` slabs in rotation, and return unused ones to the pool."""
        for _ in range(min(checked, len(self._filled))):
            self._next_checked %= len(self._filled)
            filled = self._filled[self._next_checked]
            if filled.in_use:
                self._next_checked += 1
                continue
            del self._filled[self._next_checked]
            self._filled_bytes -= filled.slab.size
            self._pinned.give(filled.slab)


def _spill(filled: _FilledSlab) -> None:
    """Move the slab's blocks that are still referenced to pageable memory."""
    if filled.last_copied is not None:
        filled.last_copied.synchronize()
    with torch.inference_mode():
        for reference in filled.blocks:
            block = reference()
            if block is not None and block.data is not None:
                memory = np.empty(len(block.data), np.uint8)  # huge pages, unlike torch: filled 3 times faster
                block.data = torch.from_numpy(memory).copy_(block.data)


class CudaStep:
    """Executes steps of at most `rows` rows and `samples` sampled rows.

    positions, tokens: the engine's tensors of row positions and token ids, [R]
    kept_bytes: the maximum bytes that a step with a graph may capture; at most half of the ring is used
    ring_bytes: the size of the device ring for captures in transit to the host
    pinned_bytes: the maximum bytes of captures in pinned host memory
    """

    unit = BYTES
    code: fused.CodeRunner | None = None
    encode: Encode | None = None
    removes_keys = False

    def __init__(
        self, table: ProgramTable, bank: Bank, rows: int, samples: int, positions: torch.Tensor, tokens: torch.Tensor,
        kept_bytes: int, ring_bytes: int, pinned_bytes: int,
    ) -> None:  # fmt: skip
        self.tables: CudaTables = CudaTables(table, rows, samples, bank.data, positions, tokens)
        self.drain: Drain = Drain(bank.data.device, ring_bytes, pinned_bytes)
        self.max_graph_bytes: int = min(kept_bytes, ring_bytes // 2)  # the most that a step with a graph may capture
        self.recorded: Recorded = Recorded()
        self.recording = False
        moves.warm(bank.data.device)
        self._cache: Callable[[int], PagedCache] | None = None
        self._is_query = self._is_output = np.zeros(table.first.shape[1] - 1, bool)
        self._query: torch.Tensor | None = None  # of the last layer reached, [R, H · E]
        self._plan: StepPlan | None = None
        self._steps = 0  # steps since the plan was made
        self._upfront_bytes = 0  # bytes of captures that are allocated when a step begins
        self._begin = 0  # offset of the planned step's captures in the tables
        self._upfront: BufferSlice | None = None  # allocated when the step began
        self._first_byte = 0  # first byte of the upfront allocation in the ring
        self._scratch = 0  # bytes after the upfront captures, for rows to be reduced
        self._tap_parts: list[tuple[int, int, HostBlock, int]] = []  # allocated by taps, as `ScatteredSlices.parts`
        self._tapped: set[int] = set()  # points with such parts

    def use_cache(self, cache: Callable[[int], PagedCache], is_query: np.ndarray, is_output: np.ndarray) -> None:
        """Support removing keys from attention.

        is_query, is_output: masks of the points of queries and of attention outputs, [P]
        cache: returns the cache of the layer with its attention output at a point, or raises `UnsupportedSite`
        """
        self.removes_keys, self._cache, self._is_query, self._is_output = True, cache, is_query, is_output

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the executor's tensors that graphs read or write, by name."""
        return {"ring": self.drain.ring, **self.tables.buffers()}

    @property
    def memory(self) -> dict[str, int]:
        """Device memory in bytes by purpose, excluding the bank."""
        return {"captures in transit (ring)": self.drain.device_bytes, "tables": self.tables.bytes}

    @property
    def bytes(self) -> int:
        """Device memory in bytes, excluding the bank."""
        return sum(self.memory.values())

    def open_captures(self) -> None:
        self.drain.open()

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        self._plan, self._batch, self._steps, self._query = plan, batch, steps, None
        if self.tables.table.deciding:
            self.tables.bits_of_row.zero_()
        if not steps:
            self._upfront_bytes = self._bytes_upfront(plan)
            self.recorded.use(np.append(plan.active, bool(self.tables.table.removing)))
        self._tap_parts, self._tapped, self._upfront, self._scratch, begin = [], set(), None, 0, None
        if self._upfront_bytes:
            self._scratch = plan.scratch
            _, self._first_byte, block, offset = self.drain.allocate(self._upfront_bytes + plan.scratch)
            self._upfront = BufferSlice(block, offset)
            begin = self._zero(plan) - steps * self._upfront_bytes
        if not steps:
            self.tables.load(plan, batch, begin, self._upfront_bytes if plan.steady_steps else 0)
        elif begin is not None and begin != self._begin:
            self.tables.rebase(plan, begin)
        self._begin = begin or 0

    def _bytes_upfront(self, plan: StepPlan) -> int:
        """Return the capture bytes to allocate upfront: all if they fit, else all except sampled rows, else 0."""
        sizes = plan.size, plan.size - plan.sampled_size
        return next((size for size in sizes if size + plan.scratch <= self.max_graph_bytes), 0)

    def _zero(self, plan: StepPlan) -> int:
        """Return the ring offset of the step's buffer, as if the sampled rows at its start were allocated too."""
        return self._first_byte - (plan.size - self._upfront_bytes)

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        removing = self.recording or bool(self.tables.table.removing)
        if removing and self._is_query[point]:
            self._query = hidden_RW
        elif removing and self._is_output[point]:
            self._remove_keys(point, hidden_RW)
        if self.recording:
            cuda.site(self.tables, point, hidden_RW, residual_RW, self.drain.ring, 0, sampled)
            self.recorded.note(point)
            return None
        memory, begin, plan, place = self.drain.ring, 0, self._plan, None
        if plan is not None and not plan.active[point]:
            return None
        if plan is not None and plan.size:
            if self._upfront_bytes == plan.size:
                begin = -self._steps * self._upfront_bytes if sampled else 0  # for other rows the kernel adds it
            elif sampled or not self._upfront_bytes:
                place = self._allocate(plan, point)
        if place is not None:
            memory, begin = place[0], place[2] + self._begin - place[1]
        if self.tables.table.coded:
            bad = self._carry_out(point, hidden_RW, residual_RW, memory, begin, sampled)
        else:
            bad = cuda.site(self.tables, point, hidden_RW, residual_RW, memory, begin, sampled)
        if place is not None and plan is not None and not self._upfront_bytes and len(plan.layout.reduced):
            self._reduce_part(plan, point, *place)
        return bad

    def _remove_keys(self, point: int, hidden_RW: torch.Tensor) -> None:
        """Apply the records that remove keys at a point."""
        assert self._cache is not None
        query_RW, self._query = self._query, None
        try:
            cache = self._cache(point)
        except UnsupportedSite:  # no program can remove keys here, or the cache is not allocated yet
            return
        if query_RW is None:
            raise ModelError("keys cannot be removed: the layer's queries were not tapped")
        remove_keys(self.tables, point, query_RW.view(len(query_RW), -1, cache.key_RKNE.shape[-1]), cache, hidden_RW)
        if self.recording:
            self.recorded.note(self.tables.points)  # kept in steps with removed keys

    def _allocate(self, plan: StepPlan, point: int) -> tuple[torch.Tensor, int, int] | None:
        """Allocate memory for a point's captures. Return the tensor, the index of the first byte, and that byte's
        offset in the step's buffer; None without captures."""
        part = plan.by_tap[1].get(point)
        if part is None:
            return None
        begin, middle, end = part
        self._reduce_upfront(plan)
        memory, first_byte, block, offset = self.drain.allocate(end - begin)
        self._tapped.add(point)
        if middle > begin:
            self._tap_parts.append((begin, middle, block, offset))
        return memory, first_byte, begin

    def _reduce_upfront(self, plan: StepPlan) -> None:
        """Pool or encode the rows stored after the upfront captures, and reclaim those rows' memory."""
        if self._scratch:
            ring, zero = self.drain.ring, self._zero(plan)
            for begin, data in self._results(plan, range(len(plan.reduced)), plan.base, ring, zero):
                ring[zero + begin : zero + begin + len(data)].copy_(data, non_blocking=True)
            self.drain.take_back(ring, self._scratch)
            self._scratch = 0

    def _reduce_part(self, plan: StepPlan, point: int, memory: torch.Tensor, first_byte: int, zero: int) -> None:
        """Pool or encode a point's rows in the memory that its tap allocated, reclaim it, and keep the results."""
        numbers = [i for i, (region, *_) in enumerate(plan.reduced) if plan.layout.point[region] == point]
        base, (_, middle, end) = plan.by_tap[0], plan.by_tap[1][point]
        results = self._results(plan, numbers, base, memory, first_byte - zero)
        self.drain.take_back(memory, end - middle)
        for begin, data in results:
            to, first, block, offset = self.drain.allocate(len(data))
            to[first : first + len(data)].copy_(data, non_blocking=True)
            self._tap_parts.append((begin, begin + len(data), block, offset))

    def _results(
        self, plan: StepPlan, numbers: Iterable[int], base: np.ndarray, memory: torch.Tensor, zero: int
    ) -> list[tuple[int, torch.Tensor]]:
        """Compute the results of `plan.reduced` at the indices `numbers`; return each result's offset in the step's
        buffer, and its bytes. A region's rows start at byte `zero + base[region]` of `memory`."""
        results = []
        for number in numbers:
            region = plan.reduced[number][0]
            begin, row = zero + int(base[region]), int(plan.row[region])
            rows = memory[begin : begin + int(plan.rows[plan.layout.region_group[region]]) * row]
            dtype = getattr(torch, DTYPES[int(plan.layout.dtype[region])])
            rows_NW = rows.view(dtype).view(-1, row // dtype.itemsize)
            data = reduced_rows(plan, self._steps, number, rows_NW, self.encode)
            results.append((int(plan.result[region]), data.view(torch.uint8)))
        return results

    def _carry_out(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, memory: torch.Tensor, begin: int,
        sampled: bool,
    ) -> np.ndarray | None:  # fmt: skip
        """Launch the kernel up to each request's next code call, run these calls, and repeat until no call is left.
        Attention edits precede other code, and run for all requests at once."""
        edits, calls = (self._attention_edits(point), self._calls(point)) if self._plan is not None else (None, [])
        arguments = (self.tables, point, hidden_RW, residual_RW, memory, begin, sampled)
        if edits is None and not calls:
            cuda.site(*arguments)
            return None
        bad: list[int] = []
        for phase, phase_calls in enumerate(calls or [[]]):
            cuda.site(*arguments, phase)
            if edits is not None and not phase:
                self._edit_attention(point, *edits, hidden_RW)
            for n, records in phase_calls:
                bad += self._run(point, n, records, hidden_RW, residual_RW, sampled)
        cuda.site(*arguments, max(len(calls), 1))
        return np.array(bad, np.int64)

    def _attention_edits(self, point: int) -> tuple[list[int], np.ndarray, np.ndarray] | None:
        """Return the numbers of the attention edits that act at a point, and the positions and batch indices of all
        their rows; None if no edit acts."""
        table, batch = self.tables.table, self._batch
        first = table.first[batch.slot, point]
        some = np.flatnonzero(first < table.first[batch.slot, point + 1])
        records = table.records[first[some]]
        is_edit = (records["kind"] == APPLY) & (records["value"] < 0)
        some, records = some[is_edit], records[is_edit]
        begin = batch.position[some] + self._steps
        start, stop = np.maximum(records["start"], begin), np.minimum(records["stop"], begin + batch.count[some])
        acts = start < stop
        if not acts.any():
            return None
        count, some = (stop - start)[acts], some[acts]
        position_M = np.arange(count.sum()) + np.repeat(start[acts] - (np.cumsum(count) - count), count)
        return records["value"][acts].tolist(), position_M, np.repeat(some, count)

    def _calls(self, point: int) -> list[list[tuple[int, np.ndarray]]]:
        """Return the code calls at a point: each request's first call, then each request's second call, and so on. A
        call has the request's index in the batch, and its record, preceded by its `MATCH` record if it has one."""
        assert self._plan is not None
        table, phases = self.tables.table, []
        first = self._batch.position + self._steps
        for n, slot in enumerate(self._batch.slot.tolist()):
            if slot not in table.scripted:
                continue
            records = table.records[table.first[slot, point] : table.first[slot, point + 1]]
            for phase, at in enumerate(np.flatnonzero(records["kind"] == APPLY).tolist()):
                if phase == len(phases):
                    phases.append([])
                is_edit = records["value"][at] < 0  # of attention
                if (
                    not is_edit
                    and records["start"][at] < first[n] + self._batch.count[n]
                    and first[n] < records["stop"][at]
                ):
                    has_match = at > 0 and records["kind"][at - 1] == MATCH
                    phases[phase].append((n, records[at - has_match : at + 1]))
        return phases if any(phases) else []

    def _edit_attention(
        self, point: int, numbers: list[int], position_M: np.ndarray, request_M: np.ndarray, hidden_RW: torch.Tensor
    ) -> None:
        """Run the attention edits of several requests on their rows."""
        assert self.code is not None
        rows = position_M - self._steps + (self._batch.row - self._batch.position)[request_M]
        count_B = np.diff(np.flatnonzero(np.diff(request_M, prepend=-1)), append=len(request_M))
        row_A = to_device(rows, hidden_RW.device)
        h_AW = fused.join(hidden_RW, None, row_A)
        new_AW = self.code.edit_attention(numbers, h_AW, point, position_M, count_B, hidden_RW.dtype)
        if new_AW is not h_AW:
            fused.split(hidden_RW, None, row_A, new_AW)

    def _run(
        self, point: int, n: int, records: np.ndarray, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None,
        sampled: bool,
    ) -> list[int]:  # fmt: skip
        """Run a request's code on its rows. Rows with non-finite results are not written; returns the slot if any."""
        assert self._plan is not None
        assert self.code is not None
        batch, record = self._batch, named(records[-1:], APPLY)[0]
        rows = batch.row[n] + np.arange(batch.count[n])
        position = batch.position[n] + self._steps + np.arange(batch.count[n])
        if sampled:
            rows, position = rows[-1:], position[-1:]
        holds = (record["start"] <= position) & (position < record["stop"])
        if len(records) > 1 and holds.any():
            holds &= self._matches(named(records[:1], MATCH)[0], rows)
        if not holds.any():
            return []
        row_A = torch.from_numpy(np.array([n]) if sampled else rows[holds]).to(hidden_RW.device)
        h_AW, columns = fused.join(hidden_RW, residual_RW, row_A), columns_of(record)
        result = self.code.run_code(int(record["code"]), h_AW[:, columns], point, position[holds])
        if result is None:
            return []
        new_AW = h_AW.clone()
        new_AW[:, columns] = result
        finite_A = new_AW.to(hidden_RW.dtype).isfinite().all(1)
        fused.split(hidden_RW, residual_RW, row_A[finite_A], new_AW[finite_A])
        return [] if bool(finite_A.all()) else [int(batch.slot[n])]

    def _matches(self, condition: np.void, rows: np.ndarray) -> np.ndarray:
        """Return a mask of the rows whose token meets a `MATCH` record's condition."""
        ids = self.tables.bank[condition["ids"] : condition["ids"] + condition["count"]].long()
        token = self.tables.token_of_row[torch.from_numpy(rows).to(ids.device)].long()
        return torch.isin(token, ids).cpu().numpy() == (condition["expected"] == 1)

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        """Return the location of the step's captures on the host."""
        upfront, self._upfront = self._upfront, None  # from now on only the caller references the blocks
        parts, self._tap_parts = self._tap_parts, []
        begin = plan.size - self._upfront_bytes
        if begin and any(
            point not in self._tapped and (upfront is None or self.tables.table.sampled[point])
            for point in plan.by_tap[1]
        ):
            raise ModelError("some taps with captures did not run in this step")
        if upfront is not None:
            self._reduce_upfront(plan)
            if not begin:
                return upfront
            parts.append((begin, plan.size, upfront.block, upfront.offset))
        return ScatteredSlices(parts) if parts else None

    def prepare(self) -> None:
        self.drain.prepare()

    def flush(self) -> None:
        self.drain.flush()

    def close(self) -> None:
        self.drain.close()

    def failed(self) -> list[tuple[int, int]]:
        return self.tables.failed()
