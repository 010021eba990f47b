"""Diagnostics for an installation: the machine, the vLLM functions that patchclamp wraps, and one model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

import msgspec

from patchclamp.engines.base import Finding
from patchclamp.errors import PatchclampError
from patchclamp.lm import LM
from patchclamp.proving import Proof, prove
from patchclamp.version import __version__

PACKAGES = ("torch", "transformers")


class Report(msgspec.Struct, frozen=True):
    """The findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "problem")


def examine(model: str | None = None, engine: str | None = None, **options: Any) -> Report:
    """Check the machine and, given a `model`, an engine started with `options`. Startup errors become findings."""
    findings = [*_versions(), *_vllm(engine)]
    return Report((*findings, *(_model(model, engine, options) if model is not None else ())))


def _versions() -> list[Finding]:
    findings = [Finding("versions", "patchclamp", "ok", __version__),
                Finding("versions", "python", "ok", platform.python_version())]  # fmt: skip
    for package in PACKAGES:
        try:
            findings.append(Finding("versions", package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding("versions", package, "problem", "not installed", "pip install 'patchclamp[vllm]'"))
    return findings


def _vllm(engine: str | None) -> list[Finding]:
    if engine not in (None, "vllm"):
        return []
    if importlib.util.find_spec("vllm") is None:
        status = "problem" if engine == "vllm" else "note"
        return [Finding("versions", "vllm", status, "not installed: the transformers engine "
                        "runs the same programs, slowly", "pip install 'patchclamp[vllm]'")]  # fmt: skip
    try:
        from patchclamp.engines.vllm.report import machine, seams

        return [*machine(), *seams()]
    except (ImportError, OSError, RuntimeError) as error:  # a broken installation
        return [Finding("versions", "vllm", "problem", f"import failed: {error}", "reinstall it")]


def _model(model: str, engine: str | None, options: dict[str, Any]) -> list[Finding]:
    """Start an engine and prove its sites."""
    try:
        lm = LM(model, engine, **options)
    except PatchclampError as error:
        return [Finding("configuration", "start", "problem", str(error), "fix the reported problem and retry")]
    with lm:
        m = lm.model
        described = f"{m.family}, {m.layers} layers, width {m.d_model}, {m.dtype}, on {m.engine}"
        model_loads = Finding("configuration", "model", "ok", described)
        try:
            of_engine = list(lm.engine.report())
            proofs = prove(lm)
        except PatchclampError as error:
            return [model_loads, Finding("sites", "proof", "problem", str(error), "report this with the model's name")]
        configuration = [finding for finding in of_engine if finding.part == "configuration"]
        others = [finding for finding in of_engine if finding.part != "configuration"]
        return [model_loads, *configuration, *map(_site, proofs), *others]


def _site(proof: Proof) -> Finding:
    if not proof.holds:
        advice = "programs that use this site are refused; others work"
        return Finding("sites", proof.name, "problem", proof.note or "not proved", advice)
    layers = "" if proof.layers is None else f" in {proof.layers} layers"
    return Finding("sites", proof.name, "ok", f"proved{layers}: shape, no-op write, edit, order, sums")
