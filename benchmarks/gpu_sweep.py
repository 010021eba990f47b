"""A patch sweep on every path there is, as prompts grow: cells a second, whole calls.

    python benchmarks/gpu_sweep.py --out DIR            (a CUDA machine; the shape of Qwen3-0.6B, bf16, random weights)
    python benchmarks/gpu_sweep.py --shape tiny         (a CPU is enough, to see that it works)

`resid_pre` of every layer at every position of a corrupt prompt is patched from a clean one, and answers are graded by
the difference of two tokens' log-probabilities. The sides are processes of their own and take turns:

- `loop`: a plain loop of batched forward hooks on Transformers, a batch for each layer and some positions;
- `changed`: `patch_sweep` on Transformers, where only what patches can change is computed; `changed 128` has batches of
  that size;
- `vllm`: `patch_sweep` on vLLM, in batches; with `beside`, the engine core is in a process of its own;
- `stock`: as many graded requests of stock vLLM that compute as many tokens: other prompts from a cell's position on.

With `--pairs 100` also every head of every layer (`z`, all tokens at once) for as many pairs of prompts, in one call:
`vllm`, and `requests`, the same engine with a request for each cell and a tenth of the pairs.

All but stock compute the same cells; how far they are from the loop's is told beside what the sweep finds by itself to
be noise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harvest import Remote

GRID = {5: 1, 40: 1, 204: 1, 1000: 10}  # by tokens of the prompts: every so many positions
TWELVE = ("resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in", "neurons", "mlp_out",
          "resid_post")  # fmt: skip
SITES = {1: TWELVE[:1], 4: ("resid_pre", "z", "attn_out", "mlp_out"), 12: TWELVE}  # by their number
ANSWER, FOIL = 7, 9
LOOP_TOKENS = 1 << 15  # of a batch of the plain loop
BARS = {
    "vllm": 0.35,
    "changed": 3.0,
}  # at 204 tokens: seconds of stock's, at most; cells a second of the loop's, at least
FLOAT = {"tiny": "float32", "0.6b": "bfloat16", "8b": "bfloat16"}
LAYERS = {"tiny": 4, "0.6b": 28, "8b": 32}


class Loop:
    """Batched hooks on Transformers."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, options["dtype"])
        self.net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device).eval()

    def seconds(self, prompts: list[list[int]], asked: dict[str, Any]) -> dict[str, Any]:
        import torch

        began = time.perf_counter()
        clean, corrupt = (torch.tensor([ids], device=self.device) for ids in prompts)
        layers, grid = self.net.model.layers, []
        with torch.inference_mode():
            streams = self.net(clean, output_hidden_states=True, logits_to_keep=1).hidden_states
            for layer, stream in zip(layers, streams, strict=False):
                positions = torch.tensor(asked["positions"], device=self.device)
                size = max(1, LOOP_TOKENS // corrupt.shape[1])
                row = [self._batch(layer, part, stream, corrupt) for part in positions.split(size)]
                grid.append(torch.cat(row))
            cells = torch.stack(grid).float().cpu().numpy()
        return {"seconds": time.perf_counter() - began, "cells": cells}

    def _batch(self, layer: Any, positions: Any, stream: Any, corrupt: Any) -> Any:
        import torch

        rows = torch.arange(len(positions), device=self.device)

        def patch(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            args[0][rows, positions] = stream[0, positions]
            return args

        hook = layer.register_forward_pre_hook(patch)
        try:
            logits = (
                self.net(corrupt.expand(len(positions), -1), logits_to_keep=1, use_cache=False).logits[:, 0].float()
            )
        finally:
            hook.remove()
        return logits[:, ANSWER] - logits[:, FOIL]

    def close(self) -> None:
        pass


class Ours:
    """`patch_sweep`, on either engine."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import patchclamp as pc

        self.lm = pc.LM(model, **options)

    def seconds(self, prompts: list[list[int]], asked: dict[str, Any]) -> dict[str, Any]:
        import patchclamp as pc

        began = time.perf_counter()
        sweep = pc.studies.patch_sweep(
            self.lm, clean=prompts[0], corrupt=prompts[1], answer=ANSWER, foil=FOIL, sites=asked["sites"],
            metric="logit_diff", positions=asked["positions"] or {"all": pc.every}, group=asked.get("group"),
            show_progress=False,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cells": np.asarray(sweep.values, np.float32), "noise": float(sweep.noise_floor),
                "computed": sweep.computed}  # fmt: skip

    def close(self) -> None:
        self.lm.close()


class Requests(Ours):
    """`patch_sweep` with a request for each cell."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        super().__init__(model, options)
        type(self.lm).batch_refusal = property(lambda lm: "requests are measured")


class Stock:
    """Stock vLLM."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, disable_log_stats=True, **options)
        self.layers = self.llm.llm_engine.model_config.hf_text_config.num_hidden_layers

    def seconds(self, prompts: list[list[int]], asked: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        ids, draw = list(prompts), np.random.default_rng(prompts[0])
        for position in asked["positions"]:
            count = self.layers * len(asked["sites"])
            rest = draw.integers(100, 500, (count, len(prompts[1]) - position)).tolist()
            ids += [prompts[1][:position] + one for one in rest]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2,
                                logprob_token_ids=[ANSWER, FOIL])  # fmt: skip
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
        graded = [output.outputs[0].logprobs[0] for output in outputs]
        assert all(np.isfinite(table[ANSWER].logprob - table[FOIL].logprob) for table in graded)
        return {"seconds": time.perf_counter() - began}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def start(args: argparse.Namespace) -> dict[str, Remote]:
    """All sides, which start together."""
    from tests.models import UNTIMED, with_weights

    tiny = args.shape == "tiny"
    changed = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                   max_position_embeddings=2048) if tiny else {"vocab_size": 151_936}  # fmt: skip
    folder = Path(f"/tmp/gpu-sweep-{args.shape}")
    model = with_weights(folder, "8b" if tiny else args.shape, LAYERS[args.shape], **changed)
    dtype = FLOAT[args.shape]
    vllm: dict[str, Any] = {"dtype": dtype, "skip_tokenizer_init": True, "max_model_len": 1100}
    if tiny:
        vllm |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27, "block_size": 32}
    else:
        vllm |= {
            "kv_cache_memory_bytes": 6 << 30,
            "gpu_memory_utilization": 0.2,
            "max_num_seqs": 1024,
            "compilation_config": {"inductor_compile_config": UNTIMED, "cudagraph_capture_sizes": [1, 8, 64, 512]},
        }
    hub = {"engine": "transformers", "dtype": dtype, "skip_tokenizer_init": True, "max_num_seqs": args.batch}
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if tiny else {}
    ours = {"engine": "vllm", "prove": False, "numerics": "stock", **vllm}
    sides: dict[str, tuple[type, dict[str, Any]]] = {
        "loop": (Loop, {"dtype": dtype}), "changed": (Ours, hub), "changed 128": (Ours, {**hub, "max_num_seqs": 128}),
        "vllm": (Ours, ours),
        "beside": (Ours, {**ours, "multiprocess_mode": True}), "requests": (Requests, ours), "stock": (Stock, vllm),
    }  # fmt: skip
    started = {name: Remote(*sides[name][:1], model, sides[name][1], environ) for name in args.sides.split(",")}
    for side in started.values():
        side.answer()
    return started


def measure(sides: dict[str, Remote], tokens: int, sites: int, layers: int, rounds: int) -> dict[str, Any]:
    """A row of the result: every side in turn, after one call of each that is not counted."""
    positions = list(range(0, tokens, GRID.get(tokens, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    far: dict[str, float] = {}
    told: dict[str, Any] = {}
    for number in range(rounds + 1):
        draw = np.random.default_rng((tokens, number))
        clean = draw.integers(100, 500, tokens).tolist()
        corrupt = [*draw.integers(100, 500, tokens // 2).tolist(), *clean[tokens // 2 :]]
        asked = {"positions": positions, "sites": SITES[sites]}
        answers = {name: side.seconds([clean, corrupt], **asked) for name, side in
                   (sides.items() if number % 2 else reversed(sides.items()))}  # fmt: skip
        for name, answer in answers.items():
            if number:
                seconds[name].append(answer["seconds"])
            if "cells" in answer and "loop" in answers:
                cells, loops = (np.squeeze(a["cells"]) for a in (answer, answers["loop"]))
                assert cells.shape == loops.shape
                far[name] = max(far.get(name, 0.0), float(np.abs(cells - loops).max()))
            told |= {f"{name}_{key}": answer[key] for key in ("noise", "computed") if key in answer}
    cells = len(positions) * layers * sites
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    return {
        "tokens": tokens, "sites": sites, "cells": cells, "seconds": seconds, "median_s": medians, "from_loop": far,
        **told,
        "cells_per_s": {name: round(cells / median) for name, median in medians.items()},
        "of_stock": {name: round(median / medians["stock"], 3) for name, median in medians.items() if "stock" in sides},
        "of_loop": {name: round(medians["loop"] / median, 2) for name, median in medians.items() if "loop" in sides},
    }  # fmt: skip


def measure_pairs(sides: dict[str, Remote], pairs: int, layers: int, rounds: int) -> dict[str, Any]:
    """Cells per second over pairs of prompts of 15 to 20 tokens, all heads."""
    seconds: dict[str, list[float]] = {name: [] for name in ("vllm", "requests")}
    counts = {"vllm": pairs, "requests": max(1, pairs // 10)}
    cells: dict[str, np.ndarray] = {}
    for number in range(rounds + 1):
        draw = np.random.default_rng((pairs, number))
        lengths = draw.integers(15, 21, pairs).tolist()
        clean, corrupt = ([draw.integers(100, 500, length).tolist() for length in lengths] for _ in range(2))
        for name in seconds if number % 2 else reversed(seconds):
            count = counts[name]
            asked = {"positions": None, "sites": "z", "group": 1}
            answer = sides[name].seconds([clean[:count], corrupt[:count]], **asked)
            cells[name] = answer["cells"]
            if number:
                seconds[name].append(answer["seconds"])
    each = cells["vllm"].size // layers
    rates = {name: counts[name] * each * layers / float(np.median(times)) for name, times in seconds.items()}
    return {"pairs": pairs, "shape": list(cells["vllm"].shape), "seconds": seconds,
            "cells_per_s": {name: round(rate) for name, rate in rates.items()},
            "times_requests": round(rates["vllm"] / rates["requests"], 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=FLOAT, default="0.6b")
    parser.add_argument("--sides", default="loop,changed,vllm,stock", help="separated by commas; also: beside")
    parser.add_argument("--tokens", default="17x12,204,1000", help="of the prompts, x sites (1, 4 or 12); 17x12 has 12")
    parser.add_argument("--pairs", type=int, default=0, help="of prompts, for all heads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256, help="max_num_seqs of the Transformers engine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    import torch
    import vllm

    on_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "vllm": vllm.__version__, "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores", "shape": args.shape,
        "command": " ".join(["python benchmarks/gpu_sweep.py", *sys.argv[1:]]), "bars": BARS, "rows": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gpu_sweep-{args.shape}-{result['date']}.json"
    sides = start(args)
    try:
        for case in filter(None, args.tokens.split(",")):
            tokens, _, sites = case.partition("x")
            row = measure(sides, int(tokens), int(sites or 1), LAYERS[args.shape], args.rounds)
            print({key: value for key, value in row.items() if key != "seconds"}, flush=True)
            result["rows"].append(row)
            path.write_text(json.dumps(result, indent=1) + "\n")
        if args.pairs:
            result["pairs"] = measure_pairs(sides, args.pairs, LAYERS[args.shape], args.rounds)
            print({key: value for key, value in result["pairs"].items() if key != "seconds"}, flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
