"""Every site of a family's real shape, few layers deep, on vLLM with CUDA graphs and torch.compile: proved on the live
model, and equal to Transformers on the same GPU.

The weights are random. Parts in fp32 are compared as `patchclamp parity` compares. Where vLLM's kernels have no fp32
(MLA, linear attention), and in parts that end with "bf16", rows and edits of vLLM are compared with Transformers in fp32:
their medians may be at most twice as far from it as those of Transformers in bf16. Medians, because rounding may change
which experts a token gets, on either engine. Parts marked `near` are models in which fp32 itself is further from float64
than parity's bound: if parity does not hold, they are judged in the same way, from Transformers in float64.

    python -m tests.gpu.check --out DIR --parts "sites mistral;sites phi3"
    python -m tools.native_models --gpu           # the table in docs/models.md, made from result files

T positions · W width of a site
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from tests.gpu.board import note, noted
from tests.gpu.engines import BASE, PROMPTS, fresh, started
from tests.gpu.modes import IEEE
from tests.models import SHAPES, with_weights

SIZES = [1, 2, 4, 8, 16, 32]
BF16 = "bfloat16"
FP32 = "float32"
# times Transformers' own distance in a part's dtype from the wider one, plus this for rows and edits for places where
# that is 0; in fp32 a tenth of parity's bounds
AS_NEAR, SLACK = 2.0, {BF16: (1e-3, 1e-3), FP32: (1e-5, 1e-4)}
EQUAL = "every site of every layer equals Transformers', and an edit at each moves the logits as there"
PROVED = "every site is proved, in every layer"


class Part(NamedTuple):
    """A shape of `tests.models.SHAPES`, and how it is served. vLLM 0.32 chooses the V2 runner for each.

    near: compare distances from float64 if the bounds of `patchclamp parity` do not hold in fp32
    """

    shape: str
    layers: int
    gpus: int = 1
    runner: str = "v2"
    dtype: str = FP32
    near: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


# FlashInfer's prefill of linear attention, vLLM's choice on Hopper, compiles its kernels when it is first called
LINEAR: dict[str, Any] = {"additional_config": {"gdn_prefill_backend": "triton"}}
# Transformers' state space makes a tensor of [C, C, heads, states] for each chunk of C tokens of each prompt: 1 GB
SCAN: dict[str, Any] = {"max_num_seqs": 8}
PARTS = {
    "sites llama": Part("8b", 4),
    "sites qwen3": Part("0.6b", 4),
    "sites gemma3": Part("gemma3", 4),
    "sites qwen3_moe": Part("qwen3_moe", 2, runner="v1"),
    "sites mistral": Part("mistral", 2),
    "sites phi3": Part("phi3", 2),
    # Gemma 4 does not scale q·k down, so that with random weights the softmax of heads of 512 amplifies rounding: on a
    # CPU, Transformers in fp32 was up to 1.3e-3 from float64 (gemma4_layered, attn_out[3]; median 3.6e-5). In gemma4_moe
    # the 8th and the 9th expert of some tokens are 3e-6 apart, as far as rounding moves a score; the other one changes
    # mlp_out by 0.35.
    "sites gemma4": Part("gemma4", 3, near=True),
    "sites gemma4_layered": Part("gemma4_layered", 4, near=True),
    "sites gemma4_moe": Part("gemma4_moe", 2, near=True),
    "sites gpt_oss": Part("gpt_oss", 2),
    "sites llama4": Part("llama4", 2),
    "sites glm4_moe": Part("glm4_moe", 2),
    "sites deepseek_v3": Part("deepseek_v3", 2, dtype=BF16),
    "sites qwen3_5": Part("qwen3_5", 3, dtype=BF16, options=LINEAR),
    "sites qwen3_5_moe": Part("qwen3_5_moe", 3, dtype=BF16, options=LINEAR),
    "sites qwen3_next": Part("qwen3_next", 3, dtype=BF16, options=LINEAR),
    "sites nemotron_h": Part("nemotron_h", 3, options=SCAN),
    "sites nemotron_h_experts": Part("nemotron_h_experts", 3, options=SCAN),
    "sites falcon_h1": Part("falcon_h1", 3, options=SCAN),
    # vLLM's choice for heads of 512 is written in CuTe, which the packed machine lacks
    "sites gemma4, bf16": Part("gemma4", 3, dtype=BF16, options={"attention_backend": "TRITON_ATTN"}),
    "sites gpt_oss, bf16": Part("gpt_oss", 2, dtype=BF16),
    "sites nemotron_h, bf16": Part("nemotron_h", 3, dtype=BF16, options=SCAN),
    "sites falcon_h1, bf16": Part("falcon_h1", 3, dtype=BF16, options=SCAN),
    "sites llama, tp2": Part("8b", 4, gpus=2),
    "sites qwen3_moe, tp2 ep": Part("qwen3_moe", 2, gpus=2, options={"enable_expert_parallel": True}),
}


def options_of(part: str) -> dict[str, Any]:
    """Engine options: graphs of a few sizes, and room for prompts longer than the shape's window."""
    _, _, gpus, _, dtype, _, more = PARTS[part]
    longest = max(map(len, prompts_of(part)))
    made = {**copy.deepcopy(BASE), "dtype": dtype, "tensor_parallel_size": gpus, **copy.deepcopy(more)}
    made["compilation_config"]["cudagraph_capture_sizes"] = SIZES
    return made | ({"max_model_len": 2048} if longest > 1000 else {})


def prompts_of(part: str) -> list[list[int]]:
    """The usual prompts, and one that is longer than the shape's window if none of them is."""
    window = SHAPES[PARTS[part].shape].get("sliding_window") or 0
    longer = [(11 * i * i + 5 * i) % 30000 + 100 for i in range(window + 32)]
    return PROMPTS if max(map(len, PROMPTS)) > window else [*PROMPTS, longer]


def _small_tiles(part: str) -> dict[str, str]:
    """What vLLM measured to be fast for experts in bf16 does not fit a GPU's shared memory in fp32: here is what does."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    shape, _, gpus, _, _, _, options = PARTS[part]
    sizes = SHAPES[shape]
    experts = next((sizes[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in sizes), 0)
    width = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    apart = "enable_expert_parallel" in options  # whole experts on each GPU, not a part of each
    experts, width = (experts // gpus, width) if apart else (experts, width // gpus)
    folder = Path(f"/tmp/small-tiles/{shape}-{gpus}")
    folder.mkdir(parents=True, exist_ok=True)
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_warps": 4,
            "num_stages": 2}  # fmt: skip
    (folder / get_config_file_name(experts, width, None)).write_text(json.dumps({"1": tile}))
    return {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}


@contextlib.contextmanager
def _short_tiles() -> Iterator[None]:
    """A context in which tiles of Triton's attention fit a GPU's shared memory in fp32 with heads of 512 numbers."""
    from vllm.v1.attention.ops import triton_unified_attention

    usual = triton_unified_attention._get_tile_size

    def tile(head_size: int, *rest: Any, **more: Any) -> int:
        return 16 if head_size > 256 else usual(head_size, *rest, **more)

    with mock.patch.object(triton_unified_attention, "_get_tile_size", tile):
        yield


@contextlib.contextmanager
def _small_scans() -> Iterator[None]:
    """A context in which Triton does not time tiles for the state space: in fp32 compiling them all takes minutes."""
    from vllm.model_executor.layers.mamba.ops import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing

    with contextlib.ExitStack() as stack:
        for module in (ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing):
            for kernel in vars(module).values():
                if isinstance(tiles := getattr(kernel, "configs", None), list):
                    smallest = min(tiles, key=lambda tile: math.prod(tile.kwargs.values()))
                    stack.enter_context(mock.patch.object(kernel, "configs", [smallest]))
        yield


@contextlib.contextmanager
def _unclamped() -> Iterator[None]:
    """A context in which Transformers' Nemotron-H limits time steps by `time_step_limit`, here (0, ∞), as vLLM does.

    Transformers 5.19 raises them to `time_step_min` in the scan (huggingface/transformers#48989), not in decode steps:
    on a CPU that alone moved rows by up to 8e-3; without it, vLLM was within 5e-6.
    """
    from transformers.models.nemotron_h import modeling_nemotron_h

    usual = modeling_nemotron_h.mamba2_chunk_scan

    def scan(*given: Any, dt_limit: tuple[float, float], **more: Any) -> Any:
        return usual(*given, **more)

    with mock.patch.object(modeling_nemotron_h, "mamba2_chunk_scan", scan):
        yield


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """A context in which Transformers computes in float64, also where a model's code asks for fp32: without that, a
    float64 model is as far from the exact result as fp32 is. Its fused experts have no float64."""
    import torch
    from torch.overrides import TorchFunctionMode

    from patchclamp.engines import transformers

    class Wide(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            widened = [torch.float64 if value is torch.float32 else value for value in args]
            named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
            return (torch.Tensor.double if function is torch.Tensor.float else function)(*widened, **named)

    usual = transformers.load_net

    def load(name: str, dtype: Any, trust_remote_code: bool = False) -> Any:
        net = usual(name, torch.float64, trust_remote_code)
        net.set_experts_implementation("eager")
        narrow = net.forward

        @functools.wraps(narrow)
        def forward(*args: Any, **more: Any) -> Any:
            with Wide():
                return narrow(*args, **more)

        net.forward = forward
        return net

    with mock.patch.object(transformers, "load_net", load):
        yield


def sites(part: str, smaller: dict[str, Any] | None = None, **changed: Any) -> None:
    """`smaller` sizes of the model, and `changed` engine options, are for machines without a GPU."""
    import patchclamp as pc
    from patchclamp.proving import prove

    shape, layers, _, runner, dtype, _, _ = PARTS[part]
    os.environ.update({**fresh("ours", part), **IEEE})
    if runner == "v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if dtype == FP32:
        os.environ.update(_small_tiles(part))
    folder, options = Path(f"/tmp/model-{part.replace(', ', '-').replace(' ', '-')}"), {**options_of(part), **changed}
    try:
        model = with_weights(folder, shape, layers, **(smaller or {}))
        with contextlib.ExitStack() as stack:
            if dtype == FP32:
                stack.enter_context(_short_tiles())
            if PARTS[part].options == SCAN:
                stack.enter_context(_small_scans())
            if shape.startswith("nemotron_h"):
                stack.enter_context(_unclamped())
            with noted(part, PROVED), pc.LM(model, engine="vllm", prove=False, **options) as lm:
                started(part, lm, runner)
                wrong = {proof.name: proof.note for proof in prove(lm, full=True) if not proof.holds}
                what = f"{lm.model.family}, {len(lm.sites.names)} sites, {lm.model.layers} layers. "
                note(part, PROVED, not wrong, what + json.dumps(wrong)[:600])
            with noted(part, EQUAL):
                note(part, EQUAL, *_compare(part, model, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # all of them together do not fit a small disk


def _compare(part: str, model: str, options: dict[str, Any]) -> tuple[bool, str]:
    """Run both engines as `patchclamp parity` does, and Transformers in a wider dtype if that decides."""
    from patchclamp.studies.parity import BOUNDS, ENGINES, _compared, _observe, given

    dtype, prompts = PARTS[part].dtype, list[Any](prompts_of(part))
    theirs, ours = given(options, ENGINES)
    plain = _observe(model, ENGINES[0], theirs, prompts, 4, None)
    found = _observe(model, ENGINES[1], ours, prompts, 4, plain.edits)
    direct = _compared(model, found, plain, BOUNDS[dtype])
    rows, edits = max(direct.gaps.values()), max(site.edit for site in direct.sites)
    told = (
        f"{len(direct.sites)} sites, {len(direct.gaps)} places, {direct.positions} positions, {direct.equal_tokens[0]} of "
        f"{direct.equal_tokens[1]} tokens alike: rows {rows:.2g}, edits {edits:.2g}, log-probabilities {direct.logprobs:.2g} "
        "apart"
    )
    if dtype == FP32 and (direct.holds or not PARTS[part].near):
        apart = _apart(found.kept, plain.kept)
        each = [] if direct.holds else [f"{place} {np.median(far):.2g}, worst {far.max():.2g}"
                                        for place, far in apart.items()]  # fmt: skip
        return direct.holds, "; ".join([told, *direct.problems, *each])
    print(f"     {part} in {dtype}: {told}", flush=True)  # in case there is no time for the rest
    with _in_float64() if dtype == FP32 else contextlib.nullcontext():
        exact = _observe(model, ENGINES[0], {**theirs, "dtype": FP32}, prompts, 4, plain.edits)
    return _near(model, found, plain, exact, dtype)


def _near(model: str, found: Any, plain: Any, exact: Any, dtype: str) -> tuple[bool, str]:
    """True if vLLM is about as near the exact results as Transformers in the same dtype is."""
    from patchclamp.studies.parity import BOUNDS, _compared

    ours, theirs = (_compared(model, seen, exact, BOUNDS[dtype]) for seen in (found, plain))
    apart, plain_apart = (_apart(seen.kept, exact.kept) for seen in (found, plain))
    rows, plain_rows = ({place: float(np.median(far)) for place, far in each.items()} for each in (apart, plain_apart))
    over, plain_over = (sum(int((far > BOUNDS[dtype].rows).sum()) for far in each.values())
                        for each in (apart, plain_apart))  # fmt: skip
    far = [f"{place} {gap:.2g} ({plain_rows[place]:.2g})" for place, gap in rows.items()
           if not gap <= AS_NEAR * plain_rows[place] + SLACK[dtype][0]]  # fmt: skip
    edit, plain_edit = (float(np.median([site.edit for site in each.sites])) for each in (ours, theirs))
    still = [site.name for site in ours.sites if not (site.moved > 0 and site.here > 0)]
    at, plain_at = (max(each.gaps, key=each.gaps.__getitem__) for each in (ours, theirs))
    told = (
        f"{len(ours.sites)} sites, {len(rows)} places, {ours.positions} positions, {ours.equal_tokens[0]} of "
        f"{ours.equal_tokens[1]} tokens alike: rows {max(rows.values()):.2g}, edits {edit:.2g}, log-probabilities "
        f"{ours.logprobs:.2g} apart (medians, from Transformers in {'fp32' if dtype == BF16 else 'float64'}; "
        f"Transformers in {'bf16' if dtype == BF16 else 'fp32'}: rows {max(plain_rows.values()):.2g}, edits "
        f"{plain_edit:.2g}; worst rows {ours.gaps[at]:.2g} at {at} and {theirs.gaps[plain_at]:.2g} at {plain_at}; rows "
        f"beyond {BOUNDS[dtype].rows:g}: {over} and {plain_over} of {sum(map(len, apart.values()))})"
    )
    problems = [f"further than Transformers: {', '.join(far)}"] if far else []
    problems += [f"edits that move nothing: {', '.join(still)}"] if still else []
    problems += [f"sites of one engine: {', '.join(ours.only)}"] if ours.only else []
    problems += [] if edit <= AS_NEAR * plain_edit + SLACK[dtype][1] else ["edits move the logits otherwise"]
    several = over > AS_NEAR * plain_over + sum(map(len, apart.values())) / 100
    problems += ["more rows are beyond the bound than Transformers'"] if several else []
    if dtype == FP32 and ours.logprobs > AS_NEAR * theirs.logprobs + SLACK[dtype][1]:
        problems.append("log-probabilities are further apart")
    return not problems, "; ".join([told, *problems])


def _apart(ours: list[Any], exact: list[Any]) -> dict[str, np.ndarray]:
    """‖a − b‖ / ‖b‖ of the rows of each place, of all prompts at positions with the same tokens."""
    apart: dict[str, list[np.ndarray]] = {}
    for a, b in zip(ours, exact, strict=True):
        for place in a.rows.keys() & b.rows.keys():
            same = 1 if place == "logits" else len(b.prompt)
            a_TW, b_TW = a.rows[place][:same], b.rows[place][:same]
            apart.setdefault(place, []).append(np.linalg.norm(a_TW - b_TW, axis=1) / np.linalg.norm(b_TW, axis=1))
    return {place: np.concatenate(far_T) for place, far_T in sorted(apart.items())}
