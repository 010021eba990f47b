"""`patchclamp causal-trace`: through which states does a fact about a subject come to the answer?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import (
    Answer,
    Batch,
    Dtype,
    Engine,
    Foil,
    Group,
    Html,
    Layers,
    Model,
    Options,
    Png,
    Resume,
    Save,
    Selections,
    Sites,
    Top,
    Window,
    read_options,
    read_positions,
)
from patchclamp.cli.loading import loaded


def causal_trace(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The prompt that is run.")],
    subject: Annotated[str, typer.Option(help="The text in it whose embeddings are noised.")],
    answer: Answer,
    foil: Foil = None,
    site: Sites = None,
    metric: Annotated[str, typer.Option(help="prob, logprob, logit_diff or recovered.")] = "prob",
    layers: Layers = None,
    positions: Selections = None,
    group: Group = None,
    window: Window = 1,
    std: Annotated[float | None, typer.Option(help="Of the noise; 3 times that of the embeddings.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many noise seeds.")] = 10,
    batch: Batch = 512,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    resume: Resume = None,
    save: Save = None,
    png: Png = None,
    html: Html = None,
    top: Top = 5,
) -> None:
    """Noise the subject, restore every site, layer and token, and show where the answer comes back: a causal trace."""
    from patchclamp import studies
    from patchclamp.cli.early import check_engine, check_sweep
    from patchclamp.cli.sweep_table import show_sweep

    sites, columns, options = site or ["resid_post"], read_positions(positions), read_options(option, dtype)
    check_engine(engine)
    check_sweep(sites, layers, columns, metric, foil, png, html)
    with loaded(model, engine, options) as lm:
        result = studies.causal_trace(
            lm, prompt=prompt, subject=subject, answer=answer, foil=foil, sites=sites, layers=layers, positions=columns,
            metric=metric, group=group, window=window, std=std, seeds=seeds, batch=batch,
            resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)
