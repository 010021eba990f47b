"""How far an idle patchclamp engine is from stock vLLM under torch.compile in bf16, where a tap cuts a fusion.

    .venv/bin/python benchmarks/off_is_stock.py MODEL

Both run in processes of their own, the stock one without the plugin; the answer goes to benchmarks/results/.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "The capital of France is",
    "When John and Mary went to the store, John gave a drink to",
    "Water boils at a temperature of one hundred degrees, and it freezes at a temperature of",
    "The theory of relativity says that",
)
MAX_TOKENS = 16
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 28}


def run(script: str, model: str, plugin: bool) -> list:
    request = {"engines": [{"model": model, **OPTIONS}], "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not plugin:
        environment["VLLM_PLUGINS"] = ""
    command = [sys.executable, str(ROOT / "tests" / "engines" / script), json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (answer,) = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    model = sys.argv[1]
    stock = run("stock.py", model, plugin=False)
    ours = run("ours.py", model, plugin=True)
    same, largest = 0, 0.0
    for (tokens, logprobs), (other_tokens, other) in zip(stock, ours, strict=True):
        agree = next((i for i, (a, b) in enumerate(zip(tokens, other_tokens, strict=False)) if a != b), len(tokens))
        same += agree
        pairs = zip(logprobs[:agree], other[:agree], strict=True)
        largest = max([largest, *(abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs)])
    import vllm

    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/off_is_stock.py MODEL",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "vllm": vllm.__version__,
        "model": Path(model).name,
        "mode": "torch.compile, bfloat16, greedy, no program",
        "tokens_equal_before_first_difference": f"{same} of {sum(len(tokens) for tokens, _ in stock)}",
        "largest_logprob_difference": largest,
    }
    target = ROOT / "benchmarks" / "results" / f"off_is_stock-{result['date']}.json"
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(target.read_text())


if __name__ == "__main__":
    main()
