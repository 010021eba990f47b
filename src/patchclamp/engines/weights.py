"""Weights of a live model by TransformerLens' names, found through the taps of its site table.

A name refers to the same matrix on both engines, although vLLM fuses projections, shards them across workers, and packs
or quantizes them. A weight that is not stored as a plain matrix is read by applying its module to the identity.

    D model width · V vocabulary · P positions · H heads (or key/value heads) · E head size ·
    M MLP width · I input of a matrix
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import UnsupportedSite, unknown
from patchclamp.sites import SiteMap, Tap
from patchclamp.sites.tables import REORDERED

if TYPE_CHECKING:
    import torch

PLAIN = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # classes of `quant_method`
INPUT_NORMS = ("input_layernorm", "ln_1", "ln_attn")  # of layers whose attention and MLP may share one norm


class WeightKind(NamedTuple):
    """A kind of weight. shape: its dimensions; point: the kind of the adjacent points ("": the model has only one such
    weight); axis: the dimension sharded across tensor-parallel workers (None: replicated)."""

    shape: str
    point: str = ""
    axis: int | None = None


WEIGHTS: dict[str, WeightKind] = {
    "W_E": WeightKind("V D", axis=0), "W_pos": WeightKind("P D"),
    "W_U": WeightKind("D V", axis=1), "b_U": WeightKind("V", axis=0),
    "ln_final.w": WeightKind("D"), "ln_final.b": WeightKind("D"),
    **{f"W_{word}": WeightKind("H D E", "v", 0) for word in "QKV"},
    **{f"b_{word}": WeightKind("H E", "v", 0) for word in "QKV"},
    "W_O": WeightKind("H E D", "z", 0), "b_O": WeightKind("D", "z"),
    "W_in": WeightKind("D M", "neurons", 1), "W_gate": WeightKind("D M", "neurons", 1),
    "b_in": WeightKind("M", "neurons", 0), "b_gate": WeightKind("M", "neurons", 0),
    "W_out": WeightKind("M D", "neurons", 0), "b_out": WeightKind("D", "neurons"),
    **{f"{norm}.{end}": WeightKind("D", point) for end in "wb" for norm, point in
       {"ln1": "stream", "ln1_post": "attn_out", "ln2": "stream", "ln2_post": "mlp_out"}.items()},
}  # fmt: skip


_IN_FULL = re.compile(r"(?:embed|unembed|pos_embed)\.(\w+)|blocks\.(\d+)\.(?:attn\.|mlp\.)?([\w.]+)")


def short_name(name: str, layer: int | None) -> tuple[str, int | None]:
    """Return a weight's name and layer. Accepts TransformerLens' full names, such as blocks.5.attn.W_O."""
    found = _IN_FULL.fullmatch(name) if isinstance(name, str) else None
    if found is None or layer is not None:
        return name, layer
    return (found[1], None) if found[1] else (found[3], int(found[2]))


def checked_layers(sites: SiteMap, name: str, layer: int | None) -> list[int]:
    """Return the layers from which to read a weight: the given layer, or all layers that have it; empty for a weight
    that occurs once per model.

    Raises: `UnknownName` for an unknown name, `UnsupportedSite` for a layer or model without this weight.
    """
    if not isinstance(name, str) or name not in WEIGHTS:
        raise unknown("weight", str(name), WEIGHTS, "name")
    point = WEIGHTS[name].point
    if not point:
        if layer is not None:
            raise UnsupportedSite(f"expected no layer for {name}, got {layer!r}", "layer")
        return []
    layers = sites.layers_with(point)
    if layer is None and layers:
        return layers
    chosen = -1
    if isinstance(layer, (int, np.integer)) and not isinstance(layer, bool):
        chosen = int(layer) + sites.layers * (layer < 0)
    if chosen not in layers:
        has = f"only layers {layers} have" if layers else "no layer has"
        raise UnsupportedSite(f"{sites.family.name} models: {has} {name}, got layer {layer!r}", "layer")
    return [chosen]


Shard = tuple[str, tuple[int, ...], bytes]  # dtype, shape and bytes


def shard_of(weight: torch.Tensor | None) -> Shard | None:
    """Pack a worker's shard of a weight in its own dtype; fp32 would take twice the bytes."""
    import torch

    if weight is None:
        return None
    data = weight.contiguous().view(torch.uint8).numpy().tobytes()
    return str(weight.dtype).removeprefix("torch."), tuple(weight.shape), data


def join_shards(name: str, shards: list[Shard | None], workers: int) -> np.ndarray | None:
    """Concatenate the workers' shards of a weight, in rank order, as fp32. Shards beyond `workers` are duplicates: two
    pipeline stages may both have a tied embedding."""
    import torch

    found = [
        torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape).float().numpy()
        for dtype, shape, data in (shard for shard in shards if shard is not None)
    ][:workers]
    axis = WEIGHTS[name].axis
    if not found:
        return None
    return found[0] if axis is None else np.concatenate(found, axis)


def read_weight(
    net: torch.nn.Module, sites: SiteMap, engine: Literal["transformers", "vllm"], name: str, layer: int | None
) -> torch.Tensor | None:
    """Copy a weight of a model in this process to the host, in its own dtype and the shape given in `WEIGHTS`. A
    tensor-parallel worker passes its local `sites` (`SiteMap.local`), and gets its shard. Return None if the model, or
    this worker's stage, lacks the weight."""
    import torch

    with torch.no_grad():
        weight = _Reader(net, sites, engine, layer).read(name)
        return None if weight is None else weight.detach().cpu().contiguous()


def token_embedding(net: torch.nn.Module) -> Any:
    """Return vLLM's token embedding; None if it is in another pipeline stage."""
    inner = map(_inner, net.modules())
    return next((module for module in inner if type(module).__name__ == "VocabParallelEmbedding"), None)


class _Reader:
    def __init__(self, net: torch.nn.Module, sites: SiteMap, engine: str, layer: int | None) -> None:
        self._net, self._sites, self._engine, self._layer = net, sites, engine, layer

    def read(self, name: str) -> torch.Tensor | None:
        word, is_bias = name[2:], name.startswith("b_")
        if "." in name:
            return self._norm(*name.split("."))
        if not WEIGHTS[name].point:
            return self._vocabulary(word, is_bias)
        if word in ("Q", "K", "V"):
            return self._projection(word.lower(), is_bias)
        if word == "O":
            rows = _rows(self._output_projection(), is_bias)
            if rows is None or is_bias:
                return None if rows is None else rows[0]
            return rows.reshape(self._sites.sizes.heads, -1, rows.shape[1])
        down = self._find(self._tap("neurons").module)
        if word == "out":
            rows = _rows(down, is_bias)
            return rows[0] if is_bias and rows is not None else rows
        rows = None if down is None else self._into_neurons(word, down, is_bias)
        return rows[0] if is_bias and rows is not None else rows

    def _tap(self, word: str) -> Tap:
        tap: Tap = getattr(self._sites.family.points[word], self._engine)
        return msgspec.structs.replace(tap, module=tap.module.format(l=self._layer))

    def _find(self, path: str) -> torch.nn.Module | None:
        from patchclamp.runtime.taps import find

        module = find(self._net, path)
        return None if _is_missing(module) else module

    def _vocabulary(self, word: str, is_bias: bool) -> torch.Tensor | None:
        if word == "pos":
            module = self._first(lambda path, _: path.endswith(("wpe", "embed_positions")))
            return None if module is None else module.weight[getattr(module, "offset", 0) :]
        if self._engine == "transformers":
            net: Any = self._net
            module = net.get_input_embeddings() if word == "E" else net.get_output_embeddings()
        else:
            embedding = token_embedding(self._net)
            head = self._first(lambda _, module: type(_inner(module)).__name__ == "ParallelLMHead")
            elsewhere = self._first(lambda path, module: path.endswith("lm_head") and _is_missing(module))
            is_tied = head is None and elsewhere is None
            module = embedding if word == "E" or is_tied else head
        module = _inner(module)
        rows = _rows(module, is_bias)
        if module is not None and rows is not None and hasattr(module, "shard_indices"):  # without padding
            rows = rows[:, : module.shard_indices.num_org_elements]
        if rows is None or is_bias:
            return None if rows is None else rows[0]
        return rows if word == "U" else rows.T

    def _first(self, matches: Any) -> Any:
        return next((module for path, module in self._net.named_modules() if matches(path, module)), None)

    def _norm(self, norm: str, end: str) -> torch.Tensor | None:
        points, word = self._sites.family.points, {"ln_final": "final_norm", "ln1": "attn_in", "ln1_post": "attn_out",
                                                   "ln2": "mlp_in", "ln2_post": "mlp_out"}[norm]  # fmt: skip
        path = self._tap(word).module if word in points and self._tap(word).moment == "out" else ""
        if not path and norm in ("ln1", "ln2"):
            layer = self._find(self._tap("stream").module)
            names = dict(layer.named_children()) if layer is not None else {}
            inner = next((name for name in (INPUT_NORMS if norm == "ln1" else ("ln_mlp",)) if name in names), "")
            path = f"{self._tap('stream').module}.{inner}" if inner else ""
        module: Any = self._find(path) if path else None
        is_norm = module is not None and not _is_linear(module) and not any(module.children())
        return getattr(module, "weight" if end == "w" else "bias", None) if is_norm else None

    def _projection(self, word: str, is_bias: bool) -> torch.Tensor | None:
        """Return the weights of the query, key or value projection, from its own or from a merged module."""
        tap, gated = self._tap("v"), self._sites.family.gated and word == "q"
        sizes, why = self._sites.sizes, self._sites.family.lacks.get(word)
        if why == REORDERED and self._engine == "vllm":
            raise UnsupportedSite(f"W_{word.upper()} is not available: {why}", "name")
        heads = sizes.heads if word == "q" else sizes.kv_heads
        width = heads * sizes.d_head
        if not tap.of:
            rows = _rows(self._beside(word, tap), is_bias)
        else:
            rows = _rows(self._find(tap.module), is_bias)
            part = 0 if word == "q" else len(tap.of) - (2 if word == "k" else 1)
            if rows is not None and gated:
                rows = rows[:, : 2 * width]
            elif rows is not None:
                view = self._sites.view(msgspec.structs.replace(tap, part=part))
                rows = rows if view is None else view.columns(rows, width)
        if rows is None or rows.shape[1] != width * (1 + gated):
            return None
        by_head_IHE = rows.reshape(len(rows), heads, -1)[:, :, : sizes.d_head]  # a gate follows each head's queries
        return by_head_IHE[0] if is_bias else by_head_IHE.transpose(0, 1)

    def _beside(self, word: str, tap: Tap) -> torch.nn.Module | None:
        """Return the module that projects queries, keys or values. If the site's tap is at a norm instead, return the
        sibling of the value projection (at `tap`) with the corresponding name."""
        own = self._find(self._tap(word).module) if word in self._sites.family.points else None
        if own is not None and _is_linear(own):
            return own
        parent, _, name = tap.module.rpartition(".")
        letters = {"q": "query", "k": "key", "v": "value"}
        renamed = name.replace("value", letters[word]) if "value" in name else name.replace("v", word, 1)
        holder = self._find(parent)
        return None if holder is None else getattr(holder, renamed, None)

    def _output_projection(self) -> torch.nn.Module | None:
        tap = self._tap("z")
        if tap.moment == "in":
            return self._find(tap.module)
        parent = self._find(tap.module.rpartition(".")[0])  # the projection is a sibling of vLLM's attention layer
        children = () if parent is None else parent.children()
        return next((child for child in children if type(_inner(child)).__name__ == "RowParallelLinear"), None)

    def _into_neurons(self, word: str, down: torch.nn.Module, is_bias: bool) -> torch.Tensor | None:
        """Return the weights of the MLP's input matrix, or of its gate."""
        parent = self._find(self._tap("neurons").module.rpartition(".")[0])
        out_MD = _rows(down, False)
        assert parent is not None
        assert out_MD is not None
        width = len(out_MD)
        found: dict[str, torch.nn.Module] = {}
        for name, child in parent.named_children():
            rows = _rows(child, False) if child is not down and _is_linear(child) else None
            if rows is not None and rows.shape[1] == 2 * width:  # merged: the gate first
                both = _rows(child, is_bias)
                return None if both is None else both[:, :width] if word == "gate" else both[:, width:]
            if rows is not None and rows.shape[1] == width:
                found["gate" if "gate" in name or name == "w1" else "in"] = child
        if len(found) == 1:  # without a gate, the only matrix may have any name
            found = {"in": next(iter(found.values()))}
        return _rows(found[word], is_bias) if word in found else None


def _is_missing(module: torch.nn.Module) -> bool:
    """True if the module belongs to another pipeline stage."""
    return type(module).__name__ == "PPMissingLayer"


def _inner(module: Any) -> Any:
    """Return a module without vLLM's wrapper for adapters."""
    return getattr(module, "base_layer", module)


def _is_linear(module: torch.nn.Module) -> bool:
    module = _inner(module)
    weight = getattr(module, "weight", None)
    return hasattr(module, "quant_method") or (weight is not None and weight.dim() == 2)


def _rows(module: Any, is_bias: bool) -> torch.Tensor | None:
    """Return a linear module's weight [I, O], for rows @ weight, or its bias [1, O]; None if it has none."""
    import torch

    if module is None:
        return None
    module = _inner(module)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if is_bias:
        return bias[None] if torch.is_tensor(bias) else None
    method = getattr(module, "quant_method", None)
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if weight is not None and weight.dim() == 2 and weight.dtype in floats and type(method).__name__ in PLAIN:
        return weight if type(module).__name__ == "Conv1D" else weight.T
    names = ("input_size_per_partition", "input_size", "in_features")
    size = next(number for name in names if (number := getattr(module, name, 0)))
    device = next(value.device for value in (*module.parameters(), *module.buffers()))
    identity = torch.eye(size, dtype=getattr(module, "params_dtype", torch.get_default_dtype()), device=device)
    if method is not None:
        return method.apply(module, identity, None)
    return module(identity) - (0 if bias is None else bias)
