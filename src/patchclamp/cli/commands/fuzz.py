"""`patchclamp fuzz`: how strong may noise be before the answers change, and how do they change?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from patchclamp.cli.arguments import Dtype, Engine, Model, Options, Resume, read_options, read_prompts
from patchclamp.cli.console import OUT
from patchclamp.cli.loading import loaded


def fuzz(
    model: Model,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line; 23 instructions if not given.")
    ] = None,
    strength: Annotated[
        list[float] | None, typer.Option(help="A strength of the noise, ascending; repeatable; 11 if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="5 prompts and 7 strengths, where none are given.")] = False,
    seed: Annotated[list[int] | None, typer.Option(help="A seed of the noise; repeatable; 0 if not given.")] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(help="Where noise is added, such as 'resid_post[8] @ prompt'; repeatable; embed if not given."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask each prompt as the user's turn of a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="How long an answer may be.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 is greedy.")] = 0.0,
    refusal: Annotated[str | None, typer.Option(help="A regular expression that finds a refusal.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    resume: Resume = None,
    save: Annotated[Path | None, typer.Option(help="Keep the result in this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file, by its ending's format.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the curves as a page with hover into this file.")] = None,
) -> None:
    """Run prompts under noise of growing strength, and measure each answer against the unfuzzed one."""
    from patchclamp.cli.curves_table import show_answers, show_curves, show_kept
    from patchclamp.cli.early import check_engine, check_fuzz
    from patchclamp.studies import fuzz_sweep
    from patchclamp.studies.fuzz import REFUSAL

    options, asked = read_options(option, dtype), None if prompts is None else read_prompts(prompts, "--prompts")
    check_engine(engine)
    check_fuzz(strength, seed, site, refusal, png, html)
    with loaded(model, engine, options) as lm:
        result = fuzz_sweep(
            lm, asked, strength or None, quick=quick, seeds=seed or (0,), at=site or None, chat=chat,
            max_tokens=max_tokens, sampling={"temperature": temperature} if temperature else None,
            refusal=REFUSAL if refusal is None else refusal, resume=resume,
        )  # fmt: skip
    show_curves(OUT, result.picture())
    show_answers(OUT, result)
    show_kept(OUT, result, save, png, html)
