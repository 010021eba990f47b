"""How requests are run, in fp32 and bf16: programs beside one plain forward pass, and prompts after edited ones.

The model has SmolLM2's shape and random weights, its tokenizer is made of words.
"""

from __future__ import annotations

import copy
import os
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.board import note
from tests.gpu.engines import BASE, fresh
from tests.models import UNTIMED

VOCABULARY = 512
SPAN, BEGIN = " w71 w72", 3
SIZES = [1, 2, 4, 8, 16, 32, 64]  # of steps with graphs: chunks too, not only single tokens
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"num_gpu_blocks_override": 6, "max_model_len": 128, "max_num_seqs": 4},
    "cached": {"enable_prefix_caching": True},
}
# Attention in fp32 is Triton's, whose products are TF32 if nobody says otherwise; those of NVIDIA's libraries may be.
IEEE = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0"}


def parts() -> tuple[str, ...]:
    """Such as "parity float32, chunked" and "poison bfloat16"."""
    dtypes = ("bfloat16", "float32")
    return (
        *(f"parity {dtype}, {mode}" for mode in MODES for dtype in dtypes),
        *(f"poison {dtype}" for dtype in dtypes),
    )


def options_of(dtype: str, mode: str) -> dict[str, Any]:
    """Engine options of a mode: graphs, and blocks of 32 tokens."""
    from tests.reference.parity import BLOCK

    made = {**copy.deepcopy(BASE), "dtype": dtype, "block_size": BLOCK, "max_model_len": 512, **MODES[mode]}
    del made["skip_tokenizer_init"]
    sizes = [size for size in SIZES if size <= made["max_num_batched_tokens"]]
    made["compilation_config"]["cudagraph_capture_sizes"] = sizes
    return made


class Worst(NamedTuple):
    """What a batch of all programs came to."""

    wrong: dict[str, list[str]]
    far: dict[str, float]

    @property
    def told(self) -> str:
        far = ", ".join(f"{name} {gap:.2g}" for name, gap in self.far.items())
        failed = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in self.wrong.items())
        return f"worst: {far}" + (f". Failed: {failed}"[:600] if failed else "")


def parity(part: str, model: str, **changed: Any) -> None:
    """Every program in one batch, run as the part says, against the plain pass in fp32 on the CPU.

    `changed` engine options are for machines without a GPU.
    """
    import patchclamp as pc
    from tests.reference import parity as reference
    from tests.reference import same_run
    from tests.reference.hooks import PlainModel

    dtype, mode = part.removeprefix("parity ").split(", ")
    os.environ.update({**fresh("ours", part), **IEEE})
    plain, start = PlainModel(model), reference.BLOCK if mode == "cached" else 0
    text = " ".join(f"w{i}" for i in [17, 200, 33, 71, 72, *np.random.default_rng(1).integers(100, 500, 70).tolist()])
    with pc.LM(model, engine="vllm", prove=False, **{**options_of(dtype, mode), **changed}) as lm:
        status = lm.engine.status()
        _recorded(part, status)
        programs = reference.programs(lm.model.d_model, lm.model.layers, SPAN, BEGIN)
        edits = [reference.ops(acts, start) for acts in programs.values()]
        texts, bound = reference.prompts(lm, text, len(programs)), reference.TOLERANCES[dtype]
        for turn in ("cold", "warm") if mode == "cached" else ("",):
            runs = lm.run(texts, edits=edits, max_tokens=reference.NEW, sampling={"ignore_eos": True}, logprobs=True)
            found = _worst(dict(zip(programs, runs, strict=True)), programs, plain, bound, start)
            what = f"{len(programs)} programs as in the plain pass" + (f", {turn}" if turn else "")
            note(part, what, not found.wrong, found.told)
            if turn == "warm":
                cached = [run.cached_tokens for run in runs]
                note(part, "warm prompts have one block from the cache", set(cached) == {reference.BLOCK}, str(cached))
        if dtype == "float32":
            wrong, _ = same_run.run_all(lm, start, rounds=2 if mode == "cached" else 1)
            note(part, "rows of an earlier layer of the same run are written as they are", not wrong, str(wrong)[:600])
        if mode == "preempted":
            thrown = lm.engine.status()["preemptions"] - status["preemptions"]
            note(part, "requests were preempted", thrown > 0, str(thrown))


def _recorded(part: str, status: dict[str, Any]) -> None:
    """Notes whether an engine has the runner and the graphs that are to be checked."""
    graphs = status.get("active_graphs", 0)
    note(part, "starts", status["runner"] == "v2" and graphs > 0, f"runner {status['runner']}, {graphs} active sizes")


def _worst(runs: dict[str, Any], programs: dict[str, Any], plain: Any, bound: Any, start: int) -> Worst:
    from tests.reference import parity as reference

    wrong: dict[str, list[str]] = {}
    far: dict[str, float] = {}
    for name, run in runs.items():
        if run.error is not None:
            wrong[name] = [str(run.error)[:200]]
            continue
        passed = reference.expected(plain, programs[name], run.prompt_token_ids, run.token_ids)
        found = reference.compared(run, programs[name], passed, plain.layers, bound, start)
        far = {key: reference.worst(far.get(key, 0.0), gap) for key, gap in found.far.items()}
        if found.wrong:
            wrong[name] = found.wrong
    return Worst(wrong, far)


def poison(part: str, model: str, **changed: Any) -> None:
    """Prompts unedited after they were run edited, and in an engine that never saw an edit: the same bits.

    The processes compile into one folder, one after the other, so that the second finds what the first made. With stock
    numerics, steps without a program run code that is compiled without taps, which need not round as the code with taps does: requests
    without edits, too, capture what they generate, so that all that is compared was computed by the same code.
    """
    from tests.engines import poison as script

    dtype = part.removeprefix("poison ")
    options = {"dtype": dtype, "numerics": "stock", "enforce_eager": False, "gpu_memory_utilization": BASE["gpu_memory_utilization"],
               "compilation_config": {"inductor_compile_config": UNTIMED, "cudagraph_capture_sizes": SIZES[:-1]},
               **changed}  # fmt: skip
    environ, told = {**fresh("ours", part), **IEEE}, {}
    for kind in ("edited", "fresh"):
        told |= script.end(script.start(model, kind, {**options, "watched": True}, environ), 900.0)
    _recorded(part, told["status"])
    wrong = {name: found for name in script.KINDS if (found := script.reused(told, name))}
    listed = str(wrong or f"{len(script.KINDS)} kinds of edits")[:600]
    note(part, "6 unedited after edited is as never edited, bit for bit", not wrong, listed)
    again = script.again(told)
    note(part, "6 and edited again, from the cache, the same bits", not again, "; ".join(again)[:600])
    counted = script.counted(told)
    note(part, "6 blocks are shared up to the edit, and none above a capture", not counted, "; ".join(counted)[:600])
