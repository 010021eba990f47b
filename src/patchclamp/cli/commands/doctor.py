"""`patchclamp doctor`: what works on this machine, with this vLLM and this model, and what to do about the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Options, read_options
from patchclamp.cli.console import ERR, OUT


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A hub id, a folder, or smollm2: started and examined too.")
    ] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Examine versions, the seams into vLLM and, with a model, its configuration, sites, fusions, graphs and memory.

    The exit status is 1 if there is a problem.
    """
    from patchclamp.cli.findings_table import show_json, show_tables
    from patchclamp.cli.loading import quietly
    from patchclamp.doctor import examine

    with quietly(), ERR.status("examining …"):
        report = examine(model, engine, **read_options(option, dtype))
    (show_json if as_json else show_tables)(OUT, report)
    raise typer.Exit(1 if report.problems else 0)
