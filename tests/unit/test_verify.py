"""Bound programs from elsewhere: all that `bind` makes passes, and nothing that reads, writes or claims more does."""

from __future__ import annotations

import re
import sys

import msgspec
import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import CapacityError, ProgramError
from patchclamp.language import Program
from patchclamp.plan.bind import bind, vector_key
from patchclamp.plan.bound import (
    ADD_NORMED,
    BLEND,
    LINEAR,
    PROJECT,
    REMOVE,
    ROTATE,
    All,
    Attended,
    Blend,
    BoundOp,
    BoundProgram,
    Compare,
    Condition,
    Guard,
    Keep,
    Latch,
    Linear,
    Noisy,
    NormedAdd,
    PositionRange,
    Projection,
    RemoveKeys,
    Rotation,
    RunCode,
    own_key,
    pack_columns,
    with_removed_keys,
)
from patchclamp.plan.cells import CellRecords, Placed, cells_of, place
from patchclamp.plan.room import bank_sizes
from patchclamp.plan.table import RECORD
from patchclamp.plan.verify import is_content, verify, verify_cells
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA

from .test_plan import SITES, Ran, point, spelled

V = [1.0, 2.0, 3.0, 4.0]
ROWS = [V, [2.0, 0.0, 1.0, 1.0]]
PROMPT, MAX_TOKENS = 5, 4
EDITS = [
    pc.Add(V, "resid_post[0:2]", "prompt[-1]", 2.5), pc.Add(ROWS, "resid_mid[1]", "prompt[0, 3]"),
    pc.Replace(V, "mlp_out[1]", "every[0, 1, 4]", 0.25), pc.Replace(V, "embed", mask=[0.0, 1.0, 1.0, 0.5]),
    pc.Zero("resid_pre[2]"), pc.Scale(0.5, "attn_out"), pc.Capture("embed", "generated", "bfloat16"),
    pc.Ablate(ROWS, "resid_post[1]"), pc.Clamp(V, "resid_post[2]", low=-1.0), pc.Noise(0.5, "resid_mid", seed=7),
    pc.Add(V, "resid_post[1]", "prompt & token(3)"), pc.Add(V, "resid_post[1]", "generated & token(3, 5)"),
    pc.Replace(pc.From("ran", "resid_post[1]"), "resid_post[1]", "prompt[1:3]"),
    pc.Replace(pc.From("ran", "resid_post[0:2]", 2), "resid_post[0:2]", "prompt[1]"), pc.Add(V, "final_norm"),
    pc.Add(pc.SameRun("embed"), "resid_post[0:2]"), pc.Replace(pc.SameRun("resid_mid[0]", 2), "mlp_out[1]", "every[3:]"),
    pc.Add(pc.SameRun("mlp_out[0:2]", "prompt[0, 2]"), "mlp_out[1:3]", "prompt[1, 3]"),
    pc.Capture("attn_out", "prompt[1:]", "float16", ROWS), pc.Ablate(ROWS, "resid_post[1]", strength=0.5),
    pc.LowRank(ROWS, [1.0, -1.0], ROWS, "mlp_out[0:2]"), pc.Replace(ROWS, "resid_mid[1]", "prompt[0, 3]", basis=V),
    pc.Add(ROWS, "mlp_out[0]", "prompt[1, 2]", 2.0, "match"),
    pc.Add(pc.From("ran", "resid_post[1]"), "resid_post[1]", "prompt[1:3]", norm="match"),
    pc.Add(V, "embed", "generated & between(3, 4)"), pc.Scale(2.0, "mlp_out[1]", "every - between(4, 3) - token(5)"),
    pc.Rotate(ROWS, 30, "resid_mid[1]", "every[2:]"), pc.Rotate(ROWS, -90, "final_norm", relative=True),
    pc.Knockout("prompt[0, 2]", "pattern[0:2, 0]", "every[4:]"), pc.Scale(0.5, "pattern[1]", keys="prompt"),
    pc.Replace([[0.5, 0.5], [0.0, 1.0]], "pattern[1, 0]", "prompt[1, 3]", alpha=0.5),
]  # fmt: skip


def bound(edits=(), capture=()):
    """A bound program, and the sizes of what it reads."""
    sources, vectors = {"ran": Ran(range(7))}, {}
    made = bind(
        Program.of(edits, capture), "mine", spelled(PROMPT), MAX_TOKENS, SITES, sources.__getitem__, vectors=vectors
    )
    return made, bank_sizes(made, vectors, SITES, lambda run, at: len(sources[run].positions_of(at)))


def check(program, sizes, prompt=PROMPT):
    verify(program, sizes, prompt, PROMPT + MAX_TOKENS - 1, SITES)


def changed(op, **fields):
    """The program of one op, with other fields."""
    program, sizes = bound([op])
    return msgspec.structs.replace(program, ops=(msgspec.structs.replace(program.ops[0], **fields),)), sizes


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_what_is_bound_passes(edit):
    check(*bound([edit], ["resid_post[1:]", "logits"]))


def test_all_at_once_passes_on_the_wire():
    program, sizes = bound(EDITS, ["resid_post", "embed"])
    check(msgspec.msgpack.decode(msgspec.msgpack.encode(program), type=type(program)), sizes)


ADD, NOISE, KEEP = pc.Add(V, "resid_post[1]"), pc.Noise(0.5, "resid_mid[1]"), pc.Capture("embed")
KEY, PAIR, PROJECTED = vector_key(pc.Vector.of(V)), vector_key(pc.Vector.of(ROWS)), pc.Capture("embed", project=ROWS)
ROTATED, POOLED = pc.Rotate(ROWS, 30, "resid_mid[1]"), pc.Capture("embed", "prompt", pool="mean")
WRONG = {
    "points beyond": (ADD, {"points": (10_000,)}),
    "points before": (ADD, {"points": (-1,)}),
    "points of several widths": (KEEP, {"points": (point("embed"), point("logits"))}),
    "columns beyond": (ADD, {"columns": 0 | 600 << 16}),
    "columns that end first": (ADD, {"columns": 3 | 2 << 16}),
    "columns below": (ADD, {"columns": -1}),
    "positions below": (ADD, {"ranges": (PositionRange(-1, 2),)}),
    "positions beyond": (ADD, {"ranges": (PositionRange(0, 9),)}),
    "positions far beyond": (KEEP, {"ranges": (PositionRange(0, 1 << 40),)}),
    "positions that end first": (ADD, {"ranges": (PositionRange(3, 2),)}),
    "positions that do not ascend": (ADD, {"ranges": (PositionRange(3, 4), PositionRange(0, 1))}),
    "captured twice": (KEEP, {"ranges": (PositionRange(0, 3), PositionRange(2, 4))}),
    "rows beyond": (ADD, {"ranges": (PositionRange(0, 1, 1),)}),
    "rows that run beyond": (ADD, {"ranges": (PositionRange(0, 2, 0, 1),)}),
    "rows before": (ADD, {"ranges": (PositionRange(0, 1, -1),)}),
    "steps": (ADD, {"ranges": (PositionRange(0, 1, 0, 2),)}),
    "no value": (ADD, {"values": ()}),
    "two values": (ADD, {"values": (KEY, KEY)}),
    "a value that is nowhere": (ADD, {"values": ("v:" + "0" * 64,)}),
    "the cache untold": (ADD, {"reaches_cache": False}),
    "the cache told wrongly": (pc.Add(V, "final_norm"), {"reaches_cache": True}),
    "a dtype": (KEEP, {"action": Keep(3)}),
    "a capture of columns": (KEEP, {"columns": 0 | 2 << 16}),
    "a matrix that is nowhere": (PROJECTED, {"action": Keep(0, False, KEY, 1)}),
    "more products": (PROJECTED, {"action": Keep(0, False, PAIR, 3)}),
    "no products": (PROJECTED, {"action": Keep(0, False, PAIR, 0)}),
    "products of nothing": (PROJECTED, {"action": Keep(0, False, "", 2)}),
    "another run's rows for a matrix": (PROJECTED, {"action": Keep(0, False, f"r:ran:{point('embed')}", 2)}),
    "a last row of a step": (POOLED, {"action": Keep(0, pool=3, in_step=True)}),
    "rows of a step that are not pooled": (POOLED, {"action": Keep(0, in_step=True)}),
    "rows pooled in another dtype": (POOLED, {"action": Keep(1, pool=1, in_step=True)}),
    "rows pooled by token id": (POOLED, {"action": Keep(0, True, pool=1, in_step=True)}),
    "pooled rows of generated tokens": (POOLED, {"ranges": (PositionRange(0, PROMPT + 1),)}),
    "no rows to pool": (POOLED, {"ranges": ()}),
    "pooled logits": (POOLED, {"points": (point("logits"),)}),
    "projected logits": (PROJECTED, {"points": (point("logits"),)}),
    "a part beyond the row": (PROJECTED, {"columns": 2 | 9 << 16}),
    "a mask that is nowhere": (ADD, {"action": Blend(1.0, "v:" + "0" * 64)}),
    "a number that is none": (ADD, {"action": Linear(float("nan"), 1.0)}),
    "a number that is too large": (ADD, {"action": Linear(1e300, 1.0)}),
    "bounds": (ADD, {"action": Projection(float("-inf"), 0.0)}),
    "an endless scale": (ADD, {"action": NormedAdd(float("inf"))}),
    "a plane of one row": (ADD, {"action": Rotation(1.0, 0.0, False)}),
    "a plane for each position": (ROTATED, {"ranges": (PositionRange(0, 1, 0, 1),)}),
    "a plane beyond": (ROTATED, {"ranges": (PositionRange(0, 1, 1),)}),
    "another run's rows for a plane": (ROTATED, {"values": (f"r:ran:{point('resid_post[1]')}",)}),
    "an angle": (ROTATED, {"action": Rotation(float("nan"), 0.0, False)}),
    "rotated logits": (ROTATED, {"points": (point("logits"),), "reaches_cache": False}),
    "no value to scale": (ADD, {"action": NormedAdd(1.0), "values": ()}),
    "code": (ADD, {"action": RunCode(1)}),
    "no stream": (NOISE, {"action": Noisy(0.5, 0, False, ())}),
    "a stream": (NOISE, {"action": Noisy(0.5, 0, False, (1 << 40,))}),
    "a seed": (NOISE, {"action": Noisy(0.5, -1, False, (1,))}),
    "a first column": (NOISE, {"action": Noisy(0.5, 0, False, (1,), 9)}),
    "ids that are nowhere": (ADD, {"condition": Condition("v:" + "0" * 64, False)}),
}


KNOCKOUT, REPLACED = pc.Knockout("prompt[0]", "pattern[1, 0]", "prompt[2:]"), pc.Replace([0.5], "pattern[1, 0]")
WRONG |= {
    "keys beyond": (KNOCKOUT, {"action": Attended(((0, 99),))}),
    "keys that end first": (KNOCKOUT, {"action": Attended(((2, 2),))}),
    "no keys that are removed": (KNOCKOUT, {"action": Attended()}),
    "an endless factor": (KNOCKOUT, {"action": Attended((), float("inf"))}),
    "removed rows": (REPLACED, {"action": Attended(((0, 1),), None, KEY)}),
    "rows of a pattern beyond": (REPLACED, {"ranges": (PositionRange(0, 1, 1),)}),
    "rows of a pattern that are nowhere": (REPLACED, {"action": Attended((), 1.0, "v:" + "0" * 64)}),
    "keys that are removed on a device": (KNOCKOUT, {"action": RemoveKeys(0, 1)}),
    "keys twice": (KNOCKOUT, {"action": Attended(((0, 2), (1, 3)))}),
    "queries twice": (KNOCKOUT, {"ranges": (PositionRange(2, 9), PositionRange(2, 9))}),
    "no queries": (REPLACED, {"ranges": ()}),
    "attention at another point": (KNOCKOUT, {"points": (point("z[1]"),)}),
    "attention with a value": (KNOCKOUT, {"values": (KEY,)}),
    "attention under a condition": (KNOCKOUT, {"condition": Condition(KEY, False)}),
}
PATTERN = pc.Capture("pattern[1]", "prompt")
WRONG_ATTENTION = {
    "longer rows": {"reader": {"keys": 128}}, "rows of no length": {"reader": {"keys": 0}},
    "endless rows of no token": {"reader": {"keys": 1 << 60}, "ranges": ()},
    "the largest of whole rows": {"top": 3}, "too many of the largest": {"reader": {"keys": 0}, "top": 1 << 20},
    "heads beyond": {"reader": {"heads": 2}}, "no heads": {"reader": {"heads": 0}}, "heads below": {"reader": {"first": -1}},
    "another site": {"reader": {"site": "z"}}, "another point": {"points": (point("z[1]"),)}, "columns": {"columns": 1 << 16},
}  # fmt: skip


@pytest.mark.parametrize("changes", WRONG_ATTENTION.values(), ids=WRONG_ATTENTION)
def test_attention_of_another_form_is_refused(changes):
    program, sizes = bound([], [PATTERN, pc.Capture("attn_scores[0:2]", "generated", top=2)])
    check(program, sizes)
    op, rest = (
        program.ops[0],
        {name: value for name, value in changes.items() if name in ("points", "ranges", "columns")},
    )
    reader = msgspec.structs.replace(op.action.reader, **changes.get("reader", {}))
    action = msgspec.structs.replace(op.action, reader=reader, top=changes.get("top", 0))
    with pytest.raises(ProgramError, match="invalid bound program"):
        check(msgspec.structs.replace(program, ops=(msgspec.structs.replace(op, action=action, **rest),)), sizes)


def test_the_attention_of_a_program_fits(monkeypatch):
    program, sizes = bound([], [PATTERN] * 3)
    monkeypatch.setattr(sys.modules["patchclamp.plan.bound"], "MAX_ATTENTION_BYTES", 2 * 4 * 64 * PROMPT)
    check(msgspec.structs.replace(program, ops=program.ops[:2]), sizes)
    with pytest.raises(CapacityError, match=r"capture\[2\].tokens: .*pattern of 5 tokens"):
        check(program, sizes)


SPANNED = {
    "a delimiter below": (0, {"opening": -1}), "one delimiter": (0, {"opening": 4}),
    "a delimiter beyond": (0, {"closing": SITES.d_vocab}), "no such latch": (0, {"latch": 8}),
    "another latch": (0, {"latch": 1}), "no such bit": (0, {"bit": 22}), "bits set twice": (0, {"bit": 1}),
    "another bit is kept": (1, {"bit": 0}), "a first position is kept": (1, {"last": False}),
    "kept where it is read": (1, {"points": (point("embed"),)}), "kept at once": (1, {"ranges": (PositionRange(6, 8),)}),
    "read from the prompt on": (0, {"ranges": (PositionRange(4, 8),)}), "read at the end": (0, {"points": (point("logits"),)}),
}  # fmt: skip


@pytest.mark.parametrize(("number", "changes"), SPANNED.values(), ids=SPANNED)
def test_delimiters_of_another_form_are_refused(number, changes):
    program, sizes = bound([pc.Add(V, "embed", "generated - between(3, 4)")])
    assert [op.kind for op in program.ops] == [15, 10, 9, LINEAR]
    ops = list(program.ops)
    field = {name: value for name, value in changes.items() if name in ("points", "ranges")}
    action = msgspec.structs.replace(ops[number].action, **{k: v for k, v in changes.items() if k not in field})
    ops[number] = msgspec.structs.replace(ops[number], action=action, **field)
    with pytest.raises(ProgramError, match="invalid bound program"):
        check(msgspec.structs.replace(program, ops=tuple(ops)), sizes)
    with pytest.raises(ProgramError, match="invalid bound program"):
        check(msgspec.structs.replace(program, ops=(program.ops[0], *program.ops[2:])), sizes)


OWN = own_key(0, point("embed"))
WRONG_STORES = {  # of the op that stores, of the one that reads
    "nothing stored": ({"points": (), "values": ()}, {}),
    "stored elsewhere": ({"points": (point("resid_mid[0]"),)}, {}),
    "stored later": ({"ranges": (PositionRange(1, 6, 0, 1),)}, {}),
    "fewer stored": ({"ranges": (PositionRange(0, 2, 0, 1),)}, {}),
    "stored twice": ({"ranges": (PositionRange(0, 3, 0, 1), PositionRange(1, 3, 3, 1))}, {}),
    "stored over one another": ({"ranges": (PositionRange(0, 5, 0, 0),)}, {}),
    "stored with a gap": ({"ranges": (PositionRange(0, 2, 0, 1), PositionRange(2, 5, 3, 1))}, {}),
    "stored beyond": ({"ranges": (PositionRange(0, 5, 9, 1),)}, {}),
    "stored where others read": ({"values": (KEY,)}, {}),
    "read before it is there": ({}, {"points": (point("embed"),)}),
    "a later row": ({}, {"ranges": (PositionRange(0, 1, 4, 0),)}),
    "rows beyond": ({}, {"ranges": (PositionRange(0, 5, 1, 1),)}),
    "another's key": ({}, {"values": (own_key(7, point("embed")),)}),
    "a mask that is stored": ({}, {"action": Blend(1.0, OWN)}),
    "ids that are stored": ({}, {"condition": Condition(OWN, False)}),
}


@pytest.mark.parametrize("wrong", WRONG_STORES)
def test_rows_of_the_same_run_are_there_when_they_are_read(wrong):
    program, sizes = bound([pc.Add(pc.SameRun("embed"), "resid_post[1]", "prompt")])
    check(program, sizes)
    ops = [msgspec.structs.replace(op, **f) for op, f in zip(program.ops, WRONG_STORES[wrong], strict=True)]
    with pytest.raises(ProgramError, match=r"edits\[0\].*invalid bound program"):
        check(
            msgspec.structs.replace(program, ops=tuple(ops)), {KEY: (1, 4), own_key(7, point("embed")): (5, 4), **sizes}
        )


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_binder_makes_is_refused(wrong):
    op, fields = WRONG[wrong]
    check(*changed(op))
    with pytest.raises(ProgramError, match=r"edits\[0\]: (invalid bound program|RunCode|RemoveKeys)"):
        check(*changed(op, **fields))


A, B = (
    pc.Probe([V, V[::-1]], at=f"resid_post[{layer}]", bias=[1, 2], name=name) for layer, name in ((0, "a"), (1, "b"))
)
CONDITIONAL = [
    pc.When((A > 1) & ~(B[1] <= 2), [pc.Add(V, "resid_post[2]", "prompt[1:]"), pc.Zero("mlp_out[2]")]),
    pc.When(A[1] > 0, pc.Zero("mlp_out[1]"), scope="onwards"), pc.When(B > 0, pc.Zero("resid_post[1]"), scope="prompt"),
]  # fmt: skip
# by name: the index of an op of the bound `CONDITIONAL`, and fields of it that no binder makes so
WRONG_DECISIONS = {
    "a test of a probe that is not kept": (1, {"action": Compare(0.0, 0, "c")}),
    "a test of another matrix": (1, {"values": (KEY,)}),
    "a test of another product": (1, {"ranges": (PositionRange(0, 8, 2),)}),
    "a test of several products": (1, {"ranges": (PositionRange(0, 8, 0, 1),)}),
    "a test at other positions": (1, {"ranges": (PositionRange(0, 7),)}),
    "a test at another point": (1, {"points": (point("resid_post[1]"),)}),
    "a test of columns": (1, {"columns": pack_columns((0, 2))}),
    "a bit that is not there": (1, {"action": Compare(0.0, 23, "a")}),
    "a negative bit": (1, {"action": Compare(0.0, -1, "a")}),
    "a bit of another test": (4, {"action": Compare(0.0, 0, "b")}),
    "no number": (1, {"action": Compare(float("nan"), 0, "a")}),
    "bits that are not set": (6, {"action": All(2, 1 << 9, 1 << 9)}),
    "bits beyond a word": (6, {"action": All(2, 1 << 23, 0)}),
    "wanted bits outside the mask": (6, {"action": All(2, 1, 2)}),
    "bits before they are set": (6, {"points": (point("embed"),)}),
    "values for a decision": (6, {"values": (KEY,)}),
    "a guard of a bit that is not set": (7, {"guard": Guard(20)}),
    "a guard of a latch that is not set": (7, {"guard": Guard(0, 5)}),
    "an edit before its condition": (7, {"points": (point("resid_mid[0]"),)}),
    "a guard of logits": (8, {"points": (point("logits"),), "reaches_cache": False, "ranges": (PositionRange(4, 8),)}),
    "a guard of a capture": (0, {"guard": Guard(0)}),
    "a guard of a latch below none": (7, {"guard": Guard(0, -9)}),
    "a name that probes have not": (
        0,
        {"action": Keep(0, False, vector_key(pc.Vector.of([V, V[::-1]])), 2, 0, "a/b\n")},
    ),
    "two probes of one name": (3, {"action": Keep(0, False, vector_key(pc.Vector.of([V, V[::-1]])), 2, 0, "a")}),
}


def test_decisions_that_no_binder_makes_are_refused():
    program, sizes = bound(CONDITIONAL)
    check(program, sizes)
    names = [(op.path, type(op.action).__name__) for op in program.ops]
    assert [name for _, name in names[:7]] == [*["Keep", "Compare", "Compare"] * 2, "All"], names
    latched = [i for i, op in enumerate(program.ops) if isinstance(op.action, Latch)]
    wrong = WRONG_DECISIONS | {
        "latches beyond those of a request": (latched[0], {"action": Latch(0, 8)}),
        "a negative latch": (latched[0], {"action": Latch(0, -1)}),
        "a latch twice": (latched[1], {"action": Latch(0, 0)}),
        "a latch of a bit that is not set": (latched[0], {"action": Latch(20, 0)}),
        "a latch of logits": (latched[0], {"points": (point("logits"),), "ranges": (PositionRange(4, 8),)}),
        "a latch of no position": (latched[0], {"ranges": ()}),
        "an edit beside a latch of the prompt's tokens": (latched[0] + 1, {"points": (point("resid_post[0]"),)}),
    }
    for name, (i, fields) in wrong.items():
        ops = list(program.ops)
        ops[i] = msgspec.structs.replace(ops[i], **fields)
        forged = msgspec.structs.replace(program, ops=tuple(ops))
        try:
            check(forged, {KEY: (9, 4), **sizes})
        except ProgramError:
            continue
        pytest.fail(name)


def test_nothing_stands_between_a_probe_and_its_tests():
    """An edit there would make the decision one of other rows than those of the score."""
    program, sizes = bound([A, pc.Zero("resid_post[0]"), *CONDITIONAL])
    check(program, sizes)
    kinds = [type(op.action).__name__ for op in program.ops]
    assert kinds[:3] == ["Keep", "Compare", "Compare"]
    edit = kinds.index("Linear")
    for at in (1, 2):
        ops = list(program.ops)
        ops.insert(at, ops.pop(edit))
        with pytest.raises(ProgramError, match="probe"):
            check(msgspec.structs.replace(program, ops=tuple(ops)), sizes)


def test_a_point_is_captured_in_one_way():
    program, sizes = bound([], [PROJECTED, "resid_post[1]"])
    ops = (program.ops[0], msgspec.structs.replace(program.ops[1], points=program.ops[0].points))
    check(program, sizes)
    with pytest.raises(ProgramError, match=r"capture\[1\]: embed .*capture\[0\]"):
        check(msgspec.structs.replace(program, ops=ops), sizes)


def test_sizes_and_prompts_are_the_requests_own():
    program, sizes = bound([ADD])
    with pytest.raises(ProgramError, match="5 tokens, got 6"):
        check(program, sizes, prompt=6)
    with pytest.raises(ProgramError, match=r"width 8 .*width 4"):
        check(program, {KEY: (1, 8)})
    with pytest.raises(ProgramError, match="bank key"):
        check(program, {**sizes, "v:../../etc": (1, 4)})


def test_a_key_is_the_content_of_its_rows():
    for numbers in (V, ROWS, [V]):
        vector = pc.Vector.of(numbers)
        assert is_content(vector_key(vector), vector.rows())
        assert not is_content(vector_key(vector), vector.rows() + np.float32(1))
        assert not is_content(vector_key(vector), vector.rows().reshape(-1, 2))


# -- cells


def cells_and_sizes():
    """One cell for each edit that grading runs in batches, and one of all of them."""
    programs, sizes = [], {}
    edits = [
        edit for edit in EDITS
        if isinstance(edit, pc.Knockout)
        or (not isinstance(edit, pc.Capture) and not re.search("SameRun|between|pattern", str(edit)))
    ]  # fmt: skip
    for several in [*([edit] for edit in edits), edits]:
        program, own = bound(several)
        programs.append(with_removed_keys(program, SITES))
        sizes |= own
    cells = cells_of(programs)
    return cells.take(range(cells.count)), sizes


def check_cells_of(program, sites):
    verify_cells(cells_of([program]).take([0]), {}, PROMPT, sites)
    verify(program, {}, PROMPT, PROMPT, sites)


def check_cells(cells, sizes):
    verify_cells(CellRecords.of_bytes(cells.to_bytes()), sizes, PROMPT + MAX_TOKENS - 1, SITES)


def test_cells_of_programs_pass():
    check_cells(*cells_and_sizes())
    check_cells(cells_of([None, None]).take([0, 1]), {})


def regrouped(cells, **fields):
    [group, *_] = cells.groups
    return CellRecords(
        1, [msgspec.structs.replace(group.take(np.zeros(1, int)), number=np.zeros(1, int), **fields)], cells.keys
    )


@pytest.mark.parametrize("wrong", [
    lambda cells: msgspec.structs.replace(cells, count=-1),
    lambda cells: CellRecords(-1, [], []),
    lambda cells: msgspec.structs.replace(cells, keys=[*cells.keys, cells.keys[0]]),
    lambda cells: msgspec.structs.replace(cells, keys=[*cells.keys, KEY], groups=[]),
    lambda cells: msgspec.structs.replace(cells, groups=cells.groups * 2),
    lambda cells: msgspec.structs.replace(cells, groups=[cells.groups[0].take(np.zeros(0, int))]),
    lambda cells: regrouped(cells, records=np.zeros((1, 0), RECORD)),
    lambda cells: regrouped(cells, records=np.zeros((1, 1, 1), RECORD)),
    lambda cells: regrouped(cells, records=np.zeros((), RECORD)),
    lambda cells: regrouped(cells, point=np.zeros(1, np.int64)),
    lambda cells: regrouped(cells, key=np.zeros((0, 1), np.int64)),
])  # fmt: skip
def test_cells_of_another_form_are_refused(wrong):
    cells, sizes = cells_and_sizes()
    with pytest.raises(ProgramError, match="invalid bound program"):
        check_cells(wrong(cells), sizes)


@pytest.mark.parametrize("field", ["y", "key", "beside", "value", "step"])
@pytest.mark.parametrize("edit", [
    pc.LowRank(ROWS, [1.0, -1.0], ROWS, "mlp_out[1]"), pc.Replace(V, "resid_mid[1]", basis=ROWS),
], ids=["gates", "toward a row"])  # fmt: skip
def test_forged_cells_of_low_rank_edits_are_refused(edit, field):
    """A kernel reads as many factors and gates as a record says, from where it says."""
    program, sizes = bound([edit])
    cells = cells_of([program])
    check_cells(cells, sizes)
    [group] = cells.groups
    forged = msgspec.structs.replace(
        group, records=group.records.copy(), key=group.key.copy(), beside=group.beside.copy()
    )
    if field in ("key", "beside"):
        getattr(forged, field)[:] = getattr(group, "beside" if field == "key" else "key")  # the other vector
    else:
        forged.records[field] = {"y": 3, "value": 2, "step": 1}[field]
    with pytest.raises(ProgramError, match="invalid bound program"):
        check_cells(CellRecords(cells.count, [forged], cells.keys), sizes)


def test_a_rank_that_no_scratch_holds_is_refused(monkeypatch):
    """Where programs are bound, and where they come from elsewhere."""
    program, sizes = bound([pc.LowRank(ROWS, None, ROWS, "mlp_out[1]")])
    for name in ("bind", "verify"):
        monkeypatch.setattr(sys.modules[f"patchclamp.plan.{name}"], "MAX_RANK", 1)
    with pytest.raises(pc.ShapeError, match="a rank of at most 1, got 2"):
        bound([pc.LowRank(ROWS, None, ROWS, "mlp_out[1]")])
    with pytest.raises(ProgramError, match="rank 2"):
        check(program, sizes)
    with pytest.raises(ProgramError, match="factors"):
        check_cells(cells_of([program]), sizes)


def test_columns_of_wide_rows():
    """The first and the last column are 16 bits each, so that the highest makes the word negative."""
    sites = SiteMap(LLAMA, Sizes(1, 4, 32, 1, 1, 4, 40_000))
    point = next(of.number for of in sites.points if of.kind == "neurons")
    op = BoundOp(
        "edits[0]", Linear(0.0, 0.0), (point,), (), (PositionRange(0, 1),), True, pack_columns((32_000, 32_768))
    )
    program = BoundProgram("mine", PROMPT, (op,))
    check_cells_of(program, sites)


@pytest.mark.parametrize("edit", [
    pc.Ablate(V, "z[1]"), pc.Ablate(V, "z[1]", strength=0.5), pc.Clamp(V, "z[1]", low=-1.0), pc.Noise(0.5, "z[1]", relative=True),
    pc.Add(V, "z[1]", norm="match"), pc.Rotate(ROWS, 5, "z[1]"),
    pc.Replace(pc.From("ran", "z[1]"), "resid_post[1]", "prompt[1:3]"),
    pc.Replace(pc.From("ran", "resid_post[1]"), "z[1]", "prompt[1:3]"),
], ids=str)  # fmt: skip
def test_what_sums_over_a_row_that_is_cut_is_refused(edit):
    """With tensor parallelism. The binder of one worker makes it, that of two does not."""
    one, two = (SiteMap(LLAMA, Sizes(3, 4, 32, 2, 2, 2, 16), tensor_parallel=count) for count in (1, 2))
    vectors, ran = {}, Ran(range(7))
    program = bind(Program.of([edit]), "mine", spelled(PROMPT), 1, one, lambda name: ran, vectors=vectors)
    sizes = bank_sizes(program, vectors, one, lambda run, at: 7)
    for check_it in (lambda of: verify(program, sizes, PROMPT, PROMPT, of),
                     lambda of: verify_cells(cells_of([program]), sizes, PROMPT, of)):  # fmt: skip
        check_it(one)
        with pytest.raises(ProgramError, match="sharded"):
            check_it(two)


HOSTILE = [-1, 1, 2, 3, 7, 9, 100, 1 << 20, 2**31 - 1, -(2**31)]


def test_no_changed_number_reads_or_writes_beyond_its_own():
    """Whatever number of whatever record is changed, it is refused, or reads within its rows and writes to the site."""
    refused = 0
    cells, sizes = cells_and_sizes()
    content = cells.to_bytes()
    begin = np.cumsum([0, *(rows * width for rows, width in (sizes[key] for key in cells.keys))])[:-1]
    width = np.array([sizes[key][1] for key in cells.keys])
    end = begin + [sizes[key][0] * sizes[key][1] for key in cells.keys]
    none = np.zeros(len(SITES.points), np.int64)
    placed = Placed(begin[None], width[None], none, none, none)
    for number, group in enumerate(cells.groups):
        names = [
            *(("records", name) for name in RECORD.names),
            ("point", ""),
            ("key", ""),
            ("beside", ""),
            ("number", ""),
        ]
        for of, name in names:
            values = [*HOSTILE, *((np.nan, np.inf) if name in ("x", "y", "factor") else ())]
            for i, at in enumerate(np.ndindex(getattr(group, of).shape)):
                for value in values[i % 3 :: 3]:  # each field gets each value, in some record
                    changed = CellRecords.of_bytes(content)
                    group = changed.groups[number]
                    setattr(group, of, getattr(group, of).copy())
                    array = getattr(group, of)
                    (array[name] if name else array)[at] = value
                    try:
                        check_cells(changed, sizes)
                    except ProgramError:
                        refused += 1
                        continue
                    records, _ = place(group, placed)
                    reads = np.isin(records["kind"], (LINEAR, BLEND, PROJECT, ADD_NORMED, ROTATE))
                    reads &= group.key >= 0
                    first = records["value"]
                    several = (records["stop"] - records["start"] - 1) * records["step"] + (records["kind"] == ROTATE)
                    last = first + (several + 1) * width[group.key]
                    assert ((first >= begin[group.key]) & (last <= end[group.key]))[reads].all(), (of, name, at, value)
                    assert (records["start"] >= 0).all()
                    assert (records["stop"] < PROMPT + MAX_TOKENS).all()
                    widths = np.array([point.width for point in SITES.points])[group.point]
                    assert ((records["columns"] >> 16) <= widths).all()
                    assert np.isfinite(records["x"]).all()
                    removed = records[records["kind"] == REMOVE]
                    assert (removed["step"] >= 0).all()
                    assert (removed["value"] < PROMPT + MAX_TOKENS).all()
                    assert {SITES.points[i].kind for i in group.point[records["kind"] == REMOVE].tolist()} <= {"z"}
    assert refused > 1000
