"""The bank of names: what may stand in it, what ops make of it, means over runs, and its file."""

from __future__ import annotations

import json

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.store.named import Means, NamedBank

D = 16  # of the fake model
PROMPTS = ["The Eiffel Tower is in", "The Colosseum is"]


def test_a_vector_is_used_by_its_name(lm):
    v = np.random.default_rng(0).standard_normal(D).astype(np.float32)
    lm.bank["happy"] = v
    for edit in (lambda value: pc.Add(value, pc.resid_post[0], scale=2.0), lambda value: pc.Ablate(value, pc.resid_mid[1]),
                 lambda value: pc.Clamp(value, pc.embed, low=1.0),
                 lambda value: pc.Replace(v, pc.embed, alpha=0.5, mask=value)):  # fmt: skip
        named, inline = (lm.run(PROMPTS[0], max_tokens=3, edits=[edit(value)], logprobs=True) for value in ("happy", v))
        assert named.logprobs == inline.logprobs
        assert named.logprobs != lm.run(PROMPTS[0], max_tokens=3, logprobs=True).logprobs
        assert named.program.fingerprint != inline.program.fingerprint
        again = Program.from_json(named.program.to_json())
        assert again == named.program


def test_a_program_is_used_by_its_name_and_scaled(lm):
    v, w = np.random.default_rng(0).standard_normal((2, D)).astype(np.float32)
    lm.bank["module"] = [pc.Add(v, pc.resid_post[0], scale=0.5), pc.Noise(0.25, pc.resid_mid[1], seed=4)]
    lm.bank["more"] = [pc.Use("module", scale=3.0, tokens=pc.prompt[-1]), pc.Add(w, pc.attn_out[1])]
    plainly = [
        pc.Add(v, pc.resid_post[0], pc.prompt[-1], 3.0), pc.Noise(1.5, pc.resid_mid[1], pc.prompt[-1], 4),
        pc.Add(w, pc.attn_out[1], scale=2.0),
    ]  # fmt: skip
    used, spelled = (lm.run(PROMPTS[0], max_tokens=3, edits=edits, capture=[pc.resid_post], logprobs=True)
                     for edits in ([pc.Use("more", scale=2.0)], plainly))  # fmt: skip
    assert used.logprobs == spelled.logprobs
    assert all(np.array_equal(used[pc.resid_post[i]], spelled[pc.resid_post[i]]) for i in range(lm.model.layers))
    assert Program.from_json(used.program.to_json()) == used.program
    inside = lm.run(
        PROMPTS[0], max_tokens=1, edits=[pc.Use("module"), pc.Capture(pc.resid_post[0]), pc.Use("more")], logprobs=True
    )
    assert inside["edits[1]"].shape == (len(inside.prompt_token_ids), D)


def test_means_are_over_runs_and_positions_layer_by_layer(lm):
    runs = lm.run(PROMPTS, max_tokens=3, capture=[pc.resid_post], logprobs=True)
    made = lm.bank.mean("usual", runs, pc.resid_post)
    for layer in range(lm.model.layers):
        rows = np.concatenate([run[pc.resid_post[layer]] for run in runs])
        label = lm.sites.label(lm.sites.resolve(pc.resid_post[layer])[0].point)
        np.testing.assert_allclose(made.rows[label].array(), rows.mean(0), rtol=1e-5, atol=1e-6)
    edited = lm.run(
        PROMPTS[0], max_tokens=1, edits=[pc.Mean("usual", pc.resid_post)], capture=[pc.resid_post], logprobs=True
    )
    for layer, row in enumerate(made.rows.values()):
        assert np.array_equal(edited[pc.resid_post[layer]], np.tile(row.array(), (len(edited.prompt_token_ids), 1)))
    shifted = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Mean("usual", pc.resid_pre[1])], logprobs=True)
    assert (
        shifted.logprobs
        == lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Mean("usual", pc.resid_post[0])], logprobs=True).logprobs
    )
    last = lm.bank.mean("last", runs, pc.resid_post[1], pc.prompt[-1])
    rows = [run[pc.resid_post[1]][len(run.prompt_token_ids) - 1] for run in runs]
    np.testing.assert_allclose(next(iter(last.rows.values())).array(), np.mean(rows, 0), rtol=1e-5, atol=1e-6)


def test_what_is_not_there_or_does_not_fit_is_said(lm):
    bank = lm.bank
    bank["vector"], bank["short"], bank["loop"] = np.ones(D), np.ones(3), [pc.Use("loop")]
    bank["ends"], bank["rows"], bank["none"] = [pc.Zero(pc.embed)], np.ones((2, D)), np.zeros(D)
    bank["deep"] = [pc.Zero(pc.embed), pc.Use("short-sighted")]
    for i in range(20):
        bank[f"chain {i}"] = [pc.Use(f"chain {i + 1}")]
    for i in range(5):
        bank[f"tree {i}"] = [pc.Use(f"tree {i - 1}") if i else pc.Zero(pc.embed)] * 10
    for rows in ({}, {"embed": np.ones(D)}, {"embed": pc.Vector.of(np.ones((2, D)))}):
        with pytest.raises(pc.ShapeError, match="one or more sites"):
            Means(rows)
    bank["means"] = Means({lm.sites.label(0): pc.Vector.of(np.ones(D))})
    for edit, kind, text in (
        (pc.Add("vectr", pc.embed), pc.MissingSource, r"edits\[0\].value: unknown bank entry 'vectr' \(did you"),
        (pc.Add("short", pc.embed), pc.ShapeError, r"edits\[0\].value: .*embed, got \[3\]"),
        (pc.Add("ends", pc.embed), pc.ProgramError, r"edits\[0\].value: .*pc.Use\('ends'\)"),
        (pc.Add("rows", pc.embed), pc.ShapeError, r"edits\[0\].value: .*got 2 rows"),
        (pc.Mean("means", pc.resid_post), pc.MissingSource, r"edits\[0\].value: 'means' has no mean of resid_post\[0\]"),
        (pc.Ablate("none", pc.embed), pc.ShapeError, r"edits\[0\].directions: .*zeros"),
        (pc.Clamp("rows", pc.embed, low=0), pc.ShapeError, r"edits\[0\].direction: expected one row \[D\]"),
        (pc.Use("vector"), pc.ProgramError, r"edits\[0\].name: expected a program, got Vector 'vector'"),
        (pc.Use("gone"), pc.MissingSource, r"edits\[0\].name: unknown bank entry 'gone'"),
        (pc.Use("loop"), pc.ProgramError, r"edits\[0\].loop\[0\].name: loop uses loop: a program cannot use itself"),
        (pc.Use("ends", scale=2), pc.ProgramError, r"edits\[0\].scale: .*Zero"),
        (pc.Use("chain 0"), pc.ProgramError, r"name: .*16"),
        (pc.Use("tree 4"), pc.ProgramError, r"name: .*10000"),
        (pc.Use("deep"), pc.MissingSource, r"edits\[0\].deep\[1\].name: unknown bank entry 'short-sighted'"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            lm.run(PROMPTS[0], edits=[edit])
    for name, given, kind in (
        ("", np.ones(D), pc.ProgramError), ("\ud800", np.ones(D), pc.ProgramError),
        ("__metadata__", np.ones(D), pc.ProgramError), (3, np.ones(D), pc.ProgramError), ("x", "text", pc.ShapeError),
        ("x", np.ones((2, 2, 2)), pc.ShapeError), ("x", [pc.Capture(pc.embed)], pc.ProgramError),
        ("x", [], pc.ShapeError), ("x", [float("nan")], pc.ShapeError),
    ):  # fmt: skip
        with pytest.raises(kind):
            bank[name] = given
    with pytest.raises(pc.MissingSource):
        del bank["x"]
    with pytest.raises(pc.ProgramError, match="zero runs"):
        bank.mean("x", [], pc.embed)
    with pytest.raises(pc.MissingSource, match="was not captured"):
        bank.mean("x", [lm.run(PROMPTS[0], capture=[pc.embed])], pc.resid_mid)
    with pytest.raises(pc.ProgramError, match=r"tokens: .*embed"):
        bank.mean("x", [lm.run(PROMPTS[0], capture=[pc.embed @ pc.prompt[0]])], pc.embed, pc.prompt[1])
    assert "x" not in bank


def test_the_bank_reads_back_from_its_file(tmp_path):
    bank, v = NamedBank(), np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    bank["a"], bank["rows"] = v[0], v
    bank["means"] = Means({"embed": pc.Vector.of(v[1]), "resid_pre[1]": pc.Vector.of(v[2])})
    bank["program"] = [pc.Add("a", pc.resid_post[3], scale=2.0), pc.Noise(1.0, pc.embed, seed=3)]
    bank.save(tmp_path / "bank.safetensors")
    again = NamedBank()
    assert sorted(again.load(tmp_path / "bank.safetensors", prefix="my ")) == [
        "my a", "my means", "my program", "my rows",
    ]  # fmt: skip
    assert {name: again[f"my {name}"] for name in bank} == dict(bank)
    bank.save(tmp_path / "one.safetensors", ["a"])
    assert again.load(tmp_path / "one.safetensors") == ["a"]


def test_files_of_others_are_read_and_broken_ones_refused(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"refusal": torch.arange(D).to(torch.bfloat16)}, tmp_path / "bf16.safetensors")
    bank = NamedBank()
    assert bank.load(tmp_path / "bf16.safetensors") == ["refusal"]
    assert bank["refusal"].array().tolist() == list(range(D))
    save_file({"deep": torch.ones(2, 2, 2)}, tmp_path / "deep.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"not at all")
    save_file({"m": torch.ones(2, 3)}, tmp_path / "means.safetensors", {"means": '{"m": ["embed"]}'})
    one = torch.ones(D)
    save_file({"m": torch.ones(2, 3)}, tmp_path / "twice.safetensors", {"means": '{"m": ["embed", "embed"]}'})
    save_file({"m": torch.ones(2, 3, 4)}, tmp_path / "deep_means.safetensors", {"means": '{"m": ["a", "b"]}'})
    save_file({"m": one}, tmp_path / "letters.safetensors", {"means": '{"m": "ab"}'})
    save_file({"m": one}, tmp_path / "stray.safetensors", {"means": '{"other": ["a"]}'})
    save_file({"a": one, "": 2 * one}, tmp_path / "nameless.safetensors")
    save_file({"a": one, "b": one.to(torch.complex64)}, tmp_path / "complex.safetensors")
    save_file({"a": one, "b": one * float("nan")}, tmp_path / "nan.safetensors")
    nested = "[" * 100_000
    save_file({"a": one}, tmp_path / "nested.safetensors", {"means": nested})
    save_file({"a": one}, tmp_path / "both.safetensors", {"programs": '{"a": "{}"}'})
    save_file(
        {"a": one}, tmp_path / "doubled.safetensors", {"programs": json.dumps({"p": '{"edits": [], "edits": []}'})}
    )
    save_file({"a": one}, tmp_path / "bad.safetensors", {"programs": json.dumps({"p": '{"edits": [{"type": "ad"}]}'})})
    for name in ("deep", "no", "gone", "means", "bad", "twice", "deep_means", "letters", "stray", "nameless", "complex",
                 "nan", "nested", "both", "doubled"):  # fmt: skip
        with pytest.raises(pc.ProgramError, match=f"{name}.safetensors"):
            bank.load(tmp_path / f"{name}.safetensors")
    assert list(bank) == ["refusal"]
    with pytest.raises(pc.ProgramError, match="cannot be written"):
        bank.save(tmp_path / "no such folder" / "bank.safetensors")


def test_an_entry_with_code_is_named_when_it_cannot_be_written(tmp_path):
    bank = NamedBank()
    bank["fine"] = np.ones(D)
    bank["mood"] = [pc.Scale(0.5, pc.embed), pc.Apply(lambda h: h, pc.embed)]
    with pytest.raises(pc.ProgramError) as caught:
        bank.save(tmp_path / "bank.safetensors")
    assert caught.value.path == "names"
    assert "'mood'" in str(caught.value)
    assert "edits[1]" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    bank.save(tmp_path / "bank.safetensors", ["fine"])
    assert NamedBank().load(tmp_path / "bank.safetensors") == ["fine"]
