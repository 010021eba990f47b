"""Wrong arguments, one at a time, of the studies that read gradients or a model's files, on a tiny random model."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import (
    attention_edges,
    attention_rollout,
    attribution_patching,
    direct_attribution,
    edge_attribution,
    head_scores,
)

from ..models import of_family, with_words
from ..wrong import WRONG, error_of

IDS, OTHER = [5, 6, 7], [5, 8, 7]
PAIR = {"clean": IDS, "corrupt": OTHER, "answer": 5, "verify": 1, "sample": 0}
STUDIES = {
    attribution_patching: {**PAIR, "layers": 1, "sites": ["mlp_out"]},
    edge_attribution: PAIR,
    direct_attribution: {"prompt": IDS, "answer": 5, "by": ["layer"]},
    attention_edges: {"prompt": IDS, "answer": 5, "foil": 6, "layers": 1, "tokens": "prompt"},
    attention_rollout: {"prompt": IDS},
    head_scores: {"length": 4, "sequences": 2},
}
cases = pytest.mark.parametrize(
    ("study", "argument"), [(study, name) for study in STUDIES for name in inspect.signature(study).parameters],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = of_family(tmp_path_factory.mktemp("llama"), "llama")
    with_words(folder, 512)
    with pc.LM(folder, "transformers", dtype="float32", prove=False) as lm:
        yield lm


@cases
def test_a_wrong_argument_works_or_is_named(lm, study, argument):
    right = {"lm": lm, **STUDIES[study]}
    assert error_of(study, right) is None
    for label, given in {**WRONG, "run": lm.run(IDS, max_tokens=1)}.items():
        error = error_of(study, right | {argument: given})
        assert error is None or isinstance(error, pc.PatchclampError), f"{label}: {type(error).__name__}: {error}"
        assert error is None or argument in str(error), f"{label}: {error}"


@pytest.mark.parametrize("number", [np.int64(1), np.array(1)])
def test_numbers_of_numpy_give_the_same_estimates(lm, number):
    asked = {"clean": IDS, "corrupt": OTHER, "layers": 1, "sites": ["mlp_out"]}
    one, other = (attribution_patching(lm, **asked, answer=n, steps=n, verify=n, sample=n, seed=n) for n in (1, number))
    np.testing.assert_array_equal(one.estimates, other.estimates)
    np.testing.assert_array_equal(one.exact, other.exact)


def test_text_with_half_a_surrogate_pair_is_named(lm):
    for argument in ("clean", "corrupt", "answer"):
        with pytest.raises(pc.PatchclampError) as caught:
            attribution_patching(lm, **PAIR | {argument: "\ud800"})
        assert caught.value.path == argument
    with pytest.raises(pc.ProgramError):
        lm.tokens("\ud800")


@pytest.mark.parametrize("option", ["max_num_seqs", "max_model_len", "max_records", "bank_bytes"])
@pytest.mark.parametrize("wrong", ["a", 1.5, 0, -1, True, "10"])
def test_a_size_of_the_engine_is_checked_before_anything_is_loaded(lm, option, wrong):
    with pytest.raises(pc.ProgramError) as raised:
        pc.LM(lm.model.name, "transformers", prove=False, **{option: wrong})
    assert raised.value.path == option


@pytest.mark.parametrize("option", ["trust_remote_code", "skip_tokenizer_init"])
def test_a_flag_of_the_engine_is_true_or_false(lm, option):
    with pytest.raises(pc.ProgramError) as raised:
        pc.LM(lm.model.name, "transformers", prove=False, **{option: "no"})
    assert raised.value.path == option


def test_tokenizers_and_weights_name_what_is_wrong(lm):
    calls = [(lm.tokenizer.encode, None), (lm.tokenizer.bare, 3), (lm.tokenizer.decode, None), (lm.tokenizer.decode, [-1]),
             (lm.weights, ["W_O"])]  # fmt: skip
    for call, wrong in calls:
        with pytest.raises(pc.PatchclampError):
            call(wrong)
    with pytest.raises(pc.ShapeError):
        pc.studies.logit_lens(lm, IDS, layers=1, unembedding=np.zeros((0, lm.model.d_model), np.float32))
