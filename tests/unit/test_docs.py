"""The pages in docs/ and at the root: links lead somewhere, names in them are names in the code, made parts are up to date,
and examples run."""

import importlib.util
import inspect
import itertools
import operator
import pydoc
import re
import sys
import types
from pathlib import Path

import msgspec
import pytest

import patchclamp as pc
from patchclamp.engines.transformers import TransformersEngine
from patchclamp.kernels import switches
from patchclamp.language import ops
from patchclamp.lm import LM
from patchclamp.plan.bind import bind
from patchclamp.runtime import Limits
from patchclamp.sites import tables
from patchclamp.testing import FakeEngine
from tools import engine_step, rooms, trace_pages

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
         for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}  # fmt: skip
ARCHITECTURE = PAGES["docs/architecture.md"]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))

every_page = pytest.mark.parametrize("name", PAGES)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(title: str) -> str:
    return re.split(r"\n## ", ARCHITECTURE.partition(f"\n## {title}\n")[2])[0]


# -- every page


@every_page
def test_relative_links_lead_somewhere(name):
    text = re.sub(r"```.*?```", "", PAGES[name], flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@every_page
def test_code_blocks_say_what_they_are(name):
    fences = re.findall(r"^```(.*)$", PAGES[name], re.M)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "bash", "sh", "text"}
    assert set(fences[1::2]) <= {""}


def test_the_readme_counts_the_model_classes():
    classes = {name for family in tables.FAMILIES for name in family.architectures}
    assert f"[{len(classes)} model classes]" in PAGES["README.md"]


def test_every_switch_and_size_is_on_the_gpu_page():
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGES["docs/gpu.md"], re.M))
    sizes = set(msgspec.structs.asdict(Limits())) - {"max_programs"}  # vLLM's max_num_seqs
    assert listed == set(switches.SWITCHES) | sizes | {"numerics", "check_rate"}


def test_every_option_of_the_transformers_engine_is_in_the_guide():
    table = PAGES["docs/guide.md"].partition("On Transformers the options are:")[2].partition("\n\n|")[2]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", table.partition("\n\n")[0], re.M)))
    options = inspect.signature(TransformersEngine).parameters
    assert sorted(listed) == sorted(set(options) - {"name"})


def test_make_targets_are_there():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in PAGES.values():
        for shell in re.findall(r"```(?:bash|sh)\n(.*?)```", page, re.S):
            assert set(re.findall(r"^make ([a-z]+)", shell, re.M)) <= targets


def test_files_that_pages_name_are_there():
    for name in ("docs/guarantees.md", "docs/architecture.md", "README.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`((?:src|tests|tools|docs|benchmarks)/[\w./]+)`", PAGES[name]):
            assert (ROOT / path).exists(), path


def test_files_of_the_package_that_the_architecture_names_are_there():
    paths = set(re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE))
    assert len(paths) > 40
    files = {path.relative_to(ROOT / "src" / "patchclamp").as_posix() for path in (ROOT / "src").rglob("*.py")}
    for path in paths - {name for name in paths if (ROOT / name).exists()}:
        assert any(name == path or name.endswith(f"/{path}") for name in files), path


@every_page
def test_no_paragraph_breaks_into_a_list(name):
    """A line within a paragraph that begins as an item of a list is shown as one."""
    lines = re.sub(r"```.*?```", "", PAGES[name], flags=re.S).splitlines()
    item, number = re.compile(r"([-+*]|1[.)]) "), re.compile(r"\d+[.)] ")  # of numbers, only 1 begins a list there
    for before, line in itertools.pairwise(lines):
        assert not item.match(line) or before[:1] in ("", "#", " ") or item.match(before) or number.match(before), line


# -- docs/architecture.md


def test_the_engine_step_is_the_codes():
    assert engine_step.with_section(ARCHITECTURE) == ARCHITECTURE, "what a step does has changed: run make docs"


def test_the_picture_of_the_rooms_is_up_to_date():
    assert rooms.FILE.read_text(encoding="utf-8") == rooms.picture(), "the rooms have changed: run make docs"


def test_the_recipes_and_snippets_are_up_to_date():
    assert PAGES["docs/recipes.md"] == trace_pages.recipes_page(), "the recipes have changed: run make docs"
    assert PAGES["docs/coming_from.md"] == trace_pages.coming_page(), "the snippets have changed: run make docs"


def test_every_room_has_its_row():
    listed = re.findall(r"`(\w+)(?:/|\.py)`", "".join(re.findall(r"^\|.*?\|", section("The rooms"), re.M)))
    assert sorted(listed) == sorted(rooms.imports())


def test_every_file_of_the_vllm_engine_is_for_a_box():
    table = "".join(re.findall(r"^\| .*\|$", section("Processes and threads"), re.M))
    listed = set(re.findall(r"`(\w+\.py)`", table))
    files = {path.name for path in (ROOT / "src/patchclamp/engines/vllm").glob("*.py")} - {"__init__.py"}
    assert listed == files


def test_the_words_are_names_in_the_code():
    for line in re.findall(r"^\| .*\|$", section("The words") + section("Who owns what"), re.M):
        _, _, code, _, _ = re.split(r" ?\| ?", line)
        for name in re.findall(r"`(.*?)`", code):
            if "/" in name:
                assert (ROOT / "src" / "patchclamp" / name).exists(), name
                continue
            owner, _, attribute = name.partition(".")
            assert re.search(rf"^(class {owner}\b|{owner} = )", SOURCE, re.M), name
            assert re.search(rf"^    (def )?{attribute}\b|self\.{attribute}\b", SOURCE, re.M), name


def test_what_the_page_adds_works(tmp_path, monkeypatch):
    op, family, study = re.findall(
        r"```python\n(.*?)```", section("Where to add a site, an op, a family, a study"), re.S
    )
    lm = LM("", FakeEngine())
    names = vars(sys.modules[bind.__module__]) | vars(ops)
    struct, lowers = op.split("# plan/bind.py")
    exec(struct, names)
    exec(lowers, names | {"ops": types.SimpleNamespace(**names)})
    plain, negated = (
        lm.run("one two", max_tokens=1, capture=["mlp_out"], edits=edits)
        for edits in ([], [names["Negate"]("mlp_out[-1]")])
    )
    assert (negated["mlp_out[2]"] == -plain["mlp_out[2]"]).all()
    assert (negated["mlp_out[1]"] == plain["mlp_out[1]"]).all()

    names = dict(vars(tables))
    exec(family, names)
    made = names["POST_NORMED"]
    assert made.points["mlp_out"].vllm.module.endswith("post_feedforward_layernorm")
    assert made.points.keys() == tables.LLAMA.points.keys()

    (tmp_path / "norms.py").write_text(study)
    spec = importlib.util.spec_from_file_location("patchclamp.studies.norms", tmp_path / "norms.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where annotations are looked up
    spec.loader.exec_module(module)
    assert module.Norms.fields()["prompt"].doc == "Prompt, as text or token ids."
    result = module.norms(lm, prompt="one two")
    assert result.values.shape == (lm.model.layers,)
    result.save(tmp_path / "norms")
    assert (module.NormsResult.load(tmp_path / "norms").values == result.values).all()
    assert result.config == {"study": "Norms", "prompt": "one two"}
    lm.close()


@pytest.mark.parametrize("name", ["Add", "Capture", "Site", "Program", "Vector", "studies.PatchSweepResult",
                                  "studies.Match", "studies.Cell", "studies.Metric", "studies.SteeringVectors"])  # fmt: skip
def test_help_shows_no_methods_of_msgspec(name):
    shown = pydoc.plain(pydoc.render_doc(operator.attrgetter(name)(pc)))
    assert "Method resolution order" in shown
    rest = shown.partition("builtins.object")[2]
    for word in ("msgspec", "__copy__", "__replace__", "__rich_repr__", "__struct_", "__reduce__", "__match_args__"):
        assert word not in rest, word
