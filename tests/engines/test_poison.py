"""Guarantee 6 between processes: an engine that ran prompts edited gives them unedited as one that never saw an edit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .poison import BLOCK, LENGTH, LENGTHS

FULL = LENGTH // BLOCK * BLOCK
KINDS = ["add", "add a row each", "replace", "replace where masked", "zero", "scale", "ablate", "clamp", "noise",
         "relative noise", "mean", "use", "fuzz", "last", *[f"last of {length}" for length in LENGTHS], "generated"]  # fmt: skip


@pytest.fixture(scope="module")
def told(tiny) -> dict:
    """What an engine says that ran everything edited first, one that did not, and one whose blocks have no keys of ours;
    the first in a process of its own."""
    script = str(Path(__file__).with_name("poison.py"))
    made = [
        subprocess.Popen([sys.executable, script, tiny, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, text=True)
        for kind in ("edited", "fresh")
    ]  # fmt: skip
    found: dict = {}
    try:
        for process in made:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-3000:]
            found |= json.loads(out.splitlines()[-1])
    finally:
        for process in made:
            process.kill()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_unedited_after_edited_is_as_if_never_edited(told, name):
    """Bit for bit; and without our part of the keys it would not be."""
    assert set(told["fresh"]) == set(KINDS)
    *ours, cached = told["unedited"][name]
    *fresh, none = told["fresh"][name]
    assert ours == fresh
    *poisoned, _ = told["without keys"][name]
    if name != "last of 64":  # whose last token is in a block that is always computed
        assert poisoned != fresh
    if not name.startswith("last"):
        assert none == 0
        assert cached == {"fuzz": 0}.get(name, BLOCK)


def test_an_edited_prompt_is_the_same_bits_from_the_cache(told):
    """Programs that say the same share even edited blocks; others differ from unedited."""
    runs = told["edited"]
    for name in KINDS:
        if name == "last":
            continue
        first, again = runs[f"edited: {name}"], runs[f"edited again: {name}"]
        assert first[:2] == again[:2], name
        if name in LENGTHS or name.startswith("last"):
            assert again[2] == (int(name.split()[-1]) - 1) // BLOCK * BLOCK, name
        elif name == "generated":
            assert again[2] == BLOCK
        else:
            assert (first[2], again[2]) == (0, FULL), name
            assert first[:2] != told["fresh"][name][:2], name


def test_what_is_shared_is_counted(told):
    """Below the edit with everyone, the edited blocks with the same program, none above a capture."""
    shared = told["shared"]
    assert [shared[name] for name in ("first", "the same again", "another strength", "another place")] == [
        0, FULL, 2 * BLOCK, 2 * BLOCK
    ]  # fmt: skip
    assert [shared[name] for name in ("none", "none again")] == [2 * BLOCK, FULL]
    assert [shared[name] for name in ("captured late", "captured everywhere", "edited and captured late")] == [
        3 * BLOCK, 0, 3 * BLOCK
    ]  # fmt: skip
    late = list(range(100, LENGTH))
    assert shared["rows captured late"] == shared["rows edited and captured late"] == late
    assert shared["rows captured everywhere"] == list(range(LENGTH + 1))
    assert shared["late rows are the same bits"]
    assert shared["edited rows are others"]
