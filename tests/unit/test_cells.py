"""The machinery of cells: journals, reruns among the cells, resuming to the same bytes, streaming, spread, zoom."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.plots import style
from patchclamp.store.journal import Journal
from patchclamp.studies import (
    Resampled,
    SteeringVectors,
    ablation_sweep,
    causal_trace,
    fit_probe,
    fuzz_sweep,
    grid,
    logit_lens,
    patch_sweep,
    path_patch,
    steering_vectors,
    strength_curve,
)
from patchclamp.studies.grid import BASELINES, Cells, Zoom, _spread, job_of, zoom_in
from patchclamp.studies.inputs import Row
from patchclamp.studies.metric import FLIPS, grade, spread
from patchclamp.studies.study import Reporter, keeping
from patchclamp.studies.sweep_result import PatchSweepResult

CLEAN, CORRUPT = "The Eiffel is in the", "The Colosseum is in the"
ASKED = dict(clean=CLEAN, corrupt=CORRUPT, answer=7, foil=9, show_progress=False)


class Heard:
    """A listener that records the cells of a study once each, or raises."""

    def __init__(self, error: str = "") -> None:
        self.error, self.total = error, 0
        self.values: dict[Any, float] = {}

    def start(self, sweep, cells):
        assert np.isnan(sweep.values).all()
        self.total = cells

    def cells(self, cells):
        if self.error:
            raise RuntimeError(self.error)
        for cell in cells:
            assert (cell.where, cell.column) not in self.values
            self.values[cell.where, cell.column] = cell.value


# -- the journal


class TestJournal:
    def test_other_weights_in_the_same_folder_are_another_study(self, tmp_path: Path):
        """Of the same shapes, so that no file's size tells."""
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        lm = pc.LM("fake")
        lm.engine.model = msgspec.structs.replace(lm.model, name=str(folder))

        def begun(weights: bytes) -> None:
            (folder / "model.safetensors").write_bytes(bytes(200_000) + weights)
            with keeping(lm, {"study": "any"}, tmp_path / "j"):
                pass

        begun(b"one")
        begun(b"one")
        with pytest.raises(pc.ProgramError, match=r"resume: .* different study"):
            begun(b"two")

    def test_two_studies_do_not_write_one_file(self, lm, tmp_path: Path):
        def begun():
            return keeping(lm, {"study": "any"}, tmp_path / "j")

        with begun(), pytest.raises(pc.NameTaken, match="in use") as raised, begun():
            pass
        assert raised.value.path == "resume"
        with begun():
            pass


# -- resuming


STUDIES = {
    "patch_sweep": dict(clean=[CLEAN, CORRUPT], corrupt=[CORRUPT, "The dog is in the"], answer=[7, 8], foil=[9, 6]),
    "ablation_sweep": dict(prompt=CLEAN, answer=[7, 8], foil=9, sites=["z"], group=1, positions="each"),
    "causal_trace": dict(prompt=CLEAN, subject="Eiffel", answer=7, seeds=3, layers="0:2"),
    "path_patch": dict(clean=CLEAN, corrupt=CORRUPT, answer=7, foil=9, receivers=["logits", "q[2, 0]"]),
    "paths of pairs": dict(
        clean=[CLEAN, CORRUPT],
        corrupt=[CORRUPT, "The dog is in the"],
        answer=[7, 8],
        foil=9,
        receivers=["logits", "q[2, 0]"],
        metric="recovered",
    ),
    "zoom": dict(clean=CLEAN, corrupt=CORRUPT, answer=7, foil=9, zoom=1),
}
# studies that keep records and not numbers alone: every one has several frames
TALES = {
    "fuzz_sweep": dict(
        prompts=[CLEAN, CORRUPT, "A dog is in the"], strengths=[0, 0.5, 1.5], seeds=[0, 1], max_tokens=3, batch=2
    ),
    "fuzz_sweep likeliest": dict(
        prompts=[CLEAN, CORRUPT], strengths=[0.5, 1.5], seeds=[0, 1], max_tokens=3, batch=2, divergence=5
    ),
    "steering_vectors": dict(
        positive=["good day", "good film", "good dog", "good cat"],
        held_out=0.5,
        answer=" Paris",
        negative=["bad day", "bad film", "bad dog", "bad cat"],
        foil=" Rome and",
        batch=1,
    ),
    "fit_probe": dict(
        prompts=["good day", "good film", "good dog", "bad day", "bad film", "bad dog"],
        labels=[1, 1, 1, 0, 0, 0],
        folds=3,
        batch=1,
    ),
    "strength_curve": dict(prompts=[CLEAN, CORRUPT, "A dog is in the"], answer=" Paris and", foil=" Rome", batch=2),
    "logit_lens": dict(prompt=" ".join([CLEAN] * 12), tokens=[" Paris"], top=2, rows=40),
}


FORKING = """
import json, os, random, signal, sqlite3, sys
import patchclamp as pc
from patchclamp.studies import ablation_sweep, causal_trace, patch_sweep, path_patch
from patchclamp.studies import fit_probe, fuzz_sweep, logit_lens as lens, steering_vectors, strength_curve as curve

def strength_curve(lm, prompts, **asked):
    vectors = steering_vectors(lm, ["good day"] * 4, ["bad day"] * 4, held_out=0, show_progress=False)
    return curve(lm, vectors, prompts, **asked)

def logit_lens(lm, rows, batch, show_progress, **asked):
    sys.modules[lens.__module__].ROWS_AT_ONCE = rows
    return lens(lm, **asked)

connect = sqlite3.connect

def run(folder, study, asked, transactions, statements):
    \"\"\"In a process that is killed in its so many-th transaction, at one of its statements; 0: not at all.\"\"\"
    begun = within = 0

    def dying(statement):
        nonlocal begun, within
        begun += statement.startswith("BEGIN")
        within = 0 if statement.startswith("BEGIN") else within + 1
        if begun == transactions and (within == statements or statement == "COMMIT"):
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(*args, **named):
        database = connect(*args, **named)
        if transactions:
            database.set_trace_callback(dying)
        return database

    child = os.fork()
    if child == 0:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        sqlite3.connect = watched
        with pc.LM("fake") as lm:
            result = globals()[study](lm, **{"batch": 7, **asked}, show_progress=False, resume="journal")
            result.save("result")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def torn(log, part):
    \"\"\"Cuts off the end of a log, as a system may that stops.\"\"\"
    if os.path.exists(log):
        os.truncate(log, int(part * os.path.getsize(log)))

for name, asked in json.loads(sys.argv[1]).items():
    draw = random.Random(name)
    study = {"zoom": "patch_sweep", "paths of pairs": "path_patch"}.get(name, name.partition(" ")[0])
    codes = [run(name + ".whole", study, asked, 0, 0)]
    for _ in range(3):
        codes.append(run(name, study, asked, draw.randrange(1, 5), draw.randrange(8)))
        torn(name + "/journal-wal", draw.uniform(0.8, 1.1))
    codes.append(run(name, study, asked, 0, 0))
    print(json.dumps([name, codes]), flush=True)
"""


def tables(path: Path) -> tuple[list[Any], list[Any]]:
    """The key of a journal, and its records."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT * FROM made").fetchall(), database.execute("SELECT * FROM record").fetchall()


@pytest.mark.slow
def test_killed_at_random_points_studies_end_with_the_same_bytes(tmp_path: Path):
    studies = STUDIES | TALES
    done = subprocess.run([sys.executable, "-c", FORKING, json.dumps(studies)], cwd=tmp_path, timeout=400,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in told] == list(studies)
    for name, codes in told:
        assert codes == [0, *[-signal.SIGKILL] * 3, 0], done.stderr  # none of those that were killed was at its end
        kept = [tables(tmp_path / folder / "journal") for folder in (name, f"{name}.whole")]
        assert kept[0] == kept[1], name
        assert len(kept[0][1]) > 1, name
        assert (tmp_path / name / "result").read_bytes() == (tmp_path / f"{name}.whole" / "result").read_bytes(), name


def test_what_is_known_is_not_run_again(lm, tmp_path: Path, monkeypatch):
    first = patch_sweep(lm, **ASKED, resume=tmp_path / "j")
    monkeypatch.setattr(lm.engine, "submit", lambda requests: pytest.fail("nothing is left to run"))
    heard = Heard()
    again = patch_sweep(lm, **ASKED, resume=tmp_path / "j", listener=heard)
    assert again.values.tobytes() == first.values.tobytes()
    assert sorted(heard.values.values()) == sorted(c.value for c in first.cells())


def fuzzed(lm, **change):
    return fuzz_sweep(lm, **(TALES["fuzz_sweep"] | change), show_progress=False)


def lensed(lm, **change):
    return logit_lens(lm, **(dict(prompt=CLEAN, tokens=[7]) | change))


def steered(lm, **change):
    return steering_vectors(lm, **(TALES["steering_vectors"] | change), show_progress=False)


def probed(lm, **change):
    return fit_probe(lm, **(TALES["fit_probe"] | change), show_progress=False)


def scored(lm, scale=1.0, **change):
    vectors = SteeringVectors.from_directions({1: np.arange(lm.model.d_model) * scale})
    return strength_curve(lm, vectors, **(TALES["strength_curve"] | change), show_progress=False)


@pytest.mark.parametrize(
    ("study", "changes"),
    [
        (fuzzed, [dict(max_tokens=2), dict(seeds=[0, 2]), dict(strengths=[0, 0.5, 1.4]), dict(at=["resid_pre[1]"]),
                  dict(divergence="none"), dict(prompts=[CLEAN])]),
        (lensed, [dict(tokens=[8]), dict(layers=1), dict(top=2), dict(prompt=CORRUPT), dict(unembedding=np.ones((3, 16)),
                  tokens=["row 1"]), dict(translators=dict.fromkeys(range(3), np.eye(16)))]),
        (steered, [dict(method="pca"), dict(layers=1), dict(answer=" Rome"), dict(seed=1), dict(tokens="prompt")]),
        (probed, [dict(pool=None), dict(layers=1), dict(tokens="prompt[-1]"), dict(site="mlp_out")]),
        (scored, [dict(scale=2.0), dict(answer=" Paris"), dict(foil=None), dict(scales=[0, 1]), dict(tokens="prompt")]),
    ],
)  # fmt: skip
def test_what_is_recorded_is_not_run_again_and_is_of_one_question(lm, tmp_path: Path, monkeypatch, study, changes):
    first = study(lm, resume=tmp_path / "j")
    plain = study(lm)
    runs, submit = [], lm.engine.submit
    monkeypatch.setattr(lm.engine, "submit", lambda requests: runs.extend(requests) or submit(requests))
    again = study(lm, resume=tmp_path / "j")
    assert len(runs) == 2 * (study is lensed), "a lens runs its prompt, and proves its readout"
    for other in (plain, again):
        assert other.save(tmp_path / "other").read_bytes() == first.save(tmp_path / "first").read_bytes()
    for change in changes:
        with pytest.raises(pc.ProgramError, match="different study"):
            study(lm, **change, resume=tmp_path / "j")
        study(lm, **change)


@pytest.mark.parametrize(
    "change",
    [dict(answer=8), dict(clean=CORRUPT), dict(layers=1), dict(alpha=0.5), dict(direction="noising"), dict(source="zeros"),
     dict(positions=[-1]), dict(mask=np.ones(16)), dict(zoom=1), dict(window=2)],
)  # fmt: skip
def test_another_question_needs_another_file(lm, tmp_path: Path, change: dict):
    patch_sweep(lm, **ASKED, resume=tmp_path / "j")
    with pytest.raises(pc.ProgramError, match="different study"):
        patch_sweep(lm, **(ASKED | change), resume=tmp_path / "j")


# -- batches, reruns, listeners


def test_reruns_stand_among_the_trials_and_batches_are_whole_trials(lm, monkeypatch):
    graded, sizes = grade("logit_diff", (7, 8), (9, 6, 5)), []
    submit = lm.engine.submit
    monkeypatch.setattr(lm.engine, "submit", lambda requests: sizes.append(len(requests)) or submit(requests))
    prompt = lm.tokens(CLEAN)
    programs = [[pc.Scale(1 + i / 40, at="resid_pre[1]")] for i in range(20)]

    def job(lm, which):
        return job_of(lm, prompt, [[] if i is None else programs[i] for i in which], graded)

    heard: list[tuple[int, int]] = []
    cells = Cells(lm, 9, None, lambda done: None)
    (values,) = cells.run(
        [graded], [20], lambda: [SimpleNamespace(job=job)], lambda n, which, of: heard.extend((n, i) for i in which)
    )
    assert graded.runs == 4
    assert sizes[0] == 4
    assert set(sizes[:-1]) == {4, 8}
    assert sum(sizes) == 4 * (20 + len(values.baselines))
    assert len(values.baselines) >= BASELINES
    assert len(set(values.baselines.tolist())) == 1
    assert values.baselines[0] == values.trials[0]
    assert len(set(values.trials.tolist())) == 20
    assert heard == [(0, i) for i in range(20)]


def test_what_a_listener_raises_stops_the_sweep_and_leaves_nothing(lm):
    for study, asked in (
        (patch_sweep, ASKED),
        (causal_trace, STUDIES["causal_trace"]),
        (path_patch, STUDIES["path_patch"]),
    ):
        with pytest.raises(RuntimeError, match="enough"):
            study(lm, **asked, listener=Heard("enough"))
    gc.collect()  # the errors' frames
    status = lm.engine.status()
    assert (status["programs"], status["runs"]) == (0, 0)


def test_nothing_stays_with_the_engine(lm):
    patch_sweep(lm, **ASKED)
    ablation_sweep(lm, **STUDIES["ablation_sweep"])
    causal_trace(lm, **STUDIES["causal_trace"])
    path_patch(lm, **STUDIES["path_patch"])
    assert lm.engine.status()["runs"] == 0


PAIRS = dict(clean=[CLEAN] * 3, corrupt=[CORRUPT, "The dog is in the", "The cat is in the"], answer=7, foil=9)
PROMPTS = dict(prompt=[CLEAN, "A Eiffel is on the"], answer=7, foil=9)
OF_SEVERAL = [
    (patch_sweep, PAIRS),
    (ablation_sweep, PROMPTS),
    (causal_trace, PROMPTS | dict(foil=None, subject="Eiffel", seeds=2, layers="0:2")),
    (path_patch, STUDIES["paths of pairs"]),
]


@pytest.mark.parametrize(("study", "asked"), OF_SEVERAL)
def test_every_cell_is_told_once_with_its_mean_over_prompts(lm, study, asked):
    heard = Heard()
    sweep = study(lm, **asked, batch=5, listener=heard)
    assert heard.total == len(heard.values) == np.isfinite(sweep.values).sum()
    assert {key: pytest.approx(value) for key, value in heard.values.items()} == {
        (cell.where, cell.column): cell.value for cell in sweep.cells()
    }


@pytest.mark.parametrize(("study", "asked"), OF_SEVERAL)
def test_sources_that_are_captured_one_prompt_at_a_time_give_the_same_values(lm, study, asked, monkeypatch):
    together = study(lm, **asked)
    monkeypatch.setattr(grid, "MAX_SOURCE_BYTES", 1)
    monkeypatch.setattr(sys.modules[path_patch.__module__], "SENDERS_AT_ONCE", 1)
    assert study(lm, **asked).each.tobytes() == together.each.tobytes()


def test_results_are_saved_and_loaded(lm, tmp_path: Path):
    for study, asked in ((patch_sweep, STUDIES["zoom"]), (causal_trace, STUDIES["causal_trace"])):
        result = study(lm, **asked)
        loaded = type(result).load(result.save(tmp_path / "result"))
        assert loaded.values.tobytes() == result.values.tobytes()
        assert (loaded.rows, loaded.columns, loaded.pairs, loaded.blocks) == (
            result.rows, result.columns, result.pairs, result.blocks
        )  # fmt: skip
        assert repr(loaded) == repr(result)
    assert isinstance(loaded.subjects, tuple)
    frame = PatchSweepResult.load(patch_sweep(lm, **STUDIES["patch_sweep"]).save(tmp_path / "pairs")).to_frame()
    spread_columns = {"low", "high", "effect_low", "effect_high", "p", "p_family"}
    assert {"site", "layer", "index", "effect", *spread_columns} <= set(frame.columns)


# -- the spread over pairs


class TestSpread:
    def test_intervals_of_effects_are_paired(self):
        """Bases that differ widely do not widen the interval of the effect; p is that of every flip of signs."""
        draw = np.random.default_rng(1)
        base, effects = draw.normal(0, 100, 10), draw.normal(0.4, 0.5, 10)
        found = spread((base + effects)[:, None], base, 0)
        means = [np.mean(draw.choice(effects, 10)) for _ in range(20_000)]
        assert [found.effect_low[0], found.effect_high[0]] == pytest.approx(
            np.quantile(means, [0.025, 0.975]), abs=0.03
        )
        flips = [abs(np.dot(signs, effects)) for signs in itertools.product((-1, 1), repeat=10)]
        assert found.p[0] == np.mean(np.array(flips) >= abs(effects.sum()) - 1e-9)
        assert found.low[0] < 0 < found.effect_low[0] < effects.mean() < found.effect_high[0] < found.high[0]

    def test_few_pairs_are_tested_exactly(self):
        effects = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, -1.0], [3.0, 0.0, 0.5], [1.0, 0.0, -0.2]])
        found = spread(effects + 5, np.full(4, 5.0), seed=0)
        assert found.p[0] == 2 / 16, "only all signs alike reach it"
        assert found.p[1] == 1
        flips = [abs(np.array(signs) @ effects[:, 2]) for signs in itertools.product((1, -1), repeat=4)]
        assert found.p[2] == np.mean([flip >= abs(effects[:, 2].sum()) - 1e-9 for flip in flips])
        assert (found.p_family >= found.p).all()

    def test_many_pairs_are_tested_by_draws_and_agree_with_the_t_test(self):
        draw = np.random.default_rng(1)
        effects = draw.normal(0.35, 1, (40, 30))
        found = spread(effects, np.zeros(40), seed=2)
        from math import erfc, sqrt

        t = effects.mean(0) / (effects.std(0, ddof=1) / sqrt(40))
        normal = np.array([erfc(abs(x) / sqrt(2)) for x in t])
        assert np.abs(found.p - normal).max() < 0.03
        assert found.p.min() >= 1 / (FLIPS + 1)
        assert (found.p_family >= found.p).all()
        assert np.array_equal(found.p, spread(effects, np.zeros(40), seed=2).p)
        wide = 1.96 * effects.std(0) / sqrt(40)
        assert np.abs((found.high - found.low) / 2 - wide).max() < 0.1 * wide.max()

    def test_where_nothing_is_few_cells_are_found(self):
        noise = np.random.default_rng(3).normal(0, 1, (20, 400))
        found = spread(noise, np.zeros(20), seed=0)
        assert 0.02 < (found.p < 0.05).mean() < 0.09
        assert (found.p_family < 0.05).sum() == 0

    def test_cells_are_the_same_however_they_are_cut(self, monkeypatch):
        values = np.random.default_rng(5).normal(0.2, 1, (15, 50))
        whole = spread(values, np.zeros(15), 0)
        monkeypatch.setattr("patchclamp.studies.metric._AT_ONCE", 4096)
        parts = spread(values, np.zeros(15), 0)
        assert all(np.allclose(a, b) for a, b in zip(whole, parts, strict=True))


# -- zoom


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_a_zoom_finds_a_single_strong_cell_with_few_runs(layers: int, columns: int, seed: int):
    """A cell of effect 1, others of none; a block has the sum of its cells."""
    draw = np.random.default_rng(seed)
    strong = int(draw.integers(layers)), int(draw.integers(columns))
    zoom = Zoom(np.ones((layers, columns), bool), [Row("resid_pre", layer) for layer in range(layers)], columns, 2)
    runs = 0

    def patch(blocks, single):
        nonlocal runs
        runs += len(blocks)
        from patchclamp.studies.grid import Filled

        assert single == all(len(rows) * len(across) == 1 for rows, across in blocks)
        values = [float(strong[0] in rows and strong[1] in across) for rows, across in blocks]
        return Filled(np.array([values]), 0.0)

    singles, filled, blocks = zoom_in(zoom, patch, 0.0)
    assert singles[int(filled.values[0].argmax())] == strong
    assert filled.values.sum() == 1
    assert len(set(singles)) == len(singles)
    assert runs <= zoom.most
    assert len(singles) <= zoom.most_single
    assert len(blocks) + len(singles) == runs


def test_a_zoom_of_a_model_agrees_with_the_whole_sweep(lm):
    whole, zoomed = patch_sweep(lm, **ASKED, sites=["resid_pre", "logits"]), patch_sweep(
        lm, **ASKED, sites=["resid_pre", "logits"], zoom=2)  # fmt: skip
    run = ~np.isnan(zoomed.values)
    assert 0 < run.sum() < (~np.isnan(whole.values)).sum()
    assert np.array_equal(zoomed.values[run], whole.values[run])
    assert zoomed.blocks


# -- errors


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (dict(sites=["z"], group=0), pc.ProgramError, "group: "),
        (dict(group=1), pc.ProgramError, "sites[0].group: resid_pre has no heads"),
        (dict(sites=["z[0, 5]"]), pc.UnsupportedSite, "sites[0]: z[:, 5]: head is out of range"),
        (dict(window=0), pc.ProgramError, "window: "),
        (dict(direction="forward"), pc.UnknownName, "direction: unknown direction 'forward'; available: denoising"),
        (dict(source="zero"), pc.ProgramError, "source: expected 'zeros'"),
        (dict(source="bank:none"), pc.MissingSource, "source: unknown bank entry 'none'"),
        (dict(mask=np.ones(3)), pc.ShapeError, "mask: resid_pre[0]: "),
        (dict(alpha="1"), pc.ProgramError, "alpha: expected a number"),
        (dict(zoom=0), pc.ProgramError, "zoom: "),
        (dict(batch=0), pc.ProgramError, "batch: "),
        (dict(seed=-1), pc.ProgramError, "seed: "),
        (dict(clean=[CLEAN, CLEAN]), pc.ProgramError, "corrupt: "),
        (dict(answer="Paris"), pc.TokensError, "answer: 'Paris'"),
        (dict(answer=[7, 8], sites=["logits"]), pc.UnsupportedSite, "sites: logits"),
        (dict(positions={"x": [1, 2]}, clean=[CLEAN] * 3, corrupt=[CORRUPT] * 3), pc.ProgramError, "got 2"),
        (dict(positions={"x": (-2, -1)}), pc.ProgramError, "got 2"),
        (dict(positions={"x": [1, 2, 3]}, clean=[CLEAN] * 2, corrupt=[CORRUPT] * 2), pc.ProgramError, "got 3"),
    ],
)
def test_what_cannot_be_swept_is_told(lm, asked: dict, error: type, text: str):
    with pytest.raises(error) as raised:
        patch_sweep(lm, **(ASKED | asked))
    assert text in str(raised.value)


def test_a_vector_of_another_width_is_told_before_anything_runs(monkeypatch):
    with pc.LM("fake") as lm:
        lm.bank["short"] = np.ones(5)
        monkeypatch.setattr(lm.engine, "submit", lambda requests: pytest.fail("nothing is to be run"))
        with pytest.raises(pc.ShapeError, match=r"source: resid_pre\[0\]: .*\[5\]"):
            patch_sweep(lm, **ASKED, source="bank:short")


def test_a_check_is_shown_what_will_be_run_before_anything_is(lm, monkeypatch):
    """And of a sweep that it lets through, so many cells are computed."""
    shown = []
    pairs = dict(clean=[CLEAN] * 2, corrupt=[CORRUPT] * 2, answer=[[7, 8], [7, 8]], sites=["z", "embed"], group=None)
    source = Resampled([CLEAN, CORRUPT], draws=3)
    with monkeypatch.context() as still:
        still.setattr(lm.engine, "submit", lambda requests: pytest.fail("nothing is to be run"))

        def refuse(plan):
            shown.append((plan.grid, plan.runs, plan.captured_bytes))
            raise pc.CapacityError("too much")

        for change in ({}, dict(source=source), dict(zoom=1)):
            with pytest.raises(pc.CapacityError, match="too much"):
                patch_sweep(lm, **(ASKED | pairs | change), check=refuse)
    length, rows, layers = len(lm.tokens(CLEAN)), 4, 3
    assert shown[0][0] == 2 * rows * length
    # of each pair: every cell takes a run for each token of the answer that no other token's run grades
    questions = grade("logit_diff", (7, 8), (9,)).runs
    assert [runs for _, runs, _ in shown[:2]] == [2 * rows * length * questions, 2 * rows * length * 3 * questions]
    assert shown[2][1] < shown[0][1] * 4
    width = 4 * (16 + layers * lm.sites.points[lm.sites.resolve(pc.Site("z", 0))[0].point].width)
    assert [captured for *_, captured in shown[:2]] == [2 * length * width, 2 * length * width]
    sizes = []
    submit = lm.engine.submit
    monkeypatch.setattr(lm.engine, "submit", lambda requests: sizes.append(len(requests)) or submit(requests))
    sweep = patch_sweep(lm, **(ASKED | pairs), check=lambda plan: None)
    assert sum(sizes) == 2 * 2 * questions + 2 * len(list(_spread(rows * length, 4))) * questions + 2, (
        "and both sides, and sources"
    )
    assert sweep.each.size == shown[0][0]


@pytest.mark.parametrize(
    ("study", "asked", "text"),
    [
        (ablation_sweep, dict(metric="recovered"), "metric: recovered"),
        (ablation_sweep, dict(sites=["logits"], group=None), "sites: logits"),
        (causal_trace, dict(subject="Paris"), 'subject: span("Paris")'),
        (causal_trace, dict(seeds=0), "seeds: "),
        (causal_trace, dict(seeds=[1, 1]), "seeds: "),
        (causal_trace, dict(std=0), "std: "),
        (path_patch, dict(senders=["resid_pre"]), "senders[0]: resid_pre"),
        (path_patch, dict(receivers=["z[1, 0]"]), "receivers[0]: z[1, 0]"),
        (path_patch, dict(receivers=["q"]), "receivers[0]: q: "),
        (path_patch, dict(receivers=[["logits", "q[1, 0]"]]), "receivers[0]: logits"),
        (path_patch, dict(receivers=["q[0, 0]"]), "receivers: "),
        (path_patch, dict(freeze=["resid_pre"]), "freeze: unknown site to freeze 'resid_pre'"),
        (path_patch, dict(corrupt="The Colosseum is in"), "partner"),
        (path_patch, dict(clean=[CLEAN] * 2, corrupt=[CORRUPT, "The Colosseum is in"]), "pair 1.positions"),
        (path_patch, dict(clean=[CLEAN] * 2, corrupt=[CORRUPT]), "corrupt: "),
        (path_patch, dict(positions=[1, 2]), "positions: "),
        (path_patch, dict(clean=[CLEAN] * 2, corrupt=[CORRUPT] * 2, positions=[1, 2, 3]), "got 3"),
    ],
)
def test_what_other_studies_cannot_do_is_told(lm, study, asked: dict, text: str):
    with pytest.raises(pc.PatchclampError) as raised:
        study(lm, **(STUDIES[study.__name__] | asked))
    assert text in str(raised.value)


def test_paths_are_refused_where_a_state_lies_between(monkeypatch):
    """It is not held with attention and MLPs, so that other ways would count."""
    with pc.LM("fake") as lm:
        assert path_patch(lm, **STUDIES["path_patch"], show_progress=False).rows
        monkeypatch.setattr(lm.sites, "sizes", msgspec.structs.replace(lm.sites.sizes, recurrent=(1,)))
        with pytest.raises(pc.UnsupportedSite, match="linear attention"):
            path_patch(lm, **STUDIES["path_patch"], show_progress=False)


def test_unpatched_runs_are_kept_batch_by_batch(monkeypatch):
    """Of many pairs the unpatched runs alone may take long: an interrupted sweep goes on within them."""
    pairs = [[5, 6, token] for token in range(2, 12)]
    asked = {"clean": pairs, "corrupt": [[8, 9, of[2]] for of in pairs], "answer": 3, "metric": "logprob",
             "layers": 1, "positions": -1}  # fmt: skip
    journal, appended = Journal(None), []
    append = Journal.append

    def appending(self, values):
        append(self, values)
        appended.append(len(values))
        if len(appended) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", appending)
    with pc.LM("fake", prove=False) as lm:
        with pytest.raises(KeyboardInterrupt):
            pc.studies.patch_sweep(lm, **asked, resume=journal)
        assert 0 < sum(appended) < 2 * len(pairs)
        monkeypatch.setattr(Journal, "append", append)
        resumed = pc.studies.patch_sweep(lm, **asked, resume=journal)
        np.testing.assert_array_equal(resumed.each, pc.studies.patch_sweep(lm, **asked).each)


class Counted(Reporter):
    """Counts the progress of a study."""

    def begin(self, what, total):
        self.total, self.done = total, 0

    def advance(self, done):
        self.done += done


@pytest.mark.parametrize("name", STUDIES)
def test_progress_counts_cells_without_reruns(lm, name, tmp_path):
    """One for every pair or seed, also of a study that goes on from its file."""
    functions = {"zoom": patch_sweep, "paths of pairs": path_patch}
    study, told = functions.get(name) or getattr(pc.studies, name), Counted()
    for _ in range(2):
        sweep = study(lm, **STUDIES[name], show_progress=told, resume=tmp_path / "a.jsonl")
        run = int(np.isfinite(sweep.each).sum()) + len(sweep.blocks)
        assert told.done == run
        assert told.done <= told.total if name == "zoom" else told.done == told.total


def test_progress_counts_every_draw_of_a_cell(lm):
    told = Counted()
    source = Resampled(prompts=[CORRUPT, "The dog is in the"], draws=2)
    sweep = ablation_sweep(lm, prompt=CLEAN, answer=7, foil=9, source=source, show_progress=told)
    assert told.done == told.total == 2 * sweep.values.size


class TestMatch:
    """Positions that pair parts of prompts of different lengths."""

    def test_an_unknown_alignment_is_refused_at_once(self):
        with pytest.raises(pc.UnknownName):
            pc.studies.Match(clean="prompt[1]", corrupt="prompt[1]", align="middle")

    LONG, SHORT = [1, 2, 3, 4, 5, 6], [1, 12, 13, 5, 6]

    @pytest.mark.parametrize("direction", ["denoising", "noising"])
    @pytest.mark.parametrize(("align", "pairs"), [("last", ((2, 1), (3, 2))), ("first", ((1, 1), (2, 2)))])
    @pytest.mark.parametrize("as_json", [False, True])
    def test_a_cell_is_the_replace_written_by_hand(self, lm, direction, align, pairs, as_json):
        fields = {"clean": "prompt[1:4]", "corrupt": "prompt[1:3]", "align": align}
        match = fields if as_json else pc.studies.Match(**fields)
        sweep = patch_sweep(lm, clean=self.LONG, corrupt=self.SHORT, answer=7, foil=9, sites=["resid_pre", "attn_out"],
                            positions=[match, -1], direction=direction)  # fmt: skip
        clean, corrupt = zip(*pairs, strict=True)
        assert (sweep.columns[0].clean, sweep.columns[0].corrupt) == (clean, corrupt)
        alone = ({1, 2, 3} - set(clean)).pop()
        assert [(side, p) for side, p, _ in sweep.skipped] == [("clean", alone)]
        read, write, source, target = (
            (clean, corrupt, self.LONG, self.SHORT)
            if direction == "denoising"
            else (corrupt, clean, self.SHORT, self.LONG)
        )
        with contextlib.closing(lm.run(source, max_tokens=1, capture=["resid_pre", "attn_out"])) as run:
            for row, values in zip(sweep.rows, sweep.values, strict=True):
                at = pc.site(str(row))
                op = pc.Replace(pc.From(run, at, pc.prompt[list(read)]), at=at, tokens=pc.prompt[list(write)])
                scores = lm.run(target, max_tokens=1, score=[7, 9], edits=[op]).scores
                assert values[0] == scores[7] - scores[9]
        assert (sweep.values[:, 0] != sweep.baseline).any()

    @pytest.mark.parametrize("study", [patch_sweep, path_patch])
    def test_a_match_replaces_the_alignment_of_prompts_of_one_length(self, lm, study):
        """Tokens that it leaves without a partner are listed, and tokens of two matches are not."""
        asked = dict(clean=self.LONG, corrupt=[1, 12, 13, 14, 5, 6], answer=7, foil=9)
        match = pc.studies.Match(clean=pc.prompt[1:4], corrupt=pc.prompt[1:3])
        sweep = study(lm, **asked, positions=[match])
        assert sweep.alignment == ((0, 0), (2, 1), (3, 2), (4, 4), (5, 5))
        assert [(side, p) for side, p, _ in sweep.skipped] == [("clean", 1), ("corrupt", 3)]
        if study is patch_sweep:
            twice = [match, pc.studies.Match(clean=3, corrupt=3), 1]
            sweep = study(lm, **asked, positions=twice)
            assert {(2, 1), (3, 2), (3, 3), (1, 1)} <= set(sweep.alignment)
            assert not sweep.skipped

    def test_the_label_tells_spaces_of_tokens_from_those_around_the_arrow(self, lm):
        sweep = patch_sweep(lm, clean="a b c d", corrupt="a e d", answer=7, foil=9,
                            positions=[{"clean": "span(' b c')", "corrupt": "span(' e')"}])  # fmt: skip
        assert sweep.columns[0].label == "␣e ← ␣c"
        assert style.visible(sweep.columns[0].label) == sweep.columns[0].label

    def test_each_pair_of_prompts_has_its_own(self, lm):
        several = [pc.studies.Match(clean=pc.prompt[1:4], corrupt=pc.prompt[1:3]),
                   pc.studies.Match(clean=pc.prompt[1:3], corrupt=pc.prompt[1:4])]  # fmt: skip
        sweep = patch_sweep(lm, clean=[self.LONG, self.SHORT], corrupt=[self.SHORT, self.LONG], answer=7, foil=9,
                            positions={"subject": several, "last": -1})  # fmt: skip
        assert [of.label for of in sweep.columns] == ["subject", "last"]
        for i, pair in enumerate(((self.LONG, self.SHORT), (self.SHORT, self.LONG))):
            alone = patch_sweep(lm, clean=pair[0], corrupt=pair[1], answer=7, foil=9, positions=[several[i], -1])
            assert np.array_equal(sweep.each[i], alone.values)

    def test_the_path_of_a_matched_sender_is_the_one_written_by_hand(self, lm):
        clean, corrupt = [1, 2, 3, 4], [1, 12, 13, 4]
        match = {"clean": 1, "corrupt": 2}
        result = path_patch(lm, clean=clean, corrupt=corrupt, answer=7, foil=9, senders=["z[1, 0]"], freeze=("z",),
                            positions=match)  # fmt: skip
        sender, later = pc.z[1, 0], pc.z[2]
        with (
            contextlib.closing(lm.run(clean, max_tokens=1, capture=[sender])) as source,
            contextlib.closing(lm.run(corrupt, max_tokens=1, capture=[later])) as base,
        ):
            edits = [pc.Replace(pc.From(source, sender, pc.prompt[1]), at=sender, tokens=pc.prompt[2]),
                     pc.Replace(pc.From(base, later), at=later, tokens=pc.prompt)]  # fmt: skip
            scores = lm.run(corrupt, max_tokens=1, score=[7, 9], edits=edits).scores
        assert result.values[0, 0] == scores[7] - scores[9]

    @pytest.mark.parametrize(("wrong", "path"), [
        ({"clean": 99, "corrupt": 1}, "positions.clean"), ({"clean": 1, "corrupt": 99}, "positions.corrupt"),
        ({"clean": "prompt[1:4]", "corrupt": 1, "align": "each"}, "positions"), ("span('zz')", "positions"),
        (None, "positions"),
    ])  # fmt: skip
    def test_the_error_of_a_senders_selection_has_the_path_of_the_argument(self, lm, wrong, path):
        for count in (1, 2):
            with pytest.raises(pc.TokensError) as caught:
                path_patch(
                    lm, clean=[self.LONG] * count, corrupt=[self.SHORT] * count, answer=7, foil=9, positions=wrong
                )
            assert caught.value.path == (path if count == 1 else f"pair 0.{path}")

    def test_a_match_that_is_not_in_a_list_is_refused_because_a_mapping_labels_columns(self, lm):
        match = {"clean": "prompt[1:4]", "corrupt": "prompt[1:3]"}
        with pytest.raises(pc.ProgramError) as caught:
            patch_sweep(lm, clean=self.LONG, corrupt=self.SHORT, answer=7, foil=9, positions=match)
        assert caught.value.path == "positions"

    def test_prompts_that_share_no_token_can_be_matched(self, lm):
        match = pc.studies.Match(clean=pc.prompt, corrupt=pc.prompt)
        sweep = patch_sweep(lm, clean=[1, 2, 3], corrupt=[4, 5], answer=7, foil=9, positions=[match])
        assert sweep.alignment == ((1, 0), (2, 1))
        with pytest.raises(pc.TokensError, match=r"^positions: .*Match"):
            patch_sweep(lm, clean=[1, 2, 3], corrupt=[4, 5], answer=7, foil=9)

    @pytest.mark.parametrize(("match", "error", "path"), [
        ({"clean": 1, "corrupt": 1, "align": "middle"}, pc.ProgramError, "positions[0]"),
        ({"clean": 1}, pc.ProgramError, "positions[0]"),
        ({"clean": 99, "corrupt": 1}, pc.TokensError, "positions[0].clean"),
        *(({"clean": 1, "corrupt": wrong}, pc.ProgramError, "positions[0].corrupt")
          for wrong in (None, 1.5, True, b"a", {"a": 1}, [1.5])),
        ({"clean": "prompt[1:4]", "corrupt": 1, "align": "each"}, pc.TokensError, "positions[0]"),
    ])  # fmt: skip
    def test_wrong_ones_are_refused(self, lm, match, error, path):
        with pytest.raises(error) as caught:
            patch_sweep(lm, clean=self.LONG, corrupt=self.SHORT, answer=7, foil=9, positions=[match])
        assert caught.value.path == path

    def test_studies_of_one_prompt_refuse_it(self, lm):
        match = pc.studies.Match(clean=1, corrupt=1)
        for study, rest in ((ablation_sweep, {}), (causal_trace, {"subject": pc.prompt[1]})):
            with pytest.raises(pc.ProgramError, match=r"^positions\[0\]: .*Match"):
                study(lm, prompt=self.LONG, answer=7, metric="prob", positions=[match], **rest)


PATHS = dict(clean=[1, 2, 3, 4], corrupt=[1, 12, 13, 4], answer=7, foil=9)
EARLY = PATHS | dict(receivers=["logits"], positions=pc.prompt[1:3])


class TestPathsWithoutEffect:
    """Paths to the end of the model from earlier tokens, with attention frozen."""

    @pytest.mark.parametrize("freeze", [("z", "mlp_out"), "attn_out", "z"])
    @pytest.mark.parametrize("direction", ["denoising", "noising"])
    def test_they_are_0_and_the_result_and_a_warning_say_why(self, lm, caplog, freeze, direction):
        result = path_patch(lm, **EARLY, freeze=freeze, direction=direction)
        assert np.abs(result.effect).max() < 1e-6
        assert "by construction" in result.notice
        assert result.notice in result.picture().note
        assert [result.notice in record.getMessage() for record in caplog.records] == [True]
        assert type(result).load(result.to_bytes()).notice == result.notice

    @pytest.mark.parametrize("other", [
        dict(positions=pc.prompt[1:4]), dict(positions=None), dict(freeze="mlp_out"), dict(receivers=["v[2, 0]"]),
        dict(answer=[7, 8]),
    ])  # fmt: skip
    def test_other_paths_have_no_notice_and_an_effect(self, lm, caplog, other):
        result = path_patch(lm, **(EARLY | other))
        assert np.nanmax(np.abs(result.effect)) > 1e-6
        assert not result.notice
        assert not caplog.records

    def test_the_figure_names_the_tokens_of_the_senders(self, lm):
        match = pc.studies.Match(clean=1, corrupt=2)
        for direction, text in (("denoising", "{1} ← {0}"), ("noising", "{0} ← {1}")):
            result = path_patch(lm, **PATHS, positions=match, direction=direction)
            tokens = style.visible(result.clean_tokens[1]), style.visible(result.corrupt_tokens[2])
            assert f"Senders are patched at {text.format(*tokens)}." in result.picture().note
        assert "Senders" not in path_patch(lm, **PATHS).picture().note
