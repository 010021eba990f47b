"""WHAT: the language. Sites, tokens, ops, values and programs; frozen, hashable, with text forms. No torch."""

from patchclamp.spec.ops import Add, Capture, Op, Replace, Zero
from patchclamp.spec.program import Program
from patchclamp.spec.site import SITES, At, Range, Site, site
from patchclamp.spec.tokens import Positions, TextSpan, Tokens, every, generated, prompt, span, tokens
from patchclamp.spec.values import From, Value, Vector

__all__ = [
    "SITES", "Add", "At", "Capture", "From", "Op", "Positions", "Program", "Range", "Replace", "Site", "TextSpan",
    "Tokens", "Value", "Vector", "Zero", "every", "generated", "prompt", "site", "span", "tokens",
]  # fmt: skip
