"""Evaluations of variants, on the fake engine: scores, intervals, and what is refused."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.errors import PatchclampError, ProgramError

LM = pc.LM("fake", prove=False)
SAMPLES = [
    {"prompt": f"the {word} is", "choices": [" a b", " c", " d e f"], "answer": answer}
    for word, answer in (("x", 0), ("y", " c"), ("z", 2), ("w", 1))
]
RIGHT = [0, 1, 2, 1]
CUT = [pc.Scale(0.2, pc.mlp_out[1]), pc.Add(np.arange(16.0), pc.resid_post[1], pc.generated)]


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_each_run(chat):
    result = pc.studies.evaluate(LM, SAMPLES, {"plain": None, "cut": CUT}, chat=chat)
    assert result.values.shape == (3, 2, 4)
    for v, edits in enumerate(([], CUT)):
        for n, (sample, right) in enumerate(zip(SAMPLES, RIGHT, strict=True)):
            turn = [{"role": "user", "content": sample["prompt"]}]
            ids = LM.tokens(messages=turn) if chat else LM.tokens(sample["prompt"])
            logprobs = []
            for text in sample["choices"]:
                whole = ids + LM.tokenizer.bare(text) if chat else LM.tokens(sample["prompt"] + text)
                # of a prompt that has both, the same edits at the tokens that would be generated
                there = [msgspec.structs.replace(op, tokens=pc.every[len(ids) :]) if op.tokens == pc.generated else op
                         for op in edits]  # fmt: skip
                run = LM.run(whole, max_tokens=2, edits=there, prompt_logprobs=True)
                logprobs.append(sum(run.prompt_logprobs[len(ids) :]))
            assert result.values[2, v, n] == pytest.approx(logprobs[right], abs=1e-4)
            assert result.values[0, v, n] == (np.argmax(logprobs) == right)
            by_length = [each / len(text) for each, text in zip(logprobs, sample["choices"], strict=True)]
            assert result.values[1, v, n] == (np.argmax(by_length) == right)
    assert (result.values[2, 0] != result.values[2, 1]).any()


def test_by_default_the_unedited_model_is_scored(tmp_path):
    """In the short form, as a study, and on the command line."""
    whole = pc.studies.evaluate(LM, SAMPLES, [None])
    study = pc.studies.Evaluate(samples=SAMPLES)
    file, table = tmp_path / "samples.jsonl", tmp_path / "result.safetensors"
    file.write_text("\n".join(map(json.dumps, SAMPLES)))
    command = ["evaluate", "fake", "--engine", "fake", "--samples", str(file), "--save", str(table)]
    assert CliRunner().invoke(app, command).exit_code == 0
    for result in (pc.studies.evaluate(LM, SAMPLES), study.run(LM), pc.studies.load(table)):
        assert result.variants == ("unedited",)
        assert np.array_equal(result.values, whole.values)
        assert np.isfinite(result.values).all()
    assert "variants" not in study.to_dict()
    assert study == pc.studies.Evaluate(samples=SAMPLES, variants=[None])


def test_a_chat_has_the_text_as_given():
    """Its outer spaces and line breaks, too, and a delimiter before the choice."""
    sample = {"prompt": " Name a city.\n\n", "choices": ["a", "b c"], "answer": 1}
    result, stripped = (
        pc.studies.evaluate(LM, [sample | {"prompt": text}], [None], chat=True)
        for text in (sample["prompt"], "Name a city.")
    )
    ids = LM.tokens(messages=[{"role": "user", "content": sample["prompt"]}])
    assert result.values[2, 0, 0] == pytest.approx(LM.loglikelihood(ids, "b c"), abs=1e-4)
    assert result.values[2, 0, 0] != stripped.values[2, 0, 0]


def test_intervals_are_of_paired_differences():
    result = pc.studies.evaluate(LM, SAMPLES, {"plain": None, "cut": CUT, "same": None})
    assert not result.intervals[:, [0, 2]].any()
    difference = (result.values[2, 1] - result.values[2, 0]).mean()
    low, high = result.intervals[2, 1]
    assert low < difference < high
    row = result.to_frame().query("variant == 'cut' and metric == 'logprob'").iloc[0]
    assert (row["difference"], row["low"], row["high"]) == (difference, low, high)
    spread = (result.values[2, 1] - result.values[2, 0]).std() / 2  # standard error of four samples
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.3)
    panel = result.picture().panels[2]
    assert panel.rows == ("same", "cut", "plain")  # the first variant is at the top
    assert panel.values[:, 0].tolist() == [0.0, difference, 0.0]
    assert panel.texts[2] == (panel.texts[2][0].partition(" (")[0],)  # the reference has no interval


def test_samples_come_from_a_file_and_texts_have_no_choices(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": one["prompt"], "answer": " a b"}) for one in SAMPLES) + "\n\n")
    result = pc.studies.evaluate(LM, file, [CUT])
    assert (result.metrics, result.variants) == (("logprob",), ("0",))
    found = [LM.loglikelihood(one["prompt"], " a b", edits=CUT) for one in SAMPLES]
    assert result.values[0, 0] == pytest.approx(found, abs=1e-4)


def test_it_resumes(tmp_path, monkeypatch):
    journal = tmp_path / "journal"
    whole = pc.studies.evaluate(LM, SAMPLES, [None, CUT], resume=journal)
    monkeypatch.setattr(LM.engine, "submit", lambda requests: pytest.fail("everything was known"))
    again = pc.studies.evaluate(LM, SAMPLES, [None, CUT], resume=journal)
    assert np.array_equal(whole.values, again.values)
    with pytest.raises(PatchclampError):
        pc.studies.evaluate(LM, SAMPLES, [None], resume=journal)


def test_every_variant_is_scored_even_equal_ones():
    """Equal variants are reruns, each with a name of its own."""
    result = pc.studies.evaluate(LM, SAMPLES, [None, CUT, None])
    assert result.variants == ("unedited", "1", "2")
    assert np.array_equal(result.values[:, 0], result.values[:, 2])
    assert (result.values[2, 0] != result.values[2, 1]).all()


def test_lines_end_only_at_line_breaks(tmp_path):
    """U+2028 and others are characters of a text; JSON does not escape them."""
    file = tmp_path / "samples.jsonl"
    samples = [{**one, "prompt": f"a\u2028b\x85{one['prompt']}"} for one in SAMPLES]
    file.write_bytes("\r\n".join(json.dumps(one, ensure_ascii=False) for one in samples).encode())
    result = pc.studies.evaluate(LM, file, [None])
    assert result.samples == tuple(one["prompt"] for one in samples)
    assert np.array_equal(result.values, pc.studies.evaluate(LM, samples, [None]).values)


STEER = pc.Add(np.arange(16.0), pc.resid_post[1], pc.generated)
WHEN = pc.When(pc.Probe(np.ones(16), at=pc.resid_post[0], name="p") > 0, [STEER], scope="prompt")


def test_named_and_conditional_variants_are_scored_as_single_runs(tmp_path):
    lm = pc.LM("fake", prove=False)
    lm.bank["calm"] = [STEER]
    variants = {
        "plain": None,
        "steer": STEER,
        "named": pc.Use("calm"),
        "when": WHEN,
        "twice": pc.Use("calm", scale=2.0),
    }
    result = pc.studies.evaluate(lm, SAMPLES, variants)
    for v, edits in enumerate(variants.values()):
        for n, (sample, right) in enumerate(zip(SAMPLES, RIGHT, strict=True)):
            expected = lm.loglikelihood(sample["prompt"], sample["choices"][right], edits=edits or ())
            assert result.values[2, v, n] == pytest.approx(expected, abs=1e-4)
    assert np.allclose(result.values[:, 1], result.values[:, 2])
    assert (result.values[2, 0] != result.values[2, 1]).any()
    assert (result.values[2, 2] != result.values[2, 4]).any()


@pytest.mark.parametrize(("edits", "path"), [
    ([STEER, pc.Zero(pc.mlp_out[99])], "variants[1].edits[1].at"),
    ([pc.Add("absent", pc.resid_post[1])], "variants[1].edits[0].value"),
    ([STEER, pc.Use("absent")], "variants[1].edits[1].name"),
    ([pc.Zero(pc.mlp_out[0], pc.prompt[50])], "variants[1].edits[0].tokens"),
    ([STEER, pc.Capture(pc.embed)], "variants[1].edits[1]"),
    ([STEER, pc.When(pc.Probe(np.ones(16), at=pc.resid_post[9], name="p") > 0, [STEER])], "variants[1].edits[1].condition.at"),
])  # fmt: skip
def test_a_program_that_does_not_fit_names_its_variant(edits, path):
    with pytest.raises(PatchclampError) as caught:
        pc.studies.evaluate(LM, SAMPLES, [None, edits])
    assert caught.value.path == path


LONG = np.linspace(-1, 1, 16)
OTHER = np.where(np.arange(16) == 15, 3.0, LONG)  # from LONG, only its end differs


@pytest.mark.parametrize(("before", "after", "variant"), [
    ([pc.Add(LONG, pc.resid_post[1])], [pc.Add(OTHER, pc.resid_post[1])], pc.Use("entry")),
    (LONG, OTHER, pc.Add("entry", pc.resid_post[1])),
    (LONG, OTHER, pc.Use("outer")),
    (LONG, OTHER, pc.When(pc.Probe("entry", at=pc.resid_post[0], name="p") > 0, [STEER])),
])  # fmt: skip
def test_a_journal_belongs_to_the_contents_of_the_bank(tmp_path, before, after, variant):
    lm, journal = pc.LM("fake", prove=False), tmp_path / "journal"
    lm.bank["outer"], lm.bank["entry"], lm.bank["unused"] = [pc.Add("entry", pc.resid_post[1])], before, LONG
    first = pc.studies.evaluate(lm, SAMPLES, [None, variant], resume=journal)
    lm.bank["unused"] = OTHER
    assert np.array_equal(pc.studies.evaluate(lm, SAMPLES, [None, variant], resume=journal).values, first.values)
    lm.bank["entry"] = after
    with pytest.raises(ProgramError) as caught:
        pc.studies.evaluate(lm, SAMPLES, [None, variant], resume=journal)
    assert caught.value.path == "resume"


def test_a_journal_belongs_to_every_number_of_a_vector(tmp_path):
    """Vectors that differ only after hundreds of equal numbers."""
    one, other, again = (pc.LowRank(np.eye(16), np.full(16, 0.5), np.eye(16) * [*[1] * 15, last], at=pc.resid_post[1])
                         for last in (2.0, 3.0, 2.0))  # fmt: skip
    found = [pc.studies.evaluate(LM, SAMPLES, [each], resume=tmp_path / "a").values for each in (one, again)]
    assert np.array_equal(*found)
    with pytest.raises(ProgramError) as caught:
        pc.studies.evaluate(LM, SAMPLES, [other], resume=tmp_path / "a")
    assert caught.value.path == "resume"


def test_code_in_a_variant_is_not_resumed(tmp_path):
    lm = pc.LM("fake", prove=False, allow_code=True)
    coded = pc.Apply(lambda h: h * 2, at=pc.resid_post[0])
    assert pc.studies.evaluate(lm, SAMPLES, [None, coded]).values.shape == (3, 2, 4)
    with pytest.raises(ProgramError) as caught:
        pc.studies.evaluate(lm, SAMPLES, [None, coded], resume=tmp_path / "journal")
    assert caught.value.path == "variants[1].edits[0]"


@pytest.mark.parametrize(("samples", "variants", "path"), [
    ([], [None], "samples"),
    ([SAMPLES[0], {"prompt": "a", "answer": "b"}], [None], "samples[1].choices"),
    ("arc_none", [None], "samples"),
    (SAMPLES, {1: None, "1": CUT}, "variants"),
    (SAMPLES, [None, pc.Program.of(CUT, pc.resid_post[0])], "variants[1].capture[0]"),
    ([{"prompt": "a", "choices": ["b"], "answer": 1}], [None], "samples[0].answer"),
    ([SAMPLES[0], {"prompt": "a", "choices": ["b"], "answer": "c"}], [None], "samples[1].answer"),
    ([{"prompt": "a", "answer": 0}], [None], "samples[0].answer"),
    ([{"prompt": "a", "answers": "b"}], [None], "samples[0]"),
    ([{"prompt": "a b", "answer": ""}], [None], "samples[0]"),
    (SAMPLES, [], "variants"),
    (SAMPLES, [None, ["resid_post"]], "variants[1].edits[0]"),
])  # fmt: skip
def test_what_is_refused_names_its_place(samples, variants, path):
    with pytest.raises(PatchclampError) as caught:
        pc.studies.evaluate(LM, samples, variants)
    assert caught.value.path == path
