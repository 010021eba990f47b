"""Completes patchclamp's part of vLLM's configuration, or rejects the configuration."""

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

ASKED = ("limits", "serve", "numerics")  # settings in our part of `additional_config` that a user may give
PARTS = (*ASKED, "version", "op", "taps", "table")


def complete(vllm_config: Any) -> None:
    """Complete our part of `additional_config`; `{"patchclamp": {}}` selects the defaults.

    It enters the key of vLLM's compile cache, so it includes everything that changes the graph. A server's limits do
    not change the graph, so they are removed (`configuration.serving`).

    Raises `EngineError`, with names and reasons, for a configuration that would break a guarantee, and `UnknownName`
    for an unknown setting.
    """
    ours = configuration.enabled(vllm_config)
    assert ours is not None
    for part in ours:
        if part not in PARTS:
            raise unknown("part of patchclamp's settings", part, ASKED, f"additional_config.patchclamp.{part}")
    configuration.check(vllm_config)
    asked = ours.get("numerics", "stock")
    base.check_numerics(asked)
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
    """Return a key of what taps leave in compiled code, for vLLM's cache: their source, and if layers share code."""
    digest = hashlib.sha256()
    for module in (taps, op, taps):
        digest.update(inspect.getsource(module).encode())
    return f"{digest.hexdigest()[:16]} {'shared' if switches.enabled('equal_layers') else 'apart'}"
