"""A program is bound once for prompts of one length, and as if it were bound for each."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.plan import Prompt
from patchclamp.plan.bind import Bindings, bind
from patchclamp.plan.cells import cells_of

COLOSSEUM, EIFFEL, SHORT = [11, 12, 13, 14, 15], [21, 22, 13, 24, 25], [31, 32, 33]
V = np.linspace(-1, 1, 32).astype(np.float32)


@pytest.fixture(scope="module")
def lm():
    return pc.LM("fake", allow_code=True)


def programs(lm: pc.LM) -> dict[str, tuple[Program, int]]:
    """Programs, and how often three prompts of two lengths bind each."""
    source, width = lm.run(COLOSSEUM, max_tokens=1, capture=pc.resid_mid), lm.model.d_model
    v = np.resize(V, width)
    lm.bank["push"] = [pc.Add(v, at=pc.resid_post[0])]
    at, named = pc.resid_post[0], pc.prompt & (pc.token(11) | pc.token(22) | pc.token(33))
    return {
        "everywhere": (Program.of([pc.Add(v, at=at)], [pc.resid_post]), 2),
        "edits of every token": (Program.of([pc.Add(v, at=at), pc.Ablate(v, pc.mlp_out, strength=0.5)]), 1),
        "edits of the prompt": (Program.of([pc.Add(v, at=at), pc.Zero(pc.mlp_out[1], tokens=pc.prompt[:])]), 2),
        "ends that count back": (Program.of([pc.Zero(at, tokens=pc.prompt[-2:] | pc.generated)]), 2),
        "another run's row": (Program.of([pc.Replace(pc.From(source, pc.resid_mid[0], pc.prompt[1]), at, 1)]), 2),
        "its own row by token id": (Program.of([pc.Replace(pc.SameRun(pc.resid_mid[0], named), at, pc.prompt[-1])]), 3),
        "by token id": (Program.of([pc.Scale(2.0, at, tokens=pc.every - pc.token(13))]), 3),
        "a named program": (Program.of([pc.Use("push")]), 3),
        "code": (Program.of([pc.Apply(lambda h: h, at=at)]), 3),
    }


@pytest.mark.parametrize("name", ["everywhere", "edits of every token", "edits of the prompt", "ends that count back", "another run's row", "its own row by token id",
                                  "by token id", "a named program", "code"])  # fmt: skip
def test_it_is_bound_as_for_each_prompt(lm, name, monkeypatch):
    (program, times), bound_for = programs(lm)[name], []
    monkeypatch.setattr(sys.modules[bind.__module__], "bind", lambda *args: bound_for.append(args[1]) or bind(*args))
    call = Bindings(lm.sites, lm._source, lm.bank, True)
    for number, ids in enumerate((COLOSSEUM, EIFFEL, SHORT)):
        prompt, vectors = Prompt(ids, lambda: ("", [])), {}
        binding = call.of(program, f"run {number}", prompt, 3)
        alone = bind(program, f"run {number}", prompt, 3, lm.sites, lm._source, lm.bank, vectors, {})
        assert binding.bound.run == f"run {number}"
        if name != "code":  # whose numbers are new each time
            assert binding.bound == alone
        assert binding.vectors.keys() == vectors.keys()
        assert {*map(len, (binding.sources, binding.code))} == (
            {0, 1} if name in ("another run's row", "code") else {0}
        )
    assert len(bound_for) == times


def test_what_is_of_one_token_is_not_taken_for_every_token(lm):
    """A row for each position, another run's rows, and edits of logits, which begin at the prompt's last token."""
    one, site, prompts = lm.run([11], max_tokens=1, capture=pc.resid_post[0]), pc.resid_post[0], ([11], SHORT)
    call = lm.bindings()
    logits = Program.of([pc.Add(np.ones(lm.model.d_vocab, np.float32), at=pc.logits)])
    found = [call.of(logits, "r", Prompt(ids, lambda: ("", [])), 3).bound.ops[0].ranges[0][:2] for ids in prompts]
    assert found == [(0, 3), (2, 5)]
    for value in (np.ones((1, lm.model.d_model), np.float32), pc.From(one, site)):
        program = Program.of([pc.Add(value, at=site)])
        assert call.of(program, "r", Prompt([11], lambda: ("", [])), 1).bound.ops
        with pytest.raises(pc.PatchclampError) as raised:
            call.of(program, "r", Prompt(SHORT, lambda: ("", [])), 1)
        assert raised.value.path.startswith("edits[0]")


def test_cells_of_every_token_are_made_once_and_differ_by_their_ends(lm, monkeypatch):
    """The cells of other lengths, and of other numbers of new tokens, are as if they were made for each."""
    v, prompts = np.resize(V, lm.model.d_model), (COLOSSEUM, SHORT, EIFFEL, SHORT)
    whole = [pc.Add(v, pc.resid_post[1]), pc.Ablate(v, pc.mlp_out, strength=0.5)]
    for programs, times in (([whole, [], [pc.Scale(2.0, pc.attn_out[0])]], 1), ([whole, [pc.Zero(pc.z, 1)]], 3)):
        programs, made = [Program.of(edits) for edits in programs], []
        monkeypatch.setattr(sys.modules[bind.__module__], "cells_of", lambda bound: made.append(1) or cells_of(bound))  # noqa: B023
        bindings = lm.bindings()
        for number, (ids, scores) in enumerate(zip(prompts, ([], [], [], [[((), 3), ((3,), 4)]]), strict=True)):
            job = lm.grade_job(ids, programs, scores, bindings=bindings)
            alone = lm.grade_job(ids, programs, scores)
            assert job.cells().to_bytes() == cells_of([alone.bound(i) for i in range(len(programs))]).to_bytes()
            assert all(group.records["stop"].max() <= len(ids) + bool(scores) for group in job.cells().groups), number
        assert len(made) == times


def test_one_list_for_all_prompts_is_one_program(lm, monkeypatch):
    bound_for = []
    monkeypatch.setattr(sys.modules[bind.__module__], "bind", lambda *args: bound_for.append(args[1]) or bind(*args))
    edits = [pc.Add(np.resize(V, lm.model.d_model), at=pc.resid_post[0])]
    together = lm.run(
        [COLOSSEUM, EIFFEL, SHORT, EIFFEL], max_tokens=2, edits=edits, capture=pc.resid_post, logprobs=True
    )
    assert len(bound_for) == 2
    bound_for.clear()
    apart = lm.run([COLOSSEUM, EIFFEL, SHORT, EIFFEL], max_tokens=2, edits=[list(edits) for _ in range(4)],
                   capture=pc.resid_post, logprobs=True)  # fmt: skip
    assert len(bound_for) == 4
    for one, other in zip(together, apart, strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
        assert np.array_equal(one[pc.resid_post[1]], other[pc.resid_post[1]])
    with pytest.raises(pc.TokensError, match=r"^prompt 2.edits\[0\].tokens: prompt\[4\]: position 4"):
        lm.run([COLOSSEUM, EIFFEL, SHORT], max_tokens=1, edits=[pc.Zero(pc.resid_post[0], tokens=pc.prompt[4])])


def test_programs_that_are_gone_are_not_taken_for_later_ones(lm):
    """Later objects have the ids of those that are gone."""
    call, prompt = Bindings(lm.sites, lm._source, lm.bank, True), Prompt(COLOSSEUM, lambda: ("", []))
    for factor in range(100):
        bound = call.of(Program.of([pc.Scale(float(factor), at=pc.resid_post[0])]), "r", prompt, 1).bound
        assert bound.ops[0].action.h_scale == factor
