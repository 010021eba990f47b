"""One set of programs, of every op and every kind of selection, and what of a run of them is not as in the plain pass.

Each program captures what is there before its ops and after them.  p length of the prompt · n positions that are inputs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import patchclamp as pc

from .formulas import by_formula
from .forward import Act, Forward, forward
from .hooks import PlainModel

BLOCK, NEW = 32, 6
LENGTHS = range(58, 64)  # of the programs' prompts, in turn
Acts = list[tuple[Any, Callable[[int, int], list[int]]]]


class Tolerance(NamedTuple):
    """How far a run may be from the plain pass.

    `row`: ‖a − b‖₂ / ‖b‖₂ of a captured row; `edit`: the same of an edited row from the formulas' result for the rows
    that the run itself had before; `logprob`: relative and absolute; `choice`: how much larger a logit may be than the
    chosen token's.
    """

    row: float
    edit: float
    logprob: tuple[float, float]
    choice: float


# In bf16 the weights are the plain pass's numbers, but what each of 30 layers makes is rounded to 8 bits, which the
# plain pass in fp32 does not do: on a CPU, with random weights, the worst row of all programs was 0.02 away, the worst
# log-probability 0.03 and the worst choice 0.04; the bounds are twice that or more.  Edits that are left out move rows
# by 0.04 (noise of 0.02), 0.06 (a direction ablated) and otherwise 0.2 to 1.6; for the weak ones there is which rows
# were touched, and what became of the rows the run itself had before: that is fp32 in either dtype, and 8e-8 away.
TOLERANCES = {
    "float32": Tolerance(row=1e-4, edit=1e-4, logprob=(1e-4, 2e-4), choice=1e-2),
    "bfloat16": Tolerance(row=0.04, edit=1e-4, logprob=(0.0, 0.1), choice=0.1),
}


class Compared(NamedTuple):
    """What is not as it must be, and the worst distances by their names in `Tolerance`."""

    wrong: list[str]
    far: dict[str, float]


def at(site: pc.Site, tokens: Any, make: Any, positions: Callable[[int, int], list[int]]) -> Acts:
    """Ops at one place: the rows before, the ops, the rows after; and what `positions` says is selected, by hand, from
    the prompt's length p and the number n of positions that are inputs."""
    sampled = site.name == "logits"
    everything = (lambda p, n: list(range(p - 1, n))) if sampled else (lambda p, n: list(range(n)))
    ops = make if isinstance(make, list) else [make]
    keep = pc.Capture(site)
    return [(keep, everything), *[(op(site, tokens), positions) for op in ops], (keep, everything)]


def last(p: int, n: int) -> list[int]:
    return [p - 1]


def generated(p: int, n: int) -> list[int]:
    return list(range(p, n))


def add(scale: float, value: np.ndarray) -> Callable[[pc.Site, Any], Any]:
    return lambda site, tokens: pc.Add(value, site, tokens, scale=scale)


def programs(width: int, layers: int, words: str, begin: int) -> dict[str, Acts]:
    """The programs, with vectors of their own, for a model of that width; its layers are those of one with 30, in
    proportion. `words`: a text of two tokens, the prompt's at `begin` and after."""
    rng, spanned = np.random.default_rng(0), [begin, begin + 1]
    v1, v2, v3 = rng.standard_normal((3, width)).astype(np.float32)
    mask = np.where(rng.random(width) < 0.5, 1.0, rng.random(width))

    def of(site: pc.Site, layer: int) -> pc.Site:
        return site[layer * layers // 30]

    mix = [
        lambda s, t: pc.Scale(0.5, s, t), add(0.3, v1), lambda s, t: pc.Add(v2, s, t, 0.3, "match"),
        lambda s, t: pc.Rotate(np.stack([v2, v3]), 200, s, t), lambda s, t: pc.Ablate(np.stack([v1, v2]), s, t),
        lambda s, t: pc.Clamp(v3, s, t, low=0.5, high=0.5), lambda s, t: pc.Replace(v2, s, t, alpha=0.4, mask=mask),
        lambda s, t: pc.Noise(0.1, s, t, seed=8, relative=True), lambda s, t: pc.Noise(0.05, s, t, seed=(1 << 33) + 1),
    ]  # fmt: skip
    return {
        "the whole prompt": at(of(pc.resid_post, 3), pc.prompt, add(0.5, v1), lambda p, n: list(range(p))),
        "its last token, and the generated":
            at(of(pc.mlp_out, 7), pc.prompt[-1], lambda s, t: pc.Replace(v1, s, t, alpha=0.5), last)
            + at(of(pc.resid_mid, 20), pc.generated, lambda s, t: pc.Ablate(v2, s, t), generated),
        "ends that count back":
            at(of(pc.attn_out, 5), pc.prompt[-9:-1], lambda s, t: pc.Zero(s, t), lambda p, n: list(range(p - 9, p - 1)))
            + at(of(pc.resid_pre, 6), pc.prompt[:-40], lambda s, t: pc.Scale(0.8, s, t),
                 lambda p, n: list(range(p - 40))),
        "a row each of a list": at(of(pc.resid_mid, 12), pc.prompt[-2, 3, 40],
                                   lambda s, t: pc.Add(np.stack([v1, v2, v3]), s, t), lambda p, n: [p - 2, 3, 40]),
        "every": at(of(pc.resid_post, 1), pc.every, lambda s, t: pc.Noise(0.02, s, t, seed=3),
                    lambda p, n: list(range(n))),
        "every seventh": at(pc.embed, pc.every[::7], lambda s, t: pc.Noise(0.3, s, t, relative=True),
                            lambda p, n: list(range(0, n, 7))),
        "a span": at(of(pc.resid_post, 9), pc.span(words), add(0.7, v1), lambda p, n: spanned),
        "a span or generated": at(of(pc.resid_pre, 29), pc.span(words) | pc.generated[0:3],
                                  lambda s, t: pc.Clamp(v1, s, t, low=9.0, high=9.0),
                                  lambda p, n: [*spanned, p, p + 1, p + 2]),
        "one without another": at(of(pc.mlp_out, 2), pc.prompt - pc.prompt[0, 5],
                                  lambda s, t: pc.Replace(v3, s, t, alpha=0.3, mask=mask),
                                  lambda p, n: [i for i in range(p) if i not in (0, 5)]),
        "joined twice": at(of(pc.resid_mid, 15), (pc.prompt[5:30] | pc.generated[1]) - pc.every[::3],
                           lambda s, t: pc.Ablate(np.stack([v1, v3]), s, t),
                           lambda p, n: [i for i in [*range(5, 30), p + 1] if i % 3]),
        "all on one row": at(of(pc.resid_post, 8), pc.prompt[33], mix, lambda p, n: [33])
            + at(of(pc.resid_post, 28), pc.generated[2], mix, lambda p, n: [p + 2]),
        "the last stream, norm and logits":
            at(of(pc.resid_post, 29), pc.every[40:], add(0.5, v1), lambda p, n: list(range(40, n)))
            + at(pc.final_norm, pc.prompt[-1], lambda s, t: pc.Scale(1.5, s, t), last)
            + at(pc.logits, pc.generated[0, 3], lambda s, t: pc.Noise(0.5, s, t, seed=11, relative=True),
                 lambda p, n: [p, p + 3]),
    }  # fmt: skip


def prompts(lm: pc.LM, text: str, count: int) -> list[str]:
    """So many beginnings of a text, of `LENGTHS` tokens in turn."""
    ids = lm.tokens(text)
    assert len(ids) > LENGTHS[-1]
    return [lm.tokenizer.decode(ids[: LENGTHS[i % len(LENGTHS)]]) for i in range(count)]


def ops(acts: Acts, start: int = 0) -> list[Any]:
    """What a request is given; rows before `start`, which may come from the cache, are not captured."""
    late = [isinstance(op, pc.Capture) and op.at.name != "logits" and start > 0 for op, _ in acts]
    return [pc.Capture(op.at, pc.every[start:]) if cut else op for (op, _), cut in zip(acts, late, strict=True)]


def expected(plain: PlainModel, acts: Acts, prompt: list[int], tokens: list[int]) -> Forward:
    """The plain pass over a prompt and these tokens after it."""
    n = len(prompt) + len(tokens) - 1
    placed = [Act(op, positions(len(prompt), n)) for op, positions in acts]
    return forward(plain, [*prompt, *tokens[:-1]], len(prompt) - 1, placed)


def compared(run: pc.Run, acts: Acts, plain: Forward, layers: int, bound: Tolerance, start: int = 0) -> Compared:
    """A run's rows before and after every edit, the rows it touched, and its log-probabilities, beside the plain pass.

    `start`: the first position that is captured.
    """
    p, n = len(run.prompt_token_ids), len(run.prompt_token_ids) + NEW - 1
    if len(run.token_ids) != NEW:
        return Compared([f"{len(run.token_ids)} tokens"], {})
    wrong, far = [], {"row": 0.0, "edit": 0.0}
    kept = [i for i, (op, _) in enumerate(acts) if isinstance(op, pc.Capture)]
    for first, second in zip(kept[::2], kept[1::2], strict=True):
        where, site = acts[first][1](p, n), f"at {acts[first][0].at}"
        rows = [i for i, position in enumerate(where) if position >= start]
        labels = [where[i] for i in rows]
        if not run.positions(f"edits[{first}]") == run.positions(f"edits[{second}]") == labels:
            wrong.append(f"{site}: captured positions")
            continue
        before, after = run[f"edits[{first}]"], run[f"edits[{second}]"]
        made = _edited(acts[first + 1 : second], before, labels, p, n, layers)
        gaps = apart(before, plain.kept[first][rows]), apart(after, plain.kept[second][rows])
        far = {"row": worst(far["row"], *gaps), "edit": worst(far["edit"], apart(after, made))}
        touched = [labels[i] for i in (before != after).any(dim=1).nonzero()[:, 0].tolist()]
        if touched != [position for position in sorted(acts[first + 1][1](p, n)) if position >= start]:
            wrong.append(f"{site}: touched {touched}")
    logits_nV, chosen = plain.logits_nV, (list(range(NEW)), run.token_ids)
    logprobs = logits_nV.double().log_softmax(-1)[chosen].numpy()
    gaps, (relative, absolute) = np.abs(np.array(run.logprobs) - logprobs), bound.logprob
    far |= {"logprob": float(gaps.max()), "choice": float((logits_nV.max(dim=1).values - logits_nV[chosen]).max())}
    if not (gaps <= absolute + relative * np.abs(logprobs)).all():  # NaN too
        wrong.append(f"logprob {far['logprob']:.2g}")
    for name in ("row", "edit", "choice"):
        if not far[name] <= getattr(bound, name):
            wrong.append(f"{name} {far[name]:.2g}")
    return Compared(wrong, far)


def _edited(acts: Acts, before_TW: torch.Tensor, labels: list[int], p: int, n: int, layers: int) -> torch.Tensor:
    """What ops make, by their formulas, of rows at these positions; of rows that nobody knows they make nothing."""
    rows_nW = torch.zeros(n, before_TW.shape[1])
    rows_nW[labels] = before_TW
    for op, positions in acts:
        where = positions(p, n)
        rows_nW[where] = by_formula(op, rows_nW[where], where, layers).float()
    return rows_nW[labels]


def worst(*gaps: float) -> float:
    """The largest; not a number where one is not."""
    return float(np.max(gaps))


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest ‖a − b‖₂ / ‖b‖₂ over rows, where b is not nearly 0."""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-2)).max())
