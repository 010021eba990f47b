"""`patchclamp paths`: which heads does a head speak to, and does it speak to the answer itself?"""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import (
    Answer,
    Dtype,
    Engine,
    Foil,
    Html,
    Layers,
    Model,
    Options,
    Png,
    Resume,
    Save,
    Top,
    read_options,
    read_positions,
)
from patchclamp.cli.loading import loaded


def paths(
    model: Model,
    clean: Annotated[str, typer.Option(help="The prompt whose senders are patched in.")],
    corrupt: Annotated[str, typer.Option(help="The prompt that is run with them, of the same length.")],
    answer: Answer,
    foil: Foil = None,
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
    check_engine(engine)
    check_sweep(senders, layers, columns, metric, foil, png, html)
    with loaded(model, engine, options) as lm:
        result = path_patch(
            lm, clean=clean, corrupt=corrupt, answer=answer, foil=foil, senders=senders, receivers=receivers,
            layers=layers, group=group, positions=None if columns is None else columns[0],
            freeze=freeze or ("z", "mlp_out"), metric=metric, direction=direction, resume=resume,
        )  # fmt: skip
    show_sweep(result, top, save, png, html)
