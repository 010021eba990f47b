"""The names under which a trace has the model's tensors: as modules (`t.layers[5].mlp.output`), as sites
(`t.resid_mid[5]`), and as nnterp has them (`t.layers_output[5]`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from patchclamp.errors import ProgramError, TokensError, UnsupportedSite, unknown
from patchclamp.language.site import NNTERP, SITES, Site, elsewhere
from patchclamp.language.tokens import Positions, Range, Tokens, as_integer
from patchclamp.trace.arithmetic import Place
from patchclamp.trace.hints import OF_A_LAYER, OF_A_TRACE, hint
from patchclamp.trace.recording import Recording
from patchclamp.trace.spots import Spot, positive, written
from patchclamp.trace.views import View, assign

MODULES: dict[str, dict[str, str]] = {  # of a layer: what each module reads, returns and makes, by site
    "": {"input": "resid_pre", "mid": "resid_mid", "output": "resid_post"},
    "attn": {"input": "attn_in", "q": "q", "k": "k", "v": "v", "z": "z", "output": "attn_out"},
    "mlp": {"input": "mlp_in", "router": "router", "neurons": "neurons", "output": "mlp_out"},
}
SUBMODULES = {"attn": "attn", "self_attn": "attn", "attention": "attn", "mlp": "mlp"}
BATCHED = {name: site for name, site in NNTERP.items() if name not in SITES}  # nnterp's names, with its batch axis


class Group(Place):
    """Some tokens of one prompt, with a name: what `t.generated[3]` and `t.all()` return, and `t` itself."""

    def __init__(self, recording: Recording, tokens: Tokens, named: bool, single: bool = False) -> None:
        vars(self).update(_recording=recording, _tokens=tokens, _named=named, _single=single)

    @property
    def layers(self) -> Layers:
        """The layers: `t.layers[5].output`, `.input`, `.mid`, `.attn.output`, `.attn.z[3]`, `.mlp.neurons[10:20]`."""
        return Layers(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        site = name if name in SITES else BATCHED.get(name)
        if site is None:
            known = (each for each in dir(self) if not each.startswith("_"))
            raise elsewhere(name) or hint(name, OF_A_TRACE) or unknown("name in a trace", name, known)
        table = Table(self, site, batched=name not in SITES)
        return table if SITES[site].layered else table.whole

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SITES and name not in BATCHED:
            raise ProgramError(f"{name!r} cannot be set in a trace; sites can, as in t.layers[5].output[-1] = value")
        place = getattr(self, name)
        if isinstance(place, Table):
            place = place.whole
        assign(place, value)

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError(f"{self} are tokens of many tensors: choose of one, as in .layers[5].output[{written(key)}]")

    def __dir__(self) -> list[str]:
        return ["layers", *SITES, *BATCHED]

    def _view(self, site: Site, batched: bool = False) -> View:
        site = positive(site, self._recording.lm.model.layers)
        self._recording.lm.sites.resolve(site)  # what this model lacks is said at this line
        return View(self._recording, Spot.of(site, self._tokens, self._named, self._single, batched))

    def __repr__(self) -> str:
        return f"<{self._tokens} in a trace>"


class Steps(Place):
    """Groups of tokens by number: `t.generated[3]` is the fourth token that was sampled, when it is an input."""

    def __init__(self, recording: Recording, group: Positions) -> None:
        vars(self).update(_recording=recording, _group=group)

    def __getitem__(self, key: Any) -> Group:
        single = not isinstance(key, (slice, list, tuple, range))
        return Group(self._recording, self._group[key], True, single)

    def __len__(self) -> int:
        """How many there are, if the run goes on to the end."""
        self._recording.check_prompt()
        return len(self._group.select(self._recording.length, self._recording.limit))

    def __iter__(self) -> Iterator[Group]:
        if not len(self):
            raise TokensError(f"no token of {self._group} is an input of this run: raise max_tokens")
        return (self[step] for step in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        return getattr(Group(self._recording, self._group, True), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(Group(self._recording, self._group, True), name, value)

    def __repr__(self) -> str:
        return f"<{self._group} in a trace>"


def as_layers(key: Any) -> int | Range:
    """A layer or a range of them, from brackets. Raises `ProgramError` for all else: None is not every layer."""
    return Range.of(key) if isinstance(key, slice) else key if isinstance(key, Range) else as_integer(key)


class Layers(Place):
    """The layers of the model. A range names several, which are written together."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getitem__(self, layer: Any) -> Module:
        return Module(self._group, as_layers(layer), "")

    def __setitem__(self, layer: Any, value: Any) -> None:
        raise ProgramError(f"a layer is a module: write what it returns, t.layers[{layer}].output = value")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProgramError(f"name the layer: .layers[5].{name}, or .layers[:].{name} to write every layer")

    def __len__(self) -> int:
        return self._group._recording.lm.model.layers

    def __iter__(self) -> Iterator[Module]:
        return (self[layer] for layer in range(len(self)))


class Module(Place):
    """A layer, its attention or its MLP: names of `MODULES` are views of what it reads, makes and returns."""

    def __init__(self, group: Group, layer: Any, module: str) -> None:
        vars(self).update(_group=group, _layer=layer, _module=module)
        group._recording.lm.sites.resolve(Site("resid_post", layer))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._module and name in SUBMODULES:
            return Module(self._group, self._layer, SUBMODULES[name])
        return self._group._view(Site(self._site(name), self._layer))

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._module and name in SUBMODULES:
            raise ProgramError(f"{name} is a module: write what it returns, .{name}.output = value")
        assign(getattr(self, name), value)

    def _site(self, name: str) -> str:
        names = MODULES[self._module]
        if name in names:
            return names[name]
        if name in ("inputs", "outputs"):
            raise ProgramError(f".{name} is a tuple in other libraries: here .{name[:-1]} is the tensor itself")
        if name in ("source", "weights", "pattern", "attention_probabilities"):
            raise UnsupportedSite(
                "attention weights and lines inside a module do not exist in a fused kernel: use q, k, v and z"
            )
        what = f"tensor of {self._module or 'a layer'}"
        raise hint(name, OF_A_LAYER) or unknown(what, name, (*names, *(() if self._module else ("attn", "mlp"))))

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[Module]:
        return (Module(self._group, layer, self._module) for layer in self._layers())

    def _layers(self) -> list[int]:
        if not isinstance(self._layer, Range):
            raise ProgramError(f"{self} is one module, no list: its tensors are {', '.join(MODULES[self._module])}")
        return list(self._layer.indices(self._group._recording.lm.model.layers))

    def __dir__(self) -> list[str]:
        return [*MODULES[self._module], *(() if self._module else ("attn", "mlp"))]

    def __repr__(self) -> str:
        return f"<layer {self._layer}{self._module and '.'}{self._module}>"


class Table(Place):
    """A site of every layer: `t.resid_mid[5]`, `t.z[5, 3]`, `t.layers_output[5]`."""

    def __init__(self, group: Group, site: str, batched: bool) -> None:
        self._group, self._site, self._batched = group, site, batched

    @property
    def whole(self) -> View:
        return self._group._view(Site(self._site), self._batched)

    def __getitem__(self, key: Any) -> View:
        layer, *index = key if isinstance(key, tuple) else (key,)
        if None in index:
            raise ProgramError("expected a number or a range, got None")
        return self._group._view(Site(self._site)[as_layers(layer), *index], self._batched)

    def __setitem__(self, key: Any, value: Any) -> None:
        assign(self[key], value)

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[View]:
        return (self[layer] for layer in self._layers())

    def _layers(self) -> list[int]:
        """The layers that have one."""
        return [ref.layer for ref in self._group._recording.lm.sites.resolve(Site(self._site)) if ref.layer is not None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProgramError(f"{self._site} is one tensor a layer: name the layer, {self._site}[5].{name}")

    def __repr__(self) -> str:
        return f"<{self._site}, a layer in brackets>"
