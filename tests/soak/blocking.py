"""How long `/health` of a server waits beside requests that are refused as too long: python -m tests.soak.blocking URL [KEY].

A request that blocked the event loop would make it wait.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

LONG = {  # by name: path, body
    "two million edits": ("/v1/completions", '{"prompt":"a","patchclamp":{"edits":[' + "{}," * 300_000 + "{}]}}"),
    "a long span": ("/v1/completions", '{"prompt":"a","patchclamp":{"edits":[{"type":"scale","factor":1,"at":"embed",'
                    '"tokens":"span(\\"' + "x" * 1_500_000 + '\\")"}]}}'),
    "many spans": ("/v1/completions", '{"prompt":"a","patchclamp":{"edits":[' + ",".join(
        ['{"type":"scale","factor":1,"at":"embed","tokens":"span(\\"' + "x" * 30_000 + '\\")"}'] * 60) + "]}}"),
    "many numbers": ("/v1/completions", '{"prompt":"a","patchclamp":{"edits":[{"type":"add","at":"embed","value":[' + "1," * 900_000
                     + "1]}]}}"),
    "many names": ("/v1/completions", '{"prompt":"a","patchclamp":{"' + "x" * 1_500_000 + '":1}}'),
    "a span in ids": ("/v1/completions", '{"prompt":[' + "100," * 1_999 + '100],"max_tokens":1,"patchclamp":{"edits":[{"type":"scale",'
                      '"factor":1,"at":"embed","tokens":"span(\\"no such text\\")"}]}}'),
    "many ranges": ("/v1/completions", '{"prompt":[' + "100," * 399 + '100],"max_tokens":1,"patchclamp":{"capture":[' + ",".join(
        ['{"type":"capture","at":"resid_post[0]","tokens":"prompt[::2]"}'] * 30) + "]}}"),
    "many runs": ("/v1/completions", '{"prompt":[' + "100," * 399 + '100],"max_tokens":1,"n":32,"patchclamp":{"capture":['
                  '{"type":"capture","at":"resid_post[0]","tokens":"prompt[::2]"}]}}'),
    "a kept program": ("/v1/patchclamp/programs/x", '{"edits":[' + "{}," * 300_000 + "{}]}"),
    "a kept vector": ("/v1/patchclamp/vectors/x", "[" + "1," * 400_000 + "1]"),
    "a sweep": ("/v1/patchclamp/studies/patch_sweep", '{"clean":[' + "1," * 400_000 + "1]}"),
}  # fmt: skip


def refusal(url: str, path: str, body: str, key: str = "") -> int:
    """The status of a request's refusal."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    method = "PUT" if path.endswith("/x") else "POST"
    return httpx.request(method, url + path, content=body, headers=headers, timeout=120).status_code


def main(url: str, key: str = "") -> None:
    with httpx.Client(base_url=url) as client, ThreadPoolExecutor(1) as pool:
        client.get("/health")
        for name, (path, body) in LONG.items():
            waits = []
            for _ in range(5):
                asked = pool.submit(refusal, url, path, body, key)
                while not asked.done():
                    began = time.monotonic()
                    client.get("/health").raise_for_status()
                    waits.append(time.monotonic() - began)
            print(f"{name:20} {asked.result()}  longest {max(waits):.3f} s, of {len(waits)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
