"""The tracing interface: interventions written as reads and writes of the model's tensors.

`lm.trace(prompt)` returns proxies of those tensors (`proxies`), which record each operation as an op of the language
(`recording`). At the end of the `with` block `trace` schedules the programs, runs them with `lm.run`, and fills in the
saved tensors. The caller's source is never parsed or rewritten.

`pc.LM` is `TracedLM`: a proved `LM` (`proving.ProvedLM`) with traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from patchclamp.proving import ProvedLM
from patchclamp.trace.hints import OF_A_MODEL, checked_names

if TYPE_CHECKING:
    from patchclamp.trace.trace import Edit, Trace


class TracedLM(ProvedLM):
    __doc__ = ProvedLM.__doc__

    if not TYPE_CHECKING:  # type checkers see the signatures of `LM`
        run = checked_names(ProvedLM.run, "lm.run")
        arun = checked_names(ProvedLM.arun, "lm.arun")
        stream = checked_names(ProvedLM.stream, "lm.stream")

    def trace(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: list[Any] | None = None,
        max_tokens: int = 1,
        edits: Any = (),
        sampling: dict[str, Any] | None = None,
        score: Sequence[int] = (),
        logprobs: bool | int = False,
        lora: Any = None,
        stream: bool = False,
        **others: Any,
    ) -> Trace:
        """Record reads and writes of the model's tensors in `with lm.trace(prompt) as t:`, and run them when it ends.

        prompt: text or token ids; for several prompts, omit it and use `with t.invoke(prompt) as a:` for each
        edits: ops applied before the trace's own ops, such as `pc.Use(name)` of an `lm.edit(name)`
        stream: run when the trace is iterated, after the block: `for part in t`
        Other arguments are as in `run`; an unknown name raises `UnknownName` and suggests a replacement.

        A line that no program can express raises at once. A run's error is raised with its line at the block's end.
        """
        from patchclamp.trace.trace import Trace

        return Trace(
            self, prompt, messages=messages, max_tokens=max_tokens, edits=edits, sampling=sampling, score=score,
            logprobs=logprobs, lora=lora, stream=stream, **others,
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        instead = f": {OF_A_MODEL[name]}" if name in OF_A_MODEL else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def edit(self, name: str) -> Edit:
        """Record a named program: `with lm.edit("calm") as e:` stores the block's writes, which act at every token, as
        `lm.bank["calm"]`. `pc.Use("calm")` applies the program in a run or a trace."""
        from patchclamp.trace.trace import Edit

        return Edit(self, name)
