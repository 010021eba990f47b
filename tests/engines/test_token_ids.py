"""Selections by token id: of the prompt, and of generated text as it comes, however the request is run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import TOKENS, WIDTH
from .conftest import CHUNKED, PROMPTS
from .test_ops import V1

AT = pc.resid_post[3]
MODES = {
    "transformers": ("transformers", {}), "eager": ("vllm", {}), "compiled": ("vllm", {"compiled": True}),
    "chunks of 16": ("vllm", CHUNKED),
}  # fmt: skip
SAMPLING = {"ignore_eos": True}


def engine_of(narrow, mode: str) -> pc.LM:
    engine, options = MODES[mode]
    return narrow.get(engine, "float32", **options)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_some_tokens_are_edited_and_no_others(narrow, mode):
    """What the edit adds at its own site reaches no other row there, so that every row tells."""
    lm = engine_of(narrow, mode)
    plain = lm.run(list(PROMPTS), max_tokens=16, sampling=SAMPLING, capture=[AT], logprobs=True)
    often = [max(run.token_ids[:-1], key=run.token_ids[:-1].count) for run in plain]  # a token of each generated text
    asked = [
        lambda ids: pc.token(*ids), lambda ids: pc.generated & pc.token(*ids), lambda ids: pc.every - pc.token(*ids),
        lambda ids: pc.prompt[0] | pc.token(*ids), lambda ids: (pc.generated[0:7] - pc.token(ids[0])) | pc.token(ids[1]),
        lambda ids: pc.between(ids[1], ids[0]), lambda ids: pc.generated & pc.between(ids[0], ids[0] + 1),
        lambda ids: pc.every[2:] - pc.between(ids[0], ids[1]) - pc.token(ids[0]),
        lambda ids: pc.token(TOKENS - 1) | (pc.generated[2:] & pc.token(*range(0, TOKENS, 13), *ids)),
    ]  # fmt: skip
    cases = [(i, choose((often[i], run.prompt_token_ids[-1]))) for i, run in enumerate(plain) for choose in asked]
    edits = [[pc.Add(V1, AT, tokens, scale=0.02)] for _, tokens in cases]
    captures = [[pc.Capture(AT), pc.resid_post[7] @ tokens] for _, tokens in cases]
    edited = lm.run(
        [PROMPTS[i] for i, _ in cases], max_tokens=16, sampling=SAMPLING, edits=edits, capture=captures, logprobs=True
    )
    v, acted = torch.from_numpy(0.02 * V1), 0
    for (i, tokens), run in zip(cases, edited, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(run.token_ids, plain[i].token_ids, strict=True)) if a != b), 16)
        known = len(run.prompt_token_ids) + same  # positions of the same tokens
        chosen = run.select(tokens)
        assert run.positions(pc.resid_post[7]) == chosen.tolist()
        assert len(run[pc.resid_post[7]]) == len(chosen)
        change = run[AT] - plain[i][AT]
        hit = np.isin(np.arange(len(change)), chosen)[:known]
        expected = v * torch.from_numpy(hit)[:, None]
        noise = 2e-4 + 1e-6 * plain[i][AT][:known].abs().amax(1, keepdim=True)
        assert ((change[:known] - expected).abs() <= noise).all(), tokens
        acted += int(hit[len(run.prompt_token_ids) :].sum())
    assert acted > 10  # of generated tokens


@pytest.mark.parametrize("mode", ["transformers", "eager", "chunks of 16"])
def test_eight_pairs_of_delimiters_are_the_most(narrow, mode):
    """Seven also select the tokens outside, which takes all bits of a row: each edit acts at its own tokens."""
    lm, asked = engine_of(narrow, mode), {"max_tokens": 16, "temperature": 1.0, "sampling": {**SAMPLING, "seed": 4}}
    plain, v, acted = lm.run(PROMPTS[1], **asked), torch.from_numpy(0.02 * V1), []
    pairs = list(itertools.permutations(dict.fromkeys(plain.token_ids), 2))[:8]
    inside = [pc.generated & pc.between(*pair) for pair in pairs]
    selected = [pc.generated - pc.between(*pair) for pair in pairs[:7]] + inside[7:]

    def program(selections):
        return [op for i, tokens in enumerate(selections) for op in (
            pc.Capture(pc.resid_post[i]), pc.Add(V1, pc.resid_post[i], tokens, scale=0.02), pc.Capture(pc.resid_post[i])
        )]  # fmt: skip

    for selections in (selected, inside):
        run = lm.run(PROMPTS[1], edits=program(selections), **asked)
        for i, tokens in enumerate(selections):
            before, after = run[f"edits[{3 * i}]"], run[f"edits[{3 * i + 2}]"]
            hit = torch.from_numpy(np.isin(np.arange(len(before)), run.select(tokens)))[:, None]
            assert torch.allclose(after - before, v * hit, atol=1e-5, rtol=0), tokens
            assert torch.equal(after[~hit[:, 0]], before[~hit[:, 0]])
            acted.append(int(hit.sum()))
    assert len(set(acted)) > 2
    assert all(acted[:8])
    onwards = pc.When(pc.Probe(V1, AT, name="p") > 0, [pc.Zero(pc.resid_post[5])], scope="onwards")
    outside, ninth = (pc.Zero(AT, tokens) for tokens in (pc.generated - pc.between(*pairs[7]), pc.between(3, 4)))
    for selections, more, field, most in (
        (selected, outside, "tokens", "than 23 bits"), (inside, ninth, "tokens", "at most 8 "), (inside, onwards, "scope", "at most 8 "),
    ):  # fmt: skip
        with pytest.raises(pc.ProgramError, match=most) as caught:
            lm.run(PROMPTS[1], edits=[*(pc.Zero(AT, tokens) for tokens in selections), more], **asked)
        assert caught.value.path == f"edits[8].{field}"


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_op_over_a_whole_row_and_one_at_logits(narrow, engine):
    """Whichever token follows a given one: its logits are those that the op makes of what was there."""
    lm = narrow.get(engine, "float32")
    plain = lm.run(PROMPTS[1], max_tokens=12, sampling=SAMPLING, logprobs=True)
    token, first = plain.token_ids[3], len(plain.prompt_token_ids)
    at = pc.generated & pc.token(token)
    run = lm.run(PROMPTS[1], max_tokens=12, sampling=SAMPLING, capture=[AT], edits=[
        pc.Capture(pc.logits), pc.Scale(0.5, pc.logits, at), pc.Capture(pc.logits),
        pc.Ablate(V1, AT, at), pc.Noise(0.1, AT, pc.generated - pc.token(token), seed=4)], logprobs=True)  # fmt: skip
    chosen = run.select(at).tolist()
    assert chosen
    before, after = run["edits[0]"], run["edits[2]"]
    assert run.positions("edits[0]") == list(range(first - 1, first + 11))
    for position, one, two in zip(run.positions("edits[0]"), before, after, strict=True):
        assert torch.equal(two, 0.5 * one if position in chosen else one)
    unit = torch.from_numpy(V1 / np.linalg.norm(V1))
    for position, row in zip(run.positions(AT), run[AT], strict=True):
        assert (abs(float(row @ unit)) < 1e-3) == (position in chosen) or position < first


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_every_token_but_some_at_logits(narrow, engine):
    """`every` there is where a token is sampled, within a joined selection as alone."""
    lm = narrow.get(engine, "float32")
    plain = lm.run(PROMPTS[1], max_tokens=12, sampling=SAMPLING, logprobs=True)
    first = len(plain.prompt_token_ids) - 1
    others = pc.every - pc.token(plain.token_ids[3], plain.prompt_token_ids[1])
    run = lm.run(PROMPTS[1], max_tokens=12, sampling=SAMPLING, capture=[pc.logits @ others], edits=[
        pc.Capture(pc.logits), pc.Scale(0.5, pc.logits, others), pc.Capture(pc.logits),
        pc.Zero(pc.logits, pc.every & pc.token(*plain.prompt_token_ids[:2]))], logprobs=True)  # fmt: skip
    chosen = [position for position in run.select(others).tolist() if position >= first]
    assert run.positions("capture[0]") == chosen
    assert 0 < len(chosen) < 12
    for position, one, two in zip(run.positions("edits[0]"), run["edits[0]"], run["edits[2]"], strict=True):
        assert torch.equal(two, 0.5 * one if position in chosen else one)
    with pytest.raises(pc.UnsupportedSite, match="logits"):
        lm.run(PROMPTS[1], edits=[pc.Zero(pc.logits, pc.token(plain.prompt_token_ids[1]))], logprobs=True)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_captures_at_their_places_keep_to_their_tokens(narrow, engine):
    """Of two captures that have a position the later one counts, where it asks for that token."""
    lm = narrow.get(engine, "float32")
    token = lm.run(PROMPTS[0], max_tokens=12, sampling=SAMPLING, logprobs=True).token_ids[2]
    at = pc.token(token)
    run = lm.run(PROMPTS[0], max_tokens=12, sampling=SAMPLING, edits=[
        pc.Capture(AT, pc.generated), pc.Add(V1, AT, scale=0.01), pc.Capture(AT, at)], logprobs=True)  # fmt: skip
    before, after = run["edits[0]"], run["edits[2]"]
    generated, chosen = np.arange(len(run.prompt_token_ids), len(run.prompt_token_ids) + 11), run.select(at)
    assert len(before) == 11
    assert len(after) == len(chosen) > 0
    merged = dict(zip(run.positions(AT), run[AT], strict=True))
    assert sorted(merged) == sorted({*generated.tolist(), *chosen.tolist()})
    for i, position in enumerate(generated.tolist()):
        expected = after[chosen.tolist().index(position)] if position in chosen else before[i]
        assert torch.equal(merged[position], expected)


def test_patching_by_token_and_what_is_refused(narrow):
    lm = narrow.get("vllm", "float32")
    clean = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, capture=[AT], logprobs=True)
    token = clean.token_ids[2]
    patched = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, capture=[AT], edits=[
        pc.Zero(AT, pc.token(token)), pc.Replace(pc.From(clean), AT, pc.token(token))], logprobs=True)  # fmt: skip
    assert (patched.token_ids, patched.logprobs) == (clean.token_ids, clean.logprobs)
    without = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, edits=[pc.Zero(AT, pc.token(token))], logprobs=True)
    assert without.logprobs != clean.logprobs  # it was there to be zeroed
    for tokens in (pc.generated - pc.token(TOKENS), pc.between(5, TOKENS)):
        with pytest.raises(pc.TokensError, match=r"edits\[0\].tokens: token id 8192"):
            lm.run(PROMPTS[0], edits=[pc.Zero(AT, tokens)], logprobs=True)
    twice = lm.run(
        PROMPTS[0], max_tokens=8, capture=[AT], edits=[pc.Capture(AT, pc.token(token)), pc.Add(V1, AT)], logprobs=True
    )
    with pytest.raises(pc.MissingSource, match=r"captured resid_.* 2 times, one of them by token id"):
        lm.run(PROMPTS[0], edits=[pc.Replace(pc.From(twice), AT, pc.prompt[-1])], logprobs=True)
    told = lm.run("A span here", max_tokens=4, capture=[AT @ (pc.span("span") | pc.token(token))], logprobs=True)
    assert len(told[AT]) >= 1
    two = np.stack([V1, V1])
    with pytest.raises(pc.ShapeError, match=r"edits\[0\].value: .*generated & token"):
        lm.run(PROMPTS[0], max_tokens=8, edits=[pc.Add(two, AT, pc.generated & pc.token(token))], logprobs=True)
    with pytest.raises(pc.TokensError, match="selects no positions"):
        lm.run(PROMPTS[0], max_tokens=1, edits=[pc.Zero(AT, pc.token(TOKENS - 1))], logprobs=True)
    known = lm.run(PROMPTS[0], max_tokens=1, capture=[AT], edits=[  # in the prompt, all is known
        pc.Add(two, AT, pc.token(*clean.prompt_token_ids[1:3]))], logprobs=True)  # fmt: skip
    assert torch.allclose(known[AT][1] - clean[AT][1], torch.from_numpy(V1), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_edits_that_never_acted_are_named(narrow, mode):
    """What a run says of its edits is what its rows say, before and after each; also where it ended early."""
    lm = engine_of(narrow, mode)
    plain = lm.run(PROMPTS[0], max_tokens=12, sampling=SAMPLING, logprobs=True)
    there, stop = plain.token_ids[2], plain.token_ids[5]
    asked = [
        pc.token(TOKENS - 1), pc.token(there), pc.generated & pc.token(TOKENS - 1), pc.generated - pc.token(there),
        pc.generated[8:], pc.generated[9], pc.every[15], pc.prompt[0] | pc.token(TOKENS - 1), pc.prompt[-1],
        pc.generated[8:] | (pc.generated & pc.token(there)), pc.every[14:] - pc.token(TOKENS - 1),
    ]  # fmt: skip
    ops = [[pc.Capture(AT), pc.Add(V1, AT, tokens, scale=1e-3), pc.Capture(AT)] for tokens in asked]
    idle = []
    for sampling in (SAMPLING, {"stop_token_ids": [stop]}):
        run = lm.run(
            PROMPTS[0], max_tokens=12, sampling=sampling, edits=[op for many in ops for op in many], logprobs=True
        )
        paths = [f"edits[{n}]" for n in range(3 * len(ops))]
        around = zip(paths[::3], paths[1::3], paths[2::3], strict=True)
        idle.append([path for before, path, after in around if torch.equal(run[before], run[after])])
        assert run.idle_edits == idle[-1]
    assert len(run.token_ids) < 12
    assert set(idle[0]) < set(idle[1]) < set(paths[1::3])
    assert plain.idle_edits == []


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_run_that_ended_early_is_read_as_far_as_it_went(narrow, engine):
    """Positions that never came, asked for beside tokens by id."""
    lm = narrow.get(engine, "float32")
    plain = lm.run(PROMPTS[0], max_tokens=8, sampling=SAMPLING, capture=[AT], logprobs=True)
    last, p = plain.token_ids[2], len(plain.prompt_token_ids)
    came = p + plain.token_ids.index(last)
    never, half = pc.generated[5], pc.token(*plain.prompt_token_ids[:2])
    for tokens, expected in (
        (never | half, [0, 1]), (never | pc.token(last), []), (pc.every - (half | never), list(range(2, came))),
        (never | pc.prompt[3], [3]), (pc.generated[6] | pc.generated[5] | half, [0, 1]),
    ):  # fmt: skip
        run = lm.run(
            PROMPTS[0], max_tokens=8, capture=[AT @ tokens], sampling={"stop_token_ids": [last]}, logprobs=True
        )
        assert len(run.token_ids) == came - p + 1 < 4
        assert run.positions(AT) == expected, tokens
        assert torch.allclose(run[AT], plain[AT][expected], atol=1e-4), tokens


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_tokens_that_never_came_leave_empty_rows_of_the_right_shape(narrow, engine):
    lm, never = narrow.get(engine, "float32"), pc.token(TOKENS - 1)
    sites = [pc.z[5], pc.z[5, 3], pc.q[5, 1:3], pc.k[5], pc.neurons[5, 10:20], pc.neurons[5, 7], AT]
    run = lm.run(PROMPTS[0], max_tokens=3, sampling=SAMPLING, capture=[at @ never for at in sites], logprobs=True)
    assert [list(run[at].shape) for at in sites] == [
        [0, 9, 64], [0, 64], [0, 2, 64], [0, 3, 64], [0, 10], [0], [0, WIDTH],
    ]  # fmt: skip
    some = lm.run(PROMPTS[0], max_tokens=3, sampling=SAMPLING, capture=[pc.z[5] @ pc.prompt], logprobs=True)
    for at in (pc.z[5], pc.resid_post[3]):
        runs = [
            lm.run(PROMPTS[0], max_tokens=2, capture=[at @ (never | tokens)], logprobs=True)
            for tokens in (pc.prompt, pc.generated[9:])
        ]
        assert len(runs[1][at]) == 0
        mean = lm.bank.mean("never", runs, at)
        assert np.allclose(next(iter(mean.rows.values())).array(), runs[0][at].flatten(1).mean(0), atol=1e-6)
    assert some[pc.z[5]].shape[1:] == (9, 64)


@pytest.mark.parametrize("text", ["hello 🫠 world is great", "日本語の 🫠 text é"])
def test_a_character_of_several_tokens_is_selected_whole_wherever_it_is_asked_for(narrow, text):
    """As the tokenizer's own offsets say, of text and of token ids: in runs, chats, traces and studies."""
    lm = narrow.get("transformers", "float32")
    encoding = lm.tokenizer.inner(text, return_offsets_mapping=True)
    ids, pairs = encoding["input_ids"], encoding["offset_mapping"]
    assert len(ids) > len({begin for begin, _ in pairs})  # some characters have several
    words = text.split()
    expected = {}
    for word in words:
        begin = text.index(word)
        expected[word] = [i for i, (first, last) in enumerate(pairs) if first < begin + len(word) and last > begin]
    for word in words:
        for prompt in (text, ids):
            run = lm.run(prompt, max_tokens=1, capture=[AT @ pc.span(word)])
            assert run.positions(AT) == expected[word]
            with lm.trace(prompt) as trace:
                saved = trace.layers[3].output[pc.span(word)].save()
            assert len(saved) == len(expected[word])
            traced = pc.studies.causal_trace(lm, prompt=prompt, subject=word, answer=ids[-1], sites=["resid_post"],
                                             layers=1, positions=-1, seeds=1, show_progress=False)  # fmt: skip
            assert sorted(traced.subjects[0]) == expected[word]
