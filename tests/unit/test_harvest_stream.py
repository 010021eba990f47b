"""A stream has the rows of the written harvest, part after part, and holds two parts; ending it early stops the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import ProgramError
from patchclamp.lm import LM
from patchclamp.studies.harvest import Filters, Harvest, Harvested
from patchclamp.studies.harvest.recipe import parts_of
from patchclamp.studies.harvest.stream import StreamedPart
from patchclamp.testing import FakeEngine
from tests.reference.harvest import no_disk  # noqa: F401

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
SITES = ["resid_post[1]", "z[0, 1]"]
WIDTH = 16


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(11)
    return [draw.integers(2, 60, draw.integers(1, 30)).tolist() for _ in range(60)]


def study(documents, **fields) -> Harvest:
    return Harvest(
        **{"documents": documents, "sites": SITES, "dtype": "float32", "shard_rows": 50, "parts": 4} | fields
    )


PROJECT = {
    site: np.random.default_rng(5).standard_normal((3, width)) for site, width in zip(SITES, (16, 8), strict=True)
}


@pytest.mark.parametrize("fields", [
    {}, {"parts": 1, "seed": 3}, {"dtype": "bfloat16", "sites": [*SITES, "mlp_out[0:2]"]}, {"project": PROJECT},
    {"sums": True}, {"filters": Filters(positions=((2, None),), norm_times_median=1.1)},
    {"sums": True, "filters": Filters(norm_cap=5.5), "project": PROJECT}, {"context": 7, "overlong": "split"},
    {"parts": 200},  # some have no rows
], ids=["plain", "one part", "bfloat16", "projected", "sums", "capped", "capped sums", "split", "many parts"])  # fmt: skip
def test_a_stream_is_the_written_harvest_part_after_part(documents, tmp_path, fields):
    made = study(documents, **fields)
    with LM("", FakeEngine()) as lm:
        written = Harvest(**{name: getattr(made, name) for name in made.fields()} | {"folder": tmp_path}).run(lm)
        data = Harvested(written.folder, interleave=False)
        stream = made.stream(lm, batch_rows=64, index=True, batch_tokens=40)
        expected, got = list(data.batches(size=64, index=True)), list(stream)
        assert len(got) == len(expected) > 0
        for ours, theirs in zip(got, expected, strict=True):
            assert set(ours) == set(theirs)
            for name, column in theirs.items():
                assert ours[name] == column if isinstance(column, list) else torch.equal(ours[name], column), name
                assert getattr(ours[name], "dtype", None) == getattr(column, "dtype", None)
        assert stream.rows == written.rows >= len(data)
        assert stream.widths == {site: data.width(site) for site in data.sites}
        assert (stream.config["harvest"], stream.dtype) == (data.folder.name, data.dtype)
        assert lm.engine.status()["runs"] == 0
        if data.manifest.recipe.parts > 1 and len(data) > 1:
            interleaved = next(iter(Harvested(written.folder).batches(size=len(data), index=True)))["document"]
            assert not torch.equal(interleaved, torch.cat([batch["document"] for batch in got]))


def test_batches_of_one_site_are_tensors_and_each_iteration_runs_again(documents):
    with LM("", FakeEngine()) as lm:
        stream = study(documents, sites=SITES[:1]).stream(lm, batch_rows=100)
        once = list(stream)
        assert [len(batch) for batch in once] == [100] * (stream.rows // 100) + [stream.rows % 100]
        loader = torch.utils.data.DataLoader(stream, batch_size=None)
        assert torch.equal(torch.cat(list(loader)), torch.cat(once))
        with pytest.raises(ProgramError, match="num_workers=0"):
            list(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=1))
        shares = [torch.cat(list(study(documents, sites=SITES[:1]).stream(lm, shard=(i, 2)))) for i in range(2)]
        assert sorted(torch.cat(shares).tolist()) == sorted(torch.cat(once).tolist())


def counting(lm: LM, monkeypatch) -> list[int]:
    """The lengths of the documents that the engine is given, which takes a while for each."""
    ran, submit = [], lm.engine.submit

    def slowly(requests):
        time.sleep(0.02)
        ran.extend(len(request.prompt_token_ids) for request in requests)
        return submit(requests)

    monkeypatch.setattr(lm.engine, "submit", slowly)
    return ran


def settled(ran: list[int]) -> int:
    """How many documents the engine has been given, once it waits."""
    count = -1
    while count != len(ran):
        count = len(ran)
        time.sleep(0.5)
    return count


def test_two_parts_are_in_memory_and_the_engine_waits_for_the_reader(documents, monkeypatch):
    alive, most = [], []
    fill = StreamedPart.open

    def opened(part):
        fill(part)
        alive.extend(weakref.ref(rows) for rows in part._whole.values())
        most.append(sum(rows() is not None for rows in alive))

    monkeypatch.setattr(StreamedPart, "open", opened)
    with LM("", FakeEngine()) as lm:
        ran = counting(lm, monkeypatch)
        stream = study(documents, parts=10).stream(lm, batch_rows=7, batch_tokens=20)
        batches = iter(stream)
        assert ran == []  # nothing runs before the first batch is asked for
        next(batches)
        assert 0 < settled(ran) < len(documents) / 2
        assert len(most) == 2
        assert sum(len(batch[SITES[0]]) for batch in batches) == stream.rows - 7
        assert len(ran) == len(documents)
    assert (len(most), max(most)) == (10, 2 * len(SITES))
    assert not any(rows() is not None for rows in alive)


@pytest.mark.parametrize(("way", "parts"), [("close", 10), ("error", 2), ("dropped", 2)])
def test_a_reader_that_ends_early_stops_the_engine_and_frees_captures(documents, monkeypatch, way, parts):
    before = {thread.name for thread in threading.enumerate()}
    with LM("", FakeEngine()) as lm:
        ran = counting(lm, monkeypatch)
        batches = iter(study(documents, parts=parts).stream(lm, batch_rows=7, batch_tokens=20))
        next(batches)
        if way == "close":
            settled(ran)  # the engine's thread waits for room
            batches.close()
        elif way == "dropped":
            del batches
        else:
            with pytest.raises(ZeroDivisionError):
                batches.throw(ZeroDivisionError)
        ended = len(ran)
        assert {
            name for name in {thread.name for thread in threading.enumerate()} - before if "stream" in name
        } == set()
        assert settled(ran) == ended < len(documents)
        assert lm.engine.status()["runs"] == 0
        assert lm.run([3, 4], max_tokens=1, capture=SITES)[SITES[0]].shape == (2, WIDTH)


class Failing(FakeEngine):
    """Fails the requests whose prompt has a given token."""

    def submit(self, requests):
        futures = super().submit(requests)
        for number, request in enumerate(requests):
            if 61 in request.prompt_token_ids:
                futures[number] = type(futures[number])()
                futures[number].set_exception(pc.RunError("it failed while it ran"))
        return futures


def test_an_error_of_a_document_comes_with_its_number_after_the_parts_before(documents):
    made = study(documents)
    with LM("", FakeEngine()) as lm:
        plan = made.stream(lm)._plan
        whole = torch.cat([batch[SITES[0]] for batch in made.stream(lm)])
    parts = np.array([parts_of(len(documents), 0, 4)]).ravel()
    wrong = int(np.flatnonzero(parts == 2)[3])
    documents = [[*ids[:-1], 61] if number == wrong else ids for number, ids in enumerate(documents)]
    got = []
    with LM("", Failing()) as failing:
        with pytest.raises(pc.RunError, match=f"document {wrong}: it failed while it ran"):
            got.extend(batch[SITES[0]] for batch in study(documents).stream(failing, batch_rows=1))
        assert failing.engine.status()["runs"] == 0
    before = sum(plan.part_rows[:2])
    assert torch.equal(torch.cat(got), whole[:before])


def test_kept_columns_come_with_the_rows(tmp_path):
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": label, "name": text[:3]}) + "\n"
                for text, label in [("The cat sat", 1), ("Rome is in Italy", 0), ("the dog", 1)])
    )  # fmt: skip
    made = Harvest(documents=tmp_path / "texts.jsonl", sites=SITES[:1], keep=["label", "name"], parts=2)
    with LM("", FakeEngine()) as lm:
        for batch in made.stream(lm, batch_rows=3, index=True):
            assert batch["label"].tolist() == [[1, 0, 1][document] for document in batch["document"]]
            assert batch["name"] == [["The", "Rom", "the"][document] for document in batch["document"]]
        assert isinstance(next(iter(made.stream(lm))), torch.Tensor)


def test_wrong_arguments_of_a_stream(documents):
    with LM("", FakeEngine()) as lm:
        for wrong, path in [({"batch_rows": 0}, "batch_rows"), ({"index": 2}, "index"), ({"shard": (2, 2)}, "shard"),
                            ({"shard": (0, 5)}, "parts"), ({"batch_tokens": 0}, "batch_tokens")]:  # fmt: skip
            with pytest.raises(ProgramError) as error:
                study(documents).stream(lm, **wrong)
            assert error.value.path == path
        with pytest.raises(ProgramError) as error:
            study(documents, sites=[*SITES, pc.Features("s", top=2)]).stream(lm)
        assert error.value.path == "sites"
        with pytest.raises(ProgramError) as error:
            study(documents).run(lm)
        assert error.value.path == "folder"


def test_python_exits_while_a_stream_is_being_read():
    """A trainer that has enough rows keeps the iterator."""
    code = """
import numpy as np, patchclamp as pc
from patchclamp.studies.harvest.recipe import parts_of
from patchclamp.studies.harvest.stream import StreamedPart
import time
lm = pc.LM("fake", prove=False)
documents = [list(range(2, 30))] * 200
batches = iter(pc.studies.Harvest(documents=documents, sites=["resid_post[1]"], parts=20).stream(lm, batch_rows=8))
print(len(next(batches)))
time.sleep(1.5)  # the engine's thread waits for room
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "8\n"
