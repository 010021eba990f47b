"""The server's log of what it did with programs: an object of JSON a line, among vLLM's lines.

No line has a prompt, an answer, a name that a caller chose, or the text of an error, which may quote the prompt.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError
from patchclamp.serve.owners import OPEN

logger = logging.getLogger("vllm.patchclamp")  # below vLLM's, whose handlers and level it has
OP = re.compile(r"(edits|capture)\[\d+\]")
MAX_OWNER = 8  # characters: enough to tell a few keys apart, too few to be the first part of anybody's names


def log(event: str, owner: str, **facts: Any) -> None:
    """A line. owner: whose request it was, by the hash of its key."""
    if logger.isEnabledFor(logging.INFO):
        whose = owner if owner == OPEN else owner[:MAX_OWNER]
        logger.info("%s", msgspec.json.encode({"event": event, "owner": whose, **facts}).decode())


def of_error(error: PatchclampError) -> dict[str, Any]:
    """What a line may say of an error: its class, its status, and the op of the program that it speaks of."""
    op = OP.search(error.path or "")
    return {"error": type(error).__name__, "status": error.status, "op": op[0] if op else None}
