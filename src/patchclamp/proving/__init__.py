"""PROVE: checks each site of a model's table on the live model; a site that fails is not offered."""

from patchclamp.proving.prove import Proof, ensure_proved, prove, push

__all__ = ["Proof", "ensure_proved", "prove", "push"]
