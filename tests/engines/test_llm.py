"""A `vllm.LLM` of the caller's: programs in `SamplingParams.extra_args`, and weights that are updated in place, as a
trainer does between two rounds of rollouts. Scores are those of the new weights on Transformers, whatever was cached."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams, _custom_ops

import patchclamp as pc
from patchclamp import proving
from patchclamp.engines.vllm import sync_engine
from patchclamp.engines.vllm.compat.clients import shut_down
from patchclamp.engines.vllm.compat.configuration import surroundings
from patchclamp.errors import EngineError, MissingSource, NameTaken, ProgramError, RunError, UnknownName
from patchclamp.language.program import to_dict
from patchclamp.serve import llm_requests

from ..models import with_weights
from ..reference.hooks import PlainModel
from .conftest import TINY

DRAWN = np.random.default_rng(0)
WEIGHT = (DRAWN.standard_normal((1, TINY["hidden_size"])) / TINY["hidden_size"] ** 0.5).astype(np.float32)
SITE = pc.resid_post[1]
PROBE, SPOKEN = pc.Probe(WEIGHT, SITE, name="all"), pc.Probe(WEIGHT, SITE, name="spoken", tokens=pc.generated)
PROMPTS = [[7, *DRAWN.integers(5, 500, 80).tolist()] for _ in range(3)]
VECTOR = 30 * DRAWN.standard_normal(TINY["hidden_size"]).astype(np.float32)
STEER = pc.Add(VECTOR, at=SITE, tokens=pc.prompt[40])
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "block_size": 32,
           "kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """The shape of `tiny`, with other weights."""
    return with_weights(tmp_path_factory.mktemp("trained"), "8b", 3, seed=1, **TINY)


@pytest.fixture(scope="module")
def plain_models(tiny, trained) -> dict[str, PlainModel]:
    return {folder: PlainModel(folder) for folder in (tiny, trained)}


def opened(folder: str, separate: bool = False, **ours) -> LLM:
    with surroundings(separate):
        return LLM(folder, **OPTIONS, additional_config={"patchclamp": ours})


@pytest.fixture(scope="module")
def _loadable() -> Iterator[None]:
    """Weights that a model's `load_weights` can write, as on a GPU: oneDNN's copies of them take no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "_supports_onednn", False)
        yield


@pytest.fixture(scope="module")
def llm(_loadable, tiny) -> Iterator[LLM]:
    made = opened(tiny, probes=[pc.Probe(WEIGHT, SITE, name="always")])
    yield made
    shut_down(made.llm_engine, alone=len(sync_engine.alive) < 2)


@pytest.fixture
def proofs(monkeypatch) -> list[pc.LM]:
    """The models that were proved since."""
    proved, prove = [], proving.prove
    monkeypatch.setattr(proving, "prove", lambda lm: proved.append(lm) or prove(lm))
    return proved


def model_of(llm: LLM) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def load(llm: LLM, folder: str) -> None:
    """As TRL does: parameter by parameter, on the model itself."""
    from transformers import AutoModelForCausalLM

    for name, parameter in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters():
        model_of(llm).load_weights([(name, parameter.data)])


def reload(llm: LLM, folder: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def copy(llm: LLM, folder: str) -> None:
    """By a function of the caller's, in the workers."""
    from transformers import AutoModelForCausalLM

    new = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm.apply_model(lambda model: model.load_weights(new.named_parameters()))


def asked(program: object = None, tokens: int = 6, **options) -> SamplingParams:
    extra = None if program is None else {"patchclamp": program}
    return SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra, **{"temperature": 0.0, **options})


def generate(llm: LLM, params: SamplingParams) -> list:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)


def check(plain: PlainModel, outputs: list, *names: str) -> None:
    """Compare scores with the plain model's, at the tokens that they are of, and the tokens with its likeliest."""
    for output in outputs:
        [completion] = output.outputs
        ids = [*output.prompt_token_ids, *completion.token_ids]
        rows = plain.read(ids[:-1], "resid_post", 1).numpy()
        with torch.no_grad():
            logits = plain.net(torch.tensor([ids[:-1]])).logits[0]
        assert logits[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist() == list(completion.token_ids)
        run = completion.patchclamp
        for name in names:
            expected = (rows @ WEIGHT.T)[run.probe_positions(name)]
            np.testing.assert_allclose(run.probes[name], expected, atol=1e-4, rtol=1e-4)


# -- programs


def test_a_program_comes_back_as_a_run(llm, tiny, plain_models, proofs):
    """As a `Program`, as its dictionary, and as JSON; an edit changes what `pc.LM` of the same LLM says it does."""
    program = pc.Program.of((), [PROBE, SITE @ pc.prompt[-1]])
    for given in (program, to_dict(program), json.dumps(to_dict(program))):
        outputs = generate(llm, asked(given, logprobs=0))
        check(plain_models[tiny], outputs, "all", "always")
        run = outputs[0].outputs[0].patchclamp
        np.testing.assert_allclose(run[SITE] @ torch.tensor(WEIGHT).T, run.probes["all"][80:81], atol=1e-5)
        assert run.logprobs == [each[token].logprob for each, token in zip(
            outputs[0].outputs[0].logprobs, run.token_ids, strict=True)]  # fmt: skip
    everywhere = pc.Add(VECTOR, at=SITE)
    edited = generate(llm, asked(pc.Program.of(everywhere, [PROBE])))
    lm = pc.LM(llm)
    own = lm.run(PROMPTS, max_tokens=6, edits=everywhere, capture=[PROBE], sampling={"ignore_eos": True})
    for output, run, before in zip(edited, own, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == run.token_ids != list(before.outputs[0].token_ids)
        np.testing.assert_allclose(output.outputs[0].patchclamp.probes["all"], run.probes["all"], atol=1e-5)
    assert len(proofs) <= 1  # proved once at most, or read from the cache


@pytest.mark.usefixtures("_loadable")
def test_an_engine_of_our_own_follows_its_weights_too(tiny, trained, plain_models):
    """Weights that code past `pc.LM` loads, or may have: later programs are of the new model, and do not fail."""
    from transformers import AutoModelForCausalLM

    with pc.LM(tiny, engine="vllm", prove=False, **OPTIONS) as lm:
        for folder in (tiny, trained):
            core = lm.engine._engine.engine_core.engine_core
            net = core.model_executor.driver_worker.model_runner.model
            if folder == trained:
                new = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                net.load_weights((name, parameter.data) for name, parameter in new.named_parameters())
                lm.engine._call(lambda: lm.engine._engine.collective_rpc(lambda worker: None)).result()
            for _ in range(2):  # the second time with a warm cache
                runs = lm.run(PROMPTS, max_tokens=3, capture=[PROBE], sampling={"ignore_eos": True})
                for prompt, run in zip(PROMPTS, runs, strict=True):
                    rows = plain_models[folder].read([*prompt, *run.token_ids[:-1]], "resid_post", 1).numpy()
                    expected = (rows @ WEIGHT.T)[run.probe_positions("all")]
                    np.testing.assert_allclose(run.probes["all"], expected, atol=1e-4, rtol=1e-4)


def test_plain_requests_have_the_scores_of_the_engines_own_probes(llm, tiny, plain_models):
    for _ in range(2):  # the second time from the cache
        outputs = generate(llm, asked())
        check(plain_models[tiny], outputs, "always")
    assert [output.num_cached_tokens for output in outputs] == [64] * 3
    assert all(output.kv_transfer_params is None for output in outputs)
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, asked(n=2, temperature=1.0, seed=0), use_tqdm=False)
    first, second = (each.patchclamp.probes["always"] for each in output.outputs)
    np.testing.assert_allclose(first[:81], second[:81], atol=1e-5)
    assert not np.allclose(first[81:], second[81:])


def test_the_callers_requests_wait_while_an_lm_runs(llm):
    expected = [list(output.outputs[0].token_ids) for output in generate(llm, asked())]
    engine, lm = llm.llm_engine, pc.LM(llm)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"theirs {i}", {"prompt_token_ids": prompt}, asked())
    runs = lm.run(PROMPTS, max_tokens=6, sampling={"ignore_eos": True})
    assert [run.token_ids for run in runs] == expected
    found = {}
    while engine.has_unfinished_requests():
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished}
    assert found == {f"theirs {i}": tokens for i, tokens in enumerate(expected)}


@pytest.mark.parametrize(
    ("params", "error", "path"),
    [
        ({"n": 2, "temperature": 1.0, "extra_args": {"patchclamp": pc.Program.of((), SITE)}}, ProgramError, "n"),
        ({"extra_args": {"patchclamp": "{"}}, ProgramError, "extra_args.patchclamp"),
        ({"extra_args": {"patchclamp": {"edit": []}}}, UnknownName, "extra_args.patchclamp.edit"),
        ({"extra_args": {"patchclamp": 5}}, ProgramError, "extra_args.patchclamp"),
        ({"extra_args": {"patchclamp": b'{"edits": []}'}}, ProgramError, "extra_args.patchclamp"),
        ({"extra_args": {"patchclmp": {}}}, UnknownName, "extra_args.patchclmp"),
        ({"extra_args": {"patchclamp": pc.Program.of(pc.Zero(pc.resid_post[9]))}}, pc.UnsupportedSite,
         "extra_args.patchclamp.edits[0].at"),
        ({"extra_args": {"patchclamp": pc.Program.of((), pc.Probe(-WEIGHT, SITE, name="always"))}}, ProgramError,
         "extra_args.patchclamp.capture[0].name"),
    ],
)  # fmt: skip
def test_wrong_programs_are_refused_before_the_run(llm, params, error, path):
    with pytest.raises(error) as raised:
        generate(llm, SamplingParams(max_tokens=2, **params))
    assert raised.value.path == path
    assert [len(output.outputs[0].token_ids) for output in generate(llm, asked())] == [6] * 3  # it goes on


def test_a_failed_program_has_no_text(llm):
    """An edit that is not finite: the completion is empty, and reading its run raises the error."""
    outputs = generate(llm, asked(pc.Program.of([pc.Scale(1e30, SITE), pc.Scale(1e30, SITE)])))
    for output in outputs:
        [completion] = output.outputs
        assert (list(completion.token_ids), completion.text, completion.finish_reason) == ([], "", "error")
        with pytest.raises(RunError):
            _ = completion.patchclamp.token_ids


BROKEN = pc.Program.of([pc.Scale(1e30, SITE), pc.Scale(1e30, SITE)])


@pytest.mark.parametrize("programs", [(BROKEN, BROKEN), (None, BROKEN), (BROKEN, None)], ids=["both", "new", "old"])
def test_the_id_of_an_unfinished_request_is_refused(llm, monkeypatch, programs):
    """Of a request with a program, or for one; without any, as in stock vLLM. Its id is free again after its end, and
    after it was aborted beside another."""
    monkeypatch.setattr(llm_requests, "monitors_of_config", lambda config: ())  # else every request has a run
    engine, [expected, *_] = llm.llm_engine, generate(llm, asked())

    def ended(*asked_for: tuple[str, object]) -> list:
        for name, program in asked_for:
            engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, asked(program))
        found = []
        while engine.has_unfinished_requests():
            found += [(each.request_id, each.outputs[0].finish_reason) for each in engine.step() if each.finished]
        return found

    reason = {None: "length", BROKEN: "error"}
    with pytest.raises(NameTaken) as raised:
        ended(("same", programs[0]), ("same", programs[1]))
    assert raised.value.path == "request_id"
    assert ended() == [("same", reason[programs[0]])]
    assert ended(("same", programs[1])) == [("same", reason[programs[1]])]
    assert ended(("same", None), ("same", None)) == [("same", "length")] * 2
    for name in ("same", "other"):
        engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, asked(programs[0]))
    engine.abort_request(["same"])
    assert sorted(ended(("same", programs[1]))) == [("other", reason[programs[0]]), ("same", reason[programs[1]])]
    assert engine.patchclamp._readers.total() == 0
    assert list(generate(llm, asked())[0].outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def test_log_probabilities_beside_a_program_are_in_its_run(llm):
    """Also the likeliest ones, as `pc.LM` of the same LLM reads them; not those of a program that failed."""
    program = pc.Program.of(pc.Add(VECTOR, at=SITE))
    outputs = generate(llm, asked(program, logprobs=2, prompt_logprobs=3))
    lm = pc.LM(llm)
    own = lm.run(
        PROMPTS, max_tokens=6, edits=program.edits, logprobs=2, prompt_logprobs=3, sampling={"ignore_eos": True}
    )
    plain = lm.run(PROMPTS, max_tokens=1, prompt_logprobs=True)
    for output, expected, without in zip(outputs, own, plain, strict=True):
        run = output.outputs[0].patchclamp
        np.testing.assert_allclose(run.prompt_logprobs, expected.prompt_logprobs, atol=1e-5)
        assert np.nanmax(np.abs(np.subtract(run.prompt_logprobs, without.prompt_logprobs))) > 0.1
        for ours, theirs in ((run.top_logprobs, expected.top_logprobs),
                             (run.prompt_top_logprobs, expected.prompt_top_logprobs)):  # fmt: skip
            for row, wanted in zip(ours, theirs, strict=True):
                assert row.keys() == wanted.keys()
                np.testing.assert_allclose(list(row.values()), list(wanted.values()), atol=1e-5)
    [failed] = llm.generate({"prompt_token_ids": PROMPTS[0]}, asked(BROKEN, prompt_logprobs=1), use_tqdm=False)
    assert failed.prompt_logprobs is None
    with pytest.raises(ProgramError):
        _ = lm.run(PROMPTS[0], max_tokens=1).prompt_top_logprobs


@pytest.mark.slow  # an engine of its own
def test_prompts_are_not_read_with_adapters(tiny):
    """vLLM would give a prompt's rows the adapters of other rows. Whoever carries a program there is refused."""
    with surroundings(False):
        own = LLM(tiny, **OPTIONS, enable_lora=True, additional_config={"patchclamp": {}})
    try:
        program = pc.Program.of(pc.Add(VECTOR, at=SITE))
        refused, steered = generate(own, asked(program, prompt_logprobs=1)), generate(own, asked(program, logprobs=0))
        for output in refused:
            with pytest.raises(ProgramError) as raised:
                _ = output.outputs[0].patchclamp.logprobs
            assert raised.value.path == "prompt_logprobs"
        assert all(len(output.outputs[0].patchclamp.logprobs) == 6 for output in steered)
    finally:
        shut_down(own.llm_engine, alone=len(sync_engine.alive) < 2)


def test_programs_name_what_is_in_the_bank_of_the_llm(llm):
    """Of any `pc.LM` of it; an entry that is gone is refused before the run."""
    pc.LM(llm).bank["d"] = VECTOR
    pc.LM(llm).bank["steer"] = [pc.Add("d", at=SITE)]
    try:
        found = [list(output.outputs[0].token_ids) for output in generate(llm, asked(pc.Program.of(pc.Use("steer"))))]
    finally:
        pc.LM(llm).bank.clear()
    assert found == [
        list(each.outputs[0].token_ids) for each in generate(llm, asked(pc.Program.of(pc.Add(VECTOR, SITE))))
    ]
    assert found != [list(each.outputs[0].token_ids) for each in generate(llm, asked())]
    with pytest.raises(MissingSource) as raised:
        generate(llm, asked(pc.Program.of(pc.Use("steer"))))
    assert raised.value.path == "extra_args.patchclamp.edits[0].name"


def test_an_llm_without_patchclamp_is_refused(llm):
    class Without:
        llm_engine = type("Engine", (), {"vllm_config": type("Config", (), {"additional_config": {}})})

    with pytest.raises(EngineError) as raised:
        pc.LM(Without())
    assert raised.value.path == "model"
    with pytest.raises(EngineError) as raised:
        pc.LM(llm, dtype="float32")
    assert raised.value.path == "dtype"


# -- weights


@pytest.mark.parametrize("update", [load, reload, copy])
def test_new_weights_are_used_by_everything(llm, tiny, trained, plain_models, proofs, update):
    """The cache is warm with the old weights, edited and not. Then scores, tokens and lenses are the new weights', cold
    and from a cache that is warm again; sites were proved again once, before the next program."""
    read, lens = (
        asked(pc.Program.of((), [SPOKEN])),
        pc.Program.of((), [pc.Lens(pc.resid_post[2], pc.prompt[-1], top=3)]),
    )
    for params in (asked(), read, asked(pc.Program.of(STEER))):
        generate(llm, params)
    for folder in (trained, tiny):
        update(llm, folder)
        proofs.clear()
        for warm in (False, True):
            plain_outputs, outputs = generate(llm, asked()), generate(llm, read)
            check(plain_models[folder], plain_outputs, "always")
            check(plain_models[folder], outputs, "spoken", "always")
            assert [output.num_cached_tokens for output in plain_outputs] == [64 if warm else 0] * 3
            assert [output.num_cached_tokens for output in outputs] == [64] * 3
        assert len(proofs) == 1
        [output, *_] = generate(llm, asked(lens, tokens=1))
        [likeliest] = output.outputs[0].patchclamp.lens[pc.resid_post[2]].ids
        expected = plain_models[folder].logits(PROMPTS[0])
        assert likeliest.tolist() == expected.topk(3).indices.tolist()
        steered = pc.LM(llm).run(PROMPTS[0], max_tokens=1, edits=STEER, capture=[pc.logits])
        row = plain_models[folder].read(PROMPTS[0], "resid_post", 1)[40] + torch.tensor(VECTOR)
        edited = plain_models[folder].patched_logits(PROMPTS[0], "resid_post", 1, 40, row)
        np.testing.assert_allclose(steered[pc.logits][0], edited, atol=1e-3)
        assert not np.allclose(edited, expected, atol=1e-2)
    assert len(proofs) == 1


def test_a_run_under_way_does_not_outlive_its_weights(llm, tiny, trained, plain_models):
    """A program that began with the old weights fails; a plain request goes on; one that was only queued has the new
    weights' tokens, and its blocks are found by the next."""
    engine, program = llm.llm_engine, pc.Program.of((), [PROBE])
    prompts = {"program": PROMPTS[0], "plain": PROMPTS[1]}
    generate(llm, asked())  # a warm cache
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, asked(program if name == "program" else None, tokens=12))
    for _ in range(3):
        engine.step()
    engine.add_request("queued", {"prompt_token_ids": PROMPTS[2]}, asked())
    reload(llm, trained)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    [failed] = ended["program"].outputs
    assert failed.finish_reason == "error"
    assert isinstance(failed.patchclamp.error, RunError)
    assert "weights" in failed.patchclamp.error.message
    assert len(ended["plain"].outputs[0].token_ids) == 12
    check(plain_models[trained], [ended["queued"]], "always")
    assert ended["queued"].num_cached_tokens == 0
    outputs = generate(llm, asked())
    check(plain_models[trained], outputs, "always")
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 64]  # the plain request began with old weights
    reload(llm, tiny)


def test_calls_that_keep_the_weights_prove_nothing(llm, proofs):
    program = pc.Program.of((), [PROBE])
    generate(llm, asked(program))
    generate(llm, asked())
    before = pc.LM(llm).engine.weights
    proofs.clear()
    llm.collective_rpc("check_health")
    generate(llm, asked(program))
    assert [output.num_cached_tokens for output in generate(llm, asked())] == [64] * 3
    assert pc.LM(llm).engine.weights == before
    assert proofs == []


@pytest.mark.slow
def test_weights_in_another_process(tiny, trained, plain_models, proofs):
    llm, read = opened(tiny, separate=True), asked(pc.Program.of((), [SPOKEN]))
    try:
        for folder in (tiny, trained):
            for cached in (0, 64):
                outputs = generate(llm, read)
                check(plain_models[folder], outputs, "spoken")
                assert [output.num_cached_tokens for output in outputs] == [cached] * 3
            if folder == tiny:
                proofs.clear()
                reload(llm, trained)
        assert len(proofs) == 1
    finally:
        llm.llm_engine.engine_core.shutdown()
