"""`patchclamp sites`: what a model has to offer on an engine, each site proved there and then."""

from __future__ import annotations

from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options
from patchclamp.cli.console import ERR, OUT
from patchclamp.cli.loading import loaded


def sites(
    model: Model,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    full: Annotated[bool, typer.Option("--full", help="Try an edit in every layer, not in three of a site.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Prove every site of a model: right shape, a no-op write changes nothing, an edit moves what it must, sums hold.

    The exit status is 1 if a proof fails of what the model's table promises; what a table made of modules could not be
    sure of is withdrawn.
    """
    from patchclamp.cli.site_table import show_json, show_table
    from patchclamp.proving import prove

    with loaded(model, engine, read_options(option, dtype), prove=False) as lm:
        with ERR.status("proving every site …"):
            proofs = prove(lm, full)
        (show_json if as_json else show_table)(OUT, lm, proofs)
        promised = lm.sites.family.tabled
    raise typer.Exit(1 if promised and not all(proof.holds for proof in proofs) else 0)
