"""Arithmetic on values of a trace: sums of reads times numbers, plus numbers. All else is refused where it is written.

A program can add, scale and replace rows, and no more. So what is recorded is always Σ factor · read + constant.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, near
from patchclamp.trace.spots import numbers

if TYPE_CHECKING:
    from patchclamp.trace.recording import Entry

Number = float | np.ndarray
INSTEAD = (
    "save it and compute after the trace, in two traces if the result is to be written, or write it with .apply(fn), "
    "Python on the rows, on a local engine with allow_code=True"
)
READS = ("clone", "detach", "cpu", "float")  # of a tensor: the value here, as it is saved anyhow
KNOWN = ("save", "shape", *READS)


class Term(NamedTuple):
    """A read times a number, or times one for each column."""

    read: Entry
    factor: Number


class Arithmetic:
    """What values of a trace have in common: `+`, `-`, `*` and `/` by numbers, and clear errors for the rest."""

    def expression(self) -> Expression:
        raise NotImplementedError

    @property
    def is_changed(self) -> bool:
        """Whether it is a copy that was changed in place, which has no expression and writes itself."""
        return False

    def write_into(self, target: Any) -> None:
        """Writes such a copy to where a view is."""
        raise NotImplementedError

    def check_to_come(self) -> None:
        """Raises where it will never have numbers, or only once something is done."""

    def __add__(self, other: Any) -> Expression:
        return self.expression().plus(as_expression(other, "+"), 1.0)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Expression:
        return self.expression().plus(as_expression(other, "-"), -1.0)

    def __rsub__(self, other: Any) -> Expression:
        return as_expression(other, "-").plus(self.expression(), -1.0)

    def __mul__(self, other: Any) -> Expression:
        if isinstance(other, Arithmetic):
            refuse("one value of the trace times another")
        return self.expression().times(as_number(other, "*"))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Expression:
        return self.expression().times(reciprocal(other))

    def __neg__(self) -> Expression:
        return self.expression().times(-1.0)

    def __pos__(self) -> Expression:
        return self.expression()

    def __format__(self, spec: str) -> str:
        if spec:
            raise ProgramError(f"the format {spec!r} needs a number, and inside the trace there is none yet: save it")
        return repr(self)

    def __copy__(self) -> NoReturn:
        raise ProgramError("a value of the trace is copied with .clone()")

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__copy__()

    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        name = _OF_NUMPY.get(ufunc.__name__, "")
        if kwargs or method != "__call__" or not name:
            self.__array_function__(ufunc)
        return _TORCH[name](*args)

    def __array_function__(self, func: Any, *_: Any) -> NoReturn:
        self.check_to_come()
        refuse(f"NumPy's {func.__name__}")

    def __enter__(self) -> NoReturn:
        raise ProgramError(
            "a tensor is no block: write `with lm.trace(prompt) as t:`, and t.layers[5].output inside it"
        )

    def __exit__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ProgramError("a tensor is not called: write .output, without parentheses")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if kwargs or name not in _TORCH or not any(isinstance(arg, Arithmetic) for arg in args):
            refuse(f"torch's {name}", f"{_TORCH_INSTEAD[name]}, or " if name in _TORCH_INSTEAD else "")
        return _TORCH[name](*args)


def function_name(func: Any) -> str:
    """The name of a function of torch's, `add` for `__add__`; in place it is `add_`, or `iadd`."""
    return getattr(func, "__name__", str(func)).removeprefix("__").removesuffix("__")


def _subtract(a: Any, b: Any) -> Any:
    return a - b if isinstance(a, Arithmetic) else b.__rsub__(a)


_TORCH = {
    "add": lambda a, b: a + b if isinstance(a, Arithmetic) else b + a,
    "mul": lambda a, b: a * b if isinstance(a, Arithmetic) else b * a,
    "sub": _subtract,
    "rsub": lambda a, b: _subtract(b, a),
    "neg": lambda a: -a,
    "true_divide": lambda a, b: a / b if isinstance(a, Arithmetic) else b.__rtruediv__(a),
    "div": lambda a, b: a / b if isinstance(a, Arithmetic) else b.__rtruediv__(a),
}
_TORCH |= {"radd": _TORCH["add"], "rmul": _TORCH["mul"], "truediv": _TORCH["div"]}
_OF_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg"}
_TORCH_INSTEAD = {
    "add_": "write x = x + value",
    "iadd": "write x = x + value",
    "setitem": "write into the model: t.layers[5].output[-1] = value",
}


def refuse(what: str, first: str = "") -> NoReturn:
    """Raises the error for what no program can compute."""
    raise ProgramError(f"{what} cannot be part of a program: {first}{INSTEAD}")


_REFUSED = {
    "__matmul__": "a matrix product", "__rmatmul__": "a matrix product", "__pow__": "a power", "__rpow__": "a power",
    "__rtruediv__": "a number divided by a value of the trace", "__floordiv__": "a whole quotient",
    "__rfloordiv__": "a whole quotient", "__mod__": "a remainder", "__rmod__": "a remainder",
    "__abs__": "an absolute value", "__invert__": "a negation", "__and__": "a bitwise and", "__or__": "a bitwise or",
    "__xor__": "a bitwise xor", "__rand__": "a bitwise and", "__ror__": "a bitwise or", "__rxor__": "a bitwise xor",
    "__lshift__": "a shift", "__rshift__": "a shift", "__round__": "a rounded value", "__divmod__": "a remainder",
}  # fmt: skip
_UNKNOWN_YET = {
    "__bool__": "`if`, `and`, `or` and `not` need", "__float__": "float() needs", "__int__": "int() needs",
    "__complex__": "complex() needs", "__index__": "an index needs", "__iter__": "a loop needs",
    "__len__": "len() needs", "__contains__": "`in` needs", "__eq__": "a comparison needs",
    "__ne__": "a comparison needs", "__lt__": "a comparison needs", "__le__": "a comparison needs",
    "__gt__": "a comparison needs", "__ge__": "a comparison needs", "__array__": "NumPy needs",
    "__reversed__": "a loop needs", "__reduce_ex__": "pickle needs",
}  # fmt: skip


def _refusal(what: str) -> Any:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        self.check_to_come()
        refuse(what)

    return refused


def _too_early(what: str) -> Any:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        self.check_to_come()
        raise ProgramError(
            f"{what} a number, and inside the trace there is none yet: save the value and decide after the trace, in a "
            "second one if need be, or with .apply(fn), Python on the rows, on a local engine"
        )

    return refused


for _name, _what in _REFUSED.items():
    setattr(Arithmetic, _name, _refusal(_what))
for _name, _what in _UNKNOWN_YET.items():
    setattr(Arithmetic, _name, _too_early(_what))


class Place:
    """Base of what names tensors without being one: modules, groups of tokens and traces. Using one as a tensor, a
    function or a block raises `ProgramError`."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ProgramError(
            f"{self!r} is not a tensor, a function or a block: name one of its tensors, as in t.layers[5].output += v, "
            "t.generated.layers[5].output += v or t.all().layers[5].output += v"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ProgramError(
            f"torch's {function_name(func)} takes tensors, got a {cls.__name__.lower()} of a trace: name one of its "
            "tensors, as in t.layers[5].output"
        )

    __array_ufunc__ = __array_function__ = __call__ = __delitem__ = _refuse
    __enter__ = __exit__ = __aenter__ = __aexit__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __pos__ = _refuse


for _name in (*_REFUSED, "__lt__", "__le__", "__gt__", "__ge__", "__float__", "__int__", "__index__", "__array__"):
    setattr(Place, _name, Place._refuse)


class Expression(Arithmetic):
    """Σ factor · read + constant."""

    def __init__(self, terms: tuple[Term, ...] = (), constant: Number = 0.0) -> None:
        self.terms, self.constant = terms, constant

    def expression(self) -> Expression:
        return self

    @property
    def is_one_read(self) -> bool:
        """Whether it is a read as it is."""
        alone = len(self.terms) == 1 and np.ndim(self.terms[0].factor) == 0 and np.ndim(self.constant) == 0
        return alone and self.terms[0].factor == 1.0 and self.constant == 0.0

    def plus(self, other: Expression, sign: float) -> Expression:
        terms = list(self.terms)
        for read, factor in other.terms:
            same = [i for i, term in enumerate(terms) if term.read is read]
            if same:
                terms[same[0]] = Term(read, _combined(operator.add, terms[same[0]].factor, sign * factor))
            else:
                terms.append(Term(read, sign * factor))
        return Expression(tuple(terms), _combined(operator.add, self.constant, sign * other.constant))

    def times(self, factor: Number) -> Expression:
        terms = tuple(Term(read, _combined(operator.mul, f, factor)) for read, f in self.terms)
        return Expression(terms, _combined(operator.mul, self.constant, factor))

    def clone(self) -> Expression:
        return self

    detach = cpu = float = clone

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise ProgramError(
            "a computed value is not changed in place: change a clone, `h = t.layers[5].output.clone(); h[0] = value`, "
            "or write into the model, t.layers[5].output[0] = value"
        )

    def save(self) -> Any:
        """The value as a tensor, which is there after the trace."""
        from patchclamp.trace.saved import save

        return save(self)

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError("index before you compute, as in t.layers[5].output[-1] * 2")

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(name, KNOWN)

    def __repr__(self) -> str:
        words = [f"{factor if np.ndim(factor) == 0 else '…'} · {read.spot}" for read, factor in self.terms]
        return f"<value of a trace: {' + '.join(words) or 'numbers'}>"


def _combined(operation: Any, a: Number, b: Number) -> Number:
    try:
        return operation(a, b)
    except ValueError:
        raise ShapeError(f"expected vectors of one shape, got {list(np.shape(a))} and {list(np.shape(b))}") from None


def refuse_attribute(name: str, known: tuple[str, ...]) -> NoReturn:
    """Raises for what a tensor may have, and a value of a trace does not."""
    if name.startswith("__"):
        raise AttributeError(name)
    in_place = {"add_": "+= value", "sub_": "-= value", "mul_": "*= factor", "zero_": "[...] = 0",
                "copy_": "[...] = value", "fill_": "[...] = number", "div_": "/= number"}  # fmt: skip
    if name in in_place:
        raise ProgramError(f"a value of the trace is written with `{in_place[name]}`, not with .{name}()")
    raise ProgramError(
        f"a value of the trace has no {name!r}{near(name, known)}; it has {', '.join(known)}, and arithmetic: {INSTEAD}"
    )


def as_expression(value: Any, sign: str) -> Expression:
    """A value of the trace, or numbers, as an expression."""
    if isinstance(value, Arithmetic):
        return value.expression()
    return Expression(constant=as_number(value, sign))


def as_number(value: Any, sign: str) -> Number:
    try:
        number = None if isinstance(value, Place) else numbers(value)
    except PatchclampError as error:
        raise type(error)(f"a value of the trace {sign} {type(value).__name__}: {error.message}") from None
    if number is None:
        raise ProgramError(f"a value of the trace {sign} {type(value).__name__}: a number or a vector is needed")
    return number


def reciprocal(divisor: Any) -> Number:
    """1 / a number, or of each of some numbers."""
    if isinstance(divisor, Arithmetic):
        refuse("one value of the trace divided by another")
    number = as_number(divisor, "/")
    if not np.all(number):
        raise ProgramError("a value of the trace is divided by zero")
    return 1.0 / number
