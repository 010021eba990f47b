"""Attribution patching: estimate every cell of a patch sweep from one gradient, and verify the largest exactly.

To first order, giving an activation a of the corrupt run its clean value changes the metric m by
(clean − corrupt) · ∂m/∂a. With `steps`, the gradient is averaged along the path from the corrupt prompt's embedding to
the clean one's. Averaging also finds cells whose gradient vanishes at the corrupt run.

Source: Nanda 2023, "Attribution patching: activation patching at industrial scale"; Syed et al. 2023
(arXiv:2310.10348); integrated gradients of inputs as in Hanna et al. 2024 (arXiv:2403.17806), equation 3; Sundararajan
et al. 2017 (arXiv:1703.01365). On the reliability of such estimates, Kramár et al. 2024 (arXiv:2403.00745).

R rows (a layer's site, or one of its heads) · P columns (aligned positions)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, UnsupportedSite
from patchclamp.language import From, Replace, Site, every
from patchclamp.language.site import SPECS, parse_edited_site
from patchclamp.language.structs import PublicStruct
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, style
from patchclamp.run import Run
from patchclamp.studies.between import Candidates, GradientStudy, Proposal
from patchclamp.studies.inputs import Column, Layers, Sites, layers_of

if TYPE_CHECKING:
    import pandas


class AttributedRow(msgspec.Struct, frozen=True):
    """A row of the grid: a layer's site, or one of its heads, patched at one position at a time."""

    site: str
    layer: int | None
    head: int | None = None

    def __str__(self) -> str:
        inner = "" if self.head is None else f", {self.head}"
        return self.site if self.layer is None else f"{self.site}[{self.layer}{inner}]"


class Estimate(PublicStruct, frozen=True):
    """A cell with its estimated effect, and the measured effect of its exact patch (None if it was not patched)."""

    row: AttributedRow
    column: Column
    estimate: float
    exact: float | None

    @property
    def ends(self) -> tuple[str, str]:
        """The cell's site and token, as text."""
        return str(self.row), self.column.label


class AttributionPatchingResult(Proposal[Estimate], frozen=True, eq=False, kw_only=True):
    """Results of attribution patching. Arrays are [R, P]: a cell is a row at an aligned position."""

    rows: tuple[AttributedRow, ...]
    columns: tuple[Column, ...]

    kind: ClassVar[str] = "Attribution patching"
    heads: ClassVar[tuple[str, str]] = ("place", "token")
    effect: ClassVar[str] = "the cell had its value of"

    def at(self, number: int) -> Estimate:
        r, p = divmod(number, len(self.columns))
        exact = float(self.exact[r, p])
        return Estimate(self.rows[r], self.columns[p], float(self.estimates[r, p]), None if np.isnan(exact) else exact)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per cell: site, layer, head, token, positions, estimate and exact effect."""
        import pandas

        cells = (self.at(number) for number in range(self.estimates.size))
        return pandas.DataFrame([
            {"site": cell.row.site, "layer": cell.row.layer, "head": cell.row.head, "token": cell.column.label,
             "clean_positions": cell.column.clean, "corrupt_positions": cell.column.corrupt,
             "estimate": cell.estimate, "exact": cell.exact}
            for cell in cells
        ])  # fmt: skip

    def panels(self) -> Iterator[GridPanel]:
        """Yield one panel per site."""
        return map(self._panel, dict.fromkeys(row.site for row in self.rows))

    def _panel(self, site: str) -> GridPanel:
        """Return a site's panel: layers × tokens or, for a site with heads, layers × heads summed over positions."""
        numbers = [r for r, row in enumerate(self.rows) if row.site == site]
        if self.rows[numbers[0]].head is not None:
            return self._heads(site, numbers)
        return GridPanel(
            name=site, row_name="layer" if SPECS[site].layered else "", column_name="token of the corrupt prompt",
            rows=tuple("" if self.rows[r].layer is None else str(self.rows[r].layer) for r in numbers),
            columns=tuple(style.visible(column.label) for column in self.columns), values=self.estimates[numbers],
            centre=0.0, **self.marks(self.exact[numbers]),
        )  # fmt: skip

    def _heads(self, site: str, numbers: list[int]) -> GridPanel:
        layers = sorted({self.rows[r].layer or 0 for r in numbers})
        heads = sorted({self.rows[r].head or 0 for r in numbers})
        values, outlined = np.full((len(layers), len(heads)), np.nan), []
        for r in numbers:
            at = layers.index(self.rows[r].layer or 0), heads.index(self.rows[r].head or 0)
            values[at] = self.estimates[r].sum()
            if np.isfinite(self.exact[r]).any():
                outlined.append(at)
        return GridPanel(
            name=f"{site}, all positions together", row_name="layer", column_name="head", values=values, centre=0.0,
            rows=tuple(map(str, layers)), columns=tuple(map(str, heads)), outlined=tuple(outlined),
        )  # fmt: skip

    def __repr__(self) -> str:
        cell = self.proposals(1)[0]
        verified = int(np.isfinite(self.exact).sum())
        return (f"<AttributionPatchingResult {self.estimates.size} cells, largest {cell.estimate:+.3f} at {cell.row} @ "
                f"{cell.column.label!r}; r {self.pearson():.2f} of {verified} verified>")  # fmt: skip


DEFAULT_SITES = ("resid_pre", "attn_out", "mlp_out")
HEADED = ("q", "k", "v", "z")  # sites whose heads are patched one by one


class _RowCandidates(Candidates):
    """Candidates whose cells are grid rows at aligned positions."""

    result = AttributionPatchingResult

    def __init__(self, lm: LM, study: AttributionPatching) -> None:
        super().__init__(lm, study)
        self._rows = _rows(lm, study.sites, study.layers)
        self._refs = [lm.sites.resolve(Site(row.site, row.layer, row.head))[0] for row in self._rows]
        self.fields = {"rows": tuple(self._rows), "columns": self.columns}
        self.read([ref.point for ref in self._refs])

    def estimates(self, steps: int) -> np.ndarray:
        slopes = dict[int, np.ndarray]()
        for run in self.along(steps):
            for point in {ref.point for ref in self._refs}:
                slopes[point] = slopes.get(point, 0.0) + run.gradients[point][self.corrupt_at] / max(steps, 1)
        estimates = np.zeros((len(self._refs), len(self.columns)))
        for r, ref in enumerate(self._refs):
            first, end = ref.columns or (0, slopes[ref.point].shape[1])
            estimates[r] = (self.difference(ref.point) * slopes[ref.point])[:, first:end].sum(-1)
        return estimates

    def sites(self, number: int) -> list[Site]:
        row = self._rows[number // len(self.columns)]
        return [Site(row.site, row.layer)]

    def edit(self, number: int, runs: list[Run]) -> Replace:
        r, p = divmod(number, len(self.columns))
        row, column = self._rows[r], self.columns[p]
        at = Site(row.site, row.layer, row.head)
        return Replace(From(runs[0], at, every[column.clean]), at=at, tokens=every[column.corrupt])


class AttributionPatching(GradientStudy):
    """Estimate every cell of a patch sweep from gradients (on Transformers), and verify the largest by exact patches.

    `run(lm, on=...)` patches on another `LM`, such as the serving engine.

    Raises: `EngineError` for an engine without gradients, `TokensError` for prompts that cannot be aligned,
    `UnsupportedSite` for sites without a gradient, and the error of any run.
    """

    command = "propose"
    candidates = _RowCandidates

    sites: Sites = DEFAULT_SITES
    """Site names; each head of q, k, v and z is a row of its own."""
    layers: Layers = None
    """Layers for sites given without an index: a number, a list, or a range such as "0:12"; all by default."""


def _rows(lm: LM, sites: Sequence[Any], layers: Any) -> list[AttributedRow]:
    rows: dict[AttributedRow, None] = {}
    for i, text in enumerate(sites):
        try:
            site = parse_edited_site(text)
            refs = lm.sites.resolve(site)
        except PatchclampError as error:
            raise error.under(f"sites[{i}]") from None
        if site.name in ("logits", "router"):
            raise UnsupportedSite(f"gradients are not available at {site.name}", f"sites[{i}]")
        kept = None if site.layers is not None or refs[0].layer is None else set(layers_of(lm, site.name, layers))
        parts = lm.sites.parts(site.name)
        heads = range(parts[0]) if parts and site.name in HEADED and site.index is None else [site.index]
        if site.index is not None and not isinstance(site.index, int):
            raise UnsupportedSite(f"{site}: expected one head index, or none for all heads", f"sites[{i}]")
        for ref in refs:
            if kept is None or ref.layer in kept:
                rows |= dict.fromkeys(AttributedRow(site.name, ref.layer, head) for head in heads)  # pyright: ignore
    return list(rows)


attribution_patching: Callable[..., AttributionPatchingResult] = AttributionPatching.short_form("attribution_patching")
