"""Studies: experiments that take many runs. A study is a frozen configuration with `run(lm)`, and a short form such as
`patch_sweep(lm, ...)`. Its result is frozen, and can be plotted, saved and loaded. Studies use an `LM`, never vLLM.

The imports below only help readers and editors: every study in this folder is exported automatically.
"""

import importlib
import pkgutil

from patchclamp.studies.ablation_sweep import AblationSweep, ablation_sweep
from patchclamp.studies.adapter_features import AdapterFeatures, AdapterFeaturesResult, adapter_features
from patchclamp.studies.attention_flow import (
    AttentionEdge,
    AttentionEdges,
    AttentionEdgesResult,
    AttentionRollout,
    AttentionRolloutResult,
    attention_edges,
    attention_rollout,
)
from patchclamp.studies.attribution_patching import AttributionPatching, AttributionPatchingResult, attribution_patching
from patchclamp.studies.causal_trace import CausalTrace, causal_trace
from patchclamp.studies.direct_attribution import DirectAttribution, DirectAttributionResult, direct_attribution
from patchclamp.studies.edge_attribution import EdgeAttribution, EdgeAttributionResult, edge_attribution
from patchclamp.studies.edge_sweep import EdgeSweep, EdgeSweepResult, edge_sweep
from patchclamp.studies.evaluate import Evaluate, EvaluateResult, Sample, evaluate
from patchclamp.studies.evaluate_sae import EvaluateSAE, EvaluateSAEResult, evaluate_sae
from patchclamp.studies.feature_attribution import (
    FeatureAttribution,
    FeatureAttributionResult,
    feature_attribution,
)
from patchclamp.studies.fit_lens import FitLens, FitLensResult, fit_lens, read_lens
from patchclamp.studies.fit_probe import FitProbe, FitProbeResult, fit_probe
from patchclamp.studies.fuzz import FuzzAnswer, FuzzSweep, FuzzSweepResult, fuzz_sweep
from patchclamp.studies.harvest import Filters, Harvest, Harvested, HarvestResult, Project, harvest
from patchclamp.studies.head_scores import HeadScore, HeadScores, HeadScoresResult, head_scores
from patchclamp.studies.inputs import Column, Match
from patchclamp.studies.logit_lens import LogitLens, LogitLensResult, logit_lens
from patchclamp.studies.metric import Logprobs, Metric
from patchclamp.studies.parity import Parity, parity
from patchclamp.studies.patch_sweep import PatchSweep, patch_sweep
from patchclamp.studies.patchscope import Patchscope, PatchscopeResult, patchscope
from patchclamp.studies.path_patch import PathPatch, path_patch
from patchclamp.studies.search import (
    REFUSALS,
    AnswerScore,
    KLDivergence,
    Measured,
    Objective,
    RefusalRate,
    Search,
    SearchResult,
    Space,
    TextScore,
    Uniform,
    search,
)
from patchclamp.studies.sources import Banked, MeanOf, Resampled, Zeros
from patchclamp.studies.steering import (
    Steering,
    SteeringVectors,
    StrengthCurve,
    StrengthCurveResult,
    steering_vectors,
    strength_curve,
)
from patchclamp.studies.study import Study, StudyResult, load
from patchclamp.studies.sweep_result import (
    AblationSweepResult,
    CausalTraceResult,
    Cell,
    PatchSweepResult,
    PathPatchResult,
)
from patchclamp.studies.top_contexts import TopContexts, TopContextsResult, top_contexts

__all__ = [
    "REFUSALS",
    "AblationSweep", "AblationSweepResult", "AdapterFeatures", "AdapterFeaturesResult", "AnswerScore", "AttentionEdge",
    "AttentionEdges", "AttentionEdgesResult", "AttentionRollout", "AttentionRolloutResult", "AttributionPatching",
    "AttributionPatchingResult", "Banked", "CausalTrace", "CausalTraceResult", "Cell", "Column", "DirectAttribution",
    "DirectAttributionResult", "EdgeAttribution", "EdgeAttributionResult", "EdgeSweep", "EdgeSweepResult", "Evaluate",
    "EvaluateResult", "EvaluateSAE", "EvaluateSAEResult", "FeatureAttribution", "FeatureAttributionResult", "Filters",
    "FitLens", "FitLensResult", "FitProbe", "FitProbeResult", "FuzzAnswer", "FuzzSweep", "FuzzSweepResult", "Harvest",
    "HarvestResult", "Harvested", "HeadScore", "HeadScores", "HeadScoresResult", "KLDivergence", "LogitLens",
    "LogitLensResult", "Logprobs", "Match", "MeanOf", "Measured", "Metric", "Objective", "Parity", "PatchSweep",
    "PatchSweepResult", "Patchscope", "PatchscopeResult", "PathPatch", "PathPatchResult", "Project", "RefusalRate",
    "Resampled", "Sample", "Search", "SearchResult", "Space", "Steering", "SteeringVectors", "StrengthCurve",
    "StrengthCurveResult", "Study", "StudyResult", "TextScore", "TopContexts", "TopContextsResult", "Uniform", "Zeros",
    "ablation_sweep", "adapter_features", "attention_edges", "attention_rollout", "attribution_patching",
    "causal_trace", "direct_attribution", "edge_attribution", "edge_sweep", "evaluate", "evaluate_sae",
    "feature_attribution", "fit_lens", "fit_probe", "fuzz_sweep", "harvest", "head_scores", "load", "logit_lens",
    "parity", "patch_sweep", "patchscope", "path_patch", "read_lens", "search", "steering_vectors", "strength_curve",
    "top_contexts",
]  # fmt: skip

STUDIES: dict[str, type[Study]] = {}  # every study, by class name

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    for _name, _value in vars(importlib.import_module(_found.name)).copy().items():
        _kind = getattr(_value, "study", None)  # set on short forms
        if isinstance(_kind, type) and _kind.__module__ == _found.name:
            STUDIES[_kind.__name__] = _kind
            globals().update({_name: _value, _kind.__name__: _kind})


def __dir__() -> list[str]:
    short_forms = (name for name, value in globals().items() if hasattr(value, "study") and not name.startswith("_"))
    return sorted({*__all__, *short_forms, *STUDIES})
