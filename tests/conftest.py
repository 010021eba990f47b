"""What all tests share: no hub, quiet engines, the small real model, one seed, and which tests run in one process."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("PYTHONHASHSEED", "0")  # of the processes that tests start
# OpenMP's threads spin while they wait, for milliseconds wherever another process has their core: steps of small models
# then take ten times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# one core for each process: threads of two that share the cores wait for one another, and bits depend on how many share
# the work, so that a test that compares two processes would fail where it runs alone
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import gc
import json
import random
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("same every time", deadline=None, derandomize=True, database=None)
settings.register_profile("soak", deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("PATCHCLAMP_HYPOTHESIS", "same every time"))

# Test files whose engines one worker process holds and shares, the longest group first; any other file is a group of its
# own.  Files of a group run in this order, and their engines end with the group.
GROUPS = {
    "real": (
        "test_sweep",
        "test_steering",
        "test_readme",
        "test_train_sae",
        "test_notebooks",
        "test_cli_parity",
    ),
    "eager": (
        "test_stream",
        "test_modes",
        "test_same_run",
        "test_refusals",
        "test_cache",
        "test_many",
        "test_doctor",
        "test_asked",
        "test_fetch",
        "test_submit",
        "test_inert",
        "test_trace",
        "test_when",
    ),
    "compiled": ("test_exact", "test_parity", "test_ops", "test_token_ids", "test_apply"),
    "studies": ("test_grade", "test_graded_knockouts", "test_lens", "test_fuzz", "test_harvest"),
    "saes": ("test_sae", "test_sae_studies", "test_projected"),
    "families": ("test_families", "test_untabled", "test_variants", "test_prover", "test_multimodal", "test_images"),
    "processes": ("test_off_is_stock", "test_two_bodies", "test_parallel"),
    "tiny": (
        "test_storm",
        "test_capacity",
        "test_lora",
        "test_poison",
        "test_admission",
        "test_speculative",
        "test_recompute",
        "test_quantised",
        "test_wrong_on_transformers",
        "test_circuit",
        "test_studies",
        "test_in_turn",
        "test_monitors",
        "test_steady",
        "test_hooks",
        "test_nnsight",
        "test_lora_parallel",
    ),
}
GROUP_OF = {f"serve/{path.name}": "serve" for path in sorted(Path(__file__).parent.glob("serve/test_*.py"))}
GROUP_OF["serve/test_replicas.py"] = "replicas"
GROUP_OF |= {f"engines/{name}.py": group for group, names in GROUPS.items() for name in names}
ORDER = {file: number for number, file in enumerate(GROUP_OF)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen-golden", action="store_true", help="write the files in tests/golden instead of comparing")


def group_of(nodeid: str) -> str:
    """The group of a test: its file's."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    return GROUP_OF.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files by group, the files of no group last."""
    items.sort(key=lambda item: ORDER.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(ORDER)))


def pytest_collection_finish() -> None:
    """Keep vLLM from freezing and thawing all objects where an engine starts or ends, which costs one to four seconds."""
    gc.freeze = gc.unfreeze = lambda: None
    gc.set_threshold(20_000, 20, 20)  # a twentieth of the time goes to collections else; each file ends with one
    settle()


def pytest_sessionfinish() -> None:
    thaw()


freeze, thaw = gc.freeze, gc.unfreeze


def settle() -> None:
    """Have the garbage collector leave alone all that lives now: a test that collects waits for what is new only."""
    gc.collect()
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Settle after a file's first test, which starts its engines, and after its last."""
    begins = item.path not in _begun
    _begun.add(item.path)
    if nextitem is not None and (begins or nextitem.path != item.path):
        settle()


_begun: set[Path] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker process runs all of a group. Marks for `--dist loadgroup` do not reach xdist 3.8 from pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # in the order of `GROUPS`
    return Groups(config, log)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Every test draws the same numbers each time, whichever tests ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct as a bf16 checkpoint, made on first use."""
    from patchclamp.engines.preflight import prepare

    return prepare()


@pytest.fixture(scope="session")
def shortened(smollm2, tmp_path_factory) -> str:
    """The first four and the last four layers of SmolLM2: run in a third of the time. What they generate is no sense, but
    varied; the first eight alone repeat themselves, whatever the prompt."""
    return ends_of(smollm2, tmp_path_factory.mktemp("shortened"), 8)


@pytest.fixture(scope="session")
def narrowed(shortened, tmp_path_factory) -> str:
    """The first `WIDTH` numbers of the stream of `shortened`, and its first neurons and tokens: a step takes as long
    as reading its weights, and these are a tenth. What it generates is varied too."""
    return beginnings_of(Path(shortened), tmp_path_factory.mktemp("narrowed"), TOKENS)


WIDTH, NEURONS, TOKENS = 144, 512, 8192


def ends_of(model: Path, folder: Path, layers: int) -> str:
    """Copy a Llama-shaped checkpoint with this many of its first and last layers."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    end, half = config["num_hidden_layers"], layers // 2
    number_of = {str(old): str(new) for new, old in enumerate([*range(half), *range(end - half, end)])}
    config["num_hidden_layers"] = layers
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        head, is_layer, rest = name.partition("model.layers.")
        number, _, rest = rest.partition(".")
        if not is_layer:
            weights[name] = weight
        elif number in number_of:
            weights[f"{head}{is_layer}{number_of[number]}.{rest}"] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def beginnings_of(model: Path, folder: Path, tokens: int = 49152) -> str:
    """Copy SmolLM2 with the first numbers of its stream, its first neurons, and its first tokens."""
    from safetensors.torch import load_file, save_file

    config, words = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer.json"))
    sizes = {"hidden_size": WIDTH, "intermediate_size": NEURONS, "vocab_size": tokens}
    kept = {config[name]: size for name, size in sizes.items()}
    vocabulary = words["model"]["vocab"]
    # merges are in the order of the tokens that they make: the first ones make of the first tokens what they made before
    words["model"]["merges"] = [pair for pair in words["model"]["merges"] if vocabulary["".join(pair)] < tokens]
    words["model"]["vocab"] = {word: number for word, number in vocabulary.items() if number < tokens}
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, content in (("config.json", config | sizes), ("tokenizer.json", words)):
        (folder / name).write_text(json.dumps(content))
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        whole = [i for i, of in enumerate(("q_proj", "o_proj")) if of in name]  # rows or columns of heads: kept
        shape = [size if i in whole else kept.get(size, size) for i, size in enumerate(weight.shape)]
        weights[name] = weight[tuple(map(slice, shape))].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
