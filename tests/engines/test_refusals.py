"""Guarantee 7 and 9: bad input is a clear error before anything runs, and the engine then still serves."""

import copy
import gc
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import TOKENS, WIDTH
from .conftest import PROMPTS, SHALLOW

D = WIDTH
BAD = [
    (dict(capture=["resid_pots[3]"]), pc.UnknownName, "capture[0].at: unknown site 'resid_pots' (did you mean 'resid_post'"),
    (dict(capture=["resid_post[8]"]), pc.UnsupportedSite, "capture[0].at: resid_post[8]: layer is out of range"),
    (dict(capture=["resid_post[5:40]"]), pc.UnsupportedSite, "8 layers (0..7)"),
    (dict(capture=["embed[0]"]), pc.ProgramError, "capture[0].at: embed has no layers"),
    (dict(capture=["z[3, 9]"]), pc.UnsupportedSite, "9 heads (0..8)"),
    (dict(capture=["router[3]"]), pc.UnsupportedSite, "router is not available on llama models"),
    (dict(capture=[pc.logits @ pc.prompt[0]]), pc.UnsupportedSite, "logits exist only at sampled positions"),
    (dict(edits=[pc.Add([1.0, 2.0], at=pc.embed)]), pc.ShapeError, f"edits[0].value: expected a vector of width {D} for embed"),
    (dict(edits=[pc.Add(np.ones((3, D)), at=pc.embed, tokens=pc.prompt)]), pc.ShapeError, "(5), got 3 rows"),
    (dict(edits=[pc.Replace(pc.From("gone"), at=pc.embed)]), pc.MissingSource, "edits[0].value: unknown run gone"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[5])]), pc.TokensError, "edits[0].tokens: prompt[5]: position 5"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[-6])]), pc.TokensError, "the prompt has 5 tokens (0 to 4)"),
    (dict(edits=[pc.Zero(pc.embed, pc.every[7])]), pc.TokensError, "position 7 is out of range"),
    (dict(edits=[pc.Zero(pc.embed, pc.span("Paris"))]), pc.TokensError, "span(\"Paris\"): not in the prompt 'The capital of France is'"),
    (dict(edits=[pc.Zero(pc.embed, pc.span("a", 99))]), pc.TokensError, "out of range"),
    (dict(edits=[pc.Zero(pc.embed, pc.generated)], max_tokens=1), pc.TokensError, "generated selects no positions"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[3:3])]), pc.TokensError, "prompt[3:3] selects no positions"),
    (dict(edits=[pc.resid_post]), pc.ProgramError, "edits[0]: expected an op"),
    (dict(edits=[[], []]), pc.ProgramError, "edits: expected one list per prompt"),
    (dict(max_tokens=0), pc.ProgramError, "max_tokens: expected at least 1"),
    (dict(max_tokens=600), pc.TokensError, "exceed max_model_len=512"),
    (dict(sampling={"temprature": 1}), pc.UnknownName, "sampling.temprature: unknown sampling parameter 'temprature' (did you mean 'temperature'"),
    (dict(sampling={"top_p": 3.0}), pc.ProgramError, "top_p"),
    (dict(score=list(range(200))), pc.ProgramError, "score: expected at most 128 tokens, got 200"),
    (dict(edits=5), pc.ProgramError, "edits: expected a list, got int"),
    (dict(edits=[pc.Zero(pc.embed, [1, 1])]), pc.TokensError, "duplicate positions"),
    (dict(score=[10**6]), pc.TokensError, "score: expected a token id from 0 to 8191"),
]  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_bad_input_is_refused_before_it_runs(narrow, engine):
    lm = narrow.get(engine, "float32", **({} if engine == "vllm" else {"max_model_len": 512}))
    before = lm.run(PROMPTS[0], max_tokens=3, logprobs=True)
    planned = lm.engine.status()["steps_planned"]
    for asked, error, text in BAD:
        with pytest.raises(error) as caught:
            lm.run(PROMPTS[0], **{"max_tokens": 2, **asked}, logprobs=True)
        assert text in str(caught.value)
    assert lm.engine.status()["steps_planned"] == planned
    after = lm.run(PROMPTS[0], max_tokens=3, logprobs=True)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_sources_must_be_alive_and_hold_what_is_read(narrow, engine):
    lm = narrow.get(engine, "float32")
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[3] @ pc.prompt[1:3]], logprobs=True)
    for value, text in (
        (pc.From(run), "did not capture resid_post[3] at position 0"),
        (pc.From(run, pc.resid_post[4]), "did not capture resid_post[4]"),
        (pc.From(run, pc.resid_post[3], pc.prompt[0]), "at position 0"),
    ):
        with pytest.raises(pc.MissingSource) as caught:
            lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Replace(value, at=pc.resid_post[3])], logprobs=True)
        assert text in str(caught.value)
    with pytest.raises(pc.MissingSource, match=r"resid_pre\[0\] .*resid_post\[3\]"):
        run["resid_pre[0]"]
    assert run.layers(pc.resid_post) == [3]
    kept = pc.From(run)
    run.close()
    with pytest.raises(pc.MissingSource, match="was closed"):
        lm.run(
            PROMPTS[0],
            max_tokens=1,
            edits=[pc.Replace(kept, at=pc.resid_post[3], tokens=pc.prompt[1:3])],
            logprobs=True,
        )


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_value_keeps_its_run_and_dropped_runs_leave_nothing(narrow, engine):
    lm = narrow.get(engine, "float32")
    gc.collect()
    before = lm.engine.status()["runs"]
    value = pc.From(lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[3]], logprobs=True))
    gc.collect()
    plain = lm.run(PROMPTS[0], max_tokens=1, logprobs=True)
    again = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Replace(value, at=pc.resid_post[3])], logprobs=True)
    assert again.logprobs == plain.logprobs
    assert lm.engine.status()["runs"] > before
    del value, again
    gc.collect()
    lm.engine.status()  # what was asked of the engine before is done
    assert lm.engine.status()["runs"] == before


def test_many_threads_share_one_engine(narrow):
    lm = narrow.get("vllm", "float32")
    expected = {text: lm.run(text, max_tokens=4, logprobs=True).token_ids for text in PROMPTS}
    wrong: list = []

    def client(number: int) -> None:
        text = PROMPTS[number % 3]
        at = pc.resid_post[number % SHALLOW]
        run = lm.run(text, max_tokens=4, capture=[at], logprobs=True)
        edited = lm.run(text, max_tokens=4, edits=[pc.Replace(pc.From(run, at), at=at)], logprobs=True)
        if not run.token_ids == edited.token_ids == expected[text] or len(run[at]) != len(run.prompt_token_ids) + 3:
            wrong.append(number)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_programs_more_than_fit_at_once_leave_the_tables_empty(narrow):
    lm = narrow.get("vllm", "float32")
    ids = lm.tokens(PROMPTS[0])
    # what is done in the last layer to a token reaches no other
    at = [pc.resid_post[n % (SHALLOW if n % 5 == 4 else SHALLOW - 1)] for n in range(100)]
    edits = [[pc.Add(torch.randn(D), at=at[n], tokens=pc.prompt[n % 5])] for n in range(100)]
    runs = lm.run([ids] * 100, max_tokens=1, edits=edits, score=[7042], logprobs=True)
    assert len({run.scores[7042] for run in runs}) == 100
    gc.collect()
    lm.run(ids, max_tokens=1, logprobs=True)
    status = lm.engine.status()
    assert (status["programs"], status["pinned"], status["vectors"], status["records"]) == (0, 0, 0, 0)


def test_a_program_that_does_not_fit_fails_alone(narrow):
    lm = narrow.get("vllm", "float32", max_records=64, bank_bytes=200_000, prove=False)
    good = [pc.Add(torch.randn(D), at=pc.resid_post[3])]
    too_many_records = [pc.Zero(pc.resid_post), pc.Zero(pc.resid_mid), pc.Zero(pc.attn_out)] * 3
    too_many_rows = [pc.Add(torch.randn(400, D), at=pc.resid_post[3], tokens=pc.prompt)]
    ids = lm.tokens(PROMPTS[1])[:10] * 40
    runs = lm.run([ids] * 4, max_tokens=1, edits=[good, too_many_records, too_many_rows, []], logprobs=True)
    assert [type(run.error) for run in runs] == [type(None), pc.CapacityError, pc.CapacityError, type(None)]
    assert "raise max_records" in str(runs[1].error)
    assert "raise bank_bytes" in str(runs[2].error)
    with pytest.raises(pc.CapacityError):
        _ = runs[1].text
    assert runs[0].logprobs != runs[3].logprobs


def test_unknown_engine_options_are_errors(smollm2):
    for engine, option, meant in (
        ("vllm", "max_modle_len", "max_model_len"),
        ("transformers", "padding", "padding_side"),
    ):
        with pytest.raises(pc.UnknownName, match=f"'{option}' .did you mean '{meant}'"):
            pc.LM(str(smollm2), engine=engine, **{option: 1})
    with pytest.raises(pc.UnknownName, match="'vlm'"):
        pc.LM(str(smollm2), engine="vlm")
    for engine in ("vllm", "transformers", "fake"):
        with pytest.raises(pc.UnknownName, match=r"numerics: unknown numerics 'unifrom' .did you mean 'uniform'"):
            pc.LM("fake" if engine == "fake" else str(smollm2), engine=engine, numerics="unifrom")
    with pytest.raises(pc.EngineError, match=r"numerics.*Transformers engine, got 'stock'"):
        pc.LM(str(smollm2), engine="transformers", numerics="stock")
    for option, value in (("kept_bytes", "much"), ("active_sizes", ["8"])):
        with pytest.raises(pc.EngineError, match=rf"engine options: .*{option}"):
            pc.LM(str(smollm2), engine="vllm", **{option: value})


def test_sizes_that_no_graph_is_recorded_for_are_named():
    from patchclamp.engines.vllm.compat.configuration import unrecorded

    def config(sizes):
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes))

    told = unrecorded(config([1, 2, 4, 8]), [1, 3, 64])
    assert told is not None
    assert "[3, 64]" in told
    assert "[1, 2, 4, 8]" in told
    assert unrecorded(config([1, 2, 4, 8]), [1, 8]) is None
    assert unrecorded(config([]), [3]) is None  # on a CPU, or run eagerly: no graphs at all


@pytest.mark.parametrize(("options", "named"), [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3,
                             "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}},
     r".*rejection_sample_method='synthetic'"),
])  # fmt: skip
def test_configurations_that_break_a_guarantee_are_refused(smollm2, options, named):
    with pytest.raises(pc.EngineError, match=f"{named}.*: "):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=512, **options)


@pytest.fixture(scope="module")
def configuration(smollm2):
    """vLLM's own configuration of an engine, to be changed in a copy."""
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(smollm2), enforce_eager=True, max_model_len=512).create_engine_config()
    return lambda: copy.deepcopy(made)


def test_drafts_are_refused_where_they_were_not_tried(configuration, monkeypatch):
    from patchclamp.engines.vllm.compat.configuration import UNTRIED_DRAFTS, refused

    config = configuration()
    config.scheduler_config.async_scheduling = False
    drafts = SimpleNamespace(method="ngram", rejection_sample_method="standard", enable_adaptive_verification=False,
                             **UNTRIED_DRAFTS)  # fmt: skip
    object.__setattr__(config, "speculative_config", drafts)
    for method, on_v1 in (("ngram", True), ("draft_model", False), ("eagle", True), ("eagle3", False), ("mtp", False)):
        drafts.method = method
        config.device_config.device_type = "cpu"
        assert refused(config) == {}
        config.device_config.device_type = "cuda"
        for on_v2 in (True, False):
            monkeypatch.setattr(type(config), "use_v2_model_runner", on_v2)
            named = f"speculative decoding by {method!r} (speculative_config) on a GPU with the V1 runner"
            assert list(refused(config)) == ([] if on_v2 or on_v1 else [named])
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    drafts.use_multi_module_mtp = lambda: True
    assert list(refused(config)) == ["multi-module MTP, or Gemma 4's (speculative_config)"]
    drafts.use_multi_module_mtp = lambda: False
    config.device_config.device_type = "cpu"
    config.lora_config = object()
    assert list(refused(config)) == ["speculative decoding by 'mtp' (speculative_config) with LoRA"]
    config.lora_config, drafts.method = None, "ngram"
    config.parallel_config.world_size, config.device_config.device_type = 2, "cuda"
    assert list(refused(config)) == ["speculative decoding by 'ngram' (speculative_config) over several workers"]
    config.device_config.device_type = "cpu"
    assert refused(config) == {}
    drafts.method = "eagle3"
    assert list(refused(config)) == ["speculative decoding by 'eagle3' (speculative_config) over several workers"]
    config.parallel_config.world_size, drafts.method = 1, "ngram"
    drafts.parallel_drafting, drafts.draft_sample_method = True, "probabilistic"
    assert list(refused(config)) == [
        "speculative decoding (speculative_config) with parallel_drafting",
        "speculative decoding (speculative_config) with draft_sample_method",
    ]
    drafts.parallel_drafting, drafts.draft_sample_method = False, "greedy"
    config.parallel_config.pipeline_parallel_size = 2
    assert list(refused(config)) == ["speculative decoding (speculative_config) over pipeline stages"]
    config.parallel_config.pipeline_parallel_size = 1
    drafts.rejection_sample_method, drafts.enable_adaptive_verification = "synthetic", True
    assert list(refused(config)) == [
        "synthetic draft acceptance (rejection_sample_method='synthetic')",
        "adaptive draft verification (enable_adaptive_verification)",
    ]


def test_batch_invariant_mode_is_refused_on_a_cpu(configuration, smollm2):
    from patchclamp.engines.vllm.compat.configuration import environment, refused

    config = configuration()
    assert refused(config) == {}
    with environment({"VLLM_BATCH_INVARIANT": "1"}):
        assert list(refused(config)) == ["batch-invariant mode (VLLM_BATCH_INVARIANT=1) on a CPU"]
        with pytest.raises(pc.EngineError, match="VLLM_BATCH_INVARIANT"):
            pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=512)
        config.device_config.device_type = "cuda"
        assert refused(config) == {}


def test_options_of_drafts_are_as_vllm_has_them_by_default():
    from vllm.config import SpeculativeConfig

    from patchclamp.engines.vllm.compat.configuration import UNTRIED_DRAFTS

    made = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    assert {name: getattr(made, name) for name in UNTRIED_DRAFTS} == UNTRIED_DRAFTS


@pytest.mark.parametrize("on_v2", [True, False])
def test_steps_come_one_after_the_other_beside_drafts_on_the_v1_runner_unless_it_is_set(smollm2, monkeypatch, on_v2):
    from vllm.engine.arg_utils import EngineArgs

    from patchclamp.engines.vllm.compat import clients
    from patchclamp.engines.vllm.compat.configuration import KEY, refused

    def create_engine_config(
        self, usage_context=None, headless=False
    ):  # as on a GPU, where vLLM schedules ahead by default
        config = created(self)
        config.scheduler_config.async_scheduling = self.async_scheduling is not False
        return config

    monkeypatch.setattr("patchclamp.engines.vllm.compat.configuration._on_v2", lambda config: on_v2)
    created = getattr(EngineArgs.create_engine_config, "__wrapped__", EngineArgs.create_engine_config)
    monkeypatch.setattr(EngineArgs, "create_engine_config", create_engine_config)
    seen = []
    clients.on_config(seen.append)
    drafts = {"speculative_config": {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 2}}
    short = {"spec_method": "draft_model", "spec_model": str(smollm2), "spec_tokens": 2}
    for ours, set_to, asked, expected in (
        ({KEY: {}}, None, drafts, on_v2), ({KEY: {}}, None, short, on_v2), ({KEY: {}}, True, drafts, True),
        ({KEY: {}}, False, drafts, False), ({}, None, drafts, True), ({KEY: {}}, None, {}, True),
    ):  # fmt: skip
        engine_args = EngineArgs(model=str(smollm2), additional_config=ours, async_scheduling=set_to, **asked)
        config = engine_args.create_engine_config()
        assert config.scheduler_config.async_scheduling is expected
        assert (config in seen) == bool(ours)
        named = "speculative decoding (speculative_config) with async_scheduling and the V1 runner"
        assert (named in refused(config)) == (expected and asked != {} and not on_v2)


def test_drafts_are_counted_where_some_are_asked_for():
    from patchclamp.engines.vllm.compat.configuration import counted_drafts

    for asked in ({"speculative_config": {"method": "ngram"}}, {"spec_method": "mtp"}, {"spec_model": "x"}):
        assert counted_drafts(asked) == asked | {"per_request_spec_decode_metrics": "summary"}
    assert counted_drafts({}) == {}


@pytest.mark.parametrize(("part", "option", "value", "named"), [
    ("", "speculative_config", SimpleNamespace(method="medusa"), "speculative decoding by 'medusa' (speculative_config)"),
    ("parallel_config", "enable_dbo", True, "micro-batching (enable_dbo, ubatch_size)"),
    ("parallel_config", "ubatch_size", 2, "micro-batching (enable_dbo, ubatch_size)"),
    ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size above 1"),
    ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size above 1"),
    ("parallel_config", "enable_elastic_ep", True, "elastic expert parallel (enable_elastic_ep)"),
    ("parallel_config", "enable_batch_sharded_sampling", True, "sharded sampling (enable_batch_sharded_sampling)"),
    ("", "kv_transfer_config", SimpleNamespace(kv_connector="MultiConnector"), "the KV connector 'MultiConnector' (kv_transfer_config)"),
    ("", "kv_transfer_config", SimpleNamespace(kv_connector="ExampleConnector", kv_connector_module_path="mine"),
     "a custom KV connector module (kv_connector_module_path='mine')"),
    ("", "kv_transfer_config", SimpleNamespace(kv_connector="OffloadingConnector"), "KV offloading (OffloadingConnector)"),
    ("", "kv_transfer_config", SimpleNamespace(kv_connector="ExampleConnector", kv_connector_extra_config={"spec_name": "X"}),
     "another offloading spec (kv_connector_extra_config)"),
    ("", "ec_transfer_config", object(), "encoder caches of other instances (ec_transfer_config)"),
    ("cache_config", "kv_sharing_fast_prefill", True, "KV-sharing fast prefill (kv_sharing_fast_prefill)"),
    ("model_config", "runner_type", "pooling", "pooling models (runner type 'pooling')"),
    ("model_config.hf_config", "is_encoder_decoder", True, "encoder-decoder models"),
    ("compilation_config", "cache_dir", "/some/where", "a compile cache folder (compilation_config.cache_dir)"),
    ("model_config", "sleep_mode_offload_cudagraph", True, "offloading CUDA graphs on sleep (sleep_mode_offload_cudagraph)"),
])  # fmt: skip
def test_every_refused_configuration_is_named(configuration, part, option, value, named):
    """On vLLM's own configuration, so that an option that goes by another name one day is noticed."""
    from patchclamp.engines.vllm.compat.configuration import check, refused

    config = configuration()
    assert refused(config) == {}
    check(config)
    owner = config
    for name in filter(None, part.split(".")):
        owner = getattr(owner, name)
    assert hasattr(owner, option)
    object.__setattr__(owner, option, value)
    config.model_config.__dict__.pop("is_encoder_decoder", None)
    assert list(refused(config)) == [named]
    with pytest.raises(pc.EngineError, match=r"patchclamp: .+: .+"):
        check(config)


def test_where_adapters_are_not_tested_they_are_refused(configuration):
    from vllm.config import LoRAConfig

    from patchclamp.engines.vllm.compat.configuration import check, refused

    config = configuration()
    config.lora_config = LoRAConfig()
    for workers in (1, 2):
        config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = workers
        for device in ("cuda", "cpu"):
            config.device_config.device_type = device
            assert refused(config) == {}
    config.lora_config.fully_sharded_loras = True
    assert list(refused(config)) == ["LoRA with sharded first matrices (fully_sharded_loras) over several workers"]
    config.lora_config.fully_sharded_loras = False
    config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = 1, 2
    assert list(refused(config)) == ["LoRA (enable_lora) over pipeline stages"]
    with pytest.raises(pc.EngineError, match=r"LoRA \(enable_lora\) over pipeline stages"):
        check(config)


def test_breakable_graphs_are_refused_where_graphs_are_recorded(configuration, monkeypatch):
    from vllm.config import CUDAGraphMode

    from patchclamp.engines.vllm.compat.configuration import refused

    monkeypatch.setattr("vllm.compilation.breakable_cudagraph.is_breakable_cudagraph_enabled", lambda: True)
    config = configuration()
    assert refused(config) == {}  # run eagerly
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert list(refused(config)) == ["breakable CUDA graphs (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)"]


@pytest.mark.parametrize("mode", ["STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE"])
def test_on_a_gpu_code_is_compiled_by_vllm_or_not_at_all(configuration, mode):
    from vllm.config import CompilationMode

    from patchclamp.engines.vllm.compat.configuration import refused

    config = configuration()
    config.compilation_config.mode = CompilationMode[mode]
    assert refused(config) == {}  # vLLM's CPU build compiles in this way
    object.__setattr__(config.device_config, "device_type", "cuda")
    assert list(refused(config)) == [f"compilation mode {mode} on a GPU"]
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    assert refused(config) == {}


def test_code_saved_as_one_piece_is_refused(smollm2, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "1")
    with pytest.raises(pc.EngineError, match="VLLM_USE_MEGA_AOT_ARTIFACT=1"):
        pc.LM(str(smollm2), engine="vllm")
    names = ("VLLM_USE_MEGA_AOT_ARTIFACT", "VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.delenv(names[0])
    monkeypatch.setenv(names[1], "1")
    with pytest.raises(pc.EngineError, match="pooling models"):
        pc.LM(str(smollm2), engine="vllm", runner="pooling")
    assert [os.environ.get(name) for name in names] == [None, "1"]  # what an engine needs is put back


def test_an_engine_that_starts_by_itself_saves_traced_graphs(configuration, monkeypatch):
    """As under a plain `vllm serve`: what vLLM would save instead is one variant, which nobody gives its points."""
    from vllm.config import CompilationMode

    from patchclamp.engines.vllm.compat.configuration import MEGA, save_graphs

    config = configuration()
    monkeypatch.setenv(MEGA, "0")  # put back afterwards
    monkeypatch.delenv(MEGA)
    monkeypatch.setattr(f"vllm.envs.{MEGA}", True, raising=False)
    save_graphs(config)
    assert MEGA not in os.environ  # nothing is compiled
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    save_graphs(config)
    assert os.environ[MEGA] == "0"
    monkeypatch.setenv(MEGA, "1")
    with pytest.raises(pc.EngineError, match=f"{MEGA}=1"):
        save_graphs(config)


def test_a_compiled_model_without_an_idle_variant_is_refused(narrow, monkeypatch):
    """As a vLLM would leave it that compiles where patchclamp does not see it; stock numerics alone need the variant."""
    from vllm.config import CompilationMode

    lm = narrow.get("vllm", "float32")
    assert lm.engine._call(lambda: lm.engine._ask("started", False)).result() == [None]
    monkeypatch.setattr(lm.engine.config.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    assert lm.engine._call(lambda: lm.engine._ask("started", False)).result() == [None]
    monkeypatch.setitem(lm.engine.config.additional_config["patchclamp"], "numerics", "stock")
    with pytest.raises(pc.EngineError, match="VLLM_USE_AOT_COMPILE"):
        lm.engine._call(lambda: lm.engine._ask("started", False)).result()


@pytest.mark.parametrize(("cpu", "context"), [(False, "LLM_CLASS"), (True, "UNKNOWN_CONTEXT")])
def test_on_a_gpu_sizes_are_those_that_vllm_llm_chooses(smollm2, monkeypatch, cpu, context):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)

    asked = []

    def config(self, usage_context=None, headless=False):
        asked.append(usage_context.value)
        raise ValueError("enough")

    monkeypatch.setattr(EngineArgs, "create_engine_config", config)
    with pytest.raises(pc.PatchclampError, match="enough"):
        pc.LM(str(smollm2), engine="vllm")
    assert asked == [context]


def test_an_engine_sleeps_lightly_or_not_at_all(narrow):
    lm = narrow.get("vllm", "float32")
    with pytest.raises(pc.EngineError, match="sleep level 2"):
        lm.sleep(2)
    with pytest.raises(pc.EngineError, match="start it with enable_sleep_mode=True"):
        lm.sleep()
    with pytest.raises(pc.EngineError, match="sleep level 2"):  # asked of vLLM itself
        lm.engine._call(lambda: lm.engine._engine.collective_rpc("sleep", args=(2,))).result()
    lm.wake()
    with pytest.raises(pc.EngineError, match=r"the transformers engine .*sleep"):
        narrow.get("transformers", "float32").sleep()
    assert lm.run(PROMPTS[0], max_tokens=1, logprobs=True).token_ids


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [1.0], [None], ["a", 3], [True, False], b"The", object()])
def test_what_is_no_prompt_is_our_error(narrow, prompt):
    with pytest.raises(pc.ProgramError, match="prompt"):
        narrow.get("transformers", "float32").run(prompt, max_tokens=1, logprobs=True)


def test_prompts_as_arrays_and_chats(narrow):
    lm = narrow.get("transformers", "float32")
    ids = lm.tokens(PROMPTS[0])
    expected = lm.run(ids, max_tokens=2, logprobs=True).logprobs
    assert (
        lm.run(np.array(ids), max_tokens=2, logprobs=True).logprobs
        == lm.run(torch.tensor(ids), max_tokens=2, logprobs=True).logprobs
        == expected
    )
    chat = lm.run(messages=[{"role": "user", "content": "Name the capital of France."}], max_tokens=8, logprobs=True)
    assert "user\nName the capital of France.\nassistant" in lm.tokenizer.decode(chat.prompt_token_ids)
    assert chat.token_ids == lm.run(chat.prompt_token_ids, max_tokens=8, logprobs=True).token_ids
    for messages in ([{"rol": "user"}], {"role": "user"}):
        with pytest.raises(pc.ProgramError, match=r"^messages: "):
            lm.run(messages=messages, max_tokens=1, logprobs=True)


def test_closing_one_engine_leaves_the_others_running(narrowed, narrow):
    """Two engines share a process; vLLM's own shutdown would take down what both use."""
    lm = narrow.get("vllm", "float32")
    expected = lm.run(PROMPTS[0], max_tokens=3, logprobs=True).logprobs
    other = pc.LM(narrowed, engine="vllm", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
                  kv_cache_memory_bytes=1 << 26)  # fmt: skip
    run = other.run(PROMPTS[0], max_tokens=3, capture=[pc.embed], logprobs=True)
    other.close()
    assert lm.run(PROMPTS[0], max_tokens=3, logprobs=True).logprobs == expected == run.logprobs
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        other.run(PROMPTS[0], max_tokens=1, logprobs=True)
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        run[pc.embed]


def test_programs_wait_for_room_and_never_run_without_themselves(narrow):
    """Each program fills most of the bank: they take turns, all are edited, and what they cached is theirs."""
    lm = narrow.get("vllm", "float32", max_records=64, bank_bytes=200_000, prove=False)
    roomy = narrow.get("vllm", "float32", enable_prefix_caching=False)
    prompts = [torch.randint(100, TOKENS, (200,)).tolist() for _ in range(3)]
    edits = [[pc.Add(torch.randn(190, D) * 5, at=pc.resid_post[3], tokens=pc.prompt[0:190])] for _ in prompts]
    for _ in range(2):  # the second time from the cache
        runs = lm.run(prompts, max_tokens=2, edits=edits, capture=[pc.logits], logprobs=True)
        for prompt, edit, run in zip(prompts, edits, runs, strict=True):
            alone = roomy.run(prompt, max_tokens=2, edits=edit, capture=[pc.logits], logprobs=True)
            assert torch.allclose(run[pc.logits], alone[pc.logits], atol=1e-3)
    assert runs[0].cached_tokens == 192
    plain = lm.run(prompts, max_tokens=2, capture=[pc.logits], logprobs=True)
    assert all((a[pc.logits] - b[pc.logits]).abs().max() > 0.1 for a, b in zip(plain, runs, strict=True))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_edits_that_are_not_finite_fail_their_run_and_touch_nobody(narrow, engine):
    lm = narrow.get(engine, "float32")
    ids = lm.tokens(" ".join(PROMPTS))
    plain = lm.run([PROMPTS[0], ids], max_tokens=4, logprobs=True)
    hot = [pc.Add([3e38] * D, at=pc.resid_post[3], scale=1e30), pc.Capture(pc.resid_post[4])]
    bad, good = lm.run([ids * 4, PROMPTS[0]], max_tokens=2, edits=[hot, []], logprobs=True)
    assert good.logprobs == lm.run([ids * 4, PROMPTS[0]], max_tokens=2, logprobs=True)[1].logprobs
    with pytest.raises(pc.RunError, match=r"resid_post\[3\]"):
        _ = bad.text
    again, other = lm.run([ids * 4] * 2, max_tokens=2, edits=[hot, [pc.Zero(pc.resid_post[3])]], logprobs=True)
    assert "not finite" in str(again.error)  # what the first left in the prefix cache is not taken for its work
    assert other.error is None
    third = lm.run(ids * 4, max_tokens=2, edits=[pc.Zero(pc.resid_post[3])], logprobs=True)
    assert np.allclose(third.logprobs, other.logprobs, atol=1e-4)
    assert np.allclose(
        [r.logprobs for r in lm.run([PROMPTS[0], ids], max_tokens=4, logprobs=True)],
        [r.logprobs for r in plain],
        atol=1e-4,
    )
    with pytest.raises(pc.ProgramError, match=r"scale: .*fp32"):
        pc.Add([1.0], at=pc.embed, scale=1e39)


def test_a_run_beside_a_failing_one_never_takes_its_cached_blocks_for_edited(narrow):
    """The failing run is still at work, or was aborted, when another with the same program could read its blocks."""
    lm = narrow.get("vllm", "float32")
    ids = (lm.tokens(" ".join(PROMPTS)) * 8)[:150]
    hot = [pc.Add([3e38] * D, at=pc.resid_post[3], tokens=pc.prompt[3:5], scale=1e30)]
    for aborted in (False, True):
        before, errors = lm.engine.status()["failures"], []

        def long(ids=ids, errors=errors) -> None:
            try:
                lm.run(ids, max_tokens=80, edits=hot, sampling={"ignore_eos": True}, logprobs=True)
            except pc.PatchclampError as error:
                errors.append(error)

        thread = threading.Thread(target=long)
        thread.start()
        while lm.engine.status()["failures"] == before:
            time.sleep(0.01)
        if aborted:
            lm.engine.abort(list(lm.engine._waiting))
        for _ in range(2):
            (beside,) = lm.run([ids], max_tokens=1, edits=hot, logprobs=True)
            assert isinstance(beside.error, pc.RunError), beside
        thread.join()
        assert len(errors) == 1
        ids = ids[1:]
    fine = lm.run([ids] * 2, max_tokens=2, edits=[pc.Zero(pc.resid_post[3], tokens=pc.prompt[3:5])], logprobs=True)
    assert all(run.error is None for run in fine)


def test_closing_or_interrupting_settles_everyone(narrowed):
    """A thread that waits for a long run is told when another closes the engine; an interrupted run leaves nothing."""
    lm = pc.LM(narrowed, engine="vllm", dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
               kv_cache_memory_bytes=1 << 27)  # fmt: skip
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            lm.run(PROMPTS[0], max_tokens=400, sampling={"ignore_eos": True}, logprobs=True)
        except pc.PatchclampError as error:
            caught.append(error)

    lm.run(PROMPTS[0], max_tokens=1, logprobs=True)
    runs = lm.engine.status()["runs"]
    import patchclamp.lm as front

    def interrupted(future):
        raise KeyboardInterrupt

    stock, front.answer_of = front.answer_of, interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            lm.run(
                [PROMPTS[0]] * 3, max_tokens=400, capture=[pc.resid_post], sampling={"ignore_eos": True}, logprobs=True
            )
    finally:
        front.answer_of = stock
    status = lm.engine.status()
    assert (status["runs"], status["programs"], status["vectors"]) == (runs, 0, 0)
    lm.engine._step = lambda: time.sleep(0.001)  # the run is under way for as long as it takes
    thread = threading.Thread(target=wait)
    thread.start()
    while not lm.engine._waiting:
        time.sleep(0.001)
    lm.close()
    thread.join()
    assert [str(error) for error in caught] == ["the engine is closed"]


def test_a_kept_run_does_not_hold_its_batchmates(narrow):
    lm = narrow.get("transformers", "float32")
    gc.collect()
    before = lm.engine.status()["captured_bytes"]
    kept, *others = lm.run(
        [PROMPTS[2]] * 5, max_tokens=3, capture=[[pc.embed @ pc.prompt[0]], *[[pc.resid_post]] * 4], logprobs=True
    )
    row = lm.run(PROMPTS[2], max_tokens=1, capture=[pc.embed @ pc.prompt[0]], logprobs=True)[pc.embed]
    del others
    gc.collect()
    assert lm.engine.status()["captured_bytes"] - before < 20_000
    assert torch.equal(kept[pc.embed], row)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_iterators_lists_in_any_order_and_places_in_the_program(narrow, engine):
    lm = narrow.get(engine, "float32")
    plain = lm.run([PROMPTS[0]] * 3, max_tokens=1, logprobs=True)
    runs = lm.run(
        [PROMPTS[0]] * 3, max_tokens=1, edits=(op for op in [pc.Zero(pc.attn_out)]), score=iter([7042]), logprobs=True
    )
    assert all(run.logprobs != plain[0].logprobs and list(run.scores) == [7042] for run in runs)
    a, b = torch.randn(2, D)
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.embed],
                 edits=[pc.Capture(pc.embed), pc.Replace(torch.stack([a, b]), at=pc.embed, tokens=[3, 1])], logprobs=True)  # fmt: skip
    assert torch.equal(run[pc.embed][[3, 1]], torch.stack([a, b]))
    assert not torch.equal(run["edits[0]"], run[pc.embed])
    swapped = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.embed],
                     edits=[pc.Replace(pc.From(run, pc.embed, pc.every[3, 1]), at=pc.embed, tokens=[1, 3])], logprobs=True)  # fmt: skip
    assert torch.equal(swapped[pc.embed][[1, 3]], torch.stack([a, b]))


WRONG_SAMPLING = [
    ({"seed": 1.5}, "sampling.seed: "), ({"seed": "a"}, "sampling.seed: "), ({"seed": True}, "sampling.seed: "),
    ({"seed": 2**70}, "sampling.seed: "), ({"logit_bias": {5: "x"}}, "sampling.logit_bias: "),
    ({"logit_bias": [1]}, "sampling.logit_bias: "), ({"logit_bias": {7: float("nan")}}, "sampling.logit_bias[7]: expected a number, got nan"),
    ({"repetition_detection": 5}, "RepetitionDetectionParams, got 5"),
    ({"structured_outputs": {"json": 1}}, "StructuredOutputsParams, got"),
    ({"skip_reading_prefix_cache": "x"}, "sampling.skip_reading_prefix_cache: "), ({"min_tokens": 1.5}, "sampling.min_tokens: "),
    ({"logit_bias": {(1, 2): 0.5}}, "sampling.logit_bias: "), ({"bad_words": "a"}, "sampling.bad_words: "), ({"stop": (5,)}, "sampling.stop: "),
    ({"temperature": None}, "sampling.temperature: "), ({"stop_token_ids": ["a"]}, "sampling.stop_token_ids: "),
]  # fmt: skip


@pytest.mark.parametrize(("sampling", "text"), WRONG_SAMPLING)
def test_sampling_of_a_wrong_type_is_refused_before_it_ends_the_engine(narrow, sampling, text):
    lm = narrow.get("vllm", "float32")
    with pytest.raises(pc.ProgramError, match="sampling") as caught:
        lm.run(PROMPTS[0], max_tokens=2, sampling={"temperature": 0.7, **sampling}, logprobs=True)
    assert text in str(caught.value)
    right = {"allowed_token_ids": {5, 6, 7}, "temperature": np.float32(0.7), "seed": np.int64(3), "logit_bias": {np.int64(5): 1}, "stop": ("never",),
             "stop_token_ids": np.array([3, 4]), "top_k": 5}  # fmt: skip
    assert len(lm.run(PROMPTS[0], max_tokens=2, sampling=right, logprobs=True).token_ids) == 2


@pytest.mark.parametrize("asked", [
    {"capture": {"resid_post[3]": pc.prompt[-1]}}, {"edits": {"resid_post[3]": pc.prompt[-1]}},
])  # fmt: skip
def test_names_and_values_are_no_program(narrow, asked):
    with pytest.raises(pc.ProgramError, match="mapping"):
        narrow.get("transformers", "float32").run(PROMPTS[0], **asked, logprobs=True)


def test_what_only_looks_like_numbers_is_refused():
    for mask in ([True, False], np.array([True, False]), torch.tensor([True, False])):
        with pytest.raises(pc.ProgramError, match="integer"):
            pc.prompt[mask]
    with pytest.raises(pc.ProgramError, match="got True"):
        pc.prompt[True]
    for vector in (torch.ones(3, dtype=torch.complex64), np.ones(3, complex)):
        with pytest.raises(pc.ShapeError, match="numbers"):
            pc.Add(vector, pc.embed)


def test_what_vllm_says_of_one_request_is_that_requests_error(narrow):
    lm = narrow.get("vllm", "float32")
    with pytest.raises(pc.RunError):  # and no EngineError: the engine is well
        lm.run(PROMPTS[0], max_tokens=2, sampling={"temperature": 0.7, "logit_bias": {-1: 1.0}}, logprobs=True)
    long = lm.run(PROMPTS[0], max_tokens=20, sampling={"min_tokens": 18}, logprobs=True)
    assert len(long.token_ids) >= 18
