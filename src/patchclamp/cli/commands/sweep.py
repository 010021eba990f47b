"""`patchclamp sweep`: where in the model does what tells two prompts apart live?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options, read_positions
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded


def sweep(
    model: Model,
    clean: Annotated[str, typer.Option(help="The prompt whose activations are patched in.")],
    corrupt: Annotated[str, typer.Option(help="The prompt that is run with them.")],
    answer: Annotated[str, typer.Option(help="One token that the clean prompt calls for, with its leading space.")],
    foil: Annotated[str | None, typer.Option(help="One token, the corrupt prompt's; logprob needs none.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="resid_pre (the default), attn_out, …; repeatable.")] = None,
    metric: Annotated[str, typer.Option(help="logit_diff, logprob or recovered.")] = "logit_diff",
    layers: Annotated[str | None, typer.Option(help="A layer or a range such as 0:12; all if not given.")] = None,
    positions: Annotated[
        list[str] | None,
        typer.Option(help="Tokens of the corrupt prompt to patch together: -1, span('Rome'); repeatable."),
    ] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    png: Annotated[Path | None, typer.Option(help="Draw the grid into this file; its ending says the format.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the grid as a page with hover into this file.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best cells to show.")] = 5,
) -> None:
    """Patch every site, layer and token of a clean run into a corrupt one, and show where the answer comes back."""
    from patchclamp.cli.early import check_engine, check_sweep
    from patchclamp.cli.sweep_table import show_best, show_pictures, show_question
    from patchclamp.studies import patch_sweep

    sites, columns, options = site or ["resid_pre"], read_positions(positions), read_options(option, dtype)
    check_engine(engine)
    check_sweep(sites, layers, columns, metric, foil, png, html)
    with loaded(model, engine, options) as lm:
        result = patch_sweep(
            lm, clean=clean, corrupt=corrupt, answer=answer, foil=foil, sites=sites, layers=layers, positions=columns,
            metric=metric,
        )  # fmt: skip
    heatmap = result.heatmap()
    show_question(OUT, heatmap)
    show_best(OUT, heatmap, top)
    show_pictures(OUT, heatmap, png, html)
