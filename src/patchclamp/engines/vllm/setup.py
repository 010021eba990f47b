"""Fills in our part of vLLM's configuration, or refuses the configuration."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import msgspec

from patchclamp.engines import base
from patchclamp.engines.vllm.architecture import carried, find_sites
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.serve_limits import ServeLimits
from patchclamp.errors import EngineError, unknown
from patchclamp.kernels import switches
from patchclamp.runtime import Limits, op, taps
from patchclamp.version import __version__

ASKED = ("limits", "serve", "numerics")  # parts of our part of `additional_config` that a user gives
PARTS = (*ASKED, "version", "op", "taps", "table")


def complete(vllm_config: Any) -> None:
    """Makes our part of `additional_config` whole; `{"patchclamp": {}}` asks for everything by default.

    It enters the key of vLLM's compile cache, so it has all that changes the graph. What a server allows its callers
    changes nothing there: it is taken out (`configuration.serving`).

    Raises `EngineError`, with names and reasons, for a configuration under which a guarantee would not hold, and
    `UnknownName` for what we do not know.
    """
    ours = configuration.enabled(vllm_config)
    assert ours is not None
    for part in ours:
        if part not in PARTS:
            raise unknown("part of patchclamp's settings", part, ASKED, f"additional_config.patchclamp.{part}")
    configuration.check(vllm_config)
    asked = ours.get("numerics", "stock")
    base.check(asked)
    try:
        limits = msgspec.convert(ours.get("limits", {}), Limits, strict=True)
        serving = msgspec.convert(ours.get("serve", {}), ServeLimits, strict=True)
    except msgspec.ValidationError as error:
        raise EngineError(f"engine options: {error}") from None
    configuration.save_graphs(vllm_config)
    ours = configuration.set_serving(vllm_config, serving)
    wrong = configuration.unrecorded(vllm_config, limits.active_sizes or ())
    if wrong is not None:
        raise EngineError(wrong)
    most = 2 * configuration.model_facts(vllm_config)["max_num_seqs"]
    sites = find_sites(vllm_config)
    tapped = repr(sites.taps("vllm")).encode()
    ours.update(
        version=__version__,
        op=_op(),
        limits={**msgspec.to_builtins(limits), "max_programs": most},
        numerics=asked,
        taps=hashlib.sha256(tapped).hexdigest()[:16],
        table=carried(sites),
    )


def _op() -> str:
    """What taps leave in compiled code, for the key of vLLM's cache: how they are made, and if layers share it."""
    digest = hashlib.sha256()
    for module in (taps, op, taps):
        digest.update(inspect.getsource(module).encode())
    return f"{digest.hexdigest()[:16]} {'shared' if switches.enabled('equal_layers') else 'apart'}"
