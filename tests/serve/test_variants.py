"""A program that is kept is a model: clients that know nothing of programs run it by its name."""

from __future__ import annotations

import msgspec
import openai
import pytest

import patchclamp as pc

from .test_openai import PROMPT, STEERED, complete, program


def ask(server, model, extra=None, key="one-key", **options):
    return server.openai(key).completions.create(
        model=model, prompt=PROMPT, max_tokens=6, temperature=0, extra_body=extra, **options
    )


def test_a_variant_is_its_program(server, local, calm):
    run = local.run(PROMPT, max_tokens=6, edits=[STEERED], logprobs=True)
    assert calm == f"{server.model}:calm"
    response = ask(server, calm, logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == run.logprobs
    assert complete(server, logprobs=1).choices[0].logprobs.token_logprobs != run.logprobs
    assert response.model == calm
    ours = response.model_extra["patchclamp"]
    assert ours["fingerprint"] == run.program.fingerprint
    used = {"type": "use", "name": "calm", "scale": 1.0, "tokens": None}
    assert ours["variant"] == {"name": "calm", "edits": 1, "program": [used]}
    chunks = list(ask(server, calm, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == run.text
    assert {chunk.model for chunk in chunks} == {calm}


def test_likelihoods_through_a_variant(server, local, calm):
    """As lm-evaluation-harness asks for them (`local-completions`), and by vLLM's own field."""
    ids = local.tokens(PROMPT)
    run = local.run(ids, max_tokens=1, edits=[STEERED], prompt_logprobs=1)
    assert run.prompt_logprobs[1:] != local.run(ids, max_tokens=1, prompt_logprobs=1).prompt_logprobs[1:]
    for _ in range(2):  # the second time the prefix is cached
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0, "seed": 1234}
        echoed = server.openai().completions.create(model=calm, **asked, logprobs=1, echo=True).choices[0].logprobs
        assert echoed.token_logprobs[0] is None
        assert echoed.token_logprobs[1 : len(ids)] == pytest.approx(run.prompt_logprobs[1:], abs=1e-5)
        told = server.openai().completions.create(model=calm, **asked, extra_body={"prompt_logprobs": 1}).choices[0]
        found = [of[str(token)]["logprob"] for of, token in zip(told.prompt_logprobs[1:], ids[1:], strict=True)]
        assert found == pytest.approx(run.prompt_logprobs[1:], abs=1e-5)
    assert local.loglikelihood(ids[:3], ids[3:], edits=[STEERED]) == pytest.approx(
        sum(run.prompt_logprobs[3:]), abs=1e-4
    )


def test_a_mix_of_programs_is_a_model(server, local, calm):
    added = [
        msgspec.structs.replace(STEERED, scale=STEERED.scale * factor, tokens=pc.generated[1:9]) for factor in (0.5, -2)
    ]
    run = local.run(PROMPT, max_tokens=6, edits=added, logprobs=True)
    mix = "0.5 calm - 2 calm @ generated[1:9]"
    response = ask(server, f"{server.model}:{mix}", logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == pytest.approx(run.logprobs, abs=1e-5)
    assert response.model == f"{server.model}:{mix}"
    told = response.model_extra["patchclamp"]["variant"]
    assert (told["name"], told["edits"]) == (mix, 2)
    assert [(use["name"], use["scale"], use["tokens"]) for use in told["program"]] == [
        ("calm", 0.5, "generated[1:9]"), ("calm", -2.0, "generated[1:9]")
    ]  # fmt: skip
    chunks = list(ask(server, f"{server.model}:{mix}", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == run.text
    with pytest.raises(openai.NotFoundError, match="'angry'"):
        ask(server, f"{server.model}:0.5 calm + angry")
    with pytest.raises(openai.BadRequestError, match=r"expected \+, - or @ SELECTION, got '2 calm' at character 9"):
        ask(server, f"{server.model}:0.5 calm 2 calm")
    with pytest.raises(openai.NotFoundError, match="program 'calm'"):
        ask(server, f"{server.model}:2 calm", key="another-key")


def test_a_variant_in_a_chat(server, local, calm):
    messages = [{"role": "user", "content": "Name a colour."}]
    run = local.run(messages=messages, max_tokens=6, edits=[STEERED])
    assert run.text != local.run(messages=messages, max_tokens=6).text
    options = {"model": calm, "messages": messages, "max_tokens": 6, "temperature": 0}
    response = server.openai().chat.completions.create(**options)
    assert response.choices[0].message.content == run.text
    assert response.model == calm
    chunks = list(server.openai().chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == run.text
    assert {chunk.model for chunk in chunks} == {calm}


def test_a_variants_edits_come_first(server, local, calm):
    more = pc.Scale(0.5, at=pc.resid_post[3])
    first, last = (
        local.run(PROMPT, max_tokens=6, edits=edits, logprobs=True) for edits in ([STEERED, more], [more, STEERED])
    )
    response = ask(server, calm, program([more], [pc.embed @ pc.prompt[-1]]), logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == first.logprobs != last.logprobs
    fuzzed = local.run(PROMPT, max_tokens=6, edits=[STEERED, pc.Noise(0.5, at=pc.embed, relative=True, seed=3)])
    response = ask(server, calm, {"vllm_xargs": {"fuzz_strength": 0.5, "fuzz_seed": 3}})
    assert response.choices[0].text == fuzzed.text
    with pytest.raises(openai.BadRequestError, match=r"edits\[1\].*first edit comes"):
        ask(server, calm, program([pc.Add([1.0], at=pc.embed)]))


def test_models_lists_the_variants_of_their_owner_alone(server, calm):
    mine, others = (server.openai(key).models.list().data for key in ("one-key", "another-key"))
    assert [card.id for card in mine] == [server.model, calm]
    assert mine[1].model_extra["parent"] == server.model
    assert mine[1].model_extra["max_model_len"] == mine[0].model_extra["max_model_len"] == 512
    assert [card.id for card in others] == [server.model]
    with pytest.raises(openai.NotFoundError, match="program 'calm'"):
        ask(server, calm, key="another-key")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_variant_is_not_found_with_near_names(server, calm, stream):
    with pytest.raises(openai.NotFoundError, match=r"clam' does not exist.*did you mean 'calm'"):
        list(ask(server, f"{server.model}:clam", stream=stream))
    with pytest.raises(openai.NotFoundError, match="The model `nobody:calm` does not exist"):
        list(ask(server, "nobody:calm", stream=stream))
