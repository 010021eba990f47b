"""The prose of the package, as far as a program can check it: docstring openings, and words that read as translated."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import patchclamp

FILES = sorted(Path(patchclamp.__file__).parent.rglob("*.py"))
OPENINGS = {"What", "Whether", "How", "Where", "Which", "Of", "So"}  # a docstring starts with a verb or a noun phrase
BANNED = re.compile(
    r"(?<!`)\b(thereof|anew|though|alike|of which|so many|is no more|(is|are) none|hears|nobody listens|as right)\b"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_docstrings_read_as_english(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            name = getattr(node, "name", "the module")
            assert text.split()[0] not in OPENINGS, f"{name}: {text[:60]}"
            assert not BANNED.search(text), f"{name}: {BANNED.search(text)}"


def test_it_finds_what_it_looks_for():
    assert BANNED.search("All of them are read anew.")
    assert BANNED.search('The first gap; "" if there is none.')
    assert not BANNED.search("Reads all of them again, although `alike` is a field.")
