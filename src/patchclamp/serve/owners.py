"""Whose a request is: what it leaves on the server belongs to the hash of the API key that it came with."""

from __future__ import annotations

import hashlib

OPEN = "open"  # of servers without API keys: what is there belongs to whoever knows its name


def owner_of(authorization: str | None, has_keys: bool) -> str:
    """The owner of a request with that `Authorization` header."""
    if not has_keys or not authorization:
        return OPEN
    key = authorization.partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()[:32]
