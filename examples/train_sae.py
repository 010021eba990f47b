"""Train a sparse autoencoder on a model's activations, then read, steer and evaluate with it.

    pip install 'patchclamp[harvest]'
    python examples/train_sae.py smollm2 work --site "resid_post[10]"            # on texts that the model writes itself
    python examples/train_sae.py smollm2 work --documents documents.txt --steps 20000
    python examples/train_sae.py smollm2 work --documents documents.txt --stream              # without rows on disk

The rows come from a harvest, on disk or streamed. The SAE is a TopK one, with an auxiliary loss that revives dead
features (Gao et al. 2024, arXiv:2406.04093), and is saved in SAELens' format.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

import torch

import patchclamp as pc

OPENINGS = ("The", "In 1969,", "Once upon a time", "Dear", "To make", "def", "She said", "According to", "A good", "My")
LATER = "every[1:]"  # the first token's row is tens of times longer than all others


def train_topk(rows: Iterable[torch.Tensor], width: int, features: int, k: int, steps: int) -> pc.SAE:
    """A TopK SAE of batches of rows [N, D].

    x = (row − mean) / scale is reconstructed as D · topk(E · x + e) + d, with unit columns of D, which starts as Eᵀ.
    """
    batches = iter(rows)
    first = next(batches).float()
    mean = first.mean(0)
    scale = (first - mean).square().mean().sqrt()
    encoder = torch.nn.functional.normalize(torch.randn(features, width), dim=1)
    decoder, bias, out = encoder.clone(), torch.zeros(features), torch.zeros(width)
    parameters = [encoder, decoder, bias, out]
    adam = torch.optim.Adam([each.requires_grad_() for each in parameters], lr=1e-3)
    since = torch.zeros(features)  # steps since each feature was active
    for step, batch in enumerate(itertools.islice(batches, steps)):
        x = (batch.float() - mean) / scale
        pre = x @ encoder.T + bias
        best = pre.relu().topk(k)
        error = x - out - torch.zeros_like(pre).scatter(1, best.indices, best.values) @ decoder
        loss = error.square().mean()
        dead = torch.nonzero(since > 50)[:, 0]  # the largest dead features learn what the others miss
        if len(dead):
            rest = pre[:, dead].relu().topk(min(2 * k, len(dead)))
            missed = torch.zeros(len(x), len(dead)).scatter(1, rest.indices, rest.values) @ decoder[dead]
            loss = loss + (error.detach() - missed).square().mean() / 32
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 1e-3 * min(1.0, 5 * (1 - step / steps))
        adam.step()
        with torch.no_grad():
            decoder /= decoder.norm(dim=1, keepdim=True)
            since += 1
            since[best.indices[best.values > 0]] = 0
        if step % 100 == 0:
            print(f"step {step}: unexplained {error.square().mean():.3f}, {len(dead)} dead features")
    with torch.no_grad():
        encoder, decoder = encoder / scale, decoder * scale
        return pc.SAE(encoder, bias - encoder @ mean, decoder, mean + out * scale, k=k)


def demonstrate(
    lm: pc.LM, documents: list[str], folder: Path, site: str, features: int, k: int, steps: int, stream: bool = False
) -> dict:
    """Everything from a harvest to the evaluation. The last tenth of the documents is held out."""
    kept = len(documents) - max(len(documents) // 10, 1)
    harvest = pc.studies.Harvest(
        documents=documents[:kept], folder=folder / "rows", sites=[site], context=128, overlong="cut",
        filters=pc.studies.Filters(positions=((1, None),)),
    )  # fmt: skip
    if stream:
        rows = harvest.stream(lm, batch_rows=512)
        again = itertools.chain.from_iterable(itertools.repeat(rows))  # runs the documents in each round
        trained = train_topk(again, rows.widths[site], features, k, steps)
    else:
        data = harvest.run(lm).open()
        trained = train_topk(data.batches(site, 512, repeat=True), data.width(site), features, k, steps)
    trained.save(folder / "sae")

    sae = pc.SAE.load(folder / "sae", site=site, model=lm.model.name)
    lm.attach(sae, name="trained")
    prompt = "The capital of France is"
    read = lm.run(prompt, max_tokens=1, capture=[pc.Features("trained", top=5)])
    print(read.features["trained"].to_frame().tail(5))
    feature, value = int(read.features["trained"].ids[-1, 0]), float(read.features["trained"].values[-1, 0])
    texts = {
        strength: lm.run(prompt, max_tokens=12, edits=[
            pc.SetFeature("trained", feature, strength * value, LATER, mode="add")
        ]).text
        for strength in (0.0, 4.0, 12.0)
    }  # fmt: skip
    for strength, text in texts.items():
        print(f"feature {feature} plus {strength:g} times its value: {prompt}{text!r}")
    held = [lm.tokens(text)[:128] for text in documents[kept:]]
    quality = pc.studies.evaluate_sae(lm, "trained", held, tokens=LATER)
    print(quality.to_frame())
    print(quality.totals)
    needed = pc.studies.feature_attribution(
        lm, sae="trained", prompt=prompt, answer=" Paris", tokens=LATER, estimate=False
    )
    print(needed.to_frame().head(5))
    best = needed.to_frame()["feature"].tolist()[:2]
    shown = pc.studies.top_contexts(lm, sae="trained", documents=documents[:kept], folder=folder / "features",
                                    features=best, context=128)  # fmt: skip
    shown.to_html(folder / "contexts.html")
    print(shown.to_frame()[["feature", "value", "text"]])
    lm.detach("trained")
    return {"sae": sae, "texts": texts, "quality": quality, "needed": needed, "shown": shown}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--documents", type=Path, help="a text file, a document per line; by default the model writes 400"
    )
    parser.add_argument("--site", default="resid_post[10]")
    parser.add_argument("--engine")
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stream", action="store_true", help="compute rows while training instead of writing them")
    args = parser.parse_args()
    torch.manual_seed(0)
    with pc.LM(args.model, engine=args.engine) as lm:
        if args.documents is None:
            written = lm.run(list(OPENINGS), max_tokens=96, n=40, temperature=1.0, sampling={"seed": 0})
            documents = [opening + run.text for runs in zip(*written, strict=True)
                         for opening, run in zip(OPENINGS, runs, strict=True)]  # fmt: skip
        else:
            documents = [line for line in args.documents.read_text(encoding="utf-8").split("\n") if line.strip()]
        demonstrate(lm, documents, args.folder, args.site, args.features, args.k, args.steps, args.stream)


if __name__ == "__main__":
    main()
