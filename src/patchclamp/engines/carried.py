"""What a request carries to its engine core: its bound program as bytes, and the receipt that answers for it."""

from __future__ import annotations

import hashlib

import msgspec

from patchclamp.engines.base import Request
from patchclamp.plan import BoundProgram
from patchclamp.plan.room import bank_sizes
from patchclamp.sites import SiteMap

ABORTED = "the run was aborted"


class Carried(msgspec.Struct, array_like=True):
    """What a request carries in its sampling parameters.

    bound: its program, for its prompt
    sizes: of every bank key that it reads, (rows, width)
    """

    bound: BoundProgram
    sizes: dict[str, tuple[int, int]]


decode = msgspec.msgpack.Decoder(Carried).decode


def carry(request: Request, sites: SiteMap) -> bytes:
    """The program of a request that has one, as it travels."""
    assert request.bound is not None
    sources = {source.key: source for source in request.sources}

    def rows_of(run: str, point: int) -> int:
        return len(sources[run].positions_of(point))

    return msgspec.msgpack.encode(Carried(request.bound, bank_sizes(request.bound, request.vectors, sites, rows_of)))


def receipt_of(carried: bytes) -> str:
    """What answers for a program: the digest of what was carried, made by each worker of what it installed."""
    return hashlib.blake2b(carried, digest_size=16).hexdigest()
