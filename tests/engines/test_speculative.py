"""Speculative decoding on the CPU build: programs act on drafted rows as on any, and what is thrown away leaves nothing
behind. An engine that drafts is compared with one that does not; n-grams, which need no model, in most of it."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.sample import rejection_sampler

import patchclamp as pc
from patchclamp.engines.vllm import worker as worker_module
from patchclamp.engines.vllm.compat import core
from patchclamp.engines.vllm.compat.core import _check_beside_drafts
from patchclamp.errors import ProgramError
from patchclamp.plan.bound import NEVER
from patchclamp.plan.table import ProgramTable

from ..drafters import COUNT, drafting
from .lora import adapter
from .test_admission import engine_core, worker
from .test_families import EAGER, IDS, flat
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here")
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4], [8, 9] * 6, list(range(3, 15)) * 4]
LONG = {"max_tokens": 32, "sampling": {"ignore_eos": True}, "logprobs": True}
POSITIONS = worker_module.compat.positions  # taken here: an engine may still be in the last step of another test
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
    "a condition": [pc.When(pc.Probe(ROW_D, at=pc.resid_post[0], name="p") > 0, pc.Scale(0.2, pc.resid_post[1]))],
    "a condition at the prompt's end": [
        pc.When(pc.Probe(ROW_D, at=pc.resid_post[0], name="p") > 10, pc.Scale(-1.0, pc.resid_post[0:2]), scope="prompt")
    ],
    "a condition from a token on": [
        pc.When(
            pc.Probe(ROW_D, at=pc.resid_post[0], tokens=pc.generated, name="p") > 12,
            pc.Scale(-1.0, pc.resid_post[1]),
            scope="onwards",
        )
    ],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, inspected_here):
    """An engine without drafts, and one with; few words, so that texts repeat themselves."""
    with both("ngram", tmp_path_factory.mktemp("llama")) as made:
        yield made


@contextlib.contextmanager
def both(method, folder, workers=1, **options):
    """An engine without drafts, and one with, over some workers, of a model in a new folder."""
    model, speculative_config = drafting(method, folder, V)
    few = {**IDS, **EAGER, "max_num_batched_tokens": 32, **options}
    drafting_too = {
        "allow_code": workers == 1,
        "speculative_config": speculative_config,
        "tensor_parallel_size": workers,
    }
    module = sys.modules.pop("llvmlite.binding.ffi", None)  # n-grams load it, and then vLLM's CPU worker cannot start
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(pc.LM(model, engine="vllm", **few, **drafts)) for drafts in ({}, drafting_too)]
        if module is not None:
            sys.modules["llvmlite.binding.ffi"] = module
        yield tuple(made)
    sys.modules.pop("llvmlite.binding.ffi", None)  # engines of other files start after these


@pytest.fixture(scope="module")
def without_drafts(pair):
    """Runs of a program by name on the engine that does not draft, made once."""
    return functools.cache(lambda program: runs_of(pair[0], (PROGRAMS | WINDOWS)[program]))


def runs_of(lm: pc.LM, edits: list, **options) -> list[pc.Run]:
    """Runs of all prompts with every site captured."""
    return lm.run(PROMPTS, edits=edits, capture=[pc.Site(name) for name in lm.sites.names], **LONG, **options)


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


@pytest.fixture
def ahead(pair, monkeypatch):
    """As where steps are scheduled before drafts are checked: what the scheduler and the runner say is too far by up to a
    step's drafts, and the device knows better. `ahead(False)` has the worker believe them."""
    attached, rng, told = worker(pair[1]), np.random.default_rng(1), {}
    positions, planned, look = POSITIONS, attached.hooks.planned, attached._look

    def looks(scheduler_output):
        with monkeypatch.context() as here:  # the other engine's scheduler is right
            here.setattr(worker_module.compat, "positions", optimistic)
            here.setattr(worker_module.compat, "checked_positions", lambda runner, output: dict(positions(output)))
            return look(scheduler_output)

    def optimistic(scheduler_output):
        goes_on = scheduler_output.scheduled_cached_reqs.req_ids
        told.clear()
        told.update({request: int(rng.integers(COUNT + 1)) if request in goes_on else 0
                     for request, _ in positions(scheduler_output)})  # fmt: skip
        return [(request, begin + told[request]) for request, begin in positions(scheduler_output)]

    def too_far(requests, row, position, *others):
        planned(requests, row, position + np.array([told[request] for request in requests]), *others)

    monkeypatch.setattr(attached, "_look", looks)
    monkeypatch.setattr(attached.hooks, "planned", too_far)
    monkeypatch.setattr(attached, "_most_ahead", 2 * COUNT)
    return lambda is_told: monkeypatch.setattr(attached, "_most_ahead", 2 * COUNT * is_told)


def equal(ours: pc.Run, theirs: pc.Run, sites: list[str]) -> bool:
    for place in sites:
        assert ours.positions(place) == theirs.positions(place), place
        before = 0 if place == "logits" else len(ours.prompt_token_ids) - 1
        assert len(ours.positions(place)) == before + len(ours.token_ids)
    return all(worst_row(flat(ours[place]), flat(theirs[place])) <= 1e-4 for place in sites)


def runs_are_alike(pair: tuple[pc.LM, pc.LM], edits: list, **options) -> list[pc.Run]:
    """The runs of the engine that drafts."""
    theirs, ours = (runs_of(lm, edits, **options) for lm in pair)
    check_alike(pair[0], ours, theirs)
    return ours


def check_alike(lm: pc.LM, ours: list[pc.Run], theirs: list[pc.Run]) -> None:
    """Runs of an engine that drafts, and of one that does not."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.acted == b.acted
        assert equal(a, b, [str(ref) for ref in lm.sites.refs()])
        assert b.drafts is None
        assert a.drafts.accepted <= a.drafts.proposed


WINDOWS = {
    f"generated {first} to {end}": [pc.Add(ROW_D, pc.resid_post[1], pc.generated[first:end], scale=4.0)]
    for first, end in ((0, 1), (2, 5), (7, 8), (20, 31))
}


@pytest.mark.parametrize("program", PROGRAMS | WINDOWS)
def test_steps_that_are_scheduled_before_drafts_are_checked_are_planned_where_they_begin(
    pair, without_drafts, drafted, ahead, program
):
    check_alike(pair[0], runs_of(pair[1], (PROGRAMS | WINDOWS)[program]), without_drafts(program))
    assert sum(tokens for _, tokens in drafted) > 0


@pytest.mark.parametrize("program", ["logits", "generated 2 to 5"])
def test_and_would_be_wrong_where_the_scheduler_says(pair, without_drafts, ahead, program):
    ahead(False)
    ours = runs_of(pair[1], (PROGRAMS | WINDOWS)[program])
    with pytest.raises(AssertionError):
        check_alike(pair[0], ours, without_drafts(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_generated_and_captured_is_what_it_is_without_drafts(pair, without_drafts, drafted, program):
    ours = runs_of(pair[1], PROGRAMS[program])
    check_alike(pair[0], ours, without_drafts(program))
    turns, drafts = (sum(column) for column in zip(*drafted, strict=True))
    right = sum(len(run.token_ids) for run in ours) - turns  # at least: a chunk of a prompt is a turn without a token
    assert drafts > right > 0
    assert sum(run.drafts.accepted for run in ours) >= right
    assert sum(run.drafts.proposed for run in ours) <= drafts
    if program != "none":
        assert [run.token_ids for run in ours] != [run.token_ids for run in without_drafts("none")]


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
    lens = pc.Lens(pc.resid_post[1], top=3)
    parts = list(drafting.stream(PROMPTS[0], edits=edits[0], capture=lens, **LONG))
    assert [token for part in parts for token in part.token_ids] == ours[0].token_ids
    assert max(len(part.token_ids) for part in parts) > 1
    reads = [part.lens["resid_post[1]"] for part in parts]
    whole = plain.run(PROMPTS[0], edits=edits[0], capture=lens, **LONG).lens["resid_post[1]"]
    assert [at for read in reads for at in read.positions] == whole.positions
    assert np.abs(np.concatenate([read.logprobs for read in reads]) - whole.logprobs).max() < 1e-3


def test_probes_read_the_tokens_that_are_kept(pair):
    probes = [pc.Probe([ROW_D, -ROW_D], at=pc.resid_post[1], name="each"),
              pc.Probe(ROW_D, at=pc.resid_post[1], tokens=pc.generated, pool="mean", name="mean")]  # fmt: skip
    theirs, ours = (lm.run(PROMPTS, capture=probes, **LONG) for lm in pair)
    for a, b in zip(ours, theirs, strict=True):
        assert a.probe_positions("each") == b.probe_positions("each") == list(range(len(a.prompt_token_ids) + 31))
        for name in ("each", "mean"):
            assert torch.allclose(a.probes[name], b.probes[name], rtol=1e-4, atol=1e-4)


def test_features_are_of_the_tokens_that_are_kept(pair):
    rng, site = np.random.default_rng(2), pc.resid_post[1]
    sae = pc.SAE(rng.standard_normal((24, len(ROW_D))), np.zeros(24), np.zeros((24, len(ROW_D))), np.zeros(len(ROW_D)))
    lm = pair[1]
    lm.attach(sae, site, name="a")
    pooled = pc.Probe(ROW_D, at=site, tokens=pc.prompt[1:], pool="max", name="p")
    try:
        for run in lm.run(PROMPTS, capture=[pc.Features("a", top=5), pooled, site], **LONG):
            rows, read = run[site].numpy(), run.features["a"]
            assert read.positions == list(range(len(rows)))
            values = sae.encode(rows)
            assert read.values == pytest.approx(np.sort(values, 1)[:, ::-1][:, :5], rel=1e-4, abs=1e-4)
            assert np.take_along_axis(values, read.ids, 1) == pytest.approx(read.values, rel=1e-4, abs=1e-4)
            prompt = rows[1 : len(run.prompt_token_ids)]
            assert float(run.probes["p"][0]) == pytest.approx((prompt @ np.asarray(ROW_D)).max(), rel=1e-4, abs=1e-4)
    finally:
        lm.detach("a")


MORE = [RNG.integers(3, V, 6).tolist() * 4 for _ in range(6)]
WEIGHTS = np.random.default_rng(5).standard_normal((4, D)).astype(np.float32)
READ = pc.Probe(WEIGHTS, at=pc.resid_post[0], tokens=pc.generated, name="p")


@pytest.fixture(scope="module")
def rare(pair):
    """Conditions that few generated tokens meet."""
    runs = pair[0].run(MORE, capture=READ, **LONG)
    limits = np.quantile(np.concatenate([run.probes["p"].numpy() for run in runs]), 0.95, axis=0)
    return [READ[i] > float(limit) for i, limit in enumerate(limits)]


def test_a_rejected_draft_decides_nothing(pair, rare, monkeypatch):
    """From the token on where a condition first holds, beside requests without programs; twice, where the second time
    the prompts are cached. Some drafts that were rejected meet it, and would change what is generated."""
    edits = [[pc.When(each, pc.Scale(-1.0, pc.resid_post[1]), scope="onwards")] for each in rare] + [[]]
    prompts, edits = [each for each in MORE for _ in edits], edits * len(MORE)
    theirs, undone, unsettled = pair[0].run(prompts, edits=edits, **LONG), [], ProgramTable.unsettled

    def counted(table, *step):
        since = unsettled(table, *step)
        undone.append(np.count_nonzero((table.latches >= since[:, None]) & (table.latches < NEVER)))
        return since

    def alike() -> list[bool]:
        ours = pair[1].run(prompts, edits=edits, **LONG)
        return [(a.token_ids, a.acted) == (b.token_ids, b.acted) and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
                for a, b in zip(ours, theirs, strict=True)]  # fmt: skip

    monkeypatch.setattr(ProgramTable, "unsettled", counted)
    assert all(alike())
    assert all(alike())
    assert sum(undone) > 2
    first = [acted[0] - len(run.prompt_token_ids) for run in theirs for acted in run.acted.values() if acted]
    assert len(set(first)) > 5
    monkeypatch.setattr(ProgramTable, "unsettled", lambda *step: np.full_like(unsettled(*step), NEVER))
    assert not all(alike())


def test_blocks_that_conditions_edited_beside_drafts_are_not_reused(pair, rare, monkeypatch):
    """Unedited requests that go on with what was generated under a condition; without our part of the keys they would
    be poisoned."""

    def wrong(prompts: list[list[int]]) -> int:
        program = [pc.When(rare[0], pc.Scale(-1.0, pc.resid_post[1]), scope="onwards")]
        edited = pair[1].run(prompts, edits=program, **LONG)
        longer = [prompt + run.token_ids for prompt, run in zip(prompts, edited, strict=True)]
        theirs, ours = (lm.run(longer, max_tokens=4, logprobs=True, sampling={"ignore_eos": True}) for lm in pair)
        return sum(a.logprobs != pytest.approx(b.logprobs, abs=1e-4) for a, b in zip(ours, theirs, strict=True))

    assert not wrong(MORE)
    monkeypatch.setattr(core, "block_key", lambda bound, start, end, seen_whole: None)
    assert wrong([each[::-1] for each in MORE])


def test_a_run_ends_at_the_first_token_that_stays_where_a_condition_holds(pair, rare):
    wanted = {"capture": [pc.resid_post[1], pc.logits], **LONG}
    for each in rare:
        theirs, ours = (lm.run(MORE, stop_when=each, **wanted) for lm in pair)
        assert any(run.stop_reason for run in theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
            assert a.probe_positions("p") == b.probe_positions("p")
            for site in ("resid_post[1]", "logits"):
                assert a.positions(site) == b.positions(site)
                assert worst_row(flat(a[site]), flat(b[site])) <= 1e-4
    stream = pair[1].stream(MORE[0], stop_when=rare[0], **LONG)
    parts = [token for part in stream for token in part.token_ids]
    assert parts == stream.run.token_ids == pair[0].run(MORE[0], stop_when=rare[0], **LONG).token_ids


def test_the_probes_own_site_is_not_edited_from_a_token_on(pair):
    condition = pc.Probe(ROW_D, at=pc.resid_post[1], tokens=pc.generated, name="p") > 0
    with pytest.raises(pc.UnsupportedSite) as raised:
        pair[1].run(PROMPTS[0], max_tokens=2, edits=pc.When(condition, pc.Zero(pc.resid_post[1]), scope="onwards"))
    assert raised.value.path == "edits[0].edits[0].at"
    runs = [lm.run(PROMPTS[1], edits=pc.When(condition, pc.Zero(pc.resid_post[1])), **LONG) for lm in pair]
    assert runs[0].acted == runs[1].acted


def test_delimiters_are_found_in_the_prompt_alone(pair):
    opening = PROMPTS[0][1]
    inside = pc.between(opening, next(each for each in reversed(PROMPTS[0]) if each != opening))
    with pytest.raises(pc.PatchclampError, match="between"):
        pair[1].run(PROMPTS[0], max_tokens=2, edits=pc.Scale(0.2, pc.resid_post[1], inside))
    run = pair[1].run(PROMPTS[0], max_tokens=2, edits=pc.Scale(0.2, pc.resid_post[1], pc.prompt & inside))
    assert run.acted == {"edits[0]": run.select(pc.prompt & inside).tolist()}


def test_scores_are_refused(pair):
    """vLLM would stop: it takes the drafted rows for other requests'."""
    with pytest.raises(pc.ProgramError, match=r"score: .*speculative decoding"):
        pair[1].run(PROMPTS[0], max_tokens=1, score=[5, 6, 7])
    assert len(pair[1].run(PROMPTS[0], max_tokens=2, logprobs=True).logprobs) == 2


def test_code_is_refused(pair):
    _, drafting = pair
    edits = [[pc.Apply(lambda rows: rows, pc.resid_post[1])], PROGRAMS["generated"]]
    refused, other = drafting.run(PROMPTS[:2], edits=edits, **LONG)
    assert isinstance(refused.error, ProgramError)
    assert "Apply is not supported" in str(refused.error)
    assert other.error is None


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_images_are_refused_beside_a_model_that_drafts(method):
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method), device_config=SimpleNamespace(device_type="cpu")
    )
    program = SimpleNamespace(bound=SimpleNamespace(ops=()))
    for features, refused in (([], False), ([object()], method != "ngram")):
        request = SimpleNamespace(mm_features=features, sampling_params=SimpleNamespace(temperature=0.0))
        with pytest.raises(ProgramError, match="images") if refused else contextlib.nullcontext():
            _check_beside_drafts(config, request, program)


def test_sampling_is_refused_where_vllm_does_not_sample_of_the_model(pair):
    """Its CPU build loses the temperatures of drafted rows. If it does not any more, let programs be sampled."""
    _, drafting = pair
    refused, greedy = drafting.run(
        PROMPTS[:2], edits=PROGRAMS["generated"], max_tokens=3, sampling=[{"temperature": 0.5}, {"temperature": 0.0}]
    )
    assert isinstance(refused.error, ProgramError)
    assert "sampling and speculative decoding on a CPU" in str(refused.error)
    assert greedy.error is None
    temperatures, ends = torch.tensor([0.5, 0.7]), torch.tensor([2, 3], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 3)
    assert not torch.equal(expanded, torch.tensor([0.5, 0.5, 0.7]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_models_that_draft_are_not_edited_and_what_they_draft_for_is(method, tmp_path):
    """EAGLE's and MTP's look tokens up in the embedding of the model that is edited, and read its last stream."""
    with both(method, tmp_path) as made:
        unedited = lookups_of_the_drafter(made[1], method)
        for edits in (
            PROGRAMS["none"],
            PROGRAMS["logits"],
            PROGRAMS["the same run"],
            PROGRAMS["a condition from a token on"],
        ):
            runs_are_alike(made, edits)
        edited = runs_are_alike(made, [pc.Add(np.roll(ROW_D, 1), pc.embed), *PROGRAMS["generated"]])
        assert all(unedited)
        assert bool(unedited) == (method != "draft_model")
        if method == "draft_model":  # it drafts what the model says without edits
            assert all(run.drafts.accepted == run.drafts.proposed for run in runs_of(made[1], []))
            assert any(run.drafts.accepted < run.drafts.proposed / 2 for run in edited)


def lookups_of_the_drafter(lm: pc.LM, method: str) -> list[bool]:
    """Of each time that a drafter looks tokens up in the model's embedding: whether it finds rows of its weights."""
    runner = engine_core(lm).model_executor.driver_worker.worker.model_runner
    drafter, answers = runner.drafter, list[bool]()
    embedding = drafter.model.model.embed_tokens
    assert (embedding is runner.model.model.embed_tokens) == (method != "draft_model")
    if method == "draft_model":
        return answers
    propose = drafter.propose

    def watched(*args, **kwargs):
        hook = embedding.register_forward_hook(
            lambda module, args, rows: answers.append(torch.equal(rows, module.weight[args[0]]))
        )
        with hook:
            return propose(*args, **kwargs)

    drafter.propose = watched
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_two_workers_draft_as_one_does(method, tmp_path):
    with both(method, tmp_path, workers=2) as made:
        for edits in PROGRAMS.values():
            runs_are_alike(made, edits)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_adapters_beside_drafts(method, tmp_path):
    with both(method, tmp_path, enable_lora=True, max_lora_rank=16, max_num_seqs=4) as made:
        own = adapter(tmp_path / "model", tmp_path / "adapter", 1)
        for edits in PROGRAMS.values():
            runs_are_alike(made, edits, lora=[None, str(own), str(own)])
        assert runs_of(made[1], [], lora=str(own))[1].token_ids != runs_of(made[1], [])[1].token_ids


@pytest.mark.slow
def test_blocks_that_were_cached_beside_drafts_are_as_without(tmp_path):
    """EAGLE has vLLM compute a prompt's last cached block again; edits are part of a block's key as ever."""
    with both("eagle", tmp_path) as made:
        for _ in range(2):
            for edits in (PROGRAMS["none"], [pc.Add(ROW_D, pc.resid_post[1], pc.prompt[20:30])]):
                theirs, ours = (lm.run(PROMPTS[2] * 2, edits=edits, **LONG) for lm in made)
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (ours.cached_tokens, theirs.cached_tokens) == (32, 64)


def test_preempted_requests_with_drafts_decide_the_same(pair, rare, tmp_path):
    """Requests are thrown out between drafts, and computed again with what they generated."""
    edits = [[pc.When(each, pc.Scale(-1.0, pc.resid_post[1]), scope="onwards")] for each in rare]
    prompts, edits = [each for each in MORE for _ in edits], edits * len(MORE)
    theirs = pair[0].run(prompts, edits=edits, **LONG)
    with both("ngram", tmp_path, num_gpu_blocks_override=6) as (_, lm):
        ours = lm.run(prompts, edits=edits, **LONG)
        assert lm.engine.status()["preemptions"] > 0
        assert sum(run.drafts.proposed - run.drafts.accepted for run in ours) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_ids, a.acted) == (b.token_ids, b.acted)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_probes_of_every_request_have_no_scores_of_rejected_drafts(tmp_path, inspected_here):
    weights = RNG.standard_normal((2, D)).astype(np.float32)
    probes = [pc.Probe(weights, pc.resid_post[2], name="p"), pc.Probe(weights[:1], pc.resid_post[0:2], name="q")]
    same = [pc.Probe(each.weight, each.at, name=f"own.{each.name}") for each in probes]
    with both("ngram", tmp_path, probes=probes) as (_, lm):
        runs, others = lm.run(PROMPTS, **LONG), lm.run(PROMPTS, **LONG, capture=same)
        drafts = [run.drafts for run in runs]
        assert 0 < sum(each.accepted for each in drafts) < sum(each.proposed for each in drafts)
        for run, other in zip(runs, others, strict=True):
            assert run.token_ids == other.token_ids
            for each in probes:
                found, expected = run.probes[each.name], other.probes[f"own.{each.name}"]
                np.testing.assert_allclose(found, expected, atol=1e-4)
