"""The plugin beside engines that are not ours: nothing of it acts, whatever a request carries."""

from types import SimpleNamespace

import pytest

import patchclamp as pc
from patchclamp.engines.vllm import cache, plugin
from patchclamp.engines.vllm.compat import runner, seams


def test_foreign_extra_args_are_no_programs():
    for extra in (None, {}, {"patchclamp": "hello"}, {"patchclamp": 3}, {"other": b"x"}):
        assert runner.carried(SimpleNamespace(extra_args=extra)) is None
    request = SimpleNamespace()
    assert cache._bound(request, b"no program at all").ops == ()


def test_a_seam_that_moved_is_told_by_our_engines_alone(monkeypatch, smollm2):
    moved = seams.Seam("block keys", "vllm.v1.core.kv_cache_utils:no_such_function", "key edited blocks")
    monkeypatch.setitem(seams.SEAMS, "block keys", moved)
    monkeypatch.setattr(plugin, "problem", None)
    plugin.register()
    with pytest.raises(
        pc.SeamMoved, match=r"no seam 'block keys' where it is expected .*no_such_function.* to key edited blocks"
    ):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=64)
    monkeypatch.undo()
    plugin.register()


def test_the_cache_leaves_room_for_what_ours_takes():
    theirs = SimpleNamespace(model_memory_usage=5)
    runner.count_memory(theirs, 7)
    assert theirs.model_memory_usage == 12
    with pytest.raises(pc.SeamMoved, match=r"no seam 'v2 runner' .* has no .*model_memory_usage"):
        seams.require_on("v2 runner", SimpleNamespace())


def test_a_core_in_its_own_process_serves_the_same(shortened, shallow):
    lm = pc.LM(shortened, engine="vllm", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
               kv_cache_memory_bytes=1 << 26, multiprocess_mode=True, block_size=32)  # fmt: skip
    with lm:
        run = lm.run("The capital of France is", max_tokens=3, capture=[pc.resid_post])
        again = lm.run("The capital of France is", max_tokens=3, edits=[pc.Replace(pc.From(run), at=pc.resid_post)])
        here = shallow.get("vllm", "float32").run("The capital of France is", max_tokens=3, capture=[pc.resid_post[3]])
        assert run.logprobs == again.logprobs == here.logprobs
        assert (run[pc.resid_post[3]] == here[pc.resid_post[3]]).all()
        steered = lm.run("The capital of France is", max_tokens=3, edits=[pc.Add([1.0] * 576, at=pc.resid_post[3])])
        assert steered.logprobs != run.logprobs
