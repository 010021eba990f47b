"""Kernels that apply records to rows: `reference` (plain), `fused` (vectorized torch, for the CPU), `cuda` (Triton)."""
