"""KEEP: the vectors that ops read, and the rows that captures leave."""

from patchclamp.store.bank import Bank
from patchclamp.store.captures import CaptureStore

__all__ = ["Bank", "CaptureStore"]
