"""LoRA beside programs: one batch of requests with adapters and without, each captured and edited as if it were alone."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import patchclamp as pc
from tests.models import of_family

from .lora import LINEAR, adapter, merged

OPTIONS = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": 32,
           "max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26}  # fmt: skip
EVERYTHING = ["embed", "resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out",
              "q", "k", "v", "z", "neurons", "final_norm", "logits"]  # fmt: skip
SAMPLING = {"ignore_eos": True}
D = 128
VECTOR = np.random.default_rng(3).standard_normal(D).astype(np.float32)
IDS = np.random.default_rng(4).integers(3, 500, 70).tolist()


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory) -> dict[str, str]:
    """By name: every linear layer of every decoder layer; the embedding, the unembedding and two more."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "linear": adapter(tiny, root / "linear", 1),
        "borders": adapter(tiny, root / "borders", 2, ("embed_tokens", "lm_head", "q_proj", "down_proj")),
        "third": adapter(tiny, root / "third", 3, ("v_proj", "up_proj"), rank=8, use_rslora=False),
    }


@pytest.fixture(scope="module")
def hubs(tiny, smollm2, adapters, tmp_path_factory):
    """Transformers engines of the model as it is (None), and with each adapter merged into its weights."""
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("merged")
    folders = {None: shutil.copytree(tiny, root / "plain")}
    folders |= {name: merged(tiny, given, root / name) for name, given in adapters.items()}
    for folder in folders.values():
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)  # any will do: prompts are token ids
    made = {
        name: pc.LM(str(folder), engine="transformers", dtype="float32", prove=False)
        for name, folder in folders.items()
    }
    yield made
    for lm in made.values():
        lm.close()


@pytest.fixture(scope="module")
def lm(tiny):
    """Room for two adapters in a step, and for as many in memory: a third must wait."""
    with pc.LM(tiny, engine="vllm", enable_lora=True, max_loras=2, max_lora_rank=8, check_rate=1, **OPTIONS) as made:
        yield made


def worst_row(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def test_an_activation_oracle_under_an_adapter(lm, hubs, adapters):
    """Rows of the base model, added to placeholders of a question to the adapter's; against plain hooks on the merged
    weights, which scale each row to the length of the one that it is added to."""
    question, few = [7, 8, 9, 9, 9, 10, 11, 12], slice(2, 5)
    sites = [pc.resid_post[lm.model.layers * percent // 100] for percent in (25, 50, 75)]
    target = lm.run(IDS[:12], max_tokens=1, capture=[site @ pc.prompt[-3:] for site in dict.fromkeys(sites)])
    edits = [[pc.Add(pc.From(target, site, pc.prompt[-3:]), pc.resid_post[0], pc.prompt[few], norm="match")]
             for site in sites]  # fmt: skip
    runs = lm.run(
        [question] * 3, edits=edits, lora=adapters["linear"], max_tokens=1, capture=[pc.resid_post, pc.logits]
    )
    net = hubs["linear"].engine._net
    for site, run in zip(sites, runs, strict=True):
        rows = torch.as_tensor(target[site])

        def inject(module, inputs, output, rows=rows):
            stream = output[0] if isinstance(output, tuple) else output
            h = stream[0, few].clone()
            stream[0, few] = h + rows * (h.norm(dim=1) / rows.norm(dim=1))[:, None]

        hook = net.model.layers[0].register_forward_hook(inject)
        with torch.no_grad():
            expected = net(torch.tensor([question]), output_hidden_states=True)
        hook.remove()
        assert worst_row(torch.as_tensor(run[pc.resid_post[0]]), expected.hidden_states[1][0]) < 1e-4
        assert worst_row(torch.as_tensor(run[pc.logits]), expected.logits[0, -1:]) < 1e-4
    assert not torch.allclose(runs[0][pc.logits], runs[2][pc.logits], atol=1e-3)


def test_prompts_are_not_read_with_the_adapters_of_sampled_tokens(lm, adapters):
    """vLLM would crash on a CPU, and on a GPU give a prompt's rows the adapters of other requests."""
    with pytest.raises(pc.ProgramError, match="prompt_logprobs"):
        lm.run(IDS[:20], prompt_logprobs=True)
    with pytest.raises(pc.UnsupportedSite, match="adapters"):
        lm.run(IDS[:20], max_tokens=1, capture=[pc.Lens(pc.resid_post[-1])])
    program = pc.Scale(0.5, pc.mlp_out[1])
    grades = lm.grade(IDS[:8], [[], program], score=[IDS[8:10]])
    for graded, edits in zip(grades.logprobs[:, 0], ([], program), strict=True):
        runs = [lm.run(IDS[:n], score=[IDS[n]], max_tokens=1, edits=edits) for n in (8, 9)]
        assert graded == pytest.approx(sum(run.scores[IDS[n]] for run, n in zip(runs, (8, 9), strict=True)), abs=1e-4)


def test_every_site_of_a_mixed_batch_equals_merged_weights(lm, hubs, adapters):
    """Two adapters, one that must wait for room, and none; some of each edited; in one call."""
    assert list(lm.sites.withdrawn) == ["lens"]
    names = [None, "linear", "borders", "third", "linear", None, "borders", "third"]
    edits = [[]] * 4 + [[pc.Add(VECTOR, pc.resid_post[0], pc.every[3:], scale=0.5), pc.Scale(0.5, pc.mlp_out[1])]] * 4
    prompts = [IDS[:length] for length in (5, 40, 33, 9, 64, 7, 40, 1)]
    asked = {"max_tokens": 6, "sampling": SAMPLING, "capture": EVERYTHING}
    runs = lm.run(prompts, edits=edits, lora=[name and adapters[name] for name in names], **asked, logprobs=True)
    for prompt, program, name, run in zip(prompts, edits, names, runs, strict=True):
        expected = hubs[name].run(prompt, edits=program, **asked, logprobs=True)
        assert run.lora == (name and adapters[name])
        assert run.token_ids == expected.token_ids, name
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)
        for place in lm.sites.refs():
            assert run.positions(str(place)) == expected.positions(str(place))
            assert worst_row(run[str(place)], expected[str(place)]) <= 1e-4, (name, place)
    texts = {
        tuple(run.token_ids)
        for run in lm.run([IDS] * 4, lora=[None, *adapters.values()], sampling=SAMPLING, logprobs=True)
    }
    assert len(texts) == 4  # adapters matter


def test_features_under_an_adapter_equal_those_of_merged_weights(lm, hubs, adapters, tmp_path):
    """By NumPy, of the rows of Transformers; all features, some, and the largest alone."""
    draw, count, site = np.random.default_rng(6), 40, "resid_post[1]"
    encoder, decoder = draw.standard_normal((2, count, D)).astype(np.float32)
    sae = pc.SAE(0.1 * encoder, draw.standard_normal(count) - 1, decoder, np.zeros(D), site=site)
    prompts, linear = [IDS[:30], IDS[30:37], IDS[40:41]], adapters["linear"]
    values = []
    for name in (None, "linear"):
        rows = [hubs[name].run(ids, max_tokens=1, capture=[pc.Capture(site)])[site] for ids in prompts]
        values.append(sae.encode(np.concatenate(rows)))
    found = pc.studies.adapter_features(lm, sae, prompts, linear, resume=tmp_path / "journal", batch=2)
    assert (found.rows, found.full.tolist()) == (38, [0, 0])
    means, rates = np.array(values).mean(1), (np.array(values) > 0).mean(1)
    assert np.abs(found.means - means).max() < 1e-3
    assert np.abs(found.rates - rates).max() < 1e-9
    difference = means[1] - means[0]
    frame = found.to_frame()
    assert frame["feature"].tolist() == np.argsort(-np.abs(difference))[: rates.any(0).sum()].tolist()
    assert np.abs(frame["mean_difference"] - difference[frame["feature"]]).max() < 1e-3
    assert np.abs(frame["rate_difference"] - (rates[1] - rates[0])[frame["feature"]]).max() < 1e-9
    assert np.abs(difference).max() > 0.1
    assert {"study-" + sae.content[:16]}.isdisjoint(lm.sites.dictionaries)

    lm.attach(sae, name="mine")
    chosen, first = [7, 3], frame["feature"][0]
    some = pc.studies.adapter_features(lm, "mine", prompts, linear, features=chosen, tokens="prompt[1:]")
    later = np.delete(np.array(values), [0, 30, 37], axis=1)
    assert (some.rows, some.features.tolist()) == (35, chosen)
    assert np.abs(some.means - later.mean(1)[:, chosen]).max() < 1e-3
    few = pc.studies.adapter_features(lm, "mine", prompts, linear, kept=4)
    largest = [np.where(np.argsort(np.argsort(-of, axis=1), axis=1) < 4, of, 0) for of in values]
    assert np.abs(few.means - np.mean(largest, 1)).max() < 1e-3
    assert np.allclose(few.full, [((of > 0).sum(1) >= 4).mean() for of in values])
    assert few.full.min() > 0
    lm.detach("mine")

    again = {"sae": sae, "prompts": prompts, "lora": linear, "resume": tmp_path / "journal"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "arun", None)  # nothing is run again
        resumed = pc.studies.adapter_features(lm, **again)
    assert (resumed.means == found.means).all()
    with pytest.raises(pc.ProgramError, match="resume"):
        pc.studies.adapter_features(lm, **again | {"lora": adapters["third"]})
    assert str(first) in found.to_html(tmp_path / "page.html").read_text()
    assert found.picture().table[1][0] == str(first)
    assert pc.studies.load(found.save(tmp_path / "saved")).to_frame().equals(frame)


def test_what_has_no_features_under_an_adapter(lm, hubs, adapters):
    sae = pc.SAE(np.ones((4, D)), np.zeros(4), np.ones((4, D)), np.zeros(D), site="resid_post[1]")
    for wrong, error, path in (
        ({"lora": "/not/here"}, pc.MissingSource, "lora"), ({"features": [4]}, pc.ProgramError, "features"),
        ({"features": [1, 1]}, pc.ProgramError, "features"), ({"kept": 129}, pc.ProgramError, "kept"),
        ({"features": [1], "kept": 3}, pc.ProgramError, "kept"),
        ({"tokens": "generated"}, pc.TokensError, "tokens"), ({"sae": "none"}, pc.UnknownName, "sae"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            pc.studies.adapter_features(lm, **{"sae": sae, "prompts": [IDS], "lora": adapters["linear"], **wrong})
        assert caught.value.path == path
    with pytest.raises(pc.EngineError, match="enable_lora=True"):
        pc.studies.adapter_features(hubs[None], sae, [IDS], adapters["linear"])


def test_a_clean_run_with_an_adapter_patched_into_one_without(lm, hubs, adapters):
    tuned = lm.run(IDS[:20], max_tokens=1, lora=adapters["linear"], capture=[pc.resid_pre, pc.logits], logprobs=True)
    program = [pc.Replace(pc.From(tuned), pc.resid_pre[1])]
    patched = lm.run(IDS[:20], max_tokens=1, lora=adapters["linear"], edits=program, capture=[pc.logits], logprobs=True)
    assert torch.equal(patched[pc.logits], tuned[pc.logits])
    plain, crossed = (
        lm.run(IDS[:20], max_tokens=1, edits=e, capture=[pc.logits], logprobs=True) for e in ([], program)
    )
    expected = hubs[None].run(IDS[:20], max_tokens=1, capture=[pc.logits], edits=[
        pc.Replace(tuned[pc.resid_pre[1]], pc.resid_pre[1], pc.prompt)], logprobs=True)  # fmt: skip
    assert worst_row(crossed[pc.logits], expected[pc.logits]) <= 1e-4
    assert worst_row(crossed[pc.logits], plain[pc.logits]) > 1e-2


def test_cached_blocks_are_never_shared_between_adapters(lm, hubs, adapters):
    """Nor between edits under one; what is the same is shared."""
    ids = np.random.default_rng(5).integers(3, 500, 100).tolist()
    edit = [pc.Add(VECTOR, pc.resid_post[0], pc.prompt[40])]
    for name, program, cached in (
        ("linear", [], 0), (None, [], 0), ("borders", [], 0), ("linear", [], 96), (None, [], 96),
        ("linear", edit, 32), (None, edit, 32), ("linear", edit, 96), ("borders", edit, 32), (None, edit, 96),
        ("third", edit, 0), ("linear", [], 96),
    ):  # fmt: skip
        run = lm.run(ids, max_tokens=3, edits=program, lora=name and adapters[name], sampling=SAMPLING, logprobs=True)
        expected = hubs[name].run(ids, max_tokens=3, edits=program, sampling=SAMPLING, logprobs=True)
        assert (run.cached_tokens, run.token_ids) == (cached, expected.token_ids), (name, bool(program))
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)


def test_an_adapters_captures_are_not_checked(lm, adapters):
    """One may change embeddings. Captures of the model beside it are checked."""
    before = lm.engine.status()["self_checks"]
    lm.run(
        [IDS[:5]] * 3, lora=[None, adapters["borders"], adapters["linear"]], capture=[pc.resid_post[0]], max_tokens=2
    )
    assert lm.engine.status()["self_checks"] == before + 1


def test_a_folder_that_has_changed_is_another_adapter(lm, hubs, adapters, tmp_path):
    folder = shutil.copytree(adapters["linear"], tmp_path / "adapter")
    asked = {"max_tokens": 4, "lora": folder, "sampling": SAMPLING}
    first = lm.run(IDS, **asked, logprobs=True)
    shutil.rmtree(folder)
    shutil.copytree(adapters["borders"], folder)
    second = lm.run(IDS, **asked, logprobs=True)
    for name, run in (("linear", first), ("borders", second)):
        expected = hubs[name].run(IDS, max_tokens=4, sampling=SAMPLING, logprobs=True)
        assert run.token_ids == expected.token_ids
        np.testing.assert_allclose(run.logprobs, expected.logprobs, atol=1e-4)


def test_an_adapter_whose_files_are_gone_while_it_runs_is_kept(lm, tiny, adapters, tmp_path):
    """Others wait for its room instead of throwing it out."""
    folders = [adapter(tiny, tmp_path / str(i), 10 + i, ("q_proj",)) for i in range(5)]
    stream = lm.stream(IDS[:8], max_tokens=100, lora=folders[0], sampling=SAMPLING, logprobs=True)
    next(stream)
    shutil.rmtree(folders[0])
    others = lm.run(
        [IDS[:8]] * 4, max_tokens=2, lora=folders[1:], sampling=SAMPLING, edits=[pc.Scale(0.9, pc.embed)], logprobs=True
    )
    assert len({tuple(run.logprobs) for run in others}) == 4
    assert len(list(stream)) > 10
    assert len(stream.run.token_ids) == 100


def test_what_is_no_adapter_of_the_model_is_its_requests_error_alone(lm, tiny, adapters, tmp_path):
    """Found when it is loaded, between steps; vLLM would leave out or cut what does not fit, or end its engine."""
    config = json.loads((Path(tiny) / "config.json").read_text())
    from tests.models import with_weights

    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    shape = {name: config[name] for name in kept}
    deep = with_weights(tmp_path / "deep", "8b", 5, **shape)
    narrow = with_weights(tmp_path / "narrow", "8b", 3, **{**shape, "intermediate_size": 128})
    wrong = {
        "the model has no model.layers.3": adapter(deep, tmp_path / "a", 1),
        "down_proj: expected width 256, got 128": adapter(narrow, tmp_path / "b", 1, ("down_proj",)),
        "DoRA": adapter(tiny, tmp_path / "c", 1, use_dora=True),
        "cannot be loaded: SafetensorError": adapter(tiny, tmp_path / "d", 1),
    }
    (tmp_path / "d" / "adapter_model.safetensors").write_bytes(b"nothing")
    plain = lm.run(IDS, max_tokens=2, lora=adapters["linear"], logprobs=True)
    runs = lm.run([IDS] * 6, max_tokens=2, lora=[*wrong.values(), adapters["linear"], None],
                  edits=[pc.Scale(1.0, pc.embed)], logprobs=True)  # fmt: skip
    for text, run in zip(wrong, runs, strict=False):
        assert isinstance(run.error, pc.ModelError), text
        assert text in str(run.error)
        assert str(run.error).startswith(f"lora: {tmp_path}")
    assert [run.error for run in runs[4:]] == [None, None]
    assert runs[4].token_ids == plain.token_ids
    gc.collect()
    lm.run(IDS[:3], max_tokens=1, logprobs=True)
    assert {lm.engine.status()[name] for name in ("programs", "vectors", "pinned")} == {0}


def test_what_is_asked_wrongly_is_told_before_it_runs(lm, narrow, tiny, adapters, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README").write_text("")
    prefix = shutil.copytree(adapters["linear"], tmp_path / "prefix")
    (prefix / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING", "r": 4}')
    broken = shutil.copytree(adapters["linear"], tmp_path / "broken")
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    wide = adapter(tiny, tmp_path / "wide", 1, ("q_proj",), rank=16)
    for given, error, text in (
        ("/not/here", pc.MissingSource, "/not/here"),
        (
            tmp_path / "empty",
            pc.MissingSource,
            "adapter_config.json and adapter_model.safetensors",
        ),
        (prefix, pc.ProgramError, "PREFIX_TUNING"),
        (broken, pc.ProgramError, "adapter_config.json is not an adapter config: KeyError: 'r'"),
        (wide, pc.CapacityError, "rank 16, above max_lora_rank=8"),
        (7, pc.ProgramError, "lora: expected a path, got int 7"),
        ([adapters["linear"]] * 2, pc.ProgramError, "lora: expected one adapter, or one for each"),
        ([{}], pc.ProgramError, "lora[0]: expected a path, got dict"),
    ):
        with pytest.raises(error) as caught:
            lm.run(IDS, max_tokens=1, lora=given, logprobs=True)
        assert text in str(caught.value)
    with pytest.raises(pc.EngineError, match=r"^lora: .*enable_lora=True"):
        narrow.get("vllm", "float32").run("A", max_tokens=1, lora=adapters["linear"], logprobs=True)
    for other in (narrow.get("transformers", "float32"), pc.LM("fake")):
        with pytest.raises(pc.EngineError, match=r"lora: .*merge_and_unload"):
            other.run("A", max_tokens=1, lora=adapters["linear"], logprobs=True)
        assert other.run("A", max_tokens=1, lora=None, logprobs=True).lora is None


def test_targets_are_every_linear_layer(tiny, adapters):
    """What the proof above is worth."""
    from safetensors import safe_open

    with safe_open(Path(adapters["linear"]) / "adapter_model.safetensors", "np") as file:
        assert len(file.keys()) == 3 * len(LINEAR) * 2


@pytest.mark.slow
def test_layers_of_experts_are_refused_by_name(tmp_path):
    """Stock vLLM starts with them on a CPU, and ends at its first step."""
    moe = of_family(tmp_path, "qwen3_moe")
    with pytest.raises(pc.EngineError, match=r"LoRA \(enable_lora\) with expert layers"):
        pc.LM(moe, engine="vllm", enable_lora=True, prove=False, **OPTIONS)
