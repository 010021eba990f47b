"""Studies that read attention equal plain sums over Transformers' eager attention, on either engine, and find the heads of
a circuit written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

import patchclamp as pc
from patchclamp.studies import head_scores

from ..models import of_family
from ..reference.attention import eager
from ..reference.circuit import induction

both_engines = pytest.mark.parametrize("engine", ["transformers", "vllm"])
IDS = list(range(5, 17))


@pytest.fixture(scope="module")
def patterns(narrowed):
    """The eager patterns of token ids in `narrow`, [L, T, H, T]."""
    net = transformers.AutoModelForCausalLM.from_pretrained(narrowed, dtype="float32", attn_implementation="eager")
    return lambda ids: np.stack([one.numpy() for one in eager(net.eval(), list(ids))[0]])


class TestHeadScores:
    @both_engines
    def test_they_are_means_of_eager_attention(self, narrow, patterns, engine):
        asked = {"length": 9, "sequences": 3, "seed": 4, "prefix": [7, 8]}
        scores = head_scores(narrow.get(engine, "float32"), **asked)
        expected = []
        for ids in scores.prompts:
            assert ids[:2] == (7, 8)
            assert ids[2:11] == ids[11:]
            assert len(set(ids[2:11])) == 9
            expected.append([[patterns(ids)[:, t, :, t - back] for t in range(11, 20)] for back in (8, 1, 9)])
        found = [scores.induction, scores.previous_token, scores.duplicate_token]
        np.testing.assert_allclose(found, np.mean(expected, (0, 2)), atol=1e-5)
        some = head_scores(narrow.get(engine, "float32"), **asked, layers=[1, -1])
        np.testing.assert_allclose(some.induction, scores.induction[[1, 7]], atol=1e-6)
        frame = scores.to_frame().set_index(["layer", "head"])
        assert frame.loc[(5, 2), "previous_token"] == scores.previous_token[5, 2]
        assert scores.best("duplicate_token", 2)[0].value == scores.duplicate_token.max()

    def test_a_circuit_written_by_hand_is_found(self, tmp_path):
        """Head 0.0 looks one token back, 0.1 at itself, 1.0 for what followed before, 1.1 everywhere alike."""
        with pc.LM(induction(tmp_path), "transformers", dtype="float32", prove=False) as lm:
            scores = head_scores(lm, length=10, prefix=[1])
            assert all(3 <= token < 16 for ids in scores.prompts for token in ids[1:]), "special tokens are not drawn"
            with pytest.raises(pc.ProgramError, match="length: expected at most 13 different tokens, got 14"):
                head_scores(lm, length=14)
        np.testing.assert_allclose(scores.induction, [[0, 0], [1, scores.uniform]], atol=0.02)
        np.testing.assert_allclose(scores.previous_token, [[1, 0], [0, scores.uniform]], atol=0.02)
        np.testing.assert_allclose(scores.duplicate_token, [[0, 0], [0, scores.uniform]], atol=0.02)
        assert scores.best(count=1)[0].head == "z[1, 0]"

    def test_heads_of_random_weights_stay_near_chance(self, tmp_path):
        options = {"skip_tokenizer_init": True, "dtype": "float32", "prove": False}
        with pc.LM(of_family(tmp_path, "llama"), "transformers", **options) as lm:
            scores = head_scores(lm, length=30)
        for found in (scores.induction, scores.previous_token, scores.duplicate_token):
            assert abs(found.mean() / scores.uniform - 1) < 0.5
            assert found.max() < 0.2
