"""What a server counts, beside vLLM's own metrics, and what it writes into its log."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import patchclamp as pc
from patchclamp.language.program import condition_to_dict

from .conftest import KEYS, Server, becomes
from .test_openai import PROMPT, SCORED, STEERED, complete, program

SECRET = "Zanzibar quagga"
# what the engine cores hold: they are asked now and then, whenever that falls, so that it is no part of a change
GAUGES = {"patchclamp:programs_waiting", "patchclamp:programs_admitted"}
PASSED = "patchclamp:self_checks_total passed"  # every request with captures is checked here


def counted(server: Server) -> Counter[str]:
    """Our samples, by name and what tells them apart."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics/", timeout=60).text)
    return Counter({
        " ".join([sample.name, *(value for name, value in sample.labels.items() if name in ("kind", "error", "result"))]): sample.value
        for family in families for sample in family.samples
        if sample.name.startswith("patchclamp:") and "le" not in sample.labels
    })  # fmt: skip


def change(server: Server, before: Counter[str]) -> dict[str, float]:
    """What was counted since, but for checks that passed."""
    after = counted(server)
    return {
        name: after[name] - before[name]
        for name in after
        if after[name] != before[name] and "_created" not in name and name not in (*GAUGES, PASSED)
    }


def lines(server: Server, start: int = 0) -> list[dict]:
    """What our lines of the log say of requests, from a character on."""
    return [line for line in every_line(server, start) if line["event"] != "proved"]


def every_line(server: Server, start: int = 0) -> list[dict]:
    told = [
        line.partition("] {")[2]
        for line in server.log.read_text()[start:].splitlines()
        if "[server_state.py:" in line and "] {" in line
    ]
    return [json.loads("{" + line) for line in told]


def test_programs_ops_rows_and_bytes_are_counted(server):
    before, start = counted(server), len(server.log.read_text())
    capture = [pc.resid_post[2], pc.z[1:3] @ pc.prompt]
    response = complete(server, program([STEERED, pc.Scale(0.5, at=pc.mlp_out[0:4], tokens=pc.prompt[-1])], capture))
    positions = response.usage.total_tokens - 1
    prompt = response.usage.prompt_tokens
    told = change(server, before)
    assert told.pop("patchclamp:admission_seconds_sum") >= 0
    assert told == {
        "patchclamp:programs_total": 1, "patchclamp:ops_total linear": 2, "patchclamp:ops_total capture": 2,
        "patchclamp:rows_edited_total": positions + 4, "patchclamp:admission_seconds_count": 1,
        "patchclamp:captured_bytes_total": 4 * (144 * positions + 576 * 2 * prompt),
    }  # fmt: skip
    [line] = lines(server, start)
    assert line.pop("took_s") > 0
    assert line == {
        "event": "program", "owner": line["owner"], "ops": 4, "runs": 1, "prompt_tokens": prompt, "generated_tokens": 6,
        "fingerprint": response.model_extra["patchclamp"]["fingerprint"],
        "captured_bytes": 4 * (144 * positions + 576 * 2 * prompt),
    }  # fmt: skip


def test_checks_of_labels_are_counted(server):
    before = counted(server)
    complete(server, program([STEERED], [pc.resid_post[2]]))
    assert counted(server)[PASSED] == before[PASSED] + 1
    complete(server, program([STEERED], []))
    after = counted(server)
    assert after[PASSED] == before[PASSED] + 1
    assert after["patchclamp:self_checks_total failed"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_request_that_ended_at_a_probe_are_counted(server, stream):
    """Those of its generated tokens, too."""
    before = counted(server)
    answers = complete(server, {**program([STEERED], stop_when=condition_to_dict(SCORED > -1e9))}, max_tokens=400,
                       stream=stream)  # fmt: skip
    *_, last = answers if stream else [answers]
    [run] = last.model_extra["patchclamp"]["runs"]
    positions = len(run["probes"]["p"]["positions"])
    rows = change(server, before)["patchclamp:rows_edited_total"]
    assert positions <= rows < positions + 150  # the engine goes on until it is told, which takes longer under load


def test_the_log_says_what_was_proved_at_the_start(server):
    complete(server, program([STEERED]))  # which waits for it
    [line] = [line for line in every_line(server) if line["event"] == "proved"]
    assert line.pop("took_s") > 0
    assert line == {"event": "proved", "owner": "open", "sites": 15, "withdrawn": []}


def test_rows_of_edits_by_token_id_are_counted_where_they_acted(server, local):
    run = local.run(PROMPT, max_tokens=6, edits=[pc.Scale(1.5, at=pc.embed)])
    inputs = [*run.prompt_token_ids, *run.token_ids][:-1]
    token = inputs[-1]
    before = counted(server)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        edits = [pc.Scale(1.5, at=pc.embed), pc.Scale(1.0, at=pc.resid_post, tokens=pc.token(token))]
        assert lm.run(PROMPT, max_tokens=6, edits=edits).token_ids == run.token_ids
    assert change(server, before)["patchclamp:rows_edited_total"] == len(inputs) + 8 * inputs.count(token)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_counted_and_the_log_does_not_quote_the_prompt(server, stream):
    before, start = counted(server), len(server.log.read_text())
    overflow = [pc.Scale(3e38, at=pc.resid_post[1]), pc.Scale(3e38, at=pc.resid_post[1])]
    for edits in ([pc.Zero(pc.embed, tokens=pc.span("another text"))], overflow):
        with pytest.raises(openai.APIError):
            list(complete(server, program(edits), prompt=f"The {SECRET} is", stream=stream))
    told = change(server, before)
    refused = {name.split()[1]: count for name, count in told.items() if name.startswith("patchclamp:refusals_total ")}
    assert refused == {"TokensError": 1, "NotFinite": 1}
    assert [(line["event"], line["error"], line["status"], line["op"]) for line in lines(server, start)] == [
        ("error", "TokensError", 400, "edits[0]"), ("error", "NotFinite", 422, None)]  # fmt: skip
    assert SECRET not in server.log.read_text()[start:]


def test_programs_that_wait_are_seen(server):
    """More programs than the engine runs at once: they wait for room, and how long is counted."""
    before = counted(server)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        assert len(lm.run([[5, 6, 7]] * 80, edits=[pc.Scale(0.9, at=pc.embed)], max_tokens=8)) == 80
        told = change(server, before)
        assert told["patchclamp:programs_total"] == told["patchclamp:admission_seconds_count"] == 80
        lm.engine.status()
    assert becomes(lambda: counted(server)["patchclamp:programs_waiting"] == 0)
    assert set(counted(server)) >= GAUGES
