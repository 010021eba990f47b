"""`pc.LM` of a server gives what `pc.LM` of the same engine in this process gives, to the bit."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines import http, wire
from patchclamp.engines.grading import GradeTable
from patchclamp.studies import MeanOf, Resampled, patch_sweep

from ..engines.test_modes import BEGIN, SPAN, TEXT
from ..reference import parity
from .conftest import KEYS, becomes, in_parts

PROMPTS = ["The capital of France is", "Water boils at", "x"]
VECTOR = np.random.default_rng(5).standard_normal(144).astype(np.float32)

MATRIX = np.eye(144, dtype=np.float32) + np.random.default_rng(6).standard_normal((144, 144)).astype(np.float32) / 60


def counts(lm: pc.LM) -> dict[str, int]:
    status = lm.engine.status()
    return {name: status[name] for name in ("programs", "records", "vectors", "requests", "waiting", "captured_bytes")}


def settled(lm: pc.LM, within_s: float = 300) -> dict[str, int]:
    """The counts, when all that was freed is."""
    becomes(lambda: not any(counts(lm).values()), within_s)
    return counts(lm)


SHARED = parity.programs(144, 8, SPAN, BEGIN)
CASES = {
    "plain": dict(logprobs=True),
    "steered": dict(edits=[pc.Add(VECTOR, at=pc.resid_post[3], tokens=pc.generated, scale=4.0)], logprobs=3),
    "prompt": dict(edits=[pc.Add(VECTOR, at=pc.resid_post[3], scale=4.0)], prompt_logprobs=3),
    "captured": dict(capture=[pc.resid_post, pc.z[5, 3] @ pc.prompt[-1], pc.Capture(pc.embed, dtype="bfloat16")]),
    "projected": dict(
        capture=[
            pc.Capture(pc.resid_post, "prompt", project=np.stack([VECTOR, VECTOR[::-1]])),
            pc.Capture("z[5, 3]", dtype="bfloat16", project=VECTOR[:64]),
        ]
    ),
    "probed": dict(
        capture=[
            pc.Probe([VECTOR, VECTOR[::-1]], at=pc.resid_post[3], bias=[1, 2], activation="softmax", name="deception"),
            pc.Probe(VECTOR, at=pc.resid_post[2:4], tokens=pc.token(198) | pc.prompt[0], name="newline"),
            pc.Probe(VECTOR[:64], at=pc.z[5, 3], pool="mean", name="mean"),
            pc.Capture(pc.resid_post, pool="max"),
        ]
    ),
    "lenses": dict(
        capture=[
            pc.Lens(pc.resid_post, top=3),
            pc.Lens(pc.mlp_out[3], pc.token(198) | pc.generated, top=128),
            pc.Lens(pc.resid_post @ pc.prompt[-1], translators={5: MATRIX, 2: (MATRIX.T, VECTOR)}),
            pc.Capture(pc.resid_post[3], dtype="bfloat16"),
        ]
    ),
    "conditional": dict(
        edits=[
            pc.When(
                pc.Probe([VECTOR, VECTOR[::-1]], at=pc.resid_post[2], bias=[1, 2], name="decides")[1] > 0,
                [pc.Add(VECTOR, at=pc.resid_post[3]), pc.Scale(0.5, pc.mlp_out[4], pc.generated)],
                scope="onwards",
            ),
            pc.When(~(pc.Probe(VECTOR, at=pc.resid_post[1], name="also") > 0), pc.Scale(0.9, at=pc.resid_post[1])),
        ],
        logprobs=True,
    ),
    "noise": dict(edits=[pc.Noise(0.5, at=pc.resid_post[1], seed=3, relative=True)], capture=[pc.final_norm]),
    "by id": dict(edits=[pc.Scale(2.0, at=pc.mlp_out[2], tokens=pc.token(198))], capture=[pc.embed @ pc.token(198)]),
    "sampled": dict(sampling={"n": 3, "temperature": 1.0, "seed": 11}, edits=[pc.Scale(0.5, at=pc.attn_out[1])]),
    "scored": dict(score=[5, 9, 12], edits=[pc.Zero(pc.mlp_out[1])]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_as_here(lm, local, case):
    """One prompt after the other: in which step each prompt of a batch comes, and so its last bits, is chance there."""
    for prompt in PROMPTS:
        there, here = lm.run(prompt, max_tokens=5, **CASES[case]), local.run(prompt, max_tokens=5, **CASES[case])
        for a, b in zip(flat([there]), flat([here]), strict=True):
            check_same(a, b)
            assert bool(a.sites) == ("capture" in CASES[case])


def check_same(a: pc.Run, b: pc.Run) -> None:
    """Two runs are equal, to the bit."""
    assert (a.token_ids, a.text, a.scores, a.finish_reason) == (b.token_ids, b.text, b.scores, b.finish_reason)
    assert a.answer.logprobs == b.answer.logprobs
    assert a.answer.top_logprobs == b.answer.top_logprobs
    assert a.answer.prompt_logprobs == b.answer.prompt_logprobs
    assert a.answer.prompt_top_logprobs == b.answer.prompt_top_logprobs
    assert (a.sites, a.acted) == (b.sites, b.acted)
    assert list(a.probes) == list(b.probes)
    for name in a.probes:
        assert a.probe_positions(name) == b.probe_positions(name)
        assert torch.equal(a.probes[name], b.probes[name])
    assert list(a.lens) == list(b.lens)
    paths = [path for path, op in a.program.ops if isinstance(op, pc.Lens)]
    for site in [*a.lens, *paths]:
        read, other = a.lens[site], b.lens[site]
        assert (read.positions, read.tokens) == (other.positions, other.tokens)
        assert np.array_equal(read.logprobs, other.logprobs)
    for site in a.sites:
        assert a.positions(site) == b.positions(site)
        assert a[site].dtype == b[site].dtype
        assert torch.equal(a[site], b[site])


@pytest.mark.parametrize("name", SHARED)
def test_every_program_of_the_engines_parity_is_the_same_as_here(lm, local, name):
    prompt = parity.prompts(local, TEXT, len(SHARED))[list(SHARED).index(name)]
    options = dict(max_tokens=parity.NEW, sampling={"ignore_eos": True}, logprobs=True)
    there, here = (each.run(prompt, edits=parity.ops(SHARED[name], 0), **options) for each in (lm, local))
    check_same(there, here)
    assert there.logprobs != lm.run(prompt, **options).logprobs


def flat(runs):
    return [run for each in runs for run in (each if isinstance(each, list) else [each])]


def test_a_run_is_patched_into_another(lm, local):
    logprobs = []
    for each in (lm, local):
        source = each.run("The capital of Italy is", capture=[pc.resid_post[4]], max_tokens=1)
        patch = pc.Replace(pc.From(source, pc.resid_post[4]), at=pc.resid_post[4] @ pc.prompt[-1])
        logprobs.append(each.run(PROMPTS[0], edits=[patch], max_tokens=4, logprobs=True).logprobs)
    assert logprobs[0] == logprobs[1] != lm.run(PROMPTS[0], max_tokens=4, logprobs=True).logprobs


@pytest.mark.parametrize("tokens", [pc.span("colour"), pc.role("user")[-1], pc.role("user", 0) | pc.role("system")[0]])
def test_chats_and_the_bank(lm, local, tokens):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour of the sky."},
                {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "And of the sea?"}]  # fmt: skip
    texts = []
    for each in (lm, local):
        each.bank["calm"] = VECTOR
        edits = [pc.Add(pc.Named("calm"), at=pc.resid_post[3] @ tokens, scale=3.0)]
        texts.append(each.run(messages=messages, edits=edits, max_tokens=5, logprobs=True))
    assert texts[0].text == texts[1].text
    assert texts[0].logprobs == texts[1].logprobs
    assert texts[0].prompt_token_ids == texts[1].prompt_token_ids


def test_a_stream_and_asyncio(lm, local):
    edits = [pc.Add(VECTOR, at=pc.resid_post[3], scale=2.0)]
    here = local.run(PROMPTS[0], edits=edits, capture=[pc.embed], max_tokens=6)

    def streamed() -> list:
        stream = lm.stream(PROMPTS[0], edits=edits, capture=[pc.embed], max_tokens=6)
        parts = [next(stream)]
        so_far = stream.so_far["embed"]  # of the prompt, and of tokens that came in the meantime
        assert len(so_far) >= len(here.prompt_token_ids)
        assert torch.equal(so_far, here["embed"][: len(so_far)])
        parts += stream
        assert "".join(part.text for part in parts) == here.text == stream.run.text
        assert torch.equal(stream.run["embed"], here["embed"])
        return parts

    in_parts(streamed, len, 3)
    lenses = [pc.Lens(pc.resid_post[1:3], top=3), pc.Lens(pc.mlp_out[5] @ pc.generated, translators={5: MATRIX})]
    parts, run = (
        list(lm.stream(PROMPTS[0], capture=lenses, max_tokens=6)),
        local.run(PROMPTS[0], capture=lenses, max_tokens=6),
    )
    for site in ("resid_post[2]", "mlp_out[5]"):
        reads = [part.lens[site] for part in parts]
        assert [at for each in reads for at in each.positions] == run.lens[site].positions
        assert [token for each in reads for token in each.tokens] == run.lens[site].tokens
        np.testing.assert_allclose(
            np.concatenate([each.logprobs for each in reads]), run.lens[site].logprobs, atol=1e-4
        )

    async def several():
        return await asyncio.gather(*(lm.arun(prompt, edits=edits, max_tokens=4) for prompt in PROMPTS))

    assert [run.text for run in asyncio.run(several())] == [
        run.text for run in local.run(PROMPTS, edits=edits, max_tokens=4)
    ]


def test_a_sweep_is_the_same(lm, local):
    asked = dict(clean="The Eiffel Tower is in", corrupt="The Colosseum is in", answer=" Paris", foil=" Rome",
                 sites=[pc.resid_pre])  # fmt: skip
    there, here = patch_sweep(lm, **asked), patch_sweep(local, **asked)
    np.testing.assert_allclose(there.grid, here.grid, atol=1e-4)  # their batches may differ
    assert there.grid.size > 20


def graded_programs(each: pc.LM) -> list[Any]:
    """Of every kind that batches take, one that fails, and one without an edit."""
    source = each.run("The capital of Italy is", capture=[pc.resid_post[4], pc.z[2]], max_tokens=1)
    places = [(pc.resid_post[4], 2), (pc.z[2], 1)]
    return [
        *([pc.Replace(pc.From(source, at, pc.every[p]), at=at, tokens=pc.every[p])] for at, p in places),
        [pc.Add(VECTOR, at=pc.resid_post[3], tokens=pc.prompt[-1], scale=4.0), pc.Zero(pc.mlp_out[1])],
        [pc.Noise(0.5, at=pc.resid_post[1], seed=3)], pc.Scale(2.0, at=pc.mlp_out[2], tokens=pc.token(198)),
        [pc.Add([3e38] * 144, at=pc.resid_post[3], scale=1e30)], [],
    ]  # fmt: skip


def test_graded_programs_are_the_same(lm, local, monkeypatch):
    """Those of a list of prompts, and of one whose programs take several HTTP requests."""
    monkeypatch.setattr(wire, "MAX_PROGRAMS", 5)
    found = []
    for each in (lm, local):
        programs = graded_programs(each)
        asked: dict[str, Any] = dict(score=[" Paris", " Paris in", 5], kl=True, top=3)
        of_one = each.grade(PROMPTS[0], programs, **asked)
        with pytest.raises(pc.RunError):
            raise of_one.errors[5]
        found.append([of_one, *each.grade(PROMPTS[:2], [programs[2:5], []], **asked)])
    for there, here in zip(*found, strict=True):
        assert (there.route, here.route, list(there.errors)) == ("bulk", "bulk", list(here.errors))
        for name in ("logprobs", "baseline", "kl", "top_logprobs"):
            np.testing.assert_allclose(getattr(there, name), getattr(here, name), atol=1e-4, err_msg=name)
        assert (there.top_ids != here.top_ids).sum() <= 2  # two may be as likely
    assert settled(lm)["captured_bytes"] == 0


def test_grading_stops_with_its_client(lm):
    programs = [[pc.Scale(1 + i / 8192, at=pc.resid_post[0], tokens=pc.every[0])] for i in range(8192)]
    prompt = lm.tokens("one two three four five six seven eight nine ten " * 8)
    jobs = [lm.grade_job(prompt, programs, [[((), 5)]])]
    tables = [GradeTable(job) for job in jobs]
    results = lm.engine.grade(jobs, tables)
    next(results)
    results.close()
    settled(lm)
    becomes(lambda: "leases" in lm.engine.status() and not lm.engine.status()["leases"], 60)
    assert np.isnan(tables[0].logprobs).any()


def test_prompts_read_one_run_at_different_sites(lm, local):
    found = []
    for each in (lm, local):
        with contextlib.closing(each.run([1, 2, 3], max_tokens=1, capture=[pc.resid_post[:3]])) as run:
            programs = [[pc.Replace(pc.From(run, at), at), pc.Add(pc.From(run, at), pc.resid_post[3])]
                        for at in (pc.resid_post[1], pc.resid_post[2])]  # fmt: skip
            found.append(each.grade([[1, 2, 3], [1, 2, 4]], [programs[:1], programs[1:]], score=[5]))
    for over_http, here in zip(*found, strict=True):
        assert over_http.route == here.route == "bulk"
        np.testing.assert_allclose(over_http.logprobs, here.logprobs, atol=1e-4)


@pytest.mark.parametrize("most", ["programs", "bytes"])
def test_programs_that_do_not_fit_into_one_request(lm, monkeypatch, most):
    programs = [[pc.Scale(1 + i / 8, at=pc.resid_post, tokens=pc.every[i % 3])] for i in range(12)] + [[pc.Add(np.full(144, i), pc.embed)]
                for i in range(4)]  # fmt: skip
    whole = lm.grade([1, 2, 3], programs, score=[5])
    posts = []
    stock = http._encoded_jobs
    monkeypatch.setattr(http, "_encoded_jobs", lambda parts: posts.append(len(parts)) or stock(parts))
    if most == "programs":
        monkeypatch.setattr(wire, "MAX_PROGRAMS", 5)
    else:
        monkeypatch.setattr(http, "MAX_BATCH_BYTES", 1000)
        monkeypatch.setattr(wire, "MAX_BODY_BYTES", 2000)
    again = lm.grade([1, 2, 3], programs, score=[5])
    assert again.route == "bulk"
    assert len(posts) >= 4
    np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=1e-5)


def test_jobs_of_one_name_are_graded_apart(lm):
    """The name of a job is its client's to give, so two that run at once may have the same."""
    prompt = lm.tokens("one two three four five six seven eight nine ten")
    programs = [[[pc.Scale(1 + (i + 1) / 300, at=site[3], tokens=pc.every[i % 8])] for i in range(120)]
                for site in (pc.resid_post, pc.mlp_out)]  # fmt: skip
    jobs = [lm.grade_job(prompt, of, [[((), 5)]]) for of in programs]
    for job in jobs:
        job.name = jobs[0].name
    tables = [GradeTable(job) for job in jobs]
    threads = [threading.Thread(target=lambda pair=pair: collections.deque(lm.engine.grade(*pair), 0))
               for pair in zip(([job] for job in jobs), ([table] for table in tables), strict=True)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for table, of in zip(tables, programs, strict=True):
        np.testing.assert_allclose(table.logprobs[1:], lm.grade(prompt, of, score=[5]).logprobs, atol=1e-5)
    settled(lm)
    becomes(lambda: not any(lm.engine.status()[name] for name in ("leases", "programs", "records")), 60)


@pytest.mark.parametrize(
    "change",
    [
        dict(source=MeanOf(["A cat is here", "The Kremlin is in"]), alpha=0.5, mask=np.arange(144) % 2, window=2),
        dict(source=Resampled([[9, 8, 7, 6, 5, 4]] * 2), sites=["z"], group=3, layers="2:4"),
        dict(zoom=1, clean="The Eiffel Tower is in", corrupt="The Colosseum is in", positions=None),
        dict(direction="noising", answer=[[30, 31], [32]], sites=["neurons[3, 0:64]"]),
    ],
    ids=["mean, masked", "resampled", "zoom", "several tokens"],
)
def test_all_of_a_sweep_is_there_over_http(lm, local, tmp_path, monkeypatch, change):
    """Nothing of `patch_sweep` needs the engine in this process; and a sweep here goes on from its file."""
    asked = dict(clean=["The Eiffel Tower is in", "The Louvre Tower is in"], corrupt=["The Colosseum is in"] * 2,
                 answer=" Paris", foil=" Rome", positions=[-1, 1], layers="3:6", sites=["resid_pre", "attn_out"])  # fmt: skip
    asked |= change
    there, here = (patch_sweep(each, **asked, resume=tmp_path / str(i)) for i, each in enumerate((lm, local)))
    np.testing.assert_allclose(there.each, here.each, atol=1e-3)
    for name in ("low", "high", "effect_low", "effect_high", "p", "p_family"):
        a, b = getattr(there, name), getattr(here, name)
        assert (a is None) == (b is None) == (len(here.pairs) == 1)
        assert a is None or np.allclose(a, b, atol=1e-3)
    assert np.nanmax(np.abs(there.values - there.baseline)) > 0.01
    assert (there.source, len(there.blocks), there.pairs[0].columns) == (
        here.source, len(here.blocks), here.pairs[0].columns
    )  # fmt: skip
    with monkeypatch.context() as still:
        still.setattr(lm.engine, "submit", lambda requests: pytest.fail("all is known"))
        again = patch_sweep(lm, **asked, resume=tmp_path / "0")
    assert again.each.tobytes() == there.each.tobytes()


def test_ten_thousand_bytes_of_vectors_each(lm, local):
    vectors = np.random.default_rng(1).standard_normal((40, 144)).astype(np.float32)
    prompts = [[100 + i, 7, 9] for i in range(40)]
    edits = [[pc.Add(vector, at=pc.resid_post[2], scale=3.0)] for vector in vectors]
    there, here = (each.run(prompts, edits=edits, max_tokens=2, logprobs=True) for each in (lm, local))
    for a, b in zip(there, here, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert len({tuple(np.round(run.logprobs, 3)) for run in there}) == 40


def test_errors_are_the_same(lm, local):
    for each in (lm, local):
        with pytest.raises(pc.UnsupportedSite, match="8 layers"):
            each.run("hello", capture=[pc.resid_post[99]])
        with pytest.raises(pc.RunError, match="not finite"):
            each.run("hello", edits=[pc.Scale(3e38, at=pc.resid_post[1])] * 2, max_tokens=1)
        with pytest.raises(pc.UnknownName, match="temperatur"):
            each.run("hello", sampling={"temperatur": 1.0})
    runs = lm.run(["hello", "there"], edits=[[pc.Scale(3e38, at=pc.resid_post[1])] * 2, []], max_tokens=1)
    assert "not finite" in str(runs[0].error)
    assert runs[1].text == local.run("there", max_tokens=1).text


def test_another_key_reads_and_frees_nothing(lm, server):
    run = lm.run("hello", capture=[pc.embed], max_tokens=1)
    with pc.LM(server.url, api_key=KEYS[1]) as other:
        with pytest.raises(pc.MissingSource, match="this client"):
            other.engine.fetch(run.key, 0)
        other.engine.release([run.key])
        with pytest.raises(pc.MissingSource):
            other.engine._wait(other.engine._ask("POST", "free", {"release": [run.key]}))
    assert run["embed"].shape == (1, 144)
    with pytest.raises(pc.EngineError, match="rejected the API key"):
        pc.LM(server.url, api_key="no-key")


def test_nothing_is_left_when_runs_are_dropped(lm):
    runs = lm.run(PROMPTS * 10, capture=[pc.resid_post], edits=[pc.Add(VECTOR, at=pc.embed)], max_tokens=2)
    assert counts(lm)["captured_bytes"] > 0
    del runs
    assert not any(settled(lm).values())


def test_a_call_that_is_cancelled_stops(lm):
    async def cancelled():
        task = asyncio.ensure_future(lm.arun(PROMPTS * 20, edits=[pc.Scale(0.9, at=pc.embed)], max_tokens=400))
        assert await asyncio.to_thread(becomes, lambda: counts(lm)["programs"] > 0, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not any(settled(lm).values())


WORK = {  # of a client, over and over
    "batch": "lm.run([[5, 6, 7]] * 60, capture=[pc.resid_post], max_tokens=200, sampling=on)",
    "sweep": "pc.studies.patch_sweep(lm, clean=[5, 6, 7] * 40, corrupt=[5, 6, 8] * 40, answer=7, foil=9)",
    "kept": "lm.run([5, 6, 7], max_tokens=200, edits=[pc.Zero(pc.embed)], sampling=on)",
}


@pytest.mark.parametrize("work", ["kept", *(pytest.param(each, marks=pytest.mark.slow) for each in ("batch", "sweep"))])
def test_a_client_that_is_killed_leaves_nothing(lm, server, work):
    """Neither what runs nor what was captured before, which in a sweep is the clean run; within seconds."""
    script = f"""
        import patchclamp as pc
        with pc.LM({server.url!r}, api_key={KEYS[0]!r}) as lm:
            on = {{"ignore_eos": True}}
            kept = lm.run([5, 6, 7], max_tokens=1, capture=[pc.resid_post])
            while True:
                {WORK[work]}
    """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        assert becomes(lambda: counts(lm)["captured_bytes"] > 0 and counts(lm)["programs"] > 0)
        assert client.poll() is None
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        assert not any(settled(lm, within_s=wire.LEASE_S / 2).values())  # and not when its lease has run out
    finally:
        client.kill()


def test_a_client_needs_neither_vllm_nor_torch_until_it_reads_a_tensor(server):
    script = f"""
        import sys

        class Blocked:
            def find_spec(self, name, *_):
                if name.partition(".")[0] in ("vllm", "torch", "transformers"):
                    raise ImportError(name)

        sys.meta_path.insert(0, Blocked())
        import patchclamp as pc
        with pc.LM({server.url!r}, api_key={KEYS[0]!r}) as lm:
            run = lm.run("The capital of France is", edits=[pc.Add([0.5] * 144, at=pc.embed)], capture=[pc.embed])
            assert run.text and "".join(part.text for part in lm.stream("x", max_tokens=2))
            sweep = pc.studies.patch_sweep(lm, clean="The Eiffel Tower", corrupt="The Colosseum", answer=" Paris", foil=" Rome")
            assert sweep.best(1)
            try:
                run[pc.embed]
            except pc.EngineError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert "pip install torch" in done.stdout, done.stderr


def test_a_server_that_is_none_of_ours(server):
    with pytest.raises(pc.ModelError, match="no response"):
        pc.LM("http://127.0.0.1:9", timeout_s=1)
    with pytest.raises(pc.EngineError, match="engine="):
        pc.LM(server.url, engine="vllm")
    with pytest.raises(pc.UnknownName, match="api_key"):
        pc.LM(server.url, api_kye="x")


def test_a_server_checks_the_translator_of_a_lens(lm):
    """Our client has checked it. Others may not have."""
    run = lm.run(PROMPTS[0], max_tokens=1, capture=pc.Lens(pc.resid_post[2]))
    [(point, op)] = run.unread_lenses()
    vector = {"type": "vector", "shape": (575, 575), "data": bytes(4 * 575**2)}
    for translator, kind, path in (
        ({"layer": 2, "matrix": vector}, pc.ShapeError, "translator"),
        ({"layer": 2, "matrix": vector | {"shape": (5,)}}, pc.ShapeError, None),
        ({"layer": 2, "matrix": vector | {"shape": (1, 1), "data": b"\0\0\xc0\x7f"}}, pc.ShapeError, None),
        ({"layer": 2, "matrix": "lens.safetensors"}, pc.ProgramError, None),
    ):
        with pytest.raises(kind) as raised:
            lm.engine.lens_many([(run.key, point, op)], 5, translator)
        assert raised.value.path == path
    assert run.lens[pc.resid_post[2]].ids.shape == (len(run.prompt_token_ids), 5)


def test_the_text_of_a_run_that_ended_at_a_probe_is_made_with_its_sampling_parameters(lm, local):
    """Special tokens are part of the text here and there, streamed and not."""
    probe = pc.Probe(np.ones((1, 144), np.float32), at=pc.resid_post[3], name="p")
    special = {"ignore_eos": True, "skip_special_tokens": False, "allowed_token_ids": [0, 1, 2]}
    call = {"max_tokens": 8, "stop_when": probe > -1e9, "sampling": special}
    here, run, stream = local.run("Hello", **call), lm.run("Hello", **call), lm.stream("Hello", **call)
    assert (here.stop_reason, here.text[:2]) == ("probe:p", "<|")
    assert run.text == "".join(part.text for part in stream) == stream.run.text == here.text


@pytest.mark.parametrize("by_rank", [0, -1])
def test_runs_end_where_a_probe_fires(lm, local, by_rank):
    """And the server stops computing: captures, scores and text are those of the engine here."""
    weight = np.random.default_rng(3).standard_normal((2, 144)).astype(np.float32)
    p, site = pc.Probe(weight, at=pc.resid_post[3], name="p"), pc.resid_post[5]
    long = {"max_tokens": 200, "sampling": {"ignore_eos": True}, "capture": site}
    whole = local.run("The capital of France is", max_tokens=16, sampling={"ignore_eos": True}, capture=p)
    scores = whole.probes["p"][len(whole.prompt_token_ids) :, 0].tolist()
    token = [i for i, score in enumerate(scores) if score > max(scores[:i], default=score - 1) + 0.01][by_rank]
    condition = p > (scores[token] + max(scores[:token], default=scores[token] - 1)) / 2
    here = local.run("The capital of France is", stop_when=condition, **long)
    before = lm.engine.status()["steps_planned"]
    run = lm.run("The capital of France is", stop_when=condition, **long)
    stream = lm.stream("The capital of France is", stop_when=condition, **long)
    parts = list(stream)
    assert lm.engine.status()["steps_planned"] - before < 2 * long["max_tokens"] - 100
    for each in (run, stream.run):
        assert each.token_ids == here.token_ids == whole.token_ids[: token + 1]
        assert (each.text, each.stop_reason, each.finish_reason) == (here.text, "probe:p", "stop")
        assert torch.allclose(each[site], here[site], rtol=1e-4, atol=1e-3)
        assert torch.allclose(each.probes["p"], here.probes["p"], rtol=1e-4, atol=1e-3)
    assert torch.equal(torch.cat([part.scores["p"].scores for part in parts]), stream.run.probes["p"])
