"""patchclamp and the tools a researcher would use instead, on the same jobs and the same machine: whole calls.

    python benchmarks/peers.py --out DIR --side nnsight=/envs/nnsight/bin/python --side vllm_lens=/envs/lens/bin/python
    python benchmarks/peers.py --shape tiny --sides patchclamp,hooks      (a CPU, to see that it works)

Jobs, of the shape of Qwen3-0.6B with random weights in bf16, prompts as token ids:

- `steer`: 256 requests of 64 + 64 tokens, one vector added at the middle layer to every token;
- `capture`: the residual stream of every layer, for 64 prompts of 2,048 tokens, in the caller's hands;
- `sweep`: the stream before every layer at each of 204 positions patched from another prompt: 5,712 cells;
- `lens`: the five likeliest tokens of every layer at the last position of 64 prompts of 64 tokens.

Each side is a process with an environment of its own (`--side NAME=PYTHON`; the others run in this one), since each
needs its own version of vLLM. Sides take turns. A call of the first round is not counted, unless it takes more than
`PATIENCE_S`: then it is the only one. What sides return is compared with `hooks`, plain batched hooks on Transformers.
`stock` is vLLM without any tool: the same requests, unsteered, and the prefill alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PATIENCE_S = 60.0
ANSWER, FOIL, TOP = 7, 9, 5
SIZES = {  # by shape: requests and tokens of steer, prompts and tokens of capture, tokens of sweep, prompts of lens
    "0.6b": {"steer": (256, 64), "capture": (64, 2048), "sweep": 204, "lens": (64, 64)},
    "tiny": {"steer": (8, 12), "capture": (4, 32), "sweep": 12, "lens": (4, 12)},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"vocab_size": 49_152},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 32, "vocab_size": 2048},
}  # fmt: skip
LAYERS = {"0.6b": 28, "tiny": 3}
SAMPLE = 7  # every so many captured rows are compared
Arrays = dict[str, np.ndarray]


class Side:
    """A tool, by the jobs that it can do. Each takes its inputs, and returns the arrays that are compared."""

    def __init__(self, model: str, shape: str) -> None:
        self.model, self.shape, self.layers = model, shape, LAYERS[shape]
        self.dtype = "float32" if shape == "tiny" else "bfloat16"
        self.middle = self.layers // 2
        self.engine = {"dtype": self.dtype, "max_model_len": 2304}
        self.engine |= ({"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True, "block_size": 32} if shape == "tiny"
                        else {"gpu_memory_utilization": 0.35})  # fmt: skip

    def vector(self, width: int) -> np.ndarray:
        return (0.05 * np.random.default_rng(1).standard_normal(width)).astype(np.float32)


class Stock(Side):
    """vLLM without a tool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from vllm import LLM

        self.llm = LLM(self.model, **self.engine)

    def _generate(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **sampling)
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)

    def steer(self, prompts: list[list[int]]) -> Arrays:
        self._generate(prompts, len(prompts[0]))
        return {}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        self._generate(prompts, 1)
        return {}


class Patchclamp(Side):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import patchclamp as pc

        self.lm = pc.LM(self.model, engine="vllm", **self.engine)

    def steer(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        edit = pc.Add(self.vector(self.lm.model.d_model), at=pc.resid_post[self.middle])
        runs = self.lm.run(prompts, max_tokens=len(prompts[0]), edits=[edit], sampling={"ignore_eos": True})
        return {"tokens": np.array([run.token_ids for run in runs])}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        runs = self.lm.run(prompts, max_tokens=1, capture=[pc.Capture(pc.resid_post, dtype=self.dtype)])
        fetched = self.lm.fetch(runs, pc.resid_post)
        return {"rows": np.stack([each[pc.resid_post][:, ::SAMPLE].float().numpy() for each in fetched])}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        import patchclamp as pc

        sweep = pc.studies.patch_sweep(
            self.lm, clean=clean, corrupt=corrupt, answer=ANSWER, foil=FOIL, metric="logit_diff", show_progress=False,
        )  # fmt: skip
        return {"cells": np.squeeze(sweep.values)}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        lenses = [
            pc.studies.logit_lens(self.lm, prompt=ids, positions=-1, top=TOP, show_progress=False) for ids in prompts
        ]
        return {"top": np.stack([lens.top_ids[:, 0] for lens in lenses])}


class Hooks(Side):
    """Plain batched hooks on Transformers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.net = (
            AutoModelForCausalLM.from_pretrained(self.model, dtype=getattr(torch, self.dtype)).to(self.device).eval()
        )
        self.blocks = self.net.model.layers

    def _tensor(self, values: Any) -> Any:
        return self.torch.as_tensor(np.array(values), device=self.device)

    def steer(self, prompts: list[list[int]]) -> Arrays:
        vector = self._tensor(self.vector(self.net.config.hidden_size)).to(self.net.dtype)
        hook = self.blocks[self.middle].register_forward_hook(
            lambda module, args, out: (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector
        )
        count = len(prompts[0])
        try:
            with self.torch.inference_mode():
                made = self.net.generate(
                    self._tensor(prompts), max_new_tokens=count, min_new_tokens=count, do_sample=False
                )
        finally:
            hook.remove()
        return {"tokens": made[:, count:].cpu().numpy()}

    def _streams(self, ids: Any) -> list[Any]:
        """The stream after every layer, [B, T, D] each; before the final norm."""
        seen: list[Any] = []
        hooks = [block.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
                 for block in self.blocks]  # fmt: skip
        try:
            with self.torch.inference_mode():
                self.net(ids, logits_to_keep=1, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def capture(self, prompts: list[list[int]]) -> Arrays:
        size = max(1, (1 << 15) // len(prompts[0]))
        rows = [self.torch.stack([each.cpu() for each in self._streams(self._tensor(prompts[i : i + size]))])
                for i in range(0, len(prompts), size)]  # fmt: skip
        return {"rows": self.torch.cat([each[:, :, ::SAMPLE].float() for each in rows], 1).transpose(0, 1).numpy()}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        torch = self.torch
        with torch.inference_mode():
            streams = self.net(self._tensor([clean]), output_hidden_states=True, logits_to_keep=1).hidden_states
            size, grid = max(1, (1 << 15) // len(corrupt)), []
            for block, stream in zip(self.blocks, streams, strict=False):
                row = []
                for positions in torch.arange(len(corrupt), device=self.device).split(size):
                    count = torch.arange(len(positions), device=self.device)

                    def patch(
                        module: Any, args: Any, positions: Any = positions, count: Any = count, stream: Any = stream
                    ) -> Any:
                        args[0][count, positions] = stream[0, positions]
                        return args

                    hook = block.register_forward_pre_hook(patch)
                    ids = self._tensor([corrupt]).expand(len(positions), -1)
                    logits = self.net(ids, logits_to_keep=1, use_cache=False).logits[:, 0].float()
                    hook.remove()
                    row.append(logits[:, ANSWER] - logits[:, FOIL])
                grid.append(torch.cat(row))
        return {"cells": torch.stack(grid).cpu().numpy()}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        last = self.torch.stack([each[:, -1] for each in self._streams(self._tensor(prompts))], 1)
        with self.torch.inference_mode():
            logits = self.net.lm_head(self.net.model.norm(last)).float()
        return {"top": logits.topk(TOP).indices.cpu().numpy()}


class TransformerLens(Hooks):
    """TransformerLens: its bridge to the Transformers model."""

    def __init__(self, *args: Any) -> None:
        Side.__init__(self, *args)
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, self.dtype)
        self.tl = TransformerBridge.boot_transformers(self.model, device=self.device, dtype=dtype)

    def steer(self, prompts: list[list[int]]) -> Arrays:
        vector = self._tensor(self.vector(self.tl.cfg.d_model)).to(getattr(self.torch, self.dtype))
        name, count = f"blocks.{self.middle}.hook_resid_post", len(prompts[0])
        with self.torch.inference_mode(), self.tl.hooks(fwd_hooks=[(name, lambda rows, hook: rows + vector)]):
            made = self.tl.generate(self._tensor(prompts), max_new_tokens=count, do_sample=False, stop_at_eos=False,
                                    return_type="tokens", verbose=False)  # fmt: skip
        return {"tokens": made[:, -count:].cpu().numpy()}

    def _streams(self, ids: Any) -> list[Any]:
        names = [f"blocks.{i}.hook_resid_post" for i in range(self.layers)]
        with self.torch.inference_mode():
            _, cache = self.tl.run_with_cache(ids, names_filter=names)
        return [cache[name] for name in names]

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        torch, names = self.torch, [f"blocks.{i}.hook_resid_pre" for i in range(self.layers)]
        with torch.inference_mode():
            _, cache = self.tl.run_with_cache(self._tensor([clean]), names_filter=names)
            size, grid = max(1, (1 << 15) // len(corrupt)), []
            for name in names:
                row = []
                for positions in torch.arange(len(corrupt), device=self.device).split(size):

                    def patch(rows: Any, hook: Any, positions: Any = positions, clean_rows: Any = cache[name]) -> Any:
                        rows[torch.arange(len(positions), device=rows.device), positions] = clean_rows[0, positions]
                        return rows

                    ids = self._tensor([corrupt]).expand(len(positions), -1)
                    logits = self.tl.run_with_hooks(ids, fwd_hooks=[(name, patch)])[:, -1].float()
                    row.append(logits[:, ANSWER] - logits[:, FOIL])
                grid.append(torch.cat(row))
        return {"cells": torch.stack(grid).cpu().numpy()}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        last = self.torch.stack([each[:, -1] for each in self._streams(self._tensor(prompts))], 1)
        with self.torch.inference_mode():
            logits = self.tl.unembed(self.tl.ln_final(last)).float()
        return {"top": logits.topk(TOP).indices.cpu().numpy()}


class VllmLens(Stock):
    """vllm-lens: it steers and captures."""

    def steer(self, prompts: list[list[int]]) -> Arrays:
        import torch
        from vllm_lens import SteeringVector

        width = self.llm.llm_engine.model_config.get_hidden_size()
        vector = SteeringVector(activations=torch.from_numpy(self.vector(width))[None], layer_indices=[self.middle])
        made = self._generate(prompts, len(prompts[0]), extra_args={"apply_steering_vectors": [vector]})
        return {"tokens": np.array([each.outputs[0].token_ids for each in made])}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        made = self._generate(prompts, 1, extra_args={"output_residual_stream": True})
        return {
            "rows": np.stack([each.activations["residual_stream"][:, ::SAMPLE].float().cpu().numpy() for each in made])
        }


class Nnsight(Side):
    """nnsight on vLLM."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from nnsight.modeling.vllm import VLLM

        self.net = VLLM(self.model, dispatch=True, **self.engine)
        self.blocks = self.net.model.layers

    def steer(self, prompts: list[list[int]]) -> Arrays:
        import torch

        count, blocks, middle = len(prompts[0]), self.blocks, self.middle
        vector = torch.from_numpy(self.vector(self.net.config.hidden_size)).to("cuda", torch.bfloat16)
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
        with self.net.trace(**sampling) as tracer:
            for ids in prompts:
                with tracer.invoke(ids, **sampling):
                    for _ in tracer.iter[:]:
                        blocks[middle].output[0][:] += vector
        return {}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        blocks, layers = self.blocks, self.layers
        with self.net.trace(temperature=0.0, max_tokens=1) as tracer:
            seen = list().save()  # noqa: C408  a proxy
            for ids in prompts:
                with tracer.invoke(ids, temperature=0.0, max_tokens=1):
                    one = []
                    for i in range(layers):
                        one.append((blocks[i].output[0] + blocks[i].output[1]).cpu())
                    seen.append(one)
        return {}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        blocks, layers, net = self.blocks, self.layers, self.net
        with net.trace(clean, temperature=0.0, max_tokens=1):
            kept = list().save()  # noqa: C408
            for i in range(layers):
                kept.append((blocks[i].output[0] + blocks[i].output[1]).clone())
        rows = list(kept)
        with net.trace(temperature=0.0, max_tokens=1) as tracer:
            found = list().save()  # noqa: C408
            for i in range(layers):
                for position in range(len(corrupt)):
                    row = rows[i][position]
                    with tracer.invoke(corrupt, temperature=0.0, max_tokens=1):
                        blocks[i].output[0][position] = row
                        blocks[i].output[1][position] = 0
                        logits = net.logits[0]
                        found.append((logits[ANSWER] - logits[FOIL]).item())
        return {}


SIDES: dict[str, type[Side]] = {
    "stock": Stock, "patchclamp": Patchclamp, "hooks": Hooks, "transformer_lens": TransformerLens, "nnsight": Nnsight,
    "vllm_lens": VllmLens,
}  # fmt: skip
JOBS = ("steer", "capture", "sweep", "lens")


def inputs(job: str, shape: str, number: int) -> list[Any]:
    """The arguments of a job in a round."""
    size, draw = SIZES[shape][job], np.random.default_rng((JOBS.index(job), number))

    def ids(count: Any) -> list[Any]:
        return draw.integers(100, SHAPES[shape]["vocab_size"], count).tolist()

    if job != "sweep":
        return [ids(size)]
    clean = ids(size)
    return [clean, [*ids(size // 2), *clean[size // 2 :]]]


def serve(name: str, model: str, shape: str) -> None:
    """A side: reads a job and a round from each line, and prints the seconds that it took."""
    side = SIDES[name](model, shape)
    print("RES", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job, number, place = json.loads(line)
        answer: dict[str, Any] = {}
        if hasattr(side, job):
            asked = inputs(job, shape, number)
            try:
                began = time.perf_counter()
                arrays = getattr(side, job)(*asked)
                answer["seconds"] = time.perf_counter() - began
                np.savez(place, **arrays)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"[:300]
        print("RES", json.dumps(answer), flush=True)


class Remote:
    """A side in a process of its own."""

    def __init__(self, name: str, python: str, model: str, shape: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        command = [python, __file__, "--serve", name, "--shape", shape, "--model", model]
        environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if shape == "tiny" else {**os.environ}
        environ |= {"VLLM_PLUGINS": ""} if name == "stock" else {}
        self._log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ
        )

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RES "):
                return json.loads(line[4:])
        raise RuntimeError(f"{self.name} ended; see {self._log.name}")

    def run(self, job: str, number: int) -> tuple[dict[str, Any], Arrays]:
        assert self._process.stdin is not None
        place = self._folder / f"{self.name}.npz"
        place.unlink(missing_ok=True)
        self._process.stdin.write(json.dumps([job, number, str(place)]) + "\n")
        self._process.stdin.flush()
        answer = self.answer()
        return answer, dict(np.load(place)) if place.exists() else {}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def compared(arrays: Arrays, reference: Arrays) -> float | None:
    """How far a side's result is from the reference's: the largest difference, for tokens the fraction that differ."""
    shared = arrays.keys() & reference.keys()
    if not shared:
        return None
    [name] = shared
    one, other = arrays[name], reference[name]
    if one.shape != other.shape:
        return float("nan")
    return float((one != other).mean()) if one.dtype.kind == "i" else float(np.abs(one - other).max())


def measure(sides: dict[str, Remote], job: str, rounds: int) -> dict[str, Any]:
    """Every side in turn, after one call of each that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    apart: dict[str, float] = {}
    errors: dict[str, str] = {}
    once: set[str] = set()
    for number in range(rounds + 1):
        found: dict[str, Arrays] = {}
        for name in sides if number % 2 else reversed(sides):
            if name in once or name in errors:
                continue
            answer, found[name] = sides[name].run(job, number)
            if "error" in answer:
                errors[name] = answer["error"]
            took = answer.get("seconds", np.inf)
            if (number or took > PATIENCE_S) and np.isfinite(took):
                seconds[name].append(took)
            if took > PATIENCE_S:
                once.add(name)
        for name, arrays in found.items():
            if (far := compared(arrays, found.get("hooks", {}))) is not None and name != "hooks":
                apart[name] = max(apart.get(name, 0.0), far)
    medians = {name: round(float(np.median(times)), 4) for name, times in seconds.items() if times}
    return {"job": job, "seconds": seconds, "from_hooks": apart, "errors": errors, "median_s": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="0.6b")
    parser.add_argument("--sides", default="stock,patchclamp,hooks", help="those in this environment")
    parser.add_argument(
        "--side", action="append", default=[], metavar="NAME=PYTHON", help="one with its own environment"
    )
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.shape)
        return
    from tests.models import with_weights, with_words

    model = with_weights(Path(f"/tmp/peers-{args.shape}"), "0.6b", LAYERS[args.shape], **SHAPES[args.shape])
    with_words(model, SHAPES[args.shape]["vocab_size"])
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "shape": args.shape, "jobs": [],
                              "command": " ".join(["python benchmarks/peers.py", *sys.argv[1:]])}  # fmt: skip
    path = args.out / f"peers-{args.shape}-{result['date']}.json"
    own = dict.fromkeys(filter(None, args.sides.split(",")), sys.executable)
    pythons = own | dict(each.split("=", 1) for each in args.side)
    sides: dict[str, Remote] = {}
    try:
        for name, python in pythons.items():  # one after the other: each measures the memory that is free
            sides[name] = Remote(name, python, model, args.shape, args.out)
            sides[name].answer()
        for job in args.jobs.split(","):
            result["jobs"].append(measure(sides, job, args.rounds))
            print({key: value for key, value in result["jobs"][-1].items() if key != "seconds"}, flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
