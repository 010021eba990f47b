"""What sweeps write into cells: results say it, its changes are other questions, its draws are of the cell alone, and
nothing of it stays with the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.serve.served_studies import _summary
from patchclamp.studies import MeanOf, Resampled, ablation_sweep, causal_trace, grid, patch_sweep, path_patch
from patchclamp.studies.sweep_result import AblationSweepResult, PatchSweepResult

CLEAN, CORRUPT = "The Eiffel is in the", "The Colosseum is in the"
ASKED = dict(clean=CLEAN, corrupt=CORRUPT, answer=7, foil=9, show_progress=False)
PUT_OUT = dict(prompt=CLEAN, answer=7, foil=9, sites=["z"], group=1, positions="each", show_progress=False)
OTHERS = [[*range(first, first + 6)] for first in (1, 7, 13, 4)]


@pytest.fixture
def lm():
    with pc.LM("fake") as lm:
        yield lm


# -- what results say


@pytest.mark.parametrize("kind", [MeanOf, Resampled])
def test_a_source_of_an_iterator_serves_several_sweeps(lm, kind):
    prompts, asked = [CLEAN, CORRUPT], {"prompt": CLEAN, "answer": 7, "metric": "prob"}
    once = kind(each for each in prompts)
    wanted = ablation_sweep(lm, **asked, source=kind(prompts)).values
    for _ in range(2):
        np.testing.assert_array_equal(ablation_sweep(lm, **asked, source=once).values, wanted)
    assert (wanted != ablation_sweep(lm, **asked).values).any()


def test_results_say_what_was_patched_in(lm, tmp_path: Path):
    width = lm.sites.points[lm.sites.resolve(pc.Site("resid_pre", 0))[0].point].width
    mask = np.zeros(width, np.float32)
    mask[:3] = 1
    lm.bank["m"] = mask
    whole = f"with alpha 0.5 in 3 of {width} columns"
    cases = [
        ({}, "clean activations", "from the clean run"),
        (dict(direction="noising"), "corrupt activations", "from the corrupt run"),
        (dict(source="zeros"), "zeros", "with zeros"),
        (dict(source="bank:m"), "'m' of the bank", "with 'm' of the bank"),
        (dict(source=MeanOf(OTHERS, tokens="prompt[1:]")), "the mean of 4 prompts at prompt[1:]", "with the mean of 4"),
        (dict(source=Resampled(OTHERS, draws=2)), "rows of 4 prompts drawn at random, 2 a cell", "with rows of 4"),
        (dict(alpha=0.5, mask="m"), f"clean activations {whole}", f"with clean activations {whole}"),
        (dict(source="zeros", alpha=0.5, mask=mask, zoom=1), f"zeros {whole}", f"with zeros {whole}"),
    ]
    for change, source, cell in cases:
        sweep = patch_sweep(lm, **(ASKED | change))
        loaded = PatchSweepResult.load(sweep.save(tmp_path / "result"))
        picture = loaded.picture()
        into = "clean" if "direction" in change else "corrupt"
        assert loaded.source == sweep.source == source
        assert picture.title.startswith(f"Patching {source} into the {into} run: ")
        assert picture.cell.startswith(f"the {into} run with one place patched {cell}")
        assert loaded.asked == sweep.asked
        assert (loaded.asked["alpha"], loaded.asked["zoom"]) == (change.get("alpha", 1.0), change.get("zoom"))
    assert loaded.asked["pairs"][0][0] == list(lm.tokens(CLEAN))
    assert loaded.asked["mask"]["data"], "a mask of the bank and the same numbers are one question"
    assert loaded.asked["mask"] == patch_sweep(lm, **ASKED, mask="m").asked["mask"]
    assert patch_sweep(lm, **ASKED).asked["mask"] is None


def test_ablations_traces_and_paths_say_it_too(lm, tmp_path: Path):
    for source, words in (("zeros", "zeros"), (MeanOf(OTHERS[:1]), "the mean of 1 prompt")):
        sweep = ablation_sweep(lm, **PUT_OUT, source=source)
        loaded = AblationSweepResult.load(sweep.save(tmp_path / "result"))
        assert loaded.picture().title.startswith(f"Ablating one place at a time by {words}: ")
        assert loaded.picture().cell == f"the run with one place ablated by {words}"
        assert loaded.asked["source"] == sweep.asked["source"]
    trace = causal_trace(lm, prompt=CLEAN, subject="Eiffel", answer=7, seeds=2, layers=1)
    paths = path_patch(lm, **ASKED, direction="noising")
    assert (trace.source, trace.asked["seeds"]) == ("clean activations", [0, 1])
    assert (paths.source, paths.asked["frozen"]) == ("corrupt activations", ["z", "mlp_out"])


# -- questions


def test_another_mask_of_the_same_name_is_another_question(lm, tmp_path: Path):
    width = lm.sites.points[lm.sites.resolve(pc.Site("resid_pre", 0))[0].point].width
    lm.bank["m"] = np.ones(width, np.float32)
    first = patch_sweep(lm, **ASKED, mask="m", resume=tmp_path / "j")
    again = patch_sweep(lm, **ASKED, mask="m", resume=tmp_path / "j")
    assert again.values.tobytes() == first.values.tobytes()
    lm.bank["m"] = np.linspace(0, 1, width, dtype=np.float32)
    with pytest.raises(pc.ProgramError, match="different study"):
        patch_sweep(lm, **ASKED, mask="m", resume=tmp_path / "j")
    changed = patch_sweep(lm, **ASKED, mask="m")
    assert not np.array_equal(changed.values, first.values)
    assert "weighted" in changed.source
    with pytest.raises(pc.MissingSource, match="mask: unknown bank entry"):
        patch_sweep(lm, **ASKED, mask="none")


def test_a_mean_by_position_has_no_selection(lm):
    for study, asked in ((patch_sweep, ASKED), (ablation_sweep, PUT_OUT)):
        with pytest.raises(pc.ProgramError, match=r"source\.tokens: .*by_position"):
            study(lm, **asked, source=MeanOf([CLEAN], tokens="prompt[1:]", by_position=True))
        study(lm, **asked, source=MeanOf([CLEAN], tokens="prompt[1:]"))
    patch_sweep(lm, **ASKED, positions=[-1], source=MeanOf([CORRUPT], by_position=True))


# -- draws


def drawing(lm, **change):
    """A sweep with drawn rows, of three pairs of one length."""
    pairs = dict(clean=[[3, *ids[1:]] for ids in OTHERS[:3]], corrupt=[[3, 8, *ids[2:]] for ids in OTHERS[:3]])
    asked = dict(answer=7, foil=9, show_progress=False, source=Resampled(OTHERS, seed=change.pop("draw", 3)))
    return patch_sweep(lm, **(pairs | asked | change))


def test_draws_do_not_depend_on_how_pairs_are_grouped(lm, monkeypatch):
    together = drawing(lm)
    monkeypatch.setattr(grid, "MAX_SOURCE_BYTES", 1)
    assert np.array_equal(drawing(lm).each, together.each)
    assert not np.array_equal(drawing(lm, draw=4).each, together.each)


def test_draws_do_not_depend_on_a_zoom(lm):
    whole, zoomed = drawing(lm), drawing(lm, zoom=2)
    run = ~np.isnan(zoomed.values)
    assert 0 < run.sum() < run.size
    assert np.array_equal(zoomed.each[:, run], whole.each[:, run])


def test_pairs_rows_and_columns_have_draws_of_their_own(lm, monkeypatch):
    drawn = {}

    class Drawing:
        def __init__(self, key):
            self.key = key

        def integers(self, count, size):
            drawn[self.key] = np.random.Generator(np.random.PCG64(self.key)).integers(count, size=size)
            return drawn[self.key]

    with monkeypatch.context() as patched:
        patched.setattr("patchclamp.studies.sources.np.random.default_rng", Drawing)
        length = len(lm.tokens(CLEAN))
        patch = dict(PUT_OUT, prompt=[CLEAN] * 3, source=Resampled([[*range(length)], [*range(1, 1 + length)]], seed=5))
        patched.setattr("patchclamp.studies.grid.spread", lambda values, base, seed: NoSpread())
        sweep = ablation_sweep(lm, **patch)
    n, r, p = sweep.each.shape
    assert set(drawn) == {(5, i, j, k) for i in range(n) for j in range(r) for k in range(p)}


class NoSpread:
    _fields = ()


# -- what stays with the engine


def test_an_errors_frames_hold_no_shared_runs(lm):
    class Listener:
        def start(self, sweep, cells):
            pass

        def cells(self, cells):
            raise RuntimeError("enough")

    same = Resampled([CLEAN, CLEAN])
    for study, asked in (
        (patch_sweep, dict(ASKED, corrupt=CLEAN, direction="noising", source=same)),
        (ablation_sweep, dict(PUT_OUT, source=same)),
    ):
        with pytest.raises(RuntimeError, match="enough") as held:
            study(lm, **asked, listener=Listener())
        assert lm.engine.status()["runs"] == 0
        assert held.value.__traceback__ is not None


# -- senders, receivers


@pytest.mark.parametrize("first", ["q[0, 0]", "v[0, 0]", "q[1, 0]"])
def test_a_receiver_lies_behind_a_sender_if_one_of_its_sites_does(lm, first: str):
    """What lies before the sender has its own values in the sender's run: to patch it changes nothing."""
    both = path_patch(lm, **ASKED, receivers=[[first, "q[2, 0]"]])
    alone = path_patch(lm, **ASKED, receivers=[first, "q[2, 0]"])
    behind = np.isnan(alone.values[:, 0])
    layer = np.array([row.layer for row in both.rows])
    assert np.array_equal(behind, layer >= int(first[2]))
    assert np.array_equal(np.isnan(both.values[:, 0]), layer >= 2)
    between = (layer < 2) & behind
    assert between.any()
    assert np.array_equal(both.values[between, 0], alone.values[between, 1])
    assert (np.abs(both.values[between, 0] - both.baseline) > 0).any()


# -- columns of several pairs


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_columns_whose_tokens_differ_are_named_by_what_they_share(lm, direction):
    pairs = dict(clean=["The cat sat", "A dog ran to me now"], corrupt=["The dog sat", "A man ran to me now"])
    lengths = [len(lm.tokens(text)) for text in pairs["clean"]]
    positions = ["prompt[1]", "prompt[-1]", pc.studies.Match(clean="prompt[-2]", corrupt="prompt[-2]")]
    sweep = patch_sweep(lm, **pairs, answer=7, metric="logprob", direction=direction, sites=["mlp_out"], layers=[0],
                        positions={"at": ["prompt[1]", "prompt[-1]"]}, show_progress=False)  # fmt: skip
    assert [column.label for column in sweep.columns] == ["at"], "a label of the caller's stays"
    sweep = patch_sweep(lm, **pairs, answer=7, metric="logprob", direction=direction, sites=["mlp_out"], layers=[0],
                        positions=positions, show_progress=False)  # fmt: skip
    assert lengths[0] != lengths[1]
    assert [column.label for column in sweep.columns] == ["token 1", "token -1", "token -2"]


def test_ablated_columns_whose_tokens_differ_have_positions(lm):
    prompts = ["The cat sat", "A dog ran to me now"]
    asked = dict(prompt=prompts, answer=7, metric="logprob", sites=["mlp_out"], layers=[0], show_progress=False)
    ids = [lm.tokens(text) for text in prompts]
    part = pc.prompt[len(ids[0]) - 2 :]  # its positions and its distance from the end differ
    sweep = ablation_sweep(lm, **asked, positions=["prompt[1]", "prompt[-1]", part])
    assert [column.label for column in sweep.columns] == ["token 1", "token -1", "column 3"]
    served = [cell["positions"] for cell in _summary(sweep)["best"]]
    assert sorted(served) == sorted(column.clean for column in sweep.columns)
    traced = causal_trace(lm, prompt=CLEAN, subject="Eiffel", answer=7, layers=[0], seeds=1, show_progress=False)
    assert all(cell["positions"] for cell in _summary(traced)["best"])


# -- seeds are no prompts


def test_seeds_are_no_prompts(lm):
    trace = dict(subject="Eiffel", answer=7, layers="0:2", show_progress=False)
    one = causal_trace(lm, prompt=CLEAN, seeds=6, **trace)
    assert (one.p, one.p_family) == (None, None)
    assert (one.low <= one.values).all()
    assert (one.values <= one.high).all()
    assert (one.low < one.high).any()
    (panel, *_) = one.picture().panels
    assert [label for label, _ in panel.details] == ["95 % interval over seeds from", "to", "effect from", "effect to"]
    lone = causal_trace(lm, prompt=CLEAN, seeds=1, **trace)
    assert (lone.low, lone.p) == (None, None)

    prompts = [CLEAN, "A Eiffel is on the", "The Eiffel is on the"]
    several = causal_trace(lm, prompt=prompts, seeds=6, positions=[-1], **trace)
    assert several.p.min() >= 2 / 2**3, "three prompts have eight signs"
    means = several.each.reshape(3, 6, *several.values.shape).mean(1)
    assert (several.low >= means.min(0) - 1e-12).all()
    assert (several.high <= means.max(0) + 1e-12).all()
    (panel, *_) = several.picture().panels
    assert panel.details[0][0] == "95 % interval from"
