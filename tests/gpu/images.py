"""Prompts with images: tiny models in fp32, with graphs, against plain hooks on Transformers (on the CPU).

Gemma 3's image tokens attend to one another in both directions: an edit at the last of them changes the first.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.gpu.board import note
from tests.gpu.engines import BASE, fresh
from tests.gpu.modes import IEEE

# by part: the model's name among the tiny ones, and Transformers' class
PARTS = {
    "images gemma3": ("gemma3", "Gemma3ForConditionalGeneration"),
    "v1 images gemma3": ("gemma3", "Gemma3ForConditionalGeneration"),
    "images qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
}
MARKS = {"gemma3": ["<start_of_image>"], "qwen3_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]}
SIDE = {"gemma3": 28, "qwen3_vl": 128}  # of an image, in pixels
WORDS = 28  # before the image, which so lies in the first two blocks of 32
LAYER, NEAR = 1, 1e-3


def images(part: str, ahead: bool = True, **changed: Any) -> None:
    """`ahead=False`, and `changed` engine options, are for machines without a GPU."""
    import patchclamp as pc

    name, kind = PARTS[part]
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if part.startswith("v1 ") else {}
    os.environ.update({**fresh("ours", part), **IEEE, **runner})
    folder = Path(f"/tmp/model-{part.replace(' ', '-')}")
    options = {**copy.deepcopy(BASE), "dtype": "float32", "max_model_len": 256, "enable_prefix_caching": True,
               "block_size": 32, "skip_mm_profiling": True}  # fmt: skip
    del options["skip_tokenizer_init"]
    with _processor(folder, name), pc.LM(str(folder), engine="vllm", **{**options, **changed}) as lm:
        _check(part, lm, _reader(folder, name, kind, ahead and name == "gemma3"))


def _processor(folder: Path, name: str) -> Any:
    """Makes a model, and has vLLM find its processor."""
    import contextlib

    from tests.models import that_reads_images, with_gemma_processor, with_qwen_processor

    folder.mkdir(exist_ok=True)
    that_reads_images(folder, name)
    if name == "gemma3":
        with_gemma_processor(folder)
        return contextlib.nullcontext()
    from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo

    made = with_qwen_processor(folder, name)
    found = {"get_hf_processor": lambda *_, **__: made, "get_video_processor": lambda *_, **__: made.video_processor}
    return mock.patch.multiple(Qwen3VLProcessingInfo, **found)


def _reader(folder: Path, name: str, kind: str, ahead: bool) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from tests.models import gemma_pictures
    from tests.reference.images import PlainReader

    pictures = gemma_pictures() if name == "gemma3" else Qwen2VLImageProcessorPil.from_pretrained(folder)
    return PlainReader(folder, kind, pictures, sees_ahead=ahead)


def _check(part: str, lm: Any, plain: Any) -> None:
    """The edited run comes first, so that what it left in the prefix cache is there for the others."""
    import torch

    import patchclamp as pc

    name, push = PARTS[part][0], np.linspace(-3, 3, lm.model.d_model, dtype=np.float32)
    edits = [pc.Add(push, at=pc.resid_pre[LAYER], tokens="image[0][-1] | prompt[-1]")]
    given, shown = _prompt(name, 1)
    cached = [lm.run(given, max_tokens=1, logprobs=5, edits=program) for program in (edits, [], edits)]
    captured = [lm.run(given, max_tokens=1, capture=[pc.resid_pre], edits=program) for program in ([], edits)]
    ids, [image] = cached[0].prompt_token_ids, cached[0].images

    def added(h_TD: torch.Tensor) -> torch.Tensor:
        h_TD[[image[-1], len(ids) - 1]] += torch.tensor(push)
        return h_TD

    unedited, edited = (plain.forward(ids, [shown], changes) for changes in ({}, {LAYER: added}))
    straddles, status = image[0] < 32 <= image[-1], lm.engine.status()
    note(part, "starts", straddles, f"runner {status['runner']}, image at {image[0]} to {image[-1]}")
    for what, run, expected in (("captures", captured[0], unedited), ("edited captures", captured[1], edited)):
        gaps = [_worst(run[pc.resid_pre[i]], expected.rows_TD["resid_pre", i]) for i in range(lm.model.layers)]
        note(part, f"{what} are what plain hooks see", max(gaps) <= NEAR, f"rows {max(gaps):.2g} apart")
    moved = _worst(captured[1][pc.resid_pre[LAYER + 1]][image[:1]], captured[0][pc.resid_pre[LAYER + 1]][image[:1]])
    note(part, "the first of its tokens sees the edit of the last", (moved > NEAR) == plain.sees_ahead, f"{moved:.2g}")
    likely = [max(abs(x - expected.logprobs_TV[-1, token].item()) for token, x in run.top_logprobs[0].items())
              for run, expected in zip(cached, (edited, unedited, edited), strict=True)]  # fmt: skip
    told = f"log-probabilities {max(likely):.2g} apart, cached {[run.cached_tokens for run in cached]}"
    note(
        part,
        "no cached block reaches other edits, and its own do",
        max(likely) <= NEAR and cached[2].cached_tokens,
        told,
    )


def _prompt(name: str, seed: int) -> tuple[dict[str, Any], Any]:
    from PIL import Image

    pixels = np.random.RandomState(seed).randint(0, 255, (SIDE[name], SIDE[name], 3), dtype=np.uint8)
    words, shown = [f"w{20 + i}" for i in range(WORDS + 12)], Image.fromarray(pixels)
    text = " ".join([*words[:WORDS], *MARKS[name], *words[WORDS:]])
    return {"prompt": text, "multi_modal_data": {"image": shown}}, shown


def _worst(ours: Any, theirs: Any) -> float:
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())
