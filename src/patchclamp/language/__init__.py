"""WHAT: the language. Sites, tokens, ops, values and programs; frozen, hashable, with text forms. No torch."""

from patchclamp.language.ops import Ablate, Add, Apply, Capture, Clamp, Mean, Noise, Op, Replace, Scale, Use, Zero
from patchclamp.language.program import Program
from patchclamp.language.site import SITES, At, Range, Site, site
from patchclamp.language.tokens import (
    Positions,
    TextSpan,
    TokenIds,
    Tokens,
    every,
    generated,
    prompt,
    span,
    token,
    tokens,
)
from patchclamp.language.values import From, Named, Value, Vector

__all__ = [
    "SITES", "Ablate", "Add", "Apply", "At", "Capture", "Clamp", "From", "Mean", "Named", "Noise", "Op", "Positions",
    "Program", "Range", "Replace", "Scale", "Site", "TextSpan", "TokenIds", "Tokens", "Use", "Value", "Vector", "Zero",
    "every", "generated", "prompt", "site", "span", "token", "tokens",
]  # fmt: skip
