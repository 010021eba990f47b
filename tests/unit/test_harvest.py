"""A harvest has every row of a plain loop once, where the shuffle says, whatever the batches, and says what it made."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import patchclamp as pc
from patchclamp.errors import CapacityError, MissingSource, NameTaken, ProgramError, TokensError, UnknownName
from patchclamp.lm import LM
from patchclamp.store.journal import Journal
from patchclamp.store.tensors import to_bfloat16, to_float32
from patchclamp.studies.harvest import (
    UNDER_WAY,
    Filters,
    Harvested,
    HarvestResult,
    Project,
    SiteReduction,
    harvest,
    shards,
)
from patchclamp.studies.harvest.recipe import shuffled
from patchclamp.studies.harvest.shards import RowsFile, statistics_of
from patchclamp.testing import FakeEngine
from tests.reference.harvest import bytes_of, chi_square, no_disk, rows_of  # noqa: F401

SITES = ["resid_post[1]", "z[0, 1]"]
BOS = 0
SHUFFLE = [5, 0, 4, 6, 3, 7, 1, 2]  # of 8 rows, for seed 3 and part 1


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(7)
    return [[BOS, *draw.integers(2, 60, draw.integers(0, 30)).tolist()] for _ in range(50)] + [[]]


def make(lm, documents, folder, **asked) -> HarvestResult:
    return harvest(lm, documents, folder, **{"sites": SITES, "dtype": "float32", "shard_rows": 200,
                                             "batch_tokens": 150} | asked)  # fmt: skip


def places(data: Harvested) -> list[tuple[int, int]]:
    index = data.index().to_pydict()
    return list(zip(index["document"], index["position"], strict=True))


def all_rows(data: Harvested, site: str) -> np.ndarray:
    return np.concatenate(list(data.blocks(site=site)))


# -- the shuffle


@given(st.integers(0, 3000), st.integers(0, 2**63 - 1))
def test_a_shuffle_has_every_row_once(rows, seed):
    assert sorted(shuffled(rows, seed, 0).tolist()) == list(range(rows))


def test_a_shuffle_is_the_same_in_every_version():
    """A harvest that is resumed, with another NumPy, puts the other rows at the other places."""
    assert shuffled(8, 3, 1).tolist() == SHUFFLE
    assert shuffled(8, 3, 2).tolist() != SHUFFLE != shuffled(8, 4, 1).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_shuffle_is_exact_a_chi_square_over_places_holds(seed):
    """Where a row comes from says nothing about where it lies: 64 stretches of the data against 64 of the files."""
    size = 1 << 16
    table = np.zeros((64, 64))
    np.add.at(table, (np.arange(size) * 64 // size, shuffled(size, seed, 0) * 64 // size), 1)
    assert abs(chi_square(table)[0]) < 4.5
    np.add.at(table, (np.arange(size) * 64 // size, np.arange(size) * 64 // size), 0.1)  # a tenth more in order
    assert chi_square(table)[0] > 50


@pytest.mark.parametrize("size", [6, 11])
def test_over_seeds_any_two_rows_lie_at_any_two_places_alike(size):
    seeds = 4000
    pairs = np.array([shuffled(size, seed, 0)[[0, 3]] for seed in range(seeds)])
    counts = np.zeros((size, size))
    np.add.at(counts, tuple(pairs.T), 1)
    assert (np.diag(counts) == 0).all()
    apart = counts[~np.eye(size, dtype=bool)]
    expected = seeds / len(apart)
    statistic = ((apart - expected) ** 2 / expected).sum()
    assert abs(statistic - (len(apart) - 1)) / np.sqrt(2 * (len(apart) - 1)) < 4.5


def test_rows_of_a_data_set_are_shuffled_over_all_shards(lm, tmp_path):
    """On disk, by the index: documents against stretches of places, and positions against them."""
    draw = np.random.default_rng(1)
    documents = draw.integers(2, 60, (128, 64)).tolist()
    data = make(lm, documents, tmp_path, sites="resid_post[0]", batch_tokens=4096, shard_rows=2000).open()
    index = data.index()
    stretch = np.arange(len(data)) * 16 // len(data)
    for column, count in (("document", 16), ("position", 16)):
        values = index[column].to_numpy()
        table = np.zeros((count, 16))
        np.add.at(table, (values * count // (values.max() + 1), stretch), 1)
        assert abs(chi_square(table)[0]) < 4.5, column


# -- what is written


FILTERS = {
    "none": (Filters(), lambda d, p: True),
    "no BOS": (Filters(no_bos=True), lambda d, p: p > 0),
    "no special": (Filters(no_special=True, not_tokens=(5, 6)), lambda d, p: d[p] > 1 and d[p] not in (5, 6)),
    "windows": (Filters(positions=((2, 6), (-3, None))), lambda d, p: 2 <= p < 6 or p >= len(d) - 3),
    "one window": (Filters(positions=((3, 9),)), lambda d, p: 3 <= p < 9),
    "ids": (Filters(only_tokens=tuple(range(20, 40))), lambda d, p: 20 <= d[p] < 40),
}


@pytest.mark.parametrize("name", FILTERS)
def test_every_row_of_a_plain_loop_is_there_once(lm, documents, tmp_path, name):
    filters, keep = FILTERS[name]
    made = make(lm, documents, tmp_path, filters=filters)
    data, reference = made.open(), rows_of(lm, documents[:-1], SITES, keep)
    assert made.complete
    assert data.complete
    assert made.rows == len(data) == len(reference[SITES[0]]) > 100
    assert sorted(places(data)) == sorted(reference[SITES[0]])
    assert places(data) != sorted(places(data))
    for site in SITES:
        rows = np.concatenate(list(data.blocks(site, 37)))
        for place, row in zip(places(data), rows, strict=True):
            assert (row == reference[site][place]).all()
    tokens = data.index()["token"].to_pylist()
    assert tokens == [documents[d][p] for d, p in places(data)]


def test_bytes_do_not_depend_on_batches_or_chunks(lm, documents, tmp_path):
    first = make(lm, documents, tmp_path / "a", dtype="bfloat16")
    with LM("", FakeEngine(chunk=3)) as other:
        second = make(other, documents, tmp_path / "b", dtype="bfloat16", batch_tokens=17, checkpoint_bytes=1)
    assert Path(first.folder).name == Path(second.folder).name
    assert bytes_of(Path(first.folder)) == bytes_of(Path(second.folder))
    assert len(bytes_of(Path(first.folder))) > 10


def test_files_are_safetensors_whose_data_begin_at_a_page(lm, documents, tmp_path):
    made = make(lm, documents, tmp_path, dtype="float16")
    data = made.open()
    assert data.shards == [f"shard-0000-0000{i}" for i in range(len(data.shards))]
    path = Path(made.folder) / data.shards[1] / "z.0.1.safetensors"
    with safe_open(path, "numpy") as file:
        rows = file.get_tensor("z[0, 1]")
        assert file.metadata() == {"harvest": Path(made.folder).name, "format": "2", "shard": data.shards[1]}
    assert int.from_bytes(path.read_bytes()[:8], "little") + 8 == 4096
    assert rows.dtype == np.float16
    assert (rows == data.array("z[0, 1]", data.shards[1])).all()
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "index.parquet", "resid_post.1.safetensors", "statistics.json", "z.0.1.safetensors"]  # fmt: skip


def test_all_that_changes_bytes_changes_the_name(lm, documents, tmp_path):
    matrix = np.eye(16, dtype=np.float32)[:4]
    changes = [
        {}, {"seed": 1}, {"shard_rows": 201}, {"parts": 2}, {"dtype": "bfloat16"}, {"sites": "resid_post[1]"},
        {"filters": Filters(no_bos=True)}, {"sums": True, "overlong": "cut"}, {"context": 20, "overlong": "cut"},
        {"context": 20, "overlong": "split"}, {"sites": "resid_post[1]", "project": matrix},
        {"sites": "resid_post[1]", "project": 2 * matrix}, {"filters": Filters(norm_cap=99.0)},
    ]  # fmt: skip
    names = [make(lm, documents, tmp_path, **change).folder for change in changes]
    names.append(make(lm, documents[1:], tmp_path).folder)
    assert len(set(names)) == len(names)
    assert make(lm, documents, tmp_path, batch_tokens=31).folder == names[0]


def test_statistics_are_numpys(lm, documents, tmp_path):
    for dtype in ("float32", "bfloat16"):
        made = make(lm, documents, tmp_path, dtype=dtype)
        data = made.open()
        for site, statistics in data.statistics().items():
            rows = np.concatenate(list(data.blocks(site, 64))).astype(np.float64)
            norms = np.linalg.norm(rows, axis=1)
            assert statistics.rows == len(rows)
            np.testing.assert_allclose(statistics.mean, rows.mean(axis=0), atol=1e-6)
            np.testing.assert_allclose(statistics.variance, rows.var(axis=0), rtol=1e-5)
            ours = [statistics.norm_mean, statistics.norm_rms, statistics.norm_min, statistics.norm_max]
            numpys = [norms.mean(), np.sqrt((norms**2).mean()), norms.min(), norms.max()]
            np.testing.assert_allclose(ours, numpys, rtol=1e-6)
        written = json.loads((Path(made.folder) / "statistics.json").read_text())
        assert written["resid_post[1]"]["mean"] == data.statistics()["resid_post[1]"].mean.tolist()


def test_statistics_of_rows_far_from_zero(tmp_path):
    rows = (1000 + np.random.default_rng(0).standard_normal((5000, 300))).astype(np.float32)
    safetensors.numpy.save_file({"rows": rows}, tmp_path / "rows")
    statistics = statistics_of(RowsFile.open(tmp_path / "rows"))
    np.testing.assert_allclose(statistics.mean, rows.mean(axis=0, dtype=np.float64), rtol=1e-8)
    np.testing.assert_allclose(statistics.variance, rows.astype(np.float64).var(axis=0), rtol=1e-4)


@pytest.mark.parametrize(("filters", "cap"), [
    (Filters(norm_cap=5.0), lambda norms: 5.0), (Filters(norm_times_median=1.1), lambda norms: 1.1 * np.median(norms))
])  # fmt: skip
def test_caps_on_norms_leave_rows_out_and_move_no_other(lm, documents, tmp_path, filters, cap):
    whole = make(lm, documents, tmp_path).open()
    capped = make(lm, documents, tmp_path, filters=filters).open()
    for shard in whole.shards:
        passing = np.ones(len(whole.array(SITES[0], shard)), bool)
        for site in SITES:
            norms = np.linalg.norm(whole.array(site, shard), axis=1)
            passing &= norms <= cap(norms)
        assert 0.1 < passing.mean() < 0.98
        for site in SITES:
            assert (capped.array(site, shard) == whole.array(site, shard)[passing]).all()
        assert capped.index(shard) == whole.index(shard).filter(passing)
    assert capped.statistics()[SITES[0]].rows == len(capped) < len(whole)


def test_projections_and_sums_are_those_of_a_plain_loop(lm, documents, tmp_path):
    matrix = np.random.default_rng(2).standard_normal((5, 16)).astype(np.float32)
    asked = {"sites": "resid_post[1]", "filters": Filters(no_bos=True)}
    reference = rows_of(lm, documents[:-1], ["resid_post[1]"], lambda d, p: p > 0)["resid_post[1]"]
    projected = make(lm, documents, tmp_path, project=Project({"resid_post[1]": matrix}), **asked).open()
    assert projected.width() == 5
    rows = np.concatenate(list(projected.blocks()))
    expected = np.array([reference[place] @ matrix.T for place in places(projected)])
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    on_host = make(lm, documents, tmp_path, project=Project(matrix, on_device=False), **asked).open()
    assert [data.manifest.recipe.sites[0].captured for data in (projected, on_host)] == [5, 16]
    assert projected.folder.name != on_host.folder.name
    assert projected.index() == on_host.index()
    np.testing.assert_allclose(rows, np.concatenate(list(on_host.blocks())), rtol=1e-5, atol=1e-5)

    summed = make(lm, documents, tmp_path, project=matrix, sums=True, **asked).open()
    index = summed.index().to_pydict()
    assert sorted(index["document"]) == sorted({document for document, _ in reference})
    assert set(index["position"]) == set(index["token"]) == {None}
    for document, row in zip(index["document"], np.concatenate(list(summed.blocks())), strict=True):
        total = np.sum([values for (d, _), values in reference.items() if d == document], axis=0)
        np.testing.assert_allclose(row, total @ matrix.T, atol=1e-4)


def test_long_documents_are_refused_cut_or_split(lm, tmp_path):
    documents = [list(range(2, 40)), list(range(10, 20))]
    with pytest.raises(TokensError, match=r"documents: .* 16 .* 38 in document 0"):
        make(lm, documents, tmp_path, context=16)
    cut = make(lm, documents, tmp_path, context=16, overlong="cut")
    assert (cut.cut_tokens, cut.rows) == (22, 26)
    split = make(lm, documents, tmp_path, context=16, overlong="split").open()
    assert sorted(places(split)) == [(0, p) for p in range(38)] + [(1, p) for p in range(10)]
    pieces = [documents[0][:16], documents[0][16:32], documents[0][32:], documents[1]]
    reference = rows_of(lm, pieces, SITES[:1])[SITES[0]]
    rows = np.concatenate(list(split.blocks(site=SITES[0])))
    for (document, position), row in zip(places(split), rows, strict=True):
        piece = (position // 16, position % 16) if document == 0 else (3, position)
        assert (row == reference[piece]).all()


# -- machines, stops, and pressure


def test_parts_of_several_machines_are_merged_by_name(lm, documents, tmp_path):
    alone = make(lm, documents, tmp_path / "alone", parts=2)
    for machine in (0, 1):
        part = make(lm, documents, tmp_path / f"machine{machine}", shard=(machine, 2))
        assert not part.complete
        assert "shards" in repr(part.open())
        shutil.copytree(part.folder, tmp_path / "merged", dirs_exist_ok=True)
        assert Path(part.folder).name == Path(alone.folder).name
        assert 0 < part.ran < alone.ran
    merged = Harvested(tmp_path / "merged")
    assert merged.complete
    assert not (tmp_path / "merged" / "statistics.json").exists()
    merged.write_statistics()
    assert bytes_of(tmp_path / "merged") == bytes_of(Path(alone.folder))
    assert sorted(places(merged)) == sorted(
        (d, p) for d, document in enumerate(documents) for p in range(len(document))
    )


class Stopping(FakeEngine):
    """Fails after so many requests."""

    after = 10**9

    def submit(self, requests):
        type(self).after -= len(requests)
        if self.after < 0:
            raise pc.EngineError("the engine has stopped")
        return super().submit(requests)


@pytest.mark.parametrize("after", [0, 7, 23, 49])
def test_a_harvest_whose_engine_stops_goes_on(lm, documents, tmp_path, after):
    whole = make(lm, documents, tmp_path / "whole", filters=Filters(norm_cap=5.0))
    asked = {"filters": Filters(norm_cap=5.0), "batch_tokens": 20, "checkpoint_bytes": 1}
    with LM("", Stopping()) as stopping:
        Stopping.after = after
        with pytest.raises(pc.EngineError, match="has stopped"):
            make(stopping, documents, tmp_path / "stopped", **asked)
        stopped = Harvested(tmp_path / "stopped" / Path(whole.folder).name)
        assert not stopped.complete
        with pytest.raises(MissingSource, match="no shards"):
            stopped.index()
        Stopping.after = 10**9
        resumed = make(stopping, documents, tmp_path / "stopped", **asked)
    assert bytes_of(Path(resumed.folder)) == bytes_of(Path(whole.folder))
    assert resumed.ran <= whole.ran
    assert make(lm, documents, tmp_path / "stopped", **asked).ran == 0


class Failing(FakeEngine):
    """Fails the one request whose prompt has a given token."""

    def submit(self, requests):
        futures = super().submit(requests)
        for future, request in zip(list(futures), requests, strict=True):
            if 61 in request.prompt_token_ids:
                future = type(future)()
                future.set_exception(pc.RunError("it failed while it ran"))
                futures[requests.index(request)] = future
        return futures


def test_a_run_that_fails_is_the_harvests_error_and_loses_no_other(documents, tmp_path):
    wrong = [*documents[:30], [3, 61, 4], *documents[30:]]
    with LM("", Failing()) as failing, pytest.raises(pc.RunError, match="document 30: it failed while it ran"):
        make(failing, wrong, tmp_path, checkpoint_bytes=1, batch_tokens=20)
    with LM("", FakeEngine()) as whole:
        made = make(whole, wrong, tmp_path)
    assert made.complete
    assert made.ran < made.tokens


def test_a_part_is_one_processs(lm, documents, tmp_path):
    made = make(lm, documents, tmp_path)
    folder = Path(made.folder)
    shutil.rmtree(folder / "shard-0000-00000")
    (folder / "part-0000.open").mkdir()
    held = Journal(folder / "part-0000.open" / "ledger").open(f"{folder.name}, part 0")
    with pytest.raises(NameTaken, match="ledger is in use"):
        make(lm, documents, tmp_path)
    held.close()
    assert make(lm, documents, tmp_path).complete


def test_rows_are_on_the_disk_before_the_ledger_has_their_documents(lm, documents, tmp_path, monkeypatch):
    synced: set[Path] = set()
    listed: list[int] = []
    append, sync = Journal.append, shards.sync

    def noted(ledger, new):
        append(ledger, new)
        assert len([path for path in synced if path.suffix == ".safetensors"]) == files
        synced.clear()
        listed.extend(prompt for prompts in new for prompt in prompts)

    files = 4 * len(SITES)
    monkeypatch.setattr(shards, "sync", lambda path: (sync(path), synced.add(path)))
    monkeypatch.setattr(Journal, "append", noted)
    made = make(lm, documents, tmp_path, batch_tokens=60, checkpoint_bytes=1)
    assert len(made.open().shards) * len(SITES) == files
    assert sorted(listed) == list(range(50))


def test_a_ledger_of_an_older_version_is_refused_and_kept(lm, documents, tmp_path):
    """It was a file of numbers."""
    folder = Path(make(lm, documents, tmp_path).folder)
    shutil.rmtree(folder / "shard-0000-00000")
    (folder / "part-0000.open").mkdir()
    ledger = folder / "part-0000.open" / "ledger"
    ledger.write_bytes(np.array([3, 1, 4], "<i8").tobytes())
    with pytest.raises(pc.ProgramError, match=r"compatible journal.*ledger"):
        make(lm, documents, tmp_path)
    assert ledger.read_bytes() == np.array([3, 1, 4], "<i8").tobytes()


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("filters", [Filters(norm_cap=5.0), Filters(norm_times_median=1.1)])
def test_caps_are_on_whole_rows_before_a_projection(lm, documents, tmp_path, filters, on_device):
    matrix = np.random.default_rng(4).standard_normal((3, 16)).astype(np.float32)
    asked = {"sites": ["resid_post[1]", "resid_pre[1]"], "filters": filters, "parts": 2}
    whole = make(lm, documents, tmp_path / "whole", **asked).open()
    data = make(lm, documents, tmp_path / "less", project=Project(matrix, on_device), **asked).open()
    assert 0 < len(data) < sum(map(len, documents))
    assert places(data) == places(whole)
    for site in data.sites:
        assert np.allclose(all_rows(data, site), all_rows(whole, site) @ matrix.T, atol=1e-5)


@pytest.mark.parametrize("project", [None, np.eye(16, dtype=np.float32)[:3]])
@pytest.mark.parametrize("filters", [Filters(norm_cap=4.0), Filters(norm_times_median=0.9)])
def test_caps_are_on_each_row_of_a_sum(lm, documents, tmp_path, filters, project):
    sites = ["resid_post[1]", "resid_pre[1]"]
    plain = rows_of(lm, documents[:-1], sites)
    expected = {}
    for number, document in enumerate(documents[:-1]):
        rows = {site: np.array([plain[site][number, p] for p in range(len(document))]) for site in sites}
        kept = np.logical_and.reduce([filters.passing(np.linalg.norm(of, axis=1)) for of in rows.values()])
        if kept.any():
            expected[number] = {site: of[kept].sum(axis=0) for site, of in rows.items()}
    data = make(lm, documents, tmp_path, sites=sites, sums=True, filters=filters, project=project).open()
    assert sorted(number for number, _ in places(data)) == sorted(expected)
    assert 0 < len(expected) < len(documents) - 1  # no row of some documents is within the cap
    for site in sites:
        rows = np.array([expected[number][site] for number, _ in places(data)])
        assert np.allclose(all_rows(data, site), rows if project is None else rows @ project.T, atol=1e-4)


@pytest.mark.parametrize("asked", [
    {"project": Project(1e6 * np.eye(16, dtype=np.float32)[:2])}, {"sums": True},
    {"project": Project(1e6 * np.eye(16, dtype=np.float32)[:2], on_device=False)},
])  # fmt: skip
def test_numbers_beyond_float16_are_an_error_that_names_site_and_document(lm, tmp_path, asked, monkeypatch):
    if "sums" in asked:
        monkeypatch.setattr(SiteReduction, "__call__", lambda self, rows: 1e6 * rows.sum(axis=0, keepdims=True))
    asked = {"sites": "resid_post[1]", **asked}
    with pytest.raises(pc.NotFinite, match=r"resid_post\[1\]") as caught:
        make(lm, [[BOS, 5, 6], [BOS, 7]], tmp_path, dtype="float16", **asked)
    assert caught.value.path.startswith("document ")
    assert np.isfinite(all_rows(make(lm, [[BOS, 5, 6], [BOS, 7]], tmp_path, **asked).open(), "resid_post[1]")).all()


def test_a_capture_beyond_float16_fails_its_own_run_alone(lm):
    scale = pc.Scale(1e6, at="resid_post[1]", tokens="prompt[2]")
    captures = [pc.Capture("resid_post[1]", dtype="float16")]
    far, near = lm.run([[0, 5, 6, 7]] * 2, max_tokens=1, edits=[[scale], []], capture=captures)
    with pytest.raises(pc.NotFinite, match=r"resid_post\[1\] at position 2"):
        far["resid_post[1]"]
    assert np.isfinite(np.asarray(near["resid_post[1]"], np.float32)).all()
    stacked = lm.run([0, 5, 6, 7], max_tokens=1, edits=[scale], capture=[pc.Capture("resid_post", dtype="float16")])
    with pytest.raises(pc.NotFinite, match=r"^capture: resid_post\[\d\] at position 2"):
        stacked[pc.resid_post]
    wide = lm.run([0, 5, 6, 7], max_tokens=1, edits=[scale], capture=["resid_post[1]"])["resid_post[1]"]
    assert np.isfinite(wide).all()


def test_a_slow_disk_holds_back_admission_and_loses_nothing(lm, documents, tmp_path, monkeypatch):
    """Until the disk goes on, each writer has a batch, one waits in `put`, and others are under way."""
    held, submissions = threading.Event(), []
    write, submit = shards.PartWriter.write, lm.engine.submit
    most = shards.WRITERS + 1 + UNDER_WAY

    def submitted(requests):
        submissions.append(len(requests))
        if len(submissions) >= most - 1:
            threading.Timer(0.3, held.set).start()  # long enough to submit all the others
        return submit(requests)

    def slow(*args):
        before = held.is_set()
        assert held.wait(60)
        if not before:
            assert len(submissions) <= most
        write(*args)

    monkeypatch.setattr(lm.engine, "submit", submitted)
    monkeypatch.setattr(shards.PartWriter, "write", slow)
    data = make(lm, documents, tmp_path, batch_tokens=20).open()
    assert len(submissions) > 20
    assert sorted(places(data)) == sorted((d, p) for d, document in enumerate(documents) for p in range(len(document)))


def test_a_disk_that_is_too_small_is_told_before_anything_runs(lm, documents, tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    monkeypatch.setattr(lm.engine, "submit", lambda requests: pytest.fail("something ran"))
    with pytest.raises(CapacityError, match="free"):
        make(lm, documents, tmp_path)


def test_an_error_of_the_disk_is_raised(lm, documents, tmp_path, monkeypatch):
    def broken(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr(shards.PartWriter, "write", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        make(lm, documents, tmp_path)


# -- what is said


@pytest.mark.parametrize(("asked", "kind", "text"), [
    ({"sites": []}, ProgramError, "sites: "),
    ({"sites": ["resid_pots"]}, UnknownName, "sites[0]: unknown site 'resid_pots'"),
    ({"sites": "logits"}, pc.UnsupportedSite, "sites[0]: logits"),
    ({"dtype": "int8"}, UnknownName, "int8"),
    ({"seed": -1}, ProgramError, "seed: "),
    ({"parts": 0}, ProgramError, "parts: "),
    ({"shard": (2, 2)}, ProgramError, "shard: "),
    ({"shard": (0, 3), "parts": 2}, ProgramError, "parts: "),
    ({"shard": 2}, ProgramError, "shard: "),
    ({"shard": ("0", 2)}, ProgramError, "shard: "),
    ({"shard_rows": 0}, ProgramError, "shard_rows: "),
    ({"batch_tokens": True}, ProgramError, "batch_tokens: "),
    ({"checkpoint_bytes": -5}, ProgramError, "checkpoint_bytes: "),
    ({"checkpoint_bytes": "1"}, ProgramError, "checkpoint_bytes: "),
    ({"context": 999}, ProgramError, "context: expected 1 to 127"),
    ({"overlong": "drop"}, ProgramError, "overlong: unknown overlong 'drop'; available: refuse, cut, split"),
    ({"sums": True, "overlong": "split"}, ProgramError, "overlong: 'split'"),
    ({"project": np.ones((3, 4))}, pc.ShapeError, "project: resid_post[1]: "),
    ({"project": {"resid_post[0]": np.ones((3, 16))}}, ProgramError, "project: "),
    ({"filters": Filters(only_tokens=(63,))}, ProgramError, "filters: "),
    ({"column": "text"}, ProgramError, "column: "),
])  # fmt: skip
def test_errors_say_what_is_wrong(lm, documents, tmp_path, asked, kind, text):
    with pytest.raises(kind) as error:
        make(lm, documents, tmp_path, **asked)
    assert text in str(error.value)
    assert not any(tmp_path.iterdir())


def test_documents_that_are_none_are_refused(lm, tmp_path):
    for documents, text in [([], "documents: .*non-empty"), ([[]], "documents: .*non-empty"), ([[2], [64]], "document 1: "),
                            ([[1.5]], r"documents: .*1\.5"), (5, "documents: .*int")]:  # fmt: skip
        with pytest.raises(ProgramError, match=text):
            make(lm, documents, tmp_path)


@pytest.mark.parametrize(("wrong", "text"), [
    ({"norm_cap": 0.0}, "filters.norm_cap: "), ({"norm_cap": True}, "filters.norm_cap: "), ({"no_bos": 1}, "filters.no_bos: "),
    ({"norm_times_median": float("nan")}, "filters.norm_times_median: "),
    ({"positions": (4, None)}, "filters.positions: "),
    ({"positions": ((0.5, None),)}, "filters.positions: "), ({"not_tokens": ("x",)}, "filters.not_tokens: "),
    ({"only_tokens": 5}, "filters.only_tokens: "),
])  # fmt: skip
def test_filters_that_are_none_are_refused(wrong, text):
    with pytest.raises(ProgramError) as error:
        Filters(**wrong)
    assert text in str(error.value)


def test_filters_take_numpys_numbers():
    ids = np.arange(3)
    filters = Filters(only_tokens=ids, positions=[[ids[1], None]], norm_cap=np.float32(2))
    assert filters == Filters(only_tokens=(0, 1, 2), positions=((1, None),), norm_cap=2.0)
    assert type(filters.only_tokens[0]) is type(filters.positions[0][0]) is int


def test_the_result_is_saved_and_loaded(lm, documents, tmp_path):
    made = make(lm, documents, tmp_path)
    loaded = HarvestResult.load(made.save(tmp_path / "result"))
    assert loaded.provenance.seeds == (0,)
    assert loaded.open().sites == SITES
    assert loaded.tokens == loaded.ran == sum(map(len, documents))
    assert Harvested(tmp_path).folder == Path(loaded.folder)  # the only one in it
    with pytest.raises(ProgramError, match=r"folder: .*no manifest"):
        Harvested(tmp_path / "nothing")
    other = make(lm, documents, tmp_path, seed=99)
    names = sorted(Path(of.folder).name for of in (loaded, other))
    with pytest.raises(ProgramError, match=f"folder: .*{', '.join(names)}"):
        Harvested(tmp_path)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_bfloat16_is_rounded_as_torch_does(values):
    torch = pytest.importorskip("torch")
    rows = np.array(values, np.float32)
    ours, theirs = to_float32(to_bfloat16(rows), "bfloat16"), torch.from_numpy(rows).bfloat16().float().numpy()
    np.testing.assert_array_equal(ours, theirs)
