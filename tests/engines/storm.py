"""Random programs on random prompts, coming and going as they like, together; then each alone, which must be the same.

Nothing waits for the clock: a request comes, or is taken back, when so many others have ended.  Each round holds requests
that are taken back at once, one that is run again on its own blocks, and, where the cache is small, more than it can hold.
Beside them programs are graded, some of them cancelled.
`make soak` runs it for minutes, on engines of every setting.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import patchclamp as pc
from patchclamp.engines.grading import GradeJob, Grades
from patchclamp.plan import Prompt

from .conftest import room_of
from .lora import LINEAR, adapter

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 512}  # fmt: skip
D, V, LAYERS, LONGEST, BLOCK = SHAPE["hidden_size"], SHAPE["vocab_size"], 3, 100, 32
BLOCK_BYTES = LAYERS * 2 * 2 * 32 * 4 * BLOCK
CROWDED = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_cache_memory_bytes": 10 * BLOCK_BYTES}
SETTINGS = {
    "crowded": CROWDED, "roomy": {"max_num_seqs": 32, "kv_cache_memory_bytes": 400 * BLOCK_BYTES},
    "without a prefix cache": {**CROWDED, "enable_prefix_caching": False},
    "with adapters": {**CROWDED, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    "few slots and records": {**CROWDED, "max_num_seqs": 3, "max_records": 150, "bank_bytes": 4 * max(D, V) * 64},
}  # fmt: skip
PARTED = {pc.z: 4, pc.q: 4, pc.k: 2, pc.v: 2, pc.neurons: SHAPE["intermediate_size"]}  # and how many parts each has
LAYERED = [pc.resid_pre, pc.resid_mid, pc.resid_post, pc.attn_out, pc.mlp_out]
NOISE, MARGIN = 1e-5, 1e-3  # of a row's length; of a logit
EMPTY = ("programs", "runs", "captured_bytes", "pinned", "vectors", "code", "waiting", "requests", "records", "leases")
AGAIN = "run it again"  # what a run is told that may have read what a failing one left


def engine(folder: str, setting: str) -> pc.LM:
    return pc.LM(folder, engine="vllm", prove=False, allow_code=True, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
                 block_size=BLOCK, max_model_len=128, **SETTINGS[setting])  # fmt: skip


def adapters_of(folder: str, into: Path) -> list[str]:
    """Three adapters of a model: more than there is room for at once."""
    targets = (LINEAR, ("embed_tokens", "lm_head", "down_proj"), ("q_proj", "v_proj"))
    return [adapter(folder, into / f"adapter {i}", i, some) for i, some in enumerate(targets)]


class Asked(NamedTuple):
    """One request.

    `abreast`: how many requests of its round may be under way when it comes; `leaves_after`: how many others end before
    it is taken back (0: it is taken back at once; None: never).
    """

    prompt: list[int]
    edits: list[pc.Op]
    capture: list[Any]
    max_tokens: int
    sampling: dict[str, Any]
    abreast: int
    leaves_after: int | None
    fails: bool
    lora: str | None = None


class Graded(NamedTuple):
    """Programs that are graded beside the requests of a round. `reports`: of results, before it is cancelled; None: it is
    not."""

    job: GradeJob
    reports: int | None


class Cancelled(Exception):
    pass


class Storm:
    """Rounds of requests on one engine, from one seed, some of them with one of `adapters`. `seen` counts what happened."""

    def __init__(self, lm: pc.LM, seed: int, adapters: Sequence[str] = ()) -> None:
        self.adapters = adapters
        self.lm, self.seed, self.random, self.seen = lm, seed, np.random.default_rng(seed), Counter()
        self.worst, self.turn = 0.0, 0
        self.bases = [self.random.integers(3, V, LONGEST).tolist() for _ in range(4)]
        self.sources: list[pc.Run] = []
        self.earlier: list[Asked] = []

    def run(self, rounds: int, requests: int = 25) -> None:
        """So many rounds; then nothing may be held."""
        assert bool(self.lm.batch_refusal) == bool(self.adapters), self.lm.batch_refusal
        before, room = self.lm.engine.status(), room_of(self.lm)
        everywhere = [pc.embed, *LAYERED, *PARTED, pc.final_norm]
        self.sources = self.lm.run(
            [base[:20] for base in self.bases[:2]], max_tokens=3, capture=everywhere, logprobs=True
        )
        told = self.sources[0]
        self.lm.bank.mean("usual", self.sources, pc.mlp_out)
        self.lm.bank["module"] = [
            pc.Add(told[pc.resid_post[0]][3], pc.resid_post[0:2]),
            pc.Noise(0.05, pc.resid_mid[1]),
        ]
        del told
        for _ in range(rounds):
            self.round(requests)
            self.turn += 1
        self.seen["preempted"] += self.lm.engine.status()["preemptions"] - before["preemptions"]
        self.sources, self.earlier = [], []
        gc.collect()
        self.lm.run([5], max_tokens=1, logprobs=True)
        after = self.lm.engine.status()
        assert {name: after[name] for name in EMPTY} == dict.fromkeys(EMPTY, 0), f"{self.where()}: {after}"
        assert not self.lm.engine._waiting
        assert not self.lm.engine._held_back
        assert room_of(self.lm) == room, self.where()

    def round(self, requests: int) -> None:
        asked = [*self.crowd(), *(self.request() for _ in range(requests))]
        gradings = [self.grading(short) for short in (True, False)]
        runs, grades = asyncio.run(self.together(asked, gradings))
        for one, run in zip(asked, runs, strict=True):
            self.check(one, run)
        for grading, found in zip(gradings, grades, strict=True):
            self.check_grades(grading, found)
        self.on_its_own_blocks()

    def crowd(self) -> list[Asked]:
        """Requests that come first: five that a small cache cannot hold to their end, and one that is taken back at once."""
        some = [self.random.integers(3, V, 30).tolist() for _ in range(6)]
        plain = Asked(some[0], [], [pc.logits], 45, {"ignore_eos": True}, 8, None, False)
        return [plain._replace(leaves_after=0), *(plain._replace(prompt=prompt) for prompt in some[1:])]

    def on_its_own_blocks(self) -> None:
        """The same twice, one after the other: the second finds the first's blocks, if there is a prefix cache."""
        prompt = self.random.integers(3, V, 70).tolist()
        edits = [pc.Add(self.vector(D), self.site(), pc.prompt[-1])]
        keep = [pc.logits, pc.resid_post[1] @ pc.prompt[-5:]]
        asked = Asked(prompt, edits, keep, 3, {"ignore_eos": True}, 1, None, False)
        for _ in range(2):
            run = self.lm.run(prompt, max_tokens=3, edits=edits, capture=keep, sampling=asked.sampling, logprobs=True)
            self.check(asked, run)

    def where(self) -> str:
        return f"seed {self.seed}, round {self.turn}"

    # -- together and alone

    async def together(self, asked: list[Asked], gradings: list[Graded]) -> tuple[list[Any], list[Any]]:
        """All of a round, each coming when the ones before it have ended but for as many as may be abreast of it, and
        gradings from the beginning."""
        change, tasks, ended = asyncio.Condition(), [], 0
        graded = [asyncio.create_task(asyncio.to_thread(self.grade, each)) for each in gradings]

        async def one(request: Asked) -> Any:
            nonlocal ended
            try:
                return await self.lm.arun(request.prompt, max_tokens=request.max_tokens, edits=request.edits,
                                          capture=request.capture, sampling=request.sampling, lora=request.lora, logprobs=True)  # fmt: skip
            finally:
                async with change:
                    ended += 1
                    change.notify_all()

        async def taken_back(task: asyncio.Task, end: int) -> None:
            async with change:
                await change.wait_for(lambda: ended >= end or task.done())
            task.cancel()

        leaving = []
        for number, request in enumerate(asked):
            async with change:
                await change.wait_for(lambda least=number - request.abreast: ended > least)
            tasks.append(asyncio.create_task(one(request)))
            await asyncio.sleep(0)  # it is asked for
            if request.leaves_after == 0:
                tasks[-1].cancel()
            elif request.leaves_after is not None:
                leaving.append(asyncio.create_task(taken_back(tasks[-1], ended + request.leaves_after)))
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*leaving)
        return made, await asyncio.gather(*graded, return_exceptions=True)

    def grade(self, asked: Graded) -> Grades:
        left = asked.reports

        def tell(*_: Any) -> None:
            nonlocal left
            if left == 0:
                raise Cancelled
            left = None if left is None else left - 1

        return self.lm.graded([asked.job], tell)[0]

    def check_grades(self, asked: Graded, found: Any) -> None:
        """Programs that were graded beside requests against the same programs as requests."""
        if isinstance(found, Cancelled) and asked.reports is not None:
            self.seen["cancelled gradings"] += 1
            return
        assert isinstance(found, Grades), f"{self.where()}: {found!r}"
        [alone] = self.lm.graded([asked.job], route="requests")
        self.seen[f"graded by {found.route}"] += len(found.logprobs)
        told = f"{self.where()}: {asked.job.name}"
        again = {i for each in (found, alone) for i, error in each.errors.items() if AGAIN in str(error)}
        assert found.errors.keys() - again == alone.errors.keys() - again, f"{told}: {found.errors} {alone.errors}"
        kept = [i for i in range(len(found.logprobs)) if i not in again]
        for name in ("logprobs", "top_logprobs", "kl"):
            ours, theirs = (getattr(each, name)[kept] for each in (found, alone))
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4, err_msg=told)

    def check(self, asked: Asked, run: Any) -> None:
        """What came of a request among others against what comes of it alone."""
        if isinstance(run, asyncio.CancelledError):
            assert asked.leaves_after is not None, self.where()
            self.seen["taken back"] += 1
            return
        if isinstance(run, pc.CapacityError):  # then it is too large by itself
            (alone,) = self.lm.run([asked.prompt], max_tokens=asked.max_tokens, edits=asked.edits, capture=asked.capture,
                                   sampling=asked.sampling, lora=asked.lora, logprobs=True)  # fmt: skip
            assert str(alone.error) == str(run), f"{self.where()}: {run!r}: {asked}"
            self.seen["too large"] += 1
            return
        if isinstance(run, BaseException):
            expected = isinstance(run, pc.RunError) and (asked.fails or AGAIN in str(run))
            assert expected, f"{self.where()}: {run!r}: {asked}"
            self.seen["not finite" if asked.fails else "to be run again"] += 1
            return
        assert not asked.fails, f"{self.where()}: {asked}"
        sampling = {**asked.sampling, "skip_reading_prefix_cache": bool(self.random.random() < 0.7)}
        alone = self.lm.run(asked.prompt, max_tokens=asked.max_tokens, edits=asked.edits, capture=asked.capture,
                            sampling=sampling, lora=asked.lora, logprobs=True)  # fmt: skip
        self.seen["runs"] += 1
        self.seen["from the cache"] += run.cached_tokens > 0
        self.seen["with an adapter"] += asked.lora is not None
        told = f"{self.where()}: {asked}"
        same = self.tokens_agree(run, alone, told)
        np.testing.assert_allclose(run.logprobs[:same], alone.logprobs[:same], atol=MARGIN, rtol=MARGIN, err_msg=told)
        paths = [f"edits[{i}]" for i, op in enumerate(asked.edits) if isinstance(op, pc.Capture)]
        paths += [f"capture[{i}]" for i in range(len(asked.capture))]
        for path in paths:
            known = len(asked.prompt) + same  # positions of the same tokens
            ours, theirs = ([p for p in each.positions(path) if p < known] for each in (run, alone))
            assert ours == theirs, f"{path} {told}"
            far = self.apart(run[path][: len(ours)], alone[path][: len(ours)])
            self.worst = max(self.worst, far)
            assert far <= NOISE, f"{path} {far} {told}"

    def tokens_agree(self, run: pc.Run, alone: pc.Run, told: str) -> int:
        """How many tokens are the same; the first that is not must be as likely."""
        assert len(run.token_ids) == len(alone.token_ids), told
        pairs = list(zip(run.token_ids, alone.token_ids, strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if same < len(pairs):
            logits, (ours, theirs) = alone[pc.logits][same], pairs[same]
            margin = float(logits[theirs] - logits[ours]) / max(1.0, float(logits.abs().max()))
            assert margin <= MARGIN, f"{margin} at token {same} {told}"
            self.seen["as likely"] += 1
        return same

    def apart(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        if not len(ours):
            return 0.0
        ours, theirs = ours.flatten(1), theirs.flatten(1)
        return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-1)).max())

    # -- at random

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def any(self, *makers: Any) -> Any:
        return makers[self.number(0, len(makers))]()

    def request(self) -> Asked:
        """Something new, or something earlier again: to find its own blocks in the cache."""
        leaves = self.number(0, 6) if self.chance(0.12) else None
        abreast = self.number(1, 20)
        if self.earlier and self.chance(0.3):
            again = self.earlier[self.number(0, len(self.earlier))]._replace(abreast=abreast, leaves_after=leaves)
            return again if self.chance(0.5) else again._replace(edits=[self.elsewhere(op) for op in again.edits])
        base = self.bases[self.number(0, len(self.bases))]
        length = self.any(lambda: 1, lambda: self.number(2, 20), *[lambda: self.number(20, LONGEST)] * 3, lambda: 64)
        prompt = base[:length] if self.chance(0.6) else self.random.integers(3, V, length).tolist()
        new = self.any(lambda: 1, lambda: self.number(2, 6), lambda: self.number(6, 24))
        p, n = length, length + new - 1
        edits = [op for _ in range(self.number(0, 6)) for op in self.ops(p, n)]
        fails = self.chance(0.01)
        if fails:
            edits.append(pc.Add(np.full(D, 3e38), pc.resid_post[1], pc.prompt[-1], scale=1e30))
        late = [self.site() @ pc.every[p - 1 - self.number(0, min(p, 30)) :]] if self.chance(0.5) else []
        others = [self.site() @ self.tokens(p, n) for _ in range(self.number(0, 3))] if self.chance(0.3) else late
        fuzz = {"extra_args": {"fuzz_strength": 0.1, "fuzz_seed": self.number(0, 99)}} if self.chance(0.1) else {}
        made = Asked(prompt, edits, [pc.logits, *others], new, {"ignore_eos": True, **fuzz}, abreast, leaves, fails,
                     self.any(*[lambda a=a: a for a in (*self.adapters, None)]))  # fmt: skip
        self.earlier = [*self.earlier[-20:], made]
        return made

    def grading(self, short: bool) -> Graded:
        """A short one fits into the batches of every engine, and is not cancelled."""
        length, extra = self.number(1, 30 if short else LONGEST), self.number(0, 3)
        prompt, suffix = self.bases[self.number(0, len(self.bases))][:length], self.random.integers(3, V, 4).tolist()
        programs = []
        for _ in range(self.number(4, 12)):
            ops = [op for _ in range(self.number(0, 4)) for op in self.ops(length, length + extra)]
            programs.append([op for op in ops if not isinstance(op, pc.Capture)])
        scores = [[(tuple(suffix[:i]), suffix[i]) for i in range(extra + 1)], [((), suffix[3])]]
        job = msgspec.structs.replace(self.lm.grade_job(prompt, programs, scores, top=self.number(0, 4)), kl=True)
        return Graded(job, self.number(0, 2) if not short and self.chance(0.6) else None)

    def site(self) -> pc.Site:
        return self.any(
            lambda: pc.embed, lambda: pc.final_norm, *[lambda s=s: s[self.number(0, LAYERS)] for s in LAYERED]
        )

    def tokens(self, p: int, n: int) -> Any:
        """A selection that selects something, of p prompt tokens and n inputs."""
        while True:
            made = self.selection(p, n)
            if len(Prompt([0] * p, lambda: ("", [])).select(made, n)):
                return made

    def selection(self, p: int, n: int, deep: bool = True) -> Any:
        some = [
            lambda: pc.prompt, lambda: pc.prompt[-1], lambda: pc.every, lambda: pc.every[:: self.number(1, 6)],
            lambda: pc.prompt[self.number(-p, p)], lambda: pc.prompt[self.number(-p, p) :],
            lambda: pc.prompt[: self.number(-p, 0)], lambda: pc.every[self.number(0, n) : self.number(0, n + 1)],
            lambda: pc.prompt[self.random.permutation(p)[: self.number(1, 5)].tolist()],
        ]  # fmt: skip
        if n > p:
            some += 2 * [lambda: pc.generated, lambda: pc.generated[self.number(0, n - p)], lambda: pc.generated[1:]]
        if deep:
            some += 2 * [lambda: self.selection(p, n, False) | self.selection(p, n, False),
                         lambda: self.selection(p, n, False) - self.selection(p, n, False)]  # fmt: skip
        return self.any(*some)

    def vector(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float32)

    def ops(self, p: int, n: int) -> list[pc.Op]:
        """One edit, or a capture at its place in the order."""
        if self.chance(0.08):
            return [pc.Capture(self.site(), self.tokens(p, n))]
        if self.chance(0.08):
            strength = self.vector(V) if self.chance(0.5) else None
            tokens = pc.prompt[-1] if n == p or self.chance(0.5) else pc.generated
            return [pc.Noise(0.3, pc.logits, tokens, seed=self.number(0, 9), relative=True) if strength is None
                    else pc.Add(strength, pc.logits, tokens)]  # fmt: skip
        if self.chance(0.15):
            return [self.open_ended(p, n)]
        if self.chance(0.2):
            return [self.of_a_part(p, n)]
        at, tokens = self.site(), self.tokens(p, n)
        if at.layers is not None and self.chance(0.15):
            at = pc.Site(at.name, slice(0, at.layers + 1))
        rows = len(Prompt([0] * p, lambda: ("", [])).select(tokens, n))
        source = self.sources[self.number(0, 2)]
        return [self.any(
            lambda: pc.Add(self.vector(D), at, tokens, scale=float(self.random.uniform(-2, 2))),
            lambda: pc.Add(self.vector(rows, D), at, tokens),
            lambda: pc.Add(self.vector(rows, D), at, tokens, norm="match"),
            lambda: pc.Replace(self.vector(D), at, tokens, alpha=float(self.random.uniform(0, 1))),
            lambda: pc.Replace(self.vector(rows, D), at, tokens, mask=self.random.random(D)),
            lambda: pc.Replace(pc.From(source, position=self.number(0, 20)), at, tokens),
            lambda: pc.Zero(at, tokens), lambda: pc.Scale(float(self.random.uniform(-1, 2)), at, tokens),
            lambda: pc.Ablate(self.vector(self.number(1, 4), D), at, tokens),
            lambda: pc.Rotate(self.vector(2, D), self.number(0, 360), at, tokens, relative=self.chance(0.5)),
            lambda: pc.Clamp(self.vector(D), at, tokens, low=-0.2, high=1.0),
            lambda: pc.Ablate(self.vector(D), at, tokens, strength=float(self.random.uniform(-1, 2))),
            lambda: pc.Replace(pc.From(source, position=self.number(0, 20)), at, tokens, basis=self.vector(2, D)),
            lambda: pc.LowRank(self.vector(2, D), None, self.vector(2, D), at, tokens),
            lambda: pc.Noise(0.3, at, tokens, seed=self.number(0, 9), relative=self.chance(0.5)),
            lambda: pc.Mean("usual", pc.mlp_out[self.number(0, LAYERS)], tokens),
            lambda: pc.Use("module", scale=float(self.random.uniform(0, 2)), tokens=tokens),
            lambda: pc.Scale(0.5, pc.pattern[self.number(0, LAYERS), 1], tokens, keys=pc.prompt[: self.number(1, p + 1)]),
            lambda: pc.Knockout(pc.prompt[0], pc.pattern[self.number(0, LAYERS)], pc.every[1:]) if n > 1
                    else pc.Zero(at, tokens),
        )]  # fmt: skip

    def part(self) -> pc.Site:
        """A head, or some neurons, or all of them."""
        site, many = list(PARTED.items())[self.number(0, len(PARTED))]
        first, layer = self.number(0, many), self.number(0, LAYERS)
        if site is pc.neurons:
            return site[layer, first : self.number(first + 1, many + 1)]
        return self.any(lambda: site[layer], *[lambda: site[layer, first]] * 3)

    def of_a_part(self, p: int, n: int) -> pc.Op:
        at, tokens, source = self.part(), self.tokens(p, n), self.sources[self.number(0, 2)]
        return self.any(
            lambda: pc.Zero(at, tokens), lambda: pc.Scale(-1.0, at, tokens), lambda: pc.Capture(at, tokens),
            lambda: pc.Noise(0.5, at, tokens, seed=1),
            lambda: pc.Replace(pc.From(source, position=self.number(0, 20)), at, tokens),
        )  # fmt: skip

    def elsewhere(self, op: pc.Op) -> pc.Op:
        """An op on another part of the same rows, if it is on one: all else is as it was."""
        at = getattr(op, "at", None)
        if isinstance(op, pc.Capture) or not isinstance(at, pc.Site) or not isinstance(at.index, int):
            return op
        many = next(many for site, many in (*PARTED.items(), (pc.pattern, 4)) if site.name == at.name)
        return msgspec.structs.replace(op, at=pc.Site(at.name, at.layers, (at.index + 1) % many))

    def open_ended(self, p: int, n: int) -> pc.Op:
        """An op by token id, whose tokens are known when they are there, or of code, or both."""
        half = pc.token(*self.random.permutation(V)[: V // 2].tolist())
        at, v = self.site(), self.vector(D)
        tokens = self.any(lambda: pc.prompt[0] | half, lambda: pc.every - (half - pc.prompt[-1]),
                          lambda: pc.prompt[-1] | (pc.generated & half))  # fmt: skip
        w = torch.from_numpy(v)
        return self.any(
            lambda: pc.Add(v, at, tokens), lambda: pc.Ablate(v, at, tokens), lambda: pc.Scale(0.5, at, tokens),
            lambda: pc.Noise(0.3, at, tokens, seed=self.number(0, 9)), lambda: pc.Capture(at, tokens),
            lambda: pc.Apply(lambda h: 0.5 * h + w, at, tokens),
            lambda: pc.Apply(lambda h: h.flip(1), at, self.tokens(p, n)),
        )  # fmt: skip
