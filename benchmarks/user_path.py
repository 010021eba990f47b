"""What a caller waits for: whole calls of patchclamp against whole calls of stock vLLM, side by side on one machine.

    python benchmarks/user_path.py --shape tiny                (a CPU is enough: the path around the model shows)
    python benchmarks/user_path.py --shape 0.6b --out DIR      (a CUDA machine; 8b likewise; random weights)
    python benchmarks/user_path.py --cells 1000,10000,100000   (time and memory per cell, without stock)
    python benchmarks/user_path.py --draw DIR/user_path-*.json

Each side is a process of its own, and they take turns, stock first or last. Both are asked for the same outputs. A
figure is the ratio of the medians of whole calls, with the 95 % interval of a bootstrap over pairs. Prompts are random
and new in every round, so the prefix cache has nothing of them. Stock's engine core runs in a process of its own, as
`LLM` starts it, but for the tiny shape; `--our-cores` says where ours does. `--numerics stock,uniform` measures uniform
numerics beside stock's.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = {  # of a shape: requests, prompt tokens, generated tokens, and the captured prefill's prompts and their length
    "tiny": (256, 12, 1, 256, 12), "0.6b": (1024, 64, 64, 64, 2048), "8b": (1024, 64, 64, 64, 2048),
}  # fmt: skip
SWEEP_TOKENS = 17
SWEEP_SITES = ("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out", "q", "k", "v", "z",
               "neurons")  # fmt: skip
UNIFORM = ", uniform"  # ends the name of a side with uniform numerics, and of its bar
BARS = {
    "tiny": {"no program": 1.1, "one vector": 1.3, "captured and read": 1.6, "sweep": 0.6},
    "0.6b": {"no program": 1.03, "no program, uniform": 1.06, "no program, logprobs": 1.03, "one vector": 1.08,
             "distinct programs": 1.15, "one in eight": 1.05, "captured": 1 / 0.7, "captured and summed": 2.0,
             "sweep": 0.25},
    "8b": {"no program": 1.01, "no program, uniform": 1.02, "no program, logprobs": 1.01, "one vector": 1.03,
           "distinct programs": 1.05, "one in eight": 1.02, "captured": 1 / 0.7, "captured and summed": 2.0,
           "sweep": 0.4},
}  # fmt: skip


class Side:
    """One engine and its cases; `case(name, round)` runs one whole call and says how long it took."""

    def __init__(self, shape: str, model: str, options: dict[str, Any]) -> None:
        self.shape, self.sizes = shape, SIZES[shape]
        self.start(model, options)

    def case(self, name: str, number: int) -> tuple[float, Any]:
        """Seconds of a call, and what of its answer both sides must share."""
        draw = np.random.default_rng(number)
        count, length, tokens, prompts, long = self.sizes
        if name.startswith("captured"):
            ids, call = draw.integers(100, 500, (prompts, long)).tolist(), self.captured
        elif name == "sweep":
            ids, call = draw.integers(100, 500, (2, SWEEP_TOKENS)).tolist(), self.sweep
        else:
            ids, call = draw.integers(100, 500, (count, length)).tolist(), self.generated
        began = time.perf_counter()
        answer = call(name, ids, tokens)
        return time.perf_counter() - began, answer

    def cells(self) -> int:
        """How many requests the sweep is, without its baselines."""
        return SWEEP_TOKENS * len(SWEEP_SITES) * self.layers


class Stock(Side):
    """Stock vLLM, by `LLM.generate`."""

    def start(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, disable_log_stats=True, **options)
        self.layers = self.llm.llm_engine.model_config.hf_text_config.num_hidden_layers

    def _run(self, ids: list[list[int]], tokens: int, **asked: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **asked)
        return self.llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)

    def generated(self, name: str, ids: list[list[int]], tokens: int) -> list[list[int]]:
        outputs = self._run(ids, tokens, **({"logprobs": 0} if "logprobs" in name else {}))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def captured(self, name: str, ids: list[list[int]], tokens: int) -> int:
        """The prefill alone."""
        return len(self._run(ids, 1))

    def sweep(self, name: str, ids: list[list[int]], tokens: int) -> int:
        """As many graded requests that compute as many tokens: each is another prompt from its cell's position on."""
        prompts, draw = [], np.random.default_rng(ids[0])
        for position in range(SWEEP_TOKENS):
            rest = draw.integers(100, 500, (self.cells() // SWEEP_TOKENS, SWEEP_TOKENS - position)).tolist()
            prompts += [ids[1][:position] + one for one in rest]
        outputs = self._run([ids[0], ids[1], *prompts], 1, logprobs=2, logprob_token_ids=[7, 9])
        graded = [output.outputs[0].logprobs[0] for output in outputs]
        return len([table[7].logprob - table[9].logprob for table in graded]) - 2


class Ours(Side):
    """patchclamp, by `lm.run` and `patch_sweep`."""

    def start(self, model: str, options: dict[str, Any]) -> None:
        import patchclamp as pc

        self.lm = pc.LM(model, engine="vllm", prove=False, **options)
        self.layers = self.lm.model.layers
        draw, width = np.random.default_rng(0), self.lm.model.d_model
        vectors = (0.01 * draw.standard_normal((self.sizes[0], width))).astype(np.float32)
        steer = [[pc.Add(vector, at=pc.resid_post)] for vector in vectors]
        self.programs: dict[str, Any] = {
            "one vector": steer[0], "distinct programs": steer,
            "one in eight": [steer[0] if i % 8 == 0 else [] for i in range(self.sizes[0])],
        }  # fmt: skip

    def generated(self, name: str, ids: list[list[int]], tokens: int) -> list[list[int]]:
        runs = self.lm.run(ids, max_tokens=tokens, edits=self.programs.get(name, ()), sampling={"ignore_eos": True},
                           logprobs="logprobs" in name)  # fmt: skip
        assert not any(run.error for run in runs), next(run.error for run in runs if run.error)
        return [run.token_ids for run in runs]

    def captured(self, name: str, ids: list[list[int]], tokens: int) -> int:
        import patchclamp as pc

        runs = self.lm.run(ids, max_tokens=1, capture=[pc.Capture(pc.resid_post, dtype="bfloat16")],
                           sampling={"ignore_eos": True})  # fmt: skip
        rows = 0
        for run in runs:
            for layer in range(self.layers):
                tensor = run[pc.resid_post[layer]]
                rows += len(tensor)
                if "summed" in name:
                    tensor.float().sum()
        assert rows == len(ids) * len(ids[0]) * self.layers
        return len(runs)

    def sweep(self, name: str, ids: list[list[int]], tokens: int) -> int:
        import patchclamp as pc

        sweep = pc.studies.patch_sweep(self.lm, clean=ids[0], corrupt=ids[1], answer=7, foil=9,
                                       sites=[pc.Site(name) for name in SWEEP_SITES], show_progress=False)  # fmt: skip
        return int(np.isfinite(sweep.grid).sum())


class Remote:
    """A side in a process of its own."""

    def __init__(self, kind: str, shape: str, model: str, options: dict[str, Any], environ: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, shape, model, options, environ))
        self._process.start()
        theirs.close()

    def started(self) -> None:
        """Returns when the engine runs."""
        self._answer()

    def case(self, name: str, number: int) -> tuple[float, Any]:
        self._pipe.send((name, number))
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        self.stop()

    def stop(self) -> None:
        """Ends it, and an engine core that it started, which would else keep the caller's output open."""
        if self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)


def _serve(pipe: Any, kind: str, shape: str, model: str, options: dict[str, Any], environ: dict[str, str]) -> None:
    os.setpgrp()
    os.environ.update(environ)
    try:
        side = {"stock": Stock, "ours": Ours}[kind](shape, model, options)
        pipe.send((0.0, None))
        while True:
            pipe.send(side.case(*pipe.recv()))
    except EOFError:
        os._exit(0)  # nobody asks any more; what is under way need not end
    except BaseException as error:
        pipe.send(f"{kind}: {type(error).__name__}: {error}")
        raise


def compare(sides: dict[str, Remote], name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Whole calls of a case in turn, after one of each that is not counted: of every side but stock, beside stock's."""
    from benchmarks.gpu_speed import ratio

    times: dict[str, list[float]] = {side: [] for side in sides}
    alike = dict.fromkeys(sides, True)
    for number in range(rounds + 1):
        answers = {}
        order = list(sides) if number % 2 else list(reversed(sides))
        for side in order:
            seconds, answers[side] = sides[side].case(name, 1000 * number)
            if number:
                times[side].append(seconds)
        alike = {side: alike[side] and answers[side] == answers["stock"] for side in sides}
    renamed = {"stock": "stock_s", "ours": "ours_s"}
    rows = {}
    for side in [side for side in sides if side != "stock"]:
        measured = ratio(times["stock"], times[side])
        rows[side] = {renamed.get(key, key): value for key, value in measured.items()} | {"same_answers": alike[side]}
    return rows


def bar_of(result: dict[str, Any], case: str, side: str) -> float | None:
    """The most that a ratio should be; few cases have one with uniform numerics."""
    return result["bars"].get(case + UNIFORM if side.endswith(UNIFORM) else case)


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [f"# What a caller waits for, {result['date']}", "",
             f"{result['machine']}, vLLM {result['vllm']}, shape {result['shape']}. `{result['command']}`", "",
             "| case | our core | stock s | ours s | ours / stock [95 %] | bar | same answers |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, sides in result["cases"].items():
        for side, row in sides.items():
            if "error" in row:
                lines.append(f"| {name} | {side} | | | {row['error']} | | |")
                continue
            bar = bar_of(result, name, side)
            lines.append(
                f"| {name} | {side} | {row['stock_s']:.3f} | {row['ours_s']:.3f} | {row['ratio']:.3f} "
                f"[{row['low']:.3f}, {row['high']:.3f}] | {'' if bar is None else f'{bar:.2f}'} | "
                f"{'yes' if row['same_answers'] else 'no'} |"
            )
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Ratios of every case with their intervals and bars, a panel a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False, layout="constrained")
    for axis, result in zip(axes[0], results, strict=True):
        rows = {f"{name}, {side}": (bar_of(result, name, side), row) for name, sides in result["cases"].items()
                for side, row in sides.items() if "error" not in row}  # fmt: skip
        for y, (bar, row) in enumerate(rows.values()):
            axis.plot([row["low"], row["high"]], [y, y], color="#4477aa", linewidth=2)
            axis.plot([row["ratio"]], [y], "o", color="#4477aa", label="measured" if y == 0 else None)
            if bar is not None:
                axis.plot([bar, bar], [y - 0.3, y + 0.3], color="#cc3311", label="bar" if y == 0 else None)
        axis.axvline(1.0, color="#888888", linewidth=1)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [tick for tick in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 7, 10) if low < tick < high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("seconds of a whole call, ours / stock vLLM")
        axis.set_title(f"{result['shape']}, {result['machine']}", fontsize=10)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SIZES, default="tiny")
    parser.add_argument("--cases", default="", help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, help="of the shape, fewer than it has")
    parser.add_argument("--our-cores", default="in process", help="in process, beside, or both: in process,beside")
    parser.add_argument("--numerics", default="stock", help="of ours: stock, uniform, or both: stock,uniform")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--cells", default="", help="the numbers of cells of a call")
    parser.add_argument("--draw", nargs="+", type=Path)
    args = parser.parse_args()
    if args.draw:
        draw([json.loads(path.read_text()) for path in args.draw], args.draw[0].with_suffix(".png"))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (growth if args.cells else measure)(args)


def _engine(args: argparse.Namespace, engines: int) -> tuple[str, dict[str, Any]]:
    """The model, and the options of one of so many engines."""
    from tests.models import UNTIMED, shape_only

    tiny = args.shape == "tiny"
    changed = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                   vocab_size=512) if tiny else {}  # fmt: skip
    layers = 4 if tiny else args.layers
    model = shape_only(Path(f"/tmp/user-path-{args.shape}-{layers}"), "8b" if tiny else args.shape, layers, **changed)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2304}
    if tiny:
        options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 27, "max_num_seqs": 256,
                    "block_size": 32, "max_model_len": 512}  # fmt: skip
    else:
        compilation = {"inductor_compile_config": UNTIMED, "cudagraph_capture_sizes": [1, 8, 64, 256, 512]}
        import torch

        memory_gib = torch.cuda.get_device_properties(0).total_memory >> 30
        weights_gib = 16 if args.shape == "8b" else 2
        cache_gib = 0.9 * memory_gib / engines - 1.2 * weights_gib  # the rest is for banks and what steps need
        options |= {"kv_cache_memory_bytes": max(2, min(32, int(cache_gib))) << 30,
                    "gpu_memory_utilization": 0.9 / engines,
                    "max_num_seqs": 1024, "compilation_config": compilation}  # fmt: skip
    return model, options


def _sides(args: argparse.Namespace) -> dict[str, Remote]:
    """Stock and ours, which start together."""
    ours = {core + (UNIFORM if kind == "uniform" else ""): {"multiprocess_mode": core == "beside", "numerics": kind}
            for core in args.our_cores.split(",") for kind in args.numerics.split(",")}  # fmt: skip
    model, options = _engine(args, 1 + len(ours))
    environ = (
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if args.shape == "tiny" else {}
    )  # else as `LLM` starts it: beside the caller
    sides = {"stock": Remote("stock", args.shape, model, options, environ)}
    for name, own in ours.items():
        sides[name] = Remote("ours", args.shape, model, {**options, **own}, {})
    try:
        for side in sides.values():
            side.started()
    except BaseException:
        for side in sides.values():
            side.stop()
        raise
    return sides


def growth(args: argparse.Namespace) -> None:
    """Time and memory per cell of calls of several sizes: `lm.grade` on one prompt, `patch_sweep` on pairs of them."""
    model, options = _engine(args, 1)
    ours, draw = Ours(args.shape, model, options | {"multiprocess_mode": False}), np.random.default_rng(0)

    def grade(count: int) -> tuple[int, Callable[[], Any]]:
        import patchclamp as pc

        ids, factors = draw.integers(100, 500, SWEEP_TOKENS).tolist(), draw.random(count).tolist()
        programs = [pc.Scale(factor, at=pc.Site(SWEEP_SITES[i % len(SWEEP_SITES)])[i // len(SWEEP_SITES) % ours.layers],
                             tokens=pc.every[i % SWEEP_TOKENS]) for i, factor in enumerate(factors)]  # fmt: skip
        return count, lambda: ours.lm.grade(ids, programs, score=[7, 9])

    def sweep(count: int) -> tuple[int, Callable[[], Any]]:
        pairs = max(1, round(count / ours.cells()))
        ids = draw.integers(100, 500, (2, pairs, SWEEP_TOKENS)).tolist()
        return pairs * ours.cells(), lambda: ours.sweep("", ids, 1)

    result: dict[str, Any] = about(args) | {"calls": []}
    lines = [f"# Time and memory per cell, {result['date']}", "",
             f"{result['machine']}, vLLM {result['vllm']}, shape {result['shape']}. `{result['command']}`", "",
             "Medians of three calls, after one of 10,000 cells that is not counted.", "",
             "| call | cells | ms per cell | CPU ms per cell | peak growth, MB | kB per cell |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, prepare in (("lm.grade", grade), ("patch_sweep", sweep)):
        measured(prepare(10_000)[1])
        for count in map(int, args.cells.split(",")):
            cells, calls = prepare(count)[0], [measured(prepare(count)[1]) for _ in range(3)]
            seconds, cpu, grown = np.median(calls, axis=0).tolist()
            result["calls"].append({"call": name, "cells": cells, "s": seconds, "cpu_s": cpu, "bytes": grown})
            each = (
                f"{1e3 * seconds / cells:.3f} | {1e3 * cpu / cells:.3f} | {grown / 1e6:.1f} | {grown / 1e3 / cells:.2f}"
            )
            lines.append(f"| `{name}` | {cells:,} | {each} |")
            print(lines[-1], flush=True)
    path = args.out / f"user_path_cells-{args.shape}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1))
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def measured(call: Callable[[], Any]) -> tuple[float, float, int]:
    """Seconds of a call, of the process's CPUs, and the bytes by which the process grew to its largest (on Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is the current size
    before, began, cpu = _resident("VmRSS"), time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu, _resident("VmHWM") - before


def _resident(name: str) -> int:
    return next(
        1024 * int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line
    )


def about(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import vllm

    return {
        "date": datetime.date.today().isoformat(), "vllm": vllm.__version__, "shape": args.shape,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "command": " ".join(["python benchmarks/user_path.py", *(f'"{a}"' if " " in a else a for a in sys.argv[1:])]),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    cases = [name for name in BARS[args.shape] if not name.endswith(UNIFORM)]
    names = args.cases.split(";") if args.cases else cases
    result = about(args) | {"bars": BARS[args.shape], "cases": {}}
    sides = _sides(args)
    path = args.out / f"user_path-{args.shape}-{result['date']}.json"
    for name in names:
        try:
            result["cases"][name] = compare(sides, name, args.rounds)
        except RuntimeError as error:
            result["cases"][name] = {args.our_cores: {"error": str(error)[:300]}}
        brief = {
            side: {key: value for key, value in row.items() if "blocks" not in key}
            for side, row in result["cases"][name].items()
        }
        print(name, brief, flush=True)
        path.write_text(json.dumps(result, indent=1))
        path.with_suffix(".md").write_text(table(result))
    for side in sides.values():
        side.close()
    print(table(result))


if __name__ == "__main__":
    main()
