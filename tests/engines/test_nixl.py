"""Prefill and decode apart over NIXL, in two processes: keys and values of plain requests are moved, and those of requests
with programs stay where they are."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc

from .conftest import TINY
from .nixl_engine import NixlEngine, Told
from .test_connectors import HARD, OTHER, PROMPT

pytestmark = pytest.mark.slow
SEEN = [pc.resid_post[1] @ (pc.prompt[-1] | pc.generated)]
EDITED, READ = pc.Program.of(HARD, SEEN), pc.Program.of((), SEEN)
PREFILL, NEW = {"do_remote_decode": True, "do_remote_prefill": False}, 6


def same(found: Told, expected: Told) -> bool:
    close = np.allclose(found["logprobs"], expected["logprobs"], atol=1e-4)
    if expected["rows"] is not None:
        close &= np.allclose(found["rows"], expected["rows"], atol=1e-3)
    return close and found["tokens"] == expected["tokens"]


def test_programs_beside_transfers(tiny):
    with NixlEngine(tiny, "kv_producer") as prefill, NixlEngine(tiny, "kv_consumer") as decode:
        prefill.ready()
        decode.ready()
        expected = {(name, program): prefill.one(ids, NEW, program)
                    for name, ids in (("prompt", PROMPT), ("other", OTHER)) for program in (None, EDITED, READ)}  # fmt: skip
        assert not same(expected["prompt", EDITED], expected["prompt", READ])
        # what was edited is not sent: the prefill engine has computed both
        sent = prefill.one(PROMPT, 1, None, PREFILL)
        assert sent["transfer"]["do_remote_prefill"]
        [found], computed = decode.ask((PROMPT, NEW, None, sent["transfer"]))
        assert computed == NEW  # the last token of the prompt, and those generated
        assert same(found, expected["prompt", None])
        # moved blocks are those of the plain prompt, for programs too, and edited ones are computed
        read, edited = decode.one(PROMPT, NEW, READ), decode.one(PROMPT, NEW, EDITED)
        assert (read["cached"], edited["cached"]) == (64, 0)
        assert same(read, expected["prompt", READ])
        assert same(edited, expected["prompt", EDITED])
        # together, on either side
        [first, second], _ = prefill.ask((OTHER, 1, None, PREFILL), (OTHER, NEW, EDITED, None))
        assert same(second, expected["other", EDITED])
        found, _ = decode.ask(
            (OTHER, NEW, EDITED, None), (OTHER, NEW, None, first["transfer"]), (OTHER, NEW, READ, None)
        )
        for one, program in zip(found, (EDITED, None, READ), strict=True):
            assert same(one, expected["other", program])
        # a program stays where it is
        sent = prefill.one(PROMPT, 1, None, PREFILL)
        for engine, transfer in ((prefill, PREFILL), (decode, sent["transfer"])):
            error = engine.one(PROMPT, NEW, EDITED, transfer)["error"]
            assert isinstance(error, pc.ProgramError)
            assert "kv_transfer_params" in str(error)
            assert same(engine.one(PROMPT, NEW), expected["prompt", None])
        assert len(expected["prompt", READ]["rows"][0]) == TINY["hidden_size"]
