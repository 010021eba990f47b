"""What clients of a server notice: vLLM's own benchmark against stock's server and ours, in turn on one machine.

    python benchmarks/serve_load.py --shape 0.6b --out DIR      (a CUDA machine; random weights)
    python benchmarks/serve_load.py --shape tiny --requests 200      (a CPU: what a request costs the API process)

First stock's server is asked for as much as it gives. Then both servers get 80 % of that rate, at random intervals:
without programs, and with a program (one vector at every layer) on every second request, for which stock gets the same
requests without. A figure is the ratio of the medians over rounds of a run's median, or 99th percentile, of the time to
the first token and between tokens. Last, half of our server's own saturation with and without a sweep of 50,000 cells
beside it, and a sweep over HTTP against the same sweep in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
CPU = ("api_cpu_ms", "core_cpu_ms")  # of a request
BARS = {"no program": (1.02, 1.05, 1.02, 1.05), "every second": (1.05, 1.15, 1.05, 1.15)}
TINY: dict[str, Any] = dict(layers=28, hidden_size=64, intermediate_size=128, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, vocab_size=2000)  # fmt: skip
SIZES = [*range(1, 9), *range(16, 129, 8), 160, 192, 256]  # fewer than vLLM's own, so that servers start sooner
ROWS = 8192  # of a step; a server's own default
STARTS_WITHIN_S = 400
PARTS = ("load", "beside", "sweep")
BESIDE = {"cells": 50_000, "median_itl_ms": 1.5}  # of the sweep beside a load; largest ratio of the median
FORKS = multiprocessing.get_context(
    "forkserver"
)  # a client that had to load vLLM first would take longer to start than to measure


def model_of(shape: str, folder: Path, weights: bool) -> str:
    """The folder of a model of that shape, with a tokenizer. `weights`: random ones that edits move: vLLM's own dummy
    weights are so small that most sites fail their proofs."""
    if shape == "smollm2":
        from patchclamp.engines.preflight import prepare

        return str(prepare())
    from tests.models import SHAPES, shape_only, with_weights, with_words

    if shape == "tiny":
        path = with_weights(folder / shape, "135m", **TINY)
        with_words(path, TINY["vocab_size"])
        return path
    if weights:
        path = with_weights(
            folder / shape, shape, SHAPES[shape]["num_hidden_layers"], vocab_size=SHAPES[shape]["vocab_size"]
        )
    else:
        path = shape_only(folder / shape, shape)
    with_words(path, SHAPES[shape]["vocab_size"])
    return path


class Server:
    """A server in a process of its own; `ours`: patchclamp's."""

    def __init__(self, model: str, ours: bool, options: list[str], variables: dict[str, str], log: Path) -> None:
        self._held = socket.socket()  # its port is nobody else's until it has bound it
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        command = (
            ["-m", "patchclamp", "serve", model]
            if ours
            else ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
        )
        environment = {**os.environ, **({} if ours else {"VLLM_PLUGINS": ""}), **variables}
        self.url, self.model, self.log = f"http://127.0.0.1:{port}", model, log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--host=127.0.0.1", f"--port={port}", *options], env=environment,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Returns when it answers."""
        end = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                self._held.close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SystemExit(f"a server did not start:\n{self.log.read_text()[-3000:]}")

    def put_vector(self, width: int) -> None:
        numbers = (0.01 * np.random.default_rng(0).standard_normal(width)).tolist()
        request = urllib.request.Request(
            f"{self.url}/v1/patchclamp/vectors/v", json.dumps(numbers).encode(), {"content-type": "application/json"},
            method="PUT",
        )  # fmt: skip
        urllib.request.urlopen(request)

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that its API process and its engine core have used: what a request costs them, whatever else
        the machine does."""
        main = psutil.Process(self.process.pid)
        spent = {"api": sum(main.cpu_times()[:2]), "core": 0.0}
        for child in main.children(recursive=True):
            if "EngineCore" in (name := " ".join([child.name(), *child.cmdline()])) or "spawn_main" in name:
                spent["core"] += sum(child.cpu_times()[:2])
        return spent

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


BEGAN = time.monotonic()
PROGRAM = {"patchclamp": {"edits": [{"type": "add", "at": "resid_post", "value": {"type": "named", "name": "v"}}]}}


def answer(words: list[str], log: Path) -> None:
    """A client's process: vLLM's benchmark with these options. The module was loaded before the process was forked."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(parser.parse_args(words))


def client(
    server: Server, folder: Path, requests: int, tokens: int, rate: float, seed: int, program: bool
) -> tuple[Any, Path]:  # fmt: skip
    """vLLM's benchmark of a server, started; and where its result will lie."""
    result = folder / f"{seed}-{int(program)}-{time.monotonic_ns()}.json"
    words = [f"--base-url={server.url}", f"--model={server.model}", "--backend=openai",
             "--dataset-name=random", f"--random-input-len={tokens}", f"--random-output-len={tokens}",
             f"--num-prompts={requests}", f"--request-rate={rate}", f"--seed={seed}", "--ignore-eos", "--disable-tqdm",
             "--save-result", f"--result-dir={folder}", f"--result-filename={result.name}",
             "--percentile-metrics=ttft,itl", "--metric-percentiles=99"]  # fmt: skip
    if program:
        words.append(f"--extra-body={json.dumps(PROGRAM)}")
    process = FORKS.Process(target=answer, args=(words, folder / "client.log"))
    process.start()
    return process, result


def result_of(process: Any, result: Path, requests: int) -> dict[str, Any]:
    """What a client measured, once it has ended."""
    process.join()
    if process.exitcode:
        raise SystemExit(f"a client failed:\n{(result.parent / 'client.log').read_text()[-3000:]}")
    found = json.loads(result.read_text())
    assert found["completed"] == requests, found
    return found


def load(server: Server, folder: Path, args: Any, rate: float, seed: int, program: bool) -> dict[str, float]:
    """One round: two clients at half the rate each, one of them with programs or neither."""
    half, before = args.requests // 2, server.cpu_s()
    running = [client(server, folder, half, args.tokens, rate / 2, seed, False),
               client(server, folder, half, args.tokens, rate / 2, seed + 1, program)]  # fmt: skip
    results = [result_of(*each, half) for each in running]
    after = server.cpu_s()
    cpu = {f"{name}_cpu_ms": 1e3 * (after[name] - before[name]) / args.requests for name in after}
    return {name: float(np.mean([result[name] for result in results])) for name in FIGURES} | cpu


def saturation(server: Server, folder: Path, args: Any) -> float:
    """Requests a second that a server gives when it is asked for all at once."""
    rates = []
    for seed in (1, 2):  # the first warms it up
        measured = client(server, folder, args.requests, args.tokens, float("inf"), seed, False)
        rates.append(result_of(*measured, args.requests)["request_throughput"])
    return rates[-1]


def one_sweep_s(lm: Any, draw: np.random.Generator, tokens: int, sites: list[str]) -> float:
    """Seconds of a sweep of some sites at every layer and token of a prompt."""
    from patchclamp.studies import patch_sweep

    clean, corrupt = draw.integers(100, 500, (2, tokens)).tolist()
    begin = time.perf_counter()
    patch_sweep(lm, clean=clean, corrupt=corrupt, answer=7, foil=9, sites=sites, show_progress=False)
    return time.perf_counter() - begin


def sweep_s(lm: Any, rounds: int, sites: list[str]) -> float:
    """The median of some sweeps of 17 tokens, after one that is not counted."""
    draw = np.random.default_rng(3)
    return float(np.median([one_sweep_s(lm, draw, 17, sites) for _ in range(rounds + 1)][1:]))


def measure_beside(server: Server, folder: Path, args: Any, report: dict[str, Any]) -> None:
    """Add the load of half the server's saturation, with and without a sweep beside it, in turn."""
    import patchclamp as pc

    rate = 0.5 * saturation(server, folder, args)
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "beside": []}
    with pc.LM(server.url) as lm:
        sites = proven(lm)
        tokens = -(-BESIDE["cells"] // (len(sites) * lm.model.layers))
        draw, swept = np.random.default_rng(4), list[float]()
        alone_s = min(one_sweep_s(lm, draw, tokens, sites) for _ in range(2))
        ended = threading.Event()

        def sweep() -> None:
            while not ended.is_set():
                swept.append(one_sweep_s(lm, draw, tokens, sites))

        for number in range(args.rounds):
            for case in ("alone", "beside") if number % 2 else ("beside", "alone"):
                ended.clear()
                sweeping = threading.Thread(target=sweep)
                if case == "beside":
                    sweeping.start()
                rounds[case].append(load(server, folder, args, rate, 1000 + 4 * number + 2 * (case == "beside"), False))
                ended.set()
                if case == "beside":
                    sweeping.join()
                print(case, rounds[case][-1], f"{time.monotonic() - BEGAN:.0f} s", flush=True)
    medians = {case: {figure: float(np.median([each[figure] for each in of])) for figure in FIGURES}
               for case, of in rounds.items()}  # fmt: skip
    ratios = {figure: medians["beside"][figure] / medians["alone"][figure] for figure in FIGURES}
    cells = tokens * len(sites) * lm.model.layers
    report["beside"] = {"requests_per_s": rate, "cells": cells, "sweep_alone_s": alone_s, "sweeps_s": swept,
                        "ratios": ratios, "medians": medians, "rounds": rounds}  # fmt: skip
    print(f"{cells} cells beside {rate:.1f} requests a second: ratios {ratios}, of the median between tokens at most "
          f"{BESIDE['median_itl_ms']}; a sweep takes {alone_s:.1f} s, {np.median(swept):.1f} s beside")  # fmt: skip


def proven(lm: Any) -> list[str]:
    """The sites of a sweep that the model has; random weights do not prove every one."""
    from benchmarks.user_path import SWEEP_SITES

    return [name for name in SWEEP_SITES if name in lm.sites.names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=("0.6b", "8b", "smollm2", "tiny"))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="serve-load-"))
    weights = args.only != ["load"]
    model, width = (
        model_of(args.shape, folder, weights),
        {"0.6b": 1024, "8b": 4096, "smollm2": 576, "tiny": 64}[args.shape],
    )
    options, variables = ["--max-model-len=2048", f"--max-num-batched-tokens={ROWS}"], dict[str, str]()
    options += [] if args.only == ["sweep"] else ["--no-enable-prefix-caching"]
    if torch.cuda.is_available():
        # two servers that start at once cannot measure what memory is free
        options += ["--gpu-memory-utilization=0.4", f"--kv-cache-memory-bytes={12 << 30}"]
        options += [f"--compilation-config={json.dumps({'cudagraph_capture_sizes': SIZES})}"]  # enough for this load
        options += ["--load-format=dummy"] if args.shape in ("0.6b", "8b") and not weights else []
    else:
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # "A busy CPU" in docs/vllm.md
        options += ["--enforce-eager", f"--kv-cache-memory-bytes={1 << 28}", "--dtype=float32"]
    FORKS.set_forkserver_preload(["vllm.benchmarks.serve", "vllm.utils.argparse_utils"])
    names = ("stock", "ours") if "load" in args.only else ("ours",)
    sides = {name: Server(model, name == "ours", options, variables, folder / f"{name}.log") for name in names}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report: dict[str, Any] = {"shape": args.shape, "device": device, "when": datetime.date.today().isoformat(),
                              "command": " ".join(sys.argv)}  # fmt: skip
    file = args.out / f"serve_{'_'.join(args.only)}-{args.shape}-{report['when']}.json"
    try:
        for server in sides.values():
            server.wait()
        print(f"{len(sides)} servers answer after {time.monotonic() - BEGAN:.0f} s", flush=True)
        sides["ours"].put_vector(width)
        if "load" in args.only:
            measure(sides, folder, args, report)
            file.write_text(json.dumps(report, indent=1))
            sides["stock"].close()
        if "beside" in args.only:
            measure_beside(sides["ours"], folder, args, report)
        if "sweep" in args.only:
            report["sweep"] = compare_sweeps(sides["ours"], model, args)
    finally:
        file.write_text(json.dumps(report, indent=1))
        for server in sides.values():
            server.close()
            (args.out / server.log.name).write_text(server.log.read_text()[-(1 << 20) :])
    print(f"written to {file}")


def measure(sides: dict[str, Server], folder: Path, args: Any, report: dict[str, Any]) -> None:
    """Adds the ratios of both cases to a report."""
    rate = 0.8 * saturation(sides["stock"], folder, args)
    saturation(sides["ours"], folder, args)
    print(f"80 % of stock's saturation: {rate:.1f} requests a second", flush=True)
    report |= {"requests_per_s": rate, "cases": {}}
    for case, bars in BARS.items():
        rounds: dict[str, list[dict[str, float]]] = {"stock": [], "ours": []}
        for number in range(args.rounds):
            for name in ("stock", "ours") if number % 2 else ("ours", "stock"):
                program = case == "every second" and name == "ours"
                rounds[name].append(load(sides[name], folder, args, rate, 10 + 2 * number, program))
                print(case, name, rounds[name][-1], f"{time.monotonic() - BEGAN:.0f} s", flush=True)
        medians = {name: {figure: float(np.median([each[figure] for each in of])) for figure in (*FIGURES, *CPU)}
                   for name, of in rounds.items()}  # fmt: skip
        ratios = {figure: medians["ours"][figure] / medians["stock"][figure] for figure in (*FIGURES, *CPU)}
        report["cases"][case] = {"ratios": ratios, "medians": medians, "rounds": rounds}
        told = ", ".join(f"{figure} {ratios[figure]:.3f} ({bar})" for figure, bar in zip(FIGURES, bars, strict=True))
        print(f"{case}: {told}", *(f"{name} {ratios[name]:.3f}" for name in CPU), flush=True)


def compare_sweeps(server: Server, model: str, args: Any) -> dict[str, float]:
    """Seconds of a sweep over HTTP, and in this process, where no server is left beside it but ours."""
    import torch

    import patchclamp as pc

    with pc.LM(server.url) as lm:
        sites = proven(lm)
        http_s = sweep_s(lm, args.rounds, sites)
    print(f"sweep of {len(sites)} sites over HTTP: {http_s:.2f} s", flush=True)
    server.close()
    own: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 28}
    if torch.cuda.is_available():  # the same, so that what the server compiled is found again
        own = {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 12 << 30,
               "compilation_config": {"cudagraph_capture_sizes": SIZES}}  # fmt: skip
    if args.only != ["sweep"]:
        own["enable_prefix_caching"] = False
    with pc.LM(
        model, engine="vllm", max_model_len=2048, max_num_batched_tokens=ROWS, numerics="stock", prove=False, **own
    ) as lm:
        local_s = sweep_s(lm, args.rounds, sites)
    print(f"sweep: {http_s:.2f} s over HTTP, {local_s:.2f} s here, ratio {http_s / local_s:.2f} (1.3)", flush=True)
    return {"http_s": http_s, "local_s": local_s, "ratio": http_s / local_s, "sites": len(sites)}


if __name__ == "__main__":
    main()
