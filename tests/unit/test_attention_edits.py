"""Edits of attention for all requests of a step at once, against one query, head and key at a time in NumPy."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.kernels.attention import AttentionFacts, scores
from patchclamp.kernels.paged_attention import PagedCache
from patchclamp.language import Program
from patchclamp.plan import Batch, Prompt, bind
from patchclamp.plan.bound import with_removed_keys
from patchclamp.plan.cells import Placed, cells_of, place
from patchclamp.plan.table import record_count
from patchclamp.plan.verify import verify_cells
from patchclamp.runtime import Limits, Runtime
from patchclamp.runtime import attention as edits_of_attention
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA, ROTATED
from tests.reference import cuda_on_cpu
from tests.reference.admitting import Admitter

LAYERS, HEADS, GROUP, SIZE, LENGTH = 2, 4, 2, 8, 12
NAN = float("nan")
SITES = SiteMap(LLAMA, Sizes(LAYERS, HEADS * SIZE, 61, HEADS, HEADS // GROUP, SIZE, 16))


class _Cache:
    """Keys and values of each request, [T, K, E]; what no query may see is NaN."""

    def __init__(self, runtime: Runtime, facts: AttentionFacts, draw: np.random.Generator, requests: int) -> None:
        self.runtime, self._facts, self.names = runtime, facts, [f"request{i}" for i in range(requests)]
        shape = requests, LAYERS, LENGTH, HEADS // GROUP, SIZE
        self.keys, self.held = (draw.standard_normal(shape).astype(np.float32) for _ in range(2))

    def facts(self, point: int) -> AttentionFacts:
        return self._facts

    def width(self, point: int) -> int:
        return HEADS // GROUP * SIZE

    def _read(self, rows: np.ndarray, point: int, slots: list[int], count: int) -> torch.Tensor:
        layer = self.runtime.sites.points[point].layer
        which = [int(self.runtime.requests_at(slot)[0].removeprefix("request")) for slot in slots]
        return torch.from_numpy(rows[which, layer, :count].copy())

    def scores(self, point: int, slots: list[int], query: torch.Tensor, position: torch.Tensor, first: int,
               heads: int, count: int) -> torch.Tensor:  # fmt: skip
        return scores(query, self._read(self.keys, point, slots, count), position, self._facts, first, heads)

    def paged(self, point: int) -> PagedCache:
        """The cache, of blocks of 4 positions, of the layer whose attention output is at this point."""
        layer = self.runtime.sites.points[point].layer
        key, value = (torch.from_numpy(each[:, layer]).unflatten(1, (-1, 4)).transpose(2, 3).flatten(0, 1)
                      for each in (self.keys, self.held))  # fmt: skip
        block = torch.arange(len(key), dtype=torch.int32).view(len(self.names), -1)
        return PagedCache(key, value, block, 1, self._facts)

    def values(self, point: int, slots: list[int], count: int) -> torch.Tensor:
        return self._read(self.held, point, slots, count)


def _is_output(runtime: Runtime) -> np.ndarray:
    """A mask of the points of `z`."""
    found = np.zeros(len(runtime.sites.points), bool)
    found[[each.point for layer in range(LAYERS) for each in runtime.sites.resolve(pc.z[layer])]] = True
    return found


def _plain(query_E: np.ndarray, keys_TE: np.ndarray, position: int, window: int) -> np.ndarray:
    """A query's scores; -inf for keys that it does not see."""
    found = keys_TE.astype(np.float64) @ query_E / SIZE**0.5
    at = np.arange(len(keys_TE))
    found[(at > position) | (at <= position - window if window else False)] = -np.inf
    return found


def _softmax(row: np.ndarray) -> np.ndarray:
    row = np.exp(row - row.max())
    return row / row.sum()


def _expected(edits: list[Any], layer: int, head: int, position: int, row: np.ndarray) -> np.ndarray:
    """A query's pattern after its request's edits, of which each says where it acts."""
    cut, here = row.copy(), [each for each in edits if layer in each["layers"] and head in each["heads"]]
    here = [each for each in here if position in each["queries"]]
    for each in here:
        if each["how"] == "knock":
            cut[[key for key in each["keys"] if key < len(row)]] = -np.inf
    new = _softmax(cut) if np.isfinite(cut).any() else np.full(len(row), NAN)
    for each in here:
        if each["how"] == "scale":
            new[[key for key in each["keys"] if key < len(row)]] *= each["factor"]
        if each["how"] == "replace":
            new = np.zeros(len(row))
            new[: len(each["row"])] = each["row"]
    return new


def _draw_edit(draw: np.random.Generator, window: int, kinds: int = 3) -> tuple[Any, dict[str, Any]]:
    """An edit, and where it acts; of 1 kind: a knockout. New rows have keys that a window would hide."""
    layers = [[0], [1], [0, 1]][draw.integers(3)]
    head = int(draw.integers(-1, HEADS))
    site = pc.pattern[layers[0] : layers[-1] + 1] if head < 0 else pc.pattern[layers[0] : layers[-1] + 1, head]
    first = int(draw.integers(0, 3))
    queries = sorted(draw.choice(np.arange(4, LENGTH), int(draw.integers(1, 6)), False).tolist())
    tokens = functools.reduce(operator.or_, (pc.every[each] for each in queries))
    keys = list(range(first, first + int(draw.integers(1, 3))))
    told = {"layers": layers, "heads": range(HEADS) if head < 0 else [head], "queries": queries, "keys": keys}
    spelled = pc.prompt[keys[0] : keys[-1] + 1]
    how = draw.integers(min(kinds, 2 if window else 3))
    if how == 0:
        return pc.Knockout(spelled, site, tokens), {**told, "how": "knock"}
    if how == 1:
        factor = float(draw.uniform(-1, 2))
        return pc.Scale(factor, site, tokens, keys=spelled), {**told, "how": "scale", "factor": factor}
    layers = layers[:1]
    head = max(head, 0)
    row = draw.uniform(size=4)
    op = pc.Replace(row, pc.pattern[layers[0], head], tokens)
    return op, {**told, "layers": layers, "heads": [head], "how": "replace", "row": row}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("executor", ["host", "cuda", "kernel", "both"])
def test_every_row_of_a_step_has_its_requests_own_edits(monkeypatch, executor, seed):
    """Requests of several lengths, in chunks; one has no edits, and one loses all keys of a query and fails alone. A
    kernel does knockouts of programs that have no other edits of attention; "both": of every second program."""
    draw, window = np.random.default_rng(seed), 9 if seed % 2 or executor in ("kernel", "both") else 0
    runtime = Runtime(SITES, Limits(max_programs=8, max_records=4096, bank_bytes=1 << 16))
    positions = np.zeros(64, np.int64)
    if executor != "host":
        cuda_on_cpu.stub(monkeypatch)
        step, positions = cuda_on_cpu.on_cpu(runtime, 64, 16, 1 << 12, 1 << 13, 1 << 15)
    if seed == 5:  # a batch of one query at a time
        monkeypatch.setattr(edits_of_attention, "MAX_SCORES", HEADS * LENGTH)
    cache = runtime.keys = _Cache(runtime, AttentionFacts(SIZE**-0.5, window=window), draw, 6)
    if executor in ("kernel", "both"):
        step.use_cache(cache.paged, runtime.is_query, _is_output(runtime))
    admitter, told = Admitter(runtime), list[list[dict[str, Any]]]()
    for number, name in enumerate(cache.names):
        kinds = 1 if executor == "kernel" or (executor == "both" and number % 2) else 3
        ops, plain = zip(*(_draw_edit(draw, window, kinds) for _ in range(draw.integers(1, 4))), strict=True)
        if number == 1:  # the last query sees no key, or its result overflows
            ops, plain = (pc.Knockout("prompt[3:]", pc.pattern[1, 2], "prompt[-1]"),), ()
            if not window:
                ops = (pc.Replace([3e38] * 4, pc.pattern[1, 2], "prompt[-1]"),)
        if number == 2:
            ops, plain = (), ()
        told.append(list(plain))
        vectors = dict[str, np.ndarray]()
        if ops:
            prompt = Prompt(list(range(LENGTH)), lambda: ("", []))
            bound = bind(Program.of(ops), name, prompt, 1, SITES, None, vectors=vectors)
            admitter.admit(name, bound, {key: torch.from_numpy(rows.copy()) for key, rows in vectors.items()})
    cuts = draw.integers(4, LENGTH, 6)
    for begins, ends in ((np.zeros(6, int), cuts), (cuts, np.full(6, LENGTH))):
        _step(runtime, cache, begins, ends, positions, told, draw, window)
    runtime.collect_failures()
    assert not runtime.has_code or executor != "kernel"
    for number, name in enumerate(cache.names):
        _, error = runtime.outcome(name)
        assert (error is not None) == (number == 1), error
    assert ("position 11" if window else "NotFinite") in str(runtime.outcome("request1")[1])
    admitter.free(name for name in cache.names if name != "request2")
    assert runtime.status()["code"] == 0


def _on_kernel(monkeypatch, facts: AttentionFacts, requests: int) -> tuple[Runtime, _Cache, Any, np.ndarray, Any]:
    """A runtime whose knockouts run in a kernel."""
    cuda_on_cpu.stub(monkeypatch)
    draw, runtime = (
        np.random.default_rng(3),
        Runtime(SITES, Limits(max_programs=8, max_records=4096, bank_bytes=1 << 16)),
    )
    step, positions = cuda_on_cpu.on_cpu(runtime, 64, 16, 1 << 12, 1 << 13, 1 << 15)
    cache = runtime.keys = _Cache(runtime, facts, draw, requests)
    step.use_cache(cache.paged, runtime.is_query, _is_output(runtime))
    return runtime, cache, step, positions, draw


def _admit(admitter: Admitter, name: str, length: int, op: Any) -> None:
    prompt = Prompt(list(range(length)), lambda: ("", []))
    admitter.admit(name, bind(Program.of([op]), name, prompt, LENGTH - length + 1, SITES, None))


def test_knockouts_go_on_in_decode_steps_that_reuse_a_plan(monkeypatch):
    """Requests that share steps are told apart in each, also after one of them ends."""
    runtime, cache, _, positions, draw = _on_kernel(monkeypatch, AttentionFacts(SIZE**-0.5), 3)
    admitter, begins = Admitter(runtime), np.array([8, 6, 7])
    told: list[list[dict[str, Any]]] = []
    for number, (name, length) in enumerate(zip(cache.names, begins.tolist(), strict=True)):
        _admit(admitter, name, length, pc.Knockout(pc.prompt[number], pc.pattern, pc.generated))
        told.append([{"how": "knock", "layers": range(LAYERS), "heads": range(HEADS), "keys": [number],
                      "queries": range(length, LENGTH)}])  # fmt: skip
    planned = []
    for turn in range(4):
        if turn == 3:
            admitter.free(["request0"])
            told[0] = []
        _step(runtime, cache, begins + turn, begins + turn + 1, positions, told, draw, 0)
        planned.append(runtime.steps_planned)
    assert planned[0] == planned[2] < planned[3]
    assert [runtime.outcome(name)[1] for name in cache.names] == [None] * 3


def test_records_are_counted_as_they_are_written(monkeypatch):
    """A record for each range of removed keys, up to a limit in a layer; one each at queries and results otherwise."""
    keys = functools.reduce(operator.or_, (pc.prompt[each] for each in range(0, LENGTH, 2)))
    for ops, count in (
        ([pc.Knockout(keys, pc.pattern[0], "prompt[-1]")], LENGTH // 2),
        ([pc.Knockout(keys, pc.pattern[0, head], "prompt[-1]") for head in range(HEADS)], HEADS * LENGTH // 2),
        ([pc.Scale(0.5, pc.pattern[0], "prompt[-1]", keys=keys)], 2),
        ([pc.Knockout(keys, pc.pattern, pc.prompt[-1])] * 12, 2 * 12 * LAYERS),  # as code: more than a row may read
    ):
        runtime, *_ = _on_kernel(monkeypatch, AttentionFacts(SIZE**-0.5), 1)
        bound = bind(Program.of(ops), "request0", Prompt(list(range(LENGTH)), lambda: ("", [])), 1, SITES, None)
        assert record_count(bound.ops) == count
        Admitter(runtime).admit("request0", bound)
        assert 0 < runtime.table.first[1, -1] - runtime.table.first[1, 0] <= count
        assert runtime.has_code == (count in (2, 2 * 12 * LAYERS))


def test_a_failure_is_forgotten_with_its_program(monkeypatch):
    """The device reports a request's failure after the request has ended; a later one has its slot."""
    runtime, cache, _, positions, draw = _on_kernel(monkeypatch, AttentionFacts(SIZE**-0.5, window=4), 2)
    admitter, lengths = Admitter(runtime), np.array([12, 10])
    _admit(admitter, "request0", 12, pc.Knockout("prompt[7:]", pc.pattern[0], "prompt[-1]"))
    _admit(admitter, "request1", 10, pc.Knockout("prompt[9]", pc.pattern[0], "prompt[-1]"))
    edge = {"how": "knock", "layers": [0], "heads": range(HEADS), "keys": [9], "queries": [9]}
    _step(runtime, cache, np.zeros(2, int), lengths, positions, [[], [edge]], draw, 4)
    assert runtime.step.failed()
    admitter.free(["request0"])
    runtime.collect_failures()
    assert runtime.outcome("request1")[1] is None
    _admit(admitter, "request0", 12, pc.Knockout("prompt[9]", pc.pattern[0], "prompt[-1]"))
    runtime.collect_failures()
    assert runtime.outcome("request0")[1] is None


def test_a_graph_is_recorded_before_and_after_the_cache_is_allocated(monkeypatch):
    runtime, cache, step, positions, _ = _on_kernel(monkeypatch, AttentionFacts(SIZE**-0.5), 1)

    def missing(point: int) -> PagedCache:
        raise pc.UnsupportedSite("its cache has 1 axes, not 4")

    [z] = SITES.resolve(pc.z[0])
    [query] = [point.number for point in SITES.points if point.kind == ROTATED and point.layer == 0]
    noted, launched, own = (
        list[int](),
        list[int](),
        len(SITES.points),
    )  # the node of removed keys has a number of its own
    monkeypatch.setattr(step.recorded, "note", noted.append)
    monkeypatch.setattr(cuda_on_cpu.cuda_step, "remove_keys", lambda tables, point, *rest: launched.append(point))
    step.recording = True
    nodes = [query, z.point]
    for paged, launches in ((missing, []), (cache.paged, [z.point])):
        step.use_cache(paged, runtime.is_query, _is_output(runtime))
        for point in (query, z.point):
            runtime.apply(point, torch.zeros(4, HEADS * SIZE), None)
        assert launched == launches
        assert noted == nodes
        nodes = [*nodes, query, own, z.point]
    step.recording = False
    _admit(Admitter(runtime), "request0", 12, pc.Knockout("prompt[1]", pc.pattern[0], "prompt[-1]"))
    positions[:12] = range(12)
    runtime.begin_step(["request0"], *np.array([[0], [0], [12]]), 12)
    runtime.apply(z.point, torch.zeros(12, HEADS * SIZE), None)  # its queries are not tapped
    assert "queries" in str(runtime.outcome("request0")[1])


@pytest.mark.parametrize("cell", [1, 2])
def test_graded_programs_remove_keys_in_a_batch(monkeypatch, cell):
    """As records without a program's requests: one cell has none, and one loses all keys of a query and fails alone."""
    lengths = [12, 9, 12, 10]
    runtime, cache, _, positions, draw = _on_kernel(monkeypatch, AttentionFacts(SIZE**-0.5, window=4), 4)
    told, bound = list[list[dict[str, Any]]](), list[Any]()
    for number, length in enumerate(lengths):
        prompt = Prompt(list(range(length)), lambda: ("", []))
        ops = [pc.Knockout(pc.prompt[length - 3 : length - 1], pc.pattern[0, number], pc.prompt[length - 2 :]),
               pc.Knockout(pc.prompt[length - 3 + number % 2], pc.pattern[:, 0], pc.prompt[-1])]  # fmt: skip
        told.append([
            {"how": "knock", "layers": [0], "heads": [number], "queries": range(length - 2, length),
             "keys": [length - 3, length - 2]},
            {"how": "knock", "layers": range(LAYERS), "heads": [0], "queries": [length - 1],
             "keys": [length - 3 + number % 2]},
        ])  # fmt: skip
        if number == 3:
            ops, told[number] = [pc.Knockout("prompt[5:]", pc.pattern[0], pc.prompt[-1])], []
        bound.append(None if number == cell else bind(Program.of(ops), "r", prompt, 1, SITES, None))
        told[number] = [] if number == cell else told[number]
    cells = cells_of([of and with_removed_keys(of, SITES) for of in bound])
    verify_cells(cells, {}, LENGTH, SITES)
    none, begin = np.zeros(len(SITES.points), np.int64), 0
    placed, slots = Placed(np.zeros((1, 0)), np.zeros((1, 0)), none, none, none), np.zeros(4, np.int64)
    for group in cells.groups:
        records, counts = place(group, placed)
        slots[group.number] = group.number + 1
        begins = begin + np.arange(len(records)) * records.shape[1]
        begin += records.size
        runtime.install_cells(records, counts, slots[group.number], begins)
    _step(runtime, cache, np.zeros(4, int), np.array(lengths), positions, told, draw, 4, slots)
    runtime.collect_failures()
    errors = {number: runtime.cell_errors[slot] for number, slot in enumerate(slots.tolist()) if slot}
    assert [number for number, error in errors.items() if error is not None] == [3]
    assert "position 9 sees no key" in str(errors[3])
    runtime.drop_cells(slots.tolist())
    assert not runtime.table.removing


def _edited(lengths: list[int]) -> tuple[Runtime, _Cache, np.random.Generator]:
    """A runtime in which all requests but the last cut an edge of their last token, and the last scales z by 1."""
    draw = np.random.default_rng(7)
    runtime = Runtime(SITES, Limits(max_programs=8, max_records=4096, bank_bytes=1 << 16))
    cache = runtime.keys = _Cache(runtime, AttentionFacts(SIZE**-0.5), draw, len(lengths))
    admitter = Admitter(runtime)
    for number, (name, length) in enumerate(zip(cache.names, lengths, strict=True)):
        op = pc.Knockout("prompt[1]", pc.pattern[0], "prompt[-1]")
        ops = [op] if number < len(lengths) - 1 else [pc.Scale(1.0, pc.z[0])]
        admitter.admit(name, bind(Program.of(ops), name, Prompt(list(range(length)), lambda: ("", [])), 1, SITES, None))
    return runtime, cache, draw


def _cut(lengths: list[int]) -> list[list[dict[str, Any]]]:
    """Where the edits of `_edited` act."""
    edge = {"how": "knock", "layers": [0], "heads": range(HEADS), "keys": [1]}
    return [*([{**edge, "queries": [length - 1]}] for length in lengths[:-1]), []]


@pytest.mark.parametrize("failing", [None, 1])
def test_what_fails_in_a_batch_fails_alone(monkeypatch, failing):
    """As when memory is short: requests of several lengths are computed again one by one; one fails there, too."""
    lengths = [12, 9, 7, 10]
    runtime, cache, draw = _edited(lengths)
    names, scored = cache.names, cache.scores
    broken = set() if failing is None else set(runtime.slots([names[failing]]).tolist())

    def scores_of(point: int, slots: list[int], *rest: Any) -> torch.Tensor:
        if len(slots) > 1 or broken & set(slots):
            raise torch.OutOfMemoryError("no memory")
        return scored(point, slots, *rest)

    monkeypatch.setattr(cache, "scores", scores_of)
    told = _cut(lengths)
    if failing is not None:
        told[failing] = []
    _step(runtime, cache, np.zeros(4, int), np.array(lengths), np.zeros(64, np.int64), told, draw, 0)
    errors = [runtime.outcome(name)[1] for name in names]
    assert [error is not None for error in errors] == [i == failing for i in range(4)]
    assert failing is None or "no memory" in str(errors[failing])


def test_keys_that_cannot_be_read_fail_their_readers_alone(monkeypatch):
    lengths = [12, 9, 10]
    runtime, cache, draw = _edited(lengths)

    def width(point: int) -> int:
        raise pc.UnsupportedSite("keys cannot be read")

    monkeypatch.setattr(cache, "width", width)
    _step(runtime, cache, np.zeros(3, int), np.array(lengths), np.zeros(64, np.int64), [[], [], []], draw, 0)
    errors = [runtime.outcome(name)[1] for name in cache.names]
    assert errors[2] is None
    for error in errors[:2]:
        assert "edits[0]" in str(error)
        assert "cannot be read" in str(error)


def test_checks_of_a_step_that_was_not_ended_are_discarded(monkeypatch):
    lengths = [12, 9, 10]
    runtime, cache, draw = _edited(lengths)
    monkeypatch.setattr(runtime, "end", lambda: None)
    held, cache.held = cache.held, np.full_like(cache.held, 3e38)
    with pytest.raises(AssertionError):  # its rows overflow
        _step(runtime, cache, np.zeros(3, int), np.array(lengths), np.zeros(64, np.int64), _cut(lengths), draw, 0)
    monkeypatch.undo()
    cache.held = held
    _step(runtime, cache, np.zeros(3, int), np.array(lengths), np.zeros(64, np.int64), _cut(lengths), draw, 0)
    assert [runtime.outcome(name)[1] for name in cache.names] == [None] * 3


def _step(
    runtime: Runtime, cache: _Cache, begins: np.ndarray, ends: np.ndarray, positions: np.ndarray,
    told: list[list[dict[str, Any]]], draw: np.random.Generator, window: int, slots: np.ndarray | None = None,
) -> None:  # fmt: skip
    """One step of all requests, or of cells in `slots`: every layer's queries, and its attention, are tapped, and compared
    with the reference."""
    count = ends - begins
    labels = np.concatenate([np.arange(a, b) for a, b in zip(begins, ends, strict=True)])
    positions[: len(labels)] = labels
    first = np.cumsum(count) - count
    if slots is None:
        runtime.begin_step(cache.names, first, begins.astype(np.int32), count, int(count.sum()))
    else:
        runtime.begin(Batch(slots, first, begins, count, int(count.sum()), None))
    for layer in range(LAYERS):
        [queries] = [point for point in runtime.sites.points if point.kind == ROTATED and point.layer == layer]
        [z] = runtime.sites.resolve(pc.z[layer])
        query_RHE = draw.standard_normal((len(labels), HEADS, SIZE)).astype(np.float32)
        stock, wanted = np.zeros_like(query_RHE), np.zeros_like(query_RHE)
        same = np.zeros((len(labels), HEADS), bool)
        owners = np.repeat(np.arange(len(begins)), count)
        for row, (owner, position) in enumerate(zip(owners.tolist(), labels.tolist(), strict=True)):
            for head in range(HEADS):
                keys, held = (rows[owner, layer, : position + 1, head // GROUP] for rows in (cache.keys, cache.held))
                scored = _plain(query_RHE[row, head], keys, position, window)
                stock[row, head] = _softmax(scored) @ held
                pattern = _expected(told[owner], layer, head, position, scored)
                wanted[row, head] = pattern @ held
                same[row, head] = np.array_equal(pattern, _softmax(scored))
        tapped = torch.from_numpy(stock.reshape(len(labels), -1).copy())
        runtime.apply(queries.number, torch.from_numpy(query_RHE.reshape(len(labels), -1).copy()), None)
        runtime.apply(z.point, tapped, None)
        found = tapped.numpy().reshape(stock.shape)
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        assert np.array_equal(found[same], stock[same])
        assert not np.allclose(found[~same], stock[~same], atol=1e-4) or not (~same).any()
    runtime.end()
