"""Speculative decoding by n-grams on the CPU build: programs act on drafted rows as on any, and what is thrown away leaves
nothing behind. An engine that drafts is compared with one that does not."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import ProgramError

from ..models import of_family
from .test_admission import worker
from .test_families import EAGER, IDS, flat
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here")
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4], [8, 9] * 6, list(range(3, 15)) * 4]
LONG = {"max_tokens": 32, "sampling": {"ignore_eos": True}, "logprobs": True}
D, V = 128, 16
RNG = np.random.default_rng(0)
ROW_D, ROW_V = RNG.standard_normal(D).astype(np.float32), RNG.standard_normal(V).astype(np.float32)
PROGRAMS: dict[str, list] = {
    "none": [],
    "generated": [pc.Add(ROW_D, pc.resid_post[1], pc.generated, scale=0.5)],
    "logits": [pc.Add(ROW_V, pc.logits, pc.generated[5:12], scale=4.0)],
    "noise": [pc.Noise(0.5, at=pc.mlp_out, seed=7, relative=True)],
    "the same run": [
        pc.Add(pc.SameRun(pc.resid_post[0]), pc.resid_post[2], pc.generated, scale=0.5),
        pc.Replace(pc.SameRun(pc.embed, pc.generated[1]), pc.mlp_out[1], pc.generated[3:9]),
    ],
    "a token": [pc.Scale(0.2, pc.resid_pre[2], pc.token(5))],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, inspected_here):
    """An engine without drafts, and one with; few words, so that texts repeat themselves."""
    folder = of_family(tmp_path_factory.mktemp("llama"), "llama", vocab_size=V)
    few = {**IDS, **EAGER, "max_num_batched_tokens": 32}
    plain = pc.LM(folder, engine="vllm", **few)
    with plain, pc.LM(folder, engine="vllm", allow_code=True, **few, **DRAFTS) as drafting:
        yield plain, drafting


def runs_of(lm: pc.LM, edits: list) -> list[pc.Run]:
    """Runs of all prompts with every site captured."""
    return lm.run(PROMPTS, edits=edits, capture=[pc.Site(name) for name in lm.sites.names], **LONG)


@pytest.fixture
def drafted(pair, monkeypatch):
    """By step: how many requests the engine that drafts ran, and how many tokens it drafted."""
    runtime, counts = worker(pair[1]).runtime, []
    begin = runtime.begin_step

    def begin_step(requests, row, position, count, total, samples):
        counts.append((len(requests), 0 if samples is None else int(samples.sum()) - len(requests)))
        return begin(requests, row, position, count, total, samples)

    monkeypatch.setattr(runtime, "begin_step", begin_step)
    return counts


def equal(ours: pc.Run, theirs: pc.Run, sites: list[str]) -> bool:
    for place in sites:
        assert ours.positions(place) == theirs.positions(place), place
        before = 0 if place == "logits" else len(ours.prompt_token_ids) - 1
        assert len(ours.positions(place)) == before + len(ours.token_ids)
    return all(worst_row(flat(ours[place]), flat(theirs[place])) <= 1e-4 for place in sites)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_generated_and_captured_is_what_it_is_without_drafts(pair, drafted, program):
    plain, drafting = pair
    sites = [str(ref) for ref in plain.sites.refs()]
    theirs, ours = (runs_of(lm, PROGRAMS[program]) for lm in pair)
    turns, drafts = (sum(column) for column in zip(*drafted, strict=True))
    right = sum(len(run.token_ids) for run in ours) - turns  # at least: a chunk of a prompt is a turn without a token
    assert drafts > right > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.acted == b.acted
        assert equal(a, b, sites)
    if program != "none":
        assert [run.token_ids for run in ours] != [run.token_ids for run in runs_of(drafting, [])]


def test_rows_of_drafts_that_were_wrong_are_not_kept(pair, monkeypatch):
    """The rows that a position had first are another token's where a draft was wrong."""
    store = worker(pair[1]).runtime.store
    theirs, ours = (runs_of(lm, PROGRAMS["generated"]) for lm in pair)
    assert store.keeps_last
    monkeypatch.setattr(store, "keeps_last", False)
    assert not all(equal(a, b, ["resid_post[2]"]) for a, b in zip(ours, theirs, strict=True))


def test_a_run_that_ends_early_keeps_no_row_beyond_its_end(pair):
    """Its last step computed drafts beyond the token that ended it; another run reads what it captured."""
    plain, _ = pair
    whole = plain.run(PROMPTS[1], **LONG)
    stop = {"sampling": {"ignore_eos": True, "stop_token_ids": [whole.token_ids[10]]}}
    ended = [lm.run(PROMPTS[1], capture=[pc.resid_post[1], pc.logits], **LONG | stop) for lm in pair]
    assert ended[0].token_ids == ended[1].token_ids
    assert len(ended[0].token_ids) <= 11
    assert equal(*ended, ["resid_post[1]", "logits"])
    patched = [
        lm.run(PROMPTS[2], edits=[pc.Replace(pc.From(run, pc.resid_post[1]), pc.resid_post[1], pc.prompt[2:9])], **LONG)
        for lm, run in zip(pair, ended, strict=True)
    ]
    assert patched[0].token_ids == patched[1].token_ids != plain.run(PROMPTS[2], **LONG).token_ids


def test_batchmates_without_programs_are_as_without_drafts(pair):
    plain, drafting = pair
    edits = [PROGRAMS["logits"], [], PROGRAMS["generated"]]
    theirs, ours = (lm.run(PROMPTS, edits=edits, **LONG) for lm in pair)
    assert [run.token_ids for run in ours] == [run.token_ids for run in theirs]
    assert ours[1].logprobs == pytest.approx(plain.run(PROMPTS[1], **LONG).logprobs, abs=1e-4)
    parts = list(drafting.stream(PROMPTS[0], edits=edits[0], **LONG))
    assert [token for part in parts for token in part.token_ids] == ours[0].token_ids
    assert max(len(part.token_ids) for part in parts) > 1


def test_code_is_refused(pair):
    _, drafting = pair
    edits = [[pc.Apply(lambda rows: rows, pc.resid_post[1])], PROGRAMS["generated"]]
    refused, other = drafting.run(PROMPTS[:2], edits=edits, **LONG)
    assert isinstance(refused.error, ProgramError)
    assert "code (Apply) does not run with speculative decoding" in str(refused.error)
    assert other.error is None
