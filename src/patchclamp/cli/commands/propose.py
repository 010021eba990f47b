"""`patchclamp propose`: which cells of a patch sweep matter, by their gradients? The best of them are patched
exactly."""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Model, Options, read_options
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded
from patchclamp.cli.pictures import Html, Png, Save, check_pictures, show_pictures
from patchclamp.errors import ProgramError


def propose(
    model: Model,
    clean: Annotated[str, typer.Option(help="The prompt whose activations are patched in.")],
    corrupt: Annotated[str, typer.Option(help="The prompt that is run with them.")],
    answer: Annotated[str, typer.Option(help="One token that the clean prompt calls for, with its leading space.")],
    foil: Annotated[str | None, typer.Option(help="One token, the corrupt prompt's.")] = None,
    site: Annotated[list[str] | None, typer.Option(help="resid_pre, attn_out, mlp_out, z, …; repeatable.")] = None,
    layers: Annotated[str | None, typer.Option(help="A layer or a range such as 0:12; all if not given.")] = None,
    edges: Annotated[
        bool, typer.Option("--edges", help="Estimate what each part tells each later one, in place of sites.")
    ] = False,
    steps: Annotated[
        int,
        typer.Option(min=0, help="Gradients to average on the way to the clean prompt; 0 takes one, at the corrupt."),
    ] = 0,
    verify: Annotated[int, typer.Option(min=0, help="How many cells of the largest estimates to patch exactly.")] = 32,
    sample: Annotated[int, typer.Option(min=0, help="How many others, drawn at random.")] = 32,
    seed: Annotated[int, typer.Option(help="Of that draw.")] = 0,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="ENGINE", help="vllm, or a server's URL, for the exact patches; transformers if not given."
        ),
    ] = None,
    dtype: Dtype = None,
    option: Options = None,
    png: Png = None,
    html: Html = None,
    save: Save = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the best cells to show.")] = 10,
) -> None:
    """Estimate every cell of a patch sweep from gradients (on Transformers), and patch the best exactly.

    Options are those of the engine of the exact patches.
    """
    from contextlib import nullcontext

    from patchclamp.cli.lens_tables import show_patching
    from patchclamp.studies import attribution_patching, edge_attribution
    from patchclamp.studies.attribution_patching import DEFAULT_SITES

    check_pictures(png, html)
    if edges and (site or layers):
        raise ProgramError("edges are of all layers and parts: leave --site and --layers out", "--edges")
    options, is_url = read_options(option, dtype), on is not None and on.startswith(("http://", "https://"))
    ours = {} if dtype is None else {"dtype": dtype}
    with loaded(model, "transformers", options if on is None else ours) as lm:
        name, engine = (on, None) if is_url else (model, on)
        serving = (
            nullcontext(lm) if on is None else loaded(str(name), engine, read_options(option) if is_url else options)
        )
        with serving as exact:
            asked = {} if edges else {"sites": site or DEFAULT_SITES, "layers": layers}
            result = (edge_attribution if edges else attribution_patching)(
                lm, clean=clean, corrupt=corrupt, answer=answer, foil=foil,
                steps=steps, verify=verify, sample=sample, seed=seed, on=exact, **asked,
            )  # fmt: skip
    show_patching(OUT, result, top)
    show_pictures(OUT, result, png, html, save)
