"""From a probe to an alert: fit a probe, let a server score every token of every request with it, and raise an alert
from the server's metrics.

    pip install 'patchclamp[vllm]'
    python examples/journey_monitor.py smollm2 work

Clients ask the server as they would ask any other. The probe reads layers that vLLM computes anyway, and cached
prefixes keep their scores. In production Prometheus scrapes the counter, and an alerting rule takes the place of
`alert`.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from moods import PLEASANT, UNPLEASANT

import patchclamp as pc

REQUESTS = {
    "calm": [
        "She thanked them for the lovely evening and the kind words.",
        "The garden is warm, and the children sing.",
    ],
    "angry": [
        "I hate you, you ruined my life with your disgusting lies.",
        "They screamed in pain as the house burned down.",
    ],
}


def fit(lm: pc.LM, folder: Path) -> tuple[str, float]:
    """Save the probe of the best layer. Returns its `--probe` option with a threshold, and its AUROC out of fold."""
    result = pc.studies.fit_probe(lm, prompts=PLEASANT + UNPLEASANT, labels=[0] * 12 + [1] * 12,
                                  tokens="prompt[1:]")  # fmt: skip
    print(result.summary)
    probe = result.probe(name="unpleasant", tokens="every", pool=None)
    probe.save(folder / "unpleasant.safetensors")
    return f"unpleasant={folder}/unpleasant.safetensors@{probe.at}>0.9", float(result.auroc.max())


@contextmanager
def serving(model: str, *options: str) -> Iterator[str]:
    """Start a server on a free port of this machine, and end it. Yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "patchclamp", "serve", model, "--host=127.0.0.1", f"--port={port}", *options]
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with status {process.returncode}")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def above(url: str) -> int:
    """The number of scores above the threshold so far."""
    counter = r'patchclamp:probe_above_total\{[^}]*probe="unpleasant"[^}]*\} ([\d.]+)'
    found = re.search(counter, httpx.get(f"{url}/metrics").text)
    return int(float(found[1])) if found else 0


def alert(url: str, prompts: list[str], limit: int = 3) -> tuple[bool, int]:
    """Ask for completions as any client does. True if more than `limit` tokens were above the threshold."""
    before = above(url)
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    count = above(url) - before
    return count > limit, count


def journey(model: str, folder: Path, *options: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    # 1. Fit a probe on prompts of two kinds; it must tell apart prompts that it was not fitted on
    with pc.LM(model, engine="transformers", dtype="float32") as lm:
        words, auroc = fit(lm, folder)
        name = lm.model.name

    # 2. Serve the model with the probe; 3. watch its counter while clients come
    found = {}
    with serving(name, f"--probe={words}", f"--probe-log={folder}/scores.jsonl", *options) as url:
        for kind, prompts in REQUESTS.items():
            found[kind] = alert(url, prompts)
            print(f"{kind}: {found[kind][1]} tokens above the threshold{', ALERT' if found[kind][0] else ''}")

    # 4. After an alert, look at the tokens that caused it
    files = sorted(folder.glob("scores-*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    for line in sorted(lines, key=lambda line: -line["unpleasant"][0])[:5]:
        print(f"{line['request']}, position {line['position']}, token {line['token']}: {line['unpleasant'][0]:.3f}")
    return {"auroc": auroc, "found": found, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    journey(args.model, args.folder)


if __name__ == "__main__":
    main()
