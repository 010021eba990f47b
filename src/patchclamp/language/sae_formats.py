"""SAE files: readers for seven formats, without their packages, and a writer for SAELens' format.

A reader returns the file's arrays, transposed to `SAE`'s shapes, and a `Fold`: the package's other operations on rows
and outputs. `SAE.load` checks the shapes and folds these operations into the weights, in fp64.

    F features · D row width · O output width
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, UnknownName, near
from patchclamp.language.probes import check_archive, read_arrays
from patchclamp.language.site import SPECS, hook, parse_site
from patchclamp.language.values import as_file, check_dense

if TYPE_CHECKING:
    import numpy as np

Config = TypeVar("Config")
MAX_CONFIG = 1 << 20  # bytes


class Fold(NamedTuple):
    """A package's operations around the encoder and the decoder.

    subtract: True if the decoder bias is subtracted from the row before the encoder
    unit_norm: True if pre-activations are multiplied by the feature's decoder norm, and values divided by this norm
        before the decoder
    scale_in, scale_out: rows are multiplied by `scale_in` before the encoder, and outputs divided by `scale_out`
    """

    subtract: bool = False
    unit_norm: bool = False
    scale_in: float = 1.0
    scale_out: float = 1.0


class Weights(dict[str, "np.ndarray"]):
    """The arrays of a file. A missing array raises `ProgramError`."""

    def __init__(self, file: Path) -> None:
        super().__init__(_read_torch(file) if file.suffix == ".pt" else read_arrays(file)[0])

    def __missing__(self, name: str) -> np.ndarray:
        raise ProgramError(f"expected an array {name!r}, got {', '.join(sorted(self)) or 'none'}", name)


Parts = tuple[dict[str, Any], Fold]
Which = dict[str, Any]


@contextlib.contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Add the file's name to errors."""
    try:
        yield
    except PatchclampError as error:
        raise type(error)(f"{file.name}: {error.message}", error.path) from None


def read_parts(path: str | os.PathLike[str], which: Which) -> tuple[dict[str, Any], Fold, Path]:
    """Read an SAE's fields from a folder or file. Returns the fields, the `Fold` to apply, and the weights file.
    `which`: the arguments of `SAE.load`."""
    given, which = Path(as_file(path, "path")), dict(which)
    arguments = ("layer", "k", "scale", "site", "site_out", "model")
    for name in which.keys() - set(arguments):
        words = f"SAE.load has no argument {name!r}{near(name, arguments)}"
        raise UnknownName(f"{words}; available: {', '.join(arguments)}", name)
    names = {name: which.pop(name) for name in arguments[3:] if name in which}
    files, reader = _recognise(given, which)
    with errors_of(files[-1]):
        fields, fold = reader(files, which)
        for name in which:
            raise ProgramError("not supported for this format", name)
    return fields | names, fold, files[-1]


def _recognise(given: Path, which: Which) -> tuple[list[Path], Callable[[list[Path], Which], Parts]]:
    """Detect an SAE's format. Returns the SAE's files, with the weights last, and the format's reader."""
    if not given.exists():
        raise ProgramError(f"cannot read {given.name!r}: no such file or folder", "path")
    if re.fullmatch(r"layer\d+\.sae\.pt", given.name):
        return [given], read_qwen_scope
    for folder in [given] if given.is_dir() else given.parents[:2]:
        for names, reader in FORMATS.items():
            files = [folder / name for name in names]
            if all(file.is_file() for file in files) and given in (folder, files[-1]):
                return files, reader
    if given.is_dir() and (layers := sorted(given.glob("layer*.sae.pt"))):
        file = given / f"layer{which.get('layer')}.sae.pt"
        if file not in layers:
            raise ProgramError(f"expected layer=, one of the {len(layers)} layers in {given.name!r}", "layer")
        return [file], read_qwen_scope
    known = "; ".join(" and ".join(names) for names in FORMATS)
    raise ProgramError(f"expected a folder with {known}; or layer<n>.sae.pt; got {given.name!r}", "path")


# -- SAELens: cfg.json and sae_weights.safetensors; W_enc [D, F], W_dec [F, O], W_skip [O, D]


class SaeLensConfig(msgspec.Struct):
    """SAELens' cfg.json, before and after version 6, which moved names to `metadata`."""

    d_in: int
    architecture: str = "standard"
    apply_b_dec_to_input: bool = True
    normalize_activations: str | bool | None = None
    rescale_acts_by_decoder_norm: bool = False
    k: int | None = None
    activation_fn: str | None = None
    activation_fn_str: str | None = None
    activation_fn_kwargs: dict[str, Any] | None = None
    hook_name: str | None = None
    hook_point: str | None = None
    hook_head_index: int | None = None
    model_name: str | None = None
    metadata: dict[str, Any] = {}


SAELENS = re.compile("standard|jumprelu|gated|topk|(matryoshka_)?batchtopk|(jumprelu_)?(skip_)?transcoder")
SAELENS_NORMS = {
    None: "none", False: "none", "none": "none", "layer_norm": "layer_norm", "constant_norm_rescale": "rms",
    True: "scale", "expected_average_only_in": "scale",
}  # fmt: skip


def read_saelens(files: list[Path], which: Which) -> Parts:
    config, weights = _config(files[0], SaeLensConfig), Weights(files[-1])
    architecture = config.architecture
    activation = config.activation_fn or config.activation_fn_str or "relu"
    norm = SAELENS_NORMS.get(config.normalize_activations)
    if not SAELENS.fullmatch(architecture):
        raise ProgramError(f"unknown architecture {architecture!r:.100}", "architecture")
    if activation not in ("relu", "topk") or norm is None:
        words = f"{activation!r:.50} or normalisation {config.normalize_activations!r:.50}"
        raise ProgramError(f"unknown activation {words}", "activation_fn")
    fields: dict[str, Any] = {
        "encoder": weights["W_enc"].T, "decoder": weights["W_dec"], "decoder_bias": weights["b_dec"],
    }  # fmt: skip
    if architecture == "gated":
        fields |= _gate(weights, "b_gate", "r_mag", "b_mag")
    else:
        fields["encoder_bias"] = weights["b_enc"]
    if "jumprelu" in architecture:
        fields["threshold"] = weights["threshold"]
    elif "batchtopk" in architecture:  # a training checkpoint; inference has one threshold
        fields["threshold"] = _spread(weights["topk_threshold"], weights["b_enc"])
    elif architecture == "topk" or activation == "topk":
        fields["k"] = config.k if config.k is not None else (config.activation_fn_kwargs or {}).get("k")
        if fields["k"] is None:
            raise ProgramError("expected k, the number of active features", "k")
    if "skip" in architecture:
        fields["skip"] = weights["W_skip"]
    if "scaling_factor" in weights and not (weights["scaling_factor"] == 1).all():
        raise ProgramError("SAEs with finetuned scales are not supported (nor by SAELens 6)", "scaling_factor")
    names = {name: value for name, value in config.metadata.items() if isinstance(value, str)}
    sites = [names.get(f"hf_{name}") or names.get(name) for name in ("hook_name", "hook_name_out")]
    fields |= _places(sites[0] or config.hook_name or config.hook_point, sites[1])
    head = config.metadata.get("hook_head_index", config.hook_head_index)
    if fields["site"].startswith("z[") and head is not None:
        fields["site"] = f"{fields['site'][:-1]}, {head}]"
    fields["model"] = names.get("model_name") or config.model_name or ""
    fields["normalize"] = "none" if norm == "scale" else norm
    scale = _scale(which) if norm == "scale" else 1.0
    is_transcoder = "transcoder" in architecture
    _check_widths(fields, config.d_in, is_transcoder)
    if is_transcoder and fields["normalize"] != "none":
        raise ProgramError("normalisation is not supported for transcoders", "normalize_activations")
    subtract = config.apply_b_dec_to_input and not is_transcoder
    return fields, Fold(subtract, config.rescale_acts_by_decoder_norm, scale_in=scale, scale_out=scale)


def write_saelens(
    path: str | os.PathLike[str], *, encoder: np.ndarray, encoder_bias: np.ndarray, decoder: np.ndarray,
    decoder_bias: np.ndarray, threshold: np.ndarray | None, gain: np.ndarray | None, offset: np.ndarray | None,
    k: int | None, normalize: str, skip: np.ndarray | None, site: str, site_out: str, model: str,
) -> None:  # fmt: skip
    """Write an `SAE`'s fields to cfg.json and sae_weights.safetensors."""
    import numpy as np
    from safetensors.numpy import save_file

    (features, width), outputs = encoder.shape, decoder.shape[1]
    is_transcoder = bool(site_out) or skip is not None or outputs != width
    if is_transcoder and (k is not None or gain is not None):
        raise ProgramError("SAELens has no TopK or gated transcoders", "k" if gain is None else "gain")
    if k is not None and (threshold is not None or gain is not None):
        raise ProgramError("SAELens has no SAE with both k and a threshold or a gate", "k")
    if gain is not None and not (gain > 0).all():
        raise ProgramError("SAELens has only positive gains", "gain")
    arrays = {"W_enc": encoder.T, "W_dec": decoder, "b_dec": decoder_bias}
    config: dict[str, Any] = {"d_in": width, "d_sae": features}
    architecture = "standard"
    if gain is not None and offset is not None:
        architecture, bias = "gated", encoder_bias.astype(np.float64)
        arrays["b_gate"] = bias - (0 if threshold is None else threshold)
        arrays |= {"r_mag": np.log(gain), "b_mag": offset + gain * bias}
    else:
        arrays["b_enc"] = encoder_bias
    if k is not None:
        architecture, config["k"] = "topk", k
    elif gain is None and threshold is not None:
        architecture, arrays["threshold"] = "jumprelu", threshold
    if is_transcoder:
        kinds = {"jumprelu": threshold is not None, "skip": skip is not None, "transcoder": True}
        architecture, config["d_out"] = "_".join(kind for kind, is_one in kinds.items() if is_one), outputs
    if skip is not None:
        arrays["W_skip"] = skip
    (hook_name, head), (hook_name_out, _) = _hook_name(site), _hook_name(site_out)
    names = {"model_name": model, "hook_name": hook_name, "hook_name_out": hook_name_out, "hook_head_index": head}
    config |= {
        "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": False, "architecture": architecture,
        "normalize_activations": {"rms": "constant_norm_rescale"}.get(normalize, normalize),
        "reshape_activations": "hook_z" if site.startswith("z[") else "none",
        "metadata": {"sae_lens_version": "6.54.0"} | {name: text for name, text in names.items() if text != ""},
    }  # fmt: skip
    folder = Path(as_file(path, "path"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.array(array, "<f4", order="C") for name, array in arrays.items()}
        save_file(contiguous, folder / "sae_weights.safetensors")
        (folder / "cfg.json").write_bytes(msgspec.json.encode(config))
    except OSError as error:
        raise ProgramError(f"cannot write to {folder.name!r}: {error.strerror or error}", "path") from None


# -- Gemma Scope 1 (params.npz) and 2 (params.safetensors, and perhaps config.json); w_enc [D, F], w_dec [F, O],
#    affine_skip_connection [D, O]. Version 1 gives its site only by its path


class GemmaConfig(msgspec.Struct):
    architecture: str = "jump_relu"
    model_name: str = ""
    hf_hook_point_in: str | None = None
    hf_hook_point_out: str | None = None
    affine_connection: bool = False


GEMMA_SITES = {
    "embedding": ("embed", ""), "transcoder": ("mlp_in", "mlp_out"), "resid_post": ("resid_post", ""),
    "-res/": ("resid_post", ""), "attn_out": ("z", ""), "-att/": ("z", ""), "mlp_out": ("mlp_out", ""),
    "-mlp/": ("mlp_out", ""),
}  # fmt: skip


def read_gemma_scope(files: list[Path], which: Which) -> Parts:
    path, beside = files[-1].absolute().as_posix(), files[-1].with_name("config.json")
    config = _config(beside, GemmaConfig) if beside.is_file() else GemmaConfig()
    if config.architecture != "jump_relu":
        raise ProgramError(f"unknown architecture {config.architecture!r:.100}", "architecture")
    weights = Weights(files[-1])
    weights.update({name.lower(): array for name, array in weights.items()})
    fields = {
        "encoder": weights["w_enc"].T, "encoder_bias": weights["b_enc"], "decoder": weights["w_dec"],
        "decoder_bias": weights["b_dec"], "threshold": weights["threshold"], "model": config.model_name,
        **_places(config.hf_hook_point_in, config.hf_hook_point_out),
    }  # fmt: skip
    if config.affine_connection or "affine_skip_connection" in weights:
        fields["skip"] = weights["affine_skip_connection"].T
    layer, kind = re.search(r".*layer_(\d+)", path), re.search(f".*({'|'.join(GEMMA_SITES)})", path)  # the last ones
    if not fields["site"] and kind and (layer or kind[1] == "embedding"):
        places = (
            f"{name}[{layer[1]}]" if layer and name not in ("", "embed") else name for name in GEMMA_SITES[kind[1]]
        )
        fields |= dict(zip(("site", "site_out"), places, strict=True))
    if not fields["model"] and (named := re.search(r"gemma-scope-(2-)?(\w+)-(pt|it)\b", path)):
        fields["model"] = (
            f"gemma-3-{named[2]}-{named[3]}" if named[1] else f"gemma-2-{named[2]}" + "-it" * (named[3] == "it")
        )
    _check_widths(fields, is_transcoder=bool(fields["site_out"]))
    # trained on embeddings before the model's factor sqrt(D); `embed` includes it
    scale = max(1, fields["decoder_bias"].size) ** -0.5 if fields["site"] == "embed" else 1.0
    return fields, Fold(scale_in=scale, scale_out=scale)


# -- Qwen-Scope: layer<n>.sae.pt; W_enc [F, D], W_dec [D, F]. The number of features and k are in the repository's name


def read_qwen_scope(files: list[Path], which: Which) -> Parts:
    path, weights = files[-1].absolute().as_posix(), Weights(files[-1])
    named = re.search(r".*SAE-Res-([^/]+)-W\d+K-L0_(\d+)", path)
    k = which.pop("k", int(named[2]) if named else None)
    if k is None:
        raise ProgramError("expected k=, the number of active features, which the path lacks (…-L0_50/…)", "k")
    layer = int("".join(re.findall(r"\d+", files[-1].name)))
    if which.pop("layer", layer) != layer:
        raise ProgramError(f"expected layer={layer}, as in the file's name", "layer")
    fields = {
        "encoder": weights["W_enc"], "encoder_bias": weights["b_enc"], "decoder": weights["W_dec"].T,
        "decoder_bias": weights["b_dec"], "k": k, "site": f"resid_post[{layer}]", "model": named[1] if named else "",
    }  # fmt: skip
    _check_widths(fields)
    return fields, Fold()


# -- Llama Scope and its successors (OpenMOSS): hyperparams.json and checkpoints/final.safetensors, or config.json and
#    sae_weights.safetensors; encoder.weight [F, D], decoder.weight [O, F], or W_E [D, F], W_D [F, O]


class OpenMossConfig(msgspec.Struct):
    d_model: Annotated[int, msgspec.Meta(gt=0, lt=1 << 24)]
    hook_point_in: str
    hook_point_out: str
    sae_type: str = "sae"
    act_fn: str = "relu"
    norm_activation: str = "dataset-wise"
    dataset_average_activation_norm: dict[str, float] | None = None
    sparsity_include_decoder_norm: bool = True
    apply_decoder_bias_to_pre_encoder: bool = False
    use_decoder_bias: bool = True
    use_glu_encoder: bool = False
    jump_relu_threshold: float | None = None
    top_k: int = 50


def read_llama_scope(files: list[Path], which: Which) -> Parts:
    import numpy as np

    config, weights = _config(files[0], OpenMossConfig), Weights(files[-1])
    if config.sae_type != "sae" or config.use_glu_encoder or config.act_fn not in ("relu", "jumprelu", "topk"):
        words = f"{config.sae_type!r:.50} with {config.act_fn!r:.50}" + " and a GLU" * config.use_glu_encoder
        raise ProgramError(f"expected an SAE with relu, jumprelu or topk, got {words}", "act_fn")
    averages = config.dataset_average_activation_norm or {}
    prefix = "dataset_average_activation_norm."
    averages |= {
        name.removeprefix(prefix): float(array.mean()) for name, array in weights.items() if name.startswith(prefix)
    }
    hooks, scales, normalize = {"in": config.hook_point_in, "out": config.hook_point_out}, (1.0, 1.0), "none"
    if config.norm_activation == "dataset-wise" and averages and "scale" not in which:
        norms = [averages.get(hooks[end], averages.get(end, 0.0)) for end in hooks]
        if not all(0 < norm < math.inf for norm in norms):
            raise ProgramError(f"expected positive norms, got {norms}", "dataset_average_activation_norm")
        scales = tuple(math.sqrt(config.d_model) / norm for norm in norms)
    elif config.norm_activation == "dataset-wise":
        scales = (_scale(which),) * 2
    elif config.norm_activation == "token-wise" and hooks["in"] == hooks["out"]:
        normalize = "rms"
    elif config.norm_activation != "inference":
        raise ProgramError(f"unknown normalisation {config.norm_activation!r:.50}", "norm_activation")
    if "W_E" in weights:
        encoder, encoder_bias, decoder = weights["W_E"].T, weights["b_E"], weights["W_D"]
    else:
        encoder, encoder_bias, decoder = weights["encoder.weight"], weights["encoder.bias"], weights["decoder.weight"].T
    bias = "b_D" if "W_E" in weights else "decoder.bias"
    fields = {
        "encoder": encoder, "encoder_bias": encoder_bias, "decoder": decoder, "normalize": normalize,
        "decoder_bias": weights[bias] if config.use_decoder_bias else np.zeros(decoder.shape[-1:], np.float32),
        **_places(config.hook_point_in, config.hook_point_out),
    }  # fmt: skip
    _check_widths(fields, config.d_model)
    logs = [array for name, array in weights.items() if name.endswith("log_jumprelu_threshold")]
    if config.act_fn == "jumprelu" and logs:
        with np.errstate(over="ignore"):
            fields["threshold"] = np.exp(logs[0].astype(np.float64))
    elif config.jump_relu_threshold and config.act_fn in ("jumprelu", "topk"):  # converted from topk
        # for the model's rows; the encoder sees rows scaled by `scales[0]`
        fields["threshold"] = np.full(np.shape(encoder_bias), config.jump_relu_threshold * scales[0])
    elif config.act_fn == "jumprelu":
        raise ProgramError("expected a threshold for jumprelu", "jump_relu_threshold")
    elif config.act_fn == "topk":
        fields["k"] = config.top_k
    by_norm = config.sparsity_include_decoder_norm
    if by_norm and "threshold" in fields and decoder.ndim == 2:  # keeps the features' scale
        norms = np.sqrt(np.einsum("fo,fo->f", decoder, decoder, dtype=np.float64))
        with np.errstate(all="ignore"):
            fields["threshold"] = _fits("threshold", fields["threshold"], norms) / norms
    return fields, Fold(config.apply_decoder_bias_to_pre_encoder, by_norm and "k" in fields, *scales)


# -- dictionary_learning: config.json and ae.pt; encoder.weight [F, D], decoder.weight [D, F], or W_enc [D, F],
#    W_dec [F, D]


class TrainerConfig(msgspec.Struct):
    dict_class: str
    k: int | None = None
    activation_dim: int | None = None
    layer: Any = None
    lm_name: Any = None
    submodule_name: Any = None


class DictionaryConfig(msgspec.Struct):
    trainer: TrainerConfig


DECODER_BIASES = {
    "AutoEncoder": "bias", "AutoEncoderNew": "decoder.bias", "GatedAutoEncoder": "decoder_bias",
    "AutoEncoderTopK": "b_dec", "BatchTopKSAE": "b_dec", "MatryoshkaBatchTopKSAE": "b_dec",
    "JumpReluAutoEncoder": "b_dec",
}  # fmt: skip


def read_dictionary(files: list[Path], which: Which) -> Parts:
    config = _config(files[0], DictionaryConfig).trainer
    kind, weights = config.dict_class, Weights(files[-1])
    if kind not in DECODER_BIASES:
        raise ProgramError(f"unknown class {kind!r:.100}; available: {', '.join(DECODER_BIASES)}", "trainer.dict_class")
    if "W_enc" in weights:
        fields: dict[str, Any] = {"encoder": weights["W_enc"].T, "decoder": weights["W_dec"]}
    else:
        fields = {"encoder": weights["encoder.weight"], "decoder": weights["decoder.weight"].T}
    fields["decoder_bias"] = weights[DECODER_BIASES[kind]]
    if kind == "GatedAutoEncoder":
        fields |= _gate(weights, "gate_bias", "r_mag", "mag_bias")
    else:
        fields["encoder_bias"] = weights["b_enc" if "W_enc" in weights else "encoder.bias"]
    if kind == "AutoEncoderTopK":
        fields["k"] = config.k if config.k is not None else weights["k"].tolist()
    elif kind in ("BatchTopKSAE", "MatryoshkaBatchTopKSAE", "JumpReluAutoEncoder"):
        fields["threshold"] = _spread(weights["threshold"], fields["encoder_bias"])
    _check_widths(fields, config.activation_dim)
    if type(config.layer) is int and str(config.submodule_name or "resid_post").startswith("resid_post"):
        fields["site"] = f"resid_post[{config.layer}]"
    fields["model"] = config.lm_name if isinstance(config.lm_name, str) else ""
    subtract = kind not in ("AutoEncoderNew", "JumpReluAutoEncoder")
    return fields, Fold(subtract, unit_norm=kind == "AutoEncoder")  # its loader normalizes decoder rows


# -- EleutherAI sparsify: cfg.json and sae.safetensors, in a folder named after the module; encoder.weight [F, D],
#    W_dec [F, O], W_skip [O, D]


class SparsifyConfig(msgspec.Struct):
    d_in: int
    k: int
    activation: str = "topk"
    signed: bool = False
    transcode: bool = False
    skip_connection: bool = False


def read_sparsify(files: list[Path], which: Which) -> Parts:
    config, weights = _config(files[0], SparsifyConfig), Weights(files[-1])
    if config.activation != "topk" or config.signed:
        raise ProgramError(f"expected unsigned topk, got {config.activation!r:.50}", "activation")
    fields = {
        "encoder": weights["encoder.weight"], "encoder_bias": weights["encoder.bias"], "decoder": weights["W_dec"],
        "decoder_bias": weights["b_dec"], "k": config.k, **_places(files[-1].absolute().parent.name, None),
    }  # fmt: skip
    if config.skip_connection:
        fields["skip"] = weights["W_skip"]
    _check_widths(fields, config.d_in, config.transcode)
    if config.transcode and fields["site"].startswith("mlp_out"):
        fields |= {"site": fields["site"].replace("out", "in"), "site_out": fields["site"]}
    return fields, Fold(subtract=not config.transcode)


FORMATS: dict[tuple[str, ...], Callable[[list[Path], Which], Parts]] = {
    ("cfg.json", "sae_weights.safetensors"): read_saelens,
    ("cfg.json", "sae.safetensors"): read_sparsify,
    ("config.json", "sae_weights.safetensors"): read_llama_scope,
    ("hyperparams.json", "checkpoints/final.safetensors"): read_llama_scope,
    ("config.json", "ae.pt"): read_dictionary,
    ("params.safetensors",): read_gemma_scope,
    ("params.npz",): read_gemma_scope,
}


# -- parts of several formats


def _config(file: Path, kind: type[Config]) -> Config:
    """Read a JSON file. Raises `ProgramError` if it is too long or does not match the schema."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ProgramError(f"expected at most {MAX_CONFIG} bytes in {file.name!r}", "path")
        return msgspec.json.decode(text, type=kind, strict=True)
    except OSError as error:
        raise ProgramError(f"cannot read {file.name!r}: {error.strerror or error}", "path") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProgramError(f"{file.name!r} is invalid: {error}", "path") from None


def _read_torch(file: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a `torch.save` file. Raises `ProgramError` without PyTorch, and for pickled code."""
    try:
        import torch
    except ImportError:
        raise ProgramError(f"reading {file.name!r} needs PyTorch: pip install torch", "path") from None
    try:
        check_archive(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except ProgramError:
        raise
    except Exception as error:  # mislabelled files raise many classes
        reason = str(error).strip().partition("\n")[0]
        raise ProgramError(f"{file.name!r} is not a valid .pt file with only tensors: {reason:.300}", "path") from None
    if not isinstance(loaded, dict):
        raise ProgramError(f"expected a mapping of tensors in {file.name!r}, got {type(loaded).__name__}", "path")
    found = {}
    for name, tensor in loaded.items():
        if isinstance(tensor, torch.Tensor):
            check_dense(tensor, name := str(name))
            if tensor.nbytes > tensor.untyped_storage().nbytes():  # an expanded view
                raise ProgramError("the file has fewer values than the tensor's shape requires", name)
            found[name] = (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()
    return found


def _check_widths(fields: dict[str, Any], width: int | None = None, is_transcoder: bool = False) -> None:
    """Raise `ShapeError` if the row width differs from the config's, or an SAE's output width from its row width."""
    reads, writes = (fields[name].shape[-1:] for name in ("encoder", "decoder"))
    if width is not None and reads != (width,):
        raise ShapeError(f"expected the config's row width {width}, got {list(reads)}", "encoder")
    if not is_transcoder and writes != reads:
        raise ShapeError(f"expected outputs as wide as the rows, {list(reads)}, got {list(writes)}", "decoder")


def _fits(name: str, array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return the array unchanged. Raises `ShapeError` unless it has the shape of `like`."""
    if array.shape != like.shape:
        raise ShapeError(f"expected {list(like.shape)}, got {list(array.shape)}", name)
    return array


def _gate(weights: Weights, gate_bias: str, log_gain: str, bias: str) -> dict[str, Any]:
    """Return a gated SAE's fields, for magnitudes relu(exp(log_gain) · encoder · row + bias)."""
    import numpy as np

    gate, log, magnitude = (_fits(name, weights[name], weights[gate_bias]) for name in (gate_bias, log_gain, bias))
    with np.errstate(over="ignore", invalid="ignore"):
        gain = np.exp(log.astype(np.float64))
        return {"encoder_bias": gate, "gain": gain, "offset": magnitude - gain * gate}


def _spread(number: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Broadcast a single threshold to all features."""
    import numpy as np

    return np.full(like.shape, number) if number.ndim == 0 else number


def _scale(which: Which) -> float:
    """Return the `scale` argument, which is required for a file without its training rows' scale factor."""
    scale = which.pop("scale", None)
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        words = "the SAE was trained on rows scaled to an average norm of sqrt(D), but the file lacks the factor"
        raise ProgramError(f"{words}; expected scale= (1 if folded into the weights), got {scale!r:.100}", "scale")
    return float(scale)


_MODULE = re.compile(r"(?:[\w.]*\.)?(?:layers|h|blocks)[._](\d{1,6})(?:\.(.+))?")
_PARTS = {
    None: "resid_post", "output": "resid_post", "pre_feedforward_layernorm.output": "mlp_in", "mlp.hook_in": "mlp_in",
    "mlp": "mlp_out", "post_feedforward_layernorm.output": "mlp_out", "self_attn.o_proj.input": "z",
    "self_attn": "attn_out", "attn": "attn_out", "attention": "attn_out",
}  # fmt: skip


def _places(read: str | None, written: str | None) -> dict[str, str]:
    """Return `site` and `site_out` for TransformerLens hook names or Transformers module names; "" for other names."""
    site, site_out = (_place(text) for text in (read, written))
    return {"site": site, "site_out": "" if site_out == site else site_out}


def _place(text: str | None) -> str:
    if hooked := hook(text or ""):
        return hooked[0] + ("" if hooked[1] is None else f"[{hooked[1]}]")
    if text == "embed_tokens":
        return "embed"
    module = _MODULE.fullmatch(text or "")
    part = _PARTS.get(module[2]) if module else None
    return f"{part}[{int(module[1])}]" if module and part else ""


def _hook_name(text: str) -> tuple[str, Any]:
    """Return a site's TransformerLens hook name and head index, each "" if the site has none."""
    site = parse_site(text) if text else None
    aliases = SPECS[site.name].transformer_lens if site else ()
    if not site or not aliases:
        return "", ""
    return aliases[0].format(l=site.layers), "" if site.index is None else site.index
