"""How much faster a patch sweep on Transformers is where only what patches can change is computed.

    python benchmarks/exact_path.py --out DIR                  (a CPU is enough; SmolLM2-135M, fp32)
    python benchmarks/exact_path.py --only 40

The same sweep of `resid_pre` on two engines, in turns. With `recompute="all"` every run is computed from its first
layer and its first position on, in batches of the same size. With `recompute="changed"`, the default, what is below the
first layer and before the first position that a batch patches is left out. A grid of a long prompt is thinned out to
every so many layers and positions. Cells must be the same within 1e-4 of the metric. CPU seconds are of all threads of
the process: beside other work they tell more than the clock.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TAIL = " The {tower} is located in the city of"
FILL = " Many travellers write about old and famous buildings, and this is what one of them has to say."
GRIDS = {5: (1, 1, 3), 40: (1, 1, 2), 204: (3, 8, 1)}  # by tokens: every so many layers, positions; rounds
BAR = {40: 2.5}
MAX_OFF = 1e-4


def prompts(lm: Any, tokens: int) -> tuple[list[int], list[int]]:
    """A clean and a corrupt prompt of so many tokens, which differ in one."""
    tail = lm.tokens(TAIL.format(tower="tower"))
    filler = lm.tokens(FILL * (tokens // 10))
    clean = (filler[: max(tokens - len(tail), 0)] + tail)[-tokens:]
    corrupt = list(clean)
    corrupt[-min(tokens, len(tail)) + 1] = lm.tokens(" bridge")[-1]
    return clean, corrupt


def sweep(pc: Any, lm: Any, tokens: int) -> tuple[Any, float, float]:
    """The sweep, and the seconds it took, by the clock and of the CPU."""
    clean, corrupt = prompts(lm, tokens)
    layer_step, position_step, _ = GRIDS[tokens]
    began, cpu = time.perf_counter(), time.process_time()
    result = pc.studies.patch_sweep(
        lm, clean=clean, corrupt=corrupt, answer=" Paris", foil=" Rome", sites=[pc.resid_pre], metric="logit_diff",
        layers=list(range(0, lm.model.layers, layer_step)), positions=list(range(0, tokens, position_step)),
        show_progress=False,
    )  # fmt: skip
    return result, time.perf_counter() - began, time.process_time() - cpu


def measure(pc: Any, engines: dict[str, Any], tokens: int) -> dict[str, Any]:
    wall: dict[str, list[float]] = {way: [] for way in engines}
    cpu: dict[str, list[float]] = {way: [] for way in engines}
    results: dict[str, Any] = {}
    for _ in range(GRIDS[tokens][2]):
        for way, lm in engines.items():
            results[way], seconds, cpu_seconds = sweep(pc, lm, tokens)
            wall[way].append(round(seconds, 2))
            cpu[way].append(round(cpu_seconds, 2))
            print(tokens, "tokens", way, f"{seconds:.1f} s, {cpu_seconds:.1f} s of CPU", file=sys.stderr, flush=True)
    whole = results["all"]
    off = float(np.abs(results["changed"].values - whole.values).max())
    return {
        "tokens": tokens, "cells": int(whole.values.size), "grid": list(whole.values.shape),
        "wall_s": wall, "cpu_s": cpu, "speedup_wall": _ratio(wall), "speedup_cpu": _ratio(cpu),
        "largest_difference": off, "largest_effect": float(np.abs(whole.values - whole.corrupt).max()),
        "noise_floor": {way: result.noise_floor for way, result in results.items()},
        "computed": results["changed"].computed, "same": off <= MAX_OFF,
        **({"bar": BAR[tokens]} if tokens in BAR else {}),
    }  # fmt: skip


def _ratio(seconds: dict[str, list[float]]) -> float:
    return round(statistics.median(seconds["all"]) / statistics.median(seconds["changed"]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the result")
    parser.add_argument("--only", type=int, nargs="*", default=list(GRIDS), help="prompts of so many tokens")
    arguments = parser.parse_args()

    import torch
    import transformers

    import patchclamp as pc

    ways = ("all", "changed")
    engines = {way: pc.LM("smollm2", engine="transformers", dtype="float32", recompute=way) for way in ways}
    for lm in engines.values():  # proofs, and what is slow the first time
        sweep(pc, lm, 5)
    rows = [measure(pc, engines, tokens) for tokens in arguments.only]
    result = {
        "when": datetime.datetime.now(datetime.UTC).date().isoformat(), "model": "smollm2", "dtype": "float32",
        "batch": 512, "max_num_seqs": 64, "sweeps": rows,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "load": os.getloadavg(), "patchclamp": pc.__version__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": "python benchmarks/exact_path.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"exact_path-smollm2-{result['when']}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
