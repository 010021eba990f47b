"""Saved values. Inside the trace a saved value is a tensor that nothing can read; after it, it is a plain
`torch.Tensor` on the CPU, with memory of its own.

The same object is both, as a lazy parameter of PyTorch's is: when its numbers come, its class changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from patchclamp.errors import MissingSource, PatchclampError, ProgramError, ShapeError, TokensError, near
from patchclamp.language.site import Site, parse_site
from patchclamp.language.tokens import Tokens
from patchclamp.trace.arithmetic import READS, Arithmetic, Expression, function_name, refuse_attribute
from patchclamp.trace.lines import Line, callers_line

if TYPE_CHECKING:
    from patchclamp.run import Run
    from patchclamp.trace.recording import Entry, Recording


class Pending(Arithmetic, torch.Tensor):
    """A saved value that is not there yet. It can be written elsewhere in the trace, and computed with as any value."""

    saved: Saved

    def expression(self) -> Expression:
        self.saved.raise_failure()
        return self.saved.expression

    def check_to_come(self) -> None:
        self.saved.raise_failure()

    def clone(self, *_: Any, **__: Any) -> Any:
        return self.expression()

    def save(self) -> Pending:
        return self

    def __getitem__(self, key: Any) -> NoReturn:
        self.saved.raise_failure()
        raise ProgramError(
            f"{self.saved.name} is saved, and has no numbers before the trace ends: index it then, or before .save()"
        )

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self.__getitem__(key)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if name == "repr":
            return f"<{args[0].saved.name}, once the trace has ended>"
        for arg in args:
            if isinstance(arg, Pending):
                arg.saved.raise_failure()
        if name in READS:
            return args[0].expression()
        if name == "get":  # an attribute
            refuse_attribute(getattr(getattr(func, "__self__", None), "__name__", "attribute"), ("save", *READS))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """What does not come by `__torch_function__`: `torch.tensor(value)` and its like, which copy."""
        for arg in args:
            if isinstance(arg, Pending):
                arg.saved.raise_failure()
        raise ProgramError(
            "a saved value has no numbers before the trace ends, and cannot be copied into another tensor: do it then"
        )

    @classmethod
    def new(cls, saved: Saved) -> Pending:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            pending = torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=torch.float32, device=torch.device("cpu"))
        pending.saved = saved
        return pending


class Saved:
    """One `.save()`: the expression, the line, and the tensor that the caller holds."""

    def __init__(self, expression: Expression, line: Line) -> None:
        self.expression, self.line = expression, line
        self.failure: PatchclampError | None = None
        self.tensor = Pending.new(self)
        self.name = " + ".join(str(term.read.spot) for term in expression.terms) or "numbers"

    @property
    def recordings(self) -> list[Recording]:
        return [term.read.recording for term in self.expression.terms]

    def raise_failure(self) -> None:
        """Raises if the value cannot come any more."""
        if self.failure is not None:
            raise self.failure
        for recording in self.recordings:
            check_to_come(recording, self.name)

    def fill(self, value: torch.Tensor) -> None:
        """Makes the tensor that the caller holds a plain one with these numbers, which nobody else has."""
        tensor: Any = self.tensor
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            try:
                torch.utils.swap_tensors(tensor, value.detach().clone())
            except RuntimeError as error:
                raise ProgramError(
                    f"{self.name} cannot be filled in while something refers to it, such as a weak reference: {error}"
                ) from None


def check_to_come(recording: Recording, name: str) -> None:
    """Raises where what is saved of a recording never comes, or only once something is done."""
    if recording.state == "left":
        raise MissingSource(f"{name} was not read: an error left the trace before it ran")
    if recording.state == "new":
        raise ProgramError(f"{name} was not read: a trace runs at the end of its block, `with lm.trace(prompt) as t:`")
    if recording.state == "waiting":
        raise ProgramError(f"{name} was not read: a trace with stream=True runs when it is iterated, `for part in t`")
    if recording.state == "streaming":
        raise ProgramError(f"{name} is there after the last part: t.so_far(value) has what has come by now")


def save(expression: Expression) -> Pending:
    """Asks for the value of an expression after the trace."""
    if not expression.terms:
        raise ProgramError("only numbers are saved here, and nothing of the model")
    saved = Saved(expression, callers_line())
    for term in expression.terms:
        term.read.want(expression.terms[0].read.recording)
    expression.terms[0].read.recording.saved.append(saved)
    return saved.tensor


def value_of(expression: Expression, rows: Mapping[Entry, torch.Tensor]) -> torch.Tensor:
    """The expression of the rows that its reads have given."""
    if expression.is_one_read:
        return rows[expression.terms[0].read]
    total: Any = torch.as_tensor(expression.constant)
    try:
        for read, factor in expression.terms:
            total = total + rows[read] * torch.as_tensor(factor)
    except RuntimeError as error:
        raise ShapeError(f"expected numbers in the shape of what is read: {error}") from None
    return total


def rows_of(entry: Entry, run: Run, path: str) -> torch.Tensor:
    """What a read's `Capture`, at `path` in the program of its run, kept: in the shape of the read's spot."""
    captured = torch.as_tensor(run.read(path, copy=False))
    index = {position: row for row, position in enumerate(run.positions(path))}
    try:
        order = [index[p] for p in run.select(entry.op.tokens).tolist() if p in index]
    except TokensError:  # a number that the run did not come to
        order = []
    rows = captured if order == list(range(len(captured))) else captured[order]
    if not len(rows) and run.finish_reason is None:
        raise MissingSource(f"{entry.spot} has not come yet: {len(run.token_ids)} tokens were read")
    if not len(rows):
        raise MissingSource(f"{entry.spot}: the run ended after {len(run.token_ids)} tokens, so this one never came")
    rows = rows[0] if entry.spot.single else rows
    return rows[None] if entry.spot.batched else rows


class Cache(Mapping[str, torch.Tensor]):
    """What `t.cache(...)` saves: a tensor a site, by its name (`"resid_post[5]"`) or as a site (`pc.resid_post[5]`)."""

    def __init__(self, sites: list[Site], tokens: Tokens, line: Line, recording: Recording) -> None:
        self.sites, self.tokens, self.line, self.recording = sites, tokens, line, recording
        self.failure: PatchclampError | None = None
        self._rows: dict[str, torch.Tensor] | None = None

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        rows, name = self._filled(), str(parse_site(site))
        if name not in rows:
            raise MissingSource(f"{name} is not in this cache{near(name, rows)}; it has: {', '.join(rows)}")
        return rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def fill(self, run: Run, captured: Mapping[str, Any]) -> None:
        """Takes what a run captured at the sites, without positions that other captures added."""
        wanted, rows = run.select(self.tokens), {}
        for name, tensor in captured.items():
            chosen = np.flatnonzero(np.isin(run.positions(name), wanted))
            tensor = torch.as_tensor(tensor)
            rows[name] = (tensor if len(chosen) == len(tensor) else tensor[torch.as_tensor(chosen)]).clone()
        self._rows = rows

    def empty(self) -> Cache:
        """Another cache of the same."""
        return Cache(self.sites, self.tokens, self.line, self.recording)

    def _filled(self) -> dict[str, torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        if self._rows is None:
            check_to_come(self.recording, "the cache")
            raise ProgramError("the cache has nothing before the trace ends: read it then")
        return self._rows

    def __repr__(self) -> str:
        return f"<cache of {', '.join(map(str, self.sites))}>"
