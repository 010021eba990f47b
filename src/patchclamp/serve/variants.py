"""Variants: a program that is kept under a name is a model of its own, `MODEL:NAME`, for its owner."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.errors import MissingSource, PatchclampError
from patchclamp.language import Program
from patchclamp.serve.kept import Kept


class Variant(msgspec.Struct, frozen=True):
    """A request's model that is a program of another.

    asked: the model as the request names it
    model: the model below it
    name: the program's
    """

    asked: str
    model: str
    name: str
    program: Program

    def said_of(self, error: PatchclampError) -> PatchclampError:
        """An error of a request, which says that the variant's edits count in its path."""
        edits = len(self.program.edits)
        return type(error)(f"{error.message} (the first {edits} edits are the model's, {self.asked})", error.path)


async def variant_of(asked: Any, models: Any, kept: Kept, owner: str) -> Variant | None:
    """The variant that a request's `model` names; None for a model of vLLM's own, or of nobody's.

    models: vLLM's `OpenAIServingModels`
    Raises `MissingSource` for a program that the owner does not have.
    """
    if not isinstance(asked, str) or ":" not in asked:
        return None
    known = {card.id for card in (await models.show_available_models()).data}
    model, _, name = asked.rpartition(":")
    if asked in known or model not in known:
        return None
    try:
        return Variant(asked, model, name, kept.entry(owner, "program", name))
    except MissingSource as error:
        raise MissingSource(f"the model {asked!r} does not exist: {error.message}", "model") from None


def with_variants(cards: list[dict[str, Any]], kept: Kept, owner: str) -> list[dict[str, Any]]:
    """The cards of vLLM's models, and after them one for each variant of the first model."""
    first = cards[0]
    return cards + [
        {**first, "id": f"{first['id']}:{name}", "root": first["id"], "parent": first["id"], "owned_by": "patchclamp"}
        for name in kept.entries(owner, "program")
    ]
