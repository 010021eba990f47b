"""What sweeps found: a grid of metric values, its spread over prompt pairs, and all that is needed to read it.

R rows (of the model) · P columns (positions, spans, or receivers) · N pairs of prompts · S panels · L layers
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from patchclamp.studies.columns import Column
from patchclamp.studies.result import StudyResult
from patchclamp.studies.rows import Row, layers_of, panels_of

if TYPE_CHECKING:
    import pandas

    from patchclamp.plots import Heatmap

Side = Literal["clean", "corrupt"]


class Cell(msgspec.Struct, frozen=True):
    """One patched run: where, the corrupt prompt's tokens there, and the metric; of several pairs, its mean."""

    site: str
    layer: int | None
    column: Column
    value: float
    index: str = ""

    @property
    def panel(self) -> str:
        """`resid_pre`, or `z[:, 3]`."""
        return Row(self.site, self.layer, self.index).panel

    @property
    def where(self) -> str:
        """`resid_pre[8]`, or `z[8, 3]`."""
        return str(Row(self.site, self.layer, self.index))


class Pair(msgspec.Struct, frozen=True):
    """Two prompts, what is graded, and the metric of both unpatched.

    answer_ids, foil_ids: the tokens that were graded
    alignment: which clean position is which corrupt one; skipped: (side, position, token) without a partner; columns:
    the grid's columns in these prompts. Of a study of one prompt the corrupt side is empty.
    """

    clean_prompt: str
    corrupt_prompt: str
    clean_tokens: tuple[str, ...]
    corrupt_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    clean: float
    corrupt: float | None
    columns: tuple[Column, ...]
    alignment: tuple[tuple[int, int], ...] = ()
    skipped: tuple[tuple[Side, int, str], ...] = ()
    answer_ids: tuple[int, ...] = ()
    foil_ids: tuple[int, ...] | None = None


class Block(msgspec.Struct, frozen=True):
    """Several cells patched at once, on the way from coarse to fine: rows and columns of the grid by number."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    value: float


class Sweep(StudyResult, frozen=True, eq=False, kw_only=True):
    """The base of sweeps. `values` [R, P] is the metric of the runs with one cell patched, NaN where nothing was run.

    pairs: the prompts; rows, columns: of the grid, columns with the first pair's positions
    each: [N, R, P], the metric in every pair (and for every seed); `values` is its mean
    clean, corrupt: the metric of the unpatched runs, means over the pairs
    noise_floor: the largest difference among reruns of the unpatched prompts spread through the same batches: smaller
        effects mean nothing
    effect: [R, P], `values` minus the unpatched run's metric; None before the sweep has finished
    low, high: [R, P], the ends of the 95 % confidence interval of `values`: percentile bootstrap over pairs; None of
        one pair
    effect_low, effect_high: the same of `effect`, from differences within each pair: exclude 0 for a clear effect
    p, p_family: [R, P], p-values of the effect by flipping the signs of pairs, of a cell alone and as one of all cells
    blocks: what was patched at once before the grid's cells, if the sweep zoomed in
    source: what was written into the cells, in words, and how it was mixed in; empty in results of older versions
    question: all that decides the values, as JSON; `asked` reads it
    computed: how much of the runs was computed, in words, on an engine that leaves out what programs cannot change
    """

    metric: str
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    values: np.ndarray
    each: np.ndarray
    clean: float
    corrupt: float | None
    noise_floor: float
    direction: Literal["denoising", "noising"] = "denoising"
    effect: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    effect_low: np.ndarray | None = None
    effect_high: np.ndarray | None = None
    p: np.ndarray | None = None
    p_family: np.ndarray | None = None
    blocks: tuple[Block, ...] = ()
    source: str = ""
    question: str = ""
    computed: str = ""

    kind: ClassVar[str] = "sweep"

    @property
    def asked(self) -> dict[str, Any]:
        """All that decides the values: the prompts' token ids, what is graded, columns, rows, and what else the study
        has, as source, alpha, mask and zoom. Of the bank's entries it has the content. Empty in results of older
        versions."""
        return msgspec.json.decode(self.question) if self.question else {}

    @property
    def patched(self) -> Side:
        """The side whose prompt is run with patches, and is the baseline of every cell."""
        return "corrupt" if self.direction == "denoising" else "clean"

    @property
    def baseline(self) -> float:
        """The metric without a patch."""
        value = getattr(self, self.patched)
        assert value is not None
        return value

    @property
    def goal(self) -> float | None:
        """The metric of the other prompt, towards which patches move it; None where there is none."""
        return self.clean if self.patched == "corrupt" else self.corrupt

    # -- of the first pair, and of the machine

    @property
    def model(self) -> str:
        return self.provenance.model

    @property
    def engine(self) -> str:
        return self.provenance.engine

    @property
    def dtype(self) -> str:
        return self.provenance.dtype

    @property
    def clean_tokens(self) -> tuple[str, ...]:
        return self.pairs[0].clean_tokens

    @property
    def corrupt_tokens(self) -> tuple[str, ...]:
        return self.pairs[0].corrupt_tokens

    @property
    def answer(self) -> str:
        return self.pairs[0].answer

    @property
    def foil(self) -> str | None:
        return self.pairs[0].foil

    @property
    def alignment(self) -> tuple[tuple[int, int], ...]:
        return self.pairs[0].alignment

    @property
    def skipped(self) -> tuple[tuple[Side, int, str], ...]:
        return self.pairs[0].skipped

    # -- the grid

    @property
    def sites(self) -> tuple[str, ...]:
        """The panels: sites, and of heads, neurons or experts each group by its index, as `z[:, 3]`."""
        return tuple(panels_of(self.rows))

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_of(self.rows)

    @property
    def grid(self) -> np.ndarray:
        """`values` as [S, L, P] of `sites`, `layers` and `columns`. A site without layers has its values in the first
        layer's row and NaN in the others."""
        return self.as_grid(self.values)

    def as_grid(self, values: np.ndarray) -> np.ndarray:
        """Numbers of the cells [R, P] as [S, L, P]."""
        panels, layers = self.sites, self.layers
        grid = np.full((len(panels), len(layers), len(self.columns)), np.nan)
        for row, of_row in zip(self.rows, values, strict=True):
            grid[panels.index(row.panel), 0 if row.layer is None else layers.index(row.layer)] = of_row
        return grid

    def _run(self) -> Iterator[tuple[int, int]]:
        for panel in self.sites:
            for r, row in enumerate(self.rows):
                if row.panel == panel:
                    yield from ((r, p) for p in range(len(self.columns)) if not np.isnan(self.values[r, p]))

    def cells(self) -> list[Cell]:
        """Every cell that was run, in grid order."""
        return [self._cell(r, p) for r, p in self._run()]

    def _cell(self, r: int, p: int) -> Cell:
        row = self.rows[r]
        return Cell(row.site, row.layer, self.columns[p], float(self.values[r, p]), row.index)

    def best(self, count: int = 5) -> list[Cell]:
        """The cells that moved the metric furthest from the baseline towards the other prompt's, best first; where
        there is no other prompt, those that moved it furthest."""
        if self.goal is None:
            return sorted(self.cells(), key=lambda cell: -abs(cell.value - self.baseline))[:count]
        towards = 1.0 if self.goal >= self.baseline else -1.0
        return sorted(self.cells(), key=lambda cell: -towards * cell.value)[:count]

    def to_frame(self) -> pandas.DataFrame:
        """One row a cell: site, layer, index, column, clean and corrupt positions, value, effect over the baseline, and
        of several pairs the ends of both intervals and both p-values."""
        import pandas

        names = ("low", "high", "effect_low", "effect_high", "p", "p_family")
        spread = {name: getattr(self, name) for name in names}
        rows = [
            {
                "site": cell.site, "layer": cell.layer, "index": cell.index, "column": cell.column.label,
                "clean_positions": cell.column.clean, "corrupt_positions": cell.column.corrupt,
                "value": cell.value, "effect": cell.value - self.baseline,
                **{name: float(of[r, p]) for name, of in spread.items() if of is not None},
            }
            for r, p in self._run() for cell in (self._cell(r, p),)
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    # -- pictures

    def heatmap(self) -> Heatmap:
        """The grid with the texts of its picture."""
        from patchclamp.studies.sweep_heatmap import heatmap

        return heatmap(self)

    def plot(self, path: str | Path) -> Path:
        """Draws the grid as a heatmap, tokens across and layers up, into a PNG (or any format of matplotlib)."""
        from patchclamp.plots import heatmap_png

        return heatmap_png(self.heatmap(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the heatmap with hover, the prompts, the metric and its baselines."""
        from patchclamp.plots import heatmap_html

        return heatmap_html(self.heatmap(), path)

    def __repr__(self) -> str:
        best = self.best(1)
        where = f", best {best[0].value:.3f} at {place(best[0])}" if best else ""
        known = {"clean": self.clean, "corrupt": self.corrupt}
        runs = ", ".join(f"{side} {known[side]:.3f}" for side in ("corrupt", "clean") if known[side] is not None)
        return f"<{type(self).__name__} {self.metric}: {runs}{where}>"


class PatchSweep(Sweep, frozen=True, eq=False, kw_only=True):
    """A patch sweep: cells of one prompt's run replaced by those of the other's (`patch_sweep`)."""

    kind: ClassVar[str] = "patch"


class AblationSweep(Sweep, frozen=True, eq=False, kw_only=True):
    """An ablation sweep: cells of a prompt's run put out (`ablation_sweep`). `corrupt` is None."""

    kind: ClassVar[str] = "ablation"


class CausalTrace(Sweep, frozen=True, eq=False, kw_only=True):
    """A causal trace: the subject's embeddings are noised, and cells get their clean values back (`causal_trace`).

    subjects: the noised positions of each pair; std: of the noise, as added to the embeddings
    low, high: of several prompts the interval over prompts, each with the mean over its seeds; of one prompt the
        interval over its seeds, without p-values
    """

    subjects: tuple[tuple[int, ...], ...]
    std: float

    kind: ClassVar[str] = "trace"


class PathPatch(Sweep, frozen=True, eq=False, kw_only=True):
    """Path patching: rows are senders, columns receivers (`path_patch`).

    frozen: the sites that were held at the unpatched run between the two
    """

    frozen: tuple[str, ...]

    kind: ClassVar[str] = "path"


def place(cell: Cell) -> str:
    """`resid_pre[8] @ ' Tower'`"""
    return f"{cell.where} @ {cell.column.label!r}"
