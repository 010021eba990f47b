"""Lens, attribution and patchscope over HTTP: from the weights of the server, and from its engine."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies import direct_attribution, fit_lens, logit_lens, patchscope

from .conftest import KEYS, Server

PROMPT = "The capital of France is"


def test_a_server_reads_out_from_its_weights_what_its_engine_does(server: Server):
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        asked = dict(tokens=[" Paris"], layers=[1, 7])
        ours, served = logit_lens(lm, PROMPT, **asked), logit_lens(lm, PROMPT, readout="engine", **asked)
        assert ours.readout == "weights"
        with pytest.raises(pc.ProgramError, match="readout"):
            logit_lens(lm, PROMPT, readout="device", **asked)
        assert np.abs(ours.logprobs - served.logprobs).max() < 1e-4
        assert (ours.top_ids[:, :, 0] == served.top_ids[:, :, 0]).all()
        result = direct_attribution(lm, PROMPT, answer=" Paris", foil=" Rome")
        assert abs(result.shares.sum() - result.logit_diffs[0]) < 1e-3
        scope = patchscope(lm, source=PROMPT, target=PROMPT, layers=[2, 5], max_tokens=2)
        assert scope.texts == ((scope.plain_text,),) * 2


def test_a_lens_is_fitted_to_a_servers_rows_and_read_there(server: Server, local: pc.LM, tmp_path):
    asked = dict(dataset=["The capital of France is", "Water boils at", "A b c", "x"], layers=[1, 6], steps=2, seed=3)
    here = fit_lens(local, **asked)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        fit = fit_lens(lm, **asked)
        assert np.abs(fit.matrix - here.matrix).max() < 1e-2
        assert np.abs(fit.kl - here.kl).max() < 1e-2
        path = fit.save(tmp_path / "lens.safetensors")
        read = lm.run(PROMPT, max_tokens=1, capture=pc.Lens(pc.resid_post, translators=path)).lens[pc.resid_post]
        theirs = logit_lens(lm, PROMPT, translators=fit)
        assert read.layers == theirs.layers == (1, 6)
        assert np.abs(read.logprobs - np.log(theirs.top_probs)).max() < 1e-4
