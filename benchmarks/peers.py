"""patchclamp and the tools a researcher would use instead, on the same jobs and the same machine: whole calls.

    python benchmarks/peers.py --out DIR --side nnsight=/envs/nnsight/bin/python --side vllm_lens=/envs/lens/bin/python
    python benchmarks/peers.py --shape tiny --sides patchclamp,hooks      (a CPU, to see that it works)

Jobs, of the shape of Qwen3-0.6B with random weights in bf16, prompts as token ids:

- `steer`: 256 requests of 64 + 64 tokens, one vector added at the middle layer to every token;
- `capture`: the residual stream of every layer, for 64 prompts of 2,048 tokens, in the caller's hands;
- `sweep`: the stream before every layer at each of 204 positions patched from another prompt: 5,712 cells;
- `lens`: the five likeliest tokens of every layer at the last position of 64 prompts of 64 tokens;
- `lens_each`: the same, a call per prompt: the study `logit_lens`.

`capture/8` is an eighth of a job: of its prompts, or of the layers of a sweep, evenly spaced.

Each side is a process, with an environment of its own where it needs one (`--side NAME=PYTHON`; the others run in this
one). They start together, then take turns. A call of the first round is not counted, unless it takes more than
`PATIENCE_S`: then it is the only one. One that takes more than `--limit` is given up, and its side with it. What sides
return is compared with `hooks`, plain batched hooks on Transformers. `stock` is vLLM without any tool: the same
requests, unsteered, and the prefill alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PATIENCE_S, START_S = 10.0, 300.0
BATCH = 1 << 16  # tokens of a batch of hooks
ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}
ANSWER, FOIL, TOP = 7, 9, 5
SIZES = {  # by shape: requests and tokens of steer, prompts and tokens of capture, tokens of sweep, prompts of lens
    "0.6b": {"steer": (256, 64), "capture": (64, 2048), "sweep": 204, "lens": (64, 64), "lens_each": (64, 64)},
    "tiny": {"steer": (8, 12), "capture": (4, 32), "sweep": 12, "lens": (4, 12), "lens_each": (4, 12)},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "vocab_size": 49_152},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 32, "vocab_size": 2048},
}  # fmt: skip
LAYERS = {"0.6b": 28, "tiny": 3}
SAMPLE = 31  # every so many captured rows are compared
Arrays = dict[str, np.ndarray]


class Side:
    """A tool, by the jobs that it can do. Each takes its inputs, and returns the arrays that are compared."""

    def __init__(self, model: str, shape: str) -> None:
        self.model, self.shape, self.layers = model, shape, LAYERS[shape]
        self.dtype = "float32" if shape == "tiny" else "bfloat16"
        self.middle, self.every = self.layers // 2, 1  # a sweep patches every so many layers
        self.engine = {"dtype": self.dtype, "max_model_len": 2304}
        self.engine |= ({"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True, "block_size": 32} if shape == "tiny"
                        else {"kv_cache_memory_bytes": 16 << 30, "gpu_memory_utilization": 0.05})  # fmt: skip

    def vector(self) -> np.ndarray:
        width = SHAPES[self.shape]["hidden_size"]
        return (0.05 * np.random.default_rng(1).standard_normal(width)).astype(np.float32)


class Stock(Side):
    """vLLM without a tool."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args)
        from vllm import LLM

        self.llm = LLM(self.model, **self.engine, **options)

    def _generate(
        self, prompts: list[list[int]], tokens: int, each: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> list[Any]:
        """Sampled alike, or with what each prompt has of its own."""
        from vllm import SamplingParams

        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **sampling}
        asked = [SamplingParams(**sampling, **own) for own in each] if each else SamplingParams(**sampling)
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

        edit = pc.Add(self.vector(), at=pc.resid_post[self.middle])
        runs = self.lm.run(prompts, max_tokens=len(prompts[0]), edits=[edit], sampling={"ignore_eos": True})
        return {"tokens": np.array([run.token_ids for run in runs])}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        runs = self.lm.run(prompts, max_tokens=1, capture=[pc.Capture(pc.resid_post, dtype=self.dtype)])
        sites = [pc.resid_post[layer] for layer in range(self.layers)]
        fetched = self.lm.fetch(runs, sites, copy=False)  # a tensor of each layer, as hooks have it
        return {"rows": np.stack([[each[at][::SAMPLE].float().numpy() for at in sites] for each in fetched])}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        import patchclamp as pc

        sweep = pc.studies.patch_sweep(
            self.lm, clean=clean, corrupt=corrupt, answer=ANSWER, foil=FOIL, metric="logit_diff", show_progress=False,
            layers=list(range(0, self.layers, self.every)),
        )  # fmt: skip
        return {"cells": np.squeeze(sweep.values)}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        lens = pc.Lens(pc.resid_post, pc.prompt[-1], top=TOP)
        runs = self.lm.run(prompts, max_tokens=1, capture=lens)
        return {"top": np.stack([read[pc.resid_post].ids[:, 0] for read in self.lm.lens(runs)])}

    def lens_each(self, prompts: list[list[int]]) -> Arrays:
        import patchclamp as pc

        found = [pc.studies.logit_lens(self.lm, ids, positions=[-1], top=TOP, show_progress=False) for ids in prompts]
        return {"top": np.stack([each.top_ids[:, 0] for each in found])}


class Batched(Side):
    """Transformers in whole batches. What differs between tools is how they reach the stream."""

    net: Any  # the model, called by what it is made of
    blocks: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import torch

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.options = {"dtype": getattr(torch, self.dtype)}

    def _tensor(self, values: Any) -> Any:
        return self.torch.as_tensor(np.array(values), device=self.device)

    def _vector(self) -> Any:
        return self._tensor(self.vector()).to(self.options["dtype"])

    def _streams(self, ids: Any) -> list[Any]:
        """The stream after every layer, [B, T, D] each."""
        raise NotImplementedError

    def _entering(self, ids: Any) -> list[Any]:
        """The stream before every layer, [T, D] each, of one prompt."""
        raise NotImplementedError

    def _patched(self, ids: Any, layer: int, places: tuple[Any, Any], rows: Any) -> Any:
        """The last token's logits, [B, V], with rows of the stream before a layer replaced: one of each prompt."""
        raise NotImplementedError

    def _unembed(self, rows: Any) -> Any:
        return self.net.lm_head(self.net.model.norm(rows))

    def capture(self, prompts: list[list[int]]) -> Arrays:
        size, parts = max(1, BATCH // len(prompts[0])), []
        with self.torch.inference_mode():
            for i in range(0, len(prompts), size):
                streams = [each.cpu() for each in self._streams(self._tensor(prompts[i : i + size]))]
                parts.append(self.torch.stack([each[:, ::SAMPLE].float() for each in streams], 1))
        return {"rows": self.torch.cat(parts).numpy()}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        size, grid = max(1, BATCH // len(corrupt)), []
        with self.torch.inference_mode():
            streams = self._entering(self._tensor([clean]))
            for layer in range(0, self.layers, self.every):
                rows = streams[layer]
                for positions in self.torch.arange(len(corrupt), device=self.device).split(size):
                    ids = self._tensor([corrupt]).expand(len(positions), -1)
                    places = (self.torch.arange(len(positions), device=self.device), positions)
                    grid.append(self._patched(ids, layer, places, rows[positions])[:, [ANSWER, FOIL]].float())
        cells = self.torch.cat(grid).cpu().numpy()
        return {"cells": (cells[:, 0] - cells[:, 1]).reshape(-1, len(corrupt))}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        with self.torch.inference_mode():
            last = self.torch.stack([each[:, -1] for each in self._streams(self._tensor(prompts))], 1)
            return {"top": self._unembed(last).topk(TOP).indices.cpu().numpy()}

    def lens_each(self, prompts: list[list[int]]) -> Arrays:
        return {"top": np.concatenate([self.lens([ids])["top"] for ids in prompts])}


class Hooks(Batched):
    """Plain batched hooks on Transformers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from transformers import AutoModelForCausalLM

        self.net = AutoModelForCausalLM.from_pretrained(self.model, **self.options).to(self.device).eval()
        self.blocks = self.net.model.layers

    def steer(self, prompts: list[list[int]]) -> Arrays:
        vector, count = self._vector(), len(prompts[0])
        with self._hooked([(self.blocks[self.middle].register_forward_hook, lambda m, a, out: out + vector)]):
            made = self.net.generate(self._tensor(prompts), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return {"tokens": made[:, count:].cpu().numpy()}

    def _streams(self, ids: Any) -> list[Any]:
        seen: list[Any] = []
        with self._hooked([(each.register_forward_hook, lambda m, a, out: seen.append(out)) for each in self.blocks]):
            self.net(ids, logits_to_keep=1, use_cache=False)
        return seen

    def _entering(self, ids: Any) -> list[Any]:
        return [each[0] for each in self.net(ids, output_hidden_states=True, logits_to_keep=1).hidden_states[:-1]]

    def _patched(self, ids: Any, layer: int, places: tuple[Any, Any], rows: Any) -> Any:
        def patch(module: Any, args: Any) -> None:
            args[0][places] = rows

        with self._hooked([(self.blocks[layer].register_forward_pre_hook, patch)]):
            return self.net(ids, logits_to_keep=1, use_cache=False).logits[:, 0]

    @contextlib.contextmanager
    def _hooked(self, hooks: list[tuple[Any, Any]]) -> Iterator[None]:
        handles = [register(hook) for register, hook in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class TransformerLens(Batched):
    """TransformerLens: its bridge to the Transformers model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from transformer_lens.model_bridge import TransformerBridge

        self.net = TransformerBridge.boot_transformers(self.model, device=self.device, **self.options)

    def steer(self, prompts: list[list[int]]) -> Arrays:
        vector, count = self._vector(), len(prompts[0])
        name = f"blocks.{self.middle}.hook_resid_post"
        with self.torch.inference_mode(), self.net.hooks(fwd_hooks=[(name, lambda rows, hook: rows + vector)]):
            made = self.net.generate(self._tensor(prompts), max_new_tokens=count, do_sample=False, stop_at_eos=False,
                                     return_type="tokens", verbose=False)  # fmt: skip
        return {"tokens": made[:, -count:].cpu().numpy()}

    def _cached(self, ids: Any, hook: str) -> list[Any]:
        names = [f"blocks.{i}.{hook}" for i in range(self.layers)]
        cache = self.net.run_with_cache(ids, names_filter=names)[1]
        return [cache[name] for name in names]

    def _streams(self, ids: Any) -> list[Any]:
        return self._cached(ids, "hook_resid_post")

    def _entering(self, ids: Any) -> list[Any]:
        return [each[0] for each in self._cached(ids, "hook_resid_pre")]

    def _patched(self, ids: Any, layer: int, places: tuple[Any, Any], rows: Any) -> Any:
        def patch(stream: Any, hook: Any) -> Any:
            stream[places] = rows
            return stream

        return self.net.run_with_hooks(ids, fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", patch)])[:, -1]

    def _unembed(self, rows: Any) -> Any:
        return self.net.unembed(self.net.ln_final(rows))


class NnsightHF(Batched):
    """nnsight on Transformers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from nnsight.modeling.transformers import TransformersModel

        self.net = TransformersModel(
            self.model, task="text-generation", dispatch=True, device_map=self.device, **self.options
        )
        self.blocks = self.net.model.layers

    def steer(self, prompts: list[list[int]]) -> Arrays:
        blocks, middle, vector, count = self.blocks, self.middle, self._vector(), len(prompts[0])
        asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with self.net.generate(self._tensor(prompts), **asked) as tracer:
            for _ in tracer.iter[:count]:
                blocks[middle].output = blocks[middle].output + vector
            made = tracer.result.save()
        return {"tokens": made[:, count:].cpu().numpy()}

    def _streams(self, ids: Any) -> list[Any]:
        with self.net.trace(ids, logits_to_keep=1, use_cache=False):
            seen = list().save()  # noqa: C408  a list of nnsight's
            for block in self.blocks:
                seen.append(block.output)
        return seen

    def _entering(self, ids: Any) -> list[Any]:
        with self.net.trace(ids, logits_to_keep=1, use_cache=False):
            seen = list().save()  # noqa: C408
            for block in self.blocks:
                seen.append(block.input[0])
        return seen

    def _patched(self, ids: Any, layer: int, places: tuple[Any, Any], rows: Any) -> Any:
        with self.net.trace(ids, logits_to_keep=1, use_cache=False):
            self.blocks[layer].input[places] = rows
            logits = self.net.lm_head.output[:, -1].save()
        return logits


class VllmLens(Stock):
    """vllm-lens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, enable_chunked_prefill=False)  # hooks see prompts whole

    def steer(self, prompts: list[list[int]]) -> Arrays:
        import torch
        from vllm_lens import SteeringVector

        vector = torch.from_numpy(self.vector())
        steering = SteeringVector(activations=vector[None], layer_indices=[self.middle])
        made = self._generate(prompts, len(prompts[0]), extra_args={"apply_steering_vectors": [steering]})
        return {"tokens": np.array([each.outputs[0].token_ids for each in made])}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        size, rows = max(1, (1 << 15) // len(prompts[0])), []  # a message of its holds less than 4 GiB
        for i in range(0, len(prompts), size):
            made = self._generate(prompts[i : i + size], 1, extra_args={"output_residual_stream": True})
            rows += [each.activations["residual_stream"][:, ::SAMPLE].float().numpy() for each in made]
        return {"rows": np.stack(rows)}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        from vllm_lens import Hook

        def keep(context: Any, stream: Any) -> None:
            context.saved["rows"] = stream.cpu()

        def patch(position: int, row: Any) -> Any:
            def hook(context: Any, stream: Any) -> Any:
                stream = stream.clone()
                stream[position] = row
                return stream

            return hook

        first = Hook(fn=keep, layer_indices=[0], pre=True)
        [made] = self._generate([clean], 1, extra_args={"apply_hooks": [first], "output_residual_stream": True})
        streams = [made.hook_results["0"]["rows"], *made.activations["residual_stream"][:-1]]
        grid = []
        for layer in range(0, self.layers, self.every):
            stream = streams[layer]
            # a hook before a layer sees half of the stream, but for the first; one after the layer before sees it all
            at = {"layer_indices": [max(layer - 1, 0)], "pre": layer == 0}
            hooks = [Hook(fn=patch(position, row.clone()), **at) for position, row in enumerate(stream)]
            own = [{"extra_args": {"apply_hooks": [hook]}} for hook in hooks]
            made = self._generate([corrupt] * len(own), 1, own, logprobs=2, logprob_token_ids=[ANSWER, FOIL])
            found = [each.outputs[0].logprobs[0] for each in made]
            grid.append([each[ANSWER].logprob - each[FOIL].logprob for each in found])
        return {"cells": np.array(grid)}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        from vllm_lens import Hook

        count = TOP

        def read(context: Any, stream: Any) -> None:
            logits = context.model.model.norm(stream[-1:].clone()) @ context.get_parameter("lm_head.weight").T
            context.saved[context.layer_idx] = logits[0].topk(count).indices.cpu().numpy()

        hook = Hook(fn=read, layer_indices=list(range(self.layers)))
        made = self._generate(prompts, 1, extra_args={"apply_hooks": [hook]})
        saved = [each.hook_results["0"] for each in made]
        return {"top": np.array([[each[layer] for layer in range(self.layers)] for each in saved])}


class Nnsight(Side):
    """nnsight on vLLM: an edit that stays on the engine where every request gets the same, else an invoke a request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import torch
        from nnsight.modeling.vllm import VLLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.engine.pop("enforce_eager", None)  # it always is
        self.net = VLLM(self.model, dispatch=True, **self.engine)
        self.blocks = self.net.model.layers

    def _generate(self, edit: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        made = self.net.vllm_entrypoint.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        edit.clear()
        return made

    def steer(self, prompts: list[list[int]]) -> Arrays:
        import torch

        blocks, middle = self.blocks, self.middle
        vector = torch.from_numpy(self.vector()).to(self.device, getattr(torch, self.dtype))
        with self.net.edit() as (tracer, edit):
            for _ in tracer.iter[:]:
                blocks[middle].output[0][:] += vector
        made = self._generate(edit, prompts, len(prompts[0]))
        return {"tokens": np.array([each.outputs[0].token_ids for each in made])}

    def capture(self, prompts: list[list[int]]) -> Arrays:
        import torch

        blocks, layers = self.blocks, self.layers
        with self.net.edit() as (_, edit):
            seen = []
            for i in range(layers):
                seen.append(blocks[i].output[0] + blocks[i].output[1])
            rows = torch.stack(seen).cpu().save()  # noqa: F841  it goes home by its name
        made = self._generate(edit, prompts, 1)
        return {"rows": np.stack([each.saves["rows"][:, ::SAMPLE].float().numpy() for each in made])}

    def sweep(self, clean: list[int], corrupt: list[int]) -> Arrays:
        net, blocks, embed, layers, asked = self.net, self.blocks, self.net.model.embed_tokens, self.layers, ONE_TOKEN
        every = self.every
        with net.trace(clean, **asked):
            streams = list().save()  # noqa: C408  a list of nnsight's
            streams.append(embed.output.cpu())
            for i in range(layers - 1):
                streams.append((blocks[i].output[0] + blocks[i].output[1]).cpu())
        with net.trace(**asked) as tracer:
            for layer in range(0, layers, every):
                for position in range(len(corrupt)):
                    row, before = streams[layer][position].clone(), blocks[layer - 1]
                    if layer:
                        with tracer.invoke(corrupt, **asked):
                            before.output[0][position] = row
                            before.output[1][position] = 0
                            cell = net.logits[0, [ANSWER, FOIL]].float().cpu().save()
                    else:
                        with tracer.invoke(corrupt, **asked):
                            embed.output[position] = row
                            cell = net.logits[0, [ANSWER, FOIL]].float().cpu().save()
        cells = np.stack(cell)  # what blocks save under one name comes back as a list, in their order
        return {"cells": (cells[:, 0] - cells[:, 1]).reshape(-1, len(corrupt))}

    def lens(self, prompts: list[list[int]]) -> Arrays:
        import torch

        net, blocks, layers = self.net, self.blocks, self.layers
        with self.net.edit() as (_, edit):
            seen = []
            for i in range(layers):
                seen.append(blocks[i].output[0][-1] + blocks[i].output[1][-1])
            logits = net.model.norm(torch.stack(seen)) @ net.lm_head.weight.T
            top = logits.topk(TOP).indices.cpu().save()  # noqa: F841
        made = self._generate(edit, prompts, 1)
        return {"top": np.stack([each.saves["top"].numpy() for each in made])}


SIDES: dict[str, type[Side]] = {
    "stock": Stock, "patchclamp": Patchclamp, "hooks": Hooks, "transformer_lens": TransformerLens,
    "nnsight_hf": NnsightHF, "nnsight": Nnsight, "vllm_lens": VllmLens,
}  # fmt: skip
JOBS = ("steer", "capture", "sweep", "lens", "lens_each")


def inputs(job: str, shape: str, number: int, part: int = 1) -> list[Any]:
    """The arguments of a job in a round, or of a part of its prompts."""
    size, draw = SIZES[shape][job], np.random.default_rng((JOBS.index(job), number))

    def ids(count: Any) -> list[Any]:
        return draw.integers(100, SHAPES[shape]["vocab_size"], count).tolist()

    if job != "sweep":
        return [ids(size)[: size[0] // part]]
    clean = ids(size)
    return [clean, [*ids(size // 2), *clean[size // 2 :]]]


def versions() -> dict[str, str]:
    """Of the packages that a side has imported, those that matter."""
    names = ("torch", "transformers", "vllm", "patchclamp", "transformer_lens", "nnsight", "vllm_lens")
    found = {name: sys.modules[name] for name in names if name in sys.modules}
    return {
        name: getattr(each, "__version__", None) or importlib.metadata.version(name) for name, each in found.items()
    }


def serve(name: str, model: str, shape: str) -> None:
    """A side: reads a job and a round from each line, and prints the seconds that it took."""
    side = SIDES[name](model, shape)
    print("RES", json.dumps({"versions": versions()}), flush=True)
    for line in sys.stdin:
        named, number, place = json.loads(line)
        job, _, part = named.partition("/")
        answer: dict[str, Any] = {}
        if hasattr(side, job):
            side.every = int(part or 1)
            asked = inputs(job, shape, number, side.every)
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
        self.name = name
        command = [python, __file__, "--serve", name, "--shape", shape, "--model", model]
        environ = {**os.environ, "VLLM_CACHE_ROOT": f"/tmp/peers-cache-{name}"}  # they compile at the same time
        environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if shape == "tiny" else {}
        environ |= {"VLLM_PLUGINS": ""} if name in ("stock", "nnsight") else {}
        # nnsight asks for the device before its engine starts; a forked engine could not use it after that
        environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} if name == "nnsight" else {}
        self._log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                         text=True, env=environ, start_new_session=True)  # fmt: skip

    def answer(self, limit: float) -> dict[str, Any]:
        """What it says next. Its process ends if that takes more seconds than the limit."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("RES "):
                    return json.loads(line[4:])
            return {"error": f"ended, or took longer than {limit:.0f} s; see {self._log.name}", "ended": True}
        finally:
            timer.cancel()

    def run(self, job: str, number: int, limit: float) -> tuple[dict[str, Any], Arrays]:
        assert self._process.stdin is not None
        place = Path(tempfile.gettempdir(), f"peers-{os.getpid()}-{self.name}.npz")
        self._process.stdin.write(json.dumps([job, number, str(place)]) + "\n")
        self._process.stdin.flush()
        answer, arrays = self.answer(limit), {}
        if place.exists():
            arrays = dict(np.load(place))
            place.unlink()
        return answer, arrays

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._kill()
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


def measure(sides: dict[str, Remote], job: str, rounds: int, limit: float) -> dict[str, Any]:
    """Every side in turn, after one call of each that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    apart: dict[str, float] = {}
    errors: dict[str, str] = {}
    once: set[str] = set()
    for number in range(rounds + 1):
        found: dict[str, Arrays] = {}
        for name in list(sides if number % 2 else reversed(sides)):
            if name in once or name in errors:
                continue
            answer, found[name] = sides[name].run(job, number, limit)
            if "error" in answer:
                errors[name] = answer["error"]
            if "ended" in answer:
                sides.pop(name).close()
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
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a call")
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
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "shape": args.shape, "sides": {}, "jobs": [],
                              "command": " ".join(["python benchmarks/peers.py", *sys.argv[1:]])}  # fmt: skip
    path = args.out / f"peers-{args.shape}-{result['date']}.json"
    own = dict.fromkeys(filter(None, args.sides.split(",")), sys.executable)
    pythons = own | dict(each.split("=", 1) for each in args.side)
    sides: dict[str, Remote] = {}
    try:
        for name, python in pythons.items():
            sides[name] = Remote(name, python, model, args.shape, args.out)
        for name in pythons:
            result["sides"][name] = sides[name].answer(START_S)
            if "ended" in result["sides"][name]:
                sides.pop(name).close()
        print(result["sides"], flush=True)
        for job in args.jobs.split(","):
            result["jobs"].append(measure(sides, job, args.rounds, args.limit))
            print({key: value for key, value in result["jobs"][-1].items() if key != "seconds"}, flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
