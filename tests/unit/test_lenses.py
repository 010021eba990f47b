"""Lens readouts on the fake engine: equal to `logit_lens`, in every form and order."""

import itertools
import json
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines.lenses import likeliest
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.plan.bind import Bindings
from patchclamp.plan.verify import verify
from patchclamp.proving import prove_lens
from patchclamp.studies import logit_lens
from patchclamp.testing import _norm

PROMPT = [1, 2, 3, 7, 5, 7, 8]


@pytest.fixture(scope="module")
def lm():
    with pc.LM("fake", engine="fake") as lm:
        yield lm


@pytest.fixture(scope="module")
def expected(lm):
    return logit_lens(lm, PROMPT, top=6)


def test_a_lens_equals_logit_lens(lm, expected):
    run = lm.run(PROMPT, max_tokens=1, capture=pc.Lens(pc.resid_post, top=6))
    read = run.lens[pc.resid_post]
    assert read.layers == expected.layers == (0, 1, 2)
    assert read.positions == list(range(7))
    assert (read.ids.dtype, read.logprobs.dtype) == (np.int32, np.float32)
    assert np.array_equal(read.ids, expected.top_ids)
    assert np.abs(read.logprobs - np.log(expected.top_probs)).max() < 1e-5
    assert read.tokens[1][2] == [expected.texts[token] for token in expected.top_ids[1, 2].tolist()]
    one = run.lens[pc.resid_post[1]]
    assert (one.layers, one.ids.shape) == ((), (7, 6))
    assert np.array_equal(one.ids, read.ids[1])
    assert list(run.lens) == ["resid_post[0]", "resid_post[1]", "resid_post[2]"]
    assert (run.sites, run.has_captures) == ([], False)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_lens_reads_the_tokens_that_it_selects(chunk):
    with pc.LM("fake", engine="fake", chunk=chunk) as lm:
        selections = [pc.prompt[-1], pc.generated, pc.token(7), pc.prompt[1:4], pc.every]
        for tokens, prompt in itertools.product(selections, (PROMPT, [7])):
            run = lm.run(prompt, max_tokens=5, capture=[pc.Lens(pc.mlp_out[1:3], tokens), pc.resid_mid @ tokens])
            read, whole = run.lens[pc.mlp_out[2]], lm.run(prompt, max_tokens=5, capture=pc.Lens(pc.mlp_out[2], top=5))
            assert read.positions == run.positions(pc.resid_mid)
            rows = [whole.lens[pc.mlp_out[2]].positions.index(position) for position in read.positions]
            assert np.array_equal(read.logprobs, whole.lens[pc.mlp_out[2]].logprobs[rows])


def test_lenses_captures_and_probes_share_a_site(lm):
    at = pc.resid_post[1]
    edits = [pc.Lens(at, top=2), pc.Scale(-3.0, at=at), pc.Lens(at, pc.prompt[0])]
    run = lm.run(PROMPT, edits=edits, capture=[at, pc.Lens(at, top=4), pc.Probe(np.ones(16), at=at, name="p")])
    plain = lm.run(PROMPT, capture=[at, pc.Lens(at, top=2)])
    assert np.array_equal(run.lens["edits[0]"].ids[:7], plain.lens[at].ids[:7])
    assert run.lens["edits[2]"].ids.shape == (1, 5)
    assert run.lens[at].ids[0].tolist() == run.lens["edits[2]"].ids[0, :4].tolist()
    assert not np.array_equal(run.lens[at].ids[:7, :2], plain.lens[at].ids[:7])
    assert np.allclose(run[at][:7], -3 * plain[at][:7])
    assert run.probes["p"].shape == (len(run[at]), 1)
    assert run.sites == plain.sites
    assert repr(run).endswith("a lens of 1 site>")


def test_parts_of_a_stream_have_what_the_run_has(lm):
    lenses = [pc.Lens(pc.resid_post, top=3), pc.Lens(pc.mlp_out[0] @ pc.generated, top=2),
              pc.Lens(pc.mlp_out[1] @ pc.prompt[:2], top=2)]  # fmt: skip
    for prompt, max_tokens in itertools.product((PROMPT, [7]), (1, 5)):
        stream = lm.stream(prompt, max_tokens=max_tokens, capture=lenses)
        parts, run = list(stream), stream.run
        for site in (*run.lens, "blocks.1.hook_resid_post", pc.resid_post):
            reads, whole = [part.lens[site] for part in parts], run.lens[site]
            assert {read.layers for read in reads} == {whole.layers}
            assert [at for read in reads for at in read.positions] == whole.positions
            assert np.array_equal(np.concatenate([read.ids for read in reads], -2), whole.ids)
            assert np.array_equal(np.concatenate([read.logprobs for read in reads], -2), whole.logprobs)
        assert list(parts[0].lens) == list(run.lens)
        with pytest.raises(pc.MissingSource, match=r"resid_post\[0\]"):
            parts[0].lens[pc.attn_out[0]]
        with pytest.raises(pc.ProgramError, match="one layer"):
            parts[0].lens[pc.mlp_out[:2]]
    assert not any(part.lens for part in lm.stream(PROMPT, max_tokens=3, capture=pc.resid_post))
    huge = {1: np.full((16, 16), 3e38)}
    with pytest.raises(pc.NotFinite):
        list(lm.stream(PROMPT, max_tokens=2, capture=pc.Lens(pc.resid_post[1], translators=huge)))


def test_many_runs_are_read_together(lm, monkeypatch):
    runs = lm.run([PROMPT, PROMPT[:1], PROMPT[2:]], capture=[pc.Lens(pc.resid_post), pc.Lens(pc.attn_out[0], top=1)])
    calls, stock = [], lm.engine.lens_many
    monkeypatch.setattr(
        lm.engine, "lens_many", lambda wanted, top, *of: calls.append((len(wanted), top)) or stock(wanted, top, *of)
    )
    lenses = lm.lens(runs)
    assert sorted(calls) == [(3, 1), (9, 5)]
    assert [len(each) for each in lenses] == [4] * 3
    for run, lens in zip(runs, lenses, strict=True):
        assert lens["attn_out[0]"].ids.shape == (run.positions_computed, 1)
        run.close()
        assert lens[pc.resid_post].ids.shape == (3, run.positions_computed, 5)
    assert sorted(calls) == [(3, 1), (9, 5)]


def translators(layers, width=16):
    """Matrices and biases by layer, and one matrix alone."""
    draw = np.random.default_rng(3)
    made = {layer: (np.eye(width) + 0.3 * draw.standard_normal((width, width)), draw.standard_normal(width))
            for layer in layers}  # fmt: skip
    return made | {layers[0]: made[layers[0]][0]}


def test_translators_map_rows_before_they_are_read(lm):
    maps = translators([2, 0])
    run = lm.run(PROMPT, capture=[pc.Lens(pc.resid_post, translators=maps), pc.resid_post])
    read, theirs = run.lens[pc.resid_post], logit_lens(lm, PROMPT, translators=maps)
    assert read.layers == theirs.layers == (0, 2)
    assert theirs.lens == "translated lens"
    for i, layer in enumerate((0, 2)):
        matrix, bias = maps[layer] if layer == 0 else (maps[layer], 0.0)
        logits = lm.engine._net.unembed(_norm(np.asarray(run[pc.resid_post[layer]]) @ matrix.T + bias))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert np.abs(read.logprobs[i] - np.sort(logprobs)[:, ::-1][:, :5]).max() < 1e-4
        assert np.abs(read.logprobs[i, :7] - np.log(theirs.top_probs[i])).max() < 1e-4
    plain = lm.run(PROMPT, capture=pc.Lens(pc.resid_post)).lens[pc.resid_post]
    assert np.abs(plain.logprobs[[0, 2]] - read.logprobs).max() > 0.1


def test_lenses_with_and_without_translators_share_a_run(lm, monkeypatch):
    maps, eye = translators([0, 1]), {1: np.eye(16)}
    lenses = [pc.Lens(pc.resid_post[1]), pc.Lens(pc.resid_post[1], translators=eye),
              pc.Lens(pc.resid_post[1], translators=maps)]  # fmt: skip
    runs, calls, stock = lm.run([PROMPT, PROMPT[:2]], capture=lenses), [], lm.engine.lens_many
    monkeypatch.setattr(lm.engine, "lens_many", lambda wanted, *of: calls.append(len(wanted)) or stock(wanted, *of))
    for lens in lm.lens(runs):
        plain, same, other = (lens[f"capture[{i}]"] for i in range(3))
        assert np.array_equal(plain.logprobs, same.logprobs)
        assert not np.array_equal(plain.logprobs, other.logprobs)
    assert calls == [2, 2, 2]


def test_a_lens_reads_the_layers_that_have_a_translator():
    eye = dict.fromkeys((0, 1, 4, 2), np.eye(4))

    def layers(at):
        lens = pc.Lens(at, translators=eye)
        assert [one.layer for one in lens.translators] == [lens.at.layers] if isinstance(lens.at.layers, int) else [
            *lens.at.layers]  # fmt: skip
        return lens.at.layers

    assert layers(pc.resid_post) == (0, 1, 2, 4)
    assert layers(pc.resid_post[::2]) == (0, 2, 4)
    assert layers(pc.resid_post[[2, 1]]) == (2, 1)
    assert layers(pc.resid_post[4]) == 4
    for at in (pc.resid_post[1:], pc.resid_post[:6], pc.resid_post[-1], pc.resid_post[-2:], pc.resid_post[9:]):
        with pytest.raises(pc.ProgramError, match="no translator") as raised:
            pc.Lens(at, translators=eye)
        assert raised.value.path == "translators"


@pytest.mark.parametrize(
    ("given", "error", "path"),
    [
        ({}, pc.ProgramError, "translators"),
        ([np.eye(4)], pc.ProgramError, "translators"),
        ({True: np.eye(4)}, pc.ProgramError, "translators[True]"),
        ({-1: np.eye(4)}, pc.ProgramError, "translators[-1]"),
        ({"0": np.eye(4)}, pc.ProgramError, "translators['0']"),
        ({0: np.eye(4)[:3]}, pc.ShapeError, "translators[0]"),
        ({0: (np.eye(4), np.ones(3))}, pc.ShapeError, "translators[0]"),
        ({0: (np.eye(4), np.full(4, np.inf))}, pc.ShapeError, "translators[0]"),
        ({0: "eye"}, pc.ShapeError, "translators[0]"),
        ("none.safetensors", pc.ProgramError, "translators"),
        ("params.pt", pc.ProgramError, "translators"),
    ],
)
def test_invalid_translators_are_refused_with_their_layer(given, error, path):
    with pytest.raises(error) as raised:
        pc.Lens(pc.resid_post[0], translators=given)
    assert raised.value.path == path


def test_translators_of_another_model_are_refused_before_it_runs(lm, monkeypatch):
    monkeypatch.setattr(lm.engine, "submit", None)
    for maps, kind, path in (
        ({1: np.eye(8)}, pc.ShapeError, "translators[1]"),
        ({7: np.eye(16)}, pc.UnsupportedSite, "at"),
    ):
        with pytest.raises(kind) as raised:
            lm.run(PROMPT, capture=[pc.resid_post, pc.Lens(pc.resid_post, translators=maps)])
        assert raised.value.path == f"capture[1].{path}"


def test_translators_travel_with_their_program():
    plain, maps = pc.Program.of([], pc.Lens(pc.resid_post[1])), translators([0, 1], 3)
    program = pc.Program.of([], pc.Lens(pc.resid_post, translators=maps))
    assert pc.Program.from_json(program.to_json()) == program
    assert pc.Program.from_json(program.to_json()).fingerprint == program.fingerprint
    assert "translators" not in plain.to_json()  # older programs keep their fingerprint
    data = json.loads(program.to_json())
    maps = data["capture"][0]["translators"]
    wrong = ["lens.safetensors", {"0": maps[0]}, [*maps, {}], [*maps, maps[0]], [maps[0] | {"layer": -1}], [maps[0] | {"more": 1}],
             [maps[0] | {"matrix": "bank"}], [maps[0] | {"matrix": maps[1]["bias"]}], [maps[0] | {"layer": 1.5}], []]  # fmt: skip
    for each in wrong:
        data["capture"][0]["translators"] = each
        with pytest.raises(pc.ProgramError) as raised:
            pc.Program.from_json(json.dumps(data))
        assert raised.value.path.startswith("capture[0].translators")


@pytest.mark.parametrize(("at", "layer"), [
    ("resid_post[0:20000000]", 0), ("resid_post[0:999999999]", 3), ("resid_post[0:]", 1 << 40), ("resid_post[::7]", 1 << 70),
    ("resid_post", 1 << 16), ("resid_post[1:999999999:2]", 1),
])  # fmt: skip
def test_an_endless_range_of_layers_costs_nothing(at, layer):
    """A client names it in a few bytes, before the model's layers are known."""
    data = json.loads(pc.Program.of([], pc.Lens(pc.resid_post, translators={0: [[1.0]]})).to_json())
    data["capture"][0] |= {"at": at}
    data["capture"][0]["translators"][0] |= {"layer": layer}
    tracemalloc.start()
    with pytest.raises(pc.PatchclampError) as raised:
        pc.Program.from_json(json.dumps(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raised.value.path.startswith("capture[0].translators")
    assert (len(str(raised.value)) < 300, peak < 1 << 20) == (True, True)


def test_an_error_names_the_translator():
    data = json.loads(pc.Program.of([], pc.Lens(pc.resid_post, translators=translators([0, 1]))).to_json())
    data["capture"][0]["translators"][1]["matrix"]["shape"] = [16, 15]
    with pytest.raises(pc.PatchclampError) as raised:
        pc.Program.from_json(json.dumps(data))
    assert raised.value.path.startswith("capture[0].translators[1]")


def test_a_lens_sends_the_matrix_of_the_layer_that_is_read(lm, monkeypatch):
    maps, sent, stock = translators([0, 1, 2]), [], lm.engine.lens_many
    runs = lm.run([PROMPT, PROMPT[:2]], max_tokens=1, capture=pc.Lens(pc.resid_post, translators=maps))
    monkeypatch.setattr(lm.engine, "lens_many", lambda wanted, top, of: sent.append(of.layer) or stock(wanted, top, of))
    assert all(len(run.lens[pc.resid_post[1]].ids) == len(run.prompt_token_ids) for run in runs)
    assert sent == [1, 1]
    lm.lens(runs)
    assert sent == [1, 1, 0, 2]


def test_logits_that_are_not_finite_are_an_error(lm):
    run = lm.run(PROMPT, max_tokens=1, capture=pc.Lens(pc.resid_post[1], translators={1: np.full((16, 16), 3e38)}))
    with pytest.raises(pc.NotFinite):
        run.lens[pc.resid_post[1]]


def test_a_run_that_is_not_finite_fails_no_other_when_many_are_read(lm):
    """Nor another site of the same run; a stream fails where it reads."""
    site = pc.resid_post[1]
    huge = [pc.Lens(site, translators={1: np.full((16, 16), 3e38)}), pc.Lens(pc.attn_out[0], top=1)]
    runs = [lm.run(PROMPT, max_tokens=1, capture=capture) for capture in (pc.Lens(site), huge, pc.Lens(site, top=2))]
    first, bad, last = lm.lens(runs)
    assert first[site].ids[:, :2].tolist() == last[site].ids.tolist()
    assert len(bad[pc.attn_out[0]].ids) == len(PROMPT)
    with pytest.raises(pc.NotFinite):
        bad[site]
    with pytest.raises(pc.NotFinite):
        list(lm.stream(PROMPT, max_tokens=2, capture=huge))


def test_a_frame_has_a_row_for_each_rank(lm):
    run = lm.run(PROMPT, capture=pc.Lens(pc.resid_post[[2, 0]] @ pc.prompt[1:3], top=3), max_tokens=1)
    read = run.lens[pc.resid_post[[2, 0]]]
    frame = read.to_frame()
    assert list(frame.columns) == ["layer", "position", "rank", "token", "token_id", "logprob"]
    assert frame["layer"].tolist() == [2] * 6 + [0] * 6
    assert frame["position"].tolist() == [1, 1, 1, 2, 2, 2] * 2
    assert frame["token"].tolist() == lm.tokenizer.token_strings(read.ids.ravel().tolist())
    assert "layer" not in run.lens[pc.resid_post[0]].to_frame()


@pytest.mark.parametrize(
    ("make", "error", "path"),
    [
        (lambda: pc.Lens(pc.z[0]), pc.UnsupportedSite, "at"),
        (lambda: pc.Lens(pc.final_norm), pc.UnsupportedSite, "at"),
        (lambda: pc.Lens(pc.logits), pc.UnsupportedSite, "at"),
        (lambda: pc.Lens(pc.neurons[1, 3]), pc.UnsupportedSite, "at"),
        (lambda: pc.Lens(pc.embed), pc.UnsupportedSite, "at"),
        (lambda: pc.Lens("nowhere"), pc.UnknownName, "at"),
        (lambda: pc.Lens(pc.resid_post, top=0), pc.ProgramError, "top"),
        (lambda: pc.Lens(pc.resid_post, top=129), pc.ProgramError, "top"),
        (lambda: pc.Lens(pc.resid_post, top=1.5), pc.ProgramError, "top"),
    ],
)
def test_an_invalid_lens_is_refused_with_its_field(make, error, path):
    with pytest.raises(error) as raised:
        make()
    assert raised.value.path == path


def test_a_lens_that_does_not_fit_is_refused_with_its_path(lm):
    for capture, path in ((pc.Lens(pc.resid_post, top=65), "top"), (pc.Lens(pc.resid_post[9]), "at")):
        with pytest.raises(pc.PatchclampError) as raised:
            lm.run(PROMPT, capture=[pc.resid_post, capture])
        assert raised.value.path == f"capture[1].{path}"
    assert lm.run(PROMPT, capture=pc.Lens(pc.resid_post[0], top=64)).lens[pc.resid_post[0]].ids.shape[1] == 64


def test_grades_have_no_lenses(lm):
    with pytest.raises(pc.ProgramError, match="lenses") as raised:
        lm.grade(PROMPT, [pc.Zero(pc.mlp_out[0])], score=[3], capture=[pc.resid_post[0], pc.Lens(pc.resid_post[0])])
    assert raised.value.path == "capture[1]"


def test_a_site_that_no_lens_read_names_those_that_there_are(lm):
    run = lm.run(PROMPT, capture=[pc.Lens(pc.resid_post[0]), pc.Lens(pc.resid_post[1], pc.prompt[0]), pc.resid_post[2]])
    sites = (pc.resid_post[0], "resid_pre[1]", "capture[1]", pc.resid_post, pc.resid_post[2], pc.resid_post[0:3])
    assert [site in run.lens for site in sites] == [True] * 4 + [False] * 2
    with pytest.raises(pc.MissingSource, match=r"resid_post\[0\]"):
        run.lens[pc.resid_post[2]]
    with pytest.raises(pc.ProgramError, match="one layer"):
        run.lens[pc.resid_post]
    run.close()
    closed = lm.run(PROMPT, capture=pc.Lens(pc.resid_post[0]))
    closed.close()
    with pytest.raises(pc.MissingSource, match="closed"):
        closed.lens[pc.resid_post[0]]


def test_programs_with_lenses_have_a_text_form():
    program = pc.Program.of([pc.Lens(pc.resid_mid[1])], [pc.Lens(pc.resid_post[0:2] @ pc.prompt[-1], top=7)])
    assert pc.Program.from_json(program.to_json()) == program
    assert program.fingerprint == pc.Program.from_json(program.to_json()).fingerprint


def test_a_model_whose_unembedding_is_not_proved_has_no_lens(monkeypatch):
    with pc.LM("fake", engine="fake", prove=False) as lm:
        assert prove_lens(lm).holds
        net, stock = lm.engine._net, lm.engine._net.unembed
        monkeypatch.setattr(lm.engine, "lens_many", lambda wanted, top, *_: _flat(lm, wanted, top))
        proof = prove_lens(lm)
        assert not proof.holds
        assert (net.unembed, "log-probabilities" in proof.note) == (stock, True)
        lm.sites.withdrawn["lens"] = proof.note
        with pytest.raises(pc.UnsupportedSite, match="unembedding") as raised:
            lm.run(PROMPT, capture=pc.Lens(pc.resid_post))
        assert raised.value.path == "capture[0]"


def _flat(lm, wanted, top):
    ids = np.arange(top, dtype=np.int32)
    at = [lm.engine.fetch(*each)[0] for each in wanted]
    return [(of, np.tile(ids, (len(of), 1)), np.full((len(of), top), -np.log(64), np.float32)) for of in at]


def test_bound_lenses_are_verified_on_arrival(lm):
    prompt = prompt_of(lm.tokenizer, PROMPT, None, None, [])
    bindings = Bindings(lm.sites, lm._source, lm.bank, False)
    program = pc.Program.of([], [pc.Lens(pc.resid_post), pc.Capture(pc.z[0], pc.prompt)])
    bound = bindings.of(program, "run", prompt, 1).bound
    lens, other = bound.ops

    def check(op):
        verify(msgspec.structs.replace(bound, ops=(op,)), {}, len(PROMPT), len(PROMPT), lm.sites)

    check(lens)
    wrong = [msgspec.structs.replace(lens, points=other.points), msgspec.structs.replace(lens, columns=1 << 16)]
    wrong += [
        msgspec.structs.replace(lens, action=msgspec.structs.replace(lens.action, **change))
        for change in ({"dtype": 1}, {"pool": 1}, {"matrix": "v:" + "0" * 64, "products": 2}, {"probe": "p"})
    ]
    wrong.append(msgspec.structs.replace(lens, points=lm.run(PROMPT, capture=pc.final_norm)._bound.ops[0].points))
    for op in wrong:
        with pytest.raises(pc.ProgramError):
            check(op)


@pytest.mark.parametrize("vocabulary", [7, 511, 512, 513, 1000, 49_152])
def test_the_likeliest_of_chunks_are_those_of_the_row(vocabulary):
    draw = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary, generator=draw)
    logits[1] = logits[1].round()  # with ties
    for top in (1, 5, min(128, vocabulary)):
        ids, logprobs = likeliest(logits, min(top, vocabulary))
        expected = logits.log_softmax(-1).topk(min(top, vocabulary))
        torch.testing.assert_close(logprobs, expected.values)
        torch.testing.assert_close(logits.log_softmax(-1).gather(1, ids), logprobs)
        assert all(len(set(row)) == len(row) for row in ids.tolist())
