"""The bindings of one call: a program is bound once for all prompts of one length, where only their length counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from patchclamp.language import Apply, Program
from patchclamp.language.ops import SiteOp
from patchclamp.plan.bind import Code, Known, bind, is_positional
from patchclamp.plan.bound import BoundProgram
from patchclamp.plan.prompt import Prompt
from patchclamp.sites import SiteMap
from patchclamp.store.named import Source


class Binding(msgspec.Struct, frozen=True):
    """A program bound to a prompt, and what it reads: vectors by bank key, code by number, runs."""

    bound: BoundProgram | None = None
    vectors: dict[str, np.ndarray] = {}
    code: dict[int, Code] = {}
    sources: tuple[Source, ...] = ()


class Bindings:
    """Binds the programs of one call, which holds them, at `sites`; `source` finds the runs that they read, `bank` has
    names, `allow_code` says whether programs may have code, and `count` is `Known`'s."""

    def __init__(
        self, sites: SiteMap, source: Callable[[str], Source], bank: Mapping[str, Any], allow_code: bool,
        count: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._sites, self._source, self._bank, self._allow_code = sites, source, bank, allow_code
        self._known = Known(count)
        self._by_length: dict[tuple[int, int], Binding] = {}  # by program, and length of the prompt

    def of(self, program: Program, run: str, prompt: Prompt, max_tokens: int) -> Binding:
        """A program bound to a prompt, as a run of that key. Raises what `bind` raises."""
        if not program:
            return Binding()
        known = self._by_length.get((id(program), len(prompt.ids)))
        if known is not None and known.bound is not None:
            return msgspec.structs.replace(known, bound=msgspec.structs.replace(known.bound, run=run))
        vectors: dict[str, np.ndarray] = {}
        sources: dict[str, Source] = {}
        code: dict[int, Code] | None = {} if self._allow_code else None

        def source(key: str) -> Source:
            return sources.setdefault(key, self._source(key))

        bound = bind(program, run, prompt, max_tokens, self._sites, source, self._bank, vectors, code, self._known)
        binding = Binding(bound, vectors, code or {}, tuple(sources.values()))
        if is_of_length_alone(program):
            self._by_length[id(program), len(prompt.ids)] = binding
        return binding


def is_of_length_alone(program: Program) -> bool:
    """Whether a program binds alike to all prompts of one length: it selects by position, and runs no code."""
    return all(
        isinstance(op, SiteOp) and not isinstance(op, Apply) and is_positional(op.tokens) for _, op in program.ops
    )
