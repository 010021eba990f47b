"""`patchclamp doctor`: what works on this machine, with this vLLM and this model, and what to do about the rest; or
which seams another vLLM has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Options, read_options
from patchclamp.cli.console import ERR, OUT
from patchclamp.errors import ProgramError


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A hub id, a folder, or smollm2: started and examined too.")
    ] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    vllm_source: Annotated[
        Path | None,
        typer.Option("--vllm-source", metavar="PATH", help="Only look up the seams in another vLLM, without running "
                     "it: a wheel, a checkout or an installed folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:  # fmt: skip
    """Examine versions, the seams into vLLM and, with a model, its configuration, sites, fusions, graphs and memory.

    The exit status is 1 if there is a problem; with --vllm-source, if a seam has moved or is gone.
    """
    if vllm_source is not None:
        if model or engine or dtype or option:
            raise ProgramError("source is read and not run: leave out the model and its options", "--vllm-source")
        raise typer.Exit(_look_up_seams(vllm_source, as_json))
    from patchclamp.cli.findings_table import show_json, show_tables
    from patchclamp.cli.loading import quietly
    from patchclamp.doctor import examine

    with quietly(), ERR.status("examining …"):
        report = examine(model, engine, **read_options(option, dtype))
    (show_json if as_json else show_tables)(OUT, report)
    raise typer.Exit(1 if report.problems else 0)


def _look_up_seams(path: Path, as_json: bool) -> int:
    """Shows the seams of a vLLM's source, and gives the exit status."""
    from patchclamp.cli.seams_table import show_seams, show_seams_json
    from patchclamp.engines.vllm.versions import examine_source

    report = examine_source(path)
    (show_seams_json if as_json else show_seams)(OUT, report)
    return 0 if report.all_there else 1
