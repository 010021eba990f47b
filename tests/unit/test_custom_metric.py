"""Sweeps with a metric of the caller's: a function of log-probabilities, computed from what a journal keeps."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import Logprobs, Metric


def pair(lm: pc.LM) -> dict[str, str]:
    words = ["The", " Eiffel", " Tower", " is", " in"], ["The", " Colosseum", " Tower", " is", " in"]
    return dict(zip(("clean", "corrupt"), map("".join, words), strict=True)) | {"answer": " Paris", "foil": " Rome"}


def entropy(logprobs: Logprobs) -> float:
    return -sum(math.exp(p) * p for p in logprobs.top.values())


@pytest.mark.parametrize("study", [pc.studies.patch_sweep, pc.studies.path_patch])
def test_a_function_of_answer_and_foil_is_the_named_metric(lm, study):
    more = {"senders": ["z[0]"], "receivers": ["mlp_in[1]"]} if study is pc.studies.path_patch else {}
    named = study(lm, **pair(lm), **more)
    ours = study(lm, **pair(lm), **more, metric=lambda logprobs: logprobs.answer - logprobs.foil)
    np.testing.assert_array_equal(ours.values, named.values)
    assert ours.metric == "<lambda>"


def test_answers_of_several_tokens_are_sums(lm):
    asked = pair(lm) | {"answer": " Paris is", "foil": None, "sites": ["resid_pre"]}
    named = pc.studies.patch_sweep(lm, **asked, metric="logprob")
    ours = pc.studies.patch_sweep(lm, **asked, metric=lambda logprobs: logprobs.answer)
    np.testing.assert_array_equal(ours.values, named.values)


def test_other_tokens_and_the_likeliest_are_those_of_the_run(lm):
    metric = Metric(lambda p: p[" Berlin"] + 10 * entropy(p), tokens=(" Berlin",), top=8, name="berlin and entropy")
    sweep = pc.studies.patch_sweep(lm, **pair(lm), sites=["resid_post[1]"], positions=[1], metric=metric)
    clean = lm.run(pair(lm)["clean"], max_tokens=1, capture=["resid_post[1]"])
    edit = pc.Replace(pc.From(clean, "resid_post[1]", pc.prompt[1]), at="resid_post[1]", tokens=pc.prompt[1])
    ids = [lm.tokenizer.bare(" Berlin")[0]]
    scored = lm.run(pair(lm)["corrupt"], max_tokens=1, edits=[edit], score=ids)
    top = lm.run(pair(lm)["corrupt"], max_tokens=1, edits=[edit], logprobs=8).top_logprobs[0]
    expected = scored.scores[ids[0]] - 10 * sum(math.exp(p) * p for p in top.values())
    assert sweep.values[0, 0] == pytest.approx(expected, abs=1e-9)
    assert sweep.metric == "berlin and entropy"
    assert "berlin and entropy" in sweep.picture().title
    assert sweep.config["metric"]["name"] == "berlin and entropy"


def test_a_journal_keeps_log_probabilities_and_a_changed_function_uses_them(lm, tmp_path: Path, monkeypatch):
    asked = pair(lm) | {"sites": ["resid_pre"], "resume": tmp_path / "sweep.db"}
    pc.studies.patch_sweep(lm, **asked, metric=Metric(lambda p: p.answer, top=3, name="mine"))
    monkeypatch.setattr(lm.engine, "submit", lambda requests: pytest.fail("computed again"))
    again = pc.studies.patch_sweep(lm, **asked, metric=Metric(lambda p: 2 * p.answer, top=3, name="mine"))
    monkeypatch.undo()
    expected = pc.studies.patch_sweep(lm, **asked | {"resume": None, "foil": None}, metric="logprob")
    np.testing.assert_allclose(again.values, 2 * expected.values, rtol=1e-12)


def test_the_order_of_tokens_does_not_matter_to_a_journal(lm, tmp_path: Path):
    def compare(logprobs: Logprobs) -> float:
        return logprobs[5] - 2 * logprobs[9]

    asked = pair(lm) | {"sites": ["resid_pre"], "resume": tmp_path / "sweep.db"}
    first, again = (pc.studies.patch_sweep(lm, **asked, metric=Metric(compare, tokens)) for tokens in ((9, 5), (5, 9)))
    np.testing.assert_array_equal(first.values, again.values)


def test_a_zoom_by_a_function_is_not_resumed(lm, tmp_path: Path):
    asked = pair(lm) | {"metric": lambda logprobs: logprobs.answer, "zoom": 2}
    zoomed = pc.studies.patch_sweep(lm, **asked)
    assert (zoomed.values[~np.isnan(zoomed.values)] != 0).any()
    with pytest.raises(pc.ProgramError, match=r"resume: .*zoom"):
        pc.studies.patch_sweep(lm, **asked, resume=tmp_path / "j")


def test_callables_have_the_same_config(lm):
    def compare(logprobs: Logprobs, scale: float) -> float:
        return scale * logprobs.answer

    sweep = pc.studies.patch_sweep(lm, **pair(lm), sites=["resid_pre"], metric=functools.partial(compare, scale=2.0))
    assert sweep.metric == "compare"
    assert " at 0x" not in str(sweep.config)


def test_a_trace_and_ablations_take_one(lm):
    prompt = {"prompt": pair(lm)["clean"], "answer": " Paris", "metric": lambda logprobs: math.exp(logprobs.answer)}
    trace = {"subject": " Eiffel", "seeds": 1, "std": 1.0}
    for study, more in ((pc.studies.causal_trace, trace), (pc.studies.ablation_sweep, {})):
        named = study(lm, **prompt | {"metric": "prob"}, **more)
        np.testing.assert_array_equal(study(lm, **prompt, **more).values, named.values)


@pytest.mark.parametrize(
    ("metric", "kind", "path", "words"),
    [
        (5, pc.ProgramError, "metric", "a metric or a function"),
        (lambda logprobs: 1 / 0, pc.ProgramError, "metric", "ZeroDivisionError"),
        (lambda logprobs: math.nan, pc.ProgramError, "metric", "finite"),
        (lambda logprobs: logprobs.foil, pc.ProgramError, "metric", "finite"),
        (lambda logprobs: logprobs[" Rome"], pc.UnknownName, "metric.tokens", "Rome"),
        (Metric(entropy, top=129), pc.ProgramError, "metric.top", "128"),
        (Metric(entropy, tokens=(" Paris is",)), pc.TokensError, "metric.tokens[0]", "2 tokens"),
        (Metric(entropy, name="prob"), pc.ProgramError, "metric.name", "other than"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused(lm, metric, kind, path, words):
    with pytest.raises(kind) as caught:
        pc.studies.patch_sweep(lm, **pair(lm) | {"foil": None}, metric=metric)
    assert caught.value.path == path
    assert words in str(caught.value)
