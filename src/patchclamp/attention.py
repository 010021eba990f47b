"""A run's attention patterns, from its captures at `pattern` and `attn_scores`.

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

MAX_SHOWN = 1 << 21  # values in a picture for which the caller named no captures


class AttentionResult(NamedTuple):
    """Attention values in one layer or in several.

    positions: the position of each query, [T]
    keys: the position of each key, [K]; None for spans. With `top`: the key positions of each head's largest values,
        [T, H, K], padded with −1 where a query sees fewer keys
    values: fp32, [T, H, K]. A single head drops H, and several layers add a leading L; so do `keys` with `top`
    """

    site: str
    positions: list[int]
    keys: np.ndarray | None
    values: np.ndarray

    def __repr__(self) -> str:
        return f"<AttentionResult {self.site} {list(self.values.shape)}>"


class ReadRun(Protocol):
    """The interface of `Run` that `AttentionRead` uses."""

    @property
    def model(self) -> Model: ...
    @property
    def site_map(self) -> SiteMap: ...
    @property
    def token_strings(self) -> list[str]: ...
    def private_rows(self, point: int, number: int, name: str) -> tuple[np.ndarray, torch.Tensor | np.ndarray]: ...
    def op_at(self, path: str) -> SiteOp: ...
    def of_attention(self, site: Site | str) -> tuple[Site, str] | None: ...
    def reached(self, tokens: Tokens) -> np.ndarray: ...


class AttentionRead(Mapping[str, AttentionResult]):
    """`run.attention`: results by site, such as "pattern[3]" or "pattern[3, 1]", or by the path of a capture, such as
    "capture[0]". Results are read on access. A site returns its last capture; earlier captures are listed by path."""

    def __init__(self, run: ReadRun, ops: list[tuple[int, BoundOp]]) -> None:
        """`ops`: the run's attention captures, each with the op number of its stored rows."""
        self._run = run
        # by site and layer, (stored row index, reader, op) of each capture, the last first
        self._ops: dict[tuple[str, int | None], list[tuple[int, AttentionReader, BoundOp]]] = {}
        for number, op in reversed(ops):
            assert isinstance(op.action, Keep)
            assert isinstance(op.action.reader, AttentionReader)
            for point in reversed(op.points):
                layer = run.site_map.points[point].layer
                self._ops.setdefault((op.action.reader.site, layer), []).append((number, op.action.reader, op))

    def __getitem__(self, name: Site | str) -> AttentionResult:
        at, path = self._run.of_attention(name) or (parse_site(name), "")
        found, *_ = several = self.of_layers(at, path)
        if isinstance(at.layers, int):
            return found._replace(values=found.values.copy())
        largest = [each.keys for each in several if each.keys is not None and each.keys.ndim > 1]  # captures with `top`
        keys = np.stack(largest) if largest else found.keys
        return AttentionResult(str(at), found.positions, keys, np.stack([each.values for each in several]))

    def __contains__(self, name: object) -> bool:
        try:
            at, path = self._run.of_attention(name) or (parse_site(name), "")  # pyright: ignore[reportArgumentType]
            return all(self._found(at, ref, path) is not None for ref in self._refs(at))
        except PatchclampError:  # not a site of this model
            return False

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  it would call itself

    def __iter__(self) -> Iterator[str]:
        names = dict[str, None]()
        for (site, layer), kept in reversed(self._ops.items()):
            for i, (_, reader, op) in enumerate(kept):
                first, end = reader.first, reader.first + reader.heads
                heads = "" if reader.heads == self._run.site_map.sizes.heads else f", {first}:{end}"
                heads = f", {first}" if heads and reader.heads == 1 else heads
                is_hidden = any(each.first <= first and end <= each.first + each.heads for _, each, _ in kept[:i])
                names[op.path if is_hidden else f"{site}[{layer}{heads}]"] = None
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<attention: {', '.join(self) or 'none'}>"

    def picture(self, *names: Site | str) -> AttentionMaps:
        """Return plot data of whole patterns, such as "pattern[3]": a map per head, and their mean. Without names, plot
        the captured patterns that share the first one's queries, up to `MAX_SHOWN` values.

        Raises `ProgramError` if no whole pattern was captured: spans, the largest keys and scores have no plot.
        """
        tokens, queries, maps = self._run.token_strings, list[int](), dict[str, np.ndarray]()
        for name in names or self:
            at, path = self._run.of_attention(name) or (parse_site(name), "")
            first, end = self._heads((refs := self._refs(at))[0])
            if not names and (len(maps) + (end - first) * len(refs)) * len(tokens) ** 2 > MAX_SHOWN:
                break
            for found in self.of_layers(at, path):
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
        """Draw the patterns into a PNG, SVG or PDF file. Without a path, return IPython's `Image`."""
        return save_picture(self.picture(*names), path)

    def to_html(self, path: str | Path | None, *names: Site | str) -> Any:
        """Write a page with the patterns and the text to a file. Without a path, return IPython's `HTML`."""
        return save_page(self.picture(*names), path)

    def _repr_html_(self) -> str | None:
        """Return the text as HTML, with a token's attention on hover; None (plain text) without patterns."""
        try:
            return self.picture().text()
        except ProgramError:
            return None

    def of_layers(self, at: Site, path: str = "") -> list[AttentionResult]:
        """Return a site's result in each layer (by default, each captured layer), from the capture at `path` or the
        layer's last capture. Values may be views of stored rows. Raises `ProgramError` if queries or keys differ."""
        several = [self._read(at, ref, path) for ref in self._refs(at)]
        keys = [each.keys is not None and (each.keys.ndim > 1 or each.keys.tobytes()) for each in several]
        if len({(*each.positions, each.values.shape, of) for each, of in zip(several, keys, strict=True)}) > 1:
            raise ProgramError(f"{at}: queries or keys differ between layers: read one layer at a time")
        return several

    def layers(self, at: Site, path: str = "") -> list[int]:
        """Return the layers whose results `of_layers` returns."""
        return [ref.layer for ref in self._refs(at) if ref.layer is not None and self._kept(at, ref, path)]

    def _refs(self, at: Site) -> list[SiteRef]:
        refs = self._run.site_map.resolve(at)
        return [ref for ref in refs if at.layers is not None or (at.name, ref.layer) in self._ops] or refs

    def _kept(self, at: Site, ref: SiteRef, path: str) -> list[tuple[int, AttentionReader, BoundOp]]:
        return [each for each in self._ops.get((at.name, ref.layer), []) if path in ("", each[2].path)]

    def _heads(self, ref: SiteRef) -> tuple[int, int]:
        """Return the half-open range of heads that a site covers."""
        sizes = self._run.site_map.sizes
        first, end = ref.columns or (0, sizes.heads * sizes.d_head)
        return first // sizes.d_head, end // sizes.d_head

    def _found(self, at: Site, ref: SiteRef, path: str) -> tuple[int, AttentionReader, BoundOp] | None:
        """Return (op number, reader, op) of the last capture that covers all heads of a site, or None."""
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
            chosen = [_range_of(run.reached(span)) for span in op.spans]
            values_THK = np.stack([values_THK[..., span].sum(-1) for span in chosen], -1)
        else:
            keys = run.reached(op.keys or every)
            if not len(keys):
                raise TokensError(f"{op.keys}: the selection is empty, so there are no keys", "keys")
            values_THK = values_THK[..., _range_of(keys)]
        if isinstance(at.index, int):
            values_THK, keys = values_THK[:, 0], keys[:, 0] if op.top is not None and keys is not None else keys
        return AttentionResult(str(ref), positions.tolist(), keys, values_THK)


def attention_rows(read: AttentionRead, at: Site, path: str) -> torch.Tensor | np.ndarray:
    """Return `run[site]` for an attention site: [T, H, K], or [L, T, H, K] for several layers."""
    several = read.of_layers(at, path)
    if (keys := several[0].keys) is not None and keys.ndim > 1:
        raise ProgramError(f"{at} was captured with top=: use run.attention[{path or str(at)!r}], with its keys")
    try:
        import torch
    except ImportError:
        return read[path or at].values
    rows = [torch.from_numpy(each.values) for each in several]  # torch copies with many threads
    return rows[0].clone(memory_format=torch.contiguous_format) if isinstance(at.layers, int) else torch.stack(rows)


def _range_of(index: np.ndarray) -> np.ndarray | slice:
    """Convert consecutive indices to a slice, which avoids a copy; return other indices unchanged."""
    return slice(int(index[0]), int(index[-1]) + 1) if len(index) and (np.diff(index) == 1).all() else index
