"""The page at `/patchclamp`: one file, which asks the routes that are there for everybody."""

from __future__ import annotations

import importlib.resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

page_router = APIRouter()
PAGE = importlib.resources.files("patchclamp.serve").joinpath("page.html").read_text(encoding="utf-8")


@page_router.get("/patchclamp", include_in_schema=False)
async def page() -> HTMLResponse:
    """The page. It has nothing of anybody's, and needs no API key; what it asks for does."""
    return HTMLResponse(PAGE)
