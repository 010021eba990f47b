"""What attribution patching estimated, and what exact patches of its best cells gave.

R rows (a site of a layer, or a head of it) · P columns (aligned positions)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.language.site import SITES
from patchclamp.plots import GridPanel, TokenGrid, token_grid_html, token_grid_png, words
from patchclamp.studies.proposal import Proposal
from patchclamp.studies.sweep_result import Column

if TYPE_CHECKING:
    import pandas

BEST = 20  # verified cells in the picture's table


class Row(msgspec.Struct, frozen=True):
    """What is patched together at a position: a site of a layer, or one head of it."""

    site: str
    layer: int | None
    head: int | None = None

    def __str__(self) -> str:
        inner = "" if self.head is None else f", {self.head}"
        return self.site if self.layer is None else f"{self.site}[{self.layer}{inner}]"


class Estimate(msgspec.Struct, frozen=True):
    """A cell: the effect of patching it, as estimated, and as an exact patch gave it, if there was one."""

    row: Row
    column: Column
    estimate: float
    exact: float | None


class AttributionPatching(Proposal, frozen=True, eq=False, kw_only=True):
    """Arrays are [R, P]: a cell is a row at an aligned position."""

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]

    def proposals(self, count: int = 10) -> list[Estimate]:
        """The cells whose estimates are largest in size, largest first."""
        return [self._cell(number) for number in self.largest(count)]

    def best(self, count: int = 5) -> list[Estimate]:
        """The verified cells that moved the metric furthest from corrupt towards clean, best first."""
        return [self._cell(number) for number in self.foremost(count)]

    def _cell(self, number: int) -> Estimate:
        r, p = divmod(number, len(self.columns))
        exact = float(self.exact[r, p])
        return Estimate(self.rows[r], self.columns[p], float(self.estimates[r, p]), None if np.isnan(exact) else exact)

    def to_frame(self) -> pandas.DataFrame:
        """One row a cell: site, layer, head, token, positions, estimate and exact effect."""
        import pandas

        cells = (self._cell(number) for number in range(self.estimates.size))
        return pandas.DataFrame([
            {"site": cell.row.site, "layer": cell.row.layer, "head": cell.row.head, "token": cell.column.label,
             "clean_positions": cell.column.clean, "corrupt_positions": cell.column.corrupt,
             "estimate": cell.estimate, "exact": cell.exact}
            for cell in cells
        ])  # fmt: skip

    def grid(self) -> TokenGrid:
        """The picture's numbers and texts: a panel a site, verified cells outlined, and a table of these."""
        sites = list(dict.fromkeys(row.site for row in self.rows))
        table = (
            ("place", "token", "estimate", "exact patch"),
            *((str(cell.row), words.visible(cell.column.label), words.signed(cell.estimate),
               words.signed(cell.exact or 0.0)) for cell in self.best(BEST)),
        )  # fmt: skip
        return TokenGrid(
            title=f"Attribution patching: {self._quantity()}",
            explained=(f"Each cell estimates, from {self._way()}, how far the corrupt run's "
                       f"{words.number(self.corrupt)} would move if the cell had its value of the "
                       f"clean run ({words.number(self.clean)}). "
                       f"{self._verified()}"),
            provenance=self._made_on(), panels=tuple(map(self._panel, sites)), table=table if len(table) > 1 else (),
        )  # fmt: skip

    def _panel(self, site: str) -> GridPanel:
        """A site's cells; of heads those of all positions together, layers up and heads across."""
        numbers = [r for r, row in enumerate(self.rows) if row.site == site]
        if self.rows[numbers[0]].head is not None:
            return self._heads(site, numbers)
        outlined = np.argwhere(np.isfinite(self.exact[numbers]))
        exact = self.exact[numbers]
        return GridPanel(
            name=site, row_name="layer" if SITES[site].layered else "", column_name="token of the corrupt prompt",
            rows=tuple("" if self.rows[r].layer is None else str(self.rows[r].layer) for r in numbers),
            columns=tuple(words.visible(column.label) for column in self.columns), values=self.estimates[numbers],
            centre=0.0, outlined=tuple((int(r), int(p)) for r, p in outlined),
            notes=tuple(tuple("" if np.isnan(value) else f"exact patch: {words.signed(float(value))}" for value in row)
                        for row in exact),
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

    def plot(self, path: str | Path) -> Path:
        """Draws the estimates, verified cells outlined, into a PNG (or any format of matplotlib)."""
        return token_grid_png(self.grid(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the estimates, and the verified cells with both numbers."""
        return token_grid_html(self.grid(), path)

    def __repr__(self) -> str:
        cell = self.proposals(1)[0]
        verified = int(np.isfinite(self.exact).sum())
        return (f"<AttributionPatching {self.estimates.size} cells, largest {cell.estimate:+.3f} at {cell.row} @ "
                f"{cell.column.label!r}; r {self.pearson():.2f} of {verified} verified>")  # fmt: skip
