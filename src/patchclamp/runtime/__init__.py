"""IN THE WORKER: admitted programs, the taps that carry them out, and what they leave."""

from patchclamp.runtime.runtime import Arrival, Limits, Runtime

__all__ = ["Arrival", "Limits", "Runtime"]
