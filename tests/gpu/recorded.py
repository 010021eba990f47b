"""Each way in which vLLM records graphs, of tiny models with and without state-space layers: all sites are proved at start,
and what is captured while tokens are generated is what one prefill of them has.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from tests.gpu.board import note
from tests.gpu.engines import BASE, TOKENS, apart, fresh
from tests.gpu.modes import IEEE

# by part: the family, its dtype, and how near rows must be, of their largest number; state that is carried from token to
# token is summed in another order than over a whole prompt
PARTS = {
    "recorded llama": ("llama", "float32", 1e-4),
    "v1 recorded llama": ("llama", "float32", 1e-4),
    "recorded falcon_h1": ("falcon_h1", "float32", 1e-3),
    "recorded qwen3_next": ("qwen3_next", "bfloat16", 0.05),
}
MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL")
SIZES = [1, 2, 4, 8, 16, 64]
PROMPTS = [[(7 * i * i + 13 * i + n) % 500 + 3 for i in range(n)] for n in (5, 33, 90, 17)]  # of 512 token ids


def recorded(part: str, modes: tuple[str, ...] = MODES, **changed: Any) -> None:
    """`changed` engine options are for machines without a GPU."""
    from tests.models import of_family

    family, dtype, near = PARTS[part]
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if part.startswith("v1 ") else {}
    os.environ.update({**fresh("ours", part), **IEEE, **runner})
    folder = Path(f"/tmp/model-{part.replace(' ', '-')}")
    folder.mkdir(exist_ok=True)
    model = of_family(folder, family)
    for mode in modes:
        options = {**copy.deepcopy(BASE), "dtype": dtype, "max_model_len": 256, **changed}
        if family == "qwen3_next":  # vLLM's default on Hopper is FlashInfer, which a bare machine lacks
            options["gdn_prefill_backend"] = "triton"
        options["compilation_config"] |= {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
        try:
            _check(part, mode, model, options, near)
        except Exception as error:
            note(part, f"{mode} ran to its end", False, f"{type(error).__name__}: {error}"[:400])


def _check(part: str, mode: str, model: str, options: dict[str, Any], near: float) -> None:
    import patchclamp as pc

    with pc.LM(model, engine="vllm", **options) as lm:
        status = lm.engine.status()
        graphs = status.get("active_graphs", 0)
        lost = lm.sites.withdrawn
        told = f"{graphs} active sizes, {len(lm.sites.names)} sites, withdrawn {lost or 'none'}"
        note(part, f"{mode}: starts with graphs, every site proved", graphs > 0 and not lost, told[:400])
        every = [pc.Site(name) for name in lm.sites.names]
        edits = [pc.Add([0.5] * lm.model.d_model, pc.resid_post[0])]
        asked: dict[str, Any] = {"capture": every, "edits": edits}
        runs = lm.run(PROMPTS, max_tokens=TOKENS, sampling={"ignore_eos": True}, logprobs=True, **asked)
        fed = lm.run([p + run.token_ids[:-1] for p, run in zip(PROMPTS, runs, strict=True)], max_tokens=1, **asked)
        places = [str(ref) for ref in lm.sites.refs() if ref.name != "logits"]
        far = max(apart(a[place], b[place]) for a, b in zip(runs, fed, strict=True) for place in places)
        note(part, f"{mode}: captures of generated tokens agree with one prefill", far <= near, f"{far:.2g} apart")
        plain = lm.run(PROMPTS, max_tokens=TOKENS, sampling={"ignore_eos": True}, logprobs=True)
        moved = sum(a.logprobs != b.logprobs for a, b in zip(runs, plain, strict=True))
        note(part, f"{mode}: the edit acts", moved == len(PROMPTS), f"{moved} of {len(PROMPTS)}")
