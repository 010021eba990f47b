"""Decoders within models that also read images: requests of text take programs, with the sites of the decoder's family."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchclamp as pc
from patchclamp.engines.base import receipt_of
from patchclamp.engines.vllm.compat.variants import Graphs
from patchclamp.errors import ModelError
from patchclamp.language.site import SITES

from ..gpu.engines import attached
from ..models import MULTIMODAL, gemma_pictures, that_reads_images, with_gemma_processor
from ..reference.images import PlainReader
from .test_admission import raw, scaled
from .test_families import (
    EAGER,
    IDS,
    LACKS,
    PROMPTS,
    ROUTER,
    SAMPLED,
    Pair,
    every_edit_is_equal,
    flat,
    is_proved_in_bfloat16,
    rows_are_equal,
)  # fmt: skip
from .test_parity import worst_row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inspected_here", "_torchvision")]
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
# text decoders of their own, which compute the same
ALONE = {"gemma3": "Gemma3", "llama4": "Llama4", "mistral3": "Mistral", "qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2",
         "qwen3_vl": "Qwen3", "qwen3_vl_moe": "Qwen3Moe", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe",
         "gemma4": "Gemma4", "gemma4_moe": "Gemma4", "gemma4_unified": "Gemma4"}  # fmt: skip
KINDS = {"gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "qwen3_vl": "qwen3",
         "qwen3_vl_moe": "qwen3_moe", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
         "gemma4": "gemma4_text", "gemma4_moe": "gemma4_text", "gemma4_unified": "gemma4_text"}  # fmt: skip
TABLES = {"qwen3_vl_moe": "qwen3_moe", "gemma4_unified": "gemma4"}  # families of other names


@pytest.fixture(
    scope="module",
    params=["gemma3", "llama4", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma4", "gemma4_moe", "gemma4_unified"],
)
def pair(request, tmp_path_factory, inspected_here, _torchvision):
    """Gemma 3 takes images, and so embeds tokens before the model runs; the others are started for text alone."""
    folder = tmp_path_factory.mktemp(request.param)
    that_reads_images(folder, request.param)
    options: dict[str, Any] = {**IDS, **NO_IMAGES}
    if request.param == "gemma3":
        with_gemma_processor(folder)
        options = {"dtype": "float32", "skip_mm_profiling": True}
    with (
        pc.LM(str(folder), engine="transformers", **IDS) as hub,
        pc.LM(str(folder), engine="vllm", **EAGER, **options) as lm,
    ):
        yield Pair(request.param, lm, hub)


def test_every_site_is_proved_and_equal(pair):
    lacks = LACKS.get(TABLES.get(pair.name, pair.name), ROUTER)
    names = [name for name in SITES if name not in lacks]
    assert pair.lm.sites.names == pair.hub.sites.names == names
    assert pair.lm.sites.withdrawn == pair.hub.sites.withdrawn == {}
    rows_are_equal(pair, names)


def test_every_edit_moves_the_logits_as_on_transformers(pair):
    every_edit_is_equal(pair)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_linear_attention_is_proved_in_the_dtype_that_it_runs_in(name, tmp_path):
    that_reads_images(tmp_path, name)
    worst = 0.5 if torch.cpu._is_amx_tile_supported() else 0.4  # oneDNN rounds otherwise with AMX: 0.43
    is_proved_in_bfloat16(str(tmp_path), worst=worst, **NO_IMAGES)


def test_graphs_of_the_decoder_are_the_engines(pair):
    """vLLM makes the decoder with a copy of the engine's configuration: what is compiled and recorded of it knows that
    copy. The graphs of another engine are left alone."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    worker: Any = attached(pair.lm)
    copies = {
        id(m.vllm_config): m.vllm_config for m in worker._runner.get_model().modules() if hasattr(m, "vllm_config")
    }
    assert copies.keys() - {id(worker._config)}
    graphs, wrappers = Graphs(None, *[lambda *_: None] * 4), []  # type: ignore[arg-type]
    graphs._config = worker._config
    for owner in (*copies.values(), SimpleNamespace(compilation_config=SimpleNamespace())):
        wrapper: Any = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
        wrapper.vllm_config, wrapper.concrete_cudagraph_entries = owner, {}
        wrappers.append(wrapper)
        CUDAGraphWrapper._all_instances.add(wrapper)
    found = {id(wrapper) for wrapper, _ in graphs._take()[1]}
    assert found == {id(wrapper) for wrapper in wrappers[:-1]} != set()


def test_positions_count_tokens_whatever_the_model_turns_them_into(pair):
    steer = pc.Add(torch.full((128,), 2.0), at=pc.resid_pre[1], tokens=pc.generated[0])
    plain, edited = (
        pair.lm.run(PROMPTS[0], capture=[pc.resid_pre[1]], edits=edits, **SAMPLED) for edits in ([], [steer])
    )
    assert plain.positions(pc.resid_pre[1]) == list(range(22))
    assert torch.equal(edited[pc.resid_pre[1]][:20], plain[pc.resid_pre[1]][:20])
    assert torch.equal(edited[pc.resid_pre[1]][20], plain[pc.resid_pre[1]][20] + 2.0)
    assert list(edited.acted.values()) == [[20]]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_decoder_is_that_of_text_alone(name, tmp_path):
    """The same weights in a class for text: the same values, from other modules."""
    import transformers

    net = that_reads_images(tmp_path / "whole", name)
    config = net.config.get_text_config().to_dict()
    for key in ("model_type", "architectures", "rope_parameters"):
        rope = config.pop(key, None)
    config["tie_word_embeddings"] = net.config.tie_word_embeddings
    if "qwen" not in name or "qwen3_5" in name:
        config["rope_parameters"] = rope
    alone = getattr(transformers, f"{ALONE[name]}ForCausalLM")(
        transformers.CONFIG_MAPPING[KINDS.get(name, "qwen2")](**config)
    )
    decoder, head = (net.language_model.model, net.language_model.lm_head) if name == "llama4" else (
        net.model.language_model, net.lm_head)  # fmt: skip
    alone.model.load_state_dict(decoder.state_dict())
    alone.lm_head.load_state_dict(head.state_dict())
    alone.save_pretrained(tmp_path / "alone")
    runs = []
    for folder in ("whole", "alone"):
        with pc.LM(str(tmp_path / folder), engine="transformers", **IDS) as lm:
            names = lm.sites.names
            run = lm.run(PROMPTS[0], capture=[pc.Site(word) for word in names], **SAMPLED)
            runs.append({str(ref): flat(run[str(ref)]) for ref in lm.sites.refs()} | {"ids": run.token_ids})
            below = ("model.language_model.", "language_model.model.")
            assert all(tap.module.startswith(below) == (folder == "whole") or point.rows == "sampled"
                       for point, tap in lm.sites.taps("transformers"))  # fmt: skip
    whole, text = runs
    assert whole.keys() == text.keys()
    assert whole.pop("ids") == text.pop("ids")
    assert max(worst_row(whole[place], text[place]) for place in whole) <= 1e-5


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_lens_reads_such_a_model(name, tmp_path):
    """Its modules have other names, and a readout is proved on the live model before it is used."""
    that_reads_images(tmp_path, name)
    with pc.LM(str(tmp_path), engine="transformers", prove=False, **IDS) as lm:
        assert pc.studies.logit_lens(lm, PROMPTS[1], readout="weights").readout == "weights"


gemma = pytest.mark.parametrize("pair", ["gemma3"], indirect=True)  # the others are started for text alone


def shown(words: int, seed: int) -> dict[str, Any]:
    """Words, an image of four tokens, and eight words more."""
    pixels = np.random.RandomState(seed).randint(0, 255, (28, 28, 3), dtype=np.uint8)
    text = [f"w{20 + i}" for i in range(words + 8)]
    return {"prompt": " ".join([*text[:words], "<start_of_image>", *text[words:]]),
            "multi_modal_data": {"image": Image.fromarray(pixels)}}  # fmt: skip


@gemma
def test_captures_at_an_image_are_what_plain_hooks_see(pair):
    """vLLM's CPU build has an image's tokens attend to what comes before them alone: so do the plain hooks here."""
    plain = PlainReader(Path(pair.lm.model.name), "Gemma3ForConditionalGeneration", gemma_pictures())
    given = shown(10, 1)
    run = pair.lm.run(given, capture=[pc.resid_pre, pc.final_norm], **SAMPLED)
    assert run.images == [[11, 12, 13, 14]]
    ids = [*run.prompt_token_ids, *run.token_ids[:-1]]
    expected = plain.forward(ids, [given["multi_modal_data"]["image"]])
    for layer in range(3):
        assert worst_row(run[pc.resid_pre[layer]], expected.rows_TD["resid_pre", layer]) <= 1e-4
    assert worst_row(run[pc.final_norm], expected.rows_TD["final_norm", 0]) <= 1e-4


@gemma
def test_an_edit_of_an_image_that_sees_ahead_keeps_the_block_of_its_first_token(pair):
    """Its tokens attend to one another in both directions (though not on a CPU), so what is edited at the last of them,
    in the third block, changes keys and values in the second."""
    given, push = shown(61, 2), np.full(128, 2.0, np.float32)
    later, last = (pc.Add(push, at=pc.resid_pre[1], tokens=tokens) for tokens in ("prompt[70]", "image[0][-1]"))
    order = [[], [later], [last], [last], []]
    runs = [pair.lm.run(given, edits=edits, logprobs=True, **SAMPLED) for edits in order]
    assert runs[0].images == [[62, 63, 64, 65]]
    assert [run.cached_tokens for run in runs] == [0, 64, 0, 64, 64]
    assert runs[3].logprobs == runs[2].logprobs != pytest.approx(runs[0].logprobs, abs=0.01)
    assert runs[4].logprobs == runs[0].logprobs


@gemma
def test_a_program_that_was_bound_without_the_images_is_refused(pair):
    """Straight at the engine: `pc.LM` binds to the prompt with its images in their places."""
    picture = {"prompt": "w9 <start_of_image> w10 w11", "multi_modal_data": shown(0, 0)["multi_modal_data"]}

    def act(engine: Any, add: Any) -> None:
        for name, program, prompt in (("plain", None, picture), ("edited", scaled("edited"), picture),
                                      ("text", scaled("text"), {"prompt_token_ids": PROMPTS[1]})):  # fmt: skip
            add(name, program, prompt)

    outputs, verdicts = raw(pair.lm, act)
    assert {name.partition("-")[0] for name in outputs} == {"plain", "edited", "text"}
    assert len(outputs["plain"].outputs[0].token_ids) == 3
    by_name = {name.partition("-")[0]: verdict for name, verdict in verdicts.items()}
    kind, message, _ = by_name["edited"].error
    assert kind == "ProgramError"
    assert "a prompt of 8 tokens" in message
    assert " 9: " in message
    assert by_name["text"].error is None
    assert by_name["text"].receipt == receipt_of(scaled("text"))


@pytest.mark.parametrize("pair", ["llama4", "gemma4"], indirect=True)
def test_images_that_were_not_tried_are_refused_by_name(pair):
    picture = {"prompt_token_ids": [5, 6, 509], "multi_modal_data": shown(0, 0)["multi_modal_data"]}
    with pytest.raises(pc.ProgramError, match=f"{MULTIMODAL[pair.name][0]}ForConditionalGeneration"):
        pair.lm.run(picture, max_tokens=1)


def test_transformers_takes_no_images(pair):
    with pytest.raises(pc.EngineError, match=r"prompt: the transformers engine"):
        pair.hub.run(shown(1, 0), max_tokens=1)


def test_a_model_whose_decoder_has_no_table_is_refused(tmp_path):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = dict(MULTIMODAL["mistral3"][1], model_type="llama")
    config = LlavaConfig(
        text_config=text, vision_config=dict(MULTIMODAL["gemma3"][2], model_type="siglip_vision_model")
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    for engine, options in {"transformers": {}, "vllm": EAGER | NO_IMAGES}.items():
        with pytest.raises(ModelError, match=r"no site table for .*Llava.*Gemma3ForConditional"):
            pc.LM(str(tmp_path), engine=engine, **IDS, **options)
