"""The snippets of `docs/coming_from.md` give the same values in nnsight and nnterp, where these are installed."""

from __future__ import annotations

import pytest

from tools.nnsight_snippets import SNIPPETS, compare


def test_their_snippets_and_ours_give_the_same_values(smollm2):
    pytest.importorskip("nnsight", reason="nnsight is not installed: it needs an environment of its own")
    pytest.importorskip("nnterp", reason="nnterp is not installed: it needs an environment of its own")
    gaps = compare(str(smollm2))
    assert gaps.keys() == SNIPPETS.keys()
    assert {name: gap for name, gap in gaps.items() if max(gap) > 1e-4} == {}
