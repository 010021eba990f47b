"""Projected captures, W h in place of h: what they are, how they are read, and what is refused by name. On the fake
engine; `tests.engines.test_projected` has the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.language import Program
from patchclamp.plan import bind
from patchclamp.plan.room import captured_bytes
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA

from .test_plan import spelled

LM = pc.LM("fake", prove=False)
CHUNKED = pc.LM("fake", prove=False, chunk=2)
PROMPT, D = [5, 6, 7, 8, 9], 16
WHOLE = LM.run(PROMPT, max_tokens=6, capture=[site for site in LM.sites.names if site != "logits"])
SITES = [str(ref) for ref in LM.sites.refs() if ref.name != "logits"]
PARTS = [f"z[{layer}, {index}]" for layer in range(2) for index in (0, 1, "0:2")] + ["neurons[1, 3:9]"]
SELECTIONS = [
    "every",
    "prompt[-1]",
    "generated[0:2]",
    "prompt[1, 3]",
    "every & token(6, 7)",
    f"generated & token({WHOLE.token_ids[1]})",
    "generated & token(63)",
]


def matrix(seed: int, rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def rows_at(run: pc.Run, site: str, positions: list[int]) -> np.ndarray:
    """The whole rows of a site at some positions, [T, D]."""
    rows = np.asarray(run[site])
    return rows.reshape(len(rows), -1)[np.searchsorted(run.positions(site), positions)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SITES + PARTS), st.sampled_from(SELECTIONS), st.integers(1, 7), st.integers(0, 99), st.booleans()
)
def test_what_is_kept_is_the_row_times_the_matrix(site, tokens, count, seed, chunked):
    lm = CHUNKED if chunked else LM
    W = matrix(seed, count, WHOLE[site].reshape(len(WHOLE[site]), -1).shape[1])
    run = lm.run(PROMPT, max_tokens=6, capture=[pc.Capture(site, tokens, project=W)])
    plain = lm.run(PROMPT, max_tokens=6, capture=[pc.Capture(site, tokens)])
    assert run.positions(site) == plain.positions(site)
    assert run[site].shape == (len(run.positions(site)), count)
    np.testing.assert_allclose(run[site], rows_at(WHOLE, site, run.positions(site)) @ W.T, rtol=1e-4, atol=1e-5)
    assert str(site) in run.sites
    width = lm.sites.points[lm.sites.resolve(pc.site(site))[0].point].width
    assert run.captured_bytes * width == plain.captured_bytes * count


def test_a_capture_among_edits_keeps_products_of_its_own_place():
    W, push = matrix(0, 3, D), matrix(1, 1, D)[0]
    run = LM.run(PROMPT, max_tokens=1, edits=[pc.Capture("mlp_out[1]", project=W), pc.Add(push, "mlp_out[1]")],
                 capture=[pc.Capture("mlp_out[1]", "prompt[2:]", project=W)])  # fmt: skip
    before = rows_at(WHOLE, "mlp_out[1]", range(5))
    np.testing.assert_allclose(run["edits[0]"], before @ W.T, atol=1e-5)
    np.testing.assert_allclose(run["capture[0]"], (before + push)[2:] @ W.T, atol=1e-5)
    assert run.positions("mlp_out[1]") == [0, 1, 2, 3, 4]  # the later counts where both have a position
    np.testing.assert_array_equal(run["mlp_out[1]"][2:], run["capture[0]"])
    np.testing.assert_array_equal(run["mlp_out[1]"][:2], run["edits[0]"][:2])


def test_a_vector_is_one_row_and_a_name_is_what_the_bank_has():
    lm = pc.LM("fake", prove=False)
    lm.bank["probes"] = W = matrix(2, 4, D)
    named, one = (lm.run(PROMPT, max_tokens=1, capture=[pc.Capture("resid_post", project=w)]) for w in ("probes", W[0]))
    for layer in range(lm.model.layers):
        np.testing.assert_allclose(named[f"resid_post[{layer}]"], rows_at(WHOLE, f"resid_post[{layer}]", range(5)) @ W.T,
                                   atol=1e-5)  # fmt: skip
        np.testing.assert_allclose(one[f"resid_post[{layer}]"], named[f"resid_post[{layer}]"][:, :1], atol=1e-6)
    lm.bank["probes"] = matrix(3, D + 1, D)
    with pytest.raises(pc.ShapeError, match=r"capture\[0\].project: .*at most D rows"):
        lm.run(PROMPT, capture=[pc.Capture("embed", project="probes")])


def test_a_part_is_projected_and_read_by_its_name():
    W = matrix(4, 2, WHOLE["z[1]"].shape[2])
    run = LM.run(PROMPT, max_tokens=1, capture=[pc.Capture("z[1, 1]", project=W)])
    np.testing.assert_allclose(run["z[1, 1]"], rows_at(WHOLE, "z[1, 1]", range(5)) @ W.T, atol=1e-5)
    with pytest.raises(pc.MissingSource, match=r"z\[1, 0\] .*z\[1, 1\]"):
        run["z[1, 0]"]
    with pytest.raises(pc.MissingSource, match=r"z\[1\] .*z\[1, 1\]"):
        run.layout("z[1]")
    assert list(LM.fetch([run])[0]) == ["z[1, 1]"]


W16, V16 = matrix(5, 2, D), matrix(6, 2, D)
REFUSED = {
    "whole beside projected": ([], ["resid_post[0]", pc.Capture("resid_pre[1]", "prompt[0]", project=W16)],
                               pc.ProgramError, r"capture\[1\]: resid_post\[0\] .*capture\[0\]"),
    "two matrices": ([pc.Capture("embed", project=W16)], [pc.Capture("embed", project=V16)],
                     pc.ProgramError, r"capture\[0\]: embed .*edits\[0\]"),
    "two parts": ([], [pc.Capture(f"z[0, {head}]", project=np.ones((2, D // 2))) for head in (0, 1)],
                  pc.ProgramError, r"capture\[1\]: z\[0\] .*capture\[0\]"),
    "logits": ([], [pc.Capture("logits", project=np.ones((2, 64)))],
               pc.UnsupportedSite, r"capture\[0\].at: .*final_norm"),
    "another width": ([], [pc.Capture("embed", project=np.ones((2, 4)))],
                      pc.ShapeError, r"capture\[0\].project: .*embed, got \[2, 4\]"),
    "rows of heads": ([], [pc.Capture("z[0]", project=np.ones((2, D // 2)))],
                      pc.ShapeError, r"capture\[0\].project: .*z\[0\], got \[2, 8\]"),
    "no such name": ([], [pc.Capture("embed", project="probes")], pc.MissingSource, r"capture\[0\].project: .*probes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case):
    edits, capture, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        LM.run(PROMPT, max_tokens=1, edits=edits, capture=capture)


def test_products_are_no_source_of_a_patch():
    run = LM.run(PROMPT, max_tokens=1, capture=[pc.Capture("resid_post[1]", project=W16)])
    with pytest.raises(
        pc.MissingSource, match=r"edits\[0\].value: .*captured resid_post\[1\] projected: capture it whole"
    ):
        LM.run(PROMPT, max_tokens=1, edits=[pc.Replace(pc.From(run), "resid_post[1]")])


@pytest.mark.parametrize(("site", "refused"), [("z[1]", True), ("z[1, 0]", False), ("resid_post[1]", False)])
def test_rows_that_are_cut_among_gpus_are_refused_by_name(site, refused):
    sites = SiteMap(LLAMA, Sizes(2, 4, 6, heads=2, kv_heads=2, d_head=2, d_mlp=8), tensor_parallel=2)
    width = 2 if "," in site else 4
    program = Program.of((), pc.Capture(site, project=np.ones((3, width))))
    if refused:
        with pytest.raises(pc.UnsupportedSite, match=r"capture\[0\].at: .*2 GPUs.*z\[1, 0\]"):
            bind(program, "mine", spelled(5), 2, sites, lambda run: pytest.fail(run))
        return
    made = bind(program, "mine", spelled(5), 2, sites, lambda run: pytest.fail(run))
    assert captured_bytes(made, sites) == 6 * 4 * 3


def test_an_engine_that_kept_whole_rows_is_not_believed(monkeypatch):
    """An older server reads a projected capture as a plain one."""
    fetch = LM.engine.fetch
    monkeypatch.setattr(
        LM.engine, "fetch", lambda *key: (fetch(*key)[0], np.zeros((len(fetch(*key)[0]), D), np.float32))
    )
    run = LM.run(PROMPT, max_tokens=1, capture=[pc.Capture("embed", project=W16)])
    with pytest.raises(pc.PatchclampError, match=r"embed: .*2.*16"):
        run["embed"]
