"""The proofs of a model's sites, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.language import SITES
from patchclamp.proving import Proof

if TYPE_CHECKING:
    from patchclamp.lm import LM

PROOFS = {
    "shape": "shape",
    "noop": "no-op",
    "edit": "edit",
    "order": "order",
    "adds": "sums",
}  # field of a proof, its column
NOWHERE = "–"  # the module of a site on an engine without modules


def show_table(console: Console, lm: LM, proofs: Sequence[Proof]) -> None:
    """One row a site, its proofs as ticks ("–": none is about it); where the sites lie; and why one fails."""
    console.print(Text(repr(lm).strip("<>"), style="bold"))
    table = _table("site", "layers", "shape", "layout")
    for name in PROOFS.values():
        table.add_column(name, justify="center", no_wrap=True)
    for proof in proofs:
        ticks = [_tick(getattr(proof, field)) for field in PROOFS]
        layers = "–" if proof.layers is None else str(proof.layers)
        table.add_row(proof.name, layers, Text(shape(proof)), proof.layout, *ticks)
    console.print(table)
    modules = {proof.name: module(lm, proof.name) for proof in proofs}
    if set(modules.values()) != {NOWHERE}:
        where = _table("site", "module")
        for name, border in modules.items():
            where.add_row(name, Text(border))
        console.print()
        console.print(where)
        console.print()
    failed = [proof for proof in proofs if not proof.holds]
    tabled = lm.sites.family.tabled
    for proof in failed:
        failure = f"{proof.name}{'' if tabled else ' is withdrawn'}: {proof.note or 'not proved'}"
        console.print(Text(failure, style="red" if tabled else "yellow"), soft_wrap=True)
    if not failed:
        console.print(Text(f"all {len(proofs)} sites hold", style="green"))
    if any(proof.tried < (proof.layers or 1) for proof in proofs):
        console.print(
            Text("an edit was tried in the first, middle and last layer of each; --full tries all", style="dim")
        )


def _table(*names: str) -> Table:
    """A table that fits 80 columns: only what says where a site lies may be folded."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(
            name, justify="right" if name == "layers" else "left", no_wrap=name != "module", overflow="fold"
        )
    return table


def show_json(console: Console, lm: LM, proofs: Sequence[Proof]) -> None:
    """A list of objects, one a site."""
    rows = [
        {
            "site": proof.name, "layers": proof.layers, "shape": shape(proof), "layout": proof.layout,
            "module": module(lm, proof.name), "proofs": {field: getattr(proof, field) for field in PROOFS},
            "edits_tried": proof.tried, "holds": proof.holds, "note": proof.note,
        }
        for proof in proofs
    ]  # fmt: skip
    console.file.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def shape(proof: Proof) -> str:
    """`[T, 576]`: T tokens; N, where only sampled tokens have rows."""
    return f"[{'N' if proof.name == 'logits' else 'T'}, {proof.width}]"


def module(lm: LM, name: str) -> str:
    """The module at whose border this engine reads and writes a site: `model.layers.{l}.mlp, output`."""
    kind, shift = lm.sites.family.sites[name]
    tap = getattr(lm.sites.family.points[kind], lm.model.engine, None)
    if tap is None:
        return NOWHERE
    layer = "{l}" if not shift else f"{{l+{shift}}}"
    path = tap.module.replace("{l}", layer if SITES[name].layered else "0")
    return f"{path}, {'input' if tap.moment == 'in' else 'output' if tap.moment == 'out' else 'its op'}"


def _tick(held: bool | None) -> Text:
    if held is None:
        return Text("–", style="dim")
    return Text("✓", style="green") if held else Text("✗", style="bold red")
