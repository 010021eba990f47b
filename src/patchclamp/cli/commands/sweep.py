"""`patchclamp sweep`: where in the model does what tells two prompts apart live?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from patchclamp.cli.arguments import (
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
    Source,
    Top,
    Window,
    read_options,
    read_pairs,
    read_positions,
    read_source,
)
from patchclamp.cli.loading import loaded
from patchclamp.errors import ProgramError


def sweep(
    model: Model,
    clean: Annotated[str | None, typer.Option(help="The prompt whose activations are patched in.")] = None,
    corrupt: Annotated[str | None, typer.Option(help="The prompt that is run with them.")] = None,
    answer: Annotated[str | None, typer.Option(help="What the clean prompt calls for, with its leading space.")] = None,
    foil: Foil = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="In place of these four, a file: a JSON object of clean, corrupt, answer, foil a line."),
    ] = None,
    site: Sites = None,
    metric: Annotated[str, typer.Option(help="logit_diff, recovered, logprob or prob.")] = "logit_diff",
    layers: Layers = None,
    positions: Selections = None,
    direction: Annotated[str, typer.Option(help="denoising, or noising: corrupt into clean.")] = "denoising",
    group: Group = None,
    window: Window = 1,
    source: Source = None,
    alpha: Annotated[float, typer.Option(help="How much of the new value is mixed in.")] = 1.0,
    zoom: Annotated[int | None, typer.Option(min=1, help="Patch blocks, and look into the best so many.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
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
    prompts = _prompts(clean, corrupt, answer, foil, pairs)
    check_engine(engine)
    check_sweep(sites, layers, columns, metric, None if _any_missing(prompts["foil"]) else "given", png, html)
    writes = read_source(source, seed)
    with loaded(model, engine, options) as lm:
        result = patch_sweep(
            lm, **prompts, sites=sites, layers=layers, positions=columns, metric=metric, direction=direction,
            group=group, window=window, source=writes, alpha=alpha, zoom=zoom, seed=seed, resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)


def _prompts(
    clean: str | None, corrupt: str | None, answer: str | None, foil: str | None, pairs: Path | None
) -> dict[str, Any]:
    """The prompts and what is graded, from the options or from a file."""
    given = {"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil}
    if pairs is not None:
        twice = [name for name, value in given.items() if value is not None]
        if twice:
            raise ProgramError(f"--{twice[0]} stands in the file", "--pairs")
        return read_pairs(pairs)
    missing = [name for name in ("clean", "corrupt", "answer") if given[name] is None]
    if missing:
        raise ProgramError(f"missing option --{missing[0]}; or give a file with --pairs", "sweep")
    return given


def _any_missing(foil: Any) -> bool:
    return foil is None or (isinstance(foil, list) and any(one is None for one in foil))
