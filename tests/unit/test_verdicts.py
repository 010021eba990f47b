"""The benchmark's verdicts: what missed its bar, failed, or was not measured is said, and nothing else."""

from __future__ import annotations

import copy

from benchmarks.gpu_speed import BARS, STEPS, applies, verdicts
from tests.gpu.table import table

FINE = {"ratio": 1.0, "high": 1.001, "stock_tokens_s": 100, "ours_tokens_s": 99, "kernels_are_stocks": True,
        "steady": {"steps": 20, "plans": 0, "copies": 0}, "pairs": 20}  # fmt: skip
GOOD = {
    "shape": "8b",
    "layers": 32,
    "decode": [{"case": case, "batch": batch, **FINE} for batch in STEPS for case in BARS if applies(case, batch)],
    "prefill": [{"case": case, **FINE} for case in ("idle", "capture prompt, every layer")],
    "planning": {"steer every layer": {"changed": 90.0}},
    "fetch": {"GB_s": 2.5},
}


def changed(part: str, number: int, **values) -> list[str]:
    result = copy.deepcopy(GOOD)
    result[part][number] |= values
    return verdicts(result)


def test_a_bar_that_is_missed_is_said_once_and_by_name():
    assert verdicts(GOOD) == []
    assert changed("decode", 0, ratio=1.02) == ["idle, batch 1: 1.020 above 1.01"]
    assert changed("decode", 0, high=1.03) == ["idle, batch 1: the interval reaches 1.030"]
    assert changed("decode", 0, kernels_are_stocks=False) == ["idle, batch 1: kernels differ from stock's"]
    unseen = {name: value for name, value in GOOD["decode"][0].items() if name != "kernels_are_stocks"}
    assert verdicts({**GOOD, "decode": [unseen, *GOOD["decode"][1:]]}) == ["idle, batch 1: no kernels were seen"]
    assert len(changed("prefill", 1, ours_tokens_s=79)) == 1
    assert verdicts({**GOOD, "planning": {"x": {"changed": 151.0}}}) == ["planning, x: 151 µs above 150"]
    assert verdicts({**GOOD, "fetch": {"GB_s": 1.9}}) == ["fetch: 1.9 GB/s below 2"]


def test_one_in_eight_of_one_request_has_no_bar():
    alone = {"case": "one in eight steered", "batch": 1, **FINE, "ratio": 1.5}
    assert verdicts({**GOOD, "decode": [*GOOD["decode"], alone]}) == []
    assert len(verdicts({**GOOD, "decode": [*GOOD["decode"], {**alone, "batch": 64}]})) == 1


def test_what_failed_or_was_not_measured_is_no_success():
    assert verdicts({**GOOD, "fetch": {"error": "broken"}}) == ["fetch: broken"]
    assert verdicts({**GOOD, "planning": {"error": "broken"}}) == ["planning: broken"]
    assert verdicts({name: part for name, part in GOOD.items() if name != "fetch"}) == ["fetch: not measured"]
    assert verdicts({**GOOD, "decode": GOOD["decode"][1:]}) == ["idle, batch 1: not measured"]
    assert verdicts({**GOOD, "prefill": []})[0] == "idle, prefill: not measured"
    assert changed("decode", 0, error="broken") == ["idle, batch 1: broken"]
    assert verdicts({**GOOD, "control": {"error": "broken"}}) == ["control: broken"]
    assert verdicts({**GOOD, "planning": {}, "fetch": {}}) == ["planning: not measured", "fetch: not measured"]
    assert changed("decode", 1, pairs=5) == ["steer every layer, batch 1: 5 pairs, fewer than 20"]
    assert len(changed("decode", 1, steady={"steps": 20, "plans": 3, "copies": 0})) == 1
    assert verdicts({**GOOD, "layers": 4}) == ["only 4 layers"]


def test_of_a_part_that_was_checked_twice_the_last_run_counts():
    def run(*checks: tuple[str, str, bool | None]) -> dict:
        told = [{"mode": mode, "check": check, "holds": holds, "found": "so"} for mode, check, holds in checks]
        return {"vllm": "1.0", "gpu": "a GPU", "date": "today", "checks": told}

    first = run(("eager", "it starts", True), ("v1 graphs", "it starts", True), ("v1 graphs", "ran to its end", False))
    again = run(("v1 graphs", "it starts", False), ("sleep", "it wakes", True))
    lines = table([first]).splitlines()
    assert "| | 1.0 eager | 1.0 v1 graphs |" in lines
    assert "| it starts | ✓ | ✓ |" in lines
    assert "| ran to its end |  | ✗ |" in lines
    assert lines[-2:] == ["3 entries, 1 of which do not hold:", "- 1.0 v1 graphs: ran to its end: so"]
    lines = table([first, again]).splitlines()
    assert "| it starts | ✓ | ✗ |" in lines
    assert "| sleep: it wakes | ✓ |" in lines
    assert lines[-2:] == ["3 entries, 1 of which do not hold:", "- 1.0 v1 graphs: it starts: so"]
    cut = ("v1 graphs", "had time to end", False)
    lines = table([first, run(("v1 graphs", "it starts", True), cut)]).splitlines()
    assert lines[:-3] == table([first]).splitlines()
    assert lines[-1] == "- 1.0 v1 graphs, today: so"
    assert "| had time to end |  | ✗ |" in table([first, run(("v1 graphs", "it starts", False), cut)]).splitlines()
    assert "| had time to end | ✗ |" in table([run(cut)]).splitlines()
    assert table([run(("eager", "it starts", True))]).splitlines()[-1] == "1 entries, 0 of which do not hold."


def test_two_gpus_and_the_v1_runner_have_bars_of_their_own():
    rows = {case: [{"case": case, "batch": batch, **FINE, "ratio": 1.0} for batch in STEPS] for case in BARS}
    alone = {"shape": "8b", "layers": 32, "prefill": []}
    two = {**alone, "tensor_parallel": 2, "decode": rows["idle"] + rows["steer every layer"]}
    assert verdicts(two) == []
    two["decode"][3] |= {"ratio": 1.04}  # above the bar of one GPU
    assert verdicts(two) == []
    two["decode"][3] |= {"ratio": 1.06}
    assert verdicts(two) == ["steer every layer, batch 1: 1.060 above 1.05"]
    assert verdicts({**two, "decode": two["decode"][:3]})[0] == "steer every layer, batch 1: not measured"
    v1 = {**alone, "runner": "v1", "decode": rows["idle"]}
    assert verdicts(v1) == [f"steer one layer, batch {batch}: not measured" for batch in STEPS]
