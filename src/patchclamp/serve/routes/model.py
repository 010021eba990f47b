"""What is served: the model, its sites, the versions and the limits."""

from __future__ import annotations

from fastapi import APIRouter, Request

from patchclamp import __version__
from patchclamp.errors import PatchclampError
from patchclamp.language import Site
from patchclamp.language.site import SITES
from patchclamp.serve.answers import ServedModel, SiteCard, SiteList
from patchclamp.serve.routes.runs import caller
from patchclamp.serve.schema import ERRORS

model_router = APIRouter(prefix="/v1/patchclamp", tags=["patchclamp"], responses=ERRORS)


@model_router.get("")
async def read_model(request: Request) -> ServedModel:
    """The model, the versions, and what one caller may ask for and leave here."""
    front, _ = caller(request)
    model, limits = front.engine.model, front.limits
    return ServedModel(
        patchclamp=__version__, vllm=model.version, model=model.name, family=model.family, layers=model.layers,
        d_model=model.d_model, d_vocab=model.d_vocab, dtype=model.dtype, max_model_len=model.max_model_len,
        limits={name: getattr(limits, name) for name in limits.__struct_fields__},
    )  # fmt: skip


@model_router.get("/sites")
async def list_sites(request: Request) -> SiteList:
    """Every site: what it is, and where this model has it, or why it does not."""
    front, _ = caller(request)
    cards = []
    for name, spec in SITES.items():
        layers, why_not = None, None
        try:
            layers = [ref.layer for ref in front.engine.sites.resolve(Site(name)) if ref.layer is not None]
        except PatchclampError as error:
            why_not = error.message
        cards.append(SiteCard(name=name, shape=spec.shape, meaning=spec.meaning, layers=layers, why_not=why_not))
    return SiteList(sites=cards)
