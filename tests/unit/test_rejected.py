"""Decisions of drafted tokens that are rejected: conditions of every scope act as if only accepted tokens had been
computed, whatever else happens to a request, on the host's executor and on the one for CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines.vllm.compat.core import _check_latches
from patchclamp.errors import UnsupportedSite
from patchclamp.kernels import reference
from patchclamp.kernels.cuda import RECORD_WORDS
from patchclamp.language import Program
from patchclamp.plan import CAPTURE, BoundProgram, Prompt, bind
from patchclamp.plan.bound import SPAN
from patchclamp.plan.step import RowLabels
from patchclamp.plan.table import RECORD, ProgramTable
from patchclamp.runtime import Limits, Runtime, cuda_step
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from tests.reference import cuda_on_cpu
from tests.reference.admitting import Admitter

WIDTH, PROMPT, MOST, DRAFTS = 4, 5, 40, 3
SITES = SiteMap(LLAMA, Sizes(2, WIDTH, 61))
[READ], [EDITED] = (SITES.resolve(pc.resid_post[layer]) for layer in (0, 1))
SCOPES = ("token", "prompt", "onwards")


class _Kernel:
    """The reference kernel, which reads and writes the latches and bits of the device's tables."""

    RECORD_WORDS = RECORD_WORDS

    @staticmethod
    def site(tables: Any, point: int, hidden: torch.Tensor, *others: Any) -> None:
        table, rows = tables.table, len(hidden)
        labels = RowLabels(tables.slot_of_row[:rows], tables.position_of_row[:rows], tables.rank_of_row[:rows])
        seen = SimpleNamespace(
            first=table.first, records=table.records, latches=tables.latches.reshape(len(table.first), -1)
        )
        empty = SimpleNamespace(layout=table.captures.layout())
        reference.apply(
            hidden.numpy(),
            labels,
            point,
            seen,
            empty,
            tables.bank.numpy(),
            np.zeros(0),
            None,
            None,
            tables.bits_of_row.numpy(),
        )


def bound_of(
    scope: str, run: str = "run", tokens: pc.Tokens = pc.every, vectors: dict | None = None, **changed: Any
) -> BoundProgram:
    """A program that adds 1 where its probe, the first number of a row, is above 0."""
    probe = pc.Probe(np.eye(WIDTH, dtype=np.float32)[0], at=pc.resid_post[0], tokens=tokens, name="p")
    edit = pc.Add(np.ones(WIDTH, np.float32), at=changed.get("at", pc.resid_post[1]))
    prompt = Prompt(list(range(PROMPT)), lambda: ("", []))
    program = Program.of([pc.When(probe > 0, edit, scope=scope)])
    bound = bind(program, run, prompt, MOST, SITES, None, vectors={} if vectors is None else vectors)
    return msgspec.structs.replace(bound, ops=tuple(op for op in bound.ops if op.kind != CAPTURE))


class Engine:
    """A runtime, and requests by name: where each is, and whether the condition holds at its accepted tokens."""

    def __init__(self, on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime = Runtime(SITES, Limits(max_programs=4, max_records=512, bank_bytes=1 << 16))
        self.positions = np.zeros(64, np.int64)
        if on_cuda:
            cuda_on_cpu.stub(monkeypatch)
            monkeypatch.setattr(cuda_step, "cuda", _Kernel)
            _, self.positions = cuda_on_cpu.on_cpu(self.runtime, 64, 16, 1 << 12, 1 << 13, 1 << 15)
        self.admitter, self.at, self.held, self.scope = Admitter(self.runtime), {}, {}, {}

    def admit(self, name: str, scope: str) -> None:
        vectors: dict[str, np.ndarray] = {}
        bound = bound_of(scope, name, vectors=vectors)
        self.admitter.admit(name, bound, {key: torch.tensor(rows) for key, rows in vectors.items()})
        self.at[name], self.held[name], self.scope[name] = 0, [], scope

    def acts(self, name: str, position: int) -> bool:
        held, last = self.held[name], PROMPT - 1
        if self.scope[name] == "token":
            return held[position]
        return position >= last and held[last] if self.scope[name] == "prompt" else any(held[: position + 1])

    def step(self, rows: dict[str, list[bool]], drafts: dict[str, int], accepted: dict[str, int]) -> None:
        """Compute rows of requests, by name: whether the condition holds at each. `drafts` of the last ones are drafts,
        and `accepted` of these are right. Checks where edits act among rows that are no rejected drafts."""
        names, count = list(rows), np.array([len(held) for held in rows.values()])
        first, begin = np.array([self.at[name] for name in names]), np.cumsum(count) - count
        samples = np.array([1 + drafts.get(name, 0) for name in names]) if drafts else None
        every = np.concatenate([np.arange(a, a + n) for a, n in zip(first, count, strict=True)])
        self.positions[: len(every)] = every
        self.runtime.begin_step(names, begin, first, count, len(every), samples)
        stream = torch.zeros(len(every), WIDTH)
        stream[:, 0] = torch.tensor(np.where(np.concatenate(list(rows.values())), 1.0, -1.0))
        edited = torch.zeros(len(every), WIDTH)
        self.runtime.apply(READ.point, stream, None)
        self.runtime.apply(EDITED.point, edited, None)
        self.runtime.end()
        for name, a in zip(names, begin.tolist(), strict=True):
            kept = len(rows[name]) - drafts.get(name, 0) + accepted.get(name, 0)
            at, self.at[name] = self.at[name], self.at[name] + kept
            self.held[name][at:] = [*rows[name][:kept], *self.held[name][at + kept :]]
            found = [bool(row[0]) for row in edited[a : a + kept]]
            assert found == [self.acts(name, position) for position in range(at, at + kept)], (name, at)


@pytest.fixture(params=["host", "cuda"])
def engine(request, monkeypatch) -> Engine:
    return Engine(request.param == "cuda", monkeypatch)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
@pytest.mark.parametrize("fires", range(DRAFTS + 1))
def test_a_decision_is_undone_if_its_draft_was_rejected(engine, scope, accepted, fires):
    engine.admit("a", scope)
    engine.step({"a": [False] * PROMPT}, {}, {})
    engine.step({"a": [row == fires for row in range(DRAFTS + 1)]}, {"a": DRAFTS}, {"a": accepted})
    engine.step({"a": [False, False, True, False]}, {"a": DRAFTS}, {"a": DRAFTS})
    engine.step({"a": [False]}, {}, {})
    engine.step({"a": [False]}, {}, {})


def test_it_would_not_be_otherwise(engine, monkeypatch):
    keep = ProgramTable.unsettled
    monkeypatch.setattr(ProgramTable, "unsettled", lambda *args: np.full_like(keep(*args), cuda_step.NEVER))
    engine.admit("a", "onwards")
    engine.step({"a": [False] * PROMPT}, {}, {})
    engine.step({"a": [False, False, True]}, {"a": 2}, {"a": 0})
    with pytest.raises(AssertionError):
        engine.step({"a": [False, False, False]}, {"a": 2}, {"a": 2})


@pytest.mark.parametrize("seed", range(20))
def test_accepted_tokens_alone_decide_whatever_happens(engine, seed):
    """Requests come, wait, draft, are preempted, and are computed again in chunks of any size."""
    rng, count = np.random.default_rng(seed), 0
    for _ in range(60):
        while len(engine.at) < 3:
            engine.admit(f"request {(count := count + 1)}", str(rng.choice(SCOPES)))
        rows, drafts, accepted = {}, {}, {}
        for name in rng.permutation(list(engine.at)).tolist():
            at, held = engine.at[name], engine.held[name]
            if rng.random() < 0.05:
                engine.at[name] = at = 0
            if rng.random() < 0.2:
                continue
            known = max(PROMPT, len(held) + (at == len(held)))
            rows[name] = [*held[at:], *(rng.random(known - len(held)) < 0.15)][: rng.integers(1, 6)]
            if at + len(rows[name]) == known and rng.random() < 0.7:
                drafts[name] = int(rng.integers(1, DRAFTS + 1))
                accepted[name] = int(rng.integers(drafts[name] + 1))
                rows[name] += (rng.random(drafts[name]) < 0.3).tolist()
        if rows:
            engine.step(rows, drafts, accepted)
        for name in [name for name, at in engine.at.items() if at > MOST - 5]:
            engine.admitter.free([name])
            del engine.at[name]


def test_what_several_rows_of_a_step_would_need_in_order_is_refused():
    """The probe's own site, from a generated token on; and delimiters in generated tokens."""
    vectors: dict[str, np.ndarray] = {}
    own = pc.resid_post[0]
    for scope in ("token", "prompt"):
        _check_latches(bound_of(scope, at=own))
    with pytest.raises(UnsupportedSite) as raised:
        _check_latches(bound_of("onwards", tokens=pc.generated, at=own))
    assert raised.value.path == "edits[0].edits[0].at"
    inside = pc.Add(np.ones(WIDTH, np.float32), at=own, tokens=pc.generated & pc.between(1, 2))
    bound = bind(Program.of([inside]), "run", Prompt([0, 1], lambda: ("", [])), 4, SITES, None, vectors=vectors)
    with pytest.raises(UnsupportedSite) as raised:
        _check_latches(bound)
    assert raised.value.path == "edits[0].tokens"


def test_cells_that_have_ended_decide_nothing():
    """Steps are planned one by one while a program decides."""
    table, records, counts = ProgramTable(4, 3, 8), np.zeros((2, 1), RECORD), np.eye(2, 3, dtype=np.int64)
    records["kind"] = SPAN
    table.install_alike(records, counts, np.array([2, 3]), np.array([0, 4]))
    assert table.deciding == {2, 3}
    table.drop_all([2])
    assert table.deciding == {3}
