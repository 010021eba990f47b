"""Every site of a family's real shape, few layers deep, on vLLM with CUDA graphs and torch.compile: proved on the live
model, and equal to Transformers on the same GPU.

The weights are random. Parts in fp32 are compared as `patchclamp parity` compares. Where vLLM's kernels have no fp32
(MLA, linear attention), and in parts that end with "bf16", rows and edits of vLLM are compared with Transformers in fp32:
their medians may be at most twice as far from it as those of Transformers in bf16. Medians, because rounding may change
which experts a token gets, on either engine.

    python -m tests.gpu.check --out DIR --parts "sites mistral;sites phi3"
    python -m tools.native_models --gpu           # the table in docs/models.md, made from result files

T positions · W width of a site
"""

from __future__ import annotations

import contextlib
import copy
import json
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
# times Transformers' own distance in bf16 from fp32, plus this for places where that is 0
AS_NEAR, SLACK = 2.0, 1e-3
EQUAL = "every site of every layer equals Transformers', and an edit at each moves the logits as there"
PROVED = "every site is proved, in every layer"


class Part(NamedTuple):
    """A shape of `tests.models.SHAPES`, and how it is served. vLLM 0.32 chooses the V2 runner for each."""

    shape: str
    layers: int
    gpus: int = 1
    runner: str = "v2"
    dtype: str = "float32"
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
    "sites gemma4": Part("gemma4", 3),
    "sites gemma4_layered": Part("gemma4_layered", 4),
    "sites gemma4_moe": Part("gemma4_moe", 2),
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
    "sites gemma4, bf16": Part("gemma4", 3, dtype=BF16),
    "sites gpt_oss, bf16": Part("gpt_oss", 2, dtype=BF16),
    "sites nemotron_h, bf16": Part("nemotron_h", 3, dtype=BF16, options=SCAN),
    "sites falcon_h1, bf16": Part("falcon_h1", 3, dtype=BF16, options=SCAN),
    "sites llama, tp2": Part("8b", 4, gpus=2),
    "sites qwen3_moe, tp2 ep": Part("qwen3_moe", 2, gpus=2, options={"enable_expert_parallel": True}),
}


def options_of(part: str) -> dict[str, Any]:
    """Engine options: graphs of a few sizes, and room for prompts longer than the shape's window."""
    _, _, gpus, _, dtype, more = PARTS[part]
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

    shape, _, gpus, _, _, options = PARTS[part]
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


def sites(part: str, smaller: dict[str, Any] | None = None, **changed: Any) -> None:
    """`smaller` sizes of the model, and `changed` engine options, are for machines without a GPU."""
    import patchclamp as pc
    from patchclamp.proving import prove

    shape, layers, _, runner, dtype, _ = PARTS[part]
    os.environ.update({**fresh("ours", part), **IEEE})
    if runner == "v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if dtype == "float32":
        os.environ.update(_small_tiles(part))
    folder, options = Path(f"/tmp/model-{part.replace(', ', '-').replace(' ', '-')}"), {**options_of(part), **changed}
    try:
        model = with_weights(folder, shape, layers, **(smaller or {}))
        with contextlib.nullcontext() if dtype == BF16 else _short_tiles():
            with noted(part, PROVED), pc.LM(model, engine="vllm", prove=False, **options) as lm:
                started(part, lm, runner)
                wrong = {proof.name: proof.note for proof in prove(lm, full=True) if not proof.holds}
                what = f"{lm.model.family}, {len(lm.sites.names)} sites, {lm.model.layers} layers. "
                note(part, PROVED, not wrong, what + json.dumps(wrong)[:600])
            with noted(part, EQUAL):
                compared = _near if dtype == BF16 else _equal
                note(part, EQUAL, *compared(model, prompts_of(part), options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # all of them together do not fit a small disk


def _equal(model: str, prompts: list[Any], options: dict[str, Any]) -> tuple[bool, str]:
    """The verdict of `patchclamp parity`, and its numbers."""
    from patchclamp.studies import parity

    found = parity(model, prompts=prompts, **options)
    rows, edits = max(found.gaps.values()), max(site.edit for site in found.sites)
    told = (
        f"{len(found.sites)} sites, {len(found.gaps)} places, {found.positions} positions, {found.alike[0]} of "
        f"{found.alike[1]} tokens alike: rows {rows:.2g}, edits {edits:.2g}, log-probabilities {found.logprobs:.2g} apart"
    )
    return found.holds, "; ".join([told, *found.problems])[:600]


def _near(model: str, prompts: list[Any], options: dict[str, Any]) -> tuple[bool, str]:
    """True if vLLM in bf16 is about as near Transformers in fp32 as Transformers in bf16 is."""
    from patchclamp.studies.parity import BOUNDS, ENGINES, _compared, _observe, given

    theirs, ours = given(options, ENGINES)
    exact = _observe(model, "transformers", {**theirs, "dtype": "float32"}, prompts, 4, None)
    seen = [_observe(model, engine, chosen, prompts, 4, exact.edits)
            for engine, chosen in zip(ENGINES, (theirs, ours), strict=True)]  # fmt: skip
    plain, found = (_compared(model, each, exact, BOUNDS[BF16]) for each in seen)
    plain_rows, rows = (_medians(each.kept, exact.kept) for each in seen)
    far = [f"{place} {gap:.2g} ({plain_rows[place]:.2g})" for place, gap in rows.items()
           if not gap <= AS_NEAR * plain_rows[place] + SLACK]  # fmt: skip
    plain_edit, edit = (float(np.median([site.edit for site in each.sites])) for each in (plain, found))
    still = [site.name for site in found.sites if not (site.moved > 0 and site.here > 0)]
    worst, plain_worst = (max(each.gaps.values()) for each in (found, plain))
    told = (
        f"{len(found.sites)} sites, {len(rows)} places, {found.positions} positions, {found.alike[0]} of "
        f"{found.alike[1]} tokens alike: rows {max(rows.values()):.2g}, edits {edit:.2g}, log-probabilities "
        f"{found.logprobs:.2g} apart (medians, from Transformers in fp32; Transformers in bf16: rows "
        f"{max(plain_rows.values()):.2g}, edits {plain_edit:.2g}; worst rows {worst:.2g} and {plain_worst:.2g})"
    )
    problems = [f"further than Transformers: {', '.join(far)}"] if far else []
    problems += [f"edits that move nothing: {', '.join(still)}"] if still else []
    problems += [f"sites of one engine: {', '.join(found.only)}"] if found.only else []
    problems += [] if edit <= AS_NEAR * plain_edit + SLACK else ["edits move the logits otherwise"]
    return not problems, "; ".join([told, *problems])[:600]


def _medians(ours: list[Any], exact: list[Any]) -> dict[str, float]:
    """The median of ‖a − b‖ / ‖b‖ over the rows of a place, of all prompts at positions with the same tokens."""
    apart: dict[str, list[np.ndarray]] = {}
    for a, b in zip(ours, exact, strict=True):
        for place in a.rows.keys() & b.rows.keys():
            same = 1 if place == "logits" else len(b.prompt)
            a_TW, b_TW = a.rows[place][:same], b.rows[place][:same]
            apart.setdefault(place, []).append(np.linalg.norm(a_TW - b_TW, axis=1) / np.linalg.norm(b_TW, axis=1))
    return {place: float(np.median(np.concatenate(gaps))) for place, gaps in sorted(apart.items())}
