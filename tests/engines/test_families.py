"""Every family of the table, on a tiny random model made on the spot: proved, and equal on both engines."""

import pytest
import torch
import transformers

import patchclamp as pc

from .test_parity import EVERYTHING, worst_row

SMALL = dict(vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=256)  # fmt: skip


@pytest.fixture(scope="module", params=["Llama", "Mistral", "Qwen2", "Qwen3"])
def folder(request, smollm2, tmp_path_factory):
    torch.manual_seed(torch.seed() % (1 << 30))
    extra = {"sliding_window": None} if request.param == "Mistral" else {}
    config = getattr(transformers, f"{request.param}Config")(**SMALL, **extra)
    net = transformers.AutoModelForCausalLM.from_config(config)
    for weights in net.parameters():
        torch.nn.init.normal_(weights, std=0.3 if weights.dim() == 1 else 0.08)
    path = tmp_path_factory.mktemp(request.param)
    net.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(smollm2).save_pretrained(path)
    return str(path)


def test_sites_are_proved_and_equal(folder):
    options = dict(enforce_eager=True, max_model_len=128, max_num_seqs=16, kv_cache_memory_bytes=1 << 26)
    with (
        pc.LM(folder, engine="transformers", dtype="float32") as hub,
        pc.LM(folder, engine="vllm", dtype="float32", **options) as lm,
    ):
        assert lm.sites.names == hub.sites.names == EVERYTHING
        prompts = [torch.randint(3, 49000, (n,)).tolist() for n in (7, 19)]
        edits = [[], [pc.Add(torch.randn(128), at=pc.resid_mid[1], tokens=pc.prompt[-1], scale=3.0)]]
        for change in edits:
            ours, theirs = (m.run(prompts, max_tokens=2, capture=EVERYTHING, edits=change) for m in (lm, hub))
            for a, b in zip(ours, theirs, strict=True):
                # the last position is the sampled token, which near-equal random logits may choose differently
                for place in lm.sites.places():
                    assert worst_row(a[str(place)][:-1], b[str(place)][:-1]) <= 1e-4, place
        assert (
            ours[0][pc.logits] - lm.run(prompts, max_tokens=2, capture=[pc.logits])[0][pc.logits]
        ).abs().max() > 1e-3
