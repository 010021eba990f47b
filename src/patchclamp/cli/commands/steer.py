"""`patchclamp steer`: a steering vector from contrasting prompts, the layer where it is best, and what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options, read_prompts
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded


def steer(
    model: Model,
    positive: Annotated[Path, typer.Option(help="A file of prompts that show what is looked for, one a line.")],
    negative: Annotated[Path, typer.Option(help="A file of prompts that do not.")],
    method: Annotated[str, typer.Option(help="mean, pca (of pairs, line by line) or probe.")] = "mean",
    site: Annotated[str, typer.Option(help="Where the prompts are read and the vector is added.")] = "resid_post",
    layers: Annotated[str | None, typer.Option(help="A layer or a range such as 8:20; all if not given.")] = None,
    tokens: Annotated[str, typer.Option(help="Which tokens of each prompt are read.")] = "prompt[-1]",
    chat: Annotated[bool, typer.Option("--chat", help="Ask each prompt as the user's turn of a chat.")] = False,
    answer: Annotated[
        str | None, typer.Option(help="A continuation that shows the behaviour; the best layer moves it most.")
    ] = None,
    foil: Annotated[str | None, typer.Option(help="A continuation that does not show it.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts to score --answer on, at several strengths.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="The share of the prompts that layers are checked on.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Draws the held-out prompts.")] = 0,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Write what is computed into this file, and FILE.curve, and go on from what they have."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the vectors in this file.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="Write the best layer's vector for llama.cpp and repeng into this file.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the strength curve, or the check of the layers.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the same as a page with hover into this file.")] = None,
) -> None:
    """Make steering vectors from contrasting prompts, find the best layer, and score them at several strengths."""
    from patchclamp.cli.curves_table import show_curves, show_kept, show_written
    from patchclamp.cli.early import check_engine, check_steer
    from patchclamp.studies import steering_vectors, strength_curve

    sides = read_prompts(positive, "--positive"), read_prompts(negative, "--negative")
    asked, options = None if prompts is None else read_prompts(prompts, "--prompts"), read_options(option, dtype)
    check_engine(engine)
    check_steer(
        method, site, layers, tokens, len(sides[0]), len(sides[1]), answer, foil, asked is not None, held_out, png, html
    )
    with loaded(model, engine, options) as lm:
        vectors = steering_vectors(
            lm, *sides, method=method, site=site, layers=layers, tokens=tokens, chat=chat, held_out=held_out,
            seed=seed, answer=answer if held_out else None, foil=foil if held_out else None, resume=resume,
        )  # fmt: skip
        of_curve = None if resume is None else resume.with_name(f"{resume.name}.curve")
        curve = None
        if asked is not None:
            curve = strength_curve(lm, vectors, asked, answer, foil, chat=chat, resume=of_curve)
    if vectors.best is not None:
        show_curves(OUT, vectors.picture())
    if curve is not None:
        show_curves(OUT, curve.picture())
    show_kept(OUT, vectors, save)
    show_kept(OUT, vectors if curve is None else curve, None, png, html)
    if gguf is not None:
        show_written(OUT, vectors.to_gguf(gguf))
