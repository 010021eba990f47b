"""Steering vectors: directions from contrasting prompts, the layer where they tell prompts apart best, and what a model
does as they are added more and more."""

from patchclamp.studies.steering.result import SteeringVectors
from patchclamp.studies.steering.strengths import StrengthCurve, strength_curve
from patchclamp.studies.steering.vectors import steering_vectors

__all__ = ["SteeringVectors", "StrengthCurve", "steering_vectors", "strength_curve"]
