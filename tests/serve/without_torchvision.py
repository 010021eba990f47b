"""What a server's processes run before all else: empty modules in place of torchvision, as `tests/engines/conftest.py`
has them in this process. Copied beside a `PYTHONPATH` as `sitecustomize.py`."""

import importlib.machinery
import sys
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


if not import_utils.is_torchvision_available() and not import_utils.is_torchvision_v2_available():
    for module in (f"torchvision{end}" for end in BELOW):
        sys.modules[module] = _Anything(module)
        owner, _, last = module.rpartition(".")
        if owner:
            setattr(sys.modules[owner], last, sys.modules[module])
