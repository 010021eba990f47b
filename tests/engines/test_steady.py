"""What a worker remembers of a batch that goes on is what it would have found by looking."""

from __future__ import annotations

import collections
import functools
import random
from types import SimpleNamespace

import msgspec
import pytest

import patchclamp as pc
from patchclamp.engines.base import Carried
from patchclamp.engines.vllm import shared, worker
from patchclamp.engines.vllm.admission import InstallOrder, Orders
from patchclamp.language import Program
from patchclamp.plan import Prompt, bind
from patchclamp.plan.room import Room, bank_sizes
from patchclamp.plan.table import record_count
from patchclamp.runtime import Limits, Runtime
from patchclamp.sites import SiteMap
from patchclamp.sites.map import Sizes
from tests.unit.test_cuda_step import LLAMA, WIDTH

PROGRAMS = (
    Program.of((), [pc.Capture(pc.resid_post)]),
    Program.of([pc.Scale(2.0, at=pc.resid_post[0], tokens=pc.prompt[:2])], ()),
    Program.of([pc.Scale(2.0, at=pc.resid_post[0], tokens=pc.generated[2:5])], ()),
    Program.of(
        [
            pc.Apply(lambda rows, **_: rows, at=pc.resid_post[1], tokens=pc.generated[:3]),
            pc.Scale(2.0, at=pc.resid_post[0], tokens=pc.generated[:9]),
        ],
        (),
    ),
    Program.of([pc.Add([1.0] * WIDTH, at=pc.resid_post[0], tokens=pc.prompt[:2])], ()),  # of a vector that never comes
    None,
)
LIMITS = Limits(max_programs=32, max_records=1 << 12, bank_bytes=1 << 16)


class Side:
    """A worker's bookkeeping, without a model runner; `looks`: it looks at every step."""

    def __init__(self, looks: bool) -> None:
        self.looks = looks
        runtime = Runtime(SiteMap(LLAMA, Sizes(4, WIDTH, 61)), LIMITS)
        self.worker = worker.Attached.__new__(worker.Attached)
        vars(self.worker).update(
            runtime=runtime, _sender=shared.CaptureSender(), _preemptions=0, _total=0, _active=False, _awaits_logits=False, _settled=set(),
            _most_kept=4 * 4 * WIDTH,  # a token of one program that captures
            _uniform=False, _most_ahead=0, _steps=[0, 0],
        )  # fmt: skip

    def before(self, output: SimpleNamespace) -> tuple[tuple[bool, bool], bool]:
        """What `before` says, and whether it was remembered."""
        if self.looks:
            return self.worker._look(output)[0], False
        looked, look = [], self.worker._look
        self.worker._look = lambda output: looked.append(1) or look(output)
        said = self.worker.before(output)
        del self.worker._look
        return said, bool(len(self.worker.runtime)) and not looked


class Scheduler:
    """Steps of requests that come, go, wait, are thrown out and come back: like a V1 runner's, as requests that are
    known, or like a V2 runner's, as new ones. Prompts come in chunks, and sometimes not everybody has a turn."""

    def __init__(self, seed: int, sides: tuple[Side, Side]) -> None:
        self.rng, self.sides = random.Random(seed), sides
        self.budget, self.as_new, self.in_turns = self.rng.choice([3, 6, 100]), seed % 2 == 0, seed % 4 == 1
        self.running: dict[str, list[int]] = {}  # the next position, and of how many tokens more is known
        self.waiting: dict[str, tuple[int, bool]] = {}  # tokens to compute, and whether it never ran
        self.room = Room(LIMITS.max_programs, LIMITS.max_records, LIMITS.bank_bytes // 4)
        self.placements: dict = {}
        self.admitted: list[InstallOrder] = []  # since the last step
        self.gone: set[str] = set()
        self.count = 0

    def come(self) -> None:
        self.count += 1
        name, program, prompt = f"request{self.count}", self.rng.choice(PROGRAMS), self.rng.choice([1, 1, 3, 6, 9])
        self.waiting[name] = prompt, True
        if program is not None:
            self.admit(name, program, prompt)

    def admit(self, name: str, program: Program, prompt: int) -> None:
        sites, code, vectors = self.sides[0].worker.runtime.sites, {}, {}
        bound = bind(program, name, Prompt([1] * prompt, lambda: ("", [])), 50, sites, None, vectors=vectors, code=code)
        for side in self.sides:
            side.worker.do_hold_code(name, code)
        sizes = bank_sizes(bound, vectors, sites, lambda *_: 0)
        self.placements[name] = self.room.place(record_count(bound.ops), sizes)
        carried = msgspec.msgpack.encode(Carried(bound, sizes))
        self.admitted.append(InstallOrder(name, carried, self.placements[name]))

    def end(self, name: str) -> None:
        """A request ends; workers are asked about it if it was not aborted."""
        self.gone.add(name)
        if name in self.placements:
            self.room.free(self.placements.pop(name))
            if self.rng.random() < 0.5:
                for side in self.sides:
                    side.worker.do_settle([name], [name])

    def throw_out(self, names: list[str]) -> None:
        for name in names:
            at, known = self.running.pop(name)
            self.waiting[name] = max(at, known), False

    def step(self, number: int) -> SimpleNamespace:
        """What the scheduler tells of a step."""
        rng, fresh, back, told, tokens, cached = self.rng, [], set(), set(), {}, {}
        if rng.random() < 0.05 and len(self.running) + len(self.waiting) < 10:
            self.come()
        at_once = rng.random() < 0.02  # all are thrown out, and come back in the same step
        lost = (
            list(self.running)
            if at_once
            else rng.sample(list(self.running), k=rng.random() < 0.03 and bool(self.running))
        )
        self.throw_out(lost)
        told = {name for name in lost if not at_once or rng.random() < 0.5}
        left = self.budget
        for i, (name, (at, known)) in enumerate(self.running.items()):
            count = min(max(known - at, 1), left)
            if count and not (self.in_turns and (i + number) % 2):
                tokens[name], cached[name], left = count, at, left - count
        for name in sorted(self.waiting):
            if left and (at_once or rng.random() < 0.3):
                (known, first), now = self.waiting.pop(name), 0
                self.running[name] = [now, known]
                tokens[name] = count = min(known, left)
                left -= count
                if first or self.as_new:
                    fresh.append(SimpleNamespace(req_id=name, num_computed_tokens=0))
                else:
                    cached[name] = now
                    back.add(name)
        output = SimpleNamespace(
            finished_req_ids=self.gone, scheduled_new_reqs=fresh, num_scheduled_tokens=tokens, preempted_req_ids=told or None,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached), num_computed_tokens=list(cached.values()), resumed_req_ids=back
            ),
        )  # fmt: skip
        if self.admitted:
            output.patchclamp = Orders([], self.admitted, {})
        self.gone, self.admitted = set(), []
        for name, count in tokens.items():
            self.running[name][0] += count
        return output

    def go(self) -> None:
        """Between steps: requests end, and some are aborted before their first one."""
        for name in [name for name in self.running if self.rng.random() < 0.02]:
            del self.running[name]
            self.end(name)
        for name in [name for name in self.waiting if self.rng.random() < 0.05]:
            del self.waiting[name]
            self.end(name)


SEEDS = range(24)


@functools.cache
def remembered(seed: int) -> collections.Counter:
    """How often each answer was remembered in some hundred steps; every answer is compared with what looking finds."""
    sides = Side(looks=False), Side(looks=True)
    scheduler, told = Scheduler(seed, sides), collections.Counter()
    for number in range(300):
        output = scheduler.step(number)
        (said, known), (found, _) = (side.before(output) for side in sides)
        assert said == found
        for name in ("_active", "_preemptions", *["_total"] * said[0]):
            assert getattr(sides[0].worker, name) == getattr(sides[1].worker, name), name
        runtimes = [side.worker.runtime for side in sides]
        assert runtimes[0]._errors == runtimes[1]._errors
        assert runtimes[0]._admitted == runtimes[1]._admitted
        assert set(runtimes[0]._admitted) == set(scheduler.placements) - {one.request for one in scheduler.admitted}
        told["errors"] += len(runtimes[0]._errors)
        told[said] += known
        scheduler.go()
    return told


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_remembered_is_what_would_be_found(seed):
    remembered(seed)  # asserts at every step


def test_every_answer_of_a_step_with_programs_is_remembered():
    told = sum(map(remembered, SEEDS), collections.Counter())
    assert all(told[answer] > 20 for answer in ((True, True), (True, False))), told
    assert told["errors"] > 0, "every program was installed"
