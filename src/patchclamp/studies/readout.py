"""The parts of a model that studies compute themselves, from its weights (`LM.weights`): norms, the unembedding, and
the matrices through which heads and neurons write into the stream.

Site tables do not define how a norm is computed, so anything built from weights is first verified against the live
model: a readout must reproduce the logits from the final stream, and an output projection its layer's output.

A readout maps rows of the stream to logits in one of two ways. From the weights, it uses the final norm and the
unembedding. From the engine, each row replaces the final stream of a run; this is exact for every model, but costs one
request per row.

N rows · D model width · V vocabulary · W width of an input row: all heads' results, or all neurons
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
import numpy as np

from patchclamp.engines.base import Engine
from patchclamp.errors import ModelError, PatchclampError, UnsupportedSite
from patchclamp.language import Replace, Site, Vector, prompt
from patchclamp.lm import LM
from patchclamp.sites.map import EPSILONS

if TYPE_CHECKING:
    import torch

Candidate = TypeVar("Candidate")


def weight_or_none(lm: LM, name: str, layer: int | None = None) -> torch.Tensor | None:
    """Return a weight, or None if the model has no weight of this name."""
    try:
        return lm.weights(name, layer)
    except UnsupportedSite:
        return None


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
        """Apply the norm, without bias, to parts that add up to rows, with frozen scales: linear in the parts."""
        if self.centres:
            parts_ND = parts_ND - parts_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        scale_N1 = (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return parts_ND / scale_N1 * self.weight

    def pulled(self, directions_ND: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the directions g such that ⟨g, part⟩ = ⟨direction, frozen(part)⟩ for every part."""
        directions_ND = directions_ND * self.weight
        if self.centres:
            directions_ND = directions_ND - directions_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        return directions_ND / (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def possible_norms(lm: LM, name: str, layer: int | None = None) -> list[Norm]:
    """Return candidates for a norm, such as `ln1`: with or without the mean, and with the weight as stored or, as in
    Gemma, plus 1. The live model's rows decide between them."""
    import torch

    weight, bias = weight_or_none(lm, f"{name}.w", layer), weight_or_none(lm, f"{name}.b", layer)
    weight = torch.ones(lm.model.d_model) if weight is None else weight
    factors = lm.sites.sizes.factors
    epsilons = tuple(dict.fromkeys(factors[name] for name in EPSILONS if name in factors)) or (1e-5, 1e-6)
    return [
        Norm(centres, epsilon, stored, bias)
        for centres, epsilon, stored in itertools.product((False, True), epsilons, (weight, 1 + weight))
    ]


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the distance between two tensors, relative to the second's spread around its mean; 1 if it has no
    spread."""
    spread = float((theirs - theirs.mean()).norm())
    gap = float((ours - theirs).norm())
    return gap / spread if spread > 0 and gap == gap else float(gap > 0)


def tolerance(dtype: str) -> float:
    """Return the allowed `relative_gap` between our fp32 results and a model's results in this dtype."""
    return {"float32": 1e-3, "float16": 2e-2}.get(dtype, 5e-2)


def best_of(candidates: Sequence[Candidate], gap: Callable[[Candidate], float]) -> tuple[Candidate | None, float]:
    """Return the candidate with the smallest gap, and its gap; (None, 1) without candidates."""
    gaps = [gap(candidate) for candidate in candidates]
    best = int(np.argmin(gaps)) if gaps else None
    return (None, 1.0) if best is None else (candidates[best], gaps[best])


def proved_norm(lm: LM, names: Sequence[str], layer: int, before_ND: torch.Tensor, after_ND: torch.Tensor) -> Norm:
    """Return the norm of a layer, one of `names`, that maps the live model's rows `before_ND` to `after_ND`.

    Raises: `ModelError` if no candidate does.
    """
    norms = [norm for name in names for norm in possible_norms(lm, name, layer)]
    norm, gap = best_of(norms, lambda norm: relative_gap(norm(before_ND), after_ND))
    if norm is None or not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"unsupported norm ({' or '.join(names)}) in layer {layer}: its weights do not reproduce the live model's "
            f"rows (relative error {gap:.2g})"
        )
    return norm


Way = Literal["device", "weights", "engine"]  # the device: `Engine.read_streams`
LAST, FINAL_NORM, LOGITS = Site("resid_post", -1), Site("final_norm"), Site("logits")
PROOF_TOKENS = 8  # most tokens of the prompt that verifies a readout
MAX_FLOATS = 1 << 25  # logits computed at a time


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
        """Return logits before the cap."""
        return logits if self.cap is None else self.cap * (logits / self.cap).atanh()


_UNEMBEDDINGS: weakref.WeakKeyDictionary[Engine, Unembedding] = weakref.WeakKeyDictionary()


def proved_unembedding(lm: LM, ids: list[int]) -> Unembedding:
    """Return the unembedding that reproduces the live model's logits for a prompt. It is cached per engine, and
    verified again.

    Raises: `ModelError` if the model's last step has another form.
    """
    import torch

    run = lm.run(ids[-PROOF_TOKENS:], max_tokens=1, capture=[LAST @ prompt[-1], LOGITS])
    row_1D, theirs_1V = (torch.as_tensor(run[site]).float() for site in (LAST, LOGITS))
    run.close()
    kept = _UNEMBEDDINGS.get(lm.engine)
    if kept is not None and relative_gap(kept(row_1D), theirs_1V) <= tolerance(lm.model.dtype):
        return kept
    size = theirs_1V.shape[1]
    matrix_VD, bias_V = lm.weights("W_U").T[:size], weight_or_none(lm, "b_U")
    sizes = lm.sites.sizes
    candidates = [
        Unembedding(norm, matrix_VD, None if bias_V is None else bias_V[:size], sizes.logit_factor, sizes.logit_cap)
        for norm in possible_norms(lm, "ln_final")
    ]
    best, gap = best_of(candidates, lambda candidate: relative_gap(candidate(row_1D), theirs_1V))
    if best is None or not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"the final norm and unembedding do not reproduce this model's logits (relative error {gap:.2g}, at most "
            f"{tolerance(lm.model.dtype):g}): its last step is unsupported; readout='engine' works for every model"
        )
    _UNEMBEDDINGS[lm.engine] = best
    return best


class FromWeights:
    """A readout from the model's weights, verified on the live model, in fp32.

    way: kind of readout · about: description of the readout, for results
    """

    way: Way = "weights"

    def __init__(self, lm: LM, ids: list[int]) -> None:
        self.unembedding: Unembedding = proved_unembedding(lm, ids)
        self.about = "the model's norm and unembedding, proved on the live model"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits [n, V] of stream rows in order, a few rows at a time."""
        count = max(MAX_FLOATS // len(self.unembedding.matrix_VD), 1)
        for rows in rows_ND.split(count):
            yield self.unembedding(rows)

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the final norm applied to rows of the stream, [N, D]."""
        return self.unembedding.norm(rows_ND)


class FromEngine:
    """A readout by the engine: each row replaces the final stream of a one-token run. It has `FromWeights`'s API."""

    way: Way = "engine"

    def __init__(self, lm: LM, token: int, why: str) -> None:
        self._lm, self._token = lm, token
        self.about: str = f"each row replaced the last stream, and the engine computed its logits{why}"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        return self._read(rows_ND, LOGITS, max(MAX_FLOATS // self._lm.model.d_vocab, 1))

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(list(self._read(rows_ND, FINAL_NORM, 256)))

    def _read(self, rows_ND: torch.Tensor, site: Site, count: int) -> Iterator[torch.Tensor]:
        """Yield a site's values with each row in place of the final stream, at most `count` rows at a time."""
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


Readout = FromWeights | FromEngine


def readout_of(lm: LM, way: Way | None, ids: list[int]) -> Readout:
    """Return the requested readout; None picks the weights if they reproduce the model's logits, otherwise the engine.

    Raises: `ModelError` or `EngineError` if the requested weights cannot be used.
    """
    if way == "engine":
        return FromEngine(lm, ids[-1], "")
    try:
        return FromWeights(lm, ids)
    except PatchclampError as error:
        if way == "weights":
            raise
        return FromEngine(lm, ids[-1], f", because {error}")


Word = Literal["z", "neurons"]
WRITES: dict[Word, str] = {"z": "attn_out", "neurons": "mlp_out"}


class OutputProjection(msgspec.Struct, frozen=True, eq=False):
    """rows [N, W] ↦ (rows · matrix + bias) · factor [N, D], then through the post-norm, if the model has one."""

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
        """Return each row entry's contribution to ⟨direction, written row⟩, [N, W], with the norm's scale frozen."""
        return rows_NW * self.towards(rows_NW, directions_ND)

    def towards(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """Map directions back to the input rows' space, [N, W], with the norm's scale frozen."""
        return self._pulled(rows_NW, directions_ND) @ self.matrix_WD.T * self.factor

    def rest(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """Return the biases' contribution to ⟨direction, written row⟩, [N]."""
        rest_N = 0.0 * directions_ND[:, 0]
        if self.norm is not None and self.norm.bias is not None:
            rest_N = rest_N + directions_ND @ self.norm.bias
        if self.bias_D is not None:
            rest_N = rest_N + self._pulled(rows_NW, directions_ND) @ self.bias_D * self.factor
        return rest_N

    def _pulled(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """Return the directions pulled back through the post-norm, [N, D]."""
        if self.norm is None:
            return directions_ND
        return self.norm.pulled(directions_ND, self._before_norm(rows_NW) * self.factor)


def proved_projection(
    lm: LM, word: Word, layer: int, rows_NW: torch.Tensor, written_ND: torch.Tensor
) -> OutputProjection:
    """Return a layer's output projection, verified to map the live model's rows at a site to the layer's output.

    Raises: `ModelError` if the layer has another form.
    """
    name, after = {"z": ("O", "ln1_post"), "neurons": ("out", "ln2_post")}[word]
    matrix_WD = lm.weights(f"W_{name}", layer).reshape(rows_NW.shape[1], -1)
    bias_D = weight_or_none(lm, f"b_{name}", layer)
    norms: list[Norm | None] = [None]
    if weight_or_none(lm, f"{after}.w", layer) is not None:
        norms += possible_norms(lm, after, layer)
    factor = lm.sites.sizes.factor(lm.sites.family.points[WRITES[word]].transformers.scale)
    candidates = [OutputProjection(matrix_WD, bias_D, factor, norm) for norm in norms]
    best, gap = best_of(candidates, lambda candidate: relative_gap(candidate(rows_NW), written_ND))
    if best is None or not gap <= tolerance(lm.model.dtype):
        raise ModelError(
            f"W_{name} of {word}[{layer}] does not reproduce {WRITES[word]}[{layer}] (relative error {gap:.2g})"
        )
    return best
