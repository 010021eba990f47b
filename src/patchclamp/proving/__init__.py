"""PROVE: what a model's table says of its sites is shown on the live model, or the site is not offered."""

from patchclamp.proving.prove import Proof, ensure_proved, prove, push

__all__ = ["Proof", "ensure_proved", "prove", "push"]
