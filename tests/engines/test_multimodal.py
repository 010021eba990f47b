"""Decoders within models that also read images: requests of text take programs, with the sites of the decoder's family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import patchclamp as pc
from patchclamp.engines.carried import receipt_of
from patchclamp.errors import ModelError
from patchclamp.language.registry import SITES

from ..models import MULTIMODAL, that_reads_images, with_gemma_processor
from .test_admission import raw, scaled
from .test_families import EAGER, IDS, PROMPTS, SAMPLED, Pair, every_edit_is_equal, flat, rows_are_equal
from .test_parity import worst_row

pytestmark = pytest.mark.usefixtures("inspected_here", "_torchvision")
NO_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
# text decoders of their own, which compute the same
ALONE = {"gemma3": "Gemma3", "mistral3": "Mistral", "qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2", "qwen3_vl": "Qwen3"}
KINDS = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_vl": "qwen3"}


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl", "qwen3_vl"])
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
    names = [name for name in SITES if name not in ("router", "mixer_out")]
    assert pair.lm.sites.names == pair.hub.sites.names == names
    assert pair.lm.sites.withdrawn == pair.hub.sites.withdrawn == {}
    rows_are_equal(pair, names)


def test_every_edit_moves_the_logits_as_on_transformers(pair):
    every_edit_is_equal(pair)


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
    if "qwen" not in name:
        config["rope_parameters"] = rope
    alone = getattr(transformers, f"{ALONE[name]}ForCausalLM")(
        transformers.CONFIG_MAPPING[KINDS.get(name, "qwen2")](**config)
    )
    alone.model.load_state_dict(net.model.language_model.state_dict())
    alone.lm_head.load_state_dict(net.lm_head.state_dict())
    alone.save_pretrained(tmp_path / "alone")
    runs = []
    for folder in ("whole", "alone"):
        with pc.LM(str(tmp_path / folder), engine="transformers", **IDS) as lm:
            names = lm.sites.names
            run = lm.run(PROMPTS[0], capture=[pc.Site(word) for word in names], **SAMPLED)
            runs.append({str(ref): flat(run[str(ref)]) for ref in lm.sites.refs()} | {"ids": run.token_ids})
            assert all(tap.module.startswith("model.language_model.") == (folder == "whole") or point.rows == "sampled"
                       for point, tap in lm.sites.taps("transformers"))  # fmt: skip
    whole, text = runs
    assert whole.keys() == text.keys()
    assert whole.pop("ids") == text.pop("ids")
    assert max(worst_row(whole[place], text[place]) for place in whole) <= 1e-5


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_lens_reads_such_a_checkpoint(name, tmp_path):
    """Its files call the modules by other names, and a readout is proved on the live model before it is used."""
    that_reads_images(tmp_path, name)
    with pc.LM(str(tmp_path), engine="transformers", prove=False, **IDS) as lm:
        assert pc.studies.logit_lens(lm, PROMPTS[1], readout="checkpoint").readout == "checkpoint"


@pytest.mark.parametrize("pair", ["gemma3"], indirect=True)  # the others are started for text alone
def test_a_request_with_an_image_takes_no_program(pair):
    """Straight at the engine: `pc.LM` takes no images, and a server refuses them before."""
    from PIL import Image

    picture = {"prompt": "w9 <start_of_image> w10", "multi_modal_data": {"image": Image.new("RGB", (28, 28))}}

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
    assert message == "programs act on text alone, and this prompt has image in it: leave out one of the two"
    assert by_name["text"].error is None
    assert by_name["text"].receipt == receipt_of(scaled("text"))


def test_a_model_whose_decoder_has_no_table_is_refused(tmp_path):
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = dict(MULTIMODAL["mistral3"][1], model_type="llama")
    config = LlavaConfig(
        text_config=text, vision_config=dict(MULTIMODAL["gemma3"][2], model_type="siglip_vision_model")
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    for engine, options in {"transformers": {}, "vllm": EAGER | NO_IMAGES}.items():
        with pytest.raises(ModelError, match=r"no site table for .*Llava.* there are tables for Gemma3ForConditional"):
            pc.LM(str(tmp_path), engine=engine, **IDS, **options)
