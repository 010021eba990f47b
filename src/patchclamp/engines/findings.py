"""What the doctor reports, one thing at a time."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One finding of the doctor.

    part: the area it belongs to: versions, seams, configuration, sites, fusions, graphs, memory
    name: what was looked at
    status: "ok"; "note" for what is worth knowing; "problem": patchclamp does not work
    detail: what was found
    advice: what to do about it
    """

    part: str
    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    advice: str = ""
