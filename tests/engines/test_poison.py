"""Guarantee 6 between processes: an engine that ran prompts edited gives them unedited as one that never saw an edit."""

from __future__ import annotations

import copy

import pytest

from . import poison

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tiny) -> dict:
    """What an engine says that ran everything edited first, one that did not, and one whose blocks have no keys of ours;
    the first in a process of its own."""
    made = [poison.start(tiny, kind, {}, {"OMP_WAIT_POLICY": "PASSIVE"}) for kind in ("edited", "fresh")]
    try:
        return poison.end(made[0], 240) | poison.end(made[1], 240)
    finally:
        for process in made:
            process.kill()


@pytest.mark.parametrize("name", poison.KINDS)
def test_unedited_after_edited_is_as_if_never_edited(told, name):
    """Bit for bit; and without our part of the keys it would not be."""
    assert not poison.reused(told, name)


def test_an_edited_prompt_is_the_same_bits_from_the_cache(told):
    """Programs that say the same share even edited blocks; others differ from unedited."""
    assert not poison.again(told)


def test_what_is_shared_is_counted(told):
    """Below the edit with everyone, the edited blocks with the same program, none above a capture."""
    assert not poison.counted(told)


def test_what_is_wrong_is_said(told):
    """Of another's bits, of blocks that were not shared, and of too many that were."""
    poisoned, alike = told | {"unedited": told["without keys"]}, told | {"without keys": told["fresh"]}
    assert "not the same bits as never edited" in poison.reused(poisoned, "add")
    assert "the same bits without keys" in poison.reused(alike, "add")
    other = copy.deepcopy(told)
    other["unedited"]["add"][2] = 0
    other["edited"]["edited again: add"] = other["edited"]["edited: generated"]
    other["shared"] |= {"captured everywhere": 32, "edited rows are others": False}
    assert poison.reused(other, "add") == ["0 and 0 tokens cached"]
    assert poison.again(other)[0] == "add: not the same bits again"
    assert poison.counted(other) == ["captured everywhere: 32", "edited rows are others: False"]
