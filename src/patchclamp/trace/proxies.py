"""Proxies of the model's tensors and of values computed from them, and the saved results of a trace."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import torch

from patchclamp.errors import (
    MissingSource,
    PatchclampError,
    ProgramError,
    ShapeError,
    TokensError,
    UnsupportedSite,
    near,
    unknown,
)
from patchclamp.language import Ablate, Add, Apply, Clamp, From, Noise, Replace, Rotate, Scale, SiteOp, Vector, Zero
from patchclamp.language.site import DERIVED, NNTERP, SITES, SPECS, Site, elsewhere, parse_site
from patchclamp.language.tokens import Positions, Range, Selection, Tokens, as_integer, every, prompt
from patchclamp.trace.hints import OF_A_LAYER, OF_A_TRACE, hint
from patchclamp.trace.recording import Entry, Line, Recording, Spot, callers_line, numbers, positive, written

if TYPE_CHECKING:
    from patchclamp.run import Run

Number = float | np.ndarray
INSTEAD = (
    "save it and compute after the trace (to write the result, use a second trace), or use .apply(fn), Python on the "
    "rows, on a local engine with allow_code=True"
)
READS = ("clone", "detach", "cpu", "float")  # tensor methods that return the value: saved tensors are fp32 on the CPU
KNOWN = ("save", "shape", *READS)


class Arithmetic:
    """Base of traced values: they support `+`, `-`, and `*` and `/` by numbers; other operations raise."""

    def expression(self) -> Expression:
        raise NotImplementedError

    def save(self) -> Any:
        """Save the value: return a tensor that is filled in after the trace."""
        return save(self.expression())

    def clone(self) -> Any:
        return self.expression()

    def detach(self) -> Any:
        return self.clone()

    def cpu(self) -> Any:
        return self.clone()

    def float(self) -> Any:
        return self.clone()

    def check_to_come(self) -> None:
        """Raise if the value will never be available, or if the trace must be entered or iterated first."""

    def __add__(self, other: Any) -> Expression:
        return self.expression().plus(as_expression(other, "+"), 1.0)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Expression:
        return self.expression().plus(as_expression(other, "-"), -1.0)

    def __rsub__(self, other: Any) -> Expression:
        return as_expression(other, "-").plus(self.expression(), -1.0)

    def __mul__(self, other: Any) -> Expression:
        return self.expression().times(as_factor(other, "*"))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Expression:
        return self.expression().times(as_factor(other, "/"))

    def __neg__(self) -> Expression:
        return self.expression().times(-1.0)

    def __pos__(self) -> Expression:
        return self.expression()

    def __format__(self, spec: str) -> str:
        if spec:
            raise ProgramError(f"cannot apply format {spec!r} inside a trace: save the value and format it afterwards")
        return repr(self)

    def __copy__(self) -> NoReturn:
        raise ProgramError("copy a traced value with .clone()")

    def __deepcopy__(self, _: Any) -> NoReturn:
        self.__copy__()

    def __hash__(self) -> int:
        return id(self)

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
            "a tensor is not a context manager: use `with lm.trace(prompt) as t:`, and t.layers[5].output inside it"
        )

    def __exit__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ProgramError("a tensor is not callable: use .output, without parentheses")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if kwargs or name not in _TORCH or not any(isinstance(arg, Arithmetic) for arg in args):
            refuse(f"torch's {name}", f"{_TORCH_INSTEAD[name]}, or " if name in _TORCH_INSTEAD else "")
        return _TORCH[name](*args)


def function_name(func: Any) -> str:
    """Return the name of a torch function: `add` for `__add__`, and `add_` or `iadd` for the in-place versions."""
    return getattr(func, "__name__", str(func)).removeprefix("__").removesuffix("__")


def _binary(name: str) -> Callable[[Any, Any], Any]:
    """Return a binary operator for a traced value on either side. It calls the traced value's method, because the
    operator of a tensor or an array on the left would recurse into torch or NumPy."""

    def compute(a: Any, b: Any) -> Any:
        return getattr(a, f"__{name}__")(b) if isinstance(a, Arithmetic) else getattr(b, f"__r{name}__")(a)

    return compute


_TORCH: dict[str, Callable[..., Any]] = {name: _binary(name) for name in ("add", "sub", "mul", "truediv")}
_TORCH |= {"radd": _TORCH["add"], "rmul": _TORCH["mul"], "rsub": lambda a, b: _TORCH["sub"](b, a)}
_TORCH |= {"neg": operator.neg, "div": _TORCH["truediv"], "true_divide": _TORCH["truediv"]}
_OF_NUMPY = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg"}
_TORCH_INSTEAD = {
    "add_": "use x = x + value",
    "iadd": "use x = x + value",
    "setitem": "write into the model: t.layers[5].output[-1] = value",
}


def refuse(what: str, first: str = "") -> NoReturn:
    """Raise the error for an operation that no program can compute."""
    raise ProgramError(f"{what} is not supported in a program: {first}{INSTEAD}")


_REFUSED = {
    "__matmul__": "a matrix product", "__rmatmul__": "a matrix product", "__pow__": "a power", "__rpow__": "a power",
    "__rtruediv__": "a number divided by a traced value", "__floordiv__": "a floor division",
    "__rfloordiv__": "a floor division", "__mod__": "a remainder", "__rmod__": "a remainder",
    "__abs__": "an absolute value", "__invert__": "a bitwise not", "__and__": "a bitwise and", "__or__": "a bitwise or",
    "__xor__": "a bitwise xor", "__rand__": "a bitwise and", "__ror__": "a bitwise or", "__rxor__": "a bitwise xor",
    "__lshift__": "a bit shift", "__rshift__": "a bit shift", "__round__": "rounding", "__divmod__": "a remainder",
}  # fmt: skip
_UNKNOWN_YET = {
    "__bool__": "`if`, `and`, `or` and `not` need", "__float__": "float() needs", "__int__": "int() needs",
    "__complex__": "complex() needs", "__index__": "an index needs", "__iter__": "a loop needs",
    "__len__": "len() needs", "__contains__": "`in` needs", "__eq__": "a comparison needs",
    "__ne__": "a comparison needs", "__lt__": "a comparison needs", "__le__": "a comparison needs",
    "__gt__": "a comparison needs", "__ge__": "a comparison needs", "__array__": "NumPy needs",
    "__reversed__": "a loop needs", "__reduce_ex__": "pickle needs",
}  # fmt: skip


def _refusal(name: str) -> Any:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        self.check_to_come()
        if name in _REFUSED:
            refuse(_REFUSED[name])
        raise ProgramError(
            f"{_UNKNOWN_YET[name]} a number, which is not available inside the trace: save the value and decide after "
            "the trace, or use .apply(fn), Python on the rows, on a local engine"
        )

    return refused


for _name in (*_REFUSED, *_UNKNOWN_YET):
    setattr(Arithmetic, _name, _refusal(_name))


class NonTensor:
    """Base of modules, groups of tokens and traces. Using one as a tensor or function raises `ProgramError`."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ProgramError(
            f"{self!r} is not a tensor, function or context manager: use a tensor, as in t.layers[5].output += v, "
            "t.generated.layers[5].output += v or t.all().layers[5].output += v"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a Python protocol, such as copying
            raise AttributeError(name)
        return self._attribute(name)

    def _attribute(self, name: str) -> Any:
        """Return an attribute by name. Raises `ProgramError` for an unknown name."""
        raise AttributeError(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ProgramError(
            f"torch's {function_name(func)} expects tensors, got a {cls.__name__.lower()} of a trace: use one of its "
            "tensors, as in t.layers[5].output"
        )


_NO_TENSORS = (
    "lt le gt ge float int index array array_ufunc array_function call delitem enter exit aenter aexit add radd sub "
    "rsub mul rmul truediv neg pos"
)
for _name in (*_REFUSED, *(f"__{name}__" for name in _NO_TENSORS.split())):
    setattr(NonTensor, _name, NonTensor._refuse)


class Expression(Arithmetic):
    """A sum of scaled reads and a constant: Σ factor · read + constant. A factor is a number, or one per column."""

    terms: dict[Entry, Number]
    constant: Number

    def __init__(self, terms: dict[Entry, Number] | None = None, constant: Number = 0.0) -> None:
        self.terms, self.constant = terms or {}, constant

    def expression(self) -> Expression:
        return self

    @property
    def one_read(self) -> Entry | None:
        """The read, if the expression is exactly one read (factor 1, constant 0); else None."""
        factors = [self.constant, *self.terms.values()]
        return next(iter(self.terms)) if not any(map(np.ndim, factors)) and factors == [0.0, 1.0] else None

    def plus(self, other: Expression, sign: float) -> Expression:
        terms = dict(self.terms)
        for read, factor in other.terms.items():
            terms[read] = _combined(operator.add, terms[read], sign * factor) if read in terms else sign * factor
        return Expression(terms, _combined(operator.add, self.constant, sign * other.constant))

    def times(self, factor: Number) -> Expression:
        terms = {read: _combined(operator.mul, own, factor) for read, own in self.terms.items()}
        return Expression(terms, _combined(operator.mul, self.constant, factor))

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise ProgramError(
            "a computed value cannot be set in place: change a clone, `h = t.layers[5].output.clone(); h[0] = value`, "
            "or write into the model, t.layers[5].output[0] = value"
        )

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError("index before computing, as in t.layers[5].output[-1] * 2")

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(name, KNOWN)

    def __repr__(self) -> str:
        words = [f"{factor if np.ndim(factor) == 0 else '…'} · {read.spot}" for read, factor in self.terms.items()]
        return f"<value of a trace: {' + '.join(words) or 'numbers'}>"


def _combined(operation: Any, a: Number, b: Number) -> Number:
    try:
        return operation(a, b)
    except ValueError:
        raise ShapeError(
            f"expected vectors of the same shape, got {list(np.shape(a))} and {list(np.shape(b))}"
        ) from None


def refuse_attribute(name: str, known: tuple[str, ...]) -> NoReturn:
    """Raise for an attribute that traced values lack, even if tensors have it."""
    if name.startswith("__"):
        raise AttributeError(name)
    in_place = {"add_": "+= value", "sub_": "-= value", "mul_": "*= factor", "zero_": "[...] = 0",
                "copy_": "[...] = value", "fill_": "[...] = number", "div_": "/= number"}  # fmt: skip
    if name in in_place:
        raise ProgramError(f"expected `{in_place[name]}` on a traced value, got .{name}()")
    raise ProgramError(
        f"a traced value has no {name!r}{near(name, known)}; available: {', '.join(known)}, arithmetic. Or {INSTEAD}"
    )


def as_expression(value: Any, sign: str) -> Expression:
    """Convert a traced value, a number or an array to an expression."""
    if isinstance(value, Arithmetic):
        return value.expression()
    return Expression(constant=as_number(value, sign))


def as_number(value: Any, sign: str) -> Number:
    try:
        number = None if isinstance(value, NonTensor) else numbers(value)
    except PatchclampError as error:
        raise type(error)(f"a traced value {sign} {type(value).__name__}: {error.message}") from None
    if number is None:
        raise ProgramError(f"a traced value {sign} …: expected a number or a vector, got {type(value).__name__}")
    return number


def as_factor(value: Any, sign: str) -> Number:
    """Return the factor to multiply by: the operand or, for a division, its elementwise reciprocal."""
    divides = sign.startswith("/")
    if isinstance(value, Arithmetic):
        refuse(f"a traced value {'divided by' if divides else 'times'} another")
    number = as_number(value, sign)
    if divides and not np.all(number):
        raise ProgramError("cannot divide a traced value by zero")
    return 1.0 / number if divides else number


OPS = ("ablate", "apply", "clamp_along", "noise", "replace")
TO_COME = From("a read of this trace")  # placeholder for a read whose run is not known yet


class InPlace(Arithmetic):
    """Base of writable values: item assignment and `+=`, `-=`, `*=` and `/=` call `change`."""

    def change(self, sign: str, value: Any) -> Any:
        """Apply the assignment operator `sign` with `value`, and return the object to assign."""
        raise NotImplementedError

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].change("=", value)

    def __getitem__(self, key: Any) -> Any:
        raise NotImplementedError

    def __iadd__(self, other: Any) -> Any:
        return self.change("+=", other)

    def __isub__(self, other: Any) -> Any:
        return self.change("-=", other)

    def __imul__(self, other: Any) -> Any:
        return self.change("*=", other)

    def __itruediv__(self, other: Any) -> Any:
        return self.change("/=", other)


class Activation(InPlace):
    """A tensor of the model at a selection of tokens. See `Spot` for its axes."""

    _recording: Recording
    _spot: Spot

    def __init__(self, recording: Recording, spot: Spot) -> None:
        vars(self).update(_recording=recording, _spot=spot)

    def __getitem__(self, key: Any) -> Activation:
        spot = self._spot[key]
        self._recording.lm.sites.resolve(spot.site)  # an unknown head raises at this line
        return Activation(self._recording, spot)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ProgramError(f"cannot set {name!r} on {self._spot}: assign the whole tensor, or [...] = value")

    def expression(self) -> Expression:
        return Expression({self._recording.read(self._spot): 1.0})

    def clone(self) -> Draft:
        """Copy the current value: later writes to this tensor do not change the copy. The copy can be changed in
        place and written back. It belongs to the same run, so writes at earlier layers change it, even writes on
        later lines."""
        return Draft(self, self._recording.read(self._spot), [], self._spot)

    def detach(self) -> Activation:
        return self  # as in torch, a write to the detached tensor is a write here

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape. Raises `ProgramError` while the number of tokens is unknown."""
        recording, spot = self._recording, self._spot
        entry = recording.read(spot)
        recording.check_prompt()
        if recording.has_generated(entry) and not spot.single:
            raise ProgramError(f"the number of tokens of {spot} is unknown until they are generated")
        width, parts = recording.width(spot), recording.lm.sites.parts(spot.site.name)
        row = [width]
        if parts is not None:
            row = [parts[1]] if isinstance(spot.site.index, int) else [width // parts[1], parts[1]]
            row = row[:-1] if parts[1] == 1 else row
        return (*[1] * spot.batched, *([] if spot.single else [len(recording.positions(entry))]), *row)

    # -- written

    def change(self, sign: str, value: Any) -> Activation:
        if sign == "=":
            self._assign(value)
        elif sign in ("*=", "/="):
            self.write(Expression(), as_factor(value, sign))
        else:
            self.write(as_expression(value, sign).times(-1.0 if sign == "-=" else 1.0), 1.0)
        return self

    def _assign(self, value: Any) -> None:
        if isinstance(value, Activation) and (value._recording, value._spot) == (self._recording, self._spot):
            self._recording.check_open()
            self._recording.check(Zero(self._spot.site, self._spot.tokens))  # `x += v` assigns its own result
        elif isinstance(value, Draft) and value.is_changed:
            value.write_into(self)
        else:
            self.write(as_expression(value, "="))

    def replace(self, value: Any, alpha: float = 1.0, mask: Any = None) -> None:
        """Apply `pc.Replace`: (1 − a) · h + a · value with a = alpha · mask. `value`: numbers or a read."""
        if isinstance(value, Arithmetic):
            read = value.expression().one_read
            if read is None:
                refuse("a computed value in replace()")
            self._record(Replace, source=read, alpha=alpha, mask=mask)
        else:
            vector = self._vector(as_number(value, "as a value:"))
            self._record(Replace, vector, alpha=alpha, mask=mask)

    def add(self, value: Any, scale: float = 1.0, norm: str | None = None) -> None:
        """Apply `pc.Add`: add scale · value. `value`: numbers or a read of the trace; with norm="match" it is first
        rescaled to each row's norm."""
        if isinstance(value, Arithmetic):
            read = value.expression().one_read
            if read is None:
                refuse("a computed value in add()")
            self._record(Add, source=read, scale=scale, norm=norm)
        else:
            self._record(Add, self._vector(as_number(value, "as a value:")), scale=scale, norm=norm)

    def ablate(self, directions: Any) -> None:
        """Apply `pc.Ablate`: remove the component in the span of the directions."""
        self._record(Ablate, directions)

    def clamp_along(self, direction: Any, low: float | None = None, high: float | None = None) -> None:
        """Apply `pc.Clamp`: clamp the projection on a direction to `low` … `high`."""
        self._record(Clamp, direction, low=low, high=high)

    def rotate(self, plane: Any, degrees: float, relative: bool = False) -> None:
        """Apply `pc.Rotate`: rotate within a plane to an angle or, if `relative`, by that angle."""
        self._record(Rotate, plane, degrees, relative=relative)

    def noise(self, std: float, seed: int = 0, relative: bool = False) -> None:
        """Apply `pc.Noise`: add seeded noise."""
        self._record(Noise, std, seed=seed, relative=relative)

    def apply(self, fn: Callable[..., Any]) -> None:
        """Apply `pc.Apply`: call a Python function on the rows. Requires `allow_code=True`."""
        if self._recording.lm.engine.remote:
            raise ProgramError(
                "Apply is not supported on a server: save the rows, compute, and write them in a second trace, or "
                "run the model in this process, pc.LM(model, allow_code=True)"
            )
        self._record(Apply, fn)

    def _record(self, op: Callable[..., SiteOp], *values: Any, source: Entry | None = None, **fields: Any) -> None:
        """Record an op on this tensor, with the given values or with the rows of the read `source`."""
        values = values if source is None else (TO_COME,)
        spot = self._spot
        self._recording.write(op(*values, at=spot.site, tokens=spot.tokens, **fields), spot, source)

    def write(self, expression: Expression, own: Number | None = None) -> None:
        """Record ops that set rows h to own · h + expression or, if `own` is None, to the expression alone."""
        with all_or_nothing(self._recording):
            self._write(expression, own)

    def _write(self, expression: Expression, own: Number | None) -> None:
        others: dict[Entry, float] = {}
        for read, factor in expression.terms.items():
            if self.is_unwritten_since(read):
                own = factor if own is None else own + factor
            elif np.ndim(factor):
                refuse("a read of another site times a vector")
            else:
                others[read] = float(factor)
        constant = expression.constant
        has_constant = bool(np.ndim(constant) or constant)
        if own is not None:
            if np.ndim(own) or own != 1.0 or not (others or has_constant):
                self._scale(own)  # a write without effect is recorded, so that it is checked
        elif others:
            first = next(iter(others))
            self._record(Replace, source=first)
            if (factor := others.pop(first)) != 1.0:
                self._scale(factor)
        elif has_constant:
            self._record(Replace, self._vector(constant))
            return
        else:
            self._record(Zero)
        for read, factor in others.items():
            self._record(Add, source=read, scale=factor)
        if has_constant:
            self._record(Add, self._vector(constant))

    def is_unwritten_since(self, read: Entry) -> bool:
        """True if a read is of this tensor at these tokens, and the tensor was not written after the read."""
        here = self._recording, self._spot.site, self._spot.tokens
        same = here == (read.recording, read.spot.site, read.spot.tokens)
        return same and not self._recording.is_written_since(read)

    def _scale(self, factor: Number) -> None:
        """Multiply rows by a number, or by one number per column, as (1 − a) · h + a · 0 with a = 1 − factor."""
        if np.ndim(factor) == 0:
            self._record(Scale, float(factor))
            return
        row = self._vector(factor)
        mask = np.float32(1) - row.array()
        if len(row.shape) > 1 or not np.array_equal(np.float32(1) - mask, row.array()):
            raise ProgramError(
                "expected a number or one mask vector (of 0 and 1, for example) as the factor of rows; for other "
                "products use .apply(fn), Python on the rows, on a local engine"
            )
        self._record(Replace, np.zeros_like(mask), mask=mask)

    def _vector(self, number: Number) -> Vector:
        """Convert a number, or an array of this tensor's shape, to rows for an op."""
        recording, spot = self._recording, self._spot
        width, parts = recording.width(spot), recording.lm.sites.parts(spot.site.name)
        array = np.asarray(number, np.float32)
        if array.ndim == 0:
            return Vector.of(np.full(width, array, np.float32))
        if spot.batched and array.ndim > 2 and array.shape[0] == 1:
            array = array[0]
        if parts is not None and array.shape[-1] == parts[1] and array.ndim > 1 and array.shape[-2] * parts[1] == width:
            array = array.reshape(*array.shape[:-2], width)  # concatenate the heads
        if array.ndim == 2 and array.shape[0] == 1:
            array = array[0]
        if array.ndim > 2 or array.shape[-1] != width:
            raise ShapeError(f"{spot}: expected width {width}, got shape {list(np.shape(number))}")
        return Vector.of(array)

    def __getattr__(self, name: str) -> NoReturn:
        if self._recording.state != "open" and not name.startswith("__"):
            raise ProgramError(f"{self._spot} was not saved: .save() it inside the trace")
        refuse_attribute(name, ("save", "shape", *READS, *OPS))

    def __repr__(self) -> str:
        return f"<{self._spot}>"


@contextlib.contextmanager
def all_or_nothing(recording: Recording) -> Iterator[None]:
    """Discard the block's recorded entries if it raises a `PatchclampError`."""
    count = len(recording.entries)
    try:
        yield
    except PatchclampError:
        del recording.entries[count:]
        raise


class Change(NamedTuple):
    """One in-place change of a copy: the changed part, the operator and the value."""

    part: Spot
    sign: str
    value: Expression | Number


class Draft(InPlace):
    """A copy of an activation, or a part of a copy, as in `draft[-1] += v`. Writing into it changes only the copy,
    until it is written back. Its rows are indexed from 0. A copy and its parts share their `changes`."""

    def __init__(self, of: Activation, read: Entry, changes: list[Change], spot: Spot) -> None:
        self._of, self._read, self._changes, self._spot = of, read, changes, spot

    @property
    def _is_whole(self) -> bool:
        return self._spot is self._of._spot

    @property
    def is_changed(self) -> bool:
        """True if the copy was changed in place. It then has no expression, and is written with `write_into`."""
        return bool(self._changes) and self._is_whole

    def expression(self) -> Expression:
        if self.is_changed:
            raise ProgramError("a clone that was changed in place can only be written into the model")
        if self._is_whole:
            return Expression({self._read: 1.0})
        if self._changes or not self._of.is_unwritten_since(self._read):
            raise ProgramError("the model or the clone has changed since: index first, then clone")
        return Activation(self._of._recording, self._spot).expression()

    def clone(self) -> Any:
        return Draft(self._of, self._read, list(self._changes), self._spot) if self._is_whole else self.expression()

    def detach(self) -> Draft:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return Activation(self._of._recording, self._spot).shape

    def __getitem__(self, key: Any) -> Draft:
        """Select tokens or heads; within a head, select tokens: `clone[3][-1]`."""
        if self._is_whole:
            return Draft(self._of, self._read, self._changes, self._part(key))
        if self._spot.site == self._of._spot.site or not self._of._spot.whole:
            raise ProgramError(f"{self._spot} is part of a clone: index it in a single pair of brackets")
        try:
            return Draft(self._of, self._read, self._changes, self._spot[key])
        except PatchclampError as error:
            raise type(error)(f"{error.message}; index a clone in a single pair of brackets") from None

    def change(self, sign: str, value: Any) -> Draft:
        """Record a change, and check it now, so that an error is raised at the caller's line."""
        if sign == "=" and isinstance(value, Draft) and (value._changes is self._changes and value._spot == self._spot):
            return self  # `draft[-1] += v` assigns its own result
        value = value.expression() if isinstance(value, Arithmetic) else as_number(value, sign)
        recording = self._of._recording
        recording.check_open()
        for read in value.terms if isinstance(value, Expression) else ():
            recording.check_width(self._spot, read)
        checked = Expression(constant=value.constant) if isinstance(value, Expression) else value
        Activation(recording.rehearsal(), self._spot).change(sign, checked)
        self._changes.append(Change(self._spot, sign, value))
        return self

    def _part(self, key: Any) -> Spot:
        """Return the part of the copy that the subscript `key` selects."""
        own = self._of._spot
        if own.single:
            return own[key]
        rows = own.tokens if own.whole else prompt  # as if the rows of the copy were a prompt
        chosen = msgspec.structs.replace(own, tokens=rows, whole=True, named=False)[key]
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(one, (Selection, str)) for one in keys):
            return msgspec.structs.replace(chosen, tokens=self._among(chosen.tokens))
        if chosen.tokens == rows:
            return msgspec.structs.replace(chosen, tokens=own.tokens, whole=own.whole)
        return chosen if own.whole else msgspec.structs.replace(chosen, tokens=self._numbered(chosen.tokens))

    def _among(self, tokens: Tokens) -> Tokens:
        """Restrict a selection to the copy's rows."""
        own, recording = self._of._spot, self._of._recording
        if own.tokens == every or recording.prompt is None:
            return tokens
        try:
            inside = np.isin(recording.known_positions(own, tokens), recording.known_positions(own)).all()
        except ShapeError:
            inside = False
        return tokens if inside else own.tokens & tokens

    def _numbered(self, rows: Tokens) -> Tokens:
        """Return the tokens at selected rows of the copy; `rows` indexes the copy's rows as if they were a prompt."""
        own, positions = self._of._spot, self._of._recording.known_positions(self._of._spot)
        assert isinstance(rows, Positions)
        try:
            chosen = positions[list(rows.select(len(positions), len(positions)))]
        except TokensError:
            raise TokensError(f"row {rows.index} is out of range for {own} with {len(positions)} rows") from None
        if not len(chosen):
            raise TokensError(f"[{rows.index}] selects none of the {len(positions)} rows of {own}")
        return numbered(chosen, isinstance(rows.index, int))

    def write_into(self, target: Activation) -> None:
        """Write a changed copy into the target: its changed parts, and its other rows as they were when cloned."""
        with all_or_nothing(target._recording):
            if not target.is_unwritten_since(self._read):
                target.write(Expression({self._read: 1.0}))
            for part, sign, value in self._changes:
                Activation(target._recording, self._onto(target, part)).change(sign, value)

    def _onto(self, target: Activation, part: Spot) -> Spot:
        """Return the spot in the target that a part of the copy is written to."""
        own, spot = self._of._spot, target._spot
        site, single, tokens = spot.site, part.single, part.tokens
        if part.site.index != own.site.index:
            if spot.parted:
                raise ShapeError(f"{part.site} was changed in a clone of {own.site}, but {spot.site} lacks this part")
            site = Site(site.name, site.layers, part.site.index)
        if part.tokens == own.tokens:
            single, tokens = spot.single, spot.tokens
        elif spot.tokens != own.tokens or target._recording is not self._of._recording:
            tokens = self._rows_of(target, part)
        return msgspec.structs.replace(part, site=site, tokens=tokens, single=single, whole=False)

    def _rows_of(self, target: Activation, part: Spot) -> Tokens:
        """Return the target's tokens at the row indices that a part has in the copy."""
        recording: Recording = self._of._recording
        mine, theirs = recording.known_positions(self._of._spot), target._recording.known_positions(target._spot)
        if len(mine) == 1:
            return target._spot.tokens
        if len(mine) != len(theirs):
            raise ShapeError(
                f"row counts differ: the clone of {self._of._spot} has {len(mine)}, {target._spot} has {len(theirs)}"
            )
        row = {position: number for number, position in enumerate(mine.tolist())}
        rows = [row[position] for position in recording.known_positions(part).tolist()]
        return numbered(theirs[rows], part.single)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(name, KNOWN)

    def __repr__(self) -> str:
        return f"<a clone of {self._spot}>"


def numbered(positions: np.ndarray, single: bool) -> Tokens:
    """Return a selection of the given positions, in order; with `single`, of the first position only."""
    numbers = positions.tolist()
    if single:
        return every[numbers[0]]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return Positions("every", Range(numbers[0], numbers[-1] + 1))
    return every[numbers]


MODULES: dict[str, dict[str, str]] = {  # the sites of each module's inputs, outputs and intermediates
    "": {"input": "resid_pre", "mid": "resid_mid", "output": "resid_post"},
    "attn": {"input": "attn_in", "q": "q", "k": "k", "v": "v", "z": "z", "output": "attn_out"},
    "mlp": {"input": "mlp_in", "router": "router", "neurons": "neurons", "output": "mlp_out"},
}
SUBMODULES = {"attn": "attn", "self_attn": "attn", "attention": "attn", "mlp": "mlp"}
BATCHED = {name: site for name, site in NNTERP.items() if name not in SITES}  # nnterp's names, with its batch axis


class TokenGroup(NonTensor):
    """A group of tokens of one prompt: `t.generated[3]`, `t.all()`, and `t` itself."""

    def __init__(self, recording: Recording, tokens: Tokens, named: bool, single: bool = False) -> None:
        vars(self).update(_recording=recording, _tokens=tokens, _named=named, _single=single)

    @property
    def layers(self) -> LayerList:
        """The layers: `t.layers[5].output`, `.input`, `.mid`, `.attn.output`, `.attn.z[3]`, `.mlp.neurons[10:20]`."""
        return LayerList(self)

    def _attribute(self, name: str) -> Any:
        if name in DERIVED:
            raise UnsupportedSite(f"{name} is not available in a trace: use capture=pc.{name}[l] in lm.run")
        if name not in SITES and name not in BATCHED:
            known = (each for each in dir(self) if not each.startswith("_"))
            raise hint(name, OF_A_TRACE) or elsewhere(name) or unknown("name in a trace", name, known)
        site, batched = BATCHED.get(name, name), name in BATCHED
        return SiteByLayer(self, site, batched) if SPECS[site].layered else self._activation(Site(site), batched)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SITES and name not in BATCHED:
            raise ProgramError(f"{name!r} cannot be set in a trace; sites can, as in t.layers[5].output[-1] = value")
        self._activation(Site(BATCHED.get(name, name)), name in BATCHED).change("=", value)

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError(f"{self} spans many tensors: index one of them, as in .layers[5].output[{written(key)}]")

    def __dir__(self) -> list[str]:
        return ["layers", *SITES, *BATCHED]

    def _activation(self, site: Site, batched: bool = False) -> Activation:
        site = positive(site, self._recording.lm.model.layers)
        self._recording.lm.sites.resolve(site)  # a site that this model lacks raises at this line
        return Activation(self._recording, Spot.of(site, self._tokens, self._named, self._single, batched))

    def __repr__(self) -> str:
        return f"<{self._tokens} in a trace>"


class Steps(TokenGroup):
    """Tokens by index: `t.generated[3]` is the fourth sampled token, at the step that takes it as input."""

    _tokens: Positions

    def __init__(self, recording: Recording, tokens: Positions) -> None:
        super().__init__(recording, tokens, named=True)

    def __getitem__(self, key: Any) -> TokenGroup:
        single = not isinstance(key, (slice, list, tuple, range))
        return TokenGroup(self._recording, self._tokens[key], True, single)

    def __len__(self) -> int:
        """Return the number of tokens, assuming that the run generates all `max_tokens`."""
        self._recording.check_prompt()
        return len(self._tokens.select(self._recording.length, self._recording.limit))

    def __iter__(self) -> Iterator[TokenGroup]:
        if not len(self):
            raise TokensError(f"{self._tokens} selects no input token of this run: raise max_tokens")
        return (self[step] for step in range(len(self)))


def as_layers(key: Any) -> int | Range:
    """Parse a layer or a range of layers in a subscript. Raises `ProgramError` for anything else, including None."""
    return Range.of(key) if isinstance(key, slice) else key if isinstance(key, Range) else as_integer(key)


class ByLayer(NonTensor):
    """Base of iterables with one item per layer."""

    _group: TokenGroup

    def _layers(self) -> list[int]:
        return list(range(self._group._recording.lm.model.layers))

    def _at(self, layer: int) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[Any]:
        return map(self._at, self._layers())


class LayerList(ByLayer):
    """The layers of the model. A range selects several layers, which are written together."""

    def __init__(self, group: TokenGroup) -> None:
        self._group = group

    def __repr__(self) -> str:
        return f"<the {len(self)} layers at {self._group}>"

    def __getitem__(self, layer: Any) -> Module:
        return Module(self._group, as_layers(layer), "")

    _at = __getitem__

    def __setitem__(self, layer: Any, value: Any) -> None:
        raise ProgramError(f"a layer is a module: assign its output, t.layers[{layer}].output = value")

    def _attribute(self, name: str) -> Any:
        raise ProgramError(f"select a layer: .layers[5].{name}, or .layers[:].{name} to write every layer")


class Module(ByLayer):
    """A layer, its attention or its MLP. The names in `MODULES` are views of its inputs, outputs and intermediates."""

    def __init__(self, group: TokenGroup, layer: Any, module: str) -> None:
        vars(self).update(_group=group, _layer=layer, _module=module)
        group._recording.lm.sites.resolve(Site("resid_post", layer))

    def _attribute(self, name: str) -> Any:
        if not self._module and name in SUBMODULES:
            return Module(self._group, self._layer, SUBMODULES[name])
        return self._group._activation(Site(self._site(name), self._layer))

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._module and name in SUBMODULES:
            raise ProgramError(f"{name} is a module: assign its output, .{name}.output = value")
        getattr(self, name).change("=", value)

    def _site(self, name: str) -> str:
        names = MODULES[self._module]
        if name in names:
            return names[name]
        if name in ("inputs", "outputs"):
            raise ProgramError(f".{name} is a tuple in other libraries: here .{name[:-1]} is the tensor itself")
        if name in ("source", "weights", "pattern", "attention_probabilities"):
            raise UnsupportedSite(
                "a fused kernel has no intermediate values: use q, k, v and z, and capture attention weights with "
                "capture=pc.pattern[l] in lm.run"
            )
        what = f"tensor of {self._module or 'a layer'}"
        raise hint(name, OF_A_LAYER) or unknown(what, name, (*names, *(() if self._module else ("attn", "mlp"))))

    def _at(self, layer: int) -> Module:
        return Module(self._group, layer, self._module)

    def _layers(self) -> list[int]:
        if not isinstance(self._layer, Range):
            raise ProgramError(f"{self} is one module, not a list: its tensors are {', '.join(MODULES[self._module])}")
        return list(self._layer.indices(self._group._recording.lm.model.layers))

    def __dir__(self) -> list[str]:
        return [*MODULES[self._module], *(() if self._module else ("attn", "mlp"))]

    def __repr__(self) -> str:
        return f"<layer {self._layer}{self._module and '.'}{self._module}>"


class SiteByLayer(ByLayer):
    """A site indexed by layer: `t.resid_mid[5]`, `t.z[5, 3]`, `t.layers_output[5]`."""

    def __init__(self, group: TokenGroup, site: str, batched: bool) -> None:
        self._group, self._site, self._batched = group, site, batched

    def __getitem__(self, layer: Any) -> Activation:
        layer, *index = layer if isinstance(layer, tuple) else (layer,)
        if None in index:
            raise ProgramError("expected a number or a range, got None")
        return self._group._activation(Site(self._site)[as_layers(layer), *index], self._batched)

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].change("=", value)

    _at = __getitem__

    def _layers(self) -> list[int]:
        """Return the layers that have this site."""
        return [ref.layer for ref in self._group._recording.lm.sites.resolve(Site(self._site)) if ref.layer is not None]

    def _attribute(self, name: str) -> Any:
        raise ProgramError(f"{self._site} has one tensor per layer: select a layer, {self._site}[5].{name}")

    def __repr__(self) -> str:
        return f"<{self._site}, a layer in brackets>"


class Pending(Arithmetic, torch.Tensor):
    """A saved value before the trace has run. Within the trace it can be computed with, or written into the model."""

    saved: Saved

    def expression(self) -> Expression:
        self.saved.raise_failure()
        return self.saved.expression

    def check_to_come(self) -> None:
        self.saved.raise_failure()

    def save(self) -> Pending:
        return self

    def __getitem__(self, key: Any) -> NoReturn:
        self.saved.raise_failure()
        raise ProgramError(f"{self.saved.name} is not available until the trace ends: index it then, or before .save()")

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
        """Reject calls that bypass `__torch_function__`, such as the copy `torch.tensor(value)`."""
        for arg in args:
            if isinstance(arg, Pending):
                arg.saved.raise_failure()
        raise ProgramError("a saved value is not available until the trace ends: copy it into another tensor then")

    @classmethod
    def new(cls, saved: Saved) -> Pending:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            pending = torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=torch.float32, device=torch.device("cpu"))
        pending.saved = saved
        return pending


class Saved:
    """One call of `.save()`: its expression, its line, and the tensor that it returned."""

    expression: Expression
    line: Line

    def __init__(self, expression: Expression, line: Line) -> None:
        self.expression, self.line = expression, line
        self.failure: PatchclampError | None = None
        self.tensor: Pending = Pending.new(self)
        self.name: str = " + ".join(str(read.spot) for read in expression.terms) or "numbers"

    @property
    def recordings(self) -> list[Recording]:
        return [read.recording for read in self.expression.terms]

    def raise_failure(self) -> None:
        """Raise the value's error if it failed; otherwise raise as `check_to_come` does."""
        if self.failure is not None:
            raise self.failure
        for recording in self.recordings:
            check_to_come(recording, self.name)

    def fill(self, value: torch.Tensor) -> None:
        """Turn the caller's tensor into a plain tensor with a copy of `value`."""
        tensor: Any = self.tensor
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            try:
                torch.utils.swap_tensors(tensor, value.detach().clone())
            except RuntimeError as error:
                raise ProgramError(
                    f"cannot fill in {self.name} while something references it, such as a weak reference: {error}"
                ) from None


NOT_READ = {  # why a saved value is not available, by the state of its recording
    "new": "a trace runs at the end of its block, `with lm.trace(prompt) as t:`",
    "waiting": "a trace with stream=True runs when it is iterated, `for part in t`",
    "streaming": "it is complete after the last part; t.so_far(value) returns the part received so far",
}


def check_to_come(recording: Recording, name: str) -> None:
    """Raise if a recording's values will never be available, or if its trace must be entered or iterated first."""
    if recording.state == "left":
        raise MissingSource(f"{name} was not read: an error ended the trace before it ran")
    if recording.state in NOT_READ:
        raise ProgramError(f"{name} is not ready: {NOT_READ[recording.state]}")


def save(expression: Expression) -> Pending:
    """Request an expression's value; return the tensor that is filled in after the trace."""
    if not expression.terms:
        raise ProgramError("expected a value of the model to save, got only numbers")
    saved = Saved(expression, callers_line())
    recording = saved.recordings[0]
    for read in expression.terms:
        read.want(recording)
    recording.saved.append(saved)
    return saved.tensor


def value_of(expression: Expression, rows: Mapping[Entry, torch.Tensor]) -> torch.Tensor:
    """Evaluate an expression on the rows of its reads."""
    if (only := expression.one_read) is not None:
        return rows[only]
    total: Any = torch.as_tensor(expression.constant)
    try:
        for read, factor in expression.terms.items():
            total = total + rows[read] * torch.as_tensor(factor)
    except RuntimeError as error:
        raise ShapeError(f"expected numbers that broadcast to the rows read: {error}") from None
    return total


def rows_of(entry: Entry, run: Run, path: str) -> torch.Tensor:
    """Return the rows that a run captured for a read (at `path` in its program), in the shape of the read's spot."""
    captured = torch.as_tensor(run.read(path, copy=False))
    index = {position: row for row, position in enumerate(run.positions(path))}
    order = [index[p] for p in run.reached(entry.op.tokens).tolist() if p in index]
    rows = captured if order == list(range(len(captured))) else captured[order]
    if not len(rows) and run.finish_reason is None:
        raise MissingSource(f"{entry.spot} is not available yet: the stream has {len(run.token_ids)} tokens so far")
    if not len(rows):
        raise MissingSource(f"{entry.spot}: the run ended after {len(run.token_ids)} tokens, before this one")
    rows = rows[0] if entry.spot.single else rows
    return rows[None] if entry.spot.batched else rows


class Cache(Mapping[str, torch.Tensor]):
    """The result of `t.cache(...)`: one tensor per site, by name (`"resid_post[5]"`) or site (`pc.resid_post[5]`)."""

    sites: list[Site]
    tokens: Tokens
    line: Line
    recording: Recording

    def __init__(self, sites: list[Site], tokens: Tokens, line: Line, recording: Recording) -> None:
        self.sites, self.tokens, self.line, self.recording = sites, tokens, line, recording
        self.failure: PatchclampError | None = None
        self._rows: dict[str, torch.Tensor] | None = None

    def __getitem__(self, site: str | Site) -> torch.Tensor:
        rows, name = self._filled(), str(parse_site(site))
        if name not in rows:
            raise MissingSource(f"{name} is not in this cache{near(name, rows)}; available: {', '.join(rows)}")
        return rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    @property
    def recordings(self) -> list[Recording]:
        return [self.recording]

    def fill(self, run: Run | None) -> None:
        """Store the run's rows at the cache's sites and tokens; other ops may capture more positions of a site."""
        assert run is not None
        wanted, rows = run.reached(self.tokens), {}
        for name, captured in self.recording.lm.fetch([run], self.sites, copy=False)[0].items():
            chosen = np.flatnonzero(np.isin(run.positions(name), wanted))
            tensor = torch.as_tensor(captured)
            rows[name] = (tensor if len(chosen) == len(tensor) else tensor[torch.as_tensor(chosen)]).clone()
        self._rows = rows

    def _filled(self) -> dict[str, torch.Tensor]:
        if self.failure is not None:
            raise self.failure
        if self._rows is None:
            check_to_come(self.recording, "the cache")
            raise ProgramError("the cache is empty until the trace ends: read it then")
        return self._rows

    def __repr__(self) -> str:
        return f"<cache of {', '.join(map(str, self.sites))}>"
