"""The example that trains an SAE, small: it explains held-out rows, and its features steer the model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import patchclamp as pc

ROOT = Path(__file__).resolve().parents[2]


def texts() -> list[str]:
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    return [each[:200] for each in re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n") if len(each) > 200][:26]


@pytest.mark.slow  # what it calls is tested in test_sae_studies.py
def test_an_sae_is_trained_read_steered_and_evaluated(engines, tmp_path):
    spec = importlib.util.spec_from_file_location("train_sae", ROOT / "examples" / "train_sae.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
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
