"""What prompts give after they were run edited, and what they give in an engine that never saw an edit; prints JSON.

Chunks are of one block and requests run one at a time, so that a block is computed by the same work whether those before
it were cached or not, and results can be compared bit for bit. `start` and `end` run this in a process of its own;
`reused`, `again` and `counted` say what of two such processes' words is not as it must be.
"""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

import patchclamp as pc
from patchclamp.engines.vllm.compat import core

BLOCK, LENGTH, FORCED = 32, 133, 77
OPTIONS = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": BLOCK,
           "max_num_batched_tokens": BLOCK, "max_num_seqs": 8, "max_model_len": 256, "prove": False,
           "kv_cache_memory_bytes": 1 << 26}  # fmt: skip
LENGTHS = (64, 70, 97)  # of prompts that are edited at their last token
FULL = LENGTH // BLOCK * BLOCK
KINDS = ["add", "add a row each", "add normed", "rotate", "replace", "replace where masked", "zero", "scale", "ablate", "low rank", "clamp", "noise",
         "relative noise", "mean", "use", "same run", "knockout", "pattern", "fuzz", "last", *[f"last of {length}" for length in LENGTHS],
         "generated"]  # fmt: skip
GREEDY = {"ignore_eos": True}


def prompt_of(number: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(1000 + number).integers(3, 500, length).tolist()


def edits(width: int) -> dict[str, list]:
    """A program of every op that edits, in the second block of a prompt of four: two full blocks lie beyond it."""
    v, w, x = np.random.default_rng(7).standard_normal((3, width)).astype(np.float32)
    post, mid, span = pc.resid_post[0], pc.resid_mid[1], pc.prompt[35:44]
    return {
        "add": [pc.Add(v, post, pc.prompt[40], scale=2.0)],
        "add a row each": [pc.Add(np.stack([v, w]), pc.resid_pre[1], pc.prompt[43, 36])],
        "add normed": [pc.Add(v, post, span, norm="match")],
        "rotate": [pc.Rotate(np.stack([v, w]), 70, mid, span)],
        "replace": [pc.Replace(v, pc.attn_out[0], span, alpha=0.5)],
        "replace where masked": [pc.Replace(w, mid, span, mask=x > 0)],
        "zero": [pc.Zero(pc.mlp_out[0:2], span)],
        "scale": [pc.Scale(0.2, post, pc.prompt[40] | pc.prompt[44])],
        "ablate": [pc.Ablate(np.stack([v, w, x]), pc.embed, pc.prompt[33:60] - pc.prompt[40])],
        "low rank": [pc.Ablate(np.stack([v, w]), post, span, 0.4), pc.LowRank(v, [0.5], w / 9, mid, pc.prompt[40])],
        "clamp": [pc.Clamp(v, post, span, low=3.0)],
        "noise": [pc.Noise(0.5, mid, span, seed=5)],
        "relative noise": [pc.Noise(0.5, pc.embed, span, relative=True)],
        "mean": [pc.Mean("usual", pc.mlp_out[1], span), pc.Mean("usual", pc.mlp_out[0], span)],
        "use": [pc.Use("module", scale=2.0, tokens=span)],
        "same run": [pc.Add(pc.SameRun(pc.embed, pc.prompt[35]), pc.mlp_out[1], span, 3.0)],
        "knockout": [pc.Knockout(pc.prompt[3:20], pc.pattern[:2], span)],
        "pattern": [
            pc.Scale(0.1, pc.pattern[1], span, keys=pc.prompt[:30]),
            pc.Replace(abs(v[:9]), pc.pattern[0, 0], span),
        ],
    }


def edited(lm: pc.LM) -> dict[str, list]:
    """Runs everything edited; bits, and what was cached, first and again."""
    width, found = lm.model.d_model, {}
    told = lm.run([prompt_of(900), prompt_of(901)], max_tokens=1, capture=[pc.mlp_out], logprobs=True)
    lm.bank.mean("usual", told, pc.mlp_out)
    lm.bank["module"] = [pc.Add(np.ones(width), pc.resid_post[i]) for i in (0, 1)]
    for turn in ("edited", "edited again"):
        for number, (name, program) in enumerate(edits(width).items()):
            found[f"{turn}: {name}"] = told_of(
                lm.run(prompt_of(number), max_tokens=4, edits=program, sampling=GREEDY, logprobs=True)
            )
        fuzz = {**GREEDY, "extra_args": {"fuzz_strength": 0.3, "fuzz_seed": 4}}
        found[f"{turn}: fuzz"] = told_of(lm.run(prompt_of(20), max_tokens=4, sampling=fuzz, logprobs=True))
        for length in LENGTHS:
            last = [pc.Add(np.full(width, 3.0), pc.resid_post[0], pc.prompt[-1])]
            run = lm.run(prompt_of(21)[:length], max_tokens=4, edits=last, sampling=GREEDY, logprobs=True)
            found[f"{turn}: last of {length}"] = told_of(run)
        late = [pc.Add(np.full(width, 3.0), pc.resid_post[0], pc.generated)]
        run = lm.run(
            prompt_of(22, 40),
            max_tokens=100,
            edits=late,
            sampling={**GREEDY, "allowed_token_ids": [FORCED]},
            logprobs=True,
        )
        found[f"{turn}: generated"] = told_of(run)
    return found


def unedited(lm: pc.LM, watch: list) -> dict[str, list]:
    """The same prompts, and one that goes on with what was generated, without edits; `watch` is captured."""
    prompts = {name: prompt_of(number) for number, name in enumerate(edits(lm.model.d_model))}
    prompts |= {"fuzz": prompt_of(20), "last": prompt_of(21)}
    prompts |= {f"last of {length}": prompt_of(21)[:length] for length in LENGTHS}
    prompts |= {"generated": prompt_of(22, 40) + [FORCED] * 80}
    return {
        name: told_of(lm.run(ids, max_tokens=4, capture=watch, sampling=GREEDY, logprobs=True))
        for name, ids in prompts.items()
    }


def told_of(run: pc.Run) -> list:
    return [run.token_ids, [x.hex() for x in run.logprobs], run.cached_tokens]


def shared(lm: pc.LM, watch: list) -> dict[str, object]:
    """How many tokens of a prompt come from the cache, in turn, and whether what is captured then is complete."""
    width, ids, found = lm.model.d_model, prompt_of(500), {}
    asked = {
        "first": ([pc.Add(np.ones(width), pc.resid_post[0], pc.prompt[70], scale=5.0)], []),
        "the same again": ([pc.Add([1.0] * width, "resid_post[0]", "every[70:71]", scale=5.0)], []),
        "another strength": ([pc.Add(np.ones(width), pc.resid_post[0], pc.prompt[70], scale=4.0)], []),
        "another place": ([pc.Add(np.ones(width), pc.resid_post[0], pc.prompt[71], scale=5.0)], []),
        "none": ([], []),
        "none again": ([], []),
        "captured late": ([], [pc.resid_post[2] @ pc.prompt[100:]]),
        "captured everywhere": ([], [pc.resid_post[2]]),
        "edited and captured late": ([pc.Add(np.ones(width), pc.resid_post[0], pc.prompt[70], scale=5.0)],
                                     [pc.resid_post[2] @ pc.prompt[100:]]),
    }  # fmt: skip
    rows = {}
    for name, (program, capture) in asked.items():
        run = lm.run(ids, max_tokens=2, edits=program, capture=[*capture, *watch], sampling=GREEDY, logprobs=True)
        found[name] = run.cached_tokens
        if capture:
            rows[name] = run[pc.resid_post[2]]
            found[f"rows {name}"] = run.positions(pc.resid_post[2])
    late, everywhere, changed = rows.values()
    found["late rows are the same bits"] = bool((late == everywhere[100:LENGTH]).all())
    found["edited rows are others"] = bool((late != changed).any(dim=1).all())
    for program in (asked["first"][0], []):
        run = lm.run(prompt_of(501), max_tokens=1, edits=program, logprobs=True)
    found["no program at all"] = run.cached_tokens
    return found


def start(model: str, kind: str, options: dict[str, Any], environ: dict[str, str]) -> subprocess.Popen:
    """This script, which is of a kind: "edited", an engine that runs everything edited and then unedited, or "fresh",
    one that runs all of it unedited, and then one without our part of the blocks' keys.

    `options`: of the engines, beside `OPTIONS`; "watched" is ours: whether requests without edits capture what they
    generate, so that there is a program in their steps too.
    """
    command = [sys.executable, __file__, model, kind, json.dumps(options)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environ, text=True
    )


def end(process: subprocess.Popen, timeout_s: float) -> dict[str, Any]:
    """What it told. Raises `RuntimeError` with its last complaints."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    if process.returncode != 0:
        raise RuntimeError(err[-3000:])
    return json.loads(out.splitlines()[-1])


def reused(told: dict[str, Any], name: str) -> list[str]:
    """What is wrong with prompts of that kind unedited after edited, which must be as never edited: bit for bit; and
    without our part of the keys they would not be."""
    wrong = [] if set(told["fresh"]) == set(KINDS) else ["not all kinds were run"]
    *ours, cached = told["unedited"][name]
    *fresh, none = told["fresh"][name]
    if ours != fresh:
        wrong.append("not the same bits as never edited")
    *poisoned, _ = told["without keys"][name]
    if name != "last of 64" and poisoned == fresh:  # whose last token is in a block that is always computed
        wrong.append("the same bits without keys")
    if not name.startswith("last") and (none, cached) != (0, {"fuzz": 0}.get(name, BLOCK)):
        wrong.append(f"{none} and {cached} tokens cached")
    return wrong


def again(told: dict[str, Any]) -> list[str]:
    """What is wrong with prompts edited as before: programs that say the same share even edited blocks, and nothing
    changes; they differ from unedited."""
    runs, wrong = told["edited"], []
    for name in KINDS:
        if name == "last":
            continue
        (*first, none), (*second, cached) = runs[f"edited: {name}"], runs[f"edited again: {name}"]
        if first != second:
            wrong.append(f"{name}: not the same bits again")
        if name.startswith("last"):
            right = cached == (int(name.split()[-1]) - 1) // BLOCK * BLOCK
        elif name == "generated":
            right = cached == BLOCK
        elif name == "same run":  # what it reads is computed, from the second block on
            right = (none, cached) == (0, BLOCK)
        else:
            right = (none, cached) == (0, FULL)
            if first == told["fresh"][name][:2]:
                wrong.append(f"{name}: as if unedited")
        if not right:
            wrong.append(f"{name}: {none} and {cached} tokens cached")
    return wrong


def counted(told: dict[str, Any]) -> list[str]:
    """What is wrong with what is shared: below the edit with everyone, the edited blocks with the same program, none
    above a capture."""
    shared, late = told["shared"], list(range(100, LENGTH))
    expected = {
        "first": 0, "the same again": FULL, "another strength": 2 * BLOCK, "another place": 2 * BLOCK,
        "none": 2 * BLOCK, "none again": FULL, "no program at all": 2 * BLOCK,
        "captured late": 3 * BLOCK, "captured everywhere": 0, "edited and captured late": 3 * BLOCK,
        "rows captured late": late, "rows edited and captured late": late,
        "rows captured everywhere": list(range(LENGTH + 1)),
        "late rows are the same bits": True, "edited rows are others": True,
    }  # fmt: skip
    return [f"{name}: {shared[name]}" for name, value in expected.items() if shared[name] != value]


if __name__ == "__main__":
    model, kind, given = sys.argv[1:]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options: dict[str, Any] = {**OPTIONS, **json.loads(given)}
    watch = [pc.embed @ pc.generated] if options.pop("watched", False) else []
    told: dict[str, Any] = {}
    with pc.LM(model, engine="vllm", **options) as lm:
        if kind == "edited":
            told |= {"edited": edited(lm), "unedited": unedited(lm, watch), "shared": shared(lm, watch)}
            status = lm.engine.status()
            told["status"] = {name: status[name] for name in ("runner", "active_graphs") if name in status}
        else:
            told["fresh"] = unedited(lm, watch)
    if kind == "fresh":
        core.block_key = lambda bound, start, end, seen_whole: None
        with pc.LM(model, engine="vllm", **options) as lm:
            edited(lm)
            told["without keys"] = unedited(lm, watch)
    print(json.dumps(told))
