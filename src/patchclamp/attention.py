"""Attention patterns of a run, as its captures at `pattern` and `attn_scores` kept them.

T queries · H heads · K key positions, spans, or the largest keys of a head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from patchclamp.errors import MissingSource, PatchclampError, ProgramError, TokensError
from patchclamp.language.ops import Capture
from patchclamp.language.site import Site, parse_site
from patchclamp.language.tokens import every
from patchclamp.plan.bound import AttentionReader, BoundOp, Keep
from patchclamp.plots import AttentionMaps, save_page, save_picture, style

if TYPE_CHECKING:
    import torch

    from patchclamp.engines.base import Model
    from patchclamp.language import SiteOp, Tokens
    from patchclamp.sites import SiteMap, SiteRef

MAX_SHOWN = 1 << 21  # numbers of a picture whose captures were not chosen


class AttentionResult(NamedTuple):
    """The attention of queries in one layer.

    positions: of the queries, [T]
    keys: the position of each key, [K]; None for spans. With `top`, those of each head's largest numbers, [T, H, K], −1
        where a query sees fewer
    values: fp32, [T, H, K]; of one head, the axis H is missing here and in `keys`
    """

    site: str
    positions: list[int]
    keys: np.ndarray | None
    values: np.ndarray

    def __repr__(self) -> str:
        return f"<AttentionResult {self.site} {list(self.values.shape)}>"


class ReadRun(Protocol):
    """The part of a `Run` that its attention uses."""

    @property
    def model(self) -> Model: ...
    @property
    def site_map(self) -> SiteMap: ...
    @property
    def token_strings(self) -> list[str]: ...
    def private_rows(self, point: int, number: int, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]: ...
    def op_at(self, path: str) -> SiteOp: ...
    def select(self, tokens: Tokens | str) -> np.ndarray: ...


class AttentionRead(Mapping[str, AttentionResult]):
    """`run.attention`: results by site, such as "pattern[3]" or "pattern[3, 1]", or by the path of a one-layer capture,
    such as "capture[0]"; read on access."""

    def __init__(self, run: ReadRun, ops: list[tuple[int, BoundOp]]) -> None:
        """`ops`: its captures of attention, each with the number under which its rows are stored."""
        self._run = run
        # by site and layer, the heads and the op that captured them, later ones first
        self._ops: dict[tuple[str, int | None], list[tuple[int, AttentionReader, BoundOp]]] = {}
        self.paths: set[str] = {op.path for _, op in ops}
        for number, op in reversed(ops):
            assert isinstance(op.action, Keep)
            assert isinstance(op.action.reader, AttentionReader)
            for point in reversed(op.points):
                layer = run.site_map.points[point].layer
                self._ops.setdefault((op.action.reader.site, layer), []).append((number, op.action.reader, op))

    def __getitem__(self, name: Site | str) -> AttentionResult:
        path = name if isinstance(name, str) and name in self.paths else ""
        at = self._run.op_at(path).at if path else parse_site(name)
        if not isinstance(at.layers, int):
            raise ProgramError(f"expected one layer, such as {at.name}[0], got {at}")
        [found] = self.of_layers(at, path)
        return found._replace(values=found.values.copy())

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, (str, Site)):
            return False
        try:
            at = parse_site(name) if name not in self.paths else self._run.op_at(str(name)).at
            return isinstance(at.layers, int) and self._found(at, self._refs(at)[0], "") is not None
        except PatchclampError:  # it is no site of this model
            return False

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  it would call itself

    def __iter__(self) -> Iterator[str]:
        for site, layer in reversed(self._ops):
            for _, reader, _ in self._ops[site, layer]:
                heads = f"{reader.first}" if reader.heads == 1 else f"{reader.first}:{reader.first + reader.heads}"
                yield f"{site}[{layer}" + ("]" if reader.heads == self._run.site_map.sizes.heads else f", {heads}]")

    def __len__(self) -> int:
        return sum(map(len, self._ops.values()))

    def __repr__(self) -> str:
        return f"<attention: {', '.join(self) or 'none'}>"

    def picture(self, *names: Site | str) -> AttentionMaps:
        """Plot data of whole patterns, such as "pattern[3]": the mean of their heads, and each head. Without names, of
        those with the same queries, as many as a page holds.

        Raises: `ProgramError` if there are none: spans, the largest keys and scores have no picture.
        """
        tokens, queries, maps = self._run.token_strings, list[int](), dict[str, np.ndarray]()
        for name in names or self:
            first, end = self._heads(self._refs(parse_site(name))[0])
            if not names and (len(maps) + end - first) * len(tokens) ** 2 > MAX_SHOWN:
                break
            found = self[name]
            whole = found.keys is not None and found.keys.tolist() == list(range(found.values.shape[-1]))
            if not whole or not found.site.startswith("pattern") or (maps and found.positions != queries):
                continue
            queries, layer = found.positions, parse_site(found.site).layers
            values_THK = found.values.reshape(len(queries), end - first, -1)
            maps |= {f"pattern[{layer}], mean": values_THK.mean(1)} if end - first > 1 else {}
            maps |= {f"pattern[{layer}, {first + h}]": values_THK[:, h] for h in range(end - first)}
        if not queries:
            raise ProgramError(f"expected whole patterns, got {', '.join(map(str, names or self))}", "names")
        stacked, model = np.stack(list(maps.values())), self._run.model
        return AttentionMaps(
            title="Attention patterns", explained="Each row is a query, each column its attention to a key.",
            provenance=style.ran_on(model.name, f"{model.engine} {model.version}", model.dtype),
            tokens=tuple(tokens[: stacked.shape[-1]]), queries=tuple(queries), names=tuple(maps), maps=stacked,
        )  # fmt: skip

    def plot(self, path: str | Path | None, *names: Site | str) -> Any:
        """Draw the patterns into a file, PNG, SVG or PDF; without a path, return IPython's `Image`."""
        return save_picture(self.picture(*names), path)

    def to_html(self, path: str | Path | None, *names: Site | str) -> Any:
        """Write a page of the patterns and the text into a file; without a path, return IPython's `HTML`."""
        return save_page(self.picture(*names), path)

    def _repr_html_(self) -> str | None:
        """The text, where hovering over a token shows what it attends to; None without patterns, for plain text."""
        try:
            return self.picture().text()
        except ProgramError:
            return None

    def of_layers(self, at: Site, path: str = "") -> list[AttentionResult]:
        """The results of a site's layers, of the capture at a path or of the last ones; of all layers, of those that
        were captured. Their values may be views of the run's rows."""
        return [self._read(at, ref, path) for ref in self._refs(at)]

    def layers(self, at: Site, path: str = "") -> list[int]:
        """The layers of `of_layers`."""
        return [ref.layer for ref in self._refs(at) if ref.layer is not None and self._kept(at, ref, path)]

    def _refs(self, at: Site) -> list[SiteRef]:
        refs = self._run.site_map.resolve(at)
        return [ref for ref in refs if at.layers is not None or (at.name, ref.layer) in self._ops] or refs

    def _kept(self, at: Site, ref: SiteRef, path: str) -> list[tuple[int, AttentionReader, BoundOp]]:
        return [each for each in self._ops.get((at.name, ref.layer), []) if path in ("", each[2].path)]

    def _heads(self, ref: SiteRef) -> tuple[int, int]:
        """The heads of a site, half-open."""
        sizes = self._run.site_map.sizes
        return (
            (0, sizes.heads)
            if ref.columns is None
            else (ref.columns[0] // sizes.d_head, ref.columns[1] // sizes.d_head)
        )

    def _found(self, at: Site, ref: SiteRef, path: str) -> tuple[int, AttentionReader, BoundOp] | None:
        """The last capture that has all heads of a site, with the number of its rows; None without one."""
        first, end = self._heads(ref)
        kept = self._kept(at, ref, path)
        return next((each for each in kept if each[1].first <= first and end <= each[1].first + each[1].heads), None)

    def _read(self, at: Site, ref: SiteRef, path: str) -> AttentionResult:
        run, (first, end), found = self._run, self._heads(ref), self._found(at, ref, path)
        if found is None:
            raise MissingSource(f"{ref} was not captured; available: {', '.join(self) or 'none'}")
        number, reader, bound = found
        positions, rows = run.private_rows(ref.point, number, str(ref))
        values_THK = np.asarray(rows).reshape(len(rows), reader.heads, rows.shape[1] // reader.heads)
        values_THK = values_THK[:, first - reader.first : end - reader.first]
        op, keys = run.op_at(bound.path), None
        assert isinstance(op, Capture)
        if op.top is not None:
            values_THK, bits = values_THK[..., : op.top], values_THK[..., op.top :]
            keys = np.ascontiguousarray(bits).view(np.int32)
        elif op.spans is not None:
            chosen = [_range_of(run.select(span)) for span in op.spans]
            values_THK = np.stack([values_THK[..., span].sum(-1) for span in chosen], -1)
        else:
            keys = run.select(op.keys or every)
            if not len(keys):
                raise TokensError(f"{op.keys}: the selection is empty, so there are no keys", "keys")
            values_THK = values_THK[..., _range_of(keys)]
        if isinstance(at.index, int):
            values_THK = values_THK[:, 0]
            keys = keys[:, 0] if op.top is not None and keys is not None else keys
        return AttentionResult(str(ref), positions.tolist(), keys, values_THK)


def attention_rows(read: AttentionRead, at: Site, path: str) -> torch.Tensor | np.ndarray:
    """`run[site]` of an attention site: [T, H, K], or [L, T, H, K] for several layers."""
    several = read.of_layers(at, path)
    if any(each.keys is not None and each.keys.ndim > 1 for each in several):
        raise ProgramError(f"{at} was captured with top=: use run.attention[{str(several[0].site)!r}], with its keys")
    if any(each.positions != several[0].positions for each in several):
        raise ProgramError(f"{at}: its layers have different positions: read one layer at a time")
    try:
        import torch
    except ImportError:
        return (
            np.stack([each.values for each in several]) if not isinstance(at.layers, int) else several[0].values.copy()
        )
    rows = [torch.from_numpy(each.values) for each in several]  # torch copies with many threads
    return rows[0].clone(memory_format=torch.contiguous_format) if isinstance(at.layers, int) else torch.stack(rows)


def _range_of(index: np.ndarray) -> np.ndarray | slice:
    """Consecutive numbers as a slice, which avoids a copy; other numbers unchanged."""
    return slice(int(index[0]), int(index[-1]) + 1) if len(index) and (np.diff(index) == 1).all() else index
