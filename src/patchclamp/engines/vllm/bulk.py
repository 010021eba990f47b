"""Batched grading of cells: programs on one prompt, run as separate sequences between the engine's steps.

The core leases blocks, slots, records and bank rows (`Admission.lease`); a worker runs the batches. The prompt is
computed once, without a program, into leased blocks. A cell computes tokens starting at its first edited position
(`plan.cuts`): it shares the prompt's full blocks before that position, and copies the partially shared block. If the
model is compiled in pieces (`Streams`), a batch begins at the first layer that its cells' programs edit.

A call launches a batch and returns the previous batch's results, so a GPU computes one batch while the next is
prepared. Two batches are in flight, so each takes half of the slots and records.

N cells · C sequences · S rows with logits · V vocabulary · T tokens of the prompt
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
import torch

from patchclamp.engines.grading import GradeTable, JobPart
from patchclamp.engines.vllm.admission import Lease
from patchclamp.engines.vllm.compat.pieces import Streams
from patchclamp.engines.vllm.compat.runner import BatchModel
from patchclamp.errors import Packed, unpack
from patchclamp.kernels.transfer import Arriving, to_device
from patchclamp.plan.bound import is_vector, source_of
from patchclamp.plan.cells import CellRecords, Placed, place
from patchclamp.plan.cuts import cuts_of, first_layers
from patchclamp.plan.room import resident_name
from patchclamp.plan.step import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchclamp.runtime import Runtime

MAX_LOGITS = 1 << 27  # numbers of logits computed at a time
LATER = b"later"  # a worker's answer if the call must be repeated


class JobPrompt(msgspec.Struct, array_like=True):
    """A job's prompt, with a `GradeJob`'s sequences and scores. `count`: the number of its cells."""

    prompt: list[int]
    suffixes: list[list[int]]
    terms: list[list[tuple[int, int, int]]]
    count: int


class Job(msgspec.Struct, array_like=True):
    """Cells of several prompts, as sent to the workers.

    parts: the prompts; cells are numbered consecutively across them
    kl, top: as in a `GradeJob`
    window: the number of consecutive cells that are sorted by start; 0: cells are not sorted
    cells: `CellRecords.to_bytes()` · vectors: rows to load, as safetensors
    """

    parts: list[JobPrompt]
    kl: bool
    top: int
    window: int
    cells: bytes
    vectors: bytes
    lease: Lease


class BatchResult(msgspec.Struct, array_like=True):
    """A batch's results, fp32 unless noted. Cell −1 − p is prompt p without a program.

    number: cell indices, int64 [n] · logprobs [n, scores] · kl [n] or empty · top_ids (int64), top_logprobs [n, top]
    errors: errors by cell
    left: the number of cells with pending results
    rows: the number of rows computed
    seconds: the call's duration · stepped: True if the engine has computed a step since the last batch
    """

    number: bytes
    logprobs: bytes
    kl: bytes
    top_ids: bytes
    top_logprobs: bytes
    errors: dict[int, Packed]
    left: int
    rows: int
    seconds: float = 0.0
    stepped: bool = False

    def read(self, parts: Sequence[JobPart], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        """Add the results to the jobs' tables. Yield (job index, indices of the job's newly graded programs)."""
        number = np.frombuffer(self.number, np.int64)
        ends = np.cumsum([of.cells.count for of in parts])
        part = np.where(number < 0, -1 - number, np.searchsorted(ends, number, "right"))
        logprobs, kl, top = (np.frombuffer(data, np.float32) for data in (self.logprobs, self.kl, self.top_logprobs))
        found = [each.reshape(len(number), -1) for each in (logprobs, kl, np.frombuffer(self.top_ids, np.int64), top)]
        for i in np.unique(part).tolist():
            mine, of = part == i, parts[i]
            first = of.first - (ends[i] - of.cells.count)
            own = np.where(number[mine] < 0, -1, number[mine] + first)
            pairs = zip(number[mine].tolist(), own.tolist(), strict=True)
            errors = {cell: unpack(self.errors[each]) for each, cell in pairs if each in self.errors}
            scores = found[0][mine, : len(of.job.terms)]
            tables[of.number].take(own, [scores, *(each[mine] for each in found[1:])], errors)
            yield of.number, own[own >= 0]


class Bulk:
    """One worker's grading jobs. `at_work`: a context in which the model runs with taps. `await_logits`: called before
    logits are computed, to enable the logits tap."""

    def __init__(
        self, runtime: Runtime, model: BatchModel, at_work: Callable[[], AbstractContextManager[Any]],
        await_logits: Callable[[], None],
    ) -> None:  # fmt: skip
        self.runtime, self.model, self.at_work, self.await_logits = runtime, model, at_work, await_logits
        self._jobs: dict[str, _RunningJob] = {}

    def open(self, name: str, job: Job, remote: dict[str, torch.Tensor]) -> None:
        """Prepare a job. Workers do not wait for each other in this call, because it may fail on a single worker."""
        self._jobs[name] = _RunningJob(self, job, remote)

    def close(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            self.runtime.drop_cells(job.lease.slots)

    @torch.inference_mode()
    def run(self, name: str, rows: int) -> BatchResult | None:
        """Launch a job's next batch of at most `rows` rows, but at least one cell. Return the previous batch's results,
        if any."""
        try:
            return self._jobs[name].run(min(rows, self.model.rows))
        finally:
            self.runtime.plan = None
            self.runtime.continuity.forget()


class _Launched(NamedTuple):
    """A batch in flight.

    number, slot: the cells' indices and slots
    cell, score: the indices of each scored token's cell and score
    found: results being copied to the host
    count: the number of cells launched so far · rows: the number of rows in the batch
    """

    number: np.ndarray
    slot: np.ndarray
    cell: np.ndarray
    score: np.ndarray
    found: list[Arriving]
    count: int
    rows: int


class _RunningJob:
    """A job on one worker. Sequences are numbered across all parts."""

    def __init__(self, bulk: Bulk, job: Job, remote: dict[str, torch.Tensor]) -> None:
        self._bulk, self._job, self._model, runtime = bulk, job, bulk.model, bulk.runtime
        sites = runtime.sites
        self.lease: Lease = job.lease
        self._launched: _Launched | None = None
        self._turn = 0  # which half of the slots and records the next batch takes
        self._cells = CellRecords.of_bytes(job.cells)
        self._placed = _placed(runtime, self._cells.keys, job, remote)
        sequences = [[*part.prompt, *suffix] for part in job.parts for suffix in part.suffixes]
        self._length = np.array([len(ids) for ids in sequences])
        self._ids = np.zeros((len(sequences), int(self._length.max())), np.int64)
        for ids, row in zip(sequences, self._ids, strict=True):
            row[: len(ids)] = ids
        # by part: prompt length, number of sequences, and index of the first sequence
        self._prompt = np.array([len(part.prompt) for part in job.parts])
        self._sequences = np.array([len(part.suffixes) for part in job.parts])
        self._first = np.cumsum(self._sequences) - self._sequences
        self._samples = self._length - np.repeat(self._prompt, self._sequences) + 1  # rows with logits
        self._order_cells()
        self._chunk: int = max(MAX_LOGITS // sites.d_vocab, 1)  # rows of logits at a time
        logits = next(point.number for point in sites.points if point.rows == "sampled")
        self._edits_logits = any((group.point == logits).any() for group in self._cells.groups)
        self._streams: Streams | None = None
        self._row = np.cumsum(self._prompt) - self._prompt  # by part: the first of its rows in `_streams`
        # by part: log-probabilities of its next token without a program, once it is known
        self._base_PV: torch.Tensor | None = None
        self._has_base = np.zeros(len(job.parts), bool)

    def _order_cells(self) -> None:
        """Sort the cells by start: layer, then position. Unedited prompts come first."""
        job, sites = self._job, self._bulk.runtime.sites
        part = np.repeat(np.arange(len(job.parts)), [part.count for part in job.parts])
        first = first_layers(sites)
        for point, layer in ({} if self._model.pieces is None else self._model.pieces.layer_of).items():
            first[point] = layer
        cuts = cuts_of(self._cells, self._prompt[part], first, sites.layers)
        window = np.arange(len(part)) // max(job.window, 1)
        order = np.lexsort((part, cuts[:, 1], cuts[:, 0], window))
        unedited = np.arange(len(job.parts))
        self._order = np.concatenate([-1 - unedited, order])
        self._part = np.concatenate([unedited, part[order]])
        layers = cuts[order, 0]
        self._layer = np.concatenate([np.full(len(unedited), layers[0] if len(layers) else 0), layers])
        self._start = np.concatenate([self._prompt - 1, cuts[order, 1]])
        self._group_of, self._at = np.full((2, self._cells.count + len(job.parts)), -1)  # negative cells are at the end
        for i, group in enumerate(self._cells.groups):
            self._group_of[group.number], self._at[group.number] = i, np.arange(len(group.number))
        self._next = 0
        # cumulative use of a batch's resources: rows, own blocks, rows with logits, sequences, slots, records
        block, per_part = self._model.block, functools.partial(np.add.reduceat, indices=self._first)
        count, start = self._sequences[self._part], self._start
        records = np.array([*(group.records.shape[1] for group in self._cells.groups), 0])[self._group_of[self._order]]
        self._takes = np.cumsum([
            per_part(self._length)[self._part] - count * start,
            (per_part(-(-self._length // block))[self._part] - count * (start // block)) * self._model.groups,
            per_part(self._samples)[self._part], count, records > 0, records,
        ], axis=1)  # fmt: skip

    def _compute_prompts(self) -> None:
        """Compute every prompt without a program, into the first leased blocks. Keep the values that cross cuts if some
        cells can begin above layer 0, and no cell has tokens after the prompt."""
        model, job = self._model, self._job
        pieces = model.pieces
        if pieces is not None and pieces.usable is not False and self._layer.any() and (self._samples == 1).all():
            self._streams = Streams(pieces, int(self._prompt.sum()), self._bulk.runtime.device)
        blocks = -(-self._prompt // model.block)
        leased = np.array(job.lease.blocks)
        self._prompt_blocks = np.zeros((model.groups, len(job.parts), int(blocks.max())), np.int64)
        there = np.arange(blocks.max()) < blocks[:, None]
        used = model.groups * int(blocks.sum())
        self._prompt_blocks[:, there] = leased[:used].reshape(model.groups, -1)
        self._own_blocks = leased[used:]
        begin = np.zeros_like(self._prompt)
        while (left := self._prompt - begin).any():
            count = np.minimum(left, np.maximum(model.rows - (np.cumsum(left) - left), 0))
            count[np.cumsum(count > 0) > model.sequences] = 0
            some = np.flatnonzero(count)
            row = np.repeat(some, count[some])
            position = np.arange(len(row)) - np.repeat(np.cumsum(count[some]) - count[some], count[some]) + begin[row]
            compute = functools.partial(
                model.forward, self._ids[self._first[row], position], position, count[some], (begin + count)[some],
                self._prompt_blocks[:, some],
            )  # fmt: skip
            with self._bulk.at_work():
                if self._streams is None:
                    compute()
                else:
                    self._streams.record(compute, self._row[row] + position)
            begin += count

    def _take(self, rows: int) -> slice:
        """Return the next cells, in order, that fit into a batch."""
        lease, model = self._job.lease, self._model
        samples = min(model.samples, self._chunk) if self._edits_logits else model.samples
        most = rows, len(self._own_blocks), samples, model.sequences, len(lease.slots) // 2, lease.records // 2
        before = self._takes[:, self._next - 1] if self._next else np.zeros(len(most), np.int64)
        ends = [int(np.searchsorted(taken, limit, "right"))
                for taken, limit in zip(self._takes, before + np.array(most), strict=True)]  # fmt: skip
        return slice(self._next, max(self._next + 1, min(ends)))

    def run(self, rows: int) -> BatchResult | None:
        """Launch the next batch, and return the previous batch's results."""
        if not self._next:
            self._compute_prompts()
        before, self._launched = self._launched, None
        if self._next < len(self._order):
            self._launched = self._launch(self._take(rows))
        if self._bulk.runtime.device.type == "cpu":  # the batch is computed already
            before, self._launched = self._launched, None
        return None if before is None else self._result(before)

    def _launch(self, which: slice) -> _Launched:
        self._next = which.stop
        number, part, model, runtime = self._order[which], self._part[which], self._model, self._bulk.runtime
        slot_of_cell = self._install(number)
        sequences = self._sequences[part]
        first = np.cumsum(sequences) - sequences  # each cell's first sequence in the batch
        cell = np.repeat(np.arange(len(number)), sequences)
        sequence = self._first[part][cell] + np.arange(len(cell)) - first[cell]
        start, length = self._start[which][cell], self._length[sequence]
        by_count = np.argsort(length - start, kind="stable")  # some attention backends want decodes first
        cell, sequence, start, length = (each[by_count] for each in (cell, sequence, start, length))
        count, samples = length - start, self._samples[sequence]
        first_row = np.cumsum(count) - count
        of_row = np.repeat(np.arange(len(count)), count)
        position = np.arange(len(of_row)) - first_row[of_row] + start[of_row]
        tables = self._tables(part[cell], start, length)
        batch = Batch(slot_of_cell[cell], first_row, start, count, len(position), samples)
        with self._bulk.at_work():
            runtime.begin(batch)
            layer, crossing = 0, []
            if self._streams is not None:
                layer = self._streams.begin(int(self._layer[which].min()))
                crossing = self._streams.crossing(layer, self._row[part[cell[of_row]]] + position)
            hidden = model.forward(self._ids[sequence[of_row], position], position, count, length, tables, layer,
                                   crossing)  # fmt: skip
            first_sample = np.zeros(len(cell), np.int64)
            first_sample[by_count] = np.cumsum(samples) - samples
            scored, terms = self._terms(part)
            found = self._read(part, first, first_sample, scored, terms, hidden, batch.sampled_rows)
        runtime.end()
        arriving = [Arriving(each) for each in found]
        return _Launched(number, slot_of_cell, scored, terms[:, 0], arriving, self._next, len(position))

    def _result(self, batch: _Launched) -> BatchResult:
        """Wait for a batch in flight, and return its results."""
        found = [each.result().numpy() for each in batch.found]
        runtime = self._bulk.runtime
        runtime.collect_failures()
        errors = {
            cell: error for cell, slot in zip(batch.number.tolist(), batch.slot.tolist(), strict=True)
            if (error := runtime.cell_errors.get(slot)) is not None
        }  # fmt: skip
        runtime.drop_cells(batch.slot[batch.slot > 0].tolist())
        scored, kl, ids, top = found or [np.zeros(0, np.float32)] * 4
        scores = max(len(each.terms) for each in self._job.parts)
        logprobs = np.zeros((len(batch.number) if found else 0, scores), np.float32)
        if found:
            np.add.at(logprobs, (batch.cell, batch.score), scored)
        parts = (each.tobytes() for each in (batch.number, logprobs, kl, ids, top))
        left = len(self._order) - batch.count
        return BatchResult(*parts, errors, left, batch.rows)  # pyright: ignore[reportCallIssue]

    def _terms(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens to score for cells of these prompts: each token's cell index, [n], and its (score,
        sequence, offset, token), [n, 4]."""
        cells, terms = [], []
        for i in np.unique(part).tolist():
            of_part = [(j, *term) for j, score in enumerate(self._job.parts[i].terms) for term in score]
            mine = np.flatnonzero(part == i)
            cells.append(np.repeat(mine, len(of_part)))
            terms.append(np.tile(np.array(of_part, np.int64).reshape(-1, 4), (len(mine), 1)))
        return np.concatenate(cells), np.concatenate(terms)

    def _install(self, number: np.ndarray) -> np.ndarray:
        """Write the records of a batch's cells; return each cell's slot, 0 without a program."""
        slots, lease = np.zeros(len(number), np.int64), self._job.lease
        half, records = np.array_split(np.sort(np.array(lease.slots)), 2), lease.records // 2
        free = half[self._turn]
        record = lease.placement.record + self._turn * records
        self._turn = 1 - self._turn
        for i, group in enumerate(self._cells.groups):
            mine = np.flatnonzero(self._group_of[number] == i)
            if not len(mine):
                continue
            records, counts = place(group.take(self._at[number[mine]]), self._placed)
            slots[mine], free = free[: len(mine)], free[len(mine) :]
            begins = record + np.arange(len(mine)) * records.shape[1]
            self._bulk.runtime.install_cells(records, counts, slots[mine], begins)
            record += records.size
        return slots

    def _tables(self, part: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the sequences' block tables, [G, C, blocks]: blocks shared with the prompt, then the sequence's own.
        Copy blocks that are shared only in part."""
        model = self._model
        shared, total = start // model.block, -(-length // model.block)
        width = int(total.max())
        tables = np.zeros((model.groups, len(start), width), np.int64)
        known = self._prompt_blocks[:, part, :width]
        tables[:, :, : known.shape[2]] = known
        is_own = (np.arange(width) >= shared[:, None]) & (np.arange(width) < total[:, None])
        tables[:, is_own] = self._own_blocks[: model.groups * int(is_own.sum())].reshape(model.groups, -1)
        tables[:, np.arange(width) >= total[:, None]] = 0
        parted = np.flatnonzero(start % model.block)
        source = self._prompt_blocks[:, part[parted], shared[parted]]
        model.copy_blocks(source.ravel(), tables[:, parted, shared[parted]].ravel())
        return tables

    def _read(
        self, part: np.ndarray, first: np.ndarray, first_sample: np.ndarray, cell: np.ndarray, terms: np.ndarray,
        hidden: torch.Tensor, sampled: np.ndarray,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Compute a batch's results on the device: log-probabilities of the tokens to score and, if requested, KL
        divergences and the top tokens with their log-probabilities. Logits are computed in chunks of rows.

        first: each cell's first sequence in the batch · first_sample: each sequence's first sampled row
        cell, terms: from `_terms`
        """
        job, device = self._job, hidden.device
        row, next_row = first_sample[first[cell] + terms[:, 1]] + terms[:, 2], first_sample[first]
        scored = torch.zeros(len(row), device=device)
        kl_N = torch.zeros(len(part) if job.kl else 0, device=device)
        ids = torch.zeros(len(part), job.top, dtype=torch.int64, device=device)
        top = torch.zeros(len(part), job.top, device=device)
        chunk, is_here = len(sampled) if self._edits_logits else self._chunk, True
        for begin in range(0, len(sampled), chunk):
            self._bulk.await_logits()
            logits = self._model.logits(hidden, sampled[begin : begin + chunk])
            if logits is None:  # another worker has them; this one takes part in gathering every chunk
                is_here = False
                continue
            here = np.flatnonzero((row >= begin) & (row < begin + chunk))
            here = here[np.argsort(row[here], kind="stable")]
            at = row[here] - begin
            column = np.arange(len(at)) - np.searchsorted(at, at)
            tokens = np.zeros((len(logits), int(column.max(initial=0)) + 1), np.int64)
            tokens[at, column] = terms[here, 3]
            of_tokens = self._model.logprobs(logits, to_device(tokens, device))
            scored[to_device(here, device)] = of_tokens[to_device(at, device), to_device(column, device)]
            if job.kl or job.top:
                cells = np.flatnonzero((next_row >= begin) & (next_row < begin + chunk))
                where = to_device(cells, device)
                next_NV = logits[to_device(next_row[cells] - begin, device)].float()
                next_NV -= next_NV.logsumexp(-1, keepdim=True)  # more accurate than log_softmax on a CPU
                if job.kl and len(cells):
                    kl_N[where] = self._kl(part[cells], next_NV)
                if job.top:
                    likeliest = next_NV.topk(job.top)
                    ids[where], top[where] = likeliest.indices, likeliest.values
        return [scored, kl_N, ids, top] if is_here else []

    def _kl(self, part: np.ndarray, next_NV: torch.Tensor) -> torch.Tensor:
        """Return KL(unedited ‖ edited) of the next token for cells of the given parts."""
        parts, first = np.unique(part, return_index=True)
        new, device = ~self._has_base[parts], next_NV.device
        if self._base_PV is None:
            self._base_PV = torch.empty(len(self._has_base), next_NV.shape[1], device=device)
        if new.any():  # the prompt without a program comes first
            self._base_PV[to_device(parts[new], device)] = next_NV[to_device(first[new], device)]
            self._has_base[parts[new]] = True
        found, rows = [], max(self._chunk // 8, 1)  # at a time, since the temporary copies take memory
        for begin in range(0, len(part), rows):
            base_NV = self._base_PV[to_device(part[begin : begin + rows], device)]
            gap_NV = (base_NV - next_NV[begin : begin + rows]).masked_fill_(base_NV == -torch.inf, 0)  # 0 · log 0 is 0
            found.append(gap_NV.mul_(base_NV.exp_()).sum(-1).clamp_(min=0))
        return torch.cat(found)


def _placed(runtime: Runtime, keys: list[str], job: Job, remote: dict[str, torch.Tensor]) -> Placed:
    """Write the rows of a job's bank keys to the bank, and return their addresses."""
    placement, resident = job.lease.placement, runtime.resident
    vectors = {key: torch.from_numpy(rows) for key, rows in safetensors.numpy.load(job.vectors).items()}
    resident.forget(placement.load)
    sources = [source for key in placement.load if (source := source_of(key)) is not None]
    resident.find([source for source in sources if runtime.captured_here(*source)])
    shards = runtime.shards
    first, end = (np.array([getattr(shard, name) for shard in shards]) for name in ("first", "end"))
    is_sharded = [runtime.sites.shard_count(point.number) > 1 for point in runtime.sites.points]
    ways = {("", ""): 0}  # index by range of columns
    way = [ways.setdefault((str(shard.first), str(shard.end)), len(ways)) if apart else 0
           for shard, apart in zip(shards, is_sharded, strict=True)]  # fmt: skip
    begin, width = np.zeros((2, len(ways), len(keys)), np.int64)
    try:
        for (low, high), number in ways.items():
            for i, key in enumerate(keys):
                name = f"{key}#{low}:{high}" if low and is_vector(key) else key
                if resident_name(key, bool(low)) in placement.addresses:
                    begin[number, i], width[number, i] = resident.address(name, placement, vectors, remote)
    finally:
        resident.write()
    return Placed(begin, width, np.array(way), first, end)
