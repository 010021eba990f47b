"""`patchclamp attribute`: what does each layer, head and neuron add to the answer's logit by itself?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded
from patchclamp.cli.pictures import Html, Png, Save, check_pictures, show_pictures


def attribute(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="A prompt; repeatable, for an average over several.")],
    answer: Annotated[list[str], typer.Option(help="One token, with its leading space; for all prompts, or one each.")],
    foil: Annotated[list[str] | None, typer.Option(help="The token it is compared with; likewise.")] = None,
    by: Annotated[list[str] | None, typer.Option(help="layer, head, neuron; repeatable. All if not given.")] = None,
    weights: Annotated[str | None, typer.Option(help="Where the model's files are, if not under its own name.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    png: Png = None,
    html: Html = None,
    save: Save = None,
    top: Annotated[int, typer.Option(min=1, help="How many parts of each kind to show.")] = 5,
) -> None:
    """Show what each part of the model adds to an answer's logit directly, the final norm frozen at its scale."""
    from patchclamp.cli.early import check_engine
    from patchclamp.cli.lens_tables import show_attribution
    from patchclamp.studies import direct_attribution

    check_engine(engine)
    check_pictures(png, html)
    with loaded(model, engine, read_options(option, dtype)) as lm:
        result = direct_attribution(
            lm, prompt, answer=answer[0] if len(answer) == 1 else answer, by=by or ("layer", "head", "neuron"),
            foil=foil[0] if foil and len(foil) == 1 else foil, weights=weights,
        )  # fmt: skip
    show_attribution(OUT, result, top)
    show_pictures(OUT, result, png, html, save)
