"""Whether what a table made of modules says of a live model adds up: what attention and MLP give is what the stream
gains, and the embedding is what it starts with. No module's name says so."""

from __future__ import annotations

from typing import Any

import numpy as np

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ADDED: tuple[str, ...] = ("attn_out", "mlp_out")


def unexplained(lm: Any, base: Any) -> dict[str, str]:
    """The words whose rows in `base`, a run that captured everything, do not add up, and why."""
    names = lm.sites.names
    found: dict[str, str] = {}
    if not set(ADDED) <= set(names):
        found = {name: f"{name} alone cannot be seen to be what the stream gains" for name in ADDED if name in names}
    else:
        wrong = next((layer for layer in range(lm.sites.layers) if not _adds_up(lm, base, layer)), None)
        if wrong is not None:
            why = f"resid_pre[{wrong}] + attn_out[{wrong}] + mlp_out[{wrong}] is not resid_post[{wrong}]: "
            found = dict.fromkeys(ADDED, why + "it does something to them before it adds them")
    if "embed" in names and not _close(lm, [_rows(base, "embed")], _rows(base, "resid_pre[0]")):
        found["embed"] = "what its embedding gives is not resid_pre[0]: it scales it, or adds to it"
    return found


def _adds_up(lm: Any, base: Any, layer: int) -> bool:
    return _close(
        lm, [_rows(base, f"{name}[{layer}]") for name in ("resid_pre", *ADDED)], _rows(base, f"resid_post[{layer}]")
    )


def _close(lm: Any, terms: list[np.ndarray], total: np.ndarray) -> bool:
    """Whether terms add up to `total`, number by number, but for the rounding of each in the model's dtype."""
    slack = 2 * EPS[lm.model.dtype] * sum(np.abs(each) for each in (*terms, total))
    return bool((np.abs(sum(terms) - total) <= slack).all())


def _rows(base: Any, site: str) -> np.ndarray:
    return np.asarray(base[site]).astype(np.float64)
