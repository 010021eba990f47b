"""Empty modules in place of torchvision, which is not installed here (`requirements/cpu.txt`): vLLM's classes of models
that read images import it, and nothing that the tests do has a use for it."""

from __future__ import annotations

import importlib.machinery
import types

from transformers.utils import import_utils

BELOW = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class _Anything(types.ModuleType):
    """A package in which every name is a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_ins() -> dict[str, types.ModuleType]:
    """The modules by name. Transformers is asked first whether torchvision is there, and remembers that it is not."""
    assert not import_utils.is_torchvision_available()
    assert not import_utils.is_torchvision_v2_available()
    made: dict[str, types.ModuleType] = {name: _Anything(name) for name in (f"torchvision{end}" for end in BELOW)}
    for name, module in made.items():
        owner, _, last = name.rpartition(".")
        if owner:
            setattr(made[owner], last, module)
    return made
