"""ASK: questions made of many runs. One function to one frozen result; they know an `LM`, never vLLM."""

from patchclamp.studies.attribution_patching import attribution_patching
from patchclamp.studies.attribution_result import AttributionPatching
from patchclamp.studies.direct_attribution import direct_attribution
from patchclamp.studies.direct_attribution_result import DirectAttribution
from patchclamp.studies.edge_attribution import edge_attribution
from patchclamp.studies.edge_result import EdgeAttribution
from patchclamp.studies.logit_lens import logit_lens
from patchclamp.studies.logit_lens_result import LogitLens
from patchclamp.studies.parity import parity
from patchclamp.studies.parity_result import Parity
from patchclamp.studies.patch_sweep import patch_sweep
from patchclamp.studies.patchscope import patchscope
from patchclamp.studies.patchscope_result import Patchscope
from patchclamp.studies.recipes import Recipes, compare_recipes
from patchclamp.studies.sweep_result import Cell, Column, PatchSweep

__all__ = [
    "AttributionPatching", "Cell", "Column", "DirectAttribution", "EdgeAttribution", "LogitLens", "Parity",
    "PatchSweep", "Patchscope", "Recipes", "attribution_patching", "compare_recipes", "direct_attribution",
    "edge_attribution", "logit_lens", "parity", "patch_sweep", "patchscope",
]  # fmt: skip
