"""Probes and features on a GPU: probes of the engine for every request, those in programs, in streams and as conditions
to stop, and what each step pools and encodes.

python -m tests.gpu.readouts [--v1]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import patchclamp as pc

OPTIONS = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 64,
           "max_num_batched_tokens": 512, "prove": False, "gpu_memory_utilization": 0.4}  # fmt: skip
NEW = {"max_tokens": 40, "sampling": {"ignore_eos": True}}


def differences(runs: list[pc.Run], others: list[pc.Run], names: list[str]) -> float:
    """The largest difference between scores of the engine's probes, and of the same ones in programs."""
    pairs = [(np.asarray(run.probes[name]), np.asarray(other.probes[f"own.{name}"]))
             for run, other in zip(runs, others, strict=True) for name in names]  # fmt: skip
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def checked(lm: pc.LM, probes: list[pc.Probe]) -> dict[str, Any]:
    """Compare scores, streams and stopped runs with plain runs. Raises `AssertionError`."""
    rng, names = np.random.default_rng(1), [probe.name for probe in probes]
    shared = rng.integers(10, 500, 300).tolist()
    prompts = [shared[: int(rng.integers(1, 300))] + rng.integers(10, 500, int(rng.integers(1, 90))).tolist()
               for _ in range(48)]  # fmt: skip
    same = [pc.Probe(each.weight, each.at, name=f"own.{each.name}") for each in probes]
    found: dict[str, Any] = {"async_scheduling": lm.engine.config.scheduler_config.async_scheduling}  # pyright: ignore
    lm.run(prompts, **NEW)
    cached = lm.run(prompts, **NEW)
    found["cached tokens"] = sum(run.cached_tokens for run in cached)
    assert found["cached tokens"] > 1000
    own = lm.run(prompts, **NEW, capture=same)
    found["scores of one run, of the engine and of its program"] = differences(own, own, names)
    assert found["scores of one run, of the engine and of its program"] < 1e-5
    alike = [i for i, (run, other) in enumerate(zip(cached, own, strict=True)) if run.token_ids == other.token_ids]
    found["runs with the same tokens"] = len(alike)
    found["scores of cached prefixes and computed ones"] = differences(
        [cached[i] for i in alike], [own[i] for i in alike], names
    )
    assert len(alike) > 20

    def stream(i: int) -> tuple[list[int], list[float]]:
        positions, scores = list[int](), list[float]()
        for part in lm.stream(prompts[i], **NEW, capture=same[:1]):
            told = part.scores[same[0].name]
            positions += told.positions
            scores += np.asarray(told.scores)[:, 0].tolist()
        return positions, scores

    with ThreadPoolExecutor(16) as pool:
        streams = list(pool.map(stream, range(16)))
    for (positions, scores), run in zip(streams, own, strict=False):
        assert positions == list(range(len(run.prompt_token_ids) + len(run.token_ids) - 1))
        assert np.isfinite(scores).all()
    highest = [float(np.asarray(run.probes[same[0].name])[len(run.prompt_token_ids) :, 0].max()) for run in own]
    condition = same[0] > float(np.median(highest)) + 1e-4
    stopped = lm.run(prompts, **NEW, stop_when=condition)
    fired = 0
    for run in stopped:
        scores = np.asarray(run.probes[same[0].name])[len(run.prompt_token_ids) :, 0]
        above = np.flatnonzero(scores > condition.threshold)
        if run.stop_reason is None:
            assert not len(above)
            assert len(run.token_ids) == NEW["max_tokens"]
        else:
            fired += 1
            assert run.stop_reason == f"probe:{same[0].name}"
            assert above.tolist() == [len(run.token_ids) - 1]
    found["runs that a probe ended"] = fired
    assert 10 < fired < 48
    status = lm.engine.status()
    found |= {name: status[name] for name in ("runner", "active_graphs", "steps_with_taps", "steps_without_taps")}
    return found


def reduced(lm: pc.LM, width: int) -> dict[str, Any]:
    """Compare what each step pools and encodes on the device with rows: those of the same run at the same site, and
    where nothing but the results leaves the device, those of another run. Raises `AssertionError`."""
    rng, at, apart = np.random.default_rng(2), pc.resid_post[1], pc.mlp_out[2]
    prompts = [rng.integers(10, 500, int(rng.integers(1, 700))).tolist() for _ in range(48)]
    matrix = rng.standard_normal((2, width)).astype(np.float32) / width**0.5
    rows, sae = rng.standard_normal((512, width)) / width**0.5, rng.standard_normal((2, 512, width)) / width**0.5
    lm.attach(pc.SAE(rows, np.zeros(512), sae[1], np.zeros(width)), at=at, name="s")
    lm.attach(pc.SAE(sae[0], np.zeros(512), sae[1], np.zeros(width)), at=apart, name="apart")

    def pooled(site: pc.Site) -> list[pc.Probe]:
        return [pc.Probe(matrix, site, pc.prompt[-600:], pool=pool, name=pool) for pool in ("mean", "max")]

    features = [pc.Features("s", top=8), pc.Features("apart", ids=range(6))]
    own = lm.run(prompts, **NEW, capture=[*pooled(at), *features, at])
    other = lm.run(prompts, **NEW, capture=[*pooled(apart), pc.Capture(at, pc.prompt[-600:], pool="mean")])
    whole = lm.run(prompts, **NEW, capture=apart)
    lm.lens(own)
    found = {"pooled": 0.0, "features": 0.0, "pooled alone": 0.0, "features alone": 0.0}

    def compare(name: str, one: Any, two: Any) -> None:
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        found[name] = max(found[name], float(np.abs(one - two).max() / np.abs(two).max()))

    for run, alone, plain in zip(own, other, whole, strict=True):
        h, prompt = run[at].float().numpy(), len(run.prompt_token_ids)
        pooled_rows = h[max(prompt - 600, 0) : prompt]
        compare("pooled", run.probes["mean"], (pooled_rows @ matrix.T).mean(0))
        compare("pooled", run.probes["max"], (pooled_rows @ matrix.T).max(0))
        values = np.maximum(h @ rows.T.astype(np.float32), 0)
        compare("features", run.features["s"].values, np.sort(values, 1)[:, ::-1][:, :8])
        compare("features", np.take_along_axis(values, run.features["s"].ids, 1), run.features["s"].values)
        compare("pooled alone", alone[at].numpy(), pooled_rows.mean(0))
        rows_apart = plain[apart].float().numpy()
        compare("pooled alone", alone.probes["mean"], (rows_apart[max(prompt - 600, 0) : prompt] @ matrix.T).mean(0))
        values = np.maximum(rows_apart[:prompt] @ sae[0][:6].T.astype(np.float32), 0)
        compare("features alone", run.features["apart"].values[:prompt], values)
    assert found["pooled"] < 1e-5
    assert found["features"] < 1e-5
    assert max(found["pooled alone"], found["features alone"]) < 0.1  # bf16 rows of other batches
    for run in (*own, *other, *whole):
        run.close()
    return {f"reduced: {name}": far for name, far in found.items()}


def main() -> None:
    if "--v1" in sys.argv:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from tests.models import with_weights

    folder = with_weights(Path(tempfile.mkdtemp()), "0.6b", 4)
    width, rng = json.loads((Path(folder) / "config.json").read_text())["hidden_size"], np.random.default_rng(0)

    def probe(name: str, outputs: int, at: pc.Site) -> pc.Probe:
        return pc.Probe(rng.standard_normal((outputs, width)).astype(np.float32) / width**0.5, at, name=name)

    probes = [probe("late", 1, pc.resid_post[2]), probe("mlp", 3, pc.mlp_out[1]), probe("twin", 2, pc.resid_post[2])]
    workers = 1 + ("--two" in sys.argv)
    with pc.LM(folder, engine="vllm", probes=probes, tensor_parallel_size=workers, **OPTIONS) as lm:
        print("found", json.dumps(checked(lm, probes) | reduced(lm, width)), flush=True)


if __name__ == "__main__":
    main()
