"""The plugin that vLLM loads in every process (`vllm.general_plugins`). It wraps vLLM's functions, and completes or
rejects patchclamp's section of a configuration. Engines without patchclamp are unaffected."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from patchclamp.engines import base
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.architecture import carried, find_sites
from patchclamp.engines.vllm.compat.runner import CELLS
from patchclamp.engines.vllm.monitors import monitors_of
from patchclamp.engines.vllm.server import CAUSES, ServeLimits, checked_rate, saes_of, set_apart
from patchclamp.errors import EngineError, SeamMoved, describe_error, unknown
from patchclamp.kernels import switches
from patchclamp.runtime import Limits, op, taps
from patchclamp.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# settings in our part of `additional_config` that a user may set
ASKED = ("limits", "serve", "numerics", "probes", "saes", "sae_precision", "check_rate")
PARTS = (*ASKED, "version", "op", "taps", "table")

problem: SeamMoved | None = None  # only engines with patchclamp raise it, at their start


class _Causes(logging.Handler):
    """Appends logged exceptions to a file, one per line, to report why a server's core failed."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            with contextlib.suppress(OSError), open(os.environ[CAUSES], "a") as file:
                file.write(" ".join(describe_error(record.exc_info[1]).split()) + "\n")


def register() -> None:
    """Wrap vLLM's configuration, model loading, compilation, prefix cache, engine core and output processor. Each
    wrapper first checks that the engine uses patchclamp."""
    global problem
    if os.environ.get(CAUSES):
        logging.getLogger("vllm").addHandler(_Causes(logging.ERROR))
    from patchclamp.engines.vllm import worker
    from patchclamp.engines.vllm.compat import clients, core, runner, variants

    try:
        clients.on_config(complete)
        runner.on_load(worker.attach, worker.answer)
        variants.on_compile()
        core.on_prefix_cache()
        core.on_core(worker.admission_of)
        clients.on_outputs()
    except SeamMoved as moved:
        problem = moved


def complete(vllm_config: VllmConfig) -> None:
    """Complete patchclamp's section of `additional_config`; `{"patchclamp": {}}` selects the defaults.

    The section is part of vLLM's compile-cache key, so it contains everything that changes the graph. A server's limits
    do not, so they are moved out (`server.set_apart`).

    Raises `EngineError`, with names and reasons, for a configuration that would break a guarantee, and `UnknownName`
    for an unknown setting.
    """
    if problem is not None:
        raise problem
    ours = configuration.enabled(vllm_config)
    assert ours is not None
    for part in ours:
        if part not in PARTS:
            raise unknown("patchclamp setting", part, ASKED, f"additional_config.patchclamp.{part}")
    configuration.check(vllm_config)
    probes = ours.get("probes") or []
    asked = ours.get("numerics", "uniform" if probes else "stock")
    base.check_numerics(asked)
    if probes:
        configuration.check_monitored(vllm_config, asked)
    try:
        limits = msgspec.convert(ours.get("limits", {}), Limits, strict=True)
        serving = msgspec.convert(ours.get("serve", {}), ServeLimits, strict=True)
    except msgspec.ValidationError as error:
        raise EngineError(f"engine options: {error}") from None
    saes = saes_of(ours.get("saes") or (), ours.get("sae_precision", "float32"))
    configuration.save_graphs(vllm_config)
    sites = find_sites(vllm_config)
    rate = checked_rate(ours.get("check_rate"), sites.unchecked)
    ours = set_apart(vllm_config, serving, monitors_of(probes, sites), saes, rate)
    wrong = configuration.unrecorded(vllm_config, limits.active_sizes or ())
    if wrong is not None:
        raise EngineError(wrong)
    most = 2 * configuration.model_facts(vllm_config)["max_num_seqs"]
    tapped = repr(sites.taps("vllm")).encode()
    ours.update(
        version=__version__,
        op=_op(),
        limits={**msgspec.to_builtins(limits), "max_programs": most, "cells": limits.cells or 2 * CELLS},
        numerics=asked,
        taps=hashlib.sha256(tapped).hexdigest()[:16],
        table=carried(sites),
    )


def _op() -> str:
    """Return a key for vLLM's compile cache: a hash of the taps' source, and "shared" if layers share code."""
    digest = hashlib.sha256()
    for module in (taps, op):
        digest.update(inspect.getsource(module).encode())
    return f"{digest.hexdigest()[:16]} {'shared' if switches.enabled('equal_layers') else 'apart'}"
