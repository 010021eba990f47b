"""Captures of a server, which it sends as it reads them: larger than what it reads at once."""

from __future__ import annotations

import socket

import httpx
import pytest
import safetensors.torch
import torch

import patchclamp as pc
from patchclamp.serve.capture_files import PART_BYTES

from .conftest import KEYS, becomes
from .test_leaving import held
from .test_openai import complete, program

LONG = [5, 6, 7] * 150
SITES = [pc.resid_post, pc.mlp_out, pc.attn_out, pc.neurons, pc.z]


@pytest.fixture
def kept(server):
    """A run with 22 MB of captures."""
    complete(server, program(capture=SITES, run="large"), LONG, max_tokens=2)
    yield "/v1/patchclamp/runs/large"
    with server.http() as http:
        http.delete("/v1/patchclamp/runs/large")


def test_a_large_file_comes_whole(server, local, kept):
    run = local.run(LONG, max_tokens=2, capture=SITES)
    with server.http() as http, http.stream("GET", f"{kept}/captures") as response:
        size = int(response.headers["Content-Length"])
        data = response.read()
    assert size == len(data) > 8 * PART_BYTES
    tensors = safetensors.torch.load(data)
    assert len(tensors) == 5 * 8
    assert all(torch.equal(rows, run[site]) for site, rows in tensors.items())


def test_a_client_of_ours_reads_them_as_they_come(server, local):
    here = local.run(LONG, max_tokens=2, capture=SITES)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        there = lm.run(LONG, max_tokens=2, capture=SITES)
        wanted = [(there.key, each.point, None) for site in SITES for each in lm.sites.resolve(site)]
        together = lm.engine.fetch_many(wanted)  # one answer of many parts
        assert sum(rows.nbytes for _, rows in together) > 8 * PART_BYTES
        for (_, point, _), (positions, rows) in zip(wanted, together, strict=True):
            expected = local.engine.fetch(here.key, point)
            assert positions.tolist() == expected[0].tolist()
            assert torch.equal(rows, expected[1])
        assert torch.equal(there["resid_post[3]"], here["resid_post[3]"])


def test_a_run_that_is_deleted_while_it_is_read_is_freed_and_breaks_off(server, kept):
    """Its reader sees that the file is short; whoever asks then hears why."""
    with socket.socket() as raw, server.http() as http:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # what is on the way is little of the file
        raw.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        raw.sendall(f"GET {kept}/captures HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n\r\n".encode())
        data = raw.recv(1 << 12)
        assert http.delete(kept).status_code == 200
        assert becomes(lambda: held(server) == {})
        while part := raw.recv(1 << 16):
            data += part
        gone = http.get(f"{kept}/captures")
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"200" in head.splitlines()[0]
    [size] = [int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")]
    assert 0 < len(body) < size
    assert gone.status_code == 410
    assert "it was deleted" in gone.json()["error"]["message"]


def test_a_reader_that_leaves_leaves_the_run(server, kept):
    log = len(server.log.read_text())
    with server.http() as http:
        with http.stream("GET", f"{kept}/captures") as response:
            next(response.iter_bytes())
        assert http.get(kept).status_code == 200
        assert len(http.get(f"{kept}/captures").content) > 8 * PART_BYTES
    assert "Traceback" not in server.log.read_text()[log:]


def test_a_run_of_nobody_is_said_before_the_file(server):
    with server.http() as http:
        assert http.get("/v1/patchclamp/runs/nobodys/captures").status_code == 404
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        run = lm.run(LONG, max_tokens=1, capture=[pc.embed])
        lm.engine.release([run.key])
        assert becomes(lambda: held(server) == {})
        with pytest.raises(pc.MissingSource, match="released"):
            run[pc.embed]
    assert httpx.get(f"{server.url}/v1/patchclamp/runs/x/captures", timeout=60).status_code == 401
