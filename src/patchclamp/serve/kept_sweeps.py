"""What sweeps computed, by owner and name, so that one whose client went away can go on: in memory, for some minutes.

An API process has its own: where there are several, a sweep that is asked for again may begin anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from patchclamp.engines.vllm.serve_limits import ServeLimits
from patchclamp.serve.kept import check_name
from patchclamp.studies.study import MemoryJournal

ENDS_WITHIN_S = 10.0  # a sweep whose client went away and asks again


class KeptSweeps:
    """The journals of each owner's sweeps. Used on the event loop's thread alone."""

    def __init__(self, limits: ServeLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._journals: dict[tuple[str, str], MemoryJournal] = {}
        self._touched_s: dict[tuple[str, str], float] = {}

    def journal(self, owner: str, name: str) -> MemoryJournal:
        """The journal of that name, a new one if there is none.

        Raises `CapacityError` where the owner has too many, and `ProgramError` for what is no name.
        """
        key = owner, check_name(name, "resume")
        self._drop_old()
        if key not in self._journals:
            count = sum(of == owner for of, _ in self._journals)
            self._limits.check_room("kept_sweeps", count, 1, "sweeps that can go on", "resume")
            self._journals[key] = MemoryJournal(ENDS_WITHIN_S)
        self._touched_s[key] = self._clock()
        return self._journals[key]

    def ended(self, owner: str, name: str) -> None:
        """The sweep of that name has ended: it is kept for so long from now on, unless nothing was computed."""
        key = owner, name
        if key in self._journals:
            self._touched_s[key] = self._clock()
            if self._journals[key].is_empty and not self._journals[key].is_open:
                self._drop(key)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._limits.run_ttl_s
        for key in [key for key, journal in self._journals.items() if not journal.is_open]:
            if self._touched_s[key] < oldest:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        del self._journals[key], self._touched_s[key]
