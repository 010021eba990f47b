"""Fitted lenses on the fake engine: their results, files of other packages, and damaged or hostile files."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import safetensors.numpy
import torch

import patchclamp as pc
from patchclamp.store.tensors import parse_header
from patchclamp.studies import FitLensResult, fit_lens, logit_lens, read_lens

PROMPTS = [[3 + (7 * i + i * j) % 60 for j in range(5)] for i in range(24)]


@pytest.fixture(scope="module")
def lm():
    with pc.LM("fake", engine="fake") as lm:
        yield lm


@pytest.fixture(scope="module")
def fit(lm) -> FitLensResult:
    return fit_lens(lm, dataset=PROMPTS, steps=60, learning_rate=3e-3, layers=[0, 2])


def test_a_result_is_saved_tabled_drawn_and_read_by_lenses(lm, fit, tmp_path):
    path = fit.save(tmp_path / "lens.safetensors")
    assert fit.layers == (0, 2)
    assert fit.kl[0] < fit.plain_kl[0]
    assert (fit.kl[1], fit.agreement[1]) == (0.0, 1.0)  # of the last layer
    assert fit.to_frame().columns.tolist() == ["layer", "kl", "plain_kl", "agreement", "plain_agreement"]
    assert fit.plot(tmp_path / "lens.png").stat().st_size > 10_000
    assert fit.config["steps"] == 60
    back = pc.studies.load(path)
    assert isinstance(back, FitLensResult)
    lenses = [pc.Lens(pc.resid_post, translators=given) for given in (fit, back, path, str(path), fit.translators)]
    assert len(set(lenses)) == 1
    assert lenses[0].at == pc.resid_post[[0, 2]]
    read = lm.run(PROMPTS[0], max_tokens=1, capture=lenses[0]).lens[pc.resid_post]
    for given in (fit, path):
        theirs = logit_lens(lm, PROMPTS[0], translators=given)
        assert theirs.layers == (0, 2)
        assert np.abs(read.logprobs - np.log(theirs.top_probs)).max() < 1e-5


def test_held_out_prompts_are_not_trained_on(lm):
    """Another held-out prompt changes the measures alone; identical prompts are one."""
    order = np.random.default_rng(0).permutation(3)
    other = [PROMPTS[i] for i in range(3)]
    other[order[0]] = [9, 8, 7, 6, 5]
    asked = dict(steps=5, held_out=0.34, layers=0)
    one = fit_lens(lm, dataset=PROMPTS[:3], **asked)
    two, three = fit_lens(lm, dataset=other, **asked), fit_lens(lm, dataset=[*PROMPTS[:3], *PROMPTS[:3]], **asked)
    assert (one.matrix == two.matrix).all()
    assert one.kl[0] != two.kl[0]
    assert (one.matrix == three.matrix).all()
    assert one.rows == two.rows == three.rows == 5


@pytest.mark.parametrize(
    ("asked", "error", "path"),
    [
        (dict(kind="logit"), pc.UnknownName, "kind"),
        (dict(dataset=[PROMPTS[0], PROMPTS[0]]), pc.ProgramError, "dataset"),
        (dict(dataset=[]), pc.ProgramError, "dataset"),
        (dict(held_out=1), pc.ProgramError, "held_out"),
        (dict(held_out="0.5"), pc.ProgramError, "held_out"),
        (dict(learning_rate=0), pc.ProgramError, "learning_rate"),
        (dict(steps=0), pc.ProgramError, "steps"),
        (dict(step_prompts=0), pc.ProgramError, "step_prompts"),
        (dict(site="z"), pc.UnsupportedSite, "site"),
        (dict(layers=3), pc.UnsupportedSite, "layers"),
        (dict(tokens=pc.generated), pc.TokensError, "dataset[0]"),
        (dict(kind="jacobian"), pc.EngineError, None),
    ],
)
def test_wrong_arguments_have_their_path(lm, asked, error, path):
    with pytest.raises(error) as raised:
        fit_lens(lm, **{"dataset": PROMPTS, "steps": 1} | asked)
    assert raised.value.path == path


def test_a_lens_of_another_site_is_refused(lm, fit, tmp_path):
    for given in (fit, fit.save(tmp_path / "lens.safetensors")):
        for call in (lambda given=given: pc.Lens(pc.resid_pre, translators=given),
                     lambda given=given: logit_lens(lm, PROMPTS[0], site="mlp_out", translators=given)):  # fmt: skip
            with pytest.raises(pc.ProgramError, match="got one for resid_post") as raised:
                call()
            assert raised.value.path == "translators"


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_a_prompt_without_selected_tokens_is_refused_before_anything_runs(lm, monkeypatch, kind):
    monkeypatch.setattr(lm.engine, "submit", None)
    with pytest.raises(pc.TokensError) as raised:
        fit_lens(lm, dataset=[*PROMPTS, [7]], kind=kind, tokens=pc.prompt[2:])
    assert raised.value.path == f"dataset[{len(PROMPTS)}]"


class TestFilesOfOthers:
    def test_tuned_lens_stores_changes_of_the_stream_before_a_layer(self, lm, tmp_path):
        state = {f"{layer}.{name}": torch.randn(shape).half() / 4
                 for layer in range(3) for name, shape in (("weight", (16, 16)), ("bias", (16,)))}  # fmt: skip
        torch.save(state, tmp_path / "params.pt")
        for path, site in ((tmp_path, "resid_pre"), (tmp_path / "params.pt", "resid_post")):
            maps = read_lens(path, site)
            assert [one.layer for one in maps.translators] == ([0, 1, 2] if site == "resid_pre" else [0, 1])
            lens = logit_lens(lm, PROMPTS[0], site=site, layers=1, translators=maps, top=4)
            layer = 1 if site == "resid_pre" else 2
            rows = np.asarray(lm.run(PROMPTS[0], max_tokens=1, capture=pc.resid_pre[layer])[pc.resid_pre[layer]])
            changed = rows + rows @ state[f"{layer}.weight"].float().numpy().T + state[f"{layer}.bias"].float().numpy()
            plain = logit_lens(lm, PROMPTS[0], site=site, layers=1, top=4,
                               translators={1: (np.zeros((16, 16)), changed[-1])}, positions=-1)  # fmt: skip
            assert np.abs(lens.top_probs[0, -1] - plain.top_probs[0, 0]).max() < 1e-5
        assert pc.Lens(pc.resid_post, translators=read_lens(tmp_path)).at == pc.resid_post[[0, 1]]
        for other in (pc.resid_pre, pc.resid_mid, pc.mlp_out[1]):  # its layers are numbered for resid_post
            with pytest.raises(pc.ProgramError, match="resid_post"):
                pc.Lens(other, translators=read_lens(tmp_path))
            with pytest.raises(pc.ProgramError, match="resid_post"):
                logit_lens(lm, PROMPTS[0], site=other.name, translators=read_lens(tmp_path))

    def test_jacobian_lens_stores_matrices_of_the_stream_after_a_layer(self, tmp_path):
        stored = {layer: torch.randn(4, 4).half() for layer in (0, 2)}
        torch.save({"J": stored, "source_layers": [0, 2], "d_model": 4}, tmp_path / "lens.pt")
        maps = read_lens(tmp_path)
        assert [one.layer for one in maps.translators] == [0, 2]
        assert np.array_equal(maps.translators[1].matrix.array(), stored[2].float().numpy())
        assert maps.translators[1].bias is None
        assert [one.layer for one in read_lens(tmp_path / "lens.pt", "resid_pre").translators] == [1, 3]

    def test_hostile_and_damaged_files_are_refused_and_run_nothing(self, tmp_path):
        class Hostile:
            def __reduce__(self):
                return (tmp_path / "touched").touch, ()

        file = tmp_path / "params.pt"
        contents = [Hostile(), {"J": Hostile()}, {"J": {0: torch.eye(3)[:2]}}, {"J": {"x": torch.eye(3)}}, [1], {},
                    {"0.weight": torch.eye(3)[:2]}, {"0.bias": torch.ones(3)}, {"0.weight": 1}, {"a.weight": torch.eye(3)},
                    {"J": {-1: torch.eye(3)}}, {"J": {0: torch.full((2, 2), torch.nan)}}, {"J": {0: torch.eye(3)}}]  # fmt: skip
        for i, data in enumerate(contents):
            torch.save(data, file)
            if i == len(contents) - 1:
                file.write_bytes(file.read_bytes()[:-40])
            with pytest.raises(pc.ProgramError) as raised:
                read_lens(file)
            assert raised.value.path == "path", data
        file.write_bytes(pickle.dumps(Hostile()))
        for path in (file, tmp_path / "none.pt", tmp_path.parent):
            with pytest.raises(pc.ProgramError):
                read_lens(path)
        with pytest.raises(pc.ProgramError, match="read_lens"):
            pc.Lens(pc.resid_post[0], translators=file)
        assert not (tmp_path / "touched").exists()

    def test_a_changed_result_is_refused(self, fit, tmp_path):
        path = fit.save(tmp_path / "lens.safetensors")
        whole = path.read_bytes()
        tensors, fields = safetensors.numpy.load(whole), parse_header(whole).metadata
        result = json.loads(fields["result"])
        for change in ({"layers": [0]}, {"layers": [0, "2"]}, {"layers": [0, -1]}, {"layers": 3}, {"matrix": {"tensor": "9"}},
                       {"matrix": {"tensor": result["bias"]["tensor"]}}, {"matrix": 3}, {"bias": None}, {"site": None},
                       {"site": "resid_pre"}):  # fmt: skip
            text = json.dumps(result | change)
            path.write_bytes(safetensors.numpy.save(tensors, {**fields, "result": text}))
            with pytest.raises(pc.ProgramError) as raised:
                pc.Lens(pc.resid_post, translators=path)
            assert raised.value.path.startswith("translators"), change
        for data in (safetensors.numpy.save(tensors, {**fields, "result": "["}), safetensors.numpy.save(tensors), b"",
                     safetensors.numpy.save(tensors, {"study": "FitLensResult"}), whole[:200], whole[:-8],
                     safetensors.numpy.save(tensors, {**fields, "result": "[" * 10**5})):  # fmt: skip
            path.write_bytes(data)
            with pytest.raises(pc.ProgramError) as raised:
                pc.Lens(pc.resid_post, translators=path)
            assert raised.value.path == "translators"
