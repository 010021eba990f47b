"""Every function of vLLM that `compat/` replaces is declared with its whole signature, which is compared at start and
with the source of another vLLM."""

import ast
import importlib.util
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patchclamp.engines.vllm.compat import seams
from patchclamp.engines.vllm.compat.seams import SEAMS, Seam
from patchclamp.errors import SeamMoved

tool = pytest.importorskip("tools.seams")
ROOM = Path(seams.__file__).parent
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(ROOM.glob("*.py"))}


def test_a_place_is_declared_once():
    places = [seam.place for seam in SEAMS]
    assert len(places) == len(set(places)) >= 35


def _decorators(node: ast.FunctionDef) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


UNCOMPARED = {
    "load_model",
    "patchclamp_rpc",
    "patchclamp_call",
    "call_variant",
}  # of a class that passes unknown names on, ours alone, and of a
# compiler's result


def unchecked(tree: ast.AST) -> set[str]:
    """Functions that are set on objects, in any way, and whose parameters are not compared with the original's."""
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
    return {name for name in put & defined.keys() if "forwards(" not in _decorators(defined[name])}


def test_every_function_that_takes_another_ones_place_is_compared_with_it():
    assert set().union(*(unchecked(tree) for name, tree in TREES.items() if name != "seams.py")) == UNCOMPARED
    assert not any("functools.wraps" in ast.unparse(tree) for name, tree in TREES.items() if name != "seams.py")
    code = "def f(x): ...\n@forwards(y)\ndef g(x): ...\ndef h(x): ...\na.f, b.g = f, g\nsetattr(a, n, h)"
    assert unchecked(ast.parse(code)) == {"f", "h"}


def _with(parameters):
    """A function that takes given parameters."""

    def changed(*args, **kwargs):
        raise AssertionError("it is not called")

    changed.__signature__ = inspect.Signature(parameters)
    return changed


@pytest.mark.parametrize(
    "seam", [seam for seam in SEAMS if seam.forms and seam.part != "v2"], ids=lambda seam: seam.name
)
def test_a_parameter_that_is_added_removed_or_changed_is_found_at_start(seam, monkeypatch):
    pytest.importorskip("vllm")
    owner, last = seam.found()
    parameters = list(inspect.signature(getattr(owner, last)).parameters.values())
    added = inspect.Parameter("brand_new", inspect.Parameter.KEYWORD_ONLY, default=None)
    changed = [[*parameters, added]]
    if len(parameters) > 1:
        changed += [parameters[:-1], [*parameters[:-1], parameters[-1].replace(name="other")]]
        changed += [[*parameters[:-1], parameters[-1].replace(default=17)]]
    for form in changed:
        monkeypatch.setattr(owner, last, _with(form))
        with pytest.raises(SeamMoved) as refused:
            seam.found()
        different = {str(each.name) for each in form}.symmetric_difference(each.name for each in parameters)
        assert all(name in str(refused.value) for name in (last, *(different or {"=17"})))
        monkeypatch.undo()
    monkeypatch.delattr(owner, last)
    if not hasattr(owner, last):
        with pytest.raises(SeamMoved, match=last):
            seam.found()
    monkeypatch.undo()
    seam.found()


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


# -- the source of another vLLM


RUNNER = "vllm/worker/runner.py"
CODE = {
    "vllm/__init__.py": "raise RuntimeError\n",
    "vllm/_version.py": "__version__ = version = '9.9.9'\n",
    "vllm/worker/__init__.py": "from .runner import *\nraise RuntimeError\n",
    RUNNER: "class Runner:\n async def step(self, plan: int, *, dry: bool=False) -> None: ...\n",
    "vllm/user.py": "from vllm.worker.runner import Runner\n",
}
STEP = Seam("vllm.worker.runner:Runner.step", "run", ("self, plan, *, dry=False",))


def tree(folder: Path, code: dict[str, str]) -> Path:
    for path, text in code.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize("module", ["vllm.worker.runner", "vllm.worker", "vllm.user"])
def test_a_function_is_found_at_its_place_or_where_that_imports_it_from(tmp_path, module):
    seam = Seam(f"{module}:Runner.step", "run", STEP.forms)
    assert tool.compare(tree(tmp_path, CODE), [seam]) == [(seam, "")]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [("plan", "asked", "it has a new parameter asked; it has no parameter plan"),
     ("*, ", "", "it has no parameter *"), ("def step", "def steps", "not found"),
     ("=False", "=True", "it has a new parameter dry=True; it has no parameter dry=False")],
)  # fmt: skip
def test_a_difference_in_the_source_is_named(tmp_path, old, new, problem):
    [(_, found)] = tool.compare(tree(tmp_path, CODE | {RUNNER: CODE[RUNNER].replace(old, new)}), [STEP])
    assert found == problem


def test_a_function_that_moved_is_looked_for(tmp_path):
    moved = {"vllm/engine.py" if path == RUNNER else path: text for path, text in CODE.items()}
    [(_, found)] = tool.compare(tree(tmp_path, moved), [STEP])
    assert found == "not found; defined in vllm/engine.py"


def test_names_that_are_gone_are_type_errors(tmp_path):
    root = tree(tmp_path / "other", CODE)
    code = "from vllm.worker.runner import Runner, gone\n\nRunner().step(plan='x')\n"
    ours = tree(tmp_path / "ours", {"user.py": code})
    one, *others = tool.type_errors(root, ours)
    assert one.startswith("user.py:1:")
    assert "gone" in one
    assert any(each.startswith("user.py:3:") for each in others)
    with pytest.raises(SystemExit):
        tool.type_errors(root, tree(tmp_path / "empty", {"nothing.txt": ""}))


def test_the_source_is_not_imported(tmp_path):
    code = f"import sys; from tools.seams import main; main([{str(tree(tmp_path, CODE))!r}]); assert 'vllm' not in sys.modules"
    root = Path(tool.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("vLLM 9.9.9: 0 seams match")


def test_the_installed_vllm_and_a_wheel_with_a_change(tmp_path, capsys):
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM's source is read")
    installed = Path(spec.origin).parent
    assert tool.main([str(installed)]) == 0
    assert f"{len(SEAMS)} seams match, 0 differ" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "vllm-9.9.9-py3-none-any.whl", "w") as wheel:
        for file in installed.rglob("*.py"):
            text = file.read_text("utf-8")
            if file.name == "kv_cache_manager.py":
                text = text.replace("def get_computed_blocks(self, request:", "def get_computed_blocks(self, asked:")
            wheel.writestr(f"vllm/{file.relative_to(installed).as_posix()}", text)
    assert tool.main([wheel.filename]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
    assert len(told) == 1
    assert "get_computed_blocks: it has a new parameter asked; it has no parameter request" in told[0]
    with pytest.raises(SystemExit, match="expected a wheel"):
        tool.main([str(tmp_path / "nothing")])
