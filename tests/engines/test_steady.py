"""What a worker remembers of a batch that goes on is what it would have found by looking."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest

import patchclamp as pc
from patchclamp.engines.vllm import worker
from patchclamp.engines.vllm.compat.configuration import KEY
from patchclamp.plan import Prompt, bind
from patchclamp.runtime import Limits, Runtime
from patchclamp.sites import SiteMap
from patchclamp.sites.map import Sizes
from patchclamp.spec import Program
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
    None,
)


class Side:
    """A worker's bookkeeping, without a model runner; `looks`: it forgets what it remembers before every step."""

    def __init__(self, looks: bool) -> None:
        self.looks = looks
        limits = Limits(max_programs=32, max_records=1 << 12, bank_bytes=1 << 16)
        runtime = Runtime(SiteMap(LLAMA, Sizes(4, WIDTH, 61)), limits)
        self.worker = worker.Attached.__new__(worker.Attached)
        vars(self.worker).update(
            runtime=runtime, _preemptions=0, _total=0, _most_kept=4 * 4 * WIDTH * 3, _active=False, _awaits_logits=False,
            _steady=None, _run_of=msgspec.msgpack.Decoder(worker._Head).decode,
        )  # fmt: skip

    def seat(self, name: str, program: Program, prompt: int) -> bytes:
        code: dict = {}
        bound = bind(
            program, name, Prompt([1] * prompt, lambda: ("", [])), 50, self.worker.runtime.sites, None, code=code
        )
        self.worker.runtime.reserve(bound)
        return msgspec.msgpack.encode(bound)

    def before(self, output: SimpleNamespace) -> tuple[tuple[bool, bool], bool]:
        """What `before` says, and whether it was remembered."""
        if self.looks:
            self.worker._steady = None
        remembered = self.worker._steady
        said = self.worker.before(output)
        return said, remembered is not None and self.worker._steady is remembered


@pytest.mark.parametrize("seed", range(8))
def test_what_is_remembered_is_what_would_be_found(seed):
    rng, sides = random.Random(seed), (Side(looks=False), Side(looks=True))
    running: dict[str, list[int]] = {}  # by name: the next position, tokens of the prompt
    paused: dict[str, list[int]] = {}
    told, count, gone = 0, 0, set()
    for _ in range(400):
        fresh, lost, back = [], set(), set()
        if rng.random() < 0.06 and len(running) + len(paused) < 12:
            count += 1
            name, program, prompt = f"request{count}", rng.choice(PROGRAMS), rng.choice([1, 1, 3, 6])
            carried = [None if program is None else side.seat(name, program, prompt) for side in sides]
            extra = {} if program is None else {KEY: carried[0]}
            params = SimpleNamespace(extra_args=extra)
            fresh.append(SimpleNamespace(req_id=name, num_computed_tokens=0, sampling_params=params))
        if rng.random() < 0.03 and running:
            name = rng.choice(sorted(running))
            paused[name] = running.pop(name)
            lost.add(name)
        if rng.random() < 0.1 and paused and not lost:
            name = rng.choice(sorted(paused))
            running[name] = [0, paused.pop(name)[0] + 1]  # computed anew from the beginning
            back.add(name)
        tokens = {name: (prompt - at if at < prompt else 1) for name, (at, prompt) in running.items()}
        tokens |= {new.req_id: prompt for new in fresh}
        output = SimpleNamespace(
            finished_req_ids=gone, scheduled_new_reqs=fresh, num_scheduled_tokens=tokens, preempted_req_ids=lost or None,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(running), num_computed_tokens=[at for at, _ in running.values()], resumed_req_ids=back
            ),
        )  # fmt: skip
        (said, remembered), (found, _) = (side.before(output) for side in sides)
        assert said == found
        told, gone = told + remembered, set()
        for name in running:
            running[name][0] += tokens[name]
        for new in fresh:
            running[new.req_id] = [tokens[new.req_id], tokens[new.req_id]]
        if running and rng.random() < 0.05:  # aborted: its steps go on for a while
            ended = rng.choice(sorted(running))
            for side in sides:
                side.worker.do_finish([ended], [])
        for name in [name for name in running if rng.random() < 0.02]:
            del running[name]
            gone.add(name)
            if rng.random() < 0.5:  # before the next step, or with it
                for side in sides:
                    side.worker.do_finish([name], [])
    assert told > 50
    assert sides[0].worker._preemptions == sides[1].worker._preemptions
