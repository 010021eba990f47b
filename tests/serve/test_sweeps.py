"""Sweeps over HTTP: cells as they finish, the same as here, and an end when the client goes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from patchclamp.language.registry import SITES
from patchclamp.studies import patch_sweep

from .conftest import becomes

ASKED = {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
         "sites": ["resid_pre", "mlp_out"]}  # fmt: skip


def events(lines):
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_a_sweep_is_the_same_as_here(server, local):
    with server.http() as http, http.stream("POST", "/v1/patchclamp/sweeps", json=ASKED) as response:
        assert response.status_code == 200
        told = list(events(response.iter_lines()))
    here = patch_sweep(local, **ASKED)
    start, *parts, summary = told
    assert start[0] == "start"
    assert {name for name, _ in parts} == {"cells"}
    assert len(parts) > 1
    grid = np.full(here.grid.shape, np.nan)
    for _, data in parts:
        for site, layer, column, value in data["cells"]:
            assert np.isnan(grid[site, layer, column])
            grid[site, layer, column] = value
    np.testing.assert_allclose(grid, here.grid, atol=1e-3)
    assert start[1]["cells"] == np.isfinite(grid).sum() > 64
    assert [column["label"] for column in start[1]["columns"]] == [column.label for column in here.columns]
    assert start[1]["clean"] == pytest.approx(here.clean, abs=1e-3)
    assert summary[0] == "summary"
    assert [cell["site"] for cell in summary[1]["best"]] == [cell.site for cell in here.best(5)]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"sites": ["resid_pro"]}, 400, "resid_pro"),
        ({"answer": ""}, 400, "token"),
        ({"direction": "forward"}, 400, "forward"),
        ({"layers": 99}, 422, "layers 0 to 7"),
        ({"metric": "loss"}, 400, "loss"),
        ({"what": 1}, 400, "what"),
        ({"clean": ""}, 400, ""),
    ],
)
def test_what_is_wrong_is_said_before_it_starts(server, change, status, text):
    with server.http() as http:
        response = http.post("/v1/patchclamp/sweeps", json=ASKED | change)
    assert response.status_code == status, response.text
    assert text in response.text


def test_it_ends_when_the_client_goes(server):
    with server.http() as http:
        with http.stream("POST", "/v1/patchclamp/sweeps", json=ASKED | {"sites": list(SITES)[:6]}) as response:
            for name, data in events(response.iter_lines()):
                if name == "start":
                    assert data["cells"] > 200
                if name == "cells":
                    break

        def held() -> dict[str, int]:
            status = http.get("/v1/patchclamp/engine/status").json()
            names = ("programs", "requests", "captured_bytes", "waiting", "under_way")
            return {name: status[name] for name in names if status[name]}

        becomes(lambda: not held())
        assert held() == {}


def test_the_model_and_its_sites(server, local):
    with server.http() as http:
        model = http.get("/v1/patchclamp").json()
        sites = {card["name"]: card for card in http.get("/v1/patchclamp/sites").json()["sites"]}
    assert (model["layers"], model["d_model"]) == (local.model.layers, local.model.d_model)
    assert model["limits"]["sweep_cells"] == 20_000
    assert list(sites) == list(SITES)
    assert sites["resid_post"]["layers"] == list(range(8))
    assert sites["router"]["layers"] is None
    assert "experts" in sites["router"]["why_not"]
