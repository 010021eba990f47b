"""`PublicStruct`, the base of public structs, whose `help` omits msgspec's methods."""

from __future__ import annotations

import msgspec

_OF_MSGSPEC = {*dir(msgspec.Struct), "__annotations__", "__post_init__", "__dataclass_transform__"}


class PublicMeta(msgspec.StructMeta):
    def __dir__(cls) -> list[str]:
        own = {name for name in vars(cls) if name in ("__init__", "__repr__", "__eq__", "__hash__") and vars(cls)[name]}
        return sorted({*super().__dir__()} - _OF_MSGSPEC | own)


class PublicStruct(msgspec.Struct, metaclass=PublicMeta, frozen=True):
    """A struct of the public interface."""
