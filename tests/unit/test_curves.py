"""Pictures of curves: that they show the numbers, on axes that can be read, and that no label breaks out of a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import patchclamp as pc
from patchclamp.plots import Chart, Curves, Line, curves_html, curves_png
from patchclamp.plots.curves import tick
from patchclamp.plots.curves_html import curves_page
from patchclamp.plots.curves_png import DASHES, MARKERS, curves_figure
from patchclamp.plots.palette import LINES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=alert(1)> $a$ @@title@@ \u202e"
STRENGTHS = np.array([0.0, 0.01, 0.1, 1.0])


def curves(label: str = "KL", x: np.ndarray = STRENGTHS, **rest) -> Curves:
    y = np.linspace(0.1, 2.0, len(x))
    with_spread = Line(label, x, y, y * 0.8, y * 1.3)
    charts = (
        Chart(f"First of {label}", "nats", (with_spread, Line("JS", x, y / 3)), note="The band has the middle half."),
        Chart("Second", "share", (Line("same", x, y / 2),), y_range=(0.0, 1.0)),
        Chart("Third", "perplexity", (with_spread,), y_log=True, level=0.5, level_label="unfuzzed"),
    )
    facts = dict(title=f"Answers under {label}", x_label="strength", charts=charts, provenance="org/model · vllm 0.32.0",
                 x_log=True, notes=("5 prompts, greedy.",))  # fmt: skip
    return Curves(**(facts | rest))


def data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="curves">(.*?)</script>', page, re.S)[1])


# -- axes


def test_a_logarithmic_axis_has_a_place_for_0():
    shown = curves()
    places = [shown.place(x) for x in STRENGTHS]
    assert places[1:] == [-2, -1, 0]
    assert places[0] == -2 - 1.5
    assert places[0] < shown.gap < places[1]
    assert curves(x=STRENGTHS[1:]).gap is None
    assert curves(x_log=False).gap is None
    assert curves(x_log=False).place(0.1) == 0.1
    with pytest.raises(pc.ProgramError, match=r"x_log: a logarithmic axis has no number below 0: -1\.0"):
        curves(x=np.array([-1.0, 1.0]))
    assert [curves(x=np.array(x)).place(0.0) for x in ([0.0], [0.0, 1.0])] == [0.0, -0.75]


def test_labels_are_few_and_round():
    assert [text for _, text in curves().ticks()] == ["0", "0.01", "0.1", "1"]
    layers = curves(x=np.arange(30.0), x_log=False)
    assert [text for _, text in layers.ticks()] == ["0", "5", "10", "15", "20", "25"]
    assert [text for _, text in curves(x=np.linspace(-4, 4, 33), x_log=False).ticks()][:2] == ["−4", "−3"]
    many = curves(x=np.append(0.0, np.geomspace(0.001, 1, 31)))
    texts = [text for _, text in many.ticks()]
    assert (texts[0], texts[-1]) == ("0", "1")
    assert len(texts) <= 13
    assert tick(1e-5) == "1.0 × 10⁻⁵"


def test_what_is_no_line_is_an_error():
    x = np.array([0.0, 1.0])
    for wrong, text in (
        (dict(y=np.zeros(3)), "of one length"), (dict(y=x, low=x), "two sides"), (dict(x=x[::-1], y=x), "x ascends"),
        (dict(x=np.zeros(0), y=np.zeros(0)), "at least 1"),
    ):  # fmt: skip
        with pytest.raises(pc.ProgramError, match=text):
            Line(**{"label": "a", "x": x, **wrong})
    with pytest.raises(pc.ProgramError, match="at least one chart"):
        curves(charts=())


def test_the_span_holds_lines_spreads_and_the_level():
    shown = curves().charts
    low, high = shown[0].span
    assert low < 0.1 / 3 < 2.0 * 1.3 < high
    assert shown[1].span == (0.0, 1.0)
    low, high = shown[2].span
    assert 0 < low < 0.08 < 2.6 < high
    flat = Chart("a", "b", (Line("c", np.array([1.0]), np.array([3.0])),))
    assert flat.span == (2.5, 3.5)
    nothing = Chart("a", "b", (Line("c", np.array([1.0]), np.array([np.nan])),))
    assert nothing.span == (0.0, 1.0)


# -- the picture


def test_the_picture_shows_the_numbers_and_cuts_nothing_off():
    figure = curves_figure(curves(label="a label $x$ that is rather long"))
    FigureCanvasAgg(figure).draw()
    first, _, third = figure.axes
    line = first.get_lines()[0]
    assert np.allclose(line.get_xdata(), [-3.5, -2, -1, 0])
    assert np.allclose(line.get_ydata(), np.linspace(0.1, 2.0, 4))
    band = first.collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), 2.6)
    assert np.isclose(band[:, 1].min(), 0.08)
    assert [text.get_text() for text in first.get_xticklabels()] == ["0", "0.01", "0.1", "1"]
    assert third.get_yscale() == "log"
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert {"5 prompts, greedy.", "Ran on org/model · vllm 0.32.0."} <= {text.get_text() for text in texts}
    edges = figure.bbox
    for text in texts:
        box = text.get_window_extent()
        assert edges.x0 <= box.x0 <= box.x1 <= edges.x1, text.get_text()
        assert edges.y0 <= box.y0 <= box.y1 <= edges.y1, text.get_text()


def test_lines_also_differ_without_colour(tmp_path: Path):
    x = np.array([0.0, 1.0])
    lines = tuple(Line(f"line {n}", x, x + n) for n in range(4))
    shown = curves(charts=(Chart("a", "b", lines),), x_log=False)
    drawn = curves_figure(shown).axes[0].get_lines()
    assert len({(line.get_marker(), line.get_linestyle()) for line in drawn}) == 4 == len(DASHES) < len(MARKERS)
    assert len(set(LINES)) == len(LINES) >= 6
    for ending in ("png", "svg", "pdf"):
        assert curves_png(shown, tmp_path / f"a.{ending}").stat().st_size > 3_000
    with pytest.raises(pc.UnknownName, match="no picture format 'pgn'"):
        curves_png(shown, tmp_path / "a.pgn")


# -- the page


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def test_the_page_is_small_whole_and_asks_for_nothing(tmp_path: Path):
    path = curves_html(curves(), tmp_path / "curves.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 40_000
    assert not re.findall(r"""(?:src|href)=|url\(|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert "@@" not in page
    assert "0.10 (0.08 to 0.13)" in page
    assert ">0.5<" not in page
    with pytest.raises(pc.UnknownName, match="no page format 'htlm'"):
        curves_html(curves(), tmp_path / "curves.htlm")


def test_gaps_and_lines_of_different_numbers(tmp_path: Path):
    lines = (
        Line("a", np.array([0.0, 1.0, 2.0]), np.array([1.0, np.nan, 3.0])),
        Line("b", np.array([1.0]), np.array([2.0])),
    )
    shown = curves(charts=(Chart("a", "b", lines),), x_log=False)
    page = curves_page(shown)
    assert data(page)["charts"][0]["lines"][0]["y"] == [1.0, None, 3.0]
    rows = re.findall(r"<tr>(<td.*?)</tr>", page)
    assert [re.findall(r">([^<]*)</td>", row) for row in rows] == [
        ["0", "1.00", ""],
        ["1", "–", "2.00"],
        ["2", "3.00", ""],
    ]
    assert curves_png(shown, tmp_path / "a.png").stat().st_size > 3_000


def test_no_label_breaks_out_of_the_page():
    shown = curves(label=HOSTILE, notes=(HOSTILE,), provenance=HOSTILE, x_label=HOSTILE)
    page = curves_page(shown)
    parser = Elements()
    parser.feed(page)
    assert "img" not in parser.tags
    assert parser.tags.count("script") == 2
    assert data(page)["x_label"] == HOSTILE
    assert data(page)["charts"][0]["lines"][0]["label"] == HOSTILE
    FigureCanvasAgg(curves_figure(shown)).draw()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_point(tmp_path: Path):
    path = curves_html(curves(label=HOSTILE), tmp_path / "curves.html")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--dump-dom", path.as_uri()]  # fmt: skip
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = drawn.partition("<body>")[2].partition('<script type="application/json"')[0]
    assert body.count("<svg") == 3
    assert body.count("<circle") == 4 * 4
    assert body.count("<polyline") == 4
    assert body.count("<polygon") == 2
    assert body.count("//</text>") == 3
    assert "<img" not in body
