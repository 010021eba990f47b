"""What an examination finds: one thing each, and what can be done about it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """Of a `part` (versions, seams, configuration, sites, fusions, graphs, memory) one thing, by `name`.

    What was found, in words, and where it is not as it should be what to do about it. With a "problem" patchclamp does
    not work.
    """

    part: str
    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    advice: str = ""
