"""What the engine core is given is what stock vLLM would give it, though vLLM processes requests that are alike once."""

from __future__ import annotations

import msgspec
import pytest

import patchclamp as pc
from patchclamp.engines.base import Request
from patchclamp.engines.vllm.compat.clients import Submitter, sampling_params
from patchclamp.kernels import switches

SETTINGS = [
    {}, {"logprobs": 0}, {"score": [5, 9, 5]}, {"sampling": {"temperature": 0.7, "seed": 3, "top_p": 0.9}},
    {"sampling": {"stop": ["a", "bc"]}}, {"sampling": {"bad_words": [" the"], "ignore_eos": True, "min_tokens": 2}},
    {"sampling": {"stop_token_ids": [7], "logit_bias": {5: -3.0}}}, {"max_tokens": 9},
    {"max_tokens": None},  # as many as there is room for
]  # fmt: skip


@pytest.fixture
def added(narrow, monkeypatch):
    """A function that adds a request by our way or by stock's, and returns what the engine core would get."""
    engine = narrow.get("vllm", "float32").engine._engine
    submitter, given = Submitter(engine, has_text=True), []
    monkeypatch.setattr(engine.engine_core, "add_request", given.append)

    def add(ours: bool, ids: list[int], carried: bytes | None, **settings) -> dict:
        request = Request("run", ids, **{"max_tokens": 4, **settings})
        if ours:
            submitter.add(request, carried, None)
        else:
            engine.add_request("run", {"prompt_token_ids": ids}, sampling_params(request, carried, True))
        name = given[-1].request_id
        engine.output_processor.abort_requests([name], True)
        asked = given.pop()
        assert (given, asked.request_id, asked.external_req_id) == ([], name, "run")
        fields = msgspec.structs.asdict(asked)
        assert fields.pop("arrival_time") > 1e9
        assert fields.pop("request_id").startswith("run-")
        params = fields.pop("sampling_params")
        inner = {name: getattr(params, name) for name in params.__struct_fields__}
        return fields | inner

    return add


def test_every_field_is_as_stock_would_have_it(added):
    """Settings that come for the first time, again, and again after others, with programs of their own."""
    for turn in range(2):
        for number, settings in enumerate(SETTINGS):
            for length in (1, 3, 40):
                ids, carried = list(range(3, 3 + length)), None if length == 3 else bytes([turn, number, length])
                ours, stock = (added(way, ids, carried, **settings) for way in (True, False))
                assert ours == stock, settings
                assert ours["prompt_token_ids"] == ids
                assert (ours["extra_args"] is None) == (carried is None)


def test_vllm_processes_what_is_alike_once(narrow, added, monkeypatch):
    processor = narrow.get("vllm", "float32").engine._engine.input_processor
    process, seen = processor.process_inputs, []
    monkeypatch.setattr(processor, "process_inputs", lambda *a, **k: seen.append(a[0]) or process(*a, **k))
    for settings in ({}, {"logprobs": 0}, {}):
        for _ in range(5):
            added(True, [3, 4], None, **settings)
    assert len(seen) == 3


def test_each_is_processed_where_that_is_switched_off(narrow, added, monkeypatch):
    processor = narrow.get("vllm", "float32").engine._engine.input_processor
    process, seen = processor.process_inputs, []
    monkeypatch.setattr(processor, "process_inputs", lambda *a, **k: seen.append(a[0]) or process(*a, **k))
    monkeypatch.setattr(switches, "disabled", {"alike_requests"})
    assert added(True, [3, 4], b"1") == added(True, [3, 4], b"1")
    assert len(seen) == 2


def test_what_vllm_refuses_is_refused_each_time_and_nothing_of_it_is_kept(narrow):
    lm = narrow.get("vllm", "float32")
    for _ in range(2):
        for run in lm.run([[3, 4]] * 3, max_tokens=2, sampling={"logit_bias": {10**7: 1.0}}):
            with pytest.raises(pc.RunError, match="logit_bias"):
                _ = run.token_ids
    again, plain = lm.run([[3, 4]] * 2, max_tokens=2)
    assert again.token_ids == plain.token_ids
