"""Studies that read attention equal plain sums over Transformers' eager attention, on either engine, and find the heads of
a circuit written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.studies import attention_edges, attention_rollout, direct_attribution, head_scores

from ..models import of_family
from ..reference.attention import eager, eager_model
from ..reference.circuit import induction

both_engines = pytest.mark.parametrize("engine", ["transformers", "vllm"])
IDS = list(range(5, 17))


@pytest.fixture(scope="module")
def patterns(narrowed):
    """The eager patterns of token ids in `narrow`, [L, T, H, T]."""
    net = eager_model(narrowed)
    return lambda ids: np.stack([one.numpy() for one in eager(net, list(ids))[0]])


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
            with pytest.raises(pc.ProgramError, match=r"length: .*13 .*14"):
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


@both_engines
def test_a_rollout_is_the_product_of_mean_patterns(narrow, patterns, engine, monkeypatch):
    lm = narrow.get(engine, "float32")
    result = attention_rollout(lm, IDS)
    expected = np.eye(len(IDS))
    for pattern in patterns(IDS).mean(2):
        expected = (pattern + np.eye(len(IDS))) / 2 @ expected
    np.testing.assert_allclose(result.rollout, expected, atol=1e-5)
    np.testing.assert_allclose(result.rollout.sum(1), 1, atol=1e-5)
    monkeypatch.setattr("patchclamp.studies.attention_flow.MAX_BYTES", 1)  # a layer at a time
    np.testing.assert_allclose(attention_rollout(lm, IDS).rollout, expected, atol=1e-5)
    first = attention_rollout(lm, IDS, layers=0)
    np.testing.assert_allclose(first.rollout, (patterns(IDS)[0].mean(1) + np.eye(len(IDS))) / 2, atol=1e-5)


class TestAttentionEdges:
    @both_engines
    def test_a_head_writes_the_sum_of_its_edges(self, narrow, engine):
        lm = narrow.get(engine, "float32")
        edges = attention_edges(lm, IDS, tokens="prompt[3:]", layers=[1, 6])
        run = lm.run(IDS, max_tokens=1, capture=[pc.pattern, pc.v, pc.z])
        assert edges.positions == tuple(range(3, len(IDS)))
        for i, layer in enumerate(edges.layers):
            v_TGE, z_THE, pattern_QHT = run[pc.v[layer]], run[pc.z[layer]], run[pc.pattern[layer]][3:]
            for head in range(z_THE.shape[1]):
                group = head * v_TGE.shape[1] // z_THE.shape[1]
                matrix = lm.weights("W_O", layer, head)
                written = pattern_QHT[:, head, :, None] * (v_TGE[:, group] @ matrix)  # [Q, T, D]
                torch.testing.assert_close(written.sum(1), z_THE[3:, head] @ matrix, atol=1e-4, rtol=0)
                np.testing.assert_allclose(edges.lengths[i, head], written.norm(dim=-1), atol=1e-4)
        assert edges.best(1)[0].value == edges.lengths.max()
        assert len(edges.to_frame()) == np.count_nonzero(edges.lengths)

    @both_engines
    def test_shares_add_up_to_a_direct_attribution_at_every_query(self, narrow, engine):
        lm = narrow.get(engine, "float32")
        asked = {"answer": 77, "foil": 200}
        edges = attention_edges(lm, IDS, **asked, tokens="prompt[5:]")
        for q, position in enumerate(edges.positions):
            direct = direct_attribution(lm, IDS[: position + 1], **asked, by=["head"])
            np.testing.assert_allclose(edges.shares[:, :, q].sum(-1), direct.heads[0], atol=1e-4)
        last = attention_edges(lm, IDS, **asked)
        assert last.positions == (len(IDS) - 1,)
        np.testing.assert_allclose(last.shares[:, :, 0], edges.shares[:, :, -1], atol=1e-4)

    # Gemma 2: a norm after attention · GPT-2: biases · Granite: factors · gpt-oss: sinks
    @pytest.mark.parametrize("family", ["gemma2", "gpt2", "granite", "gpt_oss"])
    def test_other_families_add_up(self, family, tmp_path):
        options = {"skip_tokenizer_init": True, "dtype": "float32", "prove": False}
        with pc.LM(of_family(tmp_path, family), "transformers", **options) as lm:
            edges = attention_edges(lm, IDS, answer=77)
            direct = direct_attribution(lm, IDS, answer=77, by=["head"])
            np.testing.assert_allclose(edges.shares[:, :, 0].sum(-1), direct.heads[0], atol=1e-4)
            np.testing.assert_allclose(attention_rollout(lm, IDS).rollout.sum(1), 1, atol=1e-5)

    def test_what_cannot_be_weighed_says_why(self, narrow, monkeypatch):
        lm = narrow.get("transformers", "float32")
        with pytest.raises(pc.ProgramError, match=r"foil: .*answer"):
            attention_edges(lm, IDS, foil=5)
        with pytest.raises(pc.ProgramError, match="layer: "):
            attention_edges(lm, IDS, layers=2).picture(3)
        own = lm.engine.weight
        monkeypatch.setattr(lm.engine, "weight", lambda *of: own(*of) * 1.1 if of[0] == "W_O" else own(*of))
        with pytest.raises(pc.ModelError, match=r"W_O .*z\[2\].* attn_out"):
            attention_edges(lm, IDS, layers=2)
        monkeypatch.setattr("patchclamp.studies.attention_flow.MAX_BYTES", 1 << 10)
        with pytest.raises(pc.CapacityError, match=r"tokens: .*256"):
            attention_edges(lm, IDS)
