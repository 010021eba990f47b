"""Lenses and attribution on the fake engine, without a model's files: what the engine reads out, what is refused, and that
results are saved, tabled and drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines.lenses import lens_values
from patchclamp.studies import (
    AttributionPatchingResult,
    LogitLensResult,
    PatchscopeResult,
    attribution_patching,
    edge_attribution,
    logit_lens,
    patchscope,
)
from patchclamp.studies.attribution_patching import AttributedRow
from patchclamp.studies.between import _correlation, _ranks
from patchclamp.studies.inputs import Column
from patchclamp.studies.readout import Norm, OutputProjection, Unembedding
from patchclamp.studies.study import provenance
from patchclamp.testing import _norm

PROMPT = "The Eiffel Tower is in the"


@pytest.fixture(scope="module")
def lens(lm) -> LogitLensResult:
    return logit_lens(lm, PROMPT, tokens=[" Paris", " Rome"])


class TestLens:
    def test_the_engine_reads_out_rows_as_its_net_would(self, lm, lens):
        run = lm.run(PROMPT, max_tokens=1, capture=[pc.resid_post])
        rows = np.stack([np.asarray(run[pc.resid_post[layer]]) for layer in range(3)])
        logits = torch.from_numpy(_norm(rows) @ lm.engine._net._unembedding_DV)
        logprobs, ids = logits.log_softmax(-1), [lm.tokenizer.bare(word)[0] for word in (" Paris", " Rome")]
        assert lens.readout == "weights"
        assert np.abs(lens.logprobs - logprobs[..., ids].numpy()).max() < 1e-5
        expected = (logits[..., None, :] > logits[..., ids, None]).sum(-1)
        assert (lens.ranks == expected.numpy()).all()
        final = logprobs[-1]
        assert np.abs(lens.kl - (final.exp() * (final - logprobs)).sum(-1).numpy()).max() < 1e-5
        assert np.abs(lens.entropy + (logprobs.exp() * logprobs).sum(-1).numpy()).max() < 1e-5
        assert (lens.top_ids[:, :, 0] == logits.argmax(-1).numpy()).all()

    def test_it_can_be_saved_tabled_and_drawn(self, lens, tmp_path):
        back = LogitLensResult.load(lens.save(tmp_path / "lens.safetensors"))
        assert (back.kl == lens.kl).all()
        assert back.texts == lens.texts
        assert back.top(-1, -1) == lens.top(2, len(lens.prompt_tokens) - 1)
        frame = lens.to_frame()
        assert len(frame) == lens.kl.size
        last = frame[(frame.layer == 2) & (frame.position == 3)].iloc[0]
        assert last["rank of ' Rome'"] == lens.rank(" Rome")[2, 3]
        assert lens.plot(tmp_path / "lens.png", "kl").stat().st_size > 10_000
        assert lens.to_html(tmp_path / "lens.html").stat().st_size < 100_000
        assert lens.picture("kl").panels[0].shades.colours[0] == "#08306b"

    def test_columns_and_rows_are_those_asked_for(self, lm, lens):
        few = logit_lens(lm, PROMPT, tokens=[" Paris"], layers="1:3", positions=[pc.span("Tower"), -1], top=2)
        columns = [lens.prompt_tokens.index(" Tower"), len(lens.prompt_tokens) - 1]
        assert (few.layers, few.positions) == ((1, 2), tuple(columns))
        assert np.abs(few.logprobs[:, :, 0] - lens.logprobs[1:, columns, 0]).max() < 1e-6
        assert few.top_ids.shape == (2, 2, 2)

    @pytest.mark.parametrize(
        ("asked", "kind", "told"),
        [
            ({"site": "z"}, pc.UnsupportedSite, "site: z: "),
            ({"site": "resid_post[3]"}, pc.UnsupportedSite, r"site: resid_post\[3\]: "),
            ({"site": "resid_pots"}, pc.UnknownName, "site: .*did you mean 'resid_post'"),
            ({"layers": 3}, pc.UnsupportedSite, r"layers: resid_post\[3\]: .*3 layers"),
            ({"positions": [0, 99]}, pc.TokensError, r"positions\[1\]"),
            ({"tokens": [64]}, pc.TokensError, r"tokens\[0\]: .*64"),
            ({"tokens": ["hello world"]}, pc.TokensError, r"tokens\[0\]: .*'hello world'"),
            ({"readout": "engin"}, pc.UnknownName, "readout: unknown readout 'engin' .*did you mean 'engine'"),
            ({"top": 0}, pc.ProgramError, "top: "),
            ({"translators": {1: np.eye(3)}}, pc.ShapeError, r"translators\[1\]: .*\[3, 3\]"),
            ({"translators": {5: np.eye(16)}}, pc.UnsupportedSite, r"translators: resid_post\[5\]: .*3 layers"),
            ({"translators": {5: np.eye(16)}, "layers": 2}, pc.ProgramError, r"translators: .* layer 2"),
            ({"translators": "lens.pt"}, pc.ProgramError, "translators: .*read_lens"),
            ({"unembedding": np.ones((2, 3))}, pc.ShapeError, r"unembedding: .*\[K, 16\]"),
            ({"labels": ["a"]}, pc.ProgramError, "labels: .*unembedding="),
            ({"unembedding": np.ones((2, 16)), "labels": ["a"]}, pc.ProgramError, "labels: .* 2 .* 1"),
            ({"unembedding": np.ones((2, 16)), "tokens": ["x"]}, pc.ProgramError, r"tokens\[0\]: .* label 'x'"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_read_is_refused(self, lm, asked, kind, told):
        with pytest.raises(kind, match=told):
            logit_lens(lm, PROMPT, **asked)


class TestPatchscope:
    def test_a_capture_placed_where_it_was_changes_nothing(self, lm, tmp_path):
        result = patchscope(lm, source=PROMPT, target=PROMPT, source_position=[2, 3], target_position=[2, 3],
                            max_tokens=4, tokens=[" Paris"])  # fmt: skip
        assert result.texts == ((result.plain_text,),) * 3
        assert result.moved.max() == 0.0
        other = patchscope(lm, source="hello world", target=PROMPT, target_layers=[0, 2], max_tokens=4, normed=True)
        assert other.moved.shape == other.scales.shape == (3, 2)
        assert other.moved.min() > 0
        assert PatchscopeResult.load(other.save(tmp_path / "a.st")).texts == other.texts
        assert list(other.to_frame().target_layer) == [0, 2] * 3
        for drawn in (result, other):
            assert drawn.plot(tmp_path / "a.png").stat().st_size > 10_000
            assert drawn.to_html(tmp_path / "a.html").exists()

    def test_as_many_rows_as_positions(self, lm):
        with pytest.raises(pc.TokensError, match=r"target_position: .* 2 .* 1"):
            patchscope(lm, source=PROMPT, source_position=[1, 2], target=PROMPT)

    @pytest.mark.parametrize(("asked", "path"), [
        (dict(batch=0), "batch"),
        (dict(top=0), "top"),
    ])  # fmt: skip
    def test_numbers_are_checked_before_anything_runs(self, lm, asked, path, monkeypatch):
        monkeypatch.setattr(lm, "run", None)
        with pytest.raises(pc.ProgramError) as raised:
            patchscope(lm, source=PROMPT, **asked)
        assert raised.value.path == path


@pytest.mark.parametrize("study", [attribution_patching, edge_attribution])
@pytest.mark.parametrize(("asked", "path"), [
    (dict(batch=0), "batch"),
    (dict(batch=2.0), "batch"),
    (dict(seed=-1), "seed"),
    (dict(seed="x"), "seed"),
    (dict(steps=-1), "steps"),
    (dict(verify=None), "verify"),
])  # fmt: skip
def test_proposals_check_their_numbers_first(lm, study, asked, path):
    with pytest.raises(pc.ProgramError) as raised:
        study(lm, clean=PROMPT, corrupt=PROMPT, answer=" Paris", **asked)
    assert raised.value.path == path


class TestFrozen:
    @pytest.mark.parametrize("centres", [False, True])
    def test_a_norm_frozen_at_a_row_is_linear_and_is_the_norm_there(self, centres):
        norm = Norm(centres, 1e-5, torch.randn(6), torch.randn(6))
        rows, part, direction = torch.randn(4, 6) + 1, torch.randn(4, 6), torch.randn(4, 6)
        plain = torch.nn.functional.layer_norm(rows, (6,), norm.weight, norm.bias, 1e-5) if centres else (
            torch.nn.functional.rms_norm(rows, (6,), norm.weight, 1e-5) + norm.bias)  # fmt: skip
        assert torch.allclose(norm(rows), plain, atol=1e-5)
        rest = rows - part
        assert torch.allclose(norm.frozen(part, rows) + norm.frozen(rest, rows), norm(rows) - norm.bias, atol=1e-5)
        pulled = norm.pulled(direction, rows)
        assert torch.allclose((pulled * part).sum(-1), (direction * norm.frozen(part, rows)).sum(-1), atol=1e-5)

    def test_a_writers_shares_and_rest_are_what_it_writes(self):
        norm = Norm(True, 1e-5, torch.randn(6), torch.randn(6))
        writer = OutputProjection(torch.randn(9, 6), torch.randn(6), 0.5, norm)
        rows, direction = torch.randn(4, 9), torch.randn(4, 6)
        written = (writer(rows) * direction).sum(-1)
        assert torch.allclose(writer.shares(rows, direction).sum(-1) + writer.rest(rows, direction), written, atol=1e-4)

    def test_a_cap_is_undone(self):
        capped = Unembedding(Norm(False, 1e-5, torch.ones(6)), torch.randn(9, 6), None, 2.0, 5.0)
        free = Unembedding(capped.norm, capped.matrix_VD, None, 2.0, None)
        rows = torch.randn(3, 6)
        assert capped(rows).abs().max() < 5
        assert torch.allclose(capped.uncapped(capped(rows)), free(rows), atol=1e-4)


class TestAttributionResult:
    def test_correlations_are_pearsons_and_of_ranks(self):
        a, b = np.array([1.0, 2.0, 2.0, 5.0]), np.array([3.0, 1.0, 4.0, 4.0])
        assert _ranks(a).tolist() == [0.0, 1.5, 1.5, 3.0]
        assert _correlation(a, a) == pytest.approx(1.0)
        assert _correlation(a, b) == pytest.approx(((a - a.mean()) * (b - b.mean())).mean() / a.std() / b.std())
        assert np.isnan(_correlation(a[:2], b[:2]))
        assert np.isnan(_correlation(a, np.ones(4)))

    def test_it_can_be_saved_tabled_and_drawn(self, lm, tmp_path):
        rows = (
            *(AttributedRow("resid_pre", layer) for layer in (0, 1)),
            *(AttributedRow("z", 1, head) for head in (0, 1)),
        )
        columns = tuple(Column(text, (p,), (p,)) for p, text in enumerate(("The", " Tower", " is")))
        estimates = np.array([[0.1, -3.0, 0.2], [0.0, 2.0, 0.1], [0.0, 1.0, 0.3], [0.2, 0.0, 0.0]])
        exact, sampled = np.full((4, 3), np.nan), np.zeros((4, 3), bool)
        exact[0, 1], exact[1, 1], exact[2, 1], exact[3, 0], sampled[3, 0] = -2.0, 2.5, 0.5, 0.1, True
        result = AttributionPatchingResult(
            provenance=provenance(lm), metric="logit_diff", clean_tokens=("The",), corrupt_tokens=("The",), steps=0,
            answer=" Paris", foil=" Rome", rows=rows, columns=columns, estimates=estimates, exact=exact, sampled=sampled,
            clean=3.0, corrupt=-1.0, verified_on=provenance(lm), noise_floor=0.0,
        )  # fmt: skip
        assert [str(cell.row) for cell in result.proposals(2)] == ["resid_pre[0]", "resid_pre[1]"]
        assert [(str(cell.row), cell.exact) for cell in result.best(2)] == [("resid_pre[1]", 2.5), ("z[1, 0]", 0.5)]
        assert result.pearson("best") == pytest.approx(np.corrcoef([-3, 2, 1], [-2, 2.5, 0.5])[0, 1])
        assert np.isnan(result.pearson("sampled"))
        back = AttributionPatchingResult.load(result.save(tmp_path / "a.st"))
        assert back.rows == rows
        assert np.array_equal(back.exact, exact, equal_nan=True)
        assert result.to_frame().exact.count() == 4
        stream, heads = result.picture().panels
        assert stream.outlined == ((0, 1), (1, 1))
        assert heads.values.tolist() == [[1.3, 0.2]]
        assert result.plot(tmp_path / "a.png").stat().st_size > 10_000
        assert "z[1, 0]" in result.to_html(tmp_path / "a.html").read_text()


def test_values_of_a_lens_equal_their_definitions_beside_tokens_that_are_masked():
    draw = np.random.default_rng(4)
    logits_GPV = 4 * draw.standard_normal((3, 5, 1300)).astype(np.float32)
    logits_GPV[:, :, 1200:] = -np.inf
    found = lens_values(torch.from_numpy(logits_GPV), 4, [7, 900])
    with np.errstate(divide="ignore"):
        logprobs = logits_GPV - np.log(np.exp(logits_GPV.astype(np.float64)).sum(-1, keepdims=True))
    model, layers = logprobs[0, :, :1200], logprobs[1:, :, :1200]
    kl = (np.exp(model) * (model - layers)).sum(-1)
    entropy = -(np.exp(layers) * layers).sum(-1)
    assert np.abs(found["kl"] - kl).max() < 1e-4 < kl.min()
    assert np.abs(found["entropy"] - entropy).max() < 1e-4 < entropy.min()
    assert np.abs(found["logprobs"] - layers[..., [7, 900]]).max() < 1e-4
    assert (found["ranks"] == (layers[..., None, :] > layers[..., [7, 900], None]).sum(-1)).all()
    assert (found["top_ids"] == np.argsort(-layers, -1)[..., :4]).all()
    assert np.abs(found["top_probs"] - np.sort(np.exp(layers), -1)[..., :-5:-1]).max() < 1e-5


def test_a_lens_that_is_not_finite_is_an_error(lm, monkeypatch):
    monkeypatch.setattr(lm.engine._net, "_unembedding_DV", lm.engine._net._unembedding_DV * np.float32(np.inf))
    with pytest.raises(pc.NotFinite, match="lens"):
        logit_lens(lm, PROMPT, readout="engine")
