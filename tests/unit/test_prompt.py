"""What a selection names before anything is generated: positions, some of them under conditions on the token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.language.tokens import Joined, ids_in
from patchclamp.plan import Prompt

ids = st.integers(0, 5)
leaves = st.one_of(
    st.builds(pc.token, ids), st.builds(pc.token, ids, ids, ids), st.just(pc.generated), st.just(pc.prompt),
    st.builds(lambda a, b: pc.every[a:b], st.integers(0, 9), st.integers(0, 9)),
    st.builds(lambda a: pc.generated[a:], st.integers(0, 4)), st.just(pc.between(1, 2)),
)  # fmt: skip
selections = st.recursive(leaves, lambda inner: st.builds(Joined, st.sampled_from("|&-"), inner, inner), max_leaves=6)


def test_images_are_where_they_are_read():
    asked = Prompt(range(20), lambda: ("", []), images=[[3, 4, 6], [10, 11]])
    expected = {"image": [3, 4, 6, 10, 11], "image[0]": [3, 4, 6], "image[-1]": [10, 11], "image[0][1:]": [4, 6],
                "image[0][-1]": [6], "image[0][2, 0]": [6, 3], "prompt[:8] - image": [0, 1, 2, 5, 7],
                "image[1] | image[0][0]": [3, 10, 11], "image & prompt[4:11]": [4, 6, 10]}  # fmt: skip
    assert {text: asked.select(pc.tokens(text), 25).tolist() for text in expected} == expected
    [case] = asked.cases(pc.image[0], 25)
    assert (case.positions.tolist(), case.alone) == ([3, 4, 6], True)
    with_ids = asked.cases(pc.image[1] | (pc.generated & pc.token(7)), 25)
    assert [(case.positions.tolist(), case.ids) for case in with_ids] == [([10, 11], ()), ([20, 21, 22, 23, 24], (7,))]


def is_between(tokens: list[int], opening: int, closing: int) -> bool:
    """True if the last token is strictly between delimiters."""
    delimiters = [token for token in tokens if token in (opening, closing)]
    return delimiters[-1:] == [opening] and tokens[-1] not in (opening, closing)


def test_delimiters_of_text():
    """Of one token, as its id; of several, by the prompt's text alone."""
    words = ["<think>", " a", "</", "think>", " b", "<think>", " c", " d"]
    offsets, text = [], ""
    for word in words:
        offsets.append((len(text), len(text) + len(word)))
        text += word
    ids, known = [7, 1, 8, 9, 2, 7, 3, 4], {"<think>": [7], "</think>": [8, 9], "</": [8]}
    asked = Prompt(ids, lambda: (text, offsets), bare=lambda text: known[text])
    thought = pc.between("<think>", "</think>")
    assert asked.select(thought, 20).tolist() == [1, 6, 7]
    assert asked.select(pc.between(7, "</"), 20).tolist() == [1, 6, 7]
    assert asked.select(pc.between("</think>", "<think>"), 20).tolist() == [4]
    [case] = asked.cases(pc.prompt & thought, 20)
    assert (case.positions.tolist(), case.alone) == ([1, 6, 7], True)
    with pytest.raises(pc.TokensError, match="'</think>'"):
        asked.cases(thought, 20)
    open_end = asked.cases(pc.between("<think>", "</"), 10)
    assert [(case.positions.tolist(), case.inside) for case in open_end] == [([1, 6, 7], None), ([8, 9], True)]


def test_delimiters_of_several_tokens_are_found_in_the_prompt_of_a_run():
    """Also once tokens are generated, and beside tokens that a condition selects."""
    text = "<a>1 2</a>"
    asked = Prompt(
        [*map(ord, text)], lambda: (text, [(i, i + 1) for i in range(len(text))]), bare=lambda t: [*map(ord, t)]
    )
    within, ids = pc.prompt & pc.between("<a>", "</a>"), [*map(ord, text + "21")]
    assert asked.select(within, len(ids), ids).tolist() == [3, 4, 5]
    assert asked.select(within | pc.token(ord("2")), len(ids), ids).tolist() == [3, 4, 5, 10]
    certain, later = asked.cases(within | pc.token(ord("2")), len(ids))
    assert (certain.positions.tolist(), later.positions.tolist(), later.ids) == ([3, 4, 5], [10, 11], (ord("2"),))
    for selection in (pc.between("<a>", "</a>"), pc.token(ord("2")) & pc.between("<a>", "</a>")):
        with pytest.raises(pc.TokensError, match="<a>"):
            asked.select(selection, len(ids), ids)


def test_matches_of_a_delimiter_may_overlap():
    """Two in three line feeds: the later match, after the opening one, closes the span."""
    text = "a\n\n\nQ: 42\n\nb"
    asked = Prompt(
        [*map(ord, text)], lambda: (text, [(i, i + 1) for i in range(len(text))]), bare=lambda t: [*map(ord, t)]
    )
    chosen = asked.select(pc.prompt & pc.between("Q:", "\n\n"), len(text))
    assert "".join(text[p] for p in chosen) == " 42"


@given(selections, st.lists(ids, min_size=1, max_size=6), st.lists(ids, max_size=6))
def test_cases_are_what_the_selection_is_once_the_tokens_are_known(selection, prompt, generated):
    limit = len(prompt) + len(generated)
    tokens, asked = np.array([*prompt, *generated]), Prompt(prompt, lambda: ("", []))
    expected = asked.select(selection, limit, tokens)
    between = [p for p in range(limit) if is_between(tokens[: p + 1].tolist(), 1, 2)]
    found: list[int] = []
    cases = asked.cases(selection, limit)
    for case in cases:
        assert list(case.ids) == sorted(set(case.ids))
        under = (
            np.isin(tokens[case.positions], case.ids) != case.others if case.ids else np.ones(len(case.positions), bool)
        )
        under &= case.inside is None or np.isin(case.positions, between) == case.inside
        found += case.positions[under].tolist()
    assert sorted(found) == sorted(set(expected.tolist()))
    assert len(set(found)) == len(found)
    assert all(case.ids or case.inside is not None for case in cases[1:])
    assert all(case.alone == (len(cases) == 1) for case in cases[:1])
    assert len(cases) == 1 or ids_in(selection) or "between" in str(selection)


@given(selections, st.lists(ids, min_size=1, max_size=6), st.lists(ids, max_size=6))
def test_where_there_are_fewer_rows_every_means_those_and_no_other_position_does(selection, prompt, generated):
    """Of the rows that there are the same are selected; a row that is not there, only where it is named otherwise."""
    limit, lowest = len(prompt) + len(generated), len(prompt) - 1
    tokens, asked = np.array([*prompt, *generated]), Prompt(prompt, lambda: ("", []))
    between = [p for p in range(limit) if is_between(tokens[: p + 1].tolist(), 1, 2)]
    found: list[int] = []
    for case in asked.cases(selection, limit, lowest):
        alike = np.isin(tokens[case.positions], case.ids) != case.others if case.ids else case.positions >= 0
        alike = alike & (case.inside is None or np.isin(case.positions, between) == case.inside)
        found += case.positions[alike].tolist()
    expected = set(asked.select(selection, limit, tokens).tolist())
    assert {p for p in found if p >= lowest} == {p for p in expected if p >= lowest}
    without = asked.select(Joined("&", pc.every, selection), limit, tokens, lowest).tolist()
    assert set(without) == {p for p in expected if p >= lowest}
