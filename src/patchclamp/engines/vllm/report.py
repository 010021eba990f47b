"""What there is to say about vLLM on this machine, and about an engine of it that runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any

from patchclamp.engines.findings import Finding
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.seams import SEAMS, require, version
from patchclamp.errors import SeamMoved
from patchclamp.runtime.graphs import can_cut

CHECKED = tuple(sorted({checked for seam in SEAMS.values() for checked in seam.checked}))
MIB = 1 << 20


def machine() -> list[Finding]:
    """vLLM's version, the plugin's registration, and the GPU."""
    found = [_version(), _plugin()]
    try:
        import torch
    except ImportError as error:
        return [*found, Finding("versions", "torch", "problem", str(error), "pip install 'patchclamp[vllm]'")]
    if not torch.cuda.is_available():
        return [*found, Finding("versions", "GPU", "note", "none that PyTorch sees: vLLM's CPU build runs, slowly")]
    name, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
    found.append(Finding("versions", "GPU", "ok", f"{name}, capability {capability}, CUDA {torch.version.cuda}"))
    if importlib.util.find_spec("triton") is None:
        found.append(Finding("versions", "triton", "problem", "not installed", "pip install triton"))
    return [*found, _bindings()]


def _version() -> Finding:
    told = version()
    if told.split("+")[0] in CHECKED:
        return Finding("versions", "vllm", "ok", told)
    return Finding("versions", "vllm", "note", f"{told}, checked are {', '.join(CHECKED)}",
                   "it works if every seam below is found; otherwise install a version that was checked")  # fmt: skip


def _plugin() -> Finding:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    only = os.environ.get("VLLM_PLUGINS")
    if "patchclamp" not in {entry.name for entry in entries}:
        return Finding("versions", "plugin", "problem", "vLLM cannot find it among installed packages",
                       "install patchclamp with pip, in the environment that vLLM runs in")  # fmt: skip
    if only is not None and "patchclamp" not in only.split(","):
        return Finding("versions", "plugin", "problem", f"VLLM_PLUGINS={only!r} leaves it out",
                       "unset VLLM_PLUGINS, or name patchclamp in it")  # fmt: skip
    return Finding("versions", "plugin", "ok", "registered with vLLM")


def _bindings() -> Finding:
    try:
        told = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        told = "not installed"
    if can_cut():
        return Finding("versions", "cuda-bindings", "ok", told)
    return Finding("versions", "cuda-bindings", "note", f"{told}: CUDA graphs are replayed with all their taps, "
                   "1 to 3 µs each, used or not", "pip install 'cuda-bindings>=13'")  # fmt: skip


def seams() -> list[Finding]:
    """Every place where vLLM is entered."""
    found = []
    for seam in SEAMS.values():
        told = f"{seam.why}; {seam.checked_on}"
        try:
            require(seam.name)
            found.append(Finding("seams", seam.name, "ok", told))
        except SeamMoved as moved:
            found.append(Finding("seams", seam.name, "problem", str(moved), f"install vLLM {' or '.join(CHECKED)}"))
    return found


def running(vllm_config: Any, status: dict[str, Any]) -> list[Finding]:
    """An engine that runs: what it was configured to do, its fusions, graphs and memory."""
    chosen = configuration.chosen(vllm_config) | {"runner": status["runner"].upper(), "workers": status["workers"]}
    found = [Finding("configuration", name, "ok", str(value)) for name, value in chosen.items()]
    return [*found, *_fusions(status), *_graphs(status), *_memory(status)]


def _fusions(status: dict[str, Any]) -> list[Finding]:
    """Passes that match less often in code with taps than in stock's: what steps with programs run is that much slower;
    steps without run stock's."""
    if not status.get("fusions"):
        return [Finding("fusions", "passes", "note", "none counted: none apply here, or compiled code was cached",
                        "to count anew, set VLLM_DISABLE_COMPILE_CACHE=1")]  # fmt: skip
    found = []
    for name, (idle, tapped) in sorted(status["fusions"].items()):
        told = f"{tapped} matches with taps, {idle} in stock's code"
        less = tapped < idle
        advice = "steps with programs do without; steps without programs are stock's" if less else ""
        found.append(Finding("fusions", name, "note" if less else "ok", told, advice))
    return found


def _graphs(status: dict[str, Any]) -> list[Finding]:
    if "active_graphs" not in status:
        return [Finding("graphs", "variants", "note", "no CUDA graphs on this device")]
    if status["active_graphs_problem"]:
        return [Finding("graphs", "variants", "note", status["active_graphs_problem"],
                        "lower gpu_memory_utilization, or name fewer sizes in active_sizes")]  # fmt: skip
    told = f"{status['active_graphs']} sizes of step recorded with taps, {status['idle_graphs']} without"
    if not status["active_graphs"]:
        return [Finding("graphs", "variants", "note", told, "they run without CUDA graphs; for speed set "
                        "neither enforce_eager nor cudagraph_mode=NONE, and name sizes in active_sizes")]  # fmt: skip
    return [Finding("graphs", "variants", "ok", told)]


def _memory(status: dict[str, Any]) -> list[Finding]:
    return [Finding("memory", name, "ok", f"{size / MIB:,.1f} MiB") for name, size in status["memory"].items()]
