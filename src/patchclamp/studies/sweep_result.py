"""What a patch sweep found: a grid of metric values and all that is needed to read it.

S sites · L layers · P columns (positions or spans)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.language.registry import SITES

if TYPE_CHECKING:
    import pandas

    from patchclamp.plots import Heatmap


class Column(msgspec.Struct, frozen=True):
    """Aligned positions patched together: those of the clean prompt are written at those of the corrupt one."""

    label: str
    clean: tuple[int, ...]
    corrupt: tuple[int, ...]


class Cell(msgspec.Struct, frozen=True):
    """One patched run: where, the corrupt prompt's token there, and the metric."""

    site: str
    layer: int | None
    column: Column
    value: float


class PatchSweep(msgspec.Struct, frozen=True, eq=False):
    """`grid` [S, L, P] holds the metric of the corrupt run with one cell patched from the clean run.

    `clean` and `corrupt` are the metric of the unpatched runs; `noise_floor` is the largest difference among reruns of
    the corrupt baseline spread through the same batch: smaller effects mean nothing. `alignment` pairs clean and
    corrupt positions; `skipped` lists (prompt, position, token) that have no partner. An unlayered site has its value
    in the first layer's row and NaN in the others.
    """

    model: str
    engine: str
    dtype: str
    metric: str
    clean_prompt: str
    corrupt_prompt: str
    clean_tokens: tuple[str, ...]
    corrupt_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    columns: tuple[Column, ...]
    grid: np.ndarray
    clean: float
    corrupt: float
    noise_floor: float
    alignment: tuple[tuple[int, int], ...]
    skipped: tuple[tuple[str, int, str], ...]

    def cells(self) -> list[Cell]:
        """Every cell that was run, in grid order."""
        return [
            Cell(site, layer if SITES[site].layered else None, column, float(value))
            for s, site in enumerate(self.sites)
            for l, layer in enumerate(self.layers)  # noqa: E741
            for p, column in enumerate(self.columns)
            if not np.isnan(value := self.grid[s, l, p])
        ]

    def best(self, count: int = 5) -> list[Cell]:
        """The cells that moved the metric furthest from the corrupt baseline towards the clean one, best first."""
        towards = 1.0 if self.clean >= self.corrupt else -1.0
        return sorted(self.cells(), key=lambda cell: -towards * cell.value)[:count]

    def to_frame(self) -> pandas.DataFrame:
        """One row a cell: site, layer, column, clean and corrupt positions, value, and effect over the baseline."""
        import pandas

        rows = [
            {
                "site": cell.site, "layer": cell.layer, "column": cell.column.label,
                "clean_positions": cell.column.clean, "corrupt_positions": cell.column.corrupt,
                "value": cell.value, "effect": cell.value - self.corrupt,
            }
            for cell in self.cells()
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    def heatmap(self) -> Heatmap:
        """The grid with the texts of its picture."""
        from patchclamp.studies.sweep_heatmap import heatmap

        return heatmap(self)

    def plot(self, path: str | Path) -> Path:
        """Draws the grid as a heatmap, tokens across and layers up, into a PNG (or any format of matplotlib)."""
        from patchclamp.plots import heatmap_png

        return heatmap_png(self.heatmap(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the heatmap with hover, both prompts, the metric and its baselines."""
        from patchclamp.plots import heatmap_html

        return heatmap_html(self.heatmap(), path)

    def __repr__(self) -> str:
        best = self.best(1)
        where = f", best {best[0].value:.3f} at {place(best[0])}" if best else ""
        return f"<PatchSweep {self.metric}: corrupt {self.corrupt:.3f}, clean {self.clean:.3f}{where}>"


def place(cell: Cell) -> str:
    """`resid_pre[8] @ ' Tower'`"""
    site = cell.site if cell.layer is None else f"{cell.site}[{cell.layer}]"
    return f"{site} @ {cell.column.label!r}"
