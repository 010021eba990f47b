"""Make tests/golden/sae: small random SAEs in files that their packages saved, and what the packages compute with them.

Made with sae-lens 6.54.0 (transformer-lens 3), dictionary_learning 0.1.0, eai-sparsify 1.3.3, llamascopium 2.0.0b34 and
torch 2.13.0 (CPU): `python tests/golden/make_saes.py`, in an environment with these. wandb and nnsight, which log and
record activations, are replaced by stubs. Each folder has the package's files and `expected.npz`: rows, features, output.
"""

import contextlib
import importlib.machinery
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

for name in ("wandb", "wandb.sdk", "wandb.sdk.wandb_run", "nnsight"):
    spec = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = MagicMock(__spec__=spec, __path__=[], LanguageModel=object, Run=object)

import numpy as np
import torch
from dictionary_learning import dictionary
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from llamascopium.models.sae import SAEConfig, SparseAutoEncoder
from sae_lens import saes
from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.saes.matryoshka_batchtopk_sae import MatryoshkaBatchTopKTrainingSAE, MatryoshkaBatchTopKTrainingSAEConfig
from sae_lens.saes.sae import SAE, SAEMetadata
from sparsify import SparseCoder
from sparsify.config import SparseCoderConfig

FOLDER = Path(__file__).parent / "sae"
WIDTH, FEATURES, OUTPUTS, ROWS = 8, 24, 6, 6


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Fill every parameter; thresholds are positive, and gains near 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_()
            if "threshold" in name:
                parameter.abs_()
            if "r_mag" in name:
                parameter.mul_(0.3)
    return module.eval()


def keep(folder: Path, encode, output) -> None:
    rows = 2 * torch.randn(ROWS, WIDTH) + 0.5
    with torch.no_grad():
        features = encode(rows)
        arrays = {"rows": rows, "features": features, "output": output(rows)}
    np.savez_compressed(folder / "expected.npz", **{name: array.numpy() for name, array in arrays.items()})
    print(folder.name, "active:", (features != 0).sum(1).tolist())


def saelens() -> None:
    metadata = {"model_name": "tiny", "hook_name": "blocks.3.hook_resid_post"}
    between = {"model_name": "tiny", "hook_name": "blocks.3.ln2.hook_out", "hook_name_out": "blocks.3.hook_mlp_out"}
    for kind, (sae_class, options) in {
        "standard": (saes.StandardSAE, {}),
        "standard_layer_norm": (saes.StandardSAE, {"normalize_activations": "layer_norm"}),
        "standard_rms": (
            saes.StandardSAE,
            {"normalize_activations": "constant_norm_rescale", "apply_b_dec_to_input": False},
        ),
        "topk": (saes.TopKSAE, {"k": 5}),
        "topk_by_norm": (saes.TopKSAE, {"k": 5, "rescale_acts_by_decoder_norm": True}),
        "jumprelu": (saes.JumpReLUSAE, {}),
        "gated": (saes.GatedSAE, {}),
        "transcoder": (saes.Transcoder, {"d_out": OUTPUTS}),
        "skip_transcoder": (saes.SkipTranscoder, {"d_out": OUTPUTS}),
        "jumprelu_transcoder": (saes.JumpReLUTranscoder, {"d_out": WIDTH}),
        "jumprelu_skip_transcoder": (saes.JumpReLUSkipTranscoder, {"d_out": WIDTH}),
    }.items():
        folder = FOLDER / f"saelens_{kind}"
        is_transcoder = "d_out" in options
        more = {"apply_b_dec_to_input": False} if is_transcoder else {}
        config_class = getattr(saes, f"{sae_class.__name__}Config")
        config = config_class(
            d_in=WIDTH,
            d_sae=FEATURES,
            metadata=SAEMetadata(**(between if is_transcoder else metadata)),
            **more,
            **options,
        )
        sae = randomise(sae_class(config))
        sae.save_model(folder)
        keep(folder, sae.encode, sae)
    for kind, sae_class, config in (
        ("batchtopk", BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig(d_in=WIDTH, d_sae=FEATURES, k=5)),
        (
            "matryoshka",
            MatryoshkaBatchTopKTrainingSAE,
            MatryoshkaBatchTopKTrainingSAEConfig(d_in=WIDTH, d_sae=FEATURES, k=5, matryoshka_widths=[8, FEATURES]),
        ),
    ):
        training = randomise(sae_class(config))
        training.topk_threshold.fill_(3.0)
        folder = FOLDER / f"saelens_{kind}"
        training.save_inference_model(folder)
        sae = SAE.load_from_disk(folder)
        keep(folder, sae.encode, sae)
        checkpoint = FOLDER / f"saelens_{kind}_checkpoint"
        training.save_model(checkpoint)
        shutil.copy(folder / "expected.npz", checkpoint)
    # version 5 and older: a flat cfg.json
    for kind, cfg in {
        "old_standard": {"hook_point": "blocks.3.hook_mlp_out", "normalize_activations": False},
        "old_topk": {
            "hook_name": "blocks.3.hook_resid_post", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 5},
            "apply_b_dec_to_input": False,
        },
    }.items():  # fmt: skip
        folder = FOLDER / f"saelens_{kind}"
        randomise(saes.StandardSAE(saes.StandardSAEConfig(d_in=WIDTH, d_sae=FEATURES))).save_model(folder)
        cfg |= {"d_in": WIDTH, "d_sae": FEATURES, "dtype": "torch.float32", "device": "cpu", "model_name": "tiny"}
        (folder / "cfg.json").write_text(json.dumps(cfg))
        sae = SAE.load_from_disk(folder)
        keep(folder, sae.encode, sae)


def dictionary_learning() -> None:
    for kind, made, more in (
        ("AutoEncoder", dictionary.AutoEncoder(WIDTH, FEATURES), {}),
        ("AutoEncoderNew", dictionary.AutoEncoderNew(WIDTH, FEATURES), {}),
        ("GatedAutoEncoder", dictionary.GatedAutoEncoder(WIDTH, FEATURES), {}),
        ("JumpReluAutoEncoder", dictionary.JumpReluAutoEncoder(WIDTH, FEATURES), {}),
        ("AutoEncoderTopK", AutoEncoderTopK(WIDTH, FEATURES, 5), {"k": 5}),
        ("BatchTopKSAE", BatchTopKSAE(WIDTH, FEATURES, 5), {"k": 5}),
        ("MatryoshkaBatchTopKSAE", MatryoshkaBatchTopKSAE(WIDTH, FEATURES, 5, [8, FEATURES - 8]), {"k": 5}),
    ):
        randomise(made)
        if "TopK" in kind:
            made.threshold.fill_(2.0)
        folder = FOLDER / f"dictionary_{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(made.state_dict(), folder / "ae.pt")
        trainer = {
            "dict_class": kind,
            "layer": 3,
            "lm_name": "tiny",
            "activation_dim": WIDTH,
            "submodule_name": "resid_post_layer_3",
        } | more
        (folder / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {"ctx_len": 128}}))
        loaded = type(made).from_pretrained(folder / "ae.pt", **more)
        keep(folder, loaded.encode, loaded)


def sparsify() -> None:
    for module, options in {
        "layers.3": {"num_latents": FEATURES},
        "layers.3.mlp": {"num_latents": FEATURES, "transcode": True, "skip_connection": True},
        "layers.4.mlp": {"expansion_factor": FEATURES // WIDTH, "transcode": True},
    }.items():
        folder = FOLDER / "sparsify" / module
        coder = randomise(SparseCoder(WIDTH, SparseCoderConfig(k=5, **options)))
        coder.save_to_disk(folder)

        def encode(rows, coder=coder):
            top = coder.encode(rows)
            return torch.zeros(len(rows), FEATURES).scatter(1, top.top_indices, top.top_acts)

        def output(rows, coder=coder):
            return coder(rows).sae_out

        keep(folder, encode, output)


def llama_scope() -> None:
    stream, between = ["blocks.3.hook_resid_post"] * 2, ["blocks.3.ln2.hook_out", "blocks.3.hook_mlp_out"]
    for kind, hooks, options in (
        ("jumprelu", stream, {"act_fn": "jumprelu", "norm_activation": "dataset-wise"}),
        ("transcoder", between, {"act_fn": "jumprelu", "norm_activation": "dataset-wise", "use_decoder_bias": False}),
        ("token_wise", stream, {"act_fn": "relu", "norm_activation": "token-wise"}),
        ("topk", stream, {"act_fn": "topk", "top_k": 5, "norm_activation": "inference",
                          "sparsity_include_decoder_norm": False}),
    ):  # fmt: skip
        folder = FOLDER / f"llama_scope_{kind}"
        config = SAEConfig(
            hook_point_in=hooks[0], hook_point_out=hooks[1], d_model=WIDTH, expansion_factor=FEATURES // WIDTH, device="cpu",
            dtype=torch.float32, **options,
        )  # fmt: skip
        sae = randomise(SparseAutoEncoder(config))
        with torch.no_grad():
            for name, parameter in sae.named_parameters():
                if "log_jumprelu" in name:
                    parameter.log_()
        sae.set_dataset_average_activation_norm({hooks[0]: 6.3125, hooks[1]: 6.3125 if kind != "transcoder" else 3.4})
        sae.save_pretrained(folder)
        config.save_hyperparameters(folder)

        def encode(rows, sae=sae, hook=hooks[0]):
            return sae.encode(sae.normalize_activations({hook: rows})[hook])

        def output(rows, sae=sae, hooks=hooks, encode=encode):
            scale = sae.compute_norm_factor(rows, hook_point=hooks[1])
            return sae.decode(encode(rows)) / scale

        keep(folder, encode, output)


if __name__ == "__main__":
    torch.manual_seed(46)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(FOLDER)
    saelens()
    dictionary_learning()
    sparsify()
    llama_scope()
