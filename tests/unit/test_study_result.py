"""Results of studies are saved in one file and come back the same, and what is no such file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import patchclamp as pc
from patchclamp.studies import study
from patchclamp.studies.study import StudyResult, provenance


class Part(msgspec.Struct, frozen=True, eq=False):
    name: str
    values: np.ndarray


class Example(StudyResult, frozen=True, eq=False, kw_only=True):
    floor: float
    tokens: tuple[str, ...]
    grid: np.ndarray
    parts: tuple[Part, ...]


class Other(StudyResult, frozen=True, eq=False, kw_only=True):
    floor: float


def example() -> Example:
    draw = np.random.default_rng(3)
    with pc.LM("fake") as lm:
        made = provenance(lm, (3, 5))
    parts = (Part("a", draw.integers(0, 9, 4)), Part("b", np.full((2, 0), np.nan)))
    return Example(provenance=made, floor=0.1, tokens=("é", "\n"), grid=draw.normal(size=(2, 3)).T, parts=parts)


def test_a_saved_result_comes_back_to_the_bit(tmp_path: Path):
    result = example()
    loaded = Example.load(result.save(tmp_path / "result.safetensors"))
    assert loaded.provenance == result.provenance
    assert loaded.provenance.seeds == (3, 5)
    assert (loaded.floor, loaded.tokens) == (0.1, ("é", "\n"))
    assert loaded.grid.tobytes() == np.ascontiguousarray(result.grid).tobytes()
    assert [part.name for part in loaded.parts] == ["a", "b"]
    for one, other in zip(loaded.parts, result.parts, strict=True):
        assert one.values.dtype == other.values.dtype
        assert np.array_equal(one.values, other.values)


def test_saving_makes_the_folder_or_says_why_not(tmp_path: Path):
    result = example()
    assert result.save(tmp_path / "some" / "where" / "result").exists()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "result"):
        with pytest.raises(pc.ProgramError, match="cannot write") as raised:
            result.save(path)
        assert raised.value.path == "path"


@pytest.mark.parametrize("what", ["missing", "garbage", "foreign", "another study"])
def test_other_files_are_refused(tmp_path: Path, what: str):
    path = tmp_path / "file"
    if what == "garbage":
        path.write_bytes(b"\x80pickle")
    elif what == "foreign":
        save_file({"0": np.zeros(2)}, path)
    elif what == "another study":
        Other(provenance=example().provenance, floor=1.0).save(path)
    with pytest.raises(pc.ProgramError, match="file"):
        Example.load(path)


ASKED: dict[str, Any] = {"clean": [11, 12, 13], "corrupt": [11, 14, 13], "answer": 5, "layers": 1}


def test_a_config_has_the_hash_of_an_array_and_can_be_saved(tmp_path: Path):
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(3000, 16)).astype(np.float32)
    for made in (rows, torch.from_numpy(rows)):
        config = pc.studies.LogitLens(prompt="a", unembedding=made, translators={0: made}).to_dict()
        assert config["unembedding"] == config["translators"]["0"]
        assert config["unembedding"]["shape"] == [3000, 16]
        assert len(msgspec.json.encode(config)) < 500
    other = pc.studies.LogitLens(prompt="a", unembedding=rows + 1).to_dict()
    assert other["unembedding"] != config["unembedding"]
    Example.load(msgspec.structs.replace(example(), config=config).save(tmp_path / "result"))


def test_a_config_is_what_was_given_and_stays_so():
    prompts = ["a", "b"]
    study = pc.studies.FuzzSweep(prompts=prompts, seeds=range(2), strengths=(x / 10 for x in range(3)))
    before = study.to_dict()
    prompts.append("c")
    assert before["prompts"] == ["a", "b"]
    assert before["seeds"] == [0, 1]
    assert before["strengths"] == [0.0, 0.1, 0.2]
    assert study.to_dict() == before
    assert pc.studies.AblationSweep(prompt="a", answer="b", positions=slice(0, 2)).to_dict()["positions"] == "0:2"
    for change in (lambda: setattr(study, "seeds", 1), lambda: delattr(study, "seeds")):
        with pytest.raises(AttributeError, match="frozen"):
            change()


def test_studies_with_equal_fields_are_equal():
    one, other = (pc.studies.PatchSweep(**ASKED, sites=sites) for sites in (["resid_pre"], ("resid_pre",)))
    assert one == other == pc.studies.PatchSweep(**ASKED)
    assert len({one, other}) == 1
    assert "sites" not in one.to_dict(), "it is the default"
    assert one != pc.studies.PatchSweep(**ASKED, window=2)
    assert one != pc.studies.PathPatch(**ASKED)


def test_a_study_may_be_derived_from():
    class Narrow(pc.studies.PatchSweep):
        """A sweep with one more field."""

        width: int = 3
        """Its width."""

    assert list(Narrow.fields()) == [*pc.studies.PatchSweep.fields(), "width"]
    assert Narrow.fields()["width"].doc == "Its width."
    assert Narrow.fields()["clean"].doc == pc.studies.PatchSweep.fields()["clean"].doc
    assert (Narrow(**ASKED).width, Narrow(**ASKED).answer) == (3, 5)


def test_a_result_without_a_picture_shows_as_text():
    assert example()._repr_html_() is None


def test_progress_without_a_terminal_is_a_line_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr(study, "LINE_S", 0.0)
    monkeypatch.setattr(study, "KNOWN_S", 0.0)
    with pc.LM("fake", prove=False) as lm:
        asked = {"prompt": "The cat sat", "answer": " on", "metric": "logprob", "sites": ["resid_pre"]}
        pc.studies.ablation_sweep(lm, **asked, show_progress=False)
        assert capsys.readouterr().err == ""
        pc.studies.ablation_sweep(lm, **asked)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("ablating: ") or " of " in lines[-1]
    assert all(line.endswith("min left") for line in lines)
