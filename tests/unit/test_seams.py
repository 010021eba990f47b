"""Everything of vLLM that `compat/` touches is declared as a seam: its attributes, its functions, its modules."""

import ast
import inspect
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FunctionType, MethodType

import pytest

from patchclamp.engines.vllm.compat import seams
from patchclamp.errors import SeamMoved

ROOM = Path(seams.__file__).parent
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(ROOM.glob("*.py"))}
ADMISSION = ast.parse((ROOM.parent / "admission.py").read_text())  # ours, used in the engine core
READERS = {"getattr", "hasattr", "setattr", "_above"}  # functions that are given an object and an attribute's name
KINDS = (str, dict, list, set, type, FunctionType, MethodType, BaseException, deque, Future)
PYTHON = {name for kind in KINDS for name in dir(kind)}
OTHERS = PYTHON | {
    "name", "value",  # of an enum
    "shape", "data_ptr", "get_state", "set_state", "capture_end", "device", "type",  # torch's tensors, generators, graphs, devices
    "graph", "nodes", "op", "target", "erase_node", "recompile",  # torch.fx
    "modules", "to", "eval",  # torch.nn
    "warning", "environ", "parameters", "kind", "put", "POSITIONAL_OR_KEYWORD", "bind", "arguments", "available", "opname", "argval", "co_consts", "default", "empty", "KEYWORD_ONLY", "signature", "ismethod", "body", "unparse", "parse",
    "arg", "args", "vararg", "kwarg", "posonlyargs", "kwonlyargs", "defaults", "kw_defaults",  # Python's library
    "architectures", "hidden_size", "num_hidden_layers", "_commit_hash",  # a config of Transformers
}  # fmt: skip


def _declared() -> tuple[dict[str, set[str]], set[str]]:
    """Attributes by the word that code calls their owner, and `module.name` of everything that may be imported."""
    owners: dict[str, set[str]] = {}
    names: set[str] = set()
    for seam in seams.SEAMS.values():
        attributes = {word.rstrip("?~") for word in seam.has.split()}
        for word in seam.called.split():
            owners.setdefault(word, set()).update(attributes)
        module, _, path = seam.place.partition(":")
        names |= {f"{module}.{name}" for name in attributes} if not path else {f"{module}.{path.split('.')[0]}"}
        names |= {module}
    return owners, names


OWNERS, NAMES = _declared()
DECLARED = set().union(*OWNERS.values())


def _ours(trees: dict[str, ast.Module]) -> set[str]:
    """Names that the room's own classes define: methods, fields, and what they set on themselves."""
    ours: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        ours.update(method.name for method in node.body if isinstance(method, ast.FunctionDef))
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                ours.add(inner.target.id)
            elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                ours.update([inner.attr] if isinstance(inner.ctx, ast.Store) else [])
    return ours


OURS = _ours({**TREES, "admission.py": ADMISSION})


def _accesses(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every attribute that is read or set, by name or through a function, with its owner."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            yield from ((node.args[0], str(name.value)) for name in node.args[1:2] if isinstance(name, ast.Constant))


def _words(owner: ast.expr) -> list[str]:
    """The names on the way to an owner, the last first: `runner.requests[row]` → requests, runner."""
    match owner:
        case ast.Name(id=word):
            return [word]
        case ast.Attribute(value=value, attr=word):
            return [word, *_words(value)]
        case ast.Subscript(value=value):
            return _words(value)
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(word)), *_]):
            return [word, *_words(value)]
        case ast.Call(func=function):
            return _words(function)
    return [""]


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every imported name, with the full name of what it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def undeclared(tree: ast.Module) -> set[str]:
    """What of vLLM a piece of code touches and no seam declares."""
    imported = dict(_imported(tree))
    touched = {name for name in imported.values() if name.split(".")[0] == "vllm" and name not in NAMES}
    foreign = {word for word, name in imported.items() if name.split(".")[0] != "vllm"} | {"super"}
    for owner, name in _accesses(tree):
        word, root = (words := _words(owner))[0], words[-1]
        if root in foreign or name.startswith("patchclamp"):  # what we put on vLLM's objects
            continue
        allowed = OWNERS[word] | PYTHON | {"name"} if word in OWNERS else OURS | OTHERS
        if name not in allowed:
            touched.add(f"{ast.unparse(owner)}.{name}")
    return touched


@pytest.mark.parametrize("file", TREES)
def test_what_is_touched_is_declared(file):
    assert undeclared(TREES[file]) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("runner.no_such", "runner.no_such"),
        ("self._config.no_such", "self._config.no_such"),
        ("runner.requests[row].no_such", "runner.requests[row].no_such"),
        ("runner.generators", "runner.generators"),  # of another owner
        ("thing.input_batch", "thing.input_batch"),  # by a name that says nothing of its owner
        ("getattr(runner, 'no_such', None)", "runner.no_such"),
        ("hasattr(batch, 'no_such')", "batch.no_such"),
        ("_above(cache_config, 'no_such')", "cache_config.no_such"),
        ("def f():\n from vllm.config import NoSuch", "vllm.config.NoSuch"),
        ("import vllm.no_such", "vllm.no_such"),
    ],
)
def test_the_test_sees_what_is_not_declared(code, found):
    assert undeclared(ast.parse(code)) == {found}
    declared = "import numpy as np\nrunner.requests[row].generator\nnp.cumsum(batch.num_reqs).no_such\nself.watch"
    assert undeclared(ast.parse(declared)) == set()


def test_what_is_declared_is_touched():
    """But for owners that are reached by a variable's name alone."""
    touched = {name for tree in TREES.values() for _, name in _accesses(tree)}
    touched |= {name.rsplit(".", 1)[-1] for tree in TREES.values() for _, name in _imported(tree)}
    by_name = {"prepare_dummy_inputs", "_last_slot_layout"}  # in a loop over names; for what it says of the rest
    assert DECLARED - touched == by_name


def test_no_name_of_ours_is_one_of_vllms():
    """Such a name would hide an attribute that is not declared."""
    assert not OURS & DECLARED


def test_only_declared_places_are_entered():
    entered = {
        node.args[0].value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "require_on", "_disabled")
        if isinstance(node.args[0], ast.Constant)
    }
    assert entered - seams.SEAMS.keys() == set()
    assert all(re.fullmatch(r"vllm[\w.]*(:[\w.]+)?", seam.place) and seam.checked for seam in seams.SEAMS.values())


WRAPPED = [seam for seam in seams.SEAMS.values() if seam.signature]


def _entered(seam: seams.Seam):
    owner, last = seams.require(seam.name)
    return owner, last, inspect.getattr_static(owner, last) if isinstance(owner, type) else getattr(owner, last)


def _with(function, parameters):
    """A function of the same name that takes other parameters."""

    def changed(*args, **kwargs):
        raise AssertionError("it is not called")

    changed.__signature__ = inspect.Signature(parameters)
    return changed


def test_every_wrapper_is_made_of_a_function_whose_whole_signature_is_declared():
    """`functools.wraps` is used nowhere in the room, so that each wrapper's parameters are checked."""
    text = {name: ast.unparse(tree) for name, tree in TREES.items() if name != "seams.py"}
    assert not {name for name, code in text.items() if "functools.wraps" in code}
    assert sum(code.count("@forwards(") + code.count("= forwards(") for code in text.values()) >= 25
    assert len(WRAPPED) >= 25


UNCOMPARED = {"load_model", "patchclamp_rpc", "call_variant"}  # of a class that passes every unknown name on, of ours
# alone, and of a compiler's result


def unchecked(tree: ast.AST) -> set[str]:
    """Functions that are set on objects, in any way, and whose parameters `forwards` does not compare."""
    methods = {id(node) for of in ast.walk(tree) if isinstance(of, ast.ClassDef) for node in of.body}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and id(node) not in methods]
    defined = {node.name: node for node in functions}
    put: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                put |= {
                    value.id for to, value in pairs if isinstance(to, ast.Attribute) and isinstance(value, ast.Name)
                }
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and isinstance(node.args[2], ast.Name):
            put.add(node.args[2].id)
    return {
        name for name in put & defined.keys()
        if not any("forwards(" in ast.unparse(decorator) for decorator in defined[name].decorator_list)
    }  # fmt: skip


def test_every_function_that_takes_another_ones_place_is_compared_with_it():
    assert set().union(*(unchecked(tree) for name, tree in TREES.items())) == UNCOMPARED
    code = "def f(x): ...\n@forwards(y)\ndef g(x): ...\ndef h(x): ...\na.f, b.g = f, g\nsetattr(a, n, h)"
    assert unchecked(ast.parse(code)) == {"f", "h"}


@pytest.mark.parametrize("seam", [seam for seam in WRAPPED if seam.part != "v2"], ids=lambda seam: seam.name)
def test_a_parameter_that_is_added_removed_or_changed_is_found_at_start_and_in_source(seam, monkeypatch):
    """A parameter of each wrapped function is removed, renamed or given a default, and one is added."""
    pytest.importorskip("vllm")
    owner, last, function = _entered(seam)
    parameters = list(inspect.signature(function).parameters.values())
    added = inspect.Parameter("brand_new", inspect.Parameter.KEYWORD_ONLY, default=None)
    changed = [[*parameters, added]]
    if len(parameters) > 1:
        changed += [parameters[:-1], [*parameters[:-1], parameters[-1].replace(name="other")]]
        changed += [[*parameters[:-1], parameters[-1].replace(default=17)]]
    for form in changed:
        monkeypatch.setattr(owner, last, _with(function, form))
        with pytest.raises(SeamMoved) as refused:
            seams.require(seam.name)
        different = {str(each.name) for each in form}.symmetric_difference(each.name for each in parameters)
        assert all(name in str(refused.value) for name in (last, *(different or {"=17"})))
        monkeypatch.undo()
    seams.require(seam.name)


def test_source_reads_parameters_as_python_does():
    code = "def f(a, /, b, c=1, *d, e, g='x', **h): ..."
    scope: dict = {}
    exec(code, scope)
    definition = ast.parse(code).body[0]
    assert isinstance(definition, ast.FunctionDef)
    expected = seams.written(inspect.signature(scope["f"]).parameters.values())
    assert seams.parameters_of(definition.args) == expected
    assert expected["g"] == "g='x' (keyword only)"


@pytest.mark.parametrize(
    "ours",
    [
        lambda manager: None,  # as in 0.1.0: vLLM 0.33 gave it a second argument
        lambda manager, request: None,
        lambda manager, asked, *args, **kwargs: None,
        lambda manager, request, *args: None,
        lambda manager, request, most, **kwargs: None,
        lambda manager, request, max_cache_hit_length: None,
        lambda manager, request, max_cache_hit_length=1: None,
        lambda manager, request, *args, own, **kwargs: None,
    ],
)
def test_a_wrapper_that_cannot_be_called_as_the_original_is_refused(ours):
    def get_computed_blocks(self, request, max_cache_hit_length=None): ...

    with pytest.raises(SeamMoved, match="get_computed_blocks"):
        seams.forwards(get_computed_blocks)(ours)
    seams.forwards(get_computed_blocks)(lambda manager, request, *args, **kwargs: None)
    seams.forwards(get_computed_blocks)(lambda manager, request, max_cache_hit_length=None: None)
