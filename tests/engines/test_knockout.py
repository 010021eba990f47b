"""Edits of attention equal Transformers' eager attention with the same edits, however a prompt is computed."""

import sys

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.language.program import from_dict, to_dict
from patchclamp.plan.bound import LINEAR, REMOVE, Attended

from ..models import of_family
from ..reference.attention import eager_model, edited
from .conftest import CHUNKED
from .test_attention import BOTH, FAMILIES, IDS, NEW

IDS_OF_PROMPT = list(range(20, 60))
WITHIN = {"atol": 1e-4, "rtol": 0}
SEEN = [pc.final_norm, pc.pattern[1]]


@pytest.fixture(scope="module")
def plain(narrow):
    return eager_model(narrow.folder)


def check(net, run: pc.Run, removed=None, change=None) -> None:
    """Compare a run that captured `final_norm` and `pattern[1]` of every token with the reference."""
    logits, patterns = edited(net, [*run.prompt_token_ids, *run.token_ids[:-1]], removed, change)
    norm, embedding = run[pc.final_norm], net.get_output_embeddings()
    found = embedding(norm.to(embedding.weight))
    if cap := getattr(net.config, "final_logit_softcapping", None):
        found = cap * (found / cap).tanh()
    torch.testing.assert_close(found, logits, **WITHIN)
    torch.testing.assert_close(run[pc.pattern[1]], patterns[1], **WITHIN)


@BOTH
@pytest.mark.parametrize(
    "name",
    [FAMILIES[0], "gemma2", *(pytest.param(each, marks=pytest.mark.slow) for each in [*FAMILIES[2:], "mistral"])],
)
def test_families(name, engine, tmp_path, inspected_here):
    """A knockout of one head and of all, through grouped heads, windows, caps and sinks."""
    folder = of_family(tmp_path, name)
    options = {"enforce_eager": True, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 26}
    net = eager_model(folder)
    draw = np.random.default_rng(1)
    with pc.LM(folder, engine=engine, **IDS, **(options if engine == "vllm" else {})) as lm:
        ids = draw.integers(3, lm.model.d_vocab, 60).tolist()
        heads = list(range(lm.sites.sizes.heads))
        edits = [
            pc.Knockout(pc.prompt[3:9], pc.pattern[0, 1], pc.prompt[20:] | pc.generated),
            pc.Knockout(pc.prompt[-4], pc.pattern[1], pc.prompt[-2:]),
        ]
        [run] = lm.run([ids], edits=edits, capture=SEEN, **NEW)
        late = list(range(20, len(ids) + 3))
        check(net, run, {0: [(1, late, range(3, 9))], 1: [(head, [58, 59], [56]) for head in heads]})


@BOTH
def test_edits_join_in_order(narrow, plain, engine):
    """Keys are removed first; probabilities are scaled and replaced in program order, and z is edited after them."""
    lm, count = narrow.get(engine, "float32"), len(IDS_OF_PROMPT)
    heads = lm.sites.sizes.heads
    rows = torch.rand(3, count - 5, generator=torch.Generator().manual_seed(0))
    edits = [
        pc.Scale(0.5, pc.z[1], pc.prompt[30]),
        pc.Scale(0.25, pc.pattern[1, 2], pc.prompt[-3:], keys=pc.prompt[4:8]),
        pc.Knockout(pc.prompt[5], pc.pattern[:, 2], pc.prompt[10:]),
        pc.Replace(rows, pc.pattern[1, 1], pc.prompt[-3:], alpha=0.5),
        pc.Knockout(pc.prompt[6], pc.pattern[1], pc.prompt[10:]),
        pc.Scale(2, pc.pattern[1, 0], pc.prompt[-1]),
    ]
    [run] = lm.run([IDS_OF_PROMPT], edits=edits, capture=[*SEEN, pc.z[1]], max_tokens=1)
    late = list(range(10, count))
    removed = {layer: [(2, late, [5])] for layer in range(lm.model.layers)}
    removed[1] += [(head, late, [6]) for head in range(heads)]

    def change(layer: int, pattern: torch.Tensor) -> None:
        if layer == 1:
            pattern[:, 30] *= 0.5  # as halving z does
            pattern[2, -3:, 4:8] *= 0.25
            seen = torch.tril(torch.ones(count, count))[-3:]
            pattern[1, -3:] = (pattern[1, -3:] + torch.nn.functional.pad(rows, (0, 5)) * seen) / 2
            pattern[0, -1] *= 2

    logits, patterns = edited(plain, IDS_OF_PROMPT, removed, change)
    torch.testing.assert_close(plain.lm_head(run[pc.final_norm]), logits, **WITHIN)
    patterns[1][30] *= 2  # a capture of the pattern has the edits of the pattern alone
    torch.testing.assert_close(run[pc.pattern[1]], patterns[1], **WITHIN)
    assert run.acted["edits[0]"] == [30]
    assert run.acted["edits[4]"] == late


@BOTH
def test_values_may_be_zero(narrow, engine):
    """Attention to zeros is 0, with and without the edit."""
    lm, knockout = narrow.get(engine, "float32"), pc.Knockout("prompt[3]", pc.pattern[1], "prompt[5:]")
    run = lm.run(IDS_OF_PROMPT, edits=[pc.Zero(pc.v[1]), knockout], capture=[pc.z[1], pc.pattern[1]], max_tokens=1)
    assert not run[pc.z[1]].any()
    assert not run[pc.pattern[1]][5:, :, 3].any()


@BOTH
def test_patching_a_pattern(narrow, plain, engine):
    """The pattern of another run, written into this one."""
    lm = narrow.get(engine, "float32")
    clean, corrupt = IDS_OF_PROMPT, [*IDS_OF_PROMPT[:7], 99, *IDS_OF_PROMPT[8:]]
    [source] = lm.run([clean], capture=pc.pattern[1], max_tokens=1)
    head = pc.pattern[1, 3]
    [run] = lm.run([corrupt], edits=pc.Replace(source[head], head), capture=SEEN, max_tokens=1)
    check(plain, run, change=lambda layer, pattern: pattern[3].copy_(source[head]) if layer == 1 else None)


@pytest.mark.parametrize("options", [{}, CHUNKED, {"async_scheduling": False}], ids=str)
def test_vllm_edits_what_comes_in_chunks_and_behind_cached_prefixes(narrow, plain, options):
    """Blocks with edited attention are shared with requests of the same edits alone."""
    lm = narrow.get("vllm", "float32", **options)
    prompts = [[*range(9, 150), *range(300, 300 + more)] for more in (3, 17, 30)]
    knockout = pc.Knockout(pc.prompt[2:30], pc.pattern[:2], pc.prompt[40:] | pc.generated)
    heads = range(lm.sites.sizes.heads)
    for edit in (None, knockout, None, knockout, pc.Knockout(pc.prompt[2:31], pc.pattern[:2], pc.prompt[40:])):
        keys = range(2, 31 if edit not in (None, knockout) else 30)
        edits = [] if edit is None else [edit]
        for each in lm.run(prompts, edits=edits, **NEW):
            ids = [*each.prompt_token_ids, *each.token_ids]
            stop = len(ids) if edit == knockout else len(each.prompt_token_ids)
            pairs = [(head, range(40, stop - 1 if stop == len(ids) else stop), keys) for head in heads]
            logits, _ = edited(plain, ids[:-1], {0: pairs, 1: pairs} if edits else None)
            assert logits[len(each.prompt_token_ids) - 1 :].argmax(-1).tolist() == each.token_ids


@pytest.mark.parametrize(("engine", "options"), [("transformers", {}), ("vllm", CHUNKED)], ids=str)
def test_queries_and_keys_far_apart(narrow, plain, engine, options):
    """Chunks between edited queries have none, and rows between them keep their pattern."""
    lm, ids = narrow.get(engine, "float32", **options), list(range(20, 110))
    edits = [
        pc.Knockout("prompt[1::2]", pc.pattern[1, 1], "prompt[10] | prompt[60::3]"),
        pc.Replace(np.full((2, 9), 0.1), pc.pattern[1, 2], "prompt[9, 80]"),
    ]
    [run] = lm.run([ids], edits=edits, capture=SEEN, max_tokens=1)

    def change(layer: int, pattern: torch.Tensor) -> None:
        if layer == 1:
            pattern[2, [9, 80]] = torch.nn.functional.pad(torch.full((9,), 0.1), (0, len(ids) - 9))

    check(plain, run, {1: [(1, [10, *range(60, 90, 3)], range(1, 90, 2))]}, change)


@BOTH
def test_queries_that_see_no_key_keep_their_bits(narrow, engine):
    lm = narrow.get(engine, "float32")
    edits = [
        pc.Knockout(pc.prompt[8:], pc.pattern, pc.prompt[:9]),
        pc.Scale(0, pc.pattern, pc.prompt[3, 9], keys=pc.prompt[4:8]),
    ]
    without, with_them = (
        lm.run(IDS_OF_PROMPT, edits=each, capture=pc.resid_post, max_tokens=1) for each in ([], edits)
    )
    assert with_them.acted == {"edits[0]": [8], "edits[1]": [9]}
    rows, edited_rows = without[pc.resid_post], with_them[pc.resid_post]
    assert torch.equal(rows[:, :8], edited_rows[:, :8])
    assert (rows[0] != edited_rows[0]).any(-1).nonzero()[:, 0].tolist() == [8, 9]
    knockout, scale = edits
    for nothing in (
        pc.Knockout("prompt[9]", pc.pattern[0], "prompt[3]"),
        pc.Scale(0, scale.at, "prompt[3]", keys=scale.keys),
    ):
        with pytest.raises(pc.TokensError) as raised:
            lm.run(IDS_OF_PROMPT, edits=[knockout, nothing], max_tokens=1)
        assert raised.value.path == "edits[1].keys"


@BOTH
def test_keys_are_those_of_each_prompt(narrow, plain, engine):
    """Prompts of one length whose selected key is at different positions."""
    lm, first, second = narrow.get(engine, "float32"), IDS_OF_PROMPT[:12], [*IDS_OF_PROMPT[1:12], IDS_OF_PROMPT[0]]
    knockout = pc.Knockout(pc.prompt & pc.token(IDS_OF_PROMPT[5]), pc.pattern[1], "prompt[-1]")
    runs = lm.run([first, second, first], edits=knockout, capture=SEEN, max_tokens=1)
    for run, key in zip(runs, (5, 4, 5), strict=True):
        check(plain, run, {1: [(head, [11], [key]) for head in range(lm.sites.sizes.heads)]})


@BOTH
def test_n_samples_and_batchmates_have_their_own(narrow, plain, engine):
    lm = narrow.get(engine, "float32")
    prompts = [IDS_OF_PROMPT[:1], IDS_OF_PROMPT[:12], IDS_OF_PROMPT, IDS_OF_PROMPT[:30]]
    edits = [[], [pc.Knockout("prompt[0]", pc.pattern[1, 0], "prompt[1:]")], [], [pc.Scale(0, pc.pattern[0, 2])]]
    runs = lm.run(prompts, edits=edits, capture=SEEN, max_tokens=1)
    check(plain, runs[0])
    check(plain, runs[1], {1: [(0, range(1, 12), [0])]})
    check(plain, runs[2])
    check(plain, runs[3], change=lambda layer, pattern: pattern[2].zero_() if layer == 0 else None)
    alone = lm.run(prompts[1], edits=edits[1], max_tokens=1, score=[5])
    beside = lm.run([prompts[1]] * 4, edits=[[], [], [], edits[1]], max_tokens=1, score=[5])  # most have no program
    assert beside[3].scores[5] == pytest.approx(alone.scores[5], abs=1e-4)
    assert abs(beside[0].scores[5] - alone.scores[5]) > 1e-3
    several = lm.run(
        IDS_OF_PROMPT, edits=pc.Knockout("prompt[0]", pc.pattern[1, 0], "every[1:]"), capture=SEEN, max_tokens=3,
        sampling={"temperature": 1.0, "seed": 1, "n": 2, "ignore_eos": True},
    )  # fmt: skip
    for run in several:
        check(plain, run, {1: [(0, range(1, len(IDS_OF_PROMPT) + 2), [0])]})


@BOTH
def test_what_cannot_be_edited_says_why(narrow, engine):
    lm = narrow.get(engine, "float32")

    def refused(error, match, edits, prompt=IDS_OF_PROMPT):
        with pytest.raises(error, match=match):
            lm.run(prompt, edits=edits, max_tokens=2)

    at = pc.pattern[1, 0]
    refused(pc.TokensError, r"edits\[0\].tokens: .* position 0",
            pc.Knockout("prompt[0]", at))  # fmt: skip
    refused(pc.TokensError, r"edits\[0\].tokens: the token at position 0", pc.Knockout("every", at), IDS_OF_PROMPT[:1])
    both = [pc.Knockout("prompt[0:2]", at, "prompt[2]"), pc.Knockout("prompt[2]", at, "prompt[2]")]
    with pytest.raises(pc.TokensError, match="position 2"):
        lm.run(IDS_OF_PROMPT, edits=both, max_tokens=2, capture=pc.z[1])[pc.z[1]]
    refused(pc.TokensError, r"edits\[0\].keys: .*generated", pc.Knockout(pc.token(9), at, "prompt[5:]"))
    refused(pc.TokensError, r"edits\[0\].tokens: .*generated", pc.Knockout("prompt[0]", at, pc.token(21)))
    refused(pc.TokensError, r"edits\[0\].keys: prompt\[50:\]", pc.Knockout("prompt[50:]", at, "prompt[5:]"))
    refused(pc.ShapeError, r"edits\[0\].value: .*40.* got 2",
            pc.Replace(np.ones((2, 5)), at, pc.prompt))  # fmt: skip
    refused(pc.ShapeError, r"edits\[0\].value: .* 41", pc.Replace(np.ones(42), at))
    refused(pc.TokensError, r"edits\[0\].value: .* 5", pc.Replace(np.ones((2, 7)), at, "prompt[6, 5]"))
    probe = pc.Probe(np.ones(lm.model.d_model), pc.resid_post[0], name="p")
    refused(pc.ProgramError, "attention",
            pc.When(probe > 0, pc.Knockout("prompt[0]", at, "prompt[5:]")))  # fmt: skip
    refused(pc.UnsupportedSite, "8 layers", pc.Knockout("prompt[0]", pc.pattern[40], "prompt[5:]"))
    grades = lm.grade(IDS_OF_PROMPT, programs=[pc.Knockout("prompt[0]", at, "prompt[5:]")], score=[5])
    assert (grades.route, np.isfinite(grades.logprobs).all()) == ("requests", True)
    assert engine == "transformers" or "edits of attention" in grades.route_reason


@BOTH
def test_a_query_whose_window_is_removed_fails_alone(engine, tmp_path, inspected_here):
    folder = of_family(tmp_path, "mistral")
    options = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26} if engine == "vllm" else {}
    with pc.LM(folder, engine=engine, **IDS, **options) as lm:
        knockout = pc.Knockout("prompt[5:40]", pc.pattern[0], "prompt[39]")
        row = np.eye(40)[[39]] / 2
        beyond = pc.Replace(row + np.eye(40)[[0]], pc.pattern[0, 1], "prompt[39]")  # a key that the query does not see
        edits = [[knockout], [], [pc.Scale(0, pc.pattern[0], "prompt[39]", keys="prompt[5:40]")], [beyond],
                 [pc.Replace(row, pc.pattern[0, 1], "prompt[39]")]]  # fmt: skip
        runs = lm.run([IDS_OF_PROMPT] * 5, edits=edits, max_tokens=2, capture=[pc.z[1], pc.pattern[0]])
        for run in (runs[0], runs[3]):
            with pytest.raises(pc.TokensError, match="position 39"):
                run[pc.z[1]]
        assert all(runs[i][pc.z[1]].isfinite().all() for i in (1, 2, 4))
        torch.testing.assert_close(runs[4][pc.pattern[0]][39, 1, :40], torch.tensor(row[0], dtype=torch.float32))


def test_what_fails_within_an_edit_of_attention_is_told_as_that(narrow, monkeypatch):
    lm = narrow.get("transformers", "float32")
    monkeypatch.setattr(sys.modules["patchclamp.runtime.attention"], "edited", lambda *args: 1 / 0)
    knockout = pc.Knockout("prompt[0]", pc.pattern[1], "prompt[5:]")
    with pytest.raises(pc.RunError, match=r"edits\[0\]: .*ZeroDivisionError"):
        lm.run(IDS_OF_PROMPT, edits=knockout, max_tokens=1)


def test_the_text_form_is_read_back():
    edits = [
        pc.Knockout("prompt[0]", "blocks.3.attn.hook_pattern", "prompt[5:]"),
        pc.Scale(0.5, "pattern[1, 0]", keys="prompt[1:3]"),
        pc.Replace([0.5, 0.5], "pattern[1, 0]", "prompt[3]"),
    ]
    program = pc.Program.of(edits, [])
    assert from_dict(to_dict(program)) == program
    assert str(edits[0].at) == "pattern[3]"


@pytest.mark.parametrize(
    "make",
    [
        lambda: pc.Add([1.0], "pattern[1]"), lambda: pc.Zero("pattern[1]"), lambda: pc.Scale(2, "attn_scores[1]"),
        lambda: pc.Knockout("prompt[0]", "z[1]"), lambda: pc.Scale(2, "z[1]", keys="prompt"),
        lambda: pc.Replace([1.0], "pattern[1]"), lambda: pc.Replace([1.0], "pattern[1:3, 0]"),
        lambda: pc.Replace(pc.From("r", "pattern[1, 0]"), "pattern[1, 0]"),
        lambda: pc.Replace([1.0], "pattern[1, 0]", mask=[1.0]), lambda: pc.Knockout("prompt[0]", "attn_scores[1]"),
    ],
)  # fmt: skip
def test_ops_that_do_not_edit_attention_are_refused(make):
    with pytest.raises((pc.ProgramError, pc.UnsupportedSite)):
        make()


@BOTH
def test_an_edge_sweep_is_its_knockouts(narrow, engine):
    lm, ids = narrow.get(engine, "float32"), IDS_OF_PROMPT[:6]
    options = {
        "prompt": ids,
        "answer": 9,
        "metric": "logprob",
        "positions": {"first": "prompt[0]", "two": "prompt[2:4]"},
    }
    sweep = pc.studies.edge_sweep(lm, **options, queries=["prompt[-1]", "prompt[3:]"], layers="0:3", window=2)
    labels = [column.label.partition(" → ")[0] for column in sweep.columns]
    assert (labels, [row.layers for row in sweep.rows]) == (["first", "two"] * 2, [(0,), (0, 1), (1, 2)])
    cells = [(row, column) for row in sweep.rows for column in sweep.columns]
    edits = [[pc.Knockout(pc.every[column.corrupt], at, pc.every[column.clean]) for at in row.sites]
             for row, column in cells]  # fmt: skip
    grades = lm.grade(ids, edits, score=[9])
    np.testing.assert_allclose(sweep.values.ravel(), grades.logprobs[:, 0], atol=1e-5)
    assert np.ptp(sweep.values) > 1e-3
    by_head = pc.studies.edge_sweep(lm, **options, layers=1, window=1, group=1)
    assert [row.index for row in by_head.rows] == [str(head) for head in range(lm.sites.sizes.heads)]
    for wrong in (
        {"queries": "prompt[0]", "positions": "prompt[3]"}, {"queries": "prompt[0]", "positions": ["prompt[0]", "prompt[3]"]},
        {"queries": "prompt[0]", "positions": None}, {"positions": ["prompt"]},
    ):  # fmt: skip
        with pytest.raises(pc.TokensError, match="positions"):
            pc.studies.edge_sweep(lm, **(options | wrong))


@BOTH
@pytest.mark.parametrize("queries", ["prompt", ["prompt[0]", "prompt[2]", "prompt[-1]"]], ids=["one", "several"])
def test_an_edge_sweep_leaves_out_queries_that_would_see_nothing(narrow, engine, queries):
    lm, ids = narrow.get(engine, "float32"), IDS_OF_PROMPT[:4]
    sweep = pc.studies.edge_sweep(lm, prompt=ids, answer=9, metric="logprob", queries=queries, layers="1:3", window=2)
    assert [(side, position) for side, position, _ in sweep.skipped] == [("clean", 0)]
    edges = [(column.corrupt, column.clean) for column in sweep.columns]
    assert edges == (
        [((0,), (1, 2, 3)), ((1,), (1, 2, 3)), ((2,), (2, 3)), ((3,), (3,))] if queries == "prompt"
        else [((key,), (query,)) for query in (2, 3) for key in range(query + 1)]
    )  # fmt: skip
    edits = [
        [pc.Knockout(pc.every[keys], at, pc.every[of]) for at in row.sites] for row in sweep.rows for keys, of in edges
    ]
    grades = lm.grade(ids, edits, score=[9])
    np.testing.assert_allclose(sweep.values.ravel(), grades.logprobs[:, 0], atol=1e-5)
    assert np.abs(sweep.effect).max() > 1e-3


@BOTH
def test_an_edge_sweep_has_the_same_edges_in_every_prompt(narrow, engine):
    """As many edges are not enough: a mean is over prompts of one edge."""
    lm, prompts = narrow.get(engine, "float32"), [IDS_OF_PROMPT[:6], IDS_OF_PROMPT[10:20]]
    options = {"answer": 9, "metric": "logprob", "queries": ["prompt[3]", "prompt[4]"], "layers": 1, "window": 1}
    crossed = {"a": ["prompt[0]", "prompt[4]"], "b": ["prompt[4]", "prompt[0]"]}
    with pytest.raises(pc.TokensError, match="queries: "):
        pc.studies.edge_sweep(lm, prompt=prompts, positions=crossed, **options)
    sweep = pc.studies.edge_sweep(lm, prompt=prompts, positions={"a": "prompt[1]", "b": ["prompt[4]"] * 2}, **options)
    assert [column.label for column in sweep.columns] == ["a → prompt[3]", "a → prompt[4]", "b → prompt[4]"]
    alone = [pc.studies.edge_sweep(lm, prompt=ids, positions=["prompt[1]"], **options).values for ids in prompts]
    np.testing.assert_allclose(sweep.values[:, :2], np.mean(alone, 0), atol=1e-5)


@pytest.mark.parametrize("can", [True, False])
def test_graded_programs_that_only_remove_keys_are_cells_if_the_engine_can(narrow, monkeypatch, can):
    """Requests keep the edits of patterns."""
    lm = narrow.get("transformers", "float32")
    monkeypatch.setattr(type(lm.engine), "removes_keys", can)
    cut = pc.Knockout(pc.prompt[0, 2], pc.pattern[0:2, 1], pc.prompt[-1])
    scaled, zero = pc.Scale(0.5, pc.pattern[0], pc.prompt[-1], keys=pc.prompt[1]), pc.Zero(pc.mlp_out[1])
    job = lm.grade_job(IDS_OF_PROMPT, [cut, [zero, cut], scaled, [cut, scaled], [cut] * 33, None], [[((), 5)]])
    assert sorted(job.refused) == ([2, 3, 4] if can else [0, 1, 2, 3, 4])  # a row reads at most 64 ranges of keys
    kinds = {
        i: list(of["kind"]) for group in job.cells().groups for i, of in zip(group.number, group.records, strict=True)
    }
    assert kinds == ({0: [REMOVE] * 4, 1: [REMOVE] * 4 + [LINEAR]} if can else {})
    for number in range(5):
        bound = job.bound(number)
        assert bound is not None
        assert any(isinstance(op.action, Attended) for op in bound.ops)
