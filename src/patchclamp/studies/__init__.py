"""ASK: questions made of many runs. One function to one frozen result; they know an `LM`, never vLLM."""

from patchclamp.studies.harvest import Filters, Harvest, Harvested, Project, harvest
from patchclamp.studies.parity import parity
from patchclamp.studies.parity_result import Parity
from patchclamp.studies.patch_sweep import patch_sweep
from patchclamp.studies.recipes import Recipes, compare_recipes
from patchclamp.studies.sweep_result import Cell, Column, PatchSweep

__all__ = [
    "Cell", "Column", "Filters", "Harvest", "Harvested", "Parity", "PatchSweep", "Project", "Recipes",
    "compare_recipes", "harvest", "parity", "patch_sweep",
]  # fmt: skip
