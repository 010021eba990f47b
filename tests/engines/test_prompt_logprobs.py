"""Log-probabilities of the prompt's tokens under edits, on both engines, against plain hooks: cold and cached, whole and
in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs
from patchclamp.testing import FakeEngine

from ..reference.hooks import PlainModel
from .conftest import CHUNKED

rng = np.random.default_rng(11)
PROMPTS = [rng.integers(5, 2000, size=size).tolist() for size in (70, 3, 41, 1)]
LAYER, TOP = 2, 3
ENGINES = {"vllm": ("vllm", {}), "chunked": ("vllm", CHUNKED), "transformers": ("transformers", {})}
over_engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def hooked(narrowed):
    return PlainModel(narrowed)


@pytest.fixture
def lm(engine, narrow) -> pc.LM:
    name, options = ENGINES[engine]
    return narrow.get(name, "float32", **options)


def expected(plain: PlainModel, ids: list[int], vector: np.ndarray | None, first: int = 0) -> torch.Tensor:
    """Log-probabilities [T − 1, V] of the tokens after each but the last, with the vector added from a position on."""

    def steer(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        hidden[:, first:] += torch.tensor(vector)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hooks = [] if vector is None else [plain.net.model.layers[LAYER].register_forward_hook(steer)]
    with torch.no_grad():
        logprobs_TV = plain.net(torch.tensor([ids])).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return logprobs_TV[:-1]


def check(run: pc.Run, wanted_TV: torch.Tensor) -> None:
    ids = run.prompt_token_ids
    assert len(run.prompt_logprobs) == len(ids) == len(run.prompt_top_logprobs)
    assert np.isnan(run.prompt_logprobs[0])
    of_tokens = wanted_TV[range(len(ids) - 1), ids[1:]].numpy()
    np.testing.assert_allclose(run.prompt_logprobs[1:], of_tokens, atol=1e-4)
    assert run.prompt_top_logprobs[0] == {}
    for row, wanted_V in zip(run.prompt_top_logprobs[1:], wanted_TV, strict=True):
        assert len(row) == TOP
        np.testing.assert_allclose(list(row.values()), wanted_V.topk(TOP).values.numpy(), atol=1e-4)
        np.testing.assert_allclose(list(row.values()), wanted_V[list(row)].numpy(), atol=1e-4)


@over_engines
def test_they_are_those_of_plain_hooks(lm, hooked):
    vector = 3 * rng.standard_normal(lm.model.d_model).astype(np.float32)
    edit, later = (pc.Add(vector, pc.resid_post[LAYER], tokens) for tokens in (pc.every, pc.prompt[2:]))
    runs = lm.run(PROMPTS, max_tokens=2, edits=[[edit]] * len(PROMPTS), prompt_logprobs=TOP, logprobs=True)
    for ids, run in zip(PROMPTS, runs, strict=True):
        check(run, expected(hooked, ids, vector))
        assert len(run.logprobs) == 2
    moved = expected(hooked, PROMPTS[0], vector)[range(69), PROMPTS[0][1:]]
    assert (moved - expected(hooked, PROMPTS[0], None)[range(69), PROMPTS[0][1:]]).abs().max() > 0.1
    check(lm.run(PROMPTS[0], max_tokens=1, edits=later, prompt_logprobs=TOP), expected(hooked, PROMPTS[0], vector, 2))


@over_engines
def test_a_cached_prefix_is_computed_again(lm, hooked):
    """Also beside runs that read it, and with an edit of the logits, which are not those of a token of the prompt."""
    ids = rng.integers(5, 2000, size=80).tolist()
    vector = 3 * rng.standard_normal(lm.model.d_model).astype(np.float32)
    edit = pc.Add(vector, pc.resid_post[LAYER])
    for _ in range(2):
        read = lm.run(ids, max_tokens=1, edits=edit)
    if ENGINES["vllm"] == (lm.engine.model.engine, {}) and lm.engine.config.cache_config.enable_prefix_caching:
        assert read.cached_tokens > 0
    banned = pc.Scale(0.0, pc.logits @ pc.prompt[-1])
    edits, asked = [[edit], [edit], [], [edit, banned]], [TOP, False, TOP, TOP]
    warm = lm.run([ids] * 4, max_tokens=3, edits=edits, prompt_logprobs=asked, logprobs=True)
    check(warm[0], expected(hooked, ids, vector))
    check(warm[2], expected(hooked, ids, None))
    check(warm[3], expected(hooked, ids, vector))
    assert warm[0].cached_tokens == 0
    assert warm[0].token_ids == warm[1].token_ids
    np.testing.assert_allclose(warm[0].logprobs, warm[1].logprobs, atol=1e-4)
    with pytest.raises(pc.ProgramError, match="prompt_logprobs=True"):
        warm[1].prompt_logprobs  # noqa: B018


@over_engines
def test_without_likeliest_tokens_and_beside_scores(lm, hooked):
    run = lm.run(PROMPTS[2], max_tokens=1, score=[7, 9], prompt_logprobs=True)
    wanted = expected(hooked, PROMPTS[2], None)[range(40), PROMPTS[2][1:]].numpy()
    np.testing.assert_allclose(run.prompt_logprobs[1:], wanted, atol=1e-4)
    assert set(run.scores) == {7, 9}
    with pytest.raises(pc.ProgramError, match="prompt_logprobs=5"):
        run.prompt_top_logprobs  # noqa: B018
    for wrong in ({"prompt_logprobs": 0}, {"prompt_logprobs": [1, 2]}, {"sampling": {"prompt_logprobs": 1}}):
        with pytest.raises(pc.ProgramError) as caught:
            lm.run(PROMPTS[2], **wrong)
        assert "prompt_logprobs" in str(caught.value.path)


@over_engines
def test_the_likelihood_of_choices_is_the_sum_of_theirs(lm):
    vector = 3 * rng.standard_normal(lm.model.d_model).astype(np.float32)
    edit = pc.Add(vector, pc.resid_post[LAYER])
    contexts, choices = [PROMPTS[0][:40], PROMPTS[2]], [[[7, 8, 9], [7, 11], [12]], [[5], [6, 7]]]
    found = lm.loglikelihood(contexts, choices, edits=edit)
    for context, several, values in zip(contexts, choices, found, strict=True):
        assert lm.loglikelihood(context, several, edits=edit) == pytest.approx(values, abs=1e-4)
        runs = lm.run(
            [context + ids for ids in several], max_tokens=1, edits=[[edit]] * len(several), prompt_logprobs=True
        )
        sums = [sum(run.prompt_logprobs[len(context) :]) for run in runs]
        assert values == pytest.approx(sums, abs=1e-4)
    assert lm.loglikelihood(contexts[0], choices[0][0], edits=edit) == pytest.approx(found[0][0], abs=1e-4)


def test_a_continuation_takes_one_request(narrow, hooked, monkeypatch):
    """Except under edits of logits, which change only those of sampled tokens."""
    lm, asked = narrow.get("transformers", "float32"), []
    submit = lm.engine.submit
    monkeypatch.setattr(lm.engine, "submit", lambda requests: asked.extend(requests) or submit(requests))
    vector = 3 * rng.standard_normal(lm.model.d_model).astype(np.float32)
    edit, ids, choices = pc.Add(vector, pc.resid_post[LAYER]), PROMPTS[0][:40], [[7, 8, 9], [10, 11, 12, 13], [14]]
    for edits, factor, count in (([edit], 1.0, 3), ([edit, pc.Scale(0.5, pc.logits)], 0.5, 6)):
        asked.clear()
        found = lm.loglikelihood(ids, choices, edits=edits)
        assert len(asked) == count
        for choice, value in zip(choices, found, strict=True):
            rows = (factor * expected(hooked, ids + choice, vector)).log_softmax(-1)
            wanted = rows[range(len(ids) - 1, len(ids) + len(choice) - 1), choice].sum()
            assert value == pytest.approx(float(wanted), abs=1e-4)


@over_engines
def test_edits_after_the_last_layer(lm, hooked):
    """Of the normed stream and of logits: log-probabilities and KL divergences are those of rows edited by hand."""
    ids, answer = PROMPTS[0][:20], [5, 9, 600, 31, 7, 9, 12, 80, 44, 3]  # long enough for one request per program
    rows = rng.standard_normal(lm.model.d_model).astype(np.float32), 5 * np.eye(lm.model.d_vocab)[9].astype(np.float32)
    with torch.no_grad():
        normed = hooked.net.model(torch.tensor([ids + answer[:-1]])).last_hidden_state[0, len(ids) - 1 :]
        head = hooked.net.lm_head
        wanted = {
            pc.Add(rows[0], pc.final_norm): head(normed + torch.tensor(rows[0])),
            pc.Scale(0.2, pc.final_norm, pc.generated): head(normed * torch.tensor([1.0] + [0.2] * 9)[:, None]),
            pc.Add(rows[1], pc.logits): head(normed) + torch.tensor(rows[1]),
            pc.Scale(0.2, pc.logits, pc.generated): head(normed) * torch.tensor([1.0] + [0.2] * 9)[:, None],
            pc.Scale(0.0, pc.logits): 0 * head(normed),
            pc.Use("banned"): 0.2 * head(normed),
        }
        plain = head(normed)[0].log_softmax(-1)
    lm.bank["banned"] = [pc.Scale(0.2, pc.logits)]
    forced = forced_logprobs(lm, [Forced(tuple(ids), tuple(answer), (edit,)) for edit in wanted])
    grades = lm.grade(ids, list(wanted), score=[answer], kl=True)
    for i, (edit, logits) in enumerate(wanted.items()):
        each = logits.log_softmax(-1)[range(len(answer)), answer]
        np.testing.assert_allclose(forced[i], each, atol=1e-4, err_msg=str(edit))
        assert lm.loglikelihood(ids, answer, edits=edit) == pytest.approx(float(each.sum()), abs=1e-3)
        assert grades.logprobs[i, 0] == pytest.approx(float(each.sum()), abs=1e-3)
        divergence = (plain.exp() * (plain - logits[0].log_softmax(-1))).sum()
        assert grades.kl[i] == pytest.approx(float(divergence), abs=1e-4)
    assert (np.diff(np.sort([row.sum() for row in forced])) > 0.1).sum() >= 4


@over_engines
def test_other_positions_of_a_program_are_those_of_its_prompt(lm):
    """The keys of a knockout, and rows of the same run."""
    ids, answer = PROMPTS[0][:20], PROMPTS[2][:4]
    for edit, fixed in (
        (pc.Knockout(pc.prompt[-1], pc.pattern[LAYER], pc.generated), pc.Knockout(pc.every[19], pc.pattern[LAYER], pc.every[20:])),
        (pc.Replace(pc.SameRun(pc.resid_post[1], pc.prompt[-1]), pc.resid_post[LAYER], pc.generated),
         pc.Replace(pc.SameRun(pc.resid_post[1], pc.every[19]), pc.resid_post[LAYER], pc.every[20:])),
    ):  # fmt: skip
        [row] = forced_logprobs(lm, [Forced(tuple(ids), tuple(answer), (edit,))])
        edited, plain = lm.run([ids + answer] * 2, max_tokens=1, edits=[[fixed], []], prompt_logprobs=True)
        np.testing.assert_allclose(row, edited.prompt_logprobs[20:], atol=1e-4)
        assert np.abs(row - plain.prompt_logprobs[20:])[1:].max() > 1e-3


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_fake_engine_has_them(chunk):
    lm = pc.LM("fake", engine=FakeEngine(chunk=chunk))
    run = lm.run(list(range(10, 20)), max_tokens=1, edits=pc.Scale(2.0, pc.mlp_out[1]), prompt_logprobs=2)
    rows = lm.run(list(range(10, 20)), max_tokens=1, edits=pc.Scale(2.0, pc.mlp_out[1]), capture=pc.final_norm)
    logprobs_TV = (torch.tensor(np.asarray(rows[pc.final_norm])) @ lm.weights("W_U")).log_softmax(-1)
    np.testing.assert_allclose(run.prompt_logprobs[1:], logprobs_TV[range(9), range(11, 20)].numpy(), atol=1e-4)
    assert [list(row) for row in run.prompt_top_logprobs[1:]] == logprobs_TV[:9].topk(2).indices.tolist()
