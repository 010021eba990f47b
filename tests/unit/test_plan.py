"""Binding, the program table, step plans against a slow loop, golden plans, and block keys."""

import itertools
from pathlib import Path
from string import ascii_lowercase

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp import language
from patchclamp.language import values
from patchclamp.language.program import Program
from patchclamp.language.values import MAX_FP32
from patchclamp.plan import (
    BLEND,
    CAPTURE,
    LINEAR,
    NOISE,
    PROJECT,
    RECORD,
    Batch,
    ProgramTable,
    Prompt,
    bind,
    make_plan,
)
from patchclamp.plan import bound as bound_module
from patchclamp.plan.bind import Known, vector_key
from patchclamp.plan.bound import (
    Blend,
    BoundOp,
    BoundProgram,
    Condition,
    Guard,
    Keep,
    Linear,
    Noisy,
    NormedAdd,
    PositionRange,
    Projection,
    Rotation,
    block_key,
    lowest_capture,
    lowest_edit,
    noise_stream,
    position_ranges,
    run_key,
)  # fmt: skip
from patchclamp.plan.step import BYTES
from patchclamp.plan.table import record_count, record_work, records_of, records_of_alike, shape_of
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from tests.reference.admitting import Table
from tests.reference.records import record_array

D, V, LAYERS = 4, 7, 3
SITES = SiteMap(LLAMA, Sizes(LAYERS, D, V))
POINTS = len(SITES.points)
WIDTHS = np.array([point.width for point in SITES.points])
SAMPLED = np.array([point.rows == "sampled" for point in SITES.points])
GOLDEN = Path(__file__).parents[1] / "golden"


def point(site: str) -> int:
    return SITES.resolve(pc.site(site))[0].point


def spelled(length: int) -> Prompt:
    """A prompt whose tokens are the letters of the alphabet."""
    return Prompt(range(length), lambda: (ascii_lowercase[:length], [(i, i + 1) for i in range(length)]))


class Ran:
    """A source: a run of `prompt` tokens that captured `positions` at every site, or by site."""

    def __init__(self, positions, prompt=5, generated=3, **by_site):
        self.positions, self.by_site = positions, {point(name): p for name, p in by_site.items()}
        self.prompt, self.limit = spelled(prompt), prompt + generated

    def positions_of(self, number):
        return np.array(self.by_site.get(number, self.positions), np.int64)

    def select(self, tokens):
        return self.prompt.select(tokens, self.limit)


def bound(edits=(), capture=(), prompt=5, max_tokens=4, run="mine", **sources):
    def source(key):
        if key not in sources:
            raise pc.MissingSource(f"run {key} is not here")
        return sources[key]

    return bind(Program.of(edits, capture), run, spelled(prompt), max_tokens, SITES, source)


# -- binding


@given(st.sets(st.integers(0, 30), min_size=1), st.sampled_from(["one", "each", "some"]), st.data())
def test_position_ranges_are_the_positions_and_few(chosen, kind, data):
    positions = np.array(sorted(chosen))
    size = len(positions)
    some_rows = st.sets(st.integers(0, 60), min_size=size, max_size=size)
    rows = {"one": [0] * size, "each": range(size), "some": sorted(data.draw(some_rows))}[kind]
    rows = np.array(rows)
    ranges = position_ranges(positions, None if kind == "one" else rows)
    read = [(p, row + (p - start) * step) for start, stop, row, step in ranges for p in range(start, stop)]
    assert read == list(zip(positions.tolist(), rows.tolist(), strict=True))
    breaks = sum(
        b - a != 1 or s - r != (0 if kind == "one" else 1)
        for (a, b), (r, s) in zip(itertools.pairwise(positions), itertools.pairwise(rows), strict=True)
    )
    assert len(ranges) == breaks + 1


def test_ops_become_numbers():
    v = [1.0, 2.0, 3.0, 4.0]
    made = bound(
        [
            pc.Add(v, "resid_post[0:2]", "prompt[-1]", 2.5), pc.Replace(v, "mlp_out[1]", "every[0, 1, 4]", 0.25),
            pc.Zero("resid_pre[2]"), pc.Capture("embed", "generated", "bfloat16"), pc.Add(v, "final_norm"),
        ],
        "resid_post[1:]",
    )  # fmt: skip
    key = (vector_key(pc.Vector.of(v)),)
    add, replace, zero, inside, after, capture = made.ops
    assert (made.run, made.prompt) == ("mine", 5)
    assert (add.path, add.kind, add.values, add.ranges) == ("edits[0]", LINEAR, key, ((4, 5, 0, 0),))
    assert (add.action, add.reaches_cache) == (Linear(1.0, 2.5), True)
    assert add.points == (point("resid_post[0]"), point("resid_pre[2]"))
    assert (replace.action, replace.ranges) == (Linear(0.75, 0.25), ((0, 2, 0, 0), (4, 5, 0, 0)))
    assert (zero.action, zero.values, zero.ranges) == (Linear(0.0, 0.0), (), ((0, 8, 0, 0),))
    assert (inside.path, inside.action, inside.ranges) == ("edits[3]", Keep(1), ((5, 8, 0, 0),))
    assert (after.points, after.reaches_cache, inside.reaches_cache) == ((point("final_norm"),), False, False)
    assert (capture.path, capture.points) == ("capture[0]", (point("resid_post[1]"), point("resid_post[2]")))
    assert {k: p.tolist() for k, p in made.captured.items()} == {
        point("embed"): [5, 6, 7], point("resid_post[1]"): list(range(8)), point("resid_post[2]"): list(range(8)),
    }  # fmt: skip


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_joined_selections_are_sets(a, b, c):
    one, two, three = (pc.every[tuple(each)] if each else pc.every[0:0] for each in (a, b, c))
    for joined, expected in ((one | two, a | b), (one - two, a - b), ((one | two) - three, (a | b) - c),
                             (one | two - three, a | (b - c)), (one - (two - three), a - (b - c))):  # fmt: skip
        kept = bound((), pc.embed @ joined).ops[0].ranges
        assert [p for start, stop, *_ in kept for p in range(start, stop)] == sorted(expected)
    span = bound((), pc.embed @ (pc.span("bc") | 0) - pc.every[1]).ops[0].ranges
    assert span == ((0, 1, 0, 0), (2, 3, 0, 0))


def test_ops_with_arithmetic_of_their_own_become_numbers():
    v, mask, two = [3.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.5, 0.0], [[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]]
    edits = [
        pc.Replace(v, "embed", "prompt[1:3]", 0.5, mask), pc.Scale(0.25, "resid_mid[1]"),
        pc.Ablate(two, "resid_post[0:2]", "every[1, 2, 4]"), pc.Clamp(v, "mlp_out[0]", "prompt[0]", low=-1),
        pc.Noise(0.5, "resid_post[0:2]", "generated", seed=7, relative=True), pc.Noise(0, "embed"),
    ]  # fmt: skip
    made = bound(edits)
    blend, scale, ablate, clamp, noise, none = made.ops
    v_key, mask_key = (vector_key(pc.Vector.of(row)) for row in (v, mask))
    assert (blend.kind, blend.values, blend.action) == (BLEND, (v_key,), Blend(0.5, mask_key))
    assert blend.keys == (v_key, mask_key)
    assert blend.reads() == [(v_key, point("embed")), (mask_key, point("embed"))]
    assert (scale.action, scale.values, scale.ranges) == (Linear(0.25, 0.0), (), ((0, 8, 0, 0),))
    basis = pc.Vector.of([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert (ablate.action, ablate.values) == (Projection(0.0, 0.0), (vector_key(basis),))
    assert ablate.ranges == ((1, 3, 0, 0), (4, 5, 0, 0), (1, 3, 1, 0), (4, 5, 1, 0))
    unit = pc.Vector.of([[0.6, 0.0, 0.8, 0.0]])
    assert (clamp.action, clamp.values) == (Projection(-1.0, MAX_FP32), (vector_key(unit),))
    streams = (noise_stream("stream", 1), noise_stream("stream", 2))
    assert (noise.action, noise.ranges) == (Noisy(0.5, 7, True, streams), ((5, 8, 0, 0),))
    assert none.ranges == ()  # not a bit is changed
    assert all(op.reaches_cache for op in made.ops)
    vectors = {}
    bind(Program.of(edits), "mine", spelled(5), 4, SITES, None, vectors=vectors)
    expected = {vector_key(pc.Vector.of(row)): np.atleast_2d(row) for row in (v, mask, basis.array(), unit.array())}
    assert vectors.keys() == expected.keys()
    assert all(np.allclose(vectors[key], rows) for key, rows in expected.items())
    here = np.zeros(POINTS, bool)
    here[point("resid_post[1]")] = True
    assert (noise.at(here).points, noise.at(here).action.streams) == ((point("resid_post[1]"),), streams[1:])
    assert (blend.at(here).points, blend.at(here).keys) == ((), ())
    with pytest.raises(pc.ShapeError, match=r"edits\[0\].mask: .*embed, got \[2\]"):
        bound(pc.Replace(v, "embed", mask=[1.0, 2.0]))
    with pytest.raises(pc.ShapeError, match=r"edits\[0\].directions: .*embed, got \[2\]"):
        bound(pc.Ablate([1.0, 2.0], "embed"))


def test_their_records_say_all_of_it():
    v, mask = [3.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.5, 0.0]
    made = bound([
        pc.Replace(v, "embed", "prompt[1:3]", 0.5, mask), pc.Ablate([v, mask], "embed", "prompt[0]"),
        pc.Noise(0.5, "embed", "prompt[-1]", seed=(1 << 62) + 3, relative=True),
    ])  # fmt: skip
    addresses = {key: (100 * (1 + i), D) for i, key in enumerate(dict.fromkeys(k for op in made.ops for k in op.keys))}
    records, counts = records_of(made.ops, addresses, POINTS)
    assert counts.sum() == counts[point("embed")] == 4
    assert records.tolist() == record_array([
        (1, 3, BLEND, 0, 100, 0.0, 0.5, 200),
        (0, 1, PROJECT, 0, 300, 0.0, 0.0), (0, 1, PROJECT, 0, 300 + D, 0.0, 0.0),
        (4, 5, NOISE, 1, noise_stream("stream", 0), 0.0, 0.5, (1 << 62) + 3),
    ]).tolist()  # fmt: skip


def test_blocks_of_the_cache_tell_noise_and_masks_apart():
    def key(op) -> str | None:
        return block_key(bound(op), 0, 16)

    v = [3.0, 0.0, 4.0, 0.0]
    different = [
        pc.Noise(0.5, "embed"), pc.Noise(0.5, "embed", seed=1), pc.Noise(0.5, "embed", relative=True),
        pc.Noise(0.25, "embed"), pc.Noise(0.5, "resid_mid[0]"), pc.Replace(v, "embed"), pc.Replace(v, "embed", mask=v),
        pc.Replace(v, "embed", mask=[0.0, 0.0, 4.0, 0.0]), pc.Ablate(v, "embed"), pc.Clamp(v, "embed", low=0),
        pc.Scale(0.0, "embed"), pc.Scale(0.5, "embed"), pc.Add(v, "embed"), pc.Add(v, "embed", norm="match"),
        pc.Rotate([v, v[::-1]], 0, "embed"), pc.Rotate([v, v[::-1]], 5, "embed"), pc.Rotate([v[::-1], v], 5, "embed"),
        pc.Rotate([v, v[::-1]], 5, "embed", relative=True),
    ]  # fmt: skip
    assert len({key(op) for op in different}) == len(different)
    assert key(pc.Noise(0.5, "embed")) == key(pc.Noise(0.5, "embed", seed=0))
    assert key(pc.Noise(0, "embed")) is None
    assert key(pc.Ablate(v, "embed")) == key(pc.Ablate([6.0, 0.0, 8.0, 0.0], "embed"))


def test_blocks_of_the_cache_tell_apart_what_decides():
    """A block with conditional edits depends on every number of their condition, and one without on none."""
    v, w = [3.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]

    def key(condition, scope="token", tokens="every", start=0) -> str | None:
        return block_key(bound(pc.When(condition, pc.Zero("mlp_out[2]", tokens), scope=scope)), start, 16)

    p, q = (pc.Probe([v, w], "resid_post[1]", bias=[0, 1], name=name) for name in "pq")
    different = [
        key(p > 0), key(p > 1), key(p >= 0), key(p[1] > 0), key(~(p > 0)), key((p > 0) & (p[1] > 0)),
        key(pc.Probe([w, v], "resid_post[1]", name="p") > 0), key(pc.Probe([v, w], "resid_post[0]", name="p") > 0),
        key(pc.Probe([v, w], "resid_post[1]", "prompt", name="p") > 0), key(p > 0, "prompt"), key(p > 0, "onwards"),
        block_key(bound(pc.Zero("mlp_out[2]")), 0, 16),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert key(p > 0, tokens="prompt[-1]", start=0) is not None
    assert block_key(bound(pc.When(p > 0, pc.Zero("mlp_out[2]", "prompt[-1]"))), 0, 2) is None
    assert key(p[-1] > 1) == key(p[1] > 1)
    assert key(q > 1) is not None


def test_captures_of_one_site_are_a_union():
    kept = ["embed @ prompt[2:4]", "resid_pre[0] @ prompt[0]", "logits @ generated[1]"]
    made = bound(pc.Capture("embed", "prompt[1:3]"), kept)
    assert {k: p.tolist() for k, p in made.captured.items()} == {point("embed"): [0, 1, 2, 3], point("logits"): [6]}
    assert bound((), "embed @ generated", max_tokens=1).captured[point("embed")].tolist() == []


def test_points_are_named_once_by_the_earliest_word(monkeypatch):
    """Whoever asks for a name, once a prompt say, reads it: on a deep model making them all takes milliseconds."""
    sites = SiteMap(SITES.family, SITES.sizes)
    names = [sites.label(each.number) for each in sites.points]
    assert names[point("resid_pre[1]")] == "resid_post[0]"
    assert names[point("embed")] == "embed"
    assert len(set(names)) == len(names)
    monkeypatch.setattr(SiteMap, "_point", lambda *_: pytest.fail("they are made again"))
    assert [sites.label(each.number) for each in sites.points] == names


def test_what_prompts_share_is_made_once(monkeypatch):
    """A list of prompts with one program: its vectors are hashed, padded and made a basis once, its captures are
    worked out once a run, however often they are asked for."""
    hashed = []
    sha256 = values.hashlib.sha256
    monkeypatch.setattr(values.hashlib, "sha256", lambda data: hashed.append(1) or sha256(data))
    v = np.random.default_rng(5).normal(size=D).tolist()
    program = Program.of([pc.Add(v, "resid_post"), pc.Ablate(v, "embed"), pc.Clamp(v, "mlp_out", low=0)], "resid_post")
    runs = [bind(program, f"run {i}", spelled(5), 4, SITES, None) for i in range(20)]
    assert len(hashed) <= 6  # the vectors as they were given, and the basis that two of them share
    arange, ranges = np.arange, []
    monkeypatch.setattr(bound_module.np, "arange", lambda *args: ranges.append(args) or arange(*args))
    for _ in range(3):
        assert [len(positions) for positions in runs[0].captured.values()] == [8] * LAYERS
    assert len(ranges) == 1


def test_a_row_for_each_position():
    rows = np.arange(3 * D).reshape(3, D)
    made = bound(pc.Replace(rows, "resid_pre[1]", "every[1, 2, 6]"))
    assert made.ops[0].ranges == ((1, 3, 0, 1), (6, 7, 2, 0))
    with pytest.raises(pc.ShapeError, match=r"^edits\[0\]\.value: .*\(8\), got 3 rows"):
        bound(pc.Replace(rows, "resid_pre[1]"))
    with pytest.raises(pc.ShapeError, match=r"^edits\[0\]\.value: .*resid_pre\[1\], got \[3\]$"):
        bound(pc.Replace([1.0, 2.0, 3.0], "resid_pre[1]"))
    assert bound(pc.Add([0.0] * V, "logits")).ops[0].ranges == ((4, 8, 0, 0),)


def test_rows_of_another_run():
    runs = {"abc": Ran(range(8)), "gap": Ran([0, 1, 2, 4, 6])}

    def op(value, at="resid_pre[1]", tokens="every"):
        return bound(pc.Replace(value, at, tokens), **runs).ops[0]

    here = run_key("abc", point("resid_pre[1]"))
    assert op(pc.From("abc")).values == (here,)
    assert op(pc.From("abc")).ranges == ((0, 8, 0, 1),)
    assert op(pc.From("abc"), tokens="prompt[2:4]").ranges == ((2, 4, 2, 1),)
    assert op(pc.From("abc", position=3)).ranges == ((0, 8, 3, 0),)
    assert op(pc.From("abc", position="prompt[-2:]"), tokens="every[5, 7]").ranges == ((5, 6, 3, 0), (7, 8, 4, 0))
    assert op(pc.From("abc", "mlp_out[0]", "generated[0]")).values == (run_key("abc", point("mlp_out[0]")),)
    assert op(pc.From("abc", "mlp_out[0]", "generated[0]")).ranges == ((0, 8, 5, 0),)
    assert op(pc.From("abc"), at="resid_pre").values == tuple(
        run_key("abc", point(f"resid_pre[{i}]")) for i in range(3)
    )
    assert op(pc.From("abc", "resid_pre[1]"), at="resid_pre").values == (here,)
    assert op(pc.From("gap", position='span("bc")'), tokens="prompt[3:5]").ranges == ((3, 5, 1, 1),)
    assert op(pc.From("gap"), tokens="every[2, 4, 6]").ranges == ((2, 3, 2, 0), (4, 5, 3, 0), (6, 7, 4, 0))


def test_what_another_run_lacks():
    runs = {"abc": Ran([0, 1, 4]), "odd": Ran([0, 1], resid_pre=[0, 2]), "none": Ran([])}
    at = pc.resid_pre[1] @ pc.prompt[0]
    cases = [
        (pc.From("who"), at, pc.MissingSource, "run who"),
        (pc.From("none"), at, pc.MissingSource, "run none"),
        (pc.From("abc"), pc.resid_pre[1] @ pc.prompt[:3], pc.MissingSource, "resid_pre[1] at position 2"),
        (pc.From("abc", position=7), at, pc.MissingSource, "resid_pre[1] at position 7"),
        (pc.From("abc", position=8), at, pc.TokensError, "every[8]"),
        (pc.From("abc", position="prompt[0:2]"), pc.resid_pre[1] @ pc.prompt[:3], pc.ShapeError, "2 (prompt[0:2])"),
        (pc.From("abc", "mlp_out[0:2]"), pc.resid_pre @ pc.prompt[0], pc.ShapeError, "2 (mlp_out[0:2])"),
        (pc.From("abc", "logits", 4), at, pc.ShapeError, "logits and resid_pre[1]"),
        (pc.From("odd"), pc.resid_pre @ pc.every[1], pc.MissingSource, ""),
        (pc.From("abc", "router[1]"), at, pc.UnsupportedSite, ""),
    ]  # fmt: skip
    for value, place, kind, word in cases:
        with pytest.raises(pc.PatchclampError) as caught:
            bound([pc.Zero("embed"), pc.Replace(value, place)], **runs)
        assert type(caught.value) is kind
        # a wrong position is that field's mistake; what the run lacks is the whole value's
        assert caught.value.path == ("edits[1].value.position" if kind is pc.TokensError else "edits[1].value")
        assert word in caught.value.message


def test_layers_that_captured_different_positions_are_not_mixed():
    runs = {"odd": Ran([0, 1, 2], resid_mid=[1, 2])}
    assert bound(pc.Replace(pc.From("odd"), "resid_mid[1:]", "prompt[1]"), **runs).ops[0].ranges == ((1, 2, 1, 0),)
    with pytest.raises(pc.MissingSource, match=r"run odd .*resid_mid"):
        bound(pc.Replace(pc.From("odd"), "resid_mid", "prompt[1]"), **runs)


def test_logits_are_where_tokens_are_sampled():
    def positions(tokens):
        return bound((), pc.logits @ tokens).captured[point("logits")].tolist()

    assert positions(pc.every) == [4, 5, 6, 7]
    assert positions(pc.generated) == [5, 6, 7]
    assert positions(pc.prompt[-1]) == positions(pc.every[4]) == positions(pc.span("e")) == [4]
    assert positions(pc.every - pc.token(1)) == positions(pc.every | pc.token(4)) == [4, 5, 6, 7]
    assert positions(pc.every - pc.prompt) == [5, 6, 7]
    assert positions(pc.every & pc.prompt) == positions(pc.every[:5]) == [4]
    assert positions(pc.every[::3] | pc.every[5]) == [5, 6]
    text = r"^capture\[0\]\.tokens: logits .*\(4 on\), not at 0"
    for tokens in (pc.prompt, pc.prompt[0], pc.every[0, 5], pc.span("a"), pc.token(0), pc.every | pc.prompt[0]):
        with pytest.raises(pc.UnsupportedSite, match=text):
            positions(tokens)


def test_a_program_is_checked_before_it_runs():
    cases = [
        (pc.Zero("router[0]"), pc.UnsupportedSite, "at", ", ".join(w for w in language.SITES if w not in ("router", "mixer_out"))),
        (pc.Zero("resid_post[3]"), pc.UnsupportedSite, "at", "3 layers (0..2)"),
        (pc.Zero("resid_post[2:9]"), pc.UnsupportedSite, "at", "3 layers (0..2)"),
        (pc.Zero("embed", "prompt[5]"), pc.TokensError, "tokens", "prompt[5]"),
        (pc.Zero("embed", 'span("x")'), pc.TokensError, "tokens", "'abcde'"),
        (pc.Zero("embed", "generated[3]"), pc.TokensError, "tokens", "max_tokens"),
        (pc.Zero("embed", "generated[3:]"), pc.TokensError, "tokens", "generated[3:]"),
    ]  # fmt: skip
    for op, kind, field, word in cases:
        with pytest.raises(pc.PatchclampError) as caught:
            bound(op)
        assert type(caught.value) is kind
        assert caught.value.path == f"edits[0].{field}"
        assert word in caught.value.message


def test_records_are_by_point_in_program_order():
    v, w = [1.0] * D, [[2.0] * D, [3.0] * D]
    made = bound(
        [pc.Add(v, "resid_post[0:2]", "prompt[1:3]"), pc.Capture("resid_post[0]", "prompt[2]"),
         pc.Replace(w, "resid_post[0]", "every[2, 5]", 0.5), pc.Zero("embed")],
        "embed @ prompt[0]",
    )  # fmt: skip
    addresses = {vector_key(pc.Vector.of(v)): (40, D), vector_key(pc.Vector.of(w)): (8, D)}
    records, counts = records_of(made.ops, addresses, POINTS)
    embed, first, second = point("embed"), point("resid_post[0]"), point("resid_post[1]")
    assert counts.tolist() == [{embed: 2, first: 4, second: 1}.get(number, 0) for number in range(POINTS)]
    expected = [
        (0, 8, LINEAR, 0, 0, 0, 0), (0, 1, CAPTURE, 0, 4, 0, 0),
        (1, 3, LINEAR, 0, 40, 1, 1), (2, 3, CAPTURE, 0, 1, 0, 0), (2, 3, LINEAR, 0, 8, 0.5, 0.5),
        (5, 6, LINEAR, 0, 8 + D, 0.5, 0.5), (1, 3, LINEAR, 0, 40, 1, 1),
    ]  # fmt: skip
    assert records.tolist() == record_array(expected).tolist()
    assert [len(part) for part in records_of((), {}, POINTS)] == [0, POINTS]


@pytest.mark.parametrize("shape", range(7))
def test_programs_of_one_shape_are_admitted_together_as_one_by_one(shape: int):
    """Records, tables and capture layout are the same to the bit."""
    rng = np.random.default_rng(shape)

    def program(i: int) -> BoundProgram:
        v, w, scale = rng.standard_normal(D).tolist(), rng.standard_normal(D).tolist(), float(rng.standard_normal())
        site, other = f"resid_post[{i % 2}]", f"attn_out[{(i + 1) % 2}]"
        first = int(rng.integers(0, 3))
        return [
            lambda: bound([pc.Add(v, site, f"every[{first}:5]", scale=scale), pc.Scale(scale, other)]),
            lambda: bound([], f"resid_post[0:2] @ every[{first}:5]"),
            lambda: bound([], [f"{site} @ every[{first}]", pc.Capture(other, dtype="bfloat16")]),
            lambda: bound([pc.Replace(v, site, f"prompt[{first}]", mask=w), pc.Clamp(w, other, low=scale)]),
            lambda: bound([pc.Noise(abs(scale), site, seed=i, relative=True), pc.Zero(other, f"prompt[{first}]")]),
            lambda: bound([pc.Add([v, w], site, "every[1, 4]"), pc.Ablate([v, w], other)], "embed @ prompt[0]"),
            lambda: bound([pc.Zero(site, f"generated & token({3 + first})")]),
        ][shape]()

    programs = [program(i) for i in range(5)]
    assert len({shape_of(made.ops) for made in programs}) == 1
    keys = [[key for op in made.ops for key in op.keys] for made in programs]
    addresses = [{key: (D * int(rng.integers(1, 99)), D) for key in some} for some in keys]
    records, counts = records_of_alike([made.ops for made in programs], addresses, POINTS)
    slots, begins = np.array([3, 1, 5, 2, 4]), 40 * np.arange(5)
    together, alone = ProgramTable(5, POINTS, 200), ProgramTable(5, POINTS, 200)
    together.install_alike(records, counts, slots, begins)
    for i, made in enumerate(programs):
        expected = records_of(made.ops, addresses[i], POINTS)
        assert records[i].tolist() == expected[0].tolist()
        assert counts[i].tolist() == expected[1].tolist()
        alone.install(*expected, int(slots[i]), int(begins[i]))
    assert len(records[0]) > 0
    assert together.records.tolist() == alone.records.tolist()
    for name in ("first", "generation", "_acts", "_acting"):
        assert getattr(together, name).tolist() == getattr(alone, name).tolist()
    assert (together.changed, together.version, len(together)) == (alone.changed, alone.version, len(alone))
    layout, expected_layout = together.captures.layout(), alone.captures.layout()
    for name in layout.__struct_fields__:
        assert np.array_equal(getattr(layout, name), getattr(expected_layout, name)), name


# -- the program table


def some(kinds, value=0):
    records = np.zeros(len(kinds), RECORD)
    records["kind"], records["value"] = kinds, value + np.arange(len(kinds))
    return records


def test_slots_and_records_are_reused():
    table = Table(2, 3, 10)
    counts = np.array([1, 0, 2])
    a = table.admit(some([LINEAR] * 3), counts)
    b = table.admit(some([CAPTURE] * 3, 100), counts)
    assert (a, b, len(table), table.free_records, table.version) == (1, 2, 2, 4, 2)
    assert table.first[a].tolist() == [0, 1, 1, 3]
    assert table.first[b].tolist() == [3, 4, 4, 6]
    layout = table.captures.layout()
    assert (layout.op.tolist(), layout.slot.tolist()) == ([100, 101, 102], [2, 2, 2])
    ranges, regions = layout.pairs(np.arange(3))
    assert (ranges.tolist(), layout.point[regions].tolist()) == ([0, 1, 2], [0, 2, 2])
    table.drop(a)
    assert (len(table), table.free_records, table.first[a].tolist()) == (1, 7, [0, 0, 0, 0])
    assert table.admit(some([LINEAR] * 3, 7), counts) == a
    assert table.records["value"][:3].tolist() == [7, 8, 9]
    table.drop(a), table.drop(b)
    assert len(table.captures) == 0
    assert table.admit(some([LINEAR] * 3), counts) == b
    assert len(table.captures) == 0
    table.drop(b)
    whole = table.admit(some([LINEAR] * 10), np.array([10, 0, 0]))
    assert (table.first[whole, 1], table.free_records) == (10, 0)


def test_a_program_without_records_fits_a_full_table():
    table = Table(3, 1, 2)
    table.admit(some([LINEAR] * 2), np.array([2]))
    for slot in (table.admit(some([]), np.array([0])), table.admit(some([]), np.array([0]))):
        assert table.first[slot, 0] == table.first[slot, 1]
        table.drop(slot)
    assert (len(table), table.free_records) == (1, 0)


def longest_gap(held, table) -> int:
    used = sorted((int(table.first[slot, 0]), int(table.first[slot, -1])) for slot in held)
    used = [(begin, end) for begin, end in used if end > begin]
    edges = [0, *itertools.chain(*used), len(table.records)]
    return max(end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True))


def check_captures(table, held) -> None:
    """Spans and areas say what the records do, and each record knows its own; nobody else's has the same number."""
    layout, there, seen = table.captures.layout(), set(), set()
    for slot, (records, counts) in held.items():
        for i, (record, point) in enumerate(zip(records, np.repeat(np.arange(len(counts)), counts), strict=True)):
            if record["kind"] != CAPTURE:
                continue
            mine = table.records[table.first[slot, 0] + i]
            c, a = int(layout.range_of_number[mine["step"]]), int(layout.region_of_number[mine["value"]])
            found = (layout.slot[c], layout.op[c], layout.start[c], layout.stop[c], layout.point[a], layout.dtype[a])
            assert found == (slot, record["value"], record["start"], record["stop"], point, record["x"])
            assert layout.region_group[a] == layout.group[c]
            there.add(c), seen.add((c, a))
    assert there == set(range(len(layout)))
    pairs = np.argwhere(layout.group[:, None] == layout.region_group)
    assert seen == {(int(c), int(a)) for c, a in pairs}
    assert (np.diff(layout.group) >= 0).all()
    assert (np.diff(layout.point) >= 0).all()
    assert len(table.captures) == len(layout)


@given(st.lists(st.integers(0, 8) | st.sampled_from(["drop"]), max_size=40), st.randoms(use_true_random=False))
def test_admitted_programs_never_overlap_and_leave_nothing(moves, random):
    table, points, held = Table(5, 3, 24), 3, {}
    for turn, move in enumerate(moves):
        if move == "drop" and held:
            slot = random.choice(sorted(held))
            table.drop(slot)
            del held[slot]
        elif move != "drop":
            counts = np.bincount([random.randrange(points) for _ in range(move)], minlength=points)
            records = some([random.choice((CAPTURE, LINEAR)) for _ in range(move)], 1000 * turn)
            try:
                held[table.admit(records, counts)] = (records.copy(), counts)
            except pc.CapacityError:
                assert len(held) == 5 or move > longest_gap(held, table)
        spans = []
        for slot, (records, counts) in held.items():
            begin, end = int(table.first[slot, 0]), int(table.first[slot, -1])
            spans.append(range(begin, end))
            assert np.array_equal(np.diff(table.first[slot]), counts)
            edits = records["kind"] == LINEAR  # of captures, see below
            assert np.array_equal(table.records[begin:end][edits], records[edits])
        used = list(itertools.chain(*spans))
        assert len(used) == len(set(used)) == 24 - table.free_records
        assert len(table) == len(held)
        check_captures(table, held)
    for slot in held:
        table.drop(slot)
    assert (len(table), table.free_records, len(table.captures)) == (0, 24, 0)
    assert not table.first.any()
    assert table.admit(some([LINEAR] * 24), np.array([24, 0, 0])) in range(1, 6)


# -- step plans


@st.composite
def steps(draw):
    """A table of random programs and a batch over some of them, beside requests of nobody, with gaps between rows."""
    table = Table(4, POINTS, 400, SAMPLED)
    ranges = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda p: (p[0], p[0] + p[1]))
    for _ in range(draw(st.integers(0, 4))):
        rows = []
        for ordinal, number in enumerate(draw(st.lists(st.sampled_from([0, 5, POINTS - 2, POINTS - 1]), max_size=6))):
            kind = draw(st.sampled_from([CAPTURE, LINEAR]))
            others = draw(st.sets(st.sampled_from(range(POINTS)), max_size=3))
            for bounds in draw(st.lists(ranges, max_size=2)):
                rows += [(at, (*bounds, kind, 0, ordinal, 0, 0)) for at in sorted({number, *others})]
        rows.sort(key=lambda row: row[0])
        counts = np.bincount([number for number, _ in rows], minlength=POINTS) if rows else np.zeros(POINTS, int)
        table.admit(record_array([record for _, record in rows]), counts)
    slots = draw(st.permutations([*range(1, len(table) + 1), 0, 0]))[: draw(st.integers(1, len(table) + 2))]
    count = [draw(st.integers(1, 6)) for _ in slots]
    row = np.cumsum([0, *count[:-1]]) + np.cumsum([draw(st.integers(0, 2)) for _ in slots])
    position = [draw(st.integers(0, 12)) for _ in slots]
    rows = int(row[-1] + count[-1] + draw(st.integers(0, 2)))
    return table, Batch(np.array(slots), row, np.array(position), np.array(count), rows)


@given(steps())
def test_a_plan_is_what_a_loop_over_rows_says(step):
    table, batch = step
    plan = make_plan(batch, table, WIDTHS)
    slot, position = [0] * batch.rows, [0] * batch.rows
    computed = {s: range(0) for s in range(len(table.first))}
    for n in range(len(batch.slot)):
        for i in range(batch.count[n]):
            slot[batch.row[n] + i], position[batch.row[n] + i] = batch.slot[n], batch.position[n] + i
        if batch.slot[n]:
            computed[batch.slot[n]] = range(batch.position[n], batch.position[n] + batch.count[n])
    assert plan.tokens.slot.tolist() == slot
    assert plan.tokens.position.tolist() == position
    assert plan.sampled.slot.tolist() == batch.slot.tolist()
    assert plan.sampled.position.tolist() == [p + c - 1 for p, c in zip(batch.position, batch.count, strict=True)]
    first = table.first[batch.slot].tolist()
    assert plan.active.tolist() == [any(f[p + 1] > f[p] for f in first) for p in range(POINTS)]
    taken: list[int] = []
    where = [(slot, p, i) for slot in range(1, 5) for p in range(POINTS) for i in range(*table.first[slot, p : p + 2])]
    captures = [(slot, number, table.records[i]) for slot, number, i in where if table.records[i]["kind"] == CAPTURE]
    assert len(captures) == np.count_nonzero(table.records[: table.first.max()]["kind"] == CAPTURE)
    for own, number, record in captures:
        kept = [p for p in computed[own] if record["start"] <= p < record["stop"]]
        if SAMPLED[number]:
            kept = [p for p in kept if p == computed[own][-1]]
        c, target = (
            plan.layout.range_number.tolist().index(record["step"]),
            int(plan.target(record["step"], record["value"])),
        )
        assert plan.count[c] == len(kept)
        assert not kept or kept == list(range(plan.begin[c], plan.begin[c] + len(kept)))
        assert not kept or target % WIDTHS[number] == 0
        taken += range(target, target + len(kept) * WIDTHS[number])
    assert len(taken) == len(set(taken) & set(range(plan.size)))
    assert plan.size <= len(taken) + int(np.unique(WIDTHS).sum())  # each width begins at a multiple of it


def test_logits_of_drafted_rows_are_edited_and_captured_like_any():
    """A request with two drafted tokens, a plain one with one, and a chunk of a prompt."""
    table = Table(2, POINTS, 64, SAMPLED)
    programs = [bound(pc.Scale(2.0, "logits"), capture, prompt=6, max_tokens=9) for capture in
                ("logits @ generated[0:2]", "logits")]  # fmt: skip
    slots = [table.admit(*records_of(made.ops, {}, POINTS)) for made in programs]
    order, count = np.array([slots[0], 0, slots[1]]), np.array([3, 2, 4])
    batch = Batch(order, np.array([0, 3, 5]), np.array([6, 20, 2]), count, 9, np.array([3, 2, 1]))
    plan = make_plan(batch, table, WIDTHS)
    assert batch.sampled_rows.tolist() == [0, 1, 2, 3, 4, 8]
    assert plan.sampled.slot.tolist() == [slots[0]] * 3 + [0, 0, slots[1]]
    assert plan.sampled.position.tolist() == [6, 7, 8, 20, 21, 5]
    assert plan.sampled.rank.tolist() == [0, 1, 2, 0, 1, 0]
    kept = {int(slot): range(b, b + c) for slot, b, c in zip(plan.layout.slot, plan.begin, plan.count, strict=True)}
    assert kept == {slots[0]: range(6, 8), slots[1]: range(5, 6)}


def scenario(name: str) -> bytes:
    """Three programs and a plain request in one of three fixed steps; the plan's bytes."""
    v, inside = [1.0] * D, "every[1, 3, 6]"
    programs = [
        bound(pc.Add(v, "resid_post[1]", "prompt[2:4]"), ["resid_post", "logits"]),
        bound([pc.Capture("mlp_out[0]", inside), pc.Zero("mlp_out[0]")], "final_norm @ generated[0:2]", prompt=9),
        bound(pc.Replace([v, v], "embed", "every[0, 7]"), max_tokens=6),
    ]
    table = Table(4, POINTS, 64, SAMPLED)
    addresses = {key: (0, D) for made in programs for op in made.ops for key in op.values}
    slots = [table.admit(*records_of(made.ops, addresses, POINTS)) for made in programs]
    position, count = {
        "prefill": ([0, 0, 0, 0], [9, 3, 5, 5]),
        "chunked": ([4, 3, 0, 2], [4, 1, 2, 3]),
        "decode": ([9, 8, 6, 7], [1, 1, 1, 1]),
    }[name]
    order, position, count = np.array([[slots[1], 0, slots[0], slots[2]], position, count])
    batch = Batch(order, np.cumsum(count) - count, position, count, int(count.sum()))
    return make_plan(batch, table, WIDTHS).to_bytes()


@pytest.mark.parametrize("name", ["prefill", "chunked", "decode"])
def test_golden_plans(name, request):
    file = GOLDEN / f"plan_{name}.bin"
    if request.config.getoption("--regen-golden"):
        file.write_bytes(scenario(name))
        pytest.skip(f"wrote {file.name}")
    assert scenario(name) == file.read_bytes()
    assert len({other.read_bytes() for other in GOLDEN.glob("plan_*.bin")}) == 3


def test_a_plans_bytes_hold_every_array():
    table = Table(1, POINTS, 8)
    batch = Batch(np.array([0]), np.array([0]), np.array([3]), np.array([2]), 2)
    made = make_plan(batch, table, WIDTHS).to_bytes()
    read, arrays = memoryview(made), []
    while read:
        size = 8 + 4 * int.from_bytes(read[:8], "little")
        arrays.append(np.frombuffer(read[8:size], "<i4").tolist())
        read = read[size:]
    assert arrays == [[0, 0], [3, 4], [0, 1], [0], [4], [0] * POINTS, [], [], [], []]


@given(st.data())
def test_while_a_plan_is_steady_the_next_one_need_not_be_made(data):
    """Steady decode: `advanced` is what planning the next step would give, for as many steps as `steady_steps` says."""
    table, rng = Table(4, POINTS, 64), np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    for _ in range(3):
        ranges = [
            (int(a), int(a) + int(n), CAPTURE, 0, o, 0.0, 0.0) for o, (a, n) in enumerate(rng.integers(1, 9, (4, 2)))
        ]
        table.admit(record_array(ranges), np.array([1] * 4 + [0] * (POINTS - 4)))
    batch = Batch(np.array([1, 2, 0, 3]), np.arange(4), rng.integers(0, 9, 4), np.ones(4, np.int64), 4)
    plan = first = make_plan(batch, table, WIDTHS)
    for step in range(1, min(first.steady_steps, 12) + 2):
        batch = Batch(batch.slot, batch.row, batch.position + 1, batch.count, 4)
        fresh = make_plan(batch, table, WIDTHS)
        same = fresh.count.tolist() == plan.count.tolist()
        if plan.steady_steps == 0:
            assert not same, step
            return
        plan, lazy = plan.advanced(1), first.advanced(step)
        assert same
        assert first.begins(step)[plan.count > 0].tolist() == plan.begin[plan.count > 0].tolist()
        assert lazy.to_bytes() == plan.to_bytes()
        kept = plan.count > 0
        assert plan.begin[kept].tolist() == fresh.begin[kept].tolist()
        assert plan.tokens.position.tolist() == fresh.tokens.position.tolist()
        assert plan.offset.tolist() == fresh.offset.tolist()
        assert (plan.base.tolist(), plan.size) == (fresh.base.tolist(), fresh.size)


# -- which blocks may be shared


def keys(made, blocks=3, size=4):
    return [block_key(made, size * b, size * (b + 1)) for b in range(blocks)]


def test_blocks_below_the_first_edit_are_everyones():
    v = [1.0] * D
    assert keys(bound((), "resid_post", prompt=9)) == [None, None, None]
    edited = keys(bound(pc.Add(v, "resid_pre[1]", "prompt[6]"), prompt=9))
    assert [key is None for key in edited] == [True, False, True]
    assert keys(bound([pc.Add(v, "final_norm"), pc.Zero("logits")], prompt=9)) == [None, None, None]


def test_equal_edits_of_a_block_have_equal_keys():
    v = [1.0] * D
    made = keys(bound(pc.Add(v, "resid_pre[1]", "prompt[2:9]"), prompt=9))
    same = [
        keys(bound([pc.Capture("embed"), pc.Add(v, "resid_pre[1]", "prompt[2:9]")], "embed", prompt=9, run="other")),
        keys(bound(pc.Add(v, "resid_post[0]", "every[2,3,4,5,6,7,8]"), prompt=9)),
        keys(bound(pc.Add(v, "resid_pre[1]", "prompt[-7:]"), prompt=9)),
    ]
    assert all(other == made for other in same)
    longer = keys(bound(pc.Add(v, "resid_pre[1]", "prompt[2:20]"), prompt=20))
    assert longer[:2] == made[:2]
    assert longer[2] != made[2]
    rows = keys(bound(pc.Add(np.eye(8, D), "embed", "prompt[0:8]"), prompt=9))
    assert rows[0] != rows[1]


def test_an_edit_reaches_the_first_token_that_attends_to_it():
    """Positions 3 to 9 attend to one another, and 13 to 15: an edit at 8 changes keys and values from 3 on."""
    spans = ((3, 10), (13, 16))
    made = bound(pc.Add([1.0] * D, "resid_pre[1]", "prompt[8]"), prompt=20)
    plain = [block_key(made, begin, begin + 4) for begin in range(0, 20, 4)]
    ahead = [block_key(made, begin, begin + 4, spans) for begin in range(0, 20, 4)]
    assert [key is not None for key in plain] == [False, False, True, False, False]
    assert [key is not None for key in ahead] == [True, True, True, False, False]
    assert block_key(made, 0, 3, spans) is None
    assert [lowest_edit(made), lowest_edit(made, spans), lowest_edit(made, spans[1:])] == [8, 3, 8]
    other = bound(pc.Add([2.0] * D, "resid_pre[1]", "prompt[8]"), prompt=20)
    assert block_key(other, 0, 4, spans) not in (None, ahead[0])
    capture = bound(pc.Capture("resid_pre[1]", tokens="prompt[8]"), prompt=20)
    assert (block_key(capture, 0, 4, spans), lowest_edit(capture, spans)) == (None, None)
    assert [lowest_capture(capture), lowest_capture(capture, spans), lowest_capture(capture, spans[1:])] == [8, 3, 8]
    assert lowest_capture(made, spans) is None


ACTIONS = (
    (Linear(1.0, 1.0), {"h_scale": 2.0, "v_scale": 2.0}), (Blend(0.5, "m"), {"alpha": 1.0, "mask": "n"}),
    (Projection(0.0, 1.0), {"low": -1.0, "high": 2.0}),
    (NormedAdd(1.0), {"scale": 2.0}), (Rotation(0.0, 1.0, False), {"cos": 1.0, "sin": 0.0, "relative": True}),
    (Noisy(0.5, 1, False, (7,)), {"std": 1.0, "seed": 2, "relative": True, "streams": (8,), "first_column": 4}),
)  # fmt: skip


def key_of(op: BoundOp) -> str | None:
    return block_key(BoundProgram("run", 9, (op,)), 0, 16)


@pytest.mark.parametrize("field", BoundOp.__struct_fields__)
def test_a_key_says_all_of_an_op_but_where_it_stands(field):
    """Whatever an op comes to say: a field that a key left out would let one request read what another's edit made."""
    op = BoundOp("edits[0]", Linear(1.0, 1.0), (3,), ("v:abc",), (PositionRange(2, 6, 0, 1),), reaches_cache=True)
    other = {"path": "edits[1]", "action": Linear(1.0, 2.0), "points": (4,), "values": ("v:abd",),
             "ranges": (PositionRange(2, 6, 1, 1),), "columns": 1 << 16, "condition": Condition("o", False),
             "guard": Guard(1), "reaches_cache": False}[field]  # fmt: skip
    made, alike = key_of(op), key_of(msgspec.structs.replace(op, **{field: other}))
    if field == "reaches_cache":
        assert alike is None
    else:
        assert (made == alike) is (field == "path")


def test_a_key_says_all_of_an_action():
    for action, changes in ACTIONS:
        assert set(changes) == set(action.__struct_fields__)
        op = BoundOp("edits[0]", action, (3,), (), (PositionRange(2, 6),), reaches_cache=True)
        others = [msgspec.structs.replace(action, **{field: value}) for field, value in changes.items()]
        keys = {key_of(msgspec.structs.replace(op, action=each)) for each in (action, *others)}
        assert len(keys) == 1 + len(others)
    conditions = [Condition("a", True), Condition("a", False), Condition("b", True)]
    assert len({key_of(msgspec.structs.replace(op, condition=each)) for each in conditions}) == 3


def test_a_matrix_counts_once_for_each_256_rows():
    wide = SiteMap(LLAMA, Sizes(2, 1024, 6, heads=4, kv_heads=2, d_head=256, d_mlp=8))
    for rows, work in ((1, 2), (256, 2), (257, 4), (1024, 8)):
        capture = pc.Probe(np.ones((rows, 1024)), at="resid_post[0:2]", name="p")
        made = bind(Program.of([], [capture]), "r", Prompt(list(range(9)), lambda: ("", [])), 1, wide, None)
        assert (record_count(made.ops), record_work(made.ops)) == (2, work)


def test_each_record_of_a_program_is_counted_once_while_it_is_bound():
    v = [3.0, 0.0, 4.0, 0.0]
    p, q = (pc.Probe([v, v], "resid_post[0]", "prompt", name=name) for name in "pq")
    edit = pc.Zero("mlp_out[1]", "prompt[1:]")
    programs = [
        [pc.When(p > 0, edit)], [p, pc.When((p > 0) & ~(p[1] > 1), [edit, edit], scope="prompt")], [p, q],
        [pc.When((p > 0) | (q > 0), edit), pc.When(p > 0, edit), pc.When(p > 2, edit)], [edit, pc.Capture("embed"), p],
    ]  # fmt: skip
    for edits in programs:
        counted: list[int] = []
        prompt = Prompt(list(range(9)), lambda: ("", []))
        made = bind(Program.of(edits), "r", prompt, 1, SITES, None, known=Known(counted.append))
        assert sum(counted) == record_work(made.ops)


def test_a_key_says_which_heads_and_neurons():
    sites = SiteMap(LLAMA, Sizes(2, D, 6, heads=4, kv_heads=2, d_head=2, d_mlp=8))
    for make in (pc.Zero, lambda at: pc.Scale(0.5, at), lambda at: pc.Noise(0.5, at)):
        for word in ("q", "k", "v", "z", "neurons"):
            parts = [f"{word}[1]", f"{word}[1, 0]", f"{word}[1, 1]", f"{word}[1, 0:1]"]
            made = [
                bind(Program.of([make(at)]), "r", Prompt(list(range(9)), lambda: ("", [])), 1, sites, None)
                for at in parts
            ]
            whole, first, second, same = (block_key(each, 0, 8) for each in made)
            assert len({whole, first, second}) == 3
            assert first == same


def test_a_key_says_which_rows_a_block_reads():
    runs = {"abc": Ran(range(8), prompt=8)}
    whole = keys(bound(pc.Add(pc.From("abc"), "embed", "prompt[0:8]"), prompt=9, **runs))
    there = keys(bound(pc.Add(pc.From("abc"), "embed", "prompt[4:8]"), prompt=9, **runs))
    moved = keys(bound(pc.Add(pc.From("abc", position="prompt[0:4]"), "embed", "prompt[4:8]"), prompt=9, **runs))
    assert there[1] == whole[1] != moved[1]
    assert there[0] is moved[0] is None


def test_a_key_says_what_a_program_stores():
    """Which rows an edit reads of its own run; but not the run, so that all runs of a program share its blocks."""
    reads = [("embed", 2), ("embed", 1), ("mlp_out[0]", 2), ("embed", "prompt[1:3]")]
    made = [bound(pc.Add(pc.SameRun(*read), "resid_mid[1]", "prompt[6:8]"), prompt=9) for read in reads]
    assert len({keys(each)[1] for each in made}) == len(made)
    assert {keys(each)[0] for each in made} == {None}
    assert [lowest_capture(each) for each in made] == [2, 1, 2, 1]
    assert keys(msgspec.structs.replace(made[0], run="another")) == keys(made[0])


@pytest.mark.parametrize(
    ("op", "kind", "text"),
    [
        (pc.Add(pc.SameRun("resid_mid[1]"), "resid_mid[1]"), pc.UnsupportedSite, r"before resid_mid\[1\]"),
        (pc.Add(pc.SameRun("attn_out[1]"), "mlp_out[1]"), pc.UnsupportedSite, r"before mlp_out\[1\]"),
        (pc.Add(pc.SameRun("resid_post[1]"), "resid_pre[1]"), pc.UnsupportedSite, r"before resid_pre\[1\]"),
        (pc.Add(pc.SameRun("logits"), "logits", "prompt[-1]"), pc.UnsupportedSite, "the end of a step"),
        (pc.Add(pc.SameRun("embed", 3), "mlp_out[1]", "prompt[2:5]"), pc.TokensError, "up to 2, got 3"),
        (pc.Add(pc.SameRun("embed", "prompt[0:2]"), "mlp_out[1]", "prompt[2:5]"), pc.ShapeError, r"got 2 \(prompt\[0:2\]\)"),
        (pc.Add(pc.SameRun("embed", "generated & token(3)"), "mlp_out[1]", "generated"), pc.ShapeError, "depends on generated tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_the_same_run_come_from_before(op, kind, text):
    with pytest.raises(kind, match=text):
        bound(op, prompt=9, max_tokens=3)
    stages = SiteMap(SITES.family, SITES.sizes, stages=2)
    fits = Program.of([pc.Add(pc.SameRun("embed"), "mlp_out[1]")])
    with pytest.raises(pc.UnsupportedSite, match="pipeline stages"):
        bind(fits, "r", spelled(9), 1, stages, None)


@pytest.mark.parametrize(
    "other",
    [
        {"value": [1.0, 1.0, 1.0, 2.0]}, {"at": "resid_pre[2]"}, {"at": "resid_mid[1]"}, {"scale": 2.0},
        {"tokens": "prompt[3]"}, {"tokens": "prompt[2:4]"}, {"value": pc.From("abc")}, {"at": "resid_pre[1:3]"},
    ],
)  # fmt: skip
def test_different_edits_of_a_block_have_different_keys(other):
    op = {"value": [1.0] * D, "at": "resid_pre[1]", "tokens": "prompt[2]"}
    runs = {"abc": Ran(range(8))}
    made, changed = (keys(bound(pc.Add(**words), prompt=9, **runs)) for words in (op, op | other))
    assert made[0] != changed[0]
    assert None not in (made[0], changed[0])


def test_keys_are_resolved_against_the_prompt():
    op = pc.Zero("embed", "prompt[-1]")
    short, long = keys(bound(op, prompt=6)), keys(bound(op, prompt=7))
    assert short[0] is long[0] is None is not short[1] != long[1]
    two = [pc.Zero("embed", "prompt[0]"), pc.Add([1.0] * D, "embed", "prompt[0]")]
    assert keys(bound(two))[0] != keys(bound(two[::-1]))[0]


def test_captures_must_be_computed():
    assert lowest_capture(bound(pc.Zero("embed"))) is None
    assert lowest_capture(bound((), ["embed @ prompt[3]", "logits", "resid_pre[1] @ prompt[2:]"])) == 2
    assert lowest_capture(bound((), "embed @ generated", max_tokens=1)) is None


def test_captures_of_a_long_prefill_pass_two_gigabytes_and_do_not_wrap():
    table = Table(1, 2, 8)
    table.admit(record_array([(0, 1 << 20, CAPTURE)] * 2), np.array([1, 1]))
    tokens = 1 << 17
    batch = Batch(np.array([1]), np.array([0]), np.array([0]), np.array([tokens]), tokens)
    plan = make_plan(batch, table, np.array([8192, 8192]), BYTES)
    size = tokens * 8192 * 4
    assert plan.size == 2 * size > 1 << 32
    assert plan.base.tolist() == [0, size]
    assert plan.by_tap[1] == {0: (0, size, size), 1: (size, 2 * size, 2 * size)}
