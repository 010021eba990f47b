"""Derive a site table for an unlisted decoder, from one run of its modules on meta tensors.

The modules are built from the config, without weights, so every process derives the same table. Uncertain sites are
omitted; the others are proved on the live model.

1. `Recorder` records the run: the dataflow between values, and the arguments and results of every module call.
2. `Flow` finds the stream. A layer's arguments are the stream, or two tensors that sum to it. The layer's gain is the
   stream after the layer minus the stream before it, as a sum. Its terms are looked up among the modules' results.
3. `places` finds the sites, as plain data for any process; `untabled` makes the table.

    T tokens of the run · D model width · l layer
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchclamp.errors import ModelError
from patchclamp.language.site import SITES
from patchclamp.sites.map import Sizes, architectures_of, sizes_of
from patchclamp.sites.tables import DECODERS, PARALLEL, UNCHECKED, Family, Moment, PointKind, Size, Tap

Key = int | str  # an argument's index or name
Sum = dict[int, float]  # factor by value
MIXER = re.compile(
    r"mamba|ssm|shortconv|short_conv|\bconv\b|delta_?net|delta_?attention|linear_?att|lightning|recurrent|rwkv"
)
ATTENTION_NAME = re.compile(r"att(ention|n)")


class Value(msgspec.Struct):
    """A tensor's content.

    op, of: the op that computed it, and the op's input values; `scale` multiplies by `factor`
    path: the innermost module whose call computed it
    """

    op: str
    of: tuple[int, ...]
    shape: tuple[int, ...]
    path: str
    factor: float = 1.0


class ModuleCall(msgspec.Struct):
    """A module call.

    given, result: the indices in `Record.values` of its tensor arguments and results
    shapes, result_shapes: the shapes of the arguments and of the results
    begin, end: the number of values recorded before the call, and by its end
    """

    path: str
    begin: int
    given: dict[Key, int]
    shapes: dict[Key, tuple[int, ...]]
    result: dict[int, int] = {}
    result_shapes: dict[int, tuple[int, ...]] = {}
    end: int = -1

    def takes(self, key: Key, width: int, tokens: int) -> bool:
        """True if argument `key` consists of rows [T, width]."""
        return _is_rows(self.shapes.get(key, ()), width, tokens)

    def returns(self, item: int, width: int, tokens: int) -> bool:
        """True if item `item` of the result consists of rows [T, width]."""
        return _is_rows(self.result_shapes.get(item, ()), width, tokens)


def _is_rows(shape: tuple[int, ...], width: int, tokens: int) -> bool:
    return shape[-1:] == (width,) and math.prod(shape) == tokens * width


class Record(msgspec.Struct, dict=True):
    """The values and module calls recorded in one run.

    kinds: each module's class names, by path (`kinds_of`)
    ids: the index of the token ids' value
    guessed: modules that failed on meta tensors, with the error; assumed to return a tensor like their first argument
    """

    kinds: dict[str, str]
    values: list[Value] = []
    calls: list[ModuleCall] = []
    guessed: dict[str, str] = {}
    ids: int = 0

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    @functools.cached_property
    def by_path(self) -> dict[str, list[ModuleCall]]:
        calls: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            calls.setdefault(call.path, []).append(call)
        return calls

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """The values computed directly from each value."""
        readers: dict[int, list[int]] = {}
        for number, value in enumerate(self.values):
            for source in value.of:
                readers.setdefault(source, []).append(number)
        return readers

    @functools.cached_property
    def returned(self) -> dict[int, list[tuple[ModuleCall, int]]]:
        """The calls that returned each value, outermost first, each with the value's index in the result."""
        returned: dict[int, list[tuple[ModuleCall, int]]] = {}
        for call in sorted(self.calls, key=lambda call: len(call.path)):
            for item, number in call.result.items():
                returned.setdefault(number, []).append((call, item))
        return returned

    def is_norm(self, path: str) -> bool:
        return "norm" in path.rpartition(".")[2] or "norm" in self.kinds[path]

    def sources(self, number: int) -> set[int]:
        """Return a value and all values that it was computed from."""
        waiting, seen = [number], set()
        while waiting:
            at = waiting.pop()
            if at not in seen:
                seen.add(at)
                waiting += self.values[at].of
        return seen

    def children(self, path: str) -> list[str]:
        return [name.rpartition(".")[2] for name in self.kinds if name and name.rpartition(".")[0] == path]


class NotFound(Exception):
    """A site or the stream was not found; the message is the reason."""


class Flow:
    """The residual stream in a record.

    layers: the path of the list of layers
    keys: a layer's arguments that carry the stream
    adds: True if layers only add to the stream
    end, end_keys: the call that takes the stream after the last layer, and its arguments that carry the stream
    gains: for each layer, the sum that it adds to the stream
    """

    def __init__(self, record: Record, count: int, width: int, tokens: int) -> None:
        self.record, self.count, self.width, self.tokens = record, count, width, tokens
        self.layers: str = self._list_of_layers()
        self.calls: list[ModuleCall] = [record.by_path[f"{self.layers}.{layer}"][0] for layer in range(count)]
        self.keys, self.end, self.end_keys, self.adds = self._stream()
        self.gains: list[Sum] = [self._gains(layer) for layer in range(count)]

    def _list_of_layers(self) -> str:
        """Return the path of the only list with one module per layer, each called once."""
        record, lists = self.record, {}
        for path, kinds in record.kinds.items():
            if "modulelist" in kinds.split() and not any(path.startswith(f"{outer}.") for outer in lists):
                lists[path] = len(record.children(path))
        once = {path for path, calls in record.by_path.items() if len(calls) == 1}
        fitting = [
            path
            for path, length in lists.items()
            if length == self.count and once.issuperset(f"{path}.{layer}" for layer in range(length))
        ]
        if len(fitting) != 1:
            listed = ", ".join(f"{path} ({number})" for path, number in lists.items())
            names = listed or ", ".join(record.children("")) or "no modules"
            raise NotFound(f"expected one module list of {self.count} layers, each called once, got: {names}")
        return fitting[0]

    def wide(self, call: ModuleCall) -> dict[Key, int]:
        """Return the values of a call's arguments that consist of rows [T, D], by argument."""
        return {key: value for key, value in call.given.items() if call.takes(key, self.width, self.tokens)}

    def _stream(self) -> tuple[tuple[Key, ...], ModuleCall, tuple[Key, ...], bool]:
        wide = [self.wide(call) for call in self.calls]
        last = wide[-1]
        changing = [key for key in last if self.count == 1 or wide[-2].get(key) != last[key]]
        choices = [*itertools.combinations(changing, 2), *((key,) for key in changing)]
        for keys in choices:
            carried = [self.carried(layer, keys) for layer in range(self.count)]
            if all(self._is_kept(before, after) for before, after in itertools.pairwise(carried)):
                before = carried[-1]
                for call, end_keys in self._last_norms():
                    if self._is_kept(before, [call.given[key] for key in end_keys]):
                        return keys, call, end_keys, True
        results = set(self.calls[-1].result.values())
        for call, end_keys in self._last_norms():
            if len(changing) == 1 and len(end_keys) == 1 and call.given[end_keys[0]] in results:
                return (changing[0],), call, end_keys, False
        given = {key: list(shape) for key, shape in self.calls[-1].shapes.items()}
        raise NotFound(
            f"expected {self.layers}.{self.count - 1} to receive the stream [{self.tokens}, {self.width}], or two "
            f"tensors that sum to it, and a norm to receive its output; its inputs are {given or 'no tensor'}"
        )

    def _last_norms(self) -> Iterator[tuple[ModuleCall, tuple[Key, ...]]]:
        """Yield the calls of norms after the last layer."""
        for call, keys in self.calls_with_sums(self.calls[-1].end, len(self.record.values)):
            if self.record.is_norm(call.path):
                yield call, keys

    def carried(self, layer: int, keys: tuple[Key, ...] | None = None) -> list[int]:
        """Return the values whose sum is the stream before a layer."""
        given = self.calls[layer].given
        return [given[key] for key in (self.keys if keys is None else keys) if key in given]

    def _is_kept(self, before: list[int], after: list[int]) -> bool:
        """True if stream `after` is stream `before` plus other terms."""
        total = self.total(after, frozenset(before))
        return bool(before) and all(total.get(value) == 1 for value in before)

    def calls_with_sums(self, begin: int, end: int) -> Iterator[tuple[ModuleCall, tuple[Key, ...]]]:
        """Yield the calls between two points of the run, with each set of arguments whose sum may be the stream."""
        for call in self.record.calls:
            if begin <= call.begin and call.end <= end:
                wide = list(self.wide(call))
                for keys in [*itertools.combinations(wide, 2), *((key,) for key in wide)]:
                    if any(self.unread(call.given[key], call.begin) for key in keys):
                        yield call, keys

    def unread(self, value: int, until: int) -> bool:
        """True if no value before `until` was computed from `value`."""
        return not any(reader < until for reader in self.record.readers.get(value, ()))

    # -- sums

    def total(self, values: Iterable[int], terms: frozenset[int]) -> Sum:
        """Expand a sum of values to a sum of `terms` and module results."""
        total: Sum = {}
        for value in values:
            for term, factor in self._expanded(value, terms).items():
                total[term] = total.get(term, 0.0) + factor
        return total

    def _expanded(self, number: int, terms: frozenset[int]) -> Sum:
        value = self.record.values[number]
        if number in terms or value.op not in ("add", "scale"):
            return {number: 1.0}
        if number in self.record.returned and not self._reaches(number, terms):
            return {number: 1.0}
        return {term: factor * value.factor for term, factor in self.total(value.of, terms).items()}

    def _reaches(self, number: int, terms: frozenset[int]) -> bool:
        """True if a value is a sum that contains one of `terms`."""
        waiting, seen = [number], set()
        first = min(terms, default=-1)
        while waiting:
            at = waiting.pop()
            if at in terms:
                return True
            if at not in seen and at > first and self.record.values[at].op in ("add", "scale"):
                waiting += self.record.values[at].of
            seen.add(at)
        return False

    def _gains(self, layer: int) -> Sum:
        """Return the terms that a layer adds to the stream."""
        before = self.carried(layer)
        after = self.carried(layer + 1) if layer + 1 < self.count else [self.end.given[key] for key in self.end_keys]
        total = self.total(after, frozenset(before))
        return {term: factor for term, factor in total.items() if term not in before}

    def part_of(self, layer: int, term: int) -> str:
        """Return the part of a layer that computes a term: "attention", "mixer" (another token mixer) or "mlp"."""
        terms, waiting, seen, names = frozenset(self.carried(layer)), [term], set(), set()
        while waiting:
            number = waiting.pop()
            if number in seen or number < self.calls[layer].begin or (number != term and self._reaches(number, terms)):
                continue
            seen.add(number)
            value = self.record.values[number]
            waiting += value.of
            for path in _upwards(value.path, f"{self.layers}.{layer}"):
                if "norm" not in path.rpartition(".")[2]:
                    names.add(f"{path.rpartition('.')[2]} {self.record.kinds[path]}")
        if any(MIXER.search(name.lower()) for name in names):
            return "mixer"
        return "attention" if any(ATTENTION_NAME.search(name.lower()) for name in names) else "mlp"


def _upwards(path: str, above: str) -> Iterator[str]:
    """Yield the paths of a module and its parents below `above`, innermost first."""
    while path.startswith(f"{above}."):
        yield path
        path = path.rpartition(".")[0]


ATTENTION = ("self_attn", "self_attention", "attention", "attn")
ATTENTION_END = ("o_proj", "out_proj", "dense", "c_proj", "wo")
MLP = ("mlp", "feed_forward", "ffn")
MLP_END = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
WIDTHS: dict[str, Size] = {"z": "Q", "neurons": "M"}  # sites with a row width other than D


class FoundTensor(msgspec.Struct, frozen=True):
    """A tensor at a module's input or output. `layers`: the layers that have it, if its path contains `{l}`.

    keys: the arguments whose sum is the tensor, or the tensor's index in the module's result
    factor: the tensor's factor when it is added to the stream
    """

    path: str
    moment: Moment
    keys: tuple[Key, ...] = (0,)
    layers: tuple[int, ...] | None = None
    factor: float = 1.0

    def tap(self) -> Tap:
        hidden, *residual = self.keys
        scale = "" if self.factor == 1 else self.factor
        return Tap(self.path, self.moment, hidden, residual[0] if residual else None, scale=scale)


class Places(msgspec.Struct, frozen=True):
    """The sites found in a model.

    architecture: the model's class
    spots: tensors by point kind
    lacks: the sites not found, with the reason
    unchecked: as in `Family`
    """

    architecture: str
    spots: dict[str, FoundTensor]
    lacks: dict[str, str]
    unchecked: str = ""


def places(architecture: str, record: Record, sizes: Sizes, tokens: int) -> Places:
    """Find the sites in the record of a run on `tokens` tokens. Raises `NotFound` if no stream was found."""
    flow = Flow(record, sizes.layers, sizes.d_model, tokens)
    spots = {
        "stream": FoundTensor(flow.layers + ".{l}", "in", flow.keys, tuple(range(flow.count))),
        "stream_end": FoundTensor(flow.end.path, "in", flow.end_keys),
    }
    lacks: dict[str, str] = {}
    finders: dict[str, Callable[[], FoundTensor | None]] = {  # a finder returns None if the tensor is the stream
        "final_norm": lambda: _final_norm(flow),
        "embed": lambda: _embed(flow),
        "attn_out": lambda: _added(flow, "attention"),
        "mlp_out": lambda: _added(flow, "mlp"),
        "mid": lambda: _mid(flow),
        "z": lambda: _end(flow, sizes[WIDTHS["z"]], ATTENTION, ATTENTION_END),
        "neurons": lambda: _end(flow, sizes[WIDTHS["neurons"]], MLP, MLP_END),
    }
    for name, find in finders.items():
        try:
            spot = find()
        except NotFound as why:
            lacks["resid_mid" if name == "mid" else name] = str(why)
        else:
            spots |= {} if spot is None else {name: spot}
    return Places(architecture, spots, lacks, UNCHECKED if _changes_embedding(flow, spots.get("embed")) else "")


def _final_norm(flow: Flow) -> FoundTensor:
    if not flow.end.returns(0, flow.width, flow.tokens):
        raise NotFound(f"{flow.end.path}, which takes the final stream, does not return rows of the stream's width")
    return FoundTensor(flow.end.path, "out")


def _embed(flow: Flow) -> FoundTensor | None:
    """Find the token embedding's result; None if it is the first layer's stream."""
    record = flow.record
    before = [call for call in record.calls if call.end <= flow.calls[0].begin]
    returning = [call for call in before if call.returns(0, flow.width, flow.tokens)]
    call = next((call for call in returning if record.ids in record.sources(call.result[0])), None)
    first = flow.carried(0)
    sources = set().union(*(record.sources(value) for value in first))
    if call is None or call.result[0] not in sources:
        raise NotFound("no module returns rows of the stream's width for the token ids")
    result = call.result[0]
    total = flow.total(first, frozenset([result]))
    if len(total) > 1 and result in total:
        return FoundTensor(call.path, "out", factor=total[result])
    if sum(record.values[value].op == "embedding" for value in sources) > 1:
        raise NotFound("its token embeddings are not simply added to its other embeddings")
    return None


def _changes_embedding(flow: Flow, embed: FoundTensor | None) -> bool:
    """True if `embed` (None: the first layer's stream) is not just a multiple of the token embedding."""
    record = flow.record
    values = flow.carried(0) if embed is None else [record.by_path[embed.path][0].result[0]]
    sources = set().union(*(record.sources(value) for value in values))
    of_tokens = {at for at in sources if record.values[at].op == "embedding" and record.ids in record.sources(at)}
    terms = set(flow.total(values, frozenset(of_tokens)))
    return not terms or not terms <= of_tokens


def _terms(flow: Flow, part: str) -> dict[int, list[tuple[int, float]]]:
    """Return the terms that a part of each layer adds to the stream, with their factors, by layer."""
    return {
        layer: [(term, factor) for term, factor in gains.items() if flow.part_of(layer, term) == part]
        for layer, gains in enumerate(flow.gains)
    }


def _added(flow: Flow, part: str) -> FoundTensor:
    """Find the result of a layer's part, as added to the stream."""
    if not flow.adds:
        raise NotFound("its layers do more than add to the stream")
    terms = {layer: found for layer, found in _terms(flow, part).items() if found}
    if not terms:
        raise NotFound("no layer adds an attention result" if part == "attention" else "its layers have no MLP")
    for layer, found in terms.items():
        if len(found) > 1:
            raise NotFound(f"layer {layer} adds {len(found)} separate {part} results to the stream")
    return _alike([_returning(flow, layer, *found[0]) for layer, found in terms.items()], tuple(terms))


def _returning(flow: Flow, layer: int, term: int, factor: float) -> FoundTensor:
    """Find the outermost module in a layer that returns a term before any op reads the term."""
    inside = f"{flow.layers}.{layer}."
    for call, item in flow.record.returned.get(term, ()):
        if call.path.startswith(inside) and flow.unread(term, call.end):
            return FoundTensor(flow.layers + ".{l}." + call.path[len(inside) :], "out", (item,), None, factor)
    value = flow.record.values[term]
    raise NotFound(f"no module returns the term added to the stream, which {value.op} computes in {value.path}")


def _mid(flow: Flow) -> FoundTensor:
    """Find the stream between attention and MLP."""
    if not flow.adds:
        raise NotFound("its layers do more than add to the stream")
    mlp = {layer: {term for term, _ in terms} for layer, terms in _terms(flow, "mlp").items()}
    layers = [layer for layer, gains in enumerate(flow.gains) if mlp[layer] and len(gains) > len(mlp[layer])]
    if not layers:
        raise NotFound("no layer has attention followed by an MLP")
    return _alike([_taking(flow, layer, mlp[layer]) for layer in layers], tuple(layers))


def _taking(flow: Flow, layer: int, mlp: set[int]) -> FoundTensor:
    """Find the first module of a layer that takes the layer's final stream minus the MLP's terms."""
    inside, call, before = f"{flow.layers}.{layer}.", flow.calls[layer], flow.carried(layer)
    wanted = dict.fromkeys(before, 1.0) | {term: by for term, by in flow.gains[layer].items() if term not in mlp}
    for inner, keys in flow.calls_with_sums(call.begin, call.end):
        total = flow.total([inner.given[key] for key in keys], frozenset(before))
        if inner.path.startswith(inside) and total == wanted:
            return FoundTensor(flow.layers + ".{l}." + inner.path[len(inside) :], "in", keys)
    others = flow.gains[layer].keys() - mlp
    if all(others.isdisjoint(flow.record.sources(term)) for term in mlp):
        raise NotFound(PARALLEL)
    raise NotFound("no module takes the stream between attention and MLP")


def _alike(spots: list[FoundTensor], layers: tuple[int, ...]) -> FoundTensor:
    """Merge the tensors of several layers into one with `{l}`. Raises `NotFound` if their modules differ."""
    if len(set(spots)) > 1:
        differing = ", ".join(sorted({spot.path for spot in spots}))
        raise NotFound(f"its module or factor differs between layers: {differing}")
    return msgspec.structs.replace(spots[0], layers=layers)


def _end(flow: Flow, width: int, names: tuple[str, ...], ends: tuple[str, ...]) -> FoundTensor:
    """Find the input of a block's output projection. `names`, `ends`: possible names of the block and the projection. A
    block may only wrap another block with such a name, as in EXAONE's `attn.attention`."""
    path = flow.layers + ".{l}"
    holding = [layer for layer in range(flow.count) if set(names) & set(flow.record.children(path.format(l=layer)))]
    layers = holding or list(range(flow.count))
    path = f"{path}.{_in_every(flow, path, layers, names)}"
    alone = {tuple(flow.record.children(path.format(l=layer))) for layer in layers}
    if len(alone) == 1 and len(only := alone.pop()) == 1 and only[0] in names:
        path = f"{path}.{only[0]}"
    path = f"{path}.{_in_every(flow, path, layers, ends)}"
    for layer in layers:
        _check_taken(flow, path.format(l=layer), width)
    return FoundTensor(path, "in", (0,), tuple(layers))


def _in_every(flow: Flow, path: str, layers: list[int], names: tuple[str, ...]) -> str:
    """Return the only name in `names` that is a child of the module in every layer. Raises `NotFound` without one."""
    children = {layer: flow.record.children(path.format(l=layer)) for layer in layers}
    shared = [name for name in names if all(name in of_layer for of_layer in children.values())]
    if len(shared) != 1:
        layer = next((layer for layer in layers if not {*names} & {*children[layer]}), layers[0])
        raise NotFound(f"expected one of {', '.join(names)} in {path}; layer {layer} has {', '.join(children[layer])}")
    return shared[0]


def _check_taken(flow: Flow, path: str, width: int) -> None:
    """Raise `NotFound` unless a module was called once, on rows [T, width] that are not the output of a norm."""
    calls, record = flow.record.by_path.get(path, []), flow.record
    taken = calls[0].given.get(0) if len(calls) == 1 else None
    if taken is None or not calls[0].takes(0, width, flow.tokens):
        shape = "no tensor" if taken is None else list(calls[0].shapes[0])
        raise NotFound(f"expected [{flow.tokens}, {width}] as the input of {path}, got {shape}")
    for call, _ in record.returned.get(taken, ()):
        if record.is_norm(call.path):
            raise NotFound(f"the input of {path} is normed by {call.path}")


# Ops whose result has the content of their first argument if both have as many elements
SAME = {"_reshape_alias", "_to_copy", "_unsafe_view", "alias", "clone", "contiguous", "detach", "expand", "lift_fresh",
        "permute", "reshape", "select", "slice", "squeeze", "transpose", "unsqueeze", "view"}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Dispatch mode that records ops and module calls. Tensors have the same value if they are copies, or share memory
    that is not written in between."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.record: Record = Record({path: kinds_of(module) for path, module in modules.items()})
        self._at: dict[tuple[int, int, int], int] = {}  # value by memory location
        self._alive: list[torch.Tensor] = []  # keeps memory locations unique
        self._under: list[ModuleCall] = []

    def value(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor's current value; add a new value if no recorded op made the tensor."""
        place = _place(tensor)
        if place not in self._at:
            self._make(tensor, "given", ())
        return self._at[place]

    def _make(self, tensor: torch.Tensor, op: str, of: tuple[int, ...], factor: float = 1.0) -> int:
        path = self._under[-1].path if self._under else ""
        number = self.record.add(Value(op, of, tuple(tensor.shape), path, factor))
        self._at[_place(tensor)] = number
        self._alive.append(tensor)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        of = tuple(self.value(tensor) for tensor in tensors)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:  # ops that only write to arguments may lack a meta version
            if func._schema.returns:
                raise
            result = None
        name = func._schema.name.rpartition("::")[2]
        made = _tensors(result)
        if "fused_add" in name and len(tensors) >= 2 and len(made) == 2:
            total = self._make(made[1], "add", of[:2])
            self._make(made[0], name, (total, *of[2:]))
        elif name in SAME and made and tensors and made[0].numel() == tensors[0].numel():
            self._alive.append(made[0])
            self._at[_place(made[0])] = of[0]
        else:
            op, of, factor = _arithmetic(name, args, kwargs, of, tensors)
            written = [tensor for tensor in _written(func, args, kwargs) if all(tensor is not other for other in made)]
            for tensor in (*made, *written):
                self._make(tensor, op, of, factor)
        return result

    # -- modules

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {key: value for key, value in (*enumerate(args), *kwargs.items()) if torch.is_tensor(value)}
        values = {key: self.value(tensor) for key, tensor in given.items()}
        call = ModuleCall(path, len(self.record.values), values, {key: tuple(t.shape) for key, t in given.items()})
        self.record.calls.append(call)
        self._under.append(call)

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._under.pop()
        items = output if isinstance(output, (tuple, list)) else (output,)
        tensors = {i: item for i, item in enumerate(items) if torch.is_tensor(item)}
        call.result = {i: self.value(item) for i, item in tensors.items()}
        call.result_shapes = {i: tuple(item.shape) for i, item in tensors.items()}
        call.end = len(self.record.values)

    def guessed(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a module's result. If the module fails on meta tensors, return a tensor like its first argument,
        recorded as computed from all arguments."""
        depth, calls = len(self._under), len(self.record.calls)
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            given = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()]
            if not given:
                raise
            del self._under[depth:], self.record.calls[calls:]
            self.record.guessed[path] = f"{type(error).__name__}: {error}"
            result = torch.empty_like(given[0])
            self._make(result, "guess", tuple(self.value(tensor) for tensor in given))
            return result


def record_of(net: nn.Module, sizes: Sizes, ids: torch.Tensor, run: Callable[[], Any]) -> Record:
    """Record a model's run on token ids. Modules in its layers may fail on meta tensors."""
    modules = dict(net.named_modules())
    recorder = Recorder(modules)
    lists = [path for path, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == sizes.layers]
    within = re.compile("|".join(rf"{re.escape(path)}\.\d+\..+" for path in lists) or "$^")
    inner = {path: module for path, module in modules.items() if within.fullmatch(path)}
    with ExitStack() as stack:
        for path, module in modules.items():
            enter, leave = functools.partial(recorder.enter, path), functools.partial(recorder.leave, path)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        for path, module in inner.items():
            module.forward = functools.partial(recorder.guessed, path, module.forward)
            stack.callback(delattr, module, "forward")
        recorder.record.ids = recorder.value(ids)
        with recorder:
            run()
    return recorder.record


def kinds_of(module: nn.Module) -> str:
    """Return the names of a module's class and base classes, in lower case."""
    return " ".join(kind.__name__ for kind in type(module).__mro__).lower()


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """Return the tensor arguments that an op writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def _arithmetic(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], of: tuple[int, ...], tensors: list[torch.Tensor]
) -> tuple[str, tuple[int, ...], float]:
    """Normalize an op: `add` sums two values, `scale` multiplies one by a factor; other ops keep their name."""
    name = name.rstrip("_")
    numbers = [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if name == "add" and len(tensors) == 2 and tensors[0].numel() == tensors[1].numel():
        return ("add" if kwargs.get("alpha", 1) == 1 else "weighted add"), of, 1.0
    if name == "mul" and len(tensors) == 1 and len(numbers) == 1:
        return "scale", of, float(numbers[0])
    if name == "div" and len(tensors) == 1 and len(numbers) == 1 and torch.is_tensor(args[0]):
        return "scale", of, 1 / float(numbers[0])
    return name, of, 1.0


T = 5
OTHERWISE = {  # modules with misleading names, by model type and site
    "diffllama": {"z": "its projection reads half as many heads, twice as wide: normed differences of two heads"},
}
SEVERAL_STREAMS = {  # models without a single residual stream, by model type
    "gemma3n_text": "its layers carry four streams (AltUp), none of them the residual stream",
}
UNKNOWN = "it was not found in the modules of this model, which has no site table"
LOGITS = PointKind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled")


def check_stream(config: Any) -> None:
    """Raise `ModelError` for a model known to have no single residual stream."""
    if why := SEVERAL_STREAMS.get(config.model_type):
        raise ModelError(f"{', '.join(architectures_of(config))} has no sites: {why}")


def untabled(config: Any, trust_remote_code: bool = False) -> Family:
    """Derive the table of a decoder-only model from its Transformers config.

    Raises `ModelError` if its layers are not found, or are not called with the stream.
    """
    check_stream(config)
    try:
        sizes, (found, prefix) = sizes_of(config), transformers_places(config, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        names = ", ".join(architectures_of(config))
        raise ModelError(
            f"no site table for {names}, and none can be derived: {type(error).__name__}: {error}"
        ) from error
    below = {  # on vLLM's Transformers backend, the base model is at `model`
        name: msgspec.structs.replace(spot, path=f"model{spot.path.removeprefix(prefix)}")
        for name, spot in found.spots.items()
    }
    backend = msgspec.structs.replace(found, spots=below)
    return family_of_places(f"{config.model_type} (no table)", config, found, backend, sizes)


def family_of_places(name: str, config: Any, transformers: Places | None, vllm: Places, sizes: Sizes) -> Family:
    """Make the table from the sites found in the vLLM class and the Transformers class. A site found only in the vLLM
    class uses the same module path on both engines, because vLLM usually keeps the checkpoint's names."""
    points = {"logits": LOGITS}
    for kind, spot in vllm.spots.items():
        theirs = spot if transformers is None else transformers.spots.get(kind, spot)
        points[kind] = PointKind(
            theirs.tap(), spot.tap(), WIDTHS.get(kind, "D"), "sharded" if kind in WIDTHS else "replicated",
            per_layer=spot.layers is not None,
            layers="all" if spot.layers is None or len(spot.layers) == sizes.layers else spot.layers,
        )  # fmt: skip
    lacks = {word: f"it has no site table, and {why}" for word, why in vllm.lacks.items()}
    lacks |= OTHERWISE.get(config.model_type, {})
    points = {kind: point for kind, point in points.items() if kind not in lacks}
    family = Family(name, (vllm.architecture,), points, lacks, tabled=False, unchecked=vllm.unchecked)
    unknown = {word: UNKNOWN for word in SITES if word not in family.sites and word not in lacks}
    return msgspec.structs.replace(family, lacks=lacks | unknown)


def no_text_model(architectures: Sequence[str]) -> ModelError:
    """Return the error for a multimodal config, whose text decoder is only one part of the model."""
    return ModelError(
        f"no site table for {list(architectures)}, and none can be derived for a multimodal model. Multimodal models "
        f"with a table: {', '.join(DECODERS)}; many families also have text-only checkpoints"
    )


def transformers_places(config: Any, trust_remote_code: bool) -> tuple[Places, str]:
    """Find the sites in a config's Transformers class. Returns the sites and the base model's path."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), torch.no_grad():
        net = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        ).eval()  # fmt: skip
        sizes, architecture = sizes_of(config), type(net).__name__
        record = _record(net, sizes)
    try:
        found = places(architecture, record, sizes, T)
    except NotFound as why:
        raise refuse(architecture, str(why)) from None
    return found, found.spots["stream"].path.partition(".")[0]


def refuse(architecture: str, why: str) -> ModelError:
    return ModelError(f"no site table for {architecture}, and none can be derived from its modules: {why}")


def _record(net: Any, sizes: Sizes) -> Record:
    """Record a model's run on meta tensors."""
    # with mask and positions given, most models read no tensor values; meta tensors have none
    masked = {"attention_mask": torch.zeros(1, 1, T, T), "position_ids": torch.zeros(1, T, dtype=torch.long)}
    failed: Exception | None = None
    for options, dtype in itertools.product((masked, {}), (torch.bfloat16, torch.float32)):
        net.to(dtype)
        try:
            ids = torch.zeros(1, T, dtype=torch.long)
            return record_of(net, sizes, ids, functools.partial(net, input_ids=ids, use_cache=False, **options))
        except Exception as error:
            failed = failed or error
    raise refuse(type(net).__name__, f"a run on meta tensors failed: {type(failed).__name__}: {failed}")
