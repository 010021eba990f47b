"""A server with probes of its own (`--probe`): plain clients get scores, and operators get metrics and a log."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import openai
import pyarrow.parquet
import pytest
from prometheus_client import CollectorRegistry, Histogram

import patchclamp as pc
from patchclamp.engines.base import Monitor
from patchclamp.engines.vllm.server import ProbeLog, with_config
from patchclamp.errors import ProgramError
from patchclamp.language.program import condition_to_dict
from patchclamp.serve.monitoring import BUCKETS, ScoreLog, ScoreWatch, observe

from .conftest import KEYS, Server, becomes, in_parts, start, stop
from .test_openai import program

PROMPT, LONG = "The capital of France is", "Water boils at a temperature of one hundred degrees, and it freezes at " * 6


@pytest.fixture(scope="module")
def probes(local) -> list[pc.Probe]:
    rng, width = np.random.default_rng(0), local.model.d_model

    def probe(name: str, outputs: int, at: pc.Site, **options) -> pc.Probe:
        return pc.Probe(rng.standard_normal((outputs, width)) / width**0.5, at, name=name, **options)

    return [probe("lies", 1, pc.resid_post[5], activation="sigmoid"), probe("kinds", 3, pc.resid_post[2:4])]


@pytest.fixture(scope="module")
def watched(model, probes, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("watched")
    for probe in probes:
        probe.save(folder / f"{probe.name}.safetensors")
    made = start(
        model, folder / "server.log", f"--probe=lies={folder}/lies.safetensors@resid_post[5]>0.5",
        "--probe", f"kinds={folder}/kinds.safetensors@resid_post[2:4]", "--probe-log", str(folder / "scores.jsonl"),
        "--api-key", *KEYS,
    )  # fmt: skip
    yield made
    stop(made)


@pytest.fixture
def client(watched) -> openai.OpenAI:
    return watched.openai()


def expected(local: pc.LM, probes: list[pc.Probe], run: pc.Run) -> dict[str, np.ndarray]:
    """The scores of a run's tokens, of probes in a program."""
    again = local.run(run.prompt_token_ids + run.token_ids[:-1], max_tokens=1, capture=probes)
    return {probe.name: np.asarray(again.probes[probe.name]) for probe in probes}


def check(choice: dict, scores: dict[str, np.ndarray]) -> None:
    told = choice["patchclamp"]["probes"]
    assert told.keys() == scores.keys()
    for name, rows in scores.items():
        assert told[name]["positions"] == list(range(rows.shape[-2]))
        np.testing.assert_allclose(told[name]["scores"], rows, atol=1e-4)


def joined(chunks: list[dict], index: int = 0) -> dict:
    """A choice of a stream's chunks put together, of one whose scores have each come once, in order."""
    probes: dict[str, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, new in choice.get("patchclamp", {}).get("probes", {}).items() if choice["index"] == index else ():
                old = probes.setdefault(name, {"positions": [], "scores": None})
                assert new["positions"] == [
                    *range(len(old["positions"]), len(old["positions"]) + len(new["positions"]))
                ]
                if not new["positions"]:
                    continue
                old["positions"] += new["positions"]
                rows = np.asarray(new["scores"])
                old["scores"] = rows if old["scores"] is None else np.concatenate([old["scores"], rows], -2)
    return {"patchclamp": {"probes": probes}}


@pytest.mark.slow
def test_a_plain_client_gets_scores(client, model, local, probes):
    for prompt in (PROMPT, LONG, LONG):  # the last one from the cache
        run = local.run(prompt, max_tokens=6)
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0).to_dict()
        assert answer["choices"][0]["text"] == run.text
        check(answer["choices"][0], expected(local, probes, run))


@pytest.mark.slow
def test_each_chunk_of_a_stream_has_new_scores(client, model, local, probes):
    run = local.run(LONG, max_tokens=8)
    given = {"model": model, "max_tokens": 8, "temperature": 0, "stream": True}
    given["extra_body"] = {"return_token_ids": True}
    chunks = in_parts(
        lambda: [chunk.to_dict() for chunk in client.completions.create(prompt=LONG, **given)],
        lambda chunks: sum("patchclamp" in chunk["choices"][0] for chunk in chunks), 5,
    )  # fmt: skip
    check(joined(chunks), expected(local, probes, run))
    for i, choice in enumerate(chunk["choices"][0] for chunk in chunks):
        tokens = sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks[: i + 1])
        for told in choice["patchclamp"]["probes"].values():  # up to the token before the newest
            assert told["positions"][-1] == len(run.prompt_token_ids) + tokens - 2


@pytest.mark.slow
def test_choices_of_several_prompts_have_their_own(client, model, local, probes):
    prompts = [PROMPT, LONG, "One"]
    given = {"model": model, "prompt": prompts, "max_tokens": 5, "n": 2, "temperature": 1.0, "seed": 3,
             "extra_body": {"return_token_ids": True}}  # fmt: skip
    answer = client.completions.create(**given).to_dict()
    chunks = [chunk.to_dict() for chunk in client.completions.create(**given, stream=True)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for choice in answer["choices"]:
        ids = choice["prompt_token_ids"] + choice["token_ids"][:-1]
        again = local.run(ids, max_tokens=1, capture=probes)
        scores = {probe.name: np.asarray(again.probes[probe.name]) for probe in probes}
        check(choice, scores)
        check(joined(chunks, choice["index"]), scores)


@pytest.mark.slow
def test_a_chat_has_scores(client, model, local, probes):
    messages = [{"role": "user", "content": "Name a colour."}]
    run = local.run(messages=messages, max_tokens=6)
    given = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**given).to_dict()
    check(answer["choices"][0], expected(local, probes, run))
    chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**given, stream=True)]
    check(joined(chunks), expected(local, probes, run))


@pytest.mark.slow
def test_beside_a_program(client, model, local, probes):
    edit = pc.Scale(0.5, at=pc.resid_post[1])
    own = pc.Probe(probes[0].weight, pc.resid_post[4], name="own")
    body = program([edit], [own])
    run = local.run(PROMPT, max_tokens=5, edits=edit)
    again = local.run(run.prompt_token_ids + run.token_ids[:-1], max_tokens=1, edits=edit, capture=probes)
    scores = {probe.name: np.asarray(again.probes[probe.name]) for probe in probes}
    given = {"model": model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "extra_body": body}
    answer = client.completions.create(**given).to_dict()
    check(answer["choices"][0], scores)
    assert list(answer["patchclamp"]["runs"][0]["probes"]) == ["own"]
    chunks = [chunk.to_dict() for chunk in client.completions.create(**given, stream=True)]
    parts = joined(chunks)
    assert len(parts["patchclamp"]["probes"].pop("own")["positions"]) == scores["lies"].shape[0]
    check(parts, scores)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["own", "lies"])
def test_scores_end_with_a_run_that_a_condition_ended(client, model, local, probes, stop):
    """Also where the condition is on the server's own probe, whose scores then come once."""
    whole = local.run(PROMPT, max_tokens=24, sampling={"ignore_eos": True}, capture=probes[0])
    scores = np.asarray(whole.probes["lies"])[len(whole.prompt_token_ids) :, 0]
    token = int(np.flatnonzero(np.maximum.accumulate(scores) == scores)[2])  # higher than all before
    threshold = float((scores[token] + scores[:token].max()) / 2)
    condition = pc.Probe(probes[0].weight, probes[0].at, activation="sigmoid", name=stop) > threshold
    given = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    given["extra_body"] = {"patchclamp": {"stop_when": condition_to_dict(condition)}, "ignore_eos": True}
    answer = client.completions.create(**given).to_dict()
    chunks = [chunk.to_dict() for chunk in client.completions.create(**given, stream=True)]
    assert len(scores) > token + 1 > 1  # it goes on without the condition
    ended = local.run(whole.prompt_token_ids + whole.token_ids[: token + 1], max_tokens=1, capture=probes)
    expected = {each.name: np.asarray(ended.probes[each.name]) for each in probes}
    for choice in (answer["choices"][0], joined(chunks)):
        told = choice["patchclamp"]["probes"]
        if stop == "own":
            told.pop("own", None)  # in a stream, with the chunks
        check(choice, expected)
    assert answer["choices"][0]["stop_reason"] == f"probe:{stop}"


@pytest.mark.slow
def test_the_same_probe_in_a_program_is_one_series_and_another_of_its_name_refused(client, model, local, probes):
    lies, given = probes[0], {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    run = local.run(PROMPT, max_tokens=6)
    body = program([], [lies])
    answer = client.completions.create(**given, extra_body=body).to_dict()
    check(answer["choices"][0], expected(local, probes, run))
    chunks = [chunk.to_dict() for chunk in client.completions.create(**given, extra_body=body, stream=True)]
    check(joined(chunks), expected(local, probes, run))
    other = pc.Probe(np.ones((2, local.model.d_model)), pc.resid_post[4], name="lies")
    when = pc.When(other > 0.5, [pc.Scale(2.0, at=pc.resid_post[5])])
    for path, wrong in {
        "patchclamp.capture[1].name": program([], [pc.resid_post[3] @ pc.prompt[-1], other]),
        "patchclamp.edits[0].name": program([when]),
        "patchclamp.stop_when.name": {"patchclamp": {"stop_when": condition_to_dict(other > 0.5)}},
    }.items():
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as raised:
                client.completions.create(**given, extra_body=wrong, stream=stream)
            assert path in str(raised.value.body)


@pytest.mark.slow
def test_requests_with_one_name_have_their_own_scores(client, watched, model, local, probes):
    """Also of two API keys, and the two runs of a comparison, which vLLM gives one name."""
    runs = local.run([PROMPT, LONG], max_tokens=40)
    clients = [client, watched.openai(KEYS[1])] * 2

    def ask(i: int) -> dict:
        given = {"model": model, "prompt": (PROMPT, LONG)[i % 2], "temperature": 0, "max_tokens": 40, "stream": i > 1}
        answer = clients[i].completions.create(**given, extra_headers={"X-Request-Id": "same"})
        return joined([chunk.to_dict() for chunk in answer]) if i > 1 else answer.to_dict()["choices"][0]

    with ThreadPoolExecutor(4) as pool:
        for i, choice in enumerate(pool.map(ask, range(4))):
            check(choice, expected(local, probes, runs[i % 2]))
    edit = pc.Scale(0.5, at=pc.resid_post[1])
    body = program([edit])
    body["patchclamp"]["compare"] = True
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=5, temperature=0, extra_body=body
    ).to_dict()
    run = local.run(PROMPT, max_tokens=5, edits=edit)
    again = local.run(run.prompt_token_ids + run.token_ids[:-1], max_tokens=1, edits=edit, capture=probes)
    check(answer["choices"][0], {probe.name: np.asarray(again.probes[probe.name]) for probe in probes})


@pytest.mark.slow
def test_concurrent_and_disconnecting_clients(client, watched, model, local, probes):
    prompts = [f"{PROMPT}{'!' * i}" for i in range(12)]
    runs = local.run(prompts, max_tokens=12)

    def ask(i: int) -> dict:
        given = {"model": model, "prompt": prompts[i], "temperature": 0, "stream": True}
        if i % 3 == 0:  # leaves early
            with client.completions.create(max_tokens=200, **given) as stream:
                next(iter(stream))
            return {}
        return joined([chunk.to_dict() for chunk in client.completions.create(max_tokens=12, **given)])

    with ThreadPoolExecutor(12) as pool:
        for i, choice in enumerate(pool.map(ask, range(12))):
            if choice:
                check(choice, expected(local, probes, runs[i]))


@pytest.mark.slow
def test_metrics_count_every_score(client, watched, model):
    def count() -> tuple[int, int, int]:
        with watched.http() as http:
            text = http.get("/metrics").text
        found = [re.search(rf'patchclamp:{name}{{[^}}]*probe="{of}"[^}}]*}} ([\d.]+)', text) for name, of in (
            ("probe_score_count", "lies"), ("probe_above_total", "lies"), ("probe_score_count", "kinds"))]  # fmt: skip
        return tuple(int(float(each[1])) if each else 0 for each in found)

    before = count()
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=9, temperature=0).to_dict()
    [told] = answer["choices"]
    scores = np.asarray(told["patchclamp"]["probes"]["lies"]["scores"])
    added = np.array(count()) - before
    assert added.tolist() == [len(scores), (scores > 0.5).sum(), 2 * len(scores)]


@pytest.mark.slow
def test_the_log_has_every_token(client, watched, model):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=7, temperature=1.0, n=2).to_dict()
    told = answer["choices"][1]["patchclamp"]["probes"]

    def lines() -> list[dict]:
        files = sorted(watched.log.parent.glob("scores-*.jsonl"))
        return [
            line for file in files for line in map(json.loads, file.read_text().splitlines()[:])
            if line["request"].startswith(answer["id"]) and line["choice"] == 1
        ]  # fmt: skip

    assert becomes(lambda: len(lines()) == len(told["lies"]["positions"]), 30)
    found = lines()
    assert [line["position"] for line in found] == told["lies"]["positions"]
    np.testing.assert_allclose([line["lies"] for line in found], told["lies"]["scores"], atol=1e-6)
    layers = np.asarray(told["kinds"]["scores"])
    np.testing.assert_allclose([line["kinds"] for line in found], np.concatenate([*layers], -1), atol=1e-6)
    assert all(isinstance(line["token"], int) for line in found)


def monitors(outputs: int = 2) -> list[Monitor]:
    return [Monitor(pc.Probe(np.eye(outputs, 4), pc.resid_post[0], name="p"), None, (0,), tuple(range(outputs)))]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_log_is_bounded_and_goes_on_after_a_restart(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("patchclamp.serve.monitoring.FLUSH_ROWS", 64)
    dropped: list[int] = []

    def log(files: int) -> ScoreLog:
        asked = ProbeLog(str(tmp_path / f"s.{suffix}"), file_bytes=4000, files=files)
        return ScoreLog(asked, monitors(), dropped.append, 0)

    def written() -> list[dict]:
        found: list[dict] = []
        for file in sorted(tmp_path.glob(f"s-*.{suffix}")):
            found += pyarrow.parquet.read_table(file).to_pylist() if suffix == "parquet" else [
                json.loads(line) for line in file.read_text().splitlines()]  # fmt: skip
        return found

    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((int(rng.integers(1, 9)), 2)).astype(np.float32) for _ in range(200)]
    for part in (rows[:100], rows[100:]):
        made = log(1000)
        for i, products in enumerate(part):
            made.put(f"r{i}", 0, [*range(len(products))], 3, products)
        made.close()
    assert dropped == []
    found = written()
    np.testing.assert_allclose([line["p"] for line in found], np.concatenate(rows), atol=1e-6)
    assert [line["position"] for line in found] == [3 + i for products in rows for i in range(len(products))]
    assert len(list(tmp_path.glob(f"s-*.{suffix}"))) > 4
    made = log(2)
    made.put("last", 1, [None], 0, np.full((1, 2), np.nan, np.float32))
    made.close()
    assert len(list(tmp_path.glob(f"s-*.{suffix}"))) == 2
    assert written()[-1]["p"] == [None, None]
    assert written()[-1]["token"] is None


@pytest.mark.parametrize("stem", ["s", "s[1]"])
def test_only_numbered_files_of_the_log_are_rotated(tmp_path, stem):
    """Files of other names stay, and numbers go on after a restart."""
    others = [
        tmp_path / f"{stem}-{words}.jsonl" for words in ("2026-11-01", "2b", "20261101", "1-000007", "000009-old")
    ]
    for file in others:
        file.write_text("mine")
    dropped: list[int] = []
    for i in range(4):
        made = ScoreLog(ProbeLog(str(tmp_path / f"{stem}.jsonl"), files=2), monitors(), dropped.append, 0)
        made.put(f"r{i}", 0, [1], 0, np.zeros((1, 2), np.float32))
        made.close()
    assert (dropped, [file.read_text() for file in others]) == ([], ["mine"] * len(others))
    written = {file.name: file.read_text() for file in tmp_path.iterdir() if file not in others}
    assert written.keys() == {f"{stem}-000003.jsonl", f"{stem}-000004.jsonl"}
    assert json.loads(written[f"{stem}-000004.jsonl"])["request"] == "r3"


@pytest.mark.parametrize("fails", ["_next_file", "_write_lines", "_lines", "unlink"])
def test_a_full_queue_and_a_failed_disk_drop_and_count(tmp_path, monkeypatch, fails):
    monkeypatch.setattr("patchclamp.serve.monitoring.MAX_QUEUED", 16)
    if fails == "unlink":
        (tmp_path / "s-000001.jsonl").mkdir()
    else:
        monkeypatch.setattr(ScoreLog, fails, lambda self, *given: 1 / 0)
    dropped: list[int] = []
    made = ScoreLog(ProbeLog(str(tmp_path / "s.jsonl"), files=1), monitors(), dropped.append, 0)
    for _ in range(50):
        made.put("r", 0, [1, 2], 0, np.zeros((2, 2), np.float32))
    made.close()
    assert sum(dropped) == 100


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without room")
def test_a_full_disk_drops_and_counts(tmp_path):
    dropped: list[int] = []
    (tmp_path / "s-000001.jsonl").symlink_to("/dev/full")
    made = ScoreLog.__new__(ScoreLog)
    made._next_file = lambda: tmp_path / "s-000001.jsonl"  # type: ignore[method-assign]
    made.__init__(ProbeLog(str(tmp_path / "s.jsonl")), monitors(), dropped.append, 0)
    for _ in range(50):
        made.put("r", 0, [1, 2], 0, np.zeros((2, 2), np.float32))
    made.close()
    assert sum(dropped) == 100


def test_the_queue_holds_a_number_of_scores(tmp_path, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr("patchclamp.serve.monitoring.MAX_QUEUED", 100)
    monkeypatch.setattr(ScoreLog, "_next_file", lambda self: held.wait() and tmp_path / "s-000001.jsonl")
    dropped: list[int] = []
    made = ScoreLog(ProbeLog(str(tmp_path / "s.jsonl")), monitors(), dropped.append, 0)
    for tokens in (10, 20, 30, 20):
        made.put("r", 0, [*range(tokens)], 0, np.zeros((tokens, 2), np.float32))
    held.set()
    made.close()
    assert dropped == [30]
    assert len((tmp_path / "s-000001.jsonl").read_text().splitlines()) == 50


def test_a_probe_named_like_a_column_of_the_log_is_refused(tmp_path):
    named = msgspec.structs.replace(monitors()[0], probe=pc.Probe(np.eye(2, 4), pc.resid_post[0], name="token"))
    with pytest.raises(ProgramError):
        ScoreLog(ProbeLog(str(tmp_path / "s.jsonl")), [named], print, 0)


def test_a_sample_of_requests_is_logged(tmp_path):
    taken: list[str] = []
    watch = ScoreWatch(monitors(), "a model of the sample", ProbeLog(str(tmp_path / "s.jsonl"), sample=0.25), 0,
                  lambda name, first, count: (name, 0, [None] * count))  # fmt: skip
    assert watch._log is not None
    watch._log.put = lambda name, *rest: taken.append(name)  # type: ignore[method-assign]
    names = [f"request {i}" for i in range(400)]
    for _ in range(2):
        watch(names, np.zeros(400, np.int64), np.ones(400, np.int64), np.zeros((400, 2), np.float32))
    assert 60 < len(set(taken)) < 140
    assert sorted(taken[: len(taken) // 2]) == sorted(taken[len(taken) // 2 :])


def test_many_values_are_observed_like_single_ones():
    values = np.concatenate([np.random.default_rng(0).standard_normal(500) * 20, BUCKETS]).astype(np.float32)
    registry = CollectorRegistry()
    one, many = (Histogram(name, name, buckets=BUCKETS, registry=registry) for name in ("one", "many"))
    for value in values:
        one.observe(float(value))
    observe(many, values)
    samples = {name: {sample.name.removeprefix(name) + str(sample.labels): sample.value for sample in metric.samples
                      if "created" not in sample.name}
               for metric in registry.collect() for name in [metric.name]}  # fmt: skip
    assert samples["one"].keys() == samples["many"].keys()
    for key, value in samples["one"].items():
        assert samples["many"][key] == pytest.approx(value)


def test_options_of_the_command():
    asked = ["--max-model-len", "64", "--probe=a=x@y[1]", "--probe", "b=z@y[2]>1", "--probe-log=s.jsonl",
             "--probe-log-sample", "0.5", "--hide-scores", "--additional-config", '{"patchclamp": {"serve": {"sweeps": 1}}}']  # fmt: skip
    *rest, name, config = with_config(asked)
    assert (rest, name) == (["--max-model-len", "64"], "--additional-config")
    ours = json.loads(config)["patchclamp"]
    assert ours["probes"] == ["a=x@y[1]", "b=z@y[2]>1"]
    path = str(Path("s.jsonl").absolute())
    assert ours["serve"] == {"sweeps": 1, "probe_log": {"path": path, "sample": 0.5}, "show_scores": False}
    for wrong in (["--probe-log", "s.jsonl"], ["--hide-scores"], ["--probe=a=x@y[1]", "--probe-log-sample=x"]):
        with pytest.raises(ProgramError):
            with_config(wrong)
