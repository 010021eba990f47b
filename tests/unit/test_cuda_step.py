"""Planning and capturing as on a GPU, without one: requests come, go, are preempted and chunked, graphs and eager steps
take turns, and every captured row is the right one."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.language.values import POOLS
from patchclamp.plan import Prompt, bind
from patchclamp.runtime import Limits, Runtime, host_step
from patchclamp.runtime.dictionaries import Reading
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.map import placed
from patchclamp.sites.tables import LLAMA, MIXTRAL
from patchclamp.store.captures import CaptureChunk
from patchclamp.store.tensors import PROBE
from tests.reference import cuda_on_cpu, tables
from tests.reference.admitting import Admitter

ROWS, WIDTH, LAYERS = 64, 4, 2


class Request:
    def __init__(self, number: int, prompt: int, most: int, captures: list[pc.Capture]) -> None:
        self.number, self.run, self.prompt, self.most = number, f"run{number}", prompt, most
        self.name, self.program = f"request{number}", Program.of((), captures) if captures else None
        self.position = self.computed = 0

    @property
    def done(self) -> bool:
        return self.position >= self.prompt + self.most - 1


class Engine:
    """A scheduler of sorts over a real `Runtime` and `CudaStep`; `value` says what each row would be."""

    def __init__(self, seed: int, sizes: Sizes, calm: bool) -> None:
        self.rng, self.calm = random.Random(seed), calm
        self.sites = SiteMap(MIXTRAL if sizes.experts else LLAMA, sizes)
        self.limits = Limits(max_programs=8, max_records=4096, bank_bytes=1 << 16,
                             kept_bytes=self.rng.choice([1 << 9, 1 << 12, 1 << 15]))  # fmt: skip
        self.runtime = Runtime(self.sites, self.limits)
        ring = self.rng.choice([1 << 8, 1 << 10, 1 << 11, 1 << 13])  # a step may capture more than the ring holds
        self.step, self.positions = cuda_on_cpu.on_cpu(self.runtime, ROWS, 16, self.limits.kept_bytes, ring, 1 << 15)
        draw = np.random.default_rng(seed)
        self.sae = pc.SAE(*(draw.standard_normal(shape) for shape in ((8, WIDTH), 8, (8, WIDTH), WIDTH)))
        self.sites.dictionaries["a"] = placed(self.sae, self.sites, "a", "resid_post[0]", None, "bfloat16")
        self.runtime.dictionaries.attach("a", self.sae, torch.float32)
        self.admitter = Admitter(self.runtime)
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.gone: list[str] = []
        self.count = self.went_on = self.planned = self.replayed = self.moved = self.kept_bytes = 0
        self.read = self.pooled = 0
        rebase = self.step.tables.rebase

        def moved(plan: Any, begin: int) -> None:
            self.moved += begin + self.runtime.continuity.steps * self.step._upfront_bytes == 0
            rebase(plan, begin)

        self.step.tables.rebase = moved  # type: ignore[method-assign]

    @staticmethod
    def value(request: Request, position: int, point: int) -> float:
        return float((request.number * 37 + position * 11 + point * 5) % 251)

    def come(self) -> None:
        self.count += 1
        captures, names = [], [name for name in self.sites.names if name != "logits"]
        for _ in range(self.rng.randint(0, 3)):
            tokens = self.rng.choice(
                [pc.generated, pc.every, pc.prompt, pc.prompt[::2], pc.every[2:6], pc.generated[1:3]]
            )
            dtype = self.rng.choice(["float32", "bfloat16", "float16"])
            if self.rng.random() < 0.2:
                captures.append(pc.Capture(pc.logits, dtype=dtype))
            elif self.rng.random() < 0.3:
                pool = self.rng.choice(["mean", "max"])
                captures.append(pc.Capture(pc.site(self.rng.choice(names)), tokens, dtype=dtype, pool=pool))
            elif self.rng.random() < 0.3:
                captures.append(pc.Features("a", tokens, top=self.rng.randint(1, 8)))
            else:
                captures.append(pc.Capture(pc.site(self.rng.choice(names)), tokens, dtype=dtype))
        longest = 60 if self.calm else 25
        made = Request(self.count, self.rng.choice([1, 1, 2, 5, 9]), self.rng.randint(2, longest), captures)
        if made.program is not None:
            prompt = Prompt(list(range(made.prompt)), lambda: ("", []))
            try:
                self.admitter.admit(made.name, bind(made.program, made.run, prompt, made.most, self.sites, None))
            except (pc.CapacityError, pc.ProgramError):  # or a site is captured in two ways
                return
        self.running.append(made)

    def batch(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step; now and then somebody is preempted, or left out."""
        rare = 0.1 if self.calm else 1.0
        if self.running and self.rng.random() < 0.08 * rare:
            thrown = self.rng.choice(self.running)
            thrown.position = 0
        budget, found = self.rng.choice([3, 8, 20]), []
        for request in self.running:
            known = max(request.prompt, request.computed, request.position + 1)
            count = min(known - request.position, budget)
            if count > 0 and self.rng.random() >= 0.05 * rare:
                found.append((request, count))
                budget -= count
        return found

    def go(self) -> None:
        while len(self.running) < 5 and self.rng.random() < (0.1 if self.calm else 0.4):
            self.come()
        self.admitter.free(self.gone)
        self.gone, batch = [], self.batch()
        if not batch:
            return
        self.compute(batch)
        for request, count in batch:
            request.position += count
            request.computed = max(request.computed, request.position)
        for request in [request for request, _ in batch if request.done]:
            self.running.remove(request)
            self.gone.append(request.name)
            if request.program is not None:
                self.done.append(request)

    def compute(self, batch: list[tuple[Request, int]]) -> None:
        """As the worker does around a step: begin or go on, taps in turn, end."""
        runtime, names = self.runtime, [request.name for request, _ in batch]
        count = np.array([n for _, n in batch], np.int32)
        position, total = np.array([request.position for request, _ in batch], np.int32), int(count.sum())
        runtime.plan = None
        if not (len(runtime) and runtime.steps_left(zip(names, position.tolist(), strict=True))):
            return
        fits = runtime.captures_at_most(dict(zip(names, count.tolist(), strict=True)), total, self.step.max_graph_bytes)
        decode = all(n == 1 and (request.position >= request.prompt or request.position) for request, n in batch)
        rows = [(request, request.position + i) for request, n in batch for i in range(n)]
        self.positions[:] = -7
        self.positions[: len(rows)] = [at for _, at in rows]
        went_on = runtime.begin_step(names, np.cumsum(count) - count, position, count, total) != "changed"
        self.went_on += went_on
        self.planned += not went_on
        if runtime.plan is None:
            return
        self.replayed += fits and decode
        self.kept_bytes += runtime.plan.size
        for point in sorted(self.sites.points, key=lambda point: point.rows == "sampled"):
            mine = [(request, request.position + n - 1) for request, n in batch] if point.rows == "sampled" else rows
            hidden = torch.tensor([[self.value(r, at, point.number)] * point.width for r, at in mine])
            if fits and decode and point.rows != "sampled":
                cuda_on_cpu.graph(self.step, point.number, hidden)
            else:
                runtime.apply(point.number, hidden, None)
        runtime.end()

    def check(self, request: Request) -> int:
        """Every row that should be there by now is, and is right; returns how many."""
        assert request.program is not None
        prompt = Prompt(list(range(request.prompt)), lambda: ("", []))
        bound = bind(request.program, request.run, prompt, request.most, self.sites, None)
        checked, captures = 0, [op for op in bound.ops if op.action.reader is None]
        for number, op in enumerate(bound.ops):
            if op in captures:
                continue
            positions, found = self.runtime.fetch(request.run, op.points[0], PROBE + number)
            wanted = [at for bounds in op.ranges for at in range(*bounds[:2]) if at < request.computed]
            assert positions.tolist() == wanted
            for at, row in zip(wanted, found[:, : op.action.top].tolist(), strict=True):
                values = self.sae.encode([[self.value(request, at, op.points[0])] * WIDTH])[0]
                assert row == pytest.approx(np.sort(values)[::-1][: op.action.top], rel=1e-5, abs=1e-4)
            self.read += len(wanted)
        for point in {point for op in captures for point in op.points}:
            wanted = {at for op in captures if point in op.points for bounds in op.ranges for at in range(*bounds[:2])}
            lowest = request.prompt - 1 if self.sites.points[point].rows == "sampled" else 0
            [how] = {(op.action.pool, op.action.in_step) for op in captures if point in op.points}
            if how[1] and max(wanted) >= request.computed:  # it is pooled when all rows are there
                continue
            wanted = {at for at in wanted if lowest <= at < request.computed}
            positions, rows = self.runtime.fetch(request.run, point)
            if how[1]:
                values = [self.value(request, at, point) for at in wanted]
                value = max(values) if how[0] == POOLS.index("max") + 1 else np.float32(np.mean(values))
                assert positions.tolist() == [max(wanted)]
                assert rows.tolist() == [[value] * self.sites.points[point].width]
                self.pooled += 1
                checked += 1
                continue
            assert positions.tolist() == sorted(wanted), (request.run, self.sites.label(point))
            expected = [[self.value(request, at, point)] * self.sites.points[point].width for at in sorted(wanted)]
            assert rows.float().tolist() == expected, (request.run, self.sites.label(point))
            checked += len(positions)
        return checked

    def release(self, request: Request) -> None:
        self.runtime.release([request.run])
        self.done.remove(request)


@pytest.mark.parametrize("sizes", [
    Sizes(LAYERS, WIDTH, 6),  # rows of different points are of equal bytes
    Sizes(LAYERS, WIDTH, 61), Sizes(LAYERS, WIDTH, 1024),
    Sizes(LAYERS, WIDTH, 61, experts=8, sparse=(0, 1)),  # points come after the logits
])  # fmt: skip
@pytest.mark.parametrize("calm", [False, True])
def test_whatever_happens_every_captured_row_is_the_right_one(monkeypatch, sizes, calm):
    cuda_on_cpu.stub(monkeypatch)
    seeds, rows, counts = np.random.default_rng(0).integers(1 << 30, size=3).tolist(), 0, np.zeros(6, int)
    for seed in seeds:
        random.seed(seed)
        engine = Engine(seed, sizes, calm)
        for _ in range(150):
            engine.go()
            if engine.done and engine.rng.random() < 0.3:
                request = engine.rng.choice(engine.done)
                rows += engine.check(request)
                engine.release(request)
            with_programs = [request for request in engine.running if request.program is not None]
            if with_programs and engine.rng.random() < 0.1:
                rows += engine.check(engine.rng.choice(with_programs))
        for request in list(engine.done):
            rows += engine.check(request)
            engine.release(request)
        for request in [request for request in engine.running if request.program is not None]:
            engine.runtime.release([request.run])
        assert engine.runtime.store.bytes == 0
        engine.step.flush()
        assert engine.step.drain.bytes == engine.kept_bytes  # nothing but what is kept leaves the device
        counts += [engine.went_on, engine.planned, engine.replayed, engine.read, engine.pooled, engine.moved]
        engine.step.close()
    assert rows > 1000
    # steps that went on with a plan, that were planned, that replayed a graph; rows that an SAE read; pooled captures; and
    # how often the ring was at its end
    assert (counts[:4] > 30).all(), counts
    assert counts[4] > 5, counts
    assert counts[5] > 0, counts


@pytest.mark.parametrize("kept", [1 << 12, 0])  # 0: every step captures too much to allocate it when it begins
@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize(("every", "steps"), [(1, 8), (3, 6)])  # neighbours, and positions 1, 4 and 7
def test_of_pooled_rows_one_is_kept_in_each_step(monkeypatch, pool, kept, every, steps):
    """Of a request that begins again after a preemption, what was pooled before counts if it was whole."""
    cuda_on_cpu.stub(monkeypatch)
    runtime = Runtime(
        SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), Limits(max_programs=2, max_records=512, bank_bytes=1 << 16)
    )
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, kept, 1 << 13, 1 << 15)
    tokens = list(range(9))
    program = Program.of((), [pc.Capture(pc.resid_post, pc.prompt[1::every], dtype="float16", pool=pool)])
    Admitter(runtime).admit("request", bind(program, "run", Prompt(tokens, lambda: ("", [])), 5, runtime.sites, None))
    values, one = np.random.default_rng(3).standard_normal((12, WIDTH)).astype(np.float32), np.ones(1, np.int64)
    for first, count in [(0, 3), (3, 2), (0, 1), (1, 4), (5, 2), (7, 1), (8, 1), (9, 1), (10, 1), (0, 3), (3, 2)]:
        positions[:count] = range(first, first + count)
        runtime.begin_step(["request"], 0 * one, first * one, count * one, count)
        for point in runtime.sites.points if runtime.plan is not None else ():
            runtime.apply(point.number, torch.from_numpy(values[first : first + count]), None)
        runtime.end()
    rows = values[1:9:every]
    pooled = rows.mean(0, dtype=np.float64) if pool == "mean" else rows.max(0)
    for place in runtime.sites.resolve(pc.resid_post):
        for where, rows in (runtime.fetch("run", place.point), runtime.store.gather(["run"], place.point)[1:]):
            assert where.tolist() == [range(1, 9, every)[-1]]
            assert rows.numpy() == pytest.approx(pooled.astype(np.float32)[None], rel=1e-6, abs=1e-6)
    step.flush()
    assert step.drain.bytes == LAYERS * 4 * WIDTH * steps
    step.close()


def test_the_ranges_of_an_op_are_pooled_together_whatever_their_numbers_are(monkeypatch):
    """Those of a new program fill the gaps between those of others; probes of one shape at one point share a group."""
    cuda_on_cpu.stub(monkeypatch)
    sites = SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61))
    runtime = Runtime(sites, Limits(max_programs=4, max_records=512, bank_bytes=1 << 16))
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, 1 << 12, 1 << 13, 1 << 15)
    admitter, at = Admitter(runtime), pc.resid_post[0]

    def admit(name: str, *tokens: pc.Tokens) -> None:
        captures = [
            pc.Capture(at, tokens[0], pool="mean"),
            *(pc.Capture(pc.mlp_out[0], each, pool="max") for each in tokens[1:]),
        ]
        bound = bind(Program.of((), captures), name, Prompt(list(range(9)), lambda: ("", [])), 2, sites, None)
        admitter.admit(name, bound)

    for name, tokens in (("a", pc.prompt[:2]), ("b", pc.prompt[1:3]), ("c", pc.prompt[::4])):
        admit(name, tokens)
    admitter.free(["a", "b"])
    admit("d", pc.prompt[::2], pc.prompt[1::3])
    values = np.random.default_rng(3).standard_normal((18, WIDTH)).astype(np.float32)
    positions[:18] = [*range(9)] * 2
    runtime.begin_step(["d", "c"], np.array([0, 9]), np.zeros(2, np.int64), np.full(2, 9), 18)
    for point in sites.points:
        runtime.apply(point.number, torch.from_numpy(values[[8, 17]] if point.rows == "sampled" else values), None)
    runtime.end()
    [point], [other] = (sites.resolve(site) for site in (at, pc.mlp_out[0]))
    runs, where, rows = runtime.store.gather(["c", "d"], point.point)
    assert (runs.tolist(), where.tolist()) == ([0, 1], [8, 8])
    assert rows.numpy() == pytest.approx(np.stack([values[9::4].mean(0), values[:9:2].mean(0)]), rel=1e-6, abs=1e-6)
    where, rows = runtime.fetch("d", other.point)
    assert (where.tolist(), rows.tolist()) == ([7], [values[1:9:3].max(0).tolist()])
    assert step.drain.bytes == 3 * 4 * WIDTH
    step.close()


@pytest.mark.parametrize("kept", [1 << 12, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_rows_that_an_sae_reads_their_features_are_kept(monkeypatch, dtype, kept):
    """Beside whole rows of the same point, and where the plan of a step goes on."""
    cuda_on_cpu.stub(monkeypatch)
    sites, draw = SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), np.random.default_rng(3)
    runtime = Runtime(sites, Limits(max_programs=2, max_records=512, bank_bytes=1 << 16))
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, kept, 1 << 13, 1 << 15)
    saes = [pc.SAE(*(draw.standard_normal(shape) for shape in ((8, WIDTH), 8, (8, WIDTH), WIDTH))) for _ in range(2)]
    for name, sae, at in zip("ab", saes, ("resid_post[0]", "mlp_out[1]"), strict=True):
        sites.dictionaries[name] = placed(sae, sites, name, at, None, dtype)
        runtime.dictionaries.attach(name, sae, torch.float32)
    program = Program.of((), [pc.Features("a", top=3), pc.resid_post[0], pc.Features("b", ids=[5, 1])])
    bound = bind(program, "run", Prompt(list(range(5)), lambda: ("", [])), 6, sites, None)
    Admitter(runtime).admit("request", bound)
    values, one = draw.standard_normal((10, WIDTH)).astype(np.float32), np.ones(1, np.int64)
    for first, count in [(0, 3), (3, 2), *((at, 1) for at in range(5, 10))]:
        positions[:count] = range(first, first + count)
        sameness = runtime.begin_step(["request"], 0 * one, first * one, count * one, count)
        assert sameness == ("advanced" if first > 5 else "changed")
        for point in sites.points:
            row = torch.from_numpy(values[first : first + count])
            if count == 1 and kept and point.rows != "sampled":
                cuda_on_cpu.graph(step, point.number, row)
            else:
                runtime.apply(point.number, row, None)
        runtime.end()
    rows = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    for i, sae in enumerate(saes):
        where, found = runtime.fetch("run", bound.ops[2 * i].points[0], PROBE + 2 * i)
        every, half = sae.encode(rows), found.shape[1] // 2
        ids = found[:, half:].contiguous().view(torch.int32).numpy()
        assert where.tolist() == list(range(10))
        assert found[:, :half].numpy() == pytest.approx(np.take_along_axis(every, ids, 1), rel=1e-5, abs=1e-5)
        if i == 0:
            assert (np.sort(every, 1)[:, ::-1][:, :3] == np.take_along_axis(every, ids, 1)).all()
        else:
            assert (ids == [5, 1]).all()
    assert runtime.fetch("run", bound.ops[1].points[0])[1].tolist() == values.tolist()
    step.flush()
    assert step.drain.bytes == 10 * (4 * WIDTH + 8 * 2) + sum(-(-8 * 3 * n // 16) * 16 for n in (3, 2, 1, 1, 1, 1, 1))
    step.close()


@pytest.mark.parametrize("other", [[], [pc.resid_post[0], pc.mlp_out]])
@pytest.mark.parametrize(  # all at once; all but the logits; tap by tap; and beside a ring that is too small
    ("kept", "ring"), [(1 << 13, 1 << 14), (3 << 10, 1 << 14), (0, 1 << 14), (0, 1 << 9)]
)
def test_results_are_all_that_leaves_the_device(monkeypatch, kept, ring, other):
    """Of the rows that are encoded or pooled not a byte is copied to the host, beside whole rows of the same point too."""
    cuda_on_cpu.stub(monkeypatch)
    width, vocabulary = 64, 256
    sites, draw = SiteMap(LLAMA, Sizes(LAYERS, width, vocabulary)), np.random.default_rng(3)
    runtime = Runtime(sites, Limits(max_programs=2, max_records=512, bank_bytes=1 << 16))
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, kept, ring, 1 << 15)
    sae = pc.SAE(*(draw.standard_normal(shape) for shape in ((16, width), 16, (16, width), width)))
    sites.dictionaries["a"] = placed(sae, sites, "a", "resid_post[0]", None, "float32")
    runtime.dictionaries.attach("a", sae, torch.float32)
    reads = [pc.Features("a", ids=[5, 1]), pc.Capture(pc.attn_out, pc.prompt, pool="max"), pc.logits, *other]
    bound = bind(Program.of((), reads), "run", Prompt([1, 2, 3], lambda: ("", [])), 98, sites, None)
    Admitter(runtime).admit("request", bound)
    one, values = np.ones(1, np.int64), draw.standard_normal((100, vocabulary)).astype(np.float32)
    for first, count in [(0, 3), *((at, 1) for at in range(3, 100))]:
        positions[:count] = range(first, first + count)
        sameness = runtime.begin_step(["request"], 0 * one, first * one, count * one, count)
        assert sameness == ("advanced" if first > 3 else "changed")
        for point in sites.points:
            rows = values[first : first + count, : point.width]
            runtime.apply(point.number, torch.from_numpy(rows[-1:] if point.rows == "sampled" else rows), None)
        runtime.end()
    points = [op.points[0] for op in bound.ops]
    found = runtime.fetch("run", points[0], PROBE)[1][:, :2].numpy()
    assert found == pytest.approx(sae.encode(values[:, :width])[:, [5, 1]], rel=1e-5, abs=1e-5)
    assert runtime.fetch("run", points[1])[1].tolist() == values[None, :3, :width].max(1).tolist()
    assert runtime.fetch("run", points[2])[1].tolist() == values[2:].tolist()
    for point in points[3:]:
        assert runtime.fetch("run", point)[1].tolist() == values[:, :width].tolist()
    features, pooled, logits, whole = 100 * 16, LAYERS * 4 * width, 98 * 4 * vocabulary, 100 * 4 * width
    assert step.drain.bytes == features + pooled + logits + (1 + LAYERS) * whole * bool(other)
    step.close()


def test_without_cuda_results_are_all_that_leaves_a_step():
    """Beside whole rows of other points, in steps that are planned and steps that go on."""
    sites, draw = SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), np.random.default_rng(3)
    runtime = Runtime(sites, Limits(max_programs=2, max_records=512, bank_bytes=1 << 16))
    sae = pc.SAE(*(draw.standard_normal(shape) for shape in ((8, WIDTH), 8, (8, WIDTH), WIDTH)))
    sites.dictionaries["a"] = placed(sae, sites, "a", "resid_post[0]", None, "float32")
    runtime.dictionaries.attach("a", sae, torch.float32)
    captures = [pc.Features("a", top=3), pc.Capture(pc.mlp_out, pc.prompt[1:], pool="mean"), pc.resid_post[1]]
    bound = bind(Program.of((), captures), "run", Prompt(list(range(5)), lambda: ("", [])), 6, sites, None)
    Admitter(runtime).admit("request", bound)
    values, one = draw.standard_normal((10, WIDTH)).astype(np.float32), np.ones(1, np.int64)
    for first, count in [(0, 3), (3, 2), *((at, 1) for at in range(5, 10))]:
        runtime.begin_step(["request"], 0 * one, first * one, count * one, count)
        for point in {point for op in bound.ops for point in op.points}:
            runtime.apply(point, torch.from_numpy(values[first : first + count].copy()), None)
        runtime.end()
    held = sum(chunk.stride * chunk.steps for chunk in runtime.store._chunks.values())
    assert held == 10 * 8 * 3 + 4 * WIDTH * (2 * LAYERS + 10)  # features, pooled rows of two steps, whole rows
    assert runtime.fetch("run", bound.ops[2].points[0])[1].numpy().tolist() == values.tolist()
    for point in bound.ops[1].points:
        assert runtime.fetch("run", point)[1].numpy() == pytest.approx(values[1:5].mean(0)[None], abs=1e-6)
    best = np.sort(sae.encode(values), 1)[:, ::-1][:, :3]
    assert runtime.fetch("run", bound.ops[0].points[0], PROBE)[1][:, :3].numpy() == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("other", [[], [pc.logits], [pc.resid_post, pc.mlp_out, pc.attn_out, pc.embed, pc.logits]])
@pytest.mark.parametrize(
    ("kept", "ring"),
    [(1 << 12, 1 << 13), (1 << 7, 1 << 10), (1 << 8, 1 << 9), (1 << 5, 1 << 9), (0, 1 << 8), (0, 1 << 9)],
)
def test_results_are_right_however_much_a_step_captures(monkeypatch, kept, ring, other):
    """All at once, all but the logits, or tap by tap, where the ring turns around within the step."""
    cuda_on_cpu.stub(monkeypatch)
    sites, draw = SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), np.random.default_rng(3)
    runtime = Runtime(sites, Limits(max_programs=4, max_records=512, bank_bytes=1 << 16))
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, kept, ring, 1 << 15)
    sae = pc.SAE(*(draw.standard_normal(shape) for shape in ((8, WIDTH), 8, (8, WIDTH), WIDTH)))
    sites.dictionaries["a"] = placed(sae, sites, "a", "resid_post[0]", None, "float32")
    runtime.dictionaries.attach("a", sae, torch.float32)
    captures = [pc.Features("a", top=3), pc.Capture(pc.mlp_out[0], pc.prompt, pool="mean"), pc.Capture(pc.logits)]
    programs, admitter, bounds = [captures, other] if other else [captures], Admitter(runtime), []
    names = ["request0", "request1"][: len(programs)]
    for name, capture in zip(names, programs, strict=True):
        prompt = Prompt(list(range(9)), lambda: ("", []))
        bounds.append(bind(Program.of((), capture), f"run of {name}", prompt, 4, sites, None))
        admitter.admit(name, bounds[-1])
    values = draw.standard_normal((len(sites.points), 12, 61)).astype(np.float32)
    for first, count in [(0, 7), (7, 2), (9, 1), (10, 1), (11, 1)]:
        each = np.full(len(names), count)
        positions[: count * len(names)] = [*range(first, first + count)] * len(names)
        tokens = dict.fromkeys(names, count)
        fits = runtime.captures_at_most(tokens, int(each.sum()), step.max_graph_bytes)
        runtime.begin_step(names, np.cumsum(each) - each, np.full_like(each, first), each, int(each.sum()))
        for point in sorted(sites.points, key=lambda point: point.rows == "sampled"):
            rows = values[point.number, first : first + count, : point.width]
            rows = torch.from_numpy(np.concatenate([rows[-1:] if point.rows == "sampled" else rows] * len(names)))
            if fits and count == 1 and point.rows != "sampled":
                cuda_on_cpu.graph(step, point.number, rows)
            else:
                runtime.apply(point.number, rows, None)
        runtime.end()
    points = [op.points[0] for op in bounds[0].ops]
    where, found = runtime.fetch("run of request0", points[0], PROBE)
    assert where.tolist() == list(range(12))
    best = np.sort(sae.encode(values[points[0], :, :WIDTH]), 1)[:, ::-1][:, :3]
    assert found[:, :3].numpy() == pytest.approx(best, rel=1e-5, abs=1e-5)
    where, found = runtime.fetch("run of request0", points[1])
    assert where.tolist() == [8]
    assert found.numpy() == pytest.approx(values[points[1], :9, :WIDTH].mean(0)[None], rel=1e-5, abs=1e-6)
    where, found = runtime.fetch("run of request0", points[2])
    assert (where.tolist(), found.tolist()) == ([8, 9, 10, 11], values[points[2], 8:].tolist())
    for point in {point for bound in bounds[1:] for op in bound.ops for point in op.points}:
        where, found = runtime.fetch("run of request1", point)
        assert found.tolist() == values[point, where, : found.shape[1]].tolist()
        assert len(where) == (4 if found.shape[1] == 61 else 12)
    step.close()


def test_an_encoder_that_fails_fails_the_programs_that_read_it_alone(monkeypatch):
    cuda_on_cpu.stub(monkeypatch)
    sites, draw = SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), np.random.default_rng(3)
    runtime = Runtime(sites, Limits(max_programs=2, max_records=512, bank_bytes=1 << 16))
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, 1 << 12, 1 << 13, 1 << 15)
    sae = pc.SAE(*(draw.standard_normal(shape) for shape in ((8, WIDTH), 8, (8, WIDTH), WIDTH)))
    sites.dictionaries["a"] = placed(sae, sites, "a", "resid_post[0]", None, "float32")
    runtime.dictionaries.attach("a", sae, torch.float32)

    def read(self: Reading, rows: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Reading, "read", read)
    admitter, names = Admitter(runtime), ["reads", "captures"]
    for name, capture in zip(names, (pc.Features("a", top=2), pc.resid_post[0]), strict=True):
        prompt = Prompt([1, 2, 3], lambda: ("", []))
        admitter.admit(name, bind(Program.of((), [capture]), name, prompt, 2, sites, None))
    positions[:6] = [0, 1, 2] * 2
    runtime.begin_step(names, np.array([0, 3]), np.zeros(2, np.int64), np.full(2, 3), 6)
    rows = draw.standard_normal((6, WIDTH)).astype(np.float32)
    for point in sites.points:
        runtime.apply(point.number, torch.from_numpy(rows[[2, 5]] if point.rows == "sampled" else rows), None)
    runtime.end()
    (_, error), (_, none) = map(runtime.outcome, names)
    assert error is not None
    assert "no memory" in str(error)
    assert none is None
    assert runtime.fetch("captures", sites.resolve(pc.resid_post[0])[0].point)[1].tolist() == rows[3:].tolist()
    step.close()


@pytest.mark.parametrize("counts", [[1], [5, 1, 40], [700, 513], [2000], [1] * 300])
def test_ranges_of_any_length_are_pooled(counts):
    rows = np.random.default_rng(len(counts)).standard_normal((sum(counts), 3)).astype(np.float32)
    ends = np.cumsum(counts)
    for pool, of in (("mean", lambda part: part.sum(0, dtype=np.float64)), ("max", lambda part: part.max(0))):
        found = host_step._pool(torch.from_numpy(rows), np.array(counts), POOLS.index(pool) + 1)
        expected = [of(rows[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        assert (found.dtype, found.numpy()) == (torch.float32, pytest.approx(np.float32(expected), rel=1e-6))


def test_an_eager_step_that_a_graph_goes_on_with_keeps_points_of_equal_bytes_apart(monkeypatch):
    """A prompt of one token is an eager step, whose plan the first decode step, a graph, goes on with; then what is left
    comes in another order: the logits, of 6 bf16 numbers and so of as many bytes as 4 fp32 ones, before the rest."""
    cuda_on_cpu.stub(monkeypatch)
    runtime = Runtime(
        SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 6)), Limits(max_programs=2, max_records=512, bank_bytes=1 << 16)
    )
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, 1 << 12, 1 << 13, 1 << 15)
    program = Program.of((), [pc.Capture(pc.final_norm), pc.Capture(pc.logits, dtype="bfloat16")])
    Admitter(runtime).admit("request", bind(program, "run", Prompt([1], lambda: ("", [])), 9, runtime.sites, None))
    one = np.ones(1, np.int64)
    for at in range(4):
        positions[0] = at
        sameness = runtime.begin_step(["request"], 0 * one, at * one, one, 1)
        assert sameness == ("advanced" if at else "changed")
        for point in runtime.sites.points:
            row = torch.full((1, point.width), 4.0 * point.number + at)
            if at and point.rows != "sampled":
                cuda_on_cpu.graph(step, point.number, row)
            else:
                runtime.apply(point.number, row, None)
        runtime.end()
    for point in runtime.sites.points[-2:]:
        where, rows = runtime.fetch("run", point.number)
        assert where.tolist() == [0, 1, 2, 3]
        assert rows.float().tolist() == [[4.0 * point.number + at] * point.width for at in range(4)]
    step.close()


def test_a_chunk_that_a_release_made_smaller_gets_no_further_steps(monkeypatch):
    """Runs are released while they still have their slots; the run that stays has its own rows alone."""
    cuda_on_cpu.stub(monkeypatch)
    runtime = Runtime(
        SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), Limits(max_programs=4, max_records=512, bank_bytes=1 << 16)
    )
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, 1 << 12, 1 << 13, 1 << 15)
    admitter = Admitter(runtime)
    names, three = ["request0", "request1", "request2"], np.arange(3)
    for i, name in enumerate(names):
        program = Program.of((), [pc.Capture(pc.resid_post)])
        admitter.admit(name, bind(program, f"run{i}", Prompt([1], lambda: ("", [])), 60, runtime.sites, None))
    for at in range(8):
        positions[:3] = at
        runtime.begin_step(names, three, np.full(3, at), np.ones(3, np.int64), 3)
        for point in runtime.sites.points[:-1]:
            cuda_on_cpu.graph(
                step, point.number, torch.from_numpy(100.0 * three + at)[:, None].expand(3, WIDTH).float()
            )
        runtime.end()
        if at == 3:
            step.flush()
            runtime.release(["run0", "run1"])
    for place in runtime.sites.resolve(pc.resid_post):
        where, rows = runtime.fetch("run2", place.point)
        assert where.tolist() == list(range(8))
        assert rows[:, 0].tolist() == [200.0 + at for at in range(8)]
    step.close()


def test_what_is_released_is_not_held_by_the_last_step(monkeypatch):
    cuda_on_cpu.stub(monkeypatch)
    # chunks of other tests are held here, so that no new chunk has the id of one
    earlier = [chunk for chunk in gc.get_objects() if type(chunk) is CaptureChunk]
    earlier_ids = set(map(id, earlier))
    runtime = Runtime(
        SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), Limits(max_programs=2, max_records=512, bank_bytes=1 << 16)
    )
    step, positions = cuda_on_cpu.on_cpu(runtime, ROWS, 16, 1 << 12, 1 << 13, 1 << 15)
    program = Program.of((), [pc.Capture(pc.resid_post)])
    Admitter(runtime).admit("request", bind(program, "run", Prompt([1], lambda: ("", [])), 60, runtime.sites, None))
    for at in range(40):
        position = np.array([at], np.int32)
        positions[0] = at
        one = np.ones(1, np.int64)
        runtime.begin_step(["request"], 0 * one, position, one, 1)
        for point in runtime.sites.points[:-1]:
            cuda_on_cpu.graph(step, point.number, torch.zeros(1, WIDTH))
        runtime.end()
    step.flush()
    chunks = [chunk for chunk in gc.get_objects() if type(chunk) is CaptureChunk and id(chunk) not in earlier_ids]
    blocks = [weakref.ref(place.block) for chunk in chunks for place in chunk.places]
    del chunks
    assert len(blocks) > 0
    assert all(block() is not None for block in blocks)
    runtime.free(["request"])
    runtime.release(["run"])
    assert all(block() is None for block in blocks)
    step.close()


def test_device_tables_equal_the_hosts_after_every_change(monkeypatch):
    cuda_on_cpu.stub(monkeypatch)
    assert tables.check("cpu", 300, lambda: None) == (300, [])


def test_stages_agree_which_steps_are_active():
    """Wherever a program acts: code with taps may differ from stock's in the last bits, for batchmates too."""
    vector = pc.Add([1.0] * WIDTH, at=pc.resid_post[0], tokens=pc.prompt[1:3])
    for taps in (slice(None), slice(0, 6), slice(6, None)):  # the whole model, and stages with and without layer 0
        runtime = Runtime(
            SiteMap(LLAMA, Sizes(LAYERS, WIDTH, 61)), Limits(max_programs=4, max_records=512, bank_bytes=1 << 16)
        )
        runtime.has_tap[:] = False
        runtime.has_tap[taps] = True
        program = bind(Program.of([vector], ()), "run", Prompt([1] * 5, lambda: ("", [])), 9, runtime.sites, None)
        vectors = {key: torch.ones(1, WIDTH) for op in program.ops for key in op.values}
        Admitter(runtime).admit("request", program, vectors)
        assert [runtime.steps_left([("request", at)]) for at in (0, 2, 3)] == [3, 1, 0]
