"""Two thousand requests of programs of their own through one engine: each carried out, and no table keeps anything."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..reference.formulas import by_formula
from .conftest import TINY

REQUESTS, BATCH, SEQS, RECORDS = 2_000, 1_000, 16, 600
D, LAYERS = TINY["hidden_size"], 3
SITES = [pc.embed, pc.final_norm] + [site[i] for i in range(LAYERS) for site in (
    pc.resid_pre, pc.resid_mid, pc.resid_post, pc.attn_out, pc.mlp_out)]  # fmt: skip
EMPTY = ("programs", "runs", "captured_bytes", "pinned", "vectors", "waiting", "requests", "records")
HELD = ("_admitted", "_slot_of", "_stop_of", "_errors", "_token_bytes", "_code", "_code_of", "_code_stop")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def lm(tiny):
    """Thirty-two slots, room for two thousand vectors, and few records: all three run out many times."""
    options = dict(max_model_len=64, max_num_seqs=SEQS, kv_cache_memory_bytes=1 << 25, block_size=32)
    with pc.LM(tiny, engine="vllm", dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
               max_records=RECORDS, bank_bytes=4 * D * 2_000, **options) as lm:  # fmt: skip
        yield lm


def an_op(number: int, at: pc.Site, tokens, source: pc.Run):
    """One of nine kinds in turn, with numbers of its own."""
    v = RNG.standard_normal(D).astype(np.float32)
    return (
        lambda: pc.Add(v, at, tokens, scale=float(RNG.uniform(1, 3))),
        lambda: pc.Replace(v, at, tokens, alpha=float(RNG.uniform(0.2, 1))),
        lambda: pc.Replace(v, at, tokens, mask=RNG.random(D)),
        lambda: pc.Zero(at, tokens),
        lambda: pc.Scale(float(RNG.uniform(-2, 0.5)), at, tokens),
        lambda: pc.Ablate(RNG.standard_normal((2, D)), at, tokens),
        lambda: pc.Clamp(v, at, tokens, low=50.0),
        lambda: pc.Noise(0.5, at, tokens, seed=number),
        lambda: pc.Replace(pc.From(source, pc.resid_mid[1], number % 8), at, tokens),
    )[number % 9]()


def requests(first: int, source: pc.Run) -> tuple[list[list[int]], list[list[pc.Op]], list[list[int]]]:
    """Prompts, programs, and for each the positions at which its one edit acts; the rows before and after it are kept."""
    prompts, programs, selected = [], [], []
    for number in range(first, first + BATCH):
        length = int(RNG.integers(1, 24)) if number % 10 else 40
        chosen = sorted(RNG.choice(length, int(RNG.integers(1, min(length, 6) + 1)), replace=False).tolist())
        at, tokens = SITES[int(RNG.integers(len(SITES)))], pc.prompt[chosen]
        prompts.append(RNG.integers(3, TINY["vocab_size"], length).tolist())
        programs.append([pc.Capture(at), an_op(number, at, tokens, source), pc.Capture(at, tokens)])
        selected.append(chosen)
    return prompts, programs, selected


def check(run: pc.Run, program: list, chosen: list[int], source: pc.Run) -> None:
    """The rows that were chosen are what the formula makes of those before; and they are others."""
    before, after = run["edits[0]"], run["edits[2]"]
    assert run.positions("edits[0]") == list(range(len(run.prompt_token_ids) + len(run.token_ids) - 1))
    assert run.positions("edits[2]") == chosen
    op = program[1]
    read = source[pc.resid_mid[1]] if isinstance(getattr(op, "value", None), pc.From) else None
    row = None if read is None else read[op.value.position.index]
    expected = by_formula(op, before[chosen], chosen, LAYERS, row)
    assert float((after - expected).abs().max()) <= 1e-4 * max(1.0, float(before.abs().max())), op
    assert not torch.equal(after, before[chosen]), op


@pytest.mark.slow
def test_thousands_of_programs_leave_every_table_empty(lm, monkeypatch):
    """More at once than there are slots, so that most of them wait; of each batch some do not even fit beside others,
    and one never does."""
    before = lm.engine.status()
    assert [before[name] for name in EMPTY] == [0] * len(EMPTY)
    source = lm.run(list(range(3, 11)), max_tokens=1, capture=[pc.resid_mid[1]])
    (runtime,) = lm.engine._engine.collective_rpc(lambda worker: worker.worker.patchclamp.runtime)
    install_all, admitted = runtime.install_all, []

    def counted(arrivals, vectors):
        errors = install_all(arrivals, vectors)
        admitted.extend([len(runtime)] * (len(arrivals) - len(errors)))
        return errors

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "install_all", counted)
        for first in range(0, REQUESTS, BATCH):
            a_batch(lm, first, source)
    assert len(admitted) >= REQUESTS - REQUESTS // BATCH
    assert SEQS <= max(admitted) <= 2 * SEQS
    del source
    gc.collect()
    lm.run([5], max_tokens=1)
    after = lm.engine.status()
    assert {name: after[name] for name in EMPTY} == dict.fromkeys(EMPTY, 0)
    assert not lm.engine._waiting
    assert not lm.engine._held_back
    assert {name: len(getattr(runtime, name)) for name in HELD} == dict.fromkeys(HELD, 0)
    assert len(runtime.table.captures) == 0
    assert 0 < len(runtime.resident) <= 2_000  # what lies in the bank, and no more


def a_batch(lm: pc.LM, first: int, source: pc.Run) -> None:
    prompts, programs, selected = requests(first, source)
    wide, never = first % 97, first % 89 + 500
    prompts[wide] += [7] * (40 - len(prompts[wide]))
    programs[wide] = [*programs[wide], *[pc.Scale(0.9, pc.resid_mid, pc.prompt[::2])] * 5]
    programs[never] = [pc.Zero(pc.resid_post, [0, 2, 4, 6])] * (RECORDS // 12 + 1)
    prompts[never] = list(range(3, 13))
    runs = lm.run(prompts, max_tokens=1 + first // BATCH % 2, edits=programs)
    error = runs[never].error
    assert isinstance(error, pc.CapacityError)
    assert str(RECORDS) in str(error)
    for i, (run, program, chosen) in enumerate(zip(runs, programs, selected, strict=True)):
        assert (run.error is None) == (i != never), run.error
        if i != never:
            check(run, program, chosen, source)
