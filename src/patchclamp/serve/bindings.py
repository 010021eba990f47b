"""Programs that requests bring again and again, each bound once for all prompts of one length."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from patchclamp.language import Program
from patchclamp.lm import LM
from patchclamp.plan.bind import Binding, Bindings, is_of_length_alone
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.table import record_count
from patchclamp.serve.kept import Kept

MAX_KNOWN = 256
MAX_VECTOR_BYTES = 1 << 17  # of a binding that is remembered


class KnownBindings:
    """Binds programs to prompts, with what their owners have kept. What it remembers of an owner's program holds until
    something else is in the owner's bank; a program that reads runs is bound anew each time."""

    def __init__(self, lm: LM, kept: Kept) -> None:
        self._lm, self._kept, self._lock = lm, kept, threading.Lock()
        self._known: dict[tuple[str, int, Program, int, int], Binding] = {}

    def of(self, owner: str, program: Program, run: str, prompt: Prompt, max_tokens: int) -> Binding:
        """A program bound to a prompt, as a run of that key. Raises what `bind` raises."""
        return self.job(owner, program, prompt, max_tokens)(run)

    def job(
        self, owner: str, program: Program, prompt: Prompt, max_tokens: int,
        count: Callable[[int], None] = lambda records: None,
    ) -> Callable[[str], Binding]:  # fmt: skip
        """A function from a run's key to its binding, safe on any thread. Names refer to what the owner keeps now.

        count: called with the number of records of each op; an exception that it raises ends binding
        """
        owned = self._kept.owned(owner)
        version = self._kept.bank_version(owner)

        def bind(run: str) -> Binding:
            key = owner, version, program, len(prompt.ids), max_tokens
            with self._lock:
                known = self._known.get(key)
            if known is not None and known.bound is not None:
                count(record_count(known.bound.ops))
                return msgspec.structs.replace(known, bound=msgspec.structs.replace(known.bound, run=run))
            binding = Bindings(self._lm.sites, owned.source, owned, False, count).of(program, run, prompt, max_tokens)
            small = sum(rows.nbytes for rows in binding.vectors.values()) <= MAX_VECTOR_BYTES
            if small and not binding.sources and is_of_length_alone(program):
                with self._lock:
                    self._known[key] = binding
                    if len(self._known) > MAX_KNOWN:
                        del self._known[next(iter(self._known))]
            return binding

        return bind
