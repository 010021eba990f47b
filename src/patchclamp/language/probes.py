"""Linear probes: weights from files and from fitted scikit-learn and PyTorch models, and activations."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.values import as_file

if TYPE_CHECKING:
    import numpy as np

NAMES = {"weight": ("weight", "coef_", "W"), "bias": ("bias", "intercept_", "b")}


def read_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the arrays and metadata of a .safetensors, .npz or .npy file; the array of a .npy file is `weight`.

    Raises `ProgramError` for other file types. Pickles are rejected.
    """
    import numpy as np
    import safetensors

    file, metadata = Path(as_file(path, "path")), dict[str, str]()
    try:
        if file.suffix == ".safetensors":
            with safetensors.safe_open(file, "np") as opened:
                types = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
                found = {
                    name: _bfloat16(file, name) if dtype == "BF16" else opened.get_tensor(name)
                    for name, dtype in types.items()
                }
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
    except Exception as error:  # of many classes, for files that are not what they seem
        raise ProgramError(f"{file.name!r} is not a valid {file.suffix} file: {error}", "path") from None
    return found, metadata


def check_archive(file: Path) -> None:
    """Raise `ProgramError` for an invalid zip archive, or one that expands to over 64 times its size."""
    try:
        with zipfile.ZipFile(file) as opened:
            size = sum(member.file_size for member in opened.infolist())
    except OSError as error:
        raise ProgramError(f"cannot read {file.name!r}: {error.strerror or error}", "path") from None
    except Exception as error:  # of many classes, as above
        raise ProgramError(f"{file.name!r} is not a valid {file.suffix} file: {error}", "path") from None
    if size > 64 * file.stat().st_size:
        raise ProgramError(f"{file.name!r} would expand to {size} bytes", "path")


def _bfloat16(file: Path, name: str) -> np.ndarray:
    """A bfloat16 tensor of a valid .safetensors file as fp32; NumPy does not have the type."""
    import numpy as np

    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensor = msgspec.json.decode(opened.read(length))[name]
        begin, end = tensor["data_offsets"]
        opened.seek(8 + length + begin)
        halves = np.frombuffer(opened.read(end - begin), "<u2")
    return (halves.astype("<u4") << 16).view("<f4").reshape(tensor["shape"])


def read_probe(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read `weight`, an optional `bias` and the metadata of a file. Raises like `read_arrays`, and `ProgramError` for
    other contents."""
    found, metadata = read_arrays(path)
    arrays = {part: found[name] for part, names in NAMES.items() for name in names[::-1] if name in found}
    others = found.keys() - {name for names in NAMES.values() for name in names}
    if "weight" not in arrays or others:
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


def linear_model(model: Any) -> tuple[np.ndarray, np.ndarray | None, str | None]:
    """The weight [k, D], bias [k] and activation of a fitted linear model, with the scalers before it folded in.

    Raises `ProgramError` for a model that is not linear or not fitted.
    """
    import numpy as np

    if hasattr(model, "steps"):  # a pipeline of scikit-learn
        *scalers, (_, last) = model.steps
        weight, bias, activation = linear_model(last)
        weight, bias = weight.astype(np.float64), np.zeros(len(weight)) if bias is None else bias.astype(np.float64)
        for _, scaler in reversed(scalers):
            if scaler in (None, "passthrough"):
                continue
            if type(scaler).__name__ != "StandardScaler" or not hasattr(scaler, "n_features_in_"):
                raise ProgramError(f"expected fitted StandardScalers before the model, got {type(scaler).__name__}")
            weight = weight if scaler.scale_ is None else weight / scaler.scale_
            bias = bias if scaler.mean_ is None or not scaler.with_mean else bias - weight @ scaler.mean_
        return weight, bias, activation
    if hasattr(model, "coef_"):
        weight, bias = np.atleast_2d(model.coef_), np.atleast_1d(np.asarray(model.intercept_, np.float64))
        return weight, np.broadcast_to(bias, len(weight)), _activation(model, len(weight))
    if hasattr(model, "in_features") and hasattr(model, "weight"):
        weight, *biases = (
            part.detach().float().cpu().numpy() for part in (model.weight, model.bias) if part is not None
        )
        return weight, biases[0] if biases else None, None
    raise ProgramError(
        f"expected a fitted linear model of scikit-learn or a torch.nn.Linear, got {type(model).__name__}", "model"
    )


def _activation(model: Any, outputs: int) -> str | None:
    """The activation that a classifier applies to its logits."""
    if not hasattr(model, "predict_proba"):
        return None
    if getattr(model, "multi_class", "") == "ovr" and outputs > 1:
        raise ProgramError("one-versus-rest probabilities are not a softmax; pass activation= or fit multinomial")
    return "sigmoid" if outputs == 1 else "softmax"


def activated(products: Any, activation: str | None) -> Any:
    """Apply a probe's activation to a tensor or an array; softmax is over the last axis."""
    import numpy as np

    if activation is None:
        return products
    if not isinstance(products, np.ndarray):  # by the same arithmetic on every engine
        return products.new_tensor(activated(products.numpy(), activation))
    if activation == "relu":
        return np.maximum(products, 0)
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-products.astype(np.float64)))).astype(np.float32)
    powers = np.exp(products.astype(np.float64) - products.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(np.float32)
