"""From activations to a measured intervention: harvest rows, train an SAE on them, find the feature that tells two
moods apart, steer with it, and evaluate the effect.

    pip install 'patchclamp[harvest]'
    python examples/journey_features.py smollm2 work

The model writes the documents itself. The SAE is small, so it trains in half a minute; a real one needs millions of
rows. Two numbers keep the result honest: the effect of the same strength on another feature, and how much of the
model's loss the SAE's reconstruction recovers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from moods import PLEASANT, UNPLEASANT
from train_sae import LATER, train_topk

import patchclamp as pc

QUESTIONS = [
    {"prompt": f"{subject} was", "choices": [" wonderful", " terrible"], "answer": 0}
    for subject in ("The film", "The food", "Our trip", "The weather", "The party", "My day", "Her speech", "The news")
]


def mean_features(lm: pc.LM, sae: pc.SAE, texts: list[str], site: str) -> np.ndarray:
    """Each feature's mean over the tokens after the first, averaged over texts, [F]."""
    runs = lm.run(texts, max_tokens=1, capture=[site])
    return np.mean([sae.encode(run[site][1:].float().numpy()).mean(0) for run in runs], axis=0)


def journey(lm: pc.LM, folder: Path, site: str, documents: int, steps: int) -> dict[str, Any]:
    # 1. Harvest: the rows of texts that the model writes, on disk
    openings = [text.rpartition(",")[0] or text[: len(text) // 2] for text in PLEASANT + UNPLEASANT]
    written = lm.run(openings, max_tokens=48, n=documents, temperature=1.0, sampling={"seed": 0})
    texts = [opening + run.text for opening, runs in zip(openings, written, strict=True) for run in runs]
    data = pc.studies.Harvest(
        documents=texts, folder=folder / "rows", sites=[site], filters=pc.studies.Filters(positions=((1, None),))
    ).run(lm).open()  # fmt: skip
    print(f"{len(texts)} documents")

    # 2. Train an SAE, and attach it
    torch.manual_seed(0)
    sae = train_topk(data.batches(site, 512, repeat=True), data.width(site), features=1024, k=24, steps=steps)
    sae.save(folder / "sae")
    sae = pc.SAE.load(folder / "sae", site=site, model=lm.model.name)
    lm.attach(sae, name="moods")

    # 3. Find the feature that rises most from unpleasant to pleasant texts, and one that does not change
    difference = mean_features(lm, sae, PLEASANT, site) - mean_features(lm, sae, UNPLEASANT, site)
    feature, control = int(difference.argmax()), int(np.abs(difference).argmin())
    shown = pc.studies.top_contexts(lm, sae="moods", documents=texts, folder=folder / "contexts", features=[feature])
    print(f"feature {feature} differs by {difference[feature]:+.2f}; it is largest at")
    print(shown.to_frame()[["value", "text"]].head(5))

    # 4. Steer with it: a multiple of the largest value that it has had
    most = float(max(shown.to_frame()["value"]))
    steered = {
        name: pc.SetFeature("moods", number, strength * most, LATER, mode="add")
        for name, number, strength in (
            ("pleasant", feature, 2.0),
            ("unpleasant", feature, -2.0),
            ("control", control, 2.0),
        )
    }
    for name, edit in steered.items():
        print(f"{name}: The film was{lm.run('The film was', max_tokens=12, edits=edit).text!r}")

    # 5. Evaluate: the log-probability of the pleasant word, and the cost for the model
    scored = pc.studies.evaluate(lm, QUESTIONS, {"unedited": None, **steered})
    print(scored.to_frame())
    quality = pc.studies.evaluate_sae(lm, "moods", UNPLEASANT, tokens=LATER)
    print(quality.totals)
    lm.detach("moods")
    return {"sae": sae, "scored": scored, "quality": quality, "steered": steered, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--site", default="resid_post[12]")
    parser.add_argument("--engine")
    parser.add_argument("--documents", type=int, default=4, help="documents for each of 24 openings")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    with pc.LM(args.model, engine=args.engine) as lm:
        journey(lm, args.folder, args.site, args.documents, args.steps)


if __name__ == "__main__":
    main()
