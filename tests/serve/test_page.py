"""The page: one file that asks for nothing elsewhere, and, where a browser is at hand, what it shows."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from .conftest import KEYS, Server, becomes

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_it_is_one_small_file_that_asks_this_server_alone(server: Server):
    with server.http("no-key") as http:
        page = http.get("/patchclamp")
        routes = http.get("/openapi.json").json()["paths"]
        assert http.get("/", follow_redirects=True).text == page.text
    assert page.status_code == 200
    assert len(page.content) < 60_000
    assert "://" not in page.text
    asked = set(re.findall(r'ask\("(/[^"]*)"', page.text))
    assert asked >= {"/v1/patchclamp/studies/patch_sweep", "/v1/completions", "/v1/models"}
    assert {re.sub(r"(?<=studies/)\w+", "{name}", route) for route in asked} <= set(routes)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_what_a_reader_does_in_a_browser(server: Server, tmp_path):
    with browser(tmp_path, f"{server.url}/patchclamp") as page:
        assert page.becomes(text("sweep-said"), "this server requires an API key: enter it above")
        page.run(f"key.value = {json.dumps(KEYS[0])}; key.dispatchEvent(new Event('change'))")
        assert page.becomes("document.getElementById('model').textContent.includes('layers of')", True)
        page.run("document.querySelector('#sweep [name=sites]').value = 'resid_pre, mlp_out'")
        page.run("document.querySelector('#sweep button').click()")
        assert page.becomes(f"{text('sweep-said')}.includes('strongest')", True)
        cells = page.run("document.querySelectorAll('td.cell').length")
        shades = page.run("new Set([...document.querySelectorAll('td.cell')].map(c => c.style.background)).size")
        assert page.run(text("sweep-said")).startswith(f"{cells} cells")
        assert shades > 2
        page.run("document.querySelectorAll('td.cell')[3].click()")
        assert page.becomes(f"{text('cell-said')}.includes('cosine')", True)
        page.run("document.querySelector('#edit [name=length]').value = '5'")
        page.run("document.querySelector('#edit [name=prompt]').value = 'The sea is'")
        for name, strong in (("scale", 20), ("std", 3)):  # a small model's text hardly changes otherwise
            page.run(f"document.querySelector('#edit [name={name}]').value = '{strong}'")
        page.run("document.querySelector('#edit button').click()")
        assert page.becomes("document.querySelectorAll('#answers .t').length", 4 * (3 + 5))
        assert page.becomes(text("edit-said"), "")
        assert page.run("[...document.querySelectorAll('#answers b')].map(b => b.textContent)") == [
            "As it is", "Steered", "Fuzzed", "Both"]  # fmt: skip
        answers = page.run("[...document.querySelectorAll('#answers div > span')].map(s => s.textContent)")
        assert all(answer.startswith("The sea is") and len(answer) > len("The sea is") for answer in answers)
        assert len(set(answers)) > 2
        # the first edit acts on what is generated, but for the last token, and the noise on the prompt
        coloured = "[...document.querySelectorAll('#answers .t.{}')].map(t => t.title)"
        assert page.run(coloured.format("a")) == [f"position {i}, steer at resid_post[2]" for i in range(3, 7)] * 2
        assert page.run(coloured.format("b")) == [f"position {i}, noise at embed" for i in range(3)] * 2
        # a lens reads all generated tokens but the last, in each layer; its last layer samples the next token
        assert page.run("document.querySelectorAll('#answers .t[tabindex]').length") == 4 * 4
        for event in ("mouseenter", "focus"):
            page.run(f"document.querySelector('#answers .t[tabindex]').dispatchEvent(new Event('{event}'))")
            assert page.run("[...document.querySelectorAll('#lens th')].map(h => h.textContent)") == [
                f"resid_post[{layer}]" for layer in reversed(range(8))]  # fmt: skip
            following = "document.querySelectorAll('#answers .t[tabindex]')[1].textContent"
            cell = page.run("document.querySelector('#lens td').textContent")
            assert cell.startswith(json.dumps(page.run(following), ensure_ascii=False))
            page.run("document.getElementById('lens').replaceChildren()")
        assert page.problems == []


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


class Page:
    """A page in a browser, through the browser's own protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection, self.last, self.problems = connection, 0, []
        self.send("Runtime.enable")
        self.send("Log.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.last += 1
        self.connection.send(json.dumps({"id": self.last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"])
            if message.get("id") == self.last:
                return message["result"]

    def run(self, script: str) -> Any:
        """The value of some JavaScript."""
        return self.send("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def becomes(self, script: str, value: Any) -> bool:
        return becomes(lambda: self.run(script) == value)


@contextlib.contextmanager
def browser(folder: Path, url: str) -> Iterator[Page]:
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
               "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"]  # fmt: skip
    process = subprocess.Popen([BROWSER, *options, f"--user-data-dir={folder}", url], stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        assert becomes(lambda: port.exists() and bool(port.read_text()))
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json"
        assert becomes(lambda: any(tab["type"] == "page" for tab in httpx.get(address).json()))
        tab = next(tab for tab in httpx.get(address).json() if tab["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait()
