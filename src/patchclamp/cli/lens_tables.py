"""Lenses, attributions and patchscopes in a terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.plots import TokenGrid, style
from patchclamp.studies import AttributionPatchingResult, DirectAttributionResult, EdgeAttributionResult, LogitLensResult, PatchscopeResult
from patchclamp.studies.edge_attribution import Edge

WORDY = frozenset({  # columns of text; the others are of numbers
    "likeliest tokens", "goes on with", "token", "best cells", "best edges", "read by", "layers", "heads", "neurons",
})  # fmt: skip


def show_lens(console: Console, lens: LogitLensResult, position: int) -> None:
    """One row a layer, of one position: the likeliest tokens, KL and entropy, and the chosen tokens."""
    _head(console, lens.picture())
    column = lens.positions.index(position if position >= 0 else len(lens.prompt_tokens) + position)
    at = lens.positions[column]
    console.print(Text(f"after {style.quoted(lens.prompt_tokens[at])} (position {at})"))
    table = _table("layer", "likeliest tokens", "KL", "entropy", *(f"rank of {style.quoted(t)}" for t in lens.tokens))
    for l, layer in reversed(list(enumerate(lens.layers))):  # noqa: E741
        tops = "  ".join(
            f"{style.visible(guess.token)} {100 * guess.probability:.0f}%" for guess in lens.top(layer, at)
        )
        numbers = (f"{lens.kl[l, column]:.2f}", f"{lens.entropy[l, column]:.2f}")
        table.add_row(str(layer), Text(tops), *numbers, *(str(rank) for rank in lens.ranks[l, column]))
    console.print(table)


def show_attribution(console: Console, result: DirectAttributionResult, top: int) -> None:
    """The parts that add most: layers, heads and neurons."""
    _head(console, result.picture())
    for kinds, name in ((("attn_out", "mlp_out", "embed", "positions", "bias"), "layers"), (("z",), "heads"),
                        (("neurons",), "neurons")):  # fmt: skip
        shares = [share for share in result.ranked() if share.part.partition("[")[0] in kinds][:top]
        if shares:
            table = _table(name, "adds")
            for share in shares:
                table.add_row(Text(share.part), style.signed(share.value))
            console.print(table)
            console.print()
    console.print(Text(f"all parts together {style.signed(float(result.totals.mean()))}; the model's own "
                       f"{style.signed(float(result.logit_diffs.mean()))}"))  # fmt: skip


def show_patchscope(console: Console, result: PatchscopeResult) -> None:
    """One row a cell: where the capture came from and went, and what was said."""
    _head(console, result.picture())
    table = _table("from layer", "in layer", "KL from unpatched", "goes on with")
    for s, layer in reversed(list(enumerate(result.layers))):
        for g in range(result.moved.shape[1]):
            to = result.target_layers[g] if result.target_layers else layer
            table.add_row(str(layer), str(to), f"{result.moved[s, g]:.2f}", Text(style.plain(result.texts[s][g])))
    console.print(table)


def show_patching(console: Console, result: AttributionPatchingResult | EdgeAttributionResult, top: int) -> None:
    """The verified cells or edges that moved the metric furthest, and how well estimates and exact patches agree."""
    _head(console, result.picture())
    edges = isinstance(result, EdgeAttributionResult)
    table = _table(*(("best edges", "read by") if edges else ("best cells", "token")), "estimate", "exact patch")
    for cell in result.best(top) or result.proposals(top):
        ends = (cell.sender, cell.receiver) if isinstance(cell, Edge) else (str(cell.row), cell.column.label)
        exact = "–" if cell.exact is None else style.signed(cell.exact)
        table.add_row(*(Text(style.visible(end)) for end in ends), style.signed(cell.estimate), exact)
    console.print(table)
    if np.isfinite(result.exact).any():
        console.print(Text(f"two unpatched runs differ by {style.number(result.noise_floor)}"))


def _head(console: Console, grid: TokenGrid) -> None:
    console.print()
    console.print(Text(grid.title, style="bold"), soft_wrap=True)
    console.print(Text(grid.explained), soft_wrap=True)
    console.print(Text(grid.provenance, style="dim"), soft_wrap=True)
    console.print()


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in WORDY else "right", overflow="fold")
    return table
