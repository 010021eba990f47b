"""A table for a decoder that has none, made of its module tree.

The tree is made of the config, without weights, so that every process finds the same one; and it is run once on tensors
without data, so that every module that is named was seen to be called once with rows of the right width. What then is
not certain is not offered; whether attention and MLP add up to the stream, the prover sees on the live model.

    T tokens of the trial run · D model width · l layer
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec

from patchclamp.errors import ModelError
from patchclamp.sites.families import Family, PointKind, Size, Sizes, Tap, sizes_of
from patchclamp.sites.tables import ALL

T = 5
ATTENTION = ("self_attn", "self_attention", "attention", "attn")
ATTENTION_END = ("o_proj", "out_proj", "dense", "c_proj", "wo")
MLP = ("mlp", "feed_forward", "ffn")
MLP_END = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
WITHIN = (
    "and none can be made: its text decoder is a part of it, beside one for images or sound. Only models of text alone "
    "have sites; many families have such checkpoints too"
)
OTHERWISE = {  # what is called alike and is something else
    "diffllama": {"z": "what its projection takes is half as many heads, twice as wide: normed differences of two"},
}
UNKNOWN = "this model has no site table, and without one it is not known where that is made"


class Call(msgspec.Struct):
    """Of a module in the trial run: how often it was called, the shapes of its first positional argument and of what it
    gave (of the first of several), and both themselves."""

    count: int = 0
    taken: tuple[int, ...] | None = None
    given: tuple[int, ...] | None = None
    argument: Any = None
    result: Any = None


class Tree(msgspec.Struct):
    """A model without weights: the modules below its base model by their paths there, where that is in the whole, and
    what was called."""

    architecture: str
    prefix: str
    modules: dict[str, Any]
    calls: dict[str, Call]
    embedding: str

    def rows(self, path: str, moment: str, width: int) -> bool:
        """Whether a module was called once and took (`in`) or gave (`out`) rows [T, width]."""
        call = self.calls.get(path, Call())
        shape = call.taken if moment == "in" else call.given
        return call.count == 1 and shape is not None and shape[-1:] == (width,) and _size(shape) == T * width

    def children(self, path: str) -> list[str]:
        return [name for name, _ in self.modules[path].named_children()]

    def refuse(self, why: str) -> ModelError:
        return ModelError(f"no site table for {self.architecture}, and none can be made of its modules: {why}")


def untabled(config: Any, trust_remote_code: bool = False) -> Family:
    """The table of a decoder-only model, of its Transformers config. Raises `ModelError` where its layers are not
    found, or are not called with the stream."""
    try:
        sizes, tree = sizes_of(config), tree_of(config, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        named = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
        raise ModelError(f"no site table for {named}, and none can be made: {type(error).__name__}: {error}") from error
    layers = _layers(tree, sizes)
    points = {
        "stream": _point_kind(tree, layers + ".{l}", "in"),
        "stream_end": _point_kind(tree, _last_norm(tree, layers, sizes), "in", per_layer=False),
        "final_norm": _point_kind(tree, _last_norm(tree, layers, sizes), "out", per_layer=False),
        "logits": PointKind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled"),
    }
    lacks: dict[str, str] = dict.fromkeys(["resid_mid", "attn_in", "mlp_in", "q", "k", "v", "router"], UNKNOWN)
    if tree.rows(tree.embedding, "out", sizes.d_model):
        points["embed"] = _point_kind(tree, tree.embedding, "out", per_layer=False)
    else:
        lacks["embed"] = f"its embedding, {tree.embedding}, does not give rows as wide as the stream"
    lacks |= OTHERWISE.get(config.model_type, {})
    for word, found in {
        "attn_out": _part(tree, layers, sizes, "attn_out", ATTENTION),
        "mlp_out": _part(tree, layers, sizes, "mlp_out", MLP),
        "z": _part(tree, layers, sizes, "z", ATTENTION, ATTENTION_END),
        "neurons": _part(tree, layers, sizes, "neurons", MLP, MLP_END),
    }.items():
        if isinstance(found, PointKind) and word not in lacks:
            points[word] = found
        elif word not in lacks:
            lacks[word] = str(found)
    sites = {word: place for word, place in (ALL | {"embed": ("embed", 0)}).items() if word not in lacks}
    return Family(f"{config.model_type} (no table)", (tree.architecture,), points, sites, lacks, tabled=False)


def tree_of(config: Any, trust_remote_code: bool) -> Tree:
    """The modules of a config's model, and what a run of it calls."""
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
    """Fills in what a run of the model calls, on tensors that have shapes only."""
    import torch

    def taken(path: str, module: Any, args: tuple[Any, ...]) -> None:
        call = tree.calls.setdefault(path, Call())
        call.count += 1
        call.argument = args[0] if args and torch.is_tensor(args[0]) else None
        call.taken = None if call.argument is None else tuple(call.argument.shape)

    def given(path: str, module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        call = tree.calls[path]
        call.result = first if torch.is_tensor(first) else None
        call.given = None if call.result is None else tuple(call.result.shape)

    for path, module in tree.modules.items():
        module.register_forward_pre_hook(lambda *seen, path=path: taken(path, *seen))
        module.register_forward_hook(lambda *seen, path=path: given(path, *seen))
    # with a mask of its own, and positions: most models read none of their values then
    known = {"attention_mask": torch.zeros(1, 1, T, T), "position_ids": torch.zeros(1, T, dtype=torch.long)}
    failed: Exception | None = None
    for given_too, dtype in itertools.product((known, {}), (torch.bfloat16, torch.float32)):
        tree.calls.clear()
        net.to(dtype)
        try:
            net(input_ids=torch.zeros(1, T, dtype=torch.long), use_cache=False, **given_too)
            return
        except Exception as error:
            failed = failed or error
    raise tree.refuse(f"a run of it without data fails, {type(failed).__name__}: {failed}")


def _layers(tree: Tree, sizes: Sizes) -> str:
    """The path of the list of decoder layers: the only one of so many modules, each called with the stream."""
    lists = {path: len(each) for path, each in tree.modules.items() if type(each).__name__ == "ModuleList"}
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    found = [path for path in outer if lists[path] == sizes.layers]
    if len(found) != 1:
        seen = ", ".join(f"{path} ({lists[path]})" for path in outer) or ", ".join(tree.children("")) or "no modules"
        raise tree.refuse(f"not one list of {sizes.layers} layers was found among: {seen}")
    for layer in range(sizes.layers):
        path = f"{found[0]}.{layer}"
        if not tree.rows(path, "in", sizes.d_model):
            call = tree.calls.get(path, Call())
            raise tree.refuse(
                f"{path} should be called once, with the stream [{T}, {sizes.d_model}] first; it was called "
                f"{call.count} times, with {list(call.taken) if call.taken else 'no tensor'}; it has: "
                f"{', '.join(tree.children(path))}"
            )
    return found[0]


def _last_norm(tree: Tree, layers: str, sizes: Sizes) -> str:
    """The path of the norm beside the layers that is called after them, wherever it is declared."""
    owner, order = layers.rpartition(".")[0], list(tree.calls)
    called = order[order.index(f"{layers}.{sizes.layers - 1}") + 1 :]
    after = [path for name in tree.children(owner) if (path := f"{owner}.{name}".lstrip(".")) in called]
    width = sizes.d_model
    found = [
        path
        for path in after
        if (_weight(tree.modules[path]) == (width,) or "norm" in path.rpartition(".")[2])
        and tree.rows(path, "in", width)
        and tree.rows(path, "out", width)
    ]
    if len(found) != 1:
        raise tree.refuse(f"not one norm is called after {layers}, among: {', '.join(after) or 'nothing'}")
    return found[0]


def _part(
    tree: Tree, layers: str, sizes: Sizes, word: str, names: tuple[str, ...], ends: tuple[str, ...] = ()
) -> PointKind | str:
    """What a module of every layer gives (or with `ends`, what the last projection in it takes), or why it is not
    offered."""
    width: Size = {"z": "Z", "neurons": "M"}.get(word, "D")  # type: ignore[assignment]
    moment, path = "in" if ends else "out", layers + ".{l}"
    for among in (names, ends) if ends else (names,):
        here = [tree.children(path.format(l=layer)) for layer in range(sizes.layers)]
        found = [name for name in among if all(name in children for children in here)]
        if len(found) != 1:
            return (
                f"it has no site table, and of {', '.join(among)} not one is in every {path} (0: {', '.join(here[0])})"
            )
        path = f"{path}.{found[0]}"
    for layer in range(sizes.layers):
        if not tree.rows(path.format(l=layer), moment, sizes[width]):
            call = tree.calls.get(path.format(l=layer), Call())
            shape = call.taken if ends else call.given
            return (
                f"it has no site table, and {path.format(l=layer)} has {list(shape) if shape else 'no tensor'} where "
                f"[{T}, {sizes[width]}] would be right"
            )
        norm = _norm_before(tree, path.format(l=layer)) if ends else None
        if norm is not None:
            return f"it has no site table, and what {path.format(l=layer)} takes was normed by {norm}"
    return _point_kind(tree, path, moment, width, layout="sharded" if ends else "replicated")


def _norm_before(tree: Tree, path: str) -> str | None:
    """The norm beside a module whose result, as it is or reshaped, is what the module takes."""
    taken, owner = tree.calls[path].argument, path.rpartition(".")[0]
    for name in tree.children(owner):
        beside = f"{owner}.{name}"
        made = tree.calls.get(beside, Call()).result
        kind = type(tree.modules[beside]).__name__
        is_norm = ("norm" in name or "norm" in kind.lower()) and kind != "Identity"
        if is_norm and made is not None and made.untyped_storage()._cdata == taken.untyped_storage()._cdata:
            return beside
    return None


def _point_kind(tree: Tree, path: str, moment: Any, width: Size = "D", **rest: Any) -> PointKind:
    """A kind of point at one module, by its path in the base model: vLLM has that as `model`."""
    return PointKind(Tap(f"{tree.prefix}.{path}", moment), Tap(f"model.{path}", moment), width, **rest)


def _weight(module: Any) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    return None if weight is None else tuple(weight.shape)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for many in shape:
        size *= many
    return size
