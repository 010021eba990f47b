"""`patchclamp harvest`: what a data set's tokens have at some sites, shuffled, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, read_options
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded


def harvest(
    model: Model,
    documents: Annotated[str, typer.Argument(help="A file: .txt (a document a line), .jsonl, .parquet; or a folder "
                                                  "that datasets saved.")],
    folder: Annotated[Path, typer.Argument(help="Where the data set's folder is made; its name is a hash.")],
    site: Annotated[list[str], typer.Option(help="resid_post[12], 'z[5, 3]', …; repeatable.")],
    column: Annotated[str | None, typer.Option(help="The field that has the documents; text if not given.")] = None,
    store: Annotated[str, typer.Option(help="The dtype of the stored rows: bfloat16, float16, float32.")] = "bfloat16",
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Leave out first tokens that are special.")] = False,
    no_special: Annotated[bool, typer.Option("--no-special", help="Leave out all special tokens.")] = False,
    positions: Annotated[list[str] | None, typer.Option(help="A window of positions: 4: or 0:128; repeatable.")] = None,
    only_token: Annotated[list[int] | None, typer.Option(help="Keep this token id alone; repeatable.")] = None,
    not_token: Annotated[list[int] | None, typer.Option(help="Leave this token id out; repeatable.")] = None,
    norm_cap: Annotated[float | None, typer.Option(help="The largest norm that is kept.")] = None,
    norm_times_median: Annotated[float | None, typer.Option(help="The same, in medians of the row's shard.")] = None,
    project: Annotated[Path | None, typer.Option(help="W [K, D] in a .npy file: W h is stored.")] = None,
    sums: Annotated[bool, typer.Option("--sum", help="Store the sum over each document.")] = False,
    context: Annotated[int | None, typer.Option(help="Tokens of the longest prompt, if not the model's.")] = None,
    overlong: Annotated[str, typer.Option(help="Longer documents: refuse, cut or split.")] = "refuse",
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
    parts: Annotated[int | None, typer.Option(
        help="Parts that are shuffled one by one; 8 unless given, of 256 MiB to 2 GiB.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="This is machine I of N, from 0 on.")] = "0/1",
    shard_rows: Annotated[int, typer.Option(help="Rows in a file.")] = 131_072,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens that are run at a time.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
) -> None:  # fmt: skip
    """Keep activations of a data set on disk, shuffled. Run it again to go on after a stop."""
    from patchclamp.cli.early import check_engine, check_harvest
    from patchclamp.cli.harvest_arguments import read_matrix, read_shard, read_windows
    from patchclamp.studies import Filters
    from patchclamp.studies import harvest as run_harvest

    filters = Filters(
        no_bos=no_bos, no_special=no_special, positions=read_windows(positions), only_tokens=tuple(only_token or ()),
        not_tokens=tuple(not_token or ()), norm_cap=norm_cap, norm_times_median=norm_times_median,
    )  # fmt: skip
    machine, matrix, options = read_shard(shard), read_matrix(project), read_options(option, dtype)
    check_engine(engine)
    check_harvest(site, store)
    with loaded(model, engine, options) as lm:
        made = run_harvest(
            lm, documents, folder, sites=site, column=column, dtype=store, filters=filters, project=matrix, sums=sums,
            context=context, overlong=overlong, seed=seed, parts=parts, shard=machine,
            shard_rows=shard_rows, batch_tokens=batch_tokens,
        )  # fmt: skip
    data = made.open()
    OUT.print(f"{made.folder}", soft_wrap=True)
    OUT.print(f"{len(data)} rows of {', '.join(made.sites)} in {len(data.shards)} shards", soft_wrap=True)
    if not made.complete:
        OUT.print(f"{len(data.missing)} shards are other machines'")
