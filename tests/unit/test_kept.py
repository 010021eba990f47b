"""What one caller may leave on a server, and for how long; and a vector's bytes, which come from anybody."""

from __future__ import annotations

import contextlib
import json
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

import patchclamp as pc
from patchclamp.engines.base import Request
from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import (
    CapacityError,
    Gone,
    MissingSource,
    NameTaken,
    NoKey,
    PatchclampError,
    ProgramError,
    TooLarge,
    UnknownName,
)
from patchclamp.language import Program, Vector
from patchclamp.language.ops import check_words
from patchclamp.serve.kept import KeptObjects, Note, SweepJournals, check_name, check_program, pack_run, unpack_run
from patchclamp.serve.program_call import ProgramCall, in_request
from patchclamp.serve.server_state import owner_of
from patchclamp.store.named import MAX_HEADER_BYTES, Means, from_bytes, numbers_of_json, to_bytes

ROW = Vector.of([1.0, 2.0, 3.0, 4.0])  # 16 bytes
HALF = Program.of([pc.Scale(0.5, at=pc.embed)])


def test_an_owners_bank_is_its_own():
    kept = KeptObjects()
    kept.put("a", "vector", "calm", ROW)
    kept.put("b", "vector", "calm", Vector.of([9.0]))
    kept.delete("b", "vector", "calm")
    assert kept.entry("a", "vector", "calm") == ROW
    with pytest.raises(MissingSource, match=r"unknown vector 'clam' \(did you mean 'calm'\?\)"):
        kept.entry("a", "vector", "clam")
    with pytest.raises(MissingSource):
        kept.entry("a", "program", "calm")


def test_a_run_that_another_process_reads_knows_where_its_images_were(lm):
    """As an API process of several tells the others; the fake takes no images, so the run is given some."""
    run = lm.run([5, 6, 7, 8], max_tokens=2, capture=[pc.embed @ pc.prompt[1:3]])
    bound = pc.Program.of([], [pc.embed @ pc.prompt[1:3]])
    asked = Request(run.key, [5, 6, 7, 8], 2, run._bound, images=[[1], [2, 3]])
    read = unpack_run(pack_run(run, asked), lm)
    assert (read.images, run.images, read.program) == ([[1], [2, 3]], [], bound)
    assert read.select(pc.image[1] | pc.prompt[0]).tolist() == [0, 2, 3]
    with pytest.raises(pc.TokensError, match="the prompt has no image"):
        run.select(pc.image[1])


def test_a_name_is_of_one_kind():
    kept = KeptObjects()
    kept.put("a", "vector", "x", ROW)
    with pytest.raises(NameTaken, match=r"'x' .* vector"):
        kept.put("a", "program", "x", HALF)
    with pytest.raises(NameTaken, match=r"'x' .* vector"):
        kept.check_free("a", "x", "run")
    kept.check_free("b", "x", "run")
    kept.delete("a", "vector", "x")
    kept.put("a", "program", "x", HALF)
    assert kept.entries("a", "program") == {"x": HALF}


def test_a_bank_is_bounded_in_names_and_bytes():
    kept = KeptObjects(ServeLimits(bank_names=2, named_bytes=40))
    kept.put("a", "vector", "x", ROW)
    kept.put("a", "vector", "y", ROW)
    with pytest.raises(CapacityError, match=r"1 more .* 0 of 2 left.*limit bank_names"):
        kept.put("a", "vector", "z", Vector.of([1.0]))
    kept.put("a", "vector", "y", Vector.of([1.0] * 6))  # in place of 16 bytes
    assert kept.named_bytes("a") == 40
    kept.delete("a", "vector", "x")
    with pytest.raises(CapacityError, match=r"20 more .* 16 of 40 left.*limit named_bytes"):
        kept.put("a", "vector", "x", Vector.of([1.0] * 5))
    kept.put("b", "vector", "x", ROW)
    assert kept.named_bytes("b") == 16


def test_runs_are_bounded_in_number_bytes_and_time(lm):
    now = [0.0]
    runs = [lm.run("One two", max_tokens=1, capture=[pc.embed]) for _ in range(3)]
    size = runs[0].captured_bytes
    kept = KeptObjects(ServeLimits(kept_runs=2, run_bytes=3 * size, run_ttl_s=10), lambda: now[0])
    kept.keep("a", "first", runs[0])
    now[0] = 5.0
    kept.keep("a", "second", runs[1])
    with pytest.raises(CapacityError, match="limit kept_runs"):
        kept.keep("a", "third", runs[2])
    kept.keep("b", "third", runs[2])
    now[0] = 11.0
    with pytest.raises(Gone, match=r"first .* 10 seconds"):
        kept.run("a", "first")
    assert runs[0].closed
    assert not runs[1].closed
    assert list(kept.runs("a")) == ["second"]
    tight = KeptObjects(ServeLimits(run_bytes=size - 1))
    with pytest.raises(CapacityError, match=r"run x.*limit run_bytes"):
        tight.keep("a", "x", runs[1])
    assert tight.runs("a") == {}


def test_runs_under_way_have_room_for_what_they_may_capture(lm):
    run = lm.run("One two", max_tokens=1, capture=[pc.embed])
    kept = KeptObjects(ServeLimits(run_bytes=3 * run.captured_bytes))
    kept.keep("a", "x", run)
    with kept.room_for("a", run.captured_bytes):
        with kept.room_for("b", 2 * run.captured_bytes), kept.room_for("a", run.captured_bytes):
            pass
        with (
            pytest.raises(CapacityError, match=r"may capture.*limit run_bytes"),
            kept.room_for("a", run.captured_bytes + 1),
        ):
            pass
    with kept.room_for("a", 2 * run.captured_bytes):
        pass


def test_a_run_that_went_along_is_let_go_unless_another_has_its_name(lm):
    kept = KeptObjects()
    first, second = (lm.run("One two", max_tokens=1, capture=[pc.embed]) for _ in range(2))
    kept.keep("a", "x", first)
    kept.keep("a", "x", second)
    kept.let_go("a", "x", first)
    assert kept.run("a", "x") is second
    kept.let_go("a", "x", second)
    assert second.closed
    with pytest.raises(Gone, match="returned with its answer"):
        kept.run("a", "x")


def test_a_request_over_a_limit_is_told_which():
    with pytest.raises(TooLarge, match=r'at most 4, got 5 \(limit program_ops; .*"serve"') as told:
        ServeLimits(program_ops=4).check("program_ops", 5, "ops")
    assert told.value.status == 413
    ServeLimits(openai_body_bytes=None).check("openai_body_bytes", 1 << 60, "bytes")
    for wrong in ({"body_bytes": -1}, {"run_ttl_s": 0}, {"body_byte": 1}, {"program_ops": "many"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, ServeLimits, strict=True)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "a\0b", "x" * 65, "a b", "é", "a\n", ".a", "-a", 3, None]
)
def test_a_name_cannot_be_a_path(name):
    with pytest.raises(ProgramError, match="up to 64"):
        check_name(name, "run")


def test_an_owner_is_the_hash_of_a_key():
    one, other = owner_of("Bearer one", True), owner_of("Bearer other", True)
    assert one != other
    assert one == owner_of("bearer one", True)
    assert "one" not in one
    assert owner_of("Bearer one", False) == owner_of(None, False) == "open"
    with pytest.raises(NoKey):
        owner_of(None, True)


def test_bytes_of_an_entry_round_trip():
    rows = Vector.of(np.arange(6.0).reshape(2, 3))
    means = Means({"embed": Vector.of([1.0, 2.0]), "resid_post[0]": Vector.of([3.0, 4.0])})
    for entry in (ROW, rows, means):
        assert from_bytes(to_bytes("x", entry)) == entry


def file(header, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def one(dtype="F32", shape=(1,), offsets=(0, 4), **metadata) -> dict:
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    return header | ({"__metadata__": metadata} if metadata else {})


FLOAT = struct.pack("<f", 1.0)
NAN = struct.pack("<f", float("nan"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "within its header"), (b"\xff" * 8, "header"), (struct.pack("<Q", 1 << 62), "header"),
        (file(b" " * (MAX_HEADER_BYTES + 1)), "header"), (file(b"[" * 100_000), "safetensors"),
        (file(b"\xff\xfe"), "safetensors"), (file({}), "got 0"),
        (file({f"x{i}": one()["x"] for i in range(1000)}, FLOAT), "got 1000"),
        (file(one(shape=[1 << 62, 4]), FLOAT), "safetensors"), (file(one(shape=[2]), FLOAT), "safetensors"),
        (file(one(offsets=[4, 8]), FLOAT * 2), "safetensors"), (file(one(offsets=[0, 8]), FLOAT), "safetensors"),
        (file(one(), FLOAT + b"more"), "safetensors"), (file(one(), NAN), "finite"),
        (file(one("F64", offsets=[0, 8]), struct.pack("<d", 1e300)), "finite"),
        (file(one("I64", offsets=[0, 8]), bytes(8)), "got I64"), (file(one("F8_E4M3", offsets=[0, 1]), b"\0"), "got F8"),
        (file(one(shape=[])), "got \\[\\]"), (file(one(shape=[0], offsets=[0, 0])), "not empty"),
        (file(one(shape=[1] * 100_000), FLOAT), "got \\[1, 1"), (file(one(shape=[-1]), FLOAT), "got \\[-1"),
        (file(one(means="[" * 10_000), FLOAT), "safetensors"), (file(one(means='{"y": ["embed"]}'), FLOAT), "metadata"),
        (file(one(programs="{}"), FLOAT), "metadata"), (file(one(means='{"x": ["embed", "embed"]}'), FLOAT), "means"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused(data, text):
    with pytest.raises(ProgramError, match=text) as told:
        from_bytes(data)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"[]", b"[[]]", b"[NaN]", b"[1e999]", b"[1e39]", b"[" * 100_000, b"{}", b"[[1], [2, 3]]", b"[[1], 2]",
     b'["1"]', b"[true]", b"[null]", b"[" + b"9" * 5000 + b"]", b"\xff", b"[[[1]]]", b"1"],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(data):
    with pytest.raises(ProgramError) as told:
        numbers_of_json(data)
    assert len(str(told.value)) < 500


@given(st.binary(max_size=64), st.integers(0, 200))
def test_any_bytes_are_a_vector_or_refused(noise, cut):
    whole = save({"x": np.float32([1, 2, 3])})
    for data in (noise, whole[: cut % len(whole)], whole[: cut % len(whole)] + noise, noise + whole):
        for read in (from_bytes, numbers_of_json):
            with contextlib.suppress(ProgramError):  # 400
                assert isinstance(read(data), (Vector, Means))


def test_what_another_process_dropped_is_gone_here_too(lm):
    kept = KeptObjects()
    kept.hear(Note("a", "x", "gone", "other", b"it was deleted"), lm)
    with pytest.raises(Gone, match=r"x .*deleted"):
        kept.run("a", "x")
    kept.hear(Note("a", "calm", "vector", "other", to_bytes("calm", ROW)), lm)
    assert kept.named_bytes("a") == 16
    kept.hear(Note("a", "calm", "gone", "other", b"it was deleted"), lm)
    assert (kept.named_bytes("a"), kept.entries("a", "vector")) == (0, {})
    with pytest.raises(MissingSource, match="run calm"):
        kept.run("a", "calm")


class TestSweeps:
    def test_a_journal_is_its_owners_and_is_dropped_when_it_is_old(self):
        now = [0.0]
        journals = SweepJournals(ServeLimits(kept_sweeps=2, run_ttl_s=10), clock=lambda: now[0])
        first = journals.start("a", "x")
        first.open("made").append([1.0, float("nan")])
        assert journals.start("b", "x") is not first
        journals.start("a", "y")
        with pytest.raises(CapacityError, match="kept_sweeps"):
            journals.start("a", "z")
        with pytest.raises(ProgramError, match=r"resume: .*up to 64"):
            journals.start("a", "a/b")
        journals.end("a", "y")  # nothing was computed: it takes no room
        now[0] = 11.0
        journals.start("a", "z")
        assert journals.start("a", "x") is first, "a sweep that is under way is not old"
        first.close()
        for name in ("x", "x", "z"):
            journals.end("a", name)
        now[0] = 20.0
        assert journals.start("a", "x") is first
        assert np.array(first.open("made").take(float)).tobytes() == np.array([1.0, np.nan]).tobytes()
        first.close()
        with pytest.raises(ProgramError, match="different study"):
            first.open("other")
        journals.end("a", "x")
        now[0] = 40.0
        assert journals.start("a", "x") is not first

    def test_two_sweeps_do_not_write_one_journal(self):
        journals = SweepJournals(ServeLimits())
        journals.start("a", "x").open("made")
        journals.start("a", "x")._wait_s = 0.0
        with pytest.raises(NameTaken):
            journals.start("a", "x").open("made")
        journals.start("a", "x").close()
        journals.start("a", "x").open("made").close()

    def test_a_request_that_fails_leaves_the_journal_of_one_that_plans(self):
        journals = SweepJournals(ServeLimits())
        planning, _ = journals.start("a", "x"), journals.start("a", "x")
        journals.end("a", "x")
        planning.open("made").append([1.0])
        planning.close()
        journals.end("a", "x")
        assert journals.start("a", "x") is planning

    def test_an_owners_journals_have_a_limit_in_bytes(self):
        journals = SweepJournals(ServeLimits(kept_sweep_bytes=20))
        first, second, others = (journals.start(*of).open("made") for of in (("a", "x"), ("a", "y"), ("b", "x")))
        first.append([1.0])  # 9 bytes
        second.append([2.0])
        with pytest.raises(TooLarge, match="kept_sweep_bytes"):
            second.append([3.0])
        others.append([3.0, 4.0])
        second.close()
        assert second.open("made").take(float) == [2.0]
        first.clear()
        second.append([3.0])


KEPT = {"width": [pc.Add([1.0, 2.0], at=pc.embed)], "mask": [pc.Replace(pc.Vector.of([0.0]), at=pc.embed, mask=[1.0])],
        "site": [pc.Scale(0.5, at=pc.resid_post[99])], "itself": [pc.Use("new")], "cycle": [pc.Use("through")],
        "vector": [pc.Use("row")], "rows": [pc.Add([[1.0] * 3] * 2, at=pc.embed, tokens="span('x')")],
        "another site": [pc.Replace(pc.SameRun("resid_post[99]"), at=pc.resid_post[1])]}  # fmt: skip


@pytest.mark.parametrize("wrong", KEPT)
def test_a_program_that_no_prompt_could_run_is_not_kept(lm, wrong):
    kept = KeptObjects()
    kept.put("a", "vector", "row", ROW)
    kept.put("a", "program", "through", Program.of([pc.Scale(0.5, at=pc.embed), pc.Use("new")]))
    with pytest.raises(PatchclampError) as raised:
        check_program(Program.of([pc.Scale(0.5, at=pc.embed), *KEPT[wrong]]), "new", lm.sites, kept.owned("a"))
    assert raised.value.path.startswith("edits[1].")


def test_a_program_that_some_prompt_could_run_is_kept(lm):
    wide = [[1.0] * lm.sites.d_model] * 3
    fine = [
        pc.Add(wide, at=pc.embed, tokens=pc.prompt[-3:]), pc.Scale(2, at=pc.embed, tokens=pc.span("not there")),
        pc.Use("later"), pc.Add("later", at=pc.embed), pc.Replace(pc.From("later", pc.embed), at=pc.embed),
        pc.Replace(pc.SameRun("resid_post[0]", "prompt[-1]"), at=pc.resid_post[1]), pc.Scale(0.5, at=pc.logits),
    ]  # fmt: skip
    check_program(Program.of(fine), "new", lm.sites, KeptObjects().owned("a"))


@pytest.mark.parametrize(
    "word",
    [
        "fuzz_strenght",
        "fuzz_sed",
        "Fuzz_mode",
        "fuzz-seed",
        "fuz_seed",
        "fuzz_other",
        "patchclamp_run",
        "pachclam",
        "PATCHCLAMP",
    ],
)
def test_a_word_of_extra_arguments_that_is_nearly_ours_is_refused(word):
    with pytest.raises(UnknownName) as raised:
        check_words({"fuzz_seed": 1, word: 1})
    assert raised.value.path == f"vllm_xargs.{word}"


def test_words_of_extra_arguments_that_are_others_pass():
    check_words({"mine": 1, "fuzzy": 1, "fuzz": 1, "seed": 2, "x" * 100_000: 3, "patch": 1})


@pytest.mark.parametrize(
    "error", [ProgramError("x", "edits[0].at"), TooLarge("x", "capture"), ProgramError("x", "run")]
)
def test_a_path_over_http_begins_at_the_request(error):
    path = f"patchclamp.{error.path}"
    assert in_request(error).path == path == in_request(in_request(error)).path
    assert in_request(ProgramError("x", "body")).path == "body"


def test_counts_are_checked_before_ops_are_read():
    limits = ServeLimits(program_ops=2)
    with pytest.raises(TooLarge) as raised:
        ProgramCall({"edits": [None] * 2, "capture": [None]}, "a", {}, KeptObjects(limits))
    assert raised.value.path == "patchclamp.edits"


@pytest.mark.parametrize("field", ["at", "tokens", "nothing"])
def test_long_texts_are_refused_at_once(field):
    op = {"type": "scale", "at": "embed", "factor": 1, field: f'span("{"x" * (1 << 20)}")'}
    if field == "nothing":
        op = {**op, "x" * (1 << 20): 1}
    with pytest.raises(ProgramError, match=r"unknown|at most") as raised:
        ProgramCall({"edits": [op]}, "a", {}, KeptObjects())
    assert raised.value.path == f"patchclamp.edits[0].{field}"
    assert len(str(raised.value)) < 200
