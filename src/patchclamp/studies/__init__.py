"""ASK: questions made of many runs. One function to one frozen result; they know an `LM`, never vLLM."""

from patchclamp.studies.ablation_sweep import ablation_sweep
from patchclamp.studies.causal_trace import causal_trace
from patchclamp.studies.fuzz import FuzzAnswer, FuzzSweep, fuzz_sweep
from patchclamp.studies.harvest import Filters, Harvest, Harvested, Project, harvest
from patchclamp.studies.parity import parity
from patchclamp.studies.parity_result import Parity
from patchclamp.studies.patch_sweep import patch_sweep
from patchclamp.studies.path_patch import path_patch
from patchclamp.studies.recipes import Recipes, compare_recipes
from patchclamp.studies.sources import Banked, MeanOf, Resampled, Zeros
from patchclamp.studies.steering import SteeringVectors, StrengthCurve, steering_vectors, strength_curve
from patchclamp.studies.sweep_result import AblationSweep, CausalTrace, Cell, Column, PatchSweep, PathPatch

__all__ = [
    "AblationSweep", "Banked", "CausalTrace", "Cell", "Column", "Filters", "FuzzAnswer", "FuzzSweep", "Harvest",
    "Harvested", "MeanOf", "Parity", "PatchSweep", "PathPatch", "Project", "Recipes", "Resampled", "SteeringVectors",
    "StrengthCurve", "Zeros", "ablation_sweep", "causal_trace", "compare_recipes", "fuzz_sweep", "harvest", "parity",
    "patch_sweep", "path_patch", "steering_vectors", "strength_curve",
]  # fmt: skip
