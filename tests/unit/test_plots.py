"""Pictures of a sweep: that they can be read, that nothing is cut off, and that no prompt breaks out of one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

import patchclamp as pc
from patchclamp.plots import check_targets, save_page, save_picture, style
from patchclamp.plots.style import DIVERGING
from patchclamp.studies.inputs import Column, Row
from patchclamp.studies.study import Provenance
from patchclamp.studies.sweep_result import AblationSweepResult, Block, Pair, PatchSweepResult, metric_words

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
) -> PatchSweepResult:
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
    return PatchSweepResult(
        provenance=made, pairs=(pair,), rows=tuple(rows), columns=columns, values=values, each=values[None], clean=clean,
        corrupt=corrupt, **facts,
    )  # fmt: skip


def with_grid(sweep: PatchSweepResult, **cells: float) -> PatchSweepResult:
    """A sweep whose values are the corrupt baseline but for `site_layer_column` cells."""
    values = np.full_like(sweep.values, sweep.corrupt)
    for name, value in cells.items():
        site, layer, column = map(int, name.strip("_").split("_"))
        values[sweep.rows.index(Row(sweep.sites[site], layer)), column] = value
    return msgspec.structs.replace(sweep, values=values)


def with_gaps(sweep: PatchSweepResult, rows: slice, columns: slice = slice(None)) -> PatchSweepResult:
    """A sweep some of whose cells were not run."""
    values = sweep.values.copy()
    values[rows, columns] = np.nan
    return msgspec.structs.replace(sweep, values=values)


def heads(columns: int = 1, count: int = 3, layers: int = 5) -> PatchSweepResult:
    """A sweep of heads, whose value in row r and column p is r + 100 p."""
    rows = tuple(Row("z", layer, str(head)) for head in range(count) for layer in range(layers))
    across = tuple(Column(token, (p,), (p,)) for p, token in enumerate(CORRUPT[:columns]))
    values = np.arange(len(rows))[:, None] + 100.0 * np.arange(columns)
    return msgspec.structs.replace(make_sweep(), rows=rows, columns=across, values=values)


def ablation() -> AblationSweepResult:
    """An ablation of one prompt, with two strong effects of opposite signs."""
    of = with_grid(make_sweep(layers=3), _0_1_2=-5.0, _0_2_3=-2.5)
    pair = msgspec.structs.replace(of.pairs[0], clean=-3.0, corrupt=None, corrupt_tokens=(), alignment=())
    return AblationSweepResult(
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
        found = make_sweep(clean=4.0, corrupt=-3.0).picture().scale
        assert (found.low, found.centre, found.high, found.towards) == (-10.0, -3.0, 4.0, 1.0)
        assert found.to_goal

    def test_small_effects_keep_the_scale_and_the_title_says_when_all_are_below_1_percent(self):
        small = with_grid(make_sweep(clean=4.0, corrupt=-3.0), _0_2_3=-1.0).picture()
        assert (small.scale.low, small.scale.centre, small.scale.high) == (-10.0, -3.0, 4.0)
        assert "1 %" not in small.title
        tiny = with_grid(make_sweep(clean=4.0, corrupt=-3.0), _0_2_3=-2.95).picture()
        assert tiny.title.endswith("(all effects below 1 % of the way to clean)")

    def test_intervals_of_the_best_cells_are_drawn_for_several_prompts(self, tmp_path):
        one = make_sweep(clean=4.0, corrupt=-3.0)
        assert one.picture().intervals == []
        effect = one.values - one.baseline
        several = msgspec.structs.replace(one, low=one.values - 1, high=one.values + 2, effect_low=effect - 1,
                                          effect_high=effect + 2, p=effect * 0 + 0.1, p_family=effect * 0 + 0.25)  # fmt: skip
        found, best = several.picture().intervals, several.best(1)[0]
        assert found[0].name == f"{best.where} @ {style.visible(best.column.label)}, p 0.25"
        assert found[0].effect == best.value - one.baseline
        assert (found[0].low, found[0].high) == (found[0].effect - 1, found[0].effect + 2)
        assert several.plot(tmp_path / "a.png").stat().st_size > one.plot(tmp_path / "b.png").stat().st_size
        assert several.figure().data[-1].error_x.array[0] == pytest.approx(2.0)

    def test_noising_is_centred_on_clean_and_keeps_the_colours_of_the_sides(self):
        found = make_sweep(clean=4.0, corrupt=-3.0, direction="noising").picture()
        assert (found.baseline.name, found.goal.name) == ("clean", "corrupt")
        assert (found.scale.low, found.scale.centre, found.scale.high, found.scale.towards) == (-3.0, 4.0, 11.0, -1.0)
        assert found.scale.blue_above
        assert found.axis == "token of the clean prompt"
        assert make_sweep(clean=-5.0, corrupt=2.0).picture().scale.blue_above is False

    def test_an_ablation_has_no_goal(self):
        heatmap = ablation().picture()
        assert (heatmap.goal, heatmap.share(-5.0), heatmap.scale.half) == (None, None, 2.0)
        assert [spot.value for spot in heatmap.ranked(2)] == [-5.0, -2.5] == [c.value for c in ablation().best(2)]
        assert [strip.title for strip in heatmap.strips] == ["prompt"]

    def test_what_is_not_above_the_noise_floor_is_faint(self):
        sweep = msgspec.structs.replace(with_grid(make_sweep(layers=2), _0_1_2=-2.5, _0_0_1=-2.4), noise_floor=0.5)
        faint = sweep.picture().faint(sweep.grid[0])
        assert np.argwhere(~faint).tolist() == [[0, 1]]
        assert not sweep.picture().faint(np.array([np.nan])).any()

    def test_heads_stand_across_where_there_are_few_columns(self):
        (only,) = (heatmap := heads().picture()).panels
        assert (only.name, heatmap.axis, [c.label for c in heatmap.columns]) == ("z @ The", "head", ["0", "1", "2"])
        assert np.array_equal(only.values, np.arange(15).reshape(3, 5).T)
        assert only.cell_name(4, heatmap.columns[2]) == ("z[4, 2]", "The")
        assert heatmap.ranked(1)[0].value == heads().best(1)[0].value == 14.0

    def test_heads_have_panels_where_there_are_many(self):
        panels = (heatmap := heads(columns=6).picture()).panels
        assert [panel.name for panel in panels] == ["z[:, 0]", "z[:, 1]", "z[:, 2]"]
        assert panels[1].cell_name(3, heatmap.columns[4]) == ("z[3, 1]", " the")
        assert panels[1].values[3, 4] == 408.0

    def test_a_cell_without_a_value_shows_its_smallest_block(self):
        blocks = (Block((0, 1, 2, 3), (0, 1), 1.0), Block((0, 1), (0,), 2.0))
        sweep = msgspec.structs.replace(with_gaps(make_sweep(layers=4), slice(0, 4)), blocks=blocks)
        coarse = sweep.picture().panels[0].coarse
        assert coarse[:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]
        assert np.isnan(coarse[:, 2]).all()
        assert sweep.picture().ranked(3) == []

    def test_clean_below_corrupt_turns_the_scale(self):
        found = make_sweep(clean=-5.0, corrupt=2.0).picture().scale
        assert (found.low, found.high, found.towards) == (-5.0, 9.0, -1.0)

    def test_where_baselines_agree_the_largest_effect_is_the_strong_end(self):
        assert with_grid(make_sweep(clean=1.0, corrupt=1.0), _0_2_3=1.5).picture().scale.half == 0.5
        assert with_grid(make_sweep(clean=1.0, corrupt=1.0)).picture().scale.half == 1.0

    def test_an_unlayered_site_is_one_row_and_comes_last(self):
        embed, resid = make_sweep(("embed", "resid_pre"), layers=3).picture().panels[::-1]
        assert (embed.name, embed.rows, embed.values.shape, embed.row_name(0)) == ("embed", (None,), (1, 6), "embed")
        assert (resid.name, resid.rows, resid.row_name(2)) == ("resid_pre", (0, 1, 2), "resid_pre[2]")

    def test_a_layered_site_with_one_layer_keeps_it(self):
        (only,) = make_sweep(layers=1).picture().panels
        assert only.row_name(0) == "resid_pre[0]"

    @pytest.mark.parametrize(("clean", "towards"), [(4.0, 1), (-9.0, -1)])
    def test_ranked_is_best_of_the_sweep(self, clean: float, towards: int):
        sweep = make_sweep(("resid_pre", "embed"), layers=5, clean=clean, seed=3)
        heatmap = sweep.picture()
        spots = heatmap.ranked(7)
        assert [spot.value for spot in spots] == [cell.value for cell in sweep.best(7)]
        assert [spot.value for spot in spots] == sorted((spot.value for spot in spots), reverse=towards > 0)
        assert all(heatmap.panels[s.panel].values[s.row, s.column] == s.value for s in spots)

    def test_ranked_never_names_a_cell_that_was_not_run(self):
        assert len(make_sweep(("embed",), layers=3).picture().ranked(100)) == 6

    def test_effect_and_share(self):
        heatmap = make_sweep(clean=4.0, corrupt=-4.0).picture()
        assert heatmap.effect(-2.0) == 2.0
        assert heatmap.share(-2.0) == 0.25
        assert make_sweep(clean=1.0, corrupt=1.0).picture().share(3.0) is None


# -- words


class TestWords:
    @pytest.mark.parametrize(
        ("token", "seen"),
        [
            (" Tower", "␣Tower"), ("a b", "a b"), ("a  b ", "a␣␣b␣"), (" .·", "␣.·"), ("\n\n", "↵↵"), ("\t\r", "⇥␍"), ("", "∅"), ("\u202e", "⟨202E⟩"),
            ("\x00", "⟨0000⟩"), ("\u00a0", "⟨00A0⟩"), ("\ud800", "⟨D800⟩"), ("東京", "東京"), ("<b>", "<b>"),
        ],
    )  # fmt: skip
    def test_visible(self, token: str, seen: str):
        assert style.visible(token) == seen

    @given(st.text())
    def test_what_is_visible_is_printable(self, token: str):
        assert style.visible(token).isprintable()

    @pytest.mark.parametrize(
        ("value", "text"),
        [(3.14159, "3.14"), (-2.0, "−2.00"), (0.0, "0.00"), (0.0123, "0.012"), (-2e-6, "−2.0 × 10⁻⁶")],
    )
    def test_number(self, value: float, text: str):
        assert style.number(value) == text

    def test_signed_and_percent(self):
        assert (style.signed(0.5), style.signed(-0.5)) == ("+0.50", "−0.50")
        assert (style.percent(0.931), style.percent(-0.1), style.percent(None)) == ("93 %", "−10 %", "–")
        assert (style.percent(-0.0), style.percent(-1e-6), style.percent(-0.004)) == ("0 %", "0.0 %", "−0.4 %")
        assert [*map(style.percent, (0.0, 0.0094, -0.004, 0.0999))] == ["0 %", "0.9 %", "−0.4 %", "10 %"]

    @pytest.mark.parametrize(("numbers", "text"), [((3,), "3"), ((3, 4, 5), "3–5"), ((3, 7), "3, 7")])
    def test_positions(self, numbers: tuple[int, ...], text: str):
        assert style.positions(numbers) == text

    @pytest.mark.parametrize(
        ("metric", "text"),
        [
            ("logit_diff", "logit difference ' Paris' − ' Rome'"),
            ("logprob", "log-probability of ' Paris'"),
            ("recovered", "recovered share of the logit difference ' Paris' − ' Rome'"),
        ],
    )
    def test_title_says_what_was_done(self, metric: str, text: str):
        title = make_sweep(metric=metric).picture().title
        assert title == f"Patching clean activations into the corrupt run: {text}"

    def test_formulas(self):
        assert metric_words(make_sweep(metric="logprob", foil=None)).formula == "log p(' Paris' | prompt)"
        assert metric_words(make_sweep()).formula.startswith(
            "logit(' Paris') − logit(' Rome') = log p(' Paris' | prompt)"
        )
        recovered = metric_words(make_sweep(metric="recovered")).formula
        assert recovered.startswith("(Δ patched − Δ corrupt) / (Δ clean − Δ corrupt)")

    def test_noise(self):
        exact, noisy = (make_sweep(noise_floor=floor).picture().noise for floor in (0.0, 0.25))
        assert exact == "noise floor 0: reruns of the corrupt prompt agree exactly"
        assert noisy == "noise floor 0.25: smaller effects mean nothing"

    def test_marks(self):
        clean, _ = make_sweep().picture().strips
        assert clean.marks == ("same", "differs", "same", "same", "same", "same")
        clean, corrupt = SWEEPS["skipped positions"].picture().strips
        assert clean.marks == ("same", "skipped", "same", "same", "same", "same")
        assert corrupt.marks == ("same", "skipped", "skipped", "same", "same", "same", "same")

    def test_what_is_skipped_is_what_the_sweep_skipped(self):
        sweep = SWEEPS["skipped positions"]
        assert tuple(sweep.picture().skipped) == sweep.skipped

    def test_a_local_folder_is_told_by_its_name(self):
        assert make_sweep(model="/home/someone/models/tiny").provenance.where.split(" · ")[0] == "tiny"
        assert make_sweep(model="org/tiny").provenance.where.split(" · ")[0] == "org/tiny"


# -- matplotlib


def drawn(picture) -> FigureCanvasAgg:
    """A picture as it is written to a file."""
    figure = picture.draw()
    style._as_text(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def heatmaps(figure) -> dict[str, tuple]:
    """Each panel's axes and mesh, by site."""
    found = {}
    for axes in figure.axes:
        mesh = [child for child in axes.get_children() if isinstance(child, QuadMesh)]
        if axes.get_title(loc="left"):
            found[axes.get_title(loc="left")] = (axes, mesh[-1])
    return found


def outlines(axes) -> set[tuple[float, float]]:
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    return {patch.get_xy() for patch in boxes}


class TestPicture:
    @every_sweep
    def test_nothing_is_cut_off(self, sweep: PatchSweepResult):
        canvas = drawn(sweep.picture())
        width, height = canvas.get_width_height()
        for text in canvas.figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                box = text.get_window_extent(canvas.get_renderer())
                assert box.x0 >= -1, text.get_text()
                assert box.x1 <= width + 1, text.get_text()
                assert box.y0 >= -1, text.get_text()
                assert box.y1 <= height + 1, text.get_text()

    @pytest.mark.parametrize("name", ["30 layers of 6 tokens", "three sites", "four layers of 40 tokens", "one column"])
    def test_the_file_is_a_picture_of_sensible_size(self, tmp_path, name: str):
        path = save_picture(SWEEPS[name].picture(), tmp_path / "new" / "sweep.png")
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
        shown = heatmaps(sweep.picture().draw())
        axes, mesh = shown["resid_pre"]
        assert np.array_equal(mesh.get_array().reshape(5, 6), sweep.grid[0])
        assert [label.get_text() for label in axes.get_xticklabels()] == [style.visible(token) for token in CORRUPT]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3", "4"]
        assert axes.get_ylim() == (-0.5, 4.5), "layer 0 is at the bottom"
        axes, mesh = shown["embed"]
        assert np.array_equal(mesh.get_array().reshape(1, 6), sweep.grid[1, :1])
        assert not axes.get_yticklabels()

    def test_layers_are_named_by_their_number(self):
        rows = tuple(Row("resid_pre", layer) for layer in (4, 8, 12))
        sweep = msgspec.structs.replace(make_sweep(layers=3), rows=rows)
        (axes, _), *_ = heatmaps(sweep.picture().draw()).values()
        assert [label.get_text() for label in axes.get_yticklabels()] == ["4", "8", "12"]

    @pytest.mark.parametrize(("clean", "corrupt"), [(4.0, -3.0), (-5.0, 2.0)])
    def test_corrupt_is_white_and_clean_the_blue_end(self, clean: float, corrupt: float):
        sweep = make_sweep(("resid_pre", "attn_out"), clean=clean, corrupt=corrupt)
        middle, end = (np.array([int(DIVERGING[n][i : i + 2], 16) / 255 for i in (1, 3, 5)]) for n in (5, 10))
        for _, mesh in heatmaps(sweep.picture().draw()).values():
            assert np.abs(mesh.to_rgba(corrupt)[:3] - middle).max() < 0.02
            assert np.allclose(mesh.to_rgba(clean)[:3], end)

    def test_the_best_cell_and_only_it_is_outlined(self):
        shown = heatmaps(with_grid(make_sweep(("resid_pre", "attn_out")), _1_2_3=5.0, _0_0_0=1.0).picture().draw())
        assert outlines(shown["attn_out"][0]) == {(2.5, 1.5)}
        assert not outlines(shown["resid_pre"][0])

    def test_where_every_effect_is_noise_no_cell_is_outlined(self):
        sweep = make_sweep()
        equal = msgspec.structs.replace(sweep, values=np.full_like(sweep.values, -3.0)).picture()
        assert "(outlined)" not in said(equal.draw())
        assert "below 1 %" in equal.title
        nothing = msgspec.structs.replace(sweep, values=np.full_like(sweep.values, np.nan)).picture()
        assert "below 1 %" not in nothing.title
        assert "not run" in said(nothing.draw())

    def test_a_dot_marks_every_cell_that_is_not_above_the_noise_floor(self):
        sweep = with_grid(make_sweep(layers=30), _0_2_3=4.0, _0_7_1=-3.5)
        ((axes, _),) = heatmaps(sweep.picture().draw()).values()
        (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
        marked = {(int(y), int(x)) for x, y in dots.get_xydata()}
        assert marked == {(row, column) for row in range(30) for column in range(6)} - {(2, 3), (7, 1)}

    @pytest.mark.parametrize(("low", "high", "extend"), [
        (None, None, "neither"), (-10.5, None, "min"), (None, 4.5, "max"), (-11.0, 5.0, "both"), (-10.001, 4.001, "neither"),
    ])  # fmt: skip
    @pytest.mark.parametrize("side", ["clean above corrupt", "clean below corrupt"])
    def test_the_colour_bar_marks_the_ends_beyond_which_cells_lie(self, low, high, extend, side):
        sign = 1.0 if side == "clean above corrupt" else -1.0
        sweep = make_sweep(clean=4.0 * sign, corrupt=-3.0 * sign)
        values = sweep.values.copy()
        for cell, value in enumerate((low, high)):
            if value is not None:
                values[0, cell] = value * sign
        heatmap = msgspec.structs.replace(sweep, values=values).picture()
        drawn = [axes._colorbar.extend for axes in heatmap.draw().axes if hasattr(axes, "_colorbar")]
        flipped = {"min": "max", "max": "min"}.get(extend, extend)
        assert drawn == [extend if sign > 0 else flipped]
        bar = heatmap.figure().layout.coloraxis.colorbar
        ends = dict(zip(bar.tickvals, bar.ticktext, strict=True))
        assert ends[4.0 * sign].startswith("≥" if sign > 0 else "≤") == (extend in ("max", "both"))
        assert ends[4.0 * sign].endswith(f"clean {style.number(4.0 * sign)}")
        weak = [text for value, text in ends.items() if value * sign < -3.0]  # where the cells or the scale end
        assert [text[0] in "≤≥" for text in weak] == [extend in ("min", "both")] * (low is not None)
        assert ends[-3.0 * sign] == f"corrupt {style.number(-3.0 * sign)}"

    def test_the_colour_bar_has_the_colours_that_cells_have(self):
        sweep = make_sweep(clean=0.9, corrupt=0.1, metric="prob")
        (bar,) = [axes for axes in sweep.picture().draw().axes if hasattr(axes, "_colorbar")]
        assert bar.get_xlim() == (0.1, 0.9)  # and no probability below 0, where the scale ends
        equal = msgspec.structs.replace(sweep, values=np.full_like(sweep.values, 0.1), clean=0.1).picture()
        assert equal.reach == (equal.scale.low, equal.scale.high)

    def test_the_caption_names_the_size_of_a_window(self):
        sweep = make_sweep(layers=6)
        rows = [
            Row(row.site, row.layer, layers=tuple(range(max(row.layer - 1, 0), row.layer + 2))) for row in sweep.rows
        ]
        wide = msgspec.structs.replace(sweep, rows=tuple(rows))
        assert "covers 3 adjacent layers" in said(wide.picture().draw())
        assert "adjacent layers" not in said(sweep.picture().draw())

    def test_the_caption_names_the_marks_that_are_drawn(self):
        small, large = (said(with_grid(make_sweep(layers=layers), _0_2_3=4.0).picture().draw()) for layers in (4, 30))
        assert "Grey numbers: not above" in small
        assert "Dots: not above" in large

    def test_cells_that_were_not_run_are_hatched(self):
        sweep = make_sweep(("resid_pre", "embed"), layers=3)
        figure = with_gaps(sweep, slice(1, 2)).picture().draw()
        axes, mesh = heatmaps(figure)["resid_pre"]
        assert mesh.get_array().mask.reshape(3, 6)[1].all()
        assert axes.patch.get_hatch()
        assert "not run" in said(figure)
        assert "not run" not in said(sweep.picture().draw())

    def test_what_it_says(self):
        text = said(drawn(SWEEPS["skipped positions"].picture()).figure)
        for part in ("' Paris'", "' Rome'", " Louvre", "osseum", "clean 4.00", "corrupt −3.00", "org/model",
                     "vllm 0.32.0", "float32", "Noise floor 1.0 × 10⁻⁶", "Without a partner", "Best (outlined): resid_pre["):  # fmt: skip
            assert part in text

    def test_dollars_are_drawn_not_typeset(self):
        dollars = [t for t in drawn(SWEEPS["hostile tokens"].picture()).figure.findobj(Text) if "$" in t.get_text()]
        assert len(dollars) >= 3
        assert not any(text.get_parse_math() for text in dollars)

    def test_numbers_stand_in_cells_with_room_for_them(self):
        small, large = make_sweep(layers=4), make_sweep(layers=30)
        texts = [len(heatmaps(sweep.picture().draw())["resid_pre"][0].texts) for sweep in (small, large)]
        assert texts == [24, 0]
        tiny = with_grid(make_sweep(clean=4e-6, corrupt=1e-6), _0_2_3=3.14e-6).picture().draw()
        assert "3.1 × 10⁻⁶" in [text.get_text() for text in heatmaps(tiny)["resid_pre"][0].texts]

    def test_the_extension_is_the_format(self, tmp_path):
        assert save_picture(make_sweep().picture(), tmp_path / "a.svg").read_text().startswith("<?xml")
        assert save_picture(make_sweep().picture(), str(tmp_path / "a.PDF")).read_bytes().startswith(b"%PDF")


def said(figure) -> str:
    return " ".join(text.get_text() for text in figure.findobj(Text)).replace("\n", " ")


# -- plotly


class Page(HTMLParser):
    """The elements of a page, and its text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.prose = ""
        self.classes: list[tuple[str, str]] = []
        self._in: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert not any(name.startswith("on") for name, _ in attrs)
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self._in.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag):
        while self._in and self._in.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._in and self._in[-1][0] not in ("script", "style"):
            self.prose += data
            self.classes.append((data, self._in[-1][1]))

    def tokens(self) -> list[tuple[str, str]]:
        """Text and mark of every token of the prompts."""
        return [(text, kind.removeprefix("token ")) for text, kind in self.classes if kind.startswith("token")]


def page_of(sweep, tmp_path, **how) -> tuple[str, Page]:
    text = save_page(sweep.picture(), tmp_path / "page.html", **how).read_text(encoding="utf-8")
    return text, Page(text)


def grids(sweep) -> list:
    """The traces with the panels' values."""
    return [
        trace for trace in sweep.picture().figure().data if trace.type == "heatmap" and trace.customdata is not None
    ]


class TestPage:
    @every_sweep
    def test_the_figure_has_every_value(self, sweep: PatchSweepResult):
        panels, traces = sweep.picture().panels, grids(sweep)
        assert len(panels) == len(traces)
        for panel, trace in zip(panels, traces, strict=True):
            assert np.array_equal(np.array(trace.z, float), panel.values, equal_nan=True)
            assert [bool(text) for row in trace.customdata for text in row] == (
                ~np.isnan(panel.values)
            ).ravel().tolist()
        picture, axis = sweep.picture(), sweep.picture().figure().layout.coloraxis
        assert (axis.cmin, axis.cmax) == picture.reach
        at = (picture.baseline.value - axis.cmin) / (axis.cmax - axis.cmin)  # white, wherever it is in the bar
        _, colour = min(axis.colorscale, key=lambda stop: abs(stop[0] - at))
        assert min(map(int, re.findall(r"\d+", colour))) > 235

    def test_a_cell_says_its_place_and_numbers(self):
        sweep = with_grid(make_sweep(clean=4.0, corrupt=-4.0), _0_2_1=2.0)
        assert grids(sweep)[0].customdata[2][1].split("<br>") == [
            "resid_pre[2] @ ␣Colosseum (position 1 → 1)", "logit_diff 2.00, effect +6.00", "75 % of the way to clean",
        ]  # fmt: skip
        assert "not above the noise floor" in grids(sweep)[0].customdata[0][0]

    def test_the_best_cell_has_a_frame(self):
        (frame,) = with_grid(make_sweep(("resid_pre", "attn_out")), _1_2_3=5.0).picture().figure().layout.shapes
        assert (frame.xref, frame.x0, frame.y0) == ("x2", 2.5, 1.5)

    def test_plotlys_script_is_beside_the_page_once_or_inside(self, tmp_path):
        text, _ = page_of(make_sweep(), tmp_path)
        assert 'src="plotly.min.js"' in text
        assert "https://cdn" not in text
        script = tmp_path / "plotly.min.js"
        assert script.stat().st_size > 1_000_000
        script.write_text("of another version of plotly")
        page_of(make_sweep(), tmp_path)
        assert script.stat().st_size > 1_000_000
        assert len(text) < 200_000
        whole, _ = page_of(make_sweep(), tmp_path, include_plotlyjs=True)
        assert len(whole) > 1_000_000

    def test_what_it_says(self, tmp_path):
        sweep = make_sweep(("resid_pre", "embed"), layers=5, seed=2)
        _, page = page_of(sweep, tmp_path)
        for part in ("Patching clean activations into the corrupt run: logit difference ' Paris' − ' Rome'",
                     "org/model · vllm 0.32.0 · float32", "logit(' Paris') − logit(' Rome')", "favours ' Paris' over ' Rome'",
                     "4.00", "−3.00", "1.0 × 10⁻⁶", *(style.number(cell.value) for cell in sweep.best(10))):  # fmt: skip
            assert part in page.prose
        assert ("␣Louvre", "differs") in page.tokens()
        assert ("␣Colosseum", "differs") in page.tokens()

    def test_tokens_without_a_partner_are_marked(self, tmp_path):
        _, page = page_of(SWEEPS["skipped positions"], tmp_path)
        assert [token for token, mark in page.tokens() if mark == "skipped"] == ["␣Louvre", "␣Col", "osseum"]
        assert "5 of 6 clean and 5 of 7 corrupt positions are paired" in page.prose
        twice = make_sweep(
            corrupt_tokens=SHORTER, alignment=((0, 0), (1, 1), (1, 2), *((c, c + 1) for c in range(2, 6)))
        )
        _, page = page_of(twice, tmp_path)
        assert "6 of 6 clean and 7 of 7 corrupt positions are paired" in page.prose

    def test_hostile_tokens_stay_text(self, tmp_path):
        text, page = page_of(SWEEPS["hostile tokens"], tmp_path)
        _, plain = page_of(make_sweep(), tmp_path)
        assert set(page.tags) == set(plain.tags)
        assert page.tags.count("script") == plain.tags.count("script")
        assert [token for token, _ in page.tokens()][-len(HOSTILE) :] == [style.visible(token) for token in HOSTILE]
        assert "<img" not in text
        labels = SWEEPS["hostile tokens"].picture().figure().layout.xaxis.ticktext
        assert not [label for label in labels if set("<>") & set(label)]

    @pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
    def test_a_browser_draws_every_panel(self, tmp_path):
        sweep = make_sweep(("resid_pre", "mlp_out", "embed"), clean_tokens=HOSTILE[::-1], corrupt_tokens=HOSTILE)
        path = save_page(sweep.picture(), tmp_path / "a.html")
        asked = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000",
                 f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", path.as_uri()]  # fmt: skip
        dom = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=True).stdout
        assert len(re.findall(r'<g class="subplot x\d*y\d*"', dom)) == 3
        assert "img src=x" in dom, "the token is there, as text"
        assert "<img" not in dom

    def test_notebooks_show_the_figure(self):
        figure, picture = make_sweep().figure(), make_sweep().picture()
        assert figure.layout.title.text == style.html_text(picture.title)
        assert picture.figure().layout.title.text is None  # a page has it above
        assert "plotly" in make_sweep()._repr_html_()


# -- files


class TestTargets:
    def test_an_unknown_format_is_told_with_the_known_ones(self, tmp_path):
        with pytest.raises(pc.UnknownName, match=r"x\.pgn: .*'pgn' \(did you mean 'png'"):
            save_picture(make_sweep().picture(), tmp_path / "x.pgn")
        with pytest.raises(pc.UnknownName, match=r"'png'.*html, htm"):
            check_targets(html=tmp_path / "x.png")

    def test_a_folder_is_not_a_file(self, tmp_path):
        (tmp_path / "a.png").mkdir()
        with pytest.raises(pc.ProgramError, match="folder"):
            check_targets(png=tmp_path / "a.png")

    def test_a_folder_that_cannot_be_made_is_told(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(pc.ProgramError, match="cannot create"):
            check_targets(html=tmp_path / "file" / "x.html")

    def test_missing_packages_are_named_with_their_extra(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
        with pytest.raises(pc.PatchclampError, match=r"matplotlib .*patchclamp\[plots\]"):
            check_targets(png=tmp_path / "x.png")

    def test_the_result_draws_itself(self, tmp_path):
        assert make_sweep().plot(tmp_path / "a.png").stat().st_size > 10_000
        assert make_sweep().to_html(tmp_path / "a.html").stat().st_size > 10_000

    def test_without_a_path_it_is_shown_in_a_notebook(self, tmp_path):
        result = make_sweep()
        assert result.plot().data == result.plot(tmp_path / "a.png").read_bytes()
        page = result.to_html().data
        assert "plotly.js" in page  # there is no folder for it
        assert len(page) > 1_000_000 > len(result.to_html(tmp_path / "a.html").read_text())

    def test_importing_is_cheap_and_drawing_touches_no_pyplot(self, tmp_path):
        code = """
            import sys
            import patchclamp.plots
            heavy = {"matplotlib", "plotly", "torch", "vllm", "transformers"} & set(sys.modules)
            assert not heavy, heavy
            from patchclamp.plots import Anchor, Heatmap, HeatmapColumn, Panel, Strip
            import numpy as np
            strips = (Strip("clean", ("a",), ("same",)), Strip("corrupt", ("a",), ("same",)))
            heatmap = Heatmap("title", "metric", "formula", "explained", "provenance",
                              (Panel("embed", (None,), np.zeros((1, 1))),), (HeatmapColumn("a", (0,), (0,)),),
                              Anchor("corrupt", "corrupt", 0.0), Anchor("clean", "clean", 1.0), 0.0, strips, "cell",
                              "token")
            patchclamp.plots.save_picture(heatmap, sys.argv[1])
            assert "patchclamp.studies" not in sys.modules
            assert "matplotlib.pyplot" not in sys.modules
        """
        lines = "\n".join(line.strip() if line.strip() else "" for line in code.splitlines())
        done = subprocess.run([sys.executable, "-c", lines, str(tmp_path / "a.png")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_notebook_gets_the_data_of_the_figure():
    """JupyterLab and VS Code draw it without the web; a terminal prints the result."""
    sweep = make_sweep()
    bundle = sweep._repr_mimebundle_()
    figure = bundle["application/vnd.plotly.v1+json"]
    assert figure["data"][0]["type"] == sweep.figure().data[0].type
    assert bundle["text/plain"] == repr(sweep)
    assert "plotly" in bundle["text/html"]
    assert "plotly" in sweep._repr_html_()


def test_a_notebook_draws_a_figure_once(monkeypatch):
    made = []
    figure = PatchSweepResult.figure
    monkeypatch.setattr(PatchSweepResult, "figure", lambda self: made.append(self) or figure(self))
    assert make_sweep()._repr_mimebundle_()
    assert len(made) == 1
