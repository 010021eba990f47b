"""ASK: questions made of many runs. One function to one frozen result; they know an `LM`, never vLLM."""

from patchclamp.studies.ablation_sweep import ablation_sweep
from patchclamp.studies.attribution_patching import AttributionPatchingResult, attribution_patching
from patchclamp.studies.causal_trace import causal_trace
from patchclamp.studies.direct_attribution import DirectAttributionResult, direct_attribution
from patchclamp.studies.edge_attribution import EdgeAttributionResult, edge_attribution
from patchclamp.studies.fuzz import FuzzAnswer, FuzzSweepResult, fuzz_sweep
from patchclamp.studies.harvest import Filters, Harvest, Harvested, Project, harvest
from patchclamp.studies.logit_lens import LogitLensResult, logit_lens
from patchclamp.studies.parity import Parity, parity
from patchclamp.studies.patch_sweep import patch_sweep
from patchclamp.studies.patchscope import PatchscopeResult, patchscope
from patchclamp.studies.path_patch import path_patch
from patchclamp.studies.sources import Banked, MeanOf, Resampled, Zeros
from patchclamp.studies.steering import SteeringVectors, StrengthCurveResult, steering_vectors, strength_curve
from patchclamp.studies.sweep_result import AblationSweepResult, CausalTraceResult, Cell, Column, PatchSweepResult, PathPatchResult

__all__ = [
    "AblationSweepResult", "AttributionPatchingResult", "Banked", "CausalTraceResult", "Cell", "Column", "DirectAttributionResult",
    "EdgeAttributionResult", "Filters", "FuzzAnswer", "FuzzSweepResult", "Harvest", "Harvested", "LogitLensResult", "MeanOf",
    "Parity", "PatchSweepResult", "PatchscopeResult", "PathPatchResult", "Project", "Resampled", "SteeringVectors",
    "StrengthCurveResult", "Zeros", "ablation_sweep", "attribution_patching", "causal_trace",
    "direct_attribution", "edge_attribution", "fuzz_sweep", "harvest", "logit_lens", "parity", "patch_sweep",
    "patchscope", "path_patch", "steering_vectors", "strength_curve",
]  # fmt: skip
