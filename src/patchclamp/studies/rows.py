"""The rows of a sweep's grid: what of the model is patched together in a cell, a site of a layer or a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite
from patchclamp.language import Range, Site
from patchclamp.language.site import SITES, parse_edited_site
from patchclamp.language.tokens import Index, parse_index
from patchclamp.lm import LM


class Row(msgspec.Struct, frozen=True):
    """A site, its layer, and an index in its row where that is a part of it: `3`, or `0:64`.

    layers: those that are patched together, where they are more than `layer`: the window around it
    """

    site: str
    layer: int | None
    index: str = ""
    layers: tuple[int, ...] = ()

    @property
    def panel(self) -> str:
        """The rows of all layers together: `resid_pre`, `z[:, 3]`."""
        return f"{self.site}[:, {self.index}]" if self.index else self.site

    @property
    def sites(self) -> list[Site]:
        """What is patched, layer by layer."""
        index = parse_index(self.index) if self.index else None
        return [Site(self.site, layer, index) for layer in self.layers or (self.layer,)]

    def __str__(self) -> str:
        inner = str(self.layer) + (f", {self.index}" if self.index else "")
        return self.site if self.layer is None else f"{self.site}[{inner}]"


def rows_of(lm: LM, sites: Any, layers: Any = None, group: int | None = None, window: int = 1) -> list[Row]:
    """Every row of some sites, once: by site and index, then by layer.

    layers: which layers of sites that do not say so; all, a number, a list, or text such as "0:12"
    group: how many heads, neurons or experts of a site are one row; None: all that the site names
    window: how many layers around a row's are patched with it, as far as they are there

    Raises: `UnknownName`, `UnsupportedSite` and `ProgramError`, with the place in `sites`.
    """
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ProgramError(f"a window has at least one layer, not {window!r}", "window")
    if group is not None and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise ProgramError(f"a group has at least one head, neuron or expert, not {group!r}", "group")
    sites = [sites] if isinstance(sites, (str, Site)) else list(sites)
    chosen = which_layers(layers, lm.model.layers)
    rows: dict[Row, None] = {}
    for i, text in enumerate(sites):
        try:
            site = parse_edited_site(text)
            for part in _parts(lm, site, group):
                rows.update(dict.fromkeys(_layered(lm, part, chosen, window)))
        except PatchclampError as error:
            raise error.under(f"sites[{i}]") from None
    return list(rows)


def which_layers(layers: Any, count: int) -> set[int]:
    """The layers that are named, of `count`. Raises `UnsupportedSite` for those that are not there, and for none."""
    if isinstance(layers, str):
        layers = parse_index(layers)
    if layers is None:
        return set(range(count))
    indices: list[Index] = [Range.of(layers) if isinstance(layers, slice) else layers] if isinstance(
        layers, (int, Range, slice)) else list(layers)  # fmt: skip
    chosen = {n for index in indices for n in (index.indices(count) if isinstance(index, Range) else [index])}
    ends = {end for index in indices if isinstance(index, Range) for end in index.ends if end is not None}
    outside = [n for n in chosen if not -count <= n < count] or [end for end in ends if not -count <= end <= count]
    if outside or not chosen:
        raise UnsupportedSite(f"this model has layers 0 to {count - 1}, not {layers}", "layers")
    return {n % count for n in chosen}


def _parts(lm: LM, site: Site, group: int | None) -> Iterator[Site]:
    """The site, cut into groups of heads, neurons or experts."""
    if group is None:
        yield site
        return
    if not SITES[site.name].index:
        raise ProgramError(f"{site.name} has no heads, neurons or experts to group", "group")
    lm.sites.resolve(site)  # raises for an index that is not there
    parts = lm.sites.parts(site.name)
    assert parts is not None
    count = parts[0]
    index = site.index
    named = range(count) if index is None else index.indices(count) if isinstance(index, Range) else [index % count]
    for begin in range(0, len(named), group):
        some = named[begin : begin + group]
        yield Site(site.name, site.layers, some[0] if len(some) == 1 else Range(some[0], some[-1] + 1))


def _layered(lm: LM, site: Site, chosen: set[int], window: int) -> Iterator[Row]:
    everywhere = [ref.layer for ref in lm.sites.resolve(Site(site.name, None, site.index))]
    for ref in lm.sites.resolve(site):
        if ref.layer is None:
            yield Row(ref.name, None)
        elif site.layers is not None or ref.layer in chosen:
            around = tuple(layer for layer in everywhere if layer is not None and _near(layer, ref.layer, window))
            yield Row(ref.name, ref.layer, ref.index, around if window > 1 else ())


def _near(layer: int, middle: int, window: int) -> bool:
    """Whether a layer is in the window around another; of an even window the larger half lies below it."""
    return middle - window // 2 <= layer < middle + (window + 1) // 2


def panels_of(rows: Sequence[Row]) -> list[str]:
    """The panels that rows belong to, in order."""
    return list(dict.fromkeys(row.panel for row in rows))


def layers_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """The layers of rows, ascending; layer 0 alone where no row has one."""
    return tuple(sorted({row.layer for row in rows if row.layer is not None})) or (0,)
