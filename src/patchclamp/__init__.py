"""patchclamp records from, and intervenes on, the internals of a language model while stock vLLM serves it.

Public names: ops of programs (`Add`, `Replace`, …), selections (`prompt`, `generated`, …), every site of the registry
(`resid_post`, `z`, …), the errors, and the names that need an engine, which are imported at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patchclamp import language
from patchclamp.errors import (
    AddressMoved,
    CapacityError,
    EngineError,
    Gone,
    Mislabelled,
    MissingSource,
    ModelError,
    NameTaken,
    NoKey,
    NotFinite,
    PatchclampError,
    ProgramError,
    RunError,
    SeamMoved,
    ShapeError,
    TokensError,
    TooLarge,
    UnknownName,
    Unlisted,
    UnsupportedSite,
    UnsupportedStudy,
)  # fmt: skip
from patchclamp.language import (
    SAE,
    From,
    Named,
    Program,
    SameRun,
    Site,
    Vector,
    between,
    every,
    generated,
    image,
    ops,
    prompt,
    role,
    span,
    token,
)
from patchclamp.language.ops import *  # noqa: F403
from patchclamp.version import __version__

if TYPE_CHECKING:
    from patchclamp import studies
    from patchclamp.engines.base import Part
    from patchclamp.engines.grading import Grades
    from patchclamp.exporting import export
    from patchclamp.language.tokens import Tokens, TokensLike
    from patchclamp.run import Run
    from patchclamp.stream import Stream
    from patchclamp.trace import TracedLM as LM

    # the sites of `language.SPECS`, for type checkers and editors
    embed: Site
    resid_pre: Site
    attn_in: Site
    q: Site
    k: Site
    v: Site
    attn_scores: Site
    pattern: Site
    z: Site
    attn_out: Site
    mixer_out: Site
    resid_mid: Site
    mlp_in: Site
    router: Site
    neurons: Site
    mlp_out: Site
    resid_post: Site
    final_norm: Site
    logits: Site

site: Callable[..., Site] = language.parse_site
tokens: Callable[[TokensLike], Tokens] = language.parse_tokens
globals().update({name: Site(name) for name in language.SPECS})  # pc.embed, pc.resid_pre, ...

_LAZY = {
    "LM": ("patchclamp.trace", "TracedLM"),
    "Grades": ("patchclamp.engines.grading", "Grades"),
    "Part": ("patchclamp.engines.base", "Part"),
    "Run": ("patchclamp.run", "Run"),
    "Stream": ("patchclamp.stream", "Stream"),
    "export": ("patchclamp.exporting", "export"),
    "studies": ("patchclamp.studies", None),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'patchclamp' has no attribute {name!r}")
    path, attribute = _LAZY[name]
    module = importlib.import_module(path)
    return module if attribute is None else getattr(module, attribute)


__all__ = [
    "LM",
    "SAE",
    "AddressMoved",
    "CapacityError",
    "EngineError",
    "From",
    "Gone",
    "Grades",
    "Mislabelled",
    "MissingSource",
    "ModelError",
    "NameTaken",
    "Named",
    "NoKey",
    "NotFinite",
    "Part",
    "PatchclampError",
    "Program",
    "ProgramError",
    "Run",
    "RunError",
    "SameRun",
    "SeamMoved",
    "ShapeError",
    "Site",
    "Stream",
    "TokensError",
    "TooLarge",
    "UnknownName",
    "Unlisted",
    "UnsupportedSite",
    "UnsupportedStudy",
    "Vector",
    "__version__",
    "between",
    "every",
    "export",
    "generated",
    "image",
    "prompt",
    "role",
    "site",
    "span",
    "studies",
    "token",
    "tokens",
]  # fmt: skip
__all__ += ops.__all__
__all__ += list(language.SPECS)
