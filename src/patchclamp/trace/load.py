"""`pc.LM`: an `LM` that was proved (`proving.prove`), and that can be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from patchclamp.proving.prove import ProvedLM
from patchclamp.trace.hints import OF_A_MODEL, checked_names, hint

if TYPE_CHECKING:
    from patchclamp.trace.trace import Edit, Trace


class TracedLM(ProvedLM):
    __doc__ = ProvedLM.__doc__

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
        """`with lm.trace(prompt) as t:` reads and writes the model's tensors by name, and runs at the end of the block.

        prompt: text or token ids; without one, `with t.invoke(prompt) as a:` for each of several
        edits: ops that act before the trace's own, such as `pc.Use(name)` of an `lm.edit(name)`
        stream: run when the trace is iterated, after the block: `for part in t`
        The rest is as in `run`.

        Other arguments are refused, with what to write instead.
        Raises, at the line, for what a program cannot express; at the end, with the line, for what failed.
        """
        from patchclamp.trace.trace import Trace

        return Trace(
            self, prompt, messages=messages, max_tokens=max_tokens, edits=edits, sampling=sampling, score=score,
            logprobs=logprobs, lora=lora, stream=stream, **others,
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        raise hint(name, OF_A_MODEL, "LM") or AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def edit(self, name: str) -> Edit:
        """`with lm.edit("calm") as e:` records writes, at every token, as the program `lm.bank["calm"]`, which
        `pc.Use("calm")` puts into a run or a trace."""
        from patchclamp.trace.trace import Edit

        return Edit(self, name)
