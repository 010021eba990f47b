"""Where the words of a decoder without a table lie, read from a record of one run; in plain data, for any process."""

from __future__ import annotations

import msgspec

from patchclamp.sites.dataflow import Flow, Key, NotFound, Record
from patchclamp.sites.families import PARALLEL, Moment, Size, Sizes

ATTENTION = ("self_attn", "self_attention", "attention", "attn")
ATTENTION_END = ("o_proj", "out_proj", "dense", "c_proj", "wo")
MLP = ("mlp", "feed_forward", "ffn")
MLP_END = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")
PARTS = {"attn_out": "attention", "mlp_out": "mlp"}
WIDTHS: dict[str, Size] = {"z": "Q", "neurons": "M"}  # of rows that are not as wide as the stream
ENDS = {"z": (ATTENTION, ATTENTION_END), "neurons": (MLP, MLP_END)}


class Spot(msgspec.Struct, frozen=True):
    """A tensor at a module's border, in each of some `layers` (`{l}` in the path), or once (None).

    keys: which arguments' sum it is, or which item of the result
    factor: the tensor times this is what is added to the stream
    """

    path: str
    moment: Moment
    keys: tuple[Key, ...] = (0,)
    layers: tuple[int, ...] | None = None
    factor: float = 1.0


class Places(msgspec.Struct, frozen=True):
    """What was found in a model.

    architecture: its class
    spots: by names of point kinds
    lacks: the site words that lie nowhere, and why
    """

    architecture: str
    spots: dict[str, Spot]
    lacks: dict[str, str]


def places(architecture: str, record: Record, sizes: Sizes, tokens: int) -> Places:
    """What a record of a run of `tokens` tells. Raises `NotFound` if there is no stream."""
    flow = Flow(record, sizes.layers, sizes.d_model, tokens)
    spots = {
        "stream": Spot(flow.layers + ".{l}", "in", flow.keys, tuple(range(flow.count))),
        "stream_end": Spot(flow.end.path, "in", flow.end_keys),
    }
    lacks: dict[str, str] = {}
    for name in ("final_norm", "embed", *PARTS, "mid", *ENDS):
        try:
            spot = _spot(flow, name, sizes)
        except NotFound as why:
            lacks["resid_mid" if name == "mid" else name] = str(why)
        else:
            spots |= {} if spot is None else {name: spot}
    return Places(architecture, spots, lacks)


def _spot(flow: Flow, name: str, sizes: Sizes) -> Spot | None:
    """Where one kind of point lies; None if it is the stream."""
    if name in PARTS:
        return _added(flow, PARTS[name])
    if name in ENDS:
        return _end(flow, sizes[WIDTHS[name]], *ENDS[name])
    return {"final_norm": _final_norm, "embed": _embed, "mid": _mid}[name](flow)


def _final_norm(flow: Flow) -> Spot:
    if not flow.end.returns(0, flow.width, flow.tokens):
        raise NotFound(f"{flow.end.path}, which takes the stream after the last layer, does not return rows as wide")
    return Spot(flow.end.path, "out")


def _embed(flow: Flow) -> Spot | None:
    """The result of the token embedding; None where the first layer's stream is made of that alone."""
    record = flow.record
    results = [
        (call, call.result[0])
        for call in record.calls
        if call.end <= flow.calls[0].begin and call.returns(0, flow.width, flow.tokens)
    ]
    call, result = next(((c, r) for c, r in results if record.ids in record.sources(r)), (None, -1))
    first = flow.carried(0)
    sources = set().union(*(record.sources(value) for value in first))
    if call is None or result not in sources:
        raise NotFound("no module that returns rows as wide as the stream takes the token ids")
    total = flow.total(first, frozenset([result]))
    if len(total) > 1 and result in total:
        return Spot(call.path, "out", factor=total[result])
    if sum(record.values[value].op == "embedding" for value in sources) > 1:
        raise NotFound("its embeddings of tokens and of something else are not simply added")
    return None


def _terms(flow: Flow, part: str) -> dict[int, list[tuple[int, float]]]:
    """By layer, the terms that a part of it adds to the stream, each with its factor."""
    return {
        layer: [(term, factor) for term, factor in gains.items() if flow.part_of(layer, term) == part]
        for layer, gains in enumerate(flow.gains)
    }


def _added(flow: Flow, part: str) -> Spot:
    """What attention, or the MLP, adds to the stream."""
    if not flow.adds:
        raise NotFound("its layers do more to the stream than to add to it")
    terms = {layer: found for layer, found in _terms(flow, part).items() if found}
    if not terms:
        raise NotFound("no layer of it adds what attention makes" if part == "attention" else "its layers have no MLP")
    for layer, found in terms.items():
        if len(found) > 1:
            raise NotFound(f"layer {layer} adds {len(found)} results of {part} to the stream, and none is their sum")
    return _alike([_returning(flow, layer, *found[0]) for layer, found in terms.items()], tuple(terms))


def _returning(flow: Flow, layer: int, term: int, factor: float) -> Spot:
    """The outermost module of a layer that returns a term before anything reads it."""
    inside = f"{flow.layers}.{layer}."
    for call, item in flow.record.returned.get(term, ()):
        if call.path.startswith(inside) and flow.unread(term, call.end):
            return Spot(flow.layers + ".{l}." + call.path[len(inside) :], "out", (item,), None, factor)
    value = flow.record.values[term]
    raise NotFound(f"what is added to the stream is no module's result: {value.op} in {value.path} makes it")


def _mid(flow: Flow) -> Spot:
    """The stream between what a layer adds first, attention, and its MLP."""
    if not flow.adds:
        raise NotFound("its layers do more to the stream than to add to it")
    mlp = {layer: {term for term, _ in terms} for layer, terms in _terms(flow, "mlp").items()}
    layers = [layer for layer, gains in enumerate(flow.gains) if mlp[layer] and len(gains) > len(mlp[layer])]
    if not layers:
        raise NotFound("no layer of it has attention and then an MLP")
    return _alike([_taking(flow, layer, mlp[layer]) for layer in layers], tuple(layers))


def _taking(flow: Flow, layer: int, mlp: set[int]) -> Spot:
    """The first module of a layer that takes the stream without what the MLP adds."""
    inside, call, before = f"{flow.layers}.{layer}.", flow.calls[layer], flow.carried(layer)
    wanted = dict.fromkeys(before, 1.0) | {term: by for term, by in flow.gains[layer].items() if term not in mlp}
    for inner, keys in flow.calls_with_sums(call.begin, call.end):
        total = flow.total([inner.given[key] for key in keys], frozenset(before))
        if inner.path.startswith(inside) and total == wanted:
            return Spot(flow.layers + ".{l}." + inner.path[len(inside) :], "in", keys)
    others = flow.gains[layer].keys() - mlp
    if all(others.isdisjoint(flow.record.sources(term)) for term in mlp):
        raise NotFound(PARALLEL)
    raise NotFound("no module takes the stream between attention and MLP")


def _alike(spots: list[Spot], layers: tuple[int, ...]) -> Spot:
    """One spot for several layers."""
    if len(set(spots)) > 1:
        differing = ", ".join(sorted({spot.path for spot in spots}))
        raise NotFound(f"layers differ in where it is, or by which factor it is added: {differing}")
    return msgspec.structs.replace(spots[0], layers=layers)


def _end(flow: Flow, width: int, names: tuple[str, ...], ends: tuple[str, ...]) -> Spot:
    """The input of the last projection of a layer's module that has one of these `names`. That module may have nothing
    but another one with such a name, as EXAONE's `attn.attention`."""
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
    return Spot(path, "in", (0,), tuple(layers))


def _in_every(flow: Flow, path: str, layers: list[int], names: tuple[str, ...]) -> str:
    """The one of some names that a module has in every layer."""
    children = {layer: flow.record.children(path.format(l=layer)) for layer in layers}
    shared = [name for name in names if all(name in of_layer for of_layer in children.values())]
    if len(shared) != 1:
        layer = next((layer for layer in layers if not {*names} & {*children[layer]}), layers[0])
        raise NotFound(f"of {', '.join(names)} not one is in every {path} ({layer}: {', '.join(children[layer])})")
    return shared[0]


def _check_taken(flow: Flow, path: str, width: int) -> None:
    """Raises `NotFound` unless a module was called once, with rows [T, width] that no norm made."""
    calls, record = flow.record.by_path.get(path, []), flow.record
    taken = calls[0].given.get(0) if len(calls) == 1 else None
    if taken is None or not calls[0].takes(0, width, flow.tokens):
        shape = "no tensor" if taken is None else list(calls[0].shapes[0])
        raise NotFound(f"{path} has {shape} where [{flow.tokens}, {width}] would be right")
    for call, _ in record.returned.get(taken, ()):
        if record.is_norm(call.path):
            raise NotFound(f"what {path} takes was normed by {call.path}")
