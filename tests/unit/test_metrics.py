"""What is counted of a run: rows that its edits acted on, and bytes that it captured, against a count one by one."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines.vllm.server import KINDS, edited_rows
from patchclamp.language import Program
from patchclamp.plan import Prompt
from patchclamp.plan.bind import bind
from patchclamp.plan.bound import Action
from patchclamp.plan.room import captured_bytes

token_ids = st.lists(st.integers(0, 4), min_size=1, max_size=6)
selections = st.sampled_from([
    pc.every, pc.prompt, pc.prompt[-1], pc.generated | pc.prompt[0], pc.token(1), pc.token(0, 2) | pc.prompt[0],
    pc.every - pc.token(3), pc.prompt[0] | (pc.generated & pc.token(1, 4)),
])  # fmt: skip


@given(selections, token_ids, token_ids, st.integers(0, 4))
def test_rows_and_bytes_are_those_that_the_selection_names(selection, prompt, generated, more):
    """`more`: tokens that the run might have generated besides."""
    with pc.LM("fake", engine="fake") as lm:
        program = Program.of([pc.Scale(2.0, at=pc.resid_post[0:2], tokens=selection)], [pc.z[1] @ pc.prompt, pc.embed])
        vectors: dict[str, np.ndarray] = {}
        asked = Prompt(prompt, lambda: ("", []))
        generates_inputs = len(generated) + more > 1  # else what selects nothing of the prompt is refused
        assume(generates_inputs or len(asked.select(selection, len(prompt), prompt)))
        bound = bind(program, "run", asked, len(generated) + more, lm.sites, None, None, vectors, None)
        ids = [*prompt, *generated]
        positions = len(ids) - 1
        edited = edited_rows(bound, np.array(ids[:positions]), vectors)
        named = asked.select(selection, positions + more, [*ids[:positions], *[99] * more])
        assert edited == 2 * int(np.sum(named < positions))
        widths = {
            str(ref): lm.sites.points[ref.point].width for site in (pc.z[1], pc.embed) for ref in lm.sites.resolve(site)
        }
        in_prompt = min(len(prompt), positions)
        assert captured_bytes(bound, lm.sites, positions) == 4 * (
            in_prompt * widths["z[1]"] + positions * widths["embed"]
        )
        assert captured_bytes(bound, lm.sites) == 4 * (
            len(prompt) * widths["z[1]"] + (positions + more) * widths["embed"]
        )


@pytest.mark.parametrize("tokens", [pc.every, pc.prompt, pc.generated, pc.prompt[2:]])
def test_bytes_of_probes_and_lenses_are_those_of_computed_tokens(tokens):
    """None if the run ended before its first token was computed."""
    with pc.LM("fake", engine="fake") as lm:
        probe = pc.Probe(np.ones((3, lm.model.d_model)), pc.resid_post[0], name="three", tokens=tokens)
        program, length = Program.of((), [probe, pc.resid_post[1] @ tokens]), 5
        bound = bind(program, "run", Prompt(list(range(length)), lambda: ("", [])), 4, lm.sites, None)
        taken = np.asarray(Prompt(list(range(length)), lambda: ("", [])).select(tokens, length + 3, None))
        for computed in (0, 1, 3, 5, 7, 8, None):
            count = len(taken) if computed is None else int((taken < computed).sum())
            assert bound.private_bytes(lm.sites, computed) == 4 * 3 * count
            assert captured_bytes(bound, lm.sites, computed) == 4 * (3 + lm.model.d_model) * count


def test_every_kind_of_op_has_a_name():
    assert set(KINDS) == {action.kind for action in get_args(Action)}
    assert len(set(KINDS.values())) == len(KINDS)
