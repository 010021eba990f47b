"""Attention as a flow between tokens.

T tokens · L layers · H heads
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchclamp.language import Capture, Site, prompt
from patchclamp.language.tokens import TokensLike
from patchclamp.lm import LM
from patchclamp.run import Run

MAX_BYTES = 1 << 28  # of the patterns of one call


def by_layer(
    lm: LM, prompts: Sequence[list[int]], layers: Sequence[int], tokens: TokensLike, also: Sequence[str] = ()
) -> Iterator[tuple[int, list[Run]]]:
    """Yield each layer with runs of the prompts that captured its patterns from `tokens`, and its sites `also`. A call
    captures as many layers as `MAX_BYTES` hold. Runs are closed when the iterator advances past them."""
    size = 4 * lm.sites.sizes.heads * sum(len(ids) ** 2 for ids in prompts)
    together = max(MAX_BYTES // size, 1)
    for first in range(0, len(layers), together):
        some = layers[first : first + together]
        captures = [
            capture for layer in some
            for capture in (Capture(Site("pattern", layer), tokens), *(Site(name, layer) @ prompt for name in also))
        ]  # fmt: skip
        runs = lm.run(list(prompts), max_tokens=1, capture=captures)
        yield from ((layer, runs) for layer in some)
        for run in runs:
            run.close()
