"""`patchclamp recipes`: does every recipe of the tracing front give the same values on two engines?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Model, Options, read_options
from patchclamp.cli.console import ERR, OUT


def recipes(
    model: Model,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, on both engines.")] = "float32",
    recipe: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A recipe; repeatable. All if not given.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="How far a row may be off, relative; 1e-4 for float32 if not given.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="The engine to examine.")] = "vllm",
    against: Annotated[str, typer.Option(metavar="NAME", help="The engine to compare it with.")] = "transformers",
    option: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run every recipe on two engines, as a trace and as a program written by hand, and show where they differ.

    Options are those of the engine that is examined. The exit status is 1 if something is out of tolerance.
    """
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.loading import quietly
    from patchclamp.cli.recipes_table import show_json, show_table
    from patchclamp.studies import compare_recipes

    for name in (engine, against):
        check_engine(name)
    options = read_options(option)
    with quietly(), ERR.status("starting …") as status:
        result = compare_recipes(
            model, dtype=dtype, recipes=recipe or (), tolerance=tolerance, engines=(against, engine),
            tell=status.update, **options,
        )  # fmt: skip
    (show_json if as_json else show_table)(OUT, result)
    raise typer.Exit(0 if result.holds else 1)
