"""The language: sites, tokens, ops, values and programs; frozen, hashable, with text forms. No torch."""

from patchclamp.language import ops
from patchclamp.language.ops import *  # noqa: F403  whose `__all__` names the ops
from patchclamp.language.ops import Op, Readout, SiteOp
from patchclamp.language.program import Program
from patchclamp.language.sae import SAE
from patchclamp.language.site import SITES, SPECS, At, Site, SiteSpec, parse_site
from patchclamp.language.tokens import (
    Between,
    ImageTokens,
    Positions,
    Range,
    Role,
    TextSpan,
    TokenIds,
    Tokens,
    between,
    every,
    generated,
    image,
    parse_tokens,
    prompt,
    role,
    span,
    token,
)  # fmt: skip
from patchclamp.language.values import From, Named, SameRun, Value, Vector

__all__ = [
    "SAE", "SITES", "SPECS", "At", "Between", "From", "ImageTokens", "Named", "Op", "Positions", "Program", "Range",
    "Readout", "Role", "SameRun", "Site", "SiteOp", "SiteSpec", "TextSpan", "TokenIds", "Tokens", "Value", "Vector",
    "between", "every", "generated", "image", "parse_site", "parse_tokens", "prompt", "role", "span", "token",
]  # fmt: skip
__all__ += ops.__all__
