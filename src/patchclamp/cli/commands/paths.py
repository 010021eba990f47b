"""`patchclamp paths`: which heads does a head speak to, and does it speak to the answer itself?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import (
    Batch,
    Dtype,
    Engine,
    Foil,
    Html,
    Layers,
    Model,
    Options,
    Pairs,
    Png,
    Resume,
    Save,
    Top,
    any_missing,
    read_options,
    read_positions,
    read_prompt_pairs,
)
from patchclamp.cli.loading import loaded
from patchclamp.errors import ProgramError


def paths(
    model: Model,
    clean: Annotated[str | None, typer.Option(help="The prompt whose senders are patched in.")] = None,
    corrupt: Annotated[str | None, typer.Option(help="The prompt that is run with them, of the same length.")] = None,
    answer: Annotated[str | None, typer.Option(help="What the clean prompt calls for, with its leading space.")] = None,
    foil: Foil = None,
    pairs: Pairs = None,
    sender: Annotated[list[str] | None, typer.Option(help="z (the default), mlp_out, 'z[9, 3]'; repeatable.")] = None,
    receiver: Annotated[
        list[str] | None,
        typer.Option(help="logits (the default), 'q[9, 6]', 'mlp_in[8]'; joined by + together; repeatable."),
    ] = None,
    metric: Annotated[str, typer.Option(help="logit_diff, recovered, logprob or prob.")] = "logit_diff",
    layers: Layers = None,
    positions: Annotated[
        str | None, typer.Option(help="Tokens at which senders are patched; all if not given.")
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="So many heads or neurons are one sender.")] = 1,
    freeze: Annotated[list[str] | None, typer.Option(help="z, attn_out, mlp_out; z and mlp_out; repeatable.")] = None,
    direction: Annotated[str, typer.Option(help="denoising, or noising: corrupt into clean.")] = "denoising",
    seed: Annotated[int, typer.Option(min=0, help="Of the interval and the test over pairs.")] = 0,
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
    """Patch the way from every sender to every receiver, all between them frozen, and show which ways matter."""
    from patchclamp.cli.early import check_engine, check_sweep
    from patchclamp.cli.sweep_table import show_sweep
    from patchclamp.studies import path_patch

    senders, options = sender or ["z"], read_options(option, dtype)
    receivers = [text.split("+") if "+" in text else text for text in receiver or ["logits"]]
    columns = read_positions(None if positions is None else [positions])
    prompts = read_prompt_pairs(clean, corrupt, answer, foil, pairs, "paths")
    if "positions" in prompts and columns is not None:
        raise ProgramError("--positions stand in the file", "--pairs")
    check_engine(engine)
    check_sweep(senders, layers, columns, metric, None if any_missing(prompts["foil"]) else "given", png, html)
    at = prompts.pop("positions", None if columns is None else columns[0])
    with loaded(model, engine, options) as lm:
        result = path_patch(
            lm, **prompts, senders=senders, receivers=receivers, layers=layers, group=group, positions=at,
            freeze=freeze or ("z", "mlp_out"), metric=metric, direction=direction, seed=seed, batch=batch,
            resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)
