"""What the cells of a sweep are patched with, as options of a command, and how these are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchclamp.cli.arguments import lines_of
from patchclamp.errors import PatchclampError, ProgramError

if TYPE_CHECKING:
    from patchclamp.lm import LM

Source = Annotated[
    str | None,
    typer.Option(
        "--source", metavar="SOURCE",
        help="zeros; bank:NAME; or mean:FILE, resample:FILE, a file with a prompt a line.",
    ),
]  # fmt: skip
Bank = Annotated[
    Path | None, typer.Option("--bank", help="A safetensors file of vectors and means, which bank:NAME names.")
]
MeanTokens = Annotated[
    str | None, typer.Option("--mean-tokens", help="Of mean:FILE, the tokens that it is over; all if not given.")
]
ByPosition = Annotated[
    bool, typer.Option("--mean-by-position", help="Of mean:FILE, a mean for each position by itself.")
]
Draws = Annotated[
    int, typer.Option("--draws", min=1, help="Of resample:FILE, how many prompts are drawn for a cell.")
]  # fmt: skip
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask", metavar="MASK",
        help="Mix in some columns of a row only: 0:64,100; bank:NAME; or a file that NumPy saved, a weight a column.",
    ),
]  # fmt: skip


def read_source(
    text: str | None, seed: int, mean_tokens: str | None = None, by_position: bool = False, draws: int = 1
) -> Any:
    """A source of `--source`: `zeros`, `bank:NAME`, or the mean or draws of the prompts in a file."""
    from patchclamp.studies import MeanOf, Resampled

    kind, sign, rest = (text or "").partition(":")
    for given, option, of in (
        (mean_tokens is not None, "--mean-tokens", "mean"), (by_position, "--mean-by-position", "mean"),
        (draws > 1, "--draws", "resample"),
    ):  # fmt: skip
        if given and kind != of:
            raise ProgramError(f"it is of --source {of}:FILE, and the source is {text or 'the other prompt'}", option)
    if text is None:
        return None
    if text == "zeros" or (kind == "bank" and rest):
        return text
    if not sign or kind not in ("mean", "resample"):
        raise ProgramError(f"{text!r} is none of zeros, bank:NAME, mean:FILE and resample:FILE", "--source")
    prompts = [line for line in lines_of(Path(rest), "--source") if line.strip()]
    return MeanOf(prompts, mean_tokens, by_position) if kind == "mean" else Resampled(prompts, seed, draws)


def read_mask(text: str | None) -> Any:
    """A mask of `--mask`: a name of the bank, the numbers of a file, or columns as a list of indices."""
    if text is None:
        return None
    if text.startswith("bank:"):
        return text.removeprefix("bank:")
    if text.endswith(".npy"):
        return _numbers(Path(text))
    from patchclamp.language.tokens import parse_index

    try:
        return [parse_index(part) for part in text.split(",")]
    except PatchclampError:
        raise ProgramError(
            f"{text!r} is none of columns such as 0:64,100, bank:NAME, and a file of NumPy's, FILE.npy", "--mask"
        ) from None


def mask_for(lm: LM, sites: list[str], mask: Any) -> Any:
    """A mask as `patch_sweep` takes it: columns as numbers, now that the model says how wide the sites are."""
    if not isinstance(mask, list):
        return mask
    from patchclamp.studies.sources import columns_mask

    try:
        return columns_mask(lm, sites, mask)
    except PatchclampError as error:
        raise error.under("--mask") from None


def fill_bank(lm: LM, bank: Path | None) -> None:
    """Takes what a file has into the model's bank."""
    if bank is not None:
        lm.bank.load(bank)


def _numbers(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ProgramError(f"{path} has no numbers that NumPy saved: {error}", "--mask") from None
