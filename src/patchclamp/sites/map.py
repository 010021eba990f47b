"""The site map of one model: every point numbered, and every site word resolved to points."""

from __future__ import annotations

from typing import Literal

import msgspec

from patchclamp.errors import ModelError, UnsupportedSite
from patchclamp.sites.families import FAMILIES, Family, Tap
from patchclamp.spec.site import SITES, Index, Site


class Point(msgspec.Struct, frozen=True):
    """A numbered place: `width` numbers a row; its rows are the step's tokens, or only those that are sampled from."""

    number: int
    kind: str
    layer: int | None
    width: int
    rows: Literal["tokens", "sampled"]


class Place(msgspec.Struct, frozen=True):
    """A site word of one layer: `resid_post[3]`, and its point."""

    name: str
    layer: int | None
    point: int

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}[{self.layer}]"


class SiteMap:
    """Points and places of a model of `family` with `layers` layers, width `D` and vocabulary `V`."""

    def __init__(self, family: Family | str, layers: int, d_model: int, d_vocab: int) -> None:
        if isinstance(family, str):
            found = [f for f in FAMILIES if f.name == family]
            if not found:
                raise ModelError(f"no family {family!r}; there are {', '.join(f.name for f in FAMILIES)}")
            family = found[0]
        self.family, self.layers, self.d_model, self.d_vocab = family, layers, d_model, d_vocab
        self.withdrawn: dict[str, str] = {}
        self.points: list[Point] = []
        self._number: dict[tuple[str, int | None], int] = {}
        for kind, row in family.points.items():
            for layer in range(layers) if row.per_layer else (None,):
                self._number[kind, layer] = len(self.points)
                width = {"D": d_model, "V": d_vocab}[row.width]
                self.points.append(Point(len(self.points), kind, layer, width, row.rows))

    @property
    def names(self) -> list[str]:
        """The site words this model has, in the language's order."""
        return [name for name in SITES if name in self.family.sites and name not in self.withdrawn]

    def taps(self, engine: Literal["transformers", "vllm"]) -> list[tuple[Point, Tap]]:
        """Every point with its tap on an engine, module paths filled in."""
        return [(point, self._tap(point, engine)) for point in self.points]

    def _tap(self, point: Point, engine: str) -> Tap:
        tap: Tap = getattr(self.family.points[point.kind], engine)
        return msgspec.structs.replace(tap, module=tap.module.format(l=point.layer))

    def places(self) -> list[Place]:
        """Every place of the model, word by word."""
        return [place for name in self.names for place in self.resolve(Site(name))]

    def resolve(self, site: Site) -> list[Place]:
        """The places a site names, by layer. Raises `UnsupportedSite` for a word or layer this model does not have."""
        if site.name not in self.family.sites:
            raise UnsupportedSite(
                f"{site.name} is not available on {self.family.name} models; there are: {', '.join(self.names)}"
            )
        if site.name in self.withdrawn:
            raise UnsupportedSite(f"{site.name} was not proved on this model: {self.withdrawn[site.name]}")
        if site.index is not None:
            raise UnsupportedSite(f"{site}: heads, neurons and experts cannot be indexed on this model yet")
        if not SITES[site.name].layered:
            return [Place(site.name, None, self._point(site.name, 0))]
        return [Place(site.name, layer, self._point(site.name, layer)) for layer in self._layers(site)]

    def _layers(self, site: Site) -> list[int]:
        given: Index | None = site.layers
        if given is None:
            return list(range(self.layers))
        if isinstance(given, int):
            if not -self.layers <= given < self.layers:
                raise UnsupportedSite(f"{site}: this model has {self.layers} layers (0 to {self.layers - 1})")
            return [given % self.layers]
        chosen = list(given.indices(self.layers))
        beyond = [
            end for end in (given.start, given.stop) if end is not None and not -self.layers <= end <= self.layers
        ]
        if beyond or not chosen:
            raise UnsupportedSite(f"{site}: this model has {self.layers} layers (0 to {self.layers - 1})")
        return chosen

    def _point(self, name: str, layer: int) -> int:
        kind, shift = self.family.sites[name]
        row = self.family.points[kind]
        if not row.per_layer:
            return self._number[kind, None]
        if layer + shift == self.layers:
            return self._number[f"{kind}_end", None]
        return self._number[kind, layer + shift]

    def label(self, point: int) -> str:
        """A point's name for people: the first site word that reaches it."""
        return next(str(place) for place in self.places() if place.point == point)
