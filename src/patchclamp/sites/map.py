"""A model's sizes, and its site map, which numbers the points and resolves sites to points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from patchclamp.errors import ModelError, PatchclampError, ProgramError, ShapeError, UnsupportedSite
from patchclamp.language.dictionaries import DictionaryCard, FeatureRows
from patchclamp.language.ops import as_probe_name
from patchclamp.language.sae import SAE
from patchclamp.language.site import DERIVED, SITES, SPECS, Site, parse_site
from patchclamp.language.tokens import Index, Range
from patchclamp.sites.tables import Family, Layers, Size, Tap

if TYPE_CHECKING:
    import torch


class Sizes(msgspec.Struct, frozen=True):
    """A model's number of layers and row widths.

    sparse: the layers whose MLP is a mixture of experts
    recurrent: the layers whose mixer is a state space or linear attention
    no_mixer, no_mlp: the layers with only an MLP, or only a mixer
    d_result: a head's result width, if different from `d_head`
    factors: multipliers, logit cap and norm epsilons, by config name
    """

    layers: int
    d_model: int
    d_vocab: int
    heads: int = 1
    kv_heads: int = 1
    d_head: int = 1
    d_mlp: int = 1
    experts: int = 0
    sparse: tuple[int, ...] = ()
    d_result: int = 0
    factors: dict[str, float] = {}
    recurrent: tuple[int, ...] = ()
    no_mixer: tuple[int, ...] = ()
    no_mlp: tuple[int, ...] = ()

    def layers_with(self, kind: Layers | tuple[int, ...]) -> list[int]:
        """Return the layers of a kind, or explicit layers as a list."""
        if isinstance(kind, tuple):
            return list(kind)
        every = set(range(self.layers))
        with_mlp, sparse, recurrent = every - set(self.no_mlp), set(self.sparse), set(self.recurrent)
        return sorted({"all": every, "attention": every - recurrent - set(self.no_mixer), "recurrent": recurrent,
                       "mlp": with_mlp, "dense": with_mlp - sparse, "sparse": sparse}[kind])  # fmt: skip

    def __getitem__(self, size: Size) -> int:
        return {"D": self.d_model, "V": self.d_vocab, "Q": self.heads * self.d_head, "K": self.kv_heads * self.d_head,
                "Z": self.heads * (self.d_result or self.d_head), "M": self.d_mlp, "X": self.experts}[size]  # fmt: skip

    def factor(self, scale: str | float) -> float:
        """Return a tap's `scale` as a number: 1 if it is empty; names are looked up in `factors`."""
        if not scale:
            return 1.0
        return self.factors[scale] if isinstance(scale, str) else scale

    @property
    def logit_factor(self) -> float:
        """The factor that logits are multiplied by."""
        factors = self.factors
        return factors.get("logit_scale", factors.get("lm_head_multiplier", 1.0)) / factors.get("logits_scaling", 1.0)

    @property
    def logit_cap(self) -> float | None:
        """The cap c in c · tanh(logits / c), or None without one. Source: Gemma 2 (arXiv:2408.00118), section 2."""
        return self.factors.get("final_logit_softcapping")

    def parts(self, size: Size) -> tuple[int, int]:
        """Return the number of heads, neurons or experts in a row, and the width of each."""
        heads = {"Q": self.heads, "K": self.kv_heads, "Z": self.heads}
        count = heads.get(size, self[size])
        return count, self[size] // max(count, 1)


def sizes_of(config: Any, d_vocab: int | None = None) -> Sizes:
    """Read the sizes from a Transformers config, under any of the names that configs use. If the layers' head counts
    differ, or are missing, `heads` is 0, and sites cannot be indexed by head.

    Raises `ModelError` if the config lacks the number of layers, or one width for all layers.
    """

    def setting(*names: str, otherwise: Any = None) -> Any:
        return next((value for name in names if (value := _setting(config, name)) is not None), otherwise)

    width, layers = setting("hidden_size", otherwise=0), setting("num_hidden_layers", otherwise=0)
    if not width or not layers:
        missing = "num_hidden_layers" if width else "hidden_size"
        raise ModelError(
            f"expected one {missing} for all layers in the config of {', '.join(architectures_of(config))}, got none: "
            "sites require a decoder whose layers have the same size"
        )
    kinds = layer_kinds(config, layers)
    heads = setting("num_attention_heads", otherwise=0)
    experts = setting("num_local_experts", "num_experts", "n_routed_experts", otherwise=0)
    return Sizes(
        layers, width, d_vocab or config.vocab_size, heads, _kv_heads(config, heads),
        setting("head_dim", otherwise=width // max(heads, 1)),
        setting("ffn_dim", "intermediate_size_mlp", "n_inner", "ffn_hidden_size", "shared_intermediate_size",
                "intermediate_size", otherwise=4 * width), experts,
        _sparse(config, kinds) if experts else (), setting("v_head_dim", otherwise=0),
        {name: float(getattr(config, name)) for name in FACTORS if getattr(config, name, None) is not None},
        _of_kinds(kinds, "recurrent"), _of_kinds(kinds, "mlp", "experts"),
        _of_kinds(kinds, "recurrent", "attention") if {"mlp", "experts"} & set(kinds) else (),
    )  # fmt: skip


def architectures_of(config: Any) -> list[str]:
    """Return the config's `architectures`, or its class name if missing."""
    return list(getattr(config, "architectures", None) or [type(config).__name__])


def _setting(config: Any, name: str) -> int | None:
    """Return a setting if it is a single number for all layers, else None."""
    try:
        value = getattr(config, name, None)
    except Exception:  # Transformers' error for a setting that differs between layers
        return None
    return value if isinstance(value, int) else None


EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
FACTORS = (
    "residual_multiplier", "attention_out_multiplier", "ssm_out_multiplier", "logit_scale", "lm_head_multiplier",
    "logits_scaling", "final_logit_softcapping", *EPSILONS,
)  # fmt: skip


def _kv_heads(config: Any, heads: int) -> int:
    one_for_all = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    names = ("num_key_value_heads", "num_kv_heads")
    return 1 if one_for_all else next((n for name in names if (n := _setting(config, name)) is not None), heads)


KINDS = {  # config names of layer kinds, including MLP-only layers
    "M": "recurrent", "mamba": "recurrent", "mamba2": "recurrent", "linear_attention": "recurrent",
    "conv": "recurrent", "*": "attention", "-": "mlp", "mlp": "mlp", "E": "experts", "moe": "experts",
}  # fmt: skip


def layer_kinds(config: Any, layers: int) -> list[str]:
    """Return each layer's kind from a config: `attention`, `recurrent`, or, for a layer without a mixer, `mlp` or
    `experts`. If the config lists no kinds, all layers have attention."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    said = next((list(kinds) for name in names if (kinds := getattr(config, name, None))), [])
    return [KINDS.get(kind, "attention") for kind in said] if len(said) == layers else ["attention"] * layers


def _of_kinds(kinds: list[str], *which: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in which)


def _sparse(config: Any, kinds: list[str]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts."""
    if {"mlp", "experts"} & set(kinds):
        return _of_kinds(kinds, "experts")
    if (listed := getattr(config, "moe_layers", None)) is not None:
        return tuple(listed)
    if (period := getattr(config, "expert_layer_period", None)) is not None:
        return tuple(range(config.expert_layer_offset, len(kinds), period))
    names = "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"
    every = next((step for name in names if (step := getattr(config, name, None))), 1)
    if isinstance(every, list | tuple):  # one flag per layer, as in MiMo V2
        return tuple(layer for layer, is_sparse in enumerate(every) if is_sparse)
    shift = any(hasattr(config, name) for name in ("decoder_sparse_step", "moe_layer_interval"))  # 1-based
    first = getattr(config, "first_k_dense_replace", getattr(config, "moe_layer_start_index", 0))
    end = getattr(config, "moe_layer_end_index", -1) % len(kinds) + 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    return tuple(layer for layer in range(first, end) if (layer + shift) % every == 0 and layer not in dense)


NONE_HAS = {  # the reason in errors, by the missing kind of layer
    "dense": "all layers have experts, which run in one fused kernel",
    "sparse": "no layer has experts",
    "attention": "no layer has attention",
    "recurrent": "all layers have attention",
    "mlp": "no layer has an MLP",
    "all": "no layer has one",
}
LAYERS_WITH = {
    "dense": ", the layers with an ordinary MLP",
    "sparse": ", the layers with experts",
    "attention": ", the layers with attention",
    "recurrent": ", the layers with a state space or linear attention",
    "mlp": ", the layers with an MLP",
    "all": "",
}
MAX_INDEXED_COLUMNS = 0xFFFF  # limit for an indexed site: records store a column in 16 bits (`plan.table`)


class Point(msgspec.Struct, frozen=True):
    """A point kind in one layer, with its index among the model's points.

    width: the row width
    rows: "tokens" for one row per token of a step, "sampled" for one per sampled position
    """

    number: int
    kind: str
    layer: int | None
    width: int
    rows: Literal["tokens", "sampled"]


class View(msgspec.Struct, frozen=True):
    """Location of a point's columns in its tap's tensor.

    tensor_width: the tensor's width; 0 if it is [B, H, T, E]
    first: the point's first column; if heads are mixed (`Tap.mixed`), its first column within each key/value head
    heads: the tensor's number of key/value heads if heads are mixed; otherwise 0
    size: the number of the point's columns per key/value head if heads are mixed; otherwise 0
    by_head: True if the tensor is [B, H, T, E]
    factor: multiplies the tensor's values to give the point's values
    """

    tensor_width: int
    first: int = 0
    heads: int = 0
    size: int = 0
    by_head: bool = False
    factor: float = 1.0

    def columns(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Return the point's columns [N, W] of the tensor's rows, without applying `factor`."""
        if self.heads:
            by_head = rows.reshape(len(rows), self.heads, -1)
            return by_head[:, :, self.first : self.first + self.size].reshape(len(rows), width)
        return rows[:, self.first : self.first + width] if self.tensor_width != width else rows


class SiteRef(msgspec.Struct, frozen=True):
    """A site of one layer, such as `resid_post[3]` or `z[3, 5]`.

    point: the index of the site's point
    index: the second index, as text
    columns: (first, end): columns first … end − 1 of the point's row; None: the whole row
    """

    name: str
    layer: int | None
    point: int
    index: str = ""
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        inner = str(self.layer) + (f", {self.index}" if self.index else "")
        return self.name if self.layer is None else f"{self.name}[{inner}]"


class Shard(NamedTuple):
    """Shard `number` of a row: columns first … end − 1. Of the workers that share a shard, only one `keeps` its
    captures."""

    number: int
    first: int
    end: int
    keeps: bool


class Dictionary(NamedTuple):
    """An attached SAE with the sites it reads (`at`) and writes (`to`). `rows` returns the weights of
    given features. `sae` is None in a server's clients, which have only the card."""

    card: DictionaryCard
    at: SiteRef
    to: SiteRef
    rows: Callable[[Sequence[int]], FeatureRows]
    sae: SAE | None = None


def placed(sae: SAE, sites: SiteMap, name: str, at: Any = None, to: Any = None, dtype: str = "float32") -> Dictionary:
    """Resolve an SAE's sites for `lm.attach`. `dtype`: its matrices' dtype. Raises `ProgramError`, `ShapeError` or
    `UnsupportedSite`."""
    if not isinstance(sae, SAE):
        raise ProgramError(f"expected a pc.SAE, such as pc.SAE.load(path), got {type(sae).__name__}", "sae")
    for given, field in ((at, "at"), (to, "to")):
        if given is not None and not isinstance(given, (str, Site)):
            raise ProgramError(f"expected a site such as 'resid_post[12]', got {type(given).__name__}", field)
    read = str(at or sae.site)
    if not read:
        raise ProgramError("the SAE's file names no site: pass the site that it reads as at=", "at")
    written = str(to or (sae.site_out if at is None else "") or read)
    card = DictionaryCard(
        as_probe_name(name), read, written, sae.n_features, sae.is_local, sae.normalize != "none", sae.content, dtype
    )
    dictionary = sites.dictionary(card, lambda ids: FeatureRows.of(sae, ids))
    for ref, width, field in ((dictionary.at, sae.width, "at"), (dictionary.to, len(sae.decoder_bias), "to")):
        if sites.width(ref) != width:
            raise ShapeError(f"expected an SAE of width {sites.width(ref)} at {ref}, got width {width}", field)
    return dictionary._replace(sae=sae)


LENS = "lens"  # key in `SiteMap.withdrawn` for an unembedding that was not proved


class SiteMap:
    """A model's points and site refs, with `tensor_parallel` workers in each of `stages` pipeline stages."""

    family: Family
    sizes: Sizes
    tensor_parallel: int
    stages: int
    layers: int
    d_model: int
    d_vocab: int

    def __init__(self, family: Family, sizes: Sizes, tensor_parallel: int = 1, stages: int = 1) -> None:
        self.family, self.sizes, self.tensor_parallel, self.stages = family, sizes, tensor_parallel, stages
        self.layers, self.d_model, self.d_vocab = sizes.layers, sizes.d_model, sizes.d_vocab
        self.dictionaries: dict[str, Dictionary] = {}  # attached SAEs by name
        self.withdrawn: dict[str, str] = {}  # sites not proved on the live model, with the reason
        self.no_attention: str = ""  # the reason if the engine does not read attention patterns
        self.points: list[Point] = []
        self._number: dict[tuple[str, int | None], int] = {}
        self._layers_of = {name: sizes.layers_with(kind.layers) for name, kind in family.points.items()}
        for name, kind in family.points.items():
            for layer in self._layers_of[name] if kind.per_layer else (None,):
                self._number[name, layer] = len(self.points)
                self.points.append(Point(len(self.points), name, layer, sizes[kind.width], kind.rows))

    @property
    def unchecked(self) -> str:
        """The reason why self-checks cannot compare `embed` with the embedding matrix; "" if they can."""
        return self.family.unchecked or ("" if self._has("embed") else "the model has no site embed")

    def __repr__(self) -> str:
        return f"<{len(self.names)} sites of {self.family.name}, {self.layers} layers: {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """The model's site names, in the language's order."""
        return [name for name in SITES if self._has(name) and name not in self.withdrawn]

    def _has(self, name: str) -> bool:
        """True if the model's table has the site."""
        kind, _ = self.family.sites.get(name, ("", 0))
        if kind == "" or (self.tensor_parallel > 1 and self.family.points[kind].layout == "partial sum"):
            return False
        return not self.family.points[kind].per_layer or bool(self._having(kind))

    def layers_with(self, kind: str) -> list[int]:
        """Return the layers that have a point kind, or an empty list if the family lacks it."""
        return self._layers_of.get(kind, [])

    def _having(self, kind: str) -> list[int]:
        """Return the layers that have a point kind's site, including layers where another point kind provides it."""
        elsewhere = self.family.points[kind].elsewhere
        return sorted({*self._layers_of[kind], *self._layers_of.get(elsewhere, ())})

    def taps(self, engine: Literal["transformers", "vllm"]) -> list[tuple[Point, Tap]]:
        """Return every point with its tap on an engine, whose module path contains the layer's number."""
        return [(point, self._tap(point, engine)) for point in self.points]

    def _tap(self, point: Point, engine: str) -> Tap:
        tap: Tap = getattr(self.family.points[point.kind], engine)
        return msgspec.structs.replace(tap, module=tap.module.format(l=point.layer))

    def local(self) -> SiteMap:
        """Return the map for one tensor-parallel worker, with its shard sizes. Point numbers stay the same."""
        s, workers = self.sizes, self.tensor_parallel
        local = {"heads": s.heads // workers, "kv_heads": max(1, s.kv_heads // workers), "d_mlp": s.d_mlp // workers}
        return self if workers == 1 else SiteMap(self.family, msgspec.structs.replace(s, **local))

    def view(self, tap: Tap) -> View | None:
        """Return the location of a point's columns in its tap's tensor; None if the point is the whole tensor."""
        if tap.by_head:
            return View(0, by_head=True)
        if tap.scale:
            return View(self.d_model, factor=self.sizes.factor(tap.scale))
        if not tap.of:
            return None
        sizes = [self.sizes[size] for size in tap.of]
        if not tap.mixed:
            return View(sum(sizes), sum(sizes[: tap.part]))
        groups = self.sizes.kv_heads
        return View(sum(sizes), sum(sizes[: tap.part]) // groups, groups, sizes[tap.part] // groups)

    def shard_count(self, point: int) -> int:
        """Return the number of shards of a point's row across a pipeline stage's workers."""
        kind = self.family.points[self.points[point].kind]
        if kind.layout != "sharded":
            return 1
        # with fewer key/value heads than workers, several workers have the same shard
        return min(self.tensor_parallel, self.sizes.kv_heads) if kind.width == "K" else self.tensor_parallel

    def shard(self, point: int, rank: int) -> Shard:
        """Return the shard of a point's row on a pipeline stage's worker `rank`."""
        shards = self.shard_count(point)
        number, size = rank * shards // self.tensor_parallel, self.points[point].width // shards
        return Shard(number, number * size, (number + 1) * size, rank * shards % self.tensor_parallel == 0)

    def depth(self, point: int) -> int:
        """Return a point's rank in computation order. A layer's points share one rank, except its input stream."""
        kind, layer = self.points[point].kind, self.points[point].layer
        if layer is None:
            return {"embed": -1, "stream_end": 2 * self.layers}.get(kind, 2 * self.layers + 1)
        return 2 * layer if kind == "stream" else 2 * layer + 1

    def whole(self, ref: SiteRef) -> bool:
        """True if a single worker has all columns of a site ref, so that it can sum over them."""
        width, shards = self.points[ref.point].width, self.shard_count(ref.point)
        first, end = ref.columns or (0, width)
        return first * shards // width == (end - 1) * shards // width

    def lens_reads(self, point: int) -> bool:
        """True if a lens can read a point: it has the stream's width, and belongs to a layer or is the stream's end."""
        kind = self.points[point].kind
        return self.family.points[kind].width == "D" and (self.points[point].layer is not None or kind == "stream_end")

    def refs(self) -> list[SiteRef]:
        """Return the refs of all the model's sites, without second indices."""
        return [ref for name in self.names for ref in self.resolve(Site(name))]

    def dictionary(self, card: DictionaryCard, rows: Callable[[Sequence[int]], FeatureRows]) -> Dictionary:
        """Resolve the sites of an attached SAE. Raises `UnsupportedSite` for an unsupported site."""
        at, to = (self._of_dictionary(text, field) for text, field in ((card.at, "at"), (card.to, "to")))
        if self.depth(at.point) > self.depth(to.point):
            raise UnsupportedSite(f"expected a site at or after {at}, which the SAE reads, got {to}", "to")
        if self.stages > 1 and at.layer != to.layer:
            message = f"expected a site of layer {at.layer} like {at}, because of pipeline stages, got {to}"
            raise UnsupportedSite(message, "to")
        return Dictionary(card, at, to, rows)

    def _of_dictionary(self, text: str, field: str) -> SiteRef:
        try:
            [ref, *others] = self.resolve(parse_site(text))
        except PatchclampError as error:
            raise error.under(field) from None
        if others or self.points[ref.point].rows == "sampled" or self.shard_count(ref.point) > 1:
            raise UnsupportedSite(f"expected an unsharded site of one layer with a row per token, got {text}", field)
        return ref

    def width(self, ref: SiteRef) -> int:
        """Return a site ref's width in columns."""
        first, end = ref.columns or (0, self.points[ref.point].width)
        return end - first

    def part(self, ref: SiteRef, columns: int) -> SiteRef:
        """Return the ref to the heads, neurons or experts in `columns` (`plan.bound.pack_columns`); 0: all."""
        parts = self.parts(ref.name)
        if not columns or parts is None:
            return ref
        first, end = columns & 0xFFFF, columns >> 16
        one, several = first // parts[1], end // parts[1]
        index = str(one) if several - one == 1 else f"{one}:{several}"
        return msgspec.structs.replace(ref, index=index, columns=(first, end))

    def parts(self, name: str) -> tuple[int, int] | None:
        """Return the number and the width of the heads, neurons or experts in a site's row; None for undivided rows."""
        return self.sizes.parts(SPECS[name].width) if SPECS[name].index else None

    def resolve(self, site: Site) -> list[SiteRef]:
        """Return a site's refs, by layer. Raises `UnsupportedSite` if the model lacks the site, a layer or an index."""
        self._check_has(site.name)
        if not SPECS[site.name].layered:
            return [SiteRef(site.name, None, self._point(site.name, 0))]
        of_row = ("", None) if site.index is None else (str(site.index), self._columns(site))
        return [SiteRef(site.name, layer, self._point(site.name, layer), *of_row) for layer in self._layers(site)]

    def _check_has(self, name: str) -> None:
        """Raise `UnsupportedSite` for a missing or withdrawn site."""
        if name in DERIVED and self.no_attention:
            raise UnsupportedSite(f"{name} is not available here: {self.no_attention}")
        if name in self.withdrawn:
            raise UnsupportedSite(f"{name} was not proved on this model: {self.withdrawn[name]}")
        if self._has(name):
            return
        kind = self.family.points.get(self.family.sites.get(name, ("", 0))[0])
        having = kind.layers if kind else "all"
        why = self.family.lacks.get(name) or NONE_HAS[having if isinstance(having, str) else "all"]
        if name in DERIVED and kind is None:
            why = "this model's site table has no attention layer with separate queries and keys"
        if kind is not None and kind.layout == "partial sum":
            why = "each tensor-parallel worker only has a partial sum"
        raise UnsupportedSite(
            f"{name} is not available on {self.family.name} models: {why}; available: {', '.join(self.names)}"
        )

    def _columns(self, site: Site) -> tuple[int, int]:
        """Return the columns (first, end) that a site's second index selects."""
        parts, index = self.parts(site.name), site.index
        assert parts is not None
        (count, size), kind = parts, SPECS[site.name].index
        if count * size > MAX_INDEXED_COLUMNS:
            raise UnsupportedSite(
                f"{site}: indexing supports rows of at most {MAX_INDEXED_COLUMNS} numbers, got {count * size}"
            )
        assert index is not None
        if not _fits(index, count):
            raise UnsupportedSite(f"{site}: {kind} is out of range for a model with {count} {kind}s (0..{count - 1})")
        chosen = range(index % count, index % count + 1) if isinstance(index, int) else index.indices(count)
        if not chosen:
            raise UnsupportedSite(f"{site}: expected at least one {kind}, got an empty range")
        if chosen.step != 1:
            raise UnsupportedSite(f"{site}: expected a range with step 1, as in {site.name}[0, 0:{min(count, 2)}]")
        return chosen.start * size, chosen.stop * size

    def _layers(self, site: Site) -> list[int]:
        """Return the layers that a site selects in this model."""
        index = site.layers
        kind, shift = self.family.sites[site.name]
        having = self._having(kind) if shift == 0 else list(range(self.layers))
        if index is None:
            return having
        if isinstance(index, Range):
            chosen, fits = list(index.indices(self.layers)), _fits(index, self.layers)
        else:
            named = index if isinstance(index, tuple) else (index,)
            chosen, fits = [i % self.layers for i in named], all(_fits(i, self.layers) for i in named)
        if not chosen or not fits:
            known = f"{self.layers} layers (0..{self.layers - 1})"
            raise UnsupportedSite(f"{site}: layer is out of range for a model with {known}")
        if len(set(chosen)) < len(chosen):
            raise UnsupportedSite(f"{site}: expected distinct layers, got {chosen}")
        lacking = [layer for layer in chosen if layer not in having] if len(having) < self.layers else []
        if lacking:
            kinds = self.family.points[kind].layers
            kinds = LAYERS_WITH[kinds] if isinstance(kinds, str) else ""
            raise UnsupportedSite(f"{site}: layer {lacking[0]} has no {site.name}; available at {having}{kinds}")
        return chosen

    def _point(self, name: str, layer: int) -> int:
        kind, shift = self.family.sites[name]
        if not self.family.points[kind].per_layer:
            return self._number[kind, None]
        if layer + shift == self.layers:
            return self._number[f"{kind}_end", None]
        if (kind, layer + shift) not in self._number:
            kind = self.family.points[kind].elsewhere
        return self._number[kind, layer + shift]

    def label(self, point: int) -> str:
        """Return a point's display name: its earliest layer's site, `resid_post[3]` rather than `resid_pre[4]`."""
        return self._labels[point][0]

    def labels(self, point: int) -> list[str]:
        """Return all names of a point, ascending by layer."""
        return self._labels[point]

    @functools.cached_property
    def _labels(self) -> list[list[str]]:
        labels: list[list[str]] = [[] for _ in self.points]
        words = [name for name in SPECS if self._has(name)]
        for layer in (None, *range(self.layers)):
            for name in words:
                if SPECS[name].layered == (layer is not None) and (layer is None or layer in self._layers(Site(name))):
                    labels[self._point(name, layer or 0)].append(str(SiteRef(name, layer, 0)))
        return labels

    def describe_point(self, point: int) -> str:
        """Return a point's name with its taps' modules: `mlp_in[0] (model.layers.0.mlp)`."""
        taps = [self._tap(self.points[point], engine) for engine in ("transformers", "vllm")]
        return f"{self.label(point)} ({' or '.join(dict.fromkeys(tap.module for tap in taps))})"


def _fits(index: Index, count: int) -> bool:
    """True if the index is within `count`."""
    if isinstance(index, int):
        return -count <= index < count
    return all(-count <= end <= count for end in index.ends if end is not None)
