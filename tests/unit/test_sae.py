"""Sparse autoencoders in files: equal to their packages and to formulas, in every format; hostile files are refused."""

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.language.dictionaries import FeatureReader
from patchclamp.language.probes import read_arrays
from patchclamp.language.values import POOLS
from patchclamp.plan import Prompt, bind
from patchclamp.plan.bound import BoundOp, Encoded, Keep, PositionRange
from patchclamp.plan.verify import verify
from patchclamp.runtime.dictionaries import Dictionaries
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.map import placed
from patchclamp.sites.tables import LLAMA

GOLDEN = Path(__file__).parents[1] / "golden" / "sae"  # made by tests/golden/make_saes.py
FOLDERS = sorted(file.parent.relative_to(GOLDEN).as_posix() for file in GOLDEN.rglob("expected.npz"))
D, F = 8, 24
NORMS = {
    "none": lambda x: (x, 0, 1),
    "layer_norm": lambda x: (
        (x - x.mean(1, keepdims=True)) / (x.std(1, ddof=1, keepdims=True) + 1e-5),
        x.mean(1, keepdims=True),
        x.std(1, ddof=1, keepdims=True),
    ),
    "rms": lambda x: (
        x / np.sqrt((x * x).mean(1, keepdims=True)),
        0,
        np.sqrt((x * x).mean(1, keepdims=True)),
    ),
}


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    assert got.dtype == np.float32
    return got == pytest.approx(np.asarray(expected, np.float64), rel=1e-5, abs=2e-5)


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def random_sae(rng: np.random.Generator, width: int = D, **fields) -> pc.SAE:
    return pc.SAE(numbers(rng, F, D), numbers(rng, F), numbers(rng, F, width), numbers(rng, width), **fields)


def formula(sae: pc.SAE, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and output, number by number, in fp64."""
    normed, mean, scale = NORMS[sae.normalize](rows.astype(np.float64))
    features = np.zeros((len(rows), F))
    for n, row in enumerate(normed):
        for f in range(F):
            pre = row @ sae.encoder[f].astype(np.float64) + sae.encoder_bias[f]
            value = pre if sae.gain is None else pre * sae.gain[f] + sae.offset[f]
            features[n, f] = max(value, 0) if pre > (0 if sae.threshold is None else sae.threshold[f]) else 0
        if sae.k is not None:
            features[n, np.argsort(-features[n], kind="stable")[sae.k :]] = 0
    output = (features @ sae.decoder + sae.decoder_bias) * scale + mean
    return features, output if sae.skip is None else output + rows @ sae.skip.T


# -- packages


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_computes_what_its_package_computes(name):
    sae, expected = pc.SAE.load(GOLDEN / name), np.load(GOLDEN / name / "expected.npz")
    features = sae.encode(expected["rows"])
    assert close(features, expected["features"])
    assert ((features != 0) == (expected["features"] != 0)).all()
    assert 0 < (features != 0).sum(1).max() < F
    assert close(sae.decode(features, expected["rows"]), expected["output"])
    assert close(sae.reconstruct(expected["rows"]), expected["output"])


def test_there_is_a_file_of_every_kind():
    kinds = {name.partition("_")[0].partition("/")[0] for name in FOLDERS}
    assert kinds == {"saelens", "dictionary", "sparsify", "llama"}
    assert len(FOLDERS) == 31


@pytest.mark.parametrize(
    ("name", "site", "site_out", "model"),
    [
        ("saelens_gated", "resid_post[3]", "", "tiny"),
        ("saelens_old_standard", "mlp_out[3]", "", "tiny"),
        ("saelens_skip_transcoder", "mlp_in[3]", "mlp_out[3]", "tiny"),
        ("saelens_batchtopk", "", "", ""),
        ("dictionary_AutoEncoderTopK", "resid_post[3]", "", "tiny"),
        ("sparsify/layers.3", "resid_post[3]", "", ""),
        ("sparsify/layers.4.mlp", "mlp_in[4]", "mlp_out[4]", ""),
        ("llama_scope_transcoder", "mlp_in[3]", "mlp_out[3]", ""),
    ],
)
def test_a_file_says_where_it_belongs(name, site, site_out, model):
    sae = pc.SAE.load(GOLDEN / name)
    assert (sae.site, sae.site_out, sae.model) == (site, site_out, model)
    other = pc.SAE.load(GOLDEN / name, site="blocks.7.hook_resid_pre", model="other")
    assert (other.site, other.model, other.content) == ("resid_pre[7]", "other", sae.content)


def test_files_are_read_without_torch():
    code = "import sys, patchclamp as pc; pc.SAE.load(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, GOLDEN / "saelens_topk"], check=True)


def test_without_torch_a_pt_file_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(pc.ProgramError, match="PyTorch"):
        pc.SAE.load(GOLDEN / "dictionary_AutoEncoder")


# -- layouts that need no package


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("path", "site", "site_out", "model"),
    [
        ("gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71", "resid_post[20]", "", "gemma-2-2b"),
        ("gemma-scope-9b-it-res/layer_9/width_16k/average_l0_9", "resid_post[9]", "", "gemma-2-9b-it"),
        ("gemma-scope-2b-pt-att/layer_1/width_16k/average_l0_9", "z[1]", "", "gemma-2-2b"),
        ("gemma-scope-2b-pt-mlp/layer_1/width_16k/average_l0_9", "mlp_out[1]", "", "gemma-2-2b"),
        ("gemma-scope-2b-pt-transcoders/layer_7/width_16k", "mlp_in[7]", "mlp_out[7]", "gemma-2-2b"),
        ("gemma-scope-2b-pt-res/embedding/width_4k", "embed", "", "gemma-2-2b"),
        ("transcoder/layer_3/gemma-scope-2b-pt-res/layer_20/width_16k", "resid_post[20]", "", "gemma-2-2b"),
        ("here/layer_7", "", "", ""),
    ],
)
def test_gemma_scope_1(tmp_path, path, site, site_out, model):
    rng = np.random.default_rng(1)
    arrays = {
        "W_enc": numbers(rng, D, F),
        "W_dec": numbers(rng, F, D),
        "b_enc": numbers(rng, F),
        "b_dec": numbers(rng, D),
    }
    arrays["threshold"], rows = abs(numbers(rng, F)), numbers(rng, 5, D)
    (tmp_path / path).mkdir(parents=True)
    np.savez(tmp_path / path / "params.npz", **arrays)
    sae = pc.SAE.load(tmp_path / path / "params.npz")
    scale = D**0.5 if site == "embed" else 1  # the model multiplies its embeddings by it
    pre = rows / scale @ arrays["W_enc"] + arrays["b_enc"]
    features = relu(pre) * (pre > arrays["threshold"])
    assert close(sae.encode(rows), features)
    assert close(sae.reconstruct(rows), (features @ arrays["W_dec"] + arrays["b_dec"]) * scale)
    assert (sae.site, sae.site_out, sae.model, sae.is_local) == (site, site_out, model, True)


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2(tmp_path, affine):
    rng, layer = np.random.default_rng(2), "model.layers.12."
    config = {"architecture": "jump_relu", "model_name": "gemma-3-4b-it", "hf_hook_point_in": layer + "output"}
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).to(torch.bfloat16)
        for name, shape in {"w_enc": (D, F), "w_dec": (F, D), "b_enc": (F,), "b_dec": (D,), "threshold": (F,)}.items()
    }
    if affine:
        tensors["affine_skip_connection"] = torch.randn(D, D)
        config["hf_hook_point_in"] = layer + "pre_feedforward_layernorm.output"
        config["hf_hook_point_out"] = layer + "post_feedforward_layernorm.output"
    save_tensors(tensors, tmp_path / "params.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    sae, rows = pc.SAE.load(tmp_path), numbers(rng, 5, D)
    arrays = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    pre = rows @ arrays["w_enc"] + arrays["b_enc"]
    features = relu(pre) * (pre > arrays["threshold"])
    output = features @ arrays["w_dec"] + arrays["b_dec"]
    assert close(sae.encode(rows), features)
    assert close(sae.reconstruct(rows), output + rows @ arrays["affine_skip_connection"] if affine else output)
    assert (sae.site, sae.site_out) == (("mlp_in[12]", "mlp_out[12]") if affine else ("resid_post[12]", ""))
    assert sae.model == "gemma-3-4b-it"


def qwen_scope(folder: Path, layer: int) -> dict[str, torch.Tensor]:
    shapes = {"W_enc": (F, D), "W_dec": (D, F), "b_enc": (F,), "b_dec": (D,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / f"layer{layer}.sae.pt")
    return tensors


def test_qwen_scope(tmp_path):
    folder = tmp_path / "models--Qwen--SAE-Res-Qwen3-8B-Base-W64K-L0_5" / "snapshots"
    qwen_scope(folder, 3)
    tensors = {name: tensor.numpy() for name, tensor in qwen_scope(folder, 4).items()}
    sae, rows = pc.SAE.load(folder, layer=4), numbers(np.random.default_rng(3), 5, D)
    pre = rows @ tensors["W_enc"].T + tensors["b_enc"]
    features = np.where(pre >= np.sort(pre, axis=1)[:, -5, None], relu(pre), 0)
    assert close(sae.encode(rows), features)
    assert close(sae.reconstruct(rows), features @ tensors["W_dec"].T + tensors["b_dec"])
    assert (sae.k, sae.site, sae.model, sae.is_local) == (5, "resid_post[4]", "Qwen3-8B-Base", False)
    assert pc.SAE.load(folder / "layer3.sae.pt", k=7).k == 7
    shutil.copy(folder / "layer3.sae.pt", tmp_path)
    assert pc.SAE.load(tmp_path / "layer3.sae.pt", k=6).k == 6
    for path, which, field in (
        (tmp_path / "layer3.sae.pt", {}, "k"), (folder, {}, "layer"), (folder, {"layer": 5}, "layer"),
        (folder, {"layer": "3.sae.pt/../layer3"}, "layer"), (folder / "layer3.sae.pt", {"layer": 4}, "layer"),
        (folder, {"layer": 3, "scale": 2.0}, "scale"), (folder, {"layer": 3, "k": 0}, "k"),
    ):  # fmt: skip
        with pytest.raises(pc.ProgramError) as caught:
            pc.SAE.load(path, **which)
        assert caught.value.path == field


def llama_scope(folder: Path, rng: np.random.Generator, **changes) -> dict[str, np.ndarray]:
    arrays = {
        "encoder.weight": numbers(rng, F, D), "encoder.bias": numbers(rng, F), "decoder.weight": numbers(rng, D, F),
        "decoder.bias": numbers(rng, D),
    }  # fmt: skip
    hook = "blocks.8.hook_resid_post"
    config = {
        "d_model": D, "d_sae": F, "hook_point_in": hook, "hook_point_out": hook, "act_fn": "jumprelu",
        "jump_relu_threshold": 0.2021484375, "norm_activation": "dataset-wise", "top_k": 50,
        "dataset_average_activation_norm": {"in": 6.3125, "out": 6.3125}, "apply_decoder_bias_to_pre_encoder": False,
        "sparsity_include_decoder_norm": False,
    }  # fmt: skip
    (folder / "checkpoints").mkdir(parents=True)
    save_file(arrays, folder / "checkpoints" / "final.safetensors")
    (folder / "hyperparams.json").write_text(json.dumps(config | changes))
    return arrays


@pytest.mark.parametrize("by_norm", [False, True])
@pytest.mark.parametrize("act_fn", ["jumprelu", "topk"])  # topk with a threshold was converted
def test_llama_scope(tmp_path, act_fn, by_norm):
    """Rows are brought to a norm of sqrt(D) first; the threshold is one of rows as they are."""
    rng, norms = np.random.default_rng(4), {"in": 6.3125, "out": 3.4}
    changes = {"act_fn": act_fn, "dataset_average_activation_norm": norms, "sparsity_include_decoder_norm": by_norm}
    arrays, rows = llama_scope(tmp_path, rng, **changes), 2 * numbers(rng, 5, D)
    sae, scale = pc.SAE.load(tmp_path), {end: D**0.5 / norm for end, norm in norms.items()}
    pre = rows * scale["in"] @ arrays["encoder.weight"].T + arrays["encoder.bias"]
    size = np.linalg.norm(arrays["decoder.weight"], axis=0) if by_norm else 1
    features = relu(pre) * (pre * size > 0.2021484375 * scale["in"])
    assert close(sae.encode(rows), features)
    assert close(sae.reconstruct(rows), (features @ arrays["decoder.weight"].T + arrays["decoder.bias"]) / scale["out"])
    assert (sae.site, sae.site_out, sae.k) == ("resid_post[8]", "", None)


def test_rows_that_were_scaled_need_the_factor(tmp_path):
    shutil.copytree(GOLDEN / "saelens_standard", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "cfg.json").read_text()) | {"normalize_activations": "expected_average_only_in"}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    for which in ({}, {"scale": 0}, {"scale": float("nan")}, {"scale": True}):
        with pytest.raises(pc.ProgramError) as caught:
            pc.SAE.load(tmp_path, **which)
        assert caught.value.path == "scale"
    plain, rows = pc.SAE.load(GOLDEN / "saelens_standard"), numbers(np.random.default_rng(5), 5, D)
    scaled = pc.SAE.load(tmp_path, scale=2.5)
    assert close(scaled.encode(rows), plain.encode(2.5 * rows))
    assert close(scaled.reconstruct(rows), plain.reconstruct(2.5 * rows) / 2.5)


# -- the class

KINDS = {
    "relu": lambda rng: {},
    "topk": lambda rng: {"k": 3},
    "all": lambda rng: {"k": F},
    "jumprelu": lambda rng: {"threshold": numbers(rng, F), "site": "z[2, 1]", "model": "m"},
    "gated": lambda rng: {"gain": abs(numbers(rng, F)) + 0.1, "offset": numbers(rng, F), "site": "resid_post[2]"},
    "gated_above": lambda rng: {"gain": abs(numbers(rng, F)) + 0.1, "offset": numbers(rng, F), "threshold": numbers(rng, F)},
    "layer_norm": lambda rng: {"normalize": "layer_norm", "k": 4},
    "rms": lambda rng: {"normalize": "rms", "threshold": abs(numbers(rng, F))},
    "transcoder": lambda rng: {"width": 5, "site": "mlp_in[3]", "site_out": "mlp_out[3]", "threshold": numbers(rng, F)},
    "skip": lambda rng: {"width": 5, "skip": numbers(rng, 5, D)},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_arithmetic_and_the_round_trip(tmp_path, kind):
    rng = np.random.default_rng(len(kind))
    sae, rows = random_sae(rng, **KINDS[kind](rng)), 3 * numbers(rng, 7, D) + 1
    features, output = formula(sae, rows)
    assert close(sae.encode(rows), features)
    assert close(sae.reconstruct(rows), output)
    assert sae.is_local == (kind not in ("topk", "all", "layer_norm", "rms"))
    sae.save(tmp_path / "new" / "folder")
    again = pc.SAE.load(tmp_path / "new" / "folder")
    assert close(again.encode(rows), features)
    assert close(again.reconstruct(rows), output)
    assert (again.site, again.site_out, again.model) == (sae.site, sae.site_out, sae.model)
    assert again.content == sae.content or "gated" in kind  # gains are stored as logarithms


def test_a_feature_whose_gain_is_not_positive_is_not_local():
    """It falls with its pre-activation: no product above a threshold decides when it is active."""
    rng = np.random.default_rng(5)
    for gain in (-1.0, 0.0):
        gains = np.append(np.ones(F - 1), gain)
        assert not random_sae(rng, gain=gains, offset=numbers(rng, F)).is_local


def test_of_equal_values_the_first_are_kept():
    sae = pc.SAE(np.ones((F, D)), np.zeros(F), np.ones((F, D)), np.zeros(D), k=3)
    assert (np.nonzero(sae.encode(np.ones((2, D))))[1] == [0, 1, 2, 0, 1, 2]).all()
    assert not sae.encode(-np.ones((2, D))).any()


def test_a_row_of_zeros_stays_finite():
    for normalize in ("rms", "layer_norm"):
        sae = random_sae(np.random.default_rng(6), normalize=normalize)
        assert np.isfinite(sae.reconstruct(np.zeros((2, D)))).all()


def test_content_is_of_all_numbers_and_arrays_are_read_only():
    rng = np.random.default_rng(7)
    weight = numbers(rng, F, D)
    sae = pc.SAE(weight, np.zeros(F), weight, np.zeros(D), k=3, site="resid_post[1]")
    same = pc.SAE(weight.tolist(), [0] * F, torch.tensor(weight), np.zeros(D, np.float16), k=3)
    assert sae.content == same.content
    others = [
        pc.SAE(weight, np.zeros(F), weight, np.ones(D), k=3),
        pc.SAE(weight, np.zeros(F), weight, np.zeros(D), k=4),
        pc.SAE(weight, np.zeros(F), weight, np.zeros(D), normalize="rms", k=3),
        pc.SAE(weight, np.zeros(F), weight, np.zeros(D), np.zeros(F), k=3),
    ]
    assert len({sae.content, *(other.content for other in others)}) == 5
    before = sae.encoder.copy()
    weight[:] = 0
    assert (sae.encoder == before).all()
    with pytest.raises(ValueError, match="read-only"):
        sae.encoder[0] = 0
    with pytest.raises(AttributeError):
        sae.k = 4
    assert (sae.n_features, sae.width) == (F, D)


def test_what_a_call_lacks_is_named():
    rng = np.random.default_rng(8)
    sae = random_sae(rng, normalize="rms")
    with pytest.raises(pc.ProgramError) as caught:
        sae.decode(numbers(rng, 2, F))
    assert caught.value.path == "rows"
    for call, path in (
        (lambda: sae.encode(numbers(rng, 2, D + 1)), "rows"),
        (lambda: sae.encode(numbers(rng, D)), "rows"),
        (lambda: sae.decode(numbers(rng, 2, F - 1), numbers(rng, 2, D)), "features"),
        (lambda: sae.decode(numbers(rng, 2, F), numbers(rng, 3, D)), "rows"),
    ):
        with pytest.raises(pc.ShapeError) as caught:
            call()
        assert caught.value.path == path


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"k": 0}, "k"), ({"k": -1}, "k"), ({"k": F + 1}, "k"), ({"k": True}, "k"), ({"k": 2.0}, "k"),
        ({"k": "3"}, "k"), ({"gain": np.ones(F)}, "offset"), ({"offset": np.ones(F)}, "gain"),
        ({"normalize": "batch"}, "normalize"), ({"threshold": np.ones(F - 1)}, "threshold"),
        ({"threshold": np.full(F, np.nan)}, "threshold"), ({"skip": np.ones((D, D + 1))}, "skip"),
        ({"width": D + 1, "normalize": "rms"}, "decoder_bias"), ({"site": "nowhere[2]"}, "site"), ({"site": "resid_post"}, "site"), ({"site": "resid_post[2:4]"}, "site"),
        ({"site": 3}, "site"),
        ({"site_out": "nowhere[2]"}, "site_out"), ({"skip": "text"}, "skip"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(fields, path):
    with pytest.raises(pc.ProgramError) as caught:
        random_sae(np.random.default_rng(9), **fields)
    assert caught.value.path == path


def test_saelens_has_no_class_for_some(tmp_path):
    rng = np.random.default_rng(10)
    for fields in (
        {"k": 3, "site": "mlp_in[3]", "site_out": "mlp_out[3]"}, {"k": 3, "threshold": numbers(rng, F)},
        {"gain": np.zeros(F), "offset": np.zeros(F)}, {"gain": np.ones(F), "offset": np.zeros(F), "width": 5},
    ):  # fmt: skip
        with pytest.raises(pc.ProgramError, match="SAELens"):
            random_sae(rng, **fields).save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(pc.ProgramError) as caught:
        random_sae(rng).save(tmp_path / "file")
    assert caught.value.path == "path"


# -- hostile files


def refused(path: Path, word: str, **which) -> None:
    with pytest.raises(pc.PatchclampError) as caught:
        pc.SAE.load(path, **which)
    assert isinstance(caught.value, pc.ProgramError)
    assert word in str(caught.value)


def changed(folder: Path, name: str, config: dict | None = None, **arrays) -> Path:
    """A golden folder with other arrays (None: without it) and another config."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    (file,) = [*folder.glob("*.safetensors"), *folder.glob("*.pt")]
    if file.suffix == ".pt":
        tensors = torch.load(file) | arrays
        torch.save({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    else:
        found = read_arrays(file)[0] | arrays
        save_file({key: array for key, array in found.items() if array is not None}, file)
    (text,) = folder.glob("*.json")
    text.write_text(json.dumps(json.loads(text.read_text()) | (config or {})))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_every_array_is_checked(tmp_path, name):
    """Each array that is read may not be missing, of another shape, or NaN or infinite."""
    sae = pc.SAE.load(changed(tmp_path / "same", name))
    assert sae.content == pc.SAE.load(GOLDEN / name).content
    (file,) = [*(GOLDEN / name).glob("*.safetensors"), *(GOLDEN / name).glob("*.pt")]
    is_torch = file.suffix == ".pt"
    found = {key: one.numpy() for key, one in torch.load(file).items()} if is_torch else read_arrays(file)[0]
    unread = {"k", "group_sizes"} | ({"threshold"} if name == "dictionary_AutoEncoderTopK" else set())
    if sae.normalize == "rms" or sae.k is not None:
        unread |= {key for key in found if key.startswith("dataset")}
    for key, array in found.items():
        if key in unread:
            continue
        wrong = [None, *(np.full_like(array, value) for value in (np.nan, np.inf))]
        if array.ndim:
            wrong += [array[:-1], array[..., :0], np.ones((2, 3, 4), np.float32)]
        for number, value in enumerate(wrong):
            value = torch.tensor(value) if is_torch and value is not None else value
            refused(changed(tmp_path / f"{key}{number}", name, **{key: value}), file.name)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("saelens_topk", {"k": -1}), ("saelens_topk", {"d_in": D + 1}), ("sparsify/layers.3", {"d_in": "8"}), ("saelens_topk", {"k": F + 1}), ("saelens_topk", {"k": "5"}),
        ("saelens_topk", {"k": None}), ("saelens_standard", {"architecture": "temporal"}),
        ("saelens_standard", {"architecture": 3}), ("saelens_standard", {"normalize_activations": "covariance_whitening"}),
        ("saelens_old_topk", {"activation_fn_str": "tanh-relu"}), ("saelens_old_topk", {"activation_fn_kwargs": {"k": -3}}),
        ("saelens_transcoder", {"normalize_activations": "layer_norm"}), ("saelens_standard", {"metadata": []}),
        ("dictionary_AutoEncoder", {"trainer": {"dict_class": "IdentityDict"}}), ("dictionary_AutoEncoder", {"trainer": None}),
        ("dictionary_AutoEncoderTopK", {"trainer": {"dict_class": "AutoEncoderTopK", "k": -2}}),
        ("sparsify/layers.3", {"k": -5}), ("sparsify/layers.3", {"signed": True}),
        ("sparsify/layers.3", {"activation": "groupmax"}), ("llama_scope_jumprelu", {"sae_type": "clt"}),
        ("llama_scope_jumprelu", {"act_fn": "batchtopk"}), ("llama_scope_jumprelu", {"use_glu_encoder": True}),
        ("llama_scope_jumprelu", {"norm_activation": "batch-wise"}), ("llama_scope_jumprelu", {"d_model": -4}),
        ("llama_scope_topk", {"top_k": 0}),
        ("llama_scope_jumprelu", {"dataset_average_activation_norm": {"in": -1, "out": 1}, "hook_point_in": "x"}),
    ],
)  # fmt: skip
def test_configs_are_checked(tmp_path, name, config):
    refused(changed(tmp_path / "x", name, config), ".")


def test_a_config_that_is_no_config(tmp_path):
    for number, text in enumerate(
        (b"", b"[]", b"{", b"[" * 100_000, b'{"d_in": 8}' + b" " * (1 << 20), b"\xff\xfe", b"NaN")
    ):
        folder = changed(tmp_path / str(number), "saelens_standard")
        (folder / "cfg.json").write_bytes(text)
        refused(folder, "cfg.json")


def test_lying_safetensors(tmp_path):
    folder = changed(tmp_path / "x", "saelens_standard")
    file = folder / "sae_weights.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def written(header: dict | bytes, length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text + whole[8 + size :]

    def with_entry(**fields) -> dict:
        return header | {"W_enc": header["W_enc"] | fields}

    begin, end = header["W_enc"]["data_offsets"]
    for content in (
        b"", whole[:100], whole[:-1], written(header, 2**63), written(header, 5), written(b"{"), written(b"[]"),
        written(with_entry(shape=[10**6, 10**6])), written(with_entry(shape=[-8, -24])), written(with_entry(dtype="X9")),
        written(with_entry(dtype="BF16")), written(with_entry(data_offsets=[begin, end + 4])),
        written(with_entry(data_offsets=[begin - 4, end])), written(with_entry(data_offsets=[0, 2**63])),
    ):  # fmt: skip
        file.write_bytes(content)
        refused(folder, file.name)


class Code:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_pickles_with_code_do_not_run(tmp_path):
    mark, file = tmp_path / "mark", tmp_path / "layer3.sae.pt"
    tensors = qwen_scope(tmp_path, 3)
    torch.save(tensors | {"W_enc": Code(mark)}, file)
    refused(file, file.name, k=3)
    torch.save(torch.nn.Linear(D, F), file)
    refused(file, file.name, k=3)
    file.write_bytes(pickle.dumps(Code(mark)))  # not an archive
    refused(file, file.name, k=3)
    torch.save(tensors, file, _use_new_zipfile_serialization=False)
    refused(file, file.name, k=3)
    torch.save([1, 2], file)
    refused(file, file.name, k=3)
    np.savez(tmp_path / "params.npz", W_enc=np.array([Code(mark)], dtype=object))
    refused(tmp_path / "params.npz", "params.npz")
    assert not mark.exists()


def test_huge_sizes_are_refused_before_they_are_made(tmp_path):
    file = tmp_path / "layer3.sae.pt"
    tensors = qwen_scope(tmp_path, 3)
    torch.save(tensors | {"W_enc": torch.zeros(1).expand(10**7, 10**7)}, file)
    refused(file, "W_enc", k=3)
    torch.save(tensors | {"W_enc": torch.zeros(F, D).to_sparse()}, file)
    refused(file, "W_enc", k=3)
    torch.save(tensors | {"W_enc": torch.zeros(F, D, device="meta")}, file)
    refused(file, file.name, k=3)
    with zipfile.ZipFile(tmp_path / "params.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("W_enc.npy", bytes(10**7))
    refused(tmp_path / "params.npz", "params.npz")
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as archive, archive.open("W_enc.npy", "w") as array:
        np.lib.format.write_array_header_1_0(array, {"descr": "<f4", "fortran_order": False, "shape": (10**8, 10**8)})
    refused(tmp_path / "params.npz", "params.npz")


def test_paths_that_are_no_sae(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.safetensors").write_bytes(b"")
    (tmp_path / "folder" / "params.npz").mkdir(parents=True)
    (tmp_path / "layer3.sae.pt").mkdir()
    for name in ("missing", "empty", "file.safetensors", "folder", "folder/params.npz", "layer3.sae.pt"):
        refused(tmp_path / name, name.rpartition("/")[2], k=3)
    with pytest.raises(pc.UnknownName):
        pc.SAE.load(GOLDEN / "saelens_topk", layr=3)
    with pytest.raises(pc.ProgramError) as caught:
        pc.SAE.load(GOLDEN / "saelens_topk", k=3)
    assert caught.value.path == "k"


# -- on a device


def encoded(sae: pc.SAE) -> list[BoundOp]:
    return [BoundOp("edits[0]", Encoded("a", sae.content), (0,), (), (PositionRange(0, 1),))]


def keep(name: str, sae: pc.SAE) -> Keep:
    """A capture of two features."""
    return Keep(0, reader=FeatureReader(name, (0, 2), sae.content), top=2)


@pytest.mark.parametrize("normalize", NORMS)
@pytest.mark.parametrize("kind", [{}, {"k": 3}, {"threshold": np.ones(F)}, {"gain": np.ones(F), "offset": np.ones(F)}])
def test_features_of_a_row_that_is_not_finite_are_not_finite(normalize, kind):
    """Zeros would say that no feature is active."""
    rng = np.random.default_rng(4)
    sae, rows = random_sae(rng, normalize=normalize, **kind), numbers(rng, 3, D)
    of = Dictionaries(torch.device("cpu"))
    of.attach("a", sae, torch.float32)
    rows[1, 2] = np.nan
    reading = of.reading(msgspec.structs.replace(keep("a", sae), reader=FeatureReader("a", None, sae.content)))
    for values in (sae.encode(rows), of.of("a").encode(torch.tensor(rows)).numpy()):
        assert np.isfinite(values[[0, 2]]).all()
        assert np.isnan(values[1]).all()  # whichever are asked for
    assert np.isnan(of.numbered(reading.number).read(torch.tensor(rows)).numpy()[:, 0]).tolist() == [False, True, False]


def test_the_reserved_memory_is_reused_once_no_run_needs_it():
    sae, other = (random_sae(np.random.default_rng(seed)) for seed in (8, 9))
    size = Dictionaries(torch.device("cpu")).attach("a", sae, torch.float32)
    of = Dictionaries(torch.device("cpu"), 2 * size + 1)
    for name in "ab":
        assert of.attach(name, sae, torch.float32) == 0
    with pytest.raises(pc.CapacityError, match="sae_bytes"):
        of.attach("c", sae, torch.float32)
    rows = torch.tensor(numbers(np.random.default_rng(1), 3, D))
    [edit] = of.code_of(encoded(sae)).values()  # of a run under way
    reading, expected = of.reading(keep("a", sae)), edit(rows, torch.arange(3))
    of.detach("a")
    with pytest.raises(pc.MissingSource):
        of.code_of(encoded(sae))
    with pytest.raises(pc.CapacityError):
        of.attach("c", other, torch.float32)
    assert torch.equal(edit(rows, torch.arange(3)), expected)
    del edit
    with pytest.raises(pc.CapacityError):
        of.attach("c", other, torch.float32)
    assert close(of.numbered(reading.number).read(rows)[:, :2].numpy(), sae.encode(rows)[:, [0, 2]])
    del reading
    of.attach("c", other, torch.float32)
    with pytest.raises(pc.CapacityError):
        of.attach("a", sae, torch.float32)
    for name, each in (("b", sae), ("c", other)):
        reading = of.reading(keep(name, each))
        assert close(of.numbered(reading.number).read(rows)[:, :2].numpy(), each.encode(rows)[:, [0, 2]])


def test_programs_share_a_reading_of_features():
    rng = np.random.default_rng(2)
    sae, rows = random_sae(rng), torch.tensor(numbers(rng, 5, D + 3))
    of = Dictionaries(torch.device("cpu"))
    of.attach("a", sae, torch.float32)
    largest = msgspec.structs.replace(keep("a", sae), reader=FeatureReader("a", None, sae.content, 3), top=4)
    readings = [of.reading(each) for each in (keep("a", sae), largest, keep("a", sae))]
    assert readings[0] is readings[2]
    assert len({each.number for each in readings} | set(range(len(POOLS) + 1))) == len(POOLS) + 3
    found, values = of.numbered(readings[1].number).read(rows).numpy(), sae.encode(rows[:, 3:].numpy())
    assert close(found[:, :4], np.sort(values, 1)[:, ::-1][:, :4])
    ids = np.ascontiguousarray(found[:, 4:]).view(np.int32)
    assert close(np.take_along_axis(values, ids, 1), found[:, :4])
    number = readings[0].number
    del readings
    assert of.reading(largest).number == number  # free again
    held = of.reading(largest)
    of.attach("a", sae, torch.bfloat16)
    again = of.reading(largest)
    assert (again.sae.content, again.number != held.number) == (held.sae.content, True)
    assert not close(of.numbered(again.number).read(rows).numpy()[:, :4], found[:, :4])
    with pytest.raises(pc.MissingSource):
        of.reading(msgspec.structs.replace(largest, reader=FeatureReader("a", None, "0" * 64)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_computes_the_same(kind):
    rng = np.random.default_rng(len(kind))
    sae, rows = random_sae(rng, **KINDS[kind](rng)), 3 * numbers(rng, 7, D) + 1
    of = Dictionaries(torch.device("cpu"))
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        of.attach("a", sae, dtype)
        values = of.of("a").encode(torch.tensor(rows))
        output = of.of("a").decode(values, torch.tensor(rows))
        if sae.k in (None, F) or dtype == torch.float32:  # rounded, another feature may be among the largest
            assert (values - torch.tensor(sae.encode(rows))).abs().max() <= most * (1 + np.abs(sae.encode(rows)).max())
        assert (output - torch.tensor(sae.decode(values, rows))).abs().max() <= most * (1 + output.abs().max())


@pytest.mark.parametrize("change", [
    {"reader": FeatureReader("b", None, "")}, {"reader": FeatureReader("a", None, "0" * 64)}, {"reader": None},
    {"reader": FeatureReader("a", (F,), "")}, {"reader": FeatureReader("a", (-1,), "")},
    {"reader": FeatureReader("a", (1, 2), "")}, {"reader": FeatureReader("a", None, "", 1)}, {"top": 0},
    {"top": F + 1}, {"top": 1 << 40}, {"matrix": "v:" + "0" * 64, "products": 2}, {"probe": "p"}, {"lens": True},
    {"pool": 1}, {"in_step": True},
], ids=str)  # fmt: skip
def test_forged_readings_are_refused(change):
    sites, sae = SiteMap(LLAMA, Sizes(2, D, 9)), random_sae(np.random.default_rng(1))
    sites.dictionaries["a"] = placed(sae, sites, "a", "resid_post[1]", None, "float32")
    prompt = Prompt([1, 2, 3], lambda: ("", []))
    bound = bind(Program.of((), [pc.Features("a", top=1)]), "mine", prompt, 3, sites, None)
    verify(bound, {}, 3, 5, sites)
    keep = bound.ops[0].action
    if (reader := change.get("reader")) is not None and not reader.content:
        change = {"reader": msgspec.structs.replace(reader, content=sae.content)}
    for field in ({"points": (0,)}, {"columns": 1 | 2 << 16}, {"action": msgspec.structs.replace(keep, **change)}):
        forged = msgspec.structs.replace(bound, ops=(msgspec.structs.replace(bound.ops[0], **field),))
        with pytest.raises(pc.ProgramError):
            verify(forged, {}, 3, 5, sites)
