"""The bank on the device: rows stay what they were, where they were, while their key is pinned; room is found quickly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.store.bank import Bank

NUMBERS = 240


@given(st.data())
def test_pinned_rows_stay_and_room_is_found_where_there_is_any(data):
    """Against a list of what lies where: what is put is read back, and only too little room between pins refuses."""
    bank, pinned, number = Bank(NUMBERS), {}, 0
    for _ in range(data.draw(st.integers(1, 40))):
        if pinned and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(pinned)))
            bank.unpin(key)
            del pinned[key]
            if data.draw(st.booleans()):
                bank.forget(key)
                assert key not in bank
            continue
        width, rows, number = data.draw(st.sampled_from([4, 6, 16])), data.draw(st.integers(1, 5)), number + 1
        made = torch.full((rows, width), float(number))
        try:
            bank.put(str(number), made)
        except pc.CapacityError:
            free = torch.ones(NUMBERS, dtype=torch.bool)
            for begin, kept in pinned.values():
                free[begin : begin + kept.numel()] = False
            starts = range(0, NUMBERS - made.numel() + 1, width)
            assert not any(bool(free[start : start + made.numel()].all()) for start in starts)
            continue
        begin, wide = bank.pin(str(number))
        assert (wide, begin % width) == (width, 0)
        pinned[str(number)] = (begin, made)
        for at, kept in pinned.values():
            assert torch.equal(bank.data[at : at + kept.numel()], kept.reshape(-1))
        assert bank.pinned == len(pinned)


def test_what_was_used_longest_ago_leaves_first():
    bank = Bank(4 * 16)
    for key in "abcd":
        bank.put(key, torch.zeros(1, 16))
    bank.pin("a")
    bank.unpin("a")
    bank.put("e", torch.zeros(2, 16))
    assert [key in bank for key in "abcde"] == [True, False, False, True, True]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fits", [40_000, 2_000], ids=["all stay", "most leave"])
def test_the_time_of_a_put_does_not_grow_with_the_bank(fits):
    """Forty thousand keys take a second or two; looking through all of them at each would take minutes."""
    bank, row = Bank(fits * 4), torch.zeros(1, 4)
    for number in range(40_000):
        bank.put(str(number), row)
        bank.pin(str(number))
        bank.unpin(str(number))
    assert (str(39_999) in bank, str(0) in bank) == (True, fits == 40_000)
