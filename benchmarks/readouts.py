"""What probes, conditions and reads of many runs cost on one engine, relative to the same requests without a program.

    python benchmarks/readouts.py --shape 8b --out DIR       (a CUDA machine; 8b and 0.6b have random weights)
    python benchmarks/readouts.py --shape tiny               (a CPU)

Whole calls of fresh prompts in interleaved rounds; a figure is the median of the rounds' ratios. Read times are of the
calls that give the numbers to the caller.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import patchclamp as pc
from tests.models import shape_only

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 512}  # fmt: skip
SHAPES: dict[str, tuple[str, int | None, dict[str, int]]] = {
    "8b": ("8b", None, {}), "0.6b": ("0.6b", None, {}), "tiny": ("8b", 3, TINY),
}  # fmt: skip
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 2560,
    "max_num_seqs": 256,
    "prove": False,
}


class Bench:
    """An engine, fresh prompts for every call, and the figures so far."""

    def __init__(self, lm: pc.LM, rounds: int, count: int, length: int, new: int) -> None:
        self.lm, self.rounds, self.count, self.length, self.new = lm, rounds, count, length, new
        self.rng, self.found = np.random.default_rng(0), dict[str, Any]()
        layers, width = lm.model.layers, lm.model.d_model
        self.middle = layers // 2
        four = [max(1, layers * (i + 1) // 5) for i in range(4)]

        def weight() -> np.ndarray:
            return self.rng.standard_normal((1, width)) / width**0.5

        self.one = [pc.Probe(weight(), at=pc.resid_post[self.middle], activation="sigmoid", name="one")]
        self.many = [pc.Probe(weight(), at=pc.resid_post[four[i % 4]], name=f"p{i}") for i in range(16)]
        self.vector = self.rng.standard_normal(width) / 100

    def prompts(self, length: int, shared: list[int] | None = None, count: int = 0) -> list[list[int]]:
        return [(shared or []) + self.rng.integers(10, 500, length).tolist() for _ in range(count or self.count)]

    def compare(self, title: str, cases: dict[str, Callable[[], Any]]) -> None:
        """Time the cases in turn; the first is what the others are compared with."""
        times: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(self.rounds + 1):
            for name, run in cases.items():
                begin = time.perf_counter()
                run()
                times[name] += [time.perf_counter() - begin] if number else []
        base = next(iter(times.values()))
        for name, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
            self.note(f"{title}: {name}", {"s": round(statistics.median(taken), 4), "ratio": round(ratio, 3),
                                           "rounds": [round(each, 4) for each in taken]})  # fmt: skip

    def note(self, name: str, figure: Any) -> None:
        self.found[name] = figure
        print(name, json.dumps(figure), flush=True)

    def generation(self) -> None:
        """Requests with probes and conditions, beside the same without."""
        probe = pc.Probe(self.one[0].weight, at=self.one[0].at, name="p")
        add = pc.Add(self.vector, at=pc.resid_post[self.middle + 1])
        programs: dict[str, dict[str, Any]] = {
            "no program": {}, "one probe": {"capture": self.one}, "16 probes at 4 layers": {"capture": self.many},
            "an edit": {"edits": add}, "an edit if a probe fires": {"edits": pc.When(probe > 0, add)},
            "an edit from where a probe fires": {"edits": pc.When(probe > 2, add, scope="onwards")},
        }  # fmt: skip
        options = {"max_tokens": self.new, "sampling": {"ignore_eos": True}}
        self.compare(f"{self.count} requests of {self.length} + {self.new} tokens", {
            name: lambda program=program: self.lm.run(self.prompts(self.length), **options, **program)
            for name, program in programs.items()
        })  # fmt: skip
        for name, probes in (("one probe", self.one), ("16 probes", self.many)):
            taken: dict[str, list[float]] = {"at once": [], "run by run": []}
            for _ in range(self.rounds):
                for way, read in (("at once", self.lm.probes), ("run by run", _one_by_one)):
                    runs = self.lm.run(self.prompts(self.length), **options, capture=probes)
                    begin = time.perf_counter()
                    read(runs)
                    taken[way].append(time.perf_counter() - begin)
            self.note(f"reading {name} of {self.count} runs, ms", {
                way: round(1e3 * statistics.median(each), 2) for way, each in taken.items()
            })  # fmt: skip

    def cached(self) -> None:
        """Requests behind a cached prefix of 2,000 tokens (of 64 on a CPU)."""
        shared = self.rng.integers(10, 500, 2000 if torch.cuda.is_available() else 64).tolist()
        last = [pc.Probe(self.one[0].weight, at=self.one[0].at, tokens=pc.prompt[-1], name="last")]
        self.compare(f"64 requests behind a cached prefix of {len(shared)}", {
            name: lambda program=program: self.lm.run(self.prompts(8, shared, 64), max_tokens=1, **program)
            for name, program in (("no program", {}), ("a probe of the last token", {"capture": last}),
                                  ("a probe of every token", {"capture": self.one}))
        })  # fmt: skip

    def captures(self) -> None:
        """Every layer of short prompts, in the caller's hands."""

        def captured(**options: Any) -> list[pc.Run]:
            return self.lm.run(self.prompts(12), max_tokens=1, capture=pc.Capture(pc.resid_post, **options))

        def summed() -> Any:
            return sum(torch.from_numpy(rows.values).sum() for rows in self.lm.rows(captured()).values())

        self.compare(f"every layer of {self.count} prompts of 12 tokens", {
            "no program": lambda: self.lm.run(self.prompts(12), max_tokens=1),
            "captured": captured, "as one array a layer": lambda: self.lm.rows(captured()),
            "and summed": summed,
            "run by run": lambda: self.lm.fetch(captured()), "means": lambda: self.lm.rows(captured(pool="mean")),
        })  # fmt: skip

    def lenses(self) -> None:
        """The five likeliest tokens of 8 layers, of every generated token, in the caller's hands."""
        layers = list(range(0, self.lm.model.layers, max(self.lm.model.layers // 8, 1)))[:8]
        lens = pc.Lens(pc.resid_post[layers], top=5, tokens=pc.generated)
        options = {"max_tokens": self.new, "sampling": {"ignore_eos": True}}
        self.compare(f"64 requests of {self.length} + {self.new} tokens, {len(layers)} layers", {
            "no program": lambda: self.lm.run(self.prompts(self.length, count=64), **options),
            "captured": lambda: self.lm.run(
                self.prompts(self.length, count=64), capture=pc.resid_post[layers] @ pc.generated, **options
            ),
            "lenses": lambda: self.lm.lens(self.lm.run(self.prompts(self.length, count=64), capture=lens, **options)),
        })  # fmt: skip

    def knockouts(self) -> None:
        """An edge into the last token of each prompt, or one into every generated token, in all layers."""
        options = {"max_tokens": self.new, "sampling": {"ignore_eos": True}}
        keys = [f"prompt[{i % self.length}]" for i in range(64)]
        programs: dict[str, list[Any]] = {
            "no program": [[]] * 64,
            "an edge into the prompt": [[pc.Knockout(key, pc.pattern, pc.prompt[-1])] for key in keys],
            "edges into generated tokens": [[pc.Knockout(key, pc.pattern, pc.generated)] for key in keys],
        }  # fmt: skip
        self.compare(f"64 requests of {self.length + 1} + {self.new} tokens, {self.lm.model.layers} layers", {
            name: lambda edits=edits: self.lm.run(self.prompts(self.length + 1, count=64), edits=edits, **options)
            for name, edits in programs.items()
        })  # fmt: skip

    def features(self) -> None:
        """The largest 32 of an SAE's 16,384 features, of every token, in the caller's hands; and one feature set."""
        width, at, count = self.lm.model.d_model, pc.resid_post[self.middle], 1 << 14
        encoder, decoder = self.rng.standard_normal((2, count, width), np.float32) / width**0.5
        sae = pc.SAE(encoder, np.zeros(count, np.float32), decoder, np.zeros(width, np.float32))
        self.lm.attach(sae, at=at, name="sae", precision="model")
        read, options = pc.Features("sae", top=32), {"max_tokens": self.new, "sampling": {"ignore_eos": True}}
        try:
            for requests, new in ((self.count, self.new), (64, self.new), (32, 1)):
                length = self.length if new > 1 else 8 * self.length
                many = {**options, "max_tokens": new}

                def run(length: int = length, requests: int = requests, **more: Any) -> list[pc.Run]:
                    return self.lm.run(self.prompts(length, count=requests), **more)

                self.compare(f"{requests} requests of {length} + {new} tokens", {
                    "no program": lambda run=run, many=many: run(**many),
                    "features kept": lambda run=run, many=many: run(**many, capture=read),
                    "features read": lambda run=run, many=many: self.lm.lens(run(**many, capture=read)),
                    "a feature set": lambda run=run, many=many: run(**many, edits=pc.SetFeature("sae", 7, 2.0)),
                })  # fmt: skip
            [one] = self.lm.run(self.prompts(self.length, count=1), max_tokens=4, capture=[read, at])
            rows, found = one[at].float().numpy(), one.features["sae"]
            best = np.sort(sae.encode(rows), 1)[:, ::-1][:, :32]
            gap = np.abs(found.values - best).max() / best.max()
            self.note("largest difference from fp32, relative to the largest feature", float(gap))
            for name, op in {
                "set": pc.SetFeature("sae", [7, 9], [2.0, 0.0]),
                "reconstructed": pc.Reconstruct("sae"),
            }.items():
                several = self.lm.run(
                    self.prompts(self.length, count=8), edits=[pc.Capture(at), op, pc.Capture(at)], **options
                )
                gaps = []
                for one in several:
                    before, after = (one[f"edits[{i}]"].float().numpy() for i in (0, 2))
                    change = (np.array([2, 0]) - sae.encode(before)[:, [7, 9]]) @ decoder[[7, 9]]
                    expected = before + change if name == "set" else sae.reconstruct(before)
                    gaps.append(np.abs(after - expected).max() / np.abs(expected).max())
                self.note(f"largest difference of rows, {name}, relative to the largest number", float(max(gaps)))
        finally:
            self.lm.detach("sae")


def monitors(bench: Bench, folder: str, options: dict[str, Any]) -> None:
    """Engines whose own probes score every token, beside one without."""
    engines = {"no probe": bench.lm}
    try:
        for name, probes in (("one probe of the engine", bench.one), ("16 probes of the engine", bench.many)):
            engines[name] = pc.LM(folder, engine="vllm", probes=probes, **OPTIONS, **options)
        of_token = {"max_tokens": bench.new, "sampling": {"ignore_eos": True}}
        bench.compare(f"{bench.count} requests of {bench.length} + {bench.new} tokens", {
            name: lambda lm=lm: lm.run(bench.prompts(bench.length), **of_token) for name, lm in engines.items()
        })  # fmt: skip
        shared = bench.rng.integers(10, 500, 2000 if torch.cuda.is_available() else 64).tolist()
        bench.compare(f"64 requests behind a cached prefix of {len(shared)}", {
            name: lambda lm=lm: lm.run(bench.prompts(8, shared, 64), max_tokens=1) for name, lm in engines.items()
        })  # fmt: skip
        lm, worst = engines["16 probes of the engine"], 0.0
        same = [pc.Probe(probe.weight, at=probe.at, name=f"own.{probe.name}") for probe in bench.many]
        for runs in (lm.run(bench.prompts(bench.length), **of_token), lm.run(bench.prompts(8, shared), max_tokens=4)):
            began = time.perf_counter()
            found = lm.probes(runs)
            bench.note(f"reading 16 probes of the engine of {len(runs)} runs, ms", 1e3 * (time.perf_counter() - began))
            for run in lm.run([run.prompt_token_ids for run in runs], **of_token, capture=same)[::5]:
                pairs = [(run.probes[probe.name], run.probes[f"own.{probe.name}"]) for probe in bench.many]
                worst = max(worst, *(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
            assert all(np.isfinite(rows.values).all() for rows in found.values())
        bench.note("largest difference from the same probes in a program", worst)
    finally:
        for lm in list(engines.values())[1:]:
            lm.close()


def _one_by_one(runs: list[pc.Run]) -> None:
    for run in runs:
        dict(run.probes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", default="generation,cached,captures,monitors")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    on_gpu, (shape, layers, changed) = torch.cuda.is_available(), SHAPES[asked.shape]
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
    options = {"dtype": "bfloat16"} if on_gpu else options
    # three engines fit beside each other
    options |= (
        {"kv_cache_memory_bytes": 1 << 34, "gpu_memory_utilization": 0.3}
        if on_gpu
        else {"kv_cache_memory_bytes": 1 << 29}
    )
    folder = shape_only(Path(tempfile.mkdtemp()), shape, layers, **changed)
    with pc.LM(folder, engine="vllm", **OPTIONS, **options) as lm:
        bench = Bench(lm, asked.rounds, 256, *((64, 64) if on_gpu else (12, 8)))
        for part in asked.parts.split(","):
            if part == "monitors":
                monitors(bench, folder, options)
            else:
                getattr(bench, part)()
    if asked.out is not None:
        machine = torch.cuda.get_device_name() if on_gpu else "CPU"
        told = {"date": datetime.date.today().isoformat(), "machine": machine, "shape": asked.shape, **bench.found}
        (asked.out / f"readouts-{asked.shape}.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
