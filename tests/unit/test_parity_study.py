"""Parity: what is out of tolerance is found and named, in the table, in the JSON and in the exit status."""

from __future__ import annotations

import importlib
import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.studies.parity import Bounds, Parity, SiteParity

study = importlib.import_module("patchclamp.studies.parity")
FAKE = ("fake", "fake")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments: str) -> tuple[int, str, str]:
    """A command's (exit status, standard output, standard error)."""
    done = CliRunner().invoke(app, ["parity", "fake", "--engine", "fake", "--against", "fake", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def disturbed(monkeypatch, change) -> None:
    """Lets `change` alter what the second engine is seen to do."""
    observe, seen = study._observe, []

    def altered(*given):
        found = observe(*given)
        seen.append(found)
        return found if len(seen) == 1 else change(found)

    monkeypatch.setattr(study, "_observe", altered)


def with_rows(found, place: str, factor: float):
    kept = [one._replace(rows={**one.rows, place: one.rows[place] * np.float32(factor)}) for one in found.kept]
    return found._replace(kept=kept)


class TestApart:
    def test_it_is_the_worst_row(self):
        b = np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)
        assert study.apart(b, b) == 0
        assert study.apart(b + np.array([[0, 0.5], [0, 0.2]], np.float32), b) == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [([[np.nan, 1]], [[1, 1]]), ([[1, 1]], [[0, 0]]), ([[1, 1]], [[1, 1, 1]]), (np.zeros((0, 2)), [[1, 1]]),
         ([[np.inf, 1]], [[np.inf, 1]])],
    )  # fmt: skip
    def test_what_has_no_number_is_infinitely_far(self, ours, theirs):
        assert study.apart(np.array(ours, np.float32), np.array(theirs, np.float32)) == np.inf

    def test_rows_of_zeros_are_equal(self):
        assert study.apart(np.zeros((2, 3)), np.zeros((2, 3))) == 0


class TestStudy:
    def test_an_engine_equals_itself_at_every_place(self):
        found = pc.studies.parity("fake", engines=FAKE, prompts=["The Eiffel Tower is in", [3, 4, 5]])
        with pc.LM("fake") as lm:
            assert [site.name for site in found.sites] == lm.sites.names
            assert found.gaps.keys() == {str(place) for place in lm.sites.refs()}
        assert found.holds
        assert found.problems == ()
        assert found.first is None
        assert max(found.gaps.values()) == 0
        assert all(site.moved > 0.01 and site.edit == 0 for site in found.sites)
        assert (found.prompts, found.equal_tokens, found.engines[0].split()[0]) == (2, (8, 8), "fake")

    def test_other_weights_are_seen_everywhere(self):
        found = pc.studies.parity("fake", engines=FAKE, seed=1)
        assert not found.holds
        assert found.first == "embed"
        assert all(found.leaves(site) == site.places[0] for site in found.sites)
        assert not any(found.moves(site) for site in found.sites if site.name != "logits")

    def test_a_row_that_is_off_is_named_with_the_first_layer(self, monkeypatch):
        disturbed(monkeypatch, lambda found: with_rows(with_rows(found, "mlp_out[1]", 1.001), "mlp_out[2]", 1.01))
        found = pc.studies.parity("fake", engines=FAKE)
        (site,) = [site for site in found.sites if site.name == "mlp_out"]
        assert (found.leaves(site), site.worst_at) == ("mlp_out[1]", "mlp_out[2]")
        assert site.worst == pytest.approx(0.01, rel=1e-3)
        assert found.first == "mlp_out[1]"
        (problem,) = found.problems
        assert all(part in problem for part in ("mlp_out[1]", "mlp_out[2]", "0.01", "0.0001"))
        seen = []
        disturbed(monkeypatch, lambda found: seen.append(1) or with_rows(found, "mlp_out[1]", 1.001))
        assert pc.studies.parity("fake", engines=FAKE, tolerance=0.02).holds

    def test_an_edit_that_acts_otherwise_is_named(self, monkeypatch):
        disturbed(monkeypatch, lambda found: found._replace(moved={**found.moved, "q": found.moved["q"] + 0.002}))
        found = pc.studies.parity("fake", engines=FAKE)
        (problem,) = found.problems
        assert all(part in problem for part in ("q[1]", "differently", "0.002", "0.001"))
        assert found.first is None

    def test_an_edit_that_does_nothing_proves_nothing(self, monkeypatch):
        still = study._moves

        def moves(*given):
            moved, noise = still(*given)
            return {**moved, "v": np.zeros(64)}, noise

        monkeypatch.setattr(study, "_moves", moves)
        found = pc.studies.parity("fake", engines=FAKE)
        (problem,) = found.problems
        assert all(part in problem for part in ("v[1]", "does not move", "fake 0.1.1 and fake 0.1.1"))

    @pytest.mark.parametrize("noise", [0.0, 1.0])
    @pytest.mark.parametrize("dtype", study.BOUNDS)
    def test_a_write_that_is_lost_on_one_engine_is_seen_in_every_dtype(self, monkeypatch, dtype, noise):
        monkeypatch.setattr(study, "_bounds", lambda *asked: study.BOUNDS[dtype])

        def lost(found):
            moved = found.moved["k"] * 0 if noise == 0 else found.moved["k"]
            return found._replace(moved={**found.moved, "k": moved}, noise=noise)

        disturbed(monkeypatch, lost)
        found = pc.studies.parity("fake", engines=FAKE)
        assert "an edit at k[1] does not move the logits of fake 0.1.1" in found.problems
        assert not found.holds

    def test_log_probabilities_and_sites_of_one_engine(self, monkeypatch):
        def change(found):
            kept = [one._replace(logprobs=one.logprobs + 0.01) for one in found.kept]
            for one in kept:
                del one.rows["embed"]
            return found._replace(kept=kept, moved={n: m for n, m in found.moved.items() if n != "embed"})

        disturbed(monkeypatch, change)
        found = pc.studies.parity("fake", engines=FAKE)
        alone, apart = found.problems
        assert "embed" in alone
        assert all(part in apart for part in ("log-probabilities", "0.01", "0.001"))

    def test_where_tokens_part_rows_are_compared_no_further(self, monkeypatch):
        def change(found):
            first, *rest = found.kept
            n, tokens = len(first.prompt), [first.tokens[0], first.tokens[1] + 1, *first.tokens[2:]]
            rows = {place: rows.copy() for place, rows in first.rows.items()}
            for place, late in rows.items():
                late[2 if place == "logits" else n + 1 :] = 7
            return found._replace(kept=[first._replace(tokens=tokens, rows=rows), *rest])

        disturbed(monkeypatch, change)
        found = pc.studies.parity("fake", engines=FAKE, prompts=["The Eiffel Tower", "The"])
        assert found.holds
        assert found.equal_tokens == (5, 8)

    def test_the_first_place_is_the_first_that_is_computed(self):
        gaps = {"embed": 0.0, "attn_in[10]": 1.0, "resid_post[2]": 1.0, "z[2]": 1.0, "final_norm": 1.0, "q[3]": 1.0}
        site = SiteParity("z", ("z[2]",), 1.0, "z[2]", "z[2]", 1.0, 0.0, 1.0)
        found = Parity("m", "llama", "float32", ("a", "b"), 1, 1, (1, 1), Bounds(0.1, 0.1, 0.1), (site,), (), gaps, 0.0)
        assert found.first == "z[2]"
        assert msgspec.structs.replace(found, gaps={"logits": 1.0, "final_norm": 1.0}).first == "final_norm"
        assert msgspec.structs.replace(found, gaps={"mlp_out[0]": 1.0, "embed": np.nan}).first == "embed"
        assert {site.name for site in found.sites} <= set(pc.language.SITES)

    @pytest.mark.parametrize(
        ("wrong", "path"),
        [
            ({"dtype": "int8"}, "dtype"),
            ({"tolerance": 0.0}, "tolerance"),
            ({"prompts": [3, 4]}, "prompts[0]"),
            ({"prompts": []}, "prompts"),
        ],
    )
    def test_what_is_wrong_is_told_before_a_model_is_loaded(self, wrong, path, monkeypatch):
        monkeypatch.setattr(study, "_observe", None)
        with pytest.raises(pc.ProgramError) as raised:
            pc.studies.parity("fake", **{"engines": FAKE, **wrong})
        assert raised.value.path == path

    def test_the_first_engine_gets_what_says_how_a_model_is_read_and_nothing_else(self, monkeypatch):
        asked = []

        def lm(model, engine, **options):
            asked.append((engine, options))
            if len(asked) == 2:
                raise pc.EngineError("far enough")
            return given(model, "fake", prove=False)

        given = pc.LM
        monkeypatch.setattr("patchclamp.trace.TracedLM", lm)
        with pytest.raises(pc.EngineError, match="far enough"):
            pc.studies.parity("m", dtype="bfloat16", enforce_eager=True, trust_remote_code=True)
        read = {"prove": False, "dtype": "bfloat16", "trust_remote_code": True}
        assert asked == [("transformers", read), ("vllm", {**read, "enforce_eager": True})]


class TestCommand:
    def test_a_table_and_status_0(self):
        status, output, _ = run("--prompt", "The Eiffel Tower is in", "--max-tokens", "2")
        assert status == 0
        assert output.splitlines()[0].startswith("fake (llama, float32): fake")
        assert "1 prompts" not in output
        assert "1 prompt, " in output
        assert "2 of 2 generated tokens equal" in output
        for name in pc.LM("fake").sites.names:
            assert any(line.startswith(f"{name} ") for line in output.splitlines())
        assert output.splitlines()[-1] == (
            "all 15 sites are equal: rows within 0.0001, edits within 0.001, log-probabilities within 0.001"
        )

    def test_json_is_alone_on_standard_output(self):
        status, output, _ = run("--json")
        told = json.loads(output)
        assert status == 0
        assert (told["holds"], told["first_out"], told["problems"]) == (True, None, [])
        assert told["bounds"] == {"rows": 1e-4, "edit": 1e-3, "logprobs": 1e-3}
        sites = {site["name"]: site for site in told["sites"]}
        assert sites["z"]["places"] == {"z[0]": 0.0, "z[1]": 0.0, "z[2]": 0.0}
        assert (sites["z"]["holds"], sites["z"]["edit_holds"], sites["z"]["edit_at"]) == (True, True, "z[1]")

    def test_what_is_out_of_tolerance_is_status_1(self, monkeypatch):
        disturbed(monkeypatch, lambda found: with_rows(found, "k[1]", np.nan))
        status, output, _ = run()
        assert status == 1
        assert "out of tolerance" in output
        assert "k[1]" in output
        assert "are equal" not in output
        disturbed(monkeypatch, lambda found: with_rows(found, "k[1]", np.nan))
        status, output, _ = run("--json")
        told = json.loads(output)
        assert (status, told["holds"], told["first_out"]) == (1, False, "k[1]")
        assert next(site for site in told["sites"] if site["name"] == "k")["places"]["k[1]"] is None

    def test_options_are_those_of_the_engine(self):
        status, output, _ = run("--option", "seed=1", "--tolerance", "0.5")
        assert status == 1
        assert "(at most 0.5)" in output

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--dtype", "int8"], "error: dtype: no tolerances for 'int8'"),
            (["--engine", "vlm"], "error: --engine: unknown engine 'vlm'"),
            (["--option", "seed"], "error: --option: expected KEY=VALUE"),
        ],
    )
    def test_errors_are_one_line_and_status_2(self, arguments, text):
        status, output, error = run(*arguments)
        assert (status, output) == (2, "")
        assert error.splitlines()[-1].startswith(text)
