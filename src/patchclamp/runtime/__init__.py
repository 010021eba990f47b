"""The worker's side: admitted programs, the taps that apply them, and their captures."""

from patchclamp.runtime.runtime import Arrival, Limits, Runtime

__all__ = ["Arrival", "Limits", "Runtime"]
