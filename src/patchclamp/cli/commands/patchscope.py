"""`patchclamp patchscope`: what does another prompt say of an activation that is placed into it?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options, read_positions
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded
from patchclamp.cli.pictures import Html, Png, Save, check_pictures, show_pictures


def patchscope(
    model: Model,
    source: Annotated[str, typer.Option(help="The prompt whose activation is read.")],
    target: Annotated[
        str | None, typer.Option(help="The prompt it is placed into; one that asks for the token if not given.")
    ] = None,
    source_position: Annotated[str, typer.Option(help="Where it is taken: -1, span('Rome').")] = "-1",
    target_position: Annotated[str, typer.Option(help="Where it is placed, likewise.")] = "-1",
    layers: Annotated[str | None, typer.Option(help="Layers it is taken from, such as 0:12; all if not given.")] = None,
    target_layers: Annotated[
        str | None, typer.Option(help="Layers it is placed in; the one it comes from if not given.")
    ] = None,
    normed: Annotated[bool, typer.Option("--normed", help="Scale it to the length of what it replaces.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="How many tokens the target goes on for.")] = 12,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    png: Png = None,
    html: Html = None,
    save: Save = None,
) -> None:
    """Place a prompt's activation, from every layer, into another prompt, and show what that goes on with."""
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.lens_tables import show_patchscope
    from patchclamp.studies import patchscope as place
    from patchclamp.studies.patchscope import IDENTITY

    check_engine(engine)
    check_pictures(png, html)
    positions = read_positions([source_position, target_position]) or []
    with loaded(model, engine, read_options(option, dtype)) as lm:
        result = place(
            lm, source=source, target=IDENTITY if target is None else target, source_position=positions[0],
            target_position=positions[1], layers=layers, target_layers=target_layers, normed=normed,
            max_tokens=max_tokens,
        )  # fmt: skip
    show_patchscope(OUT, result)
    show_pictures(OUT, result, png, html, save)
