"""The bars of speed on one CUDA machine: patchclamp with stock numerics against stock vLLM, side by side in one run.

    python benchmarks/gpu_speed.py --out DIR     (--shapes 8b,0.6b; random weights)
    python benchmarks/gpu_speed.py --draw DIR/gpu_speed-*.json

Blocks of steps alternate between the two; a figure is the ratio of the medians with the 95 % interval of a bootstrap.
Writes JSON as it goes, a Markdown table and the figure at the end.  Inductor times the kernels that it could use and
may choose others every time, of stock vLLM too: here it chooses without, on both sides, but for `--timed`.  Engines may
start `--together`, which takes less time but says nothing about start-up.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side import PROMPT, WITHIN, Remote, quiet_cores
from tests.gpu.board import source

STEPS = {1: 20, 64: 16, 256: 12}  # of a block, by batch: short ones and many, for the host is noisy
ROUNDS = 3
PROFILED = ("idle", "steer every layer", "steer one layer", "capture every layer",
            "an op each, every layer", "six ops each, every layer")  # fmt: skip
BARS = {
    "idle": (1.01, 1.01), "steer every layer": (1.03, 1.05), "steer every layer, all distinct": (1.10, 1.10),
    "steer one layer": (1.01, 1.01), "capture every layer": (1.05, None), "one in eight steered": (1.03, 1.03),
    "one in eight captured": (1.03, 1.03),
    "an op each, every layer": (1.05, None), "six ops each, every layer": (1.05, None),
    "an op each, one layer": (1.02, None), "six ops each, one layer": (1.02, None),
}  # fmt: skip
BARS_V1 = {"idle": 1.01, "steer one layer": 1.01}  # of a V1 runner
BARS_TP = {"idle": 1.01, "steer every layer": 1.05}  # of two GPUs
PARTS = ("planning", "fetch")  # with bars of their own
LAYERS = {"8b": 32, "0.6b": 28}
IDLE: dict[int, dict[str, tuple[float, float]]] = {}  # by batch: the kernels of a step of ours without programs
GROWTH = ["steer 2 layers", "steer 8 layers", "steer 16 layers", "steer four sites a layer",
          "1 of 64 steered", "16 of 64 steered", "32 of 64 steered",
          "steer every layer, requests change", "capture every layer, requests change"]  # fmt: skip


def ratio(a: list[float], b: list[float]) -> dict[str, float]:
    """Median of b over median of a, and a bootstrap's 95 % interval; pairs are drawn as pairs, for a host drifts."""
    drawn = np.random.default_rng(0).integers(0, len(a), (4000, len(a)))
    low, high = np.quantile(np.median(np.array(b)[drawn], 1) / np.median(np.array(a)[drawn], 1), [0.025, 0.975])
    stock, ours = np.median(a), np.median(b)
    found = {"stock": stock, "ours": ours, "ratio": ours / stock, "low": low, "high": high}
    raw = {name: [round(x, 4) for x in many] for name, many in (("stock_blocks", a), ("ours_blocks", b))}
    return {name: round(float(number), 4) for name, number in found.items()} | {"pairs": len(a)} | raw


def blocks(a: Callable[[int], float], b: Callable[[int], float], count: int) -> tuple[list[float], list[float]]:
    """Blocks of both in turn, the one that begins changing every time, both of a pair on the same core."""
    found: tuple[list[float], list[float]] = [], []
    cores = quiet_cores()
    for i in range(count):
        for side in (0, 1) if i % 2 else (1, 0):
            found[side].append((a, b)[side](cores[i // 2 % len(cores)]))
    return found


def beside(idle: dict[str, tuple[float, float]], active: dict[str, tuple[float, float]]) -> dict[str, list[float]]:
    """Kernels of a step with programs that differ by a microsecond from those of an idle one, most first: how many
    more, and how many microseconds more."""
    none = (0.0, 0.0)
    more = {name: [active.get(name, none)[i] - idle.get(name, none)[i] for i in (0, 1)] for name in idle | active}
    names = sorted((name for name in more if abs(more[name][1]) >= 1), key=lambda name: -abs(more[name][1]))
    return {name[:120]: [round(number, 1) for number in more[name]] for name in names}


def decode(stock: Remote, ours: Remote, batch: int, case: str, count: int) -> dict[str, Any]:
    """Milliseconds a step, both sides at the same context.

    What is captured is in host memory when a block ends, and goes back between blocks, as a server's would; then both
    sides begin anew.  "sustained" is captured without giving anything back, well beyond what is kept in pinned memory.
    Idle, where bars are tightest, there are three rounds of `count` pairs.
    """
    steps, changing = STEPS[batch], case if "change" in case else ""
    again = "capture" in case and "sustained" not in case and not changing
    a, b = [], []

    def block(side: Remote, what: str, core: int) -> float:
        if again:
            side.empty()
            side.fill(batch, what, 4)
        return side.block(steps, core, changing and what)

    for _ in range(ROUNDS if case == "idle" else 1):
        try:
            stock.fill(batch, "idle")
            ours.fill(batch, case)
            more = blocks(lambda core: block(stock, "idle", core), lambda core: block(ours, case, core), count)
            a, b = a + more[0], b + more[1]
            assert stock.context() == ours.context(), "the two sides are at different contexts"
            replayed = ours.replays() if case in PROFILED and case != "idle" else {}
            # both, though one is asked about: a process that was profiled launches kernels more slowly ever after
            kernels, theirs = (side.kernels() if case in PROFILED else {} for side in (ours, stock))
            steady = ours.copies(20)
        finally:
            try:
                stock.empty()
            finally:
                ours.empty()
    found = ratio(a, b) | {"steady": steady} | ({"replays": replayed} if replayed else {})
    if case == "idle":
        IDLE[batch] = kernels
    elif kernels:
        found["kernels_beside_idle"] = beside(IDLE.get(batch, {}), kernels)
    for name, many in (("gpu_us", kernels), ("stock_gpu_us", theirs)):
        if many:
            found[name] = round(sum(us for _, us in many.values()))
    if case == "idle" and (kernels or theirs):  # none are seen where the workers are other processes
        names = sorted(theirs.keys() | kernels.keys())
        counts = {name: (theirs.get(name, (0,))[0], kernels.get(name, (0,))[0]) for name in names}
        differ = [f"{name}: {x} {y}" for name, (x, y) in counts.items() if x != y]
        found |= {"kernels": sum(y for _, y in counts.values()), "kernels_are_stocks": not differ}
        found |= {"kernels_differ": differ} if differ else {}
    return found


def prefill(stock: Remote, ours: Remote, case: str, prompts: int, count: int) -> dict[str, Any]:
    """Prompt tokens a second of prompts of 1,024; the ratio is of times, as elsewhere."""
    core = quiet_cores()[0]
    stock.prefill("idle", prompts, 1024, core)
    cold = ours.prefill(case, prompts, 1024, core)  # the first time, host memory is still to be had
    ours.prefill(case, prompts, 1024, core)
    seconds = [lambda core, side=side, c=c: prompts * 1024 / side.prefill(c, prompts, 1024, core) for side, c in
               ((stock, "idle"), (ours, case))]  # fmt: skip
    found = ratio(*blocks(*seconds, ROUNDS * count if case == "idle" else count))
    speed = {name: round(prompts * 1024 / found.pop(name)) for name in ("stock", "ours")}
    return found | {f"{name}_tokens_s": value for name, value in speed.items()} | {"first_tokens_s": round(cold)}


def control(stock: Remote, other: Remote, batches: list[int], count: int) -> dict[str, Any]:
    """Stock vLLM, started once more, against stock vLLM: what a ratio is worth on this machine."""
    found = {}
    for batch in batches:
        for side in (stock, other):
            side.fill(batch, "idle")
        sides = [lambda core, side=side, n=STEPS[batch]: side.block(n, core) for side in (stock, other)]
        spent = {"gpu_us": [round(sum(us for _, us in side.kernels().values())) for side in (stock, other)]}
        found[f"batch {batch}"] = ratio(*blocks(*sides, count)) | spent
        assert stock.context() == other.context(), "the two sides are at different contexts"
        for side in (stock, other):
            side.empty()
    return found


def fetch(model: str) -> dict[str, Any]:
    """GB/s from the worker into the caller's process, each tensor read once: 16 prompts of 1,024 tokens, all layers."""
    import patchclamp as pc

    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048,
               "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30, "enforce_eager": True}  # fmt: skip
    found = []
    with pc.LM(model, engine="vllm", prove=False, numerics="stock", multiprocess_mode=True, **options) as lm:
        prompts = [np.random.default_rng(i).integers(100, 30000, 1024).tolist() for i in range(16)]
        for _ in range(6):
            runs = lm.run(prompts, max_tokens=1, capture=[pc.Capture(pc.resid_post, dtype="bfloat16")])
            began, size = time.perf_counter(), 0
            for run in runs:
                for layer in range(lm.model.layers):
                    rows = run[pc.resid_post[layer]]
                    size += rows.nbytes
                    assert rows.view(-1)[::2048].float().isfinite().all()  # every page is read
            found.append(size / 1e9 / (time.perf_counter() - began))
            for run in runs:
                run.close()
    return {"GB_s": round(float(np.median(found[1:])), 2), "first_GB_s": round(found[0], 2), "MB": round(size / 1e6)}


def by_pairs(row: dict[str, Any]) -> str:
    """The median of the ratios of pairs of blocks, which were measured one after the other: where a host is now slow
    and now fast it varies less than the ratio of medians."""
    found = np.array(row["ours_blocks"]) / np.array(row["stock_blocks"]) if "stock_blocks" in row else np.zeros(0)
    return f"{np.median(found):.3f}" if len(found) else ""


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown, each beside its bar."""
    about = (f"{result['gpu']}, vLLM {result['vllm']}, PyTorch {result['torch']}, bfloat16, {result['layers']} layers. "
             f"`{result['command']}`")  # fmt: skip
    lines = [f"# Speed against stock vLLM, shape {result['shape']}, {result['date']}", "", about, ""]
    lines += [result["remark"], ""] if "remark" in result else []
    lines += ["| case | batch | stock ms | ours ms | ratio [95 %] | by pairs | bar |", "|---|---|---|---|---|---|---|"]
    for row in result["decode"]:
        bar = bar_of(row, result)
        if "error" in row:
            lines.append(f"| {row['case']} | {row['batch']} | | | {row['error']} | | |")
            continue
        kernels = ""
        if "kernels_are_stocks" in row:
            kernels = f"; {row['kernels']:g} kernels, {'all' if row['kernels_are_stocks'] else 'NOT'} stock's"
        lines.append(
            f"| {row['case']}{kernels} | {row['batch']} | {row['stock']:.3f} | {row['ours']:.3f} | "
            f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] | {by_pairs(row)} | "
            f"{'' if bar is None else f'≤ {bar}'} |"
        )
    for part, named in (("control", "stock, started once more"), ("eager", "stock, enforce_eager")):
        for batch, row in result.get(part, {}).items() if "error" not in result.get(part, {}) else ():
            lines.append(f"| {named} | {batch.split()[-1]} | {row['stock']:.3f} | {row['ours']:.3f} | "
                         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] | {by_pairs(row)} | |")  # fmt: skip
    most = result.get("start", {}).get("stock", {}).get("max_num_batched_tokens")
    at_once = f", {most:,} tokens a step" if most else ""
    lines += ["", f"| prefill of 1,024-token prompts{at_once} | stock tokens/s | ours tokens/s | ours, first time | "
              "time ratio | by pairs |", "|---|---|---|---|---|---|"]  # fmt: skip
    for row in result["prefill"]:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['error']} | | | | |")
            continue
        speeds = " | ".join(f"{row[f'{name}_tokens_s']:,}" for name in ("stock", "ours", "first"))
        found = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] | {by_pairs(row)}"
        lines.append(f"| {row['case']} | {speeds} | {found} |")
    replayed = [(row, row["replays"]) for row in result["decode"] if "replays" in row]
    if replayed:
        lines += ["", "| a step's graph alone, replayed back to back | batch | idle µs | with programs µs | ratio |",
                  "|---|---|---|---|---|"]  # fmt: skip
    for row, us in replayed:
        idle, active = us["idle_us"], us["active_us"]
        lines.append(f"| {row['case']} | {row['batch']} | {idle:,.0f} | {active:,.0f} | {active / idle:.3f} |")
    missed = verdicts(result)
    lines += ["", f"Bars missed: {'; '.join(missed) or 'none of those measured'}."]
    for case, found in result.get("planning", {}).items() if "error" not in result.get("planning", {}) else ():
        parts, within, beside = (
            ", ".join(f"{part} {us:.0f}" for part, us in found[kind].items() if (part in WITHIN) == inside)
            for kind, inside in (("parts", False), ("parts", True), ("beside", False))
        )
        lines += [
            "",
            f"Our host work in a step of 256 requests, {case}: {found['changed']:.0f} µs when one left and one came "
            f"({parts}, of which {within}; installing and freeing {beside}), "
            f"{found['steady']:.0f} µs when nothing changed.",
        ]
    if "host" in result and "error" not in result["host"]:
        told = ", ".join(f"{case} {us:.0f} µs" for case, us in result["host"].items())
        lines += ["", f"The same of one request when nothing changed: {told}."]
    if "GB_s" in result.get("fetch", {}):
        lines += ["", f"Fetched into the caller's process, {result['fetch']['MB']} MB: {result['fetch']['GB_s']} GB/s "
                  f"({result['fetch']['first_GB_s']} the first time)."]  # fmt: skip
    for side, facts in result["start"].items() if "--together" not in result["command"] else ():
        lines += ["", f"Start of {side}: {facts['start_s']} s, {facts['memory_mib']:,} MiB of GPU memory."]
    return "\n".join(lines) + "\n"


def verdicts(result: dict[str, Any]) -> list[str]:
    """What missed its bar, or could not be measured."""
    missed, one = [], result.get("tensor_parallel", 1) == 1  # the workers of several are not looked into
    for row in [*result["decode"], *result["prefill"]]:
        bar = bar_of(row, result)
        name = f"{row['case']}, batch {row['batch']}" if "batch" in row else f"{row['case']}, prefill"
        if "error" in row:
            missed.append(f"{name}: {row['error']}")
        elif bar is not None and row["ratio"] > bar:
            missed.append(f"{name}: {row['ratio']:.3f} above {bar}")
        elif row["case"] == "idle" and row["high"] >= 1.02:
            missed.append(f"{name}: the interval reaches {row['high']:.3f}")
        elif row["case"] == "capture prompt, every layer" and row["ours_tokens_s"] < 0.8 * row["stock_tokens_s"]:
            missed.append(f"{name}: {row['ours_tokens_s']} tokens/s, below 80 % of {row['stock_tokens_s']}")
        if row.get("kernels_are_stocks") is False:
            missed.append(f"{name}: kernels differ from stock's")
        elif row["case"] == "idle" and "batch" in row and not row.keys() & {"kernels_are_stocks", "error"} and one:
            missed.append(f"{name}: no kernels were seen")
        if any(row.get("steady", {}).get(what) for what in ("plans", "copies")):
            missed.append(f"{name}: {row['steady']} while nothing changed")
        if row.get("pairs", 20) < 20 and bar is not None:
            missed.append(f"{name}: {row['pairs']} pairs, fewer than 20")
    for case, found in result.get("planning", {}).items():
        if isinstance(found, dict) and found["changed"] > 150:
            missed.append(f"planning, {case}: {found['changed']:.0f} µs above 150")
    if result.get("fetch", {}).get("GB_s", 2.0) < 2.0:
        missed.append(f"fetch: {result['fetch']['GB_s']} GB/s below 2")
    for part in ("planning", "fetch", "control", "eager"):
        if "error" in result.get(part, {}):
            missed.append(f"{part}: {result[part]['error']}")
        elif part in PARTS and not result.get(part) and not special(result):
            missed.append(f"{part}: not measured")
    if result["layers"] != LAYERS[result["shape"]]:
        missed.append(f"only {result['layers']} layers")
    there = {(row["case"], row.get("batch")) for row in [*result["decode"], *result["prefill"]]}
    if special(result):
        asked = [(case, batch) for batch in STEPS for case in bars_of(result)]
        return missed + [f"{case}, batch {batch}: not measured" for case, batch in asked if (case, batch) not in there]
    asked = [(case, batch) for batch in STEPS for case in BARS if applies(case, batch)]
    asked += [("idle", None), ("capture prompt, every layer", None)]
    return missed + [
        f"{case}, {f'batch {n}' if n else 'prefill'}: not measured" for case, n in asked if (case, n) not in there
    ]


def applies(case: str, batch: int) -> bool:
    """One in eight of one request is all of them; ops are measured at one batch."""
    return batch == 64 if "each," in case else batch > 1 or "in eight" not in case


def special(result: dict[str, Any]) -> bool:
    """Whether it is of a V1 runner or of several GPUs, for which there are fewer bars."""
    return result.get("runner") == "v1" or result.get("tensor_parallel", 1) > 1


def bars_of(result: dict[str, Any]) -> dict[str, float | None]:
    """What each case's ratio may be."""
    if special(result):
        return dict(BARS_TP if result.get("tensor_parallel", 1) > 1 else BARS_V1)
    return {case: bars[0 if result["shape"] == "8b" else 1] for case, bars in BARS.items()}


def bar_of(row: dict[str, Any], result: dict[str, Any]) -> float | None:
    """What a ratio may be, if there is a bar for its case and batch."""
    return bars_of(result).get(row["case"]) if applies(row["case"], row.get("batch", 2)) else None


def draw(files: list[Path]) -> None:
    """The ratios of every case, one panel a shape, beside the first file as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [json.loads(file.read_text()) for file in files]
    figure, axes = plt.subplots(1, len(results), figsize=(2.2 + 5 * len(results), 4.2), squeeze=False, sharey=True)
    colours = {1: "#8ecae6", 64: "#219ebc", 256: "#023047"}
    for axis, result in zip(axes[0], results, strict=True):
        rows = [row for row in result["decode"] if "ratio" in row and row["case"] in BARS]
        names = [case for case in BARS if any(row["case"] == case for row in rows)]
        for row in rows:
            at = names.index(row["case"]) + {1: -0.22, 64: 0.0, 256: 0.22}[row["batch"]]
            axis.plot([row["low"], row["high"]], [at, at], color=colours[row["batch"]], linewidth=2, alpha=0.6)
            axis.plot(row["ratio"], at, "o", color=colours[row["batch"]], markersize=6)
        for i, case in enumerate(names):
            bar = bars_of(result).get(case)
            if bar is not None:
                axis.plot([bar, bar], [i - 0.4, i + 0.4], color="#d62828", linewidth=1.2)
        axis.axvline(1.0, color="#999999", linewidth=0.8, zorder=0)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"{'Llama-3.1-8B' if result['shape'] == '8b' else 'Qwen3-0.6B'} shape", loc="left", fontsize=11)
        axis.set_xlabel("time of a decode step, stock vLLM = 1")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[0][0].invert_yaxis()  # shared
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=c, label=f"batch {b}") for b, c in colours.items()]
    handles.append(plt.Line2D([], [], color="#d62828", label="bar"))
    axes[0][0].figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    date = results[0]["date"]
    shapes = "-".join(file.stem.removeprefix("gpu_speed-").removesuffix(f"-{date}") for file in files)
    place = files[0].with_name(f"gpu_speed-{shapes}-{date}.png")
    figure.savefig(place, dpi=160)
    print(place)


class Run:
    """What has been measured of a shape, written down after each figure; nothing new begins once the time is up."""

    def __init__(self, shape: str, facts: dict[str, Any], args: argparse.Namespace) -> None:
        variant = ("-v1" if args.runner == "v1" else "") + (f"-tp{n}" if (n := args.tensor_parallel) > 1 else "")
        self.file = args.out / f"gpu_speed-{shape}{variant}-{facts['date']}.json"
        self.result: dict[str, Any] = {**facts, "shape": shape, "decode": [], "prefill": []}
        self.until = float("inf")

    def note(self, name: str, row: dict[str, Any] | None, measure: Callable[[], Any]) -> None:
        """Measures and notes one thing, or why it could not be."""
        if time.monotonic() > self.until:
            print(f"{name} {row}: no time left", flush=True)
            return
        try:
            found = measure()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        if row is None:
            self.result[name] = found
        else:
            self.result[name].append({**row, **found})
        told = {what: value for what, value in found.items() if not what.endswith("_blocks")}
        print(name, row or "", told, flush=True)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.result, indent=1) + "\n")


class Engines:
    """A shape's model, and both sides beginning to start (one after the other, unless together)."""

    def __init__(self, shape: str, args: argparse.Namespace) -> None:
        from tests.models import SHAPES, UNTIMED, shape_only

        self.model = shape_only(Path(f"/tmp/shape-{shape}-{args.layers}"), shape, args.layers)
        self.options, of = {}, SHAPES[shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
        if args.tensor_parallel > 1:
            self.options["tensor_parallel_size"] = args.tensor_parallel
        self.options["compilation_config"] = compilation = {}
        if args.sizes:
            compilation["cudagraph_capture_sizes"] = [int(n) for n in args.sizes.split(",")]
        if not args.timed:
            compilation["inductor_compile_config"] = UNTIMED
        few = {"planning", "growth", "control", "eager"} <= args.without
        batches = [int(b) for b in args.batches.split(",")] if few else list(STEPS)
        tokens = max(batch * (PROMPT + args.pairs * (STEPS[batch] + 3) + 128) for batch in batches)
        numbers = of["num_hidden_layers"] * 2 * of["num_key_value_heads"] * of["head_dim"]
        self.room = max(tokens * 2 * numbers, 1 << 30)
        self.stock = Remote(self.model, "stock", self.room, **self.options)
        if not args.together:
            self.stock.facts()
        self.ours = Remote(self.model, "patchclamp", self.room, **self.options)

    def another(self, kind: str, count: int) -> dict[str, Any]:
        """Another engine of stock vLLM, "stock" or "stock, eager", against the first one."""
        other = Remote(self.model, kind, self.room, **self.options)
        try:
            return control(self.stock, other, list(STEPS), count)
        finally:
            other.close()


def measure(run: Run, engines: Engines, args: argparse.Namespace) -> None:
    """All figures of one shape."""
    stock, ours = engines.stock, engines.ours
    big, batches = run.result["shape"] == "8b", [int(b) for b in args.batches.split(",")]
    run.result |= {"layers": ours.facts()["layers"], "start": {"stock": stock.facts(), "ours": ours.facts()}}
    print(run.result["start"], flush=True)
    run.until = time.monotonic() + args.budget_s
    for batch in batches:
        cases = bars_of(run.result) if special(run.result) else BARS
        for case in (case for case in cases if applies(case, batch) and not {case, "decode"} & args.without):
            row = {"case": case, "batch": batch}
            run.note("decode", row, lambda row=row: decode(stock, ours, row["batch"], row["case"], args.pairs))
    prefills = ("idle",) if special(run.result) else ("idle", "capture prompt, every layer")
    for case in () if "prefill" in args.without else prefills:
        row = {"case": case, "prompts": 8 if big else 32}
        run.note("prefill", row, lambda row=row: prefill(stock, ours, row["case"], row["prompts"], args.pairs))
    if "planning" not in args.without and not special(run.result):
        changed = ("steer every layer", "capture every layer")
        run.note("planning", None, lambda: {case: ours.planning(256, case) for case in changed})
        run.note(
            "host", None, lambda: {case: ours.planning(1, case, 16)["steady"] for case in ("steer one layer", *changed)}
        )
    if "growth" not in args.without and not special(run.result):
        for case in GROWTH:
            run.note("decode", {"case": case, "batch": 64}, lambda c=case: decode(stock, ours, 64, c, args.pairs // 2))
        row = {"case": "capture every layer, sustained", "batch": 256}
        run.note("decode", row, lambda: decode(stock, ours, 256, row["case"], args.pairs))
    ours.close()
    for part, kind in (("control", "stock"), ("eager", "stock, eager")):
        if part not in args.without and (part == "control" or not special(run.result)):
            run.note(part, None, lambda kind=kind: engines.another(kind, args.pairs))
    stock.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="0.6b,8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--budget-s", type=float, default=1e9, help="seconds for each shape, once its engines run")
    parser.add_argument("--sizes", help="graph sizes, to start sooner (vLLM's own if not given)")
    parser.add_argument("--together", action="store_true", help="start all engines at once")
    parser.add_argument("--without", default=[], action="append",
                        help="cases of decode, one each time, or parts: decode, prefill, planning, growth, control, "
                             "eager, fetch")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="vLLM's model runner")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    parser.add_argument("--timed", action="store_true", help="let Inductor time kernels, as it does by default")
    parser.add_argument("--draw", type=Path, nargs="+")
    args = parser.parse_args()
    known = {*BARS, *GROWTH}
    args.without = {part for told in args.without for part in ([told] if told in known else told.split(","))}
    if args.draw:
        draw(args.draw)
        for file in args.draw:
            file.with_suffix(".md").write_text(table(json.loads(file.read_text())))
        return
    import torch
    import vllm

    if not args.timed:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # what is not compiled ahead of time heeds this alone
    told = re.sub(r"--out \S+", "--out DIR", " ".join(sys.argv))
    facts = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__,
        "torch": torch.__version__, "source": source(), "command": f"python {told}",
        "runner": args.runner, "tensor_parallel": args.tensor_parallel,
    }  # fmt: skip
    if args.runner == "v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    shapes, runs = args.shapes.split(","), []
    started = {shape: Engines(shape, args) for shape in shapes} if args.together else {}
    for shape in shapes:
        runs.append(Run(shape, facts, args))
        measure(runs[-1], started.get(shape) or Engines(shape, args), args)
    if "fetch" not in args.without and not special(facts):
        from tests.models import shape_only

        for run in runs:
            shape = run.result["shape"]
            few = shape_only(Path(f"/tmp/shape-{shape}-4"), shape, 4)
            run.note("fetch", None, lambda few=few: fetch(few))
    missed = [missed for run in runs for missed in verdicts(run.result)]
    for run in runs:
        run.file.with_suffix(".md").write_text(table(run.result))
    print("missed:", missed)
    draw([run.file for run in runs])
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
