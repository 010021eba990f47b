"""patchclamp records from, and intervenes on, the internals of a language model while stock vLLM serves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from patchclamp import language
from patchclamp.errors import (
    AddressMoved,
    CapacityError,
    EngineError,
    MissingSource,
    ModelError,
    PatchclampError,
    ProgramError,
    RunError,
    SeamMoved,
    ShapeError,
    TokensError,
    UnknownName,
    UnsupportedSite,
)
from patchclamp.language import (
    Ablate,
    Add,
    Apply,
    Capture,
    Clamp,
    From,
    Mean,
    Named,
    Noise,
    Program,
    Replace,
    Scale,
    Site,
    Use,
    Vector,
    Zero,
    every,
    generated,
    prompt,
    span,
    token,
)

if TYPE_CHECKING:
    from patchclamp import studies
    from patchclamp.engines.base import Part
    from patchclamp.lm import LM
    from patchclamp.run import Run
    from patchclamp.stream import Stream

__version__ = "0.1.0"

embed = Site("embed")
resid_pre = Site("resid_pre")
resid_mid = Site("resid_mid")
resid_post = Site("resid_post")
attn_in = Site("attn_in")
attn_out = Site("attn_out")
mlp_in = Site("mlp_in")
mlp_out = Site("mlp_out")
q = Site("q")
k = Site("k")
v = Site("v")
z = Site("z")
neurons = Site("neurons")
router = Site("router")
final_norm = Site("final_norm")
logits = Site("logits")
site = language.site
tokens = language.tokens

_LAZY = {
    "LM": ("patchclamp.lm", "LM"),
    "Part": ("patchclamp.engines.base", "Part"),
    "Run": ("patchclamp.run", "Run"),
    "Stream": ("patchclamp.stream", "Stream"),
    "studies": ("patchclamp.studies", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'patchclamp' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)


__all__ = [
    "LM",
    "Ablate",
    "Add",
    "AddressMoved",
    "Apply",
    "CapacityError",
    "Capture",
    "Clamp",
    "EngineError",
    "From",
    "Mean",
    "MissingSource",
    "ModelError",
    "Named",
    "Noise",
    "Part",
    "PatchclampError",
    "Program",
    "ProgramError",
    "Replace",
    "Run",
    "RunError",
    "Scale",
    "SeamMoved",
    "ShapeError",
    "Site",
    "Stream",
    "TokensError",
    "UnknownName",
    "UnsupportedSite",
    "Use",
    "Vector",
    "Zero",
    "attn_in",
    "attn_out",
    "embed",
    "every",
    "final_norm",
    "generated",
    "k",
    "logits",
    "mlp_in",
    "mlp_out",
    "neurons",
    "prompt",
    "q",
    "resid_mid",
    "resid_post",
    "resid_pre",
    "router",
    "site",
    "span",
    "studies",
    "token",
    "tokens",
    "v",
    "z",
]  # fmt: skip
