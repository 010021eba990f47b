"""Programs that write an earlier layer of their own run further on, and what of a run is not as its own captures say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import patchclamp as pc

NEW = 5
Pairs = Callable[[int, int], list[tuple[int, int]]]  # of a prompt's length and how many positions are inputs


class Case(NamedTuple):
    """Rows of one site at another, `scale` times: positions that are written, each with the one that it reads."""

    read: pc.Site
    written: pc.Site
    tokens: Any
    position: Any
    scale: float
    pairs: Pairs

    def edits(self, start: int = 0) -> list[Any]:
        """The edit, within captures from position `start` on."""
        keep, rows = pc.Capture(self.written, pc.every[start:]), pc.SameRun(self.read, self.position)
        return [
            keep,
            pc.Add(rows, self.written, self.tokens, self.scale),
            keep,
            pc.Capture(self.read, pc.every[start:]),
        ]

    def wrong(self, run: pc.Run, start: int = 0) -> list[str]:
        """What of a run is not as it must be."""
        if run.error is not None:
            return [str(run.error)]
        length, every = len(run.prompt_token_ids), len(run.prompt_token_ids) + len(run.token_ids) - 1
        labels = list(range(start, every))
        if any(run.positions(f"edits[{i}]") != labels for i in (0, 2, 3)):
            return ["captured positions"]
        before, after, source = (torch.as_tensor(run[f"edits[{i}]"]) for i in (0, 2, 3))
        made = before.clone()
        for written, read in self.pairs(length, every):
            if written >= start:
                assert read >= start, "a case for rows that are not captured"
                made[written - start] += self.scale * source[read - start]
        return [] if torch.allclose(after, made, rtol=1e-6, atol=1e-6) and not torch.equal(after, before) else ["rows"]


def cases(layers: int) -> dict[str, Case]:
    """Cases for prompts of at least 40 tokens, of which those before 32 are not read but by "early"."""

    def of(site: pc.Site, layer: int) -> pc.Site:
        return site[layer * layers // 30]

    early, late = of(pc.resid_post, 4), of(pc.resid_post, 24)
    return {
        "each its own": Case(early, late, pc.every[33:], None, 0.5, lambda p, n: [(i, i) for i in range(33, n)]),
        "one to many": Case(of(pc.mlp_out, 4), late, pc.every[34:], pc.prompt[33], 0.5,
                            lambda p, n: [(i, 33) for i in range(34, n)]),
        "as many before": Case(pc.embed, of(pc.attn_out, 20), pc.prompt[36:39], pc.prompt[33:36], 3.0,
                               lambda p, n: [(36, 33), (37, 34), (38, 35)]),
        "generated": Case(early, of(pc.mlp_out, 20), pc.generated, None, 0.5,
                          lambda p, n: [(i, i) for i in range(p, n)]),
        "the last of all": Case(early, pc.final_norm, pc.prompt[-1], None, 0.5, lambda p, n: [(p - 1, p - 1)]),
        "generated from the prompt": Case(of(pc.attn_out, 8), of(pc.resid_pre, 28), pc.generated[1:3], pc.prompt[-1],
                                          0.5, lambda p, n: [(p + 1, p - 1), (p + 2, p - 1)]),
        "early": Case(early, late, pc.prompt[20], pc.prompt[2], 0.5, lambda p, n: [(20, 2)]),
    }  # fmt: skip


def run_all(lm: pc.LM, start: int, rounds: int = 1) -> tuple[dict[str, list[str]], list[pc.Run]]:
    """Every case twice in one batch, on prompts of several lengths, beside requests without a program; what is wrong of
    each, and the runs of the last round. The case "early" where everything is captured."""
    some = {name: case for name, case in cases(lm.model.layers).items() if start == 0 or name != "early"}
    wrong: dict[str, list[str]] = {}
    runs: list[pc.Run] = []
    prompts = [[100 + (7 * i * i + 11 * i + k) % 400 for i in range(58 + k)] for k in range(2 * len(some))]
    for _ in range(rounds):
        edits = [case.edits(start) for case in some.values() for _ in range(2)]
        with_plain = [program for each in edits for program in (each, [])]
        asked = [prompt for prompt in prompts for _ in range(2)]
        told = lm.run(asked, edits=with_plain, max_tokens=NEW, sampling={"ignore_eos": True}, logprobs=True)
        runs = told[::2]
        for i, name in enumerate(some):
            wrong[name] = [*some[name].wrong(runs[2 * i], start), *some[name].wrong(runs[2 * i + 1], start)]
    return {name: found for name, found in wrong.items() if found}, runs
