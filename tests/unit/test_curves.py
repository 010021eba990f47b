"""Pictures of curves: that they show the numbers, on axes that can be read, and that no label breaks out of a page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import patchclamp as pc
from patchclamp.plots import Chart, Curve, Curves, save_page, save_picture, style
from patchclamp.plots.curves import DASHES, MARKERS
from patchclamp.plots.style import LINES, tick

HOSTILE = "</script><img src=x onerror=alert(1)> $a$ @@title@@ \u202e"
STRENGTHS = np.array([0.0, 0.01, 0.1, 1.0])


def curves(label: str = "KL", x: np.ndarray = STRENGTHS, **rest) -> Curves:
    y = np.linspace(0.1, 2.0, len(x))
    with_spread = Curve(label, x, y, y * 0.8, y * 1.3)
    charts = (
        Chart(f"First of {label}", "nats", (with_spread, Curve("JS", x, y / 3)), note="The band has the middle half."),
        Chart("Second", "share", (Curve("same", x, y / 2),), y_range=(0.0, 1.0)),
        Chart("Third", "perplexity", (with_spread,), y_log=True, level=0.5, level_label="unfuzzed"),
    )
    facts = dict(title=f"Answers under {label}", x_label="strength", charts=charts, provenance="org/model · vllm 0.32.0",
                 x_log=True, notes=("5 prompts, greedy.",))  # fmt: skip
    return Curves(**(facts | rest))


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
    with pytest.raises(pc.ProgramError, match=r"x_log: .*-1\.0"):
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
        (dict(y=np.zeros(3)), "equal"), (dict(y=x, low=x), "low and high"), (dict(x=x[::-1], y=x), "ascending"),
        (dict(x=np.zeros(0), y=np.zeros(0)), "> 0"),
    ):  # fmt: skip
        with pytest.raises(pc.ProgramError, match=text):
            Curve(**{"label": "a", "x": x, **wrong})
    with pytest.raises(pc.ProgramError, match="charts: "):
        curves(charts=())


def test_the_span_holds_lines_spreads_and_the_level():
    shown = curves().charts
    low, high = shown[0].span
    assert low < 0.1 / 3 < 2.0 * 1.3 < high
    assert shown[1].span == (0.0, 1.0)
    low, high = shown[2].span
    assert 0 < low < 0.08 < 2.6 < high
    flat = Chart("a", "b", (Curve("c", np.array([1.0]), np.array([3.0])),))
    assert flat.span == (2.5, 3.5)
    nothing = Chart("a", "b", (Curve("c", np.array([1.0]), np.array([np.nan])),))
    assert nothing.span == (0.0, 1.0)


@pytest.mark.parametrize(("span", "ticks"), [
    ((3.0, 60.0), [5, 10, 20, 50]), ((0.5, 2000.0), [1, 10, 100, 1000]), ((1.0, 100.0), [1, 2, 5, 10, 20, 50, 100]),
    ((2.1, 2.4), [2.1, 2.4]),
])  # fmt: skip
def test_a_logarithmic_axis_has_round_ticks(span: tuple[float, float], ticks: list[float]):
    chart = Chart("a", "b", (Curve("c", np.array([1.0]), np.array([3.0])),), y_log=True, y_range=span)
    assert chart.log_ticks == pytest.approx(ticks)
    assert msgspec.structs.replace(chart, y_log=False).log_ticks is None


# -- the picture


def test_the_picture_shows_the_numbers_and_cuts_nothing_off():
    figure = curves(label="a label $x$ that is rather long").draw()
    style._as_text(figure)
    FigureCanvasAgg(figure).draw()
    first, _, third, _ = figure.axes
    line = first.get_lines()[0]
    assert np.allclose(line.get_xdata(), [-3.5, -2, -1, 0])
    assert np.allclose(line.get_ydata(), np.linspace(0.1, 2.0, 4))
    band = first.collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].max(), 2.6)
    assert np.isclose(band[:, 1].min(), 0.08)
    assert [text.get_text() for text in first.get_xticklabels()] == ["0", "0.01", "0.1", "1"]
    assert third.get_yscale() == "log"
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    below = "\n".join(text.get_text() for text in texts)
    assert "5 prompts, greedy.\nRan on org/model · vllm 0.32.0." in below
    edges = figure.bbox
    for text in texts:
        box = text.get_window_extent()
        assert edges.x0 <= box.x0 <= box.x1 <= edges.x1, text.get_text()
        assert edges.y0 <= box.y0 <= box.y1 <= edges.y1, text.get_text()


def test_lines_also_differ_without_colour(tmp_path: Path):
    x = np.array([0.0, 1.0])
    lines = tuple(Curve(f"line {n}", x, x + n) for n in range(4))
    shown = curves(charts=(Chart("a", "b", lines),), x_log=False)
    drawn = shown.draw().axes[0].get_lines()
    assert len({(line.get_marker(), line.get_linestyle()) for line in drawn}) == 4 == len(DASHES) < len(MARKERS)
    assert len(set(LINES)) == len(LINES) >= 6
    for ending in ("png", "svg", "pdf"):
        assert save_picture(shown, tmp_path / f"a.{ending}").stat().st_size > 3_000
    with pytest.raises(pc.UnknownName, match="'pgn'"):
        save_picture(shown, tmp_path / "a.pgn")


# -- the page


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def test_the_figure_has_every_point_and_its_spread():
    lines = [trace for trace in curves().figure().data if trace.mode == "lines+markers"]
    assert [trace.name for trace in lines] == ["KL", "JS", "same", "KL"]
    assert np.allclose(lines[0].x, [-3.5, -2, -1, 0])
    assert np.allclose(lines[0].y, np.linspace(0.1, 2.0, 4))
    assert lines[0].customdata[0] == "KL at 0: 0.10 (0.08 to 0.13)"
    assert curves().figure().layout.yaxis3.type == "log"


def test_the_spread_has_a_polygon_for_each_stretch_without_gaps():
    x = np.arange(6.0)
    y = np.array([1.0, 2.0, np.nan, np.nan, 3.0, 4.0])
    chart = Chart("Gaps", "nats", (Curve("KL", x, y, y - 1, y + 1),))
    figure = Curves(title="Gaps", x_label="x", charts=(chart,), provenance="org/model").figure()
    (band,) = [trace for trace in figure.data if trace.fill == "toself"]
    assert list(band.x) == [0, 1, 1, 0, None, 4, 5, 5, 4, None]
    assert list(band.y) == [2, 3, 1, 0, None, 4, 5, 3, 2, None]


def test_the_page_has_the_numbers(tmp_path: Path):
    page = save_page(curves(), tmp_path / "curves.html").read_text(encoding="utf-8")
    assert "<td>0.10 (0.08 to 0.13)</td>" in page
    assert len(page) < 100_000
    with pytest.raises(pc.UnknownName, match="'htlm'"):
        save_page(curves(), tmp_path / "curves.htlm")


def test_gaps_and_lines_of_different_numbers(tmp_path: Path):
    lines = (
        Curve("a", np.array([0.0, 1.0, 2.0]), np.array([1.0, np.nan, 3.0])),
        Curve("b", np.array([1.0]), np.array([2.0])),
    )
    shown = curves(charts=(Chart("a", "b", lines),), x_log=False)
    page = save_page(shown, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<tr><td>0</td><td>1.00</td><td></td></tr>\n<tr><td>1</td><td>–</td><td>2.00</td></tr>" in page
    assert save_picture(shown, tmp_path / "a.png").stat().st_size > 3_000


def test_a_chart_may_have_a_horizontal_axis_of_its_own(tmp_path: Path):
    own = Chart("ROC", "recall", (Curve("probe", np.array([0.0, 0.1234, 1.0]), np.arange(3.0)),), x_label="rate")
    shown = curves(charts=(*curves().charts, own))
    assert shown.numbers == STRENGTHS.tolist()
    axes = shown.draw().axes
    assert [of.get_xlabel() for of in axes] == ["strength"] * 3 + ["rate"]
    assert axes[3].get_lines()[0].get_xdata() == pytest.approx([0, 0.1234, 1])
    texts = [text.get_text() for text in axes[3].get_xticklabels()]
    assert (texts[0], texts[-1]) == ("0", "1")
    assert max(map(len, texts)) == 3  # round numbers, because 0.1234 is long
    figure = shown.figure()
    assert figure.layout.xaxis4.title.text == "rate"
    assert figure.layout.xaxis3.ticktext == figure.layout.xaxis.ticktext == ("0", "0.01", "0.1", "1")
    page = save_page(shown, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<tr><td>0.1234</td><td>1.00</td></tr>" in page
    assert page.count("<td>0.1234</td>") == 1


def test_no_label_breaks_out_of_the_page(tmp_path: Path):
    shown = curves(label=HOSTILE, notes=(HOSTILE,), provenance=HOSTILE, x_label=HOSTILE)
    page = save_page(shown, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "img" not in Elements(page).tags
    plain = save_page(curves(), tmp_path / "b.html").read_text(encoding="utf-8")
    assert Elements(page).tags.count("script") == Elements(plain).tags.count("script")
    assert save_picture(shown, tmp_path / "a.png").stat().st_size > 3_000
