"""Evaluations of variants, on the fake engine: scores, intervals, and what is refused."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import PatchclampError

LM = pc.LM("fake", prove=False)
SAMPLES = [
    {"prompt": f"the {word} is", "choices": [" a b", " c", " d e f"], "answer": answer}
    for word, answer in (("x", 0), ("y", " c"), ("z", 2), ("w", 1))
]
RIGHT = [0, 1, 2, 1]
CUT = [pc.Scale(0.2, pc.mlp_out[1]), pc.Add(np.arange(16.0), pc.resid_post[1], pc.generated)]


def test_scores_are_those_of_each_run():
    result = pc.studies.evaluate(LM, SAMPLES, {"plain": None, "cut": CUT})
    assert result.values.shape == (3, 2, 4)
    for v, edits in enumerate(([], CUT)):
        for n, (sample, right) in enumerate(zip(SAMPLES, RIGHT, strict=True)):
            ids = LM.tokens(sample["prompt"])
            logprobs = []
            for text in sample["choices"]:
                whole = LM.tokens(sample["prompt"] + text)
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
    assert result.picture().panels[0].values.shape == (3, 3)


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


@pytest.mark.parametrize(("samples", "variants", "path"), [
    ([], [None], "samples"),
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
