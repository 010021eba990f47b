"""The books of slots, records and the bank: placements never overlap, rows stay where they are while they are read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.plan.room import Extents, Room

SLOTS, RECORDS, NUMBERS = 4, 12, 240


@given(st.data())
def test_extents_never_overlap_and_join_again(data):
    extents, held = Extents(NUMBERS), []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            extents.give(*held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        multiple, count = data.draw(st.sampled_from([1, 4, 6, 16])), data.draw(st.integers(0, 90))
        begin = extents.take(count, multiple)
        used = np.zeros(NUMBERS, bool)
        for at, many in held:
            used[at : at + many] = True
        if begin is None:
            starts = range(0, NUMBERS - count + 1, multiple)
            assert all(used[start : start + count].any() for start in starts)
        elif count:
            assert begin % multiple == 0
            assert not used[begin : begin + count].any()
            held.append((begin, count))
        assert extents.free == NUMBERS - sum(many for _, many in held)
    for each in held:
        extents.give(*each)
    assert (extents.free, extents.largest) == (NUMBERS, NUMBERS)


def test_what_a_program_stores_is_its_own_and_goes_with_it():
    room = Room(3, 9, 64)
    first = room.place(1, {"o:0:1": (2, 8), "v:a": (1, 8)})
    second = room.place(1, {"o:0:1": (2, 8), "v:a": (1, 8)})
    assert (first.load, second.load) == (("v:a",), ())
    assert first.addresses["o:0:1"] != second.addresses["o:0:1"]
    assert first.addresses["v:a"] == second.addresses["v:a"]
    assert room.place(1, {"o:0:1": (4, 8)}) is None, "both still read"
    room.free(first)
    room.free(second)
    assert room.counts()["pinned"] == 0
    third = room.place(1, {"o:0:1": (7, 8)})
    assert (third.load, third.evicted) == ((), ("v:a",)), "workers have no books of what is stored"
    assert room.place(1, {"v:b": (2, 8)}) is None
    room.free(third)
    fourth = room.place(1, {"v:b": (8, 8)})
    assert (fourth.load, fourth.evicted) == (("v:b",), ())


@given(st.data())
def test_whatever_is_admitted_lies_apart_and_is_there(data):
    """Against what a program would see: its slot and records are its own, and every key holds what was loaded last."""
    room, held, bank = Room(SLOTS, RECORDS, NUMBERS), {}, np.full(NUMBERS, -1)
    widths = {
        f"k{i}": (rows, width) for i, (rows, width) in enumerate([(1, 4), (3, 4), (1, 60), (2, 60), (5, 16), (1, 6)])
    }
    for turn in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            room.free(held.pop(data.draw(st.sampled_from(sorted(held))))[0])
        else:
            keys = data.draw(st.lists(st.sampled_from(sorted(widths)), unique=True, max_size=2))
            records = data.draw(st.integers(0, RECORDS))
            placement = room.place(records, {key: widths[key] for key in keys})
            if placement is None:
                assert held, "a program that fits alone waits for nobody"
                continue
            assert placement.slot not in {p.slot for p, _, _ in held.values()}
            for p, many, _ in held.values():
                assert (
                    not (many and records)
                    or p.record + many <= placement.record
                    or placement.record + records <= p.record
                )
            for key in placement.load:
                begin, (rows, width) = placement.addresses[key][0], widths[key]
                bank[begin : begin + rows * width] = int(key[1:])
            held[turn] = placement, records, keys
        if data.draw(st.booleans()):
            room.forget([data.draw(st.sampled_from(sorted(widths)))])
        for p, _, keys in held.values():
            for key in keys:
                begin, rows = p.addresses[key]
                assert begin % widths[key][1] == 0
                assert rows == widths[key][0]
                assert (bank[begin : begin + rows * widths[key][1]] == int(key[1:])).all()
    for placement, *_ in held.values():
        room.free(placement)
    assert room.counts() == {"programs": 0, "records": 0, "pinned": 0}


def test_what_was_used_longest_ago_leaves_first():
    room = Room(9, 9, 4 * 16)
    for key in "abcd":
        room.free(room.place(0, {key: (1, 16)}))
    room.free(room.place(0, {"a": (1, 16)}))
    assert room.place(0, {"e": (2, 16), "a": (1, 16), "d": (1, 16)}).load == ("e",)


def test_rows_kept_for_later_give_way_to_a_program_that_fits_alone():
    room = Room(10, 9, 100)
    held = [room.place(0, {key: (1, 10)}) for key in "abcdefghij"]
    for placement in held:
        room.free(placement)
    assert room.place(0, {"x": (1, 10), "y": (9, 10)}) is not None


def test_what_never_fits_says_which_option_makes_room():
    room = Room(2, 4, 16)
    with pytest.raises(pc.CapacityError, match=r"5 .*4; raise max_records"):
        room.place(5, {})
    with pytest.raises(pc.CapacityError, match=r"80 .*64; raise bank_bytes"):
        room.place(0, {"a": (1, 20)})
    assert pc.CapacityError.status == 429


def test_a_program_waits_for_slots_and_records():
    room = Room(2, 4, 16)
    first = room.place(3, {})
    assert room.place(2, {}) is None
    second = room.place(1, {})
    assert room.place(0, {}) is None
    room.free(first)
    assert room.place(3, {}).record == 0
    room.free(second)


def test_a_key_cannot_be_read_beyond_its_rows():
    """A client declares the sizes of its runs. After few rows of one, it would read what lies behind them."""
    room = Room(4, 100, 1000)
    assert room.place(1, {"r:a:1": (2, 10), "v:other": (5, 10)}) is not None
    with pytest.raises(pc.MissingSource):
        room.place(1, {"r:a:1": (3, 10)})
    assert room.place(1, {"r:a:1": (2, 10)}) is not None
