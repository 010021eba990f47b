"""Guarantee 7 and 9: bad input is a clear error before anything runs, and the engine then still serves."""

import gc
import threading

import numpy as np
import pytest
import torch

import patchclamp as pc

from .conftest import PROMPTS

D = 576
BAD = [
    (dict(capture=["resid_pots[3]"]), pc.UnknownName, "capture[0].at: no site 'resid_pots' (did you mean 'resid_post'"),
    (dict(capture=["resid_post[30]"]), pc.UnsupportedSite, "capture[0].at: resid_post[30]: this model has 30 layers (0 to 29)"),
    (dict(capture=["resid_post[8:40]"]), pc.UnsupportedSite, "this model has 30 layers"),
    (dict(capture=["embed[0]"]), pc.ProgramError, "capture[0].at: embed has no layers"),
    (dict(capture=["z[3, 1]"]), pc.UnsupportedSite, "z is not available on llama models; there are: embed"),
    (dict(capture=[pc.logits @ pc.prompt[0]]), pc.UnsupportedSite, "logits exist only where a token is sampled"),
    (dict(edits=[pc.Add([1.0, 2.0], at=pc.embed)]), pc.ShapeError, "edits[0].value: embed is 576 wide; the vector is [2]"),
    (dict(edits=[pc.Add(np.ones((3, D)), at=pc.embed, tokens=pc.prompt)]), pc.ShapeError, "has 5 positions; the vector has 3 rows"),
    (dict(edits=[pc.Replace(pc.From("gone"), at=pc.embed)]), pc.MissingSource, "edits[0].value: run gone is not here"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[5])]), pc.TokensError, "edits[0].tokens: prompt[5]: there is no position 5"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[-6])]), pc.TokensError, "the prompt has 5 tokens (0 to 4)"),
    (dict(edits=[pc.Zero(pc.embed, pc.every[7])]), pc.TokensError, "there is no position 7"),
    (dict(edits=[pc.Zero(pc.embed, pc.span("Paris"))]), pc.TokensError, "span(\"Paris\"): not in the prompt 'The capital of France is'"),
    (dict(edits=[pc.Zero(pc.embed, pc.span("a", 99))]), pc.TokensError, "numbered from 0"),
    (dict(edits=[pc.Zero(pc.embed, pc.generated)], max_tokens=1), pc.TokensError, "selects no position of this request"),
    (dict(edits=[pc.Zero(pc.embed, pc.prompt[3:3])]), pc.TokensError, "selects no position of this request"),
    (dict(edits=[pc.resid_post]), pc.ProgramError, "edits[0]: an edit is an op such as pc.Add"),
    (dict(edits=[[], []]), pc.ProgramError, "edits: 2 lists for 1 prompts"),
    (dict(max_tokens=0), pc.ProgramError, "max_tokens: at least one token must be generated"),
    (dict(max_tokens=600), pc.TokensError, "exceed max_model_len=512"),
    (dict(sampling={"temprature": 1}), pc.UnknownName, "sampling.temprature: no sampling parameter 'temprature' (did you mean 'temperature'"),
    (dict(sampling={"top_p": 3.0}), pc.ProgramError, "top_p"),
    (dict(score=[10**6]), pc.TokensError, "score: 1000000 is not a token id below 49152"),
]  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_bad_input_is_refused_before_it_runs(engines, engine):
    lm = engines.get(engine, "float32", **({} if engine == "vllm" else {"max_model_len": 512}))
    before = lm.run(PROMPTS[0], max_tokens=3)
    planned = lm.engine.status()["steps_planned"]
    for asked, error, text in BAD:
        with pytest.raises(error) as caught:
            lm.run(PROMPTS[0], **{"max_tokens": 2, **asked})
        assert text in str(caught.value)
    assert lm.engine.status()["steps_planned"] == planned
    after = lm.run(PROMPTS[0], max_tokens=3)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_sources_must_be_alive_and_hold_what_is_read(engines, engine):
    lm = engines.get(engine, "float32")
    run = lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[3] @ pc.prompt[1:3]])
    for value, text in (
        (pc.From(run), "did not capture resid_post[3] at position 0 (it has 2, 1 to 2)"),
        (pc.From(run, pc.resid_post[4]), "did not capture resid_post[4]"),
        (pc.From(run, pc.resid_post[3], pc.prompt[0]), "at position 0"),
    ):
        with pytest.raises(pc.MissingSource) as caught:
            lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Replace(value, at=pc.resid_post[3])])
        assert text in str(caught.value)
    with pytest.raises(pc.MissingSource, match=r"resid_pre\[0\] was not captured; this run has: .*resid_post\[3\]"):
        run["resid_pre[0]"]
    with pytest.raises(pc.ProgramError, match="takes one layer"):
        run[pc.resid_post]
    kept = pc.From(run)
    run.close()
    with pytest.raises(pc.MissingSource, match="was closed"):
        lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Replace(kept, at=pc.resid_post[3], tokens=pc.prompt[1:3])])


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_value_keeps_its_run_and_dropped_runs_leave_nothing(engines, engine):
    lm = engines.get(engine, "float32")
    gc.collect()
    before = lm.engine.status()["runs"]
    value = pc.From(lm.run(PROMPTS[0], max_tokens=1, capture=[pc.resid_post[3]]))
    gc.collect()
    plain = lm.run(PROMPTS[0], max_tokens=1)
    again = lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Replace(value, at=pc.resid_post[3])])
    assert again.logprobs == plain.logprobs
    assert lm.engine.status()["runs"] > before
    del value, again
    gc.collect()
    assert lm.engine.status()["runs"] == before


def test_many_threads_share_one_engine(engines):
    lm = engines.get("vllm", "float32")
    expected = {text: lm.run(text, max_tokens=4).token_ids for text in PROMPTS}
    wrong: list = []

    def client(number: int) -> None:
        text = PROMPTS[number % 3]
        at = pc.resid_post[number % 30]
        run = lm.run(text, max_tokens=4, capture=[at])
        edited = lm.run(text, max_tokens=4, edits=[pc.Replace(pc.From(run, at), at=at)])
        if not run.token_ids == edited.token_ids == expected[text] or len(run[at]) != len(run.prompt_token_ids) + 3:
            wrong.append(number)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_programs_more_than_fit_at_once_leave_the_tables_empty(engines):
    lm = engines.get("vllm", "float32")
    ids = lm.tokens(PROMPTS[0])
    edits = [[pc.Add(torch.randn(D), at=pc.resid_post[n % 30], tokens=pc.prompt[n % 5])] for n in range(100)]
    runs = lm.run([ids] * 100, max_tokens=1, edits=edits, score=[7042])
    assert len({run.scores[7042] for run in runs}) == 100
    gc.collect()
    lm.run(ids, max_tokens=1)
    status = lm.engine.status()
    assert (status["programs"], status["pinned"], status["vectors"], status["free_records"]) == (0, 0, 0, 1 << 18)


def test_a_program_that_does_not_fit_fails_alone(engines):
    lm = engines.get("vllm", "float32", max_records=64, bank_bytes=40 * D * 4)
    good = [pc.Add(torch.randn(D), at=pc.resid_post[3])]
    too_many_records = [pc.Zero(pc.resid_post), pc.Zero(pc.resid_mid), pc.Zero(pc.attn_out)]
    too_many_rows = [pc.Add(torch.randn(50, D), at=pc.resid_post[3], tokens=pc.prompt)]
    ids = lm.tokens(PROMPTS[1])[:10] * 5
    runs = lm.run([ids] * 4, max_tokens=1, edits=[good, too_many_records, too_many_rows, []])
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
        with pytest.raises(pc.UnknownName, match=f"no engine option '{option}' .did you mean '{meant}'"):
            pc.LM(str(smollm2), engine=engine, **{option: 1})
    with pytest.raises(pc.UnknownName, match="no engine 'vlm'"):
        pc.LM(str(smollm2), engine="vlm")


def test_configurations_that_break_a_guarantee_are_refused(smollm2):
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(pc.EngineError, match="patchclamp does not run with: speculative decoding"):
        pc.LM(str(smollm2), engine="vllm", enforce_eager=True, max_model_len=512, speculative_config=speculative)


def test_closing_one_engine_leaves_the_others_running(smollm2, engines):
    """Two engines share a process; vLLM's own shutdown would take down what both use."""
    lm = engines.get("vllm", "float32")
    expected = lm.run(PROMPTS[0], max_tokens=3).logprobs
    other = pc.LM(str(smollm2), engine="vllm", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
                  kv_cache_memory_bytes=1 << 26)  # fmt: skip
    run = other.run(PROMPTS[0], max_tokens=3, capture=[pc.embed])
    other.close()
    assert lm.run(PROMPTS[0], max_tokens=3).logprobs == expected == run.logprobs
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        other.run(PROMPTS[0], max_tokens=1)
    with pytest.raises(pc.EngineError, match="the engine is closed"):
        run[pc.embed]
