"""What the server's page shows runs: its Python blocks, in order, against the server."""

from __future__ import annotations

import re
from pathlib import Path

from .conftest import KEYS, Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"


def test_every_example_runs(server: Server):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) > 7
    names: dict = {}
    for block in blocks:
        code = (
            block.replace("http://localhost:8000", server.url)
            .replace('0.3, "fuzz_seed', '3.0, "fuzz_seed')
            .replace('"one-key"', repr(KEYS[0]))
        )
        exec(compile(code, str(PAGE), "exec"), names)
    try:
        assert names["ours"]["fingerprint"]
        assert names["fuzzed"].choices[0].text != names["answer"].choices[0].text
        assert names["captured"]["resid_post[5]"].shape == names["run"]["resid_post[5]"].shape
        assert names["calm"].model == f"{server.model}:calmer"
        assert names["patched"].choices[0].text
        assert names["sweep"].grid.size > 20
        assert names["lines"][0] == "event: start"
        assert names["lines"][-1] == "event: result"
    finally:
        names["lm"].close()
        for path in ("vectors/calm", "programs/calmer", "runs/eiffel"):
            assert names["http"].delete(f"/v1/patchclamp/{path}").status_code == 200
