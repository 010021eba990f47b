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

OURS = """
import json, sys
import patchclamp as pc
asked = json.loads(sys.argv[1])
lm = pc.LM(asked["model"], engine="vllm", prove=False, **asked["options"])
runs = lm.run(list(asked["prompts"]), max_tokens=asked["max_tokens"])
print(json.dumps([[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs]))
"""


def run(code: list[str], model: str, plugin: bool) -> list:
    asked = json.dumps({"model": model, "options": OPTIONS, "prompts": PROMPTS, "max_tokens": MAX_TOKENS})
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not plugin:
        environment["VLLM_PLUGINS"] = ""
    made = subprocess.run([sys.executable, *code, asked], env=environment, capture_output=True, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    model = sys.argv[1]
    stock = run([str(ROOT / "tests" / "engines" / "stock.py")], model, plugin=False)
    ours = run(["-c", OURS], model, plugin=True)
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
