"""Lens, attribution and patchscope over HTTP: with the model's files here, and without."""

from __future__ import annotations

import numpy as np

import patchclamp as pc
from patchclamp.studies import direct_attribution, logit_lens, patchscope

from .conftest import KEYS, Server

PROMPT = "The capital of France is"


def test_a_server_reads_out_what_the_files_here_do(server: Server):
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        asked = dict(tokens=[" Paris"], layers=[1, 7])
        ours, served = (logit_lens(lm, PROMPT, readout=way, **asked) for way in ("checkpoint", "engine"))
        assert ours.readout == "checkpoint"
        assert np.abs(ours.logprobs - served.logprobs).max() < 1e-4
        assert (ours.top_ids[:, :, 0] == served.top_ids[:, :, 0]).all()
        result = direct_attribution(lm, PROMPT, answer=" Paris", foil=" Rome")
        assert abs(result.shares.sum() - result.logit_diffs[0]) < 1e-3
        scope = patchscope(lm, source=PROMPT, target=PROMPT, layers=[2, 5], max_tokens=2)
        assert scope.texts == ((scope.plain_text,),) * 2
