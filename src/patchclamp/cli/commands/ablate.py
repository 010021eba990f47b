"""`patchclamp ablate`: what of the model does an answer need?"""

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
from patchclamp.cli.source_arguments import Bank, ByPosition, Draws, MeanTokens, Source, fill_bank, read_source


def ablate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The prompt that is run.")],
    answer: Answer,
    foil: Foil = None,
    site: Sites = None,
    metric: Annotated[str, typer.Option(help="logit_diff, logprob or prob.")] = "logit_diff",
    layers: Layers = None,
    positions: Selections = None,
    each_token: Annotated[bool, typer.Option("--each-token", help="A column a token, not the whole prompt.")] = False,
    source: Source = "zeros",
    bank: Bank = None,
    mean_tokens: MeanTokens = None,
    mean_by_position: ByPosition = False,
    draws: Draws = 1,
    group: Group = None,
    window: Window = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
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
    """Put out every site, layer and head in the run of a prompt, and show where the answer suffers."""
    from patchclamp.cli.early import check_engine, check_sweep
    from patchclamp.cli.sweep_table import show_sweep
    from patchclamp.studies import ablation_sweep

    sites, columns, options = site or ["attn_out", "mlp_out"], read_positions(positions), read_options(option, dtype)
    if each_token and columns is not None:
        raise typer.BadParameter("give --positions or --each-token")
    check_engine(engine)
    check_sweep(sites, layers, columns, metric, foil, png, html)
    writes = read_source(source, seed, mean_tokens, mean_by_position, draws)
    with loaded(model, engine, options) as lm:
        fill_bank(lm, bank)
        result = ablation_sweep(
            lm, prompt=prompt, answer=answer, foil=foil, sites=sites, layers=layers,
            positions="each" if each_token else columns, metric=metric, source=writes, group=group, window=window,
            seed=seed, batch=batch, resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)
