"""Checks the seams of another vLLM from its source alone, in a folder or a wheel.

The source is read as syntax trees; nothing is imported or run. A name is looked up as in Python: in its module, through
imports, in the bases of a class, and among the attributes that a class's methods set. Names that are imported only for
type checkers count as absent.
"""

from __future__ import annotations

import ast
import difflib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from patchclamp.engines.vllm.compat.seams import SEAMS, Seam, changed_parameters, parameters_of
from patchclamp.errors import EngineError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """The definition of a name: the module whose code defines it, and the code."""

    module: str
    node: ast.AST


class Source:
    """The modules of a vLLM. `texts`: their code, by path, such as `vllm/v1/request.py`."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._path = {_module_name(path): path for path in texts}
        self._texts = texts
        self._trees: dict[str, ast.Module] = {}

    @property
    def version(self) -> str:
        """The version written by the build; `unknown` in a checkout that was never built."""
        written = re.search(r"^__version__\b.*= *['\"]([^'\"]+)", self._texts.get("vllm/_version.py", ""), re.M)
        return written[1] if written else "unknown"

    def module(self, name: str) -> Definition | None:
        if name not in self._path:
            return None
        if name not in self._trees:
            self._trees[name] = _parse(self._texts[self._path[name]], self._path[name])
        return Definition(name, self._trees[name])

    def member(self, owner: Definition, word: str) -> Definition | None:
        """Return the definition of `owner.word`, for a module or class; None if absent or outside vLLM."""
        return self._member(owner, word, set())

    def _member(self, owner: Definition, word: str, seen: set[tuple[str, str]]) -> Definition | None:
        if isinstance(owner.node, ast.ClassDef):
            return self._of_class(owner, word, seen)
        if not isinstance(owner.node, ast.Module) or (owner.module, word) in seen:
            return None
        seen.add((owner.module, word))
        for node in reversed(list(_bindings(owner.node, word))):
            if definition := self._bound(owner.module, node, word, seen):
                return definition
        return self.module(f"{owner.module}.{word}")

    def _of_class(self, owner: Definition, word: str, seen: set[tuple[str, str]]) -> Definition | None:
        assert isinstance(owner.node, ast.ClassDef)
        if own := list(_bindings(owner.node, word)):
            return Definition(owner.module, own[-1])
        bases = [self._of_expression(owner.module, base) for base in owner.node.bases]
        for base in filter(None, bases):
            definition = None if base.node is owner.node else self._member(base, word, seen)
            if definition and not _abstract(definition.node):
                return definition
        return next((Definition(owner.module, node) for node in _stores(owner.node, word)), None)

    def _bound(self, module: str, node: ast.AST, word: str, seen: set[tuple[str, str]]) -> Definition | None:
        """Return the definition that a module's statement binds to `word`."""
        if isinstance(node, ast.ImportFrom):
            source = self.module(self._imported_from(module, node))
            name = next((alias.name for alias in node.names if (alias.asname or alias.name) == word), word)
            return self._member(source, name, seen) if source else None
        if isinstance(node, ast.Import):
            name = next(alias.name for alias in node.names if (alias.asname or alias.name.split(".")[0]) == word)
            return self.module(name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):  # an alias
            return self._member(Definition(module, self._trees[module]), node.value.id, seen)
        return Definition(module, node)

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        package = module.split(".")
        up = node.level - self._path[module].endswith("__init__.py")
        return ".".join([*package[: len(package) - up], *([node.module] if node.module else [])])

    def _of_expression(self, module: str, node: ast.expr) -> Definition | None:
        """Return the definition of a base class written as `Base`, `module.Base` or `Base[T]`."""
        if isinstance(node, ast.Subscript):
            return self._of_expression(module, node.value)
        if isinstance(node, ast.Attribute):
            owner = self._of_expression(module, node.value)
            return self.member(owner, node.attr) if owner else None
        here = self.module(module)
        return self.member(here, node.id) if here and isinstance(node, ast.Name) else None

    def sets(self, definition: Definition, word: str) -> bool:
        """True if a function sets an attribute, for example on the class that it decorates."""
        return isinstance(definition.node, FUNCTIONS) and any(_stores(definition.node, word))

    def takes(self, definition: Definition) -> list[str] | None:
        """Return the names of a function's parameters; None for anything else."""
        if not isinstance(definition.node, FUNCTIONS):
            return None
        arguments = definition.node.args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def names(self, owner: Definition) -> list[str]:
        """Return the classes, functions and methods that a module or class defines itself."""
        statements = _statements(owner.node)
        return [node.name for node in statements if isinstance(node, (ast.ClassDef, *FUNCTIONS))]

    def defining(self, word: str) -> list[str]:
        """Return the modules that define a class, function or variable called `word`."""
        mentions = re.compile(rf"^ *(?:(?:async )?def |class )?{word}\b", re.M)
        texts = ((name, self._texts[path]) for name, path in self._path.items())
        candidates = [name for name, text in texts if word in text and mentions.search(text)]
        imports = (ast.Import, ast.ImportFrom)
        return [
            name
            for name in candidates
            if (module := self.module(name))
            and any(not isinstance(node, imports) for node in _bindings(module.node, word))
        ]

    def called(self, last: str) -> list[str]:
        """Return the modules whose last name component is `last`."""
        return [name for name in self._path if name.rpartition(".")[2] == last]


def read_source(path: Path) -> Source:
    """Read the source in a wheel, a checkout, or the folder of an installed vLLM. Raises `EngineError` if there is no
    vLLM at that path."""
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            files = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            texts = {name: wheel.read(name).decode() for name in files}
    else:
        likely = (path / "vllm", path / "src" / "vllm", path)
        folders = [folder for folder in likely if (folder / "__init__.py").exists()][:1]
        files = [(folder, file) for folder in folders for file in folder.rglob("*.py")]
        texts = {f"vllm/{file.relative_to(folder).as_posix()}": file.read_text("utf-8") for folder, file in files}
    if "vllm/__init__.py" not in texts:
        there = "that has no package vllm" if path.exists() else "nothing is there"
        raise EngineError(f"no source of vLLM at {path}: {there}; give a wheel, a checkout, or an installed folder")
    return Source(texts)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _parse(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except SyntaxError as error:
        raise EngineError(f"{path} is not Python as this version reads it: {error}; use a newer Python") from None


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module or class is created, including those in `if`, `try` and `with`."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(ast.Module(node.orelse, []))
        elif isinstance(node, ast.stmt):
            yield node
            if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                yield from _statements(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from _statements(node)


def _bindings(owner: ast.AST, word: str) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class that may bind a word. A `__getattr__` binds the strings in it."""
    return (node for node in _statements(owner) if _binds(node, word))


def _binds(node: ast.stmt, word: str) -> bool:
    match node:
        case ast.FunctionDef(name="__getattr__") if word != "__getattr__":
            return any(isinstance(inner, ast.Constant) and inner.value == word for inner in ast.walk(node))
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name == word
        case ast.ImportFrom(names=names):
            return any(alias.name == "*" or (alias.asname or alias.name) == word for alias in names)
        case ast.Import(names=names):
            return any((alias.asname or alias.name.split(".")[0]) == word for alias in names)
        case ast.Assign(targets=targets):
            inner = [name for target in targets for name in ast.walk(target)]
            return any(isinstance(name, ast.Name) and name.id == word for name in inner)
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name == word
    return False


def _abstract(node: ast.AST) -> bool:
    """True if code is an abstract method, which does not prove that a class implements it."""
    return isinstance(node, FUNCTIONS) and any("abstract" in ast.unparse(mark) for mark in node.decorator_list)


def _stores(owner: ast.AST, word: str) -> Iterator[ast.Attribute]:
    """Yield the places where a class or function sets an attribute called `word`."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and node.attr == word and isinstance(node.ctx, ast.Store):
            yield node


class SeamStatus(msgspec.Struct, frozen=True):
    """The status of a seam in a vLLM.

    place: the expected place, `module:Class.attribute`
    status: "there"; "moved": its name is elsewhere, or it lacks a parameter or attribute that is used; "gone"
    detail: the new place, or the missing parts
    """

    name: str
    place: str
    why: str
    checked: tuple[str, ...]
    status: Literal["there", "moved", "gone"]
    detail: str = ""


class SourceReport(msgspec.Struct, frozen=True):
    """The seams of a vLLM at a path, in the order of their declarations."""

    path: str
    version: str
    seams: tuple[SeamStatus, ...]

    @property
    def all_there(self) -> bool:
        return all(seam.status == "there" for seam in self.seams)


def examine_source(path: Path) -> SourceReport:
    """Look up every seam in the source of a vLLM: a wheel, a checkout, or an installed folder. Raises `EngineError` if
    there is no vLLM at that path."""
    source = read_source(path)
    return SourceReport(str(path), source.version, tuple(look_up(seam, source) for seam in SEAMS.values()))


def look_up(seam: Seam, source: Source) -> SeamStatus:
    """Look up one seam."""
    module_name, _, path = seam.place.partition(":")
    owner = source.module(module_name)
    if owner is None:
        return _elsewhere(seam, source, f"there is no module {module_name}")
    for word in path.split(".") if path else ():
        if (inner := source.member(owner, word)) is None:
            near = difflib.get_close_matches(word, source.names(owner), 2)
            like = f"; near it: {', '.join(near)}" if near else ""
            return _elsewhere(seam, source, f"{_called(owner)} has no {word}{like}")
        owner = inner
    lack = _lack(seam, source, owner)
    return _status(seam, "moved" if lack else "there", lack)


def _lack(seam: Seam, source: Source, found: Definition) -> str:
    """Describe the parts of a seam that are used and missing; "" if there are none."""
    if seam.signature:
        if not isinstance(found.node, FUNCTIONS):
            return "it is no function"
        if difference := changed_parameters(seam, parameters_of(found.node.args)):
            return difference
    parameters = source.takes(found)
    untaken = [word for word in seam.takes if word not in (parameters or ())]
    if untaken:
        taken = "it is no function" if parameters is None else f"it takes {', '.join(parameters) or 'nothing'}"
        return f"it takes no parameter {', '.join(untaken)}; {taken}"
    required = [word.rstrip("~") for word in seam.has.split() if not word.endswith("?")]
    absent = [word for word in required if source.member(found, word) is None and not source.sets(found, word)]
    return f"it has no {', '.join(absent)}" if absent else ""


def _elsewhere(seam: Seam, source: Source, why: str) -> SeamStatus:
    """Return the status of a seam that is not at its place: moved if other modules have its name, else gone."""
    module_name, _, path = seam.place.partition(":")
    outer, _, last = path.partition(".")
    if not path:
        places = source.called(module_name.rpartition(".")[2])
    else:
        places = [f"{name}:{path}" for name in source.defining(outer) if _has(source, name, outer, last)]
    others = sorted(set(places) - {seam.place})
    return _status(seam, "moved", f"{why}; it is at {', '.join(others)}") if others else _status(seam, "gone", why)


def _has(source: Source, module_name: str, outer: str, last: str) -> bool:
    """True if a module's class `outer` has an attribute `last`; with `last` "", if `outer` exists."""
    module = source.module(module_name)
    owner = source.member(module, outer) if module else None
    return owner is not None and (not last or source.member(owner, last) is not None)


def _called(owner: Definition) -> str:
    name = getattr(owner.node, "name", "")
    return f"{owner.module}:{name}" if name else owner.module


def _status(seam: Seam, status: Literal["there", "moved", "gone"], detail: str = "") -> SeamStatus:
    return SeamStatus(seam.name, seam.place, seam.why, seam.checked, status, detail)
