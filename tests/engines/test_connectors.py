"""KV connectors: requests without programs use one, and requests with programs bypass it both ways, beside each other, in
one engine and over two that share a folder (prefill and decode apart)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.config import KVTransferConfig

import patchclamp as pc
from patchclamp.engines.vllm import sync_engine
from patchclamp.engines.vllm.admission import RequestProgram
from patchclamp.engines.vllm.compat.clients import shut_down
from patchclamp.engines.vllm.compat.configuration import surroundings
from patchclamp.engines.vllm.compat.connectors import check_transfer

from ..models import with_weights
from ..reference.hooks import PlainModel
from .conftest import TINY
from .test_admission import engine_core
from .test_families import EAGER, IDS
from .test_llm import OPTIONS, asked, reload

pytestmark = pytest.mark.usefixtures("inspected_here")
PROMPT = np.random.default_rng(0).integers(3, TINY["vocab_size"], 90).tolist()
OTHER = np.random.default_rng(1).integers(3, TINY["vocab_size"], 70).tolist()
HARD = [pc.Add([2.0] * TINY["hidden_size"], at=pc.resid_post[0])]
WANTED = {"max_tokens": 6, "sampling": {"ignore_eos": True}, "logprobs": True}
CONNECTED = {"enable_prefix_caching": False, "prove": False}  # what is loaded comes from the connector alone


@pytest.fixture
def connected(tiny, tmp_path):
    """`connected("kv_both")` is an engine with a connector in a folder that all share; without a role it has none. It takes
    the place of the last one, since there is one connector per process."""
    made: list[pc.LM] = []

    def get(role: str = "", **options) -> pc.LM:
        while made:
            made.pop().close()
        if role:
            options["kv_transfer_config"] = transfer(tmp_path, role)
        made.append(pc.LM(tiny, engine="vllm", **IDS, **EAGER, **CONNECTED, **options))
        return made[-1]

    yield get
    for lm in made:
        lm.close()


def transfer(folder: Path, role: str = "kv_both", name: str = "ExampleConnector") -> dict:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def stored(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def close(run: pc.Run, expected: pc.Run) -> bool:
    same = run.token_ids == expected.token_ids
    return same and np.allclose(run.logprobs, expected.logprobs, atol=1e-4)


def test_programs_neither_fill_a_connector_nor_read_it(connected: Callable[..., pc.LM], tmp_path):
    """Poison both ways. An edited request stores nothing, so the plain one after it computes its own; what that stores is
    loaded by the next plain request, and not by an edited one, whose captures have every position."""
    plain = connected()
    expected, edited = plain.run(PROMPT, **WANTED), plain.run(PROMPT, edits=HARD, capture=[pc.resid_post], **WANTED)
    kept = edited[pc.resid_post]
    assert not close(edited, expected)
    lm = connected("kv_both")
    assert close(lm.run(PROMPT, edits=HARD, **WANTED), edited)
    assert lm.run(PROMPT, capture=[pc.resid_post], **WANTED).token_ids == expected.token_ids
    assert stored(tmp_path) == set()
    first = lm.run(PROMPT, **WANTED)
    assert len(stored(tmp_path)) == 1
    assert close(first, expected)
    loaded = lm.run(PROMPT, **WANTED)
    assert (first.cached_tokens, loaded.cached_tokens) == (0, 64)
    assert close(loaded, expected)
    again = lm.run(PROMPT, edits=HARD, capture=[pc.resid_post], **WANTED)
    assert again.cached_tokens == 0
    assert close(again, edited)
    for layer in range(3):
        assert again.positions(pc.resid_post[layer]) == list(range(len(PROMPT) + 5))
        assert torch.allclose(again[pc.resid_post[layer]], kept[layer], atol=1e-3)
    assert len(stored(tmp_path)) == 1


def test_what_lies_in_a_connector_is_what_plain_requests_load(connected, tmp_path):
    """The other side: files that are spoilt change what a plain request gives, and no request with a program."""
    lm = connected("kv_both")
    expected = lm.run(PROMPT, **WANTED)
    edited = lm.run(PROMPT, edits=HARD, **WANTED)
    [folder] = tmp_path.iterdir()
    for path in folder.iterdir():
        save_file({name: rows + 1.0 for name, rows in load_file(path).items()}, path)
    assert not close(lm.run(PROMPT, **WANTED), expected)
    assert close(lm.run(PROMPT, edits=HARD, **WANTED), edited)
    assert close(lm.run(PROMPT, edits=[pc.Scale(1.0, at=pc.resid_post[0])], **WANTED), expected)


def test_a_mixed_batch(connected, tmp_path):
    plain, prompts, edits = connected(), [PROMPT, OTHER, PROMPT, OTHER], [HARD, [], [], HARD]
    expected = [plain.run(prompt, edits=each, **WANTED) for prompt, each in zip(prompts, edits, strict=True)]
    lm = connected("kv_both", max_num_batched_tokens=512)
    for _ in range(2):
        runs = lm.run(prompts, edits=edits, **WANTED)
        assert [close(run, each) for run, each in zip(runs, expected, strict=True)] == [True] * 4
        assert len(stored(tmp_path)) == 2  # of the two without edits
    assert [run.cached_tokens for run in runs] == [0, 64, 64, 0]


def test_prefill_and_decode_apart(connected, tmp_path):
    """Two engines: one computes prompts and stores them, the other loads them. A program runs whole where it is sent."""
    plain = connected()
    expected, edited = plain.run(PROMPT, **WANTED), plain.run(PROMPT, edits=HARD, **WANTED)
    prefill = connected("kv_producer")
    prefill.run(PROMPT, edits=HARD, max_tokens=1)
    assert stored(tmp_path) == set()
    prefill.run(PROMPT, max_tokens=1)
    decode = connected("kv_consumer")
    run = decode.run(PROMPT, **WANTED)
    assert run.cached_tokens == 64
    assert close(run, expected)
    run = decode.run(PROMPT, edits=HARD, **WANTED)
    assert run.cached_tokens == 0
    assert close(run, edited)


def test_programs_that_are_graded_refused_or_aborted(connected, tmp_path):
    programs = [[pc.Add([float(i)] * TINY["hidden_size"], at=pc.resid_post[0])] for i in range(3)]

    def graded(lm: pc.LM) -> tuple[pc.Run, np.ndarray]:
        return lm.run(PROMPT, **WANTED), lm.grade(PROMPT, programs=programs, score=[5, 6]).logprobs

    expected, grades = graded(connected())
    lm = connected("kv_both")
    run, found = graded(lm)
    assert close(run, expected)
    assert np.allclose(found, grades, atol=1e-4)
    before = stored(tmp_path)
    stream = lm.stream(PROMPT, edits=HARD, max_tokens=30)
    next(iter(stream))
    stream.close()
    with pytest.raises(pc.NotFinite):
        lm.run(PROMPT, edits=[pc.Scale(1e38, at=pc.resid_post[0])] * 2, max_tokens=2)
    assert stored(tmp_path) == before
    assert close(lm.run(PROMPT, **WANTED), expected)


@pytest.mark.parametrize("first", ["kv_both", ""])
def test_one_connector_per_process(connected, tiny, tmp_path, first):
    connected(first)
    options = {} if first else {"kv_transfer_config": transfer(tmp_path)}
    with pytest.raises(pc.EngineError, match="multiprocess_mode") as caught:
        pc.LM(tiny, engine="vllm", **IDS, **EAGER, **CONNECTED, **options)
    assert caught.value.path == "kv_transfer_config"


@pytest.mark.parametrize("name", ["NixlPushConnector", "OffloadingConnector", "LMCacheConnectorV1", "MultiConnector"])
def test_connectors_that_do_not_work_here_are_refused_by_name(tiny, tmp_path, name):
    with pytest.raises(pc.EngineError, match=name):
        pc.LM(tiny, engine="vllm", **IDS, **EAGER, kv_transfer_config=transfer(tmp_path, name=name))


def test_a_program_beside_transfer_parameters_is_refused():
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})
    check_transfer(SimpleNamespace(connector=None), request)
    with pytest.raises(pc.ProgramError, match="kv_transfer_params"):
        check_transfer(SimpleNamespace(connector=object()), request)
    check_transfer(SimpleNamespace(connector=object()), SimpleNamespace(kv_transfer_params=None))


def test_programs_are_refused_once_weights_were_updated(tiny, tmp_path):
    """The connector still has keys and values of the old weights: a plain request loads them, as in stock vLLM, into blocks
    of the prefix cache that a program would reuse. Before the update, a program that reuses such blocks is right."""
    store, trained = tmp_path / "store", with_weights(tmp_path / "trained", "8b", 3, seed=1, **TINY)
    last, prompts = pc.resid_post[2] @ pc.prompt[-1], {"prompt_token_ids": PROMPT}
    with surroundings(False):
        connector = KVTransferConfig(**transfer(store))
        llm = LLM(tiny, **OPTIONS, additional_config={"patchclamp": {}}, kv_transfer_config=connector)
    try:
        llm.generate(prompts, asked(), use_tqdm=False)
        lm = pc.LM(llm)
        run = lm.run(PROMPT, capture=[last], max_tokens=1)
        assert run.cached_tokens == 64
        expected = PlainModel(tiny).read(PROMPT, "resid_post", 2)[-1:]
        np.testing.assert_allclose(run[pc.resid_post[2]], expected, atol=1e-4)
        reload(llm, trained)
        [loaded] = llm.generate(prompts, asked(), use_tqdm=False)
        assert loaded.num_cached_tokens == 64
        for refused in (
            lambda: lm.run(PROMPT, capture=[last], max_tokens=1),
            lambda: llm.generate(prompts, asked(pc.Program.of((), last)), use_tqdm=False),
            lambda: pc.LM(llm, prove=False).run(PROMPT, edits=HARD, max_tokens=1),
        ):
            with pytest.raises(pc.EngineError, match="weights") as caught:
                refused()
            assert caught.value.path == "kv_transfer_config"
    finally:
        shut_down(llm.llm_engine, alone=len(sync_engine.alive) < 2)


@pytest.mark.slow
@pytest.mark.parametrize("seen", [True, False])
def test_preempted_programs_are_proved_again(connected, monkeypatch, seen):
    """Also if vLLM frees their blocks by another call than `free`, as beside a connector with steps in flight."""
    forgotten: list[RequestProgram] = []
    usual = RequestProgram.forget_proof
    monkeypatch.setattr(RequestProgram, "forget_proof", lambda it: (forgotten.append(it), usual(it)))
    prompts = [PROMPT[:60], OTHER[:60], PROMPT[20:80], OTHER[5:65]]
    asked = {"edits": [HARD] * 4, "max_tokens": 60, "sampling": {"ignore_eos": True}, "logprobs": True}
    expected = connected().run(prompts, **asked)
    lm = connected("kv_both", num_gpu_blocks_override=10)
    core = engine_core(lm)
    lm.run(OTHER[:5], edits=HARD, max_tokens=1)  # the first program attaches admission
    if not seen:
        core.scheduler.kv_cache_manager.free = core.patchclamp._free_blocks
    runs = lm.run(prompts, **asked)
    made = len(set(map(id, forgotten)))  # each program begins without a proof
    assert len(forgotten) - made >= lm.engine.status()["preemptions"] > 0
    assert all(map(close, runs, expected))
