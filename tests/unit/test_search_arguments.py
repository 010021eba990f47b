"""Searches of programs with code, what a search resumes, and arguments that it would ignore."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import KLDivergence, RefusalRate, Search, Space, TextScore

PROMPTS = [[11, 12, 13], [14, 15, 16, 17]]
SETTINGS = {"factor": [1.0, 2.0, 3.0]}


@pytest.fixture(scope="module")
def lm():
    return pc.LM("fake", allow_code=True)


def scaled(factor: float) -> pc.Scale:
    return pc.Scale(factor, at=pc.resid_post[0])


def test_programs_with_code_are_searched_and_not_resumed(lm, tmp_path):
    coded = Space(lambda factor: pc.Apply(lambda h: h * factor, at=pc.resid_post[0]), SETTINGS)
    wanted = {"objectives": KLDivergence(prompts=PROMPTS), "sampler": "grid"}
    found, plain = (Search(space=space, **wanted).run(lm).values for space in (coded, Space(scaled, SETTINGS)))
    assert np.ptp(plain) > 0
    assert np.allclose(found, plain)
    with pytest.raises(pc.ProgramError) as raised:
        Search(space=coded, **wanted).run(lm, resume=tmp_path / "a.journal")
    assert raised.value.path == "edits[0]"


def test_values_of_another_judge_are_not_resumed(lm, tmp_path):
    """Two functions of one name."""
    judges = [
        lambda prompt, text: 1.0,
        lambda prompt, text: 2.0,
    ]
    one, other = (
        Search(space=Space(scaled, SETTINGS), objectives=TextScore(prompts=PROMPTS, judge=judge), sampler="grid")
        for judge in judges
    )
    file = tmp_path / "a.journal"
    assert one.run(lm, resume=file).values.tolist() == one.run(lm, resume=file).values.tolist() == [[1.0]] * 3
    with pytest.raises(pc.ProgramError) as raised:
        other.run(lm, resume=file)
    assert raised.value.path == "resume"
    assert other.run(lm).values.tolist() == [[2.0]] * 3


def test_a_search_that_failed_in_part_resumes_to_the_same(lm, tmp_path):
    """Trials whose edits overflow have no values."""
    wanted = {
        "space": Space(scaled, {"factor": [1.0, 1e38, 2.0]}), "sampler": "grid", "per_round": 2,
        "objectives": [KLDivergence(prompts=PROMPTS), RefusalRate(prompts=PROMPTS, max_tokens=2)],
    }  # fmt: skip
    first, again = (Search(**wanted).run(lm, resume=tmp_path / "a.journal") for _ in range(2))
    assert np.isnan(first.values).any(1).tolist() == [False, True, False]
    assert np.array_equal(first.values, again.values, equal_nan=True)
    assert first.failed == again.failed
    assert [*first.failed] == [1]
    assert 1 not in first.front


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("judge", lambda: RefusalRate(prompts=PROMPTS, judge=lambda prompt, text: 1.0)),
        ("patterns", lambda: RefusalRate(prompts=PROMPTS, patterns="sorry")),
        ("patterns[1]", lambda: RefusalRate(prompts=PROMPTS, patterns=["sorry", "("])),
        ("seed", lambda: Search(space=Space(scaled, SETTINGS), objectives=KLDivergence(prompts=PROMPTS),
                                sampler="grid", seed=1).run(pc.LM("fake"))),
        ("space.parameters", lambda: Search(space=Space(lambda kl: scaled(kl), {"kl": [1.0]}), sampler="grid",
                                            objectives=KLDivergence(prompts=PROMPTS)).run(pc.LM("fake"))),
    ],
)  # fmt: skip
def test_no_argument_is_ignored(path, wrong):
    with pytest.raises(pc.ProgramError) as raised:
        wrong()
    assert raised.value.path == path
