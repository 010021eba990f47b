"""From a direction to a served checkpoint: find the direction of a behaviour, search for the ablation that removes most
of the behaviour and changes other prompts least, evaluate it, write it into weights, and serve these.

    pip install 'patchclamp[vllm,plots]'
    python examples/journey_ablation.py smollm2 out/ablation

With files of harmful and harmless prompts, one per line, this is the removal of refusals (Arditi et al. 2024,
arXiv:2406.11717; the search is that of the `heretic` package):

    python examples/journey_ablation.py MODEL OUT --prompts harmful.txt --others harmless.txt --chat --trials 200
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from journey_monitor import serving
from moods import PLEASANT, UNPLEASANT

import patchclamp as pc

GLOOM = (
    r"\b(hate|hurt|pain|sad|sick|angry|afraid|fear\w*|dead|died|death|kill\w*|cry|cried|crying|lost|alone|war|ruined)\b",
    r"\b(worst|terrible|horrible|awful|evil|bad|wrong|suffer\w*|enem\w+|sorry|never|not (be )?(happy|sure|good))\b",
)
QUESTIONS = [
    {"prompt": f"The capital of {land} is", "choices": [" Paris", " Rome", " Berlin", " Madrid"], "answer": i}
    for i, land in enumerate(("France", "Italy", "Germany", "Spain"))
]


def ablation(lm: pc.LM, direction: Any, first: int, strength: float) -> list[pc.Ablate]:
    """Take a direction out of all that attention and MLPs write from a layer on: edits that can be exported."""
    return [pc.Ablate(direction, at=site[layer], strength=strength)
            for layer in range(first, lm.model.layers) for site in (pc.attn_out, pc.mlp_out)]  # fmt: skip


def search_ablations(
    lm: pc.LM, prompts: list[str], others: list[str], patterns: Sequence[str], chat: bool, trials: int, resume: Path,
) -> tuple[pc.studies.SearchResult, pc.studies.Space]:  # fmt: skip
    """Directions of every layer, and the search of all their ablations."""
    vectors = pc.studies.steering_vectors(lm, prompts, others, chat=chat)
    layers = lm.model.layers
    space = pc.studies.Space(
        lambda layer, first, strength: ablation(lm, vectors.vector(layer), first, strength),
        {"layer": range(layers // 4, layers - layers // 8), "first": range(layers // 2),
         "strength": pc.studies.Uniform(0.3, 1.3)},
    )  # fmt: skip
    objectives = [
        pc.studies.RefusalRate(prompts=prompts, patterns=patterns, chat=chat, max_tokens=24, name="behaviour"),
        pc.studies.KLDivergence(prompts=others, chat=chat),
    ]
    return pc.studies.search(lm, space, objectives, trials=trials, per_round=16, resume=resume), space


def choose(result: pc.studies.SearchResult, most_kl: float) -> int:
    """The trial with the least of the behaviour, among those of the front with a small enough KL divergence."""
    fitting = [i for i in result.front if result.values[i, 1] <= most_kl]
    if not fitting:
        raise SystemExit(f"no trial has a KL divergence of at most {most_kl}: raise --most-kl or --trials")
    return fitting[0]  # the front is sorted by its first objective


def journey(
    lm: pc.LM, folder: Path, prompts: list[str], others: list[str], patterns: Sequence[str], *, chat: bool = False,
    trials: int = 48, most_kl: float = 0.2,
) -> dict[str, Any]:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    # 1. Find directions and 2. search; the picture shows the trade-off
    result, space = search_ablations(lm, prompts, others, patterns, chat, trials, folder / "search.journal")
    result.plot(folder / "search.png")
    best = choose(result, most_kl)
    program = space.made(result.settings[best])
    print(result)
    print(f"chosen: trial {best}, {result.settings[best]}; unedited {result.unedited.round(3).tolist()}, "
          f"ablated {result.values[best].round(3).tolist()}")  # fmt: skip

    # 3. Evaluate what should stay as it is
    scored = pc.studies.evaluate(lm, QUESTIONS, {"unedited": None, "ablated": program})
    print(scored)

    # 4. Write it into a checkpoint, which stock vLLM and Transformers load
    exported = pc.export(lm, program, folder / "model", prompts=others, chat=chat)
    print(exported)
    return {"result": result, "best": best, "program": program, "scored": scored, "exported": exported}


def completions(folder: Path, prompts: list[str], *options: str, chat: bool = False) -> list[str]:
    """5. Serve the checkpoint, and ask it as any client does."""
    texts: list[str] = []
    with serving(str(folder), *options) as url:
        for prompt in prompts:
            asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            route, body = "chat/completions" if chat else "completions", {**asked, "max_tokens": 24, "temperature": 0}
            answer = httpx.post(f"{url}/v1/{route}", json=body, timeout=300).raise_for_status().json()
            [choice] = answer["choices"]
            texts.append(choice["message"]["content"] if chat else choice["text"])
    return texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path, help="prompts that show the behaviour")
    parser.add_argument("--others", type=Path, help="prompts that should be answered as before")
    parser.add_argument("--pattern", action="append", help="of texts that show it; by default refusals, or gloom")
    parser.add_argument("--chat", action="store_true", help="ask each prompt as the user's turn of a chat")
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--most-kl", type=float, default=0.2, help="in nats")
    parser.add_argument("--engine")
    args = parser.parse_args()
    if (args.prompts is None) != (args.others is None):
        parser.error("--prompts and --others go together")
    lines = [UNPLEASANT, PLEASANT]
    if args.prompts:
        files = (args.prompts, args.others)
        lines = [[line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()] for file in files]
    patterns = args.pattern or (pc.studies.REFUSALS if args.prompts else GLOOM)
    with pc.LM(args.model, engine=args.engine) as lm:
        journey(lm, args.folder, *lines, patterns, chat=args.chat, trials=args.trials, most_kl=args.most_kl)
    texts = completions(args.folder / "model", lines[0][:4], chat=args.chat)
    for prompt, text in zip(lines[0], texts, strict=False):
        print(f"{prompt} → {text!r}")


if __name__ == "__main__":
    main()
