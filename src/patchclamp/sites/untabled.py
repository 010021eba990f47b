"""A site table for a decoder that has none, made from its module tree.

The tree is made from the config, without weights, so every process gets the same one.  It is run once on tensors
without data, so that the table names only modules that are called once, with rows of the right width.  A site that is
not certain is not offered.  Whether attention and MLP add up to the stream is proved on the live model.

    T tokens of the trial run · D model width · l layer
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.registry import SITES
from patchclamp.sites.families import Family, Moment, PointKind, Size, Sizes, Tap, architectures_of, sizes_of
from patchclamp.sites.tables import DECODERS

if TYPE_CHECKING:
    import torch
    from torch import nn

T = 5
ATTENTION = ("self_attn", "self_attention", "attention", "attn")
ATTENTION_END = ("o_proj", "out_proj", "dense", "c_proj", "wo")
MLP = ("mlp", "feed_forward", "ffn")
MLP_END = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
OTHERWISE = {  # modules whose names mislead, by model type and site word
    "diffllama": {"z": "what its projection takes is half as many heads, twice as wide: normed differences of two"},
}
UNKNOWN = "this model has no site table, and without one it is not known where that is made"


class Call(msgspec.Struct):
    """How a module was called in the trial run.

    count: how often
    argument: its first positional argument, if that is a tensor
    result: its result, or the first of several, if that is a tensor
    """

    count: int = 0
    argument: torch.Tensor | None = None
    result: torch.Tensor | None = None

    def shape(self, moment: str) -> list[int] | None:
        """The shape of its argument (`in`) or its result (`out`)."""
        tensor = self.argument if moment == "in" else self.result
        return None if tensor is None else list(tensor.shape)


class Tree(msgspec.Struct):
    """A model without weights.

    prefix: the path of its base model
    modules, calls: by paths in the base model
    embedding: the path of the token embedding there
    """

    architecture: str
    prefix: str
    modules: dict[str, nn.Module]
    calls: dict[str, Call]
    embedding: str

    def call(self, path: str) -> Call:
        return self.calls.get(path, Call())

    def rows(self, path: str, moment: str, width: int) -> bool:
        """Whether a module was called once and took (`in`) or gave (`out`) rows [T, width]."""
        call = self.call(path)
        shape = call.shape(moment)
        return call.count == 1 and shape is not None and shape[-1:] == [width] and math.prod(shape) == T * width

    def children(self, path: str) -> list[str]:
        return [name for name, _ in self.modules[path].named_children()]

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"no site table for {self.architecture}, and none can be made of its modules: {why}")


def untabled(config: Any, trust_remote_code: bool = False) -> Family:
    """The table of a decoder-only model, made from its Transformers config.

    Raises: `ModelError` if its layers are not found, or are not called with the stream.
    """
    try:
        sizes, tree = sizes_of(config), tree_of(config, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        names = ", ".join(architectures_of(config))
        raise ModelError(f"no site table for {names}, and none can be made: {type(error).__name__}: {error}") from error
    layers = _layers(tree, sizes)
    points = {
        "stream": _point_kind(tree, layers + ".{l}", "in"),
        "stream_end": _point_kind(tree, _last_norm(tree, layers, sizes), "in", per_layer=False),
        "final_norm": _point_kind(tree, _last_norm(tree, layers, sizes), "out", per_layer=False),
        "logits": PointKind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled"),
    }
    lacks: dict[str, str] = {}
    if tree.rows(tree.embedding, "out", sizes.d_model):
        points["embed"] = _point_kind(tree, tree.embedding, "out", per_layer=False)
    else:
        lacks["embed"] = f"its embedding, {tree.embedding}, does not give rows as wide as the stream"
    lacks |= OTHERWISE.get(config.model_type, {})
    for word, kind in {
        "attn_out": _part(tree, layers, sizes, "attn_out", ATTENTION),
        "mlp_out": _part(tree, layers, sizes, "mlp_out", MLP),
        "z": _part(tree, layers, sizes, "z", ATTENTION, ATTENTION_END),
        "neurons": _part(tree, layers, sizes, "neurons", MLP, MLP_END),
    }.items():
        if isinstance(kind, PointKind) and word not in lacks:
            points[word] = kind
        elif word not in lacks:
            lacks[word] = str(kind)
    family = Family(f"{config.model_type} (no table)", (tree.architecture,), points, lacks, tabled=False)
    unknown = {word: UNKNOWN for word in SITES if word not in family.sites and word not in lacks}
    return msgspec.structs.replace(family, lacks=lacks | unknown)


def no_text_model(architectures: Sequence[str]) -> ModelError:
    """The error of a config whose text decoder is one of its parts."""
    return ModelError(
        f"no site table for {list(architectures)}, and none can be made: its text decoder is a part of it, beside one "
        f"for images or sound. Of such models there are tables for {', '.join(DECODERS)}; many families have "
        "checkpoints of text alone, too"
    )


def tree_of(config: Any, trust_remote_code: bool) -> Tree:
    """The modules of a config's model, and how a run of it calls them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), torch.no_grad():
        net = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        ).eval()
        base, prefix = net.base_model, net.base_model_prefix
        modules = dict(base.named_modules())
        embedding = next((path for path, module in modules.items() if module is net.get_input_embeddings()), "")
        tree = Tree(type(net).__name__, prefix, modules, {}, embedding)
        if base is net:
            raise tree.refuse(f"it has no base model {prefix!r}; it has: {', '.join(tree.children(''))}")
        _run(net, tree)
    return tree


def _run(net: Any, tree: Tree) -> None:
    """Runs the model on tensors that have shapes only, and fills in the tree's `calls`."""
    import torch

    def before(path: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        call = tree.calls.setdefault(path, Call())
        call.count += 1
        call.argument = arguments[0] if arguments and torch.is_tensor(arguments[0]) else None

    def after(path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        tree.calls[path].result = first if torch.is_tensor(first) else None

    for path, module in tree.modules.items():
        module.register_forward_pre_hook(functools.partial(before, path))
        module.register_forward_hook(functools.partial(after, path))
    # given a mask and positions, most models need no values of either
    masked = {"attention_mask": torch.zeros(1, 1, T, T), "position_ids": torch.zeros(1, T, dtype=torch.long)}
    failed: Exception | None = None
    for options, dtype in itertools.product((masked, {}), (torch.bfloat16, torch.float32)):
        tree.calls.clear()
        net.to(dtype)
        try:
            net(input_ids=torch.zeros(1, T, dtype=torch.long), use_cache=False, **options)
            return
        except Exception as error:
            failed = failed or error
    raise tree.refuse(f"a run of it without data fails, {type(failed).__name__}: {failed}")


def _layers(tree: Tree, sizes: Sizes) -> str:
    """The path of the list of decoder layers: the only list of that length whose modules are called with the stream."""
    modules = tree.modules.items()
    lists = {path: len(tree.children(path)) for path, module in modules if type(module).__name__ == "ModuleList"}
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    fitting = [path for path in outer if lists[path] == sizes.layers]
    if len(fitting) != 1:
        listed = ", ".join(f"{path} ({lists[path]})" for path in outer) or ", ".join(tree.children("")) or "no modules"
        raise tree.refuse(f"not one list of {sizes.layers} layers was found among: {listed}")
    for layer in range(sizes.layers):
        path = f"{fitting[0]}.{layer}"
        if not tree.rows(path, "in", sizes.d_model):
            call = tree.call(path)
            raise tree.refuse(
                f"{path} should be called once, with the stream [{T}, {sizes.d_model}] first; it was called "
                f"{call.count} times, with {call.shape('in') or 'no tensor'}; it has: "
                f"{', '.join(tree.children(path))}"
            )
    return fitting[0]


def _last_norm(tree: Tree, layers: str, sizes: Sizes) -> str:
    """The path of the norm beside the layers that is called after them."""
    owner, order = layers.rpartition(".")[0], list(tree.calls)
    called = order[order.index(f"{layers}.{sizes.layers - 1}") + 1 :]
    after = [path for name in tree.children(owner) if (path := f"{owner}.{name}".lstrip(".")) in called]
    width = sizes.d_model
    norms = [
        path
        for path in after
        if (_weight(tree.modules[path]) == (width,) or "norm" in path.rpartition(".")[2])
        and tree.rows(path, "in", width)
        and tree.rows(path, "out", width)
    ]
    if len(norms) != 1:
        raise tree.refuse(f"not one norm is called after {layers}, among: {', '.join(after) or 'nothing'}")
    return norms[0]


def _part(
    tree: Tree, layers: str, sizes: Sizes, word: str, names: tuple[str, ...], ends: tuple[str, ...] = ()
) -> PointKind | str:
    """The point kind of a word, or the reason why there is none. Its point is the result of the module that has one of
    these `names` in every layer; or with `ends` the input of that module's last projection, which has one of those."""
    width = SITES[word].width
    moment: Moment = "in" if ends else "out"
    path = layers + ".{l}"
    for candidates in (names, ends) if ends else (names,):
        children = [tree.children(path.format(l=layer)) for layer in range(sizes.layers)]
        common = [name for name in candidates if all(name in of_layer for of_layer in children)]
        if len(common) != 1:
            first = ", ".join(children[0])
            return f"it has no site table, and of {', '.join(candidates)} not one is in every {path} (0: {first})"
        path = f"{path}.{common[0]}"
    for layer in range(sizes.layers):
        if not tree.rows(path.format(l=layer), moment, sizes[width]):
            shape = tree.call(path.format(l=layer)).shape(moment)
            return (
                f"it has no site table, and {path.format(l=layer)} has {shape or 'no tensor'} where "
                f"[{T}, {sizes[width]}] would be right"
            )
        norm = _norm_before(tree, path.format(l=layer)) if ends else None
        if norm is not None:
            return f"it has no site table, and what {path.format(l=layer)} takes was normed by {norm}"
    return _point_kind(tree, path, moment, width, layout="sharded" if ends else "replicated")


def _norm_before(tree: Tree, path: str) -> str | None:
    """The norm beside a module whose result, unchanged or reshaped, is the module's input; None if there is none."""
    argument, owner = tree.calls[path].argument, path.rpartition(".")[0]
    for name in tree.children(owner):
        beside = f"{owner}.{name}"
        result = tree.call(beside).result
        kind = type(tree.modules[beside]).__name__
        is_norm = ("norm" in name or "norm" in kind.lower()) and kind != "Identity"
        if is_norm and result is not None and argument is not None and _storage(result) == _storage(argument):
            return beside
    return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _point_kind(tree: Tree, path: str, moment: Moment, width: Size = "D", **rest: Any) -> PointKind:
    """A point kind at one module, given its path in the base model, which vLLM calls `model`."""
    return PointKind(Tap(f"{tree.prefix}.{path}", moment), Tap(f"model.{path}", moment), width, **rest)


def _weight(module: nn.Module) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else tuple(weight.shape)
