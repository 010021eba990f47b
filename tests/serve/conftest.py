"""One server for all tests of this folder: `patchclamp serve` on a free port of this machine, with two API keys."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import openai
import pytest

import patchclamp as pc
from patchclamp.language.program import to_dict

from ..conftest import WIDTH, beginnings_of

T = TypeVar("T")

KEYS = ("one-key", "another-key")
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "block_size": 32,
           "kv_cache_memory_bytes": 1 << 26}  # fmt: skip
STARTS_WITHIN_S = 600
HELD = ("programs", "requests", "waiting", "under_way", "vectors", "captured_bytes")
LIMITS = {"openai_body_bytes": 1 << 22, "body_bytes": 1 << 21, "program_bytes": 1 << 21, "json_bytes": 1 << 20, "program_ops": 64,
          "program_captures": 32, "bank_names": 8, "named_bytes": 1 << 20, "run_bytes": 1 << 27,
          "sweep_prompts": 12, "sweep_grid": 20_000}  # fmt: skip


# On a CPU vLLM gives a server's one worker a process of its own, and it and the core ask for each other's messages in a loop
# that yields: where both cores are busy, Linux 6.18 then lets other processes stand still for ten seconds and more. On a
# GPU one worker is in the core's process, as here
STILL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


# A server that collects no garbage: what is freed by a collection alone stays for minutes on a server at work
UNCOLLECTED = (
    "-c", "import gc, runpy, sys; gc.disable(); sys.argv[1:1] = ['serve']; runpy.run_module('patchclamp', alter_sys=True)",
)  # fmt: skip


class Server:
    """A running server: its address, and clients of it."""

    def __init__(self, url: str, model: str, process: subprocess.Popen, log: Path) -> None:
        self.url, self.model, self.process, self.log = url, model, process, log

    def openai(self, key: str = KEYS[0]) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def http(self, key: str = KEYS[0]) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=120)

    @functools.cached_property
    def _looking(self) -> httpx.Client:
        return self.http()

    def held(self) -> dict[str, int]:
        """What its engine holds."""
        status = self._looking.get("/v1/patchclamp/engine/status").json()
        return {name: status[name] for name in HELD if status[name]}


def start(
    model: str, log: Path, *options: str, command: tuple[str, ...] = ("-m", "patchclamp", "serve"),
    environment: dict[str, str] | None = None, meanwhile: Callable[[], object] = lambda: None,
) -> Server:  # fmt: skip
    """Starts a server, calls `meanwhile`, and waits until the server answers.

    Its port is held until then: vLLM imports for seconds before it binds, and somebody else may be given a port that is
    merely free. Linux lets two sockets with SO_REUSEADDR have a port of which one listens.
    """
    given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    environment = os.environ | STILL | (environment or {})
    with socket.socket() as held, log.open("w") as out:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        words = [
            sys.executable,
            *command,
            model,
            *given,
            "--enforce-eager",
            "--host=127.0.0.1",
            f"--port={port}",
            *options,
        ]
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
        server, started = Server(f"http://127.0.0.1:{port}", model, process, log), False
        try:
            meanwhile()
            becomes(lambda: process.poll() is not None or answers(server), STARTS_WITHIN_S)
            started = process.poll() is None and answers(server)
        finally:
            if not started:
                stop(server)
    assert started, f"the server did not start:\n{log.read_text()[-4000:]}"
    return server


def answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def becomes(condition: Callable[[], bool], within_s: float = 300) -> bool:
    """Whether a condition comes to hold: it is looked at ten times a second. How long that may take on a slow machine is
    no part of a test: `within_s` is for what fails."""
    for _ in range(round(10 * within_s)):
        if condition():
            return True
        time.sleep(0.1)
    return False


def stop(server: Server) -> None:
    """Ends a server and what it started."""
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGTERM)
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(30)


@pytest.fixture(scope="session")
def model(shortened, tmp_path_factory) -> str:
    """`narrowed` with all tokens: texts of clients have the tokens that they have with SmolLM2."""
    return beginnings_of(Path(shortened), tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def saes(tmp_path_factory) -> dict[str, pc.SAE]:
    """SAEs that the server attaches, by name, at resid_post[3]; each of the first's features is a product."""
    draw, folder = np.random.default_rng(5), tmp_path_factory.mktemp("saes")
    rows = {"encoder": 0.05 * draw.standard_normal((48, WIDTH)), "encoder_bias": draw.standard_normal(48) - 0.5,
            "decoder": 0.2 * draw.standard_normal((48, WIDTH)), "decoder_bias": 0.1 * draw.standard_normal(WIDTH)}  # fmt: skip
    made = {"plain": pc.SAE(**rows), "topk": pc.SAE(**rows, k=4)}
    for name, sae in made.items():
        sae.save(folder / name)
    return {name: pc.SAE.load(folder / name) for name in made} | {"folder": folder}


@pytest.fixture(scope="package")
def server(model, saes, tmp_path_factory, request) -> Iterator[Server]:
    config = f"--additional-config={json.dumps({'patchclamp': {'serve': LIMITS}})}"
    made = start(
        model, tmp_path_factory.mktemp("log") / "server.log", config, "--api-key", *KEYS,
        "--patchclamp-check-rate=1", *(f"--sae={name}={saes['folder'] / name}@resid_post[3]" for name in ("plain", "topk")),
        command=UNCOLLECTED, environment={"VLLM_LOGGING_LEVEL": "INFO"},
        meanwhile=lambda: request.getfixturevalue("local"),
    )  # fmt: skip
    yield made
    stop(made)


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    """A test leaves nothing on the server."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        gc.collect()  # a trace and its runs refer to each other
        becomes(lambda: not server.held(), within_s=60)
        assert server.held() == {}


@pytest.fixture(scope="package")
def local(model) -> Iterator[pc.LM]:
    """The same engine in this process, which ends with these files: some engines must be alone in a process."""
    with pc.LM(model, engine="vllm", enforce_eager=True, **OPTIONS) as lm:
        yield lm


@pytest.fixture(scope="module")
def lm(server) -> Iterator[pc.LM]:
    """A client of ours."""
    with pc.LM(server.url, api_key=KEYS[0]) as made:
        yield made


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def calm(server: Server) -> Iterator[str]:
    """The model that is `STEERED`."""
    from .test_openai import STEERED  # which imports this file

    with server.http() as http:
        text = {"edits": to_dict(pc.Program.of([STEERED]))["edits"]}
        yield http.put("/v1/patchclamp/programs/calm", json=text).json()["model"]
        http.delete("/v1/patchclamp/programs/calm")


def in_parts(stream: Callable[[], T], count: Callable[[T], int], least: int) -> T:
    """The first of several streams that comes in at least so many parts: a loaded machine sends many tokens at once."""
    for _ in range(8):
        found = stream()
        if count(found) >= least:
            return found
    raise AssertionError(f"no stream came in {least} parts, the last one in {count(found)}")
