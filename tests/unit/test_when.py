"""Conditional edits on the fake engine: decided by the scores of probes, and equal to the same edits at those tokens."""

import functools
import json
import operator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines.base import Part
from patchclamp.language import Program
from patchclamp.language.conditions import comparisons
from patchclamp.testing import FakeEngine

PROMPT, NEW, D = [1, 2, 3, 7, 5, 7, 8], 6, 16
LAST = len(PROMPT) - 1
LMS = {chunk: pc.LM("fake", engine="fake", chunk=chunk) for chunk in (None, 1, 3)}
LM = LMS[None]
COMPARE = [operator.gt, operator.ge, operator.lt, operator.le]
SITES = [pc.resid_post[0], pc.resid_post[1], pc.attn_out[0], pc.mlp_out[1], pc.z[1, 1]]
SELECTIONS = [pc.every, pc.every, pc.prompt, pc.generated, pc.prompt[2:], pc.every[1:9]]


def vector(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape or (D,)).astype(np.float32)


@st.composite
def conditions(draw, depth: int = 2):
    """A condition, and a function that decides it from a run: True for each position, and those that its probes read."""
    if depth and draw(st.booleans()):
        first, decide_first = draw(conditions(depth - 1))
        if draw(st.booleans()):
            return ~first, lambda run: (~decide_first(run)[0], decide_first(run)[1])
        second, decide_second = draw(conditions(depth - 1))
        join = draw(st.sampled_from([operator.and_, operator.or_]))

        def decide(run):
            (a, read_a), (b, read_b) = decide_first(run), decide_second(run)
            return join(a, b), read_a & read_b

        return join(first, second), decide
    seed, site, output = draw(st.integers(0, 9)), draw(st.integers(0, len(SITES) - 1)), draw(st.integers(-2, 1))
    compare, tokens = draw(st.sampled_from(COMPARE)), draw(st.sampled_from(SELECTIONS))
    activation = draw(st.sampled_from([None, "sigmoid", "relu"]))
    threshold = draw(
        st.sampled_from({None: [-1.0, 0.0, 1.5], "sigmoid": [0.2, 0.5, 0.9], "relu": [0.1, 2.0]}[activation])
    )
    name = f"p{seed}.{site}.{SELECTIONS.index(tokens)}.{activation}"
    width = D if SITES[site].index is None else D // 2
    probe = pc.Probe(vector(seed, 2, width), at=SITES[site], tokens=tokens, bias=vector(seed, 2),
                     activation=activation, name=name)  # fmt: skip

    def decide_one(run):
        held, read = np.zeros((2, len(PROMPT) + NEW - 1), bool)
        positions = run.probe_positions(name)
        held[positions], read[positions] = compare(run.probes[name][:, output], np.float32(threshold)), True
        return held, read

    return compare(probe[output], threshold), decide_one


@given(st.lists(st.tuples(conditions(), st.sampled_from(["token", "prompt", "onwards"]),
                          st.sampled_from([pc.every, pc.generated, pc.prompt[1::2]])), min_size=1, max_size=2),
       st.sampled_from(list(LMS)))  # fmt: skip
def test_edits_act_where_the_condition_holds_and_nowhere_else(drawn, chunk):
    """One or two conditions, which may read the same probes, at sites that the edits of the first change."""
    whens, lm = [], LMS[chunk]
    for (condition, _), scope, tokens in drawn:
        push = pc.Add(3 * vector(5), at=pc.resid_post[1 if scope == "token" else 2], tokens=tokens)
        whens.append(pc.When(condition, [push, pc.Scale(0.5, pc.mlp_out[2], tokens)], scope=scope))
    try:
        run = lm.run(PROMPT, max_tokens=NEW, edits=whens, capture=[pc.resid_post], logprobs=True)
    except pc.TokensError:
        return  # no token could meet it
    except pc.UnsupportedSite as error:
        if "one site per layer" not in str(error):
            raise
        return
    static, expected = [], {}
    for number, (((_, decide), scope, tokens), when) in enumerate(zip(drawn, whens, strict=True)):
        held, read = decide(run)
        held &= read
        count = len(held)
        if scope == "prompt":
            held = (np.arange(count) >= LAST) & held[LAST]
        elif scope == "onwards":
            held = np.arange(count) >= (np.flatnonzero(held).min(initial=count))
        where = [int(p) for p in np.intersect1d(np.flatnonzero(held), run.select(tokens))]
        for i, edit in enumerate(when.edits):
            expected[f"edits[{number}].edits[{i}]"] = where
            static += [msgspec.structs.replace(edit, tokens=pc.every & where)] if where else []
    assert run.acted == expected
    same = lm.run(PROMPT, max_tokens=NEW, edits=static, capture=[pc.resid_post], logprobs=True)
    assert run.token_ids == same.token_ids
    assert run.logprobs == same.logprobs
    assert np.array_equal(run[pc.resid_post], same[pc.resid_post])


class Merging(FakeEngine):
    """Joins the output of three steps in a part, as a busy server does."""

    def submit(self, requests):
        listeners = [request.listener for request in requests]
        parts = [[] for _ in requests]
        for request, kept in zip(requests, parts, strict=True):
            request.listener = kept.append if request.listener else None
        futures = super().submit(requests)
        for request, listener, kept in zip(requests, listeners, parts, strict=True):
            request.listener = listener
            for some in by_three(kept):
                ids, logprobs = ([x for part in some for x in getattr(part, of)] for of in ("token_ids", "logprobs"))
                listener(Part("".join(part.text for part in some), ids, logprobs))
        return futures


LMS_TO_STOP = {**LMS, "merged": pc.LM("fake", engine=Merging())}


@given(conditions(), st.sampled_from(list(LMS_TO_STOP)), st.sampled_from([1, NEW]))
def test_a_run_ends_at_the_first_generated_token_where_the_condition_holds(drawn, way, max_tokens):
    (condition, decide), lm = drawn, LMS_TO_STOP[way]
    call = {"max_tokens": max_tokens, "capture": [pc.resid_post[2]], "logprobs": 2, "sampling": {"ignore_eos": True}}
    try:
        run = lm.run(PROMPT, stop_when=condition, **call)
    except pc.TokensError:
        return  # no generated token could meet it
    probes = {each.probe.name: each.probe for each in comparisons(condition)}
    whole = lm.run(PROMPT, **{**call, "max_tokens": NEW, "capture": [pc.resid_post[2], *probes.values()]})
    held, read = decide(whole)
    fired = np.flatnonzero((held & read)[LAST + 1 : LAST + max_tokens])
    count = int(fired[0]) + 1 if len(fired) else max_tokens
    computed = len(PROMPT) + count - (not len(fired))
    stream = lm.stream(PROMPT, stop_when=condition, **call)
    parts = list(stream)
    for each in (run, stream.run):
        assert each.token_ids == whole.token_ids[:count]
        assert each.text == lm.tokenizer.decode(each.token_ids)
        assert (each.logprobs, each.top_logprobs) == (whole.logprobs[:count], whole.top_logprobs[:count])
        assert np.array_equal(each[pc.resid_post[2]], whole[pc.resid_post[2]][:computed])
        assert each.finish_reason == ("stop" if len(fired) else "length")
        assert (each.stop_reason is None) == (not len(fired))
        assert not len(fired) or each.stop_reason.removeprefix("probe:") in probes
    assert [token for part in parts for token in part.token_ids] == stream.run.token_ids
    assert ("".join(part.text for part in parts), [x for part in parts for x in part.logprobs]) == (
        run.text,
        run.logprobs,
    )
    for name in probes:
        assert [at for part in parts for at in part.scores[name].positions] == run.probe_positions(name)
        assert np.array_equal(np.concatenate([part.scores[name].scores for part in parts]), run.probes[name])


def by_three(items):
    return [items[i : i + 3] for i in range(0, len(items), 3)]


def probe(threshold_of: float = 0.5, **options) -> tuple[pc.Probe, float]:
    """A probe of layer 0, and a threshold with this quantile of its scores in the unedited run."""
    made = pc.Probe(vector(1), at=pc.resid_post[0], name="p", **options)
    scores = LM.run(PROMPT, max_tokens=NEW, capture=made).probes["p"]
    return made, float(np.quantile(scores, threshold_of))


def test_a_probe_is_kept_once_and_its_scores_can_be_read():
    made, t = probe()
    edits = [pc.When(made > t, pc.Zero(pc.mlp_out[1])), pc.When(~(made > t), pc.Scale(2.0, pc.mlp_out[1]))]
    run = LM.run(PROMPT, max_tokens=NEW, edits=edits, capture=[made])
    assert list(run.probes) == ["p"]
    above = run.probes["p"][:, 0] > t
    assert run.acted == {
        "edits[0].edits[0]": np.flatnonzero(above).tolist(),
        "edits[1].edits[0]": np.flatnonzero(~above).tolist(),
    }


def test_an_edit_at_the_probes_own_site_acts_on_the_token_that_fired():
    made, t = probe()
    push = pc.Add(9 * vector(3), at=pc.resid_post[0])
    run = LM.run(PROMPT, max_tokens=NEW, edits=pc.When(made > t, push), capture=[pc.resid_post[0]])
    plain = LM.run(PROMPT, max_tokens=1, capture=[pc.resid_post[0]])
    moved = (np.abs(run[pc.resid_post[0]][:LAST] - plain[pc.resid_post[0]][:LAST]) > 1e-3).any(1)
    assert np.flatnonzero(moved).tolist() == [p for p in run.acted["edits[0].edits[0]"] if p < LAST]
    generated = pc.Probe(vector(1), at=pc.resid_post[0], tokens=pc.generated, name="p")
    for each, scope in ((generated, "onwards"), (made, "prompt")):
        run = LM.run(PROMPT, max_tokens=NEW, edits=pc.When(each > -99, push, scope=scope))
        first = len(PROMPT) if scope == "onwards" else LAST
        assert run.acted["edits[0].edits[0]"] == list(range(first, len(PROMPT) + NEW - 1))


def test_a_condition_and_token_ids_must_both_hold():
    made, t = probe()
    run = LM.run(PROMPT, max_tokens=NEW, edits=pc.When(made > t, pc.Zero(pc.mlp_out[1], pc.token(7))))
    expected = [i for i in (3, 5) if run.probes["p"][i, 0] > t]
    assert [p for p in run.acted["edits[0].edits[0]"] if p <= LAST] == expected
    static = LM.run(
        PROMPT,
        max_tokens=NEW,
        edits=pc.Zero(pc.mlp_out[1], run.acted["edits[0].edits[0]"] or pc.token(60)),
        logprobs=True,
    )
    again = LM.run(PROMPT, max_tokens=NEW, edits=pc.When(made > t, pc.Zero(pc.mlp_out[1], pc.token(7))), logprobs=True)
    assert again.logprobs == static.logprobs


@pytest.mark.parametrize("activation", [None, "sigmoid", "relu"])
@pytest.mark.parametrize("compare", COMPARE)
def test_a_decision_is_that_of_the_score_to_the_bit(compare, activation):
    """Also where the threshold is a score, whatever bias and activation round."""
    weight, bias = vector(1, 2, D) / 8, [np.float32(1 / 3), 100.1]
    made = pc.Probe(weight, at=pc.resid_post[0], bias=bias, activation=activation, name="p")
    scores = LM.run(PROMPT, max_tokens=1, capture=made).probes["p"]
    for output in (0, 1, -1):
        for score in np.unique(scores[:, output]):
            if activation and score in (0, 1):
                continue
            run = LM.run(
                PROMPT, max_tokens=1, edits=pc.When(compare(made[output], float(score)), pc.Zero(pc.mlp_out[1]))
            )
            held = compare(scores[:, output], score)
            assert run.acted["edits[0].edits[0]"] == np.flatnonzero(held).tolist()
            zeroed = LM.run(PROMPT, max_tokens=1, edits=run.program.edits, capture=pc.mlp_out[1])[pc.mlp_out[1]]
            assert np.flatnonzero(~zeroed.any(1)).tolist() == np.flatnonzero(held).tolist()


@pytest.mark.parametrize("scope", ["token", "prompt"])
def test_all_conditions_on_a_probe_are_decided_where_it_is_first_read(scope):
    """An edit at its site, by hand or under a condition, does not change what a later condition decides: its scores are
    those that `run.probes` has."""
    made, t = probe()
    push, mark = pc.Add(-9 * vector(1), at=SITE), pc.Scale(0.0, at=pc.mlp_out[1])
    plain = LM.run(PROMPT, max_tokens=1, capture=made).probes["p"]
    for before in ([pc.When(made > t, push)], [made, push], [pc.When(made > t, push), pc.When(made > t + 1, push)]):
        run = LM.run(PROMPT, max_tokens=1, edits=[*before, pc.When(made > t, mark, scope=scope)], capture=pc.mlp_out[1])
        assert np.array_equal(run.probes["p"], plain)
        held = plain[:, 0] > t if scope == "token" else (np.arange(len(PROMPT)) == LAST) & (plain[LAST, 0] > t)
        assert run.acted[f"edits[{len(before)}].edits[0]"] == np.flatnonzero(held).tolist()
        assert np.flatnonzero(~run[pc.mlp_out[1]].any(1)).tolist() == np.flatnonzero(held).tolist()


def test_a_probe_of_other_rows_needs_a_name_of_its_own():
    made, t = probe()
    edits = [pc.When(made > t, pc.Add(vector(3), at=pc.resid_post[0]))]
    for program in ({"edits": edits, "capture": [made]}, {"edits": [*edits, made]}):
        with pytest.raises(pc.ProgramError) as raised:
            LM.run(PROMPT, **program)
        assert raised.value.path in ("capture[0].name", "edits[1].name")
    after = msgspec.structs.replace(made, name="after")
    run = LM.run(PROMPT, max_tokens=1, edits=edits, capture=[after, made.at])
    assert run.probes["after"] == pytest.approx(run[made.at] @ vector(1)[:, None], abs=1e-5)
    elsewhere = [pc.When(made > t, pc.Zero(pc.mlp_out[1])), made]
    assert list(LM.run(PROMPT, max_tokens=1, edits=elsewhere).probes) == ["p"]


def test_samples_and_batchmates_decide_for_themselves():
    made, t = probe()
    other = [8, 7, 6, 5, 4]
    program = pc.When(made > t, pc.Add(5 * vector(2), at=pc.mlp_out[2]), scope="onwards")
    alone = [LM.run(ids, max_tokens=NEW, edits=program, logprobs=True) for ids in (PROMPT, other)]
    both = LM.run([PROMPT, other, PROMPT], max_tokens=NEW, edits=[[program], [program], []], logprobs=True)
    for run, one in zip(both, alone, strict=False):
        assert run.logprobs == one.logprobs
        assert run.acted == one.acted
    assert both[2].logprobs == LM.run(PROMPT, max_tokens=NEW, logprobs=True).logprobs


def test_conditional_programs_are_graded_as_requests():
    made, t = probe()
    programs = [pc.When(made > t, pc.Zero(pc.mlp_out[1])), pc.Zero(pc.mlp_out[1])]
    grades = LM.grade(PROMPT, programs, score=[5, 9])
    for program, logprobs in zip(programs, grades.logprobs, strict=True):
        run = LM.run(PROMPT, max_tokens=1, edits=program, score=[5, 9])
        assert logprobs == pytest.approx([run.scores[5], run.scores[9]])


SITE = pc.resid_post[0]
P = pc.Probe(vector(1), at=SITE, name="p")
INVALID = {
    "an edit before the probe": (pc.When(P > 0, pc.Zero(pc.mlp_out[0])), "edits[0].edits[0].at"),
    "an edit at the probe's layer": (pc.When(P > 0, pc.Zero(pc.embed)), "edits[0].edits[0].at"),
    "an edit of logits": (pc.When(P > 0, pc.Zero(pc.logits, pc.generated)), "edits[0].edits[0].at"),
    "the probe's site, onwards": (pc.When(P > 0, pc.Zero(SITE), scope="onwards"), "edits[0].edits[0].at"),
    "a pooled probe": (pc.When(pc.Probe(vector(1), at=SITE, pool="mean", name="p") > 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.pool"),
    "several layers": (pc.When(pc.Probe(vector(1), at=pc.resid_post, name="p") > 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.at"),
    "an output that is not there": (pc.When(P[3] > 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.output"),
    "an output before the first": (pc.When(P[-2] > 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.output"),
    "two sites of one layer": (pc.When((P > 0) & (pc.Probe(vector(1), at=pc.mlp_out[1], name="m") > 0) & (pc.Probe(vector(1), at=pc.attn_out[1], name="a") > 0), pc.Zero(pc.mlp_out[2])), "edits[0].condition.at"),
    "a sigmoid that is always above": (pc.When(pc.Probe(vector(1), at=SITE, activation="sigmoid", name="p") >= 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.threshold"),
    "a relu below 0": (pc.When(pc.Probe(vector(1), at=SITE, activation="relu", name="p") > -1, pc.Zero(pc.mlp_out[1])), "edits[0].condition.threshold"),
    "a softmax": (pc.When(pc.Probe(vector(1, 2, D), at=SITE, activation="softmax", name="p") > 0.5, pc.Zero(pc.mlp_out[1])), "edits[0].condition.activation"),
    "a sigmoid above 1": (pc.When(pc.Probe(vector(1), at=SITE, activation="sigmoid", name="p") > 1.5, pc.Zero(pc.mlp_out[1])), "edits[0].condition.threshold"),
    "tokens to come": (pc.When(pc.Probe(vector(1), at=SITE, tokens=pc.token(7), name="p") > 0, pc.Zero(pc.mlp_out[1])), "edits[0].condition.tokens"),
    "no token that both read": (pc.When((pc.Probe(vector(1), at=SITE, tokens=pc.prompt[0], name="a") > 0) & (pc.Probe(vector(1), at=SITE, tokens=pc.prompt[1], name="b") > 0), pc.Zero(pc.mlp_out[1])), "edits[0].condition"),
    "a prompt whose end is not read": (pc.When(pc.Probe(vector(1), at=SITE, tokens=pc.prompt[0], name="a") > 0, pc.Zero(pc.mlp_out[1]), scope="prompt"), "edits[0].condition"),
    "an edit before it can hold": (pc.When(P > 0, pc.Zero(pc.mlp_out[1], pc.prompt[0]), scope="prompt"), "edits[0].edits[0].tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_what_cannot_be_decided_is_refused_with_its_path(case):
    program, path = INVALID[case]
    with pytest.raises(pc.PatchclampError) as raised:
        LM.run(PROMPT, max_tokens=NEW, edits=program)
    assert raised.value.path == path


def test_too_many_conditions_are_refused():
    many = [pc.When(i < P, pc.Zero(pc.mlp_out[1])) for i in range(40)]
    latches = [pc.When(i < P, pc.Zero(pc.mlp_out[1]), scope="onwards") for i in range(9)]
    for edits in (many, latches):
        with pytest.raises(pc.ProgramError):
            LM.run(PROMPT, edits=edits)
    assert LM.run(PROMPT, edits=many[:23], max_tokens=1).acted


@pytest.mark.parametrize("scope", ["token", "prompt", "onwards"])
def test_equal_conditions_are_decided_once(scope):
    """However many edits they guard, which are those of one with all of them."""
    made, t = probe(0.3)
    other = pc.Probe(vector(2), at=pc.resid_post[0], name="q")
    joins = [(made > t) & (other < 9), (other < 9) & (made > t), ~((made > t) & (other < 9))]
    adds = [pc.Add(vector(i), at=pc.resid_post[1 + i % 2]) for i in range(90)]
    once = [pc.When(join, [adds[j] for j in range(90) if (j % 3 == 2) == (join == joins[2])], scope=scope)
            for join in (joins[0], joins[2])]  # fmt: skip
    run, alone = (LM.run(PROMPT, max_tokens=NEW, edits=edits, capture=pc.resid_post) for edits in (
        [pc.When(joins[i % 3], add, scope=scope) for i, add in enumerate(adds)], once))  # fmt: skip
    for i in range(90):
        held = alone.acted[f"edits[{int(i % 3 == 2)}].edits[0]"]
        assert run.acted[f"edits[{i}].edits[0]"] == held
    assert any(run.acted.values())
    assert run.token_ids == alone.token_ids
    np.testing.assert_allclose(run[pc.resid_post], alone[pc.resid_post], rtol=1e-4, atol=1e-3)


def test_conditions_have_a_text_form_and_no_truth_value():
    q = pc.Probe(vector(2, 3, D), at=pc.resid_post[1], bias=[1, 2, 3], name="q")
    program = Program.of(
        [pc.When((P > 0.5) | ~(q[2] <= -1) & (q[1] >= 0), [pc.Zero(pc.mlp_out[2])], scope="onwards")], [q]
    )
    assert Program.from_json(program.to_json()) == program
    for condition in (P > 0, ~(P > 0), (P > 0) & (P < 2)):
        with pytest.raises(pc.ProgramError, match="truth"):
            bool(condition)
    with pytest.raises(pc.ProgramError, match="truth"):
        pc.When(P > 0 and P < 2, pc.Zero(pc.embed))


HOSTILE = [
    {"condition": None}, {"condition": {"type": "above"}}, {"condition": {"type": "not"}}, {"edits": []}, {"edits": {}},
    {"condition": {"type": "every", "conditions": []}}, {"condition": {"type": "above", "probe": {"type": "zero", "at": "embed"}, "threshold": 1}},
    {"scope": "always"}, {"extra": 1}, {"edits": [{"type": "when"}]}, {"edits": [{"type": "capture", "at": "embed"}]},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE)
def test_malformed_conditions_are_refused_with_a_path(change):
    data = plain_data()
    data["edits"][0].update(change)
    with pytest.raises(pc.PatchclampError) as raised:
        Program.from_json(json.dumps(data))
    assert raised.value.path.startswith("edits[0]")


def test_many_joined_comparisons_have_a_text_form_too():
    """However they are joined, 23 comparisons nest less deep than is refused."""
    for join in (operator.and_, operator.or_):
        condition = functools.reduce(join, [i < P for i in range(12)])
        program = Program.of([pc.When(condition, pc.Zero(pc.mlp_out[1]))])
        assert Program.from_json(program.to_json()) == program
        assert LM.run(PROMPT, edits=program.edits, max_tokens=1).acted
    assert ~~(P > 0) == (P > 0)


@pytest.mark.parametrize(("fields", "path"), [
    ({"threshold": None}, "threshold"), ({"threshold": "1"}, "threshold"), ({"output": 0.5}, "output"),
    ({"inclusive": 1}, "inclusive"), ({"probe": None}, "probe"), ({"probe": {"type": "capture", "at": "embed"}}, "probe"),
])  # fmt: skip
def test_a_malformed_comparison_names_its_field(fields, path):
    data = plain_data()
    data["edits"][0]["condition"] |= fields
    with pytest.raises(pc.ProgramError) as raised:
        Program.from_json(json.dumps(data))
    assert raised.value.path == f"edits[0].condition.{path}"
    del data["edits"][0]["condition"]["threshold"]
    with pytest.raises(pc.ProgramError):
        Program.from_json(json.dumps(data))


def test_a_program_with_conditions_has_no_name():
    """Its probes would not be in the program that uses it, so that their scores had no names."""
    with pc.LM("fake", engine="fake") as lm, pytest.raises(pc.ProgramError, match="conditions"):
        lm.bank["calm"] = Program.of(pc.When(P > 0, pc.Zero(pc.mlp_out[1])))


def test_conditions_of_endless_depth_are_refused():
    data = plain_data()
    for _ in range(500):
        data["edits"][0]["condition"] = {"type": "not", "condition": data["edits"][0]["condition"]}
    with pytest.raises(pc.ProgramError):
        Program.from_json(json.dumps(data))


def plain_data() -> dict:
    return json.loads(Program.of([pc.When(P > 0.5, [pc.Zero(pc.mlp_out[1])])]).to_json())
