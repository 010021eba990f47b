"""How far two engines are apart, as a table for people and as JSON for programs."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.studies.parity_result import Parity


def show_table(console: Console, found: Parity) -> None:
    """One row a site: its worst row, the first layer out of tolerance, its edit; then everything that is wrong."""
    console.print(Text(f"{found.model} ({found.family}, {found.dtype}): {found.engines[0]} against {found.engines[1]}",
                       style="bold"), soft_wrap=True)  # fmt: skip
    prompts = f"{found.prompts} prompt{'s' if found.prompts != 1 else ''}, {found.positions} positions"
    same, generated = found.alike
    console.print(Text(f"{prompts}; {same} of {generated} generated tokens alike"))
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("site", "layers", "worst row", "in layer", "out from", "edit in", "logits moved", "otherwise"):
        table.add_column(name, justify="left" if name == "site" else "right", no_wrap=True)
    for site in found.sites:
        out, layered = found.leaves(site), "[" in site.worst_at
        table.add_row(
            site.name, str(len(site.places)) if layered else "–", _bounded(site.worst, out is None),
            _layer(site.worst_at), "–" if out is None else _layer(out) if layered else "out", _layer(site.edit_at),
            f"{site.moved:.2g}", _bounded(site.edit, found.moves(site)),
        )  # fmt: skip
    console.print(table)
    if found.left_out:
        console.print(Text(f"on one engine only, for the tables differ: {', '.join(found.left_out)}", style="dim"))
    near = found.logprobs <= found.bounds.logprobs
    console.print(Text.assemble("log-probabilities ", _bounded(found.logprobs, near), " apart at most"))
    _show_verdict(console, found)


def show_json(console: Console, found: Parity) -> None:
    """An object: whether all holds, what does not, and every site with its layers. What has no number is null."""
    console.file.write(msgspec.json.format(msgspec.json.encode(found.to_dict())).decode() + "\n")


def _show_verdict(console: Console, found: Parity) -> None:
    bounds = found.bounds
    for problem in found.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if found.first is not None:
        console.print(Text(f"the first place out of tolerance is {found.first}", style="bold red"), soft_wrap=True)
    if found.holds:
        told = (
            f"rows within {bounds.rows:g}, edits within {bounds.edit:g}, log-probabilities within {bounds.logprobs:g}"
        )
        console.print(Text(f"all {len(found.sites)} sites are equal: {told}", style="green"), soft_wrap=True)


def _layer(place: str) -> str:
    """Of "z[5]" 5; of a site that is one for the model a dash."""
    return place.partition("[")[2].rstrip("]") or "–"


def _bounded(number: float, within: bool) -> Text:
    return Text(f"{number:.1e}" if number else "0", style="green" if within else "bold red")
