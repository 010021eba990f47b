"""The scores beside the KV cache, under a scheduler that does anything it may: a plain dictionary says what each token's
score is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.engines.vllm.compat.core import _blocks_of
from patchclamp.engines.vllm.monitors import Choices, MonitorLog, SlotScores, parse_monitor
from patchclamp.errors import PatchclampError
from patchclamp.language import Vector

BLOCK, BLOCKS, LENGTH, K = 4, 64, 60, 3


def products(request: str, positions: range) -> np.ndarray:
    """The products of a request's tokens, all different."""
    seed = int(request.partition(".")[0])
    return np.array(
        [[seed * 1000 + position + column / 10 for column in range(K)] for position in positions], np.float32
    )


class Scheduler:
    """Draws steps of requests `number` or, for one that begins like another, `number.n`, and applies them."""

    def __init__(self, rng: np.random.Generator, is_v2: bool, in_order: bool) -> None:
        self.rng, self.is_v2, self.in_order = rng, is_v2, in_order
        self.scores = SlotScores(K, BLOCKS, BLOCK, LENGTH)
        self.log = MonitorLog(())
        self.log._columns = K
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # tokens, by running request
        self.waiting: dict[str, int] = {}  # preempted
        self.free = rng.permutation(np.arange(1, BLOCKS)).tolist()
        self.under_way: list = []
        self.sent: dict[str, int] = {}
        self.kept: dict[str, Choices] = {}

    def step(self) -> None:
        """Schedule a step, of new, preempted and running requests."""
        rng, running, resumed, new = self.rng, [], [], []
        for name in list(self.computed):
            if rng.random() < 0.1:  # preempt it
                self.waiting[name] = self.computed.pop(name)
                self.free += self.blocks.pop(name)
        if self.waiting and rng.random() < 0.5:
            name = next(iter(self.waiting))
            del self.waiting[name]
            resumed.append(name)
        if rng.random() < 0.6:
            new.append(str(len(self.sent) + 1))
            self.sent[new[-1]] = 0
            self.log.runs[new[-1]] = self.kept[new[-1]] = Choices()
        counts, new_blocks = {}, {}
        for name in [*self.computed, *resumed, *new]:
            before = self.computed.get(name, 0)
            count = min(int(rng.integers(1, 12)) if rng.random() < 0.4 else 1, LENGTH - before)
            held = self.blocks.setdefault(name, [])
            need = -(-(before + count) // BLOCK) - len(held)
            if count < 1 or need > len(self.free):
                if name in resumed + new:
                    self.waiting[name] = 0
                continue
            added = [self.free.pop() for _ in range(need)]
            held += added
            counts[name], new_blocks[name] = count, added
        for name in counts:
            running += [name] if name in self.computed else []
        begins = [name for name in resumed if name in counts]
        as_new = [name for name in new if name in counts] + (begins if self.is_v2 else [])
        listed = running + ([] if self.is_v2 else begins)
        listed = [name for name in listed if name in counts]

        def both(ids: list[int]) -> tuple[list[int], list[int]]:
            return [0], ids

        step: Any = SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=listed, resumed_req_ids=set() if self.is_v2 else set(begins),
                num_computed_tokens=[self.computed.get(name, 0) for name in listed],
                new_block_ids=[both(list(self.blocks[name]) if name in begins else new_blocks[name])
                               if new_blocks[name] else None for name in listed],
            ),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=both(list(self.blocks[name])), num_computed_tokens=0)
                                for name in as_new],
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
        )  # fmt: skip
        self.scores.scheduled(id(step), *_blocks_of(step, 1))
        rows = list(counts) if self.in_order else [list(counts)[i] for i in rng.permutation(len(counts))]
        values = [products(name, range(start := self.computed.get(name, 0), start + counts[name])) for name in rows]
        self.under_way.append((step, np.concatenate(values) if values else np.zeros((0, K)), rows))
        for name, count in counts.items():
            self.computed[name] = self.computed.get(name, 0) + count

    def end(self) -> list:
        """End the oldest step. Returns the outputs of its requests; some have ended."""
        step, values, rows = self.under_way.pop(0)
        self.scores.computed(id(step), values if len(rows) else None, rows, {})
        ended = {name for name in rows if name in self.computed and self.rng.random() < 0.05}
        outputs = [SimpleNamespace(request_id=name, finish_reason="stop" if name in ended else None)
                   for name in step.num_scheduled_tokens]  # fmt: skip
        for name in ended:
            self.scores.end(name, self.computed[name])
        taken = self.scores.take_all(outputs)
        self.scores.forget_ended()
        for name in ended:
            del self.computed[name]
            self.free += self.blocks.pop(name)
        return [outputs, taken]


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_sent_once_with_its_own_score(seed):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(rng, is_v2=seed % 2 == 1, in_order=seed % 3 > 0)
    late: list = []
    for _ in range(120):
        scheduler.step()
        if len(scheduler.under_way) <= rng.integers(0, 3):
            continue
        outputs, taken = scheduler.end()
        held = [output for output in outputs if rng.random() < 0.2]  # wait for verdicts
        now, late = late + [output for output in outputs if output not in held], held
        message = scheduler.scores.message(now, taken)
        assert bool(message) == bool(now)
        if message:
            scheduler.log.arrived(message)
            names = [output.request_id for output in now]
            middle = int(rng.integers(0, len(names) + 1))  # a server reads a long message in parts
            for part in (names[:middle], names[middle:]):
                if part:
                    scheduler.log.file(part, lambda name: (name, 0))
    found = {name: choices[0].products() for name, choices in scheduler.log.runs.items() if choices}
    assert len(found) > 20
    assert max(map(len, found.values())) > 30
    for name, rows in found.items():
        np.testing.assert_array_equal(rows, products(name, range(len(rows))))


def test_news_are_what_came_since_the_last_call():
    log = MonitorLog(())
    log._columns, kept = K, Choices()
    log.runs["1"] = kept
    scores = SlotScores(K, BLOCKS, BLOCK, LENGTH)
    rng, told, position = np.random.default_rng(0), [], 0
    for i in range(30):
        count = 5 if i in (0, 11) else 1
        step: Any = SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(req_ids=["1"] if i else [], resumed_req_ids=set(), new_block_ids=[None] * (i > 0),
                                                  num_computed_tokens=[position] * (i > 0)),
            scheduled_new_reqs=[] if i else [SimpleNamespace(req_id="1", block_ids=([0], list(range(1, 12))), num_computed_tokens=0)],
            num_scheduled_tokens={"1": count}, total_num_scheduled_tokens=count,
        )  # fmt: skip
        scores.scheduled(id(step), *_blocks_of(step, 1))
        scores.computed(id(step), products("1", range(position, position + count)), ["1"], {})
        position += count
        output = SimpleNamespace(request_id="1", finish_reason=None)
        log.arrived(scores.message([output], scores.take_all([output])))
        log.file(["1"], lambda name: (name, 0))
        if rng.random() < 0.5:
            told.append(log.runs["1"][0].news())
    told.append(log.runs["1"][0].news())
    assert [first for first, _ in told] == np.cumsum([0, *(len(rows) for _, rows in told[:-1])]).tolist()
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in told]), products("1", range(position)))
    assert len(log.runs["1"][0].news()[1]) == 0


def test_a_step_whose_scores_are_lost_leaves_none_of_others():
    scores = SlotScores(K, BLOCKS, BLOCK, LENGTH)
    scores.by_slot[:] = 5.0
    step: Any = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]),
        scheduled_new_reqs=[SimpleNamespace(req_id="1", block_ids=([3],), num_computed_tokens=0)],
        num_scheduled_tokens={"1": 3}, total_num_scheduled_tokens=3,
    )  # fmt: skip
    scores.scheduled(id(step), *_blocks_of(step, 0))
    scores.computed(id(step), None, ["1"], {})
    output = SimpleNamespace(request_id="1", finish_reason="stop")
    taken = scores.take_all([output])
    assert taken.counts.tolist() == [3]
    assert np.isnan(taken.products).all()


def test_outputs_from_outside_a_step_have_no_scores():
    """The core aborts and refuses requests with messages of its own, which carry no scores."""
    log, kept, watched = MonitorLog(()), {name: Choices() for name in "ab"}, []
    log._columns, log.watch = K, lambda *told: watched.append(told)
    log.runs.update(kept)
    rows = products("1", range(4))
    log.arrived([np.array([0, 0]).tobytes(), np.array([3, 1]).tobytes(), rows.tobytes()])
    log.file(["a", "b"], lambda name: (name, 0))
    for names in (["a"], ["b", "a"], ["a", "b", "c"]):
        log.file(names, lambda name: (name, 0))
    assert len(watched) == 1
    np.testing.assert_array_equal(kept["a"][0].products(), rows[:3])
    assert [len(kept[name][0].news()[1]) for name in "ab"] == [3, 1]


def test_words_name_a_probe_its_file_and_its_site(tmp_path):
    saved = pc.Probe([[1.0, 2.0]], pc.resid_post[0], bias=[3.0], activation="sigmoid", name="x")
    file = tmp_path / "a@b=c.safetensors"
    saved.save(file)
    probe, threshold = parse_monitor(f"lies={file}@resid_post[20]>0.5")
    assert (probe.name, probe.at, probe.activation, threshold) == ("lies", pc.resid_post[20], "sigmoid", 0.5)
    assert isinstance(probe.weight, Vector)
    assert probe.weight.rows().tolist() == [[1.0, 2.0]]
    assert parse_monitor(f"lies={file}@mlp_out[1:3]")[1] is None
    for words in ("lies", f"lies={file}", f"lies={file}@resid_post[20]>x", f"={file}@resid_post[1]", f"lies={file}@nowhere[1]",
                  "lies=missing.safetensors@resid_post[1]", f"lies={file}@resid_post[20]>nan"):  # fmt: skip
        with pytest.raises((PatchclampError, OSError)):
            parse_monitor(words)
