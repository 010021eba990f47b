"""`patchclamp sweep`: where in the model does what tells two prompts apart live?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import (
    Batch,
    Dtype,
    Engine,
    Foil,
    Group,
    Html,
    Layers,
    Model,
    Options,
    Pairs,
    Png,
    Resume,
    Save,
    Selections,
    Sites,
    Top,
    Window,
    any_missing,
    positions_by_label,
    read_options,
    read_positions,
    read_prompt_pairs,
)
from patchclamp.cli.loading import loaded
from patchclamp.cli.source_arguments import (
    Bank,
    ByPosition,
    Draws,
    Mask,
    MeanTokens,
    Source,
    fill_bank,
    mask_for,
    read_mask,
    read_source,
)
from patchclamp.errors import ProgramError


def sweep(
    model: Model,
    clean: Annotated[str | None, typer.Option(help="The prompt whose activations are patched in.")] = None,
    corrupt: Annotated[str | None, typer.Option(help="The prompt that is run with them.")] = None,
    answer: Annotated[str | None, typer.Option(help="What the clean prompt calls for, with its leading space.")] = None,
    foil: Foil = None,
    pairs: Pairs = None,
    site: Sites = None,
    metric: Annotated[str, typer.Option(help="logit_diff, recovered, logprob or prob.")] = "logit_diff",
    layers: Layers = None,
    positions: Selections = None,
    direction: Annotated[str, typer.Option(help="denoising, or noising: corrupt into clean.")] = "denoising",
    group: Group = None,
    window: Window = 1,
    source: Source = None,
    bank: Bank = None,
    mean_tokens: MeanTokens = None,
    mean_by_position: ByPosition = False,
    draws: Draws = 1,
    alpha: Annotated[float, typer.Option(help="How much of the new value is mixed in.")] = 1.0,
    mask: Mask = None,
    zoom: Annotated[int | None, typer.Option(min=1, help="Patch blocks, and look into the best so many.")] = None,
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
    """Patch every site, layer and token of a clean run into a corrupt one, and show where the answer comes back."""
    from patchclamp.cli.early import check_engine, check_sweep
    from patchclamp.cli.sweep_table import show_sweep
    from patchclamp.studies import patch_sweep

    sites, columns, options = site or ["resid_pre"], read_positions(positions), read_options(option, dtype)
    prompts = read_prompt_pairs(clean, corrupt, answer, foil, pairs, "sweep")
    if "positions" in prompts and columns is not None:
        raise ProgramError("--positions stand in the file", "--pairs")
    check_engine(engine)
    check_sweep(sites, layers, columns, metric, None if any_missing(prompts["foil"]) else "given", png, html)
    across = positions_by_label(prompts.pop("positions")) if "positions" in prompts else columns
    writes, mixed = read_source(source, seed, mean_tokens, mean_by_position, draws), read_mask(mask)
    with loaded(model, engine, options) as lm:
        fill_bank(lm, bank)
        result = patch_sweep(
            lm, **prompts, sites=sites, layers=layers, positions=across, metric=metric, direction=direction,
            group=group, window=window, source=writes, alpha=alpha, mask=mask_for(lm, sites, mixed), zoom=zoom,
            seed=seed, batch=batch, resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)
