"""What can be wrong before a model is loaded, found before it is loaded: minutes earlier, and in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patchclamp.engines.open import NAMES
from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import parse_index, parse_tokens
from patchclamp.language.values import as_dtype
from patchclamp.plots import check_targets
from patchclamp.studies.fuzz import Fuzz, pattern_of, seeds_of, strengths_of
from patchclamp.studies.metric import grade
from patchclamp.studies.steering import check_method


def check_engine(name: str | None) -> None:
    """Raises `UnknownName` for an engine that there is not."""
    if name is not None and name not in NAMES:
        raise unknown("engine", name, NAMES, "engine")


def check_sweep(
    sites: Sequence[str],
    layers: str | None,
    positions: Sequence[int | str] | None,
    metric: str,
    foil: str | None,
    png: Path | None = None,
    html: Path | None = None,
) -> None:
    """Raises what the sweep or its pictures would raise minutes later, for all that no model is needed for."""
    grade(metric, (0,), None if foil is None else (1,))
    check_targets(png, html)
    for text in sites:
        _read(parse_site, text, "--site")
    if layers is not None:
        _read(parse_index, layers, "--layers")
    for text in positions or ():
        if isinstance(text, str):
            _read(parse_tokens, text, "--positions")


def check_harvest(sites: Sequence[str], dtype: str) -> None:
    """Raises what a harvest would raise for its sites and its dtype once the model is loaded."""
    for text in sites:
        _read(parse_site, text, "--site")
    _read(as_dtype, dtype, "--store")


def check_fuzz(
    strengths: Sequence[float] | None,
    seeds: Sequence[int] | None,
    sites: Sequence[str] | None,
    refusal: str | None,
    png: Path | None,
    html: Path | None,
) -> None:
    """Raises what a fuzz sweep or its pictures would raise minutes later, for all that no model is needed for."""
    Fuzz.of("noise", sites or None, True)
    strengths_of(strengths or None, ())
    seeds_of(seeds or (0,))
    pattern_of(refusal)
    check_targets(png, html)


def check_steer(
    method: str, site: str, layers: str | None, tokens: str, positive: int, negative: int, answer: str | None,
    foil: str | None, scored: bool, held_out: float, png: Path | None, html: Path | None,
) -> None:  # fmt: skip
    """Raises what making steering vectors or their pictures would raise minutes later, as far as no model is needed."""
    check_method(method, positive, negative)
    if answer is None and (foil is not None or scored):
        raise ProgramError("a behaviour is scored by a continuation that shows it: give --answer", "--answer")
    if not (held_out or scored) and (png or html):
        raise ProgramError("there is nothing to draw: give --prompts, or hold prompts out", "--held-out")
    _read(parse_site, site, "--site")
    _read(parse_tokens, tokens, "--tokens")
    if layers is not None:
        _read(parse_index, layers, "--layers")
    check_targets(png, html)


def _read(how: Callable[[str], Any], text: str, argument: str) -> None:
    try:
        how(text)
    except PatchclampError as error:
        raise error.under(argument) from None
