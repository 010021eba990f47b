"""Train a probe by gradient descent on the rows of a harvest while the model computes them, and read it on other texts.

    python examples/train_probe.py smollm2 positive.txt negative.txt --site "resid_post[10]"

Each file has a text per line. `pc.studies.fit_probe` fits a probe to few texts, with cross-validation; this is for more
rows than fit in memory.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch

import patchclamp as pc
from patchclamp.studies.harvest.stream import HarvestStream


def train_probe(stream: HarvestStream, site: str, labels: torch.Tensor, passes: int) -> pc.Probe:
    """Logistic regression of the label of a row's document, on columns standardised by the first batch."""
    weight, bias = torch.zeros(stream.widths[site], requires_grad=True), torch.zeros(1, requires_grad=True)
    adam = torch.optim.AdamW([weight, bias], lr=1e-2, weight_decay=1e-2)
    mean = scale = None
    for batch in itertools.chain.from_iterable(itertools.repeat(stream, passes)):
        rows = batch[site].float()
        if mean is None:
            mean, scale = rows.mean(0), rows.std(0) + 1e-6
        logits = (rows - mean) / scale @ weight + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[batch["document"]].float())
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        weight = weight / scale
        return pc.Probe(weight, at=site, tokens=pc.prompt[1:], bias=bias - weight @ mean, activation="sigmoid",
                        pool="mean", name="label")  # fmt: skip


def demonstrate(lm: pc.LM, texts: list[str], labels: list[int], site: str, passes: int) -> tuple[pc.Probe, float]:
    """The probe, and its accuracy on every fifth text, which it was not trained on."""
    held = [number % 5 == 0 for number in range(len(texts))]
    kept = [text for text, out in zip(texts, held, strict=True) if not out]
    known = torch.tensor([label for label, out in zip(labels, held, strict=True) if not out])
    harvest = pc.studies.Harvest(documents=kept, sites=[site], context=128, overlong="cut",
                                 filters=pc.studies.Filters(positions=((1, None),)))  # fmt: skip
    probe = train_probe(harvest.stream(lm, batch_rows=256, index=True), site, known, passes)
    runs = lm.run([lm.tokens(text)[:128] for text, out in zip(texts, held, strict=True) if out], max_tokens=1,
                  capture=[probe])  # fmt: skip
    expected = [label for label, out in zip(labels, held, strict=True) if out]
    right = [bool(run.probes["label"][0] > 0.5) == bool(label) for run, label in zip(runs, expected, strict=True)]
    return probe, sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("positive", type=Path)
    parser.add_argument("negative", type=Path)
    parser.add_argument("--site", default="resid_post[10]")
    parser.add_argument("--engine")
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    files = [[line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
             for path in (args.positive, args.negative)]  # fmt: skip
    texts, labels = [*files[0], *files[1]], [1] * len(files[0]) + [0] * len(files[1])
    with pc.LM(args.model, engine=args.engine) as lm:
        _, accuracy = demonstrate(lm, texts, labels, args.site, args.passes)
        print(f"accuracy on held-out texts: {accuracy:.3f}")


if __name__ == "__main__":
    main()
