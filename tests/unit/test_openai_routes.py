"""vLLM's endpoints that our routes call are compared with what they are called with, when a server starts."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from patchclamp.errors import SeamMoved
from patchclamp.serve import openai


async def create_completion(request: dict, raw_request: dict): ...
async def create_chat_completion(request: dict, raw_request: dict): ...
async def show_available_models(raw_request: dict): ...


async def renamed(request: dict, http_request: dict): ...
async def longer(request: dict, raw_request: dict, handler: dict): ...
async def shorter(request: dict): ...
async def swapped(raw_request: dict, request: dict): ...
async def with_default(request: dict, raw_request: dict | None = None): ...


STOCK = dict(zip(openai.SEAMS, (create_completion, create_chat_completion, show_available_models), strict=True))


def app_of(endpoints) -> FastAPI:
    app = FastAPI()
    for path, endpoint in endpoints.items():
        (app.get if path == openai.MODELS else app.post)(path)(endpoint)
    return app


def test_the_stock_endpoints_are_taken():
    openai.attach(app := app_of(STOCK))
    assert len([route for route in app.routes if getattr(route, "path", "") in openai.SEAMS]) == 6


@pytest.mark.parametrize("path", openai.SEAMS)
@pytest.mark.parametrize("changed", [renamed, longer, shorter, swapped, with_default])
def test_one_with_other_parameters_is_refused_with_its_name(path, changed):
    with pytest.raises(SeamMoved) as caught:
        openai.attach(app_of(STOCK | {path: changed}))
    assert STOCK[path].__name__ in str(caught.value)


@pytest.mark.parametrize("path", openai.SEAMS)
def test_one_that_is_missing_is_refused_with_its_name(path):
    with pytest.raises(SeamMoved) as caught:
        openai.attach(app_of({key: endpoint for key, endpoint in STOCK.items() if key != path}))
    assert STOCK[path].__name__ in str(caught.value)
