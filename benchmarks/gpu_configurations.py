"""What a step without programs costs beside what vLLM is configured for: adapters, fp8 weights, fp8 caches, drafts.

    python benchmarks/gpu_configurations.py --out DIR     (a CUDA machine; the shape of Qwen3-0.6B, random weights)
    python benchmarks/gpu_configurations.py --shape 8b --configurations "lora;fp8;ngram" --out DIR

With EAGLE the model is Llama 3's 8B, whatever `--shape` says, and the drafter has one layer of it; none of its drafts
is right. Each row says its shape.

Stock vLLM and ours, set up alike, in turns, as `gpu_speed.py` has them; a figure is the ratio of the medians of a step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_speed import decode
from benchmarks.side import PROMPT, Remote
from tests.gpu.board import source

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "lora": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}, "fp8": {"quantization": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "eagle": {},  # the drafter is made beside its model
}  # fmt: skip
BAR = 1.01
ROOM_BYTES = 8 << 30


def model_of(name: str, shape: str) -> tuple[str, dict[str, Any]]:
    """The model of a configuration, and its options."""
    from tests.models import shape_only

    if name != "eagle":
        return shape_only(Path(f"/tmp/shape-{shape}-None"), shape), CONFIGURATIONS[name]
    model, drafter = shape_only(Path("/tmp/shape-8b-None"), "8b"), Path("/tmp/shape-eagle-drafter")
    drafter.mkdir(exist_ok=True)
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (drafter / "config.json").write_text(json.dumps(config))
    return model, {"speculative_config": {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configurations", default=";".join(CONFIGURATIONS))
    parser.add_argument("--shape", choices=["0.6b", "8b"], default="0.6b")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    import torch
    import vllm

    from tests.models import UNTIMED

    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    batches = [int(batch) for batch in args.batches.split(",")]
    sizes = sorted({1, *batches, *(4 * batch for batch in batches), max(batches) + PROMPT})
    compilation = {"cudagraph_capture_sizes": sizes, "inductor_compile_config": UNTIMED}
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__,
        "torch": torch.__version__, "source": source(),
        "command": " ".join(["python", *sys.argv]), "bar": BAR, "rows": [],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"gpu_configurations-{args.shape}-{result['date']}.json"
    for name in args.configurations.split(";"):
        model, own = model_of(name, args.shape)
        options = {"compilation_config": compilation, **own}
        sides = [Remote(model, kind, ROOM_BYTES, **options) for kind in ("stock", "patchclamp")]
        for batch in batches:
            row: dict[str, Any] = {
                "configuration": name, "shape": "8b" if name == "eagle" else args.shape, "batch": batch,
            }  # fmt: skip
            try:
                row |= decode(*sides, batch, "idle", args.pairs)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            print({key: value for key, value in row.items() if not key.endswith("_blocks")}, flush=True)
            result["rows"].append(row)
            file.write_text(json.dumps(result, indent=1) + "\n")
        for side in sides:
            side.close()
    sys.exit(any("error" in row for row in result["rows"]))


if __name__ == "__main__":
    main()
