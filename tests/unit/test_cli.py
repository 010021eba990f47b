"""The command line: what it asks of the library, what it shows of the answer, and how it fails. No model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

import patchclamp as pc
from patchclamp import proving
from patchclamp.cli import commands
from patchclamp.cli.commands import read_options
from patchclamp.cli.study_commands import app, options_of, studies_by_command
from patchclamp.plots import style
from patchclamp.plots.style import visible
from patchclamp.proving import Proof, ensure_proved
from patchclamp.studies import AblationSweepResult, CausalTraceResult, MeanOf, PatchSweepResult, PathPatchResult

SWEEP = ("sweep", "fake", "--engine", "fake", "--clean", "The Eiffel is in the", "--corrupt", "The Colosseum is in the",
         "--answer", " Paris", "--foil", " Rome")  # fmt: skip
PROVING = sys.modules[ensure_proved.__module__]  # `prove` names a function, too


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    """One for the file: the fake engine is proved once."""
    monkeypatch.setenv("PATCHCLAMP_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def run(*arguments: str):
    """A command's (exit status, output)."""
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def failed(*arguments: str) -> str:
    """The single line of a command that must fail with status 2."""
    status, output = run(*arguments)
    lines = output.splitlines()
    assert status == 2, output
    assert len(lines) == 1, output
    assert lines[0].startswith("error: ")
    return lines[0]


def descendants(kind: type) -> list[type]:
    return [one for child in kind.__subclasses__() for one in (child, *descendants(child))]


class TestFront:
    @pytest.mark.parametrize("arguments", [(), ("sweep",), ("sites",), ("demo",)])
    def test_help(self, arguments: tuple[str, ...]):
        status, output = run(*arguments, "--help")
        assert status == 0
        assert "Usage: patchclamp" in output
        named = {(): ("sweep", "sites", "demo", "--version"), ("sites",): ("--json",), ("demo",): ("--out",)}
        sweeps = ("--clean", "--corrupt", "--answer", "--foil", "--site", "--metric", "--layers", "--positions",
                  "--engine", "--dtype", "--option", "--png", "--html", "--top")  # fmt: skip
        assert all(name in output for name in named.get(arguments, sweeps))

    def test_every_study_has_its_command(self):
        made = [
            kind for kind in descendants(pc.studies.Study) if "short" in vars(kind) and kind.__module__ in sys.modules
        ]
        assert set(made) == set(pc.studies.STUDIES.values())
        named = [study.command for study in pc.studies.STUDIES.values() if study.command]
        assert sorted(named) == sorted(studies_by_command())
        assert all(name in run("--help")[1] for name in (*named, *(one.__name__ for one in commands.COMMANDS)))

    @pytest.mark.parametrize("command", studies_by_command())
    def test_every_field_is_an_option_with_help(self, command):
        shown = run(command, "--help")[1]
        study = studies_by_command()[command]
        for name, field in study.fields().items():
            if field.arg.parse is not None:
                option = f"--{(field.arg.option or name).replace('_', '-')}"
                assert option in shown, option
                assert field.doc.split()[0] in shown
        assert not {"studies.", "pc.", "`"} & set(re.findall(r"studies\.|\bpc\.|`", shown))

    def test_version(self):
        assert run("--version") == (0, f"patchclamp {pc.__version__}\n")

    @pytest.mark.parametrize("command", ["parity", "sweep"])
    def test_help_loads_nothing_heavy(self, command: str):
        heavy = {"torch", "vllm", "transformers", "matplotlib", "plotly", "pandas"}
        heavy |= {"numpy"} if command == "parity" else set()  # help on a study is made of its fields
        code = (
            "import sys; from typer.testing import CliRunner; from patchclamp.cli.study_commands import app; "
            f"assert CliRunner().invoke(app, [{command!r}, '--help']).exit_code == 0; "
            f"print({heavy} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "set()\n", done.stderr


class TestArguments:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("max_model_len=512", 512), ("gpu_memory_utilization=0.5", 0.5), ("enforce_eager=true", True),
            ("seed=null", None), ("revision=main", "main"), ("load_format=", ""), ("x=a=b", "a=b"),
            ('hf_overrides={"a": [1]}', {"a": [1]}),
        ],
    )  # fmt: skip
    def test_an_option_is_json_where_it_parses(self, text: str, value):
        assert list(read_options([text]).values()) == [value]

    def test_dtype_is_an_option_like_any(self):
        assert read_options(["seed=1"], "float32") == {"dtype": "float32", "seed": 1}
        assert read_options(None) == {}

    @pytest.mark.parametrize(
        ("given", "dtype", "text"),
        [
            (["seed"], None, "expected KEY=VALUE, such as max_model_len=512, got 'seed'"),
            (["=1"], None, "expected KEY=VALUE"),
            (["seed=1", "seed=2"], None, "duplicate option seed"),
            (["dtype=float16"], "float32", "duplicate option dtype"),
            (["engine=vllm"], None, "engine is not an option of the engine: see --engine"),
            (["prove=false"], None, "prove is not an option of the engine"),
        ],
    )
    def test_what_is_no_option_is_told(self, given: list[str], dtype: str | None, text: str):
        with pytest.raises(pc.ProgramError) as raised:
            read_options(given, dtype)
        assert str(raised.value).startswith(f"--option: {text}")

    def test_positions(self):
        from patchclamp.studies.inputs import as_position

        assert [as_position(text) for text in ("-1", "3", "prompt[-1]", 'span("a")')] == [
            -1,
            3,
            "prompt[-1]",
            'span("a")',
        ]

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            (("--metric", "logprb"), "--metric: unknown metric 'logprb'"),
            (("--metric", "recovered"), "--foil: recovered"),
            (("--site", "resid_per"), "--site: unknown site 'resid_per'"),
            (("--layers", "a:b"), "--layers: expected a number or a range"),
            (("--positions", "promt[0]"), "--positions: unknown token group 'promt'"),
            (("--png", "sweep.pgn"), "sweep.pgn: unknown picture format 'pgn'"),
            (("--save", "."), "--save: expected a file"),
            (("--bank", "none.bank"), "--bank: none.bank cannot be read"),
            (("--pairs", "none.jsonl"), "--pairs: "),
        ],
    )
    def test_what_is_wrong_is_found_before_a_model_is_loaded(self, wrong, text: str, monkeypatch):
        monkeypatch.setattr(PROVING, "ProvedLM", None)
        assert failed(*SWEEP[:-2], *wrong).removeprefix("error: ").startswith(text)


class TestErrors:
    @pytest.mark.parametrize("command", [SWEEP[:2] + SWEEP[4:], ("sites", "smollm2"), ("demo", "--out", "{}")])
    def test_an_unknown_engine_is_told_with_the_known_ones(self, command: tuple[str, ...], tmp_path):
        line = failed(*(word.format(tmp_path) for word in command), "--engine", "vlm")
        assert (
            line == "error: --engine: unknown engine 'vlm' (did you mean 'vllm'?); available: vllm, transformers, fake"
        )

    def test_an_unknown_option_is_told_with_the_known_ones(self):
        assert "unknown engine option 'd_modl' (did you mean 'd_model'?)" in failed(*SWEEP, "--option", "d_modl=8")

    def test_an_option_that_is_none(self):
        assert (
            failed(*SWEEP, "--option", "seed")
            == "error: --option: expected KEY=VALUE, such as max_model_len=512, got 'seed'"
        )

    def test_an_answer_of_several_tokens(self):
        assert "--foil: " in failed(*SWEEP[:-3], "Parisians")

    def test_a_line_is_one_line_and_no_markup(self, monkeypatch):
        def broken(*_, **__):
            raise pc.EngineError("[red]first[/red]\n  second " + "x" * 200, "engine")

        monkeypatch.setattr(PROVING, "ProvedLM", broken)
        assert failed(*SWEEP) == "error: engine: [red]first[/red] second " + "x" * 200

    def test_a_missing_argument_is_the_usual_usage_error(self):
        status, output = run("ablate", "fake")
        assert status == 2
        assert "Missing option" in output

    def test_a_sweep_takes_prompts_or_a_file_of_them(self, tmp_path):
        assert failed(*SWEEP[:6]).startswith("error: sweep: missing option --corrupt")
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text('{"clean": "a"}\n')
        assert "--pairs: --clean" in failed(*SWEEP, "--pairs", str(pairs)).replace("error: ", "", 1)
        assert "line 1 of" in failed(*SWEEP[:4], "--pairs", str(pairs))
        assert "cannot read" in failed(*SWEEP[:4], "--pairs", str(tmp_path / "none"))
        assert "expected zeros, bank:NAME, mean:FILE or resample:FILE" in failed(*SWEEP, "--source", "noise")

    def test_other_errors_are_not_hidden(self, monkeypatch):
        def broken(*_, **__):
            raise ZeroDivisionError

        monkeypatch.setattr(PROVING, "ProvedLM", broken)
        with pytest.raises(ZeroDivisionError):
            run(*SWEEP)


class TestSweep:
    @pytest.mark.parametrize(
        ("arguments", "loaded", "said"),
        [
            (
                ("sweep", *SWEEP[1:], "--site", "z", "--group", "1", "--positions", "-1", "--source", "zeros"),
                PatchSweepResult,
                "z[",
            ),
            (
                ("ablate", *SWEEP[1:6], "--answer", " Paris", "--foil", " Rome", "--positions", "each"),
                AblationSweepResult,
                "unablated run",
            ),
            (
                ("causal-trace", *SWEEP[1:6], "--subject", "Eiffel", "--answer", " Paris", "--seeds", "2"),
                CausalTraceResult,
                "noised run",
            ),
            (
                ("paths", *SWEEP[1:], "--receiver", "q[2,0]+k[2,0]", "--receiver", "logits"),
                PathPatchResult,
                "q[2, 0] + k[2, 0]",
            ),
        ],
    )
    def test_every_study_shows_and_saves_its_grid(self, tmp_path, arguments, loaded, said):
        arguments = [
            "--prompt" if word == "--clean" and arguments[0] in ("ablate", "causal-trace") else word
            for word in arguments
        ]
        paths = {kind: tmp_path / f"a.{kind}" for kind in ("png", "html", "save")}
        status, output = run(*arguments, *(f"--{kind}={path}" for kind, path in paths.items()), "--top", "9")
        assert status == 0, output
        assert said in output
        assert "noise floor 0" in output
        assert all(path.stat().st_size > 1000 for path in paths.values())
        assert loaded.load(paths["save"]).cells()

    def test_a_match_is_json(self, tmp_path):
        match = {"clean": "span('Eiffel')", "corrupt": "span('Colosseum')"}
        assert run(*SWEEP, "--positions", json.dumps(match), "--save", str(tmp_path / "a"))[0] == 0
        [column] = PatchSweepResult.load(tmp_path / "a").columns
        assert "←" in column.label

    def test_pairs_of_a_file_have_their_mean(self, tmp_path):
        pairs = [{"clean": SWEEP[5], "corrupt": corrupt, "answer": " Paris", "foil": " Rome"}
                 for corrupt in (SWEEP[7], "The cat is in the")]  # fmt: skip
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        status, output = run(*SWEEP[:4], "--pairs", str(tmp_path / "pairs.jsonl"))
        assert status == 0
        assert "Means over 2 pairs of prompts; the first is shown." in output

    def test_a_narrow_terminal_cuts_no_number(self, tmp_path, monkeypatch):
        pairs = [{"clean": SWEEP[5], "corrupt": corrupt, "answer": " Paris", "foil": " Rome"}
                 for corrupt in (SWEEP[7], "The cat is in the")]  # fmt: skip
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        rows = {}
        for columns in ("40", "300"):
            monkeypatch.setenv("COLUMNS", columns)
            status, output = run(*SWEEP[:4], "--pairs", str(tmp_path / "pairs.jsonl"), "--positions", "0")
            assert status == 0
            rows[columns] = [line.split() for line in output.splitlines() if " → " in line or "best cells" in line]
        assert rows["40"] == rows["300"]
        assert rows["40"][0][-3:] == ["way", "to", "clean"]
        assert len(rows["40"]) == 1 + 3, "a row for each layer"

    def test_best_cells_baselines_and_pictures(self, tmp_path):
        png, page = tmp_path / "new" / "sweep.png", tmp_path / "new" / "sweep.html"
        status, output = run(
            *SWEEP, "--site", "resid_pre", "--site", "embed", "--layers", "0:2", "--top", "3", "--png", str(png),
            "--html", str(page),
        )  # fmt: skip
        assert status == 0
        with pc.LM("fake") as lm:
            sweep = pc.studies.patch_sweep(
                lm, clean=SWEEP[5], corrupt=SWEEP[7], answer=" Paris", foil=" Rome", layers="0:2",
                sites=["resid_pre", "embed"],
            )  # fmt: skip
        assert "logit difference ' Paris' − ' Rome'" in output
        assert f"clean run   {sweep.clean:.2g}".replace("-", "−")[:16] in output
        assert "noise floor 0" in output
        rows = [line for line in output.splitlines() if " → " in line]
        assert len(rows) == 3
        for row, cell in zip(rows, sweep.best(3), strict=True):
            assert row.startswith(cell.site)
            assert visible(cell.column.label) in row
        assert f"wrote {png}" in output.replace("\n", "")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "Eiffel" in page.read_text(encoding="utf-8")

    def test_every_argument_reaches_the_study(self, monkeypatch, tmp_path):
        asked = {}
        (tmp_path / "prompts").write_text("one\n\ntwo\n")

        class Closing:
            def __init__(self, *given, **options):
                asked["lm"] = (given, options)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                asked["closed"] = True

        def run_of(study, lm, **how):
            asked["study"] = {name: getattr(study, name) for name in study.fields()} | how
            raise pc.RunError("far enough")

        monkeypatch.setattr(PROVING, "ProvedLM", Closing)
        monkeypatch.setattr(pc.studies.PatchSweep, "run", run_of)
        line = failed(
            "sweep", "org/model", "--engine", "vllm", "--dtype", "float32", "--option", "seed=1", "--clean", "a",
            "--corrupt", "b", "--answer", "c", "--metric", "logprob", "--layers", "3", "--positions", "-1",
            "--positions", 'span("x")', "--direction", "noising", "--group", "2", "--window", "3", "--source",
            f"mean:{tmp_path / 'prompts'}", "--mean-tokens", "prompt[1:]", "--alpha", "0.5", "--mask", "bank:m",
            "--zoom", "4", "--seed", "5", "--batch", "9", "--resume", str(tmp_path / "j"),
        )  # fmt: skip
        assert line == "error: far enough"
        assert asked == {
            "lm": (("org/model", "vllm"), {"prove": True, "dtype": "float32", "seed": 1}),
            "study": {
                "clean": "a", "corrupt": "b", "answer": "c", "foil": None, "sites": ["resid_pre"], "layers": "3",
                "positions": [-1, 'span("x")'], "metric": "logprob", "direction": "noising", "group": 2, "window": 3,
                "source": MeanOf(["one", "two"], "prompt[1:]"), "alpha": 0.5, "mask": "m", "zoom": 4, "seed": 5,
                "batch": 9, "resume": tmp_path / "j",
            },
            "closed": True,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "columns"), [("0:3,7", [0, 1, 2, 7]), ("-1", [15]), ("m.npy", [2, 5]), ("bank:m", [2, 5])]
    )
    def test_a_mask_mixes_in_some_columns(self, tmp_path, monkeypatch, text, columns):
        monkeypatch.chdir(tmp_path)
        mask, half = np.zeros(16, np.float32), np.zeros(16, np.float32)
        mask[columns], half[[2, 5]] = 1, 1
        np.save("m.npy", half)
        from safetensors.numpy import save_file

        save_file({"m": half, "half": half / 2}, "bank")
        asked = ("--mask", text, "--source", "bank:half", "--bank", "bank", "--layers", "0:2")
        status, output = run(*SWEEP, *asked, "--save", "saved")
        assert status == 0, output
        with pc.LM("fake") as lm:
            lm.bank["half"] = half / 2
            here = pc.studies.patch_sweep(lm, clean=SWEEP[5], corrupt=SWEEP[7], answer=" Paris", foil=" Rome",
                                          layers="0:2", mask=mask, source="bank:half")  # fmt: skip
            whole = pc.studies.patch_sweep(lm, clean=SWEEP[5], corrupt=SWEEP[7], answer=" Paris", foil=" Rome",
                                           layers="0:2", source="bank:half")  # fmt: skip
        there = PatchSweepResult.load("saved")
        assert np.array_equal(there.values, here.values)
        assert not np.array_equal(there.values, whole.values)
        assert f"in {len(columns)} of 16 columns" in there.source

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--mask", "a:b"), "--mask: expected columns such as 0:64,100"),
            (("--mask", "16"), "--mask: column 16"),
            (("--mask", "9:3"), "--mask: expected at least one of 16"),
            (("--mask", "0:3", "--site", "z", "--site", "neurons"), "--mask: expected sites"),
            (("--mask", "none.npy"), "--mask: expected an array saved by NumPy, got none.npy"),
            (("--mask", "bank:none"), "--mask: unknown bank entry 'none'"),
            (("--draws", "2"), "--draws: expected --source resample:FILE, got none"),
            (("--mean-by-position", "--source", "zeros"), "--mean-by-position: expected --source mean:FILE"),
            (("--bank", "none.bank"), "--bank: none.bank cannot be read"),
        ],
    )
    def test_what_cannot_be_mixed_in_is_told(self, arguments, text):
        assert failed(*SWEEP, *arguments).startswith(f"error: {text}")

    def test_pairs_of_a_file_have_positions_of_their_own(self, tmp_path):
        pairs = [
            {"clean": SWEEP[5], "corrupt": SWEEP[7], "answer": " Paris", "foil": " Rome",
             "positions": {"subject": 'span("Colosseum")', "last": -1}},
            {"clean": "In the Eiffel is a", "corrupt": "In the cat is a", "answer": " Paris", "foil": 9,
             "positions": {"subject": 'span("cat")', "last": -1}},
        ]  # fmt: skip
        file = tmp_path / "pairs.jsonl"
        file.write_text("\n".join(map(json.dumps, pairs)))
        status, output = run(*SWEEP[:4], "--pairs", str(file), "--save", str(tmp_path / "saved"))
        assert status == 0, output
        sweep = PatchSweepResult.load(tmp_path / "saved")
        assert [column.label for column in sweep.columns] == ["subject", "last"]
        assert [pair.columns[0].corrupt for pair in sweep.pairs] == [(2,), (4,)]
        assert "--positions" in failed(*SWEEP[:4], "--pairs", str(file), "--positions", "1")
        pairs[1]["positions"] = {"subject": 1}
        file.write_text("\n".join(map(json.dumps, pairs)))
        assert "--pairs: pair 1 has positions {'subject': 1}" in failed(*SWEEP[:4], "--pairs", str(file))
        del pairs[1]["positions"]
        file.write_text("\n".join(map(json.dumps, pairs)))
        assert "positions in all pairs" in failed(*SWEEP[:4], "--pairs", str(file))
        for pair in pairs:
            pair.pop("positions", None)
        file.write_text("\n".join(map(json.dumps, pairs)))
        status, output = run(*SWEEP[:4], "--pairs", str(file), "--positions", "-1", "--save", str(tmp_path / "shared"))
        assert status == 0, output
        shared = PatchSweepResult.load(tmp_path / "shared")  # the last token of each pair, as in the file
        np.testing.assert_array_equal(shared.grid[..., 0], sweep.grid[..., 1])
        assert shared.grid.shape[-1] == 1 < sweep.grid.shape[-1]

    def test_paths_of_several_pairs(self, tmp_path):
        pairs = [{"clean": SWEEP[5], "corrupt": corrupt, "answer": " Paris", "foil": " Rome", "positions": at}
                 for corrupt, at in ((SWEEP[7], -1), ("The cat is in the", 2))]  # fmt: skip
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        status, output = run("paths", *SWEEP[1:4], "--pairs", str(tmp_path / "pairs.jsonl"), "--seed", "3", "--save",
                             str(tmp_path / "saved"))  # fmt: skip
        assert status == 0, output
        assert "Means over 2 pairs of prompts; the first is shown." in output
        paths = PathPatchResult.load(tmp_path / "saved")
        assert paths.each.shape[0] == 2
        assert [pair.columns[0].corrupt for pair in paths.pairs] == [(5,), (2,)]
        assert paths.p is not None
        assert paths.provenance.seeds == (3,)

    def test_skipped_positions_are_named(self):
        arguments = list(SWEEP)
        arguments[5] = "The Eiffel Tower is in the"
        status, output = run(*arguments)
        assert status == 0
        assert "counterpart: ' Eiffel' (clean 2), ' Tower' (clean 3), ' Colosseum' (corrupt 2)" in output


class TestResume:
    @pytest.mark.parametrize(
        ("arguments", "files"),
        [
            (("fuzz", "fake", "--prompts", "{0}", "--strength", "0.5", "--max-tokens", "2"), ["j"]),
            (("lens", "fake", "--prompt", SWEEP[5]), ["j"]),
            (("steer", "fake", "--positive", "{0}", "--negative", "{1}", "--prompts", "{0}", "--answer", " Paris"),
             ["j", "j.curve"]),
        ],
    )  # fmt: skip
    def test_what_was_computed_is_taken_from_the_file(self, tmp_path, arguments, files):
        for name, mood in (("0", "good"), ("1", "bad")):
            (tmp_path / name).write_text("\n".join(f"{mood} {thing}" for thing in ("day", "dog", "cat", "film")))
        command = [word.format(tmp_path / "0", tmp_path / "1") for word in arguments]
        command += ["--engine", "fake", "--resume", str(tmp_path / "j")]
        status, output = run(*command)
        assert status == 0, output
        kept = {name: (tmp_path / name).read_bytes() for name in files}
        assert all(len(data) > 200 for data in kept.values())
        assert run(*command) == (0, output)
        assert {name: (tmp_path / name).read_bytes() for name in files} == kept
        (tmp_path / "0").write_text("another\nprompt\nand\nmore")
        command[command.index(SWEEP[5]) if SWEEP[5] in command else 0] = "x" if SWEEP[5] in command else command[0]
        assert "different study" in failed(*command)


class TestSites:
    def test_the_table_shows_every_site_with_its_proofs(self):
        status, output = run("sites", "fake", "--engine", "fake")
        assert status == 0
        with pc.LM("fake") as lm:
            names = lm.sites.names
        for name in names:
            (row,) = [line for line in output.splitlines() if line.startswith(f"{name} ")]
            assert row.count("✓") + row.split("]")[1].count("–") == 5
            assert len(row) <= 80
            assert row.count("✓") >= 3
            assert "✗" not in row
        assert f"all {len(names)} sites hold" in output
        assert "[T, 16]" in output
        assert "[N, 64]" in output

    def test_json(self):
        status, output = run("sites", "fake", "--engine", "fake", "--json", "--option", "layers=2")
        rows = {row["site"]: row for row in json.loads(output)}
        assert status == 0
        assert rows["resid_post"] == {
            "site": "resid_post", "layers": 2, "shape": "[T, 16]", "layout": "replicated", "module": "–",
            "proofs": {"shape": True, "noop": True, "edit": True, "order": None, "adds": True}, "edits_tried": 2, "holds": True, "note": "",
        }  # fmt: skip
        assert rows["embed"]["layers"] is None
        assert rows["q"]["proofs"]["adds"] is None

    def test_edits_are_tried_in_three_layers_or_in_all(self):
        for told, tried in (([], 3), (["--full"], 5)):
            status, output = run("sites", "fake", "--engine", "fake", "--json", "--option", "layers=5", *told)
            rows = {row["site"]: row["edits_tried"] for row in json.loads(output)}
            assert (status, rows["z"], rows["logits"]) == (0, tried, 1)
            _, shown = run("sites", "fake", "--engine", "fake", "--option", "layers=5", *told)
            assert ("--full tries all" in shown) == (not told)

    def test_a_site_that_is_not_proved_is_status_1(self, monkeypatch):
        proofs = [
            Proof("resid_pre", 3, 16, "replicated", True, True, True),
            Proof("mlp_out", 3, 16, "replicated", True, False, True, "writing back [changes] the logits"),
        ]
        monkeypatch.setattr(proving, "prove", lambda lm, full: proofs)
        status, output = run("sites", "fake", "--engine", "fake")
        assert status == 1
        assert "mlp_out: writing back [changes] the logits" in output
        assert output.count("✗") == 1
        assert "sites hold" not in output
        status, output = run("sites", "fake", "--engine", "fake", "--json")
        assert status == 1
        assert [row["holds"] for row in json.loads(output)] == [True, False]

    def test_where_sites_lie_is_a_table_of_its_own(self, monkeypatch):
        from patchclamp.cli import show

        monkeypatch.setattr(show, "module", lambda lm, name: f"model.layers.{{l}}.{name}, input")
        _, output = run("sites", "fake", "--engine", "fake")
        assert [line.split() for line in output.splitlines()].count(["site", "module"]) == 1
        assert sum(line.startswith("resid_post") for line in output.splitlines()) == 2

    def test_modules_are_those_of_the_engine(self):
        from patchclamp.cli.show import module

        found = {}
        with pc.LM("fake") as lm:
            for engine in ("vllm", "transformers"):
                lm.engine.model = msgspec.structs.replace(lm.model, engine=engine)
                found[engine] = {name: module(lm, name) for name in lm.sites.names}
        assert found["vllm"]["logits"] == "compute_logits, output"
        assert found["transformers"]["logits"] == "lm_head, output"
        assert found["vllm"]["resid_pre"] == "model.layers.{l}, input"
        assert found["vllm"]["embed"] == "model.layers.0, input"
        assert found["vllm"]["resid_post"] == "model.layers.{l+1}, input"


class TestDemo:
    def test_tells_what_it_does_and_leaves_pictures(self, tmp_path):
        status, output = run("demo", "--engine", "fake", "--out", str(tmp_path / "out"))
        assert status == 0
        for part in (commands.CLEAN, commands.CORRUPT, "Loading smollm2 on fake",
                     "Patching resid_pre, attn_out", "clean run", "corrupt run", "best cells"):  # fmt: skip
            assert part in output
        assert output.count(" s\n") == 2, "both steps say how long they took"
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"sweep.png", "sweep.html", "plotly.min.js"}

    @pytest.mark.parametrize("installed", [True, False])
    def test_runs_on_vllm_where_it_is_installed(self, installed: bool, tmp_path, monkeypatch):
        find, asked = importlib.util.find_spec, []

        def lm(*given, **options):
            asked.append((given, options))
            raise pc.EngineError("far enough")

        monkeypatch.setattr(PROVING, "ProvedLM", lm)
        vllm = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: vllm if name == "vllm" else find(name))
        status, output = run("demo", "--out", str(tmp_path))
        engine = "vllm" if installed else "transformers"
        assert status == 2
        assert ("vLLM is not installed here, so this demo runs on Transformers instead" in output) == (not installed)
        assert asked == [(("smollm2", engine), {"prove": True, **commands.DEMO_OPTIONS[engine]})]

    def test_vllm_is_quiet_unless_the_environment_says_otherwise(self, monkeypatch):
        monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
        run("sites", "fake")
        assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
        run("sites", "fake")
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _no_vllm(self, monkeypatch):
        """As where vLLM is not installed: nothing heavy is imported."""
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))

    def test_a_model_is_examined(self):
        status, output = run("doctor", "fake", "--engine", "fake", "--json")
        told = json.loads(output)
        assert (status, told["ok"]) == (0, True)
        of = {part: {f["name"]: f["status"] for f in told["findings"] if f["part"] == part} for part in
              ("versions", "sites", "configuration")}  # fmt: skip
        assert of["versions"]["patchclamp"] == "ok"
        assert "vllm" not in of["versions"]  # another engine was asked for
        assert set(of["sites"].values()) == {"ok"}
        assert {"embed", "resid_post", "logits"} <= of["sites"].keys()
        assert of["configuration"] == {"model": "ok"}

    def test_a_machine_without_vllm_is_worth_a_note(self):
        status, output = run("doctor")
        assert status == 0
        assert "!  vllm" in output

    def test_what_is_wrong_is_named_with_what_to_do(self):
        status, output = run("doctor", "--engine", "vllm")
        assert status == 1
        assert "✗  vllm" in output
        assert "→ pip install 'patchclamp[vllm]'" in output
        assert output.splitlines()[-1] == "1 problem, 0 notes"

    def test_a_model_that_does_not_start_is_a_finding(self):
        status, output = run("doctor", "fake", "--engine", "fake", "--option", "colour=red")
        assert status == 1
        assert "unknown engine option 'colour'" in output

    def test_a_site_that_is_not_proved_is_a_problem(self, monkeypatch):
        from patchclamp import doctor

        bad = Proof(
            "attn_out", 4, 8, "replicated", True, True, False, "an edit at attn_out[2] does not move the logits"
        )
        monkeypatch.setattr(doctor, "prove", lambda lm: [bad])
        status, output = run("doctor", "fake", "--engine", "fake")
        assert status == 1
        assert "an edit at attn_out[2] does not move the logits" in output


class TestFuzz:
    def test_curves_answers_and_files(self, tmp_path):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("The cat is\n\nhello\\nworld\n", encoding="utf-8")
        files = {name: tmp_path / f"fuzz.{name}" for name in ("st", "png", "html")}
        status, output = run("fuzz", "fake", "--engine", "fake", "--prompts", str(prompts), "--strength", "0", "--strength",
                             "0.5", "--seed", "1", "--seed", "2", "--max-tokens", "3", "--save", str(files["st"]),
                             "--png", str(files["png"]), "--html", str(files["html"]))  # fmt: skip
        assert status == 0, output
        assert "2 prompts, 2 seeds, 3 tokens, greedy; noise at embed" in output
        assert "the first prompt: The cat is" in output
        assert all(path.stat().st_size > 500 for path in files.values())
        result = pc.studies.FuzzSweepResult.load(files["st"])
        assert result.prompts == ("The cat is", "hello\nworld")
        assert style.plain(result.answers[0][1][0].text) in output

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--strength", "0.2", "--strength", "0.1"), "--strength: "),
            (("--site", "resid_past"), "--site[0]: unknown site 'resid_past'"),
            (("--refusal", "("), "--refusal: "),
            (("--prompts", "none.txt"), "--prompts: cannot read none.txt"),
            (("--png", "a.pgn"), "a.pgn: unknown picture format"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, arguments, text, monkeypatch):
        monkeypatch.setattr(PROVING, "ProvedLM", None)  # no model is loaded
        assert failed("fuzz", "fake", "--engine", "fake", *arguments).removeprefix("error: ").startswith(text)


class TestFitProbe:
    @pytest.fixture
    def command(self, tmp_path):
        prompts = [f"{mood} {thing}" for mood in ("good", "bad") for thing in ("day", "dog", "cat", "film")]
        (tmp_path / "prompts").write_text("\n".join(prompts))
        (tmp_path / "labels").write_text("\n".join(["glad"] * 4 + ["sad"] * 4))
        return ("fit-probe", "fake", "--engine", "fake", "--prompts", str(tmp_path / "prompts"), "--labels",
                str(tmp_path / "labels"))  # fmt: skip

    def test_layers_and_files(self, command, tmp_path):
        files = {name: tmp_path / f"probe.{name}" for name in ("st", "png", "html")}
        status, output = run(*command, "--positive-label", "glad", "--folds", "2", "--pool", "none", "--layers", "1:3",
                             "--save", str(files["st"]), "--png", str(files["png"]), "--html", str(files["html"]))  # fmt: skip
        assert status == 0, output
        result = pc.studies.FitProbeResult.load(files["st"])
        assert (result.classes, result.layers, result.pool) == (("sad", "glad"), (1, 2), None)
        assert "Probes for glad against sad" in output
        assert result.summary in output
        assert f"{result.log_loss[0]:.2f}" in output
        assert all(path.stat().st_size > 500 for path in files.values())

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--method", "svm"), "--method: unknown method 'svm'"),
            (("--folds", "1"), "--folds: "),
            (("--pool", "max"), "--pool: max"),
            (("--labels", "label"), "--labels: "),
            (("--harvest", "nowhere"), "--harvest: nowhere"),
            (("--site", "resid_past"), "--site: unknown site 'resid_past'"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, command, arguments, text, monkeypatch):
        monkeypatch.setattr(PROVING, "ProvedLM", None)  # no model is loaded
        assert failed(*command, *arguments).removeprefix("error: ").startswith(text)


def test_fit_lens_prints_and_writes_what_it_measured(tmp_path):
    (tmp_path / "prompts").write_text(
        "\n".join(f"{mood} {thing}" for mood in ("good", "bad") for thing in ("day", "cat"))
    )
    command = ("fit-lens", "fake", "--engine", "fake", "--dataset", str(tmp_path / "prompts"), "--steps", "3")
    files = {name: tmp_path / f"lens.{name}" for name in ("safetensors", "png", "html")}
    status, output = run(*command, "--layers", "0:2", "--save", str(files["safetensors"]), "--png", str(files["png"]),
                         "--html", str(files["html"]))  # fmt: skip
    assert status == 0, output
    result = pc.studies.FitLensResult.load(files["safetensors"])
    assert result.layers == (0, 1)
    assert "Tuned lens at resid_post" in output
    assert "nats, tuned lens" in output
    assert "share of rows, tuned lens" in output
    assert f"{result.kl[0]:.2f}" in output
    assert all(path.stat().st_size > 500 for path in files.values())
    assert failed(*command, "--kind", "logit").startswith("error: --kind: unknown kind 'logit'")


class TestSteer:
    @pytest.fixture
    def sides(self, tmp_path):
        for name, end in (("positive", "on"), ("negative", "not")):
            lines = [f"{start} {end}" for start in ("the cat is", "the dog sat", "hello world", "The city is")]
            (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        return ("steer", "fake", "--engine", "fake", "--positive", str(tmp_path / "positive"), "--negative",
                str(tmp_path / "negative"))  # fmt: skip

    def test_layers_a_curve_and_files(self, sides, tmp_path):
        files = {name: tmp_path / f"steer.{name}" for name in ("st", "gguf", "png", "html")}
        status, output = run(*sides, "--answer", " the", "--foil", " a", "--prompts", sides[5], "--layers", "1:3", "--save",
                             str(files["st"]), "--gguf", str(files["gguf"]), "--png", str(files["png"]), "--html",
                             str(files["html"]))  # fmt: skip
        assert status == 0, output
        vectors = pc.studies.SteeringVectors.load(files["st"])
        assert f"Best: layer {vectors.best}." in output
        assert "nats per scale" in output
        assert all(path.stat().st_size > 200 for path in files.values())
        read = pc.studies.SteeringVectors.from_gguf(files["gguf"])
        assert read.layers == vectors.layers == (1, 2)
        assert (read.vectors == vectors.vectors).all()
        assert len(vectors.fluency) == 2
        assert output.count(" continuation") == 1

    def test_pairs_of_a_file_and_scales(self, sides, tmp_path):
        lines = [dict(zip(("positive", "negative"), pair, strict=True))
                 for pair in zip(*(Path(sides[i]).read_text().splitlines() for i in (5, 7)), strict=True)]  # fmt: skip
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
        asked = ("--layers", "1", "--answer", " the", "--prompts", sides[5], "--scales", "-1", "--scales", "2")
        status, output = run(*sides[:4], "--pairs", str(tmp_path / "pairs.jsonl"), *asked)
        assert (status, output) == run(*sides, *asked)
        assert status == 0
        rows = output[output.index("continuation") :].splitlines()[1:]
        assert re.findall(r"^ *(-?\d+)  ", "\n".join(rows), re.MULTILINE) == ["-1", "2"]
        (tmp_path / "wrong.jsonl").write_text('{"positive": "a"}')
        assert "line 1 of" in failed(*sides[:4], "--pairs", str(tmp_path / "wrong.jsonl"))
        assert "--pairs: --positive" in failed(*sides, "--pairs", str(tmp_path / "pairs.jsonl"))
        assert failed(*sides[:4]).removeprefix("error: ").startswith("steer: missing option --positive")
        assert "--scales: requires --prompts" in failed(*sides, "--answer", " the", "--scales", "2")

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--method", "men"), "--method: unknown method 'men'"),
            (("--prompts", "sides"), "--prompts: cannot read sides"),
            (("--foil", " a"), "--foil: "),
            (("--held-out", "0", "--png", "a.png"), "--held-out: expected held-out prompts or --prompts"),
            (("--layers", "a:b"), "--layers: expected a number or a range"),
            (("--gguf", "."), "--gguf: expected a file"),
            (("--tokens", "promt"), "--tokens: unknown token group 'promt'"),
        ],
    )
    def test_what_is_wrong_is_one_line(self, sides, arguments, text, monkeypatch):
        monkeypatch.setattr(PROVING, "ProvedLM", None)  # no model is loaded
        assert failed(*sides, *arguments).removeprefix("error: ").startswith(text)


def test_every_numeric_option_is_read_as_a_number():
    for name, kind in studies_by_command().items():
        for field in kind.fields().values():
            types = {type_ for one in (field.type, *get_args(field.type)) for type_ in (one, *get_args(one))}
            if types & {int, float} and not types & {bool, str} and field.arg.parse is not None:
                shown = get_args(options_of(kind)["fields"][field.name][0])[0]
                read = {int, float} & {shown, *get_args(shown)} or isinstance(field.arg.parse("1"), (int, float))
                assert read, f"{name} --{field.name}"


def test_noise_of_a_trace_has_the_given_size(tmp_path):
    saved = tmp_path / "trace"
    asked = ("causal-trace", "fake", "--engine", "fake", "--prompt", "The Eiffel is in", "--subject", " Eiffel")
    status, output = run(*asked, "--answer", " Paris", "--std", "0.5", "--layers", "1", "--save", str(saved))
    assert status == 0, output
    assert CausalTraceResult.load(saved).config["std"] == 0.5


def test_a_picture_that_cannot_be_written_is_one_line():
    for option, ending in (("--png", "png"), ("--html", "html")):
        status, output = run(*SWEEP, "--layers", "1", option, f"/proc/sweep.{ending}")
        assert status == 2, output
        assert f"error: /proc/sweep.{ending}: " in output.replace("\n", "")


@pytest.mark.parametrize(("on", "there"), [("vllm", {"dtype": "bfloat16", "max_model_len": 512}),
                                           ("http://h:8000", {"max_model_len": 512})])  # fmt: skip
def test_options_are_those_of_the_engine_of_exact_patches(monkeypatch, on, there):
    loads: list[tuple[str, str | None, dict]] = []

    @contextmanager
    def loaded(model, engine, options, prove=True):
        loads.append((model, engine, options))
        if len(loads) == 2:
            raise pc.ProgramError("enough")
        yield None

    monkeypatch.setattr(commands, "loaded", loaded)
    asked = ("propose", "m", "--clean", "a", "--corrupt", "b", "--answer", "c", "--on", on)
    failed(*asked, "--dtype", "bfloat16", "--option", "max_model_len=512")
    assert loads[0] == ("m", "transformers", {"dtype": "bfloat16"})
    assert loads[1][2] == there


def test_an_answer_without_held_out_prompts_is_of_the_curve(tmp_path):
    sides = {"--positive": ["I love it", "so good"], "--negative": ["I hate it", "so bad"], "--prompts": ["It was"]}
    asked = []
    for option, prompts in sides.items():
        (tmp_path / option[2:]).write_text("\n".join(prompts))
        asked += [option, str(tmp_path / option[2:])]
    status, output = run(
        "steer", "fake", "--engine", "fake", *asked, "--answer", " good", "--held-out", "0", "--layers", "1"
    )
    assert status == 0, output


class TestRun:
    def test_one_call_with_edits_and_captures(self, tmp_path):
        from safetensors import safe_open

        edits = [{"type": "zero", "at": "mlp_out[1]"}, {"type": "scale", "factor": 0.5, "at": "resid_post[0]"}]
        (tmp_path / "program.json").write_text(json.dumps({"edits": edits[1:]}))
        out = tmp_path / "captured.safetensors"
        status, output = run("run", "fake", "The cat sat", "--engine", "fake", "--edit", json.dumps(edits[0]), "--edit",
                             str(tmp_path / "program.json"), "--capture", "resid_post[2]", "--capture", "z[0, 1]",
                             "--max-tokens", "4", "--out", str(out))  # fmt: skip
        assert status == 0, output
        with pc.LM("fake", prove=False) as lm:
            made = lm.run("The cat sat", max_tokens=4, capture=["resid_post[2]", "z[0, 1]"],
                          edits=[pc.Zero("mlp_out[1]"), pc.Scale(0.5, at="resid_post[0]")])  # fmt: skip
            assert made.text in output
            with safe_open(out, "np") as file:
                assert set(file.keys()) == {"resid_post[2]", "z[0, 1]"}
                assert (file.get_tensor("resid_post[2]") == made["resid_post[2]"]).all()
                assert json.loads(file.metadata()["positions"])["z[0, 1]"] == made.positions("z[0, 1]")
                assert json.loads(file.metadata()["token_ids"]) == made.token_ids

    def test_captures_with_selections(self, tmp_path):
        from safetensors import safe_open

        out = tmp_path / "captured.safetensors"
        wanted = ["resid_post[2] @ prompt[-2:] | generated", 'z[0, 1] @ span("cat")', "resid_post[2]@prompt[-1]"]
        status, output = run("run", "fake", "The cat sat", "--engine", "fake", "--max-tokens", "4", "--out", str(out),
                             *(part for text in wanted for part in ("--capture", text)))  # fmt: skip
        assert status == 0, output
        with pc.LM("fake", prove=False) as lm, safe_open(out, "np") as file:
            made = lm.run("The cat sat", max_tokens=4, capture=wanted)
            assert 0 < len(made.positions("z[0, 1]")) < len(made.prompt_token_ids)
            assert set(file.keys()) == {"resid_post[2]", "z[0, 1]"}
            for site in ("resid_post[2]", "z[0, 1]"):
                assert (file.get_tensor(site) == made[site]).all()
                assert json.loads(file.metadata()["positions"])[site] == list(made.positions(site))

    def test_a_bank_a_chat_and_an_edit_without_effect(self, tmp_path):
        with pc.LM("fake", prove=False) as lm:
            lm.bank["quiet"] = pc.Scale(0.0, at="mlp_out")
            lm.bank.save(tmp_path / "bank.safetensors")
            lm.bank.load(tmp_path / "bank.safetensors")
            expected = lm.run(messages=[{"role": "user", "content": "hello"}], max_tokens=3, edits=[pc.Use("quiet")])
        for program in ('{"type": "use", "name": "quiet"}', "quiet @ every"):
            status, output = run("run", "fake", "hello", "--engine", "fake", "--chat", "--bank",
                                 str(tmp_path / "bank.safetensors"), "--edit", program, "--max-tokens", "3")  # fmt: skip
            assert (status, output.strip("\n")) == (0, expected.text.strip("\n")), output

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (("--capture", "embed"), "--out: "),
            (("--out", "x.safetensors"), "--capture: "),
            (("--edit", "{zero}"), "--edit: "),
            (("--edit", "0.3 calm 0.2 loud"), "--edit: expected +, - or @ SELECTION, got '0.2 loud' at character 9"),
            (("--edit", "nowhere.json"), "--edit: cannot read nowhere.json"),
            (("--edit", '{"type": "zer", "at": "embed"}'), "edits[0].type: unknown op 'zer'"),
            (("--capture", "resid_pots", "--out", "x"), "--capture: "),
            (("--capture", "embed @ prmpt", "--out", "x"), "--capture: "),
            (("--edit", '{"type": "capture", "at": "embed"}'), "edits[0]: expected edits"),
            (
                ("--edit", '{"edits": [{"type": "zero", "at": "embed"}], "capture": ["embed"]}'),
                "capture[0]: expected edits",
            ),
        ],
    )
    def test_what_is_wrong_is_one_line(self, arguments, text, monkeypatch):
        monkeypatch.setattr(PROVING, "ProvedLM", None)  # no model is loaded
        assert failed("run", "fake", "The cat", *arguments).removeprefix("error: ").startswith(text)
