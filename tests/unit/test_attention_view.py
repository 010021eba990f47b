"""Attention over text: its page holds the numbers of its maps, no token breaks out of it, and heatmaps fit."""

from __future__ import annotations

import base64
import html
import json
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from patchclamp.plots import AttentionMaps, save_page, save_picture

from .test_token_grid import HOSTILE, Tags


def maps(count: int = 2, queries: tuple[int, ...] = (1, 3, 4), **rest) -> AttentionMaps:
    values = np.random.default_rng(0).normal(0, 3, (count, len(queries), len(HOSTILE)))
    told = {"title": "A title", "explained": "What it is.", "provenance": "org/model", "tokens": HOSTILE}
    names = tuple(f"pattern[0, {n}]" for n in range(count))
    values = values if rest.get("signed") else np.abs(values)
    return AttentionMaps(queries=queries, names=names, maps=values, **told | rest)


@pytest.mark.parametrize("signed", [False, True])
def test_the_text_has_the_numbers_of_the_maps(signed):
    made = maps(3, signed=signed)
    text = made.text()
    shape = json.loads(html.unescape(re.search('data-shape="(.*?)"', text)[1]))
    levels = np.frombuffer(base64.b64decode(re.search('data-maps="(.*?)"', text)[1]), "<i2").reshape(3, 3, -1)
    assert shape["queries"] == [1, 3, 4]
    np.testing.assert_allclose(levels / 32767 * np.array(shape["scales"])[:, None, None], made.maps, atol=2e-4)
    assert text.count("<option>") == 3


def test_no_token_breaks_out_of_a_page(tmp_path):
    pytest.importorskip("plotly")
    page = save_page(maps(), tmp_path / "page.html").read_text()
    tags = Tags(page).tags
    assert "img" not in tags
    assert tags.count("select") == 1
    assert tags.count("option") == 2
    assert [tag for tag in tags if tag == "b"] == []
    assert "\u202e" not in page


@pytest.mark.parametrize(
    ("count", "queries"),
    [(1, (0, 1, 2, 3, 4)), (9, (2,)), (12, (0, 4)), pytest.param(70, (0, 1), marks=pytest.mark.slow)],
)
def test_heatmaps_are_drawn_by_both_libraries(tmp_path, count, queries):
    pytest.importorskip("plotly")
    made = maps(count, queries)
    assert save_picture(made, tmp_path / "maps.png").stat().st_size > 5_000
    drawn = made.draw().axes
    shown = [axes for axes in drawn if axes.images]
    figure = made.figure()
    assert len(shown) == len(figure.data) == min(count, 64)
    for n, (axes, trace) in enumerate(zip(shown, figure.data, strict=True)):
        np.testing.assert_allclose(axes.images[0].get_array(), made.maps[n])
        np.testing.assert_allclose(trace.z, made.maps[n], rtol=1e-6)
        assert axes.get_title(loc="left") == made.names[n]
    assert {note.text for note in figure.layout.annotations} == set(made.names[:64])
