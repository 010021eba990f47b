"""Compare patchclamp's seams with a vLLM that is not installed: `python -m tools.seams WHEEL_OR_TREE [--types]`.

Each function that patchclamp wraps must be at its place, with a signature that is declared for a supported version
(`engines/vllm/compat/`). With `--types`, pyright also checks all of patchclamp against that vLLM's own modules and
classes. The source is read; nothing of it is imported or run. The exit status is 1 if something differs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from patchclamp.engines.vllm import report  # noqa: F401  declares the seams
from patchclamp.engines.vllm.compat.seams import SEAMS, Seam

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Result(NamedTuple):
    """The comparison of one seam. `problem`: the difference; "" if there is none."""

    seam: Seam
    problem: str


def read_tree(path: Path, folder: Path) -> Path:
    """Return the folder that contains the package vllm: of a checkout, an installed folder, or a wheel, which is
    unpacked into `folder`. Raises `SystemExit` if there is no vLLM at that path."""
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith((".py", ".pyi"))]
            wheel.extractall(folder, names)
        path = folder
    for root in (path, path / "src", path.parent):
        if (root / "vllm/__init__.py").exists() and (root != path.parent or path.name == "vllm"):
            return root
    raise SystemExit(f"expected a wheel, a checkout or an installed folder of vLLM, got {path}")


def version_of(root: Path) -> str:
    """Return the version that the build wrote; "unknown" in a checkout that was never built."""
    file = root / "vllm/_version.py"
    written = re.search(r"^__version__\b.*= *['\"]([^'\"]+)", file.read_text("utf-8"), re.M) if file.exists() else None
    return written[1] if written else "unknown"


def compare(root: Path, seams: list[Seam]) -> list[Result]:
    return [Result(seam, _problem(root, seam)) for seam in seams]


def _problem(root: Path, seam: Seam) -> str:
    module, _, path = seam.place.partition(":")
    node = _definition(root, module, path.split("."))
    if isinstance(node, FUNCTIONS):
        return seam.difference(_written(node.args)) if seam.forms else ""
    last = path.rpartition(".")[2]
    files = sorted(file for file in root.glob("vllm/**/*.py") if f"def {last}(" in file.read_text("utf-8"))
    where = f"; defined in {', '.join(str(file.relative_to(root)) for file in files[:5])}" if files else ""
    return f"not found{where}"


def _definition(root: Path, module: str, path: list[str]) -> ast.AST | None:
    """Return the code of a name in a module, which may import it from another module."""
    stem = root / module.replace(".", "/")
    file = next((each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.exists()), None)
    found: ast.AST | None = None if file is None else ast.parse(file.read_text("utf-8"), str(file))
    for word in path:
        body, found = getattr(found, "body", []), None
        for node in reversed(body):
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and node.name == word:
                found = node
                break
            if isinstance(node, ast.ImportFrom) and {word, "*"}.intersection(alias.name for alias in node.names):
                package = module if file is not None and file.stem == "__init__" else module.rpartition(".")[0]
                source = f"{package}.{node.module}" if node.level else node.module or ""
                if (imported := _definition(root, source, path)) is not None:
                    return imported
    return found


def _written(arguments: ast.arguments) -> str:
    """Return parameters as in a `def`, without annotations."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)


def type_errors(root: Path, package: Path = ROOT / "src/patchclamp") -> list[str]:
    """Return pyright's errors of our package with the vLLM in a folder in place of the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pyrightconfig.json"
        checked = Path(folder).resolve().relative_to("/")
        up = "/".join([".."] * len(checked.parts))  # pyright ignores absolute paths
        config.write_text(json.dumps({
            "include": [f"{up}{package}"], "extraPaths": [str(root), str(ROOT / "src")],
            "pythonVersion": "3.11", "typeCheckingMode": "basic",
        }))  # fmt: skip
        command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config)]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    found = json.loads(done.stdout)
    if not found["summary"]["filesAnalyzed"]:
        raise SystemExit(f"pyright checked no file: {done.stderr}")
    errors = [each for each in found["generalDiagnostics"] if each["severity"] == "error"]
    return [f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}" for each in errors]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="WHEEL_OR_TREE")
    parser.add_argument("--types", action="store_true", help="also run pyright against it")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = read_tree(given.path, Path(folder))
        results = compare(root, SEAMS)
        errors = type_errors(root) if given.types else []
        version = version_of(root)
    for seam, problem in results:
        print(f"✗ {seam.place}: {problem} (needed to {seam.why})" if problem else f"✓ {seam.place}")
    print(*errors, sep="\n", end="\n" if errors else "")
    wrong = sum(bool(problem) for _, problem in results)
    types = f", {len(errors)} type errors" if given.types else ""
    print(f"vLLM {version}: {len(results) - wrong} seams match, {wrong} differ{types}")
    return 1 if wrong or errors else 0


if __name__ == "__main__":
    sys.exit(main())
