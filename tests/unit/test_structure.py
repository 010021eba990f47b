"""The package keeps its own rules: imports point one way, rooms know only what they may."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import patchclamp

ROOT = Path(patchclamp.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
ORDER = (
    "cli", "serve", "studies", "doctor", "trace", "proving", "exporting", "lm", "grade", "call", "stream", "run", "attention", "plots", "engines", "runtime", "kernels", "plan", "sites",
    "store", "language", "errors", "version",
)  # fmt: skip
ABOVE_THE_FACE = ORDER[: ORDER.index("proving")]  # these may `import patchclamp as pc`
COMPAT = "engines/vllm/compat/"
VLLM_PRIVATE = {
    "_prepare_inputs", "prepare_inputs", "execute_model", "sample_tokens", "model_runner", "input_batch", "hf_config",
    "hf_text_config", "num_computed_tokens_cpu", "num_computed_tokens_np", "query_start_loc_np", "num_scheduled_tokens",
    "scheduled_new_reqs", "finished_req_ids", "find_longest_cache_hit", "get_computed_blocks", "coordinator",
    "generate_block_hash_extra_keys", "concrete_cudagraph_entries", "scheduler_config", "cache_config",
}  # fmt: skip

every_file = pytest.mark.parametrize("name", FILES)


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def module(name: str) -> str:
    """`language/site.py` → `patchclamp.language.site`."""
    parts = name.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")
    return f"patchclamp.{parts}" if parts else "patchclamp"


MODULES = {module(name) for name in FILES}


def room(name: str) -> str:
    """The first word of a module's path in the package; `face` for the package itself and what runs it. The fake of
    `testing.py` is an engine."""
    word = (*module(name).split("."), "face")[1]
    return {"__main__": "face", "testing": "engines"}.get(word, word)


def imports(code: ast.AST) -> Iterator[str]:
    """Every module that a piece of code imports, wherever it does so; `patchclamp.X` for a name of the face. A module
    of ours that is named in a string counts: `import_module` and its like hide nothing."""
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and node.value in MODULES - {"patchclamp"}:
            yield node.value
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names
            if not MODULES.issuperset(names):
                yield str(node.module)


@functools.cache
def rooms(name: str) -> set[str]:
    """The rooms that a file enters. A name of the face that is not a room counts as `face`, but for the version."""
    nodes = list(ast.walk(tree(name)))
    bound = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    face = {alias.asname or alias.name for alias in bound if alias.name == "patchclamp"}
    found = {word.split(".")[1] for word in imports(tree(name)) if word.startswith("patchclamp.")}
    found |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in face}
    found = {"engines" if word == "testing" else word for word in found}
    return {word if word in ORDER else "face" for word in found}


# -- imports


@every_file
def test_imports_point_one_way(name):
    here = room(name)
    if here == "face":
        return
    assert here in ORDER, f"{here} has no place in the order of rooms"
    below = ORDER[ORDER.index(here) :]
    wrong = {word for word in rooms(name) if word not in below and not (word == "face" and here in ABOVE_THE_FACE)}
    assert not wrong, f"{name} ({here}) imports {wrong}, which lie above it"


def test_the_order_knows_what_an_import_is():
    """The readers above see imports in functions, under TYPE_CHECKING, in strings, and through the face."""
    hidden = ast.parse("import_module('patchclamp.plots')\nNAMES = {'x': ('patchclamp.lm', 'X')}\nprint('patchclamp')")
    assert set(imports(hidden)) == {"patchclamp.plots", "patchclamp.lm"}
    found = set(
        imports(ast.parse("def f():\n from patchclamp.lm import LM\nif TYPE_CHECKING:\n import patchclamp.plots"))
    )
    assert found == {"patchclamp.lm", "patchclamp.lm.LM", "patchclamp.plots"}
    assert set(imports(ast.parse("from patchclamp.language import site, tokens"))) == {
        "patchclamp.language.site",
        "patchclamp.language.tokens",
    }
    assert rooms("engines/__init__.py") == {"engines", "errors"}
    assert rooms("lm.py") >= {"engines", "errors", "plan", "language"}
    assert room("language/site.py") == "language"
    assert room("__init__.py") == "face"


def test_no_import_cycle():
    """Among modules, by every import: at load, in functions, for type checking, and in strings. The face, which gives
    names of many modules lazily, is imported by no module below it (`test_imports_point_one_way`)."""
    graph = {module(name): MODULES.intersection(imports(tree(name))) - {module(name), "patchclamp"} for name in FILES}
    graph.pop("patchclamp")
    assert "patchclamp.engines.vllm.sync_engine" in graph["patchclamp.engines"]  # which a function imports
    assert "patchclamp.language.tokens" in graph["patchclamp.language.site"]
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= graph.keys()


@every_file
def test_only_the_rooms_that_may_know_torch_and_vllm(name):
    roots = {word.split(".")[0] for word in imports(tree(name))}
    if room(name) in ("language", "plan", "errors") and name != "language/sae_formats.py":  # which reads .pt files
        assert "torch" not in roots
    if not name.startswith("engines/vllm/"):
        assert "vllm" not in roots


def attributes_of(name: str) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)]


@every_file
def test_only_compat_names_what_is_vllms_own(name):
    if name.startswith(COMPAT):
        return
    attributes = attributes_of(name)
    used = {node.attr for node in attributes} & VLLM_PRIVATE
    assert not used, f"{name} names {used}; that belongs into {COMPAT}"
    if name.startswith("engines/vllm/"):
        owners = {ast.unparse(node.value) for node in attributes if re.match(r"_[a-z]", node.attr)}
        assert owners <= {"self", "cls"}


def test_compat_names_it():
    known = {node.attr for name in FILES if name.startswith(COMPAT) for node in attributes_of(name)}
    assert known >= {"_prepare_inputs", "hf_text_config", "find_longest_cache_hit"}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True).stdout


def test_importing_is_cheap():
    heavy = {"torch", "vllm", "matplotlib", "transformers", "pandas", "plotly", "safetensors"}
    loaded = set(run_python("import sys, patchclamp; print(*sys.modules)").split())
    assert "patchclamp.language.program" in loaded
    assert not (heavy | {"numpy"}) & loaded
    code = "import sys, patchclamp.lm, patchclamp.studies, patchclamp.testing; print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert "patchclamp.kernels.reference" in loaded
    assert not heavy & loaded


def test_every_public_name_is_there():
    names = run_python("import patchclamp as pc\nfor name in pc.__all__: print(name, type(getattr(pc, name)).__name__)")
    assert dict(line.split() for line in names.splitlines()).keys() == set(patchclamp.__all__)
    assert "LM type" in names
    assert {"resid_post Site", "prompt Positions", "studies module"} <= set(names.splitlines())
    with pytest.raises(AttributeError, match="module 'patchclamp' has no attribute 'resid_pots'"):
        patchclamp.resid_pots  # noqa: B018


# -- shape

BUDGETS = {  # of lines and files, by package: they go down, but for the room that an issue grants
    "language": (4_015, 12), "sites": (2_049, 4), "plan": (4_828, 10), "kernels": (2_083, 12), "store": (1_841, 7),
    "runtime": (3_373, 10), "engines": (4_481, 13), "engines/vllm": (9_228, 26), "trace": (2_436, 5),
    "studies": (13_855, 40), "plots": (1_706, 7), "serve": (4_416, 16), "cli": (1_359, 4), "": (5_665, 14),
}  # fmt: skip


def package(name: str) -> str:
    if name in BUDGETS or name.startswith("engines/vllm/"):
        return name if name in BUDGETS else "engines/vllm"
    return name.partition("/")[0] if "/" in name else ""


@pytest.mark.parametrize("of", BUDGETS)
def test_packages_stay_within_their_budgets(of):
    files = [path for name, path in FILES.items() if package(name) == of]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert (lines <= BUDGETS[of][0], len(files) <= BUDGETS[of][1]) == (True, True), (
        f"{of}: {lines} lines, {len(files)} files"
    )


def test_no_two_classes_have_the_same_name():
    names = [node.name for name in FILES for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef)]
    assert [name for name in set(names) if names.count(name) > 1 and not name.startswith("_")] == []


def test_every_package_has_a_budget():
    assert {package(name) for name in FILES} == BUDGETS.keys()


@every_file
def test_a_file_has_a_docstring_and_a_specific_name(name):
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"
    assert not {"utils", "util", "helpers", "helper", "common", "misc"} & set(name.removesuffix(".py").split("/"))
