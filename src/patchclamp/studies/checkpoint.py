"""The weights of a checkpoint that lies on this machine, read tensor by tensor by the names of the model's modules.

Studies need a few of a model's matrices beside its activations: the unembedding, and what heads and neurons write with.
An engine may run elsewhere, and its weights may be cut or packed, so they are read from the checkpoint, and what is
computed with them is proved against the live model before it is used (`readout.py`, `writing.py`).

V vocabulary · D model width
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchclamp.errors import ModelError

if TYPE_CHECKING:
    import torch

HEADS = ("lm_head", "embed_out", "output")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


class Checkpoint:
    """The safetensors files of a hub id in the cache, or of a folder. Nothing is downloaded.

    folder: where they are
    config: the model's config, of its text part

    Raises: `ModelError` if they are not on this machine.
    """

    def __init__(self, name: str) -> None:
        self.folder = _folder(name)
        self._file_of = _files(self.folder)
        self.config = _config(self.folder)

    def matrix(self, module: str) -> torch.Tensor:
        """A module's weight, fp32. Raises `ModelError` if there is none."""
        weight = self.tensor(f"{module}.weight")
        if weight is None:
            beside = [name for name in self._file_of if f"{module}." in name]
            found = f"; it has {', '.join(sorted(beside)[:4])}, which may be packed" if beside else ""
            raise ModelError(f"{self.folder} has no {module}.weight{found}: its numbers are needed as they are")
        return weight

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor by its whole name, fp32, or by the only one whose name ends so or lacks its beginning."""
        stored = self._stored_name(name)
        if stored is None:
            return None
        from safetensors import safe_open

        with safe_open(self._file_of[stored], "pt") as file:
            return file.get_tensor(stored).float()

    def _stored_name(self, name: str) -> str | None:
        """What the files call a tensor: checkpoints of a bare model lack the first word of a path, those of a model
        that reads images too have more words before it, or other ones."""
        inner = name.removeprefix("model.language_model.")
        renamed = (f"language_model.model.{inner}", f"model.{inner}") if inner != name else ()
        for stored in (name, name.partition(".")[2], *renamed):
            if stored in self._file_of:
                return stored
        longer = [stored for stored in self._file_of if stored.endswith(f".{name}")]
        return longer[0] if len(longer) == 1 else None

    def unembedding(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix [V, D] that makes logits of normed rows, and its bias [V]; the embedding where the two are tied.

        Raises: `ModelError` if there is none under a usual name.
        """
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        for names in (EMBEDDINGS, HEADS) if tied else (HEADS, EMBEDDINGS):
            for module in names:
                weight = self._only(f"{module}.weight")
                if weight is not None:
                    biases = [bias for head in HEADS if (bias := self._only(f"{head}.bias")) is not None]
                    return weight, biases[0] if biases else None
        raise ModelError(f"{self.folder} has no unembedding under a usual name: {', '.join((*HEADS, *EMBEDDINGS))}")

    def _only(self, ending: str) -> torch.Tensor | None:
        """The only tensor that is called so, or whose name ends so."""
        names = [name for name in self._file_of if name == ending or name.endswith(f".{ending}")]
        return self.tensor(names[0]) if len(names) == 1 else None

    @functools.cached_property
    def epsilons(self) -> tuple[float, ...]:
        """What the config says that norms add to the variance; if it says nothing, the two usual numbers."""
        stated = [float(value) for name in EPSILONS if (value := getattr(self.config, name, None)) is not None]
        return tuple(dict.fromkeys(stated)) or (1e-5, 1e-6)

    def number(self, *names: str) -> float | None:
        """The first of these settings that the config has."""
        values = [value for name in names if (value := getattr(self.config, name, None)) is not None]
        return float(values[0]) if values else None


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if name.startswith(("http://", "https://")) or Path(name).is_absolute():
        raise ModelError(f"{name} is no folder on this machine, so its weights cannot be read here")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise ModelError(
            f"the weights of {name} are not in the hub's cache on this machine ({type(error).__name__})"
        ) from None


def _files(folder: Path) -> dict[str, Path]:
    """Every stored tensor's name, and its file."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors files, so its weights cannot be read")
    names: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            names |= dict.fromkeys(file.keys(), path)
    return names


def _config(folder: Path) -> Any:
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise ModelError(f"the config in {folder} cannot be read here: {type(error).__name__}: {error}") from None
    return config.get_text_config()
