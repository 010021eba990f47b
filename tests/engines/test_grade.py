"""Programs graded in batches of the engine's own equal the same programs as requests."""

from __future__ import annotations

import contextlib
import gc
import threading
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import patchclamp as pc
from patchclamp.engines.vllm import frontend
from patchclamp.engines.vllm.bulk import LATER, BatchResult
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.runner import BatchModel, refusal_of
from patchclamp.errors import EngineError, ProgramError, TokensError
from patchclamp.lm import LM
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs

from ..conftest import TOKENS
from ..models import of_family
from .conftest import CHUNKED, VLLM, room_of, without_amx
from .test_families import EAGER, IDS, OPTIONS

PROMPT = "When John and Mary went to the store, John gave a drink to"
OTHER = "When Mary and John went to the park, Mary took a picture of"
CAPTURED = ("resid_pre", "resid_post", "attn_out", "mlp_out", "z", "v")
SCORES = [" Mary", " John", " Mary and John", [5, 7, 11]]


@pytest.fixture(scope="module")
def engine(narrow) -> LM:
    lm = narrow.get("vllm", "float32")
    lm.grade(PROMPT, [], score=[5])  # proves it
    return lm


@pytest.fixture
def lm(engine) -> Iterator[LM]:
    """The engine, which must have as much to lease after a test as before."""
    before = room_of(engine)
    yield engine
    assert room_of(engine) == before


def as_requests(lm: LM, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(LM, "batch_refusal", property(lambda lm: "asked for"))
        return lm.grade(*args, **kwargs)


def random_programs(lm: LM, run: pc.Run, length: int, draw: np.random.Generator, count: int) -> list[Any]:
    """Programs of one to three random edits, at sites that the model has; some programs are empty."""
    names = sorted({ref.name for ref in lm.sites.refs()}.intersection(CAPTURED))
    vector = draw.standard_normal(lm.model.d_model).astype(np.float32)

    def edit() -> Any:
        layer, name = int(draw.integers(lm.model.layers)), str(draw.choice(names))
        at = pc.Site(name, layer)
        begin, end = np.sort(draw.integers(0, length + 1, 2)).tolist()
        tokens = pc.every[begin : max(end, begin + 1) if begin < length else length]
        tokens = pc.every[int(draw.integers(length))] if begin >= length else tokens
        stream = pc.resid_post[layer]
        edits = [
            lambda: pc.Replace(pc.From(run, at, tokens), at=at, tokens=tokens, alpha=float(draw.choice([1.0, 0.5]))),
            lambda: pc.Zero(at=at, tokens=tokens),
            lambda: pc.Add(vector, at=stream, tokens=tokens, scale=float(draw.normal())),
            lambda: pc.Ablate(vector, at=stream, tokens=tokens),
            lambda: pc.Clamp(vector, at=stream, tokens=tokens, low=-1.0, high=1.0),
            lambda: pc.Noise(0.3, at=pc.embed, tokens=tokens, seed=int(draw.integers(100))),
            lambda: pc.Ablate(vector, at=stream, tokens=tokens, strength=0.5),
            lambda: pc.Replace(pc.From(run, at, tokens), at=at, tokens=tokens, basis=np.resize(vector, run[at][0].numel())),
            lambda: pc.Replace(vector, at=stream, tokens=tokens, mask=(draw.random(lm.model.d_model) < 0.5).astype("f4")),
            lambda: pc.Scale(float(draw.random()), at=pc.logits, tokens=pc.every[length - 1]),
            lambda: pc.Add(vector, at=stream, tokens=tokens, scale=float(draw.random()), norm="match"),
            lambda: pc.Rotate([vector, vector[::-1]], float(draw.normal()) * 90, at=stream, tokens=tokens),
        ]  # fmt: skip
        return edits[int(draw.integers(len(edits)))]()

    return [[edit() for _ in range(int(draw.integers(4)))] for _ in range(count)]


def check_equal(one: pc.Grades, other: pc.Grades, most: float = 1e-4) -> None:
    assert (one.route, other.route) == ("bulk", "requests")
    assert one.errors.keys() == other.errors.keys()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=most)
    np.testing.assert_allclose(one.baseline, other.baseline, atol=most)
    if one.kl is not None:
        np.testing.assert_allclose(one.kl, other.kl, atol=most)
    np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=most)


@pytest.mark.parametrize("warm", [False, True])
def test_random_programs_equal_requests(lm, monkeypatch, warm):
    draw, length = np.random.default_rng(3), 40
    ids, other = (draw.integers(100, TOKENS, length).tolist() for _ in range(2))
    run = lm.run(other, max_tokens=1, capture=[pc.Site(name) for name in CAPTURED])
    programs = random_programs(lm, run, length, draw, 32)
    asked: Any = {"score": SCORES, "kl": True, "top": 4}
    cached = lm.run([ids] * 2, max_tokens=1)[1].cached_tokens if warm else lm.engine._engine.reset_prefix_cache()
    assert cached == (VLLM["block_size"] if warm else True)
    grades = lm.grade(ids, programs, **asked)
    check_equal(grades, as_requests(lm, monkeypatch, ids, programs, **asked))
    moved = np.abs(grades.logprobs - grades.baseline).max(1)
    assert np.count_nonzero(moved > 1e-3) > 16
    empty = [i for i, program in enumerate(programs) if not program]
    assert empty
    np.testing.assert_allclose(grades.logprobs[empty], np.tile(grades.baseline, (len(empty), 1)), atol=1e-5)
    assert (grades.kl[empty] < 1e-6).all()
    assert not lm.engine.status()["vectors"]


def test_in_bf16_cells_are_as_far_from_requests_as_unedited_ones(narrow, monkeypatch):
    """The noise floor: how far unedited cells, which begin where edited ones do, differ over batches of several sizes,
    and from the same prompt as requests."""
    lm, draw = narrow.get("vllm", "bfloat16"), np.random.default_rng(7)
    ids, other, scores = (draw.integers(100, TOKENS, size).tolist() for size in (75, 75, 4))
    run = lm.run(other, max_tokens=1, capture=[pc.Site(name) for name in CAPTURED])
    edited = [program for program in random_programs(lm, run, 75, draw, 32) if program]
    programs = [each for program in edited for each in (program, [])]
    floor, cells = [np.zeros((0, 4))], list[np.ndarray]()
    for rows in (64, 1000):
        monkeypatch.setattr(lm.engine, "_batch_rows", rows)
        grades = lm.grade(ids, programs, score=scores)
        assert (grades.route, grades.errors) == ("bulk", {})
        floor += [grades.logprobs[1::2], grades.baseline[None]]
        cells.append(grades.logprobs[::2])
    for count in (1, 7, 20):
        runs = lm.run([ids] * count, max_tokens=1, score=scores)
        floor.append(np.array([[run.scores[token] for token in scores] for run in runs], np.float32))
    noise = float(np.ptp(np.concatenate(floor), axis=0).max())
    assert noise < 0.1
    requests = as_requests(lm, monkeypatch, ids, edited, score=scores).logprobs
    for found in cells:
        assert np.abs(found - requests).max() <= noise
    assert np.count_nonzero(np.abs(requests - grades.baseline).max(1) > max(noise, 1e-2)) > 16


def test_kl_is_that_of_whole_distributions(lm):
    vector = np.random.default_rng(0).standard_normal(lm.model.d_model).astype(np.float32)
    edits = [pc.Add(vector, at=pc.resid_post[2], scale=4.0)]
    grades = lm.grade(PROMPT, [edits], kl=True)
    rows = [np.asarray(lm.run(PROMPT, max_tokens=1, edits=each, capture=[pc.logits])[pc.logits], np.float64)[-1]
            for each in ([], edits)]  # fmt: skip
    log_p, log_q = (row - np.logaddexp.reduce(row) for row in rows)
    assert grades.kl[0] == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(), abs=1e-4)
    assert grades.kl[0] > 0.01
    assert grades.logprobs.shape == (1, 0)


def test_a_score_of_several_tokens_is_their_sum(lm):
    ids = lm.tokens(PROMPT)
    answer = lm.tokenizer.bare(" Mary and John")
    assert len(answer) == 3
    edits = [pc.Scale(0.5, at=pc.resid_post[1], tokens=pc.every[4:8])]
    grades = lm.grade(ids, [edits], score=[answer])
    each = [lm.run([*ids, *answer[:i]], max_tokens=1, edits=edits, score=[token]).scores[token]
            for i, token in enumerate(answer)]  # fmt: skip
    assert grades.logprobs[0, 0] == pytest.approx(sum(each), abs=1e-4)


def test_batches_of_numbers_that_are_none_are_not_used(lm, monkeypatch):
    """The proof that compares batches with requests must not pass with NaN."""
    monkeypatch.setattr(lm.engine, "batch_difference", None)
    logprobs = BatchModel.logprobs
    monkeypatch.setattr(BatchModel, "logprobs", lambda *args: logprobs(*args) * float("nan"))
    assert "nan" in lm.grade(PROMPT, [[]], score=[5]).route_reason
    monkeypatch.undo()
    assert np.isfinite(lm.grade(PROMPT, [[]], score=[5]).logprobs).all()


def test_edits_after_the_prompt(lm, monkeypatch):
    edits = [pc.Scale(0.2, at=pc.resid_post[1], tokens=pc.generated)]
    grades = lm.grade(PROMPT, [edits], score=[" Mary and John"])
    assert abs(grades.logprobs[0, 0] - grades.baseline[0]) > 1e-3
    check_equal(grades, as_requests(lm, monkeypatch, PROMPT, [edits], score=[" Mary and John"]))
    with pytest.raises(TokensError, match="generated") as caught:  # no token after the prompt is computed
        lm.grade(PROMPT, [edits], score=[" Mary"])
    assert caught.value.path == "programs[0].edits[0].tokens"
    with pytest.raises(pc.UnsupportedSite) as caught:
        lm.grade([PROMPT, OTHER], [[], [[], pc.Zero(pc.mlp_out[99])]], score=[5])
    assert caught.value.path == "prompt 1.programs[1].edits[0].at"


def test_conditions_on_tokens(lm, monkeypatch):
    token = lm.tokenizer.bare(" John")[0]
    programs = [[pc.Scale(0.0, at=pc.resid_post[1], tokens=pc.token(token))], [pc.Zero(pc.mlp_out[2], pc.every[3])]]
    grades = lm.grade(PROMPT, programs, score=[" Mary"])
    check_equal(grades, as_requests(lm, monkeypatch, PROMPT, programs, score=[" Mary"]))
    assert (np.abs(grades.logprobs - grades.baseline) > 1e-4).all()


def test_a_cell_that_overflows_fails_alone(lm, monkeypatch):
    bad = [pc.Scale(3e38, at=pc.resid_post[1]), pc.Scale(3e38, at=pc.resid_post[1])]
    programs = [[], bad, [pc.Zero(at=pc.mlp_out[2])]]
    asked: Any = {"score": [" Mary"], "kl": True, "top": 2}
    grades = lm.grade(PROMPT, programs, **asked)
    check_equal(grades, as_requests(lm, monkeypatch, PROMPT, programs, **asked))
    assert list(grades.errors) == [1]
    assert "finite" in str(grades.errors[1])
    assert np.isnan([grades.logprobs[1, 0], grades.kl[1], grades.top_logprobs[1, 0]]).all()
    assert np.isfinite(grades.logprobs[[0, 2]]).all()


def test_several_prompts_share_batches(lm, monkeypatch):
    prompts = [PROMPT, "The capital of France is", [5]]
    programs = [[[pc.Zero(at=pc.mlp_out[i])] for i in range(3)], [pc.Zero(at=pc.attn_out[1])], []]
    grades = lm.grade(prompts, programs, score=[" Paris", [7, 9]], kl=True)
    assert [len(each.logprobs) for each in grades] == [3, 1, 0]
    for one, other in zip(grades, as_requests(lm, monkeypatch, prompts, programs, score=[" Paris", [7, 9]], kl=True),
                          strict=True):  # fmt: skip
        check_equal(one, other)


def test_each_prompt_has_its_own_programs(lm):
    """Prompts of one length, whose programs differ: as runs, which bind them separately."""
    prompts = [list(range(5, 17)), list(range(40, 52))]
    programs = [[[pc.Scale(-1.5 * (i + 1), at=pc.resid_post[1], tokens=[position])] for position in range(12)]
                for i in range(2)]  # fmt: skip
    for prompt, grades, of in zip(prompts, lm.grade(prompts, programs, score=[7, 9]), programs, strict=True):
        runs = [lm.run(prompt, edits=edits, score=[7, 9], max_tokens=1) for edits in of]
        expected = [[run.scores[7], run.scores[9]] for run in runs]
        np.testing.assert_allclose(grades.logprobs, expected, atol=1e-4)
        assert np.abs(grades.logprobs - grades.baseline).max(1).min() > 1e-3


def test_programs_that_run_as_requests(lm):
    """They alone do; each program is told once."""
    same_run = [pc.Replace(pc.SameRun(pc.resid_post[0]), at=pc.resid_post[3])]
    asked: Any = {"score": [" Mary", " Mary and John"], "kl": True, "top": 2}
    alone = lm.grade(PROMPT, [same_run], **asked)
    assert (alone.route, alone.route_reason) == ("requests", "values of the same run")
    run = lm.run(PROMPT, max_tokens=1, edits=same_run, score=[" Mary"])
    assert alone.logprobs[0, 0] == pytest.approx(next(iter(run.scores.values())), abs=1e-5)
    others = [[pc.Zero(at=pc.mlp_out[i])] for i in range(3)]
    expected = lm.grade(PROMPT, others, **asked)
    mixed, rest = lm.grade([PROMPT, OTHER], [[same_run, *others[:2], same_run, others[2]], others], **asked)
    assert (mixed.route, mixed.route_reason) == ("bulk", "values of the same run")
    assert (rest.route, rest.route_reason) == ("bulk", "")
    for name in ("logprobs", "kl", "top_logprobs"):
        of_each = [getattr(grades, name) for grades in (mixed, expected, alone)]
        np.testing.assert_allclose(of_each[0][[1, 2, 4]], of_each[1], atol=1e-4)
        np.testing.assert_allclose(of_each[0][[0, 3]], of_each[2][[0, 0]], atol=1e-4)
    told: list[int] = []
    job = lm.grade_job(lm.tokens(PROMPT), [*others, same_run], [[((), 5)]])
    lm.graded([job], lambda i, grades, which: told.extend(which))
    assert sorted(told) == [0, 1, 2, 3]
    with pytest.raises(pc.CapacityError, match="same run"):
        lm.graded([job], route="bulk")


def test_other_requests_are_unaffected(lm):
    """Requests that run meanwhile get the same answers, and the grades are the same as alone."""
    programs = [[pc.Zero(at=pc.Site(name, layer))] for name in ("mlp_out", "attn_out") for layer in range(8)] * 5
    asked: Any = {"max_tokens": 8, "logprobs": True, "sampling": {"ignore_eos": True},
                  "edits": [pc.Scale(0.9, at=pc.resid_post[2])]}  # fmt: skip
    alone, expected = lm.grade(PROMPT, programs, score=[" Mary"]), lm.run(OTHER, **asked)
    found: list[pc.Grades] = []
    thread = threading.Thread(target=lambda: found.append(lm.grade(PROMPT, programs, score=[" Mary"])))
    thread.start()
    runs = []
    while thread.is_alive():
        runs.append(lm.run(OTHER, **asked))
    thread.join()
    assert runs
    for run in runs:
        assert run.token_ids == expected.token_ids
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(found[0].logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize("share", [0.4, 2.0])
def test_batches_leave_time_to_requests(lm, monkeypatch, share):
    """Beside a request, the engine steps after each batch for as long as `batch_share` says."""
    limits = configuration.enabled(lm.engine.config)["limits"]
    assert limits["batch_share"] == 0.4  # the default
    monkeypatch.setitem(limits, "batch_share", share)
    waits: list[float] = []
    due: list[float] = []
    stock = lm.engine._grade_together

    def watched(*args: Any) -> Iterator[Any]:
        calls, found = stock(*args), None
        with contextlib.suppress(StopIteration):
            while True:
                verb, asked = calls.send(found)
                found = yield verb, asked
                if verb == "wait":
                    waits.append(asked[0])
                elif verb == "run":
                    result = msgspec.msgpack.decode(found[0], type=BatchResult)
                    due.extend([result.seconds / share] * bool(result.stepped and result.left))

    monkeypatch.setattr(lm.engine, "_grade_together", watched)
    monkeypatch.setattr(lm.engine, "_batch_rows", 32)
    programs = [[pc.Zero(at=pc.Site(name, layer))] for name in ("mlp_out", "attn_out") for layer in range(8)] * 4
    stream = lm.stream(OTHER, max_tokens=400, sampling={"ignore_eos": True})
    next(stream)
    lm.grade(PROMPT, programs, score=[" Mary"])
    stream.close()
    lm.run(OTHER, max_tokens=1)  # whose step frees what the stream held
    assert waits == pytest.approx(due)
    assert len(waits) > 1


def test_cancelled_gradings_return_their_leases(lm):
    """Twenty, at random points: in the first batches, or when all programs have been graded."""
    draw = np.random.default_rng(4)

    class Stop(Exception):
        pass

    for number in range(20):
        programs = [[pc.Zero(at=pc.mlp_out[i % 8], tokens=pc.every[i % 8])] for i in range(40)]
        job, left = lm.grade_job(lm.tokens(PROMPT), programs, [[((), 5)]]), int(draw.integers(0, 4))
        lm.engine._batch_rows = 64  # of 40 programs, five or fewer in a batch

        def stop(i: int, grades: pc.Grades, which: np.ndarray) -> None:
            nonlocal left
            left -= 1
            if left < 0 or which.max(initial=0) == 39:
                raise KeyboardInterrupt if number % 5 == 0 else Stop  # noqa: B023

        with pytest.raises((Stop, KeyboardInterrupt)):
            lm.graded([job], stop)
    lm.grade(PROMPT, [[]], score=[5])  # which waits for the lease


def test_a_run_that_is_gone(lm):
    run = lm.run(OTHER, max_tokens=1, capture=[pc.resid_post])
    edits = pc.Replace(pc.From(run, pc.resid_post[3], pc.every[2]), at=pc.resid_post[3], tokens=pc.every[2])
    job = lm.grade_job(lm.tokens(PROMPT), [edits], [[((), 5)]])
    lm.engine.release([run.key])
    lm.run("x", max_tokens=1)
    with pytest.raises(pc.PatchclampError):
        lm.graded([job])
    assert not lm.engine.status()["leases"]
    assert lm.grade(PROMPT, [[]], score=[5]).route == "bulk"


UNBATCHED = {  # what a configuration has, where cells run as requests
    "pipeline parallelism": {"parallel_config.pipeline_parallel_size": 2},
    "data parallelism": {"parallel_config.data_parallel_size": 2},
    "context parallelism": {"parallel_config.decode_context_parallel_size": 2},
    "adapters": {"lora_config": object()},
    "drafts": {"speculative_config": object()},
    "images": {"model_config.is_multimodal_model": True},
    "state-space layers": {"model_config.is_hybrid": True},
    "no chunked prefill": {
        "scheduler_config.enable_chunked_prefill": False,
        "cache_config.enable_prefix_caching": False,
    },
    "KV offloading": {"kv_transfer_config": types.SimpleNamespace(kv_connector="OffloadingConnector")},
}


@pytest.mark.parametrize("reason", UNBATCHED)
def test_configurations_that_grade_by_requests(reason):
    of: Any = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1
        ),
        model_config=types.SimpleNamespace(
            is_multimodal_model=False, uses_mrope=False, is_hybrid=False, is_attention_free=False
        ),
        scheduler_config=types.SimpleNamespace(enable_chunked_prefill=True),
        cache_config=types.SimpleNamespace(enable_prefix_caching=True),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
    )
    assert refusal_of(of) == ""
    for path, value in UNBATCHED[reason].items():
        part, _, field = path.rpartition(".")
        setattr(getattr(of, part) if part else of, field, value)
    assert refusal_of(of) == reason


def half(rows):
    return rows * 0.5


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_code_runs_as_requests(narrow, engine):
    """Each request of a program has code of its own: those of the other scores go on when one has ended."""
    lm = narrow.get(engine, "float32")
    lm.allows_code, allowed = True, lm.allows_code
    try:
        programs = [[pc.Apply(half, at=pc.resid_post[i])] for i in range(3)]
        grades = lm.grade(PROMPT, programs, score=[" Mary", " Mary and John"], kl=True, top=2)
    finally:
        lm.allows_code = allowed
    scaled = lm.grade(PROMPT, [[pc.Scale(0.5, at=pc.resid_post[i])] for i in range(3)],
                      score=[" Mary", " Mary and John"], kl=True, top=2)  # fmt: skip
    assert not grades.errors
    assert grades.route == "requests"
    assert "Apply" in grades.route_reason or engine == "transformers"
    np.testing.assert_allclose(grades.logprobs, scaled.logprobs, atol=1e-4)
    np.testing.assert_allclose(grades.kl, scaled.kl, atol=1e-4)
    assert not lm.engine.status()["code"]


def test_rows_that_do_not_fit_into_the_bank_at_once(narrow, monkeypatch):
    """A sweep whose rows are larger than the bank runs in several leases, and returns each."""
    lm = narrow.get("vllm", "float32", bank_bytes=200_000)
    lm.grade(PROMPT, [], score=[5])
    before = room_of(lm)
    kinds = [pc.resid_pre, pc.attn_out, pc.resid_mid, pc.mlp_out]
    run = lm.run(OTHER, max_tokens=1, capture=kinds)
    assert 4 * len(kinds) * lm.model.layers * len(lm.tokens(OTHER)) * lm.model.d_model > 200_000
    admission, leases = lm.engine._engine.engine_core.engine_core.patchclamp.admission, list[str]()
    lease = admission.lease
    monkeypatch.setattr(admission, "lease", lambda name, *args: leases.append(name) or lease(name, *args))
    places = [kind[layer] for kind in kinds for layer in range(lm.model.layers)]
    programs = [[pc.Replace(pc.From(run, at, pc.every[5]), at=at, tokens=pc.every[5])] for at in places]
    prompts, asked = [PROMPT, OTHER, "The capital of France is the city of"], {"score": SCORES[1:3], "kl": True}
    grades = lm.grade(prompts, [programs] * 3, **asked)
    assert len(leases) > 6, len(leases)
    assert room_of(lm) == before
    for one, other in zip(grades, as_requests(lm, monkeypatch, prompts, [programs] * 3, **asked), strict=True):
        check_equal(one, other)


def test_a_program_larger_than_a_batch(narrow):
    lm, ids = narrow.get("vllm", "float32", **CHUNKED), list(range(5, 45))
    programs: list[Any] = [[pc.Zero(at=pc.mlp_out[1])], []]
    grades = lm.grade(ids, programs, score=[5])
    assert grades.route == "requests"
    assert "exceeds a batch" in grades.route_reason
    whole = narrow.get("vllm", "float32").grade(ids, programs, score=[5])
    np.testing.assert_allclose(grades.logprobs, whole.logprobs, atol=1e-4)


def test_a_batch_without_room_runs_as_requests(lm, monkeypatch):
    """So do the cells of a sweep, which are arrays and are bound one by one then."""

    def refuse(*_: Any) -> Any:
        raise pc.CapacityError("no room")

    pair = {"clean": lm.tokens(PROMPT)[:9], "corrupt": lm.tokens(OTHER)[:9], "answer": " Mary", "foil": " John"}
    asked: Any = {**pair, "sites": ["resid_pre", "z"], "layers": [1, 6], "show_progress": False}
    expected = pc.studies.patch_sweep(lm, **asked)
    monkeypatch.setattr(lm.engine, "grade", refuse)
    assert lm.grade(PROMPT, [[]], score=[5]).route_reason == "no room"
    np.testing.assert_allclose(pc.studies.patch_sweep(lm, **asked).values, expected.values, atol=1e-4)


def test_small_gradings_do_not_enlarge_the_batches_of_later_ones(lm, monkeypatch):
    """The speed of a batch that is not full says little of a full one."""
    monkeypatch.setattr(lm.engine, "_batch_rows", frontend.FIRST_ROWS)
    for _ in range(4):
        lm.grade(PROMPT, [[pc.Zero(pc.mlp_out[1])]], score=[5])
    assert lm.engine._batch_rows < frontend.FIRST_ROWS + 10
    many = [[pc.Scale(1 + i, at=pc.mlp_out[0], tokens=pc.every[0])] for i in range(200)]
    lm.grade(PROMPT, many, score=[5])
    assert lm.engine._batch_rows > 2 * frontend.FIRST_ROWS


def test_room_that_is_gone_halfway(lm, monkeypatch):
    """The programs that were not graded run as requests; each is told once."""
    programs = [[pc.Scale(1 + i / 8, at=pc.resid_post[i % 4], tokens=pc.every[i])] for i in range(10)] + [[]]
    whole = lm.grade(PROMPT, programs, score=SCORES, kl=True, top=3)
    stock, told, in_batches = lm.engine._grading, list[int](), set[int]()

    def grading(jobs: Any, tables: Any, tell: Any) -> Any:
        def heard(i: int, numbers: np.ndarray) -> None:
            in_batches.update(numbers.tolist())
            tell(i, numbers)

        calls, result = stock(jobs, tables, heard), None
        while not in_batches:
            result = yield calls.send(result)
        raise pc.CapacityError("gone")

    monkeypatch.setattr(lm.engine, "_grading", grading)
    monkeypatch.setattr(lm.engine, "_batch_rows", 8)
    grades = lm.grade(PROMPT, programs, score=SCORES, kl=True, top=3)
    assert 0 < len(in_batches) < len(programs)
    assert (grades.route, grades.route_reason, grades.errors) == ("requests", "gone", {})
    check_equal(whole, grades)
    in_batches.clear()
    lm.graded([lm.grade_job(lm.tokens(PROMPT), programs, [[((), 5)]])], lambda i, grades, which: told.extend(which))
    assert sorted(told) == list(range(len(programs)))


def test_no_batch_runs_while_a_step_is_unfinished(lm):
    """vLLM may sample a step later, with the plan that is current then."""
    driver: Any = lm.engine._engine.engine_core.engine_core.model_executor.driver_worker
    attached = getattr(driver, "worker", driver).patchclamp
    attached._runner.execute_model_state = object()
    try:
        assert attached.do_bulk("run", "any", 1) == attached.do_bulk("open", "any", b"") == LATER
    finally:
        attached._runner.execute_model_state = None


def test_captured_rows(lm, monkeypatch):
    """They are those of runs with the same programs, of texts, of ids and of chats; a failed one has none."""
    monkeypatch.setattr("patchclamp.lm.CAPTURED_AT_ONCE", 2)
    gc.collect()
    before = lm.engine.status()["captured_bytes"]
    wrong = pc.Add([3e38] * lm.model.d_model, at=pc.resid_post[1], scale=1e30)
    programs = [[pc.Scale(0.5, at=pc.resid_post[1], tokens=pc.span("Mary", 0))], [wrong], []]
    capture = [pc.resid_post @ pc.prompt[-2:], pc.z[3, 1]]
    messages = [{"role": "user", "content": "Greet Mary."}]
    for asked in ({"prompt": PROMPT}, {"prompt": lm.tokens(PROMPT)}, {"messages": messages}):
        grades = lm.grade(**asked, programs=programs, score=[5], capture=capture)
        assert grades.route == "bulk"
        assert [rows is None for rows in grades.captured] == [False, True, False]
        for program, rows in zip(programs, grades.captured, strict=True):
            if rows is not None:
                run = lm.run(**asked, edits=program, capture=capture, max_tokens=1)
                assert {*rows} == {*run.sites}
                for site in run.sites:
                    np.testing.assert_allclose(rows[site], run[site], atol=1e-4)
                run.close()
    two = lm.grade([PROMPT, OTHER], [programs[2:], programs[:1]], score=[5], capture="embed")
    assert [[len(rows["embed"]) for rows in of.captured] for of in two] == [
        [len(lm.tokens(PROMPT))], [len(lm.tokens(OTHER))]
    ]  # fmt: skip
    later = pc.Scale(0.5, at=pc.resid_post[1], tokens=pc.generated)  # edits the second token of the score alone
    graded = lm.grade(PROMPT, [later, None], score=[[5, 6]], capture=[pc.resid_post, pc.logits])
    assert abs(graded.logprobs[0, 0] - graded.logprobs[1, 0]) > 1e-4
    for site in ("resid_post[2]", "logits"):
        edited, unedited = (rows[site] for rows in graded.captured)
        assert len(edited) == (1 if site == "logits" else len(lm.tokens(PROMPT)))
        np.testing.assert_allclose(edited, unedited, atol=1e-4)
    assert lm.grade(PROMPT, programs[2:], score=[5]).captured is None
    lm.run(PROMPT, max_tokens=1)  # the next step frees what was released
    assert lm.engine.status()["captured_bytes"] <= before


FORCED = {
    "none": (), "everywhere": (pc.Scale(0.5, at=pc.resid_post[1]),), "prompt": (pc.Zero(pc.mlp_out[2], pc.prompt[1:3]),),
    "generated": (pc.Noise(0.5, at=pc.embed, tokens=pc.generated, seed=3),), "span": (pc.Zero(pc.z[2], pc.span("Mary")),),
    "token": (pc.Zero(pc.mlp_out[2], pc.token(198) | pc.generated[1]),), "never": (pc.Zero(pc.embed, pc.generated[40]),),
}  # fmt: skip


def test_continuations(lm, narrow, monkeypatch):
    """Forced in batches as by rows of `final_norm`, and as sums of log-probabilities on both engines."""
    prompt, texts = tuple(lm.tokens(PROMPT)), (" Mary and the store", " John", " a")
    items = [
        Forced(prompt, tuple(lm.tokenizer.bare(text)), edits, PROMPT) for edits in FORCED.values() for text in texts
    ]
    bulk = forced_logprobs(lm, items)
    assert not lm.batch_refusal
    with monkeypatch.context() as context:
        context.setattr(type(lm), "batch_refusal", "forced")
        rows = forced_logprobs(lm, items)
    for item, a, b in zip(items, bulk, rows, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=str(item))
    assert len({row.sum().round(3) for row in bulk}) > 12
    of_prompts = lm.loglikelihood([PROMPT, OTHER], [texts[0], texts[1]], edits=FORCED["everywhere"])
    alone = lm.loglikelihood(PROMPT, texts[0], edits=FORCED["everywhere"])
    assert of_prompts[0] == pytest.approx(alone, abs=1e-4) == pytest.approx(bulk[3].sum(), abs=1e-4)
    there = narrow.get("transformers", "float32").loglikelihood(PROMPT, texts[0], edits=FORCED["everywhere"])
    assert there == pytest.approx(alone, abs=1e-3)
    for arguments, path in (((PROMPT, ""), "continuation"), (([PROMPT] * 2, [" a", [10**9]]), "continuation[1]")):
        with pytest.raises(TokensError) as error:
            lm.loglikelihood(*arguments)
        assert error.value.path == path
    with pytest.raises(ProgramError):
        lm.loglikelihood([PROMPT, OTHER], [" a"])
    for prompts, choices, path in (
        (PROMPT, " a", "edits[1].value"),
        ([OTHER, PROMPT], [" a", " b"], "prompt 0.edits[1].value"),
    ):
        with pytest.raises(pc.ShapeError) as wrong:  # the path is that of the argument, as in `run`
            lm.loglikelihood(prompts, choices, edits=[pc.Zero(pc.mlp_out[0]), pc.Add([1.0, 2.0], at=pc.embed)])
        assert wrong.value.path == path


def test_wrong_arguments(lm):
    for kwargs, kind, path in (
        ({"score": ["x y z", 10**9]}, TokensError, "score[1]"), ({"top": -1}, ProgramError, "top"),
        ({"kl": "yes"}, ProgramError, "kl"), ({"programs": "abc"}, ProgramError, "programs"),
        ({"programs": [[5]]}, ProgramError, "programs[0]"), ({"score": [[]]}, TokensError, "score[0]"),
        ({"score": {5, 6}}, TokensError, "score"),
        ({"programs": [pc.Program.of((), [pc.embed])]}, ProgramError, "programs[0].capture"),
        ({"programs": [[], [pc.Zero(pc.embed), pc.Capture(pc.embed)]]}, ProgramError, "programs[1].edits[1]"),
        ({"programs": [pc.Lens(pc.resid_post[1])]}, ProgramError, "programs[0].edits[0]"),
        ({"programs": [pc.Zero(pc.mlp_out[99])]}, pc.UnsupportedSite, "programs[0].edits[0].at"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            lm.grade(PROMPT, **{"programs": [[]], "score": [5], **kwargs})
        assert caught.value.path.startswith(path), kwargs


def test_transformers_grades_by_requests(narrow, lm, monkeypatch):
    hub = narrow.get("transformers", "float32")
    programs = [[pc.Zero(at=pc.mlp_out[i])] for i in range(4)] + [[]]
    grades = hub.grade(PROMPT, programs, score=SCORES, kl=True, top=3)
    assert grades.route == "requests"
    check_equal(lm.grade(PROMPT, programs, score=SCORES, kl=True, top=3), grades, 1e-3)
    with pytest.raises(EngineError):
        next(iter(hub.engine.grade([], [])))


@pytest.mark.parametrize("study", ["patch_sweep", "zeros", "trace", "ablation", "paths", "custom"])
def test_studies_in_batches_equal_requests(lm, monkeypatch, study, tmp_path):
    clean, corrupt = lm.tokens(PROMPT), lm.tokens(OTHER)
    size = min(len(clean), len(corrupt))
    pair = {
        "clean": [clean[:size], corrupt[:size]],
        "corrupt": [corrupt[:size], clean[:size]],
        "answer": " Mary",
        "foil": " John",
    }
    sites = ["resid_pre", "z", "mlp_out"]
    call, arguments = {
        "patch_sweep": (pc.studies.patch_sweep, {**pair, "sites": sites, "layers": [0, 6], "alpha": 0.7, "window": 2}),
        "zeros": (pc.studies.patch_sweep, {**pair, "sites": sites, "layers": [1, 7], "source": "zeros", "direction": "noising"}),
        "trace": (pc.studies.causal_trace, {"prompt": clean, "subject": " Mary", "answer": " Mary", "seeds": 2, "layers": [1, 5]}),
        "ablation": (pc.studies.ablation_sweep, {"prompt": clean, "answer": " Mary", "metric": "logprob", "group": 1,
                                                 "sites": ["z"], "source": pc.studies.MeanOf([OTHER])}),
        "paths": (pc.studies.path_patch, {**pair, "senders": ["z[0, 0:2]", "z[2, 4]"], "receivers": ["q[3]", "logits"]}),
        "custom": (pc.studies.patch_sweep, {**pair, "sites": ["resid_pre"], "layers": [1, 5],
                                            "metric": pc.studies.Metric(lambda p: max(p.top.values()), top=3)}),
    }[study]  # fmt: skip
    journal = tmp_path / "journal"
    bulk = call(lm, **arguments, show_progress=False, resume=journal)
    with monkeypatch.context() as patched:
        patched.setattr(LM, "batch_refusal", property(lambda lm: "asked for"))
        requests = call(lm, **arguments, show_progress=False)
        resumed = call(lm, **arguments, show_progress=False, resume=journal)
    assert "in batches" in bulk.computed
    assert "in batches" not in requests.computed
    np.testing.assert_allclose(bulk.values, requests.values, atol=1e-4)
    assert np.array_equal(resumed.values, bulk.values, equal_nan=True)
    assert bulk.noise_floor < 1e-4


# why programs of these run as requests on the CPU build
REFUSED = {"mamba2": "state-space", "deepseek_v2": "chunked prefill"}


@pytest.mark.slow
@pytest.mark.usefixtures("inspected_here")
@pytest.mark.parametrize(
    ("family", "eager"),
    [*((family, True) for family in ("gemma2", "gemma3", "gpt2", "falcon", "qwen3_moe", "deepseek_v2", "gpt_oss", "mamba2")),
     ("gemma2", False), ("gpt_neox", False), ("qwen3_moe", False)],
)  # fmt: skip
def test_families(family, eager, tmp_path, monkeypatch):
    """Random programs equal the same programs as requests, with a cold and a warm prefix cache, and on Transformers."""
    folder, length, asked = of_family(tmp_path, family), 41, {"score": [5, [7, 9]], "kl": True}
    draw = np.random.default_rng(1)
    ids, other = (draw.integers(5, 100, length).tolist() for _ in range(2))
    seed = int(draw.integers(1000))

    def programs_of(lm: LM) -> list[Any]:
        sites = {ref.name for ref in lm.sites.refs()}.intersection(CAPTURED)
        run = lm.run(other, max_tokens=1, capture=[pc.Site(name) for name in sorted(sites)])
        return random_programs(lm, run, length, np.random.default_rng(seed), 40)

    options: dict[str, Any] = EAGER | OPTIONS.get(family, {}) | {"enforce_eager": eager}
    with without_amx(), pc.LM(folder, engine="vllm", prove=False, **IDS, **options) as lm:
        programs = programs_of(lm)
        for warm in (False, True):
            grades = lm.grade(ids, programs, **asked)
            if family in REFUSED:
                assert (grades.route, REFUSED[family] in grades.route_reason) == ("requests", True)
                break
            cached = lm.run(ids, max_tokens=1).cached_tokens if warm else lm.engine._engine.reset_prefix_cache()
            assert cached == (EAGER["block_size"] if warm else True)
            check_equal(grades, as_requests(lm, monkeypatch, ids, programs, **asked))
    with pc.LM(folder, engine="transformers", prove=False, max_model_len=128, **IDS) as hub:
        programs = programs_of(hub)
        there = hub.grade(ids, programs, **asked)
        runs = hub.run([ids] * len(programs), edits=programs, score=[5], max_tokens=1)
    np.testing.assert_allclose(there.logprobs[:, 0], [run.scores[5] for run in runs], atol=1e-4)
    np.testing.assert_allclose(there.logprobs, grades.logprobs, atol=1e-3)
    assert np.count_nonzero(np.abs(there.logprobs - there.baseline).max(1) > 1e-3) > 16
