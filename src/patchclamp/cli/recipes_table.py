"""How far two engines are apart on the recipes, as a table for people and as JSON for programs."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.studies.recipes import Recipes


def show_table(console: Console, recipes: Recipes) -> None:
    """One row a value: its shape, how far the engines are apart, how far trace and program are."""
    engines = " against ".join(recipes.engines)
    console.print(Text(f"{recipes.model} ({recipes.dtype}): {engines}", style="bold"), soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("recipe", "value", "shape", "engines apart", "from by hand"):
        table.add_column(name, justify="left" if name in ("recipe", "value") else "right", no_wrap=True)
    last = ""
    for value in recipes.values:
        shape = "×".join(map(str, value.shape))
        numbers = [_bounded(number, number <= recipes.tolerance) for number in (value.gap, value.by_hand)]
        table.add_row(value.recipe if value.recipe != last else "", value.value, shape, *numbers)
        last = value.recipe
    console.print(table)
    for problem in recipes.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if recipes.holds:
        count = len({value.recipe for value in recipes.values})
        told = f"all {count} recipes give the same on both engines, and both ways: within {recipes.tolerance:g}"
        console.print(Text(told, style="green"), soft_wrap=True)


def show_json(console: Console, recipes: Recipes) -> None:
    """An object: whether all holds, what does not, and every value. What has no number is null."""
    console.file.write(msgspec.json.format(msgspec.json.encode(recipes.to_dict())).decode() + "\n")


def _bounded(number: float, within: bool) -> Text:
    return Text(f"{number:.1e}" if number else "0", style="green" if within else "bold red")
