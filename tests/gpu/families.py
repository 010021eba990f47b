"""Every site of a family's real shape, few layers deep, against Transformers on the same GPU: graphs, fp32.

The weights are random. What is compared, and how near it must be, is `patchclamp parity`'s.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from tests.gpu.board import note
from tests.gpu.engines import BASE, PROMPTS, fresh
from tests.gpu.modes import IEEE
from tests.models import SHAPES, with_weights

SIZES = [1, 2, 4, 8, 16, 32]
# by part: a shape, how many of its layers, GPUs, and the runner that vLLM serves it with
PARTS = {
    "sites llama": ("8b", 4, 1, "v2"),
    "sites qwen3": ("0.6b", 4, 1, "v2"),
    "sites gemma3": ("gemma3", 4, 1, "v2"),
    "sites qwen3_moe": ("qwen3_moe", 2, 1, "v1"),
    "sites llama, tp2": ("8b", 4, 2, "v2"),
}


def options_of(part: str) -> dict[str, Any]:
    made = {**copy.deepcopy(BASE), "tensor_parallel_size": PARTS[part][2]}
    made["compilation_config"]["cudagraph_capture_sizes"] = SIZES
    return made


def _small_tiles(shape: str) -> dict[str, str]:
    """What vLLM measured to be fast for experts in bf16 does not fit a GPU's shared memory in fp32: here is what does."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    folder = Path("/tmp/small-tiles")
    folder.mkdir(exist_ok=True)
    sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_warps": 4,
             "num_stages": 2}  # fmt: skip
    name = get_config_file_name(SHAPES[shape]["num_experts"], SHAPES[shape]["moe_intermediate_size"], None)
    (folder / name).write_text(json.dumps({"1": sizes}))
    return {"VLLM_TUNED_CONFIG_FOLDER": str(folder)}


def sites(part: str, **changed: Any) -> None:
    """`changed` engine options are for machines without a GPU."""
    from patchclamp.studies import parity

    shape, layers, _, runner = PARTS[part]
    os.environ.update({**fresh("ours", part), **IEEE, "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"})
    if "num_experts" in SHAPES[shape]:
        os.environ.update(_small_tiles(shape))
    model = with_weights(Path(f"/tmp/model-{part.replace(', ', '-').replace(' ', '-')}"), shape, layers)
    found = parity(model, dtype="float32", prompts=PROMPTS, **{**options_of(part), **changed})
    rows = max(found.gaps.values())
    edits = max(site.edit for site in found.sites)
    told = (
        f"{len(found.sites)} sites, {len(found.gaps)} places, {found.positions} positions, {found.alike[0]} of "
        f"{found.alike[1]} tokens alike: rows {rows:.2g}, edits {edits:.2g}, log-probabilities {found.logprobs:.2g} apart"
    )
    what = "every site of every layer equals Transformers', and an edit at each moves the logits as there"
    note(part, what, found.holds, "; ".join([told, *found.problems])[:600])
