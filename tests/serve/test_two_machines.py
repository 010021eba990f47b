"""Two replicas on two machines: the second is a network namespace of its own, which reaches the first by one address."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .conftest import KEYS, OPTIONS, STILL, Server, start, stop
from .test_replicas import (  # noqa: F401  the same tests, on these machines
    test_a_client_that_is_killed_leaves_nothing,
    test_a_run_is_patched_into_another,
    test_a_run_is_the_same_but_for_its_batch,
    test_a_sweep_is_the_same_but_for_its_batches,
    test_both_replicas_run_programs,
)

pytestmark = pytest.mark.slow
FIRST, SECOND = "10.213.7.1", "10.213.7.2"


@pytest.fixture(scope="module")
def second() -> Iterator[list[str]]:
    """The words that run a command on the second machine."""
    name = f"patchclamp{os.getpid()}"
    here, there = f"pca{os.getpid()}"[:15], f"pcb{os.getpid()}"[:15]
    inside = ["ip", "netns", "exec", name]
    words = [
        ["ip", "link", "add", here, "type", "veth", "peer", "name", there],
        ["ip", "link", "set", there, "netns", name],
        ["ip", "addr", "add", f"{FIRST}/30", "dev", here],
        ["ip", "link", "set", here, "up"],
        [*inside, "ip", "addr", "add", f"{SECOND}/30", "dev", there],
        [*inside, "ip", "link", "set", there, "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
    ]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        pytest.skip("this machine cannot create network namespaces")
    try:
        for each in words:
            subprocess.run(each, check=True, capture_output=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)  # and both ends of the connection


@pytest.fixture(scope="module")
def server(model, second, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("machines")
    with socket.create_server((FIRST, 0)) as free:
        port = free.getsockname()[1]
    replicas = ["--data-parallel-size=2", "--data-parallel-size-local=1", f"--data-parallel-address={FIRST}",
                f"--data-parallel-rpc-port={port}"]  # fmt: skip
    default = dict.fromkeys(STILL, "1")
    given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [*second, sys.executable, "-m", "patchclamp", "serve", model, *given, "--enforce-eager", *replicas,
               "--data-parallel-start-rank=1", "--headless"]  # fmt: skip
    with (folder / "second.log").open("w") as log:
        other = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                 env=os.environ | default | {"VLLM_HOST_IP": SECOND})  # fmt: skip
    made = None
    try:
        made = start(model, folder / "server.log", "--api-key", *KEYS, *replicas,
                     environment=default | {"VLLM_HOST_IP": FIRST})  # fmt: skip
        yield made
    finally:
        for each in (made, Server("", model, other, folder / "second.log")):
            if each is not None:
                stop(each)
