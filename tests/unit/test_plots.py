"""Pictures of a sweep: that they can be read, that nothing is cut off, and that no prompt breaks out of one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

import patchclamp as pc
from patchclamp.plots import check_targets, heatmap_html, heatmap_png, passage, words
from patchclamp.plots.heatmap_html import heatmap_page
from patchclamp.plots.heatmap_png import heatmap_figure
from patchclamp.plots.palette import DIVERGING
from patchclamp.studies.study import Provenance
from patchclamp.studies.sweep_result import AblationSweep, Block, Column, Pair, PatchSweep, Row, formula, model_name

CLEAN = ("The", " Louvre", " is", " in", " the", " city")
CORRUPT = ("The", " Colosseum", " is", " in", " the", " city")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BREAKOUT = "</script><img src=x onerror=alert(1)>"
HOSTILE = (BREAKOUT, " $a$ $b$", "\u202egnp.exe", "<b>b</b>", "%{x}", "&amp;\"'@@title@@")


def make_sweep(
    sites: tuple[str, ...] = ("resid_pre",),
    layers: int = 4,
    clean_tokens: tuple[str, ...] = CLEAN,
    corrupt_tokens: tuple[str, ...] = CORRUPT,
    clean: float = 4.0,
    corrupt: float = -3.0,
    columns: tuple[Column, ...] | None = None,
    seed: int = 0,
    **rest,
) -> PatchSweep:
    """A sweep of random values between the baselines."""
    pairs = tuple((p, p) for p in range(len(corrupt_tokens)))
    columns = columns or tuple(Column(token, (p,), (p,)) for p, token in enumerate(corrupt_tokens))
    rows = [Row(site, layer) for site in sites
            for layer in ((None,) if site in ("embed", "final_norm", "logits") else range(layers))]  # fmt: skip
    values = np.random.default_rng(seed).uniform(*sorted((corrupt, clean)), (len(rows), len(columns)))
    made = Provenance(rest.pop("model", "org/model"), "vllm 0.32.0", "float32", "0")
    of_pair = {"answer": " Paris", "foil": " Rome", "alignment": pairs, "skipped": ()}
    of_pair |= {name: rest.pop(name) for name in list(rest) if name in of_pair}
    pair = Pair(
        clean_prompt="".join(clean_tokens), corrupt_prompt="".join(corrupt_tokens), clean_tokens=clean_tokens,
        corrupt_tokens=corrupt_tokens, clean=clean, corrupt=corrupt, columns=columns, **of_pair,
    )  # fmt: skip
    facts = {"metric": "logit_diff", "noise_floor": 1e-6} | rest
    return PatchSweep(
        provenance=made, pairs=(pair,), rows=tuple(rows), columns=columns, values=values, each=values[None], clean=clean,
        corrupt=corrupt, **facts,
    )  # fmt: skip


def with_grid(sweep: PatchSweep, **cells: float) -> PatchSweep:
    """A sweep whose values are the corrupt baseline but for `site_layer_column` cells."""
    values = np.full_like(sweep.values, sweep.corrupt)
    for name, value in cells.items():
        site, layer, column = map(int, name.strip("_").split("_"))
        values[sweep.rows.index(Row(sweep.sites[site], layer)), column] = value
    return msgspec.structs.replace(sweep, values=values)


def with_gaps(sweep: PatchSweep, rows: slice, columns: slice = slice(None)) -> PatchSweep:
    """A sweep some of whose cells were not run."""
    values = sweep.values.copy()
    values[rows, columns] = np.nan
    return msgspec.structs.replace(sweep, values=values)


def heads(columns: int = 1, count: int = 3, layers: int = 5) -> PatchSweep:
    """A sweep of heads, whose value in row r and column p is r + 100 p."""
    rows = tuple(Row("z", layer, str(head)) for head in range(count) for layer in range(layers))
    across = tuple(Column(token, (p,), (p,)) for p, token in enumerate(CORRUPT[:columns]))
    values = np.arange(len(rows))[:, None] + 100.0 * np.arange(columns)
    return msgspec.structs.replace(make_sweep(), rows=rows, columns=across, values=values)


def ablation() -> AblationSweep:
    """An ablation of one prompt, with two strong effects of opposite signs."""
    of = with_grid(make_sweep(layers=3), _0_1_2=-5.0, _0_2_3=-2.5)
    pair = msgspec.structs.replace(of.pairs[0], clean=-3.0, corrupt=None, corrupt_tokens=(), alignment=())
    return AblationSweep(
        provenance=of.provenance, metric="logit_diff", pairs=(pair,), rows=of.rows, columns=of.columns, values=of.values,
        each=of.values[None], clean=-3.0, corrupt=None, noise_floor=0.0, direction="noising",
    )  # fmt: skip


LONG = tuple(f" token{p}" for p in range(40))
SHORTER = ("The", " Col", "osseum", " is", " in", " the", " city")
SWEEPS = {
    "30 layers of 6 tokens": make_sweep(layers=30),
    "three sites": make_sweep(("resid_pre", "attn_out", "mlp_out"), layers=12),
    "four layers of 40 tokens": make_sweep(clean_tokens=("x", *LONG[1:]), corrupt_tokens=LONG),
    "one column": make_sweep(layers=30, columns=(Column(" Colosseum is", (1, 2), (1, 2)),)),
    "with unlayered sites": make_sweep(("embed", "resid_pre", "logits"), layers=8),
    "one unlayered site": make_sweep(("embed",), layers=1),
    "seven sites": make_sweep(("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out")),
    "240 tokens": make_sweep(clean_tokens=LONG * 6, corrupt_tokens=LONG * 6),
    "clean below corrupt": make_sweep(clean=-5.0, corrupt=2.0),
    "equal baselines": make_sweep(clean=1.0, corrupt=1.0),
    "close baselines": make_sweep(clean=1.0, corrupt=0.9, noise_floor=0.5),
    "recovered": make_sweep(metric="recovered", clean=1.0, corrupt=0.0),
    "log-probability": make_sweep(metric="logprob", clean=-1.5, corrupt=-9.0, foil=None, noise_floor=0.0),
    "skipped positions": make_sweep(
        corrupt_tokens=SHORTER, alignment=((0, 0), *((c, c + 1) for c in range(2, 6))),
        columns=tuple(Column(CLEAN[c], (c,), (c + bool(c),)) for c in (0, 2, 3, 4, 5)),
        skipped=(("clean", 1, " Louvre"), ("corrupt", 1, " Col"), ("corrupt", 2, "osseum")),
    ),
    "hostile tokens": make_sweep(clean_tokens=HOSTILE[::-1], corrupt_tokens=HOSTILE, answer="<i>", foil="$x$"),
    "heads across": heads(),
    "heads below each other": heads(columns=6),
    "an ablation": ablation(),
    "blocks": msgspec.structs.replace(
        with_gaps(make_sweep(layers=8), slice(2, 8), slice(0, 4)), blocks=(Block((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3), 2.0),)
    ),
    "noising": make_sweep(direction="noising"),
    "long labels": make_sweep(
        clean_tokens=("x" * 90,) * 6, corrupt_tokens=("y z" * 30,) * 6, model="m" * 140,
        answer="a b" * 40,
    ),
}  # fmt: skip
every_sweep = pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)


# -- numbers


class TestReading:
    def test_the_scale_is_centred_on_corrupt_and_ends_at_clean(self):
        found = make_sweep(clean=4.0, corrupt=-3.0).heatmap().scale
        assert (found.low, found.centre, found.high, found.towards) == (-10.0, -3.0, 4.0, 1.0)
        assert found.to_goal

    def test_where_no_cell_comes_near_clean_the_largest_effect_is_the_strong_end(self):
        found = with_grid(make_sweep(clean=4.0, corrupt=-3.0), _0_2_3=-1.0).heatmap().scale
        assert (found.low, found.centre, found.high, found.to_goal) == (-5.0, -3.0, -1.0, False)

    def test_noising_is_centred_on_clean_and_keeps_the_colours_of_the_sides(self):
        found = make_sweep(clean=4.0, corrupt=-3.0, direction="noising").heatmap()
        assert (found.baseline.name, found.goal.name) == ("clean", "corrupt")
        assert (found.scale.low, found.scale.centre, found.scale.high, found.scale.towards) == (-3.0, 4.0, 11.0, -1.0)
        assert found.scale.blue_above
        assert found.axis == "token of the clean prompt"
        assert make_sweep(clean=-5.0, corrupt=2.0).heatmap().scale.blue_above is False

    def test_an_ablation_has_no_goal(self):
        heatmap = ablation().heatmap()
        assert (heatmap.goal, heatmap.share(-5.0), heatmap.scale.half) == (None, None, 2.0)
        assert [spot.value for spot in heatmap.ranked(2)] == [-5.0, -2.5] == [c.value for c in ablation().best(2)]
        assert [strip.title for strip in heatmap.strips] == ["prompt"]

    def test_what_is_not_above_the_noise_floor_is_faint(self):
        sweep = msgspec.structs.replace(with_grid(make_sweep(layers=2), _0_1_2=-2.5, _0_0_1=-2.4), noise_floor=0.5)
        faint = sweep.heatmap().faint(sweep.grid[0])
        assert np.argwhere(~faint).tolist() == [[0, 1]]
        assert not sweep.heatmap().faint(np.array([np.nan])).any()

    def test_heads_stand_across_where_there_are_few_columns(self):
        (only,) = (heatmap := heads().heatmap()).panels
        assert (only.name, heatmap.axis, [c.label for c in heatmap.columns]) == ("z @ The", "head", ["0", "1", "2"])
        assert np.array_equal(only.values, np.arange(15).reshape(3, 5).T)
        assert only.cell_name(4, heatmap.columns[2]) == ("z[4, 2]", "The")
        assert heatmap.ranked(1)[0].value == heads().best(1)[0].value == 14.0

    def test_heads_have_panels_where_there_are_many(self):
        panels = (heatmap := heads(columns=6).heatmap()).panels
        assert [panel.name for panel in panels] == ["z[:, 0]", "z[:, 1]", "z[:, 2]"]
        assert panels[1].cell_name(3, heatmap.columns[4]) == ("z[3, 1]", " the")
        assert panels[1].values[3, 4] == 408.0

    def test_a_cell_without_a_value_shows_its_smallest_block(self):
        blocks = (Block((0, 1, 2, 3), (0, 1), 1.0), Block((0, 1), (0,), 2.0))
        sweep = msgspec.structs.replace(with_gaps(make_sweep(layers=4), slice(0, 4)), blocks=blocks)
        coarse = sweep.heatmap().panels[0].coarse
        assert coarse[:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]
        assert np.isnan(coarse[:, 2]).all()
        assert sweep.heatmap().ranked(3) == []

    def test_clean_below_corrupt_turns_the_scale(self):
        found = make_sweep(clean=-5.0, corrupt=2.0).heatmap().scale
        assert (found.low, found.high, found.towards) == (-5.0, 9.0, -1.0)

    def test_where_baselines_agree_the_largest_effect_is_the_strong_end(self):
        assert with_grid(make_sweep(clean=1.0, corrupt=1.0), _0_2_3=1.5).heatmap().scale.half == 0.5
        assert with_grid(make_sweep(clean=1.0, corrupt=1.0)).heatmap().scale.half == 1.0

    def test_an_unlayered_site_is_one_row_and_comes_last(self):
        embed, resid = make_sweep(("embed", "resid_pre"), layers=3).heatmap().panels[::-1]
        assert (embed.name, embed.rows, embed.values.shape, embed.row_name(0)) == ("embed", (None,), (1, 6), "embed")
        assert (resid.name, resid.rows, resid.row_name(2)) == ("resid_pre", (0, 1, 2), "resid_pre[2]")

    def test_a_layered_site_with_one_layer_keeps_it(self):
        (only,) = make_sweep(layers=1).heatmap().panels
        assert only.row_name(0) == "resid_pre[0]"

    @pytest.mark.parametrize(("clean", "towards"), [(4.0, 1), (-9.0, -1)])
    def test_ranked_is_best_of_the_sweep(self, clean: float, towards: int):
        sweep = make_sweep(("resid_pre", "embed"), layers=5, clean=clean, seed=3)
        heatmap = sweep.heatmap()
        spots = heatmap.ranked(7)
        assert [spot.value for spot in spots] == [cell.value for cell in sweep.best(7)]
        assert [spot.value for spot in spots] == sorted((spot.value for spot in spots), reverse=towards > 0)
        assert all(heatmap.panels[s.panel].values[s.row, s.column] == s.value for s in spots)

    def test_ranked_never_names_a_cell_that_was_not_run(self):
        assert len(make_sweep(("embed",), layers=3).heatmap().ranked(100)) == 6

    def test_effect_and_share(self):
        heatmap = make_sweep(clean=4.0, corrupt=-4.0).heatmap()
        assert heatmap.effect(-2.0) == 2.0
        assert heatmap.share(-2.0) == 0.25
        assert make_sweep(clean=1.0, corrupt=1.0).heatmap().share(3.0) is None


# -- words


class TestWords:
    @pytest.mark.parametrize(
        ("token", "seen"),
        [
            (" Tower", "·Tower"), ("a b", "a·b"), ("\n\n", "↵↵"), ("\t\r", "⇥␍"), ("", "∅"), ("\u202e", "⟨202E⟩"),
            ("\x00", "⟨0000⟩"), ("\u00a0", "⟨00A0⟩"), ("\ud800", "⟨D800⟩"), ("東京", "東京"), ("<b>", "<b>"),
        ],
    )  # fmt: skip
    def test_visible(self, token: str, seen: str):
        assert words.visible(token) == seen

    @given(st.text())
    def test_what_is_visible_is_printable(self, token: str):
        assert words.visible(token).isprintable()

    @pytest.mark.parametrize(
        ("value", "text"),
        [(3.14159, "3.14"), (-2.0, "−2.00"), (0.0, "0.00"), (0.0123, "0.012"), (-2e-6, "−2.0 × 10⁻⁶")],
    )
    def test_number(self, value: float, text: str):
        assert words.number(value) == text

    def test_signed_and_percent(self):
        assert (words.signed(0.5), words.signed(-0.5)) == ("+0.50", "−0.50")
        assert (words.percent(0.931), words.percent(-0.1), words.percent(None)) == ("93 %", "−10 %", "–")

    @pytest.mark.parametrize(("numbers", "text"), [((3,), "3"), ((3, 4, 5), "3–5"), ((3, 7), "3, 7")])
    def test_positions(self, numbers: tuple[int, ...], text: str):
        assert words.positions(numbers) == text

    @pytest.mark.parametrize(
        ("metric", "text"),
        [
            ("logit_diff", "logit difference ' Paris' − ' Rome'"),
            ("logprob", "log-probability of ' Paris'"),
            ("recovered", "recovered share of the logit difference ' Paris' − ' Rome'"),
        ],
    )
    def test_title_says_what_was_done(self, metric: str, text: str):
        title = make_sweep(metric=metric).heatmap().title
        assert title == f"Patching clean activations into the corrupt run: {text}"
        assert words.unbroken(title).replace("\u00a0", " ") == title

    def test_formulas(self):
        assert formula(make_sweep(metric="logprob", foil=None)) == "log p(' Paris' | prompt)"
        assert formula(make_sweep()).startswith("logit(' Paris') − logit(' Rome') = log p(' Paris' | prompt)")
        recovered = formula(make_sweep(metric="recovered"))
        assert recovered.startswith("(Δ patched − Δ corrupt) / (Δ clean − Δ corrupt)")

    def test_noise(self):
        assert (
            words.noise(make_sweep(noise_floor=0.0).heatmap())
            == "noise floor 0: reruns of the corrupt prompt agree exactly"
        )
        assert words.noise(make_sweep(noise_floor=0.25).heatmap()) == "noise floor 0.25: smaller effects mean nothing"

    def test_marks(self):
        clean, _ = make_sweep().heatmap().strips
        assert clean.marks == ("same", "differs", "same", "same", "same", "same")
        clean, corrupt = SWEEPS["skipped positions"].heatmap().strips
        assert clean.marks == ("same", "skipped", "same", "same", "same", "same")
        assert corrupt.marks == ("same", "skipped", "skipped", "same", "same", "same", "same")

    def test_what_is_skipped_is_what_the_sweep_skipped(self):
        sweep = SWEEPS["skipped positions"]
        assert tuple(sweep.heatmap().skipped) == sweep.skipped

    def test_a_local_folder_is_told_by_its_name(self):
        assert model_name(make_sweep(model="/home/someone/models/tiny")) == "tiny"
        assert model_name(make_sweep(model="org/tiny")) == "org/tiny"


marks = st.sampled_from(["same"] * 9 + ["differs"])
word_lists = st.lists(st.tuples(st.text("ab ", min_size=1, max_size=9), marks), min_size=1)


class TestAbridge:
    @given(word_lists, st.integers(20, 400))
    def test_only_drops_and_marks_what_it_drops(self, words, limit: int):
        kept = passage.abridge(words, limit)
        rest = iter(words)
        assert all(word in rest for word in kept if word != (" … ", "same"))
        if (" … ", "same") not in kept:
            assert kept == words

    def test_what_differs_stays_and_both_ends(self):
        words = [(f" {i}", "differs" if i == 500 else "same") for i in range(1000)]
        kept = passage.abridge(words, 120)
        assert {words[0], words[500], words[999]} <= set(kept)
        assert sum(len(text) for text, _ in kept) <= 120

    def test_prompts_that_share_nothing_are_cut_in_the_middle(self):
        kept = passage.abridge([(" word", "differs")] * 1000, 100)
        assert len(kept) == 21
        assert kept[10] == (" … ", "same")


# -- PNG


def heatmaps(figure) -> dict[str, tuple]:
    """Each panel's axes and mesh, by site."""
    found = {}
    for axes in figure.axes:
        mesh = [child for child in axes.get_children() if isinstance(child, QuadMesh)]
        if axes.get_title(loc="left"):
            found[axes.get_title(loc="left")] = (axes, mesh[0])
    return found


def outlines(axes) -> list[tuple[float, float]]:
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    return [patch.get_xy() for patch in boxes]


class TestPng:
    @every_sweep
    def test_nothing_is_cut_off(self, sweep: PatchSweep):
        figure = heatmap_figure(sweep.heatmap())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        width, height = canvas.get_width_height()
        for text in figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                box = text.get_window_extent(canvas.get_renderer())
                assert box.x0 >= 0, text.get_text()
                assert box.x1 <= width, text.get_text()
                assert box.y0 >= 0, text.get_text()
                assert box.y1 <= height, text.get_text()

    @pytest.mark.parametrize("name", ["30 layers of 6 tokens", "three sites", "four layers of 40 tokens", "one column"])
    def test_the_file_is_a_picture_of_sensible_size(self, tmp_path, name: str):
        path = heatmap_png(SWEEPS[name].heatmap(), tmp_path / "new" / "sweep.png")
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            assert 800 <= image.width <= 3000
            assert 400 <= image.height <= 2400
            colours = np.asarray(image.convert("RGB"))
        assert (colours[0, 0] == 255).all()
        assert colours.std() > 5

    def test_every_value_is_where_it_belongs(self):
        sweep = make_sweep(("resid_pre", "embed"), layers=5)
        shown = heatmaps(heatmap_figure(sweep.heatmap()))
        axes, mesh = shown["resid_pre"]
        assert np.array_equal(mesh.get_array().reshape(5, 6), sweep.grid[0])
        assert [label.get_text() for label in axes.get_xticklabels()] == [words.visible(token) for token in CORRUPT]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3", "4"]
        assert axes.get_ylim() == (0, 5), "layer 0 is at the bottom"
        axes, mesh = shown["embed"]
        assert np.array_equal(mesh.get_array().reshape(1, 6), sweep.grid[1, :1])
        assert not axes.get_yticklabels()

    def test_layers_are_named_by_their_number(self):
        sweep = make_sweep(layers=3)
        rows = tuple(Row("resid_pre", layer) for layer in (4, 8, 12))
        sweep = msgspec.structs.replace(sweep, rows=rows)
        (axes, _), *_ = heatmaps(heatmap_figure(sweep.heatmap())).values()
        assert [label.get_text() for label in axes.get_yticklabels()] == ["4", "8", "12"]

    @pytest.mark.parametrize(("clean", "corrupt"), [(4.0, -3.0), (-5.0, 2.0)])
    def test_corrupt_is_white_and_clean_the_blue_end(self, clean: float, corrupt: float):
        sweep = make_sweep(("resid_pre", "attn_out"), clean=clean, corrupt=corrupt)
        for _, mesh in heatmaps(heatmap_figure(sweep.heatmap())).values():
            middle = np.array([int(DIVERGING[5][i : i + 2], 16) / 255 for i in (1, 3, 5)])
            end = np.array([int(DIVERGING[10][i : i + 2], 16) / 255 for i in (1, 3, 5)])
            assert np.abs(mesh.to_rgba(corrupt)[:3] - middle).max() < 0.02
            assert np.allclose(mesh.to_rgba(clean)[:3], end)

    def test_the_best_cell_and_only_it_is_outlined(self):
        sweep = with_grid(make_sweep(("resid_pre", "attn_out")), _1_2_3=5.0, _0_0_0=1.0)
        shown = heatmaps(heatmap_figure(sweep.heatmap()))
        assert set(outlines(shown["attn_out"][0])) == {(3, 2)}
        assert not outlines(shown["resid_pre"][0])

    def test_a_dot_marks_every_cell_that_is_not_above_the_noise_floor(self):
        sweep = with_grid(make_sweep(layers=30), _0_2_3=4.0, _0_7_1=-3.5)
        ((axes, _),) = heatmaps(heatmap_figure(sweep.heatmap())).values()
        (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
        marked = {(int(y), int(x)) for x, y in dots.get_xydata()}
        assert marked == {(row, column) for row in range(30) for column in range(6)} - {(2, 3), (7, 1)}

    def test_cells_that_were_not_run_are_hatched(self):
        sweep = make_sweep(("resid_pre", "embed"), layers=3)
        figure = heatmap_figure(with_gaps(sweep, slice(1, 2)).heatmap())
        axes, mesh = heatmaps(figure)["resid_pre"]
        assert mesh.get_array().mask.reshape(3, 6)[1].all()
        assert axes.patch.get_hatch()
        assert "not run" in [text.get_text() for text in figure.texts]
        assert "not run" not in [text.get_text() for text in heatmap_figure(sweep.heatmap()).texts]

    def test_what_it_says(self):
        figure = heatmap_figure(SWEEPS["skipped positions"].heatmap())
        said = " ".join(text.get_text() for text in figure.findobj(Text))
        for part in ("' Paris'", "' Rome'", " Louvre", "osseum", "clean 4.00", "corrupt −3.00", "org/model",
                     "vllm 0.32.0", "float32", "Noise floor 1.0 × 10⁻⁶",
                     "Dotted underline", "best: resid_pre["):  # fmt: skip
            assert part in said.replace("\u00a0", " ")

    def test_dollars_are_drawn_not_typeset(self):
        figure = heatmap_figure(SWEEPS["hostile tokens"].heatmap())
        dollars = [text for text in figure.findobj(Text) if "$" in text.get_text()]
        assert len(dollars) >= 4
        assert not any(text.get_parse_math() for text in dollars)

    def test_numbers_stand_in_cells_with_room_for_them(self):
        small, large = make_sweep(layers=4), make_sweep(layers=30)
        texts = [len(heatmaps(heatmap_figure(sweep.heatmap()))["resid_pre"][0].texts) for sweep in (small, large)]
        assert texts == [24, 0]

    def test_the_ending_says_the_format(self, tmp_path):
        assert heatmap_png(make_sweep().heatmap(), tmp_path / "a.svg").read_text().startswith("<?xml")
        assert heatmap_png(make_sweep().heatmap(), str(tmp_path / "a.PDF")).read_bytes().startswith(b"%PDF")


# -- HTML


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text of those without elements inside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(len(self.tags) - 1)

    def handle_endtag(self, tag):
        while self._open and self.tags[self._open.pop()][0] != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts.append((*self.tags[self._open[-1]], data))

    def data(self) -> dict:
        (found,) = [text for tag, attrs, text in self.texts if (tag, attrs.get("id")) == ("script", "heatmap")]
        return json.loads(found)

    def tokens(self, side: str) -> list[tuple[str, str]]:
        """Text and class of every token of a prompt."""
        found = [(text, attrs) for tag, attrs, text in self.texts if (attrs.get("id") or "").startswith(f"{side}-")]
        return [(text, str(attrs["class"]).split()[1]) for text, attrs in found]

    def scripts(self) -> list[str]:
        return [text for tag, attrs, text in self.texts if tag == "script" and attrs.get("type") != "application/json"]

    def prose(self) -> str:
        return " ".join(text for tag, _, text in self.texts if tag not in ("script", "style"))


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(heatmap_page(make_sweep(("resid_pre", "embed"), layers=5, seed=2).heatmap()))


class TestHtml:
    def test_the_data_are_the_grid(self, page: Page):
        sweep, data = make_sweep(("resid_pre", "embed"), layers=5, seed=2), page.data()
        assert [panel["site"] for panel in data["panels"]] == ["resid_pre", "embed"]
        assert np.allclose(data["panels"][0]["values"], sweep.grid[0], rtol=1e-6, atol=0)
        assert np.allclose(data["panels"][1]["values"], sweep.grid[1, :1], rtol=1e-6, atol=0)
        assert data["panels"][0]["rows"] == [0, 1, 2, 3, 4]
        assert data["panels"][1]["rows"] == [None]
        assert (data["scale"]["low"], data["scale"]["high"]) == (-10.0, 4.0)
        assert [column["label"] for column in data["columns"]] == [words.visible(token) for token in CORRUPT]
        best = data["best"]
        value = data["panels"][best["panel"]]["values"][best["row"]][best["column"]]
        assert value == pytest.approx(sweep.best(1)[0].value, rel=1e-6)

    def test_the_page_of_a_large_sweep_is_small(self):
        tokens = tuple(f" token{p}" for p in range(204))
        sweep = make_sweep(("resid_pre", "attn_out", "mlp_out"), layers=28, clean_tokens=tokens, corrupt_tokens=tokens)
        assert len(heatmap_page(sweep.heatmap()).encode()) < 500_000

    def test_nothing_is_loaded_from_anywhere(self, page: Page):
        assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]
        assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "data", "action"} & attrs.keys()]
        style = "".join(text for tag, _, text in page.texts if tag == "style")
        assert "url(" not in style
        assert "@import" not in style

    def test_only_its_own_scripts_may_run_and_nothing_may_load(self, page: Page):
        policies = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts()]
        assert len(hashes) == 1
        rules = dict(rule.split(maxsplit=1) for rule in policies[0].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
        assert "http" not in policies[0]

    def test_both_prompts_token_by_token(self):
        page = Page(heatmap_page(SWEEPS["skipped positions"].heatmap()))
        assert page.tokens("clean")[:3] == [("The", "same"), ("·Louvre", "skipped"), ("·is", "same")]
        assert page.tokens("corrupt")[1:3] == [("·Col", "skipped"), ("osseum", "skipped")]
        said = page.prose()
        assert "5 of 6 clean and 5 of 7 corrupt positions are paired" in said
        assert "no partner" in said

    def test_differing_tokens_are_marked(self, page: Page):
        assert page.tokens("clean")[1] == ("·Louvre", "differs")
        assert page.tokens("corrupt")[1] == ("·Colosseum", "differs")
        assert "No position was skipped." in page.prose()

    def test_what_it_says(self, page: Page):
        said = page.prose().replace("\u00a0", " ")
        for part in ("Patching clean activations into the corrupt run: logit difference ' Paris' − ' Rome'",
                     "org/model · vllm 0.32.0 · float32", "logit(' Paris') − logit(' Rome')",
                     "favours ' Paris' over ' Rome'", "4.00", "−3.00", "7.00", "1.0 × 10⁻⁶", "The 10 best cells",
                     pc.__version__):  # fmt: skip
            assert part in said

    def test_ten_best_cells(self, page: Page):
        sweep = make_sweep(("resid_pre", "embed"), layers=5, seed=2)
        rows = [text for tag, attrs, text in page.texts if tag == "td" and attrs.get("class") == "number"]
        best = sweep.best(10)
        assert rows[::2] == [words.number(cell.value) for cell in best]
        assert rows[1::2] == [words.signed(cell.value - sweep.corrupt) for cell in best]

    def test_cells_that_were_not_run_are_null(self):
        sweep = with_gaps(make_sweep(("logits",), layers=1), slice(0, 1), slice(0, -1))
        page = Page(heatmap_page(sweep.heatmap()))
        assert page.data()["panels"][0]["values"][0][:-1] == [None] * 5
        assert "was not run" in page.prose()

    @every_sweep
    def test_is_whole_whatever_the_sweep(self, sweep: PatchSweep):
        page = Page(heatmap_page(sweep.heatmap()))
        assert [tag for tag, _ in page.tags].count("script") == 2
        assert len(page.data()["panels"]) == len(sweep.heatmap().panels)
        assert not re.search(r"@@\w+@@", page.prose().replace("@@title@@", "", 4))

    def test_hostile_tokens_stay_text(self):
        sweep = SWEEPS["hostile tokens"]
        text, clean = heatmap_page(sweep.heatmap()), Page(heatmap_page(make_sweep().heatmap()))
        page = Page(text)
        assert [tag for tag, _ in page.tags].count("img") == 0
        assert {tag for tag, _ in page.tags} == {tag for tag, _ in clean.tags} | {"code"}
        assert [token for token, _ in page.tokens("corrupt")] == [words.visible(token) for token in HOSTILE]
        assert "&lt;/script&gt;&lt;img·src=x·onerror=alert(1)&gt;" in text
        assert "<img" not in text.replace(page.scripts()[0], "")
        embedded = re.search(r'<script type="application/json" id="heatmap">(.*?)</script>', text, re.DOTALL)
        assert embedded is not None
        assert not set("<>&") & set(embedded[1])
        assert page.data()["columns"][0]["label"] == words.visible(HOSTILE[0])

    @settings(max_examples=10)
    @given(st.lists(st.text(max_size=12), min_size=3, max_size=3))
    def test_any_token_comes_through(self, tokens: list[str]):
        sweep = make_sweep(clean_tokens=tuple(tokens), corrupt_tokens=tuple(tokens[::-1]))
        page = Page(heatmap_page(sweep.heatmap()))
        assert [column["label"] for column in page.data()["columns"]] == [words.visible(t) for t in tokens[::-1]]
        assert [text for text, _ in page.tokens("clean")] == [words.visible(token) for token in tokens]

    def test_is_written_as_utf8_where_it_is_asked_for(self, tmp_path):
        path = heatmap_html(make_sweep().heatmap(), str(tmp_path / "deep" / "down" / "sweep.html"))
        assert path == tmp_path / "deep" / "down" / "sweep.html"
        assert path.read_text(encoding="utf-8") == heatmap_page(make_sweep().heatmap())


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_draws_every_panel_and_lets_nothing_else_run(tmp_path):
    """The policy lets the page's script run, which makes a canvas of each panel; what a hostile token brings does not."""
    sweep = make_sweep(("resid_pre", "mlp_out", "embed"), clean_tokens=HOSTILE[::-1], corrupt_tokens=HOSTILE)
    path = heatmap_html(sweep.heatmap(), tmp_path / "a.html")
    asked = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
             "--dump-dom", path.as_uri()]  # fmt: skip
    drawn = Page(subprocess.run(asked, capture_output=True, text=True, timeout=100, check=True).stdout)
    canvases = [attrs for tag, attrs in drawn.tags if tag == "canvas"]
    assert len(canvases) == 3
    assert all(int(attrs["width"] or 0) > 300 and int(attrs["height"] or 0) > 20 for attrs in canvases)
    assert [text for tag, _, text in drawn.texts if tag == "h3"] == ["resid_pre", "mlp_out", "embed"]
    assert not [tag for tag, _ in drawn.tags if tag == "img"]


# -- where to


class TestTargets:
    def test_an_unknown_format_is_told_with_the_known_ones(self, tmp_path):
        with pytest.raises(pc.UnknownName, match=r"x\.pgn: no picture format 'pgn' \(did you mean 'png'.*: .*svg"):
            heatmap_png(make_sweep().heatmap(), tmp_path / "x.pgn")
        with pytest.raises(pc.UnknownName, match=r"no page format 'png'; there are: html, htm"):
            check_targets(html=tmp_path / "x.png")

    def test_a_folder_is_not_a_file(self, tmp_path):
        (tmp_path / "a.png").mkdir()
        with pytest.raises(pc.ProgramError, match="is a folder; give the name of a file"):
            check_targets(png=tmp_path / "a.png")

    def test_a_folder_that_cannot_be_made_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(pc.ProgramError, match="its folder cannot be made"):
            check_targets(html=tmp_path / "file" / "x.html")

    def test_missing_packages_are_named_with_their_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
        with pytest.raises(pc.PatchclampError, match=r"needs matplotlib: pip install 'patchclamp\[plots\]'"):
            check_targets(png=tmp_path / "x.png")

    def test_the_result_draws_itself(self, tmp_path):
        assert make_sweep().plot(tmp_path / "a.png").stat().st_size > 10_000
        assert make_sweep().to_html(tmp_path / "a.html").stat().st_size > 10_000

    def test_importing_is_cheap_and_drawing_touches_no_pyplot(self, tmp_path):
        code = """
            import sys
            import patchclamp.plots
            heavy = {"matplotlib", "plotly", "torch", "vllm", "transformers"} & set(sys.modules)
            assert not heavy, heavy
            from patchclamp.plots import Anchor, Column, Heatmap, Panel, Strip
            import numpy as np
            strips = (Strip("clean", ("a",), ("same",)), Strip("corrupt", ("a",), ("same",)))
            heatmap = Heatmap("title", "metric", "formula", "explained", "provenance",
                              (Panel("embed", (None,), np.zeros((1, 1))),), (Column("a", (0,), (0,)),),
                              Anchor("corrupt", "corrupt", 0.0), Anchor("clean", "clean", 1.0), 0.0, strips, "cell",
                              "token")
            patchclamp.plots.heatmap_png(heatmap, sys.argv[1])
            assert "patchclamp.studies" not in sys.modules
            assert "matplotlib.pyplot" not in sys.modules
        """
        lines = "\n".join(line.strip() if line.strip() else "" for line in code.splitlines())
        done = subprocess.run([sys.executable, "-c", lines, str(tmp_path / "a.png")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
