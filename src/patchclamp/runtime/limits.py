"""The sizes that bound a worker's tables, its bank, and what captures take on their way."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes. The last four count on a GPU only.

    max_programs: programs admitted at one time
    max_records: their records, one for each point and position range
    bank_bytes: bytes of vectors on the device
    kept_bytes: what a step with a CUDA graph may capture, at most half of `ring_bytes`; one that captures more runs
        without a graph
    ring_bytes: captures on their way off the device
    pinned_bytes: captures in pinned host memory; the oldest move to ordinary memory. None: a quarter of the memory that
        is free, and 4 to 32 GiB (`default_pinned_bytes`)
    active_sizes: the sizes of step, in tokens, for which graphs with taps are recorded; None: all that vLLM records.
        Steps of other sizes run without a graph if they have programs
    """

    max_programs: int = 256
    max_records: int = 1 << 18
    bank_bytes: int = 1 << 28
    kept_bytes: int = 1 << 27
    ring_bytes: int = 1 << 28
    pinned_bytes: int | None = None
    active_sizes: tuple[int, ...] | None = None
