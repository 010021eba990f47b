"""Cuts: no pass leaves out what a program touches, and requests are grouped so that little is computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchclamp.plan.bound import BoundOp, BoundProgram, Encoded, Keep, Linear, PositionRange
from patchclamp.plan.cells import cells_of
from patchclamp.plan.cuts import MIN_SHARED, Cut, CutRequest, Work, cuts_of, first_layers, group, split
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import GPT2

LAYERS, LENGTH, SIZE = 6, 12, 8
SITES = SiteMap(GPT2, Sizes(LAYERS, 16, 32, 2, 2, 8, 32))
FIRST = first_layers(SITES)
WORK = Work(LAYERS, LENGTH, 4)


def cuts_of_programs(programs: list[BoundProgram | None]) -> np.ndarray:
    return cuts_of(cells_of(programs), np.full(len(programs), LENGTH), FIRST, LAYERS)


@st.composite
def programs(draw):
    """Programs of one prompt, with ops at any points and positions, generated ones among them; some have none."""
    if draw(st.integers(0, 4)) == 0:
        return None
    ops = []
    for i in range(draw(st.integers(1, 3))):
        points = draw(st.lists(st.integers(0, len(SITES.points) - 1), min_size=1, max_size=3, unique=True))
        start = draw(st.integers(0, LENGTH + 3))
        action = draw(st.sampled_from([Keep(0), Linear(2.0, 0.0), Encoded("sae", "content")]))
        ranges = (PositionRange(start, start + draw(st.integers(1, 4))),)
        ops.append(BoundOp(f"edits[{i}]", action, tuple(points), (), ranges))
    return BoundProgram("", LENGTH, tuple(ops))


def touched(program: BoundProgram) -> list[tuple[int, int]]:
    """Every (layer, position) of the prompt at which a program does something."""
    return [
        (FIRST[point], position)
        for op in program.ops
        for point in op.points
        for start, stop, *_ in op.ranges
        for position in range(start, min(stop, LENGTH))
    ]


def plain_cut(program: BoundProgram) -> tuple[int, int]:
    places = touched(program)
    return (min((layer for layer, _ in places), default=LAYERS),
            min((position for _, position in places), default=LENGTH - 1))  # fmt: skip


@given(programs())
def test_a_cut_is_the_highest_that_leaves_nothing_out(program):
    if program is None:
        return
    assert cuts_of_programs([program]).tolist() == [list(plain_cut(program))]


def test_what_is_outside_the_layers_is_before_or_after_all_of_them():
    kinds = {point.kind: FIRST[point.number] for point in SITES.points if point.layer is None}
    assert kinds == {"embed": 0, "stream_end": LAYERS, "final_norm": LAYERS, "logits": LAYERS}
    assert all(FIRST[point.number] == point.layer for point in SITES.points if point.layer is not None)


@given(st.lists(st.tuples(programs(), st.integers(0, 2), st.integers(0, 9)), max_size=60))
def test_everyone_is_in_one_group_and_no_group_leaves_out_what_it_touches(drawn):
    asked = [CutRequest([kind] * LENGTH, program, may > 0) for program, kind, may in drawn]
    groups = group(asked, FIRST, LAYERS, SIZE, WORK.pass_rows)
    assert sorted(i for index, _ in groups for i in index) == list(range(len(asked)))
    for index, cut in groups:
        assert 0 < len(index) <= SIZE
        if cut is None:
            assert index == sorted(index)
            continue
        assert len({asked[i].prompt[0] for i in index}) == 1
        for i in index:
            assert asked[i].may_cut
            program = asked[i].bound
            assert program is None or all(layer >= cut[0] and at >= cut[1] for layer, at in touched(program))


def sweep(times: int = 1) -> list[CutRequest]:
    """Every layer at every position."""
    ops = [
        BoundOp("edits[0]", Linear(2.0, 0.0), (stream(layer),), (), (PositionRange(p, p + 1),))
        for layer in range(LAYERS)
        for p in range(LENGTH)
    ]
    return [CutRequest([1] * LENGTH, BoundProgram("", LENGTH, (op,))) for op in ops * times]


def stream(layer: int) -> int:
    return next(point.number for point in SITES.points if (point.kind, point.layer) == ("stream", layer))


def test_a_sweep_is_cut_both_ways():
    """Half the layers and half the positions are left out on average, so about a quarter is computed."""
    groups = group(sweep(8), FIRST, LAYERS, SIZE, 0)
    assert {cut.layer for _, cut in groups if cut} == set(range(LAYERS))
    assert {cut.position for _, cut in groups if cut} == set(range(LENGTH))
    work = Work(LAYERS, LENGTH, 0)
    parts = [(index, cut) for index, cut in groups if cut is not None]
    assert len(parts) == len(groups)
    assert work.of_parts(parts) < 0.34 * work.whole(8 * LAYERS * LENGTH, SIZE)


@pytest.mark.parametrize("pass_rows", [0, 1000])
def test_where_a_pass_costs_much_there_are_few(pass_rows):
    cuts = cuts_of_programs([request.bound for request in sweep()])
    parts = split(cuts, Work(LAYERS, LENGTH, pass_rows), 32)
    assert len(parts) > 30 if pass_rows == 0 else len(parts) <= 5


def test_few_runs_and_those_that_change_everything_are_computed_whole():
    late = BoundOp("edits[0]", Linear(2.0, 0.0), (stream(5),), (), (PositionRange(11, 12),))
    early = BoundOp("edits[0]", Linear(2.0, 0.0), (stream(0),), (), (PositionRange(0, 12),))

    def of(op: BoundOp, count: int) -> list[CutRequest]:
        return [CutRequest([1] * LENGTH, BoundProgram("", LENGTH, (op,)))] * count

    assert group(of(late, MIN_SHARED), FIRST, LAYERS, SIZE, 4) == [(list(range(MIN_SHARED)), Cut(5, 11))]
    for requests in (of(late, MIN_SHARED - 1), of(early, 8), [CutRequest([1] * LENGTH, None)] * 8):
        assert group(requests, FIRST, LAYERS, SIZE, 4) == [(list(range(len(requests))), None)]


def test_a_request_without_a_program_goes_the_way_of_the_one_before_it():
    cells = [request.bound for request in sweep()]
    cuts = cuts_of_programs([None, cells[30], None, None, cells[50], None])
    a, b = plain_cut(cells[30]), plain_cut(cells[50])
    assert np.array_equal(cuts, [a, a, a, a, b, b])


def test_requests_of_one_call_that_fit_into_one_pass_stay_together():
    few = [request.bound for request in sweep()][: LENGTH * 2]
    cuts = cuts_of_programs(few)
    assert split(cuts, Work(LAYERS, LENGTH, 0), len(few)) == [(list(range(len(few))), Cut(0, 0))]
