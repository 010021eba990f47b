"""Linear probes: weights from files and from fitted scikit-learn and PyTorch models, and activations."""

from __future__ import annotations

import copy
import os
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import as_array, as_file

if TYPE_CHECKING:
    import numpy as np

NAMES = {"weight": "weight", "coef_": "weight", "bias": "bias", "intercept_": "bias"}


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and metadata of a .safetensors, .npz or .npy file; a .npy file's array is named `weight`.

    Raises `ProgramError` for other file types. Pickles are rejected.
    """
    import numpy as np
    import safetensors

    file, found, metadata = Path(as_file(path, "path")), dict[str, np.ndarray](), dict[str, str]()
    try:
        if file.suffix == ".safetensors":
            with safetensors.safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    is_bf16 = opened.get_slice(name).get_dtype() == "BF16"
                    found[name] = _bfloat16(file, name) if is_bf16 else opened.get_tensor(name)
                metadata = opened.metadata() or {}
        elif file.suffix == ".npz":
            check_archive(file)
            with np.load(file, allow_pickle=False) as opened:
                found = dict(opened)
        elif file.suffix == ".npy":
            found = {"weight": np.load(file, allow_pickle=False)}
        else:
            raise ProgramError(f"expected a .safetensors, .npz or .npy file, got {file.name!r}", "path")
    except OSError as error:
        raise ProgramError(f"cannot read {file.name!r}: {error.strerror or error}", "path") from None
    except PatchclampError:
        raise
    except Exception as error:  # mislabelled files raise many classes
        raise ProgramError(f"{file.name!r} is not a valid {file.suffix} file: {error}", "path") from None
    return found, metadata


def check_archive(file: Path) -> None:
    """Raise `ProgramError` for a zip archive that expands over 64-fold, and zipfile's errors if it is invalid."""
    with zipfile.ZipFile(file) as opened:
        size = sum(member.file_size for member in opened.infolist())
    if size > 64 * file.stat().st_size:
        raise ProgramError(f"{file.name!r} would expand to {size} bytes, over 64 times the file size", "path")


def _bfloat16(file: Path, name: str) -> np.ndarray:
    """Read a bfloat16 tensor of a valid .safetensors file as fp32; NumPy has no bfloat16."""
    import numpy as np

    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensor = msgspec.json.decode(opened.read(length))[name]
        begin, end = tensor["data_offsets"]
        opened.seek(8 + length + begin)
        return (np.frombuffer(opened.read(end - begin), "<u2").astype("<u4") << 16).view("<f4").reshape(tensor["shape"])


def read_probe(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a probe file: `weight`, an optional `bias`, and metadata. Raises `ProgramError` for other files."""
    found, metadata = read_arrays(path)
    arrays = {NAMES.get(name, name): array for name, array in found.items()}
    if "weight" not in arrays or len(arrays) < len(found) or arrays.keys() - NAMES.keys():
        raise ProgramError(f"expected tensors weight and bias, got {', '.join(sorted(found)) or 'none'}", "path")
    return arrays, metadata


def write_probe(
    path: str | os.PathLike[str], weight: np.ndarray, bias: np.ndarray | None, activation: str | None
) -> None:
    """Write a file that `read_probe` reads."""
    from safetensors.numpy import save_file

    if Path(as_file(path, "path")).suffix != ".safetensors":
        raise ProgramError(f"expected a name that ends in .safetensors, got {Path(path).name!r}", "path")
    tensors = {"weight": weight.copy()} | ({} if bias is None else {"bias": bias.copy()})
    save_file(tensors, Path(path), {} if activation is None else {"activation": activation})


def linear_model(model: Any, activation: str | None) -> tuple[np.ndarray, np.ndarray | None, str | None]:
    """Return a fitted linear model's weight [k, D], bias [k] or None, and activation, with preceding scalers folded in.
    Without `activation`, use the model's. Raises `ProgramError` unless they score random rows as the model does."""
    import numpy as np

    draw, own = np.random.default_rng(0), activation is None and hasattr(model, "predict_proba")
    methods = ("predict_proba",) if own else ("decision_function", "predict", "forward")
    try:
        weight, bias = _affine(model)
        activation = ("sigmoid" if len(weight) == 1 else "softmax") if own else activation
        rows, products = draw.standard_normal((64, weight.shape[1])), draw.normal(0, 2, (64, len(weight)))
        # products small enough that no activation saturates and hides a difference
        rows += (products - rows @ weight.T - bias) @ np.linalg.pinv(weight, 1e-6).T
        found = activated(rows @ weight.T + bias, activation if own else None)
        method = next(each for each in methods if hasattr(model, each))
        exact = copy.deepcopy(model).double().cpu() if method == "forward" else model
        with warnings.catch_warnings(action="ignore"):  # scikit-learn warns about missing column names
            scores = as_array(getattr(exact, method)(exact.weight.new_tensor(rows) if method == "forward" else rows))
        scores = scores.reshape(len(rows), -1)[:, int(own and len(weight) == 1) :]
        if scores.shape != found.shape or not np.allclose(found, scores, atol=1e-3):
            score = f"{activation}(W h + b), so pass activation=" if own else "W h + b"
            raise ValueError(f"{method} differs from {score}")
    except Exception as error:  # other models raise many classes
        raise ProgramError(f"expected a fitted linear model, got {type(model).__name__}: {error}", "model") from None
    return weight, bias if bias.any() else None, activation


def _affine(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a linear model's weight [k, D] and bias [k], in fp64."""
    import numpy as np

    if hasattr(model, "steps"):  # a scikit-learn pipeline
        *scalers, (_, last) = model.steps
        weight, bias = _affine(last)
        for scaler in (scaler for _, scaler in reversed(scalers) if scaler not in (None, "passthrough")):
            weight = weight if scaler.scale_ is None else weight / scaler.scale_
            bias = bias if scaler.mean_ is None or not scaler.with_mean else bias - weight @ scaler.mean_
        return weight, bias
    if hasattr(model, "coef_"):
        dense = model.coef_.toarray() if hasattr(model.coef_, "toarray") else model.coef_
        weight, bias = np.atleast_2d(np.asarray(dense, np.float64)), np.asarray(model.intercept_, np.float64)
    else:  # a PyTorch module
        weight, bias = (np.zeros(1) if each is None else as_array(each) for each in (model.weight, model.bias))
    return weight, np.broadcast_to(bias, len(weight))


def activated(products: Any, activation: str | None) -> Any:
    """Apply a probe's activation to a tensor or an array; softmax is over the last axis."""
    import numpy as np

    if activation is None:
        return products
    if not isinstance(products, np.ndarray):  # the same arithmetic on every engine
        return products.new_tensor(activated(products.numpy(), activation))
    if activation == "relu":
        return np.maximum(products, 0)
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-products.astype(np.float64)))).astype(np.float32)
    powers = np.exp(products.astype(np.float64) - products.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
