"""Seams: the functions of stock vLLM that this package wraps, each declared next to its wrapper.

A seam records the function's full signature in every supported version. If the installed vLLM differs, `SeamMoved` is
raised when an engine with patchclamp starts, never later. Pyright checks the other vLLM names that `compat` uses,
through vLLM's own classes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from patchclamp.errors import SeamMoved

F = TypeVar("F", bound=Callable[..., Any])
CHECKED = ("0.32.0", "0.33.0")  # the versions whose signatures were compared


class Seam(msgspec.Struct, frozen=True):
    """A vLLM function that patchclamp wraps.

    place: `module:function` or `module:Class.function`
    why: the reason for wrapping it
    forms: its parameters in each supported version: names, kinds and defaults, as in its `def` without annotations;
        empty if the wrapper accepts any
    part: the part of vLLM that needs the seam: the "v1" or "v2" runner, or "openai" for a server's routes; "": all
        engines
    """

    place: str
    why: str
    forms: tuple[str, ...]
    part: str = ""

    @property
    def name(self) -> str:
        """The function's name, with its class."""
        return self.place.partition(":")[2]

    def found(self) -> tuple[Any, str]:
        """Return the function's owner and its attribute name. Raises `SeamMoved` if it is missing or has different
        parameters."""
        module_name, _, path = self.place.partition(":")
        *outer, last = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
            for word in outer:
                owner = getattr(owner, word)
            self.compare(inspect.signature(getattr(owner, last)))
        except (ImportError, AttributeError, ValueError) as error:
            raise self._moved(f"{type(error).__name__}: {error}") from None
        return owner, last

    def compare(self, signature: inspect.Signature | None) -> None:
        """Raise `SeamMoved` unless a signature matches a declared form; None means that the function is missing."""
        if signature is None:
            raise self._moved("it is missing")
        if not self.forms:
            return
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        if difference := self.difference(str(signature.replace(parameters=bare, return_annotation=signature.empty))):
            raise self._moved(difference)

    def difference(self, found: str) -> str:
        """Describe how parameters, written as in a `def`, differ from all declared forms; "" if they match one."""
        parameters, differences = found.removeprefix("(").removesuffix(")").split(", "), []
        for form in self.forms:
            expected = form.split(", ")
            if parameters == expected:
                return ""
            new = [f"it has a new parameter {each}" for each in parameters if each not in expected]
            gone = [f"it has no parameter {each}" for each in expected if each not in parameters]
            differences.append("; ".join([*new, *gone]) or f"its parameters are in a different order: {found}")
        return min(differences, key=len)

    def wrap(self, wrapper: Callable[..., Any]) -> None:
        """Replace the function with `wrapper(stock, …)`, once per process."""
        owner, last = self.found()
        stock = getattr(owner, last)
        if hasattr(stock, "patchclamp_stock"):
            return
        _check_wrapper(stock, functools.partial(wrapper, stock))

        @functools.wraps(stock)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, *args, **kwargs)

        wrapped.patchclamp_stock = stock  # type: ignore[attr-defined]
        setattr(owner, last, wrapped)

    def stock(self) -> Callable[..., Any]:
        """Return the function without its wrapper."""
        function = getattr(*self.found())
        return getattr(function, "patchclamp_stock", function)

    def _moved(self, why: str) -> SeamMoved:
        checked = " and ".join(CHECKED)
        return SeamMoved(f"vLLM {version()}: {self.place}, needed to {self.why}: {why} (checked on {checked})")


SEAMS: list[Seam] = []  # in the order of their declarations; a module's are here once it is imported


def seam(place: str, why: str, *forms: str, part: str = "") -> Seam:
    """Declare a seam."""
    SEAMS.append(declared := Seam(place, why, forms, part))
    return declared


def require_all(part: str) -> None:
    """Raise `SeamMoved` if a seam of this part differs. "": the seams that all engines need."""
    for each in SEAMS:
        if each.part == part:
            each.found()


def version() -> str:
    import vllm

    return vllm.__version__


_FITTING: set[tuple[Any, Any]] = set()  # functions of vLLM, and the code of their wrappers


def forwards(stock: Any) -> Callable[[F], F]:
    """Mark a function as the wrapper of vLLM's `stock`, like `functools.wraps`. Raises `SeamMoved` if a call that
    `stock` accepts would fail on the wrapper."""

    def mark(ours: F) -> F:
        fit = getattr(stock, "__func__", stock), getattr(ours, "__code__", ours)  # the same for every request
        if fit not in _FITTING:
            _check_wrapper(stock, ours)
            _FITTING.add(fit)
        if isinstance(ours, FunctionType):  # a bound method has no attributes of its own
            functools.update_wrapper(ours, stock)
        return ours  # type: ignore[return-value]

    return mark


def _check_wrapper(stock: Any, ours: Any) -> None:
    """Raise `SeamMoved` unless a wrapper accepts every call that `stock` accepts, with equal defaults for the
    parameters that it names."""
    theirs, own = inspect.signature(stock), inspect.signature(ours)
    parameters = list(theirs.parameters.values())
    by_place = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = {each.name for each in parameters if each.default is each.empty}
    rest = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    first = 1 if by_place[:1] == ["self"] else 0  # the wrapper may use another name for `self`
    try:
        own.bind(*by_place, **dict.fromkeys(rest))
        own.bind(*by_place[:first], **dict.fromkeys([*by_place[first:], *rest]))
        own.bind(*(name for name in by_place if name in required), **dict.fromkeys(required.intersection(rest)))
        same = all(each.default == theirs.parameters[each.name].default for each in own.parameters.values()
                   if each.name in theirs.parameters and each.default is not each.empty)  # fmt: skip
    except TypeError:
        same = False
    if not same:
        raise SeamMoved(
            f"vLLM {version()}: {getattr(stock, '__qualname__', stock)} takes {theirs}, patchclamp's wrapper {own}"
        )
