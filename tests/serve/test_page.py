"""The page: one file that asks for nothing elsewhere, and, where a browser is at hand, what it shows."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from .conftest import Server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_it_is_one_small_file_that_asks_this_server_alone(server: Server):
    with server.http("no-key") as http:
        page = http.get("/patchclamp")
        routes = http.get("/openapi.json").json()["paths"]
    assert page.status_code == 200
    assert len(page.content) < 60_000
    assert "://" not in page.text
    asked = set(re.findall(r'ask\("(/[^"]*)"', page.text))
    assert asked >= {"/v1/patchclamp/sweeps", "/v1/completions", "/v1/models"}
    assert asked <= set(routes)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_it_says_what_it_needs(server: Server, tmp_path):
    """The server wants a key, and the page has none yet."""
    assert BROWSER is not None
    shown = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--virtual-time-budget=8000", "--dump-dom", f"{server.url}/patchclamp"],
        capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    said = re.search(r'id="sweep-said"[^>]*>([^<]*)<', shown)
    assert said is not None
    assert said[1] == "this server wants an API key: put it in above"
    assert shown.count("<option") == 6
