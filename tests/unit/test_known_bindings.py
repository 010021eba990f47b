"""Programs that a server binds once for all requests that bring them."""

from __future__ import annotations

import secrets

import pytest

import patchclamp as pc
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.language import Named, Program, Vector
from patchclamp.serve import server_state
from patchclamp.serve.kept import KeptObjects, Note
from patchclamp.store.named import to_bytes

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def counted(monkeypatch):
    """The programs that were bound anew."""
    bound = []

    class Counted(server_state.Bindings):
        def of(self, program, *rest):
            bound.append(program)
            return super().of(program, *rest)

    monkeypatch.setattr(server_state, "Bindings", Counted)
    return bound


def bind(lm, known, program, ids=PROMPT, owner="a", max_tokens=3):
    return known.of(owner, program, secrets.token_hex(4), prompt_of(lm.tokenizer, ids, None, None), max_tokens)


def row(lm, number):
    return Vector.of([float(number)] * lm.model.d_model)


def test_a_program_is_bound_once_for_a_length(lm, counted):
    known = server_state.KnownBindings(lm, KeptObjects())

    def steer():
        return Program.of([pc.Add(row(lm, 1), at=pc.resid_post)])

    first, second = bind(lm, known, steer()), bind(lm, known, steer(), [1, 2, 3, 4])
    assert len(counted) == 1
    assert first.bound.run != second.bound.run
    assert (first.bound.ops, first.vectors) == (second.bound.ops, second.vectors)
    for other in (dict(ids=[1, 2]), dict(max_tokens=9), dict(owner="b")):
        bind(lm, known, steer(), **other)
    assert len(counted) == 4


def test_what_the_bank_has_now_is_bound(lm, counted):
    kept = KeptObjects()
    known, program = server_state.KnownBindings(lm, kept), Program.of([pc.Add(Named("v"), at=pc.embed)])
    seen = []
    for number in (1, 2):
        kept.put("a", "vector", "v", row(lm, number))
        seen += [bind(lm, known, program) for _ in range(2)]
    assert len(counted) == 2
    assert [next(iter(each.vectors.values())).flat[0] for each in seen] == [1.0, 1.0, 2.0, 2.0]
    kept.delete("a", "vector", "v")
    with pytest.raises(pc.PatchclampError, match="v"):
        bind(lm, known, program)


def test_what_another_process_says_of_the_bank_counts_and_of_runs_does_not(lm, counted):
    kept = KeptObjects()
    known, program = server_state.KnownBindings(lm, kept), Program.of([pc.Add(Named("v"), at=pc.embed)])
    for number, name, kind, data in (
        (1, "v", "vector", to_bytes("v", row(lm, 1))),
        (1, "r", "touched", b""),
        (1, "r", "gone", b"it was deleted"),
        (2, "v", "vector", to_bytes("v", row(lm, 2))),
    ):
        kept.hear(Note("a", name, kind, "another", data), lm)
        (rows,) = bind(lm, known, program).vectors.values()
        assert rows.flat[0] == number
    assert len(counted) == 2
    kept.hear(Note("a", "v", "gone", "another", b"it was deleted"), lm)
    with pytest.raises(pc.PatchclampError, match="v"):
        bind(lm, known, program)


def test_what_depends_on_the_prompt_or_on_runs_is_bound_anew(lm, counted):
    kept = KeptObjects()
    run = lm.run(PROMPT, max_tokens=1, capture=[pc.embed])
    kept.keep("a", "r", run)
    known = server_state.KnownBindings(lm, kept)
    for program in (
        Program.of([pc.Scale(0.5, at=pc.embed, tokens=pc.token(7))]),
        Program.of([pc.Replace(pc.From("r", pc.embed), at=pc.embed, tokens=pc.prompt)]),
    ):
        bind(lm, known, program)
        bind(lm, known, program)
    assert len(counted) == 4


def test_few_and_small_ones_are_remembered(lm, counted, monkeypatch):
    monkeypatch.setattr(server_state, "MAX_KNOWN", 2)
    known = server_state.KnownBindings(lm, KeptObjects())
    programs = [Program.of([pc.Add(row(lm, number), at=pc.embed)]) for number in range(3)]
    for program in (*programs, programs[2], programs[0]):
        bind(lm, known, program)
    assert counted == [*programs, programs[0]]
    monkeypatch.setattr(server_state, "MAX_VECTOR_BYTES", 4)
    bind(lm, known, large := Program.of([pc.Add(row(lm, 9), at=pc.embed)]))
    bind(lm, known, large)
    assert counted[-2:] == [large, large]
