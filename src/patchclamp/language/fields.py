"""Fields that are converted when a struct is made: written in several ways, of one type.

`at: Site = field(converter=as_site)` takes `"resid_post[3]"` and holds a `Site`, for type checkers too (the typing
specification's dataclass transforms).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform, overload

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, UnknownName, near

Written = TypeVar("Written")
Read = TypeVar("Read")


class _Field(NamedTuple):
    converter: Callable[[Any], Any]
    default: Any


@overload
def field(*, converter: Callable[[Written], Read]) -> Read: ...
@overload
def field(*, converter: Callable[[Written], Read], default: Written) -> Read: ...
def field(*, converter: Callable[[Any], Any], default: Any = msgspec.NODEFAULT) -> Any:
    """A field whose value goes through `converter`. Without a default it is required."""
    return _Field(converter, default)


class _Converting(msgspec.StructMeta):
    """Moves the converters of a class's fields to the class's `converters`."""

    converters: dict[str, Callable[[Any], Any]]

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> Any:
        fields = {word: value for word, value in namespace.items() if isinstance(value, _Field)}
        namespace |= {word: msgspec.field(default=field.default) for word, field in fields.items()}
        namespace["converters"] = {word: field.converter for word, field in fields.items()}
        return super().__new__(cls, name, bases, namespace, **config)

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError as error:
            if missing := re.fullmatch("Missing required argument '(.*)'", str(error)):
                raise ProgramError(f"{cls.__name__} needs {missing[1]}=", missing[1]) from None
            names = cls.__struct_fields__
            if unknown := re.fullmatch("Unexpected keyword argument '(.*)'", str(error)):
                words = f"{cls.__name__} has no argument {unknown[1]!r}{near(unknown[1], names)}"
                raise UnknownName(f"{words}; there are: {', '.join(names)}", unknown[1]) from None
            if twice := re.fullmatch("Argument '(.*)' given by name and position", str(error)):
                raise ProgramError(f"{cls.__name__} got {twice[1]} both by position and by name", twice[1]) from None
            if str(error) == "Extra positional arguments provided":
                raise ProgramError(f"{cls.__name__} takes {', '.join(names)}, got {len(args)} values") from None
            raise


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Converted(msgspec.Struct, metaclass=_Converting, frozen=True):
    """Base of structs with such fields. An error in a field names the field."""

    def __post_init__(self) -> None:
        for name, converter in type(self).converters.items():
            try:
                msgspec.structs.force_setattr(self, name, converter(getattr(self, name)))
            except PatchclampError as error:
                raise error.under(name) from None


def optional(converter: Callable[[Written], Read]) -> Callable[[Written | None], Read | None]:
    """A converter that leaves None as it is."""
    return lambda value: None if value is None else converter(value)
