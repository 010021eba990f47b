"""Fuzzing: noise of growing strength in a model's activations, and what it does to the answers."""

from patchclamp.studies.fuzz.result import FuzzAnswer, FuzzSweep
from patchclamp.studies.fuzz.sweep import fuzz_sweep

__all__ = ["FuzzAnswer", "FuzzSweep", "fuzz_sweep"]
