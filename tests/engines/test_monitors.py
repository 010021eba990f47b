"""Always-on probes (`pc.LM(probes=)`): the scores that a program's probes give, for each token, whatever the
scheduler does with the request; cached blocks have those of their tokens."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

import patchclamp as pc
from patchclamp.engines.base import Monitor
from patchclamp.engines.vllm.compat.core import SCORES, _slot_scores
from patchclamp.engines.vllm.monitors import MonitorLog
from patchclamp.errors import EngineError, PatchclampError

from .conftest import TINY
from .test_admission import engine_core

D = TINY["hidden_size"]
OPTIONS = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8,
           "max_num_batched_tokens": 40, "block_size": 32, "prove": False}  # fmt: skip
FEW_BLOCKS = {"num_gpu_blocks_override": 10}  # so that requests are preempted
DRAWN = np.random.default_rng(0)


def probe(name: str, at: pc.Site, outputs: int, **options) -> pc.Probe:
    weight, bias = DRAWN.standard_normal((outputs, D)) / D**0.5, DRAWN.standard_normal(outputs)
    return pc.Probe(weight.astype(np.float32), at, bias=bias.astype(np.float32), name=name, **options)


PROBES = [
    probe("late", pc.resid_post[2], 1, activation="sigmoid"), probe("layers", pc.resid_post[0:3], 3),
    probe("mlp", pc.mlp_out[1], 2, activation="softmax"), probe("twin", pc.resid_post[2], 2),
    probe("norm", pc.final_norm, 1, activation="relu"),
]  # fmt: skip
SAME = [pc.Probe(each.weight, each.at, bias=each.bias, activation=each.activation, name=f"own.{each.name}")
        for each in PROBES]  # fmt: skip


@pytest.fixture(scope="module")
def lm(tiny):
    with pc.LM(tiny, engine="vllm", probes=PROBES, **OPTIONS, **FEW_BLOCKS) as made:
        yield made


@pytest.fixture(scope="module")
def hub(tiny):
    options = {"dtype": "float32", "skip_tokenizer_init": True, "prove": False}
    with pc.LM(tiny, engine="transformers", probes=PROBES, **options) as made:
        yield made


@pytest.fixture(params=["lm", "hub"])
def either(request):
    """A model with always-on probes, on each engine."""
    return request.getfixturevalue(request.param)


def prompts(count: int, shared: int = 70, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings of different lengths, after one of a single token."""
    rng = np.random.default_rng(seed)
    start = rng.integers(5, 500, shared).tolist()
    return [[7]] + [
        start[: int(rng.integers(1, shared + 1))] + rng.integers(5, 500, int(rng.integers(1, 30))).tolist()
        for _ in range(count - 1)
    ]


def check(runs: list[pc.Run], others: list[pc.Run]) -> None:
    """Compare the scores of runs with those of probes in the programs of other runs of the same prompts."""
    for run, other in zip(runs, others, strict=True):
        assert run.token_ids == other.token_ids
        for each in PROBES:
            found, expected = np.asarray(run.probes[each.name]), np.asarray(other.probes[f"own.{each.name}"])
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
            assert run.probe_positions(each.name) == other.probe_positions(f"own.{each.name}")
            assert len(run.probe_positions(each.name)) == len(run.prompt_token_ids) + len(run.token_ids) - 1


def test_scores_are_those_of_a_programs_probes(lm):
    before = lm.engine.status()["preemptions"]
    for _ in range(2):  # the second time from the cache
        given = prompts(12)
        runs = lm.run(given, max_tokens=20)
        others = lm.run(given, max_tokens=20, capture=SAME)
        check(runs, others)
        check(others, others)  # which have both
    assert any(run.cached_tokens for run in runs)
    assert lm.engine.status()["preemptions"] > before
    rows = lm.probes(runs)
    assert set(rows) == {each.name for each in PROBES}
    assert np.array_equal(rows["mlp"].values, np.concatenate([run.probes["mlp"] for run in runs]))
    assert rows["mlp"].run.tolist() == [i for i, run in enumerate(runs) for _ in run.probe_positions("mlp")]


@pytest.mark.parametrize("tokens", [1, 2])
def test_scores_of_few_tokens_and_of_samples(lm, tokens):
    given, options = prompts(6, seed=3), {"max_tokens": tokens, "sampling": {"n": 3, "temperature": 1.0, "seed": 5}}
    several = zip(lm.run(given, **options), lm.run(given, **options, capture=SAME), strict=True)
    for runs, others in several:
        check(runs, others)


def test_an_edit_changes_the_scores_of_its_own_request_only(lm):
    prompt = prompts(2, seed=4)[1] * 2
    edit = pc.Add(DRAWN.standard_normal(D), at=pc.resid_post[0], tokens=pc.every[5:])
    for _ in range(2):
        plain, edited = lm.run(prompt, max_tokens=4), lm.run(prompt, max_tokens=4, edits=edit)
        check([plain, edited], [lm.run(prompt, max_tokens=4, edits=ops, capture=SAME) for ops in ((), edit)])
        differs = np.asarray(plain.probes["late"])[: len(prompt)] != np.asarray(edited.probes["late"])[: len(prompt)]
        assert not differs[:5].any()
        assert differs[5:].all()


def test_cached_blocks_have_the_scores_of_their_tokens(lm):
    """The scores of a cached prefix come from its slots of the cache, and those of other tokens from nowhere else."""
    prompt = np.random.default_rng(9).integers(5, 500, 100).tolist()
    first = lm.run(prompt, max_tokens=2)
    core = engine_core(lm)
    pool, scores = core.scheduler.kv_cache_manager.block_pool, core.patchclamp._scores
    cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
    free = [block.block_id for block in pool.blocks if block.block_id not in cached]
    slots = scores.by_slot.reshape(len(pool.blocks), 32, -1)
    slots[free] = np.nan
    again = lm.run(prompt, max_tokens=2)
    assert again.cached_tokens == 96
    np.testing.assert_allclose(again.probes["late"], first.probes["late"], atol=1e-5)
    slots[sorted(cached)] += 1.0
    moved = lm.run(prompt, max_tokens=2)
    difference = np.asarray(moved.probes["twin"]) - np.asarray(first.probes["twin"])
    np.testing.assert_allclose(difference[:96], 1.0, atol=1e-5)
    np.testing.assert_allclose(difference[96:], 0.0, atol=1e-5)
    lm.run([[int(token)] * 90 for token in range(5, 17)], max_tokens=1)  # so that no other test finds these blocks


def test_parts_of_a_stream_have_the_scores_that_are_known(lm):
    prompt = prompts(3, seed=6)[2]
    run = lm.run(prompt, max_tokens=9)
    parts = list(lm.stream(prompt, max_tokens=9))
    positions = [position for part in parts for position in part.scores["late"].positions]
    assert positions == run.probe_positions("late")
    assert parts[0].scores["late"].positions == list(range(len(prompt)))
    assert all(part.scores["late"].positions == [len(prompt) + i] for i, part in enumerate(parts[1:]))
    for name, axis in (("twin", 0), ("layers", 1)):
        joined = np.concatenate([part.scores[name].scores for part in parts], axis)
        np.testing.assert_allclose(joined, run.probes[name], atol=1e-5)


def test_an_abandoned_request_leaves_nothing_behind(lm):
    scores = engine_core(lm).patchclamp._scores
    for count in (1, 3):
        stream = lm.stream(prompts(2, seed=7)[1], max_tokens=150)
        for _ in range(count):
            next(iter(stream))
        stream.close()
        del stream  # its error has a frame that refers to the request
    lm.run([5, 6], max_tokens=2)
    lm.engine.status()
    assert (scores._lanes, scores._steps, scores._unsent) == ({}, {}, {})
    gc.collect()
    assert len(lm.engine.monitor_log.runs) == 0


def test_each_token_of_a_session_is_sent_once(lm):
    """A session goes on after an output with a finish reason, and so do its scores."""
    prompt, log, told = prompts(2, seed=8)[1], MonitorLog(lm.engine.monitors), list[tuple[int, np.ndarray]]()
    log.watch = lambda names, firsts, counts, products: told.append((int(firsts[0]), products))

    def job() -> list[int]:
        core, tokens = engine_core(lm), list(prompt)

        for ids in ([], [9, 8, 7], [6, 5]):
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            asked = EngineCoreRequest(
                "session", ids or prompt, None, params, None, 0.0, None, None, None, resumable=True
            )
            core.add_request(*core.preprocess_add_request(asked))
            tokens += ids
            for _ in range(50):
                [output] = [each for part in (core.step_fn()[0] or {}).values() for each in part.outputs] or [None]
                if output is None:
                    continue
                log.arrived(output.kv_transfer_params[SCORES])
                log.file(["session"], lambda name: None)
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    tokens.pop()  # vLLM drops the last token, which was not computed
                    break
        core.abort_requests(["session"])
        while core.scheduler.has_requests():
            core.step_fn()
        return tokens

    tokens = lm.engine._call(job).result(60)
    assert [first for first, _ in told] == np.cumsum([0, *(len(rows) for _, rows in told)])[:-1].tolist()
    expected = lm.run(tokens, max_tokens=1)
    found = lm.engine.monitors[0].scores(np.concatenate([rows for _, rows in told]))
    np.testing.assert_allclose(found, expected.probes["late"], atol=1e-5)
    assert engine_core(lm).patchclamp._scores._lanes == {}


@pytest.mark.slow
def test_a_core_in_another_process(tiny, lm):
    """Where outputs wait for verdicts on programs while their blocks get other tokens; and a lens reads rows there."""
    with pc.LM(tiny, engine="vllm", probes=PROBES, multiprocess_mode=True, **OPTIONS, **FEW_BLOCKS) as apart:
        given = prompts(12)
        both = apart.run(given * 2, max_tokens=20, capture=[()] * 12 + [SAME] * 12)
        check(both[:12], both[12:])
        check(both[12:], both[12:])
        assert apart.engine.status()["preemptions"] > 0
        lens = pc.Lens(pc.resid_post[1:3], top=5)
        for run, other in zip(*(each.run(given[:3], max_tokens=4, capture=lens) for each in (apart, lm)), strict=True):
            read, expected = run.lens[pc.resid_post], other.lens[pc.resid_post]
            assert (read.positions, read.ids.tolist()) == (expected.positions, expected.ids.tolist())
            np.testing.assert_allclose(read.logprobs, expected.logprobs, atol=1e-4)


def test_on_transformers_they_are_part_of_every_program(hub, lm):
    given = prompts(4)
    runs, others = hub.run(given, max_tokens=4), lm.run(given, max_tokens=4)
    for run, other in zip(runs, others, strict=True):
        for each in PROBES:
            np.testing.assert_allclose(run.probes[each.name], other.probes[each.name], atol=1e-4)


def test_scores_of_many_runs_are_those_of_each_also_at_several_layers(either):
    runs = either.run(prompts(5), max_tokens=3)
    found = either.probes(runs)
    assert found.keys() == {each.name for each in PROBES}
    for name, rows in found.items():
        for i, run in enumerate(runs):
            values = rows.values[rows.run == i]
            np.testing.assert_allclose(
                values.swapaxes(0, 1) if name == "layers" else values, run.probes[name], atol=1e-6
            )
    assert found["layers"].values.shape == (len(found["late"].run), 3, 3)
    assert len(found["layers"].to_frame()) == len(found["late"].run)


def test_other_probes_of_a_loaded_engine_are_refused(lm):
    with pytest.raises(EngineError, match="probes") as caught:
        pc.LM("", lm.engine, probes=[probe("other", pc.resid_post[0], 1)])
    assert caught.value.path == "probes"


def joined(parts: list[pc.Part], name: str) -> tuple[list[int], np.ndarray]:
    """The positions and scores of a probe in the parts of a stream."""
    read = [part.scores[name] for part in parts]
    return [at for each in read for at in each.positions], np.concatenate([each.scores for each in read], -2)


@pytest.mark.parametrize("stop", ["own.late", "late"])
def test_scores_end_with_a_run_that_a_condition_ended(either, stop):
    """Also where the condition is on an always-on probe itself."""
    late, highest = PROBES[0], dict[int, pc.Run]()  # by the token whose score is the last highest one so far
    for run in either.run(prompts(12, seed=10)[1:], max_tokens=24):
        scores = np.asarray(run.probes["late"])[len(run.prompt_token_ids) :, 0]
        highest[int(np.flatnonzero(np.maximum.accumulate(scores) == scores)[-1])] = run
    token = sorted(highest)[len(highest) // 2]
    whole = highest[token]
    prompt, scores = whole.prompt_token_ids, np.asarray(whole.probes["late"])[len(whole.prompt_token_ids) :, 0]
    threshold = float(np.sort(scores[: token + 1])[-2:].mean())
    condition = pc.Probe(late.weight, late.at, bias=late.bias, activation="sigmoid", name=stop) > threshold
    run = either.run(prompt, max_tokens=24, stop_when=condition)
    stream = either.stream(prompt, max_tokens=24, stop_when=condition)
    parts = list(stream)
    assert len(scores) > token + 1 > 1  # it goes on without the condition
    assert run.token_ids == stream.run.token_ids == whole.token_ids[: token + 1]
    length = len(prompt) + token + 1
    for each in PROBES:
        expected = np.asarray(whole.probes[each.name])[..., :length, :]
        for ended in (run, stream.run):
            assert ended.probe_positions(each.name) == list(range(length))
            np.testing.assert_allclose(ended.probes[each.name], expected, atol=1e-5)
        positions, found = joined(parts, each.name)
        assert positions == list(range(length))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert {len(rows.run) for rows in either.probes([run]).values()} == {length}


def test_parts_have_the_scores_beside_other_readouts(either):
    prompt = prompts(3, seed=6)[2]
    own = pc.Probe(PROBES[0].weight, pc.resid_post[0], name="own")
    for capture in ([own], [pc.Lens(pc.resid_post[1], top=2)], [own, *PROBES[:2]]):
        stream = either.stream(prompt, max_tokens=6, capture=capture)
        parts = list(stream)
        names = {each.name for each in [*PROBES, *(each for each in capture if isinstance(each, pc.Probe))]}
        assert {frozenset(part.scores) for part in parts} == {frozenset(names)}
        for name in names:
            positions, found = joined(parts, name)
            assert positions == stream.run.probe_positions(name) == list(range(len(prompt) + 5))
            np.testing.assert_allclose(found, stream.run.probes[name], atol=1e-5)


def test_a_program_cannot_give_another_probe_the_name_of_an_always_on_one(either):
    late = PROBES[0]
    other = pc.Probe(-np.asarray(late.weight.rows()), late.at, bias=late.bias, activation="sigmoid", name="late")
    mean = pc.Probe(late.weight, late.at, bias=late.bias, activation="sigmoid", pool="mean", name="late")
    edit = pc.Add(np.ones(D), at=pc.resid_post[2])
    for path, call in {
        "capture[0].name": {"capture": [other]},
        "capture[1].name": {"capture": [pc.resid_post[0], mean]},
        "edits[0].name": {"edits": [pc.When(other > 0.5, [edit])]},
        "stop_when.name": {"stop_when": other > 0.5},
    }.items():
        for run in (either.run, either.stream):
            with pytest.raises(pc.ProgramError) as raised:
                run([5, 6, 7], max_tokens=2, **call)
            assert raised.value.path == path
    with pytest.raises(pc.ProgramError) as raised:
        either.run([[5, 6, 7]] * 2, max_tokens=2, stop_when=[None, other > 0.5])
    assert raised.value.path == "stop_when[1].name"
    plain, both = either.run([5, 6, 7], max_tokens=2), either.run([5, 6, 7], max_tokens=2, capture=[late])
    np.testing.assert_allclose(both.probes["late"], plain.probes["late"], atol=1e-5)
    assert (list(both.probes).count("late"), both.probe_positions("late")) == (1, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([probe("p", pc.resid_post[0], 1, pool="mean")], {}, "pool"),
        ([probe("p", pc.resid_post[0], 1, tokens=pc.generated)], {}, "every token"),
        ([pc.Probe(np.ones(D + 1), pc.resid_post[0], name="p")], {}, rf"\[k, {D}\]"),
        ([probe("p", pc.resid_post[3], 1)], {}, "layer"),
        ([probe("p", pc.logits, 1)], {}, r"weight|per-token"),
        ([probe("p", pc.resid_post[0], 1), probe("p", pc.resid_post[1], 1)], {}, "'p'"),
        ([pc.Probe(np.ones(D), pc.z[0], name="p")], {"tensor_parallel_size": 2}, "sharded"),
        ([3], {}, "expected a Probe"),
        (PROBES, {"numerics": "stock"}, "stock"),
    ],
)
def test_probes_that_cannot_score_every_token_are_refused(tiny, given, options, message):
    with pytest.raises(PatchclampError, match=message):
        pc.LM(tiny, engine="vllm", probes=given, **OPTIONS, **options)


def test_a_model_whose_cache_keeps_only_the_end_of_a_prefix_is_refused():
    window = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)
    groups = [SimpleNamespace(kv_cache_spec=window)]
    monitors = [Monitor(PROBES[0], None, (0,), (0,))]

    def core(caches: bool) -> SimpleNamespace:
        config = SimpleNamespace(
            additional_config=SimpleNamespace(monitors=monitors), model_config=SimpleNamespace(max_model_len=64),
            cache_config=SimpleNamespace(enable_prefix_caching=caches),
        )  # fmt: skip
        cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=4)
        return SimpleNamespace(vllm_config=config, scheduler=SimpleNamespace(kv_cache_config=cache))

    with pytest.raises(EngineError, match="enable_prefix_caching=False"):
        _slot_scores(core(True))
    assert _slot_scores(core(False))[0] is not None
