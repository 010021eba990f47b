"""Whose a request is: what it leaves on the server belongs to the hash of the API key that it came with."""

from __future__ import annotations

import hashlib

from patchclamp.errors import NoKey

OPEN = "open"  # of servers without API keys: what is there belongs to whoever knows its name


def owner_of(authorization: str | None, has_keys: bool) -> str:
    """The owner of a request with that `Authorization` header. vLLM has compared it with the server's keys.

    Raises `NoKey` where there are keys and the request has none: a route that vLLM does not guard would let it in.
    """
    if not has_keys:
        return OPEN
    if not authorization:
        raise NoKey("this server wants an API key: Authorization: Bearer KEY")
    key = authorization.partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()[:32]
