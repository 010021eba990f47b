"""How far two engines are apart, as a table for people and as JSON for programs."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.studies.parity import Parity


def show_table(console: Console, parity: Parity) -> None:
    """One row a site: its worst row, the first layer out of tolerance, its edit; then everything that is wrong."""
    engines = " against ".join(parity.engines)
    console.print(Text(f"{parity.model} ({parity.family}, {parity.dtype}): {engines}", style="bold"), soft_wrap=True)
    prompts = f"{parity.prompts} prompt{'s' if parity.prompts != 1 else ''}, {parity.positions} positions"
    same, generated = parity.alike
    console.print(Text(f"{prompts}; {same} of {generated} generated tokens alike"))
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("site", "layers", "worst row", "in layer", "out from", "edit in", "logits moved", "otherwise"):
        table.add_column(name, justify="left" if name == "site" else "right", no_wrap=True)
    for site in parity.sites:
        out, layered = parity.leaves(site), "[" in site.worst_at
        table.add_row(
            site.name, str(len(site.places)) if layered else "–", _bounded(site.worst, out is None),
            _layer(site.worst_at), "–" if out is None else _layer(out) if layered else "out", _layer(site.edit_at),
            f"{site.moved:.2g}", _bounded(site.edit, parity.moves(site)),
        )  # fmt: skip
    console.print(table)
    if parity.left_out:
        console.print(Text(f"on one engine only, for the tables differ: {', '.join(parity.left_out)}", style="dim"))
    near = parity.logprobs <= parity.bounds.logprobs
    console.print(Text.assemble("log-probabilities ", _bounded(parity.logprobs, near), " apart at most"))
    _show_verdict(console, parity)


def show_json(console: Console, parity: Parity) -> None:
    """An object: whether all holds, what does not, and every site with its layers. What has no number is null."""
    console.file.write(msgspec.json.format(msgspec.json.encode(parity.to_dict())).decode() + "\n")


def _show_verdict(console: Console, parity: Parity) -> None:
    bounds = parity.bounds
    for problem in parity.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if parity.first is not None:
        console.print(Text(f"the first place out of tolerance is {parity.first}", style="bold red"), soft_wrap=True)
    if parity.holds:
        bounded = (
            f"rows within {bounds.rows:g}, edits within {bounds.edit:g}, log-probabilities within {bounds.logprobs:g}"
        )
        console.print(Text(f"all {len(parity.sites)} sites are equal: {bounded}", style="green"), soft_wrap=True)


def _layer(place: str) -> str:
    """Of "z[5]" 5; of a site that is one for the model a dash."""
    return place.partition("[")[2].rstrip("]") or "–"


def _bounded(number: float, within: bool) -> Text:
    return Text(f"{number:.1e}" if number else "0", style="green" if within else "bold red")
