"""Rows of several parts are read as one exact shuffle, in one order by all readers, and nothing is written anew."""

from __future__ import annotations

import collections
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchclamp.errors import ProgramError
from patchclamp.lm import LM
from patchclamp.studies.harvest import Harvested, harvest, recipe
from patchclamp.studies.harvest.recipe import ReadingOrder
from patchclamp.testing import FakeEngine
from tests.reference.harvest import chi_square, no_disk  # noqa: F401

SITES = ["resid_post[1]", "z[0, 1]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Harvested:
    """Three parts, that three machines made and somebody copied together."""
    pytest.importorskip("pyarrow")
    documents = np.random.default_rng(1).integers(2, 60, (160, 64)).tolist()
    folder = tmp_path_factory.mktemp("parts")
    with LM("", FakeEngine()) as lm:
        for machine in range(3):
            made = harvest(lm, documents, folder / str(machine), sites=SITES, dtype="float32", shard_rows=1000,
                           batch_tokens=4096, shard=(machine, 3), seed=5)  # fmt: skip
            name = Path(made.folder).name
            shutil.copytree(made.folder, folder / "all" / name, dirs_exist_ok=True)
    return Harvested(folder / "all" / name)


def placed(data: Harvested) -> tuple[np.ndarray, np.ndarray]:
    index = data.index()
    return index["document"].to_numpy(), index["position"].to_numpy()


def test_a_chi_square_over_places_holds_across_parts(data):
    """Documents and positions against stretches of places; part after part, they are not shuffled."""
    assert data.complete
    assert len(data.manifest.part_rows) == 3
    stretch = np.arange(len(data)) * 16 // len(data)

    def statistic(read: Harvested, values: np.ndarray) -> float:
        table = np.zeros((16, 16))
        np.add.at(table, (values * 16 // (values.max() + 1), stretch), 1)
        return abs(chi_square(table)[0])

    for column in (0, 1):
        assert statistic(data, placed(data)[column]) < 4.5
    # a document's part says where it lies when the parts are read one after the other
    parts = np.array([n for n, rows in enumerate(data.manifest.part_rows) for _ in range(rows)])
    separate = Harvested(data.folder, interleave=False)
    part_of_document = dict(zip(placed(separate)[0].tolist(), parts.tolist(), strict=True))
    ranked = {document: i for i, document in enumerate(sorted(part_of_document, key=part_of_document.__getitem__))}
    assert statistic(data, np.array([ranked[document] for document in placed(data)[0].tolist()])) < 4.5
    assert statistic(separate, np.array([ranked[document] for document in placed(separate)[0].tolist()])) > 50


def test_every_way_to_interleave_is_as_likely_as_any(monkeypatch):
    """Of 2, 1 and 2 rows there are 30 ways; also where a block has two places only."""
    monkeypatch.setattr(recipe, "BLOCK", 2)
    seeds = 6000
    seen = collections.Counter(tuple(ReadingOrder([1, 1, 1, 2], [0, 0, 1, 2], seed).stored()) for seed in range(seeds))
    ways = {
        way for way in itertools.permutations(range(5)) if way.index(0) < way.index(1) and way.index(3) < way.index(4)
    }
    assert seen.keys() == ways
    expected = seeds / len(ways)
    statistic = sum((count - expected) ** 2 / expected for count in seen.values())
    assert abs(statistic - (len(ways) - 1)) / np.sqrt(2 * (len(ways) - 1)) < 4.5


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 3)), min_size=1, max_size=9), st.integers(0, 2**63 - 1),
       st.integers(1, 50), st.data())  # fmt: skip
def test_any_stretch_is_that_of_the_whole(shards, seed, most, draw):
    shards.sort(key=lambda shard: shard[1])
    rows, parts = [rows for rows, _ in shards], [part for _, part in shards]
    ends = np.append(0, np.cumsum(rows))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recipe, "BLOCK", 16)
        reading = ReadingOrder(rows, parts, seed)
        begin = draw.draw(st.integers(0, len(reading)))
        end = draw.draw(st.integers(begin, len(reading)))
        stored = reading.stored()

        def columns(shard: int) -> dict[str, np.ndarray]:
            return {"row": np.arange(ends[shard], ends[shard + 1])}

        pieces = [piece["row"] for piece in reading.read(columns, begin, end, most)]
        places = [reading.place(n, reading.block) for n in range(begin, end)]
    assert sorted(stored.tolist()) == list(range(len(reading)))
    assert [len(piece) for piece in pieces] == [min(len(piece), most) for piece in pieces]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *pieces]), stored[begin:end])
    assert [ends[shard] + row for shard, row in places] == stored[begin:end].tolist()
    for part in set(parts):  # each part is read from end to end
        of_part = np.repeat(parts, rows)[stored] == part
        assert (np.diff(stored[of_part]) == 1).all()


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    """Who goes on with an order that they have read the half of needs the same half again."""
    reading = ReadingOrder([6000, 5000, 300], [0, 1, 2], 7)
    assert reading.stored()[:12].tolist() == [0, 6000, 11000, 11001, 11002, 6001, 1, 6002, 2, 3, 4, 5]
    assert reading.stored()[-6:].tolist() == [5996, 5997, 5998, 10998, 5999, 10999]


def test_too_many_rows_are_refused_with_what_to_do():
    with pytest.raises(ProgramError, match="interleave=False"):
        ReadingOrder([10**9, 1], [0, 1], 0).stored()
    assert ReadingOrder([10**9, 1], [0, 0], 0).place(10**9, ReadingOrder([10**9, 1], [0, 0], 0).block) == (1, 0)


def test_all_readers_have_one_order(data, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("datasets")
    wide = np.concatenate(list(data.blocks(SITES[0], 700)))
    index = data.index()
    by_place = {}
    for shard in data.shards:
        of = data.index(shard).to_pydict()
        for row, key in zip(data.array(SITES[0], shard), zip(of["document"], of["position"], strict=True), strict=True):
            by_place[key] = row
    keys = list(zip(index["document"].to_pylist(), index["position"].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys) == len(data) == 160 * 64
    assert np.array_equal(wide, np.stack([by_place[key] for key in keys]))
    rows = data.torch(SITES[0])
    for number in (0, 1, 4095, 4096, len(data) - 1, -1):
        assert torch.equal(rows[number], torch.from_numpy(wide[number]))
    assert torch.equal(torch.cat(list(data.batches(SITES[0], 999))), torch.from_numpy(wide))
    loader = torch.utils.data.DataLoader(data.batches(SITES[0], 512), batch_size=None, num_workers=2)
    halves = [wide[: len(wide) // 2], wide[len(wide) // 2 :]]
    of_workers = [torch.cat(list(loader)[begin::2]) for begin in (0, 1)]
    assert all(torch.equal(read, torch.from_numpy(half)) for read, half in zip(of_workers, halves, strict=True))
    records = list(itertools.islice(data.datasets(SITES[0]), 5000))
    assert [(record["document"], record["position"]) for record in records] == keys[:5000]
    assert np.array_equal(np.array(records[4999][SITES[0]], np.float32), wide[4999])
    made = data.activation_buffer(SITES[0], out_batch_size=64)
    assert torch.equal(next(made), torch.from_numpy(wide[:64]))
    assert not np.array_equal(
        np.concatenate(list(Harvested(data.folder, interleave=False).blocks(site=SITES[0]))), wide
    )
