"""Ops: edits and captures at a site. h is a row in fp32; ops run in program order and the result is rounded once.

Each op acts `at` a site (a `Site` or its text form) on a selection of `tokens` (default: all).

Fuzzing arguments are scalars in a request's `extra_args` (`vllm_xargs` over HTTP), shorthand for one embedding op:

fuzz_strength   noise as a multiple of the row's root mean square; 0 means no program
fuzz_seed       seed of the noise, default 0
fuzz_mode       "noise" (default), or "scale": multiply embeddings by 1 − strength, with strength clamped to 0 … 1
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, UnsupportedSite, unknown
from patchclamp.language.conditions import Output, ProbeCondition, check_condition
from patchclamp.language.probes import linear_model, read_arrays, read_probe, write_probe
from patchclamp.language.site import DERIVED, SITES, SPECS, At, Site, parse_edited_site, parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import Range, Tokens, TokensLike, as_integer, every, parse_tokens
from patchclamp.language.values import (
    POOLS,
    Converted,
    Named,
    Value,
    ValueLike,
    Vector,
    as_direction,
    as_directions,
    as_dtype,
    as_flag,
    as_items,
    as_mask,
    as_number,
    as_numbers,
    as_plain,
    as_plane,
    as_seed,
    as_strength,
    as_value,
    check_name,
    field,
    one_of,
    optional,
)

__all__ = [  # re-exported by `patchclamp.language` and `patchclamp`
    "Ablate", "Add", "Apply", "Capture", "Clamp", "Features", "Knockout", "Lens", "LowRank", "Mean", "Noise", "Probe",
    "Reconstruct", "Replace", "Rotate", "Scale", "SetFeature", "Use", "When", "Zero",
]  # fmt: skip
SCOPES = ("token", "prompt", "onwards")  # scopes of `When`
FEATURE_MODES = ("set", "add", "scale")  # modes of `SetFeature`
MAX_FEATURES = 1024  # per op
ACTIVATIONS = ("sigmoid", "relu", "softmax")  # activations of probes
MAX_TOP = 128  # likeliest tokens of a lens, or largest features
DEFAULT_TOP = 32  # largest features
NORMS = ("match",)  # norm options of `Add`
APPLY_ARGUMENTS = ("positions", "site")  # optional arguments of an `Apply` function


def as_site(value: Site | At | str) -> Site:
    """Parse a site; `SiteOp` has already split `site @ tokens`."""
    assert not isinstance(value, At)
    return parse_site(value)


def as_bias(value: ValueLike) -> Vector:
    """Convert to a vector [k]."""
    vector = as_numbers(value)
    if not isinstance(vector, Vector):
        raise ProgramError(f"expected numbers, got the name {vector.name!r}")
    if len(vector.shape) != 1:
        raise ShapeError(f"expected one number per output, [k], got {list(vector.shape)}")
    return vector


def as_probe_name(value: object) -> str:
    """Check that a probe name has 1 to 64 letters, digits and _ . -"""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
        raise ProgramError(f"expected a name of 1 to 64 letters, digits and _ . -, got {value!r:.100}")
    return value


def as_conditional_edits(value: Op | Iterable[Op]) -> tuple[Op, ...]:
    """Return a tuple of one or more edits."""
    edits = (value,) if isinstance(value, Op) else tuple(as_items(value, "edits"))
    for i, edit in enumerate(edits):
        if not isinstance(edit, SiteOp) or isinstance(edit, (Readout, Apply)):
            raise ProgramError(f"expected an edit such as pc.Add(...), got {type(edit).__name__}", f"[{i}]")
    if not edits:
        raise ProgramError("expected at least one edit")
    return edits


def as_top(value: int) -> int:
    top = as_integer(value)
    if not 1 <= top <= MAX_TOP:
        raise ProgramError(f"expected a number from 1 to {MAX_TOP}, got {top}")
    return top


def as_spans(value: Iterable[TokensLike]) -> tuple[Tokens, ...]:
    """Parse token selections."""
    spans = tuple(map(parse_tokens, as_items(value, "")))
    if not 1 <= len(spans) <= MAX_TOP:
        raise ProgramError(f"expected 1 to {MAX_TOP} selections, got {len(spans)}")
    return spans


def as_feature_ids(value: int | Iterable[int]) -> tuple[int, ...]:
    """Return a tuple of one or more feature ids."""
    several: list[Any] = [value] if hasattr(value, "__index__") else as_items(value, "")
    ids = tuple(map(as_integer, several))
    if not 1 <= len(ids) <= MAX_FEATURES or min(ids) < 0 or len(set(ids)) < len(ids):
        raise ProgramError(f"expected 1 to {MAX_FEATURES} distinct 0-based ids, got {value!r:.100}")
    return ids


def as_feature_values(value: float | Iterable[float]) -> tuple[float, ...]:
    """Return a tuple of one or more feature values."""
    numbers: Any = as_plain(value)
    return tuple(map(as_number, numbers if isinstance(numbers, (list, tuple)) else [numbers]))


def _translators(value: Any) -> tuple[Translator, ...] | None:
    """Return translators unchanged; `Lens` converts them once it knows its site."""
    return value


def as_function(value: Callable[..., Any]) -> Callable[..., Any]:
    """Check that a value is a function that `Apply` accepts."""
    if not callable(value):
        raise ProgramError(f"expected a function of rows, got {value!r}")
    _wanted_arguments(value)
    return value


def _wanted_arguments(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the optional arguments that `fn` takes. Raises `ProgramError` if `fn` requires other arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # C functions may have no signature
        return ()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rows = positional[:1] or [p for p in parameters if p.kind is p.VAR_POSITIONAL]
    needed = [p for p in parameters if p not in rows and p.default is p.empty
              and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    wrong = [p.name for p in needed if p.name not in APPLY_ARGUMENTS or p.kind is p.POSITIONAL_ONLY]
    if wrong or not rows:
        raise ProgramError(
            f"expected a function of rows, optionally with {' and '.join(APPLY_ARGUMENTS)}, got parameters "
            f"{', '.join(map(str, parameters)) or 'none'}: give other parameters a default"
        )
    return tuple(p.name for p in needed)


class Op(Converted, frozen=True, tag=str.lower):
    """Base class of all ops."""


class _Placed:
    """The two fields that every site op has; each op declares them in its own order."""

    __slots__ = ()
    at: Site
    tokens: Tokens


class SiteOp(Op, _Placed, frozen=True):
    """Base class of ops that act `at` a site on a selection of `tokens`."""

    def __post_init__(self) -> None:
        if isinstance(self.at, At):  # pc.z[5] @ pc.prompt[-1]
            both: At = self.at
            if self.tokens != every:
                raise ProgramError(f"duplicate tokens: {both} and tokens={self.tokens}", "tokens")
            msgspec.structs.force_setattr(self, "at", both.site)
            msgspec.structs.force_setattr(self, "tokens", both.tokens)
        if isinstance(self.at, (str, Site)) and not isinstance(self, Readout):
            try:
                if parse_site(self.at).name not in DERIVED:
                    parse_edited_site(self.at)
            except PatchclampError as error:
                raise error.under("at") from None
        super().__post_init__()
        if self.at.name not in DERIVED or isinstance(self, Capture):
            return
        if self.at.name != "pattern" or not isinstance(self, (Knockout, Replace, Scale)):
            raise UnsupportedSite(
                f"{type(self).__name__} is not supported at {self.at}: capture it with pc.Capture, or edit pattern "
                "with pc.Knockout, pc.Replace or pc.Scale", "at"
            )  # fmt: skip


class Readout(SiteOp, frozen=True):
    """Base class of ops that read rows without changing them."""


class Capture(Readout, frozen=True, forbid_unknown_fields=True):
    """Record h after all preceding ops, in `dtype`: float32, bfloat16 or float16.

    `project`, a matrix W [k, D] with at most D rows, records W h [k] instead of h [D], such as projections on
    directions or principal components. The worker computes W h and rounds it to fp32, then to `dtype`. A run captures
    a site whole or through one W, not both; probes have their own matrices and do not count.

    `pool` reduces the selected tokens to one row: "mean", "max" (per column) or "last".

    At `pattern` and `attn_scores` the selected tokens are queries, and a row has one value per key position, cached
    keys included, computed in fp32 in the worker. `keys` restricts the keys, `spans` sums each selection of keys, and
    `top` keeps each head's n largest values, which `run.attention[site]` returns with their positions.
    """

    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    dtype: str = field(converter=as_dtype, default="float32")
    project: Vector | Named | None = field(converter=optional(as_numbers), default=None)
    pool: str | None = field(converter=optional(one_of("pooling", POOLS)), default=None)
    keys: Tokens | None = field(converter=optional(parse_tokens), default=None)
    spans: tuple[Tokens, ...] | None = field(converter=optional(as_spans), default=None)
    top: int | None = field(converter=optional(as_top), default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        of_keys = [name for name in ("keys", "spans", "top") if getattr(self, name) is not None]
        if self.at.name not in DERIVED:
            if of_keys:
                raise ProgramError(f"expected pattern or attn_scores, got {self.at}", of_keys[0])
            return
        if len(of_keys) > 1:
            raise ProgramError(f"expected only one of keys, spans and top, got {' and '.join(of_keys)}", of_keys[1])
        for name, default in {"dtype": "float32", "project": None, "pool": None}.items():
            if getattr(self, name) != default:
                raise ProgramError(f"{name} is not supported at {self.at}, where a row has one value per key", name)
        if self.spans is not None and self.at.name != "pattern":
            raise ProgramError(f"expected pattern, since only probabilities can be summed, got {self.at}", "spans")


class Probe(Readout, frozen=True, forbid_unknown_fields=True):
    """A linear probe: activation(W h + b) for each selected token, k scores computed in the worker.

    `weight` W is [k, D] or [D] (k = 1), `bias` b is [k]; `activation` is None, "sigmoid", "relu" or "softmax" (over
    k). With `pool`, "mean", "max" or "last", W h + b is pooled over the selected tokens before the activation, so
    "mean" matches a probe fitted on mean rows. `run.probes[name]` is [T, k], or [k] if pooled. A site may have many
    probes and still be captured.

    Source: Alain and Bengio 2016 (arXiv:1610.01644).
    """

    weight: Vector | Named = field(converter=as_numbers)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    bias: Vector | None = field(converter=optional(as_bias), default=None)
    activation: str | None = field(converter=optional(one_of("activation", ACTIVATIONS)), default=None)
    pool: str | None = field(converter=optional(one_of("pooling", POOLS)), default=None)
    name: str = field(converter=as_probe_name, default="")

    def __post_init__(self) -> None:
        super().__post_init__()
        outputs = len(self.weight.rows()) if isinstance(self.weight, Vector) else None
        if self.bias is not None and outputs is not None and self.bias.shape != (outputs,):
            raise ShapeError(f"expected one number per output ({outputs}), got {list(self.bias.shape)}", "bias")

    def __getitem__(self, output: int) -> Output:
        """Return output `output`, for comparison with a number in a condition: `probe[2] > 0.5`."""
        return Output(self, output)

    def __gt__(self, threshold: float) -> ProbeCondition:
        return self[0] > threshold

    def __ge__(self, threshold: float) -> ProbeCondition:
        return self[0] >= threshold

    def __lt__(self, threshold: float) -> ProbeCondition:
        return self[0] < threshold

    def __le__(self, threshold: float) -> ProbeCondition:
        return self[0] <= threshold

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], at: Site | At | str, *, tokens: Any = every, pool: str | None = None,
        activation: str | None = None, name: str | None = None,
    ) -> Probe:  # fmt: skip
        """Load a probe from a .safetensors, .npz or .npy file: `weight` [k, D] and optionally `bias` [k], or `coef_`
        and `intercept_`. `name` defaults to the file's stem, `activation` to the value in its metadata. Raises
        `ProgramError` or `ShapeError` for a file that is not a probe."""
        arrays, metadata = read_probe(path)
        return cls(
            arrays["weight"], at, tokens, arrays.get("bias"), activation or metadata.get("activation") or None, pool,
            Path(path).stem if name is None else name,
        )  # fmt: skip

    @classmethod
    def of(
        cls, model: Any, at: Site | At | str, *, name: str, tokens: Any = every, pool: str | None = None,
        activation: str | None = None,
    ) -> Probe:  # fmt: skip
        """Make a probe from a fitted scikit-learn linear model, a pipeline of `StandardScaler` and such a model (the
        scaler is folded into weight and bias), or a `torch.nn.Linear`. A classifier's activation is "sigmoid" for two
        classes and "softmax" for more. Raises `ProgramError` if its scores on random rows differ from the model's."""
        weight, bias, activation = linear_model(model, activation)
        return cls(weight, at, tokens, bias, activation, pool, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weight, bias and activation to a .safetensors file, for `load`. The site is not saved."""
        if isinstance(self.weight, Named):
            raise ProgramError(f"expected numbers to save, got the bank name {self.weight.name!r}", "weight")
        bias = None if self.bias is None else self.bias.array()
        write_probe(path, self.weight.rows(), bias, self.activation)


MAX_LAYERS = 1 << 16  # limit on a translator's layer while the model is unknown


class Translator(PublicStruct, frozen=True, forbid_unknown_fields=True):
    """An affine map, A h + b, that a lens applies to a layer's rows before decoding them.

    matrix, bias: A [D, D]; b [D] or None
    """

    layer: int
    matrix: Vector
    bias: Vector | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.layer < MAX_LAYERS:
            raise ProgramError(f"expected a layer from 0 to {MAX_LAYERS - 1}, got {self.layer}", "layer")
        *_, width = self.matrix.shape
        if self.matrix.shape != (width, width):
            raise ShapeError(f"expected a matrix [D, D], got {list(self.matrix.shape)}", "matrix")
        if self.bias is not None and self.bias.shape != (width,):
            raise ShapeError(f"expected shape [{width}], got {list(self.bias.shape)}", "bias")

    @classmethod
    def of(cls, layer: Any, parts: Any) -> Translator:
        """Make a translator from a matrix A, or from a pair (A, b)."""
        try:
            matrix, bias = parts if isinstance(parts, (tuple, list)) and len(parts) == 2 else (parts, None)
            return cls(as_integer(layer), Vector.of(matrix), None if bias is None else Vector.of(bias))
        except PatchclampError as error:
            raise type(error)(error.message, f"[{layer!r:.100}]") from None


def translators_of(value: Any, at: Site) -> tuple[Translator, ...]:
    """Return the translators of a site's layers, in order. `value`: a mapping of layers to A [D, D] or (A, b [D]), a
    `fit_lens` result, or its file. Without layers, a site covers all layers that have a translator; an open range ends
    at the last of them.

    Raises `ProgramError` if a layer has no translator, or if `value` is a result for another site.
    """
    site = at.name
    if isinstance(value, (str, os.PathLike)):
        site, value = read_translators(value)
    elif hasattr(value, "translators"):
        site, value = value.site, value.translators
    if site != at.name:
        raise ProgramError(f"expected a lens for {at.name}, got one for {site}")
    if isinstance(value, Mapping):
        value = tuple(Translator.of(layer, parts) for layer, parts in value.items())
    if not isinstance(value, tuple) or not value or not all(isinstance(one, Translator) for one in value):
        raise ProgramError(f"expected a mapping of layers to matrices, got {type(value).__name__} {value!r:.100}")
    by_layer = {one.layer: one for one in sorted(value, key=lambda one: one.layer)}
    if len(by_layer) < len(value):
        raise ProgramError("expected one translator per layer, got two for the same layer")
    layers = at.layers
    if isinstance(layers, Range):
        layers = range(layers.start or 0, max(by_layer) + 1 if layers.stop is None else layers.stop, layers.step or 1)
    layers = by_layer if layers is None else (layers,) if isinstance(layers, int) else layers
    missing = next(
        (layer for layer in layers if layer not in by_layer), None
    )  # the first only: a client's range may be huge
    if not layers or missing is not None:
        known = [*map(str, itertools.islice(by_layer, 8)), *(["…"] if len(by_layer) > 8 else [])]
        raise ProgramError(
            f"no translator for layer {at if missing is None else missing} (0-based); available: {', '.join(known)}"
        )
    return tuple(by_layer[layer] for layer in layers)


def read_translators(path: str | os.PathLike[str]) -> tuple[str, dict[int, Any]]:
    """Read a saved `fit_lens` result: its site, and (A, b) by layer. Raises `ProgramError` if the file is not one."""
    try:
        arrays, metadata = read_arrays(path)
        if metadata.get("study") != "FitLensResult":
            raise ProgramError(f"expected a saved result of fit_lens, got {Path(path).name!r}")
        fields = json.loads(metadata["result"])
        matrix_LDD, bias_LD = (arrays[fields[name]["tensor"]] for name in ("matrix", "bias"))
        found = zip(fields["layers"], matrix_LDD, bias_LD, strict=True)
        return str(fields["site"]), {as_integer(layer): parts for layer, *parts in found}
    except PatchclampError as error:
        message = f"{error.message}; pc.studies.read_lens reads the files of tuned-lens and jacobian-lens"
        raise ProgramError(message) from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProgramError(f"{Path(path).name!r} is corrupt: {type(error).__name__} {error}") from None


class Lens(Readout, frozen=True, forbid_unknown_fields=True):
    """The logit lens: the `top` likeliest tokens, with log-probabilities, decoded directly from each selected row.

    The worker applies the model's own final norm and unembedding to the row when `run.lens[site]` is read, and computes
    log-probabilities in fp32. The site must have the stream's width and one row per layer. A site may have several
    lenses and still be captured.

    With `translators` it is a tuned lens or a Jacobian lens, which decodes A h + b instead of h. Pass a mapping of
    layers to A [D, D] or (A, b [D]), a `pc.studies.fit_lens` result, or its file. The lens reads only layers with a
    translator; an index or range in `at` must be within these layers, counted from 0.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens" (LessWrong); Belrose et al. 2023 (arXiv:2303.08112).
    """

    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    top: int = field(converter=as_top, default=5)
    translators: tuple[Translator, ...] | None = field(converter=_translators, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lens_site(self.at)
        if self.translators is None:
            return
        try:
            chosen = translators_of(self.translators, self.at)
        except PatchclampError as error:
            raise error.under("translators") from None
        layers = tuple(one.layer for one in chosen)
        at = self.at if isinstance(self.at.layers, int) else Site(self.at.name, layers)
        for name, value in (("translators", chosen), ("at", at)):
            msgspec.structs.force_setattr(self, name, value)

    def check_width(self, width: int) -> None:
        """Raise `ShapeError` if the translators expect a row width other than `width`."""
        for one in self.translators or ():
            if one.matrix.shape != (width, width):
                path = f"translators[{one.layer}]"
                raise ShapeError(f"expected shape [{width}, {width}], got {list(one.matrix.shape)}", path)

    def translator(self, layer: int | None) -> Translator | None:
        """Return a layer's translator, or None."""
        return next((one for one in self.translators or () if one.layer == layer), None)


def check_lens_site(at: Site) -> None:
    """Raise `UnsupportedSite` for a site that a lens cannot read."""
    spec = SPECS[at.name]
    if not spec.layered or spec.width != "D" or at.index is not None:
        wide = ", ".join(name for name, spec in SITES.items() if spec.layered and spec.width == "D")
        raise UnsupportedSite(f"{at}: a lens requires a per-layer site of the stream's width: use {wide}", "at")


class FeatureOp(SiteOp, frozen=True):
    """Base class of edits that use an attached SAE, at the SAE's site and on `tokens`."""

    __post_init__ = Converted.__post_init__
    name: str


class Features(Readout, frozen=True, forbid_unknown_fields=True):
    """Features of the SAE attached as `name`, at its site: each selected token's `top` largest (default 32), or the
    features `ids`.

    The worker computes and selects them at the end of each step; the row itself is not kept.
    Source: Cunningham et al. 2023 (arXiv:2309.08600); Bricken et al. 2023, "Towards monosemanticity".
    """

    name: str = field(converter=as_probe_name)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    top: int | None = field(converter=optional(as_top), default=None)
    ids: tuple[int, ...] | None = field(converter=optional(as_feature_ids), default=None)

    def __post_init__(self) -> None:
        Converted.__post_init__(self)
        if self.top is not None and self.ids is not None:
            raise ProgramError("expected either top or ids, got both", "top")
        if self.ids is None:
            msgspec.structs.force_setattr(self, "top", self.top or DEFAULT_TOP)

    def __getitem__(self, index: int) -> Output:
        """Return the feature `ids[index]`, for comparison with a number in a condition: `features[0] > 3.5`."""
        return Output(self, index)


class SetFeature(FeatureOp, frozen=True, forbid_unknown_fields=True):
    """Change features of the SAE attached as `name`: h + Σ (v − f) · d over the features `id`, where f is a feature's
    value at h, d its decoder row, and v its new value. The reconstruction error is left unchanged.

    `value` is v for `mode` "set" (0 ablates a feature), v − f for "add", and v / f for "scale"; one number, or one per
    id. With `only_if_active`, a feature that is 0 at a token stays 0. All f are computed before this op. A transcoder
    computes features at the site it reads, and adds their decoder rows at the site it writes.

    Source: Templeton et al. 2024, "Scaling monosemanticity"; Marks et al. 2024 (arXiv:2403.19647).
    """

    name: str = field(converter=as_probe_name)
    id: tuple[int, ...] = field(converter=as_feature_ids)
    value: tuple[float, ...] = field(converter=as_feature_values)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    mode: str = field(converter=one_of("mode", FEATURE_MODES), default="set")
    only_if_active: bool = field(converter=as_flag, default=False)

    def __post_init__(self) -> None:
        Converted.__post_init__(self)
        if len(self.value) not in (1, len(self.id)):
            raise ShapeError(f"expected one number, or one per id ({len(self.id)}), got {len(self.value)}", "value")
        if len(self.value) < len(self.id):
            msgspec.structs.force_setattr(self, "value", self.value * len(self.id))


class Reconstruct(FeatureOp, frozen=True, forbid_unknown_fields=True):
    """Replace h with its reconstruction by the SAE attached as `name`, to measure the SAE's error. A transcoder's
    output replaces the row at the site it writes.

    Source: "loss recovered"; Bricken et al. 2023, "Towards monosemanticity".
    """

    name: str = field(converter=as_probe_name)
    tokens: Tokens = field(converter=parse_tokens, default=every)


class Add(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Add scale · v to h. v is [D], [n, D] for the n selected positions in order, or `From`.

    With norm="match" v is rescaled to each row's norm: scale · (|h| / |v|) · v is added; a zero v adds nothing.
    Norms are computed in the worker, in fp64.

    Source: steering vectors; Turner et al. 2023 (arXiv:2308.10248), Rimsky et al. 2023 (arXiv:2312.06681). Matched
    norms: activation oracles; Karvonen et al. 2025 (arXiv:2512.15674).
    """

    value: Value = field(converter=as_value)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    scale: float = field(converter=as_number, default=1.0)
    norm: str | None = field(converter=optional(one_of("norm", NORMS)), default=None)


class Replace(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Replace h with (1 − a) · h + a · v, where a is `alpha`, times `mask` [D] if given; exactly v where a is 1.

    With `From` this is activation patching. With a `basis`, [D] or [k, D], only h's component in the span of its rows
    is replaced: h + a · Uᵀ U (v − h), where the rows of U are an orthonormal basis of the span.
    Source: interchange interventions; Vig et al. 2020 (arXiv:2004.12265), causal tracing; Meng et al. 2022
    (arXiv:2202.05262); subspaces from distributed alignment search; Geiger et al. 2023 (arXiv:2303.02536).

    At `pattern[l, h]` the value is a row of probabilities [K], or one per query, [t, K], as in `run[pc.pattern[l, h]]`;
    keys at position K or later get 0. The new pattern is not renormalised.
    """

    value: Value = field(converter=as_value)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    alpha: float = field(converter=as_number, default=1.0)
    mask: Vector | Named | None = field(converter=optional(as_mask), default=None)
    basis: Vector | Named | None = field(converter=optional(as_directions), default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.basis is not None:
            raise ProgramError("expected either mask or basis, got both", "basis")
        if self.at.name != "pattern":
            return
        if not (isinstance(self.at.layers, int) and isinstance(self.at.index, int)):
            raise ProgramError(f"expected one head of one layer, such as pattern[3, 1], got {self.at}", "at")
        if not isinstance(self.value, Vector):
            raise ProgramError("expected numbers for a pattern, such as run[pc.pattern[3, 1]]", "value")
        if given := next((name for name in ("mask", "basis") if getattr(self, name) is not None), ""):
            raise ProgramError(f"{given} is not supported at {self.at}", given)


class Zero(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Set h to 0 (zero ablation)."""

    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)


class Mean(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Replace h with v; mean ablation if `value` names means in the bank (`lm.bank.mean`).

    Source: Wang et al. 2022 (arXiv:2211.00593).
    """

    value: Value = field(converter=as_value)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)


class Use(Op, frozen=True, forbid_unknown_fields=True):
    """Apply the edits of a program in the bank, with every `Add` and `Noise` multiplied by `scale`.

    `tokens`, if given, replaces every edit's tokens. For example, to steer: `lm.bank["happy"] = [pc.Add(...),
    pc.Add(...)]`, then `pc.Use("happy", scale=2.0)`.
    """

    name: str = field(converter=check_name)
    scale: float = field(converter=as_number, default=1.0)
    tokens: Tokens | None = field(converter=optional(parse_tokens), default=None)

    def scaled(self, op: Op) -> Op:
        """Return `op` with this `Use`'s scale and tokens. Raises `ProgramError` for an op that cannot be scaled."""
        changed: dict[str, Any] = {} if self.tokens is None else {"tokens": self.tokens}
        strength = {Add: "scale", Noise: "std", Use: "scale"}.get(type(op))
        if self.scale != 1.0:
            if strength is None or (isinstance(op, Noise) and self.scale < 0):
                raise ProgramError(f"cannot scale {type(op).__name__} by {self.scale}: use Add or Noise", "scale")
            changed[strength] = self.scale * getattr(op, strength)
        return msgspec.structs.replace(op, **changed)


class When(Op, frozen=True, forbid_unknown_fields=True):
    """Apply edits only where a condition on probes holds, evaluated in the worker while the request runs.

    `condition` compares outputs of probes with numbers: `probe > 0.8`, `probe[2] <= 1`, combined by `&`, `|` and `~`.
    It is false at a token unless all of its probes read the token. `scope` sets where the edits act:

    - "token": at each of the edits' `tokens` where the condition holds;
    - "prompt": from the last prompt token onward, if the condition holds at that token;
    - "onwards": from the first token where the condition holds.

    The edits must come after the probes: in later layers or, for "token", at the same site. Each probe of a condition
    reads a site of one layer. Decisions match the scores in `run.probes`: all conditions on a probe are decided at its
    first read in the program, before later edits at its site. `run.acted` lists the positions where each edit acted.

    Source: conditional activation steering; Lee et al. 2024 (arXiv:2409.05907).
    """

    condition: ProbeCondition = field(converter=check_condition)
    edits: tuple[Op, ...] = field(converter=as_conditional_edits)
    scope: str = field(converter=one_of("scope", SCOPES), default="token")


class Scale(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Multiply h by `factor`; at `pattern`, the probabilities of `keys` (default: all), without renormalising."""

    factor: float = field(converter=as_number)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    keys: Tokens | None = field(converter=optional(parse_tokens), default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys is not None and self.at.name != "pattern":
            raise ProgramError(f"keys are only supported at pattern, got {self.at}", "keys")


class Knockout(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Remove attention edges: in the heads of `at`, such as `pattern[3:8]` or `pattern[3, 1]`, the queries `tokens` do
    not attend to `keys`; the probabilities of the remaining keys are renormalised.

    Queries that precede all keys are not edited. It is an error if no query remains, or if a query loses all keys.
    Source: attention knockout; Geva et al. 2023 (arXiv:2304.14767).
    """

    keys: Tokens = field(converter=parse_tokens)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at.name != "pattern":
            raise UnsupportedSite(f"expected pattern, such as pattern[3, 1], got {self.at}", "at")


class Ablate(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Remove h's component in the span of `directions`, [D] or [k, D]: h − s · Σ (h · u) u over an orthonormal basis u,
    where s is `strength`: 1 removes the component, 2 reflects it.

    The basis is computed once, in fp64, by Gram-Schmidt; linearly dependent directions are dropped.
    Source: directional ablation; Arditi et al. 2024 (arXiv:2406.11717).
    """

    directions: Vector | Named = field(converter=as_directions)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    strength: float = field(converter=as_number, default=1.0)


class LowRank(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Replace h with h + Rᵀ (W h + b − R h): a linear map of h within the span of R's rows.

    `weight` W and `rotation` R are [k, D] or [D], `bias` b is [k]. R is not orthonormalised; if its rows are
    orthonormal, as in LoReFT, R h becomes W h + b.
    Source: representation fine-tuning; Wu et al. 2024 (arXiv:2404.03592).
    """

    weight: Vector | Named = field(converter=as_numbers)
    bias: Vector | None = field(converter=optional(as_bias))
    rotation: Vector | Named = field(converter=as_numbers)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)


class Clamp(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Clamp the projection of h on a `direction` [D], h · d / |d|, to `low` … `high` (None: no bound).

    Source: feature clamping; Templeton et al. 2024, "Scaling monosemanticity", here applied to a direction.
    """

    direction: Vector | Named = field(converter=as_direction)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    low: float | None = field(converter=optional(as_number), default=None)
    high: float | None = field(converter=optional(as_number), default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ProgramError("expected a bound: low, high or both", "low")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ProgramError(f"low ({self.low}) is above high ({self.high})", "low")


class Rotate(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Rotate h within the plane of two directions, `plane` [2, D], to an angle of `degrees`; its norm is preserved.

    Gram-Schmidt gives the plane's orthonormal basis b₁, b₂: b₁ along the first row, b₂ on the side of the second. The
    projection P h on the plane becomes |P h| (cos θ b₁ + sin θ b₂): at 0 degrees it points along b₁, at 90 along b₂
    and at 180 away from b₁. With `relative`, P h is rotated by θ from b₁ towards b₂. A row orthogonal to the plane is
    unchanged.

    Source: angular steering; Vu and Nguyen 2025 (arXiv:2510.26243). Its adaptive form,
    `When(probe > 0, Rotate(...))`, rotates only rows aligned with a direction.
    """

    plane: Vector | Named = field(converter=as_plane)
    degrees: float = field(converter=as_number)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    relative: bool = field(converter=as_flag, default=False)


class Noise(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Add std · ε to h; if `relative`, std is multiplied by the row's root mean square.

    ε is standard normal and depends only on `seed`, the token's position, the site and the column (`kernels.noise`), so
    it is the same on every engine and in every batch. With `n` samples of a prompt, sample i uses `seed` + i.
    Source: fuzzing; Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """

    std: float = field(converter=as_strength)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)
    seed: int = field(converter=as_seed, default=0)
    relative: bool = field(converter=as_flag, default=False)


class Apply(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Replace h with fn(h): `fn` maps rows [n, D], fp32 on the model's device, to rows of the same shape.

    `fn` may take two more parameters, with these names and without defaults, as in `def fn(h, positions, site)`:
    `positions`, the rows' positions in the request, ascending, int64 [n] on the same device, and `site`, the site's
    text form, such as "resid_post[3]".

    `fn` runs on the engine's thread and must not wait for an engine. Each call gets rows of one request at one site,
    at consecutive positions of one step. The row count depends on scheduling, so each row's result must depend only on
    that row. `fn` may keep and modify the rows. An exception in `fn` fails the run, and `fn` is not called again.
    Programs with code require `pc.LM(..., allow_code=True)` and an in-process engine, run without CUDA graphs, and
    cannot be saved or sent. On a GPU, rows are rounded to the model's dtype before `fn`.
    """

    fn: Callable[..., Any] = field(converter=as_function)
    at: Site = field(converter=as_site)
    tokens: Tokens = field(converter=parse_tokens, default=every)

    def wanted_arguments(self) -> tuple[str, ...]:
        """Return the optional arguments that `fn` takes."""
        return _wanted_arguments(self.fn)


OPS: dict[str, type[Op]] = {  # the ops with a JSON form: all but `Apply`
    kind.__name__.lower(): kind
    for kind in (*Readout.__subclasses__(), *FeatureOp.__subclasses__(), *SiteOp.__subclasses__(), Use, When)
    if kind not in (Apply, Readout, FeatureOp)
}


CaptureLike = Readout | Site | At | str


def as_capture(value: CaptureLike) -> Readout:
    """Make a `Capture` from a site or `site @ tokens`, or from its text form; return a readout unchanged."""
    if isinstance(value, Readout):
        return value
    if isinstance(value, str) and "@" in value:
        at, tokens = value.split("@", 1)
        return Capture(at, tokens)
    return Capture(value)


FUZZ_NAMES, MODES = ("fuzz_strength", "fuzz_seed", "fuzz_mode"), ("noise", "scale")


def fuzz(extra: dict[str, Any]) -> tuple[Op, ...]:
    """Convert fuzzing arguments to one op, or to no op at strength 0.

    Raises `UnknownName` or `ProgramError`, naming the argument.
    Source: Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """
    for name in extra:
        if name not in FUZZ_NAMES:
            raise unknown("extra argument", str(name), FUZZ_NAMES, str(name))
    strength, seed, mode = (extra.get(name) for name in FUZZ_NAMES)
    if strength is None:
        if extra:
            raise ProgramError("fuzz_strength is required", next(iter(extra)))
        return ()
    if mode is not None and (not isinstance(mode, str) or mode not in MODES):
        raise unknown("fuzz_mode", str(mode), MODES, "fuzz_mode")
    if mode == "scale" and seed is not None:
        raise ProgramError("a seed is not supported with fuzz_mode 'scale', which adds no noise", "fuzz_seed")
    try:
        if mode == "scale":
            factor = 1.0 - min(max(Scale(strength, Site("embed")).factor, 0.0), 1.0)
            return () if factor == 1.0 else (Scale(factor, Site("embed")),)
        noise = Noise(strength, Site("embed"), seed=0 if seed is None else seed, relative=True)
        return (noise,) if noise.std else ()
    except PatchclampError as error:
        raise ProgramError(error.message, "fuzz_seed" if error.path == "seed" else "fuzz_strength") from None


EXTRA_ARGS = ("patchclamp", *FUZZ_NAMES)  # patchclamp's keys in `extra_args`
MAX_TYPOS = 2  # maximum edit distance to one of these keys


def is_ours(word: str) -> bool:
    """True if a key of `extra_args` is one of `EXTRA_ARGS`, shares their prefix, or is a typo of one."""
    if word in EXTRA_ARGS or word.lower().startswith(("fuzz_", "patchclamp")):
        return True
    return any(
        abs(len(word) - len(name)) <= MAX_TYPOS and _edits(word.lower(), name) <= MAX_TYPOS for name in EXTRA_ARGS
    )


def check_words(extra: dict[str, Any], path: str = "vllm_xargs") -> None:
    """Raise `UnknownName` for a key that looks like one of `EXTRA_ARGS` but is not one."""
    for word in extra:
        if word not in EXTRA_ARGS and is_ours(word):
            raise unknown("extra argument", word[:64], EXTRA_ARGS, f"{path}.{word[:64]}")


def _edits(word: str, name: str) -> int:
    """Return the Levenshtein distance between two words."""
    row = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(name, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other))
    return row[-1]
