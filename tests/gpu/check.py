"""The guarantees on a GPU: kernel, graphs and eager, with asynchronous scheduling, on both runners.

    python -m tests.gpu.check --out DIR               # one GPU
    python -m tests.gpu.check --out DIR --two         # two GPUs
    python -m tests.gpu.check --out DIR --families    # one GPU: families of real shapes alone
    python -m tests.gpu.check --table FILE.json ...   # several, side by side

Each part runs in a process of its own, several at a time; stock vLLM in others, without the plugin.  Weights are random,
prompts are token ids; parity alone has text, of words with a tokenizer made on the spot.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu import board, families, images, kinds, modes, recorded
from tests.gpu.engines import COMPILED, fresh
from tests.gpu.table import table

MODES = ("graphs", "v1 graphs", "eager", "v1 eager", "graphs again", "v1 graphs again")
BESIDE = (
    "kernel",
    "crowded",
    "v1 crowded",
    "crowded, Qwen3",
    "transformers",
    "addresses",
    "v1 addresses",
    "two runners",
    "uniform",
    "v1 uniform",
    "lent",
    "graded",
    "v1 graded",
    "graded, invariant",
    "v1 graded, invariant",
    "batches, invariant",
    "v1 batches, invariant",
)
HOW = modes.parts()  # how requests are run, and what of them others may reuse, in both dtypes
SITES = tuple(families.PARTS)
IMAGES = tuple(images.PARTS)
RECORDED = tuple(recorded.PARTS)
KINDS = tuple(kinds.PARTS)  # of engine: with adapters, with fp8, with drafts
TWO = ("tp2 eager", "tp2 graphs", "pp2 eager", "pp2 graphs", "tp2 graphs again", "pp2 graphs again", "tp2 graded",
       *(part for part in (*SITES, *KINDS) if "tp2" in part))  # fmt: skip
ALONE = ("bounded", "v1 bounded", "sleep", "v1 sleep")  # they look at the memory of the whole GPU
ONE = (*MODES, *BESIDE, *HOW, *(part for part in (*SITES, *KINDS) if part not in TWO), *IMAGES, *RECORDED,
       *ALONE)  # fmt: skip
FAMILIES = tuple(part for part in SITES if part not in TWO)
MODELS = {"8b": Path("/tmp/model-8b-4"), "0.6b": Path("/tmp/model-0.6b-4")}
SMALL = {"parity": Path("/tmp/model-135m-30"), "poison": Path("/tmp/model-135m-3")}


def make_models() -> None:
    from tests.models import with_weights, with_words

    for shape, folder in MODELS.items():
        with_weights(folder, shape, 4)
    for layers, folder in zip((30, 3), SMALL.values(), strict=True):
        with_words(with_weights(folder, "135m", layers, vocab_size=modes.VOCABULARY), modes.VOCABULARY)


def carry_out(part: str) -> None:
    """One part, in this process."""
    from tests.gpu import corners
    from tests.gpu.guarantees import found_again, guarantees

    model = str(MODELS["0.6b" if "Qwen3" in part else "8b"])
    with board.noted(part, "ran to its end"):
        if part == "models":
            make_models()
        elif part == "kernel":
            corners.kernel(part)
            corners.drain("drain")
        elif part in SITES:
            families.sites(part)
        elif part in IMAGES:
            images.images(part)
        elif part in RECORDED:
            recorded.recorded(part)
        elif part in KINDS:
            kinds.kinds(part, str(MODELS.get(kinds.PARTS[part])))
        elif part in HOW:
            what = part.split()[0]
            {"parity": modes.parity, "poison": modes.poison}[what](part, str(SMALL[what]))
        elif part.endswith(("eager", "graphs")):
            guarantees(part, model)
        elif part.endswith(" again"):
            found_again(part.removesuffix(" again"), model)
        else:
            exact = modes.IEEE if part.endswith("graded") else {}
            runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if part.startswith("v1 ") else {}
            invariant = corners.INVARIANT if part.endswith("graded, invariant") else {}
            os.environ.update(fresh("ours", part) | exact | runner | invariant)
            does = {"crowded": corners.crowded, "transformers": corners.like_transformers, "bounded": corners.bounded,
                    "sleep": corners.sleeping, "addresses": corners.watched, "two runners": corners.one_after_the_other,
                    "uniform": corners.uniform, "lent": corners.lent, "graded": corners.graded,
                    "batches": corners.batches}  # fmt: skip
            does[part.removeprefix("v1 ").removeprefix("tp2 ").split(",")[0]](part, model)


def in_a_process(part: str, folder: Path, seconds: float) -> None:
    """One part, in a process of its own, whose complaints go to a file."""
    command = [sys.executable, "-m", "tests.gpu.check", "--out", str(folder), "--only", part]
    name = part.replace(",", "").replace(" ", "_")
    file = folder / f"{name}.json"
    file.unlink(missing_ok=True)
    with (folder / f"{name}.log").open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
        try:
            ended, check = process.wait(seconds), "ran to its end"
        except subprocess.TimeoutExpired:
            ended, check = f"stopped after {seconds:.0f} s", "had time to end"
            os.killpg(process.pid, signal.SIGKILL)  # stock vLLM, which it started, too
            process.wait()
    if ended != 0:
        found = json.loads(file.read_text()) if file.exists() else {"checks": []}
        found["checks"].append({"mode": part, "check": check, "holds": False, "found": f"exit {ended}"})
        file.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--parts", default=";".join(ONE), help="separated by semicolons")
    parser.add_argument("--two", dest="parts", action="store_const", const=";".join(TWO), help="those for two GPUs")
    parser.add_argument("--families", dest="parts", action="store_const", const=";".join(FAMILIES), help="all of them")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=3, help="parts that run at the same time")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of all parts together")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(file.read_text()) for file in args.table]))
        return
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # for what is not compiled ahead of time; see BASE
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # to a part's file
    if args.only:
        board.FILE = args.out / f"{args.only.replace(',', '').replace(' ', '_')}.json"
        carry_out(args.only)
        return
    shutil.rmtree(COMPILED, ignore_errors=True)
    folder = args.out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    began, parts = time.time(), [part.strip() for part in args.parts.split(";")]

    def go(part: str) -> None:
        in_a_process(part, folder, max(began + args.limit_s - time.time(), 1.0))
        if f"{part} again" in parts:
            go(f"{part} again")

    if set(parts) - {*SITES, *IMAGES, *RECORDED}:  # they make their own
        go("models")
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(go, [part for part in parts if part not in ALONE and not part.endswith(" again")]))
    for part in [part for part in parts if part in ALONE]:
        go(part)
    files = [folder / f"{part.replace(',', '').replace(' ', '_')}.json" for part in ("models", *parts)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    facts = {**board.facts(), "command": f"python -m tests.gpu.check --parts \"{';'.join(parts)}\"", "parts": parts,
             "seconds": round(time.time() - began)}  # fmt: skip
    checks = [check for each in found for check in each["checks"]]
    named = {parser.get_default("parts"): "", ";".join(TWO): "-two_gpus", ";".join(FAMILIES): "-families"}
    some = named.get(args.parts, "-" + parts[0].replace(",", "").replace(" ", "_"))
    file = args.out / f"gpu_check{some}-{facts['vllm']}-{facts['date']}.json"
    file.write_text(json.dumps({**facts, "checks": checks}, indent=1) + "\n")
    missing = [part for part in parts if not any(check["mode"] == part for check in checks)]
    failed = [f"{check['mode']}: {check['check']}" for check in checks if check["holds"] is False]
    print(
        f"{len(checks)} entries in {facts['seconds']} s; failed: {failed or 'none'}; said nothing: {missing or 'none'}"
    )
    sys.exit(1 if failed or missing else 0)


if __name__ == "__main__":
    main()
