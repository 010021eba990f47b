"""`patchclamp lens`: what would the model say next, if it stopped after each layer?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, Resume, read_options
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded
from patchclamp.cli.pictures import Html, Png, Save, check_pictures, show_pictures


def lens(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The prompt whose stream is read.")],
    token: Annotated[
        list[str] | None, typer.Option(help="A token whose rank is wanted everywhere; repeatable.")
    ] = None,
    site: Annotated[str, typer.Option(help="A site as wide as the stream: resid_post, resid_mid, …")] = "resid_post",
    layers: Annotated[str | None, typer.Option(help="A layer or a range such as 0:12; all if not given.")] = None,
    position: Annotated[int, typer.Option(help="The position whose layers the table shows.")] = -1,
    readout: Annotated[
        str | None,
        typer.Option(help="checkpoint: read norm and unembedding from the model's files; engine: it makes the logits."),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Where the model's files are, if not under its own name.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    resume: Resume = None,
    png: Png = None,
    html: Html = None,
    save: Save = None,
) -> None:
    """Read every layer and position of a prompt through the model's final norm and unembedding."""
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.lens_tables import show_lens
    from patchclamp.studies import logit_lens

    check_engine(engine)
    check_pictures(png, html)
    with loaded(model, engine, read_options(option, dtype)) as lm:
        result = logit_lens(
            lm, prompt, tokens=token or (), site=site, layers=layers, readout=readout, weights=weights, resume=resume
        )
    show_lens(OUT, result, position)
    show_pictures(OUT, result, png, html, save)
