"""The plugin beside engines that are not ours: nothing of it acts, whatever a request carries."""

import pkgutil
from types import SimpleNamespace

import pytest

import patchclamp as pc
from patchclamp.engines.vllm import cache, plugin
from patchclamp.engines.vllm.compat import runner, seams


def test_foreign_extra_args_are_no_programs():
    for extra in (None, {}, {"patchclamp": "hello"}, {"patchclamp": 3}, {"other": b"x"}):
        assert runner.carried(SimpleNamespace(extra_args=extra)) is None
    assert cache._block_key(SimpleNamespace(patchclamp=None), b"no program at all", 0, 16) is None


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


KINDS = {  # what is taken away, and the seam that says so
    "a module's function": ("vllm.envs.disable_envs_cache", "environment"),
    "a function": ("vllm.v1.engine.core.cleanup_dist_env_and_memory", "clean up"),
    "a class's attribute": ("vllm.compilation.cuda_graph.CUDAGraphWrapper._all_instances", "graphs"),
    "what a method sets": ("vllm.compilation.cuda_graph.CUDAGraphWrapper.__init__", "graphs"),
    "a property": ("vllm.config.ModelConfig.is_encoder_decoder", "model"),
    "an option with a default": ("vllm.config.CacheConfig.enable_prefix_caching", "cache"),
    "a method": ("vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.find_longest_cache_hit", "cache length"),
    "a class": ("vllm.v1.core.sched.output.CachedRequestData", "running requests"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_named_before_an_engine_starts(monkeypatch, smollm2, kind):
    seams.require_all("")
    place, name = KINDS[kind]
    owner, _, last = place.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    monkeypatch.delattr(owner, last)
    for kept in ("__annotations__", "__dataclass_fields__"):
        if last in vars(owner).get(kept, ()):
            monkeypatch.delitem(getattr(owner, kept), last)
    if last in ("__init__", "find_longest_cache_hit"):
        monkeypatch.setattr(owner, last, lambda self: None, raising=False)
    with pytest.raises(pc.SeamMoved, match=f"no seam '{name}' where it is expected"):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=64)


def test_a_field_without_a_default_is_looked_for(monkeypatch):
    from vllm.v1.core.sched.output import SchedulerOutput

    monkeypatch.delitem(SchedulerOutput.__annotations__, "finished_req_ids")
    monkeypatch.setattr(SchedulerOutput, "__init__", lambda self: None)
    with pytest.raises(pc.SeamMoved, match=r"no seam 'step' .*: it has no finished_req_ids$"):
        seams.require_all("")


@pytest.mark.parametrize(
    ("path", "last", "name"),
    [("", "requests", "v1 runner"), ("input_batch", "num_computed_tokens_cpu", "v1 batch"),
     ("input_ids", "gpu", "v1 buffer")],
)  # fmt: skip
def test_what_a_runner_lacks_is_named_once_its_model_is_loaded(shallow, monkeypatch, path, last, name):
    worker = shallow.get("vllm", "float32").engine._engine.model_executor.driver_worker.worker
    assert runner.runner_of(worker)[1] == "v1"
    monkeypatch.delattr(getattr(worker.model_runner, path) if path else worker.model_runner, last)
    with pytest.raises(pc.SeamMoved, match=f"no seam '{name}' .* has no {last}$"):
        runner.runner_of(worker)


def test_what_the_other_runner_lacks_is_no_concern_of_this_one(monkeypatch):
    from vllm.v1.worker.gpu.input_batch import InputBuffers

    monkeypatch.setattr(InputBuffers, "__init__", lambda self: None)
    seams.require_all("v1")
    with pytest.raises(pc.SeamMoved, match=r"no seam 'v2 buffers' .*: it has no input_ids, positions$"):
        seams.require_all("v2")


def test_the_cache_leaves_room_for_what_ours_takes():
    theirs = SimpleNamespace(model_memory_usage=5)
    runner.count_memory(theirs, 7)
    assert theirs.model_memory_usage == 12
    with pytest.raises(pc.SeamMoved, match=r"no seam 'v2 runner' .* has no .*model_memory_usage"):
        seams.require_on("v2 runner", SimpleNamespace())
