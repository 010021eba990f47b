"""Steering vectors: the three methods against plain ones, the held-out check, files of llama.cpp and repeng, and the way
into runs, on the fake engine. `tests/engines/test_steering.py` compares numbers of the real model with plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGUFReader, GGUFWriter

import patchclamp as pc
from patchclamp.studies import SteeringVectors, StrengthCurveResult, steering_vectors, strength_curve
from patchclamp.studies.steering import RIDGE, check, chosen_layer, direction

from ..reference.studies import first_component, logistic_weights

POSITIVE = ("The cat is on the", "hello world is on", "The city in France is on", "the dog sat on")
NEGATIVE = ("The cat is not the", "hello world is not", "The city in France is not", "the dog sat not")


@pytest.fixture(scope="module")
def vectors(lm) -> SteeringVectors:
    return steering_vectors(lm, POSITIVE, NEGATIVE, answer=" the", foil=" not")


def classes(count: int = 20, width: int = 6, seed: int = 0):
    """Two classes that lie apart along the first axis, with most spread along the second."""
    draw = np.random.default_rng(seed)
    spread = np.array([0.5, 4.0, 1.0, 1.0, 1.0, 0.1])[:width]
    shared = draw.normal(size=(count, width)) * spread
    apart = np.eye(width)[0] * 1.5
    return shared + apart + 0.3 * draw.normal(size=shared.shape), shared - apart + 0.3 * draw.normal(size=shared.shape)


# -- directions


@pytest.mark.parametrize("method", ["mean", "pca", "probe"])
def test_directions_equal_plain_ones(method):
    positive, negative = classes()
    plain = {
        "mean": lambda: positive.mean(0) - negative.mean(0),
        "pca": lambda: first_component(positive - negative),
        "probe": lambda: logistic_weights(positive, negative, RIDGE),
    }[method]()
    unit = plain / np.linalg.norm(plain)
    made = direction(method, positive, negative)
    assert abs(abs(made @ unit) / np.linalg.norm(made) - 1) < 1e-9
    apart = (positive.mean(0) - negative.mean(0)) @ unit
    assert np.allclose(made, unit * apart, atol=1e-6), (
        "once of it moves mean to mean, from the negative to the positive"
    )
    assert (positive @ made).mean() > (negative @ made).mean()


def test_a_probe_of_fewer_rows_than_numbers_and_of_a_lone_pair():
    draw = np.random.default_rng(3)
    positive, negative = draw.normal(size=(4, 40)) + 1, draw.normal(size=(3, 40)) - 1
    plain = logistic_weights(positive, negative, RIDGE)
    made = direction("probe", positive, negative)
    assert abs(plain @ made / np.linalg.norm(plain) / np.linalg.norm(made) - 1) < 1e-6
    alone = [direction(method, positive[:1], negative[:1]) for method in ("mean", "pca", "probe")]
    assert np.allclose(alone, positive[0] - negative[0])


def test_a_probe_of_classes_that_no_plane_parts_and_of_large_numbers():
    draw = np.random.default_rng(4)
    positive, negative = draw.normal(size=(30, 5)), draw.normal(size=(30, 5)) + 0.1
    plain = logistic_weights(1e3 * positive, 1e3 * negative, RIDGE)
    made = direction("probe", 1e3 * positive, 1e3 * negative)
    assert abs(plain @ made) / np.linalg.norm(plain) / np.linalg.norm(made) > 1 - 1e-9


def test_what_has_no_direction_is_an_error():
    same = np.ones((3, 4))
    for method in ("mean", "pca", "probe"):
        with pytest.raises(pc.ProgramError, match="the same activations"):
            direction(method, same, same)
    with pytest.raises(pc.ProgramError, match=r"method: pca .* 3 .* 2"):
        direction("pca", same, same[:2])


def test_the_check_counts_and_measures():
    along = np.array([1.0, 0.0])
    made_of = np.array([[2.0, 5.0], [4.0, 5.0]]), np.array([[-1.0, 5.0]])  # the middle is at 1
    kept = np.array([[3.0, 0.0], [0.5, 0.0], [2.0, 0.0], [2.5, 0.0]]), np.array([[-2.0, 9.0], [1.0, 9.0]])
    one = check(along, made_of, kept)
    assert one.accuracy == (3 / 4 + 2 / 2) / 2
    variances = np.var([3, 0.5, 2, 2.5]), np.var([-2, 1])
    assert one.separation == pytest.approx((2.0 - -0.5) / np.sqrt(sum(variances) / 2))
    assert check(-along, made_of, kept).accuracy < 0.5


# -- the study


def test_vectors_are_of_the_prompts_that_are_not_held_out(lm, vectors):
    held = np.sort(np.random.default_rng(0).permutation(4)[:1]).tolist()
    rows = []
    for prompts in (POSITIVE, NEGATIVE):
        runs = lm.run(list(prompts), max_tokens=1, capture=[pc.resid_post])
        rows.append(np.stack([[np.asarray(run[pc.resid_post[layer]])[-1] for layer in range(3)] for run in runs]))
    means = [np.delete(side, held, axis=0).astype(np.float64).mean(0) for side in rows]
    assert np.allclose(vectors.vectors, means[0] - means[1], atol=1e-6)
    assert np.allclose(vectors.row_norm, np.mean([np.linalg.norm(side, axis=2).mean(0) for side in rows], axis=0))
    prompt = NEGATIVE[held[0]]
    answer, foil = (lm.tokenizer.bare(text)[0] for text in (" the", " not"))
    for layer in range(3):
        edit = pc.Add(vectors.vectors[layer], at=pc.resid_post[layer])
        scores = [lm.run(prompt, max_tokens=1, edits=edits, score=[answer, foil]).scores for edits in ([], [edit])]
        before, after = (score[answer] - score[foil] for score in scores)
        assert vectors.effect[layer] == pytest.approx(after - before, abs=1e-6)
        means = []
        for edits in ([], [edit]):
            text = lm.run(prompt, max_tokens=16, edits=edits).token_ids
            whole = lm.run([*lm.tokens(prompt), *text], max_tokens=1, capture=[pc.final_norm])
            logits = torch.from_numpy(np.asarray(whole[pc.final_norm])) @ lm.weights("W_U")
            logprobs = logits.log_softmax(-1)[len(lm.tokens(prompt)) - 1 : -1]
            means.append(float(logprobs[torch.arange(len(text)), text].mean()))
        assert vectors.fluency[layer] == pytest.approx(means[1] - means[0], abs=1e-5)
    assert vectors.best == chosen_layer((0, 1, 2), vectors.effect, vectors.fluency, 3)
    assert (vectors.method, vectors.site, vectors.tokens) == ("mean", "resid_post", "prompt[-1]")


def test_the_chosen_layer_is_early_effective_and_fluent():
    layers, fluent = range(16), np.zeros(16)
    effects = np.array([0, 0, 1, 4.6, 5, 4.9, 4, 3, 3, 3, 3, 3, 3, 4, 9, 20.0])
    assert chosen_layer(layers, effects, fluent, 16) == 3  # the last two merely write to the unembedding
    assert chosen_layer(layers, effects, np.where(np.arange(16) == 3, -3.0, 0.0), 16) == 4  # its texts break
    assert chosen_layer(layers, effects, np.full(16, -9.0), 16) == 3  # all do
    assert chosen_layer((14, 15), effects[14:], fluent[14:], 16) == 1  # no others were read
    assert chosen_layer(layers, -1 - effects, fluent, 16) == 0  # none steers as intended


def test_seed_method_site_tokens_and_layers_count(lm, vectors):
    def made(**asked) -> SteeringVectors:
        return steering_vectors(lm, POSITIVE, NEGATIVE, **asked)

    assert made().vectors.tobytes() == vectors.vectors.tobytes()
    assert np.isnan(made().effect).all()
    assert np.abs(made(seed=1).vectors - vectors.vectors).max() > 1e-3
    assert made(layers=[2]).vectors.tobytes() == made(layers="-1").vectors.tobytes() == vectors.vectors[2:].tobytes()
    assert made(layers=slice(0, 2)).layers == made(layers=(1, 0)).layers == (0, 1)
    below = made(site="resid_pre", layers="1:3")
    assert np.abs(below.vectors - vectors.vectors[:2]).max() < 1e-6
    heads = made(site="z", layers=1)  # as wide as the stream here, in parts
    plain, edited = lm.run(["the cat"] * 2, max_tokens=1, edits=[[], heads.edits()], capture=[pc.z[1]])
    moved = np.asarray(edited[pc.z[1]]) - np.asarray(plain[pc.z[1]])
    assert np.abs(moved.reshape(-1, 16) - heads.vectors[0]).max() < 1e-6
    whole = made(tokens="prompt", held_out=0, layers=1)
    run_means = []
    for prompts in (POSITIVE, NEGATIVE):
        runs = lm.run(list(prompts), max_tokens=1, capture=[pc.resid_post[1]])
        run_means.append(np.mean([np.asarray(run[pc.resid_post[1]]).mean(0) for run in runs], axis=0))
    assert np.allclose(whole.vectors[0], run_means[0] - run_means[1], atol=1e-6)
    assert whole.best is None
    assert np.isnan(whole.accuracy).all()
    uneven = steering_vectors(lm, POSITIVE, NEGATIVE[:3], method="probe", held_out=0.3)
    assert (uneven.positive.held_out, uneven.negative.held_out) == (1, 1)
    chat = made(chat=True, layers=1)
    assert chat.positive.content != vectors.positive.content
    assert made().positive == vectors.positive


def test_edits_and_the_bank(lm, vectors):
    assert [(edit.at, edit.scale, edit.tokens) for edit in vectors.edits(2.0)] == [
        (pc.resid_post[vectors.best], 2.0, pc.every)
    ]  # fmt: skip
    both = vectors.edits(-1.0, layers=[0, 2], tokens=pc.generated)
    assert [str(edit.at) for edit in both] == ["resid_post[0]", "resid_post[2]"]
    assert both[0].tokens == pc.generated
    lm.bank["mood"] = vectors
    plain, edited, named = lm.run(["the cat"] * 3, max_tokens=1, logprobs=True, edits=[
        [], vectors.edits(3.0), [pc.Use("mood", scale=3.0)]])  # fmt: skip
    assert edited.logprobs == named.logprobs != plain.logprobs
    del lm.bank["mood"]
    with pytest.raises(pc.ProgramError, match=r"layers: .*\[3\]; .*\[0, 1, 2\]"):
        vectors.edits(layers=3)
    assert (vectors.vector(1) == vectors.vectors[1]).all()


def test_layers_may_be_numpys_numbers(lm, vectors):
    assert vectors.edits(layers=np.int64(1)) == vectors.edits(layers=1)
    assert vectors.edits(layers=np.array([0, 2])) == vectors.edits(layers=[0, 2])
    assert vectors.edits(layers=np.array(1)) == vectors.edits(layers=1)
    assert (vectors.vector(np.int64(1)) == vectors.vector(1)).all()
    assert steering_vectors(lm, POSITIVE, NEGATIVE, layers=np.int64(1), seed=np.int64(0)).layers == (1,)
    for wrong in (True, 1.0, [1.0], "1"):
        with pytest.raises(pc.ProgramError, match=r"^layers: "):
            vectors.edits(layers=wrong)


def test_they_are_saved_and_framed(vectors, tmp_path: Path):
    loaded = SteeringVectors.load(vectors.save(tmp_path / "vectors.safetensors"))
    assert loaded.vectors.tobytes() == vectors.vectors.tobytes()
    assert (loaded.positive, loaded.provenance, loaded.best) == (vectors.positive, vectors.provenance, vectors.best)
    frame = loaded.to_frame()
    assert frame.effect.tolist() == vectors.effect.tolist()
    assert frame.layer.tolist() == [0, 1, 2]
    assert vectors.plot(tmp_path / "layers.png").stat().st_size > 10_000
    assert vectors.to_html(tmp_path / "layers.html").stat().st_size < 100_000


# -- the strength curve


def test_a_strength_curve_is_of_the_runs_it_says(lm, vectors, tmp_path: Path):
    prompts = ("the cat is", "hello")
    curve = strength_curve(lm, vectors, prompts, " the city", " not", scales=(-2, 0, 3), layers=[0, 2], tokens="prompt")
    for p, prompt in enumerate(prompts):
        for s, scale in enumerate((-2, 0, 3)):
            edits = vectors.edits(scale, layers=[0, 2], tokens="prompt") if scale else ()
            ids, total = lm.tokens(prompt), 0.0
            positions = tuple(range(len(ids)))
            for i, token in enumerate(answer := lm.tokenizer.bare(" the city")):
                held = [pc.Add(edit.value, at=edit.at, scale=edit.scale, tokens=positions) for edit in edits]
                total += lm.run([*ids, *answer[:i]], max_tokens=1, edits=held, score=[token]).scores[token]
            assert curve.logprobs[p, s] == pytest.approx(total, abs=1e-9)
    assert (curve.layers, curve.tokens, curve.foils) == ((0, 2), "prompt", (" not", " not"))
    assert np.allclose(curve.scores, curve.logprobs - curve.foil_logprobs)
    assert curve.slope == pytest.approx(np.polyfit((-2, 0, 3), curve.scores.mean(0), 1)[0])
    loaded = StrengthCurveResult.load(curve.save(tmp_path / "curve.safetensors"))
    assert (loaded.scores == curve.scores).all()
    assert len(curve.to_frame()) == 6
    assert curve.plot(tmp_path / "curve.svg").stat().st_size > 5_000
    assert curve.to_html(tmp_path / "curve.html").stat().st_size < 100_000


def test_a_continuation_a_prompt_and_no_foil(lm, vectors):
    curve = strength_curve(lm, vectors, ("the cat is", "hello"), [" on", " world"], scales=(0, 1))
    ids = lm.tokenizer.bare(" world")[0]
    assert curve.logprobs[1, 0] == lm.run("hello", max_tokens=1, score=[ids]).scores[ids]
    assert (curve.scores == curve.logprobs).all()
    assert np.isnan(curve.foil_logprobs).all()
    same = strength_curve(lm, vectors, ["hello"], [ids], scales=(0, 1))
    assert same.logprobs[0].tolist() == curve.logprobs[1].tolist()


# -- files of others


def test_gguf_goes_out_and_comes_back(vectors, tmp_path: Path):
    path = vectors.to_gguf(tmp_path / "vectors.gguf", layers=[1, 2])
    back = SteeringVectors.from_gguf(path)
    assert (back.layers, back.family, back.method, back.best) == ((1, 2), "llama", "imported", None)
    assert back.vectors.tobytes() == vectors.vectors[1:].tobytes()
    assert [str(edit.at) for edit in back.edits(2.0)] == ["resid_post[1]", "resid_post[2]"]
    reader = GGUFReader(path)
    assert {tensor.name: list(tensor.shape) for tensor in reader.tensors} == {"direction.1": [16], "direction.2": [16]}
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "llama"
    assert reader.get_field("controlvector.layer_count").contents() == 2
    again = back.to_gguf(tmp_path / "again.gguf")
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(pc.ProgramError, match=r"layers: llama\.cpp"):
        vectors.to_gguf(tmp_path / "no.gguf", layers=[0, 1])


def foreign(path: Path, architecture: str = "controlvector", **tensors: np.ndarray) -> Path:
    """A file of the gguf package's own writer, as repeng's `export_gguf` calls it."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_string(f"{architecture}.model_hint", "mistral")
    writer.add_uint32(f"{architecture}.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("_", "."), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_another_writer_acts_after_the_layer_it_names(lm, tmp_path: Path):
    """direction.N is added to what comes out of layer N, counted from 0: that is what enters layer N + 1."""
    rows = np.random.default_rng(2).normal(size=(2, 16)).astype(np.float32)
    path = foreign(tmp_path / "a.gguf", direction_2=rows[1], direction_1=rows[0].astype(np.float16))
    read = SteeringVectors.from_gguf(path)
    assert (read.layers, read.family) == ((1, 2), "mistral")
    assert (read.vectors == [rows[0].astype(np.float16), rows[1]]).all()
    plain, edited = lm.run(
        ["the cat"] * 2, max_tokens=1, edits=[[], read.edits(layers=1)], capture=[pc.resid_pre, pc.resid_post[1]]
    )
    into_next = np.asarray(edited[pc.resid_pre[2]]) - np.asarray(plain[pc.resid_pre[2]])
    assert np.abs(into_next - read.vectors[0]).max() < 1e-5
    assert (np.asarray(edited[pc.resid_pre[1]]) == np.asarray(plain[pc.resid_pre[1]])).all()


def test_repengs_directions_in_memory(vectors):
    directions = vectors.directions(vectors.layers)
    assert list(directions) == [0, 1, 2]
    assert (directions[1] == vectors.vectors[1]).all()
    back = SteeringVectors.from_directions({2: directions[2], 0: directions[0].tolist()}, "llama")
    assert back.layers == (0, 2)
    assert (back.vectors == vectors.vectors[[0, 2]]).all()
    assert list(vectors.directions()) == [0, 1, 2]
    for wrong in ({}, {0: np.ones(3), 1: np.ones(4)}, {-1: np.ones(3)}, {0: np.ones((2, 2))}):
        with pytest.raises(pc.ShapeError, match="directions: "):
            SteeringVectors.from_directions(wrong)


def test_what_is_no_control_vector_is_told(lm, tmp_path: Path):
    row = np.zeros(4, np.float32)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(range(60)))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(foreign(tmp_path / "whole.gguf", direction_1=row).read_bytes()[:90])
    wrong = {
        garbage: "as GGUF", cut: "as GGUF", tmp_path / "none.gguf": "as GGUF",
        foreign(tmp_path / "b.gguf", "llama", direction_1=row): "got llama",
        foreign(tmp_path / "c.gguf", direction_x=row): "direction.x",
        foreign(tmp_path / "d.gguf", direction_1=row.reshape(2, 2)): r"direction\.1 \[2, 2\]",
        foreign(tmp_path / "e.gguf", direction_1=row, direction_2=row[:3]): "equal width",
        foreign(tmp_path / "f.gguf"): "equal width",
    }  # fmt: skip
    for path, text in wrong.items():
        with pytest.raises(pc.ProgramError, match=text):
            SteeringVectors.from_gguf(path)
    heads = steering_vectors(lm, POSITIVE, NEGATIVE, site="attn_out")
    with pytest.raises(pc.UnsupportedSite, match="resid_post, got attn_out"):
        heads.to_gguf(tmp_path / "g.gguf")


# -- refusals


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (dict(method="men"), "method: unknown method 'men' (did you mean 'mean'?)"),
        (dict(positive=[]), "positive: "),
        (dict(negative=["a", None]), "negative[1]: "),
        (dict(negative=NEGATIVE[:3], method="pca"), "method: pca"),
        (dict(site="resid_post[2]"), "site: "),
        (dict(site="neurons"), "site: "),
        (dict(site="embed"), "site: "),
        (dict(layers=[3]), "layers: resid_post[3]: layer is out of range"),
        (dict(layers=[]), "layers: "),
        (dict(held_out=1.0), "held_out: "),
        (dict(held_out=0.1), "held_out: 0.1 of 4 positive"),
        (dict(foil=" not"), "foil: "),
        (dict(answer=" the", held_out=0), "answer: "),
        (dict(answer=""), "answer: "),
        (dict(tokens="prompt[40]"), "prompt 0.capture[0]"),
        (dict(layers=1.5), "layers: "),
        (dict(batch=0), "batch: "),
        (dict(batch=-2), "batch: "),
        (dict(seed=-1), "seed: "),
        (dict(seed="x"), "seed: "),
    ],
)
def test_what_cannot_be_made_is_an_error(lm, asked, text):
    call = {"positive": POSITIVE, "negative": NEGATIVE, **asked}
    with pytest.raises(pc.PatchclampError) as raised:
        steering_vectors(lm, **call)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (dict(scales=(1, 0)), "scales: "),
        (dict(scales=()), "scales: "),
        (dict(scales="ab"), "scales: "),
        (dict(answer=[" on"]), "answer: expected 2"),
        (dict(answer=[5, 640]), "answer: "),
        (dict(foil=True), "foil: "),
        (dict(layers=[7]), "layers: "),
        (dict(batch=0), "batch: "),
        (dict(batch="many"), "batch: "),
    ],
)
def test_what_cannot_be_scored_is_an_error(lm, vectors, asked, text):
    with pytest.raises(pc.PatchclampError) as raised:
        strength_curve(lm, vectors, **{"prompts": ["a", "b"], "answer": " on", **asked})
    assert str(raised.value).startswith(text)
