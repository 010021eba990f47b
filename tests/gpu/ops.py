"""The ops on one engine: what their formulas say, and noise to the last bit."""

from __future__ import annotations

import numpy as np

from tests.gpu.board import note
from tests.gpu.engines import PROMPTS


def ops(mode: str, lm) -> None:
    """Every op beside the others in one batch, prompt and generated tokens, against the plain kernel's arithmetic."""
    import torch

    import patchclamp as pc
    from patchclamp.kernels import noise, reference
    from patchclamp.plan.bound import noise_stream

    width, rng = lm.model.d_model, np.random.default_rng()
    v, w = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
    unit, mask = v / np.linalg.norm(v), rng.random(width).astype(np.float32)
    at = pc.resid_post[1]
    point = lm.sites.points[lm.sites.resolve(at)[0].point]
    site = noise_stream(point.kind, point.layer)

    def epsilon(position: int) -> np.ndarray:
        return noise.normals(77, position, site, width)

    asked = {
        "Scale": (pc.Scale(0.5, at), lambda h, _: 0.5 * h),
        "Ablate": (pc.Ablate(v, at), lambda h, _: reference.project(h, unit, np.float32(0), np.float32(0))),
        "Ablate, in part": (pc.Ablate(v, at, strength=0.5), lambda h, _: h - 0.5 * (h @ unit) * unit),
        "Replace, in a subspace": (pc.Replace(w, at, basis=v), lambda h, _: h + ((w - h) @ unit) * unit),
        "LowRank": (pc.LowRank(w / 9, [0.5], v, at), lambda h, _: h + (h @ (w / 9) + 0.5 - h @ v) * v),
        "Clamp": (pc.Clamp(v, at, low=2.0), lambda h, _: reference.project(h, unit, np.float32(2), np.float32(3e38))),
        "Replace, masked": (pc.Replace(w, at, alpha=0.5, mask=mask),
                            lambda h, _: reference.blend(h, w, np.float32(0.5) * mask)),
        "Noise": (pc.Noise(0.1, at, seed=77), lambda h, p: reference.noise(h, epsilon(p), np.float32(0.1), False)),
        "Noise, relative": (pc.Noise(0.1, at, seed=77, relative=True),
                            lambda h, p: reference.noise(h, epsilon(p), np.float32(0.1), True)),
    }  # fmt: skip
    edits = [[pc.Capture(at), op, pc.Capture(at)] for op, _ in asked.values()]
    runs = lm.run([PROMPTS[2]] * len(asked), max_tokens=12, edits=edits, sampling={"ignore_eos": True}, logprobs=True)
    far = {}
    for run, (name, (_, formula)) in zip(runs, asked.items(), strict=True):
        before, after, positions = run["edits[0]"].numpy(), run["edits[2]"].numpy(), run.positions("edits[0]")
        expected = np.stack([formula(row, p) for row, p in zip(before, positions, strict=True)])
        far[name] = float(np.abs(after - expected).max() / np.abs(expected).max())
        if np.array_equal(before, after) or len(positions) != len(PROMPTS[2]) + 11:
            far[name] = float("inf")
    told = ", ".join(f"{name} {gap:.1g}" for name, gap in far.items())
    note(mode, "every op is its formula, at every token", max(far.values()) < 1e-4, told)
    drawn = [pc.Zero(at), pc.Noise(1.0, at, seed=77), pc.Capture(at)]
    found = lm.run(PROMPTS[2], max_tokens=6, edits=drawn, sampling={"ignore_eos": True}, logprobs=True)
    exact = np.stack([epsilon(position) for position in found.positions("edits[2]")])
    same = np.array_equal(found["edits[2]"].numpy().view(np.int32), exact.view(np.int32))
    note(mode, "noise is the same bits as anywhere", same, f"{exact.size} numbers")
    wide = lm.run(PROMPTS[1], max_tokens=3, sampling={"ignore_eos": True}, edits=[
        pc.Capture(pc.logits), pc.Noise(0.5, pc.logits, seed=3, relative=True), pc.Capture(pc.logits)], logprobs=True)  # fmt: skip
    before, after = wide["edits[0]"].numpy(), wide["edits[2]"].numpy()
    expected = np.stack([
        reference.noise(row, noise.normals(3, p, noise_stream("logits", None), len(row)), np.float32(0.5), True)
        for row, p in zip(before, wide.positions("edits[0]"), strict=True)
    ])  # fmt: skip
    gap = float(np.abs(after - expected).max() / np.abs(expected).max())
    note(mode, "an op that sums over logits, in several passes", gap < 1e-4 and not np.array_equal(before, after),
         f"{gap:.1g}, {before.shape[1]} wide")  # fmt: skip
    W, drawn = rng.standard_normal((5, width)), [pc.Zero(at), pc.Noise(1.0, at, seed=77)]
    far = {}
    for dtype, most in (("float32", 1e-5), ("bfloat16", 1e-2), ("float16", 1e-3)):
        run = lm.run(
            PROMPTS[2],
            max_tokens=6,
            edits=[*drawn, pc.Capture(at, dtype=dtype, project=W)],
            sampling={"ignore_eos": True},
        )
        expected = np.stack([W @ epsilon(position) for position in run.positions(at)])
        gap = float(np.abs(run[at].float().numpy() - expected).max() / np.abs(expected).max())
        far[dtype] = gap / most if run[at].shape == (len(PROMPTS[2]) + 5, len(W)) else float("inf")
    told = ", ".join(f"{name} {gap:.2g}" for name, gap in far.items())
    note(mode, "a projected capture is the row times the matrix", max(far.values()) < 1, told + " of what is allowed")
    by_token(mode, lm)
    none = lm.run(PROMPTS[1], max_tokens=4, edits=[pc.Noise(0.0, pc.embed, relative=True)], logprobs=True)
    plain = lm.run(PROMPTS[1], max_tokens=4, logprobs=True)
    same = [x.hex() for x in none.logprobs] == [x.hex() for x in plain.logprobs]
    note(
        mode,
        "noise of no strength is no program, bit for bit",
        same and not torch.isnan(torch.tensor(none.logprobs)).any(),
        "",
    )


def by_token(mode: str, lm) -> None:
    """An edit by token id, of tokens as they are generated, and code on rows; what it does at its own site tells."""
    import patchclamp as pc

    at, sampling = pc.resid_post[1], {"ignore_eos": True}
    v = np.random.default_rng().standard_normal(lm.model.d_model).astype(np.float32)
    plain = lm.run(PROMPTS[2], max_tokens=16, sampling=sampling, capture=[pc.resid_post[3]])
    token = plain.token_ids[3]
    chosen = pc.generated - pc.token(token), pc.token(token), pc.token(*range(0, lm.model.d_vocab, 13), token)
    edits = [[pc.Capture(at), pc.Add(v, at, tokens), pc.Capture(at), pc.Capture(at, tokens)] for tokens in chosen]
    wrong = []
    for tokens, run in zip(
        chosen, lm.run([PROMPTS[2]] * 3, max_tokens=16, edits=edits, sampling=sampling), strict=True
    ):
        before, after, hit = run["edits[0]"].numpy(), run["edits[2]"].numpy(), run.select(tokens)
        expected = before + v * np.isin(np.arange(len(before)), hit)[:, None]
        same = np.array_equal(after, expected) and run.positions("edits[3]") == hit.tolist()
        if not same or not len(hit) or len(hit) == len(before):
            wrong.append(f"{str(tokens)[:30]}: {len(hit)} of {len(before)} rows")
    note(mode, "an edit by token id acts on those tokens alone", not wrong, "; ".join(wrong))
    code(mode, lm)


def code(mode: str, lm) -> None:
    """Code between ops, beside a run without; where the engine is in another process it is refused."""
    import torch

    import patchclamp as pc
    from patchclamp.errors import EngineError

    at, sampling = pc.resid_post[1], {"ignore_eos": True}
    try:
        leave = pc.LM("", lm.engine, prove=False, allow_code=True)
    except EngineError as error:
        note(mode, "code on rows, between ops", getattr(lm.engine, "remote", False), str(error))
        return
    v = torch.randn(lm.model.d_model)
    plain = leave.run(PROMPTS[1], max_tokens=8, sampling=sampling, logprobs=True)

    def breaks(h: torch.Tensor) -> torch.Tensor:
        raise KeyError("nothing here")

    programs = [
        [pc.Add(v, at), pc.Capture(at), pc.Apply(lambda h: h * 0.5 + 1.0, at), pc.Scale(2.0, at), pc.Capture(at)],
        [pc.Apply(breaks, at, pc.prompt[-1])],
        [],
    ]
    run, broken, mate = leave.run(
        [PROMPTS[2], PROMPTS[2], PROMPTS[1]], max_tokens=8, edits=programs, sampling=sampling, logprobs=True
    )
    gap = float((run["edits[4]"] - 2.0 * (run["edits[1]"] * 0.5 + 1.0)).abs().max() / run["edits[4]"].abs().max())
    told = f"{gap:.1g}; {broken.error}"
    fine = (
        gap < 1e-3
        and "edits[0]: Apply raised KeyError" in str(broken.error)
        and len(run["edits[4]"]) == len(PROMPTS[2]) + 7
    )
    note(mode, "code on rows, between ops; what it raises is its run's error", fine, told)
    same = mate.error is None and max(abs(a - b) for a, b in zip(mate.logprobs, plain.logprobs, strict=True)) < 0.1
    note(mode, "and its batchmates go on", same, "")
