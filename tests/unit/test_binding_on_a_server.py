"""Programs of requests are bound off the event loop, once for each prompt, and no further than they may go."""

from __future__ import annotations

import asyncio
import importlib
import threading
from types import SimpleNamespace

import pytest

import patchclamp as pc
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import PatchclampError, RunError, TooLarge
from patchclamp.language import Program, Vector
from patchclamp.plan import Prompt, bind
from patchclamp.plan.bind import Bindings
from patchclamp.plan.bound import position_ranges
from patchclamp.plan.table import record_count
from patchclamp.serve import program_call
from patchclamp.serve.kept import KeptObjects
from patchclamp.serve.program_call import QUICK_WORK, ProgramCall, current
from patchclamp.serve.server_state import KnownBindings

binding = importlib.import_module("patchclamp.plan.bind")
LONG = list(range(5, 25)) * 120  # 2,400 tokens
EVERY_OTHER = {"type": "capture", "at": "embed", "tokens": "prompt[::2]"}


@pytest.fixture
def threads(monkeypatch):
    """The name of the thread that each op was bound on."""
    names = []

    class Binder(binding._Binder):
        def bind(self, *args):
            names.append(threading.current_thread().name)
            return super().bind(*args)

    monkeypatch.setattr(binding, "_Binder", Binder)
    return names


@pytest.fixture
def ranged(monkeypatch):
    """How often positions were made into ranges."""
    made = []
    monkeypatch.setattr(binding, "position_ranges", lambda *args: made.append(1) or position_ranges(*args))
    return made


class Front:
    """As much of a front as binding and running need: its engine answers with the program's records."""

    def __init__(self, lm, **limits):
        self.lm, self.kept = lm, KeptObjects(ServeLimits(**limits))
        self.bindings, self.engine = KnownBindings(lm, self.kept), self
        self.ran = []

    async def outputs(self, request, prompt, params, name, generate, ended, within, **others):
        self.ran.append(request)
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0)], finished=True, name=name)


def call_of(front, data):
    return ProgramCall(data, "a", {}, front.kept)


async def run(front, data, prompts, n=1, max_tokens=2):
    """The outputs of a request with these prompts, as vLLM's routes read them: all streams first, then their outputs."""
    call = data if isinstance(data, ProgramCall) else call_of(front, data)
    token = current.set(call)
    try:
        streams = []
        for i, ids in enumerate(prompts):
            params = SimpleNamespace(
                extra_args=None, n=n, seed=None, max_tokens=max_tokens, output_kind=SimpleNamespace(name="FINAL_ONLY")
            )
            prompt = {"type": "token", "prompt_token_ids": ids}
            client = SimpleNamespace(patchclamp=front)
            streams.append(program_call.edited(client, None, prompt, params, f"cmpl-{i}"))
    finally:
        current.reset(token)

    async def read(stream):
        return [output async for output in stream]

    return await asyncio.gather(*map(read, streams))


def test_a_long_prompt_is_bound_on_another_thread(lm, threads):
    front, here = Front(lm), threading.current_thread().name
    asyncio.run(run(front, {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "token(7)"}]}, [LONG]))
    asyncio.run(
        run(front, {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "prompt[-1]"}] * 60}, [[5] * 99])
    )
    assert len(threads) == 61
    assert here not in threads
    assert {name.rpartition("_")[0] for name in threads} == {"patchclamp bind"}


def test_a_short_one_is_bound_at_once_and_many_short_ones_are_a_long_one(lm, threads):
    front, here = Front(lm), threading.current_thread().name
    data = {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "token(7)"}]}
    asyncio.run(run(front, data, [[5, 6, 7]]))
    assert threads == [here]
    threads.clear()
    prompts = [[5, 6, 7, i] for i in range(QUICK_WORK // 64)]
    asyncio.run(run(front, data, prompts))
    assert len(threads) == len(prompts)
    assert {*threads} > {here}
    assert len(front.ran) == 1 + len(prompts)


def test_a_program_that_uses_one_is_never_bound_at_once(lm, threads):
    front = Front(lm)
    front.kept.put("a", "program", "many", Program.of([pc.Scale(0.5, at=pc.embed)] * 100))
    asyncio.run(run(front, {"edits": [{"type": "use", "name": "many"}]}, [[5, 6, 7]]))
    assert len(threads) == 101
    assert threading.current_thread().name not in threads


def test_it_is_bound_once_for_equal_prompts_and_all_of_n(lm, threads):
    front = Front(lm)
    data = {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "token(7)"}]}
    asyncio.run(run(front, data, [[5, 6, 7], [5, 6, 7], [7, 6, 5]], n=4))
    assert len(threads) == 2
    assert len(front.ran) == 12
    assert len({request.run for request in front.ran}) == 12
    assert all(request.bound.run == request.run for request in front.ran)


def test_what_is_wrong_is_raised_before_anything_runs(lm):
    front = Front(lm)
    call = call_of(front, {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "prompt[2000]"}]})
    with pytest.raises(PatchclampError) as caught:
        asyncio.run(run(front, call, [LONG, LONG[:1000]]))
    assert caught.value.path == "edits[0].tokens"
    assert call.error is caught.value
    assert front.ran == []


def test_a_change_of_the_bank_meanwhile_is_not_seen(lm):
    front = Front(lm)
    rows = [[number] * lm.model.d_model for number in (1.0, 2.0)]
    front.kept.put("a", "vector", "v", Vector.of(rows[0]))
    job = front.bindings.job(
        "a", call_of(front, {"edits": [{"type": "add", "value": {"type": "named", "name": "v"}, "at": "embed"}]}).program,
        Prompt([5, 6], lambda: ("", [])), 2,
    )  # fmt: skip
    front.kept.put("a", "vector", "v", Vector.of(rows[1]))
    (bound,) = job("r").vectors.values()
    assert bound.flat[0] == 1.0


def test_a_client_that_leaves_ends_binding(lm, threads):
    front = Front(lm)
    call = call_of(front, {"edits": [{"type": "scale", "factor": 2, "at": "embed", "tokens": "prompt[-1]"}] * 100})
    call.records.stop()
    with pytest.raises(RunError, match="disconnected"):
        asyncio.run(run(front, call, [LONG]))
    assert len(threads) == 1


# -- records


@pytest.mark.parametrize(
    ("prompts", "n", "records", "words"),
    [
        ([LONG], 1, 1200, "1 prompt with n=1"),
        ([[5, 6, 7]], 32, 64, "1 prompt with n=32"),
        ([[5, 6, 7, i] for i in range(40)], 1, 80, "40 prompts with n=1"),
        ([[5, 6, 7]] * 10, 4, 80, "10 prompts with n=4"),
    ],
)
def test_records_of_all_runs_of_a_request_are_bounded(lm, prompts, n, records, words):
    """`prompt[::2]` is a range for every other token."""
    asyncio.run(run(Front(lm, program_records=records), {"capture": [EVERY_OTHER]}, prompts, n))
    front = Front(lm, program_records=records - 1)
    with pytest.raises(TooLarge) as caught:
        asyncio.run(run(front, {"capture": [EVERY_OTHER]}, prompts, n))
    assert words in caught.value.message
    assert str(records) in caught.value.message
    assert "program_records" in caught.value.message


def test_binding_stops_at_the_limit(lm, threads):
    """Of 1,000 captures with 1,200 ranges each, two are bound."""
    front = Front(lm)
    with pytest.raises(TooLarge) as caught:
        asyncio.run(run(front, {"capture": [EVERY_OTHER] * 1000}, [LONG]))
    assert caught.value.path == "capture[1]"
    assert len(threads) == 2


@pytest.mark.parametrize("tokens", ["prompt[::2]", "every - token(7)", 'span("5")', "prompt[-1] | prompt[0]"])
def test_captures_of_one_selection_share_its_ranges(lm, ranged, tokens):
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    prompt = Prompt(ids, lambda: ("".join(map(str, ids)), [(i, i + 1) for i in range(len(ids))]))
    captures = [pc.Capture(site, tokens=tokens) for site in (pc.embed, pc.resid_mid[0], pc.resid_post[0])]
    programs = [Program.of([], captures[:1]), Program.of([], captures)]
    made = []
    for program in programs:
        ranged.clear()
        bound = Bindings(lm.sites, lm._source, lm.bank, False).of(program, "r", prompt, 3).bound
        made.append(len(ranged))
    assert made == [1, 1]
    assert [op.ranges for op in bound.ops] == [bound.ops[0].ranges] * 3
    alone = bind(programs[1], "r", prompt, 3, lm.sites, lm._source)
    assert alone == bound


def test_records_are_counted_as_they_are_bound(lm):
    counted = []
    program = Program.of([pc.Scale(0.5, at=pc.resid_post, tokens=pc.token(7) | pc.prompt[0])], [pc.resid_mid])
    bindings = Bindings(lm.sites, lm._source, lm.bank, False, counted.append)
    bound = bindings.of(program, "r", Prompt([5, 6, 7, 8], lambda: ("", [])), 5).bound
    assert sum(counted) == record_count(bound.ops)
    assert len(counted) == 2


def test_texts_are_spelled_once_for_a_prompt(lm):
    spelled = []

    class Tokenizer:
        def spell(self, ids, text):
            spelled.append(ids)
            return "abc", [(0, 1), (1, 2), (2, 3)]

        def bare(self, text):
            raise AssertionError("no delimiter was named")

    prompt = prompt_of(Tokenizer(), [5, 6, 7], None, None)
    edits = [pc.Scale(0.5, at=pc.embed, tokens=pc.span(letter)) for letter in "abc"]
    bind(Program.of(edits), "r", prompt, 2, lm.sites, lm._source)
    assert len(spelled) == 1
