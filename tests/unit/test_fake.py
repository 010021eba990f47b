"""The fake engine: the guarantees of the design's section 6 on a model small enough to compare bit for bit."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.engines.base import Request
from patchclamp.language.program import Program
from patchclamp.plan import Prompt, bind
from patchclamp.plan.bind import vector_key
from patchclamp.testing import BOS, EOS, FakeTokenizer

EIFFEL, COLOSSEUM = "The Eiffel Tower is in", "The Colosseum is in the"
STREAM = ("embed", "resid_pre", "resid_mid", "resid_post")
LAYERED = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
EVERYWHERE = [pc.embed, *(pc.site(name) for name in LAYERED), pc.final_norm, pc.logits]


@dataclasses.dataclass
class Seen:
    """All that a run shows, to be compared bit for bit."""

    token_ids: list
    logprobs: list
    rows: dict


def seen(run: pc.Run) -> Seen:
    rows = {name: (run.positions(name), run[name].tobytes()) for name in run.sites}
    return Seen(run.token_ids, run.logprobs, rows)


def push(lm: pc.LM, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(lm.model.d_model).astype(np.float32)


# -- the model


def test_opens_without_torch():
    code = (
        "import sys, patchclamp as pc\n"
        "lm = pc.LM('fake')\n"
        "run = lm.run('hello world', capture=[pc.resid_post])\n"
        "assert run[pc.resid_post[0]].shape == (18, 16)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_decoder_is_the_one_of_the_books(lm):
    """The whole forward pass written once more, over all positions at once with BLAS products."""
    net, ids = lm.engine._net, lm.tokens(EIFFEL)
    h, t = net._embedding_VD[ids], np.arange(len(ids))

    def norm(x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)

    def heads(x):
        return x.reshape(len(ids), net._heads, -1).transpose(1, 0, 2)

    def rotate(x):
        half = x.shape[-1] // 2
        turn = np.exp(1j * t[:, None] * 10000.0 ** -(np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate((turned.real, turned.imag), -1)

    for layer in net._layers:
        n = norm(h)
        q, k, v = rotate(heads(n @ layer.q_DD)), rotate(heads(n @ layer.k_DD)), heads(n @ layer.v_DD)
        score = np.where(t[:, None] >= t, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -np.inf)
        weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        h = h + (weight @ v).transpose(1, 0, 2).reshape(h.shape) @ layer.o_DD
        n = norm(h)
        gate = n @ layer.gate_DM
        h = h + (gate / (1 + np.exp(-gate)) * (n @ layer.up_DM)) @ layer.down_MD
    run = lm.run(EIFFEL, max_tokens=1, capture=[pc.resid_post[-1], pc.final_norm, pc.logits], logprobs=True)
    logits = norm(h) @ net._unembedding_DV
    np.testing.assert_allclose(run["resid_post[2]"], h, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run["final_norm"], norm(h), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run["logits"], logits[-1:], rtol=1e-4, atol=1e-5)
    logprobs = logits[-1] - np.log(np.exp(logits[-1]).sum())
    assert run.token_ids == [int(logits[-1].argmax())]
    np.testing.assert_allclose(run.logprobs, [logprobs.max()], rtol=1e-4)


def test_facts_and_seeds():
    lm = pc.LM("fake", layers=2, d_model=8, d_vocab=70, heads=1, max_model_len=32, seed=5)
    assert (lm.model.layers, lm.model.d_model, lm.model.d_vocab, lm.model.max_model_len) == (2, 8, 70, 32)
    assert (lm.model.name, lm.model.engine, lm.model.version) == ("fake", "fake", pc.__version__)
    assert lm.sites.names == [
        *("embed", "resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in", "neurons", "mlp_out"),
        *("resid_post", "final_norm", "logits"),
    ]
    again, other = pc.LM("fake", seed=5), pc.LM("fake", seed=6)
    first = pc.LM("fake", seed=5).run(EIFFEL, logprobs=True)
    assert seen(first) == seen(again.run(EIFFEL, logprobs=True))
    assert first.logprobs != other.run(EIFFEL, logprobs=True).logprobs


def test_the_words_of_the_stream_agree(lm):
    run = lm.run(EIFFEL, max_tokens=3, capture=EVERYWHERE)
    for layer in range(3):
        pre, mid, post = (run[f"{name}[{layer}]"] for name in ("resid_pre", "resid_mid", "resid_post"))
        assert np.array_equal(pre + run[f"attn_out[{layer}]"], mid)
        assert np.array_equal(mid + run[f"mlp_out[{layer}]"], post)
    assert np.array_equal(run["embed"], run["resid_pre[0]"])
    assert np.array_equal(run["resid_post[0]"], run["resid_pre[1]"])
    assert run.positions("embed") == list(range(len(run.prompt_token_ids) + 2))
    assert run.positions("logits") == run.positions("embed")[-3:]
    assert run["logits"].argmax(-1).tolist() == run.token_ids
    assert run["logits"].dtype == np.float32


def test_stops_at_the_end_token_unless_told_not_to():
    lm = pc.LM("fake", seed=3)
    prompts = [f"{start} {word}" for start in "abcdefgh" for word in ("cat", "dog", "city")]
    stopped = [run for run in lm.run(prompts, max_tokens=12) if run.finish_reason == "stop"]
    assert stopped
    for run in stopped:
        assert run.token_ids[-1] == EOS
        assert "</s>" not in run.text
        on = lm.run(run.prompt_token_ids, max_tokens=12, sampling={"ignore_eos": True, "temperature": 0})
        assert on.finish_reason == "length"
        assert on.token_ids[: len(run.token_ids)] == run.token_ids
        assert len(on.token_ids) == 12


def test_captures_end_where_a_run_stops():
    lm = pc.LM("fake", seed=3)
    runs = lm.run(
        [f"{a} {w}" for a in "abcdefgh" for w in ("cat", "dog", "city")], max_tokens=12, capture=pc.embed, logprobs=True
    )
    short = [run for run in runs if run.finish_reason == "stop"]
    assert short
    for run in short:
        assert run.positions("embed") == list(range(len(run.prompt_token_ids) + len(run.token_ids) - 1))
        copied = lm.run(
            run.prompt_token_ids,
            max_tokens=len(run.token_ids),
            edits=pc.Replace(pc.From(run), at="embed"),
            logprobs=True,
        )
        assert copied.logprobs == run.logprobs


def test_scores_are_the_next_tokens_logprobs(lm):
    run = lm.run(EIFFEL, max_tokens=2, score=[5, 9, 5], capture=pc.logits, logprobs=True)
    logits = run["logits"][0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert sorted(run.scores) == [5, 9]
    np.testing.assert_allclose([run.scores[5], run.scores[9]], logprobs[[5, 9]], rtol=1e-5)
    np.testing.assert_allclose(run.logprobs[0], logprobs.max(), rtol=1e-5)


# -- guarantees


@pytest.mark.parametrize("name", STREAM)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_self_patch_is_bit_identical(lm, name, layer):
    site = pc.site(name) if name == "embed" else pc.site(name)[layer]
    base = lm.run(EIFFEL, max_tokens=4, capture=EVERYWHERE, logprobs=True)
    patched = lm.run(EIFFEL, max_tokens=4, capture=EVERYWHERE, edits=pc.Replace(pc.From(base), at=site), logprobs=True)
    moved = lm.run(EIFFEL, max_tokens=4, capture=EVERYWHERE, edits=pc.Add(push(lm), at=site, scale=0.5), logprobs=True)
    assert seen(patched) == seen(base)
    assert seen(moved).logprobs != seen(base).logprobs


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_replacing_a_whole_stream_gives_the_clean_runs_logits(lm, layer):
    assert len(lm.tokens(EIFFEL)) == len(lm.tokens(COLOSSEUM))
    clean = lm.run(EIFFEL, max_tokens=1, capture=[pc.resid_post, pc.logits], logprobs=True)
    corrupt = lm.run(COLOSSEUM, max_tokens=1, capture=[pc.logits], logprobs=True)
    edit = pc.Replace(pc.From(clean), at=pc.resid_post[layer])
    patched = lm.run(COLOSSEUM, max_tokens=1, edits=edit, capture=[pc.resid_pre[layer], pc.logits], logprobs=True)
    assert patched["logits"].tobytes() == clean["logits"].tobytes()
    assert patched["logits"].tobytes() != corrupt["logits"].tobytes()
    assert patched.logprobs == clean.logprobs
    part = lm.run(
        COLOSSEUM,
        max_tokens=1,
        capture=pc.logits,
        edits=pc.Replace(pc.From(clean), edit.at, pc.prompt[:-1]),
        logprobs=True,
    )
    assert part["logits"].tobytes() != clean["logits"].tobytes()
    above_the_last_layer = layer == 2  # nothing is left there through which one position could reach another
    assert (part["logits"].tobytes() == corrupt["logits"].tobytes()) == above_the_last_layer


def edited(lm: pc.LM, source: pc.Run) -> dict:
    """A program with every op, selections of every group, and captures in the middle."""
    return {
        "edits": [
            pc.Add(push(lm, 1), at="resid_pre[1]", tokens="prompt[1:4]", scale=0.7),
            pc.Capture(at="resid_pre[1]", tokens="every[2:6]"),
            pc.Add(np.stack([push(lm, 2), push(lm, 3)]), at="mlp_out[0]", tokens="prompt[-2:]"),
            pc.Replace(
                pc.From(source, "resid_mid[1]", pc.prompt[-1]), at="resid_mid[2]", tokens="generated[0:2]", alpha=0.5
            ),
            pc.Zero(at="attn_out[1]", tokens="prompt[0]"),
            pc.Add(np.eye(64, dtype=np.float32)[7], at="logits", tokens="generated[1]", scale=50.0),
        ],
        "capture": EVERYWHERE,
    }


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_do_not_matter(chunk):
    whole, cut = pc.LM("fake"), pc.LM("fake", chunk=chunk)
    found = []
    for lm in (whole, cut):
        source = lm.run(COLOSSEUM, max_tokens=2, capture=pc.resid_mid, logprobs=True)
        plain = lm.run(EIFFEL, max_tokens=5, capture=EVERYWHERE, logprobs=True)
        run = lm.run(EIFFEL, max_tokens=5, **edited(lm, source), logprobs=True)
        found.append((seen(source), seen(plain), seen(run)))
    assert found[0] == found[1]
    _, plain, run = found[1]
    assert run.token_ids[2] == 7 != plain.token_ids[2]
    assert run.rows["embed"][1] != plain.rows["embed"][1]


def test_batchmates_do_not_matter():
    lm = pc.LM("fake", chunk=3)
    source = lm.run(COLOSSEUM, max_tokens=2, capture=pc.resid_mid, logprobs=True)
    program = edited(lm, source)
    alone = lm.run(EIFFEL, max_tokens=5, capture=EVERYWHERE, logprobs=True)
    alone_edited = lm.run(EIFFEL, max_tokens=5, **program, logprobs=True)
    none = {"edits": [], "capture": EVERYWHERE}
    prompts = [EIFFEL, "a cat", EIFFEL, EIFFEL, "the dog sat on the capital city"]
    programs = [program, none, none, program, {"edits": [pc.Zero(at="resid_post")], "capture": []}]
    runs = lm.run(
        prompts,
        max_tokens=5,
        edits=[p["edits"] for p in programs],
        capture=[p["capture"] for p in programs],
        logprobs=True,
    )
    assert [run.error for run in runs] == [None] * 5
    assert seen(runs[0]) == seen(runs[3]) == seen(alone_edited)
    assert seen(runs[2]) == seen(alone) != seen(alone_edited)
    assert runs[4].logprobs != lm.run(prompts[4], max_tokens=5, logprobs=True).logprobs


def test_an_edit_acts_at_its_positions_alone(lm):
    base = lm.run(EIFFEL, max_tokens=3, capture=EVERYWHERE)
    v = push(lm)
    run = lm.run(EIFFEL, max_tokens=3, capture=EVERYWHERE, edits=pc.Add(v, "resid_mid[1]", pc.prompt[3], scale=2.0))
    expected = base["resid_mid[1]"].copy()
    expected[3] += np.float32(2.0) * v
    assert np.array_equal(run["resid_mid[1]"][:6], expected[:6])
    assert np.array_equal(run["resid_post[1]"][:3], base["resid_post[1]"][:3])
    assert not np.array_equal(run["resid_post[1]"][3], base["resid_post[1]"][3])
    assert not np.array_equal(run["resid_post[2]"][5], base["resid_post[2]"][5])


def test_captures_stand_where_they_were_written(lm):
    base = lm.run(EIFFEL, max_tokens=1, capture=pc.resid_post)
    before, after = pc.Capture("resid_post[1]", "prompt[1:3]"), pc.Capture("resid_post[1]", "prompt[2:4]")
    run = lm.run(EIFFEL, max_tokens=1, edits=[before, pc.Zero("resid_post[1]"), after])
    assert run.positions("resid_post[1]") == [1, 2, 3]
    assert np.array_equal(run["resid_post[1]"][0], base["resid_post[1]"][1])
    assert not run["resid_post[1]"][1:].any()


def test_programs_that_select_nothing_are_carried(lm):
    runs = lm.run([EIFFEL, COLOSSEUM], max_tokens=1, capture=pc.embed @ pc.generated, logprobs=True)
    assert [run["embed"].shape for run in runs] == [(0, 16), (0, 16)]
    assert [run.logprobs for run in runs] == [
        lm.run(p, max_tokens=1, logprobs=True).logprobs for p in (EIFFEL, COLOSSEUM)
    ]


def test_a_patch_of_another_site_and_position(lm):
    source = lm.run(COLOSSEUM, max_tokens=1, capture=[pc.resid_pre[1] @ pc.prompt[1:4]])
    edit = pc.Replace(pc.From(source, "resid_pre[1]", pc.prompt[2]), at="resid_post[2]", tokens="prompt[-1]")
    run = lm.run(EIFFEL, max_tokens=1, edits=edit, capture=pc.resid_post[2] @ pc.prompt[-1])
    assert np.array_equal(run["resid_post[2]"][0], source["resid_pre[1]"][1])


# -- errors and lives


def test_errors_before_the_run(lm):
    with pytest.raises(
        pc.UnsupportedSite,
        match=r"^edits\[0\]\.at: router ",
    ):
        lm.run(EIFFEL, edits=pc.Zero("router[1]"))
    with pytest.raises(pc.UnsupportedSite, match=r"^capture\[0\]\.at: resid_post\[3\]: .*3 layers"):
        lm.run(EIFFEL, capture="resid_post[3]")
    with pytest.raises(pc.TokensError, match="6 prompt tokens and max_tokens=123 exceed max_model_len=128"):
        lm.run(EIFFEL, max_tokens=123)
    with pytest.raises(
        pc.UnknownName, match=r"sampling\.top_q: unknown sampling parameter 'top_q'; available: temperature, "
    ):
        lm.run(EIFFEL, sampling={"top_q": 1})
    with pytest.raises(
        pc.ProgramError, match=r"sampling\.temperature: the fake engine is greedy: expected 0, got 0\.7"
    ):
        lm.run(EIFFEL, sampling={"temperature": 0.7})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"layer": 2},
            r"layer: unknown engine option 'layer' \(did you mean 'layers'\?\); available: layers, d_model, ",
        ),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
        ({"layers": 1.5}, r"layers: expected an integer, got 1\.5"),
        ({"d_vocab": 2}, "d_vocab: expected at least 3, got 2"),
        ({"heads": 16}, "heads: .*d_model=16"),
    ],
)
def test_options_are_checked(options, text):
    with pytest.raises(pc.ProgramError, match=text):
        pc.LM("fake", **options)


def test_numerics_are_uniform():
    """Which they are by nature: reading changes nothing. Stock's are refused."""
    with pc.LM("fake", numerics="uniform") as lm:
        assert lm.run(EIFFEL, logprobs=True).logprobs == lm.run(EIFFEL, logprobs=True, capture="resid_post").logprobs
    with pytest.raises(pc.EngineError, match=r"numerics: .*fake engine, got 'stock'"):
        pc.LM("fake", numerics="stock")


def test_a_run_that_is_let_go_is_missing(lm):
    source = lm.run(EIFFEL, max_tokens=1, capture=pc.resid_post)
    later = lm.run(EIFFEL, max_tokens=1, capture=pc.resid_post)
    key, edit = source.key, pc.Replace(pc.From(source), at=pc.resid_post[1])
    source.close()
    with pytest.raises(pc.MissingSource, match=f"run {key}"):
        lm.engine.fetch(key, 0)
    with pytest.raises(pc.MissingSource, match=f"run {key} was closed before resid_post.1. was read"):
        source[pc.resid_post[1]]
    with pytest.raises(pc.MissingSource, match=rf"^edits\[0\]\.value: run {key} was closed"):
        lm.run(EIFFEL, max_tokens=1, edits=edit)
    assert later["resid_post[1]"].shape == (6, 16)


def test_dropping_runs_lets_their_captures_go():
    lm = pc.LM("fake")
    for _ in range(3):
        lm.run([EIFFEL, COLOSSEUM], max_tokens=1, capture=pc.resid_post)
    run = lm.run(EIFFEL, max_tokens=1, capture=pc.resid_post)
    assert list(lm.engine._captured) == [run.key]
    edit = pc.Replace(pc.From(run), at=pc.resid_post[1])
    key = run.key
    del run
    assert list(lm.engine._captured) == [key]
    assert lm.engine.status()["runs"] == 1
    del edit
    assert list(lm.engine._captured) == []


def test_status_counts_what_is_held(monkeypatch):
    lm = pc.LM("fake", chunk=2)
    before, forward = lm.engine.status(), lm.engine._net.forward
    during = []
    monkeypatch.setattr(lm.engine._net, "forward", lambda *given: during.append(lm.engine.status()) or forward(*given))
    runs = lm.run([EIFFEL, EIFFEL], max_tokens=2, capture=[[pc.embed], []])
    assert [status["programs"] for status in during] == [1] * 4
    after = lm.engine.status()
    assert (after["programs"], after["runs"]) == (0, 1)
    assert after["steps_planned"] == before["steps_planned"] + 4
    lm.run(EIFFEL)
    assert lm.engine.status() == after
    del runs
    assert lm.engine.status()["runs"] == before["runs"] == 0


def request(lm: pc.LM, key: str, edits=(), capture=(), ids=(3, 4, 5), max_tokens=1) -> Request:
    program = Program.of(edits, capture)
    bound = bind(program, key, Prompt(ids, lambda: ("", [])), max_tokens, lm.sites, lm._source)
    inline = [op.value for op in program.edits if isinstance(getattr(op, "value", None), pc.Vector)]
    vectors = {vector_key(vector): vector.rows() for vector in inline}
    return Request(key, list(ids), max_tokens, bound, vectors)


def test_a_failure_is_its_own_requests(lm):
    source = lm.run([3, 4, 5], max_tokens=1, capture=pc.resid_post)
    good = request(lm, "good", pc.Add(push(lm), at="resid_pre[0]"), pc.resid_post)
    gone = request(lm, "gone", [pc.Zero("embed"), pc.Replace(pc.From(source), at="resid_post[0]")], pc.resid_post)
    bare = request(lm, "bare", pc.Add(push(lm, 9), at="resid_pre[0]"), pc.resid_post)
    bare.vectors = {}
    long = Request("long", [3] * 100, 29)
    source.close()
    answers = lm.engine.submit([gone, good, bare, long])
    assert [answer.done() for answer in answers] == [True] * 4
    with pytest.raises(pc.MissingSource, match=rf"^edits\[1\]\.value: unknown run {source.key}"):
        answers[0].result()
    with pytest.raises(pc.MissingSource, match=r"^edits\[0\]\.value: unknown vector [0-9a-f]{12}"):
        answers[2].result()
    with pytest.raises(pc.TokensError, match="the request exceeds max_model_len=128"):
        answers[3].result()
    again = lm.engine.submit([good])[0].result()
    assert (answers[1].result().token_ids, answers[1].result().text()) == (again.token_ids, again.text())
    assert len(lm.engine.fetch("good", 0)[0]) == 0
    assert lm.engine.fetch("good", 1)[0].tolist() == [0, 1, 2]
    with pytest.raises(pc.MissingSource):
        lm.engine.fetch("gone", 1)
    lm.engine.release(["good", "never there"])


def test_a_crash_is_told_and_survived(monkeypatch):
    lm = pc.LM("fake")
    with monkeypatch.context() as broken:
        broken.setattr(lm.engine._net, "forward", lambda *_: 1 / 0)
        run = lm.run([[3, 4]], capture=pc.embed)[0]
    assert isinstance(run.error, pc.RunError)
    with pytest.raises(pc.RunError, match="ZeroDivisionError: division by zero"):
        run.text  # noqa: B018
    assert not lm.engine._captured
    assert lm.run([3, 4], max_tokens=2).token_ids


def test_edits_that_are_not_finite_fail_their_run_and_no_other(lm):
    """As on the real engines: the rows stay as they were, and the error names the first site."""
    beyond = pc.Add(push(lm), at="resid_post[0]", scale=3e38)
    failed, plain = lm.run(
        [EIFFEL, EIFFEL], max_tokens=2, edits=[[beyond, pc.Scale(2.0, pc.mlp_out[2])], []], logprobs=True
    )
    assert type(failed.error) is pc.NotFinite
    assert "resid_post[0]" in str(failed.error)
    assert plain.logprobs == lm.run(EIFFEL, max_tokens=2, logprobs=True).logprobs
    with pytest.raises(pc.RunError, match="at logits"):
        lm.run(EIFFEL, max_tokens=1, edits=[pc.Scale(3e38, pc.logits)] * 2, logprobs=True)
    assert lm.run(EIFFEL, max_tokens=2, logprobs=True).logprobs == lm.run(EIFFEL, max_tokens=2, logprobs=True).logprobs


def test_a_closed_engine_says_so():
    with pc.LM("fake") as lm:
        run = lm.run(EIFFEL, max_tokens=1, capture=pc.embed)
    for act in (lambda: lm.run(EIFFEL), lambda: run["embed"]):
        with pytest.raises(pc.EngineError, match="the engine is closed"):
            act()


# -- the tokenizer


@pytest.mark.parametrize("text", [EIFFEL, "hello Paris", "Zürich, 7 °C\t\U0001f600!", "", " island isle", "\ud800"])
def test_any_text_tokenises_and_spells_back(text):
    tokenizer = FakeTokenizer(64)
    ids = tokenizer.encode(text)
    assert ids == [BOS, *tokenizer.bare(text)]
    assert all(0 <= i < 64 for i in ids)
    assert EOS not in ids
    spelled, offsets = tokenizer.spell(ids, text)
    assert spelled == text
    assert len(offsets) == len(ids)
    assert offsets[0] == (0, 0)
    assert "".join(text[a:b] for a, b in offsets) == text


def test_words_are_one_token_and_decode_back():
    tokenizer = FakeTokenizer(64)
    assert tokenizer.token_strings(tokenizer.encode("The Eiffel Tower is in Paris")) == [
        "<s>", "The", " Eiffel", " Tower", " is", " in", " Paris",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("The Eiffel Tower is in Paris")) == "The Eiffel Tower is in Paris"
    assert len(tokenizer.bare(" Paris")) == 1
    assert tokenizer.token_strings(tokenizer.bare(" island")) == [" is", "l", "a", "n", "d"]
    assert tokenizer.bare("Ü") == tokenizer.bare("Ü") != tokenizer.bare("Ö")


def test_ids_without_text_spell_what_they_decode_to():
    tokenizer = FakeTokenizer(70)
    ids = [BOS, *tokenizer.bare("The cat"), 69, EOS, *tokenizer.bare(" sat")]
    text, offsets = tokenizer.spell(ids, None)
    assert text == tokenizer.decode(ids) == "The cat<69> sat"
    assert [text[a:b] for a, b in offsets] == ["", "The", " cat", "<69>", "", " sat"]
    assert tokenizer.spell(ids, "another text") == (text, offsets)
    assert all(0 <= i < 5 for i in FakeTokenizer(5).encode("The cat"))


def test_a_span_finds_its_tokens(lm):
    run = lm.run("Zürich is in the capital city", max_tokens=1, capture=pc.embed @ pc.span("ür"))
    assert run.positions("embed") == [2, 3]
    run = lm.run("the cat sat on the cat", max_tokens=1, capture=pc.embed @ pc.span("cat", -1))
    assert run.positions("embed") == [6]


def test_images_are_refused_with_what_takes_them(lm):
    """Of a prompt or of a chat, and an image is selected in no prompt without one."""
    words = "the fake engine supports only text prompts; engine='vllm' supports images"
    picture = {"prompt": "the cat", "multi_modal_data": {"image": object()}}
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]
    for asked, path in (({"prompt": picture}, "prompt"), ({"prompt": ["the cat", picture]}, "prompt[1]"),
                        ({"messages": seen}, "messages")):  # fmt: skip
        with pytest.raises(pc.EngineError) as caught:
            lm.run(**asked, max_tokens=1)
        assert str(caught.value) == f"{path}: {words}"
    with pytest.raises(pc.TokensError, match=r"edits\[0\].tokens: image\[0\]: the prompt has no image"):
        lm.run("the cat", max_tokens=1, edits=[pc.Zero(pc.embed @ pc.image[0])])


def test_chat(lm):
    run = lm.run(messages=[{"role": "user", "content": "hello world"}], max_tokens=1)
    assert run.prompt_token_ids == lm.tokens("user: hello world\nassistant:")
    with pytest.raises(pc.ProgramError, match=r"messages\[0\]: .*'role'"):
        lm.run(messages=[{"role": "user"}])


# -- fuzzing as scalars of a request


def test_fuzz_strength_is_shorthand_for_noise_at_the_embedding():
    lm = pc.LM("fake", prove=False)

    def run(extra=None, edits=()) -> pc.Run:
        sampling = {"ignore_eos": True} | ({} if extra is None else {"extra_args": extra})
        return lm.run(EIFFEL, max_tokens=3, edits=edits, sampling=sampling, logprobs=True)

    plain = run()
    assert run({}).logprobs == plain.logprobs
    for extra, edit in (
        ({"fuzz_strength": 0.3}, pc.Noise(0.3, pc.embed, relative=True)),
        ({"fuzz_strength": 0.3, "fuzz_seed": 7}, pc.Noise(0.3, pc.embed, seed=7, relative=True)),
        ({"fuzz_strength": 0.3, "fuzz_mode": "scale"}, pc.Scale(0.7, pc.embed)),
        ({"fuzz_strength": 5, "fuzz_mode": "scale"}, pc.Scale(0.0, pc.embed)),
    ):
        fuzzed, spelled = run(extra), run(edits=[edit])
        assert fuzzed.logprobs == spelled.logprobs != plain.logprobs
        assert fuzzed.program.fingerprint == spelled.program.fingerprint
    for none in (
        {"fuzz_strength": 0},
        {"fuzz_strength": 0.0, "fuzz_mode": "scale"},
        {"fuzz_strength": -2, "fuzz_mode": "scale"},
    ):
        assert not run(none).program  # no program at all: stock, to the last bit
    before = run({"fuzz_strength": 0.3}, [pc.Capture(pc.embed), pc.Zero(pc.embed)])
    assert before["edits[0]"].any()  # paths are those of what was given


def test_strengths_of_a_batch_are_each_requests_own():
    lm = pc.LM("fake", prove=False)
    strengths = [0.0, 0.1, 0.5, 0.0, 0.5]
    mixed = lm.run(
        [EIFFEL] * 5, max_tokens=2, sampling=[{"extra_args": {"fuzz_strength": s}} for s in strengths], logprobs=True
    )
    alone = {
        s: lm.run(EIFFEL, max_tokens=2, sampling={"extra_args": {"fuzz_strength": s}}, logprobs=True)
        for s in set(strengths)
    }
    assert [run.logprobs for run in mixed] == [alone[s].logprobs for s in strengths]
    assert len({tuple(run.logprobs) for run in mixed}) == 3


@pytest.mark.parametrize(("sampling", "text"), [
    ({"extra_args": {"fuzz_strenth": 1}}, "sampling.extra_args.fuzz_strenth: unknown extra argument 'fuzz_strenth' (did you"),
    ({"extra_args": {"fuzz_strength": "much"}}, "sampling.extra_args.fuzz_strength: expected a number, got str 'much'"),
    ({"extra_args": {"fuzz_strength": -1}}, "sampling.extra_args.fuzz_strength: expected a number of at least 0, got"),
    ({"extra_args": {"fuzz_strength": 1, "fuzz_mode": ""}}, "sampling.extra_args.fuzz_mode: unknown fuzz_mode ''"),
    ({"extra_args": {"fuzz_strength": 1, "fuzz_mode": "scale", "fuzz_seed": 1}}, "sampling.extra_args.fuzz_seed: "),
    ({"extra_args": {"fuzz_strength": 1, "fuzz_seed": 0.5}}, "sampling.extra_args.fuzz_seed: expected an integer"),
    ({"extra_args": {"fuzz_strength": 1, "fuzz_mode": "add"}}, "sampling.extra_args.fuzz_mode: unknown fuzz_mode 'add'"),
    ({"extra_args": {"fuzz_seed": 1}}, "sampling.extra_args.fuzz_seed: fuzz_strength"),
    ({"extra_args": [1]}, "sampling.extra_args: expected a mapping"),
    ([{}, {}], "sampling: expected a mapping"),
    ("", "sampling: expected a mapping"),
    ("greedy", "sampling: expected a mapping"),
])  # fmt: skip
def test_fuzzing_that_is_not_understood_is_refused(sampling, text):
    with pytest.raises(pc.ProgramError) as caught:
        pc.LM("fake", prove=False).run(EIFFEL, sampling=sampling)
    assert str(caught.value).startswith(text)


# -- what is no token id, and what this engine cannot do


@pytest.mark.parametrize("score", [[{}], [5, []], [None], [True], [5.0], [64]])
def test_what_is_no_token_id_is_not_scored(lm, score):
    with pytest.raises(pc.PatchclampError, match=r"^score: .* (from 0 to 63|one list for all)"):
        lm.run(EIFFEL, max_tokens=1, score=score)


@pytest.mark.parametrize("answer", [True, 5.7, None, {}, [[5], []]])
def test_an_answer_is_a_text_or_a_token_id(lm, answer):
    with pytest.raises(pc.ProgramError, match=f"^answer: .*{type(answer).__name__}"):
        pc.studies.patch_sweep(lm, clean=EIFFEL, corrupt=EIFFEL, answer=answer, foil=" Rome", sites=[pc.resid_pre])


def test_what_the_fake_cannot_do_is_an_engine_error(lm, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(pc.EngineError, match=r"lora: the fake engine .*merge_and_unload"):
        lm.run(EIFFEL, lora=tmp_path)
    for change in (lm.sleep, lm.wake):
        with pytest.raises(pc.EngineError, match=r"the fake engine .*sleep"):
            change()
    assert lm.engine.report() == []
    assert not lm.engine.remote


def test_an_edit_of_a_head_writes_that_head():
    with pc.LM("fake", prove=False) as lm:
        push = np.linspace(1.0, 2.0, 8, dtype=np.float32)
        for head in range(2):
            plain, edited = (
                np.asarray(lm.run("The cat sat", max_tokens=1, capture=["z[1]"], edits=edits)["z[1]"]).reshape(-1, 2, 8)
                for edits in ([], [pc.Add(push, at=pc.z[1, head])])
            )
            np.testing.assert_array_equal(edited[:, head], plain[:, head] + push)
            np.testing.assert_array_equal(edited[:, 1 - head], plain[:, 1 - head])


def test_the_first_and_the_last_position_may_be_counted_from_the_end():
    with pc.LM("fake", prove=False) as lm:
        ids = lm.tokens("The cat sat")
        run = lm.run(ids, max_tokens=1, capture=[pc.embed])
        assert run.select(pc.prompt[-len(ids)]).tolist() == [0]
        assert run.select(pc.prompt[len(ids) - 1]).tolist() == [len(ids) - 1]
        for outside in (-len(ids) - 1, len(ids)):
            with pytest.raises(pc.TokensError):
                run.select(pc.prompt[outside])


def test_attention_is_refused():
    with (
        pc.LM("fake", prove=False) as lm,
        pytest.raises(pc.UnsupportedSite, match="the fake engine computes no attention"),
    ):
        lm.run("a b", capture=pc.pattern[1], max_tokens=1)


def test_a_source_position_that_does_not_exist_has_its_place():
    lm = pc.LM("fake")
    clean = lm.run([1, 2, 3], max_tokens=1, capture=[pc.resid_post])
    for value in (pc.SameRun(pc.resid_post[0], pc.prompt[9]), pc.From(clean, pc.resid_post[0], pc.prompt[9])):
        with pytest.raises(pc.TokensError) as raised:
            lm.run([1, 2, 3], max_tokens=1, edits=pc.Add(value, at=pc.resid_post[1], tokens=pc.prompt[-1]))
        assert raised.value.path == "edits[0].value.position"
