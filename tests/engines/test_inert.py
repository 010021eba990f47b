"""The plugin beside engines that are not ours: nothing of it acts, whatever a request carries."""

from types import SimpleNamespace

import pytest

import patchclamp as pc
from patchclamp.engines.vllm import setup
from patchclamp.engines.vllm.compat import core, runner, seams


def test_foreign_extra_args_are_no_programs():
    for extra in (None, {}, {"patchclamp": "hello"}, {"patchclamp": 3}, {"other": b"x"}):
        assert core.carried(SimpleNamespace(extra_args=extra)) is None
    undecodable = SimpleNamespace(extra_args={"patchclamp": b"no program at all"})
    request = SimpleNamespace(patchclamp=None, sampling_params=undecodable)
    assert core._block_keys(lambda *args: ("keys", 1), request, 0, 16, 0) == ("keys", 1)


def test_a_seam_that_moved_is_told_by_our_engines_alone(monkeypatch, smollm2):
    moved = seams.Seam("vllm.v1.core.kv_cache_utils:no_such_function", "key edited blocks", ("request",))
    monkeypatch.setattr(core, "BLOCK_KEYS", moved)
    monkeypatch.setattr(setup, "problem", None)
    setup.register()
    with pytest.raises(pc.SeamMoved, match=r"no_such_function, needed to key edited blocks"):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=64)
    monkeypatch.undo()
    setup.register()


PLACES = {  # a function that is taken away or changed
    "a method": "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks",
    "a method of a worker": "vllm.v1.worker.gpu_worker.Worker.sleep",
    "a module's function": "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_function_that_differs_is_named_before_an_engine_starts(monkeypatch, smollm2, place, is_gone):
    seams.require_all("")
    if is_gone:
        monkeypatch.delattr(place)
    else:
        monkeypatch.setattr(place, lambda self, brand_new: None)
    with pytest.raises(pc.SeamMoved, match=place.rpartition(".")[2]):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=64)


def test_what_the_other_runner_lacks_does_not_stop_this_one(narrow, monkeypatch):
    worker = narrow.get("vllm", "float32").engine._engine.model_executor.driver_worker.worker
    monkeypatch.delattr("vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample_tokens")
    assert runner.runner_of(worker)[1] == "v1"
    with pytest.raises(pc.SeamMoved, match="sample_tokens"):
        seams.require_all("v2")
    monkeypatch.delattr("vllm.v1.worker.gpu_model_runner.GPUModelRunner._dummy_run")
    with pytest.raises(pc.SeamMoved, match="_dummy_run"):
        runner.runner_of(worker)


def test_the_cache_leaves_room_for_what_ours_takes():
    theirs = SimpleNamespace(model_memory_usage=5)
    runner.count_memory(theirs, 7)
    assert theirs.model_memory_usage == 12
