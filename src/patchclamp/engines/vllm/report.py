"""The doctor's findings about vLLM on this machine, and about a running engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

from patchclamp.engines.base import Finding
from patchclamp.engines.vllm import worker  # noqa: F401  with the modules that declare seams
from patchclamp.engines.vllm.compat import clients, configuration  # noqa: F401
from patchclamp.engines.vllm.compat.seams import CHECKED, SEAMS, version
from patchclamp.errors import SeamMoved
from patchclamp.runtime.cuda_graphs import can_cut

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MIB = 1 << 20


def machine() -> list[Finding]:
    """Check vLLM's version, the plugin's registration, and the GPU."""
    findings = [_version(), _plugin()]
    if not torch.cuda.is_available():
        return [*findings, Finding("versions", "GPU", "note", "not visible to PyTorch: vLLM's CPU build runs, slowly")]
    name, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
    findings.append(Finding("versions", "GPU", "ok", f"{name}, capability {capability}, CUDA {torch.version.cuda}"))
    if importlib.util.find_spec("triton") is None:
        findings.append(Finding("versions", "triton", "problem", "not installed", "pip install triton"))
    return [*findings, _bindings()]


def _version() -> Finding:
    if (installed := version()).split("+")[0] in CHECKED:
        return Finding("versions", "vllm", "ok", installed)
    return Finding("versions", "vllm", "note", f"{installed}; checked versions: {', '.join(CHECKED)}",
                   "it may work if every seam below is ok; otherwise install a checked version")  # fmt: skip


def _plugin() -> Finding:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    only = os.environ.get("VLLM_PLUGINS")
    if "patchclamp" not in {entry.name for entry in entries}:
        return Finding("versions", "plugin", "problem", "vLLM cannot find it among installed packages",
                       "install patchclamp with pip, in the environment that vLLM runs in")  # fmt: skip
    if only is not None and "patchclamp" not in only.split(","):
        return Finding("versions", "plugin", "problem", f"VLLM_PLUGINS={only!r} excludes it",
                       "unset VLLM_PLUGINS, or add patchclamp to it")  # fmt: skip
    return Finding("versions", "plugin", "ok", "registered with vLLM")


def _bindings() -> Finding:
    try:
        installed = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        installed = "not installed"
    if can_cut():
        return Finding("versions", "cuda-bindings", "ok", installed)
    return Finding("versions", "cuda-bindings", "note", f"{installed}: CUDA graphs are replayed with all their taps, "
                   "1 to 3 µs each, used or not", "pip install 'cuda-bindings>=13'")  # fmt: skip


def seams() -> list[Finding]:
    """Check that every wrapped function has a supported signature."""
    findings = []
    for seam in SEAMS:
        try:
            seam.found()
            findings.append(Finding("seams", seam.name, "ok", seam.why))
        except SeamMoved as moved:
            findings.append(Finding("seams", seam.name, "problem", str(moved), f"install vLLM {' or '.join(CHECKED)}"))
    return findings


def running(vllm_config: VllmConfig, status: dict[str, Any]) -> list[Finding]:
    """Return the findings about a running engine: its configuration, fusions, graphs and memory."""
    chosen = configuration.chosen(vllm_config) | {"runner": status["runner"].upper(), "workers": status["workers"]}
    findings = [Finding("configuration", name, "ok", str(value)) for name, value in chosen.items()]
    return [*findings, *_fusions(status, chosen["numerics"]), *_graphs(status), *_memory(status)]


def _fusions(status: dict[str, Any], numerics: str) -> list[Finding]:
    """Report each fusion pass's matches in the two variants. Active steps are slower if their variant has fewer
    matches. With uniform numerics there is only one variant."""
    if not status.get("fusions"):
        return [Finding("fusions", "passes", "note", "none counted: none apply here, or compiled code was cached",
                        "to count them, set VLLM_DISABLE_COMPILE_CACHE=1")]  # fmt: skip
    findings = []
    if numerics == "uniform":
        counts = sorted(status["fusions"].items())
        return [Finding("fusions", name, "ok", f"{tapped} matches, with taps") for name, (_, tapped) in counts]
    for name, (idle, tapped) in sorted(status["fusions"].items()):
        detail = f"{tapped} matches with taps, {idle} in stock code"
        less = tapped < idle
        advice = "active steps run without the others; idle steps run stock code" if less else ""
        findings.append(Finding("fusions", name, "note" if less else "ok", detail, advice))
    return findings


def _graphs(status: dict[str, Any]) -> list[Finding]:
    if "active_graphs" not in status:
        return [Finding("graphs", "variants", "note", "no CUDA graphs on this device")]
    if status["active_graphs_problem"]:
        return [Finding("graphs", "variants", "note", status["active_graphs_problem"],
                        "lower gpu_memory_utilization, or list fewer sizes in active_sizes")]  # fmt: skip
    detail = f"{status['active_graphs']} step sizes recorded with taps, {status['idle_graphs']} without"
    if not status["active_graphs"]:
        return [Finding("graphs", "variants", "note", detail, "they run without CUDA graphs; for speed, unset "
                        "enforce_eager and cudagraph_mode=NONE, and list sizes in active_sizes")]  # fmt: skip
    return [Finding("graphs", "variants", "ok", detail)]


def _memory(status: dict[str, Any]) -> list[Finding]:
    return [Finding("memory", name, "ok", f"{size / MIB:,.1f} MiB") for name, size in status["memory"].items()]
