"""WHAT: the language. Sites, tokens, ops, values and programs; frozen, hashable, with text forms. No torch."""

from patchclamp.language.ops import (
    Ablate,
    Add,
    Apply,
    Capture,
    Clamp,
    Mean,
    Noise,
    Op,
    Replace,
    Scale,
    SiteOp,
    Use,
    Zero,
)  # fmt: skip
from patchclamp.language.program import Program
from patchclamp.language.registry import SITES, SiteSpec
from patchclamp.language.site import At, Range, Site, parse_site
from patchclamp.language.tokens import (
    Positions,
    TextSpan,
    TokenIds,
    Tokens,
    every,
    generated,
    parse_tokens,
    prompt,
    span,
    token,
)  # fmt: skip
from patchclamp.language.values import From, Named, Value, Vector

__all__ = [
    "SITES", "Ablate", "Add", "Apply", "At", "Capture", "Clamp", "From", "Mean", "Named", "Noise", "Op", "Positions",
    "Program", "Range", "Replace", "Scale", "Site", "SiteOp", "SiteSpec", "TextSpan", "TokenIds", "Tokens", "Use",
    "Value", "Vector", "Zero", "every", "generated", "parse_site", "parse_tokens", "prompt", "span", "token",
]  # fmt: skip
