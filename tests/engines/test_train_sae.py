"""The examples that train, small: an SAE explains held-out rows, and its features steer the model; a probe separates texts."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import patchclamp as pc
from tests.reference.harvest import rows_of

ROOT = Path(__file__).resolve().parents[2]


def texts() -> list[str]:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    return [each[:200] for each in re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n") if len(each) > 200][:26]


def loaded(name: str):
    """An example as a module, which may import others."""
    sys.path.append(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(example)
    finally:
        sys.path.remove(str(ROOT / "examples"))
    return example


@pytest.mark.slow  # what it calls is tested in test_sae_studies.py
def test_an_sae_is_trained_read_steered_and_evaluated(engines, tmp_path):
    example = loaded("train_sae")
    torch.manual_seed(0)
    lm, site = engines.get("transformers", "float32"), "resid_post[6]"
    made = example.demonstrate(lm, texts(), tmp_path, site, features=512, k=24, steps=60)
    assert lm.sites.dictionaries == {}
    totals = made["quality"].totals
    assert totals["explained"] > 0.6
    assert totals["l0"] <= 24
    assert totals["loss_sae"] < totals["loss_ablated"] - 2
    assert totals["loss_recovered"] > 0.8
    rows = pc.studies.Harvested(tmp_path / "rows").batches(site, 512)
    untrained = example.train_topk(rows, 576, 512, 24, 0)
    held = [lm.tokens(texts()[-1])]
    assert pc.studies.evaluate_sae(lm, untrained, held, at=site, tokens="every[1:]").totals["explained"] < 0.5
    assert len(set(made["texts"].values())) > 1
    assert made["sae"].content == pc.SAE.load(tmp_path / "sae").content
    assert abs(made["needed"].faithfulness[-1] - 1) < 1e-3
    assert len(made["shown"].contexts) > 10
    assert (tmp_path / "contexts.html").stat().st_size > 5_000


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_sae_of_a_stream_is_that_of_captured_rows(engine, narrow):
    """The rows of plain captures, in the stream's order, give the same SAE; it explains held-out rows."""
    lm, site, example = narrow.get(engine, "float32"), "resid_post[6]", loaded("train_sae")
    documents = [lm.tokens(text)[:48] for text in texts()]
    stream = pc.studies.Harvest(documents=documents[:-4], sites=[site], dtype="float32", parts=3).stream(
        lm, batch_rows=128, index=True
    )
    captured = rows_of(lm, documents, [site])[site]
    batches = list(stream)
    plain = [torch.tensor(np.array([captured[place] for place in zip(
        batch["document"].tolist(), batch["position"].tolist(), strict=True)])) for batch in batches]  # fmt: skip
    held = np.array([row for (document, _), row in captured.items() if document >= len(documents) - 4])

    def unexplained(rows: list[torch.Tensor], steps: int) -> float:
        torch.manual_seed(0)
        sae = example.train_topk(itertools.cycle(rows), stream.widths[site], 256, 16, steps)
        return float(((held - sae.decode(sae.encode(held))) ** 2).sum() / ((held - held.mean(0)) ** 2).sum())

    of_stream, of_plain = (unexplained(rows, 60) for rows in ([batch[site] for batch in batches], plain))
    assert of_stream < 0.8 * unexplained(plain, 1)
    assert of_stream == pytest.approx(of_plain, rel=0.02)


def test_a_probe_is_trained_on_a_stream(narrow):
    prose = texts()
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), flags=re.S)
    written = [text[:120] for pair in zip(prose, code, strict=False) for text in pair]
    labels = [0, 1] * (len(written) // 2)
    lm, example = narrow.get("transformers", "float32"), loaded("train_probe")
    probe, accuracy = example.demonstrate(lm, written, labels, "resid_post[2]", passes=4)
    assert accuracy > 0.85  # half of the held-out texts have either label
    assert (probe.pool, str(probe.at)) == ("mean", "resid_post[2]")


def streamed(narrow, batch_rows: int) -> tuple[Any, np.ndarray]:
    """A stream of rows of width 64, and the rows that plain captures have."""
    lm, site = narrow.get("transformers", "float32"), "resid_post[2]"
    documents = [lm.tokens(text)[:48] for text in texts()]
    harvest = pc.studies.Harvest(documents=documents, sites=[site], dtype="float32", parts=3)
    rows = np.stack(list(rows_of(lm, documents, [site])[site].values()))
    return harvest.stream(lm, batch_rows=batch_rows), rows


def test_dictionary_learnings_trainer_takes_a_stream(narrow, tmp_path):
    training = pytest.importorskip("dictionary_learning.training")
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers import StandardTrainer

    stream, rows = streamed(narrow, 64)
    width, steps = rows.shape[1], stream.rows // 64
    trainer = {"trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": width, "dict_size": 256,
               "lr": 3e-3, "device": "cpu", "steps": steps, "layer": 2, "lm_name": "narrow", "warmup_steps": 1,
               "l1_penalty": 0.01, "sparsity_warmup_steps": 2, "submodule_name": "resid_post[2]"}  # fmt: skip
    training.trainSAE(data=stream, trainer_configs=[trainer], steps=steps, save_dir=str(tmp_path), device="cpu")
    saved = tmp_path / "trainer_0"
    assert json.loads((saved / "config.json").read_text())["buffer"] == stream.config
    trained, untrained = AutoEncoder.from_pretrained(str(saved / "ae.pt")), AutoEncoder(width, 256)
    errors = [float((sae(held) - held).square().mean().detach()) for held in [torch.from_numpy(rows)]
              for sae in (trained, untrained)]  # fmt: skip
    assert errors[0] < errors[1] / 2


def test_saelens_trainer_takes_a_stream(narrow):
    pytest.importorskip("sae_lens")
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    stream, rows = streamed(narrow, 64)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=rows.shape[1], d_sae=256, k=16))
    held = torch.from_numpy(rows)
    before = float((sae(held) - held).square().mean().detach())
    cfg = SAETrainerConfig(total_training_samples=stream.rows // 64 * 64, train_batch_size_samples=64, lr=0.01, lr_end=0.01,
                           logger=LoggingConfig(log_to_wandb=False))  # fmt: skip
    trained = SAETrainer(cfg, sae, iter(stream)).fit()
    after = float((trained(held) - held).square().mean().detach())
    assert after < before / 2
