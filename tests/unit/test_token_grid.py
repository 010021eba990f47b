"""Token grids: colours mean what their scale says, texts fit their cells, pages hold their data and no prompt breaks out."""

from __future__ import annotations

from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

import patchclamp as pc
from patchclamp.plots import GridPanel, TokenGrid, save_page, save_picture, style
from patchclamp.plots.style import DIVERGING, INK, SEQUENTIAL

BREAKOUT = "</script><img src=x onerror=alert(1)>"
HOSTILE = (BREAKOUT, "$a$ $b$", "<b>b</b>", "&amp;\"'@@title@@", "\u202egnp.exe")


def make(rows: int = 4, columns: int = 5, texts: tuple[str, ...] = (" Paris", "a", "·", "\n"), **rest) -> GridPanel:
    values = np.random.default_rng(0).uniform(0, 1, (rows, columns))
    cells = tuple(tuple(texts[(r + c) % len(texts)] for c in range(columns)) for r in range(rows))
    labels = tuple(texts[c % len(texts)] for c in range(columns))
    told = {"name": "p", "row_name": "layer", "column_name": "token", "values": values, "texts": cells, "notes": cells}
    return GridPanel(rows=tuple(map(str, range(rows))), columns=labels, **told | rest)


def grid(*panels: GridPanel, **rest) -> TokenGrid:
    told = {"title": "A title", "explained": "What it is.", "provenance": "org/model", "prompt": ("The", " city")}
    return TokenGrid(panels=panels, **told | rest)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)


class TestShades:
    def test_around_a_centre_both_sides_reach_equally_far(self):
        shades = make(values=np.array([[-1.0, 3.0, np.nan]]), rows=1, columns=3, centre=0.0).shades
        assert (shades.low, shades.high, shades.colours) == (-3.0, 3.0, DIVERGING)
        assert shades.ink(0.0) == INK
        assert shades.ink(-3.0) == shades.ink(3.0) == "white"

    def test_one_hue_is_dark_at_its_strong_end(self):
        high = make(reaches=(0.0, None)).shades
        assert high.low == 0.0
        assert high.high == make().values.max()
        low = make(strong="low").shades
        assert low.colours == SEQUENTIAL[::-1]
        assert high.ink(high.high) == low.ink(low.low) == "white"

    def test_a_grid_without_numbers_or_of_one_number_has_a_scale(self):
        for value in (np.nan, 2.0):
            shades = make(values=np.full((4, 5), value)).shades
            assert shades.high > shades.low


class TestPicture:
    def drawn(self, of: TokenGrid) -> list[str]:
        figure = of.draw()
        style._as_text(figure)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        page = figure.bbox
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        for text in texts:
            box = text.get_window_extent(canvas.get_renderer())
            assert box.x0 >= page.x0 - 1
            assert box.x1 <= page.x1 + 1, text.get_text()
        return [text.get_text() for text in texts]

    def test_cells_have_their_texts_and_nothing_is_cut_off(self):
        assert {" Paris", "A title", "layer", "token"} <= set(self.drawn(grid(make())))
        long = make(texts=(" a very long token of a prompt", "b"))
        assert any(text.endswith("…") for text in self.drawn(grid(long)))

    def test_a_grid_too_wide_for_texts_has_colours_alone(self):
        written = self.drawn(grid(make(columns=200, texts=(" cellular",))))
        assert written.count(" cellular") == sum(text == " cellular" for text in written[-200:])
        assert len(written) < 200

    @pytest.mark.parametrize("texts", [HOSTILE, ("é", "Ω")])
    def test_any_token_can_be_drawn(self, texts, tmp_path):
        assert Image.open(save_picture(grid(make(texts=texts)), tmp_path / "a.png")).size[0] > 500
        assert b"<svg" in save_picture(grid(make(texts=texts)), tmp_path / "a.svg").read_bytes()

    def test_panels_of_the_same_rows_lie_beside_each_other(self):
        beside = grid(make(), make()).draw()
        below = grid(make(), make(rows=5)).draw()
        assert beside.get_size_inches()[0] > below.get_size_inches()[0]
        assert beside.get_size_inches()[1] < below.get_size_inches()[1]

    @pytest.mark.filterwarnings("error:constrained_layout not applied")
    @pytest.mark.parametrize("panels", [
        [make(rows=1, columns=1), make(rows=1, columns=1), make(rows=3, columns=60, texts=("a token",))],
        [msgspec.structs.replace(make(rows=2, columns=1, name=name), rows=("a", "long name " * 6)) for name in ("p", "q", "r")],
    ])  # fmt: skip
    def test_panels_of_any_size_have_room(self, panels):
        of = grid(*panels)
        names = [text for text in self.drawn(of) if text.startswith("long name")]
        assert len(names) == sum("long name " * 6 in panel.rows for panel in panels)
        assert max(map(len, names), default=0) <= 24
        axes = [each for each in of.draw().axes if each.get_title(loc="left")]
        assert all(each.get_position().width > 0.1 for each in axes)

    def test_outlined_cells_are_framed(self):
        figure = grid(make(outlined=((1, 2),))).draw()
        frames = [
            box for box in figure.findobj(Rectangle) if box.get_edgecolor()[:3] == (0, 0, 0) and not box.get_fill()
        ]
        assert [frame.get_xy() for frame in frames] == [(1.5, 0.5)]

    def test_other_endings_are_refused(self, tmp_path):
        with pytest.raises(pc.UnknownName, match=r"a.pgn: .*'pgn' \(did you mean 'png'"):
            save_picture(grid(make()), tmp_path / "a.pgn")
        with pytest.raises(pc.UnknownName, match="'txt'"):
            save_page(grid(make()), tmp_path / "a.txt")


class TestPage:
    def test_it_has_every_number_and_text(self, tmp_path):
        panel = make(values=np.array([[0.25, np.nan], [1.0, 0.5]]), rows=2, columns=2, outlined=((1, 0),))
        of = grid(panel, panel, table=(("a", "b"), ("1", "<2>")))
        first, second = of.figure().data
        assert np.array_equal(np.array(first.z, float), panel.values, equal_nan=True)
        assert np.array_equal(np.array(second.z, float), panel.values, equal_nan=True)
        assert [list(row) for row in first.text] == [[style.html_text(t) for t in row] for row in panel.texts or ()]
        assert first.customdata[1][0].startswith("layer 1, token  Paris: 1.00<br>")
        axis = of.figure().layout.coloraxis
        assert (axis.cmin, axis.cmax) == (0.25, 1.0)
        assert [(shape.x0, shape.y0) for shape in of.figure().layout.shapes] == [(-0.5, 0.5)] * 2
        assert "<td>&lt;2&gt;</td>" in save_page(of, tmp_path / "a.html").read_text(encoding="utf-8")

    def test_no_prompt_breaks_out_of_it(self, tmp_path):
        told = dict(title=BREAKOUT, explained=BREAKOUT, provenance=BREAKOUT, prompt=HOSTILE, table=(HOSTILE, HOSTILE))
        page = save_page(grid(make(texts=HOSTILE), **told), tmp_path / "a.html").read_text(encoding="utf-8")
        plain = save_page(grid(make()), tmp_path / "b.html").read_text(encoding="utf-8")
        assert "img" not in Tags(page).tags
        assert Tags(page).tags.count("script") == Tags(plain).tags.count("script")

    def test_a_large_grid_is_a_page_below_ten_megabytes(self, tmp_path):
        draw = np.random.default_rng(0)
        notes = tuple(
            tuple("\n".join(f"token{draw.integers(50_000)} {draw.uniform():.3f}" for _ in range(5)) for _ in range(204))
            for _ in range(36)
        )
        panel = make(rows=36, columns=204, values=draw.uniform(size=(36, 204)), notes=notes)
        assert 100_000 < save_page(grid(panel, panel), tmp_path / "a.html").stat().st_size < 10_000_000
