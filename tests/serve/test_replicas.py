"""Two replicas of the model behind two API processes: what holds for one server holds for these."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.studies import patch_sweep

from .conftest import KEYS, STILL, Server, start, stop
from .test_client import (  # noqa: F401  the same tests, on this server
    CASES,
    PROMPTS,
    counts,
    flat,
    settled,
    test_a_call_that_is_cancelled_stops,
    test_another_key_reads_and_frees_nothing,
    test_nothing_is_left_when_runs_are_dropped,
)
from .test_client import (
    test_a_client_that_is_killed_leaves_nothing as killed,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("replicas") / "server.log"
    default = dict.fromkeys(STILL, "1")  # vLLM's own: each worker is a process
    made = start(model, log, "--api-key", *KEYS, "--data-parallel-size=2", "--api-server-count=2", environment=default)
    yield made
    stop(made)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_but_for_its_batch(lm, local, case):
    """A batch that is split between replicas computes other sums: equal to fp32's last bits, where it is not to the
    bit."""
    there, here = lm.run(PROMPTS, max_tokens=5, **CASES[case]), local.run(PROMPTS, max_tokens=5, **CASES[case])
    for a, b in zip(flat(there), flat(here), strict=True):
        assert (a.token_ids, a.text, a.sites) == (b.token_ids, b.text, b.sites)
        assert a.answer.logprobs == pytest.approx(b.answer.logprobs, abs=1e-4)
        assert a.scores == pytest.approx(b.scores, abs=1e-4)
        for site in a.sites:
            assert a.positions(site) == b.positions(site)
            torch.testing.assert_close(a[site], b[site], rtol=1e-4, atol=1e-4)


def test_a_client_that_is_killed_leaves_nothing(lm, server):
    killed(lm, server, "sweep")


def test_a_run_is_patched_into_another(lm, local):
    logprobs = []
    for each in (lm, local):
        source = each.run("The capital of Italy is", capture=[pc.resid_post[4]], max_tokens=1)
        patch = pc.Replace(pc.From(source, pc.resid_post[4]), at=pc.resid_post[4] @ pc.prompt[-1])
        logprobs.append(each.run(PROMPTS[0], edits=[patch], max_tokens=4, logprobs=True).logprobs)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert logprobs[0] != pytest.approx(lm.run(PROMPTS[0], max_tokens=4, logprobs=True).logprobs, abs=1e-2)


def test_a_sweep_is_the_same_but_for_its_batches(lm, local):
    asked = dict(clean="The Eiffel Tower is in", corrupt="The Colosseum is in", answer=" Paris", foil=" Rome",
                 sites=[pc.resid_pre])  # fmt: skip
    there, here = patch_sweep(lm, **asked), patch_sweep(local, **asked)
    np.testing.assert_allclose(there.grid, here.grid, atol=1e-3)
    assert there.grid.size > 20


def test_both_replicas_run_programs(lm):
    """Runs that keep nothing go to either; what one client captures lies with one of them, where it may be read."""
    runs = lm.run([[5, 6, 7]] * 64, edits=[pc.Scale(0.5, at=pc.embed)], max_tokens=8)
    assert len({tuple(run.token_ids) for run in runs}) == 1
    assert lm.engine.status()["steps_planned_by_core"].count(0) == 0
    assert not any(settled(lm).values())


def test_several_clients_share_the_replicas(server, local):
    here = local.run("The capital of France is", capture=[pc.resid_post[3]], max_tokens=2)
    for _ in range(6):  # each has a session of its own, and its captures lie on one of the replicas
        with pc.LM(server.url, api_key=KEYS[0]) as lm:
            run = lm.run("The capital of France is", capture=[pc.resid_post[3]], max_tokens=2)
            torch.testing.assert_close(run["resid_post[3]"], here["resid_post[3]"], rtol=1e-4, atol=1e-4)
            assert counts(lm)["captured_bytes"] > 0
            del run
            assert not any(settled(lm).values())


def test_what_is_kept_is_known_to_every_process(server):
    """Each request comes on a connection of its own, which either process may take."""
    vector = [1.0] * 144
    steered = {"edits": [{"type": "add", "value": {"type": "named", "name": "ones"}, "at": "resid_post[3]"}]}
    captured = {"capture": [{"type": "capture", "at": "resid_post[4]"}], "run": "italy"}
    patched = {"edits": [{"type": "replace", "at": "resid_post[4]", "tokens": "prompt[-1]",
                          "value": {"type": "from", "run": "italy", "site": "resid_post[4]"}}]}  # fmt: skip

    def ask(verb: str, path: str, **body) -> httpx.Response:
        with server.http() as http:
            return http.request(verb, path, **body)

    def complete(program: dict, **options) -> httpx.Response:
        body = {"model": server.model, "prompt": "The capital of Italy is", "max_tokens": 2, "temperature": 0}
        return ask("POST", "/v1/completions", json={**body, "patchclamp": program, **options})

    assert ask("PUT", "/v1/patchclamp/vectors/ones", json=vector).status_code == 200
    assert ask("PUT", "/v1/patchclamp/programs/calm", json={"edits": steered["edits"]}).status_code == 200
    assert complete(captured).status_code == 200
    for _ in range(8):
        assert complete(steered).status_code == 200
        assert complete(patched).status_code == 200
        assert complete({}, model=f"{server.model}:calm").status_code == 200
        assert len(ask("GET", "/v1/patchclamp/runs/italy/captures").content) > 144 * 4
    assert ask("DELETE", "/v1/patchclamp/runs/italy").status_code == 200
    assert ask("DELETE", "/v1/patchclamp/vectors/ones").status_code == 200
    for _ in range(8):
        assert ask("GET", "/v1/patchclamp/runs/italy").status_code == 410
        assert complete(steered).status_code == 404
