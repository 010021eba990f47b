"""What each micro-optimisation wins on a CUDA machine: with it, and without it (`kernels.switches`), side by side.

    python benchmarks/gpu_switches.py --out DIR     (--batches 1,64 --pairs 16; random weights, the shape of Qwen3-0.6B)

One engine with everything on, and one more for each switch, with it off; blocks of steps alternate between the two.  A
figure is the time without over the time with it, with the 95 % interval of a bootstrap: below 1.01 in its best case,
the optimisation is not worth its lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_speed import STEPS, blocks, ratio
from benchmarks.side import PROMPT, Remote
from patchclamp.kernels.switches import SWITCHES, VARIABLE
from tests.gpu.board import source

PREFILL = "prompts of 600 tokens, steer every layer"  # longer than any CUDA graph: the host launches every kernel
CASES = (PREFILL, "steer every layer", "steer one layer", "capture every layer", "steer every layer, requests change")
ROOM_BYTES = 8 << 30  # of each engine's key/value cache


def started(model: str, options: dict[str, Any], without: str = "") -> Remote:
    """An engine with one switch off; its process takes the environment of now."""
    os.environ[VARIABLE] = without
    try:
        side = Remote(model, "patchclamp", ROOM_BYTES, **options)
        side.facts()
        return side
    finally:
        del os.environ[VARIABLE]


def compare(on: Remote, off: Remote, batch: int, case: str, pairs: int) -> dict[str, Any]:
    """Milliseconds a step with and without, both sides at the same context."""
    changing, again = case if "change" in case else "", "capture" in case

    def block(side: Remote, core: int) -> float:
        if case == PREFILL:
            return 1e3 * 600 / side.prefill("steer every layer", batch, 600, core)
        if again:  # what was captured goes back between blocks, as a server's would
            side.empty()
            side.fill(batch, case, 4)
        return side.block(STEPS[batch], core, changing)

    try:
        for side in (on, off) if case != PREFILL else ():
            side.fill(batch, case, 24)  # until graphs are cut
        measured = ratio(*blocks(lambda core: block(on, core), lambda core: block(off, core), pairs))
    finally:
        for side in (on, off):
            side.empty()
    names = {"stock": "with_ms", "ours": "without_ms", "stock_blocks": "with_blocks", "ours_blocks": "without_blocks"}
    return {names.get(name, name): value for name, value in measured.items()}


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown, a row a switch, case and batch."""
    lines = [f"# What each micro-optimisation wins, {result['date']}", "",
             f"{result['gpu']}, vLLM {result['vllm']}, PyTorch {result['torch']}, the shape of Qwen3-0.6B. "
             f"`{result['command']}`", "",
             "| switch | case | batch | with ms | without ms | without / with [95 %] |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in result["rows"]:
        head = f"| {row['switch']} | {row['case']} | {row['batch']} |"
        if "error" in row:
            lines.append(f"{head} | | {row['error']} |")
        else:
            lines.append(f"{head} {row['with_ms']:.3f} | {row['without_ms']:.3f} | "
                         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] |")  # fmt: skip
    lines += [""] + [f"- `{name}`: {meaning}." for name, meaning in SWITCHES.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--switches", default=",".join(SWITCHES))
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    import torch
    import vllm

    from tests.models import UNTIMED, shape_only

    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    batches = [int(batch) for batch in args.batches.split(",")]
    model = shape_only(Path(f"/tmp/shape-0.6b-{args.layers}"), "0.6b", args.layers)
    sizes = sorted({1, *batches, max(batches) + PROMPT})
    options = {"compilation_config": {"cudagraph_capture_sizes": sizes, "inductor_compile_config": UNTIMED}}
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__,
        "torch": torch.__version__, "source": source(), "command": "python benchmarks/gpu_switches.py", "rows": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"gpu_switches-{result['date']}.json"
    on = started(model, options)
    for switch in args.switches.split(","):
        off = started(model, options, switch)
        for batch in batches:
            for case in CASES:
                row: dict[str, Any] = {"switch": switch, "case": case, "batch": batch}
                try:
                    row |= compare(on, off, batch, case, args.pairs)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                print({name: value for name, value in row.items() if not name.endswith("_blocks")}, flush=True)
                result["rows"].append(row)
                file.write_text(json.dumps(result, indent=1) + "\n")
        off.close()
    on.close()
    file.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
