"""Projected captures on every engine: the rows that Transformers has, times the matrix; and what leaves the worker."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import WIDTH
from .conftest import CHUNKED, PROMPTS

D = WIDTH
MODES = {"eager": ("vllm", {}), "chunks of 16": ("vllm", CHUNKED), "transformers": ("transformers", {})}
RNG = np.random.default_rng(0)
W, PUSH = RNG.standard_normal((5, D)).astype(np.float32), RNG.standard_normal(D).astype(np.float32)
HEADS = RNG.standard_normal((3, 2 * 64)).astype(np.float32)
EDITS = [pc.Capture("mlp_out[4]", project=W), pc.Add(PUSH, "mlp_out[4]", "prompt[1:]")]
PROJECTED = {
    "resid_post[2]": pc.Capture("resid_post[1:4]", project=W),
    "z[3, 2:4]": pc.Capture("z[3, 2:4]", "prompt[-3:] | generated", project=HEADS),
    "mlp_out[6]": pc.Capture("mlp_out[6]", "generated", "bfloat16", "probe"),
    "mlp_out[4]": pc.Capture("mlp_out[4]", project=W),
}


@pytest.fixture(scope="module")
def whole(narrow):
    lm = narrow.get("transformers", "float32")
    keep = [pc.Capture(site, op.tokens) for site, op in PROJECTED.items()]
    edits = [pc.Capture("mlp_out[4]"), EDITS[1]]
    return lm.run(list(PROMPTS), max_tokens=4, edits=edits, capture=keep)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_the_row_times_the_matrix(narrow, whole, mode):
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    lm.bank["probe"] = PUSH
    runs = lm.run(list(PROMPTS), max_tokens=4, edits=EDITS, capture=list(PROJECTED.values()))
    by_site = {"z[3, 2:4]": HEADS, "mlp_out[6]": PUSH[None]}
    for run, plain in zip(runs, whole, strict=True):
        assert run.token_ids == plain.token_ids
        for name in (*PROJECTED, "edits[0]"):
            matrix = torch.from_numpy(by_site.get(name, W))
            expected = plain[name].flatten(1) @ matrix.T
            assert run.positions(name) == plain.positions(name)
            assert run[name].shape == expected.shape
            scale = float(plain[name].flatten(1).norm(dim=1).max() * matrix.norm(dim=1).max())
            gap = float((run[name].float() - expected).abs().max())
            assert gap <= scale * (8e-3 if name == "mlp_out[6]" else 1e-4), (name, gap, scale)
        assert run["mlp_out[6]"].dtype == torch.bfloat16
        assert not torch.allclose(run["edits[0]"], run["mlp_out[4]"], atol=1.0)


def test_less_leaves_the_worker(narrow):
    """Of each row k numbers and not D: the worker keeps so many bytes, and they alone can be brought to the caller."""
    lm = narrow.get("vllm", "float32")
    ids, runs = lm.tokens(PROMPTS[1]), []
    gc.collect()
    lm.run(ids, max_tokens=1)  # with it goes what earlier runs kept
    held = [lm.engine.status()["captured_bytes"]]
    for capture in (pc.Capture("resid_post[1]"), PROJECTED["resid_post[2]"]):
        runs.append(lm.run(ids, max_tokens=1, capture=[capture]))
        held.append(lm.engine.status()["captured_bytes"])
    assert np.diff(held).tolist() == [4 * D * len(ids), 3 * 4 * len(W) * len(ids)]


PROBES = [
    pc.Probe(W, at=pc.resid_post[2], bias=np.ones(5), activation="softmax", name="softmax"),
    pc.Probe(W[:1], at=pc.resid_post[2], name="one"),
    pc.Probe(RNG.standard_normal((100, D)), at=pc.resid_post[2], tokens=pc.generated, name="many"),
    pc.Probe(W, at=pc.resid_post[1:4], bias=-np.ones(5), activation="sigmoid", pool="mean", name="mean"),
    pc.Probe("probe", at=pc.mlp_out[6], pool="max", name="max"),
]


@pytest.mark.parametrize("mode", MODES)
def test_probes_equal_their_formulas_on_the_rows_of_transformers(narrow, whole, mode):
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    lm.bank["probe"] = PUSH
    runs = lm.run(list(PROMPTS), max_tokens=4, edits=EDITS, capture=[*PROBES, pc.Capture("resid_post[2]", pool="mean")])
    sites = ["resid_post[1:4]", "mlp_out[6]"]
    plain = narrow.get("transformers", "float32").run(list(PROMPTS), max_tokens=4, edits=EDITS[1], capture=sites)
    for run, rows in zip(runs, plain, strict=True):
        h, prompt = rows["resid_post[2]"], len(run.prompt_token_ids)
        w = torch.from_numpy(W)
        expected = {
            "softmax": (h @ w.T + 1).softmax(-1),
            "one": h @ w[:1].T,
            "many": h[prompt:] @ torch.from_numpy(PROBES[2].weight.array()).T,
            "mean": (rows["resid_post[1:4]"].mean(1) @ w.T - 1).sigmoid(),
            "max": (rows["mlp_out[6]"] @ torch.from_numpy(PUSH)[:, None]).amax(0),
        }
        assert list(run.probes) == list(expected)
        for name, scores in expected.items():
            assert run.probes[name].shape == scores.shape, name
            scale = 1 if name in ("softmax", "mean") else float(scores.abs().max())
            assert float((run.probes[name] - scores).abs().max()) <= 1e-4 * scale, name
        assert torch.allclose(run["resid_post[2]"], h.mean(0), atol=1e-4 * float(h.abs().max()))


@pytest.mark.parametrize("mode", MODES)
def test_scores_equal_those_computed_from_rows_captured_in_the_same_run(narrow, mode):
    """In one run both are of the same rows, so that they agree within fp32; a repeat with a warm cache, too."""
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    site, weight = pc.resid_post[5], torch.from_numpy(W)
    probes = [pc.Probe(W, at=site, pool=pool, name=str(pool)) for pool in (None, "mean", "max", "last")]
    for _ in range(2):
        for run in lm.run(list(PROMPTS), max_tokens=3, capture=[*probes, site]):
            products = run[site] @ weight.T
            scale = float(products.abs().max())
            for name, scores in (
                ("None", products), ("mean", products.mean(0)), ("max", products.amax(0)), ("last", products[-1]),
            ):  # fmt: skip
                assert float((run.probes[name] - scores).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_prompt_are_pooled_before_they_leave_the_worker(narrow, mode):
    engine, options = MODES[mode]
    lm, at, heads = narrow.get(engine, "float32", **options), pc.resid_post[1:3], pc.z[3, 1:3]
    prompts, tokens = [*map(lm.tokens, PROMPTS), [400], list(range(400, 460))], pc.prompt[-40:]
    probes = [pc.Probe(W, at=pc.resid_post[2], bias=np.ones(5), tokens=tokens, pool=pool, name=pool)
              for pool in ("mean", "max")]  # fmt: skip
    pooled = [pc.Capture(at, tokens, "float16", pool="mean"), pc.Capture(heads, tokens, pool="max")]
    plain = lm.run(prompts, max_tokens=3, capture=[pc.Capture(site, tokens) for site in (at, heads)])
    for _ in range(2):
        gc.collect()
        lm.run(prompts[0], max_tokens=1)  # with it goes what earlier runs kept
        before = lm.engine.status()["captured_bytes"]
        runs = lm.run(prompts, max_tokens=3, capture=[*probes, *pooled])
        steps = 4 if "chunks" in mode else 1  # at most, of a prompt
        row = 4 * (2 * len(W) + 2 * D + 9 * 64)  # a capture of heads keeps the whole row
        assert 0 < lm.engine.status()["captured_bytes"] - before <= len(runs) * steps * (row + 16)
        many, scored = lm.rows(runs, [pc.resid_post[2], heads]), lm.probes(runs)["max"].values
        for i, (run, rows) in enumerate(zip(runs, plain, strict=True)):
            h, w = rows[at], torch.from_numpy(W)
            expected = {"mean": h[1].mean(0) @ w.T + 1, "max": (h[1] @ w.T + 1).amax(0)}
            for name, scores in expected.items():
                torch.testing.assert_close(run.probes[name], scores, rtol=1e-4, atol=1e-4 * float(scores.abs().max()))
            torch.testing.assert_close(run[at], h.mean(1), rtol=1e-4, atol=1e-4 * float(h.abs().max()))
            torch.testing.assert_close(run[heads], rows[heads].amax(0), rtol=1e-4, atol=1e-4)
            assert run.positions(at) == run.probe_positions("max") == rows.positions(at)
            assert np.array_equal(many["resid_post[2]"].values[i], run[pc.resid_post[2]].numpy())
            assert np.array_equal(many["z[3, 1:3]"].values[i], run[heads].numpy())
            assert np.array_equal(scored[i], run.probes["max"].numpy())
        del runs, run


@pytest.mark.parametrize("mode", MODES)
def test_the_last_token_of_a_prompt_is_read_behind_its_cached_prefix(narrow, mode):
    engine, options = MODES[mode]
    lm, prompt, at = narrow.get(engine, "float32", **options), list(range(400, 500)), pc.resid_post[5]
    capture = [pc.Probe(W, at=at, pool="last", name="p"), pc.Capture(at, pc.prompt, pool="last")]
    whole = lm.run(prompt, max_tokens=1, capture=at)
    for _ in range(2):
        run = lm.run(prompt, max_tokens=1, capture=capture)
        assert (run.cached_tokens >= 64) == (mode == "eager")  # no other mode has a prefix cache
        assert run.probe_positions("p") == run.positions(at) == [99]
        torch.testing.assert_close(run[at], whole[at][-1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(run.probes["p"], whole[at][-1] @ torch.from_numpy(W).T, rtol=1e-3, atol=1e-2)


def test_samples_of_a_prompt_have_probes_of_their_own(narrow):
    lm = narrow.get("vllm", "float32")
    probe = pc.Probe(W, at=pc.resid_post[5], tokens=pc.generated, name="p")
    runs = lm.run(
        PROMPTS[0], n=3, temperature=1.0, sampling={"seed": 3}, max_tokens=4, capture=[probe, pc.resid_post[5]]
    )
    assert len({tuple(run.token_ids) for run in runs}) > 1
    for run in runs:
        rows = run["resid_post[5]"][len(run.prompt_token_ids) :]
        assert torch.allclose(run.probes["p"], rows @ torch.from_numpy(W).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_many_runs_are_read_as_one_array(narrow, mode):
    engine, options = MODES[mode]
    lm = narrow.get(engine, "float32", **options)
    prompts = [list(range(5, 5 + n)) for n in (1, 40, 7, 7, 22)]
    probe = pc.Probe(W, at=pc.resid_post[3], bias=np.ones(5), activation="sigmoid", name="p")
    runs = lm.run(prompts * 2, max_tokens=3, capture=[pc.resid_post[2:5], pc.Capture(pc.z[3], dtype="bfloat16"), probe])
    del runs[3]  # its rows stay in between
    for found, read in (
        (lm.rows(runs), lambda run, name: run[name].float()),
        (lm.probes(runs), lambda run, name: run.probes[name]),
    ):
        for name, rows in found.items():
            assert np.array_equal(rows.values, torch.cat([read(run, name) for run in runs]).numpy()), name
            positions = [position for run in runs for position in range(len(run.prompt_token_ids) + 2)]
            assert rows.position.tolist() == positions
            assert (np.diff(rows.run) >= 0).all()
    assert len(lm.rows(runs)) == 4


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_runs_that_are_pooled_in_steps_and_by_the_caller_are_read_together(narrow, engine, pool):
    """A run that generates nothing is pooled where it runs; one that selects generated tokens too is not."""
    lm, capture = narrow.get(engine, "float32"), pc.Capture(pc.resid_post[1], pool=pool)
    runs = [
        lm.run(list(range(5, 5 + length)), max_tokens=new, capture=capture, sampling={"ignore_eos": True})
        for length, new in ((9, 1), (12, 4), (3, 1), (7, 3))
    ]
    for several in (runs, runs[::-1]):
        rows = lm.rows(several)["resid_post[1]"]
        assert rows.run.tolist() == [0, 1, 2, 3]
        for found, run in zip(rows.values, several, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), run[pc.resid_post[1]])
