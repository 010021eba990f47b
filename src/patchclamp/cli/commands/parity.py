"""`patchclamp parity`: does a model mean the same on vLLM as on Transformers, site by site?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Model, Options, read_options
from patchclamp.cli.console import ERR, OUT


def parity(
    model: Model,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, on both engines.")] = "float32",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt's text; repeatable. Two if not given.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="How far a row may be off, relative; 1e-4 for float32 if not given.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, and to compare, after each prompt.")] = 4,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="The engine to examine.")] = "vllm",
    against: Annotated[str, typer.Option(metavar="NAME", help="The engine to compare it with.")] = "transformers",
    option: Options = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Capture every site of every layer on vLLM and on Transformers, edit at each, and show how far they are apart.

    Options are vLLM's. The exit status is 1 if something is out of tolerance.
    """
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.loading import quietly
    from patchclamp.cli.parity_table import show_json, show_table
    from patchclamp.studies import parity as compare
    from patchclamp.studies.parity import PROMPTS

    for name in (engine, against):
        check_engine(name)
    options = read_options(option)
    with quietly(), ERR.status("starting …") as status:
        result = compare(
            model, dtype=dtype, prompts=prompt or PROMPTS, tolerance=tolerance, max_tokens=max_tokens,
            engines=(against, engine), tell=status.update, **options,
        )  # fmt: skip
    (show_json if as_json else show_table)(OUT, result)
    raise typer.Exit(0 if result.holds else 1)
