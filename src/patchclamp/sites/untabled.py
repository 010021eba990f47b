"""A site table for a decoder that has none, found by one run of its modules on tensors without data.

The modules are made from the config, without weights, so every process finds the same. A site that is not certain is
not offered, and what is offered is proved on the live model.

    T tokens of the trial run · D model width · l layer
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.site import SITES
from patchclamp.sites.dataflow import NotFound, Record
from patchclamp.sites.families import Family, PointKind, Sizes, Tap, architectures_of, sizes_of
from patchclamp.sites.places import WIDTHS, Places, Spot, places
from patchclamp.sites.tables import DECODERS

T = 5
OTHERWISE = {  # modules whose names mislead, by model type and site word
    "diffllama": {"z": "what its projection takes is half as many heads, twice as wide: normed differences of two"},
}
SEVERAL_STREAMS = {  # models whose layers carry no one stream, by model type
    "gemma3n_text": "each of its layers makes four streams of four (AltUp), and none of them is the residual stream",
}
UNKNOWN = "this model has no site table, and without one it is not known where that is made"
LOGITS = PointKind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled")


def check_stream(config: Any) -> None:
    """Raises `ModelError` for a model that is known to have no residual stream."""
    why = SEVERAL_STREAMS.get(config.model_type)
    if why is not None:
        raise ModelError(f"{', '.join(architectures_of(config))} has no sites: {why}")


def untabled(config: Any, trust_remote_code: bool = False) -> Family:
    """The table of a decoder-only model, made from its Transformers config.

    Raises: `ModelError` if its layers are not found, or are not called with the stream.
    """
    check_stream(config)
    try:
        sizes, (found, prefix) = sizes_of(config), transformers_places(config, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        names = ", ".join(architectures_of(config))
        raise ModelError(f"no site table for {names}, and none can be made: {type(error).__name__}: {error}") from error
    below = {name: _moved(spot, prefix, "model") for name, spot in found.spots.items()}
    backend = msgspec.structs.replace(found, spots=below)
    return family_of_places(f"{config.model_type} (no table)", config, found, backend, sizes)


def family_of_places(name: str, config: Any, transformers: Places | None, vllm: Places, sizes: Sizes) -> Family:
    """The table of what was found in vLLM's class, and in Transformers'. A site that only vLLM's class has stands in
    both columns at vLLM's module, whose name is mostly the checkpoint's."""
    points = {"logits": LOGITS}
    for kind, spot in vllm.spots.items():
        theirs = spot if transformers is None else transformers.spots.get(kind, spot)
        points[kind] = _point_kind(kind, theirs, spot, sizes)
    lacks = {word: f"it has no site table, and {why}" for word, why in vllm.lacks.items()}
    lacks |= OTHERWISE.get(config.model_type, {})
    points = {kind: point for kind, point in points.items() if kind not in lacks}
    family = Family(name, (vllm.architecture,), points, lacks, tabled=False)
    unknown = {word: UNKNOWN for word in SITES if word not in family.sites and word not in lacks}
    return msgspec.structs.replace(family, lacks=lacks | unknown)


def _point_kind(kind: str, transformers: Spot, vllm: Spot, sizes: Sizes) -> PointKind:
    width = WIDTHS.get(kind, "D")
    layers = vllm.layers
    return PointKind(
        _tap(transformers), _tap(vllm), width, "sharded" if kind in WIDTHS else "replicated", layers is not None,
        layers="all" if layers is None or len(layers) == sizes.layers else layers,
    )  # fmt: skip


def _tap(spot: Spot) -> Tap:
    hidden, *residual = spot.keys
    scale = "" if spot.factor == 1 else spot.factor
    return Tap(spot.path, spot.moment, hidden, residual[0] if residual else None, scale=scale)


def _moved(spot: Spot, prefix: str, below: str) -> Spot:
    """A spot of a model whose base model has another name."""
    return msgspec.structs.replace(spot, path=f"{below}{spot.path.removeprefix(prefix)}")


def no_text_model(architectures: Sequence[str]) -> ModelError:
    """The error of a config whose text decoder is one of its parts."""
    return ModelError(
        f"no site table for {list(architectures)}, and none can be made: its text decoder is a part of it, beside one "
        f"for images or sound. Of such models there are tables for {', '.join(DECODERS)}; many families have "
        "checkpoints of text alone, too"
    )


def transformers_places(config: Any, trust_remote_code: bool) -> tuple[Places, str]:
    """What is found in Transformers' class of a config, and the path of its base model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), torch.no_grad():
        net = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        ).eval()
        sizes, architecture = sizes_of(config), type(net).__name__
        record = _record(net, sizes)
    try:
        found = places(architecture, record, sizes, T)
    except NotFound as why:
        raise refuse(architecture, str(why)) from None
    return found, found.spots["stream"].path.partition(".")[0]


def refuse(architecture: str, why: str) -> ModelError:
    return ModelError(f"no site table for {architecture}, and none can be made of its modules: {why}")


def _record(net: Any, sizes: Sizes) -> Record:
    """The record of a run of a model on tensors that have shapes only."""
    import torch

    from patchclamp.sites.recording import record_of

    # given a mask and positions, most models need no values of either
    masked = {"attention_mask": torch.zeros(1, 1, T, T), "position_ids": torch.zeros(1, T, dtype=torch.long)}
    failed: Exception | None = None
    for options, dtype in itertools.product((masked, {}), (torch.bfloat16, torch.float32)):
        net.to(dtype)
        try:
            ids = torch.zeros(1, T, dtype=torch.long)
            return record_of(net, sizes, ids, functools.partial(net, input_ids=ids, use_cache=False, **options))
        except Exception as error:
            failed = failed or error
    raise refuse(type(net).__name__, f"a run of it without data fails, {type(failed).__name__}: {failed}")
