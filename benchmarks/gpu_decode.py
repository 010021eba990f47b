"""Decode speed of patchclamp against stock vLLM on one GPU, side by side.

    python benchmarks/gpu_decode.py --shape 0.6b --out DIR        (shapes: 8b, 0.6b; random weights)

Each engine has a process of its own (in one, starting the second would clear the first one's graphs) and a cache of a
fixed size.  Blocks of steps alternate between them; a figure is the ratio of the median step times with the 95 %
interval of a bootstrap over blocks.  A block counts only if every request was decoding before and after it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import patchclamp as pc
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.worker import site_map
from patchclamp.plan import Prompt, bind
from patchclamp.plan.bind import vector_key
from patchclamp.runtime import Limits
from patchclamp.spec import Program, Vector
from tests.gpu.models import shape_only

PROMPT, MOST = 64, 2000
OPTIONS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2304,
    "max_num_seqs": 256, "gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 34 << 30,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}  # fmt: skip


class Bench:
    """One engine, stepped by hand."""

    def __init__(self, model: str, ours: bool) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        extra = {"patchclamp": {"limits": msgspec.to_builtins(Limits(max_programs=512))}} if ours else {}
        began = time.perf_counter()
        with configuration.core_process(separate=False):
            config = EngineArgs(model=model, additional_config=extra, **OPTIONS).create_engine_config()
        self.engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        self.start_s = time.perf_counter() - began
        self.sites = site_map(config) if ours else None
        self.running: list[str] = []
        self.vectors: list[str] = []
        self.count = 0

    def facts(self) -> tuple[float, int, int]:
        """Seconds to start, layers and width."""
        config = self.engine.vllm_config.model_config.hf_config
        return self.start_s, config.num_hidden_layers, config.hidden_size

    def rpc(self, verb: str, *args: Any) -> Any:
        result, error = self.engine.collective_rpc("patchclamp_rpc", args=(verb, *args))[0]
        assert error is None, error
        return result

    def fill(self, batch: int, case: str = "idle") -> None:
        """Starts `batch` requests (with a program each) and steps until all of them decode."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        _, layers, width = self.facts()
        programs = cases(layers, width)[case]
        for i in range(batch):
            self.count += 1
            run, ids = f"run{self.count}", np.random.default_rng(self.count).integers(100, 30000, PROMPT).tolist()
            given: dict[str, Any] = {}
            if programs is not None:
                program = programs[i % len(programs)]
                bound = bind(program, run, Prompt(ids, lambda: ("", [])), MOST, self.sites, None)  # type: ignore[arg-type]
                values = {vector_key(op.value): op.value.rows() for op in program.edits if isinstance(op.value, Vector)}
                if values:
                    self.rpc("hold", safetensors.numpy.save(values), list(values))
                    self.vectors += values
                assert self.rpc("reserve", [msgspec.msgpack.encode(bound)]) == (1, None)
                given["extra_args"] = {"patchclamp": msgspec.msgpack.encode(bound)}
            params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True, detokenize=False,
                                    output_kind=RequestOutputKind.FINAL_ONLY, **given)  # fmt: skip
            self.engine.add_request(run, {"prompt_token_ids": ids}, params)
            self.running.append(run)
        for _ in range(batch * PROMPT // 8192 + 24):
            self.engine.step()

    def empty(self) -> None:
        self.engine.abort_request(self.running)
        if self.sites is not None:
            self.rpc("finish", self.running, self.vectors)
            self.rpc("release", self.running)
        self.running, self.vectors = [], []
        for _ in range(3):
            self.engine.step()

    def block(self, steps: int) -> float:
        """Milliseconds a step."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        assert len(scheduler.running) == len(self.running), f"{len(scheduler.running)} of {len(self.running)} run"
        for _ in range(5):
            self.engine.step()
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        found = 1e3 * (time.perf_counter() - began) / steps
        assert len(scheduler.running) == len(self.running), "a request stopped"
        return found


class Remote:
    """A `Bench` in another process; calls wait for their result."""

    def __init__(self, model: str, ours: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = {} if ours else {"VLLM_PLUGINS": ""}
        self._process = context.Process(target=_serve, args=(theirs, model, ours, environment), daemon=True)
        self._process.start()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._pipe.send((name, args))
            result, error = self._pipe.recv()
            if error is not None:
                raise RuntimeError(error)
            return result

        return call


def _serve(pipe: Any, model: str, ours: bool, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    bench = Bench(model, ours)
    while True:
        name, args = pipe.recv()
        try:
            pipe.send((getattr(bench, name)(*args), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"[:300]))


def ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Median of b over median of a, and a bootstrap's 95 % interval."""
    rng = np.random.default_rng(0)
    draws = [np.median(rng.choice(b, len(b))) / np.median(rng.choice(a, len(a))) for _ in range(2000)]
    return float(np.median(b) / np.median(a)), *(float(q) for q in np.quantile(draws, [0.025, 0.975]))


def cases(layers: int, width: int) -> dict[str, list[Program] | None]:
    def steer(at: Any) -> Program:
        return Program.of([pc.Add(0.01 * torch.randn(width), at=at)])

    return {
        "idle": None,
        "steer, every layer, one vector": [steer(pc.resid_post)],
        "steer, one layer": [steer(pc.resid_post[layers // 2])],
        "steer, every layer, 256 programs": [steer(pc.resid_post) for _ in range(256)],
        "capture resid_post, every layer, bf16": [Program.of((), [pc.Capture(pc.resid_post, dtype="bfloat16")])],
    }


def compare(stock: Remote, ours: Remote, batch: int, case: str, pairs: int, steps: int) -> dict[str, float]:
    """Median milliseconds a step of both and their ratio with its interval."""
    try:
        stock.fill(batch)
        ours.fill(batch, case)
        blocks = [(stock.block(steps), ours.block(steps)) for _ in range(pairs)]
    finally:
        stock.empty()
        ours.empty()
    a, b = [list(column) for column in zip(*blocks, strict=True)]
    value, low, high = ratio(a, b)
    found = {"stock_ms": np.median(a), "ours_ms": np.median(b), "ratio": value, "low": low, "high": high}
    return {name: round(float(number), 4) for name, number in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import vllm

    model = shape_only(Path(f"/tmp/shape-{args.shape}-{args.layers}"), args.shape, args.layers)
    stock = Remote(model, ours=False)
    stock_s, layers, width = stock.facts()  # started, before the other begins to measure its memory
    ours = Remote(model, ours=True)
    ours_s, _, _ = ours.facts()
    rows = []
    for batch in (int(b) for b in args.batches.split(",")):
        for case in cases(layers, width):
            row = {"batch": batch, "case": case}
            try:
                row |= compare(stock, ours, batch, case, args.pairs, args.steps)
                print(f"{batch:4} {case:40} {row}", flush=True)
            except RuntimeError as error:
                row["error"] = str(error)
                print(f"{batch:4} {case}: {error}", flush=True)
            rows.append(row)
    result = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__,
        "torch": torch.__version__, "shape": args.shape, "layers": layers, "pairs": args.pairs, "steps": args.steps,
        "command": "python " + " ".join(sys.argv), "start_s": {"stock": stock_s, "ours": ours_s}, "rows": rows,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"gpu_decode-{args.shape}-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print("start:", result["start_s"])


if __name__ == "__main__":
    main()
