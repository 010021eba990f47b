"""Exported checkpoints: equal to the program on plain Transformers and on stock vLLM; what weights cannot do is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.engines.grading import log_softmax
from patchclamp.errors import ModelError, PatchclampError, ProgramError, UnsupportedSite

from ..models import of_family, with_words

IDS = {"skip_tokenizer_init": True}
rng = np.random.default_rng(7)
DIRECTIONS = rng.standard_normal((2, 128))
WEIGHT, ROTATION = 0.1 * rng.standard_normal((3, 128)), np.linalg.qr(rng.standard_normal((128, 3)))[0].T
PROMPTS = [rng.integers(3, 512, size=size).tolist() for size in (3, 12, 33)]  # not those that an export measures

STREAM = [pc.Ablate(DIRECTIONS, site) for site in (pc.resid_pre, pc.resid_mid, pc.resid_post)]
# on what has no biases: reflections, products in program order, writes that are ablated after their own edits
LINEAR = [
    pc.LowRank(WEIGHT, None, ROTATION, pc.mlp_out[0]),
    pc.Ablate(DIRECTIONS[0], pc.mlp_out[0:2], strength=2.0),
    *STREAM,
]
AFFINE = [
    pc.Ablate(DIRECTIONS[0], pc.embed),
    pc.Add(DIRECTIONS[0], pc.attn_out[1], scale=2.0),
    pc.Ablate(DIRECTIONS, pc.attn_out, strength=0.5),
    pc.LowRank(WEIGHT, [1.0, -2.0, 3.0], ROTATION, pc.mlp_out),
    pc.Add(DIRECTIONS[1], pc.mlp_out[-1]),
]
PARALLEL = [op for op in LINEAR if op.at != pc.resid_mid]  # attention and MLP read the same stream


def logprobs_of_program(folder: str, program: list[pc.ops.Op]) -> np.ndarray:
    with pc.LM(folder, engine="transformers", dtype="float32", **IDS) as lm:
        runs = lm.run(PROMPTS, max_tokens=1, edits=program, capture=pc.logits)
        return np.stack([log_softmax(np.asarray(run[pc.logits])[-1]) for run in runs])


def logprobs_of(folder: Path | str) -> np.ndarray:
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.stack([log_softmax(net(torch.tensor([ids])).logits[0, -1].numpy()) for ids in PROMPTS])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("family", "program"), [
    ("llama", LINEAR), ("llama", AFFINE), ("gpt2", LINEAR), ("gpt2", AFFINE), ("gpt_neox", PARALLEL),
    ("gpt_neox", AFFINE), ("opt", LINEAR), ("opt", AFFINE), ("qwen3", LINEAR), ("granite", LINEAR),
])  # fmt: skip
def test_an_exported_model_equals_its_program(family, program, tied, tmp_path):
    folder = of_family(tmp_path / "model", family, tie_word_embeddings=tied)
    made = pc.export(folder, program, tmp_path / "out", **IDS)
    found, wanted = logprobs_of(tmp_path / "out"), logprobs_of_program(folder, program)
    assert np.abs(found - wanted).max() < 1e-4
    assert np.abs(found - logprobs_of(folder)).max() > (1e-2 if family == "granite" else 0.1)
    assert made.error < 1e-4 > made.stored_error
    assert made.kl > 0
    assert not [each for each in (tmp_path / "out").iterdir() if each.is_dir()]


@pytest.mark.slow
def test_an_exported_model_runs_on_stock_vllm(tmp_path, on_stock):
    """A tied Llama is untied, and gets biases by its config's flags."""
    wanted, engines = [], []
    for family, program, tied in (("llama", AFFINE, True), ("gpt2", LINEAR, True), ("gpt_neox", PARALLEL, False),
                                  ("opt", AFFINE, True), ("qwen3", LINEAR, False), ("granite", LINEAR, True)):  # fmt: skip
        folder = of_family(tmp_path / family, family, tie_word_embeddings=tied)
        pc.export(folder, program, tmp_path / f"{family}_out", **IDS)
        with pc.LM(folder, engine="transformers", dtype="float32", **IDS) as lm:
            wanted.append(lm.run(PROMPTS, max_tokens=8, edits=program, logprobs=True))
        engines.append({"model": str(tmp_path / f"{family}_out"), "dtype": "float32", "enforce_eager": True, **IDS})
    for runs, answers in zip(wanted, on_stock(engines, [{"prompt_token_ids": ids} for ids in PROMPTS]), strict=True):
        for run, (tokens, logprobs) in zip(runs, answers, strict=True):
            assert run.token_ids == tokens[: len(run.token_ids)]
            found = np.array([float.fromhex(each) for each in logprobs])[: len(run.token_ids)]
            np.testing.assert_allclose(found, run.logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    folder = of_family(tmp_path_factory.mktemp("export") / "llama", "llama")
    with_words(folder, 512)
    return folder


def test_a_command_writes_a_checkpoint_with_a_card(llama, tmp_path):
    bank = pc.store.named.NamedBank()
    bank["d"], bank["calm"] = DIRECTIONS[0], [pc.Ablate("d", pc.attn_out)]
    bank.save(tmp_path / "bank.safetensors")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", llama, "--program", "calm", "--bank", str(tmp_path / "bank.safetensors"),
                                    "--out", str(out), "--prompt", "w5 w6 w7", "--dtype", "bfloat16"])  # fmt: skip
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert (out / "generation_config.json").exists()
    assert AutoTokenizer.from_pretrained(out)("w5 w6")["input_ids"] == [5, 6]
    card = (out / "README.md").read_text()
    shown = json.loads(card.partition("```json\n")[2].partition("\n```")[0])
    assert [op["at"] for op in shown["edits"]] == ["attn_out"]
    assert pc.Program.from_json((out / "program.json").read_text()) == pc.Program.of(
        pc.Ablate(DIRECTIONS[0], pc.attn_out)
    )
    assert "over 1 prompts" in card
    wanted = logprobs_of_program(llama, [pc.Ablate(DIRECTIONS[0], pc.attn_out)])
    assert 1e-4 < np.abs(logprobs_of(out) - wanted).max() < 0.1  # the rounding of bfloat16, which the card gives


@pytest.mark.parametrize(("program", "error", "path"), [
    ([pc.Ablate(DIRECTIONS, pc.attn_out), pc.Zero(pc.mlp_out[0])], ProgramError, "edits[1]"),
    (pc.Ablate(DIRECTIONS, pc.attn_out, pc.generated), ProgramError, "edits[0].tokens"),
    (pc.When(pc.Probe(DIRECTIONS[0], pc.resid_pre[0], name="p") > 0, [pc.Ablate(DIRECTIONS, pc.attn_out[1])]),
     ProgramError, "edits[0]"),
    (pc.Add(DIRECTIONS[0], pc.attn_out[0], norm="match"), ProgramError, "edits[0].norm"),
    (pc.Add(DIRECTIONS[0], pc.resid_post[1]), UnsupportedSite, "edits[0].at"),
    (pc.Ablate(rng.standard_normal(256), pc.neurons[1]), UnsupportedSite, "edits[0].at"),
    (pc.Add(DIRECTIONS[0], pc.embed), UnsupportedSite, "edits[0].at"),
    (STREAM[:2], UnsupportedSite, "edits[0]"),
    ([*STREAM[:2], pc.Ablate(DIRECTIONS, pc.resid_post, strength=0.5)], UnsupportedSite, "edits[2].at"),
    ([*STREAM[:2], pc.Ablate(DIRECTIONS[0], pc.resid_post)], ProgramError, "edits[2].directions"),
    ([pc.Ablate(DIRECTIONS, pc.embed), *STREAM], ProgramError, "edits[0]"),
    (pc.Program.of([], [pc.resid_post[0]]), ProgramError, "capture[0]"),
    ([], ProgramError, "edits"),
])  # fmt: skip
def test_what_weights_cannot_do_is_refused(llama, tmp_path, program, error, path):
    with pytest.raises(error) as caught:
        pc.export(llama, program, tmp_path / "out")
    assert caught.value.path == path
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "changed", "program", "word"), [
    ("gemma2", {"tie_word_embeddings": False}, pc.Ablate(DIRECTIONS, pc.attn_out), "norm"),
    ("gemma2", {"tie_word_embeddings": True}, pc.Ablate(DIRECTIONS, pc.embed), "ties"),
    ("mixtral", {}, pc.Ablate(DIRECTIONS, pc.mlp_out), "one projection"),
    ("qwen3", {}, pc.Add(DIRECTIONS[0], pc.attn_out[0]), "no bias"),
    ("bloom", {}, STREAM, "log-probability"),
])  # fmt: skip
def test_what_an_architecture_cannot_hold_is_refused(family, changed, program, word, tmp_path):
    folder = of_family(tmp_path / "model", family, **changed)
    with pytest.raises((UnsupportedSite, ModelError)) as caught:
        pc.export(folder, program, tmp_path / "out", **IDS)
    assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_kept(llama, tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(PatchclampError) as caught:
        pc.export(llama, pc.Ablate(DIRECTIONS, pc.attn_out), tmp_path)
    assert caught.value.path == "out"
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_folder_beside_the_new_one_is_kept(llama, tmp_path, monkeypatch):
    """Also where the new one is the current folder."""
    (tmp_path / "here.partial").mkdir()
    (tmp_path / "here.partial" / "mine").write_text("kept")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    pc.export(llama, pc.Ablate(DIRECTIONS, pc.attn_out), ".")
    assert (tmp_path / "here.partial" / "mine").read_text() == "kept"
    wanted = logprobs_of_program(llama, [pc.Ablate(DIRECTIONS, pc.attn_out)])
    assert np.abs(logprobs_of(tmp_path / "here") - wanted).max() < 1e-4
    assert "# here" in (tmp_path / "here" / "README.md").read_text()


@pytest.mark.parametrize(("arguments", "path"), [
    ({"prompts": "Paris"}, "prompts"), ({"prompts": ["w5", None]}, "prompts[1]"), ({"chat": True}, "chat"),
    ({"out": "a\0b"}, "out"), ({"out": 5}, "out"), ({"out": "x" * 300}, "out"),
])  # fmt: skip
def test_wrong_arguments_of_an_export(llama, tmp_path, arguments, path):
    with pytest.raises(ProgramError) as caught:
        pc.export(llama, pc.Ablate(DIRECTIONS, pc.attn_out), **{"out": tmp_path / "out", **arguments})
    assert str(caught.value.path).startswith(path)
    assert not (tmp_path / "out").exists()


def test_the_dtype_is_that_of_the_weights(tmp_path):
    """Of a checkpoint whose config has none."""
    folder = of_family(tmp_path / "model", "llama")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config.pop("dtype", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for dtype, stored in ((None, "bfloat16"), ("float32", "float32")):
        pc.export(folder, pc.Ablate(DIRECTIONS, pc.attn_out), tmp_path / stored, dtype=dtype, **IDS)
        assert json.loads((tmp_path / stored / "config.json").read_text())["dtype"] == stored


def test_the_effect_on_chats_is_that_of_templated_prompts(llama, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "w100 {% for m in messages %}{{ m['content'] }} w101 {% endfor %}w102"
    tokenizer.save_pretrained(llama)
    texts, program = ["w5 w6 w7", "w8 w9"], pc.Ablate(DIRECTIONS, pc.attn_out)
    turns = [[{"role": "user", "content": text}] for text in texts]
    nets = {}

    def plain_kl(ids: list[list[int]]) -> float:
        p, q = (
            [log_softmax(net(torch.tensor([each])).logits[0, -1].detach().numpy()) for each in ids]
            for net in nets.values()
        )
        return float(np.mean([(np.exp(a) * (a - b)).sum() for a, b in zip(p, q, strict=True)]))

    found = [pc.export(llama, program, tmp_path / name, prompts=prompts, chat=chat).kl
             for name, prompts, chat in (("a", texts, False), ("b", texts, True), ("c", turns, True))]  # fmt: skip
    for folder in (llama, tmp_path / "b"):
        nets[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    untemplated = [tokenizer(text)["input_ids"] for text in texts]
    templated = [[100, *ids, 101, 102] for ids in untemplated]
    assert found == pytest.approx([plain_kl(untemplated), plain_kl(templated), plain_kl(templated)], rel=1e-3)
    assert found[0] != pytest.approx(found[1], rel=1e-2)
    assert "over 2 chats" in (tmp_path / "b" / "README.md").read_text()
