"""Weights of a checkpoint on this machine, read tensor by tensor: the norms, the unembedding, and the matrices with
which heads and neurons write into the stream.

Studies need a few of a model's matrices in addition to its activations. An engine may run elsewhere, and its weights
may be sharded or packed, so they are read from the checkpoint. Whatever is computed from them is first verified against
the live model: a readout must reproduce its logits from its own last stream, a writer what it wrote.

A readout maps rows of the stream to logits in one of two ways. From the checkpoint, it uses the norm and the matrix of
the files. From the engine, each row replaces the last stream of a run; this is exact for every model and needs no
files, but costs one request per row.

N rows · D model width · V vocabulary · W width of the row that is read: all heads' results, or all neurons
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from patchclamp.errors import ModelError, unknown
from patchclamp.language import Replace, Site, Vector, prompt
from patchclamp.lm import LM

if TYPE_CHECKING:
    import torch

Candidate = TypeVar("Candidate")
HEADS = ("lm_head", "embed_out", "output")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


class Checkpoint:
    """The safetensors files of a cached hub id or of a folder. Nothing is downloaded.

    folder: path of the files
    config: the model's config, text part only

    Raises: `ModelError` if they are not on this machine.
    """

    def __init__(self, name: str) -> None:
        self.folder = _folder(name)
        self._file_of = _files(self.folder)
        self.config = _config(self.folder)

    def matrix(self, module: str) -> torch.Tensor:
        """A module's weight, fp32. Raises `ModelError` if it is missing."""
        weight = self.tensor(f"{module}.weight")
        if weight is None:
            beside = [name for name in self._file_of if f"{module}." in name]
            found = f"; it has {', '.join(sorted(beside)[:4])}, possibly packed" if beside else ""
            raise ModelError(f"{self.folder} has no {module}.weight{found}; expected it as plain numbers")
        return weight

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor, fp32, by its full name or a variant of it (`_stored_name`); None if it is missing or ambiguous."""
        stored = self._stored_name(name)
        if stored is None:
            return None
        from safetensors import safe_open

        with safe_open(self._file_of[stored], "pt") as file:
            return file.get_tensor(stored).float()

    def _stored_name(self, name: str) -> str | None:
        """The name of a tensor in the files. Checkpoints of a bare model lack the first component of the path;
        checkpoints of a multimodal model have additional or different components before it."""
        inner = name.removeprefix("model.language_model.")
        renamed = (f"language_model.model.{inner}", f"model.{inner}") if inner != name else ()
        for stored in (name, name.partition(".")[2], *renamed):
            if stored in self._file_of:
                return stored
        longer = [stored for stored in self._file_of if stored.endswith(f".{name}")]
        return longer[0] if len(longer) == 1 else None

    def unembedding(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix [V, D] that maps normed rows to logits, and its bias [V]; the embedding if the two are tied.

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
        """The only tensor whose name is, or ends in, `ending`; None if there are several."""
        names = [name for name in self._file_of if name == ending or name.endswith(f".{ending}")]
        return self.tensor(names[0]) if len(names) == 1 else None

    @functools.cached_property
    def epsilons(self) -> tuple[float, ...]:
        """The values that the config lists as epsilon of its norms; the two usual ones if it lists none."""
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
    """The file of each stored tensor, by tensor name."""
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


class Norm(msgspec.Struct, frozen=True, eq=False):
    """x ↦ (x − mean) / √(variance + ε) · weight + bias if `centres`, otherwise without the mean (RMS norm).

    Source: Ba et al. 2016 (arXiv:1607.06450), equation 4; Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4.
    """

    centres: bool
    epsilon: float
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows_ND: torch.Tensor) -> torch.Tensor:
        normed_ND = self.frozen(rows_ND, rows_ND)
        return normed_ND if self.bias is None else normed_ND + self.bias

    def frozen(self, parts_ND: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """Apply the norm, without its bias, to parts that add up to rows, each divided by its row's scale. This is
        linear in the parts."""
        if self.centres:
            parts_ND = parts_ND - parts_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        scale_N1 = (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return parts_ND / scale_N1 * self.weight

    def pulled(self, directions_ND: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """The directions g with ⟨g, part⟩ = ⟨direction, `frozen` part⟩ for every part."""
        directions_ND = directions_ND * self.weight
        if self.centres:
            directions_ND = directions_ND - directions_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        return directions_ND / (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def possible_norms(checkpoint: Checkpoint, module: str) -> list[Norm]:
    """Candidates for the norm that a checkpoint calls `module`: with or without the mean, and with the weight as stored
    or around 1, as Gemma stores it. The live model's rows decide between them. Empty if the weight is not [D]."""
    import torch

    weight, bias = checkpoint.tensor(f"{module}.weight"), checkpoint.tensor(f"{module}.bias")
    if weight is None:
        weight = torch.ones(checkpoint.config.hidden_size)
    if weight.dim() != 1:
        return []
    return [
        Norm(centres, epsilon, stored, bias)
        for centres, epsilon, stored in itertools.product((False, True), checkpoint.epsilons, (weight, 1 + weight))
    ]


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The distance of two tensors, relative to the second one's spread around its mean; 1 if that spread is 0."""
    spread = float((theirs - theirs.mean()).norm())
    gap = float((ours - theirs).norm())
    return gap / spread if spread > 0 and gap == gap else float(gap > 0)


def tolerance(dtype: str) -> float:
    """Allowed `relative_gap` between our fp32 results and those of a model in its own dtype."""
    return {"float32": 1e-3, "float16": 2e-2}.get(dtype, 5e-2)


def best_of(candidates: Sequence[Candidate], gap: Callable[[Candidate], float]) -> tuple[Candidate | None, float]:
    """The candidate with the smallest gap, and its gap; (None, 1) without candidates."""
    gaps = [gap(candidate) for candidate in candidates]
    best = int(np.argmin(gaps)) if gaps else None
    return (None, 1.0) if best is None else (candidates[best], gaps[best])


def proved_norm(
    checkpoint: Checkpoint, modules: list[str], before_ND: torch.Tensor, after_ND: torch.Tensor, dtype: str
) -> Norm:
    """The norm, among some modules of a checkpoint, that maps the live model's rows before it to those after it.

    Raises: `ModelError` if none does.
    """
    stored = [module for module in modules if checkpoint.tensor(f"{module}.weight") is not None] or modules[:1]
    norms = [norm for module in stored for norm in possible_norms(checkpoint, module)]
    norm, gap = best_of(norms, lambda norm: relative_gap(norm(before_ND), after_ND))
    if norm is None or not gap <= tolerance(dtype):
        raise ModelError(
            f"what {', '.join(stored)} in {checkpoint.folder} makes of this model's stream is not what the model has "
            f"behind it: it is {gap:.2g} off. Are these another model's files?"
        )
    return norm


Way = Literal["checkpoint", "engine"]
WAYS: tuple[Way, ...] = ("checkpoint", "engine")
LAST, FINAL_NORM, LOGITS = Site("resid_post", -1), Site("final_norm"), Site("logits")
PROOF_TOKENS = 8  # most tokens of the prompt that verifies a readout
MAX_FLOATS = 1 << 25  # logits computed at a time


class Readout(Protocol):
    """Maps rows of the stream to logits. way: source of its numbers · about: the same in words, for results"""

    way: Way
    about: str

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """The logits [n, V] of rows of the stream, a few rows at a time, in order."""
        ...

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """The final norm applied to rows of the stream, [N, D]."""
        ...


class Unembedding(msgspec.Struct, frozen=True, eq=False):
    """The last step of a model: norm, matrix and bias, then the scale and the cap of the logits.

    Source of the cap: Gemma 2 (arXiv:2408.00118), section 2: cap · tanh(logits / cap).
    """

    norm: Norm
    matrix_VD: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float
    cap: float | None

    def __call__(self, rows_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = self.norm(rows_ND) @ self.matrix_VD.T
        logits_NV = (logits_NV if self.bias_V is None else logits_NV + self.bias_V) * self.scale
        return logits_NV if self.cap is None else self.cap * (logits_NV / self.cap).tanh()

    def uncapped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits before the cap."""
        return logits if self.cap is None else self.cap * (logits / self.cap).atanh()


def proved_unembedding(lm: LM, checkpoint: Checkpoint, ids: list[int]) -> Unembedding:
    """The unembedding of a checkpoint that reproduces the live model's logits for a prompt.

    Raises: `ModelError` if none does: the files belong to another model, or its last step has another form.
    """
    import torch

    run = lm.run(ids[-PROOF_TOKENS:], max_tokens=1, capture=[LAST @ prompt[-1], LOGITS])
    row_1D, theirs_1V = (torch.as_tensor(run[site]).float() for site in (LAST, LOGITS))
    run.close()
    matrix_VD, bias_V = checkpoint.unembedding()
    size = theirs_1V.shape[1]
    if matrix_VD.shape[0] < size or matrix_VD.shape[1] != row_1D.shape[1]:
        raise ModelError(
            f"{checkpoint.folder} has an unembedding {list(matrix_VD.shape)}, and this model's is "
            f"[{size}, {row_1D.shape[1]}]: are these another model's files? readout='engine' needs none"
        )
    matrix_VD, bias_V = matrix_VD[:size], None if bias_V is None else bias_V[:size]
    scale = (checkpoint.number("logit_scale", "lm_head_multiplier") or 1.0) / (checkpoint.number("logits_scaling") or 1)
    candidates = [
        Unembedding(norm, matrix_VD, bias_V, scale, checkpoint.number("final_logit_softcapping"))
        for norm in possible_norms(checkpoint, _final_norm(lm))
    ]
    best, gap = best_of(candidates, lambda candidate: relative_gap(candidate(row_1D), theirs_1V))
    if best is None or not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"what the checkpoint in {checkpoint.folder} makes of this model's last stream is {gap:.2g} off the "
            f"model's own logits (at most {tolerance(lm.model.dtype):g} of their spread is allowed): its last step is "
            "not a norm and a matrix that we know, or these are another model's files; readout='engine' needs none"
        )
    return best


def _final_norm(lm: LM) -> str:
    return lm.sites.family.points["final_norm"].transformers.module


class FromCheckpoint:
    """A readout from the model's files, verified on the live model, in fp32."""

    way: Way = "checkpoint"

    def __init__(self, lm: LM, checkpoint: Checkpoint, ids: list[int]) -> None:
        self.unembedding = proved_unembedding(lm, checkpoint, ids)
        self.about = "norm and unembedding of the checkpoint, proved on the live model"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        count = max(MAX_FLOATS // len(self.unembedding.matrix_VD), 1)
        for rows in rows_ND.split(count):
            yield self.unembedding(rows)

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        return self.unembedding.norm(rows_ND)


class FromEngine:
    """A readout by the engine: each row replaces the last stream of a run of one token."""

    way: Way = "engine"

    def __init__(self, lm: LM, token: int, why: str) -> None:
        self._lm, self._token = lm, token
        self.about = f"each row was put in the place of the last stream, and the engine made its logits{why}"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        return self._read(rows_ND, LOGITS, max(MAX_FLOATS // self._lm.model.d_vocab, 1))

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(list(self._read(rows_ND, FINAL_NORM, 256)))

    def _read(self, rows_ND: torch.Tensor, site: Site, count: int) -> Iterator[torch.Tensor]:
        """Values of a site when each row replaces the last stream, for at most `count` rows at a time."""
        import torch

        for rows in rows_ND.split(min(count, 256)):
            runs = self._lm.run(
                [[self._token]] * len(rows), max_tokens=1, capture=[site],
                edits=[[Replace(Vector.of(row.numpy()), at=LAST)] for row in rows],
            )  # fmt: skip
            read = self._lm.fetch(runs, site)
            yield torch.cat([torch.as_tensor(of_run[site.name]).float() for of_run in read])
            for run in runs:
                run.close()


def readout_of(lm: LM, way: str | None, weights: Any, ids: list[int]) -> FromCheckpoint | FromEngine:
    """The requested readout; None picks the checkpoint if its files are available, otherwise the engine. `weights` is a
    folder or hub id with the model's files, if they are not found under its own name.

    Raises: `UnknownName` for another way, `ModelError` for files that are missing or not this model's.
    """
    if way not in (*WAYS, None):
        raise unknown("readout", str(way), WAYS, "readout")
    if way == "engine":
        return FromEngine(lm, ids[-1], "")
    try:
        checkpoint = Checkpoint(str(weights or lm.model.name))
    except ModelError as error:
        if way == "checkpoint" or weights is not None:
            raise
        return FromEngine(lm, ids[-1], f", for {error}")
    return FromCheckpoint(lm, checkpoint, ids)


Word = Literal["z", "neurons"]
WRITES: dict[Word, str] = {"z": "attn_out", "neurons": "mlp_out"}


class OutputProjection(msgspec.Struct, frozen=True, eq=False):
    """rows [N, W] ↦ (rows · matrix + bias) · factor [N, D], then through the norm if the model has one there."""

    matrix_WD: torch.Tensor
    bias_D: torch.Tensor | None
    factor: float
    norm: Norm | None

    def __call__(self, rows_NW: torch.Tensor) -> torch.Tensor:
        written_ND = self._before_norm(rows_NW) * self.factor
        return written_ND if self.norm is None else self.norm(written_ND)

    def _before_norm(self, rows_NW: torch.Tensor) -> torch.Tensor:
        written_ND = rows_NW @ self.matrix_WD
        return written_ND if self.bias_D is None else written_ND + self.bias_D

    def shares(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """The share of each number of the rows in ⟨direction, written row⟩, [N, W], with the norm's scale frozen."""
        return rows_NW * (self._pulled(rows_NW, directions_ND) @ self.matrix_WD.T) * self.factor

    def rest(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """The share of the biases in it, [N]."""
        rest_N = 0.0 * directions_ND[:, 0]
        if self.norm is not None and self.norm.bias is not None:
            rest_N = rest_N + directions_ND @ self.norm.bias
        if self.bias_D is not None:
            rest_N = rest_N + self._pulled(rows_NW, directions_ND) @ self.bias_D * self.factor
        return rest_N

    def _pulled(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """The directions before the norm."""
        if self.norm is None:
            return directions_ND
        return self.norm.pulled(directions_ND, self._before_norm(rows_NW) * self.factor)


def proved_projection(
    lm: LM, checkpoint: Checkpoint, word: Word, layer: int, rows_NW: torch.Tensor,
    written_ND: torch.Tensor,
) -> OutputProjection:  # fmt: skip
    """The writer of a layer that maps the live model's rows at a site to what the layer wrote.

    Raises: `ModelError` if none does: the files belong to another model, or the layer has another form.
    """
    points = lm.sites.family.points
    module = points[word].transformers.module.format(l=layer)
    after = points[WRITES[word]].transformers
    weight, bias_D = checkpoint.matrix(module), checkpoint.tensor(f"{module}.bias")
    shape = (rows_NW.shape[1], written_ND.shape[1])
    matrices = [matrix for matrix in (weight.T, weight) if matrix.shape == shape]  # layouts of Linear and of GPT-2
    end = after.module.format(l=layer)
    norms: list[Norm | None] = [None]
    if checkpoint.tensor(f"{end}.weight") is not None:
        norms += possible_norms(checkpoint, end)
    factor = lm.sites.sizes.factor(after.scale)
    candidates = [OutputProjection(matrix, bias_D, factor, norm) for matrix, norm in itertools.product(matrices, norms)]
    best, gap = best_of(candidates, lambda candidate: relative_gap(candidate(rows_NW), written_ND))
    if best is None or not gap <= tolerance(lm.model.dtype):
        told = f"{gap:.2g} off" if best else f"of shape {list(weight.shape)}, expected [{shape[1]}, {shape[0]}]"
        raise ModelError(
            f"what {module}.weight in {checkpoint.folder} makes of {word}[{layer}] is not this model's "
            f"{WRITES[word]}[{layer}]: it is {told}. Are these another model's files?"
        )
    return best
