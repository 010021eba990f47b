"""What a run says of itself, on the fake engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.plan import bound
from patchclamp.store import system

LM = pc.LM("fake", prove=False)
ONES = np.ones(16)
SELECTIONS = st.recursive(
    st.one_of(
        st.sampled_from([pc.prompt, pc.prompt[-1], pc.generated, pc.generated[3:], pc.every[2::3], pc.generated[:2]]),
        st.lists(st.integers(2, 63), min_size=1, max_size=20).map(lambda ids: pc.token(*ids)),
    ),
    lambda inner: st.tuples(inner, inner, st.sampled_from("|&-")).map(lambda t: _joined(*t)),
    max_leaves=4,
)  # fmt: skip


def _joined(left, right, op):
    return {"|": left.__or__, "&": left.__and__, "-": left.__sub__}[op](right)


@settings(max_examples=60)
@given(st.lists(SELECTIONS, min_size=1, max_size=4), st.lists(st.integers(2, 63), min_size=1, max_size=6))
def test_idle_edits_are_those_whose_selection_names_no_row(asked, prompt):
    """Whatever they are joined of: the same that `select` finds when all is known."""
    kept = []
    for tokens in asked:
        try:
            LM.run(prompt, max_tokens=6, edits=[pc.Add(ONES, pc.resid_post[1], tokens)])
            kept.append(tokens)
        except pc.TokensError:  # it can name none, whatever is generated
            continue
    run = LM.run(prompt, max_tokens=6, edits=[pc.Add(ONES, pc.resid_post[1], tokens) for tokens in kept])
    assert run.idle_edits == [f"edits[{i}]" for i, tokens in enumerate(kept) if not len(run.select(tokens))]


def test_edits_of_programs_in_the_bank_and_at_logits_are_named_where_they_stand():
    with pc.LM("fake", prove=False, allow_code=True) as lm:
        plain = lm.run([5, 6, 7], max_tokens=6, sampling={"ignore_eos": True})
        never = next(token for token in range(2, 64) if token not in [5, 6, 7, *plain.token_ids])
        lm.bank["some"] = [pc.Zero(pc.mlp_out[0], pc.token(never)), pc.Scale(1.0, pc.mlp_out[0], pc.prompt[0])]
        run = lm.run([5, 6, 7], max_tokens=6, sampling={"ignore_eos": True}, edits=[
            pc.Capture(pc.embed, pc.token(never)), pc.Use("some"), pc.Zero(pc.logits, pc.generated & pc.token(never)),
            pc.Use("some", tokens=pc.generated & pc.token(never)), pc.Scale(1.0, pc.logits)])  # fmt: skip
        assert run.token_ids == plain.token_ids
        assert run.idle_edits == ["edits[1].some[0]", "edits[2]", "edits[3].some[0]", "edits[3].some[1]"]
        assert plain.idle_edits == []
        failed = lm.run([[5, 6]], max_tokens=2, edits=[pc.Apply(lambda h: None, pc.embed)])
        with pytest.raises(pc.RunError):
            _ = failed[0].idle_edits


def test_captured_positions_are_worked_out_once_a_run(monkeypatch):
    """Reading every site of a run, and patching from each, asks for its positions as often as they differ: twice."""
    worked_out = []
    position_array = bound.position_array

    def counted(ranges):
        worked_out.append(ranges)
        return position_array(ranges)

    monkeypatch.setattr(bound, "position_array", counted)
    run = LM.run([5, 6, 7], max_tokens=3, capture=[pc.resid_pre, pc.z, pc.mlp_out @ pc.prompt])
    for site in run.sites:
        assert len(run[site]) == len(run.positions(site))
        LM.run([5, 6, 7], max_tokens=1, edits=[pc.Replace(pc.From(run, site), at=site, tokens=pc.prompt[-1])])
    assert len(run.sites) > 8
    assert len(worked_out) == 2


@pytest.mark.parametrize("read", [
    lambda lm, run: run[pc.resid_post[1]], lambda lm, run: run.read("capture[0]"),
    lambda lm, run: lm.fetch([run], pc.resid_post[1])[0]["resid_post[1]"], lambda lm, run: run[pc.resid_pre[2]],
])  # fmt: skip
@pytest.mark.parametrize("prompt", [[5, 6], list(range(2, 60))])  # little and much
def test_what_a_run_returns_may_be_changed_in_place(read, prompt):
    """Neither `From`, nor the bank, nor a later read sees it."""
    run = LM.run(prompt, max_tokens=1, capture=[pc.resid_post[1]])
    own = run.read(pc.resid_post[1], copy=False).copy()
    rows = read(LM, run)
    rows += 100
    np.testing.assert_array_equal(run[pc.resid_post[1]], own)
    mean = LM.bank.mean("mean", [run], pc.resid_post[1]).rows["resid_post[1]"].array()
    np.testing.assert_allclose(mean, own.mean(0), rtol=1e-5, atol=1e-6)
    patch = [pc.Replace(pc.From(run, pc.resid_post[1]), at=pc.resid_post[1])]
    patched = LM.run(prompt, max_tokens=1, edits=patch, capture=[pc.resid_post[1]])
    np.testing.assert_array_equal(patched[pc.resid_post[1]], own)


def test_a_view_is_asked_for():
    run = LM.run([5, 6], max_tokens=1, capture=[pc.resid_post[1]])
    view = run.read(pc.resid_post[1], copy=False)
    assert np.shares_memory(view, LM.fetch([run], copy=False)[0]["resid_post[1]"])
    fetched = LM.fetch([run])[0]
    assert fetched["resid_post[1]"] is fetched["resid_pre[2]"]  # copied once
    assert not np.shares_memory(view, fetched["resid_post[1]"])
    assert not np.shares_memory(view, run[pc.resid_post[1]])


def test_projected_rows_have_no_mean_of_the_site():
    run = LM.run([5, 6], max_tokens=1, capture=[pc.Capture(pc.resid_post[1], project=np.eye(2, 16))])
    with pytest.raises(pc.ProgramError) as caught:
        LM.bank.mean("mean", [run], pc.resid_post[1])
    assert caught.value.path == "runs[0]"
    for wrong in (run, None, 3, "runs", [3]):
        with pytest.raises(pc.ProgramError) as caught:
            LM.fetch(wrong)
        assert caught.value.path == "runs"


CAPTURES = [  # what is captured, and its bytes with prompts of 3 and 5 tokens
    (pc.resid_post[1], 8 * 16 * 4),
    (pc.resid_post[1] @ pc.prompt[-1], 2 * 16 * 4),
    (pc.Capture(pc.resid_post[1], dtype="float16"), 8 * 16 * 2),
    (pc.Capture(pc.resid_post[1], project=np.ones((3, 16))), 8 * 3 * 4),
]


@pytest.mark.parametrize(("capture", "size"), CAPTURES, ids=range(len(CAPTURES)))
def test_captures_that_do_not_fit_are_refused_before_they_run(capture, size):
    prompts = [[2, 3, 4], [5, 6, 7, 8, 9]]
    with (
        pc.LM("fake", prove=False, capture_bytes=size) as exact,
        pc.LM("fake", prove=False, capture_bytes=size - 1) as lm,
    ):
        assert len(exact.fetch(exact.run(prompts, max_tokens=1, capture=[capture]))) == 2
        with pytest.raises(pc.CapacityError) as raised:
            lm.run(prompts, max_tokens=1, capture=[capture])
        assert raised.value.path == "capture"
        runs = [lm.run(prompt, max_tokens=1, capture=[capture]) for prompt in prompts]  # each on its own fits
        with pytest.raises(pc.CapacityError):
            lm.fetch(runs)
        assert lm.engine.status()["programs"] == 0


def test_the_file_cache_counts_as_memory_that_is_left(tmp_path, monkeypatch):
    files = {"max": "1000", "current": "990", "stat": "anon 90\ninactive_file 500\nactive_file 400\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    (_, *names), *_ = system.CGROUPS
    monkeypatch.setattr(system, "CGROUPS", [(str(tmp_path), *names)])
    assert system.available_bytes() == 910
    (tmp_path / "memory.max").write_text("max")
    assert system.available_bytes() > 1 << 20


def test_views_are_copied_only_where_there_is_memory(monkeypatch):
    """An engine in this process has views, which `fetch` copies."""
    run = LM.run([2] * 64, max_tokens=1, capture=["resid_post"])
    monkeypatch.setattr("patchclamp.lm.available_bytes", lambda: 0)
    monkeypatch.setattr("patchclamp.lm.MIN_CHECKED_BYTES", 0)
    monkeypatch.setattr(type(LM.engine), "has_views", True)
    with pytest.raises(pc.CapacityError):
        LM.fetch([run])
    assert LM.fetch([run], copy=False)


def test_captures_are_limited_by_the_memory_that_is_left(monkeypatch):
    monkeypatch.setattr("patchclamp.lm.available_bytes", lambda: 1 << 20)
    monkeypatch.setattr("patchclamp.lm.MIN_CHECKED_BYTES", 0)
    prompt = [2] * 64
    assert LM.run(prompt, max_tokens=1, capture=["resid_post"]).error is None
    with pytest.raises(pc.CapacityError):
        LM.run([prompt] * 200, max_tokens=1, capture=["resid_post"])
    for wrong in (0, -1, "1", 1.5, True):
        with pytest.raises(pc.ProgramError) as raised:
            pc.LM("fake", capture_bytes=wrong)
        assert raised.value.path == "capture_bytes"


def test_a_site_of_several_layers_is_read_as_one_array():
    run = LM.run([5, 6, 7], max_tokens=2, capture=[pc.resid_post[[1, 0]], pc.z[1], pc.embed @ pc.prompt[-1]])
    assert (run.layers(pc.resid_post), run.layers(pc.z), run.layers(pc.embed)) == ([0, 1], [1], [])
    assert run.layers(pc.mlp_out) == []
    each = [run[pc.resid_post[layer]] for layer in (0, 1)]
    assert np.array_equal(run[pc.resid_post], np.stack(each))
    assert np.array_equal(run[pc.resid_post[[1, 0]]], np.stack(each[::-1]))
    assert pc.resid_post[np.array([1, 0])] == pc.resid_post[[1, 0]]
    width = LM.model.d_model
    assert (
        repr(LM.fetch([run], pc.resid_post)[0]) == f"<Captures: resid_post[0] [4, {width}], resid_post[1] [4, {width}]>"
    )
    assert np.array_equal(run[pc.resid_post[1:2]], each[1][None])
    assert np.array_equal(run[pc.z[:, 1]], run[pc.z[1, 1]][None])
    assert run.positions(pc.resid_post) == [0, 1, 2, 3]
    assert np.array_equal(run["capture[0]"], run[pc.resid_post[[1, 0]]])
    with pytest.raises(pc.MissingSource):
        run[pc.z[:2]]  # a range is not cut to what was captured
    with pytest.raises(pc.MissingSource):
        run[pc.mlp_out]
    assert repr(run).endswith("captured embed, resid_post[0, 1], z[1]>")
    assert "z[1]" in run._repr_html_()
    run[pc.resid_post][:] = 7
    assert np.array_equal(run[pc.resid_post], np.stack(each))


def test_layers_of_different_positions_are_not_stacked():
    run = LM.run([5, 6, 7], max_tokens=1, capture=[pc.resid_post[0] @ pc.prompt[0], pc.resid_post[1]])
    with pytest.raises(pc.ProgramError, match=r"run\[pc.resid_post\[1\]\]"):
        run[pc.resid_post]
    with pytest.raises(pc.ProgramError, match="positions"):
        run.positions(pc.resid_post)
    assert run.layers(pc.resid_post) == [0, 1]


def test_fetched_captures_take_sites_by_any_name():
    runs = [LM.run([5, 6, 7], max_tokens=1, capture=[pc.resid_post[of], pc.embed]) for of in (0, 1)]
    for run, captures in zip(runs, LM.fetch(runs, [pc.resid_post, pc.embed]), strict=True):
        [layer] = run.layers(pc.resid_post)
        assert list(captures) == [f"resid_post[{layer}]", "embed"]
        assert np.array_equal(captures[pc.resid_post], run[pc.resid_post])
        assert np.array_equal(captures[f"blocks.{layer}.hook_resid_post"], run[pc.resid_post[layer]])
        assert pc.embed in captures
        assert pc.resid_post[1 - layer] not in captures
        with pytest.raises(pc.MissingSource):
            captures[pc.resid_post[1 - layer]]
    with pytest.raises(pc.MissingSource):
        LM.fetch(runs, pc.resid_post[0])


def test_samples_have_noise_of_their_own():
    """Sample i has the noise of the seed plus i, also where a program of the bank draws it."""
    with pc.LM("fake", prove=False) as lm:
        lm.engine.check_sampling = lambda sampling: None  # the fake engine has no temperature
        noise = pc.Noise(0.5, pc.embed, seed=3)
        lm.bank["noise"] = [noise]
        for edit in (noise, pc.Use("noise")):
            several = lm.run([5, 6, 7], max_tokens=1, n=3, temperature=1.0, edits=[edit], capture=pc.embed)
            seeded = [lm.run([5, 6, 7], max_tokens=1, edits=[pc.Noise(0.5, pc.embed, seed=3 + i)], capture=pc.embed)
                      for i in range(3)]  # fmt: skip
            assert [run[pc.embed].tobytes() for run in several] == [run[pc.embed].tobytes() for run in seeded]
            assert len({run[pc.embed].tobytes() for run in several}) == 3
        assert len(lm.run([5], max_tokens=1, n=1, temperature=1.0)) == 1
        assert [len(runs) for runs in lm.run([[5], [6]], max_tokens=1, n=2, temperature=1.0)] == [2, 2]
        for wrong in ({"n": 2}, {"n": 0}, {"n": True}, {"n": 2, "temperature": 1.0, "sampling": {"n": 2}}):
            with pytest.raises(pc.ProgramError):
                lm.run([5], **wrong)


def test_text_is_scored_if_it_is_one_token():
    token = LM.tokenizer.token_strings([9])[0]
    assert LM.run([5, 6], max_tokens=1, score=token).scores == LM.run([5, 6], max_tokens=1, score=[9]).scores
    with pytest.raises(pc.TokensError, match="one token"):
        LM.run([5, 6], max_tokens=1, score=[token * 2])


def test_dir_lists_public_names_alone():
    assert set(dir(pc)) == set(pc.__all__)
    assert {"LM", "studies", "Run", "resid_post"} <= set(dir(pc))
    assert set(dir(pc.studies)) == set(pc.studies.__all__)
    assert not {"errors", "language", "importlib", "Any"} & set(dir(pc))
    assert pc.LM.run.__signature__.parameters.keys() >= {"prompt", "max_tokens", "n", "temperature"}


@pytest.mark.parametrize("name", ["max_tokens", "logprobs"])
def test_an_argument_of_the_call_is_no_sampling_parameter(name):
    with pytest.raises(pc.ProgramError, match=rf"^sampling.{name}: .*{name}="):
        LM.run([5, 6, 7], sampling={name: 3})
