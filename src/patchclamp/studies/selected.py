"""Which layers and positions a study is asked for, as numbers."""

from __future__ import annotations

from typing import Any

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, TokensError, UnsupportedSite
from patchclamp.language import Range, Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.tokens import Tokens, parse_index, parse_tokens
from patchclamp.language.values import as_plain
from patchclamp.lm import LM
from patchclamp.run import Run


def layers_of(lm: LM, name: str, layers: Any, path: str = "layers") -> list[int]:
    """The layers of a site word that are asked for, ascending: a number, a list, a range or text such as "0:12"; all
    that have the site if None. Raises `UnsupportedSite` for layers that do not have it."""
    index = parse_index(layers) if isinstance(layers, str) else layers
    asked = list(index) if isinstance(index, (list, tuple, range)) else [index]
    try:
        refs = [
            ref
            for one in asked
            for ref in lm.sites.resolve(Site(name, Range.of(one) if isinstance(one, slice) else one))
        ]
    except PatchclampError as error:
        raise error.under(path) from None
    if not (numbers := sorted({ref.layer for ref in refs if ref.layer is not None})):
        raise UnsupportedSite(f"expected layers of {name}, got none", path)
    return numbers


def positions_of(run: Run, positions: Any, path: str = "positions") -> list[int]:
    """The positions of a run's prompt that are asked for, in their order: a selection, a number, or a list of either;
    all if None. Raises `TokensError` for positions that are not in the prompt."""
    if positions is None:
        return list(range(len(run.prompt_token_ids)))
    chosen: list[int] = []
    positions = as_plain(positions, path)
    several = isinstance(positions, (list, tuple))
    for i, one in enumerate(positions if several else [positions]):
        try:
            chosen += [int(p) for p in run.select(selection(one))]
        except PatchclampError as error:
            raise error.under(f"{path}[{i}]" if several else path) from None
    if not chosen:
        raise TokensError("no position of the prompt is selected", path)
    return list(dict.fromkeys(chosen))


def selection(text: Any) -> Tokens:
    """A selection; numbers and ranges are positions of the prompt."""
    if isinstance(text, range):
        text = slice(text.start, text.stop, text.step)
    return whole_prompt[text] if is_token_id(text) or isinstance(text, (slice, list, tuple)) else parse_tokens(text)
